"""This file is the delivery of a decision to the other databases that take part: one database transaction in each.

Delivered twice it is there once, and one that comes so late that the next transaction has begun changes nothing of
that: markers and groups' offsets carry the epoch that the decision raised.  So nobody holds a lock meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from sqlalchemy import Connection

from txnstore.db.cluster.cluster import Cluster
from txnstore.errors import OutcomeUnknown, TxnStoreError, UnknownTopicOrPartition
from txnstore.groups.offsets_elsewhere import finish_offsets_from_elsewhere
from txnstore.log.markers import Marker, write_markers
from txnstore.transactions.undelivered import PendingDelivery

#: How long one database is tried: the others, and whoever waits for the answer, are not to wait for it.
DELIVERY_TIMEOUT_MS: Final = 500


@dataclass(slots=True)
class Delivered:
    """What is durable in its own database, and may be struck off."""

    partition_ids: set[int] = field(default_factory=set)
    group_ids: set[str] = field(default_factory=set)
    error: TxnStoreError | None = None
    """Why the rest is not."""


@dataclass(slots=True)
class _Share:
    """What one database has to do."""

    markers: list[Marker] = field(default_factory=list)
    group_ids: list[str] = field(default_factory=list)


def deliver(cluster: Cluster, coordinator_id: int, left: PendingDelivery) -> Delivered:
    """Write markers and finish offsets wherever they live but in the coordinator's own database; say what was done.

    A partition that the controller has deleted needs no marker any more.
    """
    delivered = Delivered()
    shares = _shares(cluster, left, delivered)
    shares.pop(coordinator_id, None)
    outcomes = cluster.each(
        {
            database_id: partial(_deliver_share, cluster, database_id, left, share)
            for database_id, share in shares.items()
        }
    )
    for database_id, outcome in outcomes.items():
        if isinstance(outcome, TxnStoreError):
            delivered.error = delivered.error or outcome
            continue
        delivered.partition_ids.update(marker.partition_id for marker in shares[database_id].markers)
        delivered.group_ids.update(shares[database_id].group_ids)
    return delivered


def _shares(cluster: Cluster, left: PendingDelivery, delivered: Delivered) -> dict[int, _Share]:
    shares: dict[int, _Share] = {}
    partition_ids = {marker.partition_id for marker in left.markers}
    try:
        leaders = cluster.leaders_of(partition_ids)
        # Asked and not known: the topic was deleted, and its records with it.
        delivered.partition_ids.update(partition_ids - leaders.keys())
    except TxnStoreError as error:
        delivered.error = error
        leaders = cluster.known_leaders(partition_ids)
    for marker in left.markers:
        if marker.partition_id in leaders:
            shares.setdefault(leaders[marker.partition_id], _Share()).markers.append(marker)
    for group_id in left.group_ids:
        shares.setdefault(cluster.coordinator_id_of(group_id), _Share()).group_ids.append(group_id)
    return shares


def _deliver_share(cluster: Cluster, database_id: int, left: PendingDelivery, share: _Share) -> None:
    def work(markers: Sequence[Marker], connection: Connection) -> None:
        write_markers(connection, markers)
        if share.group_ids:
            finish_offsets_from_elsewhere(connection, share.group_ids, left.decided.identity, commit=left.commits)

    def write(markers: Sequence[Marker]) -> None:
        cluster.write_at(database_id, partial(work, markers), wakes_readers=True, retry_timeout_ms=DELIVERY_TIMEOUT_MS)

    try:
        write(share.markers)
    except OutcomeUnknown:
        # What is there is recognised.
        write(share.markers)
    except UnknownTopicOrPartition:
        # Its copies are behind, or the topic was deleted: the controller knows.
        cluster.reconcile(database_id)
        present = _still_there(cluster, [marker.partition_id for marker in share.markers])
        write([marker for marker in share.markers if marker.partition_id in present])


def _still_there(cluster: Cluster, partition_ids: Collection[int]) -> Collection[int]:
    """Return those of the partitions that the controller has; what is remembered of them does not count."""
    return cluster.controller.read(lambda connection: cluster.read_leaders(partition_ids, connection)).keys()

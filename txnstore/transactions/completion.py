"""The completion of what is decided: delivery to every database that takes part, then the end.

Each step is one short database transaction and leaves what is missing in the tables, so whoever comes next goes on
where the last one stopped. Recovery is this same code. Delivered twice, a decision is there once, and one that comes so
late that the next transaction has begun changes nothing of that: markers and groups' offsets carry the epoch that the
decision raised. So nobody holds a lock meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from sqlalchemy import Connection

from txnstore.db.cluster.cluster import Cluster, Locality, several
from txnstore.db.store import Store
from txnstore.errors import (
    InvalidProducerIdMapping,
    NotCoordinator,
    OutcomeUnknown,
    TxnStoreError,
    UnknownTopicOrPartition,
)
from txnstore.groups.offsets import finish_offsets_from_elsewhere
from txnstore.log.append import Marker, write_markers
from txnstore.model import ProducerIdentity
from txnstore.transactions import rows
from txnstore.transactions.locked import LockedTransaction, PendingDelivery
from txnstore.transactions.protocol import DECIDED, TransactionMetadata

#: How long one database is tried: the others, and whoever waits for the answer, are not to wait for it.
DELIVERY_TIMEOUT_MS: Final = 500
_log = logging.getLogger(__name__)


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


def complete_decided(store: Store, transactional_id: str, cluster: Cluster | None = None) -> ProducerIdentity:
    """Deliver the markers of a decided transaction and complete it; return who its producer is then.

    Nothing happens if there is nothing decided.  May be called by anyone, twice, and by two at once.

    Raises:
        InvalidProducerIdMapping: nobody has used the transactional id, or it has expired.
        TxnStoreError: another database that takes part cannot be reached or refuses; all others have their markers.
    """
    others = several(cluster)
    if others is not None:
        left = store.read(lambda connection: _read_undelivered(connection, transactional_id))
        if isinstance(left, PendingDelivery):
            return complete_delivered(store, others, left)
        return left

    def complete(connection: Connection) -> ProducerIdentity:
        # Others may have been here too: the row's lock decides.
        work = LockedTransaction.lock(connection, transactional_id)
        work.finish()
        work.save("completion")
        return work.known.identity

    try:
        return store.write(complete, wakes_readers=True)
    except (UnknownTopicOrPartition, NotCoordinator):
        if several(cluster) is None:
            raise
    # Other databases have joined, and it has heard of them just now.
    return complete_decided(store, transactional_id, cluster)


def complete_delivered(store: Store, cluster: Cluster, left: PendingDelivery) -> ProducerIdentity:
    """Deliver what a decision has left to other databases, and complete it: one database transaction at its own.

    Raises:
        TxnStoreError: one of them cannot be reached or refuses; what was delivered is struck off.
    """
    delivered = deliver(cluster, store.database_id, left)
    if delivered.error is not None and not delivered.partition_ids and not delivered.group_ids:
        # There is nothing to strike off: what waits for a database that is away costs no write at each look.
        row = store.read(lambda connection: rows.read_row(connection, left.decided.transactional_id)).row
        if _is_left(row, left):
            raise delivered.error
        return left.decided.next_identity if row is None else row.identity
    identity = store.write(partial(_strike_off, Locality.of(store, cluster), left, delivered), wakes_readers=True)
    if identity is None:
        assert delivered.error is not None, "something is left although no delivery failed"
        raise delivered.error
    return identity


def complete_if_possible(store: Store, cluster: Cluster | None, transactional_id: str) -> None:
    """Complete what is decided, unless a database that takes part is away: then recovery does it, once it is back."""
    if several(cluster) is None:
        return
    try:
        complete_decided(store, transactional_id, cluster)
    except InvalidProducerIdMapping:
        # It was forgotten meanwhile: there is nothing left to do.
        return
    except TxnStoreError as error:
        _log.warning("the transaction of %.80r is decided; recovery will complete it: %s", transactional_id, error)


def _read_undelivered(connection: Connection, transactional_id: str) -> PendingDelivery | ProducerIdentity:
    row = rows.read_row(connection, transactional_id).row
    if row is None:
        raise InvalidProducerIdMapping
    if row.state not in DECIDED:
        return row.identity
    markers = rows.queued_markers(connection, transactional_id)
    return PendingDelivery(row, markers, rows.groups_of(connection, transactional_id))


def _is_left(row: TransactionMetadata | None, left: PendingDelivery) -> bool:
    """Return whether the transaction is decided and not complete, as it was when `left` was read."""
    return row is not None and row.state in DECIDED and row.identity == left.decided.identity


def _strike_off(
    locality: Locality | None, left: PendingDelivery, delivered: Delivered, connection: Connection
) -> ProducerIdentity | None:
    """Take note of what was delivered, and complete the transaction if that was all; None if it was not."""
    transactional_id = left.decided.transactional_id
    work = LockedTransaction.lock(connection, transactional_id, locality)
    row = work.row
    if not _is_left(row, left):
        # Somebody else has completed it, and it may have gone on since: nothing here is about what comes after.
        return left.decided.next_identity if row is None else row.identity
    rows.strike_off_markers(connection, transactional_id, delivered.partition_ids)
    for group_id in delivered.group_ids:
        rows.forget_group(connection, transactional_id, group_id)
    work.finish()
    work.save("completion")
    return None if work.undelivered is not None else work.known.identity

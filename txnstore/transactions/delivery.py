"""The delivery of what a decision has left to other databases: markers, and the offsets of groups.

As much as belongs to one database is one database transaction there, of however many transactions it is.  Nobody holds
a lock of the coordinator meanwhile; delivered twice, a decision is there once.

A decision is *outrun* where its producer has been with a newer epoch.  Nothing is written with that before the
transaction of the older one is complete, its markers delivered and durable: so whatever it had there has ended, and
what is open there has begun with the newer epoch, which the log shows (else it is damage, and the decision waits).  A
helper that comes late finds it like that, and its decision is not left any more.  Where it is left, its coordinator has
gone back to an older state, in which the transaction was open.  It is over there then, and the decision counts as
delivered: nothing that could be written there would change what has ended.  With the decision the producer id is given
up, for who has it elsewhere has epochs that the coordinator would give out again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from sqlalchemy import Connection, bindparam, select

from txnstore.db.cluster.catalogue import read_deleted
from txnstore.db.cluster.cluster import Cluster, LeftOut
from txnstore.db.identity import check_not_standby
from txnstore.db.schema import partition_heads
from txnstore.db.store import chunks, make_durable
from txnstore.errors import (
    OutcomeUnknown,
    StoreUnavailable,
    TxnStoreError,
    UnknownTopicOrPartition,
)
from txnstore.groups.offsets_from_elsewhere import EndedElsewhere, finish_offsets_from_elsewhere
from txnstore.log.locked_partitions import Marker, write_markers
from txnstore.log.partition_rows import ProducerKey
from txnstore.transactions.protocol import TransactionMetadata, TransactionState

#: How long one database is tried: the others, and the caller, are not to wait for it.
DELIVERY_TIMEOUT_MS: Final = 500

_log: Final = logging.getLogger(__name__)
_HEADS: Final = select(partition_heads.c.partition_id).where(
    partition_heads.c.partition_id.in_(bindparam("partition_ids", expanding=True))
)


@dataclass(frozen=True, slots=True)
class PendingDelivery:
    """The rest of a decision."""

    decided: TransactionMetadata
    """The coordinator's row with the decision."""

    markers: Sequence[Marker]
    """Those that are missing from their partitions."""

    group_ids: Sequence[str]
    """The groups whose offsets are not finished."""

    @property
    def commits(self) -> bool:
        """Whether the transaction was decided to commit."""
        return self.decided.state is TransactionState.PREPARE_COMMIT


@dataclass(slots=True)
class Delivered:
    """What is durable in its own database, and may be struck off."""

    partition_ids: set[int] = field(default_factory=set)
    group_ids: set[str] = field(default_factory=set)
    outrun_partitions: dict[int, bool] = field(default_factory=dict)
    """Those where its producer has gone on, and whether what came after is open there."""

    outrun_groups: dict[str, bool] = field(default_factory=dict)
    """The same of groups."""

    error: TxnStoreError | AssertionError | None = None
    """Why the rest is not; an assertion: a row is damaged."""

    @property
    def is_news(self) -> bool:
        """Whether anything may be struck off."""
        return bool(self.partition_ids or self.group_ids)

    @property
    def is_outrun(self) -> bool:
        """Whether the producer has gone on after the transaction anywhere."""
        return bool(self.outrun_partitions or self.outrun_groups)

    def add(self, share: _Share) -> None:
        """Take note of what was done in one database."""
        self.outrun_partitions.update(share.outrun_partitions)
        self.outrun_groups.update(share.outrun_groups)
        self.partition_ids.update(marker.partition_id for marker in share.markers)
        self.group_ids.update(share.group_ids)

    def keep_outrun(self) -> None:
        """Strike nothing off where it was outrun before all is delivered: who completes it is to find that."""
        self.partition_ids -= self.outrun_partitions.keys()
        self.group_ids -= self.outrun_groups.keys()


def deliver(cluster: Cluster, coordinator_id: int, lefts: Sequence[PendingDelivery]) -> list[Delivered]:
    """Write markers and finish offsets wherever they live but in the coordinator's own database; say what was done.

    What belongs to one database is one database transaction there, however many transactions it is of.  A partition
    that the controller has deleted needs no marker any more; one that it has lost with its last changes does.
    """
    delivered = [Delivered() for _ in lefts]
    shares = _shares(cluster, coordinator_id, lefts, delivered)
    shares.pop(coordinator_id, None)
    outcomes = cluster.each(
        {database_id: partial(_deliver_shares, cluster, database_id, some) for database_id, some in shares.items()}
    )
    for database_id, outcome in outcomes.items():
        some = shares[database_id]
        errors = [outcome] * len(some) if isinstance(outcome, TxnStoreError) else outcome
        for share, error in zip(some, errors, strict=True):
            if error is not None:
                share.delivered.error = share.delivered.error or error
                continue
            share.delivered.add(share)
    for each in delivered:
        if each.error is not None:
            each.keep_outrun()
    return delivered


@dataclass(slots=True)
class _Share:
    """What one database has to do for one transaction."""

    left: PendingDelivery
    delivered: Delivered
    markers: list[Marker] = field(default_factory=list)
    group_ids: list[str] = field(default_factory=list)
    outrun_partitions: dict[int, bool] = field(default_factory=dict)
    outrun_groups: dict[str, bool] = field(default_factory=dict)


def tell_outrun(left: PendingDelivery, delivered: Delivered) -> None:
    """Tell people, of a decision that is complete, where it came to nothing because the transaction was over before."""
    if not delivered.is_outrun:
        return
    decided, outcome = left.decided, "committed" if left.commits else "aborted"
    open_partition_ids = sorted(number for number, is_open in delivered.outrun_partitions.items() if is_open)
    open_group_ids = sorted(group_id for group_id, is_open in delivered.outrun_groups.items() if is_open)
    rest = (
        "a later transaction is open there, which `txnstore transactions find-hanging --abort` ends;"
        if open_partition_ids or open_group_ids
        else "nothing of it is open there;"
    )
    _log.error(
        "the transaction %s of %.80r is %s at its coordinator, but had ended before, perhaps differently, in %s"
        " partitions and %s groups of other databases: its coordinator has lost what came after, as by a backup that"
        " was restored. Its producer is fenced; %s `txnstore transactions list-open` shows what it has open elsewhere,"
        " and what ends that",
        decided.begin_identity,
        decided.transactional_id,
        outcome,
        len(delivered.outrun_partitions),
        len(delivered.outrun_groups),
        rest,
        extra={
            "event": "decision_outrun",
            "transactional_id": decided.transactional_id,
            "partition_ids": sorted(delivered.outrun_partitions),
            "group_ids": sorted(delivered.outrun_groups),
            "open_partition_ids": open_partition_ids,
            "open_group_ids": open_group_ids,
        },
    )


def _shares(
    cluster: Cluster, coordinator_id: int, lefts: Sequence[PendingDelivery], delivered: Sequence[Delivered]
) -> dict[int, list[_Share]]:
    """Return what each database has to do, of the transactions in the order given."""
    partition_ids = {marker.partition_id for left in lefts for marker in left.markers}
    leaders, failed = _leaders(cluster, coordinator_id, partition_ids)
    shares: dict[int, list[_Share]] = {}
    for left, done in zip(lefts, delivered, strict=True):
        own: dict[int, _Share] = {}
        for marker in left.markers:
            leader_id = leaders.get(marker.partition_id)
            if leader_id is not None:
                own.setdefault(leader_id, _Share(left, done)).markers.append(marker)
            elif marker.partition_id in leaders or failed is None:
                # The topic was deleted, and its records with it; or no database has them.
                done.partition_ids.add(marker.partition_id)
            else:
                done.error = failed
        for group_id in left.group_ids:
            own.setdefault(cluster.coordinator_id_of(group_id), _Share(left, done)).group_ids.append(group_id)
        for database_id, share in own.items():
            shares.setdefault(database_id, []).append(share)
    return shares


def _leaders(
    cluster: Cluster, coordinator_id: int, partition_ids: set[int]
) -> tuple[dict[int, int | None], TxnStoreError | None]:
    """Return where partitions live, None of those that were deleted; and why nobody can tell of the rest, if so.

    A controller that has lost its last changes knows neither.  The coordinator's copy may, and the logs do.
    """
    leaders: dict[int, int | None] = {}
    failed = None
    try:
        leaders.update(cluster.leaders_of(partition_ids))
        if unknown := partition_ids - leaders.keys():
            leaders.update(dict.fromkeys(cluster.controller.read(partial(read_deleted, partition_ids=unknown))))
            _check_deleted(cluster, partition_ids - leaders.keys())
    except TxnStoreError as error:
        failed = error
        leaders.update(cluster.known_leaders(partition_ids))
    try:
        if unknown := partition_ids - leaders.keys():
            leaders.update(cluster.own(coordinator_id).read(partial(cluster.known_leaders, unknown)))
        if failed is None and (unknown := partition_ids - leaders.keys()):
            # Also those that have joined since this client looked.
            cluster.refresh()
            left_out: LeftOut = {}
            answers = cluster.read_all(partial(_heads, unknown), left_out, retry_timeout_ms=DELIVERY_TIMEOUT_MS)
            leaders.update((number, store.database_id) for store, numbers in answers for number in numbers)
            for why in left_out.values():
                # Whatever it is: nothing is wrong with the transaction, which waits.
                failed = failed or StoreUnavailable(f"{why}; it may have a partition that the controller does not know")
    except TxnStoreError as error:
        failed = failed or error
    return leaders, failed


def _heads(partition_ids: Collection[int], connection: Connection) -> set[int]:
    """Return which of the partitions have a log in a database."""
    return {
        number
        for some in chunks(list(partition_ids))
        for number in connection.execute(_HEADS, {"partition_ids": some}).scalars()
    }


def _deliver_shares(
    cluster: Cluster, database_id: int, shares: Sequence[_Share]
) -> list[TxnStoreError | AssertionError | None]:
    """Deliver what is one database's; return for each transaction why that was not possible, if it was not."""
    try:
        _deliver_at_once(cluster, database_id, shares)
    except StoreUnavailable:
        raise
    except (TxnStoreError, AssertionError) as error:
        if len(shares) == 1:
            return [error]
        # Of one of them something is damaged: that keeps nothing from the others.
        return [error for share in shares for error in _deliver_shares(cluster, database_id, [share])]
    return [None] * len(shares)


def _deliver_at_once(cluster: Cluster, database_id: int, shares: Sequence[_Share]) -> None:
    markers = [marker for share in shares for marker in share.markers]
    ended = [
        EndedElsewhere(
            share.left.decided.marker_identity, share.group_ids, share.left.commits, share.left.decided.begin_epoch
        )
        for share in shares
        if share.group_ids
    ]

    begun_by = {marker.key: share.left.decided.begin_identity for share in shares for marker in share.markers}

    def work(markers: Sequence[Marker], connection: Connection) -> tuple[dict[ProducerKey, bool], dict[int, bool]]:
        # What is struck off at the coordinator is never told again.
        make_durable(connection)
        outrun = write_markers(connection, markers, begun_by)
        return outrun, finish_offsets_from_elsewhere(connection, ended)

    def write(markers: Sequence[Marker]) -> None:
        outrun, outrun_in_groups = cluster.write_at(
            database_id, partial(work, markers), wakes_readers=True, retry_timeout_ms=DELIVERY_TIMEOUT_MS
        )
        for share in shares:
            share.outrun_partitions = {
                each.partition_id: outrun[each.key] for each in share.markers if each.key in outrun
            }
            is_open = outrun_in_groups.get(share.left.decided.producer_id)
            share.outrun_groups = {} if is_open is None else dict.fromkeys(share.group_ids, is_open)

    try:
        write(markers)
    except OutcomeUnknown:
        # What is there is recognised.
        write(markers)
    except UnknownTopicOrPartition:
        # Its copies are behind, or the topic was deleted, or was lost before anything was written to it.
        cluster.reconcile(database_id)
        present = _still_there(cluster, database_id, {marker.partition_id for marker in markers})
        write([marker for marker in markers if marker.partition_id in present])


def _still_there(cluster: Cluster, database_id: int, partition_ids: set[int]) -> Collection[int]:
    """Return those of a member's partitions that the controller has, or that have a log; not what is remembered."""
    present = cluster.controller.read(lambda connection: cluster.read_leaders(partition_ids, connection)).keys()
    _check_deleted(cluster, partition_ids - present)
    heads = partial(_heads, partition_ids)
    return present | cluster.own(database_id).read(heads, retry_timeout_ms=DELIVERY_TIMEOUT_MS)


def _check_deleted(cluster: Cluster, partition_ids: Collection[int]) -> None:
    """Return if the controller would know of the partitions, if it has not lost them.

    StoreReadOnly if a standby answers for it, which may not have heard of them yet.
    """
    if partition_ids:
        cluster.controller.read(partial(check_not_standby, cluster.controller))

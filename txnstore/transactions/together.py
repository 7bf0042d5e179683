"""Many transactions at once: aborted for their age, or completed, by one database transaction as each by its own.

Whatever is said of them is said once for all: locks, reads and writes come to about as many round trips however many
they are, and one COMMIT waits for the disk.  What they have left to other databases goes there together, too, one
database transaction in each.  What is unusual about one (it has branches; it was decided before this database heard of
a partition of its own) is left to the functions of `transaction`, as is one that somebody is at work on: here nobody
waits for the lock of a transactional id, so a holder of many of them is part of no cycle.  Heads of partitions and
groups come after them, in the order of their ids.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, takewhile
from typing import Any, Final

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    ScalarSelect,
    bindparam,
    delete,
    func,
    insert,
    literal,
    null,
    select,
    union,
    update,
)

from txnstore.db.cluster.cluster import Cluster, several
from txnstore.db.cluster.locality import Locality
from txnstore.db.ddl import Int64, String
from txnstore.db.schema import (
    pending_group_offsets,
    pending_markers,
    transaction_groups,
    transaction_log,
    transaction_partitions,
    transaction_writer_partitions,
    transaction_writers,
    transactions,
)
from txnstore.db.statements import HotStatement, is_listed
from txnstore.db.store import Store, make_durable, must_hit_each, note_change, pause_after_portion, server_now_ms
from txnstore.errors import OutcomeUnknown, StoreDamaged, StoreUnavailable, TxnStoreError
from txnstore.groups.offsets import drop_pending_offsets
from txnstore.log.locked_partitions import Marker, write_markers
from txnstore.log.partition_rows import allocate_producer_id
from txnstore.model import NO_PRODUCER_EPOCH, NO_PRODUCER_ID, ControlType, ProducerIdentity
from txnstore.transactions import protocol, rows
from txnstore.transactions.delivery import Delivered, PendingDelivery, deliver, tell_outrun
from txnstore.transactions.protocol import DECIDED, EPOCH_EXHAUSTED, FenceReason, TransactionMetadata, TransactionState
from txnstore.transactions.transaction import is_left, try_to_complete

_log = logging.getLogger(__name__)
#: What the journal says made the change.
_REASON: Final = "timeout"


def _is_wanted(transactional_id: ColumnElement[str]) -> is_listed:
    return is_listed("of_transactional_ids", transactional_id)


_WANTED: Final = _is_wanted(transactions.c.transactional_id)
# It says of each row what it finds once it has the lock. (SQLite: the whole database transaction holds the write lock.)
_LOCK_FREE: Final = HotStatement(
    select(*rows.ROW, server_now_ms().label("now_ms")).where(_WANTED).with_for_update(skip_locked=True)
)
_NOW_MS: Final = bindparam("new_now_ms", type_=Int64)
_OPEN_FOR, _TIMEOUT_OF, _DETAIL_END = map(literal, protocol.TIMEOUT_DETAIL.split("{}"))
# What `protocol.fence_and_abort` and `protocol.complete` make of a row that has an epoch left.
_ABORT_USUAL: Final = HotStatement(
    update(transactions)
    .where(
        _WANTED,
        transactions.c.state == int(TransactionState.ONGOING),
        transactions.c.start_ms + transactions.c.timeout_ms < _NOW_MS,
        transactions.c.producer_epoch < EPOCH_EXHAUSTED,
    )
    .values(
        state=int(TransactionState.COMPLETE_ABORT),
        producer_epoch=transactions.c.producer_epoch + 1,
        last_producer_epoch=NO_PRODUCER_EPOCH,
        next_producer_id=NO_PRODUCER_ID,
        begin_epoch=NO_PRODUCER_EPOCH,
        last_update_ms=_NOW_MS,
        deadline_ms=null(),
        fence_reason=str(FenceReason.TIMEOUT),
        fence_detail=_OPEN_FOR
        + (_NOW_MS - transactions.c.start_ms).cast(String)
        + _TIMEOUT_OF
        + transactions.c.timeout_ms.cast(String)
        + _DETAIL_END,
    )
)
_JOURNAL_USUAL: Final = HotStatement(
    insert(transaction_log).from_select(list(rows.COPIED), select(*rows.COPIED.values()).where(_WANTED))
)
_ENTRY_OF_USUAL: Final[Mapping[str, Any]] = {
    "of_first_state": int(TransactionState.PREPARE_ABORT),
    "of_reason": _REASON,
    "of_sent_offsets": None,
}
_PARTICIPANTS: Final = HotStatement(rows.select_participants(_is_wanted))


def _count(key: Column[Any], of: Column[Any]) -> ScalarSelect[int]:
    """Return the number of rows of a transaction with a key, by a look into the index of that."""
    return select(func.count()).select_from(key.table).where(key == of).correlate(transactions).scalar_subquery()


_SHARES: Final = HotStatement(
    select(
        transactions.c.transactional_id,
        _count(transaction_partitions.c.transactional_id, transactions.c.transactional_id)
        + _count(transaction_writer_partitions.c.transactional_id, transactions.c.transactional_id)
        + _count(pending_markers.c.transactional_id, transactions.c.transactional_id)
        + _count(pending_group_offsets.c.producer_id, transactions.c.producer_id),
    ).where(_WANTED)
)
_GROUPS: Final = HotStatement(
    select(transaction_groups.c.transactional_id, transaction_groups.c.group_id).where(
        _is_wanted(transaction_groups.c.transactional_id)
    )
)
_READ: Final = HotStatement(select(*rows.ROW).where(_WANTED))
_IS_QUEUED: Final = _is_wanted(pending_markers.c.transactional_id)
_QUEUED: Final = HotStatement(
    select(pending_markers).where(_IS_QUEUED).order_by(pending_markers.c.partition_id, pending_markers.c.producer_id)
)
_WAITING: Final = HotStatement(
    union(
        select(pending_markers.c.transactional_id).where(_IS_QUEUED),
        select(transaction_groups.c.transactional_id).where(_is_wanted(transaction_groups.c.transactional_id)),
    )
)
_ARE_MARKERS: Final = is_listed("markers", pending_markers.c.transactional_id, pending_markers.c.partition_id)
_STRIKE_OFF_MARKERS: Final = delete(pending_markers).where(_ARE_MARKERS)
_ARE_GROUPS: Final = is_listed("groups", transaction_groups.c.transactional_id, transaction_groups.c.group_id)
_STRIKE_OFF_GROUPS: Final = delete(transaction_groups).where(_ARE_GROUPS)
_FORGET_PARTITIONS, _FORGET_GROUPS, _FORGET_WRITER_PARTITIONS, _FORGET_WRITERS = (
    HotStatement(delete(table).where(_is_wanted(table.c.transactional_id)))
    for table in (transaction_partitions, transaction_groups, transaction_writer_partitions, transaction_writers)
)


@dataclass(frozen=True, slots=True)
class TimedOut:
    """What became of transactions that were to be aborted for their age together, by transactional id."""

    aborted: Sequence[str]
    pending: Sequence[str] = ()
    """Those of them that have left something to other databases: they are decided, and not complete."""

    busy: Sequence[str] = ()
    """Somebody is at work on these, or nobody knows them any more."""

    unusual: Sequence[str] = ()
    """These are to be aborted by themselves."""


def read_shares(transactional_ids: Collection[str], connection: Connection) -> dict[str, int]:
    """Return of how many rows beside its own each transaction is: partitions, markers that wait, pending offsets."""
    return dict(map(tuple, _SHARES.rows(connection, _WANTED.parameters(transactional_ids))))


def fitting(transactional_ids: Sequence[str], shares: Mapping[str, int], rows_max: int) -> int:
    """Return how many of the transactions, from the first one on, have about so many rows together; at least one."""
    summed = accumulate(max(1, shares.get(name, 0)) for name in transactional_ids)
    return max(1, sum(1 for _ in takewhile(lambda rows_so_far: rows_so_far <= rows_max, summed)))


def abort_together(transactional_ids: Collection[str], locality: Locality | None, connection: Connection) -> TimedOut:
    """Abort those of the transactions whose time is up; those whose time is not, or that are over, stay as they are.

    Raises:
        TxnStoreError: see `write_markers` and `groups.offsets.drop_pending_offsets`; none is aborted.
    """
    found = {row.transactional_id: row for row in _LOCK_FREE.rows(connection, _WANTED.parameters(transactional_ids))}
    now_ms = next((row.now_ms for row in found.values()), 0)
    late = _read_late(connection, [found[name] for name in transactional_ids if name in found], now_ms)
    unusual = [name for name, each in late.items() if each.has_branches]
    usual = {name: each for name, each in late.items() if not each.has_branches}
    pending = _abort(connection, usual.values(), locality, now_ms)
    return TimedOut(
        tuple(usual),
        pending,
        tuple(name for name in transactional_ids if name not in found),
        tuple(unusual),
    )


@dataclass(slots=True)
class _Late:
    """A transaction whose time is up, and who takes part in it."""

    row: Any
    partition_ids: list[int] = field(default_factory=list)
    """What its own producer has written to."""

    others: list[Any] = field(default_factory=list)
    """The rows of its further writers and branches."""

    group_ids: list[str] = field(default_factory=list)

    @property
    def has_branches(self) -> bool:
        """Whether databases other than this one have a share in it."""
        return bool(self.others) and any(other.is_branch for other in self.others)

    @property
    def is_usual(self) -> bool:
        """Whether all that it leaves is told by its row and its partitions, and its producer has an epoch left."""
        row = self.row
        return not self.others and NO_PRODUCER_EPOCH < row.begin_epoch <= row.producer_epoch < EPOCH_EXHAUSTED


def _read_late(connection: Connection, found: Sequence[Any], now_ms: int) -> dict[str, _Late]:
    late: dict[str, _Late] = {}
    for row in found:
        deadline_ms = protocol.deadline_of(row.state, row.start_ms, row.timeout_ms)
        if deadline_ms is not None and deadline_ms < now_ms:
            late[row.transactional_id] = _Late(row)
    if not late:
        return late
    these = _WANTED.parameters(late)
    for share in _PARTICIPANTS.rows(connection, these):
        each = late[share.transactional_id]
        if share.writer_id is None and not share.is_branch:
            each.partition_ids.append(share.partition_id)
        else:
            each.others.append(share)
    for share in _GROUPS.rows(connection, these):
        late[share.transactional_id].group_ids.append(share.group_id)
    return late


def _abort(connection: Connection, late: Collection[_Late], locality: Locality | None, now_ms: int) -> tuple[str, ...]:
    """Abort them; return the ids of those that are not complete with that."""
    if not late:
        return ()
    work = _Aborts(connection, now_ms)
    if locality is not None:
        numbers = {share.partition_id for each in late for share in each.others} - {None}
        numbers |= {number for each in late for number in each.partition_ids}
        work.partitions_away = locality.partitions_elsewhere(connection, numbers)
        work.groups_away = locality.groups_elsewhere({group_id for each in late for group_id in each.group_ids})
    for each in late:
        if (
            each.is_usual
            and work.partitions_away.isdisjoint(each.partition_ids)
            and work.groups_away.isdisjoint(each.group_ids)
        ):
            work.add_usual(each)
        else:
            work.add(each)
    work.save()
    return tuple(work.queued)


@dataclass(slots=True)
class _Aborts:
    """What aborts write, in the order of locks that everybody keeps; nothing is written before `save`."""

    connection: Connection
    now_ms: int
    partitions_away: set[int] = field(default_factory=set)
    groups_away: set[str] = field(default_factory=set)
    queued: dict[str, list[Marker]] = field(default_factory=dict)
    """What is left to other databases, by transactional id."""

    _markers: list[Marker] = field(default_factory=list)
    _producer_ids: dict[str, list[int]] = field(default_factory=dict)
    _finished_groups: list[tuple[str, str]] = field(default_factory=list)
    _usual: list[str] = field(default_factory=list)
    _changes: list[rows.RowChange] = field(default_factory=list)
    _complete: list[str] = field(default_factory=list)
    _have_groups: bool = False
    _have_writers: bool = False

    def add_usual(self, each: _Late) -> None:
        """Abort one that a statement for all of them aborts."""
        row = each.row
        identity = ProducerIdentity(row.producer_id, row.producer_epoch + 1)
        self._markers += (
            Marker(partition_id, identity, ControlType.ABORT, rows.COORDINATOR_EPOCH)
            for partition_id in sorted(each.partition_ids)
        )
        for group_id in each.group_ids:
            self._producer_ids.setdefault(group_id, []).append(row.producer_id)
            self._have_groups = True
        self._usual.append(row.transactional_id)

    def add(self, each: _Late) -> None:
        """Abort one by the rules."""
        row = rows.metadata_from_row(each.row)
        decided = protocol.fence_and_abort(
            row,
            FenceReason.TIMEOUT,
            protocol.timeout_detail(row, self.now_ms),
            now_ms=self.now_ms,
            allocate=partial(allocate_producer_id, self.connection),
        )
        participants = replace(rows.participants_from(each.others), partition_ids=sorted(each.partition_ids))
        own = rows.markers_of(decided, participants, ())
        away = [marker for marker in own if marker.partition_id in self.partitions_away]
        self._markers += (marker for marker in own if marker.partition_id not in self.partitions_away)
        here = [group_id for group_id in each.group_ids if group_id not in self.groups_away]
        for group_id in here:
            self._producer_ids.setdefault(group_id, []).append(decided.producer_id)
        if away or len(here) < len(each.group_ids):
            self.queued[row.transactional_id] = away
            self._finished_groups += ((row.transactional_id, group_id) for group_id in here)
            self._changes.append(rows.RowChange(row, [decided]))
            return
        self._complete.append(row.transactional_id)
        self._have_groups = self._have_groups or bool(each.group_ids)
        self._have_writers = self._have_writers or bool(participants.has_reported)
        self._changes.append(rows.RowChange(row, [decided, protocol.complete(decided, now_ms=self.now_ms)]))

    def save(self) -> None:
        """Write all of it."""
        connection = self.connection
        # Readers wait for markers and offsets alone.
        note_change(connection)
        if self.queued:
            make_durable(connection)
        write_markers(connection, self._markers)
        drop_pending_offsets(connection, self._producer_ids)
        rows.queue_markers(connection, self.queued)
        if self._finished_groups:
            connection.execute(_STRIKE_OFF_GROUPS, _ARE_GROUPS.parameters(self._finished_groups))
        complete = self._usual + self._complete
        if complete:
            _forget(connection, complete, groups=self._have_groups, writers=self._have_writers)
        if self._changes:
            rows.save_each(connection, self._changes, reason=_REASON)
        if self._usual:
            these = {**_WANTED.parameters(self._usual), **_ENTRY_OF_USUAL, "new_now_ms": self.now_ms}
            for statement in (_ABORT_USUAL, _JOURNAL_USUAL):
                must_hit_each(connection, statement, [these], count=len(self._usual))


def _forget(connection: Connection, transactional_ids: Sequence[str], *, groups: bool, writers: bool) -> None:
    """Remove who took part in transactions that are complete."""
    these = _WANTED.parameters(transactional_ids)
    _FORGET_PARTITIONS.run(connection, these)
    if groups:
        _FORGET_GROUPS.run(connection, these)
    if writers:
        _FORGET_WRITER_PARTITIONS.run(connection, these)
        _FORGET_WRITERS.run(connection, these)


# --- the completion ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Completed:
    """What became of decided transactions that were to be completed together."""

    completed: Sequence[str]
    put_off: Mapping[str, TxnStoreError | AssertionError]
    """Why the others are not complete, by transactional id."""


def complete_together(store: Store, cluster: Cluster | None, transactional_ids: Sequence[str]) -> Completed:
    """Deliver what the decided transactions have left to other databases, and complete them, as each by itself.

    Nothing happens to those that are not decided, or complete meanwhile.  May be called by anyone, twice, and by two at
    once.  One that cannot be completed keeps no other one from it.

    Raises:
        StoreUnavailable: the coordinator's own database cannot be reached.
    """
    others = several(cluster)
    delivered: dict[str, Delivered] = {}
    rest: Collection[str] = transactional_ids
    put_off: dict[str, TxnStoreError | AssertionError]
    if others is not None:
        try:
            left = store.read(partial(_read_pending_deliveries, transactional_ids))
        except StoreDamaged as damage:
            if len(transactional_ids) == 1:
                return Completed((), {transactional_ids[0]: damage})
            # One of them is: that keeps no other one from it.
            each = [complete_together(store, cluster, [name]) for name in transactional_ids]
            put_off = {name: why for one in each for name, why in one.put_off.items()}
            return Completed([name for name in transactional_ids if name not in put_off], put_off)
        delivered = dict(zip(left, deliver(others, store.database_id, list(left.values())), strict=True))
        # What waits for a database that is away costs no write at each look.
        news = {name: each for name, each in delivered.items() if each.error is None or each.is_news}
        rest = _try_to_strike_off(store, left, news) if news else ()
    put_off = {name: each.error for name, each in delivered.items() if each.error is not None}
    if put_off:
        # Others may have completed it meanwhile, and it may have gone on: what came too late for that was refused.
        decided = store.read(partial(_read_decided, put_off))
        put_off = {name: error for name, error in put_off.items() if is_left(decided.get(name), left[name])}
    for name in transactional_ids:
        if name in rest and (name not in delivered or delivered[name].error is None):
            error = try_to_complete(store, cluster, name)
            if error is not None:
                put_off[name] = error
            if store.backend.has_one_writer and len(transactional_ids) > 1:
                # Each is a portion of its own; whoever waits may be slower to wake up than the next one to begin.
                pause_after_portion(0)
    return Completed([name for name in transactional_ids if name not in put_off], put_off)


def _try_to_strike_off(
    store: Store, left: Mapping[str, PendingDelivery], delivered: Mapping[str, Delivered]
) -> Collection[str]:
    try:
        # Nobody waits for it: the markers and offsets, which readers wait for, were delivered before.
        rest, completed = store.write(partial(_strike_off, left, delivered))
    except StoreUnavailable:
        raise
    except (TxnStoreError, AssertionError) as error:
        # Of one of them something is damaged, also so that no rule has a move for it: that keeps no other one from it.
        _log.debug("%s decided transactions could not be completed together: %s", len(delivered), error)
        # What stands all the same nobody finds again: told twice is better than never.
        rest, completed = delivered, delivered if isinstance(error, OutcomeUnknown) else ()
    for name in completed:
        tell_outrun(left[name], delivered[name])
    return rest


def _read_decided(transactional_ids: Collection[str], connection: Connection) -> dict[str, TransactionMetadata]:
    found = map(rows.metadata_from_row, _READ.rows(connection, _WANTED.parameters(transactional_ids)))
    return {row.transactional_id: row for row in found if row.state in DECIDED}


def _read_pending_deliveries(transactional_ids: Collection[str], connection: Connection) -> dict[str, PendingDelivery]:
    these = _WANTED.parameters(transactional_ids)
    decided = _read_decided(transactional_ids, connection)
    markers: dict[str, list[Marker]] = {}
    for found in _QUEUED.rows(connection, these):
        markers.setdefault(found.transactional_id, []).append(rows.queued_marker(found))
    group_ids: dict[str, list[str]] = {}
    for found in _GROUPS.rows(connection, these):
        group_ids.setdefault(found.transactional_id, []).append(found.group_id)
    return {
        name: PendingDelivery(decided[name], markers.get(name, ()), sorted(group_ids.get(name, ())))
        for name in transactional_ids
        if name in decided
    }


def _strike_off(
    left: Mapping[str, PendingDelivery], delivered: Mapping[str, Delivered], connection: Connection
) -> tuple[Collection[str], Collection[str]]:
    """Take note of what was delivered, and complete those of which nothing is left; return the ids of the others.

    Those that somebody is at work on are among them.  Returns also the ids of those that were completed.
    """
    complete: list[str] = []
    found = _LOCK_FREE.rows(connection, _WANTED.parameters(delivered))
    locked = {row.transactional_id: row for row in map(rows.metadata_from_row, found)}
    # Others may have been here too, and it may have gone on since: nothing here is about what comes after.
    ours = [name for name in delivered if name in locked and is_left(locked[name], left[name])]
    if ours:
        markers = [(name, number) for name in ours for number in delivered[name].partition_ids]
        if markers:
            connection.execute(_STRIKE_OFF_MARKERS, _ARE_MARKERS.parameters(markers))
        groups = [(name, group_id) for name in ours for group_id in delivered[name].group_ids]
        if groups:
            connection.execute(_STRIKE_OFF_GROUPS, _ARE_GROUPS.parameters(groups))
        # What others have struck off since it was read is no longer part of what is left.
        waiting = set(_WAITING.values(connection, _WANTED.parameters(ours)))
        complete = [name for name in ours if name not in waiting]
        if complete:
            _forget(connection, complete, groups=False, writers=True)
            now_ms = found[0].now_ms
            allocate = partial(allocate_producer_id, connection)
            changes = [
                rows.RowChange(
                    locked[name],
                    [
                        protocol.complete(
                            locked[name], now_ms=now_ms, outrun_allocate=allocate if delivered[name].is_outrun else None
                        )
                    ],
                )
                for name in complete
            ]
            rows.save_each(connection, changes, reason="completion")
        ours = [name for name in ours if name in waiting]
    return [*(name for name in delivered if name not in locked), *ours], complete

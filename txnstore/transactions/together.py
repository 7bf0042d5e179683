"""Many transactions at once: aborted, or completed, by one database transaction as each by its own.

Whatever is said of them is said once for all: locks, reads and writes come to about as many round trips however many
they are, and one COMMIT waits for the disk.  What they have left to other databases goes there together, too, one
database transaction in each.  What is unusual about one (it has branches; it was decided before this database heard of
a partition of its own) is left to the functions of `transaction`, as is one that somebody is at work on: here nobody
waits for the lock of a transactional id, so a holder of many of them is part of no cycle.  Heads of partitions and
groups come after them, in the order of their ids.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
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
from txnstore.db.ddl import Int16, Int64, String
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
from txnstore.errors import OutcomeUnknown, PermissionDenied, StoreDamaged, StoreUnavailable, TxnStoreError
from txnstore.groups.offsets import drop_pending_offsets
from txnstore.log.locked_partitions import Marker, write_markers
from txnstore.log.partition_rows import allocate_producer_id
from txnstore.model import NO_PRODUCER_EPOCH, NO_PRODUCER_ID, ControlType, ProducerIdentity
from txnstore.transactions import protocol, rows
from txnstore.transactions.delivery import Delivered, PendingDelivery, deliver, tell_outrun
from txnstore.transactions.protocol import (
    DECIDED,
    EPOCH_EXHAUSTED,
    EPOCH_MAX,
    NO_START_MS,
    FenceReason,
    TransactionMetadata,
    TransactionState,
)
from txnstore.transactions.transaction import is_left, try_to_complete

_log = logging.getLogger(__name__)
#: Stores whose role may not look for what transactions hold of groups: it asks once.
_uncounted: Final[weakref.WeakSet[Store]] = weakref.WeakSet()
#: What the journal says made the change.
_COMPLETION: Final = "completion"


def _is_wanted(transactional_id: ColumnElement[str]) -> is_listed:
    return is_listed("of_transactional_ids", transactional_id)


_WANTED: Final = _is_wanted(transactions.c.transactional_id)
# It says of each row what it finds once it has the lock. (SQLite: the whole database transaction holds the write lock.)
_LOCK_FREE: Final = HotStatement(
    select(*rows.ROW, server_now_ms().label("now_ms")).where(_WANTED).with_for_update(skip_locked=True)
)
_NOW_MS: Final = bindparam("new_now_ms", type_=Int64)
_OPEN_FOR, _TIMEOUT_OF, _DETAIL_END = map(literal, protocol.TIMEOUT_DETAIL.split("{}"))


@dataclass(frozen=True, slots=True)
class _Cause:
    """Why transactions are aborted, and the statements that do it where nothing is unusual."""

    fence_reason: FenceReason
    journal_reason: str
    detail_of: Callable[[TransactionMetadata, int], str]
    """What the rules say of one at a time."""

    decide: HotStatement
    """What `protocol.fence_and_abort` makes of a row that has an epoch left."""

    abort: HotStatement
    """And what `protocol.complete` makes of that."""


def _cause(
    fence_reason: FenceReason,
    journal_reason: str,
    detail_of: Callable[[TransactionMetadata, int], str],
    detail: ColumnElement[str],
    *conditions: ColumnElement[bool],
) -> _Cause:
    decide = (
        update(transactions)
        .where(
            _WANTED,
            transactions.c.state == int(TransactionState.ONGOING),
            transactions.c.producer_epoch < EPOCH_EXHAUSTED,
            *conditions,
        )
        .values(
            state=int(TransactionState.PREPARE_ABORT),
            producer_epoch=transactions.c.producer_epoch + 1,
            last_producer_epoch=NO_PRODUCER_EPOCH,
            next_producer_id=NO_PRODUCER_ID,
            last_update_ms=_NOW_MS,
            deadline_ms=null(),
            fence_reason=str(fence_reason),
            fence_detail=detail,
        )
    )
    abort = decide.values(state=int(TransactionState.COMPLETE_ABORT), begin_epoch=NO_PRODUCER_EPOCH)
    return _Cause(fence_reason, journal_reason, detail_of, HotStatement(decide), HotStatement(abort))


_TOO_OLD: Final = _cause(
    FenceReason.TIMEOUT,
    "timeout",
    protocol.timeout_detail,
    _OPEN_FOR
    + (_NOW_MS - transactions.c.start_ms).cast(String)
    + _TIMEOUT_OF
    + transactions.c.timeout_ms.cast(String)
    + _DETAIL_END,
    transactions.c.start_ms + transactions.c.timeout_ms < _NOW_MS,
)
_BY_ADMINISTRATOR: Final = _cause(
    FenceReason.ADMIN,
    "administrator",
    lambda *_: protocol.ADMINISTRATOR_DETAIL,
    literal(protocol.ADMINISTRATOR_DETAIL),
)
# What `protocol.complete` makes of a decided row of which nothing is to be given up; the caller has its lock.
_COMPLETE_USUAL: Final = HotStatement(
    update(transactions)
    .where(
        _WANTED,
        transactions.c.state == bindparam("before_state", type_=Int16),
        transactions.c.next_producer_id == NO_PRODUCER_ID,
    )
    .values(state=bindparam("new_state", type_=Int16), begin_epoch=NO_PRODUCER_EPOCH, last_update_ms=_NOW_MS)
)
_COMPLETE_OF: Final = {
    TransactionState.PREPARE_COMMIT: TransactionState.COMPLETE_COMMIT,
    TransactionState.PREPARE_ABORT: TransactionState.COMPLETE_ABORT,
}
_JOURNAL_USUAL: Final = HotStatement(
    insert(transaction_log).from_select(list(rows.COPIED), select(*rows.COPIED.values()).where(_WANTED))
)
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
class AbortedTogether:
    """What became of transactions that were to be aborted together, by transactional id."""

    aborted: Sequence[str]
    pending: Mapping[str, PendingDelivery] = field(default_factory=dict)
    """What those of them have left to other databases that are decided, and not complete."""

    busy: Sequence[str] = ()
    """Somebody is at work on these, or nobody knows them any more."""

    unusual: Sequence[str] = ()
    """These are to be aborted by themselves."""


def read_shares(transactional_ids: Collection[str], connection: Connection) -> dict[str, int]:
    """Return of how many rows beside its own each transaction is: partitions, markers that wait, pending offsets."""
    return dict(map(tuple, _SHARES.rows(connection, _WANTED.parameters(transactional_ids))))


def shares_of(store: Store, transactional_ids: Sequence[str]) -> Mapping[str, int]:
    """Return of how many rows each of the transactions is; of one alone nobody asks, for it goes as a whole.

    A role that may only produce is not shown what is pending in groups: it aborts by the number of transactions.
    """
    if len(transactional_ids) <= 1 or store in _uncounted:
        return {}
    try:
        return store.read(partial(read_shares, transactional_ids))
    except PermissionDenied:
        _uncounted.add(store)
        return {}


def fitting(transactional_ids: Sequence[str], shares: Mapping[str, int], rows_max: int) -> int:
    """Return how many of the transactions, from the first one on, have about so many rows together; at least one."""
    summed = accumulate(max(1, shares.get(name, 0)) for name in transactional_ids)
    return max(1, sum(1 for _ in takewhile(lambda rows_so_far: rows_so_far <= rows_max, summed)))


def abort_together(
    transactional_ids: Collection[str], locality: Locality | None, connection: Connection
) -> AbortedTogether:
    """Abort those of the transactions whose time is up; those whose time is not, or that are over, stay as they are.

    Raises:
        TxnStoreError: see `write_markers` and `groups.offsets.drop_pending_offsets`; none is aborted.
    """

    def is_late(row: Any, now_ms: int) -> bool:
        deadline_ms = protocol.deadline_of(row.state, row.start_ms, row.timeout_ms)
        return deadline_ms is not None and deadline_ms < now_ms

    return _abort_those(_TOO_OLD, is_late, transactional_ids, locality, connection)


def abort_shown_together(
    shown: Mapping[str, TransactionMetadata], locality: Locality | None, connection: Connection
) -> AbortedTogether:
    """Abort open transactions that an administrator was shown, whatever their age; what has gone on since stays.

    Raises:
        TxnStoreError: as `abort_together`.
    """

    def is_meant(row: Any, _: int) -> bool:
        return is_as_shown(row, shown[row.transactional_id])

    return _abort_those(_BY_ADMINISTRATOR, is_meant, shown, locality, connection)


def is_as_shown(row: Any, shown: TransactionMetadata) -> bool:
    """Return whether the row is open, and still with the transaction that somebody was shown."""
    return row.state == TransactionState.ONGOING and (
        (row.transaction_number, row.producer_id, row.producer_epoch)
        == (shown.transaction_number, shown.producer_id, shown.producer_epoch)
    )


def _abort_those(
    cause: _Cause,
    is_meant: Callable[[Any, int], bool],
    transactional_ids: Collection[str],
    locality: Locality | None,
    connection: Connection,
) -> AbortedTogether:
    found = {row.transactional_id: row for row in _LOCK_FREE.rows(connection, _WANTED.parameters(transactional_ids))}
    now_ms = next((row.now_ms for row in found.values()), 0)
    meant = [found[name] for name in transactional_ids if name in found and is_meant(found[name], now_ms)]
    those = _read_participants(connection, meant) if meant else {}
    unusual = [name for name, each in those.items() if each.has_branches]
    usual = {name: each for name, each in those.items() if not each.has_branches}
    pending = _abort(_Aborts(connection, cause, now_ms), usual.values(), locality) if usual else {}
    return AbortedTogether(
        tuple(usual),
        pending,
        tuple(name for name in transactional_ids if name not in found),
        tuple(unusual),
    )


@dataclass(slots=True)
class _ToAbort:
    """An open transaction that is to be aborted, and who takes part in it."""

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


def _read_participants(connection: Connection, found: Sequence[Any]) -> dict[str, _ToAbort]:
    those = {row.transactional_id: _ToAbort(row) for row in found}
    these = _WANTED.parameters(those)
    for share in _PARTICIPANTS.rows(connection, these):
        each = those[share.transactional_id]
        if share.writer_id is None and not share.is_branch:
            each.partition_ids.append(share.partition_id)
        else:
            each.others.append(share)
    for share in _GROUPS.rows(connection, these):
        those[share.transactional_id].group_ids.append(share.group_id)
    return those


def _abort(work: _Aborts, those: Collection[_ToAbort], locality: Locality | None) -> Mapping[str, PendingDelivery]:
    """Abort them; return what is left of those that are not complete with that."""
    if locality is not None:
        numbers = {share.partition_id for each in those for share in each.others} - {None}
        numbers |= {number for each in those for number in each.partition_ids}
        work.partitions_away = locality.partitions_elsewhere(work.connection, numbers)
        work.groups_away = locality.groups_elsewhere({group_id for each in those for group_id in each.group_ids})
    for each in those:
        if each.is_usual:
            work.add_usual(each)
        else:
            work.add(each)
    work.save()
    return work.queued


@dataclass(slots=True)
class _Aborts:
    """What aborts write, in the order of locks that everybody keeps; nothing is written before `save`."""

    connection: Connection
    cause: _Cause
    now_ms: int
    partitions_away: set[int] = field(default_factory=set)
    groups_away: set[str] = field(default_factory=set)
    queued: dict[str, PendingDelivery] = field(default_factory=dict)
    """What is left to other databases, by transactional id."""

    _markers: list[Marker] = field(default_factory=list)
    _producer_ids: dict[str, list[int]] = field(default_factory=dict)
    _finished_groups: list[tuple[str, str]] = field(default_factory=list)
    _usual: list[str] = field(default_factory=list)
    _usual_away: list[str] = field(default_factory=list)
    _changes: list[rows.RowChange] = field(default_factory=list)
    _complete: list[str] = field(default_factory=list)
    _have_groups: bool = False
    _have_writers: bool = False

    def add_usual(self, each: _ToAbort) -> None:
        """Abort one that a statement for all of them aborts."""
        row = each.row
        identity = ProducerIdentity(row.producer_id, row.producer_epoch + 1)
        markers = [
            Marker(partition_id, identity, ControlType.ABORT, rows.COORDINATOR_EPOCH)
            for partition_id in sorted(each.partition_ids)
        ]
        if self._is_left(each, row.producer_id, markers):
            self._queue(each, self._decide(each), markers)
            self._usual_away.append(row.transactional_id)
        else:
            self._usual.append(row.transactional_id)
            self._have_groups = self._have_groups or bool(each.group_ids)

    def add(self, each: _ToAbort) -> None:
        """Abort one by the rules."""
        row, decided = rows.metadata_from_row(each.row), self._decide(each)
        participants = replace(rows.participants_from(each.others), partition_ids=sorted(each.partition_ids))
        markers = rows.markers_of(decided, participants, ())
        if self._is_left(each, decided.producer_id, markers):
            self._queue(each, decided, markers)
            self._changes.append(rows.RowChange(row, [decided]))
            return
        self._complete.append(row.transactional_id)
        self._have_groups = self._have_groups or bool(each.group_ids)
        self._have_writers = self._have_writers or bool(participants.has_reported)
        self._changes.append(rows.RowChange(row, [decided, protocol.complete(decided, now_ms=self.now_ms)]))

    def _decide(self, each: _ToAbort) -> TransactionMetadata:
        row = rows.metadata_from_row(each.row)
        return protocol.fence_and_abort(
            row,
            self.cause.fence_reason,
            self.cause.detail_of(row, self.now_ms),
            now_ms=self.now_ms,
            allocate=partial(allocate_producer_id, self.connection),
        )

    def _is_left(self, each: _ToAbort, producer_id: int, markers: Sequence[Marker]) -> bool:
        """Do what is to be done here; return whether something is left to other databases."""
        here = [marker for marker in markers if marker.partition_id not in self.partitions_away]
        self._markers += here
        groups_here = [group_id for group_id in each.group_ids if group_id not in self.groups_away]
        for group_id in groups_here:
            self._producer_ids.setdefault(group_id, []).append(producer_id)
        return len(here) < len(markers) or len(groups_here) < len(each.group_ids)

    def _queue(self, each: _ToAbort, decided: TransactionMetadata, markers: Sequence[Marker]) -> None:
        """Leave the rest to other databases."""
        name = each.row.transactional_id
        away = [marker for marker in markers if marker.partition_id in self.partitions_away]
        groups_away = sorted(self.groups_away.intersection(each.group_ids))
        self.queued[name] = PendingDelivery(decided, away, groups_away)
        self._finished_groups += ((name, group_id) for group_id in each.group_ids if group_id not in self.groups_away)

    def save(self) -> None:
        """Write all of it."""
        connection = self.connection
        # Readers wait for markers and offsets alone.
        note_change(connection)
        if self.queued:
            make_durable(connection)
        write_markers(connection, self._markers)
        drop_pending_offsets(connection, self._producer_ids)
        rows.queue_markers(connection, {name: left.markers for name, left in self.queued.items()})
        if self._finished_groups:
            connection.execute(_STRIKE_OFF_GROUPS, _ARE_GROUPS.parameters(self._finished_groups))
        complete = self._usual + self._complete
        if complete:
            _forget(connection, complete, groups=self._have_groups, writers=self._have_writers)
        if self._changes:
            rows.save_each(connection, self._changes, reason=self.cause.journal_reason)
        now = {"new_now_ms": self.now_ms}
        for names, statement in ((self._usual, self.cause.abort), (self._usual_away, self.cause.decide)):
            _change_usual(
                connection,
                statement,
                names,
                now,
                first_state=TransactionState.PREPARE_ABORT,
                reason=self.cause.journal_reason,
            )


def _change_usual(
    connection: Connection,
    statement: HotStatement,
    names: Sequence[str],
    values: Mapping[str, Any],
    *,
    first_state: TransactionState,
    reason: str,
) -> None:
    """Change the rows by one statement, and write into the journal that they have come through `first_state`."""
    if not names:
        return
    these = _WANTED.parameters(names)
    entry = {"of_first_state": int(first_state), "of_reason": reason, "of_sent_offsets": None}
    must_hit_each(connection, statement, [{**these, **values}], count=len(names))
    must_hit_each(connection, _JOURNAL_USUAL, [{**these, **entry}], count=len(names))


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


def complete_together(
    store: Store,
    cluster: Cluster | None,
    transactional_ids: Collection[str],
    known: Mapping[str, PendingDelivery] | None = None,
) -> Completed:
    """Deliver what the decided transactions have left to other databases, and complete them, as each by itself.

    Nothing happens to those that are not decided, or complete meanwhile.  May be called by anyone, twice, and by two at
    once.  One that cannot be completed keeps no other one from it.  Who has just decided them, durably, is `known` to
    know what they have left: it is not read once more.

    Raises:
        StoreUnavailable: the coordinator's own database cannot be reached.
    """
    others = several(cluster)
    delivered: dict[str, Delivered] = {}
    rest: Collection[str] = transactional_ids
    put_off: dict[str, TxnStoreError | AssertionError]
    if others is not None:
        try:
            left = store.read(partial(_read_pending_deliveries, transactional_ids)) if known is None else known
        except StoreDamaged as damage:
            if len(transactional_ids) == 1:
                return Completed((), dict.fromkeys(transactional_ids, damage))
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
    # Elsewhere they are commits in the order in which they were decided here, by the clock.
    return {
        name: PendingDelivery(decided[name], markers.get(name, ()), sorted(group_ids.get(name, ())))
        for name in sorted(
            (name for name in transactional_ids if name in decided), key=lambda name: decided[name].last_update_ms
        )
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
            _save_complete(connection, [locked[name] for name in complete], delivered, found[0].now_ms)
        ours = [name for name in ours if name in waiting]
    return [*(name for name in delivered if name not in locked), *ours], complete


def _save_complete(
    connection: Connection,
    decided: Sequence[TransactionMetadata],
    delivered: Mapping[str, Delivered],
    now_ms: int,
) -> None:
    """Write that they are complete; those about which nothing is unusual by one statement for each outcome."""
    usual: dict[TransactionState, list[str]] = {state: [] for state in _COMPLETE_OF}
    changes: list[rows.RowChange] = []
    for row in decided:
        is_outrun = delivered[row.transactional_id].is_outrun
        if (
            not is_outrun
            and row.next_producer_id == NO_PRODUCER_ID
            and row.start_ms != NO_START_MS
            and row.producer_epoch <= EPOCH_MAX
        ):
            usual[row.state].append(row.transactional_id)
            continue
        allocate = partial(allocate_producer_id, connection) if is_outrun else None
        changes.append(rows.RowChange(row, [protocol.complete(row, now_ms=now_ms, outrun_allocate=allocate)]))
    if changes:
        rows.save_each(connection, changes, reason=_COMPLETION)
    for before, after in _COMPLETE_OF.items():
        values = {"before_state": int(before), "new_state": int(after), "new_now_ms": now_ms}
        _change_usual(connection, _COMPLETE_USUAL, usual[before], values, first_state=after, reason=_COMPLETION)

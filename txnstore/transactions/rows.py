"""The coordinator's rows: locked, read, written and journalled, with who takes part and the markers still missing.

Every one of them changes under the lock of the transactional id's row (`lock_row`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Connection,
    Row,
    and_,
    bindparam,
    delete,
    insert,
    literal,
    null,
    select,
    union_all,
    update,
)
from sqlalchemy.dialects.sqlite import insert as upsert

from txnstore.db.ddl import Flag, Int16, Int64, String
from txnstore.db.schema import (
    pending_markers,
    transaction_branches,
    transaction_groups,
    transaction_log,
    transaction_partitions,
    transaction_writer_partitions,
    transaction_writers,
    transactions,
)
from txnstore.db.statements import HotStatement
from txnstore.db.store import chunks, clock_of, must_hit, must_hit_each, server_now_ms
from txnstore.errors import InvalidRequest, StoreDamaged
from txnstore.log.locked_partitions import Marker
from txnstore.model import ClientProcess, ControlType, ProducerIdentity
from txnstore.transactions.protocol import (
    DECIDED,
    FenceReason,
    TransactionMetadata,
    TransactionState,
    TransactionWriter,
    check_change,
)

_THIS: Final = transactions.c.transactional_id == bindparam("of_transactional_id")
#: Who the producer is, for people: written when it starts, and read by nobody who works.
CLIENT_COLUMNS: Final = ("client_id", "client_host", "client_process_id")
_FENCE_REASONS: Final[dict[str | None, FenceReason | None]] = {None: None} | {str(each): each for each in FenceReason}
#: What `metadata_from_row` takes.
ROW: Final = [column for column in transactions.c if column.name not in CLIENT_COLUMNS]
# Every request of a transactional id takes this lock first and holds it to the end of its database transaction, so they
# follow each other, and Kafka's pending states have no place here. (SQLite: the whole transaction has the write lock.)
_LOCK: Final = HotStatement(select(*ROW, server_now_ms().label("now_ms")).where(_THIS).with_for_update())
_TRY_LOCK: Final = HotStatement(select(transactions.c.transactional_id).where(_THIS).with_for_update(skip_locked=True))
_READ: Final = HotStatement(select(*ROW, server_now_ms().label("now_ms")).where(_THIS))
_NOW: Final = HotStatement(select(server_now_ms()))
# DO NOTHING: of two producers that use a new id at once, the second waits for the first and then locks its row.
_INSERT: Final = (
    upsert(transactions)
    .on_conflict_do_nothing(index_elements=[transactions.c.transactional_id])
    .returning(transactions.c.transactional_id)
)
_CHANGED: Final = (
    "producer_id",
    "previous_producer_id",
    "next_producer_id",
    "producer_epoch",
    "last_producer_epoch",
    "timeout_ms",
    "state",
    "start_ms",
    "last_update_ms",
    "deadline_ms",
    "transaction_number",
    "begin_epoch",
    "fence_reason",
    "fence_detail",
)
_NEW: Final = tuple(f"new_{name}" for name in _CHANGED)
_changed_of: Final = attrgetter(*_CHANGED)
# Compare and set: the lock already keeps others away; that the row is as it was read is asserted all the same.
_UPDATE: Final = HotStatement(
    update(transactions)
    .where(_THIS)
    .where(transactions.c.producer_epoch == bindparam("before_epoch"))
    .where(transactions.c.state == bindparam("before_state"))
    .values(dict(zip(_CHANGED, map(bindparam, _NEW), strict=True))),
    may_be_listed=True,
)
_UPDATE_AT_START: Final = HotStatement(
    _UPDATE.statement.values({name: bindparam(f"new_{name}") for name in CLIENT_COLUMNS})
)
_TOUCH: Final = HotStatement(update(transactions).where(_THIS).values(last_update_ms=bindparam("new_now_ms")))
_DELETE: Final = delete(transactions).where(_THIS)
_JOURNAL: Final = HotStatement(insert(transaction_log), may_be_listed=True)
_JOURNAL_AS: Final = HotStatement(insert(transaction_log).values(entry_id=bindparam("entry_id")))
#: An entry of the journal as a copy of the row, of which nothing has to be known.
COPIED: Final[Mapping[str, Any]] = {
    "transactional_id": transactions.c.transactional_id,
    "transaction_number": transactions.c.transaction_number,
    "producer_id": transactions.c.producer_id,
    "producer_epoch": transactions.c.producer_epoch,
    "state": transactions.c.state,
    "first_state": bindparam("of_first_state", type_=Int16),
    "timeout_ms": transactions.c.timeout_ms,
    "start_ms": transactions.c.start_ms,
    "update_ms": transactions.c.last_update_ms,
    "reason": bindparam("of_reason", type_=String),
    "sent_offsets": bindparam("of_sent_offsets", type_=String),
}
_JOURNAL_ROW: Final = HotStatement(
    insert(transaction_log).from_select(list(COPIED), select(*COPIED.values()).where(_THIS))
)
_JOURNAL_ROW_AS: Final = HotStatement(
    insert(transaction_log).from_select(
        ["entry_id", *COPIED], select(bindparam("entry_id", type_=Int64), *COPIED.values()).where(_THIS)
    )
)
_PARTITIONS: Final = HotStatement(
    select(transaction_partitions.c.partition_id)
    .where(transaction_partitions.c.transactional_id == bindparam("of_transactional_id"))
    .order_by(transaction_partitions.c.partition_id)
)
_GROUPS: Final = HotStatement(
    select(transaction_groups.c.group_id)
    .where(transaction_groups.c.transactional_id == bindparam("of_transactional_id"))
    .order_by(transaction_groups.c.group_id)
)
_INSERT_PARTITIONS: Final = HotStatement(insert(transaction_partitions))
_INSERT_GROUPS: Final = HotStatement(insert(transaction_groups))
_DELETE_PARTITIONS: Final = HotStatement(
    delete(transaction_partitions).where(transaction_partitions.c.transactional_id == bindparam("of_transactional_id"))
)
_DELETE_GROUPS: Final = HotStatement(
    delete(transaction_groups).where(transaction_groups.c.transactional_id == bindparam("of_transactional_id"))
)
_DELETE_GROUP: Final = _DELETE_GROUPS.statement.where(transaction_groups.c.group_id == bindparam("of_group_id"))
_WRITERS_OF_TRANSACTION: Final = transaction_writers.c.transactional_id == bindparam("of_transactional_id")
_THIS_WRITER: Final = _WRITERS_OF_TRANSACTION & (transaction_writers.c.writer_producer_id == bindparam("of_writer_id"))
_INSERT_WRITER: Final = insert(transaction_writers)
_INSERT_WRITER_PARTITIONS: Final = insert(transaction_writer_partitions)
_REPORTED: Final = select(transaction_writers.c.reported).where(_THIS_WRITER)
_REPORT: Final = update(transaction_writers).where(_THIS_WRITER).values(reported=True)


def select_participants(is_wanted: Callable[[ColumnElement[str]], ColumnElement[bool]]) -> CompoundSelect[Any]:
    """Return the statement for who takes part in the transactions whose ids are wanted.

    One for the producer's own partitions (its writer is NULL), the writers with theirs (NULL: none yet) and undecided
    branches: a transaction without further writers and branches is not asked about them in vain.
    """
    return union_all(
        select(
            null().cast(Int64).label("writer_id"),
            literal(True, Flag).label("reported"),
            transaction_partitions.c.partition_id.label("partition_id"),
            literal(False, Flag).label("is_branch"),
            transaction_partitions.c.transactional_id.label("transactional_id"),
        ).where(is_wanted(transaction_partitions.c.transactional_id)),
        select(
            transaction_writers.c.writer_producer_id,
            transaction_writers.c.reported,
            transaction_writer_partitions.c.partition_id,
            literal(False, Flag),
            transaction_writers.c.transactional_id,
        )
        .outerjoin(
            transaction_writer_partitions,
            (transaction_writer_partitions.c.transactional_id == transaction_writers.c.transactional_id)
            & (transaction_writer_partitions.c.writer_producer_id == transaction_writers.c.writer_producer_id),
        )
        .where(is_wanted(transaction_writers.c.transactional_id)),
        select(null(), literal(False, Flag), null(), literal(True, Flag), transaction_branches.c.transactional_id)
        .where(is_wanted(transaction_branches.c.transactional_id))
        .where(transaction_branches.c.outcome.is_(None)),
    )


_PARTICIPANTS: Final = HotStatement(select_participants(lambda column: column == bindparam("of_transactional_id")))
_DELETE_WRITER_PARTITIONS: Final = HotStatement(
    delete(transaction_writer_partitions).where(
        transaction_writer_partitions.c.transactional_id == bindparam("of_transactional_id")
    )
)
_DELETE_WRITERS: Final = HotStatement(delete(transaction_writers).where(_WRITERS_OF_TRANSACTION))
#: There is one coordinator per database and no election: its epoch never changes. Kept for fidelity.
COORDINATOR_EPOCH: Final = 0
_MARKERS_OF_TRANSACTION: Final = pending_markers.c.transactional_id == bindparam("of_transactional_id")
_INSERT_MARKERS: Final = HotStatement(insert(pending_markers), may_be_listed=True)
_QUEUED_MARKERS: Final = (
    select(pending_markers)
    .where(_MARKERS_OF_TRANSACTION)
    .order_by(pending_markers.c.partition_id, pending_markers.c.producer_id)
)
_CLEAR_MARKERS: Final = delete(pending_markers).where(_MARKERS_OF_TRANSACTION)
_STRIKE_OFF_MARKERS: Final = _CLEAR_MARKERS.where(
    pending_markers.c.partition_id.in_(bindparam("partition_ids", expanding=True))
)


@dataclass(frozen=True, slots=True)
class LockedRow:
    """The coordinator's row of a transactional id, locked until the database transaction ends."""

    row: TransactionMetadata | None
    now_ms: int
    """The store's clock when the lock was asked for."""


def lock_row(connection: Connection, transactional_id: str) -> LockedRow:
    """Lock and return the row; None if nobody has used this transactional id, or it has expired."""
    return _found(connection, _LOCK.row(connection, {"of_transactional_id": transactional_id}))


def try_lock(connection: Connection, transactional_id: str) -> bool:
    """Lock the row if nobody has its lock; False if somebody at work on it has, or there is no row."""
    return _TRY_LOCK.row(connection, {"of_transactional_id": transactional_id}) is not None


def read_row(connection: Connection, transactional_id: str) -> LockedRow:
    """Return the row without locking it."""
    return _found(connection, _READ.row(connection, {"of_transactional_id": transactional_id}))


def read_now_ms(connection: Connection) -> int:
    """Return the store's time."""
    clock = clock_of(connection)
    now_ms: int = _NOW.value(connection) if clock is None else clock.now_ms()
    return now_ms


def touch_row(connection: Connection, transactional_id: str, now_ms: int) -> bool:
    """Lock the row, and say that it is used; False if there is none.

    One that then locks it with an older snapshot (REPEATABLE READ, on an enlisted connection) is refused (40001).
    """
    return _TOUCH.run(connection, {"of_transactional_id": transactional_id, "new_now_ms": now_ms}) > 0


def insert_row(connection: Connection, row: TransactionMetadata) -> bool:
    """Insert the row of a new transactional id; False if somebody was first, whose row stays."""
    check_change(None, row)
    return connection.execute(_INSERT, {"transactional_id": row.transactional_id, **_values(row)}).first() is not None


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a producer: with it, the row says which process that is."""

    client: ClientProcess | None
    """None: it does not say."""


def save_row(
    connection: Connection,
    steps: Sequence[TransactionMetadata],
    *,
    before: TransactionMetadata,
    reason: str,
    start: Start | None = None,
    entry_id: int | None = None,
    sent_offsets: str | None = None,
) -> None:
    """Write the last of `steps` over `before`, and each step into the journal; with a `start`, also who starts.

    Steps that follow each other within one database transaction become visible together, so only the last one is
    stored; but each must be a move that the table of states has, and the journal tells of them all.
    """
    started = {} if start is None else client_values(start.client)
    must_hit(
        connection,
        _UPDATE if start is None else _UPDATE_AT_START,
        _checked_values(before, steps) | {f"new_{name}": value for name, value in started.items()},
    )
    journal(connection, steps, reason=reason, entry_id=entry_id, sent_offsets=sent_offsets)


@dataclass(frozen=True, slots=True)
class RowChange:
    """What `save_row` writes."""

    before: TransactionMetadata
    steps: Sequence[TransactionMetadata]


def save_each(connection: Connection, changes: Sequence[RowChange], *, reason: str) -> None:
    """Write at least one change, each of another transactional id."""
    must_hit_each(connection, _UPDATE, [_checked_values(change.before, change.steps) for change in changes])
    journal(connection, [step for change in changes for step in change.steps], reason=reason)


def _checked_values(before: TransactionMetadata, steps: Sequence[TransactionMetadata]) -> dict[str, Any]:
    previous = before
    for step in steps:
        check_change(previous, step)
        previous = step
    return {
        "of_transactional_id": before.transactional_id,
        "before_epoch": before.producer_epoch,
        "before_state": int(before.state),
        **dict(zip(_NEW, _values(steps[-1]).values(), strict=True)),
    }


def client_values(client: ClientProcess | None) -> dict[str, Any]:
    """Return what stands in the columns for who a producer is."""
    values = (None, None, None) if client is None else (client.client_id, client.host, client.process_id)
    return dict(zip(CLIENT_COLUMNS, values, strict=True))


def client_from_row(row: Row[Any]) -> ClientProcess | None:
    """Return who the producer says that it is; None: it does not."""
    if row.client_id is None or row.client_host is None or row.client_process_id is None:
        return None
    return ClientProcess(row.client_id, row.client_host, row.client_process_id)


def delete_row(connection: Connection, row: TransactionMetadata) -> None:
    """Delete the row of a transactional id that has expired; its lock must be held."""
    must_hit(connection, _DELETE, {"of_transactional_id": row.transactional_id})


def partitions_of(connection: Connection, transactional_id: str) -> list[int]:
    """Return the partitions of the open or decided transaction, sorted."""
    return _PARTITIONS.values(connection, {"of_transactional_id": transactional_id})


def groups_of(connection: Connection, transactional_id: str) -> list[str]:
    """Return the groups whose offsets the open or decided transaction holds, sorted."""
    return _GROUPS.values(connection, {"of_transactional_id": transactional_id})


def add_partitions(connection: Connection, transactional_id: str, partition_ids: Iterable[int]) -> None:
    """Enter partitions into the transaction; they must not be in it yet."""
    entries = [
        {"transactional_id": transactional_id, "partition_id": partition_id} for partition_id in sorted(partition_ids)
    ]
    if entries:
        _INSERT_PARTITIONS.run_each(connection, entries)


def add_groups(connection: Connection, transactional_id: str, group_ids: Iterable[str]) -> None:
    """Enter groups into the transaction; they must not be in it yet."""
    entries = [{"transactional_id": transactional_id, "group_id": group_id} for group_id in sorted(group_ids)]
    if entries:
        _INSERT_GROUPS.run_each(connection, entries)


def forget_group(connection: Connection, transactional_id: str, group_id: str) -> None:
    """Remove a group whose offsets are finished from a decided transaction."""
    connection.execute(_DELETE_GROUP, {"of_transactional_id": transactional_id, "of_group_id": group_id})


def forget_participants(connection: Connection, transactional_id: str) -> None:
    """Remove the partitions and groups of a transaction that is complete."""
    this = {"of_transactional_id": transactional_id}
    _DELETE_PARTITIONS.run(connection, this)
    _DELETE_GROUPS.run(connection, this)


def metadata_from_row(row: Row[Any]) -> TransactionMetadata:
    """Return the values of a row of the table.

    Raises:
        StoreDamaged: it holds what this version does not know.
    """
    if row.fence_reason not in _FENCE_REASONS:
        raise StoreDamaged(f"the row of {row.transactional_id[:80]!r} has an unknown fence_reason {row.fence_reason!r}")
    return TransactionMetadata(
        transactional_id=row.transactional_id,
        producer_id=row.producer_id,
        producer_epoch=row.producer_epoch,
        timeout_ms=row.timeout_ms,
        state=TransactionState(row.state),
        last_update_ms=row.last_update_ms,
        previous_producer_id=row.previous_producer_id,
        next_producer_id=row.next_producer_id,
        last_producer_epoch=row.last_producer_epoch,
        start_ms=row.start_ms,
        transaction_number=row.transaction_number,
        begin_epoch=row.begin_epoch,
        fence_reason=_FENCE_REASONS[row.fence_reason],
        fence_detail=row.fence_detail,
    )


def _found(connection: Connection, row: Row[Any] | None) -> LockedRow:
    if row is None:
        return LockedRow(None, read_now_ms(connection))
    return LockedRow(metadata_from_row(row), row.now_ms)


def _values(row: TransactionMetadata) -> dict[str, Any]:
    values = dict(zip(_CHANGED, _changed_of(row), strict=True))
    values["state"] = int(row.state)
    values["fence_reason"] = None if row.fence_reason is None else str(row.fence_reason)
    return values


@dataclass(frozen=True, slots=True)
class Participants:
    """The partitions that a transaction was written to, by whom."""

    partition_ids: Sequence[int]
    """Of the producer that began it."""

    writers: Mapping[int, Sequence[int]]
    """By writer id."""

    has_reported: Mapping[int, bool]
    """By writer id: whether the writer has said that it wrote everything."""

    has_branches: bool = False
    """Whether databases other than this one have a share in it."""

    @property
    def all_partition_ids(self) -> list[int]:
        """Every partition that anybody wrote to, sorted."""
        return sorted({*self.partition_ids, *(number for numbers in self.writers.values() for number in numbers)})


#: Of a transaction that nobody has written to.
NO_PARTICIPANTS: Final = Participants((), {}, {})


def insert_writer(
    connection: Connection, transactional_id: str, identity: ProducerIdentity, client: ClientProcess | None = None
) -> None:
    """Enter a new writer."""
    connection.execute(
        _INSERT_WRITER,
        {
            "transactional_id": transactional_id,
            "writer_producer_id": identity.producer_id,
            "producer_epoch": identity.epoch,
            "reported": False,
            **client_values(client),
        },
    )


def add_writer_partitions(connection: Connection, writer: TransactionWriter, partition_ids: Iterable[int]) -> None:
    """Enter partitions that the writer wrote to for the first time."""
    entries = [
        {
            "transactional_id": writer.transactional_id,
            "writer_producer_id": writer.writer_id,
            "partition_id": partition_id,
        }
        for partition_id in sorted(partition_ids)
    ]
    if entries:
        connection.execute(_INSERT_WRITER_PARTITIONS, entries)


def has_reported(connection: Connection, writer: TransactionWriter) -> bool:
    """Return whether the writer has said that it wrote everything.

    Raises:
        InvalidRequest: nobody with this producer id has joined the transaction.
    """
    reported: bool | None = connection.execute(_REPORTED, _of_writer(writer)).scalar_one_or_none()
    if reported is None:
        raise InvalidRequest(f"writer {writer.writer_id} has not joined the transaction; nothing was written")
    return reported


def set_reported(connection: Connection, writer: TransactionWriter) -> None:
    """Take note that the writer has written everything."""
    must_hit(connection, _REPORT, _of_writer(writer))


def participants_of(connection: Connection, transactional_id: str) -> Participants:
    """Return who has written to what in the open or decided transaction."""
    return participants_from(_PARTICIPANTS.rows(connection, {"of_transactional_id": transactional_id}))


def participants_from(found: Iterable[Any]) -> Participants:
    """Return what rows of `select_participants` say of one transaction."""
    own: list[int] = []
    writers: dict[int, list[int]] = {}
    reported: dict[int, bool] = {}
    has_branches = False
    for row in found:
        if row.is_branch:
            has_branches = True
            continue
        if row.writer_id is None:
            own.append(row.partition_id)
            continue
        reported[row.writer_id] = row.reported
        partition_ids = writers.setdefault(row.writer_id, [])
        if row.partition_id is not None:
            partition_ids.append(row.partition_id)
    # Sorted, whatever plan the database has chosen: the steps of a delivery come in the same order each time.
    by_writer = {number: sorted(found) for number, found in sorted(writers.items())}
    return Participants(sorted(own), by_writer, reported, has_branches)


def forget_writers(connection: Connection, transactional_id: str) -> None:
    """Remove the writers of a transaction that is complete."""
    this = {"of_transactional_id": transactional_id}
    _DELETE_WRITER_PARTITIONS.run(connection, this)
    _DELETE_WRITERS.run(connection, this)


def _of_writer(writer: TransactionWriter) -> dict[str, object]:
    return {"of_transactional_id": writer.transactional_id, "of_writer_id": writer.writer_id}


def marker_of(decided: TransactionMetadata, partition_id: int) -> Marker:
    """Return the marker that ends the records of a decided transaction's own producer in a partition."""
    return Marker(partition_id, decided.marker_identity, outcome_of(decided), COORDINATOR_EPOCH)


def marker_of_writer(decided: TransactionMetadata, partition_id: int, writer_id: int, *, counts: bool) -> Marker:
    """Return the marker that ends the records of a further writer; an abort also if the writer does not count."""
    outcome = outcome_of(decided) if counts else ControlType.ABORT
    return Marker(partition_id, ProducerIdentity(writer_id, decided.marker_identity.epoch), outcome, COORDINATOR_EPOCH)


def queue_markers(connection: Connection, markers_of_ids: Mapping[str, Iterable[Marker]]) -> None:
    """Queue the markers of decided transactions, within the database transaction that holds the decisions."""
    entries = [
        {
            "transactional_id": transactional_id,
            "partition_id": marker.partition_id,
            "producer_id": marker.producer.producer_id,
            "producer_epoch": marker.producer.epoch,
            "outcome": int(marker.control_type),
        }
        for transactional_id, markers in markers_of_ids.items()
        for marker in markers
    ]
    if entries:
        _INSERT_MARKERS.run_each(connection, entries)


def queued_markers(connection: Connection, transactional_id: str) -> list[Marker]:
    """Return the markers that are still missing from their partitions, by partition."""
    return list(map(queued_marker, connection.execute(_QUEUED_MARKERS, {"of_transactional_id": transactional_id})))


def queued_marker(row: Any) -> Marker:
    """Return the marker of a row of those that are queued."""
    identity = ProducerIdentity(row.producer_id, row.producer_epoch)
    return Marker(row.partition_id, identity, ControlType(row.outcome), COORDINATOR_EPOCH)


def strike_off_markers(connection: Connection, transactional_id: str, partition_ids: Collection[int]) -> None:
    """Remove the markers of partitions, which were written in this database transaction or in their own databases."""
    for some in chunks(sorted(partition_ids)):
        connection.execute(_STRIKE_OFF_MARKERS, {"of_transactional_id": transactional_id, "partition_ids": some})


def clear_markers(connection: Connection, transactional_id: str) -> None:
    """Remove all markers of a transaction, which were written in this database transaction."""
    connection.execute(_CLEAR_MARKERS, {"of_transactional_id": transactional_id})


def outcome_of(decided: TransactionMetadata) -> ControlType:
    """Return how a decided transaction ends."""
    return ControlType.COMMIT if decided.state is TransactionState.PREPARE_COMMIT else ControlType.ABORT


def markers_of(decided: TransactionMetadata, participants: Participants, counted: Collection[int]) -> list[Marker]:
    """Return the markers of a decided transaction; of its further writers, only those that are `counted` commit."""
    return [
        *(marker_of(decided, partition_id) for partition_id in participants.partition_ids),
        *(
            marker_of_writer(decided, partition_id, writer_id, counts=writer_id in counted)
            for writer_id, partition_ids in participants.writers.items()
            for partition_id in partition_ids
        ),
    ]


# --- the journal ------------------------------------------------------------------------------------------------------

# A small transaction begins, is decided and is complete within one database transaction. Nobody ever sees it between
# these changes, which differ in the state and in the epoch that the decision raises: so they are one row.
_S = TransactionState
#: By first and last state: what an entry for several changes stands for.
_CHANGES: Final[Mapping[tuple[int, int], tuple[TransactionState, ...]]] = MappingProxyType(
    {
        (path[first], path[last]): path[first : last + 1]
        for path in (
            (_S.ONGOING, _S.PREPARE_COMMIT, _S.COMPLETE_COMMIT),
            (_S.ONGOING, _S.PREPARE_ABORT, _S.COMPLETE_ABORT),
        )
        for first, last in ((0, 1), (0, 2), (1, 2))
    }
)
#: Of an entry: whether one of its changes is a decision.
HOLDS_DECISION: Final = and_(
    transaction_log.c.first_state.in_((int(_S.ONGOING), int(_S.PREPARE_COMMIT), int(_S.PREPARE_ABORT))),
    transaction_log.c.state.not_in((int(_S.EMPTY), int(_S.ONGOING), int(_S.DEAD))),
)
_COMMITS: Final = HotStatement(
    select(transaction_log.c.entry_id, transaction_log.c.transactional_id, transaction_log.c.sent_offsets).where(
        transaction_log.c.entry_id.in_(bindparam("entry_ids", expanding=True))
    )
)
#: What may be told by the next change's entry, by the state after that one.
_TOLD_BY: Final = {changes[1]: changes[0] for changes in _CHANGES.values()}


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One change of a transaction's state."""

    entry_id: int
    """The number of its row, which other changes that were made at once have too."""

    transactional_id: str
    transaction_number: int
    producer_id: int
    producer_epoch: int
    """After the change, as the producer id."""

    state: TransactionState
    timeout_ms: int
    start_ms: int
    update_ms: int
    reason: str
    sent_offsets: str | None = None
    """Of the last change of a row: see `groups.offsets.journal_text`."""


def journal(
    connection: Connection,
    steps: Iterable[TransactionMetadata],
    *,
    reason: str,
    entry_id: int | None = None,
    sent_offsets: str | None = None,
) -> None:
    """Write the steps of one database transaction into the journal, in order; those of one id follow each other.

    With an `entry_id` that is the number of the first entry; it has been drawn, and was not used yet.  The first one
    also tells which offsets the database transaction makes take effect.
    """
    entries: list[dict[str, Any]] = []
    before: TransactionMetadata | None = None
    for step in steps:
        first_state = int(step.state)
        if before is not None and _is_told_by(before, step):
            first_state = entries.pop()["first_state"]
        entries.append(
            {
                "transactional_id": step.transactional_id,
                "transaction_number": step.transaction_number,
                "producer_id": step.producer_id,
                "producer_epoch": step.producer_epoch,
                "state": int(step.state),
                "first_state": first_state,
                "timeout_ms": step.timeout_ms,
                "start_ms": step.start_ms,
                "update_ms": step.last_update_ms,
                "reason": reason,
                "sent_offsets": None,
            }
        )
        before = step
    if sent_offsets is not None:
        entries[0]["sent_offsets"] = sent_offsets
    if entry_id is not None:
        _JOURNAL_AS.run(connection, {"entry_id": entry_id, **entries.pop(0)})
    if entries:
        _JOURNAL.run_each(connection, entries)


def journal_row(
    connection: Connection,
    transactional_id: str,
    *,
    first_state: TransactionState,
    reason: str,
    entry_id: int | None = None,
    sent_offsets: str | None = None,
) -> None:
    """Write that the transaction has gone from this state to that of its row, which says so already.

    The last two are those of `journal`.
    """
    values = {
        "of_transactional_id": transactional_id,
        "of_first_state": int(first_state),
        "of_reason": reason,
        "of_sent_offsets": sent_offsets,
    }
    if entry_id is None:
        must_hit(connection, _JOURNAL_ROW, values)
    else:
        must_hit(connection, _JOURNAL_ROW_AS, {**values, "entry_id": entry_id})


def commits_of(connection: Connection, commit_numbers: Collection[int]) -> list[Any]:
    """Return of commits the number, the transactional id and the offsets; what the journal does not know is left out.

    The columns have their names.
    """
    return [row for some in chunks(sorted(commit_numbers)) for row in _COMMITS.rows(connection, {"entry_ids": some})]


def _is_told_by(before: TransactionMetadata, after: TransactionMetadata) -> bool:
    """Return whether the entry of `after` tells of `before` too: see `changes_of`."""
    raised = int(after.state in DECIDED)
    return (
        _TOLD_BY.get(after.state) is before.state
        and before.producer_id == after.producer_id
        and before.producer_epoch + raised == after.producer_epoch
        and before.transaction_number == after.transaction_number
        and before.timeout_ms == after.timeout_ms
        and before.start_ms == after.start_ms
        and before.last_update_ms == after.last_update_ms
    )


def changes_of(row: Row[Any]) -> Iterator[JournalEntry]:
    """Return the changes that a row of the journal stands for, in order."""
    # What is damaged is shown as it is.
    states = _CHANGES.get((row.first_state, row.state), (_S(row.state),))
    for state in states:
        raised = int(state is _S.ONGOING and len(states) > 1)
        yield JournalEntry(
            entry_id=row.entry_id,
            transactional_id=row.transactional_id,
            transaction_number=row.transaction_number,
            producer_id=row.producer_id,
            producer_epoch=row.producer_epoch - raised,
            state=state,
            timeout_ms=row.timeout_ms,
            start_ms=row.start_ms,
            update_ms=row.update_ms,
            reason=row.reason,
            sent_offsets=row.sent_offsets if state is states[-1] else None,
        )

"""The bounds of a reader: log start, high watermark and last stable offset, and the offset at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Column, ColumnElement, Connection, Select, bindparam, case, cast, func, literal_column, select

from txnstore.db.ddl import Int64
from txnstore.db.schema import finished_transactions, partition_heads, producer_states, record_batches
from txnstore.db.statements import HotStatement
from txnstore.errors import InvalidTimestamp, UnknownTopicOrPartition
from txnstore.log.codec import TIMESTAMP_MS_MAX, decode
from txnstore.log.outbox.rows import OUTBOX_WAITS
from txnstore.model import NO_TIMESTAMP_MS, IsolationLevel

#: Where the oldest open transaction of a partition begins, or NULL: one look into the partial index, however long the
#: log is. It is a comparison because SQLite would prefer the primary key for IS NOT NULL.
FIRST_OPEN: Final = (
    select(func.min(producer_states.c.transaction_first_offset))
    .where(producer_states.c.partition_id == partition_heads.c.partition_id)
    .where(producer_states.c.transaction_first_offset >= 0)
    .correlate(partition_heads)
    .scalar_subquery()
)
# One statement, so one snapshot: the bounds of all partitions belong together, on both databases.
_SELECT_BOUNDS: Final = (
    select(
        partition_heads.c.partition_id,
        partition_heads.c.log_start_offset,
        partition_heads.c.next_offset,
        func.coalesce(FIRST_OPEN, partition_heads.c.next_offset),
    )
    .where(partition_heads.c.partition_id.in_(bindparam("partition_ids", expanding=True)))
    .order_by(partition_heads.c.partition_id)
)
# Readers ask for both in one: a look at the outbox costs an idle consumer nothing of its own.
_BOUNDS_AND_OUTBOX: Final = HotStatement(_SELECT_BOUNDS.add_columns(OUTBOX_WAITS))
_BOUNDS: Final = HotStatement(_SELECT_BOUNDS)


def _first_by_halving(offset: Column[int], time_ms: ColumnElement[int]) -> Select[int]:
    """Return the query of a partition's first row, by its offset, that reaches a time; times are not to fall along it.

    The key finds it: below `low` no row reaches the time, and each step is half as long as the one before.  No index by
    time has to be written for it at each append.
    """
    of_partition = offset.table.c.partition_id == bindparam("of_partition_id")
    halving = select(
        cast(bindparam("from_offset"), Int64).label("low"), cast(bindparam("first_step"), Int64).label("step")
    ).cte("halving", recursive=True)
    probed = (
        select(time_ms)
        .where(of_partition, offset >= halving.c.low + halving.c.step - literal_column("1", Int64))
        .order_by(offset)
        .limit(literal_column("1"))
        .correlate(halving)
        .scalar_subquery()
    )
    halved = halving.union_all(
        select(
            case(
                (bindparam("at_ms") > probed, halving.c.low + halving.c.step),
                # Or there is no row so far on.
                else_=halving.c.low,
            ),
            halving.c.step // literal_column("2", Int64),
        ).where(halving.c.step > literal_column("0", Int64))
    )
    low = select(halved.c.low).where(halved.c.step == literal_column("0", Int64)).scalar_subquery()
    return select(offset).where(of_partition, offset >= low).order_by(offset).limit(1)


# Before the first batch whose running maximum reaches a time none has a record that does, and the maximum never falls.
# Markers do not raise it: their times are the store's, far ahead of records that are said to be old.
_REACHES: Final = HotStatement(
    _first_by_halving(record_batches.c.last_offset, record_batches.c.running_max_timestamp_ms)
)
# The index of transactions leads from marker to marker; those that ended no record are not in it, and matter to nobody.
_MARKER_REACHES: Final = HotStatement(
    _first_by_halving(
        finished_transactions.c.marker_offset,
        select(record_batches.c.max_timestamp_ms)
        .where(record_batches.c.partition_id == finished_transactions.c.partition_id)
        .where(record_batches.c.last_offset == finished_transactions.c.marker_offset)
        .correlate(finished_transactions)
        .scalar_subquery(),
    )
)
# After retention or compaction the maximum may come from a batch that is gone, and whatever was appended at once has
# the same: so the batches' own are asked from there on, one at a time, because each comes with what it carries.
_AT_TIME: Final = (
    select(record_batches)
    .where(record_batches.c.partition_id == bindparam("of_partition_id"))
    .where(record_batches.c.last_offset >= bindparam("from_offset"))
    .where(record_batches.c.last_offset < bindparam("end_offset"))
    .where(record_batches.c.max_timestamp_ms >= bindparam("at_ms"))
    .where(record_batches.c.control_type.is_(None))
    .order_by(record_batches.c.last_offset)
    .limit(1)
)
#: How many batches from the end are looked at one by one, before all are.
_LAST_BATCHES: Final = 100
# What a reader does not reach ends at the end of a batch: the key bounds the range on both sides.
_IN_RANGE: Final = (
    (record_batches.c.partition_id == bindparam("of_partition_id"))
    & (record_batches.c.last_offset >= bindparam("start_offset"))
    & (record_batches.c.last_offset < bindparam("end_offset"))
)
_READABLE: Final = _IN_RANGE & record_batches.c.control_type.is_(None)
_LAST_READABLE: Final = (
    select(record_batches.c.max_timestamp_ms, record_batches.c.running_max_timestamp_ms, record_batches.c.control_type)
    .where(_IN_RANGE)
    .order_by(record_batches.c.last_offset.desc())
    .limit(_LAST_BATCHES)
)
# Walks the partition: records that are gone leave running maxima that no record has.
_LARGEST_TIMESTAMP: Final = select(func.max(record_batches.c.max_timestamp_ms)).where(_READABLE)
_FIRST_WITH_TIMESTAMP: Final = (
    select(record_batches)
    .where(_READABLE, record_batches.c.max_timestamp_ms == bindparam("largest_ms"))
    .order_by(record_batches.c.last_offset)
    .limit(1)
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of one partition's log in one snapshot."""

    partition_id: int
    log_start_offset: int
    """The first offset that can be read."""

    high_watermark: int
    """The offset that the next record will get."""

    last_stable_offset: int
    """The first offset of the oldest open transaction, or the high watermark if none is open.

    Never below the log start: the first records of an open transaction may have been deleted.
    """

    outbox_waits: bool = False
    """Whether rows of the database's outbox wait to become records, if that was asked for."""

    def end(self, isolation: IsolationLevel) -> int:
        """Return the offset that a reader of this isolation level does not reach."""
        return self.last_stable_offset if isolation is IsolationLevel.READ_COMMITTED else self.high_watermark


@dataclass(frozen=True, slots=True)
class OffsetAndTimestamp:
    """A record's place and its timestamp."""

    offset: int
    timestamp_ms: int


def read_bounds(
    connection: Connection, partition_ids: Iterable[int], *, asks_outbox: bool = False
) -> dict[int, Bounds]:
    """Return the bounds of these partitions, all of one snapshot.

    Raises:
        UnknownTopicOrPartition: one of them is not in this database.
    """
    wanted = list(dict.fromkeys(partition_ids))
    statement = _BOUNDS_AND_OUTBOX if asks_outbox else _BOUNDS
    rows = statement.rows(connection, {"partition_ids": wanted})
    bounds = {row[0]: Bounds(row[0], row[1], row[2], max(row[1], row[3]), *map(bool, row[4:])) for row in rows}
    for partition_id in wanted:
        if partition_id not in bounds:
            raise UnknownTopicOrPartition(
                f"there is no partition with id {partition_id} in this database; was its topic deleted?"
            )
    return bounds


def last_stable_offset(connection: Connection, partition_id: int) -> int:
    """Return the partition's last stable offset."""
    return read_bounds(connection, [partition_id])[partition_id].last_stable_offset


def first_reaching(connection: Connection, bounds: Bounds, at_ms: int) -> int | None:
    """Return an offset in the log below which no record has a timestamp from this on; None if no record at all has."""
    return _halve(_REACHES, connection, bounds, at_ms, bounds.log_start_offset)


def first_marker_reaching(connection: Connection, bounds: Bounds, at_ms: int, *, from_offset: int) -> int | None:
    """Return where, from an offset on, the first marker of this time or a later one is; None if there is none.

    Markers have the store's time, in the order of the log: one that stands before an older one counts as that old,
    whatever the store's clock said then.
    """
    return _halve(_MARKER_REACHES, connection, bounds, at_ms, from_offset)


def _halve(statement: HotStatement, connection: Connection, bounds: Bounds, at_ms: int, from_offset: int) -> int | None:
    # With those that follow the first step goes as far as the log.
    first_step = 1 << (bounds.high_watermark - from_offset).bit_length() >> 1
    steps = {"from_offset": from_offset, "first_step": first_step}
    found: int | None = statement.value(connection, {"of_partition_id": bounds.partition_id, "at_ms": at_ms, **steps})
    return found


def offset_for_time(
    connection: Connection, partition_id: int, timestamp_ms: int, isolation: IsolationLevel
) -> OffsetAndTimestamp | None:
    """Return the first record with this timestamp or a later one; None if the reader may see no such record.

    As in Kafka, records of aborted transactions count, but nothing at or past the last stable offset does for a
    reader of committed records.

    Raises:
        InvalidTimestamp: the time is not a whole number that a timestamp could be; before 1970 is before everything.
        UnknownTopicOrPartition: the partition is not in this database.
        CorruptBatch: the batch that holds the record is damaged.
    """
    if type(timestamp_ms) is not int or timestamp_ms > TIMESTAMP_MS_MAX:
        raise InvalidTimestamp(f"a time is a number of milliseconds up to {TIMESTAMP_MS_MAX}")
    bounds = read_bounds(connection, [partition_id])[partition_id]
    parameters = {"of_partition_id": partition_id, "at_ms": max(timestamp_ms, 0), "end_offset": bounds.end(isolation)}
    from_offset = first_reaching(connection, bounds, parameters["at_ms"])
    if from_offset is None:
        return None
    while row := connection.execute(_AT_TIME, {**parameters, "from_offset": from_offset}).one_or_none():
        for offset, record_ms, *_ in decode(row).rows(bounds.log_start_offset):
            if record_ms >= timestamp_ms:
                return OffsetAndTimestamp(offset, record_ms)
        from_offset = row.last_offset + 1
    return None


def offset_of_max_timestamp(
    connection: Connection, partition_id: int, isolation: IsolationLevel
) -> OffsetAndTimestamp | None:
    """Return the first record with the largest timestamp (KIP-734); None if the reader may see no record.

    As in `offset_for_time`, records of aborted transactions count, and nothing past the reader's end does.

    Raises:
        UnknownTopicOrPartition: the partition is not in this database.
        CorruptBatch: the batch that holds the record is damaged.
    """
    bounds = read_bounds(connection, [partition_id])[partition_id]
    parameters = {
        "of_partition_id": partition_id,
        "start_offset": bounds.log_start_offset,
        "end_offset": bounds.end(isolation),
    }
    found: OffsetAndTimestamp | None = None
    while (largest_ms := _largest_timestamp(connection, parameters)) is not None:
        first = first_reaching(connection, bounds, largest_ms) or 0
        from_first = {**parameters, "start_offset": max(first, parameters["start_offset"]), "largest_ms": largest_ms}
        batch = connection.execute(_FIRST_WITH_TIMESTAMP, from_first).one()
        rows = [(timestamp_ms, -offset) for offset, timestamp_ms, *_ in decode(batch).rows(bounds.log_start_offset)]
        # What compaction has left of the first batch may be deleted from its beginning as a whole.
        timestamp_ms, negative_offset = max(rows, default=(NO_TIMESTAMP_MS, 0))
        if rows and (found is None or timestamp_ms > found.timestamp_ms):
            found = OffsetAndTimestamp(-negative_offset, timestamp_ms)
        if timestamp_ms >= largest_ms:
            break
        # The record itself was deleted from the beginning of the first batch: later ones may have a larger one.
        parameters["start_offset"] = batch.last_offset + 1
    return found


def _largest_timestamp(connection: Connection, parameters: Mapping[str, int]) -> int | None:
    """Return the largest timestamp of a batch that can be read; None without such a batch."""
    largest_ms: int | None = None
    rows = connection.execute(_LAST_READABLE, parameters).all()
    for max_ms, running_max_ms, control_type in rows:
        if largest_ms is not None and running_max_ms <= largest_ms:
            # Nothing up to here is above it.
            return largest_ms
        if control_type is None:
            largest_ms = max_ms if largest_ms is None else max(largest_ms, max_ms)
    if len(rows) < _LAST_BATCHES:
        return largest_ms
    found: int | None = connection.execute(_LARGEST_TIMESTAMP, parameters).scalar_one()
    return found

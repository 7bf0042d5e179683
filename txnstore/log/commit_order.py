"""The fetch in commit order: whole transactions at the places of their COMMIT markers, whatever is still open.

A *place* is the offset at which something is delivered: a record outside transactions has its own offset, and all
records of a committed transaction have the offset of its marker in the partition, where they come in their own order.
Aborted ones have no place, and neither has what is open: a reader goes up to the high watermark and waits for nobody.
Below it no place is ever filled later, because a marker is appended like everything else.

A page is read from a stretch of the log with a bounded number of batches, transactions included that have begun a
little before it.  One that began long before its marker, or that a reader stands in, is read by itself, by a walk from
its first record to its marker.  So a page costs the same however long transactions are or stay open.

A transaction of which a part lies below the log start is left out as a whole: half of it is never visible.  A reader
that is in it already is out of range once the log start has passed it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, and_, bindparam, case, func, select

from txnstore.db.ddl import Int64
from txnstore.db.schema import finished_transactions, record_batches
from txnstore.db.statements import HotStatement
from txnstore.errors import OffsetOutOfRange
from txnstore.log.bounds import Bounds, read_bounds
from txnstore.log.codec import RecordBatch, decode
from txnstore.log.fetch import PAGE_BATCHES_MAX, PAGE_BYTES_MAX, PAGE_OFFSETS_MAX, PAGE_RECORDS_MAX, Room, fitting
from txnstore.model import OFFSET_MAX, ControlType

#: How many stored batches a page looks at after its place, and before it for the beginnings of transactions.
STRETCH_BATCHES: Final = 2_000
#: How many batches are looked at in one go for those of a single transaction where the next offsets had none of it,
#: and how often.
WALK_BATCHES: Final = 10_000
WALKS_MAX: Final = 10
#: Batches are asked for by so many keys at once.
_KEYS_MAX: Final = 512


class CommitPosition(NamedTuple):
    """Where a reader stands in commit order; what comes next for it is there or after it."""

    place: int
    offset_in_transaction: int = 0
    """The offset of the next record of the transaction at that place; 0: all of it, or there is none."""


@dataclass(frozen=True, slots=True)
class PlacedBatch:
    """A batch on its way to a reader."""

    batch: RecordBatch
    """It may begin before `from_offset`."""

    from_offset: int
    """The offset of the first record that the reader wants of it."""

    marker_offset: int | None
    """Where its transaction was committed; None outside transactions."""

    start: CommitPosition
    """The reader's position before its first record."""

    commit_number: int
    """That of its commit, see `partition_rows`."""


@dataclass(frozen=True, slots=True)
class CommitPage:
    """What a reader gets of one partition, in commit order."""

    bounds: Bounds
    batches: tuple[PlacedBatch, ...]
    next_position: CommitPosition


_OF_PARTITION: Final = record_batches.c.partition_id == bindparam("of_partition_id")
_RECORDS: Final = and_(
    _OF_PARTITION,
    record_batches.c.last_offset >= bindparam("from_offset"),
    # Where a stretch ends a batch begins, or the log ends.
    record_batches.c.last_offset < bindparam("end_offset"),
    record_batches.c.control_type.is_(None),
)
#: The beginning of the batch that comes so many batches after an offset, and of the one so many before it.
_AHEAD: Final = HotStatement(
    select(record_batches.c.base_offset)
    .where(_OF_PARTITION, record_batches.c.last_offset >= bindparam("from_offset"))
    .order_by(record_batches.c.last_offset)
    .limit(1)
    .offset(bindparam("batches"))
)
#: The batch in which an offset lies, or the one after it.
_AT: Final = HotStatement(
    select(record_batches.c.base_offset, record_batches.c.last_offset)
    .where(_OF_PARTITION, record_batches.c.last_offset >= bindparam("from_offset"))
    .order_by(record_batches.c.last_offset)
    .limit(1)
)
_BEHIND: Final = HotStatement(
    select(record_batches.c.base_offset)
    .where(_OF_PARTITION, record_batches.c.last_offset < bindparam("before_offset"))
    .order_by(record_batches.c.last_offset.desc())
    .limit(1)
    .offset(bindparam("batches"))
)
_IS_COMMITTED: Final = and_(
    finished_transactions.c.outcome == int(ControlType.COMMIT),
    finished_transactions.c.first_offset >= bindparam("log_start_offset"),
)
#: The transactions that end in a stretch and have begun before it.
_BEGUN_BEFORE: Final = HotStatement(
    select(finished_transactions.c.marker_offset, finished_transactions.c.first_offset)
    .where(
        finished_transactions.c.partition_id == bindparam("of_partition_id"),
        finished_transactions.c.marker_offset >= bindparam("from_place"),
        finished_transactions.c.marker_offset < bindparam("end_offset"),
        finished_transactions.c.first_offset < bindparam("from_place"),
        _IS_COMMITTED,
    )
    .order_by(finished_transactions.c.marker_offset)
)
_FIRST_COMMITTED: Final = select(func.min(finished_transactions.c.first_offset)).where(
    finished_transactions.c.partition_id == bindparam("of_partition_id"),
    finished_transactions.c.marker_offset >= bindparam("from_place"),
    finished_transactions.c.outcome == int(ControlType.COMMIT),
)
_FIRST_CUT: Final = (
    select(finished_transactions.c.marker_offset, finished_transactions.c.first_offset)
    .where(
        finished_transactions.c.partition_id == bindparam("of_partition_id"),
        finished_transactions.c.marker_offset >= bindparam("from_place"),
        finished_transactions.c.marker_offset < bindparam("end_place"),
        finished_transactions.c.outcome == int(ControlType.COMMIT),
        finished_transactions.c.first_offset >= bindparam("from_offset"),
        finished_transactions.c.first_offset < bindparam("log_start_offset"),
    )
    .order_by(finished_transactions.c.marker_offset)
    .limit(1)
)
_TRANSACTION: Final = HotStatement(
    select(
        finished_transactions.c.marker_offset,
        finished_transactions.c.first_offset,
        finished_transactions.c.producer_id,
        finished_transactions.c.producer_epoch,
        finished_transactions.c.commit_number,
    ).where(
        finished_transactions.c.partition_id == bindparam("of_partition_id"),
        finished_transactions.c.marker_offset == bindparam("of_marker_offset"),
        finished_transactions.c.outcome == int(ControlType.COMMIT),
    )
)
_MARKER_OFFSET: Final = (
    select(finished_transactions.c.marker_offset)
    .where(
        finished_transactions.c.partition_id == record_batches.c.partition_id,
        finished_transactions.c.producer_id == record_batches.c.producer_id,
        finished_transactions.c.producer_epoch == record_batches.c.producer_epoch,
        _IS_COMMITTED,
    )
    .correlate(record_batches)
    .scalar_subquery()
)
# The limit is never reached: with it no database takes the query apart, and each batch is asked for its place once.
_PLACES: Final = (
    select(
        record_batches.c.last_offset,
        record_batches.c.base_offset,
        record_batches.c.record_count,
        record_batches.c.size_bytes,
        record_batches.c.commit_number.label("plain_number"),
        record_batches.c.is_transactional,
        case((record_batches.c.is_transactional, _MARKER_OFFSET), else_=record_batches.c.last_offset).label("place"),
    )
    .where(_RECORDS)
    .order_by(record_batches.c.last_offset)
    .limit(bindparam("stretch_max", type_=Int64))
    .subquery("stretch")
)
_CHOSEN: Final = (
    select(_PLACES)
    .where(_PLACES.c.place >= bindparam("from_place"), _PLACES.c.place < bindparam("end_place"))
    .order_by(_PLACES.c.place, _PLACES.c.last_offset)
    .limit(bindparam("batches_max"))
    .subquery("chosen")
)
_COMMIT_NUMBER: Final = (
    select(finished_transactions.c.commit_number)
    .where(
        finished_transactions.c.partition_id == bindparam("of_partition_id"),
        finished_transactions.c.marker_offset == _CHOSEN.c.place,
    )
    .correlate(_CHOSEN)
    .scalar_subquery()
)
_SIZES_BY_PLACE: Final = HotStatement(
    select(
        *(column for column in _CHOSEN.c if column is not _CHOSEN.c.plain_number),
        case((_CHOSEN.c.is_transactional, _COMMIT_NUMBER), else_=_CHOSEN.c.plain_number).label("commit_number"),
    ).order_by(_CHOSEN.c.place, _CHOSEN.c.last_offset)
)
_SIZES_OF_TRANSACTION: Final = HotStatement(
    select(
        record_batches.c.last_offset,
        record_batches.c.base_offset,
        record_batches.c.record_count,
        record_batches.c.size_bytes,
        record_batches.c.is_transactional,
        bindparam("of_marker_offset", type_=Int64).label("place"),
        bindparam("of_commit_number", type_=Int64).label("commit_number"),
    )
    .where(
        _RECORDS,
        record_batches.c.producer_id == bindparam("of_producer_id"),
        record_batches.c.producer_epoch == bindparam("of_producer_epoch"),
    )
    .order_by(record_batches.c.last_offset)
    .limit(bindparam("batches_max"))
)
_BATCHES: Final = HotStatement(
    select(record_batches)
    .where(_OF_PARTITION, record_batches.c.last_offset.in_(bindparam("last_offsets", expanding=True)))
    .execution_options(binary_rows=True)
)


# Backwards along the key, over those that were aborted.
_LAST_COMMITTED: Final = HotStatement(
    select(finished_transactions.c.commit_number)
    .where(
        finished_transactions.c.partition_id == bindparam("of_partition_id"),
        finished_transactions.c.marker_offset < bindparam("before_offset"),
        finished_transactions.c.commit_number.is_not(None),
    )
    .order_by(finished_transactions.c.marker_offset.desc())
    .limit(1)
)


def last_commit_number(connection: Connection, partition_id: int, position: CommitPosition) -> int | None:
    """Return the number of the last transaction of which something lies behind a reader at this position, if any."""
    before_offset = position.place + (position.offset_in_transaction > 0)
    of = {"of_partition_id": partition_id, "before_offset": before_offset}
    number: int | None = _LAST_COMMITTED.value(connection, of)
    return number


def first_unread_offset(connection: Connection, partition_id: int, place: int) -> int:
    """Return the offset below which a reader at this place has read everything that is committed."""
    of = {"of_partition_id": partition_id, "from_place": place}
    first: int | None = connection.execute(_FIRST_COMMITTED, of).scalar_one()
    return place if first is None else min(place, first)


@dataclass(frozen=True, slots=True)
class CutTransaction:
    """A committed transaction that does not come: a part of it lies below the log start."""

    place: int
    first_offset: int


def first_cut(connection: Connection, bounds: Bounds, places: range, from_offset: int) -> CutTransaction | None:
    """Return the first transaction that does not come at these places, of those that begin at `from_offset` or later.

    None if all of them come.
    """
    of = {
        "of_partition_id": bounds.partition_id,
        "from_place": places.start,
        "end_place": places.stop,
        "from_offset": from_offset,
        "log_start_offset": bounds.log_start_offset,
    }
    row = connection.execute(_FIRST_CUT, of).one_or_none()
    return None if row is None else CutTransaction(row.marker_offset, row.first_offset)


def as_begun(connection: Connection, partition_id: int, position: CommitPosition) -> CommitPosition:
    """Return the same position, at the beginning of its place unless a part of a transaction there is behind it.

    Without it nobody can tell whether a reader at a deleted record has begun the transaction.
    """
    if position.offset_in_transaction == 0:
        return position
    transaction = _TRANSACTION.row(connection, {"of_partition_id": partition_id, "of_marker_offset": position.place})
    if transaction is None or position.offset_in_transaction <= transaction.first_offset:
        return CommitPosition(position.place)
    return position


def fetch_in_commit_order(
    connection: Connection,
    positions: Mapping[int, CommitPosition],
    *,
    records_max: int = PAGE_RECORDS_MAX,
    bytes_max: int = PAGE_BYTES_MAX,
    end_places: Mapping[int, int] = MappingProxyType({}),
    asks_outbox: bool = False,
) -> dict[int, CommitPage]:
    """Return a page of each partition from its position on, all of one snapshot; the limits are those of `fetch`.

    A page may be empty although there is more to read, if its next position has moved.  It has nothing at or after
    the partition's place in `end_places`, if it is there, but for the rest of a batch outside transactions.

    Raises:
        UnknownTopicOrPartition: a partition is not in this database.
        OffsetOutOfRange: a place lies before the log's start or past its end, or the log start has passed the reader
            within a transaction.
        CorruptBatch: a stored batch is damaged.
    """
    pages: dict[int, CommitPage] = {}
    room = Room(records_max, bytes_max)
    for partition_id, bounds in read_bounds(connection, positions, asks_outbox=asks_outbox).items():
        position = positions[partition_id]
        if not bounds.log_start_offset <= position.place <= bounds.high_watermark:
            raise OffsetOutOfRange(
                f"partition id {partition_id}: place {position.place} is not within {bounds.log_start_offset} to"
                f" {bounds.high_watermark}"
            )
        page = CommitPage(bounds, (), position)
        if room.records > 0 and room.size_bytes > 0:
            page = _Reading(connection, bounds, room).page(position, end_places.get(partition_id, OFFSET_MAX))
        room = Room(
            room.records - sum(placed.batch.record_count for placed in page.batches),
            room.size_bytes - sum(placed.batch.size_bytes for placed in page.batches),
        )
        pages[partition_id] = page
    return pages


class _Reading:
    """One page of one partition."""

    def __init__(self, connection: Connection, bounds: Bounds, room: Room) -> None:
        self._connection = connection
        self._bounds = bounds
        self._room = room
        # No batch has less than one record.
        self._batches_max = min(PAGE_BATCHES_MAX, room.records)
        self._of = {"of_partition_id": bounds.partition_id, "log_start_offset": bounds.log_start_offset}

    def page(self, position: CommitPosition, end_place: int) -> CommitPage:
        """Return the page that begins at this position and ends at the place, or after the batch in which it lies."""
        if position.offset_in_transaction > 0:
            transaction = self._transaction(position.place)
            if transaction is not None and self._is_wanted(transaction, position.offset_in_transaction):
                return self._walk(transaction, position.offset_in_transaction)
            position = CommitPosition(position.place)
        place, end_offset = position.place, min(end_place, self._bounds.high_watermark)
        if place >= end_offset:
            return self._empty(place)
        end_offset = self._stretch_end(place, self._whole_batch(end_offset))
        from_offset, long_one = place, None
        begun_before = _BEGUN_BEFORE.rows(self._connection, {**self._of, "from_place": place, "end_offset": end_offset})
        if begun_before:
            from_offset, long_one = self._reach(place, begun_before)
        end_place = end_offset if long_one is None else long_one
        sizes = _SIZES_BY_PLACE.rows(
            self._connection,
            {
                **self._of,
                "from_offset": from_offset,
                "end_offset": end_offset,
                "from_place": place,
                "end_place": end_place,
                "stretch_max": 2 * STRETCH_BATCHES + 1,
                "batches_max": self._batches_max,
            },
        )
        if sizes or long_one is None:
            return self._filled(sizes, position, CommitPosition(end_place))
        transaction = self._transaction(long_one)
        assert transaction is not None, "it was there in the same snapshot"
        return self._walk(transaction, 0)

    def _reach(self, place: int, begun_before: Sequence[Any]) -> tuple[int, int | None]:
        """Return from where on batches are looked at, and the first marker whose transaction began before that."""
        from_offset: int = min(row.first_offset for row in begun_before)
        if place - from_offset <= STRETCH_BATCHES:
            return from_offset, None
        before = {**self._of, "before_offset": place, "batches": STRETCH_BATCHES - 1}
        farthest = _BEHIND.value(self._connection, before) or 0
        long_one = next((row.marker_offset for row in begun_before if row.first_offset < farthest), None)
        short = [row.first_offset for row in begun_before if long_one is None or row.marker_offset < long_one]
        return min(short, default=place), long_one

    def _whole_batch(self, end_offset: int) -> int:
        """Return the same offset, or the end of the batch within which it lies."""
        if end_offset == self._bounds.high_watermark:
            return end_offset
        batch = _AT.row(self._connection, {**self._of, "from_offset": end_offset})
        return batch.last_offset + 1 if batch is not None and batch.base_offset < end_offset else end_offset

    def _stretch_end(self, place: int, end_offset: int) -> int:
        """Return where the stretch ends that begins at a place: few batches, and no more offsets than they hold."""
        if end_offset - place > PAGE_OFFSETS_MAX:
            end_offset = self._ahead(place + PAGE_OFFSETS_MAX, 1, end_offset)
        return end_offset if end_offset - place <= STRETCH_BATCHES else self._ahead(place, STRETCH_BATCHES, end_offset)

    def _ahead(self, offset: int, batches: int, end_offset: int) -> int:
        """Return where the batch begins that comes so many batches after an offset, `end_offset` at most."""
        found = _AHEAD.value(self._connection, {**self._of, "from_offset": offset, "batches": batches})
        return end_offset if found is None else min(found, end_offset)

    def _transaction(self, marker_offset: int) -> Any:
        """Return the transaction that was committed there; None if none was."""
        return _TRANSACTION.row(self._connection, {**self._of, "of_marker_offset": marker_offset})

    def _is_wanted(self, transaction: Any, offset: int) -> bool:
        """Return whether the transaction is read from this offset on; one that is no longer whole is not begun.

        OffsetOutOfRange where the reader has begun it, and what comes next is deleted.
        """
        first_offset: int = transaction.first_offset
        log_start_offset = self._bounds.log_start_offset
        if first_offset < offset < log_start_offset:
            raise OffsetOutOfRange(
                f"partition id {self._bounds.partition_id}: offset {offset} of the transaction at place"
                f" {transaction.marker_offset} lies before the log start {log_start_offset}"
            )
        return offset > first_offset or first_offset >= log_start_offset

    def _walk(self, transaction: Any, offset: int) -> CommitPage:
        """Return a page of one transaction, from this offset on."""
        place: int = transaction.marker_offset
        start = CommitPosition(place, offset)
        offset = max(offset, transaction.first_offset)
        end_offset = place
        if place - offset > PAGE_OFFSETS_MAX:
            end_offset = self._ahead(offset + PAGE_OFFSETS_MAX, 1, place)
        for _ in range(WALKS_MAX):
            sizes = _SIZES_OF_TRANSACTION.rows(
                self._connection,
                {
                    "of_partition_id": self._bounds.partition_id,
                    "of_marker_offset": place,
                    "of_producer_id": transaction.producer_id,
                    "of_producer_epoch": transaction.producer_epoch,
                    "of_commit_number": transaction.commit_number,
                    "from_offset": offset,
                    "end_offset": end_offset,
                    "batches_max": self._batches_max,
                },
            )
            if sizes:
                is_rest = end_offset >= place
                return self._filled(sizes, start, CommitPosition(place + 1) if is_rest else _behind(sizes[-1]))
            if end_offset >= place:
                return self._empty(place + 1)
            offset, end_offset = end_offset, self._ahead(end_offset, WALK_BATCHES, place)
        return CommitPage(self._bounds, (), CommitPosition(place, offset))

    def _empty(self, place: int) -> CommitPage:
        return CommitPage(self._bounds, (), CommitPosition(place))

    def _filled(self, sizes: Sequence[Any], start: CommitPosition, behind: CommitPosition) -> CommitPage:
        """Return the page with those of the batches that fit; `behind` all of them the reader goes on there."""
        count, is_full = fitting(sizes, self._room)
        chosen = sizes[:count]
        if chosen and (is_full or count == self._batches_max):
            behind = _behind(chosen[-1])
        batches = self._batches([row.last_offset for row in chosen])
        return CommitPage(self._bounds, in_place(chosen, batches, start), behind)

    def _batches(self, last_offsets: Sequence[int]) -> dict[int, RecordBatch]:
        """Return the batches that end there."""
        batches: dict[int, RecordBatch] = {}
        for first in range(0, len(last_offsets), _KEYS_MAX):
            keys = list(last_offsets[first : first + _KEYS_MAX])
            # Few lengths, so few texts: a statement is kept for each.
            keys += keys[-1:] * ((1 << (len(keys) - 1).bit_length()) - len(keys))
            rows = _BATCHES.rows(self._connection, {"of_partition_id": self._bounds.partition_id, "last_offsets": keys})
            batches.update((row.last_offset, decode(row)) for row in rows)
        return batches


def in_place(rows: Sequence[Any], batches: Mapping[int, RecordBatch], start: CommitPosition) -> tuple[PlacedBatch, ...]:
    """Return the batches of these rows, which are in order of delivery, for a reader at this position."""
    placed: list[PlacedBatch] = []
    for row in rows:
        batch = batches[row.last_offset]
        if not row.is_transactional:
            # The first one may begin before the place that is asked for.
            start = CommitPosition(max(row.base_offset, start.place))
            placed.append(PlacedBatch(batch, start.place, None, start, row.commit_number))
            continue
        if row.place != start.place:
            start = CommitPosition(row.place)
        from_offset = max(row.base_offset, start.offset_in_transaction)
        placed.append(PlacedBatch(batch, from_offset, row.place, start, row.commit_number))
        start = CommitPosition(row.place, row.last_offset + 1)
    return tuple(placed)


def _behind(row: Any) -> CommitPosition:
    """Return the position after a batch."""
    after = row.last_offset + 1
    return CommitPosition(row.place, after) if row.is_transactional else CommitPosition(after)

"""The fetch: what a reader gets from a position on, without markers and aborted records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from sqlalchemy import Connection, and_, bindparam, func, not_, or_, select

from txnstore.db.schema import finished_transactions, record_batches
from txnstore.db.statements import HotStatement
from txnstore.errors import OffsetOutOfRange
from txnstore.log.bounds import Bounds, read_bounds
from txnstore.log.codec import RecordBatch, decode
from txnstore.model import OFFSET_MAX, ControlType, IsolationLevel

#: The bounds of a page; at least one batch comes, however large, so that a reader gets on.
PAGE_RECORDS_MAX: Final = 40_000
PAGE_BYTES_MAX: Final = 8 * 1024 * 1024
#: How many batches a page holds.
PAGE_BATCHES_MAX: Final = 2_000
#: How many offsets a page looks at: a few markers and aborted records cost a reader no page of its own, a million do.
PAGE_OFFSETS_MAX: Final = 50_000


@dataclass(frozen=True, slots=True)
class Page:
    """What a reader gets of one partition."""

    bounds: Bounds
    batches: tuple[RecordBatch, ...]
    """Batches with records for the reader; the first one may begin before the position it asked for."""

    next_offset: int
    """Where to go on: after the last batch, or after whatever was skipped beyond it."""


@dataclass(frozen=True, slots=True)
class Room:
    """How much still fits a page."""

    records: int
    size_bytes: int


_behind: Final = record_batches.alias("behind")
# The batch in or after which the range ends. With it the key bounds the range on both sides: base_offset alone would
# read to the end of the log. A subquery: under row-level security PostgreSQL keeps COALESCE away from the key.
_LAST: Final = (
    select(_behind.c.last_offset)
    .where(_behind.c.partition_id == bindparam("of_partition_id"))
    .where(_behind.c.last_offset >= bindparam("end_offset") - 1)
    .order_by(_behind.c.last_offset)
    .limit(1)
    .scalar_subquery()
)
#: Batches that hold some of the offsets from `from_offset` up to `end_offset`, in the partition `of_partition_id`.
IN_RANGE: Final = and_(
    record_batches.c.partition_id == bindparam("of_partition_id"),
    record_batches.c.last_offset >= bindparam("from_offset"),
    record_batches.c.last_offset <= select(func.coalesce(_LAST, bindparam("end_offset"))).scalar_subquery(),
    record_batches.c.base_offset < bindparam("end_offset"),
)
_IN_PAGE: Final = and_(IN_RANGE, record_batches.c.control_type.is_(None))
#: Batches of committed transactions, and of no transaction.  A transaction has an epoch of its own (KIP-890), so this
#: finds how the one that a batch belongs to ended.
IS_COMMITTED: Final = or_(
    not_(record_batches.c.is_transactional),
    select(finished_transactions.c.outcome)
    .where(finished_transactions.c.partition_id == record_batches.c.partition_id)
    .where(finished_transactions.c.producer_id == record_batches.c.producer_id)
    .where(finished_transactions.c.producer_epoch == record_batches.c.producer_epoch)
    .correlate(record_batches)
    .scalar_subquery()
    == int(ControlType.COMMIT),
)
_SIZES: Final = (
    select(record_batches.c.last_offset, record_batches.c.record_count, record_batches.c.size_bytes)
    .where(_IN_PAGE)
    .order_by(record_batches.c.last_offset)
    .limit(bindparam("batches_max"))
)
_NEXT: Final = HotStatement(
    select(record_batches.c.base_offset)
    .where(record_batches.c.partition_id == bindparam("of_partition_id"))
    .where(record_batches.c.last_offset >= bindparam("from_offset"))
    .order_by(record_batches.c.last_offset)
    .limit(1)
)
# Payloads as text are twice as long, on the way too, and have to be made and taken apart.
_BATCHES: Final = (
    select(record_batches).where(_IN_PAGE).order_by(record_batches.c.last_offset).execution_options(binary_rows=True)
)
#: By isolation level: which batches make a page, and the batches themselves.
_STATEMENTS: Final = {
    IsolationLevel.READ_UNCOMMITTED: (HotStatement(_SIZES), HotStatement(_BATCHES)),
    IsolationLevel.READ_COMMITTED: (
        HotStatement(_SIZES.where(IS_COMMITTED)),
        HotStatement(_BATCHES.where(IS_COMMITTED)),
    ),
}


def fetch(
    connection: Connection,
    positions: Mapping[int, int],
    *,
    isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
    records_max: int = PAGE_RECORDS_MAX,
    bytes_max: int = PAGE_BYTES_MAX,
    end_offsets: Mapping[int, int] = MappingProxyType({}),
    asks_outbox: bool = False,
) -> dict[int, Page]:
    """Return a page of each partition from the offset in `positions` on, all of one snapshot.

    A page ends before the partition's offset in `end_offsets`, if it is there; a batch that goes past it comes whole.
    The whole page, over all partitions, holds about `records_max` records and `bytes_max` bytes of payload; a
    partition that comes after the page is full gets an empty page and its position back.  With `asks_outbox` the
    bounds tell of the outbox, too.

    Raises:
        UnknownTopicOrPartition: a partition is not in this database.
        OffsetOutOfRange: a position lies before the log's start or past its end.
        CorruptBatch: a stored batch is damaged.
    """
    pages: dict[int, Page] = {}
    room = Room(records_max, bytes_max)
    for partition_id, bounds in read_bounds(connection, positions, asks_outbox=asks_outbox).items():
        position = positions[partition_id]
        _check_position(bounds, position)
        page = Page(bounds, (), position)
        if room.records > 0 and room.size_bytes > 0:
            end_offset = min(bounds.end(isolation), end_offsets.get(partition_id, OFFSET_MAX))
            page = _page(connection, bounds, position, end_offset, isolation=isolation, room=room)
        room = Room(
            room.records - sum(batch.record_count for batch in page.batches),
            room.size_bytes - sum(batch.size_bytes for batch in page.batches),
        )
        pages[partition_id] = page
    return pages


def _check_position(bounds: Bounds, position: int) -> None:
    if not bounds.log_start_offset <= position <= bounds.high_watermark:
        raise OffsetOutOfRange(
            f"partition id {bounds.partition_id}: offset {position} is not within"
            f" {bounds.log_start_offset} to {bounds.high_watermark}"
        )


def _page(
    connection: Connection, bounds: Bounds, position: int, end_offset: int, *, isolation: IsolationLevel, room: Room
) -> Page:
    if position >= end_offset:
        return Page(bounds, (), position)
    sizes_statement, batches_statement = _STATEMENTS[isolation]
    is_cut = end_offset - position > PAGE_OFFSETS_MAX
    range_: dict[str, Any] = {
        "of_partition_id": bounds.partition_id,
        "from_offset": position,
        "end_offset": position + PAGE_OFFSETS_MAX if is_cut else end_offset,
    }
    # The sizes come first: payloads are read only of what fits the page.
    # No batch has less than one record.
    batches_max = min(PAGE_BATCHES_MAX, room.records)
    sizes = sizes_statement.rows(connection, {**range_, "batches_max": batches_max})
    count, full = fitting(sizes, room)
    full = full or count == batches_max
    if count == 0 and is_cut:
        found = _NEXT.value(connection, range_)
        next_offset = end_offset if found is None else min(found, end_offset)
        if next_offset > range_["end_offset"]:
            # It looked at nothing but a gap.
            return _page(connection, bounds, next_offset, end_offset, isolation=isolation, room=room)
    if count == 0:
        return Page(bounds, (), range_["end_offset"])
    if full or is_cut:
        # After what comes whole; to where the page was cut if nothing of it comes to that.
        end_of_batches = sizes[count - 1].last_offset + 1
        range_["end_offset"] = end_of_batches if full else max(range_["end_offset"], end_of_batches)
    batches = tuple(decode(row) for row in batches_statement.rows(connection, range_))
    return Page(bounds, batches, range_["end_offset"])


def fitting(sizes: Sequence[Any], room: Room) -> tuple[int, bool]:
    """Return how many of these batches make the page, and whether some have no room."""
    records = size_bytes = 0
    for index, batch in enumerate(sizes):
        records += batch.record_count
        size_bytes += batch.size_bytes
        if index > 0 and (records > room.records or size_bytes > room.size_bytes):
            return index, True
    return len(sizes), False

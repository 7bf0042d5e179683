"""The news for a reader that had read everything: bounds and batches of a few partitions, by one statement.

One statement is one snapshot, and one way to the database.  It brings a few small batches, which is what is new for a
reader that was waiting; whatever it does not bring wholly is for `fetch`, which reads the same in pages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import (
    LargeBinary,
    Select,
    String,
    and_,
    bindparam,
    case,
    cast,
    false,
    func,
    literal_column,
    not_,
    null,
    or_,
    select,
    true,
    union_all,
)

from txnstore.db.ddl import Int64
from txnstore.db.schema import finished_transactions, partition_heads, producer_states, record_batches
from txnstore.db.statements import HotStatement
from txnstore.errors import CorruptBatch
from txnstore.log.bounds import Bounds
from txnstore.log.codec import decode
from txnstore.log.commit_order import CommitPage, CommitPosition, in_place
from txnstore.log.fetch import IS_COMMITTED, Page, Room
from txnstore.log.outbox.rows import OUTBOX_WAITS
from txnstore.model import ControlType, IsolationLevel

#: A reader of more partitions than this asks for bounds first: most of them have nothing new.
PARTITIONS_MAX: Final = 12
#: How many offsets of a partition are looked at, how many batches come in all, and up to which size they come.
OFFSETS_MAX: Final = 500
BATCHES_MAX: Final = 64
BATCH_BYTES_MAX: Final = 16 * 1024
# What is the same in every branch stands in the text: a value has to be sent for each place.
_ZERO: Final = literal_column("0", Int64)
_ONE: Final = literal_column("1", Int64)
_SMALL: Final = literal_column(str(BATCH_BYTES_MAX), Int64)
_ONE_TOO_MANY: Final = literal_column(str(BATCHES_MAX + 1), Int64)

#: Runs a statement that reads, in a snapshot of its own; None: it cannot be run.
Run = Callable[[HotStatement, Mapping[str, int]], Sequence[Any] | None]


def read_news(run: Run, positions: Mapping[int, int], isolation: IsolationLevel, room: Room) -> dict[int, Page] | None:
    """Return for each partition all that there is from the offset in `positions` on, as `fetch` would, of one snapshot.

    None: there is more than comes at once, or something is wrong, which `fetch` will tell.
    """
    if len(positions) > PARTITIONS_MAX:
        return None
    parameters: dict[str, int] = {}
    for number, (partition_id, position) in enumerate(positions.items()):
        parameters[f"id_{number}"] = partition_id
        parameters[f"from_{number}"] = position
        parameters[f"to_{number}"] = position + OFFSETS_MAX
    rows = _rows(run, _statement(isolation, len(positions)), parameters, room)
    if rows is None:
        return None
    outbox_waits = any(row.outbox_waits for row in rows)
    pages: dict[int, Page] = {}
    for partition_id, position in positions.items():
        page = _page([row for row in rows if row.of_partition_id == partition_id], position, isolation, outbox_waits)
        if page is None:
            return None
        pages[partition_id] = page
    return pages


def read_news_in_commit_order(
    run: Run, positions: Mapping[int, CommitPosition], room: Room
) -> dict[int, CommitPage] | None:
    """Return for each partition all that there is from its position on, as `fetch_in_commit_order` would.

    None: as of `read_news`; or a reader is within a transaction, or one is committed that has begun long ago.
    """
    if len(positions) > PARTITIONS_MAX or any(position.offset_in_transaction for position in positions.values()):
        return None
    parameters: dict[str, int] = {}
    for number, (partition_id, (place, _)) in enumerate(positions.items()):
        parameters[f"id_{number}"] = partition_id
        parameters[f"from_{number}"] = place
        parameters[f"to_{number}"] = place + OFFSETS_MAX
        parameters[f"reach_{number}"] = place - OFFSETS_MAX
    rows = _rows(run, _statement(None, len(positions)), parameters, room)
    if rows is None:
        return None
    outbox_waits = any(row.outbox_waits for row in rows)
    pages: dict[int, CommitPage] = {}
    for partition_id, (place, _) in positions.items():
        page = _commit_page([row for row in rows if row.of_partition_id == partition_id], place, outbox_waits)
        if page is None:
            return None
        pages[partition_id] = page
    return pages


def _rows(run: Run, statement: HotStatement, parameters: Mapping[str, int], room: Room) -> Sequence[Any] | None:
    """Return the rows of the statement; None if it has not brought everything."""
    rows = run(statement, parameters)
    if rows is None or len(rows) > BATCHES_MAX or not _fits([row for row in rows if _has_batch(row)], room):
        return None
    return rows


def _has_batch(row: Any) -> bool:
    return row.last_offset is not None


def _fits(batches: Sequence[Any], room: Room) -> bool:
    """Return whether all of them have come wholly, and make no more than a page."""
    records, size_bytes = sum(row.record_count for row in batches), sum(row.size_bytes for row in batches)
    is_small = all(row.size_bytes <= BATCH_BYTES_MAX for row in batches)
    return is_small and records <= room.records and size_bytes <= room.size_bytes


def _page(rows: Sequence[Any], position: int, isolation: IsolationLevel, outbox_waits: bool) -> Page | None:
    """Return the page of one partition; None if it is not whole."""
    if not rows:
        # The partition was deleted.
        return None
    bounds = _bounds(rows[0], outbox_waits)
    end_offset = bounds.end(isolation)
    is_in_log = bounds.log_start_offset <= position <= bounds.high_watermark
    if not is_in_log or end_offset > position + OFFSETS_MAX:
        return None
    if position >= end_offset:
        return Page(bounds, (), position)
    try:
        batches = tuple(map(decode, sorted(filter(_has_batch, rows), key=_by_offset)))
    except CorruptBatch:
        return None
    return Page(bounds, batches, end_offset)


def _commit_page(rows: Sequence[Any], place: int, outbox_waits: bool) -> CommitPage | None:
    """Return the page of one partition in commit order; None if it is not whole."""
    if not rows:
        return None
    bounds, first_offset = _bounds(rows[0], outbox_waits), rows[0].first_committed_offset
    is_in_log = bounds.log_start_offset <= place <= bounds.high_watermark
    has_long_one = first_offset is not None and first_offset < place - OFFSETS_MAX
    if not is_in_log or has_long_one or bounds.high_watermark > place + OFFSETS_MAX:
        return None
    found = sorted(filter(_has_batch, rows), key=_by_place)
    try:
        batches = {row.last_offset: decode(row) for row in found}
    except CorruptBatch:
        return None
    return CommitPage(bounds, in_place(found, batches, CommitPosition(place)), CommitPosition(bounds.high_watermark))


def _bounds(first: Any, outbox_waits: bool) -> Bounds:
    last_stable_offset = first.log_end_offset if first.first_open_offset is None else first.first_open_offset
    return Bounds(
        first.of_partition_id,
        first.log_start_offset,
        first.log_end_offset,
        max(first.log_start_offset, last_stable_offset),
        outbox_waits,
    )


def _by_place(row: Any) -> tuple[int, int]:
    return row.place, row.last_offset


def _by_offset(row: Any) -> int:
    offset: int = row.last_offset
    return offset


@functools.cache
def _statement(isolation: IsolationLevel | None, count: int) -> HotStatement:
    """Return the statement for so many partitions; without an isolation level it is that for commit order.

    Each has a branch with its own parameters: so the key bounds what is read of it, whatever the database believes
    about the tables, and whenever it has made the plan.
    """
    branches = [_branch(isolation, number) for number in range(count)]
    whole = union_all(*branches) if count > 1 else branches[0]
    return HotStatement(whole.limit(_ONE_TOO_MANY))


def _branch(isolation: IsolationLevel | None, number: int) -> Select[Any]:
    partition_id = bindparam(f"id_{number}", type_=Int64)
    # By the order of the partial index on open transactions, where the first one is the least.
    first_open = (
        select(producer_states.c.transaction_first_offset)
        .where(producer_states.c.partition_id == partition_id)
        .where(producer_states.c.transaction_first_offset >= _ZERO)
        .order_by(producer_states.c.transaction_first_offset)
        .limit(_ONE)
        .scalar_subquery()
    )
    from_offset = bindparam(f"from_{number}", type_=Int64)
    to_offset = bindparam(f"to_{number}", type_=Int64)
    columns = [_small(column) for column in record_batches.c]
    first_committed: Any = null()
    begins_at: Any = from_offset
    if isolation is None:
        # What is committed now may have begun before; if that was long ago it does not come at once.
        first_committed = _first_committed(partition_id, from_offset, to_offset)
        is_near = first_committed.between(bindparam(f"reach_{number}", type_=Int64), from_offset)
        begins_at = case((is_near, first_committed), else_=from_offset)
        is_plain = not_(record_batches.c.is_transactional)
        found = finished_transactions.c
        marker_offset = _of_its_transaction(found.marker_offset, partition_id, from_offset, to_offset)
        conditions = [or_(and_(is_plain, record_batches.c.last_offset >= from_offset), marker_offset.is_not(None))]
        columns.append(case((is_plain, record_batches.c.last_offset), else_=marker_offset).label("place"))
        commit_number = _of_its_transaction(found.commit_number, partition_id, from_offset, to_offset)
        columns = [column for column in columns if column.name != "commit_number"]
        columns.append(case((is_plain, record_batches.c.commit_number), else_=commit_number).label("commit_number"))
    elif isolation is IsolationLevel.READ_COMMITTED:
        end_offset = func.coalesce(first_open, to_offset)
        conditions = [record_batches.c.base_offset < end_offset, IS_COMMITTED]
    else:
        conditions = []
    # The order leads to the key. Where nothing is known of the table yet, another index seems as good, which has the
    # offset in its last place and would be read from end to end.
    batches = (
        select(*columns)
        .where(
            record_batches.c.partition_id == partition_id,
            record_batches.c.last_offset >= begins_at,
            # The batch that ends after it is for another day, and so are those that follow.
            record_batches.c.last_offset < to_offset,
            record_batches.c.control_type.is_(None),
            *conditions,
        )
        .order_by(record_batches.c.last_offset)
        .limit(_ONE_TOO_MANY)
        .subquery(f"batches_{number}")
    )
    return (
        select(
            partition_heads.c.partition_id.label("of_partition_id"),
            partition_heads.c.log_start_offset,
            partition_heads.c.next_offset.label("log_end_offset"),
            first_open.label("first_open_offset"),
            cast(first_committed, Int64).label("first_committed_offset"),
            (OUTBOX_WAITS if number == 0 else false()).label("outbox_waits"),
            *batches.c,
        )
        .select_from(partition_heads.outerjoin(batches, true()))
        .where(partition_heads.c.partition_id == partition_id)
    )


def _first_committed(partition_id: Any, from_offset: Any, to_offset: Any) -> Any:
    """Return where the first transaction begins that was committed in this stretch."""
    return (
        select(func.min(finished_transactions.c.first_offset))
        .where(
            finished_transactions.c.partition_id == partition_id,
            finished_transactions.c.marker_offset >= from_offset,
            finished_transactions.c.marker_offset < to_offset,
            finished_transactions.c.outcome == int(ControlType.COMMIT),
        )
        .scalar_subquery()
    )


def _of_its_transaction(column: Any, partition_id: Any, from_offset: Any, to_offset: Any) -> Any:
    """Return what is said of a batch's transaction, if it was committed in this stretch and all of it is there."""
    log_start_offset = (
        select(partition_heads.c.log_start_offset)
        .where(partition_heads.c.partition_id == partition_id)
        .correlate(None)
        .scalar_subquery()
    )
    return (
        select(column)
        .where(
            finished_transactions.c.partition_id == record_batches.c.partition_id,
            finished_transactions.c.producer_id == record_batches.c.producer_id,
            finished_transactions.c.producer_epoch == record_batches.c.producer_epoch,
            finished_transactions.c.outcome == int(ControlType.COMMIT),
            finished_transactions.c.marker_offset >= from_offset,
            finished_transactions.c.marker_offset < to_offset,
            finished_transactions.c.first_offset >= log_start_offset,
            record_batches.c.is_transactional,
        )
        .correlate(record_batches)
        .scalar_subquery()
    )


def _small(column: Any) -> Any:
    """Return the column; what a batch carries comes only if the batch is small."""
    if not isinstance(column.type, LargeBinary | String):
        return column
    return case((record_batches.c.size_bytes <= _SMALL, column)).label(column.name)

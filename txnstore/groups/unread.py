"""The records of a partition that a group has yet to read: an offset may be a marker, aborted, or not yet committed.

Of a batch that the group stands in the middle of, only what is left counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, and_, bindparam, case, exists, func, not_, or_, select

from txnstore.db.ddl import Int64
from txnstore.db.schema import finished_transactions, record_batches
from txnstore.log.bounds import Bounds
from txnstore.log.commit_order import CommitPosition, as_begun, first_unread_offset
from txnstore.model import ControlType, OffsetAndMetadata


def _left_from(offset: Any) -> Any:
    return case(
        (record_batches.c.base_offset >= offset, record_batches.c.record_count),
        else_=record_batches.c.last_offset - offset + 1,
    )


_LEFT: Final = _left_from(bindparam("from_offset", type_=Int64))
_BEHIND: Final = and_(
    record_batches.c.partition_id == bindparam("of_partition_id"),
    record_batches.c.last_offset >= bindparam("from_offset"),
)
_OF_TRANSACTION: Final = and_(
    finished_transactions.c.partition_id == record_batches.c.partition_id,
    finished_transactions.c.producer_id == record_batches.c.producer_id,
    finished_transactions.c.producer_epoch == record_batches.c.producer_epoch,
)
_IS_READ: Final = and_(
    record_batches.c.control_type.is_(None),
    not_(
        exists()
        .where(_OF_TRANSACTION)
        .where(finished_transactions.c.outcome == int(ControlType.ABORT))
        .where(record_batches.c.is_transactional)
    ),
)
_STABLE: Final = record_batches.c.base_offset < bindparam("stable_offset")
# Records of open transactions are counted by themselves.
_COUNTS: Final = select(
    func.sum(case((_STABLE, _LEFT), else_=0)), func.sum(case((not_(_STABLE), _LEFT), else_=0))
).where(_BEHIND, _IS_READ)
_PAGE: Final = (
    select(record_batches.c.last_offset, case((_IS_READ, _LEFT), else_=0).label("left"))
    # Bounded on both sides: what is open ends at or after the last stable offset.
    .where(_BEHIND, record_batches.c.last_offset < bindparam("stable_offset"))
    .order_by(record_batches.c.last_offset)
    .limit(bindparam("batches_max"))
    .subquery()
)
_COUNT_PAGE: Final = select(func.count(), func.sum(_PAGE.c.left), func.max(_PAGE.c.last_offset))

_FROM_PLACE: Final = bindparam("from_place", type_=Int64)
_WITHIN: Final = bindparam("from_offset_in_transaction", type_=Int64)
# A transaction of which a part is deleted never comes, except to a reader that has begun it; open ones have no marker
# yet.
_MARKER_OFFSET: Final = (
    select(finished_transactions.c.marker_offset)
    .where(
        _OF_TRANSACTION,
        or_(
            finished_transactions.c.first_offset >= bindparam("log_start_offset"),
            and_(_WITHIN > 0, finished_transactions.c.marker_offset == _FROM_PLACE),
        ),
    )
    .correlate(record_batches)
    .scalar_subquery()
)
_IS_FINISHED: Final = exists().where(_OF_TRANSACTION).correlate(record_batches)
_IS_PLAIN: Final = not_(record_batches.c.is_transactional)
_COUNTS_BY_PLACE: Final = select(
    func.sum(
        case(
            (_IS_PLAIN, case((record_batches.c.last_offset >= _FROM_PLACE, _left_from(_FROM_PLACE)), else_=0)),
            (_MARKER_OFFSET > _FROM_PLACE, record_batches.c.record_count),
            (and_(_MARKER_OFFSET == _FROM_PLACE, record_batches.c.last_offset >= _WITHIN), _left_from(_WITHIN)),
            else_=0,
        )
    ),
    func.sum(case((or_(_IS_PLAIN, _IS_FINISHED), 0), else_=record_batches.c.record_count)),
).where(_BEHIND, _IS_READ)


@dataclass(frozen=True, slots=True)
class CountedLag:
    """How many committed records are unread, counted up to a number of batches."""

    records: int
    """Those counted, and after the last counted batch one for each offset: then it is an upper bound."""

    batches: int
    """How many batches were looked at."""

    is_exact: bool


def count_unread(connection: Connection, bounds: Bounds, position: OffsetAndMetadata) -> tuple[int, int]:
    """Return how many records after `position` a reader of committed ones may read, and how many may be later.

    In commit order those of open transactions may be later, and nothing else.  Looks at each batch after it, however
    many there are.
    """
    if position.offset_in_transaction is None:
        committed, open_ = connection.execute(_COUNTS, _place(bounds, position.offset)).one()
        return int(committed or 0), int(open_ or 0)
    place, log_start_offset = max(position.offset, bounds.log_start_offset), bounds.log_start_offset
    own = CommitPosition(place, position.offset_in_transaction if place == position.offset else 0)
    within = as_begun(connection, bounds.partition_id, own).offset_in_transaction
    wanted = {
        "of_partition_id": bounds.partition_id,
        "from_offset": min(first_unread_offset(connection, bounds.partition_id, place), bounds.last_stable_offset),
        "from_place": place,
        "from_offset_in_transaction": max(within, log_start_offset) if within > 0 else 0,
        "log_start_offset": log_start_offset,
    }
    committed, open_ = connection.execute(_COUNTS_BY_PLACE, wanted).one()
    return int(committed or 0), int(open_ or 0)


def bound_lag(connection: Connection, bounds: Bounds, place: int, *, markers_max: int) -> CountedLag:
    """Return how many committed records are unread in commit order at most; looks at no more than so many markers."""
    place = max(place, bounds.log_start_offset)
    left = bounds.high_watermark - place
    if left <= 0:
        return CountedLag(0, 0, is_exact=True)
    if left > markers_max:
        return CountedLag(bounds.high_watermark - bounds.log_start_offset, 0, is_exact=False)
    first_offset = max(first_unread_offset(connection, bounds.partition_id, place), bounds.log_start_offset)
    return CountedLag(bounds.high_watermark - first_offset, left, is_exact=False)


def count_lag(connection: Connection, bounds: Bounds, position: int, *, batches_max: int) -> CountedLag:
    """Return how many committed records are unread after `position`; looks at no more than so many batches."""
    place = _place(bounds, position)
    left = bounds.last_stable_offset - place["from_offset"]
    if left <= 0:
        return CountedLag(0, 0, is_exact=True)
    if batches_max <= 0:
        return CountedLag(left, 0, is_exact=False)
    batches, records, last_offset = connection.execute(_COUNT_PAGE, {**place, "batches_max": batches_max}).one()
    if batches < batches_max:
        return CountedLag(int(records or 0), batches, is_exact=True)
    behind = bounds.last_stable_offset - last_offset - 1
    return CountedLag(int(records) + behind, batches, is_exact=behind == 0)


def _place(bounds: Bounds, position: int) -> dict[str, int]:
    return {
        "of_partition_id": bounds.partition_id,
        "from_offset": max(position, bounds.log_start_offset),
        "stable_offset": bounds.last_stable_offset,
    }

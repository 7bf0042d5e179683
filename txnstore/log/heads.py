"""The heads of partitions: the row locks that put appends in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, bindparam, select, update

from txnstore.db.portions import chunks
from txnstore.db.row_counts import must_hit_each
from txnstore.db.schema import partition_heads
from txnstore.db.server_time import server_now_ms
from txnstore.errors import UnknownTopicOrPartition


@dataclass(slots=True)
class Head:
    """The end of a partition's log while its lock is held; `append` moves it along."""

    partition_id: int
    log_start_offset: int
    next_offset: int
    running_max_timestamp_ms: int


# This lock is what puts appends in order: an offset is given out and committed before the next writer is given one,
# so no reader passes a gap that is filled later. Everybody locks heads in the order of their ids, so nobody waits in
# a circle. (SQLite renders no FOR UPDATE: there the whole database transaction holds the write lock.)
_LOCK: Final = (
    select(
        partition_heads.c.partition_id,
        partition_heads.c.log_start_offset,
        partition_heads.c.next_offset,
        partition_heads.c.running_max_timestamp_ms,
        server_now_ms().label("now_ms"),
    )
    .where(partition_heads.c.partition_id.in_(bindparam("partition_ids", expanding=True)))
    .order_by(partition_heads.c.partition_id)
    .with_for_update()
)
_MOVE: Final = (
    update(partition_heads)
    .where(partition_heads.c.partition_id == bindparam("of_partition_id"))
    .values(
        next_offset=bindparam("new_next_offset"),
        running_max_timestamp_ms=bindparam("new_running_max_timestamp_ms"),
    )
)


@dataclass(frozen=True, slots=True)
class LockedHeads:
    """The heads of some partitions, locked until the database transaction ends."""

    heads: Mapping[int, Head]
    now_ms: int
    """The store's clock when the locks were asked for."""


def lock_heads(connection: Connection, partition_ids: Iterable[int]) -> LockedHeads:
    """Lock the heads of these partitions, at least one.

    Raises:
        UnknownTopicOrPartition: one of them is not in this database.
    """
    wanted = sorted(set(partition_ids))
    rows = [row for some in chunks(wanted) for row in connection.execute(_LOCK, {"partition_ids": some})]
    heads = {row[0]: Head(*row[:4]) for row in rows}
    if len(heads) != len(wanted):
        missing = next(number for number in wanted if number not in heads)
        raise UnknownTopicOrPartition(
            f"there is no partition with id {missing} in this database; was its topic deleted?"
        )
    return LockedHeads(heads, rows[0].now_ms)


def save_heads(connection: Connection, heads: Iterable[Head]) -> None:
    """Write where the heads are now."""
    must_hit_each(
        connection,
        _MOVE,
        [
            {
                "of_partition_id": head.partition_id,
                "new_next_offset": head.next_offset,
                "new_running_max_timestamp_ms": head.running_max_timestamp_ms,
            }
            for head in heads
        ],
    )

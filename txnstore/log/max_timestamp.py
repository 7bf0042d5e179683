"""This file is the newest record of a partition by its timestamp."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, bindparam, func, select

from txnstore.db.schema import record_batches
from txnstore.log.bounds import OffsetAndTimestamp, read_bounds
from txnstore.log.codec import decode
from txnstore.model import IsolationLevel

_READABLE: Final = (
    (record_batches.c.partition_id == bindparam("of_partition_id"))
    & record_batches.c.control_type.is_(None)
    & (record_batches.c.last_offset >= bindparam("start_offset"))
    & (record_batches.c.base_offset < bindparam("end_offset"))
)
# Walks the partition: markers, and records that are gone, leave running maxima that no record has.
_LARGEST: Final = select(func.max(record_batches.c.max_timestamp_ms)).where(_READABLE)
_FIRST: Final = (
    select(record_batches)
    .where(_READABLE, record_batches.c.max_timestamp_ms == bindparam("largest_ms"))
    .order_by(record_batches.c.last_offset)
    .limit(1)
)


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
    largest_ms = connection.execute(_LARGEST, parameters).scalar_one()
    if largest_ms is None:
        return None
    batch = connection.execute(_FIRST, {**parameters, "largest_ms": largest_ms}).one()
    rows = [(timestamp_ms, -offset) for offset, timestamp_ms, *_ in decode(batch).rows(bounds.log_start_offset)]
    # If the record itself was deleted from the batch's beginning, the largest of what is left.
    timestamp_ms, negative_offset = max(rows)
    return OffsetAndTimestamp(-negative_offset, timestamp_ms)

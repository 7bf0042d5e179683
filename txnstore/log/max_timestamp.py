"""This file is the newest record of a partition by its timestamp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sqlalchemy import Connection, bindparam, func, select

from txnstore.db.schema import record_batches
from txnstore.log.bounds import OffsetAndTimestamp, first_reaching, read_bounds
from txnstore.log.codec import decode
from txnstore.model import IsolationLevel

#: How many batches from the end are looked at one by one, before all are.
_LAST_BATCHES: Final = 100

# What a reader does not reach ends at the end of a batch: the key bounds the range on both sides.
_IN_RANGE: Final = (
    (record_batches.c.partition_id == bindparam("of_partition_id"))
    & (record_batches.c.last_offset >= bindparam("start_offset"))
    & (record_batches.c.last_offset < bindparam("end_offset"))
)
_READABLE: Final = _IN_RANGE & record_batches.c.control_type.is_(None)
_LAST: Final = (
    select(record_batches.c.max_timestamp_ms, record_batches.c.running_max_timestamp_ms, record_batches.c.control_type)
    .where(_IN_RANGE)
    .order_by(record_batches.c.last_offset.desc())
    .limit(_LAST_BATCHES)
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
    found: OffsetAndTimestamp | None = None
    while (largest_ms := _largest(connection, parameters)) is not None:
        first = first_reaching(connection, bounds, largest_ms) or 0
        from_first = {**parameters, "start_offset": max(first, parameters["start_offset"]), "largest_ms": largest_ms}
        batch = connection.execute(_FIRST, from_first).one()
        rows = [(timestamp_ms, -offset) for offset, timestamp_ms, *_ in decode(batch).rows(bounds.log_start_offset)]
        timestamp_ms, negative_offset = max(rows)
        if found is None or timestamp_ms > found.timestamp_ms:
            found = OffsetAndTimestamp(-negative_offset, timestamp_ms)
        if found.timestamp_ms >= largest_ms:
            break
        # The record itself was deleted from the beginning of the first batch: those behind may have a larger one.
        parameters["start_offset"] = batch.last_offset + 1
    return found


def _largest(connection: Connection, parameters: Mapping[str, int]) -> int | None:
    """Return the largest timestamp of a batch that can be read; None if there is none."""
    largest_ms: int | None = None
    rows = connection.execute(_LAST, parameters).all()
    for max_ms, running_max_ms, control_type in rows:
        if largest_ms is not None and running_max_ms <= largest_ms:
            # Nothing up to here is above it.
            return largest_ms
        if control_type is None:
            largest_ms = max_ms if largest_ms is None else max(largest_ms, max_ms)
    if len(rows) < _LAST_BATCHES:
        return largest_ms
    found: int | None = connection.execute(_LARGEST, parameters).scalar_one()
    return found

"""This file is how batches of a finished transaction are found again, for a producer whose answer was lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import Connection, bindparam, select

from txnstore.db.schema import finished_transactions, partition_heads, record_batches
from txnstore.log.append import Append, Appended
from txnstore.model import NO_TIMESTAMP_MS, TimestampType

# The index of finished transactions says between which offsets to look.
_FIND: Final = (
    select(
        record_batches.c.base_offset,
        record_batches.c.last_offset,
        record_batches.c.timestamp_type,
        record_batches.c.max_timestamp_ms,
        partition_heads.c.log_start_offset,
    )
    .join(
        finished_transactions,
        (finished_transactions.c.partition_id == record_batches.c.partition_id)
        & (record_batches.c.last_offset >= finished_transactions.c.first_offset)
        & (record_batches.c.last_offset < finished_transactions.c.marker_offset),
    )
    .join(partition_heads, partition_heads.c.partition_id == record_batches.c.partition_id)
    .where(finished_transactions.c.partition_id == bindparam("of_partition_id"))
    .where(finished_transactions.c.producer_id == bindparam("of_producer_id"))
    .where(finished_transactions.c.producer_epoch == bindparam("of_epoch"))
    .where(record_batches.c.producer_id == bindparam("of_producer_id"))
    .where(record_batches.c.producer_epoch == bindparam("of_epoch"))
    .where(record_batches.c.base_sequence == bindparam("of_sequence"))
)


def find_appended(connection: Connection, appends: Sequence[Append]) -> list[Appended]:
    """Return where batches of a finished transaction stand; those that retention has taken are left out."""
    return [found for item in appends if (found := _find(connection, item)) is not None]


def _find(connection: Connection, item: Append) -> Appended | None:
    row = connection.execute(
        _FIND,
        {
            "of_partition_id": item.partition_id,
            "of_producer_id": item.batch.producer_id,
            "of_epoch": item.batch.producer_epoch,
            "of_sequence": item.batch.base_sequence,
        },
    ).one_or_none()
    if row is None:
        return None
    stamps = row.timestamp_type == TimestampType.LOG_APPEND_TIME
    return Appended(
        item.partition_id,
        row.base_offset,
        row.last_offset,
        row.max_timestamp_ms if stamps else NO_TIMESTAMP_MS,
        row.log_start_offset,
        is_duplicate=True,
    )

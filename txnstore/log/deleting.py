"""This file is the deletion of a partition's oldest records: the log start moves on, then whole batches go.

The two are steps of their own.  Moving the log start is one short database transaction under the head's lock, and
from its commit on nobody reads what lies below.  Batches that lie below it as a whole are then deleted in portions,
without the lock, so that nobody's append waits for a long deletion; whoever is interrupted leaves rows that the next
deletion takes.  A batch with a record at or past the log start stays whole.

As in Kafka, the high watermark is as far as it goes, also past the beginning of an open transaction: that one goes on,
and the last stable offset is then the log start.  The index of finished transactions and the producers' states stay:
they are small, and outcomes and repetitions are recognised by them.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Final

from sqlalchemy import Connection, bindparam, delete, select, update

from txnstore.db.schema import partition_heads, record_batches
from txnstore.db.store import Store
from txnstore.errors import OffsetOutOfRange, TxnStoreError
from txnstore.log.heads import lock_heads

#: The offset that stands for the high watermark; Kafka's number.
HIGH_WATERMARK: Final = -1
#: How many batches one database transaction deletes.
BATCHES_MAX: Final = 1_000

_MOVE_START: Final = (
    update(partition_heads)
    .where(partition_heads.c.partition_id == bindparam("of_partition_id"))
    .values(log_start_offset=bindparam("new_log_start_offset"))
)
_BELOW_START: Final = (
    select(record_batches.c.last_offset)
    .join(partition_heads, partition_heads.c.partition_id == record_batches.c.partition_id)
    .where(record_batches.c.partition_id == bindparam("of_partition_id"))
    .where(record_batches.c.last_offset < partition_heads.c.log_start_offset)
    .order_by(record_batches.c.last_offset)
    .limit(bindparam("batches_max"))
)
_DELETE: Final = delete(record_batches).where(
    record_batches.c.partition_id == bindparam("of_partition_id"),
    record_batches.c.last_offset <= bindparam("through_offset"),
)


def delete_records(store: Store, partition_id: int, before_offset: int, *, retry_timeout_ms: int | None = None) -> int:
    """Delete the records below an offset, or all with HIGH_WATERMARK; return the first offset that can be read then.

    Records that were deleted before stay deleted: an offset below the log start changes nothing.

    Raises:
        UnknownTopicOrPartition: the partition is not in this database.
        OffsetOutOfRange: the offset is negative, or beyond the high watermark; nothing was changed.
    """
    log_start_offset = store.write(
        lambda connection: advance_log_start(connection, partition_id, before_offset), retry_timeout_ms=retry_timeout_ms
    )
    # Nobody reads these any more, so the deletion is done; rows that are left now are taken by the next one.
    with contextlib.suppress(TxnStoreError):
        delete_below_log_start(store, partition_id, retry_timeout_ms=retry_timeout_ms)
    return log_start_offset


def advance_log_start(connection: Connection, partition_id: int, offset: int) -> int:
    """Move the log start to the offset, unless it is there or past it already; return where it is then.

    Raises:
        UnknownTopicOrPartition: the partition is not in this database.
        OffsetOutOfRange: the offset is negative, or beyond the high watermark.
    """
    head = lock_heads(connection, [partition_id]).heads[partition_id]
    wanted = head.next_offset if offset == HIGH_WATERMARK else offset
    if not 0 <= wanted <= head.next_offset:
        raise OffsetOutOfRange(
            f"records can be deleted up to the high watermark, {head.next_offset}; not up to {wanted}"
        )
    if wanted <= head.log_start_offset:
        return head.log_start_offset
    connection.execute(_MOVE_START, {"of_partition_id": partition_id, "new_log_start_offset": wanted})
    return wanted


def delete_below_log_start(
    store: Store, partition_id: int, *, batches_max: int = BATCHES_MAX, retry_timeout_ms: int | None = None
) -> int:
    """Delete the batches that lie below the log start as a whole; return how many."""
    deleted = 0
    delete_portion = partial(_delete_portion, partition_id, batches_max)
    while portion := store.write(delete_portion, retry_timeout_ms=retry_timeout_ms):
        deleted += portion
    return deleted


def _delete_portion(partition_id: int, batches_max: int, connection: Connection) -> int:
    of_partition = {"of_partition_id": partition_id}
    found = connection.execute(_BELOW_START, {**of_partition, "batches_max": batches_max}).scalars().all()
    if not found:
        return 0
    return connection.execute(_DELETE, {**of_partition, "through_offset": found[-1]}).rowcount

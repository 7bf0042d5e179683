"""The storage of a partition: where its batches begin, what they take, how far they are compacted.

One row for a partition, made under its head's lock, so that none outlives its topic.  Deleting the oldest
batches, rewriting some and counting them hold the row's lock meanwhile: two at once would subtract the same batch
twice. The size is counted from where it was counted last, so that nobody reads the whole log for it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

from sqlalchemy import Connection, bindparam, func, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from txnstore.db.portions import Portions
from txnstore.db.schema import partition_heads, partition_storage, record_batches
from txnstore.db.statements import HotStatement
from txnstore.db.store import Store, must_hit
from txnstore.log.partition_rows import lock_heads

#: What Kafka's header of a record batch takes.
BATCH_HEADER_BYTES: Final = 61
#: How many batches after an offset are weighed; the others are taken to be as large.
_WEIGHED_MAX: Final = 1_000


@dataclass(frozen=True, slots=True)
class PartitionStorage:
    """What is known of a partition's stored batches."""

    partition_id: int
    first_stored_offset: int = 0
    """Every batch that ends below it is deleted."""

    counted_offset: int = 0
    """The batches that end below it are in `size_bytes`."""

    size_bytes: int = 0

    compacted_offset: int = 0
    """Below it there is one record of each key."""

    compacted_bytes: int = 0
    """About what the batches that end below it take."""

    horizons: str = "[]"
    """JSON: pairs of an offset and a time, both ascending; from then on, tombstones and markers below it go."""

    unfinished_pass: str | None = None
    """JSON: how far a pass of the compaction has come that is not finished, see `compaction`."""


_SELECT: Final = select(partition_storage).where(partition_storage.c.partition_id == bindparam("of_partition_id"))
_READ: Final = HotStatement(_SELECT)
_LOCK: Final = _SELECT.with_for_update()
_ADD: Final = upsert(partition_storage).on_conflict_do_nothing(index_elements=["partition_id"])
_CHANGED: Final = [column.name for column in partition_storage.c if column.name != "partition_id"]
_SAVE: Final = (
    update(partition_storage)
    .where(partition_storage.c.partition_id == bindparam("of_partition_id"))
    .values({name: bindparam(f"new_{name}") for name in _CHANGED})
)
_NEXT_OFFSET: Final = select(partition_heads.c.next_offset).where(
    partition_heads.c.partition_id == bindparam("of_partition_id")
)
STORED_BATCHES: Final = (
    select(record_batches.c.last_offset, record_batches.c.size_bytes)
    .where(record_batches.c.partition_id == bindparam("of_partition_id"))
    .where(record_batches.c.last_offset >= bindparam("from_offset"))
    .where(record_batches.c.last_offset < bindparam("end_offset"))
    .order_by(record_batches.c.last_offset)
    .limit(bindparam("batches_max"))
)
_BEHIND: Final = (
    select(record_batches.c.last_offset, record_batches.c.size_bytes)
    .where(record_batches.c.partition_id == bindparam("of_partition_id"))
    .where(record_batches.c.last_offset >= bindparam("from_offset"))
    .order_by(record_batches.c.last_offset)
    .limit(bindparam("batches_max"))
    .subquery()
)
_WEIGHED: Final = select(
    func.count(), func.coalesce(func.sum(_BEHIND.c.size_bytes), 0), func.max(_BEHIND.c.last_offset)
)


def batch_bytes(size_bytes: int) -> int:
    """Return what a batch counts for retention.bytes: its payload and, as in Kafka, the header of a batch."""
    return size_bytes + BATCH_HEADER_BYTES


def add_storage(connection: Connection, partition_id: int) -> None:
    """Begin to keep what is known of a partition's stored batches; its head is locked, so that it is not deleted."""
    connection.execute(_ADD, asdict(PartitionStorage(partition_id)))


def lock_storage(connection: Connection, partition_id: int) -> PartitionStorage | None:
    """Return what is known of the partition's stored batches, or None: nothing is kept, or it is gone.

    Until the database transaction ends, nobody else changes it, deletes the oldest of the batches or rewrites any.
    """
    row = connection.execute(_LOCK, {"of_partition_id": partition_id}).one_or_none()
    return None if row is None else PartitionStorage(*row)


def read_storage(connection: Connection, partition_id: int) -> PartitionStorage:
    """Return what is known of the partition's stored batches; where nothing is kept, none was deleted or counted."""
    row = _READ.row(connection, {"of_partition_id": partition_id})
    return PartitionStorage(partition_id) if row is None else PartitionStorage(*row)


def save_storage(connection: Connection, storage: PartitionStorage) -> None:
    """Keep what is known of the partition's stored batches; the row is locked."""
    new = {f"new_{name}": getattr(storage, name) for name in _CHANGED}
    must_hit(connection, _SAVE, {"of_partition_id": storage.partition_id, **new})


def read_horizons(storage: PartitionStorage) -> list[tuple[int, int]]:
    """Return from when on the tombstones and markers below an offset go; 0: a pass has taken them already."""
    return [(offset, from_ms) for offset, from_ms in json.loads(storage.horizons)]


def next_horizons(
    horizons: Sequence[tuple[int, int]], deletable_offset: int, new: tuple[int, int] | None, *, apart_ms: int
) -> list[tuple[int, int]]:
    """Return the horizons after a pass that took what was to go below `deletable_offset`, with a new one if any.

    One that comes less than `apart_ms` after the one before it gives way to the new one.
    """
    kept = [(offset, from_ms) for offset, from_ms in horizons if offset > deletable_offset]
    if new is not None and new[0] > max([deletable_offset, *(offset for offset, _ in kept)]):
        if len(kept) > 1 and kept[-1][1] - kept[-2][1] < apart_ms:
            kept.pop()
        kept.append(new)
    return [(deletable_offset, 0), *kept] if deletable_offset > 0 else kept


def bytes_behind(connection: Connection, storage: PartitionStorage, end_offset: int) -> int:
    """Return what is counted after an offset, or an estimate where it is much: nobody reads all of it for this."""
    behind = {"of_partition_id": storage.partition_id, "from_offset": end_offset, "batches_max": _WEIGHED_MAX}
    count, payload_bytes, last_offset = connection.execute(_WEIGHED, behind).one()
    weighed_bytes: int = payload_bytes + count * batch_bytes(0)
    if count < _WEIGHED_MAX:
        return weighed_bytes
    all_bytes: int = weighed_bytes * (storage.counted_offset - end_offset) // (last_offset + 1 - end_offset)
    return all_bytes


def last_that_fits(found: Sequence[Any], size_bytes_max: int) -> int:
    """Return the key of the last row that a portion of this size takes, at least one, of keys and sizes."""
    key: int = found[0][0]
    size_bytes = 0
    for next_key, next_size_bytes in found:
        size_bytes += next_size_bytes
        if size_bytes > size_bytes_max:
            break
        key = next_key
    return key


def count_stored(store: Store, partition_id: int, portions: Portions | None = None) -> bool:
    """Add to the size of the partition what has come since it was counted last; return whether all of it is counted.

    Raises:
        UnknownTopicOrPartition: the topic has been deleted meanwhile.
    """
    portions = portions or Portions()
    while portions.write(store, partial(_count_portion, partition_id, portions), is_apart=True):
        if portions.is_over:
            return False
    return True


def _count_portion(partition_id: int, portions: Portions, connection: Connection) -> bool:
    """Count some batches; return whether more may have come."""
    storage = lock_storage(connection, partition_id)
    if storage is None:
        lock_heads(connection, [partition_id])
        add_storage(connection, partition_id)
        storage = lock_storage(connection, partition_id)
        assert storage is not None
    # Read first: whatever lies below it is there.
    next_offset = connection.execute(_NEXT_OFFSET, {"of_partition_id": partition_id}).scalar_one_or_none()
    if next_offset is None or storage.counted_offset >= next_offset:
        return False
    page = {
        "of_partition_id": partition_id,
        "from_offset": storage.counted_offset,
        "end_offset": next_offset,
        "batches_max": portions.rows,
    }
    rows = connection.execute(STORED_BATCHES, page).all()
    counted_offset = rows[-1].last_offset + 1 if len(rows) == portions.rows else next_offset
    size_bytes = storage.size_bytes + sum(batch_bytes(row.size_bytes) for row in rows)
    save_storage(connection, replace(storage, counted_offset=counted_offset, size_bytes=size_bytes))
    return True

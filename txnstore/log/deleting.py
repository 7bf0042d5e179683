"""The deletion of a partition's oldest records, whose log start moves on, and of all that partitions held.

The two are steps of their own.  Moving the log start is one short database transaction under the head's lock, and
from its commit on nobody reads what lies below.  Batches that lie below it as a whole are then deleted in portions,
without the lock, so that nobody's append waits for a long deletion; an interrupted deletion leaves rows that the next
deletion takes.  A batch with a record at or past the log start stays whole.

How far the deletion has come is kept (`partition_storage`): the next portion begins there, instead of passing what is
deleted and not yet cleaned up by the database, which a long snapshot can hold up for hours.

As in Kafka, the high watermark is as far as it goes, also past the beginning of an open transaction: that one goes on,
and the last stable offset is then the log start.  With the marker of a transaction its row in the index of finished
transactions goes: all of its records lay before the marker.  The producers' states stay until their own time is up:
repetitions are recognised by them.

Of a partition whose topic was deleted there is no head any more, so nobody reads it or appends to it; what it held is
deleted in portions as well, by the call that deleted the topic or by the maintenance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

from sqlalchemy import (
    ColumnElement,
    Connection,
    Delete,
    Select,
    Table,
    bindparam,
    cast,
    delete,
    exists,
    literal,
    or_,
    select,
    tuple_,
    update,
)

from txnstore.db.ddl import Int64, String
from txnstore.db.portions import Portions
from txnstore.db.schema import (
    deleted_partitions,
    finished_transactions,
    group_offsets,
    partition_heads,
    producer_states,
    record_batches,
    relay_positions,
    sink_inputs,
    sink_positions,
    topics,
)
from txnstore.db.store import LISTED_MAX, ROWS_AT_ONCE, Store, must_hit, pages
from txnstore.errors import OffsetOutOfRange, TxnStoreError
from txnstore.log.partition_rows import lock_heads
from txnstore.log.partition_storage import (
    STORED_BATCHES,
    add_storage,
    batch_bytes,
    last_that_fits,
    lock_storage,
    save_storage,
)

#: The offset that stands for the high watermark; Kafka's number.
HIGH_WATERMARK: Final = -1
#: How many rows the deletion of a topic deletes at once, and for how long; the rest is left to the maintenance.
_PURGED_SOON: Final = 5_000
_PURGED_SOON_SECONDS: Final = 1.0

_MOVE_START: Final = (
    update(partition_heads)
    .where(partition_heads.c.partition_id == bindparam("of_partition_id"))
    .values(log_start_offset=bindparam("new_log_start_offset"))
)
_START: Final = select(partition_heads.c.log_start_offset).where(
    partition_heads.c.partition_id == bindparam("of_partition_id")
)


def _between(table: Table, key: ColumnElement[int]) -> Delete:
    """Return the deletion of a partition's rows from one offset through another."""
    of_partition = table.c.partition_id == bindparam("of_partition_id")
    return delete(table).where(of_partition, key.between(bindparam("from_offset"), bindparam("through_offset")))


_DELETE_BATCHES: Final = _between(record_batches, record_batches.c.last_offset)
_DELETE_FINISHED: Final = _between(finished_transactions, finished_transactions.c.marker_offset)


@dataclass(frozen=True, slots=True)
class _Rows:
    """A table with rows of partitions, and what its rows of one partition are ordered by."""

    table: Table
    key: ColumnElement[int]
    size_bytes: ColumnElement[int]

    @property
    def holding(self) -> Select[Any]:
        """The deleted partitions that have rows here, some of them."""
        has_rows = exists().where(self.table.c.partition_id == deleted_partitions.c.partition_id)
        return select(deleted_partitions.c.partition_id).where(has_rows).limit(ROWS_AT_ONCE)

    @property
    def oldest(self) -> Select[int, int]:
        """The rows of one portion, and their sizes."""
        these = self.table.c.partition_id == bindparam("of_partition_id"), self.key >= bindparam("from_offset")
        return select(self.key, self.size_bytes).where(*these).order_by(self.key).limit(bindparam("rows_max"))


_BATCHES: Final = _Rows(record_batches, record_batches.c.last_offset, record_batches.c.size_bytes)
#: What is left of partitions when they are deleted, but for what groups have committed.
_LEFT: Final = (
    _BATCHES,
    _Rows(producer_states, producer_states.c.producer_id, literal(0, Int64)),
    _Rows(finished_transactions, finished_transactions.c.marker_offset, literal(0, Int64)),
)
#: Before the first of them.
_BEGINNING: Final = -(2**63)
_DELETED: Final = select(deleted_partitions.c.partition_id).limit(LISTED_MAX)
_OFFSETS: Final = (
    select(
        group_offsets.c.group_id,
        group_offsets.c.partition_id,
        # Not those that the table of partitions lacks: the copy in a member of a cluster may be behind.
        exists().where(deleted_partitions.c.partition_id == group_offsets.c.partition_id).label("is_left"),
    )
    .where(
        tuple_(group_offsets.c.group_id, group_offsets.c.partition_id)
        > tuple_(bindparam("after_group_id", type_=String), bindparam("after_partition_id", type_=Int64))
    )
    .order_by(group_offsets.c.group_id, group_offsets.c.partition_id)
    .limit(LISTED_MAX)
)
#: As long as this is locked nobody strikes the partition off, and no restored controller gives its number out again.
_LOCK_DELETED: Final = (
    select(deleted_partitions.c.partition_id)
    .where(deleted_partitions.c.partition_id == bindparam("of_partition_id"))
    .with_for_update(read=True, key_share=True)
)
#: Whether it is still so when a row is deleted that was found before.
_IS_DELETED: Final = exists().where(deleted_partitions.c.partition_id == bindparam("of_partition_id"))
_DELETE_OFFSETS: Final = delete(group_offsets).where(
    group_offsets.c.group_id == bindparam("of_group_id"),
    group_offsets.c.partition_id == bindparam("of_partition_id"),
    _IS_DELETED,
)


def _some_and_one(
    table: Table, key: Sequence[ColumnElement[Any]], is_gone: ColumnElement[bool]
) -> tuple[Select[Any], Delete]:
    """Return what finds rows that are to go, and the deletion of one by its key, of a table that has few of them."""
    some = select(*(column.label(f"of_{column.key}") for column in key)).where(is_gone)
    this = (column == bindparam(f"of_{column.key}") for column in key)
    return some.limit(bindparam("rows_max")), delete(table).where(*this)


def _of_gone(table: Table) -> tuple[Select[Any], Delete]:
    is_gone = table.c.partition_id.in_(select(deleted_partitions.c.partition_id))
    some, one = _some_and_one(table, list(table.primary_key), is_gone)
    return some, one.where(_IS_DELETED)


def _of_relays() -> tuple[Select[Any], Delete]:
    """Return the same for where relays to Kafka stand: by the identity of the topic, which never comes again.

    A relay from Kafka stands in a topic of Kafka's, which has another identity: the relay itself looks after it.
    """
    of = relay_positions.c
    to_kafka = or_(of.relay_id.startswith("to/"), of.relay_id.startswith("start/to/"))
    is_gone = of.topic_uuid.not_in(select(cast(topics.c.topic_uuid, String)))
    some, one = _some_and_one(relay_positions, [*relay_positions.primary_key, of.topic_uuid], to_kafka & is_gone)
    # In the order in which others lock them.
    return some.order_by(*relay_positions.primary_key), one


_RELAYS: Final = _of_relays()
#: How far streaming queries and relays have read them.
_READ: Final = (*map(_of_gone, (sink_positions, sink_inputs)), _RELAYS)
_STRIKE_OFF: Final = delete(deleted_partitions).where(
    deleted_partitions.c.partition_id.in_(bindparam("partition_ids", expanding=True))
)


@dataclass(slots=True)
class _Purge:
    """The deletion of what one table has left of a deleted partition, and how far it has come."""

    rows: _Rows
    partition_id: int
    from_key: int = _BEGINNING
    through_key: int = _BEGINNING
    """How far the last portion goes, once it is committed."""

    def delete_portion(self, portions: Portions, connection: Connection) -> int:
        """Delete the next portion; return how many rows."""
        if connection.execute(_LOCK_DELETED, {"of_partition_id": self.partition_id}).first() is None:
            # Somebody else was faster: what has the number now is of another topic.
            return 0
        these = {"of_partition_id": self.partition_id, "from_offset": self.from_key}
        found = connection.execute(self.rows.oldest, {**these, "rows_max": portions.rows}).all()
        if not found:
            return 0
        self.through_key = last_that_fits(found, portions.size_bytes)
        through = {**these, "through_offset": self.through_key}
        return connection.execute(_between(self.rows.table, self.rows.key), through).rowcount


#: Those that are not finished: the next portion passes nothing that is deleted and not cleaned up by the database yet.
_unfinished: Final[WeakKeyDictionary[Store, _Purge]] = WeakKeyDictionary()


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
        delete_below_log_start(store, partition_id, Portions(), retry_timeout_ms=retry_timeout_ms)
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
    must_hit(connection, _MOVE_START, {"of_partition_id": partition_id, "new_log_start_offset": wanted})
    add_storage(connection, partition_id)
    return wanted


def delete_below_log_start(
    store: Store, partition_id: int, portions: Portions | None = None, *, retry_timeout_ms: int | None = None
) -> int:
    """Delete the batches that lie below the log start as a whole, as long as there is time; return how many."""
    portions = portions or Portions()
    deleted = 0
    delete_portion = partial(_delete_portion, partition_id, portions)
    # Nobody but the maintenance locks what lies below the log start.
    while portion := portions.write(store, delete_portion, retry_timeout_ms=retry_timeout_ms, is_apart=True):
        deleted += portion
        if portions.is_over:
            break
    return deleted


def _delete_portion(partition_id: int, portions: Portions, connection: Connection) -> int:
    storage = lock_storage(connection, partition_id)
    of_partition = {"of_partition_id": partition_id}
    log_start_offset = connection.execute(_START, of_partition).scalar_one_or_none()
    if storage is None or log_start_offset is None or log_start_offset <= storage.first_stored_offset:
        return 0
    of_range = {**of_partition, "from_offset": storage.first_stored_offset}
    page = {"end_offset": log_start_offset, "batches_max": portions.rows}
    found = connection.execute(STORED_BATCHES, of_range | page).all()
    through_offset = log_start_offset - 1
    if found:
        last_offset = last_that_fits(found, portions.size_bytes)
        if last_offset < found[-1].last_offset or len(found) == portions.rows:
            through_offset = last_offset
    of_range["through_offset"] = through_offset
    deleted = connection.execute(_DELETE_BATCHES, of_range).rowcount
    connection.execute(_DELETE_FINISHED, of_range)
    sizes = [(row.last_offset, batch_bytes(row.size_bytes)) for row in found if row.last_offset <= through_offset]
    save_storage(
        connection,
        replace(
            storage,
            first_stored_offset=through_offset + 1,
            counted_offset=max(storage.counted_offset, through_offset + 1),
            size_bytes=storage.size_bytes - sum(size for end, size in sizes if end < storage.counted_offset),
            compacted_bytes=max(
                0, storage.compacted_bytes - sum(size for end, size in sizes if end < storage.compacted_offset)
            ),
        ),
    )
    return deleted


def purge_soon(store: Store) -> None:
    """Delete what deleted topics have left, unless that is much, or the database is away: maintenance does the rest."""
    with contextlib.suppress(TxnStoreError):
        purge_deleted_partitions(store, Portions(seconds=_PURGED_SOON_SECONDS), rows_max=_PURGED_SOON)


def purge_deleted_partitions(store: Store, portions: Portions | None = None, *, rows_max: int) -> int:
    """Delete what is left of partitions whose topics were deleted; return how many rows.

    At least `rows_max`, or all that there are, or what there is time for: large batches go one by one.

    Raises:
        TxnStoreError: the database refused; what was deleted before stays so.
    """
    portions = portions or Portions()
    gone = store.read(lambda connection: list(connection.execute(_DELETED).scalars()))
    if not gone:
        # A relay that began while the topic was deleted may have written so after all else was gone.
        return _purge_read(store, portions, (_RELAYS,), rows_max=rows_max)[0]
    purged = 0
    for purge in _purges(store):
        try:
            while portion := portions.write(store, partial(purge.delete_portion, portions), is_apart=True):
                purged += portion
                purge.from_key = purge.through_key + 1
                if purged >= rows_max or portions.is_over:
                    _unfinished[store] = purge
                    return purged
        except BaseException:
            # Else each try passes again what those before it have deleted, and fails for want of time, say.
            _unfinished[store] = purge
            raise
    purged_read, is_complete = _purge_read(store, portions, _READ, rows_max=rows_max - purged)
    purged += purged_read
    if not is_complete:
        return purged
    purged_offsets, is_complete = _purge_offsets(store, portions)
    if not is_complete:
        return purged + purged_offsets
    # They were gone before anything was looked for, and nothing comes to what is gone.
    left = gone
    while left:
        some, left = left[: portions.rows], left[portions.rows :]
        portions.write(store, partial(_strike_off, some))
        if left and portions.is_over:
            return purged + purged_offsets
    return purged + purged_offsets + (rows_max if len(gone) == LISTED_MAX else 0)


def _purges(store: Store) -> Iterator[_Purge]:
    """Yield what is left, each to be gone on with until nothing of it is."""
    going_on = _unfinished.pop(store, None)
    if going_on is not None:
        yield going_on
    for rows in _LEFT:
        while partition_ids := store.read(
            lambda connection, rows=rows: list(connection.execute(rows.holding).scalars())  # type: ignore[misc]
        ):
            for partition_id in partition_ids:
                yield _Purge(rows, partition_id)


def _purge_read(
    store: Store, portions: Portions, read: Sequence[tuple[Select[Any], Delete]], *, rows_max: int
) -> tuple[int, bool]:
    """Delete how far queries and relays have read deleted partitions; return how many rows, and whether that was all.

    No index finds it, and nothing comes to what is gone: no writer waits while it is looked for.
    """
    purged = 0
    for some, statement in read:
        while keys := store.read(
            lambda connection, some=some: connection.execute(some, {"rows_max": portions.rows}).mappings().all()  # type: ignore[misc]
        ):
            purged += portions.write(store, partial(_delete_each, statement, keys))
            if purged >= rows_max or portions.is_over:
                return purged, False
    return purged, True


def _purge_offsets(store: Store, portions: Portions) -> tuple[int, bool]:
    """Delete what groups have committed in deleted partitions; return how many, and whether that was all.

    No index finds it.
    """
    purged = 0
    for found in pages(store.read, _OFFSETS, {"after_group_id": "", "after_partition_id": -1}, LISTED_MAX):
        left = [{"of_group_id": row.group_id, "of_partition_id": row.partition_id} for row in found if row.is_left]
        while left:
            some, left = left[: portions.rows], left[portions.rows :]
            purged += portions.write(store, partial(_delete_each, _DELETE_OFFSETS, some))
            if left and portions.is_over:
                return purged, False
    return purged, True


def _delete_each(statement: Delete, keys: Sequence[Mapping[str, Any]], connection: Connection) -> int:
    return connection.execute(statement, keys).rowcount


def _strike_off(partition_ids: Sequence[int], connection: Connection) -> None:
    connection.execute(_STRIKE_OFF, {"partition_ids": partition_ids})

"""Offsets of transactions whose coordinator is in another database than the group.

No lock of the coordinator's row guards them here.  As in Kafka, where markers are written to the partition that holds
a group's offsets, the end of each transaction leaves a higher epoch of its producer behind: what comes later from an
older one is refused, and an end that is told twice, however late, changes nothing of the next transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from sqlalchemy import Connection, bindparam, delete, exists, select
from sqlalchemy.dialects.postgresql import insert as upsert

from txnstore.db.schema import MINUTE_MS, offset_producers, pending_group_offsets
from txnstore.db.statements import ROWS_AT_ONCE, chunks, server_now_ms, write_portion
from txnstore.db.store import Store
from txnstore.errors import InvalidProducerEpoch
from txnstore.groups.offsets import add_pending_offsets, finish_pending_offsets
from txnstore.groups.rows import ensure_group, lock_group
from txnstore.log.append import UnannouncedProducerError
from txnstore.model import GroupMembership, OffsetAndMetadata, ProducerIdentity

_EPOCH: Final = select(offset_producers.c.producer_epoch).where(
    offset_producers.c.producer_id == bindparam("of_producer_id")
)
_INSERT: Final = upsert(offset_producers).values(last_update_ms=server_now_ms())
_RAISE: Final = _INSERT.on_conflict_do_update(
    index_elements=[offset_producers.c.producer_id],
    set_={name: _INSERT.excluded[name] for name in ("producer_epoch", "last_update_ms")},
    where=offset_producers.c.producer_epoch < _INSERT.excluded.producer_epoch,
)
_ANNOUNCE: Final = _INSERT.on_conflict_do_nothing(index_elements=[offset_producers.c.producer_id])
# A producer whose transaction holds offsets is kept: its end still comes.
_DUE: Final = (
    select(offset_producers.c.producer_id)
    .where(
        offset_producers.c.last_update_minute <= bindparam("before_minute"),
        offset_producers.c.last_update_ms <= bindparam("before_ms"),
        ~exists().where(pending_group_offsets.c.producer_id == offset_producers.c.producer_id),
    )
    .order_by(offset_producers.c.last_update_minute)
    .limit(bindparam("rows_max"))
)
# The lock of what is forgotten: whoever sends offsets takes it before he commits them. Whether there are some is asked
# behind it, in a statement of its own.
_LOCK: Final = (
    select(offset_producers.c.producer_id)
    .where(offset_producers.c.producer_id.in_(bindparam("producer_ids", expanding=True)))
    .order_by(offset_producers.c.producer_id)
    .with_for_update()
)
_HOLDING: Final = select(pending_group_offsets.c.producer_id).where(
    pending_group_offsets.c.producer_id.in_(bindparam("producer_ids", expanding=True))
)
_FORGET: Final = delete(offset_producers).where(
    offset_producers.c.producer_id.in_(bindparam("producer_ids", expanding=True)),
    offset_producers.c.last_update_ms <= bindparam("before_ms"),
)


def add_offsets_from_elsewhere(
    connection: Connection,
    committer: GroupMembership,
    offsets: Mapping[int, OffsetAndMetadata],
    producer: ProducerIdentity,
) -> None:
    """Let the open transaction of `producer` hold offsets; its coordinator must have the group in it already.

    Raises:
        InvalidProducerEpoch: the transaction is over; this comes too late.
        UnannouncedProducerError: the producer is not known here; see `announce_offset_producer`.
        TxnStoreError: see `offsets.add_pending_offsets`.
    """
    # It locks the group: whoever ends the transaction comes before or after all of this.
    add_pending_offsets(connection, committer, offsets, producer)
    of = {"of_producer_id": producer.producer_id}
    # Locked: whoever forgets it waits, and finds the offsets.
    newest = connection.execute(_EPOCH.with_for_update(), of).scalar_one_or_none()
    if newest is None:
        raise UnannouncedProducerError
    if producer.epoch < newest:
        raise InvalidProducerEpoch(
            f"offsets of producer {producer} came after the end of their transaction, which left epoch {newest};"
            " nothing was changed"
        )


def announce_offset_producer(connection: Connection, producer: ProducerIdentity) -> None:
    """Let it be known that the producer may send offsets, before its coordinator is asked whether it still may.

    For the same reason as `log.append.announce`: offsets that were added to a transaction that is over, by a producer
    that is forgotten, would stay pending for ever.
    """
    connection.execute(_ANNOUNCE, {"producer_id": producer.producer_id, "producer_epoch": producer.epoch})


def finish_offsets_from_elsewhere(
    connection: Connection, group_ids: Iterable[str], marker: ProducerIdentity, *, commit: bool
) -> None:
    """Count in, or drop, what a decided transaction holds in groups that live here; `marker` has the epoch after it.

    All groups that the transaction has here are given at once.  Nothing is left to do if it was done before.
    """
    names = sorted(group_ids)
    for group_id in names:
        # A group that offsets were announced for and never sent is made: what is late must find a lock to wait for.
        ensure_group(connection, group_id)
        lock_group(connection, group_id)
    newest = _newest_epoch(connection, marker.producer_id)
    if newest is not None and newest >= marker.epoch:
        return
    finish_pending_offsets(connection, names, marker.producer_id, commit=commit)
    connection.execute(_RAISE, {"producer_id": marker.producer_id, "producer_epoch": marker.epoch})


def forget_offset_producers(store: Store, *, before_ms: int, rows_max: int) -> int:
    """Forget producers of other databases that have been silent since `before_ms`; return how many.

    At least `rows_max`, or all that there are, oldest first and by the minute.

    Raises:
        TxnStoreError: the database refused; what was forgotten before stays so.
    """
    of = {"before_ms": before_ms, "before_minute": before_ms // MINUTE_MS, "rows_max": rows_max}
    forgotten = 0
    while forgotten < rows_max:
        found = store.read(lambda connection: connection.execute(_DUE, of).scalars().all())
        for some in chunks(found, ROWS_AT_ONCE):
            forgotten += write_portion(store, partial(_forget, some, before_ms))
        if len(found) < rows_max:
            break
    return forgotten


def _forget(producer_ids: Sequence[int], before_ms: int, connection: Connection) -> int:
    these = {"producer_ids": producer_ids}
    connection.execute(_LOCK, these)
    idle = sorted(set(producer_ids) - set(connection.execute(_HOLDING, these).scalars()))
    return connection.execute(_FORGET, {"producer_ids": idle, "before_ms": before_ms}).rowcount


def _newest_epoch(connection: Connection, producer_id: int) -> int | None:
    epoch: int | None = connection.execute(_EPOCH, {"of_producer_id": producer_id}).scalar_one_or_none()
    return epoch

"""The offsets of transactions whose coordinator is in another database than the group: sent, finished, and told late.

No lock of the coordinator's row guards them.  As in Kafka, where markers are written to the partition that holds a
group's offsets, the end of each transaction leaves a higher epoch of its producer behind: what comes later from an
older one is refused, and an end that is told twice, however late, changes nothing of the next transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from sqlalchemy import Connection, bindparam, delete, exists, select
from sqlalchemy.dialects.sqlite import insert as upsert

from txnstore.db.portions import Portions
from txnstore.db.schema import MINUTE_MS, offset_producers, pending_group_offsets
from txnstore.db.statements import HotStatement, is_listed
from txnstore.db.store import Store, server_now_ms
from txnstore.errors import InvalidProducerEpoch, InvalidTransactionState
from txnstore.groups.offsets import add_pending_offsets, drop_pending_offsets, finish_pending_offsets
from txnstore.groups.rows import ensure_group, lock_group
from txnstore.log.append import UnannouncedProducerError
from txnstore.log.sequences import EARLIER_IS_OPEN
from txnstore.model import GroupMembership, OffsetAndMetadata, ProducerIdentity

_PRODUCER_EPOCH: Final = select(offset_producers.c.producer_epoch).where(
    offset_producers.c.producer_id == bindparam("of_producer_id")
)
_IS_PRODUCER: Final = is_listed("of_producer_ids", offset_producers.c.producer_id)
_PRODUCER_EPOCHS: Final = HotStatement(
    select(offset_producers.c.producer_id, offset_producers.c.producer_epoch).where(_IS_PRODUCER)
)
_INSERT_PRODUCER: Final = upsert(offset_producers).values(last_update_ms=server_now_ms())
_RAISE_EPOCH: Final = _INSERT_PRODUCER.on_conflict_do_update(
    index_elements=[offset_producers.c.producer_id],
    set_={name: _INSERT_PRODUCER.excluded[name] for name in ("producer_epoch", "last_update_ms")},
    where=offset_producers.c.producer_epoch < _INSERT_PRODUCER.excluded.producer_epoch,
)
_ANNOUNCE: Final = _INSERT_PRODUCER.on_conflict_do_nothing(index_elements=[offset_producers.c.producer_id])
# A producer whose transaction holds offsets is kept: its end still comes.
_DUE_PRODUCERS: Final = (
    select(offset_producers.c.producer_id)
    .where(
        offset_producers.c.last_update_minute <= bindparam("before_minute"),
        offset_producers.c.last_update_ms <= bindparam("before_ms"),
        ~exists().where(pending_group_offsets.c.producer_id == offset_producers.c.producer_id),
    )
    .order_by(offset_producers.c.last_update_minute)
    .limit(bindparam("rows_max"))
)
# The lock of what is forgotten: a sender of offsets takes it before it commits them. Whether there are some is asked
# behind it, in a statement of its own.
_LOCK_PRODUCERS: Final = (
    select(offset_producers.c.producer_id)
    .where(offset_producers.c.producer_id.in_(bindparam("producer_ids", expanding=True)))
    .order_by(offset_producers.c.producer_id)
    .with_for_update()
)
_IS_HOLDING: Final = pending_group_offsets.c.producer_id.in_(bindparam("producer_ids", expanding=True))
_HOLDING: Final = select(pending_group_offsets.c.producer_id).where(_IS_HOLDING)
_HELD: Final = (
    select(pending_group_offsets.c.producer_id, pending_group_offsets.c.group_id).where(_IS_HOLDING).distinct()
)
_EARLIER_EPOCH: Final = (
    select(pending_group_offsets.c.producer_epoch)
    .where(
        pending_group_offsets.c.producer_id == bindparam("of_producer_id"),
        pending_group_offsets.c.group_id == bindparam("of_group_id"),
        pending_group_offsets.c.producer_epoch < bindparam("epoch"),
    )
    .limit(1)
)
_HELD_EPOCHS: Final = select(pending_group_offsets.c.producer_id, pending_group_offsets.c.producer_epoch).where(
    _IS_HOLDING
)
_FORGET_PRODUCERS: Final = delete(offset_producers).where(
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
        InvalidTransactionState: an earlier transaction of the producer holds offsets of the group.
        UnannouncedProducerError: the producer is not known here; see `announce_offset_producer`.
        TxnStoreError: see `add_pending_offsets`.
    """
    # It locks the group: the end of the transaction comes before or after all of this.
    add_pending_offsets(connection, committer, offsets, producer)
    of = {"of_producer_id": producer.producer_id}
    # Locked: the one that forgets it waits, and finds the offsets.
    newest = connection.execute(_PRODUCER_EPOCH.with_for_update(), of).scalar_one_or_none()
    if newest is None:
        raise UnannouncedProducerError
    if producer.epoch < newest:
        raise InvalidProducerEpoch(
            f"offsets of producer {producer} came after the end of their transaction, which left epoch {newest};"
            " nothing was changed"
        )
    earlier = connection.execute(_EARLIER_EPOCH, {**of, "of_group_id": committer.group_id, "epoch": producer.epoch})
    if (epoch := earlier.scalar()) is not None:
        # They would be counted in with those of this transaction.
        raise InvalidTransactionState(EARLIER_IS_OPEN.format(producer, epoch, f"the group {committer.group_id[:80]!r}"))


def announce_offset_producer(connection: Connection, producer: ProducerIdentity) -> None:
    """Let it be known that the producer may send offsets, before its coordinator is asked whether it still may.

    For the same reason as `log.append.announce`: offsets that were added to a transaction that is over, by a producer
    that is forgotten, would stay pending for ever.
    """
    connection.execute(_ANNOUNCE, {"producer_id": producer.producer_id, "producer_epoch": producer.epoch})


@dataclass(frozen=True, slots=True)
class EndedElsewhere:
    """A transaction that another database has decided, as the groups that live here are told."""

    marker: ProducerIdentity
    """Its producer, with the epoch after the decision."""

    group_ids: Collection[str]
    """All groups that it has here."""

    commit: bool
    begun_with: int | None = None
    """Its own epoch, if that is known: what is newer than this one is held by what came after."""

    @property
    def after_epoch(self) -> int:
        """The epoch from which on something is held by what came after."""
        return self.marker.epoch if self.begun_with is None else self.begun_with + 1


def finish_offsets_from_elsewhere(connection: Connection, ended: Sequence[EndedElsewhere]) -> dict[int, bool]:
    """Count in, or drop, what decided transactions hold in groups that live here, in the order given.

    Nothing is left to do for one of which it was done before.  Producers are returned that have gone on since, with
    whether they hold something here by what came after.
    """
    if not ended:
        return {}
    for group_id in sorted({group_id for each in ended for group_id in each.group_ids}):
        # A group that offsets were announced for and never sent is made: what is late must find a lock to wait for.
        ensure_group(connection, group_id)
        lock_group(connection, group_id)
    producer_ids = [each.marker.producer_id for each in ended]
    newest = dict(map(tuple, _PRODUCER_EPOCHS.rows(connection, _IS_PRODUCER.parameters(producer_ids))))
    late = {each.marker.producer_id for each in ended if newest.get(each.marker.producer_id, -1) >= each.marker.epoch}
    # Who takes over a prepared transaction may raise the epoch above that which its producer has gone on with.
    asked = late | {each.marker.producer_id for each in ended if each.after_epoch < each.marker.epoch}
    held = _held_epochs(connection, asked) if asked else {}
    going_on = {each.marker.producer_id for each in ended if held.get(each.marker.producer_id, -1) >= each.after_epoch}
    fresh = [each for each in ended if each.marker.producer_id not in late | going_on]
    dropped: dict[str, list[int]] = {}
    for each in fresh:
        if each.commit:
            finish_pending_offsets(connection, each.group_ids, each.marker.producer_id, commit=True)
        for group_id in () if each.commit else each.group_ids:
            dropped.setdefault(group_id, []).append(each.marker.producer_id)
    drop_pending_offsets(connection, dropped)
    raised = [{"producer_id": each.marker.producer_id, "producer_epoch": each.marker.epoch} for each in fresh]
    if raised:
        connection.execute(_RAISE_EPOCH, raised)
    return {
        marker.producer_id: marker.producer_id in going_on
        for marker in (each.marker for each in ended)
        if marker.producer_id in going_on or newest.get(marker.producer_id, -1) > marker.epoch
    }


def _held_epochs(connection: Connection, producer_ids: Collection[int]) -> dict[int, int]:
    """Return the newest epoch by which each of the producers holds something here."""
    newest: dict[int, int] = {}
    for producer_id, epoch in connection.execute(_HELD_EPOCHS, {"producer_ids": sorted(producer_ids)}):
        newest[producer_id] = max(epoch, newest.get(producer_id, epoch))
    return newest


def groups_held_for(connection: Connection, producer_ids: Collection[int]) -> dict[int, list[str]]:
    """Return the groups whose offsets transactions of these producers hold here, by producer id."""
    held: dict[int, list[str]] = {}
    for producer_id, group_id in connection.execute(_HELD, {"producer_ids": sorted(producer_ids)}):
        held.setdefault(producer_id, []).append(group_id)
    return held


def drop_offsets_of_lost(connection: Connection, held: Mapping[int, Collection[str]]) -> None:
    """Drop what producers hold in groups, by producer id, whose transactions no coordinator knows or will ever know.

    What comes from them later is refused, as after any other end.
    """
    # Locked as a sender locks them: behind that, nobody sends a newer epoch than is found.
    for group_id in sorted({group_id for group_ids in held.values() for group_id in group_ids}):
        lock_group(connection, group_id)
    newest = _held_epochs(connection, held)
    # A coordinator that had forgotten some of the groups may have ended the others with a newer epoch than is held.
    for producer_id, epoch in _PRODUCER_EPOCHS.rows(connection, _IS_PRODUCER.parameters(held)):
        newest[producer_id] = max(epoch, newest.get(producer_id, epoch))
    finish_offsets_from_elsewhere(
        connection,
        [
            EndedElsewhere(ProducerIdentity(producer_id, epoch + 1), held[producer_id], commit=False)
            for producer_id, epoch in newest.items()
        ],
    )


def forget_offset_producers(store: Store, portions: Portions | None = None, *, before_ms: int, rows_max: int) -> int:
    """Forget producers of other databases that have been silent since `before_ms`; return how many.

    At least `rows_max`, or all that there are, or what there is time for, oldest first and by the minute.

    Raises:
        TxnStoreError: the database refused; what was forgotten before stays so.
    """
    of = {"before_ms": before_ms, "before_minute": before_ms // MINUTE_MS, "rows_max": rows_max}
    return (portions or Portions()).forget(
        store,
        lambda connection: {None: connection.execute(_DUE_PRODUCERS, of).scalars().all()},
        lambda _, some: partial(_forget_producers, some, before_ms),
        rows_max=rows_max,
    )


def _forget_producers(producer_ids: Sequence[int], before_ms: int, connection: Connection) -> int:
    these = {"producer_ids": producer_ids}
    connection.execute(_LOCK_PRODUCERS, these)
    idle = sorted(set(producer_ids) - set(connection.execute(_HOLDING, these).scalars()))
    return connection.execute(_FORGET_PRODUCERS, {"producer_ids": idle, "before_ms": before_ms}).rowcount

"""Many transactions at once: aborted for their age, or completed, by one database transaction as each by its own.

Whatever is said of them is said once for all: locks, reads and writes come to about as many round trips however many
they are, and one COMMIT waits for the disk.  What they have left to other databases goes there together, too, one
database transaction in each.  What is unusual about one (it has branches; it was decided before this database heard of
a partition of its own) is left to the functions of `transaction`, as is one that somebody is at work on: here nobody
waits for the lock of a transactional id, so whoever holds many of them stands in no circle.  Heads of partitions and
groups come after them, in the order of their ids.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, delete, select, union

from txnstore.db.cluster.cluster import Cluster, Locality, several
from txnstore.db.schema import (
    pending_markers,
    transaction_groups,
    transaction_partitions,
    transaction_writer_partitions,
    transaction_writers,
    transactions,
)
from txnstore.db.statements import HotStatement, is_listed
from txnstore.db.store import Store, note_change, server_now_ms
from txnstore.errors import InvalidProducerIdMapping, StoreUnavailable, TxnStoreError
from txnstore.groups.offsets import drop_pending_offsets
from txnstore.log.append import Marker, write_markers
from txnstore.log.partition_rows import allocate_producer_id
from txnstore.transactions import protocol, rows
from txnstore.transactions.delivery import Delivered, PendingDelivery, deliver
from txnstore.transactions.protocol import DECIDED, FenceReason, TransactionMetadata
from txnstore.transactions.rows import NO_PARTICIPANTS, Participants
from txnstore.transactions.transaction import complete_decided, is_left

_log = logging.getLogger(__name__)


def _is_wanted(transactional_id: ColumnElement[str]) -> is_listed:
    return is_listed("of_transactional_ids", transactional_id)


_WANTED: Final = _is_wanted(transactions.c.transactional_id)
# It says of each row what it finds once it has the lock. (SQLite: the whole database transaction holds the write lock.)
_LOCK_FREE: Final = HotStatement(
    select(*rows.ROW, server_now_ms().label("now_ms")).where(_WANTED).with_for_update(skip_locked=True)
)
_PARTICIPANTS: Final = HotStatement(rows.select_participants(_is_wanted))
_GROUPS: Final = HotStatement(
    select(transaction_groups.c.transactional_id, transaction_groups.c.group_id).where(
        _is_wanted(transaction_groups.c.transactional_id)
    )
)
_READ: Final = HotStatement(select(*rows.ROW).where(_WANTED))
_IS_QUEUED: Final = _is_wanted(pending_markers.c.transactional_id)
_QUEUED: Final = HotStatement(
    select(pending_markers).where(_IS_QUEUED).order_by(pending_markers.c.partition_id, pending_markers.c.producer_id)
)
_WAITING: Final = HotStatement(
    union(
        select(pending_markers.c.transactional_id).where(_IS_QUEUED),
        select(transaction_groups.c.transactional_id).where(_is_wanted(transaction_groups.c.transactional_id)),
    )
)
_ARE_MARKERS: Final = is_listed("markers", pending_markers.c.transactional_id, pending_markers.c.partition_id)
_STRIKE_OFF_MARKERS: Final = delete(pending_markers).where(_ARE_MARKERS)
_ARE_GROUPS: Final = is_listed("groups", transaction_groups.c.transactional_id, transaction_groups.c.group_id)
_STRIKE_OFF_GROUPS: Final = delete(transaction_groups).where(_ARE_GROUPS)
_FORGET_PARTITIONS, _FORGET_GROUPS, _FORGET_WRITER_PARTITIONS, _FORGET_WRITERS = (
    delete(table).where(_is_wanted(table.c.transactional_id))
    for table in (transaction_partitions, transaction_groups, transaction_writer_partitions, transaction_writers)
)


@dataclass(frozen=True, slots=True)
class TimedOut:
    """What became of transactions that were to be aborted for their age together, by transactional id."""

    aborted: Sequence[str]
    undelivered: Sequence[str] = ()
    """Those of them that have left something to other databases: they are decided, and not complete."""

    busy: Sequence[str] = ()
    """Somebody is at work on these, or nobody knows them any more."""

    unusual: Sequence[str] = ()
    """These are to be aborted by themselves."""


def abort_together(transactional_ids: Collection[str], locality: Locality | None, connection: Connection) -> TimedOut:
    """Abort those of the transactions whose time is up; those whose time is not, or that are over, stay as they are.

    Raises:
        TxnStoreError: see `log.append.write_markers` and `groups.offsets.drop_pending_offsets`; none is aborted.
    """
    found = _LOCK_FREE.rows(connection, _WANTED.parameters(transactional_ids))
    locked = {row.transactional_id: row for row in map(rows.metadata_from_row, found)}
    late: list[_Late] = []
    unusual: set[str] = set()
    undelivered: Sequence[str] = ()
    if locked:
        now_ms = found[0].now_ms
        in_order = [locked[name] for name in transactional_ids if name in locked]
        late = _read_late(connection, [row for row in in_order if protocol.has_timed_out(row, now_ms)])
        unusual = {each.row.transactional_id for each in late if each.participants.has_branches}
        usual = [each for each in late if each.row.transactional_id not in unusual]
        undelivered = _abort(connection, usual, locality, now_ms)
    names = [each.row.transactional_id for each in late]
    return TimedOut(
        tuple(name for name in names if name not in unusual),
        undelivered,
        tuple(name for name in transactional_ids if name not in locked),
        tuple(name for name in names if name in unusual),
    )


@dataclass(frozen=True, slots=True)
class _Late:
    """A transaction whose time is up, and who takes part in it."""

    row: TransactionMetadata
    participants: Participants
    group_ids: Sequence[str]


def _read_late(connection: Connection, late: Sequence[TransactionMetadata]) -> list[_Late]:
    if not late:
        return []
    these = _WANTED.parameters([row.transactional_id for row in late])
    participants: dict[str, list[Any]] = {}
    for found in _PARTICIPANTS.rows(connection, these):
        participants.setdefault(found.transactional_id, []).append(found)
    group_ids: dict[str, list[str]] = {}
    for found in _GROUPS.rows(connection, these):
        group_ids.setdefault(found.transactional_id, []).append(found.group_id)
    return [
        _Late(
            row,
            rows.participants_from(participants[name]) if name in participants else NO_PARTICIPANTS,
            group_ids.get(name, ()),
        )
        for row in late
        for name in [row.transactional_id]
    ]


def _abort(connection: Connection, late: Collection[_Late], locality: Locality | None, now_ms: int) -> tuple[str, ...]:
    """Abort them; return the ids of those that are not complete with that."""
    if not late:
        return ()
    partitions_away: Collection[int] = ()
    groups_away: Collection[str] = ()
    if locality is not None:
        numbers = {number for each in late for number in each.participants.all_partition_ids}
        partitions_away = locality.partitions_elsewhere(connection, numbers)
        groups_away = locality.groups_elsewhere({group_id for each in late for group_id in each.group_ids})
    changes: list[rows.RowChange] = []
    markers: list[Marker] = []
    queued: dict[str, list[Marker]] = {}
    producer_ids: dict[str, list[int]] = {}
    complete: list[_Late] = []
    finished_groups: list[tuple[str, str]] = []
    for each in late:
        name = each.row.transactional_id
        decided = protocol.fence_and_abort(
            each.row,
            FenceReason.TIMEOUT,
            protocol.timeout_detail(each.row, now_ms),
            now_ms=now_ms,
            allocate=partial(allocate_producer_id, connection),
        )
        own = rows.markers_of(decided, each.participants, ())
        away = [marker for marker in own if marker.partition_id in partitions_away]
        markers += (marker for marker in own if marker.partition_id not in partitions_away)
        here = [group_id for group_id in each.group_ids if group_id not in groups_away]
        for group_id in here:
            producer_ids.setdefault(group_id, []).append(decided.producer_id)
        if away or len(here) < len(each.group_ids):
            queued[name] = away
            finished_groups += ((name, group_id) for group_id in here)
            changes.append(rows.RowChange(each.row, [decided]))
        else:
            complete.append(each)
            changes.append(rows.RowChange(each.row, [decided, protocol.complete(decided, now_ms=now_ms)]))
    # Whoever reads waits for markers and offsets alone.
    note_change(connection)
    write_markers(connection, markers)
    drop_pending_offsets(connection, producer_ids)
    rows.queue_markers(connection, queued)
    if finished_groups:
        connection.execute(_STRIKE_OFF_GROUPS, _ARE_GROUPS.parameters(finished_groups))
    if complete:
        _forget(
            connection,
            [each.row.transactional_id for each in complete],
            groups=any(each.group_ids for each in complete),
            writers=any(each.participants.has_reported for each in complete),
        )
    rows.save_each(connection, changes, reason="timeout")
    return tuple(queued)


def _forget(connection: Connection, transactional_ids: Sequence[str], *, groups: bool, writers: bool) -> None:
    """Remove who took part in transactions that are complete."""
    these = _WANTED.parameters(transactional_ids)
    connection.execute(_FORGET_PARTITIONS, these)
    if groups:
        connection.execute(_FORGET_GROUPS, these)
    if writers:
        connection.execute(_FORGET_WRITER_PARTITIONS, these)
        connection.execute(_FORGET_WRITERS, these)


# --- the completion ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Completed:
    """What became of decided transactions that were to be completed together."""

    completed: Sequence[str]
    put_off: Mapping[str, TxnStoreError]
    """Why the others are not complete, by transactional id."""


def complete_together(store: Store, cluster: Cluster | None, transactional_ids: Sequence[str]) -> Completed:
    """Deliver what the decided transactions have left to other databases, and complete them, as each by itself.

    Nothing happens to those that are not decided, or complete meanwhile.  May be called by anyone, twice, and by two at
    once.  One that cannot be completed keeps no other one from it.

    Raises:
        StoreUnavailable: the coordinator's own database cannot be reached.
    """
    others = several(cluster)
    delivered: dict[str, Delivered] = {}
    rest: Collection[str] = transactional_ids
    if others is not None:
        left = store.read(partial(_read_undelivered, transactional_ids))
        delivered = dict(zip(left, deliver(others, store.database_id, list(left.values())), strict=True))
        # What waits for a database that is away costs no write at each look.
        news = {name: each for name, each in delivered.items() if each.error is None or each.is_news}
        rest = _try_to_strike_off(store, left, news) if news else ()
    put_off = {name: each.error for name, each in delivered.items() if each.error is not None}
    if put_off:
        # Others may have completed it meanwhile, and it may have gone on: what came too late for that was refused.
        decided = store.read(partial(_read_decided, put_off))
        put_off = {name: error for name, error in put_off.items() if is_left(decided.get(name), left[name])}
    for name in transactional_ids:
        if name in rest and (name not in delivered or delivered[name].error is None):
            error = _complete_by_itself(store, cluster, name)
            if error is not None:
                put_off[name] = error
    return Completed([name for name in transactional_ids if name not in put_off], put_off)


def _try_to_strike_off(
    store: Store, left: Mapping[str, PendingDelivery], delivered: Mapping[str, Delivered]
) -> Collection[str]:
    try:
        # Nobody waits for it: the markers and offsets, which readers wait for, were delivered before.
        return store.write(partial(_strike_off, left, delivered))
    except StoreUnavailable:
        raise
    except TxnStoreError as error:
        # Of one of them something is damaged: that keeps no other one from it.
        _log.debug("%s decided transactions could not be completed together: %s", len(delivered), error)
        return delivered


def _complete_by_itself(store: Store, cluster: Cluster | None, transactional_id: str) -> TxnStoreError | None:
    try:
        complete_decided(store, transactional_id, cluster)
    except InvalidProducerIdMapping:
        # It was forgotten meanwhile: there is nothing left to do.
        return None
    except TxnStoreError as error:
        return error
    return None


def _read_decided(transactional_ids: Collection[str], connection: Connection) -> dict[str, TransactionMetadata]:
    found = map(rows.metadata_from_row, _READ.rows(connection, _WANTED.parameters(transactional_ids)))
    return {row.transactional_id: row for row in found if row.state in DECIDED}


def _read_undelivered(transactional_ids: Collection[str], connection: Connection) -> dict[str, PendingDelivery]:
    these = _WANTED.parameters(transactional_ids)
    decided = _read_decided(transactional_ids, connection)
    markers: dict[str, list[Marker]] = {}
    for found in _QUEUED.rows(connection, these):
        markers.setdefault(found.transactional_id, []).append(rows.queued_marker(found))
    group_ids: dict[str, list[str]] = {}
    for found in _GROUPS.rows(connection, these):
        group_ids.setdefault(found.transactional_id, []).append(found.group_id)
    return {
        name: PendingDelivery(decided[name], markers.get(name, ()), sorted(group_ids.get(name, ())))
        for name in transactional_ids
        if name in decided
    }


def _strike_off(
    left: Mapping[str, PendingDelivery], delivered: Mapping[str, Delivered], connection: Connection
) -> list[str]:
    """Take note of what was delivered, and complete those of which nothing is left; return the ids of the others.

    Those that somebody is at work on are among them.
    """
    found = _LOCK_FREE.rows(connection, _WANTED.parameters(delivered))
    locked = {row.transactional_id: row for row in map(rows.metadata_from_row, found)}
    # Others may have been here too, and it may have gone on since: nothing here is about what comes after.
    ours = [name for name in delivered if name in locked and is_left(locked[name], left[name])]
    if ours:
        markers = [(name, number) for name in ours for number in delivered[name].partition_ids]
        if markers:
            connection.execute(_STRIKE_OFF_MARKERS, _ARE_MARKERS.parameters(markers))
        groups = [(name, group_id) for name in ours for group_id in delivered[name].group_ids]
        if groups:
            connection.execute(_STRIKE_OFF_GROUPS, _ARE_GROUPS.parameters(groups))
        # Whoever has struck off something since it was read has his share in what is left now.
        waiting = set(_WAITING.values(connection, _WANTED.parameters(ours)))
        complete = [name for name in ours if name not in waiting]
        if complete:
            _forget(connection, complete, groups=False, writers=True)
            now_ms = found[0].now_ms
            changes = [
                rows.RowChange(locked[name], [protocol.complete(locked[name], now_ms=now_ms)]) for name in complete
            ]
            rows.save_each(connection, changes, reason="completion")
        ours = [name for name in ours if name in waiting]
    return [*(name for name in delivered if name not in locked), *ours]

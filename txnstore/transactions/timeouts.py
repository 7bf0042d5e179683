"""The abort of many transactions whose time is up by one database transaction, as each would be by one of its own.

Whatever is said of them is said once for all: locks, reads and writes come to about as many round trips however many
they are, and one COMMIT waits for the disk.  What is unusual about one (it has branches, or a share in another
database) is left to `transaction.abort_if_timed_out`, as is one that somebody is at work on: here nobody waits for the
lock of a transactional id, so whoever holds many of them stands in no circle.  Heads of partitions and groups come
after them, in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, delete, select

from txnstore.db.cluster.cluster import Locality
from txnstore.db.schema import (
    transaction_groups,
    transaction_partitions,
    transaction_writer_partitions,
    transaction_writers,
    transactions,
)
from txnstore.db.statements import HotStatement, is_listed
from txnstore.db.store import note_change, server_now_ms
from txnstore.groups.offsets import drop_pending_offsets
from txnstore.log.append import write_markers
from txnstore.log.partition_rows import allocate_producer_id
from txnstore.transactions import protocol, rows
from txnstore.transactions.protocol import FenceReason, TransactionMetadata
from txnstore.transactions.rows import NO_PARTICIPANTS, Participants


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
_FORGET_PARTITIONS, _FORGET_GROUPS, _FORGET_WRITER_PARTITIONS, _FORGET_WRITERS = (
    delete(table).where(_is_wanted(table.c.transactional_id))
    for table in (transaction_partitions, transaction_groups, transaction_writer_partitions, transaction_writers)
)


@dataclass(frozen=True, slots=True)
class TimedOut:
    """What became of transactions that were to be aborted for their age together, by transactional id."""

    aborted: Sequence[str]
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
    if locked:
        now_ms = found[0].now_ms
        in_order = [locked[name] for name in transactional_ids if name in locked]
        late = _read_late(connection, [row for row in in_order if protocol.has_timed_out(row, now_ms)])
        unusual = _unusual(connection, late, locality)
        _abort(connection, [each for each in late if each.row.transactional_id not in unusual], now_ms)
    names = [each.row.transactional_id for each in late]
    return TimedOut(
        tuple(name for name in names if name not in unusual),
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


def _unusual(connection: Connection, late: Collection[_Late], locality: Locality | None) -> set[str]:
    """Return the ids of those that are not aborted by what is written to this database alone."""
    unusual = {each.row.transactional_id for each in late if each.participants.has_branches}
    if locality is None:
        return unusual
    partition_ids = {number for each in late for number in each.participants.all_partition_ids}
    partitions_away = locality.partitions_elsewhere(connection, partition_ids)
    groups_away = locality.groups_elsewhere({group_id for each in late for group_id in each.group_ids})
    return unusual | {
        each.row.transactional_id
        for each in late
        if not partitions_away.isdisjoint(each.participants.all_partition_ids)
        or not groups_away.isdisjoint(each.group_ids)
    }


def _abort(connection: Connection, late: Collection[_Late], now_ms: int) -> None:
    if not late:
        return
    changes, markers = [], []
    producer_ids: dict[str, list[int]] = {}
    for each in late:
        decided = protocol.fence_and_abort(
            each.row,
            FenceReason.TIMEOUT,
            protocol.timeout_detail(each.row, now_ms),
            now_ms=now_ms,
            allocate=partial(allocate_producer_id, connection),
        )
        markers += rows.markers_of(decided, each.participants, ())
        for group_id in each.group_ids:
            producer_ids.setdefault(group_id, []).append(decided.producer_id)
        changes.append(rows.Change(each.row, [decided, protocol.complete(decided, now_ms=now_ms)]))
    # Whoever reads waits for markers and offsets alone.
    note_change(connection)
    write_markers(connection, markers)
    drop_pending_offsets(connection, producer_ids)
    these = _WANTED.parameters([each.row.transactional_id for each in late])
    connection.execute(_FORGET_PARTITIONS, these)
    if producer_ids:
        connection.execute(_FORGET_GROUPS, these)
    if any(each.participants.has_reported for each in late):
        connection.execute(_FORGET_WRITER_PARTITIONS, these)
        connection.execute(_FORGET_WRITERS, these)
    rows.save_each(connection, changes, reason="timeout")

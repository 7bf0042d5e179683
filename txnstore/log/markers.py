"""Markers that come by themselves: the ends of transactions in the partitions of one database, many at once or one.

A decision that comes with a transaction's last batches has its markers written with them (`log.append`).  The rows and
the rules are the same.  Here what all markers have in common stands in the statements, and of a producer only that is
read which a marker asks for: thousands may end at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop
from types import MappingProxyType
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, bindparam, insert, literal_column, null, select, true, update

from txnstore.db.ddl import Int16, Int32, Int64
from txnstore.db.schema import finished_transactions, producer_states, record_batches
from txnstore.db.statements import HotStatement
from txnstore.db.store import must_hit_each
from txnstore.log.append import Marker, is_there_already
from txnstore.log.codec import marker_checksum
from txnstore.log.partition_rows import (
    ProducerKey,
    draw_commit_number,
    lock_heads,
    read_marked_producers,
    save_heads,
    save_producer_states,
)
from txnstore.log.sequences import MarkedProducer, ProducerInPartition
from txnstore.model import NO_SEQUENCE, ControlType

# What is said of one marker: each of the statements takes its share.
_PARTITION_ID: Final = bindparam("of_partition_id", type_=Int64)
_PRODUCER_ID: Final = bindparam("of_producer_id", type_=Int64)
_OFFSET: Final = bindparam("at_offset", type_=Int64)
_OUTCOME: Final = bindparam("of_outcome", type_=Int16)
_EPOCH: Final = bindparam("new_epoch", type_=Int32)
_COORDINATOR_EPOCH: Final = bindparam("new_coordinator_epoch", type_=Int32)
_NOW_MS: Final = bindparam("new_now_ms", type_=Int64)
_ZERO: Final[ColumnElement[Any]] = literal_column("0")
_NOTHING_KNOWN: Final[Mapping[ProducerKey, int]] = MappingProxyType({})
#: A marker's columns but for those that are NULL.
_MARKER: Final[Mapping[str, Any]] = {
    "partition_id": _PARTITION_ID,
    "last_offset": _OFFSET,
    "base_offset": _OFFSET,
    "base_timestamp_ms": _NOW_MS,
    "max_timestamp_ms": _NOW_MS,
    "running_max_timestamp_ms": bindparam("new_running_max_timestamp_ms", type_=Int64),
    "producer_id": _PRODUCER_ID,
    "crc": bindparam("new_crc", type_=Int64),
    "record_count": literal_column("1"),
    "producer_epoch": _EPOCH,
    "base_sequence": literal_column(str(NO_SEQUENCE)),
    "coordinator_epoch": _COORDINATOR_EPOCH,
    "size_bytes": _ZERO,
    "timestamp_type": _ZERO,
    "control_type": _OUTCOME,
    "codec": _ZERO,
    "segment": bindparam("of_segment", type_=Int16),
    "is_transactional": true(),
}
_FINISHED: Final[Mapping[str, Any]] = {
    "partition_id": _PARTITION_ID,
    "marker_offset": _OFFSET,
    "producer_id": _PRODUCER_ID,
    "first_offset": bindparam("of_first_offset", type_=Int64),
    "last_stable_offset": bindparam("new_last_stable_offset", type_=Int64),
    "commit_number": bindparam("new_commit_number", type_=Int64),
    "producer_epoch": bindparam("of_epoch", type_=Int32),
    "outcome": _OUTCOME,
}
_INSERT_MARKERS, _INSERT_FINISHED = (
    HotStatement(insert(table).from_select(list(columns), select(*columns.values())), may_be_listed=True)
    for table, columns in ((record_batches, _MARKER), (finished_transactions, _FINISHED))
)
# The first batch of an open transaction.
_BEGAN_WITH_EPOCH: Final = HotStatement(
    select(record_batches.c.producer_epoch)
    .where(record_batches.c.partition_id == _PARTITION_ID, record_batches.c.producer_id == _PRODUCER_ID)
    .where(record_batches.c.last_offset >= bindparam("from_offset"))
    .order_by(record_batches.c.last_offset)
    .limit(1)
)
# The epoch is new, so the producer's sequence numbers begin at 0 again (KIP-890).
_END: Final = HotStatement(
    update(producer_states)
    .where(producer_states.c.partition_id == _PARTITION_ID, producer_states.c.producer_id == _PRODUCER_ID)
    .values(
        producer_epoch=_EPOCH,
        recent_batches=literal_column("'[]'"),
        coordinator_epoch=_COORDINATOR_EPOCH,
        last_timestamp_ms=_NOW_MS,
        transaction_first_offset=null(),
    ),
    may_be_listed=True,
)


def write_markers(
    connection: Connection, markers: Sequence[Marker], begun_with: Mapping[ProducerKey, int] = _NOTHING_KNOWN
) -> dict[ProducerKey, bool]:
    """Write markers; each transaction is then over in its partition, in the order given.

    A marker that is there already is not written again (KAFKA-19999).  `begun_with` tells of some the epoch that the
    transaction has begun with.  Of these none is written where the producer has gone on with a newer one: they are
    returned, with whether that has something open there, which is no part of the transaction.

    Raises:
        UnknownTopicOrPartition: a partition is not in this database.
        InvalidProducerEpoch: the partition has seen a newer epoch of a producer that is not one of `begun_with`.
        TransactionCoordinatorFenced: the partition has a marker of a newer coordinator.
    """
    outrun: dict[ProducerKey, bool] = {}
    if not markers:
        return outrun
    ends = Counter(marker.partition_id for marker in markers)
    locked = lock_heads(connection, ends)
    # Of those that are open the oldest will do: one of them is left when so many have ended.
    oldest_open = {partition_id: ended + 1 for partition_id, ended in ends.items()}
    producers = read_marked_producers(connection, {marker.key for marker in markers}, oldest_open=oldest_open)
    known = set(producers)
    open_in = _OpenTransactions(producers)
    now_ms = locked.now_ms
    placed: list[dict[str, Any]] = []
    finished: list[dict[str, Any]] = []
    ended: dict[ProducerKey, dict[str, Any]] = {}
    for marker in markers:
        partition_id, producer = marker.partition_id, marker.producer
        key = (partition_id, producer.producer_id)
        state = producers.get(key)
        if state is not None and _is_outrun(connection, marker, state, begun_with.get(key)):
            outrun[key] = state.transaction_first_offset is not None
            continue
        if state is not None and is_there_already(marker, state):
            continue
        head = locked.heads[partition_id]
        offset = head.next_offset
        head.next_offset = offset + 1
        row: dict[str, Any] = {
            "of_partition_id": partition_id,
            "of_producer_id": producer.producer_id,
            "at_offset": offset,
            "of_segment": head.segment,
            "of_outcome": int(marker.control_type),
            "new_epoch": producer.epoch,
            "new_coordinator_epoch": marker.coordinator_epoch,
            "new_now_ms": now_ms,
            "new_running_max_timestamp_ms": head.running_max_timestamp_ms,
            "new_crc": marker_checksum(marker.control_type, marker.coordinator_epoch, producer, now_ms),
        }
        placed.append(row)
        ended[key] = row
        producers[key] = MarkedProducer(producer.epoch, marker.coordinator_epoch, None)
        if state is not None and state.transaction_first_offset is not None:
            row["of_first_offset"] = state.transaction_first_offset
            row["of_epoch"] = state.epoch
            row["new_last_stable_offset"] = open_in.oldest(partition_id, otherwise=offset + 1)
            row["new_commit_number"] = None
            finished.append(row)
    if not placed:
        return outrun
    committed = [row for row in finished if row["of_outcome"] == ControlType.COMMIT]
    if committed:
        number = draw_commit_number(connection)
        for row in committed:
            row["new_commit_number"] = number
    _INSERT_MARKERS.run_each(connection, placed)
    moved = sorted({row["of_partition_id"] for row in placed})
    save_heads(connection, [locked.heads[partition_id] for partition_id in moved])
    _save_producers(connection, ended, known)
    if finished:
        _INSERT_FINISHED.run_each(connection, finished)
    return outrun


def _is_outrun(connection: Connection, marker: Marker, state: MarkedProducer, begun_with: int | None) -> bool:
    """Return whether the producer has gone on here after the transaction that the marker is to end."""
    if begun_with is None or state.epoch <= begun_with or marker.coordinator_epoch < state.coordinator_epoch:
        return False
    if state.transaction_first_offset is None:
        return state.epoch > marker.producer.epoch
    of = {
        "of_partition_id": marker.partition_id,
        "of_producer_id": marker.producer.producer_id,
        "from_offset": state.transaction_first_offset,
    }
    epoch = _BEGAN_WITH_EPOCH.value(connection, of)
    # Else it is damage: what is open is what the marker is to end, or the log does not tell.
    return epoch is not None and epoch > begun_with


def _save_producers(
    connection: Connection, ended: Mapping[ProducerKey, Mapping[str, Any]], known: set[ProducerKey]
) -> None:
    new = {
        key: ProducerInPartition(key[1], row["new_epoch"], (), row["new_coordinator_epoch"], row["new_now_ms"], None)
        for key, row in ended.items()
        if key not in known
    }
    save_producer_states(connection, new, {})
    changed = [row for key, row in ended.items() if key in known]
    if changed:
        # One that is missed would hide its transaction: nothing would hold the last stable offset, nor tell its end.
        must_hit_each(connection, _END, changed)


class _OpenTransactions:
    """What is open in partitions while markers end some of it."""

    def __init__(self, producers: Mapping[ProducerKey, MarkedProducer]) -> None:
        """Begin with what the partitions know of `producers`, who change as their transactions end."""
        self._producers = producers
        self._open: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for (partition_id, producer_id), state in producers.items():
            if state.transaction_first_offset is not None:
                self._open[partition_id].append((state.transaction_first_offset, producer_id))
        for found in self._open.values():
            heapify(found)

    def oldest(self, partition_id: int, *, otherwise: int) -> int:
        """Return where the oldest transaction begins that is still open in the partition."""
        found = self._open[partition_id]
        while found:
            first_offset, producer_id = found[0]
            if self._producers[partition_id, producer_id].transaction_first_offset == first_offset:
                return first_offset
            # It has ended meanwhile.
            heappop(found)
        return otherwise

"""What is written to partitions: record batches get their offsets, markers end transactions, and both become rows.

The heads of the partitions are locked once (`LockedPartitions`); batches and markers are placed in memory while the
locks are held, and written together: one INSERT, one UPDATE of the heads, one of the producers.

The check against what a producer sent before and the insert happen under the same lock, so a batch is recognised
as a repetition however late and from wherever it comes.  A producer whose answer was lost finds the batches of a
transaction that has finished since (`find_appended`).

A marker's epoch is above that of the records it ends (KIP-890, KIP-1228): whatever their producer sends late is old
by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from sqlalchemy import Connection, bindparam, insert, select

from txnstore.config import Settings
from txnstore.db.schema import finished_transactions, partition_heads, record_batches
from txnstore.db.statements import HotStatement
from txnstore.errors import (
    InvalidProducerEpoch,
    InvalidRecord,
    InvalidTimestamp,
    InvalidTransactionState,
    RecordTooLarge,
    TransactionCoordinatorFenced,
)
from txnstore.log.codec import EncodedBatch, encode_control
from txnstore.log.partition_rows import (
    Head,
    ProducerKey,
    lock_heads,
    read_producer_states,
    save_heads,
    save_producer_states,
)
from txnstore.log.sequences import (
    ProducerInPartition,
    RecentBatch,
    check_append,
    find_duplicate,
    last_sequence_of,
    remember,
)
from txnstore.log.topics import DEFAULT_TOPIC_SETTINGS
from txnstore.model import NO_PRODUCER_ID, NO_SEQUENCE, NO_TIMESTAMP_MS, ControlType, ProducerIdentity, TimestampType

#: Of the state of a producer that no marker has touched.
_NO_COORDINATOR_EPOCH: Final = -1
#: How many rows of the index are read in one go.
_PAGE_ROWS: Final = 1_000
_INSERT_BATCHES: Final = HotStatement(insert(record_batches))
_INSERT_FINISHED: Final = HotStatement(insert(finished_transactions))
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
# How transactions ended, in the order of their ends.
_HISTORY: Final = (
    select(finished_transactions)
    .where(finished_transactions.c.partition_id == bindparam("of_partition_id"))
    .where(finished_transactions.c.marker_offset >= bindparam("from_offset"))
    .order_by(finished_transactions.c.marker_offset)
    .limit(bindparam("count_max"))
)


@dataclass(frozen=True, slots=True)
class Append:
    """One batch for one partition, under the settings of its topic."""

    partition_id: int
    batch: EncodedBatch
    topic_settings: Settings = field(default_factory=lambda: DEFAULT_TOPIC_SETTINGS)


@dataclass(frozen=True, slots=True)
class Appended:
    """Where a batch stands now; Kafka's answer to a produce request."""

    partition_id: int
    base_offset: int
    last_offset: int
    log_append_time_ms: int
    """The store's time if the topic stamps its records, else -1."""

    log_start_offset: int
    is_duplicate: bool = False
    """Whether the batch was there already: a repetition of one whose answer was lost."""

    begins_transaction: bool = False
    """Whether the batch is the first of its transaction in this partition."""


@dataclass(frozen=True, slots=True)
class Marker:
    """The end of one producer's transaction in one partition."""

    partition_id: int
    producer: ProducerIdentity
    """The producer, with the marker's own epoch."""

    control_type: ControlType
    coordinator_epoch: int = 0

    @property
    def key(self) -> ProducerKey:
        """The producer in the partition."""
        return (self.partition_id, self.producer.producer_id)


class UnannouncedProducerError(Exception):
    """A partition does not know the producer whose transaction is coordinated in another database; see `announce`."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a batch will stand."""

    base_offset: int
    last_offset: int
    begins_transaction: bool = False


@dataclass
class LockedPartitions:
    """Changes of some partitions; nothing is written before `save`."""

    connection: Connection
    heads: Mapping[int, Head]
    now_ms: int
    _known: dict[ProducerKey, ProducerInPartition]
    _changed: dict[ProducerKey, ProducerInPartition] = field(default_factory=dict)
    _batches: list[dict[str, Any]] = field(default_factory=list)
    _finished: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def lock(
        cls,
        connection: Connection,
        partition_ids: Iterable[int],
        producers: Iterable[ProducerKey],
        *,
        with_open: bool = False,
    ) -> Self:
        """Lock the heads of partitions, at least one, and read what they know of these producers.

        `with_open` reads every producer that has a transaction open there as well, as `finish` needs it.

        Raises:
            UnknownTopicOrPartition: a partition is not in this database.
        """
        locked = lock_heads(connection, partition_ids)
        wanted = {key for key in producers if key[1] != NO_PRODUCER_ID}
        known = read_producer_states(connection, wanted, open_in=locked.heads if with_open else ())
        return cls(connection, locked.heads, locked.now_ms, known)

    def producer_state(self, key: ProducerKey) -> ProducerInPartition | None:
        """Return what the partition knows of the producer, with the changes so far."""
        return self._changed.get(key) or self._known.get(key)

    def place(self, partition_id: int, batch: EncodedBatch) -> Placed:
        """Give the batch the partition's next offsets, and remember it for its producer."""
        row = self._place(partition_id, batch)
        if batch.producer_id == NO_PRODUCER_ID:
            return Placed(row["base_offset"], row["last_offset"])
        recent = RecentBatch(
            batch.base_sequence,
            last_sequence_of(batch.base_sequence, batch.record_count),
            row["base_offset"],
            row["last_offset"],
            batch.max_timestamp_ms,
        )
        state = self._state_after(partition_id, batch, recent)
        return Placed(recent.base_offset, recent.last_offset, state.transaction_first_offset == recent.base_offset)

    def finish(self, partition_id: int, marker: EncodedBatch) -> None:
        """Place a marker: the open transaction of its producer is over in the partition."""
        assert marker.control_type is not None
        key = (partition_id, marker.producer_id)
        state = self.producer_state(key)
        row = self._place(partition_id, marker)
        if state is None:
            state = ProducerInPartition(
                marker.producer_id, marker.producer_epoch, (), _NO_COORDINATOR_EPOCH, self.now_ms, None
            )
        # The epoch is new, so the producer's sequence numbers begin at 0 again (KIP-890).
        self._changed[key] = replace(
            state,
            epoch=marker.producer_epoch,
            recent_batches=(),
            coordinator_epoch=marker.coordinator_epoch or 0,
            last_timestamp_ms=self.now_ms,
            transaction_first_offset=None,
        )
        if state.transaction_first_offset is not None:
            self._finish(partition_id, marker.control_type, state, row["last_offset"])

    def announce(self, producer: ProducerIdentity) -> None:
        """Write down at once that the producer may append where it was not known."""
        state = ProducerInPartition(producer.producer_id, producer.epoch, (), _NO_COORDINATOR_EPOCH, self.now_ms, None)
        keys = {(partition_id, producer.producer_id) for partition_id in self.heads}
        new = dict.fromkeys(keys - self._known.keys(), state)
        save_producer_states(self.connection, new, self._known)
        self._known.update(new)

    def save(self) -> None:
        """Write what was placed."""
        if not self._batches:
            return
        _INSERT_BATCHES.run_each(self.connection, self._batches)
        moved = sorted({row["partition_id"] for row in self._batches})
        save_heads(self.connection, [self.heads[partition_id] for partition_id in moved])
        save_producer_states(self.connection, self._changed, self._known)
        if self._finished:
            _INSERT_FINISHED.run_each(self.connection, self._finished)

    def _place(self, partition_id: int, batch: EncodedBatch) -> dict[str, Any]:
        head = self.heads[partition_id]
        base_offset = head.next_offset
        head.next_offset += batch.record_count
        head.running_max_timestamp_ms = max(head.running_max_timestamp_ms, batch.max_timestamp_ms)
        row = batch.columns()
        row["partition_id"] = partition_id
        row["base_offset"] = base_offset
        row["last_offset"] = head.next_offset - 1
        row["running_max_timestamp_ms"] = head.running_max_timestamp_ms
        self._batches.append(row)
        return row

    def _state_after(self, partition_id: int, batch: EncodedBatch, recent: RecentBatch) -> ProducerInPartition:
        assert batch.base_sequence != NO_SEQUENCE, "a batch of an idempotent producer needs a sequence number"
        key = (partition_id, batch.producer_id)
        state = self.producer_state(key)
        if state is None:
            state = ProducerInPartition(
                batch.producer_id, batch.producer_epoch, (), _NO_COORDINATOR_EPOCH, self.now_ms, None
            )
        first_offset = state.transaction_first_offset
        if batch.is_transactional and first_offset is None:
            # Where the open transaction begins in this partition: no reader of committed records goes past it.
            first_offset = recent.base_offset
        same_epoch = batch.producer_epoch == state.epoch
        self._changed[key] = replace(
            state,
            epoch=batch.producer_epoch,
            recent_batches=remember(state.recent_batches if same_epoch else (), recent),
            last_timestamp_ms=self.now_ms,
            transaction_first_offset=first_offset,
        )
        return self._changed[key]

    def _finish(
        self, partition_id: int, control_type: ControlType, state: ProducerInPartition, marker_offset: int
    ) -> None:
        assert state.transaction_first_offset is not None
        self._finished.append(
            {
                "partition_id": partition_id,
                "marker_offset": marker_offset,
                "producer_id": state.producer_id,
                "producer_epoch": state.epoch,
                "first_offset": state.transaction_first_offset,
                "outcome": int(control_type),
                "last_stable_offset": min(self._open_offsets(partition_id), default=marker_offset + 1),
            }
        )

    def _open_offsets(self, partition_id: int) -> Iterable[int]:
        """Return where each transaction that is still open in the partition begins."""
        states = {**self._known, **self._changed}
        for (of_partition_id, _), state in states.items():
            if of_partition_id == partition_id and state.transaction_first_offset is not None:
                yield state.transaction_first_offset


def append(
    connection: Connection, appends: Sequence[Append], *, coordinated: bool = False, from_elsewhere: bool = False
) -> list[Appended]:
    """Append batches, at least one, within the database transaction that is open; they are there once it commits.

    `coordinated` says that the caller holds the coordinator's row and has the partitions in its transaction: without
    it, nobody would ever end a transaction that a batch begins.  `from_elsewhere` says that the coordinator has the
    partitions in the transaction, but that its row is in another database and not locked.

    The heads of all partitions are locked, in the order of their ids.  Several batches for one partition are
    appended in the order given.  All or nothing: an error leaves the database transaction to be rolled back.

    Raises:
        UnknownTopicOrPartition: a partition is not in this database.
        RecordTooLarge: a batch is above its topic's max.message.bytes.
        InvalidRecord: a batch is not one that a producer may send.
        InvalidTimestamp: a timestamp is too far from the store's time for its topic (KIP-937).
        InvalidTransactionState: a transactional batch is not part of an open transaction (KIP-890).
        InvalidProducerEpoch, OutOfOrderSequence, InvalidTransactionState: see `log.sequences.check_append`.
        UnannouncedProducerError: a batch comes from elsewhere, and its partition does not know the producer.
    """
    check_sizes(appends)
    work = LockedPartitions.lock(connection, (item.partition_id for item in appends), producers_of(appends))
    if from_elsewhere:
        for key in producers_of(appends):
            if work.producer_state(key) is None:
                raise UnannouncedProducerError
    appended = place_all(work, appends, coordinated=coordinated)
    work.save()
    return appended


def announce(connection: Connection, producer: ProducerIdentity, partition_ids: Iterable[int]) -> None:
    """Let partitions know a producer whose transactions are coordinated in another database.

    What its transaction has there is ended by a marker that raises the epoch.  Were the producer forgotten after that,
    one that was asleep could append to a transaction that is over, and nobody would end it.  So an append from
    elsewhere is taken only where the producer is known; it is made known first, then asks its coordinator whether the
    transaction is still open, then appends.  Whoever has slept over any of it is unknown again, or finds a newer epoch.
    (The verification guard of KIP-890, Kafka's VerificationStateEntry.)

    Raises:
        UnknownTopicOrPartition: a partition is not in this database.
    """
    wanted = list(partition_ids)
    work = LockedPartitions.lock(connection, wanted, [(partition_id, producer.producer_id) for partition_id in wanted])
    work.announce(producer)


def producers_of(appends: Iterable[Append]) -> Iterable[ProducerKey]:
    """Return which producer writes to which partition."""
    return ((item.partition_id, item.batch.producer_id) for item in appends)


def check_sizes(appends: Iterable[Append]) -> None:
    """Refuse a batch that is too large, before anything is locked.

    Raises:
        RecordTooLarge: a batch is above its topic's max.message.bytes.
    """
    for item in appends:
        largest = item.topic_settings["max.message.bytes"]
        if item.batch.size_bytes > largest:
            raise RecordTooLarge(
                f"a batch of {item.batch.record_count} records has {item.batch.size_bytes} bytes,"
                f" above the topic's max.message.bytes of {largest}; nothing was appended"
            )


def place_all(work: LockedPartitions, appends: Iterable[Append], *, coordinated: bool) -> list[Appended]:
    """Check and place each batch; nothing is written before `work.save`."""
    return [_place(work, item, coordinated=coordinated) for item in appends]


def _place(work: LockedPartitions, item: Append, *, coordinated: bool) -> Appended:
    head = work.heads[item.partition_id]
    batch = item.batch
    _check_form(batch)
    stamps = item.topic_settings["message.timestamp.type"] == "LogAppendTime"
    if batch.producer_id != NO_PRODUCER_ID:
        state = work.producer_state((item.partition_id, batch.producer_id))
        last_sequence = last_sequence_of(batch.base_sequence, batch.record_count)
        duplicate = find_duplicate(state, batch.producer_epoch, batch.base_sequence, last_sequence)
        if duplicate is not None:
            return Appended(
                head.partition_id,
                duplicate.base_offset,
                duplicate.last_offset,
                duplicate.timestamp_ms if stamps else NO_TIMESTAMP_MS,
                head.log_start_offset,
                is_duplicate=True,
            )
        is_open = state is not None and state.transaction_first_offset is not None
        if batch.is_transactional and not coordinated and not is_open:
            raise InvalidTransactionState(
                "the batch is not part of an open transaction: append it through the transaction coordinator"
            )
        producer = ProducerIdentity(batch.producer_id, batch.producer_epoch)
        check_append(state, producer, batch.base_sequence, is_transactional=batch.is_transactional)
    # Only now: a repetition may come when its timestamps are too old to be appended.
    batch = _stamped(item, work.now_ms)
    placed = work.place(item.partition_id, batch)
    return Appended(
        head.partition_id,
        placed.base_offset,
        placed.last_offset,
        batch.max_timestamp_ms if stamps else NO_TIMESTAMP_MS,
        head.log_start_offset,
        begins_transaction=placed.begins_transaction,
    )


def _check_form(batch: EncodedBatch) -> None:
    """Refuse a batch that no producer may send."""
    if batch.control_type is not None:
        raise InvalidRecord("markers are written by the coordinator, never appended as records")
    numbers = (batch.producer_id, batch.producer_epoch, batch.base_sequence)
    if min(numbers) < 0 and (max(numbers) >= 0 or batch.is_transactional):
        raise InvalidRecord("a batch of an idempotent producer needs a producer id, an epoch and a sequence number")


def _stamped(item: Append, now_ms: int) -> EncodedBatch:
    """Return the batch with the timestamps that the topic wants."""
    settings, batch = item.topic_settings, item.batch
    if settings["message.timestamp.type"] == "LogAppendTime":
        return batch.stamped(now_ms)
    after_ms = batch.max_timestamp_ms - now_ms
    if after_ms > settings["message.timestamp.after.max.ms"]:
        raise InvalidTimestamp(
            f"a record's timestamp lies {after_ms} ms after the store's time,"
            f" more than the topic's message.timestamp.after.max.ms; nothing was appended"
        )
    if batch.min_timestamp_ms < now_ms - settings["message.timestamp.before.max.ms"]:
        raise InvalidTimestamp(
            "a record's timestamp lies further before the store's time than the topic's"
            " message.timestamp.before.max.ms; nothing was appended"
        )
    return batch


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


def write_markers(connection: Connection, markers: Sequence[Marker]) -> None:
    """Write markers; each transaction is then over in its partition, in the order given.

    A marker that is there already is not written again (KAFKA-19999).

    Raises:
        UnknownTopicOrPartition: a partition is not in this database.
        InvalidProducerEpoch: the partition has seen a newer epoch of the producer.
        TransactionCoordinatorFenced: the partition has a marker of a newer coordinator.
    """
    if not markers:
        return
    work = LockedPartitions.lock(
        connection,
        (marker.partition_id for marker in markers),
        (marker.key for marker in markers),
        with_open=True,
    )
    place_markers(work, markers)
    work.save()


def place_markers(work: LockedPartitions, markers: Iterable[Marker]) -> None:
    """Place those of the markers that are not there yet; nothing is written before `work.save`."""
    for marker in markers:
        state = work.producer_state(marker.key)
        if state is not None and _is_there_already(marker, state):
            continue
        batch = encode_control(
            marker.control_type,
            coordinator_epoch=marker.coordinator_epoch,
            producer=marker.producer,
            timestamp_ms=work.now_ms,
        )
        work.finish(marker.partition_id, batch)


def _is_there_already(marker: Marker, state: ProducerInPartition) -> bool:
    """Return whether a repetition brings the marker; refuse one that comes from the past."""
    if marker.coordinator_epoch < state.coordinator_epoch:
        raise TransactionCoordinatorFenced(
            f"a marker of coordinator epoch {marker.coordinator_epoch} came after one of {state.coordinator_epoch}"
        )
    if marker.producer.epoch > state.epoch:
        return False
    if marker.producer.epoch == state.epoch and state.transaction_first_offset is None:
        return True
    raise InvalidProducerEpoch(
        f"the marker of producer {marker.producer} is not newer than epoch {state.epoch} of its records"
    )


def finished_since(connection: Connection, partition_id: int, from_offset: int) -> list[Any]:
    """Return a page of the index: transactions that ended at `from_offset` or later, in the order of their ends."""
    page = {"of_partition_id": partition_id, "from_offset": from_offset, "count_max": _PAGE_ROWS}
    return list(connection.execute(_HISTORY, page))

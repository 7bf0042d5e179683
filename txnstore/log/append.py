"""The append: record batches get their offsets and become rows, in one short database transaction.

The check against what the producer sent before and the insert happen under the same lock, so a batch is recognised
as a repetition however late and from wherever it comes.  A producer whose answer was lost finds the batches of a
transaction that has finished since (`find_appended`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, bindparam, select

from txnstore.config import Settings
from txnstore.db.schema import finished_transactions, partition_heads, record_batches
from txnstore.errors import InvalidRecord, InvalidTimestamp, InvalidTransactionState, RecordTooLarge
from txnstore.log.codec import EncodedBatch
from txnstore.log.locked_partitions import LockedPartitions, identity_of
from txnstore.log.producers import ProducerKey
from txnstore.log.sequences import check_append, find_duplicate, last_sequence_of
from txnstore.log.topics import DEFAULT_TOPIC_SETTINGS
from txnstore.model import NO_PRODUCER_ID, NO_TIMESTAMP_MS, ProducerIdentity, TimestampType

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


@dataclass(frozen=True, slots=True)
class Append:
    """One batch for one partition, under the settings of its topic."""

    partition_id: int
    batch: EncodedBatch
    topic_settings: Settings = DEFAULT_TOPIC_SETTINGS


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


class UnannouncedProducerError(Exception):
    """A partition does not know the producer whose transaction is coordinated in another database; see `announce`."""


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
        check_append(state, identity_of(batch), batch.base_sequence, is_transactional=batch.is_transactional)
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
        raise InvalidRecord("a batch of an idempotent producer has a producer id, an epoch and a sequence number")


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

"""The append: record batches are checked, and get their offsets in locked partitions.

The check against what a producer sent before and the insert happen under the same lock, so a batch is recognised
as a repetition however late and from wherever it comes.  A producer whose answer was lost finds the batches of a
transaction that has finished since (`find_appended`).

Batches that belong to no transaction, and that nothing is unusual about, are appended by one statement of the database
where it has one (`db.postgresql.commit_function`).  Everything that the client knows about that is asked here
(`WholeAppend`), everything that the database knows by the statement; `append` alone waits, explains and refuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

from sqlalchemy import Connection, bindparam, select

from txnstore.config import Settings
from txnstore.db.backend import WholeTransaction
from txnstore.db.schema import finished_transactions, partition_heads, record_batches
from txnstore.db.store import Store
from txnstore.errors import InvalidRecord, InvalidTimestamp, InvalidTransactionState, RecordTooLarge
from txnstore.log.codec import TIMESTAMP_MS_MAX, EncodedBatch
from txnstore.log.locked_partitions import LockedPartitions
from txnstore.log.partition_rows import ProducerKey
from txnstore.log.sequences import check_append, find_duplicate, increment_sequence, last_sequence_of
from txnstore.log.topics import DEFAULT_TOPIC_SETTINGS
from txnstore.model import (
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    NO_TIMESTAMP_MS,
    SEQUENCE_MAX,
    ProducerIdentity,
    TimestampType,
)

#: How many rows of the index are read in one go.
_PAGE_ROWS: Final = 1_000
#: More is appended by a statement for each batch: one for all would hold it in memory several times.
PAYLOAD_BYTES_MAX: Final = 4 * 1024 * 1024
#: What the statement takes of a batch, in its order.
_COLUMNS: Final = attrgetter(
    "record_count",
    "base_timestamp_ms",
    "max_timestamp_ms",
    "base_sequence",
    "codec",
    "crc",
    "size_bytes",
    "timestamp_deltas_ms",
    "key_positions",
    "null_keys",
    "value_positions",
    "null_values",
    "headers",
    "key_data",
    "value_data",
)
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
    work = LockedPartitions.lock(connection, producers_of(appends))
    if from_elsewhere:
        for key in producers_of(appends):
            if work.writer(key) is None:
                raise UnannouncedProducerError
    appended = place_all(work, appends, coordinated=coordinated)
    work.save()
    return appended


class WholeAppend:
    """Batches of one producer, in the order of their partitions."""

    def __init__(self, producer: ProducerIdentity, appends: Sequence[Append], *, is_transactional: bool) -> None:
        """Take the batches; nothing is checked yet."""
        self.producer = producer
        # Stable: batches of one partition stay in their order.
        self._order = sorted(range(len(appends)), key=lambda number: appends[number].partition_id)
        self.appends = [appends[number] for number in self._order]
        """In the order of their partitions."""
        self._is_transactional = is_transactional
        self.partitions: Sequence[tuple[int, int]] = ()
        """Partition ids, ascending, and how many batches go to each."""
        self.earliest_ms, self.latest_ms = 0, TIMESTAMP_MS_MAX
        """At which times the topics take the records' timestamps."""

    def is_usual(self) -> bool:
        """Return whether nothing that the client knows speaks against writing them at once."""
        times = _times_of(self.appends)
        partitions = self._partitions()
        if times is None or partitions is None:
            return False
        self.earliest_ms, self.latest_ms = times
        self.partitions = partitions
        return True

    def columns(self) -> list[tuple[Any, ...]]:
        """Return of each batch what differs from batch to batch."""
        return [_COLUMNS(item.batch) for item in self.appends]

    def appended(self, places: Sequence[int]) -> list[Appended]:
        """Return the answer, given for each batch its base offset and the log start offset of its partition."""
        appended: list[Appended | None] = [None] * len(self._order)
        last_partition_id: int | None = None
        for number, item, base_offset, log_start_offset in zip(
            self._order, self.appends, places[::2], places[1::2], strict=True
        ):
            appended[number] = Appended(
                item.partition_id,
                base_offset,
                base_offset + item.batch.record_count - 1,
                NO_TIMESTAMP_MS,
                log_start_offset,
                begins_transaction=self._is_transactional and item.partition_id != last_partition_id,
            )
            last_partition_id = item.partition_id
        return [place for place in appended if place is not None]

    def _partitions(self) -> list[tuple[int, int]] | None:
        """Return each partition with the number of its batches; None if one of those is unusual."""
        counts: dict[int, int] = {}
        next_sequence = payload_bytes = 0
        identity = (self.producer.producer_id, self.producer.epoch)
        has_sequences = min(identity) >= 0
        if not has_sequences and (self._is_transactional or max(identity) >= 0):
            return None
        for item in self.appends:
            batch, settings = item.batch, item.topic_settings
            if item.partition_id not in counts:
                counts[item.partition_id] = 0
                # Every transaction begins at 0 in each of its partitions (KIP-890).
                next_sequence = 0 if self._is_transactional else batch.base_sequence
            payload_bytes += batch.size_bytes
            if (
                (batch.producer_id, batch.producer_epoch) != identity
                or batch.is_transactional is not self._is_transactional
                or batch.control_type is not None
                or batch.timestamp_type is not TimestampType.CREATE_TIME
                or batch.offset_deltas is not None
                or batch.base_sequence != next_sequence
                or (batch.base_sequence == NO_SEQUENCE) is has_sequences
                or batch.base_sequence > SEQUENCE_MAX - batch.record_count
                or batch.size_bytes > settings["max.message.bytes"]
                or settings["message.timestamp.type"] == "LogAppendTime"
                or _lacks_key(batch, settings)
                or payload_bytes > PAYLOAD_BYTES_MAX
            ):
                return None
            counts[item.partition_id] += 1
            if has_sequences:
                next_sequence = increment_sequence(next_sequence, batch.record_count)
        return list(counts.items())


def append_at_once(
    store: Store, appends: Sequence[Append], producer: ProducerIdentity, *, retry_timeout_ms: int | None = None
) -> list[Appended]:
    """Append one producer's batches that belong to no transaction, by a database transaction of their own.

    Raises:
        OutcomeUnknown: they may or may not be in the log.
        TxnStoreError: see `append`; nothing was appended.
    """
    if store.commits_whole and store.has_commit_function:
        whole = WholeAppend(producer, appends, is_transactional=False)
        if whole.is_usual():
            places = store.commit_whole(_without_transaction(whole), retry_timeout_ms=retry_timeout_ms)
            if places is not None:
                return whole.appended(places)
    return store.write(
        lambda connection: append(connection, appends), wakes_readers=True, retry_timeout_ms=retry_timeout_ms
    )


def announce(connection: Connection, producer: ProducerIdentity, partition_ids: Iterable[int]) -> None:
    """Let partitions know a producer whose transactions are coordinated in another database.

    What its transaction has there is ended by a marker that raises the epoch.  Were the producer forgotten after that,
    one that was asleep could append to a transaction that is over, and nobody would end it.  So an append from
    elsewhere is taken only where the producer is known; it is made known first, then asks its coordinator whether the
    transaction is still open, then appends.  A producer that slept through any of it is unknown again, or finds a newer
    epoch. (The verification guard of KIP-890, Kafka's VerificationStateEntry.)

    Raises:
        UnknownTopicOrPartition: a partition is not in this database.
    """
    keys = [(partition_id, producer.producer_id) for partition_id in partition_ids]
    LockedPartitions.lock(connection, keys).announce(producer)


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
        state = work.writer((item.partition_id, batch.producer_id))
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
        # One of an older epoch is another transaction: what it has written would lose its end in the index.
        is_open = (
            state is not None and state.transaction_first_offset is not None and state.epoch >= batch.producer_epoch
        )
        if batch.is_transactional and not coordinated and not is_open:
            raise InvalidTransactionState(
                "the batch is not part of an open transaction: append it through the transaction coordinator"
            )
        producer = ProducerIdentity(batch.producer_id, batch.producer_epoch)
        check_append(state, producer, batch.base_sequence, is_transactional=batch.is_transactional)
    # Only now: a repetition may come when its timestamps are too old to be appended.
    batch = _as_stored(item, work.now_ms)
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


def _lacks_key(batch: EncodedBatch, settings: Settings) -> bool:
    """Return whether a record has no key, and the topic keeps the newest record of each."""
    return not batch.has_all_keys and "compact" in settings["cleanup.policy"]


def _as_stored(item: Append, now_ms: int) -> EncodedBatch:
    """Return the batch with the timestamps that the topic wants."""
    settings, batch = item.topic_settings, item.batch
    if _lacks_key(batch, settings):
        raise InvalidRecord("a record of a compacted topic needs a key; nothing of the batch was appended")
    if settings["message.timestamp.type"] == "LogAppendTime":
        return batch.stamped(now_ms)
    after_ms = batch.max_timestamp_ms - now_ms
    if after_ms > settings["message.timestamp.after.max.ms"]:
        raise InvalidTimestamp(
            f"a record's timestamp lies {after_ms} ms after the store's time,"
            f" more than the topic's message.timestamp.after.max.ms; nothing was appended"
        )
    earliest_ms = now_ms - settings["message.timestamp.before.max.ms"]
    # To look for the smallest all are unpacked: not for a limit that the smallest of all meets, as it does by default.
    if earliest_ms > 0 and batch.min_timestamp_ms < earliest_ms:
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


def finished_since(connection: Connection, partition_id: int, from_offset: int) -> list[Any]:
    """Return a page of the index: transactions that ended at `from_offset` or later, in the order of their ends."""
    page = {"of_partition_id": partition_id, "from_offset": from_offset, "count_max": _PAGE_ROWS}
    return list(connection.execute(_HISTORY, page))


def _without_transaction(whole: WholeAppend) -> WholeTransaction:
    return WholeTransaction(
        None,
        whole.producer.producer_id,
        whole.producer.epoch,
        whole.earliest_ms,
        whole.latest_ms,
        0,
        whole.partitions,
        whole.columns(),
        None,
        (),
    )


def _times_of(appends: Sequence[Append]) -> tuple[int, int] | None:
    """Return between which times all topics take the records' timestamps (KIP-937)."""
    earliest_ms, latest_ms = 0, TIMESTAMP_MS_MAX
    for item in appends:
        earliest_ms = max(
            earliest_ms, item.batch.max_timestamp_ms - item.topic_settings["message.timestamp.after.max.ms"]
        )
        before_max_ms = item.topic_settings["message.timestamp.before.max.ms"]
        if before_max_ms < TIMESTAMP_MS_MAX:
            latest_ms = min(latest_ms, item.batch.min_timestamp_ms + before_max_ms)
    return None if latest_ms < earliest_ms else (earliest_ms, latest_ms)

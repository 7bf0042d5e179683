"""The store's side of a test: topics, records and transactions written, and everything read back."""

from __future__ import annotations

import threading

from tests.relay.kafka_side import Sent
from txnstore.db.store import Store
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.fetch import fetch
from txnstore.log.topics import create_topic, get_topic
from txnstore.model import Record
from txnstore.relay.from_kafka import FromKafka
from txnstore.relay.options import RelayOptions
from txnstore.relay.to_kafka import ToKafka
from txnstore.transactions.coordinator import TransactionCoordinator


def make_topic(store, topic: str, partitions: int = 1) -> None:
    store.write(lambda connection: create_topic(connection, topic, partition_count=partitions))


def make_topic_with(store, topic: str, records) -> None:
    """Create a topic that nobody sees empty."""

    def create(connection) -> None:
        made = create_topic(connection, topic, partition_count=1)
        append(connection, [Append(made.partition_id(0), encode([record_of(record) for record in records]))])

    store.write(create, wakes_readers=True)


def put(store, topic: str, records, *, partition: int = 0, batch_records: int = 1) -> None:
    """Append records, by default each a batch of its own, so that there are offsets to get wrong."""
    partition_id = partition_id_of(store, topic, partition)
    batches = [records[first : first + batch_records] for first in range(0, len(records), batch_records)]
    appends = [Append(partition_id, encode([record_of(record) for record in batch])) for batch in batches]
    store.write(lambda connection: append(connection, appends), wakes_readers=True)


def begin(store, name: str, topic: str, records, *, partition: int = 0, timeout_ms: int = 60_000):
    """Begin a transaction; call what is returned with True to commit it, False to abort it."""
    coordinator = TransactionCoordinator(store)
    producer = coordinator.init_producer_id(name, timeout_ms).identity
    batch = encode([record_of(record) for record in records], producer=producer, base_sequence=0, is_transactional=True)
    coordinator.append(name, producer, [Append(partition_id_of(store, topic, partition), batch)])
    return lambda commit: coordinator.end_transaction(name, producer, commit=commit)


def partition_id_of(store: Store, topic: str, partition: int) -> int:
    return store.read(lambda connection: get_topic(connection, topic)).partition_id(partition)


def record_of(sent: Sent) -> Record:
    return Record(sent.value, sent.key, sent.timestamp_ms, sent.headers)


def read(store, topic: str) -> dict[int, list[Sent]]:
    """Return what a reader of committed records gets, by partition."""
    found: dict[int, list[Sent]] = {}
    for number, partition_id in enumerate(store.read(lambda connection: get_topic(connection, topic)).partition_ids):
        found[number] = []
        position = 0
        while True:
            page = store.read(lambda connection, at=(partition_id, position): fetch(connection, dict([at])))
            for batch in page[partition_id].batches:
                for record in batch.records(position):
                    sent = Sent(record.value, record.key, tuple(record.headers), record.timestamp_ms)
                    found[number].append(sent)
            if page[partition_id].next_offset == position:
                break
            position = page[partition_id].next_offset
    return found


def ship(store, cluster, **options) -> int:
    """Ship everything there is to Kafka."""
    return ToKafka(store, cluster, RelayOptions(once=True, **options)).run(threading.Event())


def copy(store, cluster, **options) -> int:
    """Copy everything there is from Kafka."""
    return FromKafka(store, cluster, RelayOptions(once=True, **options)).run(threading.Event())


def numbered(count: int, first: int = 0) -> list[Sent]:
    return [Sent(b"%d" % number, b"k%d" % (number % 7)) for number in range(first, first + count)]

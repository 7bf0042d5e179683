"""A store in which there is something of all that clients leave, and what they see of it.

Made through the clients where they can make it; what only a crash leaves is made by the coordinator's own steps.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from tests.crash.scenarios import FIRST, SECOND, SENT, all_of, decides, ends
from tests.crash.worlds import Place, World
from tests.tools.tables import Rows, all_tables
from txnstore import OFFSET_BEGINNING, Consumer, KafkaError, Producer, TopicPartition
from txnstore.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType
from txnstore.db.opening import open_store
from txnstore.db.schema import deleted_numbers, deleted_partitions, metadata, outbox, relay_positions
from txnstore.db.store import Store
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.topics import create_topic
from txnstore.maintenance.loop import Maintenance
from txnstore.model import ProducerIdentity, Record
from txnstore.spark.sink_coordination import decide, open_writer
from txnstore.spark.sink_inputs import SinkInput, note_inputs
from txnstore.spark.sink_run import SinkRun, run_of_query
from txnstore.testing.manual_clock import ManualClock
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.writers import append_as_writer

TOPICS = ("orders", "small", "stamped")
#: Kept by value: repeated names in their order, none, and one without a value.
HEADERS = [("trace", b"1"), ("trace", b"2"), ("empty", b""), ("none", None), ("ünïcode", b"wert")]


@dataclass(frozen=True)
class History:
    """What a test needs to know of it to go on."""

    url: str
    retried: tuple[int, ProducerIdentity]
    """A partition, and the idempotent producer that wrote to it."""

    open: World
    decided: World
    query_id: str
    sink_partition: int


def make_history(url: str) -> History:
    """Fill a fresh store."""
    _make_topics(url)
    _produce(url)
    _consume(url)
    with open_store(url) as store:
        Maintenance(store).run_once()
    _delete(url, "gone")
    # Its transactions are begun tomorrow, so that nobody finds them too old.
    clock = ManualClock(time.time_ns() // 1_000_000 + 86_400_000)
    with open_store(url, clock=clock) as store:
        worlds = store.write(lambda connection: create_topic(connection, name="worlds", partition_count=8))
        place = Place(url, clock, _partition_ids=list(worlds.partition_ids))
        place.make(store, ends(FIRST, SECOND, commit=True, offsets=True))
        place.make(store, all_of(SENT, ends(commit=False)))
        opened, decided = place.make(store, SENT), place.make(store, all_of(SENT, decides(commit=True)))
        partition_id, query_id = decided.partition_ids[0], uuid.uuid4().hex
        retried = TransactionCoordinator(store).init_producer_id(None).identity
        append_batch(store, partition_id, retried)
        _sink(store, query_id, opened.partition_ids[1])
        _outbox(store)
        store.write(lambda connection: create_topic(connection, name="last", partition_count=1))
        _delete(url, "last")
        store.write(_rest)
    return History(url, (partition_id, retried), opened, decided, query_id, opened.partition_ids[1])


def append_batch(store: Store, partition_id: int, producer: ProducerIdentity) -> Any:
    """Send the producer's first batch, or send it again; return where it is."""
    batch = encode([Record(b"once"), Record(b"more")], producer=producer, base_sequence=0, is_transactional=False)
    return store.write(lambda connection: append(connection, [Append(partition_id, batch)]))[0]


def sink_batch(store: Store, query_id: str, partition_id: int, batch_id: int) -> bool:
    """Write a batch of a streaming query, by a new run of it; return whether it was decided now."""
    run = run_of_query(query_id, uuid.uuid4().hex, None)
    _note(store, run, batch_id, query_id, partition_id)
    writer = open_writer(store, run, batch_id)
    if writer is None:
        return decide(store, run, batch_id, [])
    batch = encode([Record(b"row")], producer=writer.identity, base_sequence=0, is_transactional=True)
    append_as_writer(store, writer, [Append(partition_id, batch)], report=True)
    return decide(store, run, batch_id, [writer.writer_id])


def _note(store: Store, run: SinkRun, batch_id: int, query_id: str, partition_id: int) -> None:
    """Note that the batch reads a place: in offset order the query could not go on."""
    of_batch = (query_id, run.run_id, batch_id, "spark")
    note_inputs(store, [SinkInput(*of_batch, partition_id, batch_id, batch_id + 1, in_commit_order=True)])


_COMPUTED = {column.name for table in metadata.tables.values() for column in table.c if column.computed is not None}
_ALL = all_tables(but={"stores"}, columns_but=_COMPUTED)


def all_rows(store: Store) -> Rows:
    """Return the rows of all tables, but for what differs between a store here and the same one elsewhere."""
    return store.read(_ALL.rows)


def messages(url: str, topic: str, *, isolation: str = "read_committed") -> list[tuple[Any, ...]]:
    """Return all that a reader sees of a topic, up to the last stable offset."""
    settings = {
        "bootstrap.servers": url,
        "group.id": "looking",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "isolation.level": isolation,
    }
    found = []
    with Consumer(settings) as consumer:
        numbers = set(consumer.list_topics(topic).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in numbers])
        while numbers:
            message = consumer.poll(60)
            assert message is not None
            error = message.error()
            if error is not None:
                assert error.code() == KafkaError._PARTITION_EOF, error
                numbers.discard(message.partition())
                continue
            found.append(
                (
                    message.partition(),
                    message.offset(),
                    message.timestamp(),
                    message.key(),
                    message.value(),
                    message.headers(),
                )
            )
    return sorted(found, key=lambda each: each[:2])


def committed(url: str, group_id: str, topic: str, partition: int) -> int:
    """Return the offset that a group has committed."""
    with Consumer({"bootstrap.servers": url, "group.id": group_id}) as consumer:
        (place,) = consumer.committed([TopicPartition(topic, partition)], timeout=60)
        return place.offset


def _make_topics(url: str) -> None:
    admin = AdminClient({"bootstrap.servers": url})
    topics = [
        NewTopic("orders", 3, config={"retention.ms": "-1", "compression.type": "zstd"}),
        NewTopic("small", 1, config={"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.0"}),
        NewTopic("stamped", 1, config={"message.timestamp.type": "LogAppendTime"}),
        NewTopic("gone", 2),
    ]
    for future in admin.create_topics(topics).values():
        future.result()
    store_settings = ConfigResource(
        ResourceType.BROKER,
        "0",
        incremental_configs=[
            ConfigEntry("num.partitions", "2", incremental_operation=AlterConfigOpType.SET),
        ],
    )
    for future in admin.incremental_alter_configs([store_settings]).values():
        future.result()


def _produce(url: str) -> None:
    with Producer({"bootstrap.servers": url}) as producer:
        for topic in (*TOPICS, "gone"):
            for number in range(40):
                value = None if number % 7 == 0 else bytes(range(256)) * (number % 3)
                key = None if number % 5 == 0 else f"k{number % 4}".encode()
                key = key or (b"needed" if topic == "small" else None)
                headers = HEADERS if number % 3 == 0 else None
                stamp = 1_700_000_000_000 + number if topic == "orders" else 0
                producer.produce(topic, value, key, headers=headers, timestamp=stamp)
            producer.flush()
    with Producer({"bootstrap.servers": url, "transactional.id": "payments"}) as producer:
        producer.init_transactions()
        for is_good in (True, False, True):
            producer.begin_transaction()
            producer.produce("orders", f"good: {is_good}", "k", partition=0)
            producer.produce("stamped", "x")
            producer.flush()
            producer.commit_transaction() if is_good else producer.abort_transaction()


def _consume(url: str) -> None:
    with Consumer({"bootstrap.servers": url, "group.id": "accounting", "enable.auto.commit": False}) as consumer:
        consumer.commit(offsets=[TopicPartition("orders", 0, 7, metadata="so far"), TopicPartition("gone", 1, 2)])
    # A static member that is away for a while: its place is kept.
    settings = {"group.instance.id": "desk-1", "session.timeout.ms": 300_000, "auto.offset.reset": "earliest"}
    with Consumer({"bootstrap.servers": url, "group.id": "desks", **settings}) as consumer:
        consumer.subscribe(["orders"])
        assert consumer.poll(60) is not None


def _sink(store: Store, query_id: str, partition_id: int) -> None:
    assert sink_batch(store, query_id, partition_id, 0)
    assert sink_batch(store, query_id, partition_id, 1)
    run = run_of_query(query_id, uuid.uuid4().hex, None)
    _note(store, run, 2, query_id, partition_id)
    writer = open_writer(store, run, 2)
    assert writer is not None
    batch = encode([Record(b"undecided")], producer=writer.identity, base_sequence=0, is_transactional=True)
    append_as_writer(store, writer, [Append(partition_id, batch)])


def _rest(connection: Connection) -> None:
    """Enter what a relay, a deletion that was broken off and one in a cluster leave."""
    position = {"relay_id": "r", "topic": "t", "partition_number": 3, "topic_uuid": "u", "next_offset": 9}
    connection.execute(relay_positions.insert(), position)
    connection.execute(deleted_partitions.insert(), {"partition_id": 10**6})
    # As of a database that was once a cluster's controller.
    connection.execute(deleted_numbers.insert(), {"partition_id": 1 << 33})


def _outbox(store: Store) -> None:
    """Leave a row that waits, one that was refused, and numbers that were given out to rows that are gone."""
    rows = [{"topic": topic, "value": b"waits", "headers": '["a",null]'} for topic in ("orders", "no such", "gone")]
    with store.engine.connect() as connection:
        for row in rows:
            connection.execute(outbox.insert(), row)
        connection.execute(outbox.update().where(outbox.c.topic == "no such").values(refusal="there is no such topic"))
        connection.execute(outbox.delete().where(outbox.c.topic == "gone"))


def _delete(url: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": url})
    for future in admin.delete_records([TopicPartition("orders", 1, 3)]).values():
        future.result()
    admin.delete_topics([topic])[topic].result()

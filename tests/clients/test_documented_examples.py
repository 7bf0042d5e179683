"""The programs that Kafka's and confluent-kafka's documentation teach, one a test; only the URL is ours."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from typing import Any

import pytest

from tests.clients.steps import PATIENCE_SECONDS, create_topic
from txnstore import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    Consumer,
    ConsumerGroupTopicPartitions,
    DeserializingConsumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    SerializingProducer,
    TopicCollection,
    TopicPartition,
)
from txnstore.admin import AdminClient, ConfigResource, NewPartitions, NewTopic, OffsetSpec
from txnstore.aio import AIOConsumer, AIOProducer
from txnstore.serialization import (
    IntegerDeserializer,
    IntegerSerializer,
    MessageField,
    SerializationContext,
    StringDeserializer,
    StringSerializer,
)


@pytest.fixture
def produce(url):
    """Produce values to a partition of a topic, and wait until they are stored."""

    def produce_(topic, *values, partition=0, **named):
        with Producer({"bootstrap.servers": url}) as producer:
            for value in values:
                producer.produce(topic, value, partition=partition, **named)
            assert producer.flush(PATIENCE_SECONDS) == 0

    return produce_


def group(url, **settings):
    """The configuration that the documentation gives consumers; settings have underscores for dots."""
    given = {name.replace("_", "."): value for name, value in settings.items()}
    return {"bootstrap.servers": url, "group.id": "readers", "auto.offset.reset": "earliest", **given}


def messages(consumer, count):
    """The poll loop of every example: None is waited out, an error is raised."""
    received: list[Message] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(received) < count and time.monotonic() < deadline:
        message = consumer.poll(1.0)
        if message is None:
            continue
        if message.error():
            raise KafkaException(message.error())
        received.append(message)
    assert len(received) == count
    return received


def committed(url, topic, *partitions, group_id="readers"):
    with Consumer({"bootstrap.servers": url, "group.id": group_id}) as consumer:
        asked = [TopicPartition(topic, partition) for partition in partitions or (0,)]
        return [answer.offset for answer in consumer.committed(asked, PATIENCE_SECONDS)]


class TestProducing:
    def test_the_basic_producer(self, url):
        """Serve the reports with poll(0) before each message, and the rest with flush()."""
        reports = []

        def delivery_report(error, message):
            assert error is None, f"Message delivery failed: {error}"
            reports.append((message.topic(), message.partition(), message.offset(), message.value()))

        producer = Producer({"bootstrap.servers": url})
        for data in ("one", "two", "three"):
            producer.poll(0)
            producer.produce("mytopic", data.encode("utf-8"), callback=delivery_report)
        producer.flush()

        assert reports == [("mytopic", 0, 0, b"one"), ("mytopic", 0, 1, b"two"), ("mytopic", 0, 2, b"three")]
        producer.close()

    def test_a_full_queue_is_waited_out_with_poll(self, url):
        delivered = []
        producer = Producer({"bootstrap.servers": url, "queue.buffering.max.messages": 2})
        produce_one = partial(producer.produce, "lines", on_delivery=lambda _, message: delivered.append(message))
        for number in range(20):
            while True:
                try:
                    produce_one(value=f"line {number}")
                    break
                except BufferError:
                    producer.poll(1)
        assert producer.flush(PATIENCE_SECONDS) == 0
        assert [message.value() for message in delivered] == [b"line %d" % number for number in range(20)]
        producer.close()

    def test_writing_synchronously(self, url):
        """produce() and flush() for each message; the report is there when flush() returns."""
        outcomes = []
        producer = Producer({"bootstrap.servers": url, "linger.ms": 0})
        for number in range(3):
            producer.produce("t", key="k", value=str(number), on_delivery=lambda *report: outcomes.append(report))
            assert producer.flush() == 0
            error, message = outcomes[-1]
            assert (error, message.offset()) == (None, number)
        producer.close()

    def test_a_context_manager_flushes(self, url):
        with Producer({"bootstrap.servers": url}) as producer, Consumer(group(url)) as consumer:
            producer.produce("t", "value")
            assert producer.flush() == 0
            consumer.subscribe(["t"])
            assert messages(consumer, 1)[0].value() == b"value"
        with pytest.raises(RuntimeError, match="Producer has been closed"):
            producer.produce("t", "more")
        with pytest.raises(RuntimeError, match="Consumer closed"):
            consumer.poll(0)

    def test_one_event_with_key_headers_and_time(self, url, produce):
        produce("t", b"value", key="key", timestamp=1_700_000_000_123, headers={"trace": "1", "flag": None})
        with Consumer(group(url)) as consumer:
            consumer.subscribe(["t"])
            (message,) = messages(consumer, 1)
        assert (message.key(), message.value(), message.timestamp()) == (b"key", b"value", (1, 1_700_000_000_123))
        assert message.headers() == [("trace", b"1"), ("flag", None)]
        assert len(message) == len(b"value")


class TestConsuming:
    def test_the_basic_consumer(self, url, produce):
        produce("mytopic", "a", "b", "c")
        assignments = []
        consumer = Consumer(group(url))
        consumer.subscribe(["mytopic"], on_assign=lambda _, partitions: assignments.append(partitions))
        received = messages(consumer, 3)
        assert [(message.offset(), message.value()) for message in received] == [(0, b"a"), (1, b"b"), (2, b"c")]
        assert assignments == [[TopicPartition("mytopic", 0)]]
        consumer.close()
        # Closing has committed what was received: automatic commits are the default.
        assert committed(url, "mytopic") == [3]

    def test_the_end_of_a_partition_is_a_message_with_an_error(self, url, produce):
        produce("t", "only")
        ends: list[tuple[Any, ...]] = []
        with Consumer(group(url, enable_partition_eof=True)) as consumer:
            consumer.subscribe(["t"])
            while not ends:
                message = consumer.poll(PATIENCE_SECONDS)
                assert message is not None
                error = message.error()
                if error and error.code() == KafkaError._PARTITION_EOF:
                    ends.append((message.topic(), message.partition(), message.offset()))
        assert ends == [("t", 0, 1)]

    def test_synchronous_commits_of_every_few_messages(self, url, produce):
        produce("t", *"abcde")
        with Consumer(group(url, enable_auto_commit=False)) as consumer:
            consumer.subscribe(["t"])
            commits: list[int] = []
            for count in range(1, 6):
                messages(consumer, 1)
                if count % 2 == 0:
                    commits += [partition.offset for partition in consumer.commit(asynchronous=False) or ()]
        assert commits == [2, 4]
        # The fifth is read again: nothing is committed by itself.
        assert committed(url, "t") == [4]

    def test_at_least_once_commits_each_message_after_it_was_processed(self, url, produce):
        produce("t", *"abc")
        with Consumer(group(url, enable_auto_commit=False)) as consumer:
            consumer.subscribe(["t"])
            for message in messages(consumer, 2):
                (stored,) = consumer.commit(message=message, asynchronous=False)
                assert (stored.topic, stored.partition, stored.offset) == ("t", 0, message.offset() + 1)
                assert stored.error is None
        assert committed(url, "t") == [2]
        with Consumer(group(url, enable_auto_commit=False)) as successor:
            successor.subscribe(["t"])
            assert messages(successor, 1)[0].value() == b"c"

    def test_asynchronous_commits_are_reported_to_on_commit(self, url, produce):
        produce("t", *"abc")
        reports = []

        def commit_completed(error, partitions):
            reports.append((error, [(partition.topic, partition.offset) for partition in partitions]))

        consumer = Consumer({**group(url, enable_auto_commit=False), "on_commit": commit_completed})
        consumer.subscribe(["t"])
        for message in messages(consumer, 3):
            assert consumer.commit(message=message) is None
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(reports) < 3 and time.monotonic() < deadline:
            consumer.poll(0.1)
        consumer.close()
        assert reports == [(None, [("t", offset)]) for offset in (1, 2, 3)]

    def test_stored_offsets_are_committed_in_the_background(self, url, produce):
        """At least once without a commit for each message: only what was processed is stored."""
        produce("t", *"abcd")
        with Consumer(group(url, enable_auto_offset_store=False)) as consumer:
            consumer.subscribe(["t"])
            for message in messages(consumer, 4)[:2]:
                consumer.store_offsets(message)
        assert committed(url, "t") == [2]

    def test_batches_with_consume(self, url, produce):
        produce("t", *map(str, range(25)))
        with Consumer(group(url)) as consumer:
            consumer.subscribe(["t"])
            received: list[Any] = []
            deadline = time.monotonic() + PATIENCE_SECONDS
            while len(received) < 25 and time.monotonic() < deadline:
                batch = consumer.consume(num_messages=10, timeout=0.2)
                assert len(batch) <= 10
                received += [message.value() for message in batch if not message.error()]
        assert received == [str(number).encode() for number in range(25)]

    def test_reading_again_from_the_beginning_with_on_assign(self, url, produce):
        produce("t", *"abc")
        with Consumer(group(url)) as first:
            first.subscribe(["t"])
            messages(first, 3)

        def reset_offset(consumer, partitions):
            for partition in partitions:
                partition.offset = OFFSET_BEGINNING
            consumer.assign(partitions)

        with Consumer(group(url)) as consumer:
            consumer.subscribe(["t"], on_assign=reset_offset)
            assert [message.value() for message in messages(consumer, 3)] == [b"a", b"b", b"c"]

    def test_a_partition_is_assigned_by_hand_and_sought_in(self, url, produce):
        produce("t", *"abcd")
        with Consumer(group(url)) as consumer:
            consumer.assign([TopicPartition("t", 0, 2)])
            assert messages(consumer, 1)[0].offset() == 2
            consumer.seek(TopicPartition("t", 0, 1))
            assert [message.offset() for message in messages(consumer, 3)] == [1, 2, 3]
            assert consumer.position([TopicPartition("t", 0)])[0].offset == 4
            consumer.assign([TopicPartition("t", 0, OFFSET_END)])
            consumer.pause([TopicPartition("t", 0)])
            produce("t", "e")
            assert consumer.poll(0) is None
            consumer.resume([TopicPartition("t", 0)])

    def test_all_topics_of_a_pattern(self, url, produce):
        produce("orders.placed", "p")
        produce("orders.updated", "u")
        produce("payments", "x")
        with Consumer(group(url)) as consumer:
            consumer.subscribe(["^orders\\..*"])
            assert {message.topic() for message in messages(consumer, 2)} == {"orders.placed", "orders.updated"}


class TestOffsets:
    def test_lag_is_the_high_watermark_less_the_committed_offset(self, url, produce):
        create_topic(url, "t", 2)
        produce("t", *"abcde")
        with Consumer(group(url, enable_auto_commit=False)) as consumer:
            consumer.subscribe(["t"])
            consumer.commit(message=messages(consumer, 2)[-1], asynchronous=False)
            metadata = consumer.list_topics("t", timeout=60)
            assert metadata.topics["t"].error is None
            partitions = [TopicPartition("t", partition) for partition in metadata.topics["t"].partitions]
            lags = {}
            for partition in consumer.committed(partitions, timeout=60):
                low, high = consumer.get_watermark_offsets(partition, timeout=60, cached=False)
                lags[partition.partition] = high - (low if partition.offset < 0 else partition.offset)
        assert lags == {0: 3, 1: 0}

    def test_a_partition_that_was_never_committed_has_no_offset(self, url):
        create_topic(url, "t")
        assert committed(url, "t") == [OFFSET_INVALID]

    def test_reading_on_from_a_point_in_time(self, url):
        with Producer({"bootstrap.servers": url}) as producer:
            for hour in range(4):
                producer.produce("t", f"hour {hour}", timestamp=1_700_000_000_000 + hour * 3_600_000)
            producer.flush()
        with Consumer(group(url)) as consumer:
            since = 1_700_000_000_000 + 3_600_000 + 1
            found = consumer.offsets_for_times([TopicPartition("t", 0, since)], timeout=60)
            assert [(partition.partition, partition.offset) for partition in found] == [(0, 2)]
            consumer.assign(found)
            assert [message.value() for message in messages(consumer, 2)] == [b"hour 2", b"hour 3"]
            later = consumer.offsets_for_times([TopicPartition("t", 0, since * 2)], timeout=60)
            assert [partition.offset for partition in later] == [OFFSET_END]


class TestTransactions:
    @pytest.mark.slow
    def test_consume_transform_produce(self, url, produce):
        """Exactly once: what was read is committed with what was written, every few messages."""
        produce("input", *map(str, range(7)))
        consumer = Consumer(group(url, enable_auto_commit=False, enable_partition_eof=True))
        producer = Producer({"bootstrap.servers": url, "transactional.id": "eos-example"})
        producer.init_transactions()
        producer.begin_transaction()
        consumer.subscribe(["input"])

        def finish():
            positions = consumer.position(consumer.assignment())
            producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata())
            producer.commit_transaction()

        count = 0
        while True:
            message = consumer.poll(PATIENCE_SECONDS)
            assert message is not None
            producer.poll(0)
            error = message.error()
            if error:
                assert error.code() == KafkaError._PARTITION_EOF
                break
            count += 1
            producer.produce("output", key=message.key(), value=(message.value() or b"") * 2)
            if count % 3 == 0:
                finish()
                producer.begin_transaction()
        finish()
        consumer.close()
        producer.close()

        assert committed(url, "input") == [7]
        with Consumer(group(url, group_id="downstream")) as downstream:
            downstream.subscribe(["output"])
            assert [int(message.value()) for message in messages(downstream, 7)] == [0, 11, 22, 33, 44, 55, 66]

    @pytest.mark.slow
    def test_an_aborted_transaction_is_processed_again(self, url, produce):
        """The retry that the documentation describes: abort, rewind to the committed offsets, begin again."""
        produce("input", "good", "flaky")
        consumer = Consumer(group(url, enable_auto_commit=False))
        producer = Producer({"bootstrap.servers": url, "transactional.id": "retrying"})
        producer.init_transactions(PATIENCE_SECONDS)
        consumer.subscribe(["input"])
        for attempt in range(2):
            producer.begin_transaction()
            for message in messages(consumer, 2):
                producer.produce("output", f"{message.value().decode()} {attempt}")
            producer.send_offsets_to_transaction(
                consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), PATIENCE_SECONDS
            )
            if attempt == 0:
                producer.abort_transaction(PATIENCE_SECONDS)
                for partition in consumer.committed(consumer.assignment(), PATIENCE_SECONDS):
                    partition.offset = partition.offset if partition.offset >= 0 else OFFSET_BEGINNING
                    consumer.seek(partition)
            else:
                producer.commit_transaction(PATIENCE_SECONDS)
        consumer.close()
        producer.close()

        assert committed(url, "input") == [2]
        with Consumer(group(url, group_id="downstream", enable_partition_eof=True)) as downstream:
            downstream.subscribe(["output"])
            assert [message.value() for message in messages(downstream, 2)] == [b"good 1", b"flaky 1"]
            end = downstream.poll(PATIENCE_SECONDS)
            assert end is not None
            assert end.error() == KafkaError._PARTITION_EOF

    def test_the_error_handling_of_the_transactional_api(self, url):
        """Retriable, abortable or fatal: the three questions that the documentation puts to an error."""
        old, new = (Producer({"bootstrap.servers": url, "transactional.id": "one"}) for _ in range(2))
        old.init_transactions()
        old.begin_transaction()
        old.produce("t", "lost")
        new.init_transactions()
        with pytest.raises(KafkaException) as caught:
            old.commit_transaction()
        error = caught.value.args[0]
        assert (error.retriable(), error.txn_requires_abort(), error.fatal()) == (False, False, True)
        assert error.code() == KafkaError._FENCED
        new.begin_transaction()
        new.produce("t", "kept")
        new.commit_transaction()
        new.close()
        old.close()
        with Consumer(group(url)) as consumer:
            consumer.subscribe(["t"])
            assert messages(consumer, 1)[0].value() == b"kept"

    def test_only_committed_messages_are_read_by_default(self, url):
        producer = Producer({"bootstrap.servers": url, "transactional.id": "one"})
        producer.init_transactions()
        for commit, value in ((True, "first"), (False, "aborted"), (True, "second")):
            producer.begin_transaction()
            producer.produce("t", value)
            producer.flush()
            if commit:
                producer.commit_transaction()
            else:
                producer.abort_transaction()
        producer.close()
        for isolation, expected in (
            ("read_committed", [b"first", b"second"]),
            ("read_uncommitted", [b"first", b"aborted", b"second"]),
        ):
            with Consumer(group(url, group_id=isolation, isolation_level=isolation)) as consumer:
                consumer.subscribe(["t"])
                assert [message.value() for message in messages(consumer, len(expected))] == expected


class TestAdministration:
    def test_topics_are_created_listed_described_grown_and_deleted(self, url):
        admin = AdminClient({"bootstrap.servers": url})
        made = admin.create_topics(
            [NewTopic("a", num_partitions=3, replication_factor=1), NewTopic("b", 1, config={"retention.ms": "1000"})]
        )
        assert {topic: future.result() for topic, future in made.items()} == {"a": None, "b": None}
        with pytest.raises(KafkaException) as caught:
            admin.create_topics([NewTopic("a", 1, 1)])["a"].result()
        assert caught.value.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS

        metadata = admin.list_topics(timeout=60)
        assert {topic.topic: len(topic.partitions) for topic in metadata.topics.values()} == {"a": 3, "b": 1}
        assert all(broker.host for broker in metadata.brokers.values())

        described = admin.describe_topics(TopicCollection(["a"]), include_authorized_operations=True)["a"].result()
        assert (described.name, len(described.partitions), described.is_internal) == ("a", 3, False)
        assert all(partition.leader is not None and partition.isr for partition in described.partitions)

        admin.create_partitions([NewPartitions("b", 2)])["b"].result()
        assert len(admin.list_topics("b", timeout=60).topics["b"].partitions) == 2

        resource = ConfigResource(ConfigResource.Type.TOPIC, "b")
        (described_configs,) = admin.describe_configs([resource]).values()
        assert described_configs.result()["retention.ms"].value == "1000"

        for future in admin.delete_topics(["a", "b"], operation_timeout=30).values():
            future.result()
        assert admin.list_topics(timeout=60).topics == {}

    def test_the_cluster_is_described(self, url):
        cluster = AdminClient({"bootstrap.servers": url}).describe_cluster().result()
        assert cluster.cluster_id
        assert cluster.controller.id in {node.id for node in cluster.nodes}

    def test_the_last_offsets_of_a_topic(self, url, produce):
        produce("t", *"abc")
        admin = AdminClient({"bootstrap.servers": url})
        partition = TopicPartition("t", 0)
        for spec, expected in ((OffsetSpec.earliest(), 0), (OffsetSpec.latest(), 3)):
            futures = admin.list_offsets({partition: spec}, isolation_level=IsolationLevel.READ_COMMITTED)
            assert futures[partition].result().offset == expected

    def test_group_offsets_have_the_documented_argument(self):
        asked = ConsumerGroupTopicPartitions("readers", [TopicPartition("t", 0)])
        assert (asked.group_id, asked.topic_partitions) == ("readers", [TopicPartition("t", 0)])


class User:
    """What the JSON examples send."""

    def __init__(self, name, number):
        self.name = name
        self.number = number


class TestSerializing:
    def test_serializers_are_called_by_hand(self, url):
        """The recommended way: Producer and Consumer, and serializers with a context."""
        serialize, deserialize = StringSerializer("utf_8"), StringDeserializer("utf_8")

        def user_to_json(user, context):
            assert (context.topic, context.field) == ("users", MessageField.VALUE)
            return json.dumps({"name": user.name, "number": user.number}).encode()

        with Producer({"bootstrap.servers": url}) as producer:
            producer.produce(
                topic="users",
                key=serialize("42"),
                value=user_to_json(User("Ada", 7), SerializationContext("users", MessageField.VALUE)),
            )
            producer.flush()
        with Consumer(group(url)) as consumer:
            consumer.subscribe(["users"])
            (message,) = messages(consumer, 1)
        assert deserialize(message.key()) == "42"
        assert json.loads(message.value()) == {"name": "Ada", "number": 7}

    def test_serializing_clients(self, url):
        reports = []
        producer = SerializingProducer(
            {
                "bootstrap.servers": url,
                "key.serializer": IntegerSerializer(),
                "value.serializer": StringSerializer("utf_8"),
            }
        )
        producer.poll(0.0)
        producer.produce("t", key=7, value="sieben", on_delivery=lambda error, _: reports.append(error))
        producer.flush()
        assert reports == [None]

        settings = {"key.deserializer": IntegerDeserializer(), "value.deserializer": StringDeserializer("utf_8")}
        consumer = DeserializingConsumer(group(url) | settings)
        consumer.subscribe(["t"])
        (message,) = messages(consumer, 1)
        assert (message.key(), message.value()) == (7, "sieben")
        consumer.close()
        producer.close()


class TestAsyncio:
    def test_producing_and_consuming(self, url):
        async def program():
            producer = AIOProducer({"bootstrap.servers": url})
            try:
                delivered = await asyncio.gather(
                    *[await producer.produce("t", value=f"m{number}".encode(), partition=0) for number in range(5)]
                )
                assert [message.offset() for message in delivered] == list(range(5))
                await producer.flush()
            finally:
                await producer.close()

            assigned = []

            async def on_assign(_, partitions):
                assigned.extend(partitions)

            consumer = AIOConsumer(group(url))
            received: list[Any] = []
            try:
                await consumer.subscribe(["t"], on_assign=on_assign)
                while len(received) < 5:
                    message = await consumer.poll(timeout=1.0)
                    if message is not None and not message.error():
                        received.append(message.value())
                await consumer.commit(asynchronous=False)
            finally:
                await consumer.close()
            assert received == [b"m0", b"m1", b"m2", b"m3", b"m4"]
            assert assigned == [TopicPartition("t", 0)]

        asyncio.run(asyncio.wait_for(program(), PATIENCE_SECONDS))
        assert committed(url, "t") == [5]

    @pytest.mark.slow
    def test_exactly_once(self, url, produce):
        produce("input", "a", "b")

        async def program():
            consumer = AIOConsumer(group(url, enable_auto_commit=False))
            producer = AIOProducer({"bootstrap.servers": url, "transactional.id": "aio"})
            await producer.init_transactions()
            await consumer.subscribe(["input"])
            await producer.begin_transaction()
            read: list[Message] = []
            while len(read) < 2:
                read += await consumer.consume(num_messages=2, timeout=1.0)
            for message in read:
                await producer.produce("output", value=(message.value() or b"").upper())
            positions = await consumer.position(await consumer.assignment())
            await producer.send_offsets_to_transaction(positions, await consumer.consumer_group_metadata())
            await producer.commit_transaction()
            await consumer.close()
            await producer.close()

        asyncio.run(asyncio.wait_for(program(), PATIENCE_SECONDS))
        assert committed(url, "input") == [2]
        with Consumer(group(url, group_id="downstream")) as downstream:
            downstream.subscribe(["output"])
            assert [message.value() for message in messages(downstream, 2)] == [b"A", b"B"]

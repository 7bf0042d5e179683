"""What produce() and produce_batch() take, what they refuse at once, and what of it a reader gets."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from tests.clients.steps import PATIENCE_SECONDS, create_topic, error_of, read_to_end, values
from tests.databases import on_sqlite_alone
from txnstore import TIMESTAMP_CREATE_TIME, KafkaError, KafkaException, Producer, TopicPartition
from txnstore.admin import AdminClient, NewPartitions
from txnstore.log.partitioners import PARTITIONERS

TOPIC = "orders"


@pytest.fixture
def topic(url):
    return create_topic(url, TOPIC, partition_count=4)


@pytest.fixture
def producer(make_producer, topic):
    """A producer that knows the topic already."""
    producer = make_producer()
    producer.list_topics(topic, PATIENCE_SECONDS)
    return producer


def written(producer, url, topic, *, partitions=(0,)):
    """Return what a reader gets of all that was produced."""
    assert producer.flush(PATIENCE_SECONDS) == 0
    return read_to_end(url, topic, partitions=partitions)


@pytest.mark.slow_but_first
@on_sqlite_alone
@pytest.mark.parametrize(
    ("arguments", "named", "text"),
    [
        ((), {}, "topic"),
        ((None, b"v"), {}, "must be str, not None"),
        ((1, b"v"), {}, "must be str, not int"),
        ((b"orders", b"v"), {}, "must be str, not bytes"),
        ((TOPIC, 1), {}, "'int'"),
        ((TOPIC, 1.5), {}, "'float'"),
        ((TOPIC, ["v"]), {}, "'list'"),
        ((TOPIC, b"v", 1), {}, "'int'"),
        ((TOPIC, b"v"), {"key": {}}, "'dict'"),
        ((TOPIC, b"v"), {"partition": "0"}, "'str'"),
        ((TOPIC, b"v"), {"partition": None}, "'NoneType'"),
        ((TOPIC, b"v"), {"partition": 1.0}, "'float'"),
        ((TOPIC, b"v"), {"timestamp": "now"}, "'str'"),
        ((TOPIC, b"v"), {"timestamp": 1.5}, "'float'"),
        ((TOPIC, b"v"), {"timestamp": None}, "'NoneType'"),
        ((TOPIC, b"v"), {"headers": "x"}, "expected headers to be dict or list of .key, value. tuples, not str"),
        ((TOPIC, b"v"), {"headers": (("a", b"b"),)}, "expected headers to be dict or list"),
        ((TOPIC, b"v"), {"headers": [("a",)]}, "Headers are expected to be a list of .key, value. tuples"),
        (
            (TOPIC, b"v"),
            {"headers": [("a", 1)]},
            "expected header value to be None, binary, or unicode string, not int",
        ),
        ((TOPIC, b"v"), {"headers": {"a": 1}}, "expected header value to be None, binary, or unicode string, not int"),
        ((TOPIC, b"v"), {"topic_name": "x"}, "topic_name"),
        ((TOPIC, b"v", None, 0, None, None, 0, [], 1), {}, "argument"),
    ],
)
def test_arguments_of_another_type_are_a_type_error_and_queue_nothing(producer, arguments, named, text):
    with pytest.raises(TypeError, match=text):
        producer.produce(*arguments, **named)
    assert len(producer) == 0


@on_sqlite_alone
@pytest.mark.parametrize(
    ("named", "error"),
    [
        ({"partition": 2**31}, OverflowError),
        ({"partition": -(2**31) - 1}, OverflowError),
        ({"timestamp": 2**63}, OverflowError),
        ({"value": "\ud800"}, UnicodeEncodeError),
        ({"key": "\ud800"}, UnicodeEncodeError),
        ({"headers": [("a", "\ud800")]}, UnicodeEncodeError),
    ],
)
def test_values_that_cannot_be_stored_are_refused_at_once(producer, named, error):
    with pytest.raises(error):
        producer.produce(**{"topic": TOPIC, **named})
    assert len(producer) == 0


def test_all_arguments_have_their_place(producer, topic, url):
    reports = []
    producer.produce(topic, b"v", b"k", 1, lambda *report: reports.append(report), None, 1_234_567, [("a", b"1")])

    (message,) = written(producer, url, topic, partitions=(1,))

    assert len(reports) == 1
    assert (message.value(), message.key(), message.partition(), message.headers()) == (b"v", b"k", 1, [("a", b"1")])
    assert message.timestamp() == (TIMESTAMP_CREATE_TIME, 1_234_567)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("given", "stored"),
    [(None, None), (b"", b""), ("", b""), (b"bytes", b"bytes"), ("tëxt", "tëxt".encode()), (b"\0'; --", b"\0'; --")],
    ids=["none", "empty", "empty-text", "bytes", "text", "hostile"],
)
def test_keys_and_values_are_bytes_or_text_or_none(producer, topic, url, given, stored):
    producer.produce(topic, given, given, partition=0)

    (message,) = written(producer, url, topic)

    assert (message.value(), message.key()) == (stored, stored)
    assert len(message) == len(stored or b"")


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (None, None),
        ([], None),
        ({}, None),
        ({"a": b"1", "b": None, "c": "text"}, [("a", b"1"), ("b", None), ("c", b"text")]),
        ([("a", b"1"), ("a", None), ("a", "t")], [("a", b"1"), ("a", None), ("a", b"t")]),
        ([("ключ", "значение")], [("ключ", "значение".encode())]),
        ([("", b"")], [("", b"")]),
    ],
    ids=["none", "empty-list", "empty-dict", "dict", "list", "not-latin", "empty-name"],
)
def test_headers_keep_their_order_and_their_duplicates(producer, topic, url, given, stored):
    producer.produce(topic, b"v", partition=0, headers=given)

    (message,) = written(producer, url, topic)

    assert message.headers() == stored


def test_a_record_without_a_timestamp_gets_the_time_of_the_call(producer, topic, url):
    before_ms = time.time_ns() // 1_000_000
    producer.produce(topic, b"v", partition=0)
    producer.produce(topic, b"v", partition=0, timestamp=0)
    after_ms = time.time_ns() // 1_000_000

    for message in written(producer, url, topic):
        kind, timestamp_ms = message.timestamp()
        assert kind == TIMESTAMP_CREATE_TIME
        assert before_ms <= timestamp_ms <= after_ms


@on_sqlite_alone
@pytest.mark.parametrize(("size", "is_refused"), [(999_000, False), (1_000_001, True), (5_000_000, True)])
def test_a_record_above_message_max_bytes_is_refused_at_once(producer, topic, size, is_refused):
    if is_refused:
        for named in ({"value": b"x" * size}, {"key": b"x" * size}, {"headers": {"a": b"x" * size}}):
            error = error_of(producer.produce, topic, **named)
            assert error.code() == KafkaError.MSG_SIZE_TOO_LARGE
            assert error.str().startswith("Unable to produce message: Broker: Message size too large")
        assert len(producer) == 0
    else:
        producer.produce(topic, b"x" * size)
        assert producer.flush(PATIENCE_SECONDS) == 0


def test_message_max_bytes_is_configured(make_producer, topic):
    producer = make_producer({"message.max.bytes": 1000})

    producer.produce(topic, b"x" * 900)
    assert error_of(producer.produce, topic, b"x" * 1001).code() == KafkaError.MSG_SIZE_TOO_LARGE


@on_sqlite_alone
@pytest.mark.parametrize("partition", [4, 99, -2, -5])
def test_a_partition_that_a_known_topic_does_not_have_is_refused_at_once(producer, topic, partition):
    error = error_of(producer.produce, topic, b"v", partition=partition)

    assert error.code() == KafkaError._UNKNOWN_PARTITION
    assert error.str() == "Unable to produce message: Local: Unknown partition"
    assert len(producer) == 0


def test_a_partition_that_turns_out_not_to_exist_fails_the_delivery(make_producer, topic):
    producer = make_producer()
    reports = []

    producer.produce(topic, b"v", partition=77, on_delivery=lambda *report: reports.append(report))
    assert producer.flush(PATIENCE_SECONDS) == 0

    ((error, message),) = reports
    assert error == KafkaError._UNKNOWN_PARTITION
    assert (message.partition(), message.offset(), message.value()) == (77, None, b"v")
    assert message.error() == KafkaError._UNKNOWN_PARTITION


def test_a_partition_that_was_made_since_gets_its_records(make_producer, url):
    topic = create_topic(url, "growing", partition_count=1)
    # What was read counts as old at once.
    producer = make_producer({"topic.metadata.refresh.interval.ms": 0})
    partitions = []

    def produce(partition):
        producer.produce(topic, b"v", partition=partition, on_delivery=lambda _, message: partitions.append(message))
        assert producer.flush(PATIENCE_SECONDS) == 0
        return partitions.pop()

    assert produce(0).error() is None
    with AdminClient({"bootstrap.servers": url}) as admin:
        admin.create_partitions([NewPartitions(topic, 4)])[topic].result(PATIENCE_SECONDS)
    placed = produce(3)
    assert (placed.error(), placed.partition(), placed.offset()) == (None, 3, 0)
    assert produce(4).error() == KafkaError._UNKNOWN_PARTITION
    assert error_of(producer.produce, topic, b"v", partition=-2).code() == KafkaError._UNKNOWN_PARTITION


def test_a_look_at_all_topics_shows_a_producer_the_partitions_that_were_made_since(make_producer, url):
    topic = create_topic(url, "growing", partition_count=1)
    producer = make_producer({"topic.metadata.refresh.interval.ms": -1})
    producer.produce(topic, b"v", partition=0)
    assert producer.flush(PATIENCE_SECONDS) == 0
    with AdminClient({"bootstrap.servers": url}) as admin:
        admin.create_partitions([NewPartitions(topic, 2)])[topic].result(PATIENCE_SECONDS)
    assert error_of(producer.produce, topic, b"v", partition=1).code() == KafkaError._UNKNOWN_PARTITION
    producer.list_topics(timeout=PATIENCE_SECONDS)
    producer.produce(topic, b"v", partition=1)
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert values(read_to_end(url, topic, partitions=(1,))) == [b"v"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", ["", "a b", "x" * 250, ".", "..", "with/slash", "naïve", "or\0ders"])
def test_a_topic_that_cannot_be_fails_without_a_trace(make_producer, name):
    producer = make_producer()
    reports = []

    try:
        producer.produce(name, b"v", on_delivery=lambda *report: reports.append(report))
    except KafkaException as error:
        refused = error.args[0]
    else:
        assert producer.flush(PATIENCE_SECONDS) == 0
        ((refused, _),) = reports

    assert refused.code() in (
        KafkaError.TOPIC_EXCEPTION,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._INVALID_ARG,
    )
    assert name not in producer.list_topics(timeout=PATIENCE_SECONDS).topics


def test_a_batch_is_queued_message_by_message(producer, topic, url):
    reports = []
    messages: list[dict[str, Any]] = [
        {"value": b"1", "key": b"k"},
        {"value": "2", "headers": [("a", b"1")]},
        {"value": None, "timestamp": 1_234_567},
        {},
        {"value": b"elsewhere", "partition": 2},
    ]

    assert producer.produce_batch(topic, messages, partition=1, on_delivery=lambda *r: reports.append(r)) == 5

    assert values(written(producer, url, topic, partitions=(2,))) == [b"elsewhere"]
    one, two, three, four = read_to_end(url, topic, partitions=(1,))
    assert (one.key(), one.value()) == (b"k", b"1")
    assert (two.value(), two.headers()) == (b"2", [("a", b"1")])
    assert (three.value(), three.timestamp()) == (None, (TIMESTAMP_CREATE_TIME, 1_234_567))
    assert (four.key(), four.value(), four.headers()) == (None, None, None)
    assert [error for error, _ in reports] == [None] * 5
    assert all("_error" not in message for message in messages)


def test_a_batch_goes_through_what_a_subclass_has_made_of_produce(url, topic):
    class Marking(Producer):
        def produce(self, topic, value=None, key=None, headers=None, **options):  # type: ignore[override]  # as users do
            super().produce(topic, value, key, headers=[*(headers or ()), ("by", b"us")], **options)

    with Marking({"bootstrap.servers": url}) as producer:
        assert producer.produce_batch(topic, [{"value": b"1"}, {"key": b"2", "headers": [("a", b"1")]}], 0) == 2
        assert producer.flush(PATIENCE_SECONDS) == 0
    one, two = read_to_end(url, topic)
    assert (one.value(), one.key(), one.headers()) == (b"1", None, [("by", b"us")])
    assert (two.value(), two.key(), two.headers()) == (None, b"2", [("a", b"1"), ("by", b"us")])


def test_what_of_a_batch_cannot_be_queued_says_why_in_its_place(producer, topic, url):
    messages: list[dict[str, Any]] = [{"value": b"1"}, {"value": b"x" * 1_000_001}, {"value": b"3"}]

    assert producer.produce_batch(topic, messages, partition=0) == 2

    assert [message.get("_error") for message in messages] == [None, KafkaError.MSG_SIZE_TOO_LARGE, None]
    assert values(written(producer, url, topic)) == [b"1", b"3"]


def test_a_batch_larger_than_the_queue_is_queued_in_part(make_producer, topic):
    producer = make_producer({"queue.buffering.max.messages": 3, "linger.ms": 50_000})
    messages: list[dict[str, Any]] = [{"value": b"%d" % number} for number in range(5)]

    assert producer.produce_batch(topic, messages) == 3

    assert [message.get("_error") for message in messages] == [None, None, None, *[KafkaError._QUEUE_FULL] * 2]
    assert producer.flush(PATIENCE_SECONDS) == 0


def test_callbacks_of_a_batch_are_the_messages_own_or_all_of_theirs(producer, topic):
    reports = []
    messages = [
        {"value": b"1"},
        {"value": b"2", "callback": lambda error, message: reports.append(("own", message.value()))},
        {"value": b"3", "callback": None},
    ]

    producer.produce_batch(
        topic, messages, partition=0, on_delivery=lambda error, message: reports.append(("all", message.value()))
    )
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert reports == [("all", b"1"), ("own", b"2"), ("all", b"3")]


@on_sqlite_alone
@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (({"value": b"1"},), "messages must be a list"),
        ([{"value": b"1"}, 2], "Message at index 1 must be a dict"),
        ([{"value": b"1"}, {"value": 2}], "Message value at index 1 must be bytes or str"),
        ([{"value": b"1"}, {"key": 2}], "Message key at index 1 must be bytes or str"),
    ],
)
def test_a_batch_of_another_type_queues_nothing(producer, topic, messages, text):
    with pytest.raises(TypeError, match=text):
        producer.produce_batch(topic, messages)
    assert len(producer) == 0


def test_an_empty_batch_is_one(producer, topic):
    assert producer.produce_batch(topic, []) == 0


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("partitioner", "placed"),
    # (murmur2, consistent, fnv1a) of three partitions, as confluent-kafka 2.16.1 was seen to choose them.
    [
        ("consistent", {b"a": 0, b"abc": 0, b"hello": 1, b"kafka-key-123": 1, b"\xff\x00": 0}),
        ("consistent_random", {b"a": 0, b"abc": 0, b"hello": 1, b"kafka-key-123": 1, b"\xff\x00": 0}),
        ("murmur2", {b"a": 1, b"abc": 0, b"hello": 0, b"kafka-key-123": 0, b"\xff\x00": 1}),
        ("murmur2_random", {b"a": 1, b"abc": 0, b"hello": 0, b"kafka-key-123": 0, b"\xff\x00": 1}),
        ("fnv1a", {b"a": 0, b"abc": 2, b"hello": 0, b"kafka-key-123": 2, b"\xff\x00": 2}),
        ("fnv1a_random", {b"a": 0, b"abc": 2, b"hello": 0, b"kafka-key-123": 2, b"\xff\x00": 2}),
    ],
)
def test_a_key_goes_to_the_partition_that_the_partitioner_names(make_producer, url, partitioner, placed):
    topic = create_topic(url, "keyed", partition_count=3)
    producer = make_producer({"partitioner": partitioner})
    reports = {}
    for key in placed:
        producer.produce(topic, b"v", key, on_delivery=lambda _, message: reports.update({message.key(): message}))
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert {key: message.partition() for key, message in reports.items()} == placed


@pytest.mark.slow_but_first
@pytest.mark.parametrize("partitioner", ["random", "consistent_random", "murmur2_random", "fnv1a_random"])
def test_records_without_a_key_come_to_all_partitions(make_producer, url, partitioner):
    topic = create_topic(url, "keyless", partition_count=3)
    producer = make_producer({"partitioner": partitioner, "sticky.partitioning.linger.ms": 0})
    seen = set()
    for _ in range(200):
        producer.produce(topic, b"v", on_delivery=lambda _, message: seen.add(message.partition()))
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert seen == {0, 1, 2}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("partitioner", ["consistent", "murmur2", "fnv1a"])
@pytest.mark.parametrize("sticky", [{}, {"sticky.partitioning.linger.ms": 0}])
def test_without_a_key_a_partitioner_that_is_not_random_takes_the_one_of_the_empty_key(
    make_producer, url, partitioner, sticky
):
    topic = create_topic(url, "keyless", partition_count=3)
    producer = make_producer({"partitioner": partitioner, **sticky})
    seen = set()
    for key in (None, b"") * 5:
        producer.produce(topic, b"v", key, on_delivery=lambda _, message: seen.add(message.partition()))
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert seen == {PARTITIONERS[partitioner](b"", 3, random.Random())}


@on_sqlite_alone
def test_a_topic_partition_is_no_topic(producer):
    with pytest.raises(TypeError, match="must be str"):
        producer.produce(TopicPartition(TOPIC, 0), b"v")


class Lying(bytes):
    """Bytes that say other things of themselves than they hold."""

    def __len__(self):
        return 0

    def __eq__(self, other):
        raise AssertionError("not asked")

    __hash__ = None  # type: ignore[assignment]

    def __bytes__(self):
        return b"others"

    def __getitem__(self, place):
        return b"others"


class LyingText(str):
    """The same of text."""

    __slots__ = ()

    def encode(self, *arguments):
        return "no bytes"


@on_sqlite_alone
def test_bytes_and_texts_of_a_class_of_its_own_are_what_they_hold(producer, url, topic):
    delivered = []
    for key, value in ((Lying(b"k"), Lying(b"value")), (LyingText("k"), LyingText("value"))):
        for _ in range(2):
            producer.produce(topic, value, key, 0, on_delivery=lambda _, message: delivered.append(message))
    producer.produce(topic, b"other", b"o", 0)
    found = written(producer, url, topic)
    assert [(message.key(), message.value()) for message in found] == [(b"k", b"value")] * 4 + [(b"o", b"other")]
    assert {type(cell) for message in delivered for cell in (message.key(), message.value())} == {bytes}

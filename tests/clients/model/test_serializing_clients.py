"""SerializingProducer and DeserializingConsumer: objects in, objects out, and every failure with its side."""

from __future__ import annotations

import gc
import weakref
from typing import get_origin

import pytest

from txnstore import DeserializingConsumer, KafkaError, KafkaException, Producer, SerializingProducer
from txnstore.error import (
    ConsumeError,
    KeyDeserializationError,
    KeySerializationError,
    ValueDeserializationError,
    ValueSerializationError,
)
from txnstore.serialization import (
    DoubleDeserializer,
    DoubleSerializer,
    IntegerDeserializer,
    IntegerSerializer,
    MessageField,
    StringDeserializer,
    StringSerializer,
)

TIMEOUT_SECONDS = 60


@pytest.fixture
def make_serializing(url):
    """Make serializing producers on the test's store; they are closed after the test."""
    opened = []

    def make(configuration=()):
        producer = SerializingProducer({"bootstrap.servers": url, **dict(configuration)})
        opened.append(producer)
        return producer

    yield make
    for producer in opened:
        producer.close()


@pytest.fixture
def make_deserializing(url):
    """Make deserializing consumers on the test's store; they are closed after the test."""
    opened = []

    def make(configuration=()):
        usual = {"bootstrap.servers": url, "group.id": "readers", "auto.offset.reset": "earliest"}
        consumer = DeserializingConsumer({**usual, **dict(configuration)})
        opened.append(consumer)
        return consumer

    yield make
    for consumer in opened:
        consumer.close()


class Recording:
    """A serializer, or a deserializer, that keeps what it was called with."""

    def __init__(self):
        self.calls = []
        self.resolver = None
        self.closed = False

    def __call__(self, value, context):
        self.calls.append((value, context.topic, MessageField(context.field), context.headers))
        return value

    def set_cluster_id_resolver(self, resolver):
        self.resolver = resolver

    def close(self):
        self.closed = True


def failing(value, context):
    raise ValueError(f"not this {context.field}")


def test_objects_are_produced_and_consumed(make_serializing, make_deserializing):
    producer = make_serializing({"key.serializer": IntegerSerializer(), "value.serializer": StringSerializer()})
    producer.produce("t", 5, "five", headers=[("h", b"1")])
    producer.produce("t", key=None, value=None)
    assert producer.flush(TIMEOUT_SECONDS) == 0
    consumer = make_deserializing(
        {"key.deserializer": IntegerDeserializer(), "value.deserializer": StringDeserializer()}
    )
    consumer.subscribe(["t"])
    messages = [consumer.poll(TIMEOUT_SECONDS) for _ in range(2)]
    read = {(message.key(), message.value()): message for message in messages}
    assert set(read) == {(5, "five"), (None, None)}
    assert (read[5, "five"].deserialized_key(), read[5, "five"].deserialized_value()) == (5, "five")
    assert read[5, "five"].headers() == [("h", b"1")]


def test_what_has_no_serializer_is_left_as_it_is(make_serializing, make_deserializing):
    producer = make_serializing({"value.serializer": DoubleSerializer()})
    producer.produce("t", "key", 1.5)
    assert producer.flush(TIMEOUT_SECONDS) == 0
    consumer = make_deserializing({"value.deserializer": DoubleDeserializer()})
    consumer.subscribe(["t"])
    message = consumer.poll(TIMEOUT_SECONDS)
    assert (message.key(), message.value()) == (b"key", 1.5)


def test_a_serializer_is_told_topic_field_and_headers_the_key_first(make_serializing):
    recording = Recording()
    producer = make_serializing({"key.serializer": recording, "value.serializer": recording})
    headers = [("h", b"1")]
    producer.produce("t", b"k", b"v", headers=headers)
    assert recording.calls == [
        (b"k", "t", MessageField.KEY, headers),
        (b"v", "t", MessageField.VALUE, headers),
    ]


def test_a_header_that_a_serializer_adds_is_written(make_serializing, make_deserializing):
    def stamp(value, context):
        context.headers.append(("schema", b"7"))
        return value

    producer = make_serializing({"value.serializer": stamp})
    producer.produce("t", b"k", b"v", headers=[("h", b"1")])
    assert producer.flush(TIMEOUT_SECONDS) == 0
    consumer = make_deserializing()
    consumer.subscribe(["t"])
    assert consumer.poll(TIMEOUT_SECONDS).headers() == [("h", b"1"), ("schema", b"7")]


@pytest.mark.parametrize(
    ("setting", "error", "field"),
    [("key.serializer", KeySerializationError, "key"), ("value.serializer", ValueSerializationError, "value")],
)
def test_a_message_that_cannot_be_serialized_is_not_queued(make_serializing, setting, error, field):
    producer = make_serializing({setting: failing})
    with pytest.raises(error, match=f"not this {field}") as caught:
        producer.produce("t", b"k", b"v")
    assert isinstance(caught.value.exception, ValueError)
    assert caught.value.__cause__ is caught.value.exception
    assert len(producer) == 0


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("setting", "error", "field"),
    [
        ("key.deserializer", KeyDeserializationError, "key"),
        ("value.deserializer", ValueDeserializationError, "value"),
    ],
)
def test_a_message_that_cannot_be_deserialized_is_shown_and_passed(
    make_producer, make_deserializing, setting, error, field
):
    def refuses_the_first(value, context):
        if value == b"1":
            return failing(value, context)
        return value.decode()

    producer = make_producer()
    producer.produce("t", b"1", b"1", partition=0)
    producer.produce("t", b"2", b"2", partition=0)
    assert producer.flush(TIMEOUT_SECONDS) == 0
    consumer = make_deserializing({setting: refuses_the_first})
    consumer.subscribe(["t"])
    with pytest.raises(error, match=f"not this {field}") as caught:
        consumer.poll(TIMEOUT_SECONDS)
    message = caught.value.kafka_message
    assert (message.topic(), message.offset(), message.key(), message.value()) == ("t", 0, b"1", b"1")
    assert consumer.poll(TIMEOUT_SECONDS).offset() == 1


async def asynchronous(value, context):
    return value


def test_an_asynchronous_serializer_is_refused_and_no_message_passed(
    make_producer, make_serializing, make_deserializing
):
    with pytest.raises(TypeError, match="asynchronous"):
        make_serializing({"value.serializer": asynchronous}).produce("t", value=b"0", partition=0)
    producer = make_producer()
    producer.produce("t", b"1", partition=0)
    assert producer.flush(TIMEOUT_SECONDS) == 0
    with_it = make_deserializing({"value.deserializer": asynchronous})
    with_it.subscribe(["t"])
    for _ in range(2):
        with pytest.raises(TypeError, match="asynchronous"):
            with_it.poll(TIMEOUT_SECONDS)
    with_it.close()
    without = make_deserializing()
    without.subscribe(["t"])
    assert without.poll(TIMEOUT_SECONDS).value() == b"1"


def test_an_event_is_raised(make_producer, make_deserializing):
    producer = make_producer()
    producer.produce("t", b"v", partition=0)
    assert producer.flush(TIMEOUT_SECONDS) == 0
    consumer = make_deserializing({"enable.partition.eof": True})
    consumer.subscribe(["t"])
    assert consumer.poll(TIMEOUT_SECONDS).value() == b"v"
    with pytest.raises(ConsumeError) as caught:
        consumer.poll(TIMEOUT_SECONDS)
    assert caught.value.code == KafkaError._PARTITION_EOF
    assert caught.value.kafka_message is not None
    assert caught.value.kafka_message.topic() == "t"


def test_an_iterator_goes_on_behind_the_ends_of_partitions(make_producer, make_deserializing):
    producer = make_producer()
    consumer = make_deserializing({"enable.partition.eof": True, "value.deserializer": IntegerDeserializer()})
    producer.produce("t", IntegerSerializer()(5), partition=0)
    assert producer.flush(TIMEOUT_SECONDS) == 0
    consumer.subscribe(["t"])
    messages = iter(consumer)
    assert next(messages).value() == 5
    assert next(messages).error().code() == KafkaError._PARTITION_EOF
    for value in (b"not four", IntegerSerializer()(7)):
        producer.produce("t", value, partition=0)
    assert producer.flush(TIMEOUT_SECONDS) == 0
    with pytest.raises(ValueDeserializationError):
        next(messages)
    messages = iter(consumer)
    assert next(messages).value() == 7
    assert next(messages).error().code() == KafkaError._PARTITION_EOF
    consumer.close()
    assert list(messages) == []


def test_a_serializer_keeps_no_dropped_client_alive(url):
    recording = Recording()
    usual = {"bootstrap.servers": url, "group.id": "readers"}
    for kind, setting in ((SerializingProducer, "value.serializer"), (DeserializingConsumer, "value.deserializer")):
        client = kind(
            {**usual, setting: recording}
            if kind is DeserializingConsumer
            else {"bootstrap.servers": url, setting: recording}
        )
        reference = weakref.ref(client)
        del client
        gc.collect()
        assert reference() is None
        with pytest.raises(RuntimeError, match="gone"):
            recording.resolver()


def test_nothing_to_read_is_none(make_deserializing):
    assert make_deserializing().poll(0) is None


def test_many_at_a_time_are_refused(make_deserializing):
    with pytest.raises(NotImplementedError):
        make_deserializing().consume(1, 0)
    with pytest.raises(NotImplementedError):
        make_deserializing().consume_transaction(0)


def test_a_batch_is_queued_as_it_is(make_serializing, make_deserializing):
    """As in confluent-kafka: its keys and values are bytes or text already, and stay where they are."""
    recording = Recording()
    producer = make_serializing({"key.serializer": recording, "value.serializer": recording})
    assert producer.produce_batch("t", [{"key": b"account 7", "value": b"42"}, {"value": "7"}]) == 2
    assert producer.flush(TIMEOUT_SECONDS) == 0
    consumer = make_deserializing()
    consumer.subscribe(["t"])
    read = {(message.key(), message.value()) for message in (consumer.poll(TIMEOUT_SECONDS) for _ in range(2))}
    assert read == {(b"account 7", b"42"), (None, b"7")}
    assert recording.calls == []


def test_the_delivery_report_comes(make_serializing):
    reports = []
    producer = make_serializing({"value.serializer": StringSerializer()})
    producer.produce("t", b"k", "v", 0, lambda *report: reports.append(report), 1234)
    assert producer.flush(TIMEOUT_SECONDS) == 0
    ((error, message),) = reports
    assert error is None
    assert (message.key(), message.value(), message.partition(), message.timestamp()) == (b"k", b"v", 0, (1, 1234))


def test_a_serializer_can_ask_for_the_cluster(make_serializing, make_deserializing):
    of_producer, of_consumer = Recording(), Recording()
    producer = make_serializing({"key.serializer": of_producer})
    consumer = make_deserializing({"value.deserializer": of_consumer})
    assert of_producer.resolver() == producer.cluster_id(TIMEOUT_SECONDS)
    assert of_consumer.resolver() == consumer.cluster_id(TIMEOUT_SECONDS)
    assert producer.cluster_id(TIMEOUT_SECONDS)


def test_a_closed_producer_serializes_nothing_and_leaves_the_serializer_open(make_serializing):
    recording = Recording()
    producer = make_serializing({"key.serializer": recording})
    assert producer.close() is True
    with pytest.raises(RuntimeError, match="Producer has been closed"):
        producer.produce("t", b"k", b"v")
    assert recording.calls == []
    assert not recording.closed


def test_a_topic_that_is_no_text_reaches_no_serializer(make_serializing):
    recording = Recording()
    with pytest.raises(TypeError, match="topic must be a str, not int"):
        make_serializing({"key.serializer": recording}).produce(5, b"k", b"v")
    assert recording.calls == []


def test_the_context_managers_close(url):
    with SerializingProducer({"bootstrap.servers": url}) as producer:
        producer.produce("t", b"k", b"v")
    with pytest.raises(RuntimeError, match="closed"):
        producer.produce("t", b"k", b"v")
    with DeserializingConsumer({"bootstrap.servers": url, "group.id": "g"}) as consumer:
        assert consumer.poll(0) is None
    with pytest.raises(RuntimeError, match="closed"):
        consumer.poll(0)


@pytest.mark.parametrize("configuration", [None, "x", []])
@pytest.mark.parametrize("kind", [SerializingProducer, DeserializingConsumer])
def test_a_configuration_that_is_no_dictionary_is_refused(kind, configuration):
    with pytest.raises(TypeError, match="expected configuration dict"):
        kind(configuration)


@pytest.mark.parametrize(
    ("kind", "setting"),
    [(SerializingProducer, "key.serializer"), (DeserializingConsumer, "value.deserializer")],
)
def test_a_serializer_that_cannot_be_called_is_refused(kind, setting):
    with pytest.raises(TypeError, match=f"{setting} must be callable, not str"):
        kind({setting: "utf_8", "group.id": "g"})


def test_the_configuration_is_left_as_it_was(url):
    configuration = {"bootstrap.servers": url, "key.serializer": StringSerializer()}
    before = dict(configuration)
    SerializingProducer(configuration).close()
    assert configuration == before


def test_the_plain_producer_knows_no_serializers(url):
    with pytest.raises(KafkaException) as caught:
        Producer({"bootstrap.servers": url, "key.serializer": StringSerializer()})
    assert caught.value.args[0] == KafkaError._INVALID_ARG


def test_the_types_can_be_named():
    assert get_origin(SerializingProducer[str, dict]) is SerializingProducer
    assert get_origin(DeserializingConsumer[str, dict]) is DeserializingConsumer

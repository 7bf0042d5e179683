"""Builders of serializers, and the asynchronous clients that serialize."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.clients.steps import PATIENCE_SECONDS, create_topic
from tests.databases import on_sqlite_alone
from txnstore import (
    OFFSET_BEGINNING,
    DeserializingConsumer,
    KafkaError,
    KafkaException,
    SerializingProducer,
    TopicPartition,
)
from txnstore.aio import AIOConsumer, AIOProducer, AsyncDeserializingConsumer, AsyncSerializingProducer
from txnstore.error import (
    ConsumeError,
    KeySerializationError,
    ValueDeserializationError,
    ValueSerializationError,
)
from txnstore.serialization import DeserializerBuilder, Serializer, SerializerBuilder, StringSerializer


class Prefixing(Serializer):
    """Puts a prefix before the text; for keys another one than for values."""

    def __init__(self, prefix):
        self.prefix = prefix
        self.closed = 0

    def __call__(self, obj, ctx=None):
        return None if obj is None else f"{self.prefix}{obj}".encode()

    def close(self):
        self.closed += 1


class Stripping(Prefixing):
    def __call__(self, value, ctx=None):
        return None if value is None else value.decode().removeprefix(self.prefix)


class AsyncPrefixing(Prefixing):
    async def __call__(self, obj, ctx=None):  # type: ignore[override]  # awaited by asynchronous clients
        await asyncio.sleep(0)
        return super().__call__(obj, ctx)

    async def close(self):  # type: ignore[override]  # (as above)
        self.closed += 1


class Builder(SerializerBuilder):
    """Makes serializers of a key of the configuration, which it takes out of it."""

    def __init__(self, kind=Prefixing):
        self.kind = kind
        self.built = []

    def build(self, conf, is_key):
        self.built.append(self.kind("k:" if is_key else conf["value.prefix"]))
        return self.built[-1], {name: value for name, value in conf.items() if name != "value.prefix"}


class AsyncBuilder(Builder):
    async def build(self, conf, is_key):  # type: ignore[override]  # awaited by asynchronous clients
        return super().build(conf, is_key)


class StrippingBuilder(Builder, DeserializerBuilder):
    def __init__(self):
        super().__init__(Stripping)


PREFIXED = {"value.prefix": "v:"}


def read(url, **conf):
    return {"bootstrap.servers": url, "group.id": "g", "auto.offset.reset": "earliest", **conf}


def test_builders_make_what_the_clients_use_and_close(url):
    create_topic(url, "t")
    keys, values, strips = Builder(), Builder(), StrippingBuilder()
    conf = {
        "bootstrap.servers": url,
        "key.serializer.builder": keys,
        "value.serializer.builder": values,
        **PREFIXED,
    }
    with SerializingProducer(conf) as producer:
        producer.produce("t", key="a", value=5)
    assert conf["value.prefix"] == "v:"
    assert [built.closed for built in keys.built + values.built] == [1, 1]
    assert [built.prefix for built in keys.built + values.built] == ["k:", "v:"]
    consumer = DeserializingConsumer(read(url, **{"value.deserializer.builder": strips}, **PREFIXED))
    consumer.assign([TopicPartition("t", 0, OFFSET_BEGINNING)])
    message: Any = consumer.poll(PATIENCE_SECONDS)
    assert (message.key(), message.value()) == (b"k:a", "5")
    consumer.close()
    consumer.close()
    assert strips.built[0].closed == 1


def test_a_serializer_that_was_given_stays_its_owners(url):
    given = Prefixing("x")
    SerializingProducer({"bootstrap.servers": url, "value.serializer": given}).close()
    assert given.closed == 0


class Nothing:
    def build(self, conf, is_key):
        return None


class NoConfiguration:
    def build(self, conf, is_key):
        return Prefixing("x"), None


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (
            {"key.serializer": StringSerializer()},
            "Cannot configure both key.serializer and key.serializer.builder; use one or the other",
        ),
        (
            {"value.serializer.builder": Nothing()},
            r"value.serializer.builder must return a \(serde, configuration\) tuple from build\(\), got NoneType",
        ),
        (
            {"value.serializer.builder": NoConfiguration()},
            r"value.serializer.builder returned NoneType as the leftover configuration from build\(\), expected a dict",
        ),
    ],
)
def test_wrong_builders_are_refused_and_what_was_built_is_closed(url, more, text):
    keys = Builder()
    conf = {"bootstrap.servers": url, "key.serializer.builder": keys, **PREFIXED, **more}
    with pytest.raises(ValueError, match=f"^{text}$"):
        SerializingProducer(conf)
    with pytest.raises(ValueError, match=f"^{text}$"):
        asyncio.run(make(AsyncSerializingProducer, conf))
    assert all(built.closed == 1 for built in keys.built)


def test_a_client_that_cannot_be_made_closes_what_was_built(url):
    keys = Builder()
    with pytest.raises(KafkaException) as caught:
        SerializingProducer({"bootstrap.servers": url, "key.serializer.builder": keys, "no.such.key": 1, **PREFIXED})
    assert caught.value.args[0].code() == KafkaError._INVALID_ARG
    assert [built.closed for built in keys.built] == [1]


async def make(kind, conf):
    return await kind(conf)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("builder", [Builder, AsyncBuilder])
@pytest.mark.parametrize("serializer", [Prefixing, AsyncPrefixing])
def test_the_asynchronous_clients_serialize(url, builder, serializer):
    create_topic(url, "t")
    values = builder(serializer)

    async def work():
        producer = await AsyncSerializingProducer(
            {
                "bootstrap.servers": url,
                "key.serializer": Prefixing("k:"),
                "value.serializer.builder": values,
                **PREFIXED,
            }
        )
        assert isinstance(producer, AsyncSerializingProducer)
        assert isinstance(producer, AIOProducer)
        async with producer:
            delivered = await producer.produce("t", "a", 5, partition=0, headers=[("h", b"x")])
            assert (await delivered).offset() == 0
        with pytest.raises(RuntimeError, match="Producer has been closed"):
            await producer.produce("t", "a", 5)
        consumer: Any = await AsyncDeserializingConsumer(read(url, **{"key.deserializer": Stripping("k:")}))
        assert AIOConsumer in type(consumer).__mro__
        async with consumer:
            await consumer.assign([TopicPartition("t", 0, OFFSET_BEGINNING)])
            message = await consumer.poll(PATIENCE_SECONDS)
            assert (message.key(), message.value(), message.headers()) == ("a", b"v:5", [("h", b"x")])
            await consumer.seek(TopicPartition("t", 0, 0))
            (message,) = await consumer.consume(1, PATIENCE_SECONDS)
            assert message.key() == "a"

    asyncio.run(work())
    assert [built.closed for built in values.built] == [1]


@pytest.mark.parametrize("reads", [False, True], ids=["producer", "consumer"])
@pytest.mark.parametrize("is_cancelled", [True, False])
def test_what_builders_made_is_closed_though_closing_is_cancelled_or_fails(url, monkeypatch, is_cancelled, reads):
    values = AsyncBuilder(AsyncPrefixing)
    name, kind = ("deserializer", AsyncDeserializingConsumer) if reads else ("serializer", AsyncSerializingProducer)

    async def work():
        conf = read(url) if reads else {"bootstrap.servers": url}
        client: Any = await kind({**conf, f"value.{name}.builder": values, **PREFIXED})
        blocking = client._consumer if reads else client._producer
        close, loop, begun, may_end = blocking.close, asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def close_late():
            loop.call_soon_threadsafe(begun.set)
            assert may_end.wait(PATIENCE_SECONDS)
            close()
            if not is_cancelled:
                raise ZeroDivisionError

        monkeypatch.setattr(blocking, "close", close_late)
        closing = asyncio.create_task(client.close())
        await begun.wait()
        if is_cancelled:
            closing.cancel()
        may_end.set()
        with pytest.raises(asyncio.CancelledError if is_cancelled else ZeroDivisionError):
            await closing
        # It goes on by itself.
        await asyncio.wait([client._calls._closing])
        assert [built.closed for built in values.built] == [1]
        await client.close()
        assert [built.closed for built in values.built] == [1]

    asyncio.run(work())


@on_sqlite_alone
def test_an_asynchronous_client_that_deserializes_hands_out_no_transactions(url):
    async def work():
        async with await AsyncDeserializingConsumer(read(url, **{"value.deserializer": Stripping("")})) as consumer:
            with pytest.raises(NotImplementedError, match=r"has no consume_transaction\(\): call poll\(\)"):
                await consumer.consume_transaction(0)

    asyncio.run(work())


def test_what_an_asynchronous_client_cannot_serialize_is_said(url):
    create_topic(url, "t")

    async def fail(*_):
        raise ValueError("why")

    async def work():
        conf = {"bootstrap.servers": url}
        async with await AsyncSerializingProducer({**conf, "key.serializer": fail}) as producer:
            with pytest.raises(KeySerializationError, match="why"):
                await producer.produce("t", "a")
            with pytest.raises(TypeError, match="topic must be a str"):
                await producer.produce(None, "a")  # type: ignore[arg-type]
        async with await AsyncSerializingProducer({**conf, "value.serializer": fail}) as producer:
            with pytest.raises(ValueSerializationError, match="why"):
                await producer.produce("t", value="a")
        async with await AsyncSerializingProducer(conf) as producer:
            await (await producer.produce("t", value=b"a"))
        async with await AsyncDeserializingConsumer(read(url, **{"value.deserializer": fail})) as consumer:
            await consumer.assign([TopicPartition("t", 0, OFFSET_BEGINNING)])
            with pytest.raises(ValueDeserializationError, match="why") as caught:
                await consumer.poll(PATIENCE_SECONDS)
            assert caught.value.kafka_message is not None
            assert caught.value.kafka_message.value() == b"a"
            await consumer.assign([TopicPartition("none", 0, OFFSET_BEGINNING)])
            with pytest.raises(ConsumeError):
                await consumer.poll(PATIENCE_SECONDS)

    asyncio.run(work())

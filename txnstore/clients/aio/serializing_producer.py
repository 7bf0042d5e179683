"""The asynchronous producer that turns keys and values into bytes by the serializers of its configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, Self

from txnstore.clients.aio.producer import AIOProducer
from txnstore.clients.model.message import Message
from txnstore.clients.model.serializers import (
    Converter,
    Key,
    KeySerializationError,
    MessageField,
    SerializationContext,
    Value,
    ValueSerializationError,
    close_converters_async,
    offer_cluster_id_async,
    result_of,
    take_converters_async,
)


class AsyncSerializingProducer(AIOProducer, Generic[Key, Value]):
    """An `AIOProducer` of objects; made by `await AsyncSerializingProducer(conf)`.

    Beside the keys of `Producer` the configuration takes `key.serializer` and `value.serializer`, asynchronous or not,
    or in their place `key.serializer.builder` and `value.serializer.builder`.  What builders have made is closed with
    the producer.  A serializer that is not asynchronous runs on the loop.

    Args:
        conf: the configuration; it is not changed.
        kwargs: as of `AIOProducer`.

    Raises:
        TypeError: the configuration is no dictionary, or a serializer is not callable.
        ValueError: both a serializer and its builder are given.
        KafkaException: as of `Producer`.
    """

    _key_serializer: Converter | None
    _value_serializer: Converter | None
    _owned_serializers: list[Converter]

    def __new__(cls, conf: dict[str, Any], **kwargs: Any) -> Coroutine[Any, Any, Self]:  # type: ignore[misc]  # awaited
        """Return a coroutine that makes the producer: builders may be asynchronous."""
        return cls._make(conf, kwargs)

    @classmethod
    async def _make(cls, conf: dict[str, Any], keywords: dict[str, Any]) -> Self:
        taken = await take_converters_async(conf, "key.serializer", "value.serializer")
        self = object.__new__(cls)
        try:
            AIOProducer.__init__(self, taken.rest, **keywords)
        except BaseException:
            await close_converters_async(taken.owned)
            raise
        self._key_serializer, self._value_serializer = taken.converters
        self._owned_serializers = taken.owned
        offer_cluster_id_async(self.cluster_id, *taken.converters)
        return self

    async def close(self) -> None:
        """Close as `AIOProducer.close` does, then the serializers that builders have made."""
        await super().close()
        owned, self._owned_serializers = self._owned_serializers, []
        await close_converters_async(owned)

    async def produce(  # type: ignore[override]  # noqa: PLR0917 - confluent-kafka's signature: the key is first here
        self,
        topic: str,
        key: Key | None = None,
        value: Value | None = None,
        partition: int = -1,
        timestamp: int = 0,
        headers: Any = None,
    ) -> asyncio.Future[Message]:
        """Serialize key and value, the key first, and queue the message; the rest is as in `AIOProducer.produce`.

        Raises:
            KeySerializationError: the key's serializer raised `exception`.
            ValueSerializationError: the value's serializer raised `exception`.
            RuntimeError: the producer has been closed.
            TypeError: the topic is no text.
            KafkaException: as of `Producer.produce`.
        """
        # The serializers never see a message that cannot be queued.
        self._refuse_if_closed()
        if not isinstance(topic, str):
            raise TypeError(f"topic must be a str, not {type(topic).__name__}")
        serialized_key: Any = key
        serialized_value: Any = value
        context = SerializationContext(topic, MessageField.KEY, headers)
        if self._key_serializer is not None:
            try:
                serialized_key = await result_of(self._key_serializer(key, context))
            except Exception as error:
                raise KeySerializationError(error) from error
        context.field = MessageField.VALUE
        if self._value_serializer is not None:
            try:
                serialized_value = await result_of(self._value_serializer(value, context))
            except Exception as error:
                raise ValueSerializationError(error) from error
        return await super().produce(topic, serialized_value, serialized_key, partition, timestamp, headers)

"""The asynchronous consumer that turns keys and values into objects by the deserializers of its configuration."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Generic, Self

from txnstore.clients.aio.consumer import AIOConsumer
from txnstore.clients.model.message import Message
from txnstore.clients.model.serializers import (
    ConsumeError,
    Converter,
    Key,
    KeyDeserializationError,
    MessageField,
    SerializationContext,
    Value,
    ValueDeserializationError,
    close_converters_async,
    offer_cluster_id_async,
    result_of,
    take_converters_async,
)


class AsyncDeserializingConsumer(AIOConsumer, Generic[Key, Value]):
    """An `AIOConsumer` of objects; made by `await AsyncDeserializingConsumer(conf)`.

    Beside the keys of `Consumer` the configuration takes `key.deserializer` and `value.deserializer`, asynchronous or
    not, or in their place `key.deserializer.builder` and `value.deserializer.builder`.  What builders have made is
    closed with the consumer.  A deserializer that is not asynchronous runs on the loop.

    Args:
        conf: the configuration; it is not changed.
        kwargs: as of `AIOConsumer`.

    Raises:
        TypeError: the configuration is no dictionary, or a deserializer is not callable.
        ValueError: there is no `group.id`, or both a deserializer and its builder are given.
        KafkaException: as of `Consumer`.
    """

    _key_deserializer: Converter | None
    _value_deserializer: Converter | None
    _owned_deserializers: list[Converter]

    def __new__(cls, conf: dict[str, Any], **kwargs: Any) -> Coroutine[Any, Any, Self]:  # type: ignore[misc]  # awaited
        """Return a coroutine that makes the consumer: builders may be asynchronous."""
        return cls._make(conf, kwargs)

    @classmethod
    async def _make(cls, conf: dict[str, Any], keywords: dict[str, Any]) -> Self:
        taken = await take_converters_async(conf, "key.deserializer", "value.deserializer")
        self = object.__new__(cls)
        try:
            AIOConsumer.__init__(self, taken.rest, **keywords)
        except BaseException:
            await close_converters_async(taken.owned)
            raise
        self._key_deserializer, self._value_deserializer = taken.converters
        self._owned_deserializers = taken.owned
        offer_cluster_id_async(self.cluster_id, *taken.converters)
        return self

    async def close(self) -> None:
        """Close as `AIOConsumer.close` does, then the deserializers that builders have made."""
        await super().close()
        owned, self._owned_deserializers = self._owned_deserializers, []
        await close_converters_async(owned)

    async def poll(self, timeout: float = -1) -> Message | None:
        """Return the next message, its key and value deserialized, or None if none came within `timeout` seconds.

        Raises:
            ConsumeError: the consumer has an event to tell; `kafka_message` is the message that carries it.
            KeyDeserializationError: the key's deserializer raised `exception`; `kafka_message` has the bytes.
            ValueDeserializationError: the value's deserializer raised `exception`; `kafka_message` has the bytes.
            RuntimeError: the consumer has been closed.
        """
        message = await super().poll(timeout)
        if message is None:
            return None
        error = message.error()
        if error is not None:
            raise ConsumeError(error, kafka_message=message)
        return await self._deserialized(message)

    async def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        """Return up to so many messages, deserialized, and events as they are.

        The messages beside one that cannot be deserialized are lost with it: where that may happen, use `poll`.

        Raises:
            KeyDeserializationError, ValueDeserializationError: as `poll`.
            RuntimeError: the consumer has been closed.
        """
        messages = await super().consume(num_messages, timeout)
        return [message if message.error() is not None else await self._deserialized(message) for message in messages]

    async def _deserialized(self, message: Message) -> Message:
        context = SerializationContext(message.topic() or "", MessageField.KEY, message.headers())
        key: Any = message.key()
        value: Any = message.value()
        if self._key_deserializer is not None:
            try:
                key = await result_of(self._key_deserializer(key, context))
            except Exception as error:
                raise KeyDeserializationError(error, message) from error
        context.field = MessageField.VALUE
        if self._value_deserializer is not None:
            try:
                value = await result_of(self._value_deserializer(value, context))
            except Exception as error:
                raise ValueDeserializationError(error, message) from error
        message.set_key(key)
        message.set_value(value)
        return message

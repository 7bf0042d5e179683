"""The DeserializingConsumer: keys and values become objects by the deserializers of its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic

from txnstore.clients.consumer.consumer import Consumer
from txnstore.clients.consumer.whole_transactions import MESSAGES_MAX, ConsumedTransaction
from txnstore.clients.model.errors import KafkaError
from txnstore.clients.model.message import Message
from txnstore.clients.model.serializers import (
    ConsumeError,
    Key,
    Value,
    close_converters,
    deserialized,
    finished,
    offer_cluster_id,
    take_converters,
)


class DeserializingConsumer(Consumer, Generic[Key, Value]):
    """A consumer of objects.

    The configuration also takes `key.deserializer` and `value.deserializer`: callables with bytes or None and a
    `SerializationContext`, which return an object.  Without one, bytes are left as they are.  The
    deserializers stay the caller's: closing the consumer does not close them.  In their place it takes
    `key.deserializer.builder` and `value.deserializer.builder`; what these make is closed with the consumer.

    Args:
        conf: the configuration; it is not changed.

    Raises:
        TypeError: the configuration is not a dictionary, or a deserializer is not callable.
        ValueError: there is no `group.id`, or both a deserializer and its builder are given.
        KafkaException: as of `Consumer`.
    """

    def __init__(self, conf: Mapping[str, Any]) -> None:
        with take_converters(conf, "key.deserializer", "value.deserializer") as taken:
            self._deserializers = taken.converters
            super().__init__(taken.rest)
        self._owned_deserializers = taken.owned
        offer_cluster_id(self.cluster_id, *taken.converters)

    def close(self) -> None:
        """Close as `Consumer.close` does, then the deserializers that builders have made."""
        try:
            super().close()
        finally:
            owned, self._owned_deserializers = self._owned_deserializers, []
            close_converters(owned)

    def poll(self, timeout: float = -1) -> Message | None:
        """Return the next message, its key and value deserialized, or None if nothing came in time.

        A message that cannot be deserialized has been consumed all the same: the next call returns the one after it.

        Args:
            timeout: seconds to wait; below zero: for ever.

        Raises:
            ConsumeError: the consumer has an event; `kafka_message` is the message that carries it.
            KeyDeserializationError: the key's deserializer raised `exception`; `kafka_message` has the bytes.
            ValueDeserializationError: the value's deserializer raised `exception`; `kafka_message` has the bytes.
            TypeError: a deserializer is asynchronous; the next call returns the same message.
            RuntimeError: the consumer has been closed.
        """
        message: Message | None = None
        try:
            message = super().poll(timeout)
            if message is None:
                return None
            error = message.error()
            if error is not None:
                raise ConsumeError(error, kafka_message=message)  # noqa: TRY301 - so is the event given back
            return finished(deserialized(self._deserializers, message))
        except ConsumeError:
            raise
        except BaseException:
            if message is not None:
                # The application has nothing of it, and its next commit would be past it.
                self._core.give_back([message])
            raise

    def __iter__(self) -> Iterator[Message]:
        """Return an iterator as `Consumer` does: the ends of partitions come as messages.

        Raises:
            ConsumeError: as of `poll`; the next iterator goes on behind it.
        """
        while True:
            try:
                yield from super().__iter__()
            except ConsumeError as error:
                if error.code != KafkaError._PARTITION_EOF or error.kafka_message is None:
                    raise
                yield error.kafka_message
            else:
                return

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        """Refuse: if one of many messages could not be deserialized, the others would be lost; use `poll`.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("a DeserializingConsumer has no consume(): call poll()")

    def consume_transaction(
        self, timeout: float = -1, *, messages_max: int = MESSAGES_MAX
    ) -> ConsumedTransaction | None:
        """Refuse, as `consume` does.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("a DeserializingConsumer has no consume_transaction(): call poll()")

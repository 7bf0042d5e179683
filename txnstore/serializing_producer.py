"""The producer that turns keys and values into bytes by the serializers of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic

from txnstore.clients.model.serializers import (
    Key,
    Value,
    close_converters,
    finished,
    offer_cluster_id,
    serialized,
    take_converters,
)
from txnstore.clients.producer.producer import Producer


class SerializingProducer(Producer, Generic[Key, Value]):
    """A producer of objects.

    Beside the keys of `Producer` the configuration takes `key.serializer` and `value.serializer`: callables with an
    object and a `SerializationContext`, which return bytes or None.  Without one, bytes and text are taken as they
    are.  The serializers stay the caller's: closing the producer does not close them.  In their place it takes
    `key.serializer.builder` and `value.serializer.builder`; what these make is closed with the producer.
    `produce_batch` serializes nothing: it takes bytes and text, as that of `Producer` does.

    Args:
        conf: the configuration; it is not changed.

    Raises:
        TypeError: the configuration is not a dictionary, or a serializer is not callable.
        ValueError: both a serializer and its builder are given.
        KafkaException: as of `Producer`.
    """

    def __init__(self, conf: Mapping[str, Any]) -> None:
        with take_converters(conf, "key.serializer", "value.serializer") as taken:
            self._serializers = taken.converters
            super().__init__(taken.rest)
        self._owned_serializers = taken.owned
        offer_cluster_id(self.cluster_id, *taken.converters)

    def close(self) -> bool:
        """Close as `Producer.close` does, then the serializers that builders have made."""
        try:
            return super().close()
        finally:
            owned, self._owned_serializers = self._owned_serializers, []
            close_converters(owned)

    def produce(  # type: ignore[override]  # noqa: PLR0917 - confluent-kafka's signature: the key is first here
        self,
        topic: str,
        key: Key | None = None,
        value: Value | None = None,
        partition: int = -1,
        on_delivery: Any = None,
        timestamp: int = 0,
        headers: Any = None,
    ) -> None:
        """Serialize key and value and queue the message; everything else is as in `Producer.produce`.

        The serializers run on this thread, the key's first; None is given to them, too.  A message of which one part
        cannot be serialized is not queued.

        Args:
            topic: the topic's name.
            key: the key's object.
            value: the value's object.
            partition: the partition; -1: the partitioner chooses.
            on_delivery: called with the error, or None, and the message when its fate is known.
            timestamp: milliseconds since 1970; 0: now.
            headers: a list of pairs or a dictionary; the serializers may add to it.

        Raises:
            KeySerializationError: the key's serializer raised `exception`.
            ValueSerializationError: the value's serializer raised `exception`.
            RuntimeError: the producer has been closed.
            TypeError: the topic is not text, or a serializer is asynchronous.
            BufferError: the queue is full: call `poll` and try again.
            KafkaException: as of `Producer.produce`.
        """
        # Of a closed producer the serializers see nothing.
        self._check_open()
        serialized_key, serialized_value = finished(serialized(self._serializers, topic, key, value, headers))
        super().produce(
            topic,
            serialized_value,
            serialized_key,
            partition=partition,
            on_delivery=on_delivery,
            timestamp=timestamp,
            headers=headers,
        )

    def _produce_of_batch(self, topic: str, **message: Any) -> None:
        # What is bytes in a batch is given to no serializer.
        super().produce(topic, **message)

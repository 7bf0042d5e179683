"""This file is what the serializing clients raise: which side failed, with the exception and the message behind it."""

from __future__ import annotations

import copyreg
from typing import Any

from txnstore.clients.model.kafka_error import KafkaError, KafkaException
from txnstore.clients.model.message import Message
from txnstore.clients.model.serializers import SerializationError


class _KafkaClientError(KafkaException):
    """A `KafkaError` with what it comes from.

    Args:
        kafka_error: the error; `args[0]`.
        exception: what was raised, if the error comes from that.
        kafka_message: the message concerned, if there is one.
    """

    def __init__(
        self, kafka_error: KafkaError, exception: Exception | None = None, kafka_message: Message | None = None
    ) -> None:
        super().__init__(kafka_error)
        self.exception = exception
        self.kafka_message = kafka_message

    @property
    def code(self) -> int:
        """The error's number."""
        return self._error().code()

    @property
    def name(self) -> str:
        """The error's name."""
        return self._error().name()

    def _error(self) -> KafkaError:
        error: KafkaError = self.args[0]
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        # The subclasses' arguments are not `args`: the object is rebuilt without calling them.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConsumeError(_KafkaClientError):
    """Polling failed; `kafka_message` is the message concerned, with its key and value as they were read."""


class KeyDeserializationError(ConsumeError, SerializationError):
    """The deserializer of the key raised `exception`."""

    def __init__(self, exception: Exception | None = None, kafka_message: Message | None = None) -> None:
        super().__init__(KafkaError(KafkaError._KEY_DESERIALIZATION, str(exception)), exception, kafka_message)


class ValueDeserializationError(ConsumeError, SerializationError):
    """The deserializer of the value raised `exception`."""

    def __init__(self, exception: Exception | None = None, kafka_message: Message | None = None) -> None:
        super().__init__(KafkaError(KafkaError._VALUE_DESERIALIZATION, str(exception)), exception, kafka_message)


class ProduceError(_KafkaClientError):
    """Producing failed before the message was queued."""

    def __init__(self, kafka_error: KafkaError, exception: Exception | None = None) -> None:
        super().__init__(kafka_error, exception)


class KeySerializationError(ProduceError, SerializationError):
    """The serializer of the key raised `exception`."""

    def __init__(self, exception: Exception | None = None) -> None:
        super().__init__(KafkaError(KafkaError._KEY_SERIALIZATION, str(exception)), exception)


class ValueSerializationError(ProduceError, SerializationError):
    """The serializer of the value raised `exception`."""

    def __init__(self, exception: Exception | None = None) -> None:
        super().__init__(KafkaError(KafkaError._VALUE_SERIALIZATION, str(exception)), exception)

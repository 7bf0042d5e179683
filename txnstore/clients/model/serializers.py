"""This file is what turns keys and values into bytes and back: the interface, and text, integers and doubles."""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from typing import Any, Final

from txnstore.clients.model.kafka_error import KafkaException

_INTEGER: Final = struct.Struct(">i")
_DOUBLE: Final = struct.Struct(">d")


class SerializationError(KafkaException):
    """A key or value cannot be turned into bytes or back."""


class MessageField(enum.StrEnum):
    """Which part of the message is meant; a member equals its text."""

    NONE = "none"
    KEY = "key"
    VALUE = "value"


class SerializationContext:
    """What a serializer is told about the message: the topic, the part of it, and its headers.

    The same object is used for the key and then for the value: a serializer that keeps it copies it.

    Args:
        topic: the topic's name.
        field: whether the key or the value is meant.
        headers: the message's headers; a serializer may add to a list or a dictionary of them.
    """

    def __init__(self, topic: str, field: MessageField, headers: Any = None) -> None:
        self.topic = topic
        self.field = field
        self.headers = headers


class Serializer:
    """The base of what turns objects into bytes; any callable with the same arguments does as well."""

    __slots__ = ()

    def __call__(self, obj: Any, ctx: SerializationContext | None = None) -> bytes | None:
        """Return the bytes of an object, or None for none.

        Args:
            obj: what is to become bytes.
            ctx: which part of which message it is.

        Raises:
            SerializationError: the object has no bytes in this format.
        """
        raise NotImplementedError

    def set_cluster_id_resolver(self, resolver: Callable[[], Any]) -> None:
        """Take a function that returns the cluster's id; a serializer that needs none ignores it."""

    def close(self) -> None:
        """Release what the serializer holds; nothing, by default."""


class Deserializer:
    """The base of what turns bytes into objects; any callable with the same arguments does as well."""

    __slots__ = ()

    def __call__(self, value: bytes | None, ctx: SerializationContext | None = None) -> Any:
        """Return the object of these bytes, or None for none.

        Args:
            value: the bytes.
            ctx: which part of which message they are.

        Raises:
            SerializationError: the bytes are not of this format.
        """
        raise NotImplementedError

    def set_cluster_id_resolver(self, resolver: Callable[[], Any]) -> None:
        """Take a function that returns the cluster's id; a deserializer that needs none ignores it."""

    def close(self) -> None:
        """Release what the deserializer holds; nothing, by default."""


class SerializerBuilder:
    """The base of what makes a serializer of a client's configuration; any object with `build` does as well.

    It goes into the configuration of a serializing producer, as `key.serializer.builder` or
    `value.serializer.builder`.
    """

    __slots__ = ()

    def build(self, conf: dict[str, Any], is_key: bool) -> tuple[Serializer, dict[str, Any]]:
        """Return the serializer, and the configuration without the keys that are its own.

        Args:
            conf: the client's configuration.
            is_key: whether it is for keys, not for values.
        """
        raise NotImplementedError


class DeserializerBuilder:
    """The base of what makes a deserializer of a client's configuration; see `SerializerBuilder`."""

    __slots__ = ()

    def build(self, conf: dict[str, Any], is_key: bool) -> tuple[Deserializer, dict[str, Any]]:
        """Return the deserializer, and the configuration without the keys that are its own; see `SerializerBuilder`."""
        raise NotImplementedError


class StringSerializer(Serializer):
    """Text to bytes in an encoding of Python's, by default UTF-8."""

    def __init__(self, codec: str = "utf_8") -> None:
        self.codec = codec

    def __call__(self, obj: str | None, ctx: SerializationContext | None = None) -> bytes | None:
        """Return the text's bytes, or None."""
        if obj is None:
            return None
        if not isinstance(obj, str):
            raise SerializationError(f"expected text, not {type(obj).__name__}")
        try:
            return obj.encode(self.codec)
        except (UnicodeError, LookupError) as error:
            raise SerializationError(_reason(error)) from error


class StringDeserializer(Deserializer):
    """Bytes to text in an encoding of Python's, by default UTF-8."""

    def __init__(self, codec: str = "utf_8") -> None:
        self.codec = codec

    def __call__(self, value: bytes | None, ctx: SerializationContext | None = None) -> str | None:
        """Return the text of these bytes, or None."""
        if value is None:
            return None
        if not isinstance(value, (bytes, bytearray, memoryview)):
            raise SerializationError(f"expected bytes, not {type(value).__name__}")
        try:
            return bytes(value).decode(self.codec)
        except (UnicodeError, LookupError) as error:
            raise SerializationError(_reason(error)) from error


class IntegerSerializer(Serializer):
    """An integer of 32 bits to four bytes, the highest first."""

    def __call__(self, obj: int | None, ctx: SerializationContext | None = None) -> bytes | None:
        """Return the four bytes, or None."""
        return _packed(_INTEGER, obj)


class IntegerDeserializer(Deserializer):
    """Four bytes, the highest first, to an integer."""

    def __call__(self, value: bytes | None, ctx: SerializationContext | None = None) -> int | None:
        """Return the integer, or None."""
        number: int | None = _unpacked(_INTEGER, value)
        return number


class DoubleSerializer(Serializer):
    """A number to eight bytes, IEEE 754, the highest first."""

    def __call__(self, obj: float | None, ctx: SerializationContext | None = None) -> bytes | None:
        """Return the eight bytes, or None."""
        return _packed(_DOUBLE, obj)


class DoubleDeserializer(Deserializer):
    """Eight bytes, IEEE 754, the highest first, to a number."""

    def __call__(self, value: bytes | None, ctx: SerializationContext | None = None) -> float | None:
        """Return the number, or None."""
        number: float | None = _unpacked(_DOUBLE, value)
        return number


def _packed(form: struct.Struct, number: float | None) -> bytes | None:
    if number is None:
        return None
    try:
        return form.pack(number)
    except (struct.error, OverflowError) as error:
        raise SerializationError(str(error)) from error


def _unpacked(form: struct.Struct, data: bytes | None) -> Any:
    if data is None:
        return None
    try:
        (number,) = form.unpack(data)
    except (struct.error, TypeError) as error:
        raise SerializationError(str(error)) from error
    return number


def _reason(error: Exception) -> str:
    """Return what went wrong without the text itself: a message in a log is no place for a payload."""
    if isinstance(error, (UnicodeEncodeError, UnicodeDecodeError)):
        return f"{error.encoding!r} codec: {error.reason} (position {error.start})"
    return "the text is not valid in this encoding" if isinstance(error, UnicodeError) else str(error)

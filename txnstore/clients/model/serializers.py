"""Serializers: from objects to bytes and back, out of a configuration, and the errors when they fail.

In a configuration a serializer is given ready-made, or as a builder, which makes it of the configuration and takes its
own keys out of that.  What a builder has made belongs to the client, which closes it.
"""

from __future__ import annotations

import contextlib
import copyreg
import enum
import inspect
import logging
import struct
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.clients.model.message import Message

# The types of a message's key and value, where a serializer makes objects of them.
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Key = TypeVar("Key", default=Any)
    Value = TypeVar("Value", default=Any)
else:
    # Python 3.13 has defaults (PEP 696); before, only type checkers know them.
    from typing import TypeVar

    Key = TypeVar("Key")
    Value = TypeVar("Value")

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
        """Return the bytes of an object, or None for None.

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
        """Return the object of these bytes, or None for None.

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

        Raises:
            NotImplementedError: the subclass has no `build`.
        """
        raise NotImplementedError


class DeserializerBuilder:
    """The base of what makes a deserializer of a client's configuration; see `SerializerBuilder`."""

    __slots__ = ()

    def build(self, conf: dict[str, Any], is_key: bool) -> tuple[Deserializer, dict[str, Any]]:
        """Return the deserializer, and the configuration without the keys that are its own; see `SerializerBuilder`.

        Raises:
            NotImplementedError: the subclass has no `build`.
        """
        raise NotImplementedError


class StringSerializer(Serializer):
    """Text to bytes in an encoding of Python's, by default UTF-8."""

    def __init__(self, codec: str = "utf_8") -> None:
        self.codec = codec

    def __call__(self, obj: str | None, ctx: SerializationContext | None = None) -> bytes | None:
        """Return the text's bytes, or None.

        Raises:
            SerializationError: it is not text, or the encoding does not have all of its characters.
        """
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
        """Return the text of these bytes, or None.

        Raises:
            SerializationError: they are not bytes, or not text in the encoding.
        """
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
    """Return what went wrong without the text itself: a payload does not belong into a message in a log."""
    if isinstance(error, (UnicodeEncodeError, UnicodeDecodeError)):
        return f"{error.encoding!r} codec: {error.reason} (position {error.start})"
    return "the text is not valid in this encoding" if isinstance(error, UnicodeError) else str(error)


#: A serializer, or any callable like one.
Converter = Callable[[Any, Any], Any]

_Result = TypeVar("_Result")

#: Each answer of a serializer or builder is yielded and sent back, so that blocking and asynchronous ones share a code.
Steps = Generator[Any, Any, _Result]

#: A serializer that looks schemas up by cluster asks for the cluster's id; it must not wait for ever for an answer.
_CLUSTER_ID_TIMEOUT_SECONDS = 60.0

_log = logging.getLogger(__name__)


class TakenConverters(NamedTuple):
    """What a configuration said about serializers."""

    rest: dict[str, Any]
    """The configuration without them, and without what builders took for theirs."""

    converters: tuple[Converter | None, ...]
    owned: list[Converter]
    """Those that builders have made."""


@contextlib.contextmanager
def take_converters(configuration: Mapping[str, Any], *names: str) -> Iterator[TakenConverters]:
    """Give the block the configuration without these keys, and what they hold; the mapping given is left as it is.

    If the block fails, what builders have made for it is closed.

    Raises:
        TypeError: the configuration is not a mapping, or a value is neither callable nor None.
        ValueError: both a serializer and its builder are given, or a builder returns no serializer and configuration.
    """
    owned: list[Converter] = []
    try:
        yield finished(_building(configuration, names, owned))
    except BaseException:
        close_converters(owned)
        raise


@contextlib.asynccontextmanager
async def take_converters_async(configuration: Mapping[str, Any], *names: str) -> AsyncIterator[TakenConverters]:
    """Do the same as `take_converters`; builders may be asynchronous.

    Raises:
        TypeError, ValueError: as `take_converters`.
    """
    owned: list[Converter] = []
    try:
        yield await finished_async(_building(configuration, names, owned))
    except BaseException:
        await close_converters_async(owned)
        raise


def finished(steps: Steps[_Result]) -> _Result:
    """Return what steps come to whose calls are blocking ones.

    Raises:
        TypeError: one of them was an asynchronous one, which is not awaited here.
    """
    try:
        answer = next(steps)
        while True:
            if isinstance(answer, CoroutineType):
                answer.close()
                raise TypeError("a serializer or its builder is asynchronous: only the clients for asyncio await it")
            answer = steps.send(answer)
    except StopIteration as done:
        result: _Result = done.value
        return result


async def finished_async(steps: Steps[_Result]) -> _Result:
    """Return what steps come to whose calls may be asynchronous ones."""
    try:
        answer = next(steps)
        while True:
            try:
                awaited = await answer if inspect.isawaitable(answer) else answer
            except Exception as error:  # noqa: BLE001 - the steps know whose error it is
                answer = steps.throw(error)
            else:
                answer = steps.send(awaited)
    except StopIteration as done:
        result: _Result = done.value
        return result


def serialized(
    converters: tuple[Converter | None, ...], topic: object, key: Any, value: Any, headers: Any
) -> Steps[tuple[Any, Any]]:
    """Serialize a message's key, then its value; come to the bytes of both."""
    if not isinstance(topic, str):
        raise TypeError(f"topic must be a str, not {type(topic).__name__}")
    key_serializer, value_serializer = converters
    context = SerializationContext(topic, MessageField.KEY, headers)
    if key_serializer is not None:
        try:
            key = yield key_serializer(key, context)
        except Exception as error:
            raise KeySerializationError(error) from error
    context.field = MessageField.VALUE
    if value_serializer is not None:
        try:
            value = yield value_serializer(value, context)
        except Exception as error:
            raise ValueSerializationError(error) from error
    return key, value


def deserialized(converters: tuple[Converter | None, ...], message: Message) -> Steps[Message]:
    """Put objects into a message in the place of its key, then its value; come to the message."""
    key_deserializer, value_deserializer = converters
    context = SerializationContext(message.topic() or "", MessageField.KEY, message.headers())
    key: Any = message.key()
    value: Any = message.value()
    if key_deserializer is not None:
        try:
            key = yield key_deserializer(key, context)
        except Exception as error:
            raise KeyDeserializationError(error, message) from error
    context.field = MessageField.VALUE
    if value_deserializer is not None:
        try:
            value = yield value_deserializer(value, context)
        except Exception as error:
            raise ValueDeserializationError(error, message) from error
    message.set_key(key)
    message.set_value(value)
    return message


def close_converters(converters: Iterable[Converter]) -> None:
    """Close those that can be closed; one that fails does not keep the others open."""
    for converter in converters:
        try:
            getattr(converter, "close", lambda: None)()
        except Exception:  # noqa: BLE001 - it is somebody else's
            _log.exception("a serializer could not be closed", extra={"event": "serializer_failed"})


async def close_converters_async(converters: Iterable[Converter]) -> None:
    """Close those that can be closed, also asynchronously; one that fails does not keep the others open."""
    for converter in converters:
        try:
            closing = getattr(converter, "close", lambda: None)()
            if inspect.isawaitable(closing):
                await closing
        except Exception:  # noqa: BLE001 - it is somebody else's
            _log.exception("a serializer could not be closed", extra={"event": "serializer_failed"})


def offer_cluster_id(cluster_id: Callable[[float], str], *converters: Converter | None) -> None:
    """Give the converters that want it a function that returns the cluster's id; it is a client's method."""
    resolve = _weakly(cluster_id)
    for converter in converters:
        offer = getattr(converter, "set_cluster_id_resolver", None)
        if offer is not None:
            offer(resolve)


def offer_cluster_id_async(cluster_id: Callable[[float], Awaitable[str]], *converters: Converter | None) -> None:
    """Give the asynchronous converters that want it a coroutine function that returns the cluster's id."""
    resolve = _weakly(cluster_id)
    for converter in converters:
        offer = getattr(converter, "set_async_cluster_id_resolver", None)
        if offer is not None:
            offer(resolve)


def _weakly(cluster_id: Callable[[float], _Result]) -> Callable[[], _Result]:
    """Return what asks the client as long as it is there: a converter may outlive it, and would keep it open."""
    method = weakref.WeakMethod(cluster_id)

    def resolve() -> _Result:
        ask = method()
        if ask is None:
            raise RuntimeError("the client whose cluster is asked for is gone")
        return ask(_CLUSTER_ID_TIMEOUT_SECONDS)

    return resolve


def _building(configuration: Mapping[str, Any], names: Sequence[str], owned: list[Converter]) -> Steps[TakenConverters]:
    """Yield what each builder returns, to be sent back once it is there."""
    if not isinstance(configuration, Mapping):
        raise TypeError("expected configuration dict")
    rest = dict(configuration)
    given = [(name, rest.pop(name, None), rest.pop(f"{name}.builder", None)) for name in names]
    for name, converter, builder in given:
        if converter is not None and builder is not None:
            raise ValueError(f"Cannot configure both {name} and {name}.builder; use one or the other")
        if converter is not None and not callable(converter):
            raise TypeError(f"{name} must be callable, not {type(converter).__name__}")
    converters: list[Converter | None] = []
    left = [rest]
    for name, given_converter, builder in given:
        converter = given_converter
        if builder is not None:
            # Each sees all keys, so that two may share some.
            built = yield builder.build(dict(rest), name.startswith("key."))
            converter, leftover = _checked(name, built)
            owned.append(converter)
            left.append(leftover)
        converters.append(converter)
    # A key that a builder has taken is not the client's.
    remaining = {key: value for key, value in left[-1].items() if all(key in leftover for leftover in left[1:])}
    return TakenConverters(remaining, tuple(converters), owned)


def _checked(name: str, built: Any) -> tuple[Converter, dict[str, Any]]:
    try:
        converter, leftover = built
    except (TypeError, ValueError):
        raise ValueError(
            f"{name}.builder must return a (serde, configuration) tuple from build(), got {type(built).__name__}"
        ) from None
    if not isinstance(leftover, dict):
        raise ValueError(  # noqa: TRY004 - confluent-kafka's
            f"{name}.builder returned {type(leftover).__name__} as the leftover configuration from build(), expected a"
            " dict"
        )
    return converter, leftover


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

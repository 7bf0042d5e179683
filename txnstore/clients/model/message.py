"""The message: what a consumer hands out, and what a delivery report is about.

Readers make very many of them, and most of what a message can tell is never asked.  A message therefore holds what it
was made from, two tuples, and takes them apart when it is asked.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import count as count_from
from itertools import repeat, tee
from types import MethodDescriptorType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, SupportsFloat, SupportsIndex

from txnstore import bulk
from txnstore.clients.model.errors import KafkaError
from txnstore.clients.model.topic_partition import OFFSET_INVALID
from txnstore.model import Header

#: The first item of `Message.timestamp()`: no timestamp, the producer's clock, the store's clock at the append.
TIMESTAMP_NOT_AVAILABLE: Final = 0
TIMESTAMP_CREATE_TIME: Final = 1
TIMESTAMP_LOG_APPEND_TIME: Final = 2


#: The marker of a record that is delivered in commit order and belongs to no transaction.
NO_MARKER: Final = -1


class RecordSource(NamedTuple):
    """What the records of a batch have in common; one for all of their messages."""

    topic: str
    partition: int
    timestamp_type: int
    """`TIMESTAMP_CREATE_TIME` or `TIMESTAMP_LOG_APPEND_TIME`."""

    marker_offset: int | None = None
    """In commit order, where the records' transaction was committed, or `NO_MARKER`; None in offset order."""


#: What `StoredRecord` is and what `RecordBatch.rows` yields: offset, timestamp in milliseconds, key, value, headers.
RecordTuple = tuple[int, int, bytes | None, bytes | None, Sequence[Header] | None]

#: Error, latency in seconds, leader epoch, delivery count; numbers below zero: not known.
Details = tuple[KafkaError | None, float, int, int]

NO_DETAILS: Final[Details] = (None, -1.0, -1, -1)
_INT32_MAX: Final = 2**31 - 1
_PLAIN_SOURCE_LENGTH: Final = 3
_NO_TIMESTAMP: Final = (TIMESTAMP_NOT_AVAILABLE, 0)


class MessageFields:
    """What a message holds, and what is asked of very many: the part that there is in C as well."""

    __slots__ = ("_details", "_record", "_source")

    _source: tuple[Any, ...]
    _record: tuple[int, int, Any, Any, Any]
    _details: Details

    def topic(self) -> str | None:
        """Return the topic's name, or None."""
        topic: str | None = self._source[0]
        return topic

    def partition(self) -> int | None:
        """Return the partition's number, or None."""
        partition = self._source[1]
        return partition if partition >= 0 else None

    def offset(self) -> int | None:
        """Return the offset, or None if there is none: the record was not delivered, or not from the log."""
        offset = self._record[0]
        return offset if offset >= 0 else None

    def key(self) -> bytes | None:
        """Return the key, or what `set_key` has set; None and empty are not the same."""
        key: bytes | None = self._record[2]
        return key

    def value(self) -> bytes | None:
        """Return the value, or what `set_value` has set; None and empty are not the same.

        The value of an event, whose `error()` is not None, is a text about it.
        """
        value: bytes | None = self._record[3]
        return value

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        """Return the headers in their order, duplicates included, or None if there are none.

        The message of a delivery report has no headers.
        """
        headers: list[tuple[str, bytes | None]] | tuple[tuple[str, bytes | None], ...] | None = self._record[4]
        return (list(headers) or None) if isinstance(headers, tuple) else headers

    def error(self) -> KafkaError | None:
        """Return what the message is about, or None: it is a record."""
        return self._details[0]

    def timestamp(self) -> tuple[int, int]:
        """Return the kind of the timestamp, one of the constants `TIMESTAMP_...`, and milliseconds since 1970."""
        return self._source[2], self._record[1]

    def __len__(self) -> int:
        value = self._record[3]
        return 0 if value is None else len(value)


if TYPE_CHECKING:
    _Fields = MessageFields
else:
    _Fields = bulk.core.MessageFields if bulk.IN_C else MessageFields

#: Makes one that holds nothing yet.
_new: Final = _Fields.__new__


class Message(_Fields):
    """A record with where it stands, or an event of a partition: then `error()` is not None.

    Every argument may be left out.  Numbers below zero mean: not known.  Messages are equal if all but their latency
    and delivery count are; they have no hash.  `len()` is the length of the value, so that a message without a value,
    a tombstone for example, is false: test `message is None`.

    Args:
        topic: the topic's name.
        partition: the partition's number.
        offset: the record's offset.
        key: the key; any object.
        value: the value; any object.
        headers: pairs of a name and bytes or None.
        error: what the message is about if it is not a record.
        timestamp: its kind, one of the constants `TIMESTAMP_...`, and milliseconds since 1970.
        latency: seconds from `produce()` to the report.
        leader_epoch: the epoch of the partition's leader.
        delivery_count: how often the record has been handed out.

    Raises:
        TypeError: an argument that should be a number is not one, or the timestamp is not a tuple of two.
        OverflowError: the partition's number does not fit into 32 bits.
    """

    __slots__ = ()

    __hash__ = None  # type: ignore[assignment]

    def __init__(  # noqa: PLR0917 - confluent-kafka's signature
        self,
        topic: str | None = None,
        partition: SupportsIndex = -1,
        offset: SupportsIndex = OFFSET_INVALID,
        key: Any = None,
        value: Any = None,
        headers: Any = None,
        error: KafkaError | None = None,
        timestamp: tuple[int, int] | None = None,
        latency: SupportsFloat = -1.0,
        leader_epoch: SupportsIndex = -1,
        delivery_count: SupportsIndex = -1,
    ) -> None:
        kind, milliseconds = _checked_timestamp(timestamp)
        number = operator.index(partition)
        if number > _INT32_MAX:
            raise OverflowError("signed integer is greater than maximum")
        # One number, -1, stands for every partition that is not known.
        self._source = (topic, max(number, -1), kind)
        self._record = (operator.index(offset), milliseconds, key, value, headers)
        self._details = (error, float(latency), operator.index(leader_epoch), operator.index(delivery_count))

    @property
    def marker_offset(self) -> int | None:
        """In commit order, the offset of the marker that the record is delivered at, or -1; None in offset order."""
        return self._source[3] if len(self._source) > _PLAIN_SOURCE_LENGTH else None

    def deserialized_key(self) -> Any:
        """Return the key as its deserializer made it."""
        return self._record[2]

    def deserialized_value(self) -> Any:
        """Return the value as its deserializer made it."""
        return self._record[3]

    def latency(self) -> float | None:
        """Return the seconds from `produce()` to the delivery report, or None: it is not a report."""
        latency = self._details[1]
        return latency if latency >= 0 else None

    def leader_epoch(self) -> int | None:
        """Return the epoch of the partition's leader, or None; a database has no leaders."""
        leader_epoch = self._details[2]
        return leader_epoch if leader_epoch >= 0 else None

    def delivery_count(self) -> int | None:
        """Return how often the record has been handed out, or None: only share groups count, and there are none yet."""
        delivery_count = self._details[3]
        return delivery_count if delivery_count > 0 else None

    def set_topic(self, topic: str | None) -> None:
        """Change the topic's name."""
        self._source = (topic, *self._source[1:])

    def set_key(self, key: Any) -> None:
        """Change the key, into what its deserializer made of it for example."""
        self._record = (*self._record[:2], key, *self._record[3:])

    def set_value(self, value: Any) -> None:
        """Change the value, into what its deserializer made of it for example."""
        self._record = (*self._record[:3], value, self._record[4])

    def set_headers(self, headers: Any) -> None:
        """Change the headers."""
        self._record = (*self._record[:4], headers)

    def set_error(self, error: KafkaError | None) -> None:
        """Change what the message is about."""
        self._details = (error, *self._details[1:])

    def __eq__(self, other: object) -> bool:
        return self._comparable() == other._comparable() if isinstance(other, Message) else NotImplemented

    def _comparable(self) -> tuple[Any, ...]:
        return (
            self.topic(),
            self.partition(),
            self.offset(),
            self.key(),
            self.value(),
            self.headers(),
            self.error(),
            self.timestamp(),
            self.leader_epoch(),
        )

    def __repr__(self) -> str:
        # Neither key nor value: messages end up in logs.
        return f"<txnstore.Message {self.topic()}[{self.partition()}]@{self.offset()} error={self.error()}>"

    def __reduce__(self) -> tuple[Any, ...]:
        topic, partition, kind = self._source[:_PLAIN_SOURCE_LENGTH]
        offset, milliseconds, key, value, headers = self._record
        error, latency, leader_epoch, delivery_count = self._details
        timestamp = (kind, milliseconds)
        arguments = (
            topic,
            partition,
            offset,
            key,
            value,
            headers,
            error,
            timestamp,
            latency,
            leader_epoch,
            delivery_count,
        )
        marker_offset = self.marker_offset
        return (type(self), arguments) if marker_offset is None else (type(self), arguments, marker_offset)

    def __setstate__(self, marker_offset: int) -> None:
        self._source = (*self._source[:_PLAIN_SOURCE_LENGTH], marker_offset)


if bulk.IN_C:
    # What is inherited is called in more time.
    for _name, _method in vars(_Fields).items():
        if isinstance(_method, MethodDescriptorType):
            setattr(Message, _name, bulk.core.own_method(Message, _method))
    del _name, _method


def _checked_timestamp(timestamp: object) -> tuple[int, int]:
    if timestamp is None:
        return _NO_TIMESTAMP
    if not isinstance(timestamp, tuple) or len(timestamp) != len(_NO_TIMESTAMP):
        raise TypeError("timestamp must be a tuple of (int, int)")
    return operator.index(timestamp[0]), operator.index(timestamp[1])


def message_of(source: RecordSource, record: RecordTuple) -> Message:
    """Return the message of a record of the log: this is called for each record."""
    message = _new(Message)
    message._source = source  # noqa: SLF001 - readers make very many of them
    message._record = record  # noqa: SLF001 - (above)
    message._details = NO_DETAILS  # noqa: SLF001 - (above)
    return message


def messages_in_python(
    *,
    message_type: type[Message],
    callbacks: Iterator[Callable[[Any, Any], object] | None],
    sources: RecordSource | list[RecordSource],
    offset: int,
    timestamps_ms: list[int] | int,
    keys: list[bytes | None],
    values: list[bytes | None],
    queued_seconds: list[float],
    error: KafkaError | None,
    done_seconds: float,
) -> Iterator[tuple[Callable[[Any, Any], object] | None, Message]]:
    """Yield the callback of each record with its message.

    What is no list is the same for all; the offset is the first one's, or `OFFSET_INVALID`.  Making a message calls no
    function of Python's: Ctrl-C would come in there, with the callback taken and its message lost.
    """
    setters = (getattr(message_type, name).__set__ for name in ("_source", "_record", "_details"))
    set_source, set_record, set_details = setters
    # Each as it is asked for, as in C: nobody asks for those of records without a callback.
    messages = tee(map(message_type.__new__, repeat(message_type, len(keys))), 4)
    records = zip(
        repeat(offset) if offset == OFFSET_INVALID else count_from(offset),
        timestamps_ms if isinstance(timestamps_ms, list) else repeat(timestamps_ms),
        keys,
        values,
        repeat(None),
        strict=False,
    )
    details = zip(repeat(error), [done_seconds - each for each in queued_seconds], repeat(-1), repeat(-1), strict=False)
    filled = zip(
        callbacks,
        messages[0],
        map(set_source, messages[1], sources if isinstance(sources, list) else repeat(sources)),
        map(set_record, messages[2], records),
        map(set_details, messages[3], details),
        strict=False,
    )
    return map(operator.itemgetter(0, 1), filled)


#: One or the other: what is called for each batch.
messages_of: Final = bulk.core.Deliveries if bulk.IN_C else messages_in_python


def error_message(
    error: KafkaError, topic: str | None = None, partition: int = -1, offset: int | None = None
) -> Message:
    """Return the message that carries `error`; its value is the error's text, as in confluent-kafka."""
    where = {} if offset is None else {"offset": offset}
    text = error.str().encode(errors="backslashreplace")
    return Message(
        topic=topic, partition=partition, value=text, error=error, timestamp=(TIMESTAMP_NOT_AVAILABLE, -1), **where
    )


def end_of_partition(topic: str, partition: int, offset: int, high_watermark: int) -> Message:
    """Return the message for a reader that has reached the end of what it may see."""
    text = f"reached the end of the partition at offset {offset} (high watermark {high_watermark})"
    return error_message(KafkaError(KafkaError._PARTITION_EOF, text), topic, partition, offset)

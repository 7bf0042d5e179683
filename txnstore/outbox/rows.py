"""The arguments of a record for the outbox, those of `Producer.produce`, and the row that they become."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from txnstore.clients.configuration.configuration import Configuration
from txnstore.clients.model.errors import KafkaError, KafkaException, kafka_exception_of
from txnstore.clients.producer.arguments import PARTITION_MAX, TIMESTAMP_MAX, as_bytes, checked_headers, whole_number
from txnstore.db.callers.outbox_insert import OutboxRow
from txnstore.errors import InvalidTimestamp, InvalidTopic
from txnstore.log.columns import pack_record_headers
from txnstore.log.topics import check_topic_name

_UNASSIGNED: Final = -1
#: What a record of `produce_all` may have.
NAMES: Final = frozenset({"topic", "value", "key", "partition", "headers", "timestamp"})


def outbox_row(
    configuration: Configuration,
    topic: str,
    *,
    value: Any = None,
    key: Any = None,
    partition: int | None = None,
    headers: Any = None,
    timestamp: int | None = None,
) -> OutboxRow:
    """Return the row of a record.

    Raises:
        TypeError: an argument is not of its type.
        UnicodeEncodeError: a text holds half of a surrogate pair.
        OverflowError: a number is too large.
        KafkaException: `TOPIC_EXCEPTION`, `INVALID_TIMESTAMP`, `_UNKNOWN_PARTITION` or `MSG_SIZE_TOO_LARGE`.
    """
    try:
        check_topic_name(topic)
    except InvalidTopic as error:
        if not isinstance(topic, str):
            raise TypeError(f"a topic's name must be str, not {type(topic).__name__}") from None
        raise kafka_exception_of(error) from error
    packed_value = None if value is None else as_bytes(value)
    packed_key = None if key is None else as_bytes(key)
    packed = () if headers is None else tuple(checked_headers(headers))
    size_bytes = len(packed_value or b"") + len(packed_key or b"")
    size_bytes += sum(len(name) + len(content or b"") for name, content in packed)
    if size_bytes > configuration["message.max.bytes"]:
        reason = f"a record of {size_bytes} bytes is larger than message.max.bytes"
        raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, reason))
    return OutboxRow(
        topic,
        _partition(partition),
        packed_key,
        packed_value,
        pack_record_headers(packed),
        _timestamp_ms(configuration, timestamp),
    )


def row_of(configuration: Configuration, record: object, index: int) -> OutboxRow:
    """Return the row of a record of `produce_all`: a mapping with the names of `produce`'s arguments.

    Raises:
        TypeError, UnicodeEncodeError, OverflowError, KafkaException: as `outbox_row`; a note says which record it is.
    """
    if not isinstance(record, Mapping):
        raise TypeError(
            f"record {index} must be a mapping with a topic, a value and so on, not {type(record).__name__}"
        )
    unknown = sorted(str(name) for name in record.keys() - NAMES)
    if unknown or "topic" not in record:
        told = f"has an unknown {unknown[0][:40]!r}" if unknown else "needs a 'topic'"
        raise TypeError(f"record {index} {told}; it may have {', '.join(sorted(NAMES))}")
    try:
        return outbox_row(configuration, **record)
    except (TypeError, ValueError, OverflowError, KafkaException) as error:
        error.add_note(f"record {index}; nothing was inserted")
        raise


def _partition(partition: int | None) -> int | None:
    if partition is None:
        return None
    number = whole_number(partition, PARTITION_MAX, "signed integer is greater than maximum")
    if number == _UNASSIGNED:
        return None
    if number < 0:
        raise KafkaException(
            KafkaError(KafkaError._UNKNOWN_PARTITION, f"a partition's number must be 0 or more, not {number}")
        )
    return number


def _timestamp_ms(configuration: Configuration, timestamp: int | None) -> int | None:
    """Return the time of a record; None: the server knows."""
    if timestamp is None or timestamp == 0:
        clock = configuration["txnstore.clock"]
        if clock is not None:
            now_ms: int = clock.now_ms()
            return now_ms
        return None if configuration.url.kind == "postgresql" else time.time_ns() // 1_000_000
    timestamp_ms = whole_number(timestamp, TIMESTAMP_MAX, "int too big to convert")
    if timestamp_ms < 0:
        raise kafka_exception_of(InvalidTimestamp(f"a timestamp must be milliseconds since 1970, not {timestamp_ms}"))
    return timestamp_ms

"""This file is the checks of what is given to a consumer's methods: the exceptions are those of confluent-kafka."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
from typing import Any, Final, SupportsFloat

from txnstore.clients.consumer.error_messages import prefixed
from txnstore.clients.model.kafka_error import KafkaError, KafkaException
from txnstore.clients.model.message import Message
from txnstore.clients.model.topic_partition import TopicPartition

MESSAGES_MAX: Final = 1_000_000


def failure(code: int, prefix: str) -> KafkaException:
    """Return the exception with this code, and with what failed before the code's own text."""
    return KafkaException(prefixed(prefix, KafkaError(code)))


def check_timeout(timeout: float) -> float:
    """Return the timeout in seconds.

    Raises:
        TypeError: it is no number.
        ValueError: it is NaN.
    """
    if type(timeout) is not float and type(timeout) is not int and not isinstance(timeout, SupportsFloat):
        raise TypeError(f"must be real number, not {_type_name(timeout)}")
    seconds = float(timeout)
    if seconds != seconds:  # noqa: PLR0124 - this is what NaN is
        raise ValueError("a timeout is a number of seconds, not NaN")
    return seconds


def deadline_of(timeout_seconds: float) -> float:
    """Return when the time is up, on the monotonic clock; a negative timeout never is."""
    return math.inf if timeout_seconds < 0 else time.monotonic() + timeout_seconds


def seconds_left(deadline: float) -> float:
    """Return how long there is to wait; never more than a lock can be waited for."""
    return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)


def check_partition(partition: object) -> TopicPartition:
    """Return the partition, or refuse what is none.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(partition, TopicPartition):
        raise TypeError("expected txnstore.TopicPartition")
    return partition


def check_partitions(partitions: object) -> list[TopicPartition]:
    """Return the list of partitions, or refuse what is none.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(partitions, list):
        raise TypeError("requires list of TopicPartition")
    return [check_partition(partition) for partition in partitions]


def check_distinct(partitions: list[TopicPartition], prefix: str) -> None:
    """Refuse a partition that is named twice.

    Raises:
        KafkaException: `_INVALID_ARG`.
    """
    if len(set(partitions)) != len(partitions):
        raise failure(KafkaError._INVALID_ARG, prefix)


def check_topics(topics: object) -> list[str]:
    """Return the topics and patterns of a subscription.

    Raises:
        TypeError: they are no list.
        KafkaException: `_INVALID_ARG`: the list is empty, names a topic twice, or holds no regular expression behind
            a `^`.
    """
    if not isinstance(topics, list):
        raise TypeError("expected list of topic unicode strings")
    names = [topic if isinstance(topic, str) else str(topic) for topic in topics]
    if not names or "" in names or len(set(names)) != len(names):
        raise failure(KafkaError._INVALID_ARG, "Failed to set subscription")
    for name in names:
        if name.startswith("^"):
            try:
                re.compile(name)
            except re.error as error:
                raise KafkaException(
                    KafkaError(
                        KafkaError._INVALID_ARG, f"Failed to set subscription: not a regular expression: {error}"
                    )
                ) from None
    return names


def check_callback(callback: Any, name: str) -> Callable[..., Any] | None:
    """Return the callback, or None.

    Raises:
        TypeError: it cannot be called.
    """
    if callback is not None and not callable(callback):
        raise TypeError(f"{name} expects a callable")
    found: Callable[..., Any] | None = callback
    return found


def check_count(count: object) -> int:
    """Return how many messages are asked for.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is not within 0 to 1,000,000.
    """
    if not hasattr(count, "__index__"):
        raise TypeError(f"{type(count).__name__!r} object cannot be interpreted as an integer")
    number: int = count.__index__()
    if not 0 <= number <= MESSAGES_MAX:
        raise ValueError("num_messages must be between 0 and 1000000 (1M)")
    return number


def chosen_offsets(message: object, offsets: object, verb: str) -> list[TopicPartition] | None:
    """Return what a message or a list of offsets says is to be committed or stored; None if neither is given.

    Raises:
        ValueError: both are given.
        TypeError: one is of another type.
        KafkaException: `_INVALID_ARG`: the message is no record.
    """
    if message is not None and offsets is not None:
        raise ValueError("message and offsets are mutually exclusive")
    if offsets is not None:
        return check_partitions(offsets)
    if message is None:
        return None
    if not isinstance(message, Message):
        raise TypeError("expected txnstore.Message")
    error, topic, partition, offset = message.error(), message.topic(), message.partition(), message.offset()
    if error is not None:
        text = f"Cannot {verb} offsets for message with error: '{error.str()}'"
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG, text))
    if topic is None or partition is None or offset is None:
        text = f"Cannot {verb} offsets for a message without topic, partition and offset"
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG, text))
    return [TopicPartition(topic, partition, offset + 1, None, message.leader_epoch())]


def _type_name(value: object) -> str:
    return "NoneType" if value is None else type(value).__name__

"""The settings of a consumer in its own types and units, and the checks of its arguments.

The checks raise the exceptions that confluent-kafka raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from txnstore.clients.consumer.events import prefixed
from txnstore.clients.consumer.positions import Positions, position_behind
from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.clients.model.message import Message
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.log.bounds import Bounds
from txnstore.log.fetch import PAGE_BYTES_MAX, PAGE_RECORDS_MAX
from txnstore.model import IsolationLevel

if TYPE_CHECKING:
    from txnstore.clients.configuration.configuration import Configuration

_ISOLATION_LEVELS: Final = {
    "read_uncommitted": IsolationLevel.READ_UNCOMMITTED,
    "read_committed": IsolationLevel.READ_COMMITTED,
}
#: How much is read ahead at most, in addition to the page under way: enough to keep a reader busy, and little memory.
READ_AHEAD_RECORDS: Final = 2 * PAGE_RECORDS_MAX
READ_AHEAD_BYTES: Final = 2 * PAGE_BYTES_MAX
#: A reader that is not woken still looks from time to time, but not more often than this.
LOOK_AGAIN_MS_MIN: Final = 100


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """The settings of one consumer; times are in seconds where they are waited for, in milliseconds where stored."""

    group_id: str
    group_instance_id: str | None
    client_id: str
    assignors: tuple[str, ...]
    session_timeout_ms: int
    heartbeat_seconds: float
    max_poll_seconds: float
    isolation: IsolationLevel
    positions: Positions
    """How the positions of its order of delivery are numbered."""
    is_atomic: bool
    """Whether a transaction comes from all partitions at once."""
    offset_reset: str
    """earliest, latest or error."""
    reports_eof: bool
    stores_offsets: bool
    commits_automatically: bool
    commits_unowned: bool
    """Whether it may commit partitions that it does not own."""
    commit_interval_seconds: float
    """0: only when partitions are taken away."""
    read_ahead_records: int
    read_ahead_bytes: int
    page_bytes_max: int
    look_again_seconds: float
    fetch_min_bytes: int
    """Fewer bytes are held back, for `fetch_wait_seconds` at most."""
    fetch_wait_seconds: float
    metadata_refresh_ms: int
    creates_topics: bool
    request_timeout_seconds: float
    """The timeout of calls that take no timeout."""

    @property
    def is_cooperative(self) -> bool:
        """Whether rebalances tell the application what changes, not the whole assignment."""
        return "cooperative-sticky" in self.assignors

    @property
    def bounding_isolation(self) -> IsolationLevel:
        """The isolation level that bounds what it reaches: in commit order nothing open holds it back."""
        return IsolationLevel.READ_UNCOMMITTED if self.positions.in_commit_order else self.isolation

    def end_offset(self, bounds: Bounds) -> int:
        """Return the offset, or place, that it does not reach."""
        return bounds.end(self.bounding_isolation)


def consumer_options(configuration: Configuration) -> ConsumerOptions:
    """Return the settings of the configuration."""
    return ConsumerOptions(
        group_id=configuration["group.id"],
        group_instance_id=configuration["group.instance.id"] or None,
        client_id=configuration["client.id"],
        assignors=tuple(configuration["partition.assignment.strategy"]),
        session_timeout_ms=configuration["session.timeout.ms"],
        heartbeat_seconds=configuration["heartbeat.interval.ms"] / 1000,
        max_poll_seconds=configuration["max.poll.interval.ms"] / 1000,
        isolation=_ISOLATION_LEVELS[configuration["isolation.level"]],
        positions=Positions(in_commit_order=configuration["txnstore.delivery.order"] == "commit"),
        is_atomic=configuration["txnstore.delivery.atomic"],
        offset_reset=configuration["auto.offset.reset"],
        reports_eof=configuration["enable.partition.eof"],
        stores_offsets=configuration["enable.auto.offset.store"],
        commits_automatically=configuration["enable.auto.commit"],
        commits_unowned=configuration["txnstore.commit.ownership"] == "member",
        commit_interval_seconds=configuration["auto.commit.interval.ms"] / 1000,
        read_ahead_records=min(configuration["queued.min.messages"], READ_AHEAD_RECORDS),
        read_ahead_bytes=min(configuration["queued.max.messages.kbytes"] * 1024, READ_AHEAD_BYTES),
        page_bytes_max=min(configuration["fetch.max.bytes"], PAGE_BYTES_MAX),
        look_again_seconds=max(configuration["fetch.wait.max.ms"], LOOK_AGAIN_MS_MIN) / 1000,
        fetch_min_bytes=configuration["fetch.min.bytes"],
        fetch_wait_seconds=configuration["fetch.wait.max.ms"] / 1000,
        metadata_refresh_ms=configuration["topic.metadata.refresh.interval.ms"],
        creates_topics=bool(configuration["allow.auto.create.topics"]),
        request_timeout_seconds=configuration["socket.timeout.ms"] / 1000,
    )


MESSAGES_MAX: Final = 1_000_000


def failure(code: int, prefix: str) -> KafkaException:
    """Return the exception with this code, and with what failed in front of the code's own text."""
    return KafkaException(prefixed(prefix, KafkaError(code)))


def check_partition(partition: object) -> TopicPartition:
    """Return the partition.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(partition, TopicPartition):
        raise TypeError("expected txnstore.TopicPartition")
    return partition


def check_partitions(partitions: object) -> list[TopicPartition]:
    """Return the list of partitions.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(partitions, list):
        raise TypeError("requires list of TopicPartition")
    return [check_partition(partition) for partition in partitions]


def check_distinct(partitions: list[TopicPartition]) -> None:
    """Refuse an assignment that names a partition twice.

    Raises:
        KafkaException: `_INVALID_ARG`.
    """
    if len(set(partitions)) != len(partitions):
        raise failure(KafkaError._INVALID_ARG, "Failed to set assignment")


def check_topics(topics: object) -> list[str]:
    """Return the topics and patterns of a subscription.

    Raises:
        TypeError: they are not a list.
        KafkaException: `_INVALID_ARG`: the list is empty, names a topic twice, or has a name that begins with `^` and
            is not a regular expression.
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
    """Return how many messages are wanted.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is not within 0 to 1,000,000.
    """
    if not hasattr(count, "__index__"):
        raise TypeError(f"{type(count).__name__!r} object cannot be interpreted as an integer")
    number: int = count.__index__()
    if not 0 <= number <= MESSAGES_MAX:
        raise ValueError("num_messages must be between 0 and 1000000 (1M)")
    return number


def chosen_offsets(message: object, offsets: object, verb: str, positions: Positions) -> list[TopicPartition] | None:
    """Return the offsets to be committed or stored by a message or a list of offsets; None if neither is given.

    Raises:
        ValueError: both are given.
        TypeError: one is of another type.
        KafkaException: `_INVALID_ARG`: the message is not a record, or an offset is of the other order of delivery.
    """
    if message is not None and offsets is not None:
        raise ValueError("message and offsets are mutually exclusive")
    if offsets is not None:
        chosen = check_partitions(offsets)
        positions.check(chosen, f"Cannot {verb} offsets", to_store=True)
        return chosen
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
    behind = [position_behind(message, topic, partition, offset)]
    positions.check(behind, f"Cannot {verb} offsets", to_store=True)
    return behind

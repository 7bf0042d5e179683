"""This file is what happens in a consumer's background and waits for the application's next poll()."""

from __future__ import annotations

import enum
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition
from typing import Any, Final

from txnstore.clients.model.kafka_error import KafkaError
from txnstore.clients.model.message import Message
from txnstore.clients.model.topic_partition import TopicPartition

#: An error that comes again and again is said at most this often.
ERROR_INTERVAL_SECONDS: Final = 1.0
#: And as a message, which interrupts the application's records, more rarely.
MESSAGE_INTERVAL_SECONDS: Final = 30.0

RebalanceCallback = Callable[[Any, list[TopicPartition]], Any]


class RebalanceKind(enum.Enum):
    """What happens to partitions of the group."""

    ASSIGN = "assign"
    REVOKE = "revoke"
    LOST = "lost"
    """They belong to somebody else already; nothing can be committed any more."""


@dataclass(frozen=True, slots=True)
class Listener:
    """The application's callbacks of one subscription."""

    on_assign: RebalanceCallback | None = None
    on_revoke: RebalanceCallback | None = None
    on_lost: RebalanceCallback | None = None

    def callback(self, kind: RebalanceKind) -> RebalanceCallback | None:
        """Return the callback for `kind`; what is lost is revoked if the application makes no difference."""
        if kind is RebalanceKind.ASSIGN:
            return self.on_assign
        return (self.on_lost or self.on_revoke) if kind is RebalanceKind.LOST else self.on_revoke


@dataclass(frozen=True, slots=True)
class RebalanceEvent:
    """Partitions come or go; the application is asked, and then it is done."""

    kind: RebalanceKind
    partitions: tuple[tuple[str, int], ...]
    listener: Listener
    life: int
    """Under which of the consumer's member ids it happens."""


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """The group has answered; what there is to do is found out when it is served."""

    life: int
    """Which of the consumer's member ids it was an answer to."""


@dataclass(frozen=True, slots=True)
class CommitEvent:
    """Offsets were committed, or not: for on_commit."""

    error: KafkaError | None
    partitions: Sequence[TopicPartition]


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """The database cannot be reached, for example: for error_cb."""

    error: KafkaError


@dataclass(frozen=True, slots=True)
class StatisticsEvent:
    """Statistics are due: for stats_cb."""

    call: Callable[[], object]


@dataclass(frozen=True, slots=True)
class MessageEvent:
    """What poll() returns before any record."""

    message: Message


Event = RebalanceEvent | AnswerEvent | CommitEvent | ErrorEvent | StatisticsEvent | MessageEvent


class Inbox:
    """The events of one consumer, in their order; whoever puts one wakes the poll that waits."""

    def __init__(self, arrived: Condition, *, logger: logging.Logger, has_error_callback: bool) -> None:
        """Notify `arrived`, whose lock guards the events."""
        self._arrived = arrived
        self._logger = logger
        self._has_error_callback = has_error_callback
        self.events: deque[Event] = deque()
        """What has not been served yet, in order."""
        self._said_at: dict[tuple[int, bool], float] = {}

    def put(self, event: Event) -> None:
        """Add an event."""
        with self._arrived:
            self.events.append(event)
            self._arrived.notify_all()

    def pop(self) -> Event | None:
        """Take the first event, or None."""
        with self._arrived:
            return self.events.popleft() if self.events else None

    def put_error(self, error: KafkaError) -> None:
        """Tell error_cb, or the log if there is none; what comes again and again is told now and then."""
        if not self._is_due(error, ERROR_INTERVAL_SECONDS, as_message=False):
            return
        if self._has_error_callback:
            self.put(ErrorEvent(error))
        else:
            self._logger.warning("%s: %s", error.name(), error.str())

    def put_message(self, message: Message) -> None:
        """Let poll() return a message that is about no partition; the same error again only after a while."""
        error = message.error()
        if error is not None and self._is_due(error, MESSAGE_INTERVAL_SECONDS, as_message=True):
            self.put(MessageEvent(message))

    def _is_due(self, error: KafkaError, interval_seconds: float, *, as_message: bool) -> bool:
        key = (error.code(), as_message)
        now = time.monotonic()
        with self._arrived:
            if now - self._said_at.get(key, -math.inf) < interval_seconds:
                return False
            self._said_at[key] = now
            return True

"""The events of a consumer: what happens in the background and waits for the application's next poll()."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from txnstore.clients.callbacks import ErrorReporter, EventQueue
from txnstore.clients.model.errors import KafkaError
from txnstore.clients.model.message import Message
from txnstore.clients.model.topic_partition import TopicPartition


def unknown_topic(name: str) -> KafkaError:
    """Return the error for a topic that does not exist."""
    return KafkaError(
        KafkaError.UNKNOWN_TOPIC_OR_PART, f"Subscribed topic not available: {name}: Broker: Unknown topic or partition"
    )


def refused_topic(name: str, why: Exception) -> KafkaError:
    """Return the error for a topic that does not exist, and that the store does not let this client create."""
    text = f"{name} does not exist, and cannot be created: {why}: Broker: Topic authorization failed"
    return KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, text)


def prefixed(prefix: str, error: KafkaError) -> KafkaError:
    """Return the error with what failed in front of its text: "Commit failed: ..."."""
    return KafkaError(
        error.code(), f"{prefix}: {error.str()}", error.fatal(), error.retriable(), error.txn_requires_abort()
    )


#: An error that occurs again and again interrupts the application's records at most this often.
MESSAGE_INTERVAL_SECONDS: Final = 30.0

RebalanceCallback = Callable[[Any, list[TopicPartition]], Any]


class RebalanceKind(enum.Enum):
    """What happens to partitions of the group."""

    ASSIGN = "assign"
    REVOKE = "revoke"
    LOST = "lost"
    """They already belong to another consumer; nothing can be committed any more."""


@dataclass(frozen=True, slots=True)
class RebalanceEvent:
    """Partitions are assigned or taken away: the application is called, and then the assignment changes."""

    kind: RebalanceKind
    partitions: tuple[tuple[str, int], ...]
    incarnation: int
    """Which of the consumer's member ids it belongs to."""

    def topic_partitions(self) -> list[TopicPartition]:
        """Return the partitions as the application gets them: a list of its own each time."""
        return [TopicPartition(topic, number) for topic, number in self.partitions]


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """The group has answered; what has to be done is decided when the event is served."""

    incarnation: int
    """Which of the consumer's member ids was answered."""


@dataclass(frozen=True, slots=True)
class CommitEvent:
    """A commit of offsets has succeeded or failed: for on_commit."""

    error: KafkaError | None
    partitions: Sequence[TopicPartition]


@dataclass(frozen=True, slots=True)
class CallbackEvent:
    """There is an error or statistics to tell: `call` calls error_cb or stats_cb."""

    call: Callable[[], object]


@dataclass(frozen=True, slots=True)
class MessageEvent:
    """What poll() returns before any record."""

    message: Message


Event = RebalanceEvent | AnswerEvent | CommitEvent | CallbackEvent | MessageEvent


def put_call(inbox: EventQueue[Event], call: Callable[[], object]) -> None:
    """Add an event that is served by this call."""
    inbox.put(CallbackEvent(call))


def error_reporter(
    inbox: EventQueue[Event],
    callback: Callable[[KafkaError], object] | None,
    logger: logging.Logger,
    is_alone: Callable[[], bool],
) -> ErrorReporter:
    """Return what tells `callback` of passing trouble at the next poll(), or without one the log at once."""
    if callback is not None:
        return ErrorReporter(callback, partial(put_call, inbox), is_alone)

    def log(error: KafkaError) -> None:
        logger.warning("%s: %s", error.name(), error.str(), extra={"event": "client_error", "error": error.name()})

    return ErrorReporter(log, lambda call: call(), is_alone)

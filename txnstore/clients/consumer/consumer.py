"""This file is the Consumer: the calls and callbacks that users of confluent-kafka know, on a database."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import Any, Final, Self

from txnstore.clients.consumer.arguments import (
    check_count,
    check_timeout,
    deadline_of,
    seconds_left,
)
from txnstore.clients.consumer.asking import AskingCalls
from txnstore.clients.consumer.assigning import AssigningCalls
from txnstore.clients.consumer.committing import CommittingCalls
from txnstore.clients.consumer.events import (
    AnswerEvent,
    CommitEvent,
    ErrorEvent,
    MessageEvent,
    RebalanceEvent,
    RebalanceKind,
    StatisticsEvent,
)
from txnstore.clients.membership.state import Stage
from txnstore.clients.model.constants import OFFSET_STORED
from txnstore.clients.model.kafka_error import KafkaError, KafkaException
from txnstore.clients.model.message import Message
from txnstore.clients.model.topic_partition import TopicPartition

#: How long close() waits for what it has to write, and for its threads.
CLOSE_SECONDS: Final = 10.0
#: And how long once it is interrupted.
INTERRUPTED_SECONDS: Final = 0.5


class Consumer(AssigningCalls, CommittingCalls, AskingCalls):
    """Reads topics of the store, alone or as the member of a group; see `confluent_kafka.Consumer`.

    Records are read ahead in the background; `poll()` hands them out and serves the callbacks.  Every call keeps its
    timeout, in seconds, whatever the database does; a negative one means for ever.  A consumer may be used by several
    threads, but only in the process that made it.

    Args:
        config: the configuration, as a dict or as keywords; `bootstrap.servers` is the database's URL, and `group.id`
            is needed.

    Raises:
        TypeError: there is no configuration.
        ValueError: there is no `group.id`.
        KafkaException: `_INVALID_ARG`: a key is unknown or its value is not one that it takes.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- records -----------------------------------------------------------------------------------------------------

    def poll(self, timeout: float = -1) -> Message | None:
        """Return the next record or event, or None once the time is up; serve the callbacks that are due.

        What has gone wrong comes as a message whose `error()` is not None.

        Raises:
            RuntimeError: the consumer is closed.
            KafkaException: `_STATE`: the process was forked after the consumer had been made.
            Exception: whatever a callback raised.
        """
        self._check()
        wanted_seconds = check_timeout(timeout)
        parts = self._parts
        # The short way, for it is taken for each record: nothing is created, called or asked that can be left out.
        with parts.lock:
            if (parts.group.stage is Stage.OUT or parts.group.polled()) and not parts.inbox.events:
                message = parts.subscription.next_message()
                if message is not None:
                    if parts.subscription.wants_more:
                        parts.read_on()
                    return message
        messages: list[Message] = []
        self._look()
        self._gather(messages, 1, deadline_of(wanted_seconds))
        return messages[0] if messages else None

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        """Return up to `num_messages` records and events: as many as there are until the time is up.

        Fewer come if partitions are to be given back; the call that follows serves the callback.

        Raises:
            ValueError: `num_messages` is not within 0 to 1,000,000.
            Exception: as `poll()`; records that were gathered until then come again.
        """
        self._check()
        count = check_count(num_messages)
        deadline = deadline_of(check_timeout(timeout))
        messages: list[Message] = []
        with self._parts.arrived:
            self._parts.group.polled()
        if count:
            self._look()
            try:
                self._gather(messages, count, deadline)
            except BaseException:
                with self._parts.arrived:
                    self._parts.subscription.give_back(messages)
                raise
        return messages

    def __iter__(self) -> Iterator[Message]:
        """Return an endless iterator over records, and over ends of partitions if `enable.partition.eof` is set.

        It ends when the consumer is closed.

        Raises:
            KafkaException: an error came instead of a record.
        """
        while True:
            try:
                message = self.poll(-1)
            except RuntimeError:
                if not self._closed:
                    raise
                return
            if message is None:
                continue
            error = message.error()
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                raise KafkaException(error)
            yield message

    def _look(self) -> None:
        """Find out whether the database is there, if nothing else would tell: nothing is read."""
        parts = self._parts
        if parts.look is not None and not len(parts.subscription):
            with contextlib.suppress(RuntimeError):  # closed by another thread since the call began
                parts.look.polled()

    def _gather(self, messages: list[Message], count: int, deadline: float) -> None:
        """Add messages until there are enough or the time is up; wait for them and serve the callbacks."""
        parts = self._parts
        while len(messages) < count:
            if parts.inbox.events:
                if messages:
                    return
                message = self._serve_one()
                if message is not None:
                    messages.append(message)
            elif not self._take_or_wait(messages, count, deadline):
                return

    def _take_or_wait(self, messages: list[Message], count: int, deadline: float) -> bool:
        """Add what is at hand, or wait for more; return False once the time is up."""
        parts = self._parts
        with parts.arrived:
            if self._closed:
                raise RuntimeError("Consumer closed")
            before = len(messages)
            if parts.group.may_deliver:
                parts.subscription.take(messages, count)
            parts.read_on()
            if len(messages) > before or parts.inbox.events:
                return True
            left_seconds = seconds_left(deadline)
            if left_seconds <= 0:
                return False
            parts.group.waiting += 1
            try:
                parts.arrived.wait(left_seconds)
            finally:
                parts.group.waiting -= 1
                parts.group.polled()
        return True

    # --- callbacks ---------------------------------------------------------------------------------------------------

    def _serve_one(self) -> Message | None:
        """Serve the first event; return the message if it is one."""
        event = self._parts.inbox.pop()
        if isinstance(event, MessageEvent):
            return event.message
        if isinstance(event, AnswerEvent):
            rebalance = self._parts.group.take_answer(event)
            if rebalance is not None:
                self._rebalance(rebalance)
        elif isinstance(event, RebalanceEvent):
            self._rebalance(event)
        elif isinstance(event, CommitEvent):
            self._call_back("on_commit", event.error, list(event.partitions))
        elif isinstance(event, ErrorEvent):
            self._call_back("error_cb", event.error)
        elif isinstance(event, StatisticsEvent):
            event.call()
        return None

    def _call_back(self, name: str, *arguments: Any) -> None:
        callback = self._callbacks[name]
        if callback is not None:
            callback(*arguments)

    def _rebalance(self, event: RebalanceEvent) -> None:
        """Ask the application, and do what it does not do itself."""
        callback = event.listener.callback(event.kind)
        self._assignment_changed = False
        self._losing = event.kind is RebalanceKind.LOST
        try:
            if callback is not None:
                callback(self, [TopicPartition(topic, number) for topic, number in event.partitions])
        finally:
            if not self._assignment_changed:
                self._change_assignment(event)
            self._losing = False
            self._parts.group.served(event)

    def _change_assignment(self, event: RebalanceEvent) -> None:
        parts = self._parts
        with parts.arrived:
            if event.kind is RebalanceKind.ASSIGN:
                if not parts.options.is_cooperative:
                    self._drop(parts.subscription.clear())
                for topic, number in event.partitions:
                    if parts.subscription.find(topic, number) is None:
                        parts.subscription.add(topic, number, OFFSET_STORED)
                parts.read_on()
            elif parts.options.is_cooperative:
                removed = (parts.subscription.remove(topic, number) for topic, number in event.partitions)
                self._drop([partition for partition in removed if partition is not None])
            else:
                self._drop(parts.subscription.clear())

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the partitions back, commit what is stored if `enable.auto.commit` is set, and leave the group.

        It takes ten seconds at most, whatever the database does; a second call does nothing.

        Raises:
            Exception: what a callback raised; the consumer is closed nevertheless.
        """
        if self._closed:
            return
        parts = self._parts
        if self._process_id != os.getpid():
            # It is the parent's: threads and locks did not come along.
            self._closed = True
            parts.connection.close()
            return
        deadline = time.monotonic() + CLOSE_SECONDS
        try:
            self._give_everything_back()
        except BaseException as error:
            deadline = _after(error, deadline)
            raise
        finally:
            self._finish(deadline)

    def _give_everything_back(self) -> None:
        """Serve what is left of rebalances, and revoke what is owned."""
        parts = self._parts
        while (event := parts.inbox.pop()) is not None:
            if isinstance(event, RebalanceEvent):
                self._rebalance(event)
            elif isinstance(event, CommitEvent):
                self._call_back("on_commit", event.error, list(event.partitions))
        parts.group.unsubscribe()
        while (event := parts.inbox.pop()) is not None:
            if isinstance(event, RebalanceEvent):
                self._rebalance(event)

    def _finish(self, deadline: float) -> None:
        parts = self._parts
        with parts.arrived:
            if self._closed:
                return
            self._drop(parts.subscription.clear())
            parts.group.leave_now()
            self._closed = True
            parts.arrived.notify_all()
            parts.fetcher.stop()
            parts.group_thread.stop()
        # The worker does what it was given in this order: when it comes to the last, all is written.
        try:
            _wait_for(parts.worker.submit(_nothing), deadline)
        except BaseException as error:
            deadline = _after(error, deadline)
            raise
        finally:
            if not parts.close(deadline):
                parts.logger.warning("a thread of %r is still waiting for the database; it ends by itself", self)
            self._finalizer.detach()
        while (event := parts.inbox.pop()) is not None:
            if isinstance(event, CommitEvent):
                self._call_back("on_commit", event.error, list(event.partitions))


def _after(error: BaseException, deadline: float) -> float:
    """Return how long to go on after an error: Ctrl-C is to be felt."""
    return deadline if isinstance(error, Exception) else min(deadline, time.monotonic() + INTERRUPTED_SECONDS)


def _nothing() -> None:
    """Do nothing: the job behind all others."""


def _wait_for(future: Future[Any], deadline: float) -> None:
    try:
        future.exception(seconds_left(deadline))
    except (FutureTimeoutError, CancelledError):
        future.cancel()

"""This file is the Consumer: the calls and callbacks that users of confluent-kafka know, on a database."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from txnstore.clients.cluster_metadata import ClusterMetadata
from txnstore.clients.configuration import consumer_configuration
from txnstore.clients.constants import OFFSET_INVALID, OFFSET_STORED
from txnstore.clients.consumer_arguments import (
    check_callback,
    check_count,
    check_distinct,
    check_partition,
    check_partitions,
    check_topics,
    chosen_offsets,
    deadline_of,
    failure,
    seconds_left,
)
from txnstore.clients.consumer_events import (
    CommitEvent,
    ErrorEvent,
    Listener,
    MessageEvent,
    RebalanceCallback,
    RebalanceEvent,
    RebalanceKind,
)
from txnstore.clients.consumer_parts import ConsumerParts
from txnstore.clients.error_mapping import kafka_error_of
from txnstore.clients.error_messages import prefixed
from txnstore.clients.group_metadata import format_group_metadata
from txnstore.clients.kafka_error import KafkaError, KafkaException
from txnstore.clients.message import Message
from txnstore.clients.subscription import AssignedPartition
from txnstore.clients.topic_partition import TopicPartition
from txnstore.errors import TxnStoreError, UnstableOffsetCommit

Result = TypeVar("Result")

#: How long close() waits for what it has to write, and for its threads.
CLOSE_SECONDS: Final = 10.0
#: How often committed() asks again while an open transaction holds the offsets.
UNSTABLE_PAUSE_SECONDS: Final = 0.02
_EAGER_TEXT: Final = (
    "Changes to the current assignment must be made using assign() when rebalance protocol type is EAGER"
)


class Consumer:
    """Reads topics of the store, alone or as the member of a group; see `confluent_kafka.Consumer`.

    Records are read ahead in the background; `poll()` hands them out and serves the callbacks.  Every call keeps its
    timeout, in seconds, whatever the database does; a negative one means for ever.  A consumer may be used by several
    threads, but only in the process that made it.  A group has one member for now: a consumer that subscribes takes
    the group over.

    Args:
        config: the configuration, as a dict or as keywords; `bootstrap.servers` is the database's URL, and `group.id`
            is needed.

    Raises:
        TypeError: there is no configuration.
        ValueError: there is no `group.id`.
        KafkaException: `_INVALID_ARG`: a key is unknown or its value is not one that it takes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._closed = True
        if not args and not kwargs:
            raise TypeError("expected configuration dict")
        configuration = consumer_configuration(args, kwargs)
        self._parts = ConsumerParts(configuration)
        self._process_id = self._parts.connection.process_id
        self._closed = False
        self._assignment_changed = False
        self._losing = False
        self._finalizer = weakref.finalize(self, self._parts.abandon)
        # At the end of the program the threads end by themselves, and the database may be gone.
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        return f"<txnstore.Consumer of group {self._parts.options.group_id!r}>"

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
        deadline = deadline_of(timeout)
        parts = self._parts
        with parts.arrived:
            parts.group.polled()
            if not parts.inbox:
                message = parts.subscription.next_message()
                if message is not None:
                    if parts.subscription.wants_more:
                        parts.read_on()
                    return message
        messages: list[Message] = []
        self._gather(messages, 1, deadline)
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
        deadline = deadline_of(timeout)
        messages: list[Message] = []
        with self._parts.arrived:
            self._parts.group.polled()
        if count:
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

    def _gather(self, messages: list[Message], count: int, deadline: float) -> None:
        """Add messages until there are enough or the time is up; wait for them and serve the callbacks."""
        parts = self._parts
        while len(messages) < count:
            if parts.inbox:
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
            parts.subscription.take(messages, count)
            parts.read_on()
            if len(messages) > before or parts.inbox:
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
        if isinstance(event, RebalanceEvent):
            self._rebalance(event)
        elif isinstance(event, CommitEvent):
            self._parts.configuration["on_commit"](event.error, list(event.partitions))
        elif isinstance(event, ErrorEvent):
            self._parts.configuration["error_cb"](event.error)
        return None

    def _rebalance(self, event: RebalanceEvent) -> None:
        """Ask the application, and do what it does not do itself."""
        group = self._parts.group
        if group.is_stale(event):
            return
        group.begin_serving(event)
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
            group.served(event)

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

    # --- the group ---------------------------------------------------------------------------------------------------

    def subscribe(
        self,
        topics: list[str],
        on_assign: RebalanceCallback | None = None,
        on_revoke: RebalanceCallback | None = None,
        on_lost: RebalanceCallback | None = None,
    ) -> None:
        """Join the group for these topics, instead of those before; a name that begins with `^` is a pattern.

        The partitions come with a later `poll()`, which calls `on_assign(consumer, partitions)`; when they go it calls
        `on_revoke`, or `on_lost` if they are another consumer's already.

        Raises:
            TypeError: the topics are no list, or a callback is none.
            KafkaException: `_INVALID_ARG`: the list is empty, names a topic twice, or holds no regular expression.
        """
        self._check()
        names = check_topics(topics)
        listener = Listener(
            check_callback(on_assign, "on_assign"),
            check_callback(on_revoke, "on_revoke"),
            check_callback(on_lost, "on_lost"),
        )
        with self._parts.arrived:
            self._parts.group.subscribe(names, listener)
            self._parts.fetcher.start()

    def unsubscribe(self) -> None:
        """Leave the group; the next `poll()` calls `on_revoke` and gives the partitions back."""
        self._check()
        self._parts.group.unsubscribe()

    def memberid(self) -> str | None:
        """Return the consumer's id in its group, or None as long as it is not in it."""
        self._check()
        return self._parts.group.member_id

    def consumer_group_metadata(self) -> bytes:
        """Return who the consumer is to its group, for `Producer.send_offsets_to_transaction`, in any process."""
        self._check()
        return format_group_metadata(self._parts.group.membership)

    # --- the assignment ----------------------------------------------------------------------------------------------

    def assign(self, partitions: list[TopicPartition]) -> None:
        """Read these partitions, instead of those before, from their offsets on.

        Without an offset a partition is read from the group's committed one on, or from where `auto.offset.reset`
        says.

        Raises:
            TypeError: they are no list of partitions.
            KafkaException: `_INVALID_ARG`: one of them is named twice.
        """
        self._check()
        chosen = check_partitions(partitions)
        check_distinct(chosen, "Failed to set assignment")
        parts = self._parts
        with parts.arrived:
            self._assignment_changed = True
            self._drop(parts.subscription.clear())
            for partition in chosen:
                parts.subscription.add(partition.topic, partition.partition, partition.offset)
            parts.read_on()

    def unassign(self) -> None:
        """Read no partition any more."""
        self._check()
        with self._parts.arrived:
            self._assignment_changed = True
            self._drop(self._parts.subscription.clear())

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        """Read these partitions as well.

        Raises:
            KafkaException: `_STATE`: the group's assignor is an eager one; `_CONFLICT`: a partition is assigned
                already; `_INVALID_ARG`: one is named twice.
        """
        self._check()
        chosen = check_partitions(partitions)
        check_distinct(chosen, "Failed to set assignment")
        parts = self._parts
        with parts.arrived:
            self._refuse_if_eager()
            for partition in chosen:
                if parts.subscription.find(partition.topic, partition.partition) is not None:
                    text = f"{partition.topic} [{partition.partition}] is already part of the current assignment"
                    raise KafkaException(KafkaError(KafkaError._CONFLICT, text))
            self._assignment_changed = True
            for partition in chosen:
                parts.subscription.add(partition.topic, partition.partition, partition.offset)
            parts.read_on()

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        """Read these partitions no more.

        Raises:
            KafkaException: `_STATE`: the group's assignor is an eager one; `_INVALID_ARG`: a partition is not
                assigned.
        """
        self._check()
        chosen = check_partitions(partitions)
        check_distinct(chosen, "Failed to set assignment")
        parts = self._parts
        with parts.arrived:
            self._refuse_if_eager()
            for partition in chosen:
                if parts.subscription.find(partition.topic, partition.partition) is None:
                    text = (
                        f"{partition.topic} [{partition.partition}] can't be unassigned since it is not in the current"
                        " assignment"
                    )
                    raise KafkaException(KafkaError(KafkaError._INVALID_ARG, text))
            self._assignment_changed = True
            removed = (parts.subscription.remove(partition.topic, partition.partition) for partition in chosen)
            self._drop([partition for partition in removed if partition is not None])

    def assignment(self) -> list[TopicPartition]:
        """Return the partitions that are read, each with the offset it was assigned with."""
        self._check()
        with self._parts.arrived:
            return [
                TopicPartition(partition.topic, partition.number, partition.assigned_offset)
                for partition in self._parts.subscription
            ]

    def _refuse_if_eager(self) -> None:
        if self._parts.group.is_subscribed and not self._parts.options.is_cooperative:
            raise KafkaException(KafkaError(KafkaError._STATE, _EAGER_TEXT))

    def _drop(self, removed: list[AssignedPartition]) -> None:
        """Commit what is stored of partitions that go, unless they are lost."""
        if removed and self._parts.options.commits_by_itself and not self._losing:
            self._parts.commit_in_background(removed)

    # --- positions ---------------------------------------------------------------------------------------------------

    def seek(self, partition: TopicPartition) -> None:
        """Go on reading the partition at its `offset`; what was read ahead is dropped.

        Raises:
            TypeError: it is no partition.
            KafkaException: `_STATE`: it is not assigned; `_INVALID_ARG`: OFFSET_STORED is no place to seek to.
        """
        self._check()
        wanted = check_partition(partition)
        parts = self._parts
        with parts.arrived:
            assigned = parts.subscription.find(wanted.topic, wanted.partition)
            prefix = f"Failed to seek to offset {wanted.offset}"
            if assigned is None:
                raise failure(KafkaError._STATE, prefix)
            if wanted.offset == OFFSET_STORED:
                raise failure(KafkaError._INVALID_ARG, prefix)
            parts.subscription.seek(assigned, wanted.offset)
            parts.read_on()

    def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Return for each partition the next offset to be handed out, or OFFSET_INVALID if there was none yet.

        Markers and aborted records that follow the last record are stepped over.
        """
        self._check()
        answer = []
        with self._parts.arrived:
            for partition in check_partitions(partitions):
                assigned = self._parts.subscription.find(partition.topic, partition.partition)
                offset = OFFSET_INVALID if assigned is None else assigned.position
                answer.append(TopicPartition(partition.topic, partition.partition, offset))
        return answer

    def pause(self, partitions: list[TopicPartition]) -> None:
        """Hand out no records of these partitions; those that are not assigned are left alone."""
        self._check()
        with self._parts.arrived:
            for assigned in self._assigned(partitions):
                self._parts.subscription.pause(assigned)

    def resume(self, partitions: list[TopicPartition]) -> None:
        """Hand out records of these partitions again; those that are not assigned are left alone."""
        self._check()
        with self._parts.arrived:
            for assigned in self._assigned(partitions):
                self._parts.subscription.resume(assigned)
            self._parts.arrived.notify_all()
            self._parts.read_on()

    def _assigned(self, partitions: list[TopicPartition]) -> list[AssignedPartition]:
        found = (
            self._parts.subscription.find(partition.topic, partition.partition)
            for partition in check_partitions(partitions)
        )
        return [partition for partition in found if partition is not None]

    def store_offsets(self, message: Message | None = None, offsets: list[TopicPartition] | None = None) -> None:
        """Let a later commit without arguments commit the offset behind the message, or these offsets.

        Raises:
            ValueError: neither or both are given.
            KafkaException: `_INVALID_ARG`: `enable.auto.offset.store` is set, or the message is no record;
                `_UNKNOWN_PARTITION`: no partition of them is assigned.
        """
        self._check()
        chosen = chosen_offsets(message, offsets, "store")
        if chosen is None:
            raise ValueError("expected either message or offsets")
        if self._parts.options.stores_offsets:
            raise failure(KafkaError._INVALID_ARG, "StoreOffsets failed")
        with self._parts.arrived:
            found = [
                (assigned, partition.offset)
                for partition in chosen
                if (assigned := self._parts.subscription.find(partition.topic, partition.partition)) is not None
            ]
            if chosen and not found:
                raise failure(KafkaError._UNKNOWN_PARTITION, "StoreOffsets failed")
            for assigned, offset in found:
                if offset >= 0:
                    assigned.stored = offset

    def commit(
        self,
        message: Message | None = None,
        offsets: list[TopicPartition] | None = None,
        asynchronous: bool = True,
    ) -> list[TopicPartition] | None:
        """Commit the offset behind the message, these offsets, or what is stored and not committed yet.

        Asynchronously nothing is returned, and `on_commit` hears of it from a later `poll()`.  Otherwise the committed
        partitions are returned, each with its own error.

        Raises:
            ValueError: both message and offsets are given.
            KafkaException: `_INVALID_ARG`: the message is no record; if not asynchronous also `_NO_OFFSET`: there is
                nothing to commit; UNKNOWN_MEMBER_ID, ILLEGAL_GENERATION, FENCED_INSTANCE_ID: the group is another
                consumer's now; and what the database answers.
        """
        self._check()
        chosen = chosen_offsets(message, offsets, "commit")
        parts = self._parts
        if chosen is None:
            chosen = parts.commits.stored()
        if all(partition.offset < 0 for partition in chosen):
            if not asynchronous:
                raise failure(KafkaError._NO_OFFSET, "Commit failed")
            if parts.configuration["on_commit"] is not None:
                parts.inbox.put(CommitEvent(KafkaError(KafkaError._NO_OFFSET), []))
            return None
        if asynchronous:
            parts.submit_commit(chosen)
            return None
        deadline = time.monotonic() + parts.options.request_timeout_seconds
        result = self._answer(parts.commits.submit(chosen), deadline, "Commit failed")
        if result.error is not None:
            raise KafkaException(prefixed("Commit failed", result.error))
        return list(result.partitions)

    def committed(self, partitions: list[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
        """Return what the group has committed for each partition, or OFFSET_INVALID if nothing.

        With `isolation.level=read_committed` it waits while an open transaction may still change the offsets.

        Raises:
            KafkaException: `_TIMED_OUT`, and what the database answers.
        """
        self._check()
        chosen = check_partitions(partitions)
        deadline = deadline_of(timeout)
        prefix = "Failed to get committed offsets"
        if not chosen:
            return []
        while True:
            try:
                return self._answer(self._parts.commits.read(chosen), deadline, prefix, unless=UnstableOffsetCommit)
            except UnstableOffsetCommit:
                self._parts.held_back()
                left_seconds = seconds_left(deadline)
                if left_seconds <= 0:
                    raise failure(KafkaError._TIMED_OUT, prefix) from None
            time.sleep(min(UNSTABLE_PAUSE_SECONDS, left_seconds))
            self._check()

    # --- lookups -----------------------------------------------------------------------------------------------------

    def get_watermark_offsets(
        self, partition: TopicPartition, timeout: float = -1, cached: bool = False
    ) -> tuple[int, int]:
        """Return the first offset of the partition and the one behind the last that this consumer may read.

        With `isolation.level=read_committed` the latter is the last stable offset.  `cached`: as the last reading
        found them, with the high watermark; OFFSET_INVALID before the first one.

        Raises:
            KafkaException: `_UNKNOWN_PARTITION`, `_TIMED_OUT`, and what the database answers.
        """
        self._check()
        wanted = check_partition(partition)
        deadline = deadline_of(timeout)
        if cached:
            with self._parts.arrived:
                assigned = self._parts.subscription.find(wanted.topic, wanted.partition)
                bounds = None if assigned is None else assigned.bounds
            return (
                (OFFSET_INVALID, OFFSET_INVALID)
                if bounds is None
                else (
                    bounds.log_start_offset,
                    bounds.high_watermark,
                )
            )
        lookups = self._parts.lookups
        return self._ask(lambda: lookups.watermarks(wanted), deadline, "Failed to get watermark offsets")

    def offsets_for_times(self, partitions: list[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
        """Return for each partition the first offset at or after the time that stands in its `offset`.

        Times are milliseconds since 1970; OFFSET_END: there is no such record yet.

        Raises:
            KafkaException: `_INVALID_ARG`: the list is empty; `_UNKNOWN_PARTITION`, `_TIMED_OUT`, and what the
                database answers.
        """
        self._check()
        chosen = check_partitions(partitions)
        deadline = deadline_of(timeout)
        if not chosen:
            raise failure(KafkaError._INVALID_ARG, "Failed to get offsets")
        lookups = self._parts.lookups
        return self._ask(lambda: lookups.offsets_for_times(chosen), deadline, "Failed to get offsets")

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> ClusterMetadata:
        """Return the cluster with all topics, or with this one.

        Raises:
            KafkaException: `_TIMED_OUT`, and what the database answers.
        """
        self._check()
        directory = self._parts.directory
        return self._ask(lambda: directory.cluster_metadata(topic), deadline_of(timeout), "Failed to get metadata")

    def cluster_id(self, timeout: float = -1) -> str:
        """Return the identity of the store.

        Raises:
            KafkaException: `_TIMED_OUT`, and what the database answers.
        """
        self._check()
        connection = self._parts.connection
        return self._ask(lambda: connection.store().store_uuid, deadline_of(timeout), "Failed to get the cluster's id")

    def set_sasl_credentials(self, username: str, password: str) -> None:
        """Do nothing: the database's URL holds the credentials."""
        self._check()
        for value in (username, password):
            if not isinstance(value, str):
                raise TypeError(f"must be str, not {type(value).__name__}")

    def _ask(self, work: Callable[[], Result], deadline: float, prefix: str) -> Result:
        return self._answer(self._parts.worker.submit(work), deadline, prefix)

    def _answer(
        self,
        future: Future[Result],
        deadline: float,
        prefix: str,
        *,
        unless: type[TxnStoreError] | tuple[()] = (),
    ) -> Result:
        """Return what the worker found, as long as the caller waits for it."""
        try:
            return future.result(seconds_left(deadline))
        except FutureTimeoutError:
            # Nobody needs it any more.
            future.cancel()
            raise failure(KafkaError._TIMED_OUT, prefix) from None
        except CancelledError:
            raise RuntimeError("Consumer closed") from None
        except unless:
            raise
        except TxnStoreError as error:
            raise KafkaException(prefixed(prefix, kafka_error_of(error))) from error
        except KafkaException as error:
            raise KafkaException(prefixed(prefix, error.args[0])) from error

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
        finally:
            self._finish(deadline)

    def _give_everything_back(self) -> None:
        """Serve what is left of rebalances, and revoke what is owned."""
        parts = self._parts
        while (event := parts.inbox.pop()) is not None:
            if isinstance(event, RebalanceEvent) and event.kind is not RebalanceKind.ASSIGN:
                self._rebalance(event)
            elif isinstance(event, CommitEvent):
                parts.configuration["on_commit"](event.error, list(event.partitions))
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
        # The worker does what it was given in this order: when it comes to the last, all is written.
        _wait_for(parts.worker.submit(_nothing), deadline)
        if not parts.close(deadline):
            parts.logger.warning("a thread of %r is still waiting for the database; it ends by itself", self)
        self._finalizer.detach()
        while (event := parts.inbox.pop()) is not None:
            if isinstance(event, CommitEvent):
                parts.configuration["on_commit"](event.error, list(event.partitions))

    def _check(self) -> None:
        if self._closed:
            raise RuntimeError("Consumer closed")
        if self._process_id != os.getpid():
            self._parts.connection.check_process()


def _nothing() -> None:
    """Do nothing: the job behind all others."""


def _wait_for(future: Future[Any], deadline: float) -> None:
    try:
        future.exception(seconds_left(deadline))
    except (FutureTimeoutError, CancelledError):
        future.cancel()

"""The Consumer: the calls and callbacks that users of confluent-kafka know, on a database."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from threading import TIMEOUT_MAX
from types import TracebackType
from typing import Any, Final, Self

from txnstore import bulk
from txnstore.clients.callbacks import Callbacks
from txnstore.clients.configuration.configuration import consumer_configuration
from txnstore.clients.connection import OfOneProcess
from txnstore.clients.consumer.arguments import (
    check_callback,
    check_count,
    check_distinct,
    check_partition,
    check_partitions,
    check_topics,
    chosen_offsets,
    failure,
)
from txnstore.clients.consumer.assigned_partition import AssignedPartition
from txnstore.clients.consumer.commits import CommitResult
from txnstore.clients.consumer.core import ConsumerCore, after_error
from txnstore.clients.consumer.events import (
    AnswerEvent,
    CallbackEvent,
    CommitEvent,
    Event,
    MessageEvent,
    RebalanceCallback,
    RebalanceEvent,
    RebalanceKind,
    prefixed,
)
from txnstore.clients.consumer.whole_transactions import MESSAGES_MAX, ConsumedTransaction, next_transaction
from txnstore.clients.membership.metadata import format_group_metadata
from txnstore.clients.model.errors import HANDLE_CLOSED_TEXT, KafkaError, KafkaException
from txnstore.clients.model.message import Message
from txnstore.clients.model.metadata import ClusterMetadata
from txnstore.clients.model.topic_partition import OFFSET_INVALID, OFFSET_STORED, TopicPartition
from txnstore.clients.outlet import Polls, short_in_c
from txnstore.deadline import WAIT_SECONDS_MAX, Deadline, check_timeout, to_its_end
from txnstore.errors import UnstableOffsetCommit

#: How long close() waits for its last writes and its threads.
CLOSE_SECONDS: Final = 10.0
#: How often committed() asks again while an open transaction holds the offsets.
UNSTABLE_PAUSE_SECONDS: Final = 0.02


class Consumer(Polls, OfOneProcess):
    """Reads topics of the store, alone or as the member of a group; see `confluent_kafka.Consumer`.

    Records are read ahead in the background; `poll()` hands them out and serves the callbacks.  Every call keeps its
    timeout, in seconds, whatever the database does; a negative one means for ever.  A consumer may be used by several
    threads, but only in the process that made it.  Once it is closed, calls raise RuntimeError.

    Args:
        config: a dict or keywords; `bootstrap.servers` is the database's URL, and `group.id` is needed.

    Raises:
        TypeError: there is no configuration.
        ValueError: there is no `group.id`.
        KafkaException: `_INVALID_ARG`: a key is unknown or its value is not one that it takes.
    """

    #: A subclass that does not call `__init__` gets a closed consumer.
    _closed = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._closed = True
        if not args and not kwargs:
            raise TypeError("expected configuration dict")
        configuration = consumer_configuration(args, kwargs)
        names = ("on_commit", "error_cb", "stats_cb")
        self._callbacks = Callbacks(**{name: configuration[name] for name in names})
        self._rebalance_callbacks: dict[RebalanceKind, RebalanceCallback | None] = {}
        """Those of the newest subscription, whichever the partitions were given under: as in confluent_kafka."""
        self._core = ConsumerCore(configuration.without(*names), self._callbacks)
        self._outlet = self._core.outlet
        self._connection = self._core.connection
        self._closed = False
        self._finalizer = weakref.finalize(self, self._core.abandon)
        # At the end of the program the threads end on their own, and the database may be gone.
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        return f"<txnstore.Consumer of group {self._core.options.group_id!r}>"

    def _check(self, closed_text: str = "Consumer closed") -> None:
        if self._closed:
            raise RuntimeError(closed_text)
        if self._connection.is_lifeless:
            self._connection.check_process()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- records ------------------------------------------------------------------------------------------------------

    @short_in_c
    def poll(self, timeout: float = -1) -> Message | None:
        """Return the next record or event, or None once the time is up; serve the callbacks that are due.

        What has gone wrong comes as a message whose `error()` is not None.

        Raises:
            RuntimeError: the consumer is closed.
            KafkaException: `_STATE`: the process was forked after the consumer had been made.
            Exception: whatever a callback raised.
        """
        # The short way, taken for each record: it creates, calls and asks nothing that can be left out.
        if self._closed or self._connection.is_inherited:
            self._check()
        kind = type(timeout)
        if (kind is not float and kind is not int) or not timeout <= TIMEOUT_MAX:
            check_timeout(timeout)
        core = self._core
        message: Message | None = None
        try:
            with core.lock:
                if core.group.polled() and not core.inbox.events:
                    message = core.subscription.next_message()
                    if message is not None:
                        if core.subscription.withheld:
                            # Another thread's call gathers: its end is too late, as it may give partitions back.
                            core.subscription.let_go()
                        if core.subscription.wants_more:
                            core.read_on()
                        if bulk.IN_C:
                            core.subscription.open_outlet(is_timed=core.group.is_subscribed)
                        return message
        except BaseException:
            core.give_back([] if message is None else [message])
            raise
        messages: list[Message] = []
        try:
            core.look_for_database()
            self._gather(messages, 1, Deadline(check_timeout(timeout)))
            return messages[0] if messages else None
        except BaseException:
            core.give_back(messages)
            raise

    def _not_returned(self, message: Message) -> None:
        self._core.give_back([message])

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        """Return up to `num_messages` records and events: as many as there are until the time is up.

        Fewer come if partitions are to be given back; the call that follows serves the callback.  Automatic commits
        have nothing of it before it returns.

        Raises:
            ValueError: `num_messages` is not within 0 to 1,000,000.
            Exception: as `poll()`; records that were gathered until then come again.
        """
        self._check()
        count = check_count(num_messages)
        deadline = Deadline(check_timeout(timeout))
        messages: list[Message] = []
        # Nobody waits with a single one in hand: it is returned at once.
        withholds = count > 1 or self._core.withholds_what_was_read
        try:
            self._core.polled(into=messages if withholds else None)
            if count:
                self._core.look_for_database()
                self._gather(messages, count, deadline)
            if withholds:
                self._core.gathered(messages)
            # Up to here an interrupt keeps them from the application.
            return messages
        except BaseException:
            self._core.give_back(messages)
            raise

    def consume_transaction(
        self, timeout: float = -1, *, messages_max: int = MESSAGES_MAX
    ) -> ConsumedTransaction | None:
        """Return the next committed transaction with its records of all partitions, or None once the time is up.

        A record outside transactions comes by itself.  What has not come whole by then is kept, and the next such call
        goes on with it; for all others it has not been handed out.  It needs `txnstore.delivery.atomic=true`.

        Raises:
            KafkaException: MSG_SIZE_TOO_LARGE: more than `messages_max`; _INVALID_ARG: not `txnstore.delivery.atomic`.
            Exception: as `poll()`, also if an error comes instead of a record.
        """
        self._check()
        deadline, count = Deadline(check_timeout(timeout)), check_count(messages_max)
        return next_transaction(self._core, self._check, self._serve_one, deadline, count)

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

    def _gather(self, messages: list[Message], count: int, deadline: Deadline) -> None:
        """Add messages until there are enough or the time is up; wait for them and serve the callbacks."""
        core = self._core
        while len(messages) < count:
            if core.inbox.events:
                if core.is_first_returned(messages):
                    return
                message = self._serve_one()
                if message is not None:
                    messages.append(message)
            elif not self._take_or_wait(messages, count, deadline):
                return

    def _take_or_wait(self, messages: list[Message], count: int, deadline: Deadline) -> bool:
        """Add what is at hand, or wait for more; return False once the time is up."""
        core = self._core
        with core.arrived:
            if self._closed:
                raise RuntimeError("Consumer closed")
            before = len(messages)
            # What has come since the last look may say that the records are another's by now.
            if core.group.may_deliver and not core.inbox.events:
                core.subscription.take(messages, count)
            core.read_on()
            if len(messages) > before or core.inbox.events:
                return True
            left_seconds = deadline.left_seconds()
            if left_seconds <= 0:
                return False
            core.group.waiting += 1
            try:
                # Without a notification there is nothing to look for.
                return core.arrived.wait(min(left_seconds, WAIT_SECONDS_MAX)) or left_seconds > WAIT_SECONDS_MAX
            finally:
                core.group.waiting -= 1
                core.group.polled()

    # --- callbacks ----------------------------------------------------------------------------------------------------

    def _serve_one(self) -> Message | None:
        """Serve the first event; return the message if it is one."""
        return self._core.inbox.serve_first(self._serve)

    def _serve(self, taken: list[Event]) -> Message | None:
        """Serve what is taken, which is out of the list once the application is told: else it is the next time."""
        event = taken[0] if taken else None
        if isinstance(event, MessageEvent):
            return event.message
        if isinstance(event, AnswerEvent):
            self._core.group.take_answer(event)
        elif isinstance(event, RebalanceEvent):
            self._rebalance(event, taken)
        elif isinstance(event, CommitEvent):
            self._committed(event, taken)
        elif isinstance(event, CallbackEvent):
            call = event.call
            # No call between these: an interrupt before it leaves the event to the next time.
            del taken[:]
            call()
        return None

    def _committed(self, event: CommitEvent, taken: list[Event]) -> None:
        callback, partitions = self._callbacks["on_commit"], list(event.partitions)
        # As above.
        del taken[:]
        if callback is not None:
            callback(event.error, partitions)

    def _rebalance(self, event: RebalanceEvent, taken: list[Event]) -> None:
        callback = self._rebalance_callbacks.get(event.kind)
        self._core.rebalance(event, taken, None if callback is None else partial(callback, self))

    # --- the subscription and the assignment --------------------------------------------------------------------------

    def subscribe(
        self,
        topics: list[str],
        on_assign: RebalanceCallback | None = None,
        on_revoke: RebalanceCallback | None = None,
        on_lost: RebalanceCallback | None = None,
    ) -> None:
        """Join the group for these topics, instead of those before; a name that begins with `^` is a pattern.

        The partitions come with a later `poll()`, which calls `on_assign(consumer, partitions)`; when they go it calls
        `on_revoke`, or `on_lost` if they are another consumer's already.  From now on these callbacks are called, or
        none, for the partitions of before, too.

        Raises:
            TypeError: the topics are not a list, or a callback is not callable.
            KafkaException: `_INVALID_ARG`: the list is empty, names a topic twice, or holds a pattern that is
                not a regular expression.
        """
        self._check()
        names = check_topics(topics)
        callbacks = {
            RebalanceKind.ASSIGN: check_callback(on_assign, "on_assign"),
            RebalanceKind.REVOKE: check_callback(on_revoke, "on_revoke"),
            RebalanceKind.LOST: check_callback(on_lost, "on_lost") or on_revoke,
        }
        with self._core.arrived:
            self._core.group.subscribe(names)
            self._rebalance_callbacks = callbacks
            self._core.is_assigned_alone = False
            self._core.fetcher.start()

    def unsubscribe(self) -> None:
        """Leave the group; the next `poll()` calls `on_revoke` and gives the partitions back."""
        self._check()
        self._core.group.unsubscribe()

    def memberid(self) -> str | None:
        """Return the consumer's id in its group, or None as long as it is not in it."""
        self._check()
        return self._core.group.member_id

    def consumer_group_metadata(self) -> bytes:
        """Return who the consumer is to its group, for `Producer.send_offsets_to_transaction`, in any process."""
        self._check()
        return format_group_metadata(self._core.group.membership)

    def assign(self, partitions: list[TopicPartition]) -> None:
        """Read these partitions, instead of those before, from their offsets on.

        Without an offset a partition is read from the group's committed one on, or from where `auto.offset.reset`
        says.

        Raises:
            TypeError: this is not a list of partitions.
            KafkaException: `_INVALID_ARG`: one of them is named twice; `_STATE`: it has joined a cooperative group.
        """
        self._check()
        chosen = check_partitions(partitions)
        check_distinct(chosen)
        self._core.options.positions.check(chosen, "Failed to set assignment")
        with self._core.arrived:
            self._core.replace(chosen, "Failed to set assignment")

    def unassign(self) -> None:
        """Stop reading all partitions.

        Raises:
            KafkaException: `_STATE`: it has joined a cooperative group.
        """
        self._check()
        with self._core.arrived:
            self._core.replace([], "Failed to remove assignment")

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        """Read these partitions as well.

        Raises:
            KafkaException: `_STATE`: the group's assignor is an eager one; `_CONFLICT`: a partition is assigned
                already; `_INVALID_ARG`: one is named twice.
        """
        self._check()
        chosen = check_partitions(partitions)
        check_distinct(chosen)
        self._core.options.positions.check(chosen, "Failed to set assignment")
        with self._core.arrived:
            self._core.refuse_if_eager()
            for partition in chosen:
                if self._core.find(partition) is not None:
                    text = f"{partition.topic} [{partition.partition}] is already part of the current assignment"
                    raise KafkaException(KafkaError(KafkaError._CONFLICT, text))
            self._core.add_as_told(chosen)

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        """Stop reading these partitions.

        Raises:
            KafkaException: `_STATE`: the group's assignor is eager; `_INVALID_ARG`: a partition is not assigned.
        """
        self._check()
        chosen = check_partitions(partitions)
        check_distinct(chosen)
        with self._core.arrived:
            self._core.refuse_if_eager()
            for partition in chosen:
                if self._core.find(partition) is None:
                    where = f"{partition.topic} [{partition.partition}]"
                    text = f"{where} can't be unassigned since it is not in the current assignment"
                    raise KafkaException(KafkaError(KafkaError._INVALID_ARG, text))
            self._core.is_assigned_by_application = True
            self._core.remove(chosen)

    def assignment(self) -> list[TopicPartition]:
        """Return the partitions that are read, each with the offset it was assigned with."""
        self._check()
        with self._core.arrived:
            return [
                self._core.options.positions.partition(partition.topic, partition.number, partition.assigned_position)
                for partition in self._core.subscription
            ]

    # --- positions ----------------------------------------------------------------------------------------------------

    def seek(self, partition: TopicPartition) -> None:
        """Go on reading the partition at its `offset`; what was read ahead is dropped.

        In commit order that is a place, and within the transaction there it goes on at its `offset_in_transaction`.

        Raises:
            TypeError: this is not a partition.
            KafkaException: `_STATE`: it is not assigned; `_UNKNOWN_PARTITION`: nor was any of its topic;
                `_INVALID_ARG`: one cannot seek to OFFSET_STORED, or the offset is of the other order.
        """
        self._check()
        wanted = check_partition(partition)
        core = self._core
        with core.arrived:
            assigned = core.find(wanted)
            prefix = f"Failed to seek to offset {wanted.offset}"
            if assigned is None:
                raise failure(core.code_of_unassigned(wanted), prefix)
            if wanted.offset == OFFSET_STORED:
                raise failure(KafkaError._INVALID_ARG, prefix)
            core.options.positions.check([wanted], prefix)
            core.subscription.seek(assigned, core.options.positions.of(wanted))
            core.read_on()

    def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Return for each partition the next offset to be handed out, or OFFSET_INVALID if nothing was.

        Markers and aborted records that follow the last record are stepped over.  In commit order the offset is a
        place, with `offset_in_transaction` beside it.
        """
        self._check()
        answer = []
        with self._core.arrived:
            kept = self._core.subscription.begins_of_kept()
            for partition in check_partitions(partitions):
                assigned = self._core.find(partition)
                position = OFFSET_INVALID if assigned is None else kept.get(assigned, assigned.position)
                answer.append(self._core.options.positions.partition(partition.topic, partition.partition, position))
        return answer

    def pause(self, partitions: list[TopicPartition]) -> None:
        """Hand out no more records of these partitions; those that are not assigned are left alone.

        They stay paused until they are resumed, also if they go, in a rebalance for example, and come back.
        """
        self._check()
        with self._core.arrived:
            for assigned in self._assigned(partitions):
                self._core.subscription.pause(assigned)

    def resume(self, partitions: list[TopicPartition]) -> None:
        """Hand out records of these partitions again, or once they are assigned again."""
        self._check()
        with self._core.arrived:
            self._core.subscription.paused -= {(it.topic, it.partition) for it in check_partitions(partitions)}
            for assigned in self._assigned(partitions):
                self._core.subscription.resume(assigned)
            self._core.arrived.notify_all()
            self._core.read_on()

    def _assigned(self, partitions: list[TopicPartition]) -> list[AssignedPartition]:
        return [found for found in map(self._core.find, check_partitions(partitions)) if found is not None]

    # --- committed offsets --------------------------------------------------------------------------------------------

    def store_offsets(self, message: Message | None = None, offsets: list[TopicPartition] | None = None) -> None:
        """Let a later commit without arguments commit the offset after the message, or these offsets.

        One below zero takes back what was stored and is not committed yet.

        Raises:
            ValueError: neither or both are given.
            KafkaException: `_INVALID_ARG`: `enable.auto.offset.store` is set, or the message is not a record;
                `_STATE`: none of the partitions is assigned; `_UNKNOWN_PARTITION`: nor was any of that topic.
        """
        self._check()
        chosen = chosen_offsets(message, offsets, "store", self._core.options.positions)
        if chosen is None:
            raise ValueError("expected either message or offsets")
        if self._core.options.stores_offsets:
            raise failure(KafkaError._INVALID_ARG, "StoreOffsets failed")
        with self._core.arrived:
            found = [
                (assigned, self._core.options.positions.of(partition))
                for partition in chosen
                if (assigned := self._core.find(partition)) is not None and not assigned.is_unread
            ]
            if chosen and not found:
                raise failure(self._core.code_of_unassigned(chosen[-1]), "StoreOffsets failed")
            for assigned, position in found:
                assigned.stored = position if position >= 0 else OFFSET_INVALID

    def commit(
        self,
        message: Message | None = None,
        offsets: list[TopicPartition] | None = None,
        asynchronous: bool = True,
        *,
        connection: object = None,
    ) -> list[TopicPartition] | None:
        """Commit the offset after the message, these offsets, or what is stored and not committed yet.

        Asynchronously nothing is returned, and `on_commit` hears of it from a later `poll()`.  Otherwise the committed
        partitions are returned, each with its own error.

        With a `connection` to the same database the offsets become part of the database transaction that is open on
        it: they are committed with the caller's rows, by the caller's own commit, or not at all.  The connection is a
        `Connection` or `Session` of SQLAlchemy, a `psycopg.Connection` or a `sqlite3.Connection`; the call runs on the
        caller's thread and returns the partitions.  Others that commit for the group wait until the caller commits.
        After an error the caller rolls back.  After the rollback the consumer reads on where it was: `seek()` back, or
        make a new consumer.  Offsets without arguments are all that are stored, since the consumer does not learn what
        became of them.  On SQLite a savepoint with no BEGIN before it commits the offsets when it ends: write something
        before `begin_nested()`, or set SQLAlchemy's transaction control as its documentation says.

        Raises:
            TypeError: this is not a connection of these kinds.
            ValueError: both message and offsets are given.
            KafkaException: `_INVALID_ARG`: the message is not a record; if not asynchronous also `_NO_OFFSET`: there is
                nothing to commit; UNKNOWN_MEMBER_ID, ILLEGAL_GENERATION, FENCED_INSTANCE_ID: the group is another
                consumer's now; and what the database answers.  With a connection also `_INVALID_ARG`:
                `enable.auto.commit` is set, `_STATE`: its database transaction has failed before, INVALID_REQUEST: it
                is on another database, votes for a producer's transaction, or is not usable (a session that would begin
                with a savepoint on SQLite, say), `_TIMED_OUT`, not retriable: repeat the database transaction; if the
                `__cause__` is a WriteConflict, its own is SQLAlchemy's around the driver's (40001, 40P01).
        """
        self._check()
        core = self._core
        chosen = chosen_offsets(message, offsets, "commit", core.options.positions)
        if connection is not None:
            return core.commit_on(connection, core.commits.stored() if chosen is None else chosen)
        if asynchronous:
            if core.submit_chosen(chosen, asynchronous=True) is None and self._callbacks["on_commit"] is not None:
                core.inbox.put(CommitEvent(KafkaError(KafkaError._NO_OFFSET), []))
            return None

        def submit() -> Future[CommitResult]:
            submitted = core.submit_chosen(chosen, asynchronous=False)
            if submitted is None:
                raise failure(KafkaError._NO_OFFSET, "Commit failed")
            return submitted

        result = core.answer(submit, Deadline(core.options.request_timeout_seconds), "Commit failed")
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
        chosen, deadline = check_partitions(partitions), Deadline(check_timeout(timeout))
        prefix = "Failed to get committed offsets"
        if not chosen:
            return []
        while True:
            try:
                return self._core.answer(
                    lambda: self._core.commits.read(chosen), deadline, prefix, unless=UnstableOffsetCommit
                )
            except UnstableOffsetCommit:
                self._core.note_held_back()
                left_seconds = deadline.left_seconds()
                if left_seconds <= 0:
                    raise failure(KafkaError._TIMED_OUT, prefix) from None
            time.sleep(min(UNSTABLE_PAUSE_SECONDS, left_seconds))
            self._check()

    # --- watermarks, times, topics and the cluster --------------------------------------------------------------------

    def get_watermark_offsets(
        self, partition: TopicPartition, timeout: float = -1, cached: bool = False
    ) -> tuple[int, int]:
        """Return the first offset of the partition and the one after the last that this consumer may read.

        With `isolation.level=read_committed` the latter is the last stable offset, in commit order the high watermark.
        `cached`: as the last reading found them, with the high watermark; OFFSET_INVALID before the first one.

        Raises:
            KafkaException: `_UNKNOWN_PARTITION`, `_TIMED_OUT`, and what the database answers.
        """
        self._check()
        wanted, deadline = check_partition(partition), Deadline(check_timeout(timeout))
        if cached:
            with self._core.arrived:
                assigned = self._core.find(wanted)
                bounds = None if assigned is None else assigned.bounds
            if bounds is None:
                return OFFSET_INVALID, OFFSET_INVALID
            return bounds.log_start_offset, bounds.high_watermark
        lookups = self._core.lookups
        return self._core.ask(lambda: lookups.watermarks(wanted), deadline, "Failed to get watermark offsets")

    def offsets_for_times(self, partitions: list[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
        """Return for each partition the first offset at or after the time that stands in its `offset`.

        Times are milliseconds since 1970; OFFSET_END: no such record yet.  A missing partition has an `error`.

        Raises:
            KafkaException: `_INVALID_ARG`: the list is empty; `_UNKNOWN_PARTITION`: none of them exists; `_TIMED_OUT`,
                and what the database answers.
        """
        self._check()
        chosen, deadline = check_partitions(partitions), Deadline(check_timeout(timeout))
        if not chosen:
            raise failure(KafkaError._INVALID_ARG, "Failed to get offsets")
        lookups = self._core.lookups
        return self._core.ask(lambda: lookups.offsets_for_times(chosen), deadline, "Failed to get offsets")

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> ClusterMetadata:
        """Return the cluster with all topics, or with this one.

        Raises:
            TypeError: the topic is not text.
            KafkaException: `_TRANSPORT`: the database did not answer in time; and what it answers.
        """
        self._check(HANDLE_CLOSED_TEXT)
        if topic is not None and not isinstance(topic, str):
            raise TypeError(f"argument 1 must be str or None, not {type(topic).__name__}")
        directory = self._core.directory
        return self._core.ask(
            lambda: directory.cluster_metadata(topic),
            Deadline(check_timeout(timeout)),
            "Failed to get metadata",
            late_code=KafkaError._TRANSPORT,
        )

    def cluster_id(self, timeout: float = -1) -> str:
        """Return the identity of the store.

        Raises:
            KafkaException: `_TIMED_OUT`, and what the database answers.
        """
        self._check(HANDLE_CLOSED_TEXT)
        connection = self._core.connection
        return self._core.ask(
            lambda: connection.store().store_uuid, Deadline(check_timeout(timeout)), "Failed to retrieve cluster id"
        )

    def set_sasl_credentials(self, username: str, password: str) -> None:
        """Do nothing: the database's URL holds the credentials.

        Raises:
            TypeError: one of them is not text.
        """
        self._check(HANDLE_CLOSED_TEXT)
        for value in (username, password):
            if not isinstance(value, str):
                raise TypeError(f"must be str, not {type(value).__name__}")

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the partitions back, commit what is stored if `enable.auto.commit` is set, and leave the group.

        It takes ten seconds at most, whatever the database does; a second call does nothing.

        Raises:
            Exception: what a callback raised; the consumer is closed nevertheless.
        """
        if self._closed:
            return
        if self._connection.is_lifeless:
            self._closed = True
            self._core.outlet.close()
            self._core.connection.close()
            return
        deadline, errors = Deadline(CLOSE_SECONDS), list[Exception]()
        try:
            self._serve_rest(errors)
            self._core.group.unsubscribe()
            self._serve_rest(errors)
        except BaseException as error:
            deadline = after_error(error, deadline)
            raise
        finally:
            try:
                self._finish(deadline)
            finally:
                if self._closed:
                    to_its_end(partial(self._serve_rest, errors, has_left=True))  # type: ignore[unreachable]  # _finish sets it
        if errors:
            raise errors[0]

    def _serve_rest(self, errors: list[Exception], *, has_left: bool = False) -> None:
        """Serve what is left of rebalances and commits; an error keeps no other callback from its call."""
        # Not what comes meanwhile: on_commit may make another one each time.
        for _ in range(len(self._core.inbox.events)):
            try:
                self._core.inbox.serve_first(partial(self._serve_last, has_left))
            except Exception as error:  # noqa: BLE001 - it is raised in the end
                errors.append(error)

    def _serve_last(self, has_left: bool, taken: list[Event]) -> None:
        event = taken[0] if taken else None
        if isinstance(event, CommitEvent):
            self._committed(event, taken)
        elif isinstance(event, RebalanceEvent) and not has_left:
            self._rebalance(event, taken)

    def _finish(self, deadline: Deadline) -> None:
        core = self._core
        with core.arrived:
            if self._closed:
                return
            core.clear()
            core.group.leave_now()
            self._closed = True
            core.arrived.notify_all()
            core.fetcher.stop()
            core.group.stop()
        try:
            core.finish_work(deadline)
        except BaseException as error:
            deadline = after_error(error, deadline)
            raise
        finally:
            if not core.close(deadline):
                core.logger.warning(
                    "a thread of %r is still waiting for the database; it ends on its own",
                    self,
                    extra={"event": "thread_left", "group": core.options.group_id},
                )
            self._finalizer.detach()

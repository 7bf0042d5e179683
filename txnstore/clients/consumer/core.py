"""The core of a consumer: its state and its threads, and what they do in the background.

It does not know the `Consumer`: so one that is dropped can be collected, and its threads end.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, Final, TypeVar

from txnstore.clients.callbacks import Callbacks, EventQueue, trouble_of
from txnstore.clients.configuration.configuration import Configuration
from txnstore.clients.connection import DatabaseLook, StoreConnection, unreachable
from txnstore.clients.consumer.arguments import ConsumerOptions, consumer_options, failure
from txnstore.clients.consumer.assigned_partition import AssignedPartition
from txnstore.clients.consumer.commits import CommitResult, OffsetCommits
from txnstore.clients.consumer.events import (
    MESSAGE_INTERVAL_SECONDS,
    AnswerEvent,
    CommitEvent,
    Event,
    MessageEvent,
    RebalanceEvent,
    RebalanceKind,
    error_reporter,
    prefixed,
    put_call,
)
from txnstore.clients.consumer.fetcher import Fetcher
from txnstore.clients.consumer.orders import AtomicOrder, DeliveryOrder, RoundRobin
from txnstore.clients.consumer.reader import PartitionLookups
from txnstore.clients.consumer.subscription import Subscription
from txnstore.clients.membership.member import ConsumerMember
from txnstore.clients.membership.requests import GroupRequests
from txnstore.clients.model.errors import KafkaError, KafkaException, joined_error_of, kafka_error_of
from txnstore.clients.model.message import Message, error_message
from txnstore.clients.model.topic_partition import OFFSET_STORED, TopicPartition
from txnstore.clients.outlet import new_outlet
from txnstore.clients.overdue_help import ASK_SECONDS_MIN, end_overdue
from txnstore.clients.statistics import Statistics, traffic_facts
from txnstore.clients.topic_directory import TopicDirectory
from txnstore.clients.upkeep import FIRST_LOOK_SECONDS, LOOK_SECONDS
from txnstore.clients.worker import Duties, Worker, WorkerClosed
from txnstore.db.backend import Limits
from txnstore.db.cluster.cluster import Cluster, LeftOut
from txnstore.db.store import Store
from txnstore.deadline import Condition, Deadline, result_within, to_its_end
from txnstore.errors import StoreClosed, TxnStoreError
from txnstore.model import GroupMembership, PartitionName
from txnstore.trouble import RepeatedTrouble

Result = TypeVar("Result")

#: A reader that an open transaction holds back helps after this long, and then again at most this often.
HELP_AFTER_SECONDS: Final = 1.0
HELP_INTERVAL_SECONDS: Final = 5.0

#: How long one try of a call to the database takes at most.
TRY_TIMEOUT_MS: Final = 500
#: How long close() goes on once it is interrupted.
INTERRUPTED_SECONDS: Final = 0.5
_EAGER_TEXT: Final = (
    "Changes to the current assignment must be made using assign() when rebalance protocol type is EAGER"
)
_numbers: Final = itertools.count(1)


class ConsumerCore:
    """The state and the threads of one consumer."""

    def __init__(self, configuration: Configuration, callbacks: Callbacks) -> None:
        """Make everything; no thread runs and nothing is opened yet. The callbacks are known weakly."""
        self._has_commit_callback = callbacks["on_commit"] is not None
        self.options = options = consumer_options(configuration)
        self.logger = configuration.logger
        self.lock = lock = threading.RLock()
        """Guards all of the consumer's state."""
        self.arrived = Condition(lock)
        """Notified when there is something for the application."""
        name = f"txnstore-consumer-{options.group_id[:40]}"
        # Short tries: between them, what waits for the database checks whether it is still wanted.
        self.connection = StoreConnection(configuration, limits=Limits(retry_timeout_ms=TRY_TIMEOUT_MS))
        self.directory = TopicDirectory(
            self.connection, refresh_ms=options.metadata_refresh_ms, allow_create=options.creates_topics
        )
        self.worker = Worker(name, needs_thread=False)
        self.inbox: EventQueue[Event] = EventQueue(self.arrived)
        self.outlet = new_outlet(self.inbox.events)
        """What poll() hands out without the lock."""
        self.connection.on_inherited = self.outlet.close
        #: Which errors poll() has returned a moment ago.
        self._returned_errors = RepeatedTrouble(MESSAGE_INTERVAL_SECONDS)
        self._error_reporter = error_reporter(
            self.inbox, callbacks.weakly("error_cb"), self.logger, lambda: self.connection.is_alone
        )
        self.order: DeliveryOrder = AtomicOrder(self.arrived.notify_all) if options.is_atomic else RoundRobin()
        """Of several partitions, which one hands out what comes next."""
        self.subscription = Subscription(
            stores_offsets=options.stores_offsets,
            reports_eof=options.reports_eof,
            records_low=options.read_ahead_records,
            bytes_low=options.read_ahead_bytes,
            # A broker that is asked for no bytes at all answers at once.
            eof_wait_seconds=options.fetch_wait_seconds if options.fetch_min_bytes else 0.0,
            positions=options.positions,
            order=self.order,
            outlet=self.outlet,
        )
        self.group = ConsumerMember(
            f"{name}-group",
            lock=self.arrived,
            work_due=Condition(lock),
            outlet=self.outlet,
            inbox=self.inbox,
            worker=self.worker,
            requests=GroupRequests(self.connection, self.directory, options),
            options=options,
            on_error=self.report_background_error,
            logger=self.logger,
        )
        self.commits = OffsetCommits(
            lock=self.arrived,
            subscription=self.subscription,
            worker=self.worker,
            connection=self.connection,
            directory=self.directory,
            options=options,
            membership=self._committer,
            membership_now=self.group.membership_now,
            on_error=self.group.noticed,
        )
        self.lookups = PartitionLookups(self.connection, self.directory, options)
        self.fetcher = Fetcher(
            f"{name}-fetcher",
            lock=lock,
            arrived=self.arrived,
            subscription=self.subscription,
            connection=self.connection,
            directory=self.directory,
            options=options,
            duties=self._duties(configuration, callbacks),
            group=self.group,
            is_awaited=lambda: self.group.waiting > 0,
            on_error=self.report_background_error,
            logger=self.logger,
        )
        self._look = (
            None
            if callbacks["error_cb"] is None
            else DatabaseLook(self.connection, self.worker.submit, self.report_background_error)
        )
        """Tells an idle application that has an error_cb of a database that is away."""
        self.withholds_what_was_read = False
        """Whether what was gathered may be given back later, too: `let_go` is called once it cannot be any more."""
        self.holds_some = False
        """Whether a call that goes on has read something before, which is to be returned before it is another's."""
        self.is_assigned_by_application = False
        """Whether it has changed the assignment in the callback that is served, so that nothing else has to."""
        self.is_assigned_alone = False
        """Whether the assignment was made after unsubscribe(): what the group takes back is no longer there."""
        self._assigned_topics: set[str] = set()
        """The topics of which a partition was ever assigned."""
        self._assigned_alone: set[PartitionName] = set()
        """What the application has assigned since the consumer was last given something by its group."""
        self.is_losing = False
        """Whether the partitions being removed already belong to another consumer: nothing is committed for them."""
        self._helped_at = self._ended_overdue_at = -math.inf
        self._commit_under_way: Future[CommitResult] | None = None

    # --- the worker's answers ----------------------------------------------------------------------------------------

    def ask(
        self, work: Callable[[], Result], deadline: Deadline, prefix: str, *, late_code: int = KafkaError._TIMED_OUT
    ) -> Result:
        """Let the worker do this, and return its result as `answer` does."""
        return self.answer(lambda: self.worker.submit(work), deadline, prefix, late_code=late_code)

    def answer(
        self,
        submit: Callable[[], Future[Result]],
        deadline: Deadline,
        prefix: str,
        *,
        unless: type[TxnStoreError] | tuple[()] = (),
        late_code: int = KafkaError._TIMED_OUT,
    ) -> Result:
        """Return the worker's result if it comes in time; all errors but `unless` get the prefix."""
        began = time.monotonic()
        try:
            future = submit()
        except RuntimeError:
            # Closed by another thread since the call began.
            raise RuntimeError("Consumer closed") from None
        try:
            return result_within(future, deadline.left_seconds())
        except TimeoutError:
            # The result is no longer needed.
            future.cancel()
            if late_code != KafkaError._TIMED_OUT or self.connection.trouble_since(began) is not None:
                raise unreachable(self.connection, prefix, began, code=late_code) from None
            raise failure(KafkaError._TIMED_OUT, prefix) from None
        except CancelledError:
            raise RuntimeError("Consumer closed") from None
        except unless:
            raise
        except TxnStoreError as error:
            raise KafkaException(prefixed(prefix, kafka_error_of(error))) from error
        except KafkaException as error:
            raise KafkaException(prefixed(prefix, error.args[0])) from error

    # --- the assignment; the lock is held ----------------------------------------------------------------------------

    def find(self, partition: TopicPartition) -> AssignedPartition | None:
        """Return the partition as it is assigned, or None if it is not."""
        return self.subscription.find(partition.topic, partition.partition)

    def code_of_unassigned(self, partition: TopicPartition) -> int:
        """Return why nothing is done with a partition that is not assigned, or not the one any more that was read."""
        is_in_use = partition.topic in self._assigned_topics and self.find(partition) is None
        return KafkaError._STATE if is_in_use else KafkaError._UNKNOWN_PARTITION

    def add(self, partitions: Iterable[TopicPartition]) -> None:
        """Read these partitions as well, from their offsets on; from committed ones once own commits are done."""
        committing, waiting = self.commits.under_way, list[AssignedPartition]()
        for partition in partitions:
            self._assigned_topics.add(partition.topic)
            self.subscription.add(partition.topic, partition.partition, self.options.positions.of(partition))
            added = self.find(partition)
            if committing is not None and added is not None and added.start == OFFSET_STORED:
                added.retry_at = math.inf
                waiting.append(added)
        if committing is not None and waiting:
            committing.add_done_callback(lambda _: self._begin(waiting))
        self.read_on()

    def _begin(self, waiting: Sequence[AssignedPartition]) -> None:
        """Let partitions be read, unless the application has sought there since."""
        if self.fetcher.is_closing:
            # The worker drops its jobs, under a lock of its own.
            return
        with self.arrived:
            for partition in waiting:
                if partition.start == OFFSET_STORED and partition.retry_at == math.inf:
                    partition.retry_at = 0.0
            self.fetcher.start()

    def remove(self, partitions: Iterable[TopicPartition]) -> None:
        """Stop reading these partitions, and commit what is stored of them unless they are lost."""
        removed = (self.subscription.remove(partition.topic, partition.partition) for partition in partitions)
        self._commit_removed([partition for partition in removed if partition is not None])

    def clear(self) -> None:
        """Stop reading, and commit what is stored unless it is lost."""
        self._commit_removed(self.subscription.clear())

    def _commit_removed(self, removed: list[AssignedPartition]) -> None:
        if removed and self.options.commits_automatically and not self.is_losing:
            self._commit_in_background(removed)

    def refuse_if_eager(self) -> None:
        """Refuse to add partitions to those that the group takes back and gives as a whole."""
        if self.group.is_subscribed and not self.options.is_cooperative:
            raise KafkaException(KafkaError(KafkaError._STATE, _EAGER_TEXT))

    def replace(self, partitions: Iterable[TopicPartition], prefix: str) -> None:
        """Read these partitions, as the application says, and no others.

        Not as a member of a cooperative group, whose callbacks name only what comes or goes: nobody else would read
        what it keeps.
        """
        if self.options.is_cooperative and self.group.listens:
            raise failure(KafkaError._STATE, prefix)
        self.clear()
        self.is_assigned_alone = not self.group.wants_topics
        self.add_as_told(partitions)

    def add_as_told(self, partitions: Iterable[TopicPartition]) -> None:
        """Read these partitions, too, as the application says."""
        chosen = list(partitions)
        if self.group.wants_topics:
            self._assigned_alone.clear()
        else:
            self._assigned_alone.update(PartitionName(partition.topic, partition.partition) for partition in chosen)
        self.is_assigned_by_application = True
        self.add(chosen)

    def _committer(self, partitions: Iterable[TopicPartition]) -> GroupMembership:
        """Return in whose name these are committed: who has left the group manages what it has assigned itself since.

        Of other partitions it has offsets from before, behind which the group may have gone on.
        """
        with self.arrived:
            named = {PartitionName(each.topic, each.partition) for each in partitions if each.offset >= 0}
            if self.group.has_left and self._assigned_alone and named <= self._assigned_alone:
                return self.group.alone
            return self.group.membership

    def change_assignment(self, event: RebalanceEvent) -> None:
        """Do what a rebalance asks for if the application has not done it itself."""
        partitions = event.topic_partitions()
        with self.arrived:
            if event.kind is RebalanceKind.ASSIGN:
                if not self.group.is_current(event):
                    # Lost while the application was told of it.
                    return
                self._assigned_alone.clear()
                if not self.options.is_cooperative:
                    self.clear()
                self.add(partition for partition in partitions if self.find(partition) is None)
            elif self.is_assigned_alone:
                return
            elif self.options.is_cooperative:
                self.remove(partitions)
            else:
                self.clear()

    def rebalance(
        self,
        event: RebalanceEvent,
        taken: list[Event],
        tell: Callable[[list[TopicPartition]], object] | None,
    ) -> None:
        """Tell the application, do what it has not done itself, and let the group go on.

        The event is out of `taken` as soon as an interrupt does not keep it from that any more.
        """
        partitions = event.topic_partitions()
        going = [] if event.kind is RebalanceKind.ASSIGN else self._withdraw(partitions)
        change, end = partial(self._change, event, going), partial(self._end_rebalance, event)
        self.is_assigned_by_application = False
        self.is_losing = event.kind is RebalanceKind.LOST
        try:
            # No call between these.
            del taken[:]
            if tell is not None:
                tell(partitions)
        finally:
            try:
                change()
                end()
            except BaseException:
                # An interrupt, or no thread can be started. The group would wait for ever; and what is done already is
                # not done twice.
                try:
                    to_its_end(change)
                finally:
                    to_its_end(end)
                raise

    def _withdraw(self, partitions: Iterable[TopicPartition]) -> list[AssignedPartition]:
        """Hand out nothing of what goes: another thread, or the callback, may poll while the application is told."""
        with self.arrived:
            going = [assigned for partition in partitions if (assigned := self.find(partition)) is not None]
            for assigned in going:
                self.subscription.pause(assigned, "rebalance")
            return going

    def _restore(self, going: Iterable[AssignedPartition]) -> None:
        """Read on what the application has kept of it."""
        with self.arrived:
            kept = [
                assigned for assigned in going if self.subscription.find(assigned.topic, assigned.number) is assigned
            ]
            for assigned in kept:
                self.subscription.resume(assigned, "rebalance")
            if kept:
                self.arrived.notify_all()
                self.read_on()

    def _change(self, event: RebalanceEvent, going: Iterable[AssignedPartition]) -> None:
        if not self.is_assigned_by_application:
            self.change_assignment(event)
        self._restore(going)

    def _end_rebalance(self, event: RebalanceEvent) -> None:
        self.is_losing = False
        self.group.served(event)

    def read_on(self) -> None:
        """Let the fetching thread look for work."""
        self.subscription.wants_more = False
        self.fetcher.start()

    def polled(self, *, into: list[Message] | None = None, goes_on: bool = False) -> None:
        """Note that a call begins; nothing of what it gathers `into` a list is committed until `gathered`.

        Unless it `goes_on` with what an earlier one has kept, that is given back.
        """
        with self.arrived:
            self.group.polled()
            if not goes_on:
                self.subscription.return_kept()
            if into is not None:
                self.subscription.withhold(into)

    def gathered(self, messages: list[Message] | None = None) -> None:
        """Note that the call is over: it returns what it has gathered, keeps it, or has given it back."""
        # At once: no partition is given back between these.
        with self.arrived:
            if messages is not None:
                self.subscription.gathered.pop(id(messages), None)
            if not self.withholds_what_was_read:
                self.let_go()

    def give_back(self, messages: list[Message]) -> None:
        """Hand out again what a call has gathered that does not return it: it is over."""
        try:
            self._give_back(messages)
        except BaseException:
            # A second Ctrl-C: nobody else would ever hand them out, and later ones would be stored.
            to_its_end(partial(self._give_back, messages))
            raise

    def _give_back(self, messages: list[Message]) -> None:
        with self.arrived:
            self.subscription.give_back(messages)
            self._put_back(messages)
            self.arrived.notify_all()
        self.gathered(messages)

    def _put_back(self, messages: Sequence[Message]) -> None:
        """Put back first the errors of partitions that are not assigned: the subscription has put back the rest."""
        waiting = [event.message for event in self.inbox.events if isinstance(event, MessageEvent)]
        assigned = {(partition.topic, partition.number) for partition in self.subscription}
        for message in reversed(messages):
            error, place = message.error(), (message.topic(), message.partition())
            # An interrupt may come twice; and whose end it is does not matter any more.
            is_back = place in assigned or any(it is message for it in waiting)
            if error is not None and error.code() != KafkaError._PARTITION_EOF and not is_back:
                self.inbox.events.appendleft(MessageEvent(message))

    def is_first_returned(self, messages: Sequence[Message] = ()) -> bool:
        """Return whether these messages, and what is held, are to reach the application before an event is served."""
        if messages or not self.holds_some:
            return bool(messages)
        with self.arrived:
            events = self.inbox.events
            return bool(events) and isinstance(events[0], AnswerEvent | RebalanceEvent)

    def let_go(self, unreturned: Iterable[Message] = ()) -> None:
        """Count what was gathered as read, up to what is unreturned: it reaches the application now."""
        with self.arrived:
            self.subscription.let_go(unreturned)

    # --- trouble -----------------------------------------------------------------------------------------------------

    def look_for_database(self) -> None:
        """Check whether the database can be reached if nothing else would show it, because nothing is read."""
        if self._look is not None and not len(self.subscription):
            with contextlib.suppress(RuntimeError):  # closed by another thread since the call began
                self._look.polled()

    def report_background_error(self, error: BaseException) -> None:
        """Tell the application what went wrong in the background: passing trouble by error_cb, the rest by poll()."""
        if isinstance(error, StoreClosed):
            return
        if isinstance(error, TxnStoreError):
            kafka_error = kafka_error_of(error)
        elif isinstance(error, KafkaException):
            kafka_error = error.args[0]
        else:
            kafka_error = KafkaError(
                KafkaError._FAIL, f"an internal error in txnstore: {type(error).__name__}: {error}"
            )
        if kafka_error.retriable() or getattr(error, "outcome_unknown", False):
            self._error_reporter.report(kafka_error)
        else:
            with self.arrived:
                if self._returned_errors.may_be_told(trouble_of(kafka_error)):
                    self.inbox.put(MessageEvent(error_message(kafka_error)))

    # --- commits -----------------------------------------------------------------------------------------------------

    def submit_chosen(
        self, chosen: Sequence[TopicPartition] | None, *, asynchronous: bool
    ) -> Future[CommitResult] | None:
        """Commit these offsets, by default what is stored; None: there are none, or the consumer has been closed.

        Asynchronously on_commit is called.
        """
        # Under the lock: a commit of more that came in between would be taken back.
        with self.arrived:
            offsets = self.commits.stored() if chosen is None else chosen
            if all(partition.offset < 0 for partition in offsets):
                return None
            return self.submit_commit(offsets) if asynchronous else self.commits.submit(offsets)

    def commit_on(self, connection: object, chosen: list[TopicPartition]) -> list[TopicPartition]:
        """Commit the offsets in the database transaction on the caller's connection; see `Consumer.commit`."""
        if self.options.commits_automatically:
            reason = (
                "Commit failed: with a connection, enable.auto.commit must be false: offsets that are committed"
                " automatically would remain after a rollback of the connection's database transaction"
            )
            raise KafkaException(KafkaError(KafkaError._INVALID_ARG, reason))
        if all(partition.offset < 0 for partition in chosen):
            raise failure(KafkaError._NO_OFFSET, "Commit failed")
        # Brings psycopg along, which a consumer of SQLite never needs.
        from txnstore.db.callers.connections import callers_connection

        try:
            return self.commits.commit_on(callers_connection(connection), chosen)
        except TxnStoreError as error:
            raise KafkaException(prefixed("Commit failed", joined_error_of(error))) from error

    def submit_commit(
        self, offsets: Sequence[TopicPartition], removed: Sequence[AssignedPartition] = ()
    ) -> Future[CommitResult] | None:
        """Commit in the background; the next poll() calls on_commit."""
        try:
            future = self.commits.submit(offsets, removed)
        except WorkerClosed:
            # And with it the consumer.
            return None
        future.add_done_callback(self._commit_done)
        return future

    def _commit_in_background(self, removed: Sequence[AssignedPartition] | None = None) -> Future[CommitResult] | None:
        """Commit what is stored, if anything is: of partitions that were removed, by default of all that are there."""
        # Under the lock, as above.
        with self.arrived:
            offsets = self.commits.stored(removed)
            if all(partition.offset < 0 for partition in offsets):
                return None
            return self.submit_commit(offsets, removed or ())

    def _commit_done(self, future: Future[CommitResult]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self.report_background_error(error)
            return
        result = future.result()
        if self._has_commit_callback:
            self.inbox.put(CommitEvent(result.error, list(result.partitions)))
        elif result.error is not None:
            self.logger.warning(
                "committing offsets failed: %s",
                result.error.str(),
                extra={
                    "event": "offsets_not_committed",
                    "group": self.options.group_id,
                    "client_id": self.options.client_id,
                    "error": result.error.name(),
                },
            )

    # --- from time to time, in the fetching thread -------------------------------------------------------------------

    def _duties(self, configuration: Configuration, callbacks: Callbacks) -> Duties:
        duties = Duties()
        duties.add(HELP_AFTER_SECONDS, self._help, lambda: self.fetcher.may_be_held_back)
        duties.add(LOOK_SECONDS, self.connection.upkeep.run, first_seconds=FIRST_LOOK_SECONDS)
        if self.options.commits_automatically and self.options.commit_interval_seconds > 0:
            duties.add(self.options.commit_interval_seconds, self._commit_automatically)
        interval_seconds = configuration["statistics.interval.ms"] / 1000
        statistics = Statistics(
            name=f"consumer-{next(_numbers)}",
            client_id=configuration["client.id"],
            kind="consumer",
            interval_seconds=interval_seconds,
            callback=callbacks.weakly("stats_cb"),
            add_event=partial(put_call, self.inbox),
            collect=self._facts,
            connection=self.connection,
        )
        if statistics.due_seconds(0.0) is not None:
            duties.add(interval_seconds, statistics.run)
        return duties

    def _commit_automatically(self) -> None:
        if self._commit_under_way is None or self._commit_under_way.done():
            self._commit_under_way = self._commit_in_background()

    def _facts(self) -> dict[str, Any]:
        """Return librdkafka's statistics fields for topics and partitions."""
        with self.arrived:
            topics: dict[str, Any] = {}
            kept = self.subscription.begins_of_kept()
            for partition in self.subscription:
                topic = topics.setdefault(partition.topic, {"topic": partition.topic, "partitions": {}})
                position = kept.get(partition, partition.position)
                topic["partitions"][str(partition.number)] = _partition_facts(partition, position, self.options)
            return {
                "msg_cnt": self.subscription.buffered_records,
                "msg_size": self.subscription.buffered_bytes,
                "msg_max": 0,
                "msg_size_max": 0,
                "metadata_cache_cnt": len(self.directory.entries),
                "topics": topics,
                **traffic_facts(read=self.subscription.traffic),
            }

    # --- open transactions that hold the reader back -----------------------------------------------------------------

    def note_held_back(self) -> None:
        """Note that an open transaction keeps the application waiting, and end transactions whose time is up."""
        self.fetcher.note_held_back()
        now = time.monotonic()
        if now - self._ended_overdue_at >= ASK_SECONDS_MIN:
            self._ended_overdue_at = now
            self._submit_quietly(lambda: end_overdue(self.connection.store, (), self.connection.cluster))
        self._help()

    def _help(self) -> None:
        """Finish transactions that hold the reader back if their time is up, or if they are decided already."""
        since, now = self.fetcher.held_back_since, time.monotonic()
        if since is None or now - since < HELP_AFTER_SECONDS or now - self._helped_at < HELP_INTERVAL_SECONDS:
            return
        self._helped_at = now
        self._submit_quietly(self._recover)

    def _submit_quietly(self, work: Callable[[], object]) -> None:
        # Where the worker takes no more, the consumer has been closed.
        with contextlib.suppress(RuntimeError):
            self.worker.submit(work)

    def _recover(self) -> None:
        try:
            # The transaction may be coordinated in any of the databases.
            cluster = self.connection.cluster()
            left_out: LeftOut = {}
            for store in cluster.stores(left_out):
                self._recover_in(store, cluster)
            for error in left_out.values():
                self.logger.debug("could not help with open transactions: %s", error)
        except TxnStoreError as error:
            self.logger.debug("could not help with open transactions: %s", error)

    def _recover_in(self, store: Store, cluster: Cluster) -> None:
        # A consumer that nothing holds back does not wait for this import.
        from txnstore.transactions.recovery import recover

        try:
            recover(store, cluster)
        except TxnStoreError as error:
            # Somebody else may help; the reader only waits longer.
            self.logger.debug("could not help with open transactions: %s", error)

    # --- the end -----------------------------------------------------------------------------------------------------

    def finish_work(self, deadline: Deadline) -> None:
        """Wait until the worker has done everything it was given: it works in that order."""
        last = self.worker.submit(_nothing)
        try:
            last.exception(deadline.left_seconds())
        except (TimeoutError, CancelledError):
            last.cancel()

    def close(self, deadline: Deadline) -> bool:
        """End the threads and the connection until `deadline`; return whether they have ended."""
        try:
            return self._end_threads(deadline)
        finally:
            self.connection.close(deadline.left_seconds())

    def abandon(self) -> None:
        """End without waiting, because the consumer was dropped. Nothing is committed, as after a crash.

        A turn in the maintenance that closing it would have had is had by the thread that reads.
        """
        if self.connection.process_id != os.getpid():
            return
        if self.connection.leave_to(self.fetcher.do_last):
            self._end_threads(Deadline(0))
        else:
            self.close(Deadline(0))

    def _end_threads(self, deadline: Deadline) -> bool:
        try:
            self.group.stop()
            fetcher_ended = self.fetcher.close(deadline.left_seconds())
            group_ended = self.group.close(deadline.left_seconds())
        finally:
            worker_ended = self.worker.close(deadline.left_seconds())
        return fetcher_ended and group_ended and worker_ended


def after_error(error: BaseException, deadline: Deadline) -> Deadline:
    """Return until when to go on after an error: not for long after Ctrl-C."""
    return deadline if isinstance(error, Exception) else deadline.at_most(INTERRUPTED_SECONDS)


def _nothing() -> None:
    """Do nothing: the job after all others."""


def _partition_facts(partition: AssignedPartition, position: int, options: ConsumerOptions) -> dict[str, Any]:
    bounds, place = partition.bounds, options.positions.place
    end_offset = -1 if bounds is None else options.end_offset(bounds)
    # As librdkafka: after what is committed, or what was handed out if nothing is.
    known_offset = place(partition.committed if partition.committed >= 0 else position)
    return {
        "partition": partition.number,
        "fetchq_cnt": partition.buffered_records,
        "fetchq_size": partition.buffered_bytes,
        "lo_offset": -1 if bounds is None else bounds.log_start_offset,
        "hi_offset": -1 if bounds is None else bounds.high_watermark,
        "ls_offset": -1 if bounds is None else bounds.last_stable_offset,
        "app_offset": place(position),
        "stored_offset": place(partition.stored),
        "committed_offset": place(partition.committed),
        "consumer_lag": max(0, end_offset - known_offset) if end_offset >= 0 and known_offset >= 0 else -1,
    }

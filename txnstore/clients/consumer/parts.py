"""This file is what a consumer is made of, and what these parts do by themselves; none of them knows the consumer.

So a consumer that nobody holds any more can end its threads.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

from txnstore.clients.brokers import all_stores
from txnstore.clients.callbacks import Callbacks
from txnstore.clients.configuration.configuration import Configuration
from txnstore.clients.connection import DatabaseLook, StoreConnection
from txnstore.clients.consumer.assigned_partition import AssignedPartition
from txnstore.clients.consumer.commits import CommitResult, OffsetCommits
from txnstore.clients.consumer.error_messages import error_message
from txnstore.clients.consumer.events import CommitEvent, Inbox, StatisticsEvent
from txnstore.clients.consumer.fetcher import Fetcher, NoGroup
from txnstore.clients.consumer.home_fetchers import HomeFetchers
from txnstore.clients.consumer.lookups import ConsumerLookups
from txnstore.clients.consumer.options import consumer_options
from txnstore.clients.consumer.reader import PartitionReader
from txnstore.clients.consumer.statistics import consumer_facts
from txnstore.clients.consumer.subscription import Subscription
from txnstore.clients.membership.member import GroupMember
from txnstore.clients.membership.requests import GroupRequests
from txnstore.clients.membership.thread import GroupThread
from txnstore.clients.model.error_mapping import kafka_error_of
from txnstore.clients.model.kafka_error import KafkaError, KafkaException
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.clients.overdue_help import ASK_SECONDS_MIN, end_overdue
from txnstore.clients.statistics import Statistics
from txnstore.clients.topic_directory import TopicDirectory
from txnstore.clients.worker import Duties, Worker
from txnstore.db.backend import Limits
from txnstore.db.store import Store
from txnstore.errors import StoreClosed, TxnStoreError
from txnstore.transactions.recovery import recover

#: A reader that an open transaction holds back helps after this long, and then again at most this often (DESIGN 6.5).
HELP_AFTER_SECONDS: Final = 1.0
HELP_INTERVAL_SECONDS: Final = 5.0

#: How long one try of the database goes on by itself.
TRY_TIMEOUT_MS: Final = 500
_numbers: Final = itertools.count(1)


class ConsumerParts:
    """The state and the threads of one consumer."""

    def __init__(self, configuration: Configuration, callbacks: Callbacks) -> None:
        """Make everything; no thread runs and nothing is opened yet. The callbacks are known weakly."""
        self.configuration = configuration
        self._has_commit_callback = callbacks["on_commit"] is not None
        self._on_statistics = callbacks.weakly("stats_cb")
        self.options = options = consumer_options(configuration)
        self.logger = configuration.logger
        self.lock = lock = threading.RLock()
        """Guards all of the consumer's state."""
        self.arrived = threading.Condition(lock)
        """Notified when there is something for the application."""
        self.wanted = threading.Condition(lock)
        """Notified when there is something for the fetching thread."""
        stirred = threading.Condition(lock)
        name = f"txnstore-consumer-{options.group_id[:40]}"
        # Short tries: what waits for the database looks between them whether it is still wanted.
        self.connection = StoreConnection(configuration, limits=Limits(retry_timeout_ms=TRY_TIMEOUT_MS))
        self.directory = TopicDirectory(
            self.connection, refresh_ms=options.metadata_refresh_ms, allow_create=options.creates_topics
        )
        self.worker = Worker(name)
        self.inbox = Inbox(self.arrived, logger=self.logger, has_error_callback=callbacks["error_cb"] is not None)
        self.subscription = Subscription(
            stores_offsets=options.stores_offsets,
            reports_eof=options.reports_eof,
            records_low=options.read_ahead_records,
            bytes_low=options.read_ahead_bytes,
            # A broker that is asked for no bytes at all answers at once.
            end_wait_seconds=options.fetch_wait_seconds if options.fetch_min_bytes else 0.0,
        )
        self.group = GroupMember(
            lock=self.arrived,
            stirred=stirred,
            inbox=self.inbox,
            worker=self.worker,
            requests=GroupRequests(self.connection, self.directory, options),
            options=options,
            on_error=self.background_error,
        )
        self.group_thread = GroupThread(f"{name}-group", stirred=stirred, member=self.group, logger=self.logger)
        self.commits = OffsetCommits(
            lock=self.arrived,
            subscription=self.subscription,
            worker=self.worker,
            connection=self.connection,
            directory=self.directory,
            options=options,
            membership=lambda: self.group.membership,
            on_error=self.group.noticed,
        )
        self.lookups = ConsumerLookups(self.connection, self.directory, options.isolation)
        self._name = name
        self.fetcher = HomeFetchers(
            wanted=self.wanted, subscription=self.subscription, connection=self.connection, make=self._make_fetcher
        )
        self.look = (
            None
            if callbacks["error_cb"] is None
            else DatabaseLook(self.connection, self.worker.submit, self.background_error)
        )
        """What tells an idle application of a database that is away, if it wants to hear of it."""
        self._helped_at = self._ended_overdue_at = -math.inf
        self._commit_under_way: Future[CommitResult] | None = None

    def _make_fetcher(self, home: int | None, located: Callable[[], None]) -> Fetcher:
        is_first = home is None
        return Fetcher(
            f"{self._name}-fetcher" if is_first else f"{self._name}-fetcher-{home}",
            arrived=self.arrived,
            wanted=self.wanted,
            subscription=self.subscription,
            reader=PartitionReader(self.connection, self.directory, self.options, home),
            connection=self.connection,
            duties=self._duties() if is_first else Duties(),
            group=self.group if is_first else NoGroup(),
            look_again_seconds=self.options.look_again_seconds,
            min_bytes=self.options.fetch_min_bytes,
            wait_seconds=self.options.fetch_wait_seconds,
            on_error=self.background_error,
            logger=self.logger,
            located=located,
            takes_unlocated=is_first,
        )

    def background_error(self, error: BaseException) -> None:
        """Tell the application what went wrong while it did not ask: passing trouble by error_cb, else poll()."""
        if isinstance(error, StoreClosed):
            return
        if isinstance(error, TxnStoreError):
            kafka_error = kafka_error_of(error)
        elif isinstance(error, KafkaException):
            kafka_error = error.args[0]
        else:
            kafka_error = KafkaError(KafkaError._FAIL, f"an error within txnstore: {type(error).__name__}: {error}")
        if kafka_error.retriable() or getattr(error, "outcome_unknown", False):
            self.inbox.put_error(kafka_error)
            if kafka_error.code() == KafkaError._TRANSPORT and self.connection.is_alone:
                # Programs for a cluster wait for the second: here one database is all there is.
                self.inbox.put_error(
                    KafkaError(KafkaError._ALL_BROKERS_DOWN, f"1/1 brokers are down: {kafka_error.str()}")
                )
        else:
            self.inbox.put_message(error_message(kafka_error))

    def read_on(self) -> None:
        """Let the fetching thread look for work; the lock is held."""
        self.subscription.wants_more = False
        self.fetcher.start()

    def commit_in_background(
        self, partitions: Sequence[AssignedPartition] | None = None
    ) -> Future[CommitResult] | None:
        """Commit what is stored, if anything is; by default of all partitions."""
        offsets = self.commits.stored(partitions)
        if all(partition.offset < 0 for partition in offsets):
            return None
        return self.submit_commit(offsets)

    def submit_commit(self, offsets: Sequence[TopicPartition]) -> Future[CommitResult] | None:
        """Commit in the background; on_commit hears of it at the next poll()."""
        try:
            future = self.commits.submit(offsets)
        except RuntimeError:
            # The worker has been closed, and with it the consumer.
            return None
        future.add_done_callback(self._commit_done)
        return future

    def held_back(self) -> None:
        """Note that an open transaction keeps the application waiting."""
        with self.arrived:
            if self.fetcher.held_back_since is None:
                self.fetcher.held_back_since = time.monotonic()
        now = time.monotonic()
        if now - self._ended_overdue_at >= ASK_SECONDS_MIN:
            self._ended_overdue_at = now
            self._submit_quietly(lambda: end_overdue(self.connection.store, ()))
        self._help()

    def close(self, deadline: float) -> bool:
        """End the threads and the connection until `deadline`; return whether they have ended."""
        try:
            self.group_thread.stop()
            fetcher_ended = self.fetcher.close(deadline - time.monotonic())
            group_ended = self.group_thread.close(deadline - time.monotonic())
        finally:
            try:
                worker_ended = self.worker.close(deadline - time.monotonic())
            finally:
                self.connection.close(deadline - time.monotonic())
        return fetcher_ended and group_ended and worker_ended

    def abandon(self) -> None:
        """End without waiting: nobody holds the consumer any more. Nothing is committed, as after a crash."""
        if self.connection.process_id == os.getpid():
            self.close(time.monotonic())

    # --- from time to time, in the fetching thread -------------------------------------------------------------------

    def _duties(self) -> Duties:
        duties = Duties()
        duties.add(HELP_AFTER_SECONDS, self._help)
        if self.options.commits_by_itself and self.options.commit_interval_seconds > 0:
            duties.add(self.options.commit_interval_seconds, self._commit_by_itself)
        statistics = self._statistics()
        if statistics.due_seconds(0.0) is not None:
            duties.add(self.configuration["statistics.interval.ms"] / 1000, statistics.run)
        return duties

    def _statistics(self) -> Statistics:
        def collect() -> dict[str, Any]:
            with self.arrived:
                return consumer_facts(self.subscription, self.options.isolation)

        return Statistics(
            name=f"consumer-{next(_numbers)}",
            client_id=self.configuration["client.id"],
            kind="consumer",
            interval_seconds=self.configuration["statistics.interval.ms"] / 1000,
            callback=self._on_statistics,
            add_event=lambda call: self.inbox.put(StatisticsEvent(call)),
            collect=collect,
            connection=self.connection,
        )

    def _commit_by_itself(self) -> None:
        if self._commit_under_way is None or self._commit_under_way.done():
            self._commit_under_way = self.commit_in_background()

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
            for store in all_stores(self.connection.store()):
                self._recover_in(store)
        except TxnStoreError as error:
            self.logger.debug("could not help with open transactions: %s", error)

    def _recover_in(self, store: Store) -> None:
        try:
            recover(store)
        except TxnStoreError as error:
            # Somebody else may help; the reader only waits longer.
            self.logger.debug("could not help with open transactions: %s", error)

    def _commit_done(self, future: Future[CommitResult]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self.background_error(error)
            return
        result = future.result()
        if self._has_commit_callback:
            self.inbox.put(CommitEvent(result.error, list(result.partitions)))
        elif result.error is not None:
            self.logger.warning("committing offsets failed: %s", result.error.str())

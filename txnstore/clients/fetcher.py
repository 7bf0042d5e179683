"""This file is the thread that reads for a consumer: pages of the assigned partitions while somebody wants them.

It reads ahead by a bounded amount, and waits for commits of others when there is nothing new; work that comes in
between, and the consumer's end, wake it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Final

from txnstore.clients.assigned_partition import Ticket
from txnstore.clients.connection import StoreConnection
from txnstore.clients.duties import Duties
from txnstore.clients.group_member import GroupMember
from txnstore.clients.partition_reader import Delivered, Failed, Outcome, PartitionReader, Resolved
from txnstore.clients.subscription import Subscription
from txnstore.db.waiting import Waiter
from txnstore.errors import StoreClosed, TxnStoreError

#: What hears of nothing for long is looked at by itself this much more rarely.
LOOK_AGAIN_FACTOR_MAX: Final = 4.0
#: A group's member looks whether there are news of its group at most this often, when others commit something.
NEWS_INTERVAL_SECONDS: Final = 0.1
#: Who listens for nothing else looks up now and then.
LISTEN_SECONDS_MAX: Final = 60.0
#: After an error of the database it waits this long at first, and at last.
PAUSE_FIRST_SECONDS: Final = 0.1
PAUSE_LAST_SECONDS: Final = 2.0


class Fetcher:
    """Fills a consumer's subscription, and does its duties in between."""

    def __init__(
        self,
        name: str,
        *,
        arrived: threading.Condition,
        wanted: threading.Condition,
        subscription: Subscription,
        reader: PartitionReader,
        connection: StoreConnection,
        duties: Duties,
        group: GroupMember,
        look_again_seconds: float,
        on_error: Callable[[BaseException], None],
        logger: logging.Logger,
    ) -> None:
        """Notify `arrived` when there is something to hand out; be woken by `wanted`. Both have the same lock."""
        self._name = name
        self._arrived = arrived
        self._wanted = wanted
        self._subscription = subscription
        self._reader = reader
        self._connection = connection
        self._duties = duties
        self._group = group
        self._news_looked_at = -math.inf
        self._news_due_at = math.inf
        self._look_again_seconds = look_again_seconds
        self._on_error = on_error
        self._logger = logger
        self._thread: threading.Thread | None = None
        self._closing = False
        self._is_listening = False
        self._waiter: Waiter | None = None
        self._read_at = 0.0
        self._look_again_factor = 1.0
        self._pause_seconds = PAUSE_FIRST_SECONDS
        self.held_back_since: float | None = None
        """Since when an open transaction keeps the reader from records; None: it does not."""

    def start(self) -> None:
        """Start the thread if it does not run yet, or wake it."""
        with self._wanted:
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._wanted.notify_all()
            if self._is_listening and self._has_fresh_work():
                self._wake()

    def stop(self) -> None:
        """Let the thread end as soon as it can."""
        with self._wanted:
            self._closing = True
            self._wanted.notify_all()
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            self._waiter.wake()

    def close(self, timeout_seconds: float) -> bool:
        """Let the thread end, and wait for it; return whether it has ended.

        One that waits for the database ends when that answers or gives up.
        """
        self.stop()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(max(0, timeout_seconds))
        return not thread.is_alive()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._turn()
                except StoreClosed:
                    break
                except Exception as error:  # noqa: BLE001 - the application is told; a thread that died would tell nobody
                    self._failed(error)
        finally:
            self._close_waiter()

    def _turn(self) -> None:
        """Do what is due, read what is wanted, or wait."""
        due_seconds = min(self._duties.run_due(), self._look_for_news())
        with self._wanted:
            now = time.monotonic()
            unresolved = self._subscription.to_resolve(now)
            tickets = self._subscription.to_read(now)
            if self._closing:
                return
            if not unresolved and not tickets:
                due_seconds = min(due_seconds, self._subscription.next_retry(now))
                # With news of the group due, it has been woken just now: more of the same tells it nothing.
                if not self._group.listens or self._news_due_at < math.inf:
                    self._wanted.wait(min(due_seconds, threading.TIMEOUT_MAX))
                    return
        if unresolved:
            self._apply(self._reader.resolve(unresolved))
        elif not tickets:
            self._listen_for_group(due_seconds)
        elif self._has_news(tickets, due_seconds):
            self._apply(self._reader.read(tickets))
        self._pause_seconds = PAUSE_FIRST_SECONDS

    def _listen_for_group(self, due_seconds: float) -> None:
        """Wait for commits although there is nothing to read: one may be a rebalance."""
        if self._waiter is None:
            self._waiter = self._connection.store().waiter()
            self._expect_news()
        elif self._listen(self._waiter, min(due_seconds, LISTEN_SECONDS_MAX)):
            self._expect_news()

    def _expect_news(self) -> None:
        """Look for news of the group soon: somebody has committed something."""
        if self._group.listens:
            self._news_due_at = min(self._news_due_at, self._news_looked_at + NEWS_INTERVAL_SECONDS)

    def _look_for_news(self) -> float:
        """Look if it is due; return in how many seconds it is."""
        now = time.monotonic()
        if now < self._news_due_at:
            return self._news_due_at - now
        self._news_looked_at, self._news_due_at = now, math.inf
        self._group.look_for_news()
        return math.inf

    def _has_news(self, tickets: list[Ticket], due_seconds: float) -> bool:
        """Return whether there may be something to read; waits a moment if all of it was read up to its end."""
        if not all(ticket.partition.is_at_end for ticket in tickets):
            # It does not listen meanwhile.
            self._expect_news()
            return True
        if self._waiter is None:
            self._waiter = self._connection.store().waiter()
            self._read_at = time.monotonic()
            self._expect_news()
            # What was committed before it began to listen would never be heard of.
            return True
        now = time.monotonic()
        look_again_seconds = self._look_again_seconds * self._look_again_factor - (now - self._read_at)
        if self._listen(self._waiter, min(due_seconds, max(0.0, look_again_seconds))):
            self._look_again_factor = 1.0
            self._expect_news()
            return True
        # A wake-up may get lost: look from time to time.
        if time.monotonic() - self._read_at < self._look_again_seconds * self._look_again_factor:
            return False
        self._look_again_factor = min(2 * self._look_again_factor, LOOK_AGAIN_FACTOR_MAX)
        self._expect_news()
        return True

    def _listen(self, waiter: Waiter, timeout_seconds: float) -> bool:
        """Wait for commits; False if something else came in between, which the next turn sees."""
        with self._wanted:
            if self._closing or self._has_fresh_work():
                return False
            self._is_listening = True
        try:
            return waiter.wait(int(timeout_seconds * 1000) + 1) and not (self._closing or self._has_fresh_work())
        finally:
            self._is_listening = False

    def _has_fresh_work(self) -> bool:
        now = time.monotonic()
        subscription = self._subscription
        with self._wanted:
            return bool(subscription.to_resolve(now)) or not all(
                ticket.partition.is_at_end for ticket in subscription.to_read(now)
            )

    def _apply(self, outcomes: list[Outcome]) -> None:
        now = self._read_at = time.monotonic()
        held_back = self._reader.take_held_back()
        with self._arrived:
            if not held_back:
                self.held_back_since = None
            elif self.held_back_since is None:
                self.held_back_since = now
            for outcome in outcomes:
                self._apply_one(outcome, now)
            if self._subscription.has_messages:
                self._arrived.notify_all()

    def _apply_one(self, outcome: Outcome, now: float) -> None:
        subscription, ticket = self._subscription, outcome.ticket
        if isinstance(outcome, Delivered):
            subscription.deliver(ticket, outcome.page)
        elif isinstance(outcome, Resolved):
            if outcome.committed is not None:
                subscription.committed(ticket, outcome.committed)
            subscription.resolved(ticket, outcome.offset)
        elif not isinstance(outcome, Failed):
            subscription.out_of_range(ticket)
        elif outcome.for_good and outcome.error is not None:
            subscription.stop(ticket, outcome.error, now, offset=outcome.offset)
        else:
            subscription.fail(ticket, outcome.error, now, offset=outcome.offset)

    def _failed(self, error: Exception) -> None:
        """Tell the application, and try again after a while."""
        if self._closing:
            return
        if not isinstance(error, TxnStoreError):
            self._logger.error("reading in the background failed", exc_info=error)
        self._on_error(error)
        with self._wanted:
            deadline = time.monotonic() + self._pause_seconds
            while not self._closing and (left := deadline - time.monotonic()) > 0:
                self._wanted.wait(left)
        self._pause_seconds = min(self._pause_seconds * 2, PAUSE_LAST_SECONDS)

    def _close_waiter(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            with contextlib.suppress(TxnStoreError):
                waiter.close()

"""This file is a thread that reads for a consumer: pages of the assigned partitions while somebody wants them.

It reads ahead by a bounded amount, and waits for commits of others when there is nothing new; work that comes in
between, and the consumer's end, wake it.  With several databases there is one for each that holds assigned partitions.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from txnstore.clients.connection import StoreConnection
from txnstore.clients.consumer.assigned_partition import FetchPosition
from txnstore.clients.consumer.outbox_help import LOOK_SECONDS, OutboxHelp
from txnstore.clients.consumer.reader import Delivered, Failed, MadeAnew, Moved, Outcome, PartitionReader, Resolved
from txnstore.clients.consumer.subscription import Subscription, Wanted
from txnstore.clients.worker import Duties
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


class GroupNews(Protocol):
    """A group, as far as a fetcher has to do with it."""

    @property
    def listens(self) -> bool:
        """Whether commits of others may be news of the group."""
        ...

    def look_for_news(self) -> None:
        """Find out whether they were."""
        ...


class NoGroup:
    """The group of a fetcher that another one listens for."""

    listens = False

    def look_for_news(self) -> None:
        """There is nothing to look for."""


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
        group: GroupNews,
        look_again_seconds: float,
        min_bytes: int,
        wait_seconds: float,
        on_error: Callable[[BaseException], None],
        logger: logging.Logger,
        located: Callable[[], None],
        takes_unlocated: bool = True,
    ) -> None:
        """Notify `arrived` when there is something to hand out; be woken by `wanted`. Both have the same lock.

        Records of fewer than `min_bytes` are held back until more have come, for `wait_seconds` at most.

        Of several fetchers one takes the partitions of which nobody knows yet where they live, and finds out; `located`
        is called when it is known of some, or when it has turned out to be wrong.
        """
        self._located = located
        self._takes_unlocated = takes_unlocated
        self._name = name
        self._arrived = arrived
        self._wanted = wanted
        self._subscription = subscription
        self._reader = reader
        self._connection = connection
        self._duties = duties
        self._group = group
        self._outbox = OutboxHelp(reader.store, logger)
        duties.add(LOOK_SECONDS, self._outbox.look_now_and_then)
        self._news_looked_at = -math.inf
        self._news_due_at = math.inf
        self._look_again_seconds = look_again_seconds
        self._min_bytes = min_bytes
        self._wait_seconds = wait_seconds
        self._held_until = math.inf
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

    @property
    def home(self) -> int:
        """The number of the database that it reads from."""
        return self._reader.home

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
        due_seconds = min(self._duties.run_due(), self._look_for_news(), self._reader.help())
        with self._wanted:
            now = time.monotonic()
            is_wanted = self._is_wanted()
            unresolved = self._subscription.to_resolve(now, is_wanted)
            tickets = self._subscription.to_read(now, is_wanted)
            if self._closing:
                return
            if not unresolved and not tickets:
                due_seconds = min(due_seconds, self._subscription.next_retry(now, is_wanted))
                # With news of the group due, it has been woken just now: more of the same tells it nothing.
                if not self._group.listens or self._news_due_at < math.inf:
                    self._wanted.wait(min(due_seconds, threading.TIMEOUT_MAX))
                    return
        if self._locate([*unresolved, *tickets]):
            return
        if unresolved:
            self._apply(self._reader.resolve(unresolved))
        elif not tickets:
            self._listen_for_group(due_seconds)
        elif self._has_news(tickets, due_seconds):
            is_at_end = all(ticket.partition.is_at_end for ticket in tickets)
            outcomes = self._reader.read(tickets, asks_outbox=is_at_end and self._outbox.asks())
            self._apply(self._without_held(outcomes))
            if self._reader.outbox_waits:
                self._outbox.move()
        self._pause_seconds = PAUSE_FIRST_SECONDS

    def _is_wanted(self) -> Wanted | None:
        """Return which partitions it looks after; None: all of them."""
        if self._connection.is_alone:
            return None
        home, takes_unlocated = self._reader.home, self._takes_unlocated
        return lambda partition: partition.home == home or (takes_unlocated and partition.home is None)

    def _locate(self, tickets: list[FetchPosition]) -> bool:
        """Find out which databases hold the partitions of which it is not known; return whether any was."""
        if not tickets or self._connection.cluster().is_alone:
            return False
        unlocated = [ticket for ticket in tickets if ticket.partition.home is None]
        if not unlocated:
            return False
        located = self._reader.locate(unlocated)
        with self._wanted:
            for partition, home in located.items():
                partition.home = home
        self._located()
        return True

    def _listen_for_group(self, due_seconds: float) -> None:
        """Wait for commits although there is nothing to read: one may be a rebalance."""
        if self._waiter is None:
            self._waiter = self._reader.waiter()
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

    def _has_news(self, tickets: list[FetchPosition], due_seconds: float) -> bool:
        """Return whether there may be something to read; waits a moment if all of it was read up to its end."""
        if not all(ticket.partition.is_at_end for ticket in tickets):
            # It does not listen meanwhile.
            self._expect_news()
            return True
        if self._waiter is None:
            self._waiter = self._reader.waiter()
            self._read_at = time.monotonic()
            self._expect_news()
            # What was committed before it began to listen would never be heard of.
            return True
        now = time.monotonic()
        answer_seconds = min(self._held_until, *(ticket.partition.end_due_at for ticket in tickets)) - now
        if answer_seconds <= 0:
            return True
        look_again_seconds = self._look_again_seconds * self._look_again_factor - (now - self._read_at)
        if self._listen(self._waiter, min(due_seconds, max(0.0, look_again_seconds), answer_seconds)):
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
            is_wanted = self._is_wanted()
            return bool(subscription.to_resolve(now, is_wanted)) or not all(
                ticket.partition.is_at_end for ticket in subscription.to_read(now, is_wanted)
            )

    def _without_held(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Return the outcomes without records that are too few to be handed out yet."""
        pages = [outcome for outcome in outcomes if isinstance(outcome, Delivered)]
        size_bytes = sum(chunk.size_bytes for outcome in pages for chunk in outcome.page.chunks)
        is_small = 0 < size_bytes < self._min_bytes and all(
            outcome.page.next_offset >= outcome.page.end_offset for outcome in pages
        )
        now = time.monotonic()
        if not is_small or now >= self._held_until:
            self._held_until = math.inf
            return outcomes
        self._held_until = min(self._held_until, now + self._wait_seconds)
        held = [outcome for outcome in pages if outcome.page.chunks]
        with self._wanted:
            for outcome in held:
                self._subscription.hold(outcome.ticket)
        return [outcome for outcome in outcomes if outcome not in held]

    def _apply(self, outcomes: list[Outcome]) -> None:
        now = self._read_at = time.monotonic()
        is_held = not any(isinstance(outcome, Delivered) and outcome.page.chunks for outcome in outcomes)
        held_back = self._reader.take_held_back()
        with self._arrived:
            if not held_back:
                self.held_back_since = None
            elif self.held_back_since is None:
                self.held_back_since = now
            for outcome in outcomes:
                self._apply_one(outcome, now, is_held=is_held)
            if self._subscription.has_messages:
                self._arrived.notify_all()
        if any(isinstance(outcome, Moved) for outcome in outcomes):
            self._located()

    def _apply_one(self, outcome: Outcome, now: float, *, is_held: bool) -> None:
        subscription, ticket = self._subscription, outcome.ticket
        if isinstance(outcome, Delivered):
            subscription.deliver(ticket, outcome.page, now, is_held=is_held)
        elif isinstance(outcome, Resolved):
            if outcome.committed is not None:
                subscription.committed(ticket, outcome.committed)
            subscription.resolved(ticket, outcome.offset, outcome.partition_id)
        elif isinstance(outcome, Moved):
            ticket.partition.home = None
            subscription.fail(ticket, None, now)
        elif isinstance(outcome, MadeAnew):
            subscription.made_anew(ticket)
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

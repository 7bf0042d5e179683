"""The fetching of a consumer: threads that read pages of the assigned partitions while somebody wants them.

One thread, and one more for each further database that holds assigned partitions: a database that is away, or slow,
holds up its own partitions and no others.  A thread reads ahead by a bounded amount, and waits for commits of others
when there is nothing new; work that comes in between, and the consumer's end, wake it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from txnstore.background_thread import BackgroundThread
from txnstore.backoff import Backoff
from txnstore.clients.connection import StoreConnection
from txnstore.clients.consumer.arguments import ConsumerOptions
from txnstore.clients.consumer.assigned_partition import AssignedPartition, FetchPosition, Wanted
from txnstore.clients.consumer.reader import (
    PageDelivered,
    PartitionFailed,
    PartitionMoved,
    PartitionReader,
    PartitionRecreated,
    ReadOutcome,
    StartResolved,
    StoredOffsetFound,
)
from txnstore.clients.consumer.subscription import Subscription
from txnstore.clients.topic_directory import TopicDirectory
from txnstore.clients.worker import Duties
from txnstore.db.backend import EVERYTHING, NOTHING, Subjects, Waiter
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.cluster.membership import CONTROLLER_ID
from txnstore.db.portions import Portions
from txnstore.db.store import Store
from txnstore.deadline import Condition, Deadline
from txnstore.errors import StoreBusy, StoreClosed, TxnStoreError
from txnstore.log.outbox.rows import has_outbox_rows
from txnstore.log.outbox.sequencer import rounds_of, sequence_outbox
from txnstore.trouble import RepeatedTrouble, defect_of

#: A reader that hears of no commit for long looks less and less often, down to one time in this many.
LOOK_AGAIN_FACTOR_MAX: Final = 4.0
#: A group's member looks whether there is news of its group at most this often, when others commit something.
NEWS_INTERVAL_SECONDS: Final = 0.1
#: A thread that has nothing to read, and listens only for its group, returns to its other work after this long.
LISTEN_SECONDS_MAX: Final = 60.0
#: After so many readings in a row for which it was woken in vain a thread rests before it listens again: at first, and
#: at most.
VAIN_READS_MAX: Final = 3
VAIN_FIRST_SECONDS: Final = 0.001
VAIN_LAST_SECONDS: Final = 0.025
#: After an error of the database a thread waits this long at first, and up to this long at last.
PAUSE_FIRST_SECONDS: Final = 0.1
PAUSE_LAST_SECONDS: Final = 2.0

#: How long a thread that has found something, and nothing more, waits at most for the call that takes it.
LET_GO_FIRST_SECONDS: Final = 0.001

#: A consumer that reads nothing looks at the outbox this often: a row may create the topic that it waits for.
OUTBOX_LOOK_SECONDS: Final = 5.0
#: Where every commit wakes readers, the commit may be one of an application that writes to the outbox. Elsewhere such
#: a commit wakes no reader, and the outbox is asked about at most this often.
OUTBOX_ASK_AGAIN_SECONDS: Final = 0.1
#: How long it goes on where it moves few rows at once.
OUTBOX_MOVE_SECONDS: Final = 0.05
#: How long it does not help after an error: a role that may only read never succeeds.
OUTBOX_PAUSE_SECONDS: Final = 60.0


class GroupNews(Protocol):
    """A group, as far as a fetching thread has to do with it."""

    @property
    def listens(self) -> bool:
        """Whether commits of others may be news of the group."""
        ...

    def look_for_news(self) -> None:
        """Find out whether they are."""
        ...


class Fetcher:
    """All fetching threads of one consumer.

    The first one does the consumer's duties, listens for its group, and finds out which database holds a partition.
    """

    def __init__(
        self,
        name: str,
        *,
        lock: threading.RLock,
        arrived: threading.Condition,
        subscription: Subscription,
        connection: StoreConnection,
        directory: TopicDirectory,
        options: ConsumerOptions,
        duties: Duties,
        group: GroupNews,
        is_awaited: Callable[[], bool],
        on_error: Callable[[BaseException], None],
        logger: logging.Logger,
    ) -> None:
        """Notify `arrived`, a condition of the lock, when there is something to hand out.

        `is_awaited` returns, under the lock, whether a call of the application waits for that.
        """
        self.name = name
        self.arrived = arrived
        self.wanted = Condition(lock)
        """Notified when there is something for the fetching threads."""
        self.subscription = subscription
        self.connection = connection
        self.directory = directory
        self.options = options
        self.is_awaited = is_awaited
        self.on_error = on_error
        self.logger = logger
        self.snapshots = itertools.count(1)
        """The numbers of all readings: a partition may pass from one thread to another."""
        self._first = FetchThread(self, None, duties, group)
        self._further: dict[int, FetchThread] = {}
        self._closing = False

    def _threads(self) -> Iterator[FetchThread]:
        yield self._first
        yield from list(self._further.values())

    @property
    def is_closing(self) -> bool:
        """Whether nothing is read any more."""
        return self._closing

    @property
    def held_back_since(self) -> float | None:
        """Since when an open transaction keeps the reader from records; None: it does not."""
        if not self._further:
            return self._first.held_back_since
        return min((at for thread in self._threads() if (at := thread.held_back_since) is not None), default=None)

    @property
    def may_be_held_back(self) -> bool:
        """Whether one does, or may: the first thread does not hear of the others' readers while it waits."""
        return bool(self._further) or self._first.held_back_since is not None

    def note_held_back(self) -> None:
        """Note that an open transaction keeps the application from what it asks for."""
        with self.wanted:
            if self.held_back_since is None:
                self._first.held_back_since = time.monotonic()

    def start(self) -> None:
        """Start the threads that do not run yet and have something to read, or wake them."""
        if not self.connection.is_alone:
            self._add_threads()
        for thread in self._threads():
            thread.start()

    def do_last(self, work: Callable[[], object]) -> bool:
        """Let the first thread do this at its end; see `BackgroundThread.do_last`."""
        return self._first.do_last(work)

    def stop(self) -> None:
        """Let the threads end as soon as they can."""
        with self.wanted:
            self._closing = True
            for thread in self._threads():
                thread.stop()

    def close(self, timeout_seconds: float) -> bool:
        """Let the threads end, and wait for them; return whether they have ended."""
        self.stop()
        deadline = Deadline(timeout_seconds)
        ended = [thread.close(deadline.left_seconds()) for thread in self._threads()]
        return all(ended)

    def _add_threads(self) -> None:
        with self.wanted:
            if self._closing:
                return
            first_id = self._first.database_id
            for partition in self.subscription:
                leader = partition.leader
                if leader is not None and leader != first_id and leader not in self._further:
                    self._further[leader] = FetchThread(self, leader, Duties(), None)


class FetchThread:
    """Fills the subscription from one database, and does the duties in between."""

    def __init__(self, fetcher: Fetcher, database_id: int | None, duties: Duties, group: GroupNews | None) -> None:
        """Read from the database of this number.

        Without a number it is the first thread: it reads from the database that holds the group, finds out what is
        committed there, and looks after partitions whose leader is not known yet until it has found it out.
        """
        is_first = database_id is None
        self._fetcher = fetcher
        self._is_first = is_first
        self._arrived = fetcher.arrived
        self._wanted = fetcher.wanted
        self._subscription = fetcher.subscription
        self._given_database_id = database_id
        self._reader = self._new_reader()
        #: Whether the database was alone at the last turn; further threads are for clusters.
        self._is_alone = is_first
        self._duties = duties
        self._group = group
        self._outbox = OutboxHelp(self._reader.store, fetcher.connection.cluster, fetcher.logger)
        duties.add(OUTBOX_LOOK_SECONDS, self._outbox.look_now_and_then)
        self._news_looked_at = -math.inf
        self._news_due_at = math.inf
        self._look_again_seconds = fetcher.options.look_again_seconds
        self._held_until = math.inf
        self._thread = BackgroundThread(fetcher.name if is_first else f"{fetcher.name}-{database_id}")
        self._closing = False
        self._is_listening = False
        #: Whether it has heard of a commit since it read last: nobody tells of it again.
        self._has_heard = False
        self._waiter: Waiter | None = None
        self._subjects = NOTHING
        #: Of what this turn waits for commits, if of any: for the sake of others it ends.
        self._in_turn: set[AssignedPartition] = set()
        self._read_at = 0.0
        self._look_again_factor = 1.0
        self._is_told = False
        self._vain_reads = 0
        self._backoff = Backoff(PAUSE_FIRST_SECONDS, PAUSE_LAST_SECONDS)
        self._defects = RepeatedTrouble()
        self.held_back_since: float | None = None
        """Since when an open transaction keeps the reader from records; None: it does not."""

    @property
    def database_id(self) -> int:
        """The number of the database that it reads from."""
        return self._reader.database_id

    def start(self) -> None:
        """Start the thread if it does not run yet, or wake it."""
        with self._wanted:
            if not self._thread.is_started and not self._closing:
                self._thread.start(self._run)
            self._wanted.notify_all()
            if self._is_listening and self._has_fresh_work():
                self._wake()

    def do_last(self, work: Callable[[], object]) -> bool:
        """Let the thread do this at its end; see `BackgroundThread.do_last`."""
        return self._thread.do_last(work)

    def stop(self) -> None:
        """Let the thread end as soon as it can."""
        with self._wanted:
            self._closing = True
            self._wanted.notify_all()
            self._wake()

    def _wake(self) -> None:
        # Once: its thread may let go of it meanwhile.
        waiter = self._waiter
        if waiter is not None:
            waiter.wake()

    def close(self, timeout_seconds: float) -> bool:
        """Let the thread end, and wait for it; return whether it has ended.

        One that waits for the database ends when that answers or gives up.
        """
        self.stop()
        return self._thread.close(timeout_seconds)

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

    def _new_reader(self) -> PartitionReader:
        fetcher = self._fetcher
        return PartitionReader(
            fetcher.connection, fetcher.directory, fetcher.options, self._given_database_id, snapshots=fetcher.snapshots
        )

    def _turn(self) -> None:
        """Do what is due, read what is wanted, or wait."""
        due_seconds = min(self._duties.run_due(), self._look_for_news(), self._reader.help())
        with self._wanted:
            now = time.monotonic()
            is_wanted = self._is_wanted()
            unresolved = self._subscription.to_resolve(now, is_wanted)
            positions = self._subscription.to_read(now, is_wanted)
            if self._closing:
                return
            has_grown, self._is_alone = self._is_alone and is_wanted is not None, is_wanted is None
            self._in_turn = {position.partition for position in positions}
            due_seconds = min(due_seconds, self._subscription.next_retry(now, is_wanted))
            # With news of the group due it has just been woken; being woken again would tell it nothing.
            listens = self._listens_for_group and self._news_due_at == math.inf
            if not (has_grown or unresolved or positions or listens):
                self._wanted.wait(min(due_seconds, threading.TIMEOUT_MAX))
                return
        if has_grown:
            self._begin_anew()
            return
        if self._locate([*unresolved, *positions]):
            return
        if unresolved:
            self._apply(self._reader.resolve(unresolved))
        elif not positions:
            self._listen_for_group(due_seconds)
        elif self._has_news(positions, due_seconds):
            is_at_end = all(position.partition.is_at_end for position in positions)
            outcomes = self._reader.read(
                positions,
                asks_outbox=is_at_end and self._outbox.asks(),
                waiter=self._waiter if is_at_end else None,
            )
            self._read_at = time.monotonic()
            # It may have heard of partitions that were not among these.
            self._has_heard = self._has_heard and self._subjects != self._subjects_of(positions)
            self._apply(self._without_held(outcomes))
            if self._reader.outbox_waits:
                self._outbox.move()
        self._backoff.succeeded()

    def _is_wanted(self) -> Wanted | None:
        """Return which partitions it looks after; None: all of them."""
        if self._fetcher.connection.is_alone:
            return None
        own_id, is_first = self.database_id, self._is_first
        # What is committed is asked where the group is: a partition that needs it holds up no others elsewhere.
        return lambda partition: (
            is_first if partition.leader is None or partition.needs_group else partition.leader == own_id
        )

    def _begin_anew(self) -> None:
        """Read on in a cluster that has grown: the group may live elsewhere, and others may have to read this."""
        # What it waits for, and knows of commits, is that database's.
        self._close_waiter()
        self._reader = self._new_reader()
        self._fetcher.start()

    def _locate(self, positions: list[FetchPosition]) -> bool:
        """Find out the leaders that are not known; return whether a cluster had to be asked for any."""
        unlocated = [position for position in positions if position.partition.leader is None]
        if not unlocated:
            return False
        is_alone = self._fetcher.connection.cluster().is_alone
        # Also what is read of a database alone has its leader at once: if the cluster grows, all of it has the same.
        located = (
            dict.fromkeys((position.partition for position in unlocated), CONTROLLER_ID)
            if is_alone
            else self._reader.locate(unlocated)
        )
        with self._wanted:
            for partition, leader in located.items():
                partition.leader = leader
        if not is_alone:
            # Another thread may have to read them.
            self._fetcher.start()
        return not is_alone

    def _listen_for_group(self, due_seconds: float) -> None:
        """Wait for commits although there is nothing to read: a rebalance is one."""
        subjects = Subjects(group_ids=self._group_ids)
        # What it hears besides costs a look now and then; to listen again would cost the server one at each turn.
        waiter, is_new = self._waiter_for(self._subjects if self._subjects.meets(subjects) else subjects)
        had_heard, self._has_heard = self._has_heard, False
        if is_new or self._listen(waiter, min(due_seconds, LISTEN_SECONDS_MAX)) or self._has_heard:
            self._expect_news()
        # Of what is read later it may have been news, too.
        self._has_heard |= had_heard

    @property
    def _listens_for_group(self) -> bool:
        return self._group is not None and self._group.listens

    def _expect_news(self) -> None:
        """Look for news of the group soon: there has been a commit."""
        if self._listens_for_group:
            self._news_due_at = min(self._news_due_at, self._news_looked_at + NEWS_INTERVAL_SECONDS)

    def _look_for_news(self) -> float:
        """Look if it is due; return in how many seconds it is."""
        now = time.monotonic()
        if now < self._news_due_at:
            return self._news_due_at - now
        self._news_looked_at, self._news_due_at = now, math.inf
        if self._group is not None:
            self._group.look_for_news()
        return math.inf

    def _has_news(self, positions: list[FetchPosition], due_seconds: float) -> bool:
        """Return whether there may be something to read; wait a moment if everything was read up to its end."""
        if not all(position.partition.is_at_end for position in positions):
            # While it reads it does not listen.
            self._expect_news()
            return True
        waiter, is_new = self._waiter_for(self._subjects_of(positions))
        now = time.monotonic()
        if is_new:
            self._read_at = now
            self._expect_news()
            # It would never hear of what was committed before it began to listen. So it reads, later if not now.
            self._has_heard = True
            return True
        answer_seconds = min(self._held_until, *(position.partition.eof_due_at for position in positions)) - now
        if answer_seconds <= 0:
            return True
        look_again_seconds = self._look_again_seconds * self._look_again_factor - (now - self._read_at)
        self._rest_after_vain_reads(now, min(due_seconds, look_again_seconds, answer_seconds))
        wait_seconds = min(due_seconds, max(0.0, look_again_seconds), answer_seconds)
        if self._has_heard or self._listen(waiter, wait_seconds):
            self._look_again_factor = 1.0
            self._is_told = True
            self._expect_news()
            return True
        # A wake-up may get lost: it looks from time to time.
        if time.monotonic() - self._read_at < self._look_again_seconds * self._look_again_factor:
            return False
        self._look_again_factor = min(2 * self._look_again_factor, LOOK_AGAIN_FACTOR_MAX)
        self._expect_news()
        return True

    @property
    def _group_ids(self) -> frozenset[str]:
        return frozenset([self._fetcher.options.group_id] if self._listens_for_group else [])

    def _subjects_of(self, positions: list[FetchPosition]) -> Subjects:
        bounds = [position.partition.bounds for position in positions]
        if None in bounds:
            return EVERYTHING
        return Subjects(frozenset(known.partition_id for known in bounds if known is not None), self._group_ids)

    def _waiter_for(self, subjects: Subjects) -> tuple[Waiter, bool]:
        """Return what waits for commits about these, and whether it has just begun to."""
        self._subjects = subjects
        if self._waiter is None:
            self._waiter = self._reader.waiter(subjects)
            return self._waiter, True
        return self._waiter, self._waiter.listen(subjects)

    def _rest_after_vain_reads(self, now: float, timeout_seconds: float) -> None:
        """Let some time pass if it was woken again and again and there was nothing: others' open transactions grow."""
        vain_reads = self._vain_reads - VAIN_READS_MAX
        if vain_reads < 0:
            return
        # No `Backoff`: it counts from the last read, and is the shortest that helps: nothing has failed.
        rest_seconds = min(VAIN_FIRST_SECONDS * 2 ** min(vain_reads, 10), VAIN_LAST_SECONDS) - (now - self._read_at)
        with self._wanted:
            if rest_seconds > 0 and not (self._closing or self._has_fresh_work()):
                self._wanted.wait(max(0.0, min(rest_seconds, timeout_seconds)))

    def _listen(self, waiter: Waiter, timeout_seconds: float) -> bool:
        """Wait for commits; False if something else came first, which the next turn sees to."""
        with self._wanted:
            if self._closing or self._has_fresh_work():
                return False
            self._is_listening = True
        try:
            self._has_heard |= waiter.wait(int(timeout_seconds * 1000) + 1)
            return self._has_heard and not (self._closing or self._has_fresh_work())
        finally:
            self._is_listening = False

    def _has_fresh_work(self) -> bool:
        now = time.monotonic()
        subscription = self._subscription
        with self._wanted:
            is_wanted = self._is_wanted()
            # For what there was no room nobody listens; there is some once the application has taken enough.
            return bool(subscription.to_resolve(now, is_wanted)) or not all(
                position.partition.is_at_end and position.partition in self._in_turn
                for position in subscription.to_read(now, is_wanted)
            )

    def _without_held(self, outcomes: list[ReadOutcome]) -> list[ReadOutcome]:
        """Return the outcomes without the records that are too few to be handed out yet."""
        pages = [outcome for outcome in outcomes if isinstance(outcome, PageDelivered)]
        size_bytes = sum(chunk.size_bytes for outcome in pages for chunk in outcome.page.chunks)
        is_small = 0 < size_bytes < self._fetcher.options.fetch_min_bytes and all(
            outcome.page.next_position >= outcome.page.end_position for outcome in pages
        )
        now = time.monotonic()
        if not is_small or now >= self._held_until:
            self._held_until = math.inf
            return outcomes
        self._held_until = min(self._held_until, now + self._fetcher.options.fetch_wait_seconds)
        held = [outcome for outcome in pages if outcome.page.chunks]
        with self._wanted:
            for outcome in held:
                self._subscription.hold(outcome.position, outcome.page.bounds)
        return [outcome for outcome in outcomes if outcome not in held]

    def _apply(self, outcomes: list[ReadOutcome]) -> None:
        now = time.monotonic()
        brought_nothing = not any(isinstance(outcome, PageDelivered) and outcome.page.chunks for outcome in outcomes)
        was_told, self._is_told = self._is_told, False
        self._vain_reads = self._vain_reads + was_told if brought_nothing else 0
        held_back = self._reader.take_held_back()
        with self._arrived:
            if self._is_alone and not self._fetcher.connection.is_alone:
                # Others may read the same by now, as of a later moment: of these the next turn reads anew.
                return
            if not held_back:
                self.held_back_since = None
            elif self.held_back_since is None:
                self.held_back_since = now
            resets = [outcome for outcome in outcomes if isinstance(outcome, StartResolved) and _is_reset(outcome)]
            for outcome in outcomes:
                self._apply_one(outcome, now, brought_nothing=brought_nothing)
            if self._subscription.has_messages:
                self._arrived.notify_all()
                self._let_go_first()
        for reset in resets:
            self._warn_of_reset(reset)
        for outcome in outcomes:
            if isinstance(outcome, PartitionFailed) and outcome.trouble is not None:
                self._fetcher.on_error(outcome.trouble)
        if any(isinstance(outcome, PartitionMoved | StoredOffsetFound) for outcome in outcomes):
            # It is another thread's turn.
            self._fetcher.start()

    def _warn_of_reset(self, outcome: StartResolved) -> None:
        """Tell of records that are read again, or never: nothing else shows it."""
        partition, options = outcome.position.partition, self._fetcher.options
        to_offset = options.positions.place(outcome.start)
        self._fetcher.logger.warning(
            "%s [%d]: %s; group %r goes on at offset %d (auto.offset.reset=%s)",
            partition.topic,
            partition.number,
            outcome.why,
            options.group_id,
            to_offset,
            options.offset_reset,
            extra={
                "event": "offset_reset",
                "group": options.group_id,
                "topic": partition.topic,
                "partition": partition.number,
                "from": outcome.passed_over_from if outcome.reset_from is None else outcome.reset_from,
                "to": to_offset,
            },
        )

    def _let_go_first(self) -> None:
        """Let the call that waits for the records take them, unless there is more to read; the lock is held.

        What this thread does next would keep the interpreter from it.
        """
        # What has failed is not read before its time.
        now = time.monotonic()
        if self._fetcher.is_awaited() and all(one.is_at_end or one.retry_at > now for one in self._subscription):
            self._wanted.wait(LET_GO_FIRST_SECONDS)

    def _apply_one(self, outcome: ReadOutcome, now: float, *, brought_nothing: bool) -> None:
        subscription, position = self._subscription, outcome.position
        if isinstance(outcome, PageDelivered):
            subscription.deliver(position, outcome.page, now, brought_nothing=brought_nothing)
        elif isinstance(outcome, StartResolved):
            if outcome.committed is not None:
                subscription.committed(position, outcome.committed)
            subscription.resolved(position, outcome.start, outcome.partition_id, outcome.last_commit)
        elif isinstance(outcome, StoredOffsetFound):
            subscription.found_stored(position, outcome.stored_offset)
        elif isinstance(outcome, PartitionMoved):
            subscription.moved(position, now)
        elif isinstance(outcome, PartitionRecreated):
            subscription.recreated(position)
        elif not isinstance(outcome, PartitionFailed):
            subscription.out_of_range(position)
        elif outcome.for_good and outcome.error is not None:
            subscription.stop(position, outcome.error, now, offset=outcome.offset)
        else:
            subscription.fail(position, outcome.error, now, offset=outcome.offset)
            if outcome.trouble is not None and position.partition.is_current(position):
                position.partition.wait_longer()

    def _failed(self, error: Exception) -> None:
        """Tell the application, and try again after a while."""
        if self._closing:
            return
        if not isinstance(error, TxnStoreError) and self._defects.may_be_told(defect_of(error)):
            self._fetcher.logger.error(
                "reading in the background failed", exc_info=error, extra={"event": "background_work_failed"}
            )
        self._fetcher.on_error(error)
        with self._wanted:
            pause = Deadline(self._backoff.back_off())
            while not self._closing and (left_seconds := pause.left_seconds()) > 0:
                self._wanted.wait(left_seconds)

    def _close_waiter(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            with contextlib.suppress(TxnStoreError):
                waiter.close()


class OutboxHelp:
    """The help of one fetching thread for applications that write to the outbox of its database.

    When a consumer has nothing to read, the rows that it waits for may be in the outbox; so it makes records of them.
    Nothing relies on that: the next look finds what others have left.
    """

    def __init__(
        self,
        store: Callable[[], Store],
        cluster: Callable[[], Cluster],
        logger: logging.Logger,
        *,
        monotonic_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        """Help the store that `store` returns, at each look; it is one of the databases of `cluster`."""
        self._store = store
        self._cluster = cluster
        self._logger = logger
        self._monotonic_seconds = monotonic_seconds
        self._looked_at = monotonic_seconds()
        self._paused_until = 0.0

    def look_now_and_then(self) -> None:
        """Look, unless it has looked a moment ago."""
        if self._monotonic_seconds() - self._looked_at >= OUTBOX_LOOK_SECONDS:
            self.look()

    def asks(self) -> bool:
        """Return whether the next reading is to ask for waiting rows; if there are some, `move` them.

        Raises:
            TxnStoreError: the database cannot be reached.
        """
        now = self._monotonic_seconds()
        is_told = self._store().backend.every_commit_wakes_readers
        if now < self._paused_until or (not is_told and now - self._looked_at < OUTBOX_ASK_AGAIN_SECONDS):
            return False
        self._looked_at = now
        return True

    def look(self) -> None:
        """Move a round of rows if some wait and nobody else is moving them; all readers, this one too, are woken."""
        self._looked_at = self._monotonic_seconds()
        self._try(_look)

    def move(self) -> None:
        """Move a round of rows that a reading has found, unless somebody else is moving them."""
        self._try(_move)

    def _try(self, work: Callable[[Store, Cluster], None]) -> None:
        now = self._monotonic_seconds()
        if now < self._paused_until:
            return
        try:
            work(self._store(), self._cluster())
        except (StoreBusy, StoreClosed):
            # Somebody else is writing (SQLite), or this consumer is being closed.
            return
        except TxnStoreError as error:
            self._paused_until = now + OUTBOX_PAUSE_SECONDS
            self._logger.debug("could not help with the outbox: %s", error)


def _is_reset(outcome: StartResolved) -> bool:
    """Return whether the partition, which waits for it, goes on elsewhere than it was to, or another begins late."""
    partition = outcome.position.partition
    if not partition.is_current(outcome.position) or partition.start is None:
        return False
    return outcome.reset_from is not None or (outcome.passed_over_from is not None and partition.is_recreated)


def _look(store: Store, cluster: Cluster) -> None:
    if store.read(has_outbox_rows, retry_timeout_ms=0):
        _move(store, cluster)


def _move(store: Store, cluster: Cluster) -> None:
    rounds = rounds_of(store, Portions(seconds=OUTBOX_MOVE_SECONDS))
    # Where a round is all that may be done at once, one is not much.
    while sequence_outbox(store, retry_timeout_ms=0, rounds=rounds, cluster=cluster).has_more and rounds.is_bounded:
        if rounds.is_over:
            return

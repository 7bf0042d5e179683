"""The one thread of a producer that talks to the database: calls put work on it, and some work is timed.

One thing happens at a time and in order.  Between two tries of the database, work that has to wait pauses here, so
that closing the producer ends it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from txnstore.background_thread import BackgroundThread, ending_left_seconds
from txnstore.backoff import Backoff
from txnstore.clients.model.errors import KafkaError, KafkaException, kafka_error_of, kafka_exception_of
from txnstore.clients.overdue_help import DUE_SECONDS_MIN, end_overdue
from txnstore.clients.worker import Worker
from txnstore.db.cluster.cluster import Cluster
from txnstore.deadline import Condition, Deadline, give, new_future, result_within
from txnstore.errors import StoreUnavailable, TxnStoreError
from txnstore.trouble import RepeatedTrouble, defect_of

if TYPE_CHECKING:
    from txnstore.clients.connection import StoreConnection

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

#: How often a producer asks whether a transaction of somebody else is in the way of its readers.
WRITER_ASKS_SECONDS: Final = 1.0
#: How long closing the databases may take for a producer that nobody holds.
ABANDONED_SECONDS: Final = 0.2
#: How often one that has written nothing asks for its part in the maintenance.
IDLE_ASKS_SECONDS: Final = 10.0
#: Over how long a time the looks of those are spread that know of the same moment at which something is overdue.
SPREAD_SECONDS: Final = 0.1


class SenderStopped(Exception):
    """The producer was closed before the call was done."""


class TimedWork(Protocol):
    """Work that becomes due by itself."""

    def due_seconds(self, now_seconds: float) -> float | None:
        """Return when to run, by the monotonic clock, or None; called under the lock."""
        ...

    def run(self) -> None:
        """Do it; called without the lock."""
        ...


class Alarm:
    """What the sender's thread sleeps on: it is woken by what it has to do, and by nothing else.

    Everything here is done under the producer's lock.
    """

    def __init__(self, lock: threading.RLock) -> None:
        """Begin awake; `lock` is the producer's one lock."""
        self.lock = lock
        self._rung = Condition(lock)
        #: Until when the thread sleeps, by the monotonic clock, unless it is woken.
        self._sleeps_until = -math.inf

    def sleep(self, until_seconds: float = math.inf) -> None:
        """Sleep until this moment of the monotonic clock, or until woken."""
        left_seconds = min(until_seconds - time.monotonic(), threading.TIMEOUT_MAX)
        self._sleeps_until = until_seconds
        try:
            self._rung.wait(left_seconds if until_seconds < math.inf else None)
        finally:
            self._sleeps_until = -math.inf

    def ring(self, at_seconds: float = -math.inf) -> None:
        """Wake the thread if it would sleep beyond this moment, when there is something to do; by default now."""
        if at_seconds < self._sleeps_until:
            # The sleeper alone notes when that is over: after a Ctrl-C in here the next one is heard, and also after a
            # signal's handler in here that waited for the thread, which may sleep anew by now.
            self._rung.notify_all()


class DelayedJob:
    """A job that runs after a while, unless it is forgotten before."""

    def __init__(self, alarm: Alarm, delay_seconds: float) -> None:
        """Wait for `delay_seconds` from the first `set` on."""
        self._alarm = alarm
        self._delay_seconds = delay_seconds
        self._job: Callable[[], None] | None = None
        self._at_seconds = 0.0

    def set(self, job: Callable[[], None]) -> None:
        """Run `job`; one that waits already is replaced and keeps its time."""
        with self._alarm.lock:
            if self._job is None:
                self._at_seconds = time.monotonic() + self._delay_seconds
            self._job = job
            self._alarm.ring(self._at_seconds)

    def forget(self) -> None:
        """Do not run it."""
        with self._alarm.lock:
            self._job = None

    def due_seconds(self, now_seconds: float) -> float | None:
        """Return when the job runs."""
        return None if self._job is None else self._at_seconds

    def run(self) -> None:
        """Run the job."""
        with self._alarm.lock:
            job, self._job = self._job, None
        if job is not None:
            job()


class WriterHelp:
    """What a producer does for the readers of partitions that it has written to, now and then.

    It comes after the producer's own commits, never in one of them, and in a thread of its own: a database that does
    not answer keeps no record waiting for this.  Who has looked knows when the next open transaction's time is up, and
    looks again then; or at once, where more is overdue than one look ends.  Its part in the maintenance is looked at
    on the same occasions, and now and then.
    """

    def __init__(
        self,
        cluster: Callable[[], Cluster],
        new_helper: Callable[[str], Worker],
        upkeep: Callable[[], None],
        alarm: Alarm,
        *,
        monotonic_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        """Help in the databases of this cluster; the thread is made by `new_helper` when it is first needed.

        Who waits for what is due sleeps on `alarm`.
        """
        self._cluster = cluster
        self._upkeep = upkeep
        self._new_helper = new_helper
        self._alarm = alarm
        self._monotonic_seconds = monotonic_seconds
        self._helper: Worker | None = None
        self._is_looking = False
        self._written: set[int] = set()
        #: Where something was open at the last look, when that may be overdue, and how soon to look again at the least.
        self._held: set[int] = set()
        self._overdue_at = math.inf
        self._pause_seconds = DUE_SECONDS_MIN
        #: Whether the last look has left some of what is overdue to the next one.
        self._goes_on = False
        # A short-lived producer asks nobody: what it would have to import takes longer than its records.
        self._asked_at = monotonic_seconds()

    def wrote(self, partition_ids: Collection[int]) -> None:
        """Look soon after these partitions were written to."""
        self._written.update(partition_ids)

    def due_seconds(self, now_seconds: float) -> float | None:
        """See `TimedWork`."""
        del now_seconds
        return None if self._is_looking else self._asks_at()

    def run(self) -> None:
        """See `TimedWork`."""
        self._asked_at = self._monotonic_seconds()
        written, self._written = self._written, set()
        # Many that write no more would all look at each moment at which something might be overdue, or may not end it.
        if written:
            self._pause_seconds = DUE_SECONDS_MIN
        elif not self._goes_on:
            self._pause_seconds = min(2 * self._pause_seconds, IDLE_ASKS_SECONDS)
        if self._helper is None:
            self._helper = self._new_helper("overdue")
        self._is_looking, self._overdue_at = True, math.inf
        try:
            self._helper.submit(partial(self._help, written | self._held))
        except RuntimeError:
            # It takes no more: the producer has been closed.
            self._is_looking = False

    def _asks_at(self) -> float:
        asks_at = self._asked_at + (WRITER_ASKS_SECONDS if self._written else IDLE_ASKS_SECONDS)
        return min(asks_at, self._overdue_at)

    def _help(self, partition_ids: set[int]) -> None:
        left_seconds = math.inf
        try:
            if partition_ids:
                left_seconds = self._end_overdue(partition_ids)
            self._upkeep()
        finally:
            self._goes_on = left_seconds == 0.0
            if not self._goes_on:
                left_seconds = max(self._pause_seconds, left_seconds) + random.uniform(0.0, SPREAD_SECONDS)
            # Nothing was due by itself meanwhile: who sleeps does not know until when.
            with self._alarm.lock:
                self._is_looking = False
                self._held = partition_ids if left_seconds < math.inf else set()
                self._overdue_at = self._monotonic_seconds() + left_seconds
                self._alarm.ring(self._asks_at())

    def _end_overdue(self, partition_ids: Collection[int]) -> float:
        """End what is overdue; return in how many seconds more may be, or infinity."""
        try:
            cluster = self._cluster()
            leaders = cluster.by_leader(partition_ids)
        except TxnStoreError as error:
            _log.debug("could not look for transactions whose time is up: %s", error)
            return math.inf
        left_seconds = [
            # Of a database that is away the next record will tell.
            end_overdue(partial(cluster.own, database_id), own, self._cluster, after_error_seconds=math.inf)
            for database_id, own in leaders.items()
        ]
        return min(left_seconds, default=math.inf)


class SenderThread:
    """The thread, its queue of jobs, and the pauses between tries; `changed` is the producer's one lock.

    Its callers wait for `changed`; the thread itself sleeps on the `alarm`.
    """

    def __init__(
        self,
        name: str,
        changed: threading.Condition,
        alarm: Alarm,
        *,
        backoff_seconds: float,
        backoff_max_seconds: float,
        report_trouble: Callable[[KafkaError], None],
    ) -> None:
        """Make the thread ready; it starts with the first thing to do, and keeps no program from its end."""
        self.changed = changed
        self.alarm = alarm
        self.backoff = Backoff(
            backoff_seconds, backoff_max_seconds, report=lambda error: report_trouble(kafka_error_of(error))
        )
        """The pauses between its tries."""

        #: Those after what nobody foresaw: nothing is tried meanwhile, whatever it is about.
        self._after_mistakes = self.backoff.another()
        self._mistakes = RepeatedTrouble()
        self._report_trouble = report_trouble
        self.timed_work: list[TimedWork] = []
        """What becomes due by itself; the first that is due goes first."""

        self._thread = BackgroundThread(name)
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._is_stopping = False
        self._is_working = False
        self._helpers: list[Worker] = []
        self.at_end: list[Callable[[], None]] = []
        """What the thread does last."""

    # --- for every thread -------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no job waits; one may be running."""
        return not self._jobs

    def start(self) -> None:
        """Start if it does not run."""
        if not self._thread.is_started:
            with self.alarm.lock:
                if not self._is_stopping:
                    self._thread.start(self._run)

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """Run `job` after what is done now.

        Raises:
            SenderStopped: the producer has been closed.
            RuntimeError: no thread can be started.
        """
        future: Future[Result] = new_future()
        self.start()
        with self.alarm.lock:
            if self._is_stopping:
                raise SenderStopped
            self.alarm.ring()
            # Last: whoever is told of an error has nothing on the thread.
            self._jobs.append((future, job))
        return future

    def ask(
        self, question: Callable[[], Result], timeout_seconds: float, unreachable: Callable[[float], KafkaException]
    ) -> Result:
        """Return the answer of a question to the database; `unreachable` says why none came to a call that began then.

        Raises:
            SenderStopped: the producer has been closed.
            KafkaException: there was none in time, or the database refuses.
        """
        began = time.monotonic()
        deadline = Deadline(timeout_seconds)
        try:
            return result_within(self.submit(lambda: self.until_answered(question, deadline)), timeout_seconds)
        except TimeoutError:
            raise unreachable(began) from None
        except StoreUnavailable as error:
            raise unreachable(began) from error
        except TxnStoreError as error:
            raise kafka_exception_of(error) from error

    def run_here(self, job: Callable[[], bool]) -> bool:
        """Run a job on the caller's thread, under the lock, and return its answer; False if there is other work.

        For what asks no database and may be interrupted anywhere: a thread that is woken for it takes longer than it.
        """
        with self.alarm.lock:
            return not (self._is_stopping or self._is_working or self._jobs) and job()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let `run_here` go on beside what the thread does within, which leaves alone whatever such a job changes."""
        with self.alarm.lock:
            self._is_working = False
        try:
            yield
        finally:
            with self.alarm.lock:
                self._is_working = True

    def stop(self, timeout_seconds: float) -> bool:
        """End after the try that is being made; returns whether it has ended."""
        with self.alarm.lock:
            self._is_stopping = True
            self.alarm.ring()
        deadline = Deadline(timeout_seconds)
        try:
            return self._thread.close(timeout_seconds)
        finally:
            for helper in self._helpers:
                helper.close(deadline.left_seconds())

    def do_last(self, work: Callable[[], object], *, is_awaited: bool = True) -> bool:
        """Do this once it has been stopped; see `BackgroundThread.do_last`."""
        return self._thread.do_last(work, is_awaited=is_awaited)

    def report_fatal(self, error: KafkaError) -> None:
        """Tell the application that the producer is finished."""
        self._report_trouble(error)

    # --- for work on the thread -------------------------------------------------------------------------------------

    def until_answered(self, request: Callable[[], Result], deadline: Deadline | None = None) -> Result:
        """Repeat `request` while the database is away or has not said what became of it.

        Raises:
            SenderStopped: the producer was closed.
            TxnStoreError: the database refuses, or the deadline has passed.
        """
        while True:
            try:
                answer = request()
            except TxnStoreError as error:
                is_late = deadline is not None and deadline.left_seconds() <= 0
                if is_late or not (error.retriable or error.outcome_unknown):
                    raise
                self.backoff.retry_later(error)
            else:
                if self.backoff.is_pausing:
                    self.backoff.succeeded()
                return answer
            self.pause()

    def pause(self, until: Callable[[], bool] = lambda: False, *, backoff: Backoff | None = None) -> None:
        """Wait until the next try, as the last one wants it, or until there is no use in waiting.

        Raises:
            SenderStopped: the producer was closed.
        """
        with self.alarm.lock:
            while not self._is_stopping:
                not_before_seconds = (backoff or self.backoff).not_before_seconds
                if not_before_seconds <= time.monotonic() or until():
                    return
                self.alarm.sleep(not_before_seconds)
        raise SenderStopped

    def wait_for_due(self, due_seconds: Callable[[float], float | None]) -> None:
        """Wait until something is due, by the monotonic clock; returns at once if nothing ever will be.

        Raises:
            SenderStopped: the producer was closed.
        """
        with self.alarm.lock:
            while not self._is_stopping:
                now_seconds = time.monotonic()
                at_seconds = due_seconds(now_seconds)
                if at_seconds is None or at_seconds <= now_seconds:
                    return
                self.alarm.sleep(at_seconds)
        raise SenderStopped

    def new_helper(self, name: str) -> Worker:
        """Return a thread for one thing that must not keep this one waiting; it ends with it."""
        helper = Worker(f"{self._thread.name}-{name}")
        self._helpers.append(helper)
        return helper

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        has_failed = False
        while True:
            work: Callable[[], object] | None = None
            try:
                if has_failed:
                    # Whatever it was, it may be due at once again, and fail again.
                    self.pause(backoff=self._after_mistakes)
                has_failed = True
                work = self._next_work()
                if work is None:
                    break
                work()
                has_failed = False
                if self._after_mistakes.is_pausing:
                    self._after_mistakes.succeeded()
            except SenderStopped:
                break
            except Exception as error:  # noqa: BLE001 - a mistake of ours is logged, and the records are not lost by it
                # Whatever else fails here: nobody would do any work any more.
                with contextlib.suppress(Exception):
                    self._after_mistakes.back_off()
                    if self._mistakes.may_be_told(defect_of(error)):
                        _log.exception(
                            "%s failed; it goes on",
                            self._thread.name,
                            extra={"event": "background_work_failed", "client": self._thread.name},
                        )
            del work
        self._refuse_jobs()
        for call in self.at_end:
            call()

    def _next_work(self) -> Callable[[], object] | None:
        with self.alarm.lock:
            self._is_working = False
            while not self._is_stopping:
                if self._jobs:
                    self._is_working = True
                    return self._run_job
                now_seconds = time.monotonic()
                next_seconds = math.inf
                for timed in self.timed_work:
                    due_seconds = timed.due_seconds(now_seconds)
                    if due_seconds is None:
                        continue
                    if due_seconds <= now_seconds:
                        self._is_working = True
                        return timed.run
                    next_seconds = min(next_seconds, due_seconds)
                self.alarm.sleep(next_seconds)
        return None

    def _run_job(self) -> None:
        # Taken out once it is to run: else an error before that is its end, and nobody is told.
        future, job = self._jobs[0]
        is_wanted = _is_wanted(future)
        with self.alarm.lock:
            self._jobs.popleft()
        if not is_wanted:
            return
        try:
            result = job()
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it, whatever it is
            give(future, future.set_exception, error)
        else:
            give(future, future.set_result, result)

    def _refuse_jobs(self) -> None:
        with self.alarm.lock:
            jobs = list(self._jobs)
            self._jobs.clear()
        for future, _ in jobs:
            # Whatever fails as one is told, the others are told, too.
            with contextlib.suppress(Exception):
                if _is_wanted(future):
                    give(future, future.set_exception, SenderStopped())


def _is_wanted(future: Future[Any]) -> bool:
    """Return whether somebody waits for a job that is still in the queue; nobody can cancel it any more."""
    # It runs already if an error has come between this and its leaving the queue.
    return future.running() or (not future.cancelled() and future.set_running_or_notify_cancel())


class Unsent(Protocol):
    """What a producer has to send."""

    @property
    def unsent_count(self) -> int:
        """How many records are not sent, as far as anybody knows."""
        ...


def abandon(producer: Callable[[], object], thread: SenderThread, connection: StoreConnection, unsent: Unsent) -> None:
    """End what a producer has that nobody holds any more, or whose program ends, and tell of records that are lost.

    `producer` returns None if it was collected (a weak reference without a callback may still have it, from Python 3.15
    on).  That can be anywhere, also where a handler of the log holds a lock: then the thread tells of them.

    If all is sent, the thread has the turn in the maintenance that closing the producer would have had.
    """
    if os.getpid() != connection.process_id:
        return
    count = unsent.unsent_count
    is_collected = producer() is None
    if count and is_collected:
        thread.do_last(partial(_tell, count))
    is_left = not count and connection.leave_to(partial(thread.do_last, is_awaited=is_collected))
    thread.stop(ending_left_seconds() if is_left and not is_collected else 0.0)
    if not (is_left and is_collected):
        connection.close(ABANDONED_SECONDS)
    if count and not is_collected:
        _tell(count)


def _tell(count: int) -> None:
    _log.warning(
        "up to %d records were not sent before their producer was dropped, or its program ended: call flush() or"
        " close() first",
        count,
        extra={"event": "records_dropped", "count": count},
    )

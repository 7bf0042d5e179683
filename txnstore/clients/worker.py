"""The thread that talks to the database for a client, so that every call of the client keeps its timeout.

A call submits its work and waits for the answer as long as its caller allows.  Work that takes longer goes on in the
background: the database may be away, and nothing that the caller's thread waits for is more than a lock.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from txnstore.background_thread import BackgroundThread
from txnstore.deadline import give, new_future

Result = TypeVar("Result")

_Job = tuple["Future[Any]", Callable[[], Any]]


class WorkerClosed(RuntimeError):
    """The worker has been closed, and takes no more."""


class Worker:
    """One thread that runs jobs in the order in which they were submitted; it starts with the first one."""

    def __init__(self, name: str, *, needs_thread: bool = True) -> None:
        """Make a worker whose thread will have this name; one that needs none does without where none can be started.

        So it is while the interpreter ends, in functions of `atexit` for one.
        """
        self._thread = BackgroundThread(name)
        self._needs_thread = needs_thread
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # A signal's handler, or a finalizer, may submit or close while its own thread submits.
        self._lock = threading.RLock()
        self._closed = False

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Run `work` after everything that was submitted before; its result or error comes out of the future.

        Raises:
            WorkerClosed: it has been closed.
            RuntimeError: no thread can be started, and it needs one.
        """
        future: Future[Result] = new_future()
        with self._lock:
            has_thread = not self._closed and self._start()
            # No call between these: a job after the end would never be done.
            if self._closed:
                raise WorkerClosed(f"{self._thread.name} has been closed")
            if has_thread:
                self._jobs.put((future, work))
                return future
        _do(future, work)
        return future

    def close(self, timeout_seconds: float) -> bool:
        """Take no more jobs, drop those that have not begun, and wait for the one that runs.

        Returns whether the thread has ended; if not, it ends with its job.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._drop_waiting_jobs()
                self._jobs.put(None)
        return self._thread.close(timeout_seconds)

    def _start(self) -> bool:
        try:
            self._thread.start(self._run)
        except RuntimeError:
            if self._needs_thread:
                raise
        return self._thread.is_started

    def _drop_waiting_jobs(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is not None:
                job[0].cancel()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            _do(*job)
            # The next job may be long in coming; nothing of this one is kept until then.
            del job


def _do(future: Future[Any], work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - whoever waits gets it, whatever it is
        give(future, future.set_exception, error)
    else:
        give(future, future.set_result, result)


@dataclass(slots=True)
class Duty:
    """Something that is done every so often; it returns quickly, because it runs between two readings."""

    interval_seconds: float
    work: Callable[[], None]
    is_wanted: Callable[[], bool]
    due_at: float = field(default=math.inf)


class Duties:
    """The duties of one client; for one thread."""

    def __init__(self, monotonic_seconds: Callable[[], float] = time.monotonic) -> None:
        """Begin without any."""
        self._monotonic_seconds = monotonic_seconds
        self._duties: list[Duty] = []

    def add(
        self,
        interval_seconds: float,
        work: Callable[[], None],
        is_wanted: Callable[[], bool] = lambda: True,
        *,
        first_seconds: float | None = None,
    ) -> None:
        """Do `work` again and again, for the first time in `first_seconds`, by default in `interval_seconds`.

        Never while it is not wanted.  Only `run_due` asks for that: what changes meanwhile makes the thread no earlier.
        """
        wait_seconds = interval_seconds if first_seconds is None else first_seconds
        self._duties.append(Duty(interval_seconds, work, is_wanted, self._monotonic_seconds() + wait_seconds))

    def run_due(self) -> float:
        """Do what is due; return in how many seconds there will be something to do again."""
        now = self._monotonic_seconds()
        next_at = math.inf
        for duty in self._duties:
            if not duty.is_wanted():
                continue
            if duty.due_at <= now:
                duty.due_at = now + duty.interval_seconds
                duty.work()
            next_at = min(next_at, duty.due_at)
        return max(0.0, next_at - now)

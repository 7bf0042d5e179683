"""The time of a client: what a call has left, how its caller waits, and the milliseconds of its records."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import starmap
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Self, SupportsFloat, TypeVar

from txnstore.clock import Clock

Result = TypeVar("Result")

#: CPython does not hear a signal that comes just before its main thread begins to wait for a lock, until that wait is
#: over: a call waits no longer than this at once, so that Ctrl-C always ends it.
WAIT_SECONDS_MAX: Final = 0.5


def check_timeout(timeout: object) -> float:
    """Return a timeout as public calls take it: seconds, or below zero if the caller sets none.

    Raises:
        TypeError: it is not a number.
        ValueError: it is NaN.
    """
    # `poll` comes here for each message, nearly always with one of these.
    if type(timeout) is not float and type(timeout) is not int and not isinstance(timeout, SupportsFloat):
        raise TypeError(f"must be real number, not {type(timeout).__name__}")
    try:
        seconds = float(timeout)
    except OverflowError:
        # A whole number beyond what a float holds.
        return threading.TIMEOUT_MAX
    if seconds <= threading.TIMEOUT_MAX:
        return seconds
    if math.isnan(seconds):
        raise ValueError("a timeout is a number of seconds, not NaN")
    # No lock can be waited for any longer: for ever, nearly.
    return threading.TIMEOUT_MAX


def bounded(timeout_seconds: float, longest_seconds: float) -> float:
    """Return how many seconds a call may take: what its caller allows, at most and by default the longest time."""
    return timeout_seconds if 0 <= timeout_seconds <= longest_seconds else longest_seconds


def result_within(future: Future[Result], timeout_seconds: float) -> Result:
    """Return the result once it is there, or raise TimeoutError after so long; Ctrl-C is heard meanwhile."""
    deadline = Deadline(timeout_seconds)
    while True:
        left_seconds = deadline.left_seconds()
        try:
            return future.result(min(left_seconds, WAIT_SECONDS_MAX))
        except TimeoutError:
            # Just now, perhaps; or it is the work that has raised this.
            if future.done():
                return future.result()
            if left_seconds <= WAIT_SECONDS_MAX:
                raise


def wait_within(changed: threading.Condition, is_there: Callable[[], object], timeout_seconds: float) -> bool:
    """Wait until something is there, or for so long; return whether it is.  Ctrl-C is heard meanwhile."""
    deadline = Deadline(timeout_seconds)
    while not changed.wait_for(is_there, min(left_seconds := deadline.left_seconds(), WAIT_SECONDS_MAX)):
        if left_seconds <= WAIT_SECONDS_MAX:
            return False
    return True


class Deadline:
    """When the time of a call is up, on the monotonic clock."""

    __slots__ = ("_at_seconds",)

    def __init__(self, timeout_seconds: float) -> None:
        """Give the call so much time from now; a negative timeout means no limit."""
        self._at_seconds = math.inf if timeout_seconds < 0 else time.monotonic() + timeout_seconds

    def left_seconds(self) -> float:
        """Return how long there is left to wait, but not more than a lock can be waited for; 0 once it is up."""
        return min(max(0.0, self._at_seconds - time.monotonic()), threading.TIMEOUT_MAX)

    def at_most(self, seconds: float) -> Self:
        """Return the same, but that many seconds from now if that is earlier."""
        return type(self)(min(seconds, self.left_seconds()))


class Ticks:
    """The milliseconds of this process's clock for frequent use: it is asked once in each of them."""

    def __init__(self, clock: Clock | None) -> None:
        """Ask `clock`, each time, instead of the system's."""
        self._clock = clock
        self.now_ms = 0
        """The time in milliseconds since 1970."""

        self.until_seconds = -math.inf
        """Until when, by the monotonic clock, that is right; then `next` is to be called."""

    def next(self, now_seconds: float) -> int:
        """Return the time in milliseconds since 1970; `now_seconds` is of the monotonic clock, just now."""
        if self._clock is not None:
            return self._clock.now_ms()
        milliseconds = time.time() * 1000
        now_ms = int(milliseconds)
        # In this order: a thread that sees the new end sees the new time.
        self.now_ms = now_ms
        self.until_seconds = now_seconds + (now_ms + 1 - milliseconds) / 1000
        return now_ms


class Condition(threading.Condition):
    """A condition over a reentrant lock that Ctrl-C leaves intact.

    A signal may raise KeyboardInterrupt in the main thread between any two instructions of Python.  The standard
    library's condition is entered, left and waited for by methods in Python: an interrupt in one of them, just after
    the lock was taken or just before it is released, leaves it taken for good, and every other thread of the client
    waits for it.  Here `with` calls the lock's own methods, which are C, so that nothing comes between.
    """

    if TYPE_CHECKING:
        # What the standard library's condition has, and takes from its lock.
        _waiters: deque[threading.Lock]
        _is_owned: Callable[[], bool]
        _release_save: Callable[[], Any]
        _acquire_restore: Callable[[Any], None]
    else:
        # What a `with` looks up and calls: methods of the lock, without a frame of Python.
        __enter__ = property(attrgetter("_enter"))
        __exit__ = property(attrgetter("_exit"))

    def __init__(self, lock: Any = None) -> None:
        """Share this reentrant lock, or have one of its own."""
        reentrant_lock = threading.RLock() if lock is None else lock
        super().__init__(reentrant_lock)
        self._enter = reentrant_lock.__enter__
        self._exit = reentrant_lock.__exit__

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock until somebody notifies, or for so many seconds; return whether somebody did.

        The lock is held afterwards as often as before, also when KeyboardInterrupt is raised.

        Raises:
            RuntimeError: this thread does not hold the lock.
        """
        if not self._is_owned():
            raise RuntimeError("only who holds the lock of a condition can wait for it")
        seconds = -1 if timeout is None else max(0.0, timeout)
        waiter = threading.Lock()
        waiter.acquire()
        taken: list[Any] = []
        is_notified = False
        try:
            self._waiters.append(waiter)
            # One call of C releases the lock and notes how often it was taken.
            taken.extend(starmap(self._release_save, [()]))
            is_notified = waiter.acquire(timeout=seconds) if seconds else waiter.acquire(blocking=False)
        finally:
            try:
                if taken:
                    self._acquire_restore(taken[0])
            finally:
                if not is_notified and waiter in self._waiters:
                    self._waiters.remove(waiter)
        return is_notified


class _IntactFuture(Future[Any]):
    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()
        self._has_called_back = False

    def tell_again(self) -> None:
        """Wake whoever waits, and call back unless that has begun: it is done, but an error came as that was told."""
        with self._condition:
            # Calls of `wait` and `as_completed`: they are told before that, and each counts what it is told of.
            for waiter in () if self._has_called_back else self._waiters:
                if self not in waiter.finished_futures:
                    (waiter.add_result if self._exception is None else waiter.add_exception)(self)
            self._condition.notify_all()
        if not self._has_called_back:
            self._invoke_callbacks()

    def _invoke_callbacks(self) -> None:
        self._has_called_back = True
        super()._invoke_callbacks()  # type: ignore[misc]  # the standard library's own


def new_future() -> Future[Any]:
    """Return a future that Ctrl-C leaves intact, too."""
    return _IntactFuture()


def give(future: Future[Any], set_it: Callable[[Any], None], outcome: object) -> None:
    """Give a future its result or its error by `set_it`; again if there was no memory for it, say.

    Whoever waits for it would wait for ever.
    """
    try:
        set_it(outcome)
    except Exception:  # noqa: BLE001 - see above
        if not future.done():
            set_it(outcome)
            return
        if isinstance(future, _IntactFuture):
            future.tell_again()


def to_its_end(work: Callable[[], None]) -> None:
    """Do what nobody else would do, even if Ctrl-C comes again and again meanwhile; raise what came first.

    Between two tries is one instruction that the next one could still get past.
    """
    first: BaseException | None = None
    is_done = False
    while not is_done:
        try:
            work()
            is_done = True
        # No call from here on: another one would get past.
        except Exception as error:  # noqa: BLE001 - raised below
            first, is_done = first or error, True
        except BaseException as error:  # noqa: BLE001 - as above
            first = first or error
    if first is not None:
        raise first

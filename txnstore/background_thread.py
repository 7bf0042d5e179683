"""A thread that works for one object until that is closed."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

_log = logging.getLogger(__name__)

#: For how long a program that ends waits for what its threads do last, for all of them together.
ENDING_SECONDS: Final = 0.25


class BackgroundThread:
    """A thread that starts when it is first needed, and of which there is one at most, whatever interrupts its start.

    It is a daemon: a database that does not answer keeps no program from its end.
    """

    def __init__(self, name: str) -> None:
        """Make one that has not been started."""
        self.name = name
        # A signal handler may need it while it is being started.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._last: deque[Callable[[], object]] = deque()
        self._has_ended = False
        self.is_started = False
        """Whether it runs, or has run."""

    def start(self, run: Callable[[], None]) -> None:
        """Let it run `run`, unless it has been started before.

        Raises:
            RuntimeError: no thread can be started; the next call tries again.
        """
        with self._lock:
            if not self.is_started:
                thread = threading.Thread(target=self._run, args=(run,), name=self.name, daemon=True)
                thread.start()
                self._thread, self.is_started = thread, True

    def do_last(self, work: Callable[[], object], *, is_awaited: bool = True) -> bool:
        """Let it do this at its end, after `run`; return False, and do nothing, if it has ended or was never started.

        A program that ends meanwhile waits for that a moment, if it `is_awaited`.
        """
        with self._lock:
            if not self.is_started or self._has_ended:
                return False
            self._last.append(work)
            if is_awaited:
                _ending.add(self)
            return True

    def close(self, timeout_seconds: float) -> bool:
        """Wait for its end; return whether it has ended or was never started.  It does not wait for itself."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return thread is None
        thread.join(max(0.0, timeout_seconds))
        return not thread.is_alive()

    def _run(self, run: Callable[[], None]) -> None:
        with self._lock:
            # Ctrl-C can end `Thread.start` when the thread is there already.
            if not self.is_started:
                self._thread, self.is_started = threading.current_thread(), True
            if self._thread is not threading.current_thread():
                return
        try:
            run()
        finally:
            try:
                while (work := self._next_of_last()) is not None:
                    self._do(work)
            finally:
                _ending.discard(self)

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException:  # noqa: BLE001 - whatever it was, the rest is done all the same
            with contextlib.suppress(Exception):
                _log.exception(
                    "%s failed at what it was to do last",
                    self.name,
                    extra={"event": "background_work_failed", "client": self.name},
                )

    def _next_of_last(self) -> Callable[[], object] | None:
        with self._lock:
            self._has_ended = not self._last
            return None if self._has_ended else self._last.popleft()


#: Those that have something to do last that a program waits for.
_ending: Final[set[BackgroundThread]] = set()


def ending_left_seconds() -> float:
    """Return for how long a program that ends still waits for what its threads do last, from the first call on."""
    return max(0.0, _ends_at_seconds() - time.monotonic())


@functools.cache
def _ends_at_seconds() -> float:
    return time.monotonic() + ENDING_SECONDS


def _await_last() -> None:
    # In a forked child none of its parent's runs, and none is waited for.
    for thread in _ending.copy():
        thread.close(ending_left_seconds())


atexit.register(_await_last)

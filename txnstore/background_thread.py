"""A thread that works for one object until that is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable


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
        run()

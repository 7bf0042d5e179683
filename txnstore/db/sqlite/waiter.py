"""The waiter of an SQLite file: a reader notices commits by its data version, at which it looks ever more rarely."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import weakref
from collections import defaultdict
from typing import Final

from txnstore.db.sqlite.connections import close_before_fork, connect
from txnstore.db.waiting import POLL_FIRST_MS, POLL_LAST_MS


class _Waiting:
    """Those that wait in this process, by the file's path."""

    def __init__(self) -> None:
        self.forget_after_fork()

    def forget_after_fork(self) -> None:
        # The parent's threads do not wait in its child; one of them may have held the lock.
        self._lock = threading.Lock()
        self._waiters: defaultdict[str, weakref.WeakSet[DataVersionWaiter]] = defaultdict(weakref.WeakSet)

    def add(self, path: str, waiter: DataVersionWaiter) -> None:
        with self._lock:
            self._waiters[path].add(waiter)

    def at(self, path: str) -> list[DataVersionWaiter]:
        with self._lock:
            return list(self._waiters[path]) if path in self._waiters else []


_waiting: Final = _Waiting()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_waiting.forget_after_fork)


class InProcessAnnouncer:
    """Wakes the readers of a file in this process at once; those in others look for themselves."""

    def __init__(self, path: str) -> None:
        """Wake readers of the file at `path`."""
        self._path = path

    def announce(self) -> None:
        """Say that something was committed."""
        for waiter in _waiting.at(self._path):
            waiter.wake()

    def close(self, timeout_seconds: float) -> None:
        """Do nothing: it holds nothing."""


class DataVersionWaiter:
    """Waits until another connection, of this process or another, has committed."""

    def __init__(self, path: str) -> None:
        """Watch the file at `path`, through a connection that does nothing else: its own commits would not count."""
        self._path = path
        self._lock = threading.RLock()
        self._woken = threading.Event()
        self._pause_ms = float(POLL_FIRST_MS)
        self._connection: sqlite3.Connection | None = None
        self._seen = self._data_version()
        _waiting.add(path, self)
        close_before_fork(self, DataVersionWaiter.close)

    def wait(self, timeout_ms: int) -> bool:
        """Return True once something was committed since the last call, False after `timeout_ms`."""
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            version = self._data_version()
            if version != self._seen:
                self._seen = version
                self._pause_ms = float(POLL_FIRST_MS)
                # Whoever committed may have said so too.
                self._woken.clear()
                return True
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0 and not self._woken.is_set():
                return False
            if self._woken.wait(min(self._pause_ms / 1000, max(0.0, left_seconds))):
                self._pause_ms = float(POLL_FIRST_MS)
                self._woken.clear()
                self._seen = self._data_version()
                return True
            # Kept from wait to wait: nothing has happened for that long.
            self._pause_ms = min(self._pause_ms * 1.5, POLL_LAST_MS)

    def wake(self) -> None:
        """Let the wait that is under way, or else the next one, return True at once."""
        self._woken.set()

    def close(self) -> None:
        """Close the connection; a later `wait` opens another one, which knows of no version and looks at once."""
        with self._lock:
            connection, self._connection = self._connection, None
            self._seen = None
        if connection is not None:
            connection.close()

    def _data_version(self) -> int | None:
        """Return the version; None if the file cannot be read now: whoever waits reads it, and learns why."""
        try:
            # Opened without the lock, for a fork that keeps it from being opened takes that.
            opened = connect(self._path) if self._connection is None else None
            with self._lock:
                self._connection = self._connection or opened
                if self._connection is None:
                    # Closed since, by a fork: the next look opens it anew.
                    return None
                (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error:
            self.close()
            return None
        return int(version)

"""This file is how a reader of an SQLite file notices commits: it looks at its data version, ever more rarely."""

from __future__ import annotations

import sqlite3
import threading
import time

from txnstore.db.sqlite_connections import close_before_fork, connect
from txnstore.db.waiting import POLL_FIRST_MS, POLL_LAST_MS


class DataVersionWaiter:
    """Waits until another connection, of this process or another, has committed."""

    def __init__(self, path: str) -> None:
        """Watch the file at `path`, through a connection that does nothing else: its own commits would not count."""
        self._path = path
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._seen = self._data_version()
        close_before_fork(self, DataVersionWaiter.close)

    def wait(self, timeout_ms: int) -> bool:
        """Return True once something was committed since the last call, False after `timeout_ms`."""
        deadline = time.monotonic() + timeout_ms / 1000
        pause_ms = float(POLL_FIRST_MS)
        while True:
            version = self._data_version()
            if version != self._seen:
                self._seen = version
                return True
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                return False
            time.sleep(min(pause_ms / 1000, left_seconds))
            pause_ms = min(pause_ms * 1.5, POLL_LAST_MS)

    def close(self) -> None:
        """Close the connection; a later `wait` opens another one, which knows of no version and looks at once."""
        with self._lock:
            connection, self._connection = self._connection, None
            self._seen = None
        if connection is not None:
            connection.close()

    def _data_version(self) -> int | None:
        """Return the version; None if the file cannot be read now: whoever waits reads it, and learns why."""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = connect(self._path)
                (version,) = self._connection.execute("PRAGMA data_version").fetchone()
            except sqlite3.Error:
                self.close()
                return None
        return int(version)

"""The last row of a file's outbox that is committed, as a connection beside those of its writers sees it.

SQLite has no name for a database transaction.  But it has one writer at a time, so a row that another connection sees
while a second one is inserted was committed before, and belongs to another database transaction than the second.
"""

from __future__ import annotations

import math
import sqlite3
import threading
import time
from typing import Final

from txnstore.db.names import SQLITE_PREFIX
from txnstore.db.sqlite.connections import SQLiteConnection, close_before_fork, connect
from txnstore.errors import TxnStoreError

#: Within this time nobody looks again: who saw fewer rows is only sure of fewer.
LOOK_AGAIN_SECONDS: Final = 0.001

_LAST: Final = f"SELECT max(outbox_id) FROM main.{SQLITE_PREFIX}outbox"  # noqa: S608 - our own name


class CommittedRows:
    """Looks into one file again and again; safe to share between threads."""

    def __init__(self, path: str) -> None:
        """Look into the file at `path`, which is opened by the first look."""
        self._path = path
        self._lock = threading.Lock()
        self._connection: SQLiteConnection | None = None
        self._last_id: int | None = None
        self._looked_at = -math.inf
        close_before_fork(self, CommittedRows._let_go)

    def last_id(self) -> int | None:
        """Return the number of the last row that is committed; None where there is none, or nobody can tell.

        It may be that of a moment ago.
        """
        with self._lock:
            try:
                return self._look()
            except (sqlite3.Error, OSError, TxnStoreError):
                # No file, no table, or an application that has all of it to itself.
                self._close()
                return None

    def close(self) -> None:
        """Close the file; the next look opens it again."""
        with self._lock:
            self._close()

    def _look(self) -> int | None:
        connection = self._connection
        if connection is not None and connection.leads_elsewhere():
            # The numbers of the one that was there say nothing about those of the one that is.
            self._close()
            connection = None
        now = time.monotonic()
        if connection is None:
            connection = self._connection = connect(self._path, is_there=True, only_looks=True)
            connection.execute("PRAGMA query_only = ON")
        elif now - self._looked_at < LOOK_AGAIN_SECONDS:
            return self._last_id
        # Read to the end: nothing is to be kept of what it saw.
        ((self._last_id,),) = connection.passing_cursor().execute(_LAST).fetchall()
        self._looked_at = now
        return self._last_id

    def _let_go(self) -> None:
        # Who looks at this moment is waited for by the fork.
        if self._lock.acquire(blocking=False):
            try:
                self._close()
            finally:
                self._lock.release()

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        self._last_id, self._looked_at = None, -math.inf
        if connection is not None:
            connection.close()

"""Connections to SQLite files, and why none of them is open while the process forks.

SQLite remembers in the memory of the process which locks the process holds on a file.  A child inherits that memory,
but not the locks.  So a connection that it opens later would rely on locks that nobody holds: the parent, closing its
last connection, would delete the write-ahead log under the child, and with it what the child has committed.
https://www.sqlite.org/howtocorrupt.html#_carrying_an_open_database_connection_across_a_fork_
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

from txnstore.errors import StoreClosed

Holder = TypeVar("Holder")

#: How long a fork waits for the database transactions of other threads; they are short.
FORK_PATIENCE_SECONDS: Final = 1.0

#: Held while a connection is opened, and by a fork from its beginning to its end.
FORK_LOCK: Final = threading.RLock()

_open: Final[weakref.WeakSet[SQLiteConnection]] = weakref.WeakSet()
#: Who keeps connections that are not in use, and how it closes them.
_holders: Final[weakref.WeakKeyDictionary[Any, Callable[[Any], None]]] = weakref.WeakKeyDictionary()
#: The files, by device and number, of which a connection was in use when this process was forked off.
_lost_files: Final[set[tuple[int, int]]] = set()


class SQLiteConnection(sqlite3.Connection):
    """A connection that is known as open until it is closed."""

    def __init__(self, path: str, **options: Any) -> None:
        """Open the file at `path`; see `connect`."""
        super().__init__(path, **options)
        self.path = path
        self._cursors: weakref.WeakSet[sqlite3.Cursor] = weakref.WeakSet()
        _open.add(self)

    def cursor(self, *arguments: Any, **options: Any) -> Any:
        """Return a new cursor."""
        cursor = super().cursor(*arguments, **options)
        self._cursors.add(cursor)
        return cursor

    def close_cursors(self) -> None:
        """Close the cursors that somebody still holds.

        A statement whose rows were not all read keeps its snapshot, whatever has been committed or rolled back since:
        the connection would go on reading the past, and could not write.  An exception that was raised between two
        rows, and is kept, is enough to hold one.
        """
        for cursor in list(self._cursors):
            cursor.close()

    def close(self) -> None:
        """Close it, whoever still holds a cursor; a second call does nothing."""
        self.close_cursors()
        super().close()
        _open.discard(self)


def connect(path: str) -> sqlite3.Connection:
    """Open the file in the mode that the guarantees need; a new file is readable by its owner only.

    Raises:
        sqlite3.Error: SQLite refuses.
        StoreClosed: this process was forked off while the file was in use.
    """
    if not os.path.exists(path):  # noqa: PTH110 - pathlib's is no better here
        # Only we may read what applications log, whatever the umask says.
        # Somebody else may be first, and SQLite will say what is wrong.
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    with FORK_LOCK:
        _refuse_if_lost(path)
        # timeout=0: SQLite's own waiting starves writers when commits sync to disk; the store's retry is fair.
        connection = sqlite3.connect(
            path, timeout=0, isolation_level=None, check_same_thread=False, factory=SQLiteConnection
        )
        try:
            _configure(connection)
        except BaseException:
            connection.close()
            raise
    return connection


def close_before_fork(holder: Holder, let_go: Callable[[Holder], None]) -> None:
    """From now on call `let_go(holder)` before a fork: it closes the connections that are not in use."""
    with FORK_LOCK:
        _holders[holder] = let_go


def _configure(connection: sqlite3.Connection) -> None:
    (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    if mode != "wal":
        connection.execute("PRAGMA journal_mode = WAL")
    # FULL: an acknowledged commit survives the loss of power; NORMAL does not promise that in WAL mode.
    connection.execute("PRAGMA synchronous = FULL")
    # The store decides when the WAL is moved into the file: see db.sqlite_checkpoint.
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("PRAGMA journal_size_limit = 0")
    # A file from a stranger may hold views and triggers that call functions; they shall have no effects.
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")


def _file_at(path: str) -> tuple[int, int]:
    found = os.stat(path)  # noqa: PTH116 - called for every connection
    return found.st_dev, found.st_ino


def _refuse_if_lost(path: str) -> None:
    if _lost_files and os.path.exists(path) and _file_at(path) in _lost_files:  # noqa: PTH110 - as above
        raise StoreClosed(
            f"the SQLite file {path!r} was in use by another thread when this process was forked off, so this process"
            " cannot use it: fork while no call of the store is running, or start processes by 'spawn'"
        )


def _before_fork() -> None:
    FORK_LOCK.acquire()
    deadline = time.monotonic() + FORK_PATIENCE_SECONDS
    while True:
        for holder, let_go in list(_holders.items()):
            let_go(holder)
        if not _open or time.monotonic() >= deadline:
            return
        time.sleep(0.001)


def _after_fork_in_child() -> None:
    for connection in list(_open):
        with contextlib.suppress(OSError):
            _lost_files.add(_file_at(connection.path))
        # SQLite forbids the child even to close it. So it is kept for ever, also when the interpreter ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
    FORK_LOCK.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=FORK_LOCK.release, after_in_child=_after_fork_in_child)

"""Connections to SQLite files: opened so that commits last, checkpointed while nobody writes, and waited on.

None of them is open while the process forks.  SQLite remembers in the memory of the process which locks the process
holds on a file.  A child inherits that memory, but not the locks.  So a connection that it opens later would rely on
locks that nobody holds: the parent, closing its last connection, would delete the write-ahead log under the child, and
with it what the child has committed.
https://www.sqlite.org/howtocorrupt.html#_carrying_an_open_database_connection_across_a_fork_

They never checkpoint by themselves (`wal_autocheckpoint = 0`).  SQLite 3.7.0 to 3.51.2 may corrupt the file when one
connection checkpoints in the very moment in which another writes or checkpoints (the "WAL-reset bug").  So whoever
finds the write-ahead log long takes the file's write lock, and under it a second connection checkpoints.  Nobody else
can write or checkpoint meanwhile, in this process or another.

The mode is always PASSIVE.  RESTART and TRUNCATE want the write lock for themselves, and where they do not get it they
go on as a PASSIVE beside which somebody may write, which must never happen.  What they would do is done by hand where
readers overlap without a pause, so that the log never comes to its end: see `make_room`.

An application that writes to the same file through connections of its own checkpoints by SQLite's default rules;
it should do as we do, or run SQLite 3.51.3 or newer.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sqlite3
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Final, NamedTuple, TypeVar

from sqlalchemy import Connection

from txnstore.db.backend import POLL_FIRST_MS, POLL_LAST_MS, Subjects
from txnstore.db.wake_signal import WakeSignal
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
        self.is_in_ours = False
        """Whether a database transaction of ours is open, unless SQLite has rolled it back by itself."""

        self._cursors: weakref.WeakSet[sqlite3.Cursor] = weakref.WeakSet()
        _open.add(self)

    def cursor(self, *arguments: Any, **options: Any) -> Any:
        """Return a new cursor."""
        cursor = super().cursor(*arguments, **options)
        self._cursors.add(cursor)
        return cursor

    def passing_cursor(self) -> sqlite3.Cursor:
        """Return a new cursor that is read to its end, or closed, before anybody else has a turn."""
        return sqlite3.Cursor(self)

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
    # The store decides when the WAL is moved into the file: see `Checkpointer`.
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("PRAGMA journal_size_limit = 0")
    # A file from a stranger may hold views and triggers that call functions; those must have no effects.
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
    _waiting.forget_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=FORK_LOCK.release, after_in_child=_after_fork_in_child)


# --- the checkpoint --------------------------------------------------------------------------------------------------

#: The length at which SQLite itself would checkpoint: 1,000 pages of 4 KiB.
WAL_BYTES_DUE: Final = 1000 * 4096
#: From this length on writers wait a little for readers to leave, so that the log can start over.
WAL_BYTES_ROOM: Final = 16 * 1024 * 1024
#: How long they wait then, once the log is moved: at first. And for either step: at most for each WAL_BYTES_ROOM of
#: the log, and at most at all.
ROOM_FIRST_SECONDS: Final = 0.01
ROOM_EACH_SECONDS: Final = 0.05
ROOM_LAST_SECONDS: Final = 0.2
_LOOK_SECONDS: Final = 0.001


class Moved(NamedTuple):
    """How far a checkpoint came; frames are pages of the log."""

    log_frames: int
    moved_frames: int

    @property
    def is_all(self) -> bool:
        """Whether all of the log is in the file."""
        return self.moved_frames == self.log_frames


class Checkpointer:
    """Keeps the write-ahead log of one file short."""

    def __init__(self, path: str) -> None:
        """Watch the log of the database file at `path`."""
        self._path = path
        self._wal_path = path + "-wal"
        self._due_bytes = WAL_BYTES_DUE
        self._room_seconds = ROOM_FIRST_SECONDS
        #: What became of the last try: whether all was moved, and how much.
        self._was_all_moved = False
        self._stuck_frames = -1

    def run_if_due(self) -> None:
        """Checkpoint if the log has grown.

        A busy writer puts it off until the next commit, a reader that needs the log until it has grown once more.
        What goes wrong here goes wrong after a commit that stands, so it is nobody's error.
        """
        try:
            wal_bytes = os.stat(self._wal_path).st_size  # noqa: PTH116 - called after every commit
        except FileNotFoundError:
            return
        if wal_bytes < WAL_BYTES_DUE:
            if self._due_bytes > WAL_BYTES_ROOM:
                # It was long enough; readers may be quicker by now.
                self._room_seconds = max(ROOM_FIRST_SECONDS, 0.75 * self._room_seconds)
            self._due_bytes = WAL_BYTES_DUE
            self._was_all_moved = False
        elif wal_bytes >= self._due_bytes and self._run(wal_bytes):
            self._due_bytes = wal_bytes + WAL_BYTES_DUE

    def _run(self, wal_bytes: int) -> bool:
        if wal_bytes < WAL_BYTES_ROOM:
            return checkpoint(self._path)
        longest_seconds = min(ROOM_EACH_SECONDS * wal_bytes / WAL_BYTES_ROOM, ROOM_LAST_SECONDS)
        if self._was_all_moved:
            # And yet the log has grown on: readers stayed for longer than that.
            self._room_seconds = min(2 * self._room_seconds, longest_seconds)
        moved = make_room(self._path, longest_seconds, self._room_seconds, stuck_frames=self._stuck_frames)
        if moved is not None:
            self._was_all_moved = moved.is_all
            self._stuck_frames = moved.moved_frames
        return moved is not None


def checkpoint(path: str) -> bool:
    """Move what no reader still needs of the log into the file; False if a writer was busy and nothing was done."""
    return make_room(path, 0.0, 0.0) is not None


def make_room(path: str, wait_seconds: float, linger_seconds: float, *, stuck_frames: int = -1) -> Moved | None:
    """Move what no reader still needs, and let the next writer start the log over if readers leave in time.

    The next writer does so if all of the log is in the file and nobody reads from the log.  A reader who began before
    the last commit prevents the first: it is waited for, for `wait_seconds` at most, but not if it stopped the last try
    as well, which came up to `stuck_frames`.  Then, whoever begins to read while nobody writes reads from the file
    alone: so no reader waits at all.  Those that were there before leave one by one, and SQLite does not tell when: so
    `linger_seconds` are waited out.

    Returns None if a writer was busy and nothing was done.
    """
    try:
        with _nobody_writes(path) as worker:
            deadline = time.monotonic() + wait_seconds
            moved = _move(worker)
            while not moved.is_all and moved.moved_frames != stuck_frames and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
                moved = _move(worker)
            if moved.is_all:
                time.sleep(linger_seconds)
    except sqlite3.Error:
        # A full disk or an I/O error here loses nothing: the log still has every frame.
        return None
    return moved


@contextmanager
def _nobody_writes(path: str) -> Iterator[sqlite3.Connection]:
    """Give a connection to checkpoint with, while another one keeps the write lock; fails if that is taken."""
    # Connections of its own: those of the pool may all be in use. No fork may come between them.
    with FORK_LOCK, closing(connect(path)) as guard:
        guard.execute("BEGIN IMMEDIATE")
        with closing(connect(path)) as worker:
            yield worker


def _move(worker: sqlite3.Connection) -> Moved:
    # PASSIVE waits for nobody and takes no write lock: the guard has it, until it is closed.
    ((_, log_frames, moved_frames),) = worker.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    return Moved(log_frames, moved_frames)


# --- the wait for commits --------------------------------------------------------------------------------------------


#: How long a reader looks no more after commits of others alone: at first, and at most.
VAIN_FIRST_SECONDS: Final = 0.001
VAIN_LAST_SECONDS: Final = 0.05


class _Waiting:
    """Those that wait in this process, by the file's path."""

    def __init__(self) -> None:
        self.forget_after_fork()

    def forget_after_fork(self) -> None:
        # The parent's threads do not wait in its child; one of them may have held the lock.
        self._lock = threading.Lock()
        self._waiters: defaultdict[str, weakref.WeakSet[FileWaiter]] = defaultdict(weakref.WeakSet)

    def add(self, path: str, waiter: FileWaiter) -> None:
        with self._lock:
            self._waiters[path].add(waiter)

    def at(self, path: str) -> list[FileWaiter]:
        with self._lock:
            return list(self._waiters[path]) if path in self._waiters else []


_waiting: Final = _Waiting()


class FileAnnouncer:
    """Wakes the readers of a file: those of this process at once, those of others by a touch of the log."""

    def __init__(self, path: str) -> None:
        """Wake readers of the file at `path`."""
        self._path = path
        self._wal_path = path + "-wal"

    def announce(self, subjects: Subjects) -> None:
        """Say that something was committed."""
        for waiter in _waiting.at(self._path):
            if waiter.subjects.meets(subjects):
                waiter.wake()
        # The commit itself writes to the log before it is done; this tells that it is. Without a log nobody watches it.
        with contextlib.suppress(OSError):
            os.utime(self._wal_path)

    def close(self, timeout_seconds: float) -> None:
        """Do nothing: it holds nothing."""


class _Inotify:
    """The functions of the C library by which Linux tells of changes of a file."""

    #: Its times were set, or it was deleted: IN_ATTRIB; the flags are O_NONBLOCK and O_CLOEXEC.
    TOUCHED: Final = 0x4
    FLAGS: Final = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0) if hasattr(os, "O_NONBLOCK") else 0
    EVENT_BYTES: Final = 4096

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def watch(self, path: str) -> int:
        """Return a descriptor that has input once the file is touched; -1 where there is none."""
        if self._library is None:
            return -1
        try:
            descriptor: int = self._library.inotify_init1(self.FLAGS)
            if descriptor >= 0 and self._library.inotify_add_watch(descriptor, os.fsencode(path), self.TOUCHED) < 0:
                os.close(descriptor)
                return -1
        except (AttributeError, OSError):
            return -1
        return descriptor

    def take(self, descriptor: int) -> None:
        """Forget the touches until now."""
        with contextlib.suppress(OSError):
            while len(os.read(descriptor, self.EVENT_BYTES)) == self.EVENT_BYTES:
                pass


_inotify: Final = _Inotify()

#: What a reader compares: whether rows wait in the outbox, the heads of its partitions, its groups and their members,
#: who change no generation when they give something back.  Text, for a sum of offsets may not fit an integer.
LOOK: Final = """
    SELECT EXISTS (SELECT 1 FROM txnstore_outbox WHERE refusal IS NULL),
        (SELECT group_concat(next_offset) FROM txnstore_partition_heads
            WHERE partition_id IN (SELECT value FROM json_each(?1))),
        (SELECT group_concat(generation) FROM txnstore_groups
            WHERE group_id IN (SELECT value FROM json_each(?2))),
        (SELECT group_concat(subscription) FROM txnstore_group_members
            WHERE group_id IN (SELECT value FROM json_each(?2)))
"""


class FileWaiter:
    """Waits until another connection, of this process or another, has committed something that the reader reads.

    Any commit to the file changes its data version.  Whether it was for this reader, one statement tells; and the
    longer there are commits of others alone, the more seldom it is asked.  A touch of the log says that there was a
    commit, where the system tells of it; and every few milliseconds the waiter looks by itself, for applications
    commit, too, and do not touch.
    """

    def __init__(self, path: str, subjects: Subjects) -> None:
        """Watch the file at `path`, through a connection that does nothing else: its own commits would not count."""
        self.subjects = subjects
        self._path = path
        self._lock = threading.RLock()
        self._process_id = os.getpid()
        self._signal = WakeSignal()
        self._watched = -1
        self._pause_ms = float(POLL_FIRST_MS)
        self._vain_seconds = 0.0
        self._connection: sqlite3.Connection | None = None
        self._version: int | None = None
        self._seen: object = None
        self._parameters = ("[]", "[]")
        self._has_moved()
        _waiting.add(path, self)
        close_before_fork(self, FileWaiter._close_connection)

    def listen(self, subjects: Subjects) -> bool:
        """Wait for commits about these from now on; return whether they are others than before."""
        if subjects == self.subjects:
            return False
        self.subjects = subjects
        self._version = None
        self._has_moved()
        return True

    def wait(self, timeout_ms: int) -> bool:
        """Return True once something was committed since the last call, False after `timeout_ms`."""
        if self._process_id != os.getpid():
            # The signal is the parent's: used by both, each would get what is meant for the other.
            self._process_id, self._signal = os.getpid(), WakeSignal()
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            if self._signal.take():
                # What it would find is what it was woken for.
                self._has_moved()
                self._begin_anew()
                return True
            has_moved = self._has_moved()
            if has_moved:
                self._begin_anew()
                return True
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                return False
            self._rest(left_seconds, in_vain=has_moved is None)

    def wake(self) -> None:
        """Let the wait that is under way, or else the next one, return True at once."""
        self._signal.set()

    def close(self) -> None:
        """Give back what it holds; a second call does nothing."""
        self._close_connection()
        self._signal.close()

    def _begin_anew(self) -> None:
        self._vain_seconds = 0.0
        self._pause_ms = float(POLL_FIRST_MS)

    def _rest(self, left_seconds: float, *, in_vain: bool) -> None:
        """Wait for a touch, a `wake`, or until it is time to look."""
        if in_vain:
            self._vain_seconds = min(max(2 * self._vain_seconds, VAIN_FIRST_SECONDS), VAIN_LAST_SECONDS)
            # Touches have to wait.
            if self._signal.wait_alone(min(self._vain_seconds, left_seconds)):
                return
        if self._watched >= 0:
            self._pause_ms = POLL_LAST_MS
        is_told = self._signal.wait(max(0.0, min(self._pause_ms / 1000, left_seconds)))
        with self._lock:
            if is_told and self._watched >= 0:
                _inotify.take(self._watched)
        if not is_told and not in_vain:
            # Nothing was committed for that long.
            self._vain_seconds = 0.0
        self._pause_ms = min(self._pause_ms * 1.5, POLL_LAST_MS)

    def _has_moved(self) -> bool | None:
        """Return whether there is something for the reader; None if there were only commits of others.

        What happened while the file could not be read is told once it can.
        """
        try:
            # Opened without the lock, for a fork that keeps it from being opened takes that.
            opened = connect(self._path) if self._connection is None else None
            with self._lock:
                if opened is not None:
                    self._adopt(opened)
                if self._connection is None:
                    # Closed since, by a fork: the next look opens it again.
                    return False
                (version,) = self._connection.execute("PRAGMA data_version").fetchone()
                if version == self._version:
                    return False
                before, self._version = self._version, version
                return self._compare(self._connection, is_first=before is None)
        except sqlite3.Error:
            self._close_connection()
            return False

    def _compare(self, connection: sqlite3.Connection, *, is_first: bool) -> bool | None:
        if self.subjects.is_everything:
            return True
        if is_first:
            subjects = self.subjects
            self._parameters = (json.dumps(sorted(subjects.partition_ids)), json.dumps(sorted(subjects.group_ids)))
        row = connection.execute(LOOK, self._parameters).fetchone()
        seen, self._seen = self._seen, row
        # While a row waits, each commit may have let it go.
        return True if is_first or row != seen or row[0] else None

    def _adopt(self, opened: sqlite3.Connection) -> None:
        if self._connection is not None:
            opened.close()
            return
        self._connection = opened
        # There is a log once somebody has read.
        opened.execute("PRAGMA data_version").fetchone()
        self._watched = _inotify.watch(self._path + "-wal")
        self._signal.watch(self._watched)

    def _close_connection(self) -> None:
        """Close the connection; a later `wait` opens another one, which knows of no version and looks at once."""
        with self._lock:
            connection, self._connection = self._connection, None
            self._version = None
            if self._watched >= 0:
                self._signal.watch(-1)
                os.close(self._watched)
                self._watched = -1
        if connection is not None:
            connection.close()


# --- text that others have written -----------------------------------------------------------------------------------


@contextmanager
def any_text(connection: Connection) -> Iterator[None]:
    """Read bytes that are not UTF-8 as halves of surrogate pairs meanwhile, instead of failing.

    SQLite keeps any bytes as text; PostgreSQL refuses them.
    """
    if connection.dialect.name != "sqlite":
        yield
        return
    driver: Any = connection.connection.driver_connection
    before = driver.text_factory
    driver.text_factory = _decoded
    try:
        yield
    finally:
        driver.text_factory = before


def _decoded(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")

"""Connections to SQLite files: opened so that commits last, in line to write, checkpointed while nobody writes.

None of them is open while the process forks.  SQLite remembers in the memory of the process which locks the process
holds on a file.  A child inherits that memory, but not the locks.  So a connection that it opens later would rely on
locks that nobody holds: the parent, closing its last connection, would delete the write-ahead log under the child, and
with it what the child has committed.
https://www.sqlite.org/howtocorrupt.html#_carrying_an_open_database_connection_across_a_fork_

They never checkpoint by themselves (`wal_autocheckpoint = 0`).  SQLite 3.7.0 to 3.51.2 may corrupt the file when one
connection checkpoints in the very moment in which another writes or checkpoints (the "WAL-reset bug").  So a
client that finds the write-ahead log long takes the file's write lock, and under it a second connection checkpoints.
Nobody else can write or checkpoint meanwhile, in this process or another.

The mode is always PASSIVE.  RESTART and TRUNCATE want the write lock for themselves, and where they do not get it they
go on as a PASSIVE beside which somebody may write, which must never happen.  What they would do is done by hand where
readers overlap without a pause, so that the log never comes to its end: see `make_room`.

An application that writes to the same file through connections of its own checkpoints by SQLite's default rules;
it should do as we do, or run SQLite 3.51.3 or newer.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import operator
import os
import sqlite3
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple, Protocol, Self, TypeVar

from txnstore.db.backend import Subjects
from txnstore.db.sqlite.log_file import CheckpointProgress, LogFile, file_has_gone, log_has_gone
from txnstore.db.sqlite.shared_words import (
    FUTEX_WAIT,
    FUTEX_WAIT_BITSET,
    FUTEX_WAKE,
    FUTEX_WAKE_BITSET,
    LINE_WORDS,
    NANOSECONDS,
    NOT_WOKEN,
    WORD_BYTES,
    WORD_MASK,
    Timespec,
    futex,
    mapped_words,
    word_at,
)
from txnstore.errors import StoreClosed, StoreUnavailable

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
#: Those whose write-ahead log was taken away from connections of this process.
_files_without_log: Final[set[tuple[int, int]]] = set()


class SQLiteConnection(sqlite3.Connection):
    """A connection that is known as open until it is closed."""

    def __init__(self, path: str, **options: Any) -> None:
        """Open the file at `path`; see `connect`."""
        super().__init__(path, **options)
        self.path = path
        self.file: tuple[int, int] | None = None
        """The device and the number of the file that it has open; None before it is."""
        self.is_in_wal_mode = False
        """Whether it has a write-ahead log, which all of its clients share in the memory of one machine."""
        self.waits_for_disk: bool | None = None
        """Whether its commits wait for the disk; None: nobody knows."""
        self.is_in_ours = False
        """Whether a database transaction of ours is open, unless SQLite has rolled it back by itself."""
        self.is_writing = False
        """Whether the last one that began was to write."""

        self.log: tuple[int, int] | None = None
        """The same of its write-ahead log; None where there is none, or it has not been seen."""
        self.log_path = os.path.realpath(path) + "-wal"
        self._cursors: weakref.WeakSet[sqlite3.Cursor] = weakref.WeakSet()
        #: Where writers of the file wait; None before the first time.
        self._line: WriterLine | None = None
        #: Its turn there while it has the write lock; else 0.
        self._turn = 0
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
        if len(self._cursors):
            for cursor in list(self._cursors):
                cursor.close()

    def leads_elsewhere(self) -> bool:
        """Return whether the file or its log was moved, deleted or replaced: what is written would be lost.

        SQLite itself asks before it writes (SQLITE_READONLY_DBMOVED), but not where there is a write-ahead log.
        """
        return _is_another(self.path, self.file) or _is_another(self.log_path, self.log)

    def is_without_log(self) -> bool:
        """Return whether the file is where it was, but not its log, which SQLite keeps while anybody has it open."""
        # Asked last: whoever closes it, perhaps as the last one, who deletes the log, has forgotten the log before.
        has_gone = (
            _is_another(self.log_path, self.log) and not _is_another(self.path, self.file) and self.log is not None
        )
        return has_gone or self.file in _files_without_log

    def what_has_gone(self) -> StoreUnavailable:
        """Return the error of a caller whose connection `leads_elsewhere`."""
        return log_has_gone(self.path) if self.is_without_log() else file_has_gone(self.path)

    def close(self) -> None:
        """Close it, even if somebody still holds a cursor; a second call does nothing."""
        self.close_cursors()
        if self.is_without_log():
            _keep_without_log(self)
            # Nobody has to wait for it.
            with contextlib.suppress(sqlite3.Error):
                self.rollback()
        else:
            self._close_with_log()
        self.leave_line()
        self._line = None
        _open.discard(self)

    def _close_with_log(self) -> None:
        log, self.log = self.log, None
        try:
            super().close()
        except BaseException:
            self.log = log
            raise

    def wait_in_line(self) -> None:
        """Return once no writer of ours has the write lock, or has had it for long."""
        if self._line is None:
            self._line = _line_at(self.path)
        self._line.wait()

    def enter_line(self) -> None:
        """Say in the line that this connection has the write lock."""
        if self._line is not None:
            self._turn = self._line.enter()

    def leave_line(self) -> None:
        """Say there that it has it no more; nothing happens if it had not."""
        turn, self._turn = self._turn, 0
        if turn and self._line is not None:
            self._line.leave(turn)


def connect(path: str, *, is_there: bool = False, only_looks: bool = False) -> SQLiteConnection:
    """Open the file in the mode that the guarantees need, or that it has; a new file is readable by its owner only.

    None is made where one `is_there` already: an empty one would hide that it was moved or deleted.

    Raises:
        sqlite3.Error: SQLite refuses.
        StoreClosed: this process was forked off while the file was in use.
        StoreUnavailable: there is no file, though one `is_there`.
    """
    with FORK_LOCK:
        if not os.path.exists(path):  # noqa: PTH110 - pathlib's is no better here
            if is_there:
                raise file_has_gone(path)
            # Only we may read what applications log, whatever the umask says. Under the lock, for this close gives up
            # all locks of the process on the file. Somebody else may be first, and SQLite will say what is wrong.
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        _refuse_if_lost(path)
        _refuse_without_log(path)
        # timeout=0: SQLite's own waiting starves writers when commits sync to disk; the store's retry is fair.
        connection = sqlite3.connect(
            path, timeout=0, isolation_level=None, check_same_thread=False, factory=SQLiteConnection
        )
        try:
            connection.file = _file_at(path)
            _configure(connection, only_looks=only_looks)
        except BaseException:
            connection.close()
            raise
    return connection


def _keep_without_log(connection: SQLiteConnection) -> None:
    """Never close a connection to a file whose log was taken from it, nor open another one beside it.

    The last one that is closed moves its log into the file, over what others have written since.  And SQLite lets all
    connections of a process share one index of the log: a new one would look for the old log's pages in the new log.
    """
    assert connection.file is not None, "without it nothing is missed"
    _files_without_log.add(connection.file)
    # Also when the interpreter ends.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


def _all_open() -> list[SQLiteConnection]:
    while True:
        # It fails if another thread opens or closes one just then; a lock might be inherited taken.
        with contextlib.suppress(RuntimeError):
            return list(_open)


def _keep_those_without_log() -> None:
    for connection in _all_open():
        if connection.is_without_log():
            _keep_without_log(connection)


# What nobody has closed is closed as the interpreter ends.
atexit.register(_keep_those_without_log)


def _refuse_without_log(path: str) -> None:
    _keep_those_without_log()
    if _files_without_log and _file_at(path) in _files_without_log:
        raise log_has_gone(path)


def close_before_fork(holder: Holder, let_go: Callable[[Holder], None]) -> None:
    """From now on call `let_go(holder)` before a fork: it closes the connections that are not in use."""
    with FORK_LOCK:
        _holders[holder] = let_go


def _configure(connection: SQLiteConnection, *, only_looks: bool = False) -> None:
    (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    if mode != "wal" and not only_looks:
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        # The first one to read makes the log.
        connection.execute("PRAGMA schema_version").fetchone()
    connection.is_in_wal_mode = mode == "wal"
    if connection.is_in_wal_mode:
        with contextlib.suppress(OSError):
            connection.log = _file_at(connection.log_path)
    connection.execute(set_wait_for_disk(waits=True))
    connection.waits_for_disk = True
    # The store decides when the WAL is moved into the file: see `Checkpointer`.
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    # Its file keeps so much space: a commit that writes to space there is waits less for the disk than one that makes
    # the file longer.
    connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES_DUE}")
    # A file from a stranger may hold views and triggers that call functions; those must have no effects.
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")


def set_wait_for_disk(*, waits: bool) -> str:
    """Return the statement, outside of database transactions, after which commits wait for the disk or do not.

    EXTRA: an acknowledged commit survives the loss of power, also where its journal is deleted; in WAL mode it is FULL.
    NORMAL does not promise that: in WAL mode it lasts from the next one on that is waited for, or a checkpoint.
    """
    return f"PRAGMA synchronous = {'EXTRA' if waits else 'NORMAL'}"


def _file_at(path: str) -> tuple[int, int]:
    found = os.stat(path)  # noqa: PTH116 - called for every connection
    return found.st_dev, found.st_ino


def _is_another(path: str, file: tuple[int, int] | None) -> bool:
    """Return whether a file that is open is not the one at the path any more."""
    try:
        return file is not None and _file_at(path) != file
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        # Not to be allowed to look is no sign of it.
        return False


def _refuse_if_lost(path: str) -> None:
    if _lost_files and os.path.exists(path) and _file_at(path) in _lost_files:  # noqa: PTH110 - as above
        raise StoreClosed(
            f"the SQLite file {path!r} was in use by another thread when this process was forked, so this process"
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
    waiting.forget_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=FORK_LOCK.release, after_in_child=_after_fork_in_child)


# --- the line of writers ----------------------------------------------------------------------------------------------

#: What a writer waits at most for others of ours to end, before it tries all the same.
LINE_WAIT_SECONDS: Final = 0.05
_NO_CLAIM: Final = 0


class WriterLine:
    """Where the writers of one file, of all processes, wait for its write lock: in the kernel, the first one first.

    SQLite has no queue: a connection that finds the lock taken can only try again, and the more there are, the more
    they do nothing else.  So a writer of ours that ends its database transaction wakes the one that has waited longest.
    One that comes by just then may be quicker, or else the lock would lie idle until the other one is awake.

    It is advice only: nobody holds anything here, and SQLite's own lock decides.  Who is not woken, because the writer
    was killed or stopped, tries by itself a moment later.  Nobody waits here for writers that are not ours.

    Beside the database file, in `-line`, lie two words that all processes see: one that is odd while one of ours
    writes, and one that says which log somebody moves into the file.  Without them (a folder or file that is not ours,
    a system other than Linux) there is no line, and everybody tries again and again.
    """

    def __init__(self, path: str) -> None:
        """Wait for the write lock of the database file at `path`."""
        self._word: ctypes.c_uint32 | None = None
        self._claimed: ctypes.c_uint32 | None = None
        if futex is not None:
            with contextlib.suppress(OSError, ValueError):
                memory = mapped_words(path)
                self._word, self._claimed = word_at(memory, 0), word_at(memory, 1)

    def wait(self) -> None:
        """Return once no writer of ours has the lock, at the latest after LINE_WAIT_SECONDS."""
        word = self._word
        if word is None or word.value % 2 == 0:
            return
        deadline = time.monotonic() + LINE_WAIT_SECONDS
        while (found := word.value) % 2 and (left_seconds := deadline - time.monotonic()) > 0:
            limit = Timespec(*divmod(int(left_seconds * NANOSECONDS), NANOSECONDS))
            if (
                _call_futex(ctypes.addressof(word), FUTEX_WAIT, found, limit) < 0
                and ctypes.get_errno() not in NOT_WOKEN
            ):
                # The system has forbidden it.
                self._word = None
                return

    def enter(self) -> int:
        """Say that the caller has the lock, and return its turn; 0 where there is no line."""
        if self._word is None:
            return 0
        # Nobody else is here, because the caller has the lock.
        turn = self._word.value = (self._word.value + 1 | 1) & WORD_MASK
        return turn

    def leave(self, turn: int) -> None:
        """Say that the caller has it no more, and let the next one try."""
        word = self._word
        if word is None:
            return
        # If it is another turn, the next writer is here already.
        if word.value == turn:
            word.value = (turn + 1) & WORD_MASK
        _call_futex(ctypes.addressof(word), FUTEX_WAKE, 1)

    def claim(self, number: int) -> bool:
        """Return whether nobody has claimed this log, which the caller has now; only the last claim counts."""
        if self._claimed is not None:
            if self._claimed.value == number != _NO_CLAIM:
                return False
            self._claimed.value = number
        return True


#: Those of the files that this process writes to, as long as one of its connections is open.
_lines: Final[weakref.WeakValueDictionary[str, WriterLine]] = weakref.WeakValueDictionary()


def _line_at(path: str) -> WriterLine:
    # No lock, which a child would inherit taken: two threads that map the file at once do no harm.
    line = _lines.get(path)
    if line is None:
        line = _lines[path] = WriterLine(path)
    return line


def _call_futex(address: int, operation: int, value: int, limit: Timespec | None = None, bits: int = 0) -> int:
    """Wait at the word at this address, or wake those who do; -1: see errno."""
    assert futex is not None, "without it nothing is mapped"
    return futex(address, operation, value, None if limit is None else ctypes.byref(limit), None, bits)


# --- the checkpoint --------------------------------------------------------------------------------------------------

#: The length at which SQLite itself would checkpoint: 1,000 pages of 4 KiB.
WAL_BYTES_DUE: Final = 1000 * 4096
#: From this length on writers wait a little for readers to leave, so that the log can start over.
WAL_BYTES_ROOM: Final = 16 * 1024 * 1024
#: How long they wait then, once the log is moved: at first. And for either step at most: both together for less than a
#: writer is to wait for any upkeep, until the log is so long that this matters more.
ROOM_FIRST_SECONDS: Final = 0.01
ROOM_SHORT_SECONDS: Final = 0.02
ROOM_LAST_SECONDS: Final = 0.2
WAL_BYTES_LONG: Final = 16 * WAL_BYTES_ROOM
_LOOK_SECONDS: Final = 0.001


class Checkpointer:
    """Keeps the write-ahead log of one file short."""

    def __init__(self, path: str) -> None:
        """Watch the log of the database file at `path`; it lies beside the file, not beside a link that leads there."""
        self._path = path
        self._wal_path = os.path.realpath(path) + "-wal"
        #: To open them takes longer than the checkpoint.
        self._kept: list[_Pair] = []
        self._log: LogFile | None = None
        self._due_bytes = WAL_BYTES_DUE
        self._room_seconds = ROOM_FIRST_SECONDS
        #: What became of the last try: whether all was moved, and how much.
        self._was_all_moved = False
        self._stuck_frames = -1
        close_before_fork(self, Checkpointer.close_connections)

    def close_connections(self) -> None:
        """Close what it looks and checkpoints with; the next checkpoint opens others."""
        with FORK_LOCK:
            self._log, self._wal_path = None, os.path.realpath(self._path) + "-wal"
            while self._kept:
                self._kept.pop().close()

    def run_if_due(self) -> None:
        """Checkpoint if the log has grown.

        A writer that stays busy puts it off until the next commit, a reader that needs the log until it has grown once
        more.  What goes wrong here goes wrong after a commit that stands, so it is nobody's error.
        """
        try:
            found = os.stat(self._wal_path)  # noqa: PTH116 - called after every commit
            wal_bytes = found.st_size
            salt = None if wal_bytes < WAL_BYTES_DUE else self._log_at(found).salt(WAL_BYTES_DUE)
        except OSError:
            return
        if salt is None:
            if self._due_bytes > WAL_BYTES_ROOM:
                # It was long enough; readers may be quicker by now.
                self._room_seconds = max(ROOM_FIRST_SECONDS, 0.75 * self._room_seconds)
            self._due_bytes = WAL_BYTES_DUE
            self._was_all_moved = False
        elif wal_bytes >= self._due_bytes and self._run_unless_claimed(wal_bytes, salt):
            self._due_bytes = wal_bytes + WAL_BYTES_DUE

    def _log_at(self, found: os.stat_result) -> LogFile:
        # No lock: another thread may put another one there, or none, but not close one that is in use.
        log = self._log
        if log is None or not log.is_same(found):
            log = LogFile(self._wal_path)
            if LogFile.MAY_STAY_OPEN:
                self._log = log
        return log

    def _run_unless_claimed(self, wal_bytes: int, salt: int) -> bool:
        """Return whether the log was moved, or another process is at it; if that one dies, the log grows once more."""
        line = _line_at(self._path)
        claim = (salt + wal_bytes // WAL_BYTES_DUE) & WORD_MASK
        if not line.claim(claim):
            return True
        is_done = False
        try:
            is_done = self._run(wal_bytes)
        finally:
            if not is_done:
                line.claim(_NO_CLAIM)
        return is_done

    def _run(self, wal_bytes: int) -> bool:
        if wal_bytes < WAL_BYTES_ROOM:
            return checkpoint(self._path, self._kept)
        longest_seconds = ROOM_SHORT_SECONDS if wal_bytes < WAL_BYTES_LONG else ROOM_LAST_SECONDS
        if self._was_all_moved:
            # And yet the log has grown on: readers stayed for longer than that.
            self._room_seconds = min(2 * self._room_seconds, longest_seconds)
        linger_seconds = min(self._room_seconds, longest_seconds)  # after a log that was longer
        moved = make_room(self._path, longest_seconds, linger_seconds, stuck_frames=self._stuck_frames, kept=self._kept)
        if moved is not None:
            self._was_all_moved = moved.is_all
            self._stuck_frames = moved.moved_frames
        return moved is not None


class _Pair(NamedTuple):
    """What checkpoints: one connection keeps the write lock, and under it the other one moves the log."""

    guard: SQLiteConnection
    worker: SQLiteConnection

    def close(self) -> None:
        self.worker.close()
        self.guard.close()


def checkpoint(path: str, kept: list[_Pair] | None = None) -> bool:
    """Move what no reader still needs of the log into the file; False if a writer was busy and nothing was done."""
    return make_room(path, 0.0, 0.0, kept=kept) is not None


def make_room(
    path: str,
    wait_seconds: float,
    linger_seconds: float,
    *,
    stuck_frames: int = -1,
    kept: list[_Pair] | None = None,
) -> CheckpointProgress | None:
    """Move what no reader still needs, and let the next writer start the log over if readers leave in time.

    The next writer does so if all of the log is in the file and nobody reads from the log.  A reader that began before
    the last commit prevents the first: it is waited for, for `wait_seconds` at most, but not if it stopped the last try
    as well, which came up to `stuck_frames`.  Then, a reader that begins while nobody writes reads from the file
    alone: so no reader waits at all.  Those that were there before leave one by one, and SQLite does not tell when: so
    `linger_seconds` are waited out.

    The connections come from `kept` and go there, if it is given; else they are opened and closed.

    Returns None if a writer was busy and nothing was done.
    """
    try:
        with _nobody_writes(path, kept) as worker:
            deadline = time.monotonic() + wait_seconds
            moved = _move(worker)
            while not moved.is_all and moved.moved_frames != stuck_frames and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
                moved = _move(worker)
            if moved.is_all:
                time.sleep(linger_seconds)
    except (sqlite3.Error, StoreUnavailable, OSError):
        # A full disk or an I/O error here loses nothing: the log still has every frame.
        return None
    return moved


@contextmanager
def _nobody_writes(path: str, kept: list[_Pair] | None) -> Iterator[sqlite3.Connection]:
    """Give a connection to checkpoint with, while another one keeps the write lock; fails if that stays taken."""
    # Connections of its own: those of the pool may all be in use. No fork may come between them.
    with FORK_LOCK, ExitStack() as stack:
        if kept:
            pair = kept.pop()
        else:
            guard = connect(path, is_there=True)
            stack.callback(guard.close)
            pair = _Pair(guard, connect(path, is_there=True))
        stack.callback(pair.close)
        pair.guard.wait_in_line()
        pair.guard.execute("BEGIN IMMEDIATE")
        pair.guard.enter_line()
        if pair.worker.leads_elsewhere():
            # The log that it would move belongs to nobody any more.
            raise pair.worker.what_has_gone()
        yield pair.worker
        if kept is not None:
            pair.guard.execute("ROLLBACK")
            pair.guard.leave_line()
            kept.append(pair)
            stack.pop_all()


def _move(worker: sqlite3.Connection) -> CheckpointProgress:
    # PASSIVE waits for nobody and takes no write lock: the guard has it, until it is closed.
    ((_, log_frames, moved_frames),) = worker.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    return CheckpointProgress(log_frames, moved_frames)


# --- the stamps of commits --------------------------------------------------------------------------------------------

#: The word at which everybody waits: it is changed to wake somebody.
_BELL: Final = LINE_WORDS
#: Stamped by each commit; by those that may concern anybody; from here on by those about a bucket.
_EACH: Final = LINE_WORDS + 1
_ANYBODY: Final = LINE_WORDS + 2
_BUCKETS: Final = LINE_WORDS + 3
#: A waiter for a bucket shares one of so many bits with others.
_BITS: Final = 32
_ALL_WAITERS: Final = 2**31 - 1


class CommitStamps:
    """Words in shared memory that say which partitions and groups the latest commits to one file were about.

    After its commit a writer puts a new stamp on each bucket that it has changed, and wakes those who wait for one of
    these buckets.  The others sleep on: a reader costs nothing while nobody commits what it reads.

    A stamp is a hint, as any wake-up.  What is committed without one (by an application, another version, a writer that
    was killed in between) is found by the reader's own look at the file, a little later.
    """

    def __init__(self, path: str) -> None:
        """Map those of the database file at `path`; see `beside`."""
        memory = mapped_words(path)
        self._words = memoryview(memory).cast("I")
        #: Keeps the memory mapped where others wait.
        self._bell = word_at(memory, _BELL)
        self._bell_address = ctypes.addressof(self._bell)

    @classmethod
    def beside(cls, path: str) -> Self | None:
        """Return those of the database file at `path`; None where there are none."""
        if futex is not None:
            try:
                return cls(path)
            except (OSError, ValueError):
                pass
        return None

    def put(self, subjects: Subjects) -> None:
        """Say that something about these was committed, and wake those who wait for it."""
        places, bits = _stamped(subjects)
        stamp = _new_stamp()
        for place in places:
            self._words[place] = stamp
        self._words[_EACH] = stamp
        self._ring(stamp, bits)

    def call(self, bits: int) -> None:
        """Wake those who wait with one of these bits, or are just about to, for a reason of their own."""
        self._ring(_new_stamp(), bits)

    def _ring(self, stamp: int, bits: int) -> None:
        self._words[_BELL] = stamp
        _call_futex(self._bell_address, FUTEX_WAKE_BITSET, _ALL_WAITERS, None, bits)

    @property
    def bell(self) -> int:
        """What `wait` takes; asked for before the stamps are compared."""
        return self._words[_BELL]

    def at(self, places: Callable[[Any], object]) -> object:
        """Return the stamps at these places."""
        return places(self._words)

    def wait(self, bell: int, bits: int, until_seconds: float) -> bool:
        """Wait until somebody rings for one of these bits; not at all if somebody has rung since `bell`.

        False: the system has forbidden it.
        """
        limit = Timespec(*divmod(int(until_seconds * NANOSECONDS), NANOSECONDS))
        is_woken = _call_futex(self._bell_address, FUTEX_WAIT_BITSET, bell, limit, bits) >= 0
        return is_woken or ctypes.get_errno() in NOT_WOKEN


@functools.lru_cache(1_024)
def _stamped(subjects: Subjects) -> tuple[tuple[int, ...], int]:
    """Return the places that a commit about these stamps, and the bits of those who wait there."""
    if subjects.is_everything:
        return (_ANYBODY,), WORD_MASK
    buckets = subjects.buckets()
    return tuple(_BUCKETS + bucket for bucket in buckets), _bits_of(buckets)


def stamps_heard(subjects: Subjects) -> tuple[Callable[[Any], object], int]:
    """Return for a reader of these how to take its stamps `at` their places, and with which bits it waits."""
    if subjects.is_everything:
        return operator.itemgetter(_EACH), WORD_MASK
    buckets = subjects.buckets()
    # A waiter for nothing in particular has to wait with some bit.
    return operator.itemgetter(_ANYBODY, *(_BUCKETS + bucket for bucket in buckets)), _bits_of(buckets) or 1


def _bits_of(buckets: frozenset[int]) -> int:
    return functools.reduce(operator.or_, (1 << bucket % _BITS for bucket in buckets), 0)


def _new_stamp() -> int:
    # Not counted up: two writers at once would come to the same number. And not of `random`, whose numbers an
    # application may have chosen.
    return int.from_bytes(os.urandom(WORD_BYTES), "little")


# --- the wait for commits --------------------------------------------------------------------------------------------


class _Reader(Protocol):
    subjects: Subjects

    @property
    def sees_stamps(self) -> bool: ...

    def wake(self) -> None: ...


class _Waiters:
    """Those that wait in this process, by the file's path."""

    def __init__(self) -> None:
        self.forget_after_fork()

    def forget_after_fork(self) -> None:
        # The parent's threads do not wait in its child; one of them may have held the lock.
        self._lock = threading.Lock()
        self._waiters: defaultdict[str, weakref.WeakSet[_Reader]] = defaultdict(weakref.WeakSet)

    def add(self, path: str, waiter: _Reader) -> None:
        with self._lock:
            self._waiters[path].add(waiter)

    def at(self, path: str) -> list[_Reader]:
        with self._lock:
            return list(self._waiters[path]) if path in self._waiters else []


waiting: Final = _Waiters()

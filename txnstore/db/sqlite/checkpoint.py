"""The checkpoint: SQLite's write-ahead log is moved into the database file, never while anybody writes.

SQLite 3.7.0 to 3.51.2 may corrupt the file when one connection checkpoints in the very moment in which another
writes or checkpoints (the "WAL-reset bug").  So connections of txnstore never checkpoint by themselves
(`wal_autocheckpoint = 0`); one that finds the WAL long takes the file's write lock, and under it a second
connection checkpoints.  Nobody else can write or checkpoint meanwhile, in this process or another.

So it is always the mode PASSIVE.  RESTART and TRUNCATE want the write lock for themselves, and where they do not get
it they go on as a PASSIVE that somebody writes beside: what must never be.  What they would do is done by hand where
readers overlap without a pause, so that the log never comes to its end: see `make_room`.

An application that writes to the same file through connections of its own checkpoints by SQLite's default rules;
it should do as we do, or run SQLite 3.51.3 or newer.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Final, NamedTuple

from txnstore.db.sqlite.connections import FORK_LOCK, connect

#: The length at which SQLite itself would checkpoint: 1,000 pages of 4 KiB.
WAL_BYTES_DUE: Final = 1000 * 4096
#: From this length on writers wait a little for readers to leave, so that the log can begin anew.
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
        What goes wrong here goes wrong after a commit that stands, so it is no error of anybody's.
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
    """Move what no reader still needs, and let the next writer begin the log anew if readers leave in time.

    He does if all of the log is in the file and nobody reads from the log.  Whoever began to read before the last
    commit keeps the first from coming true: for `wait_seconds` at most, and not for one who stood in the way of the
    last try, which came up to `stuck_frames`, and still does.  Then, whoever begins to read while nobody writes reads
    from the file alone: so no reader waits at all.  Those that were there before leave by and by; when, SQLite tells
    nobody, so `linger_seconds` are waited out.

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
    """Give a connection to checkpoint with, while another one keeps the write lock.

    Raises:
        sqlite3.Error: somebody else has the lock, or SQLite refuses.
    """
    # Connections of its own: those of the pool may all be in use. No fork: see db.sqlite_connections.
    with FORK_LOCK, closing(connect(path)) as guard:
        guard.execute("BEGIN IMMEDIATE")
        with closing(connect(path)) as worker:
            yield worker


def _move(worker: sqlite3.Connection) -> Moved:
    # PASSIVE waits for nobody and takes no write lock: the guard has it, until it is closed.
    ((_, log_frames, moved_frames),) = worker.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    return Moved(log_frames, moved_frames)

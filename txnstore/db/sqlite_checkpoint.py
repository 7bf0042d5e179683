"""This file is when SQLite's write-ahead log is moved into the database file, and why never while anybody writes.

SQLite 3.7.0 to 3.51.2 may corrupt the file when one connection checkpoints in the very moment in which another
writes or checkpoints (the "WAL-reset bug").  So connections of txnstore never checkpoint by themselves
(`wal_autocheckpoint = 0`); one that finds the WAL long takes the file's write lock, and under it a second
connection checkpoints.  Nobody else can write or checkpoint meanwhile, in this process or another.

An application that writes to the same file through connections of its own checkpoints by SQLite's default rules;
it should do as we do, or run SQLite 3.51.3 or newer.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from typing import Final

from txnstore.db.sqlite_connections import FORK_LOCK, connect

#: The length at which SQLite itself would checkpoint: 1,000 pages of 4 KiB.
WAL_BYTES_DUE: Final = 1000 * 4096


class Checkpointer:
    """Keeps the write-ahead log of one file short."""

    def __init__(self, path: str) -> None:
        """Watch the log of the database file at `path`."""
        self._path = path
        self._wal_path = path + "-wal"
        self._due_bytes = WAL_BYTES_DUE

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
            self._due_bytes = WAL_BYTES_DUE
        elif wal_bytes >= self._due_bytes and checkpoint(self._path):
            self._due_bytes = wal_bytes + WAL_BYTES_DUE


def checkpoint(path: str) -> bool:
    """Move what no reader still needs of the log into the file; False if a writer was busy and nothing was done."""
    try:
        # Connections of its own: those of the pool may all be in use. No fork: see db.sqlite_connections.
        with FORK_LOCK, closing(connect(path)) as guard:
            guard.execute("BEGIN IMMEDIATE")
            with closing(connect(path)) as worker:
                # PASSIVE waits for nobody and takes no write lock: the guard has it, until it is closed.
                worker.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    except sqlite3.Error:
        # A full disk or an I/O error here loses nothing: the log still has every frame.
        return False
    return True

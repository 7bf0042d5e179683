"""The wait for commits: readers of a file look whether somebody has committed something that they read."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Dialect

from txnstore.db.backend import POLL_FIRST_MS, POLL_LAST_MS, Subjects
from txnstore.db.sqlite.connections import (
    CommitStamps,
    SQLiteConnection,
    close_before_fork,
    connect,
    stamps_heard,
    waiting,
)
from txnstore.db.statements import HotStatement
from txnstore.db.wake_signal import WakeSignal
from txnstore.errors import StoreUnavailable

#: A reader that is told by stamps looks by itself after POLL_LAST_MS at first, at last this seldom.
STAMPED_LAST_MS: Final = 120
#: What a reader compares: whether rows wait in the outbox, the heads of its partitions, its groups and their members,
#: who change no generation when they give something back.  Text, because a sum of offsets may not fit an integer.
_OUTBOX: Final = "SELECT EXISTS (SELECT 1 FROM txnstore_outbox WHERE refusal IS NULL)"
_HEADS: Final = "(SELECT group_concat(next_offset) FROM txnstore_partition_heads WHERE partition_id IN (:ids))"
_GROUPS: Final = (
    "(SELECT group_concat(generation) FROM txnstore_groups WHERE group_id IN (:names)),"
    " (SELECT group_concat(subscription) FROM txnstore_group_members WHERE group_id IN (:names))"
)
#: So many partitions stand in the text; more come as one value, which SQLite takes apart at each look.
LISTED_MAX: Final = 100
_MANY: Final = "SELECT value FROM json_each(?)"


def look_for(subjects: Subjects) -> tuple[str, list[str]]:
    """Return the statement whose row changes when something about these is committed, and its values.

    It reads nothing else: after a commit of others SQLite has to find each page again.
    """
    # Twice, because they stand in two places: Python 3.14 refuses numbered places.
    columns, values = [_OUTBOX], sorted(subjects.group_ids) * 2
    if values:
        columns.append(_GROUPS.replace(":names", ", ".join("?" * len(subjects.group_ids))))
    if subjects.partition_ids:
        ids = ", ".join(map(str, sorted(subjects.partition_ids)))
        if len(subjects.partition_ids) > LISTED_MAX:
            values.append(f"[{ids}]")
            ids = _MANY
        columns.append(_HEADS.replace(":ids", ids))
    return ", ".join(columns), values


class StampReader:
    """One reader's view of the stamps: those that concern it, and what it has seen of them."""

    def __init__(self, stamps: CommitStamps, subjects: Subjects) -> None:
        """See what is stamped from now on."""
        self._stamps = stamps
        self._is_called = False
        self.turn_to(subjects)

    def turn_to(self, subjects: Subjects) -> None:
        """See what is stamped from now on about these."""
        self._places, self._bits = stamps_heard(subjects)
        self._seen = self._stamps.at(self._places)

    @property
    def bell(self) -> int:
        """What `wait` takes; asked for before `take`."""
        return self._stamps.bell

    def take(self) -> bool:
        """Return whether there is a new stamp, or was a `call`, since the last time."""
        seen, self._seen = self._seen, self._stamps.at(self._places)
        if self._is_called:
            # Not reset unless it is set: a call that came in between would be lost.
            self._is_called = False
            return True
        return seen != self._seen

    def call(self) -> None:
        """Let the wait that is under way, or else the next one, return at once; for any thread."""
        self._is_called = True
        self._stamps.call(self._bits)

    def wait(self, bell: int, until_seconds: float) -> bool:
        """Wait until there may be something to take; False: the system has forbidden it."""
        return self._stamps.wait(bell, self._bits, until_seconds)


class FileWaiter:
    """Waits until another connection, of this process or another, has committed something that the reader reads.

    A stamp says so.  Now and then the waiter looks by itself, for applications commit, too, and leave no stamp: any
    commit to the file changes its data version, and whether it was for this reader, one statement tells.

    Where there are no stamps, looking is all that it does; the longer there is nothing for the reader, the more seldom.
    """

    def __init__(self, path: str, subjects: Subjects, dialect: Dialect) -> None:
        """Watch the file at `path`, through a connection that only reads: its own commits would not count."""
        self.subjects = subjects
        self._dialect = dialect
        self._path = path
        self._lock = threading.RLock()
        self._process_id = os.getpid()
        stamps = CommitStamps.beside(path)
        self._stamps = None if stamps is None else StampReader(stamps, subjects)
        self._signal = WakeSignal()
        self._pause_ms = float(POLL_FIRST_MS)
        self._look_at = 0.0
        self._connection: SQLiteConnection | None = None
        self._version: int | None = None
        self._seen: object = None
        self._look = look_for(subjects)
        self._has_moved()
        waiting.add(path, self)
        close_before_fork(self, FileWaiter._close_connection)

    def listen(self, subjects: Subjects) -> bool:
        """Wait for commits about these from now on; return whether they are others than before."""
        if subjects == self.subjects:
            return False
        self.subjects, self._look = subjects, look_for(subjects)
        if self._stamps is not None:
            self._stamps.turn_to(subjects)
        self._version = None
        self._has_moved()
        return True

    def wait(self, timeout_ms: int) -> bool:
        """Return True once something was committed since the last call, False after `timeout_ms`."""
        deadline = time.monotonic() + timeout_ms / 1000
        if self._stamps is not None:
            return self._wait_for_stamp(self._stamps, deadline)
        if self._process_id != os.getpid():
            # The signal is the parent's: used by both, each would get what is meant for the other.
            self._process_id, self._signal = os.getpid(), WakeSignal()
        return self._look_again_and_again(deadline)

    def _wait_for_stamp(self, stamps: StampReader, deadline: float) -> bool:
        while True:
            # Whatever is stamped after this question, `wait` notices.
            bell = stamps.bell
            if stamps.take():
                self._pause_ms = float(POLL_FIRST_MS)
                self._look_at = time.monotonic() + POLL_LAST_MS / 1000
                return True
            now = time.monotonic()
            if now >= min(self._look_at, deadline):
                if self._has_moved():
                    self._pause_ms = float(POLL_FIRST_MS)
                    return True
                if now >= deadline:
                    return False
                self._pause_ms = min(max(self._pause_ms, POLL_LAST_MS), STAMPED_LAST_MS)
                self._look_at = now + self._pause_ms / 1000
                self._pause_ms *= 1.5
            if not stamps.wait(bell, min(self._look_at, deadline)):
                time.sleep(min(POLL_LAST_MS / 1000, max(0.0, deadline - time.monotonic())))

    def _look_again_and_again(self, deadline: float) -> bool:
        while True:
            # If it was called, what it would find is what it was called for.
            is_called = self._signal.take()
            if self._has_moved() or is_called:
                self._pause_ms = float(POLL_FIRST_MS)
                return True
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                return False
            self._signal.wait(min(self._pause_ms / 1000, left_seconds))
            self._pause_ms = min(self._pause_ms * 1.5, POLL_LAST_MS)

    def rows(self, statement: HotStatement, parameters: Mapping[str, int]) -> list[Any] | None:
        """Run a statement that reads on the connection that looks; None if that cannot be."""
        rendered = statement.rendered(self._dialect, parameters)
        try:
            with self._lock:
                if rendered is None or self._connection is None or self._connection.leads_elsewhere():
                    return None
                values = rendered.values_from(parameters, self._dialect)
                found = self._connection.execute(rendered.text, values).fetchall()
        except sqlite3.Error:
            return None
        return rendered.named(found)

    def wake(self) -> None:
        """Let the wait that is under way, or else the next one, return True at once."""
        stamps = self._stamps
        if stamps is None:
            self._signal.set()
        else:
            stamps.call()

    @property
    def sees_stamps(self) -> bool:
        """Whether stamps wake it, so that nobody has to call it."""
        return self._stamps is not None

    def close(self) -> None:
        """Give back what it holds; a second call does nothing."""
        self._stamps = None
        self._close_connection()
        self._signal.close()

    def _has_moved(self) -> bool:
        """Return whether there is something for the reader.

        What happened while the file could not be read is told once it can.
        """
        try:
            # Opened without the lock, which a fork that keeps it from being opened takes.
            opened = connect(self._path, is_there=True) if self._connection is None else None
            with self._lock:
                if opened is not None and self._connection is None:
                    self._connection = opened
                elif opened is not None:
                    opened.close()
                if self._connection is None:
                    # Closed since, by a fork: the next look opens it again.
                    return False
                if self._connection.leads_elsewhere():
                    # The reader is told by what it reads next.
                    self._close_connection()
                    return True
                (version,) = self._connection.execute("PRAGMA data_version").fetchone()
                if version == self._version:
                    return False
                before, self._version = self._version, version
                return self._compare(self._connection, is_first=before is None)
        except (sqlite3.Error, StoreUnavailable, OSError):
            self._close_connection()
            return False

    def _compare(self, connection: sqlite3.Connection, *, is_first: bool) -> bool:
        if self.subjects.is_everything:
            return True
        row = connection.execute(*self._look).fetchone()
        seen, self._seen = self._seen, row
        # While a row waits, each commit may have let it go.
        return is_first or row != seen or bool(row[0])

    def _close_connection(self) -> None:
        """Close the connection; a later `wait` opens another one, which knows of no version and looks at once."""
        with self._lock:
            connection, self._connection = self._connection, None
            self._version = None
        if connection is not None:
            connection.close()

"""Connections to PostgreSQL: given up when the server is silent, and kept for telling readers of commits.

The server itself ends what takes too long, and says so.  If it says nothing either, it was stopped, or something on
the way swallows what is sent and keeps the connection open: no timeout of TCP notices that.

After a commit NOTIFY tells waiting readers, many commits in one.  It is a statement of its own on a connection of its
own: within the appending transaction it would take a database-wide lock at commit and forbid PREPARE TRANSACTION.

Each partition and group has a channel, which some share.  A notification wakes all sessions of the database that listen
to anything (before PostgreSQL 19), whatever their channels, if only to find that it is not for them: a hundred idle
readers make it twenty times as dear.  So whoever listens to a channel holds an advisory lock in its name, shared with
the others, and where nobody holds it nobody is notified.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Generator
from typing import Any, Final, TypeVar

import psycopg
from psycopg import sql

from txnstore.db.backend import EVERYTHING, POLL_FIRST_MS, SUBJECT_BUCKETS, Limits, Subjects
from txnstore.db.wake_signal import WakeSignal

_log = logging.getLogger(__name__)

Result = TypeVar("Result")
Connect = Callable[[], "psycopg.Connection[Any]"]

#: Until a database transaction says how long its statements may take; LISTEN and NOTIFY take no time.
ANSWER_TIMEOUT_MS: Final = 10_000
#: A listener that hears nothing looks by itself after this long: a pooler may have lost its LISTEN.
SILENCE_MS: Final = 2_000
#: One that cannot listen looks at last in these intervals: each look is a database transaction.
LOOK_LAST_MS: Final = 200
#: Behind the buckets of partitions and groups: the channel of readers that wait for many of them, where all is told,
#: and the one to which every reader listens, for what may concern anybody.
_MANY: Final = 2 * SUBJECT_BUCKETS
_ANYBODY: Final = _MANY + 1
#: Who waits for more listens to the channel of all: each is a lock in the server's memory.
_BUCKETS_MAX: Final = 12
#: Between two notifications an announcer pauses: at first, and at most while there is always something to tell, where
#: somebody listens and where nobody does.  A reader that begins to listen in a long one hears that much later.
_NOTIFY_FIRST_SECONDS: Final = 0.001
_NOTIFY_LAST_SECONDS: Final = 0.008
_UNHEARD_LAST_SECONDS: Final = 0.032
_NOTIFY: Final = (
    "SELECT pg_catalog.pg_notify(pg_catalog.concat(%s::pg_catalog.text, told), '')"
    " FROM pg_catalog.unnest(%s::pg_catalog.int4[]) AS told"
    " WHERE NOT pg_catalog.pg_try_advisory_xact_lock(%s::pg_catalog.int4, told)"
)
#: An announcer whose connection failed waits this long before it tries again.
RECONNECT_SECONDS: Final = 0.5
#: And a listener this long: until then it looks by itself, and a server that is full is not asked all the time.
RELISTEN_SECONDS: Final = 5.0

#: Connections of the parent process, neither used nor closed here.
_inherited: Final[list[Any]] = []


class PostgreSQLConnection(psycopg.Connection[Any]):
    """A connection that counts as broken once an answer is overdue."""

    _silence_seconds: float | None = ANSWER_TIMEOUT_MS / 1000

    def expect_answers_within(self, limits: Limits) -> None:
        """Give up when the server is silent for longer than a statement of these limits can take."""
        self._silence_seconds = None
        if limits.statement_timeout_ms > 0:
            self._silence_seconds = (limits.statement_timeout_ms + limits.answer_timeout_ms) / 1000

    def wait(self, gen: Generator[Any, Any, Result], *arguments: Any, **options: Any) -> Result:
        """Do what psycopg does to send and receive, and look at the clock whenever nothing comes.

        Raises:
            psycopg.OperationalError: the connection is given up.
        """
        return super().wait(self._bounded(gen), *arguments, **options)

    def _bounded(self, steps: Generator[Any, Any, Result]) -> Generator[Any, Any, Result]:
        heard = time.monotonic()
        try:
            wanted = next(steps)
            while True:
                # False at intervals, while the socket is not ready.
                ready = yield wanted
                now = time.monotonic()
                if ready:
                    heard = now
                elif self._silence_seconds is not None and now - heard >= self._silence_seconds:
                    self.pgconn.finish()
                    raise psycopg.OperationalError("the server did not answer in time")
                wanted = steps.send(ready)
        except StopIteration as end:
            result: Result = end.value
            return result


class _Channels:
    """The channels of one store."""

    def __init__(self, name: str) -> None:
        """Begin the names of all of them with `name`."""
        self.prefix = f"{name}_"
        self.lock_class = zlib.crc32(name.encode()) - 2**31
        """The first number of the locks; the second one is the channel's."""

    @staticmethod
    def heard(subjects: Subjects) -> frozenset[int]:
        """Return the channels to which a reader listens."""
        if subjects.is_everything:
            return frozenset((_MANY, _ANYBODY))
        buckets = subjects.buckets()
        return (buckets if len(buckets) <= _BUCKETS_MAX else frozenset((_MANY,))) | {_ANYBODY}

    @staticmethod
    def told(subjects: Subjects) -> frozenset[int]:
        """Return the channels on which a commit is told."""
        return frozenset((_ANYBODY,)) if subjects.is_everything else subjects.buckets() | {_MANY}

    def statement(self, leave: frozenset[int], enter: frozenset[int]) -> sql.Composed:
        """Return the statements by which a session leaves some channels and enters others."""
        lock = "SELECT pg_catalog.pg_advisory_lock_shared({}, {})"
        unlock = "SELECT pg_catalog.pg_advisory_unlock_shared({}, {})"
        steps = [*((unlock, "UNLISTEN {}", channel) for channel in sorted(leave))]
        steps += [(lock, "LISTEN {}", channel) for channel in sorted(enter)]
        return sql.SQL("; ").join(
            part
            for locking, listening, channel in steps
            for part in (
                sql.SQL(locking).format(sql.Literal(self.lock_class), sql.Literal(channel)),
                sql.SQL(listening).format(sql.Identifier(f"{self.prefix}{channel}")),
            )
        )


class ListenWaiter:
    """Waits for a notification; without a connection that can listen it looks again and again instead."""

    def __init__(self, connect: Connect, channel: str, subjects: Subjects = EVERYTHING) -> None:
        """Listen from now on, on those of the channels of this name that concern the subjects."""
        self._connect = connect
        self._channels = _Channels(channel)
        self._subjects = subjects
        self._heard: frozenset[int] = frozenset()
        self._pause_ms = float(POLL_FIRST_MS)
        self._connection: psycopg.Connection[Any] | None = None
        self._process_id = os.getpid()
        self._signal = WakeSignal()
        self._listen()

    def listen(self, subjects: Subjects) -> bool:
        """Wait for commits about these from now on; return whether they are others than before."""
        if subjects == self._subjects:
            return False
        self._subjects = subjects
        wanted = self._channels.heard(subjects)
        if self._connection is not None and wanted != self._heard and self._process_id == os.getpid():
            try:
                self._connection.execute(self._channels.statement(self._heard - wanted, wanted - self._heard))
            except psycopg.Error:
                self._close_connection()
                self._listen()
            else:
                self._heard = wanted
        return True

    def wait(self, timeout_ms: int) -> bool:
        """Return True when notified, or when it is time to look anyway; False after `timeout_ms`."""
        if self._process_id != os.getpid():
            self._forget_connection_after_fork()
        if self._connection is None:
            return self._pause(timeout_ms)
        try:
            if self._is_woken(self._connection, min(timeout_ms, SILENCE_MS)):
                return True
        except psycopg.Error:
            self._close_connection()
            self._listen()
            return True
        return timeout_ms > SILENCE_MS

    def wake(self) -> None:
        """Let the wait that is under way, or else the next one, return True at once."""
        self._signal.set()

    def close(self) -> None:
        """Close the connection, and what wakes it."""
        self._close_connection()
        self._signal.close()

    def _close_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._signal.watch(-1)
            connection.close()

    def _is_woken(self, connection: psycopg.Connection[Any], timeout_ms: int) -> bool:
        """Wait for a notification or a `wake`; psycopg's own `notifies` would keep the processor busier."""
        pgconn = connection.pgconn
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            if pgconn.notifies() is not None:
                # Those that came with it say the same.
                while pgconn.notifies() is not None:
                    pass
                return True
            if not self._signal.wait(max(0.0, deadline - time.monotonic())):
                return False
            if self._signal.take():
                return True
            pgconn.consume_input()

    def _pause(self, timeout_ms: int) -> bool:
        pause_ms = min(self._pause_ms, timeout_ms)
        if self._signal.wait(pause_ms / 1000):
            return self._signal.take()
        self._pause_ms = min(self._pause_ms * 1.5, LOOK_LAST_MS)
        if time.monotonic() >= self._listen_again:
            self._listen()
        return pause_ms < timeout_ms

    def _listen(self) -> None:
        self._listen_again = time.monotonic() + RELISTEN_SECONDS
        self._heard = self._channels.heard(self._subjects)
        try:
            self._connection = self._connect()
            self._connection.execute(self._channels.statement(frozenset(), self._heard))
            self._signal.watch(self._connection.pgconn.socket)
        except psycopg.Error:
            _log.debug("cannot listen for appended records; looking for them at intervals instead")
            self._close_connection()
        else:
            self._pause_ms = float(POLL_FIRST_MS)

    def _forget_connection_after_fork(self) -> None:
        # It is the parent's: used by both, each would get half of the answers.
        _inherited.append((self._connection, self._signal))
        self._signal = WakeSignal()
        self._connection = None
        self._process_id = os.getpid()
        self._listen()


class NotifyAnnouncer:
    """Sends notifications from a thread of its own, so that no writer waits for one."""

    def __init__(self, connect: Connect, channel: str) -> None:
        """Notify on the channels of this name; nothing is opened before the first announcement."""
        self._connect = connect
        self._channels = _Channels(channel)
        self._told: set[int] = set()
        self._due = threading.Event()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def announce(self, subjects: Subjects) -> None:
        """Say that something was committed; announcements that meet before they are sent become one."""
        with self._lock:
            self._told |= self._channels.told(subjects)
        self._due.set()
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._closing.is_set():
                    self._thread = threading.Thread(target=self._run, name="txnstore-announcer", daemon=True)
                    self._thread.start()

    def close(self, timeout_seconds: float) -> None:
        """Send what is due, then end the thread and its connection; one that takes longer ends by itself."""
        self._closing.set()
        self._due.set()
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout=timeout_seconds)

    def _run(self) -> None:
        connection: psycopg.Connection[Any] | None = None
        pause_seconds = _NOTIFY_FIRST_SECONDS
        while True:
            self._due.wait()
            self._due.clear()
            with self._lock:
                told, self._told = sorted(self._told), set()
            longest_seconds = _NOTIFY_LAST_SECONDS
            try:
                if told:
                    connection = connection or self._connect()
                    parameters = (self._channels.prefix, told, self._channels.lock_class)
                    if connection.execute(_NOTIFY, parameters).rowcount == 0:
                        longest_seconds = _UNHEARD_LAST_SECONDS
            except psycopg.Error:
                # Only a hint is lost; readers look by themselves after a while.
                if connection is not None:
                    connection.close()
                    connection = None
                pause_seconds = RECONNECT_SECONDS
            self._closing.wait(pause_seconds)
            is_busy = self._due.is_set()
            if self._closing.is_set():
                if not self._told:
                    break
                continue
            pause_seconds = min(2 * pause_seconds, longest_seconds) if is_busy else _NOTIFY_FIRST_SECONDS
        if connection is not None:
            connection.close()

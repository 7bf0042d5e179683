"""Connections to PostgreSQL: given up when the server is silent, and kept for telling readers of commits.

The server itself ends what takes too long, and says so.  If it says nothing either, it was stopped, or something on
the way swallows what is sent and keeps the connection open: no timeout of TCP notices that.

After a commit NOTIFY tells waiting readers, many commits in one.  It is a statement of its own on a connection of its
own: within the appending transaction it would take a database-wide lock at commit and forbid PREPARE TRANSACTION.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, TypeVar

import psycopg
from psycopg import sql

from txnstore.db.backend import POLL_FIRST_MS, Limits

_log = logging.getLogger(__name__)

Result = TypeVar("Result")
Connect = Callable[[], "psycopg.Connection[Any]"]

#: Until a database transaction says how long its statements may take; LISTEN and NOTIFY take no time.
ANSWER_TIMEOUT_MS: Final = 10_000
#: A listener that hears nothing looks by itself after this long: a pooler may have lost its LISTEN.
SILENCE_MS: Final = 2_000
#: One that cannot listen looks at last in these intervals: each look is a database transaction.
LOOK_LAST_MS: Final = 200
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


def _wake_sockets() -> tuple[socket.socket, socket.socket]:
    receiver, sender = socket.socketpair()
    receiver.setblocking(False)
    sender.setblocking(False)
    return receiver, sender


class ListenWaiter:
    """Waits for a notification; without a connection that can listen it looks again and again instead."""

    def __init__(self, connect: Connect, channel: str) -> None:
        """Listen on `channel` from now on."""
        self._connect = connect
        self._channel = channel
        self._pause_ms = float(POLL_FIRST_MS)
        self._connection: psycopg.Connection[Any] | None = None
        self._process_id = os.getpid()
        self._wake_receiver, self._wake_sender = _wake_sockets()
        self._listen()

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
        # A full buffer or a closed socket: it is awake, or there is nobody to wake.
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"\0")

    def close(self) -> None:
        """Close the connection, and what wakes it."""
        self._close_connection()
        self._wake_receiver.close()
        self._wake_sender.close()

    def _close_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

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
            left_seconds = max(0.0, deadline - time.monotonic())
            if not self._wait_for_input([pgconn.socket, self._wake_receiver.fileno()], left_seconds):
                return False
            if self._drain_wake():
                return True
            pgconn.consume_input()

    @staticmethod
    def _wait_for_input(descriptors: Sequence[int], timeout_seconds: float) -> bool:
        with selectors.DefaultSelector() as selector:
            for descriptor in descriptors:
                selector.register(descriptor, selectors.EVENT_READ)
            return bool(selector.select(timeout_seconds))

    def _drain_wake(self) -> bool:
        """Take what `wake` has sent; returns whether it has sent anything."""
        is_woken = False
        with contextlib.suppress(BlockingIOError):
            while self._wake_receiver.recv(64):
                is_woken = True
        return is_woken

    def _pause(self, timeout_ms: int) -> bool:
        pause_ms = min(self._pause_ms, timeout_ms)
        if self._wait_for_input([self._wake_receiver.fileno()], pause_ms / 1000):
            return self._drain_wake()
        self._pause_ms = min(self._pause_ms * 1.5, LOOK_LAST_MS)
        if time.monotonic() >= self._listen_again:
            self._listen()
        return pause_ms < timeout_ms

    def _listen(self) -> None:
        self._listen_again = time.monotonic() + RELISTEN_SECONDS
        try:
            self._connection = self._connect()
            self._connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
        except psycopg.Error:
            _log.debug("cannot listen for appended records; looking for them at intervals instead")
            self._close_connection()
        else:
            self._pause_ms = float(POLL_FIRST_MS)

    def _forget_connection_after_fork(self) -> None:
        # It is the parent's: used by both, each would get half of the answers.
        _inherited.append((self._connection, self._wake_receiver, self._wake_sender))
        self._wake_receiver, self._wake_sender = _wake_sockets()
        self._connection = None
        self._process_id = os.getpid()
        self._listen()


class NotifyAnnouncer:
    """Sends notifications from a thread of its own, so that no writer waits for one."""

    def __init__(self, connect: Connect, channel: str) -> None:
        """Notify on `channel`; nothing is opened before the first announcement."""
        self._connect = connect
        self._statement = sql.SQL("NOTIFY {}").format(sql.Identifier(channel))
        self._due = threading.Event()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def announce(self) -> None:
        """Say that something was committed; announcements that meet before they are sent become one."""
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
        while True:
            self._due.wait()
            self._due.clear()
            try:
                connection = connection or self._connect()
                connection.execute(self._statement)
            except psycopg.Error:
                # Only a hint is lost; readers look by themselves after a while.
                if connection is not None:
                    connection.close()
                    connection = None
                self._closing.wait(RECONNECT_SECONDS)
            if self._closing.is_set():
                break
        if connection is not None:
            connection.close()

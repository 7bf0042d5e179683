"""Wakeups without txnstore: how a process hears of another one's commit, from the driver and the system alone."""

from __future__ import annotations

import ctypes
import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from scripts.comparison.floors import CHANNEL, FUNCTION, PLAIN, log_path
from scripts.comparison.sides import SQLITE, Side

TOUCH: Final = "woken by a touch of the log"
LOOK: Final = "a look each millisecond"
LOOK_SECONDS: Final = 0.001


class Wakeup(Protocol):
    """What a connection waits for."""

    def wait(self, seconds: float) -> bool:
        """Return True as soon as something may have been committed; False after `seconds`."""
        ...

    def close(self) -> None:
        """Give back what is not the connection's."""
        ...


class Listening:
    """PostgreSQL's LISTEN: the socket of the connection is waited on."""

    def __init__(self, _: Side, connection: Any) -> None:
        """Listen from now on."""
        self._pgconn = connection.pgconn
        self._is_told = False
        # A notification may also come with the answer to a statement.
        connection.add_notify_handler(self._hear)
        connection.execute(f"LISTEN {CHANNEL}")
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)

    def _hear(self, _: object) -> None:
        self._is_told = True

    def wait(self, seconds: float) -> bool:
        """Return True as soon as there is a notification."""
        deadline = time.monotonic() + seconds
        while not self._is_told:
            # Less than psycopg's own loop does, which looks after signals ten times a second.
            if not self._poll.poll(1_000 * max(0.0, deadline - time.monotonic())):
                return False
            self._pgconn.consume_input()
            while self._pgconn.notifies() is not None:
                self._is_told = True
        self._is_told = False
        return True

    def close(self) -> None:
        """Do nothing: the connection is all that there is."""


class Touched:
    """Linux's inotify: those who commit to the SQLite file touch its log afterwards."""

    #: From the system's <sys/inotify.h>: times were set.
    IN_ATTRIB: Final = 0x4
    EVENTS_BYTES: Final = 4096

    def __init__(self, side: Side, connection: Any) -> None:
        """Watch the log, which is there once somebody has read."""
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
        library = ctypes.CDLL(None, use_errno=True)
        self._descriptor: int = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        watch = library.inotify_add_watch(self._descriptor, os.fsencode(log_path(side)), self.IN_ATTRIB)
        assert watch >= 0, os.strerror(ctypes.get_errno())
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Return True as soon as the log was touched."""
        if not self._poll.poll(1_000 * seconds):
            return False
        os.read(self._descriptor, self.EVENTS_BYTES)
        return True

    def close(self) -> None:
        """Watch no more."""
        os.close(self._descriptor)


class Looking:
    """SQLite's counter of commits by other connections, looked at again and again."""

    def __init__(self, _: Side, connection: Any) -> None:
        """Look from now on."""
        self._connection = connection
        self._seen = self._version()

    def wait(self, seconds: float) -> bool:
        """Return True as soon as the counter has moved."""
        deadline = time.monotonic() + seconds
        while (version := self._version()) == self._seen:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOOK_SECONDS)
        self._seen = version
        return True

    def close(self) -> None:
        """Do nothing: the connection is all that there is."""

    def _version(self) -> int:
        [[version]] = self._connection.execute("PRAGMA data_version").fetchall()
        return int(version)


def wakeups(side: Side) -> Mapping[str, Callable[[Side, Any], Wakeup]]:
    """Return how a reader can hear of commits, by the name of the floor; the first one costs those least who wait."""
    if side.name != SQLITE:
        # The rows come by either way, the wakeup is the same.
        return {FUNCTION: Listening, PLAIN: Listening}
    return {TOUCH: Touched, LOOK: Looking} if sys.platform == "linux" else {LOOK: Looking}

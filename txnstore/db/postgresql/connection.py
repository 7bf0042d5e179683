"""A connection to PostgreSQL on which nobody waits for ever.

The server itself ends what takes too long, and says so.  If it says nothing either, it was stopped, or something on
the way swallows what is sent and keeps the connection open: no timeout of TCP notices that.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, Final, TypeVar

import psycopg

from txnstore.db.backend import Limits

Result = TypeVar("Result")

#: Until a database transaction says how long its statements may take; LISTEN and NOTIFY take no time.
SILENCE_MS: Final = 10_000


class PostgreSQLConnection(psycopg.Connection[Any]):
    """A connection that counts as broken once an answer is overdue."""

    _silence_seconds: float | None = SILENCE_MS / 1000

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

"""Cursors for our statements on a caller's connection, which the caller's settings do not reach.

Whatever he has set for the rows, texts, types or prepared statements of his own, ours come as tuples of plain values,
and nothing of ours stays in his session.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg.adapt import AdaptersMap
from psycopg.rows import tuple_row
from sqlalchemy.dialects.postgresql.psycopg import AsyncAdapt_psycopg_cursor


class PsycopgCursor(psycopg.Cursor[Any]):
    """A cursor of psycopg's own kind, with tuples and the types that psycopg itself has."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        super().__init__(connection, row_factory=tuple_row)
        self._adapters = AdaptersMap(psycopg.adapters)


class AsyncPsycopgCursor(psycopg.AsyncCursor[Any]):
    """The same of an asynchronous connection."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        super().__init__(connection, row_factory=tuple_row)
        self._adapters = AdaptersMap(psycopg.adapters)


class AdaptedPsycopgCursor(AsyncAdapt_psycopg_cursor):
    """The same for code that async SQLAlchemy's `run_sync` calls."""

    def _make_new_cursor(self, connection: Any) -> Any:
        return AsyncPsycopgCursor(connection)


class SQLiteCursor(sqlite3.Cursor):
    """A cursor of tuples; the connection's `text_factory` is put aside while it reads."""

    def execute(self, *arguments: Any) -> SQLiteCursor:  # noqa: D102 - as sqlite3's
        with _plain_text(self.connection):
            return super().execute(*arguments)

    def executemany(self, *arguments: Any) -> SQLiteCursor:  # noqa: D102 - as sqlite3's
        with _plain_text(self.connection):
            return super().executemany(*arguments)

    def fetchone(self) -> Any:  # noqa: D102 - as sqlite3's
        with _plain_text(self.connection):
            return super().fetchone()

    def fetchmany(self, size: int | None = 1) -> list[Any]:  # noqa: D102 - as sqlite3's
        with _plain_text(self.connection):
            return super().fetchmany(size)

    def fetchall(self) -> list[Any]:  # noqa: D102 - as sqlite3's
        with _plain_text(self.connection):
            return super().fetchall()


@contextmanager
def unprepared(driver: Any) -> Iterator[None]:
    """Prepare no statement in the caller's session meanwhile, also none that is run often."""
    before: Final = driver.prepare_threshold
    driver.prepare_threshold = None
    try:
        yield
    finally:
        driver.prepare_threshold = before


class _plain_text:  # noqa: N801 - a context manager that reads as one; a class, for it is entered for each row
    __slots__ = ("_before", "_connection")

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._before = connection.text_factory

    def __enter__(self) -> None:
        if self._before is not str:
            self._connection.text_factory = str

    def __exit__(self, *_: object) -> None:
        if self._before is not str:
            self._connection.text_factory = self._before

"""The application of a test: its own table, and connections of every kind to the store's database."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from txnstore.testing.postgres_server import connection_string

#: Each way to hand over a connection; the last ones have settings that would change our rows if they reached them.
KINDS = ("driver", "core", "orm", "scoped", "odd driver", "odd core")


class Caller:
    """An application with the table `ledger` in the store's own database, and one connection."""

    def __init__(self, url: str, kind: str) -> None:
        self.url = url
        self.kind = kind
        self.is_sqlite = url.startswith("sqlite")
        self._stack = contextlib.ExitStack()
        self.engine = application_engine(url)
        self._stack.callback(self.engine.dispose)
        self.given: Any = self._open()

    def close(self) -> None:
        self._stack.close()

    def write(self, entry: str) -> None:
        """Insert a row of the application's own."""
        if isinstance(self.given, Connection | Session | scoped_session):
            self.given.execute(text("INSERT INTO ledger (entry) VALUES (:entry)"), {"entry": entry})
        else:
            self.given.execute(f"INSERT INTO ledger (entry) VALUES ('{entry}')")

    def commit(self) -> None:
        self.given.commit()

    def rollback(self) -> None:
        self.given.rollback()

    @property
    def driver(self) -> Any:
        """The driver's connection."""
        if isinstance(self.given, Connection):
            return self.given.connection.driver_connection
        if isinstance(self.given, Session | scoped_session):
            return self.given.connection().connection.driver_connection
        return self.given

    def _open(self) -> Any:
        if self.kind.endswith("driver"):
            driver = open_driver(self.url)
            self._stack.callback(driver.close)
            if self.kind.startswith("odd"):
                make_odd(driver)
            return driver
        if self.kind.endswith("core"):
            connection = self._stack.enter_context(self.engine.connect())
            if self.kind.startswith("odd"):
                make_odd(connection.connection.driver_connection)
                if not self.is_sqlite:
                    plain: Any = connection.connection.driver_connection
                    plain.cursor_factory = psycopg.ClientCursor
            return connection
        session = Session(self.engine) if self.kind == "orm" else scoped_session(sessionmaker(self.engine))
        self._stack.callback(session.close)
        return session


def application_engine(url: str) -> Engine:
    """Return the application's own engine, with SQLAlchemy's own dialects."""
    if url.startswith("sqlite"):
        return create_engine(url)
    return create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1))


def open_driver(url: str) -> Any:
    """Open a plain connection of the driver."""
    if url.startswith("sqlite"):
        return sqlite3.connect(url.removeprefix("sqlite:///"))
    return psycopg.connect(connection_string(url))


def make_odd(driver: Any) -> None:
    """Set whatever changes rows, texts, types, statements and names on a connection."""
    if isinstance(driver, sqlite3.Connection):
        driver.row_factory = lambda cursor, row: {
            column[0]: value for column, value in zip(cursor.description, row, strict=True)
        }
        driver.text_factory = bytes
        return
    driver.row_factory = psycopg.rows.dict_row
    driver.cursor_factory = psycopg.RawCursor
    driver.prepare_threshold = 0
    driver.adapters.register_loader("int8", _EverythingIsText)
    driver.adapters.register_loader("text", _EverythingIsText)


class _EverythingIsText(psycopg.adapt.Loader):
    def load(self, data: Any) -> str:
        return f"loaded: {bytes(data)!r}"


def make_ledger(url: str) -> None:
    """Make the application's own table."""
    with contextlib.closing(open_driver(url)) as driver:
        driver.execute("CREATE TABLE ledger (entry TEXT)")
        driver.commit()


def ledger_of(url: str) -> list[str]:
    """Return the application's rows that are committed, in order."""
    with contextlib.closing(open_driver(url)) as driver:
        return sorted(entry for (entry,) in driver.execute("SELECT entry FROM ledger").fetchall())


@contextlib.contextmanager
def calling(url: str, kind: str) -> Iterator[Caller]:
    """Open an application's connection; it is closed after the block."""
    caller = Caller(url, kind)
    try:
        yield caller
    finally:
        caller.close()

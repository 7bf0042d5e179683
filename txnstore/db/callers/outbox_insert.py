"""The INSERT into the outbox on a caller's own connection, whichever library it is from.

It is one statement inside the database transaction that the caller has begun and will end: nothing is begun,
committed, rolled back, listened for or told to anybody, and no lock is taken that another caller waits for.
Tables are named with their schema, so it does not matter where the connection looks for names.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import BigInteger, Connection, Integer, LargeBinary, Text, bindparam, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.elements import TextClause
from sqlalchemy.types import TypeEngine

from txnstore.db.callers.connections import WANTED, CallersConnection, callers_connection
from txnstore.db.callers.engines import FILES, database_of_engine, main_file
from txnstore.db.names import SQLITE_PREFIX
from txnstore.db.url import DatabaseUrl
from txnstore.errors import InvalidRequest, SchemaOutdated

_TYPES: Final[dict[str, TypeEngine[Any]]] = {
    "topic": Text(),
    "partition_number": Integer(),
    "key": LargeBinary(),
    "value": LargeBinary(),
    "headers": Text(),
    "timestamp_ms": BigInteger(),
}
_TABLES: Final = {
    "postgresql": '"{schema}".outbox',
    # Not one of the same name in an attached file, which would not commit together with the rest.
    "sqlite": f"main.{SQLITE_PREFIX}outbox",
}

# The server's clock, which judges it later: a row that the caller has committed is not to be refused for the clock of
# the caller's machine. A SQLite file has no other clock than that.
_TIMES: Final = {
    "postgresql": "coalesce({mark}, CAST(extract(epoch from pg_catalog.clock_timestamp()) * 1000 AS BIGINT))",
    "sqlite": "{mark}",
}


def _insert(kind: str, *marks: str) -> str:
    *others, time = marks
    values = ", ".join([*others, _TIMES[kind].format(mark=time)])
    return f"INSERT INTO {_TABLES[kind]} ({', '.join(_TYPES)}) VALUES ({values})"  # noqa: S608 - our own names


_INSERT: Final = {
    "postgresql": _insert("postgresql", "%s", "%s", "%b", "%b", "%s", "%s"),
    "sqlite": _insert("sqlite", *"??????"),
}
_INSERT_BY_NAME: Final = {kind: _insert(kind, *(f":{name}" for name in _TYPES)) for kind in _TABLES}
#: SQLSTATEs: there is no such table, or no such schema.
_MISSING: Final = frozenset({"42P01", "3F000"})
_MISSING_ON_SQLITE: Final = "no such table"

_AUTOCOMMIT: Final = (
    "the connection is in autocommit mode and in no database transaction, so the record would stay even if"
    " the rest is rolled back: begin a database transaction first"
)


class OutboxRow(NamedTuple):
    """A record as it goes into the outbox."""

    topic: str
    partition_number: int | None
    key: bytes | None
    value: bytes | None
    headers: str | None
    timestamp_ms: int | None
    """None: the server's time of the INSERT; not on SQLite, which has no server."""


class OutboxConnection(Protocol):
    """A caller's connection."""

    def check(self, url: DatabaseUrl) -> None:
        """Refuse a connection to another database than `url`, where that shows without asking a server.

        Raises:
            InvalidRequest: it is another one.
        """
        ...

    def insert(self, rows: Sequence[OutboxRow], schema: str) -> None:
        """Insert at least one row, in their order.

        Raises:
            InvalidRequest: a statement would be no part of a database transaction of the caller's.
            SchemaOutdated: the table is not there.
        """
        ...


def outbox_connection(given: object) -> OutboxConnection:
    """Return what the caller has handed over, as something that inserts.

    Raises:
        TypeError: it is not a connection of a kind that can be used.
        InvalidRequest: it is closed.
    """
    if isinstance(given, Connection):
        return _SQLAlchemyConnection(given)
    if given is None:
        raise TypeError(f"expected {WANTED}, not None")
    return _DriverConnection(callers_connection(given))


class _SQLAlchemyConnection:
    """A connection of SQLAlchemy, with any driver for SQLite or PostgreSQL."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def check(self, url: DatabaseUrl) -> None:
        connection = self._connection
        _check_kind(connection.dialect.name, url)
        if url.kind != "sqlite":
            driver = connection.connection.driver_connection
            if isinstance(driver, psycopg.Connection | psycopg.AsyncConnection):
                _check_name(driver.info.dbname, url)
            else:
                _check_name(database_of_engine(connection.engine), url)
        elif _is_relative(name := connection.engine.url.database) or not _is_file(name, url):
            # The process may have changed its folder since the engine was made, or a function of its own opens another.
            file = main_file(connection.exec_driver_sql(FILES).all())
            if not _is_file(file, url):
                raise _another_file(file, url)

    def insert(self, rows: Sequence[OutboxRow], schema: str) -> None:
        connection = self._connection
        self._refuse_autocommit()
        kind = connection.dialect.name
        statement = _text(kind, schema)
        try:
            connection.execute(statement, [row._asdict() for row in rows] if len(rows) > 1 else rows[0]._asdict())
        except DBAPIError as error:
            if _is_missing(error.orig):
                raise _no_table(kind, schema) from error
            raise

    def _refuse_autocommit(self) -> None:
        connection = self._connection
        if not connection.dialect.detect_autocommit_setting(_dbapi_connection(connection)):
            return
        if not connection.in_transaction():
            # Some let SQLAlchemy's own beginning, of which the driver knows nothing, send BEGIN.
            connection.exec_driver_sql("SELECT 1")
        if not _is_in_transaction(connection.connection.driver_connection):
            raise InvalidRequest(_AUTOCOMMIT)


class _DriverConnection:
    """A plain connection of psycopg or sqlite3."""

    def __init__(self, callers: CallersConnection) -> None:
        self._callers = callers

    def check(self, url: DatabaseUrl) -> None:
        callers = self._callers
        _check_kind(callers.backend_name, url)
        if url.kind == "postgresql":
            _check_name(callers.driver.info.dbname, url)
        else:
            with closing(callers.cursor()) as cursor:
                file = main_file(cursor.execute(FILES))
            if not _is_file(file, url):
                raise _another_file(file, url)

    def insert(self, rows: Sequence[OutboxRow], schema: str) -> None:
        callers = self._callers
        callers.check_usable()
        statement = _INSERT[callers.backend_name].format(schema=schema)
        try:
            with closing(callers.cursor()) as cursor:
                if len(rows) > 1:
                    cursor.executemany(statement, rows)
                else:
                    cursor.execute(statement, rows[0])
        except (psycopg.Error, sqlite3.Error) as error:
            if _is_missing(error):
                raise _no_table(callers.backend_name, schema) from error
            raise


def _dbapi_connection(connection: Connection) -> Any:
    return connection.connection.dbapi_connection


def _is_in_transaction(driver: Any) -> bool:
    """Return whether the server has begun a database transaction, as far as the driver knows."""
    if isinstance(driver, (psycopg.Connection, psycopg.AsyncConnection)):
        return bool(driver.info.transaction_status != TransactionStatus.IDLE)
    # sqlite3 and aiosqlite have one, asyncpg the other.
    found = getattr(driver, "in_transaction", None)
    if found is None:
        found = getattr(driver, "is_in_transaction", None)
    return bool(found() if callable(found) else found)


def _text(kind: str, schema: str) -> TextClause:
    # Text, because what a caller's schema_translate_map does to tables is not meant for this one.
    statement = _INSERT_BY_NAME["sqlite" if kind == "sqlite" else "postgresql"].format(schema=schema)
    return text(statement).bindparams(*(bindparam(name, type_=type_) for name, type_ in _TYPES.items()))


def _is_missing(error: object) -> bool:
    sqlstate = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return sqlstate in _MISSING or (sqlstate is None and str(error).startswith(_MISSING_ON_SQLITE))


def _no_table(kind: str, schema: str) -> SchemaOutdated:
    where = f"has no outbox of txnstore in its schema {schema}" if kind != "sqlite" else "has no outbox of txnstore"
    return SchemaOutdated(
        f"the connection's database {where}: open the store there first, with Outbox(...).open(), any client, or"
        " `txnstore migrate`"
    )


def _check_kind(kind: str, url: DatabaseUrl) -> None:
    if kind != url.kind:
        raise InvalidRequest(f"the connection is to {kind}, but this outbox is in {url}")


def _check_name(name: str | None, url: DatabaseUrl) -> None:
    if name and url.url.database and name != url.url.database:
        raise InvalidRequest(f"the connection is to the database {name}, but this outbox is in {url}")


def _is_relative(name: str | None) -> bool:
    return bool(name) and not str(name).startswith(("/", ":", "file:"))


def _is_file(name: str | None, url: DatabaseUrl) -> bool:
    """Return whether the file of this name is the one at `url`; True if that cannot be said."""
    wanted = url.url.database
    if not name or not wanted or ":" in (name[:1], wanted[:1]) or name.startswith("file:"):
        return True
    path, own_path = Path(name), Path(wanted)
    if path.absolute() == own_path.absolute():
        return True
    try:
        return path.samefile(own_path)
    except OSError:
        return False


def _another_file(name: str | None, url: DatabaseUrl) -> InvalidRequest:
    return InvalidRequest(f"the connection is to the file {name}, but this outbox is in {url}")

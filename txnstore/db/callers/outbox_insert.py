"""The INSERT into the outbox on a caller's own connection, whichever library it is from.

It is inside the database transaction that the caller has begun and will end: nothing is begun, committed, rolled back,
listened for or told to anybody.  On PostgreSQL it is one statement, and takes no lock that another caller waits for.
On SQLite it takes the write lock, as any INSERT does, and the connection is asked before which file it has open.
Tables are named with their schema, so it does not matter where the connection looks for names.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import BigInteger, Connection, Integer, LargeBinary, Text, bindparam, text
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.sql.elements import TextClause
from sqlalchemy.types import TypeEngine

from txnstore.db.callers.attached_files import FILES, check_one_commit, main_file
from txnstore.db.callers.connections import WANTED, CallersConnection, callers_connection
from txnstore.db.callers.engines import database_of_engine
from txnstore.db.names import SQLITE_PREFIX
from txnstore.db.sqlite.committed_rows import CommittedRows
from txnstore.db.url import DatabaseUrl
from txnstore.errors import InvalidRequest, SchemaOutdated, TransactionPoisoned

_COLUMNS: Final[dict[str, TypeEngine[Any]]] = {
    "topic": Text(),
    "partition_number": Integer(),
    "key": LargeBinary(),
    "value": LargeBinary(),
    "headers": Text(),
    "timestamp_ms": BigInteger(),
}
#: By the kind of database.  Only PostgreSQL knows by itself which rows belong together.
_TYPES: Final = {"postgresql": _COLUMNS, "sqlite": {**_COLUMNS, "committed_id": BigInteger()}}
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
    values = dict(zip(_TYPES[kind], marks, strict=True))
    values["timestamp_ms"] = _TIMES[kind].format(mark=values["timestamp_ms"])
    return f"INSERT INTO {_TABLES[kind]} ({', '.join(values)}) VALUES ({', '.join(values.values())})"  # noqa: S608 - ours


_INSERT: Final = {
    "postgresql": _insert("postgresql", "%s", "%s", "%b", "%b", "%s", "%s"),
    "sqlite": _insert("sqlite", *"???????"),
}
_INSERT_BY_NAME: Final = {kind: _insert(kind, *(f":{name}" for name in _TYPES[kind])) for kind in _TABLES}
#: SQLSTATEs: there is no such table, or no such schema.
_MISSING: Final = frozenset({"42P01", "3F000"})
_MISSING_ON_SQLITE: Final = "no such table"
#: A statement before it has failed.
_FAILED_BEFORE: Final = "25P02"

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
            InvalidRequest: it is another one, or does not commit it at once with another file that it has open.
            TransactionPoisoned: its database transaction has failed and can only be rolled back.
        """
        ...

    def insert(self, rows: Sequence[OutboxRow], schema: str, committed: CommittedRows | None) -> None:
        """Insert at least one row, in their order, after a look at what is `committed` in the file that `check` is for.

        Raises:
            InvalidRequest: a statement would be no part of a database transaction of the caller's.
            TransactionPoisoned: that has failed and can only be rolled back.
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


def committed_rows(url: DatabaseUrl) -> CommittedRows | None:
    """Return how to look into the database at `url`; None where there is no need, or no way."""
    path = url.url.database or ":memory:"
    return CommittedRows(path) if url.kind == "sqlite" and not path.startswith((":", "file:")) else None


@contextmanager
def _refused_once_it_has_failed() -> Iterator[None]:
    """Tell what SQLAlchemy or PostgreSQL say of a database transaction that has failed before in our words."""
    try:
        yield
    except (PendingRollbackError, DBAPIError) as error:
        if isinstance(error, DBAPIError) and _sqlstate(error.orig) != _FAILED_BEFORE:
            raise
        raise TransactionPoisoned(
            "the database transaction of this connection has failed, so it can only be rolled back: roll back and"
            " start over; nothing was changed"
        ) from error


class _SQLAlchemyConnection:
    """A connection of SQLAlchemy, with any driver for SQLite or PostgreSQL."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._may_look = False

    @_refused_once_it_has_failed()
    def check(self, url: DatabaseUrl) -> None:
        connection = self._connection
        _check_kind(connection.dialect.name, url)
        if url.kind != "sqlite":
            driver = connection.connection.driver_connection
            if isinstance(driver, psycopg.Connection | psycopg.AsyncConnection):
                _check_name(driver.info.dbname, url)
            else:
                _check_name(database_of_engine(connection.engine), url)
            return
        # The connection is asked: the process may have changed its folder since the engine was made, or the engine may
        # have a function of its own that opens another file than its URL says.
        files = connection.exec_driver_sql(FILES).all()
        is_that_file = _check_file(main_file(files), url)
        check_one_commit(lambda statement: connection.exec_driver_sql(statement).all(), files)
        self._may_look = is_that_file and _is_of_our_library(connection.connection.driver_connection)

    @_refused_once_it_has_failed()
    def insert(self, rows: Sequence[OutboxRow], schema: str, committed: CommittedRows | None) -> None:
        connection = self._connection
        self._refuse_autocommit()
        kind = connection.dialect.name
        statement = _text(kind, schema)
        values = [row._asdict() for row in rows]
        if kind == "sqlite":
            ids = _committed_ids(rows, committed if self._may_look else None)
            values = [{**row, "committed_id": committed_id} for row, committed_id in zip(values, ids, strict=True)]
        try:
            connection.execute(statement, values if len(values) > 1 else values[0])
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
        self._may_look = False

    def check(self, url: DatabaseUrl) -> None:
        callers = self._callers
        _check_kind(callers.backend_name, url)
        if url.kind == "postgresql":
            _check_name(callers.driver.info.dbname, url)
        else:
            with closing(callers.cursor()) as cursor:
                files = cursor.execute(FILES).fetchall()
                is_that_file = _check_file(main_file(files), url)
                check_one_commit(lambda statement: cursor.execute(statement).fetchall(), files)
            self._may_look = is_that_file and _is_of_our_library(callers.driver)

    def insert(self, rows: Sequence[OutboxRow], schema: str, committed: CommittedRows | None) -> None:
        callers = self._callers
        callers.check_usable()
        statement = _INSERT[callers.backend_name].format(schema=schema)
        values: Sequence[tuple[Any, ...]] = rows
        if callers.backend_name == "sqlite":
            ids = _committed_ids(rows, committed if self._may_look else None)
            values = [(*row, committed_id) for row, committed_id in zip(rows, ids, strict=True)]
        try:
            with closing(callers.cursor()) as cursor:
                if len(values) > 1:
                    cursor.executemany(statement, values)
                else:
                    cursor.execute(statement, values[0])
        except (psycopg.Error, sqlite3.Error) as error:
            if _is_missing(error):
                raise _no_table(callers.backend_name, schema) from error
            raise


def _committed_ids(rows: Sequence[OutboxRow], committed: CommittedRows | None) -> list[int | None]:
    """Return what each row of one INSERT says of what was committed before it: behind the first, none belongs apart."""
    return [None if committed is None else committed.last_id(), *[None] * (len(rows) - 1)]


def _is_of_our_library(driver: Any) -> bool:
    """Return whether an SQLite connection is of the library that Python has, and so we.

    Of two libraries in one process neither knows the locks of the other, and to close the file in one lets go of those
    of the other: https://www.sqlite.org/howtocorrupt.html#multiple_copies_of_sqlite_linked_into_the_same_application
    """
    driver = getattr(driver, "driver_connection", driver)
    # aiosqlite's has one within; what does not show it is not looked at.
    return isinstance(getattr(driver, "_conn", driver), sqlite3.Connection)


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
    kind = "sqlite" if kind == "sqlite" else "postgresql"
    statement = _INSERT_BY_NAME[kind].format(schema=schema)
    return text(statement).bindparams(*(bindparam(name, type_=type_) for name, type_ in _TYPES[kind].items()))


def _is_missing(error: object) -> bool:
    sqlstate = _sqlstate(error)
    return sqlstate in _MISSING or (sqlstate is None and str(error).startswith(_MISSING_ON_SQLITE))


def _sqlstate(error: object) -> str | None:
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)


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


def _check_file(name: str | None, url: DatabaseUrl) -> bool:
    """Refuse a file that is another one; return whether it is the same by its path.

    A file that was moved away while it is open keeps its path for SQLite: that another one is there now is not seen.
    """
    wanted = url.url.database
    if not name or not wanted or ":" in (name[:1], wanted[:1]) or name.startswith("file:"):
        return False
    path, own_path = Path(name), Path(wanted)
    if path.absolute() == own_path.absolute():
        return True
    try:
        same = path.samefile(own_path)
    except OSError:
        same = False
    if not same:
        raise InvalidRequest(f"the connection is to the file {name}, but this outbox is in {url}")
    return True

"""The kinds of connections that a caller may hand over, what each must be like to be used, and our cursors on it.

The caller keeps it, and with it the database transaction: nothing here begins, commits, rolls back or closes anything,
but for what the caller's next statement would have begun.  Whatever is set there for rows, texts, types or prepared
statements, ours return tuples of plain values, and leave nothing behind in the session.
"""

from __future__ import annotations

import sqlite3
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

import psycopg
from psycopg import generators
from psycopg.adapt import AdaptersMap
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql.psycopg import AsyncAdapt_psycopg_connection, AsyncAdapt_psycopg_cursor
from sqlalchemy.dialects.sqlite.aiosqlite import AsyncAdapt_aiosqlite_connection
from sqlalchemy.exc import InvalidRequestError, PendingRollbackError, SQLAlchemyError
from sqlalchemy.util import await_only
from sqlalchemy.util.concurrency import in_greenlet

from txnstore.errors import InvalidRequest, TransactionPoisoned

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


WANTED: Final = (
    "a Connection or Session of SQLAlchemy, a psycopg.Connection or a sqlite3.Connection (from asynchronous"
    " SQLAlchemy: within run_sync)"
)
#: sqlite3.LEGACY_TRANSACTION_CONTROL, from Python 3.12 on: `isolation_level` says when a database transaction begins.
_LEGACY_CONTROL: Final = -1
# Who writes a row needs a number; the question gives out none, and takes no lock.
_HAS_WRITTEN: Final = "SELECT pg_catalog.pg_current_xact_id_if_assigned() IS NOT NULL"


# --- cursors that the caller's settings do not reach -----------------------------------------------------------------


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

    @property
    def statusmessage(self) -> str | None:
        """What the server said to the last statement, for instance to COMMIT."""
        cursor: Any = self._cursor
        message: str | None = cursor.statusmessage
        return message

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
    """Prepare no statement in the caller's session meanwhile, not even one that is run often."""
    before: Final = driver.prepare_threshold
    driver.prepare_threshold = None
    try:
        yield
    finally:
        driver.prepare_threshold = before


class _plain_text:  # noqa: N801 - a context manager that reads as one; a class, because it is entered for each row
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


# --- the kinds of connections ----------------------------------------------------------------------------------------


class CallersConnection(ABC):
    """A connection of the caller's, and the database transaction that is open or begins with its next statement."""

    #: The name of the backend that it belongs to.
    backend_name: ClassVar[str]
    #: Whether its database keeps prepared transactions: only then it can vote (two-phase commit).
    keeps_prepared: ClassVar[bool]

    def __init__(self, given: object, driver: Any, owner: Connection | None, session: Session | None) -> None:
        """Use `callers_connection` instead."""
        self.given = given
        """What the caller handed over."""
        self.driver = driver
        """The driver's connection, or what SQLAlchemy makes of an asynchronous one."""
        self.owner = owner
        """SQLAlchemy's connection, if there is one."""
        self.session = session
        """The ORM session, if one was handed over."""

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether the driver's connection is closed or broken."""

    @property
    @abstractmethod
    def is_in_transaction(self) -> bool:
        """Whether a database transaction is open; asks no server."""

    @property
    def is_given_up(self) -> bool:
        """Whether its owner has closed it: SQLAlchemy may have given the driver's connection to somebody else."""
        owner = self.owner
        if owner is None:
            return self.is_closed
        return owner.closed or owner.invalidated or owner.connection.dbapi_connection is not self.driver

    @abstractmethod
    def may_have_written(self) -> bool:
        """Return whether more than reads may be open, or each statement commits by itself.

        Raises:
            psycopg.Error: PostgreSQL, which is asked, refuses, or the connection broke.
        """

    @abstractmethod
    def check_usable(self) -> None:
        """Refuse a connection on which a statement would not be part of a database transaction of the caller's.

        Raises:
            InvalidRequest: it is closed, or would commit each statement by itself, or is busy.
            TransactionPoisoned: its database transaction has failed and can only be rolled back.
        """

    def check_endable(self) -> None:  # noqa: B027 - most can be ended by others
        """Refuse a connection whose database transaction others than its owner cannot commit.

        Raises:
            InvalidRequest: SQLite: a savepoint is open, or the driver has it open always.
        """

    @abstractmethod
    def cursor(self) -> Any:
        """Return a cursor that none of the caller's settings change."""

    def call(self, statement: str, parameters: Sequence[bytes | None], types: Sequence[int]) -> bytes | None:
        """Run a statement that returns one value, and return that as text; the parameters are binary.  PostgreSQL.

        Raises:
            psycopg.Error: it failed, or the connection broke.
        """
        raise NotImplementedError

    def check_thread(self) -> None:  # noqa: B027 - most connections belong to no thread
        """Refuse a thread that may not use the connection.

        Raises:
            InvalidRequest: SQLite: the connection belongs to another one; asynchronous SQLAlchemy: not in `run_sync`.
        """

    def _check_owner(self) -> None:
        if self.owner is None:
            return
        transaction = self.owner.get_transaction()
        if transaction is None:
            # As the caller's first statement would; the caller's commit() or rollback() ends it.
            self.owner.begin()
        elif not transaction.is_active:
            raise TransactionPoisoned("the database transaction of this connection has ended: roll it back first")


class _PsycopgConnection(CallersConnection):
    backend_name = "postgresql"
    keeps_prepared = True

    @property
    def is_closed(self) -> bool:
        return bool(self.driver.closed or self.driver.broken)

    @property
    def is_in_transaction(self) -> bool:
        return self.driver.info.transaction_status is not TransactionStatus.IDLE

    def may_have_written(self) -> bool:
        if self.driver.autocommit or not self.is_in_transaction:
            return bool(self.driver.autocommit)
        cursor = self.cursor()
        cursor.execute(_HAS_WRITTEN, prepare=False)
        ((has_written,),) = cursor.fetchall()
        return bool(has_written)

    def check_usable(self) -> None:
        if self.is_closed:
            raise InvalidRequest("this connection to PostgreSQL is closed; hand over an open one")
        self._check_owner()
        status = self.driver.info.transaction_status
        if status == TransactionStatus.INERROR:
            raise TransactionPoisoned(
                "a statement of this database transaction has failed, so it can only be rolled back: roll back and"
                " start over; nothing was changed"
            )
        if status == TransactionStatus.IDLE and self.driver.autocommit:
            raise InvalidRequest(
                "this connection is in autocommit mode and no database transaction is open: open one (psycopg:"
                " `with connection.transaction():`, around the producer's block if it is to be enlisted; SQLAlchemy:"
                " another isolation level than AUTOCOMMIT)"
            )
        if status not in (TransactionStatus.IDLE, TransactionStatus.INTRANS):
            raise InvalidRequest("this connection is in the middle of a statement: finish it first")
        if _driver_of(self.driver).pgconn.pipeline_status != PipelineStatus.OFF:
            raise InvalidRequest("this connection is in pipeline mode: leave the pipeline first")
        if self.driver.info.encoding != "utf-8":
            raise InvalidRequest(
                f"this connection's client_encoding is {self.driver.info.encoding}; txnstore's text needs UTF8"
            )

    def cursor(self) -> PsycopgCursor:
        return PsycopgCursor(self.driver)

    def call(self, statement: str, parameters: Sequence[bytes | None], types: Sequence[int]) -> bytes | None:
        # Past its cursors, which take longer for so many parameters than the server for all of it.
        driver = self.driver
        with driver.lock:
            driver.pgconn.send_query_params(statement.encode(), parameters, types, (1,) * len(types))
            (result, *_) = driver.wait(generators.execute(driver.pgconn))
        return _value_of(result)


class _AdaptedPsycopgConnection(_PsycopgConnection):
    def check_thread(self) -> None:
        _check_greenlet(self)

    def cursor(self) -> Any:
        return AdaptedPsycopgCursor(self.driver)

    def call(self, statement: str, parameters: Sequence[bytes | None], types: Sequence[int]) -> bytes | None:
        driver = self.driver.driver_connection

        async def execute() -> Any:
            async with driver.lock:
                driver.pgconn.send_query_params(statement.encode(), parameters, types, (1,) * len(types))
                return await driver.wait(generators.execute(driver.pgconn))

        (result, *_) = await_only(execute())
        return _value_of(result)


def _value_of(result: Any) -> bytes | None:
    if result.status != ExecStatus.TUPLES_OK:
        raise psycopg.errors.error_from_result(result, encoding="utf-8")
    value: bytes | None = result.get_value(0, 0)
    return value


class _PlainSQLiteConnection(CallersConnection):
    backend_name = "sqlite"
    keeps_prepared = False

    @property
    def is_closed(self) -> bool:
        try:
            self.driver.total_changes  # noqa: B018 - it refuses on a closed connection, and asks nothing of SQLite
        except sqlite3.ProgrammingError:
            return True
        return False

    @property
    def is_in_transaction(self) -> bool:
        return bool(self.driver.in_transaction)

    def may_have_written(self) -> bool:
        # sqlite3 begins before it writes, if it is left to that; what the application began may have been only read.
        real = _driver_of(self.driver)
        is_left_to_it = getattr(real, "autocommit", _LEGACY_CONTROL) == _LEGACY_CONTROL
        return self.is_in_transaction or not is_left_to_it or real.isolation_level is None

    def check_usable(self) -> None:
        if self.is_closed:
            raise InvalidRequest("this SQLite connection is closed; hand over an open one")
        self.check_thread()
        self._check_owner()
        if self.driver.in_transaction:
            return
        control = getattr(self.driver, "autocommit", _LEGACY_CONTROL)
        if control is True or (control == _LEGACY_CONTROL and self.driver.isolation_level is None):
            raise InvalidRequest(
                "this SQLite connection commits each statement by itself and no database transaction is open: run"
                " BEGIN (better: BEGIN IMMEDIATE) first, or leave sqlite3's isolation_level as it is"
            )

    def check_endable(self) -> None:
        if self.owner is not None and self.owner.in_nested_transaction():
            # A savepoint without a BEGIN is a database transaction to SQLite: its release would commit the rows alone.
            raise InvalidRequest(
                "a savepoint is open on this SQLite connection (begin_nested(), or a session that joined with one): its"
                " end would end what is enlisted; enlist before it, or after it"
            )
        if getattr(self.driver, "autocommit", None) is False:
            # Its own commit() begins the next database transaction; after one of ours each statement would be its own.
            raise InvalidRequest(
                "a sqlite3 connection with autocommit=False (Python 3.12) always has a database transaction open, which"
                " only its owner can end; leave autocommit as it is, and isolation_level"
            )

    def cursor(self) -> Any:
        # Made past the connection, it knows nothing of a row factory either.
        return sqlite3.Cursor(self.driver) if self.driver.text_factory is str else SQLiteCursor(self.driver)

    def check_thread(self) -> None:
        if self.is_closed:
            return
        try:
            sqlite3.Cursor(self.driver).close()
        except sqlite3.ProgrammingError:
            raise InvalidRequest(
                "this SQLite connection belongs to another thread: call from the thread that opened it, or open it"
                " with check_same_thread=False"
            ) from None


class _AdaptedSQLiteConnection(_PlainSQLiteConnection):
    """aiosqlite's: the real connection lives on a thread of its own, and only its cursors go there."""

    @property
    def is_in_transaction(self) -> bool:
        return bool(self.driver.driver_connection.in_transaction)

    def check_thread(self) -> None:
        _check_greenlet(self)

    @property
    def is_closed(self) -> bool:
        return self.driver.driver_connection is None

    def check_usable(self) -> None:
        self._check_owner()
        real = self.driver.driver_connection
        if real.row_factory is not None or real.text_factory is not str:
            raise InvalidRequest("an aiosqlite connection with a row_factory or text_factory of its own cannot be used")
        if not real.in_transaction and real.isolation_level is None:
            raise InvalidRequest("this SQLite connection commits each statement by itself: run BEGIN first")

    def cursor(self) -> Any:
        return self.driver.cursor()


def _check_greenlet(callers: CallersConnection) -> None:
    if not callers.is_closed and not in_greenlet():
        raise InvalidRequest(
            "this connection of asynchronous SQLAlchemy can be used within run_sync only: call commit_transaction() and"
            " abort_transaction() there, as in `await session.run_sync(lambda _: producer.commit_transaction())`"
        )


def callers_connection(given: object) -> CallersConnection:
    """Return what the caller has handed over as the kind of connection that it is; nothing is asked of its database.

    Raises:
        TypeError: it is not a connection of a kind that can be used.
        InvalidRequest: it is closed, or see `connection_of_session`.
        TransactionPoisoned: it is a session that has to be rolled back.
    """
    session = session_of(given)
    if session is not None:
        try:
            owner = connection_of_session(session)
        except SQLAlchemyError as error:
            raise _nothing_to_give(error) from None
        return _recognized(given, _driver_behind(owner), owner, session)
    if isinstance(given, Connection):
        return _recognized(given, _driver_behind(given), given, None)
    return _recognized(given, given, None, None)


def session_of(given: object) -> Session | None:
    """Return the ORM session that was handed over, or that a scoped_session stands for; None: it is something else."""
    # The ORM takes a quarter of a second to import; a program that has not done so has no session to give.
    if "sqlalchemy.orm" not in sys.modules:
        return None
    from sqlalchemy.orm import Session, scoped_session

    session = given() if isinstance(given, scoped_session) else given
    return session if isinstance(session, Session) else None


def connection_of_session(session: Session) -> Connection:
    """Return the connection of an ORM session, in the database transaction, or within the savepoint, that it is in.

    Raises:
        InvalidRequest: the session does not know which one is meant; or see `_check_savepoint`.
        TransactionPoisoned: its database transaction has failed and can only be rolled back.
        SQLAlchemyError: its database cannot be reached.
    """
    try:
        if session.in_nested_transaction():
            _check_savepoint(session)
        return session.connection()
    except PendingRollbackError as error:
        raise TransactionPoisoned(
            "the database transaction of this session has failed: roll the session back and start over; nothing was"
            " changed"
        ) from error
    except InvalidRequestError as error:
        raise _nothing_to_give(error) from None


def _check_savepoint(session: Session) -> None:
    """Refuse a savepoint of SQLite's that is to be sent with no BEGIN before it: its release would be a COMMIT.

    A session sends it with its first statement.  Once it is sent SQLite tells nobody whether a BEGIN came before.
    """
    outermost = session.get_transaction()
    if outermost is None or session.get_bind().dialect.name != "sqlite":
        return
    # Not the session's own connection(), which sends the savepoint. What the application sends at "begin" is sent.
    driver = outermost.connection(None).connection.driver_connection
    control = getattr(driver, "autocommit", _LEGACY_CONTROL)
    # Without an isolation_level each statement commits by itself, and the application knows.
    is_begun_late = control == _LEGACY_CONTROL and getattr(driver, "isolation_level", None) is not None
    if is_begun_late and not getattr(driver, "in_transaction", True):
        raise InvalidRequest(
            "this session is within begin_nested(), but nothing was written before it, so sqlite3 has sent no BEGIN:"
            " the end of the savepoint would commit, and a rollback of the session take nothing back: call this"
            " outside begin_nested(), or let SQLAlchemy send BEGIN"
            " (https://docs.sqlalchemy.org/en/21/dialects/sqlite.html#sqlite-transactions)"
        )


def _nothing_to_give(error: SQLAlchemyError) -> InvalidRequest:
    return InvalidRequest(
        f"this session has no connection to give ({type(error).__name__}): give it a default bind, the engine of this"
        " database (`Session(engine, binds=...)`), or roll it back first"
    )


def _driver_behind(owner: Connection) -> Any:
    if owner.closed:
        raise InvalidRequest("this connection is closed; hand over an open one")
    try:
        return owner.connection.dbapi_connection
    except SQLAlchemyError as error:
        raise InvalidRequest(f"this connection is not usable ({type(error).__name__}): roll it back first") from None


def _recognized(given: object, driver: Any, owner: Connection | None, session: Session | None) -> CallersConnection:
    for kind, found in _KINDS:
        if isinstance(driver, kind):
            return found(given, driver, owner, session)
    if driver is None and owner is not None:
        raise InvalidRequest("this connection has lost its database: hand over another one")
    shown = type(driver).__module__.partition(".")[0] + "." + type(driver).__name__
    raise TypeError(f"expected {WANTED}, not {shown}")


def _driver_of(connection: Any) -> Any:
    """Return the connection behind what SQLAlchemy makes of an asynchronous one."""
    is_adapted = isinstance(connection, AsyncAdapt_psycopg_connection | AsyncAdapt_aiosqlite_connection)
    return connection.driver_connection if is_adapted else connection


_KINDS: Final[tuple[tuple[type, type[CallersConnection]], ...]] = (
    (psycopg.Connection, _PsycopgConnection),
    (sqlite3.Connection, _PlainSQLiteConnection),
    (AsyncAdapt_psycopg_connection, _AdaptedPsycopgConnection),
    (AsyncAdapt_aiosqlite_connection, _AdaptedSQLiteConnection),
)

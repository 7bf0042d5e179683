"""The outbox of an application: `produce` inside its own database transaction."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from sqlalchemy import Engine

from txnstore.clients.configuration.configuration import Configuration, producer_configuration
from txnstore.clients.connection import OfOneProcess, StoreConnection
from txnstore.clients.model.errors import KafkaException, joined_error_of, kafka_exception_of
from txnstore.db.callers.connections import connection_of_session, session_of
from txnstore.db.callers.engines import NEEDS_FILE, address_of_engine
from txnstore.db.callers.outbox_insert import OutboxRow, committed_rows, outbox_connection
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.db.url import CurrentOptions
from txnstore.deadline import check_timeout
from txnstore.errors import InvalidUrl, TxnStoreError
from txnstore.log.outbox.sequencer import drain_outbox
from txnstore.outbox.background import BackgroundSequencer
from txnstore.outbox.changes import Change, Watch
from txnstore.outbox.rows import outbox_row, row_of

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from txnstore.db.sqlite.committed_rows import CommittedRows

#: What `produce` takes: a Connection or Session of SQLAlchemy, or a plain connection of psycopg or sqlite3.
OutboxConnection = Any
#: How long `close` waits for the last rows to be moved, unless told otherwise.
CLOSE_TIMEOUT_SECONDS: Final = 10.0


class Outbox(OfOneProcess):
    """Records that are committed with the application's own rows, or not at all; safe to share between threads.

    `produce` inserts a row into the table `outbox` within the database transaction that is open on the connection it
    is given, and does nothing else there.  Once that is committed, the sequencer makes the row a record: a consumer
    of the store that waits for news, `txnstore maintain`, `txnstore relay`, or a small thread of this object.

    All rows of one database transaction become visible to consumers at the same moment.  An outbox that was
    made before a fork works in its children as well, in each over connections of its own.

    Args:
        database: a database's URL, an Engine or AsyncEngine of SQLAlchemy on it, or the configuration of a Producer.
            The outbox has connections of its own; they are given what the engine's `connect_args` and its listeners to
            `do_connect` give the engine's.
        schema: the PostgreSQL schema of txnstore's tables; default: "txnstore", or what the configuration says.
        sequencer: whether this object's own thread makes records of rows; started by the first record.

    Raises:
        KafkaException: `_INVALID_ARG`: the URL or the configuration cannot be understood, the database is in memory,
            or the engine makes its connections in a way that txnstore cannot.
        TypeError: the database is given as something else.
    """

    def __init__(
        self,
        database: str | Engine | AsyncEngine | Mapping[str, Any],
        *,
        schema: str | None = None,
        sequencer: bool = True,
    ) -> None:
        self._configuration, self._current_options = _configuration(database, schema)
        if self._configuration.url.is_in_memory:
            raise kafka_exception_of(InvalidUrl(NEEDS_FILE))
        self._schema: str = self._configuration["txnstore.schema"]
        self._sequences = sequencer
        self._closed = False
        self._watches: list[Watch] = []
        self._start()

    def __repr__(self) -> str:
        return f"Outbox({str(self._configuration.url)!r})"

    def __enter__(self) -> Self:
        """Return the outbox."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def open(self) -> Self:
        """Connect now and make txnstore's tables if they are not there; return this outbox.

        Not from within a database transaction of the application: on SQLite it would wait for itself.

        Raises:
            KafkaException: the database cannot be reached or refuses, or its tables are of another version.
        """
        self._follow_fork()
        try:
            self._connection.store()
        except TxnStoreError as error:
            raise kafka_exception_of(error) from error
        return self

    def produce(  # noqa: PLR0917 - the arguments of Producer.produce
        self,
        connection: OutboxConnection,
        topic: str,
        value: str | bytes | None = None,
        key: str | bytes | None = None,
        partition: int | None = None,
        headers: Mapping[str, Any] | Sequence[tuple[str, Any]] | None = None,
        timestamp: int | None = None,
    ) -> None:
        """Insert a record that will be there if the connection's database transaction is committed.

        On SQLite a savepoint with no BEGIN before it commits when it ends, and what is inserted within it stays,
        whatever is rolled back afterwards: sqlite3 sends BEGIN only before the first INSERT, UPDATE or DELETE.  So
        write something before `begin_nested()`, or set SQLAlchemy's transaction control as its documentation says.

        Args:
            connection: a Connection or Session of SQLAlchemy, a psycopg.Connection or a sqlite3.Connection.
            topic: the topic's name; it is created if it does not exist and the store allows that.
            value: the payload; text is stored as UTF-8; None is a tombstone.
            key: what the partition is chosen by, unless `partition` says which.
            partition: its number; None or -1: chosen by the key as producers do (consistent_random).
            headers: a dict, or a list of `(name, value)`.
            timestamp: milliseconds since 1970; None or 0 is now, on PostgreSQL by the server's clock.

        Raises:
            TypeError, UnicodeEncodeError, OverflowError: an argument is wrong; nothing was inserted.
            KafkaException: `INVALID_REQUEST`: the connection is on another database, or commits by itself, or a
                session would begin with a savepoint on SQLite (see above; one that is open is not recognized);
                `_STATE`: its database transaction has failed, and has to be rolled back; `UNSUPPORTED_VERSION`: there
                are no tables of txnstore; `TOPIC_EXCEPTION`, `INVALID_TIMESTAMP`, `_UNKNOWN_PARTITION`,
                `MSG_SIZE_TOO_LARGE`: the record is refused.
            RuntimeError: the outbox has been closed.
        """
        self._check_open()
        row = outbox_row(
            self._configuration,
            topic,
            value=value,
            key=key,
            partition=partition,
            headers=headers,
            timestamp=timestamp,
        )
        self._insert(connection, [row])

    def produce_all(self, connection: OutboxConnection, records: Iterable[Mapping[str, Any]]) -> int:
        """Insert several records, in their order, and return how many; each a dict with the arguments of `produce`.

        Raises:
            TypeError, UnicodeEncodeError, OverflowError, KafkaException, RuntimeError: as `produce`; if a record
                is refused, nothing was inserted.
        """
        self._check_open()
        rows = [row_of(self._configuration, record, index) for index, record in enumerate(records)]
        if rows:
            self._insert(connection, rows)
        return len(rows)

    def watch(
        self,
        model: type,
        topic: str,
        *,
        key: Callable[[Any], str | bytes | None] | None = None,
        value: Callable[[Any, Change], str | bytes | None],
        headers: Callable[[Any, Change], Any] | None = None,
        when: Callable[[Any, Change], bool] | None = None,
        sessions: Any = None,
    ) -> Watch:
        """Let each object of an ORM model that a session inserts, updates or deletes become a record of its own.

        The records are inserted at the session's flush, on its connection, so they share the fate of what it wrote:
        also that of a savepoint.  What passes by the unit of work is not seen: `session.execute(update(...))`,
        `bulk_insert_mappings`, cascades of the database, plain SQL.

        As for SQLAlchemy's `after_update`, an object is updated, too, when a loaded collection of its own changes,
        though its row stays as it is: `when=lambda found, change: change.attributes != {"lines"}` leaves that out.

        It lasts until `Watch.stop`, also if the program forgets the outbox.  Once that is closed (in a child of a fork:
        once the child has closed it), a flush that would make a record raises RuntimeError and is rolled back, so
        that nothing is committed without its record: close it after the last commit.  Whoever watches the same model
        later, for the same topic and sessions, takes over; `stop` lets changes go without records.

        Args:
            model: a mapped class; its subclasses count as well.
            topic: where the records go.
            key: makes the key of an object; default: no key.
            value: makes the value of an object and its change; None is a tombstone.  An attribute that was set to an
                SQL expression is named in the change like any other; to read what it is now takes a SELECT, which
                the session sends by itself (none with the mapper's `eager_defaults=True` and a database that can
                return it).  The row of a deleted object is gone by then: attributes of it that are deferred, or have
                expired since it was loaded, cannot be read.
            headers: makes the headers.
            when: says whether a change becomes a record at all; default: each does.
            sessions: the Session class, sessionmaker or session that is watched; default: all sessions, also those
                that asynchronous ones have inside.

        Raises:
            TypeError: the model is not mapped, or an argument cannot be called.
            KafkaException: `TOPIC_EXCEPTION`: Kafka does not allow the topic's name.
            RuntimeError: the outbox has been closed.
        """
        self._check_open()
        watch = Watch(self, model, topic, key=key, value=value, headers=headers, when=when, sessions=sessions)
        self._watches.append(watch)
        if self._closed:
            # Another thread has closed it meanwhile.
            watch.refuse()
        return watch

    def sequence(self) -> int:
        """Make records of all rows that are committed now, and return of how many; over a connection of its own.

        Nobody needs to call it: it is for tests, and for programs that end before anything else moves the rows.  What
        the thread of an outbox has moved meanwhile is not counted: a test that counts makes it with `sequencer=False`.

        Raises:
            KafkaException: the database cannot be reached or refuses; what was moved before stays moved.
            RuntimeError: the outbox has been closed.
        """
        self._check_open()
        self._follow_fork()
        try:
            return drain_outbox(self._connection.store())
        except TxnStoreError as error:
            raise kafka_exception_of(error) from error

    def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """End the thread, which moves once more what is committed; a second call does nothing.

        `timeout` is how many seconds that may take: so long it is tried while somebody else is at the rows that are
        there now, or has the database to itself; if they cannot be moved otherwise, as while the database is away, only
        once.  On SQLite it is about a second at most, for the one who has it may be the caller, in a transaction that
        is still open: close the outbox after the last commit.  A warning says if some may be left.  Rows that are
        committed later wait for somebody else.  What is watched stays watched: a flush of it raises RuntimeError from
        now on (see `watch`).
        """
        timeout_seconds = check_timeout(timeout)
        self._closed = True
        for watch in self._watches:
            watch.refuse()
        if not self._finalizer.alive:
            return
        if os.getpid() == self._connection.process_id:
            self._background.close(CLOSE_TIMEOUT_SECONDS if timeout_seconds < 0 else timeout_seconds)
        self._finalizer()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._connection = StoreConnection(self._configuration, current_options=self._current_options)
        self._background = BackgroundSequencer(self._connection, self._configuration.logger)
        self._committed = committed_rows(self._configuration.url)
        self._finalizer = weakref.finalize(self, _end, self._background, self._connection, self._committed)

    def _insert(self, connection: OutboxConnection, rows: Sequence[OutboxRow]) -> None:
        self._follow_fork()
        try:
            target = outbox_connection(_of_session(connection))
            target.check(self._configuration.url)
            target.insert(rows, self._schema, self._committed)
        except TxnStoreError as error:
            raise KafkaException(joined_error_of(error)) from error
        if self._sequences:
            self._background.notice()

    def _follow_fork(self) -> None:
        """Start afresh in a child of a fork, which has neither the threads nor the connections of its parent."""
        if os.getpid() != self._connection.process_id and not self._closed:
            self._finalizer.detach()
            self._start()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this outbox has been closed")


def _end(background: BackgroundSequencer, connection: StoreConnection, committed: CommittedRows | None) -> None:
    """End what works for an outbox that is gone."""
    if os.getpid() == connection.process_id:
        background.stop()
        if committed is not None:
            committed.close()
    connection.close()


def _of_session(given: object) -> object:
    """Return the connection of an ORM session, in the database transaction that it is in."""
    session = session_of(given)
    return given if session is None else connection_of_session(session)


def _configuration(database: object, schema: str | None) -> tuple[Configuration, CurrentOptions | None]:
    if isinstance(database, Mapping):
        further = {} if schema is None else {"txnstore.schema": schema}
        return producer_configuration(({**database, **further},), {}), None
    # An AsyncEngine has one.
    engine = getattr(database, "sync_engine", database)
    current_options: CurrentOptions | None = None
    if isinstance(engine, Engine):
        try:
            engine, current_options = address_of_engine(engine)
        except TxnStoreError as error:
            raise kafka_exception_of(error) from None
    elif not isinstance(engine, str):
        raise TypeError(
            "an outbox is made from a database URL, an Engine of SQLAlchemy or the configuration of a Producer, not"
            f" {type(database).__name__}"
        )
    settings = {"bootstrap.servers": engine, "txnstore.schema": schema or DEFAULT_SCHEMA}
    return producer_configuration((settings,), {}), current_options

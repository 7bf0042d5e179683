"""The store: one database, the two ways to run a database transaction on it, and how statements are run within one.

Functions of the upper layers take a `Connection` and never open one, so that a caller composes several of them into
one database transaction:

    store.write(lambda connection: append(connection, ...))

A statement that must hit a number of rows hits them, or nothing of its database transaction is committed.  Work on
many rows is cut into database transactions so short that nobody waits long for one.
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from sqlalchemy import BigInteger, Connection, Delete, Engine, Row, Select, Update, event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import bindparam
from sqlalchemy.sql.functions import FunctionElement

from txnstore.backoff import Backoff
from txnstore.clock import Clock
from txnstore.db.backend import (
    EVERYTHING,
    NOTHING,
    Access,
    Announcer,
    Backend,
    Limits,
    NoWholeCommits,
    Stage,
    Subjects,
    Waiter,
    WholeTransaction,
)
from txnstore.db.statements import HotStatement, run_on_driver
from txnstore.db.url import DatabaseUrl
from txnstore.errors import (
    NotCoordinator,
    StoreBusy,
    StoreClosed,
    StoreCopied,
    StoreReadOnly,
    StoreUnavailable,
    TxnStoreError,
    UnknownTopicOrPartition,
    WriteConflict,
)

Item = TypeVar("Item")
Result = TypeVar("Result")

#: With the value 0 all transactions go the general way, as those do that are unusual: for tests, and for comparing.
COMMITS_WHOLE_VARIABLE: Final = "TXNSTORE_COMMITS_WHOLE"
COMMITS_WHOLE: Final = os.environ.get(COMMITS_WHOLE_VARIABLE) != "0"

#: A database that belongs to no others, and the first of those that do.
ONLY_DATABASE_ID: Final = 1
#: Between two tries for a lock that SQLite does not queue for; jittered, so that the same client does not always lose.
CONTENTION_PAUSE_SECONDS: Final = 0.0005
#: Between two tries after a conflict or while the database is away: the first, and the longest.
RETRY_FIRST_SECONDS: Final = 0.005
RETRY_LAST_SECONDS: Final = 0.5
#: How long a standby that answers is taken for a primary on its way: behind a proxy, or while an address moves, one may
#: until it is promoted.  Less than a store goes on by default, so that its last error is that nothing can be written.
STANDBY_SECONDS: Final = 25.0
#: What a standby refuses so long after the last time is another failover's.
STANDBY_AGAIN_SECONDS: Final = 60.0
#: A function that was missing is called again after this long: an upgrade makes it anew, or a GRANT has come since.
FUNCTION_AGAIN_SECONDS: Final = 60.0
#: How long a store that is closed waits until readers have been told of its last commits.
ANNOUNCE_TIMEOUT_SECONDS: Final = 5.0
#: How many rows one portion deletes at most.
ROWS_AT_ONCE: Final = 200
#: How many values one statement lists: SQLite takes 32,766 parameters, PostgreSQL 65,535.
LISTED_MAX: Final = 10_000
#: The pause after a portion: as long as it took, but long enough for others to ask for the lock a few times.
_PAUSE_MIN_SECONDS: Final = 4 * CONTENTION_PAUSE_SECONDS
_PAUSE_MAX_SECONDS: Final = 0.02

#: Where a connection keeps what `note_change` was told.
_CHANGES: Final = "txnstore_changes"
_MAKE_DURABLE: Final = (
    "SELECT pg_catalog.set_config('synchronous_commit', 'on', true)"
    " WHERE pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) 'off'"
)
#: Where a new one keeps what it is asked before it is used.
CONNECTION_CHECK: Final = "txnstore_check"

_log = logging.getLogger(__name__)

_opened: Final[weakref.WeakSet[Store]] = weakref.WeakSet()
#: Connections that a forked child inherited: neither used nor closed there, because they are the parent's.
_inherited: Final[list[Any]] = []


class Store:
    """One database that holds logs, coordinators and groups; safe to share between threads.

    Whatever asks it raises a `TxnStoreError` where it refuses or cannot be reached, also where no docstring says so.
    """

    def __init__(
        self, backend: Backend, url: DatabaseUrl, engine: Engine, *, schema: str, limits: Limits, clock: Clock | None
    ) -> None:
        """Use `opening.open_store` instead: it checks what it opens."""
        self.backend = backend
        self.url = url
        self.engine = engine
        self.schema = schema
        self.limits = limits
        self.clock = clock
        self.store_uuid = ""
        self.is_original = False
        """Whether its tables were found not to be a copy, see `db.identity`; a new connection may lead elsewhere."""

        self.running: str | None = None
        """Which database it is in, as long as that server runs; None: nobody has asked, or it may be another by now."""

        self.check_new_connection: Callable[[Store, Connection], None] | None = None
        """Asked, once the store is open, whether a connection that was made since leads to it."""

        self.newest_producer_id = 0
        """The highest number in its row of the next producer id that any look has seen."""

        self.gone_back: str | None = None
        """Why nothing is done any more: it was found to be an older state of itself; None: it was not."""

        self.database_id = ONLY_DATABASE_ID
        """Its number among the databases that belong together."""
        self.label: str | None = None
        """What errors call it; None: it is the only one, and needs no name."""
        self.has_learned_of_others: Callable[[], bool] | None = None
        """Asked about what is not here: whether it may be elsewhere, which was not known before."""
        self.commits_whole = COMMITS_WHOLE
        """Whether transactions that are wholly in the client go a shorter way."""
        self.general_until_seconds = 0.0 if backend.commit_whole is not None else math.inf
        """Until when, by the monotonic clock, none goes by a function of the database."""
        self._has_told_of_function = False

        self._standby_seconds = -math.inf, -math.inf
        """When a standby has refused to be written to, for the first and for the last time of this failover."""

        self._announcer: Announcer | None = None
        self._kept: list[tuple[Any, Connection]] = []
        """The connection of the last write, and its pool: the way through that takes longer than a small statement."""

        self._lock = threading.Lock()
        self._closed = False
        self._random = random.Random()
        event.listen(engine, "connect", _doubting(self))
        backend.close_before_fork(self, Store._drop_kept)
        _opened.add(self)

    @property
    def has_commit_function(self) -> bool:
        """Whether the database commits them by one statement, as far as anybody knows; it appends other batches too."""
        return self.general_until_seconds <= time.monotonic()

    def miss_commit_function(self) -> None:
        """Take note that there is no such function, or not for this role; later there may be."""
        self.general_until_seconds = time.monotonic() + FUNCTION_AGAIN_SECONDS
        if not self._has_told_of_function:
            self._has_told_of_function = True
            _log.warning(
                "the function commit_transaction is not there in %s, or this role may not call it (`txnstore roles"
                " grant`): transactions take several statements each, and longer; it is called again after %d seconds",
                self.url,
                FUNCTION_AGAIN_SECONDS,
                extra={"event": "commit_function_missing", "store": str(self.url)},
            )

    def __repr__(self) -> str:
        """Return the address without its password."""
        return f"Store({str(self.url)!r})"

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def write(
        self,
        work: Callable[[Connection], Result],
        *,
        wakes_readers: bool = False,
        retry_timeout_ms: int | None = None,
        limits: Limits | None = None,
    ) -> Result:
        """Run `work` in one database transaction, commit it, and return what it returned.

        `work` is run again from the start if the database made it the victim of a conflict or was away for a moment,
        so it has no effects but those on its connection.  An error of its own rolls back and comes out as it is.
        With `wakes_readers`, those are told after the commit who wait for what `work` has noted with `note_change`; all
        who wait if it has noted nothing.  `limits` bound this one database transaction; by default the store's do.

        Raises:
            OutcomeUnknown: the connection broke during COMMIT; repeat the same call only if it recognises itself.
            TxnStoreError: any other error of the database; nothing was changed.
        """
        if not wakes_readers:
            result = self._attempt(partial(self._run_once, work, Access.WRITE, limits=limits), retry_timeout_ms)
            self.backend.after_commit(self.engine)
            return result
        subjects = EVERYTHING

        def noting(connection: Connection) -> Result:
            nonlocal subjects
            take_changes(connection)
            result = work(connection)
            subjects = take_changes(connection)
            return result

        result = self._attempt(partial(self._run_once, noting, Access.WRITE, limits=limits), retry_timeout_ms)
        self.backend.after_commit(self.engine)
        if subjects != NOTHING:
            self.announce(subjects)
        return result

    def commit_whole(self, whole: WholeTransaction, *, retry_timeout_ms: int | None = None) -> list[int] | None:
        """Commit a transaction wholly in the client, or write batches or offsets of no transaction, in one statement.

        Returns what `CommitWhole` returns.  None: something is unusual and nothing was changed; the general way, in
        several statements, does it or says why not.

        Raises:
            OutcomeUnknown: the connection broke; repeat the same call only if it recognises itself.
            TxnStoreError: the database is busy or away; nothing was changed.
        """
        commit = self.backend.commit_whole
        if commit is None:
            return None
        try:
            commit_on = partial(commit, schema=self.schema, whole=whole, limits=self.limits, clock=self.clock)
            places = self._attempt(partial(self._run_alone, commit_on), retry_timeout_ms)
        except NoWholeCommits:
            self.miss_commit_function()
            return None
        if places is not None:
            self.backend.after_commit(self.engine)
            if whole.partitions:
                self.announce(Subjects(partition_ids=frozenset(number for number, _ in whole.partitions)))
        return places

    def write_at_once(
        self,
        statements: Sequence[tuple[HotStatement, Mapping[str, Any]]],
        subjects: Subjects,
        *,
        retry_timeout_ms: int | None = None,
    ) -> list[int]:
        """Run statements, none of which needs what another one returns, in one database transaction.

        They are rendered before, and go to a server in one message: what they lock is locked for as short as can be.
        Returns how many rows each has hit; if the last one any, readers that wait for the subjects are told.

        Raises:
            OutcomeUnknown: the connection broke; repeat the same call only if it recognises itself.
            TxnStoreError: any other error of the database; nothing was changed.
        """
        hits = self._attempt(partial(self._write_at_once, statements), retry_timeout_ms)
        self.backend.after_commit(self.engine)
        if hits[-1] > 0:
            self.announce(subjects)
        return hits

    def read(self, work: Callable[[Connection], Result], *, retry_timeout_ms: int | None = None) -> Result:
        """Run `work` on one snapshot of the database and return what it returned."""
        return self._attempt(partial(self._run_once, work, Access.READ), retry_timeout_ms)

    def reclaim(self) -> int:
        """Free the room of deleted rows for new ones where much of it waits for that; return of how many tables.

        It may take a minute, and keeps nobody from reading or writing meanwhile.
        """
        self.check_usable()
        try:
            return self.backend.reclaim(self.engine, self.url, schema=self.schema)
        except TxnStoreError as error:
            raise self._named(error) from None

    def waiter(self, subjects: Subjects = EVERYTHING) -> Waiter:
        """Return what one reader waits on until somebody has committed something about these; close it after use."""
        self.check_usable()
        return self.backend.waiter(self.engine, self.url, subjects, channel=self.channel)

    @property
    def channel(self) -> str:
        """The name under which writers of this store wake its readers."""
        return f"txnstore_{self.store_uuid.replace('-', '')}"

    def announce(self, subjects: Subjects = EVERYTHING) -> None:
        """Wake readers that wait for any of these, in this process and others; only a hint."""
        announcer = self._announcer
        if announcer is not None:
            announcer.announce(subjects)

    def prepare_announcements(self) -> None:
        """Make ready to wake readers, once the store's identity is known; nothing is opened before it is needed."""
        self._announcer = self.backend.announcer(self.url, channel=self.channel)

    def close(self, *, timeout_seconds: float = ANNOUNCE_TIMEOUT_SECONDS) -> None:
        """Close every connection; a second call does nothing.

        Readers are told of the last commits before, unless that takes longer than `timeout_seconds`.
        """
        with self._lock:
            closed, self._closed = self._closed, True
            announcer, self._announcer = self._announcer, None
        if closed:
            return
        if announcer is not None:
            announcer.close(timeout_seconds)
        self._dispose()
        _opened.discard(self)

    def forget_connections_after_fork(self) -> None:
        """In a forked child: leave the parent's connections alone, and open for the parent."""
        _inherited.append((self.engine.pool, self._announcer, self._kept))
        self._kept = []
        self.engine.dispose(close=False)
        self.prepare_announcements()
        self._lock = threading.Lock()
        self._random = random.Random()

    def check_usable(self) -> None:
        """Refuse what would be done without asking it: it has been closed, or was found to have gone back.

        Raises:
            StoreClosed, StoreCopied: see above.
        """
        if self._closed:
            raise StoreClosed(f"the store {self.url} has been closed")
        if self.gone_back is not None:
            raise self._named(StoreCopied(self.gone_back))

    def _attempt(self, once: Callable[[float], Result], retry_timeout_ms: int | None) -> Result:
        timeout_ms = self.limits.retry_timeout_ms if retry_timeout_ms is None else retry_timeout_ms
        deadline = time.monotonic() + timeout_ms / 1000
        backoff: Backoff | None = None
        while True:
            self.check_usable()
            try:
                return once(deadline)
            except (WriteConflict, StoreUnavailable, StoreBusy) as error:
                if isinstance(error, StoreUnavailable) and self.limits.on_unavailable is not None:
                    self.limits.on_unavailable(error)
                left_seconds = deadline - time.monotonic()
                if left_seconds <= 0:
                    raise
            except (UnknownTopicOrPartition, NotCoordinator):
                if self.has_learned_of_others is None or not self.has_learned_of_others():
                    raise
                continue
            backoff = backoff or Backoff(RETRY_FIRST_SECONDS, RETRY_LAST_SECONDS)
            time.sleep(min(left_seconds, backoff.back_off()))

    def _run_once(
        self, work: Callable[[Connection], Result], access: Access, deadline: float, *, limits: Limits | None = None
    ) -> Result:
        """Run one database transaction, whatever comes: at the end none is open."""
        pool = self.engine.pool
        connection = self._connect(deadline)
        is_kept = False
        try:
            result = self._run_on(connection, work, access, deadline, limits or self.limits)
            # After a statement of its own Core believes that its transaction is open.
            is_kept = access is Access.WRITE and not connection.in_transaction()
        finally:
            if is_kept:
                self._keep(connection, pool)
            else:
                self._give_back(connection, pool)
        return result

    def _run_on(
        self,
        connection: Connection,
        work: Callable[[Connection], Result],
        access: Access,
        deadline: float,
        limits: Limits,
    ) -> Result:
        stage = Stage.STATEMENT
        try:
            self._while_contended(lambda: self.backend.begin(connection, access, limits), deadline)
            result = work(connection)
            if access is Access.WRITE:
                # What was only read is known, whether or not the COMMIT succeeds.
                stage = Stage.COMMIT
            self._commit(connection, deadline)
        except DBAPIError as error:
            translated = self._named(self.backend.translate(error, stage))
            told = self._while_on_standby(translated, connection) if access is Access.WRITE else translated
            # A connection that was made while nothing could be written stays read-only; the next one may not be.
            self._abandon(connection, keep=not (translated.outcome_unknown or isinstance(translated, StoreReadOnly)))
            if translated.outcome_unknown:
                # What this engine's other connections believe may be wrong as well.
                self._dispose()
            raise told from None
        except BaseException:
            # An interrupt while committing leaves the driver in the middle of its conversation: drop the connection.
            self._abandon(connection, keep=stage is Stage.STATEMENT)
            raise
        return result

    def _write_at_once(
        self, statements: Sequence[tuple[HotStatement, Mapping[str, Any]]], deadline: float
    ) -> list[int]:
        dialect = self.engine.dialect
        rendered = [(statement.rendered(dialect, parameters), parameters) for statement, parameters in statements]

        def with_values() -> list[tuple[str, Any]]:
            return [(each.text, each.values_from(parameters, dialect)) for each, parameters in rendered if each]

        write = self.backend.write_at_once
        if write is not None:
            return self._run_alone(lambda connection: write(connection, with_values(), self.limits), deadline)
        return self._run_once(
            lambda connection: [run_on_driver(connection, text, values).hit for text, values in with_values()],
            Access.WRITE,
            deadline,
        )

    def _run_alone(self, run: Callable[[Connection], Result], deadline: float) -> Result:
        """Run what is a database transaction of its own."""
        pool = self.engine.pool
        connection = self._connect(deadline)
        is_sound = False
        try:
            result = run(connection)
            is_sound = True
        except TxnStoreError as error:
            is_sound = isinstance(error, WriteConflict | StoreBusy)
            if error.outcome_unknown:
                # What this engine's other connections believe may be wrong as well.
                self._dispose()
            raise self._while_on_standby(self._named(error), connection) from None
        except NoWholeCommits:
            is_sound = True
            raise
        finally:
            if not is_sound:
                connection.invalidate()
                connection.close()
            else:
                self._keep(connection, pool)
        return result

    def _keep(self, connection: Connection, pool: Any) -> None:
        """Keep a connection, on which no database transaction is open, for the next call."""
        if self._kept or pool is not self.engine.pool:
            self._give_back(connection, pool)
            return
        self._kept.append((pool, connection))
        if self._closed or pool is not self.engine.pool:
            self._drop_kept()

    def _give_back(self, connection: Connection, pool: Any) -> None:
        if pool is not self.engine.pool:
            # The pool was disposed of meanwhile: nobody would ever close what comes back to it.
            connection.invalidate()
        connection.close()
        if self._closed or pool is not self.engine.pool:
            # Between the question and the answer: what has just come back to it is closed as well.
            pool.dispose()

    def _take_kept(self) -> Connection | None:
        while self._kept:
            try:
                pool, connection = self._kept.pop()
            except IndexError:
                # Another thread was faster.
                break
            if pool is self.engine.pool:
                return connection
            self._give_back(connection, pool)
        return None

    def _drop_kept(self) -> None:
        while (connection := self._take_kept()) is not None:
            connection.invalidate()
            connection.close()

    def _dispose(self) -> None:
        """Close every connection that is not in use, and those in use as soon as they are not."""
        self._drop_kept()
        self.engine.dispose()
        self.backend.let_go(self.engine)

    def _connect(self, deadline: float) -> Connection:
        kept = self._take_kept()
        if kept is not None:
            return kept
        try:
            connection = self._while_contended(self.engine.connect, deadline)
        except DBAPIError as error:
            raise self._named(self.backend.translate(error, Stage.CONNECT)) from None
        except PoolTimeoutError:
            raise StoreBusy("every connection of this store is in use; nothing was changed") from None
        check = connection.info.pop(CONNECTION_CHECK, None)
        if check is not None:
            try:
                self._run_on(connection, partial(check, self), Access.READ, deadline, self.limits)
            except BaseException:
                connection.invalidate()
                connection.close()
                raise
        return connection

    def _commit(self, connection: Connection, deadline: float) -> None:
        self._while_contended(lambda: self.backend.commit(connection), deadline)

    def translated(self, error: DBAPIError) -> TxnStoreError:
        """Return our error for what a statement of this database has raised."""
        return self._named(self.backend.translate(error, Stage.STATEMENT))

    def _named(self, error: TxnStoreError) -> TxnStoreError:
        """Return the error; of several databases it says which one it is about."""
        return error if self.label is None else type(error)(f"the database {self.label!r}: {error}")

    def _while_on_standby(self, error: TxnStoreError, connection: Connection) -> TxnStoreError:
        """Return the error of a write; what a standby refuses is tried again for a while, on other connections."""
        if not isinstance(error, StoreReadOnly) or not self.backend.is_known_standby(connection):
            return error
        now = time.monotonic()
        first, last = self._standby_seconds
        if now - last >= STANDBY_AGAIN_SECONDS:
            first = now
        self._standby_seconds = first, now
        kind = StoreUnavailable if now - first < STANDBY_SECONDS else StoreReadOnly
        return kind(f"{error}: the server is a standby, which takes no writes unless it is promoted")

    def _while_contended(self, step: Callable[[], Result], deadline: float) -> Result:
        """Repeat `step` while the database says that somebody else holds its lock."""
        while True:
            try:
                return step()
            except DBAPIError as error:
                if not self.backend.is_contended(error) or time.monotonic() >= deadline:
                    raise
            time.sleep(CONTENTION_PAUSE_SECONDS * self._random.uniform(0.5, 1.5))

    def _abandon(self, connection: Connection, *, keep: bool) -> None:
        """End what is open on the connection; one that cannot say so is thrown away."""
        try:
            if keep and not connection.invalidated:
                self.backend.rollback(connection)
            else:
                connection.invalidate()
        except (SQLAlchemyError, TxnStoreError):
            connection.invalidate()


def note_change(connection: Connection, *, partition_ids: Iterable[int] = (), group_ids: Iterable[str] = ()) -> None:
    """Note what this database transaction changes, for those who wait for it; nothing at all: nobody waits for it."""
    noted: Subjects = connection.info.get(_CHANGES, NOTHING)
    connection.info[_CHANGES] = Subjects(noted.partition_ids.union(partition_ids), noted.group_ids.union(group_ids))


def take_changes(connection: Connection) -> Subjects:
    """Return what was noted, and forget it; everything if `note_change` was not called."""
    changes: Subjects = connection.info.pop(_CHANGES, EVERYTHING)
    return changes


def make_durable(connection: Connection) -> None:
    """Let this database transaction's commit wait for the disk though the store's need not (`Durability.DATABASE`).

    For what another database goes by: of a decision that is lost it would keep its share.
    """
    # SQLite's wait whatever is set, and so do all of a store that was told to, from their beginning.
    if connection.dialect.name != "sqlite" and not getattr(connection.dialect, "waits_for_disk", False):
        connection.exec_driver_sql(_MAKE_DURABLE)


def _doubting(store: Store) -> Callable[..., None]:
    known = weakref.ref(store)

    def doubt(_: object, record: Any) -> None:
        if (found := known()) is not None:
            found.is_original, found.running = False, None
            record.info[CONNECTION_CHECK] = found.check_new_connection

    return doubt


# --- statements ------------------------------------------------------------------------------------------------------


class server_now_ms(FunctionElement[int]):  # noqa: N801 - reads as the SQL function it stands for
    """Milliseconds since 1970 at the moment the statement runs.

    The database server's clock, so that all clients of a store agree; a store that was opened with a `Clock` uses
    that one.
    """

    type = BigInteger()
    inherit_cache = True
    name = "server_now_ms"


@compiles(server_now_ms)
def _compile_server_now_ms(element: server_now_ms, compiler: SQLCompiler, **keywords: Any) -> str:
    """Render the clock of the store that runs the statement; it hangs on the store's own dialect object."""
    clock = getattr(compiler.dialect, "clock", None)
    if clock is None:
        return "CAST(extract(epoch from pg_catalog.clock_timestamp()) * 1000 AS BIGINT)"
    value: Any = bindparam("server_now_ms", callable_=clock.now_ms, type_=BigInteger(), unique=True)
    return str(compiler.process(value, **keywords))


def clock_of(connection: Connection) -> Clock | None:
    """Return the clock that `server_now_ms` asks; None: it is the server's, and only a statement can ask it."""
    clock: Clock | None = getattr(connection.dialect, "clock", None)
    return clock


class RowsMissedError(AssertionError):
    """A row that was read under its lock was not there to be written: a defect, and nothing was committed."""


def must_hit(connection: Connection, statement: Update | Delete | HotStatement, parameters: Mapping[str, Any]) -> None:
    """Run a statement that hits exactly one row.

    Raises:
        RowsMissedError: it did not; the database transaction is to be rolled back.
    """
    if isinstance(statement, HotStatement):
        _check_count(statement.statement, statement.run(connection, parameters), 1)
    else:
        _check_count(statement, connection.execute(statement, parameters).rowcount, 1)


def must_hit_each(
    connection: Connection,
    statement: Update | Delete | HotStatement,
    parameters: Sequence[Mapping[str, Any]],
    count: int = -1,
) -> None:
    """Run a statement once for each of the parameters, at least one: it hits a row for each, or `count` in all.

    Raises:
        RowsMissedError: it did not; the database transaction is to be rolled back.
    """
    # Both drivers count over all of the parameters: `supports_sane_multi_rowcount` of their dialects.
    wanted = len(parameters) if count < 0 else count
    if isinstance(statement, HotStatement):
        _check_count(statement.statement, statement.run_each(connection, parameters), wanted)
    else:
        _check_count(statement, connection.execute(statement, parameters).rowcount, wanted)


def _check_count(statement: Update | Delete, hit: int, wanted: int) -> None:
    if hit != wanted:
        name = getattr(statement.table, "name", statement.table)
        raise RowsMissedError(
            f"{type(statement).__name__} of {name} hit {hit} rows where {wanted} were to be hit; nothing is committed"
        )


def pause_after_portion(held_seconds: float) -> None:
    """Let others go first, after a portion that has held its locks for so long.

    Those waiting for the write lock of SQLite ask for it again and again, so it is left free between two portions.
    """
    time.sleep(min(max(held_seconds, _PAUSE_MIN_SECONDS), _PAUSE_MAX_SECONDS))


def chunks(items: Sequence[Item], size: int = LISTED_MAX) -> Iterator[Sequence[Item]]:
    """Cut a list that grows with the data into parts that one statement takes."""
    return (items[start : start + size] for start in range(0, len(items), size))


def pages(
    read: Callable[[Callable[[Connection], Sequence[Row[Any]]]], Sequence[Row[Any]]],
    statement: Select[Any],
    after: Mapping[str, Any],
    rows_max: int,
) -> Iterator[Sequence[Row[Any]]]:
    """Yield what a statement finds, in pages of `rows_max` rows, each of them behind the last row of the one before.

    `after` are the parameters of the first page: one named `after_x` is about the column x, others stay as they are.
    `read` is a store's, so that a reader that takes long holds no snapshot, or keeps to one connection.
    """
    while True:
        found = read(lambda connection, of=after: connection.execute(statement, of).all())  # type: ignore[misc]
        yield found
        if len(found) < rows_max:
            return
        last = {name: getattr(found[-1], name.removeprefix("after_")) for name in after if name.startswith("after_")}
        after = {**after, **last}


def _after_fork_in_child() -> None:
    for store in list(_opened):
        store.forget_connections_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

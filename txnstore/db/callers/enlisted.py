"""The enlisted connection: a database transaction that its caller has begun and that txnstore commits.

    taken = EnlistedConnection(store, callers, refuse)
    taken.take()
    ...                                        # the caller writes rows
    ended = taken.commit(lambda connection: end(connection, ...))

What `commit` is given are the last statements before the COMMIT: either all of it stands, or nothing.  Until then
guards keep the caller from ending the database transaction: commit() and rollback() are refused, on whichever of its
objects they are called.  What a guard cannot reach, SQL's own COMMIT for example, shows when txnstore looks at the
database transaction again.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

import psycopg
from sqlalchemy import Connection, TwoPhaseTransaction, column, event, false, text, update
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from txnstore.db.backend import Durability, Stage, WholeTransaction
from txnstore.db.callers.connections import CallersConnection
from txnstore.db.callers.on_caller_connection import check_files, commit_whole_within, joined_connection
from txnstore.db.callers.sessions import check_sessions, prepare_session
from txnstore.db.schema import stores
from txnstore.db.statements import HotStatement, run_on_driver
from txnstore.db.store import CONTENTION_PAUSE_SECONDS, Store
from txnstore.deadline import to_its_end
from txnstore.errors import (
    InvalidProducerIdMapping,
    InvalidRequest,
    StoreBusy,
    TransactionAbortable,
    TransactionPoisoned,
    TxnStoreError,
    UnknownTopicOrPartition,
)

Result = TypeVar("Result")
Refuse = Callable[[str], BaseException]
CommitWhole = Callable[[WholeTransaction], "list[int] | None"]

#: What would end the database transaction, by the names of the methods.
ENDINGS: Final = ("commit", "rollback")
#: The method of a psycopg connection that sends what its blocks and its own two-phase calls end with.
_SENDER: Final = "_exec_command"
_ENDING_COMMANDS: Final = (b"COMMIT", b"PREPARE TRANSACTION")
_OF_A_BLOCK: Final = (
    "the end of a transaction() block, which belongs around the producer's block or is begun after enlist(), and"
    " tpc_prepare"
)

# The number is given out now, if the caller has written nothing yet: it tells later whether this is still the same
# database transaction.
_NAME_OF_TRANSACTION: Final = HotStatement(
    text(
        "SELECT CAST(pg_catalog.pg_current_xact_id() AS pg_catalog.text),"
        " pg_catalog.current_setting('transaction_isolation'), pg_catalog.current_setting('transaction_read_only')"
    ).columns(column("name"), column("isolation"), column("read_only"))
)
#: Those by which every statement sees the database as the first one of its database transaction did.
_SNAPSHOTS: Final = ("repeatable read", "serializable")
#: What is not there: on such a connection perhaps only because it came later.
_NOT_THERE: Final = (UnknownTopicOrPartition, InvalidProducerIdMapping)
# In the same message: nobody waits for a lock for ever, unless the caller has set a bound; and the commit, which is
# the producer's, is as lasting as its other ones.
_SAME_TRANSACTION: Final = HotStatement(
    text(
        "SELECT CAST(pg_catalog.pg_current_xact_id_if_assigned() AS pg_catalog.text),"
        " CASE WHEN pg_catalog.current_setting('lock_timeout') = '0'"
        " THEN pg_catalog.set_config('lock_timeout', :lock_timeout_ms, true) END,"
        " CASE WHEN :is_lasting AND pg_catalog.current_setting('synchronous_commit') = 'off'"
        " THEN pg_catalog.set_config('synchronous_commit', 'on', true) END"
    ).columns(column("name"), column("lock_timeout"), column("synchronous_commit"))
)
#: https://www.sqlite.org/pragma.html#pragma_synchronous
_SYNCHRONOUS_FULL: Final = 2
_SYNCHRONOUS_EXTRA: Final = 3
#: A constraint refuses a row; nothing is committed.
_CONSTRAINTS: Final = (psycopg.IntegrityError, sqlite3.IntegrityError)
# Changes nothing and takes SQLite's write lock.
_TAKE_WRITE_LOCK: Final = HotStatement(update(stores).values(singleton=1).where(false()))

#: By the id of the driver's connection, which they hold: the guards that are on it, of all producers of this process.
_guards_on: Final[weakref.WeakValueDictionary[int, CallerGuards]] = weakref.WeakValueDictionary()
#: Held to look there; reentrant: the collector of garbage may close another producer in the middle of anything.
_guards_lock: Final = threading.RLock()
if hasattr(os, "register_at_fork"):
    # Or a child might inherit it taken.
    os.register_at_fork(
        before=_guards_lock.acquire, after_in_parent=_guards_lock.release, after_in_child=_guards_lock.release
    )


class CallerGuards:
    """The guards of one connection."""

    def __init__(self, callers: CallersConnection, refuse: Refuse, holder: object) -> None:
        """Guard `callers` for as long as there is `holder`; `refuse` makes the error of an ending, given its name."""
        self._callers = callers
        self._refuse = refuse
        self._holder = weakref.ref(holder)
        self._driver: Any = None
        self._guarded: list[tuple[Any, str]] = []
        self.at_commit: Callable[[], None] | None = None
        """What to do right before SQLAlchemy commits, instead of refusing."""

        self.was_rolled_back = False
        """Whether SQLAlchemy has rolled back, as it does when the connection or session is closed."""

    @property
    def is_lost(self) -> bool:
        """Whether its owner has closed or rolled it back, so that the driver's connection may be somebody else's."""
        return self.was_rolled_back or self._callers.is_given_up

    @property
    def are_needed(self) -> bool:
        """Whether there still is somebody who would end what is open on the connection."""
        return self._holder() is not None and not self.is_lost

    @property
    def will_be_prepared(self) -> bool:
        """Whether the connection's database transaction is prepared before it is committed."""
        return not isinstance(self._holder(), EnlistedConnection)

    def claim(self) -> None:
        """Take the connection: two producers would both commit it, and the first to do so would hear of a refusal.

        Raises:
            InvalidRequest: another producer has it, or a coordinator of SQLAlchemy's; or see `check_sessions`, and
                `_check_blocks`.
        """
        check_not_two_phase(self._callers)
        check_sessions(self._callers)
        driver = getattr(self._callers.driver, "driver_connection", self._callers.driver)
        _check_blocks(driver)
        with _guards_lock:
            others = _guards_on.get(id(driver))
            if others is not None and others is not self:
                if others.are_needed:
                    raise InvalidRequest(
                        "this connection is enlisted in another producer's transaction: end that one first, by its"
                        " commit_transaction() or abort_transaction(), or hand over another connection"
                    )
                # Of a producer that nobody holds any more, or from before the owner closed it.
                others.remove()
            self._driver = driver
            _guards_on[id(driver)] = self

    def set(self) -> None:
        """Refuse from now on."""
        callers = self._callers
        for holder in (callers.session, callers.owner, callers.driver if callers.owner is None else None):
            for ending in ENDINGS if holder is not None else ():
                # SQLite's own type takes no attributes, nor do SQLAlchemy's asynchronous ones.
                with contextlib.suppress(AttributeError):
                    # Noted first, and struck off last below: an interrupt in between leaves nothing behind.
                    self._guarded.append((holder, ending))
                    setattr(holder, ending, self._refusing(ending))
        if (send := getattr(self._driver, _SENDER, None)) is not None:
            # A rollback is let through: it is seen later, and must not hide the error that it is for.
            self._guarded.append((self._driver, _SENDER))
            setattr(self._driver, _SENDER, partial(self._send_or_refuse, send))
        if callers.owner is not None:
            # Whichever of SQLAlchemy's objects was asked, it comes by here.
            event.listen(callers.owner, "commit", self._on_commit)
            event.listen(callers.owner, "rollback", self._on_rollback)

    def open_methods(self) -> None:
        """Let the methods work again; SQLAlchemy's events are still guarded."""
        while self._guarded:
            holder, ending = self._guarded[-1]
            with contextlib.suppress(AttributeError):
                delattr(holder, ending)
            self._guarded.pop()

    def remove(self) -> None:
        """Refuse nothing any more; a second call does nothing."""
        self.open_methods()
        owner = self._callers.owner
        if owner is not None:
            for name, listener in (("commit", self._on_commit), ("rollback", self._on_rollback)):
                if event.contains(owner, name, listener):
                    event.remove(owner, name, listener)
        with _guards_lock:
            if _guards_on.get(id(self._driver)) is self:
                del _guards_on[id(self._driver)]

    def _refusing(self, ending: str) -> Callable[..., NoReturn]:
        def refuse(*_: object, **__: object) -> NoReturn:
            raise self._refuse(ending)

        return refuse

    def _send_or_refuse(self, send: Callable[..., Any], command: Any, *arguments: Any, **options: Any) -> Any:
        text_of = getattr(command, "as_bytes", None)
        sent = command if text_of is None else text_of(self._driver)
        # Its owner may have given it back to a pool meanwhile: what others commit there is their own.
        if isinstance(sent, bytes) and sent.startswith(_ENDING_COMMANDS) and self.are_needed:
            raise self._refuse(_OF_A_BLOCK)
        return send(command, *arguments, **options)

    def _on_commit(self, _: Connection) -> None:
        if self.at_commit is None:
            raise self._refuse("commit")
        self.at_commit()

    def _on_rollback(self, _: Connection) -> None:
        self.was_rolled_back = True


def will_be_prepared(callers: CallersConnection) -> bool:
    """Return whether the connection's database votes for a producer's transaction, keeping its locks until the end."""
    driver = getattr(callers.driver, "driver_connection", callers.driver)
    with _guards_lock:
        guards = _guards_on.get(id(driver))
        return guards is not None and guards.are_needed and guards.will_be_prepared


class EnlistedConnection:
    """One connection of the caller's, from `take` until it is committed, rolled back or let go; for one thread."""

    def __init__(self, store: Store, callers: CallersConnection, refuse: Refuse) -> None:
        """Commit on `callers`, which is on the database of `store`; `refuse` makes the error when it is ended."""
        self.callers = callers
        self.is_committed = False
        self.outcome_unknown = False
        """Whether the COMMIT was sent and nothing is known of it."""

        self.result: Any = None
        """What the last statements returned, once it is committed."""

        self._store = store
        self._is_lasting = store.limits.durability is Durability.FULL
        self._guards = CallerGuards(callers, refuse, self)
        self._name = self._isolation = ""
        # The thread that lets go may be another than the one that commits.
        self._lock = threading.Lock()
        self._is_committing = self._is_let_go = self._is_dropped = False

    def take(self) -> None:
        """Begin the database transaction if it is not open yet, remember it, and refuse the caller's endings.

        Raises:
            InvalidRequest: the connection cannot be used, or its database transaction cannot be committed by others, or
                another producer is to commit it.
            StoreBusy: SQLite: another connection writes at the moment, or has since this one began to read.
            TxnStoreError: the database refuses.
        """
        self.callers.check_usable()
        self.callers.check_endable()
        self._guards.claim()
        with joined_connection(self._store, self.callers) as connection:
            if self.callers.backend_name == "postgresql":
                self._name, self._isolation, read_only = _NAME_OF_TRANSACTION.row(connection)
                if read_only == "on":
                    raise InvalidRequest(
                        "this connection is read-only, and the records are in the same database: nothing could be"
                        " committed on it; hand over one that may write, or roll back and let this one write"
                    )
            else:
                self._mark_sqlite(connection)
        self._guards.set()

    def check_thread(self) -> None:
        """Refuse a thread that may not use the connection; any may let go of one that its owner has closed.

        Raises:
            InvalidRequest: see `CallersConnection.check_thread`.
        """
        if not self._is_lost:
            self.callers.check_thread()

    def check(self) -> None:
        """Refuse to go on if the caller's database transaction is not the one that was taken; asks no server.

        Raises:
            InvalidRequest: it has ended, or the connection is closed or in the hands of another thread.
            TransactionPoisoned: a statement has failed, so that it can only be rolled back.
        """
        if self.callers.is_closed or self.callers.is_given_up:
            raise InvalidRequest("the enlisted connection was closed by its owner, which rolled it back")
        if self._guards.was_rolled_back or not self.callers.is_in_transaction:
            raise self._ended()
        self.callers.check_usable()

    def commit(
        self,
        last: Callable[[Connection], Result],
        *,
        timeout_seconds: float,
        at_once: Callable[[Connection, CommitWhole | None], Result | None] = lambda *_: None,
        is_there: Callable[[], bool] = lambda: True,
    ) -> Result:
        """Run `last` and commit; return what it returned.

        Whatever a session of the ORM has to write is written before.  Afterwards the connection is the caller's again.
        `at_once` is asked first to do the same: it does all of it, or returns None and has changed nothing.  It is
        given the function of the database that commits a whole transaction, where there is one.  `is_there` is asked
        where the connection's snapshot does not have what is written to: whether the database has it by then.

        Raises:
            InvalidRequest, TransactionPoisoned: see `check`.
            TransactionAbortable: the connection's snapshot is older than what it should write to.
            OutcomeUnknown: the connection broke during COMMIT.
            TxnStoreError: nothing is committed; roll back.
            psycopg.IntegrityError, sqlite3.IntegrityError: a constraint that was deferred to the COMMIT refuses it.
            SQLAlchemyError: what the session had to write was refused, or a hook of the caller's raised.
        """
        self.check()
        prepare_session(self.callers)

        def commit_now() -> None:
            self._commit_now(at_once, last, is_there, time.monotonic() + timeout_seconds)

        try:
            with self._lock:
                if self._is_let_go:
                    reason = "the producer has given the enlisted connection back to its owner: roll it back"
                    raise InvalidRequest(reason)
                self._is_committing = True
            self._guards.open_methods()
            self._guards.at_commit = commit_now
            if self.callers.session is not None:
                self.callers.session.commit()
            if not self.is_committed and self.callers.owner is not None:
                # A session that was given a connection with a transaction of its own leaves that to its owner.
                transaction = self.callers.owner.get_transaction()
                if transaction is None:
                    raise self._ended()
                transaction.commit()
            elif not self.is_committed:
                commit_now()
        finally:
            self._guards.at_commit = None
            with self._lock:
                self._is_committing = False
                is_given_back = self.is_committed or self._is_let_go
            if is_given_back:
                self._guards.remove()
        result: Result = self.result
        return result

    def roll_back(self) -> None:
        """Roll back and give the connection back; one that is broken or closed has been rolled back already.

        Raises:
            InvalidRequest: SQLite: this is another thread than the connection's; nothing has happened.
        """
        is_lost = self._is_lost
        self.check_thread()
        self._guards.remove()
        if is_lost:
            # What may be open on it now is not txnstore's business.
            return
        with contextlib.suppress(SQLAlchemyError, psycopg.Error, sqlite3.Error):
            self._roll_back()

    def abandon(self) -> None:
        """Give the connection back after its COMMIT has got lost: nothing on it counts any more.

        Once it has begun it comes to its end, whatever interrupts it; after that a second call does nothing, as what is
        open by then the owner has begun.
        """
        if not self._is_dropped:
            to_its_end(self._drop)

    def _drop(self) -> None:
        self._guards.remove()
        callers = self.callers
        with contextlib.suppress(SQLAlchemyError, psycopg.Error, sqlite3.Error):
            if callers.session is not None:
                callers.session.invalidate()
            elif callers.owner is not None:
                callers.owner.invalidate()
                if (transaction := callers.owner.get_transaction()) is not None:
                    transaction.rollback()
            else:
                callers.driver.close()
        # Not before: what failed is to be done again.
        self._is_dropped = True

    def let_go(self) -> None:
        """Give the connection back as it is: its owner ends what is open on it.

        From any thread; a commit that another one is in comes to its end first: the rows would be committed alone.
        """
        with self._lock:
            self._is_let_go = True
            if self._is_committing:
                return
        self._guards.remove()

    # --- inside -----------------------------------------------------------------------------------------------------

    @property
    def _is_lost(self) -> bool:
        return self._guards.is_lost or self.callers.is_closed

    def _mark_sqlite(self, connection: Connection) -> None:
        """Begin if need be, take the write lock, and leave a savepoint: with the transaction, it is gone."""
        check_files(connection)
        wanted = _missing_synchronous(connection) if self._is_lasting else None
        if wanted is not None:
            # Within a database transaction it cannot be changed any more, and without one it is not ours to change.
            raise InvalidRequest(
                f"this SQLite connection does not wait for the disk (PRAGMA synchronous is less than {wanted}), so a"
                f" commit on it may be lost with the power: set it to {wanted} before the database transaction begins,"
                " or set txnstore.durability=database to take the risk"
            )
        if not self.callers.is_in_transaction:
            run_on_driver(connection, "BEGIN IMMEDIATE")
        try:
            _TAKE_WRITE_LOCK.run(connection)
        except DBAPIError as error:
            busy = self._store.backend.translate(error, Stage.STATEMENT)
            if not isinstance(busy, StoreBusy):
                raise
            raise StoreBusy(
                "another connection has written to the SQLite file since this one began to read: roll back, begin with"
                " BEGIN IMMEDIATE (or enlist before the first SELECT), and start over; nothing was changed"
            ) from None
        self._name = f"txnstore_{uuid.uuid4().hex}"
        run_on_driver(connection, f"SAVEPOINT {self._name}")

    def _commit_now(
        self,
        at_once: Callable[[Connection, CommitWhole | None], object],
        last: Callable[[Connection], object],
        is_there: Callable[[], bool],
        deadline: float,
    ) -> None:
        stage, is_ours = Stage.STATEMENT, False
        try:
            with joined_connection(self._store, self.callers, lambda: stage) as connection:
                if self.callers.backend_name == "postgresql":
                    # The function looks itself whether the database transaction is still the same.
                    commit_whole = partial(commit_whole_within, self._store, self.callers, connection, self._name)
                    result = at_once(connection, commit_whole)
                    if result is None:
                        self._check_same(connection)
                else:
                    # One may have been attached meanwhile.
                    check_files(connection)
                    self._check_same(connection)
                    is_ours = True
                    result = at_once(connection, None)
                is_ours = True
                if result is None:
                    result = last(connection)
                stage = Stage.COMMIT
                self._send_commit(connection, deadline)
                self.is_committed, self.result = True, result
        except _CONSTRAINTS:
            self._undo()
            raise
        except TxnStoreError as error:
            self.outcome_unknown = error.outcome_unknown
            if is_ours and not self.outcome_unknown:
                self._undo()
            if isinstance(error, _NOT_THERE) and self._isolation in _SNAPSHOTS and _may_be_there(is_there):
                raise TransactionAbortable(
                    f"the enlisted connection is {self._isolation.upper()} and sees the database as it was at its first"
                    " statement, without newer topics and transactional ids: abort, and"
                    " begin again, on the connection too; create topics, and call init_transactions(), before its first"
                    f" statement and before enlist() ({error})"
                ) from None
            raise
        except BaseException as error:
            # Interrupted while the COMMIT was on its way.
            self.outcome_unknown = stage is Stage.COMMIT and not self.is_committed
            if is_ours and stage is Stage.STATEMENT and isinstance(error, Exception):
                self._undo()
            raise

    def _check_same(self, connection: Connection) -> None:
        if self.callers.backend_name == "postgresql":
            timeout_ms = str(self._store.limits.lock_timeout_ms)
            parameters = {"lock_timeout_ms": timeout_ms, "is_lasting": self._is_lasting}
            if _SAME_TRANSACTION.value(connection, parameters) != self._name:
                raise self._ended()
            return
        try:
            run_on_driver(connection, f"RELEASE {self._name}")
        except DBAPIError as error:
            if "no such savepoint" in str(error.orig):
                raise self._ended() from None
            raise

    def _send_commit(self, connection: Connection, deadline: float) -> None:
        # Of one that has failed PostgreSQL's answer tells.
        if not self.callers.is_in_transaction:
            raise TransactionPoisoned
        while True:
            try:
                run_on_driver(connection, "COMMIT")
            except DBAPIError as error:
                if isinstance(error.orig, _CONSTRAINTS):
                    # Deferred to the COMMIT: rows of the application's are at fault, not the store.
                    raise error.orig from None
                is_open = self.callers.is_in_transaction
                if not (self._store.backend.is_contended(error) and is_open) or time.monotonic() >= deadline:
                    raise
            else:
                return
            time.sleep(CONTENTION_PAUSE_SECONDS)

    def _undo(self) -> None:
        """Roll back at once: if the owner committed now, records would stand of which the coordinator does not know."""
        with contextlib.suppress(SQLAlchemyError, psycopg.Error, sqlite3.Error):
            if not self.callers.is_closed and self.callers.is_in_transaction:
                self.callers.cursor().execute("ROLLBACK")

    def _roll_back(self) -> None:
        callers = self.callers
        if callers.is_in_transaction:
            # Not by the driver's method, which psycopg refuses within a block of `transaction()`, nor by SQLAlchemy's,
            # which sends nothing after a commit that was refused.
            callers.cursor().execute("ROLLBACK")
        if callers.session is not None:
            callers.session.rollback()
        if callers.owner is not None and (transaction := callers.owner.get_transaction()) is not None:
            transaction.rollback()

    def _ended(self) -> InvalidRequest:
        return InvalidRequest(
            "the database transaction of the enlisted connection was committed or rolled back by its owner, or a"
            " savepoint that was set before enlist() has ended: what it held is not part of this commit; abort the"
            " transaction and leave commit and rollback to the producer"
        )


def _may_be_there(is_there: Callable[[], bool]) -> bool:
    try:
        return is_there()
    except TxnStoreError:
        # To begin again tells.
        return True


def check_not_two_phase(callers: CallersConnection) -> None:
    """Refuse what has a coordinator already.

    Raises:
        InvalidRequest: the connection is in a two-phase transaction of SQLAlchemy's.
    """
    if callers.owner is not None and isinstance(callers.owner.get_transaction(), TwoPhaseTransaction):
        raise InvalidRequest("a two-phase transaction of SQLAlchemy's is committed by its own coordinator")


def _check_blocks(driver: Any) -> None:
    """Refuse a connection of psycopg's own two-phase calls, or in a block whose end would fail after the commit."""
    if getattr(driver, "_tpc", None) is not None:
        raise InvalidRequest("a two-phase transaction (tpc_begin) is committed by its own coordinator")
    if getattr(driver, "_num_transactions", 0) > 1:
        raise InvalidRequest(
            "this connection is in a transaction() block within another one, which is a savepoint and would fail at its"
            " end, after the producer's commit: enlist it in the outer block, or leave the inner one first"
        )


def _missing_synchronous(connection: Connection) -> str | None:
    """Return the level of `PRAGMA synchronous` that lasting commits need; None if the connection has it."""
    ((level,),) = run_on_driver(connection, "PRAGMA main.synchronous").rows
    if int(level) >= _SYNCHRONOUS_EXTRA:
        return None
    # FULL does not wait until the journal is lastingly gone: come back, it would undo the commit.
    ((mode,),) = run_on_driver(connection, "PRAGMA main.journal_mode").rows
    if mode == "delete":
        return "EXTRA"
    return "FULL" if int(level) < _SYNCHRONOUS_FULL else None

"""This file is transactions of a producer that end in a database transaction of the application's.

Once a connection to the same database is enlisted, records and offsets wait for its commit, which the producer makes:
it runs on the caller's thread, for the connection is his.  If its answer is lost it cannot be repeated, for the other
rows in it are not ours; so it is asked what became of it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NoReturn

from sqlalchemy import Connection

from txnstore.clients.model.errors import KafkaError, KafkaException, joined_error_of
from txnstore.clients.producer.requests import TRY_TIMEOUT_MS, ProduceRequest
from txnstore.clients.producer.sender import REQUEST_BYTES_MAX
from txnstore.clients.producer.thread import SenderStopped
from txnstore.clients.producer.transaction_errors import transaction_error_of
from txnstore.clients.producer.transaction_states import ProducerState, TransactionCall
from txnstore.clients.producer.transactions import ProducerTransactions
from txnstore.db.callers.connections import CallersConnection, callers_connection
from txnstore.db.callers.enlisted import EnlistedConnection
from txnstore.db.callers.on_caller_connection import is_same_store, joined_connection
from txnstore.db.store import Store
from txnstore.errors import InvalidRequest, TxnStoreError
from txnstore.transactions.outcome import Ended, EndRequest, ResolvedEnd, end_within, resolve_end
from txnstore.transactions.tokens import PreparedTxnState

_S = ProducerState
_C = TransactionCall

#: How long the COMMIT itself is repeated while SQLite is busy, whatever the timeout of the call.
COMMIT_SECONDS_MIN: Final = 1.0


@dataclass(slots=True)
class _Ending:
    """How far a commit with an enlisted connection has come."""

    writers: Collection[int] | None
    requests: list[ProduceRequest] | None = None
    """The records that go with it, once they are gathered."""

    request: EndRequest | None = None
    """What is asked of the coordinator; set before it is."""

    ended: Ended | None = None
    """The answer; None while it is not known."""

    was_asked: bool = False
    """Whether the COMMIT may have been made."""

    hook_error: Exception | None = None
    """What a hook of the application's raised after the COMMIT."""


@dataclass(slots=True)
class _Enlisted:
    """The connection to the same database."""

    taken: EnlistedConnection
    store: Store
    created_topics: list[str] = field(default_factory=list)
    """What stands only once it is committed."""


class EnlistedTransactions(ProducerTransactions):
    """The transactional side of a producer to which an application's connection may be enlisted."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """As `ProducerTransactions`."""
        super().__init__(*arguments, **keywords)
        self._enlisted: _Enlisted | None = None
        self._ending: _Ending | None = None

    # --- the calls --------------------------------------------------------------------------------------------------

    def enlist(self, given: object, timeout_seconds: float) -> None:
        """Let the transaction end together with the database transaction on a connection of the caller's.

        Raises:
            TypeError: it is no connection.
            KafkaException: the state does not allow it, or the connection cannot be used; nothing has changed.
        """
        with self._in_call(_C.ENLIST):
            try:
                callers = callers_connection(given)
                callers.check_usable()
                store = self._sender.session.connection.store()
                if self._can_hold_everything(store, callers):
                    self._take(store, callers, timeout_seconds)
                else:
                    self._enlist_elsewhere(callers)
            except TxnStoreError as error:
                raise KafkaException(joined_error_of(error)) from error

    def token(self, timeout_seconds: float) -> bytes:
        """See `ProducerTransactions`; writers join before a connection is enlisted, which may keep them from writing.

        Raises:
            KafkaException: also `_STATE`: a connection is enlisted.
        """
        self._refuse_if_enlisted("transaction_token() comes before enlist()")
        return super().token(timeout_seconds)

    def prepare(self, timeout_seconds: float) -> PreparedTxnState:
        """See `ProducerTransactions`.

        Raises:
            KafkaException: also `_STATE`: a connection is enlisted, whose database transaction outlives no process.
        """
        self._refuse_if_enlisted("a transaction with an enlisted connection cannot be prepared: commit it")
        return super().prepare(timeout_seconds)

    def commit(self, timeout_seconds: float, writers: Collection[int] | None = None) -> None:
        """See `ProducerTransactions`; an enlisted connection is committed with it, on this thread.

        Raises:
            KafkaException: also `_STATE`: this is not the thread of an enlisted SQLite connection.
        """
        if self._enlisted is None and self._ending is None:
            super().commit(timeout_seconds, writers)
            return
        self._check_writers(writers)
        longest_seconds = self._timeout_ms / 1000
        bounded = timeout_seconds if 0 <= timeout_seconds <= longest_seconds else longest_seconds
        hook_error: Exception | None = None
        with self._in_call(_C.COMMIT):
            is_done = False
            try:
                hook_error = self._commit_enlisted(time.monotonic() + bounded, writers)
                is_done = True
            except BaseException as error:
                if not isinstance(error, Exception):
                    self._interrupted()
                raise
            finally:
                try:
                    self._serve_reports()
                finally:
                    if is_done:
                        with self._changed:
                            self._enter(_S.READY)
        if hook_error is not None:
            raise hook_error

    def abort(self, timeout_seconds: float) -> None:
        """See `ProducerTransactions`; an enlisted connection is rolled back first, on this thread.

        Raises:
            KafkaException: also `_STATE`: this is not the thread of an enlisted SQLite connection.
        """
        enlisted = self._enlisted
        if enlisted is not None and self._current is None:
            with self._changed:
                self._check_call(_C.ABORT)
            try:
                enlisted.taken.roll_back()
            except TxnStoreError as error:
                raise KafkaException(KafkaError(KafkaError._STATE, str(error))) from error
            self._forget_enlisted()
        super().abort(timeout_seconds)

    def finish(self, timeout_seconds: float) -> None:
        """See `ProducerTransactions`; whatever becomes of it, a connection is its owner's again."""
        try:
            super().finish(timeout_seconds)
        finally:
            if self._enlisted is not None:
                self._enlisted.taken.let_go()

    # --- other databases --------------------------------------------------------------------------------------------

    def _enlist_elsewhere(self, callers: CallersConnection) -> NoReturn:
        where = "another SQLite file" if callers.backend_name == "sqlite" else "another PostgreSQL database"
        raise InvalidRequest(
            f"this connection is on {where} than the producer's; only one to the same database can be enlisted:"
            " for others, write to an outbox there"
        )

    # --- enlisting --------------------------------------------------------------------------------------------------

    def _can_hold_everything(self, store: Store, callers: CallersConnection) -> bool:
        """Return whether the connection leads to the one database that holds the log; one of several only votes."""
        if not is_same_store(store, callers):
            return False
        if self._sender.session.connection.is_alone:
            return True
        if callers.backend_name == "sqlite":
            raise InvalidRequest(
                "the store is spread over several SQLite files: no database transaction of one of them can hold the"
                " records of all, and none can vote; write to the outbox in one of them instead"
            )
        return False

    def _take(self, store: Store, callers: CallersConnection, timeout_seconds: float) -> None:
        if self._enlisted is not None:
            if self._enlisted.taken.callers.driver is callers.driver:
                return
            raise InvalidRequest(
                "another connection to the same database is enlisted already: one of them has to do all the writing"
            )
        kept_bytes = math.inf if store.backend.name == "sqlite" else REQUEST_BYTES_MAX
        hold = self._submit(partial(self._keep_work, kept_bytes))
        taken = EnlistedConnection(store, callers, _refused_ending)
        try:
            self._wait(hold, timeout_seconds, self._timeout_ms / 1000, resumable=False)
            taken.take()
            self._enlisted = _Enlisted(taken, store)
        except BaseException:
            hold.cancel()
            taken.let_go()
            self._let_send()
            raise

    def _keep_work(self, kept_bytes: float) -> None:
        self._delayed.forget()
        self._holds_offsets = True
        self._directory.may_write = kept_bytes < math.inf
        self._sender.keep(kept_bytes)

    def _let_send(self) -> None:
        self._holds_offsets = False
        self._directory.may_write = True
        self._sender.keep_no_more()
        if self._offsets and self.state is _S.IN_TRANSACTION:
            self._delayed.set(self._write_kept_offsets)

    def _refuse_if_enlisted(self, reason: str) -> None:
        if self._enlisted is not None:
            raise KafkaException(KafkaError(KafkaError._STATE, reason))

    # --- committing; on the caller's thread ---------------------------------------------------------------------------

    def _commit_enlisted(self, deadline: float, writers: Collection[int] | None) -> Exception | None:
        """Take the commit as far as it goes until the deadline; return what a hook of the application's raised."""
        enlisted = self._enlisted
        ending = self._ending
        if ending is None:
            assert enlisted is not None
            ending = self._begin_ending(enlisted, writers)
        if ending.requests is None:
            self._gather(ending, deadline)
        if not ending.was_asked:
            self._ask(ending, deadline)
        if self._work is None:
            self._work = self._submit(partial(self._settle_work, ending))
        self._wait_until(self._work, deadline)
        return ending.hook_error

    def _wait_until(self, work: Any, deadline: float) -> Any:
        return self._wait(work, max(0.0, deadline - time.monotonic()), self._timeout_ms / 1000, resumable=True)

    def _begin_ending(self, enlisted: _Enlisted, writers: Collection[int] | None) -> _Ending:
        try:
            enlisted.taken.callers.check_thread()
        except TxnStoreError as error:
            raise KafkaException(KafkaError(KafkaError._STATE, str(error))) from error
        try:
            enlisted.taken.check()
            self._create_topics(enlisted)
        except TxnStoreError as error:
            # Nothing is decided yet.
            self._fail_and_raise(_abortable(error))
        self._ending = ending = _Ending(writers)
        with self._changed:
            self._enter(_S.BEGIN_COMMIT)
        return ending

    def _gather(self, ending: _Ending, deadline: float) -> None:
        if self._work is None:
            self._work = self._submit(partial(self._gather_work, ending))
        gathering = self._work
        try:
            self._wait_until(gathering, deadline)
        except KafkaException:
            if gathering.done():
                self._ending = None
                self._roll_back_if_fatal()
            raise
        self._work = None

    def _interrupted(self) -> None:
        """Let what was interrupted be something that the next call can end: an abort, or the commit again.

        Before the COMMIT nothing is decided, and it is given up.  From then on the commit is asked for again.
        """
        ending, enlisted = self._ending, self._enlisted
        if ending is None or enlisted is None:
            return
        taken = enlisted.taken
        if ending.was_asked or taken.is_committed or taken.outcome_unknown:
            ending.was_asked = True
            ending.ended = ending.ended or taken.result
            taken.let_go()
            if self._work is None and self.state is _S.COMMITTING:
                self._work = self._submit(partial(self._settle_work, ending))
            return
        self._ending = self._work = None
        with contextlib.suppress(RuntimeError):
            self._submit(partial(self._give_up_work, ending))
        reason = "the commit was interrupted before the enlisted connection was committed; nothing was committed"
        self._fail(KafkaError(KafkaError._FAIL, reason, txn_requires_abort=True))

    def _create_topics(self, enlisted: _Enlisted) -> None:
        """Create topics that are used for the first time: no other connection could while SQLite's lock is held."""
        if self._directory.may_write:
            return
        names = self._sender.unknown_topics
        if names:

            def create(connection: Connection) -> None:
                enlisted.created_topics += self._directory.create_within(connection, names)

            with joined_connection(enlisted.store, enlisted.taken.callers) as connection:
                create(connection)

    def _ask(self, ending: _Ending, deadline: float) -> None:
        """Commit; return once it was asked for, whether or not the answer is known.

        Raises:
            KafkaException: nothing was committed.
        """
        enlisted = self._enlisted
        assert enlisted is not None
        assert ending.requests is not None
        ending.request = EndRequest(
            self.transactional_id,
            self._sender.session.identity,
            [item for request in ending.requests for item in request.appends],
            list(self._offsets.values()),
            ending.writers,
        )
        with self._changed:
            self._is_written = True
            self._enter(_S.COMMITTING)
        taken = enlisted.taken
        seconds = max(COMMIT_SECONDS_MIN, deadline - time.monotonic())
        try:
            taken.commit(partial(end_within, request=ending.request), timeout_seconds=seconds)
        except BaseException as error:  # noqa: BLE001 - whatever it is, what it means is decided there
            self._asked_in_vain(enlisted, ending, error)
        ending.ended = taken.result
        ending.was_asked = True
        if taken.is_committed:
            enlisted.store.backend.after_commit(enlisted.store.engine)
            enlisted.store.announce()

    def _asked_in_vain(self, enlisted: _Enlisted, ending: _Ending, error: BaseException) -> None:
        """Decide what an error of the commit means; return if the COMMIT may have been made."""
        taken = enlisted.taken
        is_interrupt = not isinstance(error, Exception)
        if taken.is_committed or taken.outcome_unknown:
            ending.was_asked = True
            ending.ended = taken.result
            if not taken.is_committed:
                # Broken, or in the middle of its conversation: what it says of itself counts no more.
                taken.abandon()
            elif isinstance(error, Exception):
                ending.hook_error = error
            if is_interrupt:
                raise error
            return
        self._give_up(ending, KafkaError(KafkaError._PURGE_QUEUE))
        self._ending = None
        if isinstance(error, TxnStoreError):
            kafka_error = _abortable(error)
        else:
            reason = f"the enlisted connection could not be committed ({type(error).__name__}); nothing was committed"
            kafka_error = KafkaError(KafkaError._FAIL, reason, txn_requires_abort=True)
        self._fail(kafka_error)
        self._roll_back_if_fatal()
        if is_interrupt:
            raise error
        raise KafkaException(kafka_error) from error

    def _roll_back_if_fatal(self) -> None:
        """Roll the connection back if the producer is finished: there is no abort after that."""
        if self.state is _S.FATAL_ERROR and self._enlisted is not None:
            self._enlisted.taken.roll_back()
            self._forget_enlisted()

    def _give_up(self, ending: _Ending, error: KafkaError) -> None:
        for request in ending.requests or ():
            self._sender.fail_request(request, error)

    # --- on the sender's thread ---------------------------------------------------------------------------------------

    def _gather_work(self, ending: _Ending) -> None:
        self._delayed.forget()
        requests = self._sender.take_everything()
        if requests:
            # Their sequence numbers are used up: an abort has to bring a new epoch.
            self._is_written = True
        try:
            self._check_delivered(None)
        except KafkaException:
            # Also what an interrupt has failed just now: it knows of no requests yet.
            for request in requests:
                self._sender.fail_request(request, KafkaError(KafkaError._PURGE_QUEUE))
            raise
        ending.requests = requests

    def _give_up_work(self, ending: _Ending) -> None:
        """Report what was gathered for a commit that was interrupted; it comes behind the gathering."""
        self._give_up(ending, KafkaError(KafkaError._PURGE_QUEUE))

    def _settle_work(self, ending: _Ending) -> None:
        """Find out what became of the commit if that is not known, and go on from it."""
        if self.state is not _S.COMMITTING:
            # An interrupted call had queued it before.
            if self._error is not None:
                raise KafkaException(self._error)
            return
        if ending.ended is None:
            ending.ended = self._resolve(ending)
        self._sender.session.become(ending.ended.identity)
        appended = list(ending.ended.appended)
        is_complete = len(appended) == sum(len(request.appends) for request in ending.requests or ())
        for request in ending.requests or ():
            count = len(request.appends) if is_complete else 0
            self._sender.report(request, appended[:count])
            appended = appended[count:]
        self._reset()
        with self._changed:
            self._enter(_S.COMMIT_NOT_ACKED)

    def _resolve(self, ending: _Ending) -> Ended:
        request = ending.request
        assert request is not None

        def ask() -> ResolvedEnd:
            store = self._sender.session.connection.store()
            return resolve_end(store, request, retry_timeout_ms=TRY_TIMEOUT_MS)

        try:
            resolved = self._sender.thread.until_answered(ask)
        except SenderStopped:
            self._give_up(ending, KafkaError(KafkaError._PURGE_INFLIGHT))
            raise
        except TxnStoreError as error:
            self._forget_enlisted()
            self._give_up(ending, KafkaError(KafkaError._PURGE_INFLIGHT))
            self._fail_and_raise(transaction_error_of(error, _C.COMMIT))
        if not resolved.is_committed:
            self._sender.session.become(resolved.ended.identity)
            self._is_written = False
            self._forget_enlisted()
            self._give_up(ending, KafkaError(KafkaError._PURGE_INFLIGHT))
            reason = "the enlisted connection broke during its COMMIT and nothing was committed: abort, then start over"
            self._fail_and_raise(KafkaError(KafkaError._TRANSPORT, reason, txn_requires_abort=True))
        return resolved.ended

    # --- inside -----------------------------------------------------------------------------------------------------

    def _fail(self, error: KafkaError) -> None:
        super()._fail(error)
        if error.fatal() and self._enlisted is not None:
            # The producer is finished; the connection is not, and its owner has to roll it back.
            self._enlisted.taken.let_go()

    def _forget_enlisted(self) -> None:
        """Forget the connection, which was not committed."""
        enlisted, self._enlisted, self._ending = self._enlisted, None, None
        for name in enlisted.created_topics if enlisted is not None else ():
            self._directory.forget(name)

    def _reset(self) -> None:
        super()._reset()
        self._enlisted = self._ending = None
        if self._holds_offsets:
            self._let_send()


def _abortable(error: TxnStoreError) -> KafkaError:
    # None: what is refused is about the caller's connection; only being fenced ends the producer.
    return transaction_error_of(error, None)


def _refused_ending(ending: str) -> KafkaException:
    verb, call = ("commits", "commit_transaction()") if ending == "commit" else ("rolls back", "abort_transaction()")
    reason = (
        f"{ending}() of a connection that is enlisted in a producer's transaction is refused: the producer {verb} it"
        f" with its own, by {call}"
    )
    return KafkaException(KafkaError(KafkaError._STATE, reason))

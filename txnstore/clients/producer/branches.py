"""This file is transactions of a producer that other PostgreSQL databases take part in: they vote before it commits.

Everything that concerns an application's connection happens while it waits in `commit_transaction()` or
`abort_transaction()`; when these return the connection is its own again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy.exc import SQLAlchemyError

from txnstore.clients.model.errors import KafkaError, KafkaException, kafka_exception_of
from txnstore.clients.producer.enlistment import EnlistedTransactions, _Ending, _refused_ending
from txnstore.clients.producer.requests import TRY_TIMEOUT_MS, ProduceRequest
from txnstore.clients.producer.thread import SenderStopped
from txnstore.clients.producer.transaction_errors import transaction_error_of
from txnstore.clients.producer.transaction_states import ProducerState, TransactionCall
from txnstore.db.callers.connections import CallersConnection
from txnstore.db.callers.guards import CallerGuards
from txnstore.db.store import Store
from txnstore.errors import BranchUnfinished, InvalidRequest, TransactionAbortable, TxnStoreError
from txnstore.participants.branches import FINISH_TIMEOUT_MS, Branches
from txnstore.transactions.tokens import PreparedTxnState

_S = ProducerState
_C = TransactionCall

#: Ending the branches takes so long at least, whatever is left of the call's own time.
FINISH_MS_MIN: Final = 500
#: While a producer is closed, or finished by a newer one.
_SETTLE_MS: Final = 2_000

# The decision must be as durable as the votes, whatever the connection that it rides on has set.
_MAKE_DURABLE: Final = (
    "SELECT pg_catalog.set_config('synchronous_commit', 'on', true)"
    " WHERE pg_catalog.current_setting('synchronous_commit') = 'off'"
)
_SQLITE_HOLDS: Final = (
    "a connection to the SQLite file of the log and one to another database cannot be enlisted together: the first"
    " holds the file's only write lock, and the second has to be made known in it before it may vote; enlist one of"
    " them, or write to the outbox in the SQLite file"
)


@dataclass(slots=True)
class _Elsewhere:
    """A connection to another database."""

    callers: CallersConnection
    guards: CallerGuards

    @property
    def is_lost(self) -> bool:
        """Whether its owner has closed or rolled it back, so that the driver's connection may be somebody else's."""
        return self.guards.was_rolled_back or self.callers.is_given_up


class BranchedTransactions(EnlistedTransactions):
    """The transactional side of a producer to which connections to other databases may be enlisted as well."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """As `ProducerTransactions`."""
        super().__init__(*arguments, **keywords)
        self._branches: Branches | None = None
        self._elsewhere: list[_Elsewhere] = []
        #: What was decided about branches that have not all ended; None: nothing is left of earlier transactions.
        self._unfinished: bool | None = None
        #: Held while branches are being ended: by the call whose they are, or by `close` in another thread.
        self._ends_branches = threading.Lock()

    # --- the calls --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """See `ProducerTransactions`; branches of the last transaction that have not ended are left to recovery."""
        super().begin()
        self._leave_to_recovery()

    def prepare(self, timeout_seconds: float) -> PreparedTxnState:
        """See `EnlistedTransactions`."""
        if self._elsewhere:
            reason = "a transaction with an enlisted connection cannot be prepared: commit it"
            raise KafkaException(KafkaError(KafkaError._STATE, reason))
        return super().prepare(timeout_seconds)

    def commit(self, timeout_seconds: float, writers: Collection[int] | None = None) -> None:
        """See `EnlistedTransactions`; other databases vote before it is decided, and commit after it.

        Raises:
            KafkaException: also `_TIMED_OUT`, retriable: it is decided, and a branch has not ended in its database.
        """
        deadline = self._deadline(timeout_seconds)
        if self._unfinished:
            self._finish_branches(deadline, commit=True)
            return
        if self._elsewhere:
            if self._current is None:
                with self._changed:
                    self._check_call(_C.COMMIT)
                self._flush()
            self._is_written = True
        try:
            super().commit(timeout_seconds, writers)
        except BaseException as error:
            if not self._finish_if_ended(deadline, commit=True):
                self._give_up_branches(error)
            raise
        if self._elsewhere:
            self._unfinished = True
            self._finish_branches(deadline, commit=True)

    def abort(self, timeout_seconds: float) -> None:
        """See `EnlistedTransactions`; other databases roll back.

        Raises:
            KafkaException: also `_TIMED_OUT`, retriable: a branch has not ended in its database.
        """
        deadline = self._deadline(timeout_seconds)
        if self._unfinished is False:
            self._finish_branches(deadline, commit=False)
            return
        if self._elsewhere and self._branches is not None and self._branches.is_registered:
            self._is_written = True
        try:
            super().abort(timeout_seconds)
        except BaseException:
            self._finish_if_ended(deadline, commit=False)
            raise
        if self._elsewhere:
            self._unfinished = False
            self._finish_branches(deadline, commit=False)

    def finish(self, timeout_seconds: float) -> None:
        """See `EnlistedTransactions`."""
        try:
            if super().is_open:
                super().finish(timeout_seconds)
        finally:
            # A commit that another thread is in still counts on the votes: without them it would decide alone.
            if not self._is_called:
                self._settle()
                if self._branches is not None:
                    self._branches.forget_ended()

    @property
    def is_open(self) -> bool:
        """See `ProducerTransactions`; also whether there is something left to do about branches."""
        return super().is_open or (self._branches is not None and self._branches.has_leftovers)

    # --- enlisting --------------------------------------------------------------------------------------------------

    def _enlist_elsewhere(self, callers: CallersConnection) -> None:  # type: ignore[override]  # it returns
        if callers.backend_name == "sqlite":
            super()._enlist_elsewhere(callers)
        if self._enlisted is not None and self._enlisted.store.backend.name == "sqlite":
            raise InvalidRequest(_SQLITE_HOLDS)
        if any(known.callers.driver is callers.driver for known in self._elsewhere):
            return
        if self._branches is None:
            self._branches = Branches(self._store(), self.transactional_id, self._sender.session.connection.cluster())
        self._branches.enlist(_driver_of(callers))
        guards = CallerGuards(callers, _refused_ending)
        guards.set()
        self._elsewhere.append(_Elsewhere(callers, guards))
        return

    def _take(self, store: Store, callers: CallersConnection, timeout_seconds: float) -> None:
        if self._elsewhere and store.backend.name == "sqlite":
            raise InvalidRequest(_SQLITE_HOLDS)
        super()._take(store, callers, timeout_seconds)

    # --- voting -----------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Write what sessions of the ORM hold back, and look whether the connections are still their owners'."""
        for known in self._elsewhere:
            try:
                if known.callers.session is not None:
                    known.callers.session.flush()
            except SQLAlchemyError as error:
                reason = f"what an enlisted session had to write was refused ({type(error).__name__})"
                kafka_error = KafkaError(KafkaError._FAIL, reason, txn_requires_abort=True)
                self._fail(kafka_error)
                raise KafkaException(kafka_error) from error
        self._notice_losses()

    def _notice_losses(self) -> None:
        for known in self._elsewhere:
            if known.is_lost and self._branches is not None:
                self._branches.lose(_driver_of(known.callers))

    def _commit_in_store(self, request: ProduceRequest | None, writers: Collection[int] | None) -> None:
        """On the sender's thread, while its caller waits or has gone to wait elsewhere."""
        branches = self._branches
        if branches:
            try:
                self._sender.thread.until_answered(lambda: branches.prepare(self._sender.session.identity))
            except SenderStopped:
                self._drop(request)
                raise
            except TxnStoreError as error:
                self._drop(request)
                self._fail_and_raise(transaction_error_of(error, None))
        super()._commit_in_store(request, writers)

    def _drop(self, request: ProduceRequest | None) -> None:
        if request is not None:
            self._sender.fail_request(request, KafkaError(KafkaError._PURGE_INFLIGHT))

    def _ask(self, ending: _Ending, deadline: float) -> None:
        """On the caller's thread, with a connection to the same database."""
        if self._branches and self._enlisted is not None:
            timeout_ms = max(TRY_TIMEOUT_MS, int(1000 * (deadline - time.monotonic())))
            try:
                self._branches.prepare(self._sender.session.identity, timeout_ms=timeout_ms)
                if self._enlisted.store.backend.name == "postgresql":
                    self._enlisted.taken.callers.cursor().execute(_MAKE_DURABLE)
            except Exception as error:  # noqa: BLE001 - the driver's own as well; nothing is decided yet
                self._give_up(ending, KafkaError(KafkaError._PURGE_QUEUE))
                self._ending = None
                if not isinstance(error, TxnStoreError):
                    told = TransactionAbortable(f"the enlisted connection does not answer ({type(error).__name__})")
                    self._fail_and_raise(transaction_error_of(told, None))
                self._fail_and_raise(transaction_error_of(error, None))
        super()._ask(ending, deadline)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _finish_branches(self, deadline: float, *, commit: bool) -> None:
        """End the branches by what is decided at home, and give the connections back."""
        with self._ends_branches:
            self._finish_all(deadline, commit=commit)

    def _finish_if_ended(self, deadline: float, *, commit: bool) -> bool:
        """End the branches if the transaction has ended, and only a callback or hook of the application's raised."""
        if not self._elsewhere or self.state is not _S.READY:
            return False
        self._unfinished = commit
        # Of the two errors the application's own is told; what is left here is for recovery.
        with contextlib.suppress(KafkaException):
            self._finish_branches(deadline, commit=commit)
        return True

    def _give_up_branches(self, error: BaseException) -> None:
        """Do what is left to do after an error of the commit, if nothing can come after it."""
        if isinstance(error, KafkaException):
            if error.args[0].fatal():
                self._settle()
        elif isinstance(error, RuntimeError):
            # Closed by another thread: what is prepared is recovery's, the rest its owner's.
            for known in self._elsewhere:
                known.guards.remove()

    def _finish_all(self, deadline: float, *, commit: bool) -> None:
        branches = self._branches
        assert branches is not None
        self._notice_losses()
        timeout_ms = min(FINISH_TIMEOUT_MS, max(FINISH_MS_MIN, int(1000 * (deadline - time.monotonic()))))
        try:
            if commit:
                branches.finish(commit=True, timeout_ms=timeout_ms)
            else:
                # Somebody else may have aborted it, or only the vote was taken: the home knows.
                branches.settle(timeout_ms=timeout_ms)
        except TxnStoreError as error:
            raise kafka_exception_of(error, retriable=isinstance(error, BranchUnfinished) or None) from error
        finally:
            self._give_back(commit=commit)
        self._leave_to_recovery()

    def _give_back(self, *, commit: bool) -> None:
        """Let the owners have their connections, on which no database transaction is open; SQLAlchemy is told."""
        if self._branches is not None:
            self._branches.release()
        elsewhere, self._elsewhere = self._elsewhere, []
        for known in elsewhere:
            is_lost = known.is_lost
            known.guards.remove()
            if is_lost:
                continue
            with contextlib.suppress(SQLAlchemyError):
                _end_in_sqlalchemy(known.callers, commit=commit)

    def _settle(self) -> None:
        """End what can be ended, for this producer will do nothing more."""
        if not self._ends_branches.acquire(timeout=_SETTLE_MS / 1000):
            # Another thread is at it, and comes to its end.
            return
        try:
            if self._branches is None or not (self._elsewhere or self._branches):
                return
            self._notice_losses()
            with contextlib.suppress(TxnStoreError):
                self._branches.settle(timeout_ms=_SETTLE_MS)
            self._branches.abandon()
            self._give_back(commit=False)
            self._unfinished = None
        finally:
            self._ends_branches.release()

    def _leave_to_recovery(self) -> None:
        if self._branches:
            self._branches.abandon()
        self._unfinished = None

    def _deadline(self, timeout_seconds: float) -> float:
        longest_seconds = self._timeout_ms / 1000
        bounded = timeout_seconds if 0 <= timeout_seconds <= longest_seconds else longest_seconds
        return time.monotonic() + bounded


def _driver_of(callers: CallersConnection) -> Any:
    return getattr(callers.driver, "driver_connection", callers.driver)


def _end_in_sqlalchemy(callers: CallersConnection, *, commit: bool) -> None:
    """Let SQLAlchemy's own objects see the end; at the driver nothing is open, and nothing is sent."""
    if callers.session is not None:
        if commit:
            callers.session.commit()
        else:
            callers.session.rollback()
    transaction = callers.owner.get_transaction() if callers.owner is not None and not callers.owner.closed else None
    if transaction is not None:
        if commit:
            transaction.commit()
        else:
            transaction.rollback()

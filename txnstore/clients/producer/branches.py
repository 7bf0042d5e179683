"""The branches of a producer's transaction: other PostgreSQL databases that vote before it commits, and end with it.

Everything that concerns an application's connection happens while it waits in `commit_transaction()` or
`abort_transaction()`; when these return the connection is its own again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy.exc import SQLAlchemyError

from txnstore.clients.model.errors import KafkaError, KafkaException, kafka_exception_of
from txnstore.clients.producer.progress import TransactionProgress
from txnstore.clients.producer.sender import Sender
from txnstore.clients.producer.state import TransactionStage
from txnstore.db.callers.connections import CallersConnection
from txnstore.db.callers.guards import CallerGuards
from txnstore.errors import BranchUnfinished, InvalidRequest, TxnStoreError
from txnstore.participants.branches import FINISH_TIMEOUT_MS, Branches

_S = TransactionStage

#: Ending the branches takes so long at least, whatever is left of the call's own time.
FINISH_MS_MIN: Final = 500
#: While a producer is closed, or finished by a newer one.
_SETTLE_MS: Final = 2_000

#: Why two connections are refused of which one is to SQLite.
SQLITE_HOLDS: Final = (
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


class EnlistedBranches:
    """The connections to other databases that are enlisted in a producer's transaction."""

    def __init__(self, transactional_id: str, progress: TransactionProgress, sender: Sender) -> None:
        """Begin without any."""
        self.connections: list[_Elsewhere] = []
        """The connections that are not their owners' again yet."""
        self.decided: bool | None = None
        """What was decided about branches that have not all ended; None: nothing is left of earlier transactions."""
        self._transactional_id = transactional_id
        self._progress = progress
        self._sender = sender
        self._branches: Branches | None = None
        #: Held while branches are being ended: by the call whose they are, or by `close` in another thread.
        self._ends_branches = threading.Lock()

    @property
    def are_registered(self) -> bool:
        """Whether the log's database may know of the branches."""
        return self._branches is not None and self._branches.is_registered

    @property
    def has_leftovers(self) -> bool:
        """Whether there is something left to do about branches."""
        return self._branches is not None and self._branches.has_leftovers

    @property
    def will_vote(self) -> bool:
        """Whether there is a branch that has to vote before the commit."""
        return bool(self._branches)

    def enlist(self, callers: CallersConnection) -> None:
        """Enlist a connection to another database.

        Raises:
            InvalidRequest: it is to another SQLite file, which cannot vote.
        """
        if callers.backend_name == "sqlite":
            raise InvalidRequest(
                "this connection is on another SQLite file than the producer's; only one to the same database can be"
                " enlisted: for others, write to an outbox there"
            )
        if any(known.callers.driver is callers.driver for known in self.connections):
            return
        if self._branches is None:
            cluster = self._sender.session.connection.cluster()
            self._branches = Branches(cluster.coordinator_of(self._transactional_id), self._transactional_id, cluster)
        self._branches.enlist(_driver_of(callers))
        guards = CallerGuards(callers, refused_ending)
        guards.set()
        self.connections.append(_Elsewhere(callers, guards))

    # --- voting -----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write what sessions of the ORM hold back, and look whether the connections are still their owners'."""
        for known in self.connections:
            try:
                if known.callers.session is not None:
                    known.callers.session.flush()
            except SQLAlchemyError as error:
                reason = f"what an enlisted session had to write was refused ({type(error).__name__})"
                kafka_error = KafkaError(KafkaError._FAIL, reason, txn_requires_abort=True)
                self._progress.fail(kafka_error)
                raise KafkaException(kafka_error) from error
        self._notice_losses()

    def vote(self, timeout_ms: int | None = None) -> None:
        """Let every branch be prepared for the commit."""
        assert self._branches is not None
        identity = self._sender.session.identity
        if timeout_ms is None:
            self._branches.prepare(identity)
        else:
            self._branches.prepare(identity, timeout_ms=timeout_ms)

    def _notice_losses(self) -> None:
        for known in self.connections:
            if known.is_lost and self._branches is not None:
                self._branches.lose(_driver_of(known.callers))

    # --- the end ----------------------------------------------------------------------------------------------------

    def finish(self, deadline: float, *, commit: bool) -> None:
        """End the branches by what is decided at home, and give the connections back."""
        with self._ends_branches:
            self._finish_all(deadline, commit=commit)

    def finish_if_ended(self, deadline: float, *, commit: bool) -> bool:
        """End the branches if the transaction has ended, and only a callback or hook of the application's raised."""
        if not self.connections or self._progress.stage is not _S.READY:
            return False
        self.decided = commit
        # Of the two errors the application's own is told; what is left here is for recovery.
        with contextlib.suppress(KafkaException):
            self.finish(deadline, commit=commit)
        return True

    def give_up(self, error: BaseException) -> None:
        """Do what is left to do after an error of the commit, if nothing can come after it."""
        if isinstance(error, KafkaException):
            if error.args[0].fatal():
                self.settle()
        elif isinstance(error, RuntimeError):
            # Closed by another thread: what is prepared is recovery's, the rest its owner's.
            for known in self.connections:
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
        self.leave_to_recovery()

    def _give_back(self, *, commit: bool) -> None:
        """Let the owners have their connections, on which no database transaction is open; SQLAlchemy is told."""
        if self._branches is not None:
            self._branches.release()
        connections, self.connections = self.connections, []
        for known in connections:
            is_lost = known.is_lost
            known.guards.remove()
            if is_lost:
                continue
            with contextlib.suppress(SQLAlchemyError):
                _end_in_sqlalchemy(known.callers, commit=commit)

    def settle(self) -> None:
        """End what can be ended, for this producer will do nothing more."""
        if not self._ends_branches.acquire(timeout=_SETTLE_MS / 1000):
            # Another thread is at it, and comes to its end.
            return
        try:
            if self._branches is None or not (self.connections or self._branches):
                return
            self._notice_losses()
            with contextlib.suppress(TxnStoreError):
                self._branches.settle(timeout_ms=_SETTLE_MS)
            self._branches.abandon()
            self._give_back(commit=False)
            self.decided = None
        finally:
            self._ends_branches.release()

    def close(self) -> None:
        """End what can be ended, for the producer is being closed."""
        self.settle()
        if self._branches is not None:
            self._branches.forget_ended()

    def leave_to_recovery(self) -> None:
        """Do nothing more about branches that have not ended: the transaction after them begins."""
        if self._branches:
            self._branches.abandon()
        self.decided = None


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


def refused_ending(ending: str) -> KafkaException:
    """Return what an enlisted connection's own `commit()` and `rollback()` raise."""
    verb, call = ("commits", "commit_transaction()") if ending == "commit" else ("rolls back", "abort_transaction()")
    reason = (
        f"{ending}() of a connection that is enlisted in a producer's transaction is refused: the producer {verb} it"
        f" with its own, by {call}"
    )
    return KafkaException(KafkaError(KafkaError._STATE, reason))

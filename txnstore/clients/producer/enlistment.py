"""The enlistment of an application's connection: the producer's transaction ends in its database transaction.

Once a connection to the same database is enlisted, records and offsets wait for its commit, which the producer makes:
it runs on the caller's thread, for the connection is his.  If its answer is lost it cannot be repeated, for the other
rows in it are not ours; so it is asked what became of it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from sqlalchemy import Connection

from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.clients.producer.branches import EnlistedBranches, refused_ending
from txnstore.clients.producer.progress import TransactionOffsets, TransactionProgress
from txnstore.clients.producer.requests import TRY_TIMEOUT_MS, ProduceRequest
from txnstore.clients.producer.sender import REQUEST_BYTES_MAX, Sender
from txnstore.clients.producer.state import TransactionCall, TransactionStage, transaction_error_of
from txnstore.clients.producer.thread import SenderStopped
from txnstore.clients.topic_directory import TopicDirectory
from txnstore.db.callers.connections import CallersConnection
from txnstore.db.callers.enlisted import EnlistedConnection
from txnstore.db.callers.on_caller_connection import joined_connection
from txnstore.db.store import Store
from txnstore.errors import InvalidRequest, TransactionAbortable, TxnStoreError
from txnstore.transactions.outcome import Ended, EndRequest, ResolvedEnd, end_within, resolve_end

_S = TransactionStage
_C = TransactionCall

#: How long the COMMIT itself is repeated while SQLite is busy, whatever the timeout of the call.
COMMIT_SECONDS_MIN: Final = 1.0

# The decision must be as durable as the votes, whatever the connection that it rides on has set.
_MAKE_DURABLE: Final = (
    "SELECT pg_catalog.set_config('synchronous_commit', 'on', true)"
    " WHERE pg_catalog.current_setting('synchronous_commit') = 'off'"
)


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


class Enlistment:
    """The connection of an application in which a producer's transaction ends, if one is enlisted."""

    def __init__(  # noqa: PLR0917 - what it works with
        self,
        transactional_id: str,
        timeout_ms: int,
        progress: TransactionProgress,
        offsets: TransactionOffsets,
        branches: EnlistedBranches,
        sender: Sender,
        directory: TopicDirectory,
        serve_reports: Callable[[], object],
    ) -> None:
        """Begin without a connection; `branches` vote before its COMMIT."""
        self._transactional_id = transactional_id
        self._longest_seconds = timeout_ms / 1000
        self._progress = progress
        self._changed = progress.changed
        self._offsets = offsets
        self._branches = branches
        self._sender = sender
        self._directory = directory
        self._serve_reports = serve_reports
        self._enlisted: _Enlisted | None = None
        self._ending: _Ending | None = None
        # After a fatal error the producer is finished; the connection is not, and its owner has to roll it back.
        progress.when_fatal = self.let_go

    @property
    def is_active(self) -> bool:
        """Whether a commit is one of the connection's."""
        return self._enlisted is not None or self._ending is not None

    @property
    def holds_sqlite(self) -> bool:
        """Whether the connection keeps all others from writing to the log."""
        return self._enlisted is not None and self._enlisted.store.backend.name == "sqlite"

    def refuse(self, reason: str) -> None:
        """Refuse what cannot be done with a connection."""
        if self._enlisted is not None:
            raise KafkaException(KafkaError(KafkaError._STATE, reason))

    # --- the calls --------------------------------------------------------------------------------------------------

    def commit(self, timeout_seconds: float, writers: Collection[int] | None) -> None:
        """Commit the transaction with the connection, on this thread."""
        self._progress.check_writers(writers)
        bounded = timeout_seconds if 0 <= timeout_seconds <= self._longest_seconds else self._longest_seconds
        hook_error: Exception | None = None
        with self._progress.in_call(_C.COMMIT):
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
                            self._progress.enter(_S.READY)
        if hook_error is not None:
            raise hook_error

    def roll_back_to_abort(self) -> None:
        """Roll the connection back, on this thread, before the transaction is aborted."""
        enlisted = self._enlisted
        if enlisted is not None and self._progress.current is None:
            with self._changed:
                self._progress.check_call(_C.ABORT)
            try:
                enlisted.taken.roll_back()
            except TxnStoreError as error:
                raise KafkaException(KafkaError(KafkaError._STATE, str(error))) from error
            self._forget_enlisted()

    def let_go(self) -> None:
        """Give the connection back to its owner, as it is."""
        if self._enlisted is not None:
            self._enlisted.taken.let_go()

    def release(self) -> None:
        """Take note that the transaction has ended."""
        self._enlisted = self._ending = None
        if self._offsets.hold_until_commit:
            self._let_send()

    # --- enlisting --------------------------------------------------------------------------------------------------

    def take(self, store: Store, callers: CallersConnection, timeout_seconds: float) -> None:
        """Enlist a connection to the database that holds everything; from now on records and offsets wait for it."""
        if self._enlisted is not None:
            if self._enlisted.taken.callers.driver is callers.driver:
                return
            raise InvalidRequest(
                "another connection to the same database is enlisted already: one of them has to do all the writing"
            )
        size_bytes_max = math.inf if store.backend.name == "sqlite" else REQUEST_BYTES_MAX
        hold = self._progress.submit(partial(self._hold_work, size_bytes_max))
        taken = EnlistedConnection(store, callers, refused_ending)
        try:
            self._progress.wait(hold, timeout_seconds, self._longest_seconds, resumable=False)
            taken.take()
            self._enlisted = _Enlisted(taken, store)
        except BaseException:
            hold.cancel()
            taken.let_go()
            self._let_send()
            raise

    def _hold_work(self, size_bytes_max: float) -> None:
        self._offsets.stop_lingering()
        self._offsets.hold_until_commit = True
        self._directory.may_write = size_bytes_max < math.inf
        self._sender.hold_until_commit(size_bytes_max)

    def _let_send(self) -> None:
        self._offsets.hold_until_commit = False
        self._directory.may_write = True
        self._sender.stop_holding()
        if self._offsets and self._progress.stage is _S.IN_TRANSACTION:
            self._offsets.linger()

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
        if self._progress.work is None:
            self._progress.work = self._progress.submit(partial(self._settle_work, ending))
        self._wait_until(self._progress.work, deadline)
        return ending.hook_error

    def _wait_until(self, work: Any, deadline: float) -> Any:
        left_seconds = max(0.0, deadline - time.monotonic())
        return self._progress.wait(work, left_seconds, self._longest_seconds, resumable=True)

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
            self._progress.fail_and_raise(_abortable(error))
        self._ending = ending = _Ending(writers)
        with self._changed:
            self._progress.enter(_S.BEGIN_COMMIT)
        return ending

    def _gather(self, ending: _Ending, deadline: float) -> None:
        if self._progress.work is None:
            self._progress.work = self._progress.submit(partial(self._gather_work, ending))
        gathering = self._progress.work
        try:
            self._wait_until(gathering, deadline)
        except KafkaException:
            if gathering.done():
                self._ending = None
                self._roll_back_if_fatal()
            raise
        self._progress.work = None

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
            if self._progress.work is None and self._progress.stage is _S.COMMITTING:
                self._progress.work = self._progress.submit(partial(self._settle_work, ending))
            return
        self._ending = self._progress.work = None
        with contextlib.suppress(RuntimeError):
            self._progress.submit(partial(self._give_up_work, ending))
        reason = "the commit was interrupted before the enlisted connection was committed; nothing was committed"
        self._progress.fail(KafkaError(KafkaError._FAIL, reason, txn_requires_abort=True))

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
        if self._branches.will_vote:
            self._let_branches_vote(enlisted, ending, deadline)
        ending.request = EndRequest(
            self._transactional_id,
            self._sender.session.identity,
            [item for request in ending.requests for item in request.appends],
            self._offsets.waiting,
            ending.writers,
        )
        with self._changed:
            self._progress.is_written = True
            self._progress.enter(_S.COMMITTING)
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

    def _let_branches_vote(self, enlisted: _Enlisted, ending: _Ending, deadline: float) -> None:
        try:
            self._branches.vote(timeout_ms=max(TRY_TIMEOUT_MS, int(1000 * (deadline - time.monotonic()))))
            if enlisted.store.backend.name == "postgresql":
                enlisted.taken.callers.cursor().execute(_MAKE_DURABLE)
        except Exception as error:  # noqa: BLE001 - the driver's own as well; nothing is decided yet
            self._give_up(ending, KafkaError(KafkaError._PURGE_QUEUE))
            self._ending = None
            if not isinstance(error, TxnStoreError):
                told = TransactionAbortable(f"the enlisted connection does not answer ({type(error).__name__})")
                self._progress.fail_and_raise(_abortable(told))
            self._progress.fail_and_raise(_abortable(error))

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
        self._progress.fail(kafka_error)
        self._roll_back_if_fatal()
        if is_interrupt:
            raise error
        raise KafkaException(kafka_error) from error

    def _roll_back_if_fatal(self) -> None:
        """Roll the connection back if the producer is finished: there is no abort after that."""
        if self._progress.stage is _S.FATAL_ERROR and self._enlisted is not None:
            self._enlisted.taken.roll_back()
            self._forget_enlisted()

    def _give_up(self, ending: _Ending, error: KafkaError) -> None:
        for request in ending.requests or ():
            self._sender.fail_request(request, error)

    # --- on the sender's thread ---------------------------------------------------------------------------------------

    def _gather_work(self, ending: _Ending) -> None:
        self._offsets.stop_lingering()
        requests = self._sender.take_everything()
        if requests:
            # Their sequence numbers are used up: an abort has to bring a new epoch.
            self._progress.is_written = True
        try:
            self._progress.check_delivered(None)
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
        if self._progress.stage is not _S.COMMITTING:
            # An interrupted call had queued it before.
            if self._progress.error is not None:
                raise KafkaException(self._progress.error)
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
        self._progress.reset()
        self._offsets.clear()
        self.release()
        with self._changed:
            self._progress.enter(_S.COMMIT_NOT_ACKED)

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
            self._progress.fail_and_raise(transaction_error_of(error, _C.COMMIT))
        if not resolved.is_committed:
            self._sender.session.become(resolved.ended.identity)
            self._progress.is_written = False
            self._forget_enlisted()
            self._give_up(ending, KafkaError(KafkaError._PURGE_INFLIGHT))
            reason = "the enlisted connection broke during its COMMIT and nothing was committed: abort, then start over"
            self._progress.fail_and_raise(KafkaError(KafkaError._TRANSPORT, reason, txn_requires_abort=True))
        return resolved.ended

    # --- inside -----------------------------------------------------------------------------------------------------

    def _forget_enlisted(self) -> None:
        """Forget the connection, which was not committed."""
        enlisted, self._enlisted, self._ending = self._enlisted, None, None
        for name in enlisted.created_topics if enlisted is not None else ():
            self._directory.forget(name)


def _abortable(error: TxnStoreError) -> KafkaError:
    # None: what is refused is about the caller's connection; only being fenced ends the producer.
    return transaction_error_of(error, None)

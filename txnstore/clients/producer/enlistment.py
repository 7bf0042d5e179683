"""The enlistment in a producer's transaction: an application's connection to the same database, or branches in others.

Once a connection to the same database is enlisted, records and offsets wait for its commit, which the producer makes:
it runs on the caller's thread, because the connection is the caller's.  If its answer is lost it cannot be repeated,
for the other rows in it are the application's; so the store is asked what became of it.  Other PostgreSQL databases
vote before the transaction commits.  Everything that concerns an application's connection happens while the application
waits in `commit_transaction()` or `abort_transaction()`; when these return the connection is its own again.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from txnstore.clients.model.errors import KafkaError, KafkaException, kafka_exception_of
from txnstore.clients.producer.progress import TransactionOffsets, TransactionProgress
from txnstore.clients.producer.requests import TRY_TIMEOUT_MS, ProduceRequest
from txnstore.clients.producer.sender import REQUEST_BYTES_MAX
from txnstore.clients.producer.state import TransactionCall, TransactionStage, is_closed, transaction_error_of
from txnstore.db.backend import EVERYTHING
from txnstore.db.store import Store, take_changes
from txnstore.deadline import Deadline
from txnstore.errors import BranchEndedOtherwise, BranchUnfinished, InvalidRequest, TransactionAbortable, TxnStoreError
from txnstore.transactions.outcome import CommitRequest, Ended, ResolvedEnd, end_within, resolve_end
from txnstore.transactions.whole_statements import end_whole_within

# These bring psycopg along, which few producers need on SQLite: they are imported once something is enlisted.
if TYPE_CHECKING:
    from txnstore.db.callers.connections import CallersConnection
    from txnstore.db.callers.enlisted import CallerGuards, CommitWhole, EnlistedConnection
    from txnstore.participants.branches import Branches

_S = TransactionStage

#: Ending the branches takes so long at least, whatever is left of the call's own time.
FINISH_MS_MIN: Final = 500
#: While a producer is closed, or finished by a newer one.
_SETTLE_MS: Final = 2_000


@dataclass(slots=True)
class _Elsewhere:
    """A connection to another database."""

    callers: CallersConnection
    guards: CallerGuards


class EnlistedBranches:
    """The connections to other databases that are enlisted in a producer's transaction."""

    def __init__(self, progress: TransactionProgress) -> None:
        """Begin without any."""
        self.connections: list[_Elsewhere] = []
        """The connections that are not their owners' again yet."""
        self.decided: bool | None = None
        """What was decided about branches that have not all ended; None: nothing is left of earlier transactions."""
        self._progress = progress
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
            InvalidRequest: it is to another SQLite file, which cannot vote, or cannot take part as it is, or another
                producer has enlisted it.
        """
        from txnstore.db.callers.enlisted import CallerGuards
        from txnstore.participants.branches import Branches

        if not callers.keeps_prepared:
            raise InvalidRequest(
                "this connection is on another SQLite file than the producer's; only one to the same database can be"
                " enlisted: for others, write to an outbox there"
            )
        if any(known.callers.driver is callers.driver for known in self.connections):
            return
        if self._branches is None:
            name, cluster = self._progress.transactional_id, self._progress.sender.session.connection.cluster()
            self._branches = Branches(cluster.coordinator_of(name), name, cluster)
        guards = CallerGuards(callers, refused_ending, self)
        try:
            guards.claim()
            self._branches.enlist(_driver_of(callers))
            guards.set()
            self.connections.append(_Elsewhere(callers, guards))
        except BaseException:
            # Ctrl-C in between: to its owner it is not enlisted.
            self._branches.dismiss(_driver_of(callers))
            self.connections = [known for known in self.connections if known.guards is not guards]
            guards.remove()
            raise

    # --- voting -----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write what sessions of the ORM hold back, and look whether the connections are still their owners'."""
        for known in self.connections:
            if not known.guards.is_lost:  # what its owner does with the session since is its own
                self._progress.flush_session(known.callers)
        self._notice_losses()

    def vote(self, timeout_ms: int | None = None) -> None:
        """Let every branch be prepared for the commit."""
        assert self._branches is not None
        options = {} if timeout_ms is None else {"timeout_ms": timeout_ms}
        self._branches.prepare(self._progress.sender.session.identity, **options)

    def _notice_losses(self) -> None:
        for known in self.connections:
            if known.guards.is_lost and self._branches is not None:
                self._branches.lose(_driver_of(known.callers))

    # --- the end ----------------------------------------------------------------------------------------------------

    def finish(self, deadline: Deadline, *, commit: bool) -> None:
        """End the branches by what the coordinator has decided, and give the connections back."""
        with self._ends_branches:
            self._finish_all(deadline, commit=commit)

    def finish_if_ended(self, deadline: Deadline, *, commit: bool) -> bool:
        """End the branches if the transaction has ended, and only a callback or hook of the application's raised."""
        if not self.connections or self._progress.stage is not _S.READY:
            return False
        self.decided = commit if self.decided is None else self.decided
        # Of the two errors the application's own is told; what is left here is for recovery.
        with contextlib.suppress(KafkaException):
            self.finish(deadline, commit=self.decided)
        return True

    def give_up(self, error: BaseException) -> None:
        """Do what is left to do after an error of the commit, if nothing can come after it."""
        if isinstance(error, KafkaException):
            if error.args[0].fatal():
                self.settle()
        elif is_closed(error):
            self.let_go()

    def let_go(self) -> None:
        """Give the connections back as they are: what is prepared is recovery's, the rest its owner's."""
        for known in self.connections:
            known.guards.remove()

    def _finish_all(self, deadline: Deadline, *, commit: bool) -> None:
        from txnstore.participants.branches import FINISH_TIMEOUT_MS

        branches = self._branches
        assert branches is not None
        self._notice_losses()
        timeout_ms = min(FINISH_TIMEOUT_MS, max(FINISH_MS_MIN, int(1000 * deadline.left_seconds())))
        try:
            if commit:
                branches.finish(commit=True, timeout_ms=timeout_ms)
            else:
                # Somebody else may have aborted it, or only the vote was taken: the coordinator knows.
                branches.settle(timeout_ms=timeout_ms)
        except TxnStoreError as error:
            if isinstance(error, BranchEndedOtherwise):
                self.leave_to_recovery()
            raise kafka_exception_of(error, retriable=isinstance(error, BranchUnfinished) or None) from error
        finally:
            self._give_back(commit=commit)
        self.leave_to_recovery()

    def _give_back(self, *, commit: bool) -> None:
        """Let the owners have their connections, on which no database transaction is open; SQLAlchemy is told."""
        if self._branches is not None:
            self._branches.release()
        for known in self.connections:
            # Before they are forgotten: a call repeated after Ctrl-C goes on here.
            known.guards.remove()
        held, self.connections = [known for known in self.connections if not known.guards.is_lost], []
        hook_error: Exception | None = None
        for known in held:
            try:
                _end_in_sqlalchemy(known.callers, commit=commit)
            except SQLAlchemyError:
                # A session that joined with a savepoint would release it: what it knew is over all the same.
                with contextlib.suppress(SQLAlchemyError):
                    _end_in_sqlalchemy(known.callers, commit=False)
            except Exception as error:  # noqa: BLE001 - of a hook of the application's: the others have ended as well
                hook_error = hook_error or error
        if hook_error is not None:
            raise hook_error

    def settle(self) -> None:
        """End what can be ended, for this producer will do nothing more."""
        taken: list[bool] = []
        try:
            # One call of C takes the lock and notes it: Ctrl-C in between would leave it taken for good.
            taken.extend(starmap(self._ends_branches.acquire, [(True, _SETTLE_MS / 1000)]))
            if not taken[0]:
                return  # another thread is at it, and comes to its end
            if self._branches is None or not (self.connections or self._branches):
                return
            self._notice_losses()
            with contextlib.suppress(TxnStoreError):
                # What is decided is, whatever became of the coordinator since.
                end = partial(self._branches.finish, commit=True) if self.decided else self._branches.settle
                end(timeout_ms=_SETTLE_MS)
            self._branches.abandon()
            self._give_back(commit=False)
            self.decided = None
        finally:
            if taken == [True]:
                self._ends_branches.release()

    def close(self) -> None:
        """End what can be ended, because the producer is being closed."""
        work = self._progress.work
        if self._progress.current is _C.COMMIT and work is not None and not work.done():
            # It goes on in the background and counts on the votes: without them the log would decide alone.
            self.let_go()
            return
        self.settle()
        if self._branches is not None:
            self._branches.forget_ended()

    def begin(self) -> None:
        """Leave what has not ended to recovery: the next transaction has none of the last one's connections."""
        if self.connections:
            # Ctrl-C came between the end of the transaction and that of its branches.
            self.settle()
        self.leave_to_recovery()

    def leave_to_recovery(self) -> None:
        """Do nothing more about branches that have not ended."""
        if self._branches:
            self._branches.abandon()
        self.decided = None


def _driver_of(callers: CallersConnection) -> Any:
    return getattr(callers.driver, "driver_connection", callers.driver)


def _end_in_sqlalchemy(callers: CallersConnection, *, commit: bool) -> None:
    """Let SQLAlchemy's own objects see the end; at the driver nothing is open, and nothing is sent."""
    end = methodcaller("commit" if commit else "rollback")
    if callers.session is not None:
        end(callers.session)
    transaction = callers.owner.get_transaction() if callers.owner is not None and not callers.owner.closed else None
    if transaction is not None:
        end(transaction)


def refused_ending(ending: str) -> KafkaException:
    """Return what an enlisted connection's own `commit()` and `rollback()` raise."""
    what = "rolls it back with its own, by abort" if ending == "rollback" else "commits it with its own, by commit"
    reason = (
        f"{ending}() of a connection that is enlisted in a producer's transaction is refused: the producer"
        f" {what}_transaction()"
    )
    return KafkaException(KafkaError(KafkaError._STATE, reason))


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

    request: CommitRequest | None = None
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

    def __init__(self, progress: TransactionProgress, offsets: TransactionOffsets, branches: EnlistedBranches) -> None:
        """Begin without a connection; `branches` vote before its COMMIT."""
        self._progress = progress
        self._changed = progress.changed
        self._offsets = offsets
        self._branches = branches
        self._sender = progress.sender
        self._directory = progress.directory
        self._enlisted: _Enlisted | None = None
        self._ending: _Ending | None = None
        # After a fatal error the producer is finished; the connection is not, and its owner has to roll it back.
        progress.when_fatal = self.let_go

    @property
    def is_active(self) -> bool:
        """Whether a commit is one of the connection's."""
        return self._enlisted is not None or self._ending is not None

    @property
    def keeps_others_out(self) -> bool:
        """Whether the connection keeps all others from writing to the log."""
        return self._enlisted is not None and self._enlisted.store.backend.has_one_writer

    def refuse(self, reason: str) -> None:
        """Refuse what cannot be done with a connection."""
        if self._enlisted is not None:
            raise KafkaException(KafkaError(KafkaError._STATE, reason))

    # --- the calls --------------------------------------------------------------------------------------------------

    def commit(self, timeout_seconds: float, writers: Collection[int] | None) -> None:
        """Commit the transaction with the connection, on this thread."""
        self._progress.check_writers(writers)
        deadline = Deadline(self._progress.bounded(timeout_seconds))
        hook_error: Exception | None = None
        with self._progress.in_call(_C.COMMIT, writers):
            is_done = False
            try:
                hook_error = self._commit_enlisted(deadline, writers)
                is_done = True
            except BaseException as error:
                if not (isinstance(error, KafkaException) or is_closed(error)):
                    self._interrupted()
                raise
            finally:
                try:
                    self._progress.serve_reports()
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
        # Read once: the sender's thread may take note of the end meanwhile.
        enlisted = self._enlisted
        if enlisted is not None:
            enlisted.taken.let_go()

    def release(self) -> None:
        """Take note that the transaction has ended."""
        self._enlisted = self._ending = None
        if self._offsets.hold_until_commit:
            self._let_send()

    # --- enlisting --------------------------------------------------------------------------------------------------

    def take(self, store: Store, callers: CallersConnection, timeout_seconds: float) -> None:
        """Enlist a connection to the database that holds everything; from now on records and offsets wait for it."""
        from txnstore.db.callers.enlisted import EnlistedConnection

        if self._enlisted is not None:
            if self._enlisted.taken.callers.driver is callers.driver:
                return
            raise InvalidRequest(
                "another connection to the same database is enlisted already: one of them has to do all the writing"
            )
        size_bytes_max = math.inf if store.backend.has_one_writer else REQUEST_BYTES_MAX
        hold = partial(self._hold_work, size_bytes_max)
        waiting: Future[bool] | None = None
        taken = EnlistedConnection(store, callers, refused_ending)
        try:
            if not self._sender.thread.run_here(hold):
                waiting = self._progress.submit(hold)
                self._progress.wait(waiting, self._progress.bounded(timeout_seconds), resumable=False)
            taken.take()
            self._enlisted = _Enlisted(taken, store)
        except BaseException:
            if waiting is not None:
                waiting.cancel()
            taken.let_go()
            self._let_send()
            raise

    def _hold_work(self, size_bytes_max: float) -> bool:
        self._offsets.stop_lingering()
        self._offsets.hold_until_commit = True
        self._directory.may_write = size_bytes_max < math.inf
        self._sender.hold_until_commit(size_bytes_max)
        return True

    def _let_send(self) -> None:
        self._offsets.hold_until_commit = False
        self._directory.may_write = True
        self._sender.stop_holding()
        if self._offsets and self._progress.stage is _S.IN_TRANSACTION:
            self._offsets.linger()

    def flush(self) -> None:
        """Write what a session of the ORM holds back, before records are gathered: its hooks may produce some."""
        if self._enlisted is not None:
            self._check(self._enlisted.taken)
            self._progress.flush_session(self._enlisted.taken.callers)

    # --- committing; on the caller's thread ---------------------------------------------------------------------------

    def _commit_enlisted(self, deadline: Deadline, writers: Collection[int] | None) -> Exception | None:
        """Take the commit as far as it goes until the deadline; return what a hook of the application's raised."""
        enlisted, ending, work = self._enlisted, self._ending, self._progress.work
        if ending is None and work is not None:
            # A call before this one has left it to the sender's thread, which has settled it just now.
            self._wait_until(work, deadline)
            return None
        if ending is not None and not ending.was_asked and self._progress.stage is _S.COMMITTING:
            # A second interrupt came before it was decided what the first one means: given up, or perhaps committed.
            self._interrupted()
            ending = self._ending
        if ending is None and self._progress.stage is not _S.IN_TRANSACTION:
            # Or before it was noted that the first one has given it up.
            self._progress.fail_and_raise(self._progress.error or _interrupted_error())
        if ending is None or self._progress.stage is _S.IN_TRANSACTION:
            assert enlisted is not None
            ending = self._begin_ending(enlisted, writers)
        if not ending.was_asked:
            # Also if that is done by now for which a call before this one could not wait.
            if ending.requests is None or self._progress.work is not None:
                self._gather(ending, deadline)
            self._ask(ending, deadline)
        if self._progress.work is None:
            self._progress.work = self._progress.submit(partial(self._settle_work, ending), _C.COMMIT)
        self._wait_until(self._progress.work, deadline)
        return ending.hook_error

    def _wait_until(self, work: Any, deadline: Deadline) -> Any:
        return self._progress.wait(work, deadline.left_seconds(), resumable=True)

    def _begin_ending(self, enlisted: _Enlisted, writers: Collection[int] | None) -> _Ending:
        self._check(enlisted.taken)
        try:
            self._create_topics(enlisted)
        except TxnStoreError as error:
            self._progress.fail_and_raise(_abortable(error))  # nothing is decided yet
        self._ending = ending = _Ending(writers)
        with self._changed:
            self._progress.enter(_S.BEGIN_COMMIT)
        return ending

    def _check(self, taken: EnlistedConnection) -> None:
        try:
            taken.check_thread()
        except TxnStoreError as error:
            raise KafkaException(KafkaError(KafkaError._STATE, str(error))) from error
        try:
            taken.check()
        except TxnStoreError as error:
            self._progress.fail_and_raise(_abortable(error))

    def _gather(self, ending: _Ending, deadline: Deadline) -> None:
        if self._progress.work is None:
            self._progress.work = self._progress.submit(partial(self._gather_work, ending), _C.COMMIT)
        gathering = self._progress.work
        try:
            self._wait_until(gathering, deadline)
        except KafkaException:
            # Not if it was done a moment after the time was up.
            if gathering.done() and gathering.exception() is not None:
                self._give_up(ending, KafkaError(KafkaError._PURGE_QUEUE))
                self._ending = None
                self._roll_back_if_fatal()
            raise
        self._progress.work = None

    def _interrupted(self) -> None:
        """Let what an interrupt, or a lack of memory, has left be something to end: by an abort, or the commit again.

        Before the COMMIT nothing is decided, and it is given up.  From then on the commit is asked for again.
        """
        ending, enlisted = self._ending, self._enlisted
        if ending is None or enlisted is None:
            return
        taken = enlisted.taken
        if ending.was_asked or taken.is_committed or taken.outcome_unknown:
            ending.was_asked = True
            ending.ended = ending.ended or taken.result
            # What is open holds locks that whoever asks what became of it would wait for.
            (taken.let_go if taken.is_committed else taken.abandon)()
            if self._progress.work is None and self._progress.stage is _S.COMMITTING:
                self._progress.work = self._progress.submit(partial(self._settle_work, ending), _C.COMMIT)
            return
        give_up = partial(self._give_up_work, ending)
        self._ending = self._progress.work = None
        try:
            with contextlib.suppress(Exception):
                self._progress.submit(give_up)
        except BaseException:
            # A second interrupt: done twice it does nothing more.
            self._progress.submit(give_up)
            raise
        finally:
            self._progress.fail(_interrupted_error())

    def _create_topics(self, enlisted: _Enlisted) -> None:
        """Create topics that are used for the first time: no other connection could while SQLite's lock is held."""
        from txnstore.db.callers.on_caller_connection import joined_connection

        if self._directory.may_write:
            return
        names = self._sender.unknown_topics
        if names:

            def create(connection: Connection) -> None:
                enlisted.created_topics += self._directory.create_within(connection, names)

            with joined_connection(enlisted.store, enlisted.taken.callers) as connection:
                create(connection)

    def _ask(self, ending: _Ending, deadline: Deadline) -> None:
        """Commit; return once it was asked for, whether or not the answer is known, or raise: nothing was committed."""
        enlisted = self._enlisted
        assert enlisted is not None
        assert ending.requests is not None
        if self._branches.will_vote:
            self._let_branches_vote(enlisted, ending, deadline)
        ending.request = CommitRequest(
            self._progress.transactional_id,
            self._sender.session.identity,
            [item for request in ending.requests for item in request.appends],
            self._offsets.waiting,
            ending.writers,
            self._progress.transaction_group,
        )
        # What is in the store already, branches too, takes the general way.
        is_whole = enlisted.store.commits_whole and not self._sender.session.has_begun and not self._branches.will_vote
        # Nor does what has to wait for others of its group.
        is_whole = is_whole and self._progress.transaction_group is None
        with self._changed:
            self._progress.is_written = True
            self._progress.enter(_S.COMMITTING)
        taken, changes = enlisted.taken, EVERYTHING

        def end(connection: Connection) -> Ended:
            nonlocal changes
            assert ending.request is not None
            ended = end_within(connection, ending.request)
            changes = take_changes(connection)
            return ended

        def end_at_once(connection: Connection, commit_whole: CommitWhole | None) -> Ended | None:
            nonlocal changes
            assert ending.request is not None
            ended = end_whole_within(connection, ending.request, commit_whole) if is_whole else None
            changes = take_changes(connection)
            return ended

        seconds = max(COMMIT_SECONDS_MIN, deadline.left_seconds())
        is_there = partial(ending.request.names_what_is_there, enlisted.store)
        try:
            taken.commit(end, at_once=end_at_once, is_there=is_there, timeout_seconds=seconds)
        except BaseException as error:  # noqa: BLE001 - whatever it is, what it means is decided there
            self._asked_in_vain(enlisted, ending, error)
        ending.ended = taken.result
        ending.was_asked = True
        if taken.is_committed:
            enlisted.store.backend.after_commit(enlisted.store.engine)
            enlisted.store.announce(changes)

    def _let_branches_vote(self, enlisted: _Enlisted, ending: _Ending, deadline: Deadline) -> None:
        try:
            self._branches.vote(timeout_ms=max(TRY_TIMEOUT_MS, int(1000 * deadline.left_seconds())))
            # Of PostgreSQL: where the connection keeps all others out, nothing votes.
            enlisted.taken.callers.cursor().execute(_MAKE_DURABLE)
        except Exception as error:
            told = error
            if not isinstance(told, TxnStoreError):
                told = TransactionAbortable(f"the enlisted connection does not answer ({type(error).__name__})")
            kafka_error = _abortable(told)
            self._give_up_at_once(ending, kafka_error)
            raise KafkaException(kafka_error) from error

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
        if isinstance(error, TxnStoreError):
            kafka_error = _abortable(error)
        else:
            reason = f"the enlisted connection could not be committed ({type(error).__name__}); nothing was committed"
            kafka_error = KafkaError(KafkaError._FAIL, reason, txn_requires_abort=True)
        self._give_up_at_once(ending, kafka_error)
        if is_interrupt:
            raise error
        raise KafkaException(kafka_error) from error

    def _give_up_at_once(self, ending: _Ending, error: KafkaError) -> None:
        """Take note that nothing was committed, for this reason; Ctrl-C in between finds the ending or the error."""
        self._progress.fail(error)
        self._give_up(ending, KafkaError(KafkaError._PURGE_QUEUE))
        self._ending = None
        self._roll_back_if_fatal()

    def _roll_back_if_fatal(self) -> None:
        """Roll the connection back if the producer is finished: there is no abort after that."""
        if self._progress.stage is _S.FATAL_ERROR and self._enlisted is not None:
            self._enlisted.taken.roll_back()
            self._forget_enlisted()

    def _give_up(self, ending: _Ending, error: KafkaError) -> None:
        """Report each record once: after Ctrl-C in here the sender's thread goes on with the rest."""
        self._sender.fail_requests(ending.requests or [], error)

    # --- on the sender's thread ---------------------------------------------------------------------------------------

    def _gather_work(self, ending: _Ending) -> None:
        if ending.requests is not None:
            return  # an interrupted call had queued it before
        self._offsets.stop_lingering()
        requests = self._sender.take_everything()
        if requests or self._progress.error is not None:
            # Their sequence numbers are used up, also those of what has failed: an abort has to bring a new epoch.
            self._progress.is_written = True
        try:
            self._progress.check_delivered([])
        except Exception:
            # Also what an interrupt has failed just now: it knows of no requests yet.
            self._sender.fail_requests(requests, KafkaError(KafkaError._PURGE_QUEUE))
            raise
        ending.requests = requests

    def _give_up_work(self, ending: _Ending) -> None:
        """Report what was gathered for a commit that was interrupted; it comes after the gathering."""
        self._give_up(ending, KafkaError(KafkaError._PURGE_QUEUE))

    def _settle_work(self, ending: _Ending) -> None:
        """Find out what became of the commit if that is not known, and go on from it."""
        if self._progress.stage is not _S.COMMITTING:
            # An interrupted call had queued it before.
            if self._progress.error is not None:
                raise KafkaException(self._progress.error)
            return
        if ending.ended is None:
            try:
                ending.ended = self._resolve(ending)
            except Exception:
                self._give_up(ending, KafkaError(KafkaError._PURGE_INFLIGHT))
                raise
        self._offsets.committed(ending.ended, ending.requests or [], self.release)

    def _resolve(self, ending: _Ending) -> Ended:
        request = ending.request
        assert request is not None

        def ask() -> ResolvedEnd:
            store = self._sender.session.connection.store()
            return resolve_end(store, request, retry_timeout_ms=TRY_TIMEOUT_MS)

        try:
            resolved = self._sender.thread.until_answered(partial(self._progress.asked_to_commit, ask))
        except TxnStoreError as error:
            self._forget_enlisted()
            self._progress.fail_and_raise(transaction_error_of(error, _C.COMMIT))
        if not resolved.is_committed:
            self._sender.session.become(resolved.ended.identity)
            self._progress.is_written = False
            self._forget_enlisted()
            reason = "the enlisted connection broke during its COMMIT and nothing was committed: abort, then start over"
            self._progress.fail_and_raise(KafkaError(KafkaError._TRANSPORT, reason, txn_requires_abort=True))
        return resolved.ended

    # --- inside -----------------------------------------------------------------------------------------------------

    def _forget_enlisted(self) -> None:
        """Forget the connection, which was not committed."""
        enlisted, self._enlisted, self._ending = self._enlisted, None, None
        for name in enlisted.created_topics if enlisted is not None else ():
            self._directory.forget(name)


def _interrupted_error() -> KafkaError:
    reason = "the commit was interrupted before the enlisted connection was committed; nothing was committed"
    return KafkaError(KafkaError._FAIL, reason, txn_requires_abort=True)


def _abortable(error: TxnStoreError) -> KafkaError:
    # None: what is refused is about the caller's connection; only being fenced ends the producer.
    return transaction_error_of(error, None)

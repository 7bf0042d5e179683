"""The transactions of one producer: the calls that begin and end them, and the work behind the calls.

A transaction ends alone, in a database transaction of the application's (`enlistment`), or together with other
databases that vote (`branches`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from txnstore.clients.configuration.configuration import Configuration
from txnstore.clients.membership.metadata import parse_group_metadata
from txnstore.clients.model.errors import KafkaError, KafkaException, joined_error_of
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.clients.producer.arguments import check_same_writers
from txnstore.clients.producer.enlistment import EnlistedBranches, Enlistment
from txnstore.clients.producer.progress import TransactionOffsets, TransactionProgress, followed, may_stand
from txnstore.clients.producer.requests import TRY_TIMEOUT_MS, ProduceRequest
from txnstore.clients.producer.sender import RECORD_ERRORS, Sender, linger_seconds_of
from txnstore.clients.producer.state import (
    ALLOWED_IN,
    NEEDS_TWO_PHASE_COMMIT,
    NEVER_TIMES_OUT,
    SQLITE_HOLDS,
    WORKS_BETWEEN,
    TransactionCall,
    TransactionStage,
    transaction_error_of,
)
from txnstore.clients.producer.thread import DelayedJob
from txnstore.clients.topic_directory import TopicDirectory
from txnstore.db.store import Store
from txnstore.deadline import Deadline
from txnstore.errors import InvalidRequest, PermissionDenied, TransactionAbortable, TxnStoreError
from txnstore.model import GroupMembership, ProducerIdentity
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.outcome import Ended
from txnstore.transactions.tokens import PreparedTxnState, TransactionToken
from txnstore.transactions.writers import begin_transaction

if TYPE_CHECKING:
    from txnstore.clients.producer.pipeline import CommitPipeline
    from txnstore.clients.producer.queue import Accumulator
    from txnstore.db.callers.connections import CallersConnection

Result = TypeVar("Result")

_S = TransactionStage
_C = TransactionCall


class ProducerTransactions:
    """The transactional side of a producer: one at a time, and what ends with it."""

    def __init__(self, progress: TransactionProgress, accumulator: Accumulator, *, two_phase_commit: bool) -> None:
        """Begin as `progress` does, which is in the stage Init; `accumulator` queues the records."""
        self._accumulator = accumulator
        self.transactional_id = progress.transactional_id
        self.progress = self._progress = progress
        self._lock = progress.lock
        self._sender = progress.sender
        self._offsets = TransactionOffsets(progress, outlives_producer=two_phase_commit)
        self._branches = EnlistedBranches(progress)
        self._enlistment = Enlistment(progress, self._offsets, self._branches)
        #: Whether anything was ever enlisted: until then nothing but the log is asked.
        self._has_enlisted = False
        self._two_phase_commit = two_phase_commit
        if not two_phase_commit:
            progress.sender.session.transaction_timeout_seconds = progress.timeout_ms / 1000
        #: Whether `init` was to keep what was prepared and there was nothing: it is complete already (KIP-939).
        self._has_kept_nothing = False
        #: The commits that nobody waits for, from the first one on.
        self._pipeline: CommitPipeline | None = None
        #: Whether the call that is not done is a commit that nobody waits for.
        self._is_ending = False

    # --- the calls --------------------------------------------------------------------------------------------------

    def init(self, timeout_seconds: float, *, keep_prepared: bool = False) -> None:
        """Claim the transactional id; with `keep_prepared` what an older producer has prepared waits to be completed.

        Raises:
            KafkaException: see the class's tables; `_TIMED_OUT` is retriable and resumes.
        """
        if keep_prepared and not self._two_phase_commit:
            raise KafkaException(KafkaError(KafkaError.INVALID_REQUEST, f"keep_prepared_txn {NEEDS_TWO_PHASE_COMMIT}"))
        self._call(_C.INIT, timeout_seconds, partial(self._init_work, keep_prepared=keep_prepared), None)

    def begin(self) -> None:
        """Begin a transaction; nothing is written before its first record.

        Branches of the last transaction that have not ended are left to recovery.  A commit that nobody waits for is
        waited for if its transaction had been written in part before.

        Raises:
            KafkaException: the state does not allow it, or that commit has failed or takes too long.
        """
        if self._is_ending and self._progress.current is _C.COMMIT:
            self.commit(-1.0, self._progress.writers)
        self._is_ending = False
        if self._has_enlisted:
            # Before it has begun: Ctrl-C must not carry a connection of the last transaction into the next.
            with self._progress.in_call(_C.BEGIN):
                self._branches.begin()
        with self._lock:
            self._progress.check_call(_C.BEGIN)
            if self._has_enlisted:
                self._enlistment.release()
            self._has_kept_nothing = False
            self._progress.begin()

    def send_offsets(self, positions: Sequence[TopicPartition], group_metadata: bytes, timeout_seconds: float) -> None:
        """Let the transaction hold consumed offsets.

        Raises:
            KafkaException: the state does not allow it, or the group refuses them.
        """
        valid = [position for position in positions if position.offset >= 0]
        if not valid:
            # Nothing to send is nothing to refuse, whatever the state.
            with self._lock:
                self._progress.check_conflict(_C.SEND_OFFSETS)
            return
        with self._progress.in_call(_C.SEND_OFFSETS):
            try:
                committer = parse_group_metadata(bytes(group_metadata))
            except ValueError as error:
                raise KafkaException(KafkaError(KafkaError._BAD_MSG, str(error))) from None
            if self._sender.thread.run_here(partial(self._offsets.take_at_once, committer, valid)):
                return
            self._ask(partial(self._send_offsets_work, committer, valid), timeout_seconds)

    def token(self, timeout_seconds: float) -> bytes:
        """Make the transaction open in the store, and return what lets other processes join it.

        Writers join before a connection is enlisted, which may keep them from writing.

        Raises:
            KafkaException: see the class's tables; also `_STATE`: a connection is enlisted.
        """
        self._enlistment.refuse("transaction_token() comes before enlist()")
        with self._progress.in_call(_C.TOKEN):
            token = self._ask(self._token_work, timeout_seconds)
            # Only now: nobody joins by one that nobody has.
            self._progress.has_token = True
            return token

    def prepare(self, timeout_seconds: float) -> PreparedTxnState:
        """Send all of the transaction, so that a holder of the answer can commit it later, in another process too.

        Raises:
            KafkaException: see the class's tables; also `_STATE`: a connection is enlisted, whose database transaction
                outlives no process, or others may have joined, who would go on.
        """
        self._enlistment.refuse("a transaction with an enlisted connection cannot be prepared: commit it")
        if not self._two_phase_commit:
            reason = f"prepare_transaction() {NEEDS_TWO_PHASE_COMMIT}"
            raise KafkaException(KafkaError(KafkaError.INVALID_TXN_STATE, reason))
        with self._progress.in_call(_C.PREPARE):
            if self._progress.has_token:
                reason = "what others may write to (transaction_token) cannot be prepared: commit or abort it"
                raise KafkaException(KafkaError(KafkaError._STATE, reason))
            try:
                return self._ask(self._prepare_work, timeout_seconds)
            finally:
                self._progress.serve_reports()

    def commits(self, remembered: PreparedTxnState, timeout_seconds: float) -> bool | None:
        """Return whether what is prepared commits, being what the application remembers; None: there is nothing.

        The producer's own commit or abort is to follow, so that observers of those see this one.

        Raises:
            KafkaException: see the class's tables; also INVALID_TXN_STATE: what is remembered was aborted.
        """
        progress = self._progress
        if progress.current in (_C.COMMIT, _C.ABORT):
            return progress.current is _C.COMMIT
        if self._has_kept_nothing and progress.stage is _S.READY:
            if str(remembered):
                with progress.in_call(_C.COMPLETE):
                    self._ask(partial(progress.check_remembered, remembered), timeout_seconds)
            return None
        with self._lock:
            if progress.stage is not _S.PREPARED and progress.error is None and progress.current is None:
                reason = f"no transaction is prepared: Operation not valid in state {progress.stage.value}"
                raise KafkaException(KafkaError(KafkaError.INVALID_TXN_STATE, reason))
            progress.check_call(_C.COMPLETE)
            return progress.prepared == remembered

    def commit(self, timeout_seconds: float, writers: Collection[int] | None = None) -> None:
        """Commit the transaction: afterwards every reader of committed records sees it.

        Of further writers those count that are named, by default all that have reported.  An enlisted connection is
        committed with it, on this thread; other databases vote before it is decided, and commit after it.

        Raises:
            KafkaException: see the class's tables; also `_STATE`: this is not the thread of an enlisted SQLite
                connection; `_TIMED_OUT`, retriable: it is decided, and a branch has not ended in its database.
        """
        if not self._has_enlisted:
            self._commit_alone(timeout_seconds, writers)
            return
        progress, branches = self._progress, self._branches
        deadline = self._deadline(timeout_seconds)
        if branches.decided:
            check_same_writers(writers, progress.writers)
            branches.finish(deadline, commit=True)
            return
        if progress.current is None and (self._enlistment.is_active or branches.connections):
            with self._lock:
                progress.check_call(_C.COMMIT)
            progress.check_writers(writers)
            self._enlistment.flush()
            branches.flush()
        if branches.connections:
            progress.is_written = True
        commit = self._enlistment.commit if self._enlistment.is_active else self._commit_alone
        try:
            commit(timeout_seconds, writers)
        except BaseException as error:
            if not branches.finish_if_ended(deadline, commit=True):
                branches.give_up(error)
            raise
        if branches.connections:
            branches.decided = True
            branches.finish(deadline, commit=True)

    def _commit_alone(self, timeout_seconds: float, writers: Collection[int] | None) -> None:
        if self._has_kept_nothing and self._progress.stage is _S.READY:
            return
        self._progress.check_writers(writers)
        self._call(_C.COMMIT, timeout_seconds, partial(self._commit_work, writers), writers)

    def commit_async(self) -> Future[None]:
        """Commit the transaction without waiting for it; return what tells of the commit.

        What is wholly in the client is sealed.  Otherwise the commit goes on in the background, and the next
        transaction waits for it; one that has enlisted a connection is committed here and now.

        Raises:
            KafkaException: as `commit`; `_TIMED_OUT`, retriable: too many commits are not done yet.
        """
        progress = self._progress
        progress.serve_reports()
        if progress.current is None and not self._has_enlisted:
            with progress.in_call(_C.COMMIT):
                # One alone, even if others call: nothing overtakes what waits in it.
                pipeline = self._commits()
                if not pipeline.wait_for_room(progress.bounded(-1.0)):
                    reason = "Timed out waiting for the commits before this one; try again"
                    raise KafkaException(KafkaError(KafkaError._TIMED_OUT, reason, retriable=True))
                sealed = pipeline.seal()
            if sealed is not None:
                return sealed
        try:
            self.commit(-1.0 if self._has_enlisted else 0.0)
        except KafkaException as error:
            # An enlisted connection is committed by the caller's thread: what goes on in the background is only a step.
            if error.args[0].code() != KafkaError._TIMED_OUT or progress.work is None or self._has_enlisted:
                raise
            self._is_ending = True
            return followed(progress.work, progress)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _commits(self) -> CommitPipeline:
        if self._pipeline is None:
            # Few producers need it.
            from txnstore.clients.producer.pipeline import CommitPipeline

            self._pipeline = CommitPipeline(self._progress, self._offsets, self._accumulator)
        return self._pipeline

    def abort(self, timeout_seconds: float) -> None:
        """Abort the transaction: nobody will see its records as committed.

        An enlisted connection is rolled back first, on this thread; other databases roll back afterwards.

        Raises:
            KafkaException: see the class's tables; also `_STATE`: this is not the thread of an enlisted SQLite
                connection; `_TIMED_OUT`, retriable: a branch has not ended in its database.
        """
        branches = self._branches
        deadline = self._deadline(timeout_seconds)
        self._end_left_commit(deadline)
        if branches.decided is False:
            branches.finish(deadline, commit=False)
            return
        if branches.connections and branches.are_registered:
            self._progress.is_written = True
        try:
            self._abort(timeout_seconds)
        except BaseException:
            branches.finish_if_ended(deadline, commit=False)
            raise
        if branches.connections:
            branches.decided = False
            branches.finish(deadline, commit=False)

    def _end_left_commit(self, deadline: Deadline) -> None:
        """Wait for a commit that was left to itself; if it has failed, the transaction is the one to be aborted."""
        if not self._is_ending or self._progress.current is not _C.COMMIT:
            return
        try:
            self.commit(deadline.left_seconds(), self._progress.writers)
        except KafkaException as error:
            if not error.args[0].txn_requires_abort():
                raise

    def _abort(self, timeout_seconds: float) -> None:
        self._enlistment.roll_back_to_abort()
        if self._has_kept_nothing and self._progress.stage is _S.READY:
            return
        self._call(_C.ABORT, timeout_seconds, self._abort_work, None)

    def finish(self, timeout_seconds: float) -> None:
        """Let the call that is not done come to its end, and abort what is open then: the producer is being closed.

        Whatever becomes of it, an enlisted connection is its owner's again.

        Raises:
            KafkaException: it took longer, or it failed; recovery will abort what is open.
        """
        deadline = self._deadline(timeout_seconds)
        if self._pipeline:
            self._pipeline.finish(deadline.left_seconds())
        try:
            if self._has_open_transaction:
                self._finish_call(deadline.left_seconds())
        finally:
            # A commit that another thread is in still counts on the votes: without them it would decide alone.
            if not self._progress.is_called:
                self._branches.close()

    def _finish_call(self, timeout_seconds: float) -> None:
        try:
            if self._progress.current is _C.COMMIT:
                self.commit(timeout_seconds, self._progress.writers)
            else:
                self.abort(timeout_seconds)
        finally:
            self._enlistment.let_go()

    @property
    def is_open(self) -> bool:
        """Whether there is something that closing the producer would have to end."""
        return self._has_open_transaction or bool(self._pipeline) or self._branches.has_leftovers

    @property
    def _has_open_transaction(self) -> bool:
        """Whether there is a transaction that would have to be aborted; one that is prepared outlives its producer."""
        may_abort = self._progress.stage in ALLOWED_IN[_C.ABORT] and self._progress.stage is not _S.PREPARED
        return may_abort or self._progress.current in (_C.COMMIT, _C.ABORT)

    # --- enlisting --------------------------------------------------------------------------------------------------

    def enlist(self, given: object, timeout_seconds: float) -> None:
        """Let the transaction end together with the database transaction on a connection of the caller's.

        Raises:
            TypeError: it is not a connection.
            KafkaException: the state does not allow it, or the connection cannot be used; nothing has changed.
        """
        # Brings psycopg along, which few producers need on SQLite.
        from txnstore.db.callers.connections import callers_connection

        if self._pipeline and not self._pipeline.wait_until_done(self._progress.bounded(timeout_seconds)):
            reason = "Timed out waiting for the commits before this transaction; try again"
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, reason, retriable=True))
        self._has_enlisted = True
        with self._progress.in_call(_C.ENLIST):
            try:
                callers = callers_connection(given)
                callers.check_usable()
                store = self._sender.session.connection.store()
                if self._can_hold_everything(store, callers):
                    if self._branches.connections and store.backend.has_one_writer:
                        raise InvalidRequest(SQLITE_HOLDS)
                    self._enlistment.take(store, callers, timeout_seconds)
                else:
                    if self._two_phase_commit:
                        raise InvalidRequest(NEVER_TIMES_OUT)
                    if self._enlistment.keeps_others_out and callers.keeps_prepared:
                        raise InvalidRequest(SQLITE_HOLDS)
                    self._branches.enlist(callers)
            except TxnStoreError as error:
                raise KafkaException(joined_error_of(error)) from error

    def _can_hold_everything(self, store: Store, callers: CallersConnection) -> bool:
        """Return whether the connection leads to the one database that holds the log; one of several only votes."""
        from txnstore.db.callers.on_caller_connection import is_same_store

        is_same, is_alone = False, self._sender.session.connection.is_alone
        try:
            is_same = is_same_store(store, callers)
        except PermissionDenied:
            if is_alone:  # Who only votes need not read the log's tables.
                raise
        if not is_same or is_alone:
            return is_same
        if not callers.keeps_prepared:
            raise InvalidRequest(
                "the store is spread over several SQLite files: no database transaction of one of them can hold the"
                " records of all, and none can vote; write to the outbox in one of them instead"
            )
        return False

    # --- a call and its work ----------------------------------------------------------------------------------------

    def _call(
        self, call: TransactionCall, timeout_seconds: float, work: Callable[[], None], writers: Collection[int] | None
    ) -> None:
        bounded = self._progress.bounded(timeout_seconds, timeouts_max=1 if call is _C.COMMIT else 2)
        first_state, last_state = WORKS_BETWEEN[call]
        with self._progress.in_call(call, writers):
            # What an interrupt has left is taken up where it is: in the first state, under way, or done.
            if self._progress.work is None and self._progress.stage is not last_state:
                try:
                    with self._lock:
                        if self._progress.stage in ALLOWED_IN[call]:
                            self._progress.enter(first_state)
                    if call is _C.ABORT:
                        # Nothing of it is wanted any more; what is on its way is dropped as well.
                        self._offsets.stop_lingering()
                        self._sender.purge(in_queue=True, in_flight=False)
                    self._progress.work = self._progress.submit(partial(self._work_once, first_state, work), call)
                except Exception as error:  # noqa: BLE001 - end_unforeseen() raises what is told of it
                    self._progress.end_unforeseen(call, error)
            is_done = False
            try:
                if self._progress.work is not None:
                    self._progress.wait(self._progress.work, bounded, resumable=True)
                is_done = True
            finally:
                try:
                    # Within the call: a callback may not begin or end what is being ended.
                    self._progress.serve_reports()
                finally:
                    if is_done:
                        with self._lock:
                            is_prepared = call is _C.INIT and self._progress.prepared is not None
                            self._progress.enter(_S.PREPARED if is_prepared else _S.READY)

    def _work_once(self, first_state: TransactionStage, work: Callable[[], None]) -> None:
        """Do the work of a call, on the sender's thread; an interrupted call may have queued it before."""
        if self._progress.stage is first_state:
            work()
        elif self._progress.error is not None and self._progress.stage in (_S.ABORTABLE_ERROR, _S.FATAL_ERROR):
            raise KafkaException(self._progress.error)
        elif self._progress.stage is _S.COMMITTING:
            raise AssertionError("a commit was left without its answer")

    def _ask(self, work: Callable[[threading.Event], Result], timeout_seconds: float) -> Result:
        """Return the answer of work that is cancelled with its call: later it could be about another transaction."""
        is_cancelled = threading.Event()

        def ask() -> Result:
            if self._progress.error is not None:  # A commit that nobody waits for has failed since.
                raise KafkaException(self._progress.error)
            return work(is_cancelled)

        asked = self._progress.submit(ask)
        try:
            return self._progress.wait(asked, self._progress.bounded(timeout_seconds), resumable=False)
        finally:
            is_cancelled.set()
            asked.cancel()

    def _deadline(self, timeout_seconds: float) -> Deadline:
        return Deadline(self._progress.bounded(timeout_seconds))

    # --- the work of the calls; on the sender's thread ----------------------------------------------------------------

    def _coordinator(self) -> TransactionCoordinator:
        return self._progress.coordinator(self._store(), self._sender.session.connection.cluster())

    def _store(self) -> Store:
        """Return the store that coordinates the transactions."""
        return self._sender.session.connection.cluster().coordinator_of(self.transactional_id)

    def _begin_in_store(self) -> None:
        session = self._sender.session
        begin_transaction(
            self._store(),
            self.transactional_id,
            session.identity,
            session.connection.cluster(),
            retry_timeout_ms=TRY_TIMEOUT_MS,
        )
        session.has_begun = True

    def _begin_unless(self, is_cancelled: threading.Event) -> None:
        if not is_cancelled.is_set():
            self._progress.is_written = True
            self._begin_in_store()

    def _init_work(self, *, keep_prepared: bool) -> None:
        def request() -> None:
            cluster = self._sender.session.connection.cluster()
            initialized = cluster.at_coordinator(
                self.transactional_id,
                lambda store: self._progress.coordinator(store, cluster).init_producer_id(
                    self.transactional_id,
                    self._progress.timeout_ms,
                    enable_two_phase_commit=self._two_phase_commit,
                    keep_prepared=keep_prepared,
                    client=self._sender.session.client,
                    retry_timeout_ms=TRY_TIMEOUT_MS,
                ),
            )
            self._sender.session.become(initialized.identity)
            self._progress.prepared = None
            self._has_kept_nothing = keep_prepared and initialized.ongoing is None
            if (ongoing := initialized.ongoing) is not None:
                self._progress.is_written = self._sender.session.has_begun = True
                self._progress.prepared = PreparedTxnState(ongoing.producer_id, ongoing.epoch)

        try:
            self._sender.thread.until_answered(request)
        except TxnStoreError as error:
            self._progress.fail_and_raise(transaction_error_of(error, _C.INIT))
        with self._lock:
            self._progress.enter(_S.READY_NOT_ACKED)

    def _token_work(self, is_cancelled: threading.Event) -> bytes:
        def request() -> bytes:
            store, identity = self._store(), self._sender.session.identity
            self._begin_unless(is_cancelled)
            return bytes(TransactionToken(store.store_uuid, self.transactional_id, identity))

        try:
            return self._sender.thread.until_answered(request)
        except TxnStoreError as error:
            self._progress.fail_and_raise(transaction_error_of(error, _C.TOKEN))

    def _prepare_work(self, is_cancelled: threading.Event) -> PreparedTxnState:
        if is_cancelled.is_set():
            # Behind a commit that nobody waits for: what is open by now may be another transaction.
            return PreparedTxnState()
        self._offsets.stop_lingering()
        session = self._sender.session
        is_open = self._progress.stage is _S.PREPARED
        while True:
            # What is written now tells; where there are several databases, perhaps not the one that coordinates it.
            is_open |= session.connection.is_alone and not (self._accumulator.is_empty and not self._offsets)
            self._sender.send_everything()
            self._progress.check_delivered([])
            try:
                self._offsets.write_all()
                if not is_open:
                    # Its name is never to be another one's, nor that of one that was aborted since.
                    self._sender.thread.until_answered(partial(self._begin_unless, is_cancelled))
                    is_open = True
            except TxnStoreError as error:
                self._progress.fail_and_raise(transaction_error_of(error, _C.PREPARE))
            with self._lock:
                if self._sender.has_something and not is_cancelled.is_set():
                    continue
                name = self._progress.prepared or PreparedTxnState(session.identity.producer_id, session.identity.epoch)
                if self._progress.stage is _S.IN_TRANSACTION and not is_cancelled.is_set():
                    self._progress.prepared = name
                    self._progress.enter(_S.PREPARED)
                return name

    def _send_offsets_work(
        self, committer: GroupMembership, positions: Sequence[TopicPartition], is_cancelled: threading.Event
    ) -> None:
        def request() -> None:
            if not is_cancelled.is_set():
                self._offsets.take(committer, positions)

        try:
            self._sender.thread.until_answered(request)
        except TxnStoreError as error:
            self._progress.fail_and_raise(transaction_error_of(error, _C.SEND_OFFSETS))

    def _commit_work(self, writers: Collection[int] | None) -> None:
        self._offsets.stop_lingering()
        requests: list[ProduceRequest] = []
        try:
            self._sender.last_requests(requests)
            ended = self._answer_of_commit(requests, writers)
        except BaseException:
            # Each once: what has its reports, or has been sent again, is not in the list any more.
            self._sender.fail_requests(requests, KafkaError(KafkaError._PURGE_INFLIGHT))
            raise
        if ended is not None:
            release = self._enlistment.release if self._has_enlisted else lambda: None
            self._offsets.committed(ended, requests, release)
            return
        try:
            self._reset()
        finally:
            with self._lock:
                self._progress.enter(_S.COMMIT_NOT_ACKED)

    def _answer_of_commit(self, requests: list[ProduceRequest], writers: Collection[int] | None) -> Ended | None:
        """Return the answer of the database that coordinates the commit; None: there is nothing to be committed."""
        self._progress.check_delivered(requests)
        if not (self._progress.is_written or requests or self._offsets):
            return None
        if self._has_enlisted and self._branches.will_vote:
            # While the caller waits, or has gone to wait elsewhere.
            try:
                self._sender.thread.until_answered(self._branches.vote)
            except TxnStoreError as error:
                self._progress.fail_and_raise(transaction_error_of(error, None))
        if not requests:
            self._begin_if_unsure()
        return self._ask_to_commit(requests, writers)

    def _begin_if_unsure(self) -> None:
        """Let an empty transaction be open before its end, if a call that was to begin it has timed out."""
        if self._sender.session.has_begun or self._offsets or self._branches.connections:
            return
        try:
            self._sender.thread.until_answered(self._begin_in_store)
        except TxnStoreError as error:
            self._progress.fail_and_raise(transaction_error_of(error, _C.COMMIT))

    def _ask_to_commit(self, requests: list[ProduceRequest], writers: Collection[int] | None) -> Ended:
        is_uncertain = False

        def end_there(coordinator: TransactionCoordinator) -> Ended:
            return coordinator.end_transaction(
                self.transactional_id,
                self._sender.session.identity,
                commit=True,
                appends=requests[0].appends if requests else (),
                offsets=self._offsets.waiting,
                writers=writers,
                is_repeated=is_uncertain,
                has_begun=self._sender.session.has_begun,
                open_group_id=self._offsets.open_group_id,
                in_store=self._offsets.in_store,
                retry_timeout_ms=TRY_TIMEOUT_MS,
            )

        def end() -> Ended:
            nonlocal is_uncertain
            self._progress.is_written = True
            try:
                return self._progress.asked_to_commit(partial(self._progress.at_coordinator, end_there))
            except Exception as error:
                is_uncertain |= may_stand(error)
                raise

        while True:
            with self._lock:
                self._progress.enter(_S.COMMITTING)
            try:
                return self._sender.thread.until_answered(end)
            except TxnStoreError as error:
                if not requests or not isinstance(error, RECORD_ERRORS) or is_uncertain:
                    self._progress.fail_and_raise(transaction_error_of(error, _C.COMMIT))
            # Nothing stands. Some of the records are at fault: their reports say which.
            with self._lock:
                self._progress.enter(_S.BEGIN_COMMIT)
            self._sender.send_again(requests[0])
            requests.clear()
            self._sender.send_everything()
            self._progress.check_delivered([])

    def _abort_work(self) -> None:
        self._sender.settle()
        with self._lock:
            if self._progress.stage is _S.FATAL_ERROR and self._progress.error is not None:
                # An answer to records that were on their way has said that a newer producer is at work.
                raise KafkaException(self._progress.error)
        self._offsets.stop_lingering()
        self._sender.purge(in_queue=True, in_flight=False)
        self._sender.drop_in_flight(KafkaError(KafkaError._PURGE_INFLIGHT))
        if self._progress.is_written:
            with self._lock:
                self._progress.enter(_S.ABORTING)
            try:
                self._abort_in_store()
            except TxnStoreError as error:
                self._progress.fail_and_raise(transaction_error_of(error, _C.COMMIT))
        self._reset()
        with self._lock:
            self._progress.error = None
            self._progress.enter(_S.ABORT_NOT_ACKED)

    def _abort_in_store(self) -> None:
        session = self._sender.session

        def end() -> Ended:
            return self._coordinator().end_transaction(
                self.transactional_id, session.identity, commit=False, retry_timeout_ms=TRY_TIMEOUT_MS
            )

        def reclaim() -> None:
            # The abort from outside has raised the epoch by one; a newer producer would have raised it once more.
            before = session.identity
            expected = ProducerIdentity(before.producer_id, before.epoch + 1)
            initialized = self._coordinator().init_producer_id(
                self.transactional_id,
                self._progress.timeout_ms,
                expected=expected,
                enable_two_phase_commit=self._two_phase_commit,
                client=session.client,
                retry_timeout_ms=TRY_TIMEOUT_MS,
            )
            session.become(initialized.identity)

        try:
            ended = self._sender.thread.until_answered(end)
        except TransactionAbortable:
            self._sender.thread.until_answered(reclaim)
            return
        session.become(ended.identity)

    def _reset(self) -> None:
        self._progress.reset()
        self._offsets.clear()
        if self._has_enlisted:
            self._enlistment.release()


def make_transactions(
    configuration: Configuration,
    accumulator: Accumulator,
    sender: Sender,
    directory: TopicDirectory,
    serve_reports: Callable[[], object],
) -> tuple[ProducerTransactions, TransactionProgress]:
    """Return the transactions of a producer with this configuration, and how far they are."""
    delayed = DelayedJob(sender.thread.alarm, linger_seconds_of(configuration))
    sender.thread.timed_work.append(delayed)
    progress = TransactionProgress(
        configuration["transactional.id"],
        configuration["transaction.timeout.ms"],
        sender,
        directory,
        delayed=delayed,
        serve_reports=serve_reports,
        transaction_group=configuration["txnstore.transaction.group"],
    )
    two_phase_commit: bool = configuration["transaction.two.phase.commit.enable"]
    return ProducerTransactions(progress, accumulator, two_phase_commit=two_phase_commit), progress

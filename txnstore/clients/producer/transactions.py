"""This file is the transactions of one producer: the five calls, the state that they move, and the work behind them.

A call puts its work on the sender's thread and waits as long as its caller allows.  What takes longer goes on in the
background, and the same call takes it up again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from functools import partial
from typing import Final, NoReturn, TypeVar

from txnstore.clients.membership.metadata import parse_group_metadata
from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.clients.producer.requests import TRY_TIMEOUT_MS, ProduceRequest
from txnstore.clients.producer.sender import RECORD_ERRORS, Sender
from txnstore.clients.producer.thread import DelayedJob, SenderStopped
from txnstore.clients.producer.transaction_errors import transaction_error_of
from txnstore.clients.producer.transaction_states import (
    ALLOWED_IN,
    BETWEEN_CALLS,
    ENTERED_FROM,
    RESUMABLE,
    WORKS_BETWEEN,
    ProducerState,
    TransactionCall,
)
from txnstore.clients.topic_directory import TopicDirectory
from txnstore.db.cluster.cluster import repaired
from txnstore.db.store import Store
from txnstore.errors import TransactionAbortable, TxnStoreError, UnknownTopicOrPartition
from txnstore.groups.offsets import check_committer
from txnstore.model import NO_GENERATION, GroupMembership, OffsetAndMetadata, ProducerIdentity
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.locked import SentOffsets
from txnstore.transactions.outcome import Ended
from txnstore.transactions.tokens import PreparedTxnState, TransactionToken
from txnstore.transactions.writers import begin_transaction

Result = TypeVar("Result")

_S = ProducerState
_C = TransactionCall

CLOSED_TEXT: Final = "Producer has been closed"
NEEDS_TWO_PHASE_COMMIT: Final = "needs transaction.two.phase.commit.enable in the producer's configuration"


class ProducerTransactions:
    """The transactional side of a producer; hears of deliveries as the sender's listener."""

    def __init__(  # noqa: PLR0917 - the parts that it works with
        self,
        transactional_id: str,
        timeout_ms: int,
        changed: threading.Condition,
        sender: Sender,
        directory: TopicDirectory,
        delayed: DelayedJob,
        serve_reports: Callable[[], object],
        *,
        two_phase_commit: bool = False,
    ) -> None:
        """Begin in the state Init; `serve_reports` is called before a call returns that has sent records."""
        self._two_phase_commit = two_phase_commit
        #: What is prepared; None: nothing.
        self._prepared: PreparedTxnState | None = None
        #: Whether `init` was to keep what was prepared and there was nothing: it is complete already (KIP-939).
        self._has_kept_nothing = False
        self._directory = directory
        self._delayed = delayed
        self._serve_reports = serve_reports
        self.transactional_id = transactional_id
        self.state = _S.INIT
        self._timeout_ms = timeout_ms
        if not two_phase_commit:
            sender.session.transaction_timeout_seconds = timeout_ms / 1000
        self._changed = changed
        self._sender = sender
        self._error: KafkaError | None = None
        #: The call that is not done, whether a thread is in it, and its work.
        self._current: TransactionCall | None = None
        self._is_called = False
        self._work: Future[None] | None = None
        #: Whether the transaction may be open in the store.
        self._is_written = False
        #: Whether other processes may have joined it.
        self._has_token = False
        self._failed_count = 0
        #: Offsets that go with the commit, or when they have lingered.
        self._offsets: dict[str, SentOffsets] = {}
        #: Whether they all wait for the commit, which nothing else may come before.
        self._holds_offsets = False
        #: Whether the call that is being made has left its work to the background.
        self._is_left = False

    # --- the calls --------------------------------------------------------------------------------------------------

    def init(self, timeout_seconds: float, *, keep_prepared: bool = False) -> None:
        """Claim the transactional id; with `keep_prepared` what an older producer has prepared waits to be completed.

        Raises:
            KafkaException: see the class's tables; `_TIMED_OUT` is retriable and resumes.
        """
        if keep_prepared and not self._two_phase_commit:
            raise KafkaException(KafkaError(KafkaError.INVALID_REQUEST, f"keep_prepared_txn {NEEDS_TWO_PHASE_COMMIT}"))
        longest_seconds = 2 * self._timeout_ms / 1000
        work = partial(self._init_work, keep_prepared=keep_prepared)
        self._call(_C.INIT, timeout_seconds, longest_seconds, work)

    def begin(self) -> None:
        """Begin a transaction; nothing is written before its first record.

        Raises:
            KafkaException: the state does not allow it.
        """
        with self._in_call(_C.BEGIN), self._changed:
            self._enter(_S.IN_TRANSACTION)
            self._is_written = self._has_token = self._has_kept_nothing = False
            self._sender.session.begin_transaction()
            self._failed_count = 0

    def send_offsets(self, positions: Sequence[TopicPartition], group_metadata: bytes, timeout_seconds: float) -> None:
        """Let the transaction hold consumed offsets.

        Raises:
            KafkaException: the state does not allow it, or the group refuses them.
        """
        valid = [position for position in positions if position.offset >= 0]
        if not valid:
            # Nothing to send is nothing to refuse, whatever the state.
            with self._changed:
                self._check_conflict(_C.SEND_OFFSETS)
            return
        with self._in_call(_C.SEND_OFFSETS):
            try:
                committer = parse_group_metadata(bytes(group_metadata))
            except ValueError as error:
                raise KafkaException(KafkaError(KafkaError._BAD_MSG, str(error))) from None
            is_cancelled = threading.Event()
            work = self._submit(lambda: self._send_offsets_work(committer, valid, is_cancelled))
            try:
                self._wait(work, timeout_seconds, self._timeout_ms / 1000, resumable=False)
            finally:
                # Never later: it could be another transaction's by then.
                is_cancelled.set()
                work.cancel()

    def token(self, timeout_seconds: float) -> bytes:
        """Make the transaction open in the store, and return what lets other processes join it.

        Raises:
            KafkaException: see the class's tables.
        """
        with self._in_call(_C.TOKEN):
            is_cancelled = threading.Event()
            work = self._submit(lambda: self._token_work(is_cancelled))
            try:
                return self._wait(work, timeout_seconds, self._timeout_ms / 1000, resumable=False)
            finally:
                # Never later: it could begin another transaction by then.
                is_cancelled.set()
                work.cancel()

    def prepare(self, timeout_seconds: float) -> PreparedTxnState:
        """Send all of the transaction, so that whoever has the answer can commit it later, in another process too.

        Raises:
            KafkaException: see the class's tables.
        """
        if not self._two_phase_commit:
            raise KafkaException(
                KafkaError(KafkaError.INVALID_TXN_STATE, f"prepare_transaction() {NEEDS_TWO_PHASE_COMMIT}")
            )
        with self._in_call(_C.PREPARE):
            is_cancelled = threading.Event()
            work = self._submit(lambda: self._prepare_work(is_cancelled))
            try:
                return self._wait(work, timeout_seconds, self._timeout_ms / 1000, resumable=False)
            finally:
                is_cancelled.set()
                work.cancel()
                self._serve_reports()

    def complete(self, remembered: PreparedTxnState, timeout_seconds: float) -> None:
        """Commit what is prepared if it is what the application remembers, else abort it.

        Raises:
            KafkaException: see the class's tables.
        """
        if self._current in (_C.COMMIT, _C.ABORT):
            commit = self._current is _C.COMMIT
        elif self._has_kept_nothing and self.state is _S.READY:
            return
        else:
            with self._changed:
                if self.state not in ALLOWED_IN[_C.COMPLETE] and self._error is None and self._current is None:
                    reason = f"no transaction is prepared: Operation not valid in state {self.state.value}"
                    raise KafkaException(KafkaError(KafkaError.INVALID_TXN_STATE, reason))
                self._check_call(_C.COMPLETE)
                commit = self._prepared == remembered
        if commit:
            self.commit(timeout_seconds)
        else:
            self.abort(timeout_seconds)

    def commit(self, timeout_seconds: float, writers: Collection[int] | None = None) -> None:
        """Commit the transaction: afterwards every reader of committed records sees it.

        Of further writers those count that are named, by default all that have reported.

        Raises:
            KafkaException: see the class's tables.
        """
        if self._has_kept_nothing and self.state is _S.READY:
            return
        self._check_writers(writers)
        work = partial(self._commit_work, writers)
        self._call(_C.COMMIT, timeout_seconds, self._timeout_ms / 1000, work)

    def abort(self, timeout_seconds: float) -> None:
        """Abort the transaction: nobody will see its records as committed.

        Raises:
            KafkaException: see the class's tables.
        """
        if self._has_kept_nothing and self.state is _S.READY:
            return
        longest_seconds = 2 * self._timeout_ms / 1000
        self._call(_C.ABORT, timeout_seconds, longest_seconds, self._abort_work)

    def finish(self, timeout_seconds: float) -> None:
        """Let the call that is not done come to its end, and abort what is open then: the producer is being closed.

        Raises:
            KafkaException: it took longer, or it failed; recovery will abort what is open.
        """
        current = self._current
        if current is _C.COMMIT:
            self.commit(timeout_seconds)
        elif current is _C.ABORT or self.is_open:
            self.abort(timeout_seconds)

    def refuse_record(self) -> NoReturn:
        """Raise what `produce` raises outside of a transaction."""
        if self.state is _S.FATAL_ERROR:
            raise KafkaException(KafkaError(KafkaError._FATAL, "Unable to produce message: Local: Fatal error"))
        raise KafkaException(KafkaError(KafkaError._STATE, "Unable to produce message: Local: Erroneous state"))

    @property
    def is_open(self) -> bool:
        """Whether there is a transaction that would have to be aborted; one that is prepared outlives its producer."""
        may_abort = self.state in ALLOWED_IN[_C.ABORT] and self.state is not _S.PREPARED
        return may_abort or self._current in (_C.COMMIT, _C.ABORT)

    # --- what the sender tells ----------------------------------------------------------------------------------------

    def writing(self) -> None:
        """Take note that the transaction may be open in the store."""
        self._is_written = True

    def delivery_failed(self, record_count: int) -> None:
        """Count records that make the transaction incomplete."""
        with self._changed:
            self._failed_count += record_count

    def records_refused(self, error: KafkaError) -> None:
        """Let the transaction be aborted: the store does not take a record of it."""
        reason = f"{error.str()}: the transaction must be aborted"
        self._fail(KafkaError(error.code(), reason, txn_requires_abort=True))

    def transaction_failed(self, error: TxnStoreError) -> None:
        """Let the transaction be aborted, or the producer be closed."""
        self._fail(transaction_error_of(error, None))

    # --- entering and leaving a call ----------------------------------------------------------------------------------

    def _call(
        self, call: TransactionCall, timeout_seconds: float, longest_seconds: float, work: Callable[[], None]
    ) -> None:
        first_state, last_state = WORKS_BETWEEN[call]
        with self._in_call(call):
            # What an interrupt has left is taken up where it is: in the first state, under way, or done.
            if self._work is None and self.state is not last_state:
                with self._changed:
                    if self.state in ALLOWED_IN[call]:
                        self._enter(first_state)
                if call is _C.ABORT:
                    # Nothing of it is wanted any more; what is on its way is dropped as well.
                    self._delayed.forget()
                    self._sender.purge(in_queue=True, in_flight=False)
                self._work = self._submit(partial(self._work_once, first_state, work))
            is_done = False
            try:
                if self._work is not None:
                    self._wait(self._work, timeout_seconds, longest_seconds, resumable=True)
                is_done = True
            finally:
                try:
                    # Within the call: a callback may not begin or end what is being ended.
                    self._serve_reports()
                finally:
                    if is_done:
                        with self._changed:
                            is_prepared = call is _C.INIT and self._prepared is not None
                            self._enter(_S.PREPARED if is_prepared else _S.READY)

    def _work_once(self, first_state: ProducerState, work: Callable[[], None]) -> None:
        """Do the work of a call, on the sender's thread; an interrupted call may have queued it before."""
        if self.state is first_state:
            work()
        elif self._error is not None and self.state in (_S.ABORTABLE_ERROR, _S.FATAL_ERROR):
            raise KafkaException(self._error)

    @contextmanager
    def _in_call(self, call: TransactionCall) -> Iterator[None]:
        is_entered = is_interrupted = False
        try:
            with self._changed:
                self._check_call(call)
                is_entered = True
                self._current = call
                self._is_called = True
                self._is_left = False
            yield
        except BaseException as error:
            is_interrupted = not isinstance(error, Exception)
            raise
        finally:
            if is_entered:
                try:
                    self._leave(call, is_interrupted=is_interrupted)
                except BaseException:
                    # A second interrupt, or the first one right here: nobody else would ever leave it.
                    self._leave(call, is_interrupted=True)
                    raise

    def _leave(self, call: TransactionCall, *, is_interrupted: bool) -> None:
        with self._changed:
            self._is_called = False
            if call in RESUMABLE:
                is_left = self._work is not None and (self._is_left or not self._work.done())
                if is_left or (is_interrupted and self.state not in BETWEEN_CALLS):
                    return
            self._current = self._work = None

    def _check_conflict(self, call: TransactionCall) -> None:
        if self._current is not None and self._current is not call:
            reason = f"Conflicting {self._current.value} API call is already in progress"
            raise KafkaException(KafkaError(KafkaError._CONFLICT, reason, retriable=True))
        if self._is_called:
            reason = f"Simultaneous {call.value} API calls not allowed"
            raise KafkaException(KafkaError(KafkaError._PREV_IN_PROGRESS, reason, retriable=True))

    def _check_call(self, call: TransactionCall) -> None:
        self._check_conflict(call)
        if self._current is None and self.state not in ALLOWED_IN[call]:
            if self._error is not None and self.state in (_S.ABORTABLE_ERROR, _S.FATAL_ERROR):
                raise KafkaException(self._error)
            raise KafkaException(KafkaError(KafkaError._STATE, f"Operation not valid in state {self.state.value}"))

    def _submit(self, work: Callable[[], Result]) -> Future[Result]:
        try:
            return self._sender.thread.submit(work)
        except SenderStopped:
            raise RuntimeError(CLOSED_TEXT) from None

    def _wait(self, work: Future[Result], timeout_seconds: float, longest_seconds: float, *, resumable: bool) -> Result:
        bounded = timeout_seconds if 0 <= timeout_seconds <= longest_seconds else longest_seconds
        try:
            return work.result(bounded)
        except FutureTimeoutError:
            # The work may be done by the time anybody looks: it is taken up again all the same.
            self._is_left = resumable
            hint = "retry call to resume" if resumable else "nothing of it is done later; repeat the call"
            reason = f"Timed out waiting for operation to finish, {hint}"
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, reason, retriable=True)) from None
        except SenderStopped:
            raise RuntimeError(CLOSED_TEXT) from None

    def _check_writers(self, writers: Collection[int] | None) -> None:
        if writers and not self._has_token:
            reason = (
                "no writer has joined this transaction: transaction_token() lets others join; nothing was committed"
            )
            raise KafkaException(KafkaError(KafkaError._INVALID_ARG, reason))

    def _enter(self, state: ProducerState) -> None:
        assert self.state in ENTERED_FROM[state], f"{self.state.value} to {state.value}"
        self.state = state
        self._changed.notify_all()

    def _fail(self, error: KafkaError) -> None:
        """Enter the state of an error, and drop the records of the transaction that wait."""
        target = _S.FATAL_ERROR if error.fatal() else _S.ABORTABLE_ERROR
        with self._changed:
            if self.state is _S.FATAL_ERROR or self.state not in ENTERED_FROM[target]:
                return
            self._error = error
            self._enter(target)
        if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            # Of a topic that was deleted and made anew, the next transaction is to know the partitions that it has now.
            self._directory.forget_all()
        self._delayed.forget()
        self._sender.purge(in_queue=True, in_flight=False)
        self._sender.give_up_in_flight(KafkaError(KafkaError._PURGE_INFLIGHT))
        if error.fatal():
            self._sender.thread.report_fatal(error)

    def _fail_and_raise(self, error: KafkaError) -> NoReturn:
        self._fail(error)
        raise KafkaException(error)

    # --- the work of the calls; on the sender's thread ----------------------------------------------------------------

    def _coordinator(self) -> TransactionCoordinator:
        cluster = self._sender.session.connection.cluster()
        return TransactionCoordinator(cluster.coordinator_of(self.transactional_id), cluster)

    def _at_coordinator(self, call: Callable[[TransactionCoordinator], Result]) -> Result:
        """Make a call; again if the coordinator's database had not heard of a partition that there is."""
        cluster = self._sender.session.connection.cluster()
        coordinator_id = cluster.coordinator_id_of(self.transactional_id)
        return repaired(cluster, coordinator_id, lambda store: call(TransactionCoordinator(store, cluster)))

    def _store(self) -> Store:
        """Return the store that coordinates the transactions."""
        return self._sender.session.connection.cluster().coordinator_of(self.transactional_id)

    def _init_work(self, *, keep_prepared: bool) -> None:
        def request() -> None:
            cluster = self._sender.session.connection.cluster()
            initialized = cluster.at_coordinator(
                self.transactional_id,
                lambda store: TransactionCoordinator(store, cluster).init_producer_id(
                    self.transactional_id,
                    self._timeout_ms,
                    enable_two_phase_commit=self._two_phase_commit,
                    keep_prepared=keep_prepared,
                    retry_timeout_ms=TRY_TIMEOUT_MS,
                ),
            )
            self._sender.session.become(initialized.identity)
            ongoing = initialized.ongoing
            self._has_kept_nothing = keep_prepared and ongoing is None
            if ongoing is not None:
                self._is_written = True
                self._prepared = PreparedTxnState(ongoing.producer_id, ongoing.epoch)

        try:
            self._sender.thread.until_answered(request)
        except TxnStoreError as error:
            self._fail_and_raise(transaction_error_of(error, _C.INIT))
        with self._changed:
            self._enter(_S.READY_NOT_ACKED)

    def _token_work(self, is_cancelled: threading.Event) -> bytes:
        def request() -> bytes:
            store, identity = self._store(), self._sender.session.identity
            if not is_cancelled.is_set():
                self._is_written = self._has_token = True
                cluster = self._sender.session.connection.cluster()
                begin_transaction(store, self.transactional_id, identity, cluster, retry_timeout_ms=TRY_TIMEOUT_MS)
            return bytes(TransactionToken(store.store_uuid, self.transactional_id, identity))

        try:
            return self._sender.thread.until_answered(request)
        except TxnStoreError as error:
            self._fail_and_raise(transaction_error_of(error, _C.TOKEN))

    def _prepare_work(self, is_cancelled: threading.Event) -> PreparedTxnState:
        self._delayed.forget()
        while True:
            self._sender.send_everything()
            self._check_delivered(None)
            try:
                for group_id, sent in list(self._offsets.items()):
                    self._sender.thread.until_answered(partial(self._write_offsets, sent))
                    del self._offsets[group_id]
            except TxnStoreError as error:
                self._fail_and_raise(transaction_error_of(error, _C.SEND_OFFSETS))
            self._give_name(is_cancelled)
            with self._changed:
                if self._sender.has_something and not is_cancelled.is_set():
                    continue
                if self._prepared is None:
                    identity = self._sender.session.identity
                    self._prepared = PreparedTxnState(identity.producer_id, identity.epoch)
                if self.state is _S.IN_TRANSACTION and not is_cancelled.is_set():
                    self._enter(_S.PREPARED)
                return self._prepared

    def _give_name(self, is_cancelled: threading.Event) -> None:
        """Let the transaction be open in the store, empty or not, so that its name is never another one's."""
        session = self._sender.session
        if self.state is _S.PREPARED or session.has_begun:
            return

        def begin() -> None:
            if not is_cancelled.is_set():
                self._is_written = True
                begin_transaction(
                    self._store(),
                    self.transactional_id,
                    session.identity,
                    session.connection.cluster(),
                    retry_timeout_ms=TRY_TIMEOUT_MS,
                )
                session.has_begun = True

        try:
            self._sender.thread.until_answered(begin)
        except TxnStoreError as error:
            self._fail_and_raise(transaction_error_of(error, _C.PREPARE))

    def _send_offsets_work(
        self, committer: GroupMembership, positions: Sequence[TopicPartition], is_cancelled: threading.Event
    ) -> None:
        def request() -> None:
            if is_cancelled.is_set():
                return
            sent = SentOffsets(committer, self._offsets_by_id(positions))
            if committer.generation == NO_GENERATION and not self._holds_offsets:
                # Nobody but the pending offsets keeps another reader of the group from going on at the old ones.
                self._write_offsets(sent)
                return
            # The group's generation does, so they may go with the commit: refused now, if they will be.
            store = self._sender.session.connection.cluster().coordinator_of(committer.group_id)
            store.read(lambda connection: check_committer(connection, committer), retry_timeout_ms=TRY_TIMEOUT_MS)
            self._keep_offsets(sent)

        try:
            self._sender.thread.until_answered(request)
        except TxnStoreError as error:
            self._fail_and_raise(transaction_error_of(error, _C.SEND_OFFSETS))

    def _offsets_by_id(self, positions: Iterable[TopicPartition]) -> dict[int, OffsetAndMetadata]:
        positions = list(positions)
        topics = self._directory.find({position.topic for position in positions})
        offsets: dict[int, OffsetAndMetadata] = {}
        for position in positions:
            topic = topics.get(position.topic)
            if topic is None:
                raise UnknownTopicOrPartition(f"there is no topic {position.topic[:80]!r} to commit an offset of")
            epoch = position.leader_epoch
            offsets[topic.partition_id(position.partition)] = OffsetAndMetadata(
                position.offset, -1 if epoch is None else epoch, position.metadata
            )
        return offsets

    def _keep_offsets(self, sent: SentOffsets) -> None:
        known = self._offsets.get(sent.committer.group_id)
        offsets = {**known.offsets, **sent.offsets} if known is not None else sent.offsets
        self._offsets[sent.committer.group_id] = SentOffsets(sent.committer, offsets)
        if not self._holds_offsets:
            self._delayed.set(self._write_kept_offsets)

    def _write_kept_offsets(self) -> None:
        """Make offsets pending that have waited for the commit for long enough."""
        for group_id, sent in list(self._offsets.items()):
            try:
                self._write_offsets(sent)
            except TxnStoreError as error:
                if error.retriable or error.outcome_unknown:
                    self._sender.thread.backoff.retry_later(error)
                    self._delayed.set(self._write_kept_offsets)
                else:
                    self._fail(transaction_error_of(error, _C.SEND_OFFSETS))
                return
            del self._offsets[group_id]

    def _write_offsets(self, sent: SentOffsets) -> None:
        self._is_written = True
        self._at_coordinator(
            lambda coordinator: coordinator.send_offsets(
                self.transactional_id, self._sender.session.identity, sent, retry_timeout_ms=TRY_TIMEOUT_MS
            )
        )
        self._sender.session.has_begun = True

    def _commit_work(self, writers: Collection[int] | None) -> None:
        self._delayed.forget()
        request = self._sender.last_request()
        self._check_delivered(request)
        if self._is_written or request is not None or self._offsets:
            with self._changed:
                self._enter(_S.COMMITTING)
            self._commit_in_store(request, writers)
        self._reset()
        with self._changed:
            self._enter(_S.COMMIT_NOT_ACKED)

    def _check_delivered(self, request: ProduceRequest | None) -> None:
        """Refuse to commit if records are missing; what was to go with the commit is dropped then."""
        if request is not None and (self._failed_count or self._error is not None):
            # Its sequence numbers are used up: the abort has to bring a new epoch.
            self._is_written = True
            self._sender.fail_request(request, KafkaError(KafkaError._PURGE_QUEUE))
        if self._error is not None:
            raise KafkaException(self._error)
        if self._failed_count:
            reason = f"{self._failed_count} message(s) failed delivery (see individual delivery reports)"
            self._fail_and_raise(KafkaError(KafkaError._INCONSISTENT, reason, txn_requires_abort=True))

    def _commit_in_store(self, request: ProduceRequest | None, writers: Collection[int] | None) -> None:
        is_uncertain = False

        def end() -> Ended:
            nonlocal is_uncertain
            self._is_written = True
            try:
                return self._at_coordinator(
                    lambda coordinator: coordinator.end_transaction(
                        self.transactional_id,
                        self._sender.session.identity,
                        commit=True,
                        appends=request.appends if request is not None else (),
                        offsets=list(self._offsets.values()),
                        writers=writers,
                        is_repeated=is_uncertain,
                        retry_timeout_ms=TRY_TIMEOUT_MS,
                    )
                )
            except TxnStoreError as error:
                is_uncertain |= error.outcome_unknown
                raise

        while True:
            try:
                ended = self._sender.thread.until_answered(end)
            except SenderStopped:
                if request is not None:
                    self._sender.fail_request(request, KafkaError(KafkaError._PURGE_INFLIGHT))
                raise
            except TxnStoreError as error:
                if request is None or not isinstance(error, RECORD_ERRORS) or is_uncertain:
                    if request is not None:
                        self._sender.fail_request(request, KafkaError(KafkaError._PURGE_INFLIGHT))
                    self._fail_and_raise(transaction_error_of(error, _C.COMMIT))
                # Some of the records are at fault: their reports say which.
                self._sender.send_again(request)
                request = None
                self._sender.send_everything()
                self._check_delivered(None)
                continue
            self._sender.session.become(ended.identity)
            if request is not None:
                self._sender.report(request, ended.appended)
            return

    def _abort_work(self) -> None:
        self._sender.settle()
        with self._changed:
            if self.state is _S.FATAL_ERROR and self._error is not None:
                # An answer to records that were on their way has said that a newer producer is at work.
                raise KafkaException(self._error)
        self._delayed.forget()
        self._sender.purge(in_queue=True, in_flight=False)
        self._sender.drop_in_flight(KafkaError(KafkaError._PURGE_INFLIGHT))
        if self._is_written:
            with self._changed:
                self._enter(_S.ABORTING)
            try:
                self._abort_in_store()
            except TxnStoreError as error:
                self._fail_and_raise(transaction_error_of(error, _C.COMMIT))
        self._reset()
        with self._changed:
            self._error = None
            self._enter(_S.ABORT_NOT_ACKED)

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
                self._timeout_ms,
                expected=expected,
                enable_two_phase_commit=self._two_phase_commit,
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
        with self._changed:
            self._is_written = self._has_token = False
            self._prepared = None
            self._failed_count = 0
            self._offsets.clear()

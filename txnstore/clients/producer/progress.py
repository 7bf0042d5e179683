"""The progress of a producer's transactions: the stage that they are in, the call that is being made, and its work.

A call puts its work on the sender's thread and waits as long as its caller allows.  What takes longer goes on in the
background, and the same call takes it up again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from txnstore.clients.model.errors import KafkaError, KafkaException, kafka_error_of, kafka_exception_of
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.clients.producer.arguments import check_same_writers
from txnstore.clients.producer.requests import TRY_TIMEOUT_MS, ProduceRequest, timed_out
from txnstore.clients.producer.state import (
    ALLOWED_IN,
    BETWEEN_CALLS,
    CLOSED_TEXT,
    ENTERED_FROM,
    MADE_AGAIN_IN,
    RESUMABLE,
    WORKS_BETWEEN,
    TransactionCall,
    TransactionStage,
    failed_delivery,
    is_closed,
    transaction_error_of,
)
from txnstore.clients.producer.thread import SenderStopped
from txnstore.db.cluster.cluster import repaired
from txnstore.deadline import bounded, give, new_future, result_within, to_its_end
from txnstore.errors import (
    OutcomeForgotten,
    OutcomeUnknown,
    TransactionAbortable,
    TxnStoreError,
    UnknownTopicOrPartition,
)
from txnstore.groups.offsets import check_committer
from txnstore.model import NO_GENERATION, GroupMembership, OffsetAndMetadata, ProducerIdentity
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.outcome import check_remembered
from txnstore.transactions.tokens import PreparedTxnState
from txnstore.transactions.transaction import InStore, SentOffsets

if TYPE_CHECKING:
    from txnstore.clients.producer.sender import Sender
    from txnstore.clients.producer.thread import DelayedJob
    from txnstore.clients.topic_directory import TopicDirectory
    from txnstore.db.callers.connections import CallersConnection
    from txnstore.db.cluster.cluster import Cluster
    from txnstore.db.store import Store
    from txnstore.log.append import Appended
    from txnstore.log.topics import Topic
    from txnstore.transactions.outcome import Ended

Result = TypeVar("Result")

_S = TransactionStage
#: Said by the partitions or settings of a topic as it was last read.
_CODES_OF_TOPICS: Final = {
    KafkaError.INVALID_RECORD,
    KafkaError.INVALID_TIMESTAMP,
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
}

_log = logging.getLogger(__name__)


class TransactionProgress:
    """How far the transactions of one producer are; hears of deliveries as the sender's listener."""

    def __init__(
        self,
        transactional_id: str,
        timeout_ms: int,
        sender: Sender,
        directory: TopicDirectory,
        *,
        delayed: DelayedJob,
        serve_reports: Callable[[], object],
        transaction_group: str | None = None,
    ) -> None:
        """Begin in the stage Init, and hear of the sender's deliveries from now on.

        `delayed` is work for the transaction that its end makes needless; `serve_reports` is called before a call
        returns that has sent records.
        """
        self.transactional_id = transactional_id
        self.timeout_ms = timeout_ms
        self.transaction_group = transaction_group
        self.sender = sender
        self.directory = directory
        self.delayed = delayed
        self.serve_reports = serve_reports
        self.changed = sender.thread.changed
        """The producer's one lock, for threads that wait for others or tell them."""
        self.lock = sender.thread.alarm.lock
        """The lock by itself, which is much faster to take."""
        self.stage = _S.INIT
        self.error: KafkaError | None = None
        """Why the transaction has to be aborted, or the producer is finished."""
        self.current: TransactionCall | None = None
        """The call that is not done."""
        self.last: TransactionCall | None = None
        """The call that was made last; between two transactions the one that has ended the last of them."""
        self.writers: Collection[int] | None = None
        """The further writers that it commits, or the last commit did; None: all that have reported."""
        self.is_called = False
        """Whether a thread is in it."""
        self.work: Future[None] | None = None
        """Its work."""
        self.is_written = False
        """Whether the transaction may be open in the store."""
        self.has_sent_records = False
        """Whether records of it may be there before its commit."""
        self.has_token = False
        """Whether other processes may have joined it: the caller has what lets them."""
        self.prepared: PreparedTxnState | None = None
        """What is prepared, if anything is."""
        self.when_fatal: Callable[[], object] | None = None
        """What a fatal error does to whatever was to end with the transaction."""
        self.before_work: Callable[[], None] | None = None
        """What the sender's thread does before the work of a call: the commits that nobody waits for."""
        self._failed_count = 0
        self._first_failure = ""
        #: Since when, by the monotonic clock, nothing but mistakes of ours has come between a commit and its answer.
        self._mistaken_since: float | None = None
        #: Whether the call that is being made has left its work to the background.
        self._is_left = False
        sender.listener = self

    # --- the calls --------------------------------------------------------------------------------------------------

    @contextmanager
    def in_call(self, call: TransactionCall, writers: Collection[int] | None = None) -> Iterator[None]:
        """Make a call, if the stage allows it and no other one is being made; a commit is of these `writers`.

        A resumable call whose work is not done at the end is left open for the same call to take it up.
        """
        # Until the opposite is known: a second Ctrl-C would come in between.
        is_entered, is_interrupted = False, True
        try:
            with self.lock:
                self.check_call(call)
                if self.current is None:
                    self.writers = writers
                else:
                    check_same_writers(writers, self.writers)
                is_entered = True
                self.current = self.last = call
                self.is_called = True
                self._is_left = False
            yield
            is_interrupted = False
        except KafkaException:
            is_interrupted = False
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
        with self.lock:
            self.is_called = False
            if call in RESUMABLE:
                is_left = self.work is not None and (self._is_left or not self.work.done())
                if is_left or (is_interrupted and self.stage not in BETWEEN_CALLS):
                    if not is_left:
                        self.work = None
                    return
                if self.stage is WORKS_BETWEEN[call][1]:
                    # It is done, and something else has failed: the same call takes the answer.
                    self.work = None
                    return
            self.current = self.work = None

    def check_conflict(self, call: TransactionCall) -> None:
        """Refuse a call while another one is being made; under the lock."""
        if self.current is not None and self.current is not call:
            reason = f"Conflicting {self.current.value} API call is already in progress"
            raise KafkaException(KafkaError(KafkaError._CONFLICT, reason, retriable=True))
        if self.is_called:
            reason = f"Simultaneous {call.value} API calls not allowed"
            raise KafkaException(KafkaError(KafkaError._PREV_IN_PROGRESS, reason, retriable=True))

    def check_call(self, call: TransactionCall) -> None:
        """Refuse a call that the stage does not allow; under the lock."""
        self.check_conflict(call)
        if self.current is None and self.stage not in ALLOWED_IN[call]:
            if self.error is not None and self.stage in (_S.ABORTABLE_ERROR, _S.FATAL_ERROR):
                raise KafkaException(self.error)
            raise KafkaException(KafkaError(KafkaError._STATE, f"Operation not valid in state {self.stage.value}"))

    def check_writers(self, writers: Collection[int] | None) -> None:
        """Refuse a commit that names writers of a transaction that nobody could join."""
        # One that is taken up again was checked when it began, and may have been done since.
        if writers and not self.has_token and self.current is not TransactionCall.COMMIT:
            reason = (
                "no writer has joined this transaction: transaction_token() lets others join; nothing was committed"
            )
            raise KafkaException(KafkaError(KafkaError._INVALID_ARG, reason))

    def submit(self, work: Callable[[], Result], call: TransactionCall | None = None) -> Future[Result]:
        """Put work on the sender's thread, that of a resumable `call` for one."""
        job = work if self.before_work is None else partial(self._work_after, work)
        try:
            return self.sender.thread.submit(job if call is None else partial(self._work_of, call, job))
        except SenderStopped:
            raise RuntimeError(CLOSED_TEXT) from None

    def _work_of(self, call: TransactionCall, job: Callable[[], Any]) -> Any:
        try:
            return job()
        except (KafkaException, SenderStopped):
            raise
        except Exception as error:  # noqa: BLE001 - what is told of it is raised, or it came behind the answer
            if self.stage is not WORKS_BETWEEN[call][1]:
                self.end_unforeseen(call, error)
            # It is done: what has failed came behind the answer.
            log_failure(f"what followed {call.value}() of {self.transactional_id[:80]!r} failed")
            return None

    def end_unforeseen(self, call: TransactionCall, error: Exception) -> NoReturn:
        """End a call that failed with an unexpected error, and tell its caller.

        A commit that was not asked for can be aborted; one that may stand is not said to have failed.  An id that is
        not claimed can be claimed again, but that does not help against an error that lasts: it is raised as it is.
        """
        if isinstance(error, KafkaException) or is_closed(error):
            raise error
        own: TxnStoreError | None = None
        reason = f"{call.value}() failed in the client ({type(error).__name__})"
        with self.lock:
            if self.stage is _S.COMMITTING:
                own = OutcomeForgotten(f"{reason}, and the commit may have taken effect")
            elif call is TransactionCall.COMMIT and self.prepared is None:
                own = TransactionAbortable(f"{reason}. Nothing was committed; abort the transaction")
                # Its records may have used up sequence numbers: the abort has to bring a new epoch.
                self.is_written = True
                self.fail(transaction_error_of(own, call))
            elif self.stage is WORKS_BETWEEN[call][0]:
                self.enter(MADE_AGAIN_IN[call])
        if isinstance(own, OutcomeForgotten):
            self.fail(transaction_error_of(own, call))
        log_failure(f"{call.value}() of {self.transactional_id[:80]!r} failed")
        if self.error is not None and (own is not None or self.stage is _S.FATAL_ERROR):
            raise KafkaException(self.error) from error
        if call is TransactionCall.INIT:
            raise error
        raise KafkaException(KafkaError(KafkaError._FAIL, f"{reason}; call it again", retriable=True)) from error

    def _work_after(self, work: Callable[[], Result]) -> Result:
        if self.before_work is not None:
            self.before_work()
        return work()

    def at_coordinator(self, call: Callable[[TransactionCoordinator], Result]) -> Result:
        """Make a call; again if the coordinator's database had not heard of a partition that there is."""
        cluster = self.sender.session.connection.cluster()
        coordinator_id = cluster.coordinator_id_of(self.transactional_id)
        return repaired(cluster, coordinator_id, lambda store: call(self.coordinator(store, cluster)))

    def asked_to_commit(self, ask: Callable[[], Result]) -> Result:
        """Ask for a commit, or what became of one.

        Raises:
            OutcomeUnknown: its answer was lost; or a mistake of ours, or a lack of memory, has come between the commit,
                which may stand, and its answer.
            OutcomeForgotten: nothing but mistakes has come of it for as long as a transaction may take.
            TxnStoreError: the database refuses.
        """
        try:
            answer = ask()
        except TxnStoreError:
            self._mistaken_since = None
            raise
        except Exception as error:
            now_seconds = time.monotonic()
            if self._mistaken_since is None:
                self._mistaken_since = now_seconds
            reason = f"a commit failed ({type(error).__name__}): it may have been made"
            log_failure(f"a commit of {self.transactional_id[:80]!r} failed; it may have been made")
            if now_seconds - self._mistaken_since >= self.timeout_ms / 1000:
                raise OutcomeForgotten(f"{reason}, and trying again brings no answer") from error
            raise OutcomeUnknown(reason) from error
        self._mistaken_since = None
        return answer

    def check_remembered(self, remembered: PreparedTxnState, is_cancelled: threading.Event) -> None:
        """Refuse what an application remembers as committed and is not; on the sender's thread, with nothing open."""

        def ask() -> None:
            if is_cancelled.is_set():
                return
            store = self.sender.session.connection.cluster().coordinator_of(self.transactional_id)
            producer = ProducerIdentity(remembered.producer_id, remembered.epoch)
            check = partial(check_remembered, transactional_id=self.transactional_id, producer=producer)
            store.read(check, retry_timeout_ms=TRY_TIMEOUT_MS)

        try:
            self.sender.thread.until_answered(ask)
        except TxnStoreError as error:
            raise kafka_exception_of(error) from None

    def coordinator(self, store: Store, cluster: Cluster | None) -> TransactionCoordinator:
        """Return who coordinates the transactions in this store."""
        return TransactionCoordinator(store, cluster, self.transaction_group)

    def bounded(self, timeout_seconds: float, *, timeouts_max: int = 1) -> float:
        """Return how many seconds a call may take: what its caller allows, but not above its transaction timeouts."""
        return bounded(timeout_seconds, timeouts_max * self.timeout_ms / 1000)

    def wait(self, work: Future[Result], wait_seconds: float, *, resumable: bool) -> Result:
        """Wait for the answer of work for so long."""
        try:
            return result_within(work, wait_seconds)
        except TimeoutError:
            # The work may be done by the time anybody looks: it is taken up again all the same.
            self._is_left = resumable
            hints = () if resumable else ("nothing is done later; repeat the call",)
            raise timed_out(self.sender.thread, self.sender.session.connection, *hints) from None
        except SenderStopped:
            raise RuntimeError(CLOSED_TEXT) from None

    @property
    def is_unwritten(self) -> bool:
        """Whether a transaction is open, nothing of which is in the store or has failed; under the lock."""
        is_touched = self.is_written or self.has_token or self._failed_count or self.error is not None
        return self.stage is _S.IN_TRANSACTION and not is_touched

    # --- the stages -------------------------------------------------------------------------------------------------

    def enter(self, stage: TransactionStage) -> None:
        """Enter the stage; under the lock."""
        if self.stage not in ENTERED_FROM[stage]:
            raise AssertionError(f"{self.stage.value} to {stage.value}")
        self.stage = stage

    def begin(self) -> None:
        """Enter a transaction that has nothing yet; under the lock."""
        self.is_written = self.has_sent_records = self.has_token = False
        self.writers = self.prepared = None
        self.sender.session.begin_transaction()
        self._failed_count = 0
        # Last, and no call may begin before: Ctrl-C finds the transaction begun, or not.
        self.enter(_S.IN_TRANSACTION)

    def reset(self) -> None:
        """Take note that the transaction has ended; under the lock."""
        self.is_written = self.has_sent_records = self.has_token = False
        self.prepared = None
        self._failed_count = 0

    def fail(self, error: KafkaError) -> None:
        """Enter the stage of an error, and drop the records of the transaction that wait."""
        self._enter_error(error)
        if error.fatal() and self.when_fatal is not None:
            self.when_fatal()

    def fail_and_raise(self, error: KafkaError) -> NoReturn:
        """Enter the stage of an error, and raise it."""
        self.fail(error)
        raise KafkaException(error)

    def flush_session(self, callers: CallersConnection) -> None:
        """Let an enlisted session do all that its own commit does before the COMMIT: records may still be produced.

        Raises:
            KafkaException: it has failed; the transaction has to be aborted, as after an interrupt.
        """
        from txnstore.db.callers.sessions import prepare_session

        try:
            prepare_session(callers)
        except BaseException as error:
            if isinstance(error, TxnStoreError):
                kafka_error = transaction_error_of(error, None)
            else:
                # The texts of others may have values of rows in them; ours have none.
                told = f": {error.args[0].str()}" if isinstance(error, KafkaException) else ""
                reason = f"flushing an enlisted session failed ({type(error).__name__}{told}); nothing was committed"
                kafka_error = KafkaError(KafkaError._FAIL, reason, txn_requires_abort=True)
            # Also when interrupted: what its hooks have written and produced they would do again.
            to_its_end(partial(self.fail, kafka_error))
            if not isinstance(error, Exception):
                raise
            raise KafkaException(kafka_error) from error

    def _enter_error(self, error: KafkaError) -> None:
        target = _S.FATAL_ERROR if error.fatal() else _S.ABORTABLE_ERROR
        with self.lock:
            if self.stage is _S.FATAL_ERROR or self.stage not in ENTERED_FROM[target]:
                return
            self.error = error
            self.enter(target)
        if error.code() in _CODES_OF_TOPICS:
            # The next transaction is to know the partitions and settings that its topics have by then.
            self.directory.forget_all()
        self.delayed.forget()
        self.sender.purge(in_queue=True, in_flight=False)
        self.sender.drop_in_flight(KafkaError(KafkaError._PURGE_INFLIGHT), but_written=True)
        if error.fatal():
            self.sender.thread.report_fatal(error)

    # --- records ----------------------------------------------------------------------------------------------------

    def check_delivered(self, requests: list[ProduceRequest]) -> None:
        """Refuse to commit if records are missing; what was to go with the commit is dropped then."""
        if requests and (self._failed_count or self.error is not None):
            # Their sequence numbers are used up: the abort has to bring a new epoch.
            self.is_written = True
            self.sender.fail_requests(requests, KafkaError(KafkaError._PURGE_QUEUE))
        if self.error is not None:
            raise KafkaException(self.error)
        if self._failed_count:
            reason = failed_delivery(self._failed_count, self._first_failure)
            self.fail_and_raise(KafkaError(KafkaError._INCONSISTENT, reason, txn_requires_abort=True))

    def refuse_record(self) -> NoReturn:
        """Raise what `produce` raises outside of a transaction."""
        if self.stage is _S.FATAL_ERROR:
            raise KafkaException(KafkaError(KafkaError._FATAL, "Unable to produce message: Local: Fatal error"))
        raise KafkaException(KafkaError(KafkaError._STATE, "Unable to produce message: Local: Erroneous state"))

    # --- what the sender tells ----------------------------------------------------------------------------------------

    def writing(self) -> None:
        """Take note that the transaction may be open in the store."""
        self.is_written = self.has_sent_records = True

    def delivery_failed(self, record_count: int, error: KafkaError) -> None:
        """Count records that make the transaction incomplete."""
        with self.lock:
            if not self._failed_count:
                self._first_failure = error.str()
            self._failed_count += record_count

    def records_refused(self, error: KafkaError) -> None:
        """Let the transaction be aborted: the store does not take a record of it."""
        reason = f"{error.str()}: the transaction must be aborted"
        self.fail(KafkaError(error.code(), reason, txn_requires_abort=True))

    def transaction_failed(self, error: TxnStoreError) -> None:
        """Let the transaction be aborted, or the producer be closed."""
        self.fail(transaction_error_of(error, None))


class TransactionOffsets:
    """The consumed offsets of a transaction: they go with its commit, or by themselves when they have lingered.

    All but `linger` and `stop_lingering` are for the sender's thread.
    """

    def __init__(self, progress: TransactionProgress, *, outlives_producer: bool = False) -> None:
        """Begin without any; `outlives_producer` says whether somebody else may commit what this producer began."""
        self.hold_until_commit = False
        """Whether they all wait for the commit, which nothing else may come before."""
        self._progress = progress
        self._sender = progress.sender
        self.sent: dict[GroupMembership, SentOffsets] = {}
        """Those that wait, by who has sent them: what a member sends in a later generation says nothing of these."""
        # What nobody can commit any more need not be there any more.
        self._is_lasting = outlives_producer
        #: The groups of which the store holds offsets.
        self._written_group_ids: set[str] = set()
        #: By group, whose offsets the last transaction has committed: its next ones are checked by their commit alone.
        self._taken: dict[str, GroupMembership] = {}

    def __bool__(self) -> bool:
        """Return whether some wait."""
        return bool(self.sent)

    @property
    def waiting(self) -> list[SentOffsets]:
        """Those that wait."""
        return list(self.sent.values())

    def committed(self, ended: Ended, requests: Sequence[ProduceRequest], release: Callable[[], None]) -> None:
        """Take note of a commit that stands with its offsets and records, and let its transaction be over.

        Whatever fails here, for lack of memory for one: it is done, and its call finds it so.
        """
        try:
            self._report(requests, ended.appended)
        finally:
            try:
                self._sender.session.become(ended.identity)
                self.were_committed()
            finally:
                try:
                    self._progress.reset()
                    self.clear()
                finally:
                    try:
                        release()
                    finally:
                        # Last, for a caller that comes back begins the next transaction then.  As who it was before it
                        # would be told of this commit again, for the next one: it is finished.
                        if self._sender.session.identity == ended.identity:
                            with self._progress.lock:
                                self._progress.enter(_S.COMMIT_NOT_ACKED)

    def _report(self, requests: Sequence[ProduceRequest], appended: Sequence[Appended]) -> None:
        is_complete = len(appended) == sum(len(request.appends) for request in requests)
        first_error: Exception | None = None
        for request in requests:
            count = len(request.appends) if is_complete else 0
            try:
                self._sender.report(request, appended[:count])
            except Exception as error:  # noqa: BLE001 - the others are reported all the same
                first_error = first_error or error
            appended = appended[count:]
        if first_error is not None:
            raise first_error

    def were_committed(self) -> None:
        """Take note that the groups have taken those that wait from their members."""
        self.took(self.sent)
        self.sent.clear()

    def took(self, committers: Iterable[GroupMembership]) -> None:
        """Take note that groups have taken offsets from these members."""
        self._taken = {committer.group_id: committer for committer in committers}

    def forget_committers(self) -> None:
        """Ask groups again about their members."""
        self._taken = {}

    def clear(self) -> None:
        """Forget them: the transaction has ended."""
        if self.sent:
            self._taken.clear()
        self.sent.clear()
        self._written_group_ids.clear()

    @property
    def in_store(self) -> InStore:
        """What the store has of the transaction, with its records; of these only where there are several databases."""
        return InStore(self._sender.session.written, self._written_group_ids)

    @property
    def open_group_id(self) -> str | None:
        """The group whose offsets are all that the store has of the transaction; None: it has more, or nothing."""
        if len(self._written_group_ids) != 1 or self._progress.has_sent_records or self._progress.has_token:
            return None
        (group_id,) = self._written_group_ids
        return group_id

    def linger(self) -> None:
        """Let those that wait become pending by themselves after a while."""
        self._progress.delayed.set(self._write_lingering)

    def stop_lingering(self) -> None:
        """Let those that wait be written by the call that ends the transaction now."""
        self._progress.delayed.forget()

    def take(self, committer: GroupMembership, positions: Iterable[TopicPartition]) -> None:
        """Take offsets, or refuse them if their group will."""
        sent = SentOffsets(committer, self._offsets_by_id(positions))
        if committer.generation == NO_GENERATION and not self.hold_until_commit:
            # Nobody but the pending offsets keeps another reader of the group from going on at the old ones.
            self._write(sent)
            return
        # The group's generation does, so they may go with the commit: refused now, if they will be.
        if self._taken.get(committer.group_id) != committer:
            store = self._sender.session.connection.cluster().coordinator_of(committer.group_id)
            store.read(lambda connection: check_committer(connection, committer), retry_timeout_ms=TRY_TIMEOUT_MS)
        self._keep(sent)

    def take_at_once(self, committer: GroupMembership, positions: Sequence[TopicPartition]) -> bool:
        """Take offsets that may go with the commit, if nobody has to be asked about them; for any thread.

        Returns False if somebody has to be, or they are to be refused.
        """
        if committer.generation == NO_GENERATION and not self.hold_until_commit:
            return False
        if self._taken.get(committer.group_id) != committer:
            return False
        topics = self._progress.directory.known({position.topic for position in positions})
        if topics is None:
            return False
        try:
            self._keep(SentOffsets(committer, _offsets_in(topics, positions)))
        except UnknownTopicOrPartition:
            return False
        return True

    def _keep(self, sent: SentOffsets) -> None:
        known = self.sent.get(sent.committer)
        offsets = {**known.offsets, **sent.offsets} if known is not None else sent.offsets
        self.sent[sent.committer] = SentOffsets(sent.committer, offsets)
        if not self.hold_until_commit:
            self.linger()

    def write_all(self) -> None:
        """Make all that wait pending, however long the database is away."""
        for committer, sent in list(self.sent.items()):
            self._sender.thread.until_answered(partial(self._write, sent))
            del self.sent[committer]

    def _offsets_by_id(self, positions: Iterable[TopicPartition]) -> dict[int, OffsetAndMetadata]:
        positions = list(positions)
        return _offsets_in(self._progress.directory.find({position.topic for position in positions}), positions)

    def _write_lingering(self) -> None:
        """Make offsets pending that have waited for the commit for long enough."""
        for committer, sent in list(self.sent.items()):
            try:
                self._write(sent)
            except TxnStoreError as error:
                if error.retriable or error.outcome_unknown:
                    self._sender.thread.backoff.retry_later(error)
                    self.linger()
                else:
                    self._progress.fail(transaction_error_of(error, TransactionCall.SEND_OFFSETS))
                return
            del self.sent[committer]

    def _write(self, sent: SentOffsets) -> None:
        self._progress.is_written = True
        session = self._sender.session
        self._progress.at_coordinator(
            lambda coordinator: coordinator.send_offsets(
                self._progress.transactional_id,
                session.identity,
                sent,
                has_begun=session.has_begun,
                is_lasting=self._is_lasting,
                retry_timeout_ms=TRY_TIMEOUT_MS,
            )
        )
        session.has_begun = True
        self._written_group_ids.add(sent.committer.group_id)


def may_stand(error: Exception) -> bool:
    """Return whether a commit may have been made that was answered by this error."""
    return not isinstance(error, TxnStoreError) or error.outcome_unknown or isinstance(error, OutcomeForgotten)


def log_failure(what: str) -> None:
    """Log the error that is being handled, and that is told to nobody as it is."""
    fields = {"event": "background_work_failed", "client": threading.current_thread().name}
    _log.exception("%s", what, extra=fields)


def closed_error(asked_as: ProducerIdentity | None, first: ProducerIdentity | None = None) -> Exception:
    """Return what tells of a commit whose producer was closed before; `asked_as` has asked for it, and it may stand.

    `first` has asked for the first of those that were asked for at once, by default it was this one.
    """
    if asked_as is None:
        return RuntimeError(CLOSED_TEXT)
    tells = f'txnstore.outcome("{asked_as}", url) tells'
    if first not in (None, asked_as):
        # Nobody has given out the later names yet: if nothing stands, the next process commits under them.
        tells = f'if txnstore.outcome("{first}", url) is COMMITTED, {tells}; otherwise it was not made'
    reason = f'{CLOSED_TEXT}, and its commit of "{asked_as}" may stand: {tells}'
    return KafkaException(kafka_error_of(OutcomeUnknown(reason)))


def followed(work: Future[None], progress: TransactionProgress) -> Future[None]:
    """Return a future of the same answer that nobody can cancel."""
    follower: Future[None] = new_future()
    follower.set_running_or_notify_cancel()

    def follow(done: Future[None]) -> None:
        error = done.exception()
        if error is None:
            give(follower, follower.set_result, None)
        else:
            asked_as = progress.sender.session.identity if progress.stage is _S.COMMITTING else None
            told = closed_error(asked_as) if isinstance(error, SenderStopped) else error
            give(follower, follower.set_exception, told)

    work.add_done_callback(follow)
    return follower


def _offsets_in(topics: Mapping[str, Topic], positions: Iterable[TopicPartition]) -> dict[int, OffsetAndMetadata]:
    """Return offsets by the ids of their partitions, or UnknownTopicOrPartition."""
    offsets: dict[int, OffsetAndMetadata] = {}
    for position in positions:
        topic = topics.get(position.topic)
        if topic is None:
            raise UnknownTopicOrPartition(f"there is no topic {position.topic[:80]!r} to commit an offset for")
        epoch = position.leader_epoch
        offsets[topic.partition_id(position.partition)] = OffsetAndMetadata(
            position.offset, -1 if epoch is None else epoch, position.metadata, position.offset_in_transaction
        )
    return offsets

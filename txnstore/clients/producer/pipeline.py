"""Commits that nobody waits for: what they commit, sealed until the sender's thread has done it, in order.

A transaction that is wholly in the client is taken out of the queue as a whole, and the next one may begin at once.
Those that wait are committed by one database transaction, as many as there are.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from txnstore.clients.model.errors import KafkaError, KafkaException, kafka_error_of
from txnstore.clients.producer.progress import (
    TransactionOffsets,
    TransactionProgress,
    closed_error,
    log_failure,
    may_stand,
)
from txnstore.clients.producer.requests import TRY_TIMEOUT_MS, ProduceRequest
from txnstore.clients.producer.sender import RECORD_ERRORS, REQUEST_BYTES_MAX, TOPIC_ERRORS
from txnstore.clients.producer.state import TransactionCall, TransactionStage, transaction_error_of
from txnstore.clients.producer.thread import SenderStopped
from txnstore.deadline import give, new_future, wait_within
from txnstore.errors import TxnStoreError
from txnstore.model import GroupMembership, ProducerIdentity
from txnstore.transactions.outcome import Ended
from txnstore.transactions.transaction import SentOffsets
from txnstore.transactions.whole_group import WholeCommit

if TYPE_CHECKING:
    from txnstore.clients.producer.queue import Accumulator, Batch, PartitionQueue
    from txnstore.transactions.coordinator import TransactionCoordinator

_log = logging.getLogger(__name__)

#: So many commits may wait; the next one waits until the first of them is done.
PENDING_MAX: Final = 256
#: What one database transaction commits at most: others wait for the heads of its partitions.
TOGETHER_MAX: Final = 64
TOGETHER_BYTES_MAX: Final = 1024 * 1024


@dataclass(slots=True, eq=False)
class SealedTransaction:
    """All of a transaction that nothing is added to any more, and the answer for those who await its commit."""

    future: Future[None] = field(default_factory=new_future)
    queues: dict[tuple[str, int], PartitionQueue] = field(default_factory=dict)
    offsets: dict[GroupMembership, SentOffsets] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    """What the queues held, once the sender's thread has looked at it."""

    request: ProduceRequest | None = None
    asked_as: ProducerIdentity | None = None
    """Who has asked for its commit, if that may stand."""

    ended: Ended | None = None
    """The answer: it stands, and is not asked for again, whatever fails since."""

    @property
    def size_bytes(self) -> int:
        """The bytes of all records."""
        return _size_bytes_of(self.queues)

    def take_batches(self, records_max: int) -> list[Batch]:
        """Return the records in batches of at most so many; of an empty transaction none."""
        for queue in self.queues.values():
            while queue.places:
                # At once: an error half way loses none, and the next call goes on.
                queue.take_batch(records_max, self.batches)
        return self.batches


class CommitPipeline:
    """The sealed transactions of one producer; timed work of the sender's thread, and done before its jobs."""

    def __init__(self, progress: TransactionProgress, offsets: TransactionOffsets, accumulator: Accumulator) -> None:
        """Begin without any."""
        self._progress = progress
        self._offsets = offsets
        self._accumulator = accumulator
        self._sender = progress.sender
        self._thread = progress.sender.thread
        self._changed = progress.changed
        self._pending: deque[SealedTransaction] = deque()
        # Before what the sender sends by itself: that may be of the next transaction.
        self._thread.timed_work.insert(0, self)
        self._thread.at_end.append(self._drop)
        progress.before_work = self.run

    def __bool__(self) -> bool:
        """Return whether a commit is not done yet."""
        return bool(self._pending)

    # --- for the caller's thread ------------------------------------------------------------------------------------

    def seal(self) -> Future[None] | None:
        """Take what the open transaction has, for its commit, and let it be over; None: not all of it is here.

        An interrupt finds all of this done, or nothing.
        """
        sealed = SealedTransaction()
        sealed.future.set_running_or_notify_cancel()
        self._thread.start()
        return sealed.future if self._thread.run_here(lambda: self._seal(sealed)) else None

    def _seal(self, sealed: SealedTransaction) -> bool:
        progress, accumulator, offsets, ready = self._progress, self._accumulator, self._offsets, TransactionStage.READY
        if not (progress.is_unwritten and self._sender.has_only_queued):
            return False
        if accumulator.size_bytes > REQUEST_BYTES_MAX and _size_bytes_of(accumulator.queues) > REQUEST_BYTES_MAX:
            return False
        offsets.stop_lingering()
        self._thread.alarm.ring()
        self._changed.notify_all()
        no_queues: dict[tuple[str, int], PartitionQueue] = {}
        no_offsets: dict[GroupMembership, SentOffsets] = {}
        one_more = (sealed,)
        # No call in between: Ctrl-C finds all of this done, or nothing; and only the first may want memory.
        self._pending += one_more
        sealed.queues, accumulator.queues = accumulator.queues, no_queues
        sealed.offsets, offsets.sent = offsets.sent, no_offsets
        progress.stage = ready
        return True

    def wait_for_room(self, timeout_seconds: float) -> bool:
        """Wait until one more may be sealed; return whether it may."""
        with self._changed:
            return wait_within(self._changed, lambda: len(self._pending) < PENDING_MAX, timeout_seconds)

    def wait_until_done(self, timeout_seconds: float) -> bool:
        """Wait until no commit is left to be done; return whether the queue is empty."""
        with self._changed:
            return wait_within(self._changed, lambda: not self._pending, timeout_seconds)

    def finish(self, timeout_seconds: float) -> None:
        """Wait until no commit is left to be done, and tell of those that are: the producer is being closed."""
        if not self.wait_until_done(timeout_seconds):
            name, count = self._progress.transactional_id[:80], len(self._pending)
            fields = {"event": "commits_left", "transactional_id": name, "count": count}
            _log.warning(
                "%d commits of %r that nobody waits for are not done as its producer is closed: their futures tell"
                " which of them may stand",
                count,
                name,
                extra=fields,
            )

    # --- on the sender's thread -------------------------------------------------------------------------------------

    def due_seconds(self, now_seconds: float) -> float | None:
        """See `TimedWork`."""
        # At once, also where something else pauses: what is due meanwhile is of the next transaction.
        return now_seconds if self._pending else None

    def run(self) -> None:
        """Commit all that is sealed; the caller may seal more meanwhile.

        Raises:
            SenderStopped: the producer was closed.
        """
        if not self._pending:
            return
        with self._thread.aside():
            while together := self._next():
                if len(together) > 1:
                    self._commit_together(together)
                self._commit_each(together)

    def _next(self) -> list[SealedTransaction]:
        together: list[SealedTransaction] = []
        size_bytes = 0
        with self._changed:
            for sealed in self._pending:
                size_bytes += sealed.size_bytes
                if together and (len(together) == TOGETHER_MAX or size_bytes > TOGETHER_BYTES_MAX):
                    break
                if sealed.asked_as is not None or sealed.ended is not None:
                    # By itself: those that were asked for come before all others.
                    return [sealed]
                together.append(sealed)
        return together

    def _commit_together(self, together: Sequence[SealedTransaction]) -> None:
        """Commit several at once, if that can be; what has no answer then is asked for by itself."""
        session = self._sender.session
        first = session.identity
        commits: list[WholeCommit] = []
        written: list[SealedTransaction] = []

        try:
            for sealed in together:
                request = self._prepared(sealed)
                if request is not None or sealed.offsets:
                    appends = request.appends if request is not None else ()
                    commits.append(WholeCommit(session.identity, appends, list(sealed.offsets.values())))
                    written.append(sealed)
                    # As its commit leaves it, if nothing about it is unusual.
                    session.become(_next_epoch_of(session.identity))
            if commits:
                self._thread.until_answered(partial(self._ask_for_all, commits, written))
        except TxnStoreError:
            # Which of them is at fault is found one by one.
            pass
        except SenderStopped:
            raise
        except Exception:  # noqa: BLE001 - the same way
            log_failure("several commits at once failed; each is asked for by itself")
        finally:
            session.become(first)

    def _ask_for_all(self, commits: Sequence[WholeCommit], written: Sequence[SealedTransaction]) -> None:
        def ask(coordinator: TransactionCoordinator) -> None:
            ended = coordinator.commit_several(
                self._progress.transactional_id, commits, retry_timeout_ms=TRY_TIMEOUT_MS
            )
            for sealed, own in zip(written, ended, strict=True) if ended is not None else ():
                sealed.ended = own

        try:
            self._progress.asked_to_commit(partial(self._progress.at_coordinator, ask))
        except Exception as error:
            if not may_stand(error):
                raise
            for sealed, commit in zip(written, commits, strict=True):
                sealed.asked_as = commit.producer

    def _commit_each(self, together: Sequence[SealedTransaction]) -> None:
        """Commit one after the other; the first that is refused takes all that follow with it."""
        for sealed in together:
            try:
                self._commit_alone(sealed)
            except TxnStoreError as error:
                self._give_up(error)
                return
            if sealed.ended is not None:
                # First, and again if it fails: as who it was before it would be told of this commit for the next one.
                self._sender.session.become(sealed.ended.identity)
            self._done(sealed)

    def _commit_alone(self, sealed: SealedTransaction) -> None:
        commit = partial(self._progress.asked_to_commit, partial(self._commit, sealed))
        try:
            self._thread.until_answered(commit)
            return
        except TOPIC_ERRORS:
            if sealed.asked_as is not None:
                raise
        # The topics may have changed since they were read: they are read again, once.
        if sealed.request is not None:
            self._sender.session.take_back(sealed.request)
            sealed.request = None
        for batch in sealed.batches:
            self._progress.directory.forget(batch.topic)
        self._thread.until_answered(commit)

    def _commit(self, sealed: SealedTransaction) -> None:
        if sealed.ended is not None:
            return
        request = self._prepared(sealed)
        if request is None and not sealed.offsets:
            return

        def ask(coordinator: TransactionCoordinator) -> None:
            sealed.ended = coordinator.end_transaction(
                self._progress.transactional_id,
                self._sender.session.identity,
                commit=True,
                appends=request.appends if request is not None else (),
                offsets=list(sealed.offsets.values()),
                is_repeated=sealed.asked_as is not None,
                retry_timeout_ms=TRY_TIMEOUT_MS,
            )

        try:
            self._progress.at_coordinator(ask)
        except Exception as error:
            if may_stand(error):
                sealed.asked_as = self._sender.session.identity
            raise

    def _prepared(self, sealed: SealedTransaction) -> ProduceRequest | None:
        """Return its records with their sequence numbers, for the producer's present epoch; None: it has none."""
        session = self._sender.session
        if sealed.request is None or sealed.request.producer != session.identity:
            batches = sealed.take_batches(self._accumulator.batch_records_max)
            ensure = self._progress.directory.ensure
            sealed.request = session.prepare([(batch, ensure(batch.topic)) for batch in batches]) if batches else None
        return sealed.request

    def _done(self, sealed: SealedTransaction) -> None:
        try:
            with self._changed:
                # First of all, without any memory: it stands, and is not to be committed again.
                self._pending.remove(sealed)
                try:
                    if sealed.request is not None and sealed.ended is not None:
                        self._sender.report(sealed.request, sealed.ended.appended)
                    if sealed.offsets:
                        self._offsets.took(sealed.offsets)
                finally:
                    self._changed.notify_all()
        except Exception:  # noqa: BLE001 - it came behind the commit, which stands
            log_failure("what followed a commit failed")
        finally:
            give(sealed.future, sealed.future.set_result, None)

    def _give_up(self, error: TxnStoreError) -> None:
        """Let the first commit fail, and all that follow: also the transaction that is open now has to be aborted."""
        own = transaction_error_of(error, TransactionCall.COMMIT)
        at_fault = isinstance(error, RECORD_ERRORS)
        of_first = kafka_error_of(error) if at_fault else KafkaError(KafkaError._PURGE_INFLIGHT)
        reason = f"an earlier transaction of this producer has failed: {own.str()}"
        following = KafkaError(own.code(), reason, fatal=own.fatal(), txn_requires_abort=own.txn_requires_abort())
        of_following = KafkaError(KafkaError._PURGE_QUEUE)
        with self._changed:
            first, *others = self._pending
            if first.request is not None:
                self._sender.session.take_back(first.request)
            self._offsets.forget_committers()
            # A part of it may be in other databases, if there are several by now: the abort is to reach them.
            self._progress.is_written = True
            self._progress.fail(own)
            # Last: until then it is asked for again, should anything fail here.
            self._pending.clear()
        self._fail(first, KafkaException(own), of_first)
        for sealed in others:
            self._fail(sealed, KafkaException(following), of_following)

    def _fail(self, sealed: SealedTransaction, error: Exception, of_records: KafkaError) -> None:
        try:
            self._sender.fail_batches(sealed.take_batches(self._accumulator.batch_records_max), of_records)
        except Exception:  # noqa: BLE001 - nobody waits for ever, neither for this one nor for those that follow
            log_failure("the reports of a commit failed")
        finally:
            give(sealed.future, sealed.future.set_exception, error)

    def _drop(self) -> None:
        """Nobody commits what is left: the producer has been closed."""
        while self._pending and self._pending[0].ended is not None:
            # Closed between the answer and its reports.
            self._done(self._pending[0])
        with self._changed:
            dropped = list(self._pending)
            self._pending.clear()
            self._changed.notify_all()
        first = next((sealed.asked_as for sealed in dropped if sealed.asked_as is not None), None)
        for sealed in dropped:
            self._fail(sealed, closed_error(sealed.asked_as, first), KafkaError(KafkaError._PURGE_INFLIGHT))


def _size_bytes_of(queues: dict[tuple[str, int], PartitionQueue]) -> int:
    return sum(queue.size_bytes for queue in queues.values())


def _next_epoch_of(identity: ProducerIdentity) -> ProducerIdentity:
    return ProducerIdentity(identity.producer_id, identity.epoch + 1)

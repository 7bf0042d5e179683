"""This file is the thread of a producer: it sends what has lingered long enough, and runs what calls ask for.

One thing happens at a time, so nothing overtakes: a request that could not be written is written again before the
next one, and a commit comes after all of its transaction's records.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from txnstore.clients.accumulator import (
    KEY,
    PARTITION,
    PARTITION_UNASSIGNED,
    QUEUED_SECONDS,
    Accumulator,
    Batch,
    QueuedRecord,
)
from txnstore.clients.delivery_reports import DeliveryReport, DeliveryReports
from txnstore.clients.error_mapping import kafka_error_of
from txnstore.clients.kafka_error import KafkaError
from txnstore.clients.partition_choice import PartitionChoice
from txnstore.clients.produce_requests import ProduceRequest, ProducerSession
from txnstore.clients.topic_directory import TopicDirectory
from txnstore.errors import (
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidRecord,
    InvalidTimestamp,
    InvalidTopic,
    OutcomeUnknown,
    OutOfOrderSequence,
    RecordTooLarge,
    StoreClosed,
    TxnStoreError,
    UnknownTopicOrPartition,
    UnsupportedCompression,
)
from txnstore.log.append import Appended

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

#: The log remembers five batches of a producer in each partition (KIP-98): so many may be repeated.
BATCHES_PER_PARTITION_MAX: Final = 5
#: What one request writes at most, so that nobody waits long for the heads of its partitions.
REQUEST_BYTES_MAX: Final = 16 * 1024 * 1024

#: The records are at fault: those that are fail, the others go on.
RECORD_ERRORS: Final = (
    InvalidRecord,
    InvalidTimestamp,
    InvalidTopic,
    RecordTooLarge,
    UnknownTopicOrPartition,
    UnsupportedCompression,
)
#: The log does not take this identity any more; without a transaction another one will do.
IDENTITY_ERRORS: Final = (InvalidProducerEpoch, InvalidProducerIdMapping, OutOfOrderSequence)


class SenderStopped(Exception):
    """The producer was closed before the call was done."""


class DeliveryListener(Protocol):
    """Who hears of deliveries: the producer's transaction, if it has one."""

    def writing(self) -> None:
        """Records are about to be written: from now on the transaction may be open in the store."""
        ...

    def delivery_failed(self, record_count: int) -> None:
        """Records will not be delivered."""
        ...

    def records_refused(self, error: KafkaError) -> None:
        """The store does not take a record."""
        ...

    def transaction_failed(self, error: TxnStoreError) -> None:
        """The transaction of the records cannot go on."""
        ...


@dataclass(frozen=True, slots=True)
class SenderSettings:
    """The configuration of the sender."""

    linger_seconds: float
    message_timeout_seconds: float
    """0: for ever."""

    retries_unknown: bool
    """Whether records are sent again whose fate is not known."""

    backoff_seconds: float
    backoff_max_seconds: float


@dataclass(slots=True, eq=False)
class InFlight:
    """Batches that have left the queue and are not reported yet."""

    batches: Sequence[Batch]
    request: ProduceRequest | None = None
    is_uncertain: bool = False
    """Whether the log may have them."""

    has_fresh_topics: bool = False
    has_fresh_identity: bool = False

    @property
    def record_count(self) -> int:
        """The number of records."""
        return sum(len(batch.records) for batch in self.batches)


class Sender:
    """The thread, and everything that only it does."""

    def __init__(  # noqa: PLR0917 - its parts, each of which it needs
        self,
        name: str,
        accumulator: Accumulator,
        reports: DeliveryReports,
        session: ProducerSession,
        directory: TopicDirectory,
        choice: PartitionChoice,
        settings: SenderSettings,
        report_trouble: Callable[[KafkaError], None],
    ) -> None:
        """Make the sender; its thread starts with the first thing to do."""
        self.session = session
        self.directory = directory
        self.listener: DeliveryListener | None = None
        self._name = name
        self._changed = accumulator.changed
        self._accumulator = accumulator
        self._reports = reports
        self._choice = choice
        self._settings = settings
        self._report_trouble = report_trouble
        self._thread: threading.Thread | None = None
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._in_flight: deque[InFlight] = deque()
        self._flushing = 0
        self._stopping = False
        self._drop_in_flight = False
        self._tries = 0
        self._not_before_seconds = 0.0
        self._random = random.Random()
        self._extra_due_seconds: float | None = None
        self._extra_job: Callable[[], None] | None = None

    @property
    def is_new(self) -> bool:
        """Whether the thread has never been started."""
        return self._thread is None

    # --- for every thread -------------------------------------------------------------------------------------------

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """Run `job` on the sender's thread after what it does now.

        Raises:
            SenderStopped: the producer has been closed.
        """
        future: Future[Result] = Future()
        with self._changed:
            if self._stopping:
                raise SenderStopped
            self._jobs.append((future, job))
            self._changed.notify_all()
        self.start()
        return future

    def start(self) -> None:
        """Start the thread if it does not run."""
        if self._thread is None:
            with self._changed:
                if self._thread is None and not self._stopping:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()

    def begin_flush(self) -> None:
        """Send without lingering until `end_flush`."""
        with self._changed:
            self._flushing += 1
            self._changed.notify_all()

    def end_flush(self) -> None:
        """Linger again."""
        with self._changed:
            self._flushing -= 1

    def send_later(self, job: Callable[[], None]) -> None:
        """Run `job` once it has lingered, unless `forget_later` comes first."""
        with self._changed:
            if self._extra_job is None:
                self._extra_due_seconds = time.monotonic() + self._settings.linger_seconds
            self._extra_job = job
            self._changed.notify_all()

    def forget_later(self) -> None:
        """Do not run the job of `send_later`."""
        with self._changed:
            self._extra_job = self._extra_due_seconds = None

    def purge(self, *, in_queue: bool, in_flight: bool) -> None:
        """Give up records: those that wait, and those that are being sent as soon as this can be stopped."""
        with self._changed:
            queued = self._accumulator.take_all() if in_queue else []
            self._drop_in_flight |= in_flight and bool(self._in_flight)
            self._changed.notify_all()
        for batch in queued:
            self._fail_batch(batch, KafkaError(KafkaError._PURGE_QUEUE))

    def wait_until_dropped(self, timeout_seconds: float) -> None:
        """Wait until what was being sent at a purge is reported."""
        with self._changed:
            self._changed.wait_for(lambda: not self._drop_in_flight, timeout_seconds)

    def stop(self, timeout_seconds: float) -> bool:
        """End the thread after the try that it is in; returns whether it has ended."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return thread is None
        thread.join(max(0.0, timeout_seconds))
        return not thread.is_alive()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            work = self._next_work()
            if work is None:
                break
            try:
                work()
            except Exception:  # noqa: BLE001 - a mistake of ours is logged, and the records are not lost by it
                # Nothing may end the thread while records wait for their reports.
                _log.exception("the sender of %s failed; it goes on", self._name)
                self._back_off()
            del work
        self._refuse_jobs()

    def _next_work(self) -> Callable[[], object] | None:
        with self._changed:
            while not self._stopping:
                if self._jobs:
                    return self._run_job
                now_seconds = time.monotonic()
                due_seconds = self._due_seconds(now_seconds)
                if self._extra_due_seconds is not None and self._extra_due_seconds <= now_seconds:
                    return self._run_extra
                if due_seconds is not None and due_seconds <= now_seconds:
                    return self.send_once
                deadlines = [due for due in (due_seconds, self._extra_due_seconds) if due is not None]
                self._changed.wait(min(deadlines) - now_seconds if deadlines else None)
        return None

    def _due_seconds(self, now_seconds: float) -> float | None:
        """Return when there is something to send; None if there is nothing."""
        if self._in_flight:
            return now_seconds if self._drop_in_flight else self._not_before_seconds
        oldest_seconds = self._accumulator.oldest_seconds
        if oldest_seconds is None:
            return None
        if self._flushing or self._accumulator.has_full_batch:
            return self._not_before_seconds
        return max(oldest_seconds + self._settings.linger_seconds, self._not_before_seconds)

    def _run_job(self) -> None:
        with self._changed:
            future, job = self._jobs.popleft()
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = job()
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it, whatever it is
            future.set_exception(error)
        else:
            future.set_result(result)

    def _run_extra(self) -> None:
        with self._changed:
            job, self._extra_job, self._extra_due_seconds = self._extra_job, None, None
        if job is not None:
            job()

    def _refuse_jobs(self) -> None:
        with self._changed:
            jobs = list(self._jobs)
            self._jobs.clear()
        for future, _ in jobs:
            if future.set_running_or_notify_cancel():
                future.set_exception(SenderStopped())

    # --- sending; on the thread only --------------------------------------------------------------------------------

    def send_once(self) -> None:
        """Try once to send what comes next; what cannot be sent now stays in flight."""
        self._expire()
        if not self._in_flight:
            self._look_up_topics()
            with self._changed:
                batches = self._accumulator.take_batches(BATCHES_PER_PARTITION_MAX, REQUEST_BYTES_MAX)
                if not batches:
                    return
                self._in_flight.append(InFlight(batches))
        in_flight = self._in_flight[0]
        try:
            request = self._prepared(in_flight)
            if self.listener is not None:
                self.listener.writing()
            appended = self.session.write(request)
        except TxnStoreError as error:
            self._handle(in_flight, error)
        else:
            self.report(request, appended)
            self._done(in_flight)

    def send_everything(self) -> None:
        """Send until nothing waits any more.

        Raises:
            SenderStopped: the producer was closed.
        """
        while self.has_something:
            self.send_once()
            self.pause()

    def last_request(self) -> ProduceRequest | None:
        """Send until one request is left, and return it unsent: it goes with the commit.

        Raises:
            SenderStopped: the producer was closed.
        """
        while True:
            while self._in_flight or self._accumulator.unknown_topics:
                self.send_once()
                self.pause()
            with self._changed:
                batches = self._accumulator.take_batches(BATCHES_PER_PARTITION_MAX, REQUEST_BYTES_MAX)
                is_last = self._accumulator.is_empty
            if not batches:
                return None
            in_flight = InFlight(batches)
            if is_last:
                try:
                    return self._prepared(in_flight)
                except TxnStoreError as error:
                    with self._changed:
                        self._in_flight.append(in_flight)
                    self._handle(in_flight, error)
                    self.pause()
                    continue
            with self._changed:
                self._in_flight.append(in_flight)

    def send_again(self, request: ProduceRequest) -> None:
        """Put back a request that did not go with its commit: its records are at fault."""
        self.session.take_back(request)
        with self._changed:
            self._in_flight.append(InFlight(request.batches))

    @property
    def has_something(self) -> bool:
        """Whether anything waits to be sent or is being sent."""
        return bool(self._in_flight) or not self._accumulator.is_empty

    def pause(self) -> None:
        """Wait until the next try, as the last one wants it.

        Raises:
            SenderStopped: the producer was closed.
        """
        with self._changed:
            while not self._stopping:
                left_seconds = self._not_before_seconds - time.monotonic()
                if left_seconds <= 0 or self._drop_in_flight:
                    return
                self._changed.wait(left_seconds)
        raise SenderStopped

    def until_answered(self, request: Callable[[], Result], deadline_seconds: float | None = None) -> Result:
        """Repeat `request` while the database is away or has not said what became of it.

        Raises:
            SenderStopped: the producer was closed.
            TxnStoreError: the database refuses, or the deadline, by the monotonic clock, has passed.
        """
        while True:
            try:
                answer = request()
            except TxnStoreError as error:
                is_late = deadline_seconds is not None and time.monotonic() >= deadline_seconds
                if is_late or not (error.retriable or error.outcome_unknown):
                    raise
                self.retry_later(error)
            else:
                self.succeeded()
                return answer
            self.pause()

    def retry_later(self, error: TxnStoreError) -> None:
        """Let a pause follow, longer each time, and tell the application that there is trouble."""
        self._back_off()
        self._report_trouble(kafka_error_of(error))

    def report_fatal(self, error: KafkaError) -> None:
        """Tell the application that the producer is finished."""
        self._report_trouble(error)

    def succeeded(self) -> None:
        """Begin with short pauses again."""
        self._tries = 0
        self._not_before_seconds = 0.0

    def report(self, request: ProduceRequest, appended: Sequence[Appended]) -> None:
        """Report the records of a request as delivered."""
        self.succeeded()
        for batch, place in zip(request.batches, appended, strict=True):
            self._reports.add(
                DeliveryReport(
                    batch.topic,
                    batch.partition,
                    batch.records,
                    base_offset=place.base_offset,
                    log_append_time_ms=place.log_append_time_ms,
                )
            )

    def fail_request(self, request: ProduceRequest, error: KafkaError) -> None:
        """Report the records of a request as not delivered."""
        for batch in request.batches:
            self._fail_batch(batch, error)

    def drop_in_flight(self, error: KafkaError) -> None:
        """Report what is in flight as not delivered; the transaction that it belongs to is aborted."""
        for in_flight in list(self._in_flight):
            self._fail(in_flight, error)

    def _prepared(self, in_flight: InFlight) -> ProduceRequest:
        if in_flight.request is None:
            self.session.obtain_identity()
            in_flight.request = self.session.prepare(
                [(batch, self.directory.ensure(batch.topic)) for batch in in_flight.batches]
            )
        return in_flight.request

    def _handle(self, in_flight: InFlight, error: TxnStoreError) -> None:
        """Decide what becomes of a request that was not written."""
        if isinstance(error, StoreClosed):
            self._fail(in_flight, KafkaError(KafkaError._PURGE_INFLIGHT))
        elif error.retriable or (error.outcome_unknown and self._settings.retries_unknown):
            in_flight.is_uncertain |= error.outcome_unknown
            self.retry_later(error)
        elif isinstance(error, RECORD_ERRORS) and not in_flight.is_uncertain:
            self._isolate(in_flight, error)
        elif self.listener is not None:
            self._fail(in_flight, kafka_error_of(error))
            self.listener.transaction_failed(error)
        elif isinstance(error, IDENTITY_ERRORS) and not (in_flight.is_uncertain or in_flight.has_fresh_identity):
            # The log has forgotten the producer, or has an epoch of it that we do not know.
            self.session.forget_identity()
            in_flight.request = None
            in_flight.has_fresh_identity = True
        else:
            self._fail(in_flight, kafka_error_of(error))

    def _isolate(self, in_flight: InFlight, error: TxnStoreError) -> None:
        """Let the records fail that are at fault: halves are sent by themselves until one record is left."""
        if in_flight.request is not None:
            self.session.take_back(in_flight.request)
            in_flight.request = None
        if isinstance(error, UnknownTopicOrPartition) and not in_flight.has_fresh_topics:
            for batch in in_flight.batches:
                self.directory.forget(batch.topic)
            in_flight.has_fresh_topics = True
            return
        if len(in_flight.batches) > 1:
            parts: list[Sequence[Batch]] = [[batch] for batch in in_flight.batches]
        elif len(in_flight.batches[0].records) > 1:
            parts = [[half] for half in _halves(in_flight.batches[0])]
        else:
            kafka_error = kafka_error_of(error)
            self._fail(in_flight, kafka_error)
            if self.listener is not None:
                (batch,) = in_flight.batches
                where = f"a record for {batch.topic} [{batch.partition}] was refused"
                self.listener.records_refused(KafkaError(kafka_error.code(), f"{where}: {kafka_error.str()}"))
            return
        with self._changed:
            self._in_flight.popleft()
            self._in_flight.extendleft(
                InFlight(part, has_fresh_topics=in_flight.has_fresh_topics) for part in reversed(parts)
            )

    def _done(self, in_flight: InFlight) -> None:
        with self._changed:
            self._in_flight.remove(in_flight)
            self._drop_in_flight &= bool(self._in_flight)
            self._changed.notify_all()

    def _fail(self, in_flight: InFlight, error: KafkaError) -> None:
        """Report a request as not delivered, and see to it that nothing follows where the log may have it."""
        for batch in in_flight.batches:
            self._fail_batch(batch, error)
        self._done(in_flight)
        if not in_flight.is_uncertain:
            if in_flight.request is not None:
                self.session.take_back(in_flight.request)
        elif self.listener is None:
            self.session.forget_identity()
        else:
            self.listener.transaction_failed(
                OutcomeUnknown("records may or may not be in the log, and their time is up; abort the transaction")
            )

    def _fail_batch(self, batch: Batch, error: KafkaError) -> None:
        if self.listener is not None:
            self.listener.delivery_failed(len(batch.records))
        self._reports.add(DeliveryReport(batch.topic, batch.partition, batch.records, error))

    def _expire(self) -> None:
        """Give up what has waited for longer than message.timeout.ms, or what a purge names."""
        if self._drop_in_flight:
            self.drop_in_flight(KafkaError(KafkaError._PURGE_INFLIGHT))
        if self._settings.message_timeout_seconds <= 0:
            return
        before_seconds = time.monotonic() - self._settings.message_timeout_seconds
        error = KafkaError(KafkaError._MSG_TIMED_OUT)
        while self._in_flight and self._in_flight[0].batches[0].records[0][QUEUED_SECONDS] <= before_seconds:
            self._fail(self._in_flight[0], error)
        with self._changed:
            expired = self._accumulator.take_expired(before_seconds)
        for batch in expired:
            self._fail_batch(batch, error)

    def _back_off(self) -> None:
        longest_seconds = min(self._settings.backoff_seconds * 2**self._tries, self._settings.backoff_max_seconds)
        self._tries = min(self._tries + 1, 16)
        self._not_before_seconds = time.monotonic() + longest_seconds * self._random.uniform(0.5, 1)

    # --- records of topics that are not known yet -------------------------------------------------------------------

    def _look_up_topics(self) -> None:
        with self._changed:
            names = self._accumulator.unknown_topics
        for name in names:
            try:
                topic = self.directory.ensure(name)
            except TxnStoreError as error:
                if error.retriable:
                    self.retry_later(error)
                else:
                    self._fail_topic(name, kafka_error_of(error))
                continue
            self._assign(name, len(topic.partition_ids))

    def _assign(self, name: str, partition_count: int) -> None:
        refused: list[QueuedRecord] = []
        now_seconds = time.monotonic()
        with self._changed:
            queue = self._accumulator.take_unassigned(name)
            for record in queue.records if queue is not None else ():
                partition = record[PARTITION]
                if partition == PARTITION_UNASSIGNED:
                    partition = self._choice.choose(name, record[KEY], partition_count, now_seconds)
                if 0 <= partition < partition_count:
                    self._accumulator.put_assigned(name, partition, record)
                else:
                    refused.append(record)
        for record in refused:
            error = KafkaError(KafkaError._UNKNOWN_PARTITION)
            self._fail_batch(Batch(name, record[PARTITION], [record]), error)

    def _fail_topic(self, name: str, error: KafkaError) -> None:
        with self._changed:
            queue = self._accumulator.take_unassigned(name)
        if queue is not None:
            self._fail_batch(Batch(name, queue.partition, list(queue.records)), error)


def _halves(batch: Batch) -> tuple[Batch, Batch]:
    middle = len(batch.records) // 2
    return (
        Batch(batch.topic, batch.partition, batch.records[:middle]),
        Batch(batch.topic, batch.partition, batch.records[middle:]),
    )

"""This file is how a producer sends: batches leave the queue when they have lingered, one request at a time.

Nothing overtakes: a request that could not be written is written again before the
next one, and a commit comes after all of its transaction's records.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from txnstore.clients.accumulator import (
    QUEUED_SECONDS,
    Accumulator,
    Batch,
)
from txnstore.clients.delivery_reports import NOWHERE, DeliveryReport, DeliveryReports
from txnstore.clients.error_mapping import kafka_error_of
from txnstore.clients.kafka_error import KafkaError
from txnstore.clients.produce_requests import ProduceRequest, ProducerSession
from txnstore.clients.sender_thread import SenderThread
from txnstore.clients.unassigned_topics import UnassignedTopics
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
from txnstore.model import NO_PRODUCER

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
    """Takes batches from the queue and brings them into the log, each in its turn."""

    def __init__(
        self,
        thread: SenderThread,
        accumulator: Accumulator,
        reports: DeliveryReports,
        session: ProducerSession,
        topics: UnassignedTopics,
        *,
        settings: SenderSettings,
    ) -> None:
        """Send on `thread`, whose timed work this becomes."""
        self.thread = thread
        self.session = session
        self.listener: DeliveryListener | None = None
        self._changed = accumulator.changed
        self._accumulator = accumulator
        self._reports = reports
        self._topics = topics
        self._settings = settings
        self._in_flight: deque[InFlight] = deque()
        self._flushing = 0
        self._drop_in_flight = False
        thread.timed_work.append(self)

    # --- for every thread -------------------------------------------------------------------------------------------

    def begin_flush(self) -> None:
        """Send without lingering until `end_flush`."""
        with self._changed:
            self._flushing += 1
            self._changed.notify_all()

    def end_flush(self) -> None:
        """Linger again."""
        with self._changed:
            self._flushing -= 1

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

    def facts(self) -> dict[str, Any]:
        """Return what the producer's statistics say of queue and identity."""
        session = self.session
        with self._changed:
            return {
                "msg_cnt": self._accumulator.record_count,
                "msg_size": self._accumulator.size_bytes,
                "msg_max": self._accumulator.records_max,
                "msg_size_max": self._accumulator.size_bytes_max,
                "eos": {
                    "idemp_state": "Assigned" if session.identity != NO_PRODUCER else "Init",
                    "producer_id": session.identity.producer_id,
                    "producer_epoch": session.identity.epoch,
                },
            }

    # --- sending; on the thread only --------------------------------------------------------------------------------

    def due_seconds(self, now_seconds: float) -> float | None:
        """Return when there is something to send; None if there is nothing."""
        not_before_seconds = self.thread.not_before_seconds
        if self._in_flight:
            return now_seconds if self._drop_in_flight else not_before_seconds
        oldest_seconds = self._accumulator.oldest_seconds
        if oldest_seconds is None:
            return None
        if self._flushing or self._accumulator.has_full_batch:
            return not_before_seconds
        return max(oldest_seconds + self._settings.linger_seconds, not_before_seconds)

    def run(self) -> None:
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
            self.run()
            self._pause()

    def last_request(self) -> ProduceRequest | None:
        """Send until one request is left, and return it unsent: it goes with the commit.

        Raises:
            SenderStopped: the producer was closed.
        """
        while True:
            while self._in_flight or self._accumulator.unknown_topics:
                self.run()
                self._pause()
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
                    self._pause()
                    continue
            with self._changed:
                self._in_flight.append(in_flight)

    def _pause(self) -> None:
        self.thread.pause(lambda: self._drop_in_flight)

    def _look_up_topics(self) -> None:
        for failed, error in self._topics.look_up():
            self._fail_batch(failed, error)

    def send_again(self, request: ProduceRequest) -> None:
        """Put back a request that did not go with its commit: its records are at fault."""
        self.session.take_back(request)
        with self._changed:
            self._in_flight.append(InFlight(request.batches))

    @property
    def has_something(self) -> bool:
        """Whether anything waits to be sent or is being sent."""
        return bool(self._in_flight) or not self._accumulator.is_empty

    def report(self, request: ProduceRequest, appended: Sequence[Appended]) -> None:
        """Report the records of a request as delivered.

        After a lost answer some of them may have been deleted since: where those were is not known any more.
        """
        self.thread.succeeded()
        if len(appended) != len(request.batches):
            for batch in request.batches:
                self._reports.add(DeliveryReport(batch.topic, batch.partition, batch.records, base_offset=NOWHERE))
            return
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
                [(batch, self._topics.directory.ensure(batch.topic)) for batch in in_flight.batches]
            )
        return in_flight.request

    def _handle(self, in_flight: InFlight, error: TxnStoreError) -> None:
        """Decide what becomes of a request that was not written."""
        if isinstance(error, StoreClosed):
            self._fail(in_flight, KafkaError(KafkaError._PURGE_INFLIGHT))
        elif error.retriable or (error.outcome_unknown and self._settings.retries_unknown):
            # What came before the write, a new identity for example, leaves no record in the log.
            in_flight.is_uncertain |= error.outcome_unknown and in_flight.request is not None
            self.thread.retry_later(error)
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
                self._topics.directory.forget(batch.topic)
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


def _halves(batch: Batch) -> tuple[Batch, Batch]:
    middle = len(batch.records) // 2
    return (
        Batch(batch.topic, batch.partition, batch.records[:middle]),
        Batch(batch.topic, batch.partition, batch.records[middle:]),
    )

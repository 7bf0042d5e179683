"""The sending of a producer: batches leave the queue when they have lingered, one request at a time.

A cluster of one has one lane, in which the sender's thread writes by itself; of several databases each has its own.
Nothing overtakes: a request that could not be written is written again before the next one to the same database, and a
commit comes after all of its transaction's records.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from txnstore.clients.model.errors import KafkaError, kafka_error_of
from txnstore.clients.producer.queue import FULL_TEXT, Accumulator, Batch, DeliveryReport, DeliveryReports
from txnstore.clients.producer.requests import (
    DeliveryListener,
    InFlight,
    Lane,
    Lanes,
    LookUp,
    ProduceRequest,
    ProducerSession,
    UnassignedTopics,
)
from txnstore.clients.producer.thread import SenderThread, WriterHelp
from txnstore.db.cluster.membership import CONTROLLER_ID
from txnstore.deadline import wait_within
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

if TYPE_CHECKING:
    from txnstore.clients.configuration.configuration import Configuration

#: The log remembers five batches of a producer in each partition (KIP-98): so many may be repeated.
BATCHES_PER_PARTITION_MAX: Final = 5
#: What one request writes at most, so that nobody waits long for the heads of its partitions.
REQUEST_BYTES_MAX: Final = 16 * 1024 * 1024
#: What a full queue says while nothing of it can be sent.
HELD_TEXT: Final = (
    "Local: Queue full: the records of a transaction with an enlisted SQLite connection go with its commit, because the"
    " connection keeps all others from writing; make the transaction smaller, or queue.buffering.max.messages larger"
)
#: For how long a transaction's records wait for their commit at least, to go with it in one database transaction.
COMMIT_COMES_SECONDS: Final = 0.05
#: How long an abort waits for databases that have records of the transaction in hand; then it goes ahead of them.
SETTLE_SECONDS: Final = 2.0

#: The records are at fault: those that are fail, the others go on.
RECORD_ERRORS: Final = (
    InvalidRecord,
    InvalidTimestamp,
    InvalidTopic,
    RecordTooLarge,
    UnknownTopicOrPartition,
    UnsupportedCompression,
)
#: The topic may have changed since it was read: of such records it is read again, once.
TOPIC_ERRORS: Final = (InvalidRecord, InvalidTimestamp, RecordTooLarge, UnknownTopicOrPartition)
#: The log does not take this identity any more; without a transaction another one will do.
IDENTITY_ERRORS: Final = (InvalidProducerEpoch, InvalidProducerIdMapping, OutOfOrderSequence)


class Sender:
    """Takes batches from the queue and brings them into the log, each in its turn."""

    def __init__(  # noqa: PLR0917 - what it works with
        self,
        thread: SenderThread,
        accumulator: Accumulator,
        reports: DeliveryReports,
        session: ProducerSession,
        topics: UnassignedTopics,
        configuration: Configuration,
    ) -> None:
        """Send on `thread`, whose timed work this becomes."""
        self.thread = thread
        self.session = session
        self.listener: DeliveryListener | None = None
        self._changed = accumulator.changed
        #: The lock by itself, which is much faster to take.
        self._lock = thread.alarm.lock
        self._accumulator = accumulator
        self._reports = reports
        self._topics = topics
        accumulator.linger_seconds = self._linger_seconds = linger_seconds_of(configuration)
        #: 0: for ever.
        self._message_timeout_seconds: float = configuration["message.timeout.ms"] / 1000
        #: Whether records are sent again whose fate is not known.
        self._retries_unknown: bool = configuration["retries"] > 0
        self._lanes = Lanes(thread)
        self._look_up = LookUp(thread)
        self._flushing = 0
        #: The database whose records are held back, because the last of them go with the commit.
        self._committing_database_id: int | None = None
        #: How much waits for the commit of an enlisted connection; None: nothing waits for it.
        self._held_bytes_max: float | None = None
        connection = session.connection
        self._help = WriterHelp(connection.cluster, thread.new_helper, connection.upkeep.run, thread.alarm)
        thread.timed_work += [self, self._help]

    # --- for every thread -------------------------------------------------------------------------------------------

    def begin_flush(self) -> None:
        """Send without lingering until `end_flush`."""
        with self._lock:
            self._flushing += 1
            self._accumulator.linger_seconds = 0.0
            if not self._accumulator.is_empty:
                self.thread.alarm.ring()

    def end_flush(self) -> None:
        """Linger again."""
        with self._lock:
            self._flushing -= 1
            if not self._flushing:
                self._accumulator.linger_seconds = self._linger_seconds

    def hold_until_commit(self, size_bytes_max: float) -> None:
        """Send nothing by itself until there is more than this; infinite: nothing at all, no matter who asks."""
        with self._lock:
            self._held_bytes_max = size_bytes_max
            if self.holds_everything:
                self._accumulator.full_text = HELD_TEXT

    def stop_holding(self) -> None:
        """Send again as usual."""
        with self._lock:
            self._held_bytes_max = None
            self._accumulator.full_text = FULL_TEXT
            self.thread.alarm.ring()

    @property
    def holds_everything(self) -> bool:
        """Whether nothing can be sent before the commit."""
        return self._held_bytes_max == math.inf

    @property
    def _is_holding(self) -> bool:
        """Whether what waits is to go with the commit, as far as anybody can say now."""
        if self._held_bytes_max is None or self.holds_everything:
            return self.holds_everything
        return not self._flushing and self._accumulator.size_bytes <= self._held_bytes_max

    @property
    def unknown_topics(self) -> list[str]:
        """The topics that have to be looked up before their records can leave."""
        with self._lock:
            return self._accumulator.unknown_topics

    def purge(self, *, in_queue: bool, in_flight: bool) -> None:
        """Give up records: those that wait, and those that are being sent as soon as this can be stopped."""
        with self._lock:
            if in_queue:
                # Counted at once: no other thread may commit without them.
                self._reports.fail_waiting(None if self.listener is None else self.listener.delivery_failed)
            if in_flight:
                for sent in self._lanes.all_in_flight:
                    sent.is_given_up = True
                self.thread.alarm.ring()

    def wait_until_dropped(self, timeout_seconds: float) -> None:
        """Wait until what was being sent at a purge is reported."""
        with self._lock:
            wait_within(self._changed, lambda: not self._lanes.is_giving_up, timeout_seconds)

    def facts(self) -> dict[str, Any]:
        """Return what the producer's statistics say of queue, log and identity."""
        with self._lock:
            return {
                "msg_cnt": self._accumulator.record_count,
                "msg_size": self._accumulator.size_bytes,
                "msg_max": self._accumulator.records_max,
                "msg_size_max": self._accumulator.size_bytes_max,
                "metadata_cache_cnt": len(self._topics.directory.entries),
                "topics": {},
                **self.session.facts(),
            }

    # --- sending; on the thread only --------------------------------------------------------------------------------

    def due_seconds(self, now_seconds: float) -> float | None:
        """Return when there is something to send; None if there is nothing."""
        if self._look_up.has_answer or any(lane.has_answer for lane in self._lanes):
            return now_seconds
        if not self.has_something:
            return None
        due = [self._lane_due_seconds(lane, now_seconds) for lane in self._lanes if lane.in_flight]
        is_alone = self._is_alone()
        if not is_alone or not (due or self._is_holding):
            due += [self._look_up_due_seconds(), self._queue_due_seconds(now_seconds)]
        if not is_alone and self._message_timeout_seconds > 0:
            # What waits behind a database that is away has its time too.
            oldest_seconds = self._accumulator.oldest_seconds
            if oldest_seconds is not None:
                due.append(oldest_seconds + self._message_timeout_seconds)
        return min((at_seconds for at_seconds in due if at_seconds is not None), default=None)

    def _lane_due_seconds(self, lane: Lane, now_seconds: float) -> float | None:
        if lane.is_writing:
            return None
        if any(sent.is_given_up for sent in lane.in_flight):
            return now_seconds
        if lane is self._lanes.alone:
            if not self._is_alone():
                return now_seconds
            if self.holds_everything:
                return None
        return lane.backoff.not_before_seconds

    def _look_up_due_seconds(self) -> float | None:
        oldest_seconds = self._accumulator.oldest_unknown_seconds
        if oldest_seconds is None or self._look_up.is_running:
            return None
        linger_seconds = self._accumulator.linger_seconds
        backoff = self.thread.backoff if self._is_alone() else self._look_up.backoff
        return max(oldest_seconds + linger_seconds, backoff.not_before_seconds)

    def _queue_due_seconds(self, now_seconds: float) -> float | None:
        """Return when records are to be taken from the queue of a database whose lane is free."""
        is_alone = self._is_alone()
        oldest_seconds, has_full_batch = self._accumulator.waiting(None if is_alone else self._unless_blocked())
        if oldest_seconds is None:
            return None
        is_due = self._flushing or has_full_batch
        due_seconds = now_seconds if is_due else oldest_seconds + self._accumulator.linger_seconds
        return max(due_seconds, self.thread.backoff.not_before_seconds) if is_alone else due_seconds

    def run(self) -> None:
        """Look at what has come back, and give each database that has nothing to do what comes next.

        A cluster of one is written to right here; what cannot be sent now stays in flight.
        """
        for lane in list(self._lanes):
            if lane.has_answer:
                self._take_answer(lane)
        self._expire()
        if not self._is_alone():
            self._leave_lane_of_one()
            self._look_up_in_background()
        elif not self._lanes.alone.in_flight:
            self._look_up_here()
        self._distribute()
        ready = [found for lane in list(self._lanes) if (found := self._next_of(lane)) is not None]
        if ready:
            self._write(ready)

    def _write(self, ready: Sequence[tuple[InFlight, ProduceRequest]]) -> None:
        """Write what comes first in each of these lanes."""
        if self.listener is not None:
            self.listener.writing()
        if not self._is_alone():
            self.session.expect({number for _, request in ready for number in request.partition_ids})
        for in_flight, request in ready:
            lane, write = in_flight.lane, partial(self.session.write, request)
            if lane.is_inline:
                self._finish(in_flight, request, write)
            else:
                with self._lock:
                    lane.write(in_flight, write, self.thread.alarm)

    def _take_answer(self, lane: Lane) -> None:
        with self._lock:
            in_flight, answer = lane.take_answer()
        assert in_flight.request is not None
        try:
            self._finish(in_flight, in_flight.request, answer.result)
        except BaseException:
            lane.backoff.back_off()
            raise

    def _finish(self, in_flight: InFlight, request: ProduceRequest, answer: Callable[[], Sequence[Appended]]) -> None:
        """Report a request by the answer of its database, or decide what becomes of it."""
        try:
            appended = answer()
        except TxnStoreError as error:
            if in_flight in in_flight.lane.in_flight:
                self._handle(in_flight, error)
            return
        with self._lock:
            # Else it was reported meanwhile: by an abort, an interrupted commit, or the end of the producer.
            if in_flight in in_flight.lane.in_flight:
                if in_flight.lane.backoff.is_pausing:
                    in_flight.lane.backoff.succeeded()
                self._lanes.take_out(in_flight)  # first: sent again, it would be reported again
                self._changed.notify_all()
                self.report(request, appended)

    def _distribute(self) -> None:
        """Take what comes next from the queue, for each database whose lane is free."""
        with self._lock:
            if self._is_alone():
                if not self._lanes.alone.in_flight:
                    self._take_into(self._lanes.alone)
                return
            due_seconds = self._queue_due_seconds(time.monotonic())
            if due_seconds is not None and due_seconds <= time.monotonic():
                unless = self._unless_blocked()
                taken: list[Batch] = []
                try:
                    self._accumulator.take_batches(BATCHES_PER_PARTITION_MAX, REQUEST_BYTES_MAX, unless, into=taken)
                finally:
                    self._enter(taken)

    def _take_into(self, lane: Lane, unless: Callable[[str, int], bool] | None = None) -> InFlight | None:
        """Take what comes next from the queue into a lane, where an abort finds it, whatever else fails."""
        batches: list[Batch] = []
        in_flight = InFlight(lane, batches)
        lane.in_flight.append(in_flight)
        try:
            self._accumulator.take_batches(BATCHES_PER_PARTITION_MAX, REQUEST_BYTES_MAX, unless, into=batches)
        finally:
            if not batches:
                lane.in_flight.pop()
        return in_flight if batches else None

    def _next_of(self, lane: Lane) -> tuple[InFlight, ProduceRequest] | None:
        """Return what the lane is to write now, if there is something."""
        if lane.is_writing or not lane.in_flight:
            return None
        # With one database there is nothing else to do meanwhile: the thread that runs this has waited before.
        if not lane.is_inline and lane.backoff.not_before_seconds > time.monotonic():
            return None
        in_flight = lane.in_flight[0]
        try:
            if not lane.is_inline and in_flight.request is None and self._is_misplaced(in_flight):
                with self._lock:
                    lane.in_flight.popleft()
                    self._enter(in_flight.batches, has_fresh_topics=in_flight.has_fresh_topics)
                return None
            return in_flight, self._prepared(in_flight)
        except TxnStoreError as error:
            self._handle(in_flight, error)
            return None

    def send_everything(self) -> None:
        """Send until nothing waits any more.

        Raises:
            SenderStopped: the producer was closed.
        """
        self.begin_flush()
        try:
            while self.has_something:
                self.run()
                if self.has_something:
                    self._pause()
        finally:
            self.end_flush()

    def take_everything(self) -> list[ProduceRequest]:
        """Take all that waits, unsent, also what was tried before and may be in the log: it goes with the commit.

        What is too much to wait is sent first.

        Raises:
            SenderStopped: the producer was closed.
        """
        lane = self._lanes.alone
        while (
            self._held_bytes_max is not None
            and self._accumulator.size_bytes > self._held_bytes_max
            and self.has_something
        ):
            self.run()
            self._pause()
        while True:
            self._drop_given_up()
            self._look_up_here()
            with self._lock:
                while self._take_into(lane) is not None:
                    pass
                taken, is_complete = list(lane.in_flight), self._accumulator.is_empty
            if is_complete and all(self._can_be_prepared(in_flight) for in_flight in taken):
                with self._lock:
                    # Without what an interrupt of the commit has failed meanwhile, on the caller's thread.
                    requests = [sent.request for sent in lane.in_flight if sent.request is not None]
                    self._changed.notify_all()
                    lane.in_flight.clear()
                return requests
            self._pause()

    def _can_be_prepared(self, in_flight: InFlight) -> bool:
        try:
            self._prepared(in_flight)
        except TxnStoreError as error:
            self._handle(in_flight, error)
            return False
        return True

    def last_requests(self, last: list[ProduceRequest]) -> None:
        """Send until one request is left, or none, and have it in `last`, unsent: it goes with the commit.

        With several databases it is one to the coordinator's.  Whatever fails here, what is in `last` is not in flight.

        Raises:
            SenderStopped: the producer was closed.
        """
        self.begin_flush()
        try:
            self._last_requests(last)
        finally:
            self._committing_database_id = None
            self.end_flush()

    def _last_requests(self, last: list[ProduceRequest]) -> None:
        while True:
            while self._has_more_than_commit:
                if self._is_alone() and self._lanes.is_empty:
                    # Looked up and not sent: what has waited for its topic goes with the commit as well.
                    self._expire()
                    self._look_up_here()
                else:
                    self.run()
                if self._has_more_than_commit:
                    self._pause()
            committing_id = self._committing_database_id
            with self._lock:
                lane = self._lanes.alone if committing_id is None else self._lanes.of(committing_id)
                unless = None if committing_id is None else self._goes_before_commit
                in_flight = self._take_into(lane, unless)
                is_last = self._accumulator.is_empty
            if in_flight is None:
                if is_last:
                    return
                continue
            if is_last and self._can_be_prepared(in_flight):
                with self._lock:
                    # Unless an interrupt of the commit has failed it meanwhile, on the caller's thread.
                    if in_flight in lane.in_flight and in_flight.request is not None:
                        self._changed.notify_all()
                        # In this order: what comes second wants no memory, and it is never in neither of them.
                        last.append(in_flight.request)
                        lane.in_flight.remove(in_flight)
                        return
            elif is_last:
                self._pause()

    @property
    def _has_more_than_commit(self) -> bool:
        """Whether something waits, or is in flight, beside what goes with the commit."""
        self._committing_database_id = None if self._is_alone() else self.session.coordinator_database_id
        if not self._lanes.is_empty or self._accumulator.unknown_topics or self._look_up.is_running:
            return True
        if self._committing_database_id is None:
            return False
        with self._lock:
            return self._accumulator.waiting(self._goes_with_commit)[0] is not None

    def _pause(self) -> None:
        if self._is_alone():
            self.thread.pause(lambda: self._lanes.is_giving_up)
        else:
            self.thread.wait_for_due(self._next_step_seconds)

    def _next_step_seconds(self, now_seconds: float) -> float | None:
        """Return when something is due for a caller that waits for all to be sent; infinity: when an answer comes."""
        due_seconds = self.due_seconds(now_seconds)
        if due_seconds is None and (self._look_up.is_running or any(lane.is_writing for lane in self._lanes)):
            return math.inf
        return due_seconds

    def _look_up_here(self) -> None:
        for failed, error in self._topics.look_up(self.thread.backoff.retry_later):
            self._fail_batch(failed, error)

    def send_again(self, request: ProduceRequest) -> None:
        """Put back a request that did not go with its commit: its records are at fault."""
        self.session.take_back(request)
        with self._lock:
            lane = self._lanes.alone
            if not self._is_alone():
                batch = request.batches[0]
                lane = self._lanes.of(self._leader_of(batch.topic, batch.partition))
            lane.in_flight.append(InFlight(lane, request.batches))

    # --- with several databases: a lane each ------------------------------------------------------------------------

    def _is_alone(self) -> bool:
        return self.session.connection.is_alone

    def _leader_of(self, topic: str, number: int) -> int:
        """Return the database of a partition; of one that is not known yet, the controller, until it is looked up."""
        known = self._topics.directory.cached(topic)
        return known.leaders[number] if known is not None and 0 <= number < len(known.leaders) else CONTROLLER_ID

    def _goes_with_commit(self, topic: str, number: int) -> bool:
        return self._leader_of(topic, number) == self._committing_database_id

    def _goes_before_commit(self, topic: str, number: int) -> bool:
        return self._leader_of(topic, number) != self._committing_database_id

    def _unless_blocked(self) -> Callable[[str, int], bool]:
        """Return what is true of the partitions of which nothing is taken from the queue now."""
        blocked = self._lanes.busy
        if self._committing_database_id is not None:
            blocked.add(self._committing_database_id)
        return lambda topic, number: self._leader_of(topic, number) in blocked

    def _leave_lane_of_one(self) -> None:
        """Let what was in flight while there was one database go on in the lane of its leader."""
        with self._lock:
            alone = self._lanes.alone.in_flight
            while alone:
                in_flight = alone.popleft()
                batch = in_flight.batches[0]
                in_flight.lane = self._lanes.of(self._leader_of(batch.topic, batch.partition))
                in_flight.lane.in_flight.append(in_flight)

    def _look_up_in_background(self) -> None:
        for failed, error in self._look_up.take_answer():
            self._fail_batch(failed, error)
        with self._lock:
            due_seconds = self._look_up_due_seconds()
        if due_seconds is not None and due_seconds <= time.monotonic():
            self._look_up.start(self._topics)

    def _enter(self, batches: Sequence[Batch], *, has_fresh_topics: bool = False) -> None:
        """Put batches into the lanes of their leaders."""
        by_leader: dict[Lane, list[Batch]] = {}
        try:
            for batch in batches:
                by_leader.setdefault(self._lanes.of(self._leader_of(batch.topic, batch.partition)), []).append(batch)
            entering = [InFlight(lane, own, has_fresh_topics=has_fresh_topics) for lane, own in by_leader.items()]
        except Exception:
            self.fail_batches(batches, KafkaError(KafkaError._FAIL))
            raise
        for in_flight in entering:
            in_flight.lane.in_flight.append(in_flight)

    def _is_misplaced(self, in_flight: InFlight) -> bool:
        """Return whether some of the batches live elsewhere after all: a topic was recreated."""
        for name in {batch.topic for batch in in_flight.batches}:
            self._topics.directory.ensure(name)
        return any(
            self._leader_of(batch.topic, batch.partition) != in_flight.lane.database_id for batch in in_flight.batches
        )

    # --- the state of things ----------------------------------------------------------------------------------------

    @property
    def has_only_queued(self) -> bool:
        """Whether all that it has is in the queue, for topics that are known, and for one database; under the lock."""
        is_quiet = self._lanes.is_empty and not self._look_up.is_running and self._held_bytes_max is None
        return is_quiet and self._is_alone() and not self._accumulator.unknown_topics

    @property
    def has_something(self) -> bool:
        """Whether anything waits to be sent or is being sent."""
        return not self._lanes.is_empty or not self._accumulator.is_empty or self._look_up.is_running

    def report(self, request: ProduceRequest, appended: Sequence[Appended]) -> None:
        """Report the records of a request as delivered; first of all, whatever else there is no memory for.

        After a lost answer some of them may have been deleted since: where those were is not known any more.
        """
        if len(appended) == len(request.batches):
            for batch, place in zip(request.batches, appended, strict=True):
                self._reports.add(
                    DeliveryReport(batch, base_offset=place.base_offset, log_append_time_ms=place.log_append_time_ms)
                )
        else:
            for batch in request.batches:
                self._reports.add(DeliveryReport(batch))
        if self.thread.backoff.is_pausing:
            self.thread.backoff.succeeded()
        self.session.note_written(request)
        if (gone_back := self.session.note_places(appended)) is not None:
            self.thread.report_fatal(kafka_error_of(gone_back, fatal=True))
        self._help.wrote(request.partition_ids)

    def fail_batches(self, batches: Iterable[Batch], error: KafkaError) -> None:
        """Report the records of these batches as not delivered."""
        for batch in batches:
            self._fail_batch(batch, error)

    def fail_requests(self, requests: list[ProduceRequest], error: KafkaError) -> None:
        """Report the records of these requests as not delivered, and take those out of the list."""
        with self._lock:
            while requests:
                self._fail_held(requests[0], requests, error)

    def drop_in_flight(self, error: KafkaError, *, but_written: bool = False) -> None:
        """Report what is in flight as not delivered; with `but_written` only what no database has in hand.

        The transaction that it belongs to is aborted; see `settle`.
        """
        with self._lock:
            everything = self._lanes.all_in_flight
        for in_flight in everything:
            is_written = in_flight.lane.is_being_written(in_flight)
            if is_written and but_written:
                in_flight.is_given_up = True
                continue
            # What is being written this moment may still reach the log; the abort that follows covers it.
            in_flight.is_uncertain |= is_written
            self._fail(in_flight, error)

    def settle(self) -> None:
        """Wait, but not for long, until no database has anything in hand: those with an answer are to hear of it.

        Raises:
            SenderStopped: the producer was closed.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        while any(lane.is_writing for lane in self._lanes) and time.monotonic() < deadline:
            self.thread.wait_for_due(
                lambda now_seconds: now_seconds if any(lane.has_answer for lane in self._lanes) else deadline
            )
            for lane in list(self._lanes):
                if lane.has_answer:
                    self._take_answer(lane)

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
        elif error.retriable or (error.outcome_unknown and self._retries_unknown):
            # What came before the write, a new identity for example, leaves no record in the log.
            in_flight.is_uncertain |= error.outcome_unknown and in_flight.request is not None
            in_flight.lane.backoff.retry_later(error)
        elif isinstance(error, RECORD_ERRORS) and not in_flight.is_uncertain:
            self._isolate(in_flight, error)
        elif self.listener is not None:
            self._fail(in_flight, kafka_error_of(error))
            self.listener.transaction_failed(error)
        elif isinstance(error, IDENTITY_ERRORS) and not (in_flight.is_uncertain or in_flight.has_fresh_identity):
            # The log has forgotten the producer, or has an epoch of it that we do not know.
            if in_flight.request is None or in_flight.request.producer == self.session.identity:
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
        if isinstance(error, TOPIC_ERRORS) and not in_flight.has_fresh_topics:
            for batch in in_flight.batches:
                self._topics.directory.forget(batch.topic)
            in_flight.has_fresh_topics = True
            return
        if len(in_flight.batches) > 1:
            parts: list[Sequence[Batch]] = [[batch] for batch in in_flight.batches]
        elif (count := in_flight.batches[0].record_count) > 1:
            whole, middle = in_flight.batches[0], count // 2
            parts = [[whole.part(0, middle)], [whole.part(middle, count)]]
        else:
            kafka_error = kafka_error_of(error)
            self._fail(in_flight, kafka_error)
            if self.listener is not None:
                (batch,) = in_flight.batches
                where = f"a record for {batch.topic} [{batch.partition}] was refused"
                self.listener.records_refused(KafkaError(kafka_error.code(), f"{where}: {kafka_error.str()}"))
            return
        with self._lock:
            lane = in_flight.lane
            # Not always the first: a commit takes several at once.
            place = lane.in_flight.index(in_flight)
            del lane.in_flight[place]
            for part in reversed(parts):
                lane.in_flight.insert(place, in_flight.part(part))

    def _fail(self, in_flight: InFlight, error: KafkaError) -> None:
        """Report a request as not delivered, and see to it that nothing follows where the log may have it."""
        with self._lock:
            if not self._fail_held(in_flight, in_flight.lane.in_flight, error):
                return  # reported already: by another thread, or with the failure of one before it
        if not in_flight.is_uncertain:
            if in_flight.request is not None:
                self.session.take_back(in_flight.request)
        elif self.listener is None:
            self.session.forget_identity()
        else:
            reason = "message.timeout.ms is over, and the records may or may not be in the log"
            self.listener.transaction_failed(OutcomeUnknown(f"{reason}; abort the transaction"))

    def _fail_held(self, sent: InFlight | ProduceRequest, held: list[Any] | deque[Any], error: KafkaError) -> bool:
        """Report what is held as not delivered, in its place, once, wherever Ctrl-C comes; False: it was not there."""
        if sent not in held:
            return False
        if self.listener is not None:
            self.listener.delivery_failed(sum(batch.record_count for batch in sent.batches), error)
        self._changed.notify_all()
        return self._reports.add_instead([DeliveryReport(batch, error) for batch in sent.batches], sent, held)

    def _fail_batch(self, batch: Batch, error: KafkaError) -> None:
        if self.listener is not None:
            self.listener.delivery_failed(batch.record_count, error)
        self._reports.add(DeliveryReport(batch, error))

    def _expire(self) -> None:
        """Give up what has waited for longer than message.timeout.ms, or what a purge names."""
        self._drop_given_up()
        if self._message_timeout_seconds <= 0:
            return
        before_seconds = time.monotonic() - self._message_timeout_seconds
        error = KafkaError(KafkaError._MSG_TIMED_OUT)
        for lane in list(self._lanes):
            while lane.in_flight and not lane.is_writing and lane.in_flight[0].queued_seconds <= before_seconds:
                self._fail(lane.in_flight[0], error)
        expired: list[Batch] = []
        try:
            with self._lock:
                self._accumulator.take_expired(before_seconds, expired)
        finally:
            self.fail_batches(expired, error)

    def _drop_given_up(self) -> None:
        with self._lock:
            given_up = [sent for sent in self._lanes.all_in_flight if sent.is_given_up]
        for in_flight in given_up:
            if not in_flight.lane.is_being_written(in_flight):
                self._fail(in_flight, KafkaError(KafkaError._PURGE_INFLIGHT))


def linger_seconds_of(configuration: Configuration) -> float:
    """Return how long a record waits for others, or for the commit of its transaction."""
    linger_seconds: float = configuration["linger.ms"] / 1000
    if not configuration["transactional.id"]:
        return linger_seconds
    timeout_seconds: float = configuration["message.timeout.ms"] / 1000 or math.inf
    return max(linger_seconds, min(COMMIT_COMES_SECONDS, timeout_seconds / 2))

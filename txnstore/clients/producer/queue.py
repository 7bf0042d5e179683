"""A producer's queue: records get their partition, wait in it until they leave in batches, and then for their reports.

A record that comes without a partition gets one by its key, or the topic's partition of the moment.  Records of topics
that are not known yet wait until these have been looked up.  A record counts until its delivery report is served, so
that a program that never serves reports is told so (`BufferError`).  The sender makes reports; poll, flush or close of
the caller serve them.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter, length_hint
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

from txnstore import bulk
from txnstore.clients.callbacks import EventQueue, application_callback, call_first
from txnstore.clients.model.errors import KafkaError
from txnstore.clients.model.message import (
    TIMESTAMP_CREATE_TIME,
    TIMESTAMP_LOG_APPEND_TIME,
    Message,
    RecordSource,
    messages_of,
)
from txnstore.clients.model.topic_partition import OFFSET_INVALID
from txnstore.clients.producer.state import IN_TRANSACTION, TransactionStage
from txnstore.clients.producer.thread import Alarm
from txnstore.deadline import Condition, Ticks
from txnstore.log.columns import fitting
from txnstore.log.partitioners import PartitionChoice
from txnstore.model import NO_TIMESTAMP_MS

if TYPE_CHECKING:
    from txnstore.clients.configuration.configuration import Configuration
    from txnstore.log.topics import Topic

#: How much of the topic's max.message.bytes is filled: what does not compress becomes a little larger by a codec.
_FILLED_OF_64: Final = 63

_PLACES: Final = attrgetter("places")

#: Asked for by the caller: a partition chosen by key.
PARTITION_UNASSIGNED: Final = -1

#: What a full queue says.
FULL_TEXT: Final = "Local: Queue full"

DeliveryCallback = Callable[[Any, Any], object]

#: The places of a record's values: a queue holds those of all its records one after another in one flat list, so that
#: Python's garbage collector has nothing to do for a record, of which there are very many.
VALUE: Final = 0
KEY: Final = 1
TIMESTAMP_MS: Final = 2
HEADERS: Final = 3  # packed
CALLBACK: Final = 4
QUEUED_SECONDS: Final = 5  # by the monotonic clock
SIZE_BYTES: Final = 6  # of value, key and headers
#: How many places a record takes.
PLACES: Final = 7


class QueueFields:
    """What changes of a queue with each record: the part that there is in C as well."""

    __slots__ = ("notify_at_bytes", "places", "size_bytes")


if TYPE_CHECKING:
    _QueueFields = QueueFields
    _AccumulatorFields = object
else:
    _QueueFields = bulk.core.QueueFields if bulk.IN_C else QueueFields
    _AccumulatorFields = bulk.core.AccumulatorFields if bulk.IN_C else object


class PartitionQueue(_QueueFields):
    """The records of one partition, or those of a topic that nobody has looked up yet, in order."""

    __slots__ = ("asked_for", "batch_bytes_max", "partition", "topic")

    def __init__(self, topic: str, partition: int, batch_bytes_max: int) -> None:
        """Begin without any."""
        self.topic = topic
        self.partition = partition
        self.batch_bytes_max = batch_bytes_max
        self.places: list[Any] = []
        """The values of its records; see `PLACES`."""
        self.asked_for: list[int] = []
        """Which partition was asked for by each record of a topic that nobody has looked up yet, or -1."""
        self.size_bytes = 0
        self.notify_at_bytes = 0
        """The sender learns of the record by which the queue becomes so large."""

    @property
    def record_count(self) -> int:
        """How many records wait."""
        return len(self.places) // PLACES

    @property
    def oldest_seconds(self) -> float:
        """When the first record was queued."""
        return float(self.places[QUEUED_SECONDS])

    def take_batch(self, records_max: int, batches: list[Batch]) -> None:
        """Take over the first records that make a batch which the log takes; one that is too large goes by itself."""
        batch = self.first(min(self.record_count, records_max))
        if self.size_bytes > self.batch_bytes_max:
            count = bisect_right(list(accumulate(batch.sizes_bytes)), self.batch_bytes_max)
            batch = batch.part(0, max(1, count))
        # What the log adds to each record counts as well: a batch that is refused would be encoded twice.
        count = fitting(
            batch.sizes_bytes,
            batch.keys,
            batch.values,
            batch.timestamps_ms,
            batch.packed_headers,
            batch_bytes_max=self.batch_bytes_max,
        )
        self.take_over(batch if count == batch.record_count else batch.part(0, count), batches)

    def first(self, count: int) -> Batch:
        """Return the first records, which stay where they are."""
        return Batch.of(self.topic, self.partition, self.places[: count * PLACES], self.asked_for[:count])

    def take_over(self, batch: Batch, batches: list[Batch]) -> None:
        """Take out the first records, which the batch holds, to `batches`: without memory for that they stay here."""
        count, size_bytes = batch.record_count, batch.size_bytes
        batches.append(batch)
        try:
            del self.places[: count * PLACES]
        except BaseException:
            batches.pop()
            raise
        del self.asked_for[:count]
        self.size_bytes -= size_bytes
        self.notify_at_bytes = self.batch_bytes_max


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of one partition that travel together: a column for each of their values."""

    topic: str
    partition: int
    values: list[bytes | None]
    keys: list[bytes | None]
    timestamps_ms: list[int]
    packed_headers: list[str | None]
    callbacks: list[DeliveryCallback | None]
    queued_seconds: list[float]
    sizes_bytes: list[int]
    asked_for: Sequence[int] = ()
    """Which partition was asked for by each, or -1, while `partition` is -1."""

    @classmethod
    def of(cls, topic: str, partition: int, places: list[Any], asked_for: Sequence[int] = ()) -> Batch:
        """Return the records of which these are the values."""
        return cls(
            topic,
            partition,
            places[VALUE::PLACES],
            places[KEY::PLACES],
            places[TIMESTAMP_MS::PLACES],
            places[HEADERS::PLACES],
            places[CALLBACK::PLACES],
            places[QUEUED_SECONDS::PLACES],
            places[SIZE_BYTES::PLACES],
            asked_for,
        )

    @property
    def record_count(self) -> int:
        """How many records there are."""
        return len(self.sizes_bytes)

    @property
    def size_bytes(self) -> int:
        """The bytes of all records, as the queue counts them."""
        return sum(self.sizes_bytes)

    def part(self, start: int, stop: int) -> Batch:
        """Return some of the records."""
        return Batch(
            self.topic,
            self.partition,
            self.values[start:stop],
            self.keys[start:stop],
            self.timestamps_ms[start:stop],
            self.packed_headers[start:stop],
            self.callbacks[start:stop],
            self.queued_seconds[start:stop],
            self.sizes_bytes[start:stop],
            self.asked_for[start:stop],
        )


class Gate(Protocol):
    """Whether records may be queued: the transaction that they belong to."""

    stage: TransactionStage

    def refuse_record(self) -> NoReturn:
        """Raise what a record is refused with outside of a transaction."""
        ...


class Accumulator(_AccumulatorFields):
    """The queues of a producer.  `changed` is the producer's one lock; everything here is done under it."""

    def __init__(
        self,
        changed: threading.Condition,
        alarm: Alarm,
        *,
        linger_seconds: float,
        records_max: int,
        size_bytes_max: int,
        batch_records_max: int,
        batch_bytes_max: int,
    ) -> None:
        """Hold at most `records_max` records of `size_bytes_max` bytes; a batch is bounded likewise.

        The `alarm` rings when something is to be sent earlier than the sender knows; its lock is that of `changed`.
        """
        self.changed = changed
        self.alarm = alarm
        #: Taken as it is where every nanosecond counts; a Condition would go through methods of its own.
        self._lock = alarm.lock
        self.linger_seconds = linger_seconds
        """How long a record waits for others."""
        self.records_max = records_max
        self.size_bytes_max = size_bytes_max
        self.batch_records_max = batch_records_max
        self.batch_bytes_max = batch_bytes_max
        self._batch_places_max = batch_records_max * PLACES
        self.gate: Gate | None = None
        """Whether records may be queued, if they belong to a transaction."""
        self.settle: Callable[[], None] = lambda: None
        """Counts out the records of which the report has been served just now; called under the lock."""

        self.record_count = 0
        """The records that are queued, in flight, or wait for their report to be served."""
        self.size_bytes = 0
        self.full_text = FULL_TEXT
        """What a full queue says."""
        self._closed_text: str | None = None

        self.queues: dict[tuple[str, int], PartitionQueue] = {}
        """What waits, by topic and partition."""
        #: Records of topics that are not known yet, by topic.
        self._unassigned: dict[str, PartitionQueue] = {}
        self.given_up: list[Mapping[Any, PartitionQueue]] = []
        """What does not wait any more, and has no report yet."""

    def add(  # noqa: PLR0917 - called for each record, and keywords take their time
        self,
        topic: str,
        partition: int,
        known: Topic | None,
        value: bytes | None,
        key: bytes | None,
        timestamp_ms: int,
        headers: str | None,
        callback: DeliveryCallback | None,
        queued_seconds: float,
        size_bytes: int,
        asked_for: int,
    ) -> None:
        """Queue a record for a partition, or with partition -1 for a topic that is not known and has to be looked up.

        Raises:
            BufferError: the queue is full; serve delivery reports and try again.
            KafkaException: the transaction is over, so the record would belong to no transaction.
        """
        own_place = topic, partition
        asked: tuple[int, ...] = ()
        record = (value, key, timestamp_ms, headers, callback, queued_seconds, size_bytes)
        with self._lock:
            if self.record_count >= self.records_max or self.size_bytes + size_bytes > self.size_bytes_max:
                self._make_room(size_bytes)
            while True:
                # From here on to the last count no call: what a signal's handler or a finalizer does on this thread,
                # a flush or an abort, comes before all of it or after.  Ctrl-C finds all of it done, or nothing.
                gate = self.gate
                if gate is not None and gate.stage is not IN_TRANSACTION:
                    # Another thread may have ended the transaction meanwhile.
                    gate.refuse_record()
                if topic not in self._unassigned:
                    try:
                        queue = self.queues[own_place]
                        break
                    except KeyError:
                        self._queue(topic, partition, known)
                elif not asked:
                    asked = (asked_for,)
                else:
                    # Not past those that were queued before the topic was known.
                    queue = self._unassigned[topic]
                    queue.asked_for += asked
                    break
            places = queue.places
            try:
                places += record
            except MemoryError:
                del queue.asked_for[queue.record_count :]
                raise
            self.record_count += 1
            self.size_bytes += size_bytes
            queue.size_bytes = waiting_bytes = queue.size_bytes + size_bytes
            if waiting_bytes >= queue.notify_at_bytes or len(places) == self._batch_places_max:
                is_full = waiting_bytes >= queue.batch_bytes_max
                if is_full or len(places) == self._batch_places_max:
                    self.alarm.ring()
                else:
                    # Asleep until the record has lingered, or for less, the sender learns of it by itself.
                    self.alarm.ring(queued_seconds + self.linger_seconds)
                queue.notify_at_bytes = queue.batch_bytes_max + (waiting_bytes if is_full else 0)

    def _make_room(self, size_bytes: int) -> None:
        """Count out what has been served meanwhile; BufferError if the queue is still full."""
        if self._closed_text is not None:
            raise RuntimeError(self._closed_text)
        self.settle()
        if self.record_count >= self.records_max or self.size_bytes + size_bytes > self.size_bytes_max:
            raise BufferError(self.full_text)

    def close(self, closed_text: str) -> None:
        """Take no record any more, of no call that has begun before either: nobody would send or report it."""
        with self._lock:
            self._closed_text, self.records_max = closed_text, -1

    def settled_count(self) -> int:
        """Return how many records are queued, in flight, or wait for their report at this moment."""
        with self._lock:
            self.settle()
            return self.record_count

    def release(self, report: DeliveryReport) -> None:
        """Count out the records of a report that have been served since this was last done."""
        while True:
            before, served_count = report.released_count, report.served_count
            size_bytes = sum(report.batch.sizes_bytes[before:served_count])
            if report.released_count == before:
                break  # else a signal's handler has served reports in between, on this thread
        # No call in between: Ctrl-C finds all of this done, or nothing.
        report.released_count = served_count
        self.record_count -= served_count - before
        self.size_bytes -= size_bytes
        if self.record_count == 0:
            self.changed.notify_all()

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be sent."""
        return next(self._all_queues(), None) is None

    @property
    def waiting_count(self) -> int:
        """How many records wait to be sent."""
        # Listed first: a signal's handler may queue more meanwhile.
        return sum(queue.record_count for queue in (*self.queues.values(), *self._unassigned.values()))

    @property
    def oldest_seconds(self) -> float | None:
        """When the oldest record was queued, by the monotonic clock."""
        return min((queue.oldest_seconds for queue in self._all_queues()), default=None)

    def waiting(self, unless: Callable[[str, int], bool] | None = None) -> tuple[float | None, bool]:
        """Return when the oldest record of a known topic was queued, and whether a batch is full.

        Partitions for which `unless` is true are left out.
        """
        queues = [
            queue
            for queue in self.queues.values()
            if queue.places and (unless is None or not unless(queue.topic, queue.partition))
        ]
        oldest_seconds = min((queue.oldest_seconds for queue in queues), default=None)
        return oldest_seconds, any(self._is_full(queue) for queue in queues)

    @property
    def oldest_unknown_seconds(self) -> float | None:
        """When the oldest record of a topic that is not known yet was queued."""
        return min((queue.oldest_seconds for queue in self._unassigned.values() if queue.places), default=None)

    @property
    def unknown_topics(self) -> list[str]:
        """The topics that have to be looked up before their records can leave."""
        return list(self._unassigned)

    def unassigned(self, topic: str) -> PartitionQueue | None:
        """Return the records of a topic that was not looked up before, which stay where they are."""
        return self._unassigned.get(topic)

    def take_unassigned(self, topic: str) -> PartitionQueue | None:
        """Take the records of a topic that was looked up."""
        return self._unassigned.pop(topic, None)

    def put_assigned(self, known: Topic, partition: int, places: Sequence[Any]) -> None:
        """Queue for its partition a record, by its values, that was counted before."""
        queue = self._queue(known.name, partition, known)
        queue.size_bytes += places[SIZE_BYTES]
        queue.places += places

    def take_batches(
        self,
        batches_per_partition_max: int,
        size_bytes_max: int,
        unless: Callable[[str, int], bool] | None = None,
        into: list[Batch] | None = None,
    ) -> list[Batch]:
        """Take what goes next: the first batches of every partition, until `size_bytes_max` is reached.

        Partitions for which `unless` is true are left alone.  Of `into` the caller has what was taken, whatever fails.
        """
        batches: list[Batch] = [] if into is None else into
        left_bytes, failure = size_bytes_max, None
        for key, queue in list(self.queues.items()):
            if unless is not None and unless(queue.topic, queue.partition):
                continue
            for _ in range(batches_per_partition_max):
                if not queue.places or left_bytes <= 0:
                    break
                before_bytes = queue.size_bytes
                try:
                    queue.take_batch(self.batch_records_max, batches)
                except Exception as error:  # noqa: BLE001 - what was taken is not lost by it, and the rest is tried again
                    failure = error
                    break
                left_bytes -= before_bytes - queue.size_bytes
            if not queue.places:
                del self.queues[key]
        if failure is not None and not batches:
            raise failure
        return batches

    def take_expired(self, queued_before_seconds: float, expired: list[Batch]) -> None:
        """Take what was queued before this moment of the monotonic clock over to `expired`, whatever else fails."""
        for queue in list(self._all_queues()):
            count, queued_seconds = 0, queue.places[QUEUED_SECONDS::PLACES]
            while count < len(queued_seconds) and queued_seconds[count] <= queued_before_seconds:
                count += 1
            if count:
                queue.take_over(queue.first(count), expired)
        self._drop_empty()

    def give_up(self) -> None:
        """Give up every record that waits; those waiting for reports are woken."""
        self.changed.notify_all()
        # No call in between: Ctrl-C finds each record here or there.
        self.given_up += self.queues, self._unassigned
        self.queues, self._unassigned = {}, {}

    def _queue(self, topic: str, partition: int, known: Topic | None) -> PartitionQueue:
        queues: dict[Any, PartitionQueue] = self._unassigned if partition == PARTITION_UNASSIGNED else self.queues
        key = topic if partition == PARTITION_UNASSIGNED else (topic, partition)
        queue = queues.get(key)
        if queue is None:
            bytes_max = self.batch_bytes_max
            if known is not None:
                bytes_max = min(bytes_max, known.settings["max.message.bytes"] * _FILLED_OF_64 // 64)
            # Unless a signal's handler, or a finalizer, has made it meanwhile on the same thread.
            queue = queues.setdefault(key, PartitionQueue(topic, partition, bytes_max))
        return queue

    def _is_full(self, queue: PartitionQueue) -> bool:
        return len(queue.places) >= self._batch_places_max or queue.size_bytes >= queue.batch_bytes_max

    def _all_queues(self) -> Iterator[PartitionQueue]:
        # Ctrl-C may have come between a new queue and its first record.
        for queues in self.queues, self._unassigned:
            yield from filter(_PLACES, queues.values())

    def _drop_empty(self) -> None:
        all_queues: list[dict[Any, PartitionQueue]] = [self.queues, self._unassigned]
        for queues in all_queues:
            for key, queue in list(queues.items()):
                # No call in between, as above.
                if not queue.places:
                    del queues[key]


class DeliveryReport:
    """What became of records that travelled together."""

    __slots__ = ("_callbacks", "batch", "error", "is_wanted", "released_count", "unserved")

    def __init__(
        self,
        batch: Batch,
        error: KafkaError | None = None,
        *,
        base_offset: int | None = None,
        log_append_time_ms: int = NO_TIMESTAMP_MS,
    ) -> None:
        """Tell of `batch`: the error if it failed, else its first offset, if that is known."""
        self.batch = batch
        self.error = error
        self.is_wanted = batch.callbacks.count(None) < batch.record_count
        """Whether a record came with a callback of its own."""
        self._callbacks = iter(batch.callbacks)
        self.released_count = 0
        """How many of those that have been served count no more."""
        timestamp_type = TIMESTAMP_CREATE_TIME
        timestamps_ms: list[int] | int = batch.timestamps_ms
        if log_append_time_ms != NO_TIMESTAMP_MS:
            timestamp_type, timestamps_ms = TIMESTAMP_LOG_APPEND_TIME, log_append_time_ms
        sources: RecordSource | list[RecordSource] = RecordSource(batch.topic, batch.partition, timestamp_type)
        if batch.partition == PARTITION_UNASSIGNED:
            # What was never given a partition has the one that was asked for.
            sources = [RecordSource(batch.topic, asked_for, timestamp_type) for asked_for in batch.asked_for]
        self.unserved: Iterator[tuple[DeliveryCallback | None, Message]] = messages_of(
            message_type=Message,
            callbacks=self._callbacks,
            sources=sources,
            offset=OFFSET_INVALID if base_offset is None else base_offset,
            timestamps_ms=timestamps_ms,
            keys=batch.keys,
            values=batch.values,
            queued_seconds=batch.queued_seconds,
            error=error,
            done_seconds=time.monotonic(),
        )
        """Of each record that has not been served: its callback and its message."""

    @property
    def is_served(self) -> bool:
        """Whether nothing is left."""
        return length_hint(self._callbacks) == 0

    def skip(self) -> int:
        """Let what is left count as served, and return how many records that were."""
        left_count = length_hint(self._callbacks)
        deque(self._callbacks, maxlen=0)
        return left_count

    @property
    def served_count(self) -> int:
        """How many records have been served."""
        return self.batch.record_count - length_hint(self._callbacks)


class DeliveryReports:
    """Reports that wait to be served, and other events for the caller's thread, in order."""

    def __init__(
        self,
        changed: threading.Condition,
        accumulator: Accumulator,
        *,
        default_callback: DeliveryCallback | None,
        only_errors: bool,
    ) -> None:
        """Keep reports; `default_callback` gets those of records that came without a callback of their own."""
        self._changed, self._lock = changed, accumulator.alarm.lock
        self._accumulator = accumulator
        self._default_callback = default_callback
        self._only_errors = only_errors
        self._reports: deque[DeliveryReport] = deque()
        #: The thread that serves reports.
        self._server_id: int | None = None
        accumulator.settle = self._settle
        self.events: EventQueue[Callable[[], object]] = EventQueue(changed)
        """Other calls of the application that wait to be served."""

    @property
    def unsent_count(self) -> int:
        """How many records are not sent: they have no report that waits to be served; without the lock, so about."""
        count = self._accumulator.record_count
        return max(0, count - sum(each.batch.record_count - each.released_count for each in [*self._reports]))

    def add(self, report: DeliveryReport) -> None:
        """Let a report wait until it is served."""
        with self._lock:
            if self._only_errors and report.error is None:
                report.skip()
                self._accumulator.release(report)
            else:
                self._reports.append(report)
            self._changed.notify_all()

    def fail_waiting(self, count_failed: Callable[[int, KafkaError], object] | None) -> None:
        """Report all that waits to be sent as not delivered; under the lock.

        Should Ctrl-C come in between, what has no report yet gets one from the next call that serves.
        """
        if count_failed is not None:
            # First: if Ctrl-C comes right after it, nobody commits without them.
            count_failed(self._accumulator.waiting_count, KafkaError(KafkaError._PURGE_QUEUE))
        self._accumulator.give_up()
        self._report_given_up()

    def _report_given_up(self) -> None:
        given_up = self._accumulator.given_up
        while given_up:
            queues = given_up[0]
            reports = [
                DeliveryReport(queue.first(queue.record_count), KafkaError(KafkaError._PURGE_QUEUE))
                for queue in queues.values()
                if queue.places
            ]
            self.add_instead(reports, queues, given_up)

    def add_instead(self, reports: Sequence[DeliveryReport], item: object, held: list[Any] | deque[Any]) -> bool:
        """Let reports wait to be served, and take what they are of out of where it is held; under the lock.

        False: it is no longer there, because a signal's handler has done so.
        """
        try:
            place = held.index(item)
            # No call from here on: Ctrl-C finds it there, or its reports here.
            if held[place] is not item:
                return False
            self._reports += reports
            del held[place]
        except (IndexError, ValueError):
            return False
        return True

    @property
    def are_waiting(self) -> bool:
        """Whether this thread can serve something; under the lock."""
        may_serve = self._server_id in {None, threading.get_ident()}
        return bool(self.events.events or (may_serve and (self._reports or self._accumulator.given_up)))

    def serve(self) -> int:
        """Call the callbacks of everything that waits, in order, and return how many events that were.

        An exception of a callback comes out at once; what follows is served by the next call.  A callback may produce
        and may serve reports itself.
        """
        served = 0
        while True:
            if self.events.events:
                served += self.events.serve_first(call_first)
                continue
            count = self.serve_reports()
            if count == 0:
                return served
            served += count

    def serve_reports(self) -> int:
        """Call the callbacks of delivery reports alone.

        One thread serves at a time, so that they come in order; another one has nothing to do meanwhile.
        """
        own_id, is_first, served = threading.get_ident(), False, 0
        try:
            while True:
                with self._lock:
                    if self._server_id is None:
                        # No call between these.
                        self._server_id, is_first = own_id, True
                    if self._server_id != own_id:
                        return 0
                    self._report_given_up()
                    report = self._reports[0] if self._reports else None
                if report is None:
                    return served
                served += self._serve(report)
        finally:
            if is_first:
                self._server_id = None
                if self._reports:
                    # A callback has raised, or they have just come: they are another thread's to serve as well.
                    with self._lock:
                        self._changed.notify_all()

    def _serve(self, report: DeliveryReport) -> int:
        """Serve what is left of a report; a callback that serves reports itself goes on where this one is."""
        error, served = report.error, 0
        otherwise = None if self._default_callback is None else application_callback(self._default_callback)
        try:
            if otherwise is None and not report.is_wanted:
                # Nobody wants to hear of any of them.
                return report.skip()
            for callback, message in report.unserved:
                served += 1
                if callback is not None:
                    callback(error, message)
                elif otherwise is not None:
                    otherwise(error, message)
            return served
        finally:
            with self._lock:
                self._settle()
                if report.is_served and self._reports and self._reports[0] is report:
                    self._reports.popleft()

    def _settle(self) -> None:
        """Count out what has been served of the first report; under the lock."""
        if self._reports:
            self._accumulator.release(self._reports[0])


def make_queue(
    configuration: Configuration, on_delivery: DeliveryCallback | None
) -> tuple[Accumulator, DeliveryReports, PartitionChoice]:
    """Return the queue of a producer with this configuration, the reports of what leaves it, and who partitions it."""
    lock = threading.RLock()  # reentrant: the collector of garbage may close another producer in the middle of anything
    changed = Condition(lock)
    accumulator = Accumulator(
        changed,
        Alarm(lock),
        linger_seconds=configuration["linger.ms"] / 1000,
        records_max=configuration["queue.buffering.max.messages"] or 2**63 - 1,  # 0: as many as memory holds
        size_bytes_max=configuration["queue.buffering.max.kbytes"] * 1024,
        batch_records_max=configuration["batch.num.messages"],
        batch_bytes_max=min(configuration["batch.size"], configuration["message.max.bytes"]),
    )
    only_errors: bool = configuration["delivery.report.only.error"]
    return (
        accumulator,
        DeliveryReports(changed, accumulator, default_callback=on_delivery, only_errors=only_errors),
        PartitionChoice(
            configuration["partitioner"], sticky_seconds=configuration["sticky.partitioning.linger.ms"] / 1000
        ),
    )


def make_intake(
    accumulator: Accumulator,
    choice: PartitionChoice,
    entries: dict[str, Any],
    ticks: Ticks,
    configuration: Mapping[str, Any],
) -> bulk.core.Intake | None:
    """Return what queues records in C, or None; `entries` are the topics that are known."""
    if not bulk.IN_C:
        return None
    return bulk.core.Intake(
        accumulator=accumulator,
        lock=accumulator.alarm.lock,
        entries=entries,
        ticks=ticks,
        monotonic=time.monotonic,
        choose=choice.choose if choice.sticky_seconds > 0 else None,
        key_hash=choice.key_hash,
        is_empty_keyless=choice.empty_is_none,
        open_stage=IN_TRANSACTION,
        record_bytes_max=configuration["message.max.bytes"],
    )

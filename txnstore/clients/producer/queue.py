"""A producer's queue: records get their partition, wait in it until they leave in batches, and then for their reports.

A record that comes without a partition gets one by its key, or the topic's partition of the moment.  Records of topics
that their producer does not know yet wait until these have been looked up.  A record counts until its delivery report
has been served, so that a program that never serves its reports is told so (`BufferError`) instead of filling the
memory.  Reports are made by the sender, and served by the caller's poll, flush or close.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from txnstore.clients.callbacks import EventQueue
from txnstore.clients.model.errors import KafkaError, kafka_error_of
from txnstore.clients.model.message import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME, Message
from txnstore.clients.model.topic_partition import OFFSET_INVALID
from txnstore.clients.producer.thread import SenderThread
from txnstore.clients.worker import Worker
from txnstore.errors import TxnStoreError
from txnstore.log.columns import fitting
from txnstore.log.partitioners import PARTITIONERS
from txnstore.model import NO_TIMESTAMP_MS

if TYPE_CHECKING:
    from txnstore.clients.configuration.configuration import Configuration
    from txnstore.clients.topic_directory import TopicDirectory

#: Asked for by the caller: a partition chosen by key.
PARTITION_UNASSIGNED: Final = -1

#: What a full queue says.
FULL_TEXT: Final = "Local: Queue full"

DeliveryCallback = Callable[[Any, Any], object]


#: A record on its way, and what its delivery report needs: value, key, timestamp in milliseconds, packed headers,
#: callback, when it was queued by the monotonic clock, its size in bytes, and the partition asked for or -1.  A plain
#: tuple, because there are very many of them: Python's collector of garbage leaves a tuple of plain values alone.
QueuedRecord = tuple[bytes | None, bytes | None, int, str | None, DeliveryCallback | None, float, int, int]
#: The places of its parts.
VALUE: Final = 0
KEY: Final = 1
TIMESTAMP_MS: Final = 2
HEADERS: Final = 3
CALLBACK: Final = 4
QUEUED_SECONDS: Final = 5
SIZE_BYTES: Final = 6
PARTITION: Final = 7


@dataclass(slots=True)
class PartitionQueue:
    """The records of one partition, or those of a topic that nobody has looked up yet, in order."""

    topic: str
    partition: int
    records: deque[QueuedRecord] = field(default_factory=deque)
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of one partition that travel together."""

    topic: str
    partition: int
    records: list[QueuedRecord]

    @property
    def size_bytes(self) -> int:
        """The bytes of all records, as the queue counts them."""
        return sum(record[SIZE_BYTES] for record in self.records)


class Accumulator:
    """The queues of a producer.  `changed` is the producer's one lock; everything here is done under it."""

    def __init__(
        self,
        lock: threading.RLock,
        changed: threading.Condition,
        *,
        records_max: int,
        size_bytes_max: int,
        batch_records_max: int,
        batch_bytes_max: int,
    ) -> None:
        """Hold at most `records_max` records of `size_bytes_max` bytes; a batch is bounded likewise.

        `lock` is the lock of `changed`.
        """
        self.changed = changed
        #: Taken as it is where every nanosecond counts; a Condition would go through methods of its own.
        self._lock = lock
        self.records_max = records_max
        self.size_bytes_max = size_bytes_max
        self.batch_records_max = batch_records_max
        self.batch_bytes_max = batch_bytes_max
        self.record_count = 0
        """The records that are queued, in flight, or wait for their report to be served."""

        self.size_bytes = 0
        self.full_text = FULL_TEXT
        """What a full queue says."""

        self._queues: dict[tuple[str, int], PartitionQueue] = {}
        #: Records of topics that are not known yet, by topic.
        self._unassigned: dict[str, PartitionQueue] = {}

    def add(self, topic: str, partition: int, record: QueuedRecord) -> None:
        """Queue a record for a partition, or with partition -1 for a topic that has to be looked up first.

        Raises:
            BufferError: the queue is full; serve delivery reports and try again.
        """
        size_bytes = record[SIZE_BYTES]
        with self._lock:
            if self.record_count >= self.records_max or self.size_bytes + size_bytes > self.size_bytes_max:
                raise BufferError(self.full_text)
            if self._unassigned and topic in self._unassigned:
                # Not past those that were queued before the topic was known.
                partition = PARTITION_UNASSIGNED
            queue = self._queues.get((topic, partition)) or self._queue(topic, partition)
            self.record_count += 1
            self.size_bytes += size_bytes
            records = queue.records
            records.append(record)
            queue.size_bytes += size_bytes
            waiting = len(records)
            if waiting in (1, self.batch_records_max) or queue.size_bytes >= self.batch_bytes_max:
                # The sender learns when it has to act: at once, or when the record has lingered.
                self.changed.notify_all()

    def release(self, record_count: int, size_bytes: int) -> None:
        """Count records out whose reports have been served."""
        self.record_count -= record_count
        self.size_bytes -= size_bytes
        if self.record_count == 0:
            self.changed.notify_all()

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be sent."""
        return not self._queues and not self._unassigned

    @property
    def oldest_seconds(self) -> float | None:
        """When the oldest record was queued, by the monotonic clock."""
        return min((queue.records[0][QUEUED_SECONDS] for queue in self._all_queues()), default=None)

    def waiting(self, unless: Callable[[str, int], bool] | None = None) -> tuple[float | None, bool]:
        """Return when the oldest record of a known topic was queued, and whether a batch is full.

        Partitions for which `unless` is true are left out.
        """
        queues = [
            queue for queue in self._queues.values() if unless is None or not unless(queue.topic, queue.partition)
        ]
        oldest_seconds = min((queue.records[0][QUEUED_SECONDS] for queue in queues), default=None)
        return oldest_seconds, any(self._is_full(queue) for queue in queues)

    @property
    def oldest_unknown_seconds(self) -> float | None:
        """When the oldest record of a topic that is not known yet was queued."""
        return min((queue.records[0][QUEUED_SECONDS] for queue in self._unassigned.values()), default=None)

    @property
    def unknown_topics(self) -> list[str]:
        """The topics that have to be looked up before their records can leave."""
        return list(self._unassigned)

    def take_unassigned(self, topic: str) -> PartitionQueue | None:
        """Take the records of a topic that has been looked up."""
        return self._unassigned.pop(topic, None)

    def put_assigned(self, topic: str, partition: int, record: QueuedRecord) -> None:
        """Queue for its partition a record that was counted before."""
        queue = self._queue(topic, partition)
        queue.records.append(record)
        queue.size_bytes += record[SIZE_BYTES]

    def take_batches(
        self,
        batches_per_partition_max: int,
        size_bytes_max: int,
        unless: Callable[[str, int], bool] | None = None,
    ) -> list[Batch]:
        """Take what goes next: the first batches of every partition, until `size_bytes_max` is reached.

        Partitions for which `unless` is true are left alone.
        """
        batches: list[Batch] = []
        left_bytes = size_bytes_max
        for key, queue in list(self._queues.items()):
            if unless is not None and unless(queue.topic, queue.partition):
                continue
            for _ in range(batches_per_partition_max):
                if not queue.records or left_bytes <= 0:
                    break
                before_bytes = queue.size_bytes
                batches.append(Batch(queue.topic, queue.partition, self._take_batch(queue)))
                left_bytes -= before_bytes - queue.size_bytes
            if not queue.records:
                del self._queues[key]
        return batches

    def take_expired(self, queued_before_seconds: float) -> list[Batch]:
        """Take the records that were queued before this moment of the monotonic clock."""
        expired: list[Batch] = []
        for queue in list(self._all_queues()):
            taken: list[QueuedRecord] = []
            while queue.records and queue.records[0][QUEUED_SECONDS] <= queued_before_seconds:
                taken.append(queue.records.popleft())
            if taken:
                queue.size_bytes -= sum(record[SIZE_BYTES] for record in taken)
                expired.append(Batch(queue.topic, queue.partition, taken))
        self._drop_empty()
        return expired

    def take_all(self) -> list[Batch]:
        """Take every record that waits."""
        batches = [Batch(queue.topic, queue.partition, list(queue.records)) for queue in self._all_queues()]
        self._queues.clear()
        self._unassigned.clear()
        return batches

    def _queue(self, topic: str, partition: int) -> PartitionQueue:
        if partition == PARTITION_UNASSIGNED:
            queue = self._unassigned.get(topic)
            if queue is None:
                queue = self._unassigned[topic] = PartitionQueue(topic, PARTITION_UNASSIGNED)
            return queue
        key = (topic, partition)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = PartitionQueue(topic, partition)
        return queue

    def _is_full(self, queue: PartitionQueue) -> bool:
        return len(queue.records) >= self.batch_records_max or queue.size_bytes >= self.batch_bytes_max

    def _all_queues(self) -> Iterator[PartitionQueue]:
        yield from self._queues.values()
        yield from self._unassigned.values()

    def _take_batch(self, queue: PartitionQueue) -> list[QueuedRecord]:
        records = queue.records
        taken: list[QueuedRecord] = []
        taken_bytes = 0
        while records and len(taken) < self.batch_records_max and taken_bytes < self.batch_bytes_max:
            record = records.popleft()
            taken.append(record)
            taken_bytes += record[SIZE_BYTES]
        # What the log adds to each record counts as well: a batch that is refused would be encoded twice.
        count = fitting(
            [record[SIZE_BYTES] for record in taken],
            [record[KEY] for record in taken],
            [record[VALUE] for record in taken],
            [record[TIMESTAMP_MS] for record in taken],
            [record[HEADERS] for record in taken],
            batch_bytes_max=self.batch_bytes_max,
        )
        records.extendleft(reversed(taken[count:]))
        del taken[count:]
        queue.size_bytes -= sum(record[SIZE_BYTES] for record in taken)
        return taken

    def _drop_empty(self) -> None:
        self._queues = {key: queue for key, queue in self._queues.items() if queue.records}
        self._unassigned = {topic: queue for topic, queue in self._unassigned.items() if queue.records}


#: A base offset so far below zero that no record of the batch gets an offset.
NOWHERE: Final = -(2**62)


@dataclass(slots=True)
class DeliveryReport:
    """What became of records that travelled together."""

    topic: str
    partition: int
    records: Sequence[QueuedRecord]
    error: KafkaError | None = None
    base_offset: int = 0
    log_append_time_ms: int = NO_TIMESTAMP_MS
    done_seconds: float = field(default_factory=time.monotonic)
    served: int = 0

    def message(self, index: int) -> Message:
        """Return one record as its producer's callback gets it: without headers, and without an offset if it failed."""
        value, key, timestamp_ms, _, _, queued_seconds, _, asked_for = self.records[index]
        stamped = self.log_append_time_ms != NO_TIMESTAMP_MS
        return Message.delivered(
            self.topic,
            # What was never given a partition has the one that was asked for.
            asked_for if self.partition == PARTITION_UNASSIGNED else self.partition,
            self.base_offset + index if self.error is None else OFFSET_INVALID,
            key,
            value,
            TIMESTAMP_LOG_APPEND_TIME if stamped else TIMESTAMP_CREATE_TIME,
            self.log_append_time_ms if stamped else timestamp_ms,
            self.done_seconds - queued_seconds,
            self.error,
        )


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
        self._changed = changed
        self._accumulator = accumulator
        self._default_callback = default_callback
        self._only_errors = only_errors
        self._reports: deque[DeliveryReport] = deque()
        self._serving = threading.RLock()
        self.events: EventQueue[Callable[[], object]] = EventQueue(changed)
        """Other calls of the application that wait to be served."""

    def add(self, report: DeliveryReport) -> None:
        """Let a report wait until it is served."""
        with self._changed:
            if self._only_errors and report.error is None:
                self._accumulator.release(len(report.records), _size_bytes(report))
            else:
                self._reports.append(report)
            self._changed.notify_all()

    @property
    def are_waiting(self) -> bool:
        """Whether something can be served; under the lock."""
        return bool(self._reports or self.events.events)

    def serve(self) -> int:
        """Call the callbacks of everything that waits, in order, and return how many events that were.

        An exception of a callback comes out at once; what follows is served by the next call.  A callback may produce
        and may serve reports itself.
        """
        served = 0
        while True:
            event = self.events.pop()
            if event is not None:
                served += 1
                event()
                continue
            count = self.serve_reports()
            if count == 0:
                return served
            served += count

    def serve_reports(self) -> int:
        """Call the callbacks of delivery reports alone.

        One thread serves at a time, so that they come in order; another one has nothing to do meanwhile.
        """
        if not self._serving.acquire(blocking=False):
            return 0
        served = 0
        try:
            while True:
                with self._changed:
                    report = self._reports[0] if self._reports else None
                if report is None:
                    return served
                served += self._serve(report)
        finally:
            self._serving.release()

    def _serve(self, report: DeliveryReport) -> int:
        """Serve what is left of a report; a callback that serves reports itself goes on where this one is."""
        default_callback = self._default_callback
        accumulator, records, error = self._accumulator, report.records, report.error
        count = len(records)
        first = report.served
        released = released_bytes = 0
        try:
            if default_callback is None and first == 0 and all(record[CALLBACK] is None for record in records):
                # Nobody wants to hear of any of them.
                report.served = released = count
                released_bytes = _size_bytes(report)
                return count
            while report.served < count:
                index = report.served
                report.served = index + 1
                record = records[index]
                released += 1
                released_bytes += record[SIZE_BYTES]
                if accumulator.record_count >= accumulator.records_max:
                    # The callback may want to produce.
                    with self._changed:
                        accumulator.release(released, released_bytes)
                    released = released_bytes = 0
                callback = record[CALLBACK]
                if callback is None:
                    callback = default_callback
                if callback is not None:
                    callback(error, report.message(index))
            return count - first
        finally:
            with self._changed:
                accumulator.release(released, released_bytes)
                if report.served == count and self._reports and self._reports[0] is report:
                    self._reports.popleft()


def _size_bytes(report: DeliveryReport) -> int:
    return sum(record[SIZE_BYTES] for record in report.records)


#: The partitioners that treat an empty key as no key.
_EMPTY_IS_NONE: Final = frozenset({"consistent_random"})


class PartitionChoice:
    """Chooses partitions for one producer.

    Records without a key stay together for `sticky_seconds`, so that they make full batches (KIP-480); with 0 each
    of them goes where the partitioner says.
    """

    def __init__(self, partitioner: str, *, sticky_seconds: float) -> None:
        """Choose by the partitioner of this name."""
        self._partition_of = PARTITIONERS[partitioner]
        self._empty_is_none = partitioner in _EMPTY_IS_NONE
        self._sticky_seconds = sticky_seconds
        self._random = random.Random()
        #: By topic: the partition of the moment, and until when.
        self._sticky: dict[str, tuple[int, float]] = {}

    def choose(self, topic: str, key: bytes | None, partition_count: int, now_seconds: float) -> int:
        """Return the partition of a record; `now_seconds` is of the monotonic clock."""
        if partition_count == 1:
            return 0
        if key or (key is not None and not self._empty_is_none) or self._sticky_seconds <= 0:
            return self._partition_of(key, partition_count, self._random)
        partition, until_seconds = self._sticky.get(topic, (-1, 0.0))
        if now_seconds >= until_seconds or not 0 <= partition < partition_count:
            partition = self._random.randrange(partition_count)
            self._sticky[topic] = (partition, now_seconds + self._sticky_seconds)
        return partition


#: Records that will not be delivered, and why.
Refused = tuple[Batch, KafkaError]


class UnassignedTopics:
    """Looks topics up, which creates them if that is allowed; for one thread at a time."""

    def __init__(self, accumulator: Accumulator, directory: TopicDirectory, choice: PartitionChoice) -> None:
        """Move records within `accumulator` from their topic to their partition."""
        self.directory = directory
        self._accumulator = accumulator
        self._choice = choice

    def look_up(self, retry_later: Callable[[TxnStoreError], None]) -> Iterator[Refused]:
        """Look up every topic that records wait for; yield those that will not be delivered, with the reason.

        What cannot be looked up now is told to `retry_later`.
        """
        with self._accumulator.changed:
            names = self._accumulator.unknown_topics
        for name in names:
            try:
                topic = self.directory.ensure(name)
            except TxnStoreError as error:
                if error.retriable:
                    retry_later(error)
                    continue
                yield from self._refuse_all(name, kafka_error_of(error))
            else:
                yield from self._assign(name, len(topic.partition_ids))

    def _refuse_all(self, name: str, error: KafkaError) -> Iterator[Refused]:
        with self._accumulator.changed:
            queue = self._accumulator.take_unassigned(name)
        if queue is not None:
            yield Batch(name, queue.partition, list(queue.records)), error

    def _assign(self, name: str, partition_count: int) -> Iterator[Refused]:
        refused: list[QueuedRecord] = []
        now_seconds = time.monotonic()
        with self._accumulator.changed:
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
            yield Batch(name, record[PARTITION], [record]), KafkaError(KafkaError._UNKNOWN_PARTITION)


class LookUp:
    """A look-up in the background, so that a controller that is away holds up nothing but what it is asked."""

    def __init__(self, thread: SenderThread) -> None:
        """Look up for the sender on `thread`, which is woken by the answer."""
        self.backoff = thread.backoff.another()
        self._thread = thread
        self._helper: Worker | None = None
        self._answer: Future[list[Refused]] | None = None
        self._trouble: list[TxnStoreError] = []

    @property
    def is_running(self) -> bool:
        """Whether one is under way, or its answer is not taken yet."""
        return self._answer is not None

    @property
    def has_answer(self) -> bool:
        """Whether one has come to its end."""
        return self._answer is not None and self._answer.done()

    def start(self, topics: UnassignedTopics) -> None:
        """Begin to look up whatever records wait for."""

        def notify(_: object) -> None:
            with self._thread.changed:
                self._thread.changed.notify_all()

        if self._helper is None:
            self._helper = self._thread.new_helper("topics")
        self._trouble = []
        self._answer = self._helper.submit(lambda: list(topics.look_up(self._trouble.append)))
        self._answer.add_done_callback(notify)

    def take_answer(self) -> list[Refused]:
        """Return what will not be delivered, if an answer has come; a pause follows where one could not be had."""
        if not self.has_answer:
            return []
        assert self._answer is not None
        answer, self._answer = self._answer, None
        if self._trouble:
            self.backoff.retry_later(self._trouble[0])
        else:
            self.backoff.succeeded()
        return answer.result()


def make_queue(
    configuration: Configuration, on_delivery: DeliveryCallback | None
) -> tuple[Accumulator, DeliveryReports, PartitionChoice]:
    """Return the queue of a producer with this configuration, the reports of what leaves it, and who partitions it."""
    # Reentrant: the collector of garbage may close another producer in the middle of anything.
    lock = threading.RLock()
    changed = threading.Condition(lock)
    accumulator = Accumulator(
        lock,
        changed,
        records_max=configuration["queue.buffering.max.messages"],
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

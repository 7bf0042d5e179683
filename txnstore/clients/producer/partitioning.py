"""The partitions of records that come without one: chosen by key, or the topic's partition of the moment.

Records of topics that their producer does not know yet wait until these have been looked up.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Final

from txnstore.clients.model.errors import KafkaError, kafka_error_of
from txnstore.clients.producer.queue import KEY, PARTITION, PARTITION_UNASSIGNED, Accumulator, Batch, QueuedRecord
from txnstore.clients.producer.thread import SenderThread
from txnstore.clients.topic_directory import TopicDirectory
from txnstore.clients.worker import Worker
from txnstore.errors import TxnStoreError
from txnstore.log.partitioners import PARTITIONERS

#: The partitioners that take an empty key for none.
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

"""Records of topics that nobody has looked up yet: the topic is asked for, or created, and they get their partition."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from txnstore.clients.model.errors import KafkaError, kafka_error_of
from txnstore.clients.producer.queue import (
    KEY,
    PARTITION_UNASSIGNED,
    PLACES,
    SIZE_BYTES,
    Accumulator,
    Batch,
    PartitionQueue,
)
from txnstore.errors import TxnStoreError

if TYPE_CHECKING:
    from txnstore.clients.topic_directory import TopicDirectory
    from txnstore.log.partitioners import PartitionChoice
    from txnstore.log.topics import Topic

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
                yield from self._assign(topic)

    def _refuse_all(self, name: str, error: KafkaError) -> Iterator[Refused]:
        with self._accumulator.changed:
            queue = self._accumulator.unassigned(name)
            batch = None if queue is None else queue.first(queue.record_count)
            self._accumulator.take_unassigned(name)
        if batch is not None:
            yield batch, error

    def _assign(self, topic: Topic) -> Iterator[Refused]:
        refused: list[Batch] = []
        failure: Exception | None = None
        moved_count = 0
        now_seconds = time.monotonic()
        partition_count = len(topic.partition_ids)
        with self._accumulator.changed:
            queue = self._accumulator.unassigned(topic.name)
            if queue is None:
                return
            try:
                for index, asked_for in enumerate(queue.asked_for):
                    following = index + 1
                    places = queue.places[index * PLACES : following * PLACES]
                    partition = asked_for
                    if partition == PARTITION_UNASSIGNED:
                        partition = self._choice.choose(topic.name, places[KEY], partition_count, now_seconds)
                    if 0 <= partition < partition_count:
                        self._accumulator.put_assigned(topic, partition, places)
                    else:
                        refused.append(Batch.of(topic.name, asked_for, places))
                    moved_count = following
            except Exception as error:  # noqa: BLE001 - the rest stays where it was, and is tried again
                failure = error
                _drop(queue, moved_count)
            else:
                self._accumulator.take_unassigned(topic.name)
        for batch in refused:
            yield batch, KafkaError(KafkaError._UNKNOWN_PARTITION)
        if failure is not None:
            raise failure


def _drop(queue: PartitionQueue, record_count: int) -> None:
    """Take out the first records, one by one: that takes no memory."""
    for _ in range(record_count):
        queue.size_bytes -= queue.places[SIZE_BYTES]
        del queue.places[:PLACES]
        del queue.asked_for[:1]

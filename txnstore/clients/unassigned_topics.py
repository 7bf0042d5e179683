"""This file is the records of topics that their producer does not know yet: looked up, and given their partitions."""

from __future__ import annotations

import time
from collections.abc import Iterator

from txnstore.clients.accumulator import KEY, PARTITION, PARTITION_UNASSIGNED, Accumulator, Batch, QueuedRecord
from txnstore.clients.error_mapping import kafka_error_of
from txnstore.clients.kafka_error import KafkaError
from txnstore.clients.partition_choice import PartitionChoice
from txnstore.clients.sender_thread import SenderThread
from txnstore.clients.topic_directory import TopicDirectory
from txnstore.errors import TxnStoreError


class UnassignedTopics:
    """Looks topics up, which creates them if that is allowed; for the sender's thread."""

    def __init__(
        self, thread: SenderThread, accumulator: Accumulator, directory: TopicDirectory, choice: PartitionChoice
    ) -> None:
        """Move records within `accumulator` from their topic to their partition."""
        self.directory = directory
        self._thread = thread
        self._accumulator = accumulator
        self._choice = choice

    def look_up(self) -> Iterator[tuple[Batch, KafkaError]]:
        """Look up every topic that records wait for; yield those that will not be delivered, with the reason."""
        with self._accumulator.changed:
            names = self._accumulator.unknown_topics
        for name in names:
            try:
                topic = self.directory.ensure(name)
            except TxnStoreError as error:
                if error.retriable:
                    self._thread.retry_later(error)
                    continue
                yield from self._refuse_all(name, kafka_error_of(error))
            else:
                yield from self._assign(name, len(topic.partition_ids))

    def _refuse_all(self, name: str, error: KafkaError) -> Iterator[tuple[Batch, KafkaError]]:
        with self._accumulator.changed:
            queue = self._accumulator.take_unassigned(name)
        if queue is not None:
            yield Batch(name, queue.partition, list(queue.records)), error

    def _assign(self, name: str, partition_count: int) -> Iterator[tuple[Batch, KafkaError]]:
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

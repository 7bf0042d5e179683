"""This file is what a consumer asks about partitions beside reading them: watermarks, and offsets by time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection

from txnstore.clients.brokers import at_partition
from txnstore.clients.connection import StoreConnection
from txnstore.clients.model.constants import OFFSET_END
from txnstore.clients.model.kafka_error import KafkaError, KafkaException
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.clients.topic_directory import TopicDirectory
from txnstore.db.cluster.cluster import repaired
from txnstore.db.store import Store
from txnstore.errors import UnknownTopicOrPartition
from txnstore.log.bounds import Bounds, offset_for_time, read_bounds
from txnstore.log.codec import TIMESTAMP_MS_MAX
from txnstore.model import IsolationLevel

Result = TypeVar("Result")


class ConsumerLookups:
    """Lookups of one consumer; each method runs on its worker."""

    def __init__(self, connection: StoreConnection, directory: TopicDirectory, isolation: IsolationLevel) -> None:
        """Look with the eyes of a reader of this isolation level."""
        self._connection = connection
        self._directory = directory
        self._isolation = isolation

    def watermarks(self, partition: TopicPartition) -> tuple[int, int]:
        """Return the first offset, and the one where the reader finds nothing more for now.

        Raises:
            KafkaException: `_UNKNOWN_PARTITION`: there is no such partition.
            TxnStoreError: the database cannot be asked.
        """

        def look() -> Bounds:
            partition_id = self._partition_id(partition)

            def work(connection: Connection) -> Bounds:
                return read_bounds(connection, [partition_id])[partition_id]

            return at_partition(self._connection.store(), partition_id, lambda home: home.read(work))

        try:
            bounds = self._directory.again_if_unknown([partition.topic], look)
        except UnknownTopicOrPartition:
            self._directory.forget(partition.topic)
            raise _unknown_partition() from None
        return bounds.log_start_offset, bounds.end(self._isolation)

    def offsets_for_times(self, partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
        """Return for each partition, whose offset is a time in milliseconds, the first offset from that time on.

        OFFSET_END: there is no such record yet.  A time of -1 stands for the end, as in Kafka.

        Raises:
            KafkaException: `_UNKNOWN_PARTITION`: one of the partitions is not there.
            TxnStoreError: the database cannot be asked.
        """
        names = {partition.topic for partition in partitions}
        return self._directory.again_if_unknown(names, lambda: self._offsets_for_times(partitions))

    def _offsets_for_times(self, partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
        ids = [self._partition_id(partition) for partition in partitions]

        def find(wanted: Sequence[tuple[int, int, TopicPartition]], connection: Connection) -> list[tuple[int, int]]:
            offsets = []
            for place, partition_id, partition in wanted:
                if partition.offset == OFFSET_END:
                    end_offset = read_bounds(connection, [partition_id])[partition_id].end(self._isolation)
                    offsets.append((place, end_offset))
                    continue
                at_ms = min(partition.offset, TIMESTAMP_MS_MAX)
                found = offset_for_time(connection, partition_id, at_ms, self._isolation)
                offsets.append((place, OFFSET_END if found is None else found.offset))
            return offsets

        cluster = self._connection.cluster()
        wanted_all = [(place, ids[place], partition) for place, partition in enumerate(partitions)]
        by_leader = cluster.by_leader(wanted_all, lambda item: item[1])
        offsets: dict[int, int] = {}
        for home, wanted in by_leader.items():
            offsets.update(repaired(cluster, home, partial(_read, partial(find, wanted))))
        return [
            TopicPartition(partition.topic, partition.partition, offsets[place])
            for place, partition in enumerate(partitions)
        ]

    def _partition_id(self, partition: TopicPartition) -> int:
        topic = self._directory.find([partition.topic]).get(partition.topic)
        if topic is not None and partition.partition >= len(topic.partition_ids):
            topic = self._directory.refresh([partition.topic]).get(partition.topic)
        if topic is None:
            raise _unknown_partition()
        try:
            return topic.partition_id(partition.partition)
        except UnknownTopicOrPartition:
            raise _unknown_partition() from None


def _read(work: Callable[[Connection], Result], store: Store) -> Result:
    return store.read(work)


def _unknown_partition() -> KafkaException:
    return KafkaException(KafkaError(KafkaError._UNKNOWN_PARTITION))

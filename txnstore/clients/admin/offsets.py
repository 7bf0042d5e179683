"""This file is how the admin client asks for offsets: of the beginning, of the end, by time."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection

from txnstore.clients.admin.calls import Call
from txnstore.clients.admin.partitions import at_leader_of
from txnstore.clients.model import constants
from txnstore.clients.model.kafka_error import KafkaError, KafkaException
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.db.store import Store
from txnstore.log.bounds import OffsetAndTimestamp, offset_for_time, offset_of_max_timestamp, read_bounds
from txnstore.log.topics import get_topic
from txnstore.model import NO_TIMESTAMP_MS, IsolationLevel

#: Kafka's answer where there is no such record.
_NO_OFFSET: Final = -1


class OffsetSpec:
    """Which offset is asked for; made by its class methods."""

    _value: int

    def __init__(self) -> None:
        if type(self) is OffsetSpec:
            raise TypeError("use OffsetSpec.earliest(), latest(), max_timestamp() or for_timestamp(timestamp)")

    @classmethod
    def earliest(cls) -> EarliestSpec:
        """Return the spec of the first offset that can be read."""
        return _EARLIEST

    @classmethod
    def latest(cls) -> LatestSpec:
        """Return the spec of the end: the high watermark, or the last stable offset for READ_COMMITTED."""
        return _LATEST

    @classmethod
    def max_timestamp(cls) -> MaxTimestampSpec:
        """Return the spec of the first record with the largest timestamp (KIP-734)."""
        return _MAX_TIMESTAMP

    @classmethod
    def for_timestamp(cls, timestamp: int) -> TimestampSpec:
        """Return the spec of the first record with this timestamp or a later one, in milliseconds since 1970."""
        return TimestampSpec(timestamp)

    def __lt__(self, other: object) -> bool:
        return self._value < other._value if isinstance(other, OffsetSpec) else NotImplemented


class EarliestSpec(OffsetSpec):
    """The first offset that can be read."""

    _value = constants.OFFSET_SPEC_EARLIEST


class LatestSpec(OffsetSpec):
    """The offset behind the last record that can be read."""

    _value = constants.OFFSET_SPEC_LATEST


class MaxTimestampSpec(OffsetSpec):
    """The first record with the largest timestamp."""

    _value = constants.OFFSET_SPEC_MAX_TIMESTAMP


class TimestampSpec(OffsetSpec):
    """The first record with this timestamp or a later one."""

    def __init__(self, timestamp: int) -> None:
        super().__init__()
        self.timestamp = timestamp

    @property
    def _value(self) -> int:  # type: ignore[override]  # a constant of the other classes
        return self.timestamp


_EARLIEST: Final = EarliestSpec()
_LATEST: Final = LatestSpec()
_MAX_TIMESTAMP: Final = MaxTimestampSpec()


class ListOffsetsResultInfo:
    """An offset, from `list_offsets()`, and the timestamp of its record in milliseconds since 1970; -1: none.

    `leader_epoch` is None: a database has no elections.
    """

    def __init__(self, offset: int, timestamp: int, leader_epoch: int) -> None:
        self.offset = offset
        self.timestamp = timestamp
        self.leader_epoch: int | None = leader_epoch if leader_epoch >= 0 else None


def check_offset_specs(specs: object, isolation: object) -> dict[TopicPartition, OffsetSpec]:
    """Return which offset of which partition is asked for.

    Raises:
        TypeError: something has the wrong type.
        ValueError: a partition has no topic or a negative number.
    """
    if not isinstance(specs, dict):
        raise TypeError(
            "Expected topic_partition_offsets to be dict of [TopicPartitions,OffsetSpec] for list offsets request"
        )
    for partition, spec in specs.items():
        if not isinstance(partition, TopicPartition):
            raise TypeError("partition must be a TopicPartition")
        if not partition.topic:
            raise ValueError("partition topic name cannot be empty")
        if partition.partition < 0:
            raise ValueError("partition index must be non-negative")
        if not isinstance(spec, OffsetSpec):
            raise TypeError("Value must be a OffsetSpec")
    if not isinstance(isolation, IsolationLevel):
        raise TypeError("isolation_level argument should be an IsolationLevel")
    return specs


def find_offset(
    store: Store,
    call: Call[TopicPartition, ListOffsetsResultInfo],
    partition: TopicPartition,
    spec: OffsetSpec,
    isolation: IsolationLevel,
) -> ListOffsetsResultInfo:
    """Return the offset that is asked for."""
    if isinstance(spec, TimestampSpec) and (type(spec.timestamp) is not int or spec.timestamp < _NO_OFFSET):
        text = f"partition {partition.partition} of topic {partition.topic}: {str(spec.timestamp)[:40]} is no timestamp"
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG, text))

    def work(connection: Connection) -> OffsetAndTimestamp:
        partition_id = get_topic(connection, partition.topic).partition_id(partition.partition)
        if isinstance(spec, TimestampSpec):
            found = offset_for_time(connection, partition_id, spec.timestamp, isolation)
        elif isinstance(spec, MaxTimestampSpec):
            found = offset_of_max_timestamp(connection, partition_id, isolation)
        else:
            bounds = read_bounds(connection, [partition_id])[partition_id]
            offset = bounds.log_start_offset if isinstance(spec, EarliestSpec) else bounds.end(isolation)
            found = OffsetAndTimestamp(offset, NO_TIMESTAMP_MS)
        return found or OffsetAndTimestamp(_NO_OFFSET, NO_TIMESTAMP_MS)

    found = at_leader_of(store, call, partition, lambda home: home.read(work, retry_timeout_ms=call.retry_ms(home)))
    return ListOffsetsResultInfo(found.offset, found.timestamp_ms, _NO_OFFSET)

"""The records of partitions: the admin client finds their offsets, and deletes them from the beginning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from sqlalchemy import Connection

from txnstore import model
from txnstore.clients.admin.calls import Call
from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.clients.model.metadata import with_fields
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.store import Store
from txnstore.errors import (
    CorruptBatch,
    InvalidTimestamp,
    PolicyViolation,
    TxnStoreError,
    UnknownTopicOrPartition,
    UnsupportedCompression,
)
from txnstore.log.bounds import OffsetAndTimestamp, offset_for_time, offset_of_max_timestamp, read_bounds
from txnstore.log.deleting import delete_records
from txnstore.log.topics import get_topic
from txnstore.model import NO_TIMESTAMP_MS, IsolationLevel

Answer = TypeVar("Answer")


#: What an offset is asked for by: the numbers of the classes of `OffsetSpec`.
OFFSET_SPEC_LATEST: Final = -1
OFFSET_SPEC_EARLIEST: Final = -2
OFFSET_SPEC_MAX_TIMESTAMP: Final = -3

#: Kafka's answer where there is no such record.
_NO_OFFSET: Final = -1


_COMPACTED_ONLY: Final = "compact"
#: What may be wrong with one partition, or with what is asked of it, while the others have their answers.
_OF_ONE_PARTITION: Final = (
    CorruptBatch,
    InvalidTimestamp,
    KafkaException,
    UnknownTopicOrPartition,
    UnsupportedCompression,
)


class OffsetSpec:
    """Which offset is asked for; made by its class methods.

    Raises:
        TypeError: it is called itself.
    """

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

    _value = OFFSET_SPEC_EARLIEST


class LatestSpec(OffsetSpec):
    """The offset after the last record that can be read."""

    _value = OFFSET_SPEC_LATEST


class MaxTimestampSpec(OffsetSpec):
    """The first record with the largest timestamp."""

    _value = OFFSET_SPEC_MAX_TIMESTAMP


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
    """An offset, from `list_offsets()`, and the timestamp of its record in milliseconds since 1970; -1: no such record.

    `leader_epoch` is None: a database has no elections.
    """

    def __init__(self, offset: int, timestamp: int, leader_epoch: int) -> None:
        self.offset = offset
        self.timestamp = timestamp
        self.leader_epoch: int | None = leader_epoch if leader_epoch >= 0 else None

    def __repr__(self) -> str:
        epoch = "" if self.leader_epoch is None else f",leader_epoch={self.leader_epoch}"
        return f"ListOffsetsResultInfo(offset={self.offset},timestamp={self.timestamp}{epoch})"


class DeletedRecords:
    """What `delete_records()` has left: the first offset of the partition that can still be read."""

    def __init__(self, low_watermark: int) -> None:
        self.low_watermark = low_watermark

    __repr__ = with_fields


# --- arguments, in confluent-kafka's words ----------------------------------------------------------------------------


def check_offset_specs(specs: object, isolation: object) -> dict[TopicPartition, OffsetSpec]:
    """Return which offset of which partition is asked for."""
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


def check_offsets(partitions: object) -> tuple[list[TopicPartition], bool]:
    """Return the partitions, and whether one of them was given twice."""
    if not isinstance(partitions, list):
        raise TypeError(f"Expected Request to be a list, got '{type(partitions).__name__}'")
    for partition in partitions:
        if not isinstance(partition, TopicPartition):
            raise TypeError(
                f"Element of the request list must be of type 'TopicPartition' got '{type(partition).__name__}'"
            )
        if partition.partition < 0:
            raise ValueError("'partition' cannot be negative")
    return partitions, len(set(partitions)) < len(partitions)


# --- what is done -----------------------------------------------------------------------------------------------------


def partition_id_of(connection: Connection, partition: TopicPartition) -> int:
    """Return the id of the partition."""
    return get_topic(connection, partition.topic).partition_id(partition.partition)


def at_leader_of(
    cluster: Cluster, call: Call[Any, Any], partition: TopicPartition, work: Callable[[Store], Answer]
) -> Answer:
    """Do `work` on the store that leads the partition; the topics are known there too."""
    if cluster.is_alone:
        return work(cluster.controller)
    partition_id = cluster.controller.read(
        lambda connection: partition_id_of(connection, partition), retry_timeout_ms=call.retry_ms(cluster.controller)
    )
    return cluster.at_partition(partition_id, work)


def public_partition(partition: model.PartitionName) -> TopicPartition:
    """Return the partition as users see it."""
    return TopicPartition(partition.topic, partition.partition)


def find_offsets(
    specs: dict[TopicPartition, OffsetSpec],
    isolation: IsolationLevel,
    cluster: Cluster,
    call: Call[TopicPartition, ListOffsetsResultInfo],
) -> None:
    """Give each partition's future the offset that is asked for; those of one database are of one snapshot."""
    for leader, partitions in _by_leader(list(specs), cluster, call).items():
        try:
            wanted = {partition: specs[partition] for partition in partitions}
            found = _find_at(leader, wanted, isolation, cluster, call)
        except TxnStoreError as error:
            found = dict.fromkeys(partitions, error)
        for partition, answer in found.items():
            if isinstance(answer, Exception):
                call.fail(partition, answer)
            else:
                call.settle(partition, partial(ListOffsetsResultInfo, answer.offset, answer.timestamp_ms, _NO_OFFSET))


def _by_leader(
    partitions: Sequence[TopicPartition], cluster: Cluster, call: Call[TopicPartition, Any]
) -> dict[int, list[TopicPartition]]:
    """Return the partitions by the database that leads them; what does not exist has failed."""
    if cluster.is_alone:
        return cluster.by_leader(partitions)

    def find(connection: Connection) -> dict[TopicPartition, int | Exception]:
        return {partition: _or_error(partial(partition_id_of, connection, partition)) for partition in partitions}

    ids: dict[TopicPartition, int] = {}
    for partition, found in cluster.controller.read(find, retry_timeout_ms=call.retry_ms(cluster.controller)).items():
        if isinstance(found, Exception):
            call.fail(partition, found)
        else:
            ids[partition] = found
    return cluster.by_leader(ids, ids.__getitem__)


def _find_at(
    leader: int,
    specs: dict[TopicPartition, OffsetSpec],
    isolation: IsolationLevel,
    cluster: Cluster,
    call: Call[TopicPartition, Any],
) -> dict[TopicPartition, OffsetAndTimestamp | Exception]:
    store = cluster.own(leader)

    def find(connection: Connection) -> dict[TopicPartition, OffsetAndTimestamp | Exception]:
        return {
            partition: _or_error(partial(_find, connection, partition, spec, isolation))
            for partition, spec in specs.items()
        }

    found = store.read(find, retry_timeout_ms=call.retry_ms(store))
    is_unknown = any(isinstance(answer, UnknownTopicOrPartition) for answer in found.values())
    if is_unknown and cluster.reconcile(leader):
        # The database had not heard of a new topic.
        return store.read(find, retry_timeout_ms=call.retry_ms(store))
    return found


def _find(
    connection: Connection, partition: TopicPartition, spec: OffsetSpec, isolation: IsolationLevel
) -> OffsetAndTimestamp:
    if isinstance(spec, TimestampSpec) and (type(spec.timestamp) is not int or spec.timestamp < _NO_OFFSET):
        shown = str(spec.timestamp)[:40]
        text = f"partition {partition.partition} of topic {partition.topic}: {shown} is not a timestamp"
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG, text))
    partition_id = partition_id_of(connection, partition)
    if isinstance(spec, TimestampSpec):
        found = offset_for_time(connection, partition_id, spec.timestamp, isolation)
    elif isinstance(spec, MaxTimestampSpec):
        found = offset_of_max_timestamp(connection, partition_id, isolation)
    else:
        bounds = read_bounds(connection, [partition_id])[partition_id]
        offset = bounds.log_start_offset if isinstance(spec, EarliestSpec) else bounds.end(isolation)
        found = OffsetAndTimestamp(offset, NO_TIMESTAMP_MS)
    return found or OffsetAndTimestamp(_NO_OFFSET, NO_TIMESTAMP_MS)


def _or_error(find: Callable[[], Answer]) -> Answer | Exception:
    """Return what was found, or what is wrong with this partition alone."""
    try:
        return find()
    except _OF_ONE_PARTITION as error:
        return error


def delete(cluster: Cluster, call: Call[TopicPartition, DeletedRecords], partition: TopicPartition) -> DeletedRecords:
    """Delete the records below the partition's offset."""

    def find(connection: Connection) -> int:
        topic = get_topic(connection, partition.topic)
        partition_id = topic.partition_id(partition.partition)
        if topic.settings["cleanup.policy"] == _COMPACTED_ONLY:
            raise PolicyViolation(f"topic {topic.name} is compacted only; add `delete` to its cleanup.policy first")
        return partition_id

    partition_id = cluster.controller.read(find, retry_timeout_ms=call.retry_ms(cluster.controller))
    return cluster.at_partition(
        partition_id,
        lambda leader: DeletedRecords(
            delete_records(leader, partition_id, partition.offset, retry_timeout_ms=call.retry_ms(leader))
        ),
    )

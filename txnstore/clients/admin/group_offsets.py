"""The offsets that groups have committed, as the admin client lists, changes and deletes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from sqlalchemy import Connection

from txnstore import model
from txnstore.clients.admin.calls import Call, write
from txnstore.clients.admin.records import public_partition
from txnstore.clients.model.errors import KafkaError, kafka_error_of
from txnstore.clients.model.metadata import ConsumerGroupTopicPartitions
from txnstore.clients.model.topic_partition import TopicPartition, with_committed
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.store import Store
from txnstore.errors import (
    GroupSubscribedToTopic,
    PermissionDenied,
    StoreBusy,
    StoreUnavailable,
    TxnStoreError,
    UnknownMember,
    UnknownTopicOrPartition,
    UnstableOffsetCommit,
    WriteConflict,
)
from txnstore.groups import administration
from txnstore.groups.administration import ListedOffsets
from txnstore.groups.commit_rules import check_group_id
from txnstore.log.cluster_topics import bring_up_to_date
from txnstore.log.topics import find_topics
from txnstore.model import OffsetAndMetadata

Result = TypeVar("Result")

# --- arguments, in confluent-kafka's words ----------------------------------------------------------------------------


def check_requests(
    request: object, *, with_offsets: bool | None, may_be_all: bool = False
) -> tuple[dict[str, ConsumerGroupTopicPartitions], bool]:
    """Return the requests by group, and whether a group or a partition was given twice.

    `with_offsets`: whether each partition must have an offset or must not; None: that does not matter.  `may_be_all`:
    whether a group without partitions means all of its partitions.
    """
    if request is None:
        raise TypeError("request cannot be None")
    if not isinstance(request, list):
        raise TypeError("request must be a list")
    if not request:
        raise ValueError("Expected at least one consumer group")
    twice = False
    by_group: dict[str, ConsumerGroupTopicPartitions] = {}
    for item in request:
        if not isinstance(item, ConsumerGroupTopicPartitions):
            raise TypeError("Expected list of 'ConsumerGroupTopicPartitions'")
        _check_group(item)
        if item.topic_partitions is None:
            if not may_be_all:
                raise ValueError("'topic_partitions' cannot be null")
        else:
            for partition in item.topic_partitions:
                _check_partition(partition, with_offsets)
            twice |= len(set(item.topic_partitions)) < len(item.topic_partitions)
        by_group[item.group_id] = item
    return by_group, twice or len(by_group) < len(request)


def _check_group(item: ConsumerGroupTopicPartitions) -> None:
    if item.group_id is None:
        raise TypeError("'group_id' cannot be None")
    if not isinstance(item.group_id, str):
        raise TypeError("'group_id' must be a string")
    if not item.group_id:
        raise ValueError("'group_id' cannot be empty")
    partitions: object = item.topic_partitions
    if partitions is not None and not isinstance(partitions, list):
        raise TypeError("'topic_partitions' must be a list or None")
    if isinstance(partitions, list) and not partitions:
        raise ValueError("'topic_partitions' cannot be empty")


def _check_partition(partition: object, with_offsets: bool | None) -> None:
    if not isinstance(partition, TopicPartition):
        raise TypeError("Element of 'topic_partitions' must be of type TopicPartition")
    if not partition.topic:
        raise ValueError("Element of 'topic_partitions' must not have 'topic' attribute as Empty")
    if partition.partition < 0:
        raise ValueError("Element of 'topic_partitions' must not have negative 'partition' value")
    if with_offsets is True and partition.offset < 0:
        raise ValueError("Element of 'topic_partitions' must not have negative value for 'offset' field")
    if with_offsets is False and partition.offset >= 0:
        raise ValueError("Element of 'topic_partitions' must not have 'offset' value")


# --- what is done -----------------------------------------------------------------------------------------------------


def find(
    requests: dict[str, ConsumerGroupTopicPartitions],
    cluster: Cluster,
    call: Call[str, ConsumerGroupTopicPartitions],
    group_id: str,
    *,
    require_stable: bool,
) -> ConsumerGroupTopicPartitions:
    """Return the group's committed offsets in the partitions asked for, or all of them."""
    request = requests[group_id]
    check_group_id(group_id)
    wanted = request.topic_partitions

    def work(connection: Connection) -> tuple[ListedOffsets, set[TopicPartition]]:
        committed = administration.list_offsets(connection, group_id)
        return committed, set(_known(connection, wanted or ()))

    def read(coordinator: Store) -> tuple[ListedOffsets, set[TopicPartition]]:
        # While the newest cannot be had or copied, what the names stand for here is the best that there is.
        with suppress(StoreUnavailable, StoreBusy, WriteConflict, PermissionDenied):
            bring_up_to_date(coordinator, cluster, retry_timeout_ms=call.retry_ms(coordinator))
        return coordinator.read(work, retry_timeout_ms=call.retry_ms(coordinator))

    committed, known = cluster.ask_coordinator(group_id, read, retry_timeout_ms=call.retry_ms(cluster.controller))
    if wanted is None:
        known = {*map(public_partition, committed.offsets), *map(public_partition, committed.unstable)}
    found = []
    for partition in sorted(known if wanted is None else wanted):
        key = model.PartitionName(partition.topic, partition.partition)
        offset = committed.offsets.get(key)
        error: TxnStoreError | None = None
        if partition not in known:
            error = _unknown(partition)
        elif require_stable and key in committed.unstable:
            offset, error = None, UnstableOffsetCommit(f"an open transaction holds an offset of partition {key}")
        elif wanted is None and offset is None:
            continue
        found.append(with_committed(partition, offset).with_error(_kafka_error(error)))
    return ConsumerGroupTopicPartitions(group_id, found)


def alter(
    requests: dict[str, ConsumerGroupTopicPartitions],
    cluster: Cluster,
    call: Call[str, ConsumerGroupTopicPartitions],
    group_id: str,
) -> ConsumerGroupTopicPartitions:
    """Commit offsets for the group, in those of the partitions that exist."""
    request = requests[group_id]
    check_group_id(group_id)
    wanted = request.topic_partitions or []
    errors: dict[TopicPartition, TxnStoreError] = {}

    def work(connection: Connection) -> None:
        errors.clear()
        known = _known(connection, wanted)
        errors.update({partition: _unknown(partition) for partition in wanted if partition not in known})
        offsets = {known[partition]: _offset_of(partition) for partition in wanted if partition in known}
        if offsets:
            administration.alter_offsets(connection, group_id, offsets)

    try:
        _change(cluster, call, group_id, lambda coordinator: write(coordinator, call, work))
    except UnknownMember:
        # Said of each partition, as Kafka says it.
        text = f"group {group_id[:80]!r} has members; stop them first, then alter its offsets"
        return _answer(request, dict.fromkeys(wanted, UnknownMember(text)) | errors)
    return _answer(request, errors)


def delete(
    requests: dict[str, ConsumerGroupTopicPartitions],
    cluster: Cluster,
    call: Call[str, ConsumerGroupTopicPartitions],
    group_id: str,
) -> ConsumerGroupTopicPartitions:
    """Delete what the group has committed in those of the partitions that exist and that it does not use."""
    request = requests[group_id]
    wanted = request.topic_partitions or []
    errors: dict[TopicPartition, TxnStoreError] = {}

    def work(connection: Connection) -> None:
        errors.clear()
        known = _known(connection, wanted)
        by_topic: dict[str, list[int]] = {}
        for partition, partition_id in known.items():
            by_topic.setdefault(partition.topic, []).append(partition_id)
        subscribed = administration.delete_offsets(connection, group_id, by_topic)
        for partition in wanted:
            if partition not in known:
                errors[partition] = _unknown(partition)
            elif partition.topic in subscribed:
                errors[partition] = GroupSubscribedToTopic(
                    f"members of group {group_id[:80]!r} are subscribed to topic {partition.topic}; its offsets"
                    " were left alone"
                )

    _change(cluster, call, group_id, lambda coordinator: write(coordinator, call, work))
    return _answer(request, errors)


def _change(
    cluster: Cluster,
    call: Call[str, ConsumerGroupTopicPartitions],
    group_id: str,
    work: Callable[[Store], Result],
) -> Result:
    """Do the work where the group lives, once names of topics stand there for what they stand for at the controller."""

    def up_to_date(coordinator: Store) -> Result:
        bring_up_to_date(coordinator, cluster, retry_timeout_ms=call.retry_ms(coordinator))
        return work(coordinator)

    return cluster.ask_coordinator(group_id, up_to_date, retry_timeout_ms=call.retry_ms(cluster.controller))


def _known(connection: Connection, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """Return the ids of those of the partitions that exist."""
    wanted = list(partitions)
    topics = {topic.name: topic for topic in find_topics(connection, sorted({item.topic for item in wanted}))}
    return {
        item: topics[item.topic].partition_ids[item.partition]
        for item in wanted
        if item.topic in topics and item.partition < len(topics[item.topic].partition_ids)
    }


def _offset_of(partition: TopicPartition) -> OffsetAndMetadata:
    leader_epoch = partition.leader_epoch
    return OffsetAndMetadata(
        partition.offset,
        -1 if leader_epoch is None else leader_epoch,
        partition.metadata,
        partition.offset_in_transaction,
    )


def _unknown(partition: TopicPartition) -> UnknownTopicOrPartition:
    return UnknownTopicOrPartition(f"there is no partition {partition.partition} of topic {partition.topic[:80]!r}")


def _answer(
    request: ConsumerGroupTopicPartitions, errors: dict[TopicPartition, TxnStoreError]
) -> ConsumerGroupTopicPartitions:
    partitions = [
        partition.with_error(_kafka_error(errors.get(partition)))
        for partition in sorted(request.topic_partitions or ())
    ]
    return ConsumerGroupTopicPartitions(request.group_id, partitions)


def _kafka_error(error: TxnStoreError | None) -> KafkaError | None:
    return None if error is None else kafka_error_of(error)

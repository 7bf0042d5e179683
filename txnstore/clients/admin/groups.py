"""This file is what the admin client does with groups and their offsets."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from typing import Final

from sqlalchemy import Connection

from txnstore import model
from txnstore.clients.admin.calls import Call, write
from txnstore.clients.admin.group_results import (
    ConsumerGroupDescription,
    ConsumerGroupListing,
    ListConsumerGroupsResult,
    MemberAssignment,
    MemberDescription,
)
from txnstore.clients.admin.partitions import public_partition
from txnstore.clients.brokers import all_stores, at_coordinator, broker_metadata, broker_node
from txnstore.clients.membership.kafka_bytes import assignment_bytes, subscription_bytes
from txnstore.clients.model.constants import OFFSET_INVALID
from txnstore.clients.model.error_mapping import kafka_error_of
from txnstore.clients.model.kafka_error import KafkaError
from txnstore.clients.model.metadata import (
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    ConsumerGroupType,
    GroupMember,
    GroupMetadata,
)
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.db.store import Store
from txnstore.errors import (
    GroupSubscribedToTopic,
    TxnStoreError,
    UnknownMember,
    UnknownTopicOrPartition,
    UnstableOffsetCommit,
)
from txnstore.groups import administration, listing
from txnstore.groups.commit_rules import check_group_id
from txnstore.groups.group_states import GroupState
from txnstore.groups.listing import ListedGroup, ListedMember, ListedOffsets
from txnstore.log.topics import find_topics
from txnstore.model import OffsetAndMetadata

_STATES: Final = {
    GroupState.EMPTY: ConsumerGroupState.EMPTY,
    GroupState.PREPARING_REBALANCE: ConsumerGroupState.PREPARING_REBALANCING,
    GroupState.COMPLETING_REBALANCE: ConsumerGroupState.COMPLETING_REBALANCING,
    GroupState.STABLE: ConsumerGroupState.STABLE,
    GroupState.DEAD: ConsumerGroupState.DEAD,
}
#: Groups are those of Kafka's older protocol: the assignors are the clients'.
_TYPE: Final = ConsumerGroupType.CLASSIC
_PROTOCOL_TYPE: Final = "consumer"
#: The database does not tell where its clients are.
_NO_HOST: Final = ""


# --- groups -----------------------------------------------------------------------------------------------------------


def find(
    store: Store, retry_ms: int, states: Collection[enum.Enum], types: Collection[enum.Enum]
) -> ListConsumerGroupsResult:
    """Return the groups in one of these states and of one of these types; none given: of any."""
    found = [group for home in all_stores(store) for group in home.read(listing.list_groups, retry_timeout_ms=retry_ms)]
    groups = [group.without_expired() for group in found]
    listings = [
        ConsumerGroupListing(group.group_id, group.is_simple, _STATES[group.state], _TYPE)
        for group in groups
        if (not states or _STATES[group.state] in states) and (not types or _TYPE in types)
    ]
    return ListConsumerGroupsResult(listings, [])


def describe(store: Store, call: Call[str, ConsumerGroupDescription], group_id: str) -> ConsumerGroupDescription:
    """Return the group's description."""
    check_group_id(group_id)
    return at_coordinator(store, group_id, lambda home: _describe(home, call, group_id))


def _describe(home: Store, call: Call[str, ConsumerGroupDescription], group_id: str) -> ConsumerGroupDescription:
    group = home.read(lambda connection: listing.find_group(connection, group_id), retry_timeout_ms=call.retry_ms(home))
    node = broker_node(home)
    if group is None:
        return ConsumerGroupDescription(group_id, False, [], "", ConsumerGroupState.DEAD, node, type=_TYPE)
    group = group.without_expired()
    members = [_description(member) for member in group.members]
    return ConsumerGroupDescription(
        group_id, group.is_simple, members, group.assignor or "", _STATES[group.state], node, type=_TYPE
    )


def delete(store: Store, call: Call[str, None], group_id: str) -> None:
    """Delete the group."""
    at_coordinator(
        store,
        group_id,
        lambda home: write(home, call, lambda connection: administration.delete_group(connection, group_id)),
    )


def list_metadata(store: Store, group_id: str | None) -> list[GroupMetadata]:
    """Return the groups, or the one of this id if there is one, as librdkafka's oldest call shows them."""
    if group_id is None:
        found = [(home, group) for home in all_stores(store) for group in home.read(listing.list_groups)]
        return [_metadata(home, group.without_expired()) for home, group in found]
    check_group_id(group_id)

    def find_one(home: Store) -> list[GroupMetadata]:
        group = home.read(lambda connection: listing.find_group(connection, group_id))
        return [] if group is None else [_metadata(home, group.without_expired())]

    return at_coordinator(store, group_id, find_one)


def _description(member: ListedMember) -> MemberDescription:
    return MemberDescription(
        member.member_id,
        member.client_id,
        _NO_HOST,
        _assignment(member.owned),
        member.group_instance_id,
        _assignment(member.assignment),
    )


def _assignment(partitions: Iterable[model.TopicPartition]) -> MemberAssignment:
    return MemberAssignment([public_partition(partition) for partition in sorted(partitions)])


def _metadata(store: Store, group: ListedGroup) -> GroupMetadata:
    found = GroupMetadata()
    found.broker = broker_metadata(store)
    found.id = group.group_id
    found.state = group.state.value
    found.protocol_type = "" if group.is_simple else _PROTOCOL_TYPE
    found.protocol = group.assignor or ""
    found.members = [_member_metadata(member) for member in group.members]
    return found


def _member_metadata(member: ListedMember) -> GroupMember:
    found = GroupMember()
    found.id = member.member_id
    found.client_id = member.client_id
    found.client_host = _NO_HOST
    found.metadata = subscription_bytes(sorted(member.topics or member.subscribed))
    by_topic: dict[str, list[int]] = {}
    for partition in sorted(member.owned):
        by_topic.setdefault(partition.topic, []).append(partition.partition)
    found.assignment = assignment_bytes(by_topic)
    return found


# --- their offsets ----------------------------------------------------------------------------------------------------


def list_offsets(
    store: Store,
    call: Call[str, ConsumerGroupTopicPartitions],
    request: ConsumerGroupTopicPartitions,
    *,
    require_stable: bool,
) -> ConsumerGroupTopicPartitions:
    """Return the group's committed offsets in the partitions asked for, or all of them."""
    check_group_id(request.group_id)
    wanted = request.topic_partitions

    def work(connection: Connection) -> tuple[ListedOffsets, set[TopicPartition]]:
        committed = listing.list_offsets(connection, request.group_id)
        return committed, set(_known(connection, wanted or ()))

    committed, known = at_coordinator(
        store, request.group_id, lambda home: home.read(work, retry_timeout_ms=call.retry_ms(home))
    )
    if wanted is None:
        known = {*map(public_partition, committed.offsets), *map(public_partition, committed.unstable)}
    found = []
    for partition in sorted(known if wanted is None else wanted):
        key = model.TopicPartition(partition.topic, partition.partition)
        offset = committed.offsets.get(key)
        error: TxnStoreError | None = None
        if partition not in known:
            error = _unknown(partition)
        elif require_stable and key in committed.unstable:
            offset, error = None, UnstableOffsetCommit(f"an open transaction holds an offset of partition {key}")
        elif wanted is None and offset is None:
            continue
        found.append(_with_offset(partition, offset, error))
    return ConsumerGroupTopicPartitions(request.group_id, found)


def alter_offsets(
    store: Store, call: Call[str, ConsumerGroupTopicPartitions], request: ConsumerGroupTopicPartitions
) -> ConsumerGroupTopicPartitions:
    """Commit offsets for the group, of those of the partitions that there are."""
    check_group_id(request.group_id)
    wanted = request.topic_partitions or []
    errors: dict[TopicPartition, TxnStoreError] = {}

    def work(connection: Connection) -> None:
        errors.clear()
        known = _known(connection, wanted)
        errors.update({partition: _unknown(partition) for partition in wanted if partition not in known})
        offsets = {known[partition]: _offset_of(partition) for partition in wanted if partition in known}
        if offsets:
            administration.alter_offsets(connection, request.group_id, offsets)

    try:
        at_coordinator(store, request.group_id, lambda home: write(home, call, work))
    except UnknownMember:
        # Said of each partition, as Kafka says it.
        text = f"group {request.group_id[:80]!r} has members; stop them first, then alter its offsets"
        return _answer(request, dict.fromkeys(wanted, UnknownMember(text)) | errors)
    return _answer(request, errors)


def delete_offsets(
    store: Store, call: Call[str, ConsumerGroupTopicPartitions], request: ConsumerGroupTopicPartitions
) -> ConsumerGroupTopicPartitions:
    """Delete what the group has committed in those of the partitions that there are and that it does not use."""
    wanted = request.topic_partitions or []
    errors: dict[TopicPartition, TxnStoreError] = {}

    def work(connection: Connection) -> None:
        errors.clear()
        known = _known(connection, wanted)
        by_topic: dict[str, list[int]] = {}
        for partition, partition_id in known.items():
            by_topic.setdefault(partition.topic, []).append(partition_id)
        subscribed = administration.delete_offsets(connection, request.group_id, by_topic)
        for partition in wanted:
            if partition not in known:
                errors[partition] = _unknown(partition)
            elif partition.topic in subscribed:
                errors[partition] = GroupSubscribedToTopic(
                    f"members of group {request.group_id[:80]!r} are subscribed to topic {partition.topic}; its offsets"
                    " were left alone"
                )

    at_coordinator(store, request.group_id, lambda home: write(home, call, work))
    return _answer(request, errors)


def _known(connection: Connection, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """Return the ids of those of the partitions that there are."""
    wanted = list(partitions)
    topics = {topic.name: topic for topic in find_topics(connection, sorted({item.topic for item in wanted}))}
    return {
        item: topics[item.topic].partition_ids[item.partition]
        for item in wanted
        if item.topic in topics and item.partition < len(topics[item.topic].partition_ids)
    }


def _offset_of(partition: TopicPartition) -> OffsetAndMetadata:
    leader_epoch = partition.leader_epoch
    return OffsetAndMetadata(partition.offset, -1 if leader_epoch is None else leader_epoch, partition.metadata)


def _unknown(partition: TopicPartition) -> UnknownTopicOrPartition:
    return UnknownTopicOrPartition(f"there is no partition {partition.partition} of a topic {partition.topic[:80]!r}")


def _answer(
    request: ConsumerGroupTopicPartitions, errors: dict[TopicPartition, TxnStoreError]
) -> ConsumerGroupTopicPartitions:
    partitions = [
        partition.with_error(_kafka_error(errors.get(partition)))
        for partition in sorted(request.topic_partitions or ())
    ]
    return ConsumerGroupTopicPartitions(request.group_id, partitions)


def _with_offset(
    partition: TopicPartition, offset: OffsetAndMetadata | None, error: TxnStoreError | None
) -> TopicPartition:
    if offset is None:
        found = TopicPartition(partition.topic, partition.partition, OFFSET_INVALID)
    else:
        found = TopicPartition(
            partition.topic, partition.partition, offset.offset, offset.metadata, offset.leader_epoch
        )
    return found.with_error(_kafka_error(error))


def _kafka_error(error: TxnStoreError | None) -> KafkaError | None:
    return None if error is None else kafka_error_of(error)

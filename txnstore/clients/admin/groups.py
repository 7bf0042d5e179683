"""Consumer groups as the admin client lists, describes and deletes them."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from typing import Any, Final, TypeVar

from txnstore import model
from txnstore.clients.admin.calls import Call, write
from txnstore.clients.admin.records import public_partition
from txnstore.clients.brokers import broker_metadata, broker_node
from txnstore.clients.membership.metadata import assignment_bytes, subscription_bytes
from txnstore.clients.model.errors import kafka_exception_of
from txnstore.clients.model.metadata import (
    ConsumerGroupState,
    ConsumerGroupType,
    GroupMember,
    GroupMetadata,
    Node,
    with_fields,
)
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.db.cluster.cluster import OPENING_MS, Cluster, LeftOut
from txnstore.db.store import Store
from txnstore.groups import administration
from txnstore.groups.administration import ListedGroup, ListedMember
from txnstore.groups.commit_rules import check_group_id
from txnstore.groups.group import GroupState

_Kind = TypeVar("_Kind", bound=enum.Enum)

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


def member_of(kind: type[_Kind], given: object) -> _Kind:
    """Return the member of an enumeration by itself, its name in any case, or its number."""
    if isinstance(given, kind):
        return given
    try:
        if isinstance(given, str):
            return kind[given.upper()]
        if isinstance(given, int):
            return kind(given)
    except (KeyError, ValueError):
        raise ValueError(f'Unknown value "{str(given)[:80]}": should be a {kind.__name__}') from None
    raise TypeError(f'Unknown value "{str(given)[:80]}": should be a {kind.__name__}')


class ConsumerGroupListing:
    """A group, from `list_consumer_groups()`; `state` and `type` are there if they are known.

    Args:
        group_id: the group.
        is_simple_consumer_group: whether it never had members: its consumers manage their partitions themselves.
        state: the state, its name or its number.
        type: the type, its name or its number.

    Raises:
        TypeError, ValueError: there is no such state or type.
    """

    def __init__(
        self,
        group_id: str,
        is_simple_consumer_group: bool,
        state: ConsumerGroupState | str | int | None = None,
        type: ConsumerGroupType | str | int | None = None,  # noqa: A002 - confluent-kafka's name
    ) -> None:
        self.group_id = group_id
        self.is_simple_consumer_group = is_simple_consumer_group
        if state is not None:
            self.state: ConsumerGroupState = member_of(ConsumerGroupState, state)
        if type is not None:
            self.type: ConsumerGroupType = member_of(ConsumerGroupType, type)

    __repr__ = with_fields


class ListConsumerGroupsResult:
    """What `list_consumer_groups()` has found; `errors` tells of databases that could not be asked for theirs."""

    def __init__(self, valid: list[ConsumerGroupListing] | None = None, errors: list[Exception] | None = None) -> None:
        self.valid = valid
        self.errors = errors

    __repr__ = with_fields


class MemberAssignment:
    """The partitions of a member of a group."""

    def __init__(self, topic_partitions: list[TopicPartition] | None) -> None:
        self.topic_partitions: list[TopicPartition] = [] if topic_partitions is None else topic_partitions

    __repr__ = with_fields


class MemberDescription:
    """A member of a group.

    Args:
        member_id: the id it has chosen for this life.
        client_id: its `client.id`.
        host: empty: the database does not tell where its clients are.
        assignment: what it has: nobody else works on any of it.
        group_instance_id: the lasting name of a static member.
        target_assignment: what it is to have, once everybody has given back what is not theirs.
    """

    def __init__(  # noqa: PLR0917 - confluent-kafka's signature
        self,
        member_id: str,
        client_id: str,
        host: str,
        assignment: MemberAssignment,
        group_instance_id: str | None = None,
        target_assignment: MemberAssignment | None = None,
    ) -> None:
        self.member_id = member_id
        self.client_id = client_id
        self.host = host
        self.assignment = assignment
        self.target_assignment = target_assignment
        self.group_instance_id = group_instance_id

    __repr__ = with_fields


class ConsumerGroupDescription:
    """A group, from `describe_consumer_groups()`; one that nobody has used is DEAD and has no members.

    Args:
        group_id: the group.
        is_simple_consumer_group: whether it never had members.
        members: its members.
        partition_assignor: the name of the assignor they agreed on; empty: none yet.
        state: the state, its name or its number.
        coordinator: the broker that looks after the group.
        authorized_operations: None: the database decides who may do what.
        type: the type, its name or its number.

    Raises:
        TypeError, ValueError: there is no such state or type.
    """

    def __init__(  # noqa: PLR0917 - confluent-kafka's signature
        self,
        group_id: str,
        is_simple_consumer_group: bool,
        members: list[MemberDescription],
        partition_assignor: str,
        state: ConsumerGroupState | str | int | None,
        coordinator: Node,
        authorized_operations: list[Any] | None = None,
        type: ConsumerGroupType | str | int = ConsumerGroupType.UNKNOWN,  # noqa: A002 - confluent-kafka's name
    ) -> None:
        self.group_id = group_id
        self.is_simple_consumer_group = is_simple_consumer_group
        self.members = members
        self.authorized_operations = authorized_operations
        self.partition_assignor = partition_assignor
        if state is not None:
            self.state: ConsumerGroupState = member_of(ConsumerGroupState, state)
        self.type: ConsumerGroupType = member_of(ConsumerGroupType, type)
        self.coordinator = coordinator

    __repr__ = with_fields


# --- arguments, in confluent-kafka's words ----------------------------------------------------------------------------


def check_group_ids(group_ids: object, purpose: str) -> list[str]:
    """Return the groups' ids; each is looked at more closely in its future."""
    if not isinstance(group_ids, list):
        raise TypeError(f"Expected input to be list of group ids to be {purpose}")
    if not group_ids:
        raise ValueError(f"Expected at least one group to be {purpose}")
    for group_id in group_ids:
        if not isinstance(group_id, str):
            raise ValueError(f"Expected list of group strings, not {type(group_id).__name__}")  # noqa: TRY004 - theirs
    return group_ids


def check_kinds(name: str, kinds: object, kind: type[enum.Enum]) -> frozenset[enum.Enum]:
    """Return the states or types that are asked for; empty: all."""
    if kinds is None:
        return frozenset()
    if not isinstance(kinds, set | frozenset):
        raise TypeError(f"'{name}' must be a set")
    if not all(isinstance(item, kind) for item in kinds):
        raise TypeError(f"All elements of {name} must be of type {kind.__name__}")
    if ConsumerGroupType.UNKNOWN in kinds:
        raise ValueError("UNKNOWN type is not allowed")
    return frozenset(kinds)


# --- what is done -----------------------------------------------------------------------------------------------------


def find(
    cluster: Cluster,
    call: Call[str, ListConsumerGroupsResult],
    *,
    states: Collection[enum.Enum],
    types: Collection[enum.Enum],
) -> ListConsumerGroupsResult:
    """Return the groups in one of these states and of one of these types; empty: all."""
    cluster.has_learned_of_others(retry_timeout_ms=call.retry_ms(cluster.controller))
    left_out: LeftOut = {}
    found = cluster.read_all(administration.list_groups, left_out, retry_timeout_ms=call.retry_ms_of_each(cluster))
    groups = [group.without_expired() for _, groups in found for group in groups]
    listings = [
        ConsumerGroupListing(group.group_id, group.is_simple, _STATES[group.state], _TYPE)
        for group in groups
        if (not states or _STATES[group.state] in states) and (not types or _TYPE in types)
    ]
    return ListConsumerGroupsResult(listings, [kafka_exception_of(error) for error in left_out.values()])


def describe(cluster: Cluster, call: Call[str, ConsumerGroupDescription], group_id: str) -> ConsumerGroupDescription:
    """Return the group's description."""
    check_group_id(group_id)
    return cluster.ask_coordinator(
        group_id,
        lambda coordinator: _describe(coordinator, call, group_id),
        retry_timeout_ms=call.retry_ms(cluster.controller),
    )


def _describe(coordinator: Store, call: Call[str, ConsumerGroupDescription], group_id: str) -> ConsumerGroupDescription:
    group = coordinator.read(
        lambda connection: administration.find_group(connection, group_id), retry_timeout_ms=call.retry_ms(coordinator)
    )
    node = broker_node(coordinator)
    if group is None:
        return ConsumerGroupDescription(group_id, False, [], "", ConsumerGroupState.DEAD, node, type=_TYPE)
    group = group.without_expired()
    members = [_description(member) for member in group.members]
    return ConsumerGroupDescription(
        group_id, group.is_simple, members, group.assignor or "", _STATES[group.state], node, type=_TYPE
    )


def delete(cluster: Cluster, call: Call[str, None], group_id: str) -> None:
    """Delete the group."""
    cluster.ask_coordinator(
        group_id,
        lambda coordinator: write(
            coordinator, call, lambda connection: administration.delete_group(connection, group_id)
        ),
        retry_timeout_ms=call.retry_ms(cluster.controller),
    )


def list_metadata(cluster: Cluster, group_id: str | None) -> list[GroupMetadata]:
    """Return the groups, or the one of this id if there is one, as librdkafka's oldest call shows them."""
    if group_id is None:
        cluster.has_learned_of_others()
        left_out: LeftOut = {}
        retry_ms = None if cluster.is_alone else OPENING_MS
        found = cluster.read_all(administration.list_groups, left_out, retry_timeout_ms=retry_ms)
        cluster.warn_of(left_out)
        return [_metadata(coordinator, group.without_expired()) for coordinator, groups in found for group in groups]
    check_group_id(group_id)

    def find_one(coordinator: Store) -> list[GroupMetadata]:
        group = coordinator.read(lambda connection: administration.find_group(connection, group_id))
        return [] if group is None else [_metadata(coordinator, group.without_expired())]

    return cluster.ask_coordinator(group_id, find_one)


def _description(member: ListedMember) -> MemberDescription:
    return MemberDescription(
        member.member_id,
        member.client_id,
        _NO_HOST,
        _assignment(member.owned),
        member.group_instance_id,
        _assignment(member.assignment),
    )


def _assignment(partitions: Iterable[model.PartitionName]) -> MemberAssignment:
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

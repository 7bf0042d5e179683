"""This file is what the admin client returns about groups, as confluent-kafka's users know it."""

from __future__ import annotations

import enum
from typing import Any, TypeVar

from txnstore.clients.model.metadata import ConsumerGroupState, ConsumerGroupType, Node
from txnstore.clients.model.topic_partition import TopicPartition

_Kind = TypeVar("_Kind", bound=enum.Enum)


def member_of(kind: type[_Kind], given: object) -> _Kind:
    """Return the member of an enumeration by itself, its name in any case, or its number.

    Raises:
        ValueError: there is none of this name or number.
        TypeError: it is neither of them.
    """
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


class ListConsumerGroupsResult:
    """What `list_consumer_groups()` has found; `errors` is always empty here: one database knows all groups."""

    def __init__(self, valid: list[ConsumerGroupListing] | None = None, errors: list[Exception] | None = None) -> None:
        self.valid = valid
        self.errors = errors


class MemberAssignment:
    """The partitions of a member of a group."""

    def __init__(self, topic_partitions: list[TopicPartition] | None) -> None:
        self.topic_partitions: list[TopicPartition] = [] if topic_partitions is None else topic_partitions


class MemberDescription:
    """A member of a group.

    Args:
        member_id: the id it has chosen for this life.
        client_id: its `client.id`.
        host: empty: the database does not tell where its clients are.
        assignment: what it has: nobody else works on any of it.
        group_instance_id: the lasting name of a static member.
        target_assignment: what it is to have, once everybody has given back what is not his.
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

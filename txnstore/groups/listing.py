"""This file is groups for people: which there are, their members and states, and the offsets that they committed.

Everything here reads; nothing is locked, and an answer is of one snapshot.  A member that was silent for longer than
its session timeout is shown until somebody removes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import Connection, Row, bindparam, select

from txnstore.db.schema import group_members, group_offsets, groups, pending_group_offsets
from txnstore.db.server_time import server_now_ms
from txnstore.groups.group_states import GroupState
from txnstore.log.topics import names_of_partitions
from txnstore.model import OffsetAndMetadata, TopicPartition

_GROUPS: Final = select(groups).order_by(groups.c.group_id)
_MEMBERS: Final = select(group_members, (group_members.c.deadline_ms <= server_now_ms()).label("is_expired")).order_by(
    group_members.c.group_id, group_members.c.member_id
)
_THIS_GROUP: Final = _GROUPS.where(groups.c.group_id == bindparam("of_group_id"))
_THESE_MEMBERS: Final = _MEMBERS.where(group_members.c.group_id == bindparam("of_group_id"))
_OFFSETS: Final = select(
    group_offsets.c.partition_id,
    group_offsets.c.committed_offset,
    group_offsets.c.leader_epoch,
    group_offsets.c.offset_metadata,
).where(group_offsets.c.group_id == bindparam("of_group_id"))
_PENDING: Final = (
    select(pending_group_offsets.c.partition_id)
    .where(pending_group_offsets.c.group_id == bindparam("of_group_id"))
    .distinct()
)
#: Patterns of topics are told from names by this.
_PATTERN_MARK: Final = "^"


@dataclass(frozen=True, slots=True)
class ListedMember:
    """A member of a group."""

    member_id: str
    group_instance_id: str | None
    client_id: str
    generation: int
    session_timeout_ms: int
    deadline_ms: int
    is_expired: bool
    """Whether it has been silent for longer than its session timeout."""

    subscribed: tuple[str, ...]
    """Topics and patterns, as the application gave them."""

    topics: frozenset[str]
    """The topics that these come to."""

    assignment: frozenset[TopicPartition]
    """What it is to have."""

    owned: frozenset[TopicPartition]
    """What it has: nobody else works on any of it."""

    def is_subscribed_to(self, topic: str) -> bool:
        """Return whether the member wants, or has, partitions of the topic."""
        if any(partition.topic == topic for partition in (*self.assignment, *self.owned)):
            return True
        if topic in self.topics:
            return True
        return any(_matches(wanted, topic) for wanted in self.subscribed)


@dataclass(frozen=True, slots=True)
class ListedGroup:
    """A group with its members, by member id."""

    group_id: str
    generation: int
    assignor: str | None
    last_update_ms: int
    members: tuple[ListedMember, ...]

    def without_expired(self) -> ListedGroup:
        """Return the group as Kafka would show it: whoever was silent for too long is no member any more."""
        return replace(self, members=tuple(member for member in self.members if not member.is_expired))

    @property
    def is_simple(self) -> bool:
        """Whether it never had a member: its offsets come from consumers that manage their partitions themselves."""
        return self.generation == 0 and not self.members

    @property
    def state(self) -> GroupState:
        """Where the group stands."""
        if not self.members:
            return GroupState.EMPTY
        if any(member.owned - member.assignment for member in self.members):
            return GroupState.PREPARING_REBALANCE
        settled = all(
            member.generation == self.generation and member.owned == member.assignment for member in self.members
        )
        return GroupState.STABLE if settled else GroupState.COMPLETING_REBALANCE


@dataclass(frozen=True, slots=True)
class ListedOffsets:
    """What a group has committed, by topic and partition."""

    offsets: Mapping[TopicPartition, OffsetAndMetadata]
    unstable: frozenset[TopicPartition]
    """The partitions whose offsets an open transaction may still change."""


def list_groups(connection: Connection) -> list[ListedGroup]:
    """Return all groups, by their ids."""
    members: dict[str, list[Row[Any]]] = {}
    for row in connection.execute(_MEMBERS):
        members.setdefault(row.group_id, []).append(row)
    return [_group(row, members.get(row.group_id, ())) for row in connection.execute(_GROUPS)]


def find_group(connection: Connection, group_id: str) -> ListedGroup | None:
    """Return the group; None if there is none of this id."""
    of_group = {"of_group_id": group_id}
    row = connection.execute(_THIS_GROUP, of_group).one_or_none()
    return None if row is None else _group(row, connection.execute(_THESE_MEMBERS, of_group).all())


def list_offsets(connection: Connection, group_id: str) -> ListedOffsets:
    """Return all that the group has committed, and where an open transaction holds offsets of it."""
    of_group = {"of_group_id": group_id}
    committed = {row[0]: OffsetAndMetadata(*row[1:]) for row in connection.execute(_OFFSETS, of_group)}
    pending = set(connection.execute(_PENDING, of_group).scalars())
    names = names_of_partitions(connection, committed.keys() | pending)
    return ListedOffsets(
        {names[partition_id]: offset for partition_id, offset in committed.items() if partition_id in names},
        frozenset(names[partition_id] for partition_id in pending if partition_id in names),
    )


def _group(row: Row[Any], members: Iterable[Row[Any]]) -> ListedGroup:
    return ListedGroup(
        row.group_id, row.generation, row.assignor, row.last_update_ms, tuple(_member(member) for member in members)
    )


def _member(row: Row[Any]) -> ListedMember:
    stored = json.loads(row.subscription)
    return ListedMember(
        row.member_id,
        row.group_instance_id,
        row.client_id,
        row.generation,
        row.session_timeout_ms,
        row.deadline_ms,
        bool(row.is_expired),
        tuple(stored["subscribed"]),
        frozenset(stored["topics"]),
        _partitions(json.loads(row.assignment)),
        _partitions(stored["owned"]),
    )


def _partitions(by_topic: Mapping[str, Sequence[int]]) -> frozenset[TopicPartition]:
    return frozenset(TopicPartition(topic, number) for topic, numbers in by_topic.items() for number in numbers)


def _matches(wanted: str, topic: str) -> bool:
    if not wanted.startswith(_PATTERN_MARK):
        return wanted == topic
    try:
        return re.search(wanted, topic) is not None
    except re.error:
        return False

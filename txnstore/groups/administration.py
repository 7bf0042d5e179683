"""Groups for administrators: listing groups and their offsets, deleting groups, altering and deleting offsets.

Listing locks nothing, and an answer is of one snapshot; it shows a member that was silent for longer than its session
timeout until somebody removes it.  Changes are made under the group's lock.  There a group is empty if none of its
members is alive: expired ones are removed first, and the generation goes up, so that nothing they send late counts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import BindParameter, Connection, Row, bindparam, delete, select, update

from txnstore.db.schema import group_members, group_offsets, groups, pending_group_offsets
from txnstore.db.store import chunks, must_hit, server_now_ms
from txnstore.errors import GroupIdNotFound, GroupNotEmpty
from txnstore.groups.commit_rules import check_group_id
from txnstore.groups.group import GroupState
from txnstore.groups.offsets import commit_offsets
from txnstore.groups.rebalance_rules import state_among
from txnstore.groups.rows import lock_group, read_member, remove_expired
from txnstore.log.topics import names_of_partitions
from txnstore.model import INTERNAL_GROUP_PREFIX, GroupMembership, OffsetAndMetadata, PartitionName

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
    group_offsets.c.offset_in_transaction,
).where(group_offsets.c.group_id == bindparam("of_group_id"))
_PENDING: Final = (
    select(pending_group_offsets.c.partition_id)
    .where(pending_group_offsets.c.group_id == bindparam("of_group_id"))
    .distinct()
)
#: A subscription that begins with this is a pattern, not a topic's name.
_PATTERN_MARK: Final = "^"


@dataclass(frozen=True, slots=True)
class ListedMember:
    """A member of a group, with its deadline."""

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
    """The topics that these match."""

    assignment: frozenset[PartitionName]
    """What it is to own."""

    owned: frozenset[PartitionName]
    """What it owns: no other member works on any of it."""

    def is_subscribed_to(self, topic: str) -> bool:
        """Return whether the member wants, or owns, partitions of the topic."""
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
        """Return the group as Kafka would show it: without the members that were silent for too long."""
        return replace(self, members=tuple(member for member in self.members if not member.is_expired))

    @property
    def is_simple(self) -> bool:
        """Whether it never had a member: its offsets come from consumers that manage their partitions themselves."""
        return self.generation == 0 and not self.members

    @property
    def state(self) -> GroupState:
        """Where the group stands."""
        return state_among(self.members, self.generation, self.assignor)


@dataclass(frozen=True, slots=True)
class ListedOffsets:
    """What a group has committed, by topic and partition."""

    offsets: Mapping[PartitionName, OffsetAndMetadata]
    unstable: frozenset[PartitionName]
    """The partitions whose offsets an open transaction may still change."""


def list_groups(connection: Connection) -> list[ListedGroup]:
    """Return all groups, by their ids, but for those in whose offsets txnstore keeps a place of its own."""
    members: dict[str, list[Row[Any]]] = {}
    for row in connection.execute(_MEMBERS):
        members.setdefault(row.group_id, []).append(row)
    return [
        _group(row, members.get(row.group_id, ()))
        for row in connection.execute(_GROUPS)
        if not row.group_id.startswith(INTERNAL_GROUP_PREFIX)
    ]


def find_group(connection: Connection, group_id: str) -> ListedGroup | None:
    """Return the group; None if it does not exist."""
    of_group = {"of_group_id": group_id}
    row = connection.execute(_THIS_GROUP, of_group).one_or_none()
    return None if row is None else _group(row, connection.execute(_THESE_MEMBERS, of_group).all())


def list_offsets(connection: Connection, group_id: str) -> ListedOffsets:
    """Return what the group has committed, and the partitions in which an open transaction holds offsets of it."""
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
    member = read_member(row)
    return ListedMember(
        member.member_id,
        member.group_instance_id,
        member.details.client_id,
        member.generation,
        member.details.session_timeout_ms,
        row.deadline_ms,
        bool(row.is_expired),
        member.details.subscription,
        member.details.topics,
        member.assignment,
        member.owned,
    )


def _matches(wanted: str, topic: str) -> bool:
    if not wanted.startswith(_PATTERN_MARK):
        return wanted == topic
    try:
        return re.search(wanted, topic) is not None
    except re.error:
        return False


_OF_GROUP: Final[BindParameter[Any]] = bindparam("of_group_id")
_RAISE_GENERATION: Final = (
    update(groups)
    .where(groups.c.group_id == _OF_GROUP)
    .values(generation=groups.c.generation + 1, last_update_ms=server_now_ms())
)
_HOLDER: Final = (
    select(pending_group_offsets.c.producer_id).where(pending_group_offsets.c.group_id == _OF_GROUP).limit(1)
)
_FORGET_OFFSETS: Final = delete(group_offsets).where(group_offsets.c.group_id == _OF_GROUP)
_FORGET_GROUP: Final = delete(groups).where(groups.c.group_id == _OF_GROUP)
_PARTITIONS: Final[BindParameter[Any]] = bindparam("partition_ids", expanding=True)
_FORGET_SOME: Final = _FORGET_OFFSETS.where(group_offsets.c.partition_id.in_(_PARTITIONS))
_FORGET_PENDING: Final = delete(pending_group_offsets).where(
    pending_group_offsets.c.group_id == _OF_GROUP, pending_group_offsets.c.partition_id.in_(_PARTITIONS)
)


def delete_group(connection: Connection, group_id: str) -> None:
    """Delete an empty group with its offsets.

    Raises:
        InvalidGroupId: it cannot be the id of a group.
        GroupIdNotFound: the group does not exist.
        GroupNotEmpty: it has members, or an open transaction holds offsets of it.
    """
    check_group_id(group_id)
    group = _locked_group(connection, group_id)
    if group.members:
        raise GroupNotEmpty(
            f"group {group_id[:80]!r} has {len(group.members)} members; stop them first, then delete the group"
        )
    holder = connection.execute(_HOLDER, {"of_group_id": group_id}).scalars().first()
    if holder is not None:
        # Its commit would bring a part of what is deleted here back.
        raise GroupNotEmpty(
            f"an open transaction of producer {holder} holds offsets of group {group_id[:80]!r}; end it first, then"
            " delete the group"
        )
    connection.execute(_FORGET_OFFSETS, {"of_group_id": group_id})
    must_hit(connection, _FORGET_GROUP, {"of_group_id": group_id})


def alter_offsets(
    connection: Connection, group_id: str, offsets: Mapping[int, OffsetAndMetadata], *, changes_order: bool = False
) -> None:
    """Commit offsets by partition id for a group without members, which is created if it does not exist.

    With `changes_order` they may be of another order of delivery than what they replace; so may, without it, those in
    commit order, which say so themselves.

    Raises:
        UnknownMember: the group has members; stop them first.
        InvalidGroupId, InvalidRequest, OffsetMetadataTooLarge: see `groups.offsets.commit_offsets`.
    """
    check_group_id(group_id)
    if lock_group(connection, group_id):
        _locked_group(connection, group_id)
    plain = {key: offset for key, offset in offsets.items() if offset.offset_in_transaction is None}
    placed = {key: offset for key, offset in offsets.items() if key not in plain}
    for some, says_so in ((plain, changes_order), (placed, True)):
        if some:
            commit_offsets(connection, GroupMembership(group_id), some, changes_order=says_so)


def delete_offsets(
    connection: Connection, group_id: str, partition_ids: Mapping[str, Collection[int]]
) -> frozenset[str]:
    """Delete what the group has committed, and what open transactions would commit, in partitions given by topic.

    It is not an error if nothing was committed.  Returns the topics that the group is subscribed to: there nothing was
    deleted.

    Raises:
        InvalidGroupId: it cannot be the id of a group.
        GroupIdNotFound: the group does not exist.
    """
    check_group_id(group_id)
    group = _locked_group(connection, group_id)
    subscribed = frozenset(
        topic for topic in partition_ids if any(member.is_subscribed_to(topic) for member in group.members)
    )
    unused = sorted({number for topic in partition_ids.keys() - subscribed for number in partition_ids[topic]})
    for statement in (_FORGET_SOME, _FORGET_PENDING):
        for some in chunks(unused):
            connection.execute(statement, {"of_group_id": group_id, "partition_ids": some})
    return subscribed


def _locked_group(connection: Connection, group_id: str) -> ListedGroup:
    """Return the group, locked until the database transaction ends, and emptied if none of its members is alive."""
    lock_group(connection, group_id)
    group = find_group(connection, group_id)
    if group is None:
        raise GroupIdNotFound(f"there is no group {group_id[:80]!r}")
    if not group.members or not all(member.is_expired for member in group.members):
        return group
    remove_expired(connection, group_id)
    must_hit(connection, _RAISE_GENERATION, {"of_group_id": group_id})
    found = find_group(connection, group_id)
    assert found is not None, "its lock is held"
    return found

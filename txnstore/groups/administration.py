"""This file is what an administrator changes in groups: their offsets, and whether there are any; under their locks.

A group is empty if it has no member that is alive: those that were silent for longer than their session timeout are
removed first, and the generation goes up, so that nothing they send late takes effect.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from sqlalchemy import BindParameter, Connection, bindparam, delete, select, update

from txnstore.db.portions import chunks
from txnstore.db.row_counts import must_hit
from txnstore.db.schema import group_members, group_offsets, groups, pending_group_offsets
from txnstore.db.server_time import server_now_ms
from txnstore.errors import GroupIdNotFound, GroupNotEmpty
from txnstore.groups.commit_rules import check_group_id
from txnstore.groups.listing import ListedGroup, find_group
from txnstore.groups.offsets import commit_offsets
from txnstore.model import GroupMembership, OffsetAndMetadata

_LOCK: Final = select(groups.c.group_id).where(groups.c.group_id == bindparam("of_group_id")).with_for_update()
_OF_GROUP: Final[BindParameter[Any]] = bindparam("of_group_id")
# In one statement: whoever renews his deadline meanwhile stays.
_REMOVE_EXPIRED: Final = delete(group_members).where(
    group_members.c.group_id == _OF_GROUP, group_members.c.deadline_ms <= server_now_ms()
)
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
        InvalidGroupId: it is no name of a group.
        GroupIdNotFound: there is no such group.
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
        # Its commit would bring back a part of what is deleted here.
        raise GroupNotEmpty(
            f"an open transaction of producer {holder} holds offsets of group {group_id[:80]!r}; end it first, then"
            " delete the group"
        )
    connection.execute(_FORGET_OFFSETS, {"of_group_id": group_id})
    must_hit(connection, _FORGET_GROUP, {"of_group_id": group_id})


def alter_offsets(connection: Connection, group_id: str, offsets: Mapping[int, OffsetAndMetadata]) -> None:
    """Commit offsets by partition id for a group without members, which is made if it is not there.

    Raises:
        UnknownMember: the group has members; stop them first.
        InvalidGroupId, InvalidRequest, OffsetMetadataTooLarge: see `groups.offsets.commit_offsets`.
    """
    check_group_id(group_id)
    if connection.execute(_LOCK, {"of_group_id": group_id}).one_or_none() is not None:
        _locked_group(connection, group_id)
    commit_offsets(connection, GroupMembership(group_id), offsets)


def delete_offsets(
    connection: Connection, group_id: str, partition_ids: Mapping[str, Collection[int]]
) -> frozenset[str]:
    """Delete what the group has committed, and what open transactions would commit, in partitions given by topic.

    Nothing being committed is no error.  Returns the topics that the group is subscribed to: of those nothing was
    deleted.

    Raises:
        InvalidGroupId: it is no name of a group.
        GroupIdNotFound: there is no such group.
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
    """Lock the group until the database transaction ends, without members if none of them is alive."""
    of_group = {"of_group_id": group_id}
    connection.execute(_LOCK, of_group)
    group = find_group(connection, group_id)
    if group is None:
        raise GroupIdNotFound(f"there is no group {group_id[:80]!r}")
    if not group.members or not all(member.is_expired for member in group.members):
        return group
    connection.execute(_REMOVE_EXPIRED, of_group)
    must_hit(connection, _RAISE_GENERATION, of_group)
    found = find_group(connection, group_id)
    assert found is not None, "its lock is held"
    return found

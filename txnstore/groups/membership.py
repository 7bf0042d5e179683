"""This file is who belongs to a group: joining, heartbeats and leaving, under the lock of the group's row.

A group has one member for now.  Whoever joins replaces the member that is there, so that a crashed worker blocks
nobody; the replaced one is fenced by the generation, and its heartbeats and commits say so.  Groups of several members
need an assignment that is agreed on, and take their place here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, bindparam, delete, insert, select, update
from sqlalchemy.dialects.postgresql import insert as upsert

from txnstore.db.schema import group_members, groups
from txnstore.db.server_time import server_now_ms
from txnstore.groups.commit_rules import GroupView, Member, check_commit, check_group_id
from txnstore.model import GroupMembership

# The row lock is the group's coordinator, as for commits: of two that join at once, the second finds the first.
_RAISE_GENERATION: Final = (
    update(groups)
    .where(groups.c.group_id == bindparam("of_group_id"))
    .values(generation=groups.c.generation + 1, assignor=bindparam("new_assignor"), last_update_ms=server_now_ms())
    .returning(groups.c.generation)
)
_INSERT_GROUP: Final = (
    upsert(groups)
    .values(generation=0, commit_number=0, last_update_ms=server_now_ms())
    .on_conflict_do_nothing(index_elements=[groups.c.group_id])
)
_LOCK: Final = select(groups.c.generation).where(groups.c.group_id == bindparam("of_group_id")).with_for_update()
_MEMBERS: Final = (
    select(
        group_members.c.member_id,
        group_members.c.group_instance_id,
        group_members.c.client_id,
        group_members.c.generation,
        (group_members.c.deadline_ms <= server_now_ms()).label("is_expired"),
        group_members.c.assignment,
    )
    .where(group_members.c.group_id == bindparam("of_group_id"))
    .order_by(group_members.c.member_id)
)
_REMOVE_ALL: Final = delete(group_members).where(group_members.c.group_id == bindparam("of_group_id"))
_REMOVE: Final = _REMOVE_ALL.where(group_members.c.member_id == bindparam("of_member_id"))
_REMOVE_EXPIRED: Final = _REMOVE_ALL.where(group_members.c.deadline_ms <= server_now_ms())
_ADD: Final = insert(group_members).values(deadline_ms=server_now_ms() + bindparam("lease_ms"))
# Without the group's lock: only the member itself moves its deadline, and no one else waits for it.
_RENEW: Final = (
    update(group_members)
    .where(
        group_members.c.group_id == bindparam("of_group_id"),
        group_members.c.member_id == bindparam("of_member_id"),
        group_members.c.generation == bindparam("of_generation"),
    )
    .values(deadline_ms=server_now_ms() + group_members.c.session_timeout_ms)
)
_GENERATION: Final = select(groups.c.generation).where(groups.c.group_id == bindparam("of_group_id"))


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """What a consumer says of itself when it joins."""

    group_id: str
    member_id: str
    """The consumer's own choice, for as long as it lives."""

    group_instance_id: str | None
    """The lasting name of a static member (KIP-345)."""

    client_id: str
    session_timeout_ms: int
    assignor: str
    subscription: Sequence[str]
    """Topics and patterns, as the application gave them."""

    assignment: Mapping[str, Sequence[int]]
    """The partitions by topic: all of them, as the group has no other member."""


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member as its row shows it."""

    member_id: str
    group_instance_id: str | None
    client_id: str
    generation: int
    is_expired: bool
    """Whether it has been silent for longer than its session timeout."""

    assignment: Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Joined:
    """What joining has brought."""

    membership: GroupMembership
    replaced: tuple[str, ...]
    """The member ids of those that were members until now."""


def join(connection: Connection, request: JoinRequest) -> Joined:
    """Make the consumer the group's one member, in a new generation; a former member is fenced from here on.

    Joining again is the way to a new assignment; it raises the generation each time.

    Raises:
        InvalidGroupId: the group's id is none.
    """
    check_group_id(request.group_id)
    of = {"of_group_id": request.group_id}
    generation = _raise_generation(connection, request)
    former = tuple(
        member.member_id for member in connection.execute(_MEMBERS, of) if member.member_id != request.member_id
    )
    connection.execute(_REMOVE_ALL, of)
    connection.execute(_ADD, _row(request, generation))
    membership = GroupMembership(request.group_id, generation, request.member_id, request.group_instance_id)
    return Joined(membership, former)


def heartbeat(connection: Connection, membership: GroupMembership) -> None:
    """Move the member's deadline on.

    Raises:
        UnknownMember, FencedInstance, IllegalGeneration: the consumer is not the group's member any more.
    """
    renewed = connection.execute(_RENEW, {**_of(membership), "of_generation": membership.generation})
    if renewed.rowcount == 0:
        # The rules of commits say how it lost its place.
        check_commit(_view(connection, membership.group_id), membership, is_transactional=False)


def leave(connection: Connection, membership: GroupMembership) -> bool:
    """Remove the member; False if it was none any more.

    The generation goes up, so that nothing which the member sent earlier can take effect later.
    """
    of = {"of_group_id": membership.group_id}
    connection.execute(_LOCK, of)
    if connection.execute(_REMOVE, _of(membership)).rowcount == 0:
        return False
    connection.execute(_RAISE_GENERATION, {**of, "new_assignor": None})
    return True


def remove_expired_members(connection: Connection, group_id: str) -> int:
    """Remove members that were silent for longer than their session timeout; return how many.

    A group without members takes the commits of consumers that manage their partitions themselves.
    """
    of = {"of_group_id": group_id}
    connection.execute(_LOCK, of)
    removed = connection.execute(_REMOVE_EXPIRED, of).rowcount
    if removed:
        connection.execute(_RAISE_GENERATION, {**of, "new_assignor": None})
    return removed


def read_members(connection: Connection, group_id: str) -> list[GroupMember]:
    """Return the group's members."""
    return [
        GroupMember(
            row.member_id,
            row.group_instance_id,
            row.client_id,
            row.generation,
            bool(row.is_expired),
            json.loads(row.assignment),
        )
        for row in connection.execute(_MEMBERS, {"of_group_id": group_id})
    ]


def _raise_generation(connection: Connection, request: JoinRequest) -> int:
    raise_ = {"of_group_id": request.group_id, "new_assignor": request.assignor}
    generation = connection.execute(_RAISE_GENERATION, raise_).scalar_one_or_none()
    if generation is None:
        connection.execute(_INSERT_GROUP, {"group_id": request.group_id})
        generation = connection.execute(_RAISE_GENERATION, raise_).scalar_one()
    return int(generation)


def _view(connection: Connection, group_id: str) -> GroupView | None:
    generation = connection.execute(_GENERATION, {"of_group_id": group_id}).scalar_one_or_none()
    if generation is None:
        return None
    members = [Member(member.member_id, member.group_instance_id) for member in read_members(connection, group_id)]
    return GroupView(generation, members)


def _of(membership: GroupMembership) -> dict[str, Any]:
    return {"of_group_id": membership.group_id, "of_member_id": membership.member_id}


def _row(request: JoinRequest, generation: int) -> dict[str, Any]:
    return {
        "group_id": request.group_id,
        "member_id": request.member_id,
        "group_instance_id": request.group_instance_id,
        "client_id": request.client_id,
        "generation": generation,
        "session_timeout_ms": request.session_timeout_ms,
        "lease_ms": request.session_timeout_ms,
        "subscription": json.dumps(list(request.subscription)),
        "assignment": json.dumps({topic: list(numbers) for topic, numbers in request.assignment.items()}),
    }

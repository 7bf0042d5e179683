"""The rules of groups: no partition has two owners, and all that names a group is of one that is there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from sqlalchemy import Connection, Row, bindparam, exists, select

from txnstore.db.schema import group_members, group_offsets, groups, pending_group_offsets
from txnstore.db.statements import HotStatement
from txnstore.groups.group import MemberState
from txnstore.groups.rows import read_member
from txnstore.verification.invariants import Invariant, Place, Violation
from txnstore.verification.reading import VIOLATIONS_MAX, Holding, Pages, Snapshot

_HOLDING: Final = Holding(group_members, group_offsets, pending_group_offsets)
_MEMBERS: Final = Pages(select(group_members), group_members.c.group_id, group_members.c.member_id)
_GENERATION: Final = HotStatement(select(groups.c.generation).where(groups.c.group_id == bindparam("of_group_id")))
_WITHOUT_GROUP: Final = {
    table: HotStatement(
        select(table.c.group_id)
        .distinct()
        .where(~exists().where(groups.c.group_id == table.c.group_id))
        .limit(VIOLATIONS_MAX)
    )
    for table in (group_members, group_offsets, pending_group_offsets)
}
_NUMBERED_AHEAD: Final = {
    table: HotStatement(
        select(
            table.c.group_id, table.c.partition_id, table.c.commit_number, groups.c.commit_number.label("last_number")
        )
        .join(groups, groups.c.group_id == table.c.group_id)
        .where(table.c.commit_number > groups.c.commit_number)
        .limit(VIOLATIONS_MAX)
    )
    for table in (group_offsets, pending_group_offsets)
}


def group_violations(snapshot: Snapshot) -> Iterator[Violation]:
    """Return what is wrong with the groups; a page of members and one group's are in memory at once."""
    for connection in snapshot.connections:
        holding = _HOLDING.tables(connection)
        for table in holding:
            for group_id in _WITHOUT_GROUP[table].values(connection):
                yield _violation(group_id, "it has members or offsets, and there is no such group")
        for table, numbered_ahead in _NUMBERED_AHEAD.items():
            for row in numbered_ahead.rows(connection) if table in holding else ():
                seen = f"its offset of partition {row.partition_id} is commit {row.commit_number}, of {row.last_number}"
                yield _violation(row.group_id, seen)
        members = _MEMBERS.rows(connection) if group_members in holding else iter(())
        for group_id, rows in groupby(members, attrgetter("group_id")):
            yield from _member_violations(connection, group_id, list(rows))


def _violation(group_id: str, seen: str) -> Violation:
    return Violation(Invariant.GROUPS_SOUND, Place(group_id=group_id), seen)


def _member_violations(connection: Connection, group_id: str, rows: list[Row[Any]]) -> Iterator[Violation]:
    members: list[MemberState] = []
    for row in rows:
        try:
            members.append(read_member(row))
        except (KeyError, TypeError, ValueError, AttributeError):
            yield _violation(group_id, f"the row of the member {row.member_id!r} cannot be read")
    generation = _GENERATION.value(connection, {"of_group_id": group_id})
    for member in members:
        if generation is not None and member.generation > generation:
            seen = f"the member {member.member_id!r} is of generation {member.generation}, the group of "
            yield _violation(group_id, f"{seen}{generation}")
    yield from _twice(group_id, "is assigned to", ((member.member_id, member.assignment) for member in members))
    yield from _twice(group_id, "is owned by", ((member.member_id, member.owned) for member in members))


def _twice(group_id: str, what: str, parts: Iterable[tuple[str, Iterable[Any]]]) -> Iterator[Violation]:
    holders: dict[Any, str] = {}
    for member_id, partitions in parts:
        for partition in partitions:
            other = holders.setdefault(partition, member_id)
            if other != member_id:
                yield _violation(group_id, f"{partition} {what} the members {other!r} and {member_id!r}")

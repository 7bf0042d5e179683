"""This file is what groups lose with time: members that are silent, then offsets that nobody uses (KIP-211), then all.

A group without members keeps its offsets for offsets.retention.minutes, counted from when it last changed: its last
member went or was removed, or offsets were committed for it.  In a group that never had members, a simple one, each
offset has a time of its own.  While an open transaction holds offsets of the group nothing of it expires: its commit
is to find what it has read up to.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from sqlalchemy import BindParameter, ColumnElement, Connection, and_, bindparam, delete, exists, or_, select

from txnstore.db.schema import group_members, group_offsets, groups, pending_group_offsets
from txnstore.db.server_time import server_now_ms
from txnstore.db.settings import read_store_settings
from txnstore.db.store import Store
from txnstore.groups import coordinator, group_rows

#: How many offsets one database transaction deletes at most: commits of the group wait for it.
OFFSETS_AT_ONCE: Final = 1_000

_MS_PER_MINUTE: Final = 60_000
_SILENT: Final = (
    select(group_members.c.group_id)
    .where(group_members.c.deadline_ms <= server_now_ms())
    .distinct()
    .order_by(group_members.c.group_id)
    .limit(bindparam("groups_max"))
)
_EXPIRY_MS: Final = server_now_ms() - bindparam("retention_ms")


def _is_unused(group_id: ColumnElement[str]) -> ColumnElement[bool]:
    """Return the condition that the group has no members, and that no open transaction holds offsets of it."""
    return and_(
        ~exists().where(group_members.c.group_id == group_id),
        ~exists().where(pending_group_offsets.c.group_id == group_id),
    )


def _has_offsets(group_id: ColumnElement[str]) -> ColumnElement[bool]:
    return exists().where(group_offsets.c.group_id == group_id)


# Never older than the group's last change; what an offset's own time says is left to simple groups.
_HAS_EXPIRED: Final = and_(
    group_offsets.c.group_id == groups.c.group_id,
    group_offsets.c.commit_ms <= _EXPIRY_MS,
    or_(groups.c.generation == 0, groups.c.last_update_ms <= _EXPIRY_MS),
)
_FOUND: Final = (
    select(groups.c.group_id)
    .where(_is_unused(groups.c.group_id), or_(~_has_offsets(groups.c.group_id), exists().where(_HAS_EXPIRED)))
    .order_by(groups.c.last_update_ms)
    .limit(bindparam("groups_max"))
)
_OF_GROUP: Final[BindParameter[str]] = bindparam("of_group_id")
# Under the group's lock all of it is asked again: whoever joined, committed or sent offsets meanwhile keeps them.
_FORGET_OFFSETS: Final = delete(group_offsets).where(
    group_offsets.c.group_id == _OF_GROUP,
    group_offsets.c.partition_id.in_(
        select(group_offsets.c.partition_id)
        .select_from(groups)
        .join(group_offsets, _HAS_EXPIRED)
        .where(groups.c.group_id == _OF_GROUP, _is_unused(groups.c.group_id))
        .limit(OFFSETS_AT_ONCE)
    ),
)
_FORGET_GROUP: Final = delete(groups).where(
    groups.c.group_id == _OF_GROUP, _is_unused(_OF_GROUP), ~_has_offsets(_OF_GROUP)
)


def expire_silent_members(store: Store, *, groups_max: int) -> int:
    """Remove the members that are silent for longer than their session timeout, of so many groups; return how many.

    Members that are alive do that for their own group; here it is done for groups in which everybody is silent.
    """
    found = store.read(lambda connection: list(connection.execute(_SILENT, {"groups_max": groups_max}).scalars()))
    return sum(
        len(store.write(partial(coordinator.expire_members, group_id=group_id), wakes_readers=True))
        for group_id in found
    )


def expire_offsets(store: Store, *, groups_max: int) -> int:
    """Delete offsets whose retention has passed, and groups that have none left; return of how many groups.

    By the clock of the database server.  At most `groups_max` groups are looked at, each in database transactions of
    its own that hold its lock; what is found in use then is left as it is.
    """

    def find(connection: Connection) -> tuple[int, list[str]]:
        retention_ms = read_store_settings(connection)["offsets.retention.minutes"] * _MS_PER_MINUTE
        found = connection.execute(_FOUND, {"retention_ms": retention_ms, "groups_max": groups_max})
        return retention_ms, list(found.scalars())

    retention_ms, found = store.read(find)
    return sum(_expire_group(store, group_id, retention_ms) for group_id in found)


def _expire_group(store: Store, group_id: str, retention_ms: int) -> bool:
    """Delete what has expired of the group; whether that was anything."""

    def work(connection: Connection) -> tuple[int, bool]:
        if not group_rows.lock_group(connection, group_id):
            return 0, False
        of_group = {"of_group_id": group_id}
        forgotten = connection.execute(_FORGET_OFFSETS, {**of_group, "retention_ms": retention_ms}).rowcount
        return forgotten, connection.execute(_FORGET_GROUP, of_group).rowcount > 0

    changed = False
    while True:
        forgotten, is_gone = store.write(work)
        changed = changed or forgotten > 0 or is_gone
        if forgotten < OFFSETS_AT_ONCE or is_gone:
            return changed

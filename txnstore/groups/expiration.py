"""The expiration of groups: of members that are silent, then of unused offsets (KIP-211), then of the group itself.

A group without members keeps its offsets for offsets.retention.minutes, counted from when it last changed: its last
member went or was removed, or offsets were committed for it.  In a group that never had members, a simple one, each
offset has a time of its own.  While an open transaction holds offsets of the group nothing of it expires: its commit
is to find what it has read up to.  Nor does the offset of a partition in which a streaming query stands as the group,
for as long as the sink remembers the query: it commits for a partition only what it has read there, and reads again
what no offset tells it once its checkpoint is lost.

Nor do the offsets of our own groups, which say how much of an archive a topic has: the same load would write all of it
again.  They go with their topic.

Where a topic keeps what its groups have not read (`txnstore.retention.unread.ms`), an offset is what keeps it: there it
stays at least as long as that says, and for ever if it says any age.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    literal,
    or_,
    select,
    true,
)

from txnstore.db.cluster.catalogue import read_store_settings
from txnstore.db.ddl import Int64
from txnstore.db.portions import Portions
from txnstore.db.schema import (
    TEN_SECONDS_MS,
    group_members,
    group_offsets,
    groups,
    partitions,
    pending_group_offsets,
    sink_positions,
    topic_configs,
)
from txnstore.db.store import Store, server_now_ms
from txnstore.groups import coordinator
from txnstore.groups.rows import lock_group
from txnstore.model import INTERNAL_GROUP_PREFIX

_MS_PER_MINUTE: Final = 60_000
#: Texts of more digits may be no numbers of the databases'; that many milliseconds are thirty million years.
_DIGITS_MAX: Final = 18
_MEMBERS_LOOKED_AT: Final = 10_000
#: How many groups one statement looks at, whether or not anything of them has expired.
_GROUPS_LOOKED_AT: Final = 100
_NOW: Final = select(server_now_ms())
_LONGEST_SILENT: Final = (
    select(group_members.c.group_id, group_members.c.member_id)
    .where(
        group_members.c.deadline_ten_seconds <= bindparam("now_ten_seconds"),
        group_members.c.deadline_ms <= bindparam("now_ms"),
    )
    .order_by(group_members.c.deadline_ten_seconds)
    .limit(_MEMBERS_LOOKED_AT)
    .subquery()
)
_SILENT: Final = select(_LONGEST_SILENT).order_by(*_LONGEST_SILENT.c)
_EXPIRY_MS: Final = server_now_ms() - bindparam("retention_ms")


def _is_unused(group_id: ColumnElement[str]) -> ColumnElement[bool]:
    """Return the condition that the group has no members, and that no open transaction holds offsets of it."""
    return and_(
        ~exists().where(group_members.c.group_id == group_id),
        ~exists().where(pending_group_offsets.c.group_id == group_id),
    )


def _has_offsets(group_id: ColumnElement[str]) -> ColumnElement[bool]:
    return exists().where(group_offsets.c.group_id == group_id)


# A lookup for each, as in `_has`.
_IS_OF_NO_QUERY: Final = (
    select(sink_positions.c.sink_id)
    .where(
        sink_positions.c.group_id == group_offsets.c.group_id,
        sink_positions.c.partition_id == group_offsets.c.partition_id,
    )
    .correlate(group_offsets)
    .limit(1)
    .scalar_subquery()
    .is_(None)
)
_IS_NOT_OURS: Final = func.substr(group_offsets.c.group_id, 1, len(INTERNAL_GROUP_PREFIX)) != INTERNAL_GROUP_PREFIX
_PAGE: Final = (
    select(groups.c.group_id, groups.c.generation, groups.c.last_update_ms)
    .where(groups.c.group_id > bindparam("after_group_id"))
    .order_by(groups.c.group_id)
    .limit(_GROUPS_LOOKED_AT)
    .subquery("page")
)
_UNREAD_TEXT: Final = topic_configs.c.value


def _keeps_nothing(generation: ColumnElement[int], last_update_ms: ColumnElement[int]) -> ColumnElement[bool]:
    """Return the condition that no topic keeps what is not read for the offset, or does so no longer.

    A lookup, as the one above.  A text that is no number, such as that for any age, keeps it: whatever it is to say.
    """
    is_number = and_(func.trim(_UNREAD_TEXT, "0123456789") == "", func.length(_UNREAD_TEXT).between(1, _DIGITS_MAX))
    unread_ms = _UNREAD_TEXT.cast(Int64)
    is_young = or_(
        server_now_ms() - group_offsets.c.commit_ms <= unread_ms,
        and_(generation != 0, server_now_ms() - last_update_ms <= unread_ms),
    )
    return (
        select(literal(1))
        .select_from(partitions)
        .join(topic_configs, topic_configs.c.topic_id == partitions.c.topic_id)
        .where(
            partitions.c.partition_id == group_offsets.c.partition_id,
            topic_configs.c.name == "txnstore.retention.unread.ms",
            case((is_number, is_young), else_=true()),
        )
        .correlate(group_offsets, groups, _PAGE)
        .limit(1)
        .scalar_subquery()
        .is_(None)
    )


# Retention counts from the group's last change; only in simple groups from each offset's own time.
_HAS_EXPIRED: Final = and_(
    group_offsets.c.group_id == groups.c.group_id,
    group_offsets.c.commit_ms <= _EXPIRY_MS,
    _IS_NOT_OURS,
    _IS_OF_NO_QUERY,
    or_(groups.c.generation == 0, groups.c.last_update_ms <= _EXPIRY_MS),
    _keeps_nothing(groups.c.generation, groups.c.last_update_ms),
)
_BEFORE_MS: Final[BindParameter[int]] = bindparam("before_ms")


def _has(column: ColumnElement[Any], *conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return whether a group of the page has such a row: a lookup for each; EXISTS may read the whole table."""
    of_group = column.table.c.group_id == _PAGE.c.group_id
    return select(column).where(of_group, *conditions).correlate(_PAGE).limit(1).scalar_subquery().is_not(None)


_FOUND: Final = select(
    _PAGE.c.group_id,
    _PAGE.c.last_update_ms,
    and_(
        ~_has(group_members.c.member_id),
        ~_has(pending_group_offsets.c.partition_id),
        or_(
            ~_has(group_offsets.c.partition_id),
            and_(
                or_(_PAGE.c.generation == 0, _PAGE.c.last_update_ms <= _BEFORE_MS),
                _has(
                    group_offsets.c.partition_id,
                    group_offsets.c.commit_ms <= _BEFORE_MS,
                    _IS_NOT_OURS,
                    _IS_OF_NO_QUERY,
                    _keeps_nothing(_PAGE.c.generation, _PAGE.c.last_update_ms),
                ),
            ),
        ),
    ).label("is_due"),
).order_by(_PAGE.c.group_id)
_OF_GROUP: Final[BindParameter[str]] = bindparam("of_group_id")
_EXPIRED: Final = (
    select(group_offsets.c.partition_id)
    .select_from(groups)
    .join(group_offsets, _HAS_EXPIRED)
    .where(groups.c.group_id == _OF_GROUP, _is_unused(groups.c.group_id))
)
# Whatever else the group has is passed here, where nobody waits.
_FIND_OFFSETS: Final = (
    _EXPIRED.where(group_offsets.c.partition_id > bindparam("after_partition_id"))
    .order_by(group_offsets.c.partition_id)
    .limit(bindparam("rows_max"))
)
_IS_FOUND: Final = group_offsets.c.partition_id.in_(bindparam("partition_ids", expanding=True))
# Under the group's lock all of it is checked again: a group that was joined or committed for meanwhile keeps them.
_FORGET_OFFSETS: Final = delete(group_offsets).where(
    group_offsets.c.group_id == _OF_GROUP,
    _IS_FOUND,
    group_offsets.c.partition_id.in_(_EXPIRED.where(_IS_FOUND)),
)
_FORGET_GROUP: Final = delete(groups).where(
    groups.c.group_id == _OF_GROUP, _is_unused(_OF_GROUP), ~_has_offsets(_OF_GROUP)
)


def expire_silent_members(store: Store, portions: Portions | None = None, *, groups_max: int) -> int:
    """Remove members that are silent for longer than their session timeout, of so many groups; return how many.

    Members that are alive do this for their own group; this is for groups in which all members are silent.
    """
    portions = portions or Portions()

    def find(connection: Connection) -> dict[str, list[str]]:
        now_ms: int = connection.execute(_NOW).scalar_one()
        of = {"now_ms": now_ms, "now_ten_seconds": now_ms // TEN_SECONDS_MS}
        found: dict[str, list[str]] = {}
        for group_id, member_id in connection.execute(_SILENT, of):
            found.setdefault(group_id, []).append(member_id)
        return found

    removed = 0
    for group_id, left in islice(store.read(find).items(), groups_max):
        while left:
            some, left = left[: portions.rows], left[portions.rows :]  # noqa: PLW2901 - what is left of it
            remove = partial(coordinator.remove_silent_members, group_id=group_id, member_ids=some)
            removed += portions.write(store, remove, wakes_readers=True)
            if portions.is_over:
                return removed
    return removed


def expire_offsets(
    store: Store, portions: Portions | None = None, *, groups_max: int, after_group_id: str = ""
) -> tuple[int, str | None]:
    """Delete offsets whose retention has passed, and groups that have no offsets left, after a group by name.

    Returns of how many groups something was deleted, and after which group to go on; None: no group is left.  By the
    clock of the database server.  At most `groups_max` groups, each in database transactions of its own that hold its
    lock; among neighbours by name those first that have been unused for longest.  Groups that turn out to be in use
    are left as they are.
    """
    portions = portions or Portions()

    before_ms = store.read(lambda connection: connection.execute(_NOW).scalar_one() - _retention_ms(connection))
    changed = 0
    while changed < groups_max:
        of = {"after_group_id": after_group_id, "before_ms": before_ms}
        page = store.read(lambda connection, of=of: connection.execute(_FOUND, of).all())  # type: ignore[misc]
        for row in sorted((row for row in page if row.is_due), key=lambda row: row.last_update_ms):
            if changed == groups_max:
                return changed, after_group_id
            changed += _expire_group(store, row.group_id, portions)
            if portions.is_over:
                return changed, after_group_id
        if len(page) < _GROUPS_LOOKED_AT:
            return changed, None
        after_group_id = page[-1].group_id
        if portions.is_over:
            break
    return changed, after_group_id


def _retention_ms(connection: Connection) -> int:
    minutes: int = read_store_settings(connection)["offsets.retention.minutes"]
    return minutes * _MS_PER_MINUTE


def _expire_group(store: Store, group_id: str, portions: Portions) -> bool:
    """Delete what has expired of the group, as long as there is time; return whether anything had."""
    changed, after_partition_id = False, -1
    while True:
        rows_max = portions.rows
        page = {"of_group_id": group_id, "after_partition_id": after_partition_id, "rows_max": rows_max}
        found = store.read(partial(_find_offsets, page))
        forgotten, is_gone = portions.write_unless_busy(
            store, partial(_forget_offsets, group_id, found), (False, False)
        )
        changed = changed or forgotten or is_gone
        if len(found) < rows_max or is_gone or portions.is_over:
            return changed
        after_partition_id = found[-1]


def _find_offsets(page: Mapping[str, Any], connection: Connection) -> Sequence[int]:
    of = {**page, "retention_ms": _retention_ms(connection)}
    return connection.execute(_FIND_OFFSETS, of).scalars().all()


def _forget_offsets(group_id: str, partition_ids: Sequence[int], connection: Connection) -> tuple[bool, bool]:
    """Delete those of the offsets that have expired, and a group without any; return whether there were such."""
    if not lock_group(connection, group_id):
        return False, False
    of = {"of_group_id": group_id, "partition_ids": partition_ids}
    # As it is by now: somebody may have put it up so that they stay.
    expired = {**of, "retention_ms": _retention_ms(connection)}
    forgotten = connection.execute(_FORGET_OFFSETS, expired).rowcount if partition_ids else 0
    return forgotten > 0, connection.execute(_FORGET_GROUP, {"of_group_id": group_id}).rowcount > 0

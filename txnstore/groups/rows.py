"""The rows of a group: its lock, the rows read into a `Group`, and what has changed written back."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    FromClause,
    bindparam,
    delete,
    exists,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.sqlite import insert as upsert

from txnstore.db.cluster.membership import check_lives_here
from txnstore.db.schema import group_members, groups, partitions, topics
from txnstore.db.statements import HotStatement
from txnstore.db.store import RowsMissedError, must_hit, must_hit_each, note_change, server_now_ms
from txnstore.groups.group import Group, MemberDetails, MemberState, Partitions
from txnstore.model import NO_GENERATION, PartitionName

#: A clock that is put right by less than this disturbs nobody.
_SET_BACK_MS: Final = 1_000


def is_from_before_set_back(members: FromClause) -> ColumnElement[bool]:
    """Return whether the clock was set back since a member was heard of: its deadline comes as much too late."""
    return members.c.deadline_ms > server_now_ms() + members.c.session_timeout_ms + _SET_BACK_MS


_OF_GROUP: Final = group_members.c.group_id == bindparam("of_group_id")
_OF_MEMBER: Final = group_members.c.member_id == bindparam("of_member_id")
# The row lock is the group's coordinator: of two requests, the second finds what the first has made of the group.
_LOCK: Final = HotStatement(
    select(groups.c.generation, groups.c.assignor)
    .where(groups.c.group_id == bindparam("of_group_id"))
    .with_for_update()
)
_READ: Final = HotStatement(
    select(groups.c.generation, groups.c.assignor).where(groups.c.group_id == bindparam("of_group_id"))
)
_INSERT_GROUP: Final = HotStatement(
    upsert(groups)
    .values(generation=0, commit_number=0, last_update_ms=server_now_ms())
    .on_conflict_do_nothing(index_elements=[groups.c.group_id])
)
_SAVE_GROUP: Final = HotStatement(
    update(groups)
    .where(groups.c.group_id == bindparam("of_group_id"))
    .values(generation=bindparam("new_generation"), assignor=bindparam("new_assignor"), last_update_ms=server_now_ms())
)
_MEMBERS: Final = HotStatement(select(group_members).where(_OF_GROUP).order_by(group_members.c.member_id))
# In one statement: a member that renews its deadline meanwhile is either found renewed or finds its row gone.
_REMOVE_EXPIRED: Final = HotStatement(
    delete(group_members)
    .where(_OF_GROUP, group_members.c.deadline_ms <= server_now_ms(), group_members.c.member_id != bindparam("spared"))
    .returning(group_members.c.member_id)
)
_REMOVE_SILENT: Final = HotStatement(
    delete(group_members)
    .where(
        _OF_GROUP,
        group_members.c.member_id.in_(bindparam("member_ids", expanding=True)),
        group_members.c.deadline_ms <= server_now_ms(),
    )
    .returning(group_members.c.member_id)
)
_REMOVE: Final = HotStatement(delete(group_members).where(_OF_GROUP, _OF_MEMBER))
# The generation is a new one, so the others ask; without an assignor they find that they have to assign again.  Whether
# it is a member is asked under the lock: what is asked together with the lock is answered as of before the wait.
_UNASSIGN_GROUP: Final = (
    update(groups)
    .where(groups.c.group_id == bindparam("of_group_id"))
    .values(generation=groups.c.generation + 1, assignor=None, last_update_ms=server_now_ms())
)
_UNASSIGN: Final = HotStatement(
    _UNASSIGN_GROUP.where(
        exists().where(
            group_members.c.group_id == bindparam("of_group_id"), group_members.c.member_id == bindparam("of_member_id")
        ),
    )
)
_ADD: Final = HotStatement(insert(group_members).values(deadline_ms=server_now_ms() + bindparam("lease_ms")))
_NEW: Final[dict[str, BindParameter[Any]]] = {
    name: bindparam(f"new_{name}")
    for name in ("client_id", "generation", "session_timeout_ms", "subscription", "assignment")
}
_SAVE: Final = HotStatement(update(group_members).where(_OF_GROUP, _OF_MEMBER).values(_NEW))
# Who was heard of before the clock was set back may be alive: from now on it has all of its time again, and no more.
# The lock of the group keeps two of these apart, which would lock rows of the same members.
_RENEW: Final = HotStatement(
    update(group_members)
    .where(_OF_GROUP, or_(_OF_MEMBER, is_from_before_set_back(group_members)))
    .values(deadline_ms=server_now_ms() + group_members.c.session_timeout_ms)
    .returning(group_members.c.member_id)
)
_CATALOGUE: Final = HotStatement(
    select(topics.c.name, partitions.c.partition_id)
    .join(partitions, partitions.c.topic_id == topics.c.topic_id)
    .where(topics.c.name.in_(bindparam("names", expanding=True)))
    .order_by(topics.c.name, partitions.c.partition_number)
)


@dataclass(frozen=True, slots=True)
class KnownPartitions:
    """The existing partitions of some topics."""

    partition_ids: Mapping[str, tuple[int, ...]]
    """By topic, in the order of their numbers."""

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of partitions of each topic."""
        return {name: len(ids) for name, ids in self.partition_ids.items()}

    def ids(self, some: Partitions) -> list[int]:
        """Return the ids of those of the partitions that exist."""
        return sorted(
            ids[partition.partition]
            for partition in some
            if partition.partition < len(ids := self.partition_ids.get(partition.topic, ()))
        )


def ensure_group(connection: Connection, group_id: str) -> None:
    """Create the group's row if it does not exist.

    Raises:
        NotCoordinator: the group lives in another database.
    """
    check_lives_here(connection, group_id)
    _INSERT_GROUP.run(connection, {"group_id": group_id, "assignor": None})


def remove_expired(connection: Connection, group_id: str, spared_member_id: str = "") -> list[str]:
    """Remove the members that were silent for too long, except the one that is speaking; return their ids."""
    return _REMOVE_EXPIRED.values(connection, {"of_group_id": group_id, "spared": spared_member_id})


def remove_silent(connection: Connection, group_id: str, member_ids: Collection[str]) -> int:
    """Remove those of the members that are silent for too long, as `rebalance_rules.leave` does; return how many."""
    removed = _REMOVE_SILENT.values(connection, {"of_group_id": group_id, "member_ids": sorted(member_ids)})
    if removed:
        note_change(connection, group_ids=[group_id])
        connection.execute(_UNASSIGN_GROUP, {"of_group_id": group_id})
    return len(removed)


def removal(group_id: str, member_id: str) -> list[tuple[HotStatement, Mapping[str, Any]]]:
    """Return what removes a member as `rebalance_rules.leave` does, without reading the group."""
    parameters = {"of_group_id": group_id, "of_member_id": member_id}
    return [(_LOCK, {"of_group_id": group_id}), (_UNASSIGN, parameters), (_REMOVE, parameters)]


def lock_group(connection: Connection, group_id: str) -> bool:
    """Lock the group's row until the database transaction ends; False if the group does not exist."""
    return _LOCK.row(connection, {"of_group_id": group_id}) is not None


def read_group(connection: Connection, group_id: str) -> Group | None:
    """Return the group as its rows are now; None if it does not exist."""
    row = _READ.row(connection, {"of_group_id": group_id})
    if row is None:
        return None
    members = (read_member(row) for row in _MEMBERS.rows(connection, {"of_group_id": group_id}))
    return Group(group_id, row.generation, row.assignor, {member.member_id: member for member in members})


def read_known_partitions(
    connection: Connection, members: Iterable[MemberState], more: Collection[str] = ()
) -> KnownPartitions:
    """Return the partitions of all topics that the members want or have, and of `more`."""
    names = set(more)
    for member in members:
        names |= member.details.topics
        names |= {partition.topic for partition in member.owned}
    found: dict[str, list[int]] = {}
    if names:
        for name, partition_id in _CATALOGUE.rows(connection, {"names": sorted(names)}):
            found.setdefault(name, []).append(partition_id)
    return KnownPartitions({name: tuple(ids) for name, ids in found.items()})


def save_group(
    connection: Connection, before: Group | None, after: Group, known: KnownPartitions, *, speaker: str = ""
) -> None:
    """Write what has changed, and extend the deadline of the member that is speaking.

    Others that were heard of before the clock was set back have theirs shortened to what it is for one heard of now.
    """
    group_id = after.group_id
    note_change(connection, group_ids=[group_id])
    if before is None or (before.generation, before.assignor) != (after.generation, after.assignor):
        must_hit(
            connection,
            _SAVE_GROUP,
            {"of_group_id": group_id, "new_generation": after.generation, "new_assignor": after.assignor},
        )
    former = before.members if before else {}
    gone = [{"of_group_id": group_id, "of_member_id": name} for name in former if name not in after.members]
    if gone:
        must_hit_each(connection, _REMOVE, gone)
    changed = [member for name, member in after.members.items() if name in former and former[name] != member]
    if changed:
        must_hit_each(connection, _SAVE, [_changes(group_id, member, known) for member in changed])
    for name, member in after.members.items():
        if name not in former:
            _ADD.run(connection, _row(group_id, member, known))
    of = {"of_group_id": group_id, "of_member_id": speaker}
    if speaker in former and speaker not in _RENEW.values(connection, of):
        raise RowsMissedError(f"the member {speaker!r} is not there to be renewed; nothing is committed")


# --- JSON ------------------------------------------------------------------------------------------------------------


def read_member(row: Any) -> MemberState:
    """Return the member that a row of `group_members` holds."""
    stored = json.loads(row.subscription)
    details = MemberDetails(
        row.client_id,
        row.session_timeout_ms,
        tuple(stored["subscribed"]),
        frozenset(stored["topics"]),
        tuple(stored["assignors"]),
    )
    return MemberState(
        row.member_id,
        row.group_instance_id,
        details,
        row.generation,
        stored["step"],
        _partitions(json.loads(row.assignment)),
        _partitions(stored["owned"]),
        _partitions(stored.get("granted", {})),
        stored.get("granted_in", NO_GENERATION),
    )


def _partitions(by_topic: Mapping[str, list[int]]) -> Partitions:
    return frozenset(PartitionName(topic, number) for topic, numbers in by_topic.items() for number in numbers)


def _by_topic(some: Partitions) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for partition in sorted(some):
        found.setdefault(partition.topic, []).append(partition.partition)
    return found


def _stored(member: MemberState, known: KnownPartitions) -> dict[str, Any]:
    subscription: dict[str, Any] = {
        "subscribed": member.details.subscription,
        "topics": sorted(member.details.topics),
        "assignors": member.details.assignors,
        "owned": _by_topic(member.owned),
        # Commits come with ids: they are checked without reading the topics.
        "owned_ids": known.ids(member.owned - member.granted),
        "step": member.step,
    }
    if member.granted:
        # Apart: a commit of these is never usual, which spares a caller that knows only `owned_ids` the question.
        subscription["granted"] = _by_topic(member.granted)
        subscription["granted_ids"] = known.ids(member.granted)
        subscription["granted_in"] = member.granted_in
    return {
        "client_id": member.details.client_id,
        "generation": member.generation,
        "session_timeout_ms": member.details.session_timeout_ms,
        "subscription": json.dumps(subscription),
        "assignment": json.dumps(_by_topic(member.assignment)),
    }


def _changes(group_id: str, member: MemberState, known: KnownPartitions) -> dict[str, Any]:
    changes = {f"new_{name}": value for name, value in _stored(member, known).items()}
    return {"of_group_id": group_id, "of_member_id": member.member_id, **changes}


def _row(group_id: str, member: MemberState, known: KnownPartitions) -> dict[str, Any]:
    return {
        "group_id": group_id,
        "member_id": member.member_id,
        "group_instance_id": member.group_instance_id,
        "lease_ms": member.details.session_timeout_ms,
        **_stored(member, known),
    }

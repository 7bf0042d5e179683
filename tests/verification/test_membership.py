"""The rules of groups: members that share a partition, and rows of groups that are not there, are found."""

from __future__ import annotations

import json
import uuid

import pytest
from sqlalchemy import delete, insert, select, update

from tests.groups.group_servers import StoreServer
from tests.groups.protocol_member import ProtocolMember
from txnstore.db.schema import group_members, group_offsets, groups, pending_group_offsets
from txnstore.groups.offsets import commit_offsets
from txnstore.log.topics import find_topics
from txnstore.model import OffsetAndMetadata
from txnstore.testing.invariants import Invariant, violations_on

TIMEOUT_MS = 10_000


class Undone(Exception):
    """Rolls the damage back."""


class Group:
    """A group of two members that have two partitions each, and an offset."""

    def __init__(self, store, clock):
        self.store, self.id = store, f"group-{uuid.uuid4().hex[:8]}"
        self.unknown_id = f"nobody-{self.id}"
        server, topic = StoreServer(store, clock, self.id), f"topic-{uuid.uuid4().hex[:8]}"
        server.create_topic(topic, 4)
        self.members = [
            ProtocolMember(server, self.id, [topic], assignors=("range",), timeout_ms=TIMEOUT_MS) for _ in range(2)
        ]
        for _ in range(4):
            for member in self.members:
                member.poll()
        first = self.members[0]
        (found,) = store.read(lambda connection: find_topics(connection, [topic]))
        self.partition_id = found.partition_ids[min(each.partition for each in first.owned)]
        offsets = {self.partition_id: OffsetAndMetadata(0)}
        store.write(lambda connection: commit_offsets(connection, first.membership, offsets))

    def row(self, connection, number):
        this = (group_members.c.group_id == self.id) & (
            group_members.c.member_id == self.members[number].membership.member_id
        )
        return this, connection.execute(select(group_members).where(this)).one()

    def found(self, damage):
        """Return what is found of the damage, in a store that others may have left anything in."""
        found: list[set[tuple[Invariant, str | None, str]]] = []

        def look(connection):
            violations = violations_on(connection, partition_ids=())
            found.append({(each.invariant, each.place.group_id, each.seen) for each in violations})

        def work(connection):
            found.clear()
            look(connection)
            damage(connection, self)
            look(connection)
            raise Undone

        with pytest.raises(Undone):
            self.store.write(work)
        before, after = found
        return after - before


@pytest.fixture
def group(shared_store, shared_clock):
    return Group(shared_store, shared_clock)


def share_an_assignment(connection, group):
    _, first = group.row(connection, 0)
    second, _ = group.row(connection, 1)
    connection.execute(update(group_members).where(second).values(assignment=first.assignment))


def share_what_is_owned(connection, group):
    (_, first), (second, row) = group.row(connection, 0), group.row(connection, 1)
    changed = json.loads(row.subscription) | {"owned": json.loads(first.subscription)["owned"]}
    connection.execute(update(group_members).where(second).values(subscription=json.dumps(changed)))


def make_unreadable(connection, group):
    second, _ = group.row(connection, 1)
    connection.execute(update(group_members).where(second).values(subscription="{}"))


def come_from_a_generation_to_come(connection, group):
    second, row = group.row(connection, 1)
    connection.execute(update(group_members).where(second).values(generation=row.generation + 1))


def lose_the_group(connection, group):
    connection.execute(delete(groups).where(groups.c.group_id == group.id))


def lose_commits(connection, group):
    connection.execute(update(groups).where(groups.c.group_id == group.id).values(commit_number=0))


def keep_offsets_pending_for_nobody(connection, group):
    row = {"group_id": group.unknown_id, "partition_id": 1, "producer_id": 1, "producer_epoch": 0, "pending_offset": 1}
    connection.execute(insert(pending_group_offsets).values(**row, leader_epoch=-1, commit_ms=1, commit_number=1))


def keep_offsets_of_nobody(connection, group):
    this = (group_offsets.c.group_id == group.id, group_offsets.c.partition_id == group.partition_id)
    connection.execute(update(group_offsets).where(*this).values(group_id=group.unknown_id))


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("damage", "seen"),
    [
        (share_an_assignment, "is assigned to the members"),
        (share_what_is_owned, "is owned by the members"),
        (make_unreadable, "cannot be read"),
        (come_from_a_generation_to_come, "is of generation"),
        (lose_the_group, "it has members or offsets, and there is no such group"),
        (lose_commits, "is commit 1, of 0"),
        (keep_offsets_pending_for_nobody, "it has members or offsets, and there is no such group"),
        (keep_offsets_of_nobody, "it has members or offsets, and there is no such group"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_damage_to_a_group_is_reported(group, damage, seen):
    found = group.found(damage)
    ids = {group.unknown_id} if "nobody" in damage.__name__ else {group.id}
    assert {(kind, id_) for kind, id_, text in found if seen in text} == {
        (Invariant.GROUPS_SOUND, id_) for id_ in ids
    }, found


def test_a_group_is_found_sound(group):
    found = group.store.read(lambda connection: list(violations_on(connection, partition_ids=())))
    assert not [each for each in found if each.place.group_id == group.id]

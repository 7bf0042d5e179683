"""Groups that stand in the tables as the tests of an admin client want them, and the client."""

from __future__ import annotations

import json

import pytest
from sqlalchemy import delete, insert, select
from sqlalchemy.dialects.postgresql import insert as upsert

from tests.clients.admin.help import result
from tests.clients.consumer.log_writer import LogWriter
from txnstore import (
    ConsumerGroupTopicPartitions,
    TopicPartition,
)
from txnstore.admin import AdminClient
from txnstore.db.opening import open_store
from txnstore.db.schema import group_members, group_offsets, groups
from txnstore.db.store import server_now_ms
from txnstore.groups import coordinator
from txnstore.groups.group import MemberDetails, Report
from txnstore.groups.offsets import commit_offsets
from txnstore.model import NO_GENERATION, GroupMembership, OffsetAndMetadata

SESSION_TIMEOUT_MS = 10_000
T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


class Groups(LogWriter):
    """A topic `t` of two partitions, and groups that read it."""

    def __init__(self, store):
        super().__init__(store)
        self.topic("t", 2)

    def commit(self, group_id, offset=5, number=0, metadata=None, member=None):
        partition_id = self.partition_id("t", number)
        committed = {partition_id: OffsetAndMetadata(offset, -1, metadata)}
        committer = member or GroupMembership(group_id)
        self.store.write(lambda connection: commit_offsets(connection, committer, committed))

    def join_alone(self, group_id, *, subscription=("t",), assignment=None, instance=None):
        """Be the one member of a group, whatever the group would have given it."""
        given = {"t": [0, 1]} if assignment is None else assignment
        topics = [name for name in subscription if not name.startswith("^")]
        owned_ids = [self.partition_id(topic, number) for topic in given.keys() & {"t"} for number in given[topic]]
        stored = {"subscribed": subscription, "topics": topics, "assignors": ["range"], "owned": given, "step": 0}
        stored["owned_ids"] = owned_ids
        member = GroupMembership(group_id, 1, f"{group_id}-1", instance)
        group = upsert(groups).values(group_id=group_id, generation=1, assignor="range", commit_number=0)
        group = group.values(last_update_ms=server_now_ms()).on_conflict_do_update(
            index_elements=[groups.c.group_id], set_={"generation": 1, "assignor": "range"}
        )
        row = insert(group_members).values(
            group_id=group_id,
            member_id=member.member_id,
            group_instance_id=instance,
            client_id="worker",
            generation=1,
            session_timeout_ms=SESSION_TIMEOUT_MS,
            deadline_ms=server_now_ms() + SESSION_TIMEOUT_MS,
            subscription=json.dumps(stored),
            assignment=json.dumps(given),
        )
        self.store.write(lambda connection: [connection.execute(statement) for statement in (group, row)])
        return member

    def leave(self, member):
        row = group_members.c.member_id == member.member_id
        self.store.write(lambda connection: connection.execute(delete(group_members).where(row)))

    def join(self, group_id, member_id, *, topics=("t",), instance=None):
        """Join as one of several, with nothing owned."""
        report = Report(GroupMembership(group_id, NO_GENERATION, member_id, instance), 0)
        details = MemberDetails("worker", SESSION_TIMEOUT_MS, topics, frozenset(topics), ("range",))
        return self.store.write(lambda connection: coordinator.join(connection, report, details))

    def heartbeat(self, answer, owned=None):
        partitions = answer.partitions if owned is None else owned
        report = Report(answer.membership, answer.step + 1, frozenset(partitions))
        return self.store.write(lambda connection: coordinator.heartbeat(connection, report))

    def committed(self, group_id):
        statement = select(group_offsets.c.partition_id, group_offsets.c.committed_offset).where(
            group_offsets.c.group_id == group_id
        )
        rows = self.store.read(lambda connection: connection.execute(statement).all())
        numbers = {self.partition_id("t", number): number for number in (0, 1)}
        return {numbers[row[0]]: row[1] for row in rows}

    def ids(self):
        statement = select(groups.c.group_id).order_by(groups.c.group_id)
        return self.store.read(lambda connection: connection.execute(statement).scalars().all())


@pytest.fixture
def log(url, clock):
    with open_store(url, clock=clock) as store:
        yield Groups(store)


@pytest.fixture
def admin(url, clock):
    with AdminClient({"bootstrap.servers": url, "txnstore.clock": clock}) as admin:
        yield admin


def partitions(group_id, *partitions):
    return ConsumerGroupTopicPartitions(group_id, list(partitions) or None)


def at(number, offset, topic="t", metadata=None):
    return TopicPartition(topic, number, offset, metadata)


def listed(admin, **filters):
    found = result(admin.list_consumer_groups(**filters))
    assert found.errors == []
    return {group.group_id: group.state for group in found.valid}


def offsets_of(admin, group_id, *wanted, **keywords):
    """Return offset, or the code of the error, by partition."""
    found = result(admin.list_consumer_group_offsets([partitions(group_id, *wanted)], **keywords)[group_id])
    assert found.group_id == group_id
    return {
        (item.topic, item.partition): item.error.code() if item.error else item.offset
        for item in found.topic_partitions
    }

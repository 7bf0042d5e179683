"""The group's coordinator for tests: over the rows of a store, or the rules alone, with the rows in memory."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

from txnstore.db.store import Store
from txnstore.errors import IllegalGeneration
from txnstore.groups import coordinator, rebalance_rules, rows
from txnstore.groups.administration import find_group
from txnstore.groups.commit_rules import CommittingMember, GroupView, check_member_commit
from txnstore.groups.group import Group
from txnstore.groups.offsets import commit_offsets
from txnstore.log.topics import create_topic, find_topics, grow_topic
from txnstore.model import OffsetAndMetadata, PartitionName
from txnstore.testing.manual_clock import ManualClock


@dataclass
class RulesServer:
    """The rules alone: what the rows would be stands in `group` and `deadlines`."""

    clock: ManualClock = field(default_factory=ManualClock)
    group: Group | None = None
    counts: dict[str, int] = field(default_factory=dict)
    deadlines: dict[str, int] = field(default_factory=dict)

    def create_topic(self, name, count):
        self.counts[name] = count

    def grow_topic(self, name, count):
        self.counts[name] = count

    def join(self, report, details):
        group, expired = self._without_expired(report.membership.member_id)
        reply = rebalance_rules.join(group, report, details, self.counts, members_expired=bool(expired))
        return self._done(reply, report)

    def heartbeat(self, report):
        group, expired = self._without_expired(report.membership.member_id)
        reply = rebalance_rules.heartbeat(group, report, self.counts, members_expired=bool(expired))
        return self._done(reply, report)

    def renew(self, membership):
        group = self._group()
        member = group.members.get(membership.member_id)
        if member is None or not member.generation == group.generation == membership.generation:
            return False
        if self._expired(membership.member_id):
            return False
        self.deadlines[membership.member_id] = self.clock.now_ms() + member.details.session_timeout_ms
        return True

    def has_news(self, membership):
        group = self._group()
        return membership.member_id not in group.members or group.generation != membership.generation

    def leave(self, membership):
        if self.group is None or membership.member_id not in self.group.members:
            return False
        self.group = rebalance_rules.leave(self.group, membership.member_id)
        del self.deadlines[membership.member_id]
        return True

    def expire(self):
        group, expired = self._without_expired("")
        if group is not None and expired:
            self.group = rebalance_rules.remove(group, expired, self.counts)
            self._forget()
        return expired

    def read(self):
        return self.group

    def commit(self, membership, partition):
        """Return whether an offset of the partition would be accepted."""

        def row(member):
            stored = {
                "owned_ids": [hash(owned) for owned in member.owned - member.granted],
                "granted_ids": [hash(granted) for granted in member.granted],
                "granted_in": member.granted_in,
            }
            text = json.dumps(stored) if member.member_id == membership.member_id else None
            return CommittingMember(member.member_id, member.group_instance_id, member.generation, text)

        group = self._group()
        view = GroupView(group.generation, [row(member) for member in group.members.values()])
        try:
            check_member_commit(view, membership, [hash(partition)], is_transactional=True)
        except IllegalGeneration:
            return False
        return True

    def _group(self) -> Group:
        assert self.group is not None
        return self.group

    def _expired(self, spared):
        now_ms = self.clock.now_ms()
        return [name for name, deadline in self.deadlines.items() if deadline <= now_ms and name != spared]

    def _without_expired(self, spared):
        expired = self._expired(spared)
        if self.group is None:
            return None, []
        return replace(
            self.group, members={name: member for name, member in self.group.members.items() if name not in expired}
        ), expired

    def _done(self, reply, report):
        self.group = reply.group
        name = report.membership.member_id
        self.deadlines[name] = self.clock.now_ms() + self._group().members[name].details.session_timeout_ms
        self._forget()
        return reply.answer

    def _forget(self):
        self.deadlines = {name: self.deadlines[name] for name in self._group().members}


@dataclass
class StoreServer:
    """The coordinator over a store's rows."""

    store: Store
    clock: ManualClock
    group_id: str

    def create_topic(self, name, count):
        self.store.write(lambda connection: create_topic(connection, name, partition_count=count))

    def grow_topic(self, name, count):
        self.store.write(lambda connection: grow_topic(connection, name, partition_count=count))

    def join(self, report, details):
        return self.store.write(lambda connection: coordinator.join(connection, report, details))

    def heartbeat(self, report):
        return self.store.write(lambda connection: coordinator.heartbeat(connection, report))

    def renew(self, membership):
        return self.store.write(lambda connection: coordinator.renew(connection, membership))

    def has_news(self, membership):
        return self.store.read(lambda connection: coordinator.has_news(connection, membership))

    def leave(self, membership):
        return coordinator.leave(self.store, membership)

    def expire(self):
        return self.store.write(lambda connection: coordinator.expire_members(connection, self.group_id))

    def read(self):
        return self.store.read(lambda connection: rows.read_group(connection, self.group_id))

    def state(self):
        return rebalance_rules.state_of(self.read())

    def listed(self):
        return self.store.read(lambda connection: find_group(connection, self.group_id))

    def commit(self, membership, partition: PartitionName):
        """Commit an offset of the partition; return whether it was accepted."""

        def work(connection):
            (topic,) = find_topics(connection, [partition.topic])
            offsets = {topic.partition_id(partition.partition): OffsetAndMetadata(1)}
            commit_offsets(connection, membership, offsets)

        try:
            self.store.write(work)
        except IllegalGeneration:
            return False
        return True

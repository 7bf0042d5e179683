"""What expires while somebody begins to use it, or puts up how long it is kept: what he has seen from then on stays."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from sqlalchemy import delete

from tests.tools.interleaving import before_locks, before_transactions, explore
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.schema import group_members, group_offsets, groups, pending_group_offsets
from txnstore.db.store import Store
from txnstore.groups import coordinator
from txnstore.groups.expiration import expire_offsets
from txnstore.groups.group import MemberDetails, Report
from txnstore.groups.offsets import add_pending_offsets, commit_offsets, finish_pending_offsets, read_offsets
from txnstore.model import NO_GENERATION, GroupMembership, OffsetAndMetadata, ProducerIdentity
from txnstore.transactions.recovery import expire_transactional_ids
from txnstore.transactions.rows import read_row

pytestmark = pytest.mark.slow_on_postgresql

RETENTION_MS = 7 * 86_400_000
OLD, NEW = 5, 8
PRODUCER = ProducerIdentity(1_000, 0)


@dataclass
class ExpiredGroup:
    """A group whose offsets of two partitions have expired, and somebody who begins to use it."""

    store: Store
    topic: str
    partition_ids: list[int]
    seen: dict[int, int] | None = None
    """The offsets that he found once the group was in use."""

    @property
    def group_id(self):
        return f"group-{self.topic}"

    def commit(self, membership=None, offset=OLD, *, only_first=False):
        partition_ids = self.partition_ids[:1] if only_first else self.partition_ids
        offsets = dict.fromkeys(partition_ids, OffsetAndMetadata(offset))
        membership = membership or GroupMembership(self.group_id)
        self.store.write(lambda connection: commit_offsets(connection, membership, offsets))

    def committed(self, store=None):
        found = (store or self.store).read(
            lambda connection: read_offsets(connection, self.group_id, self.partition_ids)
        )
        return {partition_id: offset.offset for partition_id, offset in found.offsets.items()}

    def join(self):
        joining = GroupMembership(self.group_id, NO_GENERATION, "member")
        details = MemberDetails("client", 10_000, (self.topic,), frozenset({self.topic}), ("range",))
        return self.store.write(lambda connection: coordinator.join(connection, Report(joining, 1), details))

    def leave(self):
        assert coordinator.leave(self.store, GroupMembership(self.group_id, 1, "member"))

    # --- what a user does; the partition that he does not commit shows what was kept

    def as_member(self):
        membership = self.join().membership
        self.seen = self.committed()
        self.commit(membership, NEW, only_first=True)

    def as_simple_consumer(self):
        self.commit(offset=NEW, only_first=True)
        self.seen = {}

    def with_transaction(self):
        offsets, simple = {self.partition_ids[0]: OffsetAndMetadata(NEW)}, GroupMembership(self.group_id)
        self.store.write(lambda connection: add_pending_offsets(connection, simple, offsets, PRODUCER))
        self.seen = self.committed()
        again = self.committed()
        assert again == self.seen
        self.store.write(
            lambda connection: finish_pending_offsets(connection, [self.group_id], PRODUCER.producer_id, commit=True)
        )
        # From here on the other partition's offset may expire: the group is a simple one.
        self.seen = {}


def forget_all(connection):
    for table in (group_members, group_offsets, pending_group_offsets, groups):
        connection.execute(delete(table))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("by_lock", [False, True])
@pytest.mark.parametrize("had_offsets", [False, True])
@pytest.mark.parametrize(
    "use", [ExpiredGroup.as_member, ExpiredGroup.as_simple_consumer, ExpiredGroup.with_transaction]
)
def test_who_begins_to_use_a_group_while_it_expires_keeps_what_he_has_found_and_commits(
    world, use, had_offsets, by_lock
):
    outcomes = set()

    def make():
        setting = world.setting(partition_count=2)
        group = ExpiredGroup(world.first, setting.topic, sorted(setting.partitions.values()))
        if had_offsets:
            group.commit()
        else:
            group.join()
            group.leave()
        world.clock.advance(RETENTION_MS)

        def nothing_is_missed(finished):
            expired, _ = finished["maintenance"].result()
            finished["user"].result()
            committed = group.committed(world.observer)
            assert committed.pop(group.partition_ids[0]) == NEW
            if group.seen:
                assert committed == {group.partition_ids[1]: OLD}
            outcomes.add((expired, bool(group.seen), bool(committed)))
            # The next order must not find this group.
            world.observer.write(forget_all)

        return setting.scenario(
            {"user": lambda: use(group), "maintenance": lambda: expire_offsets(world.second, groups_max=10)},
            at_end=nothing_is_missed,
        )

    explored = explore(
        make,
        stops=before_locks if by_lock else before_transactions,
        preemptions_max=1 if by_lock else None,
        store=world.observer,
    )
    assert explored.deadlocks == 0
    assert explored.orders > 2
    # Whoever came first, both were seen.
    assert {expired for expired, *_ in outcomes} >= {1}
    if use is ExpiredGroup.as_member and had_offsets:
        assert (0, True, True) in outcomes
        assert (1, False, False) in outcomes


@pytest.mark.parametrize("what", ["offsets", "transactional id"])
def test_what_is_seen_once_it_is_to_be_kept_for_longer_stays(world, what):
    is_of_group, outcomes = what == "offsets", set()
    name = "offsets.retention.minutes" if is_of_group else "transactional.id.expiration.ms"
    longer = 2 * RETENTION_MS // 60_000 if is_of_group else 2 * RETENTION_MS

    def change(text):
        world.observer.write(lambda connection: change_store_settings(connection, {name: text}))

    def expire(store):
        return expire_offsets(store, groups_max=10)[0] if is_of_group else len(expire_transactional_ids(store))

    def make():
        setting = world.setting(partition_count=2)
        group = ExpiredGroup(world.first, setting.topic, sorted(setting.partitions.values()))
        if is_of_group:
            group.commit()
        else:
            setting.producer("producer", world.first).init()
        world.clock.advance(RETENTION_MS)

        def found(store):
            if is_of_group:
                return len(group.committed(store))
            return store.read(lambda connection: read_row(connection, setting.transactional_id)).row is not None

        def keep():
            world.first.write(lambda connection: change_store_settings(connection, {name: str(longer)}))
            return found(world.first)

        def what_was_seen_is_there(finished):
            seen, expired = finished["administrator"].result(), finished["maintenance"].result()
            assert found(world.observer) == seen
            outcomes.add((bool(seen), expired))
            # The next order must not find this one.
            change(None)
            expire(world.observer)

        return setting.scenario(
            {"administrator": keep, "maintenance": lambda: expire(world.second)}, at_end=what_was_seen_is_there
        )

    explored = explore(make, stops=before_transactions, preemptions_max=None, store=world.observer)
    assert explored.deadlocks == 0
    assert outcomes == {(True, 0), (False, 1)}

"""Groups that nobody uses lose their members, then their offsets, then themselves; whoever uses one loses nothing."""

from __future__ import annotations

import uuid

import pytest
from sqlalchemy import delete, event, insert, select, update

from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.portions import Portions
from txnstore.db.schema import groups, sink_positions, topic_configs
from txnstore.db.store import ROWS_AT_ONCE
from txnstore.groups import coordinator, expiration
from txnstore.groups.administration import alter_offsets, find_group
from txnstore.groups.expiration import expire_offsets, expire_silent_members
from txnstore.groups.group import MemberDetails, Report
from txnstore.groups.offsets import add_pending_offsets, commit_offsets, finish_pending_offsets, read_offsets
from txnstore.log.deleting import purge_deleted_partitions
from txnstore.log.topics import change_topic_configs, create_topic, delete_topic, ensure_topic, lock_topic_configs
from txnstore.model import INTERNAL_GROUP_PREFIX, NO_GENERATION, GroupMembership, OffsetAndMetadata, ProducerIdentity

MINUTE_MS = 60_000
DAY_MS = 24 * 60 * MINUTE_MS
RETENTION_MS = 7 * DAY_MS
SESSION_TIMEOUT_MS = 10_000
PRODUCER = ProducerIdentity(1_000, 0)
#: The ids of the two partitions of the first topic of a store.
FIRST, SECOND = 1, 2


class ExpiringGroup:
    """A group of a store, and what the maintenance does to it."""

    def __init__(self, store, name="g"):
        self._store = store
        self.group_id = name
        self.membership = GroupMembership(name)
        store.write(lambda connection: ensure_topic(connection, "read", partition_count=2))

    def commit(self, partition_id=FIRST, offset=5):
        offsets = {partition_id: OffsetAndMetadata(offset)}
        self._store.write(lambda connection: commit_offsets(connection, self.membership, offsets))

    def send(self, partition_id=FIRST, offset=9):
        offsets = {partition_id: OffsetAndMetadata(offset)}
        self._store.write(lambda connection: add_pending_offsets(connection, self.membership, offsets, PRODUCER))

    def end(self, *, commit):
        self._store.write(
            lambda connection: finish_pending_offsets(connection, [self.group_id], PRODUCER.producer_id, commit=commit)
        )

    def join(self):
        joining = GroupMembership(self.group_id, NO_GENERATION, f"member-{uuid.uuid4().hex[:8]}")
        details = MemberDetails("client", SESSION_TIMEOUT_MS, ("t",), frozenset({"t"}), ("range",))
        answer = self._store.write(lambda connection: coordinator.join(connection, Report(joining, 1), details))
        # It owns nothing, so that its commits are a simple consumer's, sent as one that knows its membership.
        self.membership = answer.membership

    def leave(self):
        assert coordinator.leave(self._store, self.membership)
        self.membership = GroupMembership(self.group_id)

    def committed(self):
        found = self._store.read(lambda connection: read_offsets(connection, self.group_id, range(10)))
        return {partition_id: offset.offset for partition_id, offset in found.offsets.items()}

    def is_there(self):
        statement = select(groups.c.group_id).where(groups.c.group_id == self.group_id)
        return self._store.read(lambda connection: connection.execute(statement).one_or_none()) is not None

    def expire(self):
        return expire_offsets(self._store, groups_max=100)[0]

    def expire_members(self):
        return expire_silent_members(self._store, groups_max=100)


@pytest.fixture
def group(store):
    return ExpiringGroup(store)


def test_a_group_that_is_empty_for_as_long_as_the_retention_loses_its_offsets_and_is_gone(group, clock):
    group.join()
    group.leave()
    group.commit()
    clock.advance(RETENTION_MS - 1)
    assert group.expire() == 0
    assert group.committed() == {FIRST: 5}
    clock.advance(1)
    assert group.expire() == 1
    assert group.committed() == {}
    assert not group.is_there()
    assert group.expire() == 0


def test_the_time_counts_from_when_the_last_member_left_not_from_its_commit(group, clock):
    group.commit()
    group.join()
    clock.advance(RETENTION_MS)
    group.leave()
    clock.advance(RETENTION_MS - 1)
    assert group.expire() == 0
    assert group.committed() == {FIRST: 5}
    clock.advance(1)
    assert group.expire() == 1


def test_members_keep_the_offsets_and_silent_ones_are_removed_first(group, clock):
    group.commit()
    group.join()
    clock.advance(RETENTION_MS + SESSION_TIMEOUT_MS)
    assert group.expire() == 0
    assert group.expire_members() == 1
    # Empty from here on.
    assert group.expire() == 0
    clock.advance(RETENTION_MS - 1)
    assert group.expire() == 0
    assert group.committed() == {FIRST: 5}
    clock.advance(1)
    assert group.expire() == 1
    assert not group.is_there()


def test_a_member_that_is_heard_of_is_not_removed(group, clock):
    group.join()
    clock.advance(SESSION_TIMEOUT_MS - 1)
    assert group.expire_members() == 0
    clock.advance(1)
    assert group.expire_members() == 1
    assert group.expire_members() == 0


def test_an_administrator_who_finds_silent_members_alone_empties_the_group_in_a_generation_of_its_own(
    store, group, clock
):
    group.join()
    before = store.read(lambda connection: find_group(connection, "g"))
    clock.advance(SESSION_TIMEOUT_MS + 1)
    store.write(lambda connection: alter_offsets(connection, "g", {FIRST: OffsetAndMetadata(3)}))
    after = store.read(lambda connection: find_group(connection, "g"))
    assert (after.members, after.generation) == ((), before.generation + 1)
    assert group.committed() == {FIRST: 3}


def test_of_a_group_that_never_had_members_each_offset_expires_by_itself(group, clock):
    group.commit(FIRST)
    clock.advance(DAY_MS)
    group.commit(SECOND)
    clock.advance(RETENTION_MS - DAY_MS - 1)
    assert group.expire() == 0
    clock.advance(1)
    assert group.expire() == 1
    assert group.committed() == {SECOND: 5}
    clock.advance(DAY_MS - 1)
    assert group.expire() == 0
    clock.advance(1)
    assert group.expire() == 1
    assert not group.is_there()


def test_an_offset_that_is_committed_anew_has_all_of_its_time_again(group, clock):
    group.commit()
    clock.advance(RETENTION_MS - 1)
    group.commit(offset=6)
    clock.advance(RETENTION_MS - 1)
    assert group.expire() == 0
    assert group.committed() == {FIRST: 6}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("had_members", [True, False])
@pytest.mark.parametrize("commit", [True, False])
def test_while_a_transaction_holds_offsets_nothing_expires(group, clock, had_members, commit):
    group.commit(FIRST)
    group.commit(SECOND)
    if had_members:
        group.join()
        group.leave()
    group.send(FIRST)
    clock.advance(2 * RETENTION_MS)
    assert group.expire() == 0
    assert group.committed() == {FIRST: 5, SECOND: 5}
    group.end(commit=commit)
    assert group.expire() == 1
    # What the transaction has committed begins its time now.
    assert group.committed() == ({FIRST: 9} if commit else {})
    assert group.is_there() is commit
    clock.advance(RETENTION_MS)
    assert group.expire() == commit
    assert not group.is_there()


@pytest.mark.parametrize("had_members", [True, False])
def test_where_a_query_stands_as_the_group_its_offset_stays_until_the_query_is_forgotten(
    store, group, clock, had_members
):
    if had_members:
        group.join()
        group.leave()
    group.commit(FIRST)
    group.commit(SECOND)
    position = {"sink_id": "query:1", "group_id": "g", "in_commit_order": False, "next_offset": 5}
    others = ({"group_id": "h", "partition_id": SECOND}, {"partition_id": 3})
    positions = [{**position, **each} for each in ({"partition_id": FIRST}, *others)]
    store.write(lambda connection: connection.execute(insert(sink_positions), positions))
    clock.advance(2 * RETENTION_MS)
    assert group.expire() == 1
    assert group.committed() == {FIRST: 5}
    assert group.expire() == 0
    store.write(lambda connection: connection.execute(delete(sink_positions)))
    assert group.expire() == 1
    assert not group.is_there()


def keep_unread(store, text, topic="read"):
    changes = {"txnstore.retention.unread.ms": text}
    store.write(lambda connection: change_topic_configs(connection, lock_topic_configs(connection, topic), changes))


@pytest.mark.parametrize("had_members", [True, False])
def test_where_a_topic_keeps_what_is_unread_at_any_age_its_offsets_stay_and_no_others(
    store, group, clock, had_members, monkeypatch
):
    other = store.write(lambda connection: ensure_topic(connection, "other")).partition_ids[0]
    keep_unread(store, "-1")
    if had_members:
        group.join()
        group.leave()
    for partition_id in (FIRST, SECOND, other):
        group.commit(partition_id)
    clock.advance(100 * RETENTION_MS)
    assert group.expire() == 1
    assert group.committed() == {FIRST: 5, SECOND: 5}
    # Nothing is due any more, and no lock is taken for it, until the topic is told otherwise.
    with monkeypatch.context() as patched:
        patched.setattr(expiration, "_expire_group", lambda *_: pytest.fail("it is not due"))
        assert group.expire() == 0
    keep_unread(store, None)
    assert group.expire() == 1
    assert not group.is_there()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("had_members", [True, False])
@pytest.mark.parametrize(
    ("unread_ms", "kept_ms"),
    [(0, RETENTION_MS), (DAY_MS, RETENTION_MS), (RETENTION_MS, RETENTION_MS + 1), (30 * DAY_MS, 30 * DAY_MS + 1)],
)
def test_where_it_keeps_that_for_longer_than_offsets_these_stay_for_as_long(
    store, group, clock, had_members, unread_ms, kept_ms
):
    keep_unread(store, str(unread_ms))
    group.commit()
    if had_members:
        clock.advance(5 * DAY_MS)
        group.join()
        group.leave()
    clock.advance(kept_ms - 1)
    assert group.expire() == 0
    assert group.committed() == {FIRST: 5}
    clock.advance(1)
    assert group.expire() == 1
    assert not group.is_there()


def test_groups_of_our_own_keep_their_offsets_until_their_topic_goes(store, clock, monkeypatch):
    own, other = ExpiringGroup(store, f"{INTERNAL_GROUP_PREFIX}load"), ExpiringGroup(store, "txnstore_load")
    for group in (own, other):
        group.commit()
    clock.advance(RETENTION_MS)
    expire_group, due = expiration._expire_group, []

    def expire(store, group_id, portions):
        due.append(group_id)
        return expire_group(store, group_id, portions)

    with monkeypatch.context() as patched:
        patched.setattr(expiration, "_expire_group", expire)
        assert other.expire() == 1
    assert due == [other.group_id]
    assert not other.is_there()
    # Nor under its lock.
    assert not expire_group(store, own.group_id, Portions())
    assert own.committed() == {FIRST: 5}
    store.write(lambda connection: delete_topic(connection, "read"))
    purge_deleted_partitions(store, rows_max=100)
    assert own.committed() == {}
    own.expire()
    assert not own.is_there()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("text", ["", "7 days", "-2", "9" * 19, "1e3"])
def test_a_text_that_says_nothing_keeps_the_offsets_and_expires_those_of_others(store, group, clock, text):
    keep_unread(store, "0")
    store.write(lambda connection: connection.execute(update(topic_configs).values(value=text)))
    other = store.write(lambda connection: ensure_topic(connection, "other")).partition_ids[0]
    group.commit()
    group.commit(other)
    clock.advance(100 * RETENTION_MS)
    assert group.expire() == 1
    assert group.committed() == {FIRST: 5}


def test_a_group_that_has_only_offsets_of_an_open_transaction_stays(group):
    group.send()
    assert group.expire() == 0
    group.end(commit=False)
    assert group.expire() == 1
    assert not group.is_there()


def test_a_group_without_offsets_and_members_is_removed_at_once(group):
    group.join()
    assert group.expire() == 0
    group.leave()
    assert group.is_there()
    assert group.expire() == 1
    assert not group.is_there()


def test_the_retention_is_a_setting_of_the_store(store, group, clock):
    group.commit()
    clock.advance(2 * MINUTE_MS)
    store.write(lambda connection: change_store_settings(connection, {"offsets.retention.minutes": "3"}))
    assert group.expire() == 0
    clock.advance(MINUTE_MS)
    assert group.expire() == 1


def test_other_groups_keep_what_they_have(store, group, clock):
    others = [ExpiringGroup(store, name) for name in ("f", "h")]
    group.commit()
    clock.advance(1)
    for other in others:
        other.commit()
    clock.advance(RETENTION_MS - 1)
    assert group.expire() == 1
    assert group.committed() == {}
    assert [other.committed() for other in others] == [{FIRST: 5}] * 2


def test_only_so_many_groups_are_looked_at_in_one_go(store, clock):
    several = [ExpiringGroup(store, name) for name in "cabed"]
    for each in several:
        each.commit()
        each.join()
    clock.advance(SESSION_TIMEOUT_MS)
    assert [expire_silent_members(store, groups_max=3) for _ in range(3)] == [3, 2, 0]
    clock.advance(RETENTION_MS)
    assert [expire_offsets(store, groups_max=2) for _ in range(4)] == [(2, ""), (2, ""), (1, None), (0, None)]
    assert not any(each.is_there() for each in several)


def test_the_group_that_is_unused_for_longest_goes_first(store, clock):
    several = [ExpiringGroup(store, name) for name in "cabed"]
    for each in several:
        each.commit()
        clock.advance(1)
    clock.advance(RETENTION_MS)
    assert expire_offsets(store, groups_max=2) == (2, "")
    assert [each.group_id for each in several if each.is_there()] == ["b", "e", "d"]


def test_many_offsets_are_deleted_in_database_transactions_of_a_bounded_size(store, group, clock, monkeypatch):
    # However slow the machine is.
    monkeypatch.setattr(Portions, "_adapt", lambda *_: None)
    many = 2 * ROWS_AT_ONCE + 1
    topic = store.write(lambda connection: create_topic(connection, "many", partition_count=many))
    offsets = dict.fromkeys(topic.partition_ids, OffsetAndMetadata(1))
    store.write(lambda connection: commit_offsets(connection, group.membership, offsets))
    clock.advance(RETENTION_MS)
    deleted = []

    def see(connection, cursor, statement, *_):
        if statement.startswith("DELETE") and "group_offsets" in statement.split("WHERE")[0]:
            deleted.append(cursor.rowcount)
        if statement.startswith("COMMIT"):
            deleted.append(None)

    event.listen(store.engine, "after_cursor_execute", see)
    try:
        assert group.expire() == 1
    finally:
        event.remove(store.engine, "after_cursor_execute", see)
    assert [count for count in deleted if count is not None] == [ROWS_AT_ONCE, ROWS_AT_ONCE, 1]
    assert group.committed() == {}
    assert not group.is_there()

"""Consumed offsets, committed by themselves and by a transaction: the later word holds, in every order."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from tests.tools.interleaving import before_statements, before_transactions, explore
from txnstore.db.schema import group_offsets, groups
from txnstore.groups.administration import delete_offsets
from txnstore.groups.coordinator import join
from txnstore.groups.group import MemberDetails, Report
from txnstore.groups.offsets import commit_offsets, commit_offsets_at_once, read_offsets
from txnstore.model import NO_GENERATION, GroupMembership, OffsetAndMetadata
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.transaction import SentOffsets

pytestmark = pytest.mark.slow_on_postgresql

PLAIN, PENDING = 5, 10


def commit_as_consumers_do(store, committer, offsets, *, at_once):
    """Commit by one statement where there is one, if told; else by several."""
    if not (at_once and commit_offsets_at_once(store, committer, offsets)):
        store.write(lambda connection: commit_offsets(connection, committer, offsets))


def last_word_of(connection, group_id):
    """Return the offset that has the number of the group's last commit."""
    this = (groups.c.group_id == group_id, group_offsets.c.group_id == group_id)
    is_last = group_offsets.c.commit_number == groups.c.commit_number
    return connection.execute(select(group_offsets.c.committed_offset).where(*this, is_last)).scalar()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("by_statement", [False, True])
def test_of_a_plain_offset_commit_and_one_in_a_transaction_the_later_one_holds(
    world, in_turn, commit, at_once, by_statement
):
    def make():
        setting = world.setting(partition_count=1)
        partition_id = setting.partitions["p0"]
        identity = setting.producer("producer", world.first).init()
        coordinator = TransactionCoordinator(world.first)
        committer = GroupMembership(f"group-{setting.topic}")
        # The group is known: the first commit of a new one goes the general way.
        world.observer.write(lambda connection: commit_offsets(connection, committer, {}))
        # The later word is the one whose database transaction came later: its number in the group says which.
        order = []

        def send():
            sent = SentOffsets(committer, {partition_id: OffsetAndMetadata(PENDING)})
            coordinator.send_offsets(setting.transactional_id, identity, sent)
            order.append(PENDING)

        def commit_plainly():
            offsets = {partition_id: OffsetAndMetadata(PLAIN)}
            commit_as_consumers_do(world.second, committer, offsets, at_once=at_once)
            order.append(PLAIN)

        def later_word_holds(finished):
            assert finished["producer"].result() == ["ok"] * 2
            assert finished["consumer"].result() == ["ok"]
            committed = world.observer.read(
                lambda connection: read_offsets(connection, committer.group_id, [partition_id])
            )
            assert not committed.unstable
            found = committed.offsets[partition_id].offset
            if commit:
                assert found == world.observer.read(lambda connection: last_word_of(connection, committer.group_id))
            if not (at_once and by_statement):
                # One statement that waits is done with the COMMIT that it waits for: nobody knows who of them is told
                # first.
                assert found == (order[-1] if commit else PLAIN)

        return setting.scenario(
            {
                "producer": in_turn(
                    send,
                    lambda: coordinator.end_transaction(setting.transactional_id, identity, commit=commit),
                ),
                "consumer": in_turn(commit_plainly),
            },
            at_end=later_word_holds,
        )

    if by_statement:
        # Two preemptions more would only repeat what waiting for the group's lock does already.
        explored = explore(make, stops=before_statements, preemptions_max=1, store=world.observer)
        assert explored.orders_with_waiting > 0
        assert explored.deadlocks == 0
    else:
        assert explore(make, stops=before_transactions).orders == 3


@pytest.mark.parametrize("at_once", [False, True])
def test_deleted_offsets_do_not_come_back_with_the_transaction_that_held_them(world, in_turn, at_once):
    def make():
        setting = world.setting(partition_count=1)
        partition_id = setting.partitions["p0"]
        group_id = f"group-{setting.topic}"
        identity = setting.producer("producer", world.first).init()
        coordinator = TransactionCoordinator(world.first)
        sent = SentOffsets(GroupMembership(group_id), {partition_id: OffsetAndMetadata(PENDING)})
        coordinator.send_offsets(setting.transactional_id, identity, sent)

        def commit():
            open_group_id = group_id if at_once else None
            coordinator.end_transaction(
                setting.transactional_id, identity, commit=True, has_begun=True, open_group_id=open_group_id
            )

        def delete():
            world.second.write(lambda connection: delete_offsets(connection, group_id, {setting.topic: [partition_id]}))

        def nothing_is_left(finished):
            assert finished["producer"].result() == finished["administrator"].result() == ["ok"]
            found = world.observer.read(lambda connection: read_offsets(connection, group_id, [partition_id]))
            assert (found.offsets, found.unstable) == ({}, frozenset())

        return setting.scenario({"producer": in_turn(commit), "administrator": in_turn(delete)}, at_end=nothing_is_left)

    explored = explore(make, stops=before_statements, preemptions_max=1, store=world.observer)
    assert explored.orders_with_waiting > 0
    assert explored.deadlocks == 0


@pytest.mark.parametrize("at_once", [False, True])
def test_a_simple_commit_that_waited_for_the_first_member_is_refused(world, in_turn, at_once):
    """What a group's row is asked together with its lock is answered as of before the wait (PostgreSQL)."""

    def make():
        setting = world.setting(partition_count=1)
        partition_id = setting.partitions["p0"]
        group_id = f"group-{setting.topic}"
        offsets = {partition_id: OffsetAndMetadata(PLAIN)}
        world.observer.write(lambda connection: commit_offsets(connection, GroupMembership(group_id), {}))
        order = []

        def commit_simply():
            commit_as_consumers_do(world.first, GroupMembership(group_id), offsets, at_once=at_once)
            order.append("commit")

        def enter():
            report = Report(GroupMembership(group_id, NO_GENERATION, "member"), 1, frozenset())
            details = MemberDetails("client", 10_000, (setting.topic,), frozenset({setting.topic}), ("range",))
            world.second.write(lambda connection: join(connection, report, details))
            order.append("join")

        def members_alone_commit(finished):
            assert finished["member"].result() == ["ok"]
            assert finished["simple"].result() == ["ok" if order[0] == "commit" else "UnknownMember"]
            committed = world.observer.read(lambda connection: read_offsets(connection, group_id, [partition_id]))
            assert (partition_id in committed.offsets) is (order[0] == "commit")
            firsts.add(order[0])

        return setting.scenario(
            {"simple": in_turn(commit_simply), "member": in_turn(enter)}, at_end=members_alone_commit
        )

    firsts: set[str] = set()
    explored = explore(make, stops=before_statements, preemptions_max=1, store=world.observer)
    assert firsts == {"commit", "join"}
    assert explored.orders_with_waiting > 0
    assert explored.deadlocks == 0

"""Members that leave their group while others leave, join, ask and commit: each order is as if one came first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.groups.group_servers import StoreServer
from tests.groups.protocol_member import ProtocolMember
from tests.tools.interleaving import before_statements, explore
from txnstore.db.store import Store
from txnstore.errors import UnknownMember
from txnstore.groups import coordinator
from txnstore.groups.group import GroupState
from txnstore.groups.rebalance_rules import state_of
from txnstore.model import PartitionName
from txnstore.testing.manual_clock import ManualClock

pytestmark = pytest.mark.slow_on_postgresql

PARTITIONS = 3
LONG_MS, SHORT_MS = 60_000, 10_000


@dataclass
class Trio:
    """A group at rest of three members with a partition each, and what has happened to it since."""

    topic: str
    clock: ManualClock
    observer: Store
    leaver: ProtocolMember
    other: ProtocolMember
    third: ProtocolMember

    def __post_init__(self):
        self.members = [self.leaver, self.other, self.third]
        for _ in range(4):
            for member in self.members:
                member.poll()
        assert all(len(member.owned) == 1 for member in self.members)
        self.begun_in = self.group().generation
        self.happened: list[str] = []

    def on(self, store) -> StoreServer:
        return StoreServer(store, self.clock, self.leaver.group_id)

    def group(self):
        return self.on(self.observer).read()

    def leaves(self, store, member):
        """The leave as a client asks for it; False: it was no member any more."""
        has_left = coordinator.leave(store, member.membership)
        self.happened.append("leave" if has_left else "nothing")
        return has_left

    def commits(self, store, member):
        (partition,) = member.owned
        try:
            assert self.on(store).commit(member.membership, partition)
        except UnknownMember:
            self.happened.append("refused")
            return
        self.happened.append("commit")

    def nobody_has_what_another_has(self):
        group = self.group()
        owned = [partition for member in group.members.values() for partition in member.owned]
        assert len(set(owned)) == len(owned)
        gone = {member.membership.member_id for member in self.members} - group.members.keys()
        if gone:
            # The others are told of it with their next question, whatever came between.
            assert group.generation > self.begun_in
            assert all(
                self.on(self.observer).has_news(member.membership)
                for member in self.members
                if member.membership.generation == self.begun_in
            )

    def come_to_rest(self, *alive):
        """Let who is left do what it does every heartbeat interval; they have everything after two."""
        for _ in range(2):
            for member in alive:
                member.server = self.on(self.observer)
                member.beat()
                member.poll()
        group = self.group()
        assert group.members.keys() == {member.membership.member_id for member in alive}
        everything = [PartitionName(self.topic, number) for number in range(PARTITIONS)]
        assert sorted(partition for member in alive for partition in member.owned) == everything
        if alive:
            assert all(member.is_settled for member in alive)
            assert state_of(group) is GroupState.STABLE


@pytest.fixture(params=[True, False], ids=["in one message", "statement by statement"])
def trio(request, world, monkeypatch) -> Callable[..., Trio]:
    if request.param and world.first.backend.name == "sqlite":
        pytest.skip("nothing is sent to a server")
    # What the second one does takes single steps in any case: the message comes before, between and after them.
    for store in (world.second,) if request.param else (world.first, world.second):
        monkeypatch.setattr(store.backend, "write_at_once", None)

    def make(setting, leaver_timeout_ms=LONG_MS) -> Trio:
        server = StoreServer(world.observer, world.clock, f"group-{setting.topic}")

        def member(timeout_ms=LONG_MS):
            return ProtocolMember(
                server, server.group_id, [setting.topic], assignors=("cooperative-sticky",), timeout_ms=timeout_ms
            )

        return Trio(setting.topic, world.clock, world.observer, member(leaver_timeout_ms), member(), member())

    return make


def explored_all(world, make):
    explored = explore(make, stops=before_statements, preemptions_max=2, store=world.observer)
    assert explored.deadlocks == 0
    assert explored.orders > 2
    # One has the group's lock, or that of the file, and the other waits.
    assert explored.orders_with_waiting > 0


def scenario_of(setting, group, actors, at_end):
    def end(finished):
        for each in finished.values():
            each.result()
        at_end(finished)
        group.nobody_has_what_another_has()

    return setting.scenario(actors, after_step=group.nobody_has_what_another_has, at_end=end)


@pytest.mark.slow_but_first
def test_two_that_leave_at_once_are_both_gone_and_the_third_has_everything(world, trio):
    def make():
        setting = world.setting(PARTITIONS)
        group = trio(setting)

        def both_are_gone(finished):
            assert group.happened == ["leave", "leave"]
            assert group.group().generation == group.begun_in + 2
            group.come_to_rest(group.third)

        actors = {
            "first": lambda: group.leaves(world.first, group.leaver),
            "second": lambda: group.leaves(world.second, group.other),
        }
        return scenario_of(setting, group, actors, both_are_gone)

    explored_all(world, make)


@pytest.mark.slow
def test_a_leave_that_is_repeated_while_it_is_still_under_way_happens_once(world, trio):
    """The connection was lost, and the server had not noticed yet."""

    def make():
        setting = world.setting(PARTITIONS)
        group = trio(setting)

        def it_has_left_once(finished):
            assert sorted(group.happened) == ["leave", "nothing"]
            assert group.group().generation == group.begun_in + 1
            group.come_to_rest(group.other, group.third)

        actors = {
            "lost": lambda: group.leaves(world.first, group.leaver),
            "again": lambda: group.leaves(world.second, group.leaver),
        }
        return scenario_of(setting, group, actors, it_has_left_once)

    explored_all(world, make)


@pytest.mark.slow_but_first
def test_who_is_found_silent_while_it_leaves_is_gone_once(world, trio):
    def make():
        setting = world.setting(PARTITIONS)
        group = trio(setting, leaver_timeout_ms=SHORT_MS)
        world.clock.advance(SHORT_MS)
        group.other.server = group.on(world.second)

        def it_is_gone(finished):
            (outcome,) = group.happened
            outcomes.add(outcome)
            assert group.group().generation == group.begun_in + 1
            group.come_to_rest(group.other, group.third)

        actors = {
            "leaver": lambda: group.leaves(world.first, group.leaver),
            "other": group.other.beat,
        }
        return scenario_of(setting, group, actors, it_is_gone)

    outcomes: set[str] = set()
    explored_all(world, make)
    assert outcomes == {"leave", "nothing"}


def test_a_member_that_asks_while_another_leaves_has_its_part_after_the_next_question(world, trio):
    def make():
        setting = world.setting(PARTITIONS)
        group = trio(setting)
        group.other.server = group.on(world.second)

        def the_others_have_it(finished):
            assert group.happened == ["leave"]
            assert group.group().generation == group.begun_in + 1
            is_assigned.add(group.group().assignor is not None)
            group.come_to_rest(group.other, group.third)

        actors = {
            "leaver": lambda: group.leaves(world.first, group.leaver),
            # As after a wake-up: it asks although it has nothing to report.
            "other": group.other.send,
        }
        return scenario_of(setting, group, actors, the_others_have_it)

    is_assigned: set[bool] = set()
    explored_all(world, make)
    # It asked before the other one left, and after that.
    assert is_assigned == {False, True}


@pytest.mark.slow_but_first
def test_who_joins_while_another_leaves_has_what_is_free(world, trio):
    def make():
        setting = world.setting(PARTITIONS)
        group = trio(setting)
        newcomer = ProtocolMember(
            group.on(world.second), group.leaver.group_id, [group.topic], assignors=("cooperative-sticky",)
        )

        def the_newcomer_has_it(finished):
            assert group.happened == ["leave"]
            group.come_to_rest(group.other, group.third, newcomer)
            assert len(newcomer.owned) == 1

        actors = {"leaver": lambda: group.leaves(world.first, group.leaver), "newcomer": newcomer.send}
        return scenario_of(setting, group, actors, the_newcomer_has_it)

    explored_all(world, make)


@pytest.mark.slow_but_first
def test_offsets_of_who_leaves_are_committed_before_or_refused(world, trio):
    def make():
        setting = world.setting(PARTITIONS)
        group = trio(setting)

        def the_order_decided(finished):
            assert sorted(group.happened) in (["commit", "leave"], ["leave", "refused"])
            outcomes.add(tuple(sorted(group.happened)))
            group.come_to_rest(group.other, group.third)

        actors = {
            "leaver": lambda: group.leaves(world.first, group.leaver),
            # A commit that was on its way for long.
            "commit": lambda: group.commits(world.second, group.leaver),
        }
        return scenario_of(setting, group, actors, the_order_decided)

    outcomes: set[tuple[str, ...]] = set()
    explored_all(world, make)
    assert len(outcomes) == 2


def test_offsets_of_who_stays_are_committed_whenever_another_leaves(world, trio):
    def make():
        setting = world.setting(PARTITIONS)
        group = trio(setting)

        def both_have_happened(finished):
            assert sorted(group.happened) == ["commit", "leave"]
            group.come_to_rest(group.other, group.third)

        actors = {
            "leaver": lambda: group.leaves(world.first, group.leaver),
            "commit": lambda: group.commits(world.second, group.other),
        }
        return scenario_of(setting, group, actors, both_have_happened)

    explored_all(world, make)


@pytest.mark.slow_but_first
def test_the_group_is_empty_once_the_last_ones_have_left_and_begins_anew_with_the_next_one(world, trio):
    def make():
        setting = world.setting(PARTITIONS)
        group = trio(setting)
        assert group.leaves(world.observer, group.third)

        def nobody_is_left(finished):
            left = group.group()
            assert (left.members, left.assignor) == ({}, None)
            newcomer = ProtocolMember(
                group.on(world.observer), group.leaver.group_id, [group.topic], assignors=("range",)
            )
            group.come_to_rest(newcomer)

        actors = {
            "first": lambda: group.leaves(world.first, group.leaver),
            "second": lambda: group.leaves(world.second, group.other),
        }
        return scenario_of(setting, group, actors, nobody_is_left)

    explored_all(world, make)

"""Any history of joins, leaves, silence and comebacks: no partition ever has two owners, and all comes to rest."""

from __future__ import annotations

import uuid
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from sqlalchemy import delete

from tests.groups.group_servers import RulesServer, StoreServer
from tests.groups.protocol_member import ProtocolMember
from tests.tools.campaigns import times
from txnstore.db.schema import group_members
from txnstore.errors import FencedInstance, IllegalGeneration, UnknownMember
from txnstore.groups.group import GroupState, Report
from txnstore.groups.rebalance_rules import state_of
from txnstore.model import PartitionName
from txnstore.verification.membership import group_violations
from txnstore.verification.reading import Snapshot

TIMEOUT_MS = 10_000
NAMES = st.sampled_from(["anna", "bert", "carl", "dora"])
TOPICS = st.frozensets(st.sampled_from(["a", "b"]), min_size=1)
#: Those of one group have one in common, mostly.
ASSIGNORS = st.sampled_from(
    [
        ("range",),
        ("range", "roundrobin"),
        ("roundrobin", "range"),
        ("cooperative-sticky",),
        ("cooperative-sticky", "range"),
        ("range", "cooperative-sticky"),
    ]
)


class GroupHistory(RuleBasedStateMachine):
    """Each process runs one member that keeps to the protocol; the network and the processes do not."""

    def make_server(self, group_id):
        return RulesServer()

    @initialize(assignors=ASSIGNORS, mixed=st.booleans(), letters=st.lists(TOPICS, min_size=3, max_size=3))
    def begin(self, assignors, mixed, letters):
        self.group_id = uuid.uuid4().hex
        self.server = self.make_server(self.group_id)
        self.counts = {}
        for letter, count in (("a", 4), ("b", 1)):
            self._make_topic(letter, count)
        self.assignors = assignors
        self.mixed = mixed
        self.members: dict[str, ProtocolMember] = {}
        self.generation = 0
        for name, wanted in zip(("anna", "bert", "carl"), letters, strict=True):
            self.start(name, wanted, name == "bert", assignors)
            self.everybody_polls()

    def _topic(self, letter):
        return f"{letter}{self.group_id}"

    def _make_topic(self, letter, count):
        self.server.create_topic(self._topic(letter), count)
        self.counts[self._topic(letter)] = count

    # --- processes

    @rule(name=NAMES, letters=TOPICS, is_static=st.booleans(), assignors=ASSIGNORS)
    def start(self, name, letters, is_static, assignors):
        """Start the process, anew if it was there: without a word, the former one is dead."""
        member = ProtocolMember(
            self.server,
            self.group_id,
            [self._topic(letter) for letter in letters],
            instance_id=name if is_static else None,
            assignors=assignors if self.mixed else self.assignors,
            timeout_ms=TIMEOUT_MS,
        )
        member.send()
        for other in self.members.values():
            # The lasting name was somebody else's meanwhile.
            other.is_out |= is_static and other.instance_id == name
        self.members[name] = member

    @rule(name=NAMES, also=NAMES)
    def start_with_the_same_lasting_name(self, name, also):
        """By mistake: the former process lives on."""
        former = self.members.get(name)
        if former is None or former.instance_id is None or former.is_out or also in self.members:
            return
        member = ProtocolMember(
            self.server,
            self.group_id,
            former.details.topics,
            instance_id=former.instance_id,
            assignors=former.details.assignors,
            timeout_ms=TIMEOUT_MS,
        )
        member.send()
        if member.is_out:
            return
        self.members[also] = member
        if former.pending is not None or former.membership.generation >= 0:
            with pytest.raises((FencedInstance, UnknownMember)):
                self.server.heartbeat(self._report(former))
        # It finds out by itself; from here on nothing it does counts.
        former.is_out = True

    @staticmethod
    def _report(member):
        membership = member.membership if member.membership.generation >= 0 else member.pending.membership
        return Report(membership, member.step + 1, member.owned)

    @rule(name=NAMES)
    def kill(self, name):
        self.members.pop(name, None)

    @rule(name=NAMES)
    def leave(self, name):
        if self._awake(name):
            self.members.pop(name).leave()

    @rule(name=NAMES)
    def stop(self, name):
        if name in self.members:
            self.members[name].is_stopped = True

    @rule(name=NAMES)
    def resume(self, name):
        if name in self.members:
            self.members[name].is_stopped = False

    def _awake(self, name):
        member = self.members.get(name)
        return member if member is not None and not member.is_stopped and not member.is_out else None

    # --- what a process does

    @rule(name=NAMES)
    def poll(self, name):
        if member := self._awake(name):
            member.poll()

    @rule()
    def everybody_polls(self):
        for name in sorted(self.members):
            self.poll(name)

    @rule(name=NAMES, is_lost=st.booleans())
    def beat(self, name, is_lost):
        if member := self._awake(name):
            member.beat(is_lost=is_lost)

    @rule(name=NAMES, is_lost=st.booleans())
    def send(self, name, is_lost):
        if member := self._awake(name):
            member.send(is_lost=is_lost)

    @rule(name=NAMES)
    def act(self, name):
        if member := self._awake(name):
            member.act()

    @rule(name=NAMES, letters=TOPICS)
    def resubscribe(self, name, letters):
        if member := self._awake(name):
            member.resubscribe([self._topic(letter) for letter in letters])

    @rule(name=NAMES, which=st.integers(0, 9))
    def repeat_an_old_heartbeat(self, name, which):
        """A heartbeat that was on its way for long: it must take nothing away, and give nothing."""
        member = self.members.get(name)
        old = (
            [report for report in member.sent if report.step < member.step and not report.joins_anew] if member else []
        )
        if old:
            before = self.server.read()
            with pytest.raises((IllegalGeneration, UnknownMember, FencedInstance)):
                self.server.heartbeat(old[which % len(old)])
            assert self.server.read() == before

    @rule(name=NAMES, how_many=st.integers(1, 3))
    def commit(self, name, how_many):
        """Commit as each of the members that it was lately, for each partition that it had lately."""
        member = self.members.get(name)
        if member is None:
            return
        for membership in member.memberships[-how_many:]:
            for partition in set(member.had[-how_many:]):
                self._commit(member, membership, partition)

    @rule(name=NAMES, gone=NAMES)
    def commit_what_another_leaves(self, name, gone):
        """In the background, the application has not heard of that: from before, it commits nothing of it."""
        self.everybody_polls()
        member, leaver = self._awake(name), self._awake(gone)
        if member is None or leaver is None or name == gone:
            return
        row = self.server.read().members.get(leaver.membership.member_id)
        self.leave(gone)
        member.send()
        for membership in member.memberships:
            for partition in row.owned if row else ():
                with suppress(UnknownMember, FencedInstance):
                    assert not self.server.commit(membership, partition)

    def _commit(self, member, membership, partition):
        group = self.server.read()
        row = group.members.get(membership.member_id)
        try:
            was_accepted = self.server.commit(membership, partition)
        except FencedInstance:
            assert member.instance_id is not None
            assert group.static_member(member.instance_id) != row
            return
        except UnknownMember:
            assert row is None
            return
        assert row is not None
        in_range = row.generation <= membership.generation <= group.generation
        granted_since = partition in row.granted and membership.generation < row.granted_in
        assert was_accepted == (in_range and partition in row.owned and not granted_since)
        if membership == member.membership and partition in member.believed():
            assert was_accepted, "a member cannot commit what is its own"

    # --- the world

    @rule(milliseconds=st.sampled_from([1, 3_000, TIMEOUT_MS - 1, TIMEOUT_MS]))
    def pass_time(self, milliseconds):
        self.server.clock.advance(milliseconds)

    @rule()
    def expire(self):
        self.server.expire()

    @rule(letter=st.sampled_from(["a", "b"]))
    def grow(self, letter):
        topic = self._topic(letter)
        if self.counts[topic] < 6:
            self.counts[topic] += 1
            self.server.grow_topic(topic, self.counts[topic])

    # --- what must hold

    @invariant()
    def no_partition_has_two_owners(self):
        group = self.server.read()
        rows = [(member.member_id, p) for member in group.members.values() for p in member.owned] if group else []
        assert len({partition for _, partition in rows}) == len(rows)
        believed = [p for member in self.members.values() for p in member.believed()]
        assert len(set(believed)) == len(believed), "two processes work on one partition"
        for member in self.members.values():
            row = group.members.get(member.membership.member_id) if group else None
            if row is not None:
                assert member.believed() <= row.owned

    @invariant()
    def generations_never_fall(self):
        group = self.server.read()
        if group is not None:
            assert group.generation >= self.generation
            self.generation = group.generation

    def teardown(self):
        if not hasattr(self, "members"):
            return
        for member in self.members.values():
            member.is_stopped = False
        for _ in range(2):
            # The dead expire; the living keep their places.
            self.server.clock.advance(TIMEOUT_MS // 2)
            self._settle()
        self.server.expire()
        for _ in range(3):
            self._settle()
            self.no_partition_has_two_owners()
        alive = [member for member in self.members.values() if not member.is_out]
        group = self.server.read()
        if group is None:
            assert not alive
            return
        assert state_of(group) is (GroupState.STABLE if alive else GroupState.EMPTY)
        wanted = {topic for member in alive for topic in member.details.topics}
        everything = [PartitionName(topic, n) for topic in sorted(wanted) for n in range(self.counts[topic])]
        assert sorted(p for member in alive for p in member.believed()) == everything
        for member in alive:
            assert {p.topic for p in member.owned} <= member.details.topics
            assert self.server.renew(member.membership)
            assert not self.server.has_news(member.membership)
        assert self.server.read() == group, "a group at rest changes"

    def _settle(self):
        for member in self.members.values():
            if not member.is_out:
                member.send()
                member.poll()


def run(machine, examples, steps):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            # No shrinking: a history is short as it is, and to shorten it takes minutes.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
@pytest.mark.campaign
def test_the_rules_alone():
    run(GroupHistory, times(150), 50)


@pytest.mark.slow
@pytest.mark.slow_on_postgresql
@pytest.mark.campaign
def test_over_rows(store, clock):
    class OverRows(GroupHistory):
        def make_server(self, group_id):
            return StoreServer(store, clock, group_id)

        @invariant()
        def a_verification_finds_nothing(self):
            assert store.read(lambda connection: list(group_violations(Snapshot((connection,))))) == []

        def teardown(self):
            super().teardown()
            # Otherwise the next history reads them at each step.
            store.write(lambda connection: connection.execute(delete(group_members)))

    # PostgreSQL takes five times as long for the same statements.
    run(OverRows, times(40 if store.backend.name == "sqlite" else 15), 30)

"""A member dies while it leaves its group: it is a member or it is none, and the others go on from there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.crash.worlds import Place
from tests.groups.group_servers import StoreServer
from tests.groups.protocol_member import ProtocolMember
from tests.tools.crashes import crash_at, every_crash, noting
from txnstore.db.store import Store
from txnstore.groups import coordinator
from txnstore.groups.group import Group, GroupState
from txnstore.groups.rebalance_rules import state_of
from txnstore.model import PartitionName

pytestmark = [pytest.mark.slow_on_postgresql, pytest.mark.crashes]

PARTITIONS = 4
#: Of who dies: the others outlive it.
SESSION_MS, LONG_MS = 10_000, 60_000

_numbers: Iterator[int] = itertools.count(1)


@dataclass
class Leaving:
    """A group at rest, one of whose members leaves on a connection of its own."""

    server: StoreServer
    topic: str
    leaver: ProtocolMember
    others: list[ProtocolMember]
    victims: Store
    begun_in: int = 0

    @classmethod
    def make(cls, place: Place, store: Store, victims: Store, others: int, assignor: str) -> Leaving:
        number = next(_numbers)
        server, topic = StoreServer(store, place.clock, f"group-{number}"), f"topic-{number}"
        server.create_topic(topic, PARTITIONS)

        def member(timeout_ms: int) -> ProtocolMember:
            return ProtocolMember(server, server.group_id, [topic], assignors=(assignor,), timeout_ms=timeout_ms)

        made = cls(server, topic, member(SESSION_MS), [member(LONG_MS) for _ in range(others)], victims)
        made.heartbeats(4, made.leaver, *made.others)
        assert made.leaver.owned
        made.begun_in = made.group().generation
        return made

    @property
    def rounds(self) -> int:
        """How many heartbeats each of the others needs: eager ones wait until all have given back what they had."""
        is_eager = self.leaver.details.assignors == ("range",)
        return 2 if is_eager and len(self.others) > 1 else 1

    def leave(self) -> bool:
        return coordinator.leave(self.victims, self.leaver.membership)

    def group(self) -> Group:
        group: Group | None = self.server.read()
        assert group is not None
        return group

    def heartbeats(self, count: int, *members: ProtocolMember) -> None:
        for _ in range(count):
            for member in members:
                member.beat()
                member.poll()

    def assert_others_have_everything(self) -> None:
        group = self.group()
        assert group.members.keys() == {member.membership.member_id for member in self.others}
        everything = [PartitionName(self.topic, number) for number in range(PARTITIONS)]
        assert sorted(partition for member in self.others for partition in member.owned) == (
            everything if self.others else []
        )
        assert state_of(group) is (GroupState.STABLE if self.others else GroupState.EMPTY)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("others", [0, 1, 2])
@pytest.mark.parametrize(
    ("txnstore_url", "assignor", "in_one_message"),
    [
        pytest.param("sqlite", "range", False, id="sqlite-range"),
        pytest.param("sqlite", "cooperative-sticky", False, id="sqlite-cooperative-sticky"),
        # Who has which partitions then is the members' affair, whatever the database.
        pytest.param("postgresql", "cooperative-sticky", False, id="postgresql-by statements"),
        pytest.param("postgresql", "cooperative-sticky", True, id="postgresql-in one message"),
    ],
    indirect=["txnstore_url"],
)
def test_who_dies_while_it_leaves_is_a_member_or_is_none(
    place: Place, monkeypatch: pytest.MonkeyPatch, assignor: str, others: int, in_one_message: bool
):
    with place.open() as store, place.open() as victims:
        if not in_one_message:
            monkeypatch.setattr(victims.backend, "write_at_once", None)

        def make() -> Leaving:
            return Leaving.make(place, store, victims, others, assignor)

        crashes = 0
        has_left = False
        for crash in every_crash(make, Leaving.leave, statements_are_all=True):
            crashes += 1
            crash.revive()
            with noting(crash):
                left = crash.subject
                # Only what commits leaves traces, and it leaves all of them.
                has_left |= crash.statement == "COMMIT" and crash.when.value == "after"
                has_left |= in_one_message and crash.when.value == "after"
                check(left, has_left=has_left)
                others_go_on(place, left, has_left=has_left)

                again = crash_at(crash.step, crash.when, Leaving.leave, make())
                assert again is not None
                again.revive()
                leaves_again(again.subject, has_left=has_left)
        assert has_left
        # Before and after BEGIN; after the lock, two statements, COMMIT.
        assert crashes == (2 if in_one_message else 6)


def check(left: Leaving, *, has_left: bool) -> None:
    """Check what a crash has left before anybody comes."""
    group = left.group()
    assert (left.leaver.membership.member_id not in group.members) is has_left
    assert group.generation == left.begun_in + has_left
    assert (group.assignor is None) is has_left
    for member in left.others:
        assert left.server.has_news(member.membership) is has_left


def others_go_on(place: Place, left: Leaving, *, has_left: bool) -> None:
    """Let the others go on as ever: they have everything at once, or once the dead one's session is over."""
    if not has_left:
        before = left.group()
        left.heartbeats(1, *left.others)
        assert left.group() == before
        place.clock.advance(SESSION_MS)
        if not left.others:
            left.server.expire()
    left.heartbeats(left.rounds, *left.others)
    left.assert_others_have_everything()


def leaves_again(left: Leaving, *, has_left: bool) -> None:
    """Let it repeat what it has heard no answer to."""
    assert left.leave() is not has_left
    assert not left.leave()
    assert left.group().generation == left.begun_in + 1
    left.heartbeats(left.rounds, *left.others)
    left.assert_others_have_everything()

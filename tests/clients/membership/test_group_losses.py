"""Members that lost their place: silent for too long, or late in polling; nothing is theirs, and they come back."""

from __future__ import annotations

from collections import deque

import pytest

from tests.clients.consumer.log_writer import PATIENCE_SECONDS, eventually
from tests.clients.membership.steps import (
    COOPERATIVE,
    EAGER_AND_COOPERATIVE,
    LOOKS_OFTEN,
    RARE_HEARTBEATS,
    SHORT_SESSION,
    STRATEGY_NAMES,
    TP,
    assigned,
    gate_of,
    lost,
    revoked,
)
from txnstore import KafkaError, KafkaException
from txnstore.clients.membership.member import ConsumerMember, MemberStage
from txnstore.errors import UnknownMember
from txnstore.groups.coordinator import leave
from txnstore.testing.manual_clock import ManualClock

pytestmark = pytest.mark.slow_on_postgresql

both_strategies = pytest.mark.parametrize("strategy", EAGER_AND_COOPERATIVE, ids=STRATEGY_NAMES)
RECORDS = 5
SESSION_MS = RARE_HEARTBEATS["session.timeout.ms"]
LATE = {**SHORT_SESSION, "max.poll.interval.ms": 4_000}


@pytest.fixture
def four(log):
    log.topic(partition_count=4)
    for number in range(4):
        log.write("t", number, *(b"%d-%d" % (number, offset) for offset in range(RECORDS)))


@pytest.fixture
def crew(crew):
    # Who is late does not know yet that others have his partitions.
    crew.may_be_late = True
    return crew


@pytest.fixture
def expired(four, crew):
    """Make a member that the group has expired and that does not know of it, and one that has everything now."""

    def make(strategy=(), **callbacks):
        clock = ManualClock()
        settings = {"txnstore.clock": clock, "enable.auto.commit": False, **dict(strategy)}
        a = crew.member("a", settings)
        gate = gate_of(a)
        a.subscribe("t", **callbacks)
        crew.until([a], lambda: len(a.records) == 4 * RECORDS)
        with gate:
            clock.advance(SESSION_MS)
            b = crew.member("b", settings).subscribe("t")
            # All at once: it waits for nobody.
            crew.until([b], lambda: b.partitions == [0, 1, 2, 3])
        return a, b

    return make


@both_strategies
def test_a_member_that_was_expired_is_told_that_all_is_lost_and_joins_anew(expired, crew, strategy):
    a, b = expired(strategy)
    former_id, former_generation = a.consumer.memberid(), a.generation
    assert a.taken() == [assigned(0, 1, 2, 3)]
    crew.until([a, b], lambda: len(a.partitions) == len(b.partitions) == 2)
    assert a.moves == [lost(0, 1, 2, 3), assigned(*a.partitions)]
    assert a.consumer.memberid() not in (None, former_id)
    assert a.generation == b.generation > former_generation
    assert sorted(a.partitions + b.partitions) == [0, 1, 2, 3]


@both_strategies
def test_without_on_lost_what_is_lost_is_revoked(expired, crew, strategy):
    a, b = expired(strategy, on_lost=None)
    a.taken()
    crew.until([a, b], lambda: len(a.partitions) == len(b.partitions) == 2)
    assert a.moves[0] == revoked(0, 1, 2, 3)


@pytest.mark.parametrize("kind", ["lost", "revoke"])
def test_nothing_can_be_committed_of_what_is_lost(expired, crew, kind):
    errors = []

    def commit(consumer, partitions):
        for call in (
            lambda: consumer.commit(asynchronous=False),
            lambda: consumer.commit(offsets=[TP("t", 0, 4)], asynchronous=False),
        ):
            with pytest.raises(KafkaException) as caught:
                call()
            errors.append(caught.value.args[0].code())

    a, b = expired(on_lost=None) if kind == "revoke" else expired()
    a.actions[kind] = commit
    b.consumer.commit(offsets=[TP("t", 0, 2)], asynchronous=False)
    crew.until([a, b], lambda: errors)
    assert errors == [KafkaError.UNKNOWN_MEMBER_ID] * 2
    assert [tp.offset for tp in b.consumer.committed([TP("t", 0), TP("t", 1)])] == [2, -1001]


def test_what_is_stored_of_lost_partitions_is_not_committed_by_itself(four, crew):
    clock = ManualClock()
    settings = {"txnstore.clock": clock, "enable.auto.commit": True, "auto.commit.interval.ms": 3_600_000}
    a, b = crew.member("a", settings), crew.member("b", settings)
    gate = gate_of(a)
    a.subscribe()
    crew.until([a], lambda: len(a.records) == 4 * RECORDS)
    with gate:
        clock.advance(SESSION_MS)
        b.subscribe()
        crew.until([b], lambda: b.partitions == [0, 1, 2, 3])
    crew.until([a], lambda: lost(0, 1, 2, 3) in a.calls)
    b.consumer.pause([TP("t", number) for number in range(4)])
    assert [tp.offset for tp in b.consumer.committed([TP("t", number) for number in range(4)])] == [-1001] * 4


def test_a_commit_of_a_member_that_was_expired_is_refused_before_it_knows(expired, crew):
    a, b = expired()
    assert a.refused("commit", asynchronous=False).code() == KafkaError.UNKNOWN_MEMBER_ID
    assert a.refused("commit", offsets=[TP("t", 0, 1)], asynchronous=False).code() == KafkaError.UNKNOWN_MEMBER_ID
    crew.until([a, b], lambda: len(a.partitions) == len(b.partitions) == 2)
    assert a.moves[1] == lost(0, 1, 2, 3)


def test_what_on_lost_raises_comes_out_of_poll_and_the_member_joins_anew(expired, crew):
    def fail(consumer, partitions):
        raise ZeroDivisionError

    a, b = expired()
    a.actions["lost"] = fail
    with pytest.raises(ZeroDivisionError):
        crew.until([a, b], lambda: len(a.partitions) == 2)
    crew.until([a, b], lambda: len(a.partitions) == len(b.partitions) == 2)


def test_closing_a_member_that_was_expired_and_has_not_heard_of_it_disturbs_nobody(expired, crew, monkeypatch):
    # One that hears of it comes back at once, and closing that one is a departure like any other.
    monkeypatch.setattr(ConsumerMember, "look_for_news", lambda member: None)
    a, b = expired()
    crew.until([b], lambda: len(b.records) == 4 * RECORDS)
    a.close()
    assert b.poll(0.3) is None
    assert b.calls == [assigned(0, 1, 2, 3)]
    b.consumer.commit(offsets=[TP("t", 0, 1)], asynchronous=False)


def test_who_unsubscribes_before_it_hears_of_its_loss_commits_nothing_of_that(four, crew, log):
    """Without a name it could, in a group that all others have left, whatever they had committed."""
    a = crew.member("a", {"enable.auto.commit": False}).subscribe()
    crew.until([a], lambda: len(a.records) == 4 * RECORDS)
    with gate_of(a):
        leave(log.store, a.consumer._core.group.membership)
        lose_place(a)
        a.consumer.unsubscribe()
        assert log.members() == []
        for offsets in ({}, {"offsets": [TP("t", 0, 1)]}):
            error = a.refused("commit", asynchronous=False, **offsets)
            assert error is not None
            assert error.code() == KafkaError.UNKNOWN_MEMBER_ID
        a.poll()
        assert a.calls == [assigned(0, 1, 2, 3), lost(0, 1, 2, 3)]
        assert a.refused("commit", offsets=[TP("t", 0, 1)], asynchronous=False).code() == KafkaError.UNKNOWN_MEMBER_ID


def test_who_has_lost_its_place_before_it_has_left_can_commit_what_it_assigns_itself_afterwards(four, crew, log):
    a = crew.member("a", {"enable.auto.commit": False}).subscribe()
    crew.until([a], lambda: len(a.records) == 4 * RECORDS)
    group = a.consumer._core.group
    with gate_of(a):
        a.consumer.unsubscribe()
        leave(log.store, group.membership)
        # As its next heartbeat is answered.
        group._refused(UnknownMember(), group._protocol.request())
        error = a.refused("commit", asynchronous=False)
        assert error.code() == KafkaError.UNKNOWN_MEMBER_ID
        a.poll()
        assert a.calls == [assigned(0, 1, 2, 3), revoked(0, 1, 2, 3)]
        assert a.refused("commit", offsets=[TP("t", 0, 1)], asynchronous=False).code() == KafkaError.UNKNOWN_MEMBER_ID
        a.consumer.assign([TP("t", 0)])
        a.consumer.commit(offsets=[TP("t", 0, 1)], asynchronous=False)


class LostBehindFirstLook(deque):
    """The events of a consumer that loses its place just behind the first look for events."""

    def __init__(self, lose):
        super().__init__()
        self.lose = lose

    def __bool__(self):
        lose, self.lose = self.lose, None
        if lose is None:
            return len(self) > 0
        lose()
        return False


def lose_place(member):
    """Let the member hear that the group does not know it."""
    group = member.consumer._core.group
    with group._lock:
        group._lose(MemberStage.JOINING)
        group._enter()


def test_no_record_of_a_lost_partition_is_handed_out_by_a_call_that_has_just_looked_for_events(four, crew):
    (a,) = crew.members("a")
    crew.until([a], lambda: a.records)
    with gate_of(a):
        a.consumer._core.inbox.events = LostBehindFirstLook(lambda: lose_place(a))
        assert a.consumer.consume(2, 0) == []
        assert a.calls == [assigned(0, 1, 2, 3), lost(0, 1, 2, 3)]


@both_strategies
def test_what_was_lost_while_on_assign_runs_and_polls_is_not_read(four, crew, strategy):
    clock = ManualClock()
    a = crew.member("a", {"txnstore.clock": clock, **strategy}).subscribe()
    gate = gate_of(a)

    def lose_and_poll(consumer, partitions):
        del a.actions["assign"]
        clock.advance(SESSION_MS)
        lose_place(a)
        assert consumer.poll(0) is None
        assert a.calls[-1] == lost(0, 1, 2, 3)

    a.actions["assign"] = lose_and_poll
    eventually(lambda: a.consumer._core.inbox.events)
    with gate:
        assert a.poll(0) is None
        assert a.partitions == []
    crew.until([a], lambda: a.partitions == [0, 1, 2, 3])
    assert a.moves == [assigned(0, 1, 2, 3), lost(0, 1, 2, 3), assigned(0, 1, 2, 3)]


@both_strategies
def test_nothing_of_what_is_lost_is_handed_out_while_on_lost_runs(four, crew, strategy):
    a = crew.member("a", strategy).subscribe()
    crew.until([a], lambda: a.records)
    told = []
    a.actions["lost"] = lambda consumer, _: told.append([consumer.poll(0.05) for _ in range(3)])
    with gate_of(a):
        lose_place(a)
        crew.until([a], lambda: told)
        assert told == [[None] * 3]


def leave_and_lose_place(member, log):
    """Let the member hear that the group does not know it, and let that be so."""
    with gate_of(member):
        leave(log.store, member.consumer._core.group.membership)
        lose_place(member)


def poll_once_it_is_back(member):
    """Let the group answer the new member, and then serve whatever there is to serve."""
    eventually(lambda: member.consumer._core.group._protocol.has_answer, PATIENCE_SECONDS)
    # What was lost, the answer, and what comes of it.
    assert [member.consumer.poll(0) for _ in range(4)] == [None] * 4


@both_strategies
def test_what_comes_back_while_on_lost_runs_and_polls_is_assigned_behind_it(four, crew, make_consumer, log, strategy):
    """Otherwise what is stored of what was lost would be committed in the new one's name, and nothing be read."""
    settings = {"enable.auto.commit": True, "auto.commit.interval.ms": 3_600_000}
    a = crew.member("a", {**settings, **strategy}).subscribe()
    a.actions["lost"] = lambda *_: poll_once_it_is_back(a)
    crew.until([a], lambda: len(a.records) == 4 * RECORDS)
    with gate_of(a):
        leave_and_lose_place(a, log)
        # As another owner of it would.
        make_consumer().commit(offsets=[TP("t", 0, 2)], asynchronous=False)
    del a.records[:]
    crew.until([a], lambda: len(a.records) == 4 * RECORDS - 2)
    assert a.moves == [assigned(0, 1, 2, 3), lost(0, 1, 2, 3), assigned(0, 1, 2, 3)]
    assert min(a.places()) == ("t", 0, 2)


def test_what_comes_back_while_on_revoke_runs_and_polls_is_assigned_behind_it_though_the_rest_was_lost(four, crew, log):
    log.topic("u")
    a = crew.member("a", {"enable.auto.commit": False, **COOPERATIVE}).subscribe("t", "u")
    crew.until([a], lambda: len(a.records) == 4 * RECORDS)

    def lose_the_rest_too(*_):
        a.subscribe("t", "u")
        leave_and_lose_place(a, log)
        poll_once_it_is_back(a)

    a.actions["revoke"] = lose_the_rest_too
    a.taken()
    a.subscribe("u")
    del a.records[:]
    crew.until([a], lambda: len(a.records) == 4 * RECORDS)
    assert a.moves == [revoked(0, 1, 2, 3), lost(("u", 0)), assigned(0, 1, 2, 3, ("u", 0))]


# --- max.poll.interval.ms -----------------------------------------------------------------------------------------


@pytest.mark.slow
@both_strategies
def test_others_take_over_from_an_application_that_does_not_poll_and_its_next_poll_rejoins(four, crew, strategy):
    (a,) = crew.members("a", **LATE, **strategy)
    crew.until_shared([a], [0, 1, 2, 3])
    (b,) = crew.members("b", **strategy)
    crew.until([a, b], lambda: len(a.partitions) == len(b.partitions) == 2)
    had = a.partitions
    first_id = a.consumer.memberid()
    a.taken()
    b.taken()
    # Nobody polls `a`: a clean leave, of which the other hears at once.
    crew.until([b], lambda: b.partitions == [0, 1, 2, 3])
    assert a.calls == []
    assert a.refused("commit", offsets=[TP("t", had[0], 1)], asynchronous=False).code() == KafkaError.UNKNOWN_MEMBER_ID
    # Until it is told of the loss it has two partitions as well.
    crew.until([a, b], lambda: len(a.moves) > 1 and len(a.partitions) == len(b.partitions) == 2)
    assert a.error_codes == [KafkaError._MAX_POLL_EXCEEDED]
    assert a.errors[0].str().startswith("Application maximum poll interval (4000ms) exceeded by ")
    assert not a.errors[0].fatal()
    assert a.moves == [lost(*had), assigned(*a.partitions)]
    assert a.consumer.memberid() not in (None, first_id)


def until_it_has_outlived_its_session(crew, log, clock, polled):
    """Let the session of member a pass twice, but never all of it since a was heard of, however busy the machine is."""
    session_ms = SHORT_SESSION["session.timeout.ms"]

    def is_heard_of():
        (a,) = [member for member in log.members() if member.client_id == "a"]
        return a.deadline_ms == clock.now_ms() + session_ms

    for _ in range(3):
        clock.advance(3 * session_ms // 4)
        crew.until(polled, is_heard_of)


@pytest.mark.slow
def test_a_heartbeat_is_sent_while_the_application_computes(four, crew, log):
    """Longer than the session, and shorter than max.poll.interval.ms: it keeps its place."""
    clock = ManualClock()
    (a,) = crew.members("a", txnstore_clock=clock, **SHORT_SESSION)
    (b,) = crew.members("b", txnstore_clock=clock, **LOOKS_OFTEN)
    crew.until_shared([a, b], [0, 1], [2, 3])
    generation = a.generation
    a.taken()
    until_it_has_outlived_its_session(crew, log, clock, [b])
    a.poll(0)
    assert (a.calls, a.partitions, a.generation) == ([], [0, 1], generation)
    a.consumer.commit(offsets=[TP("t", 0, 1)], asynchronous=False)


def test_a_place_is_kept_through_a_rebalance_that_the_application_has_no_time_for(four, crew, log):
    """Others wait for it, and for nobody else; its commits count all the while."""
    clock = ManualClock()
    (a,) = crew.members("a", enable_auto_commit=False, txnstore_clock=clock, **SHORT_SESSION)
    crew.until_shared([a], [0, 1, 2, 3])
    (b,) = crew.members("b", txnstore_clock=clock)
    crew.until([b], lambda: len(log.members()) == 2)
    until_it_has_outlived_its_session(crew, log, clock, [b])
    assert b.partitions == []
    a.consumer.commit(offsets=[TP("t", 2, 4)], asynchronous=False)
    crew.until_shared([a, b], [0, 1], [2, 3])
    assert a.calls == [assigned(0, 1, 2, 3), revoked(0, 1, 2, 3), assigned(0, 1)]
    crew.until([b], lambda: ("t", 2, 4) in b.places())
    assert ("t", 2, 3) not in b.places()


@pytest.mark.slow
def test_a_late_application_with_a_static_name_is_told_too(four, crew):
    clock = ManualClock()
    (a,) = crew.members("a", group_instance_id="one", txnstore_clock=clock, **LATE)
    (b,) = crew.members("b", group_instance_id="two", txnstore_clock=clock, **LOOKS_OFTEN)
    crew.until_shared([a, b], [0, 1], [2, 3])
    a.taken()
    crew.until([b], lambda: a.consumer._core.group._stage is MemberStage.LAPSED)
    # It keeps its name until its session ends, which others see at their heartbeats.
    clock.advance(LATE["session.timeout.ms"])
    crew.until([b], lambda: b.partitions == [0, 1, 2, 3])
    # Until it is told of the loss it has two partitions as well.
    crew.until([a, b], lambda: len(a.moves) > 1 and len(a.partitions) == len(b.partitions) == 2)
    assert a.error_codes == [KafkaError._MAX_POLL_EXCEEDED]
    assert a.moves == [lost(0, 1), assigned(0, 1)]


@pytest.mark.slow
def test_an_application_that_waits_in_consume_is_not_late(four, crew, log):
    (a,) = crew.members("a", **LATE)
    crew.until([a], lambda: len(a.records) == 4 * RECORDS)
    assert a.consumer.consume(1, 1.5 * LATE["max.poll.interval.ms"] / 1000) == []
    assert [member.client_id for member in log.members()] == ["a"]
    assert a.calls == [assigned(0, 1, 2, 3)]


@pytest.mark.slow
@both_strategies
def test_who_has_unsubscribed_and_is_late_does_not_come_back(four, crew, log, strategy):
    (a,) = crew.members("a", **LATE, **strategy)
    crew.until([a], lambda: len(a.records) == 4 * RECORDS)
    a.consumer.unsubscribe()
    eventually(lambda: log.members() == [], PATIENCE_SECONDS)
    # The next poll tells of what was given back, and of nothing else.
    a.poll()
    assert (a.calls, a.errors, a.partitions) == ([assigned(0, 1, 2, 3), revoked(0, 1, 2, 3)], [], [])
    assert not a.consumer._core.group.is_subscribed
    a.consumer.assign([TP("t", 0)])
    a.consumer.commit(offsets=[TP("t", 0, 1)], asynchronous=False)


@pytest.mark.slow
def test_a_late_application_that_closes_is_told_that_all_is_lost(four, crew, log):
    (a,) = crew.members("a", **LATE)
    crew.until_shared([a], [0, 1, 2, 3])
    eventually(lambda: log.members() == [], PATIENCE_SECONDS)
    a.close()
    assert a.calls == [assigned(0, 1, 2, 3), lost(0, 1, 2, 3)]

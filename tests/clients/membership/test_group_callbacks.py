"""Groups of several members: what the callbacks are told, in the order that was seen, and what they may do."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.clients.consumer.log_writer import PATIENCE_SECONDS, eventually
from tests.clients.membership.steps import (
    COOPERATIVE,
    EAGER_AND_COOPERATIVE,
    ROUND_ROBIN,
    STRATEGY_NAMES,
    TP,
    TURN_SECONDS,
    assigned,
    revoked,
)
from tests.clients.moments import attempt, every_interrupt
from txnstore import OFFSET_INVALID, KafkaError
from txnstore.clients.consumer.events import RebalanceEvent, RebalanceKind
from txnstore.clients.membership.member import MemberStage
from txnstore.clients.outlet import lease_seconds
from txnstore.groups.group import AnswerStatus, MemberAnswer
from txnstore.model import PartitionName

pytestmark = pytest.mark.slow_on_postgresql

both_strategies = pytest.mark.parametrize("strategy", EAGER_AND_COOPERATIVE, ids=STRATEGY_NAMES)
RECORDS = 20
ATOMIC = {"txnstore.delivery.order": "commit", "txnstore.delivery.atomic": True}


@pytest.fixture
def four(log):
    """A topic t of four partitions, with records that tell their place."""
    log.topic(partition_count=4)
    for number in range(4):
        log.write("t", number, *(b"%d-%d" % (number, offset) for offset in range(RECORDS)))


def all_places():
    return [("t", number, offset) for number in range(4) for offset in range(RECORDS)]


def test_eager_members_are_told_in_the_order_that_was_seen(four, crew):
    (a,) = crew.members("a")
    crew.until_shared([a], [0, 1, 2, 3])
    (b,) = crew.members("b")
    crew.until_shared([a, b], [0, 1], [2, 3])
    assert crew.calls[:2] == [("a", *assigned(0, 1, 2, 3)), ("a", *revoked(0, 1, 2, 3))]
    assert sorted(crew.calls[2:]) == [("a", *assigned(0, 1)), ("b", *assigned(2, 3))]
    del crew.calls[:]
    b.close()
    crew.until([a], lambda: a.partitions == [0, 1, 2, 3])
    a.close()
    assert crew.calls == [
        ("b", *revoked(2, 3)),
        ("a", *revoked(0, 1)),
        ("a", *assigned(0, 1, 2, 3)),
        ("a", *revoked(0, 1, 2, 3)),
    ]


def test_round_robin_members_have_every_second_partition(four, crew):
    (a,) = crew.members("a", **ROUND_ROBIN)
    crew.until_shared([a], [0, 1, 2, 3])
    (b,) = crew.members("b", **ROUND_ROBIN)
    crew.until_shared([a, b], [0, 2], [1, 3])
    b.close()
    crew.until([a], lambda: a.partitions == [0, 1, 2, 3])
    assert a.calls == [
        assigned(0, 1, 2, 3),
        revoked(0, 1, 2, 3),
        assigned(0, 2),
        revoked(0, 2),
        assigned(0, 1, 2, 3),
    ]
    assert b.calls == [assigned(1, 3), revoked(1, 3)]


def test_cooperative_members_give_back_only_what_moves(four, crew):
    (a,) = crew.members("a", **COOPERATIVE)
    crew.until_shared([a], [0, 1, 2, 3])
    (b,) = crew.members("b", **COOPERATIVE)
    crew.until([a, b], lambda: len(a.partitions) == len(b.partitions) == 2 and len(a.calls) == 3)
    moved = b.partitions
    assert a.calls == [assigned(0, 1, 2, 3), revoked(*moved), assigned()]
    assert b.moves == [assigned(*moved)]
    kept = a.partitions
    a.taken()
    b.close()
    assert b.moves == [assigned(*moved), revoked(*moved)]
    crew.until([a], lambda: a.partitions == [0, 1, 2, 3])
    assert a.calls == [assigned(*moved)]
    a.close()
    assert a.calls == [assigned(*moved), revoked(*sorted([*kept, *moved]))]


@both_strategies
def test_a_third_member_leaves_everybody_his_share(four, crew, log, strategy):
    log.grow("t", 6)
    members = crew.members("abc", **strategy)
    crew.until(members, lambda: [len(member.partitions) for member in members] == [2, 2, 2])
    assert sorted(number for member in members for number in member.partitions) == list(range(6))
    assert len({member.generation for member in members}) == 1
    for member in members[1:]:
        member.close()
    crew.until(members[:1], lambda: members[0].partitions == list(range(6)))


@both_strategies
def test_members_without_callbacks_share_all_the_same(four, crew, make_consumer, strategy):
    a, b = (make_consumer(strategy) for _ in range(2))
    a.subscribe(["t"])
    assert a.poll(PATIENCE_SECONDS) is not None
    b.subscribe(["t"])
    for _ in range(2000):
        for consumer in (a, b):
            consumer.poll(0.01)
        if len(a.assignment()) == len(b.assignment()) == 2:
            break
    shares = [{partition.partition for partition in consumer.assignment()} for consumer in (a, b)]
    assert sorted(map(len, shares)) == [2, 2]
    assert set.union(*shares) == {0, 1, 2, 3}


def test_nothing_is_said_and_nothing_changes_until_the_application_polls(four, crew):
    (a,) = crew.members("a")
    crew.until_shared([a], [0, 1, 2, 3])
    (b,) = crew.members("b")
    # It waits for what the other has yet to give back.
    assert b.poll(0.5) is None
    assert (b.calls, b.partitions) == ([], [])
    assert (a.calls, a.partitions) == ([assigned(0, 1, 2, 3)], [0, 1, 2, 3])
    a.consumer.commit(offsets=[TP("t", 3, 5)], asynchronous=False)
    crew.until_shared([a, b], [0, 1], [2, 3])
    crew.until([b], lambda: len(b.records) == 2 * RECORDS - 5)
    assert min(place for place in b.places() if place[1] == 3) == ("t", 3, 5)


# --- callbacks that do it themselves ------------------------------------------------------------------------------


def test_callbacks_of_an_eager_group_may_assign_and_unassign(four, crew):
    (a,) = crew.members("a")
    a.actions["assign"] = lambda consumer, partitions: consumer.assign(
        [TP("t", partition.partition, RECORDS - 1) for partition in partitions]
    )
    a.actions["revoke"] = lambda consumer, _: consumer.unassign()
    crew.until([a], lambda: len(a.records) == 4)
    (b,) = crew.members("b")
    b.actions = a.actions
    crew.until([a, b], lambda: len(a.records) == 6 and len(b.records) == 2)
    assert {place[2] for place in a.places() + b.places()} == {RECORDS - 1}
    assert {place[1] for place in b.places()} == {2, 3}
    b.close()
    crew.until([a], lambda: a.partitions == [0, 1, 2, 3])
    assert a.moves[-2:] == [revoked(0, 1), assigned(0, 1, 2, 3)]


def test_callbacks_of_a_cooperative_group_may_assign_and_unassign_what_comes_and_goes(four, crew):
    (a,) = crew.members("a", **COOPERATIVE)
    a.actions["assign"] = lambda consumer, partitions: consumer.incremental_assign(
        [TP("t", partition.partition, RECORDS - 1) for partition in partitions]
    )
    a.actions["revoke"] = lambda consumer, partitions: consumer.incremental_unassign(partitions)
    crew.until([a], lambda: len(a.records) == 4)
    (b,) = crew.members("b", **COOPERATIVE)
    b.actions = a.actions
    crew.until([a, b], lambda: len(b.records) == 2)
    # Who keeps a partition reads on where he was.
    assert len(a.records) == 4
    assert sorted(a.partitions + b.partitions) == [0, 1, 2, 3]
    assert {place[2] for place in a.places() + b.places()} == {RECORDS - 1}


@both_strategies
def test_a_callback_may_refuse_to_read_and_the_partitions_are_still_the_members_own(four, crew, log, strategy):
    (a,) = crew.members("a", **strategy)

    def refuse(consumer, _):
        if strategy == COOPERATIVE:
            consumer.incremental_assign([])
        else:
            consumer.unassign()

    a.actions["assign"] = refuse
    crew.until([a], lambda: a.calls)
    assert a.poll(0.2) is None
    assert a.partitions == []
    (b,) = crew.members("b", **strategy)
    crew.until([a, b], lambda: len(b.partitions) == 2)
    assert (a.partitions, len(a.records)) == ([], 0)
    by_name = {member.client_id: {tp.partition for tp in member.owned} for member in log.members()}
    assert by_name["b"] == set(b.partitions)
    assert by_name["a"] == {0, 1, 2, 3} - by_name["b"]


@pytest.mark.slow_but_first
@both_strategies
def test_a_position_may_be_sought_within_the_callback(four, crew, strategy):
    def from_the_last(consumer, partitions):
        if strategy == COOPERATIVE:
            consumer.incremental_assign(partitions)
        else:
            consumer.assign(partitions)
        for partition in partitions:
            consumer.seek(TP("t", partition.partition, RECORDS - 1))

    a, b = crew.members("ab", **strategy)
    a.actions["assign"] = b.actions["assign"] = from_the_last
    crew.until([a, b], lambda: {place[1] for place in a.places() + b.places()} == {0, 1, 2, 3})
    assert {place[2] for place in a.places() + b.places()} == {RECORDS - 1}


@pytest.mark.slow_but_first
@both_strategies
@pytest.mark.parametrize("kind", ["assign", "revoke"])
def test_what_a_callback_raises_comes_out_of_poll_and_the_group_goes_on(four, crew, strategy, kind):
    failures: list[str] = []

    def fail(consumer, partitions):
        if not failures:
            failures.append(kind)
            raise ZeroDivisionError(kind)

    (a,) = crew.members("a", **strategy)
    a.actions[kind] = fail
    members = [a]

    def polled():
        crew.until(members, lambda: len(a.partitions) == 2 and len(members[-1].partitions) == 2)

    with pytest.raises(ZeroDivisionError, match=kind):  # noqa: PT012 - the one comes with the first poll, the other later
        crew.until([a], lambda: len(a.partitions) == 4)
        members += crew.members("b", **strategy)
        polled()
    if len(members) == 1:
        members += crew.members("b", **strategy)
    polled()
    assert sorted(a.partitions + members[1].partitions) == [0, 1, 2, 3]
    a.close()
    crew.until(members[1:], lambda: members[1].partitions == [0, 1, 2, 3])


# --- offsets and the next owner -----------------------------------------------------------------------------------


def commit_synchronously(consumer, _partitions):
    positions = [position for position in consumer.position(consumer.assignment()) if position.offset >= 0]
    if positions:
        consumer.commit(offsets=positions, asynchronous=False)


def commit_in_background(consumer, _partitions):
    positions = [position for position in consumer.position(consumer.assignment()) if position.offset >= 0]
    if positions:
        consumer.commit(offsets=positions)


BY_HAND = {"enable.auto.commit": False}
WAYS_TO_COMMIT: dict[str, tuple[dict[str, Any], Callable[..., None] | None]] = {
    "sync": (BY_HAND, commit_synchronously),
    "async": (BY_HAND, commit_in_background),
    # Not by the clock: only because partitions are given back.
    "auto": ({"enable.auto.commit": True, "auto.commit.interval.ms": 3_600_000}, None),
    "auto without clock": ({"enable.auto.commit": True, "auto.commit.interval.ms": 0}, None),
}


@pytest.mark.slow_but_first
@both_strategies
@pytest.mark.parametrize("way", WAYS_TO_COMMIT)
def test_the_next_owner_starts_exactly_where_the_former_one_stopped(four, crew, make_consumer, strategy, way):
    """Members come and go in the middle of everything; each record is handed out once."""
    configuration, commit = WAYS_TO_COMMIT[way]

    def come(name):
        (member,) = crew.members(name, **strategy, **configuration)
        if commit is not None:
            member.actions["revoke"] = commit
        return member

    everybody = [come("a")]
    a = everybody[0]
    crew.until([a], lambda: len(a.records) >= 7)
    everybody.append(come("b"))
    b = everybody[1]
    crew.until([a, b], lambda: len(b.records) >= 3)
    everybody.append(come("c"))
    c = everybody[2]
    crew.until([a, b, c], lambda: c.partitions)
    b.close()
    crew.until([a, c], lambda: len(a.partitions) == len(c.partitions) == 2)
    a.close()
    crew.until([c], lambda: sum(len(member.records) for member in everybody) >= 4 * RECORDS)
    assert c.poll(0.2) is None
    assert sorted(place for member in everybody for place in member.places()) == all_places()
    c.close()
    simple = make_consumer()
    assert [tp.offset for tp in simple.committed([TP("t", number) for number in range(4)])] == [RECORDS] * 4


@pytest.mark.slow_but_first
@both_strategies
@pytest.mark.parametrize("call", ["unsubscribe", "close"])
def test_who_leaves_within_on_revoke_has_given_back_and_committed_everything_before(four, crew, strategy, call):
    configuration, _ = WAYS_TO_COMMIT["auto"]
    (a,) = crew.members("a", **strategy, **configuration)

    def leave(consumer, _):
        # What is left is given back in a round of its own, within this one if it closes.
        del a.actions["revoke"]
        getattr(consumer, call)()

    a.actions["revoke"] = leave
    crew.until([a], lambda: len(a.records) == 4 * RECORDS)
    (b,) = crew.members("b", **strategy, **configuration)
    with contextlib.suppress(RuntimeError):  # "Consumer closed"
        crew.until([a, b], lambda: b.partitions == [0, 1, 2, 3])
    crew.until([b], lambda: b.partitions == [0, 1, 2, 3])
    assert b.poll(0.2) is None
    assert [tp.offset for tp in b.consumer.committed([TP("t", number) for number in range(4)])] == [RECORDS] * 4
    assert sorted(place for call in a.moves[1:] for place in call[1]) == [0, 1, 2, 3]


@both_strategies
def test_nobody_takes_what_was_answered_before_a_report_that_does_not_have_it(four, crew, strategy):
    a, b = crew.member("a", strategy).subscribe(), crew.member("b", strategy)
    group = a.consumer._core.group
    eventually(lambda: group._protocol.has_answer)
    b.subscribe()
    eventually(lambda: b.consumer._core.group._protocol.has_answer)
    heard, goes_on = threading.Event(), threading.Event()
    heartbeat = group._requests.heartbeat

    def slowly(report, **named):
        answer = heartbeat(report, **named)
        heard.set()
        assert goes_on.wait(PATIENCE_SECONDS)
        return answer

    group._requests.heartbeat = slowly
    with a.consumer._core.arrived:
        group._next_request_at = 0.0
        group._work_due.notify_all()
    assert heard.wait(PATIENCE_SECONDS)
    group._requests.heartbeat = heartbeat
    # The group has heard that it has nothing, and gives the other one its share.
    a.poll()
    crew.until([b], lambda: b.partitions)
    goes_on.set()
    crew.until_shared([a, b], [0, 1], [2, 3])


def test_news_wait_for_the_application_to_take_the_answer_that_is_there(four, crew):
    a = crew.member("a").subscribe()
    group = a.consumer._core.group
    eventually(lambda: group._protocol.has_answer)
    with a.consumer._core.arrived:
        group._request_heartbeat()
        work, _ = group.next_work()
        assert work is None
        step = group._protocol._step
    crew.until([a], lambda: a.partitions)
    eventually(lambda: group._protocol._step > step and not group._has_news)


@pytest.mark.slow_but_first
@both_strategies
@pytest.mark.parametrize("kind", ["assign", "revoke"])
@pytest.mark.parametrize("interrupted", ["change_assignment", "served"])
def test_a_rebalance_that_is_interrupted_behind_its_callback_is_ended_all_the_same(
    four, crew, monkeypatch, strategy, kind, interrupted
):
    a, b = crew.member("a", strategy), crew.member("b", strategy)
    owner = a.consumer._core.group if interrupted == "served" else a.consumer._core
    do, interrupts = getattr(owner, interrupted), iter([KeyboardInterrupt] * 3)

    def begin(event):
        if event.kind.value == kind:
            for interrupt in interrupts:
                raise interrupt
        do(event)

    monkeypatch.setattr(owner, interrupted, begin)
    a.subscribe()
    if kind == "revoke":
        crew.until([a], lambda: a.partitions)
        b.subscribe()
    with pytest.raises(KeyboardInterrupt):
        crew.until([a, b], lambda: False)
    if kind == "assign":
        crew.until([a], lambda: a.partitions == [0, 1, 2, 3])
        b.subscribe()
    crew.until([a, b], lambda: len(a.partitions) == len(b.partitions) == 2)


@pytest.mark.parametrize("kind", ["assign", "revoke"])
def test_a_rebalance_that_fails_twice_behind_its_callback_keeps_no_other_member_waiting(four, crew, monkeypatch, kind):
    (a,), b = crew.members("a"), crew.member("b")
    core, failures = a.consumer._core, iter(["first", "again"])
    change = core.change_assignment

    def fail(event):
        if event.kind.value == kind:
            for failure in failures:
                raise RuntimeError(failure)
        change(event)

    monkeypatch.setattr(core, "change_assignment", fail)
    if kind == "revoke":
        crew.until([a], lambda: a.partitions)
        b.subscribe()
    with pytest.raises(RuntimeError, match="again"):
        crew.until([a, b], lambda: False)
    if kind == "assign":
        b.subscribe()
    crew.until([a, b], lambda: len(a.partitions) == len(b.partitions) == 2)


def test_a_consumer_that_leaves_gives_its_partitions_back_wherever_its_call_is_interrupted(crew, monkeypatch):
    consumer, place = crew.member("a").consumer, PartitionName("t", 0)
    core, told = consumer._core, list[object]()
    group, protocol = core.group, core.group._protocol
    monkeypatch.setattr(group, "_submit", lambda work: work() or True)
    monkeypatch.setattr(group._requests, "leave", lambda membership: None)
    files = {"clients/callbacks.py", "consumer/consumer.py", "membership/member.py", "membership/protocol.py"}
    for _, moment in every_interrupt(files):
        protocol.begin_anew()
        group._stage, group._topics = MemberStage.MEMBER, ("t",)
        consumer._rebalance_callbacks = {RebalanceKind.REVOKE: lambda _, given: told.extend(given)}
        protocol.owned = frozenset([place])
        del told[:]
        attempt(moment, consumer.unsubscribe)
        consumer.unsubscribe()
        while core.inbox.events:
            consumer._serve_one()
        assert told == [TP("t", 0)], moment.where
        assert group._stage is MemberStage.OUT, moment.where


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", ["assign", "revoke"])
def test_a_rebalance_is_told_once_and_ended_wherever_the_call_that_tells_of_it_is_interrupted(crew, monkeypatch, kind):
    consumer = crew.member("a").consumer
    core, place = consumer._core, PartitionName("t", 0)
    told: list[object] = []
    group, protocol = core.group, core.group._protocol
    monkeypatch.setattr(core.fetcher, "start", lambda: None)
    monkeypatch.setattr(group, "_submit", lambda work: work() or True)
    consumer._rebalance_callbacks = {
        RebalanceKind.ASSIGN: lambda _, given: told.extend("assign" for _ in given),
        RebalanceKind.REVOKE: lambda _, given: told.extend("revoke" for _ in given),
    }

    def answer():
        """Answer a heartbeat as the group does."""
        group._has_news = False
        request = protocol.request()
        takes_away = kind == "revoke" and bool(protocol.owned)
        answered = MemberAnswer(
            status=AnswerStatus.REVOKE if takes_away else AnswerStatus.OWN,
            membership=replace(protocol.identity, generation=2),
            step=request.report.step,
            partitions=(place,) if kind == "assign" else (),
            revoke=(place,) if takes_away else (),
            assignor="range",
            is_cooperative=False,
            is_settled=True,
        )
        with core.arrived:
            group._answered(answered, lease_seconds(), request)

    files = {"clients/callbacks.py", "consumer/consumer.py", "consumer/core.py"}
    for _, moment in every_interrupt(files | {"membership/member.py", "membership/protocol.py"}):
        protocol.begin_anew()
        group._stage = MemberStage.MEMBER
        core.subscription.clear()
        del told[:]
        if kind == "revoke":
            protocol.owned = frozenset([place])
            core.subscription.add("t", 0, 0)
        answer()
        attempt(moment, lambda: [consumer._serve_one() for _ in range(2)])
        for _ in range(3):
            if group._has_news:
                answer()
            while core.inbox.events:
                consumer._serve_one()
        assert told == [kind], moment.where
        assert len(core.subscription) == len(protocol.owned) == (kind == "assign"), moment.where
        unfinished = protocol.is_changing, protocol.revoked, group._revoking, group._untold
        assert not any(unfinished), moment.where
    group._stage = MemberStage.OUT


def test_an_eager_member_that_gets_a_partition_again_goes_on_where_it_committed(four, crew):
    (a,) = crew.members("a", enable_auto_commit=False)
    crew.until([a], lambda: len(a.records) == 4 * RECORDS)
    a.consumer.commit(offsets=[TP("t", 0, 3)], asynchronous=False)
    del a.records[:]
    (b,) = crew.members("b", enable_auto_commit=False)
    crew.until([a, b], lambda: len(a.records) == 2 * RECORDS - 3)
    assert sorted(a.places()) == [place for place in all_places() if place[1] < 2 and place[1:] >= (0, 3)]


def test_commits_that_are_made_while_partitions_are_given_back_are_told_by_on_commit(four, crew):
    answers = []
    configuration = {
        "enable.auto.commit": False,
        "on_commit": lambda error, partitions: answers.append(
            (error, [(tp.partition, tp.offset) for tp in partitions])
        ),
    }
    a = crew.member("a", configuration).subscribe()
    a.actions["revoke"] = lambda consumer, _: consumer.commit(offsets=[TP("t", 3, 7)])
    crew.until_shared([a], [0, 1, 2, 3])
    (b,) = crew.members("b")
    crew.until([a, b], lambda: answers)
    assert answers == [(None, [(3, 7)])]
    crew.until([a, b], lambda: any(place[1] == 3 for place in b.places()))
    assert next(place for place in b.places() if place[1] == 3) == ("t", 3, 7)


def test_the_partitions_are_still_assigned_while_on_revoke_runs_and_not_any_more_after_it(four, crew):
    seen = []
    (a,) = crew.members("a")
    a.actions["revoke"] = lambda consumer, partitions: seen.append(
        (a.partitions, consumer.position([TP("t", 0)])[0].offset, consumer.memberid() is not None)
    )
    crew.until([a], lambda: len(a.records) == 4 * RECORDS)
    (b,) = crew.members("b")
    crew.until([a, b], lambda: b.partitions)
    assert seen == [([0, 1, 2, 3], RECORDS, True)]
    assert a.consumer.position([TP("t", 3)])[0].offset == OFFSET_INVALID
    assert a.refused("seek", TP("t", 3, 0)).code() == KafkaError._STATE


@pytest.mark.slow_but_first
@both_strategies
def test_nothing_of_what_goes_is_handed_out_while_on_revoke_runs(four, crew, strategy):
    # Its application would have it twice, or never: on_revoke commits what was handed out before.
    handed_out = []

    def poll_on(consumer, partitions):
        gone = {partition.partition for partition in partitions}
        for _ in range(10):
            message = consumer.poll(TURN_SECONDS)
            if message is not None and message.partition() in gone:
                handed_out.append(message)
            elif message is not None:
                a.records.append(message)

    (a,) = crew.members("a", **strategy)
    a.actions["revoke"] = poll_on
    crew.until([a], lambda: a.records)
    (b,) = crew.members("b", **strategy)
    crew.until([a, b], lambda: len(a.records) + len(b.records) >= 4 * RECORDS)
    assert handed_out == []
    assert sorted(a.places() + b.places()) == all_places()


def test_what_a_callback_keeps_of_what_was_to_go_is_read_on(four, crew, log):
    (a,) = crew.members("a", **COOPERATIVE)
    a.actions["revoke"] = lambda consumer, partitions: consumer.incremental_unassign(partitions[1:])
    crew.until([a], lambda: len(a.records) == 4 * RECORDS)
    crew.members("b", **COOPERATIVE)
    crew.until([a], lambda: len(a.moves) == 2)
    (_, (kept, *_)) = a.moves[-1]
    log.write("t", kept, b"later")
    # Not by the member, who would say that it is not its own any more.
    message = a.consumer.poll(PATIENCE_SECONDS)
    assert (message.partition(), message.value()) == (kept, b"later")


@pytest.mark.slow_but_first
@pytest.mark.parametrize("configuration", [*EAGER_AND_COOPERATIVE, ATOMIC], ids=[*STRATEGY_NAMES, "atomic"])
def test_what_the_application_says_of_pauses_while_on_revoke_runs_is_for_afterwards(four, crew, configuration):
    a = crew.member("a", configuration).subscribe()
    consumer, core = a.consumer, a.consumer._core
    crew.until([a], lambda: a.records)
    handed_out: list[object] = []

    def pause_and_poll(_, partitions):
        kept, *gone = partitions
        # As another thread may that had paused them all.
        consumer.resume(gone)
        handed_out.extend(consumer.poll(TURN_SECONDS) for _ in range(3))
        consumer.pause([kept])
        core.is_assigned_by_application = True
        core.remove(gone)

    a.actions["revoke"] = pause_and_poll
    consumer.unsubscribe()
    crew.until([a], lambda: len(a.calls) == 2)
    assert handed_out == [None] * 3
    assert a.partitions == [0]
    assert consumer.poll(TURN_SECONDS) is None
    consumer.resume([TP("t", 0)])
    assert consumer.poll(PATIENCE_SECONDS).partition() == 0


@pytest.mark.parametrize("kind", ["revoke", "lost"])
def test_what_is_kept_is_read_on_wherever_the_call_that_takes_it_away_is_interrupted(crew, monkeypatch, kind):
    consumer = crew.member("a").consumer
    core = consumer._core
    monkeypatch.setattr(core.fetcher, "start", lambda: None)

    def keep(*_):
        core.is_assigned_by_application = True

    core.subscription.add("t", 0, 0)
    (kept,) = core.subscription
    consumer._rebalance_callbacks = dict.fromkeys(RebalanceKind, keep)
    event = RebalanceEvent(RebalanceKind(kind), (("t", 0),), core.group._protocol.incarnation - 1)
    for _, moment in every_interrupt({"consumer/core.py", "consumer/subscription.py"}, lambda *_: False):
        core.inbox.put(event)
        attempt(moment, consumer._serve_one)
        while core.inbox.events:
            consumer._serve_one()
        assert core.find(TP("t", 0)) is kept, moment.where
        assert not kept.paused_by, moment.where

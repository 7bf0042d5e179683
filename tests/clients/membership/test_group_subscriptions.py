"""Groups whose members want different things: assignors, topics, patterns; what grows, comes and goes; who leaves."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import pytest

from tests.clients.consumer.log_writer import PATIENCE_SECONDS, eventually
from tests.clients.membership.steps import (
    COOPERATIVE,
    EAGER_AND_COOPERATIVE,
    RARE_HEARTBEATS,
    ROUND_ROBIN,
    SHORT_SESSION,
    STRATEGY_NAMES,
    TP,
    TURN_SECONDS,
    assigned,
    in_order,
    revoked,
)
from txnstore import OFFSET_BEGINNING, Consumer, KafkaError
from txnstore.admin import AdminClient
from txnstore.testing.manual_clock import ManualClock

pytestmark = [pytest.mark.slow_on_postgresql, pytest.mark.variants_on_sqlite]

both_strategies = pytest.mark.parametrize("strategy", EAGER_AND_COOPERATIVE, ids=STRATEGY_NAMES)
QUICK_REFRESH = {"topic.metadata.refresh.interval.ms": 50}


@pytest.fixture
def four(log):
    log.topic(partition_count=4)
    for number in range(4):
        log.write("t", number, b"%d" % number)


def strategies(*names):
    return {"partition.assignment.strategy": ",".join(names)}


def owned_by_all(members):
    return in_order(number for member in members for number in member.partitions)


# --- assignors ----------------------------------------------------------------------------------------------------


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("mine", "others", "shares"),
    [
        (["range", "roundrobin"], ["range", "roundrobin"], ([0, 1], [2, 3])),
        (["roundrobin", "range"], ["roundrobin"], ([0, 2], [1, 3])),
        (["range", "roundrobin"], ["roundrobin"], ([0, 2], [1, 3])),
        (["range", "roundrobin"], ["range"], ([0, 1], [2, 3])),
        # One for each: the first member's.
        (["roundrobin", "range"], ["range", "roundrobin"], ([0, 2], [1, 3])),
    ],
)
def test_the_group_agrees_on_an_assignor_that_all_support(four, crew, log, mine, others, shares):
    a = crew.member("a", strategies(*mine)).subscribe()
    crew.until_shared([a], [0, 1, 2, 3])
    b = crew.member("b", strategies(*others)).subscribe()
    crew.until_shared([a, b], *shares)
    assert log.group().assignor == ("roundrobin" if shares[0] == [0, 2] else "range")


@pytest.mark.parametrize(
    ("mine", "others"), [(["range"], ["roundrobin"]), (["cooperative-sticky"], ["range", "roundrobin"])]
)
def test_a_consumer_without_a_common_assignor_is_told_and_changes_nothing(four, crew, log, mine, others):
    a = crew.member("a", strategies(*mine)).subscribe()
    crew.until_shared([a], [0, 1, 2, 3])
    generation = a.generation
    b = crew.member("b", strategies(*others)).subscribe()
    crew.until([a, b], lambda: b.errors)
    error = b.errors[0]
    assert error.code() == KafkaError.INCONSISTENT_GROUP_PROTOCOL
    assert not error.fatal()
    assert "partition.assignment.strategy" in error.str()
    assert others[0] in error.str()
    assert (a.calls, a.errors, a.generation) == ([assigned(0, 1, 2, 3)], [], generation)
    assert [member.client_id for member in log.members()] == ["a"]
    # It can still be used: it has the group once the others are gone, and can do without a group meanwhile.
    assert b.consumer.list_topics("t", timeout=PATIENCE_SECONDS).topics["t"].error is None
    assert b.consumer.memberid() is None
    a.close()
    b.subscribe()
    crew.until_shared([b], [0, 1, 2, 3])


def test_a_refused_consumer_may_unsubscribe_and_close(four, crew):
    a = crew.member("a", ROUND_ROBIN).subscribe()
    crew.until_shared([a], [0, 1, 2, 3])
    b = crew.member("b", strategies("range")).subscribe()
    crew.until([b], lambda: b.errors)
    b.consumer.unsubscribe()
    assert b.poll(0.1) is None
    b.close()
    assert (b.calls, a.partitions) == ([], [0, 1, 2, 3])


# --- topics -------------------------------------------------------------------------------------------------------


@pytest.mark.slow_but_first
@both_strategies
def test_members_with_different_subscriptions_have_what_they_subscribed_to(four, crew, log, strategy):
    log.topic("u", 2)
    log.topic("v", 1)
    a, b, c = (crew.member(name, strategy) for name in "abc")
    a.subscribe("t", "u")
    b.subscribe("u", "v")
    c.subscribe("t")
    members = [a, b, c]
    everything = [0, 1, 2, 3, ("u", 0), ("u", 1), ("v", 0)]
    crew.until(members, lambda: owned_by_all(members) == everything and all(member.partitions for member in members))
    topics = [{tp.topic for tp in member.consumer.assignment()} for member in members]
    assert topics[0] <= {"t", "u"}
    assert topics[1] <= {"u", "v"}
    assert topics[2] == {"t"}
    b.close()
    # Nobody else wants v.
    crew.until([a, c], lambda: owned_by_all([a, c]) == everything[:-1])


@both_strategies
def test_a_pattern_takes_what_comes_and_shares_it(four, crew, log, strategy):
    members = [crew.member(name, {**strategy, **QUICK_REFRESH}).subscribe("^t.*", "^[xy]$") for name in "ab"]
    crew.until(members, lambda: [len(member.partitions) for member in members] == [2, 2])
    log.topic("tango", 2)
    log.topic("other", 2)
    log.write("tango", 0, b"new")
    log.write("tango", 1, b"new")
    crew.until(members, lambda: [len(member.partitions) for member in members] == [3, 3])
    assert owned_by_all(members) == [0, 1, 2, 3, ("tango", 0), ("tango", 1)]
    crew.until(members, lambda: sum(member.values.count(b"new") for member in members) == 2)


@pytest.mark.slow_but_first
@both_strategies
def test_a_topic_that_grows_is_shared_anew(four, crew, log, strategy):
    members = [crew.member(name, {**strategy, **QUICK_REFRESH}).subscribe() for name in "ab"]
    crew.until(members, lambda: [len(member.partitions) for member in members] == [2, 2])
    had = [member.partitions for member in members]
    for member in members:
        member.taken()
    log.grow("t", 6)
    log.write("t", 5, b"grown")
    crew.until(members, lambda: [len(member.partitions) for member in members] == [3, 3])
    assert owned_by_all(members) == [0, 1, 2, 3, 4, 5]
    crew.until(members, lambda: any(b"grown" in member.values for member in members))
    first_moves = [member.moves[0] for member in members]
    if strategy == COOPERATIVE:
        assert {kind for kind, _ in first_moves} == {"assign"}
    else:
        assert first_moves == [revoked(*share) for share in had]


def test_one_member_that_sees_a_topic_grow_is_enough(four, crew, log):
    """The other looks for partitions every five minutes."""
    a = crew.member("a", QUICK_REFRESH).subscribe()
    b = crew.member("b").subscribe()
    crew.until_shared([a, b], [0, 1], [2, 3])
    log.grow("t", 6)
    crew.until_shared([a, b], [0, 1, 2], [3, 4, 5])


@both_strategies
def test_a_topic_that_comes_later_is_taken(crew, log, strategy):
    members = [crew.member(name, {**strategy, **QUICK_REFRESH}).subscribe("t") for name in "ab"]
    crew.until(members, lambda: all(member.errors for member in members))
    assert {code for member in members for code in member.error_codes} == {KafkaError.UNKNOWN_TOPIC_OR_PART}
    log.topic("t", 4)
    crew.until(members, lambda: [len(member.partitions) for member in members] == [2, 2])
    assert owned_by_all(members) == [0, 1, 2, 3]


@both_strategies
def test_a_topic_that_is_deleted_is_taken_back(four, crew, log, url, strategy):
    log.topic("u", 2)
    members = [crew.member(name, {**strategy, **QUICK_REFRESH}).subscribe("t", "u") for name in "ab"]
    crew.until(members, lambda: [len(member.partitions) for member in members] == [3, 3])
    with AdminClient({"bootstrap.servers": url}) as admin:
        admin.delete_topics(["u"])["u"].result(PATIENCE_SECONDS)
    crew.until(members, lambda: owned_by_all(members) == [0, 1, 2, 3])
    crew.until(members, lambda: [len(member.partitions) for member in members] == [2, 2])
    log.write("t", 0, b"later")
    log.write("t", 3, b"later")
    crew.until(members, lambda: sum(member.values.count(b"later") for member in members) == 2)
    assert {code for member in members for code in member.error_codes} <= {KafkaError.UNKNOWN_TOPIC_OR_PART}


# --- more members than partitions ---------------------------------------------------------------------------------


@both_strategies
def test_idle_members_take_over_at_once_when_one_leaves(log, crew, strategy):
    log.topic(partition_count=2)
    members = crew.members("abcd", **strategy)
    crew.until(members, lambda: sorted(len(member.partitions) for member in members) == [0, 0, 1, 1])
    crew.until(members, lambda: all(member.calls for member in members))
    assert owned_by_all(members) == [0, 1]
    while len(members) > 1:
        # No heartbeat is due for a long time: they are woken up.
        leaving = next(member for member in members if member.partitions)
        members.remove(leaving)
        leaving.close()
        crew.until(members, lambda: owned_by_all(members) == [0, 1])
    assert members[0].partitions == [0, 1]


# --- subscribing anew, leaving ------------------------------------------------------------------------------------


@both_strategies
def test_a_subscription_can_be_changed_within_the_group(four, crew, log, strategy):
    log.topic("u", 2)
    log.write("u", 0, b"u")
    a, b = crew.members("ab", **strategy)
    crew.until([a, b], lambda: len(a.partitions) == len(b.partitions) == 2)
    had, member_id = a.partitions, a.consumer.memberid()
    a.taken()
    a.subscribe("u")
    crew.until([a, b], lambda: a.partitions == [("u", 0), ("u", 1)] and b.partitions == [0, 1, 2, 3])
    assert a.moves == [revoked(*had), assigned(("u", 0), ("u", 1))]
    assert a.consumer.memberid() == member_id
    crew.until([a, b], lambda: b"u" in a.values)
    b.subscribe("t", "u")
    crew.until([a, b], lambda: owned_by_all([a, b]) == [0, 1, 2, 3, ("u", 0), ("u", 1)] and len(b.partitions) >= 4)


@pytest.mark.slow_but_first
@both_strategies
def test_subscribing_to_the_same_again_disturbs_nobody_else(four, crew, strategy):
    a, b = crew.members("ab", **strategy)
    crew.until_at_rest([a, b], lambda: len(a.partitions) == len(b.partitions) == 2)
    generation, calls = b.generation, list(b.calls)
    share = a.partitions
    a.subscribe()
    crew.until([a, b], lambda: a.partitions == share)
    for _ in range(20):
        a.poll()
        b.poll()
    assert a.partitions == share
    assert (b.generation, b.calls) == (generation, calls)


def test_callbacks_that_are_called_no_more_are_let_go(four, crew):
    a = crew.member("a").subscribe()
    crew.until_shared([a], [0, 1, 2, 3])
    known = []
    for _ in range(10):

        def on_assign(consumer, partitions):
            pass

        known.append(weakref.ref(on_assign))
        a.subscribe(on_assign=on_assign)
        del on_assign
    gc.collect()
    assert [one() is not None for one in known] == [*[False] * 9, True]


@pytest.mark.slow_but_first
@both_strategies
@pytest.mark.parametrize("way", ["close", "unsubscribe", "subscribe"])
def test_the_callbacks_of_the_newest_subscription_are_told_whatever_the_partitions_were_given_under(
    four, crew, make_consumer, strategy, way
):
    """It may commit in its on_revoke what the application has done, which would be done again otherwise."""
    a = crew.member("a", {"enable.auto.commit": False, **strategy}).subscribe()
    crew.until([a], lambda: len(a.records) == 4)
    a.taken()
    later: list[list[int]] = []

    def on_revoke(consumer, partitions):
        if not later:
            consumer.commit(asynchronous=False)
        later.append(sorted(partition.partition for partition in partitions))

    if way == "unsubscribe":
        # What is to be told already is told by the newest, too.
        a.consumer.unsubscribe()
    a.consumer.subscribe(["t"], on_revoke=on_revoke)
    if way == "close":
        for _ in range(10):
            a.poll()
        a.consumer.close()
    else:
        if way == "subscribe":
            a.consumer.subscribe(["v"], on_revoke=on_revoke)
        crew.until([a], lambda: later)
    assert (later, a.calls) == ([[0, 1, 2, 3]], [])
    committed = make_consumer().committed([TP("t", number) for number in range(4)], PATIENCE_SECONDS)
    assert [partition.offset for partition in committed] == [1, 1, 1, 1]


@pytest.mark.slow_but_first
@both_strategies
def test_a_member_may_unsubscribe_and_subscribe_again(four, crew, log, strategy):
    a, b = crew.members("ab", **strategy)
    crew.until([a, b], lambda: len(a.partitions) == len(b.partitions) == 2)
    had = a.partitions
    a.taken()
    for _ in range(2):
        generation = a.generation
        a.consumer.unsubscribe()
        crew.until([a, b], lambda: b.partitions == [0, 1, 2, 3])
        assert a.moves == [revoked(*had)]
        assert (a.partitions, a.consumer.memberid(), a.generation) == ([], None, generation)
        assert [member.client_id for member in log.members()] == ["b"]
        a.taken()
        a.subscribe()
        crew.until([a, b], lambda: len(a.partitions) == len(b.partitions) == 2)
        had = a.partitions
        a.taken()


@both_strategies
@pytest.mark.parametrize("partitions", [[2], []], ids=["some", "none"])
def test_what_is_assigned_behind_an_unsubscribe_is_not_given_back(four, crew, log, strategy, partitions):
    a = crew.member("a", strategy).subscribe()
    crew.until([a], lambda: len(a.records) == 4)
    a.consumer.unsubscribe()
    a.consumer.assign([TP("t", number, OFFSET_BEGINNING) for number in partitions])
    found = []

    def look():
        message = a.consumer.poll(TURN_SECONDS)
        found.extend([] if message is None else [message.value()])
        return revoked(0, 1, 2, 3) in a.calls and log.members() == [] and len(found) == len(partitions)

    eventually(look)
    assert a.partitions == partitions
    assert found == [b"%d" % number for number in partitions]
    a.consumer.unassign()
    # As a member again it gives back what it is given.
    a.subscribe()
    crew.until_shared([a], [0, 1, 2, 3])
    a.consumer.unsubscribe()
    crew.until([a], lambda: not a.partitions)


def test_unsubscribing_and_subscribing_before_any_poll_ends_in_the_group(four, crew):
    a, b = crew.members("ab")
    crew.until_shared([a, b], [0, 1], [2, 3])
    for _ in range(3):
        a.consumer.unsubscribe()
        a.subscribe()
    crew.until_shared([a, b], [0, 1], [2, 3])
    crew.until([a, b], lambda: a.generation == b.generation)


@both_strategies
def test_closing_twice_leaves_once(four, crew, log, strategy):
    a, b = crew.members("ab", **strategy)
    crew.until([a, b], lambda: len(a.partitions) == len(b.partitions) == 2)
    had = a.partitions
    a.taken()
    a.close()
    a.close()
    assert a.calls == [revoked(*had)]
    assert [member.client_id for member in log.members()] == ["b"]
    crew.until([b], lambda: b.partitions == [0, 1, 2, 3])
    with pytest.raises(RuntimeError, match="Consumer closed"):
        a.consumer.poll(0)


@pytest.mark.slow_but_first
@both_strategies
@pytest.mark.parametrize("kind", ["assign", "revoke"])
def test_a_callback_may_close_the_consumer(four, crew, log, strategy, kind):
    (a,) = crew.members("a", **strategy)
    a.actions[kind] = lambda consumer, _: consumer.close()
    b = crew.member("b", strategy)

    def is_closed():
        try:
            a.poll()
        except RuntimeError as error:
            assert str(error) == "Consumer closed"  # noqa: PT017 - poll may end so
            return True
        return False

    if kind == "revoke":
        # Alone: nobody takes anything away from it while it gets it.
        crew.until([a], lambda: a.partitions)
        a.subscribe("u")
    b.subscribe()
    # The other may have to give back what it has first.
    crew.until([b], is_closed)
    assert a.calls[0][0] == "assign"
    revocations = [call for call in a.calls if call[0] == "revoke"]
    assert len(revocations) <= 1, a.calls
    crew.until([b], lambda: b.partitions == [0, 1, 2, 3])
    assert [member.client_id for member in log.members()] == ["b"]


@both_strategies
@pytest.mark.parametrize("call", ["unsubscribe", "subscribe"])
def test_a_callback_may_unsubscribe_or_subscribe(four, crew, log, strategy, call):
    log.topic("u", 1)
    (a,) = crew.members("a", **strategy)
    a.actions["assign"] = lambda consumer, partitions: (
        None
        if a.calls[1:]
        else consumer.unsubscribe()
        if call == "unsubscribe"
        else consumer.subscribe(["u"], on_assign=a._callback("assign"), on_revoke=a._callback("revoke"))
    )
    crew.until([a], lambda: len(a.moves) >= 2)
    if call == "unsubscribe":
        assert a.moves == [assigned(0, 1, 2, 3), revoked(0, 1, 2, 3)]
        eventually(lambda: log.members() == [])
    else:
        crew.until([a], lambda: a.partitions == [("u", 0)])
        assert a.moves == [assigned(0, 1, 2, 3), revoked(0, 1, 2, 3), assigned(("u", 0))]


@both_strategies
def test_who_is_about_to_leave_keeps_his_place_and_tells_nothing_of_what_he_had_subscribed_to(
    four, crew, log, strategy
):
    log.topic("u", 1)
    (a,) = crew.members("a", **strategy)
    crew.until([a], lambda: len(a.partitions) == 4)
    core = a.consumer._core
    with core.arrived:
        a.subscribe("u")
        a.consumer.unsubscribe()
        work, _ = core.group.next_work()
    # A join would be refused by itself, at once and again and again until the next poll.
    assert work == core.group._heartbeat
    crew.until([a], lambda: a.moves[-1] == revoked(0, 1, 2, 3))
    eventually(lambda: log.members() == [])


@pytest.mark.slow
def test_a_consumer_that_is_dropped_without_closing_is_expired(four, crew, log, url):
    before = set(threading.enumerate())
    dropped = [
        Consumer(
            {"bootstrap.servers": url, "group.id": "readers", "client.id": "dropped", **SHORT_SESSION, **COOPERATIVE}
        )
    ]
    dropped[0].subscribe(["t"])
    eventually(lambda: dropped[0].poll(0.01) is None and len(dropped[0].assignment()) == 4)
    threads = set(threading.enumerate()) - before
    assert threads
    b = crew.member("b", COOPERATIVE | RARE_HEARTBEATS)
    b.subscribe()
    crew.until(
        [b],
        lambda: dropped[0].poll(0.01) is None and len(dropped[0].assignment()) == len(b.partitions) == 2,
    )
    dropped.clear()
    crew.until([b], lambda: gc.collect() >= 0 and not any(thread.is_alive() for thread in threads))
    # Nobody but the other is left to see that its session has run out.
    b2 = crew.member("c", {**COOPERATIVE, **SHORT_SESSION}).subscribe()
    crew.until([b, b2], lambda: len(b.partitions) == len(b2.partitions) == 2)
    assert sorted(member.client_id for member in log.members()) == ["b", "c"]


def test_whoever_finds_a_member_expired_tells_the_others(four, crew, log, url):
    before = set(threading.enumerate())
    clock = ManualClock()
    settings = {**COOPERATIVE, "heartbeat.interval.ms": 100, "txnstore.clock": clock}
    session = {"bootstrap.servers": url, "group.id": "readers", "client.id": "dropped", "session.timeout.ms": 4_500}
    dropped = [Consumer({**session, **settings})]
    dropped[0].subscribe(["t"])
    eventually(lambda: dropped[0].poll(0.01) is None and len(dropped[0].assignment()) == 4)
    threads = set(threading.enumerate()) - before
    b = crew.member("b", settings | {"session.timeout.ms": 60_000}).subscribe()
    crew.until([b], lambda: dropped[0].poll(0.01) is None and len(b.partitions) == 2)
    dropped.clear()
    crew.until([b], lambda: gc.collect() >= 0 and not any(thread.is_alive() for thread in threads))
    with contextlib.closing(log.store.waiter()) as waiter:
        # What was told before; on SQLite each commit tells.
        for _ in range(5):
            if not waiter.wait(100):
                break
        assert len(b.partitions) == 2
        clock.advance(session["session.timeout.ms"])
        crew.until([b], lambda: len(b.partitions) == 4)
        # Its own lease is renewed later than that.
        assert waiter.wait(10_000)


@pytest.mark.slow
def test_a_member_hears_of_the_expiry_of_another_by_its_own_heartbeats(four, crew, log, url):
    b = crew.member("b", SHORT_SESSION).subscribe()
    crew.until_shared([b], [0, 1, 2, 3])
    dropped = [Consumer({"bootstrap.servers": url, "group.id": "readers", "client.id": "dropped", **SHORT_SESSION})]
    dropped[0].subscribe(["t"])
    crew.until([b], lambda: dropped[0].poll(0.01) is None and len(dropped[0].assignment()) == 2)
    dropped.clear()
    crew.until([b], lambda: gc.collect() >= 0 and b.partitions == [0, 1, 2, 3])
    assert [member.client_id for member in log.members()] == ["b"]

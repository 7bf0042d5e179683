"""Static members (group.instance.id): restarts disturb nobody, a successor fences, and closing does not leave."""

from __future__ import annotations

import contextlib
import threading

import pytest

from tests.clients.callers import calling
from tests.clients.consumer.log_writer import PATIENCE_SECONDS
from tests.clients.membership.steps import (
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
from txnstore.testing.manual_clock import ManualClock

both_strategies = pytest.mark.parametrize("strategy", EAGER_AND_COOPERATIVE, ids=STRATEGY_NAMES)
RECORDS = 5


@pytest.fixture
def four(log):
    log.topic(partition_count=4)
    for number in range(4):
        log.write("t", number, *(b"%d-%d" % (number, offset) for offset in range(RECORDS)))


def come(crew, name, instance, strategy=(), **configuration):
    settings = {key.replace("_", "."): value for key, value in configuration.items()}
    return crew.member(name, {"group.instance.id": instance, **dict(strategy), **settings}).subscribe()


def has_read_all(*members):
    return all(
        position.offset == RECORDS
        for member in members
        for position in member.consumer.position(member.consumer.assignment())
    )


@pytest.fixture
def pair(four, crew):
    """Make two static members that share the topic."""

    def make(strategy=(), **configuration):
        members = [come(crew, name, instance, strategy, **configuration) for name, instance in (("a", "1"), ("b", "2"))]
        crew.until_at_rest(members, lambda: [len(member.partitions) for member in members] == [2, 2])
        return members

    return make


@pytest.mark.slow_but_first
@both_strategies
def test_a_restart_gets_its_partitions_back_and_disturbs_nobody(pair, crew, log, strategy):
    a, b = pair(strategy)
    had, generation = a.partitions, b.generation
    b.taken()
    a.close()
    assert a.calls[-1] == revoked(*had)
    assert [member.group_instance_id for member in sorted(log.members(), key=lambda m: m.client_id)] == ["1", "2"]
    for restart in range(2):
        again = come(crew, f"again-{restart}", "1", strategy)
        crew.until([again, b], lambda again=again: again.partitions == had)
        assert again.calls == [assigned(*had)]
        assert again.generation == generation
        if restart == 0:
            again.close()
    assert (b.calls, b.generation) == ([], generation)
    assert len(log.members()) == 2


def test_a_successor_goes_on_where_its_predecessor_committed(pair, crew):
    a, b = pair(enable_auto_commit=False)
    crew.until([a, b], lambda: has_read_all(a, b))
    a.consumer.commit(offsets=[TP("t", 0, 2)], asynchronous=False)
    a.close()
    again = come(crew, "again", "1", enable_auto_commit=False)
    crew.until([again, b], lambda: len(again.records) == 2 * RECORDS - 2)
    assert min(again.places()) == ("t", 0, 2)


@pytest.mark.slow_but_first
@both_strategies
def test_a_successor_fences_its_predecessor(pair, crew, strategy):
    crew.may_be_late = True
    a, b = pair(strategy, enable_auto_commit=False)
    had, generation = a.partitions, b.generation
    # Nothing is left that it might hand out before it knows.
    crew.until([a, b], lambda: has_read_all(a, b))
    b.taken()
    second = come(crew, "second", "1", strategy, enable_auto_commit=False)
    crew.until([second, b], lambda: second.partitions == had)
    crew.until([a, second, b], lambda: a.errors and not a.partitions)
    (error,) = a.errors
    assert (error.code(), error.fatal()) == (KafkaError.FENCED_INSTANCE_ID, True)
    assert a.moves[-1] == lost(*had)
    assert a.partitions == []
    assert (b.calls, b.generation) == ([], generation)
    # It is of no use any more, and says so; nothing of it disturbs the second.
    assert a.poll(0.1) is None
    for keywords in ({"asynchronous": False}, {"asynchronous": False, "offsets": [TP("t", had[0], 1)]}):
        error = a.refused("commit", **keywords)
        assert error.code() in (KafkaError.FENCED_INSTANCE_ID, KafkaError._NO_OFFSET), keywords
    assert a.refused("commit", offsets=[TP("t", had[0], 1)], asynchronous=False).code() == KafkaError.FENCED_INSTANCE_ID
    a.close()
    crew.until([second, b], lambda: len(second.records) == 2 * RECORDS)
    second.consumer.commit(offsets=[TP("t", had[0], 1)], asynchronous=False)
    assert (second.calls, second.errors) == ([assigned(*had)], [])
    assert (b.calls, b.generation) == ([], generation)


def test_a_predecessor_is_refused_before_it_knows(pair, crew, make_producer):
    crew.may_be_late = True
    a, b = pair(enable_auto_commit=False)
    metadata = a.consumer.consumer_group_metadata()
    second = come(crew, "second", "1")
    crew.until([second, b], lambda: second.partitions == [0, 1])
    producer = make_producer({"transactional.id": "worker"})
    producer.init_transactions(PATIENCE_SECONDS)
    producer.begin_transaction()
    with pytest.raises(KafkaException) as caught:  # noqa: PT012 - either call may say it
        producer.send_offsets_to_transaction([TP("t", 0, 1)], metadata, PATIENCE_SECONDS)
        producer.commit_transaction(PATIENCE_SECONDS)
    error = caught.value.args[0]
    assert (error.code(), error.fatal(), error.txn_requires_abort()) == (KafkaError.FENCED_INSTANCE_ID, False, True)
    producer.abort_transaction(PATIENCE_SECONDS)
    error = a.refused("commit", offsets=[TP("t", 0, 1)], asynchronous=False)
    assert error.code() == KafkaError.FENCED_INSTANCE_ID
    assert second.consumer.committed([TP("t", 0)])[0].offset == -1001


def test_a_commit_in_the_background_tells_on_commit_that_it_is_fenced(four, crew):
    crew.may_be_late = True
    told = []
    settings = {"enable.auto.commit": False, "on_commit": lambda error, partitions: told.append((error, partitions))}
    a = crew.member("a", {"group.instance.id": "1", **settings}).subscribe()
    crew.until([a], lambda: len(a.records) == 4 * RECORDS)
    second = come(crew, "second", "1")
    crew.until([second], lambda: second.partitions == [0, 1, 2, 3])
    a.consumer.commit(offsets=[TP("t", 0, 1)])
    crew.until([a], lambda: told)
    ((error, partitions),) = told
    assert error.code() == KafkaError.FENCED_INSTANCE_ID
    assert [(tp.partition, tp.offset, tp.error.code()) for tp in partitions] == [(0, 1, error.code())]


@pytest.mark.slow_but_first
@both_strategies
def test_a_member_that_does_not_come_back_is_expired(four, crew, log, strategy):
    # However busy the machine is, nobody's session ends before.
    clock = {"txnstore.clock": ManualClock()}
    a = come(crew, "a", "1", strategy, **SHORT_SESSION, **clock)
    b = come(crew, "b", "2", strategy, **LOOKS_OFTEN, **clock)
    crew.until([a, b], lambda: len(a.partitions) == len(b.partitions) == 2)
    a.close()
    clock["txnstore.clock"].advance(SHORT_SESSION["session.timeout.ms"])
    crew.until([b], lambda: b.partitions == [0, 1, 2, 3])
    assert [member.client_id for member in log.members()] == ["b"]
    again = come(crew, "again", "1", strategy, **SHORT_SESSION, **clock)
    crew.until([again, b], lambda: len(again.partitions) == len(b.partitions) == 2)


def test_a_restart_with_another_subscription_is_shared_anew(pair, crew, log):
    log.topic("u", 2)
    a, b = pair()
    a.close()
    again = crew.member("again", {"group.instance.id": "1"}).subscribe("u")
    crew.until([again, b], lambda: again.partitions == [("u", 0), ("u", 1)] and b.partitions == [0, 1, 2, 3])


def test_unsubscribing_gives_the_partitions_back_and_keeps_the_place(pair, crew, log):
    """As in Kafka: only the session timeout, or an administrator, makes a static member leave."""
    a, b = pair()
    b.taken()
    a.consumer.unsubscribe()
    crew.until([a], lambda: a.calls[-1] == revoked(0, 1))
    assert a.partitions == []
    a.subscribe()
    crew.until([a, b], lambda: a.partitions == [0, 1] and b.partitions == [2, 3])
    assert sorted(member.group_instance_id or "" for member in log.members()) == ["1", "2"]
    assert b.errors == a.errors == []


@pytest.mark.slow_but_first
@pytest.mark.parametrize("way", ["by itself", "on a connection"])
@pytest.mark.parametrize("others", ["nobody", "a successor", "another member"])
def test_who_has_left_commits_what_it_assigns_itself_once_its_session_is_over_and_nobody_is_there(
    four, crew, url, way, others
):
    """Until then its place is a member's, which may be its successor's; what it had as a member it never commits."""
    clock = ManualClock()
    settings = {"txnstore.clock": clock, "enable.auto.commit": False}
    a = crew.member("a", {"group.instance.id": "1", **settings}).subscribe()
    crew.until([a], lambda: len(a.records) == 4 * RECORDS)
    a.consumer.unsubscribe()
    crew.until([a], lambda: a.calls[-1] == revoked(0, 1, 2, 3))
    a.consumer.assign([TP("t", 0)])
    own, former = [TP("t", 0, 1)], [TP("t", 1, 1)]

    def code_of(offsets):
        with calling(url, "core") as caller:
            on_connection = {} if way == "by itself" else {"connection": caller.given}
            error = a.refused("commit", offsets=offsets, asynchronous=False, **on_connection)
            if error is None and on_connection:
                caller.commit()
        return error and error.code()

    assert code_of(own) == code_of(former) == KafkaError.FENCED_INSTANCE_ID
    with contextlib.ExitStack() as stack:
        clock.advance(RARE_HEARTBEATS["session.timeout.ms"])
        if others != "nobody":
            instance = {"group.instance.id": "1"} if others == "a successor" else {}
            b = crew.member("b", {**instance, **settings})
            crew.disown(a)
            b.subscribe()
            crew.until([b], lambda: b.partitions == [0, 1, 2, 3])
            b.consumer.commit(offsets=[TP("t", 0, 3)], asynchronous=False)
            stack.enter_context(gate_of(b))
            code = KafkaError.FENCED_INSTANCE_ID if others == "a successor" else KafkaError.UNKNOWN_MEMBER_ID
            assert code_of(own) == code_of(former) == code
            # It is gone, too.
            clock.advance(RARE_HEARTBEATS["session.timeout.ms"])
        assert code_of(former) in (KafkaError.UNKNOWN_MEMBER_ID, KafkaError.FENCED_INSTANCE_ID)
        assert code_of(own) is None
        assert code_of(former) == KafkaError.UNKNOWN_MEMBER_ID
    (committed,) = a.consumer.committed([TP("t", 0)], PATIENCE_SECONDS)
    assert committed.offset == 1


def test_who_subscribes_again_joins_behind_its_own_commits(four, crew):
    """Its next member id would fence them."""
    a = come(crew, "a", "1")
    crew.until([a], lambda: len(a.records) == 4 * RECORDS)
    core, goes_on = a.consumer._core, threading.Event()
    core.worker.submit(lambda: goes_on.wait(PATIENCE_SECONDS))
    a.consumer.unsubscribe()
    with core.arrived:
        a.poll(0)
        assert a.calls[-1] == revoked(0, 1, 2, 3)
        a.subscribe()
        work, _ = core.group.next_work()
    assert work is None
    goes_on.set()
    crew.until([a], lambda: a.partitions == [0, 1, 2, 3])
    committed = a.consumer.committed([TP("t", number) for number in range(4)], PATIENCE_SECONDS)
    assert [partition.offset for partition in committed] == [RECORDS] * 4
    assert a.errors == []


def test_static_and_other_members_share_a_group(four, crew):
    a = come(crew, "z", "1")
    b = crew.member("b").subscribe()
    # Static members come first.
    crew.until_shared([a, b], [0, 1], [2, 3])
    a.close()
    b.taken()
    again = come(crew, "y", "1")
    crew.until([again, b], lambda: again.partitions == [0, 1])
    assert b.calls == []
    b.close()
    crew.until([again], lambda: again.partitions == [0, 1, 2, 3])

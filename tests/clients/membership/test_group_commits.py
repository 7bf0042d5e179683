"""Commits of members and of former owners: plain, in the background, within transactions; what is refused, and how."""

from __future__ import annotations

import threading

import pytest

from tests.clients.consumer.log_writer import PATIENCE_SECONDS, eventually
from tests.clients.membership.steps import (
    COOPERATIVE,
    EAGER_AND_COOPERATIVE,
    RARE_HEARTBEATS,
    STRATEGY_NAMES,
    TP,
    assigned,
    gate_of,
    lost,
    revoked,
)
from tests.clients.steps import read_to_end, values
from txnstore import OFFSET_INVALID, KafkaError, KafkaException
from txnstore.clients.membership.metadata import parse_group_metadata
from txnstore.clients.membership.requests import GroupRequests
from txnstore.clients.outlet import lease_seconds
from txnstore.groups.group import AnswerStatus
from txnstore.testing.manual_clock import ManualClock

both_strategies = pytest.mark.parametrize("strategy", EAGER_AND_COOPERATIVE, ids=STRATEGY_NAMES)
RECORDS = 6
BY_HAND = {"enable.auto.commit": False}
AS_IN_KAFKA = {"txnstore.commit.ownership": "member"}


@pytest.fixture
def four(log):
    log.topic(partition_count=4)
    for number in range(4):
        log.write("t", number, *(b"%d-%d" % (number, offset) for offset in range(RECORDS)))


@pytest.fixture
def producer(make_producer):
    producer = make_producer({"transactional.id": "worker"})
    producer.init_transactions(PATIENCE_SECONDS)
    return producer


def committed(member, *numbers):
    return [tp.offset for tp in member.consumer.committed([TP("t", number) for number in numbers], PATIENCE_SECONDS)]


@pytest.fixture
def shared(four, crew):
    """Make a member that had everything, and one that has taken over half of it."""

    def make(strategy=(), **configuration):
        settings = {**BY_HAND, **dict(strategy), **configuration}
        a = crew.member("a", settings).subscribe()
        crew.until([a], lambda: a.partitions == [0, 1, 2, 3] and len(a.records) == 4 * RECORDS)
        former = a.consumer.consumer_group_metadata()
        b = crew.member("b", settings).subscribe()
        crew.until_at_rest([a, b], lambda: len(a.partitions) == len(b.partitions) == 2)
        return a, b, former

    return make


@pytest.fixture
def expired(four, crew):
    """Make a member that the group has expired and that does not know of it, and one that has everything now."""

    def make(**configuration):
        clock = ManualClock()
        crew.may_be_late = True
        settings = {**BY_HAND, "txnstore.clock": clock, **configuration}
        a = crew.member("a", settings)
        gate = gate_of(a)
        a.subscribe()
        crew.until([a], lambda: len(a.records) == 4 * RECORDS)
        with gate:
            clock.advance(RARE_HEARTBEATS["session.timeout.ms"])
            b = crew.member("b", {**BY_HAND, "txnstore.clock": clock}).subscribe()
            crew.until([b], lambda: b.partitions == [0, 1, 2, 3])
        return a, b

    return make


# --- plain --------------------------------------------------------------------------------------------------------


@pytest.mark.slow_but_first
@both_strategies
def test_a_member_commits_what_it_owns_and_nothing_that_has_moved(shared, strategy):
    a, b, _ = shared(strategy)
    kept, moved = a.partitions[0], b.partitions[0]
    assert a.consumer.commit(offsets=[TP("t", kept, 2)], asynchronous=False)[0].error is None
    error = a.refused("commit", offsets=[TP("t", moved, 3)], asynchronous=False)
    assert (error.code(), error.fatal()) == (KafkaError.ILLEGAL_GENERATION, False)
    # All or nothing.
    error = a.refused("commit", offsets=[TP("t", kept, 4), TP("t", moved, 4)], asynchronous=False)
    assert error.code() == KafkaError.ILLEGAL_GENERATION
    assert committed(a, kept, moved) == [2, OFFSET_INVALID]
    b.consumer.commit(offsets=[TP("t", moved, 5)], asynchronous=False)
    assert committed(a, kept, moved) == [2, 5]


def test_a_commit_of_what_had_moved_is_refused_also_if_it_is_made_once_that_has_come_back(shared, crew):
    told = []
    a, b, _ = shared(COOPERATIVE, on_commit=lambda error, partitions: told.append((error and error.code(), partitions)))
    moved, goes_on = b.partitions[0], threading.Event()
    a.consumer._core.worker.submit(lambda: goes_on.wait(PATIENCE_SECONDS))
    late = [TP("t", moved, 3)]
    a.consumer.commit(offsets=late)
    b.consumer.commit(offsets=[TP("t", moved, 5)], asynchronous=False)
    b.close()
    crew.until([a], lambda: a.partitions == [0, 1, 2, 3])
    goes_on.set()
    crew.until([a], lambda: told)
    assert told == [(KafkaError.ILLEGAL_GENERATION, late)]
    assert committed(a, moved) == [5]
    # It reads on where the other one ended.
    crew.until([a], lambda: a.places()[-1] == ("t", moved, RECORDS - 1))
    assert ("t", moved, 5) in a.places()[4 * RECORDS :]
    assert ("t", moved, 4) not in a.places()[4 * RECORDS :]


def test_a_commit_of_what_had_moved_is_refused_also_if_its_member_gets_it_back_and_is_late_after_that(shared, crew):
    """Whatever has come since is forgotten with the place; and the group hears of the loss behind the commit."""
    told = []
    a, b, _ = shared(COOPERATIVE, on_commit=lambda error, partitions: told.append((error and error.code(), partitions)))
    crew.may_be_late = True
    moved, goes_on = b.partitions[0], threading.Event()
    core, late = a.consumer._core, [TP("t", moved, 3)]
    core.worker.submit(lambda: goes_on.wait(PATIENCE_SECONDS))
    a.consumer.commit(offsets=late)
    b.consumer.commit(offsets=[TP("t", moved, 5)], asynchronous=False)
    b.close()
    crew.until_at_rest([a], lambda: a.partitions == [0, 1, 2, 3])
    with core.arrived:
        core.group._lapse(lease_seconds())
    goes_on.set()
    crew.until([a], lambda: told)
    assert told == [(KafkaError.ILLEGAL_GENERATION, late)]
    assert committed(a, moved) == [5]


def test_a_commit_of_what_is_kept_counts_however_often_the_others_come_and_go_meanwhile(shared, crew):
    a, b, _ = shared(COOPERATIVE)
    kept, goes_on = a.partitions[0], threading.Event()
    a.consumer._core.worker.submit(lambda: goes_on.wait(PATIENCE_SECONDS))
    a.consumer.commit(offsets=[TP("t", kept, 3)])
    generation = a.generation
    b.close()
    crew.until_at_rest([a], lambda: a.partitions == [0, 1, 2, 3])
    assert a.generation > generation
    goes_on.set()
    assert committed(a, kept) == [3]


def test_a_message_of_a_partition_that_has_moved_cannot_be_committed(shared):
    a, b, _ = shared()
    message = next(message for message in a.records if message.partition() == b.partitions[0])
    error = a.refused("commit", message=message, asynchronous=False)
    assert error.code() == KafkaError.ILLEGAL_GENERATION
    assert a.partitions == [0, 1]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", ["moved", "expired"])
def test_a_refused_commit_in_the_background_is_told_to_on_commit(request, crew, kind):
    answers = []
    configuration = {"on_commit": lambda error, partitions: answers.append((error.code(), partitions))}
    a, b, *_ = request.getfixturevalue("shared" if kind == "moved" else "expired")(**configuration)
    a.consumer.commit(offsets=[TP("t", 3, 1)])
    crew.until([a, b], lambda: answers)
    ((code, partitions),) = answers
    assert code == (KafkaError.ILLEGAL_GENERATION if kind == "moved" else KafkaError.UNKNOWN_MEMBER_ID)
    assert [(tp.partition, tp.error.code()) for tp in partitions] == [(3, code)]
    assert committed(b, 3) == [OFFSET_INVALID]


def test_a_refused_commit_of_what_has_moved_costs_a_member_nothing(shared, crew):
    a, b, _ = shared(COOPERATIVE)
    share, calls, generation = a.partitions, list(a.calls), a.generation
    for _ in range(3):
        assert a.refused("commit", offsets=[TP("t", b.partitions[0], 1)], asynchronous=False) is not None
    for _ in range(20):
        a.poll()
        b.poll()
    assert (a.partitions, a.calls, a.generation, a.errors) == (share, calls, generation, [])
    a.consumer.commit(offsets=[TP("t", share[0], 1)], asynchronous=False)


def test_shares_are_settled_once_everybody_was_told_of_them(shared, crew, monkeypatch):
    """The last answer comes late, as on a busy machine: who keeps a part is told, of nothing new, behind the others."""
    ask = GroupRequests.heartbeat

    def answered_late(requests, report, *, wakes_readers):
        answer = ask(requests, report, wakes_readers=wakes_readers)
        # Not as long as it is alone and has all four.
        is_settled = answer.status is AnswerStatus.OWN and len(answer.partitions) == 2
        if report.membership.member_id.startswith("a-") and is_settled:
            eventually(lambda: any(name == "b" and partitions for name, _, partitions in crew.calls))
        return answer

    monkeypatch.setattr(GroupRequests, "heartbeat", answered_late)
    a, b, _ = shared(COOPERATIVE)
    assert a.calls == [assigned(0, 1, 2, 3), revoked(*b.partitions), assigned()]


def test_a_consumer_that_has_no_place_yet_commits_nothing_in_a_group_with_members(shared, crew):
    a, _, _ = shared()
    simple = crew.member("simple", BY_HAND)
    error = simple.refused("commit", offsets=[TP("t", 0, 1)], asynchronous=False)
    assert error.code() == KafkaError.UNKNOWN_MEMBER_ID
    simple.subscribe()
    error = simple.refused("commit", offsets=[TP("t", 0, 1)], asynchronous=False)
    assert error.code() in (KafkaError.UNKNOWN_MEMBER_ID, KafkaError.ILLEGAL_GENERATION)
    assert committed(a, 0) == [OFFSET_INVALID]


def test_a_member_that_left_commits_nothing(shared, crew):
    a, b, _ = shared()
    a.consumer.unsubscribe()
    crew.until([a, b], lambda: b.partitions == [0, 1, 2, 3])
    error = a.refused("commit", offsets=[TP("t", 0, 1)], asynchronous=False)
    assert error.code() == KafkaError.UNKNOWN_MEMBER_ID
    assert committed(b, 0) == [OFFSET_INVALID]


@pytest.mark.slow_but_first
@both_strategies
def test_what_a_member_that_left_has_read_is_not_committed_once_the_others_have_left_too(
    shared, crew, log, producer, strategy
):
    """Without a name it could, and would take the group back behind what the others have done since."""
    a, b, _ = shared(strategy)
    a.consumer.unsubscribe()
    crew.until([a, b], lambda: b.partitions == [0, 1, 2, 3])
    b.consumer.commit(offsets=[TP("t", number, 5) for number in range(4)], asynchronous=False)
    b.close()
    assert log.members() == []
    for offsets in ({"message": a.records[0]}, {"offsets": [TP("t", 0, 1)]}):
        error = a.refused("commit", asynchronous=False, **offsets)
        assert error.code() == KafkaError.UNKNOWN_MEMBER_ID
    error = refused_transaction(producer, [TP("t", 0, 1)], a.consumer.consumer_group_metadata())
    assert error.code() == KafkaError.UNKNOWN_MEMBER_ID
    assert committed(a, 0, 1, 2, 3) == [5, 5, 5, 5]


def test_a_member_that_left_commits_what_it_has_assigned_itself_since_and_nothing_else(shared, crew, log, producer):
    a, b, _ = shared(**{"enable.auto.commit": True})
    a.consumer.unsubscribe()
    crew.until([a, b], lambda: b.partitions == [0, 1, 2, 3])
    a.consumer.assign([TP("t", 1, 2)])
    own, others = [TP("t", 1, 3)], [TP("t", 0, 3)]
    # As any consumer that is not a member: nothing while there are members.
    assert a.refused("commit", offsets=own, asynchronous=False).code() == KafkaError.UNKNOWN_MEMBER_ID
    b.close()
    assert log.members() == []
    crew.give(a, [TP("t", 1)])
    assert committed(a, 0, 1) == [RECORDS, RECORDS]
    assert a.consumer.commit(offsets=own, asynchronous=False)[0].error is None
    for offsets in (others, own + others):
        assert a.refused("commit", offsets=offsets, asynchronous=False).code() == KafkaError.UNKNOWN_MEMBER_ID
    # In a transaction the name alone would do, with members or without.
    error = refused_transaction(producer, own, a.consumer.consumer_group_metadata())
    assert error.code() == KafkaError.UNKNOWN_MEMBER_ID
    assert committed(a, 0, 1) == [RECORDS, 3]
    # What is given back is committed by itself.
    crew.until([a], lambda: a.consumer.position([TP("t", 1)])[0].offset == RECORDS)
    a.consumer.unassign()
    assert committed(a, 0, 1) == [RECORDS, RECORDS]
    # A member again, it has the name of one only.
    a.consumer.assign([TP("t", 1, 2)])
    a.subscribe()
    assert a.refused("commit", offsets=own, asynchronous=False).code() == KafkaError.UNKNOWN_MEMBER_ID


@pytest.mark.slow_but_first
@pytest.mark.parametrize("way", ["added", "given back", "beside nothing", "subscribed in between"])
def test_what_a_member_that_left_has_assigned_itself_it_commits_whatever_became_of_it(four, crew, way):
    a = crew.member("a", BY_HAND).subscribe()
    crew.until([a], lambda: len(a.records) == 4 * RECORDS)
    a.consumer.unsubscribe()
    crew.until([a], lambda: a.partitions == [])
    given = [TP("t", 1, 2)]
    if way == "added":
        a.consumer.incremental_assign(given)
    else:
        a.consumer.assign(given)
    if way == "given back":
        a.consumer.unassign()
    elif way == "subscribed in between":
        a.consumer.subscribe(["t"])
        a.consumer.unsubscribe()
        crew.until([a], lambda: a.consumer.memberid() is None)
    offsets = [TP("t", 1, 3), *([TP("t", 0, OFFSET_INVALID)] if way == "beside nothing" else [])]
    a.consumer.commit(offsets=offsets, asynchronous=False)
    assert committed(a, 1) == [3]
    assert a.refused("commit", offsets=[TP("t", 0, 3)], asynchronous=False).code() == KafkaError.UNKNOWN_MEMBER_ID


def test_what_it_had_assigned_itself_counts_no_more_for_who_was_a_member_in_between(four, crew):
    a = crew.member("a", BY_HAND)
    a.consumer.assign([TP("t", 1, RECORDS)])
    crew.give(a, [TP("t", 1)])
    a.subscribe()
    crew.until([a], lambda: a.partitions == [0, 1, 2, 3])
    a.consumer.unsubscribe()
    crew.until([a], lambda: a.partitions == [])
    assert a.refused("commit", offsets=[TP("t", 1, 3)], asynchronous=False).code() == KafkaError.UNKNOWN_MEMBER_ID


# --- who a member is ----------------------------------------------------------------------------------------------


def test_the_metadata_follows_the_member_through_rebalances(four, crew):
    a = crew.member("a")
    nobody = parse_group_metadata(a.consumer.consumer_group_metadata())
    assert (nobody.generation, nobody.member_id, a.consumer.memberid()) == (-1, "", None)
    a.subscribe()
    crew.until_shared([a], [0, 1, 2, 3])
    first = parse_group_metadata(a.consumer.consumer_group_metadata())
    assert (first.group_id, first.generation, first.member_id) == ("readers", 1, a.consumer.memberid())
    (b,) = crew.members("b")
    crew.until_shared([a, b], [0, 1], [2, 3])
    second = parse_group_metadata(a.consumer.consumer_group_metadata())
    assert (second.generation, second.member_id) == (2, first.member_id)
    assert parse_group_metadata(b.consumer.consumer_group_metadata()).generation == 2
    a.consumer.unsubscribe()
    crew.until([a, b], lambda: b.partitions == [0, 1, 2, 3])
    # It can be told from a consumer that never was in the group; librdkafka keeps the generation and no more, too.
    left = parse_group_metadata(a.consumer.consumer_group_metadata())
    assert (a.consumer.memberid(), left.member_id, left.generation, b.generation) == (None, "", 2, 3)


# --- within transactions ------------------------------------------------------------------------------------------


def refused_transaction(producer, offsets, metadata):
    """Try to end a transaction with these offsets; return the error."""
    producer.begin_transaction()
    producer.produce("out", b"refused")
    with pytest.raises(KafkaException) as caught:  # noqa: PT012 - either call may say it
        producer.send_offsets_to_transaction(offsets, metadata, PATIENCE_SECONDS)
        producer.commit_transaction(PATIENCE_SECONDS)
    return caught.value.args[0]


def transaction(producer, offsets, metadata):
    producer.begin_transaction()
    producer.produce("out", b"committed")
    producer.send_offsets_to_transaction(offsets, metadata, PATIENCE_SECONDS)
    producer.commit_transaction(PATIENCE_SECONDS)


def goes_on(producer, url, member, number, offset):
    """The transaction can be aborted, and the next one of the same producer works."""
    producer.abort_transaction(PATIENCE_SECONDS)
    transaction(producer, [TP("t", number, offset)], member.consumer.consumer_group_metadata())
    assert committed(member, number) == [offset]
    assert values(read_to_end(url, "out")) == [b"committed"]


@pytest.mark.slow
@both_strategies
@pytest.mark.parametrize("metadata", ["former", "present"])
def test_a_former_owner_is_refused_within_a_transaction(shared, producer, url, strategy, metadata):
    a, b, former = shared(strategy)
    moved = b.partitions[0]
    metadata = former if metadata == "former" else a.consumer.consumer_group_metadata()
    error = refused_transaction(producer, [TP("t", moved, 4)], metadata)
    assert (error.code(), error.fatal(), error.txn_requires_abort()) == (KafkaError.ILLEGAL_GENERATION, False, True)
    goes_on(producer, url, a, a.partitions[0], 2)
    assert committed(b, moved) == [OFFSET_INVALID]


@pytest.mark.slow_but_first
@both_strategies
def test_a_member_may_be_let_commit_what_it_does_not_own_as_in_kafka(shared, producer, strategy):
    a, b, former = shared(strategy, **AS_IN_KAFKA)
    kept, moved = a.partitions[0], b.partitions[0]
    a.consumer.commit(offsets=[TP("t", kept, 2), TP("t", moved, 3)], asynchronous=False)
    assert committed(b, kept, moved) == [2, 3]
    transaction(producer, [TP("t", moved, 4)], a.consumer.consumer_group_metadata())
    assert committed(b, moved) == [4]
    # In the group's generation only: in a former one the partition was another's.
    error = refused_transaction(producer, [TP("t", moved, 5)], former)
    assert (error.code(), error.fatal(), error.txn_requires_abort()) == (KafkaError.ILLEGAL_GENERATION, False, True)
    producer.abort_transaction(PATIENCE_SECONDS)
    assert committed(b, moved) == [4]


def test_a_former_member_commits_nothing_as_in_kafka(expired, producer):
    a, b = expired(**AS_IN_KAFKA)
    assert a.refused("commit", offsets=[TP("t", 0, 1)], asynchronous=False).code() == KafkaError.UNKNOWN_MEMBER_ID
    error = refused_transaction(producer, [TP("t", 0, 1)], a.consumer.consumer_group_metadata())
    assert error.code() == KafkaError.UNKNOWN_MEMBER_ID
    assert committed(b, 0) == [OFFSET_INVALID]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("way", ["shared", "expired"])
def test_a_member_that_has_unsubscribed_is_refused_within_a_transaction(request, crew, producer, url, way):
    """Its partitions are another's, which has read the same: both outputs would count."""
    a, b, *_ = request.getfixturevalue(way)()
    generation = a.generation
    a.consumer.unsubscribe()
    crew.until([a, b], lambda: b.partitions == [0, 1, 2, 3] and not a.partitions)
    metadata = a.consumer.consumer_group_metadata()
    error = refused_transaction(producer, [TP("t", 0, 4)], metadata)
    assert (error.code(), error.fatal(), error.txn_requires_abort()) == (KafkaError.UNKNOWN_MEMBER_ID, False, True)
    assert parse_group_metadata(metadata).generation == generation
    # Nor while it is on its way back.
    a.subscribe()
    assert a.consumer.consumer_group_metadata() == metadata
    goes_on(producer, url, b, 0, 2)
    crew.until_at_rest([a, b], lambda: len(a.partitions) == len(b.partitions) == 2)
    transaction(producer, [TP("t", a.partitions[0], 5)], a.consumer.consumer_group_metadata())
    assert committed(b, a.partitions[0]) == [5]


def test_a_removed_member_is_refused_within_a_transaction(expired, crew, producer, url):
    a, b = expired()
    error = refused_transaction(producer, [TP("t", 0, 4)], a.consumer.consumer_group_metadata())
    assert (error.code(), error.fatal(), error.txn_requires_abort()) == (KafkaError.UNKNOWN_MEMBER_ID, False, True)
    goes_on(producer, url, b, 1, 2)
    # The consumer hears of it by its group, and has a share again.
    crew.until([a, b], lambda: len(a.partitions) == len(b.partitions) == 2)
    assert a.moves == [assigned(0, 1, 2, 3), lost(0, 1, 2, 3), assigned(*a.partitions)]


@pytest.mark.slow_but_first
@both_strategies
def test_a_worker_that_is_rebalanced_in_the_middle_of_a_transaction_aborts_and_resumes(
    four, crew, producer, url, strategy
):
    """It gave the partition back while its transaction was open: nothing of it counts."""
    settings = {**BY_HAND, **strategy}
    a = crew.member("a", settings).subscribe()
    crew.until([a], lambda: len(a.records) >= 4 * RECORDS)
    producer.begin_transaction()
    producer.produce("out", b"refused")
    assert producer.flush(PATIENCE_SECONDS) == 0
    b = crew.member("b", settings).subscribe()
    crew.until([a, b], lambda: len(a.partitions) == len(b.partitions) == 2)
    everything = [TP("t", number, RECORDS) for number in range(4)]
    with pytest.raises(KafkaException) as caught:  # noqa: PT012 - either call may say it
        producer.send_offsets_to_transaction(everything, a.consumer.consumer_group_metadata(), PATIENCE_SECONDS)
        producer.commit_transaction(PATIENCE_SECONDS)
    assert caught.value.args[0].txn_requires_abort()
    producer.abort_transaction(PATIENCE_SECONDS)
    for number in a.partitions:
        a.consumer.seek(TP("t", number, 0))
    del a.records[:]
    crew.until([a, b], lambda: len(a.records) == len(b.records) == 2 * RECORDS)
    transaction(producer, [TP("t", number, RECORDS) for number in a.partitions], a.consumer.consumer_group_metadata())
    assert committed(b, *a.partitions, *b.partitions) == [RECORDS, RECORDS, OFFSET_INVALID, OFFSET_INVALID]
    assert sorted(a.places() + b.places()) == [
        ("t", number, offset) for number in range(4) for offset in range(RECORDS)
    ]


@pytest.mark.slow_but_first
@both_strategies
@pytest.mark.parametrize("ownership", [{}, AS_IN_KAFKA], ids=["owners", "members"])
def test_what_was_sent_before_a_rebalance_counts_by_the_membership_of_then(
    four, crew, make_producer, strategy, ownership
):
    """The partition was another's meanwhile: what is sent later does not speak for what was sent before."""
    # Nothing is pending before the commit.
    producer = make_producer({"transactional.id": "worker", "linger.ms": 50_000})
    producer.init_transactions(PATIENCE_SECONDS)
    settings = {**BY_HAND, **strategy, **ownership}
    a = crew.member("a", settings).subscribe()
    crew.until([a], lambda: len(a.records) == 4 * RECORDS)
    producer.begin_transaction()
    producer.send_offsets_to_transaction(
        [TP("t", number, 1) for number in range(4)], a.consumer.consumer_group_metadata(), PATIENCE_SECONDS
    )
    b = crew.member("b", settings).subscribe()
    crew.until_at_rest([a, b], lambda: len(a.partitions) == len(b.partitions) == 2)
    kept, moved = a.partitions[0], b.partitions[0]
    b.consumer.commit(offsets=[TP("t", moved, 5)], asynchronous=False)
    b.close()
    crew.until_at_rest([a], lambda: a.partitions == [0, 1, 2, 3])
    with pytest.raises(KafkaException) as caught:  # noqa: PT012 - either call may say it
        producer.send_offsets_to_transaction([TP("t", kept, 2)], a.consumer.consumer_group_metadata(), PATIENCE_SECONDS)
        producer.commit_transaction(PATIENCE_SECONDS)
    error = caught.value.args[0]
    assert (error.code(), error.txn_requires_abort()) == (KafkaError.ILLEGAL_GENERATION, True)
    producer.abort_transaction(PATIENCE_SECONDS)
    assert committed(a, moved, kept) == [5, OFFSET_INVALID]
    transaction(producer, [TP("t", kept, 2)], a.consumer.consumer_group_metadata())
    assert committed(a, moved, kept) == [5, 2]


@pytest.mark.slow
@both_strategies
@pytest.mark.parametrize("commits", [True, False], ids=["commit", "abort"])
def test_the_next_owner_waits_for_offsets_of_an_open_transaction(four, crew, producer, strategy, commits):
    """They were sent by a member that owned the partition; what becomes of them decides where the next one begins."""
    settings = {**BY_HAND, **strategy}
    a = crew.member("a", settings).subscribe()
    crew.until([a], lambda: len(a.records) == 4 * RECORDS)
    producer.begin_transaction()
    producer.produce("out", b"v")
    positions = [TP("t", number, 4) for number in range(4)]
    producer.send_offsets_to_transaction(positions, a.consumer.consumer_group_metadata(), PATIENCE_SECONDS)
    b = crew.member("b", settings).subscribe()
    crew.until([a, b], lambda: len(a.partitions) == len(b.partitions) == 2)
    # The offsets may have waited for the commit: then the group refuses them now, and nothing was held.
    for _ in range(30):
        b.poll()
    try:
        if commits:
            producer.commit_transaction(PATIENCE_SECONDS)
        else:
            producer.abort_transaction(PATIENCE_SECONDS)
        start = 4 if commits else 0
    except KafkaException as exception:
        error = exception.args[0]
        assert (error.code(), error.txn_requires_abort()) == (KafkaError.ILLEGAL_GENERATION, True)
        producer.abort_transaction(PATIENCE_SECONDS)
        start = 0
    crew.until([a, b], lambda: len(b.records) == 2 * (RECORDS - start))
    assert {place[2] for place in b.places()} == set(range(start, RECORDS))


def test_offsets_of_a_revoked_partition_may_be_sent_within_on_revoke(four, crew, producer, url):
    """The transaction ends within the callback: the next owner goes on behind it."""
    a = crew.member("a", BY_HAND).subscribe()
    crew.until([a], lambda: len(a.records) == 4 * RECORDS)
    producer.begin_transaction()
    producer.produce("out", b"committed")

    def finish(consumer, partitions):
        positions = [TP("t", partition.partition, 3) for partition in partitions]
        producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), PATIENCE_SECONDS)
        producer.commit_transaction(PATIENCE_SECONDS)

    a.actions["revoke"] = finish
    b = crew.member("b", BY_HAND).subscribe()
    crew.until([a, b], lambda: len(b.records) == 2 * (RECORDS - 3))
    assert min(place[2] for place in b.places()) == 3
    assert values(read_to_end(url, "out")) == [b"committed"]
    a.actions.clear()

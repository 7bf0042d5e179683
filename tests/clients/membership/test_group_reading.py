"""Reading across rebalances: positions, seeks, pauses, and the calls that add and take away partitions."""

from __future__ import annotations

import pytest

from tests.clients.membership.steps import COOPERATIVE, EAGER_AND_COOPERATIVE, STRATEGY_NAMES, TP
from txnstore import OFFSET_INVALID, KafkaError

both_strategies = pytest.mark.parametrize("strategy", EAGER_AND_COOPERATIVE, ids=STRATEGY_NAMES)
RECORDS = 5
BY_HAND = {"enable.auto.commit": False}


@pytest.fixture
def four(log):
    log.topic(partition_count=4)
    for number in range(4):
        log.write("t", number, *(b"%d-%d" % (number, offset) for offset in range(RECORDS)))


@pytest.fixture
def reader(four, crew):
    """Make a member that has read everything."""

    def make(strategy=(), name="a"):
        member = crew.member(name, {**BY_HAND, **dict(strategy)}).subscribe()
        crew.until([member], lambda: len(member.records) == 4 * RECORDS)
        return member

    return make


def offset_of(member, number):
    return member.consumer.position([TP("t", number)])[0].offset


def shared(crew, a, strategy=()):
    b = crew.member("b", {**BY_HAND, **dict(strategy)}).subscribe()
    crew.until_at_rest([a, b], lambda: len(a.partitions) == len(b.partitions) == 2)
    return b


def test_who_keeps_a_partition_keeps_its_position_and_its_pause(reader, crew, log):
    a = reader(COOPERATIVE)
    a.consumer.pause([TP("t", number) for number in range(4)])
    b = shared(crew, a, COOPERATIVE)
    kept, moved = a.partitions, b.partitions
    assert [offset_of(a, number) for number in (*kept, *moved)] == [RECORDS, RECORDS, OFFSET_INVALID, OFFSET_INVALID]
    del a.records[:]
    for number in range(4):
        log.write("t", number, b"later")
    # The pause is this consumer's alone.
    crew.until([a, b], lambda: b.values.count(b"later") == 2)
    for _ in range(10):
        a.poll()
    assert a.records == []
    a.consumer.resume([TP("t", number) for number in range(4)])
    crew.until([a], lambda: a.values == [b"later"] * 2)


def test_what_an_eager_member_gets_again_is_read_from_the_committed_offset_and_still_paused(reader, crew):
    a = reader()
    a.consumer.commit(offsets=[TP("t", number, 3) for number in range(4)], asynchronous=False)
    a.consumer.pause([TP("t", number) for number in range(4)])
    del a.records[:]
    b = shared(crew, a)
    crew.until([a, b], lambda: len(b.records) == 4)
    for _ in range(10):
        a.poll()
    b.close()
    crew.until([a], lambda: len(a.partitions) == 4)
    for _ in range(10):
        a.poll()
    # Whoever keeps its place with polls while it works on something else drops what these return.
    assert a.records == []
    a.consumer.resume([TP("t", number) for number in range(4)])
    crew.until([a], lambda: len(a.records) == 8)
    assert {place[2] for place in a.places() + b.places()} == {3, 4}


@pytest.mark.slow_but_first
@both_strategies
def test_nobody_seeks_or_reads_where_he_is_not_the_owner(reader, crew, strategy):
    a = reader(strategy)
    b = shared(crew, a, strategy)
    (mine, *_), (others, *_) = a.partitions, b.partitions
    assert a.refused("seek", TP("t", others, 0)).code() == KafkaError._STATE
    a.consumer.pause([TP("t", others)])
    a.consumer.resume([TP("t", others)])
    assert offset_of(a, others) == OFFSET_INVALID
    del a.records[:]
    a.consumer.seek(TP("t", mine, RECORDS - 1))
    crew.until([a, b], lambda: ("t", mine, RECORDS - 1) in a.places())
    assert {place[1] for place in a.places()} <= set(a.partitions)


def test_a_seek_survives_the_coming_of_others(reader, crew):
    a = reader(COOPERATIVE)
    del a.records[:]
    for number in range(4):
        a.consumer.seek(TP("t", number, RECORDS - 1))
    a.consumer.pause([TP("t", number) for number in range(4)])
    shared(crew, a, COOPERATIVE)
    a.consumer.resume([TP("t", number) for number in range(4)])
    crew.until([a], lambda: len(a.records) == 2)
    assert sorted(a.places()) == [("t", number, RECORDS - 1) for number in a.partitions]


def test_incremental_calls_that_are_refused_change_nothing(reader, crew):
    a = reader(COOPERATIVE)
    b = shared(crew, a, COOPERATIVE)
    (mine, *_), (others, *_) = a.partitions, b.partitions
    share, generation, calls = a.partitions, a.generation, list(a.calls)
    for name, arguments, code in (
        ("incremental_assign", [TP("t", mine)], KafkaError._CONFLICT),
        ("incremental_assign", [TP("t", mine), TP("t", others)], KafkaError._CONFLICT),
        ("incremental_assign", [TP("t", others), TP("t", others)], KafkaError._INVALID_ARG),
        ("incremental_unassign", [TP("t", others)], KafkaError._INVALID_ARG),
        ("incremental_unassign", [TP("t", mine), TP("t", others)], KafkaError._INVALID_ARG),
        ("incremental_unassign", [TP("t", mine), TP("t", mine)], KafkaError._INVALID_ARG),
    ):
        assert a.refused(name, arguments).code() == code, (name, arguments)
        assert a.partitions == share
    for _ in range(10):
        a.poll()
        b.poll()
    assert (a.generation, a.calls, a.errors, b.errors) == (generation, calls, [], [])


def test_the_assignment_of_an_eager_member_is_changed_as_a_whole(reader, crew):
    a = reader()
    b = shared(crew, a)
    for name in ("incremental_assign", "incremental_unassign"):
        error = a.refused(name, [TP("t", 0)])
        assert error.code() == KafkaError._STATE
        assert error.str() == (
            "Changes to the current assignment must be made using assign() when rebalance protocol type is EAGER"
        )
    assert (a.partitions, b.partitions) == ([0, 1], [2, 3])


def test_the_assignment_of_a_cooperative_member_is_changed_by_parts(reader, crew):
    # A callback that was written for an eager group would end the reading of what the member keeps, and nobody else
    # reads that.
    refused = []

    def as_a_whole(consumer, partitions):
        refused.append(a.refused("assign", partitions))

    a = reader(COOPERATIVE)
    a.actions["assign"] = a.actions["revoke"] = as_a_whole
    b = shared(crew, a, COOPERATIVE)
    share = a.partitions
    refused += [a.refused("assign", [TP("t", share[0])]), a.refused("unassign")]
    assert {(error.code(), error.str()) for error in refused[:-1]} == {
        (KafkaError._STATE, "Failed to set assignment: Local: Erroneous state")
    }
    assert (refused[-1].code(), refused[-1].str()) == (
        KafkaError._STATE,
        "Failed to remove assignment: Local: Erroneous state",
    )
    assert len(refused) >= 4
    assert (a.partitions, sorted(a.partitions + b.partitions)) == (share, [0, 1, 2, 3])
    # Who is in no group any more assigns as he likes.
    a.actions.clear()
    a.consumer.unsubscribe()
    crew.until([a], lambda: not a.partitions)
    a.consumer.assign([TP("t", share[0])])
    assert a.partitions == share[:1]


@pytest.mark.slow_but_first
@both_strategies
def test_stored_offsets_of_a_partition_that_has_moved_are_not_taken(reader, crew, strategy):
    a = crew.member("a", {"enable.auto.offset.store": False, **BY_HAND, **strategy}).subscribe()
    crew.until([a], lambda: len(a.records) == 4 * RECORDS)
    b = shared(crew, a, strategy)
    error = a.refused("store_offsets", offsets=[TP("t", b.partitions[0], 1)])
    assert error.code() == KafkaError._STATE
    a.consumer.store_offsets(offsets=[TP("t", a.partitions[0], 2)])
    assert [(tp.partition, tp.offset) for tp in a.consumer.commit(asynchronous=False) if tp.offset >= 0] == [
        (a.partitions[0], 2)
    ]


@pytest.mark.slow_but_first
@both_strategies
def test_records_that_were_read_ahead_go_with_their_partition(four, crew, log, strategy):
    """They are in the member's memory when it gives the partition back; only the new owner hands them out."""
    a = crew.member("a", {**BY_HAND, **strategy}).subscribe()
    crew.until([a], lambda: len(a.records) == 1)
    a.actions["revoke"] = lambda consumer, _: consumer.commit(asynchronous=False)
    b = crew.member("b", {**BY_HAND, **strategy}).subscribe()
    crew.until([a, b], lambda: len(a.records) + len(b.records) == 4 * RECORDS)
    assert sorted(a.places() + b.places()) == [
        ("t", number, offset) for number in range(4) for offset in range(RECORDS)
    ]
    a.actions.clear()


@pytest.mark.slow_but_first
@both_strategies
def test_consume_stops_where_partitions_are_to_be_given_back(four, crew, make_consumer, strategy):
    """What it has gathered is handed out before the callback, and counts as handed out in it."""
    told = []
    a = make_consumer({"client.id": "a", "enable.auto.commit": False, **strategy})

    def give_back(consumer, partitions):
        positions = [tp for tp in consumer.position(partitions) if tp.offset >= 0]
        told.append({tp.partition: tp.offset for tp in positions})
        if positions:
            consumer.commit(offsets=positions, asynchronous=False)

    a.subscribe(["t"], on_revoke=give_back)
    mine = a.consume(3, 60)
    assert len(mine) == 3
    (b,) = crew.members("b", **strategy, enable_auto_commit=False)
    places: list[tuple[object, ...]] = [(message.topic(), message.partition(), message.offset()) for message in mine]

    def consumed():
        places.extend((message.topic(), message.partition(), message.offset()) for message in a.consume(2, 0.05))
        return told and len(places) + len(b.records) >= 4 * RECORDS

    crew.until([b], consumed)
    assert len(told) == 1
    assert sorted(places + b.places()) == [("t", number, offset) for number in range(4) for offset in range(RECORDS)]


def test_cached_watermarks_and_lag_of_what_has_moved_are_forgotten(reader, crew):
    a = reader()
    assert a.consumer.get_watermark_offsets(TP("t", 3), cached=True) == (0, RECORDS)
    b = shared(crew, a)
    crew.until([a, b], lambda: len(b.records) == 2 * RECORDS)
    assert b.consumer.get_watermark_offsets(TP("t", 3), cached=True) == (0, RECORDS)
    assert a.consumer.get_watermark_offsets(TP("t", 3), 20) == (0, RECORDS)

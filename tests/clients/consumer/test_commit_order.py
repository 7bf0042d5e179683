"""Consumers that read in commit order: what comes when, and where they go on, wherever they stop."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.clients.consumer.log_writer import PATIENCE_SECONDS, LogWriter, error_code, polled_until, texts
from tests.log.places import Model
from tests.tools.campaigns import times
from txnstore import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from txnstore.db.opening import open_store
from txnstore.log import commit_order
from txnstore.log.deleting import advance_log_start

COMMIT_ORDER = {"txnstore.delivery.order": "commit", "enable.auto.commit": False}
_numbers = itertools.count(1)


@pytest.fixture
def assigned(make_consumer, log):
    """A consumer of partition 0 of the topic t in commit order, from the beginning unless told otherwise."""

    def make(configuration=(), /, *, offset=OFFSET_BEGINNING, **options):
        consumer = make_consumer({**COMMIT_ORDER, **dict(configuration)})
        consumer.assign([TopicPartition("t", 0, offset, **options)])
        return consumer

    return make


@pytest.fixture
def small_pages(monkeypatch):
    """Let a page hold two batches, and a stretch or a walk few."""
    monkeypatch.setattr(commit_order, "PAGE_BATCHES_MAX", 2)
    monkeypatch.setattr(commit_order, "STRETCH_BATCHES", 3)
    monkeypatch.setattr(commit_order, "WALK_BATCHES", 3)
    monkeypatch.setattr(commit_order, "PAGE_OFFSETS_MAX", 4)


def place_of(consumer, name="t") -> tuple[int, int | None]:
    (partition,) = consumer.position([TopicPartition(name, 0)])
    return partition.offset, partition.offset_in_transaction


def test_what_commits_first_comes_first_and_what_is_in_no_transaction_at_its_own_place(log, assigned):
    """The figure of the proposal: X1 begins before X2 and is committed behind it."""
    log.topic()
    x1, x2 = log.transaction(), log.transaction()
    x1.write("t", 0, b"X1 a")  # 0
    x2.write("t", 0, b"X2 a")  # 1
    log.write("t", 0, b"N1")  # 2
    x1.write("t", 0, b"X1 b")  # 3
    x2.write("t", 0, b"X2 b")  # 4
    x2.end(commit=True)  # 5
    log.write("t", 0, b"N2")  # 6
    x1.end(commit=True)  # 7
    consumer = assigned()
    messages, places = [], []
    for _ in range(6):
        messages.append(consumer.poll(PATIENCE_SECONDS))
        places.append(place_of(consumer))
    assert texts(messages) == [b"N1", b"X2 a", b"X2 b", b"N2", b"X1 a", b"X1 b"]
    assert [message.offset() for message in messages] == [2, 1, 4, 6, 0, 3]
    # Behind the last record of a transaction the position is behind its marker, or where the next one is.
    assert places == [(5, 0), (5, 2), (6, 0), (7, 0), (7, 1), (8, 0)]


def test_an_open_transaction_holds_nobody_back_and_comes_when_it_is_committed(log, assigned):
    log.topic()
    open_, aborted = log.transaction(), log.transaction()
    open_.write("t", 0, b"open")
    aborted.write("t", 0, b"no")
    log.write("t", 0, b"plain")
    aborted.end(commit=False)
    consumer = assigned({"enable.partition.eof": True, "fetch.wait.max.ms": 10})
    assert consumer.poll(PATIENCE_SECONDS).value() == b"plain"
    end = consumer.poll(PATIENCE_SECONDS)
    assert (error_code(end), end.offset()) == (KafkaError._PARTITION_EOF, 4)
    assert place_of(consumer) == (4, 0)
    assert consumer.get_watermark_offsets(TopicPartition("t", 0)) == (0, 4)
    # It grows, and nothing new can be read: the end that was reported still is the end.
    open_.write("t", 0, b"more")
    polled_until(consumer, lambda: place_of(consumer) == (5, 0))
    open_.end(commit=True)
    assert texts(consumer.consume(2, PATIENCE_SECONDS)) == [b"open", b"more"]
    end = consumer.poll(PATIENCE_SECONDS)
    assert (error_code(end), end.offset()) == (KafkaError._PARTITION_EOF, 6)


@pytest.mark.slow
@pytest.mark.usefixtures("small_pages")
def test_whoever_stops_behind_any_record_goes_on_with_the_next_one(log, make_consumer, url):
    """Each record has a consumer of its own, which commits it and is gone."""
    log.topic()
    model = Model()
    first, second = log.transaction(), log.transaction()
    for number in range(5):
        for transaction, count in ((first, 2), (second, 1)):
            transaction.write("t", 0, *(value for _, value in model.values(count)))
            model.write(transaction.transactional_id, count)
        if number == 2:
            log.write("t", 0, *(value for _, value in model.values(2)))
            model.plain(2)
    for transaction in (second, first):
        transaction.end(commit=True)
        model.end(transaction.transactional_id, commit=True)
    log.write("t", 0, *(value for _, value in model.values(1)))
    model.plain(1)
    found = []
    for number in range(len(model.delivered)):
        with Consumer(
            {"bootstrap.servers": url, "group.id": "readers", "auto.offset.reset": "earliest", **COMMIT_ORDER}
        ) as consumer:
            consumer.assign([TopicPartition("t", 0)])
            (message,) = consumer.consume(1, PATIENCE_SECONDS)
            found.append((message.offset(), message.value()))
            if number % 3 == 0:
                consumer.commit(message, asynchronous=False)
            elif number % 3 == 1:
                consumer.commit(pickle.loads(pickle.dumps(message)), asynchronous=False)
            else:
                consumer.commit(asynchronous=False)
            (committed,) = consumer.committed([TopicPartition("t", 0)])
            behind = model.delivered[number].behind
            assert (committed.offset, committed.offset_in_transaction) in {behind, place_of(consumer)}
    assert found == [(one.offset, one.value) for one in model.delivered]


@pytest.mark.slow
@pytest.mark.usefixtures("small_pages")
def test_a_position_is_sought_and_assigned_and_read_again(log, assigned):
    log.topic()
    log.write("t", 0, b"N")
    transaction = log.transaction()
    for value in (b"a", b"b", b"c", b"d", b"e"):
        transaction.write("t", 0, value)
    transaction.end(commit=True)  # 6
    values = [b"N", b"a", b"b", b"c", b"d", b"e"]
    consumer = assigned()
    stops = []
    for _ in values:
        stops.append(place_of(consumer))
        assert consumer.poll(PATIENCE_SECONDS).value() == values[len(stops) - 1]
    stops[0] = (0, 0)
    for number, (offset, within) in enumerate(stops):
        partition = TopicPartition("t", 0, offset, offset_in_transaction=within)
        consumer.seek(partition)
        rest = texts(consumer.consume(len(values) - number, PATIENCE_SECONDS))
        assert rest == values[number:]
        other = assigned(offset=offset, offset_in_transaction=within)
        (own,) = other.assignment()
        assert (own.offset, own.offset_in_transaction) == (offset, within)
        assert texts(other.consume(len(values) - number, PATIENCE_SECONDS)) == rest
    # Without an offset beside it an offset is a place: what is delivered there, or behind it.
    consumer.seek(TopicPartition("t", 0, 3))
    assert texts(consumer.consume(5, PATIENCE_SECONDS)) == values[1:]
    consumer.seek(TopicPartition("t", 0, 7))
    assert consumer.poll(0.3) is None
    consumer.seek(TopicPartition("t", 0, OFFSET_END))
    assert consumer.poll(0.3) is None
    assert place_of(consumer) in {(7, 0), (OFFSET_INVALID, None)}


def test_what_a_consumer_did_not_hand_out_is_given_back_within_a_transaction(log, assigned):
    log.topic()
    transaction = log.transaction()
    transaction.write("t", 0, b"a", b"b", b"c")
    transaction.end(commit=True)
    consumer = assigned()
    assert consumer.poll(PATIENCE_SECONDS).value() == b"a"
    core = consumer._core
    with core.arrived:
        messages: list[Message] = []
        core.subscription.take(messages, 1)
        core.subscription.give_back(messages)
    assert place_of(consumer) == (3, 1)
    assert texts(consumer.consume(2, PATIENCE_SECONDS)) == [b"b", b"c"]


@pytest.mark.slow
def test_a_reader_that_the_log_start_has_passed_begins_where_the_reset_says(log, make_consumer, url):
    log.topic()
    transaction = log.transaction()
    for value in (b"a", b"b", b"c", b"d"):
        transaction.write("t", 0, value)
    transaction.end(commit=True)  # 4
    log.write("t", 0, b"N")
    partition_id = log.partition_id("t", 0)
    log.store.write(lambda connection: advance_log_start(connection, partition_id, 2))
    within = TopicPartition("t", 0, 4, offset_in_transaction=1)
    expected = {"earliest": [b"c", b"d", b"N"], "latest": []}
    for reset, values in expected.items():
        consumer = make_consumer({**COMMIT_ORDER, "auto.offset.reset": reset})
        consumer.assign([within])
        assert texts(_all_of(consumer, len(values))) == values
    consumer = make_consumer({**COMMIT_ORDER, "auto.offset.reset": "error"})
    consumer.assign([within])
    assert error_code(consumer.poll(PATIENCE_SECONDS)) == KafkaError._AUTO_OFFSET_RESET
    # Who had not begun it never sees a part of it; who stands behind what is deleted goes on.
    assert texts(_read(make_consumer, OFFSET_BEGINNING, 1)) == [b"N"]
    assert texts(_read(make_consumer, 4, 2, within=3)) == [b"d", b"N"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("reset", ["earliest", "latest", "error"])
def test_a_position_at_the_first_record_of_a_transaction_is_its_beginning_and_a_deleted_part_leaves_it_out(
    log, make_consumer, reset
):
    log.topic()
    log.write("t", 0, b"N1")
    for committed in (True, False):
        transaction = log.transaction()
        for value in (b"a", b"b", b"c"):
            transaction.write("t", 0, value)
        transaction.end(commit=committed)  # 4 and 8
    log.write("t", 0, b"N2")
    partition_id = log.partition_id("t", 0)
    consumers = []
    for within in (1, 2):
        # A group has committed the same, as one does that has got the first record and gives it back.
        settings = {**COMMIT_ORDER, "auto.offset.reset": reset, "group.id": f"group {within}"}
        consumers.append((within, make_consumer(settings), make_consumer(settings)))
        consumers[-1][1].commit(offsets=[TopicPartition("t", 0, 4, offset_in_transaction=within)], asynchronous=False)
    log.store.write(lambda connection: advance_log_start(connection, partition_id, 3))
    whole, rest = [b"N2"], {"earliest": [b"c", b"N2"], "latest": []}
    for within, told, stored in consumers:
        told.assign([TopicPartition("t", 0, 4, offset_in_transaction=within)])
        stored.assign([TopicPartition("t", 0)])
        for consumer in (told, stored):
            if within == 2 and reset == "error":
                assert error_code(consumer.poll(PATIENCE_SECONDS)) == KafkaError._AUTO_OFFSET_RESET
                continue
            expected = whole if within == 1 else rest[reset]
            assert texts(consumer.consume(len(expected) or 1, PATIENCE_SECONDS if expected else 0.5)) == expected
    # Where nothing was committed an offset in a transaction says nothing.
    consumer = consumers[0][1]
    for position in (TopicPartition("t", 0, 8, offset_in_transaction=2), TopicPartition("t", 0, 4)):
        consumer.seek(position)
        assert texts(consumer.consume(1, PATIENCE_SECONDS)) == whole


def _read(make_consumer: Any, offset: int, count: int, within: int | None = None) -> list[Message]:
    consumer: Consumer = make_consumer(COMMIT_ORDER)
    consumer.assign([TopicPartition("t", 0, offset, offset_in_transaction=within)])
    return _all_of(consumer, count)


def _all_of(consumer: Consumer, count: int) -> list[Message]:
    """Return so many records, and one more if there is any."""
    return [*(consumer.consume(count, PATIENCE_SECONDS) if count else ()), *consumer.consume(1, 0.5)]


def test_offsets_by_time_and_statistics_are_places(log, assigned):
    log.topic()
    transaction = log.transaction()
    log.write("t", 0, b"old", timestamp_ms=500)
    transaction.write("t", 0, b"open")
    log.write("t", 0, b"new", timestamp_ms=2_000)
    consumer = assigned()
    assert texts(consumer.consume(2, PATIENCE_SECONDS)) == [b"old", b"new"]
    times = [TopicPartition("t", 0, at_ms) for at_ms in (600, 1_500, 3_000)]
    found = [consumer.offsets_for_times([time])[0] for time in times]
    assert [(one.offset, one.offset_in_transaction) for one in found] == [(1, 0), (2, 0), (OFFSET_END, None)]
    facts = consumer._core._facts()["topics"]["t"]["partitions"]["0"]
    assert (facts["app_offset"], facts["hi_offset"], facts["consumer_lag"]) == (3, 3, 0)


def test_read_uncommitted_is_refused(make_consumer):
    with pytest.raises(KafkaException, match=r"`txnstore.delivery.order=commit` requires"):
        make_consumer({**COMMIT_ORDER, "isolation.level": "read_uncommitted"})


def test_offsets_of_the_other_order_are_refused_by_every_call(log, assigned, make_consumer):
    log.topic()
    log.write("t", 0, b"a")
    placed, plain = TopicPartition("t", 0, 1, offset_in_transaction=0), TopicPartition("t", 0, 1)
    by_offset = make_consumer({"enable.auto.commit": False, "enable.auto.offset.store": False})
    for call in (
        lambda: by_offset.assign([placed]),
        lambda: by_offset.commit(offsets=[placed]),
        lambda: by_offset.store_offsets(offsets=[placed]),
    ):
        with pytest.raises(
            KafkaException, match="is in commit order, and this consumer reads in offset order"
        ) as raised:
            call()
        assert raised.value.args[0].code() == KafkaError._INVALID_ARG
    by_offset.assign([TopicPartition("t", 0, 0)])
    with pytest.raises(KafkaException, match="is in commit order"):
        by_offset.seek(placed)
    message = by_offset.poll(PATIENCE_SECONDS)
    consumer = assigned({"enable.auto.offset.store": False})
    for call in (
        lambda: consumer.commit(offsets=[plain]),
        lambda: consumer.commit(message),
        lambda: consumer.store_offsets(offsets=[plain]),
        lambda: consumer.store_offsets(message),
    ):
        with pytest.raises(KafkaException, match="has no offset_in_transaction"):
            call()
    with pytest.raises(KafkaException, match="is in commit order"):
        by_offset.commit(consumer.poll(PATIENCE_SECONDS))


STEPS = st.one_of(
    st.tuples(st.just("plain"), st.integers(1, 2)),
    st.tuples(st.just("write"), st.sampled_from("AB"), st.integers(1, 2)),
    st.tuples(st.just("write"), st.sampled_from("AB"), st.integers(1, 2)),
    st.tuples(st.just("end"), st.sampled_from("AB"), st.sampled_from([True, True, False])),
    st.tuples(st.just("read"), st.integers(1, 4), st.sampled_from(["message", "stored", "position", "close"])),
)


@pytest.mark.slow
@pytest.mark.campaign
@settings(max_examples=times(8), suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEPS, min_size=8, max_size=20))
def test_whatever_is_written_and_whenever_readers_stop_every_record_comes_once_and_in_order(module_url, steps):
    name = f"t{next(_numbers)}"
    model = Model()
    found: list[tuple[int | None, bytes | None]] = []
    with open_store(module_url) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit_order, "PAGE_BATCHES_MAX", 2)
        patch.setattr(commit_order, "STRETCH_BATCHES", 3)
        log = LogWriter(store)
        log.topic(name)
        producers = {producer: log.transaction() for producer in "AB"}
        for kind, *of in [*steps, ("read", 1_000, "message")]:
            if kind == "plain":
                log.write(name, 0, *(value for _, value in model.values(of[0])))
                model.plain(of[0])
            elif kind == "write":
                producers[of[0]].write(name, 0, *(value for _, value in model.values(of[1])))
                model.write(of[0], of[1])
            elif kind == "end":
                if of[0] in model.open:
                    producers[of[0]].end(commit=of[1])
                    producers[of[0]] = log.transaction()
                    model.end(of[0], commit=of[1])
            else:
                due = len(model.delivered) - len(found)
                found += _read_and_commit(module_url, name, min(of[0], due), of[1])
    assert found == [(one.offset, one.value) for one in model.delivered]


def _read_and_commit(url: str, name: str, count: int, how: str) -> list[tuple[int | None, bytes | None]]:
    """Return what a consumer reads that goes on where the group was, and commits in one of the ways."""
    options = {**COMMIT_ORDER, "enable.auto.commit": how == "close", "auto.offset.reset": "earliest"}
    with Consumer({"bootstrap.servers": url, "group.id": name, **options}) as consumer:
        consumer.assign([TopicPartition(name, 0)])
        messages = consumer.consume(count, PATIENCE_SECONDS)
        assert len(messages) == count
        if messages and how == "message":
            consumer.commit(messages[-1], asynchronous=False)
        elif messages and how == "stored":
            consumer.commit(asynchronous=False)
        elif messages and how == "position":
            consumer.commit(offsets=consumer.position(consumer.assignment()), asynchronous=False)
        return [(message.offset(), message.value()) for message in messages]

"""Commits that nobody waits for: done in order, many at once, and if one fails none that follows."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from tests.clients.consumer.log_writer import eventually
from tests.clients.producer.pipelined import *  # noqa: F403 - the fixtures
from tests.clients.producer.pipelined import ABORTABLE, FATAL, begun, delete_for_good, failure_of, flags_of, left
from tests.clients.producer.transactional import TOPIC, committed, read, seen
from tests.clients.steps import NO_MEMBER, PATIENCE_SECONDS, create_topic, error_of, read_to_end, values
from tests.tools.proxy import Proxy, upstream_of
from txnstore import KafkaError, KafkaException, Producer, TopicPartition
from txnstore.clients.producer import pipeline as pipeline_module
from txnstore.db.opening import open_store
from txnstore.errors import OutcomeUnknown
from txnstore.log.columns import fitting
from txnstore.testing.invariants import assert_sound
from txnstore.transactions.coordinator import TransactionCoordinator

Report = tuple[Any, Any]


@pytest.fixture
def together(monkeypatch):
    """How many transactions each database transaction committed that committed several, or was to."""
    counts = []
    commit_several = TransactionCoordinator.commit_several

    def counting(self, transactional_id, commits, **named):
        counts.append(len(commits))
        return commit_several(self, transactional_id, commits, **named)

    monkeypatch.setattr(TransactionCoordinator, "commit_several", counting)
    return counts


def test_commits_are_done_in_order_and_each_is_seen_as_a_whole(ready, url, topic):
    futures = [left(ready, topic, b"%d a" % number, b"%d b" % number) for number in range(20)]
    for future in futures:
        assert future.result(PATIENCE_SECONDS) is None
    wanted = [b"%d %s" % (number, part) for number in range(20) for part in (b"a", b"b")]
    assert seen(url, topic) == ([b"before", *wanted], [b"before", *wanted])
    # Each transaction has a marker of its own.
    assert [message.offset() for message in read_to_end(url, topic)][:5] == [0, 2, 3, 5, 6]


def test_the_next_transaction_begins_while_commits_wait_and_all_are_made_at_once(
    ready, hold_database, together, url, topic
):
    with hold_database(url):
        futures = [left(ready, topic, b"%d" % number) for number in range(10)]
        begun(ready, topic, b"open")
        assert not any(future.done() for future in futures)
    for future in futures:
        future.result(PATIENCE_SECONDS)
    # What the thread had taken before the others came was by itself.
    assert max(together) > 1
    assert values(read_to_end(url, topic)) == [b"before", *(b"%d" % number for number in range(10))]
    ready.commit_transaction(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic))[-1] == b"open"
    with open_store(url) as store:
        assert_sound(store, at_rest=True)


def test_each_partition_holds_the_records_of_all_transactions_in_order(ready, hold_database, url):
    topic = create_topic(url, "parted", 3)
    left(ready, topic, b"before").result(PATIENCE_SECONDS)
    with hold_database(url):
        futures = [left(ready, topic, b"%d" % number, partition=2 - number % 3) for number in range(9)]
    for future in futures:
        future.result(PATIENCE_SECONDS)
    found = read_to_end(url, topic, partitions=(0, 1, 2))
    for partition in range(3):
        wanted = [b"before"] * (partition == 0) + [b"%d" % n for n in range(9) if 2 - n % 3 == partition]
        assert [m.value() for m in found if m.partition() == partition] == wanted


def test_reports_come_after_the_commit_and_are_served_by_the_next_one(ready, hold_database, url, topic):
    reports: list[Report] = []
    with hold_database(url):
        future = left(ready, topic, b"1", b"2", reports=reports)
        assert len(ready) == 2
        ready.poll(0)
        assert reports == []
    future.result(PATIENCE_SECONDS)
    left(ready, topic, b"3").result(PATIENCE_SECONDS)
    assert reports == [(None, b"1"), (None, b"2")]
    assert ready.flush(PATIENCE_SECONDS) == 0
    assert len(ready) == 0


def test_flush_waits_for_commits(ready, hold_database, url, topic):
    with hold_database(url):
        future = left(ready, topic, b"1")
        assert ready.flush(0.05) == 1
    assert ready.flush(PATIENCE_SECONDS) == 0
    assert future.result(PATIENCE_SECONDS) is None


def test_nobody_can_cancel_a_commit(ready, hold_database, url, topic):
    with hold_database(url):
        future = left(ready, topic, b"1")
        assert not future.cancel()
    assert future.result(PATIENCE_SECONDS) is None


def test_an_empty_transaction_waits_for_its_turn(ready, hold_database, url, topic):
    with hold_database(url):
        futures = [
            left(ready, topic, b"1"),
            left(ready, topic),
            left(ready, topic, b"2"),
            left(ready, topic),
        ]
        assert not any(future.done() for future in futures)
    for future in futures:
        future.result(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic)) == [b"before", b"1", b"2"]


@pytest.mark.parametrize("ends", ["commit", "abort"])
def test_a_call_that_is_waited_for_comes_after_them(ready, hold_database, url, topic, ends):
    futures: list[Future[None]] = []

    def program():
        futures.extend(left(ready, topic, b"%d" % number) for number in range(3))
        begun(ready, topic, b"last")

    with hold_database(url):
        program()
        end = ready.commit_transaction if ends == "commit" else ready.abort_transaction
        assert error_of(end, 0.05).code() == KafkaError._TIMED_OUT
    end(PATIENCE_SECONDS)
    assert all(future.done() for future in futures)
    assert values(read_to_end(url, topic)) == [b"before", b"0", b"1", b"2", *([b"last"] if ends == "commit" else [])]


def test_it_needs_a_transaction(ready, make_producer, topic):
    assert error_of(ready.commit_transaction_async).code() == KafkaError._STATE
    left(ready, topic, b"1").result(PATIENCE_SECONDS)
    assert error_of(ready.commit_transaction_async).code() == KafkaError._STATE
    assert error_of(make_producer().commit_transaction_async).code() == KafkaError._NOT_CONFIGURED


def test_no_more_wait_than_there_is_room_for(make_transactional, hold_database, monkeypatch, url, topic):
    monkeypatch.setattr(pipeline_module, "PENDING_MAX", 2)
    ready = make_transactional(transaction_timeout_ms=1_000)
    left(ready, topic, b"before").result(PATIENCE_SECONDS)
    with hold_database(url):
        futures = [left(ready, topic, b"1"), left(ready, topic, b"2")]
        begun(ready, topic)
        error = error_of(ready.commit_transaction_async)
        assert (error.code(), error.retriable()) == (KafkaError._TIMED_OUT, True)
    futures.append(ready.commit_transaction_async())
    for future in futures:
        future.result(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic)) == [b"before", b"1", b"2"]


# --- what is not wholly in the client ------------------------------------------------------------------------------


def test_what_was_written_in_part_is_waited_for_by_the_next_transaction(ready, hold_database, url, topic):
    begun(ready, topic, b"written")
    assert ready.flush(PATIENCE_SECONDS) == 0
    ready.produce(topic, b"more", partition=0)
    with hold_database(url):
        future = ready.commit_transaction_async()
        assert not future.done()
        assert error_of(ready.produce, topic, b"too late").code() == KafkaError._STATE
    ready.begin_transaction()
    assert values(read_to_end(url, topic)) == [b"before", b"written", b"more"]
    # Who waits for an answer and who is told of it go on in any order.
    future.result(PATIENCE_SECONDS)
    ready.produce(topic, b"next", partition=0)
    ready.commit_transaction(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic)) == [b"before", b"written", b"more", b"next"]


def test_a_topic_that_has_to_be_looked_up_is_no_obstacle(ready, url):
    futures = [left(ready, f"new-{number % 2}", b"%d" % number) for number in range(4)]
    for future in futures:
        future.result(PATIENCE_SECONDS)
    assert values(read_to_end(url, "new-0")) == [b"0", b"2"]
    assert values(read_to_end(url, "new-1")) == [b"1", b"3"]


def test_offsets_of_a_consumer_that_only_assigns_are_written_before(ready, make_consumer, url, topic):
    begun(ready, topic, b"1")
    ready.send_offsets_to_transaction([TopicPartition(topic, 0, 5)], NO_MEMBER, PATIENCE_SECONDS)
    future = ready.commit_transaction_async()
    begun(ready, topic, b"2")
    assert values(read_to_end(url, topic)) == [b"before", b"1"]
    future.result(PATIENCE_SECONDS)
    ready.commit_transaction_async().result(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic)) == [b"before", b"1", b"2"]
    assert committed(make_consumer(), topic) == 5


def test_a_timed_out_commit_is_still_refused_a_next_transaction(ready, hold_database, url, topic):
    begun(ready, topic, b"1")
    with hold_database(url):
        assert error_of(ready.commit_transaction, 0.05).code() == KafkaError._TIMED_OUT
        assert error_of(ready.begin_transaction).code() == KafkaError._CONFLICT
        assert not ready.commit_transaction_async().done()
    ready.begin_transaction()
    ready.abort_transaction(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic)) == [b"before", b"1"]


# --- offsets of a member -------------------------------------------------------------------------------------------


def test_a_member_s_offsets_go_along(ready, make_consumer, plainly, url, topic):
    plainly(topic, *(b"%d" % number for number in range(12)))
    results = create_topic(url, "results")
    consumer = make_consumer({"group.id": "copiers", "enable.auto.commit": False})
    consumer.subscribe([topic])
    futures: list[Future[None]] = []
    for message in read(consumer, 13):
        ready.begin_transaction()
        ready.produce(results, message.value(), partition=0)
        ready.send_offsets_to_transaction(
            [TopicPartition(topic, 0, message.offset() + 1)], consumer.consumer_group_metadata(), PATIENCE_SECONDS
        )
        futures.append(ready.commit_transaction_async())
    for future in futures:
        future.result(PATIENCE_SECONDS)
    assert committed(consumer, topic) == 14
    assert values(read_to_end(url, results)) == [b"before", *(b"%d" % number for number in range(12))]


def test_offsets_of_a_member_that_has_been_replaced_take_all_that_follows_with_them(
    ready, make_consumer, hold_database, plainly, url, topic
):
    plainly(topic, b"1", b"2")
    results = create_topic(url, "results")
    settings = {"group.id": "copiers", "enable.auto.commit": False, "group.instance.id": "one"}
    consumer = make_consumer(settings)
    consumer.subscribe([topic])
    messages = read(consumer, 3)

    def copy(message):
        ready.begin_transaction()
        ready.produce(results, message.value(), partition=0)
        ready.send_offsets_to_transaction([TopicPartition(topic, 0, message.offset() + 1)], metadata, PATIENCE_SECONDS)
        return ready.commit_transaction_async()

    metadata = consumer.consumer_group_metadata()
    copy(messages[0]).result(PATIENCE_SECONDS)
    # Another process with the same instance id has taken its place.
    successor = make_consumer(settings)
    successor.subscribe([topic])
    read(successor, 2)
    with hold_database(url):
        futures = [copy(message) for message in messages[1:]]
    first, second = map(failure_of, futures)
    assert flags_of(first) == flags_of(second) == ABORTABLE
    assert first.code() == second.code() == KafkaError.FENCED_INSTANCE_ID
    assert "an earlier transaction" in second.str()
    ready.abort_transaction(PATIENCE_SECONDS)
    assert values(read_to_end(url, results)) == [b"before"]
    assert committed(successor, topic) == 1


# --- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.slow_but_first
@pytest.mark.parametrize("is_open", [True, False], ids=["in the next transaction", "between transactions"])
def test_a_refused_commit_takes_all_that_follow_with_it(ready, hold_database, url, topic, is_open):
    other = create_topic(url, "passing")
    reports: list[Report] = []
    missed: list[Report] = []
    left(ready, other, b"before").result(PATIENCE_SECONDS)
    delete_for_good(url, other)
    with hold_database(url):
        futures = [
            left(ready, topic, b"good", reports=reports),
            left(ready, other, b"at fault", reports=reports),
            left(ready, topic, b"follows", reports=reports),
        ]
        if is_open:
            begun(ready, topic, b"open", reports=missed)
    assert futures[0].result(PATIENCE_SECONDS) is None
    errors = [failure_of(future) for future in futures[1:]]
    assert [error.code() for error in errors] == [KafkaError.UNKNOWN_TOPIC_OR_PART] * 2
    assert [flags_of(error) for error in errors] == [ABORTABLE] * 2

    for call in (ready.begin_transaction, ready.commit_transaction, ready.commit_transaction_async):
        assert error_of(call).code() == KafkaError.UNKNOWN_TOPIC_OR_PART
    ready.abort_transaction(PATIENCE_SECONDS)
    assert [(error and error.code(), value) for error, value in reports] == [
        (None, b"good"),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, b"at fault"),
        (KafkaError._PURGE_QUEUE, b"follows"),
    ]
    assert [error.code() for error, _ in missed] == [KafkaError._PURGE_QUEUE] * is_open
    left(ready, topic, b"after").result(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic)) == [b"before", b"good", b"after"]
    assert ready.flush(PATIENCE_SECONDS) == 0
    with open_store(url) as store:
        assert_sound(store, at_rest=True)


def test_a_newer_producer_fences_them_all(ready, make_transactional, hold_database, url, topic):
    make_transactional()
    with hold_database(url):
        futures = [left(ready, topic, b"%d" % number) for number in range(3)]
    for future in futures:
        error = failure_of(future)
        assert (error.code(), flags_of(error)) == (KafkaError._FENCED, FATAL)
    assert error_of(ready.begin_transaction).code() == KafkaError._FENCED
    assert values(read_to_end(url, topic)) == [b"before"]


def test_abort_takes_note_of_what_has_failed(ready, make_transactional, hold_database, url, topic):
    other = create_topic(url, "passing")
    left(ready, other, b"before").result(PATIENCE_SECONDS)
    delete_for_good(url, other)
    with hold_database(url):
        future = left(ready, other, b"at fault")
        begun(ready, topic, b"given up")
        assert error_of(ready.abort_transaction, 0.05).code() == KafkaError._TIMED_OUT
    ready.abort_transaction(PATIENCE_SECONDS)
    assert failure_of(future).code() == KafkaError.UNKNOWN_TOPIC_OR_PART
    left(ready, topic, b"after").result(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic)) == [b"before", b"after"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("error", [OutcomeUnknown, MemoryError])
@pytest.mark.parametrize("is_made", [True, False], ids=["after", "before"])
def test_a_lost_answer_is_asked_for_again_one_by_one(ready, hold_database, monkeypatch, url, topic, is_made, error):
    commit_several = TransactionCoordinator.commit_several
    lost = []

    def losing(self, transactional_id, commits, **named):
        if is_made:
            # A database that is still busy is asked again, and its answer to that is lost.
            assert commit_several(self, transactional_id, commits, **named) is not None
        monkeypatch.setattr(TransactionCoordinator, "commit_several", commit_several)
        lost.append(len(commits))
        raise error

    reports: list[Report] = []
    monkeypatch.setattr(TransactionCoordinator, "commit_several", losing)
    with hold_database(url):
        futures = [left(ready, topic, b"%d" % number, reports=reports) for number in range(5)]
    for future in futures:
        future.result(PATIENCE_SECONDS)
    left(ready, topic, b"after").result(PATIENCE_SECONDS)
    assert lost[0] > 1
    assert values(read_to_end(url, topic)) == [b"before", *(b"%d" % number for number in range(5)), b"after"]
    assert [error for error, _ in reports] == [None] * 5
    with open_store(url) as store:
        assert_sound(store, at_rest=True)


def test_a_commit_that_stands_is_told_though_another_process_has_started(
    ready, make_transactional, hold_database, monkeypatch, url, topic
):
    commit_several = TransactionCoordinator.commit_several

    def losing(self, transactional_id, commits, **named):
        # A database that is still busy is asked again, and its answer to that is lost.
        assert commit_several(self, transactional_id, commits, **named) is not None
        monkeypatch.setattr(TransactionCoordinator, "commit_several", commit_several)
        make_transactional()
        raise OutcomeUnknown

    with hold_database(url):
        # The thread takes the first alone.
        futures = [left(ready, topic, b"first")]
        monkeypatch.setattr(TransactionCoordinator, "commit_several", losing)
        futures += [left(ready, topic, b"%d" % number) for number in range(3)]
    for future in futures:
        assert future.result(PATIENCE_SECONDS) is None
    assert values(read_to_end(url, topic)) == [b"before", b"first", b"0", b"1", b"2"]
    begun(ready, topic, b"too late")
    assert error_of(ready.commit_transaction, PATIENCE_SECONDS).code() == KafkaError._FENCED


def test_a_connection_that_is_cut_at_a_commit_is_not_noticed(txnstore_postgresql_url):
    url = txnstore_postgresql_url
    create_topic(url, TOPIC)
    with Proxy(upstream_of(url)) as proxy:
        ready = Producer({"bootstrap.servers": proxy.url(url), "transactional.id": "anna"})
        ready.init_transactions(PATIENCE_SECONDS)
        wanted = []
        for number in range(12):
            side = ("before", "after")[number % 2]
            cut = proxy.cut(**{side: "COMMIT"})
            futures = [left(ready, TOPIC, b"%d %d" % (number, part)) for part in range(5)]
            wanted += [b"%d %d" % (number, part) for part in range(5)]
            for future in futures:
                future.result(PATIENCE_SECONDS)
            del cut
        ready.close()
    assert values(read_to_end(url, TOPIC)) == wanted


# --- the end -------------------------------------------------------------------------------------------------------


def test_close_waits_for_commits(make_transactional, hold_database, url, topic):
    ready = make_transactional()
    left(ready, topic, b"before").result(PATIENCE_SECONDS)
    with hold_database(url):
        futures = [left(ready, topic, b"%d" % number) for number in range(3)]
        closing = threading.Thread(target=ready.close)
        closing.start()
    closing.join(PATIENCE_SECONDS)
    assert [future.result(0) for future in futures] == [None] * 3
    assert values(read_to_end(url, topic)) == [b"before", b"0", b"1", b"2"]


def test_the_futures_of_a_producer_that_nobody_holds_are_done(url, topic, hold_database):
    ready = Producer({"bootstrap.servers": url, "transactional.id": "anna"})
    ready.init_transactions(PATIENCE_SECONDS)
    left(ready, topic, b"before").result(PATIENCE_SECONDS)
    with hold_database(url):
        futures = [left(ready, topic, b"%d" % number) for number in range(3)]
        del ready
        # Its thread may be at work, and hold it for a moment.
        eventually(lambda: gc.collect() >= 0 and all(future.done() for future in futures))
        for future in futures:
            with pytest.raises((RuntimeError, KafkaException), match="closed"):
                future.result(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic)) == [b"before"]


def test_a_transaction_whose_records_cannot_be_taken_at_once_is_not_committed_in_part(ready, url, monkeypatch):
    """An error half way, that of a lack of memory for one, is not the end of the sender's thread."""
    topics = [create_topic(url, name) for name in ("first", "second")]
    failed = threading.Event()

    def failing(sizes_bytes, keys, values, *rest, **named):
        if values == [b"second"] and not failed.is_set():
            failed.set()
            raise MemoryError
        return fitting(sizes_bytes, keys, values, *rest, **named)

    monkeypatch.setattr("txnstore.clients.producer.queue.fitting", failing)
    ready.begin_transaction()
    for topic in topics:
        ready.produce(topic, topic.encode())
    ready.commit_transaction_async().result(PATIENCE_SECONDS)
    assert failed.is_set()
    assert [values(read_to_end(url, topic)) for topic in topics] == [[b"first"], [b"second"]]

"""Transactions in programs: who is fenced, with blocks, and loops that read, transform and write."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import warnings
from types import SimpleNamespace

import pytest
from sqlalchemy import update

from tests.clients.producer.transactional import *  # noqa: F403 - the fixtures
from tests.clients.producer.transactional import committed, read, seen
from tests.clients.steps import (
    PATIENCE_SECONDS,
    create_topic,
    error_of,
    refusal_of,
    time_out,
)
from txnstore import Consumer, KafkaError, KafkaException, TopicPartition
from txnstore.clients.producer.state import TransactionCall
from txnstore.db.schema import transactions
from txnstore.transactions.protocol import EPOCH_EXHAUSTED
from txnstore.transactions.recovery import abort_by_administrator

# Who is fenced.


def test_the_older_of_two_producers_is_fenced_and_what_it_left_open_is_aborted(make_transactional, url, topic):
    older = make_transactional()
    older.begin_transaction()
    older.produce(topic, b"older", partition=0)
    assert older.flush(PATIENCE_SECONDS) == 0

    newer = make_transactional()
    newer.begin_transaction()
    newer.produce(topic, b"newer", partition=0)
    older.produce(topic, b"late", partition=0)
    error = error_of(older.commit_transaction, PATIENCE_SECONDS)
    newer.commit_transaction(PATIENCE_SECONDS)

    assert (error.code(), error.fatal()) == (KafkaError._FENCED, True)
    assert seen(url, topic) == ([b"newer"], [b"older", b"newer"])
    older.close()
    newer.begin_transaction()
    newer.produce(topic, b"goes on", partition=0)
    newer.commit_transaction(PATIENCE_SECONDS)
    assert seen(url, topic)[0] == [b"newer", b"goes on"]


def test_a_producer_that_is_fenced_between_two_transactions_finds_out_in_the_next(make_transactional, url, topic):
    older, newer = make_transactional(), make_transactional()
    older.begin_transaction()
    older.produce(topic, b"late", partition=0)

    assert error_of(older.commit_transaction, PATIENCE_SECONDS).code() == KafkaError._FENCED
    newer.begin_transaction()
    newer.produce(topic, b"newer", partition=0)
    newer.commit_transaction(PATIENCE_SECONDS)
    assert seen(url, topic) == ([b"newer"], [b"newer"])


def test_closing_the_fenced_one_harms_the_newer_one_nothing(make_transactional, url, topic):
    older = make_transactional()
    older.begin_transaction()
    older.produce(topic, b"older", partition=0)
    assert older.flush(PATIENCE_SECONDS) == 0
    newer = make_transactional()
    newer.begin_transaction()
    newer.produce(topic, b"newer", partition=0)
    assert newer.flush(PATIENCE_SECONDS) == 0

    with warnings.catch_warnings():
        # confluent-kafka warns of the abort that failed; whether and how is not tried here.
        warnings.simplefilter("ignore", RuntimeWarning)
        assert older.close() is True

    newer.commit_transaction(PATIENCE_SECONDS)
    assert seen(url, topic)[0] == [b"newer"]


def test_after_its_time_the_same_producer_resumes(store, clock, make_transactional, url, topic):
    producer = make_transactional(transaction_timeout_ms=30_000, txnstore_clock=clock)
    producer.begin_transaction()
    producer.produce(topic, b"lost", partition=0)
    assert producer.flush(PATIENCE_SECONDS) == 0
    clock.advance(30_001)
    time_out(store)

    producer.produce(topic, b"late", partition=0)
    assert error_of(producer.commit_transaction, PATIENCE_SECONDS).txn_requires_abort()
    producer.abort_transaction(PATIENCE_SECONDS)
    for value in (b"1", b"2"):
        producer.begin_transaction()
        producer.produce(topic, value, partition=0)
        producer.commit_transaction(PATIENCE_SECONDS)

    assert seen(url, topic)[0] == [b"1", b"2"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("left", range(4))
def test_a_producer_goes_on_past_the_last_epoch_of_its_producer_id(store, make_transactional, url, topic, left):
    """Every end of a transaction takes an epoch (KIP-890); after the last one there is a new producer id."""
    make_transactional().close()
    row = update(transactions).where(transactions.c.transactional_id == "anna")
    store.write(lambda connection: connection.execute(row.values(producer_epoch=EPOCH_EXHAUSTED - 2 - left)))
    producer = make_transactional()
    committed_values = []
    for number, end in enumerate(["commit", "abort", "from outside", "commit", "from outside", "abort", "commit"]):
        producer.begin_transaction()
        producer.produce(topic, b"%d" % number, partition=0)
        if end == "commit":
            producer.commit_transaction(PATIENCE_SECONDS)
            committed_values.append(b"%d" % number)
            continue
        assert producer.flush(PATIENCE_SECONDS) == 0
        if end == "from outside":
            assert abort_by_administrator(store, "anna")
            assert error_of(producer.commit_transaction, PATIENCE_SECONDS).txn_requires_abort()
        producer.abort_transaction(PATIENCE_SECONDS)

    assert seen(url, topic)[0] == committed_values


# with producer.transaction():


def test_a_with_block_commits(producer, url, topic):
    with producer.transaction():
        producer.produce(topic, b"1", partition=0)
    with producer.transaction():
        producer.produce(topic, b"2", partition=0)

    assert seen(url, topic)[0] == [b"1", b"2"]


class Interrupted(BaseException):
    """Something from outside that is not an Exception."""


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "error", [ValueError("no"), KeyboardInterrupt(), SystemExit(3), GeneratorExit(), Interrupted()]
)
def test_a_with_block_that_raises_aborts_and_raises_the_same(producer, url, topic, error):
    def program():
        with producer.transaction():
            producer.produce(topic, b"aborted", partition=0)
            raise error

    with pytest.raises(type(error)) as caught:
        program()
    assert caught.value is error
    with producer.transaction():
        producer.produce(topic, b"committed", partition=0)
    assert seen(url, topic)[0] == [b"committed"]


def test_a_with_block_that_is_fenced_raises_that(make_transactional, topic):
    older = make_transactional()

    def program():
        with older.transaction():
            make_transactional()
            older.produce(topic, b"late", partition=0)

    error = error_of(program)
    assert (error.code(), error.fatal()) == (KafkaError._FENCED, True)


def test_a_with_block_that_cannot_commit_aborts_and_says_why(producer, url):
    topic = create_topic(url, "small", max_message_bytes="1000")

    def program():
        with producer.transaction():
            producer.produce(topic, b"small", partition=0)
            producer.produce(topic, b"x" * 2000, partition=0)

    assert error_of(program).txn_requires_abort()
    with producer.transaction():
        producer.produce(topic, b"committed", partition=0)
    assert seen(url, topic)[0] == [b"committed"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("is_held", [False, True])
def test_a_with_block_that_has_not_waited_for_its_own_abort_ends_with_it(
    producer, url, topic, hold_database, monkeypatch, is_held
):
    held = contextlib.ExitStack()

    def program():
        with producer.transaction(0.2 if is_held else PATIENCE_SECONDS):
            producer.produce(topic, b"aborted", partition=0)
            assert producer.flush(PATIENCE_SECONDS) == 0
            held.enter_context(hold_database(url))
            assert error_of(producer.abort_transaction, 0.01).code() == KafkaError._TIMED_OUT
            if not is_held:
                held.close()

    with monkeypatch.context() as patch, held:
        patch.setattr(producer, "commit_transaction", lambda *_: pytest.fail("it was asked to commit"))
        with pytest.raises(KafkaException, match="the block has aborted its transaction itself") as caught:
            program()
    error = caught.value.args[0]
    assert (error.code(), error.retriable()) == (KafkaError._STATE, False)
    notes = getattr(caught.value, "__notes__", [])
    assert ["could not be aborted either" in note for note in notes] == [True] * is_held
    if is_held:
        producer.abort_transaction(PATIENCE_SECONDS)
    with producer.transaction():
        producer.produce(topic, b"committed", partition=0)
    assert seen(url, topic)[0] == [b"committed"]


def test_a_with_block_pauses_before_it_asks_again_while_another_call_is_being_made(producer, url, topic, monkeypatch):
    progress, pauses = producer._progress, []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 5:
            with progress.lock:
                progress.current = None

    monkeypatch.setattr(
        "txnstore.clients.producer.endings.time", SimpleNamespace(monotonic=time.monotonic, sleep=pause)
    )
    with producer.transaction():
        producer.produce(topic, b"1", partition=0)
        with progress.lock:
            progress.current = TransactionCall.SEND_OFFSETS
    assert len(pauses) == 5
    assert 0 < pauses[0] < pauses[3] <= 1
    assert seen(url, topic)[0] == [b"1"]


def test_with_blocks_do_not_nest(producer, url, topic):
    def program():
        with producer.transaction():
            producer.produce(topic, b"outer", partition=0)
            with producer.transaction():
                pytest.fail("a second transaction began")

    assert error_of(program).code() == KafkaError._STATE
    with producer.transaction():
        producer.produce(topic, b"next", partition=0)
    assert seen(url, topic)[0] == [b"next"]


def test_a_with_block_carries_offsets_too(producer, make_consumer, topic):
    consumer = make_consumer()
    with producer.transaction():
        producer.send_offsets_to_transaction([TopicPartition(topic, 0, 4)], consumer.consumer_group_metadata())

    assert committed(consumer, topic) == 4


# Programs.


def test_a_program_that_turns_one_topic_into_another(producer, plainly, make_consumer, url):
    """The flow of confluent-kafka's example eos_transactions: poll, produce, send offsets, commit now and then."""
    source, target = create_topic(url, "input"), create_topic(url, "output")
    plainly(source, *(b"%d" % number for number in range(25)))
    consumer = make_consumer({"enable.auto.commit": False, "enable.partition.eof": True})
    consumer.subscribe([source])
    at_end = False
    waited = itertools.count()
    producer.begin_transaction()
    in_transaction = 0
    while not at_end:
        producer.poll(0)
        message = consumer.poll(0.2)
        assert next(waited) < 500
        if message is None:
            continue
        if message.error() is not None:
            assert message.error() == KafkaError._PARTITION_EOF
            at_end = True
        else:
            producer.produce(target, b"<%s>" % message.value(), partition=0, on_delivery=_assert_delivered)
            in_transaction += 1
        if at_end or in_transaction == 10:
            producer.send_offsets_to_transaction(
                consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), PATIENCE_SECONDS
            )
            producer.commit_transaction(PATIENCE_SECONDS)
            producer.begin_transaction()
            in_transaction = 0
    producer.abort_transaction(PATIENCE_SECONDS)

    assert seen(url, target)[0] == [b"<%d>" % number for number in range(25)]
    assert committed(consumer, source) == 25


def _assert_delivered(error, message):
    assert error is None, error


def test_a_program_that_aborts_goes_back_to_its_committed_offsets(producer, plainly, make_consumer, url):
    source, target = create_topic(url, "input"), create_topic(url, "output")
    plainly(source, *(b"%d" % number for number in range(9)))
    consumer = make_consumer({"enable.auto.commit": False, "group.id": "program"})
    consumer.assign([TopicPartition(source, 0, 0)])
    for attempt in range(6):
        producer.begin_transaction()
        for message in read(consumer, 3):
            producer.produce(target, message.value(), partition=0)
        producer.send_offsets_to_transaction(
            consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), PATIENCE_SECONDS
        )
        if attempt % 2:
            producer.commit_transaction(PATIENCE_SECONDS)
        else:
            producer.abort_transaction(PATIENCE_SECONDS)
            (position,) = consumer.committed([TopicPartition(source, 0)], PATIENCE_SECONDS)
            consumer.seek(TopicPartition(source, 0, max(position.offset, 0)))

    assert seen(url, target)[0] == [b"%d" % number for number in range(9)]
    assert committed(consumer, source) == 9


def test_a_commit_that_is_retried_as_long_as_that_is_allowed(producer, url, topic, hold_database):
    """The flow of confluent-kafka's test_transactions with retries: call again while the error is retriable."""
    producer.begin_transaction()
    producer.produce(topic, b"once", partition=0)
    retries = 0
    release = threading.Event()
    held = threading.Event()

    def hold():
        with hold_database(url):
            held.set()
            release.wait(PATIENCE_SECONDS)

    holding = threading.Thread(target=hold)
    holding.start()
    assert held.wait(PATIENCE_SECONDS)
    while (refusal := refusal_of(producer.commit_transaction, 0.2)) is not None:
        assert refusal.is_retriable
        retries += 1
        assert retries < 100
        release.set()
    holding.join(PATIENCE_SECONDS)

    assert retries > 0
    assert seen(url, topic) == ([b"once"], [b"once"])


def test_a_reader_who_starts_over_sees_the_same_again(producer, plainly, url, topic):
    plainly(topic, b"0")
    for end in (producer.abort_transaction, producer.commit_transaction):
        producer.begin_transaction()
        producer.produce(topic, b"v", partition=0)
        assert producer.flush(PATIENCE_SECONDS) == 0
        end(PATIENCE_SECONDS)
    reader = Consumer({"bootstrap.servers": url, "group.id": "again", "enable.auto.commit": False})
    places = []
    for _ in range(2):
        reader.assign([TopicPartition(topic, 0, 0)])
        places.append([(message.offset(), message.value()) for message in read(reader, 2)])
    reader.close()

    assert places[0] == places[1] == [(0, b"0"), (3, b"v")]

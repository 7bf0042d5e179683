"""Transactions that nobody ends: whoever meets one whose time is up does, at once, also if it is there for a moment."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace
from typing import cast

import pytest
from sqlalchemy import select

from tests.clients.consumer.log_writer import PATIENCE_SECONDS, eventually
from tests.clients.steps import values
from txnstore import Consumer, TopicPartition
from txnstore.clients import overdue_help
from txnstore.clients.overdue_help import ASK_SECONDS_MIN, DUE_SECONDS_MIN, OverdueHelp
from txnstore.clients.producer import thread as producer_thread
from txnstore.clients.producer.thread import IDLE_ASKS_SECONDS, WRITER_ASKS_SECONDS, Alarm, WriterHelp
from txnstore.clients.worker import Worker
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.store import server_now_ms
from txnstore.log.bounds import read_bounds
from txnstore.transactions.protocol import TransactionState
from txnstore.transactions.rows import read_row

#: As long as the readers look that come and go.
READER_LOOKS_SECONDS = 0.5


def is_over(log, transaction) -> bool:
    found = log.store.read(lambda connection: read_row(connection, transaction.transactional_id))
    return found.row.state is not TransactionState.ONGOING


@pytest.fixture
def abandoned(log):
    """A transaction whose time is up, in a topic with a record behind its own."""
    log.topic()
    transaction = log.transaction(timeout_ms=1)
    transaction.write("t", 0, b"abandoned")
    log.write("t", 0, b"behind")
    found = log.store.read(lambda connection: read_row(connection, transaction.transactional_id))
    eventually(
        lambda: (
            log.store.read(lambda connection: connection.execute(select(server_now_ms())).scalar_one())
            > found.row.deadline_ms
        )
    )
    assert not is_over(log, transaction)
    return transaction


def look(url, **configuration):
    """Read as a program does that is there for a moment."""
    # What it does for itself is to be seen, not what it does for the maintenance.
    of_test = {"group.id": "passing", "auto.offset.reset": "earliest", "txnstore.maintenance": False}
    settings = {"bootstrap.servers": url, **of_test, **configuration}
    with Consumer(settings) as consumer:
        consumer.assign([TopicPartition("t", 0)])
        return values(consumer.consume(10, timeout=READER_LOOKS_SECONDS))


def looked_until(url, wanted, **configuration):
    seen: list[bytes | None] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while wanted not in seen and time.monotonic() < deadline:
        seen = look(url, **configuration)
    return seen


def test_a_reader_that_is_there_for_a_moment_ends_it(url, log, abandoned) -> None:
    assert looked_until(url, b"behind") == [b"behind"]
    assert is_over(log, abandoned)


def test_who_reads_what_is_open_ends_nothing(url, log, abandoned) -> None:
    assert looked_until(url, b"behind", **{"isolation.level": "read_uncommitted"}) == [b"abandoned", b"behind"]
    assert not is_over(log, abandoned)


def test_a_reader_that_begins_where_its_group_is_ends_what_would_still_move_that(url, log) -> None:
    log.topic()
    log.write("t", 0, b"first", b"second")
    transaction = log.transaction(timeout_ms=1)
    transaction.send_offset("passing", "t", 0, 1)
    assert looked_until(url, b"first") == [b"first", b"second"]


def test_asking_for_the_committed_offset_ends_what_would_still_move_it(log, make_consumer) -> None:
    log.topic()
    transaction = log.transaction(timeout_ms=1)
    transaction.send_offset("passing", "t", 0, 1)
    consumer = make_consumer({"group.id": "passing"})
    asked_at = time.monotonic()
    (answer,) = consumer.committed([TopicPartition("t", 0)], timeout=PATIENCE_SECONDS)
    assert answer.offset < 0
    assert time.monotonic() - asked_at < PATIENCE_SECONDS
    assert is_over(log, transaction)


def test_a_producer_that_writes_to_the_partition_ends_it_for_the_readers(log, abandoned, make_producer) -> None:
    producer = make_producer()
    producer.produce("t", b"mine", partition=0)
    assert producer.flush(PATIENCE_SECONDS) == 0
    eventually(lambda: is_over(log, abandoned))
    (bounds,) = log.store.read(lambda connection: read_bounds(connection, [log.partition_id("t", 0)])).values()
    assert bounds.last_stable_offset == bounds.high_watermark


def test_a_commit_ends_those_of_others_that_are_in_its_way(log, abandoned, make_producer) -> None:
    producer = make_producer({"transactional.id": "alive"})
    producer.init_transactions(PATIENCE_SECONDS)
    with producer.transaction():
        producer.produce("t", b"mine", partition=0)
    eventually(lambda: is_over(log, abandoned))


# --- when it asks -----------------------------------------------------------------------------------------------------


class Time:
    now_seconds = 100.0

    def __call__(self) -> float:
        return self.now_seconds


@pytest.fixture
def asked(monkeypatch):
    """How often it was asked; `left` is what it is told."""

    class Asked:
        count = 0
        left_seconds = 60.0

        def __call__(self, store, partition_ids, cluster=None, *, after_error_seconds=0.0) -> float:
            self.count += 1
            return self.left_seconds

    asked = Asked()
    monkeypatch.setattr(overdue_help, "end_overdue", asked)
    monkeypatch.setattr(producer_thread, "end_overdue", asked)
    return asked


@pytest.fixture
def seconds():
    return Time()


@pytest.fixture
def overdue(seconds):
    return OverdueHelp(lambda: pytest.fail("only end_overdue needs it"), monotonic_seconds=seconds)


def test_a_reader_that_nothing_holds_back_asks_nothing(overdue, asked) -> None:
    overdue.let_go(1)
    assert overdue.help() == math.inf
    assert asked.count == 0


def test_one_that_is_held_back_asks_once_and_again_when_the_time_is_up(overdue, asked, seconds) -> None:
    for _ in range(3):
        overdue.held_back(1, 5)
        assert overdue.help() == 60.0
    assert asked.count == 1
    seconds.now_seconds += 60.0
    overdue.help()
    assert asked.count == 2


def test_one_that_is_held_back_by_one_after_the_other_asks_now_and_then(overdue, asked, seconds) -> None:
    for offset in range(10):
        overdue.held_back(1, offset)
        assert overdue.help() <= ASK_SECONDS_MIN or offset == 0
    assert asked.count == 1
    seconds.now_seconds += ASK_SECONDS_MIN
    assert overdue.help() == 60.0
    assert asked.count == 2


def test_what_was_let_go_is_not_asked_about(overdue, asked, seconds) -> None:
    overdue.held_back(1, 5)
    overdue.help()
    overdue.let_go(1)
    seconds.now_seconds += 60.0
    assert overdue.help() == math.inf
    assert asked.count == 1


def test_what_could_not_be_asked_is_asked_again_and_not_at_once(overdue, asked) -> None:
    asked.left_seconds = ASK_SECONDS_MIN
    overdue.held_back(1, 5)
    assert overdue.help() == ASK_SECONDS_MIN
    overdue.help()
    assert asked.count == 1


def test_what_is_overdue_in_a_moment_is_ended_then(overdue, asked, seconds) -> None:
    asked.left_seconds = 0.3
    overdue.held_back(1, 5)
    assert overdue.help() == pytest.approx(0.3)
    seconds.now_seconds += 0.3
    # Others may be a millisecond later: they come together.
    asked.left_seconds = 0.001
    assert overdue.help() == pytest.approx(DUE_SECONDS_MIN)
    assert asked.count == 2


def test_more_than_one_look_ends_is_ended_by_the_looks_that_follow_at_once(overdue, asked) -> None:
    asked.left_seconds = 0.0
    overdue.held_back(1, 5)
    for count in range(1, 4):
        assert overdue.help() == 0.0
        assert asked.count == count


def test_a_producer_looks_at_most_once_a_second_and_only_after_writing(seconds, asked) -> None:
    cluster = SimpleNamespace(by_leader=lambda partition_ids: {1: list(partition_ids)}, own=lambda number: number)
    worker = Worker("helper")
    alarm = Alarm(threading.RLock())
    writer = WriterHelp(
        lambda: cast(Cluster, cluster), lambda name: worker, lambda: None, alarm, monotonic_seconds=seconds
    )
    assert writer.due_seconds(seconds()) == seconds() + IDLE_ASKS_SECONDS  # for the maintenance
    writer.wrote([1])
    assert writer.due_seconds(seconds()) == seconds() + WRITER_ASKS_SECONDS  # a short-lived one never asks
    seconds.now_seconds += WRITER_ASKS_SECONDS
    for _ in range(3):
        writer.wrote([1])
        at_seconds = writer.due_seconds(seconds())
        assert at_seconds is not None
        assert (at_seconds <= seconds()) is (asked.count == 0)
        if at_seconds <= seconds():
            writer.run()
            assert (writer.due_seconds(seconds()) or math.inf) > seconds()
            worker.submit(lambda: None).result(PATIENCE_SECONDS)
    assert asked.count == 1
    seconds.now_seconds += WRITER_ASKS_SECONDS
    at_seconds = writer.due_seconds(seconds())
    assert at_seconds is not None
    assert at_seconds <= seconds()
    assert worker.close(PATIENCE_SECONDS)


@pytest.fixture
def writer(seconds, asked, monkeypatch):
    """What a producer does for readers, on the test's own thread, and as early as it may."""
    monkeypatch.setattr(producer_thread, "SPREAD_SECONDS", 0.0)
    cluster = SimpleNamespace(by_leader=lambda partition_ids: {1: list(partition_ids)}, own=lambda number: number)
    here = cast(Worker, SimpleNamespace(submit=lambda work: work()))
    return WriterHelp(
        lambda: cast(Cluster, cluster),
        lambda name: here,
        lambda: None,
        Alarm(threading.RLock()),
        monotonic_seconds=seconds,
    )


def pass_until_it_looks(writer: WriterHelp, seconds: Time) -> float:
    """Let the time pass until it looks by itself; return how long that took."""
    began, at_seconds = seconds(), writer.due_seconds(seconds())
    assert at_seconds is not None
    seconds.now_seconds = max(began, at_seconds)
    writer.run()
    return seconds() - began


def test_a_producer_looks_again_when_the_next_ones_time_is_up_and_at_once_where_more_is_overdue(
    writer, asked, seconds
) -> None:
    writer.wrote([1])
    asked.left_seconds = 4.0
    assert pass_until_it_looks(writer, seconds) == WRITER_ASKS_SECONDS
    asked.left_seconds = 0.0
    assert pass_until_it_looks(writer, seconds) == 4.0
    assert pass_until_it_looks(writer, seconds) == 0.0
    asked.left_seconds = math.inf
    assert pass_until_it_looks(writer, seconds) == 0.0
    assert asked.count == 4
    assert pass_until_it_looks(writer, seconds) == IDLE_ASKS_SECONDS  # for the maintenance
    assert asked.count == 4


def test_those_that_know_of_the_same_moment_look_one_after_the_other(writer, asked, seconds, monkeypatch) -> None:
    monkeypatch.setattr(producer_thread, "SPREAD_SECONDS", 0.1)
    asked.left_seconds = 4.0
    looked_after = []
    for _ in range(5):
        writer.wrote([1])
        pass_until_it_looks(writer, seconds)
        looked_after.append(pass_until_it_looks(writer, seconds))
    assert all(4.0 <= after_seconds <= 4.1 for after_seconds in looked_after)
    assert max(looked_after) - min(looked_after) > 0.001


def test_a_producer_that_writes_looks_before_its_second_is_over_if_a_time_is_up(writer, asked, seconds) -> None:
    writer.wrote([1])
    asked.left_seconds = 0.7
    pass_until_it_looks(writer, seconds)
    writer.wrote([1])
    assert pass_until_it_looks(writer, seconds) == pytest.approx(0.7)


def test_a_producer_that_has_nothing_more_to_write_looks_more_and_more_rarely(writer, asked, seconds) -> None:
    """Others may have one transaction after the other; or it may not end what it finds."""
    writer.wrote([1])
    asked.left_seconds = 0.001
    pass_until_it_looks(writer, seconds)
    looked_after = [pass_until_it_looks(writer, seconds) for _ in range(8)]
    assert looked_after == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, IDLE_ASKS_SECONDS])
    writer.wrote([1])
    assert pass_until_it_looks(writer, seconds) == pytest.approx(WRITER_ASKS_SECONDS)
    assert pass_until_it_looks(writer, seconds) == pytest.approx(DUE_SECONDS_MIN)


def test_a_producer_that_had_much_to_end_looks_again_as_soon_as_after_a_single_look(writer, asked, seconds) -> None:
    writer.wrote([1])
    asked.left_seconds = 4.0
    pass_until_it_looks(writer, seconds)
    asked.left_seconds = 0.0
    assert pass_until_it_looks(writer, seconds) == pytest.approx(4.0)
    assert [pass_until_it_looks(writer, seconds) for _ in range(8)] == [0.0] * 8
    asked.left_seconds = 0.001
    assert pass_until_it_looks(writer, seconds) == 0.0
    # What goes on at once counts as one look.
    assert [pass_until_it_looks(writer, seconds) for _ in range(2)] == pytest.approx([0.2, 0.4])


def test_of_a_database_that_cannot_be_asked_a_producer_asks_no_more_before_it_writes(
    writer, seconds, monkeypatch
) -> None:
    monkeypatch.setattr(producer_thread, "end_overdue", lambda *_, after_error_seconds: after_error_seconds)
    writer.wrote([1])
    assert pass_until_it_looks(writer, seconds) == WRITER_ASKS_SECONDS
    assert pass_until_it_looks(writer, seconds) == IDLE_ASKS_SECONDS

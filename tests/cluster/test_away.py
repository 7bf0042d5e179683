"""A database that is away delays only what lives there, and is caught up when it is back."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy import Connection, insert, select

from tests.cluster.conftest import Bench, Producer, read, row_of
from txnstore.db.cluster import cluster as cluster_module
from txnstore.db.cluster.cluster import PAUSE_LAST_SECONDS, open_cluster
from txnstore.db.portions import FOUND_MAX, Portions
from txnstore.db.schema import pending_markers, transactions
from txnstore.errors import (
    ConcurrentTransactions,
    OutcomeUnknown,
    ProducerFenced,
    StoreUnavailable,
    TransactionAbortable,
)
from txnstore.log.cluster_topics import create_topic
from txnstore.testing.invariants import assert_cluster_sound
from txnstore.testing.private_cluster import NoServerProgramsError, PrivateCluster
from txnstore.transactions import recovery
from txnstore.transactions.protocol import TransactionState
from txnstore.transactions.recovery import abort_by_administrator, abort_timed_out, complete_all_decided, recover
from txnstore.transactions.transaction import complete_decided

S = TransactionState


@pytest.mark.slow
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_everything_else_is_delivered_and_the_rest_when_it_is_back(bench: Bench, commit: bool):
    producer = bench.producer_at(1)
    began, name = producer.identity, producer.transactional_id
    groups = {number: bench.name_at(number, "group") for number in (1, 2, 3)}
    for number in (1, 2, 3):
        producer.send(bench.partition_at(number), b"a")
        producer.send_offsets(groups[number], {bench.partition_at(1): number})
    twin = producer.twin()
    with bench.down(2):
        with pytest.raises(OutcomeUnknown, match=r"is decided, but not all .*second.* repeat the call"):
            producer.end(commit=commit)
        decided = S.PREPARE_COMMIT if commit else S.PREPARE_ABORT
        assert bench.row(name).state is decided
        # What lives elsewhere is over.
        for number in (1, 3):
            assert bench.read(bench.partition_at(number)) == ([b"a"] if commit else [])
            assert bench.committed(groups[number]) == ({bench.partition_at(1): number} if commit else {})
            assert not bench.offsets(groups[number]).unstable
        assert bench.queued(name) == {bench.partition_at(2)}
        # The decision stands, whoever asks, and however often.
        for _ in range(2):
            with pytest.raises(OutcomeUnknown):
                twin.coordinator.end_transaction(name, began, commit=commit)
            with pytest.raises(StoreUnavailable):
                complete_decided(bench.cluster.own(1), name, bench.cluster)
        assert bench.row(name).state is decided
        # The next transaction of this id waits; others do not.
        next_one = twin.twin()
        next_one.become(type(began)(began.producer_id, began.epoch + 1))
        with pytest.raises(ConcurrentTransactions):
            next_one.send(bench.partition_at(1), b"next")
        with pytest.raises(ConcurrentTransactions):
            next_one.send(bench.partition_at(3), b"next")
        with pytest.raises(ConcurrentTransactions, match=r"not all of its markers are written .*second"):
            Producer(bench.cluster, name).start()
        other = bench.producer_at(1)
        for number in (1, 3):
            other.send(bench.partition_at(number), b"other")
        other.end(commit=True)
        with pytest.raises(StoreUnavailable, match="second"):
            other.send(bench.partition_at(2), b"other")
        bench.clock.advance(60_001)
        assert abort_timed_out(bench.cluster.own(1), bench.cluster) == (other.transactional_id,)
    # It is back.
    assert bench.read(bench.partition_at(2)) == []
    assert set(complete_all_decided(bench.cluster.own(1), bench.cluster)) == {name, other.transactional_id}
    assert bench.read(bench.partition_at(2)) == ([b"a"] if commit else [])
    assert bench.committed(groups[2]) == ({bench.partition_at(1): 2} if commit else {})
    again = twin.coordinator.end_transaction(name, began, commit=commit)
    assert again.identity.epoch == began.epoch + 1
    next_one.send(bench.partition_at(2), b"next")
    next_one.end(commit=True)
    assert bench.read(bench.partition_at(2))[-1] == b"next"
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_what_waits_for_a_database_stands_before_nothing_else_however_little_time_there_is(bench: Bench, monkeypatch):
    monkeypatch.setattr(recovery, "COMPLETED_TOGETHER", 1)
    stuck, free = sorted((bench.producer_at(1) for _ in range(2)), key=lambda producer: producer.transactional_id)
    for producer, away in ((free, 2), (stuck, 3)):
        producer.send(bench.partition_at(away), b"a")
        with bench.down(away), pytest.raises(OutcomeUnknown):
            producer.end(commit=True)
    store = bench.cluster.own(1)
    with bench.down(3), pytest.raises(StoreUnavailable):
        complete_all_decided(store, bench.cluster, Portions(seconds=0))
    assert bench.row(free.transactional_id).state is S.COMPLETE_COMMIT
    assert bench.row(stuck.transactional_id).state is S.PREPARE_COMMIT
    assert complete_all_decided(store, bench.cluster) == (stuck.transactional_id,)


@pytest.mark.slow
def test_a_repeated_end_catches_up_by_itself(bench: Bench):
    producer = bench.producer_at(1)
    began = producer.identity
    producer.send(bench.partition_at(2), b"a")
    twin = producer.twin()
    with bench.down(2), pytest.raises(OutcomeUnknown):
        producer.end(commit=True)
    assert twin.end(commit=True).identity.epoch == began.epoch + 1
    assert bench.read(bench.partition_at(2)) == [b"a"]
    assert_cluster_sound(bench.cluster, at_rest=True)


@pytest.mark.slow
def test_a_start_waits_for_what_it_aborts_in_a_database_that_is_away(bench: Bench):
    producer = bench.producer_at(1)
    producer.send(bench.partition_at(2), b"a")
    with bench.down(2), pytest.raises(ConcurrentTransactions):
        Producer(bench.cluster, producer.transactional_id).start()
    assert bench.row(producer.transactional_id).state is S.PREPARE_ABORT
    newer = Producer(bench.cluster, producer.transactional_id).start()
    assert bench.read(bench.partition_at(2)) == []
    newer.send(bench.partition_at(2), b"b")
    newer.end(commit=True)
    assert bench.read(bench.partition_at(2)) == [b"b"]
    assert_cluster_sound(bench.cluster, at_rest=True)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["age", "administrator"])
def test_a_commit_is_told_who_aborted_before_and_after_the_last_marker_is_written(bench: Bench, by: str):
    producer = bench.producer_at(1)
    began, name = producer.identity, producer.transactional_id
    producer.send(bench.partition_at(2), b"a")
    with bench.down(2):
        if by == "age":
            bench.clock.advance(60_001)
            assert abort_timed_out(bench.cluster.own(1), bench.cluster) == (name,)
        else:
            abort_by_administrator(bench.cluster.own(1), name, "it was stopped", bench.cluster)
        assert bench.row(name).state is S.PREPARE_ABORT
        with pytest.raises(TransactionAbortable, match="abort it here too") as at_once:
            producer.twin().end(commit=True)
    assert complete_all_decided(bench.cluster.own(1), bench.cluster) == (name,)
    with pytest.raises(TransactionAbortable) as afterwards:
        producer.twin().end(commit=True)
    assert str(at_once.value) == str(afterwards.value)
    assert producer.end(commit=False).identity == bench.row(name).identity != began
    producer.send(bench.partition_at(2), b"b")
    producer.end(commit=True)
    assert bench.read(bench.partition_at(2)) == [b"b"]
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_a_commit_after_a_newer_producer_is_fenced_before_the_last_marker_is_written(bench: Bench):
    producer = bench.producer_at(1)
    producer.send(bench.partition_at(2), b"a")
    with bench.down(2):
        with pytest.raises(ConcurrentTransactions):
            Producer(bench.cluster, producer.transactional_id).start()
        assert bench.row(producer.transactional_id).state is S.PREPARE_ABORT
        with pytest.raises(ProducerFenced):
            producer.end(commit=True)


def test_recovery_does_not_wait_once_for_each_transaction(sqlite_bench: Bench, monkeypatch):
    bench = sqlite_bench
    # Longer than anything takes here on a slow machine.
    monkeypatch.setattr(cluster_module, "PAUSE_FIRST_SECONDS", 600.0)
    monkeypatch.setattr(cluster_module, "PAUSE_LAST_SECONDS", 600.0)
    producers = [bench.producer_at(1) for _ in range(6)]
    for producer in producers:
        producer.send(bench.partition_at(2), b"a")
        producer.send(bench.partition_at(3), b"a")
    bench.clock.advance(60_001)
    tries = []
    store = bench.cluster.own(2)
    with bench.down(2):
        refuse: Any = store._attempt

        def counted(*arguments: object) -> object:
            tries.append(1)
            return refuse(*arguments)

        store._attempt = counted  # type: ignore[method-assign, assignment]
        assert len(abort_timed_out(bench.cluster.own(1), bench.cluster)) == 6
        assert len(tries) == 1, "the others find it in its pause"
        with pytest.raises(StoreUnavailable):
            complete_all_decided(bench.cluster.own(1), bench.cluster)
        assert all(len(bench.markers(bench.partition_at(3))) == 6 for _ in producers)
    bench.cluster._pauses.clear()
    assert len(complete_all_decided(bench.cluster.own(1), bench.cluster)) == 6
    assert_cluster_sound(bench.cluster, at_rest=True)


def plant_copies(bench: Bench, transactional_id: str, count: int) -> None:
    """Let so many transactions wait for the same as this decided one, under names that come before it."""

    def work(connection: Connection) -> None:
        for table in (transactions, pending_markers):
            of_id = select(table).where(table.c.transactional_id == transactional_id)
            for row in connection.execute(of_id).mappings().all():
                stored = {name: value for name, value in row.items() if table.c[name].computed is None}
                copies = [
                    {**stored, "transactional_id": f"0-{number:04}", "producer_id": row["producer_id"] + 1_000 + number}
                    for number in range(count)
                ]
                connection.execute(insert(table), copies)

    bench.cluster.own(1).write(work)


def let_many_wait(bench: Bench, count: int) -> None:
    """Let more transactions wait for a database than a page holds; assert that they keep no other one waiting."""
    waiting, later, overdue = (bench.producer_at(1) for _ in range(3))
    waiting.send(bench.partition_at(2), b"waiting")
    with bench.down(2), pytest.raises(OutcomeUnknown):
        waiting.end(commit=True)
    plant_copies(bench, waiting.transactional_id, count)
    later.send(bench.partition_at(3), b"later")
    overdue.send(bench.partition_at(1), b"overdue")
    with bench.down(3), pytest.raises(OutcomeUnknown):
        later.end(commit=True)
    bench.clock.advance(60_001)
    with bench.down(2):
        with pytest.raises(StoreUnavailable, match="second"):
            recover(bench.cluster.own(1), bench.cluster)
        assert bench.row(later.transactional_id).state is S.COMPLETE_COMMIT
        assert bench.read(bench.partition_at(3)) == [b"later"]
        # Nor do they keep open what is to be aborted.
        assert bench.row(overdue.transactional_id).state is S.COMPLETE_ABORT


@pytest.mark.slow
def test_a_page_of_transactions_that_wait_for_a_database_keeps_no_other_one_waiting(bench: Bench, monkeypatch):
    monkeypatch.setattr(recovery, "_DECIDED", recovery._DECIDED.limit(3))
    let_many_wait(bench, 7)
    assert len(complete_all_decided(bench.cluster.own(1), bench.cluster)) == 8
    assert bench.read(bench.partition_at(2)) == [b"waiting"]


@pytest.mark.slow
def test_nor_do_as_many_as_a_page_really_holds(sqlite_bench: Bench):
    let_many_wait(sqlite_bench, FOUND_MAX)


@pytest.mark.slow
def test_the_controller_away_keeps_nobody_from_what_lives_elsewhere(bench: Bench):
    producer = bench.producer_at(2)
    for number in (2, 3):
        producer.send(bench.partition_at(number), b"a")
    with bench.down(1):
        for number in (2, 3):
            producer.send(bench.partition_at(number), b"b")
        producer.end(commit=True)
        assert bench.read(bench.partition_at(3)) == [b"a", b"b"]
        # Markers whose partitions nobody here remembers wait for whoever knows.
        bench.cluster._leaders.clear()
        producer.added.clear()
        with pytest.raises(StoreUnavailable, match="first"):
            producer.send(bench.partition_at(3), b"c")
    recover(bench.cluster.own(2), bench.cluster)
    assert_cluster_sound(bench.cluster, at_rest=False)


@pytest.fixture(scope="module")
def two_servers():
    try:
        with PrivateCluster(fsync=False) as first, PrivateCluster(fsync=False) as second:
            yield first, second
    except NoServerProgramsError as error:
        pytest.skip(f"needs servers to kill: {error}")


@pytest.mark.slow
def test_a_server_killed_in_the_middle_is_caught_up(two_servers):
    first, second = two_servers
    first.create_database("shop")
    second.create_database("shop")
    urls = [first.url("shop"), second.url("shop")]
    with open_cluster(urls) as cluster:
        topic = create_topic(cluster, "orders", partition_count=2, config={"txnstore.placement": "roundrobin"})
        here, there = topic.partition_ids
        names = [name for name in map(str, range(40)) if cluster.coordinator_id_of(name) == 1][:2]
        producers = [Producer(cluster, name).start() for name in names]
        for producer in producers:
            producer.send(here, b"a")
            producer.send(there, b"a")
        second.kill()
        with pytest.raises(OutcomeUnknown, match="is decided"):
            producers[0].end(commit=True)
        assert read(cluster, here) == [b"a"]
        # This one is not decided when its coordinator goes too.
        first.kill()
        second.start()
        first.start()
        wait_until_it_answers(cluster)
    with open_cluster(urls) as cluster:
        for store in cluster.stores():
            recover(store, cluster)
        assert read(cluster, here) == [b"a"]
        assert read(cluster, there) == [b"a"]
        assert row_of(cluster, names[0]).state is S.COMPLETE_COMMIT
        Producer(cluster, names[1]).start()
        assert_cluster_sound(cluster, at_rest=True)
        assert len(read(cluster, there)) == 1


def wait_until_it_answers(cluster) -> None:
    """Return once both databases can be written to; the pause of the second one is over then."""
    stop = threading.Event()
    for _ in range(int(PAUSE_LAST_SECONDS * 20)):
        try:
            for number in (1, 2):
                cluster.write_at(number, lambda _: None)
        except StoreUnavailable:
            stop.wait(0.1)
        else:
            return
    pytest.fail("the servers did not come back")

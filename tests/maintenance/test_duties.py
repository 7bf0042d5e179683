"""What the maintenance does to a store: everything that nobody else came to finish, abort or forget."""

from __future__ import annotations

import threading

import psycopg
import pytest
from sqlalchemy import func, select

from tests.tools.elsewhere import Elsewhere
from txnstore.db.opening import open_store
from txnstore.db.portions import Portions
from txnstore.db.schema import group_offsets, groups, producer_states, transaction_log, transactions
from txnstore.groups import coordinator
from txnstore.groups.group import MemberDetails, Report
from txnstore.groups.offsets import commit_offsets, read_offsets
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.fetch import fetch
from txnstore.log.topics import create_topic
from txnstore.maintenance.duties import DUTIES
from txnstore.maintenance.loop import Maintenance
from txnstore.maintenance.turns import look_for_due, take_turn
from txnstore.model import GroupMembership, OffsetAndMetadata, ProducerIdentity, Record
from txnstore.testing.postgres_server import connection_string
from txnstore.transactions import recovery
from txnstore.transactions.coordinator import TransactionCoordinator

NAMES = [duty.name for duty in DUTIES]
SEQUENCED, COMPLETED, ABORTED, ENDED, FORGOTTEN, SILENT, TRIMMED, REFUSED, SINKS, *OTHERS = NAMES
PURGED, EXPIRED, COMPACTED, LEFT, UNUSED, COPIED = OTHERS
MINUTE_MS, DAY_MS = 60_000, 86_400_000


@pytest.fixture
def partition_id(store):
    keeps = {"retention.ms": "-1"}
    return store.write(lambda connection: create_topic(connection, "orders", config=keeps)).partition_ids[0]


def begin(store, partition_id, transactional_id, timeout_ms=60_000, *, writes_elsewhere=False):
    coordinator = TransactionCoordinator(store, Elsewhere(store) if writes_elsewhere else None)
    producer = coordinator.init_producer_id(transactional_id, timeout_ms).identity
    batch = encode([Record(transactional_id.encode())], producer=producer, base_sequence=0, is_transactional=True)
    coordinator.append(transactional_id, producer, [Append(partition_id, batch)])
    return coordinator, producer


def decide_and_crash(store, partition_id, transactional_id, monkeypatch):
    """Leave a transaction behind that is decided and not complete."""

    class CrashedError(Exception):
        pass

    def crash(*_):
        raise CrashedError

    coordinator, producer = begin(store, partition_id, transactional_id, writes_elsewhere=True)
    monkeypatch.setattr("txnstore.transactions.coordinator.complete_delivered", crash)
    with pytest.raises(CrashedError):
        coordinator.end_transaction(transactional_id, producer, commit=True)


def committed(store, partition_id):
    page = store.read(lambda connection: fetch(connection, {partition_id: 0}))[partition_id]
    return [record.value for batch in page.batches for record in batch.records()]


def count(store, table):
    return store.read(lambda connection: connection.execute(select(func.count()).select_from(table)).scalar_one())


def test_a_decided_transaction_is_completed_and_an_open_one_is_left_alone(store, partition_id, monkeypatch):
    decide_and_crash(store, partition_id, "decided", monkeypatch)
    assert committed(store, partition_id) == []
    begin(store, partition_id, "open")
    done = Maintenance(store).run_once()
    assert (done[COMPLETED], done[ABORTED]) == (1, 0)
    assert committed(store, partition_id) == [b"decided"]


def test_a_transaction_that_is_open_for_too_long_is_aborted_and_holds_nobody_back(store, clock, partition_id):
    begin(store, partition_id, "abandoned", 5_000)
    batch = encode([Record(b"behind")])
    store.write(lambda connection: append(connection, [Append(partition_id, batch)]))
    maintenance = Maintenance(store)
    assert maintenance.run_once()[ABORTED] == 0
    assert committed(store, partition_id) == []
    clock.advance(5_001)
    assert maintenance.run_once()[ABORTED] == 1
    assert committed(store, partition_id) == [b"behind"]
    assert maintenance.run_once()[ABORTED] == 0


def test_one_that_was_begun_by_a_clock_that_was_ahead_holds_nobody_back_for_as_much_longer(store, clock, partition_id):
    maintenance = Maintenance(store)
    clock.advance(DAY_MS)
    begin(store, partition_id, "abandoned", 5_000)
    clock.advance(-DAY_MS)
    assert maintenance.run_once()[ABORTED] == 0
    clock.advance(5_001)
    assert maintenance.run_once()[ABORTED] == 1


def test_more_transactions_than_one_look_finds_are_all_aborted(store, clock, partition_id, monkeypatch):
    monkeypatch.setattr("txnstore.maintenance.turns.FOUND_MAX", 3)
    monkeypatch.setattr(recovery, "_TIMED_OUT", recovery._TIMED_OUT.limit(3))
    for number in range(8):
        begin(store, partition_id, f"abandoned-{number}", 1_000)
    clock.advance(2_000)
    assert Maintenance(store).run_once()[ABORTED] == 8


def test_silent_producers_are_looked_for_as_often_as_their_own_setting_says(store, clock):
    """Every ten minutes, as in Kafka, not with the transactional ids once an hour."""
    take_turn(store, None, DUTIES, Portions(), forced=True)
    clock.advance(10 * MINUTE_MS - 1)
    assert SILENT not in look_for_due(store, DUTIES).due
    clock.advance(1)
    assert {SILENT, FORGOTTEN} & set(look_for_due(store, DUTIES).due) == {SILENT}


def test_what_has_expired_is_forgotten(store, clock, partition_id):
    coordinator, producer = begin(store, partition_id, "worker")
    coordinator.end_transaction("worker", producer, commit=True)
    batch = encode([Record(b"idempotent")], producer=ProducerIdentity(999, 0), base_sequence=0)
    store.write(lambda connection: append(connection, [Append(partition_id, batch)]))
    maintenance = Maintenance(store)
    clock.advance(DAY_MS - 1)
    assert set(maintenance.run_once().values()) == {0}
    clock.advance(1)
    assert maintenance.run_once() == dict.fromkeys(NAMES, 0) | {SILENT: 2}
    assert count(store, producer_states) == 0
    clock.advance(6 * DAY_MS + 1)
    done = maintenance.run_once()
    assert done[FORGOTTEN] == 1
    assert done[TRIMMED] > 0
    assert count(store, transactions) == 0
    # The entry that says so is as old as the expiry itself.
    assert count(store, transaction_log) == 1
    assert committed(store, partition_id) == [b"worker", b"idempotent"]


def test_batches_that_their_topic_keeps_no_longer_are_deleted(store, clock):
    (partition_id,) = store.write(lambda connection: create_topic(connection, "parcels")).partition_ids
    for value in b"first", b"second":
        batch = encode([Record(value, timestamp_ms=clock.now_ms())])
        store.write(lambda connection, batch=batch: append(connection, [Append(partition_id, batch)]))
        clock.advance(4 * DAY_MS)
    done = Maintenance(store).run_once()
    assert done == dict.fromkeys(NAMES, 0) | {EXPIRED: 1}
    page = store.read(lambda connection: fetch(connection, {partition_id: 1}))[partition_id]
    assert [record.value for batch in page.batches for record in batch.records()] == [b"second"]


def test_partitions_of_compacted_topics_keep_the_newest_record_of_each_key(store):
    config = {"cleanup.policy": "compact"}
    topic = store.write(lambda connection: create_topic(connection, "rates", config=config))
    for value in (b"1", b"2"):
        batch = encode([Record(value, key=b"k")])
        store.write(lambda connection, batch=batch: append(connection, [Append(topic.partition_ids[0], batch)]))
    # Two for their keys, then the same two.
    assert Maintenance(store).run_once()[COMPACTED] == 4
    page = store.read(lambda connection: fetch(connection, {topic.partition_ids[0]: 0}))[topic.partition_ids[0]]
    assert [record.value for batch in page.batches for record in batch.records()] == [b"2"]


def test_a_group_whose_members_are_silent_is_empty_and_loses_its_offsets_in_time(store, clock, partition_id):
    group_id, joining = "readers", GroupMembership("readers", member_id="member")
    details = MemberDetails("client", 10_000, ("orders",), frozenset({"orders"}), ("range",))

    def join_and_commit(connection):
        answer = coordinator.join(connection, Report(joining, 1), details)
        commit_offsets(connection, answer.membership, {partition_id: OffsetAndMetadata(3)})

    store.write(join_and_commit)
    maintenance = Maintenance(store)
    clock.advance(7 * DAY_MS)
    done = maintenance.run_once()
    assert (done[LEFT], done[UNUSED]) == (1, 0)
    clock.advance(7 * DAY_MS - 1)
    assert maintenance.run_once()[UNUSED] == 0
    assert store.read(lambda connection: read_offsets(connection, group_id, [partition_id])).offsets
    clock.advance(1)
    assert maintenance.run_once()[UNUSED] == 1
    assert count(store, group_offsets) == count(store, groups) == 0


def test_several_loops_at_once_do_everything_once(store, url, clock, partition_id):
    for number in range(10):
        begin(store, partition_id, f"abandoned-{number}", 1_000)
    clock.advance(2_000)
    stores = [open_store(url, clock=clock) for _ in range(3)]
    begin_together, done = threading.Barrier(len(stores)), []

    def look_after(one):
        begin_together.wait(60)
        done.append(Maintenance(one).run_once())

    threads = [threading.Thread(target=look_after, args=[one]) for one in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [set(one) for one in done] == [{duty.name for duty in DUTIES}] * 3
    assert sum(one[ABORTED] for one in done) == 10
    for one in stores:
        one.close()


def test_sessions_that_were_cut_meanwhile_are_no_error(txnstore_postgresql_url, txnstore_postgresql_store, clock):
    partition_id = txnstore_postgresql_store.write(lambda connection: create_topic(connection, "orders")).partition_ids[
        0
    ]
    begin(txnstore_postgresql_store, partition_id, "abandoned", 1_000)
    maintenance = Maintenance(txnstore_postgresql_store)
    maintenance.run_once()
    clock.advance(2_000)
    with psycopg.connect(connection_string(txnstore_postgresql_url), autocommit=True) as administrator:
        administrator.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    assert maintenance.run_once()[ABORTED] == 1

"""What sleeps at the wrong moment and comes late: it finds that the others have gone on, and changes nothing."""

from __future__ import annotations

import threading

import pytest

from tests.cluster.conftest import Bench, Site
from txnstore.db.cluster.locality import Locality
from txnstore.errors import InvalidProducerEpoch, OutcomeUnknown, TxnStoreError
from txnstore.groups.offsets_from_elsewhere import (
    EndedElsewhere,
    add_offsets_from_elsewhere,
    finish_offsets_from_elsewhere,
)
from txnstore.log.cluster_topics import create_topic
from txnstore.model import GroupMembership, OffsetAndMetadata, ProducerIdentity
from txnstore.testing.invariants import assert_cluster_sound
from txnstore.transactions import transaction as completion
from txnstore.transactions.delivery import Delivered
from txnstore.transactions.protocol import TransactionState
from txnstore.transactions.transaction import complete_delivered

S = TransactionState


def test_a_helper_of_the_last_transaction_strikes_nothing_off_the_next(sqlite_bench: Bench):
    bench = sqlite_bench
    producer = bench.producer_at(1)
    number, store = bench.partition_at(2), bench.cluster.own(1)

    def decide_while_away() -> None:
        producer.send(number, b"a")
        twin = producer.twin()
        with bench.down(2), pytest.raises(OutcomeUnknown):
            twin.end(commit=True)
        producer.become(ProducerIdentity(producer.identity.producer_id, producer.identity.epoch + 1))

    decide_while_away()
    left = store.read(lambda connection: completion._read_pending_delivery(connection, producer.transactional_id))
    assert not isinstance(left, ProducerIdentity)
    # The helper falls asleep here; others complete the transaction, and the next one is decided.
    completion.complete_decided(store, producer.transactional_id, bench.cluster)
    decide_while_away()
    late = Delivered({number})
    store.write(lambda connection: completion._strike_off(Locality.of(store, bench.cluster), left, late, connection))
    assert bench.queued(producer.transactional_id) == {number}
    assert bench.row(producer.transactional_id).state is S.PREPARE_COMMIT
    # Nor does its whole delivery do anything.
    complete_delivered(store, bench.cluster, left)
    assert bench.read(number) == [b"a"]
    assert len(bench.markers(number)) == 1
    completion.complete_decided(store, producer.transactional_id, bench.cluster)
    assert bench.read(number) == [b"a", b"a"]
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_a_marker_of_the_last_transaction_does_not_end_the_next(sqlite_bench: Bench, caplog: pytest.LogCaptureFixture):
    bench = sqlite_bench
    producer = bench.producer_at(1)
    number, store = bench.partition_at(2), bench.cluster.own(1)
    producer.send(number, b"a")
    twin = producer.twin()
    with bench.down(2), pytest.raises(OutcomeUnknown):
        twin.end(commit=True)
    left = store.read(lambda connection: completion._read_pending_delivery(connection, producer.transactional_id))
    assert not isinstance(left, ProducerIdentity)
    producer.become(completion.complete_decided(store, producer.transactional_id, bench.cluster))
    producer.send(number, b"open")
    assert complete_delivered(store, bench.cluster, left) == producer.identity
    # Nobody has lost anything: see test_outrun.py.
    assert not [record for record in caplog.records if getattr(record, "event", None) == "decision_outrun"]
    assert bench.read(number) == [b"a"]
    producer.end(commit=False)
    assert bench.read(number) == [b"a"]
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_offsets_that_come_while_their_transaction_ends_wait_and_are_refused(site: Site):
    """The group has no row yet, so there is none to lock: the end makes it first."""
    with site.open() as cluster:
        store, member = cluster.own(2), GroupMembership("announced")
        while cluster.coordinator_id_of(member.group_id) != 2:
            member = GroupMembership(f"{member.group_id}-")
        (number,) = create_topic(cluster, "orders").partition_ids
        marker, late = ProducerIdentity(7, 4), ProducerIdentity(7, 3)
        has_begun, may_commit = threading.Event(), threading.Event()
        refused: list[TxnStoreError] = []

        def end() -> None:
            def work(connection) -> None:
                finish_offsets_from_elsewhere(connection, [EndedElsewhere(marker, [member.group_id], commit=True)])
                has_begun.set()
                may_commit.wait(60)

            store.write(work)

        def come_late() -> None:
            def work(connection) -> None:
                add_offsets_from_elsewhere(connection, member, {number: OffsetAndMetadata(5)}, late)

            try:
                store.write(work)
            except InvalidProducerEpoch as error:
                refused.append(error)

        threads = [threading.Thread(target=end), threading.Thread(target=come_late)]
        threads[0].start()
        assert has_begun.wait(60)
        threads[1].start()
        # Either it waits for the lock by now, or it has not begun: it must not get through before the end commits.
        threads[1].join(0.3)
        assert threads[1].is_alive()
        may_commit.set()
        for thread in threads:
            thread.join(60)
        assert len(refused) == 1
        assert_cluster_sound(cluster, at_rest=True)


def test_a_partition_that_its_leader_has_not_heard_of_gets_its_marker_all_the_same(sqlite_bench: Bench):
    bench = sqlite_bench
    producer = bench.producer_at(1)
    with bench.down(2):
        topic = create_topic(bench.cluster, "new", config={"txnstore.placement": "second.db"})
    (number,) = topic.partition_ids
    producer.coordinator.add_partitions(producer.transactional_id, producer.identity, [number])
    producer.send(bench.partition_at(2), b"a")
    late = producer.twin()
    producer.end(commit=True)
    assert bench.markers(number) == [(1, late.identity.epoch + 1)]
    assert bench.read(bench.partition_at(2)) == [b"a"]
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_an_end_whose_answer_from_a_member_is_lost_is_told_again(sqlite_bench: Bench, monkeypatch):
    bench = sqlite_bench
    producer = bench.producer_at(1)
    producer.send(bench.partition_at(2), b"a")
    store = bench.cluster.own(2)
    write, answers = store.write, []

    def lose_the_first(*arguments, **options):
        result = write(*arguments, **options)
        answers.append(result)
        if len(answers) == 1:
            raise OutcomeUnknown
        return result

    monkeypatch.setattr(store, "write", lose_the_first)
    producer.end(commit=True)
    assert len(answers) == 2
    assert len(bench.markers(bench.partition_at(2))) == 1
    assert_cluster_sound(bench.cluster, at_rest=True)

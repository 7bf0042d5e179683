"""What a standby of one of several databases has not heard of yet is not taken for what there is not."""

from __future__ import annotations

from typing import NoReturn

import pytest

from tests.cluster.conftest import Bench
from tests.tools.cluster_changes import delete_topic
from txnstore.errors import OutcomeUnknown, StoreReadOnly, StoreUnavailable, UnknownTopicOrPartition
from txnstore.log.cluster_topics import create_topic
from txnstore.testing.invariants import assert_cluster_sound
from txnstore.transactions import administration, coordinator, delivery
from txnstore.transactions.administration import OpenInPartition, abort_open_transactions
from txnstore.transactions.transaction import InStore, complete_decided


@pytest.mark.parametrize("member_knows", [True, False])
def test_a_partition_that_a_standby_of_the_controller_does_not_know_is_not_taken_for_deleted(
    sqlite_bench: Bench, monkeypatch, member_knows: bool
):
    bench = sqlite_bench
    producer = bench.producer_at(2)
    partition_id = bench.partition_at(3)
    producer.send(partition_id, b"a")
    with bench.down(3), pytest.raises(OutcomeUnknown, match="is decided"):
        producer.end(commit=True)

    def unknown(*_: object, **__: object) -> NoReturn:
        raise UnknownTopicOrPartition

    store = bench.cluster.own(2)
    with monkeypatch.context() as lagging:
        lagging.setattr(type(bench.cluster.controller.backend), "is_standby", lambda *_: True)
        lagging.setattr(type(bench.cluster), "read_leaders", lambda *_: {})
        if member_knows:
            bench.cluster._leaders.clear()
        else:
            # Nor does the member, whose copies are behind.
            lagging.setattr(delivery, "write_markers", unknown)
        with pytest.raises(StoreReadOnly, match="is a standby, which may lag behind"):
            complete_decided(store, producer.transactional_id, bench.cluster)
    assert bench.queued(producer.transactional_id) == {partition_id}
    complete_decided(store, producer.transactional_id, bench.cluster)
    assert bench.read(partition_id) == [b"a"]
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_a_transaction_that_a_standby_of_its_coordinator_does_not_know_is_not_ended_in_its_partition(
    sqlite_bench: Bench, monkeypatch
):
    bench = sqlite_bench
    producer = bench.producer_at(2)
    partition_id = bench.partition_at(3)
    producer.send(partition_id, b"a")
    target = OpenInPartition(partition_id, producer.identity)
    known = type(administration._KNOWN_PRODUCERS)
    with monkeypatch.context() as lagging:
        lagging.setattr(type(bench.cluster.controller.backend), "is_standby", lambda *_: True)
        lagging.setattr(known, "values", lambda *_: [])
        with pytest.raises(StoreReadOnly, match="is a standby, which may lag behind"):
            abort_open_transactions(bench.cluster.own(3), [target], bench.cluster)
    producer.end(commit=True)
    assert bench.read(partition_id) == [b"a"]
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_a_producer_is_not_fenced_for_a_partition_that_a_standby_of_the_controller_does_not_know_to_be_deleted(
    sqlite_bench: Bench, monkeypatch
):
    bench = sqlite_bench
    producer, kept = bench.producer_at(2), bench.partition_at(3)
    topic = create_topic(bench.cluster, "short-lived", partition_count=6, config={"txnstore.placement": "roundrobin"})
    gone = next(number for number, leader in zip(topic.partition_ids, topic.leaders, strict=True) if leader != 2)
    for number in (kept, gone):
        producer.send(number, b"value")
    # While its coordinator is away nobody knows that it is in use.
    with bench.down(2):
        delete_topic(bench.cluster, topic.name)
    bench.cluster.reconcile(2)
    in_store = InStore({kept, gone})
    is_standby = type(bench.cluster.controller.backend), "is_standby", lambda *_: True
    with monkeypatch.context() as lagging:
        lagging.setattr(*is_standby)
        lagging.setattr(coordinator, "read_deleted", lambda *_, **__: set())
        with pytest.raises(StoreUnavailable, match=r"is a standby, which may lag behind.*committed nothing"):
            producer.end(commit=True, in_store=in_store)
    assert bench.read(kept) == []
    # What it has heard of is so.
    with monkeypatch.context() as knowing:
        knowing.setattr(*is_standby)
        producer.end(commit=True, in_store=in_store)
    assert bench.read(kept) == [b"value"]

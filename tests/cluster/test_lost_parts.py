"""A producer at work whose coordinator has lost a part of its transaction commits no half of it.

Its epoch may be the coordinator's all the same: then only the parts tell.
"""

from __future__ import annotations

import pytest

import txnstore
from tests.clients.steps import NO_MEMBER, PATIENCE_SECONDS
from tests.cluster.conftest import Bench, Producer
from tests.cluster.lost_changes import Survivor, backup_of, end_what_hangs
from tests.tools.cluster_changes import change_store_settings, delete_topic
from txnstore import KafkaError, KafkaException, TopicPartition
from txnstore.errors import InvalidTransactionState, ProducerFenced
from txnstore.log.cluster_topics import create_topic
from txnstore.transactions import rows
from txnstore.transactions.protocol import TransactionState
from txnstore.transactions.transaction import InStore

S = TransactionState


@pytest.mark.slow_but_first
@pytest.mark.parametrize("lost", ["nothing", "records", "records here", "offsets", "all"])
def test_a_producer_commits_no_half_of_what_its_coordinator_has_lost(bench: Bench, lost: str):
    group_id, third = bench.name_at(2, "group"), bench.partition_at(3)
    number = bench.partition_at(1 if lost == "records here" else 2)
    producer = txnstore.Producer(
        {
            "bootstrap.servers": ", ".join(bench.site.urls),
            "transactional.id": bench.name_at(1, "id"),
            "txnstore.clock": bench.clock,
        }
    )

    def produce(partition_id: int) -> None:
        producer.produce(bench.topic.name, b"value", partition=bench.topic.partition_ids.index(partition_id))
        assert producer.flush(PATIENCE_SECONDS) == 0

    def send_offsets() -> None:
        positions = [TopicPartition(bench.topic.name, 0, 5)]
        producer.send_offsets_to_transaction(
            positions, NO_MEMBER.replace(b"readers", group_id.encode()), PATIENCE_SECONDS
        )

    with producer:
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
        restore = backup_of(bench.cluster.own(1))
        if lost in ("offsets", "all"):
            send_offsets()
        if lost != "offsets":
            produce(number)
        if lost == "nothing":
            send_offsets()
        else:
            restore()
        if lost != "all":
            produce(third)
        if lost == "nothing":
            producer.commit_transaction(PATIENCE_SECONDS)
        else:
            with pytest.raises(KafkaException) as raised:
                producer.commit_transaction(PATIENCE_SECONDS)
            error = raised.value.args[0]
            assert error.fatal()
            if lost != "all":
                assert error.code() == KafkaError._FENCED
                assert "was an older state restored" in error.str()
    values = [value for one in (number, third) for value in bench.read(one) if value is not None]
    assert values == ([b"value"] * 2 if lost == "nothing" else [])
    assert bench.committed(group_id) == ({bench.topic.partition_ids[0]: 5} if lost == "nothing" else {})


@pytest.mark.slow
@pytest.mark.parametrize("with_offsets", [False, True])
@pytest.mark.parametrize("is_decided", [False, True])
def test_who_has_gone_on_elsewhere_commits_no_half_of_a_transaction(bench: Bench, is_decided: bool, with_offsets: bool):
    """Where nothing was outrun, the coordinator has come to the very epoch that the producer has."""
    survivor = Survivor(bench, in_same_partition=False, is_decided=is_decided)
    producer, third = survivor.producer, bench.partition_at(3)
    survivor.time_out()
    assert bench.row(survivor.name).identity == producer.identity
    producer.send(third, b"more")
    in_store = InStore([survivor.other, third], [survivor.group_id] if with_offsets else [])
    with pytest.raises(ProducerFenced, match=rf"written to 1 partitions and {int(with_offsets)} groups: was an older"):
        producer.twin().end(commit=True, in_store=in_store)
    assert bench.row(survivor.name).state is S.ONGOING
    newcomer = Producer(bench.cluster, survivor.name).start()
    newcomer.send(survivor.other, b"new")
    newcomer.end(commit=True, in_store=InStore([survivor.other]))
    end_what_hangs(bench)
    assert survivor.read() == [b"old", b"new"]
    assert bench.read(third) == []


def test_what_was_lost_is_not_committed_with_the_next_transaction_of_the_same_producer(bench: Bench):
    survivor = Survivor(bench, in_same_partition=False)
    producer = survivor.producer
    survivor.time_out()
    producer.end(commit=False)
    with pytest.raises(InvalidTransactionState, match="`txnstore transactions list-open` shows it"):
        producer.twin().send(survivor.other, b"next")
    producer.end(commit=False)
    end_what_hangs(bench)
    producer.send(survivor.other, b"next")
    producer.end(commit=True, in_store=InStore([survivor.other]))
    assert survivor.read() == [b"old", b"next"]


def test_lost_offsets_are_not_committed_with_the_next_transaction_of_the_same_producer(bench: Bench):
    producer, number, group_id = bench.producer_at(1), bench.partition_at(3), bench.name_at(2, "group")
    restore = backup_of(bench.cluster.own(1))
    producer.send_offsets(group_id, {number: 9})
    restore()
    producer.end(commit=False)
    with pytest.raises(InvalidTransactionState, match="in the group"):
        producer.send_offsets(group_id, {bench.partition_at(2): 1})
    assert bench.committed(group_id) == {}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("with_offsets", [False, True])
def test_who_takes_over_a_prepared_transaction_ends_nothing_that_came_after_it(bench: Bench, with_offsets: bool):
    """Its epoch is that which the producer of what came after has: only what that has written tells them apart."""
    change_store_settings(bench.cluster, {"transaction.two.phase.commit.enable": "true"})
    old, group_id = bench.partition_at(2), bench.name_at(2, "group")
    producer = Producer(bench.cluster, bench.name_at(1, "id")).start(enable_two_phase_commit=True)

    def write(value: bytes, offset: int) -> None:
        if with_offsets:
            producer.send_offsets(group_id, {old: offset})
        else:
            producer.send(old, value)

    write(b"old", 1)
    restore = backup_of(bench.cluster.own(1))
    producer.end(commit=True)
    write(b"lost", 2)
    restore()
    newcomer = Producer(bench.cluster, producer.transactional_id)
    newcomer.start(enable_two_phase_commit=True, keep_prepared=True)
    assert newcomer.identity == producer.identity
    in_store = InStore([], [group_id]) if with_offsets else InStore([old])
    with pytest.raises(ProducerFenced, match="was an older state restored"):
        producer.twin().end(commit=True, in_store=in_store)
    assert bench.row(producer.transactional_id).state is S.ONGOING
    newcomer.end(commit=True)
    end_what_hangs(bench)
    assert bench.read(old) == ([] if with_offsets else [b"old"])
    assert bench.committed(group_id) == ({old: 1} if with_offsets else {})
    assert bench.offsets(group_id).unstable == set()


@pytest.mark.slow
def test_a_commit_lacks_nothing_where_a_topic_was_deleted(bench: Bench):
    producer, kept = bench.producer_at(2), bench.partition_at(3)
    topic = create_topic(bench.cluster, "short-lived", partition_count=6, config={"txnstore.placement": "roundrobin"})
    gone = [number for number, leader in zip(topic.partition_ids, topic.leaders, strict=True) if leader != 2]
    for number in (kept, *gone):
        producer.send(number, b"value")
    # While its coordinator is away nobody knows that it is in use.
    with bench.down(2):
        delete_topic(bench.cluster, topic.name)
    bench.cluster.reconcile(2)
    found = bench.cluster.own(2).read(lambda connection: rows.partitions_of(connection, producer.transactional_id))
    assert list(found) == [kept]
    producer.end(commit=True, in_store=InStore({kept, *gone}))
    assert bench.read(kept) == [b"value"]

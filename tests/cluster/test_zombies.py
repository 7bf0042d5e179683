"""A fenced producer that wakes when everybody has forgotten it: nothing of it takes effect in any database."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.cluster.conftest import Bench, Producer
from tests.transactions.bench import sent_offsets
from txnstore.errors import InvalidProducerIdMapping, ProducerFenced, StoreUnavailable
from txnstore.groups.offsets_from_elsewhere import _forget_producers, announce_offset_producer
from txnstore.log.append import announce
from txnstore.log.partition_rows import producers_of_partition
from txnstore.testing.invariants import assert_cluster_sound
from txnstore.transactions.distributed import RemoteTransaction, RemoteWriter
from txnstore.transactions.recovery import expire_producers, expire_transactional_ids
from txnstore.transactions.writers import join_transaction

DAY_MS = 86_400_000


def parts(bench: Bench, producer: Producer) -> RemoteTransaction:
    """Return the part of a client that writes where its transaction has a part already."""
    store = bench.cluster.coordinator_of(producer.transactional_id)
    return RemoteTransaction(store, bench.cluster, producer.transactional_id, producer.identity, None)


def begins_to_append(bench: Bench, producer: Producer) -> Callable[[], object]:
    """Let the partition take part; return what the producer does when it wakes."""
    partition_id = bench.partition_at(2)
    batch = producer.batch(partition_id, b"late")
    producer.coordinator.add_partitions(producer.transactional_id, producer.identity, [partition_id])
    return lambda: parts(bench, producer)._append(2, [batch])


def begins_to_send_offsets(bench: Bench, producer: Producer) -> Callable[[], object]:
    group_id = bench.name_at(2, "group")
    parts(bench, producer).add((), [group_id])
    return lambda: parts(bench, producer).send_offsets(sent_offsets(group_id, {bench.partition_at(1): 9}))


def begins_as_writer(bench: Bench, producer: Producer) -> Callable[[], object]:
    store = bench.cluster.coordinator_of(producer.transactional_id)
    producer.send(bench.partition_at(1), b"begun")
    writer = join_transaction(store, producer.transactional_id, producer.identity, bench.cluster)
    partition_id = bench.partition_at(2)
    remote = RemoteWriter(store, bench.cluster, writer, None)
    remote._verify([partition_id])
    batch = Producer(bench.cluster, "", writer.identity).batch(partition_id, b"late")
    return lambda: remote._append(2, [batch], has_reported=False)


def is_fenced(bench: Bench, producer: Producer) -> None:
    producer.twin().start()


def is_forgotten_whole(bench: Bench, producer: Producer) -> None:
    producer.twin().start()
    bench.clock.advance(8 * DAY_MS)
    for store in bench.cluster.stores():
        expire_transactional_ids(store)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("begins", [begins_to_append, begins_to_send_offsets, begins_as_writer])
def test_who_sleeps_until_it_is_forgotten_changes_nothing_when_it_wakes(bench: Bench, begins):
    wakes_forgotten(bench, begins, is_fenced)


def test_who_sleeps_until_its_transactional_id_has_expired_changes_nothing_when_it_wakes(sqlite_bench: Bench):
    wakes_forgotten(sqlite_bench, begins_to_append, is_forgotten_whole)


def wakes_forgotten(bench: Bench, begins, ends) -> None:
    zombie = bench.producer_at(1)
    wake = begins(bench, zombie)
    ends(bench, zombie)
    bench.clock.advance(DAY_MS)
    for store in bench.cluster.stores():
        expire_producers(store)
    with pytest.raises((ProducerFenced, InvalidProducerIdMapping)):
        wake()
    assert bench.read(bench.partition_at(2)) == []
    assert_cluster_sound(bench.cluster, at_rest=True, producers_expire=True)
    # Nobody is held back.
    later = bench.producer_at(1)
    later.send(bench.partition_at(2), b"later")
    later.end(commit=True)
    assert bench.read(bench.partition_at(2)) == [b"later"]


def test_who_is_announced_and_sleeps_before_it_asks_its_coordinator_changes_nothing(sqlite_bench: Bench):
    bench = sqlite_bench
    zombie = bench.producer_at(1)
    begins_to_append(bench, zombie)
    is_fenced(bench, zombie)
    bench.clock.advance(DAY_MS)
    store = bench.cluster.own(2)
    expire_producers(store)
    store.write(lambda connection: announce(connection, zombie.identity, [bench.partition_at(2)]))
    store.write(lambda connection: announce_offset_producer(connection, zombie.identity))
    with pytest.raises(ProducerFenced):
        parts(bench, zombie).add([bench.partition_at(2)], ())
    # What it has left behind is forgotten like everybody's, and holds nobody back.
    assert_cluster_sound(bench.cluster, at_rest=True, producers_expire=True)
    bench.clock.advance(DAY_MS)
    assert expire_producers(store) >= 1
    assert store.read(lambda connection: producers_of_partition(connection, bench.partition_at(2))) == []


@pytest.mark.slow
def test_who_is_announced_while_its_coordinator_is_away_asks_it_before_the_next_try(bench: Bench, monkeypatch):
    zombie, partition_id = bench.producer_at(1), bench.partition_at(2)
    late = zombie.batch(partition_id, b"late")
    zombie.coordinator.add_partitions(zombie.transactional_id, zombie.identity, [partition_id], added=zombie.added)
    is_fenced(bench, zombie)
    bench.clock.advance(DAY_MS)
    for store in bench.cluster.stores():
        expire_producers(store)

    def away(*_: object) -> None:
        raise StoreUnavailable("the coordinator's database is away")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteTransaction, "add", away)
        with pytest.raises(StoreUnavailable):
            zombie.send_again([late])
    with pytest.raises(ProducerFenced):
        zombie.send_again([late])
    assert_cluster_sound(bench.cluster, at_rest=True, producers_expire=True)
    assert bench.read(partition_id) == []


@pytest.mark.slow
def test_a_producer_that_returns_after_a_day_goes_on(bench: Bench):
    producer = bench.producer_at(1)
    group_id = bench.name_at(2, "group")
    for number in range(3):
        producer.send(bench.partition_at(2), b"%d" % number)
        producer.send_offsets(group_id, {bench.partition_at(1): number})
        producer.end(commit=True)
        bench.clock.advance(DAY_MS)
        assert sum(expire_producers(store) for store in bench.cluster.stores()) >= 2
    assert bench.read(bench.partition_at(2)) == [b"0", b"1", b"2"]
    assert bench.committed(group_id) == {bench.partition_at(1): 2}
    assert_cluster_sound(bench.cluster, at_rest=True, producers_expire=True)


@pytest.mark.slow
def test_who_sends_offsets_between_the_look_and_the_lock_is_not_forgotten(bench: Bench):
    producer = bench.producer_at(1)
    group_id = bench.name_at(2, "group")
    producer.send_offsets(group_id, {bench.partition_at(1): 1})
    producer.end(commit=True)
    bench.clock.advance(DAY_MS)
    producer.send_offsets(group_id, {bench.partition_at(1): 2})
    store, before_ms = bench.cluster.own(2), bench.clock.now_ms()
    assert store.write(partial(_forget_producers, [producer.identity.producer_id], before_ms)) == 0
    producer.end(commit=True)
    assert bench.committed(group_id) == {bench.partition_at(1): 2}
    bench.clock.advance(DAY_MS)
    assert store.write(partial(_forget_producers, [producer.identity.producer_id], bench.clock.now_ms())) == 1

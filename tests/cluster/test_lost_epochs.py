"""A coordinator that has lost its last changes gives nobody the epoch of a producer whose transactions it has lost.

What that one has written is in the other databases, open until somebody ends it.  They would take the records of the
next one for repetitions of it, or refuse them because newer epochs have been there.  So over several databases each
start has a producer id of its own.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.cluster.conftest import Bench, Producer
from tests.cluster.lost_changes import backup_of
from txnstore.errors import ProducerFenced
from txnstore.model import IsolationLevel, ProducerIdentity
from txnstore.testing.invariants import assert_cluster_sound
from txnstore.transactions.administration import OpenInPartition, abort_open_transaction
from txnstore.transactions.listing import HANGING_MARGIN_MS, hanging_in_cluster

EACH_DATABASE = pytest.mark.parametrize("database_id", [1, 2, 3])


def end_hanging(bench: Bench, partition_id: int, lost: ProducerIdentity) -> None:
    """End what nobody coordinates any more, as `txnstore transactions find-hanging --abort` does."""
    bench.clock.advance(1_000 + HANGING_MARGIN_MS)
    (found,) = hanging_in_cluster(bench.cluster, {}, 900)
    assert (found.producer_id, found.producer_epoch) == (lost.producer_id, lost.epoch)
    leader = bench.cluster.own(bench.cluster.leader_of_partition(partition_id))
    abort_open_transaction(leader, OpenInPartition(partition_id, lost), bench.cluster)


@pytest.mark.slow_but_first
@EACH_DATABASE
@pytest.mark.parametrize("starts", [0, 1, 2])
def test_records_are_not_taken_for_those_of_a_transaction_that_was_lost(bench: Bench, database_id: int, starts: int):
    elsewhere = bench.partition_at(database_id % 3 + 1)
    lost = bench.producer_at(database_id)
    restore = backup_of(bench.cluster.own(database_id))
    for _ in range(starts):
        lost.start()
    lost.send(elsewhere, b"lost")
    restore()
    for _ in range(max(starts, 1)):
        newcomer = Producer(bench.cluster, lost.transactional_id).start()
    assert not newcomer.send(elsewhere, b"new").is_duplicate
    newcomer.end(commit=True)
    with pytest.raises(ProducerFenced):
        lost.twin().end(commit=True)
    assert bench.read(elsewhere, IsolationLevel.READ_UNCOMMITTED) == [b"lost", b"new"]
    # Readers of what is committed wait until somebody has ended what was lost.
    assert bench.read(elsewhere) == []
    end_hanging(bench, elsewhere, lost.identity)
    assert bench.read(elsewhere) == [b"new"]
    with pytest.raises(ProducerFenced):
        lost.send(elsewhere, b"late")
    assert_cluster_sound(bench.cluster, at_rest=True)


@pytest.mark.slow_but_first
@EACH_DATABASE
def test_an_id_whose_last_commits_were_lost_goes_on_at_once(bench: Bench, database_id: int):
    elsewhere = bench.partition_at(database_id % 3 + 1)
    lost = bench.producer_at(database_id)
    restore = backup_of(bench.cluster.own(database_id))
    for value in (b"a", b"b", b"c"):
        lost.send(elsewhere, value)
        lost.end(commit=True)
    restore()
    with pytest.raises(ProducerFenced, match="was an older state restored"):
        lost.send(elsewhere, b"late")
    newcomer = Producer(bench.cluster, lost.transactional_id).start()
    newcomer.send(elsewhere, b"d")
    newcomer.end(commit=True)
    assert bench.read(elsewhere) == [b"a", b"b", b"c", b"d"]


@pytest.mark.slow_but_first
@EACH_DATABASE
def test_lost_offsets_are_not_committed_with_those_of_the_next_transaction(bench: Bench, database_id: int):
    group_id = bench.name_at(database_id % 3 + 1, "group")
    lost_number, number = bench.partition_at(1), bench.partition_at(2)
    first = bench.producer_at(database_id)
    restore = backup_of(bench.cluster.own(database_id))
    lost = Producer(bench.cluster, first.transactional_id).start()
    lost.send_offsets(group_id, {lost_number: 9})
    restore()
    newcomer = Producer(bench.cluster, first.transactional_id).start()
    newcomer.send_offsets(group_id, {number: 1})
    newcomer.end(commit=True)
    assert bench.committed(group_id) == {number: 1}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("is_open", [False, True])
def test_whoever_was_started_before_is_fenced_however_many_have_come_since(bench: Bench, is_open: bool):
    older = [bench.producer_at(1)]
    name, group_id = older[0].transactional_id, bench.name_at(2, "group")
    for _ in range(3):
        if is_open:
            older[-1].twin().send(bench.partition_at(2), b"open")
        older.append(Producer(bench.cluster, name).start())
    newest = older.pop()
    assert len({producer.identity.producer_id for producer in (*older, newest)}) == 4
    for producer in older:
        for request in (
            partial(producer.twin().send, bench.partition_at(1), b"late"),
            partial(producer.twin().send, bench.partition_at(2), b"late"),
            partial(producer.send_offsets, group_id, {bench.partition_at(1): 9}),
            partial(producer.end, commit=True),
            partial(producer.end, commit=False),
            partial(producer.start, expected=producer.identity),
        ):
            with pytest.raises(ProducerFenced) as raised:
                request()
            assert "restored" not in str(raised.value)
    newest.send(bench.partition_at(2), b"new")
    newest.end(commit=True)
    assert bench.read(bench.partition_at(2)) == [b"new"]
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_an_open_transaction_that_is_wholly_at_its_coordinator_is_aborted_by_a_start_too(bench: Bench):
    producer = bench.producer_at(1)
    before = producer.identity
    producer.send(bench.partition_at(1), b"open")
    newer = Producer(bench.cluster, producer.transactional_id).start()
    assert newer.identity.producer_id != before.producer_id
    assert bench.markers(bench.partition_at(1)) == [(0, before.epoch + 1)]
    with pytest.raises(ProducerFenced):
        producer.end(commit=True)


def test_a_producer_that_starts_in_a_store_of_one_database_keeps_its_producer_id(bench: Bench):
    with bench.site.open(bench.site.new("alone")) as alone:
        first = Producer(alone, "id").start()
        second = Producer(alone, "id").start()
    assert (second.identity.producer_id, second.identity.epoch) == (first.identity.producer_id, 1)

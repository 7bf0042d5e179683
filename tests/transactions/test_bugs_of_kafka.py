"""The bugs that Kafka's coordinator had after its original design: each is a test under its number."""

from __future__ import annotations

import pytest

from txnstore.errors import (
    InvalidProducerIdMapping,
    ProducerFenced,
    Recovery,
    TransactionAbortable,
    TxnStoreError,
    WriteConflict,
)
from txnstore.log.locked_partitions import Marker, write_markers
from txnstore.model import ControlType, IsolationLevel, ProducerIdentity
from txnstore.transactions import rows
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.protocol import FenceReason, TransactionState
from txnstore.transactions.recovery import expire_transactional_ids
from txnstore.transactions.transaction import abort_if_timed_out

S = TransactionState
WAYS = pytest.mark.parametrize("writes_elsewhere", [False, True], ids=["in one database", "over several databases"])


def test_kafka_6119_an_abort_for_age_raises_the_epoch(bench) -> None:
    producer = bench.started(timeout_ms=1_000)
    producer.send(bench.partition_ids[0], b"a")
    bench.clock.advance(1_001)
    abort_if_timed_out(bench.store, producer.transactional_id)
    assert bench.row(producer.transactional_id).producer_epoch == 1
    with pytest.raises(TransactionAbortable):
        producer.send(bench.partition_ids[0], b"late")
    assert bench.read(bench.partition_ids[0], IsolationLevel.READ_UNCOMMITTED) == [b"a"]


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_kafka_9600_an_end_from_a_higher_epoch_is_refused(bench, commit: bool) -> None:
    producer = bench.started()
    producer.send(bench.partition_ids[0], b"a")
    for higher in (1, 2, 32767):
        producer.become(ProducerIdentity(producer.identity.producer_id, higher))
        with pytest.raises(ProducerFenced):
            producer.end(commit=commit)
    assert bench.row(producer.transactional_id).state is S.ONGOING


def test_kafka_9666_a_fence_that_could_not_be_written_does_not_raise_the_epoch_twice(bench, monkeypatch) -> None:
    producer = bench.started(timeout_ms=1_000)
    producer.send(bench.partition_ids[0], b"a")
    bench.clock.advance(1_001)
    before = bench.row(producer.transactional_id)
    real, calls = rows.save_row, []

    def fail_at_first(*arguments, **options) -> None:
        real(*arguments, **options)
        calls.append(1)
        if len(calls) <= 2:
            raise WriteConflict

    monkeypatch.setattr(rows, "save_row", fail_at_first)
    abort_if_timed_out(bench.store, producer.transactional_id)
    assert len(calls) == 3
    row = bench.row(producer.transactional_id)
    assert (row.state, row.producer_epoch) == (S.COMPLETE_ABORT, before.producer_epoch + 1)
    assert bench.markers(bench.partition_ids[0]) == [(1, ControlType.ABORT, 1)]


@pytest.mark.slow_but_first
@WAYS
def test_kafka_14053_a_record_that_arrives_after_the_abort_joins_no_transaction(bench, writes_elsewhere: bool) -> None:
    producer = bench.started(writes_elsewhere=writes_elsewhere)
    producer.send(bench.partition_ids[0], b"a")
    late = producer.twin()
    producer.abort()
    with pytest.raises(ProducerFenced):
        late.send(bench.partition_ids[0], b"late")
    with pytest.raises(ProducerFenced):
        late.send(bench.partition_ids[1], b"late")
    assert bench.bounds(bench.partition_ids[0]).last_stable_offset == 2
    producer.send(bench.partition_ids[0], b"b")
    with pytest.raises(ProducerFenced):
        late.send(bench.partition_ids[0], b"late")
    producer.commit()
    assert bench.read(bench.partition_ids[0]) == [b"b"]


def test_kafka_18019_an_expired_id_and_its_old_producer_is_fatal(own_bench) -> None:
    producer = own_bench.started()
    own_bench.clock.advance(604_800_000)
    assert expire_transactional_ids(own_bench.store) == (producer.transactional_id,)
    old = producer.twin()
    for again in (False, True):
        if again:
            producer.start()
        for call in (lambda: old.send(own_bench.partition_ids[0], b"a"), old.commit, old.abort):
            with pytest.raises(InvalidProducerIdMapping) as raised:
                call()
            assert raised.value.recovery is Recovery.CLOSE


@WAYS
def test_kafka_18401_an_empty_abort_does_not_fence_its_own_producer(bench, writes_elsewhere: bool) -> None:
    producer = bench.started(writes_elsewhere=writes_elsewhere)
    for expected_epoch in (1, 2, 3):
        producer.abort()
        assert producer.identity.epoch == expected_epoch
    producer.send(bench.partition_ids[0], b"a")
    producer.commit()
    producer.abort()
    producer.send(bench.partition_ids[0], b"b")
    producer.commit()
    assert bench.read(bench.partition_ids[0]) == [b"a", b"b"]
    assert bench.finished(bench.partition_ids[0])[0].producer_epoch == 3


@WAYS
def test_kafka_18464_an_empty_abort_can_be_repeated_and_an_empty_commit_is_refused(
    bench, writes_elsewhere: bool
) -> None:
    producer = bench.started(writes_elsewhere=writes_elsewhere)
    again = producer.twin()
    with pytest.raises(TxnStoreError) as raised:
        producer.commit()
    assert raised.value.kafka_name == "INVALID_TXN_STATE"
    assert producer.abort().identity == again.abort().identity
    assert [bench.bounds(partition_id).high_watermark for partition_id in bench.partition_ids] == [0, 0]


@pytest.mark.slow_but_first
@WAYS
def test_kafka_18660_when_the_epoch_overflows_the_end_returns_a_new_producer_id_and_the_next_transaction_works(
    bench, writes_elsewhere: bool
) -> None:
    producer = bench.started(writes_elsewhere=writes_elsewhere)
    old_id = producer.identity.producer_id
    bench.set_row(producer.transactional_id, producer_epoch=32766)
    producer.become(ProducerIdentity(old_id, 32766))
    producer.send(bench.partition_ids[0], b"a")
    ended = producer.commit()
    assert (ended.identity.epoch, ended.identity.producer_id == old_id) == (0, False)
    producer.send(bench.partition_ids[0], b"b")
    producer.commit()
    assert bench.read(bench.partition_ids[0]) == [b"a", b"b"]


def test_kafka_20310_the_producer_id_before_survives_a_restart(own_bench, url: str, txnstore_open) -> None:
    producer = own_bench.started()
    own_bench.set_row(producer.transactional_id, producer_epoch=32766)
    producer.become(ProducerIdentity(producer.identity.producer_id, 32766))
    producer.send(own_bench.partition_ids[0], b"a")
    again = producer.twin()
    answer = producer.commit()
    own_bench.store.close()
    again.coordinator = TransactionCoordinator(txnstore_open(url))
    assert again.commit().identity == answer.identity


def test_kafka_20357_the_last_epoch_survives_a_restart(own_bench, url: str, txnstore_open) -> None:
    producer = own_bench.started()
    old = producer.identity
    answer = producer.start(expected=old)
    own_bench.store.close()
    producer.coordinator = TransactionCoordinator(txnstore_open(url))
    assert producer.start(expected=old).identity == answer.identity == ProducerIdentity(old.producer_id, 1)


@pytest.mark.parametrize("epoch", [0, 32764, 32765, 32766])
def test_kafka_19367_a_start_over_an_open_transaction_raises_the_epoch_once(bench, epoch: int) -> None:
    producer = bench.started()
    old_id = producer.identity.producer_id
    bench.set_row(producer.transactional_id, producer_epoch=epoch)
    producer.become(ProducerIdentity(old_id, epoch))
    producer.send(bench.partition_ids[0], b"a")
    producer.start()
    if epoch < 32766:
        assert producer.identity == ProducerIdentity(old_id, epoch + 1)
    else:
        assert (producer.identity.epoch, producer.identity.producer_id == old_id) == (0, False)


def test_kafka_20090_an_abort_for_age_at_the_last_epoch_replaces_the_producer_id(bench) -> None:
    producer = bench.started(timeout_ms=1_000)
    old_id = producer.identity.producer_id
    bench.set_row(producer.transactional_id, producer_epoch=32766)
    producer.become(ProducerIdentity(old_id, 32766))
    producer.send(bench.partition_ids[0], b"a")
    bench.clock.advance(1_001)
    abort_if_timed_out(bench.store, producer.transactional_id)
    row = bench.row(producer.transactional_id)
    assert (row.producer_epoch, row.previous_producer_id) == (0, old_id)
    assert row.producer_id != old_id
    assert producer.start().identity == ProducerIdentity(row.producer_id, 1)


@WAYS
def test_kafka_20785_a_commit_that_lost_the_race_against_an_abort_is_fenced(bench, writes_elsewhere: bool) -> None:
    producer = bench.started(writes_elsewhere=writes_elsewhere)
    producer.send(bench.partition_ids[0], b"a")
    commit = producer.twin()
    producer.abort()
    with pytest.raises(ProducerFenced):
        commit.commit()
    assert bench.read(bench.partition_ids[0]) == []


def test_kafka_20785_with_a_reason_from_outside_it_is_told_to_abort(bench) -> None:
    """Only a newer producer is fatal here; whoever was too slow is told so and may go on."""
    producer = bench.started(timeout_ms=1_000)
    producer.send(bench.partition_ids[0], b"a")
    bench.clock.advance(1_001)
    abort_if_timed_out(bench.store, producer.transactional_id)
    assert bench.row(producer.transactional_id).fence_reason is FenceReason.TIMEOUT
    with pytest.raises(TransactionAbortable) as raised:
        producer.commit()
    assert raised.value.recovery is Recovery.ABORT


def test_kafka_19999_a_marker_that_comes_again_is_not_written_again(bench) -> None:
    producer = bench.started()
    producer.send(bench.partition_ids[0], b"a")
    identity = producer.commit().identity
    before = bench.bounds(bench.partition_ids[0])
    for kind in ControlType:
        marker = Marker(bench.partition_ids[0], identity, kind)
        bench.store.write(lambda connection, marker=marker: write_markers(connection, [marker, marker]))
    assert bench.bounds(bench.partition_ids[0]) == before
    assert len(bench.finished(bench.partition_ids[0])) == 1


@WAYS
def test_kafka_16570_producers_can_be_fenced_right_after_a_commit(bench, writes_elsewhere: bool) -> None:
    """Fencing a producer is InitProducerId in its name; it must not find the commit still going on."""
    producer = bench.started(writes_elsewhere=writes_elsewhere)
    producer.send(bench.partition_ids[0], b"a")
    producer.commit()
    fence = producer.twin().start()
    # Over several databases each start has a producer id of its own.
    has_new_id = fence.identity.producer_id != producer.identity.producer_id
    assert (has_new_id, fence.identity.epoch) == ((True, 0) if writes_elsewhere else (False, 2))
    assert bench.read(bench.partition_ids[0]) == [b"a"]
    # Which of the two depends on how many databases there are by the coordinator's own table, one here.
    with pytest.raises(InvalidProducerIdMapping if has_new_id else ProducerFenced):
        producer.send(bench.partition_ids[0], b"late")


def test_kafka_16570_also_if_the_process_died_between_the_decision_and_its_markers(bench) -> None:
    producer = bench.started(writes_elsewhere=True)
    producer.send(bench.partition_ids[0], b"a")
    producer.decide(commit=True)
    new = producer.twin().start().identity
    assert (new.producer_id > producer.identity.producer_id, new.epoch) == (True, 0)
    assert bench.read(bench.partition_ids[0]) == [b"a"]

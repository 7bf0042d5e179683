"""Records and offsets of a transaction as clients send them: a row of each kind of Kafka's table, in the database."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from txnstore.errors import (
    ConcurrentTransactions,
    InvalidGroupId,
    InvalidProducerIdMapping,
    InvalidRequest,
    OutOfOrderSequence,
    ProducerFenced,
    TxnStoreError,
    UnknownTopicOrPartition,
)
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.model import IsolationLevel, ProducerIdentity, Record
from txnstore.transactions.protocol import TransactionState
from txnstore.transactions.recovery import complete_all_decided

S = TransactionState


def send_records(bench, producer) -> None:
    producer.send(bench.partition_ids[0], b"late")


def send_offsets(bench, producer) -> None:
    producer.send_offsets("late", {bench.partition_ids[0]: 99})


def commit_with_records(bench, producer) -> None:
    producer.commit(appends=[producer.batch(bench.partition_ids[0], b"late")])


WAYS = pytest.mark.parametrize("send", [send_records, send_offsets, commit_with_records], ids=lambda way: way.__name__)


@pytest.mark.slow_but_first
@WAYS
@pytest.mark.parametrize(
    ("state", "identity", "error"),
    [
        pytest.param("Empty", (1, 0), InvalidProducerIdMapping, id="Empty, another producer id"),
        pytest.param("Ongoing", (0, -1), ProducerFenced, id="Ongoing, older epoch"),
        pytest.param("PrepareCommit", (0, 0), ConcurrentTransactions, id="PrepareCommit"),
        pytest.param("CompleteCommit", (0, 1), ProducerFenced, id="CompleteCommit, higher epoch"),
    ],
)
def test_who_may_not_write_is_told_why_and_nothing_is_written(
    bench, send: Callable, state: str, identity: tuple[int, int], error: type[TxnStoreError]
) -> None:
    producer = bench.started()
    if state != "Empty":
        producer.send(bench.partition_ids[0], b"a")
    if state.startswith("Prepare"):
        producer.decide(commit=state == "PrepareCommit")
    if state.startswith("Complete"):
        producer.end(commit=state == "CompleteCommit")
    before = bench.row(producer.transactional_id)
    assert before.state.kafka_name == state
    other_id, epochs = identity
    producer.become(ProducerIdentity(before.producer_id + other_id * 10**9, before.producer_epoch + epochs))
    high_watermark = bench.bounds(bench.partition_ids[0]).high_watermark
    with pytest.raises(error) as raised:
        send(bench, producer)
    assert type(raised.value) is error
    assert bench.row(producer.transactional_id) == before
    assert bench.bounds(bench.partition_ids[0]).high_watermark == high_watermark
    assert bench.offsets("late").offsets == {}


@pytest.mark.parametrize(
    "transactional_id",
    [
        pytest.param("", id="empty"),
        pytest.param(None, id="null"),
        pytest.param("a\0b", id="with NUL"),
        pytest.param("x" * 1001, id="1001 characters"),
        pytest.param("\U0001f600" * 301, id="1204 bytes"),
    ],
)
def test_what_is_no_transactional_id_is_refused(bench, offsets_of: Callable, transactional_id: str) -> None:
    producer = bench.started()
    coordinator, identity = producer.coordinator, producer.identity
    for call in (
        lambda: coordinator.append(transactional_id, identity, [producer.batch(bench.partition_ids[0], b"a")]),
        lambda: coordinator.send_offsets(transactional_id, identity, offsets_of("readers", {})),
        lambda: coordinator.end_transaction(transactional_id, identity, commit=True),
        lambda: coordinator.end_transaction(transactional_id, identity, commit=False),
    ):
        with pytest.raises(InvalidRequest):
            call()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("begin_from", ["Empty", "CompleteCommit", "CompleteAbort"])
@pytest.mark.parametrize("begin_with", ["records", "offsets"])
def test_the_first_write_begins_the_transaction(bench, begin_from: str, begin_with: str) -> None:
    producer = bench.started()
    if begin_from != "Empty":
        producer.send(bench.partition_ids[0], b"a")
        producer.end(commit=begin_from == "CompleteCommit")
    before = bench.row(producer.transactional_id)
    now_ms = bench.clock.advance(10)
    if begin_with == "records":
        producer.send(bench.partition_ids[1], b"b")
        assert bench.participants(producer.transactional_id) == ([bench.partition_ids[1]], [])
    else:
        producer.send_offsets("readers", {bench.partition_ids[1]: 3})
        assert bench.participants(producer.transactional_id) == ([], ["readers"])
    row = bench.row(producer.transactional_id)
    assert (row.state, row.start_ms, row.last_update_ms) == (S.ONGOING, now_ms, now_ms)
    assert (row.identity, row.begin_epoch) == (before.identity, before.producer_epoch)
    assert row.transaction_number == before.transaction_number + 1


def test_further_writes_to_the_same_partitions_and_groups_do_not_touch_the_row(bench) -> None:
    producer = bench.started()
    producer.send(bench.partition_ids[0], b"a")
    producer.send_offsets("readers", {bench.partition_ids[0]: 1})
    before, journal = bench.row(producer.transactional_id), bench.journal(producer.transactional_id)
    bench.clock.advance(10)
    producer.send(bench.partition_ids[0], b"b")
    producer.send_offsets("readers", {bench.partition_ids[1]: 1})
    assert bench.row(producer.transactional_id) == before
    assert bench.journal(producer.transactional_id) == journal


def test_a_new_partition_or_group_is_added_and_the_start_stays(bench) -> None:
    producer = bench.started()
    producer.send(bench.partition_ids[0], b"a")
    start_ms = bench.row(producer.transactional_id).start_ms
    for step in (
        lambda: producer.send(bench.partition_ids[1], b"b"),
        lambda: producer.send_offsets("readers", {bench.partition_ids[0]: 1}),
        lambda: producer.send_offsets("others", {bench.partition_ids[0]: 1}),
    ):
        now_ms = bench.clock.advance(10)
        step()
        row = bench.row(producer.transactional_id)
        assert (row.state, row.start_ms, row.last_update_ms) == (S.ONGOING, start_ms, now_ms)
    assert bench.participants(producer.transactional_id) == (list(bench.partition_ids), ["others", "readers"])
    assert {state for state, _ in bench.journal(producer.transactional_id)} == {S.EMPTY, S.ONGOING}


def test_while_a_transaction_is_decided_the_next_one_waits_and_then_begins(bench) -> None:
    producer = bench.started()
    producer.send(bench.partition_ids[0], b"a")
    producer.decide(commit=True)
    producer.become(bench.row(producer.transactional_id).identity)
    batch = producer.batch(bench.partition_ids[0], b"b")
    with pytest.raises(ConcurrentTransactions) as raised:
        producer.coordinator.append(producer.transactional_id, producer.identity, [batch])
    assert raised.value.retriable
    complete_all_decided(bench.store)
    producer.coordinator.append(producer.transactional_id, producer.identity, [batch])
    producer.commit()
    assert bench.read(bench.partition_ids[0]) == [b"a", b"b"]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"is_transactional": False}, id="not marked as transactional"),
        pytest.param({"producer_id": 10**12}, id="of another producer id"),
        pytest.param({"producer_epoch": 1}, id="of another epoch"),
    ],
)
def test_a_batch_that_is_not_the_transactions_own_is_refused_and_begins_nothing(bench, changes: dict) -> None:
    producer = bench.started()
    batch = producer.batch(bench.partition_ids[0], b"a")
    foreign = replace(batch, batch=replace(batch.batch, **changes))
    with pytest.raises(InvalidRequest):
        producer.coordinator.append(producer.transactional_id, producer.identity, [foreign])
    assert bench.row(producer.transactional_id).state is S.EMPTY


@pytest.mark.parametrize(
    ("break_it", "error"),
    [
        pytest.param(lambda bench, producer: producer.batch(10**12, b"a"), UnknownTopicOrPartition, id="no partition"),
        pytest.param(
            lambda bench, producer: Append(
                bench.partition_ids[0],
                encode([Record(b"a")], producer=producer.identity, base_sequence=1, is_transactional=True),
            ),
            OutOfOrderSequence,
            id="a sequence that does not begin at 0",
        ),
    ],
)
def test_what_the_log_refuses_begins_no_transaction(bench, break_it: Callable, error: type[TxnStoreError]) -> None:
    producer = bench.started()
    good = producer.batch(bench.partition_ids[1], b"good")
    with pytest.raises(error):
        producer.coordinator.append(producer.transactional_id, producer.identity, [good, break_it(bench, producer)])
    assert bench.row(producer.transactional_id).state is S.EMPTY
    assert bench.bounds(bench.partition_ids[1]).high_watermark == 0


def test_offsets_that_the_group_refuses_begin_no_transaction(bench) -> None:
    producer = bench.started()
    with pytest.raises(InvalidGroupId):
        producer.send_offsets("", {bench.partition_ids[0]: 1})
    assert bench.row(producer.transactional_id).state is S.EMPTY


def test_a_batch_that_is_sent_again_because_its_answer_was_lost_is_there_once(bench) -> None:
    producer = bench.started()
    append = producer.batch(bench.partition_ids[0], b"a", b"b")
    answers = [producer.coordinator.append(producer.transactional_id, producer.identity, [append])[0] for _ in range(3)]
    assert [(answer.base_offset, answer.last_offset) for answer in answers] == [(0, 1)] * 3
    assert [answer.is_duplicate for answer in answers] == [False, True, True]
    assert [answer.begins_transaction for answer in answers] == [True, False, False]
    assert bench.read(bench.partition_ids[0], IsolationLevel.READ_UNCOMMITTED) == [b"a", b"b"]
    producer.commit()
    assert bench.read(bench.partition_ids[0]) == [b"a", b"b"]

"""EndTxn as clients call it: a cell of each kind of Kafka's table, through the database and both ways of delivery."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from sqlalchemy import select

from txnstore.db.schema import group_offsets
from txnstore.db.store import RowsMissedError
from txnstore.errors import (
    InvalidProducerIdMapping,
    InvalidRequest,
    InvalidTransactionState,
    ProducerFenced,
    TxnStoreError,
)
from txnstore.model import ControlType, IsolationLevel, ProducerIdentity
from txnstore.transactions.protocol import TransactionState, fence_at_rest
from txnstore.transactions.rows import save_row

S = TransactionState

WAYS = pytest.mark.parametrize("writes_elsewhere", [False, True], ids=["in one database", "over several databases"])
#: What a client sees of one cell of each kind; `test_end_rules` has them all, over the pure rules. Where Kafka answers
#: CONCURRENT_TRANSACTIONS until it is complete, the coordinator completes it, and answers.
CELLS = [
    pytest.param(state, column, answer, id=f"{state} / {column}")
    for state, column, answer in (
        ("Empty", "Abort, current", "next epoch"),
        ("Empty", "Commit, current", "INVALID_TXN_STATE"),
        ("Ongoing", "Abort, retry", "PRODUCER_FENCED"),
        ("Ongoing", "Abort, current", "aborted"),
        ("Ongoing", "Commit, current", "committed"),
        ("PrepareAbort", "Abort, retry", "completed"),
        ("PrepareAbort", "Commit, retry", "PRODUCER_FENCED"),
        ("PrepareCommit", "Abort, current", "PRODUCER_FENCED"),
        ("PrepareCommit", "Commit, retry", "completed"),
        ("CompleteAbort", "Abort, retry", "answered"),
        ("CompleteAbort", "Commit, retry", "PRODUCER_FENCED"),
        ("CompleteCommit", "Abort, current", "next epoch"),
        ("CompleteCommit", "Commit, retry", "answered"),
    )
]
ERRORS: dict[str, type[TxnStoreError]] = {
    "PRODUCER_FENCED": ProducerFenced,
    "INVALID_TXN_STATE": InvalidTransactionState,
}


def bring_into(bench, producer, state: str) -> None:
    producer.start()
    if state != "Empty":
        producer.send(bench.partition_ids[0], b"a")
        producer.send_offsets("readers", {bench.partition_ids[0]: 7})
    if state.startswith("Prepare"):
        producer.decide(commit=state == "PrepareCommit")
    if state.startswith("Complete"):
        producer.end(commit=state == "CompleteCommit")
    assert bench.row(producer.transactional_id).state.kafka_name == state


@pytest.mark.slow_but_first
@WAYS
@pytest.mark.parametrize(("state", "column", "answer"), CELLS)
def test_a_cell_of_kafkas_table(bench, writes_elsewhere: bool, state: str, column: str, answer: str) -> None:
    producer = bench.producer(writes_elsewhere=writes_elsewhere)
    bring_into(bench, producer, state)
    before = bench.row(producer.transactional_id)
    commit = column.startswith("Commit")
    producer.become(
        ProducerIdentity(before.producer_id, before.producer_epoch - (0 if column.endswith("current") else 1))
    )
    if answer in ERRORS:
        with pytest.raises(ERRORS[answer]) as raised:
            producer.end(commit=commit)
        assert type(raised.value) is ERRORS[answer]
        assert bench.row(producer.transactional_id) == before
        return
    producer.end(commit=commit)
    row = bench.row(producer.transactional_id)
    assert producer.identity == row.identity
    assert row.producer_id == before.producer_id
    bumped = answer in ("next epoch", "aborted", "committed")
    assert row.producer_epoch == before.producer_epoch + bumped
    assert row.state is (S.COMPLETE_COMMIT if commit else S.COMPLETE_ABORT)
    assert bench.participants(producer.transactional_id) == ([], [])
    if answer in ("aborted", "committed", "completed"):
        kind = ControlType.COMMIT if commit else ControlType.ABORT
        assert bench.markers(bench.partition_ids[0]) == [(1, kind, row.producer_epoch)]
        assert bench.read(bench.partition_ids[0]) == ([b"a"] if commit else [])
    if answer == "answered":
        assert row == before


@pytest.mark.slow_but_first
@WAYS
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
@pytest.mark.parametrize("state", ["Ongoing", "PrepareCommit", "CompleteAbort"])
def test_any_other_identity_is_refused_and_changes_nothing(
    bench, writes_elsewhere: bool, state: str, commit: bool
) -> None:
    producer = bench.producer(writes_elsewhere=writes_elsewhere)
    bring_into(bench, producer, state)
    before = bench.row(producer.transactional_id)
    for producer_id, epoch, error in (
        (before.producer_id, before.producer_epoch + 1, ProducerFenced),
        (before.producer_id, before.producer_epoch + 2, ProducerFenced),
        (before.producer_id, before.producer_epoch - 2, ProducerFenced),
        (before.producer_id + 10**9, before.producer_epoch, InvalidProducerIdMapping),
        (before.producer_id + 10**9, before.producer_epoch - 1, InvalidProducerIdMapping),
    ):
        producer.become(ProducerIdentity(producer_id, epoch))
        with pytest.raises(error):
            producer.end(commit=commit)
    assert bench.row(producer.transactional_id) == before


@WAYS
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_an_unknown_id_is_refused(bench, writes_elsewhere: bool, commit: bool) -> None:
    producer = bench.producer(writes_elsewhere=writes_elsewhere)
    producer.become(ProducerIdentity(7, 0))
    with pytest.raises(InvalidProducerIdMapping):
        producer.end(commit=commit)


@pytest.mark.slow_but_first
@WAYS
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_the_end_reaches_every_partition_and_group_at_the_same_instant(
    bench, writes_elsewhere: bool, commit: bool
) -> None:
    producer = bench.producer(writes_elsewhere=writes_elsewhere)
    producer.start()
    for partition_id in bench.partition_ids:
        producer.send(partition_id, b"a", b"b")
    producer.send(bench.partition_ids[0], b"c")
    groups = [f"{bench.prefix}-{number}" for number in range(2)]
    for group in groups:
        producer.send_offsets(group, {bench.partition_ids[0]: 5})
        producer.send_offsets(group, {bench.partition_ids[1]: 6})
    assert [bench.read(partition_id) for partition_id in bench.partition_ids] == [[], []]
    producer.end(commit=commit)
    values = [[b"a", b"b", b"c"], [b"a", b"b"]]
    assert [bench.read(partition_id) for partition_id in bench.partition_ids] == (values if commit else [[], []])
    assert [bench.read(partition_id, IsolationLevel.READ_UNCOMMITTED) for partition_id in bench.partition_ids] == values
    for group in groups:
        committed = bench.offsets(group)
        offsets = {number: offset.offset for number, offset in committed.offsets.items()}
        assert offsets == ({bench.partition_ids[0]: 5, bench.partition_ids[1]: 6} if commit else {})
        assert committed.unstable == frozenset()
    assert bench.row(producer.transactional_id).state is (S.COMPLETE_COMMIT if commit else S.COMPLETE_ABORT)


@WAYS
def test_records_and_offsets_that_come_with_the_commit_are_committed_with_what_came_before(
    bench, offsets_of: Callable, writes_elsewhere: bool
) -> None:
    producer = bench.producer(writes_elsewhere=writes_elsewhere)
    producer.start()
    first, second = bench.partition_ids
    group = f"readers-{bench.prefix}"
    producer.send(first, b"a")
    producer.send_offsets(group, {first: 1, second: 1})
    rest = [producer.batch(first, b"b"), producer.batch(second, b"c"), producer.batch(second, b"d")]
    ended = producer.commit(
        appends=rest, offsets=[offsets_of(group, {second: 2}), offsets_of(group + "-2", {first: 9})]
    )
    assert [(place.partition_id, place.base_offset) for place in ended.appended] == [
        (first, 1),
        (second, 0),
        (second, 1),
    ]
    assert [bench.read(first), bench.read(second)] == [[b"a", b"b"], [b"c", b"d"]]
    assert {number: offset.offset for number, offset in bench.offsets(group).offsets.items()} == {first: 1, second: 2}
    assert {number: offset.offset for number, offset in bench.offsets(group + "-2").offsets.items()} == {first: 9}
    assert ended.identity.epoch == 1


@WAYS
def test_a_commit_with_its_records_that_is_repeated_is_done_once_and_answered_alike(
    bench, offsets_of: Callable, writes_elsewhere: bool
) -> None:
    producer = bench.producer(writes_elsewhere=writes_elsewhere)
    producer.start()
    identity = producer.identity
    first, second = bench.partition_ids
    rest = {
        "appends": [producer.batch(first, b"a", b"b"), producer.batch(second, b"c")],
        "offsets": [offsets_of(f"readers-{bench.prefix}", {first: 4})],
    }
    answers = []
    for _ in range(3):
        producer.become(identity)
        answers.append(producer.commit(**rest))
    assert {answer.identity for answer in answers} == {ProducerIdentity(identity.producer_id, 1)}
    assert [[(place.base_offset, place.last_offset) for place in answer.appended] for answer in answers] == [
        [(0, 1), (0, 0)]
    ] * 3
    assert [[place.is_duplicate for place in answer.appended] for answer in answers] == [
        [False, False],
        [True, True],
        [True, True],
    ]
    assert [bench.read(first), bench.read(second)] == [[b"a", b"b"], [b"c"]]
    assert bench.bounds(first).high_watermark == 3


def test_a_commit_with_its_records_whose_process_died_after_the_decision_is_completed_by_its_repetition(
    bench, offsets_of: Callable
) -> None:
    producer = bench.started(writes_elsewhere=True)
    identity = producer.identity
    append = producer.batch(bench.partition_ids[0], b"a")
    producer.coordinator.append(producer.transactional_id, identity, [append])
    producer.decide(commit=True)
    ended = producer.commit(appends=[append])
    assert (ended.identity.epoch, ended.appended[0].base_offset, ended.appended[0].is_duplicate) == (1, 0, True)
    assert bench.read(bench.partition_ids[0]) == [b"a"]
    assert bench.bounds(bench.partition_ids[0]).high_watermark == 2


def test_records_do_not_come_with_an_abort(bench, offsets_of: Callable) -> None:
    producer = bench.started()
    producer.send(bench.partition_ids[0], b"a")
    for rest in (
        {"appends": [producer.batch(bench.partition_ids[0], b"b")]},
        {"offsets": [offsets_of("readers", {bench.partition_ids[0]: 1})]},
    ):
        with pytest.raises(InvalidRequest):
            producer.end(commit=False, **rest)
    assert bench.row(producer.transactional_id).state is S.ONGOING


def test_if_the_last_records_are_refused_the_transaction_stays_open(bench) -> None:
    producer = bench.started()
    producer.send(bench.partition_ids[0], b"a")
    good, bad = producer.batch(bench.partition_ids[1], b"b"), producer.batch(10**12, b"c")
    with pytest.raises(TxnStoreError):
        producer.commit(appends=[good, bad])
    assert bench.row(producer.transactional_id).state is S.ONGOING
    assert bench.bounds(bench.partition_ids[1]).high_watermark == 0
    producer.abort()
    assert bench.read(bench.partition_ids[0]) == []


@WAYS
def test_the_journal_keeps_every_state_change(bench, writes_elsewhere: bool) -> None:
    producer = bench.producer(writes_elsewhere=writes_elsewhere)
    producer.start()
    producer.send(bench.partition_ids[0], b"a")
    producer.commit()
    producer.abort()
    producer.send(bench.partition_ids[0], b"b")
    producer.abort()
    assert bench.journal(producer.transactional_id) == [
        (S.EMPTY, 0),
        (S.ONGOING, 0),
        (S.PREPARE_COMMIT, 1),
        (S.COMPLETE_COMMIT, 1),
        (S.PREPARE_ABORT, 2),
        (S.COMPLETE_ABORT, 2),
        (S.ONGOING, 2),
        (S.PREPARE_ABORT, 3),
        (S.COMPLETE_ABORT, 3),
    ]


def test_transactions_of_many_ids_do_not_touch_each_other(bench) -> None:
    producers = [bench.started() for _ in range(4)]
    partition_id = bench.partition_ids[0]
    for number, producer in enumerate(producers):
        producer.send(partition_id, b"%d" % number)
    assert bench.bounds(partition_id).last_stable_offset == 0
    producers[1].commit()
    producers[2].abort()
    assert bench.read(partition_id) == []
    producers[0].commit()
    assert bench.read(partition_id) == [b"0", b"1"]
    assert bench.bounds(partition_id).last_stable_offset == 3
    producers[3].commit()
    assert bench.read(partition_id) == [b"0", b"1", b"3"]


@pytest.mark.parametrize("changed", [{"producer_epoch": 7}, {"state": S.COMPLETE_ABORT}], ids=["epoch", "state"])
def test_a_row_that_is_not_as_it_was_read_is_not_written_over(bench, changed) -> None:
    producer = bench.started()
    row = bench.row(producer.transactional_id)
    read = replace(row, **changed)
    step = fence_at_rest(read, now_ms=row.last_update_ms, allocate=lambda: 8)
    with pytest.raises(RowsMissedError):
        bench.store.write(lambda connection: save_row(connection, [step], before=read, reason="test"))
    assert bench.row(producer.transactional_id) == row


@pytest.mark.parametrize("begins", [False, True], ids=["begun before", "begun with them"])
def test_offsets_remember_the_epoch_of_their_transaction(bench, offsets_of: Callable, begins: bool) -> None:
    producer = bench.started()
    began = producer.identity
    if not begins:
        producer.send(bench.partition_ids[0], b"a")
    producer.commit(offsets=[offsets_of(bench.prefix, {bench.partition_ids[1]: 1})])
    of_group = group_offsets.c.group_id == bench.prefix
    statement = select(group_offsets.c.producer_id, group_offsets.c.producer_epoch).where(of_group)
    assert bench.store.read(lambda connection: connection.execute(statement).one()) == (began.producer_id, began.epoch)

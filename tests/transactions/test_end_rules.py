"""EndTxn, the pure rules: six states by four columns, and the rules of epochs around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from txnstore.errors import (
    ConcurrentTransactions,
    InvalidProducerIdMapping,
    InvalidTransactionState,
    ProducerFenced,
    TransactionAbortable,
    TxnStoreError,
)
from txnstore.model import ProducerIdentity
from txnstore.transactions.protocol import (
    END_TRANSACTION,
    STORED,
    EndAction,
    FenceReason,
    TransactionMetadata,
    TransactionState,
    complete,
    end_transaction,
    fence_and_abort,
)

S = TransactionState
NewRow = Callable[..., TransactionMetadata]

NOW_MS = 50_000
COLUMNS = ["Abort, retry", "Abort, current", "Commit, retry", "Commit, current"]
#: Kafka's table, written down a second time. A name in capitals is an error. In PrepareAbort Kafka would answer a late
#: commit INVALID_TXN_STATE, but lets it wait until CompleteAbort before it comes to that.
KAFKA = {
    "Empty": ["PRODUCER_FENCED", "abort empty", "PRODUCER_FENCED", "INVALID_TXN_STATE"],
    "Ongoing": ["PRODUCER_FENCED", "PrepareAbort", "PRODUCER_FENCED", "PrepareCommit"],
    "PrepareAbort": ["CONCURRENT_TRANSACTIONS", "PRODUCER_FENCED", "PRODUCER_FENCED", "PRODUCER_FENCED"],
    "PrepareCommit": ["INVALID_TXN_STATE", "PRODUCER_FENCED", "CONCURRENT_TRANSACTIONS", "PRODUCER_FENCED"],
    "CompleteAbort": ["NONE", "abort empty", "PRODUCER_FENCED", "INVALID_TXN_STATE"],
    "CompleteCommit": ["INVALID_TXN_STATE", "abort empty", "NONE", "INVALID_TXN_STATE"],
}
ERRORS: dict[str, type[TxnStoreError]] = {
    error.kafka_name: error
    for error in (ProducerFenced, InvalidTransactionState, ConcurrentTransactions)
    if error.kafka_name is not None
}
CELLS = [
    pytest.param(state, column, answer, id=f"{state} / {column}")
    for state, answers in KAFKA.items()
    for column, answer in zip(COLUMNS, answers, strict=True)
]
BY_NAME = {state.kafka_name: state for state in S}


def end(
    row: TransactionMetadata | None, producer: ProducerIdentity, *, commit: bool
) -> tuple[EndAction, TransactionMetadata]:
    return end_transaction(row, producer, commit=commit, now_ms=NOW_MS, allocate=lambda: 8)


def check_decided(before: TransactionMetadata, after: TransactionMetadata, state: TransactionState) -> None:
    is_open = before.state is S.ONGOING
    assert after == replace(
        before,
        state=state,
        producer_epoch=6,
        last_producer_epoch=5,
        start_ms=before.start_ms if is_open else NOW_MS,
        begin_epoch=5 if is_open else -1,
        last_update_ms=NOW_MS,
    )


@pytest.mark.parametrize(("state", "column", "answer"), CELLS)
def test_a_cell_of_kafkas_table(new_row: NewRow, state: str, column: str, answer: str) -> None:
    row = new_row(BY_NAME[state])
    commit = column.startswith("Commit")
    producer = ProducerIdentity(7, 5 if column.endswith("current") else 4)
    if answer in ERRORS:
        with pytest.raises(ERRORS[answer]) as raised:
            end(row, producer, commit=commit)
        assert type(raised.value) is ERRORS[answer]
        return
    action, after = end(row, producer, commit=commit)
    if answer == "NONE":
        assert action is EndAction.ANSWER
        assert after is row
    elif answer == "abort empty":
        assert action is EndAction.ABORT_EMPTY
        check_decided(row, after, S.PREPARE_ABORT)
    else:
        assert action is EndAction.DECIDE
        check_decided(row, after, BY_NAME[answer])


def test_the_table_has_every_stored_state_and_no_other() -> None:
    assert set(END_TRANSACTION) == STORED == {BY_NAME[name] for name in KAFKA}


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
@pytest.mark.parametrize("state", sorted(STORED), ids=lambda state: state.kafka_name)
@pytest.mark.parametrize("epoch", [6, 7, 32767, 3, 0, -1])
def test_any_other_epoch_is_fenced(new_row: NewRow, state: TransactionState, epoch: int, commit: bool) -> None:
    """KAFKA-9600: also one that is higher than the coordinator's own."""
    with pytest.raises(ProducerFenced):
        end(new_row(state), ProducerIdentity(7, epoch), commit=commit)


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
@pytest.mark.parametrize("state", sorted(STORED), ids=lambda state: state.kafka_name)
def test_another_producer_id_is_refused_whatever_its_epoch(
    new_row: NewRow, state: TransactionState, commit: bool
) -> None:
    for epoch in (5, 4, 32766):
        with pytest.raises(InvalidProducerIdMapping):
            end(new_row(state, previous_producer_id=6), ProducerIdentity(9, epoch), commit=commit)
    # One that was replaced repeats its last end until its successor has ended something.
    with pytest.raises(InvalidProducerIdMapping):
        end(new_row(state, producer_id=8, previous_producer_id=7), ProducerIdentity(7, 32766), commit=commit)


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_an_id_without_metadata_is_refused(commit: bool) -> None:
    with pytest.raises(InvalidProducerIdMapping):
        end(None, ProducerIdentity(7, 5), commit=commit)


@pytest.mark.parametrize("state", [S.DEAD, S.PREPARE_EPOCH_FENCE], ids=lambda state: state.kafka_name)
def test_a_row_in_a_state_that_is_never_stored_is_a_defect(new_row: NewRow, state: TransactionState) -> None:
    with pytest.raises(AssertionError):
        end(new_row(state), ProducerIdentity(7, 5), commit=True)


ROTATED: dict[str, Any] = {"producer_id": 8, "producer_epoch": 0, "previous_producer_id": 7}


@pytest.mark.parametrize(
    ("state", "commit", "answered"),
    [
        pytest.param(S.COMPLETE_COMMIT, True, True, id="commit of a commit"),
        pytest.param(S.COMPLETE_ABORT, False, True, id="abort of an abort"),
        pytest.param(S.COMPLETE_COMMIT, False, False, id="abort of a commit"),
        pytest.param(S.COMPLETE_ABORT, True, False, id="commit of an abort"),
    ],
)
def test_a_repetition_is_known_after_the_producer_id_was_replaced(
    new_row: NewRow, state: TransactionState, commit: bool, answered: bool
) -> None:
    row = new_row(state, **ROTATED)
    if answered:
        assert end(row, ProducerIdentity(7, 32766), commit=commit) == (EndAction.ANSWER, row)
    else:
        with pytest.raises((InvalidTransactionState, ProducerFenced)):
            end(row, ProducerIdentity(7, 32766), commit=commit)


@pytest.mark.parametrize("state", [S.EMPTY, S.ONGOING], ids=lambda state: state.kafka_name)
def test_after_the_producer_id_was_replaced_the_old_one_ends_nothing_that_is_new(
    new_row: NewRow, state: TransactionState
) -> None:
    row = new_row(state, **ROTATED)
    for commit in (True, False):
        with pytest.raises(ProducerFenced):
            end(row, ProducerIdentity(7, 32766), commit=commit)


@pytest.mark.parametrize(
    ("epoch", "next_epoch", "next_producer_id"),
    [
        pytest.param(32765, 32766, -1, id="32765"),
        pytest.param(32766, 32767, 8, id="32766"),
        pytest.param(32767, 32768, 8, id="32767, of a producer that took over a prepared transaction"),
        pytest.param(32768, 32769, 8, id="32768, of the next one that took it over"),
        pytest.param(40_000, 40_001, 8, id="40000, of the last of many"),
    ],
)
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_at_the_last_epochs_the_next_producer_id_is_given_out(
    new_row: NewRow, epoch: int, next_epoch: int, next_producer_id: int, commit: bool
) -> None:
    row = new_row(S.ONGOING, producer_epoch=epoch, begin_epoch=min(epoch, 32766))
    _, decided = end(row, ProducerIdentity(7, epoch), commit=commit)
    assert (decided.identity, decided.next_producer_id) == (ProducerIdentity(7, next_epoch), next_producer_id)
    done = complete(decided, now_ms=NOW_MS + 1)
    if next_producer_id == -1:
        assert (done.identity, done.previous_producer_id) == (decided.identity, -1)
    else:
        assert (done.identity, done.previous_producer_id) == (ProducerIdentity(8, 0), 7)
    assert (done.next_producer_id, done.begin_epoch, done.last_update_ms) == (-1, -1, NOW_MS + 1)
    assert end(done, ProducerIdentity(7, epoch), commit=commit)[0] is EndAction.ANSWER
    for zombie in {ProducerIdentity(7, 32765), ProducerIdentity(7, 32766), ProducerIdentity(7, epoch - 1)}:
        for known in (row, decided, done):
            if zombie.epoch < epoch:
                with pytest.raises((ProducerFenced, InvalidProducerIdMapping)):
                    end(known, zombie, commit=commit)


@pytest.mark.parametrize("reason", [FenceReason.TIMEOUT, FenceReason.ADMIN])
def test_a_producer_whose_transaction_was_aborted_from_outside_is_told_and_reclaims_its_epoch_by_an_abort(
    new_row: NewRow, reason: FenceReason
) -> None:
    decided = fence_and_abort(new_row(S.ONGOING), reason, "it was slow", now_ms=NOW_MS, allocate=lambda: 8)
    row = complete(decided, now_ms=NOW_MS)
    old = ProducerIdentity(7, 5)
    for known in (decided, row):
        with pytest.raises(TransactionAbortable, match="it was slow"):
            end(known, old, commit=True)
    with pytest.raises(ConcurrentTransactions):
        end(decided, old, commit=False)
    assert end(row, old, commit=False) == (EndAction.ANSWER, row)
    assert row.identity == ProducerIdentity(7, 6)


def test_a_producer_whose_transaction_was_aborted_by_a_newer_one_is_fenced(new_row: NewRow) -> None:
    decided = fence_and_abort(new_row(S.ONGOING), FenceReason.INIT, "replaced", now_ms=NOW_MS, allocate=lambda: 8)
    for known in (decided, complete(decided, now_ms=NOW_MS)):
        with pytest.raises(ProducerFenced, match="replaced"):
            end(known, ProducerIdentity(7, 5), commit=True)


def test_the_reason_of_an_abort_from_outside_ends_with_the_next_end(new_row: NewRow) -> None:
    row = new_row(S.COMPLETE_ABORT, fence_reason=FenceReason.TIMEOUT, fence_detail="it was slow")
    action, after = end(row, ProducerIdentity(7, 5), commit=False)
    assert action is EndAction.ABORT_EMPTY
    assert (after.fence_reason, after.fence_detail) == (None, None)


@pytest.mark.parametrize("state", sorted(set(S) - {S.ONGOING}), ids=lambda state: state.kafka_name)
def test_only_an_open_transaction_is_aborted_from_outside(new_row: NewRow, state: TransactionState) -> None:
    with pytest.raises(AssertionError):
        fence_and_abort(new_row(state), FenceReason.TIMEOUT, "", now_ms=NOW_MS, allocate=lambda: 8)


@pytest.mark.parametrize("state", sorted(STORED - {S.PREPARE_ABORT, S.PREPARE_COMMIT}), ids=lambda s: s.kafka_name)
def test_only_a_decided_transaction_is_completed(new_row: NewRow, state: TransactionState) -> None:
    with pytest.raises(AssertionError):
        complete(new_row(state), now_ms=NOW_MS)

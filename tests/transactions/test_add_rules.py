"""AddPartitionsToTxn and AddOffsetsToTxn, the pure rules: each row of Kafka's table."""

from __future__ import annotations

import re
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
    AT_REST,
    FenceReason,
    TransactionMetadata,
    TransactionState,
    add_to_transaction,
    check_open,
)

S = TransactionState
NewRow = Callable[..., TransactionMetadata]

NOW_MS = 50_000
CURRENT = ProducerIdentity(7, 5)


def add(row: TransactionMetadata | None, producer: ProducerIdentity = CURRENT, *, holds_all: bool) -> Any:
    return add_to_transaction(row, producer, now_ms=NOW_MS, holds_all=holds_all)


#: State, changes of the row, who asks, what it is told. None as state: there is no row.
REFUSED: dict[str, tuple[TransactionState | None, dict[str, Any], ProducerIdentity, type[TxnStoreError]]] = {
    "no metadata": (None, {}, CURRENT, InvalidProducerIdMapping),
    "Empty, another producer id": (S.EMPTY, {}, ProducerIdentity(9, 5), InvalidProducerIdMapping),
    "Ongoing, another producer id": (S.ONGOING, {}, ProducerIdentity(9, 5), InvalidProducerIdMapping),
    "PrepareCommit, another producer id": (S.PREPARE_COMMIT, {}, ProducerIdentity(9, 5), InvalidProducerIdMapping),
    "Empty, the producer id before": (
        S.EMPTY,
        {"producer_epoch": 0, "previous_producer_id": 6},
        ProducerIdentity(6, 32766),
        InvalidProducerIdMapping,
    ),
    "Empty, older epoch": (S.EMPTY, {}, ProducerIdentity(7, 4), ProducerFenced),
    "Empty, higher epoch": (S.EMPTY, {}, ProducerIdentity(7, 6), ProducerFenced),
    "Ongoing, older epoch": (S.ONGOING, {}, ProducerIdentity(7, 4), ProducerFenced),
    "Ongoing, higher epoch": (S.ONGOING, {}, ProducerIdentity(7, 6), ProducerFenced),
    "PrepareCommit, older epoch": (S.PREPARE_COMMIT, {}, ProducerIdentity(7, 4), ProducerFenced),
    "CompleteCommit, older epoch": (S.COMPLETE_COMMIT, {}, ProducerIdentity(7, 4), ProducerFenced),
    "CompleteAbort, older epoch": (S.COMPLETE_ABORT, {}, ProducerIdentity(7, 4), ProducerFenced),
    "CompleteCommit, another producer id": (S.COMPLETE_COMMIT, {}, ProducerIdentity(9, 5), InvalidProducerIdMapping),
    "PrepareCommit, higher epoch": (S.PREPARE_COMMIT, {}, ProducerIdentity(7, 6), ProducerFenced),
    "CompleteCommit, higher epoch": (S.COMPLETE_COMMIT, {}, ProducerIdentity(7, 6), ProducerFenced),
    "CompleteAbort, higher epoch": (S.COMPLETE_ABORT, {}, ProducerIdentity(7, 6), ProducerFenced),
    "PrepareCommit": (S.PREPARE_COMMIT, {}, CURRENT, ConcurrentTransactions),
    "PrepareAbort": (S.PREPARE_ABORT, {}, CURRENT, ConcurrentTransactions),
    "CompleteAbort for its age, older epoch": (
        S.COMPLETE_ABORT,
        {"fence_reason": FenceReason.TIMEOUT, "fence_detail": "it was open for 70000 ms"},
        ProducerIdentity(7, 4),
        TransactionAbortable,
    ),
    "CompleteAbort by an administrator, older epoch": (
        S.COMPLETE_ABORT,
        {"fence_reason": FenceReason.ADMIN},
        ProducerIdentity(7, 4),
        TransactionAbortable,
    ),
    "CompleteAbort for its age, much older epoch": (
        S.COMPLETE_ABORT,
        {"fence_reason": FenceReason.TIMEOUT},
        ProducerIdentity(7, 3),
        ProducerFenced,
    ),
    "CompleteAbort for its age at the last epoch": (
        S.COMPLETE_ABORT,
        {"fence_reason": FenceReason.TIMEOUT, "producer_epoch": 0, "previous_producer_id": 6},
        ProducerIdentity(6, 32766),
        TransactionAbortable,
    ),
}


@pytest.mark.parametrize("holds_all", [True, False], ids=["contained", "missing"])
@pytest.mark.parametrize(("state", "changes", "producer", "error"), REFUSED.values(), ids=REFUSED)
def test_who_may_not_write_is_told_why(
    new_row: NewRow,
    holds_all: bool,
    state: TransactionState | None,
    changes: dict[str, Any],
    producer: ProducerIdentity,
    error: type[TxnStoreError],
) -> None:
    row = None if state is None else new_row(state, **changes)
    with pytest.raises(error) as raised:
        add(row, producer, holds_all=holds_all)
    assert type(raised.value) is error


@pytest.mark.parametrize(
    ("now", "asks", "told"),
    [
        (5, 4, "it is 7:5 now (by an administrator)"),
        (5, 6, "this database knows only producer 7:5: was an older state restored"),
        # Who has taken over a prepared transaction has any epoch.
        (40_000, 5, "it is 7:40000 now"),
        (5, 40_000, "it is 7:5 now"),
    ],
)
def test_a_producer_that_the_store_has_forgotten_is_told_apart_from_one_that_was_replaced(
    new_row: NewRow, now: int, asks: int, told: str
) -> None:
    row = new_row(S.ONGOING, producer_epoch=now, fence_detail="by an administrator")
    with pytest.raises(ProducerFenced, match=re.escape(told)):
        add(row, ProducerIdentity(7, asks), holds_all=True)


def test_the_reason_of_a_timeout_is_told(new_row: NewRow) -> None:
    row = new_row(S.COMPLETE_ABORT, fence_reason=FenceReason.TIMEOUT, fence_detail="it was open for 70000 ms")
    with pytest.raises(
        TransactionAbortable, match="'payments' was aborted: it was open for 70000 ms; abort it here too"
    ):
        add(row, ProducerIdentity(7, 4), holds_all=False)


@pytest.mark.parametrize("holds_all", [True, False], ids=["contained", "missing"])
@pytest.mark.parametrize("state", sorted(AT_REST), ids=lambda state: state.kafka_name)
def test_at_rest_a_transaction_begins(new_row: NewRow, state: TransactionState, holds_all: bool) -> None:
    before = new_row(state, last_producer_epoch=4, fence_reason=FenceReason.TIMEOUT, fence_detail="it was slow")
    after = add(before, holds_all=holds_all)
    assert after == replace(
        before,
        state=S.ONGOING,
        start_ms=NOW_MS,
        last_update_ms=NOW_MS,
        transaction_number=before.transaction_number + 1,
        begin_epoch=5,
        fence_reason=None,
        fence_detail=None,
    )


def test_ongoing_with_all_of_them_nothing_is_written(new_row: NewRow) -> None:
    row = new_row(S.ONGOING)
    assert add(row, holds_all=True) is row


def test_ongoing_with_some_missing_the_update_is_noted_and_the_start_stays(new_row: NewRow) -> None:
    row = new_row(S.ONGOING)
    assert add(row, holds_all=False) == replace(row, last_update_ms=NOW_MS)


def test_a_transaction_that_was_prepared_before_takes_no_more_records(new_row: NewRow) -> None:
    """Its records have an epoch of their own: others would never be seen, or hide them."""
    with pytest.raises(InvalidTransactionState):
        add(new_row(S.ONGOING, begin_epoch=4), holds_all=False)


def test_nor_do_the_writers_that_had_joined_it(new_row: NewRow) -> None:
    check_open(new_row(S.ONGOING), "payments", CURRENT, now_ms=NOW_MS)
    with pytest.raises(ProducerFenced):
        check_open(new_row(S.ONGOING, producer_epoch=6), "payments", CURRENT, now_ms=NOW_MS)


@pytest.mark.parametrize("state", [S.DEAD, S.PREPARE_EPOCH_FENCE], ids=lambda state: state.kafka_name)
def test_a_row_in_a_state_that_is_never_stored_is_a_defect(new_row: NewRow, state: TransactionState) -> None:
    with pytest.raises(AssertionError):
        add(new_row(state), holds_all=False)

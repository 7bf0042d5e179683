"""InitProducerId, the pure rules: each row of Kafka's table, in its order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from txnstore.errors import (
    ConcurrentTransactions,
    InvalidRequest,
    InvalidTransactionTimeout,
    ProducerFenced,
    TransactionalIdAuthorizationFailed,
    TxnStoreError,
)
from txnstore.model import ProducerIdentity
from txnstore.transactions.initialization import (
    InitAction,
    InitRequest,
    check_init_request,
    init_after_abort,
    init_producer_id,
    new_transactional_id,
)
from txnstore.transactions.protocol import (
    AT_REST,
    DECIDED,
    TIMEOUT_NEVER_MS,
    FenceReason,
    TransactionMetadata,
    TransactionState,
    check_change,
    complete,
    fence_and_abort,
    fence_at_rest,
)

S = TransactionState
NewRow = Callable[..., TransactionMetadata]

NOW_MS = 50_000
REQUEST = InitRequest("payments", 30_000, 900_000)
AT_REST_STATES = [pytest.param(state, id=state.kafka_name) for state in sorted(AT_REST)]
DECIDED_STATES = [pytest.param(state, id=state.kafka_name) for state in sorted(DECIDED)]


def init(
    row: TransactionMetadata, expected: tuple[int, int] | None = None, **changes: Any
) -> tuple[InitAction, TransactionMetadata]:
    request = replace(REQUEST, expected=None if expected is None else ProducerIdentity(*expected), **changes)
    return init_producer_id(row, request, now_ms=NOW_MS, allocate=lambda: 8)


REFUSED: dict[str, tuple[dict[str, Any], type[TxnStoreError]]] = {
    "an empty transactional id": ({"transactional_id": ""}, InvalidRequest),
    "a transactional id that is not text": ({"transactional_id": 7}, InvalidRequest),
    "an expected epoch without its producer id": ({"expected": ProducerIdentity(-1, 5)}, InvalidRequest),
    "an expected producer id without its epoch": ({"expected": ProducerIdentity(7, -1)}, InvalidRequest),
    "a timeout of 0": ({"timeout_ms": 0}, InvalidTransactionTimeout),
    "a negative timeout": ({"timeout_ms": -1}, InvalidTransactionTimeout),
    "a timeout above the maximum": ({"timeout_ms": 900_001}, InvalidTransactionTimeout),
    "a timeout that is not a whole number": ({"timeout_ms": 0.5}, InvalidTransactionTimeout),
    "a timeout that is a flag": ({"timeout_ms": True}, InvalidTransactionTimeout),
    "a timeout that is text": ({"timeout_ms": "60000"}, InvalidTransactionTimeout),
    "the timeout of two-phase commit without asking for it": (
        {"timeout_ms": TIMEOUT_NEVER_MS},
        InvalidTransactionTimeout,
    ),
    "keep_prepared without two-phase commit": ({"keep_prepared": True}, InvalidRequest),
    "two-phase commit where the store does not allow it": (
        {"enable_two_phase_commit": True},
        TransactionalIdAuthorizationFailed,
    ),
}


@pytest.mark.parametrize(("changes", "error"), REFUSED.values(), ids=REFUSED)
def test_a_request_that_is_wrong_in_itself_is_refused(changes: dict[str, Any], error: type[TxnStoreError]) -> None:
    with pytest.raises(error):
        check_init_request(replace(REQUEST, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"timeout_ms": 1}, id="the shortest timeout"),
        pytest.param({"timeout_ms": 900_000}, id="the longest timeout"),
        pytest.param(
            {"timeout_ms": 0, "enable_two_phase_commit": True, "two_phase_commit_allowed": True},
            id="two-phase commit, whose timeout is not looked at",
        ),
        pytest.param(
            {"enable_two_phase_commit": True, "two_phase_commit_allowed": True, "keep_prepared": True},
            id="keep_prepared",
        ),
    ],
)
def test_a_request_that_is_right_in_itself_passes(changes: dict[str, Any]) -> None:
    check_init_request(replace(REQUEST, **changes))


def test_an_id_that_nobody_used_is_empty_at_epoch_minus_one_and_gets_epoch_0() -> None:
    fresh = new_transactional_id(REQUEST, 7, NOW_MS)
    assert (fresh.state, fresh.identity, fresh.timeout_ms) == (S.EMPTY, ProducerIdentity(7, -1), 30_000)
    action, row = init(fresh)
    assert action is InitAction.SAVE
    assert (row.identity, row.last_producer_epoch) == (ProducerIdentity(7, 0), -1)


@pytest.mark.parametrize("state", sorted(set(S) - {S.DEAD, S.PREPARE_EPOCH_FENCE}), ids=lambda state: state.kafka_name)
@pytest.mark.parametrize(
    "expected",
    [
        pytest.param((9, 5), id="another producer id"),
        pytest.param((6, 32765), id="the producer id before, which was not exhausted"),
        pytest.param((-1, 32766), id="no producer"),
    ],
)
def test_an_expected_producer_id_that_is_not_the_rows_is_fenced(
    new_row: NewRow, state: TransactionState, expected: tuple[int, int]
) -> None:
    with pytest.raises(ProducerFenced):
        init(new_row(state, previous_producer_id=6), expected)


@pytest.mark.parametrize("state", AT_REST_STATES)
def test_whatever_is_expected_of_an_id_without_an_epoch_is_given_epoch_0(
    new_row: NewRow, state: TransactionState
) -> None:
    action, row = init(new_row(state, producer_epoch=-1), (9, 3))
    assert (action, row.identity, row.last_producer_epoch) == (InitAction.SAVE, ProducerIdentity(7, 0), -1)


@pytest.mark.parametrize("state", DECIDED_STATES)
@pytest.mark.parametrize("expected", [None, (7, 5), (7, 4), (7, 1)], ids=str)
def test_a_decided_transaction_has_to_be_completed_first(
    new_row: NewRow, state: TransactionState, expected: tuple[int, int] | None
) -> None:
    with pytest.raises(ConcurrentTransactions):
        init(new_row(state), expected)


@pytest.mark.parametrize("state", AT_REST_STATES)
@pytest.mark.parametrize("epoch", [32766, 32767])
@pytest.mark.parametrize(("is_expected", "last_epoch"), [(False, -1), (True, None)], ids=["nobody", "itself"])
def test_at_rest_with_an_exhausted_epoch_a_new_producer_id_begins_at_0(
    new_row: NewRow, state: TransactionState, epoch: int, is_expected: bool, last_epoch: int | None
) -> None:
    action, row = init(new_row(state, producer_epoch=epoch), (7, epoch) if is_expected else None)
    assert (action, row.state) == (InitAction.SAVE, S.EMPTY)
    assert (row.identity, row.previous_producer_id) == (ProducerIdentity(8, 0), 7)
    assert row.last_producer_epoch == (epoch if last_epoch is None else last_epoch)


@pytest.mark.parametrize("state", AT_REST_STATES)
def test_at_rest_with_an_exhausted_epoch_another_expected_epoch_is_fenced(
    new_row: NewRow, state: TransactionState
) -> None:
    with pytest.raises(ProducerFenced):
        init(new_row(state, producer_epoch=32766), (7, 32765))


@pytest.mark.parametrize("state", AT_REST_STATES)
def test_who_had_the_last_epoch_of_the_producer_id_before_is_fenced_at_the_last_epoch_of_this_one(
    new_row: NewRow, state: TransactionState
) -> None:
    row = new_row(state, producer_epoch=32766, previous_producer_id=6, last_producer_epoch=32765)
    with pytest.raises(ProducerFenced):
        init(row, (6, 32766))


@pytest.mark.parametrize("state", AT_REST_STATES)
def test_at_rest_the_epoch_goes_up_and_everything_of_the_last_transaction_is_cleared(
    new_row: NewRow, state: TransactionState
) -> None:
    before = new_row(state, last_producer_epoch=4, fence_reason=FenceReason.TIMEOUT, fence_detail="it was slow")
    action, row = init(before)
    assert action is InitAction.SAVE
    assert row == new_row(
        S.EMPTY,
        producer_epoch=6,
        timeout_ms=30_000,
        last_producer_epoch=-1,
        last_update_ms=NOW_MS,
        transaction_number=before.transaction_number,
    )


@pytest.mark.parametrize("state", AT_REST_STATES)
def test_at_rest_the_expected_epoch_goes_up_and_is_remembered(new_row: NewRow, state: TransactionState) -> None:
    action, row = init(new_row(state), (7, 5))
    assert action is InitAction.SAVE
    assert (row.identity, row.last_producer_epoch, row.state) == (ProducerIdentity(7, 6), 5, S.EMPTY)


@pytest.mark.parametrize("state", AT_REST_STATES)
def test_at_rest_the_epoch_before_is_a_repetition_and_is_answered_without_a_bump(
    new_row: NewRow, state: TransactionState
) -> None:
    before = new_row(state, last_producer_epoch=4)
    assert init(before, (7, 4)) == (InitAction.ANSWER, before)


def test_a_repetition_is_known_by_the_producer_id_before_as_well(new_row: NewRow) -> None:
    before = new_row(S.EMPTY, producer_epoch=0, previous_producer_id=6, last_producer_epoch=32766)
    assert init(before, (6, 32766)) == (InitAction.ANSWER, before)


@pytest.mark.parametrize("epoch", [5, 32766, 32767, 40_000])
def test_whom_an_abort_from_outside_has_fenced_gets_no_epoch_for_its_old_one(new_row: NewRow, epoch: int) -> None:
    """Kafka's rule, at the last epochs as well, where the row tells by its epoch who is to hear of the abort."""
    before = new_row(S.ONGOING, producer_epoch=epoch)
    aborted = fence_and_abort(before, FenceReason.ADMIN, "by an administrator", now_ms=NOW_MS, allocate=lambda: 8)
    with pytest.raises(ProducerFenced):
        init(complete(aborted, now_ms=NOW_MS), (7, epoch))


@pytest.mark.parametrize("state", AT_REST_STATES)
@pytest.mark.parametrize(
    ("epoch", "last_epoch"),
    [
        pytest.param(4, -1, id="the epoch before, which somebody else raised"),
        pytest.param(3, 4, id="older than the one before"),
        pytest.param(6, 4, id="higher"),
    ],
)
def test_at_rest_any_other_expected_epoch_is_fenced(
    new_row: NewRow, state: TransactionState, epoch: int, last_epoch: int
) -> None:
    with pytest.raises(ProducerFenced):
        init(new_row(state, last_producer_epoch=last_epoch), (7, epoch))


@pytest.mark.parametrize("expected", [None, (7, 5)], ids=["nobody", "itself"])
def test_an_open_transaction_is_fenced_and_aborted_with_one_bump(
    new_row: NewRow, expected: tuple[int, int] | None
) -> None:
    before = new_row(S.ONGOING)
    action, row = init(before, expected)
    assert action is InitAction.ABORT_FIRST
    assert (row.state, row.identity, row.begin_epoch) == (S.PREPARE_ABORT, ProducerIdentity(7, 6), 5)
    assert (row.last_producer_epoch, row.fence_reason) == (-1, FenceReason.INIT)

    request = replace(REQUEST, expected=None if expected is None else ProducerIdentity(*expected))
    started = init_after_abort(before, complete(row, now_ms=NOW_MS), request, allocate=lambda: 8)
    assert (started.state, started.identity, started.timeout_ms) == (S.EMPTY, ProducerIdentity(7, 6), 30_000)
    assert started.last_producer_epoch == (-1 if expected is None else 5)
    assert (started.start_ms, started.begin_epoch, started.fence_reason) == (-1, -1, None)


def test_an_open_transaction_at_the_last_epoch_is_aborted_and_the_producer_id_replaced(new_row: NewRow) -> None:
    before = new_row(S.ONGOING, producer_epoch=32766, begin_epoch=32766)
    action, row = init(before)
    assert (action, row.producer_epoch, row.next_producer_id) == (InitAction.ABORT_FIRST, 32767, 8)
    started = init_after_abort(before, complete(row, now_ms=NOW_MS), REQUEST, allocate=lambda: 9)
    assert (started.identity, started.previous_producer_id) == (ProducerIdentity(8, 0), 7)


@pytest.mark.parametrize("expected", [(7, 4), (7, 6)], ids=["older", "higher"])
def test_a_producer_of_another_epoch_is_fenced_and_does_not_abort_the_open_transaction(
    new_row: NewRow, expected: tuple[int, int]
) -> None:
    """Kafka aborts first and refuses then; here no producer of the past aborts the work of the present."""
    with pytest.raises(ProducerFenced):
        init(new_row(S.ONGOING), expected)


@pytest.mark.parametrize("state", [S.DEAD, S.PREPARE_EPOCH_FENCE], ids=lambda state: state.kafka_name)
def test_a_row_in_a_state_that_is_never_stored_is_a_defect(new_row: NewRow, state: TransactionState) -> None:
    with pytest.raises(AssertionError):
        init(new_row(state))


def two_phase(row: TransactionMetadata, **changes: Any) -> tuple[InitAction, TransactionMetadata]:
    return init(row, enable_two_phase_commit=True, two_phase_commit_allowed=True, **changes)


def test_with_two_phase_commit_transactions_never_time_out(new_row: NewRow) -> None:
    _, row = two_phase(new_row(S.EMPTY))
    assert row.timeout_ms == TIMEOUT_NEVER_MS
    assert (
        new_transactional_id(replace(REQUEST, enable_two_phase_commit=True), 7, NOW_MS).timeout_ms == TIMEOUT_NEVER_MS
    )


def test_a_prepared_transaction_is_kept_and_a_fresh_epoch_given_out_to_end_it(new_row: NewRow) -> None:
    before = new_row(S.ONGOING, timeout_ms=TIMEOUT_NEVER_MS)
    action, row = two_phase(before, keep_prepared=True)
    assert action is InitAction.KEEP_ONGOING
    assert row == replace(before, producer_epoch=6, last_producer_epoch=-1, last_update_ms=NOW_MS)
    assert row.begin_identity == ProducerIdentity(7, 5)


@pytest.mark.parametrize("epoch", [32764, 32765, 32766, 32767, 32768, 40_000])
def test_whoever_takes_over_a_prepared_transaction_has_an_epoch_that_nobody_had(new_row: NewRow, epoch: int) -> None:
    """Epochs of records and markers end at 32767; those who take it over write none."""
    before = new_row(S.ONGOING, producer_epoch=epoch, begin_epoch=5, timeout_ms=TIMEOUT_NEVER_MS)
    action, row = two_phase(before, keep_prepared=True)
    assert (action, row.identity, row.begin_identity) == (
        InitAction.KEEP_ONGOING,
        ProducerIdentity(7, epoch + 1),
        ProducerIdentity(7, 5),
    )
    check_change(before, row)
    with pytest.raises(ProducerFenced):
        two_phase(row, keep_prepared=True, expected=(7, epoch))


def test_what_was_taken_over_at_the_last_epochs_is_aborted_by_a_start_and_the_producer_id_replaced(
    new_row: NewRow,
) -> None:
    before = new_row(S.ONGOING, producer_epoch=32769, begin_epoch=5, timeout_ms=TIMEOUT_NEVER_MS)
    action, row = two_phase(before)
    assert (action, row.marker_identity, row.next_producer_id) == (
        InitAction.ABORT_FIRST,
        ProducerIdentity(7, 32767),
        8,
    )
    check_change(before, row)
    started = init_after_abort(before, complete(row, now_ms=NOW_MS), REQUEST, allocate=lambda: 9)
    assert (started.identity, started.previous_producer_id) == (ProducerIdentity(8, 0), 7)


@pytest.mark.parametrize("state", AT_REST_STATES)
def test_where_no_transaction_is_open_keep_prepared_starts_as_usual(new_row: NewRow, state: TransactionState) -> None:
    assert two_phase(new_row(state), keep_prepared=True) == two_phase(new_row(state))


def test_without_keep_prepared_a_prepared_transaction_is_aborted(new_row: NewRow) -> None:
    """Kafka's forced termination is this (KAFKA-19003)."""
    action, row = two_phase(new_row(S.ONGOING, timeout_ms=TIMEOUT_NEVER_MS))
    assert (action, row.state) == (InitAction.ABORT_FIRST, S.PREPARE_ABORT)


@pytest.mark.parametrize("state", AT_REST_STATES)
def test_whoever_is_fenced_at_rest_is_replaced_at_the_last_epoch(new_row: NewRow, state: TransactionState) -> None:
    """Nothing could begin with an epoch above it: its marker would have none."""
    row = new_row(state, producer_epoch=32766)
    fenced = fence_at_rest(row, now_ms=NOW_MS, allocate=lambda: 8)
    assert (fenced.identity, fenced.previous_producer_id) == (ProducerIdentity(8, 0), 7)

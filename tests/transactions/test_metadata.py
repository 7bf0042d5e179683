"""What must hold of the coordinator's row at every write, and the text form of a prepared transaction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from txnstore.errors import InvalidRequest
from txnstore.model import ProducerIdentity
from txnstore.transactions.protocol import (
    EPOCH_MAX,
    TIMEOUT_NEVER_MS,
    FenceReason,
    TransactionMetadata,
    TransactionState,
    check_change,
)
from txnstore.transactions.tokens import PreparedTxnState

S = TransactionState

EMPTY = TransactionMetadata("payments", 7, 5, 60_000, S.EMPTY, last_update_ms=1_000)
ONGOING = replace(EMPTY, state=S.ONGOING, start_ms=1_100, begin_epoch=5, transaction_number=1)
PREPARE_COMMIT = replace(ONGOING, state=S.PREPARE_COMMIT, producer_epoch=6, last_producer_epoch=5)
PREPARE_ABORT = replace(PREPARE_COMMIT, state=S.PREPARE_ABORT)
COMPLETE_COMMIT = replace(PREPARE_COMMIT, state=S.COMPLETE_COMMIT, begin_epoch=-1)
COMPLETE_ABORT = replace(COMPLETE_COMMIT, state=S.COMPLETE_ABORT)
ROTATING = replace(PREPARE_COMMIT, producer_epoch=EPOCH_MAX, last_producer_epoch=EPOCH_MAX - 1, next_producer_id=8)
ROTATED = replace(
    ROTATING,
    state=S.COMPLETE_COMMIT,
    producer_id=8,
    producer_epoch=0,
    previous_producer_id=7,
    next_producer_id=-1,
    begin_epoch=-1,
)

GOOD = {
    "a new id is Empty": (None, replace(EMPTY, producer_epoch=-1)),
    "a new producer id of a transaction that was outrun": (PREPARE_COMMIT, ROTATED),
    "Empty keeps its epoch": (COMPLETE_COMMIT, replace(EMPTY, producer_epoch=6)),
    "Empty has the next epoch": (COMPLETE_COMMIT, replace(EMPTY, producer_epoch=7)),
    "Empty has epoch 0 of a new producer id": (COMPLETE_COMMIT, replace(EMPTY, producer_id=8, producer_epoch=0)),
    "Ongoing begins": (EMPTY, ONGOING),
    "Ongoing goes on": (ONGOING, replace(ONGOING, last_update_ms=1_200)),
    "Ongoing is taken over": (ONGOING, replace(ONGOING, producer_epoch=6)),
    "PrepareCommit": (ONGOING, PREPARE_COMMIT),
    "PrepareAbort": (ONGOING, PREPARE_ABORT),
    "PrepareAbort from outside": (
        ONGOING,
        replace(PREPARE_ABORT, last_producer_epoch=-1, fence_reason=FenceReason.TIMEOUT),
    ),
    "PrepareAbort of nothing": (EMPTY, replace(PREPARE_ABORT, begin_epoch=-1, start_ms=1_200)),
    "PrepareCommit at the last epoch": (replace(ONGOING, producer_epoch=EPOCH_MAX - 1), ROTATING),
    "Ongoing is taken over by more than there are epochs": (
        replace(ONGOING, producer_epoch=EPOCH_MAX),
        replace(ONGOING, producer_epoch=EPOCH_MAX + 1),
    ),
    "PrepareCommit by the last of those": (
        replace(ONGOING, producer_epoch=EPOCH_MAX + 1),
        replace(ROTATING, producer_epoch=EPOCH_MAX + 2, last_producer_epoch=EPOCH_MAX + 1),
    ),
    "PrepareAbort from outside, of the last of those": (
        replace(ONGOING, producer_epoch=EPOCH_MAX),
        replace(
            PREPARE_ABORT,
            producer_epoch=EPOCH_MAX + 1,
            last_producer_epoch=EPOCH_MAX,
            next_producer_id=8,
            fence_reason=FenceReason.ADMIN,
        ),
    ),
    "CompleteCommit of what was taken over by more": (
        replace(ROTATING, producer_epoch=EPOCH_MAX + 2, last_producer_epoch=EPOCH_MAX + 1),
        replace(ROTATED, last_producer_epoch=EPOCH_MAX + 1),
    ),
    "CompleteCommit": (PREPARE_COMMIT, COMPLETE_COMMIT),
    "CompleteAbort": (PREPARE_ABORT, COMPLETE_ABORT),
    "CompleteCommit with a new producer id": (ROTATING, ROTATED),
}

BAD = {
    "a new id is not Ongoing": (None, ONGOING),
    "Dead is never stored": (EMPTY, replace(EMPTY, state=S.DEAD)),
    "PrepareEpochFence is never stored": (ONGOING, replace(ONGOING, state=S.PREPARE_EPOCH_FENCE)),
    "a move that the table does not have": (EMPTY, PREPARE_COMMIT),
    "an epoch of more than 16 bits": (EMPTY, replace(EMPTY, producer_epoch=EPOCH_MAX + 1)),
    "CompleteCommit with an epoch of more than 16 bits": (
        replace(PREPARE_COMMIT, producer_epoch=EPOCH_MAX + 1),
        replace(COMPLETE_COMMIT, producer_epoch=EPOCH_MAX + 1),
    ),
    "Ongoing that begins with an epoch for which there is no marker": (
        replace(EMPTY, producer_epoch=EPOCH_MAX),
        replace(ONGOING, producer_epoch=EPOCH_MAX, begin_epoch=EPOCH_MAX),
    ),
    "PrepareAbort from outside that forgets which of several was fenced": (
        replace(ONGOING, producer_epoch=EPOCH_MAX),
        replace(
            PREPARE_ABORT,
            producer_epoch=EPOCH_MAX + 1,
            last_producer_epoch=-1,
            next_producer_id=8,
            fence_reason=FenceReason.ADMIN,
        ),
    ),
    "an epoch below none": (EMPTY, replace(EMPTY, producer_epoch=-2)),
    "Empty with an older epoch": (COMPLETE_COMMIT, replace(EMPTY, producer_epoch=5)),
    "Empty two epochs on": (COMPLETE_COMMIT, replace(EMPTY, producer_epoch=8)),
    "Empty with a new producer id and an old epoch": (COMPLETE_COMMIT, replace(EMPTY, producer_id=8)),
    "Empty that has a start": (COMPLETE_COMMIT, replace(EMPTY, producer_epoch=6, start_ms=1_100)),
    "Empty with records": (COMPLETE_COMMIT, replace(EMPTY, producer_epoch=6, begin_epoch=5)),
    "Ongoing of another producer": (EMPTY, replace(ONGOING, producer_id=8)),
    "Ongoing with another timeout": (EMPTY, replace(ONGOING, timeout_ms=1)),
    "Ongoing without a start": (EMPTY, replace(ONGOING, start_ms=-1)),
    "Ongoing without an epoch of its records": (EMPTY, replace(ONGOING, begin_epoch=-1)),
    "Ongoing whose records change their epoch": (ONGOING, replace(ONGOING, begin_epoch=4)),
    "Ongoing two epochs on": (ONGOING, replace(ONGOING, producer_epoch=7)),
    "PrepareCommit of another producer": (ONGOING, replace(PREPARE_COMMIT, producer_id=8)),
    "PrepareCommit with another start": (ONGOING, replace(PREPARE_COMMIT, start_ms=1_200)),
    "PrepareCommit of other records": (ONGOING, replace(PREPARE_COMMIT, begin_epoch=4)),
    "PrepareCommit with the epoch of its records": (ONGOING, replace(PREPARE_COMMIT, producer_epoch=5)),
    "PrepareCommit two epochs on": (ONGOING, replace(PREPARE_COMMIT, producer_epoch=7)),
    "PrepareCommit that forgets the epoch before": (ONGOING, replace(PREPARE_COMMIT, last_producer_epoch=-1)),
    "PrepareAbort from outside that can be repeated": (
        ONGOING,
        replace(PREPARE_ABORT, fence_reason=FenceReason.TIMEOUT),
    ),
    "CompleteCommit without a start": (PREPARE_COMMIT, replace(COMPLETE_COMMIT, start_ms=-1)),
    "CompleteCommit with another start": (PREPARE_COMMIT, replace(COMPLETE_COMMIT, start_ms=1_200)),
    "CompleteCommit with another epoch": (PREPARE_COMMIT, replace(COMPLETE_COMMIT, producer_epoch=7)),
    "CompleteCommit after PrepareAbort": (PREPARE_ABORT, COMPLETE_COMMIT),
    "another new producer id than was announced": (ROTATING, replace(ROTATED, producer_id=ROTATED.producer_id + 1)),
    "a new producer id, of a transaction that was outrun, that does not begin at 0": (
        PREPARE_COMMIT,
        replace(ROTATED, producer_epoch=1),
    ),
    "a new producer id that does not begin at 0": (ROTATING, replace(ROTATED, producer_epoch=1)),
    "a new producer id that forgets the old one": (ROTATING, replace(ROTATED, previous_producer_id=-1)),
}


@pytest.mark.parametrize(("before", "after"), GOOD.values(), ids=GOOD)
def test_a_change_that_kafka_allows_passes(before: TransactionMetadata | None, after: TransactionMetadata) -> None:
    check_change(before, after)


@pytest.mark.parametrize(("before", "after"), BAD.values(), ids=BAD)
def test_a_change_that_breaks_one_invariant_is_caught(
    before: TransactionMetadata | None, after: TransactionMetadata
) -> None:
    with pytest.raises(AssertionError):
        check_change(before, after)


@pytest.mark.parametrize(
    ("changes", "deadline_ms"),
    [
        pytest.param({}, 61_100, id="Ongoing: start and timeout"),
        pytest.param({"timeout_ms": TIMEOUT_NEVER_MS}, None, id="two-phase commit: none"),
        pytest.param({"state": S.COMPLETE_COMMIT}, None, id="complete: none"),
        pytest.param({"state": S.PREPARE_COMMIT}, None, id="decided: none"),
        pytest.param({"state": S.EMPTY}, None, id="Empty: none"),
    ],
)
def test_a_deadline_is_that_of_an_open_transaction(changes: dict[str, Any], deadline_ms: int | None) -> None:
    assert replace(ONGOING, **changes).deadline_ms == deadline_ms


@dataclass
class Repetition:
    changes: dict[str, Any]
    requested: tuple[int, int]
    is_repetition: bool


REPETITIONS = {
    "the epoch before": Repetition({}, (7, 4), True),
    "the epoch itself": Repetition({}, (7, 5), False),
    "a higher epoch": Repetition({}, (7, 6), False),
    "two epochs before": Repetition({}, (7, 3), False),
    "another producer id": Repetition({}, (9, 4), False),
    "the exhausted producer id before": Repetition({"previous_producer_id": 6, "producer_epoch": 0}, (6, 32766), True),
    "the same at 32767, given out to take over a prepared one": Repetition(
        {"previous_producer_id": 6, "producer_epoch": 0}, (6, 32767), True
    ),
    "the one whom it has fenced": Repetition(
        {"previous_producer_id": 6, "producer_epoch": 0, "last_producer_epoch": 32767}, (6, 32766), False
    ),
    "the last of many who took over": Repetition(
        {"previous_producer_id": 6, "producer_epoch": 0, "last_producer_epoch": 40_000}, (6, 40_000), True
    ),
    "the one before the last of many": Repetition(
        {"previous_producer_id": 6, "producer_epoch": 0, "last_producer_epoch": 40_000}, (6, 39_999), False
    ),
    "the last of many, while it is decided": Repetition(
        {"state": S.PREPARE_COMMIT, "producer_epoch": 40_001, "last_producer_epoch": 40_000}, (7, 40_000), True
    ),
    "the one before the last of many, while it is decided": Repetition(
        {"state": S.PREPARE_COMMIT, "producer_epoch": 40_001, "last_producer_epoch": 40_000}, (7, 39_999), False
    ),
    "the first of two who had the last epochs, while it is decided": Repetition(
        {"state": S.PREPARE_COMMIT, "producer_epoch": 32768, "last_producer_epoch": 32767}, (7, 32766), False
    ),
    "the producer id before, not exhausted": Repetition(
        {"previous_producer_id": 6, "producer_epoch": 0}, (6, 32765), False
    ),
    "the exhausted producer id once the new one has moved on": Repetition(
        {"previous_producer_id": 6, "producer_epoch": 1}, (6, 32766), False
    ),
    "no producer, where there was none before": Repetition({"producer_epoch": 0}, (-1, 32766), False),
}


@pytest.mark.parametrize("case", REPETITIONS.values(), ids=REPETITIONS)
def test_a_request_is_a_repetition_if_it_has_the_identity_before_the_last_end(case: Repetition) -> None:
    row = replace(EMPTY, **case.changes)
    assert row.is_repetition(ProducerIdentity(*case.requested)) is case.is_repetition


@pytest.mark.parametrize(
    ("epoch", "of_markers"), [(6, 6), (32766, 32766), (32767, 32767), (32768, 32767), (2**31 - 1, 32767)]
)
def test_markers_have_the_epoch_that_the_decision_has_raised_as_far_as_16_bits_go(epoch: int, of_markers: int) -> None:
    decided = replace(PREPARE_COMMIT, producer_epoch=epoch)
    assert (decided.identity, decided.marker_identity) == (ProducerIdentity(7, epoch), ProducerIdentity(7, of_markers))


@pytest.mark.parametrize("epoch", [0, 32765, 32766, 32767, 40_000])
def test_epochs_are_exhausted_from_32766_on(epoch: int) -> None:
    assert replace(EMPTY, producer_epoch=epoch).epoch_exhausted is (epoch >= 32766)


@pytest.mark.parametrize(
    ("prepared", "text"),
    [
        pytest.param(PreparedTxnState(7, 5), "7:5", id="both"),
        pytest.param(PreparedTxnState(0, 0), "0:0", id="zeros"),
        pytest.param(PreparedTxnState(2**63 - 1, 32767), "9223372036854775807:32767", id="largest"),
        pytest.param(PreparedTxnState(), "", id="none"),
    ],
)
def test_a_prepared_transaction_is_written_and_read_back(prepared: PreparedTxnState, text: str) -> None:
    assert str(prepared) == text
    assert PreparedTxnState.parse(text) == prepared


def test_both_numbers_at_minus_one_are_read_as_none() -> None:
    assert PreparedTxnState.parse("-1:-1") == PreparedTxnState()


@pytest.mark.parametrize(
    "text",
    [
        "7",
        ":",
        "7:",
        ":5",
        "7:5:6",
        "-1:5",
        "7:-1",
        "-2:-2",
        "7:5 ",
        " 7:5",
        "7:5\n",
        "+7:5",
        "7.0:5",
        "seven:5",
        "\u0667:5",
        "0x7:5",
        "1" * 20 + ":5",
        "7:123456",
        "'; DROP TABLE transactions --",
        "7:5\0",
    ],
    ids=ascii,
)
def test_another_text_is_no_prepared_transaction(text: str) -> None:
    with pytest.raises(InvalidRequest):
        PreparedTxnState.parse(text)


@pytest.mark.parametrize(("producer_id", "epoch"), [(-1, 0), (0, -1), (-2, -2), (7, -1), (-1, 5)])
def test_half_a_prepared_transaction_cannot_be_made(producer_id: int, epoch: int) -> None:
    with pytest.raises(InvalidRequest):
        PreparedTxnState(producer_id, epoch)

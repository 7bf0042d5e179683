"""The states of a transaction, and what the coordinator knows of a transactional id: pure tables that all others ask.

Kafka's TransactionState, protocol TV2 (KIP-890). The README's diagram is drawn from `PREVIOUS_STATES`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from txnstore.model import NO_PRODUCER_EPOCH, NO_PRODUCER_ID, ProducerIdentity

#: Epochs have 16 bits. From this one on a producer gets a new producer id at the next chance; the one above it is
#: only used to fence (TransactionMetadata.isProducerEpochExhausted).
EPOCH_EXHAUSTED: Final = 2**15 - 2
EPOCH_MAX: Final = 2**15 - 1
#: A transaction with this timeout is never aborted for its age: it takes part in two-phase commit (KIP-939).
TIMEOUT_NEVER_MS: Final = 2**31 - 1
#: Of a transaction that has not begun.
NO_START_MS: Final = -1


class TransactionState(enum.IntEnum):
    """Where the transaction of a transactional id stands; Kafka's numbers, as stored."""

    EMPTY = 0
    """None was begun since the producer was initialised."""

    ONGOING = 1
    """It is open: something was written."""

    PREPARE_COMMIT = 2
    """Decided: it commits, whoever crashes. Kafka says "prepare"; nobody votes any more."""

    PREPARE_ABORT = 3
    """Decided: it aborts, whoever crashes."""

    COMPLETE_COMMIT = 4
    """Every partition has its COMMIT marker."""

    COMPLETE_ABORT = 5
    """Every partition has its ABORT marker."""

    DEAD = 6
    """The transactional id has expired; its row is deleted in the same moment, so this is never stored there."""

    PREPARE_EPOCH_FENCE = 7
    """The epoch is being raised to abort it from outside; a step on the way, never stored."""

    @property
    def kafka_name(self) -> str:
        """The name that DescribeTransactions prints: CompleteCommit."""
        return "".join(word.capitalize() for word in self.name.split("_"))


_S = TransactionState


#: The states that each state may follow. What is not here is a defect of ours.
PREVIOUS_STATES: Final[Mapping[TransactionState, frozenset[TransactionState]]] = MappingProxyType(
    {
        _S.EMPTY: frozenset({_S.EMPTY, _S.COMPLETE_COMMIT, _S.COMPLETE_ABORT}),
        _S.ONGOING: frozenset({_S.ONGOING, _S.EMPTY, _S.COMPLETE_COMMIT, _S.COMPLETE_ABORT}),
        _S.PREPARE_COMMIT: frozenset({_S.ONGOING}),
        # The last three: a producer aborts a transaction in which nothing was written (KAFKA-18401).
        _S.PREPARE_ABORT: frozenset(
            {_S.ONGOING, _S.PREPARE_EPOCH_FENCE, _S.EMPTY, _S.COMPLETE_COMMIT, _S.COMPLETE_ABORT}
        ),
        _S.COMPLETE_COMMIT: frozenset({_S.PREPARE_COMMIT}),
        _S.COMPLETE_ABORT: frozenset({_S.PREPARE_ABORT}),
        _S.DEAD: frozenset({_S.EMPTY, _S.COMPLETE_ABORT, _S.COMPLETE_COMMIT}),
        _S.PREPARE_EPOCH_FENCE: frozenset({_S.ONGOING}),
    }
)


#: Decided, but not every marker is written: new work waits, it is not wrong.
DECIDED: Final = frozenset({_S.PREPARE_COMMIT, _S.PREPARE_ABORT})


#: Nothing is open: a new transaction may begin.
AT_REST: Final = frozenset({_S.EMPTY, _S.COMPLETE_COMMIT, _S.COMPLETE_ABORT})


#: A transactional id in one of these may be forgotten.
EXPIRABLE: Final = AT_REST


#: What is written in the coordinator's row; the others are steps on the way.
STORED: Final = frozenset(_S) - {_S.DEAD, _S.PREPARE_EPOCH_FENCE}


class IllegalTransition(AssertionError):
    """A transaction was about to make a move that the table does not have: a defect of ours, never of a caller."""


def check_transition(before: TransactionState, after: TransactionState) -> None:
    """Return if the table has the move.

    Raises:
        IllegalTransition: it has not.
    """
    if before not in PREVIOUS_STATES[after]:
        raise IllegalTransition(f"{before.kafka_name} -> {after.kafka_name}")


class FenceReason(enum.StrEnum):
    """Why the epoch was raised by somebody else than the producer."""

    TIMEOUT = "timeout"
    INIT = "init"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class TransactionMetadata:
    """The coordinator's row of one transactional id."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    state: TransactionState
    last_update_ms: int
    previous_producer_id: int = NO_PRODUCER_ID
    next_producer_id: int = NO_PRODUCER_ID
    last_producer_epoch: int = NO_PRODUCER_EPOCH
    start_ms: int = NO_START_MS
    transaction_number: int = 0
    begin_epoch: int = NO_PRODUCER_EPOCH
    fence_reason: FenceReason | None = None
    fence_detail: str | None = None

    @property
    def identity(self) -> ProducerIdentity:
        """The producer that may write now."""
        return ProducerIdentity(self.producer_id, self.producer_epoch)

    @property
    def begin_identity(self) -> ProducerIdentity:
        """The producer that wrote the records of the open or decided transaction."""
        return ProducerIdentity(self.producer_id, self.begin_epoch)

    @property
    def next_identity(self) -> ProducerIdentity:
        """The producer that may write once a decided transaction is complete; else the one that may write now."""
        if self.next_producer_id == NO_PRODUCER_ID:
            return self.identity
        return ProducerIdentity(self.next_producer_id, 0)

    @property
    def epoch_exhausted(self) -> bool:
        """Whether the producer id has no epoch left to give out."""
        return self.producer_epoch >= EPOCH_EXHAUSTED

    @property
    def deadline_ms(self) -> int | None:
        """When the transaction is aborted for its age; None if it is not."""
        if self.state is not TransactionState.ONGOING or self.timeout_ms == TIMEOUT_NEVER_MS:
            return None
        return self.start_ms + self.timeout_ms

    def is_repetition(self, requested: ProducerIdentity) -> bool:
        """Return whether `requested` is the identity before the last EndTxn, whose answer may be lost (KIP-890)."""
        if requested.producer_id == self.producer_id:
            return self.producer_epoch == requested.epoch + 1
        return self.is_rotated_from(requested)

    def is_rotated_from(self, requested: ProducerIdentity) -> bool:
        """Return whether the last EndTxn replaced the exhausted producer id of `requested` by a new one."""
        return (
            requested.producer_id == self.previous_producer_id
            and self.previous_producer_id != NO_PRODUCER_ID
            and requested.epoch >= EPOCH_EXHAUSTED
            and self.producer_epoch == 0
        )


def check_change(before: TransactionMetadata | None, after: TransactionMetadata) -> None:
    """Assert what Kafka's completeTransitionTo asserts; a failure is a defect of ours.

    Raises:
        AssertionError: the change breaks one of the invariants.
    """
    assert after.state in STORED, f"{after.state.kafka_name} is never stored"
    assert NO_PRODUCER_EPOCH <= after.producer_epoch <= EPOCH_MAX, f"epoch {after.producer_epoch}"
    if before is None:
        assert after.state is TransactionState.EMPTY, f"a new transactional id is {after.state.kafka_name}"
        return
    check_transition(before.state, after.state)
    _CHECKS[after.state](before, after)


def _check_empty(before: TransactionMetadata, after: TransactionMetadata) -> None:
    assert after.start_ms == NO_START_MS
    assert after.begin_epoch == NO_PRODUCER_EPOCH
    if after.producer_id == before.producer_id:
        assert after.producer_epoch - before.producer_epoch in (0, 1)
    else:
        assert after.producer_epoch == 0


def _check_ongoing(before: TransactionMetadata, after: TransactionMetadata) -> None:
    assert after.producer_id == before.producer_id
    assert after.timeout_ms == before.timeout_ms
    assert after.start_ms != NO_START_MS
    assert NO_PRODUCER_EPOCH < after.begin_epoch < EPOCH_MAX, "no marker could have an epoch above it"
    if before.state is TransactionState.ONGOING:
        assert after.begin_epoch == before.begin_epoch
        # Only a producer that takes over a prepared transaction raises the epoch of an open one (KIP-939).
        assert after.producer_epoch - before.producer_epoch in (0, 1)


def _check_decided(before: TransactionMetadata, after: TransactionMetadata) -> None:
    assert after.producer_id == before.producer_id
    assert after.producer_epoch == min(before.producer_epoch + 1, EPOCH_MAX)
    assert after.begin_epoch < after.producer_epoch, "a marker's epoch is above that of its records"
    # Whoever is fenced has nothing that it could ask for again.
    repeatable = after.fence_reason is None
    assert after.last_producer_epoch == (before.producer_epoch if repeatable else NO_PRODUCER_EPOCH)
    if before.state not in AT_REST:
        assert after.start_ms == before.start_ms
        assert after.begin_epoch == before.begin_epoch


def _check_complete(before: TransactionMetadata, after: TransactionMetadata) -> None:
    assert after.start_ms != NO_START_MS
    assert after.start_ms == before.start_ms
    if before.next_producer_id == NO_PRODUCER_ID:
        assert after.identity == before.identity
    else:
        assert after.identity == ProducerIdentity(before.next_producer_id, 0)
        assert after.previous_producer_id == before.producer_id


_CHECKS: Final = {
    TransactionState.EMPTY: _check_empty,
    TransactionState.ONGOING: _check_ongoing,
    TransactionState.PREPARE_COMMIT: _check_decided,
    TransactionState.PREPARE_ABORT: _check_decided,
    TransactionState.COMPLETE_COMMIT: _check_complete,
    TransactionState.COMPLETE_ABORT: _check_complete,
}

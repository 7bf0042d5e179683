"""This file is what the coordinator knows of a transactional id, pure, and what must hold of it at every write."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final, Self

from txnstore.errors import InvalidRequest
from txnstore.model import NO_PRODUCER_EPOCH, NO_PRODUCER_ID, ProducerIdentity
from txnstore.transactions.states import AT_REST, STORED, TransactionState, check_transition

#: Epochs have 16 bits. From this one on a producer gets a new producer id at the next chance; the one above it is
#: only used to fence (TransactionMetadata.isProducerEpochExhausted).
EPOCH_EXHAUSTED: Final = 2**15 - 2
EPOCH_MAX: Final = 2**15 - 1
#: A transaction with this timeout is never aborted for its age: it takes part in two-phase commit (KIP-939).
TIMEOUT_NEVER_MS: Final = 2**31 - 1
#: Of a transaction that has not begun.
NO_START_MS: Final = -1


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


@dataclass(frozen=True, slots=True)
class PreparedTxnState:
    """A transaction that an application remembers in its own database: KIP-939's PreparedTxnState."""

    producer_id: int = NO_PRODUCER_ID
    epoch: int = NO_PRODUCER_EPOCH

    def __post_init__(self) -> None:
        """Accept both numbers or neither.

        Raises:
            InvalidRequest: one of them is negative and they are not both -1.
        """
        none = (self.producer_id, self.epoch) == (NO_PRODUCER_ID, NO_PRODUCER_EPOCH)
        if not none and (self.producer_id < 0 or self.epoch < 0):
            raise InvalidRequest("a prepared transaction has a producer id and an epoch, or neither")

    def __str__(self) -> str:
        """Return "pid:epoch", or "" if there is none."""
        return f"{self.producer_id}:{self.epoch}" if self.producer_id != NO_PRODUCER_ID else ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return what `str` made a text of.

        Raises:
            InvalidRequest: the text is not of that form.
        """
        if text == "":
            return cls()
        match = re.fullmatch(r"(-?[0-9]{1,19}):(-?[0-9]{1,5})", text, re.ASCII)
        if match is None:
            raise InvalidRequest('a prepared transaction is written "producer id:epoch", or is empty')
        return cls(int(match[1]), int(match[2]))

"""This file is the states of a transaction and the moves between them: a table, pure, that everyone else asks.

Kafka's TransactionState, protocol TV2 (KIP-890). The README's diagram is drawn from `PREVIOUS_STATES`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final


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

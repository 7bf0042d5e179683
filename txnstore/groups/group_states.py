"""This file is the states of a consumer group and the moves between them: a table, pure, that the rules ask.

The names are Kafka's (ClassicGroupState).  No row stores the state: it follows from what the members own, what they
are to have, and what they have heard; `rebalance_rules.state_of` reads it off.  Kafka goes through PreparingRebalance
at every change; here a group does so only if somebody has something to give back.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final


class GroupState(enum.Enum):
    """Where a group stands; the value is the name that Kafka's tools print."""

    EMPTY = "Empty"
    """It has no members; its offsets stay until they expire."""

    PREPARING_REBALANCE = "PreparingRebalance"
    """Somebody owns what he has to give back first."""

    COMPLETING_REBALANCE = "CompletingRebalance"
    """Nothing is left to give back; somebody has yet to hear of, or to get, what is his."""

    STABLE = "Stable"
    """Every member owns exactly what it is to have, in the group's generation."""

    DEAD = "Dead"
    """There is no such group: nobody has joined it or committed for it, or it was deleted."""


class GroupMove(enum.Enum):
    """What changes a group's state."""

    DEAL = "deal"
    """The partitions are dealt out anew, in a new generation: members came, went or want other topics; topics grew."""

    TAKE_OVER = "take over"
    """A static member is back under a new member id, and has what its predecessor had."""

    REPORT = "report"
    """A member has said what it owns, and was given what is free."""


_S = GroupState
_M = GroupMove

#: The states that each move may lead to.  What is not here is a defect of ours.
NEXT_STATES: Final[Mapping[tuple[GroupState, GroupMove], frozenset[GroupState]]] = MappingProxyType(
    {
        # Nobody has heard of a new deal yet, so it never leads to Stable at once.
        (_S.DEAD, _M.DEAL): frozenset({_S.COMPLETING_REBALANCE}),
        # To Empty: the last members have expired, and their rows are gone already.
        (_S.EMPTY, _M.DEAL): frozenset({_S.EMPTY, _S.COMPLETING_REBALANCE}),
        (_S.STABLE, _M.DEAL): frozenset({_S.EMPTY, _S.PREPARING_REBALANCE, _S.COMPLETING_REBALANCE}),
        (_S.PREPARING_REBALANCE, _M.DEAL): frozenset({_S.EMPTY, _S.PREPARING_REBALANCE, _S.COMPLETING_REBALANCE}),
        (_S.COMPLETING_REBALANCE, _M.DEAL): frozenset({_S.EMPTY, _S.PREPARING_REBALANCE, _S.COMPLETING_REBALANCE}),
        (_S.STABLE, _M.TAKE_OVER): frozenset({_S.COMPLETING_REBALANCE}),
        (_S.PREPARING_REBALANCE, _M.TAKE_OVER): frozenset({_S.PREPARING_REBALANCE, _S.COMPLETING_REBALANCE}),
        (_S.COMPLETING_REBALANCE, _M.TAKE_OVER): frozenset({_S.COMPLETING_REBALANCE}),
        (_S.PREPARING_REBALANCE, _M.REPORT): frozenset({_S.PREPARING_REBALANCE, _S.COMPLETING_REBALANCE, _S.STABLE}),
        (_S.COMPLETING_REBALANCE, _M.REPORT): frozenset({_S.COMPLETING_REBALANCE, _S.STABLE}),
        # To CompletingRebalance: a member has lost something by itself.
        (_S.STABLE, _M.REPORT): frozenset({_S.STABLE, _S.COMPLETING_REBALANCE}),
    }
)


class IllegalGroupMove(AssertionError):
    """A group was about to make a move that the table does not have: a defect of ours, never of a caller."""


def check_move(before: GroupState, move: GroupMove, after: GroupState) -> None:
    """Return if the table has the move.

    Raises:
        IllegalGroupMove: it has not.
    """
    if after not in NEXT_STATES.get((before, move), frozenset()):
        raise IllegalGroupMove(f"{before.value} -> {after.value} by {move.value}")

"""A consumer group, pure: its members, its states and the moves between them, a member's report and its answer.

The names of the states are Kafka's (ClassicGroupState).  No row stores the state: it follows from what the members
own, what they are to own, and which generation they have confirmed; `rebalance_rules.state_of` derives it.  Kafka goes
through PreparingRebalance at every change; here a group does so only if a member has something to give back, or has
left.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from txnstore.model import NO_GENERATION, GroupMembership, PartitionName

Partitions = frozenset[PartitionName]

NO_PARTITIONS: Partitions = frozenset()


@dataclass(frozen=True, slots=True)
class MemberDetails:
    """What a member says about itself when it joins."""

    client_id: str
    session_timeout_ms: int
    """After this long without a heartbeat it counts as dead, by the database server's clock."""

    subscription: tuple[str, ...]
    """Topics and patterns, as the application gave them; for people."""

    topics: frozenset[str]
    """The topics that these match now; they need not exist yet."""

    assignors: tuple[str, ...]
    """The names of the assignors that it supports, the preferred one first."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a member sends with each request; it has one request under way at a time."""

    membership: GroupMembership
    """Its member id, and the newest generation that it has accepted; NO_GENERATION if it has accepted none yet."""

    step: int
    """The number of the request, higher each time: it tells a delayed request from a newer one."""

    owned: Partitions = NO_PARTITIONS
    """Exactly the partitions that it works on or has yet to revoke."""

    @property
    def joins_anew(self) -> bool:
        """Whether the member does not believe that it is in the group."""
        return self.membership.generation == NO_GENERATION


@dataclass(frozen=True, slots=True)
class MemberState:
    """A member as its row has it."""

    member_id: str
    group_instance_id: str | None
    details: MemberDetails
    generation: int = NO_GENERATION
    """The generation that it has confirmed; it may commit in any generation from this one to the group's."""

    step: int = -1
    """The step of its newest request."""

    assignment: Partitions = NO_PARTITIONS
    """What it is to own."""

    owned: Partitions = NO_PARTITIONS
    """What it was given and has not given back: no other member gets any of it."""

    granted: Partitions = NO_PARTITIONS
    """What it owns since its newest answer, and has yet to report: until `granted_in`, others may have had that."""

    granted_in: int = NO_GENERATION


@dataclass(frozen=True, slots=True)
class Group:
    """A group, read under its lock."""

    group_id: str
    generation: int = 0
    assignor: str | None = None
    """None: it has no members, or some have left and the others have yet to assign again."""

    members: Mapping[str, MemberState] = field(default_factory=dict)

    def static_member(self, group_instance_id: str) -> MemberState | None:
        """Return the member that has this group.instance.id now."""
        return next((member for member in self.members.values() if member.group_instance_id == group_instance_id), None)


class AnswerStatus(enum.Enum):
    """What a member is told."""

    OWN = "own"
    """It has all of its assignment."""

    REVOKE = "revoke"
    """It must give back `MemberAnswer.revoke` and report that; until then it gets nothing new."""

    WAIT = "wait"
    """Other members still own a part of its assignment (Kafka: REBALANCE_IN_PROGRESS); it asks again soon."""


@dataclass(frozen=True, slots=True)
class MemberAnswer:
    """The answer to a member's report."""

    status: AnswerStatus
    membership: GroupMembership
    """With the generation to use from now on."""

    step: int
    """The step of the report that this answers."""

    partitions: tuple[PartitionName, ...]
    """All that the member may work on, in order; with REVOKE, what remains once it has given back the rest."""

    revoke: tuple[PartitionName, ...]
    """What it has to give back now, in order."""

    assignor: str
    is_cooperative: bool
    is_settled: bool
    """Whether there is nothing to do until the group changes: `renew` is enough."""


class GroupState(enum.Enum):
    """Where a group stands; the value is the name that Kafka's tools print."""

    EMPTY = "Empty"
    """It has no members; its offsets stay until they expire."""

    PREPARING_REBALANCE = "PreparingRebalance"
    """A member owns something that it has to give back first; or one has left, and nothing is reassigned yet."""

    COMPLETING_REBALANCE = "CompletingRebalance"
    """Nothing is left to give back; a member has yet to hear of its assignment, or to get it."""

    STABLE = "Stable"
    """Every member owns exactly its assignment, in the group's generation."""

    DEAD = "Dead"
    """The group does not exist: nobody has joined it or committed for it, or it was deleted."""


class GroupMove(enum.Enum):
    """What changes a group's state."""

    REBALANCE = "rebalance"
    """The partitions are reassigned, in a new generation: members, subscriptions or topics have changed."""

    TAKE_OVER = "take over"
    """A static member is back under a new member id, and has what its predecessor had."""

    LEAVE = "leave"
    """A member has left; the others have yet to assign again."""

    REPORT = "report"
    """A member has reported what it owns, and was given what is free."""


_S = GroupState
_M = GroupMove

#: The states that each move may lead to; any other would be a defect of ours.
NEXT_STATES: Final[Mapping[tuple[GroupState, GroupMove], frozenset[GroupState]]] = MappingProxyType(
    {
        # Nobody has heard of the new generation yet, so a rebalance never leads to Stable at once.
        (_S.DEAD, _M.REBALANCE): frozenset({_S.COMPLETING_REBALANCE}),
        # To Empty: the last members have expired, and their rows are gone already.
        (_S.EMPTY, _M.REBALANCE): frozenset({_S.EMPTY, _S.COMPLETING_REBALANCE}),
        (_S.STABLE, _M.REBALANCE): frozenset({_S.EMPTY, _S.PREPARING_REBALANCE, _S.COMPLETING_REBALANCE}),
        (_S.PREPARING_REBALANCE, _M.REBALANCE): frozenset({_S.EMPTY, _S.PREPARING_REBALANCE, _S.COMPLETING_REBALANCE}),
        (_S.COMPLETING_REBALANCE, _M.REBALANCE): frozenset({_S.EMPTY, _S.PREPARING_REBALANCE, _S.COMPLETING_REBALANCE}),
        (_S.STABLE, _M.LEAVE): frozenset({_S.EMPTY, _S.PREPARING_REBALANCE}),
        (_S.PREPARING_REBALANCE, _M.LEAVE): frozenset({_S.EMPTY, _S.PREPARING_REBALANCE}),
        (_S.COMPLETING_REBALANCE, _M.LEAVE): frozenset({_S.EMPTY, _S.PREPARING_REBALANCE}),
        (_S.STABLE, _M.TAKE_OVER): frozenset({_S.COMPLETING_REBALANCE}),
        (_S.PREPARING_REBALANCE, _M.TAKE_OVER): frozenset({_S.PREPARING_REBALANCE, _S.COMPLETING_REBALANCE}),
        (_S.COMPLETING_REBALANCE, _M.TAKE_OVER): frozenset({_S.COMPLETING_REBALANCE}),
        (_S.PREPARING_REBALANCE, _M.REPORT): frozenset({_S.PREPARING_REBALANCE, _S.COMPLETING_REBALANCE, _S.STABLE}),
        (_S.COMPLETING_REBALANCE, _M.REPORT): frozenset({_S.COMPLETING_REBALANCE, _S.STABLE}),
        # To CompletingRebalance: a member no longer has something that it owned.
        (_S.STABLE, _M.REPORT): frozenset({_S.STABLE, _S.COMPLETING_REBALANCE}),
    }
)


class IllegalGroupMove(AssertionError):
    """A group was about to make a move that the table does not have: a defect of ours, never a caller's."""


def check_move(before: GroupState, move: GroupMove, after: GroupState) -> None:
    """Return if the table has the move.

    Raises:
        IllegalGroupMove: the table does not have it.
    """
    if after not in NEXT_STATES.get((before, move), frozenset()):
        raise IllegalGroupMove(f"{before.value} -> {after.value} by {move.value}")

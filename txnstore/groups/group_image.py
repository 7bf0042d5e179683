"""This file is the values that the rules of groups work on: the group as its rows show it, requests and answers."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from txnstore.model import NO_GENERATION, GroupMembership, TopicPartition

Partitions = frozenset[TopicPartition]

NO_PARTITIONS: Partitions = frozenset()


@dataclass(frozen=True, slots=True)
class MemberDetails:
    """What a member says of itself when it joins."""

    client_id: str
    session_timeout_ms: int
    """After so long without a heartbeat it is taken for dead, by the database server's clock."""

    subscription: tuple[str, ...]
    """Topics and patterns, as the application gave them; for people."""

    topics: frozenset[str]
    """The topics that these come to now; there need not be such topics yet."""

    assignors: tuple[str, ...]
    """The names of the assignors that it supports, the one that it likes best first."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a member says with each of its requests; it sends them one after the other."""

    membership: GroupMembership
    """Its member id, and the generation that it has last taken over; NO_GENERATION: none in this life."""

    step: int
    """The number of the request, by which one that was delayed is told from a newer one: higher each time."""

    owned: Partitions = NO_PARTITIONS
    """Every partition that it works on or has yet to revoke; nothing else."""

    @property
    def joins_anew(self) -> bool:
        """Whether the member has no place in the group that it knows of."""
        return self.membership.generation == NO_GENERATION


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member as its row shows it."""

    member_id: str
    group_instance_id: str | None
    details: MemberDetails
    generation: int = NO_GENERATION
    """The generation that it has confirmed; it may commit from this one up to the group's."""

    step: int = -1
    """The newest of its requests."""

    assignment: Partitions = NO_PARTITIONS
    """What it is to have."""

    owned: Partitions = NO_PARTITIONS
    """What it was given and has not given back: nobody else gets any of it."""


@dataclass(frozen=True, slots=True)
class Group:
    """A group under its lock."""

    group_id: str
    generation: int = 0
    assignor: str | None = None
    members: Mapping[str, GroupMember] = field(default_factory=dict)

    def static_member(self, group_instance_id: str) -> GroupMember | None:
        """Return the member that has the lasting name now."""
        return next((member for member in self.members.values() if member.group_instance_id == group_instance_id), None)


class AnswerStatus(enum.Enum):
    """What a member is told."""

    OWN = "own"
    """It has everything that it is to have."""

    REVOKE = "revoke"
    """It must give back `Answer.revoke` and then say so; until then it gets nothing new."""

    WAIT = "wait"
    """Some of what it is to have is still with others (Kafka: REBALANCE_IN_PROGRESS); ask again soon."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a member that is one."""

    status: AnswerStatus
    membership: GroupMembership
    """With the generation to use from now on."""

    step: int
    """The step of the report that this answers."""

    partitions: tuple[TopicPartition, ...]
    """All that the member may work on, in order; under REVOKE what is left once it has given back the rest."""

    revoke: tuple[TopicPartition, ...]
    """What it has to give back now, in order."""

    assignor: str
    is_cooperative: bool
    is_settled: bool
    """Whether there is nothing to do until the group changes: `renew` is enough."""

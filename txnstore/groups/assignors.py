"""This file is how the partitions of topics are dealt out to a group's members: Kafka's assignors, as pure functions.

Each assignor gives every partition of a subscribed topic to exactly one member, one that subscribed to its topic, and
the same input gives the same answer whatever the order it comes in.  What each promises beyond that stands with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from txnstore.groups.sticky_assignment import StickyAssignment
from txnstore.groups.subscribers import Assignment, Subscriber, in_order, subscribed_partitions
from txnstore.model import TopicPartition

#: From the subscribers and the number of partitions of each topic to the partitions of each member id.
AssignFunction = Callable[[Sequence[Subscriber], Mapping[str, int]], Assignment]


@dataclass(frozen=True, slots=True)
class Assignor:
    """An assignor under the name that partition.assignment.strategy has for it."""

    name: str
    assign: AssignFunction
    is_cooperative: bool
    """Whether members keep what stays theirs while the group rebalances (KIP-429); otherwise they release all."""


def assign_range(subscribers: Sequence[Subscriber], partition_counts: Mapping[str, int]) -> Assignment:
    """Deal out each topic by itself, in runs of neighbouring partitions; the first members get one more.

    Within a topic no member has more than one partition above another.  Topics with equal numbers of partitions are
    dealt out alike, so that records with the same key in both meet at the same member.
    """
    members = in_order(subscribers)
    assigned: dict[str, set[TopicPartition]] = {member.member_id: set() for member in members}
    for topic, partition_count in partition_counts.items():
        takers = [member for member in members if topic in member.topics]
        if not takers:
            continue
        share, left_over = divmod(partition_count, len(takers))
        first = 0
        for place, taker in enumerate(takers):
            end = first + share + (place < left_over)
            assigned[taker.member_id].update(TopicPartition(topic, number) for number in range(first, end))
            first = end
    return {member_id: frozenset(partitions) for member_id, partitions in assigned.items()}


def assign_round_robin(subscribers: Sequence[Subscriber], partition_counts: Mapping[str, int]) -> Assignment:
    """Deal out the partitions of all topics one by one, in turn; who has not subscribed to a topic is passed over.

    With equal subscriptions no member has more than one partition above another.
    """
    members = in_order(subscribers)
    assigned: dict[str, set[TopicPartition]] = {member.member_id: set() for member in members}
    turn = itertools.cycle(members)
    for partition in subscribed_partitions(members, partition_counts):
        taker = next(member for member in turn if partition.topic in member.topics)
        assigned[taker.member_id].add(partition)
    return {member_id: frozenset(partitions) for member_id, partitions in assigned.items()}


def assign_cooperative_sticky(subscribers: Sequence[Subscriber], partition_counts: Mapping[str, int]) -> Assignment:
    """Leave the members what they hold, as far as the load stays balanced.

    Balanced: no partition, and no chain of partitions from member to member, could go from one member to another that
    has two or more fewer.  With equal subscriptions that is a difference of one at most, no assignment as balanced
    takes fewer partitions away from those that hold them, and none is taken away when members only go.
    """
    members = in_order(subscribers)
    sticky = StickyAssignment(members, partition_counts)
    sticky.place_free_partitions()
    sticky.balance()
    return sticky.assignment()


#: Every assignor by its name.
ASSIGNORS: Final[Mapping[str, Assignor]] = MappingProxyType(
    {
        assignor.name: assignor
        for assignor in (
            Assignor("range", assign_range, is_cooperative=False),
            Assignor("roundrobin", assign_round_robin, is_cooperative=False),
            Assignor("cooperative-sticky", assign_cooperative_sticky, is_cooperative=True),
        )
    }
)

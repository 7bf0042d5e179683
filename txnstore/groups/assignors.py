"""The assignors, pure: how the partitions of topics are assigned to the members of a group; Kafka's algorithms.

Each assignor gives every partition of a subscribed topic to exactly one member, one that subscribed to its topic, and
the same input gives the same result whatever order it comes in.  Its docstring says what it promises beyond that.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from txnstore.model import PartitionName

#: The partitions of each member, by its id; members without any are there too.
Assignment = Mapping[str, frozenset[PartitionName]]


@dataclass(frozen=True, slots=True)
class Subscriber:
    """A member as an assignor sees it."""

    member_id: str
    topics: frozenset[str]
    group_instance_id: str | None = None
    """The group.instance.id of a static member (KIP-345); its position in the order survives a restart."""

    held: frozenset[PartitionName] = frozenset()
    """What it owns now, or is about to get: a sticky assignor leaves it there if it can."""


def in_order(subscribers: Iterable[Subscriber]) -> list[Subscriber]:
    """Return the members in Kafka's order: static ones by their instance id, then the others by their member id."""
    return sorted(
        subscribers,
        key=lambda member: (
            (0, member.group_instance_id, member.member_id)
            if member.group_instance_id is not None
            else (1, member.member_id, "")
        ),
    )


def subscribed_partitions(members: Sequence[Subscriber], partition_counts: Mapping[str, int]) -> list[PartitionName]:
    """Return all partitions that a member subscribed to, by topic and number."""
    subscribed: frozenset[str] = frozenset().union(*(member.topics for member in members))
    return [
        PartitionName(topic, number)
        for topic in sorted(subscribed & partition_counts.keys())
        for number in range(partition_counts[topic])
    ]


class StickyAssignment:
    """An assignment under construction, which moves as little as possible away from what the members hold.

    Members are numbers here: their positions in the group's order.
    """

    def __init__(self, members: Sequence[Subscriber], partition_counts: Mapping[str, int]) -> None:
        """Leave each member what exists, what it subscribed to, and what no member before it holds."""
        self._members = members
        everything = subscribed_partitions(members, partition_counts)
        self._takers: dict[str, list[int]] = {}
        for position, member in enumerate(members):
            for topic in member.topics:
                self._takers.setdefault(topic, []).append(position)
        #: For each member, the partition numbers by topic.
        self._numbers: list[dict[str, set[int]]] = [{} for _ in members]
        self._loads = [0] * len(members)
        #: Who held a partition to begin with.
        self._former: dict[PartitionName, int] = {}
        existing = set(everything)
        for position, member in enumerate(members):
            for partition in member.held:
                if partition in existing and partition.topic in member.topics and partition not in self._former:
                    self._former[partition] = position
                    self._give(partition, position)
        self._free = [partition for partition in everything if partition not in self._former]

    def place_free_partitions(self) -> None:
        """Give each free partition to the member with the fewest; those that few members may take go first."""
        self._free.sort(key=lambda partition: len(self._takers[partition.topic]))
        for partition in self._free:
            self._give(
                partition, min(self._takers[partition.topic], key=lambda position: (self._loads[position], position))
            )
        self._free = []

    def balance(self) -> None:
        """Move partitions until no move makes the loads more equal; each makes the sum of their squares smaller."""
        while (path := self._path_to_fewer()) is not None:
            for giver, taker in itertools.pairwise(path):
                partition = self._movable(giver, taker)
                self._numbers[giver][partition.topic].discard(partition.partition)
                self._loads[giver] -= 1
                self._give(partition, taker)

    def assignment(self) -> Assignment:
        """Return what each member has now."""
        return {
            member.member_id: frozenset(
                PartitionName(topic, number) for topic, numbers in mine.items() for number in numbers
            )
            for member, mine in zip(self._members, self._numbers, strict=True)
        }

    def _give(self, partition: PartitionName, position: int) -> None:
        self._numbers[position].setdefault(partition.topic, set()).add(partition.partition)
        self._loads[position] += 1

    def _path_to_fewer(self) -> list[int] | None:
        """Return a path from a member to one with at least two fewer, over members that can pass partitions on."""
        if not self._loads:
            return None
        least = min(self._loads)
        for giver in sorted(range(len(self._loads)), key=lambda position: (-self._loads[position], position)):
            if self._loads[giver] - least < 2:  # noqa: PLR2004 - one more or less is balanced
                return None
            path = self._path_from(giver, least)
            if path is not None:
                return path
        return None

    def _path_from(self, giver: int, least: int) -> list[int] | None:
        """Return the shortest path from `giver` to the member with the fewest among those that can be reached."""
        came_from: dict[int, int | None] = {giver: None}
        best: int | None = None
        reached = deque([giver])
        while reached:
            position = reached.popleft()
            for taker in self._possible_takers(position):
                if taker in came_from:
                    continue
                came_from[taker] = position
                reached.append(taker)
                if best is None or self._loads[taker] < self._loads[best]:
                    best = taker
            if best is not None and self._loads[best] == least:
                break
        if best is None or self._loads[giver] - self._loads[best] < 2:  # noqa: PLR2004
            return None
        path, step = [], best
        while True:
            path.append(step)
            former = came_from[step]
            if former is None:
                return path[::-1]
            step = former

    def _possible_takers(self, position: int) -> list[int]:
        return sorted(
            {taker for topic, numbers in self._numbers[position].items() if numbers for taker in self._takers[topic]}
        )

    def _movable(self, giver: int, taker: int) -> PartitionName:
        """Return the partition to move: preferably one that returns to its holder, or is new to the giver."""
        candidates = (
            PartitionName(topic, number)
            for topic, numbers in self._numbers[giver].items()
            if topic in self._members[taker].topics
            for number in numbers
        )
        return max(
            candidates,
            key=lambda partition: (
                self._former.get(partition) == taker,
                self._former.get(partition) != giver,
                partition,
            ),
        )


#: From the subscribers and the number of partitions of each topic to the partitions of each member id.
AssignFunction = Callable[[Sequence[Subscriber], Mapping[str, int]], Assignment]


@dataclass(frozen=True, slots=True)
class Assignor:
    """An assignor, by its name in partition.assignment.strategy."""

    name: str
    assign: AssignFunction
    is_cooperative: bool
    """Whether members keep what stays theirs while the group rebalances (KIP-429); otherwise they release all."""


def assign_range(subscribers: Sequence[Subscriber], partition_counts: Mapping[str, int]) -> Assignment:
    """Assign each topic by itself, in ranges of consecutive partitions; the first members get one more.

    Within a topic no member has two partitions more than another.  Topics with equal numbers of partitions are
    assigned alike, so that records with the same key in both go to the same member.
    """
    members = in_order(subscribers)
    assigned: dict[str, set[PartitionName]] = {member.member_id: set() for member in members}
    for topic, partition_count in partition_counts.items():
        takers = [member for member in members if topic in member.topics]
        if not takers:
            continue
        share, left_over = divmod(partition_count, len(takers))
        first = 0
        for position, taker in enumerate(takers):
            end = first + share + (position < left_over)
            assigned[taker.member_id].update(PartitionName(topic, number) for number in range(first, end))
            first = end
    return {member_id: frozenset(partitions) for member_id, partitions in assigned.items()}


def assign_round_robin(subscribers: Sequence[Subscriber], partition_counts: Mapping[str, int]) -> Assignment:
    """Assign the partitions of all topics one by one, in turn; a member without the topic is passed over.

    With equal subscriptions no member has two partitions more than another.
    """
    members = in_order(subscribers)
    assigned: dict[str, set[PartitionName]] = {member.member_id: set() for member in members}
    turn = itertools.cycle(members)
    for partition in subscribed_partitions(members, partition_counts):
        taker = next(member for member in turn if partition.topic in member.topics)
        assigned[taker.member_id].add(partition)
    return {member_id: frozenset(partitions) for member_id, partitions in assigned.items()}


def assign_cooperative_sticky(subscribers: Sequence[Subscriber], partition_counts: Mapping[str, int]) -> Assignment:
    """Leave the members what they hold, as far as the load stays balanced.

    Balanced: no partition, and no chain of partitions from member to member, could move from one member to another that
    has at least two fewer.  With equal subscriptions the difference is at most one, no assignment as balanced takes
    fewer partitions away from their holders, and nothing is taken away when members only leave.
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

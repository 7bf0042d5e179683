"""This file is an assignment that is made by moving as little as possible, pure: who holds what, and what may move.

Members are numbers here: their places in the group's order.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence

from txnstore.groups.subscribers import Assignment, Subscriber, subscribed_partitions
from txnstore.model import TopicPartition


class StickyAssignment:
    """An assignment in the making: it begins with what the members hold and may go on holding."""

    def __init__(self, members: Sequence[Subscriber], partition_counts: Mapping[str, int]) -> None:
        """Leave everybody what exists, is subscribed to, and is held by nobody before him."""
        self._members = members
        everything = subscribed_partitions(members, partition_counts)
        self._takers: dict[str, list[int]] = {}
        for place, member in enumerate(members):
            for topic in member.topics:
                self._takers.setdefault(topic, []).append(place)
        #: Of each member the partition numbers by topic.
        self._numbers: list[dict[str, set[int]]] = [{} for _ in members]
        self._loads = [0] * len(members)
        #: Who held a partition to begin with.
        self._former: dict[TopicPartition, int] = {}
        existing = set(everything)
        for place, member in enumerate(members):
            for partition in member.held:
                if partition in existing and partition.topic in member.topics and partition not in self._former:
                    self._former[partition] = place
                    self._give(partition, place)
        self._free = [partition for partition in everything if partition not in self._former]

    def place_free_partitions(self) -> None:
        """Give what nobody holds to the member with the least, first what the fewest members may have."""
        self._free.sort(key=lambda partition: len(self._takers[partition.topic]))
        for partition in self._free:
            self._give(partition, min(self._takers[partition.topic], key=lambda place: (self._loads[place], place)))
        self._free = []

    def balance(self) -> None:
        """Move partitions until no move makes the loads more equal; each makes the sum of their squares smaller."""
        while (path := self._path_downhill()) is not None:
            for giver, taker in itertools.pairwise(path):
                partition = self._movable(giver, taker)
                self._numbers[giver][partition.topic].discard(partition.partition)
                self._loads[giver] -= 1
                self._give(partition, taker)

    def assignment(self) -> Assignment:
        """Return what each member has now."""
        return {
            member.member_id: frozenset(
                TopicPartition(topic, number) for topic, numbers in mine.items() for number in numbers
            )
            for member, mine in zip(self._members, self._numbers, strict=True)
        }

    def _give(self, partition: TopicPartition, place: int) -> None:
        self._numbers[place].setdefault(partition.topic, set()).add(partition.partition)
        self._loads[place] += 1

    def _path_downhill(self) -> list[int] | None:
        """Return a way from a member to one with two or more fewer, over members that can pass partitions on."""
        if not self._loads:
            return None
        least = min(self._loads)
        for giver in sorted(range(len(self._loads)), key=lambda place: (-self._loads[place], place)):
            if self._loads[giver] - least < 2:  # noqa: PLR2004 - one more or less is balanced
                return None
            path = self._path_from(giver, least)
            if path is not None:
                return path
        return None

    def _path_from(self, giver: int, least: int) -> list[int] | None:
        """Return the shortest way from `giver` to the member with the least among those that can be reached."""
        came_from: dict[int, int | None] = {giver: None}
        best: int | None = None
        reached = deque([giver])
        while reached:
            place = reached.popleft()
            for taker in self._possible_takers(place):
                if taker in came_from:
                    continue
                came_from[taker] = place
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

    def _possible_takers(self, place: int) -> list[int]:
        return sorted(
            {taker for topic, numbers in self._numbers[place].items() if numbers for taker in self._takers[topic]}
        )

    def _movable(self, giver: int, taker: int) -> TopicPartition:
        """Return the partition that goes: rather one that comes home, or that was not the giver's to begin with."""
        candidates = (
            TopicPartition(topic, number)
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

"""This file is what an assignor knows of a group: its members, in an order that lasts, and what they subscribed to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from txnstore.model import TopicPartition

#: The partitions of each member, by its id; members without any are there too.
Assignment = Mapping[str, frozenset[TopicPartition]]


@dataclass(frozen=True, slots=True)
class Subscriber:
    """A member as an assignor sees it."""

    member_id: str
    topics: frozenset[str]
    group_instance_id: str | None = None
    """The lasting name of a static member (KIP-345); its place in the order survives a restart."""

    held: frozenset[TopicPartition] = frozenset()
    """What it has now, or is about to get: a sticky assignor leaves it there if it can."""


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


def subscribed_partitions(members: Sequence[Subscriber], partition_counts: Mapping[str, int]) -> list[TopicPartition]:
    """Return all partitions that somebody subscribed to, by topic and number."""
    subscribed: frozenset[str] = frozenset().union(*(member.topics for member in members))
    return [
        TopicPartition(topic, number)
        for topic in sorted(subscribed & partition_counts.keys())
        for number in range(partition_counts[topic])
    ]

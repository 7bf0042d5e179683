"""This file is what a subscription comes to: the partitions of its topics and of those that its patterns match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from txnstore.clients.topic_directory import TopicDirectory
from txnstore.errors import InvalidTopic, UnknownTopicOrPartition


@dataclass(frozen=True, slots=True)
class SubscribedTopics:
    """The partitions that there are, in order, and the topics that there are not."""

    partitions: tuple[tuple[str, int], ...]
    missing: frozenset[str]
    names: frozenset[str]
    """All topics, those that there are not included: their partitions count once there are some."""


def read_subscribed_topics(
    directory: TopicDirectory, subscription: Sequence[str], *, creates_topics: bool
) -> SubscribedTopics:
    """Return the partitions of the topics and patterns (`^...`) as they are now.

    Raises:
        InvalidRequest: a pattern is not a regular expression.
        TxnStoreError: the database cannot be asked.
    """
    names = {name for name in subscription if not name.startswith("^")}
    matched: set[str] = set()
    for pattern in subscription:
        if pattern.startswith("^"):
            matched.update(directory.match(pattern))
    topics = dict(directory.refresh(names | matched))
    for name in names - topics.keys() if creates_topics else ():
        try:
            topics[name] = directory.ensure(name)
        except (UnknownTopicOrPartition, InvalidTopic):
            continue
    partitions = tuple((name, number) for name in sorted(topics) for number in range(len(topics[name].partition_ids)))
    return SubscribedTopics(partitions, frozenset(names - topics.keys()), frozenset(names | topics.keys()))

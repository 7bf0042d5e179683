"""This file is the topics and partitions that the admin client is to make: what may be asked for."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, SupportsIndex

from txnstore.log.topics import PARTITIONS_MAX

#: The number that stands for the store's default.
DEFAULT: Final = -1

_INT32: Final = range(-(2**31), 2**31)
_REPLICATION_FACTOR_MAX: Final = 10_000


class NewTopic:
    """A topic to create.

    Args:
        topic: its name.
        num_partitions: how many partitions it gets; -1: as many as the store's num.partitions says.
        replication_factor: how many copies there are to be, at least 1; ignored: the database looks after copies.
        replica_assignment: the numbers of the brokers for each partition, instead of a replication factor.
        config: its settings as text, by Kafka's names.

    Raises:
        TypeError: an argument has the wrong type.
        OverflowError: a number does not fit into 32 bits.
    """

    def __init__(
        self,
        topic: str,
        num_partitions: SupportsIndex = DEFAULT,
        replication_factor: SupportsIndex = DEFAULT,
        replica_assignment: Sequence[Sequence[int]] | None = None,
        config: Mapping[str, str] | None = None,
    ) -> None:
        self.topic = _text(topic)
        self.num_partitions = _int32(num_partitions)
        self.replication_factor = _int32(replication_factor)
        self.replica_assignment = replica_assignment
        if config is not None and not isinstance(config, dict):
            raise TypeError("config must be a dict of strings")
        self.config = config

    def __repr__(self) -> str:
        count = "" if self.num_partitions == DEFAULT else f",num_partitions={self.num_partitions}"
        return f"NewTopic(topic={self.topic}{count})"

    def __hash__(self) -> int:
        return hash((self.topic, self.num_partitions))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NewTopic):
            return NotImplemented
        return (self.topic, self.num_partitions) == (other.topic, other.num_partitions)

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, NewTopic):
            return NotImplemented
        return (self.topic, self.num_partitions) < (other.topic, other.num_partitions)


class NewPartitions:
    """More partitions for a topic.

    Args:
        topic: its name.
        new_total_count: how many partitions it is to have in all.
        replica_assignment: the numbers of the brokers for each partition that is new.

    Raises:
        TypeError: an argument has the wrong type.
        OverflowError: the number does not fit into 32 bits.
    """

    def __init__(
        self,
        topic: str,
        new_total_count: SupportsIndex,
        replica_assignment: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.topic = _text(topic)
        self.new_total_count = _int32(new_total_count)
        self.replica_assignment = replica_assignment

    def __repr__(self) -> str:
        return f"NewPartitions(topic={self.topic},new_total_count={self.new_total_count})"

    def __hash__(self) -> int:
        return hash((self.topic, self.new_total_count))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NewPartitions):
            return NotImplemented
        return (self.topic, self.new_total_count) == (other.topic, other.new_total_count)

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, NewPartitions):
            return NotImplemented
        return (self.topic, self.new_total_count) < (other.topic, other.new_total_count)


def check_new_topics(new_topics: Iterable[NewTopic]) -> list[NewTopic]:
    """Return the topics to create.

    Raises:
        TypeError: something is no NewTopic.
        ValueError: there are none, or a number is one that no topic can have.
    """
    topics = _list_of(new_topics, NewTopic)
    for topic in topics:
        if topic.num_partitions != DEFAULT and not 0 <= topic.num_partitions <= PARTITIONS_MAX:
            raise ValueError(
                f"Invalid NewTopic({topic.topic}): num_partitions out of expected range 1..{PARTITIONS_MAX} or -1 for"
                " broker default"
            )
        if not DEFAULT <= topic.replication_factor <= _REPLICATION_FACTOR_MAX:
            raise ValueError(
                f"Invalid NewTopic({topic.topic}): replication_factor out of expected range -1.."
                f"{_REPLICATION_FACTOR_MAX}"
            )
        if topic.replica_assignment:
            if topic.replication_factor != DEFAULT:
                raise ValueError("replication_factor and replica_assignment are mutually exclusive")
            if not _is_assignment(topic.replica_assignment) or len(topic.replica_assignment) != topic.num_partitions:
                raise ValueError("replica_assignment must be a list of int lists with an outer size of num_partitions")
    return topics


def check_new_partitions(new_partitions: Iterable[NewPartitions]) -> list[NewPartitions]:
    """Return the topics that get more partitions.

    Raises:
        TypeError: something is no NewPartitions.
        ValueError: there are none, or a number is one that no topic can have.
    """
    topics = _list_of(new_partitions, NewPartitions)
    for topic in topics:
        if not 1 <= topic.new_total_count <= PARTITIONS_MAX:
            raise ValueError(
                f"Invalid NewPartitions({topic.topic}): new_total_cnt out of expected range 1..{PARTITIONS_MAX}"
            )
        if topic.replica_assignment and not _is_assignment(topic.replica_assignment):
            raise ValueError(
                "replica_assignment must be a list of int lists with an outer size of new_total_count - existing"
                " partition count"
            )
    return topics


def _is_assignment(assignment: object) -> bool:
    return isinstance(assignment, list) and all(
        isinstance(replicas, list) and replicas and all(type(replica) is int for replica in replicas)
        for replicas in assignment
    )


def _list_of(given: Iterable[Any], kind: type[Any]) -> list[Any]:
    found = list(given) if isinstance(given, list | tuple | set | frozenset) else None
    if found is None:
        raise TypeError(f"Expected list of {kind.__name__} objects, not {type(given).__name__}")
    if not found:
        raise ValueError(f"Expected non-empty list of {kind.__name__} objects")
    for item in found:
        if not isinstance(item, kind):
            raise TypeError(f"Expected list of {kind.__name__} objects, not of {type(item).__name__}")
    return found


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"argument 1 must be str, not {type(value).__name__ if value is not None else None}")
    return value


def _int32(value: SupportsIndex) -> int:
    number = operator.index(value)
    if number not in _INT32:
        raise OverflowError(f"{number} does not fit into 32 bits")
    return number

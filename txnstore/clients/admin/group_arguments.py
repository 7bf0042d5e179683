"""This file is what the admin client's calls about groups check of their arguments, in confluent-kafka's words."""

from __future__ import annotations

import enum

from txnstore.clients.model.metadata import ConsumerGroupState, ConsumerGroupTopicPartitions, ConsumerGroupType
from txnstore.clients.model.topic_partition import TopicPartition


def check_group_ids(group_ids: object, purpose: str) -> list[str]:
    """Return the groups' ids; each is looked at more closely in its future.

    Raises:
        TypeError: it is no list of text.
        ValueError: it is empty, or holds something else than text.
    """
    if not isinstance(group_ids, list):
        raise TypeError(f"Expected input to be list of group ids to be {purpose}")
    if not group_ids:
        raise ValueError(f"Expected at least one group to be {purpose}")
    for group_id in group_ids:
        if not isinstance(group_id, str):
            raise ValueError(f"Expected list of group strings, not {type(group_id).__name__}")  # noqa: TRY004 - theirs
    return group_ids


def check_kinds(name: str, kinds: object, kind: type[enum.Enum]) -> frozenset[enum.Enum]:
    """Return the states or types that are asked for; none: all.

    Raises:
        TypeError: it is no set of them.
        ValueError: groups of unknown type are asked for.
    """
    if kinds is None:
        return frozenset()
    if not isinstance(kinds, set | frozenset):
        raise TypeError(f"'{name}' must be a set")
    if not all(isinstance(item, kind) for item in kinds):
        raise TypeError(f"All elements of {name} must be of type {kind.__name__}")
    if ConsumerGroupType.UNKNOWN in kinds:
        raise ValueError("UNKNOWN type is not allowed")
    return frozenset(kinds)


def check_states(states: object) -> frozenset[enum.Enum]:
    """Return the states that are asked for; see `check_kinds`."""
    return check_kinds("states", states, ConsumerGroupState)


def check_types(types: object) -> frozenset[enum.Enum]:
    """Return the types that are asked for; see `check_kinds`."""
    return check_kinds("types", types, ConsumerGroupType)


def check_requests(
    request: object, *, with_offsets: bool | None, may_be_all: bool = False
) -> tuple[list[ConsumerGroupTopicPartitions], bool]:
    """Return which partitions of which groups are meant, and whether a group or a partition was given twice.

    Args:
        request: what the caller gave.
        with_offsets: whether each partition has an offset, or none; None: that does not matter.
        may_be_all: whether a group without partitions means all of its partitions.

    Raises:
        TypeError, ValueError: it is no such list.
    """
    if request is None:
        raise TypeError("request cannot be None")
    if not isinstance(request, list):
        raise TypeError("request must be a list")
    if not request:
        raise ValueError("Expected at least one consumer group")
    twice = False
    group_ids = set()
    for item in request:
        if not isinstance(item, ConsumerGroupTopicPartitions):
            raise TypeError("Expected list of 'ConsumerGroupTopicPartitions'")
        _check_group(item)
        if item.topic_partitions is None:
            if not may_be_all:
                raise ValueError("'topic_partitions' cannot be null")
        else:
            for partition in item.topic_partitions:
                _check_partition(partition, with_offsets)
            twice |= len(set(item.topic_partitions)) < len(item.topic_partitions)
        group_ids.add(item.group_id)
    return request, twice or len(group_ids) < len(request)


def _check_group(item: ConsumerGroupTopicPartitions) -> None:
    if item.group_id is None:
        raise TypeError("'group_id' cannot be None")
    if not isinstance(item.group_id, str):
        raise TypeError("'group_id' must be a string")
    if not item.group_id:
        raise ValueError("'group_id' cannot be empty")
    partitions: object = item.topic_partitions
    if partitions is not None and not isinstance(partitions, list):
        raise TypeError("'topic_partitions' must be a list or None")
    if isinstance(partitions, list) and not partitions:
        raise ValueError("'topic_partitions' cannot be empty")


def _check_partition(partition: object, with_offsets: bool | None) -> None:
    if not isinstance(partition, TopicPartition):
        raise TypeError("Element of 'topic_partitions' must be of type TopicPartition")
    if not partition.topic:
        raise ValueError("Element of 'topic_partitions' must not have 'topic' attribute as Empty")
    if partition.partition < 0:
        raise ValueError("Element of 'topic_partitions' must not have negative 'partition' value")
    if with_offsets is True and partition.offset < 0:
        raise ValueError("Element of 'topic_partitions' must not have negative value for 'offset' field")
    if with_offsets is False and partition.offset >= 0:
        raise ValueError("Element of 'topic_partitions' must not have 'offset' value")

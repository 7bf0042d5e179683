"""This file is what several calls of the admin client check of their arguments."""

from __future__ import annotations

from txnstore.clients.model.topic_partition import TopicPartition


def check_partition(partition: object) -> None:
    """Refuse what names no partition."""
    if not isinstance(partition, TopicPartition):
        raise TypeError(f"Expected a TopicPartition, not {type(partition).__name__}")
    if not partition.topic:
        raise ValueError("the topic of a partition cannot be empty")
    if partition.partition < 0:
        raise ValueError("'partition' cannot be negative")


def check_partitions(partitions: object) -> list[TopicPartition]:
    """Return the partitions of a list that is not empty."""
    if not isinstance(partitions, list):
        raise TypeError(f"Expected a list of TopicPartition, not {type(partitions).__name__}")
    if not partitions:
        raise ValueError("Expected at least one partition")
    for partition in partitions:
        check_partition(partition)
    return partitions


def check_number(name: str, number: object, largest: int, *, smallest: int = 0) -> None:
    """Refuse what is no whole number of this range."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{name} must be int, not {type(number).__name__}")
    if not smallest <= number <= largest:
        raise ValueError(f"{name} must be from {smallest} to {largest}, not {str(number)[:40]}")

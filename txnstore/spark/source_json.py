"""This file is the JSON that options of the source hold: offsets, timestamps and partitions, by topic."""

from __future__ import annotations

import json
from typing import Any, Final

from txnstore.errors import InvalidConfiguration
from txnstore.model import OFFSET_MAX, TopicPartition

#: In place of an offset; Kafka's numbers.
LATEST: Final = -1
EARLIEST: Final = -2

_PARTITION_MAX: Final = 2**31 - 1


def read_offsets(text: str, option: str) -> dict[TopicPartition, int]:
    """Return the offsets of {"topic": {"0": 23, "1": -2}}; -2 stands for the earliest, -1 for the latest one.

    Raises:
        InvalidConfiguration: the text is something else.
    """
    example = f'{option} is JSON like {{"topic": {{"0": 23, "1": -2}}}}, with -2 for earliest and -1 for latest'
    return _numbers_by_partition(text, option, example, at_least=EARLIEST)


def read_timestamps(text: str, option: str) -> dict[TopicPartition, int]:
    """Return the times, in milliseconds, of {"topic": {"0": 1700000000000}}.

    Raises:
        InvalidConfiguration: the text is something else.
    """
    example = f'{option} is JSON like {{"topic": {{"0": 1700000000000}}}}, in milliseconds'
    return _numbers_by_partition(text, option, example, at_least=0)


def read_partitions(text: str, option: str) -> frozenset[TopicPartition]:
    """Return the partitions of {"topic": [0, 1]}.

    Raises:
        InvalidConfiguration: the text is something else.
    """
    example = f'{option} is JSON like {{"topic": [0, 1]}}'
    found = set()
    for topic, numbers in _topics(text, option, example).items():
        if type(numbers) is not list or not numbers:
            raise InvalidConfiguration(f"{example}; topic {topic[:80]!r} has no list of partitions")
        for number in numbers:
            if type(number) is not int or not 0 <= number <= _PARTITION_MAX:
                raise InvalidConfiguration(f"{example}; topic {topic[:80]!r} has a partition that is no number")
            found.add(TopicPartition(topic, number))
    return frozenset(found)


def _numbers_by_partition(text: str, option: str, example: str, *, at_least: int) -> dict[TopicPartition, int]:
    found: dict[TopicPartition, int] = {}
    for topic, by_partition in _topics(text, option, example).items():
        if type(by_partition) is not dict or not by_partition:
            raise InvalidConfiguration(f"{example}; topic {topic[:80]!r} has no partitions")
        for key, number in by_partition.items():
            if not (key.isascii() and key.isdecimal()) or int(key) > _PARTITION_MAX:
                raise InvalidConfiguration(f"{example}; {key[:20]!r} is not the number of a partition")
            if type(number) is not int or not at_least <= number <= OFFSET_MAX:
                raise InvalidConfiguration(
                    f"{example}; partition {key} of topic {topic[:80]!r} has {str(number)[:20]!r}"
                )
            found[TopicPartition(topic, int(key))] = number
    return found


def _topics(text: str, option: str, example: str) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=_without_repetitions)
    except (ValueError, RecursionError):
        raise InvalidConfiguration(f"{example}; this is not JSON, or it names the same thing twice") from None
    if type(found) is not dict or not found:
        raise InvalidConfiguration(example)
    return found


def _without_repetitions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found

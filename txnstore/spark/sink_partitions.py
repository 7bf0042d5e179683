"""This file is which partition of its topic each row of an Arrow batch goes to: the producer's rules, by the column.

Keys repeat: each distinct one is hashed once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat

import pyarrow as pa
import pyarrow.compute as pc

from txnstore.clients.producer.partition_choice import PartitionChoice
from txnstore.errors import UnknownTopicOrPartition
from txnstore.log.partitioners import partitions_of_keys
from txnstore.log.topics import Topic


class PartitionOfRows:
    """Chooses partitions for the rows of one task, as a producer with these settings does."""

    def __init__(self, partitioner: str, *, sticky_seconds: float) -> None:
        """Choose by the partitioner of this name; rows without a key stay together for `sticky_seconds`."""
        self._choice = PartitionChoice(partitioner, sticky_seconds=sticky_seconds)
        self._partitioner = partitioner
        #: Whether equal keys go to one partition.
        self._hashes = partitioner != "random"
        self._keeps_together = sticky_seconds > 0
        self._empty_is_none = partitioner == "consistent_random"

    def choose(
        self, topic: Topic, keys: pa.Array | None, given: pa.Array | None, row_count: int, now_seconds: float
    ) -> Sequence[int]:
        """Return the partition of each row.

        `keys` are binary; `given` is the column `partition`, which wins where it is not null.  `now_seconds` is of the
        monotonic clock.

        Raises:
            UnknownTopicOrPartition: the topic has no partition of a number that was given.
        """
        partition_count = len(topic.partition_ids)
        if given is not None and given.null_count == row_count:
            given = None
        if given is None:
            if partition_count == 1:
                return [0] * row_count
            return integers(self._by_key(topic.name, keys, partition_count, row_count, now_seconds))
        given = given.cast(pa.int64())
        if given.null_count:
            given = pc.coalesce(given, self._by_key(topic.name, keys, partition_count, row_count, now_seconds))
        partitions = integers(given)
        for number in Counter(partitions):
            if not 0 <= number < partition_count:
                raise UnknownTopicOrPartition(
                    f"the column 'partition' says {number} for topic {topic.name}, which has the partitions 0 to"
                    f" {partition_count - 1}"
                )
        return partitions

    def _by_key(
        self, topic: str, keys: pa.Array | None, partition_count: int, row_count: int, now_seconds: float
    ) -> pa.Array:
        choose = partial(self._choose, topic, partition_count, now_seconds)
        if keys is None or keys.null_count == row_count:
            return self._without_key(choose, row_count)
        if not self._hashes:
            return _numbers(map(choose, keys.to_pylist()))
        encoded = keys.dictionary_encode()
        distinct = encoded.dictionary.to_pylist()
        of_key: list[int | None] = list(partitions_of_keys(self._partitioner, distinct, partition_count))
        if self._empty_is_none and b"" in distinct:
            of_key[distinct.index(b"")] = None
        chosen = _numbers(of_key).take(encoded.indices)
        without_key = chosen.null_count
        if not without_key:
            return chosen
        return pc.replace_with_mask(chosen, chosen.is_null(), self._without_key(choose, without_key))

    def _without_key(self, choose: Callable[[bytes | None], int], count: int) -> pa.Array:
        if self._keeps_together:
            return _numbers(repeat(choose(None), count))
        return _numbers(choose(None) for _ in range(count))

    def _choose(self, topic: str, partition_count: int, now_seconds: float, key: bytes | None) -> int:
        return self._choice.choose(topic, key, partition_count, now_seconds)


def _numbers(numbers: Iterable[int | None]) -> pa.Array:
    return pa.array(numbers, pa.int64())


def integers(array: pa.Array) -> list[int]:
    """Return the numbers of an int64 array without nulls: many times as fast as `to_pylist`."""
    return memoryview(array.buffers()[1]).cast("q")[array.offset : array.offset + len(array)].tolist()

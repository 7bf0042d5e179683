"""This file is which partition a record without one goes to: by its key, or to the topic's partition of the moment."""

from __future__ import annotations

import random
from typing import Final

from txnstore.log.partitioners import PARTITIONERS

#: The partitioners that take an empty key for none.
_EMPTY_IS_NONE: Final = frozenset({"consistent_random"})


class PartitionChoice:
    """Chooses partitions for one producer.

    Records without a key stay together for `sticky_seconds`, so that they make full batches (KIP-480); with 0 each
    of them goes where the partitioner says.
    """

    def __init__(self, partitioner: str, *, sticky_seconds: float) -> None:
        """Choose by the partitioner of this name."""
        self._partition_of = PARTITIONERS[partitioner]
        self._empty_is_none = partitioner in _EMPTY_IS_NONE
        self._sticky_seconds = sticky_seconds
        self._random = random.Random()
        #: By topic: the partition of the moment, and until when.
        self._sticky: dict[str, tuple[int, float]] = {}

    def choose(self, topic: str, key: bytes | None, partition_count: int, now_seconds: float) -> int:
        """Return the partition of a record; `now_seconds` is of the monotonic clock."""
        if partition_count == 1:
            return 0
        if key or (key is not None and not self._empty_is_none) or self._sticky_seconds <= 0:
            return self._partition_of(key, partition_count, self._random)
        partition, until_seconds = self._sticky.get(topic, (-1, 0.0))
        if now_seconds >= until_seconds or not 0 <= partition < partition_count:
            partition = self._random.randrange(partition_count)
            self._sticky[topic] = (partition, now_seconds + self._sticky_seconds)
        return partition

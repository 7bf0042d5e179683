"""The turns of partitions in threads: one at a time of each, several side by side, and none in the way of the others.

A turn that Kafka does not answer takes up to minutes.  Slow turns, and those of partitions that are in trouble, have
places of their own, so that they do not take those of the others, and nobody waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Final

from txnstore.model import PartitionName
from txnstore.relay.errors import RelayFailed

#: How many partitions take their turns at once; those that are slow, or in trouble, come on top.
SIDE_BY_SIDE_MAX: Final = 8
#: How many are tried again at once that are in trouble.
SLOW_MAX: Final = 16
#: With those that have only become slow: when a broker falls silent, all of its partitions do in the same moment.
RUNNING_MAX: Final = 128
#: A turn that takes longer than this is slow.
SLOW_SECONDS: Final = 2.0


class Turns:
    """The turns that are under way; for one thread, which gives them."""

    def __init__(self) -> None:
        """Begin without any."""
        self._pool = ThreadPoolExecutor(RUNNING_MAX, thread_name_prefix="txnstore-relay")
        #: With the time from which each is slow.
        self._running: dict[PartitionName, tuple[Future[int], float]] = {}

    def has(self, partition: PartitionName) -> bool:
        """Return whether the partition has a turn that `finish` has not returned."""
        return partition in self._running

    def __len__(self) -> int:
        """Return of how many partitions that is so."""
        return len(self._running)

    def brisk(self) -> list[Future[int]]:
        """Return those that are neither slow nor of a partition in trouble."""
        now = time.monotonic()
        return [future for future, slow_at in self._running.values() if slow_at > now]

    def begin(self, partition: PartitionName, turn: Callable[[], int], *, is_in_trouble: bool) -> bool:
        """Begin a turn of a partition that has none, if there is a place for it; return whether there was."""
        brisk_count = len(self.brisk())
        slow_count = len(self._running) - brisk_count
        if slow_count >= SLOW_MAX if is_in_trouble else brisk_count >= SIDE_BY_SIDE_MAX:
            return False
        if len(self._running) >= RUNNING_MAX:
            return False
        slow_at = time.monotonic() + (0.0 if is_in_trouble else SLOW_SECONDS)
        self._running[partition] = self._pool.submit(turn), slow_at
        return True

    def wait(self, timeout_seconds: float, *, for_all: bool) -> None:
        """Wait until one of the brisk turns has ended, or all of them."""
        wait(self.brisk(), timeout_seconds, return_when=ALL_COMPLETED if for_all else FIRST_COMPLETED)

    def finish(self) -> int:
        """Forget the turns that have ended; return the sum of what they have returned.

        Raises:
            Exception: what one of them has raised; if several have, one that will not pass.
        """
        ended = {partition: future for partition, (future, _) in self._running.items() if future.done()}
        for partition in ended:
            del self._running[partition]
        errors = [error for future in ended.values() if isinstance(error := future.exception(), Exception)]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, RelayFailed) and error.may_pass)
        return sum(future.result() for future in ended.values())

    def close(self) -> None:
        """Wait for all of them."""
        self._pool.shutdown()

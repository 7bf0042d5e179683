"""Those who wait, without txnstore: readers of rows and members of groups by the raw driver.

They have those methods of a consumer that the measurements call, so that the same programs measure both.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from scripts.comparison import floors
from scripts.comparison.sides import Side, new_name
from scripts.comparison.wakeups import wakeups

#: The floors of those who wait for nothing, or for each other.
DRIVER: Final = "the same by the raw driver"
#: How long a reader looks no more after commits of others alone: at first, and at most, as a store's readers do.
VAIN_FIRST_SECONDS: Final = 0.001
VAIN_LAST_SECONDS: Final = 0.05


@dataclass(frozen=True)
class Row:
    """What a reader finds, as a message."""

    found: bytes

    def value(self) -> bytes:
        """Return the value of the row."""
        return self.found

    def error(self) -> None:
        """Return None: it is none."""


class Reader:
    """Waits for the rows of a partition, and reads them when woken."""

    def __init__(self, side: Side, number: int, way: str) -> None:
        """Wait from now on."""
        self._connection = floors.connect(side)
        self._wakeup = wakeups(side)[way](side, self._connection)
        self._select = floors.marked(
            side,
            "SELECT last_offset, value FROM floor_batches WHERE partition_id = ? AND last_offset > ?"
            " AND control IS NULL ORDER BY last_offset",
        )
        self._number, self._last_offset = number, -1
        self._vain_seconds = VAIN_FIRST_SECONDS
        self._values: deque[bytes] = deque()

    def poll(self, timeout_seconds: float) -> Row | None:
        """Return the next row; None if none comes."""
        deadline = time.monotonic() + timeout_seconds
        while not self._values:
            if not self._wakeup.wait(max(0.0, deadline - time.monotonic())):
                return None
            rows = self._connection.execute(self._select, (self._number, self._last_offset)).fetchall()
            if not rows:
                # Others' commits wake it, too, as long as there are any.
                if time.monotonic() >= deadline:
                    return None
                time.sleep(self._vain_seconds)
                self._vain_seconds = min(2 * self._vain_seconds, VAIN_LAST_SECONDS)
            for offset, value in rows:
                self._vain_seconds = VAIN_FIRST_SECONDS
                self._last_offset = offset
                self._values.append(value)
        return Row(self._values.popleft())

    def close(self) -> None:
        """Wait no more."""
        self._wakeup.close()
        self._connection.close()


@contextmanager
def sender(side: Side, way: str, *, in_transactions: bool) -> Iterator[Callable[[str], object]]:
    """Give what commits a record and wakes its reader: the rows of a small transaction, or one row."""
    is_function = way == floors.FUNCTION
    with closing(floors.connect(side)) as connection:
        if in_transactions:
            write = floors.function if is_function else floors.plain
            transact = write(connection, side, 0, new_name(), has_offset=False, is_told=True)
            yield lambda value: transact(value.encode())
        else:
            put, offsets = floors.put_by_function if is_function else floors.put, itertools.count()
            yield lambda value: put(connection, side, 0, next(offsets), value.encode())


class Member:
    """One of so many members of a group: each adds a row, waits until all rows are there, and removes its own."""

    def __init__(self, side: Side, group: str, count: int) -> None:
        """Hear of other members from now on."""
        self._connection = floors.connect(side)
        self._wakeup = next(iter(wakeups(side).values()))(side, self._connection)
        self._change: Any = partial(floors.change_member, self._connection, side, group, new_name())
        self._select = floors.marked(side, "SELECT count(*) FROM floor_members WHERE group_id = ?")
        self._group, self._count = group, count
        self._is_complete = False

    def subscribe(self, _: list[str]) -> None:
        """Join the group."""
        self._change(joins=True)
        self._look()

    def poll(self, timeout_seconds: float) -> None:
        """Wait for others that join."""
        if self._wakeup.wait(timeout_seconds):
            self._look()

    def assignment(self) -> list[str]:
        """Return the one thing that a member has when all are there."""
        return [self._group] if self._is_complete else []

    def close(self) -> None:
        """Leave the group."""
        self._change(joins=False)
        self._wakeup.close()
        self._connection.close()

    def _look(self) -> None:
        [[count]] = self._connection.execute(self._select, (self._group,)).fetchall()
        self._is_complete = count == self._count

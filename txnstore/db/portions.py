"""The portions: work on many rows is cut into database transactions so short that nobody waits long for one.

A portion that takes long over its rows makes the next one smaller, one that was quick makes it larger.  A
caller with little time says until when a portion may begin; it is asked after each, so that every turn gets a portion
further.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from typing import Any, Final, TypeVar

from sqlalchemy import Connection

from txnstore.db.store import ROWS_AT_ONCE, Store, pause_after_portion
from txnstore.errors import StoreBusy, WriteConflict
from txnstore.late_import import collecting_later

Result = TypeVar("Result")
Place = TypeVar("Place")
Key = TypeVar("Key")

#: About how many bytes of batches one portion changes at most: SQLite frees them page by page.
BYTES_AT_ONCE: Final = 1024 * 1024
#: How many rows one look finds; what is left is found by the next one.
FOUND_MAX: Final = 500
#: How long a portion is to take over its rows: others wait so long and for the commit, and for those before them.
HELD_SECONDS: Final = 0.01
#: So long a commit may take before it counts, too: it waits for the disk, whatever was done.
COMMIT_SECONDS: Final = 0.08
#: How many rows and bytes the first portion of a turn that has little time takes at most.
FIRST_ROWS: Final = 25
FIRST_BYTES: Final = 128 * 1024
#: No portion becomes smaller than that where nobody waits for the end: it would take as long, on a slow disk.
LEAST_ROWS: Final = 8
LEAST_BYTES: Final = 128 * 1024
#: A turn that has little time does not wait longer than this for a lock of somebody at work.
LOCK_TIMEOUT_MS: Final = 100


def write_without_a_break(store: Store, work: Callable[[Connection], Result], **options: Any) -> Result:
    """Run `work` as `Store.write` does; where all writers wait meanwhile, garbage is looked for only after the commit.

    The libraries alone are 80,000 objects, which a collection looks through in 30 ms: longer than most portions.
    """
    if not store.backend.has_one_writer:
        return store.write(work, **options)
    with ExitStack() as held:

        def uncollected(connection: Connection) -> Result:
            # Not before: the wait for the lock may be long.
            held.enter_context(collecting_later())
            return work(connection)

        return store.write(uncollected, **options)


def undisturbed_seconds() -> float:
    """Return a time that stands still while this thread waits for a processor, as far as the system counts that.

    Linux does.  A portion of half the size waits as long for its turn, so how long that is says nothing of its size: on
    SQLite, where this thread does the work, a machine that others kept busy would make the smallest portions, and fall
    behind those who write.
    """
    try:
        # What it ran, what it waited for its turn, in nanoseconds, and how often it ran.
        with open("/proc/thread-self/schedstat", "rb") as counts:  # noqa: PTH123 - called twice for every portion
            waited_seconds = int(counts.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        waited_seconds = 0.0
    return time.monotonic() - waited_seconds


class Portions:
    """How much the next portion takes, and until when there may be one; for one thread."""

    def __init__(
        self,
        *,
        seconds: float = math.inf,
        held_seconds: float = HELD_SECONDS,
        rows_max: int | None = None,
        stop: threading.Event | None = None,
        monotonic_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin no portion once so many seconds have passed, or `stop` is set; by default go on until all is done.

        A portion is to take about `held_seconds` over its rows, and takes `rows_max` of them at most: by default
        ROWS_AT_ONCE.
        """
        self.is_bounded = seconds < math.inf
        """Whether others wait for the end: then portions begin small, and no lock is waited for."""

        self.rows = FIRST_ROWS if self.is_bounded else ROWS_AT_ONCE
        """How many rows the next portion takes at most."""

        self.size_bytes = FIRST_BYTES if self.is_bounded else BYTES_AT_ONCE
        """About how many bytes it changes at most."""

        self.was_told_over = False
        """Whether the caller has heard that no further portion may begin: something may be left."""

        self.was_busy = False
        """Whether something was left because somebody at work held it."""

        self._held_seconds = held_seconds
        self._least = (1, 1) if self.is_bounded else (LEAST_ROWS, LEAST_BYTES)
        self._rows_max = ROWS_AT_ONCE if rows_max is None else rows_max
        self._stop = stop
        self._monotonic_seconds = monotonic_seconds
        #: Time that is made up, by a test, is nobody's but its own.
        self._work_seconds = undisturbed_seconds if monotonic_seconds is time.monotonic else monotonic_seconds
        self._until_seconds = monotonic_seconds() + seconds

    def resized(self, rows: int, *, rows_max: int, held_seconds: float, least: tuple[int, int] = (1, 1)) -> Portions:
        """Return portions of another size that may begin as long as these: for what has rows of another kind.

        None becomes smaller than `least`: so many rows, and bytes.
        """
        resized = copy(self)
        resized.rows = rows
        resized._rows_max, resized._held_seconds = rows_max, held_seconds  # noqa: SLF001 - of its own class
        resized._least = least  # noqa: SLF001 - of its own class
        return resized

    @property
    def is_stopped(self) -> bool:
        """Whether the caller was told to stop."""
        return self._stop is not None and self._stop.is_set()

    @property
    def left_seconds(self) -> float:
        """How long a portion may still begin."""
        if self.is_stopped:
            return 0.0
        return max(0.0, self._until_seconds - self._monotonic_seconds())

    @property
    def is_over(self) -> bool:
        """Whether no further portion may begin; for a caller with more to do: it is noted that it has heard so."""
        is_over = self.left_seconds <= 0
        self.was_told_over = self.was_told_over or is_over
        return is_over

    def write(
        self,
        store: Store,
        work: Callable[[Connection], Result],
        *,
        wakes_readers: bool = False,
        retry_timeout_ms: int | None = None,
        is_awaited: bool = False,
        is_apart: bool = False,
        goes_on: Callable[[Result], bool] = lambda _: True,
    ) -> Result:
        """Run one portion as `Store.write` does, then let others go first: for a moment, if it `is_awaited` by others.

        One that `is_apart` locks no row that anybody else wants: others are let go first only where all writers wait
        for each other.  Unless somebody waits for the end, only there it is kept short, too.  After the last one, which
        does not go on, nobody need be let go first.

        Raises:
            TxnStoreError: see `Store.write`; the portions before stay done.
        """
        began = work_began = worked_seconds = 0.0

        def timed(connection: Connection) -> Result:
            # From here on others wait; before, this one did.
            nonlocal began, work_began, worked_seconds
            began, work_began = self._monotonic_seconds(), self._work_seconds()
            result = work(connection)
            worked_seconds = self._work_seconds() - work_began
            return result

        limits = None
        if self.is_bounded:
            limits = replace(store.limits, lock_timeout_ms=min(LOCK_TIMEOUT_MS, store.limits.lock_timeout_ms))
            retry_timeout_ms = LOCK_TIMEOUT_MS if retry_timeout_ms is None else retry_timeout_ms
        result = write_without_a_break(
            store, timed, wakes_readers=wakes_readers, retry_timeout_ms=retry_timeout_ms, limits=limits
        )
        held_seconds = self._monotonic_seconds() - began
        others_wait = store.backend.has_one_writer or not is_apart
        if others_wait or self.is_bounded:
            self._adapt(max(worked_seconds, self._work_seconds() - work_began - COMMIT_SECONDS))
        if others_wait and self.left_seconds > 0 and goes_on(result):
            pause_after_portion(0 if is_awaited else held_seconds)
        return result

    def write_unless_busy(self, store: Store, work: Callable[[Connection], Result], busy: Result) -> Result:
        """Do the same; a caller with little time gets `busy` where somebody at work holds the lock."""
        try:
            return self.write(store, work)
        except (StoreBusy, WriteConflict):
            if not self.is_bounded:
                raise
            self.was_busy = True
            return busy

    def forget(
        self,
        store: Store,
        find: Callable[[Connection], Mapping[Place, Sequence[Key]]],
        forget: Callable[[Place, Sequence[Key]], Callable[[Connection], int]],
        *,
        rows_max: int,
    ) -> int:
        """Do away with what is found, each portion within one place; return how many rows.

        At least `rows_max`, which one look finds, or all that there are, or what there is time for.
        """
        forgotten = 0
        while forgotten < rows_max:
            before = forgotten
            found = store.read(find)
            for place, left in found.items():
                while left:
                    some, left = left[: self.rows], left[self.rows :]  # noqa: PLW2901 - what is left of it
                    forgotten += self.write_unless_busy(store, forget(place, some), 0)
                    if self.is_over:
                        return forgotten
            if sum(map(len, found.values())) < rows_max or forgotten == before:
                break
        return forgotten

    def _adapt(self, worked_seconds: float) -> None:
        if worked_seconds > 2 * self._held_seconds:
            least_rows, least_bytes = self._least
            self.rows = max(min(self.rows, least_rows), self.rows // 2)
            self.size_bytes = max(min(self.size_bytes, least_bytes), self.size_bytes // 2)
        elif worked_seconds < self._held_seconds / 2:
            self.rows = min(self._rows_max, 2 * self.rows)
            self.size_bytes = min(BYTES_AT_ONCE, 2 * self.size_bytes)

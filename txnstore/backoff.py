"""The pauses between tries of what failed and may pass: longer each time, and partly random."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

from txnstore.errors import TxnStoreError

#: From here on pauses grow no longer, whatever their bound.
_DOUBLINGS_MAX: Final = 16


class Backoff:
    """The pauses between tries of one thing: longer each time, until one succeeds."""

    def __init__(
        self,
        first_seconds: float,
        longest_seconds: float,
        *,
        report: Callable[[TxnStoreError], object] | None = None,
    ) -> None:
        """Begin with short pauses; `report` hears of each error that a pause follows."""
        self.not_before_seconds = 0.0
        """When the next try is wanted, by the monotonic clock."""
        self.is_pausing = False
        """Whether the last try failed."""
        self.trouble: TxnStoreError | None = None
        """Why it failed, if that was told."""

        self._first_seconds = first_seconds
        self._longest_seconds = longest_seconds
        self._report = report
        self._tries = 0
        self._random = random.Random()

    def retry_later(self, error: TxnStoreError) -> None:
        """Let a pause follow, longer each time, and report that there is trouble."""
        self.trouble = error
        self.back_off()
        if self._report is not None:
            self._report(error)

    def back_off(self) -> float:
        """Let a pause follow; return how many seconds it lasts."""
        longest_seconds = min(self._first_seconds * (1 << self._tries), self._longest_seconds)
        self.is_pausing = True
        self._tries = min(self._tries + 1, _DOUBLINGS_MAX)
        # Half of it is random, so that clients that met once do not meet again.
        pause_seconds = longest_seconds * self._random.uniform(0.5, 1)
        self.not_before_seconds = time.monotonic() + pause_seconds
        return pause_seconds

    def succeeded(self) -> None:
        """Begin with short pauses again."""
        self._tries = 0
        self.is_pausing = False
        self.trouble = None
        self.not_before_seconds = 0.0

    def another(self) -> Backoff:
        """Return pauses of the same lengths for something else that is tried."""
        return Backoff(self._first_seconds, self._longest_seconds, report=self._report)

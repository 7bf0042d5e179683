"""The clock that tests set by hand."""

from __future__ import annotations

import threading


class ManualClock:
    """A `txnstore.clock.Clock` whose time passes only when a test says so.

    Several threads may read and move it at once.
    """

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        """Make a clock that shows `now_ms`, in milliseconds since 1970."""
        # A client that is collected asks for the time, perhaps within a call that asks for it.
        self._lock = threading.RLock()
        self._now_ms = now_ms

    def now_ms(self) -> int:
        """Return milliseconds since 1970."""
        with self._lock:
            return self._now_ms

    def advance(self, milliseconds: int) -> int:
        """Move the clock on and return the new time; a negative number is a clock that was set back."""
        with self._lock:
            self._now_ms += milliseconds
            return self._now_ms

    def __repr__(self) -> str:
        """Show the time, for messages of failed tests."""
        return f"ManualClock(now_ms={self.now_ms()})"

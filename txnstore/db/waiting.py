"""Waiting for news: how a reader learns of commits without asking all the time.

A wake-up is a hint and nothing more: whoever is woken reads again, and whoever is not looks again by itself after
a while.  So a lost, late or forged one costs time, never a record.
"""

from __future__ import annotations

from typing import Final, Protocol

#: A reader that nobody wakes looks again after this long at first, then ever more rarely.
POLL_FIRST_MS: Final = 1
POLL_LAST_MS: Final = 40


class Waiter(Protocol):
    """One reader's place to wait; for one thread, but for `wake`."""

    def wait(self, timeout_ms: int) -> bool:
        """Return True as soon as something may have been committed since the last call, False after `timeout_ms`.

        Commits between two calls count: the second one returns at once.
        """
        ...

    def wake(self) -> None:
        """Let the wait that is under way, or else the next one, return True at once; for any thread."""
        ...

    def close(self) -> None:
        """Give back what it holds; a second call does nothing."""
        ...


class Announcer(Protocol):
    """Wakes the readers that wait, in this process and others; for all threads."""

    def announce(self) -> None:
        """Say that something was committed; returns at once."""
        ...

    def close(self, timeout_seconds: float) -> None:
        """Give back what it holds; what is due is told for at most `timeout_seconds`."""
        ...

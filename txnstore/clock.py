"""The clock: nothing else in txnstore asks what time it is.

Deadlines are written and compared with one clock only, the database server's, so that clients with wrong clocks
abort nobody.  A statement that needs the time contains `db.store.server_now_ms()`; the store's `Clock` decides
what that becomes.
"""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """A source of time that stands in for the database server's clock."""

    def now_ms(self) -> int:
        """Return milliseconds since 1970."""
        ...

"""This file is the pace at which somebody looks after the outbox: often while rows come, rarely while none do."""

from __future__ import annotations

from typing import Final

from txnstore.db.store import Store
from txnstore.errors import StoreBusy
from txnstore.log.outbox.rows import has_outbox_rows
from txnstore.log.outbox.sequencer import sequence_outbox

#: Between two looks: after something was found, and at last.
PAUSE_FIRST_SECONDS: Final = 0.005
PAUSE_LAST_SECONDS: Final = 0.2
#: How long a round waits for a database whose write lock somebody holds; then it is tried at the next look.
TRY_TIMEOUT_MS: Final = 500


class OutboxPoller:
    """Looks at one store's outbox again and again; for one thread, which sleeps in between as it is told."""

    def __init__(self, store: Store) -> None:
        """Look after the outbox of `store`."""
        self._store = store
        self._pause_seconds = PAUSE_FIRST_SECONDS
        self.moved_count = 0
        """How many rows it has moved."""

    def turn(self) -> float:
        """Look, move a round of rows if there are some, and return in how many seconds to look again.

        Raises:
            TxnStoreError: the database refused or cannot be reached; look again later.
        """
        if not self._store.read(has_outbox_rows, retry_timeout_ms=TRY_TIMEOUT_MS):
            return self._next_pause()
        try:
            done = sequence_outbox(self._store, retry_timeout_ms=TRY_TIMEOUT_MS)
        except StoreBusy:
            # Somebody has the whole database for himself (SQLite).
            return self._next_pause()
        self.moved_count += done.moved_count
        if done.is_busy:
            return self._next_pause()
        self.hurry()
        return 0.0 if done.has_more else PAUSE_FIRST_SECONDS

    def hurry(self) -> None:
        """Look often again: rows are about to come."""
        self._pause_seconds = PAUSE_FIRST_SECONDS

    def _next_pause(self) -> float:
        pause_seconds = self._pause_seconds
        self._pause_seconds = min(2 * pause_seconds, PAUSE_LAST_SECONDS)
        return pause_seconds

"""This file is how a consumer helps applications that write to the outbox: what waits there becomes records.

It does so when it has nothing to read, so the rows that it waits for may be there.  Nobody relies on it: whoever
looks finds what others have left.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from txnstore.db.store import Store
from txnstore.errors import StoreBusy, StoreClosed, TxnStoreError
from txnstore.log.outbox_rows import has_outbox_rows
from txnstore.log.outbox_sequencer import sequence_outbox

#: A consumer looks this often although it has nothing to read from: the topic it waits for may be made of a row.
LOOK_SECONDS: Final = 5.0
#: After an error; one that may only read never succeeds.
PAUSE_SECONDS: Final = 60.0


class OutboxHelp:
    """Looks at the outbox of one database that a consumer reads; for its fetching thread alone."""

    def __init__(
        self,
        store: Callable[[], Store],
        logger: logging.Logger,
        *,
        monotonic_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        """Help the store that `store` returns, at each look."""
        self._store = store
        self._logger = logger
        self._monotonic_seconds = monotonic_seconds
        self._looked_at = monotonic_seconds()
        self._paused_until = 0.0

    def look_now_and_then(self) -> None:
        """Look, unless that was done a moment ago."""
        if self._monotonic_seconds() - self._looked_at >= LOOK_SECONDS:
            self.look()

    def look(self) -> None:
        """Move a round of rows if some wait and nobody else is at it; readers, this one too, are told of them."""
        now = self._looked_at = self._monotonic_seconds()
        if now < self._paused_until:
            return
        try:
            store = self._store()
            if store.read(has_outbox_rows, retry_timeout_ms=0):
                sequence_outbox(store, retry_timeout_ms=0)
        except (StoreBusy, StoreClosed):
            # Somebody else is writing (SQLite), or this consumer ends.
            return
        except TxnStoreError as error:
            self._paused_until = now + PAUSE_SECONDS
            self._logger.debug("could not help with the outbox: %s", error)

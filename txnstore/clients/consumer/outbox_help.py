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
from txnstore.log.outbox.rows import has_outbox_rows
from txnstore.log.outbox.sequencer import sequence_outbox

#: A consumer looks this often although it has nothing to read from: the topic it waits for may be made of a row.
LOOK_SECONDS: Final = 5.0
#: Where each commit wakes readers (SQLite), one of them may be the outbox's. Elsewhere nobody is woken by that, and
#: it is asked for at most this often.
ASK_AGAIN_SECONDS: Final = 0.1
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

    def asks(self) -> bool:
        """Return whether the reading that comes now is to ask whether rows wait; if they do, `move` them.

        Raises:
            TxnStoreError: the database cannot be reached.
        """
        now = self._monotonic_seconds()
        is_told = self._store().backend.name == "sqlite"
        if now < self._paused_until or (not is_told and now - self._looked_at < ASK_AGAIN_SECONDS):
            return False
        self._looked_at = now
        return True

    def look(self) -> None:
        """Move a round of rows if some wait and nobody else is at it; readers, this one too, are told of them."""
        self._looked_at = self._monotonic_seconds()
        self._try(_look)

    def move(self) -> None:
        """Move a round of rows, of which a reading has told, unless somebody else is at it."""
        self._try(_move)

    def _try(self, work: Callable[[Store], None]) -> None:
        now = self._monotonic_seconds()
        if now < self._paused_until:
            return
        try:
            work(self._store())
        except (StoreBusy, StoreClosed):
            # Somebody else is writing (SQLite), or this consumer ends.
            return
        except TxnStoreError as error:
            self._paused_until = now + PAUSE_SECONDS
            self._logger.debug("could not help with the outbox: %s", error)


def _look(store: Store) -> None:
    if store.read(has_outbox_rows, retry_timeout_ms=0):
        _move(store)


def _move(store: Store) -> None:
    sequence_outbox(store, retry_timeout_ms=0)

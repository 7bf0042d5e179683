"""The journal of transactions: with entries that are old enough to go, and without those of what is over."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sqlalchemy import delete, insert

from txnstore.db.schema import transaction_log
from txnstore.db.store import Store
from txnstore.testing.manual_clock import ManualClock

ENTRIES = 120
#: Of so many the journal is kept.
LAST_ONES = 4
_DAY_MS = 86_400_000


def add_old_entries(store: Store, clock: ManualClock) -> None:
    """Add so many entries, and let the time pass for which they are kept."""
    entry = {
        "transactional_id": "id",
        "producer_epoch": 0,
        "state": 4,
        "first_state": 1,
        "timeout_ms": 1,
        "start_ms": 1,
        "update_ms": clock.now_ms(),
        "reason": "test",
    }
    entries = [{**entry, "transaction_number": number, "producer_id": number} for number in range(ENTRIES)]
    store.write(lambda connection: connection.execute(insert(transaction_log), entries))
    clock.advance(8 * _DAY_MS)


@dataclass
class ShortJournal:
    """Forgets transactional ids that are done with, but for the last ones, as the maintenance does after some time.

    The checker compares all that the journal has, each time: with every id of a test that makes hundreds, that was half
    of what the test took.
    """

    store: Store
    _done: deque[str] = field(default_factory=deque)

    def done(self, transactional_id: str) -> None:
        """Take note that an id is done with; nobody asks any more how its transactions ended."""
        self._done.append(transactional_id)
        if len(self._done) < 2 * LAST_ONES:
            return
        old = [self._done.popleft() for _ in range(LAST_ONES)]
        forgotten = delete(transaction_log).where(transaction_log.c.transactional_id.in_(old))
        self.store.write(lambda connection: connection.execute(forgotten))

"""A journal of transactions whose entries are old enough to go: work for the maintenance."""

from __future__ import annotations

from sqlalchemy import insert

from txnstore.db.schema import transaction_log
from txnstore.db.store import Store
from txnstore.testing.manual_clock import ManualClock

ENTRIES = 120
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

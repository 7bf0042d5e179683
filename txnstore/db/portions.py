"""The portion: work on many rows cut into database transactions so short that nobody waits long for one.

Whoever waits for the write lock of SQLite asks for it again and again, so it is left free between two portions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from sqlalchemy import Connection

from txnstore.db.store import CONTENTION_PAUSE_SECONDS, Store

Item = TypeVar("Item")
Result = TypeVar("Result")

#: How many rows one portion deletes at most.
ROWS_AT_ONCE: Final = 200
#: How many values one statement lists: SQLite takes 32,766 parameters, PostgreSQL 65,535.
LISTED_MAX: Final = 10_000
#: The pause after a portion: as long as it took, but long enough for others to ask for the lock a few times.
_PAUSE_MIN_SECONDS: Final = 4 * CONTENTION_PAUSE_SECONDS
_PAUSE_MAX_SECONDS: Final = 0.02


def write_portion(store: Store, work: Callable[[Connection], Result], *, retry_timeout_ms: int | None = None) -> Result:
    """Run one portion as `Store.write` does, then let others go first.

    Raises:
        TxnStoreError: see `Store.write`; the portions before stay done.
    """
    began = time.monotonic()
    result = store.write(work, retry_timeout_ms=retry_timeout_ms)
    time.sleep(min(max(time.monotonic() - began, _PAUSE_MIN_SECONDS), _PAUSE_MAX_SECONDS))
    return result


def chunks(items: Sequence[Item], size: int = LISTED_MAX) -> Iterator[Sequence[Item]]:
    """Cut a list that grows with the data into parts that one statement takes."""
    return (items[start : start + size] for start in range(0, len(items), size))

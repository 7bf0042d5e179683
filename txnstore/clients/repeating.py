"""This file is how a client runs a change that may be made twice without harm: again until it is known to be made."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from sqlalchemy import Connection

from txnstore.db.store import Store
from txnstore.errors import OutcomeUnknown, StoreBusy, StoreUnavailable, WriteConflict

Result = TypeVar("Result")

#: A store that has been closed is noticed after this long at most.
_TRY_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 0.05
_AGAIN: Final = (OutcomeUnknown, StoreBusy, StoreUnavailable, WriteConflict)


def write_repeatable(
    store: Store, work: Callable[[Connection], Result], *, timeout_seconds: float, wakes_readers: bool = False
) -> Result:
    """Run `work`, which may run twice, in one database transaction; again if nobody knows whether it was committed.

    With `wakes_readers`, waiting readers are told afterwards.

    Raises:
        TxnStoreError: the database refused, or could not be reached in time; OutcomeUnknown only if the last try ended
            so.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        left_seconds = deadline - time.monotonic()
        try:
            retry_timeout_ms = int(max(0.0, min(left_seconds, _TRY_SECONDS)) * 1000)
            return store.write(work, wakes_readers=wakes_readers, retry_timeout_ms=retry_timeout_ms)
        except _AGAIN:
            if left_seconds <= _TRY_SECONDS:
                raise
        time.sleep(_PAUSE_SECONDS)

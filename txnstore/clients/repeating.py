"""This file is how a client runs a change that may be made twice without harm: again until it is known to be made."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from sqlalchemy import Connection

from txnstore.db.store import Store
from txnstore.errors import OutcomeUnknown

Result = TypeVar("Result")

_PAUSE_SECONDS: Final = 0.05


def write_repeatable(store: Store, work: Callable[[Connection], Result], *, timeout_seconds: float) -> Result:
    """Run `work`, which may run twice, in one database transaction; again if nobody knows whether it was committed.

    Raises:
        TxnStoreError: the database refused, or could not be reached in time.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        left_seconds = max(0.0, deadline - time.monotonic())
        try:
            return store.write(work, retry_timeout_ms=int(left_seconds * 1000))
        except OutcomeUnknown:
            if left_seconds <= _PAUSE_SECONDS:
                raise
        time.sleep(_PAUSE_SECONDS)

"""Another try of a sink's step whose outcome is not known: each step recognises what it has done."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from txnstore.backoff import Backoff
from txnstore.errors import OutcomeUnknown

Result = TypeVar("Result")
#: Between two tries.
_PAUSE_FIRST_SECONDS: Final = 0.1
_PAUSE_LAST_SECONDS: Final = 0.5


def repeat_while_unknown(step: Callable[[int], Result], timeout_ms: int) -> Result:
    """Return what `step` returns, repeated while its outcome is not known; it recognises what it has done.

    It is given how many milliseconds it may try the database.

    Raises:
        OutcomeUnknown: it was still not known after `timeout_ms`.
        TxnStoreError: what else the step raises.
    """
    deadline = time.monotonic() + timeout_ms / 1000
    backoff = Backoff(_PAUSE_FIRST_SECONDS, _PAUSE_LAST_SECONDS)
    while True:
        left_ms = max(0, int((deadline - time.monotonic()) * 1000))
        try:
            return step(left_ms)
        except OutcomeUnknown:
            pause_seconds = backoff.back_off()
            if time.monotonic() + pause_seconds >= deadline:
                raise
        time.sleep(pause_seconds)

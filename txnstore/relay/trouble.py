"""This file is trouble that may pass: how long a relay waits before it tries again, and for how long it does."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Final

from txnstore.errors import TxnStoreError
from txnstore.relay.errors import KafkaUnavailable, RelayFailed

PAUSE_FIRST_SECONDS: Final = 0.1
PAUSE_LAST_SECONDS: Final = 5.0

_log = logging.getLogger(__name__)


def may_pass(error: Exception) -> bool:
    """Return whether starting over from the position that is read back may help."""
    if isinstance(error, TxnStoreError):
        return error.retriable or error.outcome_unknown
    return isinstance(error, KafkaUnavailable)


class Trouble:
    """The trouble of one place: pauses that grow, and an end of patience; for one thread at a time."""

    def __init__(
        self, what: str, patience_seconds: float | None, *, monotonic_seconds: Callable[[], float] = time.monotonic
    ) -> None:
        """`what` is said in messages; None is patience without an end."""
        self._what = what
        self._patience_seconds = patience_seconds
        self._monotonic_seconds = monotonic_seconds
        self._pause_seconds = 0.0
        self._since: float | None = None
        self._until = 0.0

    def met(self, error: Exception) -> None:
        """Note an error: wait before the next try.

        Raises:
            RelayFailed: there has been nothing but trouble for longer than the patience.
        """
        now = self._monotonic_seconds()
        if self._since is None:
            self._since = now
            _log.warning("%s: %s; trying again", self._what, error)
        if self._patience_seconds is not None and now - self._since > self._patience_seconds:
            raise RelayFailed(f"{self._what}: {error}", may_pass=True) from None
        self._pause_seconds = min(max(self._pause_seconds * 2, PAUSE_FIRST_SECONDS), PAUSE_LAST_SECONDS)
        self._until = now + self._pause_seconds * random.uniform(0.5, 1)

    def is_over(self) -> bool:
        """Return whether it is time for a try."""
        return self._monotonic_seconds() >= self._until

    def left_seconds(self) -> float:
        """Return how long it is until the next try."""
        return max(0.0, self._until - self._monotonic_seconds())

    def passed(self) -> None:
        """Note that a try went well."""
        if self._since is not None:
            _log.info("%s: goes on", self._what)
        self._since = None
        self._pause_seconds = 0.0
        self._until = 0.0

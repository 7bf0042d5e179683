"""The errors that end a relay, with texts for its operator, and trouble that may pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from txnstore.backoff import Backoff
from txnstore.errors import TxnStoreError
from txnstore.trouble import RepeatedTrouble


class RelayFailed(Exception):
    """The relay cannot go on; what it has copied so far is copied once."""

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        """With `may_pass`, the same relay may be started again as it is: what was in the way may be gone."""
        super().__init__(message)
        self.may_pass = may_pass


class RelayFenced(RelayFailed):
    """Another relay of the same name has taken over."""


class KafkaUnavailable(Exception):
    """The Kafka cluster did not do what it was asked for, and may do so later; nothing is known of what it did."""


#: Hears of the error that ends a relay, before clients are closed and others waited for, which may take long.
Failing = Callable[[Exception], object]

PAUSE_FIRST_SECONDS: Final = 0.1
PAUSE_LAST_SECONDS: Final = 5.0

_log = logging.getLogger(__name__)


def may_pass(error: Exception) -> bool:
    """Return whether starting over from the position that is read back may help."""
    if isinstance(error, TxnStoreError):
        return error.retriable or error.outcome_unknown
    return isinstance(error, KafkaUnavailable)


class Patience:
    """How long a relay puts up with trouble in one place: pauses that grow, and an end; for one thread at a time."""

    def __init__(
        self, what: str, patience_seconds: float | None, *, monotonic_seconds: Callable[[], float] = time.monotonic
    ) -> None:
        """Name the place in messages as `what`; None is patience without an end."""
        self._what = what
        self._patience_seconds = patience_seconds
        self._monotonic_seconds = monotonic_seconds
        self._backoff = Backoff(PAUSE_FIRST_SECONDS, PAUSE_LAST_SECONDS)
        self._since: float | None = None
        self._repeated = RepeatedTrouble(monotonic_seconds=monotonic_seconds)
        self._until = 0.0

    def met(self, error: Exception) -> None:
        """Note an error: wait before the next try.

        Raises:
            RelayFailed: there has been nothing but trouble for longer than the patience.
        """
        now = self._monotonic_seconds()
        if self._since is None:
            self._since = now
        if self._repeated.may_be_told():
            since = f", for {now - self._since:.0f} seconds now" if now > self._since else ""
            _log.warning(
                "%s: %s; trying again%s",
                self._what,
                error,
                since,
                extra={"event": "relay_trouble", "relay": self._what, "seconds": now - self._since},
            )
        if self._patience_seconds is not None and now - self._since > self._patience_seconds:
            raise RelayFailed(f"{self._what}: {error}", may_pass=True) from None
        self._until = now + self._backoff.back_off()

    @property
    def is_on(self) -> bool:
        """Whether the last try failed."""
        return self._since is not None

    def is_over(self) -> bool:
        """Return whether it is time for a try."""
        return self._monotonic_seconds() >= self._until

    def left_seconds(self) -> float:
        """Return how long it is until the next try."""
        return max(0.0, self._until - self._monotonic_seconds())

    def passed(self) -> None:
        """Note that a try succeeded."""
        if self._repeated.passed():
            _log.info("%s: going on", self._what, extra={"event": "relay_going_on", "relay": self._what})
        self._since = None
        self._backoff.succeeded()
        self._until = 0.0

"""The lease of a member: how long it may still treat its partitions as its own, by its own clock."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Final

from txnstore.clients.outlet import CLOCK_ID, Outlet


def _awake_and_asleep_seconds() -> Callable[[], float]:
    """Return a clock that goes on while the machine sleeps, where there is one: the group's clock does too."""
    if CLOCK_ID is None:
        return time.monotonic
    return functools.partial(time.clock_gettime, CLOCK_ID)


#: Seconds by a clock that only moves forward; its zero means nothing.
lease_seconds: Final = _awake_and_asleep_seconds()


class Lease:
    """The time that a member has left unless its group hears from it again.

    It counts from the moment at which a request was *sent*, so it ends before the group's own patience does.
    """

    def __init__(self, duration_seconds: float, outlet: Outlet) -> None:
        """Begin without a lease; the outlet knows when it ends, by `lease_seconds`."""
        self.duration_seconds = duration_seconds
        self._outlet = outlet

    def renew(self, sent_at: float) -> None:
        """Count from `sent_at`, when a request was sent that the group has answered since."""
        self._outlet.lease_ends_at = sent_at + self.duration_seconds

    def drop(self) -> None:
        """Have no lease: there is nothing to lose."""
        self._outlet.lease_ends_at = math.inf

"""The outlet of a consumer: what poll() hands out without its lock, and the times that it keeps; in C if built.

While nothing else is to be done, a poll() asks only whether the outlet is open, whether there are events, and for a
member of a group whether its lease lasts: in C that is one call.  The subscription opens the outlet over the rest of a
batch but its last record, and closes it before anything changes.  In Python it is never open.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sized
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from txnstore import bulk
from txnstore.clients.model.message import Message

_Poll = TypeVar("_Poll", bound=Callable[..., Any])

#: The clock that leases go by, which goes on while the machine sleeps where there is such a one; None: the monotonic.
CLOCK_ID: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", None)
_NO_CLOCK: Final = -1


class OutletInPython:
    """Is never open, and keeps the times; the part that there is in C as well."""

    __slots__ = ("lease_ends_at", "polled_at")

    def __init__(self, events: Sized, clock_id: int) -> None:
        """Hand nothing out while there are events."""
        self.polled_at = 0.0
        """When the application has polled last, if it is a member's consumer."""
        self.lease_ends_at = math.inf
        """From when on the group may have given the partitions to another member."""

    def open(self, messages: Iterator[Message], last_offset: int, is_timed: bool, /) -> None:
        """Hand these messages out, up to the one before that with the last offset."""

    def close(self) -> None:
        """Hand nothing out any more, until it is opened again."""


class PollsInPython:
    """What `Consumer` is made of where poll() is not in C."""

    _outlet: Outlet


if TYPE_CHECKING:
    Outlet = OutletInPython
    Polls = PollsInPython
else:
    Outlet = bulk.core.Outlet if bulk.IN_C else OutletInPython
    Polls = bulk.core.Polls if bulk.IN_C else PollsInPython


class _AtLength:
    """Names a method of a class anew, and puts the one of its name in C in its place, which calls it."""

    def __init__(self, poll: Callable[..., Any]) -> None:
        self._poll = poll

    def __set_name__(self, owner: type, name: str) -> None:
        setattr(owner, f"_{name}_at_length", self._poll)
        # Its own: see `own_method`.
        setattr(owner, name, bulk.core.own_method(owner, vars(Polls)[name]))


def short_in_c(poll: _Poll) -> _Poll:
    """Let there be a short way in C before the `poll` of a class of `Polls`, where it is built."""
    return cast("_Poll", _AtLength(poll)) if bulk.IN_C else poll


def new_outlet(events: Sized = ()) -> Outlet:
    """Return a closed one, that hands nothing out while there are events."""
    return Outlet(events, _NO_CLOCK if CLOCK_ID is None else CLOCK_ID)


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

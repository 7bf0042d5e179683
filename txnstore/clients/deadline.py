"""The time that a call has: its timeout is checked once, and whoever waits for it asks the deadline what is left."""

from __future__ import annotations

import math
import threading
import time
from typing import Self, SupportsFloat


def check_timeout(timeout: object) -> float:
    """Return a timeout as public calls take it: seconds, or below zero if the caller sets none.

    Raises:
        TypeError: it is not a number.
        ValueError: it is NaN.
    """
    # `poll` comes here for each message, nearly always with one of these.
    if type(timeout) is not float and type(timeout) is not int and not isinstance(timeout, SupportsFloat):
        raise TypeError(f"must be real number, not {type(timeout).__name__}")
    try:
        seconds = float(timeout)
    except OverflowError:
        # A whole number beyond what a float holds.
        return threading.TIMEOUT_MAX
    if seconds <= threading.TIMEOUT_MAX:
        return seconds
    if math.isnan(seconds):
        raise ValueError("a timeout is a number of seconds, not NaN")
    # No lock can be waited for any longer: for ever, nearly.
    return threading.TIMEOUT_MAX


def bounded(timeout_seconds: float, longest_seconds: float) -> float:
    """Return how many seconds a call may take: what its caller allows, at most and by default the longest time."""
    return timeout_seconds if 0 <= timeout_seconds <= longest_seconds else longest_seconds


class Deadline:
    """When the time of a call is up, on the monotonic clock."""

    __slots__ = ("_at_seconds",)

    def __init__(self, timeout_seconds: float) -> None:
        """Give the call so much time from now; a negative timeout is none."""
        self._at_seconds = math.inf if timeout_seconds < 0 else time.monotonic() + timeout_seconds

    def left_seconds(self) -> float:
        """Return how long there is left to wait, but not more than a lock can be waited for; 0 once it is up."""
        return min(max(0.0, self._at_seconds - time.monotonic()), threading.TIMEOUT_MAX)

    def at_most(self, seconds: float) -> Self:
        """Return the same, but that many seconds from now if that is earlier."""
        return type(self)(min(seconds, self.left_seconds()))

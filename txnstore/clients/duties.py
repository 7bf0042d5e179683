"""This file is what a client does from time to time: its duties, each with its interval and its next time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Duty:
    """Something that is done every so often; it returns quickly, for it runs between two readings."""

    interval_seconds: float
    work: Callable[[], None]
    due_at: float = field(default=math.inf)


class Duties:
    """The duties of one client; for one thread."""

    def __init__(self, monotonic_seconds: Callable[[], float] = time.monotonic) -> None:
        """Begin without any."""
        self._monotonic_seconds = monotonic_seconds
        self._duties: list[Duty] = []

    def add(self, interval_seconds: float, work: Callable[[], None]) -> None:
        """Do `work` for the first time in `interval_seconds`, then again and again."""
        self._duties.append(Duty(interval_seconds, work, self._monotonic_seconds() + interval_seconds))

    def run_due(self) -> float:
        """Do what is due; return in how many seconds there will be something to do again."""
        now = self._monotonic_seconds()
        for duty in self._duties:
            if duty.due_at <= now:
                duty.due_at = now + duty.interval_seconds
                duty.work()
        return max(0.0, min((duty.due_at for duty in self._duties), default=math.inf) - now)

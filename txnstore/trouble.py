"""Trouble that comes again and again: which of it is told, so that it is noticed and fills no log."""

from __future__ import annotations

import math
import re
import time
import traceback
from collections.abc import Callable, Hashable
from typing import Final

#: How often the same trouble is told where nothing else is said.
PERIOD_SECONDS: Final = 60.0
# Those of a measure, and of a process or a transaction as PostgreSQL names them; any other may name a place.
_NUMBERS: Final = re.compile(
    r"(?<![\w.:-])[0-9]+(?:\.[0-9]+)?(?= ?(?:m?s|(?:milli)?seconds?|minutes?|tries|times|bytes|rows)\b)"
    r"|(?:(?<=process )|(?<=pid )|(?<=transaction ))[0-9]+\b(?![.:]\w)",
    re.IGNORECASE,
)


class RepeatedTrouble:
    """The trouble of one place: told as it begins, now and then while it lasts, and its end is told, too.

    Trouble of another kind is told at once.  It has no lock, which a fork or a signal's handler could find taken:
    threads that meet the same trouble at the same moment may both be told to tell of it.
    """

    def __init__(
        self, period_seconds: float = PERIOD_SECONDS, *, monotonic_seconds: Callable[[], float] = time.monotonic
    ) -> None:
        """Let trouble of one kind be told once in this time, and once more if it passes in between."""
        self._period_seconds = period_seconds
        self._monotonic_seconds = monotonic_seconds
        #: Never changed, but replaced by another one.
        self._told_seconds: dict[Hashable, float] = {}
        self._is_told = False
        self._anew_seconds = -math.inf

    def may_be_told(self, kind: Hashable = None) -> bool:
        """Return whether trouble of this kind is to be told now; if so, it counts as told."""
        now_seconds = self._monotonic_seconds()
        since_seconds = now_seconds - self._period_seconds
        recent = {told: at_seconds for told, at_seconds in self._told_seconds.items() if at_seconds > since_seconds}
        is_news = kind not in recent
        if is_news:
            recent[kind] = now_seconds
            self._is_told = True
        self._told_seconds = recent
        return is_news

    def passed(self) -> bool:
        """Take note that all is well; return whether trouble was told since it was so last, so that this is told."""
        was_told, self._is_told = self._is_told, False
        now_seconds = self._monotonic_seconds()
        if was_told and now_seconds >= self._anew_seconds + self._period_seconds:
            # The next trouble is news; but what comes and goes all the time fills no log.
            self._anew_seconds, self._told_seconds = now_seconds, {}
        return was_told


def kind_of(error: object) -> str:
    """Return what two errors that are the same trouble have in common: they may differ by a measure, as of seconds."""
    return _NUMBERS.sub("", f"{type(error).__name__}: {message_of(error)}")


def message_of(error: object) -> str:
    """Return what an error says; nothing, if it cannot: whoever asks is to tell of one error, and not to meet two."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - see above
        return ""


def defect_of(error: BaseException) -> tuple[str, str, int]:
    """Return what two errors that come from the same place in the code have in common."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return (type(error).__name__, *(frames[-1] if frames else ("", 0)))

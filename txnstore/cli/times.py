"""This file is how a time is given on the command line: milliseconds, a date, or so long ago."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import Final

import typer

FORMS: Final = (
    "2026-01-31T12:00:00 (UTC, unless it ends in a zone as +01:00), milliseconds since 1970, or 90s, 15m, 2h, 7d ago"
)

_TIME_MS_MAX: Final = 2**63 - 1
_AGO: Final = re.compile(r"(\d{1,12})(s|m|h|d)")
_MILLISECONDS: Final = re.compile(r"\d{1,19}")
_UNIT_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def parse_time(text: str) -> int:
    """Return the time that `text` names, in milliseconds since 1970.

    Raises:
        typer.BadParameter: it names none.
    """
    found = _AGO.fullmatch(text)
    if found is not None:
        return max(0, int(time.time() * 1000) - int(found[1]) * _UNIT_MS[found[2]])
    if _MILLISECONDS.fullmatch(text):
        milliseconds = int(text)
    else:
        try:
            moment = datetime.fromisoformat(text)
            moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
            milliseconds = int(moment.timestamp() * 1000)
        except (ValueError, OverflowError):
            raise typer.BadParameter(f"{text[:40]!r} is no time; a time is {FORMS}") from None
    if not 0 <= milliseconds <= _TIME_MS_MAX:
        raise typer.BadParameter(f"{text[:40]!r} is before 1970 or too late; a time is {FORMS}")
    return milliseconds

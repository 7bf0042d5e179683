"""This file is where a partition is read from, pure: an offset, a constant, the committed one, or the reset policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from txnstore.clients.model.constants import OFFSET_BEGINNING, OFFSET_END, OFFSET_STORED
from txnstore.log.bounds import Bounds

#: Offsets from here on downwards count from the end: OFFSET_TAIL_BASE - n is n records before it.
OFFSET_TAIL_BASE: Final = -2000

NOTHING_COMMITTED: Final = "no previously committed offset available: Local: No offset stored"


@dataclass(frozen=True, slots=True)
class Start:
    """Where to begin."""

    offset: int | None
    """None: auto.offset.reset says "error", so it is not known."""

    why: str = ""
    """Why there was no better place than what auto.offset.reset says."""


def start_position(wanted: int, bounds: Bounds, end_offset: int, committed: int | None, reset: str) -> Start:
    """Return where to begin if `wanted` is an offset or one of the constants; `reset` is earliest, latest or error."""
    why = f"offset {wanted} is not in the log: Broker: Offset out of range"
    if wanted == OFFSET_STORED:
        if committed is None:
            return _reset(bounds, end_offset, reset, NOTHING_COMMITTED)
        wanted, why = committed, f"the committed offset {committed} is not in the log: Broker: Offset out of range"
    offset = {OFFSET_BEGINNING: bounds.log_start_offset, OFFSET_END: end_offset}.get(wanted, wanted)
    if wanted <= OFFSET_TAIL_BASE:
        offset = max(bounds.log_start_offset, end_offset - (OFFSET_TAIL_BASE - wanted))
    if bounds.log_start_offset <= offset <= bounds.high_watermark:
        return Start(offset)
    return _reset(bounds, end_offset, reset, why)


def _reset(bounds: Bounds, end_offset: int, reset: str, why: str) -> Start:
    return Start({"earliest": bounds.log_start_offset, "latest": end_offset}.get(reset), why)

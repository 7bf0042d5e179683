"""The start of a consumer in a partition: what offsets and their constants stand for, and when it is reset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from txnstore.clients.consumer.positions import OFFSET_ORDER, OFFSET_TAIL_BASE, Positions
from txnstore.clients.model.topic_partition import OFFSET_BEGINNING, OFFSET_END, OFFSET_STORED
from txnstore.log.bounds import Bounds

NOTHING_COMMITTED: Final = "no previously committed offset available: Local: No offset stored"


@dataclass(frozen=True, slots=True)
class StartPosition:
    """Where to begin."""

    position: int | None
    """None: there is no such offset, because auto.offset.reset is "error"."""

    why: str = ""
    """Why auto.offset.reset had to decide."""


def start_position(
    wanted: int,
    bounds: Bounds,
    end_offset: int,
    committed: int | None,
    reset: str,
    *,
    positions: Positions = OFFSET_ORDER,
) -> StartPosition:
    """Return where to begin if `wanted` is a position or one of the constants; `reset` is earliest, latest or error."""
    said, given = "offset", wanted
    if wanted == OFFSET_STORED:
        if committed is None:
            return _reset(bounds.log_start_offset, end_offset, reset, NOTHING_COMMITTED, positions)
        said, given = "the committed offset", committed
    why = f"{said} {positions.place(given)} is not in the log: Broker: Offset out of range"
    place, within = positions.place(given), positions.offset_in_transaction(given) or 0
    place = {OFFSET_BEGINNING: bounds.log_start_offset, OFFSET_END: end_offset}.get(place, place)
    if given <= OFFSET_TAIL_BASE:
        place = max(bounds.log_start_offset, end_offset - (OFFSET_TAIL_BASE - given))
    if not bounds.log_start_offset <= place <= bounds.high_watermark:
        return _reset(bounds.log_start_offset, end_offset, reset, why, positions)
    if 0 < within < bounds.log_start_offset:
        # It stands in a transaction of which the next records are deleted: the earliest ones are those that are left.
        if reset == "earliest":
            return StartPosition(positions.at(place, bounds.log_start_offset), why)
        return _reset(bounds.log_start_offset, end_offset, reset, why, positions)
    return StartPosition(positions.at(place, within))


def _reset(earliest: int, latest: int, reset: str, why: str, positions: Positions) -> StartPosition:
    place = {"earliest": earliest, "latest": latest}.get(reset)
    return StartPosition(None if place is None else positions.at(place), why)

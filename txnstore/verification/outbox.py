"""The rule of the outbox: what applications put there becomes records, and does not wait for long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, func, select

from txnstore.db.schema import outbox, outbox_sequencers
from txnstore.db.sqlite.any_text import any_text
from txnstore.verification.invariants import Invariant, Place, Violation
from txnstore.verification.reading import VIOLATIONS_MAX

#: A row that waits for so long waits for a sequencer that is not there.
WAITS_MAX_SECONDS: Final = 60.0

_REFUSED: Final = (
    select(
        outbox.c.topic, outbox.c.refusal, func.count().label("count"), func.min(outbox.c.outbox_id).label("first_id")
    )
    .where(outbox.c.refusal.is_not(None))
    .group_by(outbox.c.topic, outbox.c.refusal)
    .order_by(outbox.c.topic, outbox.c.refusal)
    .limit(VIOLATIONS_MAX)
)
_FIRST_WAITING: Final = (
    select(outbox.c.outbox_id, outbox.c.topic).where(outbox.c.refusal.is_(None)).order_by(outbox.c.outbox_id).limit(1)
)
_SEQUENCER: Final = select(outbox_sequencers.c.singleton)


@dataclass(slots=True)
class Waiting:
    """The row of the outbox that has waited longest, as far as one process has looked: no row says since when."""

    outbox_id: int = -1
    since_seconds: float = 0.0


def outbox_violations(connection: Connection, waiting: Waiting, now_seconds: float) -> Iterator[Violation]:
    """Return whether rows can move, what is refused, and whether what `waiting` knows waits still."""
    if connection.execute(_SEQUENCER).first() is None:
        seen = "outbox_sequencers has lost its row (1, 0), which must be locked to move rows: none is moved"
        yield Violation(Invariant.OUTBOX_MOVES, Place(), seen)
    with any_text(connection):
        for row in connection.execute(_REFUSED):
            seen = f"{row.count} rows from number {row.first_id} on are refused: {row.refusal}"
            yield Violation(Invariant.OUTBOX_MOVES, Place(topic=row.topic), seen)
        first = connection.execute(_FIRST_WAITING).one_or_none()
    if first is None or first.outbox_id != waiting.outbox_id:
        waiting.outbox_id, waiting.since_seconds = -1 if first is None else first.outbox_id, now_seconds
    elif now_seconds - waiting.since_seconds > WAITS_MAX_SECONDS:
        seen = f"row {first.outbox_id} has waited for {now_seconds - waiting.since_seconds:.0f} s"
        yield Violation(Invariant.OUTBOX_MOVES, Place(topic=first.topic), seen)

"""The visibility of a partition's records: what a reader of committed ones gets, beside what its markers allow.

The log is passed from its end to its start: a marker comes before the records that it decides on, so nothing but the
last outcome of each producer has to be known, however long transactions are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from sqlalchemy import Connection, bindparam, select

from txnstore.db.schema import record_batches
from txnstore.db.statements import HotStatement
from txnstore.log.bounds import Bounds
from txnstore.log.fetch import fetch
from txnstore.model import OFFSET_MAX, ControlType
from txnstore.verification.invariants import Invariant, Place, Violation
from txnstore.verification.reading import PAGE_ROWS

_BACKWARDS: Final = HotStatement(
    select(
        record_batches.c.base_offset,
        record_batches.c.last_offset,
        record_batches.c.record_count,
        record_batches.c.offset_deltas,
        record_batches.c.producer_id,
        record_batches.c.is_transactional,
        record_batches.c.control_type,
    )
    .where(record_batches.c.partition_id == bindparam("of_partition_id"))
    .where(record_batches.c.last_offset < bindparam("end_offset"))
    .order_by(record_batches.c.last_offset.desc())
    .limit(PAGE_ROWS)
)
#: Offsets that follow each other: the first one, and the one after the last.
_Range = tuple[int, int]


def visibility_violations(connection: Connection, bounds: Bounds, *, from_offset: int = 0) -> Iterator[Violation]:
    """Compare what a reader gets from an offset on with what the log says; each batch agrees with its checksum."""
    partition_id = bounds.partition_id
    if bounds.last_stable_offset <= from_offset:
        return
    outcomes: dict[int, ControlType] = {}
    end_offset = OFFSET_MAX
    while end_offset > from_offset and (
        rows := _BACKWARDS.rows(connection, {"of_partition_id": partition_id, "end_offset": end_offset})
    ):
        committed = list(_committed(rows, outcomes))
        first_offset = max(rows[-1].base_offset, bounds.log_start_offset, from_offset)
        window = first_offset, min(end_offset, bounds.last_stable_offset)
        end_offset = rows[-1].base_offset
        if window[0] < window[1]:
            expected = _ranges(reversed(committed), window)
            seen = _ranges(_fetched(connection, partition_id, window), window)
            if seen != expected:
                detail = f"a reader gets the offsets {_text(seen)} where {_text(expected)} are committed"
                yield Violation(Invariant.COMMITTED_VISIBLE, Place(partition_id, window[0]), detail)
        if len(rows) < PAGE_ROWS:
            return


def _committed(rows: Iterable[Any], outcomes: dict[int, ControlType]) -> Iterator[Sequence[int]]:
    """Return the offsets of batches that count, the last batch first; `outcomes` are those after the rows."""
    for row in rows:
        if row.control_type is not None:
            outcomes[row.producer_id] = ControlType(row.control_type)
        elif not row.is_transactional or outcomes.get(row.producer_id) is ControlType.COMMIT:
            yield _offsets(row)


def _offsets(row: Any) -> Sequence[int]:
    if row.offset_deltas is None:
        # Not to its end: of a batch that was thinned, the first records may be left.
        return range(row.base_offset, row.base_offset + row.record_count)
    return [row.base_offset + delta for delta in json.loads(row.offset_deltas)]


def _fetched(connection: Connection, partition_id: int, window: _Range) -> Iterator[Sequence[int]]:
    position, end_offset = window
    while position < end_offset:
        page = fetch(connection, {partition_id: position}, end_offsets={partition_id: end_offset})[partition_id]
        yield from (batch.offsets() for batch in page.batches)
        position = page.next_offset


def _ranges(parts: Iterable[Sequence[int]], window: _Range) -> list[_Range]:
    """Return the offsets in the window, those that follow each other in one."""
    found: list[_Range] = []
    for part in parts:
        of_part = [(part.start, part.stop)] if isinstance(part, range) else [(offset, offset + 1) for offset in part]
        for first, end in of_part:
            start, stop = max(first, window[0]), min(end, window[1])
            if start >= stop:
                continue
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], stop)
            else:
                found.append((start, stop))
    return found


def _text(ranges: Sequence[_Range]) -> str:
    told = [f"{start}" if stop == start + 1 else f"{start} to {stop - 1}" for start, stop in ranges[:10]]
    return ", ".join([*told, "..."] if len(ranges) > len(told) else told) or "none"

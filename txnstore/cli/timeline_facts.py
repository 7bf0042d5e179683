"""This file is what a timeline shows of a partition: whose each offset is, how it ended, and who stands where."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import BindParameter, Connection, bindparam, select, tuple_, union

from txnstore.db.schema import finished_transactions, group_offsets, record_batches, transaction_log
from txnstore.log.bounds import read_bounds
from txnstore.log.fetch import IN_RANGE
from txnstore.log.topics import get_topic
from txnstore.model import ControlType

#: More offsets than this are no drawing any more.
OFFSETS_MAX: Final = 2_000

_BATCHES: Final = (
    select(
        record_batches.c.base_offset,
        record_batches.c.last_offset,
        record_batches.c.producer_id,
        record_batches.c.producer_epoch,
        record_batches.c.is_transactional,
    )
    .where(IN_RANGE, record_batches.c.control_type.is_(None))
    .order_by(record_batches.c.last_offset)
)
_OF_PARTITION: Final = finished_transactions.c.partition_id == bindparam("of_partition_id")
_KEYS: Final[BindParameter[Any]] = bindparam("producers", expanding=True)
# Those that end in the stretch, and those that the batches belong to, wherever they end.
_FINISHED: Final = union(
    select(finished_transactions).where(
        _OF_PARTITION, finished_transactions.c.marker_offset.between(bindparam("from_offset"), bindparam("end_offset"))
    ),
    select(finished_transactions).where(
        _OF_PARTITION,
        tuple_(finished_transactions.c.producer_id, finished_transactions.c.producer_epoch).in_(_KEYS),
    ),
)
_GROUPS: Final = (
    select(group_offsets.c.group_id, group_offsets.c.committed_offset)
    .where(group_offsets.c.partition_id == bindparam("of_partition_id"))
    .order_by(group_offsets.c.group_id)
)
# The journal remembers which transactional id a producer id belonged to.
_NAMES: Final = (
    select(transaction_log.c.producer_id, transaction_log.c.transactional_id)
    .where(transaction_log.c.producer_id.in_(bindparam("producer_ids", expanding=True)))
    .distinct()
)


class Mark(enum.Enum):
    """What stands at an offset."""

    RECORD = "record"
    COMMITTED = "committed"
    ABORTED = "aborted"
    OPEN = "open"
    COMMIT = "COMMIT marker"
    ABORT = "ABORT marker"


@dataclass(slots=True)
class Lane:
    """The records of one transaction and its marker; or all those without one."""

    name: str
    outcome: str
    marks: dict[int, Mark] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pointer:
    """A position that has a name."""

    name: str
    offset: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """A stretch of a partition's log."""

    topic: str
    partition: int
    first_offset: int
    end_offset: int
    """Behind the last offset that is shown."""

    lanes: list[Lane]
    pointers: list[Pointer]

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON can hold it."""
        return {
            "topic": self.topic,
            "partition": self.partition,
            "first_offset": self.first_offset,
            "end_offset": self.end_offset,
            "lanes": [
                {
                    "name": lane.name,
                    "outcome": lane.outcome,
                    "marks": [{"offset": offset, "mark": mark.value} for offset, mark in sorted(lane.marks.items())],
                }
                for lane in self.lanes
            ],
            "pointers": [{"name": pointer.name, "offset": pointer.offset} for pointer in self.pointers],
        }


def read_timeline(
    connection: Connection, topic: str, partition: int, *, from_offset: int | None, count: int
) -> Timeline:
    """Return `count` offsets of the partition from `from_offset` on, or the last ones.

    Raises:
        UnknownTopicOrPartition: there is no such topic or partition.
    """
    partition_id = get_topic(connection, topic).partition_id(partition)
    bounds = read_bounds(connection, [partition_id])[partition_id]
    high_watermark = bounds.high_watermark
    first = high_watermark - count if from_offset is None else min(from_offset, high_watermark)
    first = max(first, bounds.log_start_offset)
    end = min(first + count, high_watermark)
    pointers = [
        Pointer("log start", bounds.log_start_offset),
        Pointer("last stable offset", bounds.last_stable_offset),
        Pointer("high watermark", high_watermark),
    ]
    pointers += [Pointer(f"group {row[0]}", row[1]) for row in connection.execute(_GROUPS, _of(partition_id))]
    return Timeline(topic, partition, first, end, _lanes(connection, partition_id, first, end), pointers)


def _of(partition_id: int) -> dict[str, int]:
    return {"of_partition_id": partition_id}


def _lanes(connection: Connection, partition_id: int, first: int, end: int) -> list[Lane]:
    stretch = {**_of(partition_id), "from_offset": first, "end_offset": end}
    batches = connection.execute(_BATCHES, stretch).all()
    producers = sorted({(row.producer_id, row.producer_epoch) for row in batches if row.is_transactional})
    rows = connection.execute(_FINISHED, {**stretch, "producers": producers}).all()
    finished = {(row.producer_id, row.producer_epoch): row for row in rows}
    names = _names(connection, {row.producer_id for row in batches} | {producer_id for producer_id, _ in finished})
    plain = Lane("no transaction", "")
    lanes: dict[tuple[int, int], Lane] = {}
    for row in batches:
        offsets = range(max(row.base_offset, first), min(row.last_offset + 1, end))
        if not row.is_transactional:
            plain.marks.update(dict.fromkeys(offsets, Mark.RECORD))
            continue
        key = (row.producer_id, row.producer_epoch)
        ended = finished.get(key)
        lane = _lane(lanes, key, names, None if ended is None else ControlType(ended.outcome))
        lane.marks.update(dict.fromkeys(offsets, Mark(lane.outcome)))
    for key, row in finished.items():
        if first <= row.marker_offset < end:
            outcome = ControlType(row.outcome)
            mark = Mark.COMMIT if outcome is ControlType.COMMIT else Mark.ABORT
            _lane(lanes, key, names, outcome).marks[row.marker_offset] = mark
    ordered = sorted(lanes.values(), key=lambda lane: min(lane.marks))
    return [*([plain] if plain.marks else []), *ordered]


def _lane(
    lanes: dict[tuple[int, int], Lane],
    key: tuple[int, int],
    names: Mapping[int, str],
    outcome: ControlType | None,
) -> Lane:
    if key not in lanes:
        marks = {ControlType.COMMIT: Mark.COMMITTED, ControlType.ABORT: Mark.ABORTED, None: Mark.OPEN}
        name = f"{names[key[0]]} {key[0]}:{key[1]}" if key[0] in names else f"{key[0]}:{key[1]}"
        lanes[key] = Lane(name, marks[outcome].value)
    return lanes[key]


def _names(connection: Connection, producer_ids: set[int]) -> dict[int, str]:
    if not producer_ids:
        return {}
    return {row[0]: row[1] for row in connection.execute(_NAMES, {"producer_ids": sorted(producer_ids)})}

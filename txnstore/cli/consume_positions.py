"""This file is where a reading begins and ends: what the user asked for, against the bounds of the partitions."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, bindparam, exists, not_, select

from txnstore.cli.terminal import CommandFailed
from txnstore.clients.brokers import Reads
from txnstore.db.schema import finished_transactions, record_batches
from txnstore.log.bounds import Bounds, offset_for_time, read_bounds
from txnstore.log.fetch import PAGE_BATCHES_MAX
from txnstore.log.topics import get_topic
from txnstore.model import ControlType, IsolationLevel

_LAST_BATCHES: Final = (
    select(record_batches.c.last_offset, record_batches.c.record_count)
    .where(record_batches.c.partition_id == bindparam("of_partition_id"))
    .where(record_batches.c.last_offset < bindparam("end_offset"))
    .where(record_batches.c.control_type.is_(None))
    .order_by(record_batches.c.last_offset.desc())
    .limit(PAGE_BATCHES_MAX)
)
_NOT_ABORTED: Final = not_(
    exists()
    .where(finished_transactions.c.partition_id == record_batches.c.partition_id)
    .where(finished_transactions.c.producer_id == record_batches.c.producer_id)
    .where(finished_transactions.c.producer_epoch == record_batches.c.producer_epoch)
    .where(finished_transactions.c.outcome == int(ControlType.ABORT))
    .where(record_batches.c.is_transactional)
)


class StartKind(enum.Enum):
    """How the place is named where a reading begins."""

    BEGINNING = "beginning"
    END = "end"
    OFFSET = "offset"
    LAST = "the last records"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Start:
    """Where a reading begins, in every partition."""

    kind: StartKind
    number: int = 0
    """The offset, how many records, or the time in milliseconds since 1970."""


@dataclass(frozen=True, slots=True)
class Positions:
    """The bounds of a reading when it began, by partition number."""

    topic: str
    start: dict[int, int]
    end: dict[int, int]
    """What the reader cannot see, or what came later, begins here."""

    high_watermark: dict[int, int]

    def held_back(self) -> list[str]:
        """Return for people what was not shown because its transaction is open."""
        return [
            f"{self.topic}-{number}: the offsets {end} to {self.high_watermark[number] - 1} wait for an open"
            " transaction; --isolation read_uncommitted shows them"
            for number, end in self.end.items()
            if end < self.high_watermark[number]
        ]


def read_positions(  # noqa: PLR0917 - where, and what
    read: Reads,
    connection: Connection,
    topic: str,
    numbers: Sequence[int] | None,
    start: Start,
    isolation: IsolationLevel,
) -> Positions:
    """Return where a reading of these partitions, or of all, begins and ends.

    Raises:
        UnknownTopicOrPartition: there is no such topic, or no such partition in it.
        CommandFailed: the offset is outside the bounds of a partition.
    """
    found = get_topic(connection, topic)
    chosen = range(len(found.partition_ids)) if numbers is None else list(dict.fromkeys(numbers))
    ids = {number: found.partition_id(number) for number in chosen}
    names = {partition_id: f"{topic}-{number}" for number, partition_id in ids.items()}

    def look(opened: Connection, partition_ids: list[int]) -> dict[int, tuple[Bounds, int]]:
        return {
            partition_id: (bounds, _start(opened, names[partition_id], bounds, start, isolation))
            for partition_id, bounds in read_bounds(opened, partition_ids).items()
        }

    found_at = read(list(names), look)
    of = {number: found_at[partition_id][0] for number, partition_id in ids.items()}
    return Positions(
        topic,
        {number: found_at[partition_id][1] for number, partition_id in ids.items()},
        {number: of[number].end(isolation) for number in ids},
        {number: of[number].high_watermark for number in ids},
    )


def _start(connection: Connection, name: str, bounds: Bounds, start: Start, isolation: IsolationLevel) -> int:
    end = bounds.end(isolation)
    if start.kind is StartKind.BEGINNING:
        return bounds.log_start_offset
    if start.kind is StartKind.END:
        return end
    if start.kind is StartKind.LAST:
        return _start_of_last(connection, bounds, start.number, isolation)
    if start.kind is StartKind.TIME:
        found = offset_for_time(connection, bounds.partition_id, start.number, isolation)
        return end if found is None else found.offset
    if not bounds.log_start_offset <= start.number <= bounds.high_watermark:
        raise CommandFailed(
            f"{name} has the offsets {bounds.log_start_offset} to {bounds.high_watermark}, not {start.number};"
            " --partition chooses the one that is meant"
        )
    return start.number


def _start_of_last(connection: Connection, bounds: Bounds, count: int, isolation: IsolationLevel) -> int:
    """Return the offset from which on the reader sees so many records; markers and what was aborted are none."""
    end = bounds.end(isolation)
    if count == 0:
        return end
    statement = _LAST_BATCHES if isolation is IsolationLevel.READ_UNCOMMITTED else _LAST_BATCHES.where(_NOT_ABORTED)
    missing = count
    while True:
        rows = connection.execute(statement, {"of_partition_id": bounds.partition_id, "end_offset": end}).all()
        for row in rows:
            if row.record_count >= missing:
                # Within a batch that compaction has thinned out a few more may come.
                return max(bounds.log_start_offset, int(row.last_offset) - missing + 1)
            missing -= row.record_count
        if len(rows) < PAGE_BATCHES_MAX or rows[-1].last_offset < bounds.log_start_offset:
            return bounds.log_start_offset
        end = rows[-1].last_offset

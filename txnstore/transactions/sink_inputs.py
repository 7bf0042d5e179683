"""This file is what the batches of a query read: noted by the tasks that read, committed by the decision.

Only the tasks know which batch they are of, so each notes its range before it reads; the whole range of the batch is
then what its decision commits for the group, in the same database transaction.  The decision also keeps, for each
partition, how far the query's committed batches have read.  By that a batch is recognised whatever its number: one
whose input lies below is a replay, one whose input lies at or past it is new.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, and_, bindparam, delete, or_, select
from sqlalchemy.dialects.postgresql import insert as upsert

from txnstore.db.schema import sink_inputs, sink_positions
from txnstore.db.store import Store
from txnstore.errors import InvalidRequest
from txnstore.groups.commit_rules import check_group_id
from txnstore.model import OFFSET_MAX
from txnstore.transactions.sink_runs import SinkRun, check_names, sink_id_of_query

_OF_BATCH: Final = and_(
    sink_inputs.c.sink_id == bindparam("of_sink_id"),
    sink_inputs.c.run_id == bindparam("of_run_id"),
    sink_inputs.c.batch_id == bindparam("of_batch_id"),
)
_INSERT: Final = upsert(sink_inputs)
_NOTE: Final = _INSERT.on_conflict_do_update(
    index_elements=[column.name for column in sink_inputs.primary_key],
    set_={"end_offset": _INSERT.excluded.end_offset},
)
_READ: Final = (
    select(
        sink_inputs.c.group_id,
        sink_inputs.c.partition_id,
        sink_inputs.c.start_offset,
        sink_inputs.c.end_offset,
        sink_positions.c.next_offset,
    )
    .outerjoin(
        sink_positions,
        and_(
            sink_positions.c.sink_id == sink_inputs.c.sink_id,
            sink_positions.c.group_id == sink_inputs.c.group_id,
            sink_positions.c.partition_id == sink_inputs.c.partition_id,
        ),
    )
    .where(_OF_BATCH)
    .order_by(sink_inputs.c.group_id, sink_inputs.c.partition_id, sink_inputs.c.start_offset)
)
# What runs before this one have noted, and what this one is done with.
_TRIM: Final = delete(sink_inputs).where(
    sink_inputs.c.sink_id == bindparam("of_sink_id"),
    or_(sink_inputs.c.run_id != bindparam("of_run_id"), sink_inputs.c.batch_id <= bindparam("of_batch_id")),
)
_KEY_OF_EARLIER: Final = ("sink_id", "run_id", "batch_id", "group_id", "partition_id")
# A run comes to its next batch only once the one before is over.
_FORGET_EARLIER: Final = delete(sink_inputs).where(
    sink_inputs.c.sink_id == bindparam("of_sink_id"),
    sink_inputs.c.run_id == bindparam("of_run_id"),
    sink_inputs.c.batch_id < bindparam("of_batch_id"),
    sink_inputs.c.group_id == bindparam("of_group_id"),
    sink_inputs.c.partition_id == bindparam("of_partition_id"),
)
_INSERT_POSITION: Final = upsert(sink_positions)
_MOVE: Final = _INSERT_POSITION.on_conflict_do_update(
    index_elements=[column.name for column in sink_positions.primary_key],
    set_={"next_offset": _INSERT_POSITION.excluded.next_offset},
)


@dataclass(frozen=True, slots=True)
class SinkInput:
    """A range of a partition that a batch reads; a batch may read several ranges of one partition."""

    query_id: str
    run_id: str
    batch_id: int
    group_id: str
    """The consumer group that the query reads as; two readers in one query have groups of their own."""

    partition_id: int
    start_offset: int
    end_offset: int
    """The offset behind the range: what the group commits."""


class Novelty(enum.Enum):
    """What the ranges of a batch are to the batches that the query has committed."""

    UNKNOWN = "unknown"
    """Nothing was noted, or only empty ranges."""

    NEW = "new"
    """All of it lies at or past what they have read."""

    REPEATED = "repeated"
    """All of it lies below."""

    MIXED = "mixed"
    """Some of it they have read, and some of it not."""


@dataclass(frozen=True, slots=True)
class NotedInput:
    """The ranges of one batch."""

    novelty: Novelty
    end_offsets: Mapping[tuple[str, int], int]
    """By group and partition id: the offset to commit."""

    example: str = ""
    """Of what is mixed: one range, for people."""


def note_inputs(store: Store, inputs: Sequence[SinkInput], *, retry_timeout_ms: int | None = None) -> None:
    """Note what a task is about to read; its batch's decision commits it for the group.

    Safe to repeat.

    Raises:
        InvalidGroupId, InvalidRequest: an id or an offset is not of the documented form.
    """
    entries = [_entry(noted) for noted in inputs]

    def work(connection: Connection) -> None:
        connection.execute(_NOTE, entries)
        # Where the query writes elsewhere nobody decides its batches, and nobody else would forget them.
        connection.execute(
            _FORGET_EARLIER, [{f"of_{name}": entry[name] for name in _KEY_OF_EARLIER} for entry in entries]
        )

    if entries:
        store.write(work, retry_timeout_ms=retry_timeout_ms)


def read_inputs(connection: Connection, run: SinkRun, batch_id: int) -> NotedInput:
    """Return what the tasks of the run have noted for a batch."""
    ranges = connection.execute(_READ, _of(run, batch_id)).all()
    ends: dict[tuple[str, int], int] = {}
    kinds: set[Novelty] = set()
    example = ""
    for row in ranges:
        key = (row.group_id, row.partition_id)
        ends[key] = max(row.end_offset, ends.get(key, 0))
        kind = _novelty(row)
        if kind is Novelty.UNKNOWN:
            continue
        kinds.add(kind)
        if kind is not Novelty.NEW:
            example = (
                f"partition id {row.partition_id}, offsets {row.start_offset} to {row.end_offset}, read up to"
                f" {row.next_offset}"
            )
    novelty = Novelty.UNKNOWN if not kinds else kinds.pop() if len(kinds) == 1 else Novelty.MIXED
    return NotedInput(novelty, ends, example)


def commit_inputs(connection: Connection, run: SinkRun, batch_id: int, noted: NotedInput) -> None:
    """Take note that a batch with this input is committed, and forget what nobody needs any more."""
    entries = [
        {"sink_id": run.sink_id, "group_id": group_id, "partition_id": partition_id, "next_offset": offset}
        for (group_id, partition_id), offset in sorted(noted.end_offsets.items())
    ]
    if entries:
        connection.execute(_MOVE, entries)
    forget_inputs(connection, run, batch_id)


def forget_inputs(connection: Connection, run: SinkRun, batch_id: int) -> None:
    """Forget what was noted by runs before this one, and for batches that are decided."""
    connection.execute(_TRIM, _of(run, batch_id))


def check_batch_id(batch_id: object) -> None:
    """Refuse what is no number of a batch.

    Raises:
        InvalidRequest: it is not a whole number from 0 to 2**63 - 1.
    """
    _check_number(batch_id, "a batch id")


def check_writer_ids(writer_ids: Collection[object]) -> None:
    """Refuse what is no producer id.

    Raises:
        InvalidRequest: one is not a whole number from 0 to 2**63 - 1.
    """
    for writer_id in writer_ids:
        _check_number(writer_id, "a writer id")


def _novelty(row: Any) -> Novelty:
    if row.start_offset == row.end_offset:
        return Novelty.UNKNOWN
    if row.next_offset is None or row.start_offset >= row.next_offset:
        return Novelty.NEW
    return Novelty.REPEATED if row.end_offset <= row.next_offset else Novelty.MIXED


def _entry(noted: SinkInput) -> dict[str, object]:
    check_group_id(noted.group_id)
    check_names(noted.query_id, noted.run_id)
    check_batch_id(noted.batch_id)
    for number in _offsets(noted):
        _check_number(number, "an offset")
    if noted.start_offset > noted.end_offset:
        raise InvalidRequest(f"a range of offsets begins at {noted.start_offset} and ends at {noted.end_offset}")
    return {
        "sink_id": sink_id_of_query(noted.query_id),
        "run_id": noted.run_id,
        "batch_id": noted.batch_id,
        "group_id": noted.group_id,
        "partition_id": noted.partition_id,
        "start_offset": noted.start_offset,
        "end_offset": noted.end_offset,
    }


def _offsets(noted: SinkInput) -> Iterable[object]:
    return (noted.start_offset, noted.end_offset)


def _check_number(number: object, what: str) -> None:
    if type(number) is not int or not 0 <= number <= OFFSET_MAX:
        raise InvalidRequest(f"{what} is a whole number from 0 to {OFFSET_MAX}, not {number!r:.40}")


def _of(run: SinkRun, batch_id: int) -> dict[str, object]:
    return {"of_sink_id": run.sink_id, "of_run_id": run.run_id, "of_batch_id": batch_id}

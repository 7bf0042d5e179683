"""The inputs of a query's batches, as their tasks note them: by these the sink knows a replay, and commits for groups.

A task notes its range before it reads.  As a batch is decided, the positions of the query's groups move to the ends of
its ranges, and the ranges themselves are kept until the next batch is decided: of readers that have no positions they
say whether a batch with the number of the last one is that very batch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, and_, bindparam, delete, exists, func, or_, select, true
from sqlalchemy.dialects.sqlite import insert as upsert

from txnstore.db.schema import group_offsets, sink_inputs, sink_positions, sink_runs, transactions
from txnstore.db.store import Store, server_now_ms
from txnstore.errors import InvalidRequest, ProducerFenced
from txnstore.groups.commit_rules import check_group_id
from txnstore.model import NO_PRODUCER, OffsetAndMetadata
from txnstore.spark.sink_run import SinkRun, check_batch_id, check_names, check_number, sink_id_of_query
from txnstore.transactions.sinks import OF_LAST_BATCH

#: In place of a group, which cannot be called so: nothing is committed for such a reader.
NO_GROUP: Final = ""

_INPUTS_OF_BATCH: Final = and_(
    sink_inputs.c.sink_id == bindparam("of_sink_id"),
    sink_inputs.c.run_id == bindparam("of_run_id"),
    sink_inputs.c.batch_id == bindparam("of_batch_id"),
)
_INSERT_INPUT: Final = upsert(sink_inputs).values(noted_ms=server_now_ms())
_NOTE: Final = _INSERT_INPUT.on_conflict_do_update(
    index_elements=[column.name for column in sink_inputs.primary_key],
    set_={"end_offset": _INSERT_INPUT.excluded.end_offset, "noted_ms": _INSERT_INPUT.excluded.noted_ms},
)
_OF_GROUP: Final = sink_positions.alias("of_group").c
_READ_INPUTS: Final = (
    select(
        sink_inputs.c.group_id,
        sink_inputs.c.partition_id,
        sink_inputs.c.in_commit_order,
        sink_inputs.c.reader_id,
        sink_inputs.c.start_offset,
        sink_inputs.c.end_offset,
        sink_inputs.c.from_group,
        sink_inputs.c.fails_on_loss,
        sink_positions.c.in_commit_order.label("was_in_commit_order"),
        sink_positions.c.next_offset,
        exists()
        .where(_OF_GROUP.sink_id == sink_inputs.c.sink_id, _OF_GROUP.group_id == sink_inputs.c.group_id)
        .label("has_positions"),
    )
    .outerjoin(
        sink_positions,
        and_(
            sink_positions.c.sink_id == sink_inputs.c.sink_id,
            sink_positions.c.group_id == sink_inputs.c.group_id,
            sink_positions.c.partition_id == sink_inputs.c.partition_id,
        ),
    )
    .where(_INPUTS_OF_BATCH)
    .order_by(sink_inputs.c.group_id, sink_inputs.c.partition_id, sink_inputs.c.start_offset)
)
# No producer id is ever given to two transactional ids.  One that has expired is forgotten with its row, but a query's
# runs stay.
_MOVED_BY: Final = func.coalesce(
    *(
        select(of_producer.table.c.transactional_id)
        .where(of_producer == group_offsets.c.producer_id, where)
        .limit(1)
        .scalar_subquery()
        for of_producer, where in (
            (transactions.c.producer_id, true()),
            # The condition of its index.
            (transactions.c.previous_producer_id, transactions.c.previous_producer_id >= 0),
            (sink_runs.c.producer_id, sink_runs.c.transactional_id == bindparam("of_transactional_id")),
        )
    )
)
# What was committed by itself is a consumer's, or was set by hand.
_READ_GROUPS: Final = (
    select(
        sink_inputs.c.group_id,
        sink_inputs.c.partition_id,
        group_offsets.c.committed_offset,
        group_offsets.c.offset_in_transaction,
        _MOVED_BY.label("moved_by"),
    )
    .distinct()
    .join_from(
        sink_inputs,
        group_offsets,
        and_(
            group_offsets.c.group_id == sink_inputs.c.group_id,
            group_offsets.c.partition_id == sink_inputs.c.partition_id,
        ),
    )
    .where(_INPUTS_OF_BATCH, group_offsets.c.producer_id != NO_PRODUCER.producer_id)
)
_READ_LAST: Final = select(
    sink_inputs.c.group_id,
    sink_inputs.c.partition_id,
    sink_inputs.c.in_commit_order,
    sink_inputs.c.start_offset,
    sink_inputs.c.end_offset,
).where(_INPUTS_OF_BATCH)
_BEGIN_OF_RUN: Final = (
    select(sink_runs.c.begin_ms)
    .where(
        sink_runs.c.transactional_id == bindparam("of_transactional_id"),
        sink_runs.c.run_id == bindparam("of_run_id"),
    )
    .scalar_subquery()
)
# What runs before this one have noted, and what this one is done with.  What others have noted since it began stays: a
# newer run, which repeats the batch, may have done that before this decision, and is still to be compared with it.
_TRIM_INPUTS: Final = delete(sink_inputs).where(
    sink_inputs.c.sink_id == bindparam("of_sink_id"),
    sink_inputs.c.run_id != OF_LAST_BATCH,
    sink_inputs.c.batch_id <= bindparam("of_batch_id"),
    or_(
        and_(
            sink_inputs.c.run_id == bindparam("of_run_id"),
            sink_inputs.c.batch_id <= bindparam("of_own_batch_id"),
        ),
        and_(
            sink_inputs.c.run_id != bindparam("of_run_id"),
            sink_inputs.c.noted_ms <= _BEGIN_OF_RUN,
        ),
    ),
)
_FORGET_LAST: Final = delete(sink_inputs).where(
    sink_inputs.c.sink_id == bindparam("of_sink_id"), sink_inputs.c.run_id == OF_LAST_BATCH
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
# The lock of the transactional id keeps other runs away, but not one of the same query under another name.
_MOVE_POSITION: Final = _INSERT_POSITION.on_conflict_do_update(
    index_elements=[column.name for column in sink_positions.primary_key],
    set_={"next_offset": _INSERT_POSITION.excluded.next_offset},
    where=sink_positions.c.next_offset <= bindparam("from_offset"),
).execution_options(preserve_rowcount=True)
_HAS_POSITIONS: Final = (
    select(sink_positions.c.sink_id).where(sink_positions.c.sink_id == bindparam("of_sink_id")).limit(1)
)


@dataclass(frozen=True, slots=True)
class SinkInput:
    """A range of a partition that a batch reads; a batch may read several ranges of one partition."""

    query_id: str
    run_id: str
    batch_id: int
    group_id: str
    """The consumer group that the query reads as, or NO_GROUP; two readers in one query have groups of their own."""

    partition_id: int
    start_offset: int
    end_offset: int
    """The offset after the range: what the group commits."""

    in_commit_order: bool = False
    """Whether these are places; the group commits that it stands before what is at the last one."""

    reader_id: int = 0
    """Which reader of the query: two of them are not equally far, which one group cannot say."""

    from_group: bool = False
    """Whether the batch is refused where its group has moved past it since that was planned: so it is unless the query
    was told offsets or times to begin at."""

    fails_on_loss: bool = True
    """Whether the batch is refused where batches before it are missing: failOnDataLoss."""


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


class InputRange(NamedTuple):
    """What one reader reads of a partition in one batch, however many tasks share it."""

    partition_id: int
    in_commit_order: bool
    start_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class NotedInput:
    """The ranges of one batch."""

    novelty: Novelty
    """By those of groups for which the query has committed something."""

    ends: Mapping[tuple[str, int], OffsetAndMetadata]
    """By group and partition id: what to commit."""

    begins: Mapping[tuple[str, int], int]
    """By the same: where the first range begins."""

    ranges: Sequence[tuple[str, InputRange]]
    """All that is not empty, in order, each with its group."""

    unplaced: frozenset[str]
    """The groups of ranges of which no position says whether they are new, NO_GROUP among them."""

    example: str = ""
    """Of what is mixed: one range, for people."""

    skips: bool = False
    """Whether it begins past what the query has read, or that is not known."""

    fails_on_loss: bool = False
    """Whether a reader would rather have the query fail than leave something out."""


def note_inputs(store: Store, inputs: Sequence[SinkInput], *, retry_timeout_ms: int | None = None) -> None:
    """Note what a task is about to read; its batch's decision commits it for the group.

    Safe to repeat.

    Raises:
        InvalidGroupId, InvalidRequest: an id or an offset is not of the documented form.
    """
    entries = [_input_entry(noted) for noted in inputs]

    def work(connection: Connection) -> None:
        connection.execute(_NOTE, entries)
        # Where the query writes elsewhere nobody decides its batches, and nobody else would forget them.
        connection.execute(
            _FORGET_EARLIER, [{f"of_{name}": entry[name] for name in _KEY_OF_EARLIER} for entry in entries]
        )

    if entries:
        store.write(work, retry_timeout_ms=retry_timeout_ms)


def read_inputs(connection: Connection, run: SinkRun, batch_id: int, last_batch_id: int | None) -> NotedInput:
    """Return what the tasks of the run have noted for a batch; `last_batch_id` is the newest one that is decided.

    Raises:
        InvalidRequest: they have read a partition in both orders of delivery for one group, or earlier batches have
            read it in the other one, or two readers have read it for one group.
        ProducerFenced: the query was told no offsets to begin at, and a transaction has moved its group on that may
            have written the same: of its transactional id, of one that nobody knows any more, or before the query has
            read anything of any other.
    """
    rows = connection.execute(_READ_INPUTS, _of_batch(run, batch_id)).all()
    _refuse_passed(connection, run, batch_id, rows)
    readers: dict[tuple[str, int], int] = {}
    ends: dict[tuple[str, int], OffsetAndMetadata] = {}
    begins: dict[tuple[str, int], int] = {}
    kinds: set[Novelty] = set()
    unplaced: set[str] = set()
    example = ""
    skips = False
    is_next = last_batch_id is None or batch_id > last_batch_id
    for row in rows:
        is_empty = row.start_offset == row.end_offset
        key = (row.group_id, row.partition_id)
        # A query that has had another group before may have read there what this one has not: its number says it.
        is_placed = row.next_offset is not None or (is_next and row.has_positions)
        if not is_placed and not is_empty:
            unplaced.add(row.group_id)
        if key not in begins and not (is_empty and row.group_id == NO_GROUP):
            # One that was not there before is read from its first record on.  Where nothing is to be read, the
            # checkpoint says all the same how far the query has come.
            skips |= row.start_offset > (row.next_offset or 0) or not (is_empty or row.has_positions)
        if row.group_id == NO_GROUP:
            continue
        end = OffsetAndMetadata(row.end_offset, offset_in_transaction=0 if row.in_commit_order else None)
        before = ends.get(key, end)
        _check_order(row, before)
        if readers.setdefault(key, row.reader_id) != row.reader_id:
            raise InvalidRequest(
                f"two readers of the query read partition id {row.partition_id} as group {row.group_id[:80]!r}, and"
                " what one of them has still to read would be taken for what the other one has read; nothing was"
                " changed. Give each .load() a kafka.group.id of its own, also where a stream is joined with itself"
            )
        if is_empty and row.next_offset is not None and row.start_offset <= row.next_offset:
            # It moves the group neither on nor back.
            continue
        ends[key] = max(before, end, key=lambda each: each.offset)
        begins.setdefault(key, row.start_offset)
        if is_empty or not is_placed:
            continue
        kind = _novelty(row)
        kinds.add(kind)
        if kind is not Novelty.NEW:
            example = (
                f"partition id {row.partition_id}, offsets {row.start_offset} to {row.end_offset}, read up to"
                f" {row.next_offset}"
            )
    fails_on_loss = any(row.fails_on_loss for row in rows)
    novelty = Novelty.UNKNOWN if not kinds else kinds.pop() if len(kinds) == 1 else Novelty.MIXED
    return NotedInput(novelty, ends, begins, _joined(rows), frozenset(unplaced), example, skips, fails_on_loss)


def read_input_of_last(connection: Connection, run: SinkRun, batch_id: int) -> Sequence[tuple[str, InputRange]]:
    """Return what the last batch, which has this number, has read, as `NotedInput.ranges`; nothing if it is unknown."""
    of_last = _of_batch(run, batch_id) | {"of_run_id": OF_LAST_BATCH}
    return [(group_id, InputRange(*numbers)) for group_id, *numbers in connection.execute(_READ_LAST, of_last)]


def commit_inputs(connection: Connection, run: SinkRun, batch_id: int, noted: NotedInput) -> None:
    """Take note that a batch with this input is committed, and forget what nobody needs any more.

    Raises:
        ProducerFenced: some of it has been read by another batch meanwhile.
    """
    entries = [
        {
            "sink_id": run.sink_id,
            "group_id": group_id,
            "partition_id": partition_id,
            "in_commit_order": _is_place(end),
            "next_offset": end.offset,
            "from_offset": noted.begins[group_id, partition_id],
        }
        for (group_id, partition_id), end in sorted(noted.ends.items(), key=lambda each: each[0])
    ]
    if entries and connection.execute(_MOVE_POSITION, entries).rowcount != len(entries):
        raise ProducerFenced(
            f"what batch {batch_id} reads has just been committed under another transactional id; nothing was changed"
        )
    forget_inputs(connection, run, batch_id)
    connection.execute(_FORGET_LAST, {"of_sink_id": run.sink_id})
    of_last: dict[str, object] = {"sink_id": run.sink_id, "run_id": OF_LAST_BATCH, "batch_id": batch_id}
    of_last |= {"from_group": False, "fails_on_loss": False}
    kept = [
        # Nobody asks any more which reader it was: the number keeps equal ranges apart.
        {**of_last, "group_id": group_id, "reader_id": number, **each._asdict()}
        for number, (group_id, each) in enumerate(noted.ranges)
    ]
    if kept:
        connection.execute(_INSERT_INPUT, kept)


def forget_inputs(connection: Connection, run: SinkRun, batch_id: int, *, keeps_own: bool = False) -> None:
    """Forget what was noted by runs before this one, and for batches that are decided; not what the last one read.

    `keeps_own`: nor what this run has noted for this batch.
    """
    others = {"of_transactional_id": run.transactional_id, "of_own_batch_id": batch_id - keeps_own}
    connection.execute(_TRIM_INPUTS, _of_batch(run, batch_id) | others)


def has_positions(connection: Connection, run: SinkRun) -> bool:
    """Return whether the query's input is known to the sink: it reads as a group."""
    return connection.execute(_HAS_POSITIONS, {"of_sink_id": run.sink_id}).one_or_none() is not None


def _joined(rows: Iterable[Any]) -> list[tuple[str, InputRange]]:
    """Return the ranges of tasks as those of readers: another run may share them out otherwise."""
    joined: list[tuple[str, InputRange]] = []
    reader: tuple[object, ...] | None = None
    for row in sorted(rows, key=_by_reader):
        each = InputRange(row.partition_id, row.in_commit_order, row.start_offset, row.end_offset)
        before, reader = reader, _by_reader(row)[:-1]
        if each.start_offset == each.end_offset:
            continue
        if joined and before == reader and joined[-1][1].end_offset == each.start_offset:
            joined[-1] = (row.group_id, joined[-1][1]._replace(end_offset=each.end_offset))
        else:
            joined.append((row.group_id, each))
    return joined


def _by_reader(row: Any) -> tuple[str, int, int, bool, int]:
    return row.group_id, row.reader_id, row.partition_id, row.in_commit_order, row.start_offset


def _refuse_passed(connection: Connection, run: SinkRun, batch_id: int, rows: Sequence[Any]) -> None:
    """Refuse a batch that reads what its group has passed by a transaction that decided no batch of this query.

    The one that advanced the group may have written that, or left some of it out: it is neither written again nor taken
    for written.  Another transactional id, where it is known, stops only a query that has read nothing yet.
    """
    starts: dict[tuple[str, int], Any] = {}
    for row in rows:
        # What the query has committed itself is known without its group.
        if row.from_group and (row.start_offset == row.end_offset or _novelty(row) is not Novelty.REPEATED):
            starts.setdefault((row.group_id, row.partition_id), row)
    # Only a role that may write for a group may read where it is.
    of_run = _of_batch(run, batch_id) | {"of_transactional_id": run.transactional_id}
    for group in connection.execute(_READ_GROUPS, of_run) if starts else ():
        start = starts.get((group.group_id, group.partition_id))
        # One in the other order is not to be compared: it is refused where the group's offsets are committed.
        if start is None or start.in_commit_order != (group.offset_in_transaction is not None):
            continue
        own_offset = start.start_offset if start.next_offset is None else max(start.start_offset, start.next_offset)
        if own_offset >= group.committed_offset:
            continue
        whose = f"the query's own transactional id {run.transactional_id[:80]!r}"
        if group.moved_by is None:
            whose = "a transactional id that is forgotten, or hidden from this role,"
        elif group.moved_by != run.transactional_id:
            if start.has_positions:
                continue
            whose = f"another transactional id, {group.moved_by[:80]!r},"
        raise ProducerFenced(
            f"batch {batch_id} reads what group {group.group_id[:80]!r} has passed: a transaction of {whose} has"
            f" advanced the group (partition id {group.partition_id}, from offset {start.start_offset} to"
            f" {group.committed_offset}), and may have written what the batch reads; nothing was changed. If it has,"
            " begin a new checkpoint with startingOffsets=group; if not, set the group back to that offset. Two queries"
            " or programs that run at the same time must each have their own group; one that replaces another must take"
            " over its transactional.id, too"
        )


def _novelty(row: Any) -> Novelty:
    if row.next_offset is None or row.start_offset >= row.next_offset:
        return Novelty.NEW
    return Novelty.REPEATED if row.end_offset <= row.next_offset else Novelty.MIXED


def _check_order(row: Any, end: OffsetAndMetadata) -> None:
    # A place and an offset are not to be compared.
    if row.in_commit_order != _is_place(end) or row.was_in_commit_order not in (None, row.in_commit_order):
        raise InvalidRequest(
            f"the query has read partition id {row.partition_id} in both orders of delivery as group"
            f" {row.group_id[:80]!r}; nothing was changed. Each reader of a query has a kafka.group.id of its own, and"
            " a query that reads in another order than before begins with a checkpointLocation of its own"
        )


def _is_place(end: OffsetAndMetadata) -> bool:
    return end.offset_in_transaction is not None


def _input_entry(noted: SinkInput) -> dict[str, object]:
    if noted.group_id != NO_GROUP:
        check_group_id(noted.group_id)
    check_names(noted.query_id, noted.run_id)
    check_batch_id(noted.batch_id)
    for number in (noted.start_offset, noted.end_offset):
        check_number(number, "an offset")
    if noted.start_offset > noted.end_offset:
        raise InvalidRequest(f"a range of offsets begins at {noted.start_offset} and ends at {noted.end_offset}")
    return {
        "sink_id": sink_id_of_query(noted.query_id),
        "run_id": noted.run_id,
        "batch_id": noted.batch_id,
        "group_id": noted.group_id,
        "partition_id": noted.partition_id,
        "in_commit_order": noted.in_commit_order,
        "reader_id": noted.reader_id,
        "start_offset": noted.start_offset,
        "end_offset": noted.end_offset,
        "from_group": noted.from_group,
        "fails_on_loss": noted.fails_on_loss,
    }


def _of_batch(run: SinkRun, batch_id: int) -> dict[str, object]:
    return {"of_sink_id": run.sink_id, "of_run_id": run.run_id, "of_batch_id": batch_id}

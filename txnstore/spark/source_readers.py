"""The source as Spark calls it: a batch read, and a stream.

A batch read fixes its ranges when Spark plans it, so a task that is repeated reads the same.

For a stream, Spark asks how far there is something to read, writes that down, and has it read.  A batch is read between
two offsets that are in Spark's checkpoint before it runs, so a rerun, after whatever died, reads the same
records: all ends lie below the last stable offset, where nothing changes any more.

The checkpoint's offsets are the JSON of Spark's Kafka source, {"topic": {"0": 23}}, so that they can be given to
startingOffsets.  Beside the topics there may be "$from": where this batch begins in partitions that it is the first one
to read, or in which it has to go on elsewhere than the batch before it ended.  Spark asks a Python source for its first
offset again after a restart and forgets the answer; what it does keep, before a batch runs, is the batch's end.  So the
beginning travels there, and a batch that is run again begins where it began the first time, whatever has happened to
the log meanwhile.

The offsets have "$topics" too, the identities of the topics: an offset says nothing of a topic that was made anew under
the name of a deleted one.

In commit order ends are places below the high watermark, where nothing changes either, and the offsets have beside the
topics "$commit_order": from where on transactions are to come whole in each partition (`source_ranges.whole_from`).
That it is there tells a checkpoint of the one order from one of the other.  A batch ends between transactions; only the
first one may begin within some, where its group is: "$in_transaction" has the offsets of the records that come next.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType
from sqlalchemy import Connection

from txnstore.db.store import Store
from txnstore.errors import InvalidConfiguration, PermissionDenied, StoreReadOnly
from txnstore.log.bounds import offset_for_time
from txnstore.log.commit_order import CommitPosition
from txnstore.log.topics import find_topics
from txnstore.model import PartitionName
from txnstore.spark.sink_inputs import NO_GROUP, SinkInput, note_inputs
from txnstore.spark.sink_run import RUN_ID_BYTES_MAX
from txnstore.spark.source_filters import FilterPush, SourceFilters
from txnstore.spark.source_options import COMMIT_ORDER, FROM, IN_TRANSACTION, TOPICS, AtOffsets, Edge, SourceOptions
from txnstore.spark.source_ranges import (
    DataLoss,
    OffsetRange,
    RangePartition,
    RangeReader,
    admit,
    split,
    whole_from,
)
from txnstore.spark.source_snapshot import (
    SourceSnapshot,
    check_with_group,
    once_stable,
    read_snapshot,
    resolve_end,
    resolve_start,
)
from txnstore.spark.stores import check_store_uuid, repeat_while_unknown, store_at
from txnstore.spark.worker_process import spare_what_is_loaded

if TYPE_CHECKING:
    import pyarrow as pa

_PLANNED: Final = "the read was planned"
Offsets = Mapping[PartitionName, int]
Positions = Mapping[PartitionName, CommitPosition]
#: What goes into the checkpoint; JSON.
StreamOffset = dict[str, Any]
#: Before the first batch.  It says nothing, so it is the same whenever Spark asks for it.
INITIAL: Final[StreamOffset] = {}


def stream_offset(
    ends: Offsets,
    begins: Positions | None = None,
    whole_from: Offsets | None = None,
    topic_uuids: Mapping[str, str] | None = None,
) -> StreamOffset:
    """Return the end of a batch: offsets by partition, and where it begins in those of `begins`.

    In commit order `whole_from` says from where on transactions are to come whole; else it is None.  `topic_uuids` are
    the identities of the topics.  Always the same text for the same offsets, whatever the order in which they come.
    """
    offset: StreamOffset = _by_topic(ends)
    if begins is not None or not ends:
        # Without a single partition it still is not INITIAL.
        begins = begins or {}
        offset[FROM] = _by_topic({partition: begin.place for partition, begin in begins.items()})
        within = {name: begin.offset_in_transaction for name, begin in begins.items() if begin.offset_in_transaction}
        if within:
            offset[IN_TRANSACTION] = _by_topic(within)
    if whole_from is not None:
        offset[COMMIT_ORDER] = _by_topic(whole_from)
    if topic_uuids:
        offset[TOPICS] = {topic: topic_uuids[topic] for topic in sorted(topic_uuids)}
    return offset


def ends_of(offset: StreamOffset) -> dict[PartitionName, int]:
    """Return the end of each partition."""
    others = (FROM, IN_TRANSACTION, COMMIT_ORDER, TOPICS)
    return _by_partition({name: numbers for name, numbers in offset.items() if name not in others}, offset)


def whole_from_of(offset: StreamOffset) -> dict[PartitionName, int] | None:
    """Return from where on transactions are to come whole; None of what a query in offset order has written."""
    topics = offset.get(COMMIT_ORDER)
    return None if topics is None else _by_partition(topics, offset)


def topic_uuids_of(offset: StreamOffset) -> Mapping[str, str]:
    """Return the identities of the topics, as far as the offset says them: those of older versions do not."""
    found: Mapping[str, str] = offset.get(TOPICS, {})
    return found


def check_order(options: SourceOptions, offset: StreamOffset) -> None:
    """Refuse what a query in the other order has written into the checkpoint.

    Raises:
        InvalidConfiguration: it has; the same numbers mean something else there.
    """
    if offset == INITIAL or options.in_commit_order == (COMMIT_ORDER in offset):
        return
    own, other = ("commit", "offset") if options.in_commit_order else ("offset", "commit")
    raise InvalidConfiguration(
        f"the query's checkpoint holds offsets in {other} order, which mean nothing in {own} order: let it read with"
        f" txnstore.delivery.order={other}, or begin anew with a checkpointLocation of its own"
    )


def begins_of(start: StreamOffset, end: StreamOffset) -> dict[PartitionName, CommitPosition]:
    """Return where the batch between two offsets begins in each partition that is still read at its end."""
    ends = ends_of(end)
    begins = {**ends_of(start), **_by_partition(end.get(FROM, {}), end)}
    missing = ends.keys() - begins.keys()
    if missing:
        raise _unreadable(f"nothing says where {', '.join(sorted(map(str, missing))[:5])} begins")
    within = _by_partition(end.get(IN_TRANSACTION, {}), end)
    return {partition: CommitPosition(begins[partition], within.get(partition, 0)) for partition in ends}


def _by_topic(offsets: Offsets) -> dict[str, dict[str, int]]:
    topics: dict[str, dict[str, int]] = {}
    for partition in sorted(offsets):
        topics.setdefault(partition.topic, {})[str(partition.partition)] = offsets[partition]
    return topics


def _by_partition(topics: Mapping[str, Any], whole: StreamOffset) -> dict[PartitionName, int]:
    try:
        found = {
            PartitionName(topic, int(number)): offset
            for topic, numbers in topics.items()
            for number, offset in numbers.items()
        }
    except (AttributeError, ValueError, TypeError):
        raise _unreadable(json.dumps(whole)[:200]) from None
    if set(map(type, found.values())) - {int}:
        raise _unreadable(json.dumps(whole)[:200])
    return found


def _unreadable(why: str) -> InvalidConfiguration:
    return InvalidConfiguration(
        f"the query's checkpoint holds offsets that txnstore's source did not write ({why}); was it made by another"
        " source? Use a checkpointLocation of its own"
    )


class TxnStoreReader(DataSourceReader):
    """Reads a range of each partition, once."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        """Keep what is asked for; the database is asked by `partitions`."""
        self._options = options
        self._schema = schema
        self._filters = SourceFilters(options.in_commit_order)

    @property
    def pushFilters(self) -> Any:  # noqa: N802 - see source_filters
        """What takes over filters of the query."""
        return FilterPush(self._filters)

    def partitions(self) -> list[InputPartition]:
        """Return the ranges as they are now, all of one snapshot.

        Raises:
            InvalidConfiguration, UnknownTopicOrPartition: the options name what is not there.
            OffsetOutOfRange: records that were asked for are gone, and the query fails on that.
        """
        options = self._options
        store = store_at(options.address)
        ranges = once_stable(store, self._plan)
        parts = split(ranges, min_partitions=options.min_partitions, max_records=options.max_records_per_partition)
        # For an empty list Spark would make a partition of its own.
        return [RangePartition(part, store.store_uuid) for part in parts] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the records of one range."""
        if not isinstance(partition, RangePartition):
            return iter(())
        options = self._options
        store = store_at(options.address)
        check_store_uuid(store, partition.store_uuid, _PLANNED)
        return RangeReader(
            store,
            self._schema,
            options.isolation,
            DataLoss(fails=options.fail_on_data_loss),
            options.in_commit_order,
            self._filters.first_timestamp_ms,
        ).read(partition.wanted)

    def _plan(self, connection: Connection) -> list[OffsetRange]:
        options = self._options
        snapshot = read_snapshot(connection, options)
        starts = resolve_start(connection, options, snapshot)
        ends = resolve_end(connection, options, snapshot)
        _check_order(options, starts, ends)
        ranges = [
            self._within_log(connection, snapshot, partition, starts[partition], ends[partition])
            for partition in snapshot.bounds
        ]
        return [found for found in ranges if found is not None]

    def _within_log(
        self,
        connection: Connection,
        snapshot: SourceSnapshot,
        partition: PartitionName,
        start: CommitPosition,
        end: int,
    ) -> OffsetRange | None:
        """Return what is read of a partition, or None if nothing is; its log has all of it, or it is said what not."""
        loss = DataLoss(fails=self._options.fail_on_data_loss)
        bounds = snapshot.bounds[partition]
        readable = snapshot.ends[partition]
        if start.place > bounds.high_watermark:
            # However little there is to read: what was there is gone.
            start = loss.go_on_within(partition, start, bounds)
        if start.place >= end:
            return None
        whole = OffsetRange(partition, bounds.partition_id, start, end, whole_from(start.place, bounds))
        wanted = self._filters.clip(whole)
        if wanted is None:
            return None
        if end > readable:
            loss.report(
                f"{partition} was to be read up to offset {end}, but it can be read only up to {readable}",
                f"reads up to {readable}",
            )
        begin = loss.go_on_within(partition, wanted.begin, bounds)
        end = min(wanted.end_offset, readable)
        if self._filters.first_timestamp_ms > 0:
            found = offset_for_time(
                connection, bounds.partition_id, self._filters.first_timestamp_ms, self._options.bounding_isolation
            )
            begin = max(begin, CommitPosition(end if found is None else found.offset))
        return replace(wanted, begin=begin, end_offset=end) if begin.place < end else None


def _check_order(options: SourceOptions, starts: Positions, ends: Offsets) -> None:
    """Refuse offsets that were written down the wrong way round; times may well come to that."""
    if not (isinstance(options.start, AtOffsets) and isinstance(options.end, AtOffsets)):
        return
    for partition, start in starts.items():
        if start.place > ends[partition]:
            raise InvalidConfiguration(
                f"{partition} begins at offset {start.place} (startingOffsets), after its end at {ends[partition]}"
                " (endingOffsets)"
            )


@dataclass(frozen=True, slots=True)
class _BatchRange:
    """Where the next batch begins, and how far it could go."""

    starts: Offsets
    begins: Positions
    """Those of `starts` that are not the end of the batch before."""

    ends: Offsets
    whole_from: Offsets | None
    """In commit order: from where on transactions are to come whole."""

    topic_uuids: Mapping[str, str]


class TxnStoreStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads on and on; one is made for the driver and its like for the tasks."""

    def __init__(
        self, options: SourceOptions, schema: StructType, monotonic_seconds: Callable[[], float] = time.monotonic
    ) -> None:
        """Keep what is asked for; nothing is opened yet."""
        self._options = options
        self._schema = schema
        self._monotonic_seconds = monotonic_seconds
        self._loss = DataLoss(fails=options.fail_on_data_loss)
        #: When a batch was last given out, for minOffsetsPerTrigger; None before the first one.
        self._last_batch_seconds: float | None = None
        #: How far an available-now query goes.
        self._final_ends: Offsets | None = None
        self._latest: StreamOffset | None = None
        #: One process plans all batches of a run for a reader, so this tells it from the query's other ones.
        self._reader_id = secrets.randbits(63)
        #: Where the first batch ends that this process has planned.
        self._first_end: StreamOffset | None = None

    def initialOffset(self) -> StreamOffset:  # noqa: N802 - the name is Spark's
        """Return what stands before the first batch, always the same: see `source_offsets`."""
        return INITIAL

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - the name is Spark's
        """Return what the options say about the size of a batch."""
        if self._options.max_offsets_per_trigger is not None:
            return ReadMaxRows(self._options.max_offsets_per_trigger)
        if self._options.min_offsets_per_trigger is not None:
            return ReadMinRows(self._options.min_offsets_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - the name is Spark's
        """Fix where the query ends: at what is there now."""
        # What is missing is for `latestOffset` to judge.
        snapshot = once_stable(
            store_at(self._options.address),
            lambda connection: read_snapshot(connection, self._options, all_present=False),
        )
        self._final_ends = snapshot.ends

    def reportLatestOffset(self) -> StreamOffset | None:  # noqa: N802 - the name is Spark's
        """Return how far there was something to read when it was last asked; the progress of the query shows it."""
        return self._latest

    def latestOffset(self, start: StreamOffset, limit: ReadLimit) -> StreamOffset:  # noqa: N802 - the name is Spark's
        """Return the end of the next batch: `start` itself if there is nothing new to read.

        The first one is never the same as `start`: where the stream begins is in the checkpoint before anything runs.

        Raises:
            InvalidConfiguration, UnknownTopicOrPartition: the options name what is not there, or another order than
                the checkpoint has.
            OffsetOutOfRange: records that the query has not read yet are gone, and it fails on that.
        """
        check_order(self._options, start)
        batch = once_stable(store_at(self._options.address), lambda connection: self._next_batch(connection, start))
        self._latest = stream_offset(batch.ends, whole_from=batch.whole_from)
        if not isinstance(limit, ReadAllAvailable) and self._waits_for_more(start, batch):
            return start
        ends = admit(batch.starts, batch.ends, limit.max_rows if isinstance(limit, ReadMaxRows) else None)
        begins = batch.begins if batch.begins or start == INITIAL else None
        if begins is None and ends == ends_of(start):
            return start
        self._last_batch_seconds = self._monotonic_seconds()
        return stream_offset(ends, begins, batch.whole_from, batch.topic_uuids)

    def partitions(self, start: StreamOffset, end: StreamOffset) -> list[InputPartition]:
        """Return the ranges between two offsets, as parts for the tasks.

        Raises:
            InvalidConfiguration: the checkpoint has them in another order than the options name.
        """
        if start == end:
            # An end that says where its own batch begins says nothing of another one.
            return []
        options = self._options
        check_order(options, start)
        check_order(options, end)
        begins, ends = begins_of(start, end), ends_of(end)
        if self._first_end is None:
            self._first_end = end
        # A group's offsets are to stand in every partition from the first batch on, also where nothing is yet.  After
        # each start the sink is to see all, too: a restored store may have nothing to read past the checkpoint.
        with_empty = options.group_id is not None and (FROM in end or end == self._first_end)
        whole = whole_from_of(end) or {}
        planned_uuids = topic_uuids_of(end)
        store = store_at(options.address)
        ids = store.read(lambda connection: _partition_ids(connection, begins, planned_uuids))
        ranges = []
        for partition, begin in begins.items():
            partition_id = ids.get(partition)
            if partition_id is None:
                self._loss.report(
                    f"{partition} is gone, with the records from offset {begin.place} on: its topic was deleted",
                    "goes on without it",
                )
            elif begin.place < ends[partition] or with_empty:
                ranges.append(OffsetRange(partition, partition_id, begin, ends[partition], whole.get(partition, 0)))
        parts = split(ranges, min_partitions=options.min_partitions, max_records=options.max_records_per_partition)
        return [RangePartition(part, store.store_uuid, self._reader_id) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the records of one range, and note for the sink that this batch reads it."""
        assert isinstance(partition, RangePartition), "the source's own partitions"
        options = self._options
        store = store_at(options.address)
        check_store_uuid(store, partition.store_uuid, _PLANNED)
        noted = _noted(options, partition)
        if noted is not None:
            try:
                _note(store, noted)
            except (PermissionDenied, StoreReadOnly):
                # A role that may only read writes nothing here; for a group it would have to.
                if noted.group_id != NO_GROUP:
                    raise
        reader = RangeReader(store, self._schema, options.isolation, self._loss, options.in_commit_order)
        return reader.read(partition.wanted)

    def _next_batch(self, connection: Connection, start: StreamOffset) -> _BatchRange:
        # The loss of a topic that was there once is reported below.
        snapshot = read_snapshot(connection, self._options, all_present=start == INITIAL)
        starts: dict[PartitionName, int] = {}
        begins: dict[PartitionName, CommitPosition] = {}
        if start == INITIAL:
            resolved = resolve_start(connection, self._options, snapshot)
            check_with_group(connection, self._options, resolved, snapshot)
            for partition, position in resolved.items():
                begins[partition] = self._loss.go_on_within(partition, position, snapshot.bounds[partition])
                starts[partition] = begins[partition].place
        else:
            known = ends_of(start)
            self._report_gone(known, snapshot)
            made_anew = _made_anew(topic_uuids_of(start), snapshot)
            self._report_made_anew(made_anew)
            for partition, bounds in snapshot.bounds.items():
                before = None if partition.topic in made_anew else known.get(partition)
                # A partition that is new is read from its first record on.
                begin = (
                    bounds.log_start_offset if before is None else self._loss.begin_within(partition, before, bounds)
                )
                starts[partition] = begin
                if begin != before:
                    begins[partition] = CommitPosition(begin)
        ends = self._ends(snapshot, starts, begins)
        if not self._options.in_commit_order:
            return _BatchRange(starts, begins, ends, None, snapshot.topic_uuids)
        # Where a partition starts over, so do its transactions.
        whole = {
            **(whole_from_of(start) or {}),
            **{partition: whole_from(begin.place, snapshot.bounds[partition]) for partition, begin in begins.items()},
        }
        of_starts = {partition: whole.get(partition, 0) for partition in starts}
        return _BatchRange(starts, begins, ends, of_starts, snapshot.topic_uuids)

    def _report_gone(self, known: Mapping[PartitionName, int], snapshot: SourceSnapshot) -> None:
        gone = sorted(known.keys() - snapshot.bounds.keys())
        if gone:
            names = ", ".join(map(str, gone[:5]))
            self._loss.report(
                f"the query has read {names}{' ...' if gone[5:] else ''}, which it no longer can: its topic was"
                " deleted, or the query's options no longer name it",
                "goes on without it",
            )

    def _report_made_anew(self, topics: Collection[str]) -> None:
        if topics:
            self._loss.report(
                f"the query has read {', '.join(sorted(topics))}, which it no longer can: it was deleted, and another"
                " topic has been created under its name",
                "reads the other one from its first record on",
            )

    def _ends(self, snapshot: SourceSnapshot, starts: Offsets, begins: Positions) -> dict[PartitionName, int]:
        ends = {}
        for partition, start in starts.items():
            end = snapshot.ends[partition]
            if self._final_ends is not None:
                end = min(end, self._final_ends.get(partition, start))
            # What was read of open transactions before, at another isolation level, is not read again.
            ends[partition] = max(start, end)
        # What the group has consumed already ends a batch, in all partitions: a checkpoint that was restored to an
        # older one makes batches that the sink recognises as a whole (see `sink_coordination`).
        committed = {
            partition: max(start, snapshot.committed.get(partition, CommitPosition(start)).place)
            for partition, start in starts.items()
        }
        if any(start < min(committed[partition], ends[partition]) for partition, start in starts.items()):
            ends = {partition: min(end, committed[partition]) for partition, end in ends.items()}
        # No batch ends within a transaction: one that begins there reads the rest, whatever else ends it.
        for partition, start in starts.items():
            if begins.get(partition, CommitPosition(start)).offset_in_transaction > 0:
                ends[partition] = max(ends[partition], start + 1)
        return ends

    def _waits_for_more(self, start: StreamOffset, batch: _BatchRange) -> bool:
        """Return whether the batch is to wait until there is more: minOffsetsPerTrigger."""
        minimum = self._options.min_offsets_per_trigger
        if minimum is None or self._final_ends is not None or start == INITIAL or self._last_batch_seconds is None:
            return False
        if sum(batch.ends.values()) - sum(batch.starts.values()) >= minimum:
            return False
        waited_ms = (self._monotonic_seconds() - self._last_batch_seconds) * 1000
        return waited_ms < self._options.max_trigger_delay_ms


def _made_anew(known_uuids: Mapping[str, str], snapshot: SourceSnapshot) -> set[str]:
    """Return the topics that others of the same name were read before."""
    return {name for name, uuid in snapshot.topic_uuids.items() if known_uuids.get(name, uuid) != uuid}


def _partition_ids(
    connection: Connection, partitions: Iterable[PartitionName], topic_uuids: Mapping[str, str]
) -> dict[PartitionName, int]:
    """Return the ids of the partitions that are there, of these very topics."""
    names = sorted({partition.topic for partition in partitions})
    return {
        PartitionName(topic.name, number): partition_id
        for topic in find_topics(connection, names)
        if topic_uuids.get(topic.name, topic.topic_uuid) == topic.topic_uuid
        for number, partition_id in enumerate(topic.partition_ids)
    }


def _note(store: Store, noted: SinkInput) -> None:
    if noted.group_id == NO_GROUP and store.read(store.backend.is_standby):
        # Who only reads there waits for no primary.
        return
    repeat_while_unknown(
        lambda left_ms: note_inputs(store, [noted], retry_timeout_ms=left_ms), store.limits.retry_timeout_ms
    )


def _noted(options: SourceOptions, partition: RangePartition) -> SinkInput | None:
    """Return what the sink has to know of this task: Spark tells tasks, and nobody else, which batch they work for."""
    task: Any = TaskContext.get()
    if task is None:
        return None
    query_id, batch_id = task.getLocalProperty("sql.streaming.queryId"), task.getLocalProperty("streaming.sql.batchId")
    run_id = task.getLocalProperty("spark.jobGroup.id")
    if query_id is None or batch_id is None:
        return None
    if not run_id or len(run_id.encode()) > RUN_ID_BYTES_MAX:
        # foreachBatch has set a job group of its own: it is not the sink that writes, and nobody decides the batch.
        return None
    wanted = partition.wanted
    return SinkInput(
        query_id=query_id,
        run_id=run_id,
        batch_id=int(batch_id),
        group_id=options.group_id or NO_GROUP,
        partition_id=wanted.partition_id,
        start_offset=wanted.start_offset,
        end_offset=wanted.end_offset,
        in_commit_order=options.in_commit_order,
        reader_id=partition.reader_id,
        from_group=options.group_id is not None and isinstance(options.start, Edge),
        fails_on_loss=options.fail_on_data_loss,
    )


# A process that plans a stream imports this and opens no store.
spare_what_is_loaded()

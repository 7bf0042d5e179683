"""The partitions that a query reads, as they are at one moment, and where the read begins and ends there.

Everything that one plan needs is read in one snapshot of the database: a transaction that wrote to several partitions
lies before the ends of all of them or after them all, but where an older one that is open holds some of them back.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from sqlalchemy import Connection

from txnstore.clients.overdue_help import end_overdue
from txnstore.db.store import Store
from txnstore.errors import InvalidConfiguration, UnknownTopicOrPartition, UnstableOffsetCommit
from txnstore.groups.commit_rules import other_order
from txnstore.groups.offsets import read_offsets, read_stable_offsets
from txnstore.log.bounds import Bounds, offset_for_time, read_bounds
from txnstore.log.commit_order import CommitPosition, fetch_in_commit_order
from txnstore.log.fetch import fetch
from txnstore.log.topics import find_topics, list_topics
from txnstore.model import PartitionName
from txnstore.spark.source_options import (
    EARLIEST,
    LATEST,
    AtOffsets,
    AtTime,
    AtTimes,
    Edge,
    Limit,
    PartitionSelection,
    SourceOptions,
)
from txnstore.spark.stores import check_are_here

_Result = TypeVar("_Result")
_logger: Final = logging.getLogger(__name__)

#: How long a query that begins at its group's offsets waits for a transaction that is about to change them.
STABLE_TIMEOUT_SECONDS: Final = 60.0
_STABLE_PAUSE_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class SourceSnapshot:
    """The selected partitions at one moment."""

    bounds: Mapping[PartitionName, Bounds]
    ends: Mapping[PartitionName, int]
    """How far each can be read at the query's isolation level, or in commit order."""

    committed: Mapping[PartitionName, CommitPosition]
    """How far the query's group has come, where it has committed anything; in commit order within a transaction, too.
    """

    topic_uuids: Mapping[str, str]
    """The identity of each topic."""


def read_snapshot(connection: Connection, options: SourceOptions, *, all_present: bool = True) -> SourceSnapshot:
    """Return the partitions that the query reads as they are now.

    Raises:
        UnknownTopicOrPartition: a topic or partition that an option names is not there, and `all_present`.
        InvalidRequest: the group has committed offsets in another order than the query reads in.
    """
    bounds, topic_uuids = _read_selected(connection, options.selection, all_present=all_present)
    ends = {partition: of.end(options.bounding_isolation) for partition, of in bounds.items()}
    committed: dict[PartitionName, CommitPosition] = {}
    if options.group_id:
        by_id = read_offsets(connection, options.group_id, [of.partition_id for of in bounds.values()]).offsets
        for offset in by_id.values():
            if (offset.offset_in_transaction is not None) != options.in_commit_order:
                # A place is no offset.
                raise other_order(options.group_id, offset)
        positions = {
            number: CommitPosition(found.offset, found.offset_in_transaction or 0) for number, found in by_id.items()
        }
        committed = {
            partition: positions[of.partition_id] for partition, of in bounds.items() if of.partition_id in positions
        }
    return SourceSnapshot(bounds, ends, committed, topic_uuids)


def resolve_start(
    connection: Connection, options: SourceOptions, snapshot: SourceSnapshot
) -> dict[PartitionName, CommitPosition]:
    """Return where a query that is new begins in each partition.

    Raises:
        InvalidConfiguration: an option does not name the very partitions that are read, or no record is at a time.
        UnstableOffsetCommit: an open transaction holds offsets of the group.
    """
    start = options.start
    if start is Edge.GROUP:
        assert options.group_id, "checked with the options"
        read_stable_offsets(connection, options.group_id, [of.partition_id for of in snapshot.bounds.values()])
        return {
            partition: snapshot.committed.get(partition, CommitPosition(of.log_start_offset))
            for partition, of in snapshot.bounds.items()
        }
    resolved = _resolve(connection, options, snapshot, start, otherwise=options.time_not_found)
    return {partition: CommitPosition(offset) for partition, offset in resolved.items()}


def check_with_group(
    connection: Connection,
    options: SourceOptions,
    starts: Mapping[PartitionName, CommitPosition],
    snapshot: SourceSnapshot,
) -> None:
    """Refuse a new stream that would write again what its group has read, or leave out what it has not.

    `earliest` stands in many a program that has only lost its checkpoint, and so does nothing, which is `latest`;
    offsets and times by partition do not.  Where `latest` is what the program says, a warning has to do.

    Raises:
        InvalidConfiguration: it would.
    """
    if options.start is Edge.EARLIEST:
        _refuse_again(options, starts, snapshot)
    elif options.start is Edge.LATEST:
        _report_left_out(connection, options, starts, snapshot)


def _refuse_again(
    options: SourceOptions, starts: Mapping[PartitionName, CommitPosition], snapshot: SourceSnapshot
) -> None:
    for partition, start in starts.items():
        committed = snapshot.committed.get(partition)
        if committed is not None and start < committed:
            raise InvalidConfiguration(
                f"with startingOffsets=earliest the query would read {partition} from {start.place} on, though its"
                f" group {options.group_id!r} has committed {committed.place}: a sink would write again what lies"
                " between. startingOffsets=group goes on where the group is. To read it again, give the query another"
                " group, set this one back (`txnstore groups reset-offsets`), or name the offsets as JSON, with -2 for"
                " earliest"
            )


def _report_left_out(
    connection: Connection,
    options: SourceOptions,
    starts: Mapping[PartitionName, CommitPosition],
    snapshot: SourceSnapshot,
) -> None:
    if not snapshot.committed:
        return
    for partition, start in starts.items():
        # As for startingOffsets=group: a partition that was added since the group is not read at all.
        bounds = snapshot.bounds[partition]
        committed = snapshot.committed.get(partition)
        begin = CommitPosition(bounds.log_start_offset) if committed is None else committed
        if start <= begin or not _has_records(connection, options, bounds, begin, start.place):
            continue
        has_come = "has committed nothing there" if committed is None else f"has come to {committed.place} only"
        what = (
            f"the query begins to read {partition} at the latest offset, {start.place}, though its group"
            f" {options.group_id!r} {has_come}"
        )
        if not options.start_is_given:
            raise InvalidConfiguration(
                f"without startingOffsets {what}: a query that has lost its checkpoint would leave out what lies"
                " between. startingOffsets=group goes on where the group is (at the earliest where it has committed"
                " nothing), startingOffsets=latest leaves it out"
            )
        _logger.warning("%s, and leaves out what lies between", what, extra={"event": "source_begins_past_group"})


def _has_records(
    connection: Connection, options: SourceOptions, bounds: Bounds, begin: CommitPosition, end: int
) -> bool:
    """Return whether there is a record to read, or was one that is gone; markers and what was aborted are none."""
    if begin.place < bounds.log_start_offset or begin.offset_in_transaction > 0:
        return True
    position = begin
    while position.place < end:
        of_partition = {bounds.partition_id: end}
        if options.in_commit_order:
            asked = {bounds.partition_id: position}
            page = fetch_in_commit_order(connection, asked, records_max=1, end_places=of_partition)[bounds.partition_id]
            found, next_position = bool(page.batches), page.next_position
        else:
            places = {bounds.partition_id: position.place}
            read = fetch(connection, places, isolation=options.isolation, records_max=1, end_offsets=of_partition)
            found = bool(read[bounds.partition_id].batches)
            next_position = CommitPosition(read[bounds.partition_id].next_offset)
        if found or next_position <= position:
            return True
        position = next_position
    return False


def resolve_end(connection: Connection, options: SourceOptions, snapshot: SourceSnapshot) -> dict[PartitionName, int]:
    """Return where a batch read ends in each partition; at the last record if none is at a time.

    Raises:
        InvalidConfiguration: an option does not name the very partitions that are read.
    """
    return _resolve(connection, options, snapshot, options.end, otherwise="latest")


def once_stable(store: Store, work: Callable[[Connection], _Result]) -> _Result:
    """Run `work` on a snapshot in which no open transaction holds offsets that it reads; wait a while for one.

    Raises:
        UnstableOffsetCommit: a transaction has held offsets for STABLE_TIMEOUT_SECONDS.
    """
    deadline = time.monotonic() + STABLE_TIMEOUT_SECONDS
    while True:
        # A query that plans now and then has nobody who would be told later when a transaction's time is up.
        end_overdue(lambda: store, ())
        try:
            return store.read(work)
        except UnstableOffsetCommit:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_STABLE_PAUSE_SECONDS)


def _read_selected(
    connection: Connection, selection: PartitionSelection, *, all_present: bool
) -> tuple[dict[PartitionName, Bounds], dict[str, str]]:
    if selection.partitions is not None:
        names = sorted({partition.topic for partition in selection.partitions})
    elif selection.pattern is not None:
        # The whole name has to match, as in Kafka.
        matches = re.compile(selection.pattern).fullmatch
        names = [name for name in list_topics(connection) if matches(name)]
    else:
        names = list(selection.topics)
    topics = find_topics(connection, names)
    check_are_here(topics)
    ids = {
        PartitionName(topic.name, number): partition_id
        for topic in topics
        for number, partition_id in enumerate(topic.partition_ids)
    }
    if all_present and selection.partitions is not None:
        _refuse_missing(f"assign names the partition {name}" for name in selection.partitions - ids.keys())
    elif all_present:
        found = {partition.topic for partition in ids}
        _refuse_missing(f"subscribe names the topic {name}" for name in names if name not in found)
    if selection.partitions is not None:
        ids = {partition: ids[partition] for partition in selection.partitions & ids.keys()}
    by_id = read_bounds(connection, ids.values())
    bounds = {partition: by_id[ids[partition]] for partition in sorted(ids)}
    return bounds, {topic.name: topic.topic_uuid for topic in topics}


def _refuse_missing(missing: Iterable[str]) -> None:
    for what in sorted(missing):
        raise UnknownTopicOrPartition(f"{what}, which is not there; create it first, or correct the option")


def _resolve(
    connection: Connection, options: SourceOptions, snapshot: SourceSnapshot, limit: Limit, *, otherwise: str
) -> dict[PartitionName, int]:
    if isinstance(limit, AtOffsets):
        _check_complete(limit.option, limit.offsets, snapshot)
        special = {EARLIEST: Edge.EARLIEST, LATEST: Edge.LATEST}
        return {
            partition: _edge(snapshot, partition, special[offset]) if offset in special else offset
            for partition, offset in limit.offsets.items()
        }
    if isinstance(limit, AtTimes):
        _check_complete(limit.option, limit.timestamps_ms, snapshot)
        times = dict(limit.timestamps_ms)
    elif isinstance(limit, AtTime):
        times = dict.fromkeys(snapshot.bounds, limit.timestamp_ms)
    else:
        return {partition: _edge(snapshot, partition, limit) for partition in snapshot.bounds}
    return {
        partition: _at_time(connection, options, snapshot, partition, timestamp_ms=timestamp_ms, otherwise=otherwise)
        for partition, timestamp_ms in times.items()
    }


def _edge(snapshot: SourceSnapshot, partition: PartitionName, edge: Edge) -> int:
    return snapshot.bounds[partition].log_start_offset if edge is Edge.EARLIEST else snapshot.ends[partition]


def _at_time(
    connection: Connection,
    options: SourceOptions,
    snapshot: SourceSnapshot,
    partition: PartitionName,
    *,
    timestamp_ms: int,
    otherwise: str,
) -> int:
    partition_id = snapshot.bounds[partition].partition_id
    # In commit order too: what has a place before that offset has an offset before it.
    found = offset_for_time(connection, partition_id, timestamp_ms, options.bounding_isolation)
    if found is not None:
        return found.offset
    if otherwise == "error":
        raise InvalidConfiguration(
            f"partition {partition} has no record with the timestamp {timestamp_ms} or a later one;"
            " startingOffsetsByTimestampStrategy=latest begins at the latest offset then"
        )
    return snapshot.ends[partition]


def _check_complete(option: str, given: Mapping[PartitionName, int], snapshot: SourceSnapshot) -> None:
    """Refuse offsets for some of the partitions only: nothing would say where to begin in the others."""
    missing, unknown = snapshot.bounds.keys() - given.keys(), given.keys() - snapshot.bounds.keys()
    if missing or unknown:
        raise InvalidConfiguration(
            f"{option} names every partition that is read and no other"
            f"{_some('; missing', missing)}{_some('; not read', unknown)}"
        )


def _some(label: str, partitions: Iterable[PartitionName]) -> str:
    names = sorted(map(str, partitions))
    return f"{label}: {', '.join(names[:5])}{' ...' if names[5:] else ''}" if names else ""

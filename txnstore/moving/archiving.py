"""The export: the committed records of a topic, into a file that others can read, and that can be loaded again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import Connection

from txnstore.db.cluster.cluster import Cluster, repaired
from txnstore.db.store import Store
from txnstore.log.bounds import offset_for_time, read_bounds
from txnstore.log.codec import RecordBatch, RecordBatchRow, RecordRow
from txnstore.log.columns import Codec
from txnstore.log.fetch import Page, fetch
from txnstore.log.topics import Topic, get_topic
from txnstore.model import IsolationLevel, TimestampType
from txnstore.moving.archive_files import SCHEMA, Contents, new_archive_id, write_codec, writing

#: What a row group holds at most, but for what its last record brings on top; about so much is in memory.
ROW_GROUP_ROWS_MAX: Final = 64 * 1024
#: Of keys, values and headers as they are, however small a codec makes them, with what Python adds to each.
ROW_GROUP_BYTES_MAX: Final = 32 * 1024 * 1024
#: What a record takes in memory besides: numbers, two objects, places in lists.
_RECORD_BYTES: Final = 200
#: And a header: a pair of two objects.
_HEADER_BYTES: Final = 160

_COMMITTED: Final = IsolationLevel.READ_COMMITTED
_TYPE_NAMES: Final = {TimestampType.CREATE_TIME: "CreateTime", TimestampType.LOG_APPEND_TIME: "LogAppendTime"}


@dataclass(frozen=True, slots=True)
class RecordSelection:
    """Which records are exported: of each partition those that meet all conditions."""

    partitions: Collection[int] = ()
    """Partition numbers; empty: all."""

    from_offset: int = 0
    until_offset: int | None = None
    """The offset behind the last one; None: up to the last stable offset."""

    since_ms: int | None = None
    """From the first record with this timestamp or a later one."""

    before_ms: int | None = None
    """Up to the first record with this timestamp or a later one, which stays out: the next archive begins there."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What an archive holds."""

    record_count: int
    contents: Contents


def export(
    cluster: Cluster,
    topic_name: str,
    path: Path,
    selection: RecordSelection | None = None,
    *,
    compression: str = "zstd",
    replaces: bool = True,
    told: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write the committed records of a topic to a file, in the order of partitions and offsets.

    What is committed later, or follows an open transaction, is not in it: its ranges say where it ends.  A regular file
    of the name is replaced, unless `replaces` is false.  `told` hears how many offsets are done, and of how many.

    Raises:
        OSError: the file cannot be written, or what is there not be replaced; nothing is left of it.
        OffsetOutOfRange: records were deleted while they were to be read.
        CorruptBatch: a stored batch is damaged.
        TxnStoreError: there is no such topic or partition, or a database refuses or cannot be reached.
    """
    wanted = selection or RecordSelection()
    topic = cluster.controller.read(lambda connection: get_topic(connection, topic_name))
    ranges = _ranges(cluster, topic, wanted)
    contents = Contents(new_archive_id(), topic.name, len(topic.partition_ids), topic.config, ranges)
    total, done, record_count, codec = sum(end - start for start, end in ranges.values()), 0, 0, Codec.NONE
    with writing(path, contents, compression=compression, replaces=replaces) as writer:
        group = _RowGroup(topic.name, writer)
        for number, (start, end) in ranges.items():
            for page, position in _pages(cluster, topic, number, start, end):
                for batch in page.batches:
                    record_count += group.add(number, batch, position, end)
                    codec = max(codec, batch.codec)
                done += min(page.next_offset, end) - position
                if told is not None:
                    told(done, total)
        group.write()
        write_codec(writer, codec.label)
    return Exported(record_count, replace(contents, codec=codec.label))


def _ranges(cluster: Cluster, topic: Topic, wanted: RecordSelection) -> dict[int, tuple[int, int]]:
    """Return the first offset of each partition that is wanted, and the one after the last.

    Of all partitions of one database at one moment: what is committed in several of them meanwhile is in none.
    """
    by_leader: dict[int, dict[int, int]] = {}
    for number in sorted(set(wanted.partitions)) or range(len(topic.partition_ids)):
        partition_id = topic.partition_id(number)
        by_leader.setdefault(topic.leaders[number], {})[number] = partition_id
    ranges: dict[int, tuple[int, int]] = {}
    for leader, ids in by_leader.items():

        def read(connection: Connection, ids: dict[int, int] = ids) -> dict[int, tuple[int, int]]:
            return {number: _range(connection, partition_id, wanted) for number, partition_id in ids.items()}

        ranges |= repaired(cluster, leader, lambda store, read=read: store.read(read))  # type: ignore[misc]
    return dict(sorted(ranges.items()))


def _on_leader(cluster: Cluster, topic: Topic, number: int, work: Callable[[Connection, int], Any]) -> Any:
    """Read something of a partition, where it lives."""
    partition_id = topic.partition_id(number)

    def call(store: Store) -> Any:
        return store.read(lambda connection: work(connection, partition_id))

    return repaired(cluster, topic.leaders[number], call)


def _range(connection: Connection, partition_id: int, wanted: RecordSelection) -> tuple[int, int]:
    bounds = read_bounds(connection, [partition_id])[partition_id]
    start, end = max(bounds.log_start_offset, wanted.from_offset), bounds.end(_COMMITTED)
    if wanted.until_offset is not None:
        end = min(end, wanted.until_offset)
    for time_ms, is_start in ((wanted.since_ms, True), (wanted.before_ms, False)):
        if time_ms is None:
            continue
        found = offset_for_time(connection, partition_id, time_ms, _COMMITTED)
        offset = bounds.end(_COMMITTED) if found is None else found.offset
        start, end = (max(start, offset), end) if is_start else (start, min(end, offset))
    return min(start, end), end


def _pages(cluster: Cluster, topic: Topic, number: int, start: int, end: int) -> Iterator[tuple[Page, int]]:
    """Return what is in the range, page by page, and where each page begins."""

    def read(connection: Connection, partition_id: int) -> Page:
        return fetch(connection, {partition_id: start}, end_offsets={partition_id: end})[partition_id]

    while start < end:
        page: Page = _on_leader(cluster, topic, number, read)
        yield page, start
        start = page.next_offset


@dataclass
class _RowGroup:
    """The rows that are not in the file yet, as columns."""

    topic: str
    writer: pq.ParquetWriter
    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in SCHEMA.names})
    size_bytes: int = 0

    def add(self, number: int, batch: RecordBatch, from_offset: int, end_offset: int) -> int:
        """Add the records of a batch that are within the range; return how many."""
        rows, total = batch.rows(from_offset), 0
        # A small batch may unpack to many times its size, so it is shared among row groups.
        while count := self._take(number, batch.row, rows, end_offset):
            total += count
            if self._is_full():
                self.write()
        return total

    def _take(self, number: int, row: RecordBatchRow, rows: Iterator[RecordRow], end_offset: int) -> int:
        """Add records of a batch until they end or the row group is full; return how many."""
        offsets, timestamps, keys, values, headers = (
            self.columns[name] for name in ("offset", "timestamp", "key", "value", "headers")
        )
        before = len(offsets)
        for offset, timestamp_ms, key, value, pairs in rows:
            if offset >= end_offset:
                break
            offsets.append(offset)
            timestamps.append(timestamp_ms)
            keys.append(key)
            values.append(value)
            headers.append(pairs)
            self.size_bytes += _RECORD_BYTES + len(key or b"") + len(value or b"")
            for name, content in pairs:
                self.size_bytes += _HEADER_BYTES + len(name) + len(content or b"")
            if self._is_full():
                break
        count = len(offsets) - before
        same = {
            "topic": self.topic,
            "partition": number,
            "timestamp_type": _TYPE_NAMES[TimestampType(row.timestamp_type)],
            "producer_id": row.producer_id,
            "producer_epoch": row.producer_epoch,
            "is_transactional": row.is_transactional,
        }
        for name, cell in same.items():
            self.columns[name].extend([cell] * count)
        return count

    def _is_full(self) -> bool:
        return len(self.columns["offset"]) >= ROW_GROUP_ROWS_MAX or self.size_bytes >= ROW_GROUP_BYTES_MAX

    def write(self) -> None:
        """Write them as a row group."""
        if self.columns["offset"]:
            arrays = [pa.array(self.columns[item.name], item.type) for item in SCHEMA]
            self.writer.write_table(pa.Table.from_arrays(arrays, schema=self.writer.schema))
        for column in self.columns.values():
            column.clear()
        self.size_bytes = 0

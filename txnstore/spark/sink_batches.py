"""Record batches made of Arrow batches: rows sorted by topic and partition, without touching single records.

Which partition a row goes to follows the producer's rules, by the column: each distinct key is hashed once.

Keys and values of one partition follow each other once the rows are sorted by it: their bytes are cut out as they
are, and Arrow's offsets are the log's positions but for the order of their bytes.  Only headers are opened record by
record.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, repeat
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from txnstore.errors import InvalidRecord, RecordTooLarge, UnknownTopicOrPartition
from txnstore.log.append import Append
from txnstore.log.codec import PackedColumns, encode_packed
from txnstore.log.columns import POSITION_BYTES, Codec, PackedBytes, codec_for_topic, join_bytes, pack_headers
from txnstore.log.partitioners import PartitionChoice, partitions_of_keys
from txnstore.log.topics import Topic
from txnstore.model import Header, ProducerIdentity
from txnstore.spark.sink_options import SinkColumns

#: What a record takes at most in the columns of numbers: two positions, two nulls and a timestamp.
_NUMBERS_BYTES_MAX: Final = 64
#: What a byte of a header takes at most once it is JSON, and what stands around it.
_HEADER_FACTOR: Final = 6
_HEADER_BYTES: Final = 16
_MICROSECONDS_PER_MS: Final = 1_000


class PartitionOfRows:
    """Chooses partitions for the rows of one task, as a producer with these settings does."""

    def __init__(self, partitioner: str, *, sticky_seconds: float) -> None:
        """Choose by the partitioner of this name; rows without a key stay together for `sticky_seconds`."""
        self._choice = PartitionChoice(partitioner, sticky_seconds=sticky_seconds)
        self._partitioner = partitioner
        #: Whether equal keys go to one partition.
        self._hashes = partitioner != "random"
        self._keeps_together = self._choice.sticky_seconds > 0
        self._empty_is_none = partitioner == "consistent_random"

    def choose(
        self, topic: Topic, keys: pa.Array | None, given: pa.Array | None, row_count: int, now_seconds: float
    ) -> Sequence[int]:
        """Return the partition of each row.

        `keys` are binary; `given` is the column `partition`, which wins where it is not null.  `now_seconds` is of the
        monotonic clock.

        Raises:
            UnknownTopicOrPartition: the topic has no partition of a number that was given.
        """
        partition_count = len(topic.partition_ids)
        if given is not None and given.null_count == row_count:
            given = None
        if given is None:
            if partition_count == 1:
                return [0] * row_count
            return integers(self._by_key(topic.name, keys, partition_count, row_count, now_seconds))
        given = given.cast(pa.int64())
        if given.null_count:
            given = pc.coalesce(given, self._by_key(topic.name, keys, partition_count, row_count, now_seconds))
        partitions = integers(given)
        for number in Counter(partitions):
            if not 0 <= number < partition_count:
                raise UnknownTopicOrPartition(
                    f"the column 'partition' says {number} for topic {topic.name}, which has the partitions 0 to"
                    f" {partition_count - 1}"
                )
        return partitions

    def _by_key(
        self, topic: str, keys: pa.Array | None, partition_count: int, row_count: int, now_seconds: float
    ) -> pa.Array:
        choose = partial(self._choose, topic, partition_count, now_seconds)
        if keys is None or keys.null_count == row_count:
            return self._without_key(choose, row_count)
        if not self._hashes:
            return _numbers(map(choose, keys.to_pylist()))
        encoded = keys.dictionary_encode()
        distinct = encoded.dictionary.to_pylist()
        of_key: list[int | None] = list(partitions_of_keys(self._partitioner, distinct, partition_count))
        if self._empty_is_none and b"" in distinct:
            of_key[distinct.index(b"")] = None
        chosen = _numbers(of_key).take(encoded.indices)
        without_key = chosen.null_count
        if not without_key:
            return chosen
        return pc.replace_with_mask(chosen, chosen.is_null(), self._without_key(choose, without_key))

    def _without_key(self, choose: Callable[[bytes | None], int], count: int) -> pa.Array:
        if self._keeps_together:
            return _numbers(repeat(choose(None), count))
        return _numbers(choose(None) for _ in range(count))

    def _choose(self, topic: str, partition_count: int, now_seconds: float, key: bytes | None) -> int:
        return self._choice.choose(topic, key, partition_count, now_seconds)


def _numbers(numbers: Iterable[int | None]) -> pa.Array:
    return pa.array(numbers, pa.int64())


def integers(array: pa.Array) -> list[int]:
    """Return the numbers of an int64 array without nulls: many times as fast as `to_pylist`."""
    return memoryview(array.buffers()[1]).cast("q")[array.offset : array.offset + len(array)].tolist()


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How large a record batch may become; its topic's max.message.bytes holds besides."""

    size_bytes_max: int = 1_000_000
    records_max: int = 10_000


@dataclass(frozen=True, slots=True)
class UnsentBatch:
    """Records for one partition, ready but for their producer."""

    topic: Topic
    partition: int
    columns: PackedColumns
    row: int
    """Which row of the task the first of them was, from 0 on."""

    @property
    def record_count(self) -> int:
        """How many records it has."""
        return len(self.columns.timestamps_ms)

    def encode(self, producer: ProducerIdentity, base_sequence: int, codec: Codec) -> Append:
        """Return the batch as this producer appends it to its transaction.

        Raises:
            RecordTooLarge: a record by itself is larger than its topic's max.message.bytes.
            TxnStoreError: see `log.codec.encode_packed`.
        """
        settings = self.topic.settings
        batch = encode_packed(
            self.columns,
            codec=codec_for_topic(settings["compression.type"], codec),
            producer=producer,
            base_sequence=base_sequence,
            is_transactional=True,
        )
        largest = settings["max.message.bytes"]
        if batch.size_bytes > largest:
            raise RecordTooLarge(
                f"the record of row {self.row} of the task takes {batch.size_bytes} bytes, more than the"
                f" max.message.bytes of topic {self.topic.name}, {largest}"
            )
        return Append(self.topic.partition_id(self.partition), batch, settings)


class BatchMaker:
    """Makes record batches of the rows of one task."""

    def __init__(
        self,
        columns: SinkColumns,
        partitions: PartitionOfRows,
        find_topics: Callable[[Sequence[str]], Mapping[str, Topic]],
        *,
        topic: str | None = None,
        limits: BatchLimits | None = None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        monotonic_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        """Send every row to `topic`, or to the one that its column names; `find_topics` returns every one it is asked.

        Rows without a timestamp get `now_ms()`.
        """
        self._columns = columns
        self._partitions = partitions
        self._find_topics = find_topics
        self._topic = topic
        self._limits = limits or BatchLimits()
        self._now_ms = now_ms
        self._monotonic_seconds = monotonic_seconds

    def make(self, rows: pa.RecordBatch, first_row: int) -> list[UnsentBatch]:
        """Return the rows, of which the first is the task's row `first_row`, as batches.

        Rows of one partition keep their order.  Nothing that an error says comes from the records themselves but the
        names of topics.

        Raises:
            InvalidRecord: a row has no topic, or a header has no name.
            UnknownTopicOrPartition: the column `partition` names one that its topic does not have.
            TxnStoreError: what `find_topics` raises.
        """
        batches: list[UnsentBatch] = []
        for name, of_topic, row_number in self._by_topic(rows, first_row):
            batches += self._make(self._find_topics([name])[name], of_topic, row_number)
        return batches

    def _by_topic(
        self, rows: pa.RecordBatch, first_row: int
    ) -> Iterator[tuple[str, pa.RecordBatch, Callable[[int], int]]]:
        if self._topic is not None:
            yield self._topic, rows, first_row.__add__
            return
        assert self._columns.topic is not None, "find_columns() requires the column where the option is not set"
        names = rows.column(self._columns.topic)
        if names.null_count:
            row = first_row + pc.index(names.is_null(), value=True).as_py()
            raise InvalidRecord(
                f"row {row} of the task has no topic: fill the column 'topic', or set the option 'topic'"
            )
        encoded = names.dictionary_encode()
        distinct = encoded.dictionary.to_pylist()
        self._find_topics(distinct)
        for index, name in enumerate(distinct):
            if len(distinct) == 1:
                yield name, rows, first_row.__add__
                continue
            places = pc.indices_nonzero(pc.equal(encoded.indices, index))
            yield name, rows.take(places), partial(_row_before, places, first_row.__add__)

    def _make(self, topic: Topic, rows: pa.RecordBatch, row_number: Callable[[int], int]) -> Iterator[UnsentBatch]:
        columns = self._columns
        keys, values = _binary(rows, columns.key), _binary(rows, columns.value)
        partitions = self._partitions.choose(
            topic,
            keys,
            None if columns.partition is None else rows.column(columns.partition),
            rows.num_rows,
            self._monotonic_seconds(),
        )
        timestamps = None if columns.timestamp is None else rows.column(columns.timestamp)
        headers = None if columns.headers is None else rows.column(columns.headers)
        if headers is not None and headers.null_count == len(headers):
            headers = None
        counts = sorted(Counter(partitions).items())
        if len(counts) > 1:
            # A stable sort: what comes first in a partition stays first.
            places = pc.sort_indices(pa.array(partitions, pa.int32()))
            keys, values, timestamps, headers = (
                None if column is None else column.take(places) for column in (keys, values, timestamps, headers)
            )
            row_number = partial(_row_before, places, row_number)
        packed = _Columns(
            _Cells.of(keys, rows.num_rows),
            _Cells.of(values, rows.num_rows),
            self._timestamps_ms(timestamps, rows.num_rows),
            None if headers is None else _headers(headers, row_number),
        )
        limit = min(self._limits.size_bytes_max, topic.settings["max.message.bytes"] * 63 // 64)
        start = 0
        for partition, count in counts:
            end = start + count
            while start < end:
                stop = packed.fitting(start, min(end, start + self._limits.records_max), limit)
                yield UnsentBatch(topic, partition, packed.part(start, stop), row_number(start))
                start = stop

    def _timestamps_ms(self, timestamps: pa.Array | None, row_count: int) -> list[int]:
        now_ms = self._now_ms()
        if timestamps is None or timestamps.null_count == row_count:
            return [now_ms] * row_count
        microseconds = timestamps.cast(pa.timestamp("us", tz=timestamps.type.tz)).cast(pa.int64())
        towards_zero = pc.divide(microseconds, _MICROSECONDS_PER_MS)
        # Before 1970 too the millisecond that has begun.
        is_above = pc.greater(pc.multiply(towards_zero, _MICROSECONDS_PER_MS), microseconds)
        return integers(pc.subtract(towards_zero, is_above.cast(pa.int64())).fill_null(now_ms))


@dataclass(frozen=True, slots=True)
class _Cells:
    """Keys or values one after another: `data`, where each begins and the last one ends, and which are null."""

    data: memoryview
    positions: memoryview
    nulls: list[int]

    @classmethod
    def of(cls, array: pa.Array | None, row_count: int) -> _Cells:
        if array is None or array.null_count == row_count:
            nothing = bytes((row_count + 1) * POSITION_BYTES)
            return cls(memoryview(b""), memoryview(nothing).cast("i"), list(range(row_count)))
        nulls: list[int] = []
        if array.null_count:
            nulls = pc.indices_nonzero(array.is_null()).to_pylist()
            # What is null takes no room, whatever Arrow has there.
            array = array.fill_null(b"")
        _, positions, data = array.buffers()
        ends = memoryview(positions).cast("i")[array.offset : array.offset + row_count + 1]
        return cls(memoryview(b"" if data is None else data), ends, nulls)

    def part(self, start: int, stop: int) -> PackedBytes:
        first, last = self.positions[start], self.positions[stop]
        positions: Any = pa.py_buffer(self.positions[start : stop + 1])
        if first:
            count = stop + 1 - start
            whole = pa.Array.from_buffers(pa.int32(), count, [None, positions])
            positions = pc.subtract(whole, pa.scalar(first, pa.int32())).buffers()[1][: count * POSITION_BYTES]
        nulls = self.nulls
        if nulls:
            nulls = nulls[bisect_left(nulls, start) : bisect_left(nulls, stop)]
            nulls = [place - start for place in nulls] if start else nulls
        return join_bytes(bytes(self.data[first:last]), positions.to_pybytes(), nulls)


@dataclass(frozen=True, slots=True)
class _Columns:
    keys: _Cells
    values: _Cells
    timestamps_ms: list[int]
    headers: _Headers | None

    def fitting(self, start: int, end: int, limit: int) -> int:
        """Return where a batch from `start` on ends that takes at most `limit` bytes, or holds one record."""
        if self._size_bytes(start, end) <= limit:
            return end
        stops = range(start + 1, end + 1)
        fitting = bisect_right(stops, limit, key=lambda stop: self._size_bytes(start, stop))
        return start + max(fitting, 1)

    def _size_bytes(self, start: int, stop: int) -> int:
        """Return what these records take at most, were they one batch."""
        keys, values = self.keys.positions, self.values.positions
        size = keys[stop] - keys[start] + values[stop] - values[start] + (stop - start) * _NUMBERS_BYTES_MAX
        if self.headers is not None:
            size += self.headers.size_bytes[stop] - self.headers.size_bytes[start]
        return size

    def part(self, start: int, stop: int) -> PackedColumns:
        return PackedColumns(
            self.keys.part(start, stop),
            self.values.part(start, stop),
            self.timestamps_ms[start:stop],
            None if self.headers is None else pack_headers(self.headers.of_records[start:stop]),
        )


@dataclass(frozen=True, slots=True)
class _Headers:
    of_records: list[Sequence[Header]]
    size_bytes: list[int]
    """What those of all records before one take at most; one number more than records."""


def _headers(column: pa.Array, row_number: Callable[[int], int]) -> _Headers:
    of_records: list[Sequence[Header]] = []
    sizes = []
    for place, headers in enumerate(column.to_pylist()):
        if not headers:
            of_records.append(())
            sizes.append(_HEADER_BYTES)
            continue
        pairs = []
        for header in headers:
            if header is None or header["key"] is None:
                raise InvalidRecord(f"row {row_number(place)} of the task has a header without a key")
            pairs.append((header["key"], header["value"]))
        of_records.append(pairs)
        length = sum(len(name.encode()) + len(value or b"") for name, value in pairs)
        sizes.append(length * _HEADER_FACTOR + (2 * len(pairs) + 1) * _HEADER_BYTES)
    return _Headers(of_records, list(accumulate(sizes, initial=0)))


def _row_before(places: pa.Array, row_number: Callable[[int], int], place: int) -> int:
    """Return the number of the row that `take(places)` has put at a place."""
    return row_number(places[place].as_py())


def _binary(rows: pa.RecordBatch, place: int | None) -> pa.Array | None:
    """Return a column of text or bytes as bytes; text as UTF-8, which is what Arrow holds."""
    if place is None:
        return None
    array = rows.column(place)
    if pa.types.is_large_string(array.type):
        array = array.cast(pa.large_binary())
    return array.cast(pa.binary())

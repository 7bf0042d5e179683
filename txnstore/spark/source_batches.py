"""This file is Arrow record batches made of stored ones: what a task of Spark gets for a range of a partition."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from txnstore.log.codec import RecordBatch, RecordRow, corrupt_batch
from txnstore.log.columns import DamagedColumn
from txnstore.model import Header, TopicPartition
from txnstore.spark.source_arrays import byte_strings, integers

#: Batches with fewer records are gathered: one record batch of Arrow's costs as much as many records.
GATHER_BELOW: Final = 64
#: How many records are gathered at most.
GATHERED_MAX: Final = 10_000
#: The latest time that Spark's microseconds hold; a record with a later one has a null there.
TIMESTAMP_MS_MAX: Final = (2**63 - 1) // 1000

_Column = Callable[[RecordBatch], pa.Array]


class ArrowReader:
    """Makes Arrow record batches of one partition's stored batches, with the columns that `schema` names."""

    def __init__(self, schema: StructType, partition: TopicPartition) -> None:
        """Make the schema once; it is what Spark compares the first batch with."""
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._partition = partition
        makers: Mapping[str, _Column] = {
            "key": _keys,
            "value": _values,
            "topic": lambda batch: self._constant("topic", pa.scalar(partition.topic, pa.string()), batch),
            "partition": lambda batch: self._constant("partition", pa.scalar(partition.partition, pa.int32()), batch),
            "offset": _offsets,
            "timestamp": _timestamps,
            "timestampType": lambda batch: pa.repeat(
                pa.scalar(int(batch.timestamp_type), pa.int32()), batch.record_count
            ),
            "headers": self._headers,
        }
        self._makers = [makers[name] for name in self._schema.names]
        self._constants: dict[str, pa.Array] = {}

    def read(self, batches: Iterable[RecordBatch], start_offset: int, end_offset: int) -> Iterator[pa.RecordBatch]:
        """Return the records of these batches from `start_offset` up to, and without, `end_offset`, in order.

        Raises:
            CorruptBatch: a batch is damaged.
            UnsupportedCompression: the package that implements the codec of a batch is not installed.
        """
        gathered: list[tuple[int, list[RecordRow]]] = []
        count = 0
        for batch in batches:
            is_small = batch.record_count < GATHER_BELOW
            if count and (not is_small or count >= GATHERED_MAX):
                yield self._gather(gathered)
                gathered, count = [], 0
            if is_small:
                rows = [row for row in batch.rows(start_offset) if row[0] < end_offset]
                gathered.append((int(batch.timestamp_type), rows))
                count += len(rows)
                continue
            part = self._open(batch, start_offset, end_offset)
            if part.num_rows:
                yield part
        if count:
            yield self._gather(gathered)

    def _open(self, batch: RecordBatch, start_offset: int, end_offset: int) -> pa.RecordBatch:
        try:
            columns = [make(batch) for make in self._makers]
            whole = pa.RecordBatch.from_arrays(columns, schema=self._schema)
            if batch.base_offset >= start_offset and batch.last_offset < end_offset:
                return whole
            offsets = _offsets(batch)
        except DamagedColumn as damage:
            raise corrupt_batch(batch.row, str(damage)) from None
        first = _count_below(offsets, start_offset)
        return whole.slice(first, _count_below(offsets, end_offset) - first)

    def _gather(self, gathered: Sequence[tuple[int, list[RecordRow]]]) -> pa.RecordBatch:
        """Return records of small batches, which go through Python one by one, as one batch."""
        offsets, times_ms, keys, values, headers = zip(*chain.from_iterable(rows for _, rows in gathered), strict=True)
        kinds = list(chain.from_iterable([kind] * len(rows) for kind, rows in gathered))
        count = len(offsets)
        makers: Mapping[str, Callable[[], pa.Array]] = {
            "key": lambda: pa.array(keys, pa.binary()),
            "value": lambda: pa.array(values, pa.binary()),
            "topic": lambda: pa.repeat(pa.scalar(self._partition.topic, pa.string()), count),
            "partition": lambda: pa.repeat(pa.scalar(self._partition.partition, pa.int32()), count),
            "offset": lambda: pa.array(offsets, pa.int64()),
            "timestamp": lambda: _as_timestamps(pa.array(times_ms, pa.int64()), max(times_ms)),
            "timestampType": lambda: pa.array(kinds, pa.int32()),
            "headers": lambda: _header_lists(headers, self._schema.field("headers").type),
        }
        return pa.RecordBatch.from_arrays([makers[name]() for name in self._schema.names], schema=self._schema)

    def _constant(self, name: str, value: pa.Scalar, batch: RecordBatch) -> pa.Array:
        """Return a column in which every record has the same; the longest one so far is kept and cut."""
        kept = self._constants.get(name)
        if kept is None or len(kept) < batch.record_count:
            kept = self._constants[name] = pa.repeat(value, batch.record_count)
        return kept.slice(0, batch.record_count)

    def _headers(self, batch: RecordBatch) -> pa.Array:
        kind = self._schema.field("headers").type
        headers = batch.headers()
        return pa.nulls(batch.record_count, kind) if headers is None else _header_lists(headers, kind)


def _keys(batch: RecordBatch) -> pa.Array:
    row = batch.row
    return byte_strings(
        row.key_positions, row.null_keys, row.key_data, count=batch.record_count, codec=batch.codec, what="key"
    )


def _values(batch: RecordBatch) -> pa.Array:
    row = batch.row
    return byte_strings(
        row.value_positions, row.null_values, row.value_data, count=batch.record_count, codec=batch.codec, what="value"
    )


def _offsets(batch: RecordBatch) -> pa.Array:
    offsets = batch.offsets()
    if isinstance(offsets, range):
        return pa.arange(offsets.start, offsets.stop) if _HAS_ARANGE else _whole_numbers(offsets)
    return _whole_numbers(offsets)


_HAS_ARANGE: Final = hasattr(pa, "arange")


def _whole_numbers(numbers: Sequence[int]) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(array("q", numbers))])


def _int64(number: int | None) -> pa.Scalar:
    """Return the number as Arrow's functions take it: given Python's own, they look for numpy and pandas each time."""
    return pa.scalar(number, pa.int64())


def _timestamps(batch: RecordBatch) -> pa.Array:
    text = batch.row.timestamp_deltas_ms
    if text is None:
        times_ms = pa.repeat(_int64(batch.base_timestamp_ms), batch.record_count)
    else:
        deltas_ms = integers(text, batch.record_count, pa.int64(), "timestamp_deltas_ms")
        times_ms = pc.add(deltas_ms, _int64(batch.base_timestamp_ms))
    return _as_timestamps(times_ms, batch.max_timestamp_ms)


def _as_timestamps(times_ms: pa.Array, latest_ms: int) -> pa.Array:
    if latest_ms > TIMESTAMP_MS_MAX:
        times_ms = pc.if_else(pc.less_equal(times_ms, _int64(TIMESTAMP_MS_MAX)), times_ms, _int64(None))
    return pc.multiply(times_ms, _int64(1000)).view(pa.timestamp("us", "UTC"))


def _header_lists(headers: Sequence[Sequence[Header]], kind: Any) -> pa.Array:
    """Return the headers of each record, null for a record without any, as Spark's Kafka source has it."""
    cells = [[{"key": name, "value": value} for name, value in of_record] or None for of_record in headers]
    return pa.array(cells, kind)


def _count_below(ascending: pa.Array, offset: int) -> int:
    count: int | None = pc.sum(pc.less(ascending, _int64(offset))).as_py()
    return count or 0

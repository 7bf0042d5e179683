"""Arrow record batches made of stored ones: what a task of Spark gets for a range of a partition.

Integers and byte strings become Arrow arrays without a Python object for each: positions are an offsets buffer of
Arrow's but for the order of their bytes, and the data is the buffer after it.
"""

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
from txnstore.log.columns import (
    Codec,
    DamagedColumn,
    DecompressionFailed,
    decompress,
    not_ascending,
    unpack_integers,
    unpack_positions,
)
from txnstore.model import Header, PartitionName

#: With fewer numbers Python's own JSON is faster than setting up Arrow's functions.
_ARROW_FROM: Final = 200
#: Batches with fewer records are gathered: one record batch of Arrow's costs as much as many records.
GATHER_BELOW: Final = 64
#: How many records are gathered at most.
GATHERED_MAX: Final = 10_000
#: The latest time that Spark's microseconds hold; a record with a later one has a null there.
TIMESTAMP_MS_MAX: Final = (2**63 - 1) // 1000
_Column = Callable[[RecordBatch], pa.Array]
_HAS_ARANGE: Final = hasattr(pa, "arange")


def integers(text: str, count: int, what: str) -> pa.Array:
    """Return the `count` numbers of a flat JSON array; `what` is the column's name.

    Raises:
        DamagedColumn: the text holds something else.
    """
    if count >= _ARROW_FROM:
        found = _by_width(text, count)
        if found is not None:
            return found
    numbers = unpack_integers(text, what)
    if len(numbers) != count:
        raise DamagedColumn(f"{what} holds {len(numbers)} numbers instead of {count}")
    try:
        cells = array("q", numbers)
    except OverflowError:
        raise DamagedColumn(f"{what} holds a number that is too large") from None
    return pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(cells)])


def _by_width(text: str, count: int) -> pa.Array | None:
    """Return the numbers if all take the same room, as our own columns have them; else None."""
    width, rest = divmod(len(text) - 1, count)
    if rest or width < 2 or text.count(",") != count - 1 or text[0] != "[":  # noqa: PLR2004 - a digit and a comma
        return None
    is_signed = "-" in text
    try:
        cells = (text if is_signed else text.replace(" ", "0")).encode("ascii")
        fixed = pa.Array.from_buffers(pa.binary(width), count, [None, pa.py_buffer(cells[1:])])
        digits = pc.cast(pc.binary_slice(fixed, 0, width - 1), pa.string())
        return pc.cast(pc.ascii_ltrim_whitespace(digits) if is_signed else digits, pa.int64())
    except (UnicodeEncodeError, pa.ArrowInvalid):
        return None


def byte_strings(
    packed_positions: bytes | None, nulls_text: str | None, data: bytes | None, *, count: int, codec: Codec, what: str
) -> pa.Array:
    """Return `count` keys or values; `what` is "key" or "value".  See `log.columns.unpack_bytes`.

    Raises:
        DamagedColumn: the columns do not fit together.
        UnsupportedCompression: the package that implements the codec is not installed.
    """
    if packed_positions is None:
        if data is not None or nulls_text is not None:
            raise DamagedColumn(f"there is {what}_data or null_{what}s without {what}_positions")
        return pa.nulls(count, pa.binary())
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise DamagedColumn(f"there is {what}_positions without bytes in {what}_data")
    unpacked = unpack_positions(packed_positions, count, what)
    positions = pa.Array.from_buffers(pa.int32(), count + 1, [None, pa.py_buffer(unpacked)])
    # Arrow takes what it is given: a position outside of the data would be read all the same.
    if not pc.all(pc.less_equal(positions.slice(0, count), positions.slice(1))).as_py():
        raise not_ascending(count, what)
    try:
        plain = decompress(codec, bytes(data), unpacked[count])
    except DecompressionFailed as error:
        raise DamagedColumn(f"{what}_data: {error}") from None
    nulls = () if nulls_text is None else unpack_integers(nulls_text, f"null_{what}s")
    buffers = [_validity(nulls, count, what), positions.buffers()[1], pa.py_buffer(plain)]
    return pa.Array.from_buffers(pa.binary(), count, buffers, null_count=len(set(nulls)))


def _validity(nulls: Sequence[int], count: int, what: str) -> Any:
    """Return Arrow's bitmap of what is not null, or None if everything is."""
    if not nulls:
        return None
    if min(nulls) < 0 or max(nulls) >= count:
        raise DamagedColumn(f"null_{what}s names records that are not there")
    bits = bytearray(b"\xff") * ((count + 7) // 8)
    for index in nulls:
        bits[index >> 3] &= ~(1 << (index & 7))
    return pa.py_buffer(bytes(bits))


class ArrowReader:
    """Makes Arrow record batches of one partition's stored batches, with the columns that `schema` names."""

    def __init__(self, schema: StructType, partition: PartitionName) -> None:
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

    def read(self, batches: Iterable[tuple[RecordBatch, range]]) -> Iterator[pa.RecordBatch]:
        """Return the records of these batches that are at the offsets beside them, in order.

        Raises:
            CorruptBatch: a batch is damaged.
            UnsupportedCompression: the package that implements the codec of a batch is not installed.
        """
        gathered: list[tuple[int, list[RecordRow]]] = []
        count = 0
        for batch, offsets in batches:
            is_small = batch.record_count < GATHER_BELOW
            if count and (not is_small or count >= GATHERED_MAX):
                yield self._gather(gathered)
                gathered, count = [], 0
            if is_small:
                rows = [row for row in batch.rows(offsets.start) if row[0] < offsets.stop]
                gathered.append((int(batch.timestamp_type), rows))
                count += len(rows)
                continue
            part = self._open(batch, offsets)
            if part.num_rows:
                yield part
        if count:
            yield self._gather(gathered)

    def _open(self, batch: RecordBatch, wanted: range) -> pa.RecordBatch:
        try:
            columns = [make(batch) for make in self._makers]
            whole = pa.RecordBatch.from_arrays(columns, schema=self._schema)
            if batch.base_offset >= wanted.start and batch.last_offset < wanted.stop:
                return whole
            offsets = _offsets(batch)
        except DamagedColumn as damage:
            raise corrupt_batch(batch.row, str(damage)) from None
        first = _count_below(offsets, wanted.start)
        return whole.slice(first, _count_below(offsets, wanted.stop) - first)

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
        deltas_ms = integers(text, batch.record_count, "timestamp_deltas_ms")
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

"""The codec: records are checked, packed into the columns of a record batch, sealed, and opened again.

Nothing here touches the database: what is refused is refused before anything happened.

The checksum protects the whole batch but for what the append gives under its lock: the offsets and the maximum
timestamps.  A topic that stamps records itself (LogAppendTime) has the batch sealed again: `EncodedBatch.stamped`.  A
batch that is read is checked against it, and opened only as far as it is asked.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from txnstore import bulk
from txnstore.errors import CorruptBatch, InvalidRecord, InvalidTimestamp
from txnstore.log.columns import (
    BytesColumn,
    Codec,
    DamagedColumn,
    PackedBytes,
    compress,
    pack_bytes,
    pack_differences,
    pack_headers,
    pack_integers,
    require_codec,
    unpack_bytes,
    unpack_headers,
    unpack_integers,
)
from txnstore.model import (
    NO_PRODUCER,
    NO_SEQUENCE,
    ControlType,
    Header,
    ProducerIdentity,
    Record,
    StoredRecord,
    TimestampType,
)

#: What ends the checksummed bytes: the ten numbers of `_numbers` and the length of each column in front of it, -1
#: for NULL.  Being of fixed size it says where each column began, so no two batches give the same bytes.
_TRAILER: Final = struct.Struct(">iBqqii?biB9q")
#: Stands for NULL: no column has this length, no batch this control type or coordinator epoch.
_NULL_NUMBER: Final = -1
_payload: Final = attrgetter(
    "key_data",
    "value_data",
    "key_positions",
    "null_keys",
    "value_positions",
    "null_values",
    "headers",
    "offset_deltas",
    "timestamp_deltas_ms",
)

#: By whatever takes less time.
_crc32: Final[Callable[[bytes, int], int]] = (bulk.core.crc32 if bulk.IN_C else None) or zlib.crc32

_T = TypeVar("_T")
#: The fields of a StoredRecord as a plain tuple: offset, timestamp in milliseconds, key, value, headers.
RecordRow = tuple[int, int, bytes | None, bytes | None, Sequence[Header]]
TIMESTAMP_MS_MAX: Final = 2**63 - 1
_INTEGERS: Final = {int}


class RecordBatchRow(Protocol):
    """A row of the table of batches, with its columns as attributes."""

    partition_id: int
    base_offset: int
    last_offset: int
    record_count: int
    timestamp_type: int
    base_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    is_transactional: bool
    control_type: int | None
    coordinator_epoch: int | None
    codec: int
    timestamp_deltas_ms: str | None
    offset_deltas: str | None
    key_positions: bytes | None
    null_keys: str | None
    value_positions: bytes | None
    null_values: str | None
    headers: str | None
    key_data: bytes | None
    value_data: bytes | None
    max_timestamp_ms: int
    size_bytes: int
    crc: int


def checksum(columns: RecordBatchRow | EncodedBatch) -> int:
    """Return the CRC-32 of a batch, as an unsigned number.

    Raises:
        struct.error, TypeError, ValueError, AttributeError: a column holds what no column of this kind can hold.
    """
    return _sealed(columns)[0]


def payload_bytes(columns: RecordBatchRow | EncodedBatch) -> int:
    """Return the size of a batch: characters of text and bytes."""
    return sum(len(column) for column in _payload(columns) if column is not None)


def _sealed(columns: RecordBatchRow | EncodedBatch) -> tuple[int, int]:
    """Return the checksum, and the size of the columns: characters of text and bytes."""
    crc = size = 0
    lengths = []
    for column in _payload(columns):
        if column is None:
            lengths.append(_NULL_NUMBER)
            continue
        size += len(column)
        data = column.encode() if isinstance(column, str) else column
        lengths.append(len(data))
        crc = _crc32(data, crc)
    return _crc32(_TRAILER.pack(*_numbers(columns), *lengths), crc), size


def _numbers(columns: RecordBatchRow | EncodedBatch) -> tuple[int, ...]:
    return (
        columns.record_count,
        columns.timestamp_type,
        columns.base_timestamp_ms,
        columns.producer_id,
        columns.producer_epoch,
        columns.base_sequence,
        columns.is_transactional,
        _NULL_NUMBER if columns.control_type is None else columns.control_type,
        _NULL_NUMBER if columns.coordinator_epoch is None else columns.coordinator_epoch,
        columns.codec,
    )


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """A record batch ready to be appended: all columns of the table but those that the append gives.

    The append gives partition_id, base_offset, last_offset and running_max_timestamp_ms.  `dataclasses.replace` works
    on a batch: `crc` and `size_bytes` are always those of the other columns.
    """

    record_count: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    timestamp_type: TimestampType = TimestampType.CREATE_TIME
    producer_id: int = NO_PRODUCER.producer_id
    producer_epoch: int = NO_PRODUCER.epoch
    base_sequence: int = NO_SEQUENCE
    is_transactional: bool = False
    control_type: ControlType | None = None
    coordinator_epoch: int | None = None
    codec: Codec = Codec.NONE
    timestamp_deltas_ms: str | None = None
    offset_deltas: str | None = None
    key_positions: bytes | None = None
    null_keys: str | None = None
    value_positions: bytes | None = None
    null_values: str | None = None
    headers: str | None = dataclasses.field(default=None, repr=False)
    key_data: bytes | None = dataclasses.field(default=None, repr=False)
    value_data: bytes | None = dataclasses.field(default=None, repr=False)
    crc: int = dataclasses.field(init=False)
    size_bytes: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        crc, size_bytes = _sealed(self)
        object.__setattr__(self, "crc", crc)
        object.__setattr__(self, "size_bytes", size_bytes)

    @property
    def has_all_keys(self) -> bool:
        """Whether each record has a key."""
        return self.key_positions is not None and self.null_keys is None

    @property
    def min_timestamp_ms(self) -> int:
        """The smallest timestamp of the batch."""
        if self.timestamp_deltas_ms is None:
            return self.base_timestamp_ms
        return self.base_timestamp_ms + min(unpack_integers(self.timestamp_deltas_ms, "timestamp_deltas_ms"))

    def columns(self) -> dict[str, Any]:
        """Return the columns by name, as an INSERT takes them."""
        return dict(zip(_COLUMN_NAMES, _columns(self), strict=True))

    def stamped(self, append_timestamp_ms: int) -> EncodedBatch:
        """Return the batch as a topic with message.timestamp.type=LogAppendTime stores it."""
        return dataclasses.replace(
            self,
            timestamp_type=TimestampType.LOG_APPEND_TIME,
            base_timestamp_ms=append_timestamp_ms,
            max_timestamp_ms=append_timestamp_ms,
            timestamp_deltas_ms=None,
        )


_COLUMN_NAMES: Final = tuple(column.name for column in dataclasses.fields(EncodedBatch))


_columns: Final = attrgetter(*_COLUMN_NAMES)


@dataclass(frozen=True)
class RecordBatch:
    """A stored record batch that agrees with its checksum; see `decode`.

    Each method opens the columns that it needs, at every call.  That raises CorruptBatch if a column does not
    hold what it must, which takes a checksum that agrees by chance or a foreign writer, and UnsupportedCompression if
    the package that implements the codec is not installed.
    """

    partition_id: int
    base_offset: int
    last_offset: int
    record_count: int
    timestamp_type: TimestampType
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer: ProducerIdentity
    base_sequence: int
    is_transactional: bool
    control_type: ControlType | None
    coordinator_epoch: int | None
    codec: Codec
    size_bytes: int
    _row: RecordBatchRow = field(repr=False, compare=False)

    @property
    def row(self) -> RecordBatchRow:
        """The row itself, for readers that build columns of their own from its columns."""
        return self._row

    @property
    def is_control(self) -> bool:
        """Whether this is a marker; a marker has an offset but no records."""
        return self.control_type is not None

    def offsets(self) -> Sequence[int]:
        """Return the offset of each record, ascending."""
        text = self._row.offset_deltas
        if text is None:
            offsets: Sequence[int] = range(self.base_offset, self.base_offset + self.record_count)
        else:
            offsets = [self.base_offset + delta for delta in self._integers(text, "offset_deltas")]
            if offsets[0] < self.base_offset or any(map(int.__ge__, offsets, offsets[1:])):
                raise self._corrupt("offset_deltas does not ascend")
        if offsets[-1] > self.last_offset:
            raise self._corrupt("it holds offsets above its last one")
        return offsets

    def timestamps_ms(self) -> Sequence[int] | None:
        """Return the timestamp of each record, or None if all have `base_timestamp_ms`."""
        text = self._row.timestamp_deltas_ms
        if text is None:
            return None
        base_timestamp_ms = self.base_timestamp_ms
        return [base_timestamp_ms + delta for delta in self._integers(text, "timestamp_deltas_ms")]

    def keys(self) -> BytesColumn:
        """Return the keys, decompressed."""
        row = self._row
        return self._bytes(row.key_positions, row.null_keys, row.key_data, "key")

    def values(self) -> BytesColumn:
        """Return the values, decompressed."""
        row = self._row
        return self._bytes(row.value_positions, row.null_values, row.value_data, "value")

    def headers(self) -> Sequence[Sequence[Header]] | None:
        """Return the headers of each record, or None if no record has any."""
        if self._row.headers is None:
            return None
        try:
            return unpack_headers(self._row.headers, self.record_count)
        except DamagedColumn as damage:
            raise self._corrupt(str(damage)) from None

    def rows(self, from_offset: int = 0) -> Iterator[RecordRow]:
        """Return the records from `from_offset` on as plain tuples, in order: the fast way to many records.

        A marker has none.
        """
        if self.is_control:
            return iter(())
        offsets = self.offsets()
        first = 0 if from_offset <= self.base_offset else bisect_left(offsets, from_offset)
        return zip(
            offsets[first:],
            _from(first, self.timestamps_ms(), self.base_timestamp_ms),
            self.keys().cells(first),
            self.values().cells(first),
            _from(first, self.headers(), ()),
            strict=False,  # what is the same for all records never ends
        )

    def records(self, from_offset: int = 0) -> Iterator[StoredRecord]:
        """Return the records from `from_offset` on, in order; a marker has none."""
        return map(StoredRecord._make, self.rows(from_offset))

    def _integers(self, text: str, what: str) -> list[int]:
        try:
            numbers = unpack_integers(text, what)
        except DamagedColumn as damage:
            raise self._corrupt(str(damage)) from None
        if len(numbers) != self.record_count:
            raise self._corrupt(f"{what} holds {len(numbers)} numbers for {self.record_count} records")
        return numbers

    def _bytes(self, positions: bytes | None, nulls: str | None, data: bytes | None, what: str) -> BytesColumn:
        try:
            return unpack_bytes(positions, nulls, data, count=self.record_count, codec=self.codec, what=what)
        except DamagedColumn as damage:
            raise self._corrupt(str(damage)) from None

    def _corrupt(self, damage: str) -> CorruptBatch:
        return corrupt_batch(self._row, damage)


def _from(first: int, cells: Sequence[_T] | None, otherwise: _T) -> Iterable[_T]:
    """Return the elements from `first` on, or one and the same for ever where there is no column."""
    if cells is None:
        return repeat(otherwise)
    return cells[first:] if first else cells


def corrupt_batch(row: RecordBatchRow, damage: str) -> CorruptBatch:
    """Return the error that says where the damaged batch is, and nothing of what it holds."""
    return CorruptBatch(
        f"partition {row.partition_id}: the record batch of the offsets {row.base_offset} to {row.last_offset} "
        f"is corrupt: {damage}"
    )


class RecordColumns(NamedTuple):
    """Records on their way into the log, a column for each of their parts; all of one length."""

    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    timestamps_ms: Sequence[int]
    headers: Sequence[Sequence[Header]]


class PackedColumns(NamedTuple):
    """The same with keys, values and headers packed already."""

    keys: PackedBytes
    values: PackedBytes
    timestamps_ms: Sequence[int]
    headers: str | None


def encode(
    records: Sequence[Record],
    *,
    codec: Codec = Codec.NONE,
    producer: ProducerIdentity = NO_PRODUCER,
    base_sequence: int = NO_SEQUENCE,
    is_transactional: bool = False,
    offset_deltas: Sequence[int] | None = None,
) -> EncodedBatch:
    """Return `records` as one batch; see `encode_columns`."""
    columns = RecordColumns(
        [record.key for record in records],
        [record.value for record in records],
        [record.timestamp_ms for record in records],
        [record.headers for record in records],
    )
    return encode_columns(
        columns,
        codec=codec,
        producer=producer,
        base_sequence=base_sequence,
        is_transactional=is_transactional,
        offset_deltas=offset_deltas,
    )


def encode_columns(
    columns: RecordColumns,
    *,
    codec: Codec = Codec.NONE,
    producer: ProducerIdentity = NO_PRODUCER,
    base_sequence: int = NO_SEQUENCE,
    is_transactional: bool = False,
    offset_deltas: Sequence[int] | None = None,
) -> EncodedBatch:
    """Return records as one batch.

    Keys, values and header values may be bytes, bytearray or memoryview; they come back as bytes.  `offset_deltas`
    says where each record lies after the batch's base offset, if not at 0, 1, 2, ...: compaction leaves gaps.

    Raises:
        InvalidRecord: there is no record, or a key, a value or a header is not of its type.
        InvalidTimestamp: a timestamp is not an integer from 0 to 2**63 - 1.
        RecordTooLarge: keys or values together take more than columns.COLUMN_BYTES_MAX.
        UnsupportedCompression: the package that implements the codec is not installed.
    """
    timestamps_ms = columns.timestamps_ms
    if not timestamps_ms:
        raise InvalidRecord("a record batch needs at least one record")
    require_codec(codec)
    return encode_packed(
        PackedColumns(
            pack_bytes(columns.keys, "key"),
            pack_bytes(columns.values, "value"),
            timestamps_ms,
            pack_headers(columns.headers),
        ),
        codec=codec,
        producer=producer,
        base_sequence=base_sequence,
        is_transactional=is_transactional,
        offset_deltas=offset_deltas,
    )


def encode_packed(
    columns: PackedColumns,
    *,
    codec: Codec = Codec.NONE,
    producer: ProducerIdentity = NO_PRODUCER,
    base_sequence: int = NO_SEQUENCE,
    is_transactional: bool = False,
    offset_deltas: Sequence[int] | None = None,
) -> EncodedBatch:
    """Return records, at least one, of which all but the timestamps is packed already as one batch.

    See `encode_columns`.

    Raises:
        InvalidTimestamp, UnsupportedCompression: as `encode_columns`.
    """
    keys, values, timestamps_ms, headers = columns
    record_count = len(timestamps_ms)
    earliest_ms, latest_ms = _check_timestamps(timestamps_ms)
    base_ms = timestamps_ms[0]
    return EncodedBatch(
        record_count=record_count,
        base_timestamp_ms=base_ms,
        max_timestamp_ms=latest_ms,
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch,
        base_sequence=base_sequence,
        is_transactional=is_transactional,
        codec=codec,
        timestamp_deltas_ms=None if earliest_ms == latest_ms else pack_differences(timestamps_ms, base_ms),
        offset_deltas=None if offset_deltas is None else _packed_offsets(offset_deltas, record_count),
        key_positions=keys.positions,
        null_keys=keys.nulls,
        value_positions=values.positions,
        null_values=values.nulls,
        headers=headers,
        key_data=None if keys.data is None else compress(codec, keys.data),
        value_data=None if values.data is None else compress(codec, values.data),
    )


#: A marker's columns but for those that `control_columns` gives.
MARKER: Final = EncodedBatch(record_count=1, base_timestamp_ms=0, max_timestamp_ms=0, is_transactional=True).columns()
_NO_PAYLOAD: Final = (_NULL_NUMBER,) * 9


def control_columns(
    control_type: ControlType, *, coordinator_epoch: int, producer: ProducerIdentity, timestamp_ms: int
) -> dict[str, Any]:
    """Return the columns of a marker that ends the transaction of `producer`: a batch of one control record."""
    columns = MARKER.copy()
    columns["base_timestamp_ms"] = columns["max_timestamp_ms"] = timestamp_ms
    columns["producer_id"], columns["producer_epoch"] = producer.producer_id, producer.epoch
    columns["control_type"], columns["coordinator_epoch"] = int(control_type), coordinator_epoch
    columns["crc"] = marker_checksum(control_type, coordinator_epoch, producer, timestamp_ms)
    return columns


def marker_checksum(
    control_type: ControlType, coordinator_epoch: int, producer: ProducerIdentity, timestamp_ms: int
) -> int:
    """Return the checksum of such a marker."""
    numbers = (1, 0, timestamp_ms, producer.producer_id, producer.epoch, NO_SEQUENCE, True, control_type)
    return zlib.crc32(_TRAILER.pack(*numbers, coordinator_epoch, 0, *_NO_PAYLOAD))


def decode(row: RecordBatchRow) -> RecordBatch:
    """Return the record batch that a row of the table holds.

    Raises:
        CorruptBatch: the row does not match its checksum, or no batch could look like it.  The message names the
            partition and the offsets, never what the records hold.
    """
    try:
        intact = checksum(row) == row.crc
    except (struct.error, TypeError, ValueError, AttributeError):
        # A column of another type than the table's.
        intact = False
    if not intact:
        raise corrupt_batch(row, "it does not match its checksum")
    try:
        return _open(row)
    except (ValueError, TypeError):
        raise corrupt_batch(row, "a column holds a number without a meaning") from None


def _check_timestamps(timestamps_ms: Sequence[int]) -> tuple[int, int]:
    """Return the earliest and the latest timestamp once each is an integer that the column can hold."""
    bounds = bulk.core.bounds(timestamps_ms) if bulk.IN_C else None
    earliest, latest = _bounds(timestamps_ms) if bounds is None else bounds
    if earliest < 0 or latest > TIMESTAMP_MS_MAX:
        raise InvalidTimestamp(
            f"timestamps are milliseconds from 0 to {TIMESTAMP_MS_MAX}; the batch has some from {earliest} to {latest}"
        )
    return earliest, latest


def _bounds(timestamps_ms: Sequence[int]) -> tuple[int, int]:
    if set(map(type, timestamps_ms)) != _INTEGERS:
        for index, timestamp in enumerate(timestamps_ms):
            if type(timestamp) is not int:
                raise InvalidTimestamp(
                    f"record {index} of the batch: its timestamp is {type(timestamp).__name__}, not int milliseconds"
                )
    first = timestamps_ms[0]
    if timestamps_ms.count(first) == len(timestamps_ms):
        return first, first
    return min(timestamps_ms), max(timestamps_ms)


def _packed_offsets(offset_deltas: Sequence[int], record_count: int) -> str | None:
    ascending = list(offset_deltas)
    assert len(ascending) == record_count, f"{len(ascending)} offset deltas for {record_count} records"
    assert ascending[0] >= 0, "an offset below the base offset"
    assert ascending == sorted(set(ascending)), "offset deltas that do not ascend"
    return None if ascending == list(range(record_count)) else pack_integers(ascending)


def _open(row: RecordBatchRow) -> RecordBatch:
    """Return the batch without its payload; ValueError or TypeError if a number is not one of those it may be."""
    if not (row.record_count >= 1 and 0 <= row.base_offset <= row.last_offset):
        raise ValueError
    return RecordBatch(
        partition_id=row.partition_id,
        base_offset=row.base_offset,
        last_offset=row.last_offset,
        record_count=row.record_count,
        timestamp_type=TimestampType(row.timestamp_type),
        base_timestamp_ms=row.base_timestamp_ms,
        max_timestamp_ms=row.max_timestamp_ms,
        producer=ProducerIdentity(row.producer_id, row.producer_epoch),
        base_sequence=row.base_sequence,
        is_transactional=bool(row.is_transactional),
        control_type=None if row.control_type is None else ControlType(row.control_type),
        coordinator_epoch=row.coordinator_epoch,
        codec=Codec(row.codec),
        size_bytes=row.size_bytes,
        _row=row,
    )

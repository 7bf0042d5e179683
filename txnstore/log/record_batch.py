"""This file is a record batch as it is read: checked against its checksum, and opened only as far as it is asked."""

# ruff: noqa: D102 - the comments of the table say what each column holds

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Protocol, TypeVar

from txnstore.errors import CorruptBatch
from txnstore.log.checksum import ChecksummedColumns
from txnstore.log.columns import BytesColumn, DamagedColumn, unpack_bytes, unpack_integers
from txnstore.log.compression import Codec
from txnstore.log.headers import unpack_headers
from txnstore.model import ControlType, Header, ProducerIdentity, StoredRecord, TimestampType

_T = TypeVar("_T")

#: The fields of a StoredRecord as a plain tuple: offset, timestamp in milliseconds, key, value, headers.
RecordRow = tuple[int, int, bytes | None, bytes | None, Sequence[Header]]


class RecordBatchRow(ChecksummedColumns, Protocol):
    """A row of the table of batches, with its columns as attributes."""

    @property
    def partition_id(self) -> int: ...
    @property
    def base_offset(self) -> int: ...
    @property
    def last_offset(self) -> int: ...
    @property
    def max_timestamp_ms(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def crc(self) -> int: ...


@dataclass(frozen=True)
class RecordBatch:
    """A stored record batch that agrees with its checksum; see `decode`.

    Each method opens the columns that it needs, anew at every call.  That raises CorruptBatch if a column does not
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

    def _bytes(self, positions: str | None, nulls: str | None, data: bytes | None, what: str) -> BytesColumn:
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

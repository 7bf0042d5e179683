"""This file is the way of records into a record batch and back: checked, packed into columns, sealed, and opened again.

Nothing here touches the database: what is refused is refused before anything happened.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from txnstore.errors import InvalidRecord, InvalidTimestamp
from txnstore.log.checksum import checksum
from txnstore.log.columns import PackedBytes, pack_bytes, pack_integers
from txnstore.log.compression import Codec, compress, require_codec
from txnstore.log.encoded_batch import EncodedBatch
from txnstore.log.headers import pack_headers
from txnstore.log.record_batch import RecordBatch, RecordBatchRow, corrupt_batch
from txnstore.model import NO_PRODUCER, NO_SEQUENCE, ControlType, Header, ProducerIdentity, Record, TimestampType

TIMESTAMP_MS_MAX: Final = 2**63 - 1

_INTEGERS: Final = {int}

#: Kafka's control record: the key is a version and the type, the value a version and the coordinator's epoch
#: (ControlRecordType, EndTransactionMarker).
_CONTROL_KEY: Final = struct.Struct(">hh")
_CONTROL_VALUE: Final = struct.Struct(">hi")
_CONTROL_VERSION: Final = 0


class RecordColumns(NamedTuple):
    """Records on their way into the log, a column for each of their parts; all of one length."""

    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    timestamps_ms: Sequence[int]
    headers: Sequence[Sequence[Header]]


class PackedColumns(NamedTuple):
    """The same with keys and values packed already."""

    keys: PackedBytes
    values: PackedBytes
    timestamps_ms: Sequence[int]
    headers: Sequence[Sequence[Header]]


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
    says where each record lies behind the batch's base offset, if not at 0, 1, 2, ...: compaction leaves gaps.

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
            pack_bytes(columns.keys, "key"), pack_bytes(columns.values, "value"), timestamps_ms, columns.headers
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
    """Return records, at least one, whose keys and values are packed already as one batch; see `encode_columns`.

    Raises:
        InvalidRecord, InvalidTimestamp, UnsupportedCompression: as `encode_columns`.
    """
    keys, values, timestamps_ms, headers = columns
    record_count = len(timestamps_ms)
    latest_ms = _check_timestamps(timestamps_ms)
    return EncodedBatch(
        record_count=record_count,
        base_timestamp_ms=timestamps_ms[0],
        max_timestamp_ms=latest_ms,
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch,
        base_sequence=base_sequence,
        is_transactional=is_transactional,
        codec=codec,
        timestamp_deltas_ms=_packed_timestamps(timestamps_ms),
        offset_deltas=None if offset_deltas is None else _packed_offsets(offset_deltas, record_count),
        key_positions=keys.positions,
        null_keys=keys.nulls,
        value_positions=values.positions,
        null_values=values.nulls,
        headers=pack_headers(headers),
        key_data=None if keys.data is None else compress(codec, keys.data),
        value_data=None if values.data is None else compress(codec, values.data),
    )


def encode_control(
    control_type: ControlType, *, coordinator_epoch: int, producer: ProducerIdentity, timestamp_ms: int
) -> EncodedBatch:
    """Return a marker that ends the transaction of `producer`: a batch of one control record."""
    _check_timestamps([timestamp_ms])
    return EncodedBatch(
        record_count=1,
        base_timestamp_ms=timestamp_ms,
        max_timestamp_ms=timestamp_ms,
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch,
        is_transactional=True,
        control_type=control_type,
        coordinator_epoch=coordinator_epoch,
    )


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
        raise corrupt_batch(row, "a column holds a number that means nothing") from None


def control_record_bytes(control_type: ControlType, coordinator_epoch: int) -> tuple[bytes, bytes]:
    """Return the key and the value that Kafka's log would hold for a marker."""
    return (
        _CONTROL_KEY.pack(_CONTROL_VERSION, control_type),
        _CONTROL_VALUE.pack(_CONTROL_VERSION, coordinator_epoch),
    )


def _check_timestamps(timestamps_ms: Sequence[int]) -> int:
    """Return the latest timestamp once each is an integer that the column can hold."""
    if set(map(type, timestamps_ms)) != _INTEGERS:
        for index, timestamp in enumerate(timestamps_ms):
            if type(timestamp) is not int:
                raise InvalidTimestamp(
                    f"record {index} of the batch: its timestamp is {type(timestamp).__name__}, not int milliseconds"
                )
    earliest = latest = timestamps_ms[0]
    if timestamps_ms.count(earliest) != len(timestamps_ms):
        earliest, latest = min(timestamps_ms), max(timestamps_ms)
    if earliest < 0 or latest > TIMESTAMP_MS_MAX:
        raise InvalidTimestamp(
            f"timestamps are milliseconds from 0 to {TIMESTAMP_MS_MAX}; the batch has some from {earliest} to {latest}"
        )
    return latest


def _packed_timestamps(timestamps_ms: Sequence[int]) -> str | None:
    base_timestamp_ms = timestamps_ms[0]
    if timestamps_ms.count(base_timestamp_ms) == len(timestamps_ms):
        return None
    return pack_integers([timestamp_ms - base_timestamp_ms for timestamp_ms in timestamps_ms])


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

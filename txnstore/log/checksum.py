"""This file is the checksum of a record batch: which columns it protects, and in which order.

It protects the whole batch but for what the append gives under its lock: the offsets and the maximum timestamps.  A
topic that stamps records itself (LogAppendTime) has the batch sealed anew: `EncodedBatch.stamped`.
"""

# ruff: noqa: D102 - the comments of the table say what each column holds

from __future__ import annotations

import struct
import zlib
from operator import attrgetter
from typing import Final, Protocol


class ChecksummedColumns(Protocol):
    """The columns of a batch, named as in the table; a row of the table has them, and so has an `EncodedBatch`."""

    @property
    def record_count(self) -> int: ...
    @property
    def timestamp_type(self) -> int: ...
    @property
    def base_timestamp_ms(self) -> int: ...
    @property
    def producer_id(self) -> int: ...
    @property
    def producer_epoch(self) -> int: ...
    @property
    def base_sequence(self) -> int: ...
    @property
    def is_transactional(self) -> bool: ...
    @property
    def control_type(self) -> int | None: ...
    @property
    def coordinator_epoch(self) -> int | None: ...
    @property
    def codec(self) -> int: ...
    @property
    def timestamp_deltas_ms(self) -> str | None: ...
    @property
    def offset_deltas(self) -> str | None: ...
    @property
    def key_positions(self) -> str | None: ...
    @property
    def null_keys(self) -> str | None: ...
    @property
    def value_positions(self) -> str | None: ...
    @property
    def null_values(self) -> str | None: ...
    @property
    def headers(self) -> str | None: ...
    @property
    def key_data(self) -> bytes | None: ...
    @property
    def value_data(self) -> bytes | None: ...


#: What ends the checksummed bytes: the ten numbers of `_numbers` and the length of each column in front of it, -1
#: for NULL.  Being of fixed size it says where each column began, so no two batches give the same bytes.
_TRAILER: Final = struct.Struct(">iBqqii?biB9q")

#: Stands for NULL: no column has this length, no batch this control type or coordinator epoch.
_NULL: Final = -1

_payload = attrgetter(
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


def checksum(columns: ChecksummedColumns) -> int:
    """Return the CRC-32 of a batch, as an unsigned number.

    Raises:
        struct.error, TypeError, ValueError, AttributeError: a column holds what no column of this kind can hold.
    """
    crc = 0
    lengths = []
    for column in _payload(columns):
        if column is None:
            lengths.append(_NULL)
            continue
        data = column.encode() if isinstance(column, str) else column
        lengths.append(len(data))
        crc = zlib.crc32(data, crc)
    return zlib.crc32(_TRAILER.pack(*_numbers(columns), *lengths), crc)


def _numbers(columns: ChecksummedColumns) -> tuple[int, ...]:
    return (
        columns.record_count,
        columns.timestamp_type,
        columns.base_timestamp_ms,
        columns.producer_id,
        columns.producer_epoch,
        columns.base_sequence,
        columns.is_transactional,
        _NULL if columns.control_type is None else columns.control_type,
        _NULL if columns.coordinator_epoch is None else columns.coordinator_epoch,
        columns.codec,
    )

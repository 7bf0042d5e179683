"""This file is a record batch on its way into the table: its columns, their size and their checksum."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

from txnstore.log.checksum import checksum
from txnstore.log.columns import unpack_integers
from txnstore.log.compression import Codec
from txnstore.model import NO_PRODUCER, NO_SEQUENCE, ControlType, TimestampType


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
    key_positions: str | None = None
    null_keys: str | None = None
    value_positions: str | None = None
    null_values: str | None = None
    headers: str | None = dataclasses.field(default=None, repr=False)
    key_data: bytes | None = dataclasses.field(default=None, repr=False)
    value_data: bytes | None = dataclasses.field(default=None, repr=False)
    crc: int = dataclasses.field(init=False)
    size_bytes: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "crc", checksum(self))
        object.__setattr__(self, "size_bytes", sum(len(column) for column in _payload(self) if column is not None))

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
_payload: Final = attrgetter(
    "timestamp_deltas_ms",
    "offset_deltas",
    "key_positions",
    "null_keys",
    "value_positions",
    "null_values",
    "headers",
    "key_data",
    "value_data",
)

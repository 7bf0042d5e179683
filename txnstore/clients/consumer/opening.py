"""The opening of a batch that was read of a partition: its records become messages, each as it is taken."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final, TypeVar

from txnstore import bulk
from txnstore.clients.model.message import NO_DETAILS, Message, RecordSource, message_of
from txnstore.log.bounds import Bounds
from txnstore.log.codec import RecordBatch
from txnstore.log.columns import BytesColumn
from txnstore.model import OffsetAndMetadata, PartitionName, ProducerIdentity

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ToldCommit:
    """What the journal tells of the commit of a transaction."""

    transactional_id: str
    """Whose it is."""

    offsets: Mapping[str, Mapping[PartitionName, OffsetAndMetadata]]
    """The consumed offsets that it made take effect, by group."""


@dataclass(frozen=True, slots=True, eq=False)
class Committed:
    """What was committed at once, as it was found in one partition: a transaction, or a batch that is in none."""

    number: int
    """The place of its commit among those of its database: see `log.partition_rows`."""

    snapshot: int
    """The number of the reading that has seen it; that of a later reading of the same database is higher."""

    producer: ProducerIdentity | None
    """Whose records these are, with the epoch that this transaction alone has; None outside transactions."""

    told: ToldCommit | None = None
    """None: the journal of this database knows nothing of it, or no more."""

    @property
    def is_transaction(self) -> bool:
        """Whether it is one."""
        return self.producer is not None


@dataclass(slots=True)
class Chunk:
    """Records of one batch on their way to the application; without records, a stretch that is stepped over."""

    source: RecordSource | None
    open: Callable[[], Iterator[Message]]
    """Takes the batch apart, which may show that it is damaged."""
    record_count: int
    size_bytes: int
    first_offset: int
    """The records' own offset, as all offsets here; what else is where is a position of the consumer."""

    last_offset: int
    """The offset of the last record, or a higher one if compaction has removed the last records."""

    next_position: int
    """The position once all records are handed out."""

    start: int
    """The position at which it is read again."""

    base: int = 0
    unit: int = 1
    """After a record of the chunk the position is `base + unit * (its offset + 1)`."""

    commit: Committed | None = None
    """What its records were committed with; None: each partition is read by itself."""


@dataclass(frozen=True, slots=True)
class StoredOffset:
    """What the group has committed for a partition that is in another database than the group."""

    partition_id: int
    offset: OffsetAndMetadata | None
    """None: nothing."""


@dataclass(frozen=True, slots=True)
class PageRead:
    """What was read of one partition."""

    chunks: Sequence[Chunk]
    next_position: int
    bounds: Bounds
    end_position: int
    """The first position that this reader may not read yet."""

    snapshot: int = 0
    """The number of the reading, where the consumer gets transactions from all partitions at once."""


def open_in_python(source: RecordSource, batch: RecordBatch, from_offset: int) -> Iterator[Message]:
    """Return the messages of the records from `from_offset` on, in order; a marker has none.

    Raises:
        CorruptBatch: a column does not hold what it must.
        UnsupportedCompression: the package that implements the codec is not installed.
    """
    return map(message_of, repeat(source), batch.rows(from_offset))


def open_in_c(source: RecordSource, batch: RecordBatch, from_offset: int) -> Iterator[Message]:
    """Return and raise the same as `open_in_python`, by what is in C."""
    if batch.is_control:
        return iter(())
    offsets = batch.offsets()
    return bulk.core.Messages(
        message_type=Message,
        source=source,
        details=NO_DETAILS,
        index=0 if from_offset <= batch.base_offset else bisect_left(offsets, from_offset),
        count=batch.record_count,
        first_offset=batch.base_offset,
        offsets=None if isinstance(offsets, range) else _listed(offsets),
        timestamp_ms=batch.base_timestamp_ms,
        timestamps_ms=_timestamps_ms(batch),
        keys=_column(batch.keys()),
        values=_column(batch.values()),
        headers=_listed(batch.headers()),
    )


def _timestamps_ms(batch: RecordBatch) -> list[int] | bytes | None:
    deltas = batch.row.timestamp_deltas_ms
    packed = None if deltas is None else bulk.core.unpack_sums(deltas, batch.base_timestamp_ms, batch.record_count)
    return _listed(batch.timestamps_ms()) if packed is None else packed


def _listed(cells: Sequence[_T] | None) -> list[_T] | None:
    return cells if cells is None or isinstance(cells, list) else list(cells)


def _column(column: BytesColumn) -> tuple[bytes, Any, tuple[int, ...]] | None:
    return None if column.positions is None else (column.data, column.positions, tuple(column.nulls))


#: One or the other: what readers call for each batch.
open_batch: Final = open_in_c if bulk.IN_C else open_in_python

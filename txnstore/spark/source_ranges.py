"""What one task reads: a range of offsets, page after page, each page in a database transaction of its own.

No database transaction is open while Spark takes the records: it takes them as slowly as it likes.  Where records that
a query has to read are gone, that is an error or a warning, as the query chose (`DataLoss`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType
from sqlalchemy import Connection

from txnstore.db.store import Store
from txnstore.errors import OffsetOutOfRange, UnknownTopicOrPartition
from txnstore.log.bounds import Bounds, read_bounds
from txnstore.log.fetch import Page, fetch
from txnstore.model import IsolationLevel, PartitionName

if TYPE_CHECKING:
    import pyarrow as pa

_logger: Final = logging.getLogger("txnstore")
#: How much a task has in memory at a time; at least one batch.
PAGE_RECORDS_MAX: Final = 50_000
PAGE_BYTES_MAX: Final = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The offsets of one partition from `start_offset` up to, and without, `end_offset`."""

    partition: PartitionName
    partition_id: int
    start_offset: int
    end_offset: int

    @property
    def size(self) -> int:
        """How many offsets; at most as many records."""
        return self.end_offset - self.start_offset


def split(
    ranges: Sequence[OffsetRange], *, min_partitions: int | None = None, max_records: int | None = None
) -> list[OffsetRange]:
    """Return the ranges in at least about `min_partitions` parts, none with more than `max_records` offsets.

    Larger ranges are split into more parts.  A range of no offsets stays as it is.
    """
    if max_records is not None:
        ranges = [part for whole in ranges for part in _split_evenly(whole, -(-whole.size // max_records))]
    if min_partitions is None or len(ranges) >= min_partitions:
        return list(ranges)
    total = sum(whole.size for whole in ranges)
    # What is smaller than an even share is read in one part; the others have the rest of the parts to themselves.
    small = sum(1 for whole in ranges if whole.size * min_partitions <= total)
    large_total = sum(whole.size for whole in ranges if whole.size * min_partitions > total)
    return [
        part
        for whole in ranges
        for part in _split_evenly(
            whole,
            1
            if whole.size * min_partitions <= total
            else max(1, -(-whole.size * (min_partitions - small) // large_total)),
        )
    ]


def _split_evenly(whole: OffsetRange, count: int) -> Iterable[OffsetRange]:
    count = max(1, min(count, whole.size))
    edges = [whole.start_offset + whole.size * index // count for index in range(count + 1)]
    return [replace(whole, start_offset=start, end_offset=end) for start, end in pairwise(edges)]


def admit(
    starts: Mapping[PartitionName, int], ends: Mapping[PartitionName, int], max_offsets: int | None
) -> dict[PartitionName, int]:
    """Return how far each partition may be read so that about `max_offsets` offsets are read of all of them.

    Each gets its share of what is there, and at least one offset, so that a busy partition starves no other: only
    with more partitions than `max_offsets` do they get more than that in all.
    """
    sizes = {partition: ends[partition] - starts[partition] for partition in sorted(ends)}
    total = sum(sizes.values())
    if max_offsets is None or total <= max_offsets:
        return {partition: starts[partition] + size for partition, size in sizes.items()}
    shares = {partition: max(size * max_offsets // total, min(size, 1)) for partition, size in sizes.items()}
    excess = sum(shares.values()) - max_offsets
    for partition in sorted(shares, key=lambda partition: -shares[partition]):
        if excess <= 0:
            break
        taken = min(excess, max(shares[partition] - 1, 0))
        shares[partition] -= taken
        excess -= taken
    return {partition: starts[partition] + share for partition, share in shares.items()}


class RangePartition(InputPartition):
    """One range of offsets, for one task."""

    def __init__(self, wanted: OffsetRange) -> None:
        """Keep the range; Spark pickles it."""
        super().__init__(wanted)
        self.wanted = wanted

    def __repr__(self) -> str:
        """Return the range, as Spark's logs show it."""
        return f"{self.wanted.partition} {self.wanted.start_offset}..{self.wanted.end_offset}"


class DataLoss:
    """Reports what is lost in the way that the query chose: `failOnDataLoss`."""

    def __init__(self, *, fails: bool) -> None:
        """Raise if `fails`, else warn."""
        self._fails = fails

    def report(self, what: str, instead: str) -> None:
        """Say what is lost, and what a query that can live with it does instead.

        Raises:
            OffsetOutOfRange: the query cannot.
        """
        if self._fails:
            raise OffsetOutOfRange(f"{what}. With failOnDataLoss=false the query {instead}, and loses what is gone")
        _logger.warning("%s; the query %s (failOnDataLoss=false)", what, instead, extra={"event": "source_data_lost"})

    def begin_within(self, partition: PartitionName, offset: int, bounds: Bounds) -> int:
        """Return where reading from `offset` on can begin: there, or where the log starts.

        Raises:
            OffsetOutOfRange: what lies there is gone, or never was, and the query fails on it.
        """
        if offset < bounds.log_start_offset:
            self.report(
                f"the records of {partition} from offset {offset} to {bounds.log_start_offset - 1} are gone: retention"
                " or delete_records took them before they were read",
                f"goes on at offset {bounds.log_start_offset}",
            )
            return bounds.log_start_offset
        if offset > bounds.high_watermark:
            self.report(
                f"{partition} was to be read from offset {offset} on, but its log ends at {bounds.high_watermark}: was"
                " its topic deleted and created again, or the database restored?",
                f"begins at offset {bounds.log_start_offset}",
            )
            return bounds.log_start_offset
        return offset


@dataclass(frozen=True, slots=True)
class RangeReader:
    """Reads ranges at one isolation level, as Arrow record batches with the columns of `schema`."""

    store: Store
    schema: StructType
    isolation: IsolationLevel
    loss: DataLoss
    first_timestamp_ms: int = 0
    """Batches whose records are all older may be left out."""

    def read(self, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
        """Return the records of the range, in order; all that there are, or an error, or a warning.

        Raises:
            OffsetOutOfRange: records of the range are gone, and the query fails on that.
            TxnStoreError: a batch is damaged, or the database cannot be asked.
        """
        from txnstore.spark.source_batches import ArrowReader  # who only plans needs none

        arrow = ArrowReader(self.schema, wanted.partition)
        position = wanted.start_offset
        while position < wanted.end_offset:
            try:
                page, position = self._page(wanted, position)
            except UnknownTopicOrPartition:
                self.loss.report(
                    f"{wanted.partition} is gone, with the records from offset {position} on: its topic was deleted",
                    "goes on without it",
                )
                return
            if position >= wanted.end_offset:
                return
            if page is None or page.next_offset <= position:
                self.loss.report(
                    f"{wanted.partition} was to be read up to offset {wanted.end_offset}, but now it ends at"
                    f" {position} or before: was the database restored?",
                    "goes on without the rest",
                )
                return
            batches = [batch for batch in page.batches if batch.max_timestamp_ms >= self.first_timestamp_ms]
            yield from arrow.read(batches, position, wanted.end_offset)
            position = page.next_offset

    def _page(self, wanted: OffsetRange, position: int) -> tuple[Page | None, int]:
        """Return the page and where it begins: later than asked if what lay there is gone and the query goes on.

        There are no records if the log has become shorter than it was when the range was planned.
        """

        def work(connection: Connection) -> tuple[Page | None, int]:
            bounds = read_bounds(connection, [wanted.partition_id])[wanted.partition_id]
            if position > bounds.high_watermark:
                return None, position
            begin = self.loss.begin_within(wanted.partition, position, bounds)
            if begin >= wanted.end_offset:
                return None, begin
            pages = fetch(
                connection,
                {wanted.partition_id: begin},
                isolation=self.isolation,
                records_max=PAGE_RECORDS_MAX,
                bytes_max=PAGE_BYTES_MAX,
                end_offsets={wanted.partition_id: wanted.end_offset},
            )
            return pages[wanted.partition_id], begin

        return self.store.read(work)

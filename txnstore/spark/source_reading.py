"""This file is the read of a range by a task: page after page, each in a database transaction of its own.

None is open while Spark takes the records: it takes them as slowly as it likes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql.types import StructType
from sqlalchemy import Connection

from txnstore.db.store import Store
from txnstore.errors import UnknownTopicOrPartition
from txnstore.log.bounds import read_bounds
from txnstore.log.fetch import Page, fetch
from txnstore.model import IsolationLevel
from txnstore.spark.source_batches import ArrowReader
from txnstore.spark.source_loss import DataLoss
from txnstore.spark.source_ranges import OffsetRange

#: How much a task has in memory at a time; at least one batch.
PAGE_RECORDS_MAX: Final = 50_000
PAGE_BYTES_MAX: Final = 16 * 1024 * 1024


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

        There is none if the log has become shorter than it was when the range was planned.
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

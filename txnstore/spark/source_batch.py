"""This file is a batch read: its ranges are fixed when Spark plans it, so a task that is repeated reads the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType
from sqlalchemy import Connection

from txnstore.errors import InvalidConfiguration
from txnstore.log.bounds import offset_for_time
from txnstore.model import TopicPartition
from txnstore.spark.source_filters import FilterPush, SourceFilters
from txnstore.spark.source_loss import DataLoss
from txnstore.spark.source_options import AtOffsets, SourceOptions
from txnstore.spark.source_partition import RangePartition
from txnstore.spark.source_ranges import OffsetRange, split
from txnstore.spark.source_reading import RangeReader
from txnstore.spark.source_snapshot import Snapshot, once_stable, read_snapshot, resolve_end, resolve_start
from txnstore.spark.stores import store_at


class TxnStoreReader(DataSourceReader):
    """Reads a range of each partition, once."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        """Keep what is asked for; the database is asked by `partitions`."""
        self._options = options
        self._schema = schema
        self._filters = SourceFilters()

    @property
    def pushFilters(self) -> Any:  # noqa: N802 - see source_filters
        """What takes over filters of the query."""
        return FilterPush(self._filters)

    def partitions(self) -> list[InputPartition]:
        """Return the ranges as they are now, all of one snapshot.

        Raises:
            InvalidConfiguration, UnknownTopicOrPartition: the options name what is not there.
            OffsetOutOfRange: records that were asked for are gone, and the query fails on that.
        """
        options = self._options
        ranges = once_stable(store_at(options.address), self._plan)
        parts = split(ranges, min_partitions=options.min_partitions, max_records=options.max_records_per_partition)
        # For an empty list Spark would make a partition of its own.
        return [RangePartition(part) for part in parts] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the records of one range."""
        if not isinstance(partition, RangePartition):
            return iter(())
        options = self._options
        return RangeReader(
            store_at(options.address),
            self._schema,
            options.isolation,
            DataLoss(fails=options.fail_on_data_loss),
            self._filters.first_timestamp_ms,
        ).read(partition.wanted)

    def _plan(self, connection: Connection) -> list[OffsetRange]:
        options = self._options
        snapshot = read_snapshot(connection, options)
        starts = resolve_start(connection, options, snapshot)
        ends = resolve_end(connection, options, snapshot)
        _check_order(options, starts, ends)
        ranges = [
            self._within_log(connection, snapshot, partition, starts[partition], ends[partition])
            for partition in snapshot.bounds
        ]
        return [found for found in ranges if found is not None]

    def _within_log(
        self, connection: Connection, snapshot: Snapshot, partition: TopicPartition, start: int, end: int
    ) -> OffsetRange | None:
        """Return what is read of a partition, or None if nothing is; its log has all of it, or it is said what not."""
        loss = DataLoss(fails=self._options.fail_on_data_loss)
        bounds = snapshot.bounds[partition]
        readable = snapshot.ends[partition]
        if start >= end:
            return None
        wanted = self._filters.clip(OffsetRange(partition, bounds.partition_id, start, end))
        if wanted is None:
            return None
        if end > readable:
            loss.report(
                f"{partition} was to be read up to offset {end}, but it can be read only up to {readable}",
                f"reads up to {readable}",
            )
        start = loss.begin_within(partition, wanted.start_offset, bounds)
        end = min(wanted.end_offset, readable)
        if self._filters.first_timestamp_ms > 0:
            found = offset_for_time(
                connection, bounds.partition_id, self._filters.first_timestamp_ms, self._options.isolation
            )
            start = end if found is None else max(start, found.offset)
        return OffsetRange(partition, bounds.partition_id, start, end) if start < end else None


def _check_order(options: SourceOptions, starts: dict[TopicPartition, int], ends: dict[TopicPartition, int]) -> None:
    """Refuse offsets that were written down the wrong way round; times may well come to that."""
    if not (isinstance(options.start, AtOffsets) and isinstance(options.end, AtOffsets)):
        return
    for partition, start in starts.items():
        if start > ends[partition]:
            raise InvalidConfiguration(
                f"{partition} begins at offset {start} (startingOffsets), behind its end at {ends[partition]}"
                " (endingOffsets)"
            )

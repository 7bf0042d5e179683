"""This file is the unit of work that Spark hands from the driver to a task of the source."""

from __future__ import annotations

from pyspark.sql.datasource import InputPartition

from txnstore.spark.source_ranges import OffsetRange


class RangePartition(InputPartition):
    """One range of offsets, for one task."""

    def __init__(self, wanted: OffsetRange) -> None:
        """Keep the range; Spark pickles it."""
        super().__init__(wanted)
        self.wanted = wanted

    def __repr__(self) -> str:
        """Return the range, as Spark's logs show it."""
        return f"{self.wanted.partition} {self.wanted.start_offset}..{self.wanted.end_offset}"

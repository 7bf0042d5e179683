"""What no Python source of Spark's comes below: rows of a plain table, and record batches that are there already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from scripts.bench_support import VALUE, Raw

BATCH_ROWS: Final = 10_000
COLUMNS: Final = "partition int, offset long, timestamp timestamp, key binary, value binary"


class PlainRows(DataSource):
    """The table `plain` at `url`, read by the database's driver and made Arrow's, a partition a task."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "floor-driver"

    def schema(self) -> str:
        """Return the columns."""
        return COLUMNS

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return what reads them."""
        return _PlainReader(schema, self.options["url"], int(self.options["partitions"]))


class _PlainReader(DataSourceReader):
    def __init__(self, schema: StructType, url: str, partition_count: int) -> None:
        self._schema = schema
        self._url = url
        self._partition_count = partition_count

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(number) for number in range(self._partition_count)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        schema = to_arrow_schema(self._schema, timezone="UTC")
        raw = Raw(self._url)
        statement = "SELECT part, off, stamp * 1000, key, value FROM plain WHERE part = ?"
        if raw.is_sqlite:
            rows = raw.run(statement, (partition.value,))
        else:
            raw.run("BEGIN")
            rows = raw.connection.cursor("rows", binary=True)
            rows.execute(statement.replace("?", "%s"), (partition.value,))
        while found := rows.fetchmany(BATCH_ROWS):
            columns = [
                pa.array(cells, field.type) for cells, field in zip(zip(*found, strict=True), schema, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)
        raw.close()


class ReadyBatches(DataSource):
    """As many rows of the same kind in every task, which cost nothing to make: what is left is what Spark does."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "floor-ready"

    def schema(self) -> str:
        """Return the columns."""
        return COLUMNS

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return what hands them out."""
        return _ReadyReader(schema, int(self.options["rows"]), int(self.options["partitions"]))


class _ReadyReader(DataSourceReader):
    def __init__(self, schema: StructType, row_count: int, partition_count: int) -> None:
        self._schema = schema
        self._row_count = row_count
        self._partition_count = partition_count

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(number) for number in range(self._partition_count)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        schema = to_arrow_schema(self._schema, timezone="UTC")
        cells = [partition.value, 0, 0, b"00000000", VALUE]
        columns = [pa.array([cell] * BATCH_ROWS, field.type) for cell, field in zip(cells, schema, strict=True)]
        batch = pa.RecordBatch.from_arrays(columns, schema=schema)
        for start in range(0, self._row_count, BATCH_ROWS):
            yield batch.slice(0, min(BATCH_ROWS, self._row_count - start))

"""The data source `txnstore`, as Spark finds it: spark.read.format("txnstore") and its siblings."""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from txnstore.spark.options import boolean, check_names
from txnstore.spark.source_schema import check_schema, source_schema
from txnstore.spark.worker_process import spare_what_is_loaded


class TxnStoreDataSource(DataSource):
    """Reads and writes topics of a store, batch and streaming; the options are those of Spark's Kafka source and sink.

    Spark finds it by itself where txnstore is installed; `spark.dataSource.register(TxnStoreDataSource)` does the same.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name by which programs ask for it."""
        return "txnstore"

    def schema(self) -> StructType:
        """Return the columns that a read gives, unless the program asked for some of them with `.schema()`.

        Raises:
            InvalidConfiguration: an option is unknown; what the others hold is looked at where they are used.
        """
        check_names(self.options)
        text = self.options.get("includeHeaders", "false")
        return source_schema(include_headers=boolean({"includeHeaders": text}, "includeHeaders", default=False))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return what reads a batch.

        Raises:
            InvalidConfiguration: an option or a column is not one of the source's.
        """
        from txnstore.spark.source_options import read_source_options
        from txnstore.spark.source_readers import TxnStoreReader

        options = read_source_options(self.options, streaming=False)
        check_schema(schema, include_headers=options.include_headers)
        return TxnStoreReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - the name is Spark's
        """Return what reads a stream.

        Raises:
            InvalidConfiguration: an option or a column is not one of the source's.
        """
        from txnstore.spark.source_options import read_source_options
        from txnstore.spark.source_readers import TxnStoreStreamReader

        options = read_source_options(self.options, streaming=True)
        check_schema(schema, include_headers=options.include_headers)
        return TxnStoreStreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return what writes a batch.

        Raises:
            InvalidConfiguration: an option or a column is not one of the sink's, or the mode is not append.
        """
        from txnstore.spark.sink_writer import batch_writer

        return batch_writer(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        """Return what writes a stream.

        Raises:
            InvalidConfiguration: an option or a column is not one of the sink's, or the mode is not append.
        """
        from txnstore.spark.sink_writer import stream_writer

        return stream_writer(self.options, schema, overwrite=overwrite)


# Every process that Spark plans with imports this; what few of them need is imported where it is used.
spare_what_is_loaded()

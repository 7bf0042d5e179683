"""The door at which Spark finds the data source: it imports every top-level module called pyspark_something.

It is installed beside the package, not in it; see pyproject.toml.
"""

from __future__ import annotations

from txnstore.spark.data_source import TxnStoreDataSource as DefaultSource

__all__ = ["DefaultSource"]

"""What each step of a query imports: Spark runs most of them in a process of their own, which begins with nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.databases import on_sqlite_alone

pytest.importorskip("pyspark", reason="needs pyspark: pip install 'txnstore[spark]'")
pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'txnstore[spark]'")

LOOK_UP = """
from pyspark_txnstore import DefaultSource

assert DefaultSource.name() == "txnstore"
"""
CREATE = """
import pickle, sys
from pyspark.sql.datasource import CaseInsensitiveDict
from txnstore.spark.data_source import TxnStoreDataSource

options = CaseInsensitiveDict({"kafka.bootstrap.servers": sys.argv[1], "subscribe": "in", "includeHeaders": "true"})
source = TxnStoreDataSource(options)
assert source.schema().names[-1] == "headers"
pickle.dumps(source)
"""
PLAN_A_STREAM = """
import pickle, sys
from txnstore.spark.data_source import TxnStoreDataSource

source = TxnStoreDataSource({"url": sys.argv[1], "subscribe": "in"})
pickle.dumps(source.streamReader(source.schema()))
"""
PLAN_A_WRITE = """
import pickle, sys
from pyspark.sql.types import BinaryType, StructField, StructType
from txnstore.spark.data_source import TxnStoreDataSource

source = TxnStoreDataSource({"url": sys.argv[1], "topic": "out"})
writer = source.writer(StructType([StructField("value", BinaryType())]), False)
pickle.dumps(writer)
"""
DECIDE = (
    PLAN_A_WRITE
    + """
from txnstore.spark.sink_writer import SinkMessage

writer.commit([SinkMessage(writer._run, 0)])
"""
)


def imported_by(program, url):
    run = [sys.executable, "-c", f"{program}\nimport sys\nprint(*sys.modules)", url]
    return set(subprocess.run(run, capture_output=True, text=True, check=True, timeout=120).stdout.split())


@pytest.mark.slow_but_first
@on_sqlite_alone
@pytest.mark.parametrize("program", [LOOK_UP, CREATE], ids=["looked-up", "created"])
def test_who_asks_for_name_and_columns_imports_no_database(program, txnstore_url):
    needless = {"numpy", "psycopg", "pyarrow", "sqlalchemy", "txnstore.db", "txnstore.spark.stores"}
    assert imported_by(program, txnstore_url) & needless == set()


@pytest.mark.slow
@pytest.mark.parametrize("program", [PLAN_A_STREAM, PLAN_A_WRITE, DECIDE], ids=["reading", "writing", "deciding"])
def test_who_plans_or_decides_imports_nothing_for_records(program, txnstore_url):
    needless = {"numpy", "pyarrow", "txnstore.spark.sink_task", "txnstore.spark.source_batches"}
    assert imported_by(program, txnstore_url) & needless == set()

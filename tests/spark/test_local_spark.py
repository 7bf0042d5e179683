"""The Spark of one machine: quiet, small, and with this Python in its workers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def python_of_a_worker(_):
    import pyspark

    return sys.executable, pyspark.__file__


@pytest.mark.slow
def test_workers_run_this_python_and_the_installed_pyspark(spark):
    import pyspark

    [(python, package)] = spark.sparkContext.parallelize([0], 1).map(python_of_a_worker).collect()
    assert python == sys.executable
    assert package == pyspark.__file__


@pytest.mark.slow
def test_the_session_of_the_process_is_there_already(spark):
    from txnstore.spark.local_spark import local_session

    assert local_session("another") is spark


@pytest.mark.slow
def test_spark_leaves_nothing_in_the_working_directory(spark, spark_folder):
    assert Path(spark.conf.get("spark.sql.warehouse.dir").removeprefix("file:")) == spark_folder / "warehouse"
    assert not Path("spark-warehouse").exists()

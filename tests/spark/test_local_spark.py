"""The Spark of one machine: quiet, small, and with this Python in its workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def python_of_a_worker(_):
    import pyspark

    return sys.executable, pyspark.__file__, "tests.tools.frozen" in sys.modules


@pytest.mark.slow
def test_workers_run_this_python_and_the_installed_pyspark(spark):
    """Those of the tests' session are forked from one process, `tests/tools/spark_forks.py`; see also the next one."""
    import pyspark

    [(python, package, is_forked)] = spark.sparkContext.parallelize([0], 1).map(python_of_a_worker).collect()
    assert python == sys.executable
    assert package == pyspark.__file__
    assert is_forked


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"])
def test_a_spark_elsewhere_starts_this_python_in_its_workers(spark_environment, name):
    program = [spark_environment[name], "-c", "import sys; print(sys.executable)"]
    assert subprocess.run(program, capture_output=True, text=True, check=True).stdout == f"{sys.executable}\n"


@pytest.mark.slow
def test_the_session_of_the_process_is_there_already(spark):
    from txnstore.spark.local_spark import local_session

    assert local_session("another") is spark


@pytest.mark.slow
def test_spark_leaves_nothing_in_the_working_directory(spark, spark_folder):
    assert Path(spark.conf.get("spark.sql.warehouse.dir").removeprefix("file:")) == spark_folder / "warehouse"
    assert not Path("spark-warehouse").exists()


def test_a_python_whose_path_has_a_space_is_reached_by_one_that_has_none(tmp_path, monkeypatch):
    """Spark would find no data source at all, and say no more than that there is none of this name."""
    pytest.importorskip("pyspark")
    from txnstore.spark.local_spark import local_environment

    spaced = tmp_path / "a folder" / "python"
    spaced.parent.mkdir()
    spaced.write_text(f"#!/bin/sh\nexec '{sys.executable}' \"$@\"\n")
    spaced.chmod(0o755)
    monkeypatch.setenv("PYSPARK_PYTHON", str(spaced))
    monkeypatch.setattr("txnstore.spark.local_spark.find_java", lambda folder: folder)
    monkeypatch.setattr(sys, "executable", str(spaced))
    environment = local_environment(tmp_path)
    for python in (environment["PYSPARK_PYTHON"], environment["PYSPARK_DRIVER_PYTHON"]):
        assert " " not in python.removeprefix(str(tmp_path))
        told = subprocess.run([python, "-c", "print(1, '2 3')"], capture_output=True, text=True, check=True).stdout
        assert told == "1 2 3\n"

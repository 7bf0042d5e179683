"""One Spark for all the tests of a process: a JVM takes half a gigabyte and ten seconds."""

from __future__ import annotations

import os
import sys

import pytest

from txnstore.spark.local_spark import NoJavaError, find_java, local_environment, local_session


@pytest.fixture(scope="session")
def spark_folder(tmp_path_factory):
    """What this process's Spark keeps while it runs."""
    return tmp_path_factory.mktemp("spark")


@pytest.fixture(scope="session")
def spark_environment(spark_folder):
    """The variables for a child that starts a Spark of its own: `subprocess.Popen(..., env=spark_environment)`."""
    pytest.importorskip("pyspark", reason="needs pyspark: pip install 'txnstore[spark]'")
    pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'txnstore[spark]'")
    from tests.tools.spark_classes import use_archived_classes  # imports pyspark

    try:
        use_archived_classes(str(find_java(spark_folder)))
    except NoJavaError as error:
        pytest.skip(str(error))
    return {**os.environ, **local_environment(spark_folder)}


@pytest.fixture(scope="session")
def forking_python(spark_folder, spark_environment):
    """What a Spark may start for Python: its workers come from a process that has imported what they need."""
    from tests.tools.spark_forks import python_for_spark

    with python_for_spark(spark_folder) as python:
        yield str(python)


@pytest.fixture(scope="session")
def _spark_session(spark_folder, forking_python):
    # The session alone: children with a Spark of their own have Python started as everybody has, unless they say so.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", forking_python)
        patch.setenv("PYSPARK_DRIVER_PYTHON", forking_python)
        patch.setattr(sys, "executable", forking_python)
        session = local_session("tests", folder=spark_folder)
    yield session
    session.stop()


@pytest.fixture
def spark(_spark_session):
    """The session of this process; streaming queries that a test leaves running are stopped after it."""
    yield _spark_session
    for query in _spark_session.streams.active:
        query.stop()
    _spark_session.catalog.clearCache()

"""The process that Spark's daemons and workers in Python are forked from: it has imported what all of them need.

Spark starts a daemon for each thing that Python does for it, and others for each streaming query; each forks workers,
of which every one imports the data source anew: most of what a small query takes. Each streaming query has one process
for its source, too.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.tools.program_forks import forks

_MODULES: Final = (
    "pyarrow",
    "psycopg",
    "pyspark.sql.datasource_internal",
    "pyspark.sql.pandas.serializers",
    "pyspark.sql.streaming.datasource",
    "pyspark.worker",
    "pyspark.sql.worker.commit_data_source_write",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.data_source_pushdown_filters",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.python_streaming_sink_runner",
    "pyspark.sql.worker.write_into_data_source",
    "txnstore.db.postgresql.backend",
    "txnstore.db.sqlite.backend",
    "txnstore.spark.data_source",
    "txnstore.spark.sink_writer",
    "txnstore.spark.source_readers",
)
#: What Spark starts in place of Python: what is none of its modules is Python's.
_PROGRAM: Final = """#!/bin/sh
case "$1 $2" in "-m pyspark."*) exec {forked} "$@" ;; esac
exec {python} "$@"
"""


@contextmanager
def python_for_spark(folder: Path) -> Iterator[Path]:
    """Return the program for PYSPARK_PYTHON, which is in the folder and of use while the context lasts."""
    program = folder / "python-of-forks"
    # As Spark has it, a text has the same hash in all workers.
    with forks(_MODULES, {**os.environ, "PYTHONHASHSEED": "0"}) as forked:
        program.write_text(_PROGRAM.format(python=shlex.quote(sys.executable), forked=forked))
        program.chmod(0o755)
        yield program

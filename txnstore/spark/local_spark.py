"""This file is a Spark of one machine: the environment it starts in, and a session that takes little.

For trying things, for tests and for `scripts/demo`.  A session made in any other way works as well: the data source
needs nothing of this.
"""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from txnstore.spark.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: What keeps a session small, quiet and to itself. A second core makes it parallel; a task is tried four times.
LOCAL_SETTINGS: Final[Mapping[str, str]] = {
    "spark.master": "local[2,4]",
    "spark.driver.memory": "512m",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
}


def local_environment(folder: Path) -> dict[str, str]:
    """Return the environment variables that a process sets before it makes its first session, or gives to a child.

    They name a Java, this Python for Spark's workers, and `folder` for all that Spark keeps while it runs; what
    JAVA_HOME, SPARK_HOME and PYSPARK_PYTHON say already is kept where it is of use.  `folder` has to exist for as
    long as Spark runs.

    Raises:
        NoJavaError: there is no Java that Spark runs on.
        ModuleNotFoundError: pyspark is not installed.
    """
    python = os.environ.get("PYSPARK_PYTHON", sys.executable)
    scratch = folder / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    return {
        "JAVA_HOME": str(find_java(folder)),
        "SPARK_HOME": os.environ.get("SPARK_HOME") or str(_spark_home(folder, python)),
        "SPARK_LOCAL_DIRS": str(scratch),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": _without_spaces(folder, python),
        "PYSPARK_DRIVER_PYTHON": _without_spaces(folder, sys.executable),
    }


def local_session(name: str, *, folder: Path | None = None, settings: Mapping[str, str] | None = None) -> SparkSession:
    """Start Spark in this process, or return the session that it has already.

    `settings` are Spark's, added to `LOCAL_SETTINGS`.  This sets the variables of `local_environment` for the whole
    process.  Without a `folder` it makes one, and removes it when the process ends.

    Raises:
        NoJavaError: there is no Java that Spark runs on.
        ModuleNotFoundError: pyspark is not installed.
    """
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="txnstore-spark-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ.update(local_environment(folder))
    # Spark leaves these in the working directory unless told otherwise.
    places = {"spark.sql.warehouse.dir": str(folder / "warehouse")}
    builder = SparkSession.builder.appName(name)
    for key, value in {**LOCAL_SETTINGS, **places, **(settings or {})}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _without_spaces(folder: Path, python: str) -> str:
    """Return a path of this Python that Spark can work with.

    Spark 4.3 looks for the program with a shell that takes a space for the end of it, and if it is not found looks for
    no data sources in Python either.
    """
    if python.split() == [python]:
        return python
    program = folder / f"python-{sha256(python.encode()).hexdigest()[:8]}"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(python)} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return str(program)


def _spark_home(folder: Path, python: str) -> Path:
    """Return pyspark's folder, or one of links that lacks pyspark.zip.

    Workers would import pyspark from that archive, compiling it each time: 0.4 s for each of a dozen processes.
    Without it they import the installed package, which this Python, and so any worker of the same, is known to have.
    """
    package = find_spec("pyspark")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("Spark is not installed: pip install 'txnstore[spark]'", name="pyspark")
    installed = Path(package.origin).parent
    libraries = installed / "python" / "lib"
    if python != sys.executable or not (libraries / "pyspark.zip").exists():
        return installed
    home = folder / "spark"
    linked = home / "python" / "lib"
    linked.mkdir(parents=True, exist_ok=True)
    for source, target in (
        *((path, home / path.name) for path in installed.iterdir() if path.name in {"bin", "jars", "sbin"}),
        *((path, linked / path.name) for path in libraries.glob("py4j-*.zip")),
    ):
        target.unlink(missing_ok=True)
        target.symlink_to(source)
    return home

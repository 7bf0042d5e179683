"""The classes of Spark, archived once for every Java that the tests start: each loads them in half the time.

Most of what a short life of Spark takes is the loading of 20,000 classes, and tests that kill drivers start many. Java
maps what it finds in the archive, and loads the rest as ever; an archive that is not of its version it ignores.  So it
does with one whose libraries stood elsewhere (before Java 19), so that all have one SPARK_HOME, which stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

import pyspark

from txnstore.spark.local_spark import LOCAL_SETTINGS, _spark_home

_TIMEOUT_SECONDS = 300.0
_OPTIONS = "spark.driver.extraJavaOptions"
#: What Spark gives to each Java of a driver, beside the options of its session.
_VARIABLE = "SPARK_SUBMIT_OPTS"


def use_archived_classes(java_home: str) -> None:
    """Let each driver that this process starts, or a child of it, take Spark's classes from the archive.

    It is made where there is none, by one process while others wait, and kept beside the libraries that it is of; where
    it cannot be made all goes on without.
    """
    if _VARIABLE in os.environ:
        return
    release = Path(java_home, "release").resolve()
    libraries = Path(sys.prefix, f"spark-{pyspark.__version__}")
    made_of = (str(release), release.read_text(), str(libraries), LOCAL_SETTINGS[_OPTIONS])
    archive = Path(sys.prefix, f"spark-classes-{sha256(repr(made_of).encode()).hexdigest()[:16]}.jsa")
    with contextlib.suppress(OSError), archive.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if "SPARK_HOME" not in os.environ:
            home = libraries / "spark"
            os.environ["SPARK_HOME"] = str(home if home.exists() else _spark_home(libraries, sys.executable))
        if not archive.exists():
            _make(archive, java_home)
        if archive.stat().st_size:
            # Where it cannot be taken nothing is said.
            quiet = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
            os.environ[_VARIABLE] = f"-XX:SharedArchiveFile={archive} {quiet}"


def _make(archive: Path, java_home: str) -> None:
    """Make the archive, or an empty file: nobody tries again."""
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        made = Path(folder, "classes.jsa")
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [sys.executable, "-m", __name__, folder, str(made)],
                env={**os.environ, "JAVA_HOME": java_home},
                capture_output=True,
                check=False,
                timeout=_TIMEOUT_SECONDS,
            )
        if not made.exists():
            made.touch()
        made.rename(archive)


def _load_and_archive(folder: Path, made: Path) -> None:
    """Do a little of what the tests do; at its end Java archives the classes that it took."""
    from txnstore.spark.local_spark import local_session

    options = f"{LOCAL_SETTINGS[_OPTIONS]} -XX:ArchiveClassesAtExit={made}"
    spark = local_session("classes", folder=folder, settings={_OPTIONS: options})
    rows = spark.createDataFrame([(1, "a"), (2, "b")], "number int, letter string")
    rows.repartition(2).groupBy("letter").count().orderBy("letter").collect()
    rows.write.parquet(str(folder / "rows"))
    stream = spark.readStream.schema(rows.schema).parquet(str(folder / "rows")).writeStream
    query = stream.option("checkpointLocation", str(folder / "checkpoint")).format("noop").trigger(availableNow=True)
    query.start().awaitTermination()
    java = spark.sparkContext._gateway.proc  # type: ignore[union-attr]  # there is one until it stops
    spark.stop()
    spark.sparkContext._gateway.shutdown()  # type: ignore[union-attr]  # the same
    java.stdin.close()
    java.wait()


if __name__ == "__main__":
    _load_and_archive(Path(sys.argv[1]), Path(sys.argv[2]))

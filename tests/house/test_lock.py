"""The lock pins what pyproject.toml asks for, by version and hash, and no address."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


@pytest.fixture(scope="module")
def locks(root):
    return {file.stem: file.read_text(encoding="utf-8") for file in (root / "scripts/requirements").glob("*.txt")}


@pytest.fixture(scope="module")
def pyproject(root):
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


def pinned_versions(lock):
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", lock, re.MULTILINE))


def assert_pinned(requirements, lock):
    versions = pinned_versions(lock)
    for requirement in map(Requirement, requirements):
        version = versions.get(canonicalize_name(requirement.name))
        assert version in requirement.specifier if version else False, f"run scripts/lock: {requirement}, not {version}"


def test_the_lock_holds_no_address(locks):
    assert sorted(locks) == ["development", "queues", "uv"]
    assert [name for name, lock in locks.items() if "://" in lock or "--" in lock.replace("--hash=", "")] == []


def test_every_package_is_pinned_with_hashes(locks):
    for lock in locks.values():
        entries = re.findall(r"^[a-z0-9-]+==[^\n]*(?:\n    [^\n]*)*", lock, re.MULTILINE)
        assert len(entries) == len(re.findall(r"^[^#\s]", lock, re.MULTILINE))
        assert [entry for entry in entries if "--hash=sha256:" not in entry] == []


def test_the_development_environment_pins_all_that_it_asks_for(locks, pyproject):
    extras = pyproject["project"]["optional-dependencies"]
    asked = [
        *pyproject["project"]["dependencies"],
        *pyproject["build-system"]["requires"],
        *pyproject["dependency-groups"]["dev"],
        *extras["compression"],
        *extras["kafka"],
        *extras["metrics"],
        *extras["opentelemetry"],
        *extras["spark"],
        *extras["spark-java"],
        *extras["testing"],
    ]
    assert_pinned(asked, locks["development"])

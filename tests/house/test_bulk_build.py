"""The bulk paths in C are built where there is a compiler, and done without where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from scripts import build_bulk

COMPILER = (sysconfig.get_config_var("LDSHARED") or "cc").split()[0]
needs_compiler = pytest.mark.skipif(
    shutil.which(COMPILER) is None or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="no C compiler, or no headers of Python",
)
CHOICE = (
    "from txnstore import bulk; from txnstore.clients.model.message import Message; print(bulk.IN_C, Message.__base__)"
)


@pytest.fixture(autouse=True)
def _no_choice_of_the_run(monkeypatch):
    monkeypatch.delenv("TXNSTORE_PURE_PYTHON", raising=False)
    monkeypatch.delenv("CC", raising=False)


def chosen(folder=None, **environment):
    """What a process chooses; in this folder if one is given, with the package that lies there."""
    command = [sys.executable, "-c", CHOICE]
    told = subprocess.run(
        command, env={**os.environ, **environment}, cwd=folder, check=True, capture_output=True, text=True
    )
    return told.stdout.strip()


@needs_compiler
def test_it_is_built_and_in_use():
    assert chosen() == "True <class 'txnstore._bulk.MessageParts'>"


@needs_compiler
@pytest.mark.parametrize("file", ["_bulk.h", "_bulk_poll.c"])
def test_what_was_built_of_other_sources_is_not_used(root, tmp_path, file):
    """As a checkout that goes on without being installed again."""
    package = tmp_path / "txnstore"
    shutil.copytree(root / "txnstore", package, ignore=shutil.ignore_patterns("__pycache__"))
    assert chosen(tmp_path) == "True <class 'txnstore._bulk.MessageParts'>"
    with (package / file).open("a") as source:
        source.write("/* A change. */\n")
    assert chosen(tmp_path) == "False <class 'txnstore.clients.model.message.MessageParts'>"
    with pytest.raises(subprocess.CalledProcessError) as raised:
        chosen(tmp_path, PYTHONWARNINGS="error::RuntimeWarning")
    assert "compiled from other sources" in raised.value.stderr
    # A wheel has no sources beside it.
    for source in package.glob("_bulk*.[ch]"):
        source.unlink()
    assert chosen(tmp_path) == "True <class 'txnstore._bulk.MessageParts'>"


def test_a_process_may_go_without():
    assert chosen(TXNSTORE_PURE_PYTHON="1") == "False <class 'txnstore.clients.model.message.MessageParts'>"


@needs_compiler
@pytest.mark.skipif(not COMPILER.endswith("gcc"), reason="each compiler warns of something else")
@pytest.mark.parametrize("source", build_bulk.SOURCES, ids=lambda source: source.name)
def test_gcc_has_no_warning_of_it(tmp_path, source):
    # What the form of a slot asks for: arguments that are not used, tables that end with zeros.
    accepted = ["-Wno-unused-parameter", "-Wno-missing-field-initializers"]
    # Of Python's headers nothing is to be said here.
    headers = ["-isystem", sysconfig.get_path("include")]
    command = [COMPILER, "-std=c11", "-Wall", "-Wextra", "-Wshadow", "-Werror", *accepted, "-fPIC", "-O2", *headers]
    built = subprocess.run(
        [*command, "-c", source, "-o", tmp_path / "bulk.o"], check=False, capture_output=True, text=True
    )
    assert (built.returncode, built.stderr) == (0, "")


@pytest.mark.slow
@needs_compiler
def test_what_is_built_replaces_what_was_there(tmp_path):
    target = tmp_path / build_bulk.BUILT
    target.write_text("of an older source")
    assert build_bulk.compile_to(target) is None
    assert target.read_bytes()[:4] != b"of a"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("name", "setting", "reason"),
    [
        ("CC", "/nowhere/cc", "/nowhere/cc"),
        ("CC", "false", "the compiler failed"),
        ("TXNSTORE_PURE_PYTHON", "1", "TXNSTORE_PURE_PYTHON is set"),
    ],
)
def test_what_was_built_before_does_not_stay_without_its_successor(tmp_path, monkeypatch, name, setting, reason):
    monkeypatch.setenv(name, setting)
    target = tmp_path / build_bulk.BUILT
    target.write_text("of an older source")
    told = build_bulk.compile_to(target)
    assert told is not None
    assert reason in told
    assert "\n" not in told
    assert list(tmp_path.iterdir()) == []


@needs_compiler
def test_an_error_of_the_compiler_is_told_in_one_line(tmp_path, monkeypatch):
    source = tmp_path / "damaged.c"
    source.write_text("#include <Python.h>\nthis is no C\n")
    monkeypatch.setattr(build_bulk, "SOURCES", [source])
    told = build_bulk.compile_to(tmp_path / build_bulk.BUILT)
    assert told is not None
    assert "error" in told
    assert "\n" not in told


def test_without_a_compiler_the_wheel_is_one_for_every_platform(root, tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    environment = {**os.environ, "CC": "/nowhere/cc"}
    built = subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True, text=True)
    assert "txnstore runs without its bulk paths in C: " in built.stdout + built.stderr
    (file,) = tmp_path.glob("*.whl")
    assert file.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(file) as archive:
        assert [name for name in archive.namelist() if "_bulk" in name] == ["txnstore/_bulk.pyi"]

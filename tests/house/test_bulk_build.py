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
    assert chosen() == "True <class 'txnstore._bulk.MessageFields'>"


@needs_compiler
@pytest.mark.parametrize("file", ["_bulk.h", "_bulk_poll.c"])
def test_what_was_built_of_other_sources_is_not_used(root, tmp_path, file):
    """As a checkout that goes on without being installed again."""
    package = tmp_path / "txnstore"
    shutil.copytree(root / "txnstore", package, ignore=shutil.ignore_patterns("__pycache__"))
    assert chosen(tmp_path) == "True <class 'txnstore._bulk.MessageFields'>"
    with (package / file).open("a") as source:
        source.write("/* A change. */\n")
    assert chosen(tmp_path) == "False <class 'txnstore.clients.model.message.MessageFields'>"
    with pytest.raises(subprocess.CalledProcessError) as raised:
        chosen(tmp_path, PYTHONWARNINGS="error::RuntimeWarning")
    assert "compiled from other sources" in raised.value.stderr
    # A wheel has no sources beside it.
    for source in package.glob("_bulk*.[ch]"):
        source.unlink()
    assert chosen(tmp_path) == "True <class 'txnstore._bulk.MessageFields'>"
    # What knows of the interface, and is another version's.
    interface = package / "_bulk.pyi"
    interface.write_text(interface.read_text() + "\ndef later() -> None: ...\n")
    assert chosen(tmp_path) == "False <class 'txnstore.clients.model.message.MessageFields'>"
    # Where somebody packs only what runs, nobody knows better.
    interface.unlink()
    assert chosen(tmp_path) == "True <class 'txnstore._bulk.MessageFields'>"


def test_a_process_may_go_without():
    assert chosen(TXNSTORE_PURE_PYTHON="1") == "False <class 'txnstore.clients.model.message.MessageFields'>"


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
        ("CC", "'cc", "No closing quotation"),
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


BUILDS = "open(out, 'w').write('built')"


@pytest.fixture
def compiler(tmp_path):
    """Make a compiler that does what is said, as a line of Python that finds the name of the output in `out`."""

    def make(does):
        path = tmp_path / "compiler"
        path.write_text(f"#!{sys.executable}\nimport sys\nout = sys.argv[-1]\n{does}\n")
        path.chmod(0o755)
        return path

    return make


@pytest.fixture
def target(tmp_path):
    """Where to compile to, in a folder in which nothing else is."""
    folder = tmp_path / "package"
    folder.mkdir()
    return folder / build_bulk.BUILT


@pytest.fixture
def python_is(monkeypatch):
    """Let Python say this of how it was built."""
    all_variables = sysconfig.get_config_vars

    def say(**variables):
        monkeypatch.setattr(
            sysconfig, "get_config_vars", lambda *names: [*map(variables.get, names)] if names else all_variables()
        )

    return say


def test_two_builds_at_once_are_in_nobodys_way(tmp_path, monkeypatch, compiler, target):
    names = tmp_path / "names"
    monkeypatch.setenv("CC", str(compiler(f"open(out, 'w').write(out); open({str(names)!r}, 'a').write(out + '\\n')")))
    for _ in range(2):
        assert build_bulk.compile_to(target) is None
    first, second = map(Path, names.read_text().splitlines())
    assert first != second
    assert target.parent in first.parents
    assert target not in {first, second}
    assert list(target.parent.iterdir()) == [target]


def test_what_a_killed_build_has_left_is_removed_by_a_later_one(monkeypatch, compiler, target):
    monkeypatch.setenv("CC", str(compiler(BUILDS)))
    old, new, other = (target.parent / name for name in (".bulk-old", ".bulk-new", "other"))
    for folder in (old, new, other):
        folder.mkdir()
        (folder / "half").write_text("half")
    for folder in (old, other):
        os.utime(folder, (1, 1))
    assert build_bulk.compile_to(target) is None
    # The new one may be of a build that is still at work.
    assert sorted(target.parent.iterdir()) == sorted([target, new, other])


def test_an_empty_choice_of_a_compiler_is_none(monkeypatch, compiler, python_is, target):
    monkeypatch.setenv("CC", "")
    python_is(LDSHARED=f"{compiler(BUILDS)} -shared", CCSHARED="-fPIC")
    assert build_bulk.compile_to(target) is None
    assert target.read_text() == "built"


@pytest.mark.parametrize("choice", ["", "cc"])
def test_a_python_that_was_not_compiled_here_is_no_failure(monkeypatch, python_is, target, choice):
    monkeypatch.setenv("CC", choice)
    python_is()
    assert build_bulk.compile_to(target) == "this Python does not know by what it was compiled"


def test_a_python_whose_threads_run_at_once_goes_without(compiler, python_is, target):
    python_is(LDSHARED=f"{compiler(BUILDS)} -shared", Py_GIL_DISABLED=1)
    assert "lock of the interpreter" in str(build_bulk.compile_to(target))
    assert not target.exists()


def test_whatever_a_compiler_says_is_no_failure_of_the_build(monkeypatch, compiler, target):
    says = "sys.stderr.buffer.write(b'erreur: error \\xe9\\n'); open(out, 'w').write('half'); sys.exit(1)"
    monkeypatch.setenv("CC", str(compiler(says)))
    assert str(build_bulk.compile_to(target)).startswith("erreur: error ")
    assert list(target.parent.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_no_failure_of_the_build(tmp_path):
    assert build_bulk.compile_to(tmp_path / "none" / build_bulk.BUILT) is not None


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

"""Which Python the environment is made with: of several of one version the one that runs our code in the least time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: As an interpreter of any name that takes each allocation down: it does the same in several times the time.
SLOW = "-X tracemalloc"
WITHOUT_HEADERS = "import sysconfig\nsysconfig.get_path = lambda name: '/nowhere'\n"


@pytest.fixture
def found(root, tmp_path):
    """Put programs on the PATH, by their folders and names, and return which one is found, and what is said then."""

    def find(programs: dict[str, str], **variables: str) -> tuple[str, str]:
        for name, text in programs.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(0o755)
        folders = dict.fromkeys(str((tmp_path / name).parent) for name in programs)
        done = subprocess.run(
            ["/bin/bash", "-c", 'source "$0/scripts/environment" && find_python', root],
            env={"PATH": ":".join([*folders, "/usr/bin", "/bin"]), **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        return done.stdout.strip().removeprefix(f"{tmp_path}/"), done.stderr

    return find


def python(options: str = "", variables: str = "") -> str:
    """Return the program that is an interpreter with these options, and variables, of its own."""
    return f'{variables} exec {sys.executable} {options} "$@"'


@pytest.mark.slow_but_first
@pytest.mark.parametrize("first", ["slow", "quick"])
def test_of_several_of_one_version_it_is_the_fastest_wherever_it_stands_on_the_path(found, first):
    programs = {"slow/python3.14": python(SLOW), "quick/python3.14": python()}
    ordered = {name: programs[name] for name in sorted(programs, reverse=first == "slow")}
    assert found(ordered) == ("quick/python3.14", "")


def test_a_newer_version_comes_before_a_faster_one(found):
    assert found({"a/python3.13": python(), "a/python3.14": python(SLOW)}) == ("a/python3.14", "")


def test_one_that_the_bulk_paths_cannot_be_compiled_for_comes_after_those_that_are_slower(found, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_HEADERS)
    bare = python(variables=f"PYTHONPATH={tmp_path}")
    assert found({"bare/python3.14": bare, "slow/python3.14": python(SLOW)}) == ("slow/python3.14", "")
    assert found({"bare/python3.14": bare, "slow/python3.14": "exit 1"}) == ("bare/python3.14", "")


def test_what_does_not_run_is_passed_over(found):
    assert found({"a/python3.14": "exit 127", "b/python3.14": python()}) == ("b/python3.14", "")


def test_the_one_that_was_asked_for_is_taken_whatever_else_there_is(found, tmp_path):
    programs = {"a/python3.14": python(), "b/other": python()}
    assert found(programs, TXNSTORE_PYTHON=str(tmp_path / "b" / "other")) == ("b/other", "")


def test_where_none_is_usable_it_says_what_was_tried(found):
    assert found({"a/other": "exit 1"}, TXNSTORE_PYTHON="no-such-python") == (
        "",
        "No usable Python (tried: no-such-python): it takes 3.11 or newer with venv and sqlite3.\n",
    )


def test_where_no_other_version_is_to_be_had_it_says_so_in_one_line(root, tmp_path):
    if not Path(sys.prefix).is_relative_to(Path(root, ".venv")):
        pytest.skip("the script would make an environment first")
    version = "3.13" if sys.version_info[:2] == (3, 14) else "3.14"
    for name in (f"python{version}", "apt-get"):
        (tmp_path / name).write_text("#!/bin/sh\necho what nobody wants to know >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    nowhere = dict.fromkeys(("HOME", "PYENV_ROOT", "XDG_CACHE_HOME"), str(tmp_path / "nowhere"))
    done = subprocess.run(
        [f"{root}/scripts/python-versions", version],
        env={**os.environ, **nowhere, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    first, second = done.stdout.splitlines()
    assert first.startswith(f"Python {version}: no interpreter")
    assert second.endswith("nothing was run")
    assert (done.returncode, done.stderr) == (69, "")
    assert not (tmp_path / "nowhere").exists()

"""What a run of several processes tells of its tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.fixture
def broken():
    raise ValueError

@pytest.fixture
def broken_in_the_end():
    yield
    raise ValueError

@pytest.fixture
def absent():
    pytest.skip("it is not there")

def test_passes(): pass
def test_fails(): assert False
def test_cannot_begin(broken): pass
def test_cannot_end(broken_in_the_end): pass
def test_fails_and_cannot_end(broken_in_the_end): assert False
def test_is_left_out(absent): pass
def test_leaves_itself_out(absent): pytest.skip("it is not to be")
@pytest.mark.xfail
def test_is_known_to_fail(): assert False
"""


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--numprocesses=1", "--numprocesses=0", "--maxfail=99"])
def test_whatever_does_not_pass_is_told(option: str, root: Path, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_runtest_protocol\n")
    (tmp_path / "test_outcomes.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={tmp_path}"]
    told = subprocess.run(
        [*command, "--numprocesses=1", option, tmp_path], cwd=root, capture_output=True, text=True, check=False
    ).stdout
    assert "2 failed, 2 passed, 2 skipped, 1 xfailed, 3 errors" in told, told

"""The README: its example runs, and the tests that it names are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
README = (TOP / "README.md").read_text(encoding="utf-8")

EXAMPLE = re.search(r"```python\n(import txnstore as confluent_kafka.*?)```", README, re.DOTALL)
NAMED_TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", README)))
NAMED_PATHS = sorted(set(re.findall(r"`((?:txnstore|tests|migrations|scripts)/[\w/.-]*)`", README)))


def test_the_example_prints_the_record_that_it_wrote(tmp_path: Path) -> None:
    assert EXAMPLE is not None
    script = tmp_path / "example.py"
    script.write_text(EXAMPLE[1], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "payments 0 b'customer-7' b'42 EUR'\n"


def test_every_guarantee_names_a_test() -> None:
    rows = re.findall(r"^\| \*\*(G\d)", README, re.MULTILINE)
    assert rows == [f"G{number}" for number in range(1, 10)]
    assert len(NAMED_TESTS) >= len(rows)


@pytest.mark.parametrize(("file", "test"), NAMED_TESTS)
def test_a_named_test_is_there(file: str, test: str) -> None:
    path = TOP / file
    assert path.is_file()
    if test:
        assert f"def {test}(" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMED_PATHS)
def test_a_named_path_is_there(name: str) -> None:
    assert (TOP / name).exists()

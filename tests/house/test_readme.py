"""The README: its examples run, and the tests that it names are there."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from txnstore.testing.postgres_server import PostgresServer

TOP = Path(__file__).resolve().parents[2]
README = (TOP / "README.md").read_text(encoding="utf-8")

EXAMPLE = re.search(r"```python\n(import txnstore as confluent_kafka.*?)```", README, re.DOTALL)
EXAMPLES = README.partition("\n## Examples\n")[2].partition("\n## ")[0]
PROGRAMS = re.findall(r"### ([^\n]*)\n(?:(?!###).)*?```python\n([^`]*)```\n\n```text\n([^`]*)```", EXAMPLES, re.DOTALL)
RECIPES = README.partition("\n## One commit for rows, records and offsets\n")[2].partition("\n## ")[0]
PRINTING_RECIPES = re.findall(
    r"### ([^\n]*)\n(?:(?!###).)*?```python\n([^`]*)```\n\n```text\n([^`]*)```", RECIPES, re.DOTALL
)
CLUSTER = README.partition("\n## Several databases\n")[2].partition("\n## ")[0]
PRINTING_RECIPES += [
    ("several databases", *item) for item in re.findall(r"```python\n([^`]*)```\n\n```text\n([^`]*)```", CLUSTER)
]
SILENT_RECIPES = dict(
    re.findall(r"### (One `with` block[^\n]*)\n(?:(?!###).)*?```python\n([^`]*)```", RECIPES, re.DOTALL)
)
TEST_FILES = dict(re.findall(r"^# (\w+\.py)\n(.*?)(?=^# \w+\.py$|^```)", EXAMPLES, re.DOTALL | re.MULTILINE))
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


def test_there_is_an_example_for_each_of_those_who_use_it() -> None:
    assert len(PROGRAMS) == 2
    assert set(TEST_FILES) == {"conftest.py", "test_transfer.py"}


def test_there_are_recipes_for_one_commit() -> None:
    assert len(PRINTING_RECIPES) == 3
    assert list(SILENT_RECIPES) == [
        "One `with` block over records and rows",
        "One `with` block over two databases",
    ]


@pytest.mark.parametrize(
    ("program", "printed"),
    [item[1:] for item in PROGRAMS + PRINTING_RECIPES],
    ids=[item[0] for item in PROGRAMS + PRINTING_RECIPES],
)
def test_an_example_prints_what_stands_below_it(tmp_path: Path, program: str, printed: str) -> None:
    script = tmp_path / "example.py"
    script.write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == printed


def test_the_recipe_of_one_block_writes_the_row_and_the_record(tmp_path: Path) -> None:
    program = SILENT_RECIPES["One `with` block over records and rows"].replace("sqlite:///", f"sqlite:///{tmp_path}/")
    exec(compile(program, "recipe", "exec"), {})
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as shop:
        assert shop.execute("SELECT item FROM orders").fetchall() == [("tea",)]
        assert shop.execute("SELECT value, status FROM txnstore_records").fetchall() == [(b"tea", "committed")]


def test_the_example_for_testers_passes_on_both_databases(
    tmp_path: Path, txnstore_postgres_server: PostgresServer
) -> None:
    for name, text in TEST_FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    server = txnstore_postgres_server.url(txnstore_postgres_server.maintenance_database)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "."],
        cwd=tmp_path,
        env=os.environ | {"TXNSTORE_TEST_POSTGRES_URL": server},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


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

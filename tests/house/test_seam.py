"""The places outside the seam that ask which kind of database they are on are those that the README of `db/` lists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.tools.readmes import TOP

PACKAGE = TOP / "txnstore"
BEHIND_THE_SEAM = {"db/sqlite", "db/postgresql"}
KINDS = {"sqlite", "postgresql"}
NAMES_A_KIND = re.compile("|".join(f"[\"']{kind}[\"']" for kind in sorted(KINDS)))


def asks_for_the_kind(source: str) -> bool:
    """Return whether something is compared with the name of a kind of database, or is for one dialect alone."""
    return NAMES_A_KIND.search(source) is not None and any(
        isinstance(value, ast.Constant) and value.value in KINDS
        for node in ast.walk(ast.parse(source))
        for value in compared(node)
    )


def compared(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare):
        yield from (node.left, *node.comparators)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "ddl_if":
        yield from (keyword.value for keyword in node.keywords)


def files_that_ask() -> set[str]:
    return {
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        if file.parent.relative_to(PACKAGE).as_posix() not in BEHIND_THE_SEAM
        and asks_for_the_kind(file.read_text(encoding="utf-8"))
    }


def test_the_files_that_ask_for_the_kind_of_database_are_listed() -> None:
    text = Path(PACKAGE / "db/README.md").read_text(encoding="utf-8")
    table = text.partition("| in the code | asks for |")[2].partition("\n\n")[0]
    listed = re.findall(r"`([\w/]+\.py)`", table)
    assert sorted(listed) == sorted(files_that_ask())


def test_a_question_for_the_kind_is_seen() -> None:
    assert asks_for_the_kind("if store.backend.name == 'sqlite': pass")
    assert asks_for_the_kind("key.ddl_if(dialect='postgresql')")
    assert not asks_for_the_kind("kinds = ('sqlite', 'postgresql')")

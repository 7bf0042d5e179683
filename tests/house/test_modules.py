"""Every Python file says what it is and defers its annotations."""

from __future__ import annotations

import ast

import pytest


@pytest.fixture(scope="module")
def modules(tracked_files):
    """The syntax tree of each tracked Python file that is not empty."""
    trees = {file: ast.parse(file.read_bytes()) for file in tracked_files if file.suffix == ".py"}
    return {file: tree for file, tree in trees.items() if file.name != "__init__.py" or tree.body}


def test_every_module_starts_with_a_docstring(root, modules):
    assert [str(file.relative_to(root)) for file, tree in modules.items() if not ast.get_docstring(tree)] == []


def test_every_module_with_code_defers_its_annotations(root, modules):
    def defers(tree):
        return any(
            isinstance(statement, ast.ImportFrom)
            and statement.module == "__future__"
            and "annotations" in (alias.name for alias in statement.names)
            for statement in tree.body
        )

    with_code = {file: tree for file, tree in modules.items() if tree.body[1:]}
    assert [str(file.relative_to(root)) for file, tree in with_code.items() if not defers(tree)] == []

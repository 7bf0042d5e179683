"""What the package never does with bytes that others wrote: make objects, run code, or import by a name in them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
FILES = sorted(file for folder in ("txnstore", "migrations") for file in (TOP / folder).rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "jsonpickle", "marshal", "shelve", "yaml", "joblib"}
CALLS = {"eval", "exec", "__import__", "compile"}
#: Makes modules of names: each is a constant there, or one of the program's own table.
IMPORTS = {
    "cli/program.py",
    "confluent_kafka_names.py",
    "db/migrating.py",
    "late_import.py",
    "log/columns.py",
    "relay/kafka_cluster.py",
    "testing/containers.py",
}


def wrong_in(source: str, name: str) -> list[str]:
    """Return what a source does of all that."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [each.name for each in names if each.name.partition(".")[0] in MODULES]
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in MODULES:
                found.append(module)
            case ast.Call(func=ast.Name(id=called)) if called in CALLS:
                found.append(called)
            case ast.Call(func=ast.Attribute(attr="import_module")) if name not in IMPORTS:
                found.append("import_module")
            case ast.Constant(value=str(text)) if text in MODULES:
                found.append(text)
            case ast.keyword(arg="allow_pickle"):
                found.append("allow_pickle")
    return found


@pytest.mark.slow
def test_nothing_that_others_wrote_becomes_an_object_or_code():
    assert len(FILES) > 200
    wrong = {}
    for file in FILES:
        name = file.relative_to(TOP / "txnstore").as_posix() if file.is_relative_to(TOP / "txnstore") else file.name
        if found := wrong_in(file.read_text(encoding="utf-8"), name):
            wrong[name] = found
    assert wrong == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import a, marshal as m",
        "eval('1')",
        "import importlib\nimportlib.import_module(name)",
        "load('pickle')",
        "numpy.load(file, allow_pickle=True)",
    ],
)
def test_the_look_would_notice(source):
    assert wrong_in(source, "some.py")

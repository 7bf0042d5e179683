"""The style of the code, where it can be counted: how a module opens, and how long a comment is."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

COMMENT_LINES_MAX = 2
#: What may be too long; only a tokenizer, which takes its time, tells it from text.
MANY_COMMENTS = re.compile(rf"(?m)(?:^[ \t]*#.*\n){{{COMMENT_LINES_MAX},}}[ \t]*#")
#: A module is a thing, not an answer.
QUESTIONS = {"How", "What", "When", "Where", "Whether", "Which", "Who", "Why"}


@pytest.fixture(scope="module")
def sources(tracked_files: list[Path]) -> dict[Path, str]:
    return {file: file.read_text(encoding="utf-8") for file in tracked_files if file.suffix == ".py"}


def opens_with_a_question(source: str) -> bool:
    first, *_ = [*(ast.get_docstring(ast.parse(source)) or "").split(), ""]
    return first in QUESTIONS


def long_comments(source: str) -> Iterator[int]:
    """Yield the lines where comments begin that stand by themselves and go on for too long."""
    if not MANY_COMMENTS.search(source):
        return
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    starts = [
        token.start[0]
        for token in tokens
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
    ]
    for _, lines in groupby(enumerate(starts), key=lambda each: each[1] - each[0]):
        first, *others = [line for _, line in lines]
        if len(others) >= COMMENT_LINES_MAX:
            yield first


def test_modules_of_the_package_open_with_a_noun_phrase(sources, root: Path) -> None:
    package = {file: source for file, source in sources.items() if file.is_relative_to(root / "txnstore")}
    assert [str(file.relative_to(root)) for file, source in package.items() if opens_with_a_question(source)] == []


def test_comments_are_short(sources, root: Path) -> None:
    found = [f"{file.relative_to(root)}:{line}" for file, source in sources.items() for line in long_comments(source)]
    assert found == []


@pytest.mark.parametrize(
    ("source", "asks", "lines"),
    [
        ('"""What it does."""\n# one\n# two\nname = 1  # three\n', True, []),
        ('"""The thing."""\n\n# one\n# two\n# three\n', False, [3]),
        ("name = 1\n", False, []),
    ],
)
def test_what_is_not_in_style_would_be_found(source: str, asks: bool, lines: list[int]) -> None:
    assert opens_with_a_question(source) is asks
    assert list(long_comments(source)) == lines

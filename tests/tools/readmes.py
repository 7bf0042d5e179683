"""The READMEs as tests see them: their fenced blocks, and which test runs each.

A program in Python that stands alone is run by `tests/house/test_readme.py`, which compares what it prints with the
text below it. Above any other block stands the test that runs it: `<!-- run by tests/cli/test_readme.py -->`.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]

FOLDERS = ("txnstore", "scripts", "tests")
READMES = [TOP / "README.md", *sorted(file for name in FOLDERS for file in (TOP / name).rglob("README.md"))]

_FENCE = re.compile(
    r"^(?:<!-- run by (?P<run_by>\S+) -->\n+)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a README."""

    readme: str
    heading: str
    language: str
    text: str
    run_by: str | None
    """The test that runs it; None: it is a program that stands alone."""

    printed: str | None
    """The text below it that it prints."""

    @property
    def name(self):
        return f"{self.readme}: {self.heading}"

    @property
    def commands(self):
        """The commands of a block for a shell, one a line, as words and without comments."""
        return [words for line in self.text.splitlines() if (words := shlex.split(line, comments=True))]


def blocks(readme):
    """Return the blocks of a README; a text below a program belongs to the program."""
    text = readme.read_text(encoding="utf-8")
    found: list[Block] = []
    for fence in _FENCE.finditer(text):
        if fence["language"] == "text":
            last = found.pop()
            assert last.language == "python", last
            found.append(Block(last.readme, last.heading, "python", last.text, last.run_by, fence["text"]))
            continue
        heading = _HEADING.findall(text, 0, fence.start())[-1]
        name = readme.relative_to(TOP).as_posix()
        found.append(Block(name, heading, fence["language"], fence["text"], fence["run_by"], None))
    return found


def blocks_run_by(test_file):
    """Return the blocks, of whichever README, that say that this test runs them."""
    name = Path(test_file).resolve().relative_to(TOP).as_posix()
    found = [block for readme in READMES for block in blocks(readme) if block.run_by == name]
    assert found, f"no README says that {name} runs a block"
    return found


def block_of(test_file, heading, language="python"):
    """Return the one block below this heading that says that this test runs it."""
    (block,) = (item for item in blocks_run_by(test_file) if (item.heading, item.language) == (heading, language))
    return block


def without_fences(readme):
    """Return the text of a README between its blocks."""
    return _FENCE.sub("", readme.read_text(encoding="utf-8"))


def anchors(readme):
    """Return the anchors of a README's headings, as they are made where it is shown."""
    headings = _HEADING.findall(without_fences(readme))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

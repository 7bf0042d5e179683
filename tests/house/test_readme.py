"""The READMEs: a door for every folder, programs that run, and links, paths and tests that are there."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.draw import PARTS, drawn, misplaced, readmes
from tests.tools.program_forks import LIBRARIES, forks
from tests.tools.readmes import READMES, TOP, anchors, block_of, blocks, without_fences
from txnstore.db.schema import SCHEMA_VERSION

TEXTS = {readme: readme.read_text(encoding="utf-8") for readme in READMES}
BLOCKS = [block for readme in READMES for block in blocks(readme)]
#: What is only shown.
DRAWINGS = {"mermaid"}
PROGRAMS = [block for block in BLOCKS if block.run_by is None and block.language not in DRAWINGS]

PACKAGE = TOP / "txnstore"
FOLDERS = [folder.parent for folder in sorted(PACKAGE.rglob("__init__.py"))]


def _named(readme: Path) -> str:
    return readme.relative_to(TOP).as_posix()


def test_the_first_one_fits_on_a_few_pages() -> None:
    assert (TOP / "README.md").stat().st_size <= 16_384


@pytest.mark.parametrize("folder", FOLDERS, ids=_named)
def test_every_folder_of_the_package_has_one_that_says_what_to_read_and_who_imports_it(folder: Path) -> None:
    readme = folder / "README.md"
    assert readme.is_file(), f"{_named(folder)} has no README.md at its door: begin with a neighbour's"
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert "<!-- begin files: written by scripts/draw -->" in text
    if folder != PACKAGE:
        assert "<!-- begin imports: written by scripts/draw -->" in text
        assert re.search("^May import .*; may be imported by ", text, re.MULTILINE)


def test_the_map_of_the_first_one_has_every_folder() -> None:
    table = TEXTS[TOP / "README.md"].partition("## Where things are")[2].partition("| to find | look at |")[0]
    named = {path for _, path in re.findall(r"\[`(\w*/?)`\]\(([\w./]+)\)", table)}
    assert [name for name in map(_named, FOLDERS) if name.count("/") <= 1 and f"{name}/README.md" not in named] == []


def test_every_one_is_reached_by_links_from_the_first() -> None:
    reached, waiting = set(), [TOP / "README.md"]
    while waiting:
        readme = waiting.pop()
        if readme not in reached:
            reached.add(readme)
            waiting += [target for target, _ in links_of(readme) if target.name == "README.md"]
    assert [_named(readme) for readme in READMES if readme not in reached] == []


@pytest.mark.slow
def test_a_stale_part_is_drawn_anew_and_the_rest_is_left() -> None:
    """Whether all parts are current is seen by `scripts/check`, which draws each."""
    assert readmes() == READMES
    readme = TOP / "txnstore/doctor/README.md"
    begin = "<!-- begin imports: written by scripts/draw -->\n"
    stale = TEXTS[readme].replace(begin, f"{begin}\nImports nothing.\n")
    assert drawn(readme, stale) == TEXTS[readme] != stale


def test_every_marker_has_something_that_is_drawn_for_it() -> None:
    assert list(misplaced({_named(readme): text for readme, text in TEXTS.items()})) == []


@pytest.mark.parametrize(
    "line",
    [
        "<!-- begin colours: written by scripts/draw -->\n<!-- end colours -->",
        "<!-- begin tables: written by scripts/draw -->",
        "<!-- end tables -->",
    ],
)
def test_a_marker_that_nothing_is_drawn_for_would_be_found(line: str) -> None:
    assert "A.md has a marker that nothing is drawn for, or one without the other" in set(misplaced({"A.md": line}))


def test_a_part_that_stands_nowhere_or_twice_would_be_found() -> None:
    part = "<!-- begin tables: written by scripts/draw -->\n<!-- end tables -->\n"
    found = set(misplaced({"A.md": part, "B.md": part}))
    assert "2 READMEs have a place for tables, not one" in found
    assert {f"0 READMEs have a place for {name}, not one" for name in PARTS if name != "tables"} <= found


@pytest.fixture(scope="module")
def forked() -> Iterator[list[str]]:
    """The start of a command that runs a module, which imports all of the package anew."""
    with forks(LIBRARIES) as command:
        yield shlex.split(command)


@pytest.mark.slow
@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: block.name)
def test_a_program_runs_and_prints_what_stands_below_it(tmp_path: Path, forked: list[str], block) -> None:
    assert block.language == "python", "above it has to stand which test runs it"
    (tmp_path / "example.py").write_text(block.text, encoding="utf-8")
    done = subprocess.run(
        [*forked, "-m", "example"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (block.printed or "")


@pytest.mark.parametrize("name", sorted({block.run_by for block in BLOCKS if block.run_by}))
def test_a_test_that_is_said_to_run_a_block_looks_for_its_blocks(name: str) -> None:
    assert re.search(r"\b(blocks_run_by|block_of)\(__file__", (TOP / name).read_text(encoding="utf-8"))


def test_the_commands_for_developers_are_there() -> None:
    for script, *arguments in block_of(__file__, "Developing", "sh").commands:
        text = (TOP / script).read_text(encoding="utf-8")
        assert text.startswith("#!/usr/bin/env bash")
        assert all(argument in text for argument in arguments)


def test_the_guarantees_are_worded_alike_where_they_are_given_and_where_they_are_defended() -> None:
    def worded(readme: Path) -> list[tuple[str, str]]:
        return re.findall(r"^\| \*\*(G\d [^|]*)\*\* \| ([^|]*) \|", TEXTS[readme], re.MULTILINE)

    given = worded(TOP / "README.md")
    assert len(given) == 9
    assert worded(TOP / "tests/README.md") == given


def test_a_function_that_the_first_one_leads_to_is_in_the_file_that_it_names() -> None:
    named = re.findall(r"`(?:\w+\.)?(\w+)\(\)` in \[[^\]]*\]\(([^)]+)\)", TEXTS[TOP / "README.md"])
    assert len(named) >= 6
    missing = [name for name, path in named if f"def {name}(" not in (TOP / path).read_text(encoding="utf-8")]
    assert missing == []


@pytest.mark.parametrize("readme", READMES, ids=_named)
def test_what_is_to_be_run_stands_in_a_fence_where_a_test_finds_it(readme: Path) -> None:
    """An indented block of code is one that nobody runs; what goes on with a list stands behind a line of it."""
    assert re.findall(r"(?:\A|\n\n)( {4}.*)", without_fences(readme)) == []


@functools.cache
def links_of(readme: Path) -> list[tuple[Path, str]]:
    """Return where the links of a README lead: a file or folder, and an anchor."""
    targets = re.findall(r"\]\(([^)\s]+)\)", without_fences(readme))
    return [
        ((readme.parent / path).resolve() if path else readme, anchor)
        for path, _, anchor in (target.partition("#") for target in targets if "://" not in target)
    ]


@pytest.mark.parametrize("readme", READMES, ids=_named)
def test_every_link_leads_somewhere(readme: Path) -> None:
    for target, anchor in links_of(readme):
        assert target.exists(), f"{_named(readme)} links to {target}"
        assert target.is_relative_to(TOP)
        if anchor:
            assert anchor in anchors(target), f"{_named(readme)} links to {_named(target)}#{anchor}"


def paths_of(readme: Path) -> list[str]:
    """Return what looks like a path in a README: below the top, below the package, or beside the README."""
    words = re.findall(r"`([\w./-]+)`", without_fences(readme))
    return [word for word in words if re.search(r"/|\.(py|md|toml)$", word)]


#: Names of programs and files of users.
OTHERS = {"import.py"}


@pytest.mark.parametrize("readme", READMES, ids=_named)
def test_every_path_that_is_named_is_there(readme: Path) -> None:
    places = [readme.parent, TOP, PACKAGE, *(parent for parent in readme.parents if parent.is_relative_to(PACKAGE))]
    missing = [path for path in paths_of(readme) if not any((place / path).exists() for place in places)]
    assert set(missing) - OTHERS == set()


NAMED_TESTS = sorted({test for text in TEXTS.values() for test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)})


def test_every_guarantee_names_a_test() -> None:
    rows = re.findall(r"^\| \*\*(G\d) ([^*]*)\*\* \|.*\| (`tests/.*) \|$", TEXTS[TOP / "tests/README.md"], re.MULTILINE)
    promised = re.findall(r"^\| \*\*(G\d) ([^*]*)\*\*", TEXTS[TOP / "README.md"], re.MULTILINE)
    assert [row[:2] for row in rows] == promised
    assert [number for number, _ in promised] == [f"G{number}" for number in range(1, 10)]


@pytest.mark.parametrize(("file", "test"), NAMED_TESTS)
def test_a_named_test_is_there(file: str, test: str) -> None:
    assert f"def {test}(" in (TOP / file).read_text(encoding="utf-8")


def test_newcomers_are_shown_five_places() -> None:
    table = TEXTS[TOP / "README.md"].partition("| to find | look at |")[2].partition("\n\n")[0]
    assert len(re.findall(r"^\| where ", table, re.MULTILINE)) == 5


def test_the_sessions_at_a_terminal_make_the_tables_of_today() -> None:
    text = TEXTS[TOP / "txnstore/cli/README.md"]
    assert set(re.findall(r"the tables of version (\d+) were made", text)) == {str(SCHEMA_VERSION)}

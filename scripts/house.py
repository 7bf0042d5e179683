"""The figures of the house: how many files and lines there are, how long and how deep, and the limits that are kept.

`scripts/check` prints them and fails when one is above its limit.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from txnstore import Producer

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGE: Final = "txnstore"
CLIENTS: Final = "txnstore/clients"

LINES_OF_A_FILE_MAX: Final = 750
FILES_OF_A_CLIENTS_FOLDER_MAX: Final = 14
IMPORTS_IN_A_ROW_MAX: Final = 8
FILES_OF_A_COMMIT_MAX: Final = 25
SHARED_CLASS_NAMES_MAX: Final = 0
#: The package's own file names what it imports late, and is imported by what names all of it to programs.
CIRCLING_FILES_MAX: Final = 2


@dataclass(frozen=True)
class Figure:
    """One number of the house, with what it belongs to."""

    name: str
    value: int
    limit: int | None = None
    where: str = ""

    @property
    def is_too_large(self) -> bool:
        """Whether the number is above its limit."""
        return self.limit is not None and self.value > self.limit

    def __str__(self) -> str:
        """Return a line of the report."""
        limit = "" if self.limit is None else f"of {self.limit}"
        mark = "" if not self.is_too_large else "  (above the limit)"
        return f"{self.name:<46}{self.value:>8,} {limit:<7} {self.where}{mark}".rstrip()


def figures() -> Iterator[Figure]:
    """Measure the files that git tracks, and one transaction."""
    files = {path: (ROOT / path).read_text().count("\n") for path in _tracked_files()}
    package = {path: lines for path, lines in files.items() if path.startswith(f"{PACKAGE}/")}
    tests = {path: lines for path, lines in files.items() if path.startswith("tests/")}
    yield Figure("files of the package", len(package))
    yield Figure("lines of the package", sum(package.values()))
    yield Figure("lines of the tests", sum(tests.values()))
    longest = max(package, key=lambda path: package[path])
    yield Figure("lines of the longest file", package[longest], LINES_OF_A_FILE_MAX, longest)

    shared = sorted(
        name for name, count in Counter(_classes(path for path in package if path.endswith(".py"))).items() if count > 1
    )
    yield Figure("names that several classes have", len(shared), SHARED_CLASS_NAMES_MAX, ", ".join(shared))

    folders = Counter(str(Path(path).parent) for path in package)
    largest = max((folder for folder in folders if folder.startswith(CLIENTS)), key=lambda folder: folders[folder])
    yield Figure(
        "files in the largest folder of the clients",
        folders[largest],
        FILES_OF_A_CLIENTS_FOLDER_MAX,
        largest,
    )
    chain = longest_chain({path for path in package if path.startswith(f"{CLIENTS}/")})
    names = " > ".join(Path(path).stem for path in chain)
    yield Figure("imports in a row inside the clients", len(chain) - 1, IMPORTS_IN_A_ROW_MAX, names)
    modules = {path for path in package if path.endswith(".py")}
    # A circle anywhere ends the measuring.
    yield Figure("imports in a row in the package", len(longest_chain(modules)) - 1)
    circling = files_in_circles(modules)
    yield Figure("files in circles of types", len(circling), CIRCLING_FILES_MAX, ", ".join(circling))
    passed = files_of_a_commit()
    yield Figure("files that a small commit passes", len(passed), FILES_OF_A_COMMIT_MAX)
    for folder, count in folders.most_common():
        yield Figure(f"files in {folder}", count)


def _tracked_files() -> list[str]:
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--", f"{PACKAGE}/*.py", f"{PACKAGE}/*.c", "tests/*.py"]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # A tracked file that was just removed is still listed.
    return [path for path in listing.split("\0") if (ROOT / path).is_file()]


def _classes(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        for statement in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(statement, ast.ClassDef):
                # `_Place` and `Place` are two things under one name as well.
                yield statement.name.lstrip("_")


def longest_chain(paths: set[str]) -> list[str]:
    """Return the longest chain of these files in which each imports the next one when it is imported."""
    imports = {path: sorted(_imported(path) & paths - {path}) for path in sorted(paths)}
    chains: dict[str, list[str]] = {}
    while ready := [path for path in imports.keys() - chains.keys() if chains.keys() >= set(imports[path])]:
        for path in ready:
            chains[path] = [path, *max((chains[other] for other in imports[path]), key=len, default=[])]
    if rest := sorted(imports.keys() - chains.keys()):
        # Some of them only import what is in a circle: from file to file the way ends in it.
        passed, path = [], rest[0]
        while path not in passed:
            passed.append(path)
            path = next(other for other in imports[path] if other in rest)
        sys.exit(f"these files import each other in a circle: {' > '.join(passed[passed.index(path) :])}")
    return max(chains.values(), key=len)


def files_in_circles(paths: set[str]) -> list[str]:
    """Return those of these files that import each other in circles, or between circles, if only for type checkers."""
    left = {path: _imported(path, with_types=True) & paths - {path} for path in paths}
    while True:
        imported = {other for others in left.values() for other in others}
        going_on = {path: others & left.keys() for path, others in left.items() if path in imported and others}
        if going_on == left:
            return sorted(left)
        left = going_on


def _imported(path: str, *, with_types: bool = False) -> set[str]:
    """Return the files that a file imports at its top; on demand also what only type checkers see there."""
    found: set[str] = set()
    statements = ast.parse((ROOT / path).read_text()).body
    if with_types:
        for statement in statements.copy():
            if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
                statements += statement.body
    for statement in statements:
        if isinstance(statement, ast.Import):
            found.update(_file_of(alias.name) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            for alias in statement.names:
                # A file of a package, or what the package's own file defines; of one in C only types are written here.
                file = _file_of(f"{statement.module}.{alias.name}")
                if not (ROOT / f"{file}i").is_file():
                    found.add(file if (ROOT / file).is_file() else _file_of(statement.module))
    return found


def _file_of(module: str) -> str:
    path = module.replace(".", "/")
    return f"{path}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py"


def files_of_a_commit() -> set[str]:
    """Return the files of the package in which producing a record and committing it on SQLite calls something.

    The transaction is the second of its producer: what happens once is over.
    """
    passed: set[str] = set()
    is_recording = threading.Event()

    def note(frame: FrameType, event: str, argument: object) -> None:
        # Now and then a thread of its own looks for abandoned transactions of others.
        is_of_the_commit = not threading.current_thread().name.endswith("-overdue")
        if event == "call" and is_of_the_commit and is_recording.is_set():
            passed.add(frame.f_code.co_filename)

    # The producer's own thread is to be seen too: it takes the hook with it when it starts.
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        with tempfile.TemporaryDirectory() as folder:
            # Nothing leaves before the commit, however slow the machine is.
            producer = Producer(
                {
                    "bootstrap.servers": f"sqlite:///{folder}/house.db",
                    "transactional.id": "house",
                    "linger.ms": 50_000,
                    # What a client does for the store as a whole is no part of it, and is due after a time.
                    "txnstore.maintenance": False,
                }
            )
            producer.init_transactions()
            for is_seen in (False, True):
                producer.begin_transaction()
                if is_seen:
                    is_recording.set()
                producer.produce("topic", b"value")
                producer.commit_transaction()
            is_recording.clear()
            producer.close()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    place = str(ROOT / PACKAGE)
    return {name for name in passed if name.startswith(f"{place}/")}


def main() -> None:
    """Print the figures; exit with 1 if one is above its limit."""
    measured = list(figures())
    for figure in measured:
        print(figure)
    if any(figure.is_too_large for figure in measured):
        sys.exit("the house has grown above its limits")


if __name__ == "__main__":
    main()

"""The files of a folder from the bottom up, and who imports whom, for the READMEs."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

TOP: Final = Path(__file__).resolve().parent.parent
PACKAGE: Final = TOP / "txnstore"

#: The files at the top of the package that its folders import; the others there only name what programs import.
FOUNDATIONS: Final = (
    "background_thread",
    "backoff",
    "bulk",
    "clock",
    "config",
    "deadline",
    "errors",
    "late_import",
    "model",
    "trouble",
)


def draw_files(folder: Path) -> Iterator[str]:
    """Draw the folders and files of a folder; what a file imports of the others stands above it."""
    folders = sorted(path for path in folder.iterdir() if (path / "__init__.py").is_file())
    files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    if folders:
        yield "| folder | what |"
        yield "| --- | --- |"
        for path in _from_the_bottom_up(folders):
            yield f"| [`{path.name}/`]({path.name}/README.md) | {_summary(path / '__init__.py')} |"
        yield ""
    if files:
        yield "From the bottom up: what a file imports from this folder stands above it."
        yield ""
        yield "| file | what |"
        yield "| --- | --- |"
        for path in [*_from_the_bottom_up(files), *sorted(folder.glob("*.c"))]:
            yield f"| [`{path.name}`]({path.name}) | {_summary(path)} |"


def draw_imports(folder: Path) -> Iterator[str]:
    """Draw what a folder imports of the package, and who imports it; what the layers allow stands in pyproject.toml."""
    own = _files_of(folder)
    imported = _targets_of(folder) - own
    importers = {file for file, targets in _imports().items() if file not in own and targets & own}
    yield f"Imports {_named(imported, folder)}.  "
    yield f"Imported by {_named(importers, folder)}."
    if folder == PACKAGE:
        return
    layer = folder.relative_to(PACKAGE).parts[0]
    above, below = _layers_around(layer)
    yield ""
    as_part = "" if folder.parent == PACKAGE else f" the rest of `{layer}` without a circle, and"
    yield f"May import{as_part} {_listed(below)}; may be imported by {_importers(folder, above)}."


def _importers(folder: Path, above: Collection[str]) -> str:
    """Name who may import a folder, given the layers above it."""
    dotted = folder.relative_to(TOP).as_posix().replace("/", ".")
    for contract in _contracts():
        if dotted in contract.get("protected_modules", ()):
            files = [_file_of(name)[0] for name in contract["allowed_importers"]]
            return f"{_listed([file.relative_to(PACKAGE).as_posix() for file in files])} alone"
    own = "" if folder.parent == PACKAGE else f"the rest of `{folder.relative_to(PACKAGE).parts[0]}` and "
    return f"{own}the layers above: {_listed(above)}, and the public modules" if above else "nobody"


@functools.cache
def _contracts() -> list[Any]:
    project = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))
    return project["tool"]["importlinter"]["contracts"]  # type: ignore[no-any-return]


def _layers_around(name: str) -> tuple[list[str], list[str]]:
    """Return the folders of the layers above that of this module, and the modules of those below."""
    (layers,) = (contract["layers"] for contract in _contracts() if contract.get("containers") == ["txnstore"])
    names = [re.findall(r"\w+", layer) for layer in layers]
    (own,) = (number for number, layer in enumerate(names) if name in layer)
    above = [name for layer in names[:own] for name in layer if (PACKAGE / name).is_dir()]
    below = [name for layer in names[own + 1 :] for name in layer if (PACKAGE / name).is_dir() or name in FOUNDATIONS]
    return above, below


def _named(files: Collection[Path], folder: Path) -> str:
    """Name the folders of files as the layers have them, or, beside this folder, by their place next to it."""
    siblings = folder.parent
    names = set()
    for file in files:
        if siblings != PACKAGE and file in _files_of(siblings):
            inner = file.relative_to(siblings).parts
            names.add(f"{siblings.relative_to(PACKAGE).as_posix()}/{inner[0]}" if len(inner) > 1 else _outer(file))
        else:
            names.add(_outer(file))
    return _listed(sorted(names))


def _outer(file: Path) -> str:
    """Name the folder of the package that a file is in, or the file at its top."""
    parts = file.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py") if parts[0] != "__init__.py" else "txnstore"


def _listed(names: Collection[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "nothing of the package"


def _from_the_bottom_up(units: list[Path]) -> list[Path]:
    """Put files or folders behind those that they import; what hangs together with most of the others comes first."""
    needs = {
        unit: [other for other in units if other != unit and _targets_of(unit) & _files_of(other)] for unit in units
    }
    order: list[Path] = []

    def add(unit: Path, waiting: tuple[Path, ...] = ()) -> None:
        if unit in order or unit in waiting:
            return
        for needed in needs[unit]:
            add(needed, (*waiting, unit))
        order.append(unit)

    needed_by_others = {needed for unit in units for needed in needs[unit]}
    for unit in sorted(units, key=lambda unit: (unit in needed_by_others, -len(_closure(unit, needs)), unit.name)):
        add(unit)
    return order


def _closure(unit: Path, needs: Mapping[Path, list[Path]]) -> set[Path]:
    """Return all that a unit needs, and what that needs."""
    found: set[Path] = set()
    waiting = [unit]
    while waiting:
        for needed in needs[waiting.pop()]:
            if needed not in found:
                found.add(needed)
                waiting.append(needed)
    return found


@functools.cache
def _targets_of(unit: Path) -> frozenset[Path]:
    return frozenset(target for file in _files_of(unit) for target in _imports()[file])


@functools.cache
def _files_of(unit: Path) -> frozenset[Path]:
    """Return the files of a folder, or this one file."""
    return frozenset(file for file in _imports() if file == unit or unit in file.parents)


@functools.cache
def _imports() -> Mapping[Path, frozenset[Path]]:
    """Return for each file of the package the files of it that it imports, anywhere in it."""
    return {file: frozenset(_imported_by(file)) for file in sorted(PACKAGE.rglob("*.py"))}


def _imported_by(file: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                yield from _file_of(f"{node.module}.{alias.name}") or _file_of(node.module)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from _file_of(alias.name)


def _file_of(dotted: str) -> list[Path]:
    """Return the file of a module of the package; an empty list if it is none."""
    if dotted.partition(".")[0] != PACKAGE.name:
        return []
    path = TOP.joinpath(*dotted.split("."))
    return [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()][:1]


def _summary(file: Path) -> str:
    """Return the first sentence of a module's docstring, or of the comment that opens a file of C."""
    if file.suffix == ".c":
        paragraph = file.read_text(encoding="utf-8").partition("*/")[0].partition("\n *\n")[0].removeprefix("/*")
    else:
        paragraph = (ast.get_docstring(ast.parse(file.read_bytes())) or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).replace("|", "\\|")

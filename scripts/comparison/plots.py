"""The figures as drawings: SVG files, one for each subject or curve, alike for the same figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from scripts.bench_support import number
from scripts.comparison.figures import Row
from scripts.comparison.sides import KAFKA, POSTGRESQL, SQLITE

_COLOURS: Final = {KAFKA: "#8c8c8c", SQLITE: "#3b7dd8", POSTGRESQL: "#2f9e6e"}
_OTHER_COLOUR: Final = "#c77d2e"
_WIDTH_INCHES: Final = 8.0
_INCHES_OF_A_BAR: Final = 0.24
_INCHES_OF_A_GROUP: Final = 0.62
_BAR: Final = 0.8
#: Numbers from here on are written without decimals.
_SHORT: Final = 1_000
#: No dates and no random names in the files, so that they change only with the figures; text stays text.
_SETTINGS: Final[Any] = {"svg.hashsalt": "txnstore", "svg.fonttype": "none", "font.size": 9}


@dataclass(frozen=True)
class Curve:
    """How one figure changes on one side while something grows."""

    name: str
    points: Sequence[tuple[float, float]]


def draw_rows(rows: Iterable[Row], folder: Path) -> list[Path]:
    """Draw the rows of each subject as bars; return the files."""
    return [_draw_subject(subject, list(of), folder) for subject, of in groupby(rows, key=lambda row: row.subject)]


def _draw_subject(subject: str, rows: list[Row], folder: Path) -> Path:
    whats = [(what, list(of)) for what, of in groupby(rows, key=lambda row: f"{row.what}, {row.unit}")]
    bars = max(len([row for row in of if not row.floor]) for _, of in whats)
    height = len(whats) * (_INCHES_OF_A_GROUP + _INCHES_OF_A_BAR * bars)
    with mpl.rc_context(_SETTINGS):
        drawing = Drawing(figsize=(_WIDTH_INCHES, height), layout="constrained")
        for axes, (what, of) in zip(drawing.subplots(len(whats), squeeze=False)[:, 0], whats, strict=True):
            _draw_bars(axes, what, of)
        return _save(drawing, folder / f"{subject}.svg")


def _draw_bars(axes: Axes, what: str, rows: list[Row]) -> None:
    """A bar for each side, the spread of its rounds as a line, and the floor that counts as a stroke across it."""
    own = [row for row in rows if not row.floor]
    for place, row in enumerate(own):
        spread = [[row.median - row.smallest], [row.largest - row.median]]
        axes.barh(place, row.median, height=_BAR, color=_COLOURS[row.side], xerr=spread, ecolor="#333333")
        for floor in (each for each in rows if each.floor and each.counts and each.side == row.side):
            axes.plot([floor.median] * 2, [place - _BAR / 2, place + _BAR / 2], color="#d1342f", linewidth=2)
            name, at = f"floor {number(floor.median)}", (floor.median, place)
            axes.annotate(name, at, xytext=(3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(range(len(own)), [f"{row.side}  {number(row.median)}" for row in own])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_title(what, loc="left", fontsize=9)
    axes.xaxis.set_major_formatter(_plain)
    axes.spines[["top", "right"]].set_visible(False)


def draw_curves(
    grows: str, panels: Mapping[str, Sequence[Curve]], file: Path, *, by_tens: bool = True, marks: Sequence[float] = ()
) -> Path:
    """Draw how figures change while something grows, by tens or evenly: a panel for each figure; return the file.

    Lines across the panels stand at `marks`.
    """
    with mpl.rc_context(_SETTINGS):
        drawing = Drawing(figsize=(_WIDTH_INCHES * 1.5, _WIDTH_INCHES / 3), layout="constrained")
        for axes, (what, curves) in zip(
            drawing.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
        ):
            for curve in curves:
                sizes, values = zip(*curve.points, strict=True)
                colour = _COLOURS.get(curve.name, _OTHER_COLOUR)
                axes.plot(sizes, values, marker="o" if by_tens else "", label=curve.name, color=colour)
            for mark in marks:
                axes.axvline(mark, color="#8c8c8c", linewidth=0.8)
            axes.set_xscale("log" if by_tens else "linear")
            axes.set_ylim(bottom=0)
            axes.set_title(what, loc="left", fontsize=9)
            axes.set_xlabel(grows)
            axes.yaxis.set_major_formatter(_plain)
            axes.xaxis.set_major_formatter(_plain)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False)
        return _save(drawing, file)


def _plain(value: float, _: float = 0) -> str:
    return f"{value:,g}" if value < _SHORT else f"{value:,.0f}"


def _save(drawing: Drawing, file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(file, format="svg", metadata={"Date": None})
    # matplotlib leaves blanks at the ends of lines.
    text = file.read_text(encoding="utf-8")
    file.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")
    return file

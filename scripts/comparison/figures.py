"""Figures of rounds, rows of their medians, and the tables in which rows stand."""

from __future__ import annotations

import os
import platform
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import groupby
from typing import Final

from scripts.bench_support import number, print_table
from scripts.comparison.sides import KAFKA

#: Of small work: at most twice the time of the same rows by the raw driver.
SHARE_OF_FLOOR: Final = 0.5


@dataclass(frozen=True)
class Figure:
    """What one round has measured; `is_rate`: more is better."""

    what: str
    unit: str
    value: float
    is_rate: bool = True
    reach: float | None = None
    """What is aimed at; None: nothing."""

    is_compared: bool = True
    """Whether what is aimed at is a ratio to Kafka's, not the figure itself."""

    floors: Mapping[str, float] = field(default_factory=dict)
    """The same figure without txnstore, measured in the same round: what the database or Python itself allows."""

    floor: str = ""
    """The floor that the figure is measured by; empty: the best of them."""

    share: float | None = None
    """Which part of that floor is aimed at; None: nothing."""

    subject: str = ""


@dataclass(frozen=True)
class Row:
    """The rounds of one figure on one side, or of one of its floors."""

    subject: str
    what: str
    side: str
    unit: str
    is_rate: bool
    median: float
    smallest: float
    largest: float
    rounds: int
    floor: str = ""
    """What is done instead; empty: it is the side's own figure."""

    ratio: float | None = None
    """To Kafka's median in the same run."""

    share: float | None = None
    """How near it comes to the floor that counts: 1 is the floor itself, 0.5 half as good."""

    counts: bool = True
    """Whether it is the figure itself, or the floor that it is measured by."""

    reach: str = ""
    reached: bool = True


def rows_of(rounds: Mapping[str, Mapping[str, Sequence[Figure]]]) -> list[Row]:
    """Return the rows for the figures of all rounds, by what was measured and by side, floors below their figure."""
    return [
        row
        for of_side in rounds.values()
        for side, figures in of_side.items()
        for row in (_row(side, figures, of_side.get(KAFKA)), *_floors(side, figures))
    ]


def _median(figures: Sequence[Figure]) -> float:
    return statistics.median(figure.value for figure in figures)


def _row(side: str, figures: Sequence[Figure], kafkas: Sequence[Figure] | None) -> Row:
    figure, median = figures[0], _median(figures)
    ratio = median / _median(kafkas) if kafkas is not None and side != KAFKA else None
    share = None
    if figure.floors:
        floor = statistics.median(each.floors[_floor_that_counts(figures)] for each in figures)
        if figure.is_rate:
            share = median / floor
        elif median:  # what cost nothing that could be measured is no multiple of it
            share = floor / median
    reach, reached = [], True
    measured = ratio if figure.is_compared else median
    if side != KAFKA and measured is not None and figure.reach is not None:
        sign, of = (">=" if figure.is_rate else "<="), ("x Kafka" if figure.is_compared else figure.unit)
        reach.append(f"{sign} {figure.reach:,g} {of}")
        reached = measured >= figure.reach if figure.is_rate else measured <= figure.reach
    if share is not None and figure.share is not None:
        reach.append(f">= {figure.share:g} of its floor")
        reached = reached and share >= figure.share
    row = _with_spread(figure, side, [each.value for each in figures])
    return replace(row, ratio=ratio, share=share, reach=", ".join(reach), reached=reached)


def _floor_that_counts(figures: Sequence[Figure]) -> str:
    figure = figures[0]
    medians = {name: statistics.median(each.floors[name] for each in figures) for name in figure.floors}
    best = max if figure.is_rate else min
    return figure.floor or best(medians, key=medians.__getitem__)


def _floors(side: str, figures: Sequence[Figure]) -> Iterator[Row]:
    for name in figures[0].floors:
        row = _with_spread(figures[0], side, [each.floors[name] for each in figures])
        yield replace(row, floor=name, counts=name == _floor_that_counts(figures))


def _with_spread(figure: Figure, side: str, values: Sequence[float]) -> Row:
    return Row(
        subject=figure.subject,
        what=figure.what,
        side=side,
        unit=figure.unit,
        is_rate=figure.is_rate,
        median=statistics.median(values),
        smallest=min(values),
        largest=max(values),
        rounds=len(values),
    )


def circumstances(script: str) -> dict[str, str | int | float]:
    """Return when, where and by which command is measured."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join([script, *sys.argv[1:]]),
        "machine": platform.machine(),
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        # Above the number of cores, others are at work too.
        "load": round(os.getloadavg()[0], 1),
    }


def show(rows: Sequence[Row]) -> None:
    """Print the rows as a table for a terminal."""
    print_table(
        f"txnstore beside Kafka ({platform.machine()}, Python {platform.python_version()})",
        ("what", "side", "median", "from", "to", "unit", "to Kafka's", "of floor", "to reach", "reached"),
        [
            (
                # Said once for all of its rows.
                "" if before is not None and row.what == before.what else row.what,
                row.side if not row.floor else f"{row.side}, floor: {row.floor}",
                *(number(value) for value in (row.median, row.smallest, row.largest)),
                row.unit,
                *("" if value is None else f"{value:.2f}" for value in (row.ratio, row.share)),
                row.reach,
                "" if row.reached else "no",
            )
            for before, row in zip((None, *rows), rows, strict=False)
        ],
        numbers={"median", "from", "to", "to Kafka's", "of floor"},
        width=190,
    )


def markdown(rows: Sequence[Row], sides: Sequence[str]) -> str:
    """Return the rows as a table for a README: a line for each figure and each floor, a column for each side."""
    lines = [f"| what | {' | '.join(sides)} | to reach |", f"| --- | {'---: | ' * len(sides)}--- |"]
    for (what, unit), of_figure in groupby(rows, key=lambda row: (row.what, row.unit)):
        figures = list(of_figure)
        for floor in dict.fromkeys(row.floor for row in figures):
            cells = {row.side: _cell(row) for row in figures if row.floor == floor}
            name = f"{what}, {unit}" if not floor else f"- floor: {floor}"
            reaches = "; ".join(_reaches([row for row in figures if row.floor == floor]))
            lines.append(f"| {name} | {' | '.join(cells.get(side, '') for side in sides)} | {reaches} |")
    return "\n".join(lines) + "\n"


def _cell(row: Row) -> str:
    spread = f" [{number(row.smallest)} to {number(row.largest)}]" if row.rounds > 1 else ""
    told = [f"{row.ratio:.2f} x"] if row.ratio is not None else []
    told += [f"{row.share:.2f} of floor"] if row.share is not None else []
    compared = f" ({', '.join(told)})" if told else ""
    return f"{number(row.median)}{spread}{compared}{'' if row.reached else ' **no**'}"


def _reaches(rows: Sequence[Row]) -> Iterator[str]:
    """Say what is to be reached, and whose it is where the sides differ."""
    reaches = {row.side: row.reach for row in rows if row.reach}
    for reach in dict.fromkeys(reaches.values()):
        having = [side for side in reaches if reaches[side] == reach]
        yield reach if len(set(reaches.values())) == 1 else f"{' and '.join(having)} {reach}"

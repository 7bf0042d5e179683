"""What the measures beside Kafka have in common: what the command line may say, sides that take turns, and files."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from scripts.bench_support import write_files
from scripts.comparison.figures import circumstances
from scripts.comparison.opening import NAMES, opened_sides
from scripts.comparison.sides import Side
from tests.tools.kafka_jars import NoKafkaError

#: EX_UNAVAILABLE of sysexits.h.
UNAVAILABLE: Final = 69

Found = TypeVar("Found")


def arguments_of_sides(program: str, about: str | None) -> argparse.ArgumentParser:
    """Return what each command line may say: the sides, and the files that are written."""
    parser = argparse.ArgumentParser(prog=program, description=about)
    parser.add_argument("--database", choices=list(NAMES), action="append", help="only this one")
    parser.add_argument("--without-kafka", action="store_true", help="measure txnstore alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="also draw them, as SVG files")
    return parser


def measure_sides(
    parser: argparse.ArgumentParser,
    name: str,
    *,
    run: Callable[[Sequence[Side], argparse.Namespace], Found],
    show: Callable[[Found], object],
    draw: Callable[[Found, Path], object],
) -> int:
    """Run what the command line asks for on its sides, show it, and write it under `name`; return the exit code."""
    options = parser.parse_args()
    about = circumstances(parser.prog)
    try:
        with opened_sides(options.database, with_kafka=not options.without_kafka) as sides:
            found = run(sides, options)
    except NoKafkaError as error:
        print(f"No Kafka: {' '.join(str(error).split())}")
        return UNAVAILABLE
    show(found)
    write_files(options, {**about, name: found}, draw=partial(draw, found))
    return 0

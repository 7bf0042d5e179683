"""Measure txnstore beside a real Kafka: the same program against both, taking turns, by clients in processes.

Kafka runs as its users run it: HotSpot's own choice of compilers, a heap of 1 GiB, `retry.backoff.ms=1` for the clients
(the default of 100 ms costs each small transaction 100 ms).  One broker keeps no other copies here, and does not
wait for its disk before it answers; txnstore's databases do.  Figures are medians over the rounds, with the smallest
and the largest; ratios are those of the medians.  A floor is the same by the raw driver, or by Python alone, measured
in the same rounds: it says what the database, or Python, would allow.

Exits with 1 if something could not be measured, after all the rest.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from scripts.bench_support import write_files
from scripts.comparison.bulk import bulk, one_partition
from scripts.comparison.figures import Figure, Row, circumstances, markdown, rows_of, show
from scripts.comparison.groups import group
from scripts.comparison.opening import NAMES, opened_sides
from scripts.comparison.sides import Side
from scripts.comparison.small import pipelined, server, small
from scripts.comparison.starting import start
from scripts.comparison.waiting import delay, idle
from tests.tools.kafka_jars import NoKafkaError

#: EX_UNAVAILABLE of sysexits.h.
UNAVAILABLE: Final = 69
SUBJECTS: Final[Mapping[str, Callable[[Side, argparse.Namespace], Iterable[Figure]]]] = {
    "bulk": bulk,
    "partition": one_partition,
    "small": small,
    "pipelined": pipelined,
    "server": server,
    "delay": delay,
    "idle": idle,
    "group": group,
    "start": start,
}


def measure(sides: Sequence[Side], options: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Run all rounds, in which the sides take turns, and compare their medians; also return what has failed."""
    found: dict[str, dict[str, list[Figure]]] = {}
    failed: list[str] = []
    for name in options.only or SUBJECTS:
        for number in range(options.rounds):
            first = number % len(sides)
            for side in (*sides[first:], *sides[:first]):
                place = f"round {number + 1} of {options.rounds}: {name}, {side.name}"
                print(place, file=sys.stderr)
                try:
                    for figure in SUBJECTS[name](side, options):
                        of_side = found.setdefault(figure.what, {each.name: [] for each in sides})
                        of_side[side.name].append(replace(figure, subject=name))
                except Exception:  # noqa: BLE001 - what took minutes to measure is not lost with what fails
                    traceback.print_exc()
                    failed.append(place)
    return rows_of({what: {side: of[side] for side in of if of[side]} for what, of in found.items()}), failed


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Draw a file of bars for each subject."""
    # It takes longer to import than the rest together.
    from scripts.comparison.plots import draw_rows

    draw_rows(rows, folder)


def arguments() -> argparse.ArgumentParser:
    """Return what the command line may say."""
    parser = argparse.ArgumentParser(prog="scripts/bench-kafka", description=__doc__)
    parser.add_argument("--database", choices=list(NAMES), action="append", help="only this one")
    parser.add_argument("--only", choices=list(SUBJECTS), action="append", help="only this subject; may be repeated")
    parser.add_argument("--without-kafka", action="store_true", help="measure txnstore alone")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each subject (3)")
    parser.add_argument("--records", type=int, default=100_000, help="records of a bulk (100,000)")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long small work is repeated (3)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 4, 8], help="producers at once (1 4 8)")
    parser.add_argument("--idle", type=int, nargs="+", default=[16, 100], help="idle consumers (16 100)")
    parser.add_argument("--members", type=int, default=16, help="members of the group (16)")
    parser.add_argument("--delays", type=int, default=200, help="records whose delay is measured (200)")
    parser.add_argument(
        "--transactions", type=int, default=300, help="transactions whose cost for the server is counted (300)"
    )
    parser.add_argument("--starts", type=int, default=5, help="fresh processes of each kind in a round (5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table for a README to this file")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="also draw the figures, as SVG files")
    return parser


def main() -> int:
    """Run the measurements that the command line asks for; return the exit code."""
    parser = arguments()
    options = parser.parse_args()
    about = circumstances(parser.prog)
    try:
        with opened_sides(options.database, with_kafka=not options.without_kafka) as sides:
            rows, failed = measure(sides, options)
    except NoKafkaError as error:
        print(f"No Kafka: {' '.join(str(error).split())}")
        return UNAVAILABLE
    show(rows)
    table = partial(markdown, rows, [side.name for side in sides])
    write_files(options, {**about, "rows": rows}, markdown=table, draw=partial(draw, rows))
    for place in failed:
        print(f"failed: {place}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

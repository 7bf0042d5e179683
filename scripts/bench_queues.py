"""Measure txnstore beside other queues in SQL, on the same databases, taking turns.

The work is unequal: see scripts/README.md.  Each is as lasting as a store; the other packages are in an environment
of their own, .venv/queues, and are not needed for anything else.  Each ratio is that of txnstore's median to another's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from scripts.bench_support import number, print_table, write_files
from scripts.comparison import other_queues
from scripts.comparison.figures import circumstances
from scripts.comparison.opening import NAMES, opened_sides
from scripts.comparison.other_queues import QUEUES, VALUE
from scripts.comparison.sides import ANSWER_TIMEOUT_SECONDS, OURS, SQLITE, Side, checked, processes
from txnstore.testing.postgres_server import connection_string

PYTHON_OF_OTHERS: Final = Path(".venv/queues/bin/python")
PROGRAM: Final = Path(other_queues.__file__)


@dataclass(frozen=True)
class Row:
    """The rounds of one figure of one queue."""

    database: str
    what: str
    queue: str
    median: float
    smallest: float
    largest: float
    ratio: float | None
    """Of txnstore's median to this one's."""


class Topic:
    """A topic of one partition as a queue: each item is a record, each acknowledgement an offset of a group."""

    def __init__(self, side: Side) -> None:
        """Produce to a new topic, and read it in a group."""
        self._name = side.new_topic()
        self._producer = side.producer(linger_ms=0)
        self._consumer = side.consumer(auto_offset_reset="earliest")
        self._consumer.subscribe([self._name])

    def put(self, count: int) -> None:
        """Produce so many records; return when they are there."""
        for _ in range(count):
            self._producer.produce(self._name, VALUE)
        assert self._producer.flush(ANSWER_TIMEOUT_SECONDS) == 0

    def take(self, count: int) -> int:
        """Consume so many records, and commit the offset behind them."""
        found = self._consumer.consume(count, ANSWER_TIMEOUT_SECONDS)
        for message in found:
            checked(message)
        self._consumer.commit(asynchronous=False)
        return len(found)


def of_topic(side: Side, seconds: float, records: int) -> dict[str, float]:
    """Return items a second of a topic."""
    return other_queues.measured(Topic(side), seconds, records, has_many=True)


def _of_other(name: str, database: str, seconds: float, records: int) -> dict[str, float]:
    command = [str(PYTHON_OF_OTHERS), str(PROGRAM), name, database, str(seconds), str(records)]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    rates: dict[str, float] = json.loads(told.splitlines()[-1])
    return rates


def measure(sides: Sequence[Side], options: argparse.Namespace) -> list[Row]:
    """Run all rounds, in which the queues of each database take turns."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for turn in range(options.rounds):
        for side in sides:
            others = [name for name, (database, *_) in QUEUES.items() if NAMES[database] == side.name]
            for queue in (OURS, *others) if turn % 2 == 0 else (*others, OURS):
                print(f"round {turn + 1} of {options.rounds}: {queue}, {side.name}", file=sys.stderr)
                if queue == OURS:
                    with processes.Pool(1) as pool:
                        rates = pool.apply(of_topic, (side, options.seconds, options.records))
                else:
                    # SQLite's others have files of their own, beside that of the store.
                    is_sqlite = side.name == SQLITE
                    file = f"{side.url.removeprefix('sqlite:///')}-{queue}-{turn}"
                    place = file if is_sqlite else connection_string(side.url)
                    rates = _of_other(queue, place, options.seconds, options.records)
                for what, rate in rates.items():
                    found.setdefault((side.name, what), {}).setdefault(queue, []).append(rate)
    return [
        Row(
            database,
            what,
            queue,
            statistics.median(rates),
            min(rates),
            max(rates),
            None if queue == OURS else statistics.median(of_queue[OURS]) / statistics.median(rates),
        )
        for (database, what), of_queue in found.items()
        for queue, rates in sorted(of_queue.items(), key=lambda item: item[0] != OURS)
    ]


def show(rows: Sequence[Row]) -> None:
    """Print the rows as a table."""
    print_table(
        "txnstore beside other queues in SQL, items/s",
        ("database", "what", "queue", "median", "from", "to", "txnstore's to it"),
        [
            (
                row.database,
                row.what,
                row.queue,
                *(number(value) for value in (row.median, row.smallest, row.largest)),
                "" if row.ratio is None else f"{row.ratio:.2f} x",
            )
            for row in rows
        ],
        numbers={"median", "from", "to", "txnstore's to it"},
    )


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a table for a README."""
    lines = ["| database | what, items/s | txnstore | others (txnstore's to it) |", "| --- | --- | ---: | --- |"]
    for database, what in dict.fromkeys((row.database, row.what) for row in rows):
        of = [row for row in rows if (row.database, row.what) == (database, what)]
        ours = "".join(number(row.median) for row in of if row.ratio is None)
        others = "; ".join(f"{row.queue} {number(row.median)} ({row.ratio:.2f} x)" for row in of if row.ratio)
        lines.append(f"| {database} | {what} | {ours} | {others} |")
    return "\n".join(lines) + "\n"


def arguments() -> argparse.ArgumentParser:
    """Return what the command line may say."""
    parser = argparse.ArgumentParser(prog="scripts/bench-queues", description=__doc__)
    parser.add_argument("--database", choices=list(NAMES), action="append", help="only this one")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each queue (3)")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long items are put at most (3)")
    parser.add_argument("--records", type=int, default=50_000, help="how many items are put at most (50,000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table for a README to this file")
    return parser


def main() -> None:
    """Run the measurements that the command line asks for."""
    parser = arguments()
    options = parser.parse_args()
    about = circumstances(parser.prog)
    with opened_sides(options.database, with_kafka=False) as sides:
        rows = measure(sides, options)
    show(rows)
    write_files(options, {**about, "rows": rows}, markdown=partial(markdown, rows))


if __name__ == "__main__":
    main()

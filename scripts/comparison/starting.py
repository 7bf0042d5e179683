"""Fresh processes: how soon the first record is written, and how soon there is help."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Final

from scripts.bench_clients import HELP, SMALLEST_HELP
from scripts.comparison.figures import Figure
from scripts.comparison.sides import SQLITE, Side
from txnstore.testing.postgres_server import connection_string

FIRST_RECORD_SECONDS_MAX: Final = 0.3
HELP_SECONDS_MAX: Final = 0.35

#: Each says when it was done, by the clock that all processes of a machine share.
_DONE: Final = "import time; print(time.monotonic(), flush=True)"
_FIRST_RECORD: Final = """
import sys
from {module} import Producer
producer = Producer({{"bootstrap.servers": sys.argv[1], "linger.ms": 0}})
producer.produce(sys.argv[2], b"value")
assert producer.flush(60) == 0
"""
_FIRST_ROW: Final = {
    True: """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("PRAGMA synchronous = FULL")
connection.execute("CREATE TABLE IF NOT EXISTS floor_starts (value BLOB)")
connection.execute("INSERT INTO floor_starts VALUES (?)", (b"value",))
connection.commit()
""",
    False: """
import psycopg, sys
connection = psycopg.connect(sys.argv[1])
connection.execute("CREATE TABLE IF NOT EXISTS floor_starts (value BYTEA)")
connection.execute("INSERT INTO floor_starts VALUES (%b)", (b"value",))
connection.commit()
""",
}


def _seconds(starts: int, program: str, *arguments: str) -> float:
    """Return the median seconds from the start of a process to the end of the program, files being in memory."""
    found = []
    for _ in range(starts + 1):
        begun = time.monotonic()
        command = [sys.executable, "-c", program + _DONE, *arguments]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found.append(float(told.split()[-1]) - begun)
    return statistics.median(found[1:])


def _seconds_of_help(starts: int, program: str) -> float:
    found = []
    for _ in range(starts + 1):
        begun = time.monotonic()
        subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
        found.append(time.monotonic() - begun)
    return statistics.median(found[1:])


def start(side: Side, options: argparse.Namespace) -> Iterator[Figure]:
    """A process that writes one record to a topic that is there, and the program's help."""
    seconds = _seconds(options.starts, _FIRST_RECORD.format(module=side.module), side.url, side.new_topic())
    rows = {}
    if side.is_ours:
        is_sqlite = side.name == SQLITE
        place = side.url.removeprefix("sqlite:///") if is_sqlite else connection_string(side.url)
        rows["a row by the raw driver"] = _seconds(options.starts, _FIRST_ROW[is_sqlite], place)
    yield Figure(
        "start of a process to its first record",
        "s",
        seconds,
        is_rate=False,
        reach=FIRST_RECORD_SECONDS_MAX,
        is_compared=False,
        floors=rows,
    )
    if side.name == SQLITE:
        yield Figure(
            "txnstore --help",
            "s",
            _seconds_of_help(options.starts, HELP),
            is_rate=False,
            reach=HELP_SECONDS_MAX,
            is_compared=False,
            floors={"the smallest program made with Typer": _seconds_of_help(options.starts, SMALLEST_HELP)},
        )

"""What the benchmarks share: the raw driver, rounds that take turns, results with what is to be reached, tables."""

# ruff: noqa: S608 - what stands in these statements are constants of these files

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from txnstore.db.postgresql.backend import connect_driver
from txnstore.db.store import Store
from txnstore.db.url import parse_url
from txnstore.log.append import Append, append
from txnstore.log.fetch import Page, fetch
from txnstore.model import Record

VALUE = b"x" * 100
BATCH_RECORDS = 1_000
#: Figures from here on are printed without decimals.
MANY = 100


@dataclass(frozen=True)
class Result:
    """One measurement: ours against the other, and what is to be reached."""

    database: str
    name: str
    against: str
    unit: str
    ours: float
    other: float
    ratio: float
    reach: str
    reached: bool


class Raw:
    """The raw driver on a plain connection to the same database; `?` stands for a parameter on both."""

    def __init__(self, url: str) -> None:
        """Connect with the durability that a store has."""
        address = parse_url(url)
        self.is_sqlite = address.kind == "sqlite"
        if self.is_sqlite:
            self.connection: Any = sqlite3.connect(str(address.url.database), isolation_level=None)
            self.connection.execute("PRAGMA journal_mode = WAL")
            self.connection.execute("PRAGMA synchronous = FULL")
        else:
            self.connection = connect_driver(address)

    def run(self, statement: str, parameters: tuple[Any, ...] = ()) -> Any:
        """Execute one statement and return its cursor."""
        if not self.is_sqlite:
            statement = statement.replace("?", "%s").replace("INTEGER PRIMARY KEY", "BIGINT PRIMARY KEY")
            statement = statement.replace("BLOB", "BYTEA")
        return (
            self.connection.execute(statement, parameters or None) if parameters else self.connection.execute(statement)
        )

    def insert_rows(
        self, table: str, rows: list[tuple[Any, ...]], types: Sequence[str] = ("int8", "int8", "bytea", "bytea")
    ) -> None:
        """Insert rows, with columns of these types, in one database transaction, as fast as the driver can."""
        self.run("BEGIN")
        if self.is_sqlite:
            marks = ", ".join("?" * len(rows[0]))
            self.connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        else:
            with self.connection.cursor() as cursor, cursor.copy(f"COPY {table} FROM STDIN (FORMAT BINARY)") as copy:
                copy.set_types(types)
                for row in rows:
                    copy.write_row(row)
        self.run("COMMIT")

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


@dataclass
class Bench:
    """One database with a store and a raw connection, and how often to measure."""

    database: str
    url: str
    store: Store
    raw: Raw
    rounds: int
    batches: int

    def compare(self, ours: Callable[[], Any], other: Callable[[], Any]) -> tuple[float, float]:
        """Return the median seconds of both, measured in turns after one round to warm up."""
        ours(), other()
        seconds: tuple[list[float], list[float]] = ([], [])
        for number in range(self.rounds):
            pair = [(0, ours), (1, other)]
            for index, work in pair if number % 2 else pair[::-1]:
                begin = time.perf_counter()
                work()
                seconds[index].append(time.perf_counter() - begin)
        return statistics.median(seconds[0]), statistics.median(seconds[1])

    def append(self, item: Append) -> None:
        """Append one batch, in a commit of its own."""
        self.store.write(lambda connection: append(connection, [item]), wakes_readers=True)

    def fetch(self, partition_id: int, position: int) -> Page:
        """Read one page."""
        return self.store.read(lambda connection: fetch(connection, {partition_id: position}))[partition_id]

    def rate(self, what: tuple[str, str], count: int, seconds: tuple[float, float], *, reach: float) -> Result:
        """Return a result in records a second, of which more is better; `what` names ours and the other."""
        ours, other = count / seconds[0], count / seconds[1]
        ratio = ours / other
        return Result(self.database, *what, "records/s", ours, other, ratio, f">= {reach}", ratio >= reach)

    def latency(self, what: tuple[str, str], count: int, seconds: tuple[float, float], *, reach: float) -> Result:
        """Return a result in milliseconds each, of which less is better."""
        ours, other = seconds[0] / count * 1000, seconds[1] / count * 1000
        return Result(self.database, *what, "ms", ours, other, ours / other, f"<= {reach}", ours / other <= reach)


def records(count: int) -> list[Record]:
    """Return records of 100 bytes, stamped now."""
    now_ms = time.time_ns() // 1_000_000
    return [Record(VALUE, timestamp_ms=now_ms) for _ in range(count)]


def number(value: float) -> str:
    """Return a figure as it stands in tables."""
    return f"{value:,.0f}" if value >= MANY else f"{value:.2f}"


def print_table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Collection[str], width: int = 150
) -> None:
    """Print a table for a terminal; the columns under `numbers` stand to the right."""
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in numbers else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=width).print(table)


def write_files(
    options: argparse.Namespace,
    content: Mapping[str, Any],
    *,
    markdown: Callable[[], str] | None = None,
    draw: Callable[[Path], object] | None = None,
) -> None:
    """Write the files that the command line asks for: `--json`, and `--markdown` and `--plot` where there are such."""
    if options.json is not None:
        options.json.write_text(json.dumps(content, indent=2, default=asdict), encoding="utf-8")
    if markdown is not None and options.markdown is not None:
        options.markdown.write_text(markdown(), encoding="utf-8")
    if draw is not None and options.plot is not None:
        draw(options.plot)

"""What the benchmarks share: the raw driver, rounds that take turns, and a result with what is to be reached."""

# ruff: noqa: S608 - what stands in these statements are constants of these files

from __future__ import annotations

import sqlite3
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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

    def insert_rows(self, table: str, rows: list[tuple[Any, ...]]) -> None:
        """Insert rows in one database transaction, in the fastest way that the driver has."""
        self.run("BEGIN")
        if self.is_sqlite:
            marks = ", ".join("?" * len(rows[0]))
            self.connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        else:
            with self.connection.cursor() as cursor, cursor.copy(f"COPY {table} FROM STDIN (FORMAT BINARY)") as copy:
                copy.set_types(["int8", "int8", "bytea", "bytea"])
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

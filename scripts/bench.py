"""Measure txnstore against loops over the raw driver, both in the same run, and print the ratios.

Absolute figures say little on a shared machine; each ratio comes from rounds that take turns, and is their median.
`scripts/bench --help` lists the options.  PostgreSQL comes from where the tests get it.
"""

# ruff: noqa: S608 - what stands in these statements are constants of this file

from __future__ import annotations

import argparse
import json
import platform
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from txnstore.db.postgresql import connect_driver
from txnstore.db.store import Store, open_store
from txnstore.db.url import parse_url
from txnstore.log.append import Append, append
from txnstore.log.bounds import read_bounds
from txnstore.log.codec import encode
from txnstore.log.fetch import Page, fetch
from txnstore.log.topics import create_topic
from txnstore.model import GroupMembership, OffsetAndMetadata, ProducerIdentity, Record
from txnstore.testing.servers import choose_server
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.work import SentOffsets

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


def bench_append(bench: Bench) -> Iterator[Result]:
    """Append batches of 1,000 records of 100 bytes, one commit each."""
    topic = bench.store.write(lambda connection: create_topic(connection, "append"))
    partition_id = topic.partition_ids[0]
    bench.raw.run("CREATE TABLE plain_append (id INTEGER PRIMARY KEY, timestamp_ms BIGINT, key BLOB, value BLOB)")
    total = bench.batches * BATCH_RECORDS
    state = {"next": 0}

    def ours() -> None:
        for _ in range(bench.batches):
            item = Append(partition_id, encode(records(BATCH_RECORDS)))
            bench.append(item)

    def rows() -> None:
        for _ in range(bench.batches):
            now_ms, first = time.time_ns() // 1_000_000, state["next"]
            bench.raw.insert_rows(
                "plain_append", [(number, now_ms, None, VALUE) for number in range(first, first + BATCH_RECORDS)]
            )
            state["next"] += BATCH_RECORDS

    yield bench.rate(("append", "the same records as plain rows"), total, bench.compare(ours, rows), reach=1.0)
    bench.raw.run("CREATE TABLE plain_batches (id INTEGER PRIMARY KEY, positions TEXT, data BLOB)")
    ready = encode(records(BATCH_RECORDS))
    state["next"] = 0

    def batches() -> None:
        for _ in range(bench.batches):
            bench.raw.run("BEGIN")
            bench.raw.run(
                "INSERT INTO plain_batches VALUES (?, ?, ?)", (state["next"], ready.value_positions, ready.value_data)
            )
            bench.raw.run("COMMIT")
            state["next"] += 1

    yield bench.rate(("append", "the same ready-made batches as rows"), total, bench.compare(ours, batches), reach=0.4)


def bench_transactional_append(bench: Bench) -> Iterator[Result]:
    """Append 1,000 records a transaction, against an idempotent producer without transactions."""
    topic = bench.store.write(lambda connection: create_topic(connection, "transactional", partition_count=2))
    coordinator = TransactionCoordinator(bench.store)
    state: dict[str, Any] = {
        "transactional": coordinator.init_producer_id("bench-append").identity,
        "plain": coordinator.init_producer_id(None).identity,
        "sequence": 0,
    }

    def transactions() -> None:
        for _ in range(bench.batches):
            producer: ProducerIdentity = state["transactional"]
            batch = encode(records(BATCH_RECORDS), producer=producer, base_sequence=0, is_transactional=True)
            ended = coordinator.end_transaction(
                "bench-append", producer, commit=True, appends=[Append(topic.partition_ids[0], batch)]
            )
            state["transactional"] = ended.identity

    def plain() -> None:
        for _ in range(bench.batches):
            batch = encode(records(BATCH_RECORDS), producer=state["plain"], base_sequence=state["sequence"])
            item = Append(topic.partition_ids[1], batch)
            bench.append(item)
            state["sequence"] += BATCH_RECORDS

    total = bench.batches * BATCH_RECORDS
    seconds = bench.compare(transactions, plain)
    yield bench.rate(
        ("append, 1,000 records a transaction", "the same without transactions"), total, seconds, reach=0.95
    )


def bench_fetch(bench: Bench) -> Iterator[Result]:
    """Read everything that was appended, as records."""
    topic = bench.store.write(lambda connection: create_topic(connection, "fetch"))
    partition_id = topic.partition_ids[0]
    total = bench.batches * BATCH_RECORDS
    bench.raw.run("CREATE TABLE plain_fetch (id INTEGER PRIMARY KEY, timestamp_ms BIGINT, key BLOB, value BLOB)")
    for number in range(bench.batches):
        item = Append(partition_id, encode(records(BATCH_RECORDS)))
        bench.append(item)
        first = number * BATCH_RECORDS
        bench.raw.insert_rows("plain_fetch", [(first + index, 0, None, VALUE) for index in range(BATCH_RECORDS)])

    def ours() -> None:
        position = seen = 0
        while seen < total:
            page = bench.fetch(partition_id, position)
            seen += sum(1 for batch in page.batches for _ in batch.records())
            position = page.next_offset
        assert seen == total

    def rows() -> None:
        position = 0
        while position < total:
            found = bench.raw.run(
                "SELECT id, timestamp_ms, key, value FROM plain_fetch WHERE id >= ? ORDER BY id LIMIT 10000",
                (position,),
            ).fetchall()
            position += len(found)

    yield bench.rate(
        ("fetch to records", "fetchall of the same as plain rows"), total, bench.compare(ours, rows), reach=0.6
    )


def bench_small_transaction(bench: Bench) -> Iterator[Result]:
    """A transaction of one record and one offset, against a database transaction written by hand."""
    topic = bench.store.write(lambda connection: create_topic(connection, "small"))
    partition_id = topic.partition_ids[0]
    coordinator = TransactionCoordinator(bench.store)
    state: dict[str, Any] = {"producer": coordinator.init_producer_id("bench-small").identity, "number": 0}
    count = 100
    for statement in (
        "CREATE TABLE hand_log (id INTEGER PRIMARY KEY, timestamp_ms BIGINT, key BLOB, value BLOB)",
        "CREATE TABLE hand_heads (id INTEGER PRIMARY KEY, next_offset BIGINT)",
        "CREATE TABLE hand_producers (id INTEGER PRIMARY KEY, epoch BIGINT, last_sequence BIGINT)",
        "CREATE TABLE hand_finished (id INTEGER PRIMARY KEY, producer_id BIGINT, epoch BIGINT, outcome BIGINT)",
        "CREATE TABLE hand_offsets (id INTEGER PRIMARY KEY, committed BIGINT)",
        "CREATE TABLE hand_transactions (id INTEGER PRIMARY KEY, epoch BIGINT, state BIGINT)",
        "CREATE TABLE hand_journal (id INTEGER PRIMARY KEY, state BIGINT)",
        "INSERT INTO hand_heads VALUES (1, 0)",
        "INSERT INTO hand_producers VALUES (1, 0, 0)",
        "INSERT INTO hand_offsets VALUES (1, 0)",
        "INSERT INTO hand_transactions VALUES (1, 0, 0)",
    ):
        bench.raw.run(statement)

    def ours() -> None:
        for _ in range(count):
            producer: ProducerIdentity = state["producer"]
            batch = encode(records(1), producer=producer, base_sequence=0, is_transactional=True)
            offsets = SentOffsets(GroupMembership("bench"), {partition_id: OffsetAndMetadata(producer.epoch)})
            ended = coordinator.end_transaction(
                "bench-small", producer, commit=True, appends=[Append(partition_id, batch)], offsets=[offsets]
            )
            state["producer"] = ended.identity

    def by_hand() -> None:
        for _ in range(count):
            number = state["number"] = state["number"] + 1
            run, lock = bench.raw.run, "" if bench.raw.is_sqlite else " FOR UPDATE"
            run("BEGIN IMMEDIATE" if bench.raw.is_sqlite else "BEGIN")
            run(f"SELECT epoch, state FROM hand_transactions WHERE id = 1{lock}").fetchone()
            run(f"SELECT next_offset FROM hand_heads WHERE id = 1{lock}").fetchone()
            run("SELECT epoch, last_sequence FROM hand_producers WHERE id = 1").fetchone()
            run("INSERT INTO hand_log VALUES (?, ?, ?, ?)", (2 * number, 0, None, VALUE))
            run("INSERT INTO hand_log VALUES (?, ?, ?, ?)", (2 * number + 1, 0, None, b""))
            run("UPDATE hand_heads SET next_offset = ? WHERE id = 1", (2 * number + 2,))
            run("UPDATE hand_producers SET epoch = ?, last_sequence = 0 WHERE id = 1", (number,))
            run("INSERT INTO hand_finished VALUES (?, ?, ?, ?)", (number, 1, number, 1))
            run("UPDATE hand_offsets SET committed = ? WHERE id = 1", (number,))
            run("UPDATE hand_transactions SET epoch = ?, state = 4 WHERE id = 1", (number,))
            for step in range(3):
                run("INSERT INTO hand_journal VALUES (?, ?)", (3 * number + step, step))
            run("COMMIT")

    seconds = bench.compare(ours, by_hand)
    yield bench.latency(
        ("transaction of one record and one offset", "the same rows by hand"), count, seconds, reach=2.0
    )


def bench_growth(bench: Bench) -> Iterator[Result]:
    """The last stable offset and a page from the middle: a long log with open transactions against a short one."""
    topic = bench.store.write(lambda connection: create_topic(connection, "growth", partition_count=2))
    short, long = topic.partition_ids
    for partition_id, batches in ((short, 20), (long, 20 * 20)):
        batch = encode(records(BATCH_RECORDS))
        for _ in range(batches):
            bench.append(Append(partition_id, batch))
    coordinator = TransactionCoordinator(bench.store)
    for number in range(200):
        producer = coordinator.init_producer_id(f"open-{number}").identity
        batch = encode(records(1), producer=producer, base_sequence=0, is_transactional=True)
        coordinator.append(f"open-{number}", producer, [Append(long, batch)])

    def bounds_of(partition_id: int) -> Callable[[], None]:
        def work() -> None:
            for _ in range(50):
                bench.store.read(lambda connection: read_bounds(connection, [partition_id]))

        return work

    def page_of(partition_id: int, position: int) -> Callable[[], None]:
        def work() -> None:
            for _ in range(5):
                bench.store.read(lambda connection: fetch(connection, {partition_id: position}, records_max=5_000))

        return work

    seconds = bench.compare(bounds_of(long), bounds_of(short))
    yield bench.latency(("LSO of 400,000 records, 200 open", "of 20,000 records, none open"), 50, seconds, reach=1.3)
    seconds = bench.compare(page_of(long, 200_000), page_of(short, 10_000))
    yield bench.latency(("page of 400,000 records, 200 open", "of 20,000 records, none open"), 5, seconds, reach=1.3)


BENCHES = (bench_append, bench_transactional_append, bench_fetch, bench_small_transaction, bench_growth)


@contextmanager
def databases(names: list[str]) -> Iterator[list[tuple[str, str]]]:
    """Give the URL of an empty database for each name; servers and files are gone afterwards."""
    with ExitStack() as stack:
        urls = []
        for name in names:
            if name == "sqlite":
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="txnstore-bench-"))
                urls.append((name, f"sqlite:///{folder}/bench.db"))
            else:
                server = stack.enter_context(choose_server().start(fsync=True))
                server.create_database("txnstore_bench")
                stack.callback(server.drop_database, "txnstore_bench")
                urls.append((name, server.url("txnstore_bench")))
        yield urls


def show(results: list[Result]) -> None:
    """Print the results as a table."""
    table = Table(title=f"txnstore against the raw driver ({platform.machine()}, Python {platform.python_version()})")
    for heading in ("database", "what", "against", "ours", "other", "unit", "ratio", "reach"):
        table.add_column(heading, justify="right" if heading in ("ours", "other", "ratio") else "left")
    for result in results:
        figures = [f"{figure:,.0f}" if figure >= MANY else f"{figure:.2f}" for figure in (result.ours, result.other)]
        mark = "" if result.reached else " !"
        table.add_row(
            result.database,
            result.name,
            result.against,
            *figures,
            result.unit,
            f"{result.ratio:.2f}{mark}",
            result.reach,
        )
    Console(width=150).print(table)


def main() -> None:
    """Run the benchmarks that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], action="append", help="only this one")
    parser.add_argument("--only", help="only benchmarks with this in their name, such as fetch")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each measurement (7)")
    parser.add_argument("--batches", type=int, default=30, help="batches of 1,000 records a round (30)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    results: list[Result] = []
    with databases(options.database or ["sqlite", "postgresql"]) as urls:
        for database, url in urls:
            raw = Raw(url)
            with open_store(url) as store:
                bench = Bench(database, store, raw, options.rounds, options.batches)
                for measure in BENCHES:
                    if options.only is None or options.only in measure.__name__:
                        results.extend(measure(bench))
            raw.close()
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        show(results)


if __name__ == "__main__":
    main()

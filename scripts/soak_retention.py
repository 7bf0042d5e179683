"""The soak of the retention: what a store takes, and how fast it is, while many times what its topics keep is written.

Beside each other, each in a process of its own: a producer of batches at a given rate, one that commits transactions of
one record, a group that reads both topics, a reader that goes back to the first record again and again, and `txnstore
maintain`.  A third of the time is as usual; in the second somebody holds a snapshot open, as a backup or a forgotten
session does; in the last it is gone.  The journal of transactions is kept for a minute, so that all that grows is
trimmed as well.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any, Final

import psycopg

from scripts.bench_support import number, print_table, write_files
from scripts.comparison.figures import circumstances
from scripts.comparison.opening import NAMES, opened_sides
from scripts.comparison.sides import ANSWER_TIMEOUT_SECONDS, Side, checked, new_name, processes, running
from txnstore.db.names import DEFAULT_SCHEMA, SQLITE_PREFIX
from txnstore.db.url import parse_url
from txnstore.testing.postgres_server import connection_string

MIB: Final = 1024 * 1024
VALUE_BYTES: Final = 1_000
PHASES: Final = ("as usual", "a snapshot is held", "it is gone")
#: How often workers say what they have seen.
REPORT_SECONDS: Final = 1.0
#: Of each curve that is drawn.
POINTS: Final = 150
#: Tables and indexes that are smaller are not listed.
LISTED_MIB: Final = 0.5
#: How often batches are paced.
TURN_SECONDS: Final = 0.05

BULK: Final = "batches, records/s"
SMALL: Final = "one record a transaction, transactions/s"
DELAY: Final = "from produce() to the group, p50, ms"
FIRST: Final = "first record of all, ms"
SIZE: Final = "tables and indexes, MiB"
STORE_SETTINGS: Final = {
    "log.retention.check.interval.ms": "1000",
    "transaction.remove.expired.transaction.cleanup.interval.ms": "1000",
    "txnstore.transaction.log.retention.ms": "60000",
}
REUSED: Final = "of it free or dead, MiB"
LOG: Final = "write-ahead log of SQLite, MiB"
RELATION: Final = "at the end of a phase, MiB: "
SKIPPED: Final = "records gone before the group came, /s"


@dataclass(frozen=True)
class Sample:
    """One figure at one moment."""

    side: str
    what: str
    seconds: float
    """Since the start of the soak on this side."""

    value: float


class _Counter:
    """What a worker has seen, reported once a second."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples
        self._begun = time.monotonic()
        self._seen: dict[str, list[float]] = {}

    def add(self, what: str, value: float) -> None:
        self._seen.setdefault(what, []).append(value)
        self.report_when_due()

    def report_when_due(self) -> None:
        now = time.monotonic()
        taken = now - self._begun
        if taken < REPORT_SECONDS:
            return
        for what, values in self._seen.items():
            is_rate = what.endswith("/s")
            self._samples.put((now, what, sum(values) / taken if is_rate else statistics.median(values)))
        self._begun, self._seen = now, {}


def _produce(side: Side, topic: str, samples: Any, stop: Any, records_per_second: int) -> None:
    """Produce batches at this rate, or as fast as it goes below it."""
    counter, value, producer = _Counter(samples), b"x" * VALUE_BYTES, side.producer()
    in_turn = max(1, int(records_per_second * TURN_SECONDS))
    while not stop.is_set():
        turn_ends = time.monotonic() + TURN_SECONDS
        for _ in range(in_turn):
            producer.produce(topic, value)
        producer.flush(ANSWER_TIMEOUT_SECONDS)
        counter.add(BULK, in_turn)
        stop.wait(max(0.0, turn_ends - time.monotonic()))


def _transact(side: Side, topic: str, samples: Any, stop: Any) -> None:
    """Commit one transaction of one record after the other."""
    counter, producer = _Counter(samples), side.transactional_producer()
    while not stop.is_set():
        producer.begin_transaction()
        producer.produce(topic, b"x" * 100)
        producer.commit_transaction(ANSWER_TIMEOUT_SECONDS)
        counter.add(SMALL, 1)


def _read(side: Side, topics: Sequence[str], samples: Any, stop: Any) -> None:
    """Read everything in a group, and commit offsets once a second."""
    counter, next_offset = _Counter(samples), 0
    with closing(side.consumer(isolation_level="read_committed", auto_offset_reset="earliest")) as consumer:
        consumer.subscribe(list(topics))
        committed = time.monotonic()
        while not stop.is_set():
            messages = consumer.consume(500, REPORT_SECONDS)
            for message in messages:
                checked(message)
                if message.topic() == topics[0]:
                    counter.add(SKIPPED, message.offset() - next_offset)
                    next_offset = message.offset() + 1
            if messages:
                counter.add(DELAY, time.time() * 1000 - messages[-1].timestamp()[1])
            if time.monotonic() - committed > REPORT_SECONDS:
                consumer.commit(asynchronous=True)
                committed = time.monotonic()


def _read_first(side: Side, topic: str, samples: Any, stop: Any) -> None:
    """Go back to the first record that there is, again and again."""
    counter = _Counter(samples)
    beginning = importlib.import_module(side.module).OFFSET_BEGINNING
    with closing(side.consumer(isolation_level="read_committed", auto_offset_reset="earliest")) as consumer:
        while not stop.wait(REPORT_SECONDS / 4):
            begun = time.monotonic()
            consumer.assign([side.partition(topic, beginning)])
            checked(consumer.poll(ANSWER_TIMEOUT_SECONDS))
            counter.add(FIRST, (time.monotonic() - begun) * 1000)


class _PostgresView:
    """What is seen of a PostgreSQL database from outside, and a snapshot of it."""

    def __init__(self, url: str) -> None:
        self._url = connection_string(url)
        self._connection = psycopg.connect(self._url, autocommit=True)

    def sizes(self) -> Mapping[str, float]:
        taken = self._connection.execute(
            "SELECT sum(pg_total_relation_size(oid)) FROM pg_class"
            " WHERE relkind = 'r' AND relnamespace = %s::regnamespace",
            (DEFAULT_SCHEMA,),
        ).fetchone()
        # As many bytes for each dead row as the rows of its table take on the average.
        dead = self._connection.execute(
            "SELECT sum(pg_table_size(relid) * n_dead_tup / greatest(n_live_tup + n_dead_tup, 1))"
            " FROM pg_stat_user_tables WHERE schemaname = %s",
            (DEFAULT_SCHEMA,),
        ).fetchone()
        assert taken is not None
        assert dead is not None
        return {SIZE: float(taken[0]) / MIB, REUSED: float(dead[0] or 0) / MIB}

    def relations(self) -> Mapping[str, float]:
        """Return what each table takes, what it keeps beside its rows (TOAST), and each index."""
        found = self._connection.execute(
            "WITH ours AS (SELECT oid, relname, reltoastrelid FROM pg_class"
            " WHERE relkind = 'r' AND relnamespace = %s::regnamespace)"
            " SELECT relname, pg_relation_size(oid) FROM ours"
            " UNION ALL SELECT relname || ', TOAST', pg_total_relation_size(reltoastrelid) FROM ours"
            " WHERE reltoastrelid <> 0"
            " UNION ALL SELECT index.relname, pg_relation_size(index.oid) FROM ours"
            " JOIN pg_index ON indrelid = ours.oid JOIN pg_class index ON index.oid = indexrelid",
            (DEFAULT_SCHEMA,),
        )
        return {name: float(size) / MIB for name, size in found}

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        with psycopg.connect(self._url) as connection:
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            connection.execute("SELECT 1 FROM pg_class LIMIT 1")
            yield

    def close(self) -> None:
        self._connection.close()


class _SqliteView:
    """What is seen of an SQLite database from outside, and a snapshot of it."""

    def __init__(self, url: str) -> None:
        self._path = Path(str(parse_url(url).url.database))
        self._connection = sqlite3.connect(self._path, isolation_level=None)

    def sizes(self) -> Mapping[str, float]:
        (page_bytes,) = self._connection.execute("PRAGMA page_size").fetchone()
        (pages,) = self._connection.execute("PRAGMA page_count").fetchone()
        (free,) = self._connection.execute("PRAGMA freelist_count").fetchone()
        log_bytes = Path(f"{self._path}-wal").stat().st_size
        return {SIZE: pages * page_bytes / MIB, REUSED: free * page_bytes / MIB, LOG: log_bytes / MIB}

    def relations(self) -> Mapping[str, float]:
        """Return what each table and each index takes; nothing where SQLite was built without dbstat."""
        try:
            found = self._connection.execute("SELECT name, pgsize FROM dbstat WHERE aggregate = TRUE").fetchall()
        except sqlite3.OperationalError:
            return {}
        return {name.removeprefix(SQLITE_PREFIX): size / MIB for name, size in found}

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        with closing(sqlite3.connect(self._path, isolation_level=None)) as connection:
            connection.execute("BEGIN")
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            yield

    def close(self) -> None:
        self._connection.close()


@contextmanager
def _maintained(url: str) -> Iterator[None]:
    maintenance = subprocess.Popen(
        [sys.executable, "-m", "txnstore", "maintain", url], stderr=subprocess.DEVNULL, env=os.environ
    )
    try:
        yield
        assert maintenance.poll() is None, "the maintenance has ended by itself"
    finally:
        maintenance.send_signal(signal.SIGINT)
        maintenance.wait(ANSWER_TIMEOUT_SECONDS)


def _topics(side: Side, retained_bytes: int) -> tuple[str, str]:
    """Make a topic of batches that keeps so much, and one of transactions that keeps a fortieth; return their names."""
    admin = importlib.import_module(f"{side.module}.admin")
    client = admin.AdminClient({"bootstrap.servers": side.url})
    bulk, small = new_name(), new_name()
    made = client.create_topics(
        [
            admin.NewTopic(bulk, 1, 1, config={"retention.bytes": str(retained_bytes)}),
            admin.NewTopic(small, 1, 1, config={"retention.bytes": str(retained_bytes // 40)}),
        ]
    )
    for each in made.values():
        each.result(ANSWER_TIMEOUT_SECONDS)
    store = admin.ConfigResource(
        "broker",
        "0",
        incremental_configs=[
            admin.ConfigEntry(name, value, incremental_operation=admin.AlterConfigOpType.SET)
            for name, value in STORE_SETTINGS.items()
        ],
    )
    for each in client.incremental_alter_configs([store]).values():
        each.result(ANSWER_TIMEOUT_SECONDS)
    return bulk, small


def soak(side: Side, options: argparse.Namespace) -> list[Sample]:
    """Let everything run for so many seconds on one side; return what was seen."""
    bulk, small = _topics(side, options.retained_mib * MIB)
    reports, stop = processes.Queue(), processes.Event()
    works: list[tuple[Callable[..., None], Any]] = [
        (_produce, (bulk, reports, stop, options.rate)),
        (_transact, (small, reports, stop)),
        (_read, ((bulk, small), reports, stop)),
        (_read_first, (small, reports, stop)),
    ]
    workers = [processes.Process(target=work, args=(side, *given), daemon=True) for work, given in works]
    view = _SqliteView(side.url) if parse_url(side.url).kind == "sqlite" else _PostgresView(side.url)
    found: list[Sample] = []
    with closing(view), _maintained(side.url), running(workers):
        begun = time.monotonic()
        try:
            for number_of_phase in range(len(PHASES)):
                ends = begun + options.seconds * (number_of_phase + 1) / len(PHASES)
                watch = partial(_watch, side, view, reports, begun, ends)
                with view.snapshot() if number_of_phase == 1 else nullcontext():
                    found.extend(watch())
                for name, size in view.relations().items():
                    found.append(Sample(side.name, RELATION + name, time.monotonic() - begun, size))
                assert all(worker.is_alive() for worker in workers), "a worker has ended by itself"
        finally:
            stop.set()
            # What nobody takes would keep the workers.
            _drain(side, reports, begun, time.monotonic() + 2 * REPORT_SECONDS)
    return found


def _watch(side: Side, view: _PostgresView | _SqliteView, reports: Any, begun: float, ends: float) -> Iterator[Sample]:
    """Yield what is seen until the time is up."""
    while (now := time.monotonic()) < ends:
        for what, value in view.sizes().items():
            yield Sample(side.name, what, now - begun, value)
        yield from _drain(side, reports, begun, min(ends, now + REPORT_SECONDS))


def _drain(side: Side, reports: Any, begun: float, ends: float) -> list[Sample]:
    found = []
    while (left := ends - time.monotonic()) > 0:
        try:
            moment, what, value = reports.get(timeout=left)
        except Empty:
            break
        found.append(Sample(side.name, what, moment - begun, value))
    return found


def _by_phase(samples: Sequence[Sample], side: str, what: str, seconds: float) -> list[list[float]]:
    """Return the values of each phase, without its first fifth: what the phase before has left is over then."""
    length = seconds / len(PHASES)
    begins = [length * (place + 0.2) for place in range(len(PHASES))]
    own = [(each.seconds, each.value) for each in samples if (each.side, each.what) == (side, what)]
    return [[value for moment, value in own if begin <= moment < begin + length * 0.8] for begin in begins]


def show(samples: Sequence[Sample], options: argparse.Namespace) -> None:
    """Print the medians of each phase, and the largest figures."""
    rows = []
    for side in dict.fromkeys(each.side for each in samples):
        for what in (BULK, SMALL, DELAY, FIRST, SKIPPED, SIZE, REUSED, LOG):
            phases = _by_phase(samples, side, what, options.seconds)
            if any(phases):
                cells = [f"{number(statistics.median(of))} ({number(max(of))})" if of else "" for of in phases]
                rows.append((side, what, *cells))
    print_table(
        f"{options.seconds:,.0f} s each, topics that keep {options.retained_mib} MiB and a fortieth of it:"
        " medians (and the largest)",
        ("side", "what", *PHASES),
        rows,
        numbers=PHASES,
    )
    for side in dict.fromkeys(each.side for each in samples):
        _show_relations(samples, side)
        rates = [each.value for each in samples if (each.side, each.what) == (side, BULK)]
        written = statistics.fmean(rates) * options.seconds * VALUE_BYTES / MIB if rates else 0.0
        print(
            f"{side}: about {written:,.0f} MiB of batches written, {written / options.retained_mib:.1f} x what is kept"
        )


def _show_relations(samples: Sequence[Sample], side: str) -> None:
    """Print what the larger tables and indexes took at the end of each phase."""
    sizes: dict[str, list[float]] = {}
    for each in samples:
        if each.side == side and each.what.startswith(RELATION):
            sizes.setdefault(each.what.removeprefix(RELATION), []).append(each.value)
    rows = [(name, *map(number, of)) for name, of in sizes.items() if max(of) >= LISTED_MIB]
    rows.sort(key=lambda row: -max(sizes[row[0]]))
    print_table(f"{side}: at the end of each phase, MiB", ("what", *PHASES), rows, numbers=PHASES)


def draw(samples: Sequence[Sample], options: argparse.Namespace, folder: Path) -> None:
    """Draw size, rates and reads over the time."""
    # It takes longer to import than the rest together.
    from scripts.comparison.plots import Curve, draw_curves

    sides = dict.fromkeys(each.side for each in samples)
    panels = {
        what: [Curve(side, points) for side in sides if (points := _points(samples, side, what, options.seconds))]
        for what in (SIZE, LOG, SMALL, FIRST)
    }
    length = options.seconds / len(PHASES)
    draw_curves("seconds", panels, folder / "retention.svg", by_tens=False, marks=(length, 2 * length))


def _points(samples: Sequence[Sample], side: str, what: str, seconds: float) -> list[tuple[float, float]]:
    """Return the medians of short stretches of the time, with the middle of each."""
    stretch_seconds = seconds / POINTS
    values: dict[int, list[float]] = {}
    for each in samples:
        if (each.side, each.what) == (side, what):
            values.setdefault(int(each.seconds / stretch_seconds), []).append(each.value)
    return [((number + 0.5) * stretch_seconds, statistics.median(of)) for number, of in sorted(values.items())]


def arguments() -> argparse.ArgumentParser:
    """Return what the command line may say."""
    parser = argparse.ArgumentParser(prog="scripts/soak-retention", description=__doc__)
    parser.add_argument("seconds", type=float, help="how long on each database")
    parser.add_argument("--database", choices=list(NAMES), action="append", help="only this one")
    parser.add_argument(
        "--at-once", action="store_true", help="all databases at the same time, not one after the other"
    )
    parser.add_argument("--retained-mib", type=int, default=64, help="what the topic of batches keeps (64 MiB)")
    parser.add_argument("--rate", type=int, default=2_000, help="records of 1,000 bytes in batches, a second (2,000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was seen to this file")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="also draw it, as an SVG file")
    return parser


def main() -> None:
    """Run the soak that the command line asks for."""
    parser = arguments()
    options = parser.parse_args()
    about = circumstances(parser.prog)
    samples: list[Sample] = []
    with (
        opened_sides(options.database, with_kafka=False) as sides,
        ThreadPoolExecutor(len(sides) if options.at_once else 1) as soaks,
    ):
        for found in soaks.map(partial(soak, options=options), sides):
            samples.extend(found)
    show(samples, options)
    write_files(options, {**about, "samples": samples}, draw=partial(draw, samples, options))


if __name__ == "__main__":
    main()

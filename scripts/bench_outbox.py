"""The benchmarks of the outbox: what it costs the caller, and how fast rows become records."""

# ruff: noqa: S608 - what stands in these statements are constants of these files

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator

from scripts.bench_support import BATCH_RECORDS, VALUE, Bench, Result
from txnstore.log.outbox.sequencer import drain_outbox
from txnstore.outbox import Outbox

Work = Callable[[], object]

#: Database transactions of callers in a round.
CALLS = 300


def bench_caller(bench: Bench) -> Iterator[Result]:
    """A caller's database transaction that inserts a row and a record, against the row alone."""
    bench.raw.run("CREATE TABLE plain_orders (id INTEGER PRIMARY KEY, value BLOB)")
    numbers = itertools.count()

    def transactions(*, with_record: bool) -> None:
        for _ in range(CALLS):
            bench.raw.run("BEGIN")
            bench.raw.run("INSERT INTO plain_orders VALUES (?, ?)", (next(numbers), VALUE))
            if with_record:
                outbox.produce(bench.raw.connection, "bench-outbox", VALUE, key=b"key")
            bench.raw.run("COMMIT")

    with Outbox(bench.url, sequencer=False) as outbox:
        seconds = bench.compare(lambda: transactions(with_record=True), lambda: transactions(with_record=False))
        yield bench.latency(
            ("transaction with a row and a record", "the same with the row alone"), CALLS, seconds, reach=2.0
        )
        drain_outbox(bench.store)


def bench_sequencer(bench: Bench) -> Iterator[Result]:
    """Rows that wait become records, against a loop that moves the same rows into a plain table."""
    total = bench.batches * BATCH_RECORDS // 2
    bench.raw.run("CREATE TABLE plain_outbox (id INTEGER PRIMARY KEY, topic TEXT, key BLOB, value BLOB)")
    bench.raw.run("CREATE TABLE plain_log (id INTEGER PRIMARY KEY, timestamp_ms BIGINT, key BLOB, value BLOB)")
    numbers = itertools.count()
    table = "txnstore_outbox" if bench.raw.is_sqlite else "txnstore.outbox"

    def fill(into: str, columns: str) -> None:
        source = (
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {}) SELECT {} FROM n"
            if bench.raw.is_sqlite
            else "SELECT {1} FROM generate_series(1, {0}) AS n(i)"
        )
        bench.raw.run(f"INSERT INTO {into} " + source.format(total, columns))

    def sequence() -> None:
        moved_count = drain_outbox(bench.store)
        assert moved_count == total

    def move() -> None:
        while True:
            bench.raw.run("BEGIN")
            rows = bench.raw.run(
                "DELETE FROM plain_outbox WHERE id IN (SELECT id FROM plain_outbox ORDER BY id LIMIT 1000)"
                " RETURNING id, key, value"
            ).fetchall()
            if rows:
                bench.raw.connection.cursor().executemany(
                    f"INSERT INTO plain_log VALUES ({', '.join(['?' if bench.raw.is_sqlite else '%s'] * 4)})",
                    [(next(numbers), 0, key, value) for _, key, value in sorted(rows)],
                )
            bench.raw.run("COMMIT")
            if not rows:
                break

    value = f"CAST('{VALUE.decode()}' AS BLOB)" if bench.raw.is_sqlite else f"'{VALUE.decode()}'::bytea"
    key = "CAST(i % 100 AS BLOB)" if bench.raw.is_sqlite else "convert_to((i % 100)::text, 'UTF8')"

    def fill_ours() -> None:
        fill(f"{table} (topic, key, value)", f"'bench-sequencer', {key}, {value}")

    def fill_plain() -> None:
        fill("plain_outbox", f"i, 't', {key}, {value}")

    seconds = _compare_prepared(bench.rounds, (fill_ours, sequence), (fill_plain, move))
    yield bench.rate(("outbox rows into partitions", "a loop that moves rows"), total, seconds, reach=0.3)


def _compare_prepared(rounds: int, ours: tuple[Work, Work], other: tuple[Work, Work]) -> tuple[float, float]:
    """Return the median seconds of both without their preparations, measured in turns after one round to warm up."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        pair = [(0, *ours), (1, *other)]
        for index, prepare, work in pair if number % 2 else pair[::-1]:
            prepare()
            begin = time.perf_counter()
            work()
            if number:
                seconds[index].append(time.perf_counter() - begin)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


BENCHES = (bench_caller, bench_sequencer)

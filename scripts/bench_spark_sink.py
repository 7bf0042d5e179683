"""Measure the Spark sink: a stream's rows a second, and what a micro-batch costs that has none.

    .venv/bin/python -m scripts.bench_spark_sink --fetch

Rows come from Spark's own generator, so that nothing but the sink is measured.  The other side is what people write
today: `foreachBatch` with Spark's JDBC writer (its driver comes from Maven Central with --fetch), and with the
database's fastest loop of its own (COPY, executemany).  None of those is exactly once.  Queries take turns.
"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from operator import methodcaller
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession

from scripts.bench import databases, show
from scripts.bench_spark import in_turns, jdbc_options, session
from scripts.bench_support import Bench, Raw, Result
from txnstore.db.opening import open_store
from txnstore.db.postgresql.backend import connect_driver
from txnstore.db.url import parse_url
from txnstore.log.topics import create_topic

TASKS: Final = 2
#: Micro-batches of a query: the first has its start in it.
WARM_UP: Final = 1
BATCHES: Final = 3
_TIMEOUT_SECONDS: Final = 600

Start = Callable[[Any], Any]


def bench_rows(bench: Bench, spark: SparkSession, options: argparse.Namespace) -> Iterator[Result]:
    """Write rows of a key and 100 bytes, so many a micro-batch in two tasks."""
    bench.store.write(lambda connection: create_topic(connection, "spark", partition_count=4))
    bench.raw.run("CREATE TABLE spark_rows (key BLOB, value BLOB)")
    frame = _rows(spark, options.rows)
    ours = "Spark sink, rows"
    sinks = {ours: _sink(bench)} | {
        name: methodcaller("foreachBatch", write) for name, write in _others(bench, options)
    }
    found = _in_turns(bench, frame, sinks)
    for name in sinks.keys() - {ours}:
        yield bench.rate((ours, name), options.rows, (found[ours], found[name]), reach=1.0)


def bench_empty(bench: Bench, spark: SparkSession) -> Iterator[Result]:
    """Run micro-batches without a row, against Spark's sink that does nothing."""
    frame = _rows(spark, TASKS).where("value IS NULL")
    ours, other = "Spark sink, empty micro-batch", "Spark's noop sink"
    found = _in_turns(bench, frame, {ours: _sink(bench), other: lambda writer: writer.format("noop")})
    yield bench.latency((ours, other), 1, (found[ours], found[other]), reach=1.5)


def _rows(spark: SparkSession, count: int) -> DataFrame:
    generator = spark.readStream.format("rate-micro-batch").options(rowsPerBatch=count, numPartitions=TASKS)
    return generator.load().selectExpr(
        "CAST(value % 1000 AS STRING) AS key", "rpad(CAST(value AS STRING), 100, 'x') AS value"
    )


def _sink(bench: Bench) -> Start:
    return lambda writer: writer.format("txnstore").options(url=bench.url, topic="spark")


def _in_turns(bench: Bench, frame: DataFrame, sinks: dict[str, Start]) -> dict[str, float]:
    """Return the median seconds of a micro-batch into each."""
    seconds: dict[str, list[float]] = {name: [] for name in sinks}

    def measure(name: str) -> None:
        seconds[name] += _seconds(frame, sinks[name])
        bench.raw.run("DELETE FROM spark_rows" if bench.raw.is_sqlite else "TRUNCATE spark_rows")

    in_turns({name: partial(measure, name) for name in sinks}, bench.rounds)
    # Those of the rounds that warm up as well.
    return {name: statistics.median(found[-bench.rounds * BATCHES :]) for name, found in seconds.items()}


def _seconds(frame: DataFrame, with_sink: Start) -> list[float]:
    """Return the seconds of a query's micro-batches."""
    with tempfile.TemporaryDirectory(prefix="txnstore-bench-", ignore_cleanup_errors=True) as checkpoint:
        query = with_sink(frame.writeStream).option("checkpointLocation", checkpoint).start()
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        try:
            while len(query.recentProgress) < WARM_UP + BATCHES:
                if not query.isActive or time.monotonic() > deadline:
                    raise RuntimeError(f"the query has not got through: {query.exception()}")
                time.sleep(0.1)
            progress = query.recentProgress[WARM_UP : WARM_UP + BATCHES]
        finally:
            query.stop()
    return [batch["durationMs"]["triggerExecution"] / 1000 for batch in progress]


def _others(bench: Bench, options: argparse.Namespace) -> Iterator[tuple[str, Callable[[DataFrame, int], None]]]:
    if options.fetch and not bench.raw.is_sqlite:
        jdbc = jdbc_options(bench.url)

        def by_jdbc(frame: DataFrame, batch_id: int) -> None:
            binary = frame.selectExpr("CAST(key AS BINARY) AS key", "CAST(value AS BINARY) AS value")
            binary.write.format("jdbc").options(**jdbc, dbtable="spark_rows").mode("append").save()

        yield "foreachBatch that writes rows by JDBC", by_jdbc
    text, is_sqlite = bench.url, bench.raw.is_sqlite

    def by_loop(frame: DataFrame, batch_id: int) -> None:
        frame.foreachPartition(lambda rows: _write(text, is_sqlite, rows))

    yield f"foreachBatch that writes rows by {'executemany' if is_sqlite else 'COPY'}", by_loop


def _write(url: str, is_sqlite: bool, rows: Iterator[Any]) -> None:
    address = parse_url(url)
    cells = [(row.key.encode(), row.value.encode()) for row in rows]
    if is_sqlite:
        connection = sqlite3.connect(str(address.url.database), isolation_level=None, timeout=60)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO spark_rows VALUES (?, ?)", cells)
        connection.execute("COMMIT")
        connection.close()
        return
    with (
        connect_driver(address) as server,
        server.transaction(),
        server.cursor() as cursor,
        cursor.copy("COPY spark_rows FROM STDIN (FORMAT BINARY)") as copy,
    ):
        copy.set_types(["bytea", "bytea"])
        for cell in cells:
            copy.write_row(cell)


def main() -> None:
    """Measure on the databases that the command line asks for, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], action="append", help="only this one")
    parser.add_argument("--rows", type=int, default=100_000, help="rows of a micro-batch (100,000)")
    parser.add_argument("--rounds", type=int, default=3, help="queries of each measurement, of three micro-batches (3)")
    parser.add_argument("--fetch", action="store_true", help="also what takes a jar of Maven Central: JDBC")
    options = parser.parse_args()
    results: list[Result] = []
    spark = session(fetch=options.fetch)
    with databases(options.database or ["sqlite", "postgresql"]) as urls:
        for database, url in urls:
            with open_store(url) as store, closing(Raw(url)) as raw:
                bench = Bench(database, url, store, raw, options.rounds, batches=0)
                results += [*bench_rows(bench, spark, options), *bench_empty(bench, spark)]
    spark.stop()
    show(results)


if __name__ == "__main__":
    main()

"""The benchmarks of the Spark sink: a stream's rows a second, and what a micro-batch costs that has none.

Rows come from Spark's own generator, so that nothing but the sink is measured.  The other side is what people write
today: `foreachBatch` with Spark's JDBC writer where there is a driver for the database (TXNSTORE_BENCH_JDBC_JAR, or
Debian's libpostgresql-jdbc-java), and with the database's fastest loop of its own (COPY, executemany).  None of those
is exactly once.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from operator import methodcaller
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession

from scripts.bench import databases, show
from scripts.bench_support import Bench, Raw, Result
from txnstore.db.opening import open_store
from txnstore.db.postgresql.backend import connect_driver
from txnstore.db.url import parse_url
from txnstore.log.topics import create_topic
from txnstore.spark.data_source import TxnStoreDataSource
from txnstore.spark.local_spark import local_session

ROWS: Final = 100_000
TASKS: Final = 2
#: The first ones warm Spark up.
WARM_UP: Final = 3
_JAR: Final = "/usr/share/java/postgresql.jar"
_TIMEOUT_SECONDS: Final = 600

Start = Callable[[Any], Any]


def bench_spark_sink(bench: Bench) -> Iterator[Result]:
    """Write rows of a key and 100 bytes, 100,000 a micro-batch in two tasks."""
    spark = _session()
    bench.store.write(lambda connection: create_topic(connection, "spark", partition_count=4))
    bench.raw.run("CREATE TABLE spark_rows (key BLOB, value BLOB)")
    ours = _seconds(bench, _rows(spark, ROWS), _sink(bench))
    for name, write in _others(bench):
        other = _seconds(bench, _rows(spark, ROWS), methodcaller("foreachBatch", write))
        bench.raw.run("DELETE FROM spark_rows")
        yield bench.rate(("Spark sink, rows", name), ROWS, (ours, other), reach=1.0)


def bench_spark_empty(bench: Bench) -> Iterator[Result]:
    """Run micro-batches without a row, against Spark's sink that does nothing."""
    spark = _session()
    bench.store.write(lambda connection: create_topic(connection, "spark-empty", partition_count=4))
    frame = _rows(spark, TASKS).where("value IS NULL")
    seconds = (_seconds(bench, frame, _sink(bench)), _seconds(bench, frame, lambda writer: writer.format("noop")))
    yield bench.latency(("Spark sink, empty micro-batch", "Spark's noop sink"), 1, seconds, reach=1.5)


def _session() -> SparkSession:
    found = SparkSession.getActiveSession()
    jar = os.environ.get("TXNSTORE_BENCH_JDBC_JAR", _JAR)
    settings = {"spark.driver.memory": "1g"} | ({"spark.jars": jar} if Path(jar).exists() else {})
    spark = found or local_session("bench", settings=settings)
    spark.dataSource.register(TxnStoreDataSource)
    return spark


def _rows(spark: SparkSession, count: int) -> DataFrame:
    generator = spark.readStream.format("rate-micro-batch").options(rowsPerBatch=count, numPartitions=TASKS)
    return generator.load().selectExpr(
        "CAST(value % 1000 AS STRING) AS key", "rpad(CAST(value AS STRING), 100, 'x') AS value"
    )


def _sink(bench: Bench) -> Start:
    return lambda writer: writer.format("txnstore").options(url=bench.url, topic="spark")


def _seconds(bench: Bench, frame: DataFrame, with_sink: Start) -> float:
    """Return the median seconds of a micro-batch."""
    with tempfile.TemporaryDirectory(prefix="txnstore-bench-", ignore_cleanup_errors=True) as checkpoint:
        query = with_sink(frame.writeStream).option("checkpointLocation", checkpoint).start()
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        try:
            while len(query.recentProgress) < WARM_UP + bench.rounds:
                if not query.isActive or time.monotonic() > deadline:
                    raise RuntimeError(f"the query has not got through: {query.exception()}")
                time.sleep(0.1)
            progress = query.recentProgress[WARM_UP : WARM_UP + bench.rounds]
        finally:
            query.stop()
    durations_ms: list[int] = [batch["durationMs"]["triggerExecution"] for batch in progress]
    return statistics.median(durations_ms) / 1000


def _others(bench: Bench) -> Iterator[tuple[str, Callable[[DataFrame, int], None]]]:
    url = parse_url(bench.url).url
    jar = os.environ.get("TXNSTORE_BENCH_JDBC_JAR", _JAR)
    if not bench.raw.is_sqlite and Path(jar).exists():
        jdbc = f"jdbc:postgresql://{url.host}:{url.port}/{url.database}?reWriteBatchedInserts=true"
        properties = {"driver": "org.postgresql.Driver", "user": url.username or "", "password": url.password or ""}

        def by_jdbc(frame: DataFrame, batch_id: int) -> None:
            binary = frame.selectExpr("CAST(key AS BINARY) AS key", "CAST(value AS BINARY) AS value")
            binary.write.mode("append").jdbc(jdbc, "spark_rows", properties=properties)

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], action="append", help="only this one")
    parser.add_argument("--rounds", type=int, default=7, help="micro-batches of each measurement (7)")
    options = parser.parse_args()
    results: list[Result] = []
    with databases(options.database or ["sqlite", "postgresql"]) as urls:
        for database, url in urls:
            with open_store(url) as store, closing(Raw(url)) as raw:
                bench = Bench(database, url, store, raw, options.rounds, batches=0)
                results += [*bench_spark_sink(bench), *bench_spark_empty(bench)]
    show(results)


if __name__ == "__main__":
    main()

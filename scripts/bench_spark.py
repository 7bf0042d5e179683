"""Measure the Spark source against Spark's own JDBC reader and the plain consumer, on the same records.

    .venv/bin/python -m scripts.bench_spark --records 1000000 --jdbc-jar sqlite-jdbc.jar
    .venv/bin/python -m scripts.bench_spark --url postgresql://... --jdbc-jar postgresql.jar

The JDBC reader needs the driver's jar (Maven: org.xerial:sqlite-jdbc, org.postgresql:postgresql); without one it is
left out.  Every reader gives its rows to Spark's `noop` sink, in as many tasks as there are partitions.  The database
at --url gets tables of the benchmark's own and should be thrown away afterwards.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy.engine import URL, make_url

from scripts.bench_support import BATCH_RECORDS, VALUE, Raw
from txnstore import Consumer, TopicPartition
from txnstore.db.opening import open_store
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.topics import create_topic
from txnstore.model import Record
from txnstore.spark.local_spark import local_session

TOPIC = "bench"
PARTITIONS = 4
ROUNDS = 3
#: What the plain table has too.
SAME_COLUMNS = "partition int, offset long, timestamp timestamp, key binary, value binary"
FIRST_MS = 1_700_000_000_000


def main() -> None:
    """Fill the database, then read it in each way and print rows a second."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        url = arguments.url or f"sqlite:///{folder}/bench.db"
        count = fill(url, arguments.records)
        settings = {"spark.jars": str(Path(arguments.jdbc_jar).resolve())} if arguments.jdbc_jar else {}
        spark = local_session("bench", folder=Path(folder), settings=settings)
        readers: dict[str, Callable[[], object]] = {
            "Spark source": lambda: _noop(source(spark, url).schema(SAME_COLUMNS)),
            "with all columns": lambda: _noop(source(spark, url)),
        }
        if arguments.jdbc_jar:
            readers["Spark's JDBC reader"] = lambda: _noop(jdbc(spark, url))
        readers["plain consumer"] = lambda: consume(url)
        rates: dict[str, float] = dict.fromkeys(readers, 0.0)
        # The readers take turns, so that a busy moment of the machine hits all of them; the best round counts.
        for _ in range(ROUNDS):
            for name, read in readers.items():
                began = time.perf_counter()
                read()
                rates[name] = max(rates[name], count / (time.perf_counter() - began))
        for name, rate in rates.items():
            print(f"{name:20} {rate:12,.0f} rows/s   {rates['Spark source'] / rate:6.2f}")
        spark.stop()


def source(spark: Any, url: str) -> Any:
    """Return a read of the topic."""
    return spark.read.format("txnstore").option("url", url).option("subscribe", TOPIC)


def fill(url: str, records: int) -> int:
    """Write the records into a topic, and the same as rows into a plain table; return how many."""
    batches = -(-records // (BATCH_RECORDS * PARTITIONS))
    content = [
        Record(VALUE, key=b"%08d" % index, timestamp_ms=FIRST_MS + index // 10) for index in range(BATCH_RECORDS)
    ]
    with open_store(url) as store:
        topic = store.write(lambda connection: create_topic(connection, TOPIC, partition_count=PARTITIONS))
        batch = encode(content)
        appends = [Append(partition_id, batch) for partition_id in topic.partition_ids]
        for _ in range(batches):
            store.write(lambda connection: append(connection, appends))
    raw = Raw(url)
    blob = "BLOB" if raw.is_sqlite else "BYTEA"
    raw.run(
        f"CREATE TABLE plain (part INTEGER NOT NULL, off BIGINT NOT NULL, stamp BIGINT, key {blob}, value {blob},"
        " PRIMARY KEY (part, off))"
    )
    for number in range(batches):
        raw.run("BEGIN")
        for part in range(PARTITIONS):
            rows = [
                (part, number * BATCH_RECORDS + index, record.timestamp_ms, record.key, record.value)
                for index, record in enumerate(content)
            ]
            marks = ", ".join("?" * 5 if raw.is_sqlite else ["%s"] * 5)
            raw.connection.cursor().executemany(f"INSERT INTO plain VALUES ({marks})", rows)  # noqa: S608 - constants
        raw.run("COMMIT")
    raw.close()
    return batches * BATCH_RECORDS * PARTITIONS


def jdbc(spark: Any, url: str) -> Any:
    """Return a read of the plain table, one task for each partition."""
    address = make_url(url)
    reader = spark.read.format("jdbc").option("dbtable", "plain").option("fetchsize", "10000")
    for name, value in _jdbc_options(address).items():
        reader = reader.option(name, value)
    return (
        reader.option("partitionColumn", "part")
        .option("lowerBound", "0")
        .option("upperBound", str(PARTITIONS))
        .option("numPartitions", str(PARTITIONS))
    )


def _jdbc_options(address: URL) -> dict[str, str]:
    if address.drivername.startswith("sqlite"):
        return {"url": f"jdbc:sqlite:{address.database}", "driver": "org.sqlite.JDBC"}
    options = {
        "url": f"jdbc:postgresql://{address.host}:{address.port or 5432}/{address.database}",
        "driver": "org.postgresql.Driver",
    }
    return (
        options
        | ({"user": address.username} if address.username else {})
        | ({"password": str(address.password)} if address.password else {})
    )


def consume(url: str) -> None:
    """Read everything with the plain consumer."""
    with Consumer(
        {"bootstrap.servers": url, "group.id": "bench", "enable.partition.eof": True, "fetch.wait.max.ms": 0}
    ) as consumer:
        consumer.assign([TopicPartition(TOPIC, part, 0) for part in range(PARTITIONS)])
        ends = 0
        while ends < PARTITIONS:
            ends += sum(message.error() is not None for message in consumer.consume(10_000, 1.0))


def _noop(reader: Any) -> None:
    reader.load().write.format("noop").mode("overwrite").save()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000, help="how many records (default: 1,000,000)")
    parser.add_argument("--url", help="the database (default: an SQLite file that is removed afterwards)")
    parser.add_argument("--jdbc-jar", help="the jar of the database's JDBC driver")
    return parser.parse_args()


if __name__ == "__main__":
    main()

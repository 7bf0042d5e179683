"""Measure the Spark source against Spark's own readers of the same records: of rows by JDBC, and of a real Kafka.

    .venv/bin/python -m scripts.bench_spark --fetch

Every reader gives its rows to Spark's `noop` sink, in as many tasks as there are partitions, taking turns with the
others.  Spark has two cores and 1 GiB.  What Spark does not bring along itself, a JDBC driver and the connector for
Kafka, comes from Maven Central with --fetch; without, only the floors are there to compare with: what another Python
source costs that makes the rows of a plain table, or that has nothing to do at all.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Final

from confluent_kafka import Producer as KafkaProducer
from confluent_kafka.admin import AdminClient as KafkaAdminClient
from confluent_kafka.cimpl import NewTopic as NewKafkaTopic
from pyspark.sql import SparkSession
from sqlalchemy.engine import make_url

from scripts.bench import databases, show
from scripts.bench_spark_floors import COLUMNS, PlainRows, ReadyBatches
from scripts.bench_support import BATCH_RECORDS, VALUE, Raw, Result
from tests.tools.kafka_broker import KafkaBroker
from tests.tools.kafka_jars import cache_folder, fetch_jars, listed_jars
from txnstore import Consumer, TopicPartition
from txnstore.db.opening import open_store
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.topics import create_topic
from txnstore.model import Record
from txnstore.spark.data_source import TxnStoreDataSource
from txnstore.spark.local_spark import local_session

TOPIC: Final = "bench"
PARTITIONS: Final = 4
WARM_UP_ROUNDS: Final = 2
FIRST_MS: Final = 1_700_000_000_000
TIMEOUT_SECONDS: Final = 120.0
ROW_COLUMNS: Final = COLUMNS.replace(" int", "").replace(" long", "").replace(" binary", "").split(", ")
_JAR_LIST: Final = Path(__file__).with_name("spark_jars.txt")

Read = Callable[[], object]


def bench_source(database: str, url: str, spark: SparkSession, options: argparse.Namespace) -> Iterator[Result]:
    """Read the same records in each way, with the columns that a table of rows has, and with all of them."""
    count = fill(url, options.records)
    with ExitStack() as stack:
        ours = spark.read.format("txnstore").option("url", url).option("subscribe", TOPIC)
        source, whole = "Spark source", "Spark source, all columns"
        reads: dict[str, Read] = {
            source: lambda: _noop(ours.schema(COLUMNS).load()),
            whole: lambda: _noop(spark.read.format("txnstore").options(url=url, subscribe=TOPIC).load()),
        }
        others: list[tuple[str, str, float]] = []
        if options.fetch and database == "postgresql":
            reads["Spark's JDBC reader"] = lambda: _noop(jdbc_rows(spark, url))
            others.append((source, "Spark's JDBC reader", 1.5))
        if options.fetch:
            broker = stack.enter_context(closing(KafkaBroker.as_users_run_it()))
            fill_kafka(broker.bootstrap, count)
            kafka = (
                spark.read.format("kafka").options(subscribe=TOPIC).option("kafka.bootstrap.servers", broker.bootstrap)
            )
            reads["Spark's Kafka source"] = lambda: _noop(
                kafka.load().select("partition", "offset", "timestamp", "key", "value")
            )
            reads["Spark's Kafka source, all columns"] = lambda: _noop(kafka.load())
            others += [(source, "Spark's Kafka source", 1.0), (whole, "Spark's Kafka source, all columns", 1.0)]
        floors = {"floor: the driver's rows": PlainRows, "floor: ready batches": ReadyBatches}
        for name, floor in floors.items():
            spark.dataSource.register(floor)
            frame = spark.read.format(floor.name()).options(url=url, rows=count // PARTITIONS, partitions=PARTITIONS)
            reads[name] = partial(lambda frame: _noop(frame.load()), frame)
            others.append((source, name, 1.0))
        reads["plain consumer"] = partial(consume, url)
        others.append((source, "plain consumer", 1.0))
        seconds = in_turns(reads, options.rounds)
        for what, against, reach in others:
            rates = count / seconds[what], count / seconds[against]
            ratio = rates[0] / rates[1]
            yield Result(database, what, against, "rows/s", *rates, ratio, f">= {reach}", ratio >= reach)


def in_turns(works: dict[str, Read], rounds: int) -> dict[str, float]:
    """Return the median seconds of each; every second round they come in the other order."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(-WARM_UP_ROUNDS, rounds):
        for name, work in list(works.items())[:: 1 if number % 2 else -1]:
            begun = time.perf_counter()
            work()
            if number >= 0:
                seconds[name].append(time.perf_counter() - begun)
    return {name: statistics.median(found) for name, found in seconds.items()}


def session(*, fetch: bool) -> SparkSession:
    """Start Spark; with `fetch` it has what Maven Central has for it."""
    jars = fetch_jars(cache_folder().with_name("spark"), jars=listed_jars(_JAR_LIST)) if fetch else []
    settings = {
        "spark.driver.memory": "1g",
        # What the README of txnstore/spark advises.
        "spark.python.unix.domain.socket.enabled": "true",
        # With all compilers: this one lives long enough.
        "spark.driver.extraJavaOptions": "-XX:+UseG1GC",
    } | ({"spark.jars": ",".join(map(str, jars))} if jars else {})
    spark = local_session("bench", settings=settings)
    spark.dataSource.register(TxnStoreDataSource)
    return spark


def records() -> list[Record]:
    """Return the records of a batch; every partition has it again and again."""
    return [Record(VALUE, key=b"%08d" % index, timestamp_ms=FIRST_MS + index // 10) for index in range(BATCH_RECORDS)]


def fill(url: str, count: int) -> int:
    """Write records into a topic, and the same as rows into a plain table; return how many."""
    batches, content = -(-count // (BATCH_RECORDS * PARTITIONS)), records()
    with open_store(url) as store:
        topic = store.write(lambda connection: create_topic(connection, TOPIC, partition_count=PARTITIONS))
        batch = encode(content)
        appends = [Append(partition_id, batch) for partition_id in topic.partition_ids]
        for _ in range(batches):
            store.write(lambda connection: append(connection, appends))
    with closing(Raw(url)) as raw:
        blob = "BLOB" if raw.is_sqlite else "BYTEA"
        raw.run(
            f"CREATE TABLE plain (part INTEGER NOT NULL, off BIGINT NOT NULL, stamp BIGINT, key {blob}, value {blob},"
            " PRIMARY KEY (part, off))"
        )
        rows = [
            (part, number * BATCH_RECORDS + index, record.timestamp_ms, record.key, record.value)
            for number in range(batches)
            for part in range(PARTITIONS)
            for index, record in enumerate(content)
        ]
        raw.insert_rows("plain", rows, types=["int4", "int8", "int8", "bytea", "bytea"])
        if not raw.is_sqlite:
            raw.run("VACUUM ANALYZE")
    return batches * BATCH_RECORDS * PARTITIONS


def fill_kafka(bootstrap: str, count: int) -> None:
    """Write as many of the same records into a topic of Kafka's."""
    admin = KafkaAdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewKafkaTopic(TOPIC, PARTITIONS, 1)])[TOPIC].result(TIMEOUT_SECONDS)
    producer = KafkaProducer({"bootstrap.servers": bootstrap, "linger.ms": 5})
    content = records()
    for _ in range(count // (BATCH_RECORDS * PARTITIONS)):
        for part in range(PARTITIONS):
            for record in content:
                producer.produce(TOPIC, record.value, record.key, part, timestamp=record.timestamp_ms)
        producer.flush(TIMEOUT_SECONDS)


def jdbc_rows(spark: SparkSession, url: str) -> Any:
    """Return the plain table of a PostgreSQL, one task for each partition."""
    return (
        spark.read.format("jdbc")
        .options(**jdbc_options(url), dbtable="plain", fetchsize=10_000, partitionColumn="part")
        .options(lowerBound=0, upperBound=PARTITIONS, numPartitions=PARTITIONS)
        .load()
    )


def jdbc_options(url: str) -> dict[str, str]:
    """Return where Spark's JDBC finds this PostgreSQL."""
    address = make_url(url)
    return {
        "url": f"jdbc:postgresql://{address.host}:{address.port or 5432}/{address.database}?reWriteBatchedInserts=true",
        "driver": "org.postgresql.Driver",
        "user": address.username or "",
        "password": str(address.password or ""),
    }


def consume(url: str) -> None:
    """Read everything with the plain consumer."""
    with Consumer(
        {"bootstrap.servers": url, "group.id": "bench", "enable.partition.eof": True, "fetch.wait.max.ms": 0}
    ) as consumer:
        consumer.assign([TopicPartition(TOPIC, part, 0) for part in range(PARTITIONS)])
        ends = 0
        while ends < PARTITIONS:
            ends += sum(message.error() is not None for message in consumer.consume(10_000, 1.0))


def _noop(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


def main() -> None:
    """Measure on the databases that the command line asks for, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], action="append", help="only this one")
    parser.add_argument("--records", type=int, default=500_000, help="how many records (500,000)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each measurement (7)")
    parser.add_argument("--fetch", action="store_true", help="also what takes jars of Maven Central: JDBC and Kafka")
    options = parser.parse_args()
    results: list[Result] = []
    spark = session(fetch=options.fetch)
    with databases(options.database or ["sqlite", "postgresql"]) as urls:
        for database, url in urls:
            results += bench_source(database, url, spark, options)
    spark.stop()
    show(results)


if __name__ == "__main__":
    main()

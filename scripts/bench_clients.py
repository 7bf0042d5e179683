"""The benchmarks of producer and consumer, through the public API."""

# ruff: noqa: S608 - what stands in these statements are constants of these files

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

from scripts.bench_support import BATCH_RECORDS, VALUE, Bench, Result
from txnstore import Consumer, Producer, TopicPartition
from txnstore.db.postgresql.backend import connect_driver
from txnstore.db.url import parse_url

#: A process from its start to its first record, and one that writes a row by SQLAlchemy Core, on the same database.
FIRST_RECORD = """
import sys
from txnstore import Producer
with Producer({"bootstrap.servers": sys.argv[1]}) as producer:
    producer.produce("bench-start", b"value")
    producer.flush()
"""
FIRST_ROW = """
import sys
from sqlalchemy import create_engine, text
with create_engine(sys.argv[1]).begin() as connection:
    connection.execute(text("CREATE TABLE IF NOT EXISTS plain_started (value TEXT)"))
    connection.execute(text("INSERT INTO plain_started VALUES ('value')"))
"""
#: The program's own help, and that of the smallest one made with Typer.
HELP = "import sys; sys.argv[1:] = ['--help']; from txnstore.cli import main; main()"
SMALLEST_HELP = """
import sys, typer
sys.argv[1:] = ["--help"]
def hello() -> None: "Say hello."
typer.run(hello)
"""
#: What the producer puts into one commit by default.
COMMIT_RECORDS = 10_000


def produce(producer: Producer, topic: str, count: int, delivered: list[int]) -> None:
    """Produce `count` records with a delivery callback each, as programs do."""

    def on_delivery(error: Any, message: Any) -> None:
        delivered[0] += error is None

    for number in range(count):
        while True:
            try:
                producer.produce(topic, VALUE, on_delivery=on_delivery)
                break
            except BufferError:
                producer.poll(1)
        if number % 1000 == 0:
            producer.poll(0)
    producer.flush()


def bench_produce(bench: Bench) -> Iterator[Result]:
    """Produce with delivery callbacks, against a loop that writes the same records as rows."""
    count = bench.batches * BATCH_RECORDS
    bench.raw.run("CREATE TABLE plain_produced (id INTEGER PRIMARY KEY, timestamp_ms BIGINT, key BLOB, value BLOB)")
    next_id = [0]
    delivered = [0]
    with Producer({"bootstrap.servers": bench.url}) as producer:

        def ours() -> None:
            produce(producer, "bench-produce", count, delivered)

        def rows() -> None:
            collected = []
            for _ in range(count):
                next_id[0] += 1
                collected.append((next_id[0], int(time.time() * 1000), None, VALUE))
                if len(collected) == COMMIT_RECORDS:
                    bench.raw.insert_rows("plain_produced", collected)
                    collected = []
            if collected:
                bench.raw.insert_rows("plain_produced", collected)

        seconds = bench.compare(ours, rows)
    assert delivered[0] == count * (bench.rounds + 1)
    loop = "a loop that writes rows, 10,000 a commit"
    yield bench.rate(("produce with delivery callbacks", loop), count, seconds, reach=1.0)


def bench_transactional_produce(bench: Bench) -> Iterator[Result]:
    """A thousand records a transaction, against the same records flushed without one."""
    transactions = bench.batches
    plain = Producer({"bootstrap.servers": bench.url})
    transactional = Producer({"bootstrap.servers": bench.url, "transactional.id": "bench-produce"})
    with plain, transactional:
        transactional.init_transactions()

        def ours() -> None:
            for _ in range(transactions):
                transactional.begin_transaction()
                for _ in range(BATCH_RECORDS):
                    transactional.produce("bench-transactional", VALUE)
                transactional.commit_transaction()

        def other() -> None:
            for _ in range(transactions):
                for _ in range(BATCH_RECORDS):
                    plain.produce("bench-plain", VALUE)
                plain.flush()

        seconds = bench.compare(ours, other)
    what = ("produce, 1,000 records a transaction", "flushed every 1,000 without one")
    yield bench.rate(what, transactions * BATCH_RECORDS, seconds, reach=0.95)


def bench_consume(bench: Bench) -> Iterator[Result]:
    """Consume to `Message` objects, against `fetchall` of the same records as rows."""
    count = bench.batches * BATCH_RECORDS
    with Producer({"bootstrap.servers": bench.url}) as producer:
        produce(producer, "bench-consume", count, [0])
    bench.raw.run("CREATE TABLE plain_consumed (id INTEGER PRIMARY KEY, timestamp_ms BIGINT, key BLOB, value BLOB)")
    bench.raw.insert_rows("plain_consumed", [(number, 0, None, VALUE) for number in range(count)])

    def rows() -> None:
        found = bench.raw.run("SELECT id, timestamp_ms, key, value FROM plain_consumed ORDER BY id").fetchall()
        assert len(found) == count

    consumer = Consumer({"bootstrap.servers": bench.url, "group.id": "bench", "enable.auto.commit": False})

    def ours() -> None:
        consumer.assign([TopicPartition("bench-consume", 0, 0)])
        found = 0
        while found < count:
            found += len(consumer.consume(10_000, timeout=10))

    def ours_by_poll() -> None:
        consumer.assign([TopicPartition("bench-consume", 0, 0)])
        found = 0
        while found < count:
            found += consumer.poll(10) is not None

    with consumer:
        seconds = bench.compare(ours, rows)
        yield bench.rate(("consume() to messages", "fetchall of the same as rows"), count, seconds, reach=0.6)
        seconds = bench.compare(ours_by_poll, rows)
        yield bench.rate(("poll() to messages", "fetchall of the same as rows"), count, seconds, reach=0.6)


def bench_small_client_transaction(bench: Bench) -> Iterator[Result]:
    """A transaction of one record and one offset of a group's member, against the same rows by hand."""
    count = 100
    raw, lock = bench.raw, "" if bench.raw.is_sqlite else " FOR UPDATE"
    for statement in (
        "CREATE TABLE client_log (id INTEGER PRIMARY KEY, timestamp_ms BIGINT, key BLOB, value BLOB)",
        "CREATE TABLE client_state (id INTEGER PRIMARY KEY, epoch BIGINT, state BIGINT)",
        *(f"INSERT INTO client_state VALUES ({number}, 0, 0)" for number in range(4)),
    ):
        raw.run(statement)
    numbers = [0]
    topic = "bench-small"
    producer = Producer({"bootstrap.servers": bench.url, "transactional.id": "bench-small-client"})
    consumer = Consumer({"bootstrap.servers": bench.url, "group.id": "bench-small", "enable.auto.commit": False})
    with producer, consumer:
        producer.init_transactions()
        producer.list_topics(topic)
        consumer.subscribe([topic])
        while not consumer.assignment():
            consumer.poll(0.1)
        metadata = consumer.consumer_group_metadata()

        def ours() -> None:
            for _ in range(count):
                numbers[0] += 1
                producer.begin_transaction()
                producer.produce(topic, VALUE)
                producer.send_offsets_to_transaction([TopicPartition(topic, 0, numbers[0])], metadata)
                producer.commit_transaction()

        def by_hand() -> None:
            for _ in range(count):
                numbers[0] += 1
                number = numbers[0]
                raw.run("BEGIN IMMEDIATE" if raw.is_sqlite else "BEGIN")
                for state in range(4):
                    raw.run(f"SELECT epoch, state FROM client_state WHERE id = ?{lock}", (state,)).fetchone()
                for record in range(4):  # the record, its marker, the index of ended transactions, the journal
                    row = (4 * number + record, 0, None, VALUE if record == 0 else b"")
                    raw.run("INSERT INTO client_log VALUES (?, ?, ?, ?)", row)
                for state in range(4):  # the transaction, the head, the producer, the offset
                    raw.run("UPDATE client_state SET epoch = ? WHERE id = ?", (number, state))
                raw.run("COMMIT")

        seconds = bench.compare(ours, by_hand)
    what = ("clients: one record, one offset", "the same rows by hand")
    yield bench.latency(what, count, seconds, reach=2.0)


def child_cpu_seconds(program: str, url: str) -> float:
    """Return the CPU time, user and system, of a fresh process that runs this program."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program, url], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def bench_start(bench: Bench) -> Iterator[Result]:
    """CPU of a fresh process up to its first record on an existing store, and of `txnstore --help`."""
    plain_url = bench.url.replace("postgresql://", "postgresql+psycopg://")
    for what, against, ours, other, reach in (
        ("start: first record, CPU", "a row by SQLAlchemy Core", FIRST_RECORD, FIRST_ROW, 1.6),
        ("txnstore --help, CPU", "the smallest Typer program's", HELP, SMALLEST_HELP, 1.5),
    ):
        rounds = [
            (child_cpu_seconds(ours, bench.url), child_cpu_seconds(other, plain_url)) for _ in range(bench.rounds + 1)
        ][1:]
        seconds = (statistics.median(pair[0] for pair in rounds), statistics.median(pair[1] for pair in rounds))
        yield bench.latency((what, against), 1, seconds, reach=reach)


def bench_end_to_end(bench: Bench) -> Iterator[Result]:
    """From `produce` to the message in a waiting consumer, against one commit and one NOTIFY on the same server."""
    if bench.raw.is_sqlite:
        return
    count = 100
    topic = "bench-latency"
    received = threading.Event()
    stop = threading.Event()
    producer = Producer({"bootstrap.servers": bench.url, "linger.ms": 0})
    consumer = Consumer({"bootstrap.servers": bench.url, "group.id": "bench-latency", "auto.offset.reset": "latest"})
    producer.list_topics(topic)
    consumer.assign([TopicPartition(topic, 0, 0)])

    def receive() -> None:
        while not stop.is_set():
            if consumer.poll(0.5) is not None:
                received.set()

    thread = threading.Thread(target=receive)
    thread.start()

    def ours() -> float:
        received.clear()
        begin = time.perf_counter()
        producer.produce(topic, VALUE)
        assert received.wait(10)
        return time.perf_counter() - begin

    channel = f"bench_{uuid.uuid4().hex}"
    bench.raw.run("CREATE TABLE plain_latency (id BIGSERIAL PRIMARY KEY, value BLOB)")
    listener = connect_driver(parse_url(bench.url))
    listener.execute(f"LISTEN {channel}")

    def listen() -> None:
        while not stop.is_set():
            for _ in listener.notifies(timeout=0.5, stop_after=1):
                received.set()

    listening = threading.Thread(target=listen)
    listening.start()

    def other() -> float:
        received.clear()
        begin = time.perf_counter()
        bench.raw.run("BEGIN")
        bench.raw.run("INSERT INTO plain_latency (value) VALUES (?)", (VALUE,))
        bench.raw.run("COMMIT")
        bench.raw.run(f"NOTIFY {channel}")
        assert received.wait(10)
        return time.perf_counter() - begin

    try:
        pairs = [(ours(), other()) for _ in range(count)][count // 10 :]
    finally:
        stop.set()
        thread.join()
        listening.join()
        listener.close()
        consumer.close()
        producer.close()
    seconds = (statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs))
    yield bench.latency(("end to end, p50", "one commit and one NOTIFY"), 1, seconds, reach=2.0)


BENCHES = (
    bench_produce,
    bench_transactional_produce,
    bench_consume,
    bench_small_client_transaction,
    bench_end_to_end,
    bench_start,
)

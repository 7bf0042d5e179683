"""The benchmarks of log and coordinator, called directly."""

# ruff: noqa: S608 - what stands in these statements are constants of these files

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from scripts.bench_support import BATCH_RECORDS, VALUE, Bench, Result, records
from txnstore.log.append import Append
from txnstore.log.bounds import read_bounds
from txnstore.log.codec import encode
from txnstore.log.fetch import fetch
from txnstore.log.topics import create_topic
from txnstore.model import GroupMembership, OffsetAndMetadata, ProducerIdentity
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.transaction import SentOffsets


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
    bench.raw.run("CREATE TABLE plain_batches (id INTEGER PRIMARY KEY, positions BLOB, data BLOB)")
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

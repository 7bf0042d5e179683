"""Many records: one client in a process of its own, and several that produce to one partition.

The floors say what is the database's and what is Python's: the same encoded batches by the raw driver, and a loop that
calls one method in Python for each record and has nothing behind it.
"""

# ruff: noqa: S608 - what stands in these statements are constants of this file

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

from scripts.bench_support import VALUE
from scripts.comparison import floors
from scripts.comparison.figures import Figure
from scripts.comparison.sides import ANSWER_TIMEOUT_SECONDS, POSTGRESQL, SQLITE, Side, checked, processes, running

RECORDS_A_TRANSACTION: Final = 1_000
CONSUMED_AT_ONCE: Final = 500
#: What a floor writes in one commit, and reads in one go: as many as the producer does by default.
RECORDS_OF_A_COMMIT: Final = 10_000
RECORDS_OF_A_PAGE: Final = 10_000
DRIVER: Final = "the same batches by the raw driver"
PYTHON: Final = "a list in Python"
#: A client that is nothing but the two, which do not run at the same time: what Python allows one process.
BOTH: Final = "one after the other"

OnDelivery = Callable[[Any, Any], None]


# --- one client -------------------------------------------------------------------------------------------------------


def produce(side: Side, count: int, *, in_transactions: bool) -> tuple[str, float, float]:
    """Produce with a callback for each record; return the topic, records a second, and microseconds of CPU a record."""
    topic = side.new_topic()
    producer = side.transactional_producer() if in_transactions else side.producer()
    if not in_transactions:
        producer.produce(topic, VALUE)
        producer.flush(ANSWER_TIMEOUT_SECONDS)
    begun_cpu, begun = time.process_time(), time.perf_counter()
    send(producer, topic, count, in_transactions=in_transactions)
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - begun_cpu
    return topic, count / seconds, cpu_seconds / count * 1e6


def send(producer: Any, topic: str, count: int, *, in_transactions: bool) -> None:
    """Produce records with a callback for each; return when all of them have been delivered."""
    delivered = [0]

    def on_delivery(error: Any, _: Any) -> None:
        delivered[0] += error is None

    for number in range(count):
        if in_transactions and number % RECORDS_A_TRANSACTION == 0:
            producer.begin_transaction()
        while True:
            try:
                producer.produce(topic, VALUE, key=b"key-%04d" % (number % 5_000), on_delivery=on_delivery)
                break
            except BufferError:
                producer.poll(0.01)
        if number % 100 == 0:
            producer.poll(0)
        if in_transactions and (number + 1) % RECORDS_A_TRANSACTION == 0:
            producer.commit_transaction(ANSWER_TIMEOUT_SECONDS)
    if in_transactions and count % RECORDS_A_TRANSACTION:
        producer.commit_transaction(ANSWER_TIMEOUT_SECONDS)
    producer.flush(ANSWER_TIMEOUT_SECONDS)
    assert delivered[0] == count, f"{delivered[0]} of {count} records were delivered"


def consume(side: Side, topic: str, count: int, at_once: int | None, begin: int = 0) -> float:
    """Consume records of a topic, one by one or so many at once; return records a second."""
    consumer = side.consumer(auto_offset_reset="earliest", isolation_level="read_committed")
    consumer.assign([side.partition(topic, begin)])
    with closing(consumer):
        checked(consumer.poll(ANSWER_TIMEOUT_SECONDS))
        return receive(consumer, count - 1, at_once)


def receive(consumer: Any, count: int, at_once: int | None) -> float:
    """Take so many records out of a consumer; return records a second."""
    received, begun = 0, time.perf_counter()
    while received < count:
        if at_once is None:
            checked(consumer.poll(ANSWER_TIMEOUT_SECONDS))
            received += 1
        else:
            received += len([checked(each) for each in consumer.consume(at_once, ANSWER_TIMEOUT_SECONDS)])
    return received / (time.perf_counter() - begun)


def _bulk(side: Side, count: int) -> list[Figure]:
    topic, rate, cpu = produce(side, count, in_transactions=False)
    of_transactions, rate_in_transactions, _ = produce(side, count, in_transactions=True)
    consumed, polled = consume(side, topic, count, CONSUMED_AT_ONCE), consume(side, topic, count, None)
    figures = [
        Figure("produce() with delivery reports", "records/s", rate, reach=0.8 if side.name == POSTGRESQL else 1.0),
        Figure("CPU of the producing process", "us/record", cpu, is_rate=False),
        Figure("1,000 records a transaction", "records/s", rate_in_transactions, reach=1.0),
        Figure("consume(500)", "records/s", consumed, reach=1.0),
        Figure("poll()", "records/s", polled, reach=4.0),
    ]
    if not side.is_ours:
        return figures
    written, read = _copy(side, topic, RECORDS_OF_A_COMMIT)
    # A transaction is a batch and its marker.
    written_in_transactions, _ = _copy(side, of_transactions, RECORDS_A_TRANSACTION + 1)
    produced, cpu_of_loop, consumed, polled = _in_python(count)
    all_floors: list[dict[str, float]] = [
        _floors(written, produced),
        {PYTHON: cpu_of_loop},
        _floors(written_in_transactions, produced),
        _floors(read, consumed),
        _floors(read, polled),
    ]
    return [
        replace(figure, floors=each, floor=BOTH if BOTH in each else "")
        for figure, each in zip(figures, all_floors, strict=True)
    ]


def _floors(by_driver: float, in_python: float) -> dict[str, float]:
    return {DRIVER: by_driver, PYTHON: in_python, BOTH: 1 / (1 / by_driver + 1 / in_python)}


def bulk(side: Side, options: argparse.Namespace) -> list[Figure]:
    """Many records through one client, in a process of its own."""
    with processes.Pool(1) as pool:
        return pool.apply(_bulk, (side, options.records))


# --- several clients, one partition -----------------------------------------------------------------------------------


def _produce_beside(side: Side, topic: str, seconds: float, ready: Any, results: Any) -> None:
    producer, delivered = side.producer(), [0]

    def on_delivery(error: Any, _: Any) -> None:
        delivered[0] += error is None

    producer.produce(topic, VALUE)
    producer.flush(ANSWER_TIMEOUT_SECONDS)
    ready.wait(ANSWER_TIMEOUT_SECONDS)
    begun = time.monotonic()
    while time.monotonic() < begun + seconds:
        for _ in range(100):
            try:
                producer.produce(topic, VALUE, on_delivery=on_delivery)
            except BufferError:
                producer.poll(0.01)
        producer.poll(0)
    producer.flush(ANSWER_TIMEOUT_SECONDS)
    results.put((begun, time.monotonic(), delivered[0]))


def one_partition(side: Side, options: argparse.Namespace) -> Iterator[Figure]:
    """Producers of one partition, a process each: the first alone, then all of them."""
    rates: list[float] = []
    for count in (1, max(options.processes)):
        ready, results = processes.Barrier(count), processes.Queue()
        arguments = (side, side.new_topic(), options.seconds, ready, results)
        workers = [processes.Process(target=_produce_beside, args=arguments) for _ in range(count)]
        with running(workers):
            done = [results.get(timeout=ANSWER_TIMEOUT_SECONDS) for _ in workers]
        begun, ended, delivered = zip(*done, strict=True)
        rates.append(sum(delivered) / (max(ended) - min(begun)))
        yield Figure(f"producers of one partition, {count} at once", "records/s", rates[-1])
    what = f"{max(options.processes)} producers of one partition"
    reach = 0.9 if side.name == SQLITE else 1.5
    yield Figure(what, "x one", rates[-1] / rates[0], reach=reach, is_compared=False)


# --- the floors -------------------------------------------------------------------------------------------------------


def _copy(side: Side, topic: str, records_of_a_commit: int) -> tuple[float, float]:
    """Write the batches of a topic once more, and read them, by the raw driver alone; return records a second of both.

    They go to a table like that of the store, without what the store knows about them elsewhere.
    """
    schema, mark = ("txnstore_", "?") if side.name == SQLITE else ("txnstore.", "%b")
    with closing(floors.connect(side)) as connection:
        rows = _cursor(connection, side).execute(
            f"SELECT b.* FROM {schema}record_batches b JOIN {schema}partitions p ON p.partition_id = b.partition_id"
            f" JOIN {schema}topics t ON t.topic_id = p.topic_id WHERE t.name = {mark} ORDER BY b.last_offset",
            (topic,),
        )
        names = [each[0] for each in rows.description]
        batches = rows.fetchall()
        place_of_count, place_of_partition = names.index("record_count"), names.index("partition_id")
        count = sum(batch[place_of_count] for batch in batches)
        connection.execute("DROP TABLE IF EXISTS floor_copies")
        if side.name == SQLITE:
            [(statement,)] = connection.execute(
                "SELECT sql FROM sqlite_master WHERE name = 'txnstore_record_batches'"
            ).fetchall()
            connection.execute(statement.replace("txnstore_record_batches", "floor_copies", 1))
            connection.execute(
                "CREATE INDEX floor_copies_time ON floor_copies (partition_id, running_max_timestamp_ms, last_offset)"
            )
        else:
            connection.execute("CREATE TABLE floor_copies (LIKE txnstore.record_batches_1 INCLUDING ALL)")
            # As in the log, no row enters its first pages into the index by time.
            connection.execute(
                "SELECT brin_desummarize_range(indexrelid::regclass, 0) FROM pg_index JOIN pg_class ON pg_class.oid ="
                " indexrelid JOIN pg_am ON pg_am.oid = relam WHERE indrelid = 'floor_copies'::regclass"
                " AND amname = 'brin'"
            )
        insert = f"INSERT INTO floor_copies VALUES ({', '.join([mark] * len(names))})"
        cursor = _cursor(connection, side)
        begun = time.perf_counter()
        for commit in _commits(batches, place_of_count, records_of_a_commit):
            cursor.execute("BEGIN")
            cursor.executemany(insert, commit)
            cursor.execute("COMMIT")
        write_seconds = time.perf_counter() - begun
        begun, position, seen = time.perf_counter(), -1, 0
        page = f"WHERE partition_id = {mark} AND last_offset > {mark} ORDER BY last_offset LIMIT {mark}"
        batches_of_a_page = max(1, RECORDS_OF_A_PAGE * len(batches) // count)
        while seen < count:
            found = cursor.execute(
                f"SELECT * FROM floor_copies {page}", (batches[0][place_of_partition], position, batches_of_a_page)
            ).fetchall()
            seen += sum(batch[place_of_count] for batch in found)
            position = found[-1][names.index("last_offset")]
        read_seconds = time.perf_counter() - begun
        connection.execute("DROP TABLE floor_copies")
    return count / write_seconds, count / read_seconds


def _cursor(connection: Any, side: Side) -> Any:
    return connection.cursor() if side.name == SQLITE else connection.cursor(binary=True)


def _commits(batches: list[Any], place_of_count: int, records_max: int) -> Iterator[list[Any]]:
    commit: list[Any] = []
    for batch in batches:
        commit.append(batch)
        if sum(each[place_of_count] for each in commit) >= records_max:
            yield commit
            commit = []
    if commit:
        yield commit


class _List:
    """The least that a client in Python does for a record: one call, one object kept, one call back."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Any, ...]] = deque()

    def produce(
        self, topic: str, value: bytes | None = None, key: bytes | None = None, on_delivery: OnDelivery | None = None
    ) -> None:
        self._waiting.append((topic, value, key, on_delivery))

    def poll(self, timeout: float = -1) -> Any:
        return None

    def flush(self, timeout: float = -1) -> None:
        while self._waiting:
            _, value, key, on_delivery = self._waiting.popleft()
            on_delivery(None, _Message(value, key))


class _Message:
    __slots__ = ("_key", "_value")

    def __init__(self, value: bytes, key: bytes) -> None:
        self._value = value
        self._key = key

    def error(self) -> None:
        return None

    def value(self) -> bytes:
        return self._value


class _Messages:
    """Hands out messages, each made when it is asked for."""

    def __init__(self, count: int) -> None:
        self._pairs = iter([(VALUE, b"key")] * count)

    def poll(self, timeout: float = -1) -> _Message:
        return _Message(*next(self._pairs))

    def consume(self, count: int, timeout: float = -1) -> list[_Message]:
        return [_Message(*pair) for _, pair in zip(range(count), self._pairs, strict=False)]


def _in_python(count: int) -> tuple[float, float, float, float]:
    """Return records a second, microseconds of CPU a record, and records a second of consume() and poll()."""
    begun_cpu, begun = time.process_time(), time.perf_counter()
    send(_List(), "topic", count, in_transactions=False)
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - begun_cpu
    consumed = receive(_Messages(count), count, CONSUMED_AT_ONCE)
    return count / seconds, cpu_seconds / count * 1e6, consumed, receive(_Messages(count), count, None)

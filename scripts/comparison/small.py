"""Transactions of one record: how many by how many processes, and what they cost a PostgreSQL server."""

from __future__ import annotations

import argparse
import enum
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from scripts.bench_support import VALUE
from scripts.comparison import floors
from scripts.comparison.figures import SHARE_OF_FLOOR, Figure
from scripts.comparison.sides import ANSWER_TIMEOUT_SECONDS, POSTGRESQL, Side, new_name, processes, running
from txnstore.testing.postgres_server import connection_string

WARM_UP_TRANSACTIONS: Final = 20
PORTIONS: Final = 10
SESSIONS_TELL_SECONDS: Final = 1.1
#: A client may have more than one session.
TELLING_TRANSACTIONS: Final = 2
#: PostgreSQL's write-ahead log, for a transaction of one record and an offset.
WAL_BYTES_MAX: Final = 1_200


def transact(
    producer: Any,
    topic: str,
    offset: Callable[[], tuple[list[Any], Any]] | None = None,
    *,
    commits: deque[Any] | None = None,
) -> None:
    """Commit a transaction of one record, and of an offset if told.

    With `commits` nobody waits, if the producer can do that: the commit is added there, and those before it are looked
    at once they are done.
    """
    producer.begin_transaction()
    producer.produce(topic, VALUE, key=b"key")
    if offset is not None:
        producer.send_offsets_to_transaction(*offset())
    if commits is None or not hasattr(producer, "commit_transaction_async"):
        producer.commit_transaction(ANSWER_TIMEOUT_SECONDS)
        return
    commits.append(producer.commit_transaction_async())
    while commits[0].done() and len(commits) > 1:
        commits.popleft().result()


def finish(commits: deque[Any]) -> None:
    """Wait until all of them are made."""
    while commits:
        commits.popleft().result(ANSWER_TIMEOUT_SECONDS)


def repeat(
    transaction: Callable[[], object], seconds: float, ready: Any = None, finish: Callable[[], object] = lambda: None
) -> tuple[int, float, float]:
    """Return how many transactions there were in about this time, how many seconds they took, and how many of CPU."""
    for _ in range(WARM_UP_TRANSACTIONS):
        transaction()
    finish()
    if ready is not None:
        ready.wait(ANSWER_TIMEOUT_SECONDS)
    begun_cpu, count, begun = time.process_time(), 0, time.perf_counter()
    while time.perf_counter() < begun + seconds:
        transaction()
        count += 1
    finish()
    return count, time.perf_counter() - begun, time.process_time() - begun_cpu


class Offset(enum.Enum):
    """Whose offset a transaction commits."""

    NONE = ""
    CONSUMERS = " and an offset"
    """Of a consumer that belongs to no generation of its group: it never subscribed."""

    MEMBERS = " and a member's offset"
    """Of one that subscribed and has the partition."""


def _of_client(side: Side, topic: str, offset: Offset, commits: deque[Any] | None = None) -> Callable[[], None]:
    producer = side.transactional_producer()
    if offset is Offset.NONE:
        return partial(transact, producer, topic, commits=commits)
    # The consumer lives as long as its metadata is used; it reads nothing.
    consumer, numbers = side.consumer(), itertools.count(1)
    if offset is Offset.MEMBERS:
        consumer.subscribe([topic])
        deadline = time.monotonic() + ANSWER_TIMEOUT_SECONDS
        while not consumer.assignment():
            assert time.monotonic() < deadline, "the consumer was not assigned its partition"
            consumer.poll(0.1)
    metadata = consumer.consumer_group_metadata()
    following = lambda: ([side.partition(topic, next(numbers))], metadata)  # noqa: E731 - named for what it is
    return partial(transact, producer, topic, following, commits=commits)


def _client(
    side: Side, topic: str, seconds: float, meeting: tuple[Any, Any], *, offset: Offset, waits: bool = True
) -> None:
    ready, results = meeting
    commits: deque[Any] = deque()
    transaction = _of_client(side, topic, offset, None if waits else commits)
    results.put(repeat(transaction, seconds, ready, partial(finish, commits)))


def _raw(side: Side, number: int, seconds: float, meeting: tuple[Any, Any], *, way: str, has_offset: bool) -> None:
    ready, results = meeting
    with closing(floors.connect(side)) as connection:
        work = floors.ways(side)[way](connection, side, number, new_name(), has_offset=has_offset)
        results.put(repeat(work, seconds, ready))


def _together(side: Side, places: Sequence[Any], seconds: float, work: Callable[..., None]) -> tuple[float, float]:
    """Return transactions a second of a process for each place, and milliseconds of their CPU for a transaction."""
    meeting = processes.Barrier(len(places)), processes.Queue()
    with running([processes.Process(target=work, args=(side, place, seconds, meeting)) for place in places]):
        done = [meeting[1].get(timeout=ANSWER_TIMEOUT_SECONDS) for _ in places]
    transactions = sum(number for number, _, _ in done)
    rate = sum(number / taken_seconds for number, taken_seconds, _ in done)
    return rate, sum(cpu_seconds for _, _, cpu_seconds in done) / transactions * 1_000


def _floors(side: Side, count: int, seconds: float, *, has_offset: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Return what so many processes do by the raw driver, by way: transactions a second, and milliseconds of CPU."""
    rates, cpus_ms = {}, {}
    for way in floors.ways(side) if side.is_ours else ():
        floors.make_tables(side)
        raw = partial(_raw, way=way, has_offset=has_offset)
        rates[way], cpus_ms[way] = _together(side, range(count), seconds, raw)
    return rates, cpus_ms


def small(side: Side, options: argparse.Namespace) -> Iterator[Figure]:
    """Transactions of one record, without and with a consumed offset, by more and more processes."""
    for has_offset, count in itertools.product((False, True), options.processes):
        rates, cpus_ms = _floors(side, count, options.seconds, has_offset=has_offset)
        for offset in (Offset.CONSUMERS, Offset.MEMBERS) if has_offset else (Offset.NONE,):
            topics = [side.new_topic() for _ in range(count)]
            rate, cpu_ms = _together(side, topics, options.seconds, partial(_client, offset=offset))
            what = f"one record{offset.value} a transaction, {count} at once"
            reach = 1.5 if side.name == POSTGRESQL and count > 1 else 2.0
            yield Figure(what, "transactions/s", rate, reach=reach, floors=rates, share=SHARE_OF_FLOOR)
            yield Figure(f"{what}: CPU of the clients", "ms/transaction", cpu_ms, is_rate=False, floors=cpus_ms)


def pipelined(side: Side, options: argparse.Namespace) -> Iterator[Figure]:
    """Transactions of one record whose commits are not waited for, which Kafka's client cannot do: there they are."""
    for offset, count in itertools.product((Offset.NONE, Offset.MEMBERS), options.processes):
        rates, cpus_ms = _floors(side, count, options.seconds, has_offset=offset is not Offset.NONE)
        topics = [side.new_topic() for _ in range(count)]
        rate, cpu_ms = _together(side, topics, options.seconds, partial(_client, offset=offset, waits=False))
        what = f"one record{offset.value} a transaction, not waited for, {count} at once"
        reach = 1.5 if side.name == POSTGRESQL and count > 1 else 2.0
        yield Figure(what, "transactions/s", rate, reach=reach, floors=rates, share=SHARE_OF_FLOOR)
        yield Figure(f"{what}: CPU of the clients", "ms/transaction", cpu_ms, is_rate=False, floors=cpus_ms)


# --- what they cost the server ----------------------------------------------------------------------------------------


def _wal_of_client(side: Side, count: int, offset: Offset) -> float:
    return _wal_of(_of_client(side, side.new_topic(), offset), side, count)


def _wal_of_raw(side: Side, way: str, count: int, *, has_offset: bool) -> float:
    floors.make_tables(side)
    with closing(floors.connect(side)) as connection:
        work = floors.ways(side)[way](connection, side, 0, new_name(), has_offset=has_offset)
        return _wal_of(work, side, count)


def _wal_of(transaction: Callable[[], object], side: Side, count: int) -> float:
    """Return the bytes of write-ahead log of a transaction, in the median of portions.

    So a page that is written whole, which the first change after a checkpoint does, counts little, as does a vacuum.
    """
    for _ in range(WARM_UP_TRANSACTIONS):
        transaction()
    portion, sizes = max(1, count // PORTIONS), []
    with closing(floors.connect(side)) as observer:
        for _ in range(PORTIONS):
            [[begin]] = observer.execute("SELECT pg_current_wal_insert_lsn()::text").fetchall()
            for _ in range(portion):
                transaction()
            [[size]] = observer.execute("SELECT pg_current_wal_insert_lsn() - CAST(%s AS pg_lsn)", (begin,)).fetchall()
            sizes.append(float(size) / portion)
    return statistics.median(sizes)


def _database_transactions(side: Side, count: int, offset: Offset) -> float:
    """Return how many database transactions one of the clients' takes."""
    transaction = _of_client(side, side.new_topic(), offset)
    for _ in range(WARM_UP_TRANSACTIONS):
        transaction()
    # From another database: what is asked here does not count.
    with psycopg.connect(connection_string(side.url), dbname="postgres", autocommit=True) as observer:
        database = str(conninfo_to_dict(connection_string(side.url))["dbname"])
        begin = _committed(observer, database, transaction)
        for _ in range(count):
            transaction()
        return (_committed(observer, database, transaction) - begin) / (count + TELLING_TRANSACTIONS)


def _committed(observer: psycopg.Connection, database: str, transaction: Callable[[], object]) -> int:
    """Return the transactions that a database has seen: sessions tell of theirs at the first end of one in a second."""
    for _ in range(TELLING_TRANSACTIONS):
        time.sleep(SESSIONS_TELL_SECONDS)
        transaction()
    [[count]] = observer.execute(
        "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = %s", (database,)
    ).fetchall()
    return int(count)


def server(side: Side, options: argparse.Namespace) -> Iterator[Figure]:
    """What a transaction of one record costs a PostgreSQL server: write-ahead log and database transactions."""
    if side.name != POSTGRESQL:
        return
    for offset in Offset:
        what = f"one record{offset.value} a transaction"
        with processes.Pool(1) as pool:
            size = pool.apply(_wal_of_client, (side, options.transactions, offset))
            work = partial(_wal_of_raw, has_offset=offset is not Offset.NONE)
            sizes = {way: pool.apply(work, (side, way, options.transactions)) for way in floors.ways(side)}
            taken = pool.apply(_database_transactions, (side, options.transactions, offset))
        yield Figure(
            f"{what}: write-ahead log",
            "bytes",
            size,
            is_rate=False,
            reach=WAL_BYTES_MAX,
            is_compared=False,
            floors=sizes,
        )
        yield Figure(f"{what}: database transactions", "each", taken, is_rate=False)

"""Measure txnstore beside a real Kafka: the same program against both, taking turns, by clients in processes.

Kafka runs as its users run it: HotSpot's own choice of compilers, a heap of 1 GiB, `retry.backoff.ms=1` for the clients
(the default of 100 ms costs each small transaction 100 ms).  One broker keeps no other copies here, and does not
wait for its disk before it answers; txnstore's databases do.  Figures are medians over the rounds, with the smallest
and the largest; ratios are those of the medians.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import multiprocessing
import platform
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from scripts.bench import databases
from scripts.bench_support import MANY, VALUE
from tests.tools.kafka_broker import KafkaBroker
from tests.tools.kafka_jars import NoKafkaError

#: EX_UNAVAILABLE of sysexits.h.
UNAVAILABLE: Final = 69
ANSWER_TIMEOUT_SECONDS: Final = 120.0
WARM_UP_TRANSACTIONS: Final = 20
RECORDS_A_TRANSACTION: Final = 1_000
CONSUMED_AT_ONCE: Final = 500
BETWEEN_RECORDS_SECONDS: Final = 0.005
KAFKA: Final = "Kafka"

_processes: Final = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Side:
    """One of those that are compared: which client, and where it connects to."""

    name: str
    module: str
    url: str
    configuration: Mapping[str, Any] = field(default_factory=dict)

    def of_client(self, name: str) -> Any:
        """Return a name of the client's package."""
        return getattr(importlib.import_module(self.module), name)

    def producer(self, **more: Any) -> Any:
        """Return a producer; underscores in names of properties stand for dots."""
        return self.of_client("Producer")({**self._common, "linger.ms": 5, **_dotted(more)})

    def transactional_producer(self) -> Any:
        """Return a producer that is ready to begin a transaction, and waits for no further records."""
        producer = self.producer(transactional_id=_new_name(), linger_ms=0)
        producer.init_transactions(ANSWER_TIMEOUT_SECONDS)
        return producer

    def consumer(self, **more: Any) -> Any:
        """Return a consumer of a group of its own."""
        return self.of_client("Consumer")(
            {**self._common, "group.id": _new_name(), "enable.auto.commit": False, **_dotted(more)}
        )

    def partition(self, topic: str, *offset: int) -> Any:
        """Return the only partition of a topic."""
        return self.of_client("TopicPartition")(topic, 0, *offset)

    def new_topic(self) -> str:
        """Make a topic of one partition."""
        admin = importlib.import_module(f"{self.module}.admin")
        name = _new_name()
        # Kept until the answer is there: confluent_kafka's ends with its last reference.
        client = admin.AdminClient(self._common)
        client.create_topics([admin.NewTopic(name, 1, 1)])[name].result(ANSWER_TIMEOUT_SECONDS)
        return name

    @property
    def _common(self) -> dict[str, Any]:
        return {"bootstrap.servers": self.url, **self.configuration}


@dataclass(frozen=True)
class Figure:
    """What one round has measured; `is_rate`: more is better."""

    what: str
    unit: str
    value: float
    is_rate: bool = True
    reach: float | None = None
    """What is aimed at; None: nothing."""

    is_compared: bool = True
    """Whether what is aimed at is a ratio to Kafka's, not the figure itself."""


@dataclass(frozen=True)
class Row:
    """The rounds of one figure on one side."""

    side: str
    what: str
    unit: str
    median: float
    smallest: float
    largest: float
    ratio: float | None
    """To Kafka's median in the same run."""

    reach: str
    reached: bool


def _dotted(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("_", "."): value for name, value in properties.items()}


def _new_name() -> str:
    return f"bench-{uuid.uuid4().hex[:12]}"


# --- many records, in one process -------------------------------------------------------------------------------------


def produce(side: Side, count: int, *, in_transactions: bool) -> tuple[str, float, float]:
    """Produce with a callback for each record; return the topic, records a second, and microseconds of CPU a record."""
    topic = side.new_topic()
    producer = side.transactional_producer() if in_transactions else side.producer()
    delivered = [0]

    def on_delivery(error: Any, _: Any) -> None:
        delivered[0] += error is None

    if not in_transactions:
        producer.produce(topic, VALUE, on_delivery=on_delivery)
        producer.flush(ANSWER_TIMEOUT_SECONDS)
    begun_cpu, begun = time.process_time(), time.perf_counter()
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
    producer.flush(ANSWER_TIMEOUT_SECONDS)
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - begun_cpu
    assert delivered[0] >= count, f"{delivered[0]} of {count} records were delivered"
    return topic, count / seconds, cpu_seconds / count * 1e6


def consume(side: Side, topic: str, count: int, at_once: int | None) -> float:
    """Consume all records of a topic, one by one or so many at once; return records a second."""
    consumer = side.consumer(auto_offset_reset="earliest", isolation_level="read_committed")
    consumer.assign([side.partition(topic, 0)])
    with closing(consumer):
        _checked(consumer.poll(ANSWER_TIMEOUT_SECONDS))
        received, begun = 1, time.perf_counter()
        while received < count:
            if at_once is None:
                _checked(consumer.poll(ANSWER_TIMEOUT_SECONDS))
                received += 1
            else:
                received += len([_checked(each) for each in consumer.consume(at_once, ANSWER_TIMEOUT_SECONDS)])
        return (received - 1) / (time.perf_counter() - begun)


def _checked(message: Any) -> bytes:
    assert message is not None, "no record came"
    assert message.error() is None, message.error()
    value: bytes = message.value()
    return value


def _bulk(side: Side, count: int) -> list[Figure]:
    topic, rate, cpu = produce(side, count, in_transactions=False)
    _, rate_in_transactions, _ = produce(side, count, in_transactions=True)
    return [
        Figure("produce() with delivery reports", "records/s", rate, reach=1.0 if side.name == "SQLite" else 0.8),
        Figure("CPU of the producing process", "us/record", cpu, is_rate=False),
        Figure("1,000 records a transaction", "records/s", rate_in_transactions, reach=1.0),
        Figure("consume(500)", "records/s", consume(side, topic, count, CONSUMED_AT_ONCE), reach=1.0),
        Figure("poll()", "records/s", consume(side, topic, count, None), reach=4.0),
    ]


def bulk(side: Side, options: argparse.Namespace) -> list[Figure]:
    """Many records through one client, in a process of its own."""
    with _processes.Pool(1) as pool:
        return pool.apply(_bulk, (side, options.records))


# --- small transactions -----------------------------------------------------------------------------------------------


def _transact(producer: Any, topic: str, offset: Callable[[], tuple[list[Any], Any]] | None = None) -> None:
    producer.begin_transaction()
    producer.produce(topic, VALUE, key=b"key")
    if offset is not None:
        producer.send_offsets_to_transaction(*offset())
    producer.commit_transaction(ANSWER_TIMEOUT_SECONDS)


def _small_worker(side: Side, topic: str, seconds: float, ready: Any, results: Any, *, has_offset: bool) -> None:
    producer, consumer = side.transactional_producer(), side.consumer()
    metadata = consumer.consumer_group_metadata()
    numbers = itertools.count(1)
    transact = partial(
        _transact, producer, topic, (lambda: ([side.partition(topic, next(numbers))], metadata)) if has_offset else None
    )
    results.put(_repeat(transact, seconds, ready))
    consumer.close()


def _repeat(transact: Callable[[], None], seconds: float, ready: Any = None) -> tuple[int, float]:
    """Return how many transactions there were in the time, and how many seconds of CPU they took."""
    for _ in range(WARM_UP_TRANSACTIONS):
        transact()
    if ready is not None:
        ready.wait(ANSWER_TIMEOUT_SECONDS)
    begun_cpu, count, end = time.process_time(), 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        transact()
        count += 1
    return count, time.process_time() - begun_cpu


def small(side: Side, options: argparse.Namespace) -> Iterator[Figure]:
    """Transactions of one record, without and with a consumed offset, by more and more processes."""
    for has_offset, count in itertools.product((False, True), options.processes):
        ready, results = _processes.Barrier(count), _processes.Queue()
        work, arguments = partial(_small_worker, has_offset=has_offset), (options.seconds, ready, results)
        workers = [_processes.Process(target=work, args=(side, side.new_topic(), *arguments)) for _ in range(count)]
        with _running(workers):
            done = [results.get(timeout=ANSWER_TIMEOUT_SECONDS) for _ in workers]
        transactions = sum(number for number, _ in done)
        what = f"one record{' and an offset' if has_offset else ''} a transaction, {count} at once"
        reach = 1.5 if side.name == "PostgreSQL" and count > 1 else 2.0
        yield Figure(what, "transactions/s", transactions / options.seconds, reach=reach)
        cpu_ms = sum(cpu_seconds for _, cpu_seconds in done) / transactions * 1_000
        yield Figure(f"{what}: CPU of the clients", "ms/transaction", cpu_ms, is_rate=False)


@contextmanager
def _running(workers: list[Any]) -> Iterator[None]:
    for worker in workers:
        worker.start()
    try:
        yield
    except BaseException:
        for worker in workers:
            worker.terminate()
        raise
    finally:
        for worker in workers:
            worker.join(ANSWER_TIMEOUT_SECONDS)


# --- delays, and others beside ----------------------------------------------------------------------------------------


def _receiver(side: Side, topic: str, count: int, ready: Any, results: Any) -> None:
    consumer = side.consumer(auto_offset_reset="earliest", isolation_level="read_committed")
    consumer.assign([side.partition(topic, 0)])
    consumer.poll(1)
    ready.set()
    delays_ns = []
    for _ in range(count):
        value = _checked(consumer.poll(ANSWER_TIMEOUT_SECONDS))
        delays_ns.append(time.monotonic_ns() - int(value))
    results.put(delays_ns)
    consumer.close()


def delay(side: Side, options: argparse.Namespace) -> Iterator[Figure]:
    """From before produce() to out of poll() in another process, a record at a time."""
    for in_transactions in (False, True):
        topic, ready, results = side.new_topic(), _processes.Event(), _processes.Queue()
        receiver = _processes.Process(target=_receiver, args=(side, topic, options.delays, ready, results))
        with _running([receiver]):
            ready.wait(ANSWER_TIMEOUT_SECONDS)
            producer = side.transactional_producer() if in_transactions else side.producer(linger_ms=0)
            for _ in range(options.delays):
                if in_transactions:
                    producer.begin_transaction()
                producer.produce(topic, str(time.monotonic_ns()))
                if in_transactions:
                    producer.commit_transaction(ANSWER_TIMEOUT_SECONDS)
                else:
                    producer.flush(ANSWER_TIMEOUT_SECONDS)
                time.sleep(BETWEEN_RECORDS_SECONDS)
            delays_ns = results.get(timeout=ANSWER_TIMEOUT_SECONDS)
        what = f"produce() to poll() elsewhere{', in a transaction' if in_transactions else ''}, median"
        yield Figure(what, "ms", statistics.median(delays_ns) / 1e6, is_rate=False, reach=1.0)


def _idle_worker(side: Side, topic: str, ready: Any, stop: Any, results: Any) -> None:
    consumer = side.consumer(auto_offset_reset="latest")
    consumer.assign([side.partition(topic)])
    consumer.poll(0.5)
    ready.release()
    begun_cpu, begun = time.process_time(), time.perf_counter()
    while not stop.is_set():
        consumer.poll(0.2)
    results.put((time.process_time() - begun_cpu) / (time.perf_counter() - begun))
    consumer.close()


def idle(side: Side, options: argparse.Namespace) -> Iterator[Figure]:
    """A producer of small transactions beside consumers of another topic that have nothing to read."""
    other = side.new_topic()
    alone: float | None = None
    for count in (0, *options.idle):
        ready, stop, results = _processes.Semaphore(0), _processes.Event(), _processes.Queue()
        workers = [
            _processes.Process(target=_idle_worker, args=(side, other, ready, stop, results)) for _ in range(count)
        ]
        with _running(workers):
            for _ in workers:
                ready.acquire(timeout=ANSWER_TIMEOUT_SECONDS)
            transactions, _ = _repeat(
                partial(_transact, side.transactional_producer(), side.new_topic()), options.seconds
            )
            stop.set()
            shares = [results.get(timeout=ANSWER_TIMEOUT_SECONDS) for _ in workers]
        rate = transactions / options.seconds
        alone = alone or rate
        if count:
            what = f"a producer beside {count} idle consumers of another topic"
            yield Figure(what, "x alone", rate / alone, reach=0.9, is_compared=False)
            percent = 100 * sum(shares) / count
            what = f"each of {count} idle consumers"
            yield Figure(what, "% of a core", percent, is_rate=False, reach=0.5, is_compared=False)


# --- the whole --------------------------------------------------------------------------------------------------------

MEASURES: Final[Mapping[str, Callable[[Side, argparse.Namespace], Any]]] = {
    "bulk": bulk,
    "small": small,
    "delay": delay,
    "idle": idle,
}


def measure(sides: list[Side], options: argparse.Namespace) -> list[Row]:
    """Run all rounds, in which the sides take turns, and compare their medians."""
    found: dict[str, dict[str, list[Figure]]] = {}
    for name in options.only or MEASURES:
        for number in range(options.rounds):
            first = number % len(sides)
            for side in (*sides[first:], *sides[:first]):
                print(f"round {number + 1} of {options.rounds}: {name}, {side.name}", file=sys.stderr)
                for figure in MEASURES[name](side, options):
                    found.setdefault(figure.what, {}).setdefault(side.name, []).append(figure)
    return [
        _row(side.name, of_side[side.name], of_side.get(KAFKA))
        for of_side in found.values()
        for side in sides
        if side.name in of_side
    ]


def _row(side: str, figures: list[Figure], kafkas: list[Figure] | None) -> Row:
    values = [figure.value for figure in figures]
    median, figure = statistics.median(values), figures[0]
    ratio = None
    if kafkas is not None and side != KAFKA:
        ratio = median / statistics.median(kafka.value for kafka in kafkas)
    reach, reached = "", True
    measured = ratio if figure.is_compared else median
    if side != KAFKA and measured is not None and figure.reach is not None:
        reach = f"{'>=' if figure.is_rate else '<='} {figure.reach} {'x Kafka' if figure.is_compared else figure.unit}"
        reached = measured >= figure.reach if figure.is_rate else measured <= figure.reach
    return Row(side, figure.what, figure.unit, median, min(values), max(values), ratio, reach, reached)


def show(rows: list[Row]) -> None:
    """Print the results as a table."""
    table = Table(title=f"txnstore beside Kafka ({platform.machine()}, Python {platform.python_version()})")
    for heading in ("what", "side", "median", "from", "to", "unit", "to Kafka's", "to reach", "reached"):
        table.add_column(heading, justify="right" if heading in {"median", "from", "to", "to Kafka's"} else "left")
    for row in rows:
        numbers = [
            f"{number:,.0f}" if number >= MANY else f"{number:.2f}"
            for number in (row.median, row.smallest, row.largest)
        ]
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.what, row.side, *numbers, row.unit, ratio, row.reach, "" if row.reached else "no")
    Console(width=170).print(table)


def main() -> int:
    """Run the measurements that the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], action="append", help="only this one")
    parser.add_argument("--only", choices=list(MEASURES), action="append", help="only this measurement")
    parser.add_argument("--without-kafka", action="store_true", help="measure txnstore alone")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each measurement (3)")
    parser.add_argument("--records", type=int, default=200_000, help="records of a bulk (200,000)")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long small transactions are repeated (4)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8], help="producers at once (1 2 4 8)")
    parser.add_argument("--idle", type=int, nargs="+", default=[4, 16], help="idle consumers (4 16)")
    parser.add_argument("--delays", type=int, default=300, help="records whose delay is measured (300)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    with databases(options.database or ["sqlite", "postgresql"]) as urls:
        names = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}
        sides = [Side(names[name], "txnstore", url) for name, url in urls]
        if options.without_kafka:
            rows = measure(sides, options)
        else:
            try:
                broker = KafkaBroker.as_users_run_it()
            except NoKafkaError as error:
                print(f"No Kafka: {' '.join(str(error).split())}")
                return UNAVAILABLE
            with closing(broker):
                kafka = Side(KAFKA, "confluent_kafka", broker.bootstrap, {"retry.backoff.ms": 1})
                rows = measure([kafka, *sides], options)
    show(rows)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

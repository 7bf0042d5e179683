"""Those who wait: how long a record takes to a consumer elsewhere, and what consumers with nothing to read cost."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final

from scripts.comparison import floors
from scripts.comparison.figures import Figure
from scripts.comparison.raw_clients import DRIVER, Reader, sender
from scripts.comparison.sides import ANSWER_TIMEOUT_SECONDS, SETTLING_SECONDS, Side, checked, processes, running
from scripts.comparison.small import repeat, transact
from scripts.comparison.wakeups import wakeups

BETWEEN_RECORDS_SECONDS: Final = 0.005


def _consumer(side: Side, topic: str) -> Any:
    consumer = side.consumer(auto_offset_reset="earliest", isolation_level="read_committed")
    consumer.assign([side.partition(topic, 0)])
    return consumer


@contextmanager
def _producer(side: Side, topic: str, *, in_transactions: bool) -> Iterator[Callable[[str], object]]:
    producer = side.transactional_producer() if in_transactions else side.producer(linger_ms=0)

    def send(value: str) -> None:
        if in_transactions:
            producer.begin_transaction()
        producer.produce(topic, value)
        if in_transactions:
            producer.commit_transaction(ANSWER_TIMEOUT_SECONDS)
        else:
            producer.flush(ANSWER_TIMEOUT_SECONDS)

    yield send


def _receiver(opened: Callable[[], Any], count: int, ready: Any, results: Any) -> None:
    consumer = opened()
    consumer.poll(1)
    ready.set()
    delays_ns = []
    for _ in range(count):
        value = checked(consumer.poll(ANSWER_TIMEOUT_SECONDS))
        delays_ns.append(time.monotonic_ns() - int(value))
    results.put(delays_ns)
    consumer.close()


def delay(side: Side, options: argparse.Namespace) -> Iterator[Figure]:
    """From before produce() to out of poll() in another process, a record at a time."""
    for in_transactions in (False, True):
        topic, rows_ms = side.new_topic(), {}
        for way in wakeups(side) if side.is_ours else ():
            floors.make_tables(side)
            of_way = partial(sender, side, way, in_transactions=in_transactions)
            rows_ms[way] = _median_ms(partial(Reader, side, 0, way), of_way, options.delays)
        of_client = partial(_producer, side, topic, in_transactions=in_transactions)
        median_ms = _median_ms(partial(_consumer, side, topic), of_client, options.delays)
        what = f"produce() to poll() elsewhere{', in a transaction' if in_transactions else ''}, median"
        yield Figure(what, "ms", median_ms, is_rate=False, reach=1.0, floors=rows_ms)


def _median_ms(
    consumer: Callable[[], Any], producer: Callable[[], AbstractContextManager[Callable[[str], object]]], count: int
) -> float:
    ready, results = processes.Event(), processes.Queue()
    with running([processes.Process(target=_receiver, args=(consumer, count, ready, results))]):
        assert ready.wait(ANSWER_TIMEOUT_SECONDS), "the receiver did not begin"
        with producer() as send:
            for _ in range(count):
                send(str(time.monotonic_ns()))
                time.sleep(BETWEEN_RECORDS_SECONDS)
        delays_ns: list[int] = results.get(timeout=ANSWER_TIMEOUT_SECONDS)
    return statistics.median(delays_ns) / 1e6


def _idle_consumer(side: Side, topic: str) -> Any:
    consumer = side.consumer(auto_offset_reset="latest")
    consumer.assign([side.partition(topic)])
    # Connected, with all that it imports for that: a poll() does not say so.
    consumer.get_watermark_offsets(side.partition(topic), ANSWER_TIMEOUT_SECONDS)
    return consumer


def _idle_worker(opened: Callable[[], Any], ready: Any, begin: Any, stop: Any, results: Any) -> None:
    consumer = opened()
    consumer.poll(0.5)
    ready.release()
    while not begin.is_set():
        consumer.poll(0.2)
    begun_cpu, begun = time.process_time(), time.perf_counter()
    while not stop.is_set():
        consumer.poll(0.2)
    results.put((time.process_time() - begun_cpu) / (time.perf_counter() - begun))
    consumer.close()


def idle(side: Side, options: argparse.Namespace) -> Iterator[Figure]:
    """A producer of small transactions beside consumers of another topic that have nothing to read."""
    consumer = partial(_idle_consumer, side, side.new_topic())
    for count in options.idle:
        rates, percents = {}, {}
        alone, _ = _beside(side, consumer, 0, options.seconds)
        if side.is_ours:
            floors.make_tables(side)
            reader = partial(Reader, side, 0, next(iter(wakeups(side))))
            rate, percents[DRIVER] = _beside(side, reader, count, options.seconds)
            rates[DRIVER] = rate / alone
        rate, percent = _beside(side, consumer, count, options.seconds)
        what = f"a producer beside {count} idle consumers of another topic"
        yield Figure(what, "x alone", rate / alone, reach=0.9, is_compared=False, floors=rates)
        what = f"each of {count} idle consumers"
        yield Figure(what, "% of a core", percent, is_rate=False, reach=0.5, is_compared=False, floors=percents)


def _beside(side: Side, opened: Callable[[], Any], count: int, seconds: float) -> tuple[float, float]:
    """Return the transactions a second of a client beside those who wait, and what each of them takes of a core."""
    ready, begin, stop, results = processes.Semaphore(0), processes.Event(), processes.Event(), processes.Queue()
    shared = ready, begin, stop, results
    workers = [processes.Process(target=_idle_worker, args=(opened, *shared)) for _ in range(count)]
    with running(workers):
        for _ in workers:
            assert ready.acquire(timeout=ANSWER_TIMEOUT_SECONDS), "a consumer did not begin"
        # What the last one still has to do is not idle, and the start of a hundred takes all of the machine.
        time.sleep(SETTLING_SECONDS if count else 0.0)
        begin.set()
        transactions, taken_seconds, _ = repeat(
            partial(transact, side.transactional_producer(), side.new_topic()), seconds
        )
        stop.set()
        shares = [results.get(timeout=ANSWER_TIMEOUT_SECONDS) for _ in workers]
    return transactions / taken_seconds, 100 * sum(shares) / max(1, count)

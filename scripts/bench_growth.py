"""Measure how speed changes while a store grows: records in it, partitions of a topic, open transactions beside.

At each size: produce() with delivery reports and poll() in records a second, and transactions of one record a second.
The sides take turns at each size; figures are medians over the rounds.  Kafka is measured beside all but the open
transactions, for which it takes a client each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from scripts.bench_support import VALUE, number, print_table, records
from scripts.comparison.alternation import arguments_of_sides, measure_sides
from scripts.comparison.bulk import receive, send
from scripts.comparison.sides import ANSWER_TIMEOUT_SECONDS, KAFKA, Side, checked, new_name, processes
from scripts.comparison.small import repeat, transact
from txnstore.db.opening import open_store
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.log.topics import get_topic
from txnstore.transactions.coordinator import TransactionCoordinator

PRODUCE: Final = "produce(), records/s"
POLL: Final = "poll(), records/s"
TRANSACT: Final = "one record a transaction, transactions/s"
#: As long as a store lets a transaction be open: longer than its curve takes.
OPEN_MS: Final = 900_000


@dataclass(frozen=True)
class Point:
    """One figure at one size on one side."""

    grows: str
    what: str
    side: str
    size: int
    median: float
    smallest: float
    largest: float


def _measured(side: Side, topic: str, partitions: int, options: argparse.Namespace, begin: int) -> dict[str, float]:
    """Produce, poll as many records as were produced, and commit small transactions; return the rates."""
    count = options.records_measured
    producer = side.producer()
    # The first request to each partition asks where it is.
    _spread(producer, topic, partitions, partitions)
    begun = time.perf_counter()
    _spread(producer, topic, count, partitions)
    produced = count / (time.perf_counter() - begun)
    consumer = side.consumer(auto_offset_reset="earliest", isolation_level="read_committed")
    with closing(consumer):
        consumer.assign([side.partition(topic, begin, number=each) for each in range(partitions)])
        checked(consumer.poll(ANSWER_TIMEOUT_SECONDS))
        polled = receive(consumer, count - 1, None)
    transactions, taken_seconds, _ = repeat(partial(transact, side.transactional_producer(), topic), options.seconds)
    return {PRODUCE: produced, POLL: polled, TRANSACT: transactions / taken_seconds}


def _spread(producer: Any, topic: str, count: int, partitions: int) -> None:
    """Produce records to the partitions in turn, with a callback for each; return when all have been delivered."""
    delivered = [0]

    def on_delivery(error: Any, _: Any) -> None:
        delivered[0] += error is None

    for place in range(count):
        while True:
            try:
                producer.produce(topic, VALUE, partition=place % partitions, on_delivery=on_delivery)
                break
            except BufferError:
                producer.poll(0.01)
        if place % 100 == 0:
            producer.poll(0)
    producer.flush(ANSWER_TIMEOUT_SECONDS)
    assert delivered[0] == count, f"{delivered[0]} of {count} records were delivered"


def _fill(side: Side, topic: str, count: int) -> None:
    send(side.producer(), topic, count, in_transactions=False)


def _of_records(side: Side, options: argparse.Namespace) -> Iterator[tuple[int, dict[str, float]]]:
    """A topic that has more and more records; what is polled lies in the middle."""
    topic, filled = side.new_topic(), 0
    for size in options.records:
        _apart(_fill, side, topic, size - filled)
        filled = size
        for _ in range(options.rounds):
            yield size, _apart(_measured, side, topic, 1, options, max(0, size // 2 - options.records_measured))
            filled += options.records_measured + 1


def _of_partitions(side: Side, options: argparse.Namespace) -> Iterator[tuple[int, dict[str, float]]]:
    """Topics of more and more partitions, all of which are written to and read."""
    for size in options.partitions:
        for _ in range(options.rounds):
            yield size, _apart(_measured, side, side.new_topic(size), size, options, 0)


def _of_open_transactions(side: Side, options: argparse.Namespace) -> Iterator[tuple[int, dict[str, float]]]:
    """A partition with more and more open transactions behind the records that are polled."""
    if side.name == KAFKA:
        return
    topic, is_open = side.new_topic(), 0
    _apart(_fill, side, topic, options.records_measured + 1)
    for size in options.open:
        _apart(_open, side, topic, is_open, size)
        is_open = size
        for _ in range(options.rounds):
            yield size, _apart(_measured, side, topic, 1, options, 0)


def _open(side: Side, topic: str, begin: int, end: int) -> None:
    with open_store(side.url) as store:
        coordinator = TransactionCoordinator(store)
        partition_id = store.read(lambda connection: get_topic(connection, topic)).partition_ids[0]
        for _ in range(begin, end):
            transactional_id = new_name()
            producer = coordinator.init_producer_id(transactional_id, OPEN_MS).identity
            batch = encode(records(1), producer=producer, base_sequence=0, is_transactional=True)
            coordinator.append(transactional_id, producer, [Append(partition_id, batch)])


def _apart(work: Callable[..., Any], *given: Any) -> Any:
    """Return what it returns in a process of its own."""
    with processes.Pool(1) as pool:
        return pool.apply(work, given)


KINDS: Final[Mapping[str, Callable[[Side, argparse.Namespace], Iterator[tuple[int, dict[str, float]]]]]] = {
    "records in the store": _of_records,
    "partitions of the topic": _of_partitions,
    "open transactions": _of_open_transactions,
}


def grow(sides: Sequence[Side], options: argparse.Namespace) -> list[Point]:
    """Measure everything at all sizes; at each, the sides take turns."""
    found: dict[tuple[str, str, str, int], list[float]] = {}
    for grows, measure in KINDS.items():
        if options.only and not any(each in grows for each in options.only):
            continue
        for turn in zip_longest(*(measure(side, options) for side in sides)):
            for side, measured in zip(sides, turn, strict=True):
                if measured is not None:
                    size, rates = measured
                    print(f"{size:,} {grows}: {side.name}", file=sys.stderr)
                    for what, rate in rates.items():
                        found.setdefault((grows, what, side.name, size), []).append(rate)
    return [Point(*key, statistics.median(rates), min(rates), max(rates)) for key, rates in found.items()]


def show(points: Sequence[Point]) -> None:
    """Print the points as a table."""
    smallest = {(point.grows, point.what, point.side): point.median for point in reversed(points)}
    print_table(
        "txnstore while a store grows",
        ("what grows", "to", "what", "side", "median", "from", "to", "x the smallest size"),
        [
            (
                point.grows,
                f"{point.size:,}",
                point.what,
                point.side,
                *(number(value) for value in (point.median, point.smallest, point.largest)),
                f"{point.median / smallest[point.grows, point.what, point.side]:.2f}",
            )
            for point in points
        ],
        numbers={"to", "median", "from", "x the smallest size"},
    )


def draw(points: Sequence[Point], folder: Path) -> None:
    """Draw a file of curves for each thing that grows."""
    # It takes longer to import than the rest together.
    from scripts.comparison.plots import Curve, draw_curves

    for grows in dict.fromkeys(point.grows for point in points):
        of = [point for point in points if point.grows == grows]
        panels = {
            what: [
                Curve(side, [(each.size, each.median) for each in of if (each.what, each.side) == (what, side)])
                for side in dict.fromkeys(each.side for each in of)
            ]
            for what in dict.fromkeys(each.what for each in of)
        }
        draw_curves(grows, panels, folder / f"growth-{grows.split()[0]}.svg")


def arguments() -> argparse.ArgumentParser:
    """Return what the command line may say."""
    parser = arguments_of_sides("scripts/bench-growth", __doc__)
    parser.add_argument("--only", choices=["records", "partitions", "open"], action="append", help="only this growth")
    parser.add_argument("--rounds", type=int, default=1, help="rounds at each size (1)")
    parser.add_argument(
        "--records",
        type=int,
        nargs="+",
        default=[10**4, 10**5, 10**6],
        help="records in the store (10000 100000 1000000)",
    )
    parser.add_argument(
        "--partitions", type=int, nargs="+", default=[1, 10, 100, 1_000], help="partitions of the topic (1 10 100 1000)"
    )
    parser.add_argument(
        "--open", type=int, nargs="+", default=[1, 10, 100, 1_000], help="open transactions (1 10 100 1000)"
    )
    parser.add_argument("--records-measured", type=int, default=50_000, help="records of a measurement (50,000)")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long small transactions are repeated (2)")
    return parser


def main() -> int:
    """Run the measurements that the command line asks for; return the exit code."""
    return measure_sides(arguments(), "points", run=grow, show=show, draw=draw)


if __name__ == "__main__":
    sys.exit(main())

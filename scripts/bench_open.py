"""Measure how long committed records take to a reader elsewhere while another producer's transaction is open.

One producer commits a record at a time.  Another one has a record in the same partition, in a transaction that it
leaves open all the while and commits at last.  A reader in a process of its own notes how long each record was on its
way, from before `begin_transaction()`: in offset order, which is Kafka's, and in commit order, each without the open
transaction and beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scripts.bench_support import number, print_table
from scripts.comparison.alternation import arguments_of_sides, measure_sides
from scripts.comparison.sides import ANSWER_TIMEOUT_SECONDS, Side, new_name, processes, running

BETWEEN_RECORDS_SECONDS: Final = 0.05
#: As long as Kafka and a store let a transaction be open.
OPEN_MS: Final = 900_000
OPEN: Final = b"open"
END: Final = b"end"
OFFSET: Final = "offset"
COMMIT: Final = "commit"
#: How much longer the slowest of a hundred may take beside the open transaction.
REACH: Final = 1.25
_NS_PER_SECOND: Final = 10**9


@dataclass(frozen=True)
class Delays:
    """How long the records of one run took, in milliseconds, by the second in which each was sent."""

    side: str
    order: str
    is_open: bool
    by_seconds: Sequence[tuple[float, float]]

    def percentile_ms(self, percent: int) -> float:
        """Return what so many of a hundred records did not exceed."""
        delays = [delay for _, delay in self.by_seconds]
        return statistics.quantiles(delays, n=100, method="inclusive")[percent - 1]

    def each_second(self) -> list[tuple[float, float]]:
        """Return the longest delay of each second in which a record was sent."""
        longest: dict[int, float] = {}
        for second, delay in self.by_seconds:
            longest[int(second)] = max(delay, longest.get(int(second), 0.0))
        return list(longest.items())


def _receiver(side: Side, topic: str, order: str, ready: Any, results: Any) -> None:
    more = {"txnstore_delivery_order": order} if side.is_ours else {}
    with closing(side.consumer(auto_offset_reset="earliest", isolation_level="read_committed", **more)) as consumer:
        consumer.assign([side.partition(topic, 0)])
        consumer.poll(1)
        ready.set()
        noted: list[tuple[int, int]] = []
        while True:
            message = consumer.poll(ANSWER_TIMEOUT_SECONDS)
            assert message is not None, "no record came"
            assert message.error() is None, message.error()
            value = message.value()
            if value == END:
                break
            if value != OPEN:
                noted.append((int(value), time.monotonic_ns()))
    results.put(noted)


def _send(producer: Any, topic: str, value: bytes) -> None:
    producer.begin_transaction()
    producer.produce(topic, value)
    producer.commit_transaction(ANSWER_TIMEOUT_SECONDS)


def measure(side: Side, order: str, seconds: float, *, is_open: bool) -> Delays:
    """Send records for so long; return how long they took."""
    topic = side.new_topic()
    ready, results = processes.Event(), processes.Queue()
    with running([processes.Process(target=_receiver, args=(side, topic, order, ready, results))]):
        assert ready.wait(ANSWER_TIMEOUT_SECONDS), "the receiver did not begin"
        producer = side.transactional_producer()
        other = side.producer(transactional_id=new_name(), transaction_timeout_ms=OPEN_MS, linger_ms=0)
        other.init_transactions(ANSWER_TIMEOUT_SECONDS)
        if is_open:
            other.begin_transaction()
            other.produce(topic, OPEN)
            other.flush(ANSWER_TIMEOUT_SECONDS)
        begun_ns = time.monotonic_ns()
        while (now_ns := time.monotonic_ns()) - begun_ns < seconds * _NS_PER_SECOND:
            _send(producer, topic, str(now_ns).encode())
            time.sleep(BETWEEN_RECORDS_SECONDS)
        if is_open:
            other.commit_transaction(ANSWER_TIMEOUT_SECONDS)
        _send(producer, topic, END)
        noted: list[tuple[int, int]] = results.get(timeout=ANSWER_TIMEOUT_SECONDS)
    by_seconds = [((sent_ns - begun_ns) / _NS_PER_SECOND, (came_ns - sent_ns) / 1e6) for sent_ns, came_ns in noted]
    return Delays(side.name, order, is_open, by_seconds)


def run(sides: Sequence[Side], options: argparse.Namespace) -> list[Delays]:
    """Measure each order of each side without the open transaction, and beside it."""
    found = []
    for side in sides:
        for order in (OFFSET, COMMIT) if side.is_ours else (OFFSET,):
            for is_open in (False, True):
                print(f"{side.name}: {order} order{', beside an open transaction' * is_open}", file=sys.stderr)
                found.append(measure(side, order, options.seconds, is_open=is_open))
    return found


def show(found: Sequence[Delays]) -> None:
    """Print how long records took, and how much longer beside the open transaction."""
    alone = {(each.side, each.order): each.percentile_ms(99) for each in found if not each.is_open}

    def ratio(each: Delays) -> str:
        if not each.is_open:
            return ""
        value = each.percentile_ms(99) / alone[each.side, each.order]
        return f"{number(value)}{' !' * (each.order == COMMIT and value > REACH)}"

    print_table(
        "from begin_transaction() to poll() elsewhere, ms",
        (
            "side",
            "order",
            "another transaction",
            "records",
            "median",
            "99 of 100",
            "longest",
            "99 of 100, x without it",
        ),
        [
            (
                each.side,
                each.order,
                "open" if each.is_open else "",
                number(len(each.by_seconds)),
                *(number(each.percentile_ms(percent)) for percent in (50, 99)),
                number(max(delay for _, delay in each.by_seconds)),
                ratio(each),
            )
            for each in found
        ],
        numbers={"records", "median", "99 of 100", "longest", "99 of 100, x without it"},
    )


def draw(found: Sequence[Delays], folder: Path) -> None:
    """Draw how long records took beside the open transaction, in each order."""
    # It takes longer to import than the rest together.
    from scripts.comparison.plots import Curve, draw_curves

    panels = {
        f"{order} order, the longest of each second, ms": [
            Curve(each.side, each.each_second()) for each in found if each.is_open and each.order == order
        ]
        for order in (OFFSET, COMMIT)
    }
    draw_curves("seconds since another transaction began", panels, folder / "open.svg", by_tens=False)


def arguments() -> argparse.ArgumentParser:
    """Return what the command line may say."""
    parser = arguments_of_sides("scripts/bench-open", __doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the transaction is open (60)")
    return parser


def main() -> int:
    """Run the measurements that the command line asks for; return the exit code."""
    return measure_sides(arguments(), "delays", run=run, show=show, draw=draw)


if __name__ == "__main__":
    sys.exit(main())

"""What rebalances cost: how long members of a group that all poll are without partitions when one comes or leaves."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

from scripts.bench_support import Bench, Result
from txnstore import Consumer
from txnstore.admin import AdminClient, NewTopic

PARTITIONS = 6
GOAL_SECONDS = 0.2
PATIENCE_SECONDS = 30.0


class PollingMember:
    """A consumer that polls in a tight loop, in a thread of its own."""

    def __init__(self, url: str, group_id: str, topic: str, changed: threading.Condition) -> None:
        """Join at once."""
        self._changed = changed
        self._owned: set[int] = set()
        self.told_at = 0.0
        self._is_over = threading.Event()
        self._consumer = Consumer(
            {"bootstrap.servers": url, "group.id": group_id, "partition.assignment.strategy": "cooperative-sticky"}
        )
        self.joined_at = time.perf_counter()
        self._consumer.subscribe([topic], on_assign=self._assigned, on_revoke=self._revoked)
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()

    @property
    def count(self) -> int:
        """How many partitions it has."""
        return len(self._owned)

    def _poll(self) -> None:
        while not self._is_over.is_set():
            self._consumer.poll(0.02)

    def _assigned(self, _: object, partitions: list[Any]) -> None:
        with self._changed:
            self._owned |= {partition.partition for partition in partitions}
            self.told_at = time.perf_counter()
            self._changed.notify_all()

    def _revoked(self, _: object, partitions: list[Any]) -> None:
        with self._changed:
            self._owned -= {partition.partition for partition in partitions}

    def leave(self) -> float:
        """Leave the group; return when that began."""
        self._is_over.set()
        self._thread.join()
        left_at = time.perf_counter()
        self._consumer.close()
        return left_at


def bench_rebalances(bench: Bench) -> Iterator[Result]:
    """From subscribe() or close() to the moment at which everybody has its new share, against the goal."""
    topic, group_id = "bench-groups", "bench-groups"
    AdminClient({"bootstrap.servers": bench.url}).create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(
        PATIENCE_SECONDS
    )
    changed = threading.Condition()

    def settle(*members: PollingMember) -> float:
        share = PARTITIONS // len(members)
        with changed:
            assert changed.wait_for(lambda: all(each.count == share for each in members), PATIENCE_SECONDS)
            return max(each.told_at for each in members)

    seconds: dict[str, list[float]] = {"join": [], "leave": []}
    first = PollingMember(bench.url, group_id, topic, changed)
    try:
        settle(first)
        for _ in range(bench.rounds):
            second = PollingMember(bench.url, group_id, topic, changed)
            try:
                seconds["join"].append(settle(first, second) - second.joined_at)
            finally:
                left_at = second.leave()
            seconds["leave"].append(settle(first) - left_at)
    finally:
        first.leave()
    for what, times in seconds.items():
        yield bench.latency(
            (f"{what} of a member, median", "the goal"), 1, (statistics.median(times), GOAL_SECONDS), reach=1.0
        )
        yield bench.latency((f"{what} of a member, slowest", "the goal"), 1, (max(times), GOAL_SECONDS), reach=1.0)


BENCHES = (bench_rebalances,)

"""The members of one group, a process each: how soon all are assigned, what they cost then, how soon all are gone."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from scripts.comparison import floors
from scripts.comparison.figures import Figure
from scripts.comparison.raw_clients import DRIVER, Member
from scripts.comparison.sides import ANSWER_TIMEOUT_SECONDS, SETTLING_SECONDS, Side, new_name, processes, running

POLL_SECONDS: Final = 0.1
LOOK_SECONDS: Final = 0.005


def _member(opened: Callable[[], Any], topic: str, place: int, shared: dict[str, Any]) -> None:
    consumer = opened()
    shared["ready"].release()
    shared["begin"].wait(ANSWER_TIMEOUT_SECONDS)
    consumer.subscribe([topic])
    while not shared["stop"].is_set():
        consumer.poll(POLL_SECONDS)
        shared["assigned"][place] = len(consumer.assignment())
        shared["cpu_seconds"][place] = time.process_time()
    # What is left of the last poll() is not the time that closing takes.
    shared["leave"].wait(ANSWER_TIMEOUT_SECONDS)
    begun = time.monotonic()
    consumer.close()
    shared["closed"].put((begun, time.monotonic()))


def _together(opened: Callable[[], Any], topic: str, count: int, seconds: float) -> tuple[float, float, float]:
    """Return the seconds until all are assigned, what each takes of a core then, and the seconds until all are gone."""
    shared: dict[str, Any] = {
        "ready": processes.Semaphore(0),
        "begin": processes.Event(),
        "stop": processes.Event(),
        "leave": processes.Barrier(count),
        "closed": processes.Queue(),
        "assigned": processes.Array("i", count),
        "cpu_seconds": processes.Array("d", count),
    }
    workers = [processes.Process(target=_member, args=(opened, topic, place, shared)) for place in range(count)]
    with running(workers):
        for _ in workers:
            assert shared["ready"].acquire(timeout=ANSWER_TIMEOUT_SECONDS), "a member did not begin"
        begun = time.monotonic()
        shared["begin"].set()
        while list(shared["assigned"]) != [1] * count:
            assert time.monotonic() < begun + ANSWER_TIMEOUT_SECONDS, list(shared["assigned"])
            time.sleep(LOOK_SECONDS)
        assigned_seconds = time.monotonic() - begun
        # What the last rebalance still has to do is not idle, nor is a first look at the maintenance.
        time.sleep(SETTLING_SECONDS)
        cpu_begun, idle_begun = sum(shared["cpu_seconds"]), time.monotonic()
        time.sleep(seconds)
        share = (sum(shared["cpu_seconds"]) - cpu_begun) / (time.monotonic() - idle_begun) / count
        shared["stop"].set()
        closed = [shared["closed"].get(timeout=ANSWER_TIMEOUT_SECONDS) for _ in workers]
    closed_seconds = max(end for _, end in closed) - min(begin for begin, _ in closed)
    return assigned_seconds, 100 * share, closed_seconds


def group(side: Side, options: argparse.Namespace) -> Iterator[Figure]:
    """A member for each partition of a topic; all subscribe at the same moment, and close at the same moment."""
    count = options.members
    topic, name = side.new_topic(count), new_name()
    by_driver: list[dict[str, float]] = [{}, {}, {}]
    if side.is_ours:
        floors.make_tables(side)
        floors.make_group(side, name)
        of_driver = _together(partial(Member, side, name, count), topic, count, options.seconds)
        by_driver = [{DRIVER: value} for value in of_driver]
    assigned, idle, closed = _together(partial(side.consumer, group_id=name), topic, count, options.seconds)
    what = f"{count} members of a group"
    yield Figure(f"{what}: until all are assigned", "s", assigned, is_rate=False, reach=1.0, floors=by_driver[0])
    yield Figure(
        f"{what}: each, idle",
        "% of a core",
        idle,
        is_rate=False,
        reach=0.5,
        is_compared=False,
        floors=by_driver[1],
    )
    yield Figure(f"{what}: until all are closed", "s", closed, is_rate=False, reach=1.0, floors=by_driver[2])

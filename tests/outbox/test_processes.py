"""Processes that are killed (SIGKILL): callers that commit and roll back, two sequencers, and a reader beside them.

Afterwards every business row that was committed has exactly one record and no record is without its row (O1), the
versions of each aggregate are in order (O2); and at every moment a reader sees all of a caller's transaction or none.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.outbox import children
from tests.outbox.conftest import plain_connection
from tests.outbox.steps import records, refusals, waiting
from tests.tools.fork_server import fork_server
from txnstore.db.opening import open_store
from txnstore.db.store import Store
from txnstore.log.outbox.sequencer import drain_outbox
from txnstore.log.topics import create_topic
from txnstore.testing.invariants import assert_sound

SECONDS = 3.0
PARTITIONS = 3

Records = list[dict[str, Any]]


def read_all(store: Store) -> list[Records]:
    """Return what each partition holds, all in one snapshot."""
    return [[json.loads(record.value or b"") for record in partition] for partition in records(store, *children.TOPICS)]


def assert_whole(held: list[Records]) -> None:
    """All records of a caller's transaction are there, or none."""
    totals = {record["tag"]: record["total"] for partition in held for record in partition}
    assert Counter(record["tag"] for partition in held for record in partition) == totals


class Reader(threading.Thread):
    """Looks again and again, and remembers what it should not have seen."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.stopped = threading.Event()
        self.looks = 0
        self.has_seen_records = threading.Event()
        self.seen: BaseException | None = None

    def run(self) -> None:
        with open_store(self.url) as store:
            while not self.stopped.wait(0.02):
                self.looks += 1
                try:
                    held = read_all(store)
                    assert_whole(held)
                    if any(held):
                        self.has_seen_records.set()
                except BaseException as error:  # noqa: BLE001 - the test says it
                    self.seen = error
                    return


class Crew:
    """Processes by name, killed and started again."""

    def __init__(self, url: str, rows_max: int, random_: random.Random) -> None:
        self.url = url
        self.rows_max = rows_max
        self.random = random_
        self.running: dict[str, Any] = {}
        self.kills: Counter[str] = Counter()
        self.context = fork_server()

    def start(self, name: str) -> None:
        target: Any = children.sequence
        arguments: tuple[Any, ...] = (self.url, self.rows_max)
        if name.startswith("caller"):
            target = children.call
            arguments = (self.url, f"{name}-{self.random.randrange(2**40)}", self.random.randrange(2**32))
        self.running[name] = self.context.Process(target=target, args=arguments, daemon=True)
        self.running[name].start()

    def kill(self, name: str) -> None:
        self.running[name].kill()
        self.running[name].join(60)
        self.kills[name] += 1

    def kill_and_start_again(self, seconds: float, has_seen_records: Callable[[], bool]) -> None:
        """Go on for that long; longer, and ever more slowly, where none of them lives long enough to do its work."""
        begin = time.monotonic()
        pause = threading.Event()
        while (spent := time.monotonic() - begin) < seconds or (not has_seen_records() and spent < 60):
            pause.wait(self.random.uniform(0.05, 0.25) * max(1.0, spent / seconds))
            name = self.random.choice(["sequencer 1", "sequencer 2", "sequencer 1", "sequencer 2", "caller 1"])
            self.kill(name)
            self.start(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("txnstore_url", "rows_max"),
    [("sqlite", 5_000), ("sqlite", 3), ("postgresql", 5_000), ("postgresql", 3)],
    indirect=["txnstore_url"],
)
def test_callers_and_sequencers_that_are_killed_lose_and_double_nothing(url, rows_max):
    children.create_tables(url)
    seed = random.randrange(2**32)
    crew, reader = Crew(url, rows_max, random.Random(seed)), Reader(url)
    with open_store(url) as store:
        for name in children.TOPICS:
            store.write(lambda c, name=name: create_topic(c, name, partition_count=PARTITIONS))
        reader.start()
        try:
            for name in ("caller 1", "caller 2", "caller 3", "sequencer 1", "sequencer 2"):
                crew.start(name)
            crew.kill_and_start_again(SECONDS, lambda: reader.has_seen_records.is_set() and reader.looks > 5)
        finally:
            for name in crew.running:
                crew.kill(name)
            reader.stopped.set()
            reader.join(60)
        assert reader.seen is None, seed
        assert reader.looks > 5
        sequenced_meanwhile = sum(map(len, read_all(store)))
        drain_outbox(store)
        held = read_all(store)
        assert (waiting(store), refusals(store)) == (0, {})
        assert_whole(held)
        assert_sound(store, at_rest=True)
    assert sequenced_meanwhile > 0
    assert min(crew.kills.values()) >= 1
    logged = [record for partition in held for record in partition]
    check_accounts(url, logged, seed)
    for aggregate in range(children.AGGREGATES):
        check_versions([record for record in logged if record["aggregate"] == aggregate], seed)


def check_accounts(url: str, logged: Records, seed: int) -> None:
    """Every row has one record, and every record has its row."""
    connection = plain_connection(url)
    rows = Counter(connection.execute("SELECT tag, number, total FROM business").fetchall())
    connection.close()
    assert Counter((record["tag"], record["number"], record["total"]) for record in logged) == rows, seed
    assert len(rows) > 50


def check_versions(found: Records, seed: int) -> None:
    """The records of an aggregate, which all have its key, are in the order of its versions."""
    versions = [(record["version"], record["number"]) for record in found]
    assert versions == sorted(versions), seed
    assert len({(record["version"], record["tag"]) for record in found}) == len({number for number, _ in versions})

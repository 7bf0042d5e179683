"""The locks that maintenance holds on SQLite, measured: for how long, by duty, and how long a writer waits beside it.

`scripts/soak-maintenance --locks` does so in a store with a million batches.  What each duty is given to do is what
`test_held_locks.py` plants; the writer is a process of its own.  Times by the clock are those of a machine with all
that it does besides, so the processor time of whoever has held the lock stands beside them.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, delete, insert, select, update

from scripts.bench_support import number, print_table
from tests.maintenance import test_held_locks as planted
from tests.plans.big_store import fill
from tests.tools.elsewhere import Elsewhere
from txnstore.db import schema
from txnstore.db.backend import Access, Limits
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.opening import open_store
from txnstore.db.portions import FOUND_MAX, Portions
from txnstore.db.sqlite import connections
from txnstore.db.store import Store
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.maintenance.duties import DUTIES
from txnstore.maintenance.turns import Portion
from txnstore.model import Record

PLAIN_SQL: Final = "rows of the outbox by plain SQL"
PLAIN_ROWS: Final = 100_000
#: What there is beside the writer at first.
NOTHING: Final = "(nothing)"
BETWEEN_WRITES_SECONDS: Final = 0.001
RESTS_SECONDS: Final = 5.0
HEADINGS: Final = (
    "duty",
    "done",
    "locks",
    "longest, ms",
    "of processor, ms",
    "writes beside",
    "wait p50, ms",
    "p99, ms",
    "longest wait, ms",
)
#: All that is planted, and is not a batch.
_PLANTED: Final = (
    schema.transactions,
    schema.transaction_partitions,
    schema.transaction_groups,
    schema.transaction_writers,
    schema.transaction_writer_partitions,
    schema.transaction_log,
    schema.pending_markers,
    schema.pending_group_offsets,
    schema.group_offsets,
    schema.group_members,
    schema.groups,
    schema.offset_producers,
    schema.producer_states,
    schema.sink_batches,
    schema.sink_runs,
    schema.sink_inputs,
    schema.sink_positions,
    schema.outbox,
    schema.relay_positions,
    schema.deleted_partitions,
)
_KEPT_TOPICS: Final = {"big", "old", "states"}


@dataclass
class Holds:
    """For how many milliseconds this process has held the write lock, each time."""

    by_clock: list[float] = field(default_factory=list)
    of_processor: list[float] = field(default_factory=list)
    _began: tuple[float, float] | None = None

    def begin(self) -> None:
        """Take note that it is held from now on."""
        self._began = time.perf_counter(), time.thread_time()

    def end(self) -> None:
        """Take note that it is not any more, if it was."""
        if self._began is not None:
            self.by_clock.append((time.perf_counter() - self._began[0]) * 1_000)
            self.of_processor.append((time.thread_time() - self._began[1]) * 1_000)
            self._began = None


class NotedLocks:
    """Notes how long the one thread that writes in this process holds the write lock, and for checkpoints."""

    def __init__(self, store: Store) -> None:
        """Note that of a store; from now on, and for good."""
        self.holds, self.checkpoints = Holds(), Holds()
        kind: Any = type(store.backend)
        begin, commit, rollback = kind.begin, kind.commit, kind.rollback
        nobody_writes = connections._nobody_writes

        def noted_begin(backend: Any, connection: Connection, access: Access, limits: Limits) -> None:
            begin(backend, connection, access, limits)
            if access is Access.WRITE:
                self.holds.begin()

        def noted_end(end: Callable[[Any, Connection], None]) -> Callable[[Any, Connection], None]:
            def ended(backend: Any, connection: Connection) -> None:
                try:
                    end(backend, connection)
                finally:
                    self.holds.end()

            return ended

        @contextmanager
        def noted_checkpoint(*arguments: Any) -> Iterator[Any]:
            with nobody_writes(*arguments) as worker:
                self.checkpoints.begin()
                yield worker
            self.checkpoints.end()

        kind.begin, kind.commit, kind.rollback = noted_begin, noted_end(commit), noted_end(rollback)
        connections._nobody_writes = noted_checkpoint  # type: ignore[assignment]


def write_beside(url: str, partition_id: int, writes: Any, stop: Any, results: Any) -> None:
    """Write a batch at a time until told to stop, and send for how many milliseconds each waited for the lock."""
    waits: list[float] = []
    with open_store(url) as store:
        batch = Append(partition_id, encode([Record(b"v")]))
        while not stop.is_set():
            began = time.perf_counter()

            def work(connection: Connection, began: float = began) -> None:
                waits.append((time.perf_counter() - began) * 1_000)
                append(connection, [batch])

            store.write(work)
            writes.set()
            time.sleep(BETWEEN_WRITES_SECONDS)
    results.put(waits)


def waits_beside(url: str, partition_id: int, run: Callable[[], int]) -> tuple[list[float], int]:
    """Run something beside a writer; return how long that waited each time, and what is returned."""
    context = multiprocessing.get_context("spawn")
    writes, stop, results = context.Event(), context.Event(), context.Queue()
    writer = context.Process(target=write_beside, args=(url, partition_id, writes, stop, results))
    writer.start()
    # The first one renders the statements.
    writes.wait()
    try:
        done = run()
    finally:
        stop.set()
    waits: list[float] = results.get()[1:]
    writer.join()
    return waits, done


def rest() -> int:
    """Do nothing for a while."""
    time.sleep(RESTS_SECONDS)
    return 0


def clear(store: Store) -> None:
    """Delete what was planted for a duty; its batches stay, and its topics get other names and keep everything."""

    def work(connection: Connection) -> None:
        for table in _PLANTED:
            connection.execute(delete(table))
        for topic_id, name in connection.execute(select(schema.topics.c.topic_id, schema.topics.c.name)).all():
            if name not in _KEPT_TOPICS and not name.startswith("former-"):
                of_topic, configs = schema.topics.c.topic_id == topic_id, schema.topic_configs
                connection.execute(update(schema.topics).where(of_topic).values(name=f"former-{topic_id}"))
                connection.execute(delete(configs).where(configs.c.topic_id == topic_id))
                connection.execute(insert(configs), {"topic_id": topic_id, "name": "retention.ms", "value": "-1"})

    store.write(work)


def leave_plain_rows(connection: Connection, now_ms: int) -> None:
    """Insert rows as plain SQL does."""
    planted.new_partition(connection, "t")
    rows = [{"topic": "t", "value": b"x" * 100, "timestamp_ms": now_ms}] * PLAIN_ROWS
    connection.execute(insert(schema.outbox), rows)


def leave(plant: Callable[[Connection, int], object], at_ms: int, connection: Connection) -> None:
    """Let something be left as of this time."""
    plant(connection, at_ms)


def do_duty(store: Store, name: str, seconds: float) -> int:
    """Do a duty until nothing is left of it, or for so long; return how much was done."""
    (duty,) = (duty for duty in DUTIES if duty.name == planted.ALSO.get(name, name))
    cluster = Elsewhere(store) if duty.name == "decided transactions completed" else None
    stop = threading.Event()
    timer = threading.Timer(seconds, stop.set)
    timer.start()
    done, position = 0, None
    while not stop.is_set():
        portion = Portion(store, cluster, Portions(stop=stop), position)
        count, position = duty.load()(portion), portion.position
        done += count
        if count < FOUND_MAX and position is None:
            break
    timer.cancel()
    return done


def row_of(what: str, done: int, holds: Holds, waits: Sequence[float]) -> tuple[str, ...]:
    """Return a row of the table."""
    percentiles = statistics.quantiles([*waits, *waits] or [0.0, 0.0], n=100, method="inclusive")
    longest = (max(each, default=0.0) for each in (holds.by_clock, holds.of_processor))
    counts = [str(done), str(len(holds.by_clock)), *map(number, longest), str(len(waits))]
    return (what, *counts, *map(number, (percentiles[49], percentiles[98], max(waits, default=0.0))))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line says, and print what was found."""
    parser = argparse.ArgumentParser(prog="scripts/soak-maintenance --locks", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each duty is done at most")
    parser.add_argument("--only", default="", help="duties whose names have this in them")
    parser.add_argument("--folder", type=Path, help="where the store is made: on a disk, not in memory")
    options = parser.parse_args(arguments)
    backlogs = {name: backlog.fill for name, backlog in planted.BACKLOGS.items()} | {PLAIN_SQL: leave_plain_rows}
    planted.ALSO[PLAIN_SQL] = "rows of the outbox moved into topics"
    rows: list[tuple[str, ...]] = []
    logging.getLogger("txnstore").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, open_store(f"sqlite:///{folder}/store.db") as store:
        url = f"sqlite:///{folder}/store.db"
        plain = fill(store, url).plain
        store.write(lambda connection: change_store_settings(connection, {"transaction.max.timeout.ms": "1000"}))
        clear(store)
        locks = NotedLocks(store)
        waits, done = waits_beside(url, plain, rest)
        rows.append(row_of(NOTHING, done, locks.holds, waits))
        for name, plant in backlogs.items():
            if options.only not in name:
                continue
            # What is planted has been left for three years.
            at_ms = time.time_ns() // 1_000_000 - 3 * 365 * planted.DAY_MS
            store.write(partial(leave, plant, at_ms))
            locks.holds = Holds()
            waits, done = waits_beside(url, plain, partial(do_duty, store, name, options.seconds))
            rows.append(row_of(name, done, locks.holds, waits))
            sys.stderr.write(f"{rows[-1]}\n")
            clear(store)
    loads = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    print_table(f"a writer beside maintenance, loads of {loads}", HEADINGS, rows, numbers=HEADINGS[1:])
    checkpoints = locks.checkpoints
    longest = [max(each, default=0.0) for each in (checkpoints.by_clock, checkpoints.of_processor)]
    sys.stdout.write(
        f"{len(checkpoints.by_clock)} checkpoints: {longest[0]:.1f} ms at most, {longest[1]:.1f} ms of processor\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

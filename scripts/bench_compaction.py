"""Measure the compaction of one partition with many keys: passes, time, and the memory of the process that does it.

Every key is written once, and every tenth a second time.  Then a process of its own makes one pass after the other
until the partition is compacted to its end: a pass remembers no more than `KEYS_MAX` keys, so there are many.

    .venv/bin/python -m scripts.bench_compaction --keys 10000000

Each pass reads the whole log, so all of them take long; with `--compacted N` the first N records are taken to be
compacted, and only the last passes are made.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, func, select

from scripts.bench_support import number, print_table, write_files
from scripts.comparison.figures import circumstances
from scripts.comparison.opening import NAMES, opened_sides
from scripts.comparison.sides import Side, processes
from txnstore.db.opening import open_store
from txnstore.db.schema import record_batches
from txnstore.db.store import Store
from txnstore.log.append import Append, append
from txnstore.log.bounds import read_bounds
from txnstore.log.codec import RecordColumns, encode_columns
from txnstore.log.compaction import compact_partitions
from txnstore.log.partition_storage import count_stored, lock_storage, read_storage, save_storage
from txnstore.log.topics import create_topic

BATCH_RECORDS: Final = 5_000
VALUE: Final = b"x" * 16
WRITTEN_AGAIN: Final = 10
KIB: Final = 1024


@dataclass(frozen=True)
class Compacted:
    """What the compaction of a partition took."""

    side: str
    keys: int
    records_before: int
    records_after: int
    passes: int
    seconds: float
    memory_before_mib: float
    memory_peak_mib: float


def fill(store: Store, keys: int, compacted: int) -> int:
    """Make a compacted topic and write every key, and every tenth again; return its partition."""
    settings = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"}
    topic = store.write(lambda connection: create_topic(connection, "keys", config=settings))
    (partition_id,) = topic.partition_ids
    for step in (1, WRITTEN_AGAIN):
        for batch in _batches(range(0, keys, step)):
            item = Append(partition_id, batch)
            store.write(lambda connection, item=item: append(connection, [item]))  # type: ignore[misc]
    if compacted:
        count_stored(store, partition_id)
        store.write(partial(_take_for_compacted, partition_id, compacted))
    return partition_id


def _take_for_compacted(partition_id: int, offset: int, connection: Connection) -> None:
    storage = lock_storage(connection, partition_id)
    assert storage is not None
    of_them = storage.size_bytes * offset // storage.counted_offset
    save_storage(connection, replace(storage, compacted_offset=offset, compacted_bytes=of_them))


def _batches(keys: range) -> Iterator[Any]:
    now_ms = time.time_ns() // 1_000_000
    for start in range(0, len(keys), BATCH_RECORDS):
        of_batch = [key.to_bytes(8, "big") for key in keys[start : start + BATCH_RECORDS]]
        count = len(of_batch)
        yield encode_columns(RecordColumns(of_batch, [VALUE] * count, [now_ms] * count, [()] * count))


def _compact(url: str, partition_id: int, answers: Any) -> None:
    """Compact to the end; answer with passes, seconds, and MiB of memory before and at most."""
    with closing(open_store(url)) as store:
        before_mib = _peak_mib()
        begun, passes = time.monotonic(), 0
        while True:
            bounds, storage = store.read(
                lambda connection: (
                    read_bounds(connection, [partition_id])[partition_id],
                    read_storage(connection, partition_id),
                )
            )
            if storage.compacted_offset >= bounds.last_stable_offset:
                break
            compact_partitions(store)
            passes += 1
        answers.put((passes, time.monotonic() - begun, before_mib, _peak_mib()))


def _peak_mib() -> float:
    unit = 1 if sys.platform == "darwin" else KIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / KIB / KIB


def measure(side: Side, keys: int, compacted: int) -> Compacted:
    """Fill a partition and let another process compact it."""
    count_records = select(func.sum(record_batches.c.record_count))
    with closing(open_store(side.url)) as store:
        partition_id = fill(store, keys, compacted)
        before = store.read(lambda connection: connection.execute(count_records).scalar_one())
    answers = processes.Queue()
    process = processes.Process(target=_compact, args=(side.url, partition_id, answers))
    process.start()
    passes, seconds, before_mib, peak_mib = answers.get()
    process.join()
    with closing(open_store(side.url)) as store:
        after = store.read(lambda connection: connection.execute(count_records).scalar_one())
    return Compacted(side.name, keys, before, after, passes, seconds, before_mib, peak_mib)


def show(results: list[Compacted]) -> None:
    """Print a line for each database."""
    print_table(
        "compaction of one partition",
        ("side", "keys", "records", "records left", "passes", "s", "MiB before", "MiB at most"),
        [
            (
                each.side,
                f"{each.keys:,}",
                f"{each.records_before:,}",
                f"{each.records_after:,}",
                str(each.passes),
                number(each.seconds),
                number(each.memory_before_mib),
                number(each.memory_peak_mib),
            )
            for each in results
        ],
        numbers={"keys", "records", "records left", "passes", "s", "MiB before", "MiB at most"},
    )


def main() -> None:
    """Run the measurement that the command line asks for."""
    parser = argparse.ArgumentParser(prog="scripts.bench_compaction", description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000, help="how many keys the partition gets (1,000,000)")
    parser.add_argument("--compacted", type=int, default=0, help="so many records are taken to be compacted (none)")
    parser.add_argument("--database", choices=list(NAMES), action="append", help="only this one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was seen to this file")
    options = parser.parse_args()
    about = circumstances(parser.prog)
    with opened_sides(options.database, with_kafka=False) as sides:
        results = [measure(side, options.keys, options.compacted) for side in sides]
    show(results)
    write_files(options, {**about, "results": results})


if __name__ == "__main__":
    main()

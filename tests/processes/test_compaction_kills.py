"""Processes that compact a partition, killed again and again: readers end with the same table after each of them."""

from __future__ import annotations

import random

import pytest
from sqlalchemy import func, select

from tests.tools.campaigns import times
from tests.tools.workload import Job
from txnstore.db.opening import open_store
from txnstore.db.portions import Portions
from txnstore.db.schema import partition_storage, record_batches
from txnstore.log import compaction
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.compaction import compact_partitions
from txnstore.log.fetch import fetch
from txnstore.log.topics import create_topic
from txnstore.model import Record
from txnstore.testing.invariants import assert_sound
from txnstore.transactions.coordinator import TransactionCoordinator

pytestmark = [pytest.mark.slow, pytest.mark.campaign]

BATCHES = 1_200
KEYS = 40
KILLS = times(12)
#: So that there are many database transactions to be killed in and between.
PAGE_BATCHES = 10
#: All batches are passed twice: for their keys, and to be thinned.
PORTIONS = 2 * (BATCHES + BATCHES // 10) // PAGE_BATCHES
#: At which of them the first one is killed: some batches are thinned then, others are not.
IN_THE_MIDDLE = PORTIONS * 3 // 4
#: Somewhere in the next one.
LATER_SECONDS_MAX = 0.01
PATIENCE_SECONDS = 60
COMPACTED = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0", "delete.retention.ms": "0"}


def compact(job, pipe):
    """Compact everything, and tell of each portion, and of the end."""
    portions = Portions()
    portions.rows = PAGE_BATCHES
    vars(portions)["_adapt"] = lambda _: None
    with open_store(job.url) as store:
        for _ in compaction._passes(store, portions):
            pipe.send("a portion")
    pipe.send("done")


def told_of(pipe, portions):
    """Wait until so many portions are done; return whether there were so many."""
    for _ in range(portions):
        assert pipe.poll(PATIENCE_SECONDS)
        if pipe.recv() == "done":
            return False
    return True


def fill(store, partition_id, chance):
    """Write records of few keys: plain ones and in transactions, committed and aborted, with values and without."""
    coordinator = TransactionCoordinator(store)

    def record(number):
        key, value = b"key-%d" % chance.randrange(KEYS), b"value-%d" % number if chance.random() < 0.8 else None
        return Record(value, key=key, timestamp_ms=number)

    for number in range(0, BATCHES, 10):
        name = f"writer-{number % 7}"
        producer = coordinator.init_producer_id(name, 60_000).identity
        batch = encode([record(number)], producer=producer, base_sequence=0, is_transactional=True)
        coordinator.append(name, producer, [Append(partition_id, batch)])
        coordinator.end_transaction(name, producer, commit=number % 3 > 0)
        # A batch of its own for each record, as if they had come one after the other.
        plain = [Append(partition_id, encode([record(each)])) for each in range(number + 1, number + 10)]
        store.write(lambda connection, plain=plain: [append(connection, [each]) for each in plain])


def table(store, partition_id):
    """Return what a reader ends with who keeps the newest value of each key."""
    position = 0
    found: dict[bytes, bytes | None] = {}
    while True:
        page = store.read(lambda connection, at=position: fetch(connection, {partition_id: at}))[partition_id]
        found |= {record.key: record.value for batch in page.batches for record in batch.records(position)}
        if page.next_offset == position:
            return {key: value for key, value in found.items() if value is not None}
        position = page.next_offset


def test_a_compaction_that_is_killed_anywhere_changes_nothing_for_readers(url, tmp_path, processes):
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    with open_store(url) as store:
        topic = store.write(lambda connection: create_topic(connection, "states", config=COMPACTED))
        (partition_id,) = topic.partition_ids
        fill(store, partition_id, chance)
        count_of = select(func.count()).select_from(record_batches)
        before, counts = table(store, partition_id), [store.read(lambda c: c.execute(count_of).scalar_one())]
        for life in range(KILLS):
            process, pipe = processes.start_with_pipe(compact, Job(url, tmp_path, "compactor", life, {}))
            is_at_work = told_of(pipe, IN_THE_MIDDLE if life == 0 else chance.randrange(PORTIONS))
            pipe.poll(chance.uniform(0.0, LATER_SECONDS_MAX))
            processes.kill(process)
            assert table(store, partition_id) == before, f"seed {seed}, life {life}"
            assert_sound(store)
            counts.append(store.read(lambda c: c.execute(count_of).scalar_one()))
            assert is_at_work or life > 0
        compact_partitions(store)
        assert counts[0] > counts[1] > store.read(lambda c: c.execute(count_of).scalar_one()), counts
        # Tombstones, and markers whose records are gone, are taken by the pass after.
        compact_partitions(store)
        assert table(store, partition_id) == before
        stored = store.read(lambda c: c.execute(select(partition_storage)).one())
        assert stored.compacted_offset == BATCHES + BATCHES // 10
        records = select(func.sum(record_batches.c.record_count)).where(record_batches.c.control_type.is_(None))
        assert store.read(lambda c: c.execute(records).scalar_one()) == len(before)
        assert_sound(store)

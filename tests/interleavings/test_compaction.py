"""Who compacts a partition beside another one, a producer or a deletion: nothing that counts is lost."""

from __future__ import annotations

from functools import partial

import pytest
from sqlalchemy import select

from tests.tools.interleaving import Scenario, before_locks, before_transactions, explore
from txnstore.db.portions import Portions
from txnstore.db.schema import partition_storage, record_batches
from txnstore.log import compaction
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.log.deleting import delete_records
from txnstore.log.fetch import fetch
from txnstore.log.partition_storage import batch_bytes, count_stored
from txnstore.log.topics import change_topic_configs, delete_topic, lock_topic_configs
from txnstore.model import Record
from txnstore.transactions.coordinator import TransactionCoordinator

pytestmark = pytest.mark.slow

COMPACTED = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"}


def compact(store, partition_id, portions=None):
    """Compact this partition alone."""
    now_ms, settings_of, _ = store.read(compaction._read_settings)
    count_stored(store, partition_id)
    # Every topic has the same.
    settings, *_ = settings_of.values()
    due = store.read(partial(compaction._due, partition_id, settings, now_ms))
    if due is None:
        return 0
    steps = compaction._Pass(store, due, portions or Portions()).steps()
    return sum(part.batches_changed for part in steps)


def a_transaction_each():
    """Return portions of one batch and its marker."""
    portions = Portions(rows_max=2)
    portions.rows = 2
    return portions


class Log:
    """The one partition of a compacted topic of its own."""

    def __init__(self, world):
        self.world = world
        self.setting = world.setting(partition_count=1)
        (self.partition_id,) = self.setting.partitions.values()
        topic = self.setting.topic
        world.observer.write(lambda c: change_topic_configs(c, lock_topic_configs(c, topic), COMPACTED))
        self.coordinator = TransactionCoordinator(world.observer)

    def write(self, *rows, commit=True):
        """Append records in a transaction, now, and end it."""
        transactional_id = self.setting.transactional_id
        producer = self.coordinator.init_producer_id(transactional_id, 60_000).identity
        records = [Record(value, key=key, timestamp_ms=self.world.clock.now_ms()) for key, value in rows]
        batch = encode(records, producer=producer, base_sequence=0, is_transactional=True)
        self.coordinator.append(transactional_id, producer, [Append(self.partition_id, batch)])
        self.coordinator.end_transaction(transactional_id, producer, commit=commit)

    def read(self, store, records_max=2):
        """Return all that a reader gets, so many records at once, by offset; it stops within batches, too."""
        found: dict[int, Record] = {}
        position = 0
        while True:
            pages = store.read(lambda c, at=position: fetch(c, {self.partition_id: at}, records_max=records_max))
            page = pages[self.partition_id]
            records = [record for batch in page.batches for record in batch.records(position)]
            found |= {record.offset: record for record in records[:records_max]}
            if page.next_offset == position:
                return found
            position = page.next_offset if len(records) <= records_max else records[records_max].offset

    def go(self):
        """Otherwise each further order reads the settings of this one's topic, too."""
        self.world.observer.write(lambda c: delete_topic(c, self.setting.topic))


def table_of(records):
    """Return what a reader ends with who keeps the newest value of each key."""
    newest = {record.key: record.value for _, record in sorted(records.items())}
    return {key: value for key, value in newest.items() if value is not None}


@pytest.mark.parametrize("beside", ["compaction", "producer", "deletion"])
@pytest.mark.parametrize(
    ("txnstore_url", "by_lock"),
    # Whole database transactions come one after the other, whichever database it is.
    [("sqlite", False), ("sqlite", True), ("postgresql", True)],
    indirect=["txnstore_url"],
)
def test_what_counts_stays_in_every_order_of_steps(world, by_lock, beside):
    def make():
        log = Log(world)
        partition_id, write = log.partition_id, log.write
        write((b"a", b"1"), (b"b", b"1"), (b"c", b"1"))
        write((b"a", b"2"))
        write((b"b", b"2"))

        def the_newest_are_there(finished):
            batches_of = select(record_batches).where(record_batches.c.partition_id == partition_id)
            kept_of = select(partition_storage).where(partition_storage.c.partition_id == partition_id)
            storage = world.observer.read(lambda c: c.execute(kept_of).one())
            batches = world.observer.read(lambda c: c.execute(batches_of).all())
            counted = [batch_bytes(row.size_bytes) for row in batches if row.last_offset < storage.counted_offset]
            assert storage.size_bytes == sum(counted)
            start = 4 if beside == "deletion" else 0
            page = world.observer.read(lambda c: fetch(c, {partition_id: start}))[partition_id]
            found = {record.key: record.value for batch in page.batches for record in batch.records(start)}
            expected = {b"a": b"2", b"b": b"2", b"c": b"1"}
            if beside == "producer":
                expected |= {b"a": b"3"}
            if beside == "deletion":
                del expected[b"c"]
            assert found == expected
            log.go()

        others = {
            "compaction": lambda: compact(world.second, partition_id),
            "producer": lambda: write((b"a", b"3")),
            "deletion": lambda: delete_records(world.second, partition_id, 4),
        }
        actors = {"first": lambda: compact(world.first, partition_id), beside: others[beside]}
        return Scenario(actors, at_end=the_newest_are_there, alike=actors if beside == "compaction" else ())

    explored = explore(
        make, stops=before_locks if by_lock else before_transactions, preemptions_max=1, store=world.observer
    )
    assert explored.deadlocks == 0


# Whole database transactions: see above.
@pytest.mark.parametrize("txnstore_url", ["sqlite"], indirect=True)
def test_a_reader_sees_no_difference_whatever_comes_between_its_pages(world):
    def make():
        log = Log(world)
        log.write((b"a", b"1"), (b"d", b"1"), (b"c", b"1"))
        log.write((b"a", b"never"), commit=False)
        log.write((b"a", b"2"), (b"d", None))
        before = log.read(world.observer)
        assert table_of(before) == {b"a": b"2", b"c": b"1"}

        def the_table_is_that_of_before(finished):
            assert finished["compaction"].result() == 2
            found = finished["reader"].result()
            assert found.items() <= before.items()
            assert table_of(found) == table_of(before)
            left = log.read(world.observer)
            assert left.items() <= found.items()
            assert [record.key for record in left.values()] == [b"c", b"a", b"d"]
            log.go()

        actors = {
            "compaction": lambda: compact(world.first, log.partition_id, a_transaction_each()),
            "reader": lambda: log.read(world.second),
        }
        return Scenario(actors, at_end=the_table_is_that_of_before)

    assert explore(make).orders == 121

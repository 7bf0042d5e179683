"""Who compacts a partition beside another one, a producer or a deletion: nothing that counts is lost."""

from __future__ import annotations

from functools import partial

import pytest
from sqlalchemy import select

from tests.tools.interleaving import Scenario, before_locks, before_transactions, explore
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


@pytest.mark.parametrize("beside", ["compaction", "producer", "deletion"])
@pytest.mark.parametrize(
    ("txnstore_url", "by_lock"),
    # Whole database transactions come one after the other, whichever database it is.
    [("sqlite", False), ("sqlite", True), ("postgresql", True)],
    indirect=["txnstore_url"],
)
def test_what_counts_stays_in_every_order_of_steps(world, by_lock, beside):
    def compact(store, partition_id):
        """Compact this scenario's partition alone."""
        now_ms, settings_of = store.read(compaction._read_settings)
        count_stored(store, partition_id)
        (settings,) = settings_of.values()
        due = store.read(partial(compaction._due, partition_id, settings, now_ms))
        return 0 if due is None else sum(part.batches_changed for part in compaction._Pass(store, due).steps())

    def make():
        setting = world.setting(partition_count=1)
        (partition_id,) = setting.partitions.values()
        world.observer.write(lambda c: change_topic_configs(c, lock_topic_configs(c, setting.topic), COMPACTED))
        coordinator = TransactionCoordinator(world.observer)

        def write(*rows):
            """Append records in a transaction, now, and commit it."""
            producer = coordinator.init_producer_id(setting.transactional_id, 60_000).identity
            records = [Record(value, key=key, timestamp_ms=world.clock.now_ms()) for key, value in rows]
            batch = encode(records, producer=producer, base_sequence=0, is_transactional=True)
            coordinator.append(setting.transactional_id, producer, [Append(partition_id, batch)])
            coordinator.end_transaction(setting.transactional_id, producer, commit=True)

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
            # Otherwise each further order reads the settings of this one's topic, too.
            world.observer.write(lambda c: delete_topic(c, setting.topic))

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

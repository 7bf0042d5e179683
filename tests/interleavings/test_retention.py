"""Two who delete what is past its retention, and a producer beside them: counted once, deleted once, nobody held up."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from tests.tools.interleaving import Scenario, before_locks, before_transactions, explore
from txnstore.db.portions import Portions
from txnstore.db.schema import partition_storage, record_batches
from txnstore.log import retention
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.log.fetch import fetch
from txnstore.log.partition_storage import batch_bytes
from txnstore.log.topics import change_topic_configs, delete_topic, lock_topic_configs
from txnstore.model import Record
from txnstore.testing.invariants import partition_violations
from txnstore.transactions.coordinator import TransactionCoordinator

pytestmark = pytest.mark.slow

DAY_MS = 86_400_000


@pytest.mark.parametrize("by_age", [True, False])
@pytest.mark.parametrize(
    ("txnstore_url", "by_lock", "writes"),
    # Whole database transactions come one after the other, whichever database it is.
    [("sqlite", False, True), ("sqlite", True, False), ("postgresql", True, False)],
    indirect=["txnstore_url"],
)
def test_batches_are_counted_and_deleted_once_in_every_order_of_steps(world, by_age, by_lock, writes):
    deleted = set()
    # By size, all but the newest marker may go.
    kept = {"retention.ms": "1000"} if by_age else {"retention.ms": "-1", "retention.bytes": "1"}

    def expire(store, partition_id):
        """Delete what is due, in this scenario's partition alone."""
        now_ms, limits, _ = store.read(retention._read_limits)
        found = [each for each in retention._candidates(store, limits, now_ms) if each.partition_id == partition_id]
        return sum(retention._expire(store, candidate, now_ms, {}, Portions())[0] for candidate in found)

    def make():
        setting = world.setting(partition_count=1)
        (partition_id,) = setting.partitions.values()
        world.observer.write(lambda c: change_topic_configs(c, lock_topic_configs(c, setting.topic), kept))
        coordinator = TransactionCoordinator(world.observer)

        def write(value):
            """Append a record in a transaction, now, and commit it."""
            producer = coordinator.init_producer_id(setting.transactional_id, 60_000).identity
            record = Record(value, timestamp_ms=world.clock.now_ms())
            batch = encode([record], producer=producer, base_sequence=0, is_transactional=True)
            coordinator.append(setting.transactional_id, producer, [Append(partition_id, batch)])
            coordinator.end_transaction(setting.transactional_id, producer, commit=True)

        write(b"old/1")
        write(b"old/2")
        world.clock.advance(DAY_MS)

        def sizes_are_true(finished):
            deleted.add(tuple(sorted(finished[name].result() for name in ("first", "second"))))
            kept_of = select(partition_storage).where(partition_storage.c.partition_id == partition_id)
            batches_of = select(record_batches).where(record_batches.c.partition_id == partition_id)
            storage = world.observer.read(lambda c: c.execute(kept_of).one())
            batches = world.observer.read(lambda c: c.execute(batches_of).all())
            assert all(batch.last_offset >= storage.first_stored_offset for batch in batches)
            counted = [batch_bytes(row.size_bytes) for row in batches if row.last_offset < storage.counted_offset]
            assert storage.size_bytes == sum(counted)
            assert world.observer.read(lambda c: partition_violations(c, partition_id)) == []
            if by_age and writes:
                page = world.observer.read(lambda c: fetch(c, {partition_id: 4}))[partition_id]
                assert [record.value for batch in page.batches for record in batch.records(4)] == [b"new"]
            # Otherwise the candidates of each further order are looked for among this one's, too.
            world.observer.write(lambda c: delete_topic(c, setting.topic))

        actors = {
            "first": lambda: expire(world.first, partition_id),
            "second": lambda: expire(world.second, partition_id),
        }
        if writes:
            actors["producer"] = lambda: write(b"new")
        return Scenario(actors, at_end=sizes_are_true, alike=("first", "second"))

    explored = explore(
        make, stops=before_locks if by_lock else before_transactions, preemptions_max=1, store=world.observer
    )
    assert explored.deadlocks == 0
    # One of them may do all of it; by size the newest batch stays, whoever counted when.
    everything = 4 if by_age or writes else 3
    assert (0, everything) in deleted
    if by_age or not writes:
        assert {sum(counts) for counts in deleted} == {everything}

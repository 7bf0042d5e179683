"""A producer and readers: all or nothing at every step, nothing past the last stable offset, no gap filled later."""

from __future__ import annotations

import pytest

from tests.tools.interleaving import explore
from txnstore.groups.offsets import read_offsets
from txnstore.log.fetch import fetch
from txnstore.model import GroupMembership, IsolationLevel, OffsetAndMetadata
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.transaction import SentOffsets

pytestmark = pytest.mark.slow_on_postgresql


@pytest.mark.parametrize("isolation", list(IsolationLevel))
def test_a_reader_between_the_steps_of_producers_gets_every_record_once_and_in_order(world, in_turn, isolation):
    def make():
        setting = world.setting()
        producer = setting.producer("producer", world.first)
        plain = setting.producer("producer", world.first, transactional_id=None)
        producer.init()
        plain.init()
        reader = setting.reader("reader", world.second, isolation)

        def read_the_rest(finished):
            assert finished["producer"].result() == ["ok"] * 5
            reader.poll()

        return setting.scenario(
            {
                "producer": in_turn(
                    lambda: producer.append("one", {"p0": ["one/1", "one/2"], "p1": ["one/3"]}),
                    # Behind an open transaction: readers of committed records wait for it.
                    lambda: plain.append("plain", {"p0": ["plain/1"], "p1": ["plain/2"]}),
                    lambda: producer.end("one", commit=True),
                    lambda: producer.append("two", {"p0": ["two/1"], "p1": ["two/2"]}),
                    lambda: producer.end("two", commit=False),
                ),
                "reader": lambda: [reader.poll(records_max=2) for _ in range(2)],
            },
            at_end=read_the_rest,
        )

    assert explore(make).orders == 21


def test_records_and_consumed_offsets_of_a_transaction_appear_at_the_same_step(world, in_turn):
    def make():
        setting = world.setting(partition_count=3)
        producer = setting.producer("producer", world.first)
        other = setting.producer("other", world.second, transactional_id=f"{setting.transactional_id}-other")
        coordinator = TransactionCoordinator(world.first)
        identity = producer.init()
        other.init()
        committer = GroupMembership(f"group-{setting.topic}")
        offsets = {setting.partitions["p0"]: OffsetAndMetadata(7)}
        seen = []

        def see():
            def read(connection):
                pages = fetch(connection, dict.fromkeys(setting.partitions.values(), 0))
                committed = read_offsets(connection, committer.group_id, setting.partitions.values())
                records = {
                    number: [record.value for batch in page.batches for record in batch.records()]
                    for number, page in pages.items()
                }
                return records, committed

            records, committed = world.observer.read(read)
            there = {
                b"one/1" in records[setting.partitions["p0"]],
                b"one/2" in records[setting.partitions["p1"]],
                committed.offsets == offsets,
            }
            assert len(there) == 1, (records, committed)
            seen.append(there.pop())
            # A consumer that asks for stable offsets waits while they are pending, and not after.
            assert not (seen[-1] and committed.unstable)

        return setting.scenario(
            {
                "producer": in_turn(
                    lambda: producer.append("one", {"p0": ["one/1"]}),
                    lambda: coordinator.send_offsets(
                        setting.transactional_id, identity, SentOffsets(committer, offsets)
                    ),
                    lambda: producer.append("one", {"p1": ["one/2"]}),
                    lambda: producer.end("one", commit=True),
                ),
                "other": in_turn(
                    lambda: other.append("two", {"p2": ["two/1"]}),
                    lambda: other.end("two", commit=True),
                ),
            },
            after_step=see,
            at_end=lambda finished: seen[-1] or pytest.fail("it never appeared"),
        )

    assert explore(make).orders == 15

"""A producer and readers: all or nothing at every step, nothing past the last stable offset, no gap filled later."""

from __future__ import annotations

from functools import partial

import pytest

from tests.tools.interleaving import explore
from txnstore.db.schema import record_batches
from txnstore.groups.offsets import read_offsets
from txnstore.log.codec import decode
from txnstore.log.commit_order import CommitPosition, fetch_in_commit_order
from txnstore.log.fetch import fetch
from txnstore.model import ControlType, GroupMembership, IsolationLevel, OffsetAndMetadata
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.transaction import SentOffsets

pytestmark = pytest.mark.slow_on_postgresql


@pytest.mark.slow_but_first
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


@pytest.mark.slow
def test_a_reader_in_commit_order_gets_transactions_whole_and_in_the_order_of_their_markers(world, in_turn):
    """Two that lie among each other and end in either order; whoever reads on after each step loses nothing."""

    def make():
        setting = world.setting()
        first = setting.producer("first", world.first, transactional_id=f"{setting.transactional_id}-first")
        second = setting.producer("second", world.second, transactional_id=f"{setting.transactional_id}-second")
        plain = setting.producer("first", world.first, transactional_id=None)
        for producer in (first, second, plain):
            producer.init()
        ids = list(setting.partitions.values())
        positions = dict.fromkeys(ids, CommitPosition(0))
        seen: dict[int, list[bytes | None]] = {partition_id: [] for partition_id in ids}

        def read_on():
            read = partial(fetch_in_commit_order, positions=dict(positions))
            for partition_id, page in world.observer.read(read).items():
                seen[partition_id] += [
                    record.value for placed in page.batches for record in placed.batch.records(placed.from_offset)
                ]
                positions[partition_id] = page.next_position
                # Nothing that is open holds him back, and of no transaction there is a part.
                assert page.next_position == CommitPosition(page.bounds.high_watermark)
                for name in (b"one", b"two"):
                    assert sum(bool(value and value.startswith(name)) for value in seen[partition_id]) in (0, 2)

        def compare(finished):
            read_on()
            for partition_id in ids:
                assert seen[partition_id] == world.observer.read(partial(in_commit_order, partition_id))

        return setting.scenario(
            {
                "first": in_turn(
                    lambda: first.append("one", {"p0": ["one/1", "one/2"], "p1": ["one/3"]}),
                    lambda: plain.append("plain", {"p0": ["plain/1"], "p1": ["plain/2"]}),
                    lambda: first.append("one", {"p1": ["one/4"]}),
                    lambda: first.end("one", commit=True),
                ),
                "second": in_turn(
                    lambda: second.append("two", {"p0": ["two/1", "two/2"], "p1": ["two/3", "two/4"]}),
                    lambda: second.end("two", commit=True),
                ),
            },
            after_step=read_on,
            at_end=compare,
        )

    assert explore(make).orders == 15


def in_commit_order(partition_id, connection):
    """Return the values as the markers in the log say."""
    batches = record_batches.select().where(record_batches.c.partition_id == partition_id)
    held: dict[int, list[bytes | None]] = {}
    values: list[bytes | None] = []
    for row in connection.execute(batches.order_by(record_batches.c.last_offset)):
        if row.control_type is not None:
            ended = held.pop(row.producer_id)
            values += ended if row.control_type == ControlType.COMMIT else []
            continue
        found = [record.value for record in decode(row).records()]
        if row.is_transactional:
            held.setdefault(row.producer_id, []).extend(found)
        else:
            values += found
    return values

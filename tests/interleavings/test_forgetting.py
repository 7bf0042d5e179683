"""Producers and queries that return when they are forgotten, and copies of queries, in every order of steps."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from sqlalchemy import delete

from tests.tools.interleaving import Scenario, before_locks, before_transactions, explore
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.schema import producer_states, sink_batches, sink_inputs, sink_positions, sink_runs
from txnstore.errors import ProducerFenced
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.model import Record
from txnstore.spark.sink_coordination import decide, last_batch, open_writer
from txnstore.spark.sink_inputs import SinkInput, note_inputs
from txnstore.spark.sink_run import SinkRun
from txnstore.transactions.recovery import expire_producers
from txnstore.transactions.sinks import forget_silent_sinks
from txnstore.transactions.writers import append_as_writer

pytestmark = pytest.mark.slow_on_postgresql

DAY_MS = 86_400_000
numbers = itertools.count(1)


def forget_all(connection):
    connection.execute(delete(producer_states))


def forget_sinks(connection):
    for table in (sink_batches, sink_inputs, sink_positions, sink_runs):
        connection.execute(delete(table))


def write(store, run, batch_id, target, offsets):
    """Write a batch that reads these offsets; return whether it was new."""
    query_id = run.sink_id.partition(":")[2]
    # It reads where it writes: that is there, and nobody asks what.
    note_inputs(store, [SinkInput(query_id, run.run_id, batch_id, query_id, target, offsets.start, offsets.stop)])
    writer = open_writer(store, run, batch_id)
    if writer is None:
        return decide(store, run, batch_id, [])
    batch = encode([Record(b"a")], producer=writer.identity, base_sequence=0, is_transactional=True)
    append_as_writer(store, writer, [Append(target, batch)], report=True)
    return decide(store, run, batch_id, [writer.writer_id])


@pytest.mark.slow_but_first
@pytest.mark.parametrize("sends_rest_with_commit", [False, True])
@pytest.mark.parametrize("by_lock", [False, True])
def test_a_producer_that_returns_as_it_is_forgotten_is_read_once_it_commits(
    world, in_turn, by_lock, sends_rest_with_commit
):
    outcomes = set()

    def make():
        setting = world.setting(partition_count=1)
        producer = setting.producer("producer", world.first)
        producer.init()
        producer.append("yesterday", {"p0": ["yesterday/1"]})
        producer.end("yesterday", commit=True)
        world.clock.advance(DAY_MS)
        if sends_rest_with_commit:
            calls = [lambda: producer.end("today", commit=True, values={"p0": ["today/1"]})]
        else:
            calls = [
                lambda: producer.append("today", {"p0": ["today/1"]}),
                lambda: producer.end("today", commit=True),
            ]

        def nothing_is_hidden(finished):
            assert finished["producer"].result() == ["ok"] * len(calls)
            outcomes.add(finished["maintenance"].result())
            # The next order must not find this producer.
            world.observer.write(forget_all)

        return setting.scenario(
            {"producer": in_turn(*calls), "maintenance": lambda: expire_producers(world.second)},
            at_end=nothing_is_hidden,
        )

    explored = explore(
        make,
        stops=before_locks if by_lock else before_transactions,
        preemptions_max=1 if by_lock else None,
        store=world.observer,
    )
    assert explored.deadlocks == 0
    # Forgotten before it returned, and returned in time.
    assert outcomes == {0, 1}


@pytest.mark.slow
def test_a_query_that_returns_under_another_name_as_its_sink_is_forgotten_goes_on_and_is_remembered(world):
    """No lock of a transactional id keeps it away: those who forget do not know the new one."""
    settings = {"txnstore.sink.retention.ms": str(30 * DAY_MS)}
    world.observer.write(lambda connection: change_store_settings(connection, settings))
    outcomes = set()

    def make():
        setting = world.setting(partition_count=1)
        target = setting.partitions["p0"]
        name = f"{setting.transactional_id}-{next(numbers)}"
        first, second, third = (SinkRun(f"{name}-{place}", f"query:{name}", f"run {place}") for place in range(3))
        assert write(world.observer, first, 0, target, range(1))
        world.clock.advance(31 * DAY_MS)

        def it_goes_on(finished):
            assert finished["query"].result() is True
            outcomes.add(finished["maintenance"].result())
            assert world.observer.read(partial(last_batch, sink_id=second.sink_id)) == 1
            # A replay, by whichever run: it is known.
            assert not write(world.observer, second, 1, target, range(1, 2))
            assert not write(world.observer, third, 1, target, range(1, 2))
            # The next order must not find this sink.
            world.observer.write(forget_sinks)

        return Scenario(
            {
                "query": lambda: write(world.first, second, 1, target, range(1, 2)),
                "maintenance": lambda: forget_silent_sinks(world.second),
            },
            at_end=it_goes_on,
        )

    explored = explore(make, stops=before_locks, preemptions_max=1, store=world.observer)
    assert explored.deadlocks == 0
    assert outcomes == {0, 1}


def before_what_both_see(statement):
    return before_locks(statement) and any(word in statement for word in ("sink_", "BEGIN", "COMMIT", "ROLLBACK"))


@pytest.mark.slow
def test_of_two_copies_of_a_query_under_two_names_one_commits_what_both_read(world):
    """No lock of a transactional id keeps them apart; their batches have numbers of their own."""
    first_ones = set()

    def make():
        setting = world.setting(partition_count=1)
        target = setting.partitions["p0"]
        name = f"{setting.transactional_id}-{next(numbers)}"
        before, newer, older = (SinkRun(f"{name}-{place}", f"query:{name}", f"run {place}") for place in range(3))
        assert write(world.observer, before, 0, target, range(10))

        def commits(store, run, batch_id, offsets):
            try:
                return write(store, run, batch_id, target, offsets)
            except ProducerFenced:
                return False

        def one_has(finished):
            committed = {who: done.result() for who, done in finished.items()}
            assert sum(committed.values()) == 1
            first_ones.add(committed["newer"])

        return Scenario(
            {
                "newer": lambda: commits(world.first, newer, 1, range(10, 20)),
                "older": lambda: commits(world.second, older, 0, range(10, 22)),
            },
            at_end=one_has,
        )

    # Not where they ask for their own transaction: nobody else has to do with that, and it would take twice as long.
    explored = explore(make, stops=before_what_both_see, preemptions_max=1, store=world.observer)
    assert explored.deadlocks == 0
    assert first_ones == {True, False}

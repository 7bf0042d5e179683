"""Producers that return when they are forgotten: each transaction that commits is read, in every order of steps."""

from __future__ import annotations

import pytest
from sqlalchemy import delete

from tests.tools.interleaving import before_locks, before_transactions, explore
from txnstore.db.schema import producer_states
from txnstore.transactions.recovery import expire_producers

pytestmark = pytest.mark.slow_on_postgresql

DAY_MS = 86_400_000


def forget_all(connection):
    connection.execute(delete(producer_states))


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

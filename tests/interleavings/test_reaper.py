"""A producer and the reaper: a transaction whose time is up in the middle is aborted as a whole or not at all."""

from __future__ import annotations

import pytest

from tests.databases import on_sqlite_alone
from tests.tools.elsewhere import Elsewhere
from tests.tools.interleaving import before_locks, explore, stop_here
from tests.tools.lists import be_many
from txnstore.transactions.protocol import FenceReason, TransactionState
from txnstore.transactions.recovery import abort_timed_out, complete_all_decided
from txnstore.transactions.rows import read_row
from txnstore.transactions.transaction import abort_if_timed_out

pytestmark = pytest.mark.slow_on_postgresql

TIMEOUT_MS = 1_000


def test_a_transaction_that_times_out_in_the_middle_is_aborted_and_its_producer_told(world, in_turn):
    def make():
        setting = world.setting()
        producer = setting.producer("producer", world.first, timeout_ms=TIMEOUT_MS)
        producer.init()
        reaped: list[str] = []

        def reap():
            stop_here("time passes")
            world.clock.advance(TIMEOUT_MS + 1)
            reaped.extend(abort_timed_out(world.second))

        def at_end(finished):
            answers = finished["producer"].result()
            if reaped:
                assert "TransactionAbortable" in answers
            if "TransactionAbortable" in answers:
                # Abortable, not fatal: nobody has taken the producer's place. The reaper did it, or its own request.
                assert setting.order_of("end") == []
                row = world.observer.read(lambda connection: read_row(connection, setting.transactional_id).row)
                assert row.fence_reason is FenceReason.TIMEOUT
            else:
                assert answers == ["ok"] * 3
            # Whatever happened, the next life of the producer works.
            producer.init()
            producer.append("next", {"p0": ["next/1"], "p1": ["next/2"]})
            producer.end("next", commit=True)
            outcomes.add(tuple(answers))

        return setting.scenario(
            {
                "producer": in_turn(
                    lambda: producer.append("one", {"p0": ["one/1"], "p1": ["one/2"]}),
                    lambda: producer.append("one", {"p1": ["one/3"]}),
                    lambda: producer.end("one", commit=True),
                ),
                "reaper": reap,
            },
            at_end=at_end,
        )

    outcomes: set[tuple[str, ...]] = set()
    explore(make)
    assert outcomes == {
        ("ok", "ok", "ok"),
        ("ok", "ok", "TransactionAbortable"),
        ("ok", "TransactionAbortable", "TransactionAbortable"),
    }


@pytest.mark.slow
def test_two_reapers_abort_a_transaction_once_and_leave_the_next_one_alone(world, in_turn):
    def make():
        setting = world.setting()
        producer = setting.producer("producer", world.observer, timeout_ms=TIMEOUT_MS)
        producer.init()
        producer.append("one", {"p0": ["one/1"], "p1": ["one/2"]})
        world.clock.advance(TIMEOUT_MS + 1)

        def aborted_once(finished):
            aborted = {name: finished[name].result() for name in ("first", "second")}
            assert finished["producer"].result() == ["ok"] * 3
            outcomes.add(tuple(sorted(aborted.values())))

        return setting.scenario(
            {
                "first": lambda: abort_if_timed_out(world.first, setting.transactional_id),
                "second": lambda: abort_if_timed_out(world.second, setting.transactional_id),
                "producer": in_turn(
                    producer.init,
                    lambda: producer.append("two", {"p0": ["two/1"], "p1": ["two/2"]}),
                    lambda: producer.end("two", commit=True),
                ),
            },
            at_end=aborted_once,
            alike=("first", "second"),
        )

    outcomes: set[tuple[bool, bool]] = set()
    assert explore(make).orders == 10
    # Or neither: the producer's next life has aborted it.
    assert outcomes == {(False, True), (False, False)}


@pytest.mark.slow
def test_of_many_that_time_out_at_once_one_that_commits_at_that_moment_ends_as_it_is_told(
    world, in_turn, monkeypatch: pytest.MonkeyPatch
):
    """Statement by statement: the others are aborted, whatever becomes of it, and nobody waits in a circle."""
    be_many(monkeypatch)

    def make():
        setting = world.setting()
        names = [f"{setting.transactional_id}-{number}" for number in range(3)]
        producers = [
            setting.producer(name, store, transactional_id=name, timeout_ms=TIMEOUT_MS)
            for name, store in zip(names, (world.first, world.observer, world.observer), strict=True)
        ]
        for name, producer in zip(names, producers, strict=True):
            producer.init()
            producer.append(name, {"p0": [f"{name}/1"], "p1": [f"{name}/2"]})

        def reap():
            stop_here("time passes")
            world.clock.advance(TIMEOUT_MS + 1)
            return abort_timed_out(world.second)

        def each_ended_once(finished):
            (answer,) = finished["producer"].result()
            aborted = set(finished["reaper"].result())
            assert set(names[1:]) <= aborted <= set(names)
            assert not (answer == "ok" and names[0] in aborted)
            # Where its request came late it was the one that aborted it.
            assert abort_timed_out(world.observer) == ()
            ends = [TransactionState.COMPLETE_COMMIT if answer == "ok" else TransactionState.COMPLETE_ABORT]
            ends += [TransactionState.COMPLETE_ABORT] * 2
            for name, end in zip(names, ends, strict=True):
                row = world.observer.read(lambda connection, name=name: read_row(connection, name).row)
                assert (row.state, row.producer_epoch) == (end, 1)
            outcomes.add((answer, names[0] in aborted))

        return setting.scenario(
            {"producer": in_turn(lambda: producers[0].end(names[0], commit=True)), "reaper": reap},
            at_end=each_ended_once,
        )

    outcomes: set[tuple[str, bool]] = set()
    # On SQLite whoever writes is alone.
    interruptions_max = 1 if world.observer.backend.name == "sqlite" else 2
    explored = explore(make, stops=before_locks, preemptions_max=interruptions_max, store=world.observer)
    assert explored.deadlocks == 0
    assert {("ok", False), ("TransactionAbortable", True)} <= outcomes


# Each step is a whole database transaction: they come one after the other, whichever database it is.
@pytest.mark.slow
@on_sqlite_alone
def test_of_many_over_several_databases_each_ends_once_whoever_helps_and_whoever_commits(
    world, in_turn, url, txnstore_open, monkeypatch: pytest.MonkeyPatch
):
    """A reaper, a recovery and the producer of one of them: decided once, and complete in all partitions."""
    be_many(monkeypatch)
    third = txnstore_open(url, pool_size=1)

    def make():
        setting = world.setting()
        names = [f"{setting.transactional_id}-{number}" for number in range(2)]
        producers = [
            setting.producer(name, store, transactional_id=name, timeout_ms=TIMEOUT_MS, writes_elsewhere=True)
            for name, store in zip(names, (world.first, world.observer), strict=True)
        ]
        for name, producer in zip(names, producers, strict=True):
            producer.init()
            producer.append(name, {"p0": [f"{name}/1"], "p1": [f"{name}/2"]})

        def reap():
            stop_here("time passes")
            world.clock.advance(TIMEOUT_MS + 1)
            return abort_timed_out(world.second, Elsewhere(world.second))

        def recover():
            return complete_all_decided(third, Elsewhere(third))

        def each_ended_once(finished):
            (answer,) = finished["producer"].result()
            for helper in ("reaper", "recovery"):
                assert set(finished[helper].result()) <= set(names)
            assert complete_all_decided(world.observer, Elsewhere(world.observer)) == ()
            ends = [TransactionState.COMPLETE_COMMIT if answer == "ok" else TransactionState.COMPLETE_ABORT]
            ends += [TransactionState.COMPLETE_ABORT]
            for name, end in zip(names, ends, strict=True):
                row = world.observer.read(lambda connection, name=name: read_row(connection, name).row)
                assert (row.state, row.producer_epoch) == (end, 1)
            outcomes.add(answer)

        return setting.scenario(
            {
                "producer": in_turn(lambda: producers[0].end(names[0], commit=True)),
                "reaper": reap,
                "recovery": recover,
            },
            at_end=each_ended_once,
        )

    outcomes: set[str] = set()
    explored = explore(make, preemptions_max=1)
    assert explored.orders >= 20
    assert {"ok", "TransactionAbortable"} <= outcomes

"""A producer and the reaper: a transaction whose time is up in the middle is aborted as a whole or not at all."""

from __future__ import annotations

import pytest

from tests.tools.interleaving import explore, stop_here
from txnstore.transactions.protocol import FenceReason
from txnstore.transactions.recovery import abort_timed_out
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
            outcomes.add(tuple(aborted.values()))

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
        )

    outcomes: set[tuple[bool, bool]] = set()
    assert explore(make).orders == 20
    # Or neither: the producer's next life has aborted it.
    assert outcomes == {(True, False), (False, True), (False, False)}

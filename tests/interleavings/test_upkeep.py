"""Two clients that look after one store: what is due is done by one of them, and once, in every order of steps."""

from __future__ import annotations

import itertools

import pytest
from sqlalchemy import delete, func, insert, select

from tests.tools.interleaving import before_locks, before_transactions, explore
from txnstore.db.portions import Portions
from txnstore.db.schema import maintenance_duties, transaction_log
from txnstore.maintenance.duties import REMOVE_INTERVAL
from txnstore.maintenance.leases import LEASE_MS
from txnstore.maintenance.turns import MaintenanceDuty, take_turn
from txnstore.transactions.recovery import trim_journal

pytestmark = pytest.mark.slow_on_postgresql

DAY_MS = 86_400_000
ENTRIES = 3
_numbers = itertools.count(1)


def entries(now_ms):
    for _ in range(ENTRIES):
        number = next(_numbers)
        yield {
            "transactional_id": f"upkeep-{number}",
            "transaction_number": number,
            "producer_id": number,
            "producer_epoch": 0,
            "state": 4,
            "first_state": 1,
            "timeout_ms": 1,
            "start_ms": 1,
            "update_ms": now_ms,
            "reason": "test",
        }


@pytest.mark.slow_but_first
@pytest.mark.parametrize("lease_runs_out", [False, True])
@pytest.mark.parametrize(
    ("txnstore_url", "by_lock"),
    # Whole database transactions come one after the other, whichever database it is.
    [("sqlite", False), ("sqlite", True), ("postgresql", True)],
    indirect=["txnstore_url"],
)
def test_what_is_due_is_done_once_in_every_order_of_steps(world, by_lock, lease_runs_out):
    outcomes = set()

    def make():
        setting = world.setting(partition_count=1)
        trimmed = []

        def clear(connection):
            connection.execute(delete(maintenance_duties))
            connection.execute(delete(transaction_log))
            connection.execute(insert(transaction_log), list(entries(world.clock.now_ms())))

        world.observer.write(clear)
        world.clock.advance(8 * DAY_MS)

        def trim(portion):
            if lease_runs_out:
                # Whoever comes now takes it, too.
                world.clock.advance(LEASE_MS)
            trimmed.append(trim_journal(portion.store, portion.portions))
            return trimmed[-1]

        duty = MaintenanceDuty("journal entries deleted", REMOVE_INTERVAL, lambda: trim)

        def turn(store):
            # For as long as it takes, but with the small portions of somebody who has little time.
            return take_turn(store, None, [duty], Portions(seconds=3_600))

        def all_is_done_once(finished):
            turns = [finished[name].result() for name in ("first", "second")]
            outcomes.add(tuple(sorted(len(turn.done) for turn in turns)))
            assert sum(trimmed) == ENTRIES
            if not lease_runs_out:
                assert len(trimmed) == 1
            left = select(func.count()).select_from(transaction_log)
            assert world.observer.read(lambda connection: connection.execute(left).scalar_one()) == 0
            (row,) = world.observer.read(lambda connection: connection.execute(select(maintenance_duties)).all())
            assert (row.holder, row.held_until_ms, row.is_unfinished) == (None, None, False)

        actors = {"first": lambda: turn(world.first), "second": lambda: turn(world.second)}
        return setting.scenario(actors, at_end=all_is_done_once, alike=actors)

    explored = explore(
        make,
        stops=before_locks if by_lock else before_transactions,
        preemptions_max=1 if by_lock else 2,
        store=world.observer,
        # The clock is another thing that they have in common.
        all_orders=lease_runs_out,
    )
    assert explored.orders > 1
    assert (0, 1) in outcomes or (1, 1) in outcomes
    assert ((1, 1) in outcomes) is lease_runs_out

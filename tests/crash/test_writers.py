"""A writer, or who ends their transaction, dies at any step: what counts counts as a whole, and nobody hangs."""

from __future__ import annotations

from functools import partial

import pytest

from tests.crash.afterlives import start_producer
from tests.crash.everywhere import crash_everywhere
from tests.crash.worlds import LATER, OLD, TIMEOUT_MS, Place, View, World, look, written
from tests.crash.writing_together import ALL_TOGETHER, Together, ends_together, in_turn, joins, reports, writes
from tests.databases import on_sqlite_and_some_on_postgresql
from txnstore.db.store import Store
from txnstore.errors import ProducerFenced
from txnstore.model import ControlType
from txnstore.testing.invariants import assert_sound
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.recovery import recover

pytestmark = [pytest.mark.slow_on_postgresql, pytest.mark.crashes]


def goes_on(case: Together, place: Place, world: World, store: Store, left: View) -> ControlType:
    """Whoever died repeats the call, and the transaction comes to its end."""
    recover(store)
    if case.time_is_up:
        # Whichever reaper it was, the transaction is aborted.
        return ControlType.ABORT
    if case.ends_in is None or left.decision is None:
        moved = case.call(world, store)
        world = moved if isinstance(moved, World) else world
    if case.ends_in is not None:
        return case.ends_in
    if not world.writers:
        world = in_turn(joins)(world, store)
    reports(world, store)
    ends_together(commit=True)(world, store)
    return ControlType.COMMIT


def nobody_comes_back(case: Together, place: Place, world: World, store: Store, left: View) -> ControlType:
    """What is decided is completed, what is open is aborted in time; writers that were only slow are told."""
    recover(store)
    place.clock.advance(TIMEOUT_MS + 1)
    recover(store)
    writers_are_fenced(world, store)
    return ControlType.ABORT if left.decision is None else left.decision


def new_producer_starts(case: Together, place: Place, world: World, store: Store, left: View) -> ControlType:
    """Another process takes over the transactional id: what was open is aborted, and all of its writers fenced."""
    start_producer(world, store)
    writers_are_fenced(world, store)
    return ControlType.ABORT if left.decision is None else left.decision


def writers_are_fenced(world: World, store: Store) -> None:
    before = look(store, world)
    for writer in range(len(world.writers)):
        for late in (writes(LATER, writer=writer), writes(LATER, writer=writer, report=True)):
            with pytest.raises(ProducerFenced):
                late(world, store)
    with pytest.raises(ProducerFenced):
        joins(world, store)
    assert look(store, world) == before


# How what was decided is delivered elsewhere is not the writers' affair: test_transactions.py has that on PostgreSQL.
@pytest.mark.slow_but_first
@on_sqlite_and_some_on_postgresql("case", ALL_TOGETHER, [each for each in ALL_TOGETHER if not each.is_elsewhere])
def test_writers_count_whole_or_not_at_all_whoever_dies_at_whichever_step(place: Place, case: Together):
    def check(left: View, commits: int) -> None:
        if not case.is_elsewhere:
            counts = left.decision is ControlType.COMMIT
            assert left.committed == written(OLD, *(case.flushes if counts else ()))

    def live(life, world: World, store: Store, left: View) -> None:
        outcome = life(case, place, world, store, left)
        assert left.decision in (None, outcome), "the decision stands"
        flushes = (OLD, *case.flushes) if outcome is ControlType.COMMIT else (OLD,)
        assert look(store, world).committed == written(*flushes)
        assert_sound(store, at_rest=True, partition_ids=world.partition_ids)
        identity = start_producer(world, store)
        TransactionCoordinator(store).end_transaction(
            world.transactional_id, identity, commit=True, appends=world.batches(LATER, producer=identity)
        )
        assert look(store, world).committed == written(*flushes, LATER)

    progress = crash_everywhere(
        place,
        before=case.begin(place),
        call=case.call,
        check=check,
        lives=[partial(live, life) for life in (goes_on, nobody_comes_back, new_producer_starts)],
        steps_min=5,
        is_elsewhere=case.is_elsewhere,
    )
    assert progress.commits == 1 if not case.is_elsewhere else progress.commits > 1

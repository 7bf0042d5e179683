"""The recovery dies as well, at any of its steps, whatever the first crash has left: the next recovery is enough."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass

import pytest

from tests.crash.afterlives import (
    Afterlife,
    Remains,
    call_is_repeated,
    live_on,
    next_reaper_comes,
    start_is_repeated,
    start_producer,
)
from tests.crash.scenarios import FIRST, SECOND, SENT, Scenario, ends, recovers, sends
from tests.crash.worlds import TIMEOUT_MS, Place, Step, World, look, state_of
from tests.tools.crashes import CrashPoint, When, every_second_crash, is_commit, noting
from tests.tools.elsewhere import assert_sound_elsewhere
from txnstore.db.store import Store
from txnstore.model import ControlType
from txnstore.testing.invariants import assert_sound
from txnstore.transactions.recovery import recover

pytestmark = [pytest.mark.slow, pytest.mark.crashes]


@dataclass
class Victims:
    """Two processes: one makes the call, and one comes to its help."""

    world: World
    caller: Store
    helper: Store


def reaps(place: Place) -> Step:
    """Return a recovery that comes late enough to abort what is open."""

    def step(world: World, store: Store) -> object:
        place.clock.advance(TIMEOUT_MS + 1)
        return recover(store)

    return step


OPEN = Scenario(
    "an append",
    SENT,
    sends(SECOND),
    [FIRST, SECOND],
    has_offsets=True,
)
#: Its first step is the decision.
COMMIT = Scenario(
    "a commit elsewhere of what was sent before",
    SENT,
    ends(commit=True, elsewhere=True),
    [FIRST],
    has_offsets=True,
    ends_in=ControlType.COMMIT,
    is_elsewhere=True,
)


@pytest.mark.parametrize(
    ("scenario", "commits", "recovery", "afterlife"),
    [
        # On PostgreSQL, where a crash takes longer, only when it is decided: all of the recovery is still to come.
        (COMMIT, (1,), lambda place: recovers, call_is_repeated),
        (OPEN, (0, 1), lambda place: start_producer, start_is_repeated),
        (OPEN, (0, 1), reaps, next_reaper_comes),
    ],
    ids=["a recovery over a commit elsewhere", "a start over an append", "a reaper over an append"],
)
def test_a_second_crash_at_any_step_of_the_recovery_leaves_nothing_that_the_next_one_does_not_mend(
    place: Place, scenario: Scenario, commits: Collection[int], recovery: Callable[[Place], Step], afterlife: Afterlife
):
    states: set[Hashable] = set()
    pairs = 0
    is_first = _after_commits(() if place.is_sqlite else commits)
    unsettled: list[World] = []
    with place.open() as others, place.open() as caller, place.open() as helper:
        recovers_now = recovery(place)

        def make() -> Victims:
            # Nothing more happens to the worlds before.
            while unsettled:
                start_producer(unsettled.pop(), others)
            world = place.make(others, scenario.before)
            unsettled.append(world)
            return Victims(world, caller, helper)

        for crash in every_second_crash(
            make,
            lambda victims: scenario.call(victims.world, victims.caller),
            lambda victims: recovers_now(victims.world, victims.helper),
            is_first=is_first,
            statements_are_all=True,
        ):
            pairs += 1
            crash.revive()
            world = crash.subject.world
            with noting(crash):
                state = state_of(others, world)
                if state not in states:
                    states.add(state)
                    left = look(others, world)
                    (assert_sound_elsewhere if scenario.is_elsewhere else assert_sound)(
                        others, partition_ids=world.partition_ids
                    )
                    live_on(afterlife, Remains(scenario, world, others, place.clock, left))
        assert_sound(others, partition_ids=())
    assert pairs >= 30
    assert len(states) > 1


def _after_commits(numbers: Collection[int]) -> Callable[[CrashPoint], bool]:
    """Return what picks the points just after these COMMITs, by number; 0 is the very beginning; none given: all.

    Nothing but a COMMIT leaves traces, as the tests of single crashes show.
    """
    commits = 0

    def is_picked(point: CrashPoint) -> bool:
        nonlocal commits
        if (point.step, point.when) == (1, When.BEFORE):
            return not numbers or 0 in numbers
        if point.when is When.BEFORE or not is_commit(point.statement):
            return False
        commits += 1
        return not numbers or commits in numbers

    return is_picked

"""A process is killed, SIGKILL, at any step: whoever opens the database next finds it right."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from tests.crash.afterlives import Remains, call_is_repeated, live_on, start_is_repeated, start_producer
from tests.crash.children import START, Task, call, open_victim
from tests.crash.scenarios import APPENDS, COMMIT_ELSEWHERE, ENDINGS, Scenario
from tests.crash.worlds import Place, Progress, World, look, points_around_transactions, state_of
from tests.tools.crashes import noting
from tests.tools.elsewhere import assert_sound_elsewhere
from tests.tools.killed_children import every_kill
from txnstore.testing.invariants import assert_sound

pytestmark = [pytest.mark.slow, pytest.mark.crashes]


@pytest.mark.parametrize("scenario", [APPENDS[0], ENDINGS[0], COMMIT_ELSEWHERE, START], ids=str)
def test_a_killed_process_leaves_nothing_that_the_next_one_does_not_mend(place: Place, scenario: Scenario):
    if scenario is COMMIT_ELSEWHERE and not place.is_sqlite:
        pytest.skip("a killed client leaves the same on PostgreSQL as one whose connection is cut, and takes longer")
    progress = Progress()
    states: set[Hashable] = set()
    afterlife = start_is_repeated if scenario is START else call_is_repeated
    untouched: list[World] = []
    with place.open() as others:

        def make() -> Task:
            world = untouched.pop() if untouched else place.make(others, scenario.before)
            # Nobody has the database open when the child dies: its traces are all that the next one finds.
            others.engine.dispose()
            return scenario.name, world

        # Step by step they are crashed in test_transactions.py; how a file is left that a process was killed on at any
        # statement shows in the scenarios with fewer of them.
        points = None
        if scenario.is_elsewhere or not (place.is_sqlite or scenario is APPENDS[0]):
            points = points_around_transactions(place, scenario.before, scenario.call)
        for kill in every_kill(make, call, prepare=open_victim, points=points, statements_are_all=True):
            progress.pass_(kill.point)
            _, world = kill.argument
            with noting(kill):
                state = state_of(others, world)
                if state not in states:
                    states.add(state)
                    left = look(others, world)
                    (assert_sound_elsewhere if scenario.is_elsewhere else assert_sound)(
                        others, partition_ids=world.partition_ids
                    )
                    if progress.commits:
                        live_on(afterlife, Remains(scenario, world, others, place.clock, left))
                assert len(states) <= progress.commits + 1, "only a COMMIT leaves traces"
                if progress.commits == 0:
                    untouched.append(world)
                else:
                    start_producer(world, others)
    progress.assert_complete(steps_min=10 if points is None else 3)
    assert len(states) > 1

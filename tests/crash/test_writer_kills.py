"""A process that writes in a shared transaction, or decides it, is killed, SIGKILL, at any step: the others go on."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from tests.crash.afterlives import start_producer
from tests.crash.children import Task, call_together, open_victim
from tests.crash.sinking import SINKING_BY_NAME, progress_of, replays
from tests.crash.worlds import (
    NEW_OFFSET,
    OLD,
    OLD_OFFSET,
    PARTITIONS,
    Place,
    Progress,
    World,
    look,
    points_around_transactions,
    state_of,
    written,
)
from tests.crash.writing_together import TOGETHER_BY_NAME, ends_together, reports
from tests.tools.crashes import noting
from tests.tools.killed_children import every_kill
from txnstore.db.store import Store
from txnstore.model import ControlType
from txnstore.testing.invariants import assert_sound

pytestmark = [pytest.mark.slow, pytest.mark.crashes]


def writer_is_followed(name: str, world: World, store: Store) -> None:
    """The killed writer's successor repeats its last call, and the committer counts it."""
    case = TOGETHER_BY_NAME[name]
    case.call(world, store)
    if case.ends_in is None:
        reports(world, store)
        ends_together(commit=True)(world, store)
    assert look(store, world).committed == written(OLD, *case.flushes)


def batch_is_replayed(name: str, world: World, store: Store) -> None:
    """The query is started again, and its batch is there once, with what it read."""
    replays(world, store)
    assert look(store, world).committed == written(OLD, "first")
    assert look(store, world).offsets == (NEW_OFFSET,) * PARTITIONS
    assert progress_of(world, store) == (1, PARTITIONS)


CASES = {
    "a last append with its report": writer_is_followed,
    "a commit of writers": writer_is_followed,
    "the last append of a task": batch_is_replayed,
    "the decision of a batch": batch_is_replayed,
}


@pytest.mark.parametrize("name", CASES)
def test_a_killed_process_leaves_nothing_that_the_others_do_not_mend(place: Place, name: str):
    case = TOGETHER_BY_NAME[name] if name in TOGETHER_BY_NAME else SINKING_BY_NAME[name]
    progress = Progress()
    states: set[Hashable] = set()
    untouched: list[World] = []
    with place.open() as others:

        def make() -> Task:
            world = untouched.pop() if untouched else place.make(others, case.before)
            # Nobody has the database open when the child dies: its traces are all that the next one finds.
            others.engine.dispose()
            return name, world

        # Step by step they are crashed in test_writers.py and test_sink.py.
        points = None
        if name == "the decision of a batch" or not (place.is_sqlite or name == "the last append of a task"):
            points = points_around_transactions(place, case.before, case.call)
        for kill in every_kill(make, call_together, prepare=open_victim, points=points, statements_are_all=True):
            progress.pass_(kill.point)
            _, world = kill.argument
            with noting(kill):
                state = state_of(others, world)
                if state not in states:
                    states.add(state)
                    left = look(others, world)
                    assert_sound(others, partition_ids=world.partition_ids)
                    counts = left.decision is ControlType.COMMIT
                    assert left.committed == written(OLD, *(["first"] if counts else []))
                    if name in SINKING_BY_NAME:
                        assert left.offsets == (NEW_OFFSET if counts else OLD_OFFSET,) * PARTITIONS
                    if progress.commits:
                        CASES[name](name, world, others)
                        assert_sound(others, at_rest=True, partition_ids=world.partition_ids)
                assert len(states) <= progress.commits + 1, "only a COMMIT leaves traces"
                if progress.commits == 0:
                    untouched.append(world)
                else:
                    start_producer(world, others)
    progress.assert_complete(steps_min=5 if points is None else 3)
    assert len(states) > 1

"""A producer dies at any step of any of its calls: its transaction counts whole or not at all, and life goes on."""

from __future__ import annotations

from functools import partial

import pytest

from tests.crash.afterlives import AFTERLIVES, Afterlife, Remains, live_on
from tests.crash.everywhere import crash_everywhere
from tests.crash.scenarios import ABORT_ELSEWHERE, ALL, RECOVERY, Scenario
from tests.crash.worlds import NEW_OFFSET, OLD, OLD_OFFSET, PARTITIONS, Place, View, World, written
from tests.databases import on_sqlite_and_some_on_postgresql
from txnstore.db.store import Store
from txnstore.model import ControlType

pytestmark = [pytest.mark.slow_on_postgresql, pytest.mark.crashes]


# A commit that is delivered elsewhere has all the steps of its recovery, and those of an abort but for what they write.
@pytest.mark.slow_but_first
@on_sqlite_and_some_on_postgresql("scenario", ALL, [each for each in ALL if each not in (ABORT_ELSEWHERE, RECOVERY)])
def test_a_crash_at_any_step_leaves_a_transaction_that_ends_whole_or_not_at_all(place: Place, scenario: Scenario):
    def live(afterlife: Afterlife, world: World, store: Store, left: View) -> None:
        live_on(afterlife, Remains(scenario, world, store, place.clock, left))

    progress = crash_everywhere(
        place,
        before=scenario.before,
        call=scenario.call,
        check=partial(check_left, scenario),
        lives=[partial(live, afterlife) for afterlife in AFTERLIVES],
        steps_min=5,
        is_elsewhere=scenario.is_elsewhere,
    )
    assert progress.commits == 1 if not scenario.is_elsewhere else progress.commits > 1


def check_left(scenario: Scenario, left: View, commits: int) -> None:
    """Check what a crash has left before anybody comes to its help."""
    if scenario.ends_in is not None and scenario.is_producers:
        # What is for other databases is sent first: they are steps before the decision.
        before = (None, scenario.ends_in) if scenario.is_elsewhere else (scenario.ends_in,)
        assert left.decision in (before if commits else (None,))
    if not scenario.is_elsewhere:
        # In one database it is whole or not there at every instant.
        counts = left.decision is ControlType.COMMIT
        assert left.committed == written(OLD, *(scenario.flushes if counts else ()))
        assert left.offsets == (NEW_OFFSET if counts and scenario.has_offsets else OLD_OFFSET,) * PARTITIONS

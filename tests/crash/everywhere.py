"""The round that every test of crashes makes: a call dies before and after each of its steps.

Each crash has a world of its own. What it leaves is compared with what the crashes before it have left, all rows of
all tables: only a COMMIT leaves traces. What may happen next happens once to each state; to a world in a state that
was there before, nothing new can happen.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final

from tests.crash.afterlives import start_producer
from tests.crash.worlds import Place, Progress, Step, Victim, View, World, look, state_of
from tests.tools.crashes import crash_at, every_crash, noting
from tests.tools.elsewhere import assert_sound_elsewhere
from tests.tools.journal import ShortJournal
from txnstore.db.store import Store
from txnstore.testing.invariants import assert_sound
from txnstore.transactions.protocol import DECIDED, TransactionState

UNFINISHED: Final = DECIDED | {TransactionState.ONGOING}

#: Checks what a crash has left, once so many of the call's database transactions were committed.
Check = Callable[[View, int], None]
#: Happens after a crash that left this; checks what there is to check.
Life = Callable[[World, Store, View], None]


def crash_everywhere(
    place: Place,
    *,
    before: Step,
    call: Step,
    check: Check,
    lives: Sequence[Life],
    steps_min: int,
    is_elsewhere: bool = False,
) -> Progress:
    """Crash `call` at every point, after `before`; let each of `lives` follow; return how far it went."""
    progress = Progress()
    states: dict[Hashable, View] = {}
    with place.open() as others, place.open() as victims:
        untouched: list[World] = []
        journal = ShortJournal(others)

        def make() -> Victim:
            return Victim(untouched.pop() if untouched else place.make(others, before), victims)

        def die(victim: Victim) -> None:
            call(victim.world, victim.store)

        # Others see of it what it writes; `test_crash_tools.py` shows that so the sides left out are those seen before.
        for crash in every_crash(make, die, statements_are_all=True):
            progress.pass_(crash.point)
            crash.revive()
            world = crash.subject.world
            state = state_of(others, world)
            is_known = state in states
            with noting(crash):
                if not is_known:
                    states[state] = look(others, world)
                    check(states[state], progress.commits)
                    (assert_sound_elsewhere if is_elsewhere else assert_sound)(
                        others, partition_ids=world.partition_ids
                    )
                assert len(states) <= progress.commits + 1, "only a COMMIT leaves traces"
                if progress.commits == 0:
                    untouched.append(world)
                elif states[state].state in UNFINISHED:
                    start_producer(world, others)
            if progress.commits:
                journal.done(world.transactional_id)
            for life in () if is_known else lives:
                with noting(f"{crash}; {life}"):
                    again = crash_at(crash.step, crash.when, die, make())
                    assert again is not None
                    assert again.point == crash.point
                    again.revive()
                    life(again.subject.world, others, states[state])
                    journal.done(again.subject.world.transactional_id)
        assert_sound(others, partition_ids=())
    progress.assert_complete(steps_min=steps_min)
    assert len(states) > 1, "what is committed leaves traces"
    return progress

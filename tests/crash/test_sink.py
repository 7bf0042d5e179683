"""A task or the driver of a query dies at any step: its batch, and what it read, count once and together."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest

from tests.crash.everywhere import crash_everywhere
from tests.crash.scenarios import FIRST
from tests.crash.sinking import (
    ALL_SINKING,
    NEXT_RUN,
    RUN,
    Sinking,
    aborts_batch,
    decides_batch,
    is_known,
    notes,
    opens,
    progress_of,
    replays,
)
from tests.crash.worlds import (
    NEW_OFFSET,
    OLD,
    OLD_OFFSET,
    PARTITIONS,
    Place,
    View,
    World,
    look,
    written,
)
from tests.crash.writing_together import in_turn, writes
from txnstore.db.store import Store
from txnstore.errors import ProducerFenced
from txnstore.groups.offsets import read_offsets
from txnstore.spark.sink_coordination import TIMEOUT_MS_DEFAULT
from txnstore.testing.invariants import assert_sound
from txnstore.transactions.recovery import recover

pytestmark = [pytest.mark.slow_on_postgresql, pytest.mark.crashes]

DONE = (written(OLD, FIRST), (NEW_OFFSET,) * PARTITIONS, (1, PARTITIONS))
NOT_DONE = (written(OLD), (OLD_OFFSET,) * PARTITIONS, (0, 0))


def standing(world: World, store: Store):
    left = look(store, world)
    group = store.read(partial(read_offsets, group_id=world.group_id, partition_ids=world.partition_ids))
    orders = {offset.offset_in_transaction for offset in group.offsets.values()}
    assert orders == {0 if world.in_commit_order else None}
    return left.committed, left.offsets, progress_of(world, store)


def task_is_tried_again(place: Place, world: World, store: Store) -> None:
    """The same run goes on with another attempt."""
    again = in_turn(notes(), opens())(replace(world, writers=()), store)
    if again.writers:
        writes(FIRST, report=True)(again, store)
    was_done = standing(world, store) == DONE
    assert decides_batch()(again, store) is not was_done


def driver_aborts_again(place: Place, world: World, store: Store) -> None:
    """Whether or not the run is over by then, it is after this, and the next one does the batch."""
    aborts_batch(world, store)
    assert_sound(store, at_rest=True, partition_ids=world.partition_ids)
    with pytest.raises(ProducerFenced, match="is over"):
        opens()(world, store)
    next_run_replays(place, world, store)


def next_run_replays(place: Place, world: World, store: Store) -> None:
    """The query is started again: it does the batch, or finds it done; the run before it is fenced then."""
    was_done, was_seen = standing(world, store) == DONE, is_known(world, store)
    assert replays(world, store) is not was_done
    if was_seen:
        with pytest.raises(ProducerFenced):
            decides_batch()(world, store)
        with pytest.raises(ProducerFenced):
            opens()(world, store)


def nobody_comes_for_long(place: Place, world: World, store: Store) -> None:
    """The run is dead; its transaction is aborted in time, and readers go on."""
    place.clock.advance(TIMEOUT_MS_DEFAULT + 1)
    recover(store)
    assert_sound(store, at_rest=True, partition_ids=world.partition_ids)
    next_run_replays(place, world, store)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("case", ALL_SINKING, ids=str)
def test_a_batch_counts_once_and_with_what_it_read_whoever_dies_at_whichever_step(place: Place, case: Sinking):
    done_before = case.name == "the decision of a replay"

    def check(left: View, commits: int) -> None:
        is_done = done_before or (case.decides and commits > 0)
        assert (left.committed, left.offsets) == (DONE if is_done else NOT_DONE)[:2]
        assert not left.is_pending

    def live(life, world: World, store: Store, left: View) -> None:
        is_done = left.committed == DONE[0]
        assert standing(world, store) == (DONE if is_done else NOT_DONE)
        life(place, world, store)
        assert standing(world, store) == DONE
        assert_sound(store, at_rest=True, partition_ids=world.partition_ids)
        # Whatever comes now is a replay.
        for run_id in (RUN, NEXT_RUN, "run 3"):
            with suppress(ProducerFenced):
                assert decides_batch(run_id)(replace(world, writers=()), store) is False
        assert standing(world, store) == DONE

    lives = [next_run_replays, nobody_comes_for_long]
    if case.ends_run:
        lives.append(driver_aborts_again)
    elif not case.is_next_run:
        lives.append(task_is_tried_again)
    progress = crash_everywhere(
        place,
        before=case.before,
        call=case.call,
        check=check,
        lives=[partial(live, life) for life in lives],
        steps_min=4,
    )
    assert progress.commits == 1

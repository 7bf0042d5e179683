"""What a query's tasks and driver do in a sink, step by step, for the tests in which one of them dies.

A world has one batch of a query, which reads NEW_OFFSET records of each partition and writes FIRST; an attempt that
nobody names has written as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from sqlalchemy import Connection, select

from tests.crash.scenarios import FIRST
from tests.crash.worlds import NEW_OFFSET, OLD_OFFSET, Step, World
from tests.crash.writing_together import SILENT, in_turn, writes
from txnstore.db.schema import sink_batches, sink_positions, sink_runs
from txnstore.db.store import Store
from txnstore.groups.administration import alter_offsets
from txnstore.model import OffsetAndMetadata
from txnstore.spark.sink_coordination import abort, decide, open_writer
from txnstore.spark.sink_inputs import SinkInput, note_inputs
from txnstore.spark.sink_run import SinkRun, run_of_query

#: The run that a crash is about, and the one that comes after it.
RUN, NEXT_RUN = "run 1", "run 2"
BATCH: Final = 0


def run_of(world: World, run_id: str = RUN) -> SinkRun:
    return run_of_query(f"query-{world.number}", run_id, world.transactional_id)


def notes(run_id: str = RUN) -> Step:
    def step(world: World, store: Store) -> None:
        note_inputs(
            store,
            [
                SinkInput(
                    f"query-{world.number}",
                    run_id,
                    BATCH,
                    world.group_id,
                    partition_id,
                    0,
                    NEW_OFFSET,
                    world.in_commit_order,
                )
                for partition_id in world.partition_ids
            ],
        )

    return step


def takes_commit_order(world: World, store: Store) -> World:
    """Let the group read in commit order from where it is; what is committed for it in the other one is refused."""
    offsets = {number: OffsetAndMetadata(OLD_OFFSET, offset_in_transaction=0) for number in world.partition_ids}
    store.write(partial(alter_offsets, group_id=world.group_id, offsets=offsets))
    return replace(world, in_commit_order=True)


def opens(run_id: str = RUN) -> Step:
    def step(world: World, store: Store) -> World:
        writer = open_writer(store, run_of(world, run_id), BATCH)
        return replace(world, writers=world.writers if writer is None else (*world.writers, writer))

    return step


def decides_batch(run_id: str = RUN) -> Callable[[World, Store], bool]:
    def step(world: World, store: Store) -> bool:
        named = [world.writers[0].writer_id] if world.writers else []
        return decide(store, run_of(world, run_id), BATCH, named)

    return step


def aborts_batch(world: World, store: Store) -> bool:
    return abort(store, run_of(world), BATCH)


def replays(world: World, store: Store) -> bool:
    """Do the batch anew, as the next run of the query does."""
    again = in_turn(notes(NEXT_RUN), opens(NEXT_RUN))(replace(world, writers=()), store)
    if again.writers:
        writes(FIRST, report=True)(again, store)
    return decides_batch(NEXT_RUN)(again, store)


def progress_of(world: World, store: Store) -> tuple[int, int]:
    """Return how many batches of the world are remembered, and positions of what they have read."""

    def work(connection: Connection) -> tuple[int, int]:
        batches = select(sink_batches).where(sink_batches.c.transactional_id == world.transactional_id)
        positions = select(sink_positions).where(sink_positions.c.partition_id.in_(world.partition_ids))
        return len(connection.execute(batches).all()), len(connection.execute(positions).all())

    return store.read(work)


def is_known(world: World, store: Store, run_id: str = RUN) -> bool:
    """Return whether the store has ever seen the run."""
    found = select(sink_runs).where(
        sink_runs.c.transactional_id == world.transactional_id, sink_runs.c.run_id == run_id
    )
    return store.read(lambda connection: connection.execute(found).one_or_none() is not None)


OPENED: Final = in_turn(notes(), opens(), opens())
WRITTEN: Final = in_turn(OPENED, writes(FIRST, report=True), writes(SILENT, writer=1))


@dataclass(frozen=True)
class Sinking:
    """A batch up to some point, and the call that crashes then."""

    name: str
    before: Step
    call: Step
    decides: bool = False
    is_next_run: bool = False
    ends_run: bool = False

    def __str__(self) -> str:
        return self.name


ALL_SINKING: Final = (
    Sinking("a task that notes what it reads", in_turn(opens()), notes()),
    Sinking("the first task of a run", notes(), opens()),
    Sinking("a further task", in_turn(notes(), opens()), opens()),
    Sinking("the last append of a task", OPENED, writes(FIRST, report=True)),
    Sinking("the decision of a batch", WRITTEN, decides_batch(), decides=True),
    Sinking(
        "the decision of a batch in commit order", in_turn(takes_commit_order, WRITTEN), decides_batch(), decides=True
    ),
    Sinking("the abort of a batch", WRITTEN, aborts_batch, ends_run=True),
    Sinking("the first task of the next run", in_turn(WRITTEN, notes(NEXT_RUN)), opens(NEXT_RUN), is_next_run=True),
    Sinking("the decision of a replay", in_turn(WRITTEN, decides_batch()), decides_batch(NEXT_RUN), is_next_run=True),
)
SINKING_BY_NAME: Final = {case.name: case for case in ALL_SINKING}

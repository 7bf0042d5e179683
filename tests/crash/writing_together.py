"""What several writers of one transaction do, step by step, for the tests in which one of them dies.

The first writer of a world is the one that counts; the second one writes and never reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tests.crash.afterlives import start_producer
from tests.crash.scenarios import FIRST, SECOND, all_of, recovers
from tests.crash.worlds import TIMEOUT_MS, Place, Step, World
from tests.tools.elsewhere import Elsewhere, decide
from txnstore.db.store import Store
from txnstore.model import ControlType
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.transaction import abort_if_timed_out
from txnstore.transactions.writers import append_as_writer, begin_transaction, join_transaction, report_writer

SILENT: Final = "silent"


def begins(world: World, store: Store) -> None:
    begin_transaction(store, world.transactional_id, world.producer)


def joins(world: World, store: Store) -> World:
    writer = join_transaction(store, world.transactional_id, world.producer)
    return replace(world, writers=(*world.writers, writer))


def writes(flush: str, *, writer: int = 0, report: bool = False) -> Step:
    def step(world: World, store: Store) -> object:
        joined = world.writers[writer]
        return append_as_writer(store, joined, world.batches(flush, producer=joined.identity), report=report)

    return step


def reports(world: World, store: Store) -> None:
    report_writer(store, world.writers[0])


def ends_together(*, commit: bool, elsewhere: bool = False) -> Step:
    def step(world: World, store: Store) -> object:
        return TransactionCoordinator(store, Elsewhere(store) if elsewhere else None).end_transaction(
            world.transactional_id,
            world.producer,
            commit=commit,
            writers=[world.writers[0].writer_id] if commit else None,
        )

    return step


def decides_together(world: World, store: Store) -> None:
    """Decide to commit and go away before the first marker."""
    decide(store, world.transactional_id, world.producer, commit=True, writers=[world.writers[0].writer_id])


def reaps(world: World, store: Store) -> bool:
    return abort_if_timed_out(store, world.transactional_id)


def in_turn(*steps: Step) -> Callable[[World, Store], World]:
    """Return the steps as one; a step may return another world, which the next ones get."""

    def step(world: World, store: Store) -> World:
        for each in steps:
            moved = each(world, store)
            world = moved if isinstance(moved, World) else world
        return world

    return step


JOINED: Final = in_turn(begins, joins, joins)
WRITTEN: Final = in_turn(JOINED, writes(FIRST), writes(SILENT, writer=1))
REPORTED: Final = in_turn(WRITTEN, reports)


@dataclass(frozen=True)
class Together:
    """Writers up to some point, and the call that crashes then."""

    name: str
    before: Step
    call: Step
    flushes: Sequence[str] = ()
    """What the writer that counts has written once the call is done."""

    ends_in: ControlType | None = None
    is_elsewhere: bool = False
    is_writers: bool = False
    """Whether it is a call of the writer that counts."""

    time_is_up: bool = False

    def __str__(self) -> str:
        return self.name

    def begin(self, place: Place) -> Step:
        """Return what comes before, on the clock of the place."""

        def step(world: World, store: Store) -> World:
            moved = self.before(world, store)
            if self.time_is_up:
                place.clock.advance(TIMEOUT_MS + 1)
            return moved if isinstance(moved, World) else world

        return step


_COMMIT, _ABORT = ControlType.COMMIT, ControlType.ABORT
ALL_TOGETHER: Final = (
    Together("a transaction that is opened for writers", all_of(), begins),
    Together("a writer that joins", in_turn(begins, joins), joins),
    Together("a writer's first append", JOINED, writes(FIRST), [FIRST], is_writers=True),
    Together("a writer's further append", WRITTEN, writes(SECOND), [FIRST, SECOND], is_writers=True),
    Together("a last append with its report", WRITTEN, writes(SECOND, report=True), [FIRST, SECOND], is_writers=True),
    Together("a report", WRITTEN, reports, [FIRST], is_writers=True),
    Together("a commit of writers", REPORTED, ends_together(commit=True), [FIRST], _COMMIT),
    Together(
        "a commit of writers delivered elsewhere",
        REPORTED,
        ends_together(commit=True, elsewhere=True),
        [FIRST],
        _COMMIT,
        is_elsewhere=True,
    ),
    Together("an abort of writers", REPORTED, ends_together(commit=False), [FIRST], _ABORT),
    Together(
        "an abort of writers delivered elsewhere",
        REPORTED,
        ends_together(commit=False, elsewhere=True),
        [FIRST],
        _ABORT,
        is_elsewhere=True,
    ),
    Together(
        "the recovery of a decided commit of writers",
        in_turn(REPORTED, decides_together),
        recovers,
        [FIRST],
        _COMMIT,
        is_elsewhere=True,
    ),
    Together("a reaper over writers", REPORTED, reaps, [FIRST], _ABORT, time_is_up=True),
    Together("a start over writers", REPORTED, start_producer, [FIRST], _ABORT),
)
TOGETHER_BY_NAME: Final = {case.name: case for case in ALL_TOGETHER}

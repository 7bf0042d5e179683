"""What a producer does to its transaction, step by step: what was there before, and what crashes.

A step is a function of a world and a store, and may be repeated as a producer repeats a call whose answer was lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tests.crash.worlds import FLUSHES, Step, World
from tests.tools.elsewhere import Elsewhere, decide
from txnstore.db.store import Store
from txnstore.log.append import Appended
from txnstore.model import ControlType
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.outcome import Ended
from txnstore.transactions.recovery import recover

FIRST, SECOND = FLUSHES


def sends(flush: str) -> Step:
    """Return a producer's flush: one batch to each partition, in the transaction."""

    def step(world: World, store: Store) -> list[Appended]:
        batches = world.batches(flush)
        return TransactionCoordinator(store).append(world.transactional_id, world.producer, batches)

    return step


def sends_offsets(world: World, store: Store) -> None:
    TransactionCoordinator(store).send_offsets(world.transactional_id, world.producer, world.offsets())


def begins_with_offsets(world: World, store: Store) -> None:
    """Let offsets that cannot wait for the commit begin the transaction."""
    TransactionCoordinator(store).send_offsets(world.transactional_id, world.producer, world.offsets(), has_begun=False)


def ends_what_offsets_began(world: World, store: Store) -> Ended:
    """Commit such a transaction, with a flush that goes along."""
    return TransactionCoordinator(store).end_transaction(
        world.transactional_id,
        world.producer,
        commit=True,
        appends=world.batches(FIRST),
        has_begun=True,
        open_group_id=world.offsets().committer.group_id,
    )


def ends(*flushes: str, commit: bool, offsets: bool = False, elsewhere: bool = False) -> Step:
    """Return a producer's EndTxn, with which the flushes that it has not sent yet go along."""

    def step(world: World, store: Store) -> Ended:
        return TransactionCoordinator(store, Elsewhere(store) if elsewhere else None).end_transaction(
            world.transactional_id,
            world.producer,
            commit=commit,
            appends=[batch for flush in flushes for batch in world.batches(flush)],
            offsets=[world.offsets()] if offsets else [],
        )

    return step


def decides(*, commit: bool) -> Step:
    """Return the decision alone: no marker is delivered, as if its maker had gone away then."""
    return lambda world, store: decide(store, world.transactional_id, world.producer, commit=commit)


def recovers(world: World, store: Store) -> object:
    return recover(store, Elsewhere(store))


def all_of(*steps: Step) -> Step:
    def step(world: World, store: Store) -> None:
        for each in steps:
            each(world, store)

    return step


@dataclass(frozen=True)
class Scenario:
    """A transaction up to some point, and the call that crashes then."""

    name: str
    before: Step
    call: Step
    flushes: Sequence[str] = ()
    """What the transaction has written once the call is done."""

    has_offsets: bool = False
    """Whether it has offsets of the group by then."""

    ends_in: ControlType | None = None
    """How the call ends it, if it does."""

    is_elsewhere: bool = False
    """Whether partitions and groups are taken for those of other databases, each step a database transaction."""

    is_producers: bool = True
    """Whether it is the call of the transaction's producer."""

    def __str__(self) -> str:
        return self.name


_COMMIT, _ABORT = ControlType.COMMIT, ControlType.ABORT
NOTHING: Final = all_of()
SENT: Final = all_of(sends(FIRST), sends_offsets)

APPENDS: Final = (
    Scenario("the first append of a transaction", NOTHING, sends(FIRST), [FIRST]),
    Scenario("a further append", SENT, sends(SECOND), [FIRST, SECOND], has_offsets=True),
)
OFFSETS: Final = (
    Scenario("offsets that begin a transaction", NOTHING, sends_offsets, has_offsets=True),
    Scenario("offsets that begin a transaction at once", NOTHING, begins_with_offsets, has_offsets=True),
    Scenario("offsets after records", sends(FIRST), sends_offsets, [FIRST], has_offsets=True),
)


ENDINGS: Final = (
    Scenario(
        "a commit with everything in the buffer",
        NOTHING,
        ends(FIRST, SECOND, commit=True, offsets=True),
        [FIRST, SECOND],
        has_offsets=True,
        ends_in=_COMMIT,
    ),
    Scenario(
        "a commit with everything sent before", SENT, ends(commit=True), [FIRST], has_offsets=True, ends_in=_COMMIT
    ),
    Scenario(
        "a commit with some sent and some in the buffer",
        SENT,
        ends(SECOND, commit=True, offsets=True),
        [FIRST, SECOND],
        has_offsets=True,
        ends_in=_COMMIT,
    ),
    Scenario(
        "a commit behind offsets that began the transaction",
        begins_with_offsets,
        ends_what_offsets_began,
        [FIRST],
        has_offsets=True,
        ends_in=_COMMIT,
    ),
    Scenario("an abort", SENT, ends(commit=False), [FIRST], has_offsets=True, ends_in=_ABORT),
    Scenario("an abort of nothing", NOTHING, ends(commit=False), ends_in=_ABORT),
)
COMMIT_ELSEWHERE: Final = Scenario(
    "a commit delivered elsewhere",
    SENT,
    ends(SECOND, commit=True, offsets=True, elsewhere=True),
    [FIRST, SECOND],
    has_offsets=True,
    ends_in=_COMMIT,
    is_elsewhere=True,
)
ABORT_ELSEWHERE: Final = Scenario(
    "an abort delivered elsewhere",
    SENT,
    ends(commit=False, elsewhere=True),
    [FIRST],
    has_offsets=True,
    ends_in=_ABORT,
    is_elsewhere=True,
)
RECOVERY: Final = Scenario(
    "the recovery of a decided commit",
    all_of(SENT, decides(commit=True)),
    recovers,
    [FIRST],
    has_offsets=True,
    ends_in=_COMMIT,
    is_elsewhere=True,
    is_producers=False,
)
ALL: Final = (*APPENDS, *OFFSETS, *ENDINGS, COMMIT_ELSEWHERE, ABORT_ELSEWHERE, RECOVERY)

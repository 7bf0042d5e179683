"""What may happen to a transaction after a crash; each way ends it, whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import pytest

from tests.crash.scenarios import FIRST, Scenario, ends, sends, sends_offsets
from tests.crash.worlds import LATER, NEW_OFFSET, OLD, OLD_OFFSET, PARTITIONS, TIMEOUT_MS, View, World, look, written
from txnstore.db.store import Store
from txnstore.errors import TransactionAbortable, TxnStoreError
from txnstore.model import ControlType, ProducerIdentity
from txnstore.testing.invariants import assert_sound
from txnstore.testing.manual_clock import ManualClock
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.outcome import Ended, Outcome, resolve_outcome
from txnstore.transactions.protocol import TransactionState
from txnstore.transactions.recovery import Recovered, recover


@dataclass(frozen=True)
class Remains:
    """What a crash has left, and who looks at it: another process."""

    scenario: Scenario
    world: World
    store: Store
    clock: ManualClock
    left: View

    def call_again(self) -> object:
        return self.scenario.call(self.world, self.store)

    @property
    def decided(self) -> ControlType:
        """How the transaction ends if its producer does no more: as it was decided, or not at all."""
        return ControlType.ABORT if self.left.decision is None else self.left.decision


def start_producer(world: World, store: Store) -> ProducerIdentity:
    """Let a new producer of the world's transactional id start, and return who it is."""
    return TransactionCoordinator(store).init_producer_id(world.transactional_id, TIMEOUT_MS).identity


#: Returns how the transaction has ended, and who its producer is then if somebody was told.
Afterlife = Callable[[Remains], tuple[ControlType, ProducerIdentity | None]]


def call_is_repeated(remains: Remains) -> tuple[ControlType, ProducerIdentity | None]:
    """The producer repeats the very call, as it does when the answer was lost, and goes on."""
    recover(remains.store)
    answer = remains.call_again()
    if isinstance(answer, list):
        was_there = remains.left.everything == written(OLD, *remains.scenario.flushes)
        assert [appended.is_duplicate for appended in answer] == [was_there] * PARTITIONS
    outcome = remains.scenario.ends_in
    if outcome is None:
        answer, outcome = ends(commit=True)(remains.world, remains.store), ControlType.COMMIT
    return outcome, answer.identity if isinstance(answer, Ended) else None


def nobody_comes_back(remains: Remains) -> tuple[ControlType, None]:
    """What is decided is completed, what is open for too long is aborted; a producer that was only slow is told."""
    recover(remains.store)
    was_open = remains.left.state is TransactionState.ONGOING
    assert recover(remains.store) == Recovered((), ()), "its time is not up yet"
    remains.clock.advance(TIMEOUT_MS + 1)
    assert recover(remains.store) == Recovered((), (remains.world.transactional_id,) if was_open else ())
    assert recover(remains.store) == Recovered((), ())
    if was_open and remains.scenario.ends_in is not ControlType.ABORT:
        with pytest.raises(TransactionAbortable):
            remains.call_again()
    return remains.decided, None


def new_producer_starts(remains: Remains) -> tuple[ControlType, ProducerIdentity]:
    """Another process takes over the transactional id; what the old one still sends has no effect."""
    identity = start_producer(remains.world, remains.store)
    assert identity.producer_id == remains.world.producer.producer_id
    assert identity.epoch > remains.world.producer.epoch + remains.left.epochs, "an epoch is given out once"
    before = look(remains.store, remains.world)
    if remains.scenario.is_producers:
        with pytest.raises(TxnStoreError) as refused:
            remains.call_again()
        assert not refused.value.retriable
    assert look(remains.store, remains.world) == before
    return remains.decided, identity


def outcome_is_asked_for(remains: Remains) -> tuple[ControlType, None]:
    """Whoever remembers the producer asks how its transaction ended: the answer is true, and it stays."""
    expected = Outcome.COMMITTED if remains.decided is ControlType.COMMIT else Outcome.ABORTED
    for _ in range(2):
        assert resolve_outcome(remains.store, remains.world.transactional_id, remains.world.producer) is expected
    before = look(remains.store, remains.world)
    with pytest.raises(TxnStoreError):
        ends(commit=remains.decided is ControlType.ABORT)(remains.world, remains.store)
    # A producer that was only slow may be told how it ended, and changes nothing.
    if remains.scenario.is_producers:
        with suppress(TxnStoreError):
            remains.call_again()
    assert look(remains.store, remains.world) == before
    return remains.decided, None


def start_is_repeated(remains: Remains) -> tuple[ControlType, ProducerIdentity]:
    """The producer starts again: its epoch is a new one, and what the one before it still sends has no effect."""
    identity = start_producer(remains.world, remains.store)
    assert identity.epoch > remains.world.producer.epoch + remains.left.epochs
    before = look(remains.store, remains.world)
    for call in (sends(FIRST), sends_offsets, ends(commit=True), ends(FIRST, commit=True)):
        with pytest.raises(TxnStoreError) as refused:
            call(remains.world, remains.store)
        assert not refused.value.retriable
    assert look(remains.store, remains.world) == before
    return remains.decided, identity


def next_reaper_comes(remains: Remains) -> tuple[ControlType, ProducerIdentity | None]:
    """The time is up: a reaper aborts what is open; the producer is told, aborts too, and may go on."""
    was_open = remains.left.state is TransactionState.ONGOING
    aborted = (remains.world.transactional_id,) if was_open else ()
    assert recover(remains.store) == Recovered((), aborted)
    assert recover(remains.store) == Recovered((), ())
    for call in (sends(FIRST), ends(commit=True)):
        with pytest.raises(TransactionAbortable):
            call(remains.world, remains.store)
    answer = ends(commit=False)(remains.world, remains.store)
    assert isinstance(answer, Ended)
    return ControlType.ABORT, answer.identity


AFTERLIVES: Final[tuple[Afterlife, ...]] = (
    call_is_repeated,
    nobody_comes_back,
    new_producer_starts,
    outcome_is_asked_for,
)


def live_on(afterlife: Afterlife, remains: Remains) -> None:
    """Let the afterlife happen; the transaction is over then as it says, and the next one is like any other."""
    outcome, identity = afterlife(remains)
    assert remains.left.decision in (None, outcome), "the decision stands"
    scenario, world, store = remains.scenario, remains.world, remains.store
    flushes = (OLD, *scenario.flushes) if outcome is ControlType.COMMIT else (OLD,)
    offset = NEW_OFFSET if outcome is ControlType.COMMIT and scenario.has_offsets else OLD_OFFSET
    assert_sound(store, at_rest=True, partition_ids=world.partition_ids)
    _check_view(remains, flushes, offset)
    identity = identity or start_producer(remains.world, remains.store)
    TransactionCoordinator(store).end_transaction(
        world.transactional_id, identity, commit=True, appends=world.batches(LATER, producer=identity)
    )
    _check_view(remains, (*flushes, LATER), offset)


def _check_view(remains: Remains, flushes: tuple[str, ...], offset: int) -> None:
    view = look(remains.store, remains.world)
    assert view.committed == written(*flushes)
    assert view.offsets == (offset,) * PARTITIONS
    assert not view.is_pending

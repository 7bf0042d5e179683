"""A process dies while it takes over a prepared transaction, or ends it, where no epoch is left (KIP-939).

Whoever comes last can still commit or abort it, and nobody before him can do anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest
from sqlalchemy import update

from tests.crash.everywhere import crash_everywhere
from tests.crash.scenarios import FIRST, SENT, ends
from tests.crash.worlds import LATER, NEW_OFFSET, OLD, OLD_OFFSET, PARTITIONS, Place, Step, View, World, look, written
from tests.databases import where_it_writes
from tests.tools.elsewhere import Elsewhere
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.schema import transactions
from txnstore.db.store import Store
from txnstore.errors import InvalidProducerIdMapping, ProducerFenced
from txnstore.model import ControlType, ProducerIdentity
from txnstore.testing.invariants import assert_sound
from txnstore.transactions.coordinator import Initialized, TransactionCoordinator
from txnstore.transactions.outcome import Ended
from txnstore.transactions.protocol import EPOCH_EXHAUSTED
from txnstore.transactions.recovery import recover

pytestmark = [pytest.mark.slow_on_postgresql, pytest.mark.crashes]

ENDS = pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
WAYS = where_it_writes("elsewhere")


def coordinator_of(store: Store, *, elsewhere: bool) -> TransactionCoordinator:
    return TransactionCoordinator(store, Elsewhere(store) if elsewhere else None)


def take_over(world: World, store: Store, *, elsewhere: bool = False, keep: bool = True) -> Initialized:
    return coordinator_of(store, elsewhere=elsewhere).init_producer_id(
        world.transactional_id, enable_two_phase_commit=True, keep_prepared=keep
    )


def taken_over(times: int) -> Step:
    """Return what makes a world whose transaction was prepared at the last epoch and taken over since.

    Its producer is then the last one.
    """

    def step(world: World, store: Store) -> World:
        allowed = {"transaction.two.phase.commit.enable": "true"}
        store.write(lambda connection: change_store_settings(connection, allowed))
        row = update(transactions).where(transactions.c.transactional_id == world.transactional_id)
        store.write(lambda connection: connection.execute(row.values(producer_epoch=EPOCH_EXHAUSTED - 1)))
        last = take_over(world, store, keep=False).identity
        SENT(replace(world, producer=last), store)
        for _ in range(times):
            last = take_over(world, store).identity
        return replace(world, producer=last)

    return step


def refuse_all(world: World, store: Store, epochs: Iterable[int], *, elsewhere: bool) -> None:
    """See that who had these epochs changes nothing."""
    before = look(store, world)
    for epoch in epochs:
        zombie = replace(world, producer=ProducerIdentity(world.producer.producer_id, epoch))
        for commit in (True, False):
            with pytest.raises((ProducerFenced, InvalidProducerIdMapping)):
                ends(commit=commit, elsewhere=elsewhere)(zombie, store)
    assert look(store, world) == before


def end_twice(world: World, store: Store, *, commit: bool, elsewhere: bool) -> ProducerIdentity:
    """End it and ask again, for the answer may have been lost; return who its producer is then."""
    first, again = (ends(commit=commit, elsewhere=elsewhere)(world, store) for _ in range(2))
    assert isinstance(first, Ended)
    assert first == again
    return first.identity


def go_on(world: World, store: Store, identity: ProducerIdentity, *, committed: bool, elsewhere: bool) -> None:
    """See how the transaction has ended, and let its producer commit another one."""
    counts = [FIRST] if committed else []
    left = look(store, world)
    assert left.committed == written(OLD, *counts)
    assert left.offsets == (NEW_OFFSET if committed else OLD_OFFSET,) * PARTITIONS
    coordinator_of(store, elsewhere=elsewhere).end_transaction(
        world.transactional_id, identity, commit=True, appends=world.batches(LATER, producer=identity)
    )
    assert look(store, world).committed == written(OLD, *counts, LATER)
    assert_sound(store, at_rest=True, partition_ids=world.partition_ids)


@pytest.mark.slow_but_first
@ENDS
@WAYS
def test_whoever_dies_as_it_takes_over_is_replaced_by_the_next_one(place: Place, elsewhere: bool, commit: bool) -> None:
    def life(world: World, store: Store, left: View) -> None:
        last_epoch = world.producer.epoch + left.epochs
        new = take_over(world, store, elsewhere=elsewhere)
        assert new.ongoing == ProducerIdentity(world.producer.producer_id, EPOCH_EXHAUSTED)
        assert new.identity == ProducerIdentity(world.producer.producer_id, last_epoch + 1)
        zombies = range(EPOCH_EXHAUSTED, last_epoch + 1)
        refuse_all(world, store, zombies, elsewhere=elsewhere)
        identity = end_twice(replace(world, producer=new.identity), store, commit=commit, elsewhere=elsewhere)
        refuse_all(world, store, zombies, elsewhere=elsewhere)
        go_on(world, store, identity, committed=commit, elsewhere=elsewhere)

    def check(left: View, commits: int) -> None:
        assert (left.decision, left.epochs) == (None, commits)
        assert left.committed == written(OLD)

    progress = crash_everywhere(
        place,
        before=taken_over(1),
        call=partial(take_over, elsewhere=elsewhere),
        check=check,
        lives=[life],
        steps_min=5,
        is_elsewhere=elsewhere,
    )
    assert progress.commits == 1


@pytest.mark.slow
@ENDS
@pytest.mark.parametrize("is_repeated", [True, False], ids=["it asks again", "another one takes over"])
@WAYS
def test_whoever_dies_as_it_ends_what_it_took_over_has_ended_it_or_not_at_all(
    place: Place, elsewhere: bool, commit: bool, is_repeated: bool
) -> None:
    outcome = ControlType.COMMIT if commit else ControlType.ABORT
    call = ends(commit=commit, elsewhere=elsewhere)

    def is_replaced(world: World, store: Store, left: View) -> ProducerIdentity:
        new = take_over(world, store, elsewhere=elsewhere)
        assert (new.ongoing is None) == (left.decision is not None)
        if new.ongoing is None:
            return new.identity
        refuse_all(world, store, [world.producer.epoch], elsewhere=elsewhere)
        return end_twice(replace(world, producer=new.identity), store, commit=commit, elsewhere=elsewhere)

    def life(world: World, store: Store, left: View) -> None:
        zombies = range(EPOCH_EXHAUSTED, world.producer.epoch)
        refuse_all(world, store, zombies, elsewhere=elsewhere)
        if left.decision is not None and not is_repeated:
            recover(store, Elsewhere(store) if elsewhere else None)
            refuse_all(world, store, zombies, elsewhere=elsewhere)
        if is_repeated:
            identity = end_twice(world, store, commit=commit, elsewhere=elsewhere)
        else:
            identity = is_replaced(world, store, left)
        refuse_all(world, store, zombies, elsewhere=elsewhere)
        go_on(world, store, identity, committed=commit, elsewhere=elsewhere)

    def check(left: View, commits: int) -> None:
        assert left.decision is (outcome if commits else None)

    progress = crash_everywhere(
        place,
        before=taken_over(2),
        call=call,
        check=check,
        lives=[life],
        steps_min=5,
        is_elsewhere=elsewhere,
    )
    assert progress.commits == 1 if not elsewhere else progress.commits > 1

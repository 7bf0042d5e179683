"""A producer without transactions dies while it appends: its batches are in both partitions or in none, and once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.crash.everywhere import crash_everywhere
from tests.crash.scenarios import FIRST, SECOND
from tests.crash.worlds import OLD, PARTITIONS, Place, View, World, look, written
from txnstore.db.store import Store
from txnstore.log.append import Appended, append
from txnstore.model import NO_PRODUCER
from txnstore.testing.invariants import assert_sound
from txnstore.transactions.coordinator import TransactionCoordinator

pytestmark = pytest.mark.crashes


def appends(flush: str, *, is_idempotent: bool) -> Callable[[World, Store], list[Appended]]:
    def step(world: World, store: Store) -> list[Appended]:
        who = world.producer if is_idempotent else NO_PRODUCER
        batches = world.batches(flush, producer=who, is_transactional=False)
        return store.write(lambda connection: append(connection, batches))

    return step


def has_no_transactional_id(world: World, store: Store) -> World:
    """Give the world a producer that is idempotent and no more."""
    identity = TransactionCoordinator(store).init_producer_id(None).identity
    return replace(world, producer=identity)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("flushes", [(FIRST,), (FIRST, SECOND)], ids=["the first batches", "further batches"])
def test_a_retried_batch_is_recognised_at_whichever_step_its_first_try_died(place: Place, flushes):
    def before(world: World, store: Store) -> World:
        moved = has_no_transactional_id(world, store)
        for flush in flushes[:-1]:
            appends(flush, is_idempotent=True)(moved, store)
        return moved

    def check(left: View, commits: int) -> None:
        assert left.committed == left.everything == written(OLD, *flushes[: len(flushes) - 1 + commits])

    def producer_tries_again(world: World, store: Store, left: View) -> None:
        was_there = left.committed == written(OLD, *flushes)
        first = appends(flushes[-1], is_idempotent=True)(world, store)
        assert [appended.is_duplicate for appended in first] == [was_there] * PARTITIONS
        again = appends(flushes[-1], is_idempotent=True)(world, store)
        assert [appended.is_duplicate for appended in again] == [True] * PARTITIONS
        assert [appended.base_offset for appended in again] == [appended.base_offset for appended in first]
        assert look(store, world).committed == written(OLD, *flushes)
        assert_sound(store, at_rest=True, partition_ids=world.partition_ids)

    progress = crash_everywhere(
        place,
        before=before,
        call=appends(flushes[-1], is_idempotent=True),
        check=check,
        lives=[producer_tries_again],
        steps_min=6,
    )
    assert progress.commits == 1


@pytest.mark.slow
def test_a_plain_append_is_there_whole_or_not_at_all(place: Place):
    def check(left: View, commits: int) -> None:
        assert left.committed == left.everything == written(OLD, *[FIRST][:commits])

    def somebody_else_appends(world: World, store: Store, left: View) -> None:
        appends(SECOND, is_idempotent=False)(world, store)
        assert look(store, world).committed == tuple(
            values + more for values, more in zip(left.committed, written(SECOND), strict=True)
        )
        assert_sound(store, at_rest=True, partition_ids=world.partition_ids)

    progress = crash_everywhere(
        place,
        before=lambda world, store: None,
        call=appends(FIRST, is_idempotent=False),
        check=check,
        lives=[somebody_else_appends],
        steps_min=5,
    )
    assert progress.commits == 1

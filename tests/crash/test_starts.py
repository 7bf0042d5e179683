"""A producer dies while it starts: nobody gets its epoch again, and the transaction before it ends as it must."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from tests.crash.afterlives import (
    Afterlife,
    Remains,
    live_on,
    nobody_comes_back,
    outcome_is_asked_for,
    start_is_repeated,
    start_producer,
)
from tests.crash.everywhere import crash_everywhere
from tests.crash.scenarios import FIRST, NOTHING, SENT, Scenario, all_of, decides
from tests.crash.worlds import TIMEOUT_MS, Place, Progress, View, World
from tests.tools.crashes import every_crash, noting
from txnstore.db.store import Store
from txnstore.model import ControlType, ProducerIdentity
from txnstore.testing.invariants import assert_sound
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.protocol import TransactionState

pytestmark = [pytest.mark.slow_on_postgresql, pytest.mark.crashes]

_ABORT, _COMMIT = ControlType.ABORT, ControlType.COMMIT

STARTS = (
    Scenario("over a transaction that was complete", NOTHING, start_producer, ends_in=_ABORT, is_producers=False),
    Scenario("over a producer that did nothing", start_producer, start_producer, ends_in=_ABORT, is_producers=False),
    Scenario(
        "over an open transaction", SENT, start_producer, [FIRST], has_offsets=True, ends_in=_ABORT, is_producers=False
    ),
    Scenario(
        "over a decided commit",
        all_of(SENT, decides(commit=True)),
        start_producer,
        [FIRST],
        has_offsets=True,
        ends_in=_COMMIT,
        is_producers=False,
    ),
    Scenario(
        "over a decided abort",
        all_of(SENT, decides(commit=False)),
        start_producer,
        [FIRST],
        has_offsets=True,
        ends_in=_ABORT,
        is_producers=False,
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", STARTS, ids=str)
def test_a_producer_that_died_while_it_started_may_start_again(place: Place, scenario: Scenario):
    initial = 1 if scenario.before is start_producer else 0

    def check(left: View, commits: int) -> None:
        assert (left.state is TransactionState.EMPTY) == (commits == 1 or initial == 1)
        assert left.epochs >= initial + commits
        if commits:
            assert (left.decision or _ABORT) is scenario.ends_in

    def live(afterlife: Afterlife, world: World, store: Store, left: View) -> None:
        live_on(afterlife, Remains(scenario, world, store, place.clock, left))

    progress = crash_everywhere(
        place,
        before=scenario.before,
        call=scenario.call,
        check=check,
        lives=[partial(live, life) for life in (start_is_repeated, nobody_comes_back, outcome_is_asked_for)],
        steps_min=6,
    )
    assert progress.commits == 1


@pytest.mark.slow
def test_a_start_under_a_new_transactional_id_leaves_a_whole_row_or_none(place: Place):
    def before(world: World, store: Store) -> World:
        return replace(world, name="new", producer=ProducerIdentity(0, -1), decisions=0)

    def check(left: View, commits: int) -> None:
        assert left.state is (TransactionState.EMPTY if commits else None)

    def starts_again(world: World, store: Store, left: View) -> None:
        assert start_producer(world, store).epoch == left.epochs
        assert_sound(store, at_rest=True, partition_ids=world.partition_ids)

    progress = crash_everywhere(
        place, before=before, call=start_producer, check=check, lives=[starts_again], steps_min=8
    )
    assert progress.commits == 1


def test_a_producer_that_asks_for_its_next_epoch_gets_it_once_however_often_it_asks(place: Place):
    def bump(world: World, store: Store) -> ProducerIdentity:
        return (
            TransactionCoordinator(store)
            .init_producer_id(world.transactional_id, TIMEOUT_MS, expected=world.producer)
            .identity
        )

    def check(left: View, commits: int) -> None:
        assert left.epochs == commits

    def request_is_repeated(world: World, store: Store, left: View) -> None:
        for _ in range(2):
            assert bump(world, store) == replace(world.producer, epoch=world.producer.epoch + 1)
        assert_sound(store, at_rest=True, partition_ids=world.partition_ids)

    progress = crash_everywhere(place, before=NOTHING, call=bump, check=check, lives=[request_is_repeated], steps_min=6)
    assert progress.commits == 1


def test_a_producer_id_whose_answer_was_lost_is_given_to_nobody_else(place: Place):
    def start(store: Store) -> int:
        return TransactionCoordinator(store).init_producer_id(None).identity.producer_id

    progress = Progress()
    with place.open() as others:
        last = start(others)
        for crash in every_crash(place.open, start):
            progress.pass_(crash.point)
            with noting(crash):
                given = start(others)
                assert given == last + 1 + progress.commits
                last = given
    progress.assert_complete(steps_min=3)

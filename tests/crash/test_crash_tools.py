"""The crash injection itself: every statement has two sides, and what is dead stays dead."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from functools import partial

import pytest
from sqlalchemy import func, select

from tests.crash import children
from tests.crash.afterlives import start_producer
from tests.crash.scenarios import COMMIT_ELSEWHERE
from tests.crash.sinking import SINKING_BY_NAME
from tests.crash.worlds import Place, Victim, state_of
from tests.crash.writing_together import TOGETHER_BY_NAME
from tests.tools.crashes import (
    Crash,
    When,
    around_transactions,
    crash_at,
    every_crash,
    every_second_crash,
    noting,
    steps_of,
)
from tests.tools.killed_children import ChildFailedError, every_kill, kill_at
from txnstore.db.opening import open_store
from txnstore.db.schema import topics
from txnstore.db.store import Store
from txnstore.errors import ForeignSchema
from txnstore.log.topics import create_topic


def create(name: str, store: Store) -> None:
    store.write(partial(create_topic, name=name))


def count(store: Store) -> int:
    return store.read(lambda connection: connection.execute(select(func.count()).select_from(topics)).scalar_one())


def look_twice(store: Store) -> None:
    store.read(lambda connection: [connection.exec_driver_sql(f"SELECT {number}") for number in (1, 2)])


def fail(store: Store) -> None:
    with pytest.raises(ForeignSchema):
        store.read(lambda connection: connection.exec_driver_sql("SELECT nothing_at_all"))


def test_both_sides_of_every_statement_are_crashed_in_order_and_then_it_ends(place: Place):
    crashes = list(every_crash(place.open, look_twice))
    assert [(crash.step, crash.when) for crash in crashes] == [
        (step, when) for step in (1, 2, 3, 4) for when in (When.BEFORE, When.AFTER)
    ]
    assert [crash.statement for crash in crashes[2::2]] == ["SELECT 1", "SELECT 2", "COMMIT"]
    assert str(crashes[3]) == "after step 2 (SELECT 1)"
    with place.open() as store:
        assert steps_of(look_twice, store) == [crash.point for crash in crashes]


def look_and_fail(store: Store) -> None:
    look_twice(store)
    fail(store)
    look_twice(store)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("action", [look_twice, look_and_fail])
def test_where_statements_are_all_the_side_before_one_is_left_out_where_none_fails(place: Place, action):
    whole = [crash.point for crash in every_crash(place.open, action)]
    with_after = {point.step for point in whole if point.when is When.AFTER}
    expected = [point for point in whole if point.when is When.AFTER or not {point.step - 1, point.step} <= with_after]
    assert len(expected) < len(whole)
    assert [crash.point for crash in every_crash(place.open, action, statements_are_all=True)] == expected


@pytest.mark.slow
@pytest.mark.slow_on_postgresql
@pytest.mark.variants_on_sqlite("case")
@pytest.mark.crashes
@pytest.mark.parametrize(
    "case",
    [
        SINKING_BY_NAME["the decision of a batch"],
        TOGETHER_BY_NAME["a commit of writers"],
        pytest.param(COMMIT_ELSEWHERE, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_who_dies_before_a_statement_has_left_what_who_died_after_the_last_one_did(place: Place, case):
    def states(*, statements_are_all: bool) -> dict[tuple[int, When], Hashable]:
        left = {}
        for crash in every_crash(
            lambda: Victim(place.make(others, case.before), victims),
            lambda victim: case.call(victim.world, victim.store),
            statements_are_all=statements_are_all,
        ):
            crash.revive()
            left[crash.step, crash.when] = state_of(others, crash.subject.world)
            start_producer(crash.subject.world, others)
        return left

    with place.open() as others, place.open() as victims:
        whole, some = states(statements_are_all=False), states(statements_are_all=True)
    assert len(whole) == 2 * len(some) - 2, "all but the first and the last are two sides in one"
    assert {point: whole[point] for point in some} == some
    left_out = whole.keys() - some.keys()
    assert {point: whole[point] for point in left_out} == {
        (step, when): some[step - 1, When.AFTER] for step, when in left_out
    }
    assert len(set(some.values())) > 1


@pytest.mark.slow
def test_a_crash_before_commit_undoes_everything_and_one_after_it_nothing(place: Place):
    with place.open() as others:
        crashes = 0
        for crash in every_crash(place.open, partial(create, "one")):
            crashes += 1
            done = (crash.statement, crash.when) == ("COMMIT", When.AFTER)
            assert count(others) == int(done), crash
            if done:
                break
        assert crashes > 10


def test_no_handler_of_errors_survives_a_crash(place: Place):
    survived = []

    def careless(store: Store) -> None:
        try:
            look_twice(store)
        except Exception as error:  # noqa: BLE001 - that is what is tested
            survived.append(error)

    assert len(list(every_crash(place.open, careless))) == 8
    assert survived == []


def test_whatever_a_dead_process_does_next_has_no_effect(place: Place):
    deaths = 0

    def stubborn(store: Store) -> None:
        nonlocal deaths
        for name in ("one", "two", "three"):
            try:
                create(name, store)
            except Crash:
                deaths += 1

    with place.open() as others:
        crash = crash_at(3, When.BEFORE, stubborn, place.open())
        assert crash is not None
        assert deaths == 3
        assert count(others) == 0
        with pytest.raises(Crash):
            create("four", crash.subject)
        others_died: list[BaseException] = []

        def from_another_thread() -> None:
            try:
                create("five", crash.subject)
            except Crash as died:
                others_died.append(died)

        thread = threading.Thread(target=from_another_thread)
        thread.start()
        thread.join()
        assert len(others_died) == 1
        assert count(others) == 0
        # Its locks are gone as well: others get on.
        create("six", others)
        crash.subject.close()


def test_a_revived_store_works_again_over_new_connections(place: Place):
    with place.open() as store:
        crash = crash_at(2, When.AFTER, look_twice, store)
        assert crash is not None
        crash.revive()
        crash.revive()
        create("one", store)
        assert count(store) == 1


def test_only_statements_of_the_thread_that_runs_the_action_are_steps(place: Place):
    def busy(store: Store) -> None:
        thread = threading.Thread(target=look_twice, args=(store,))
        thread.start()
        thread.join()
        store.read(lambda connection: None)

    with place.open() as store:
        assert [point.statement[:5] for point in steps_of(busy, store)] == ["BEGIN"] * 2 + ["COMMI"] * 2


def test_a_statement_that_fails_has_no_side_after(place: Place):
    with place.open() as store:
        sides = [point.when for point in steps_of(fail, store) if point.statement.startswith("SELECT")]
        assert sides == [When.BEFORE]
    # The enumeration goes on behind it.
    statements = [crash.statement for crash in every_crash(place.open, fail)]
    assert statements[-1] == "ROLLBACK"


def test_a_store_that_is_opened_by_the_action_dies_with_it(place: Place):
    opened = []

    def opens(url: str) -> None:
        store = open_store(url)
        opened.append(store)
        create("one", store)

    crash = crash_at(8, When.BEFORE, opens, place.url)
    assert crash is not None
    (store,) = opened
    with pytest.raises(Crash):
        look_twice(store)
    store.close()


def test_an_error_of_the_action_is_no_crash(place: Place):
    def broken(store: Store) -> None:
        look_twice(store)
        raise ZeroDivisionError

    with place.open() as store, pytest.raises(ZeroDivisionError):
        crash_at(100, When.BEFORE, broken, store)


@pytest.mark.slow
def test_second_crashes_come_in_every_step_of_the_recovery_for_every_first_one(place: Place):
    with place.open() as helper:
        pairs = []
        for crash in every_second_crash(place.open, look_twice, lambda dead: look_twice(helper)):
            crash.revive()
            pairs.append((crash.first.step, crash.first.when, crash.second.step, crash.second.when))
        sides = [(step, when) for step in (1, 2, 3, 4) for when in When]
        assert pairs == [(*first, *second) for first in sides for second in sides]
        afterwards = every_second_crash(
            place.open,
            look_twice,
            lambda dead: look_twice(helper),
            is_first=lambda point: point.statement == "COMMIT",
        )
        assert str(next(afterwards)).startswith("before step 4 (COMMIT), then in the recovery before step 1 (BEGIN")


def test_a_failed_check_says_after_which_crash(place: Place):
    for crash in every_crash(place.open, look_twice):
        with pytest.raises(AssertionError) as failed, noting(crash):
            raise AssertionError
        assert failed.value.__notes__ == [f"after a crash {crash}"]
        break


@pytest.mark.slow
def test_a_child_is_killed_at_both_sides_of_every_statement(place: Place):
    kills = list(every_kill(lambda: place.url, children.look_twice, prepare=children.open_plainly))
    assert [(kill.point.step, kill.point.when) for kill in kills] == [
        (step, when) for step in (1, 2, 3, 4) for when in When
    ]
    assert str(kills[2]) == "killed before step 2 (SELECT 1)"


@pytest.mark.slow
def test_a_child_is_killed_once_where_two_sides_are_the_same_and_at_given_points_alone(place: Place):
    def look_four_times(store: Store) -> None:
        children.look_twice(store)
        children.look_twice(store)

    with place.open() as store:
        points, twice = steps_of(children.look_twice, store), steps_of(look_four_times, store)
    kills = every_kill(lambda: place.url, children.look_twice, prepare=children.open_plainly, statements_are_all=True)
    assert [kill.point for kill in kills] == [points[0], *(each for each in points if each.when is When.AFTER)]
    around = around_transactions(points)
    assert around == [*points[:2], *points[-2:]]
    # Nothing happens between two of them.
    assert around_transactions(twice)[4:] == [twice[9], *twice[-2:]]
    kills = every_kill(lambda: place.url, children.look_twice, prepare=children.open_plainly, points=around)
    assert [kill.point for kill in kills] == around
    beyond = every_kill(lambda: place.url, children.look_twice, prepare=children.open_plainly, points=twice[-1:])
    with pytest.raises(AssertionError, match=r"was to be killed after step 8 \(COMMIT\)"):
        list(beyond)


def test_a_child_that_is_not_killed_comes_to_its_end(place: Place):
    assert kill_at(100, When.BEFORE, children.use_first, place.url) is None


@pytest.mark.slow
def test_an_error_in_a_child_comes_out_with_its_traceback(place: Place):
    with pytest.raises(ChildFailedError, match="ZeroDivisionError: on purpose"):
        kill_at(100, When.BEFORE, children.fail, place.url)

"""The scheduler: every order once, waiting told from standing still, circles found, failures with their order."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from typing import Any

import pytest
from sqlalchemy import select, update

from tests.tools.interleaving import (
    ActorStuckError,
    Scenario,
    before_locks,
    before_statements,
    explore,
    stop_here,
)
from txnstore.db.schema import partition_heads, stores
from txnstore.log.topics import create_topic


@pytest.fixture
def three_stores(url, txnstore_open):
    return [txnstore_open(url, pool_size=1) for _ in range(3)]


def counter_of(connection):
    return connection.execute(select(stores.c.next_producer_id)).scalar_one()


def set_counter(connection, value):
    connection.execute(update(stores).values(next_producer_id=value))


def add_in_two_transactions(store):
    value = store.read(counter_of)
    store.write(lambda connection: set_counter(connection, value + 1))


def test_every_order_of_database_transactions_is_run_once(three_stores):
    first, second, observer = three_stores
    orders = set()
    order: list[str] = []

    def make():
        order.clear()
        observer.write(lambda connection: set_counter(connection, 0))
        return Scenario(
            {"a": lambda: add_in_two_transactions(first), "b": lambda: add_in_two_transactions(second)},
            before_step=order.append,
            at_end=lambda _: orders.add("".join(order)),
        )

    explored = explore(make, all_orders=True)
    assert orders == {"".join(letters) for letters in itertools.permutations("aabb")}
    assert (explored.orders, explored.steps) == (6, 24)
    orders.clear()
    explored = explore(make)
    # Which of them reads first makes no difference: baab is abab, and baba is abba.
    assert orders == {"aabb", "abab", "abba", "bbaa"}
    assert explored.orders == 4


def test_a_check_that_fails_in_one_order_says_in_which(three_stores):
    first, second, observer = three_stores

    def make():
        observer.write(lambda connection: set_counter(connection, 0))

        def nothing_is_lost(finished):
            for actor in finished.values():
                actor.result()
            assert observer.read(counter_of) == 2

        return Scenario(
            {"a": lambda: add_in_two_transactions(first), "b": lambda: add_in_two_transactions(second)},
            at_end=nothing_is_lost,
        )

    with pytest.raises(AssertionError) as raised:
        explore(make)
    (note,) = [note for note in raised.value.__notes__ if "order" in note]
    assert [step.split(":")[0].strip() for step in note.removeprefix("in this order:").split(", ")] == list("abba")


def test_what_actors_raise_is_a_result_to_look_at(three_stores):
    def fail():
        raise ZeroDivisionError

    seen: list[Any] = []
    explore(lambda: Scenario({"a": fail, "b": lambda: 7}, at_end=seen.append))
    ((a, b),) = [tuple(finished.values()) for finished in seen]
    assert b.result() == 7
    with pytest.raises(ZeroDivisionError):
        a.result()


@pytest.mark.parametrize(("interruptions_max", "orders"), [(0, 2), (1, 6), (2, 14), (None, 20)])
def test_interruptions_of_an_actor_that_could_go_on_are_bounded(interruptions_max, orders):
    def three_steps():
        for number in range(3):
            stop_here(f"step {number}")

    explored = explore(lambda: Scenario({"a": three_steps, "b": three_steps}), preemptions_max=interruptions_max)
    assert explored.orders == orders


def values_of(connection, partition_ids):
    return dict(
        connection.execute(
            select(partition_heads.c.partition_id, partition_heads.c.next_offset)
            .where(partition_heads.c.partition_id.in_(partition_ids))
            .order_by(partition_heads.c.partition_id)
        ).all()
    )


def run_program(store, partition_ids, program):
    """Run transactions of locks, reads, and writes that go by what was read last; return what was found."""

    def work(connection, steps):
        found: list[int] = []
        for step in steps.split():
            column, this = partition_heads.c.next_offset, partition_heads.c.partition_id == partition_ids[int(step[1])]
            if step[0] == "+":
                connection.execute(update(partition_heads).where(this).values(next_offset=1 + 2 * found[-1]))
                continue
            query = select(column).where(this)
            found.append(connection.execute(query.with_for_update() if step[0] == "!" else query).scalar_one())
        return tuple(found)

    return [
        (store.read if steps.startswith("read ") else store.write)(partial(work, steps=steps.removeprefix("read ")))
        for steps in program
    ]


@pytest.mark.slow
@pytest.mark.slow_on_postgresql
@pytest.mark.parametrize(
    ("first_does", "second_does", "interruptions_max"),
    [
        # Each locks before it looks.
        (["!0 +0 !1 +1"], ["!0 +0 !1 +1"], 2),
        # One waits, and comes between the two of the other one as well.
        (["!0 +0", "!0 +0"], ["!0 +0"], 1),
        # One looks before it locks: what it has found may be old.
        (["!0 +0 !1 +1"], ["?1 !0 +0", "read ?0 ?1"], 2),
        # One waits with a lock that the other one asks for: in a circle.
        (["!0 !1 +1"], ["!1 !0 +0"], 1),
        # Nobody locks: one overwrites what the other one has written.
        (["?0 +0", "?1"], ["?0 +0 ?1 +1"], 2),
        (["read ?0 ?1 ?0", "!0 +0"], ["!1 +1", "!0 +0 ?1"], 1),
    ],
)
def test_what_comes_to_the_same_is_run_once_and_nothing_that_differs_is_left_out(
    three_stores, first_does, second_does, interruptions_max
):
    first, second, observer = three_stores
    topic = observer.write(lambda connection: create_topic(connection, "values", partition_count=2))
    ids = topic.partition_ids
    seen: set[Any] = set()

    def make():
        observer.write(lambda connection: connection.execute(update(partition_heads).values(next_offset=1)))
        return Scenario(
            {"a": lambda: run_program(first, ids, first_does), "b": lambda: run_program(second, ids, second_does)},
            at_end=lambda finished: seen.add(
                (
                    *(tuple(each.result()) for each in finished.values()),
                    *observer.read(lambda connection: values_of(connection, ids)).values(),
                )
            ),
        )

    options: dict[str, Any] = {
        "stops": before_statements,
        "preemptions_max": interruptions_max,
        "store": observer,
    }
    every = explore(make, all_orders=True, **options)
    seen_in_all, seen = seen, set()
    some = explore(make, **options)
    assert seen == seen_in_all
    assert some.orders < every.orders
    assert bool(some.deadlocks) is bool(every.deadlocks)
    assert bool(some.orders_with_waiting) is bool(every.orders_with_waiting)


def test_of_actors_that_do_the_same_the_first_one_begins():
    orders = set()
    order: list[str] = []

    def steps():
        for number in range(2):
            stop_here(f"step {number}")

    def make():
        order.clear()
        return Scenario(
            {"a": steps, "b": steps, "c": lambda: stop_here("only step")},
            before_step=order.append,
            at_end=lambda _: orders.add("".join(order)),
            alike=("a", "b"),
        )

    explored = explore(make)
    assert orders == {
        "".join(letters) for letters in itertools.permutations("aabbc") if letters.index("a") < letters.index("b")
    }
    assert explored.orders == len(orders) == 15


def test_before_a_step_that_the_database_does_not_see_the_others_stop_at_each_of_theirs(three_stores):
    """It may be a clock's, which they read in the middle of a database transaction."""
    first, _, _ = three_stores
    clock: list[int] = []
    seen = set()

    def make():
        clock[:] = [0]

        def look(connection):
            counter_of(connection)
            before = clock[0]
            counter_of(connection)
            return before, clock[0]

        def move():
            stop_here("time passes")
            clock[0] += 1

        return Scenario(
            {"looks": lambda: first.read(look), "moves": move},
            at_end=lambda finished: seen.add(finished["looks"].result()),
        )

    explore(make, stops=before_statements)
    assert seen == {(0, 0), (0, 1), (1, 1)}


def test_an_actor_that_waits_for_a_lock_is_left_waiting_until_it_is_free(three_stores):
    first, second, observer = three_stores

    def make():
        observer.write(lambda connection: set_counter(connection, 0))

        def add(connection):
            value = connection.execute(select(stores.c.next_producer_id).with_for_update()).scalar_one()
            set_counter(connection, value + 1)

        def nothing_is_lost(finished):
            assert {actor.error for actor in finished.values()} == {None}
            assert observer.read(counter_of) == 2

        return Scenario({"a": lambda: first.write(add), "b": lambda: second.write(add)}, at_end=nothing_is_lost)

    explored = explore(make, stops=before_statements, store=observer)
    assert explored.orders_with_waiting > 0
    assert explored.deadlocks == 0


@pytest.mark.slow
def test_actors_that_wait_for_each_other_are_counted_and_one_of_them_gives_way(txnstore_postgresql_url, txnstore_open):
    """PostgreSQL alone has locks that can be taken in a circle."""
    first, second, observer = (txnstore_open(txnstore_postgresql_url, pool_size=1) for _ in range(3))
    topic = observer.write(lambda connection: create_topic(connection, "circle", partition_count=2))

    def lock_both(store, partition_ids):
        def work(connection):
            for partition_id in partition_ids:
                connection.execute(
                    select(partition_heads).where(partition_heads.c.partition_id == partition_id).with_for_update()
                )

        return lambda: store.write(work)

    def both_did(finished):
        assert {actor.error for actor in finished.values()} == {None}

    explored = explore(
        lambda: Scenario(
            {"up": lock_both(first, topic.partition_ids), "down": lock_both(second, topic.partition_ids[::-1])},
            at_end=both_did,
        ),
        stops=before_locks,
        preemptions_max=1,
        store=observer,
    )
    assert explored.deadlocks > 0


@pytest.mark.slow
def test_an_actor_that_neither_goes_on_nor_waits_for_a_lock_is_reported():
    never = threading.Event()

    def hang():
        stop_here("about to hang")
        never.wait(5)

    with pytest.raises(ActorStuckError, match="nothing happens any more: sleeper"):
        # It is let go in the end; nothing else would wake it before.
        explore(
            lambda: Scenario({"sleeper": hang, "waker": lambda: never.wait(0)}, before_step=lambda _: None),
            timeout_seconds=1.0,
        )
    never.set()


def test_a_scenario_that_does_something_else_when_it_is_run_again_is_refused():
    times = itertools.count()

    def steps():
        for number in range(3 if next(times) < 2 else 1):
            stop_here(f"step {number}")

    with pytest.raises(AssertionError, match="does not do the same"):
        explore(lambda: Scenario({"a": steps, "b": steps}))

"""Several transactions of one producer in one database transaction: as if each had been committed alone, or none.

As in `test_whole`, each history runs on two stores; one of them commits groups, the other one transaction after the
other.  Answers, errors and rows are the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from tests.tools.campaigns import times
from tests.tools.crashes import every_crash, noting
from tests.tools.interleaving import Scenario, before_locks, explore
from tests.transactions.whole_steps import CELLS, COMMITS, PRODUCERS, STEPS
from tests.transactions.whole_worlds import World, Worlds, assert_same, happens, worlds
from txnstore.db.schema import finished_transactions
from txnstore.db.store import Store
from txnstore.errors import TxnStoreError
from txnstore.log.topics import create_topic
from txnstore.model import ProducerIdentity
from txnstore.testing.invariants import assert_sound
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.outcome import Ended
from txnstore.transactions.whole_group import WholeCommit

__all__ = ["worlds"]

Cells = Sequence[tuple[int, int, int]]
Committers = Sequence[tuple[int, Sequence[int], str | None]]

_numbers = itertools.count(1)


def commits_of(world: World, name: str, group: Sequence[tuple[Cells, Committers]]) -> list[WholeCommit]:
    """Return transactions of which each begins where the one before has ended."""
    first = world.producers[name]
    found = []
    for number, (cells, committers) in enumerate(group):
        producer = ProducerIdentity(first.producer_id, first.epoch + number)
        found.append(WholeCommit(producer, world.batches(producer, cells, 0), world.offsets(committers)))
    return found


def one_by_one(world: World, name: str, group: Sequence[tuple[Cells, Committers]]) -> list[object]:
    """Commit one after the other until one is refused; return the answers."""
    answers: list[object] = []
    for cells, committers in group:
        producer = world.producers[name]
        try:
            ended = world.coordinator.end_transaction(
                name,
                producer,
                commit=True,
                appends=world.batches(producer, cells, 0),
                offsets=world.offsets(committers),
            )
        except TxnStoreError as error:
            answers.append((type(error), str(error)))
            break
        world.producers[name] = ended.identity
        answers.append(ended)
    return answers


def commit_group(pair: tuple[World, World], name: str, group: Sequence[tuple[Cells, Committers]]) -> bool:
    """Commit in both worlds, with the same answers; return whether it was by one database transaction."""
    at_once, general = pair
    together = at_once.coordinator.commit_several(name, commits_of(at_once, name, group))
    if together is None:
        answers = one_by_one(at_once, name, group)
    else:
        answers = list(together)
        at_once.producers[name] = together[-1].identity
    assert answers == one_by_one(general, name, group)
    return together is not None


GROUPS = st.lists(st.tuples(CELLS, COMMITS).filter(any), min_size=1, max_size=5)
GROUP_STEPS = st.one_of(st.tuples(st.just("group"), PRODUCERS, GROUPS), STEPS)


@pytest.mark.slow
@pytest.mark.slow_on_postgresql
@pytest.mark.campaign
@settings(max_examples=times(20))
@given(steps=st.lists(GROUP_STEPS, min_size=1, max_size=10))
def test_a_group_answers_the_same_and_writes_the_same_rows(worlds: Worlds, steps: list[tuple[Any, ...]]) -> None:
    pair = worlds.new_pair()
    for name in pair[0].names:
        happens(pair, "start", name)
    for step, *arguments in steps:
        if step == "advance":
            worlds.clock.advance(*arguments)
        elif step == "group":
            commit_group(pair, pair[0].names[arguments[0]], arguments[1])
        else:
            if step in ("start", "send", "commit", "append", "abort", "repeat", "exhaust"):
                arguments[0] = pair[0].names[arguments[0]]
            happens(pair, step, *arguments)
    assert_same(pair)


USUAL: list[tuple[Cells, Committers]] = [
    ([(0, 0, 1)], []),
    ([(2, 0, 1), (0, 0, 3), (2, 5, 0)], [(2, [0, 1], None)]),
    ([], [(2, [1], None)]),
    ([(1, 0, 2)], []),
]


@pytest.mark.slow
def test_what_is_usual_is_committed_by_one_database_transaction(worlds: Worlds) -> None:
    pair = worlds.new_pair()
    name = pair[0].names[0]
    happens(pair, "give_members")
    happens(pair, "start", name)
    for group in USUAL, USUAL[::-1], USUAL[:1]:
        assert commit_group(pair, name, group)
        assert_same(pair)
        worlds.clock.advance(1_234_567)


OTHERWISE: dict[str, tuple[Cells, Committers]] = {
    "offsets of another group": ([(0, 0, 1)], [(1, [0], None)]),
    "offsets that the group refuses": ([(0, 0, 1)], [(5, [0], None)]),
    "offsets with a text": ([(0, 0, 1)], [(2, [0], "text")]),
}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("what", OTHERWISE)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_one_that_is_unusual_sends_all_the_general_way(worlds: Worlds, what: str, place: int) -> None:
    pair = worlds.new_pair()
    name = pair[0].names[0]
    happens(pair, "give_members")
    happens(pair, "start", name)
    assert not commit_group(pair, name, [*USUAL[:place], OTHERWISE[what], *USUAL[place:]])
    assert_same(pair)


@pytest.mark.slow
@pytest.mark.parametrize("before", range(6))
def test_the_last_epochs_are_passed(worlds: Worlds, before: int) -> None:
    pair = worlds.new_pair()
    name = pair[0].names[0]
    happens(pair, "give_members")
    happens(pair, "start", name)
    happens(pair, "exhaust", name, 32_766 - before)
    # At its last epoch a producer is given another id, which is not usual.
    assert commit_group(pair, name, USUAL) is (before >= len(USUAL))
    assert_same(pair)


# --- crashes, and others at the same time --------------------------------------------------------------------------


@pytest.fixture(params=["function on postgresql", "statements on postgresql", "statements on sqlite"])
def open_anew(request, tmp_path, txnstore_open):
    """Open further stores on one database, which commit groups in one way."""
    url = f"sqlite:///{tmp_path}/store.db"
    if request.param.endswith("postgresql"):
        url = request.getfixturevalue("txnstore_postgresql_url")

    def opened(**options: Any) -> Store:
        store: Store = txnstore_open(url, **options)
        store.commits_whole = True
        if not request.param.startswith("function"):
            store.general_until_seconds = math.inf
        return store

    return opened


def new_world(store: Store) -> World:
    name = f"topic-{next(_numbers)}"
    topic = store.write(lambda connection: create_topic(connection, name, partition_count=3))
    world = World(store, [f"{name}-0", f"{name}-1"], topic)
    for producer in world.names:
        world.start(producer)
    return world


def ends_in(store: Store, world: World) -> int:
    """Return how many transactions have ended in the partitions of the world, counted by partition."""
    in_topic = finished_transactions.c.partition_id.in_(world.topic.partition_ids)
    return len(store.read(lambda connection: connection.execute(select(finished_transactions).where(in_topic)).all()))


RECORDS: list[tuple[Cells, Committers]] = [([(1, 0, 1)], []), ([(0, 0, 3), (1, 0, 0)], [])]
#: How often they end in a partition.
ENDS = 3


@pytest.mark.slow
@pytest.mark.crashes
@pytest.mark.slow_on_postgresql
def test_a_crash_at_any_step_leaves_all_or_none_and_each_can_be_asked_for_again(open_anew) -> None:
    def act(world: World) -> list[Ended] | None:
        name = world.names[0]
        return world.coordinator.commit_several(name, commits_of(world, name, RECORDS))

    left = set()
    observer, victims = open_anew(), open_anew(pool_size=1)
    for crash in every_crash(lambda: new_world(victims), act, statements_are_all=True):
        crash.revive()
        with noting(crash):
            world, name = crash.subject, crash.subject.names[0]
            left.add(ends_in(observer, world))
            coordinator = TransactionCoordinator(observer)
            for number, commit in enumerate(commits_of(world, name, RECORDS)):
                ended = coordinator.end_transaction(
                    name, commit.producer, commit=True, appends=commit.appends, is_repeated=True
                )
                assert len(ended.appended) == len(commit.appends)
                assert ended.identity.epoch == world.producers[name].epoch + number + 1
            assert ends_in(observer, world) == ENDS
            assert_sound(observer, at_rest=True, partition_ids=world.topic.partition_ids)
    assert_sound(observer, at_rest=True)
    assert left == {0, ENDS}


@pytest.mark.slow
def test_a_newer_producer_comes_before_all_of_them_or_behind(open_anew) -> None:
    first, second, observer = (open_anew(pool_size=1) for _ in range(3))
    seen = set()

    def make() -> Scenario:
        world = new_world(observer)
        name = world.names[0]
        commits = commits_of(world, name, RECORDS)

        def commit() -> int:
            ended = TransactionCoordinator(first).commit_several(name, commits)
            return 0 if ended is None else len(ended)

        def take_over() -> ProducerIdentity:
            return TransactionCoordinator(second).init_producer_id(name).identity

        def look() -> None:
            assert ends_in(observer, world) in (0, ENDS)

        def conclude(finished: Any) -> None:
            committed, newer = finished["old"].result(), finished["new"].result()
            assert ends_in(observer, world) == (ENDS if committed else 0)
            assert newer.epoch == world.producers[name].epoch + committed + 1
            assert_sound(observer, partition_ids=world.topic.partition_ids)
            seen.add(committed)

        return Scenario({"old": commit, "new": take_over}, after_step=look, at_end=conclude)

    explore(make, stops=before_locks, preemptions_max=1, store=observer)
    assert_sound(observer)
    assert seen == {0, len(RECORDS)}


@pytest.mark.slow
@pytest.mark.slow_on_postgresql
def test_two_producers_that_write_in_opposite_orders_do_not_block_each_other(open_anew) -> None:
    first, second, observer = (open_anew(pool_size=1) for _ in range(3))

    def make() -> Scenario:
        world = new_world(observer)
        orders = [RECORDS, RECORDS[::-1]]

        def actor(number: int, store: Store) -> Any:
            commits = commits_of(world, world.names[number], orders[number])
            return lambda: TransactionCoordinator(store).commit_several(world.names[number], commits)

        def conclude(finished: Any) -> None:
            assert all(len(each.result()) == len(RECORDS) for each in finished.values())
            assert ends_in(observer, world) == 2 * ENDS
            assert_sound(observer, partition_ids=world.topic.partition_ids)

        return Scenario({"first": actor(0, first), "second": actor(1, second)}, at_end=conclude)

    assert explore(make, stops=before_locks, preemptions_max=1, store=observer).deadlocks == 0
    assert_sound(observer)

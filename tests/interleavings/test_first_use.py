"""Two who use something for the first time at once: one makes it, the other waits and finds it."""

from __future__ import annotations

import itertools

import pytest

from tests.tools.interleaving import Scenario, before_locks, before_transactions, explore
from txnstore.db.opening import open_store
from txnstore.log.topics import ensure_topic, find_topics

pytestmark = pytest.mark.slow_on_postgresql

_numbers = itertools.count(1)


def before_some_statements(statement):
    """Stop at the beginning and the end, and a few times on the way: there are some forty statements."""
    return statement.startswith(("BEGIN", "COMMIT", "ROLLBACK", "CREATE SCHEMA")) or (
        statement.lstrip().startswith("CREATE TABLE") and ("store_version" in statement or "_groups" in statement)
    )


def an_empty_place(url, tmp_path):
    """Return the address of a place without tables: a new file, or a new schema of the database."""
    number = next(_numbers)
    if url.startswith("sqlite"):
        return f"sqlite:///{tmp_path / f'empty-{number}.db'}", {}
    return url, {"schema": f"first_use_{number}"}


@pytest.mark.slow
@pytest.mark.parametrize(("stops", "interruptions_max"), [(before_transactions, None), (before_some_statements, 1)])
def test_two_first_users_of_an_empty_database_get_one_store(url, store, tmp_path, stops, interruptions_max):
    def make():
        place, options = an_empty_place(url, tmp_path)

        def use():
            with open_store(place, pool_size=1, **options) as opened:
                return opened.store_uuid

        def one_store(finished):
            assert finished["first"].result() == finished["second"].result()

        actors = {"first": use, "second": use}
        return Scenario(actors, at_end=one_store, alike=actors)

    # A file that is made is another thing that they have in common.
    explored = explore(make, stops=stops, preemptions_max=interruptions_max, store=store, all_orders=True)
    assert explored.deadlocks == 0


def test_two_who_write_to_a_topic_that_is_not_there_make_one_topic(world):
    def make():
        name = f"auto{next(_numbers)}"

        def use(store):
            return lambda: store.write(lambda connection: ensure_topic(connection, name, partition_count=2))

        def one_topic(finished):
            first, second = finished["first"].result(), finished["second"].result()
            assert (first.topic_uuid, first.partition_ids) == (second.topic_uuid, second.partition_ids)
            (found,) = world.observer.read(lambda connection: find_topics(connection, [name]))
            assert found.partition_ids == first.partition_ids

        actors = {"first": use(world.first), "second": use(world.second)}
        return Scenario(actors, at_end=one_topic, alike=actors)

    explored = explore(make, stops=before_locks, preemptions_max=2, store=world.observer)
    assert explored.orders_with_waiting > 0
    assert explored.deadlocks == 0


def test_two_first_users_of_a_transactional_id_are_one_after_the_other(world, in_turn):
    def make():
        setting = world.setting()
        first, second = setting.producer("first", world.first), setting.producer("second", world.second)

        def one_id_two_epochs(finished):
            assert finished["first"].result() == finished["second"].result() == ["ok"]
            assert first.identity.producer_id == second.identity.producer_id
            assert sorted([first.identity.epoch, second.identity.epoch]) == [0, 1]

        actors = {"first": in_turn(first.init), "second": in_turn(second.init)}
        return setting.scenario(actors, at_end=one_id_two_epochs, alike=actors)

    explored = explore(make, stops=before_locks, preemptions_max=2, store=world.observer)
    assert explored.orders_with_waiting > 0
    assert explored.deadlocks == 0

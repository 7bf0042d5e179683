"""Statement by statement, with at most two interruptions: whoever needs the same rows waits, and nobody in a circle."""

from __future__ import annotations

import pytest

from tests.tools.interleaving import before_locks, before_statements, explore
from txnstore.db.schema import record_batches
from txnstore.errors import TxnStoreError
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.deleting import purge_deleted_partitions
from txnstore.log.topics import delete_topic, find_topics
from txnstore.model import PartitionName, Record
from txnstore.relay.errors import RelayFailed
from txnstore.relay.options import relay_id_from, relay_id_to, start_id_of
from txnstore.relay.positions import RelayPosition, begin_relay_positions, check_one_way

pytestmark = pytest.mark.slow_on_postgresql

INTERRUPTIONS_MAX = 2


def before_locks_of_heads(statement):
    """Stop as `before_locks` does, but not before each table that the rows of a topic are deleted from."""
    return before_locks(statement) and not statement.startswith("DELETE")


def explore_statements(world, make, *, stops=before_locks):
    """Explore, and see that actors did wait for each other, and never in a circle."""
    explored = explore(make, stops=stops, preemptions_max=INTERRUPTIONS_MAX, store=world.observer)
    assert explored.deadlocks == 0
    assert explored.orders_with_waiting > 0


def test_two_appends_to_one_partition_follow_each_other(world, in_turn):
    def make():
        setting = world.setting(partition_count=1)
        producers = {name: setting.producer(name, store, transactional_id=None) for name, store in stores.items()}
        for producer in producers.values():
            producer.init()

        def life(name):
            return in_turn(lambda: producers[name].append(name, {"p0": [f"{name}/1", f"{name}/2"]}))

        def both_are_there(finished):
            assert {finished[name].result()[0] for name in stores} == {"ok"}

        return setting.scenario({name: life(name) for name in stores}, at_end=both_are_there)

    stores = {"first": world.first, "second": world.second}
    explore_statements(world, make, stops=before_statements)


def test_a_batch_whose_repetition_overtakes_it_is_appended_once(world, in_turn):
    def make():
        setting = world.setting(partition_count=1)
        original = setting.producer("original", world.first, transactional_id=None)
        original.init()
        original.append("before", {"p0": ["before/1"]})
        repetition = setting.producer("repetition", world.second, transactional_id=None)
        repetition.become(original.identity, original.sequences)
        duplicates = []

        def send(producer):
            (appended,) = producer.append("batch", {"p0": ["batch/1", "batch/2"]})
            duplicates.append(appended.is_duplicate)

        def appended_once(finished):
            assert finished["original"].result() == finished["repetition"].result() == ["ok"]
            assert sorted(duplicates) == [False, True]

        return setting.scenario(
            {
                "original": in_turn(lambda: send(original)),
                "repetition": in_turn(lambda: send(repetition)),
            },
            at_end=appended_once,
        )

    explore_statements(world, make, stops=before_statements)


@pytest.mark.parametrize("commit", [True, False])
def test_a_batch_belongs_to_the_transaction_that_ends_at_the_same_time_or_is_refused(world, in_turn, commit):
    def make():
        setting = world.setting()
        producer = setting.producer("producer", world.first)
        producer.init()
        producer.append("one", {"p0": ["one/1"]})
        flush = setting.producer("flush", world.second)
        flush.become(producer.identity, producer.sequences)

        def in_or_out(finished):
            assert finished["producer"].result() == ["ok"]
            answers.update(finished["flush"].result())

        return setting.scenario(
            {
                "producer": in_turn(lambda: producer.end("one", commit=commit)),
                "flush": in_turn(lambda: flush.append("one", {"p0": ["one/2"], "p1": ["one/3"]})),
            },
            at_end=in_or_out,
        )

    answers: set[str] = set()
    explore_statements(world, make)
    assert answers == {"ok", "ProducerFenced"}


def test_a_commit_at_the_same_time_as_an_init_wins_as_a_whole_or_is_fenced(world, in_turn):
    def make():
        setting = world.setting()
        old = setting.producer("old", world.first)
        old.init()
        old.append("one", {"p0": ["one/1"], "p1": ["one/2"]})
        new = setting.producer("new", world.second)

        def one_of_them_came_first(finished):
            assert finished["new"].result() == ["ok"]
            answers.update(finished["old"].result())

        return setting.scenario(
            {"old": in_turn(lambda: old.end("one", commit=True)), "new": in_turn(new.init)},
            at_end=one_of_them_came_first,
        )

    answers: set[str] = set()
    explore_statements(world, make)
    assert answers == {"ok", "ProducerFenced"}


def test_two_appends_to_two_partitions_named_in_opposite_order_never_wait_in_a_circle(world):
    def make():
        setting = world.setting()
        ids = list(setting.partitions.values())

        def write(store, partition_ids, value):
            batch = encode([Record(value)])
            appends = [Append(partition_id, batch) for partition_id in partition_ids]
            return lambda: store.write(lambda connection: append(connection, appends))

        def both_did(finished):
            for of in finished.values():
                of.result()

        # Nothing is recorded: these producers have no sequence numbers that would keep them apart.
        scenario = setting.scenario(
            {"up": write(world.first, ids, b"up"), "down": write(world.second, ids[::-1], b"down")}
        )
        return type(scenario)(scenario.actors, at_end=both_did)

    explore_statements(world, make)


def test_an_append_to_a_topic_that_is_deleted_comes_first_or_finds_no_partition(world):
    def make():
        setting = world.setting(partition_count=1)
        (partition_id,) = setting.partitions.values()
        batch = encode([Record(b"value")])

        def write():
            try:
                world.first.write(lambda connection: append(connection, [Append(partition_id, batch)]))
            except TxnStoreError as error:
                return type(error).__name__
            return "ok"

        def nothing_is_left(finished):
            finished["deleter"].result()
            answers.add(finished["writer"].result())
            purge_deleted_partitions(world.observer, rows_max=100)
            assert world.observer.read(lambda connection: find_topics(connection, [setting.topic])) == []
            left = world.observer.read(
                lambda connection: connection.execute(
                    record_batches.select().where(record_batches.c.partition_id == partition_id)
                ).all()
            )
            assert left == []

        scenario = setting.scenario({})
        return type(scenario)(
            {
                "writer": write,
                "deleter": lambda: world.second.write(lambda connection: delete_topic(connection, setting.topic)),
            },
            at_end=nothing_is_left,
        )

    answers: set[str] = set()
    explore_statements(world, make, stops=before_locks_of_heads)
    assert answers == {"ok", "UnknownTopicOrPartition"}


def test_a_topic_is_not_deleted_under_a_transaction_that_writes_to_it(world, in_turn):
    def make():
        setting = world.setting(partition_count=1)
        producer = setting.producer("producer", world.first)
        producer.init()

        def one_of_them_is_refused(finished):
            (deleted,) = finished["deleter"].result()
            (appended,) = finished["producer"].result()
            answers.add((appended, deleted))
            if appended == "ok":
                producer.end("one", commit=True)

        return type(setting.scenario({}))(
            {
                "producer": in_turn(lambda: producer.append("one", {"p0": ["one/1"]})),
                "deleter": in_turn(
                    lambda: world.second.write(lambda connection: delete_topic(connection, setting.topic))
                ),
            },
            at_end=one_of_them_is_refused,
        )

    answers: set[tuple[str, str]] = set()
    explore_statements(world, make, stops=before_locks_of_heads)
    assert answers == {("ok", "InvalidTransactionState"), ("UnknownTopicOrPartition", "ok")}


def test_of_two_relays_that_begin_in_a_topic_at_once_in_opposite_directions_one_is_refused(world):
    def make():
        setting = world.setting(partition_count=1)
        begun = {PartitionName(setting.topic, 0): RelayPosition("uuid", 0)}

        def begin(store, relay_id, written_as):
            def write(connection):
                check_one_way(connection, relay_id, {setting.topic})
                begin_relay_positions(connection, written_as, begun)

            def begin_or_be_refused():
                try:
                    store.write(write)
                except RelayFailed:
                    return "refused"
                return "begun"

            return begin_or_be_refused

        def one_of_them_is_refused(finished):
            answers = [finished[name].result() for name in ("to", "from")]
            assert sorted(answers) == ["begun", "refused"]
            firsts.add(answers.index("begun"))

        to_kafka, from_kafka = relay_id_to("kafka", "a"), relay_id_from("kafka", "b")
        return type(setting.scenario({}))(
            {
                "to": begin(world.first, to_kafka, start_id_of(to_kafka)),
                "from": begin(world.second, from_kafka, from_kafka),
            },
            at_end=one_of_them_is_refused,
        )

    firsts: set[int] = set()
    explore_statements(world, make, stops=before_statements)
    assert firsts == {0, 1}

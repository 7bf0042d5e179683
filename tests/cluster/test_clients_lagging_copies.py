"""A group whose database has not heard yet of a topic's new partitions assigns them all the same."""

from __future__ import annotations

from sqlalchemy import delete

from tests.clients.steps import PATIENCE_SECONDS
from tests.cluster.again import *  # noqa: F403 - the fixtures
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.schema import partitions
from txnstore.log.topics import find_topics, grow_topic


def test_partitions_that_only_the_controller_knows_are_picked_up(log, make_consumer):
    log.topic(partition_count=2)
    # One of these groups lives in the second database, whose copies lag.
    consumers = [
        make_consumer(
            {
                "group.id": name,
                "topic.metadata.refresh.interval.ms": 10,
                "heartbeat.interval.ms": 100_000,
                "session.timeout.ms": 300_000,
            }
        )
        for name in ("readers", "writers", "others", "more")
    ]
    leaders = {log.cluster.coordinator_of(name).database_id for name in ("readers", "writers", "others", "more")}
    assert leaders == {1, 2}
    for number in (0, 1):
        log.write("t", number, b"%d" % number)
    for consumer in consumers:
        consumer.subscribe(["t"])
        assert len(consumer.consume(2, PATIENCE_SECONDS)) == 2
    log.cluster.controller.write(lambda connection: grow_topic(connection, "t", partition_count=3))
    for consumer in consumers:
        for _ in range(600):
            consumer.poll(0.1)
            if len(consumer.assignment()) == 3:
                break
        assert sorted(partition.partition for partition in consumer.assignment()) == [0, 1, 2]


def test_a_group_starts_without_a_look_at_all_topics_unless_its_database_lacks_something(
    log, make_consumer, monkeypatch
):
    log.topic(partition_count=2)
    log.write("t", 0, b"0")
    first, second, *_ = (name for name in map(str, range(99)) if log.cluster.coordinator_id_of(name) == 2)
    store = log.cluster.coordinator_of(first)
    brought: list[int] = []
    reconcile = Cluster.reconcile

    def note(cluster: Cluster, database_id: int) -> bool:
        brought.append(database_id)
        return reconcile(cluster, database_id)

    def begin(name: str) -> None:
        consumer = make_consumer({"group.id": name, "auto.offset.reset": "earliest"})
        consumer.subscribe(["t"])
        assert len(consumer.consume(1, PATIENCE_SECONDS)) == 1
        consumer.close()

    monkeypatch.setattr(Cluster, "reconcile", note)
    begin(first)
    assert brought == []
    # Whatever its version says.
    (topic,) = store.read(lambda connection: find_topics(connection, ["t"]))
    number = next(number for number, leader in zip(topic.partition_ids, topic.leaders, strict=True) if leader == 1)
    store.write(lambda connection: connection.execute(delete(partitions).where(partitions.c.partition_id == number)))
    begin(second)
    assert brought == [2]

"""A group whose database has not heard yet of a topic's new partitions assigns them all the same."""

from __future__ import annotations

from tests.clients.steps import PATIENCE_SECONDS
from tests.cluster.again import *  # noqa: F403 - the fixtures
from txnstore.log.topics import grow_topic


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

"""Answers about several partitions of one database: of one snapshot, whatever is committed between two statements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, event

from tests.cluster.conftest import Bench, Producer
from txnstore import Consumer, TopicPartition
from txnstore import Producer as PublicProducer
from txnstore.cli.groups import offset_rows
from txnstore.cli.topics import describe_topic
from txnstore.groups.administration import find_group
from txnstore.groups.offsets import commit_offsets
from txnstore.model import GroupMembership, OffsetAndMetadata

PATIENCE_SECONDS = 60.0
TABLES = ("partition_heads", "record_batches", "group_offsets", "producer_states")


def interrupted(engine: Engine, read: Callable[[], Any], write: Callable[[], object]) -> Iterator[Any]:
    """Read again and again; before the first statement of a reading, the second, ... somebody commits something."""
    step, steps = 0, 0

    def commit_meanwhile(connection: Any, cursor: Any, statement: str, *_: object) -> None:
        nonlocal steps
        if statement.startswith("SELECT") and any(table in statement for table in TABLES):
            steps += 1
            if steps == step:
                write()

    while steps >= step:
        step, steps = step + 1, 0
        event.listen(engine, "before_cursor_execute", commit_meanwhile)
        try:
            yield read()
        finally:
            event.remove(engine, "before_cursor_execute", commit_meanwhile)
    assert step > 2, "nobody could come in between"


@pytest.fixture
def pair(bench: Bench) -> tuple[int, int]:
    """Two partitions of the second database."""
    return bench.partition_at(2, 0), bench.partition_at(2, 1)


@pytest.fixture
def producer(bench: Bench, pair: tuple[int, int]) -> Iterator[Producer]:
    """A client of its own, which writes to both of them in each transaction, and has done so twice."""
    with bench.site.open() as cluster:
        producer = Producer(cluster, bench.name_at(2, "id")).start()
        for _ in range(2):
            write_both(producer, pair)
        yield producer


def write_both(producer: Producer, pair: tuple[int, int]) -> None:
    for partition_id in pair:
        producer.send(partition_id, b"x")
    producer.end(commit=True)


def names_of(bench: Bench, pair: tuple[int, int]) -> list[TopicPartition]:
    return [TopicPartition(bench.topic.name, bench.topic.partition_ids.index(number)) for number in pair]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("within", [None, 0], ids=["offset order", "commit order"])
@pytest.mark.parametrize("place", [1, 2])
def test_the_lags_of_a_group_belong_together(
    bench: Bench, pair: tuple[int, int], producer: Producer, place: int, within: int | None
) -> None:
    """Its offsets live in the same database as the partitions, or in another one."""
    group_id = bench.name_at(place, "group")
    committed = dict.fromkeys(pair, OffsetAndMetadata(0, offset_in_transaction=within))
    coordinator = bench.cluster.coordinator_of(group_id)
    coordinator.write(lambda connection: commit_offsets(connection, GroupMembership(group_id), committed))

    def describe(connection: Any) -> list[dict[str, Any]]:
        group = find_group(connection, group_id)
        assert group is not None
        return offset_rows(bench.cluster, coordinator, connection, group)

    engine = bench.cluster.own(2).engine
    for rows in interrupted(engine, lambda: coordinator.read(describe), lambda: write_both(producer, pair)):
        one, two = ((row["high_watermark"], row["last_stable_offset"], row["lag"]) for row in rows)
        assert one == two
        # Each transaction is a record and a marker.
        assert one == (2 * one[2], 2 * one[2], one[2])


def test_what_is_said_of_a_topic_belongs_together(bench: Bench, pair: tuple[int, int], producer: Producer) -> None:
    controller = bench.cluster.controller

    def describe() -> dict[str, Any]:
        return controller.read(lambda connection: describe_topic(bench.cluster, connection, bench.topic.name))

    numbers = [partition.partition for partition in names_of(bench, pair)]
    engine = bench.cluster.own(2).engine
    for described in interrupted(engine, describe, lambda: write_both(producer, pair)):
        one, two = (described["partitions"][number] for number in numbers)
        assert one["high_watermark"] == two["high_watermark"] == one["batches"] == two["batches"]


def test_offsets_for_times_and_committed_offsets_belong_together(
    bench: Bench, pair: tuple[int, int], producer: Producer
) -> None:
    group_id = bench.name_at(2, "group")
    names = names_of(bench, pair)

    def commit_both() -> None:
        write_both(producer, pair)
        for partition_id in pair:
            producer.send(partition_id, b"x")
        producer.send_offsets(group_id, dict.fromkeys(pair, next(offsets)))
        producer.end(commit=True)

    offsets = iter(range(1, 100))
    commit_both()
    with Consumer({"bootstrap.servers": ", ".join(bench.site.urls), "group.id": group_id}) as consumer:

        def ask() -> tuple[list[int], list[int]]:
            ends = [TopicPartition(name.topic, name.partition, -1) for name in names]
            found = consumer.offsets_for_times(ends, PATIENCE_SECONDS)
            committed = consumer.committed(names, PATIENCE_SECONDS)
            return [partition.offset for partition in found], [partition.offset for partition in committed]

        ask()
        engine = consumer._connection.cluster().own(2).engine
        for found in interrupted(engine, ask, commit_both):
            assert [len(set(offsets)) for offsets in found] == [1, 1], found


def test_a_transaction_that_comes_whole_is_one_in_each_database(bench: Bench) -> None:
    urls = ", ".join(bench.site.urls)
    partitions = range(len(bench.topic.partition_ids))
    settings = {"txnstore.delivery.order": "commit", "txnstore.delivery.atomic": True, "auto.offset.reset": "earliest"}
    with (
        PublicProducer({"bootstrap.servers": urls, "transactional.id": "writer"}) as producer,
        Consumer({"bootstrap.servers": urls, "group.id": "readers", **settings}) as consumer,
    ):
        producer.init_transactions()
        for number in range(4):
            with producer.transaction():
                for partition in partitions:
                    producer.produce(bench.topic.name, b"%d" % number, partition=partition)
        consumer.assign([TopicPartition(bench.topic.name, partition) for partition in partitions])
        seen: dict[int, list[int]] = {database_id: [] for database_id in bench.topic.leaders}
        for _ in range(4 * len(seen)):
            transaction = consumer.consume_transaction(PATIENCE_SECONDS)
            assert transaction is not None
            (value,) = {message.value() for message in transaction.messages}
            (leader,) = {bench.topic.leaders[message.partition() or 0] for message in transaction.messages}
            assert len(transaction.messages) == bench.topic.leaders.count(leader)
            seen[leader].append(int(value or b""))
    assert all(numbers == list(range(4)) for numbers in seen.values())


@pytest.mark.slow
def test_a_transaction_tells_the_offsets_of_the_groups_that_its_own_database_coordinates(bench: Bench) -> None:
    urls = ", ".join(bench.site.urls)
    settings = {"txnstore.delivery.order": "commit", "txnstore.delivery.atomic": True, "auto.offset.reset": "earliest"}
    group_ids = [bench.name_at(database_id, "group") for database_id in (1, 2)]
    name = bench.topic.name
    with (
        PublicProducer({"bootstrap.servers": urls, "transactional.id": bench.name_at(2, "id")}) as producer,
        Consumer({"bootstrap.servers": urls, "group.id": "readers", **settings}) as consumer,
    ):
        producer.init_transactions()
        partitions = [bench.topic.partition_ids.index(bench.partition_at(database_id)) for database_id in (1, 2)]
        for number, waits in enumerate((False, True)):
            with producer.transaction():
                for partition in partitions:
                    producer.produce(name, b"both", partition=partition)
                for group_id in group_ids:
                    with Consumer({"bootstrap.servers": urls, "group.id": group_id}) as worker:
                        metadata = worker.consumer_group_metadata()
                    producer.send_offsets_to_transaction([TopicPartition(name, 0, number)], metadata)
                if waits:
                    producer.flush()
        consumer.assign([TopicPartition(name, partition) for partition in partitions])
        told: dict[int, list[dict[str, list[int]]]] = {}
        for _ in range(4):
            transaction = consumer.consume_transaction(PATIENCE_SECONDS)
            assert transaction is not None
            (leader,) = {bench.topic.leaders[message.partition() or 0] for message in transaction.messages}
            offsets = {group_id: [one.offset for one in found] for group_id, found in transaction.offsets.items()}
            told.setdefault(leader, []).append(offsets)
    assert told == {1: [{}, {}], 2: [{group_ids[1]: [0]}, {group_ids[1]: [1]}]}

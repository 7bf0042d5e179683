"""Clients that were opened while their database was alone, and live on after another one has joined."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from tests.clients.consumer.log_writer import eventually
from txnstore import (
    OFFSET_BEGINNING,
    Consumer,
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    KafkaException,
    Producer,
    TopicPartition,
)
from txnstore.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType
from txnstore.clients.consumer.fetcher import FetchThread
from txnstore.clients.consumer.reader import PartitionReader
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.cluster.membership import Database, addresses_of, coordinator_of_name, label_of_address
from txnstore.db.url import parse_url
from txnstore.errors import StoreUnavailable
from txnstore.log.retention import delete_expired_batches
from txnstore.transactions.listing import hanging_in_cluster

PATIENCE_SECONDS = 60.0
ATOMIC = {"txnstore.delivery.order": "commit", "txnstore.delivery.atomic": True, "enable.auto.commit": False}
#: A name that the second of two databases coordinates.
MEMBERS = [Database(number, str(number), str(number), coordinates=True) for number in (1, 2)]
ELSEWHERE = next(name for name in map("g-{}".format, itertools.count()) if coordinator_of_name(name, MEMBERS) == 2)


@pytest.fixture
def alone(site):
    return site.urls[0]


@pytest.fixture
def both(site):
    return ", ".join(site.urls[:2])


@pytest.fixture
def grow(site, both) -> Callable[..., None]:
    """Let the second database join, and let a client hear of it, which is given its URL."""

    def grow(consumer: Consumer | None = None) -> None:
        with AdminClient({"bootstrap.servers": both}) as admin:
            placement = label_of_address(parse_url(site.urls[1]))
            new = NewTopic("there", 1, config={"txnstore.placement": placement})
            admin.create_topics([new])["there"].result(PATIENCE_SECONDS)
        if consumer is not None:
            cluster = consumer._core.connection.cluster()
            assert cluster.is_alone
            cluster._addresses += addresses_of([site.urls[1]])
            cluster.refresh()

    return grow


def commit(producer: Producer, shares: dict[int, int], value: bytes) -> None:
    producer.begin_transaction()
    for partition, count in shares.items():
        for _ in range(count):
            producer.produce("t", value, partition=partition)
    producer.commit_transaction(PATIENCE_SECONDS)


def turn(consumer: Consumer) -> None:
    """Let each fetching thread do what it has at hand; none waits for what is still to come."""
    for thread in list(consumer._core.fetcher._threads()):
        with thread._wanted:
            is_wanted = thread._is_wanted()
            unresolved = thread._subscription.to_resolve(0.0, is_wanted)
            positions = thread._subscription.to_read(0.0, is_wanted)
        has_grown = thread._is_alone and is_wanted is not None
        if has_grown or unresolved or any(not position.partition.is_at_end for position in positions):
            thread._turn()


@pytest.mark.parametrize("turns", [1, 2])
def test_transactions_stay_whole_when_a_database_joins_under_a_running_reader(alone, grow, turns, monkeypatch):
    """One partition is located while what is buffered of the other is still of the time before."""
    monkeypatch.setattr(FetchThread, "start", lambda _: None)
    with AdminClient({"bootstrap.servers": alone}) as admin:
        admin.create_topics([NewTopic("t", 2)])["t"].result(PATIENCE_SECONDS)
    shares, count = {0: 1, 1: 5}, 40
    with Producer({"bootstrap.servers": alone, "transactional.id": "x"}) as producer:
        producer.init_transactions(PATIENCE_SECONDS)
        for number in range(count):
            commit(producer, shares, b"%d" % number)
    small_pages = {"queued.min.messages": 45, "message.max.bytes": 1000, "fetch.max.bytes": 1000}
    with Consumer({"bootstrap.servers": alone, "group.id": "g", **small_pages, **ATOMIC}) as consumer:
        consumer.assign([TopicPartition("t", number, OFFSET_BEGINNING) for number in shares])
        found: list[bytes] = []
        while len(found) < count:
            if len(found) == 2 and consumer._core.connection.is_alone:
                grow(consumer)
            for _ in range(turns):
                turn(consumer)
            transaction = consumer.consume_transaction(0)
            if transaction is not None:
                values, partitions = zip(*((one.value(), one.partition()) for one in transaction.messages), strict=True)
                assert sorted(partitions) == [0, 1, 1, 1, 1, 1]
                assert set(values) == {b"%d" % len(found)}
                found.append(values[0])


def next_of(consumer: Consumer) -> tuple[str | None, bytes | None]:
    message = consumer.poll(PATIENCE_SECONDS)
    assert message is not None
    return message.topic(), message.value()


def committed_by(url: str, group_id: str, offset: int) -> None:
    with Consumer({"bootstrap.servers": url, "group.id": group_id}) as consumer:
        consumer.commit(offsets=[TopicPartition("t", 0, offset)], asynchronous=False)


@pytest.fixture
def ten(alone):
    """Ten records in a partition."""
    with Producer({"bootstrap.servers": alone}) as producer:
        for number in range(10):
            producer.produce("t", b"%d" % number)
            assert producer.flush(PATIENCE_SECONDS) == 0


def test_a_group_goes_on_from_what_it_has_committed_where_it_lives_by_now(alone, both, site, ten):
    settings = {"bootstrap.servers": alone, "group.id": ELSEWHERE, "auto.offset.reset": "latest"}
    with Consumer(settings) as consumer:
        assert consumer.list_topics("t", PATIENCE_SECONDS).topics
        committed_by(both, ELSEWHERE, 3)
        cluster = consumer._core.connection.cluster()
        assert cluster.is_alone
        cluster._addresses += addresses_of([site.urls[1]])
        consumer.assign([TopicPartition("t", 0)])
        assert next_of(consumer) == ("t", b"3")


def test_what_is_asked_of_a_group_is_asked_where_it_lives_by_now(alone, both, site, ten):
    settings = {"bootstrap.servers": alone}

    def let_know(cluster: Cluster) -> None:
        assert cluster.is_alone
        cluster._addresses += addresses_of([site.urls[1]])

    with Consumer({**settings, "group.id": ELSEWHERE}) as consumer:
        consumer.list_topics("t", PATIENCE_SECONDS)
        with ExitStack() as stack:
            admins = [stack.enter_context(AdminClient(settings)) for _ in range(5)]
            for admin in admins:
                admin.list_topics("t", PATIENCE_SECONDS)
            committed_by(both, ELSEWHERE, 3)
            let_know(consumer._core.connection.cluster())
            assert consumer.committed([TopicPartition("t", 0)], PATIENCE_SECONDS)[0].offset == 3
            # Without the second URL it is told so.
            with pytest.raises(KafkaException, match="no URL of the list leads there"):
                admins[0].describe_consumer_groups([ELSEWHERE])[ELSEWHERE].result(PATIENCE_SECONDS)
            for admin in admins[1:]:
                let_know(admin._connection.cluster())
            groups = admins[1].list_consumer_groups().result(PATIENCE_SECONDS)
            assert [group.group_id for group in groups.valid or ()] == [ELSEWHERE]
            found = admins[2].describe_consumer_groups([ELSEWHERE])[ELSEWHERE].result(PATIENCE_SECONDS)
            assert (found.state, found.is_simple_consumer_group) == (ConsumerGroupState.EMPTY, True)
            request = [ConsumerGroupTopicPartitions(ELSEWHERE)]
            listed = admins[3].list_consumer_group_offsets(request)[ELSEWHERE].result(PATIENCE_SECONDS)
            assert [partition.offset for partition in listed.topic_partitions or ()] == [3]
            with pytest.warns(DeprecationWarning, match="list_groups"):
                assert [group.id for group in admins[4].list_groups(timeout=PATIENCE_SECONDS)] == [ELSEWHERE]


def test_what_a_group_has_not_read_is_kept_wherever_it_lives_by_now(site, alone, both, ten):
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        for name, value in {"retention.ms": "1", "txnstore.retention.unread.ms": "-1"}.items()
    ]
    with AdminClient({"bootstrap.servers": alone}) as admin:
        resource = ConfigResource(ResourceType.TOPIC, "t", incremental_configs=entries)
        admin.incremental_alter_configs([resource])[resource].result(PATIENCE_SECONDS)
    site.clock.advance(10**12)
    with site.open(alone) as stale:
        committed_by(both, ELSEWHERE, 2)
        # It has no URL of the group's database.
        assert delete_expired_batches(stale.controller, stale, batches_max=100) == 0
        stale._addresses += addresses_of([site.urls[1]])
        assert delete_expired_batches(stale.controller, stale, batches_max=100) == 2


def test_a_transaction_does_not_hang_because_its_coordinator_has_joined_since(site, alone, both, ten):
    settings = {"bootstrap.servers": both, "transactional.id": ELSEWHERE}
    with site.open(alone) as stale, Producer(settings) as producer:
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
        producer.produce("t", b"open", partition=0)
        assert producer.flush(PATIENCE_SECONDS) == 0
        site.clock.advance(10**12)
        for _ in range(2):
            assert hanging_in_cluster(stale, {}, 60_000) == []
            stale._addresses += addresses_of([site.urls[1]])
        producer.abort_transaction(PATIENCE_SECONDS)


def test_what_was_read_while_a_database_was_alone_says_nothing_of_what_was_committed_since(
    alone, both, grow, monkeypatch
):
    """Another thread goes on with its partitions, as the group lives in the other database."""
    monkeypatch.setattr(FetchThread, "start", lambda _: None)
    with AdminClient({"bootstrap.servers": alone}) as admin:
        admin.create_topics([NewTopic("t", 2)])["t"].result(PATIENCE_SECONDS)
    with Producer({"bootstrap.servers": alone}) as producer:
        for partition in (0, 1):
            producer.produce("t", b"plain", partition=partition)
        assert producer.flush(PATIENCE_SECONDS) == 0
    with Consumer({"bootstrap.servers": alone, "group.id": ELSEWHERE, **ATOMIC}) as consumer:
        consumer.assign([TopicPartition("t", number, OFFSET_BEGINNING) for number in (0, 1)])
        for _ in range(6):
            for assigned in consumer._core.subscription:
                assigned.is_at_end = False
            turn(consumer)
        assert all(consumer.consume_transaction(0) for _ in range(2))
        grow(consumer)
        turn(consumer)
        with Producer({"bootstrap.servers": both, "transactional.id": "x"}) as producer:
            producer.init_transactions(PATIENCE_SECONDS)
            commit(producer, {0: 1, 1: 1}, b"whole")
        consumer.pause([TopicPartition("t", 0)])
        first, second = consumer._core.subscription
        second.is_at_end = False
        turn(consumer)
        assert (first.buffered_records, second.buffered_records) == (0, 1)
        consumer.resume([TopicPartition("t", 0)])
        found = consumer.consume_transaction(0)
        while found is None:
            turn(consumer)
            found = consumer.consume_transaction(0)
        assert [message.partition() for message in found.messages] in ([0, 1], [1, 0])


def test_what_a_database_alone_was_read_for_is_dropped_if_another_one_has_joined_meanwhile(alone, grow, monkeypatch):
    """Another thread may have read the same partitions, as of a later moment."""
    monkeypatch.setattr(FetchThread, "start", lambda _: None)
    with Producer({"bootstrap.servers": alone}) as producer:
        producer.produce("t", b"0", partition=0)
        assert producer.flush(PATIENCE_SECONDS) == 0
    with Consumer({"bootstrap.servers": alone, "group.id": "g"}) as consumer:
        read, connection = PartitionReader.read, consumer._core.connection

        def read_and_grow(reader: PartitionReader, *arguments: Any, **keywords: Any) -> Any:
            outcomes = read(reader, *arguments, **keywords)
            if connection.is_alone:
                grow(consumer)
            return outcomes

        monkeypatch.setattr(PartitionReader, "read", read_and_grow)
        consumer.assign([TopicPartition("t", 0, OFFSET_BEGINNING)])
        while connection.is_alone:
            turn(consumer)
        assert [assigned.buffered_records for assigned in consumer._core.subscription] == [0]
        while (message := consumer.poll(0)) is None:
            turn(consumer)
        assert message.value() == b"0"


def test_a_thread_waits_for_commits_where_it_reads_after_the_cluster_has_grown(alone, both, grow, monkeypatch):
    made: list[tuple[Any, int]] = []
    make = PartitionReader.waiter

    def waiter(reader: PartitionReader, *arguments: Any) -> Any:
        made.append((make(reader, *arguments), reader.database_id))
        return made[-1][0]

    monkeypatch.setattr(PartitionReader, "waiter", waiter)
    with (
        Producer({"bootstrap.servers": alone}) as producer,
        Consumer({"bootstrap.servers": alone, "group.id": ELSEWHERE}) as consumer,
    ):
        producer.produce("t", b"0")
        assert producer.flush(PATIENCE_SECONDS) == 0
        consumer.assign([TopicPartition("t", 0, OFFSET_BEGINNING)])
        assert next_of(consumer) == ("t", b"0")
        eventually(lambda: made)
        grow(consumer)
        consumer.incremental_assign([TopicPartition("there", 0, OFFSET_BEGINNING)])
        with Producer({"bootstrap.servers": both}) as other:
            for number in range(3):
                for topic in ("t", "there"):
                    other.produce(topic, b"%d" % number)
                    assert other.flush(PATIENCE_SECONDS) == 0
                    assert next_of(consumer) == (topic, b"%d" % number)
        threads = list(consumer._core.fetcher._threads())
        eventually(lambda: all(thread._waiter is not None for thread in threads))
        places = {id(waiter): database_id for waiter, database_id in made}
        assert [places[id(thread._waiter)] for thread in threads] == [2, 1]


def test_a_call_of_groups_waits_for_a_database_that_is_away_for_its_time_and_holds_up_no_other(both, grow, monkeypatch):
    grow()
    with AdminClient({"bootstrap.servers": both}) as admin:
        admin.list_topics(timeout=PATIENCE_SECONDS)
        store = admin._connection.cluster().own(2)

        def refuse(*_: Any, **__: Any) -> None:
            raise StoreUnavailable("it is away")

        with monkeypatch.context() as away:
            away.setattr(store.backend, "begin", refuse)
            begun = time.monotonic()
            offsets = ConsumerGroupTopicPartitions(ELSEWHERE, [TopicPartition("t", 0, 1)])
            for future in (
                admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(ELSEWHERE)], request_timeout=0.5),
                admin.alter_consumer_group_offsets([offsets], request_timeout=0.5),
            ):
                with pytest.raises(KafkaException):
                    future[ELSEWHERE].result(PATIENCE_SECONDS)
            assert "there" in admin.list_topics(timeout=PATIENCE_SECONDS).topics
            assert time.monotonic() - begun < PATIENCE_SECONDS / 4

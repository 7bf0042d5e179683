"""The clients over several databases: records, transactions, offsets, fencing and timeouts, as users write them."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time

import pytest

from tests.clients.steps import time_out
from txnstore import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
    outcome,
)
from txnstore.admin import AdminClient, NewTopic
from txnstore.clients.consumer import core
from txnstore.db.cluster.cluster import open_cluster
from txnstore.log.topics import get_topic
from txnstore.transactions.outcome import Outcome

# Clients of three databases come and go.
pytestmark = [pytest.mark.slow_on_postgresql, pytest.mark.crashes]

PATIENCE_SECONDS = 60.0
PARTITIONS = 6
TOPIC = "orders"


@pytest.fixture
def urls(site):
    return ", ".join(site.urls)


@pytest.fixture
def topic(urls):
    """A topic with two partitions in each of three databases."""
    with AdminClient({"bootstrap.servers": urls}) as admin:
        new = NewTopic(TOPIC, PARTITIONS, config={"txnstore.placement": "roundrobin"})
        admin.create_topics([new])[TOPIC].result(PATIENCE_SECONDS)
    return TOPIC


@pytest.fixture
def make(urls, request):
    """Make clients; they are closed after the test."""

    def make(kind, **settings):
        usual = {"bootstrap.servers": urls}
        if kind is Consumer:
            usual |= {"group.id": "readers", "auto.offset.reset": "earliest", "enable.auto.commit": False}
        client = kind(usual | {name.replace("_", "."): value for name, value in settings.items()})
        request.addfinalizer(client.close)
        return client

    return make


@pytest.fixture
def transactional(make):
    def start(transactional_id="anna", **settings):
        producer = make(Producer, transactional_id=transactional_id, **settings)
        producer.init_transactions(PATIENCE_SECONDS)
        return producer

    return start


def read_all(make, topic, *, isolation="read_committed", partitions=range(PARTITIONS)):
    """Return the values in each partition, from the beginning to the end."""
    consumer = make(Consumer, group_id="nobody", enable_partition_eof=True, isolation_level=isolation)
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
    found: dict[int, list[bytes]] = {number: [] for number in partitions}
    ended: set[int] = set()
    while len(ended) < len(found):
        message = consumer.poll(PATIENCE_SECONDS)
        assert message is not None, (found, ended)
        if message.error() is None:
            found[message.partition()].append(message.value())
        else:
            assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
            ended.add(message.partition())
    consumer.close()
    return found


def leaders_of(urls, topic, transactional_id):
    """Return which databases hold the topic's partitions, and which one coordinates the transactional id."""
    with open_cluster(urls) as cluster:
        found = cluster.controller.read(lambda connection: get_topic(connection, topic))
        return found.leaders, cluster.coordinator_id_of(transactional_id)


def everywhere(producer, topic, *values):
    """Write the values to every partition."""
    for number in range(PARTITIONS):
        for value in values:
            producer.produce(topic, value, partition=number)


def ids_at_each_leader(client, prefix):
    """Return a name that lives in each of the databases."""
    cluster = client._connection.cluster()
    leaders = {member.database_id for member in cluster.databases}
    found: dict[int, str] = {}
    for name in (f"{prefix}-{number}" for number in itertools.count()):
        found.setdefault(cluster.coordinator_id_of(name), name)
        if set(found) == leaders:
            return [found[leader] for leader in sorted(found)]
    raise AssertionError


@pytest.mark.slow
def test_plain_records_are_delivered_and_read_in_order_wherever_they_live(make, topic):
    producer, reports = make(Producer, linger_ms=1), []
    for number in range(600):
        producer.produce(
            topic, b"%d" % number, partition=number % PARTITIONS, on_delivery=lambda *report: reports.append(report)
        )
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert [error for error, _ in reports] == [None] * 600
    offsets: dict[int, list[int]] = {number: [] for number in range(PARTITIONS)}
    for _, message in reports:
        offsets[message.partition()].append(message.offset())
    assert offsets == {number: list(range(100)) for number in range(PARTITIONS)}
    expected = {number: [b"%d" % each for each in range(number, 600, PARTITIONS)] for number in range(PARTITIONS)}
    assert read_all(make, topic) == expected


@pytest.mark.slow
def test_a_group_reads_from_all_databases_and_commits(make, topic):
    producer = make(Producer)
    everywhere(producer, topic, b"a", b"b")
    assert producer.flush(PATIENCE_SECONDS) == 0
    consumer = make(Consumer)
    consumer.subscribe([topic])
    got: list[tuple[int, bytes]] = []
    while len(got) < 2 * PARTITIONS:
        message = consumer.poll(PATIENCE_SECONDS)
        assert message is not None
        got.append((message.partition(), message.value()))
    assert sorted(got) == [(number, value) for number in range(PARTITIONS) for value in (b"a", b"b")]
    consumer.commit(asynchronous=False)
    partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    assert [each.offset for each in consumer.committed(partitions, PATIENCE_SECONDS)] == [2] * PARTITIONS
    assert [each.offset for each in consumer.position(partitions)] == [2] * PARTITIONS
    assert [consumer.get_watermark_offsets(each) for each in partitions] == [(0, 2)] * PARTITIONS
    found = consumer.offsets_for_times([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    assert [each.offset for each in found] == [0] * PARTITIONS
    # Whoever waits for something new hears of it at once, from each database.
    for number in range(PARTITIONS):
        producer.produce(topic, b"c", partition=number)
        producer.flush(PATIENCE_SECONDS)
        message = consumer.poll(PATIENCE_SECONDS)
        assert (message.partition(), message.value()) == (number, b"c")


@pytest.mark.slow
@pytest.mark.parametrize("flushed", [False, True])
def test_a_transaction_over_all_databases_is_seen_whole_or_not_at_all(make, transactional, topic, flushed):
    for name in ids_at_each_leader(transactional(), "id"):
        producer = transactional(name)
        reports: list[tuple[object, ...]] = []
        producer.begin_transaction()
        everywhere(producer, topic, name.encode())
        if flushed:
            assert producer.flush(PATIENCE_SECONDS) == 0
            assert all(name.encode() not in found for found in read_all(make, topic).values())
        producer.commit_transaction(PATIENCE_SECONDS)
        producer.begin_transaction()
        for number in range(PARTITIONS):
            producer.produce(
                topic, b"never", partition=number, on_delivery=lambda *report, to=reports: to.append(report)
            )
        if flushed:
            assert producer.flush(PATIENCE_SECONDS) == 0
        producer.abort_transaction(PATIENCE_SECONDS)
        assert len(reports) == PARTITIONS
        assert all(found[-1] == name.encode() for found in read_all(make, topic).values())
    found = read_all(make, topic)
    assert len({tuple(values) for values in found.values()}) == 1
    assert b"never" not in found[0]


def test_a_transaction_adds_its_partitions_in_one_request(transactional, topic, monkeypatch):
    producer = transactional()
    producer.begin_transaction()
    everywhere(producer, topic, b"warm")
    producer.commit_transaction(PATIENCE_SECONDS)
    from txnstore.transactions.coordinator import TransactionCoordinator

    calls = []
    usual = TransactionCoordinator.add_partitions

    def add(self, transactional_id, identity, partition_ids, **named):
        calls.append(sorted(partition_ids))
        return usual(self, transactional_id, identity, partition_ids, **named)

    monkeypatch.setattr(TransactionCoordinator, "add_partitions", add)
    producer.begin_transaction()
    everywhere(producer, topic, b"a")
    producer.commit_transaction(PATIENCE_SECONDS)
    # Those at the coordinator go with the decision.
    assert [len(partition_ids) for partition_ids in calls] == [4]


@pytest.mark.slow
def test_offsets_of_groups_in_every_database_are_committed_with_the_transaction(make, transactional, topic):
    plain = make(Producer)
    everywhere(plain, topic, b"in")
    assert plain.flush(PATIENCE_SECONDS) == 0
    first = transactional()
    partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    groups = ids_at_each_leader(first, "group")
    # Each in the database that has the partition, and in another one.
    names = list(enumerate(ids_at_each_leader(first, "id")))
    for transactional_id, group_id in [
        (name, groups[(place + shift) % 3]) for shift in (0, 1) for place, name in names
    ]:
        consumer = make(Consumer, group_id=group_id)
        consumer.assign(partitions)
        for commit in (False, True):
            producer = transactional(transactional_id)
            producer.begin_transaction()
            producer.produce(topic, b"out", partition=0)
            positions = [TopicPartition(topic, number, number + 1) for number in range(PARTITIONS)]
            producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), PATIENCE_SECONDS)
            if commit:
                producer.commit_transaction(PATIENCE_SECONDS)
            else:
                producer.abort_transaction(PATIENCE_SECONDS)
        committed = consumer.committed(partitions, PATIENCE_SECONDS)
        assert [each.offset for each in committed] == [number + 1 for number in range(PARTITIONS)]
        consumer.close()


@pytest.mark.slow
def test_a_newer_producer_fences_the_older_one_everywhere(make, transactional, topic):
    old = transactional()
    old.begin_transaction()
    everywhere(old, topic, b"old")
    assert old.flush(PATIENCE_SECONDS) == 0
    new = transactional()
    old.produce(topic, b"late", partition=1)
    with pytest.raises(KafkaException) as caught:
        old.commit_transaction(PATIENCE_SECONDS)
    assert caught.value.args[0].fatal()
    new.begin_transaction()
    everywhere(new, topic, b"new")
    new.commit_transaction(PATIENCE_SECONDS)
    assert read_all(make, topic) == {number: [b"new"] for number in range(PARTITIONS)}


def test_a_transaction_that_timed_out_is_aborted_everywhere_and_its_producer_goes_on(make, transactional, topic, site):
    producer = transactional(txnstore_clock=site.clock, transaction_timeout_ms=10_000)
    producer.begin_transaction()
    everywhere(producer, topic, b"slow")
    assert producer.flush(PATIENCE_SECONDS) == 0
    site.clock.advance(10_001)
    with site.open() as cluster:
        time_out(cluster.coordinator_of("anna"), cluster=cluster)
    with pytest.raises(KafkaException) as caught:
        producer.commit_transaction(PATIENCE_SECONDS)
    assert caught.value.args[0].txn_requires_abort()
    producer.abort_transaction(PATIENCE_SECONDS)
    producer.begin_transaction()
    everywhere(producer, topic, b"again")
    producer.commit_transaction(PATIENCE_SECONDS)
    assert read_all(make, topic) == {number: [b"again"] for number in range(PARTITIONS)}


@pytest.mark.slow
def test_a_reader_helps_with_a_transaction_that_is_coordinated_elsewhere(make, transactional, topic):
    names = ids_at_each_leader(transactional(), "id")
    abandoned = []
    for name in names:
        producer = transactional(name, transaction_timeout_ms=1_000)
        producer.begin_transaction()
        everywhere(producer, topic, b"never")
        producer.flush(PATIENCE_SECONDS)
        abandoned.append(producer)
    plain = make(Producer)
    everywhere(plain, topic, b"behind")
    plain.flush(PATIENCE_SECONDS)
    consumer = make(Consumer, group_id="nobody")
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(PARTITIONS)])
    got: set[int | None] = set()
    while len(got) < PARTITIONS:
        message = consumer.poll(PATIENCE_SECONDS)
        assert message is not None, got
        assert message.value() == b"behind"
        got.add(message.partition())


@pytest.mark.slow
def test_writers_of_other_processes_write_to_all_databases(make, transactional, topic):
    for name in ids_at_each_leader(transactional(), "id"):
        producer = transactional(name)
        producer.begin_transaction()
        token = producer.transaction_token(PATIENCE_SECONDS)
        writers = [make(Producer, txnstore_transaction_token=token) for _ in range(2)]
        for writer in writers:
            everywhere(writer, topic, name.encode())
        ids = [writer.report_writer(PATIENCE_SECONDS) for writer in writers]
        assert all(name.encode() not in values for values in read_all(make, topic).values())
        producer.commit_transaction(PATIENCE_SECONDS, writers=ids[:1])
        assert all(values.count(name.encode()) == 1 for values in read_all(make, topic).values())


def test_the_outcome_is_asked_of_the_database_that_knows(urls, transactional, topic):
    for name in ids_at_each_leader(transactional(), "id"):
        producer = transactional(name)
        for commit, expected in ((True, Outcome.COMMITTED), (False, Outcome.ABORTED)):
            identity = producer._sender.session.identity
            state = f"{identity.producer_id}:{identity.epoch}"
            producer.begin_transaction()
            everywhere(producer, topic, b"a")
            producer.flush(PATIENCE_SECONDS)
            assert outcome(state, urls) is Outcome.OPEN
            (producer.commit_transaction if commit else producer.abort_transaction)(PATIENCE_SECONDS)
            assert outcome(state, urls) is expected
    with pytest.raises(KafkaException) as caught:
        outcome("12345:0", urls)
    assert caught.value.args[0].code() == KafkaError.TRANSACTIONAL_ID_NOT_FOUND


@pytest.mark.slow
def test_topics_are_made_by_their_first_record_and_known_everywhere(make, transactional):
    producer = transactional()
    producer.begin_transaction()
    producer.produce("made-by-use", b"a")
    producer.commit_transaction(PATIENCE_SECONDS)
    assert read_all(make, "made-by-use", partitions=[0]) == {0: [b"a"]}
    consumer = make(Consumer)
    consumer.subscribe(["^made-.*"])
    assert consumer.poll(PATIENCE_SECONDS).value() == b"a"


@pytest.mark.slow
def test_a_partition_that_is_made_anew_elsewhere_is_found(make, urls):
    producer = make(Producer)
    with AdminClient({"bootstrap.servers": urls}) as admin, make(Consumer, group_id="nobody") as consumer:
        consumer.assign([TopicPartition("moved", 0, OFFSET_BEGINNING)])
        for label in [member.label for member in producer._connection.cluster().databases]:
            new = NewTopic("moved", 1, config={"txnstore.placement": label})
            admin.create_topics([new])["moved"].result(PATIENCE_SECONDS)
            producer.produce("moved", label.encode())
            assert producer.flush(PATIENCE_SECONDS) == 0
            while (message := consumer.poll(PATIENCE_SECONDS)) is not None and message.error() is not None:
                assert message.error().code() == KafkaError.UNKNOWN_TOPIC_OR_PART
            assert message.value() == label.encode()
            admin.delete_topics(["moved"])["moved"].result(PATIENCE_SECONDS)
            consumer.seek(TopicPartition("moved", 0, OFFSET_BEGINNING))


def test_all_threads_end_with_their_clients(urls, topic):
    before = set(threading.enumerate())
    with Producer({"bootstrap.servers": urls}) as producer:
        everywhere(producer, topic, b"a")
        assert producer.flush(PATIENCE_SECONDS) == 0
        with Consumer({"bootstrap.servers": urls, "group.id": "g", "auto.offset.reset": "earliest"}) as consumer:
            consumer.subscribe([topic])
            for _ in range(PARTITIONS):
                assert consumer.poll(PATIENCE_SECONDS) is not None
    for thread in set(threading.enumerate()) - before:
        # A last look at the maintenance may end a moment later.
        thread.join(PATIENCE_SECONDS)
    assert set(threading.enumerate()) <= before


def test_a_record_for_a_known_part_in_another_database_is_refused_after_the_deadline(urls, transactional, topic):
    producer = transactional(transaction_timeout_ms=1_000)
    producer.begin_transaction()
    everywhere(producer, topic, b"in time")
    assert producer.flush(PATIENCE_SECONDS) == 0
    refused: list[KafkaError] = []
    deadline = time.monotonic() + PATIENCE_SECONDS

    def reported(error: KafkaError | None, _: object) -> None:
        if error is not None:
            refused.append(error)

    leaders, coordinator = leaders_of(urls, topic, "anna")
    elsewhere = [number for number, leader in enumerate(leaders) if leader != coordinator]
    while not refused and time.monotonic() < deadline:
        for number in elsewhere:
            with contextlib.suppress(KafkaException):
                producer.produce(topic, b"more", partition=number, on_delivery=reported)
        producer.flush(PATIENCE_SECONDS)
    assert "longer than its timeout of 1000 ms" in refused[0].str()
    producer.abort_transaction(PATIENCE_SECONDS)


def test_a_reader_ends_what_would_move_the_offset_of_a_group_that_lives_elsewhere(bench, monkeypatch):
    # After a second a consumer recovers all databases otherwise.
    monkeypatch.setattr(core, "HELP_AFTER_SECONDS", 3_600.0)
    urls = ", ".join(bench.site.urls)
    group_id, held = bench.name_at(2, "group"), bench.partition_at(3)
    number = bench.topic.partition_ids.index(held)
    with Producer({"bootstrap.servers": urls}) as producer:
        producer.produce(bench.topic.name, b"first", partition=number)
        assert producer.flush(PATIENCE_SECONDS) == 0
    abandoned = bench.producer_at(1)
    abandoned.start(1_000)
    abandoned.send_offsets(group_id, {held: 0})
    bench.clock.advance(1_001)
    settings = {"bootstrap.servers": urls, "group.id": group_id, "auto.offset.reset": "earliest"}
    with Consumer(settings | {"txnstore.clock": bench.clock, "enable.auto.commit": False}) as consumer:
        consumer.assign([TopicPartition(bench.topic.name, number)])
        found = consumer.consume(1, timeout=PATIENCE_SECONDS)
    assert [message.value() for message in found] == [b"first"]


@pytest.mark.slow
def test_in_commit_order_each_partition_has_whole_transactions_and_nothing_waits_for_an_open_one(make, topic):
    """The group is coordinated in one of three databases; what it commits is a position within a transaction."""
    slow, quick = (make(Producer, transactional_id=name) for name in ("slow", "quick"))
    for producer in (slow, quick):
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
    expected = {}
    for number in range(PARTITIONS):
        for producer, name in ((slow, b"slow"), (quick, b"quick"), (slow, b"slow"), (quick, b"quick")):
            producer.produce(topic, name, partition=number)
            producer.flush(PATIENCE_SECONDS)
        expected[number] = [b"quick"] * 2 + [b"slow"] * 2
    quick.commit_transaction(PATIENCE_SECONDS)
    partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    found: dict[int, list[bytes]] = {number: [] for number in range(PARTITIONS)}
    for count in (PARTITIONS, PARTITIONS, 2 * PARTITIONS):
        # Each goes on where the one before it was.
        consumer = make(Consumer, txnstore_delivery_order="commit")
        consumer.assign(partitions)
        messages = consumer.consume(count, PATIENCE_SECONDS)
        assert len(messages) == count
        for message in messages:
            found[message.partition()].append(message.value())
        consumer.commit(asynchronous=False)
        consumer.close()
        if sum(map(len, found.values())) == 2 * PARTITIONS:
            slow.commit_transaction(PATIENCE_SECONDS)
    assert found == expected

"""A database of several that is away delays only what lives there, and that is caught up when it is back."""

from __future__ import annotations

import itertools
import time

import pytest

from tests.cluster.conftest import down
from txnstore import (
    OFFSET_BEGINNING,
    OFFSET_INVALID,
    OFFSET_STORED,
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from txnstore.admin import AdminClient, NewTopic
from txnstore.clients.consumer.assigned_partition import AssignedPartition, FetchPosition
from txnstore.clients.consumer.opening import StoredOffset
from txnstore.clients.consumer.reader import PartitionMoved, PartitionReader, StartResolved
from txnstore.model import OffsetAndMetadata
from txnstore.testing.private_cluster import PrivateCluster

PATIENCE_SECONDS = 60.0
#: What is not held up comes within this time, on a busy machine too; what is held up would not come at all.
SOON_SECONDS = 30.0
TOPIC = "orders"
FIRST, SECOND = 0, 1


@pytest.fixture(scope="module")
def other_server():
    """A server of its own for the second database, which is killed and started again."""
    with PrivateCluster(fsync=False) as server:
        yield server


class Place:
    """Two databases, and a way to take the second one away."""

    def __init__(self, urls, take_away, bring_back):
        self.urls = ", ".join(urls)
        self.take_away = take_away
        self.bring_back = bring_back


@pytest.fixture(params=["killed server", "unreachable"])
def place(request, sqlite_site):
    """Once really: a PostgreSQL server that is killed; once in SQLite files, where every access of a client fails."""
    if request.param == "unreachable":
        # The clients of the test, as far as they are open.
        yield Place(sqlite_site.urls[:2], None, None)
        return
    server = request.getfixturevalue("txnstore_postgres_server")
    other = request.getfixturevalue("other_server")
    name = f"outage_{next(_numbers)}"
    other.create_database(name)
    server.create_database(name)
    yield Place([server.url(name), other.url(name)], other.kill, other.start)
    if not other.pid:
        other.start()
    server.drop_database(name)


_numbers = itertools.count(1)


def connection_of(client):
    return client._core.connection if isinstance(client, Consumer) else client._connection


class Outage:
    """Takes the second database away from the clients that are given."""

    def __init__(self, place, *clients):
        self._place = place
        self._downs = [
            down(connection_of(client).cluster(), connection_of(client).cluster().own(2)) for client in clients
        ]

    def __enter__(self):
        if self._place.take_away is not None:
            self._place.take_away()
            return
        for each in self._downs:
            each.__enter__()

    def __exit__(self, *_):
        if self._place.bring_back is not None:
            self._place.bring_back()
            return
        for each in self._downs:
            each.__exit__(None, None, None)


@pytest.fixture
def topic(place):
    """A topic with a partition in each database: 0 in the first, 1 in the second."""
    with AdminClient({"bootstrap.servers": place.urls}) as admin:
        new = NewTopic(TOPIC, 2, config={"txnstore.placement": "roundrobin"})
        admin.create_topics([new])[TOPIC].result(PATIENCE_SECONDS)
        leaders = admin.list_topics(TOPIC).topics[TOPIC].partitions
        assert [leaders[number].leader for number in (0, 1)] == [0, 1]
    return TOPIC


@pytest.fixture
def make(place, request):
    def make(kind, **settings):
        usual = {"bootstrap.servers": place.urls}
        if kind is Consumer:
            usual |= {
                "group.id": coordinator_name("group", 1),
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
            }
        named = {name if name.endswith("_cb") else name.replace("_", "."): value for name, value in settings.items()}
        client = kind(usual | named)
        request.addfinalizer(client.close)
        return client

    return make


def coordinator_name(prefix, coordinator_id):
    """Return a name that lives in the database of this number, of two."""
    from txnstore.db.cluster.membership import Database, coordinator_of_name

    members = [Database(number, str(number), str(number), coordinates=True) for number in (1, 2)]
    return next(
        name
        for name in (f"{prefix}-{number}" for number in itertools.count())
        if coordinator_of_name(name, members) == coordinator_id
    )


class Reports:
    def __init__(self):
        self.delivered: dict[int, list[bytes]] = {FIRST: [], SECOND: []}
        self.failed = []

    def __call__(self, error, message):
        if error is None:
            self.delivered[message.partition()].append(message.value())
        else:
            self.failed.append((message.partition(), error.code()))


def until(client, found, seconds=PATIENCE_SECONDS):
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline, "it did not happen in time"
        client.poll(0.01)


def produced_to_both(make, topic, **settings):
    producer, reports = make(Producer, linger_ms=0, **settings), Reports()
    for number in (FIRST, SECOND):
        producer.produce(topic, b"before", partition=number, on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0
    return producer, reports


@pytest.mark.slow
def test_a_producer_goes_on_to_the_others_and_catches_up(make, topic, place):
    told: list[KafkaError] = []
    producer, reports = produced_to_both(make, topic, error_cb=told.append)
    with Outage(place, producer):
        for number in range(20):
            producer.produce(topic, b"%d" % number, partition=SECOND, on_delivery=reports)
            producer.produce(topic, b"%d" % number, partition=FIRST, on_delivery=reports)
            until(producer, lambda number=number: len(reports.delivered[FIRST]) == number + 2, SOON_SECONDS)
        assert reports.delivered[SECOND] == [b"before"]
        until(producer, lambda: told)
        assert {error.code() for error in told} <= {KafkaError._TRANSPORT}
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert reports.failed == []
    expected = [b"before", *(b"%d" % number for number in range(20))]
    assert reports.delivered == {FIRST: expected, SECOND: expected}
    consumer = make(Consumer)
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in (FIRST, SECOND)])
    assert read(consumer, 42) == {FIRST: expected, SECOND: expected}


def read(consumer, count, seconds=PATIENCE_SECONDS):
    found: dict[int, list[bytes]] = {FIRST: [], SECOND: []}
    deadline = time.monotonic() + seconds
    while sum(map(len, found.values())) < count:
        message = consumer.poll(max(0, deadline - time.monotonic()))
        assert message is not None, found
        if message.error() is None:
            found[message.partition()].append(message.value())
    return found


@pytest.mark.slow
def test_records_for_a_database_that_stays_away_expire_and_their_producer_goes_on(make, topic, place):
    producer, reports = produced_to_both(make, topic, message_timeout_ms=5_000)
    with Outage(place, producer):
        producer.produce(topic, b"in flight", partition=SECOND, on_delivery=reports)
        time.sleep(0.1)
        producer.produce(topic, b"queued", partition=SECOND, on_delivery=reports)
        until(producer, lambda: len(reports.failed) == 2)
        assert reports.failed == [(SECOND, KafkaError._MSG_TIMED_OUT)] * 2
        producer.produce(topic, b"fine", partition=FIRST, on_delivery=reports)
        until(producer, lambda: reports.delivered[FIRST][-1] == b"fine", SOON_SECONDS)
    # On a busy machine its time may be over before the server is found to be back: whoever is told so tries again.
    deadline = time.monotonic() + PATIENCE_SECONDS
    while b"back" not in reports.delivered[SECOND]:
        assert time.monotonic() < deadline
        known = len(reports.failed)
        producer.produce(topic, b"back", partition=SECOND, on_delivery=reports)
        until(producer, lambda known=known: b"back" in reports.delivered[SECOND] or len(reports.failed) > known)
    assert reports.delivered[SECOND][-1] == b"back"


@pytest.mark.slow
def test_a_purge_and_the_end_of_a_producer_wait_for_no_database_that_is_away(make, topic, place):
    producer, reports = produced_to_both(make, topic)
    with Outage(place, producer):
        for value in (b"a", b"b"):
            producer.produce(topic, value, partition=SECOND, on_delivery=reports)
            time.sleep(0.1)
        assert producer.flush(0.2) == 2
        producer.purge()
        until(producer, lambda: len(reports.failed) == 2, SOON_SECONDS)
        assert {code for _, code in reports.failed} <= {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}


@pytest.mark.slow
def test_transactions_elsewhere_go_on_and_one_that_wrote_there_can_be_aborted(make, topic, place):
    producer = make(Producer, transactional_id=coordinator_name("id", 1))
    producer.init_transactions(PATIENCE_SECONDS)
    both = make(Producer, transactional_id=coordinator_name("other", 1))
    both.init_transactions(PATIENCE_SECONDS)
    for each in (producer, both):
        each.begin_transaction()
        for number in (FIRST, SECOND):
            each.produce(topic, b"before", partition=number)
        each.commit_transaction(PATIENCE_SECONDS)
    with Outage(place, producer, both):
        producer.begin_transaction()
        producer.produce(topic, b"fine", partition=FIRST)
        producer.commit_transaction(SOON_SECONDS)
        both.begin_transaction()
        both.produce(topic, b"never", partition=FIRST)
        both.produce(topic, b"never", partition=SECOND)
        time.sleep(0.2)
        began = time.monotonic()
        # Its time is up, or the records cannot be sent.
        with pytest.raises(KafkaException):
            both.commit_transaction(1.0)
        assert time.monotonic() - began < SOON_SECONDS
    # It is resumed, whichever way it went.
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            both.commit_transaction(PATIENCE_SECONDS)
        except KafkaException as error:
            if time.monotonic() > deadline:
                raise
            if error.args[0].txn_requires_abort():
                both.abort_transaction(PATIENCE_SECONDS)
                both.begin_transaction()
                for number in (FIRST, SECOND):
                    both.produce(topic, b"never", partition=number)
        else:
            break
    consumer = make(Consumer)
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in (FIRST, SECOND)])
    assert read(consumer, 7) == {
        FIRST: [b"before", b"before", b"fine", b"never"],
        SECOND: [b"before", b"before", b"never"],
    }


@pytest.mark.slow
def test_a_consumer_reads_on_from_the_others_and_catches_up(make, topic, place):
    producer, _ = produced_to_both(make, topic)
    told: list[KafkaError] = []
    consumer = make(Consumer, error_cb=told.append)
    consumer.subscribe([topic])
    assert read(consumer, 2) == {FIRST: [b"before"], SECOND: [b"before"]}
    with Outage(place, producer, consumer):
        for number in range(20):
            producer.produce(topic, b"%d" % number, partition=SECOND)
            producer.produce(topic, b"%d" % number, partition=FIRST)
            assert read(consumer, 1, SOON_SECONDS) == {FIRST: [b"%d" % number], SECOND: []}
        until(consumer, lambda: told)
        consumer.commit(asynchronous=False)
    assert read(consumer, 20) == {FIRST: [], SECOND: [b"%d" % number for number in range(20)]}
    consumer.commit(asynchronous=False)
    partitions = [TopicPartition(topic, number) for number in (FIRST, SECOND)]
    assert [each.offset for each in consumer.committed(partitions, PATIENCE_SECONDS)] == [21, 21]


@pytest.mark.slow
def test_a_partition_that_waits_for_its_committed_offset_holds_up_no_other(make, topic, place):
    """Both are in the first database, and the group is in the second one."""
    other = request_topic(place)
    producer, reports = produced_to_both(make, topic)
    producer.produce(other, b"other", partition=FIRST, on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0
    told: list[KafkaError] = []
    consumer = make(Consumer, group_id=coordinator_name("group", 2), error_cb=told.append)
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in (FIRST, SECOND)])
    assert read(consumer, 2) == {FIRST: [b"before"], SECOND: [b"before"]}
    with Outage(place, producer, consumer):
        known = [TopicPartition(topic, number, 1) for number in (FIRST, SECOND)]
        consumer.assign([*known, TopicPartition(other, FIRST)])
        until(consumer, lambda: told)
        for number in range(5):
            producer.produce(topic, b"%d" % number, partition=FIRST)
            assert read(consumer, 1, SOON_SECONDS) == {FIRST: [b"%d" % number], SECOND: []}
    assert read(consumer, 1) == {FIRST: [b"other"], SECOND: []}
    position = consumer.position([TopicPartition(other, FIRST)])[0]
    assert position.offset == 1


@pytest.mark.slow_but_first
def test_what_was_committed_for_a_topic_is_no_beginning_in_one_that_has_replaced_it(make, topic, place):
    """The group's database has answered about the one before; the partition is looked up anew."""
    del place
    core = make(Consumer, group_id=coordinator_name("group", 2))._core
    known = core.directory.find([topic])[topic].partition_ids[FIRST]
    partition = AssignedPartition(topic, FIRST, OFFSET_INVALID)
    partition.leader = 1
    reader = PartitionReader(core.connection, core.directory, core.options, 1)
    for partition_id, expected in ((known, StartResolved), (known + 1_000, PartitionMoved)):
        answer = StoredOffset(partition_id, OffsetAndMetadata(0))
        (outcome,) = reader.resolve([FetchPosition(partition, partition.version, OFFSET_STORED, answer)])
        assert isinstance(outcome, expected)


@pytest.mark.slow
def test_clients_that_start_while_a_database_is_away_work_with_the_others(make, topic, place, request):
    if place.take_away is None:
        pytest.skip("a client that is not there yet cannot be kept from its files")
    producer, reports = produced_to_both(make, topic)
    with Outage(place, producer):
        late = make(Producer, linger_ms=0)
        late.produce(topic, b"late", partition=SECOND, on_delivery=reports)
        late.produce(topic, b"late", partition=FIRST, on_delivery=reports)
        until(late, lambda: reports.delivered[FIRST][-1] == b"late", SOON_SECONDS)
        consumer = make(Consumer)
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in (FIRST, SECOND)])
        assert read(consumer, 2, SOON_SECONDS) == {FIRST: [b"before", b"late"], SECOND: []}
        with AdminClient({"bootstrap.servers": place.urls}) as admin:
            admin.create_topics([NewTopic("meanwhile", 2, config={"txnstore.placement": "roundrobin"})])[
                "meanwhile"
            ].result(PATIENCE_SECONDS)
            assert set(admin.list_topics(timeout=PATIENCE_SECONDS).topics) == {topic, "meanwhile"}
    until(late, lambda: reports.delivered[SECOND] == [b"before", b"late"])
    assert read(consumer, 2) == {FIRST: [], SECOND: [b"before", b"late"]}
    for number in (FIRST, SECOND):
        late.produce("meanwhile", b"new", partition=number, on_delivery=reports)
    assert late.flush(PATIENCE_SECONDS) == 0
    assert reports.failed == []


@pytest.mark.slow
def test_the_controller_is_missed_only_by_what_asks_it(make, sqlite_site, place):
    """Clients that know their topics go on with the other database while the first one is away."""
    del sqlite_site
    topic = request_topic(place)
    producer, reports = produced_to_both(make, topic, topic_metadata_refresh_interval_ms=50)
    consumer = make(Consumer, group_id=coordinator_name("group", 2), topic_metadata_refresh_interval_ms=50)
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in (FIRST, SECOND)])
    read(consumer, 2)
    with (
        down(connection_of(producer).cluster(), connection_of(producer).cluster().own(1)),
        down(connection_of(consumer).cluster(), connection_of(consumer).cluster().own(1)),
    ):
        for number in range(5):
            time.sleep(0.06)
            producer.produce(topic, b"%d" % number, partition=FIRST, on_delivery=reports)
            producer.produce(topic, b"%d" % number, partition=SECOND, on_delivery=reports)
            until(producer, lambda number=number: len(reports.delivered[SECOND]) == number + 2, SOON_SECONDS)
            assert read(consumer, 1, SOON_SECONDS) == {FIRST: [], SECOND: [b"%d" % number]}
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert read(consumer, 5) == {FIRST: [b"%d" % number for number in range(5)], SECOND: []}


def request_topic(place):
    with AdminClient({"bootstrap.servers": place.urls}) as admin:
        new = NewTopic("known", 2, config={"txnstore.placement": "roundrobin"})
        admin.create_topics([new])["known"].result(PATIENCE_SECONDS)
    return "known"


@pytest.mark.slow
def test_a_member_keeps_its_place_though_its_new_topics_cannot_be_looked_up(make, topic, place):
    """The controller is away, which knows the topics, and the group is in the second database."""
    other = request_topic(place)
    settings = {"session_timeout_ms": 9_000, "heartbeat_interval_ms": 200}
    consumer = make(Consumer, group_id=coordinator_name("group", 2), **settings)
    consumer.subscribe([topic])
    until(consumer, lambda: len(consumer.assignment()) == 2)
    member_id, requests = consumer.memberid(), consumer._core.group._requests
    renewed, renew = [], requests.renew

    def renew_and_note(membership):
        renewed.append(renew(membership))
        return renewed[-1]

    requests.renew = renew_and_note
    cluster = connection_of(consumer).cluster()
    with down(cluster, cluster.own(1)):
        consumer.subscribe([topic, other])
        renewed.clear()
        until(consumer, lambda: True in renewed)
    until(consumer, lambda: len(consumer.assignment()) == 4)
    assert consumer.memberid() == member_id


@pytest.mark.slow
def test_a_topic_that_cannot_be_looked_up_holds_up_nothing_that_is_read_elsewhere(make, topic, place):
    """The controller is away, which knows the topics; group and partitions are in the second database."""
    other = request_topic(place)
    told: list[KafkaError] = []
    consumer = make(Consumer, group_id=coordinator_name("group", 2), error_cb=told.append)
    producer = make(Producer, linger_ms=0)
    for name in (topic, other):
        producer.produce(name, b"before", partition=SECOND)
    assert producer.flush(PATIENCE_SECONDS) == 0
    consumer.assign([TopicPartition(topic, SECOND, 0)])
    assert consumer.poll(PATIENCE_SECONDS).value() == b"before"
    cluster = connection_of(consumer).cluster()
    with down(cluster, cluster.own(1)):
        consumer.incremental_assign([TopicPartition(other, SECOND, 0)])
        for _ in range(3):
            told.clear()
            until(consumer, lambda: told)
            assert told[0].code() == KafkaError._TRANSPORT
            producer.produce(topic, b"meanwhile", partition=SECOND)
            message = consumer.poll(SOON_SECONDS)
            assert message is not None
            assert message.value() == b"meanwhile"
    assert consumer.poll(PATIENCE_SECONDS).value() == b"before"

"""What a client knows of topics: what is remembered, what is asked again, what is created."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from txnstore.clients.brokers import broker_address
from txnstore.clients.configuration.configuration import admin_configuration
from txnstore.clients.connection import StoreConnection
from txnstore.clients.model.errors import KafkaError
from txnstore.clients.topic_directory import TopicDirectory
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.statements import HotStatement
from txnstore.db.url import parse_url
from txnstore.errors import InvalidRequest, InvalidTopic, StoreUnavailable, UnknownTopicOrPartition
from txnstore.log.topics import create_topic, delete_topic, grow_topic

pytestmark = pytest.mark.takes_a_coordinator


class Seconds:
    """A monotonic clock that is moved by hand."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def seconds():
    return Seconds()


@pytest.fixture
def connection(url):
    connection = StoreConnection(admin_configuration(({"bootstrap.servers": url},), {}))
    yield connection
    connection.close()


@pytest.fixture
def store(connection):
    return connection.store()


@pytest.fixture
def directory(connection, seconds):
    return TopicDirectory(connection, refresh_ms=60_000, allow_create=True, monotonic_seconds=seconds)


@pytest.fixture
def reading_directory(connection):
    """A directory that creates nothing."""
    return TopicDirectory(connection, refresh_ms=60_000, allow_create=False)


def create(store, name, partition_count=1):
    return store.write(lambda connection: create_topic(connection, name, partition_count=partition_count))


def count_reads(store, monkeypatch):
    reads = []
    real = store.read

    def read(*arguments, **keywords):
        reads.append(1)
        return real(*arguments, **keywords)

    monkeypatch.setattr(store, "read", read)
    return reads


def test_what_is_cached_is_doubted_if_it_lacks_a_partition_and_is_old(directory, store, seconds):
    topic = create(store, "a", 2)
    assert directory.ensure("a") == topic
    seconds.now += 59
    assert directory.cached("a", 2) == topic
    seconds.now += 1
    assert directory.cached("a", 2) is None
    assert directory.cached("a", 1) == topic
    assert directory.cached("a") == topic


def test_a_look_at_all_topics_renews_those_that_are_known(directory, store, seconds, monkeypatch):
    for name in ("grown", "deleted", "another"):
        create(store, name)
    directory.find(["grown", "deleted"])
    grown = store.write(lambda connection: grow_topic(connection, "grown", partition_count=3))
    store.write(lambda connection: delete_topic(connection, "deleted"))
    seconds.now += 60
    assert set(directory.cluster_metadata().topics) == {"grown", "another"}
    assert list(directory.entries) == ["grown"]
    reads = count_reads(store, monkeypatch)
    assert directory.find(["grown"]) == {"grown": grown}
    assert not reads


def test_what_was_found_is_cached_and_the_database_is_not_asked_again(directory, store, monkeypatch):
    topics = {name: create(store, name, 2) for name in ("a", "b")}
    reads = count_reads(store, monkeypatch)
    assert directory.cached("a") is None
    assert not reads
    assert directory.find(["a", "b", "a"]) == topics
    assert directory.find(iter(["b", "a"])) == topics
    assert directory.cached("a") == topics["a"]
    assert len(reads) == 1
    assert directory.find([]) == {}
    assert directory.refresh([]) == {}
    assert len(reads) == 1


def test_what_was_read_long_ago_is_read_again_and_what_nobody_knows_every_time(directory, store, seconds, monkeypatch):
    create(store, "a")
    directory.find(["a"])
    store.write(lambda connection: grow_topic(connection, "a", partition_count=3))
    reads = count_reads(store, monkeypatch)
    seconds.now += 59.9
    assert len(directory.find(["a"])["a"].partition_ids) == 1
    assert not reads
    seconds.now += 0.2
    assert len(directory.cached("a").partition_ids) == 1
    assert len(directory.find(["a"])["a"].partition_ids) == 3
    assert len(reads) == 1
    assert directory.find(["nobody"]) == directory.find(["nobody", "no body"]) == {}
    assert len(reads) == 3


def test_a_negative_interval_keeps_topics_for_ever(connection, store, seconds, monkeypatch):
    directory = TopicDirectory(connection, refresh_ms=-1, allow_create=False, monotonic_seconds=seconds)
    create(store, "a")
    directory.find(["a"])
    reads = count_reads(store, monkeypatch)
    seconds.now += 1e9
    assert directory.find(["a"])
    assert not reads


def test_what_the_controller_cannot_tell_is_named_and_it_is_asked_only_now_and_then(
    connection, directory, store, seconds, monkeypatch
):
    for name in ("known", "other"):
        create(store, name)
    assert directory.look_up({"known": 0})[0].keys() == {"known"}
    asked = []

    def be_away(*_, **__):
        asked.append(seconds.now)
        raise StoreUnavailable("the controller is away")

    monkeypatch.setattr(type(connection), "is_alone", False)
    monkeypatch.setattr(store, "read", be_away)
    seconds.now += 61
    found, away = directory.look_up({"known": 0, "other": 0})
    assert (found.keys(), asked) == ({"known"}, [1061.0])
    assert str(away["other"]) == "the controller is away"
    # Whether it has grown meanwhile nobody knows, either.
    assert directory.look_up({"known": 0}) == (found, {})
    assert directory.look_up({"known": 1}) == (found, {"known": away["other"]})
    assert asked == [1061.0]
    seconds.now += 6
    assert directory.look_up({"known": 0, "other": 0})[1].keys() == {"known", "other"}
    assert asked == [1061.0, 1067.0]
    monkeypatch.undo()
    seconds.now += 6
    assert directory.look_up({"known": 0, "other": 0})[0].keys() == {"known", "other"}
    assert directory.look_up({"known": 1, "nobody": 0}) == ({"known": found["known"]}, {})


def test_a_database_that_is_away_and_alone_is_an_error(directory, store, monkeypatch):
    def be_away(*_, **__):
        raise StoreUnavailable

    monkeypatch.setattr(store, "read", be_away)
    with pytest.raises(StoreUnavailable):
        directory.look_up({"a": 0})


def test_what_is_forgotten_or_refreshed_is_read_again(directory, store):
    create(store, "a")
    create(store, "b")
    directory.find(["a", "b"])
    for name in ("a", "b"):
        store.write(lambda connection, name=name: grow_topic(connection, name, partition_count=2))
    directory.forget("a")
    directory.forget("nobody")
    assert directory.cached("a") is None
    assert len(directory.find(["a"])["a"].partition_ids) == 2
    assert len(directory.refresh(["b"])["b"].partition_ids) == 2
    assert len(directory.cached("b").partition_ids) == 2


def test_a_deleted_topic_is_gone_after_a_refresh(directory, store):
    create(store, "a")
    directory.find(["a"])
    store.write(lambda connection: delete_topic(connection, "a"))
    assert directory.cached("a") is not None
    assert directory.refresh(["a"]) == {}
    assert directory.cached("a") is None


def test_ensure_creates_with_the_stores_number_of_partitions(directory, store):
    store.write(lambda connection: change_store_settings(connection, {"num.partitions": "3"}))
    topic = directory.ensure("new")
    assert len(topic.partition_ids) == 3
    assert directory.cached("new") == topic
    assert directory.ensure("new") == topic
    create(store, "old", 2)
    assert len(directory.ensure("old").partition_ids) == 2


def test_ensure_creates_nothing_where_client_or_store_forbid_it(directory, reading_directory, store):
    with pytest.raises(UnknownTopicOrPartition, match="there is no topic 'a'"):
        reading_directory.ensure("a")
    store.write(lambda connection: change_store_settings(connection, {"auto.create.topics.enable": "false"}))
    with pytest.raises(UnknownTopicOrPartition, match="there is no topic 'a'"):
        directory.ensure("a")
    assert directory.find(["a"]) == {}
    store.write(lambda connection: create_topic(connection, "a"))
    assert directory.ensure("a") == reading_directory.ensure("a")


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "name", ["", ".", "..", "a b", "a/b", "x" * 250, "a\0b", "\ud800", "ä", "'; DROP TABLE x --", 5]
)
def test_ensure_refuses_what_is_no_name(directory, reading_directory, name):
    for either in (directory, reading_directory):
        with pytest.raises(InvalidTopic):
            either.ensure(name)
    assert directory.find([name]) == {}


def test_many_threads_that_ensure_a_topic_get_the_same(connection):
    directories = [TopicDirectory(connection, refresh_ms=1000, allow_create=True) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        topics = list(threads.map(lambda directory: directory.ensure("a"), directories))
    assert len({topic.topic_id for topic in topics}) == 1


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("^a", ["a-1", "a-2", "ab"]),
        ("^a-[0-9]$", ["a-1", "a-2"]),
        (".*", ["a-1", "a-2", "ab", "b"]),
        ("^B$", []),
        ("b", ["ab", "b"]),
        ("^(a-1|b)$", ["a-1", "b"]),
    ],
)
def test_a_pattern_finds_names(directory, store, pattern, names):
    for name in ("b", "a-2", "ab", "a-1"):
        create(store, name)
    assert directory.match(pattern) == names


def test_what_is_no_pattern_is_refused(directory):
    with pytest.raises(InvalidRequest, match="is not a regular expression"):
        directory.match("^[a")


def test_the_clusters_metadata_shows_all_topics_and_one_broker(directory, reading_directory, store, url):
    create(store, "a", 2)
    create(store, "b")
    for either in (directory, reading_directory):
        metadata = either.cluster_metadata()
        assert metadata.cluster_id == store.store_uuid
        assert metadata.controller_id == metadata.orig_broker_id == 0
        (broker,) = metadata.brokers.values()
        assert (broker.id, broker.host, broker.port) == (0, *broker_address(parse_url(url)))
        assert metadata.orig_broker_name == f"{broker.host}:{broker.port}/0"
        assert sorted(metadata.topics) == ["a", "b"]
        topic = metadata.topics["a"]
        assert (topic.topic, topic.error, sorted(topic.partitions)) == ("a", None, [0, 1])
        partition = topic.partitions[1]
        assert (partition.id, partition.leader, partition.replicas, partition.isrs) == (1, 0, [0], [0])
        assert partition.error is None


def test_the_metadata_of_one_topic_is_always_new(directory, store):
    create(store, "a")
    create(store, "b")
    assert list(directory.cluster_metadata("a").topics) == ["a"]
    store.write(lambda connection: grow_topic(connection, "a", partition_count=4))
    assert len(directory.cluster_metadata("a").topics["a"].partitions) == 4
    assert len(directory.cached("a").partition_ids) == 4


def test_the_metadata_of_an_unknown_topic_is_an_error_or_creates_it(directory, reading_directory):
    topic = reading_directory.cluster_metadata("new").topics["new"]
    assert (topic.topic, topic.partitions) == ("new", {})
    assert topic.error == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert directory.cluster_metadata().topics == {}
    assert len(directory.cluster_metadata("new").topics["new"].partitions) == 1
    assert reading_directory.cluster_metadata("new").topics["new"].error is None


@pytest.mark.parametrize("name", ["", "a b", "x" * 250])
def test_the_metadata_of_what_is_no_name_is_an_error(directory, name):
    topic = directory.cluster_metadata(name).topics[name]
    assert topic.error == KafkaError.TOPIC_EXCEPTION
    assert topic.partitions == {}


@pytest.mark.slow
@pytest.mark.slow_on_postgresql
def test_thousands_of_topics_are_listed(directory, store):
    names = [f"t{number}" for number in range(2100)]
    # Not all in one database transaction: a busy machine would take longer than it may.
    for first in range(0, len(names), 100):
        some = names[first : first + 100]
        store.write(lambda connection, some=some: [create_topic(connection, name) for name in some])
    assert directory.cluster_metadata().topics.keys() == set(names)
    assert directory.find(names).keys() == set(names)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("sqlite:///some/file.db", ("localhost", 0)),
        ("sqlite://", ("localhost", 0)),
        ("postgresql://user:secret@db.example/log", ("db.example", 5432)),
        ("postgresql://user:secret@db.example:6432/log", ("db.example", 6432)),
        ("postgresql://user:secret@[::1]:6432/log", ("::1", 6432)),
        ("postgresql://user:secret@/log?host=/var/run/postgresql", ("localhost", 5432)),
        ("postgresql://user:secret@/log?host=/var/run/postgresql&port=6432", ("localhost", 6432)),
        ("postgresql:///log", ("localhost", 5432)),
        ("postgresql:///log?host=one:1&host=two:2", ("one", 1)),
        ("postgresql:///log?host=one,two&port=1,2", ("one", 1)),
    ],
)  # fmt: skip
def test_the_brokers_address_is_the_databases_and_no_more_of_its_url(url, address):
    assert broker_address(parse_url(url)) == address


def test_a_look_asks_in_the_same_statement_whether_it_is_still_the_same_store(directory, store, monkeypatch):
    create(store, "a")
    asked = []
    rows = HotStatement.rows

    def noting(statement, *arguments):
        asked.append(str(statement.statement))
        return rows(statement, *arguments)

    monkeypatch.setattr(HotStatement, "rows", noting)
    for names, count in ((["a", "nobody"], 3), (["nobody"], 1)):
        assert list(directory.refresh(names)) == names[: count // 3]
        assert len(asked) == count
        assert "store_uuid" in asked[0]
        asked.clear()

"""Topics of a relay to Kafka in which something is wrong, beside others; a store is in Kafka's place."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
from sqlalchemy import insert

import txnstore
from tests.relay.running import beside, wait_until
from tests.relay.store_side import make_topic, numbered, put, ship
from txnstore.db.schema import topic_configs
from txnstore.log.topics import delete_topic, get_topic
from txnstore.relay.errors import KafkaUnavailable, RelayFailed
from txnstore.relay.kafka_cluster import KafkaCluster
from txnstore.relay.options import RelayOptions
from txnstore.relay.to_kafka import ToKafka

_REFUSED = txnstore.KafkaError.TOPIC_AUTHORIZATION_FAILED
_AWAY = txnstore.KafkaError._TIMED_OUT


class _SickTopics:
    """Topics that Kafka does not create, or of which it tells only that something is wrong, as librdkafka says so."""

    def __init__(self, stand_in, monkeypatch) -> None:
        """Let all be well."""
        self.not_created: dict[str, int] = {}
        #: Which Kafka never answers.
        self.unanswered: set[str] = set()
        self.not_listed: dict[str, int] = {}
        admin = stand_in.side.library.admin.AdminClient
        create_topics, list_topics = admin.create_topics, admin.list_topics

        def create(client, new, **more):
            taken = [topic for topic in new if not self.is_refused(topic.topic)]
            futures = create_topics(client, taken, **more) if taken else {}
            return {topic.topic: futures.get(topic.topic) or self.future(topic.topic) for topic in new}

        def listed(*given, **more):
            metadata = list_topics(*given, **more)
            for name, code in self.not_listed.items():
                metadata.topics[name].error = txnstore.KafkaError(code)
                metadata.topics[name].partitions.clear()
            return metadata

        monkeypatch.setattr(admin, "create_topics", create)
        monkeypatch.setattr(admin, "list_topics", listed)
        monkeypatch.setattr("txnstore.relay.to_kafka.LOOK_AGAIN_SECONDS", 0)
        monkeypatch.setattr("txnstore.relay.to_kafka._CREATION_SECONDS", 0.05)

    def is_refused(self, name: str) -> bool:
        return name in self.not_created or name in self.unanswered

    def future(self, name: str) -> Future[None]:
        future: Future[None] = Future()
        if name in self.not_created:
            future.set_exception(txnstore.KafkaException(txnstore.KafkaError(self.not_created[name])))
        return future


@pytest.fixture
def sick(stand_in, monkeypatch):
    return _SickTopics(stand_in, monkeypatch)


def _not_created(sick, stand_in):
    sick.not_created["bad"] = _REFUSED


def _unanswered(sick, stand_in):
    sick.unanswered.add("bad")


def _not_listed(sick, stand_in):
    stand_in.side.create("bad", 1)
    sick.not_listed["bad"] = _REFUSED


def _without_leader(sick, stand_in):
    stand_in.side.create("bad", 1)
    sick.not_listed["bad"] = txnstore.KafkaError.LEADER_NOT_AVAILABLE


@pytest.mark.slow_but_first
@pytest.mark.parametrize("make_sick", [_not_created, _unanswered, _not_listed, _without_leader])
@pytest.mark.parametrize("is_there_first", [True, False])
def test_a_topic_that_kafka_does_not_take_is_in_the_way_of_no_other_and_shipped_once_it_does(
    store, stand_in, sick, caplog, monkeypatch, make_sick, is_there_first
):
    caplog.set_level("INFO")
    # Where it is there from the start, Kafka is waited for a little longer.
    monkeypatch.setattr("txnstore.relay.to_kafka.ANSWER_SECONDS", 0.05)
    make_topic(store, "shop")
    put(store, "shop", numbered(2))
    make_sick(sick, stand_in)
    relay = ToKafka(store, stand_in.cluster(), RelayOptions())

    def make_bad():
        make_topic(store, "bad")
        put(store, "bad", numbered(3))

    if is_there_first:
        make_bad()
    with beside(relay.run):
        wait_until(lambda: relay.shipped_count == 2)
        if not is_there_first:
            make_bad()
        wait_until(lambda: "topic bad: " in caplog.text)
        put(store, "shop", numbered(2, 2))
        wait_until(lambda: relay.shipped_count == 4)
        looked_at = relay._looked_at
        wait_until(lambda: relay._looked_at != looked_at)
        for wrong in (sick.not_created, sick.unanswered, sick.not_listed):
            wrong.clear()
        wait_until(lambda: relay.shipped_count == 7)
    assert stand_in.side.read("bad") == {0: numbered(3)}
    told = [record.getMessage() for record in caplog.records if "topic bad: " in record.getMessage()]
    assert [message.rpartition("; ")[2] for message in told] == ["trying again", "topic bad: going on"]


def test_of_a_topic_that_is_deleted_while_it_is_left_out_nobody_is_told_that_it_goes_on(
    store, stand_in, sick, caplog, monkeypatch
):
    caplog.set_level("INFO")
    monkeypatch.setattr("txnstore.relay.to_kafka.ANSWER_SECONDS", 0.05)
    for name in ("shop", "bad"):
        make_topic(store, name)
        put(store, name, numbered(2))
    _not_created(sick, stand_in)
    relay = ToKafka(store, stand_in.cluster(), RelayOptions())
    with beside(relay.run):
        wait_until(lambda: "bad" in relay._left_out)
        store.write(lambda connection: delete_topic(connection, "bad"))
        wait_until(lambda: not relay._left_out)
        put(store, "shop", numbered(2, 2))
        wait_until(lambda: relay.shipped_count == 4)
    assert "topic bad: going on" not in caplog.text


def test_a_kafka_that_does_not_tell_its_topics_is_in_the_way_of_no_partition(store, stand_in, sick, monkeypatch):
    asked = []

    def be_silent(_, names):
        asked.append(names)
        raise KafkaUnavailable("no answer in time")

    make_topic(store, "shop")
    relay = ToKafka(store, stand_in.cluster(), RelayOptions())
    with beside(relay.run):
        wait_until(lambda: relay._looked_at)
        with monkeypatch.context() as patched:
            patched.setattr(KafkaCluster, "partition_counts", be_silent)
            make_topic(store, "later")
            put(store, "later", numbered(3))
            wait_until(lambda: len(asked) > 1)
            put(store, "shop", numbered(2))
            wait_until(lambda: relay.shipped_count == 2)
        wait_until(lambda: relay.shipped_count == 5)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("code", "stays"), [(_REFUSED, True), (_AWAY, False)])
def test_a_single_run_ships_the_others_before_it_fails(store, stand_in, sick, code, stays):
    for topic in ("bad", "shop", "worse"):
        make_topic(store, topic)
        put(store, topic, numbered(2))
    sick.not_created |= {"bad": _AWAY, "worse": code}
    name = "worse" if stays else "bad"
    with pytest.raises(RelayFailed, match=f"^topic {name}: creating topic {name} in Kafka: ") as raised:
        ship(store, stand_in.cluster())
    assert raised.value.may_pass is not stays
    assert ("txnstore relay --forget to/" in str(raised.value)) is stays
    assert stand_in.side.read("shop") == {0: numbered(2)}


def test_a_topic_that_is_asked_for_ends_a_relay_at_its_start_if_kafka_does_not_take_it(store, stand_in, sick):
    make_topic(store, "bad")
    sick.not_created["bad"] = _REFUSED
    with pytest.raises(RelayFailed, match=r"^topic bad: creating topic bad in Kafka: "):
        ToKafka(store, stand_in.cluster(), RelayOptions(topics=["bad"])).run(threading.Event())


def test_a_topic_that_somebody_else_creates_meanwhile_is_there(store, stand_in, monkeypatch):
    make_topic(store, "shop")
    put(store, "shop", numbered(2))
    counts_of = KafkaCluster.partition_counts

    def create_after(*given):
        counts = counts_of(*given)
        stand_in.side.create("shop", 1)
        return counts

    monkeypatch.setattr(KafkaCluster, "partition_counts", create_after)
    assert ship(store, stand_in.cluster()) == 2


@pytest.mark.slow_but_first
@pytest.mark.parametrize("topics", [[], ["bad", "shop"]])
def test_a_topic_whose_settings_in_the_store_cannot_be_read_is_in_the_way_of_no_other(store, stand_in, topics):
    for topic in ("bad", "shop"):
        make_topic(store, topic)
        put(store, topic, numbered(2))
    topic_id = store.read(lambda connection: get_topic(connection, "bad")).topic_id
    unreadable = insert(topic_configs).values(topic_id=topic_id, name="retention.ms", value="a week")
    store.write(lambda connection: connection.execute(unreadable))
    with pytest.raises(RelayFailed, match=r"^topic bad: its settings in the store cannot be read: .*retention\.ms"):
        ship(store, stand_in.cluster(), topics=topics)
    # Who asked for it gets nothing of the others before it is well.
    assert stand_in.side.read("shop") == {0: [] if topics else numbered(2)}

"""Small ways of the real clients, each observed of confluent-kafka 2.16.1, that programs and their tests rely on."""

from __future__ import annotations

import json
import pickle
import time
from typing import Any

import pytest

from tests.clients.consumer.log_writer import polled_until
from tests.clients.steps import PATIENCE_SECONDS, create_topic, error_of, read_to_end
from txnstore import Consumer, KafkaError, Message, Producer, TopicPartition
from txnstore.admin import AdminClient, ConfigResource, NewTopic


class Named:
    def __str__(self):
        return "named-ü"


class Nameless:
    def __str__(self):
        raise ValueError("no")


def test_the_name_of_a_header_is_its_text(make_producer, url):
    create_topic(url, "t")
    producer = make_producer()
    producer.produce("t", b"v", headers=[(None, b"a"), (5, b"b"), (1.5, None), (Named(), "c"), ("d", b"d")])
    producer.produce("t", b"v", headers={5: b"a", None: "b"})
    with pytest.raises(TypeError, match="expected header key to be unicode string"):
        producer.produce("t", b"v", headers=[(Nameless(), b"")])
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert [message.headers() for message in read_to_end(url, "t")] == [
        [("None", b"a"), ("5", b"b"), ("1.5", None), ("named-ü", b"c"), ("d", b"d")],
        [("5", b"a"), ("None", b"b")],
    ]


def test_a_seek_in_a_topic_that_the_consumer_has_never_heard_of_names_it(make_consumer, url):
    create_topic(url, "t")
    consumer = make_consumer()
    error = error_of(consumer.seek, TopicPartition("t", 0, 3))
    assert (error.code(), error.str()) == (
        KafkaError._UNKNOWN_PARTITION,
        "Failed to seek to offset 3: Local: Unknown partition",
    )
    consumer.assign([TopicPartition("t", 0, 0)])
    consumer.seek(TopicPartition("t", 0, 0))
    assert error_of(consumer.seek, TopicPartition("t", 7, 3)).code() == KafkaError._STATE
    assert consumer.get_watermark_offsets(TopicPartition("t", 0), PATIENCE_SECONDS) == (0, 0)
    consumer.unassign()
    assert error_of(consumer.seek, TopicPartition("t", 0, 3)).code() == KafkaError._STATE
    assert error_of(consumer.seek, TopicPartition("u", 0, 3)).code() == KafkaError._UNKNOWN_PARTITION


@pytest.mark.slow_but_first
@pytest.mark.parametrize("way", ["seek", "store_offsets"])
def test_a_partition_of_a_topic_that_was_never_assigned_is_unknown_and_any_other_is_in_the_wrong_state(
    make_consumer, url, way
):
    create_topic(url, "t")
    create_topic(url, "u")
    consumer = make_consumer({"enable.auto.offset.store": False, "enable.auto.commit": False})
    place, codes = TopicPartition("t", 0, 3), []

    def code_of(*places):
        if way == "seek":
            return error_of(consumer.seek, places[-1]).code()
        return error_of(consumer.store_offsets, offsets=list(places)).code()

    def told(consumer, partitions):
        codes.append(code_of(place))
        consumer.assign(partitions)

    # That others have heard of it does not count.
    assert consumer.get_watermark_offsets(place, PATIENCE_SECONDS) == (0, 0)
    assert code_of(place) == KafkaError._UNKNOWN_PARTITION
    consumer.subscribe(["t"], on_assign=told)
    assert code_of(place) == KafkaError._UNKNOWN_PARTITION
    polled_until(consumer, consumer.assignment)
    assert codes == [KafkaError._UNKNOWN_PARTITION]
    unassigned, elsewhere = TopicPartition("t", 7, 3), TopicPartition("u", 0, 3)
    assert code_of(unassigned) == code_of(elsewhere, unassigned) == KafkaError._STATE
    # Of several, the last one tells.
    assert code_of(unassigned, elsewhere) == KafkaError._UNKNOWN_PARTITION
    consumer.unassign()
    assert code_of(place) == KafkaError._STATE
    consumer.unsubscribe()
    assert code_of(place) == KafkaError._STATE


def test_a_message_of_a_negative_partition_has_none():
    message = Message(topic="t", partition=-2)
    assert message.partition() is None
    assert message == Message(topic="t") == pickle.loads(pickle.dumps(message))
    assert pickle.dumps(message) == pickle.dumps(Message(topic="t"))
    for number in (2**31, 2**40):
        with pytest.raises(OverflowError, match="signed integer is greater than maximum"):
            Message(topic="t", partition=number)
    assert Message(partition=2**31 - 1).partition() == 2**31 - 1


def test_a_closed_client_can_be_entered(url):
    with Producer({"bootstrap.servers": url}) as producer:
        pass
    with producer as again:
        assert again is producer
    with Consumer({"bootstrap.servers": url, "group.id": "g"}) as consumer:
        pass
    with consumer as same:
        assert same is consumer


def test_calls_of_a_closed_client_say_what_is_closed(url):
    conf = {"bootstrap.servers": url}
    producer, consumer, admin = Producer(conf), Consumer({**conf, "group.id": "g"}), AdminClient(conf)
    producer.close()
    consumer.close()
    with admin:
        pass
    of_all: list[tuple[Any, Any]] = [
        call
        for client in (producer, consumer, admin)
        for call in ((client.list_topics, ()), (client.cluster_id, ()), (client.set_sasl_credentials, ("u", "p")))
    ]
    for call, arguments in of_all:
        with pytest.raises(RuntimeError, match=r"^Handle has been closed$"):
            call(*arguments)
    with (
        pytest.warns(DeprecationWarning, match="list_groups"),
        pytest.raises(RuntimeError, match=r"^Handle has been closed$"),
    ):
        admin.list_groups()
    for call in (producer.poll, producer.flush, producer.begin_transaction, lambda: producer.produce("t")):
        with pytest.raises(RuntimeError, match=r"^Producer has been closed$"):
            call()
    for call in (consumer.poll, consumer.memberid, consumer.assignment):
        with pytest.raises(RuntimeError, match=r"^Consumer closed$"):
            call()
    for call in (
        lambda: admin.poll(0),
        lambda: admin.create_topics([NewTopic("t")]),
        lambda: admin.describe_configs([ConfigResource("topic", "t")]),
    ):
        with pytest.raises(RuntimeError, match=r"^AdminClient has been closed$"):
            call()


@pytest.mark.parametrize("kind", ["producer", "consumer"])
def test_statistics_have_the_brokers(make_producer, make_consumer, kind):
    told: list[str] = []
    make = make_producer if kind == "producer" else make_consumer
    client = make({"stats_cb": told.append, "statistics.interval.ms": 20})
    if kind == "consumer":
        client.assign([])
    metadata = client.list_topics(timeout=PATIENCE_SECONDS)
    (broker,) = metadata.brokers.values()
    name = f"{broker.host}:{broker.port}/{broker.id}"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (told and name in json.loads(told[-1])["brokers"]):
        assert time.monotonic() < deadline
        client.poll(0.05)
    (facts,) = json.loads(told[-1])["brokers"].values()
    assert (facts["name"], facts["nodeid"], facts["source"], facts["state"]) == (name, broker.id, "learned", "UP")
    assert facts["rtt"]["avg"] == facts["tx"] == 0

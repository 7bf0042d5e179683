"""A producer and what is around it: its end, threads, topics that are not there, other processes."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
import time
from collections import Counter

import pytest

from tests.clients.producer.reporting import *  # noqa: F403 - the fixtures
from tests.clients.producer.reporting import NEVER_MS, Reports
from tests.clients.steps import PATIENCE_SECONDS, create_topic, error_of, read_to_end, values
from txnstore import KafkaError, KafkaException, Producer


def test_closing_delivers_and_reports_what_is_left(make_producer, topic, url):
    producer = make_producer({"linger.ms": NEVER_MS})
    reports = Reports()
    producer.produce(topic, b"v", on_delivery=reports)

    assert producer.close() is True
    assert (reports.errors, len(producer)) == ([None], 0)
    assert producer.close() is True
    assert values(read_to_end(url, topic)) == [b"v"]


def test_closing_aborts_an_open_transaction(make_producer, topic, url):
    producer = make_producer({"transactional.id": "anna"})
    producer.init_transactions(PATIENCE_SECONDS)
    producer.begin_transaction()
    producer.produce(topic, b"aborted")
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert producer.close() is True

    other = make_producer()
    other.produce(topic, b"plain", partition=0)
    assert other.flush(PATIENCE_SECONDS) == 0
    assert values(read_to_end(url, topic)) == [b"plain"]


def test_a_with_block_closes_the_producer(url, topic):
    reports = Reports()
    with Producer({"bootstrap.servers": url}) as producer:
        producer.produce(topic, b"v", on_delivery=reports)

    assert reports.errors == [None]
    with pytest.raises(RuntimeError, match="Producer has been closed"):
        producer.poll(0)


def test_a_with_block_that_raises_aborts_its_transaction_and_lets_the_exception_out(url, topic):
    reports = Reports()

    def program():
        with Producer({"bootstrap.servers": url, "transactional.id": "anna", "linger.ms": NEVER_MS}) as producer:
            producer.init_transactions(PATIENCE_SECONDS)
            producer.begin_transaction()
            producer.produce(topic, b"aborted", on_delivery=reports)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program()
    assert reports.errors == [KafkaError._PURGE_QUEUE]
    assert values(read_to_end(url, topic)) == []


def test_several_threads_produce_and_one_polls(producer, topic, url):
    reports, served_by = Reports(), set()

    def report(error, message):
        served_by.add(threading.get_ident())
        reports(error, message)

    def produce(name):
        for number in range(100):
            producer.produce(topic, b"%d" % number, b"%d" % name, partition=0, on_delivery=report)

    threads = [threading.Thread(target=produce, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert served_by == {threading.get_ident()}
    assert len(reports) == 400
    messages = read_to_end(url, topic)
    for name in range(4):
        assert [message.value() for message in messages if message.key() == b"%d" % name] == [
            b"%d" % number for number in range(100)
        ]


def test_several_threads_flush_at_once(producer, topic):
    reports = Reports()
    for number in range(200):
        producer.produce(topic, b"%d" % number, partition=0, on_delivery=reports)
    left = []
    threads = [threading.Thread(target=lambda: left.append(producer.flush(PATIENCE_SECONDS))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)

    assert left == [0, 0, 0, 0]
    assert sorted(reports.values, key=int) == [b"%d" % number for number in range(200)]


def test_a_topic_that_is_not_there_is_made_by_the_first_record(make_producer, url):
    producer = make_producer()
    reports = Reports()
    producer.produce("made-on-the-way", b"v", on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert reports.errors == [None]
    assert "made-on-the-way" in producer.list_topics(timeout=PATIENCE_SECONDS).topics
    partition = reports[0][1].partition()
    assert values(read_to_end(url, "made-on-the-way", partitions=(partition,))) == [b"v"]


def test_a_topic_that_may_not_be_made_fails_the_delivery(make_producer):
    producer = make_producer({"allow.auto.create.topics": False, "message.timeout.ms": 3_000, "linger.ms": 0})
    reports = Reports()
    producer.produce("not-made", b"v", on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert [error.code() for error in reports.errors] in (
        [KafkaError.UNKNOWN_TOPIC_OR_PART],
        [KafkaError._UNKNOWN_TOPIC],
        [KafkaError._MSG_TIMED_OUT],
    )
    assert "not-made" not in producer.list_topics(timeout=PATIENCE_SECONDS).topics


def test_list_topics_tells_of_topics_and_of_the_one_broker(producer, url, topic):
    create_topic(url, "other", partition_count=3)
    metadata = producer.list_topics(timeout=PATIENCE_SECONDS)

    assert {name: len(metadata.topics[name].partitions) for name in (topic, "other")} == {topic: 1, "other": 3}
    assert metadata.topics["other"].error is None
    assert sorted(metadata.topics["other"].partitions) == [0, 1, 2]
    assert len(metadata.brokers) == 1
    (broker,) = metadata.brokers
    partition = metadata.topics["other"].partitions[2]
    assert (partition.id, partition.leader, partition.replicas, partition.isrs, partition.error) == (
        2,
        broker,
        [broker],
        [broker],
        None,
    )
    assert set(producer.list_topics("other", timeout=PATIENCE_SECONDS).topics) == {"other"}


def test_the_cluster_id_is_the_same_for_every_client(make_producer, topic):
    one, other = make_producer(), make_producer()
    cluster_id = one.cluster_id(PATIENCE_SECONDS)

    assert isinstance(cluster_id, str)
    assert cluster_id
    assert other.cluster_id(timeout=PATIENCE_SECONDS) == cluster_id
    assert other.list_topics(timeout=PATIENCE_SECONDS).cluster_id == cluster_id


@pytest.mark.parametrize("call", ["list_topics", "cluster_id"])
def test_asking_a_database_that_is_away_ends_in_time(call):
    producer = Producer({"bootstrap.servers": "postgresql://nobody:hidden-word@127.0.0.1:1/nothing"})
    started = time.monotonic()
    error = error_of(getattr(producer, call), timeout=0.3)

    assert error.code() in (KafkaError._TRANSPORT, KafkaError._TIMED_OUT)
    assert "hidden-word" not in str(error)
    assert time.monotonic() - started < PATIENCE_SECONDS / 2
    producer.close()


@pytest.mark.parametrize(
    ("arguments", "named", "error", "text"),
    [
        (("sqlite:///x.db",), {}, TypeError, "expected configuration dict"),
        ((None,), {}, TypeError, "expected configuration dict"),
        (({"foo": 1},), {}, KafkaException, 'No such configuration property: "foo"'),
        ((), {"bootstrap_servers": "x"}, KafkaException, 'No such configuration property: "bootstrap_servers"'),
    ],
    ids=["text", "None", "unknown", "underscore"],
)
def test_a_producer_is_made_of_a_dictionary_of_known_keys(arguments, named, error, text):
    with pytest.raises(error, match=text):
        Producer(*arguments, **named)


def test_a_report_travels_between_processes(producer, topic):
    reports = Reports()
    producer.produce(topic, b"value", b"key", partition=0, on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert pickle.loads(pickle.dumps(reports[0][1])) == reports[0][1]


def test_a_forked_child_is_told_to_make_a_producer_of_its_own(producer, topic, url):
    producer.produce(topic, b"parent", partition=0)
    assert producer.flush(PATIENCE_SECONDS) == 0
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_use_in_child, args=(theirs, producer, url, topic), daemon=True)
    child.start()
    theirs.close()
    assert ours.poll(PATIENCE_SECONDS)
    told = ours.recv()
    child.join(PATIENCE_SECONDS)
    ours.close()

    code, text, closed, own = told
    assert code == KafkaError._STATE
    assert "process" in text
    assert (closed, own) == (True, 0)
    producer.produce(topic, b"parent again", partition=0)
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert Counter(values(read_to_end(url, topic))) == Counter([b"parent", b"child", b"parent again"])


def _use_in_child(pipe, inherited, url, topic):
    try:
        inherited.produce(topic, b"stolen", partition=0)
        inherited.flush(1)
        code, text = None, "it went through"
    except KafkaException as exception:
        code, text = exception.args[0].code(), exception.args[0].str()
    closed = inherited.close()
    own = Producer({"bootstrap.servers": url})
    own.produce(topic, b"child", partition=0)
    left = own.flush(PATIENCE_SECONDS)
    own.close()
    pipe.send((code, text, closed, left))
    pipe.close()

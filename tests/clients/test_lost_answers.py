"""A connection that is cut at a COMMIT while a producer works: its program notices nothing, nothing is there twice."""

from __future__ import annotations

import pytest

from tests.clients.steps import NO_MEMBER, PATIENCE_SECONDS, create_topic, read_to_end, values
from txnstore import Consumer, Producer, TopicPartition
from txnstore.testing.proxy import Proxy, upstream_of

TOPIC = "orders"

#: The calls of a program in turn; the cut comes in one of them.
STEPS = {
    "init": lambda producer: producer.init_transactions(PATIENCE_SECONDS),
    "begin": lambda producer: producer.begin_transaction(),
    "produce": lambda producer: producer.produce(TOPIC, b"flushed", partition=0),
    "flush": lambda producer: producer.flush(PATIENCE_SECONDS),
    "send_offsets": lambda producer: producer.send_offsets_to_transaction(
        [TopicPartition(TOPIC, 0, 7)], NO_MEMBER, PATIENCE_SECONDS
    ),
    "produce more": lambda producer: producer.produce(TOPIC, b"with the commit", partition=0),
    "commit": lambda producer: producer.commit_transaction(PATIENCE_SECONDS),
    "begin again": lambda producer: producer.begin_transaction(),
    "produce in vain": lambda producer: producer.produce(TOPIC, b"aborted", partition=0),
    "flush in vain": lambda producer: producer.flush(PATIENCE_SECONDS),
    "abort": lambda producer: producer.abort_transaction(PATIENCE_SECONDS),
    "begin once more": lambda producer: producer.begin_transaction(),
    "produce once more": lambda producer: producer.produce(TOPIC, b"last", partition=0),
    "commit once more": lambda producer: producer.commit_transaction(PATIENCE_SECONDS),
}
COMMITTED = [b"flushed", b"with the commit", b"last"]


@pytest.fixture
def proxy(txnstore_postgresql_url):
    with Proxy(upstream_of(txnstore_postgresql_url)) as proxy:
        yield proxy


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize(
    "cut_in", ["init", "flush", "send_offsets", "commit", "flush in vain", "abort", "commit once more"]
)
def test_a_program_does_not_notice_that_the_connection_was_cut(txnstore_postgresql_url, proxy, cut_in, side):
    url = txnstore_postgresql_url
    create_topic(url, TOPIC)
    producer = Producer({"bootstrap.servers": proxy.url(url), "transactional.id": "anna", "linger.ms": 50_000})
    for name, step in STEPS.items():
        cut = proxy.cut(**{side: "COMMIT"}) if name == cut_in else None
        step(producer)
        assert cut is None or cut.fired
    producer.close()

    assert values(read_to_end(url, TOPIC)) == COMMITTED
    assert values(read_to_end(url, TOPIC, isolation="read_uncommitted")) == [*COMMITTED[:2], b"aborted", b"last"]
    consumer = Consumer({"bootstrap.servers": url, "group.id": "readers"})
    (position,) = consumer.committed([TopicPartition(TOPIC, 0)], PATIENCE_SECONDS)
    consumer.close()
    assert position.offset == 7


@pytest.mark.parametrize("side", ["before", "after"])
def test_records_outside_of_transactions_are_there_once(txnstore_postgresql_url, proxy, side):
    url = txnstore_postgresql_url
    create_topic(url, TOPIC)
    reports = []
    producer = Producer({"bootstrap.servers": proxy.url(url)})
    for number in range(5):
        cut = proxy.cut(**{side: "COMMIT"})
        producer.produce(
            TOPIC, b"%d" % number, partition=0, on_delivery=lambda error, message: reports.append((error, message))
        )
        assert producer.flush(PATIENCE_SECONDS) == 0
        assert cut.fired
    producer.close()

    assert [(error, message.offset()) for error, message in reports] == [(None, number) for number in range(5)]
    assert values(read_to_end(url, TOPIC)) == [b"%d" % number for number in range(5)]

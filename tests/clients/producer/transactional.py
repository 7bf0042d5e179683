"""Transactional producers on the test's store, and what its readers see."""

from __future__ import annotations

import pytest

from tests.clients.steps import (
    BOTH_ISOLATION_LEVELS,
    PATIENCE_SECONDS,
    create_topic,
    read_to_end,
    values,
)
from txnstore import OFFSET_BEGINNING, Message, TopicPartition
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.opening import open_store

TOPIC = "orders"


@pytest.fixture
def topic(url):
    return create_topic(url, TOPIC)


@pytest.fixture
def make_transactional(make_producer):
    """Make producers whose transactions may begin."""

    def make(transactional_id="anna", **configuration):
        settings = {key.replace("_", "."): value for key, value in configuration.items()}
        producer = make_producer({"transactional.id": transactional_id, **settings})
        producer.init_transactions(PATIENCE_SECONDS)
        return producer

    return make


@pytest.fixture
def producer(make_transactional):
    return make_transactional()


@pytest.fixture
def plainly(make_producer):
    """Write records outside transactions."""
    producer = make_producer()

    def write(topic, *written, partition=0):
        for value in written:
            producer.produce(topic, value, partition=partition)
        assert producer.flush(PATIENCE_SECONDS) == 0

    return write


def allow_two_phase_commit(url):
    with open_store(url) as store:
        store.write(
            lambda connection: change_store_settings(connection, {"transaction.two.phase.commit.enable": "true"})
        )


def seen(url, topic, **named):
    """Return the values that readers of each isolation level get."""
    return tuple(values(read_to_end(url, topic, isolation=level, **named)) for level in BOTH_ISOLATION_LEVELS)


def committed(consumer, topic, partition=0):
    (position,) = consumer.committed([TopicPartition(topic, partition)], PATIENCE_SECONDS)
    return position.offset


def assigned(make_consumer, topic, *, partitions=(0,), **configuration):
    """Make a consumer that reads the partitions from their beginning, in no group's generation."""
    settings = {key.replace("_", "."): value for key, value in configuration.items()}
    consumer = make_consumer({"enable.auto.commit": False, **settings})
    consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in partitions])
    return consumer


def read(consumer, count):
    """Read so many messages."""
    messages: list[Message] = []
    while len(messages) < count:
        message = consumer.poll(PATIENCE_SECONDS)
        assert message is not None, f"only {len(messages)} of {count} messages came"
        assert message.error() is None, message.error()
        messages.append(message)
    return messages

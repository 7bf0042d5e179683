"""Producers that enlist connections to the bank's databases: fixtures and steps, and what the log holds of it."""

from __future__ import annotations

import uuid

import pytest
from sqlalchemy import delete

from txnstore import Consumer, Producer
from txnstore.db.schema import transaction_branches

TIMEOUT = 60


@pytest.fixture
def name():
    return f"transfer-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def url(shared_store):
    """A store that other tests use too: each keeps to a topic and ids of its own."""
    # Of branches that tests have lost on purpose recovery would rightly tell.
    shared_store.write(lambda connection: connection.execute(delete(transaction_branches)))
    return shared_store.url.url.render_as_string(hide_password=False)


@pytest.fixture
def producer(url, name):
    producer = Producer({"bootstrap.servers": url, "transactional.id": name})
    producer.init_transactions(TIMEOUT)
    yield producer
    producer.close()


@pytest.fixture
def drivers(tables):
    drivers = [table.connect() for table in tables]
    yield drivers
    for driver in drivers:
        driver.close()


def records(url, topic):
    """Return what is in the topic's one partition up to its end; nothing if there is no such topic."""
    settings = {"group.id": topic, "auto.offset.reset": "earliest", "enable.partition.eof": True}
    consumer = Consumer({"bootstrap.servers": url, "fetch.wait.max.ms": 0, **settings})
    try:
        consumer.subscribe([topic])
        found = []
        while (message := consumer.poll(TIMEOUT)) is not None and message.error() is None:
            found.append((message.value() or b"").decode())
        assert message is not None, "neither a record nor the end came in time"
        return found
    finally:
        consumer.close()


def move(connection, name, amount):
    connection.execute("INSERT INTO account VALUES (%s, %s)", [name, amount])


def topic_of(producer):
    return f"of-{producer._transactions.transactional_id}"


def transfer(producer, drivers, name):
    producer.begin_transaction()
    for driver, amount in zip(drivers, (-1, 1), strict=True):
        producer.enlist(driver)
        move(driver, name, amount)
    producer.produce(topic_of(producer), name)


def assert_nowhere(tables):
    for table in tables:
        assert table.balances() == {}
        assert table.gids() == table.foreign_gids


def assert_everywhere(tables, name):
    assert [table.balances() for table in tables] == [{name: -1}, {name: 1}]
    for table in tables:
        assert table.gids() == table.foreign_gids

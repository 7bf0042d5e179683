"""A restored dump, or a copied file: producers, consumers and the outbox go on, and skip or double nothing.

A server that a dump is restored on has numbered its own transactions, lower or higher than the one that it came from.
"""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from tests.copies import copy_file, restore_dump
from txnstore import Consumer, Producer, TopicPartition
from txnstore.admin import AdminClient, NewTopic
from txnstore.db.opening import open_store
from txnstore.db.schema import outbox
from txnstore.log.outbox.sequencer import drain_outbox
from txnstore.participants.adoption import adopt
from txnstore.testing.private_cluster import PrivateCluster

TIMEOUT = 60.0
GROUP = {"group.id": "g", "auto.offset.reset": "earliest", "enable.auto.commit": False, "session.timeout.ms": 6_000}


@pytest.fixture(scope="module")
def other_server():
    with PrivateCluster(fsync=False) as server:
        yield server


def spend_transactions(server, count):
    """Let a server give out numbers of transactions."""
    with server.connect() as connection:
        connection.execute(
            f"DO $$ BEGIN FOR i IN 1..{count} LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$"
        )


def current_number(server):
    with server.connect() as connection:
        row = connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
    assert row is not None
    return row[0]


@pytest.fixture(params=["copied file", "lower numbers", "higher numbers"])
def moved(request, tmp_path):
    """The URL of a store, and what copies it to where it goes on."""
    if request.param == "copied file":
        url, copy_url = (f"sqlite:///{tmp_path / name}.db" for name in ("original", "copy"))
        yield url, lambda: (copy_file(url, copy_url), copy_url)[1]
        return
    here, there = (request.getfixturevalue(name) for name in ("txnstore_postgres_server", "other_server"))
    source, target = (here, there) if request.param == "higher numbers" else (there, here)
    name = f"restored_{request.param[:6].strip()}"
    for server in (source, target):
        server.create_database(name)
    behind = current_number(source) - current_number(target)
    ahead = 2_000
    if request.param == "higher numbers":
        spend_transactions(target, max(0, behind) + ahead)
    else:
        spend_transactions(source, max(0, -behind) + ahead)

    def copy():
        restore_dump(source.url(name), target.url(name))
        is_higher = current_number(target) > current_number(source)
        assert is_higher is (request.param == "higher numbers")
        return target.url(name)

    yield source.url(name), copy
    for server in (source, target):
        server.drop_database(name)


def transaction(producer, value):
    producer.begin_transaction()
    for partition in (0, 1):
        producer.produce("t", value, partition=partition)
    producer.commit_transaction(TIMEOUT)


def producer_of(url, name="p"):
    producer = Producer({"bootstrap.servers": url, "transactional.id": name})
    producer.init_transactions(TIMEOUT)
    return producer


def consumed(url, count, *, commit=True):
    """What the group reads next, by partition."""
    found: dict[int, list[str]] = {0: [], 1: []}
    with Consumer({"bootstrap.servers": url, **GROUP}) as consumer:
        consumer.subscribe(["t"])
        for message in consumer.consume(count, TIMEOUT):
            add(found, message)
        if commit:
            consumer.commit(asynchronous=False)
    return found


def add(found, message):
    assert message.error() is None
    found[message.partition()].append(message.value().decode())


def everything(url):
    """What is committed, by partition."""
    found: dict[int, list[str]] = {0: [], 1: []}
    with Consumer({"bootstrap.servers": url, "group.id": "all", "enable.partition.eof": True}) as consumer:
        consumer.assign([TopicPartition("t", partition, 0) for partition in found])
        ends = 0
        while ends < len(found):
            message = consumer.poll(TIMEOUT)
            assert message is not None
            if message.error():
                ends += 1
            else:
                add(found, message)
    return found


def into_outbox(url, value):
    """Insert two rows in one database transaction, as an application does; nobody makes records of them yet."""
    rows = [{"topic": "t", "partition_number": partition, "value": value.encode()} for partition in (0, 1)]
    with open_store(url) as store:
        store.write(lambda connection: connection.execute(outbox.insert(), rows))


def sequence(url):
    with open_store(url) as store:
        return drain_outbox(store)


@pytest.mark.slow
@pytest.mark.parametrize("adopted", [False, True])
def test_producers_consumers_and_the_outbox_go_on_where_the_copy_was_made(moved, adopted):
    url, copy = moved
    with AdminClient({"bootstrap.servers": url}) as admin:
        admin.create_topics([NewTopic("t", 2)])["t"].result(TIMEOUT)
    with closing(producer_of(url)) as producer, closing(producer_of(url, "open")) as other:
        for number in range(5):
            transaction(producer, f"before {number}")
        assert sum(map(len, consumed(url, 6).values())) == 6
        into_outbox(url, "outbox before")
        # Open when the copy is made: whoever starts under its name ends it there.
        other.begin_transaction()
        other.produce("t", "never", partition=0)
        other.flush(TIMEOUT)
        copy_url = copy()
    if adopted:
        with open_store(copy_url) as store:
            adopt([store])
    with closing(producer_of(copy_url)) as producer:
        transaction(producer, "after 0")
        into_outbox(copy_url, "outbox after")
        assert sequence(copy_url) == 4
        transaction(producer, "after 1")
    with closing(producer_of(copy_url, "open")) as other:
        transaction(other, "after 2")
    expected = [f"before {number}" for number in range(5)]
    expected += ["after 0", "outbox before", "outbox after", "after 1", "after 2"]
    assert everything(copy_url) == {0: expected, 1: expected}
    rest = consumed(copy_url, 2 * len(expected) - 6)
    assert sum(map(len, rest.values())) == 2 * len(expected) - 6
    for partition in (0, 1):
        assert rest[partition] == expected[len(expected) - len(rest[partition]) :]


@pytest.mark.slow
def test_a_dump_that_is_made_while_producers_go_on_holds_whole_transactions(moved):
    url, copy = moved
    with AdminClient({"bootstrap.servers": url}) as admin:
        admin.create_topics([NewTopic("t", 2)])["t"].result(TIMEOUT)
    stop, begun = threading.Event(), threading.Event()

    def produce():
        number = 0
        with closing(producer_of(url)) as producer:
            while not stop.is_set():
                transaction(producer, str(number))
                number += 1
                if number == 5:
                    begun.set()

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        assert begun.wait(TIMEOUT)
        copy_url = copy()
    finally:
        stop.set()
        thread.join(TIMEOUT)
    with closing(producer_of(copy_url)) as producer:
        transaction(producer, "after")
    found = everything(copy_url)
    assert found[0] == found[1]
    assert found[0] == [str(number) for number in range(len(found[0]) - 1)] + ["after"]
    assert len(found[0]) > 5

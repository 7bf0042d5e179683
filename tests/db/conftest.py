"""What the tests of the database layer share: everything a client does, roles, and databases of a kind."""

from __future__ import annotations

import itertools
import os

import pytest
from psycopg import sql

from txnstore.groups.offsets import read_offsets
from txnstore.log.append import Append, append
from txnstore.log.bounds import offset_for_time, read_bounds
from txnstore.log.codec import encode
from txnstore.log.fetch import fetch
from txnstore.log.topics import create_topic, delete_topic, grow_topic
from txnstore.model import GroupMembership, IsolationLevel, OffsetAndMetadata, Record
from txnstore.transactions import recovery
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.transaction import SentOffsets

TEXT = "naïve 交易 \U0001f600 'quoted' \"double\" back\\slash %s :name $1"
NUMBERS = itertools.count(1)


def values(store, partition_id, isolation=IsolationLevel.READ_COMMITTED):
    page = store.read(lambda connection: fetch(connection, {partition_id: 0}, isolation=isolation))[partition_id]
    return [record.value for batch in page.batches for record in batch.records()]


def everything_a_client_does(store, name="orders"):
    """Topics, appends, transactions that commit, abort and time out, offsets, fetches, recovery; as it should be."""
    topic = store.write(lambda connection: create_topic(connection, name, partition_count=2))
    (partition_id, other) = topic.partition_ids
    plain = encode([Record(b"\x00\xff plain", b"", headers=[("é", b"\xfe"), (TEXT, TEXT.encode())]), Record(None)])
    store.write(lambda connection: append(connection, [Append(partition_id, plain)]))
    coordinator = TransactionCoordinator(store)
    txid = f"worker {name} {TEXT}"
    producer = coordinator.init_producer_id(txid).identity
    group = SentOffsets(GroupMembership(f"group {name}"), {partition_id: OffsetAndMetadata(2, -1, TEXT)})

    def batch(producer, value):
        return encode([Record(value)], producer=producer, base_sequence=0, is_transactional=True)

    coordinator.append(txid, producer, [Append(partition_id, batch(producer, b"committed"))])
    assert values(store, partition_id) == [b"\x00\xff plain", None]
    coordinator.send_offsets(txid, producer, group)
    producer = coordinator.end_transaction(txid, producer, commit=True).identity
    coordinator.append(txid, producer, [Append(other, batch(producer, b"aborted"))])
    producer = coordinator.end_transaction(txid, producer, commit=False).identity
    coordinator.append(txid, producer, [Append(partition_id, batch(producer, b"open"))])
    assert values(store, partition_id) == [b"\x00\xff plain", None, b"committed"]
    assert values(store, other, IsolationLevel.READ_UNCOMMITTED) == [b"aborted"]
    assert values(store, other) == []
    bounds = store.read(lambda connection: read_bounds(connection, [partition_id]))[partition_id]
    assert (bounds.high_watermark, bounds.last_stable_offset) == (5, 4)
    committed = store.read(lambda connection: read_offsets(connection, f"group {name}", [partition_id]))
    assert committed.offsets == {partition_id: OffsetAndMetadata(2, -1, TEXT)}
    assert recovery.abort_by_administrator(store, txid)
    recovery.recover(store)
    recovery.expire_transactional_ids(store)
    recovery.expire_producers(store)
    recovery.trim_journal(store)
    found = store.read(lambda c: offset_for_time(c, partition_id, 0, IsolationLevel.READ_COMMITTED))
    assert found is not None
    store.write(lambda connection: grow_topic(connection, name, partition_count=3))
    spare = f"{name}-spare"
    store.write(lambda connection: create_topic(connection, spare))
    store.write(lambda connection: delete_topic(connection, spare))
    assert values(store, partition_id) == [b"\x00\xff plain", None, b"committed"]
    return partition_id


@pytest.fixture
def client_path():
    """Do everything that a client does with a store, and check it; return a partition's id."""
    return everything_a_client_does


@pytest.fixture
def new_database(txnstore_postgres_server, new_role):
    """Make an empty PostgreSQL database, by CREATE DATABASE with these options; dropped after the test."""
    del new_role  # asked for so that roles go after the databases in which they own something
    made = []

    def make(options="", **settings):
        name = f"txnstore_test_db_{os.getpid()}_{next(NUMBERS)}"
        with txnstore_postgres_server.connect() as connection:
            connection.execute(f"CREATE DATABASE {name} {options}")
            for setting, value in settings.items():
                connection.execute(f"ALTER DATABASE {name} SET {setting} = {value}")
        made.append(name)
        return name

    yield make
    for name in made:
        txnstore_postgres_server.drop_database(name)


@pytest.fixture
def new_role(txnstore_postgres_server):
    """Make a role that may log in and owns nothing, with a password; dropped after the test."""
    made = []

    def make(**settings):
        name = f"txnstore_test_role_{os.getpid()}_{next(NUMBERS)}"
        txnstore_postgres_server.create_role(name, "secret")
        with txnstore_postgres_server.connect() as connection:
            for setting, value in settings.items():
                connection.execute(f"ALTER ROLE {name} SET {setting} = {value}")
        made.append(name)
        return name

    yield make
    for name in made:
        txnstore_postgres_server.drop_role(name)


@pytest.fixture
def granted(txnstore_postgres_server):
    """Run statements as the superuser in a database; `{role}` stands for a role's name."""

    def run(database, role, *statements):
        with txnstore_postgres_server.connect(database) as connection:
            for statement in statements:
                connection.execute(sql.SQL(statement).format(role=sql.Identifier(role)))

    return run

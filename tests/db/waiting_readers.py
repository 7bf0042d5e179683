"""What tests of waiting readers share: topics that are written to, a waiter, and how long a wake may take."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import psycopg
import pytest

from tests.tools.proxy import Proxy, upstream_of
from txnstore.db.opening import open_store
from txnstore.db.postgresql.connections import SILENCE_MS
from txnstore.log.append import Append, append
from txnstore.log.bounds import read_bounds
from txnstore.log.codec import encode
from txnstore.log.topics import ensure_topic
from txnstore.model import Record
from txnstore.testing.postgres_server import connection_string

#: A waiter who returns True before this time was woken: on PostgreSQL it looks by itself only after SILENCE_MS.
SHORT_MS = 400


class Orders:
    """A topic with one partition."""

    def __init__(self, store, name="orders"):
        self.store = store
        (self.partition_id,) = store.write(lambda connection: ensure_topic(connection, name)).partition_ids

    def add(self, *, wakes_readers=True):
        append_to(self.store, self.partition_id, wakes_readers=wakes_readers)

    def next_offset(self):
        bounds = self.store.read(lambda connection: read_bounds(connection, [self.partition_id]))
        return bounds[self.partition_id].high_watermark


def append_to(store, partition_id, *, wakes_readers=True):
    batch = encode([Record(b"news")])
    store.write(lambda connection: append(connection, [Append(partition_id, batch)]), wakes_readers=wakes_readers)


@pytest.fixture
def orders(store):
    return Orders(store)


@pytest.fixture
def waiter(orders):
    with closing(orders.store.waiter()) as waiter:
        settle(waiter)
        yield waiter


@pytest.fixture
def postgresql(txnstore_postgresql_store):
    return Orders(txnstore_postgresql_store)


@pytest.fixture
def observer(txnstore_postgresql_url):
    """A connection of somebody else to the same database."""
    with psycopg.connect(connection_string(txnstore_postgresql_url), autocommit=True) as connection:
        yield connection


@pytest.fixture
def proxy(txnstore_postgresql_url):
    with Proxy(upstream_of(txnstore_postgresql_url)) as proxy:
        yield proxy


@pytest.fixture
def proxied(proxy, txnstore_postgresql_url):
    with open_store(proxy.url(txnstore_postgresql_url)) as store:
        yield Orders(store)
        proxy.heal()


def settle(waiter):
    """Let go by what was committed when the test was set up."""
    while waiter.wait(20):
        pass


WAKE_LIMIT_SECONDS = 60.0


def is_woken(waiter):
    """Return whether the waiter is woken: by somebody, not because it is time to look by itself."""
    assert SHORT_MS < SILENCE_MS
    return any(waiter.wait(SHORT_MS) for _ in range(25))


def until(condition):
    pause = threading.Event()
    deadline = time.monotonic() + WAKE_LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAKE_LIMIT_SECONDS} s"
        pause.wait(0.01)

"""What the tests of the clients share: clients that are closed after the test, and a database that stands still."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sqlite3
import warnings

import psycopg
import pytest

from tests.clients.consumer.log_writer import LogWriter
from tests.clients.membership.steps import Crew
from tests.tools.least_privilege import as_owner
from txnstore import Consumer, Producer
from txnstore.db.opening import open_store
from txnstore.testing.postgres_server import connection_string

_numbers = itertools.count(1)


@pytest.fixture
def make_producer(url):
    """Make producers on the test's store, given keys of their configuration; they are closed after the test."""
    with _closing() as opened:
        yield lambda configuration=(), /: _add(opened, Producer({"bootstrap.servers": url, **dict(configuration)}))


@pytest.fixture
def make_consumer(url):
    """Make consumers on the test's store, given keys of their configuration; they are closed after the test.

    Those that commit by themselves do so as they give back or close, if they are told no time: every five seconds would
    be in the middle of a test where the machine is busy.
    """
    usual = {
        "bootstrap.servers": url,
        "group.id": "readers",
        "auto.offset.reset": "earliest",
        "auto.commit.interval.ms": 86_400_000,
    }
    with _closing() as opened:
        yield lambda configuration=(), /, kind=Consumer: _add(opened, kind({**usual, **dict(configuration)}))


@pytest.fixture
def crew(make_consumer):
    """The members of one group, polled by the test in turns."""
    return Crew(make_consumer)


@pytest.fixture
def log(url):
    """A second hand on the test's store, which writes straight into the log."""
    with open_store(url) as store:
        yield LogWriter(store)


@contextlib.contextmanager
def _closing():
    opened: list[Consumer | Producer] = []
    try:
        yield opened
    finally:
        # A fenced producer may warn of what it cannot abort any more: that is for tests of closing.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for client in reversed(opened):
                client.close()


def _add(opened, client):
    opened.append(client)
    return client


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def module_url(request, tmp_path_factory):
    """The URL of one store of each database for all tests of a file, which keep to topics and ids of their own."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path_factory.mktemp('clients') / 'store.db'}"
        return
    with request.getfixturevalue("lent_postgresql")() as url:
        yield url


@pytest.fixture(scope="module")
def collects_little():
    """Let the garbage collector, which a file's tests call themselves, look at nothing that was there before them."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def hold_database():
    """Let nobody write to the store while the context lasts: what a client asks of it has to wait."""
    return _hold


@contextlib.contextmanager
def _hold(url):
    connection: sqlite3.Connection | psycopg.Connection
    if url.startswith("sqlite"):
        path = url.partition(",")[0].removeprefix("sqlite:///")
        connection = sqlite3.connect(path, isolation_level=None, timeout=60)
        connection.execute("BEGIN IMMEDIATE")
    else:
        connection = psycopg.connect(connection_string(as_owner(url)))
        connection.execute("LOCK TABLE txnstore.stores, txnstore.transactions, txnstore.partition_heads")
    try:
        yield
    finally:
        connection.rollback()
        connection.close()

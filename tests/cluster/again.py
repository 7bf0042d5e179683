"""Fixtures with which tests of the clients run once more, over a cluster of two SQLite files.

A file that imports these fixtures and another file's tests runs them as they are: what a program sees is the same.
"""

from __future__ import annotations

import sys

import pytest

from tests.clients.conftest import crew, hold_database, make_consumer, make_producer
from tests.clients.consumer.log_writer import LogWriter, OpenTransaction
from tests.tools.cluster_changes import grow_topic
from txnstore.db.cluster.cluster import open_cluster
from txnstore.groups.administration import find_group
from txnstore.log.append import Append, append
from txnstore.log.cluster_topics import create_topic
from txnstore.log.codec import encode
from txnstore.model import Record
from txnstore.transactions.coordinator import TransactionCoordinator

__all__ = ["clock", "crew", "hold_database", "log", "make_consumer", "make_producer", "module_url", "store", "url"]


class ClusterWriter(LogWriter):
    """A second hand on the databases of a test."""

    def __init__(self, cluster):
        super().__init__(cluster.controller)
        self.cluster = cluster

    def topic(self, name="t", partition_count=1):
        return create_topic(self.cluster, name, partition_count=partition_count)

    def grow(self, name, partition_count):
        return grow_topic(self.cluster, name, partition_count=partition_count)

    def write(self, name, number, *values, timestamp_ms=1_000, wakes_readers=True):
        batch = encode([Record(value, timestamp_ms=timestamp_ms) for value in values])
        partition_id = self.partition_id(name, number)
        store = self.cluster.own(self.cluster.leader_of_partition(partition_id))
        store.write(lambda connection: append(connection, [Append(partition_id, batch)]), wakes_readers=wakes_readers)

    def transaction(self, timeout_ms=60_000):
        transactional_id = f"writer-{next(_numbers)}"
        writer = ClusterWriter(self.cluster)
        writer.coordinator = TransactionCoordinator(self.cluster.coordinator_of(transactional_id), self.cluster)
        return OpenTransaction(writer, transactional_id, timeout_ms)

    def group(self, group_id="readers"):
        store = self.cluster.coordinator_of(group_id)
        return store.read(lambda connection: find_group(connection, group_id))


_numbers = iter(range(1, sys.maxsize))


def urls_in(folder, make_sqlite_store):
    """Return the URLs of two stores that are made in the folder."""
    return ", ".join(make_sqlite_store(folder / f"{name}.db") for name in ("first", "second"))


@pytest.fixture
def url(tmp_path, make_sqlite_store, monkeypatch, request):
    """The URLs of two fresh databases; whoever opens the store of a test gets the controller of both."""
    opened = []

    def open_store(url, **keywords):
        opened.append(open_cluster(url, **keywords))
        return opened[-1].controller

    from tests.clients import conftest, steps

    original = sys.modules[request.function.__module__] if request.function is not None else steps
    for module in (conftest, steps, original):
        monkeypatch.setattr(module, "open_store", open_store, raising=False)
    yield urls_in(tmp_path, make_sqlite_store)
    for cluster in opened:
        cluster.close()


@pytest.fixture(scope="module")
def module_url(tmp_path_factory, make_sqlite_store):
    """The URLs of two databases for all tests of a file, which keep to topics and ids of their own."""
    return urls_in(tmp_path_factory.mktemp("cluster"), make_sqlite_store)


@pytest.fixture
def clock(txnstore_clock):
    """The clock that `store` goes by."""
    return txnstore_clock


@pytest.fixture
def store(url, clock):
    """The database that coordinates the transactional id of most tests."""
    with open_cluster(url, clock=clock) as cluster:
        yield cluster.coordinator_of("anna")


@pytest.fixture
def log(url):
    """A second hand on the test's databases, which writes straight into the log."""
    with open_cluster(url) as cluster:
        yield ClusterWriter(cluster)

"""A client's way to its store: when it is opened, by which thread, and when no longer."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.tools.silent_port import silent_port
from txnstore.clients import connection as module
from txnstore.clients.configuration.configuration import admin_configuration
from txnstore.clients.connection import StoreConnection
from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.db.backend import Limits
from txnstore.db.cluster.cluster import open_cluster
from txnstore.errors import InvalidUrl, StoreClosed, StoreUnavailable, TxnStoreError
from txnstore.log.topics import create_topic, list_topics
from txnstore.testing.manual_clock import ManualClock

#: A bound for waiting on threads; nothing takes so long unless it is broken.
PATIENCE_SECONDS = 60


def connection_to(url: str, **settings: object) -> StoreConnection:
    return StoreConnection(admin_configuration(({"bootstrap.servers": url},), settings))


@pytest.fixture
def connection(url):
    connection = connection_to(url)
    yield connection
    connection.close()


def test_nothing_is_opened_before_the_first_use(connection, monkeypatch):
    monkeypatch.setattr(module, "open_cluster", lambda *_, **__: pytest.fail("opened"))
    assert connection.opened is None
    assert connection.process_id == os.getpid()
    connection.close()


def test_the_first_use_opens_and_the_others_get_the_same(connection):
    store = connection.store()
    assert connection.store() is store
    assert connection.opened is connection.cluster()
    assert store.store_uuid


def test_many_threads_open_one_store(connection, monkeypatch):
    opened = []
    barrier = threading.Barrier(8, timeout=PATIENCE_SECONDS)

    def open_and_count(*arguments, **keywords):
        opened.append(open_cluster(*arguments, **keywords))
        return opened[-1]

    monkeypatch.setattr(module, "open_cluster", open_and_count)

    def use(_):
        barrier.wait()
        return connection.store()

    with ThreadPoolExecutor(8) as threads:
        stores = set(threads.map(use, range(8)))
    assert stores == {cluster.controller for cluster in opened}
    assert len(opened) == 1


def test_after_a_failure_the_next_call_tries_again(tmp_path):
    folder = tmp_path / "later"
    connection = connection_to(f"sqlite:///{folder}/log.db")
    for _ in range(2):
        with pytest.raises(InvalidUrl, match="does not exist; create it first"):
            connection.store()
        assert connection.opened is None
    folder.mkdir()
    assert connection.cluster() is connection.opened
    connection.close()


def test_a_server_that_is_not_there_is_unavailable_and_its_password_secret(unused_port):
    configuration = admin_configuration(
        ({"bootstrap.servers": f"postgresql://user:s3kr1t@127.0.0.1:{unused_port}/log"},), {}
    )
    connection = StoreConnection(configuration, limits=Limits(retry_timeout_ms=0))
    with pytest.raises(StoreUnavailable) as raised:
        connection.store()
    assert "s3kr1t" not in f"{raised.value}{connection!r}"
    assert connection.opened is None


@pytest.fixture
def unused_port():
    with silent_port() as port:
        yield port


@pytest.mark.takes_more_rights("makes a store in another schema")
def test_schema_and_clock_come_from_the_configuration(url):
    clock = ManualClock()
    connection = connection_to(url, **{"txnstore.schema": "mine", "txnstore.clock": clock})
    store = connection.store()
    assert (store.schema, store.clock) == ("mine", clock)
    connection.close()


def test_after_close_it_stays_closed(connection):
    store = connection.store()
    connection.close()
    connection.close()
    assert connection.opened is None
    with pytest.raises(StoreClosed):
        connection.store()
    with pytest.raises(StoreClosed):
        store.read(list_topics)


def test_closed_before_the_first_use_it_opens_nothing(url, monkeypatch):
    monkeypatch.setattr(module, "open_cluster", lambda *_, **__: pytest.fail("opened"))
    connection = connection_to(url)
    connection.close()
    with pytest.raises(StoreClosed, match="has been closed"):
        connection.store()


def test_close_does_not_wait_for_an_opening_which_closes_what_it_opened(connection, monkeypatch):
    opening, may_open = threading.Event(), threading.Event()
    opened = []

    def open_slowly(*arguments, **keywords):
        opening.set()
        assert may_open.wait(PATIENCE_SECONDS)
        opened.append(open_cluster(*arguments, **keywords))
        return opened[-1]

    monkeypatch.setattr(module, "open_cluster", open_slowly)
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(connection.store)
        assert opening.wait(PATIENCE_SECONDS)
        connection.close()
        may_open.set()
        assert isinstance(future.exception(PATIENCE_SECONDS), StoreClosed)
    with pytest.raises(StoreClosed):
        opened[0].controller.read(list_topics)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite://:memory:"])
def test_two_clients_of_one_process_share_the_store_in_memory(url):
    one, other = connection_to(url), connection_to(url)
    name = f"shared-{os.urandom(4).hex()}"
    one.store().write(lambda connection: create_topic(connection, name))
    one.close()
    assert name in other.store().read(list_topics)
    other.close()


@pytest.mark.slow_but_first
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system with fork")
@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_in_a_forked_child_it_is_refused_and_its_close_leaves_the_parents_alone(connection, used_before):
    if used_before:
        connection.store()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.raises(KafkaException, match="make a new client in each process") as raised:
                connection.store()
            assert raised.value.args[0].code() == KafkaError._STATE
            connection.close()
            assert connection.opened is None
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert connection.store().read(list_topics) == []


def test_every_error_of_opening_is_ours(tmp_path):
    (tmp_path / "text.db").write_text("this is not a database, however long one looks at it" * 100)
    connection = connection_to(f"sqlite:///{tmp_path}/text.db")
    with pytest.raises(TxnStoreError):
        connection.store()

"""A database that cannot be reached: the same word from every client, with the cause, and `error_cb` hears of it."""

from __future__ import annotations

import asyncio
import pickle
import re
import time

import pytest

import txnstore.error
from tests.clients.steps import PATIENCE_SECONDS, error_of
from tests.tools.proxy import Proxy, upstream_of
from tests.tools.silent_port import silent_port
from txnstore import Consumer, KafkaError, KafkaException, Producer, errors
from txnstore.admin import AdminClient
from txnstore.aio import AIOConsumer, AIOProducer

CLIENTS = ("producer", "consumer", "admin")


@pytest.fixture
def away():
    """The URL of a server that is not there."""
    with silent_port() as port:
        yield f"postgresql://nobody:secret@127.0.0.1:{port}/none"


def make(kind, url, **configuration):
    conf = {"bootstrap.servers": url, **configuration}
    if kind == "consumer":
        return Consumer({**conf, "group.id": "g"})
    return Producer(conf) if kind == "producer" else AdminClient(conf)


@pytest.fixture
def client(request, away):
    with make(request.param, away) as client:
        yield client


@pytest.mark.slow_but_first
@pytest.mark.parametrize("client", CLIENTS, indirect=True)
@pytest.mark.parametrize("timeout", [0.3, 1.5])
def test_list_topics_says_transport_and_why(client, timeout):
    deadline = time.monotonic() + PATIENCE_SECONDS
    # The first try may still be under way when the time is up.
    while "has not answered within" in (error := error_of(client.list_topics, timeout=timeout)).str():
        assert time.monotonic() < deadline
        assert error.code() == KafkaError._TRANSPORT
    assert (error.code(), error.fatal()) == (KafkaError._TRANSPORT, False)
    assert re.fullmatch(
        r"Failed to get metadata: no connection to PostgreSQL could be made: is the server there and the address"
        r" right\? \(127\.0\.0\.1:\d+: .*\)",
        error.str(),
    )


@pytest.mark.parametrize("client", CLIENTS, indirect=True)
def test_a_timeout_of_nothing_is_transport_too(client):
    error = error_of(client.list_topics, timeout=0)
    assert error.code() == KafkaError._TRANSPORT
    assert error.str().startswith("Failed to get metadata: ")


@pytest.mark.slow_but_first
@pytest.mark.parametrize("client", CLIENTS, indirect=True)
def test_the_clusters_id_times_out_and_says_why(client):
    deadline = time.monotonic() + PATIENCE_SECONDS
    says_why = False
    # A try may still be under way when the time is up.
    while not says_why and time.monotonic() < deadline:
        error = error_of(client.cluster_id, timeout=0.3)
        assert error.code() == KafkaError._TIMED_OUT
        says_why = "no connection to PostgreSQL could be made" in error.str()
    assert says_why, error.str()


def test_a_read_of_the_admin_client_never_says_that_it_may_still_be_done(away):
    with AdminClient({"bootstrap.servers": away}) as admin:
        for ask in (admin.describe_cluster, admin.list_consumer_groups, admin.list_transactions):
            error = error_of(ask(request_timeout=0.2).result, PATIENCE_SECONDS)
            assert error.code() == KafkaError._TIMED_OUT
            assert "may still be carried out" not in error.str()
        deleted = admin.delete_topics(["t"], request_timeout=0.2)["t"]
        assert "may still be carried out" in error_of(deleted.result, PATIENCE_SECONDS).str()


def test_the_asynchronous_clients_say_the_same(away):
    async def ask():
        for client in (
            AIOProducer({"bootstrap.servers": away}),
            AIOConsumer({"bootstrap.servers": away, "group.id": "g"}),
        ):
            with pytest.raises(KafkaException) as caught:
                await client.list_topics(timeout=0.3)
            assert caught.value.args[0].code() == KafkaError._TRANSPORT
            await client.close()

    asyncio.run(ask())


@pytest.mark.parametrize("kind", CLIENTS)
def test_an_idle_client_tells_error_cb_that_the_database_is_away(away, kind):
    told: list[KafkaError] = []
    with make(kind, away, error_cb=told.append) as client:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(told) < 2 and time.monotonic() < deadline:
            client.poll(0.05)
    assert [error.code() for error in told[:2]] == [KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN]
    assert not any(error.fatal() for error in told)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", CLIENTS)
def test_an_idle_client_tells_error_cb_once_the_database_goes_away(txnstore_postgresql_url, kind):
    told: list[KafkaError] = []
    with (
        Proxy(upstream_of(txnstore_postgresql_url)) as proxy,
        make(kind, proxy.url(txnstore_postgresql_url), error_cb=told.append) as client,
    ):
        assert client.list_topics(timeout=PATIENCE_SECONDS) is not None
        client.poll(0.05)
        assert told == []
        proxy.refuse_connections()
        proxy.cut_connections()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not told and time.monotonic() < deadline:
            client.poll(0.05)
    assert told[0].code() == KafkaError._TRANSPORT


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_client_without_error_cb_opens_nothing_by_being_polled(tmp_path, kind):
    with make(kind, f"sqlite:///{tmp_path}/store.db") as client:
        client.poll(0.05)
        client.poll(0.05)
        assert client._connection.opened is None if kind != "consumer" else client._core.connection.opened is None


# --- pickling ---------------------------------------------------------------------------------------------------------


def exceptions():
    """Return one of each public exception."""
    error = KafkaError(KafkaError._TRANSPORT, "why", fatal=True, retriable=True, txn_requires_abort=True)
    yield KafkaException(error)
    yield KafkaException()
    for name in txnstore.error.__all__:
        kind = getattr(txnstore.error, name)
        if name in {"KafkaError", "KafkaException", "Message"}:
            continue
        yield kind(error) if name in {"ConsumeError", "ProduceError"} else kind(ValueError("why"))
    for kind in errors.ERRORS.values():
        yield kind("why")


@pytest.mark.parametrize("error", list(exceptions()), ids=repr)
def test_an_exception_survives_pickling(error):
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is type(error)
        assert (str(again), repr(again.args)) == (str(error), repr(error.args))
        assert again.__dict__.keys() == error.__dict__.keys()
    if error.args and isinstance(error.args[0], KafkaError):
        first, second = error.args[0], again.args[0]
        for ask in (KafkaError.code, KafkaError.str, KafkaError.fatal, KafkaError.retriable):
            assert ask(first) == ask(second)
        assert first.txn_requires_abort() == second.txn_requires_abort()

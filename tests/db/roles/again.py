"""Fixtures with which tests of the clients run once more as a role with a producer's and a consumer's rights.

A file that imports these fixtures and another file's tests runs them as they are, on PostgreSQL: limited by row-level
security to names that begin with any letter.  Without limits the other file runs them itself: `least_privilege.py`.
Topics are made, and what a test's second hand does straight to the store is done, by a coordinator.
"""

from __future__ import annotations

import os
import string
import sys

import pytest

from tests.clients import conftest, steps
from tests.clients.conftest import crew, hold_database, make_consumer, make_producer
from tests.clients.consumer.log_writer import LogWriter
from txnstore.admin import AdminClient
from txnstore.db import opening
from txnstore.db.opening import open_store
from txnstore.db.roles import grants
from txnstore.db.roles.grants import RoleScope
from txnstore.db.roles.rights import Kind
from txnstore.testing.plugin import _MADE_NOW
from txnstore.testing.store_databases import StoreDatabases

__all__ = ["clock", "crew", "hold_database", "log", "make_consumer", "make_producer", "roles", "store", "url"]

LETTERS = tuple(f"{letter}*" for letter in string.ascii_letters)
#: The roles are the server's, and outlive the databases of their tests: they are made once.
WORKER, UPKEEP = (f"txnstore_again_{os.getpid()}_{name}" for name in ("worker", "upkeep"))


@pytest.fixture(scope="module")
def roles(txnstore_postgres_server, _txnstore_postgresql_template):
    """Databases with a fresh store each, and the rights of the roles: granted once, in what they are copies of."""
    server, template = txnstore_postgres_server, f"txnstore_again_{os.getpid()}"
    for role in (WORKER, UPKEEP):
        server.create_role(role, "secret")
    server.create_database(template, template=_txnstore_postgresql_template)
    with open_store(server.url(template)) as owned:
        grants.apply(owned, grants.grant(owned, Kind.COORDINATOR, UPKEEP))
        for client in (Kind.PRODUCER, Kind.CONSUMER):
            grants.apply(owned, grants.grant(owned, client, WORKER, RoleScope(LETTERS, LETTERS, LETTERS)))
        # Tables of the application's own.
        owned.write(lambda connection: connection.exec_driver_sql(f'GRANT CREATE ON SCHEMA public TO "{WORKER}"'))
    databases = StoreDatabases(server, template, refresh=_MADE_NOW)
    yield databases
    databases.close()
    server.drop_database(template)
    for role in (WORKER, UPKEEP):
        server.drop_role(role)


@pytest.fixture
def url(request, roles, txnstore_postgres_server, monkeypatch):
    """The URL of a fresh store for a worker; whoever opens the store of a test gets it as a coordinator."""
    if "to be created" in request.node.name:
        pytest.skip("a worker makes no topics")
    name = roles.take()
    url = txnstore_postgres_server.url(name, WORKER, "secret")
    for_upkeep = txnstore_postgres_server.url(name, UPKEEP, "secret")

    def open_as_coordinator(given, **keywords):
        return opening.open_store(for_upkeep if given == url else given, **keywords)

    def administer_as_coordinator(configuration, **keywords):
        return AdminClient({**configuration, "bootstrap.servers": for_upkeep}, **keywords)

    original = sys.modules[request.function.__module__]
    for module in (conftest, steps, original):
        monkeypatch.setattr(module, "open_store", open_as_coordinator, raising=False)
        monkeypatch.setattr(module, "AdminClient", administer_as_coordinator, raising=False)
    monkeypatch.setattr("tests.db.roles.again.open_store", open_as_coordinator)
    yield url
    roles.give_back(name)


@pytest.fixture
def clock(txnstore_clock):
    """The clock that `store` goes by."""
    return txnstore_clock


@pytest.fixture
def store(url, clock):
    with open_store(url, clock=clock) as store:
        yield store


@pytest.fixture
def log(url):
    with open_store(url) as store:
        yield LogWriter(store)

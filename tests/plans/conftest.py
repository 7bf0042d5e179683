"""The big store, on each database, made once for all tests that only add a little to it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.plans.big_store import BigStore, fill
from txnstore.db.opening import open_store
from txnstore.testing.postgres_server import PostgresServer


@pytest.fixture(scope="session")
def big_on_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BigStore]:
    url = f"sqlite:///{tmp_path_factory.mktemp('big') / 'store.db'}"
    with open_store(url) as store:
        yield fill(store, url)


@pytest.fixture(scope="session")
def big_on_postgresql(txnstore_postgres_server: PostgresServer) -> Iterator[BigStore]:
    name = f"txnstore_big_{os.getpid()}"
    txnstore_postgres_server.create_database(name)
    with open_store(txnstore_postgres_server.url(name)) as store:
        yield fill(store, txnstore_postgres_server.url(name))
    txnstore_postgres_server.drop_database(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def big(request: pytest.FixtureRequest) -> BigStore:
    """The store on each database; both stay, for a run goes from one to the other with each file."""
    store: BigStore = request.getfixturevalue(f"big_on_{request.param}")
    return store

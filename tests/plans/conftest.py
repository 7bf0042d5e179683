"""The big store, on each database, made once for all tests that only add a little to it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.plans.big_store import BigStore, fill
from txnstore.db.opening import open_store
from txnstore.testing.postgres_server import PostgresServer


@pytest.fixture(scope="session", params=["sqlite", "postgresql"])
def big(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BigStore]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('big') / 'store.db'}"
        with open_store(url) as store:
            yield fill(store, url)
        return
    server: PostgresServer = request.getfixturevalue("txnstore_postgres_server")
    name = f"txnstore_big_{os.getpid()}"
    server.create_database(name)
    with open_store(server.url(name)) as store:
        yield fill(store, server.url(name))
    server.drop_database(name)

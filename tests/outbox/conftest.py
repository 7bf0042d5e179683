"""Fixtures of the outbox's tests: a caller's own connection, and what the log holds."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.engine import make_url

from tests.outbox.steps import Caller
from tests.tools.least_privilege import as_client
from txnstore.db.opening import open_store
from txnstore.db.store import Store
from txnstore.testing.postgres_server import connection_string


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """A fresh store on each database; it goes by the real clock, like those who produce."""
    with open_store(url) as found:
        yield found


@pytest.fixture
def connect(request: pytest.FixtureRequest, url: str) -> Iterator[Callable[[], Any]]:
    """Open plain connections of the caller's own, psycopg's or sqlite3's, on the store's database."""
    opened: list[Any] = []
    is_limited = request.node.get_closest_marker("takes_a_coordinator") is None
    url_of_caller = as_client(url) if is_limited else url

    def open_one() -> Any:
        opened.append(plain_connection(url_of_caller))
        return opened[-1]

    yield open_one
    for connection in opened:
        connection.close()


@pytest.fixture
def caller(connect) -> Callable[[], Caller]:
    """Make callers that insert into the outbox in plain SQL."""
    return lambda: Caller(connect())


@pytest.fixture
def engine(url):
    """The application's own SQLAlchemy engine."""
    found = create_engine(engine_url(url))
    yield found
    found.dispose()


def plain_connection(url: str) -> Any:
    if url.startswith("sqlite"):
        return sqlite3.connect(str(make_url(url).database), timeout=5)
    return psycopg.connect(connection_string(url))


def engine_url(url: str) -> str:
    return url.replace("postgresql://", "postgresql+psycopg://")

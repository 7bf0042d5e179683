"""What the tests of moving share: two databases of each pair of kinds, and a store in which all sorts of things are."""

from __future__ import annotations

import itertools
import os
import shutil

import pytest

pytest.register_assert_rewrite("tests.moving.histories")

# Only now, so that a failed assertion there shows what it saw.
from tests.moving.histories import make_history  # noqa: E402
from txnstore.db.backend import Limits  # noqa: E402
from txnstore.db.opening import open_store  # noqa: E402

_numbers = itertools.count(1)

DIRECTIONS = ("sqlite-sqlite", "sqlite-postgresql", "postgresql-sqlite", "postgresql-postgresql")
ACROSS = ("sqlite-postgresql", "postgresql-sqlite")


@pytest.fixture
def fresh_url(request, tmp_path):
    """Make a fresh store in a database of the kind that is named, and return its URL."""
    dropped = []

    def make(kind):
        if kind == "sqlite":
            path = tmp_path / f"moving-{next(_numbers)}.db"
            shutil.copyfile(request.getfixturevalue("_txnstore_sqlite_template"), path)
            return f"sqlite:///{path}"
        server = request.getfixturevalue("txnstore_postgres_server")
        name = f"txnstore_moving_{os.getpid()}_{next(_numbers)}"
        server.create_database(name, template=request.getfixturevalue("_txnstore_postgresql_template"))
        dropped.append((server, name))
        return server.url(name)

    yield make
    for server, name in dropped:
        server.drop_database(name)


@pytest.fixture(params=DIRECTIONS)
def urls(request, fresh_url):
    """A source and a target, in each of the four directions."""
    return tuple(fresh_url(kind) for kind in request.param.split("-"))


@pytest.fixture(params=ACROSS)
def urls_across(request, fresh_url):
    """A source and a target of different kinds: what depends on a kind is seen on both sides."""
    return tuple(fresh_url(kind) for kind in request.param.split("-"))


@pytest.fixture
def urls_up(fresh_url):
    """A source in a file and a target on a server, for what does not depend on the kind."""
    return fresh_url("sqlite"), fresh_url("postgresql")


@pytest.fixture
def opened():
    """Open a store as `txnstore copy` does; it is closed after the test."""
    stores = []

    def open_(url, **options):
        stores.append(open_store(url, create=False, moving=True, limits=Limits(retry_timeout_ms=2_000), **options))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


@pytest.fixture
def history(urls):
    """The source of `urls`, in which there is something of all that clients leave, and is open or half done."""
    return make_history(urls[0])

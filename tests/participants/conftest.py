"""What the tests of participants share: a server of their own, and a bank over two of its databases."""

from __future__ import annotations

from contextlib import closing

import pytest

pytest.register_assert_rewrite("tests.participants.bank", "tests.participants.dying", "tests.participants.enlisting")

# Only now, so that a failed assertion there shows what it saw.
from tests.participants.bank import DATABASES, Bank, Table, make_table  # noqa: E402
from txnstore.db.store import Store  # noqa: E402
from txnstore.testing.manual_clock import ManualClock  # noqa: E402
from txnstore.testing.private_cluster import NoServerProgramsError, PrivateCluster  # noqa: E402
from txnstore.testing.servers import told_programs  # noqa: E402


@pytest.fixture(scope="session")
def other_server():
    """A PostgreSQL server besides the one that stores live on."""
    try:
        server = PrivateCluster(fsync=False, programs=told_programs())
    except NoServerProgramsError as error:
        pytest.skip(f"needs a second PostgreSQL server: {error}")
    with server:
        for name in DATABASES:
            server.create_database(name)
            make_table(server, name)
        yield server


@pytest.fixture
def tables(other_server):
    """The accounts of both databases, empty; a stranger has something prepared in each."""
    tables = [Table(other_server.url(name)) for name in DATABASES]
    for table in tables:
        table.begin_test()
    yield tables
    for table in tables:
        table.end_test()


@pytest.fixture
def bank(shared_store: Store, shared_clock: ManualClock, tables):
    """A bank whose log is on each kind of database, and whose accounts are in two PostgreSQL databases."""
    with closing(Bank(shared_store, shared_clock, tables)) as bank:
        yield bank


@pytest.fixture
def sqlite_bank(_shared_sqlite_store: Store, shared_clock: ManualClock, tables):
    """The same with its log in SQLite, for what does not depend on the kind of the log's database."""
    with closing(Bank(_shared_sqlite_store, shared_clock, tables)) as bank:
        yield bank


@pytest.fixture(scope="session")
def small_server():
    """A database on a server with room for one prepared transaction."""
    with PrivateCluster(fsync=False, settings={"max_prepared_transactions": "1"}) as server:
        yield Table(server.url("postgres"))


@pytest.fixture(scope="session")
def no_vote_server():
    """A database on a server without prepared transactions, as PostgreSQL comes."""
    with PrivateCluster(fsync=False, settings={"max_prepared_transactions": "0"}) as server:
        yield Table(server.url("postgres"))

"""Room of a database on PostgreSQL that nothing is in: it is told of, and no table that is new, full or small is."""

from __future__ import annotations

import time
from contextlib import closing

import psycopg
import pytest
from sqlalchemy.engine import make_url

from txnstore.db.opening import open_store
from txnstore.doctor import postgresql
from txnstore.doctor.examination import examine
from txnstore.testing.postgres_server import connection_string
from txnstore.testing.store_databases import name_of_database

PATIENCE_SECONDS = 60.0
ROWS = 20_000
FILL = (
    "INSERT INTO txnstore.sink_batches"
    f" SELECT repeat('x', 100), number, 'id', 0 FROM generate_series(1, {ROWS}) AS number"
)


@pytest.fixture
def database(txnstore_postgres_server, monkeypatch):
    """A store, and a connection to its database; more than a mebibyte is much there."""
    monkeypatch.setattr(postgresql, "UNUSED_BYTES_MAX", 1 << 20)
    name = name_of_database("room")
    txnstore_postgres_server.create_database(name)
    url = txnstore_postgres_server.url(name)
    open_store(url).close()
    with closing(psycopg.connect(connection_string(url), autocommit=True)) as connection:
        yield url, connection
    txnstore_postgres_server.drop_database(name)


@pytest.fixture
def url_of_nobody(database, txnstore_postgres_server):
    """The same as a role without any rights has it."""
    role = name_of_database("room")
    txnstore_postgres_server.create_role(role, "secret")
    yield make_url(database[0])._replace(username=role, password="secret").render_as_string(hide_password=False)
    txnstore_postgres_server.drop_role(role)


def told(url):
    """Return what is told to be empty, without its figures."""
    found = [each for each in examine(url).findings if each.check == "unused-room"]
    return [each.seen.split(" takes ")[0] for each in found]


def size(connection, relation):
    return connection.execute("SELECT pg_relation_size(%s::regclass)", (relation,)).fetchone()[0]


def forget_counts(connection, table):
    """Let the server have lost what it has counted, as in a crash."""

    def count():
        # What the session has done is counted up to a second later, at a statement; PostgreSQL 14 knows no other way.
        live = "SELECT n_live_tup FROM pg_stat_all_tables WHERE relid = %s::regclass"
        return connection.execute(live, (table,)).fetchone()[0]

    deadline = time.monotonic() + PATIENCE_SECONDS
    while not count() and time.monotonic() < deadline:
        pass
    connection.execute("SELECT pg_stat_reset_single_table_counters(%s::regclass)", (table,))
    while count() and time.monotonic() < deadline:
        pass
    assert count() == 0


@pytest.mark.slow
def test_a_table_and_its_indexes_are_told_once_they_are_empty_and_until_they_are_made_anew(database, url_of_nobody):
    url, connection = database
    connection.execute(FILL)
    assert size(connection, "txnstore.sink_batches") > 2 << 20
    assert told(url) == []
    connection.execute("VACUUM ANALYZE txnstore.sink_batches")
    assert told(url) == []
    # The last row keeps the server from giving back what is before it.
    connection.execute("DELETE FROM txnstore.sink_batches WHERE batch_id % 50 > 0")
    connection.execute("VACUUM txnstore.sink_batches")
    (index,) = connection.execute(
        "SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid = 'txnstore.sink_batches'::regclass"
    ).fetchone()
    assert told(url) == ["sink_batches", f"the index {index.removeprefix('txnstore.')}"]
    # Who may not see how long rows are takes them for long ones.
    assert told(url_of_nobody) == []
    connection.execute(f"REINDEX INDEX {index}")
    assert told(url) == ["sink_batches"]
    connection.execute("VACUUM FULL txnstore.sink_batches")
    assert told(url) == []


@pytest.mark.slow
def test_what_is_stored_aside_is_told_when_it_is_empty(database):
    url, connection = database
    connection.execute("ALTER TABLE txnstore.outbox ALTER COLUMN value SET STORAGE EXTERNAL")
    connection.execute(
        "INSERT INTO txnstore.outbox (topic, value)"
        " SELECT 'orders', convert_to(repeat('x', 4000), 'UTF8') FROM generate_series(1, 500)"
    )
    connection.execute("VACUUM txnstore.outbox")
    assert told(url) == []
    connection.execute("DELETE FROM txnstore.outbox WHERE outbox_id < (SELECT max(outbox_id) FROM txnstore.outbox)")
    connection.execute("VACUUM txnstore.outbox")
    assert told(url) == ["what is stored aside of outbox"]


def test_a_table_whose_rows_the_server_has_not_counted_is_not_taken_for_empty(database):
    url, connection = database
    # Empty when it was counted, full now, and what was counted since is lost.
    connection.execute("VACUUM ANALYZE txnstore.sink_batches")
    connection.execute(FILL)
    forget_counts(connection, "txnstore.sink_batches")
    assert told(url) == []
    # Lost, but counted when it was full.
    connection.execute("VACUUM txnstore.sink_batches")
    forget_counts(connection, "txnstore.sink_batches")
    assert told(url) == []


@pytest.mark.slow
def test_a_table_that_was_filled_again_is_full_before_anybody_has_counted_its_rows(database):
    url, connection = database
    connection.execute("ALTER TABLE txnstore.sink_batches SET (autovacuum_enabled = off)")
    connection.execute(FILL)
    connection.execute("DELETE FROM txnstore.sink_batches WHERE batch_id < %s", (ROWS,))
    connection.execute("VACUUM ANALYZE txnstore.sink_batches")
    assert len(told(url)) == 2
    connection.execute(f"{FILL} WHERE number < {ROWS}")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while told(url) and time.monotonic() < deadline:
        connection.execute("SELECT 1")
    assert told(url) == []

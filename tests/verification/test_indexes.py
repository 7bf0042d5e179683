"""An index that lacks rows of its table is found: whatever reads by it would miss them."""

from __future__ import annotations

import sqlite3
from contextlib import closing, contextmanager

import psycopg
import pytest
from sqlalchemy import insert

from txnstore.db.cluster.cluster import open_cluster
from txnstore.db.opening import open_store
from txnstore.db.schema import outbox
from txnstore.log.topics import create_topic
from txnstore.testing.postgres_server import connection_string
from txnstore.verification.indexes import index_violations
from txnstore.verification.invariants import Invariant
from txnstore.verification.verify import READ_AGAIN_SECONDS, WatchState, verify, verify_store

INDEX = "outbox_refused_age"


def refuse(url):
    """Leave a row in the outbox that cannot become a record."""
    with open_store(url) as store:
        row = insert(outbox).values(topic="orders", refusal="no such topic", refused_ms=1)
        store.write(lambda connection: connection.execute(row))


def unseen_by_its_index(url):
    """Write a row while the index is not kept, as a defect of the database or the disk leaves it."""
    return unseen_in_file(url.removeprefix("sqlite:///")) if url.startswith("sqlite") else unseen_on_server(url)


@contextmanager
def unseen_in_file(path):
    words = ("refused_ms IS NOT NULL", "refused_ms < 0")

    def rewrite(old, new):
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("PRAGMA writable_schema = ON")
            change = "UPDATE sqlite_master SET sql = replace(sql, ?, ?) WHERE name = ?"
            assert connection.execute(change, (old, new, f"txnstore_{INDEX}")).rowcount == 1

    rewrite(*words)
    refuse(f"sqlite:///{path}")
    rewrite(*reversed(words))
    yield
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"REINDEX txnstore_{INDEX}")


@contextmanager
def unseen_on_server(url):
    with closing(psycopg.connect(connection_string(url), autocommit=True)) as connection:
        change = f"UPDATE pg_index SET indisready = %s WHERE indexrelid = 'txnstore.{INDEX}'::regclass"
        connection.execute(change, (False,))
        refuse(url)
        connection.execute(change, (True,))
        yield
        connection.execute(f"REINDEX INDEX txnstore.{INDEX}")


@pytest.fixture
def can_compare(url):
    """Let PostgreSQL compare indexes with tables, as SQLite always can."""
    if url.startswith("sqlite"):
        yield
        return
    with closing(psycopg.connect(connection_string(url), autocommit=True)) as connection:
        if not connection.execute("SELECT FROM pg_available_extensions WHERE name = 'amcheck'").fetchall():
            pytest.skip("this PostgreSQL comes without amcheck: scripts/postgres-versions has it")
        connection.execute("CREATE EXTENSION amcheck SCHEMA public")
        yield
        connection.execute("DROP EXTENSION amcheck")


def found(url):
    with open_store(url) as store:
        return [(each.invariant, each.seen.split(":")[0]) for each in verify_store(store)]


def test_an_index_that_lacks_a_row_is_found_until_it_is_made_anew(url, can_compare):
    with open_store(url) as store:
        store.write(lambda connection: create_topic(connection, "orders"))
    refuse(url)
    assert found(url) == []
    with unseen_by_its_index(url):
        (told,) = found(url)
        assert told[0] is Invariant.INDEXES_WHOLE
        assert told[1].startswith("outbox")
    assert found(url) == []


def test_a_watch_compares_them_once_a_day_and_those_that_are_wrong_each_time(url, can_compare):
    with open_cluster(url) as cluster:
        watch = WatchState()

        def is_found():
            return Invariant.INDEXES_WHOLE in {each.invariant for each in verify(cluster, watch=watch)}

        assert not is_found()
        with unseen_by_its_index(url):
            assert not is_found()
            watch.since_seconds -= READ_AGAIN_SECONDS
            assert is_found()
            assert is_found()
        assert not is_found()


def test_where_nobody_can_compare_them_nothing_is_said(txnstore_postgresql_url):
    refuse(txnstore_postgresql_url)
    with open_store(txnstore_postgresql_url) as store, unseen_by_its_index(txnstore_postgresql_url):
        assert index_violations(store) == []

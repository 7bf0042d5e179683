"""A table of ours that has lost a rule, to which the database held its rows, is found; what others add is not."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from functools import partial
from typing import NamedTuple

import psycopg
import pytest
from sqlalchemy import update

from txnstore.db.cluster.cluster import open_cluster
from txnstore.db.opening import open_store
from txnstore.db.postgresql.segments import SEGMENT_TABLES
from txnstore.db.schema import stores
from txnstore.errors import StoreDamaged
from txnstore.log.topics import create_topic
from txnstore.moving.move import move
from txnstore.testing.postgres_server import connection_string
from txnstore.verification.invariants import Invariant
from txnstore.verification.tables import table_violations
from txnstore.verification.verify import WatchState, verify, verify_store


class Loss(NamedTuple):
    """How a table loses something."""

    table: str
    lost: str
    clause: str
    """Where it stands in the statement that makes the table on SQLite."""

    change: str
    """What takes it away on PostgreSQL, after ALTER TABLE."""


CHECK = Loss(
    "finished_transactions",
    "CHECK finished_transactions_outcome",
    r",\s*CONSTRAINT finished_transactions_outcome CHECK \([^)]*\)",
    "DROP CONSTRAINT finished_transactions_outcome",
)
NOT_NULL = Loss("topics", "NOT NULL name", r"(?<=\bname TEXT) NOT NULL", "ALTER COLUMN name DROP NOT NULL")
LOSSES = {
    "a check": CHECK,
    "a check of the log": Loss(
        "record_batches",
        "CHECK record_batches_codec",
        r",\s*CONSTRAINT record_batches_codec CHECK \([^)]*\)",
        "DROP CONSTRAINT record_batches_codec",
    ),
    "a unique key": Loss(
        "finished_transactions",
        "UNIQUE finished_transactions_producer",
        r",\s*CONSTRAINT finished_transactions_producer UNIQUE \([^)]*\)",
        "DROP CONSTRAINT finished_transactions_producer",
    ),
    "a primary key": Loss(
        "transaction_branches",
        "PRIMARY KEY (gid)",
        r",\s*CONSTRAINT transaction_branches_pk PRIMARY KEY \(gid\)",
        "DROP CONSTRAINT transaction_branches_pk",
    ),
    "NOT NULL": NOT_NULL,
    "NOT NULL of the log": Loss(
        "record_batches", "NOT NULL crc", r"(?<=\bcrc INTEGER) NOT NULL", "ALTER COLUMN crc DROP NOT NULL"
    ),
    "a key that is given out": Loss(
        "topics", "IDENTITY topic_id", r" AUTOINCREMENT", "ALTER COLUMN topic_id DROP IDENTITY"
    ),
}


def path_of(url):
    return url.removeprefix("sqlite:///")


def alter(url, *statements):
    """Change a store on PostgreSQL as its owner does."""
    with closing(psycopg.connect(connection_string(url), autocommit=True)) as connection:
        for statement in statements:
            connection.execute(f"ALTER TABLE txnstore.{statement}")


def made_by(url, table):
    with closing(sqlite3.connect(path_of(url))) as connection:
        return connection.execute("SELECT sql FROM sqlite_master WHERE name = ?", (f"txnstore_{table}",)).fetchone()[0]


def remake(url, table, statement):
    """Make a table anew as SQLite's users have to, who cannot alter it: create, copy, drop, rename."""
    name = f"txnstore_{table}"
    with closing(sqlite3.connect(path_of(url))) as connection, connection:
        connection.execute("PRAGMA legacy_alter_table = ON")
        columns = connection.execute("SELECT name FROM pragma_table_xinfo(?) WHERE hidden = 0", (name,)).fetchall()
        kept = connection.execute("SELECT sql FROM sqlite_master WHERE tbl_name = ? AND type = 'index'", (name,))
        indexes = [sql for (sql,) in kept if sql is not None]
        listed = ", ".join(column for (column,) in columns)
        connection.execute(statement.replace(name, f"{name}_anew", 1))
        connection.execute(f"INSERT INTO {name}_anew ({listed}) SELECT {listed} FROM {name}")
        connection.execute(f"DROP TABLE {name}")
        connection.execute(f"ALTER TABLE {name}_anew RENAME TO {name}")
        for index in indexes:
            connection.execute(index)


def lose(url, loss):
    """Take it away; in a file it stays as a comment, as of somebody who has tried what happens without."""
    if not url.startswith("sqlite"):
        alter(url, f"{loss.table} {loss.change}")
        return
    statement, count = re.subn(loss.clause, lambda found: f" /*{found[0]}*/", made_by(url, loss.table))
    assert count == 1, made_by(url, loss.table)
    remake(url, loss.table, statement)


def found(url):
    """Return what tables have lost."""
    with open_store(url) as store:
        return [each.seen for each in verify_store(store) if each.invariant is Invariant.TABLES_WHOLE]


def names_of(url, table):
    return SEGMENT_TABLES if table == "record_batches" and not url.startswith("sqlite") else (table,)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_what_a_table_has_lost_is_found(url, loss):
    with open_store(url) as store:
        store.write(lambda connection: create_topic(connection, "orders"))
        assert verify_store(store) == []
    lose(url, loss)
    assert found(url) == [f"the table {name} has lost {loss.lost}" for name in names_of(url, loss.table)]


def test_all_that_a_table_has_lost_is_told_at_once(url):
    lose(url, LOSSES["a unique key"])
    lose(url, CHECK)
    assert found(url) == [f"the table {CHECK.table} has lost {CHECK.lost}, {LOSSES['a unique key'].lost}"]


def test_a_segment_without_its_key_is_found(txnstore_postgresql_url):
    alter(txnstore_postgresql_url, "record_batches_2 DROP CONSTRAINT record_batches_2_pk")
    seen = "the table record_batches_2 has lost PRIMARY KEY (partition_id, last_offset)"
    assert found(txnstore_postgresql_url) == [seen]


def test_what_rows_of_before_may_not_meet_is_found(txnstore_postgresql_url, txnstore_postgres_server):
    check = f"{CHECK.table} ADD CONSTRAINT {CHECK.lost.split()[1]} CHECK (outcome BETWEEN 0 AND 1)"
    lose(txnstore_postgresql_url, CHECK)
    alter(txnstore_postgresql_url, f"{check} NOT VALID")
    assert found(txnstore_postgresql_url) == [f"the table {CHECK.table} has lost {CHECK.lost}"]
    alter(txnstore_postgresql_url, f"{CHECK.table} VALIDATE CONSTRAINT {CHECK.lost.split()[1]}")
    assert found(txnstore_postgresql_url) == []
    if txnstore_postgres_server.version < 180_000:
        return
    lose(txnstore_postgresql_url, NOT_NULL)
    alter(txnstore_postgresql_url, "topics ADD CONSTRAINT named NOT NULL name NOT VALID")
    assert found(txnstore_postgresql_url) == [f"the table topics has lost {NOT_NULL.lost}"]
    alter(txnstore_postgresql_url, "topics VALIDATE CONSTRAINT named")
    assert found(txnstore_postgresql_url) == []


def test_what_a_table_has_besides_is_right(url):
    """A newer version may have made it."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(path_of(url))) as connection, connection:
            connection.execute("ALTER TABLE txnstore_topics ADD COLUMN note TEXT CONSTRAINT noted CHECK (note <> '')")
            connection.execute("CREATE TABLE txnstore_notes (note TEXT)")
    else:
        alter(url, "topics ADD COLUMN note TEXT CONSTRAINT noted CHECK (note <> '')", "topics ADD UNIQUE (note)")
        alter(url, "transactions ALTER COLUMN client_id SET NOT NULL")
    assert found(url) == []


def test_tables_of_another_version_are_its_own(url):
    lose(url, CHECK)
    with open_store(url) as store:
        store.write(lambda connection: connection.execute(update(stores).values(schema_version=99)))
        assert store.read(partial(table_violations, store)) == []


def test_any_role_that_opens_the_store_finds_it(txnstore_postgresql_url):
    role = "txnstore_test_tables"
    lose(txnstore_postgresql_url, CHECK)

    def look(connection) -> None:
        for statement in (
            f"CREATE ROLE {role}",
            f"GRANT USAGE ON SCHEMA txnstore TO {role}",
            f"GRANT SELECT ON txnstore.stores TO {role}",
            f"SET LOCAL ROLE {role}",
        ):
            connection.exec_driver_sql(statement)
        assert len(table_violations(store, connection)) == 1
        connection.exec_driver_sql("RESET ROLE")
        connection.exec_driver_sql(f"DROP OWNED BY {role}")
        connection.exec_driver_sql(f"DROP ROLE {role}")

    with open_store(txnstore_postgresql_url) as store:
        store.write(look)


def test_a_watch_finds_it_and_that_it_was_put_back(url):
    with open_cluster(url) as cluster:
        watch = WatchState()

        def seen():
            return [each.invariant for each in verify(cluster, watch=watch)]

        assert seen() == []
        if url.startswith("sqlite"):
            put_back = partial(remake, url, CHECK.table, made_by(url, CHECK.table))
        else:
            check = f"{CHECK.table} ADD CONSTRAINT {CHECK.lost.split()[1]} CHECK (outcome BETWEEN 0 AND 1)"
            put_back = partial(alter, url, check)
        lose(url, CHECK)
        assert seen() == [Invariant.TABLES_WHOLE]
        put_back()
        assert seen() == []


def test_a_file_is_whole_again_once_it_is_copied(txnstore_sqlite_url, tmp_path):
    for loss in LOSSES.values():
        lose(txnstore_sqlite_url, loss)
    target_url = f"sqlite:///{tmp_path / 'whole.db'}"
    with open_store(txnstore_sqlite_url, moving=True) as source, open_store(target_url, moving=True) as target:
        with pytest.raises(StoreDamaged, match="has lost"):
            move(source, target)
        move(source, target, even_if_damaged=True)
    assert found(target_url) == []

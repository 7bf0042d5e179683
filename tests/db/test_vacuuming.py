"""The room of deleted rows takes new ones: at once on SQLite, on PostgreSQL once the tables are vacuumed."""

from __future__ import annotations

import logging
from contextlib import closing

import psycopg
import pytest

from tests.tools.counted import count_now
from tests.tools.log_records import records_of_this_thread
from txnstore.db.opening import open_store
from txnstore.db.postgresql import vacuuming
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.deleting import HIGH_WATERMARK, delete_records
from txnstore.log.topics import create_topic
from txnstore.model import Record
from txnstore.testing.postgres_server import connection_string

VALUE = b"x" * 100_000
BATCH = encode([Record(VALUE)])
#: What one round writes and deletes.
BATCHES = 10


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Little counts as much."""
    monkeypatch.setattr(vacuuming, "DEAD_BYTES_DUE", 64 * 1024)


@pytest.fixture
def partition_id(txnstore_store):
    return make_partition(txnstore_store)


@pytest.fixture
def postgresql(txnstore_postgresql_url):
    """A store on PostgreSQL with a partition of which everything is deleted, and a connection beside it."""
    with (
        open_store(txnstore_postgresql_url) as store,
        closing(psycopg.connect(connection_string(txnstore_postgresql_url), autocommit=True)) as beside,
    ):
        yield store, make_partition(store), beside


def make_partition(store):
    (partition_id,) = store.write(lambda connection: create_topic(connection, "orders")).partition_ids
    if store.backend.name == "postgresql":
        # Nobody else is to do what is tested here.
        off = "ALTER TABLE txnstore.record_batches_1 SET (autovacuum_enabled = off, toast.autovacuum_enabled = off)"
        store.write(lambda connection: connection.exec_driver_sql(off))
    return partition_id


def write_and_delete(store, partition_id):
    for _ in range(BATCHES):
        store.write(lambda connection: append(connection, [Append(partition_id, BATCH)]))
    delete_records(store, partition_id, HIGH_WATERMARK)
    if store.backend.name == "postgresql":
        # A session tells of its work a little later, unless it is asked to.
        count_now(store)


def size_bytes(store):
    if store.backend.name == "sqlite":
        return store.read(lambda c: c.exec_driver_sql("PRAGMA page_count").scalar()) * 4096
    total = "SELECT pg_total_relation_size('txnstore.record_batches_1')"
    return store.read(lambda c: c.exec_driver_sql(total).scalar())


def test_what_is_deleted_makes_room_for_what_is_written(txnstore_store, partition_id):
    sizes = []
    for _ in range(4):
        write_and_delete(txnstore_store, partition_id)
        assert txnstore_store.reclaim() == (txnstore_store.backend.name == "postgresql")
        sizes.append(size_bytes(txnstore_store))
    assert max(sizes) < min(sizes) + BATCHES * len(VALUE) // 2


def test_nothing_is_vacuumed_that_has_little_to_free(postgresql, monkeypatch):
    store, partition_id, _ = postgresql
    monkeypatch.setattr(vacuuming, "DEAD_BYTES_DUE", 8 * 1024 * 1024)
    write_and_delete(store, partition_id)
    assert store.reclaim() == 0
    monkeypatch.setattr(vacuuming, "DEAD_BYTES_DUE", 64 * 1024)
    monkeypatch.setattr(vacuuming, "_TABLE_BYTES_MAX", 64 * 1024)
    assert store.reclaim() == 0
    monkeypatch.undo()
    monkeypatch.setattr(vacuuming, "DEAD_BYTES_DUE", 64 * 1024)
    assert store.reclaim() == 1
    assert store.reclaim() == 0


def test_a_table_with_much_that_lives_waits_until_a_good_part_is_dead(postgresql):
    store, partition_id, _ = postgresql
    (other,) = store.write(lambda connection: create_topic(connection, "kept")).partition_ids
    for _ in range(10 * BATCHES):
        store.write(lambda connection: append(connection, [Append(other, BATCH)]))
    write_and_delete(store, partition_id)
    assert store.reclaim() == 0
    write_and_delete(store, partition_id)
    assert store.reclaim() == 1


def test_what_an_old_snapshot_holds_is_tried_again_later(postgresql):
    store, partition_id, beside = postgresql
    beside.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    beside.execute("SELECT 1 FROM pg_class LIMIT 1")
    write_and_delete(store, partition_id)
    before = size_bytes(store)
    assert [store.reclaim(), store.reclaim()] == [1, 0]
    beside.execute("COMMIT")
    assert store.reclaim() == 0
    # Once the time is up.
    vacuuming._paused.clear()
    assert [store.reclaim(), store.reclaim()] == [1, 0]
    write_and_delete(store, partition_id)
    assert size_bytes(store) < before + BATCHES * len(VALUE) // 2


def test_a_table_that_somebody_has_locked_is_not_waited_for(postgresql, monkeypatch, caplog):
    store, partition_id, beside = postgresql
    monkeypatch.setattr(vacuuming, "_SECONDS_MAX", 5.0)
    write_and_delete(store, partition_id)
    beside.execute("BEGIN")
    beside.execute("LOCK TABLE txnstore.record_batches_1 IN SHARE UPDATE EXCLUSIVE MODE")
    with caplog.at_level(logging.INFO):
        assert [store.reclaim(), store.reclaim()] == [1, 0]
    assert "takes too long" not in caplog.text


def test_a_table_that_takes_too_long_is_left_to_autovacuum(postgresql, monkeypatch, caplog):
    store, partition_id, beside = postgresql
    write_and_delete(store, partition_id)
    name = beside.info.dbname
    beside.execute(f"ALTER DATABASE {name} SET vacuum_cost_delay = 100")
    beside.execute(f"ALTER DATABASE {name} SET vacuum_cost_limit = 1")
    monkeypatch.setattr(vacuuming, "_SECONDS_MAX", 0.01)
    with caplog.at_level(logging.INFO):
        assert [store.reclaim(), store.reclaim()] == [1, 0]
    assert "record_batches_1 takes too long" in caplog.text


def test_who_does_not_own_the_tables_leaves_them_alone(txnstore_postgres_server, postgresql, new_role, granted, caplog):
    store, partition_id, beside = postgresql
    write_and_delete(store, partition_id)
    name, role = beside.info.dbname, new_role()
    granted(name, role, "GRANT USAGE ON SCHEMA txnstore TO {role}")
    granted(name, role, "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA txnstore TO {role}")
    with open_store(txnstore_postgres_server.url(name, role, "secret")) as stranger:
        assert stranger.reclaim() == 0
    assert not records_of_this_thread(caplog)
    assert store.reclaim() == 1
    granted(name, role, "DROP OWNED BY {role}")

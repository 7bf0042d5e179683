"""What `migrate --sql` prints: psql and sqlite3 make the same tables of it, and a store that works."""

from __future__ import annotations

import subprocess

import psycopg
import pytest

from tests.tools.later_versions import THIRD_LATER, elsewhere
from txnstore.db import migrating, opening
from txnstore.db.opening import connect_store, open_store
from txnstore.db.schema import SCHEMA_VERSION
from txnstore.errors import SchemaOutdated
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.topics import create_topic
from txnstore.model import Record
from txnstore.testing.postgres_server import connection_string


def kind_of(url):
    return "sqlite" if url.startswith("sqlite") else "postgresql"


def offsets_of_an_append(store):
    topic = store.write(lambda connection: create_topic(connection, "orders"))
    batch = encode([Record(b"a"), Record(b"b")])
    (appended,) = store.write(lambda connection: append(connection, [Append(topic.partition_ids[0], batch)]))
    return appended.base_offset, appended.last_offset


@pytest.fixture
def printed(txnstore_empty_url, sql_program):
    """An empty database after its own program has run the printed SQL."""
    sql_program(txnstore_empty_url, migrating.upgrade_sql(kind=kind_of(txnstore_empty_url)))
    return txnstore_empty_url


def test_it_makes_the_same_catalogue(printed, catalogue, request):
    with connect_store(printed) as by_program:
        opened = request.getfixturevalue(f"txnstore_{kind_of(printed)}_store")
        assert catalogue(by_program) == catalogue(opened)


def test_the_first_who_opens_what_it_made_gives_it_its_store(printed):
    with connect_store(printed) as store:
        assert opening.look(store).found is opening.Found.TABLES
    with open_store(printed, create=False) as store, open_store(printed) as again:
        assert len(store.store_uuid) == 36
        assert again.store_uuid == store.store_uuid
        assert offsets_of_an_append(again) == (0, 1)


def test_its_store_begins_to_number_its_partitions_anywhere(txnstore_empty_url, sql_program, monkeypatch):
    """As one that is made by opening it: clients of another store that was there know partitions by other numbers."""
    monkeypatch.setattr(opening, "FIRST_PARTITION_ID_MAX", (1 << 31) - 1)
    sql_program(txnstore_empty_url, migrating.upgrade_sql(kind=kind_of(txnstore_empty_url)))
    with open_store(txnstore_empty_url) as store:
        topic = store.write(lambda connection: create_topic(connection, "orders", partition_count=2))
    first, second = topic.partition_ids
    assert 1 < first < 1 << 31
    assert second == first + 1


def test_migrate_gives_it_its_store_too(printed):
    with connect_store(printed) as store:
        opening.upgrade(store)
        assert opening.look(store).found is opening.Found.STORE


def test_it_changes_nothing_when_it_is_run_again(printed, sql_program):
    with open_store(printed) as store:
        assert offsets_of_an_append(store) == (0, 1)
    with pytest.raises(AssertionError, match="already exists"):
        sql_program(printed, migrating.upgrade_sql(kind=kind_of(printed)))
    with open_store(printed) as again:
        assert again.store_uuid == store.store_uuid


def test_from_the_version_there_is_nothing_is_printed_to_do(url, sql_program, catalogue, store):
    before = catalogue(store)
    nothing = migrating.upgrade_sql(kind=kind_of(url), from_version=SCHEMA_VERSION)
    assert "CREATE TABLE" not in nothing
    sql_program(url, nothing)
    assert catalogue(store) == before


def test_from_an_older_version_it_does_what_an_upgrade_does(store, url, sql_program, catalogue, code_of_version):
    offsets_of_an_append(store)
    (place, options) = elsewhere(url)
    open_store(place, **options).close()
    code_of_version(THIRD_LATER)
    printed = migrating.upgrade_sql(kind=kind_of(url), from_version=SCHEMA_VERSION)
    assert "CREATE VIEW" not in printed
    sql_program(url, printed)
    with open_store(url) as by_program, connect_store(place, **options) as by_code:
        assert by_program.store_uuid == store.store_uuid
        opening.upgrade(by_code)
        assert catalogue(by_program) == catalogue(by_code)


def test_it_is_the_same_every_time(txnstore_empty_url):
    kind = kind_of(txnstore_empty_url)
    assert migrating.upgrade_sql(kind=kind) == migrating.upgrade_sql(kind=kind)


def test_a_schema_of_another_name_stands_in_all_of_it(txnstore_postgres_server, sql_program):
    text = migrating.upgrade_sql(kind="postgresql", schema="Shop_2")
    assert "txnstore." not in text
    txnstore_postgres_server.create_database("printed_schema")
    url = txnstore_postgres_server.url("printed_schema")
    try:
        sql_program(url, text)
        with open_store(url, schema="Shop_2", create=False) as store:
            assert offsets_of_an_append(store) == (0, 1)
        with pytest.raises(SchemaOutdated):
            open_store(url, create=False)
    finally:
        txnstore_postgres_server.drop_database("printed_schema")


def test_a_role_that_owns_only_its_schema_can_run_it(txnstore_postgres_server, sql_program):
    server = txnstore_postgres_server
    server.create_database("printed_owned")
    server.create_role("schema_owner", "secret")
    try:
        with server.connect("printed_owned") as connection:
            connection.execute("REVOKE CREATE ON DATABASE printed_owned FROM PUBLIC")
            connection.execute("CREATE SCHEMA txnstore AUTHORIZATION schema_owner")
        url = server.url("printed_owned", "schema_owner", "secret")
        sql_program(url, migrating.upgrade_sql(kind="postgresql"))
        with open_store(url) as store:
            assert offsets_of_an_append(store) == (0, 1)
    finally:
        server.drop_database("printed_owned")
        server.drop_role("schema_owner")


def test_what_stands_in_the_search_path_of_who_runs_it_has_no_part_in_it(
    txnstore_postgres_server, sql_program, txnstore_postgresql_store, catalogue
):
    server = txnstore_postgres_server
    server.create_database("printed_path")
    url = server.url("printed_path")
    try:
        with psycopg.connect(connection_string(url), autocommit=True) as connection:
            connection.execute("CREATE SCHEMA evil")
            connection.execute(
                "CREATE FUNCTION evil.substr(bytea, integer, integer) RETURNS bytea LANGUAGE sql"
                " AS $$ SELECT 'evil'::bytea $$"
            )
            connection.execute("CREATE FUNCTION evil.length(text) RETURNS integer LANGUAGE sql AS 'SELECT 7'")
            connection.execute("ALTER DATABASE printed_path SET search_path = evil, pg_catalog")
        sql_program(url, migrating.upgrade_sql(kind="postgresql"))
        with connect_store(url) as store:
            assert catalogue(store) == catalogue(txnstore_postgresql_store)
    finally:
        server.drop_database("printed_path")


def test_it_is_one_database_transaction(txnstore_empty_url, sql_program):
    text = migrating.upgrade_sql(kind=kind_of(txnstore_empty_url))
    assert (text.count("BEGIN;\n"), text.count("COMMIT;\n")) == (1, 1)
    broken = text.replace("COMMIT;", "INSERT INTO no_such_table VALUES (1);\nCOMMIT;")
    with pytest.raises((AssertionError, subprocess.SubprocessError)):
        sql_program(txnstore_empty_url, broken)
    with connect_store(txnstore_empty_url) as store:
        assert opening.look(store).found is opening.Found.NOTHING

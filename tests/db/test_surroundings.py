"""Settings of servers, databases and roles that others chose: they change nothing, or are refused in plain words."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from txnstore import Producer
from txnstore.db.backend import Limits
from txnstore.db.opening import open_store
from txnstore.db.postgresql.backend import connect_driver
from txnstore.db.url import parse_url
from txnstore.errors import InvalidUrl
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.log.fetch import Room, fetch
from txnstore.log.news import read_news
from txnstore.log.topics import create_topic
from txnstore.model import IsolationLevel, Record
from txnstore.testing.postgres_server import connection_string
from txnstore.testing.private_cluster import PrivateCluster
from txnstore.transactions.coordinator import TransactionCoordinator

UTF8 = "TEMPLATE template0 ENCODING 'UTF8'"


SETTINGS = {
    "how text and numbers are written": {
        "standard_conforming_strings": "off",
        "escape_string_warning": "off",
        "backslash_quote": "on",
        "bytea_output": "'escape'",
        "extra_float_digits": "-15",
        "client_encoding": "'LATIN1'",
        "DateStyle": "'German'",
        "IntervalStyle": "'iso_8601'",
        "TimeZone": "'Asia/Kathmandu'",
        "quote_all_identifiers": "on",
        "array_nulls": "off",
        "transform_null_equals": "on",
    },
    "how transactions run": {
        "default_transaction_isolation": "'serializable'",
        "default_transaction_deferrable": "on",
        "statement_timeout": "'50ms'",
        "lock_timeout": "'50ms'",
        "idle_in_transaction_session_timeout": "'300ms'",
        "row_security": "off",
    },
    "how queries are planned": {
        "default_transaction_isolation": "'repeatable read'",
        "enable_indexscan": "off",
        "enable_seqscan": "off",
        "jit_above_cost": "0",
        "plan_cache_mode": "force_generic_plan",
        "default_toast_compression": "pglz",
        "search_path": "''",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings_of_the_database_change_nothing(settings, new_database, txnstore_postgres_server, client_path):
    name = new_database(**settings)
    with open_store(txnstore_postgres_server.url(name)) as store:
        partition_id = client_path(store)
        assert partition_id > 0
        wide_path(store)
        view = 'SELECT key, value, headers FROM txnstore.records WHERE partition = 0 ORDER BY "offset"'
        first = store.read(lambda connection: connection.exec_driver_sql(view).all())[0]
        assert bytes(first.value) == b"\x00\xff plain"


def wide_path(store):
    """Commit and abort a transaction over so many partitions that rows are sent as arrays."""
    partition_ids = store.write(lambda connection: create_topic(connection, "wide", partition_count=25)).partition_ids
    coordinator = TransactionCoordinator(store)
    producer = coordinator.init_producer_id("wide").identity
    for commit in (True, False):
        batch = encode([Record(b"wide")], producer=producer, base_sequence=0, is_transactional=True)
        coordinator.append("wide", producer, [Append(partition_id, batch) for partition_id in partition_ids])
        producer = coordinator.end_transaction("wide", producer, commit=commit).identity
    pages = store.read(
        lambda connection: fetch(connection, dict.fromkeys(partition_ids, 0), isolation=IsolationLevel.READ_COMMITTED)
    )
    found = {
        partition_id: [record.value for batch in page.batches for record in batch.records()]
        for partition_id, page in pages.items()
    }
    assert found == {partition_id: [b"wide"] for partition_id in partition_ids}


@pytest.mark.slow
def test_a_callers_connection_commits_a_wide_transaction_whatever_its_setting(new_database, txnstore_postgres_server):
    url = txnstore_postgres_server.url(new_database(array_nulls="off"))
    producer = Producer({"bootstrap.servers": url, "transactional.id": "wide"})
    engine = create_engine(url)
    try:
        producer.init_transactions(30)
        with open_store(url) as store:
            store.write(lambda connection: create_topic(connection, "wide", partition_count=25))
        with engine.connect() as own:
            for flushes in (False, True):
                producer.begin_transaction()
                producer.enlist(own)
                for partition in range(25):
                    producer.produce("wide", b"wide", partition=partition)
                if flushes:
                    producer.flush(30)
                assert own.execute(text("SHOW array_nulls")).scalar() == "off"
                producer.commit_transaction(30)
                assert own.execute(text("SHOW array_nulls")).scalar() == "off"
                own.rollback()
            assert own.execute(text("SELECT count(*) FROM txnstore.records")).scalar() == 50
    finally:
        producer.close()
        engine.dispose()


@pytest.mark.slow
def test_settings_of_the_role_change_nothing(new_database, new_role, granted, txnstore_postgres_server, client_path):
    name = new_database()
    role = new_role(statement_timeout="'50ms'", default_transaction_isolation="'serializable'", search_path="nowhere")
    granted(name, role, f"GRANT CREATE ON DATABASE {name} TO {{role}}")
    with open_store(txnstore_postgres_server.url(name, role, "secret")) as store:
        client_path(store)
        # Longer than the role's own limit.
        store.read(lambda connection: connection.exec_driver_sql("SELECT pg_sleep(0.2)"))


@pytest.mark.slow
@pytest.mark.parametrize("strings", ["on", "off"])
def test_what_sqlalchemy_would_ask_a_new_connection_it_has_been_told_already(
    strings, new_database, txnstore_postgres_server
):
    name = new_database(standard_conforming_strings=strings)
    with open_store(txnstore_postgres_server.url(name)) as store:
        dialect: Any = store.engine.dialect
        known = dialect.server_version_info, dialect._backslash_escapes
        asked = store.read(
            lambda connection: (
                PGDialect_psycopg._get_server_version_info(dialect, connection),
                PGDialect_psycopg._set_backslash_escapes(dialect, connection) or dialect._backslash_escapes,
            )
        )
        assert known == asked == (divmod(txnstore_postgres_server.version, 10_000), strings == "off")


def test_what_the_url_sets_changes_nothing(txnstore_postgresql_url, client_path):
    options = "options=-c%20default_transaction_isolation%3Dserializable%20-c%20search_path%3Dpublic"
    with open_store(f"{txnstore_postgresql_url}?{options}&application_name=shop&client_encoding=LATIN1") as store:
        client_path(store)


def test_the_limits_hold_within_every_database_transaction(txnstore_postgresql_url):
    limits = Limits(statement_timeout_ms=1234, lock_timeout_ms=567, idle_timeout_ms=8910)
    shown = (
        "SELECT current_setting('statement_timeout'), current_setting('lock_timeout'),"
        " current_setting('idle_in_transaction_session_timeout'), current_setting('search_path')"
    )
    with open_store(txnstore_postgresql_url, limits=limits) as store:
        for run in (store.read, store.write):
            row = run(lambda connection: connection.exec_driver_sql(shown).one())
            assert tuple(row) == ("1234ms", "567ms", "8910ms", "pg_catalog, pg_temp")


PLANTED = """
CREATE SCHEMA evil;
CREATE TABLE evil.caught (what text);
CREATE TABLE evil.stores (trap integer);
CREATE TABLE evil.topics (trap integer);
CREATE VIEW evil.pg_class AS SELECT 'nothing'::name AS relname;
CREATE VIEW evil.pg_namespace AS SELECT 'nothing'::name AS nspname;
CREATE VIEW evil.pg_type AS SELECT 'nothing'::name AS typname;
GRANT ALL ON SCHEMA evil TO PUBLIC;
GRANT ALL ON ALL TABLES IN SCHEMA evil TO PUBLIC;
"""
TRAP = """
CREATE FUNCTION evil.{name}({arguments}) RETURNS {result} LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN INSERT INTO evil.caught VALUES ('{name}'); RETURN {answer}; END $$
"""
TRAPS = [
    ("version", "", "text", "'PostgreSQL 9.0'"),
    ("current_schema", "", "name", "'evil'"),
    ("clock_timestamp", "", "timestamptz", "to_timestamp(0)"),
    ("now", "", "timestamptz", "to_timestamp(0)"),
    ("lower", "text", "text", "'evil'"),
    ("length", "text", "integer", "7"),
    ("replace", "text, text, text", "text", "'evil'"),
    ("min", "bigint[]", "bigint", "0"),
    ("substr", "bytea, integer, integer", "bytea", "''::bytea"),
    ("get_byte", "bytea, integer", "integer", "7"),
    ("translate", "text, text, text", "text", "'{{7}}'"),
    ("coalesced", "bigint, bigint", "bigint", "0"),
    ("date_part", "text, timestamptz", "double precision", "0"),
    ("extract", "text, timestamptz", "numeric", "0"),
    ("equals", "bigint, integer", "boolean", "false"),
    ("text_equals", "text, text", "boolean", "false"),
]


@pytest.mark.slow
def test_what_strangers_planted_in_the_search_path_is_never_called(
    new_database, new_role, granted, txnstore_postgres_server, client_path
):
    """CVE-2018-1058: functions and operators that fit better than those of PostgreSQL, found first."""
    name = new_database()
    role = new_role(search_path="evil, pg_catalog, public")
    with psycopg.connect(connection_string(txnstore_postgres_server.url(name)), autocommit=True) as owner:
        owner.execute(PLANTED)
        for function, arguments, result, answer in TRAPS:
            owner.execute(TRAP.format(name=function, arguments=arguments, result=result, answer=answer))
        owner.execute("CREATE OPERATOR evil.= (FUNCTION = evil.equals, LEFTARG = bigint, RIGHTARG = integer)")
        owner.execute("CREATE OPERATOR evil.= (FUNCTION = evil.text_equals, LEFTARG = text, RIGHTARG = text)")
        granted(name, role, f"GRANT CREATE ON DATABASE {name} TO {{role}}")
        url = txnstore_postgres_server.url(name, role, "secret")
        with open_store(url) as store:
            client_path(store)
            with closing(store.waiter()) as waiter:
                partition_id = client_path(store, "more")
                assert waiter.wait(60_000)
                assert read_news(waiter.rows, {partition_id: 0}, IsolationLevel.READ_COMMITTED, Room(100, 100_000))
        assert owner.execute("SELECT * FROM evil.caught").fetchall() == []
        # The traps do work: a client that trusts its search path falls into one.
        with connect_driver(parse_url(url)) as careless:
            careless.execute("SELECT current_schema(), 1::bigint = 1")
        assert owner.execute("SELECT count(*) FROM evil.caught").fetchone() == (2,)


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1", "EUC_JP"])
def test_a_database_of_an_encoding_that_does_not_hold_all_text_is_refused(
    encoding, new_database, txnstore_postgres_server
):
    name = new_database(f"TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'")
    with pytest.raises(InvalidUrl, match=f"encoding {encoding}.*ENCODING 'UTF8'"):
        open_store(txnstore_postgres_server.url(name))
    with psycopg.connect(connection_string(txnstore_postgres_server.url(name))) as connection:
        assert connection.execute("SELECT to_regnamespace('txnstore')").fetchone() == (None,)


@pytest.mark.slow
@pytest.mark.parametrize("collation", ["C", "C.UTF-8", "builtin"])
def test_the_collation_of_the_database_changes_nothing(collation, new_database, txnstore_postgres_server, client_path):
    if collation == "builtin":
        if txnstore_postgres_server.version < 170_000:
            pytest.skip("needs PostgreSQL 17 for a collation that comes with it")
        options = f"{UTF8} LOCALE_PROVIDER builtin BUILTIN_LOCALE 'C.UTF-8' LOCALE 'C'"
    else:
        options = f"{UTF8} LC_COLLATE '{collation}' LC_CTYPE '{collation}'"
    try:
        name = new_database(options)
    except psycopg.errors.WrongObjectType:
        pytest.skip(f"needs the locale {collation} on the server")
    with open_store(txnstore_postgres_server.url(name)) as store:
        client_path(store)


@pytest.mark.slow
def test_an_older_server_runs_the_whole_path(client_path, sql_program):
    """The newest version is that of all other tests."""
    settings = {"max_prepared_transactions": "0", "wal_level": "minimal", "max_wal_senders": "0"}
    with PrivateCluster(fsync=False, major_version=16, settings=settings) as cluster:
        cluster.create_database("shop")
        with open_store(cluster.url("shop")) as store:
            client_path(store)
        assert sql_program(cluster.url("shop"), "SELECT count(*) FROM txnstore.records") == "5\n"


@pytest.mark.parametrize("told", [130_022, 90_600])
def test_a_server_that_is_too_old_is_refused(told, txnstore_postgresql_url, monkeypatch):
    monkeypatch.setattr("psycopg.ConnectionInfo.server_version", told)
    with pytest.raises(InvalidUrl, match=f"PostgreSQL {told // 10_000}; txnstore needs 14 or newer"):
        open_store(txnstore_postgresql_url)

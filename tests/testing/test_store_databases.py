"""Tests of the databases that tests use one after the other: nobody can tell one that was used from a new one."""

from __future__ import annotations

import os
import subprocess
import sys

import psycopg
import pytest
from psycopg import sql

from txnstore import Consumer, Producer
from txnstore.testing.private_cluster import NoServerProgramsError, PrivateCluster
from txnstore.testing.store_databases import StoreDatabases

#: PostgreSQL cuts what is longer, silently.
NAME_BYTES_MAX = 63
TABLES = (
    "SELECT relname FROM pg_class WHERE relnamespace = 'txnstore'::regnamespace AND relkind = '{}' ORDER BY relname"
)


@pytest.fixture
def server(txnstore_postgres_server):
    return txnstore_postgres_server


@pytest.fixture
def template(request):
    name: str = request.getfixturevalue("_txnstore_postgresql_template")
    return name


@pytest.fixture
def databases(server, template):
    databases = StoreDatabases(server, template)
    yield databases
    databases.close()


def oid_of(server, name):
    with server.connect() as connection:
        found = connection.execute("SELECT oid FROM pg_database WHERE datname = %s", [name]).fetchone()
    return None if found is None else found[0]


def content_of(server, name):
    """Return all rows and the states of the sequences, and what was counted since the counters were reset."""

    def select(connection, what, table):
        return connection.execute(sql.SQL(f"SELECT {what} FROM txnstore.{{}}").format(sql.Identifier(table))).fetchall()

    with server.connect(name) as connection:
        tables, sequences = ([row[0] for row in connection.execute(TABLES.format(kind))] for kind in "rS")
        rows = {table: sorted(map(repr, select(connection, "*", table))) for table in tables}
        states = {sequence: select(connection, "last_value, is_called", sequence) for sequence in sequences}
        counted = connection.execute(
            "SELECT sum(n_tup_ins + n_tup_upd + n_tup_del) FROM pg_stat_user_tables"
        ).fetchone()
    return rows, states, counted


def use(server, name):
    """Do with a store what writes to many of its tables, and takes numbers from its sequences."""
    url = server.url(name)
    with Producer({"bootstrap.servers": url, "transactional.id": "writer"}) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.produce("orders", b"one")
        producer.commit_transaction()
    with Consumer({"bootstrap.servers": url, "group.id": "readers", "auto.offset.reset": "earliest"}) as consumer:
        consumer.subscribe(["orders"])
        assert [message.value() for message in consumer.consume(1, timeout=60)] == [b"one"]
        consumer.commit(asynchronous=False)


def used_again(databases, server, change):
    """Let a database be changed and come back; return its old name, its new one, and whether it is the same one."""
    other, used = databases.take(), databases.take()
    oid = oid_of(server, used)
    change(used)
    databases.give_back(used)
    databases.give_back(other)
    again = databases.take()
    return used, again, oid == oid_of(server, again)


@pytest.mark.slow
def test_a_database_comes_back_as_new_and_under_another_name(databases, server):
    new = databases.take()
    used, again, is_same = used_again(databases, server, lambda name: use(server, name))
    assert is_same
    assert oid_of(server, used) is None
    assert content_of(server, again) == content_of(server, new)
    use(server, again)
    assert content_of(server, again) != content_of(server, new)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE public.others (number integer)",
        "CREATE TEMPORARY TABLE others (number integer)",
        "DROP INDEX txnstore.producer_states_age",
        "ALTER TABLE txnstore.topics SET (fillfactor = 50)",
        "ALTER SEQUENCE txnstore.topics_topic_id_seq INCREMENT BY 5",
        "ALTER DEFAULT PRIVILEGES GRANT SELECT ON TABLES TO PUBLIC",
        "COMMENT ON TABLE txnstore.topics IS 'changed'",
        "GRANT SELECT ON txnstore.topics TO PUBLIC",
        "REVOKE EXECUTE ON FUNCTION pg_sleep(double precision) FROM PUBLIC",
        "TRUNCATE txnstore.topics",
        "ANALYZE txnstore.stores",
        "INSERT INTO txnstore.store_configs SELECT 'n', string_agg(md5(n::text), '') FROM generate_series(1, 9999) n",
        "INSERT INTO txnstore.store_configs SELECT 'name' || n, repeat('x', 900) FROM generate_series(1, 99) n",
        "SELECT pg_stat_reset()",
        "SELECT lo_create(0)",
        "ALTER DATABASE {name} SET work_mem = '1MB'",
        "ALTER DATABASE {name} CONNECTION LIMIT 9",
        "GRANT CREATE ON DATABASE {name} TO PUBLIC",
        "COMMENT ON DATABASE {name} IS 'changed'",
    ],
)
def test_what_shows_that_it_was_used_is_not_used_again(databases, server, statement):
    def change(name):
        with server.connect(name) as connection:
            connection.execute(statement.format(name=name))

    used, again, is_same = used_again(databases, server, change)
    assert not is_same
    assert oid_of(server, used) is None
    assert content_of(server, again) == content_of(server, databases.take())


def test_what_a_role_or_a_prepared_transaction_holds_goes_at_once(databases, server):
    role = f"txnstore_test_holder_{os.getpid()}"
    server.create_role(role, "secret")
    held, prepared = databases.take(), databases.take()
    try:
        with server.connect(held) as connection:
            connection.execute(sql.SQL("GRANT USAGE ON SCHEMA txnstore TO {}").format(sql.Identifier(role)))
        databases.give_back(held)
    finally:
        server.drop_role(role)
    with server.connect(prepared) as connection:
        connection.execute(f"BEGIN; DELETE FROM txnstore.topics; PREPARE TRANSACTION '{prepared}'")
    databases.give_back(prepared)
    assert oid_of(server, held) is oid_of(server, prepared) is None


def test_sessions_end_when_it_is_given_back_and_when_it_is_taken_again(databases, server):
    other, used = databases.take(), databases.take()
    oid = oid_of(server, used)
    before = server.connect(used)
    databases.give_back(used)
    databases.give_back(other)
    with pytest.raises(psycopg.OperationalError):
        before.execute("SELECT 1")
    later = server.connect(used)
    assert oid_of(server, databases.take()) == oid
    with pytest.raises(psycopg.OperationalError):
        later.execute("SELECT 1")
    before.close()
    later.close()


def test_all_are_dropped_in_the_end(server, template):
    databases = StoreDatabases(server, template)
    given_back, taken = databases.take(), databases.take()
    databases.give_back(given_back)
    databases.close()
    assert oid_of(server, given_back) is oid_of(server, taken) is None


@pytest.mark.slow
def test_after_a_crash_of_the_server_nothing_is_known_of_a_database():
    """It has forgotten what it counted."""
    try:
        server = PrivateCluster(fsync=False)
    except NoServerProgramsError as error:
        pytest.skip(str(error))
    with server:
        server.create_database("template")
        with server.connect("template") as connection:
            connection.execute("CREATE SCHEMA txnstore CREATE TABLE topics (number integer)")
        databases = StoreDatabases(server, "template")

        def change(name):
            with server.connect(name) as connection:
                connection.execute("CREATE TABLE txnstore.others (number integer)")
            server.kill()
            server.start()

        used, again, is_same = used_again(databases, server, change)
        assert not is_same
        assert oid_of(server, used) is None
        assert content_of(server, again) == content_of(server, databases.take())
        databases.close()


def test_each_has_run_the_statement_that_renews_it(server, template):
    renew = "UPDATE txnstore.stores SET created_ms = created_ms + 1"
    databases = StoreDatabases(server, template, refresh=renew)

    def age(name):
        with server.connect(name) as connection:
            return connection.execute("SELECT created_ms FROM txnstore.stores").fetchall()

    ((template_ms,),) = age(template)
    names = [databases.take() for _ in range(3)]
    oids = {oid_of(server, name) for name in names}
    for _ in range(2):
        assert [age(name) for name in names] == [[(template_ms + 1,)]] * 3
        for name in names:
            databases.give_back(name)
        names = [databases.take() for _ in range(3)]
    # Not only those that were made anew.
    assert oids & {oid_of(server, name) for name in names}
    databases.close()


@pytest.mark.slow
def test_two_runs_of_the_same_process_id_meet_on_no_name():
    """In containers every run has the same one; what a killed run has left is in nobody's way."""
    program = (
        "import os; os.getpid = lambda: 7\n"
        "from txnstore.testing import plugin, store_databases\n"
        "print(plugin._TEMPLATE, store_databases.name_of_database('test'))"
    )
    first, second = (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    )
    assert len({*first, *second}) == len(first) + len(second) == 4
    assert all(len(name) <= NAME_BYTES_MAX for name in (*first, *second))

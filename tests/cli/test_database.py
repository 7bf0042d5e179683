"""`txnstore migrate` makes the tables, brings them up to date, or prints how; `adopt` gives copies an identity."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from sqlalchemy.engine import make_url

from tests.copies import copy_file
from tests.tools.silent_port import silent_port
from txnstore.cli.options import about
from txnstore.db import migrating, opening
from txnstore.db.backend import Limits
from txnstore.db.identity import check_original
from txnstore.db.opening import connect_store, open_store
from txnstore.db.schema import SCHEMA_VERSION
from txnstore.errors import SchemaTooNew
from txnstore.log.topics import create_topic, list_topics


def test_migrate_makes_the_tables_once(txnstore, txnstore_empty_url):
    first = txnstore("migrate", txnstore_empty_url)
    assert first.code == 0
    assert first.out.endswith(f"the tables of version {SCHEMA_VERSION} were made\n")
    with open_store(txnstore_empty_url, create=False) as store:
        store.write(lambda connection: create_topic(connection, "orders"))
    second = txnstore("migrate", txnstore_empty_url)
    assert (second.code, second.err) == (0, "")
    assert second.out.endswith("were there already\n")
    with open_store(txnstore_empty_url) as again:
        assert again.store_uuid == store.store_uuid
        assert again.read(list_topics) == ["orders"]


@pytest.mark.parametrize(("url", "code"), [("sqlite://", 2), ("sqlite:///", 1), ("sqlite:///:memory:", 2)])
def test_migrate_refuses_what_would_be_gone_with_it(txnstore, tmp_path, url, code):
    file = tmp_path / "shop.db"
    ended = txnstore("migrate", f"sqlite:///{file},{url}")
    assert (ended.code, ended.out) == (code, "")
    assert "names no file" in ended.err
    assert not file.exists()


@pytest.mark.slow
@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_a_database_in_memory_is_not_told_to_be_migrated(url):
    # In a process of its own: in this one other tests may have a store in memory.
    command = [sys.executable, "-m", "txnstore", "info", "--url", url]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"txnstore: {url} is a database in memory, ")
    assert "migrate" not in ended.stderr


@pytest.mark.parametrize("command", ["migrate", "info"])
def test_a_file_that_is_no_database_is_called_so(txnstore, tmp_path, command):
    file = tmp_path / "notes.txt"
    file.write_bytes(b"no database, but longer than a header of one has to be" * 100)
    ended = txnstore("--url", f"sqlite:///{file}", command)
    assert (ended.code, ended.out) == (1, "")
    assert ": the file is no SQLite database, or an encrypted one; nothing was changed\n" in ended.err


def test_migrate_says_from_which_version_it_came(txnstore, url, code_of_version):
    code_of_version(SCHEMA_VERSION + 3)
    ended = txnstore("migrate", url)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.endswith(
        f"the tables of version {SCHEMA_VERSION + 3} were upgraded from version {SCHEMA_VERSION}\n"
    )
    assert txnstore("migrate", url).out.endswith("were there already\n")


def test_migrate_refuses_tables_that_are_newer_than_the_code(txnstore, url, code_of_version):
    code_of_version(SCHEMA_VERSION + 1)
    assert txnstore("migrate", url).code == 0
    code_of_version(SCHEMA_VERSION)
    ended = txnstore("migrate", url)
    assert ended.code == 1
    assert f"are of version {SCHEMA_VERSION + 1}, this txnstore knows {SCHEMA_VERSION}" in ended.err


@pytest.mark.slow
def test_migrate_brings_several_databases_from_whatever_version_they_are(txnstore, tmp_path, code_of_version):
    urls = [f"sqlite:///{tmp_path / name}.db" for name in ("first", "second", "third")]
    assert txnstore("migrate", urls[0]).code == 0
    code_of_version(SCHEMA_VERSION + 1)
    assert txnstore("migrate", urls[1]).code == 0
    code_of_version(SCHEMA_VERSION + 3)
    ended = txnstore("migrate", ",".join(urls))
    assert (ended.code, ended.err) == (0, "")
    assert [line.rpartition(" were ")[2] for line in ended.out.splitlines()] == [
        f"upgraded from version {SCHEMA_VERSION}",
        f"upgraded from version {SCHEMA_VERSION + 1}",
        "made",
    ]


def test_migrate_says_which_database_without_the_password(txnstore, txnstore_postgresql_url):
    ended = txnstore("migrate", txnstore_postgresql_url)
    password = make_url(txnstore_postgresql_url).password
    assert password
    assert password not in ended.out
    assert make_url(txnstore_postgresql_url).database in ended.out


def test_migrate_takes_the_url_from_the_environment(txnstore, txnstore_empty_url, monkeypatch):
    monkeypatch.setenv("TXNSTORE_URL", txnstore_empty_url)
    assert txnstore("migrate").code == 0
    open_store(txnstore_empty_url, create=False).close()


@pytest.mark.slow
def test_migrate_makes_a_schema_of_another_name(txnstore, txnstore_postgresql_url):
    assert txnstore("migrate", txnstore_postgresql_url, "--schema", "messages").code == 0
    open_store(txnstore_postgresql_url, schema="messages", create=False).close()
    ended = txnstore("migrate", txnstore_postgresql_url, "--schema", "x; drop")
    assert (ended.code, ended.err.count("\n")) == (1, 1)


def test_migrate_refuses_tables_that_are_not_ours(txnstore, txnstore_empty_url):
    name = "txnstore_topics" if txnstore_empty_url.startswith("sqlite") else "txnstore.topics"
    with connect_store(txnstore_empty_url) as store:

        def make(connection):
            if store.backend.name == "postgresql":
                connection.exec_driver_sql("CREATE SCHEMA txnstore")
            connection.exec_driver_sql(f"CREATE TABLE {name} (id INTEGER)")

        store.write(make)
    ended = txnstore("migrate", txnstore_empty_url)
    assert ended.code == 1
    assert "txnstore did not make them" in ended.err


def test_migrate_gives_up_on_a_server_that_is_not_there(txnstore, monkeypatch):
    monkeypatch.setattr("txnstore.cli.databases.patient_limits", lambda: Limits(retry_timeout_ms=100))
    with silent_port() as port:
        ended = txnstore("migrate", f"postgresql://alice@127.0.0.1:{port}/shop")
    assert ended.code == 75
    assert "is the server there" in ended.err


@pytest.mark.parametrize("command", [("migrate", "--url"), ("roles", "list", "--url")])
def test_of_several_databases_an_error_says_which_one_it_is_about(
    txnstore, monkeypatch, command, txnstore_postgresql_url
):
    for module in ("databases", "roles"):
        monkeypatch.setattr(f"txnstore.cli.{module}.patient_limits", lambda: Limits(retry_timeout_ms=100))
    with silent_port() as port:
        away = f"postgresql://alice:secret@127.0.0.1:{port}/shop"
        ended = txnstore(*command, f"{txnstore_postgresql_url},{away}")
    assert ended.code == 75
    assert re.search(r"postgresql://alice:\*+@127\.0\.0\.1:[0-9]+/shop: .*is the server there", ended.err)


def test_an_error_that_says_which_database_it_is_about_says_so_once():
    urls = ["sqlite:///a.db", "sqlite:///b.db"]
    with pytest.raises(SchemaTooNew, match=r"^those in sqlite:///b\.db$"), about(urls[1], urls):
        raise SchemaTooNew("those in sqlite:///b.db")


def test_the_printed_sql_is_all_that_is_printed_and_nothing_is_connected_to(txnstore, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = txnstore("migrate", "sqlite:///store.db", "--sql")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == migrating.upgrade_sql(kind="sqlite")
    assert list(tmp_path.iterdir()) == []
    ended = txnstore("migrate", "postgresql://nobody@no-such-host.invalid/shop", "--sql", "--schema", "messages")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == migrating.upgrade_sql(kind="postgresql", schema="messages")
    assert "messages.record_batches" in ended.out


def test_the_printed_sql_goes_into_the_databases_own_program(txnstore, txnstore_empty_url, sql_program, client_topics):
    sql_program(txnstore_empty_url, txnstore("migrate", txnstore_empty_url, "--sql").out)
    assert txnstore("migrate", txnstore_empty_url).out.endswith("were there already\n")
    assert client_topics(txnstore_empty_url) == ["orders"]


@pytest.fixture
def client_topics():
    def use(url):
        with open_store(url, create=False) as store:
            store.write(lambda connection: create_topic(connection, "orders"))
            return store.read(list_topics)

    return use


def test_from_a_version_only_what_is_missing_is_printed(txnstore):
    ended = txnstore("migrate", "sqlite://", "--sql", "--from", str(SCHEMA_VERSION))
    assert ended.code == 0
    assert "CREATE TABLE" not in ended.out
    assert txnstore("migrate", "sqlite://", "--sql", "--from", str(SCHEMA_VERSION + 1)).code == 2
    assert txnstore("migrate", "sqlite://", "--from", "1").code == 2


@pytest.mark.parametrize("schema", ['x"; DROP SCHEMA public; --', "pg_catalog", "", "a" * 64])
def test_a_schema_that_cannot_be_is_refused_also_when_printing(txnstore, schema):
    ended = txnstore("migrate", "postgresql://host/shop", "--sql", "--schema", schema)
    assert ended.code == 1
    assert ended.out == ""


def test_adopt_gives_a_copy_an_identity_of_its_own(txnstore, txnstore_sqlite_url, tmp_path):
    with open_store(txnstore_sqlite_url) as original:
        check_original(original)
    ended = txnstore("adopt", txnstore_sqlite_url)
    assert (ended.code, "--force" in ended.err) == (1, True)
    copy_url = f"sqlite:///{tmp_path / 'copy.db'}"
    copy_file(txnstore_sqlite_url, copy_url)
    participant = "postgresql://nobody@localhost/none"
    ended = txnstore("transactions", "recover", "--participant", participant, "--url", copy_url)
    assert (ended.code, "txnstore adopt" in ended.err) == (1, True)
    assert txnstore("adopt", copy_url, "--same", "--force").code == 2
    ended = txnstore("adopt", copy_url)
    with open_store(copy_url) as copy:
        check_original(copy)
        assert ended.out.endswith(f"the copy of {original.store_uuid} is the store {copy.store_uuid} now\n")


def test_adopt_takes_an_original_that_has_moved_for_what_it_is(txnstore, txnstore_sqlite_url, tmp_path):
    with open_store(txnstore_sqlite_url) as original:
        check_original(original)
    moved_url = f"sqlite:///{tmp_path / 'moved.db'}"
    copy_file(txnstore_sqlite_url, moved_url)
    assert txnstore("adopt", "--same", moved_url).out.endswith(f"the store {original.store_uuid} lives here now\n")
    with open_store(moved_url) as moved:
        check_original(moved)
        assert moved.store_uuid == original.store_uuid


def test_a_migration_of_a_large_store_is_not_ended_in_the_middle(txnstore, txnstore_sqlite_url, monkeypatch):
    limits = []

    def upgrade(store):
        limits.append(store.limits)
        return opening.upgrade(store)

    monkeypatch.setattr("txnstore.cli.databases.upgrade", upgrade)
    assert txnstore("migrate", txnstore_sqlite_url).code == 0
    (of_migration,) = limits
    assert min(of_migration.statement_timeout_ms, of_migration.transaction_timeout_ms) >= 3_600_000
    # Who is stopped in the middle has locks that others wait for.
    assert of_migration.idle_timeout_ms == Limits().idle_timeout_ms

"""PostgreSQL roles: who may make the tables, who may use them, and what is told to those who may not."""

from __future__ import annotations

from contextlib import closing

import pytest

from txnstore.db.opening import connect_store, open_store, upgrade
from txnstore.db.schema import SCHEMA_VERSION
from txnstore.errors import PermissionDenied, StoreReadOnly
from txnstore.log.topics import create_topic, list_topics

READ = ("GRANT USAGE ON SCHEMA txnstore TO {role}", "GRANT SELECT ON ALL TABLES IN SCHEMA txnstore TO {role}")
WRITE = ("GRANT INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA txnstore TO {role}",)


@pytest.fixture
def database(new_database, granted):
    """A database in which the public may do nothing."""
    name = new_database()
    granted(name, "unused", f"REVOKE ALL ON DATABASE {name} FROM PUBLIC", "REVOKE ALL ON SCHEMA public FROM PUBLIC")
    return name


@pytest.fixture
def role(new_role, granted, database):
    """A role that may connect to the database, and no more."""
    name = new_role()
    granted(database, name, f"GRANT CONNECT ON DATABASE {database} TO {{role}}")
    return name


@pytest.fixture
def role_url(txnstore_postgres_server, database, role):
    return txnstore_postgres_server.url(database, role, "secret")


@pytest.fixture
def kept(txnstore_postgres_server, database):
    """A store in the database, made by the superuser."""
    with open_store(txnstore_postgres_server.url(database)) as store:
        store.write(lambda connection: create_topic(connection, "kept"))
        yield store


@pytest.mark.slow
def test_a_role_that_owns_its_schema_and_nothing_else_makes_and_uses_the_tables(
    database, role, role_url, granted, client_path
):
    granted(database, role, "CREATE SCHEMA txnstore AUTHORIZATION {role}")
    with open_store(role_url) as store:
        client_path(store)
        upgrade(store)


@pytest.mark.slow
def test_a_role_that_may_make_schemas_makes_its_own(database, role, role_url, granted, client_path):
    granted(database, role, f"GRANT CREATE ON DATABASE {database} TO {{role}}")
    with open_store(role_url, schema="messages") as store:
        client_path(store)


def test_a_role_that_may_make_nothing_is_told_so(database, role, role_url, granted):
    with pytest.raises(PermissionDenied, match="permission denied for database"):
        open_store(role_url)
    granted(database, role, "CREATE SCHEMA txnstore", "GRANT USAGE ON SCHEMA txnstore TO {role}")
    with pytest.raises(PermissionDenied, match="permission denied for schema"):
        open_store(role_url)


@pytest.mark.slow
def test_a_role_that_may_read_and_write_does_everything_that_a_client_does(
    kept, database, role, role_url, granted, client_path
):
    granted(database, role, *READ, *WRITE)
    with open_store(role_url) as store:
        assert store.store_uuid == kept.store_uuid
        client_path(store)
        with closing(store.waiter()) as waiter:
            client_path(store, "more")
            assert waiter.wait(60_000)


@pytest.mark.slow
def test_a_role_that_may_only_read_reads(kept, database, role, role_url, granted):
    granted(database, role, *READ)
    with open_store(role_url) as store:
        assert store.read(list_topics) == ["kept"]
        assert store.read(lambda c: c.exec_driver_sql("SELECT count(*) FROM txnstore.records").scalar()) == 0
        with pytest.raises(PermissionDenied, match=r"permission denied for table .*; nothing was changed"):
            store.write(lambda connection: create_topic(connection, "orders"))


@pytest.mark.slow
def test_a_role_without_the_schema_is_told_so(kept, role_url):
    with pytest.raises(PermissionDenied, match="permission denied for schema txnstore"):
        open_store(role_url)


@pytest.mark.slow
def test_a_role_without_select_is_told_so(kept, database, role, role_url, granted):
    granted(database, role, READ[0])
    with pytest.raises(PermissionDenied, match="permission denied for table"):
        open_store(role_url)


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["INSERT", "UPDATE", "DELETE"])
def test_a_right_that_is_missing_is_told_when_it_is_needed(
    kept, database, role, role_url, granted, client_path, missing
):
    granted(database, role, *READ, *WRITE, f"REVOKE {missing} ON ALL TABLES IN SCHEMA txnstore FROM {{role}}")
    with open_store(role_url) as store, pytest.raises(PermissionDenied):
        client_path(store)


@pytest.mark.slow
def test_who_may_use_the_tables_may_not_migrate_them(kept, database, role, role_url, granted, code_of_version):
    granted(database, role, *READ, *WRITE)
    code_of_version(SCHEMA_VERSION + 1)
    with connect_store(role_url) as store, pytest.raises(PermissionDenied):
        upgrade(store)
    granted(database, role, "GRANT SELECT, UPDATE ON txnstore.store_version TO {role}")
    with connect_store(role_url) as store, pytest.raises(PermissionDenied, match="must be owner"):
        upgrade(store)


def test_a_role_that_may_not_connect_is_told_so(new_role, database, txnstore_postgres_server):
    stranger = new_role()
    with pytest.raises(PermissionDenied, match="does not let this user in"):
        open_store(txnstore_postgres_server.url(database, stranger, "secret"))


@pytest.mark.slow
def test_a_database_that_is_read_only_is_read_and_told_so(kept, database, role, role_url, granted):
    granted(database, role, *READ, *WRITE, f"ALTER DATABASE {database} SET default_transaction_read_only = on")
    with open_store(role_url) as store:
        assert store.read(list_topics) == ["kept"]
        with pytest.raises(StoreReadOnly):
            store.write(lambda connection: create_topic(connection, "orders"))


def test_an_empty_database_that_is_read_only_is_told_so(database, txnstore_postgres_server, granted):
    granted(database, "unused", f"ALTER DATABASE {database} SET default_transaction_read_only = on")
    with pytest.raises(StoreReadOnly):
        open_store(txnstore_postgres_server.url(database))

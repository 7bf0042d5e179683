"""What the doctor says as a role that `txnstore roles grant` has made: what its kind is meant to lack is no problem."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace

import psycopg
import pytest
from sqlalchemy.engine import make_url

from txnstore import cli
from txnstore.db.names import RECORDS_VIEW
from txnstore.db.opening import open_store
from txnstore.db.postgresql.facts import PostgreSQLFacts, Relation
from txnstore.db.roles import grants
from txnstore.db.roles.grants import RoleScope
from txnstore.db.roles.rights import BOUNDED, CALLS_FUNCTIONS, Kind
from txnstore.doctor import postgresql
from txnstore.doctor.examination import examine
from txnstore.testing.postgres_server import connection_string

GRANTED = [kind for kind in Kind if kind is not Kind.OWNER]
LIMITS = RoleScope(("orders",), ("billing",), ("load",))


@pytest.fixture(scope="module")
def store_url(txnstore_postgres_server):
    name = f"txnstore_doctor_kinds_{os.getpid()}"
    txnstore_postgres_server.create_database(name)
    url = txnstore_postgres_server.url(name)
    with open_store(url):
        yield url
    txnstore_postgres_server.drop_database(name)


@pytest.fixture
def superuser(store_url):
    with closing(psycopg.connect(connection_string(store_url), autocommit=True)) as connection:
        yield connection


@pytest.fixture
def role(superuser, txnstore_postgres_server):
    name = f"txnstore_doctor_kind_{os.getpid()}"
    txnstore_postgres_server.create_role(name, "secret")
    yield name
    superuser.execute(f"DROP OWNED BY {name}")
    txnstore_postgres_server.drop_role(name)


@pytest.fixture
def granted(store_url, role):
    def granted(kind, bounds=None):
        with open_store(store_url) as store:
            grants.apply(store, grants.grant(store, kind, role, bounds))

    return granted


@pytest.fixture
def looked(store_url, role):
    """Return what the role itself is told about its rights, and what it is said to be."""
    url = make_url(store_url)._replace(username=role, password="secret").render_as_string(hide_password=False)

    def looked():
        examination = examine(url)
        return [each.seen for each in examination.findings if each.check == "rights"], examination.role

    return looked


@pytest.mark.slow
@pytest.mark.parametrize("kind", GRANTED)
def test_what_a_kind_is_meant_to_lack_is_no_problem_and_the_kind_is_said(kind, granted, looked, superuser):
    granted(kind)
    assert looked() == ([], f"a {kind}")
    superuser.execute("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA txnstore FROM PUBLIC")
    try:
        assert looked() == ([], f"a {kind}")
    finally:
        superuser.execute("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA txnstore TO PUBLIC")


@pytest.mark.parametrize("kind", BOUNDED)
def test_a_role_with_limits_lacks_nothing_either(kind, granted, looked):
    granted(kind, LIMITS)
    assert looked() == ([], f"a {kind}")


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", GRANTED)
def test_what_a_role_lacks_of_its_kind_is_a_problem(kind, granted, looked, superuser, role):
    granted(kind)
    superuser.execute(f"REVOKE SELECT ON txnstore.store_version FROM {role}")
    assert looked() == ([f"this role, a {kind}, has no right to SELECT on store_version"], f"a {kind}")


def test_functions_are_missed_by_those_who_call_them(granted, looked, superuser, role):
    superuser.execute("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA txnstore FROM PUBLIC")
    try:
        for kind in CALLS_FUNCTIONS:
            granted(kind)
            superuser.execute(f"REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA txnstore FROM {role}")
            ((told,), _) = looked()
            assert " may not call " in told
    finally:
        superuser.execute("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA txnstore TO PUBLIC")


def test_a_right_to_single_columns_is_looked_for_column_by_column(granted, looked, superuser, role):
    granted(Kind.PRODUCER)
    superuser.execute(f"REVOKE UPDATE (next_offset) ON txnstore.partition_heads FROM {role}")
    assert looked()[0] == ["this role, a producer, has no right to UPDATE (next_offset) on partition_heads"]


@pytest.mark.slow
def test_a_role_of_two_kinds_needs_what_either_of_them_does(granted, looked, superuser, role):
    granted(Kind.PRODUCER)
    granted(Kind.CONSUMER)
    assert looked() == ([], "a consumer and producer")
    superuser.execute(f"REVOKE SELECT, INSERT ON txnstore.record_batches FROM {role}")
    ((told,), _) = looked()
    assert told.startswith("this role, a consumer and producer, has no right to ")
    assert {"SELECT", "INSERT"} <= set(told.replace(",", "").split())


def test_who_has_the_rights_of_another_role_is_of_its_kind(
    store_url, superuser, role, looked, txnstore_postgres_server
):
    group = f"txnstore_doctor_group_{os.getpid()}"
    txnstore_postgres_server.create_role(group, "secret")
    try:
        with open_store(store_url) as store:
            grants.apply(store, grants.grant(store, Kind.CONSUMER, group))
        superuser.execute(f"GRANT {group} TO {role}")
        assert looked() == ([], "a consumer")
    finally:
        superuser.execute(f"DROP OWNED BY {group}")
        txnstore_postgres_server.drop_role(group)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("is_direct", [True, False], ids=["the owner", "a role with the owner's rights"])
def test_an_owner_is_of_no_kind_whatever_other_rights_he_has(
    store_url, superuser, role, looked, txnstore_postgres_server, is_direct
):
    group, owners = (f"txnstore_doctor_{name}_{os.getpid()}" for name in ("group", "owners"))
    for name in (group, owners):
        txnstore_postgres_server.create_role(name, "secret")
    owner = role if is_direct else owners
    try:
        with open_store(store_url) as store:
            grants.apply(store, grants.grant(store, Kind.PRODUCER, group))
            grants.apply(store, grants.grant(store, Kind.OWNER, owner))
        superuser.execute(f"GRANT {group}, {owners} TO {role}")
        assert looked() == ([], "")
        superuser.execute(f"REVOKE DELETE ON txnstore.topics FROM {owner}")
        assert looked() == (["this role has no right to DELETE on topics"], "")
    finally:
        superuser.execute(f"GRANT DELETE ON txnstore.topics TO {owner}")
        superuser.execute(f"REASSIGN OWNED BY {owner} TO CURRENT_USER")
        for name in (group, owners):
            superuser.execute(f"DROP OWNED BY {name}")
            txnstore_postgres_server.drop_role(name)


def test_the_superuser_is_of_no_kind(store_url, granted):
    granted(Kind.MONITOR)
    assert examine(store_url).role == ""


def test_a_view_that_a_role_with_limits_is_not_given_before_postgresql_15_is_not_missed():
    view = Relation(RECORDS_VIEW, 0, 0, is_not_vacuumed=False, missing_rights=["SELECT"])
    facts = PostgreSQLFacts("txnstore", server_version=140_012, relations=[view])
    limited = replace(facts, policies=[("txnstore_consumer_app", "topics: orders")])
    assert not list(postgresql._rights.find(limited))
    for told in (replace(facts, policies=[("txnstore_consumer_app", None)]), replace(limited, server_version=150_000)):
        assert list(postgresql._rights.find(told)) == [
            f"this role, a consumer, has no right to SELECT on {RECORDS_VIEW}"
        ]


def test_the_command_says_which_kind_it_is(store_url, granted, role, capsys):
    granted(Kind.PRODUCER)
    url = make_url(store_url)._replace(username=role, password="secret").render_as_string(hide_password=False)
    with pytest.raises(SystemExit):
        cli.main(["doctor", url])
    told = capsys.readouterr()
    assert "no right to" not in told.out
    assert ", a store, seen as a producer: " in told.err

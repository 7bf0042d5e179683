"""The run under least privilege: on PostgreSQL each client is a role with what `txnstore roles` grants, and no more.

`scripts/test --least-privilege` asks for it, files with the mark `least_privilege` have it in every run.  An owner, who
is no superuser, makes the tables; clients are producers and consumers at once, and what else a test opens itself, a
store or an admin client, is a coordinator.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import psycopg
import pytest
from psycopg import sql

from txnstore import admin
from txnstore.clients import topic_directory
from txnstore.db import opening
from txnstore.db.roles import grants
from txnstore.db.roles.rights import Kind
from txnstore.db.store import Store
from txnstore.log.topics import Topic
from txnstore.testing.postgres_server import PostgresServer
from txnstore.testing.store_databases import StoreDatabases, name_of_database

#: What `scripts/test --least-privilege` sets.
VARIABLE: Final = "TXNSTORE_LEAST_PRIVILEGE"
IS_ASKED_FOR: Final = os.environ.get(VARIABLE) == "1"

_ROLE: Final = re.compile(r"//(txnstore_least_[0-9a-f]+)_[a-z]+:")
#: Roles are the server's, which others may use as well.
_RUN: Final = secrets.token_hex(4)
_PASSWORD: Final = "secret"
_KINDS: Final = {
    "owner": (),
    "coordinator": (Kind.COORDINATOR,),
    "client": (Kind.PRODUCER, Kind.CONSUMER),
}
#: Whose clients do what takes a coordinator.
_FOLDERS_OF_COORDINATORS: Final = ("tests/clients/admin/", "tests/outbox/")


def as_owner(url: str) -> str:
    """Return the URL for the role that owns the tables; unchanged where that is whom it is for."""
    return _ROLE.sub(r"//\1_owner:", url)


def as_coordinator(url: str) -> str:
    """Return the URL for a role that may do all that clients do; unchanged where it is for one that owns the tables."""
    return _ROLE.sub(r"//\1_coordinator:", url)


def as_client(url: str) -> str:
    """Return the URL for a role with a producer's and a consumer's rights; unchanged where all else is not limited."""
    return _ROLE.sub(r"//\1_client:", url)


def _role(name: str) -> str:
    return f"txnstore_least_{_RUN}_{name}"


@pytest.fixture(scope="session")
def _least_privilege_databases(txnstore_postgres_server: PostgresServer) -> Iterator[StoreDatabases]:
    """Databases with a fresh store each, of which the roles have been granted what they may do."""
    from txnstore.testing import plugin  # by then pytest has taken it for one of its own

    server, template = txnstore_postgres_server, name_of_database("granted")
    roles = {name: _role(name) for name in _KINDS}
    for role in roles.values():
        server.create_role(role, _PASSWORD)
    server.create_database(template)
    with server.connect(template) as connection:
        _prepare(connection, sql.Identifier(template), {name: sql.Identifier(role) for name, role in roles.items()})
        for_owner = server.url(template, roles["owner"], _PASSWORD)
        with opening.open_store(for_owner) as owned:
            for name, kinds in _KINDS.items():
                for kind in kinds:
                    grants.apply(owned, grants.grant(owned, kind, roles[name]))
        plugin._make_template(for_owner)
        # Its copies belong to who makes them.
        connection.execute(sql.SQL("ALTER DATABASE {} OWNER TO CURRENT_USER").format(sql.Identifier(template)))
    databases = StoreDatabases(server, template, refresh=plugin._MADE_NOW)
    yield databases
    databases.close()
    server.drop_database(template)
    for role in roles.values():
        server.drop_role(role)


def _prepare(connection: psycopg.Connection, database: sql.Identifier, roles: dict[str, sql.Identifier]) -> None:
    """Let the owner make a store, and each role tables of the application's own, which all of them use."""
    connection.execute(sql.SQL("ALTER DATABASE {} OWNER TO {}").format(database, roles["owner"]))
    # Tests end sessions of their clients.
    connection.execute(sql.SQL("GRANT pg_signal_backend TO {}").format(roles["owner"]))
    everyone = sql.SQL(", ").join(roles.values())
    connection.execute(sql.SQL("GRANT ALL ON SCHEMA public TO {}").format(everyone))
    for role in roles.values():
        for what in ("TABLES", "SEQUENCES"):
            grant = "ALTER DEFAULT PRIVILEGES FOR ROLE {} IN SCHEMA public GRANT ALL ON {} TO {}"
            connection.execute(sql.SQL(grant).format(role, sql.SQL(what), everyone))


@pytest.fixture
def txnstore_postgresql_url(request: pytest.FixtureRequest, txnstore_postgres_server: PostgresServer) -> Iterator[str]:
    node = request.node
    has_roles = _has_roles(node)
    databases: StoreDatabases = request.getfixturevalue(
        "_least_privilege_databases" if has_roles else "_txnstore_postgresql_databases"
    )
    name = databases.take()
    if has_roles:
        role = _role("coordinator" if _is_for_coordinator(node) else "client")
        yield txnstore_postgres_server.url(name, role, _PASSWORD)
    else:
        yield txnstore_postgres_server.url(name)
    databases.give_back(name)


@pytest.fixture(scope="session")
def lent_postgresql(
    request: pytest.FixtureRequest, txnstore_postgres_server: PostgresServer
) -> Callable[[], AbstractContextManager[str]]:
    """Lend a fresh store on PostgreSQL for longer than a test: its URL, in a context."""
    databases: StoreDatabases = request.getfixturevalue(
        "_least_privilege_databases" if IS_ASKED_FOR else "_txnstore_postgresql_databases"
    )
    who = (_role("client"), _PASSWORD) if IS_ASKED_FOR else ()

    @contextmanager
    def lend() -> Iterator[str]:
        name = databases.take()
        yield txnstore_postgres_server.url(name, *who)
        databases.give_back(name)

    return lend


def _has_roles(item: pytest.Item) -> bool:
    is_marked = item.get_closest_marker("least_privilege") is not None
    return (IS_ASKED_FOR or is_marked) and item.get_closest_marker("takes_more_rights") is None


def _is_for_coordinator(item: pytest.Item) -> bool:
    return (
        item.nodeid.startswith(_FOLDERS_OF_COORDINATORS) or item.get_closest_marker("takes_a_coordinator") is not None
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what does not reach PostgreSQL, where roles are what is asked for."""
    if not IS_ASKED_FOR:
        return
    chosen = [item for item in items if _is_on_postgresql(item)]
    config.hook.pytest_deselected(items=[item for item in items if not _is_on_postgresql(item)])
    items[:] = chosen


def _is_on_postgresql(item: pytest.Item) -> bool:
    parameters = item.nodeid.partition("[")[2]
    return "postgresql" in parameters or any("postgres" in name for name in getattr(item, "fixturenames", ()))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what takes more than any client of ours has."""
    marker = item.get_closest_marker("takes_more_rights") if IS_ASKED_FOR else None
    if marker is not None:
        pytest.skip(f"takes more rights than txnstore roles grants: {marker.args[0]}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let what tests open themselves be a coordinator's."""
    from txnstore.testing import plugin

    for name, module in list(sys.modules.items()):
        if name.startswith("tests.") and vars(module).get("open_store") is opening.open_store:
            vars(module)["open_store"] = _open_store
    of_clients = {
        getattr(item, "module", None) for item in session.items if _has_roles(item) and not _is_for_coordinator(item)
    }
    for one in (*of_clients, sys.modules.get("tests.clients.steps")):
        if one is not None and vars(one).get("AdminClient") is admin.AdminClient:
            vars(one)["AdminClient"] = _make_admin_client
    vars(plugin)["open_store"] = _open_store
    topic_directory.create_used_topic = _create_used_topic


@functools.wraps(opening.open_store)
def _open_store(url: str, *arguments: Any, **options: Any) -> Store:
    return opening.open_store(as_coordinator(url) if isinstance(url, str) else url, *arguments, **options)


@functools.wraps(admin.AdminClient)
def _make_admin_client(configuration: dict[str, Any], *arguments: Any, **options: Any) -> admin.AdminClient:
    servers = as_coordinator(configuration["bootstrap.servers"])
    return admin.AdminClient({**configuration, "bootstrap.servers": servers}, *arguments, **options)


_create_as_the_client: Final = topic_directory.create_used_topic


def _create_used_topic(store: Store, name: str, *, allow_create: bool) -> Topic:
    """Make a topic that is used for the first time, as somebody would have done before: clients may not."""
    url = store.url.url
    if url.username != _role("client"):
        return _create_as_the_client(store, name, allow_create=allow_create)
    for_client = url.set(password=_PASSWORD).render_as_string(hide_password=False)
    with _open_store(for_client, schema=store.schema, clock=store.clock) as made:
        return _create_as_the_client(made, name, allow_create=allow_create)

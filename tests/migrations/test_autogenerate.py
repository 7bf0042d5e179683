"""Beside the application's own tables and its own Alembic: each leaves the other's alone."""

from __future__ import annotations

import functools

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.util import CommandError
from sqlalchemy import Column, Integer, MetaData, Table, Text, create_engine, inspect, text

from txnstore.db import migrating
from txnstore.db.migrating import include_name
from txnstore.db.opening import open_store

ENVIRONMENT = """
from alembic import context
from sqlalchemy import create_engine

from txnstore.db.migrating import include_name

attributes = context.config.attributes
engine = create_engine(attributes["url"])
with engine.connect() as connection:
    context.configure(
        connection=connection,
        target_metadata=attributes["metadata"],
        include_schemas=attributes.get("include_schemas", True),
        include_name=attributes.get("include_name", include_name),
    )
    with context.begin_transaction():
        context.run_migrations()
engine.dispose()
"""
SCRIPT = """
from alembic import op
import sqlalchemy as sa

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None

def upgrade():
    ${upgrades if upgrades else "pass"}

def downgrade():
    ${downgrades if downgrades else "pass"}
"""


@pytest.fixture
def application():
    """The tables of an application."""
    metadata = MetaData()
    Table("customers", metadata, Column("id", Integer, primary_key=True), Column("name", Text, index=True))
    # Names that txnstore uses as well, but elsewhere.
    Table("topics", metadata, Column("id", Integer, primary_key=True))
    return metadata


@pytest.fixture
def engine(txnstore_empty_url):
    """The application's engine on a database that both use."""
    engine = create_engine(txnstore_empty_url)
    yield engine
    engine.dispose()


def proposals(engine, metadata, **options):
    """What autogenerate would change in the database to make it that of the metadata."""
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts=options)
        return [
            str(change[0]) + " " + str(getattr(change[1], "name", "")) for change in compare_metadata(context, metadata)
        ]


@pytest.mark.slow
def test_autogenerate_would_drop_our_tables_without_the_hook(txnstore_empty_url, engine, application):
    application.create_all(engine)
    open_store(txnstore_empty_url).close()
    proposed = proposals(engine, application, include_schemas=True)
    assert any("remove_table" in change and change.endswith("record_batches") for change in proposed)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("include_schemas", [False, True])
def test_autogenerate_with_the_hook_proposes_nothing(txnstore_empty_url, engine, application, include_schemas):
    application.create_all(engine)
    open_store(txnstore_empty_url).close()
    options = {"include_name": include_name, "include_schemas": include_schemas}
    assert proposals(engine, application, **options) == []


def test_the_hook_still_shows_the_changes_of_the_application_itself(txnstore_empty_url, engine, application):
    open_store(txnstore_empty_url).close()
    application.create_all(engine)
    Table("orders", application, Column("id", Integer, primary_key=True))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE left_over (id INTEGER)"))
        connection.execute(text("DROP INDEX ix_customers_name"))
    proposed = proposals(engine, application, include_name=include_name, include_schemas=True)
    assert sorted(proposed) == ["add_index ix_customers_name", "add_table orders", "remove_table left_over"]


def test_the_hook_shows_tables_of_the_application_that_are_called_as_if_they_were_ours(
    txnstore_empty_url, engine, application
):
    open_store(txnstore_empty_url).close()
    Table("txnstore_settings", application, Column("id", Integer, primary_key=True))
    application.create_all(engine)
    assert proposals(engine, application, include_name=include_name) == []
    application.remove(application.tables["txnstore_settings"])
    assert proposals(engine, application, include_name=include_name) == ["remove_table txnstore_settings"]


@pytest.mark.slow
@pytest.mark.parametrize("include_schemas", [False, True])
def test_the_hook_knows_a_store_among_the_tables_of_the_application(txnstore_postgres_server, include_schemas):
    server = txnstore_postgres_server
    server.create_database("hook_public")
    engine = create_engine(server.url("hook_public"))
    application = MetaData()
    Table("customers", application, Column("id", Integer, primary_key=True))
    hook = functools.partial(include_name, schema="public")
    try:
        open_store(server.url("hook_public"), schema="public").close()
        options = {"include_name": hook, "include_schemas": include_schemas}
        assert proposals(engine, application, **options) == ["add_table customers"]
    finally:
        engine.dispose()
        server.drop_database("hook_public")


@pytest.mark.slow
@pytest.mark.parametrize("txnstore_empty_url", ["postgresql"], indirect=True)  # SQLite has no schemas.
def test_the_hook_hides_what_a_newer_version_has_in_its_schema(txnstore_empty_url, engine, application):
    application.create_all(engine)
    open_store(txnstore_empty_url).close()
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE txnstore.of_a_newer_version (id integer)"))
    options = {"include_schemas": True}
    assert proposals(engine, application, include_name=include_name, **options) == []
    shared = functools.partial(include_name, is_shared=True)
    assert proposals(engine, application, include_name=shared, **options) == ["remove_table of_a_newer_version"]


@pytest.mark.slow
def test_the_hook_knows_a_schema_of_another_name(txnstore_postgres_server, application):
    server = txnstore_postgres_server
    server.create_database("hook_schema")
    engine = create_engine(server.url("hook_schema"))
    try:
        open_store(server.url("hook_schema"), schema="messages").close()
        application.create_all(engine)
        hook = functools.partial(include_name, schema="messages")
        assert proposals(engine, application, include_name=hook, include_schemas=True) == []
        assert proposals(engine, application, include_name=include_name, include_schemas=True) != []
    finally:
        engine.dispose()
        server.drop_database("hook_schema")


@pytest.mark.slow
def test_the_hook_shows_the_changes_of_an_application_whose_tables_are_in_the_schema_of_the_store(
    txnstore_postgres_server, tmp_path
):
    """By name, not by the search_path; Alembic was told nothing of such tables, and would have made them each time."""
    server = txnstore_postgres_server
    server.create_database("hook_own")
    application = MetaData(schema="shop")
    Table("orders", application, Column("id", Integer, primary_key=True), Column("name", Text, index=True))
    config = environment(tmp_path, server.url("hook_own"), application)
    config.attributes["include_name"] = functools.partial(include_name, schema="shop", is_shared=True)
    engine = create_engine(server.url("hook_own"))
    try:
        open_store(server.url("hook_own"), schema="shop").close()
        command.revision(config, "the application's tables", autogenerate=True)
        (script,) = (tmp_path / "alembic" / "versions").glob("*.py")
        upgrade = script.read_text().partition("def downgrade")[0]
        assert (upgrade.count("create_table"), upgrade.count("drop_")) == (1, 0)
        command.upgrade(config, "head")
        command.check(config)
        application.tables["shop.orders"].append_column(Column("cents", Integer))
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE shop.left_over (id integer); DROP INDEX shop.ix_shop_orders_name"))
        options = {"include_name": config.attributes["include_name"], "include_schemas": True}
        with engine.connect() as connection:
            context = MigrationContext.configure(connection, opts=options)
            found = compare_metadata(context, application)
        assert sorted(change[0] for change in found) == ["add_column", "add_index", "remove_table"]
    finally:
        engine.dispose()
        server.drop_database("hook_own")


@pytest.fixture
def alembic(tmp_path, txnstore_empty_url, application):
    """The application's own Alembic environment."""
    return environment(tmp_path, txnstore_empty_url, application)


def environment(tmp_path, url, metadata):
    """Make an Alembic environment of an application."""
    (tmp_path / "alembic" / "versions").mkdir(parents=True)
    (tmp_path / "alembic" / "env.py").write_text(ENVIRONMENT)
    (tmp_path / "alembic" / "script.py.mako").write_text(SCRIPT)
    config = Config()
    config.set_main_option("script_location", str(tmp_path / "alembic"))
    config.set_main_option("path_separator", "os")
    config.attributes.update(url=url, metadata=metadata)
    return config


@pytest.mark.slow
def test_both_histories_live_in_one_database(txnstore_empty_url, engine, alembic, tmp_path):
    open_store(txnstore_empty_url).close()
    command.revision(alembic, "the application's tables", autogenerate=True)
    (script,) = (tmp_path / "alembic" / "versions").glob("*.py")
    assert "customers" in script.read_text()
    assert "drop_table('record_batches'" not in script.read_text().replace('"', "'")
    assert "txnstore" not in script.read_text()
    command.upgrade(alembic, "head")
    command.check(alembic)
    with open_store(txnstore_empty_url, create=False) as store:
        assert {"customers", "topics", "alembic_version"} <= set(inspect(engine).get_table_names())
        store.write(
            lambda connection: migrating.downgrade(
                connection, kind=store.backend.name, schema=store.schema, to_version=0
            )
        )
    assert {"customers", "topics", "alembic_version"} == set(inspect(engine).get_table_names()) - {"sqlite_sequence"}
    command.check(alembic)


def test_a_search_path_that_holds_our_schema_takes_the_application_to_its_own_version_table(
    txnstore_postgresql_url, txnstore_postgresql_store, tmp_path
):
    """Alembic looks its version table up by the search_path; called as it calls its own, ours would be taken for it."""
    config = environment(tmp_path, f"{txnstore_postgresql_url}?options=-csearch_path%3Dpublic,txnstore", MetaData())
    command.revision(config, "the application's own", rev_id="0001")
    command.upgrade(config, "head")
    command.stamp(config, "base")
    with open_store(txnstore_postgresql_url, create=False) as store:
        assert store.store_uuid == txnstore_postgresql_store.store_uuid


@pytest.mark.slow
@pytest.mark.parametrize("include_schemas", [False, True])
@pytest.mark.parametrize(
    ("search_path", "schemas"),
    [("shop,public", ["shop", "txnstore"]), ("public,txnstore", ["txnstore"]), ("public,shop", ["shop"])],
)
def test_the_hook_knows_a_store_to_which_the_search_path_leads(
    txnstore_postgres_server, application, tmp_path, search_path, schemas, include_schemas
):
    """Alembic names no schema of what is found by it; a table of the application's may hide one of ours."""
    server = txnstore_postgres_server
    server.create_database("hook_path")
    url = server.url("hook_path")
    if search_path.startswith("shop"):
        # There it would be in ours.
        application.remove(application.tables["topics"])
    config = environment(tmp_path, f"{url}?options=-csearch_path%3D{search_path}", application)
    config.attributes["include_schemas"] = include_schemas
    config.attributes["include_name"] = lambda *asked: all(include_name(*asked, schema=name) for name in schemas)
    try:
        for name in schemas:
            open_store(url, schema=name).close()
        command.revision(config, "the application's tables", autogenerate=True)
        (script,) = (tmp_path / "alembic" / "versions").glob("*.py")
        upgrade = script.read_text().partition("def downgrade")[0]
        assert upgrade.count("create_table") == len(application.tables)
        assert "drop_" not in upgrade
        command.upgrade(config, "head")
        command.check(config)
        config.attributes["include_name"] = functools.partial(include_name, schema="elsewhere")
        with pytest.raises(CommandError, match="record_batches"):
            command.check(config)
    finally:
        server.drop_database("hook_path")


def test_a_missing_change_is_seen_by_the_applications_check(txnstore_empty_url, engine, alembic, application):
    open_store(txnstore_empty_url).close()
    application.create_all(engine)
    command.stamp(alembic, "head")
    Table("orders", application, Column("id", Integer, primary_key=True))
    with pytest.raises(CommandError, match="orders"):
        command.check(alembic)


def test_tables_of_the_application_are_neither_touched_nor_missed(txnstore_empty_url, engine, application):
    application.create_all(engine)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO topics VALUES (7)"))
        if engine.dialect.name == "postgresql":
            connection.execute(text("CREATE SCHEMA txnstore"))
            connection.execute(text("CREATE TABLE txnstore.customers (name text)"))
        else:
            connection.execute(text("CREATE TABLE txnstore_customers (name text)"))
    open_store(txnstore_empty_url).close()
    with engine.begin() as connection:
        assert connection.execute(text("SELECT * FROM topics")).all() == [(7,)]
        if engine.dialect.name == "sqlite":
            # The mark of the file is the application's business.
            assert connection.execute(text("PRAGMA application_id")).scalar() == 0

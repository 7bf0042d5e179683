"""The first use of a database: its tables are made without Alembic, which the application may be in the middle of."""

from __future__ import annotations

import sys
import threading

import pytest
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, inspect

from tests.tools.later_versions import elsewhere
from txnstore.admin import AdminClient, NewTopic
from txnstore.db.migrating import upgrade
from txnstore.db.names import VERSION_TABLE
from txnstore.db.opening import connect_store, open_store
from txnstore.db.schema import SCHEMA_VERSION

PATIENCE_SECONDS = 60.0
ENVIRONMENT = """
from alembic import context

context.configure(connection=context.config.attributes["connection"], transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
"""
MIGRATION = """
import sqlalchemy
from alembic import context, op

revision, down_revision = "a", None

def upgrade():
    op.create_table("before", sqlalchemy.Column("id", sqlalchemy.Integer))
    context.config.attributes["meanwhile"]()
    op.create_table("after", sqlalchemy.Column("id", sqlalchemy.Integer))
"""


@pytest.fixture
def migrate(tmp_path):
    """Run a migration of the application's, on a file of its own, which calls `meanwhile` between two tables."""

    def run(meanwhile):
        (tmp_path / "app" / "versions").mkdir(parents=True)
        (tmp_path / "app" / "env.py").write_text(ENVIRONMENT)
        (tmp_path / "app" / "versions" / "a_first.py").write_text(MIGRATION)
        config = Config()
        config.set_main_option("script_location", str(tmp_path / "app"))
        config.attributes["meanwhile"] = meanwhile
        engine = create_engine(f"sqlite:///{tmp_path / 'app.db'}")
        try:
            with engine.begin() as connection:
                config.attributes["connection"] = connection
                command.upgrade(config, "head")
            return sorted(inspect(engine).get_table_names())
        finally:
            engine.dispose()

    return run


def test_a_migration_of_the_application_may_be_the_first_to_use_the_store(txnstore_empty_url, migrate):
    def make_a_topic():
        with AdminClient({"bootstrap.servers": txnstore_empty_url}) as admin:
            admin.create_topics([NewTopic("orders")])["orders"].result(PATIENCE_SECONDS)

    assert migrate(make_a_topic) == ["after", "alembic_version", "before"]
    with open_store(txnstore_empty_url, create=False) as store:
        names = store.read(lambda connection: store.backend.table_names(connection, store.schema))
    assert not names & {"before", "after"}


def test_another_thread_may_be_the_first_to_use_the_store_in_the_middle_of_one(txnstore_empty_url, migrate):
    def open_elsewhere():
        thread = threading.Thread(target=lambda: open_store(txnstore_empty_url).close())
        thread.start()
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()

    assert migrate(open_elsewhere) == ["after", "alembic_version", "before"]
    with open_store(txnstore_empty_url, create=False) as store:
        assert store.store_uuid


@pytest.mark.slow
def test_its_version_is_where_and_as_alembic_writes_it(txnstore_empty_url):
    """The next migration finds it there: Alembic's own table, to the constraint's name."""
    (place, options) = elsewhere(txnstore_empty_url)

    def seen(store):
        def read(connection):
            schema = store.schema if store.backend.name == "postgresql" else None
            name = VERSION_TABLE if schema else f"txnstore_{VERSION_TABLE}"
            found = inspect(connection)
            columns = [(c["name"], str(c["type"]), c["nullable"]) for c in found.get_columns(name, schema)]
            constraint = found.get_pk_constraint(name, schema)
            context = MigrationContext.configure(
                connection, opts={"version_table": name, "version_table_schema": schema}
            )
            return columns, constraint["name"], constraint["constrained_columns"], context.get_current_heads()

        return store.read(read)

    with open_store(txnstore_empty_url) as opened, connect_store(place, **options) as migrated:

        def make(connection):
            migrated.backend.prepare_place(connection, migrated.schema)
            upgrade(connection, kind=migrated.backend.name, schema=migrated.schema)

        migrated.write(make)
        assert seen(opened) == seen(migrated)
        assert seen(opened)[-1] == (f"{SCHEMA_VERSION:04}",)


def test_nothing_of_alembic_is_loaded_for_it(txnstore_empty_url, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "alembic"]:
        monkeypatch.delitem(sys.modules, name)
    with open_store(txnstore_empty_url):
        assert "alembic" not in sys.modules

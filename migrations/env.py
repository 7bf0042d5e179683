"""The environment in which Alembic runs our migrations: on a connection from txnstore, or as SQL text."""

from __future__ import annotations

from typing import Any

from alembic import context
from alembic.runtime.migration import MigrationContext, MigrationInfo
from sqlalchemy import Integer, column, table, update

from txnstore.db import opening
from txnstore.db.names import SQLITE_PREFIX, StoreName

#: What txnstore.db.migrating hands over: where the tables are, and the connection if there is one.
attributes = context.config.attributes
schema = attributes["schema"]


def note_version(*, ctx: MigrationContext, step: MigrationInfo, **_: object) -> None:
    """Write the version that a migration has made into the store's own row, if there is one."""
    made_by: Any = step.up_revision if step.is_upgrade else next(iter(step.down_revisions), None)
    if made_by is None:
        return  # back before the first migration, the table is gone
    stores = table(
        StoreName("stores"),
        column("schema_version", Integer),
        column("oldest_writer_version", Integer),
        schema=schema,
    )
    ctx.execute(
        update(stores).values(
            schema_version=int(made_by.revision), oldest_writer_version=made_by.module.oldest_writer_version
        )
    )


def first_partition() -> str:
    """Return the statement by which a new store begins to number its partitions anywhere, as `opening` lets it."""
    count = opening.FIRST_PARTITION_ID_MAX
    if schema is None:
        return (
            "INSERT INTO sqlite_sequence (name, seq)"  # noqa: S608 - our own names
            f" VALUES ('{SQLITE_PREFIX}partitions', (random() & {(1 << 31) - 1}) % {count})"
        )
    sequence = f"pg_get_serial_sequence('\"{schema}\".partitions', 'partition_id')"
    return f"DO $$ BEGIN PERFORM setval({sequence}, CAST(1 + floor(random() * {count}) AS bigint), false); END $$"


options: dict[str, Any] = {
    "version_table": attributes["version_table"],
    "version_table_schema": schema,
    "store_schema": schema,
    # On SQLite too, for we send BEGIN ourselves: then DDL is rolled back like anything else.
    "transactional_ddl": True,
    "on_version_apply": note_version,
}

if context.is_offline_mode():
    context.configure(
        dialect_name=attributes["dialect_name"],
        # No driver reads the text, so a % is not doubled.
        dialect_opts={"paramstyle": "named"},
        literal_binds=True,
        **options,
    )
else:
    context.configure(connection=attributes["connection"], **options)

with context.begin_transaction():
    if context.is_offline_mode() and schema is not None:
        # Online, the store does both. CREATE SCHEMA IF NOT EXISTS takes the right to create one even where it exists.
        context.execute("SET LOCAL search_path = pg_catalog, pg_temp")
        context.execute(
            "DO $$ BEGIN"
            f" IF NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = '{schema}') THEN CREATE SCHEMA \"{schema}\"; END IF;"
            " END $$"
        )
    context.run_migrations()
    if context.is_offline_mode() and attributes["makes_tables"]:
        context.execute(first_partition())

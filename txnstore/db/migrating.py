"""The way from one version of the tables to the next: Alembic, with a version table of our own."""

from __future__ import annotations

import importlib
import io
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import Column, Connection, MetaData, PrimaryKeyConstraint, String, Table, Text, insert, text

from txnstore.db.names import CODE_SCHEMA, DEFAULT_SCHEMA, SQLITE_PREFIX, VERSION_TABLE, StoreName

if TYPE_CHECKING:
    from alembic.config import Config

#: How the SQL of a migration is compiled when there is no connection.
_DIALECTS: Final = {"sqlite": "sqlite+txnstore", "postgresql": "postgresql+txnstore"}
#: What registers them.
_BACKENDS: Final = {"sqlite": "txnstore.db.sqlite.backend", "postgresql": "txnstore.db.postgresql.backend"}

#: PostgreSQL's own schema for a connection that was told of no other.
_USUAL_SCHEMA: Final = "public"
_SCHEMA_BY_PATH: Final = text(
    "SELECT n.nspname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
    " WHERE c.relname = :name AND pg_catalog.pg_table_is_visible(c.oid)"
)
#: How long a fork waits for another thread that migrates: its child could not import what that is just importing.
FORK_PATIENCE_SECONDS: Final = 1.0

#: Alembic hands a migration its context in module variables: only one can run at a time in a process.
_one_at_a_time = threading.Lock()

_log: Final = logging.getLogger(__name__)
#: Where Alembic logs each plugin and each step.
_ALEMBICS_LOGGERS: Final = ("alembic.runtime.plugins", "alembic.runtime.migration")

#: Alembic's own table.
version_table: Final = Table(StoreName(VERSION_TABLE), MetaData(schema=CODE_SCHEMA), Column("version_num", Text))


def make_version_table(connection: Connection, version: int) -> None:
    """Make Alembic's table, as Alembic does, for tables that are of this version without its help."""
    name = connection.dialect.identifier_preparer.format_table(version_table, use_schema=False)
    made = Table(
        StoreName(VERSION_TABLE),
        MetaData(schema=CODE_SCHEMA),
        Column("version_num", String(32)),
        PrimaryKeyConstraint("version_num", name=f"{name}_pkc"),
    )
    made.create(connection, checkfirst=False)
    connection.execute(insert(version_table).values(version_num=_revision(version)))


def upgrade(connection: Connection, *, kind: str, schema: str) -> None:
    """Bring the tables to the newest version, within the database transaction that is open on `connection`."""
    with _alone_and_quiet():
        from alembic import command  # slow to import, and rarely needed

        command.upgrade(_config_on(connection, kind, schema), "head")


def downgrade(connection: Connection, *, kind: str, schema: str, to_version: int) -> None:
    """Bring the tables back to an older version, within the database transaction that is open; 0 leaves none of them.

    What the older version has no place for is lost.
    """
    with _alone_and_quiet():
        from alembic import command

        command.downgrade(_config_on(connection, kind, schema), _revision(to_version))
    if to_version == 0:
        version_table.drop(connection)


def upgrade_sql(*, kind: str, schema: str = DEFAULT_SCHEMA, from_version: int = 0) -> str:
    """Return the SQL that brings the tables from `from_version` to the newest one, as one database transaction."""
    printed = io.StringIO()
    with _alone_and_quiet():
        from alembic import command

        config = _config(kind, schema, output=printed)
        importlib.import_module(_BACKENDS[kind])
        config.attributes["dialect_name"] = _DIALECTS[kind]
        config.attributes["makes_tables"] = from_version == 0
        command.upgrade(config, f"{_revision(from_version)}:head", sql=True)
    return printed.getvalue()


def include_name(
    name: str | None,
    type_: str,
    parent_names: dict[str, str | None],
    *,
    schema: str = DEFAULT_SCHEMA,
    is_shared: bool = False,
) -> bool:
    """Tell the application's own Alembic which names are its own: pass this as `include_name` to `configure`.

    With it, autogenerate neither drops nor changes the tables of txnstore.  For a PostgreSQL schema of another name
    use `functools.partial(include_name, schema=...)`, also if the search_path leads there.  The schema is hidden as a
    whole unless it `is_shared`, which says that the application's own tables are in it as well: then all is the
    application's that this version of txnstore does not know, also what a newer one has made.
    """
    if type_ == "schema":
        return is_shared or name != schema
    table = name if type_ == "table" else parent_names.get("table_name")
    if parent_names.get("schema_name") == schema:
        return is_shared and table not in _our_tables()
    if table is not None and parent_names.get("schema_name") is None and table in _our_tables():
        # Alembic names no schema of what the connection finds by its search_path: it may be the application's as well.
        return _schema_by_path(table) != schema
    is_ours = (
        table is not None and table.startswith(SQLITE_PREFIX) and table.removeprefix(SQLITE_PREFIX) in _our_tables()
    )
    return not is_ours


def _schema_by_path(table: str) -> str | None:
    """Return the schema in which the connection that Alembic compares finds the table; None on SQLite."""
    from alembic import context

    try:
        connection = context.get_bind()
    except (NameError, AttributeError):
        # No env.py is running, so the schema is unknown: Alembic's functions were called by themselves.
        return _USUAL_SCHEMA
    if connection.dialect.name != "postgresql":
        return None
    found: str | None = connection.scalar(_SCHEMA_BY_PATH, {"name": table})
    return found


def _our_tables() -> set[str]:
    from txnstore.db.postgresql.segments import SEGMENT_TABLES
    from txnstore.db.schema import metadata

    return {VERSION_TABLE, *SEGMENT_TABLES, *(str(table.name) for table in metadata.tables.values())}


def migrations_folder() -> Path:
    """Return the folder of migrations: in the installed package, or at the top of a checkout."""
    installed = Path(__file__).resolve().parent.parent / "migrations"
    return installed if installed.is_dir() else installed.parent.parent / "migrations"


@contextmanager
def _alone_and_quiet() -> Iterator[None]:
    """Keep other threads from migrating, and log what Alembic says of itself as our own debug messages.

    Programs that show INFO would otherwise hear of our tables at the first use of each store. What other threads do
    with Alembic is logged as usual.
    """
    thread_id = threading.get_ident()

    def is_for_others(record: logging.LogRecord) -> bool:
        if threading.get_ident() != thread_id or record.levelno >= logging.WARNING:
            return True
        _log.debug("%s", record.getMessage())
        return False

    loggers = [logging.getLogger(name) for name in _ALEMBICS_LOGGERS]
    with _one_at_a_time:
        for logger in loggers:
            logger.addFilter(is_for_others)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(is_for_others)


def _before_fork() -> None:
    # Not kept: a thread that is about to migrate may have an SQLite file open, for which the fork waits as well.
    if _one_at_a_time.acquire(timeout=FORK_PATIENCE_SECONDS):
        _one_at_a_time.release()


def _after_fork_in_child() -> None:
    global _one_at_a_time  # noqa: PLW0603 - a thread that is not there may have it, for ever
    _one_at_a_time = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


def _revision(version: int) -> str:
    """Return Alembic's name of a version: a migration is called by the version that it makes."""
    return f"{version:04}" if version else "base"


def _config_on(connection: Connection, kind: str, schema: str) -> Config:
    if not connection.in_transaction():
        # Alembic commits by itself where SQLAlchemy knows of no transaction: it has not seen that of the store begin.
        connection.begin()
    config = _config(kind, schema)
    config.attributes["connection"] = connection
    return config


def _config(kind: str, schema: str, output: io.StringIO | None = None) -> Config:
    from alembic.config import Config

    config = Config(output_buffer=output)
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["schema"] = schema if kind == "postgresql" else None
    config.attributes["version_table"] = VERSION_TABLE if kind == "postgresql" else SQLITE_PREFIX + VERSION_TABLE
    return config

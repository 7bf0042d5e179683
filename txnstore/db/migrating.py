"""This file is the way from one version of the tables to the next: Alembic, with a version table of our own."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import Column, Connection, MetaData, Table, Text

from txnstore.db.names import CODE_SCHEMA, DEFAULT_SCHEMA, SQLITE_PREFIX, VERSION_TABLE, StoreName

if TYPE_CHECKING:
    from alembic.config import Config

#: How the SQL of a migration is compiled when no connection is there.
_DIALECTS: Final = {"sqlite": "sqlite+txnstore", "postgresql": "postgresql+txnstore"}

#: Alembic hands a migration its context in variables of a module: one at a time in a process.
_ONE_AT_A_TIME: Final = threading.Lock()

#: Alembic's table; it makes it by itself.
version_table: Final = Table(StoreName(VERSION_TABLE), MetaData(schema=CODE_SCHEMA), Column("version_num", Text))


def upgrade(connection: Connection, *, kind: str, schema: str) -> None:
    """Bring the tables to the newest version, within the database transaction that is open on `connection`."""
    from alembic import command  # slow to import, and rarely needed

    config = _config(kind, schema)
    config.attributes["connection"] = connection
    with _ONE_AT_A_TIME:
        command.upgrade(config, "head")


def downgrade(connection: Connection, *, kind: str, schema: str, to_version: int) -> None:
    """Bring the tables back to an older version, within the database transaction that is open; 0 leaves none of them.

    What the older version has no place for is lost.
    """
    from alembic import command

    config = _config(kind, schema)
    config.attributes["connection"] = connection
    with _ONE_AT_A_TIME:
        command.downgrade(config, _revision(to_version))
    if to_version == 0:
        version_table.drop(connection)


def upgrade_sql(*, kind: str, schema: str = DEFAULT_SCHEMA, from_version: int = 0) -> str:
    """Return the SQL that brings the tables from `from_version` to the newest one, as one database transaction."""
    from alembic import command

    printed = io.StringIO()
    config = _config(kind, schema, output=printed)
    config.attributes["dialect_name"] = _DIALECTS[kind]
    with _ONE_AT_A_TIME:
        command.upgrade(config, f"{_revision(from_version)}:head", sql=True)
    return printed.getvalue()


def newest_version() -> int:
    """Return the number of the newest migration."""
    from alembic.script import ScriptDirectory

    head = ScriptDirectory(str(migrations_folder())).get_current_head()
    assert head is not None
    return int(head)


def include_name(
    name: str | None, type_: str, parent_names: dict[str, str | None], *, schema: str = DEFAULT_SCHEMA
) -> bool:
    """Tell the application's own Alembic which names are its own: pass this as `include_name` to `configure`.

    With it, autogenerate neither drops nor changes the tables of txnstore.  For a PostgreSQL schema of another name
    use `functools.partial(include_name, schema=...)`.
    """
    if type_ == "schema":
        return name != schema
    if parent_names.get("schema_name") == schema:
        return False
    table = name if type_ == "table" else parent_names.get("table_name")
    return not (table or "").startswith(SQLITE_PREFIX)


def migrations_folder() -> Path:
    """Return the folder of migrations: in the installed package, or at the top of a checkout."""
    installed = Path(__file__).resolve().parent.parent / "migrations"
    return installed if installed.is_dir() else installed.parent.parent / "migrations"


def _revision(version: int) -> str:
    """Return Alembic's name of a version: a migration is called by the version that it makes."""
    return f"{version:04}" if version else "base"


def _config(kind: str, schema: str, output: io.StringIO | None = None) -> Config:
    from alembic.config import Config

    config = Config(output_buffer=output)
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["schema"] = schema if kind == "postgresql" else None
    config.attributes["version_table"] = VERSION_TABLE if kind == "postgresql" else SQLITE_PREFIX + VERSION_TABLE
    return config

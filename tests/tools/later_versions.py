"""Later versions of the tables, which exist in tests only: the history that upgrading is tested with.

The migrations of `tests/migrations/history` come after those of the project, in a copy of its folder. `become` makes
the code of a process that of one of these versions.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection

from txnstore.cli import databases
from txnstore.db import identity, migrating, opening
from txnstore.db.opening import connect_store
from txnstore.db.schema import OLDEST_WRITER_VERSION, SCHEMA_VERSION

_HISTORY: Final = Path(__file__).parent.parent / "migrations" / "history"
_PROJECTS_FOLDER: Final = migrating.migrations_folder()

FIRST_LATER, SECOND_LATER, THIRD_LATER = (SCHEMA_VERSION + number for number in (1, 2, 3))
#: By version: the oldest code that may write to its tables.
OLDEST_WRITERS: Final = {
    SCHEMA_VERSION: OLDEST_WRITER_VERSION,
    FIRST_LATER: OLDEST_WRITER_VERSION,
    SECOND_LATER: SECOND_LATER,
    THIRD_LATER: SECOND_LATER,
}

#: The work of another process: the database, the version of its code, and a folder for the migrations.
Task = tuple[str, int, str]


def become(version: int, folder: Path, set_attribute: Callable[[object, str, object], None] = setattr) -> None:
    """Make the code of this process that of a version; its migrations are put into `folder`."""
    scripts = folder / f"migrations-{version}"
    if not scripts.exists():
        shutil.copytree(_PROJECTS_FOLDER, scripts, ignore=shutil.ignore_patterns("__pycache__"))
        for number in range(1, version - SCHEMA_VERSION + 1):
            (script,) = _HISTORY.glob(f"later_{number}_*.py")
            shutil.copy(script, scripts / "versions")
    store_row = {"schema_version": version, "oldest_writer_version": OLDEST_WRITERS[version]}
    set_attribute(migrating, "migrations_folder", lambda: scripts)
    for module in (opening, identity):
        set_attribute(module, "SCHEMA_VERSION", version)
    if version != SCHEMA_VERSION:
        set_attribute(opening, "_make_tables", _migrate)
    set_attribute(opening, "_INSERT_STORE", opening._INSERT_STORE.values(**store_row))
    set_attribute(databases, "SCHEMA_VERSION", version)


def _migrate(connection: Connection) -> None:
    """Make the tables of a later version, of which there is no schema, by its migrations."""
    kind = connection.dialect.name
    migrating.upgrade(connection, kind=kind, schema=getattr(connection.dialect, "store_schema", "") or "")


def upgrade_as(task: Task) -> None:
    """Upgrade a database by code of that version: a function of a module, so that another process finds it."""
    url, version, folder = task
    become(version, Path(folder))
    with connect_store(url) as store:
        opening.upgrade(store)


def elsewhere(url: str) -> tuple[str, dict[str, Any]]:
    """Return a place for one more store of the kind: another file, or another schema."""
    return (f"{url}-elsewhere", {}) if url.startswith("sqlite") else (url, {"schema": "elsewhere"})

"""The facts of an SQLite file and the place where it is; nothing is changed, and no file is made.

To read an SQLite file in WAL mode makes files beside it where they are missing.  So the file is opened as one of a
store in use if these are there, and as one that nobody writes if there is no write-ahead log; else it stays closed.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from txnstore.db.names import SQLITE_PREFIX
from txnstore.db.sqlite.backend import SQLiteBackend, may_access
from txnstore.db.sqlite.mounts import file_system_of, other_names, read_mounts
from txnstore.db.sqlite.planted import ADDED
from txnstore.db.url import DatabaseUrl

_DAMAGED: Final = ("SQLITE_NOTADB", "SQLITE_CORRUPT")
_HEADER_MAGIC: Final = b"SQLite format 3\0"
# Whoever has done some of a duty notes when; in a new store nobody had to yet, and of one that moves nobody has to.
# What was noted while the clock was ahead says nothing.
_MAINTAINED: Final = (
    f"SELECT max(created_ms, coalesce((SELECT max(turn_ms) FROM {SQLITE_PREFIX}maintenance_duties"  # noqa: S608 - our own names
    " WHERE turn_ms <= ? + 60000), 0))"
    f" FROM {SQLITE_PREFIX}stores WHERE move_state IS NULL"
)
# One that failed has a pause, which nobody holds.  What nobody has tried for hours may be given up, as a participant.
_FAILING: Final = (
    f"SELECT duty, (:now_ms - begun_ms) / 1000 FROM {SQLITE_PREFIX}maintenance_duties"  # noqa: S608 - our own names
    " WHERE holder IS NULL AND held_until_ms > :now_ms - 7200000 ORDER BY duty"
)


@dataclass(slots=True)
class SQLiteFacts:
    """What is known of a file; None is what is not, and `unknown` says why, by the fact's name.

    There also stand "file" and "inside", for all that is known of the file, and by reading it.
    """

    path: str
    """Empty: a store in memory, of this process alone."""

    version: tuple[int, int, int] = field(default_factory=lambda: sqlite3.sqlite_version_info)
    unknown: dict[str, str] = field(default_factory=dict)
    file_system: str | None = None
    """Its type, as the system calls it."""

    free_bytes: int | None = None
    """For this user, where the file is."""

    is_mounted_read_only: bool | None = None
    folder_exists: bool | None = None
    may_write_folder: bool | None = None
    may_write_file: bool | None = None
    """None also if there is no file."""

    other_names: str | None = None
    """How the file can be reached by another name; None if by none, or if there is no file."""

    size_bytes: int | None = None
    log_bytes: int | None = None
    """The write-ahead log's size; 0: there is none."""

    damage: str | None = None
    """What SQLite says of a file that is not its own, or is damaged."""

    journal_mode: str | None = None
    pages: int | None = None
    free_pages: int | None = None
    page_bytes: int | None = None
    tables: Collection[str] | None = None
    """Tables and views, without our prefix; empty: there is no store."""

    added: Sequence[Sequence[Any]] = ()
    """What may have been put on our tables by others: the rows of `planted.ADDED`."""

    table_version: str | None = None
    unmaintained_seconds: int | None = None
    """For how long nobody has done any of the maintenance; None also if there is no store, or one that moves."""

    failing_duties: Sequence[Sequence[Any]] = ()
    """Of the maintenance, those that failed the last time, and how many seconds ago somebody last did some of each."""

    recorded_identity: str | None = None
    identity: str | None = None


def read_sqlite_facts(url: DatabaseUrl, *, version_table: str) -> SQLiteFacts:
    """Return what is known of the file at `url`."""
    database = url.url.database
    if url.is_in_memory:
        return SQLiteFacts("")
    assert database is not None
    path = Path(database).absolute()
    facts = SQLiteFacts(str(path))
    try:
        _read_place(facts, path)
        if path.exists():
            # What SQLite keeps beside it lies where the file is, not where a link to it is.
            path = path.resolve()
            _read_file(facts, path)
    except OSError as error:
        facts.unknown["file"] = error.strerror or type(error).__name__
        return facts
    if facts.size_bytes:
        _look_inside(facts, path, version_table)
    return facts


def _read_place(facts: SQLiteFacts, path: Path) -> None:
    folder = path.resolve().parent
    facts.folder_exists = folder.is_dir()
    if not facts.folder_exists:
        return
    facts.may_write_folder = may_access(folder, os.W_OK | os.X_OK)
    if hasattr(os, "statvfs"):
        place = os.statvfs(folder)
        facts.free_bytes = place.f_bavail * place.f_frsize
        facts.is_mounted_read_only = bool(place.f_flag & os.ST_RDONLY)
    else:
        facts.unknown["free_bytes"] = facts.unknown["is_mounted_read_only"] = "this system does not tell"
    try:
        facts.file_system = file_system_of(folder, read_mounts())
    except OSError:
        facts.unknown["file_system"] = "only Linux tells what kind of file system a folder is in"


def _read_file(facts: SQLiteFacts, path: Path) -> None:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        facts.damage = "it is not a regular file"
        return
    facts.size_bytes, facts.other_names = found.st_size, other_names(path)
    facts.may_write_file = may_access(path, os.W_OK)
    log = Path(f"{path}-wal")
    facts.log_bytes = log.stat().st_size if log.exists() else 0


def _look_inside(facts: SQLiteFacts, path: Path, version_table: str) -> None:
    has_log, has_index = Path(f"{path}-wal").exists(), Path(f"{path}-shm").exists()
    if has_log and not has_index and facts.log_bytes:
        facts.unknown["inside"] = "its write-ahead log has to be recovered first, by a program that opens it for work"
        return
    is_immutable = not (has_log and has_index)
    address = f"file:{quote(str(path))}?mode=ro{'&immutable=1' if is_immutable else ''}"
    connection: sqlite3.Connection | None = None
    try:
        connection = sqlite3.connect(address, uri=True, timeout=1.0, isolation_level=None)
        connection.execute("PRAGMA trusted_schema = OFF")
        _read_inside(facts, connection, version_table, is_immutable=is_immutable)
        if "stores" in (facts.tables or ()):
            facts.identity = SQLiteBackend.identity_of(str(path))
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "") or type(error).__name__
        if name.startswith(_DAMAGED):
            facts.damage = f"SQLite answers {name}"
        else:
            facts.unknown["inside"] = f"SQLite answers {name}"
    finally:
        if connection is not None:
            connection.close()


def _read_inside(facts: SQLiteFacts, connection: sqlite3.Connection, version_table: str, *, is_immutable: bool) -> None:
    def value(statement: str, *parameters: int) -> object:
        row = connection.execute(statement, parameters).fetchone()
        return None if row is None else row[0]

    # Read as one that nobody writes, a file has no log for SQLite; its header tells.
    facts.journal_mode = _mode_in_header(facts.path) if is_immutable else str(value("PRAGMA journal_mode"))
    facts.page_bytes = int(str(value("PRAGMA page_size")))
    facts.pages = int(str(value("PRAGMA page_count")))
    facts.free_pages = int(str(value("PRAGMA freelist_count")))
    rows = connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')").fetchall()
    names = {str(name) for (name,) in rows}
    facts.tables = {name.removeprefix(SQLITE_PREFIX) for name in names if name.startswith(SQLITE_PREFIX)}
    if version_table in facts.tables:
        facts.table_version = str(value(f"SELECT group_concat(version_num) FROM {SQLITE_PREFIX}{version_table}"))  # noqa: S608 - our own names
    if "stores" in facts.tables:
        recorded = value(f"SELECT database_identity FROM {SQLITE_PREFIX}stores")  # noqa: S608 - our own names
        facts.recorded_identity = None if recorded is None else str(recorded)
        facts.added = connection.execute(ADDED).fetchall()
    if {"stores", "maintenance_duties"} <= facts.tables:
        now_ms = time.time_ns() // 1_000_000
        maintained_ms = value(_MAINTAINED, now_ms)
        if maintained_ms is not None:
            facts.unmaintained_seconds = (now_ms - int(str(maintained_ms))) // 1000
            facts.failing_duties = connection.execute(_FAILING, {"now_ms": now_ms}).fetchall()


def _mode_in_header(path: str) -> str:
    # To close the file gives up all locks of this process on it: it has none, because there is no log.
    with Path(path).open("rb") as file:
        header = file.read(20)
    if header[:16] != _HEADER_MAGIC:
        return "unknown"
    # https://www.sqlite.org/fileformat.html#file_format_version_numbers
    return "wal" if header[18] == 2 else "delete"  # noqa: PLR2004 - the number of the format

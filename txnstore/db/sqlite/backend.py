"""SQLite's side of the seam: WAL with full durability, one writer at a time, and its error codes."""

from __future__ import annotations

import atexit
import itertools
import os
import re
import shutil
import sqlite3
import stat
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.sqlite.base import SQLiteIdentifierPreparer
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool

from txnstore.clock import Clock
from txnstore.db.backend import Access, CommitWhole, Holder, Limits, Stage, Subjects, WriteAtOnce
from txnstore.db.names import CODE_SCHEMA, SQLITE_PREFIX, VIEWS, StoreName
from txnstore.db.sqlite.closing import CLOSED
from txnstore.db.sqlite.connections import (
    Checkpointer,
    CommitStamps,
    SQLiteConnection,
    close_before_fork,
    connect,
    set_wait_for_disk,
    waiting,
)
from txnstore.db.sqlite.log_file import file_has_gone
from txnstore.db.sqlite.mounts import other_names
from txnstore.db.sqlite.planted import ADDED, planted
from txnstore.db.sqlite.waiter import FileWaiter
from txnstore.db.statements import CompiledStatements, run_on_driver
from txnstore.db.url import DatabaseUrl
from txnstore.errors import (
    ForeignSchema,
    InvalidUrl,
    OutcomeUnknown,
    PermissionDenied,
    StatementFailed,
    StatementTimedOut,
    StoreBusy,
    StoreDamaged,
    StoreFull,
    StoreMoved,
    StoreReadOnly,
    StoreUnavailable,
    TransactionPoisoned,
    TxnStoreError,
)

#: "TXNS": marks a file that txnstore created.
APPLICATION_ID: Final = 0x54584E53
#: Result codes by name, longest match first: https://www.sqlite.org/rescode.html
ERRORS_BY_NAME: Final[dict[str, type[TxnStoreError]]] = {
    "SQLITE_BUSY": StoreBusy,
    "SQLITE_LOCKED": StoreBusy,
    "SQLITE_PROTOCOL": StoreBusy,
    "SQLITE_FULL": StoreFull,
    "SQLITE_READONLY": StoreReadOnly,
    "SQLITE_IOERR": StoreUnavailable,
    "SQLITE_CANTOPEN": StoreUnavailable,
    "SQLITE_NOMEM": StoreUnavailable,
    "SQLITE_CORRUPT": StoreDamaged,
    "SQLITE_NOTADB": StoreDamaged,
    "SQLITE_PERM": PermissionDenied,
    "SQLITE_AUTH": PermissionDenied,
    "SQLITE_INTERRUPT": StatementTimedOut,
}
#: At COMMIT these leave it open whether the frames in the WAL count: they may come back after a crash.
UNKNOWN_AT_COMMIT: Final = ("SQLITE_IOERR", "SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_CANTOPEN", "SQLITE_NOMEM")

#: What SQLite says, without a code of its own, when somebody has changed our tables.
MISSING: Final = re.compile(r"^no such (table|column): |^table \S+ has no column named ")
# Of a table the statement that made it, and each column.
_COLUMNS: Final = text(
    'SELECT m.name, m.sql, x.name, x."notnull", x.pk FROM main.sqlite_master m JOIN pragma_table_xinfo(m.name) x'
    " WHERE m.type = 'table' AND substr(m.name, 1, :length) = :prefix ORDER BY m.name, x.pk"
)
_COMMENT: Final = re.compile(r"--[^\n]*|/\*.*?\*/", re.DOTALL)
_NAMED_RULE: Final = re.compile(r'\bCONSTRAINT\s+"?(\w+)"?\s+(CHECK|UNIQUE)\b', re.IGNORECASE)
_GENERATED: Final = re.compile(r"\bAUTOINCREMENT\b", re.IGNORECASE)
# A table without an index: of each name one row is kept by SQLite itself.
_LAST_KEY: Final = text("SELECT seq FROM sqlite_sequence WHERE name = :of_table")
_FORGET_KEY: Final = text("DELETE FROM sqlite_sequence WHERE name = :of_table")
_ENTER_KEY: Final = text("INSERT INTO sqlite_sequence (name, seq) VALUES (:of_table, :last)")

#: Which of these it is, `txnstore doctor` can tell.
_UNWRITABLE: Final = ": this user may not write to the file or its folder, or their file system is mounted read-only"
_NO_DATABASE: Final = ": the file is no SQLite database, or an encrypted one"

#: The first one with STRICT tables.
OLDEST_VERSION: Final = (3, 37, 0)


class _PrefixingPreparer(SQLiteIdentifierPreparer):
    """Puts the prefix before the names of our tables and indexes, and leaves out their schema."""

    def quote(self, ident: str) -> str:
        return super().quote(SQLITE_PREFIX + ident if isinstance(ident, StoreName) else ident)

    def schema_for_object(self, obj: Any) -> str | None:  # type: ignore[override]  # declared as an attribute
        return None if obj.schema == CODE_SCHEMA else obj.schema


class StoreSQLiteDialect(SQLiteDialect_pysqlite):
    """SQLAlchemy's own dialect with our names and our clock."""

    preparer = _PrefixingPreparer
    supports_statement_cache = True
    clock: Clock | None = None

    def do_execute(self, cursor: Any, statement: str, parameters: Any, context: Any = None) -> None:
        """Run a statement, unless it would be one by itself."""
        _refuse_after_rollback(cursor)
        cursor.execute(statement, parameters)

    def do_executemany(self, cursor: Any, statement: str, parameters: Any, context: Any = None) -> None:
        """Run a statement several times, unless it would be one by itself."""
        _refuse_after_rollback(cursor)
        cursor.executemany(statement, parameters)

    def do_execute_no_params(self, cursor: Any, statement: str, context: Any = None) -> None:
        """Run a statement without parameters, unless it would be one by itself."""
        _refuse_after_rollback(cursor)
        cursor.execute(statement)


registry.register("sqlite.txnstore", __name__, "StoreSQLiteDialect")


class _LocalClock:
    """This machine's clock: for SQLite, the database server is this machine."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000


_LOCAL_CLOCK: Final = _LocalClock()


class SQLiteBackend:
    """SQLite: everything in one file, also for several processes on one machine."""

    name = "sqlite"
    has_one_writer = True
    keeps_prepared = False
    every_commit_wakes_readers = True
    #: Statements are calls within the process here: none of them waits for another computer.
    commit_whole: CommitWhole | None = None
    commit_whole_in: CommitWhole | None = None
    write_at_once: WriteAtOnce | None = None

    def create_engine(
        self, url: DatabaseUrl, *, schema: str, clock: Clock | None, limits: Limits, pool_size: int
    ) -> Engine:
        """Return an engine on the file; a new file is readable by its owner only."""
        del schema  # SQLite has no schemas: names carry a prefix
        path = _path_of(url)
        _check_names(path)
        engine = create_engine(
            "sqlite+txnstore://",
            creator=_opener(path),
            poolclass=QueuePool,
            pool_size=pool_size,
            max_overflow=pool_size,
            pool_timeout=limits.retry_timeout_ms / 1000,
            isolation_level="AUTOCOMMIT",
            hide_parameters=True,
            execution_options={"compiled_cache": CompiledStatements()},
        )
        engine.dialect.clock = clock or _LOCAL_CLOCK  # type: ignore[attr-defined]  # our own dialect class
        close_before_fork(engine, Engine.dispose)
        # Not on the dialect, which outlives its engine: statements are rendered with it.
        engine.checkpointer = Checkpointer(path)  # type: ignore[attr-defined]  # nobody else's attribute
        return engine

    def close_before_fork(self, holder: Holder, let_go: Callable[[Holder], None]) -> None:
        """Remember to do so: see `connections`."""
        close_before_fork(holder, let_go)

    def let_go(self, engine: Engine) -> None:
        """Close the connections that checkpoint."""
        engine.checkpointer.close_connections()  # type: ignore[attr-defined]  # set above

    def begin(self, connection: Connection, access: Access, limits: Limits) -> None:
        """Begin; a writer takes the file's one write lock at once.

        A deferred transaction that turns to writing after somebody else's commit fails with BUSY_SNAPSHOT, whatever
        the time it waits.
        """
        driver = _driver_connection(connection)
        if driver.leads_elsewhere():
            gone = driver.what_has_gone()
            # The next connection leads to what is there now.
            connection.invalidate()
            self.let_go(connection.engine)
            raise gone
        driver.is_writing = access is Access.WRITE
        if access is Access.WRITE:
            # Without a log the file itself is at risk. Other limits are for nobody: the write lock is held for one
            # short transaction of a process on this machine.
            waits_for_disk = limits.waits_for_disk or not driver.is_in_wal_mode
            if driver.waits_for_disk is not waits_for_disk:
                driver.waits_for_disk = None
                run_on_driver(connection, set_wait_for_disk(waits=waits_for_disk))
                driver.waits_for_disk = waits_for_disk
            driver.wait_in_line()
            run_on_driver(connection, "BEGIN IMMEDIATE")
            driver.enter_line()
        else:
            run_on_driver(connection, "BEGIN")
        driver.is_in_ours = True

    def commit(self, connection: Connection) -> None:
        """Commit; refused if SQLite has rolled back by itself, as it does when the disk is full."""
        driver = _driver_connection(connection)
        if not driver.in_transaction:
            raise TransactionPoisoned("SQLite had rolled this database transaction back already; nothing was changed")
        run_on_driver(connection, "COMMIT")
        driver.leave_line()
        driver.is_in_ours = False
        driver.close_cursors()
        if driver.is_writing and driver.leads_elsewhere():
            raise OutcomeUnknown(
                f"the SQLite file {driver.path!r} or its write-ahead log was moved, removed or replaced during a"
                " commit: only the content of the file tells whether the change was made"
            )

    def rollback(self, connection: Connection) -> None:
        """Roll back if SQLite has not done so by itself."""
        driver = _driver_connection(connection)
        driver.is_in_ours = False
        driver.close_cursors()
        if driver.in_transaction:
            run_on_driver(connection, "ROLLBACK")
        driver.leave_line()

    def translate(self, error: DBAPIError, stage: Stage) -> TxnStoreError:
        """Return our error by the name of SQLite's result code; its text holds neither values nor secrets."""
        name = getattr(error.orig, "sqlite_errorname", None) or "SQLITE_ERROR"
        detail = f"SQLite answered {name} while {stage.value}"
        if stage is Stage.COMMIT and name.startswith(UNKNOWN_AT_COMMIT):
            return OutcomeUnknown(f"{detail}: whether the change was made will show at the next write")
        for prefix, kind in ERRORS_BY_NAME.items():
            if name.startswith(prefix):
                why = _UNWRITABLE if kind is StoreReadOnly else _NO_DATABASE if prefix == "SQLITE_NOTADB" else ""
                return kind(f"{detail}{why}; nothing was changed")
        if name == "SQLITE_CONSTRAINT_TRIGGER" and str(error.orig).startswith(CLOSED):
            return StoreMoved(f"{error.orig}; nothing was changed")
        kind = ForeignSchema if MISSING.search(str(error.orig)) else StatementFailed
        return kind(f"{detail} ({error.orig}); nothing was changed")

    def is_contended(self, error: DBAPIError) -> bool:
        """Return whether another connection holds the lock that is needed."""
        name = getattr(error.orig, "sqlite_errorname", None) or ""
        return name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL"))

    def after_commit(self, engine: Engine) -> None:
        """Move the WAL into the file once it is long."""
        engine.checkpointer.run_if_due()  # type: ignore[attr-defined]  # set above

    def reclaim(self, engine: Engine, url: DatabaseUrl, *, schema: str) -> int:
        """Do nothing: the pages of deleted rows take the next ones."""
        del engine, url, schema
        return 0

    def waiter(self, engine: Engine, url: DatabaseUrl, subjects: Subjects, *, channel: str) -> FileWaiter:
        """Return what notices commits of other connections by the file's data version."""
        del channel
        return FileWaiter(_path_of(url), subjects, engine.dialect)

    def announcer(self, url: DatabaseUrl, *, channel: str) -> FileAnnouncer:
        """Return what wakes readers of the file."""
        del channel
        return FileAnnouncer(_path_of(url))

    def exists(self, url: DatabaseUrl) -> bool:
        """Return whether the file is there."""
        return Path(_path_of(url)).exists()

    def identity(self, connection: Connection) -> str:
        """Return file system:file, by their numbers: the same after a move within one and VACUUM.

        Most file systems make their number of their uuid (ext4, Btrfs), so it outlives a new mount. XFS and those over
        a network make it of the device's number, which may be another one after a start: the store seems moved then.
        """
        files = run_on_driver(connection, "PRAGMA database_list").rows
        path: str = next(path for _, name, path in files if name == "main")
        try:
            return self.identity_of(path)
        except FileNotFoundError:
            raise file_has_gone(path) from None

    def running(self, connection: Connection) -> str:
        """Return the same."""
        return self.identity(connection)

    @staticmethod
    def identity_of(path: str) -> str:
        """Return the same of a file that is not open."""
        file = os.stat(path)  # noqa: PTH116 - as everywhere here
        file_system = os.statvfs(path).f_fsid if hasattr(os, "statvfs") else file.st_dev
        return f"{file_system or file.st_dev:x}:{file.st_ino}"

    def is_standby(self, connection: Connection) -> bool:
        """Return False: a file is the only one."""
        return False

    def is_known_standby(self, connection: Connection) -> bool:
        """Return False as well."""
        return False

    def check_database(self, connection: Connection, names: Collection[str]) -> None:
        """Refuse an SQLite without STRICT tables, and a file in which a stranger's statements would run with ours."""
        if sqlite3.sqlite_version_info < OLDEST_VERSION:
            raise InvalidUrl(
                f"this Python has SQLite {sqlite3.sqlite_version}; txnstore needs"
                f" {'.'.join(map(str, OLDEST_VERSION))} or newer"
            )
        found = list(planted(run_on_driver(connection, ADDED).rows, names))
        if found:
            raise ForeignSchema(
                f"txnstore's tables in the SQLite file have something on them that txnstore did not make:"
                f" {', '.join(found[:3])}; it would run with every statement. Drop it if you know where it comes from"
            )

    def version(self, connection: Connection) -> str:
        """Return the library's version."""
        return f"SQLite {connection.exec_driver_sql('SELECT sqlite_version()').scalar_one()}"

    def storage_sizes(self, connection: Connection, schema: str) -> dict[str, int]:
        """Return the sizes of the file and of what stands beside it."""
        del schema
        path = connection.exec_driver_sql("SELECT file FROM pragma_database_list WHERE name = 'main'").scalar_one()
        return {"file": _file_size(path), **{f"{name}_file": _file_size(f"{path}-{name}") for name in ("wal", "shm")}}

    def prepare_place(self, connection: Connection, schema: str) -> None:
        """Mark a file that holds nothing else as ours, for `file` and the like; an application's own mark stays."""
        del schema
        (tables,) = connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").one()
        if tables == 0:
            connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")

    def table_names(self, connection: Connection, schema: str) -> frozenset[str]:
        """Return the names without our prefix."""
        del schema
        rows = connection.execute(
            text(
                "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND substr(name, 1, :length) = :prefix"
            ),
            {"length": len(SQLITE_PREFIX), "prefix": SQLITE_PREFIX},
        )
        return frozenset(name.removeprefix(SQLITE_PREFIX) for (name,) in rows)

    def schemas_of_stores(self, connection: Connection) -> list[str]:
        """Return none: a file has no schemas."""
        return []

    def hidden_tables(self, connection: Connection, schema: str) -> frozenset[str]:
        """Return none: a file is read as a whole."""
        return frozenset()

    def narrowed_tables(
        self, connection: Connection, schema: str, names: Collection[str], *, when_locking: bool = False
    ) -> list[str]:
        """Return none, for the same reason."""
        return []

    def checked_relations(self, connection: Connection, schema: str) -> list[str]:
        """Return the tables."""
        return sorted(self.table_names(connection, schema) - {*VIEWS})

    def check_relation(self, connection: Connection, schema: str, name: str) -> None:
        """Let SQLite compare a table with its indexes, and its pages with each other."""
        del schema
        # It takes no parameters; the name is one of a table, and is quoted.
        quoted = (SQLITE_PREFIX + name).replace('"', '""')
        found = run_on_driver(connection, f'PRAGMA integrity_check("{quoted}")').rows
        if [tuple(row) for row in found] != [("ok",)]:
            raise StoreDamaged("; ".join(str(row[0]) for row in found[:3]))

    def table_rules(self, connection: Connection, schema: str) -> list[tuple[str, str, frozenset[str]]]:
        """Return what stands in the statements that made the tables, and what SQLite makes of their columns."""
        del schema
        found = []
        rows = connection.execute(_COLUMNS, {"length": len(SQLITE_PREFIX), "prefix": SQLITE_PREFIX})
        for (name, sql), columns in itertools.groupby(rows, lambda row: (row[0], row[1])):
            made_by = _COMMENT.sub("", sql)
            rules = {f"{kind.upper()} {rule}" for rule, kind in _NAMED_RULE.findall(made_by)}
            key = []
            for *_, column, takes_no_null, place_in_key in columns:
                if takes_no_null:
                    rules.add(f"NOT NULL {column}")
                if place_in_key:
                    key.append(column)
            if key:
                rules.add(f"PRIMARY KEY ({', '.join(key)})")
                if _GENERATED.search(made_by):
                    rules.add(f"IDENTITY {key[0]}")
            table = name.removeprefix(SQLITE_PREFIX)
            found.append((table, table, frozenset(rules)))
        return found

    def next_key(self, connection: Connection, schema: str, table: str, column: str) -> int:
        """Return the one after the last that AUTOINCREMENT gave out."""
        del schema, column
        last = connection.execute(_LAST_KEY, {"of_table": SQLITE_PREFIX + table}).scalar()
        return int(last or 0) + 1

    def set_next_key(self, connection: Connection, schema: str, table: str, column: str, key: int) -> None:
        """Write it where AUTOINCREMENT keeps it."""
        del schema, column
        connection.execute(_FORGET_KEY, {"of_table": SQLITE_PREFIX + table})
        connection.execute(_ENTER_KEY, {"of_table": SQLITE_PREFIX + table, "last": key - 1})


class FileAnnouncer:
    """Wakes the readers of a file: by stamps, and those of this process that see none by a call."""

    def __init__(self, path: str) -> None:
        """Wake readers of the file at `path`."""
        self._path = path
        self._stamps: CommitStamps | None = None
        self._has_looked_for_stamps = False

    def announce(self, subjects: Subjects) -> None:
        """Say that something was committed."""
        if not self._has_looked_for_stamps:
            self._has_looked_for_stamps, self._stamps = True, CommitStamps.beside(self._path)
        if self._stamps is not None:
            self._stamps.put(subjects)
        for waiter in waiting.at(self._path):
            if waiter.subjects.meets(subjects) and not (self._stamps is not None and waiter.sees_stamps):
                waiter.wake()

    def close(self, timeout_seconds: float) -> None:
        """Give the stamps back."""
        self._stamps = None


def _file_size(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - the text is SQLite's own
    except OSError:
        return 0


def _opener(path: str) -> Callable[[], SQLiteConnection]:
    """Return what opens connections to the file, and makes it only where it makes the first one."""
    is_there = False

    def open_one() -> SQLiteConnection:
        nonlocal is_there
        try:
            connection = connect(path, is_there=is_there)
        except FileNotFoundError:
            # Between its opening and a look at it.
            raise file_has_gone(path) from None
        except sqlite3.Error as error:
            raise _why_unwritable(error, path) or error from None
        is_there = True
        return connection

    return open_one


def _driver_connection(connection: Connection) -> SQLiteConnection:
    driver: Any = connection.connection.driver_connection
    assert isinstance(driver, SQLiteConnection)
    return driver


def _refuse_after_rollback(cursor: Any) -> None:
    """Refuse a statement after SQLite rolled back by itself: it would commit alone, a torn transaction."""
    driver = getattr(cursor, "connection", None)
    if isinstance(driver, SQLiteConnection) and driver.is_in_ours and not driver.in_transaction:
        raise TransactionPoisoned


def _path_of(url: DatabaseUrl) -> str:
    """Return the file; a store in memory is a temporary file that all stores of this process share."""
    database = url.url.database
    if url.url.query:
        raise InvalidUrl("an SQLite URL takes no options: only sqlite:///path/to/file.db")
    if url.is_in_memory:
        return _memory_path()
    assert database is not None
    if database.startswith("file:"):
        raise InvalidUrl("give the plain path of the SQLite file, not a file: URI")
    path = Path(database).absolute()
    _check_path(path)
    return str(path)


def _check_path(path: Path) -> None:
    """Refuse what can be no SQLite file, without waiting for it: to open a FIFO waits for its other end."""
    try:
        if not stat.S_ISDIR(path.parent.stat().st_mode):
            raise InvalidUrl(f"the folder of the SQLite file {str(path)!r} is not a folder")
        if not stat.S_ISREG(path.stat().st_mode):
            raise InvalidUrl(f"{str(path)!r} is not a file: an SQLite store is one regular file")
        if not may_access(path, os.R_OK):
            raise PermissionDenied(f"this user may not read the SQLite file {str(path)!r}")
    except FileNotFoundError:
        if path.is_symlink():
            # SQLite would make the file wherever a stranger wants it, and readable by all.
            raise InvalidUrl(f"{str(path)!r} is a symbolic link to a file that does not exist") from None
        if not path.parent.exists():
            raise InvalidUrl(f"the folder of the SQLite file {str(path)!r} does not exist; create it first") from None
        if not may_access(path.parent, os.W_OK):
            raise PermissionDenied(f"this user may not make the SQLite file {str(path)!r}") from None
    except PermissionError:
        raise PermissionDenied(f"this user may not look for the SQLite file {str(path)!r}") from None
    except OSError as error:
        raise InvalidUrl(f"{str(path)!r} cannot be an SQLite file: {error.strerror}") from None


def _check_names(path: str) -> None:
    """Refuse a file of several names: whoever opens it by another one looks for another log, and takes commits away.

    Not of a store that is open: backups make a second name for a moment.
    """
    if (others := other_names(Path(path))) is not None:
        raise InvalidUrl(
            f"{path!r} is not opened: {others}, and the write-ahead log lies beside the name that is used. Of several"
            " names, keep the one with files -wal and -shm beside it, if one has them, and remove the others; mount the"
            " folder of the file, not the file"
        )


def may_access(path: Path, mode: int) -> bool:
    """Return whether this user may read or write; SQLite would say that it cannot open the file, and not why."""
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def _is_mounted_read_only(folder: Path) -> bool:
    """Return whether the file system of a folder is; one that has gone meanwhile is not."""
    try:
        return hasattr(os, "statvfs") and bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def _why_unwritable(error: BaseException | None, path: str) -> StoreReadOnly | None:
    """Return what cannot be written, and what to do, if that is what SQLite means and anybody can tell."""
    if not getattr(error, "sqlite_errorname", "").startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")):
        return None
    folder = Path(path).resolve().parent
    if _is_mounted_read_only(folder):
        return StoreReadOnly(
            f"the file system of {path!r} is mounted read-only: mount it for writing, or put the file elsewhere;"
            " nothing was changed"
        )
    for kind, place in (("folder", folder), *(("file", Path(path + ending)) for ending in ("", "-wal", "-shm"))):
        if place.exists() and not may_access(place, os.W_OK):
            return StoreReadOnly(
                f"this user may not write to the {kind} {str(place)!r}, as SQLite must, for the write-ahead log that it"
                " keeps beside a file: grant that right, or put the file elsewhere; nothing was changed"
            )
    return None


_memory_folder: str | None = None


def _memory_path() -> str:
    """Return the file behind `sqlite://`, deleted when the process ends.

    SQLite's own memory databases have no WAL and lock whole tables; a file that nobody else knows has the same
    behaviour as the real thing.
    """
    global _memory_folder  # noqa: PLW0603 - one for the process, made at first use
    if _memory_folder is None:
        _memory_folder = tempfile.mkdtemp(prefix="txnstore-")
        atexit.register(_remove_memory_folder, _memory_folder, os.getpid())
    return str(Path(_memory_folder) / "memory.db")


def _remove_memory_folder(folder: str, owner: int) -> None:
    # A forked child ends as well, and the folder is still its parent's.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)

"""The checks of an SQLite file, its place, and the SQLite of this Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from txnstore.db.names import VERSION_TABLE, VIEWS
from txnstore.db.schema import metadata
from txnstore.db.sqlite.backend import OLDEST_VERSION
from txnstore.db.sqlite.facts import SQLiteFacts
from txnstore.db.sqlite.planted import planted
from txnstore.doctor.checks import (
    COPY_CONSEQUENCE,
    COPY_REMEDY,
    UNMAINTAINED_CONSEQUENCE,
    UNMAINTAINED_REMEDY,
    UNMAINTAINED_SECONDS_MAX,
    VERSION_CONSEQUENCE,
    VERSION_REMEDY,
    Check,
    Grade,
    check,
    known,
    other_place,
    seconds_text,
    size_text,
    unmaintained,
    wrong_version,
)

#: The first version without the WAL-reset bug.
WAL_RESET_MENDED: Final = (3, 51, 3)
#: The same for older lines that it was brought to.
_MENDED_LINES: Final = {(3, 44): 6, (3, 50): 7}
FREE_BYTES_MIN: Final = 64 << 20
LOG_BYTES_MAX: Final = 256 << 20
UNUSED_BYTES_MAX: Final = 64 << 20
#: File systems of other machines: no shared memory between those that mount them, and locks that may not hold.
_REMOTE: Final = re.compile(
    r"nfs\d*|cifs|smb\w*|ncpfs|afs|ceph|gfs2?|glusterfs|lustre|beegfs|gpfs|9p|virtiofs|vboxsf|vmhgfs|drvfs|prl_fs|davfs"
    r"|fuse\.(?!ext|ntfs|exfat|lxcfs).*"
)
_OURS: Final = frozenset(str(table.name) for table in metadata.tables.values())


@check(
    "old-sqlite",
    Grade.PROBLEM,
    "the version of the SQLite that Python brings",
    "The tables cannot be made.",
    "Use a Python with a newer SQLite.",
)
def _version(facts: SQLiteFacts) -> Iterator[str]:
    if facts.version < OLDEST_VERSION:
        yield f"this Python has SQLite {_dotted(facts.version)}, txnstore needs {_dotted(OLDEST_VERSION)}"


@check(
    "wal-reset-bug",
    Grade.ADVICE,
    "the same: 3.7.0 to 3.51.2, but for 3.44.6 and 3.50.7, have the defect",
    "Where one connection checkpoints while another one writes, the file may be damaged. txnstore's own connections"
    " never do; those of other programs on the file do by default.",
    "Let other programs set `PRAGMA wal_autocheckpoint = 0` and open the file after a store has; or use SQLite"
    " 3.51.3 or newer.",
)
def _wal_reset(facts: SQLiteFacts) -> Iterator[str]:
    patch = _MENDED_LINES.get(facts.version[:2])
    if facts.version < WAL_RESET_MENDED and (patch is None or facts.version[2] < patch):
        yield f"this Python has SQLite {_dotted(facts.version)}"


@check(
    "folder",
    Grade.PROBLEM,
    "the folder of the file, and its permissions",
    "The file cannot be made, nor its write-ahead log beside it, without which nothing is written.",
    "Make the folder, and let the user of the program write to it.",
    needs=("folder_exists",),
)
def _folder(facts: SQLiteFacts) -> Iterator[str]:
    if not facts.folder_exists:
        yield "there is no such folder"
    elif not facts.may_write_folder:
        yield "this user may not make files in the folder"


@check(
    "file-rights",
    Grade.PROBLEM,
    "the permissions of the file",
    "The program can read and not write.",
    "Let the user of the program write to the file.",
    needs=("file",),
)
def _file_rights(facts: SQLiteFacts) -> Iterator[str]:
    if not facts.may_write_file and facts.may_write_file is not None:
        yield "this user may not write to the file"


@check(
    "read-only-file-system",
    Grade.PROBLEM,
    "statvfs(3)",
    "Nothing can be written, and without a write-ahead log nothing be read.",
    "Mount it for writing, or put the file elsewhere.",
    needs=("is_mounted_read_only",),
)
def _read_only(facts: SQLiteFacts) -> Iterator[str]:
    if facts.is_mounted_read_only:
        yield "the file system is mounted read-only"


@check(
    "network-file-system",
    Grade.PROBLEM,
    "/proc/self/mountinfo: NFS, SMB, FUSE, 9p and their like",
    "The write-ahead log needs memory that all processes share, and locks that hold: on a network file system the"
    " database may be damaged, and machines do not see each other's commits.",
    "Put the file on a disk of this machine; where several machines write, use PostgreSQL.",
    needs=("file_system",),
)
def _file_system(facts: SQLiteFacts) -> Iterator[str]:
    if facts.file_system is not None and _REMOTE.fullmatch(facts.file_system):
        yield f"the file is on a file system of type {facts.file_system}"


@check(
    "full-disk",
    Grade.PROBLEM,
    f"statvfs(3): less than {size_text(FREE_BYTES_MIN)}",
    "Writes fail with StoreFull once it is full, and so does what deletes; nothing is lost that was acknowledged.",
    "Free some room; before it is full, topics can keep less (retention.ms, retention.bytes).",
    needs=("free_bytes",),
)
def _disk(facts: SQLiteFacts) -> Iterator[str]:
    if (free_bytes := known(facts.free_bytes)) < FREE_BYTES_MIN:
        yield f"{size_text(free_bytes)} are free where the file is"


@check(
    "hard-links",
    Grade.PROBLEM,
    "how many names the file has, and /proc/self/mountinfo: whether it is mounted by itself",
    "The write-ahead log lies beside the name that is used: who opens the file by another one does not see it, and"
    " damages the database. So no client opens it.",
    "Of several names, keep the one with files -wal and -shm beside it, which may hold the last commits, and remove the"
    " others; if none has them, any may stay; if several have, keep copies of all and restore a"
    " backup. Mount the folder of the file, not the file.",
)
def _names(facts: SQLiteFacts) -> Iterator[str]:
    if facts.other_names is not None:
        yield facts.other_names


@check(
    "damage",
    Grade.PROBLEM,
    "what SQLite says when it opens the file",
    "No client can use it.",
    "If it should hold a database, restore it from a backup; else give the URL of another file.",
    needs=("inside",),
)
def _damage(facts: SQLiteFacts) -> Iterator[str]:
    if facts.damage is not None:
        yield facts.damage


@check(
    "journal-mode",
    Grade.ADVICE,
    "PRAGMA journal_mode of a file that holds a store",
    "Another program has changed it, or made the file as a copy (VACUUM INTO). The next client changes it back,"
    " which fails while others have the file open.",
    "Nothing, if it is a copy; else let no other program set journal_mode.",
    needs=("inside", "journal_mode"),
)
def _journal_mode(facts: SQLiteFacts) -> Iterator[str]:
    if "stores" in (facts.tables or ()) and facts.journal_mode != "wal":
        yield f"journal_mode is {facts.journal_mode}"


@check(
    "long-log",
    Grade.ADVICE,
    f"the write-ahead log: more than {size_text(LOG_BYTES_MAX)}",
    "A reader has kept a snapshot for long, or nobody moves the log into the file: reads become slower, and the"
    " disk fills.",
    "Find the program that keeps a read transaction open, and end it; the next commits shorten the log.",
    needs=("log_bytes",),
)
def _log(facts: SQLiteFacts) -> Iterator[str]:
    if (log_bytes := known(facts.log_bytes)) > LOG_BYTES_MAX:
        yield f"the write-ahead log has {size_text(log_bytes)}"


@check(
    "unused-pages",
    Grade.ADVICE,
    f"PRAGMA freelist_count: more than half, and {size_text(UNUSED_BYTES_MAX)}",
    "The file is larger than what it holds; the room is used again, but not given back.",
    "`VACUUM` when no client is at work, if the disk needs it.",
    needs=("inside", "pages", "free_pages", "page_bytes"),
)
def _unused(facts: SQLiteFacts) -> Iterator[str]:
    pages, free_pages, page_bytes = known(facts.pages), known(facts.free_pages), known(facts.page_bytes)
    unused_bytes = free_pages * page_bytes
    if unused_bytes > UNUSED_BYTES_MAX and 2 * free_pages > pages:
        yield f"{size_text(unused_bytes)} of {size_text(pages * page_bytes)} hold nothing"


@check(
    "tables",
    Grade.PROBLEM,
    "the version table and the names of tables",
    VERSION_CONSEQUENCE,
    VERSION_REMEDY,
    needs=("inside", "tables"),
)
def _tables(facts: SQLiteFacts) -> Iterator[str]:
    tables = known(facts.tables)
    yield from wrong_version(tables, _OURS, facts.table_version, VERSION_TABLE in tables)


@check(
    "planted",
    Grade.PROBLEM,
    "triggers on txnstore's tables, and views in their place",
    "It would run with clients' statements: clients refuse to open the store.",
    "Drop it, if you know where it comes from.",
    needs=("inside", "added"),
)
def _planted(facts: SQLiteFacts) -> Iterator[str]:
    for each in planted(facts.added, _OURS | {VERSION_TABLE, *VIEWS}):
        yield f"{each} is not txnstore's"


@check(
    "nobody-maintains",
    Grade.ADVICE,
    f"maintenance_duties: when any was last done, or one that fails: {seconds_text(UNMAINTAINED_SECONDS_MAX)} ago",
    UNMAINTAINED_CONSEQUENCE,
    UNMAINTAINED_REMEDY,
    needs=("inside", "unmaintained_seconds"),
)
def _unmaintained(facts: SQLiteFacts) -> Iterator[str]:
    yield from unmaintained(facts.unmaintained_seconds, facts.failing_duties)


@check(
    "copy",
    Grade.ADVICE,
    "where the tables were made, and where they are: file system and file",
    COPY_CONSEQUENCE,
    COPY_REMEDY,
)
def _copy(facts: SQLiteFacts) -> Iterator[str]:
    yield from other_place(facts.recorded_identity, facts.identity)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


SQLITE_CHECKS: Final = tuple(each for each in vars().values() if isinstance(each, Check))

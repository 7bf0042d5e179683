"""The files that an SQLite connection has open: its main one, and others, which may commit apart from it.

SQLite commits several files at once by a journal that all of them share.  A write-ahead log has none, and neither have
the journal modes `off` and `memory`, nor a file that waits for no disk: such files are committed one after the other,
and who dies in between has committed some of them (https://www.sqlite.org/lang_attach.html).  Nothing that Python has
tells whether a database transaction has written to an attached file, or could, so it is enough that one is attached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from txnstore.errors import InvalidRequest

#: The files of an SQLite connection: number, name, path (empty: in memory, or temporary).
FILES: Final = "PRAGMA database_list"

#: The main file has 0, and the temporary one 1.
_FIRST_ATTACHED: Final = 2
#: Those of which a commit leaves a journal that names all files; https://www.sqlite.org/pragma.html#pragma_journal_mode
_SHARED_JOURNALS: Final = ("delete", "truncate", "persist")
#: PRAGMA synchronous.
_WAITS_FOR_NO_DISK: Final = 0

Rows = Iterable[Sequence[Any]]


def main_file(rows: Rows) -> str | None:
    """Return the file of an SQLite connection by what it has answered to `FILES`; empty: it is in memory."""
    return next((row[2] for row in rows if row[1] == "main"), None)


def check_one_commit(ask: Callable[[str], Rows], rows: Rows | None = None) -> None:
    """Refuse an SQLite connection whose files are not all committed at once; `ask` runs a statement on it.

    Args:
        ask: runs a statement on the connection and returns its rows.
        rows: what it has answered to `FILES`, if it was asked already.

    Raises:
        InvalidRequest: it has attached another file, and one of them has no journal that they share.
    """
    attached = [row for row in (ask(FILES) if rows is None else rows) if row[0] >= _FIRST_ATTACHED]
    # The name of a database that is shared in memory (vfs=memdb) looks like a path.
    names = [name for _, name, path in attached if path and Path(path).exists()]
    for name in ("main", *names) if names else ():
        quoted = '"{}"'.format(str(name).replace('"', '""'))
        ((mode,),) = ask(f"PRAGMA {quoted}.journal_mode")
        ((level,),) = ask(f"PRAGMA {quoted}.synchronous")
        if mode not in _SHARED_JOURNALS or level == _WAITS_FOR_NO_DISK:
            raise InvalidRequest(
                f"this SQLite connection has another file attached ({names[0]}), and SQLite commits a file with a"
                " write-ahead log, such as the log's, apart from all others: a crash in between would leave rows"
                " without records, or records without rows; keep the tables in the log's own file, and DETACH the"
                " other, even one that is only read (mode=ro, immutable=1), which SQLite does not reveal: read it on a"
                " second connection (or have all files in rollback-journal mode: PRAGMA journal_mode = DELETE)"
            )

"""SQLite's way to close a store: triggers on each table that refuse every row that is written to it.

They ask the table `stores` whether it is closed: a writer always sees the newest state of the file.  A process that
fills a store that is closed opens it for the length of a database transaction, which nobody else sees.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Final

from txnstore.db.names import SQLITE_PREFIX

#: How every refusal begins: an application's own triggers refuse with other words.
CLOSED: Final = "this txnstore store is closed"

#: One that does nothing else than to refuse, whatever its name and its text are.
_OURS: Final = re.compile(
    r'CREATE TRIGGER "\w+" BEFORE (?:INSERT|DELETE|UPDATE(?: OF \w+(?:, \w+)*)?) ON "\w+"'
    r' WHEN \(SELECT move_state FROM "\w+"\) IS NOT NULL'
    r" BEGIN SELECT RAISE\(ABORT, '(?:[^']|'')*'\); END"
)

_EVENTS: Final = ("insert", "update", "delete")


def close(tables: Iterable[tuple[str, Sequence[str] | None]], message: str) -> list[str]:
    """Return the statements that let all writes to the tables fail with `message`, while `stores` says so.

    A table may come with the columns whose updates are meant, instead of all.
    """
    told = message.replace("'", "''")
    statements = []
    for (name, columns), event in itertools.product(tables, _EVENTS):
        what = "UPDATE OF " + ", ".join(columns) if event == "update" and columns is not None else event.upper()
        statements.append(
            # Names are our own, and SQLite takes no parameters here.
            f'CREATE TRIGGER "{_name(name, event)}" BEFORE {what} ON "{SQLITE_PREFIX}{name}"'  # noqa: S608
            f' WHEN (SELECT move_state FROM "{SQLITE_PREFIX}stores") IS NOT NULL'
            f" BEGIN SELECT RAISE(ABORT, '{told}'); END"
        )
    return statements


def open_(names: Iterable[str]) -> list[str]:
    """Return the statements that let them be written to again."""
    return [f'DROP TRIGGER IF EXISTS "{_name(name, event)}"' for name, event in itertools.product(names, _EVENTS)]


def is_ours(sql: str | None) -> bool:
    """Return whether a trigger is one of those, and not a stranger's."""
    return sql is not None and _OURS.fullmatch(sql) is not None


def _name(table: str, event: str) -> str:
    return f"{SQLITE_PREFIX}closed_{table}_{event}"

"""Planted objects: triggers that others have put on a file's own tables, and views in their place."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final

from txnstore.db.names import SQLITE_PREFIX, VIEWS
from txnstore.db.sqlite.closing import is_ours

#: Triggers and views with names like ours.
ADDED: Final = (
    "SELECT type, name, tbl_name, sql FROM main.sqlite_master"  # noqa: S608 - our own names
    f" WHERE type IN ('trigger', 'view') AND lower(substr(tbl_name, 1, {len(SQLITE_PREFIX)})) = '{SQLITE_PREFIX}'"
    " ORDER BY name"
)


def planted(rows: Iterable[Sequence[Any]], names: Collection[str]) -> Iterator[str]:
    """Say what of the rows of `ADDED` is on our tables and views, and would run with their statements."""
    for kind, name, of_table, sql in rows:
        table = of_table.lower().removeprefix(SQLITE_PREFIX)
        if table not in names or (kind == "view" and table in VIEWS):
            continue
        if not (kind == "trigger" and is_ours(sql)):
            yield f"the {kind} {name[:80]!r}"

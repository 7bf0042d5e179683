"""What others have put on a file's own tables: triggers, views in their place, and indexes that can refuse a row.

SQLite itself says what an index is: unique or not, of which columns, by which order.  Only the condition of a partial
one is read from its text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

from txnstore.db.names import SQLITE_PREFIX, VIEWS
from txnstore.db.sqlite.closing import is_ours

#: With names like ours: triggers, indexes and views; what a table itself has indexes for has no text.
ADDED: Final = (
    "SELECT type, name, tbl_name, sql, type = 'index'"  # noqa: S608 - our own names
    "  AND EXISTS (SELECT 1 FROM pragma_index_list(tbl_name, 'main') l WHERE l.name = m.name AND NOT l.\"unique\")"
    "  AND NOT EXISTS (SELECT 1 FROM pragma_index_xinfo(m.name, 'main') c"
    "    WHERE c.cid = -2 OR upper(c.coll) NOT IN ('BINARY', 'NOCASE', 'RTRIM'))"
    f" FROM main.sqlite_master m WHERE lower(substr(tbl_name, 1, {len(SQLITE_PREFIX)})) = '{SQLITE_PREFIX}'"
    " AND (type IN ('trigger', 'view') OR type = 'index' AND sql IS NOT NULL) ORDER BY name"
)
#: As SQLite takes text apart; all beyond ASCII may stand in a name.
_TOKEN: Final = re.compile(
    r"""(?P<unseen>--[^\n]*|/\*.*?(?:\*/|\Z)|[ \t\n\f\r]+)"""
    r"""|'(?:[^']|'')*'|"(?:[^"]|"")*"|`(?:[^`]|``)*`|\[[^\]]*\]|[\w$\x80-\U0010ffff]+|->>?|.""",
    re.DOTALL,
)
#: What stands before a parenthesis that calls nothing; any other name there is a function's.
_BEFORE_PARENTHESIS: Final = frozenset(
    {
        "AND",
        "BETWEEN",
        "CASE",
        "CAST",
        "ELSE",
        "FROM",
        "IN",
        "IS",
        "NOT",
        "OR",
        "THEN",
        "WHEN",
    }
)
#: Operators that are functions, which may be missing, or fail with a value.
_CALLS: Final = frozenset({"MATCH", "REGEXP", "ESCAPE", "->", "->>"})
#: Operators that fail with a pattern that is too long: theirs has to stand there.
_NEED_TEXT: Final = frozenset({"LIKE", "GLOB"})
_PATTERN_MAX: Final = 1_000
_ORDERS: Final = frozenset({"BINARY", "NOCASE", "RTRIM"})


def planted(rows: Iterable[Sequence[Any]], names: Collection[str]) -> Iterator[str]:
    """Say what of the rows of `ADDED` is on our tables and views, and would run with statements or let them fail."""
    for kind, name, of_table, sql, is_plain in rows:
        table = of_table.lower().removeprefix(SQLITE_PREFIX)
        if table not in names or (kind == "view" and table in VIEWS):
            continue
        if kind == "trigger" and is_ours(sql):
            continue
        if not (is_plain and _calls_nothing(sql)):
            yield f"the {kind} {name[:80]!r}"


def _calls_nothing(sql: str) -> bool:
    """Return whether the condition of a partial index, if it has one, can let no row fail."""
    tokens = [match[0].upper() for match in _TOKEN.finditer(sql) if match["unseen"] is None]
    condition = tokens[tokens.index("WHERE") + 1 :] if "WHERE" in tokens else []
    return _CALLS.isdisjoint(condition) and all(
        (after != "(" or before in _BEFORE_PARENTHESIS or not _is_name(before))
        and (before != "COLLATE" or after.strip('"`[]') in _ORDERS)
        and (before not in _NEED_TEXT or (after.startswith("'") and len(after) <= _PATTERN_MAX))
        for before, after in pairwise(condition)
    )


def _is_name(token: str) -> bool:
    return re.match(r"""[\w$\x80-\U0010ffff'"`\[]""", token) is not None

"""The names of tables: a schema on PostgreSQL, a prefix on SQLite, and one way in the code; and names as SQL."""

from __future__ import annotations

from typing import Final, Self

from sqlalchemy.sql.elements import quoted_name

#: The schema that stands in the code; on PostgreSQL it is translated to the configured one.
CODE_SCHEMA: Final = "txnstore"
DEFAULT_SCHEMA: Final = "txnstore"
#: SQLite has no schemas within a file, so names carry this instead.
SQLITE_PREFIX: Final = "txnstore_"
#: Not as Alembic calls it by default: an application whose search_path holds our schema would take it for its own.
VERSION_TABLE: Final = "store_version"
RECORDS_VIEW: Final = "records"
OPEN_TRANSACTIONS_VIEW: Final = "open_transactions"
PENDING_OFFSETS_VIEW: Final = "pending_offsets"
VIEWS: Final = (RECORDS_VIEW, OPEN_TRANSACTIONS_VIEW, PENDING_OFFSETS_VIEW)


class StoreName(quoted_name):
    """The name of a table or index of ours: SQLite's compiler puts the prefix before it (see `db.sqlite`)."""

    def __new__(cls, name: str) -> Self:
        """Make the name `name`; quoting is left to the database's own rules."""
        return super().__new__(cls, name, None)


def identifier(name: str) -> str:
    """Return a name as SQL, whatever is in it."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Return a text as PostgreSQL's SQL, whatever standard_conforming_strings is."""
    doubled = text.replace("'", "''")
    return f"E'{doubled.replace(chr(92), chr(92) * 2)}'" if "\\" in doubled else f"'{doubled}'"

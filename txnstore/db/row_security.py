"""The judgement that nobody has something, which takes a role that is shown all rows."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, Table

from txnstore.db.schema import metadata
from txnstore.db.store import Store
from txnstore.errors import PermissionDenied


def check_sees_all(
    store: Store, connection: Connection, tables: Collection[Table], judgement: str, *, when_locking: bool = False
) -> None:
    """Refuse to take what is not seen in these tables for what there is not, if a policy may hide it from this role.

    Call it behind the look, in its database transaction: who has looked at a table keeps its policies as they are.
    The judgement is a clause, as "nobody has producer 7"; rows that are looked for by locking them may be hidden from
    that alone.

    Raises:
        PermissionDenied: row-level security limits this role to some rows of one of the tables.
    """
    names = {str(table.name) for table in tables}
    narrowed = store.backend.narrowed_tables(connection, store.schema, names, when_locking=when_locking)
    if narrowed:
        raise PermissionDenied(
            f"row-level security shows this role only some rows of {', '.join(narrowed)} in {store.url}, so it cannot"
            f" tell whether {judgement}. Nothing was changed. Do this as a role that is not limited: as a coordinator"
            " (`txnstore roles grant coordinator`; `txnstore roles list` names who is one), or as the owner of the"
            " tables"
        )


def check_sees_store(store: Store, connection: Connection, judgement: str) -> None:
    """Refuse the same of all tables, where anything that is missing would be taken for what there is not.

    Raises:
        PermissionDenied: row-level security limits this role to some rows of a table.
    """
    check_sees_all(store, connection, list(metadata.tables.values()), judgement)

"""A coordinator as it was some time ago: what it knows of its transactional ids is put back, and the rest goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import Connection, delete, insert, select

from txnstore.db.schema import (
    pending_markers,
    transaction_groups,
    transaction_log,
    transaction_partitions,
    transactions,
)
from txnstore.db.store import Store

#: What a coordinator knows of its transactional ids, the tables that others refer to first.
TABLES: Final = (transactions, transaction_partitions, transaction_groups, transaction_log, pending_markers)


def backup_of(store: Store) -> Callable[[], None]:
    """Return what lets the store be as it is now again; only its producer ids go on, as they do by its age."""

    def read(connection: Connection) -> list[list[dict[str, Any]]]:
        return [
            [
                dict(row._mapping)
                for row in connection.execute(select(*(column for column in table.c if column.computed is None)))
            ]
            for table in TABLES
        ]

    kept = store.read(read)

    def put_back(connection: Connection) -> None:
        for table in reversed(TABLES):
            connection.execute(delete(table))
        for table, found in zip(TABLES, kept, strict=True):
            if found:
                connection.execute(insert(table), found)

    return lambda: store.write(put_back)

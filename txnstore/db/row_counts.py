"""The row count: a statement that must hit a known number of rows hits them, or nothing of it is committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Delete, Update


class RowsMissedError(AssertionError):
    """A row that was read under its lock was not there to be written: a defect, and nothing was committed."""


def must_hit(connection: Connection, statement: Update | Delete, parameters: Mapping[str, Any]) -> None:
    """Run a statement that hits exactly one row.

    Raises:
        RowsMissedError: it did not; the database transaction is to be rolled back.
    """
    _check(statement, connection.execute(statement, parameters).rowcount, 1)


def must_hit_each(
    connection: Connection, statement: Update | Delete, parameters: Sequence[Mapping[str, Any]], count: int = -1
) -> None:
    """Run a statement once for each of the parameters, at least one: it hits a row for each, or `count` in all.

    Raises:
        RowsMissedError: it did not; the database transaction is to be rolled back.
    """
    # Both drivers count over all of the parameters: `supports_sane_multi_rowcount` of their dialects.
    hit = connection.execute(statement, parameters).rowcount
    _check(statement, hit, len(parameters) if count < 0 else count)


def _check(statement: Update | Delete, hit: int, wanted: int) -> None:
    if hit != wanted:
        name = getattr(statement.table, "name", statement.table)
        raise RowsMissedError(
            f"{type(statement).__name__} of {name} hit {hit} rows where {wanted} were to be hit; nothing is committed"
        )

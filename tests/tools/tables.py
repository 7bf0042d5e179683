"""The rows of many tables by one statement: most of them are empty, and one for each takes ten times as long."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Connection,
    Integer,
    LargeBinary,
    Select,
    Table,
    Text,
    Uuid,
    bindparam,
    case,
    cast,
    func,
    literal_column,
    select,
    union_all,
)

from txnstore.db.schema import metadata

#: By table, in an order of their own; of each row the values in the order of the columns, bytes as a text: the same of
#: the same rows, whichever database has them.
Rows = dict[str, list[tuple[Any, ...]]]


class ManyTables:
    """Statements, each of which reads a table."""

    def __init__(self, statements: Mapping[str, Select[Any]]) -> None:
        """Take them by the names that their rows are returned under; parameters are theirs together."""
        self._names = tuple(statements)
        self._together: dict[bool, CompoundSelect[Any]] = {
            is_sqlite: union_all(
                *(
                    statement.with_only_columns(
                        literal_column(str(number)), _as_text(statement.selected_columns, is_sqlite=is_sqlite)
                    )
                    for number, statement in enumerate(statements.values())
                )
            )
            for is_sqlite in (False, True)
        }

    def rows(self, connection: Connection, parameters: Mapping[str, Any] | None = None) -> Rows:
        """Return what each reads, as of one moment."""
        together = self._together[connection.dialect.name == "sqlite"]
        found: Rows = {name: [] for name in self._names}
        for number, row in connection.execute(together, parameters or {}):
            found[self._names[number]].append(tuple(json.loads(row)))
        for rows in found.values():
            rows.sort(key=repr)
        return found


def all_tables(*, but: Collection[str], columns_but: Collection[str] = (), of: Collection[str] = ()) -> ManyTables:
    """Return what reads all tables of a store; each that has a column in `of` only where that is among a parameter's.

    The parameter, a list, has the column's name; if a table has several of these columns, the first of them counts.
    """

    def statement(table: Table) -> Select[Any]:
        found = select(*(column for column in table.c if column.name not in columns_but))
        column = next((table.c[name] for name in of if name in table.c), None)
        return found if column is None else found.where(column.in_(bindparam(column.name, expanding=True)))

    return ManyTables(
        {str(table.name): statement(table) for table in metadata.tables.values() if table.name not in but}
    )


def _as_text(columns: Iterable[ColumnElement[Any]], *, is_sqlite: bool) -> ColumnElement[str]:
    values: list[Any] = []
    for column in columns:
        if isinstance(column.type, LargeBinary):
            as_hex = func.hex(column) if is_sqlite else func.upper(func.encode(column, "hex"))
            values.append(case((column.is_not(None), as_hex)))
        elif isinstance(column.type, Uuid):
            values.append(func.replace(cast(column, Text), "-", ""))
        elif column.type.python_type is bool:
            values.append(cast(column, Integer))
        else:
            values.append(column)
    return cast(func.json_array(*values) if is_sqlite else func.json_build_array(*values), Text)

"""The building blocks of tables: columns that say what they hold, and options that PostgreSQL alone has."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    CheckConstraint,
    Column,
    ColumnElement,
    Identity,
    Index,
    MetaData,
    Table,
)
from sqlalchemy.schema import SchemaItem
from sqlalchemy.types import TypeEngine

from txnstore.db import ddl
from txnstore.db.ddl import Int64
from txnstore.db.names import CODE_SCHEMA, StoreName
from txnstore.db.postgresql.segments import PASSED_THROUGH

metadata: Final = MetaData(schema=CODE_SCHEMA)

#: Rows that are forgotten with age are found by the minute, silent members of groups by ten seconds.
MINUTE_MS: Final = 60_000
TEN_SECONDS_MS: Final = 10_000

#: Rows that are updated all the time stay on their page (heap-only tuples), without new index entries. Columns that
#: change each time stand together: all from the first byte that changes to the last one goes to the write-ahead log.
_HOT: Final = {"fillfactor": 50}
#: What PostgreSQL alone is told when tables and indexes are made, see `enter_options_of_postgresql`.
_OPTIONS_OF_POSTGRESQL: Final[list[tuple[Table | Index, str, Any]]] = []


def table(
    name: str,
    *items: SchemaItem,
    comment: str,
    is_hot: bool = False,
    is_passed_through: bool = False,
    in_segments_of: str | None = None,
    **options: Any,
) -> Table:
    """Return a table whose columns keep to their types, on SQLite too."""
    # A plain `str` for the type checker: StoreName is one at run time.
    store_name: Any = StoreName(name)
    table = Table(store_name, metadata, *items, comment=comment, sqlite_strict=True, **options)
    if is_hot:
        _OPTIONS_OF_POSTGRESQL.append((table, "with", _HOT))
    if is_passed_through:
        _OPTIONS_OF_POSTGRESQL.append((table, "with", PASSED_THROUGH))
    if in_segments_of is not None:
        _OPTIONS_OF_POSTGRESQL.append((table, "partition_by", f"LIST ({in_segments_of})"))
    return table


def partial_index(name: str, *columns: Column[Any], where: ColumnElement[bool]) -> None:
    """Enter the rows for which `where` holds, and no others, in an index."""
    index = Index(StoreName(name), *columns, sqlite_where=where)
    _OPTIONS_OF_POSTGRESQL.append((index, "where", where))


def enter_options_of_postgresql() -> None:
    """Let tables and indexes that are made of `metadata`, or copied from it, have the options that PostgreSQL has.

    A store's tables are made by its migrations.  An option that is named earlier makes SQLAlchemy import its
    dialect for PostgreSQL, also in programs that use SQLite.
    """
    for item, name, value in _OPTIONS_OF_POSTGRESQL:
        item.dialect_options["postgresql"][name] = value


def column(name: str, type_: TypeEngine[Any], about: str, *, null: bool = False) -> Column[Any]:
    """Return a column that says what it holds and takes no NULL unless told."""
    return Column(name, type_, nullable=null, comment=about, autoincrement=False)


def identity(name: str, about: str) -> Column[Any]:
    """Return a key that the database gives out and never gives out twice."""
    return Column(name, Int64, Identity(), primary_key=True, nullable=False, comment=about)


def coarse_time(name: str, column: str, span_ms: int) -> Column[Any]:
    """Return a column that an index finds old rows by."""
    return Column(
        name,
        Int64,
        ddl.CoarseTime(column, span_ms),
        nullable=False,
        comment=f"{column} / {span_ms}, computed by the database; changes seldom, and an index on it finds old rows.",
    )


def check(name: str, condition: str) -> CheckConstraint:
    """Return a condition that each row meets."""
    return CheckConstraint(condition, name=name)

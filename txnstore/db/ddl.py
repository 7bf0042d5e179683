"""DDL beyond SQLAlchemy's words: types that both databases have, how columns are kept, the views, the functions."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Computed,
    Dialect,
    Integer,
    LargeBinary,
    SmallInteger,
    Table,
    Text,
    TypeDecorator,
    Uuid,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import ExecutableDDLElement
from sqlalchemy.sql.compiler import DDLCompiler, SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeEngine

from txnstore.db.postgresql import commit_function, producer_ids, segments

#: SQLite has one integer type, 64 bits wide.
Int64: Final = BigInteger().with_variant(Integer(), "sqlite")
Int32: Final = Integer()
Int16: Final = SmallInteger().with_variant(Integer(), "sqlite")
String: Final = Text()
Bytes: Final = LargeBinary()
#: Kept as text on SQLite, whose STRICT tables have no such type.
UuidText: Final = Uuid(as_uuid=False).with_variant(Text(), "sqlite")


class _Flag(TypeDecorator[bool]):
    """A boolean; 0 or 1 on SQLite, whose STRICT tables have no boolean."""

    impl = Boolean
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return Integer() if dialect.name == "sqlite" else Boolean()

    def process_result_value(self, value: Any, dialect: Dialect) -> bool | None:
        return None if value is None else bool(value)


Flag: Final = _Flag()


#: Payloads and positions are kept as they are: the view cuts slices out of them, and compression is the codec's work.
_KEEP_AS_THEY_ARE: Final = 'ALTER TABLE "{schema}".record_batches ' + ", ".join(
    f"ALTER COLUMN {column} SET STORAGE EXTERNAL"
    for column in ("key_positions", "value_positions", "key_data", "value_data")
)


#: A role that may write into the journal may draw a number from its key's sequence; none may set it back.
_NUMBERS_ARE_DRAWN: Final = f'GRANT USAGE ON SEQUENCE "{{schema}}".{commit_function.JOURNAL_NUMBERS} TO PUBLIC'


class Verbatim(ExecutableDDLElement):
    """A statement that is sent as it is written."""

    def __init__(self, statement: str) -> None:
        """Send `statement`, which takes no parameters."""
        self.statement = statement


@compiles(Verbatim)
def _compile_verbatim(element: Verbatim, compiler: DDLCompiler, **_: Any) -> str:
    # What a driver would take for a parameter is doubled.
    doubles: bool = compiler.preparer._double_percents  # noqa: SLF001 - SQLAlchemy has no other name for it
    return element.statement.replace("%", "%%") if doubles else element.statement


class CoarseTime(Computed):
    """The number of the span of time that a column of milliseconds lies in, kept by the database.

    An index on it finds what is old.  On the milliseconds themselves, each update would have to enter the row again
    in all indexes of its table (PostgreSQL's heap-only tuples); the span rarely changes.
    """

    inherit_cache = True

    def __init__(self, column: str, span_ms: int) -> None:
        """Number the spans of `span_ms` milliseconds since 1970."""
        super().__init__(f"{column} / {span_ms}", persisted=True)
        self.column_name = column
        self.span_ms = span_ms

    def _copy(self, *, target_table: Table | None = None, **_: Any) -> CoarseTime:
        del target_table
        return CoarseTime(self.column_name, self.span_ms)


@compiles(CoarseTime, "sqlite")
def _compile_coarse_time(element: CoarseTime, compiler: DDLCompiler, **_: Any) -> str:
    """Render a column that is kept in its index only; SQLite can also add such a column to a table that exists."""
    del compiler
    return f"GENERATED ALWAYS AS ({element.sqltext}) VIRTUAL"


class current_transaction_id(FunctionElement[int]):  # noqa: N801 - reads as the SQL function it stands for
    """The number of the database transaction that is open, savepoints included; NULL where it has none (SQLite)."""

    type = BigInteger()
    inherit_cache = True
    name = "current_transaction_id"


@compiles(current_transaction_id, "postgresql")
def _compile_on_postgresql(element: current_transaction_id, compiler: SQLCompiler, **_: Any) -> str:
    del element, compiler
    return "(pg_catalog.pg_current_xact_id()::text::bigint)"


@compiles(current_transaction_id, "sqlite")
def _compile_on_sqlite(element: current_transaction_id, compiler: SQLCompiler, **_: Any) -> str:
    del element, compiler
    return "NULL"


class insertion_time_ms(FunctionElement[int]):  # noqa: N801 - reads as the SQL function it stands for
    """Milliseconds since 1970 when a row is inserted, by the database itself: as a default, whoever inserts it."""

    type = BigInteger()
    inherit_cache = True
    name = "insertion_time_ms"


@compiles(insertion_time_ms, "postgresql")
def _compile_time_on_postgresql(element: insertion_time_ms, compiler: SQLCompiler, **_: Any) -> str:
    del element, compiler
    return "(CAST(extract(epoch from pg_catalog.clock_timestamp()) * 1000 AS BIGINT))"


@compiles(insertion_time_ms, "sqlite")
def _compile_time_on_sqlite(element: insertion_time_ms, compiler: SQLCompiler, **_: Any) -> str:
    del element, compiler
    # In days, of which 1970 began 2440587.5 after the first: 'unixepoch' knows no milliseconds in older versions.
    return "(CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER))"


def after_tables(kind: str, schema: str | None) -> list[Verbatim]:
    """Return what completes the tables once they are made."""
    # A store is made once and opened often: what opens it does without the views' texts.
    from txnstore.db import open_transactions_view
    from txnstore.db.postgresql import records_view as records_view_postgresql
    from txnstore.db.sqlite import records_view as records_view_sqlite

    if kind == "sqlite":
        statements = (
            records_view_sqlite.create_view(),
            records_view_sqlite.index_by_time(),
            *open_transactions_view.create_on_sqlite(),
        )
        return [Verbatim(statement) for statement in statements]
    assert schema is not None
    statements = (
        *segments.create_segments(schema),
        _KEEP_AS_THEY_ARE.replace("{schema}", schema),
        _NUMBERS_ARE_DRAWN.replace("{schema}", schema),
        records_view_postgresql.create_view(schema),
        *records_view_postgresql.comment_on_view(schema),
        *open_transactions_view.create_on_postgresql(schema),
        *commit_function.create_functions(schema),
        *producer_ids.create_guard(schema),
    )
    return [Verbatim(statement) for statement in statements]


def before_tables_go(kind: str, schema: str | None) -> list[Verbatim]:
    """Return what has to go before the tables can."""
    from txnstore.db import open_transactions_view
    from txnstore.db.postgresql import records_view as records_view_postgresql
    from txnstore.db.sqlite import records_view as records_view_sqlite

    if kind == "sqlite":
        views = (*open_transactions_view.drop_on_sqlite(), records_view_sqlite.drop_view())
        return [Verbatim(statement) for statement in views]
    assert schema is not None
    statements = (
        *producer_ids.drop_guard(schema),
        *commit_function.drop_functions(schema),
        *open_transactions_view.drop_on_postgresql(schema),
        records_view_postgresql.drop_view(schema),
    )
    return [Verbatim(statement) for statement in statements]

"""The column types: each one exists in SQLite's STRICT tables and in PostgreSQL."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import BigInteger, Boolean, Dialect, Integer, LargeBinary, SmallInteger, Text, TypeDecorator, Uuid
from sqlalchemy.types import TypeEngine

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

"""The rule of the tables: the database holds each row to all that a store's tables are made to hold it to."""

from __future__ import annotations

from typing import Final

from sqlalchemy import CheckConstraint, Connection, Table, UniqueConstraint, select

from txnstore.db.schema import SCHEMA_VERSION, metadata, stores
from txnstore.db.store import Store
from txnstore.verification.invariants import Invariant, Place, Violation

_VERSION: Final = select(stores.c.schema_version)


def table_violations(store: Store, connection: Connection) -> list[Violation]:
    """Return which tables have lost what; what they have besides is right, and tables of other versions are theirs."""
    if connection.execute(_VERSION).scalar() != SCHEMA_VERSION:
        return []
    wanted = {str(table.name): _rules_of(table) for table in metadata.tables.values()}
    found = []
    for name, of_table, rules in store.backend.table_rules(connection, store.schema):
        if lost := wanted.get(of_table, frozenset()) - rules:
            seen = f"the table {name} has lost {', '.join(sorted(lost))}"
            found.append(Violation(Invariant.TABLES_WHOLE, Place(), seen))
    return found


def _rules_of(table: Table) -> frozenset[str]:
    """Return them as `Backend.table_rules` does."""
    rules = {f"PRIMARY KEY ({', '.join(column.name for column in table.primary_key)})"}
    rules |= {f"NOT NULL {column.name}" for column in table.columns if not column.nullable}
    rules |= {f"IDENTITY {column.name}" for column in table.columns if column.identity is not None}
    for constraint in table.constraints:
        if isinstance(constraint, CheckConstraint | UniqueConstraint):
            rules.add(f"{'CHECK' if isinstance(constraint, CheckConstraint) else 'UNIQUE'} {constraint.name}")
    return frozenset(rules)

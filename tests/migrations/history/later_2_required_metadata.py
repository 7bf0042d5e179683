"""The second later version of the tables, in tests only: rows of a new form, and a column without NULLs.

What has the old form for good is carried over; what its clients write anew by themselves is deleted.
"""

from __future__ import annotations

from typing import Any

from alembic import op
from sqlalchemy import (
    CheckConstraint,
    Column,
    ColumnElement,
    PrimaryKeyConstraint,
    column,
    delete,
    func,
    insert,
    literal_column,
    select,
    table,
    update,
)

from txnstore.db.ddl import Int32, Int64, String
from txnstore.db.names import StoreName
from txnstore.db.schema import SCHEMA_VERSION

revision = f"{SCHEMA_VERSION + 2:04}"
down_revision = f"{SCHEMA_VERSION + 1:04}"
branch_labels = None
depends_on = None
#: Older code would write NULL.
oldest_writer_version = SCHEMA_VERSION + 2

EMPTY: ColumnElement[str] = literal_column("''")


def upgrade():
    schema = op.get_context().opts["store_schema"]
    if op.get_context().dialect.name == "sqlite":
        remake_offsets(nullable=False)
    else:
        offsets = table(StoreName("group_offsets"), column("offset_metadata"), schema=schema)
        op.execute(update(offsets).where(offsets.c.offset_metadata.is_(None)).values(offset_metadata=EMPTY))
        op.alter_column(StoreName("group_offsets"), "offset_metadata", nullable=False, schema=schema)
    op.execute(delete(table(StoreName("group_members"), schema=schema)))


def downgrade():
    schema = op.get_context().opts["store_schema"]
    if op.get_context().dialect.name == "sqlite":
        remake_offsets(nullable=True)
    else:
        offsets = table(StoreName("group_offsets"), column("offset_metadata"), schema=schema)
        op.alter_column(StoreName("group_offsets"), "offset_metadata", nullable=True, schema=schema)
        op.execute(update(offsets).where(offsets.c.offset_metadata == EMPTY).values(offset_metadata=None))


def remake_offsets(*, nullable):
    """Make the table anew under its name: SQLite changes no column."""
    columns: list[Column[Any]] = [
        Column("group_id", String, nullable=False),
        Column("partition_id", Int64, nullable=False, autoincrement=False),
        Column("producer_id", Int64, nullable=False),
        Column("leader_epoch", Int32, nullable=False),
        Column("producer_epoch", Int32, nullable=False),
        Column("committed_offset", Int64, nullable=False),
        Column("offset_in_transaction", Int64, nullable=True),
        Column("commit_ms", Int64, nullable=False),
        Column("commit_number", Int64, nullable=False),
        Column("offset_metadata", String, nullable=nullable),
    ]
    names = [each.name for each in columns]
    former = table(StoreName("former_offsets"), *map(column, names))
    op.rename_table(StoreName("group_offsets"), StoreName("former_offsets"))
    op.create_table(
        StoreName("group_offsets"),
        *columns,
        PrimaryKeyConstraint("group_id", "partition_id", name="group_offsets_pk"),
        CheckConstraint(
            "committed_offset >= 0 AND coalesce(offset_in_transaction, 0) >= 0", name="group_offsets_offset"
        ),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    change = func.nullif if nullable else func.coalesce
    kept = [change(each, EMPTY) if each.name == "offset_metadata" else each for each in former.c]
    op.execute(insert(table(StoreName("group_offsets"), *map(column, names))).from_select(names, select(*kept)))
    op.drop_table(StoreName("former_offsets"))

"""Version 4 of the tables: what it takes to forget in portions, and to tell a copy from its original."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from alembic import op
from sqlalchemy import (
    CheckConstraint,
    Column,
    ColumnElement,
    PrimaryKeyConstraint,
    column,
    func,
    insert,
    literal_column,
    select,
    table,
    text,
    update,
)

from txnstore.db.ddl import CoarseTime
from txnstore.db.names import StoreName
from txnstore.db.types import Int32, Int64, String

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None
#: Older code forgets producers without their partition's lock, which can hide a committed transaction.
oldest_writer_version = 4


def upgrade() -> None:
    """Make the indexes and columns, a function for each subject."""
    schema = op.get_context().opts["store_schema"]
    for step in _UPGRADES:
        step(schema)


def downgrade() -> None:
    """Take them away again, in the opposite order."""
    schema = op.get_context().opts["store_schema"]
    for step in reversed(_DOWNGRADES):
        step(schema)


def _index_producers(schema: str) -> None:
    """Let whoever knows a producer id and nothing else find what it belongs to."""
    op.create_index(StoreName("transactions_producer"), StoreName("transactions"), ["producer_id"], schema=schema)
    has_previous = column("previous_producer_id") >= 0
    op.create_index(
        StoreName("transactions_previous_producer"),
        StoreName("transactions"),
        ["previous_producer_id"],
        schema=schema,
        postgresql_where=has_previous,
        sqlite_where=has_previous,
    )
    op.create_index(
        StoreName("transaction_writers_producer"),
        StoreName("transaction_writers"),
        ["writer_producer_id"],
        schema=schema,
    )
    # In the place of one that began with the transactional id: a producer id belongs to one of them.
    op.create_index(
        StoreName("transaction_log_producer"),
        StoreName("transaction_log"),
        ["producer_id", "producer_epoch"],
        schema=schema,
    )
    op.drop_index(StoreName("transaction_log_transaction"), StoreName("transaction_log"), schema=schema)


def _forget_index_of_producers(schema: str) -> None:
    op.create_index(
        StoreName("transaction_log_transaction"),
        StoreName("transaction_log"),
        ["transactional_id", "producer_id", "producer_epoch"],
        schema=schema,
    )
    for name, of_table in (
        ("transaction_log_producer", "transaction_log"),
        ("transaction_writers_producer", "transaction_writers"),
        ("transactions_previous_producer", "transactions"),
        ("transactions_producer", "transactions"),
    ):
        op.drop_index(StoreName(name), StoreName(of_table), schema=schema)


#: By table: a column that finds what is old, of which milliseconds, in spans of how many; and its index.
_AGES = {
    "producer_states": ("last_minute", "last_timestamp_ms", 60_000, "producer_states_age"),
    "transactions": ("last_update_minute", "last_update_ms", 60_000, "transactions_age"),
    "group_members": ("deadline_ten_seconds", "deadline_ms", 10_000, "group_members_deadline"),
    "offset_producers": ("last_update_minute", "last_update_ms", 60_000, "offset_producers_age"),
}


def _add_ages(schema: str) -> None:
    """Let what has expired be found without a look at what has not."""
    for of_table, (name, of, span_ms, index) in _AGES.items():
        about = f"{of} / {span_ms}, by itself: finds what is old, and changes seldom."
        column = Column(name, Int64, CoarseTime(of, span_ms), nullable=False, comment=about)
        op.add_column(StoreName(of_table), column, schema=schema)
        op.create_index(StoreName(index), StoreName(of_table), [name], schema=schema)


def _drop_ages(schema: str) -> None:
    for of_table, (name, _, _, index) in _AGES.items():
        op.drop_index(StoreName(index), StoreName(of_table), schema=schema)
        op.drop_column(StoreName(of_table), name, schema=schema)


def _add_deleted_partitions(schema: str) -> None:
    """Let partitions be gone at once, and what was in them bit by bit."""
    op.create_table(
        StoreName("deleted_partitions"),
        Column(
            "partition_id",
            Int64,
            nullable=False,
            autoincrement=False,
            comment="A partition whose topic was deleted; its number is never used again.",
        ),
        PrimaryKeyConstraint("partition_id", name="deleted_partitions_pk"),
        schema=schema,
        comment="Partitions that are gone for everybody, of which rows are left to be deleted in portions.",
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )


def _drop_deleted_partitions(schema: str) -> None:
    # What is left of them stays: older code does not see it, for the partitions are gone.
    op.drop_table(StoreName("deleted_partitions"), schema=schema)


# --- offsets that were committed without metadata --------------------------------------------------------------------


_EMPTY: Final[ColumnElement[str]] = literal_column("''")


def _allow_no_metadata(schema: str) -> None:
    """Tell a commit without metadata from one with an empty text, which read back as the former until now."""
    about = "Text that the client keeps beside it; NULL: it gave none."
    for name in ("group_offsets", "pending_group_offsets"):
        if op.get_context().dialect.name == "sqlite":
            _remake_offsets(name, nullable=True)
        else:
            offsets = table(StoreName(name), column("offset_metadata"), schema=schema)
            op.alter_column(StoreName(name), "offset_metadata", nullable=True, comment=about, schema=schema)
            op.execute(update(offsets).where(offsets.c.offset_metadata == _EMPTY).values(offset_metadata=None))


def _require_metadata(schema: str) -> None:
    about = "Text that the client keeps beside it."
    for name in ("group_offsets", "pending_group_offsets"):
        if op.get_context().dialect.name == "sqlite":
            _remake_offsets(name, nullable=False)
        else:
            offsets = table(StoreName(name), column("offset_metadata"), schema=schema)
            op.execute(update(offsets).where(offsets.c.offset_metadata.is_(None)).values(offset_metadata=_EMPTY))
            op.alter_column(StoreName(name), "offset_metadata", nullable=False, comment=about, schema=schema)


def _remake_offsets(name: str, *, nullable: bool) -> None:
    """Make one of the tables anew under its name: SQLite changes no column."""
    is_pending = name == "pending_group_offsets"
    offset = "pending_offset" if is_pending else "committed_offset"
    key = ("group_id", "partition_id", "producer_id") if is_pending else ("group_id", "partition_id")
    end = [
        Column("leader_epoch", Int32, nullable=False),
        Column("offset_metadata", String, nullable=nullable),
        Column("commit_ms", Int64, nullable=False),
        Column("commit_number", Int64, nullable=False),
    ]
    producer = [
        Column("producer_id", Int64, nullable=False, autoincrement=False),
        Column("producer_epoch", Int32, nullable=False),
    ]
    columns = [
        Column("group_id", String, nullable=False),
        Column("partition_id", Int64, nullable=False, autoincrement=False),
        *(producer if is_pending else ()),
        Column(offset, Int64, nullable=False),
        *end,
        *(() if is_pending else producer),
    ]
    names = [each.name for each in columns]
    former = table(StoreName(f"former_{name}"), *map(column, names))
    if is_pending:
        op.drop_index(StoreName("pending_group_offsets_producer"), StoreName(name))
    op.rename_table(StoreName(name), StoreName(f"former_{name}"))
    op.create_table(
        StoreName(name),
        *columns,
        PrimaryKeyConstraint(*key, name=f"{name}_pk"),
        CheckConstraint(f"{offset} >= 0", name=f"{name}_offset"),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    change = func.nullif if nullable else func.coalesce
    kept = [change(each, _EMPTY) if each.name == "offset_metadata" else each for each in former.c]
    op.execute(insert(table(StoreName(name), *map(column, names))).from_select(names, select(*kept)))
    op.drop_table(StoreName(f"former_{name}"))
    if is_pending:
        op.create_index(StoreName("pending_group_offsets_producer"), StoreName(name), ["producer_id"])


# --- the outbox's rows that wait, apart from those that were refused -------------------------------------------------


def _index_what_waits(schema: str) -> None:
    op.create_index(
        StoreName("outbox_waiting"),
        StoreName("outbox"),
        ["outbox_id"],
        schema=schema,
        postgresql_where=text("refusal IS NULL"),
        sqlite_where=text("refusal IS NULL"),
    )


def _drop_index_of_what_waits(schema: str) -> None:
    op.drop_index(StoreName("outbox_waiting"), StoreName("outbox"), schema=schema)


def _add_identity(schema: str) -> None:
    """Let a store know which database it was made in; the code that upgrades fills it in."""
    op.add_column(
        StoreName("stores"),
        Column(
            "database_identity",
            String,
            nullable=True,
            comment="Where that was: system identifier:oid, or file system:file. NULL: not known.",
        ),
        schema=schema,
    )
    _say_of_uuid(schema, "The identity of this database as a store; only `txnstore adopt` changes it.")


def _drop_identity(schema: str) -> None:
    _say_of_uuid(schema, "The identity of this database as a store; given once, never changed.")
    op.drop_column(StoreName("stores"), "database_identity", schema=schema)


def _say_of_uuid(schema: str, comment: str) -> None:
    # SQLite keeps no comments.
    if op.get_context().dialect.name == "postgresql":
        op.alter_column(StoreName("stores"), "store_uuid", comment=comment, schema=schema)


#: In one order: what stands at the same place in both belongs together.
_UPGRADES: tuple[Callable[[str], None], ...] = (
    _index_producers,
    _add_ages,
    _add_deleted_partitions,
    _allow_no_metadata,
    _add_identity,
    _index_what_waits,
)
_DOWNGRADES: tuple[Callable[[str], None], ...] = (
    _forget_index_of_producers,
    _drop_ages,
    _drop_deleted_partitions,
    _require_metadata,
    _drop_identity,
    _drop_index_of_what_waits,
)

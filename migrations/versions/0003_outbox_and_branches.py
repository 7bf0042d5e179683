"""This file is version 3 of the tables: the outbox's transactions, branches in other databases, relays of Kafka topics."""

from __future__ import annotations

from typing import Any

from alembic import op
from sqlalchemy import CheckConstraint, Column, Identity, PrimaryKeyConstraint, column, insert, literal_column, table

from txnstore.db.ddl import current_transaction_id
from txnstore.db.names import StoreName
from txnstore.db.types import Bytes, Int16, Int32, Int64, String

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None
#: Older code would complete a transaction without its branches, and what they have prepared would stay locked.
oldest_writer_version = 3


def upgrade() -> None:
    """Let the outbox know whose rows belong together, and make the tables of branches and relays."""
    schema = op.get_context().opts["store_schema"]
    # Nobody has written to these two in version 2.
    op.drop_table(StoreName("outbox"), schema=schema)
    _create_outbox(
        schema,
        Column(
            "transaction_id",
            Int64,
            nullable=True,
            server_default=current_transaction_id(),
            comment="The database transaction that inserted the row, as PostgreSQL numbers them; NULL on SQLite.",
        ),
    )
    op.drop_table(StoreName("transaction_branches"), schema=schema)
    op.create_table(
        StoreName("outbox_sequencers"),
        Column("singleton", Int16, nullable=False, autoincrement=False, comment="Always 1: the table has one row."),
        Column("sequenced_count", Int64, nullable=False, comment="How many rows of the outbox have become records."),
        PrimaryKeyConstraint("singleton", name="outbox_sequencers_pk"),
        CheckConstraint("singleton = 1", name="outbox_sequencers_one_row"),
        schema=schema,
        comment="Who moves rows from the outbox into partitions locks this row: one at a time.",
        sqlite_strict=True,
    )
    op.create_table(
        StoreName("transaction_branches"),
        Column(
            "gid", String, nullable=False, comment="The name under which the other database keeps the prepared branch."
        ),
        Column("transactional_id", String, nullable=False, comment="The transaction that the branch is a share of."),
        Column("producer_id", Int64, nullable=False, comment="The producer id of that transaction."),
        Column(
            "producer_epoch", Int32, nullable=False, comment="Its epoch: which of the producer's transactions it is."
        ),
        Column("database_label", String, nullable=False, comment="The database that votes; no credentials."),
        Column("outcome", Int16, nullable=True, comment="What was decided: 0 abort, 1 commit; NULL: nothing yet."),
        Column("registered_ms", Int64, nullable=False, comment="When the branch was made known, before it could vote."),
        PrimaryKeyConstraint("gid", name="transaction_branches_pk"),
        CheckConstraint("outcome BETWEEN 0 AND 1", name="transaction_branches_outcome"),
        schema=schema,
        comment="Shares of transactions in other databases, which vote; a row goes once its branch has ended.",
        sqlite_strict=True,
    )
    op.create_index(
        StoreName("transaction_branches_transaction"),
        StoreName("transaction_branches"),
        ["transactional_id"],
        schema=schema,
    )
    op.create_table(
        StoreName("relay_positions"),
        Column("relay_id", String, nullable=False, comment="The relay: its name, as its operator chose it."),
        Column("topic", String, nullable=False, comment="A topic of the Kafka cluster that it reads."),
        Column("partition_number", Int32, nullable=False, autoincrement=False, comment="A partition of that topic."),
        Column("next_offset", Int64, nullable=False, comment="The offset behind the last record that was copied."),
        PrimaryKeyConstraint("relay_id", "topic", "partition_number", name="relay_positions_pk"),
        CheckConstraint("next_offset >= 0", name="relay_positions_offset"),
        schema=schema,
        comment="How far each relay has copied the partitions of a Kafka cluster.",
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    sequencers = table(StoreName("outbox_sequencers"), column("singleton"), column("sequenced_count"), schema=schema)
    op.execute(insert(sequencers).values(singleton=literal_column("1"), sequenced_count=literal_column("0")))


def downgrade() -> None:
    """Make the tables as they were."""
    schema = op.get_context().opts["store_schema"]
    op.drop_table(StoreName("relay_positions"), schema=schema)
    op.drop_table(StoreName("transaction_branches"), schema=schema)
    op.create_table(
        StoreName("transaction_branches"),
        Column(
            "gid", String, nullable=False, comment="The name under which the other database keeps the prepared branch."
        ),
        Column("transactional_id", String, nullable=False, comment="The transaction that the branch is a share of."),
        Column("database_label", String, nullable=False, comment="The database that votes; no credentials."),
        Column("state", String, nullable=False, comment="registered, prepared, committed or rolled back."),
        PrimaryKeyConstraint("gid", name="transaction_branches_pk"),
        schema=schema,
        comment="Shares of transactions in other databases, which vote.",
        sqlite_strict=True,
    )
    op.create_index(
        StoreName("transaction_branches_transaction"),
        StoreName("transaction_branches"),
        ["transactional_id"],
        schema=schema,
    )
    op.drop_table(StoreName("outbox_sequencers"), schema=schema)
    op.drop_table(StoreName("outbox"), schema=schema)
    _create_outbox(schema)


def _create_outbox(schema: str, *more: Column[Any]) -> None:
    op.create_table(
        StoreName("outbox"),
        Column(
            "outbox_id",
            Int64,
            Identity(),
            primary_key=True,
            nullable=False,
            comment="The order within one database transaction.",
        ),
        Column("topic", String, nullable=False, comment="The topic's name."),
        Column("partition_number", Int32, nullable=True, comment="The partition; NULL: chosen by the key."),
        Column("key", Bytes, nullable=True, comment="The record's key."),
        Column("value", Bytes, nullable=True, comment="The record's value."),
        Column("headers", String, nullable=True, comment="JSON: [name, value, ...] as in record_batches; NULL: none."),
        Column("timestamp_ms", Int64, nullable=True, comment="The record's timestamp; NULL: when it is sequenced."),
        *more,
        schema=schema,
        comment="Records that applications insert in database transactions of their own, not yet in a partition.",
        sqlite_strict=True,
        sqlite_autoincrement=True,
    )

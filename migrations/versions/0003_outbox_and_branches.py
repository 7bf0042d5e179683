"""Version 3 of the tables: the outbox's transactions, branches in other databases, relays of Kafka topics."""

from __future__ import annotations

from typing import Any

from alembic import op
from sqlalchemy import (
    CheckConstraint,
    Column,
    ColumnElement,
    Identity,
    PrimaryKeyConstraint,
    UniqueConstraint,
    column,
    insert,
    literal_column,
    select,
    table,
    true,
)

from txnstore.db.ddl import current_transaction_id
from txnstore.db.names import StoreName
from txnstore.db.types import Bytes, Flag, Int16, Int32, Int64, String, UuidText

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
        Column(
            "refusal", String, nullable=True, comment="Why the row cannot become a record; NULL: it waits to be one."
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
        Column(
            "database_label",
            String,
            nullable=False,
            comment="The database that votes: host:port/name, for people; no credentials.",
        ),
        Column(
            "database_identity",
            String,
            nullable=False,
            comment="The same as its server knows it: system identifier:oid.",
        ),
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
    op.create_index(
        StoreName("transaction_branches_database"),
        StoreName("transaction_branches"),
        ["database_identity"],
        schema=schema,
    )
    op.create_table(
        StoreName("relay_positions"),
        Column(
            "relay_id", String, nullable=False, comment="The relay: its direction, the Kafka cluster, and its name."
        ),
        Column(
            "topic", String, nullable=False, comment="A topic that it reads: of the Kafka cluster, or of this store."
        ),
        Column("partition_number", Int32, nullable=False, autoincrement=False, comment="A partition of that topic."),
        Column(
            "topic_uuid",
            String,
            nullable=False,
            comment="The identity of that topic: one that is made anew under its name is another.",
        ),
        Column(
            "next_offset",
            Int64,
            nullable=False,
            comment="Of a relay from Kafka: where it goes on. Of one to Kafka: where it began.",
        ),
        PrimaryKeyConstraint("relay_id", "topic", "partition_number", name="relay_positions_pk"),
        CheckConstraint("next_offset >= 0", name="relay_positions_offset"),
        schema=schema,
        comment="How far each relay has copied the partitions of a Kafka cluster, and what it began with.",
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_table(
        StoreName("offset_producers"),
        Column(
            "producer_id",
            Int64,
            nullable=False,
            autoincrement=False,
            comment="A producer whose transactions are coordinated in another database.",
        ),
        Column(
            "producer_epoch",
            Int32,
            nullable=False,
            comment="Its epoch since offsets of it were finished here: older ones are refused.",
        ),
        Column("last_update_ms", Int64, nullable=False, comment="When that was."),
        PrimaryKeyConstraint("producer_id", name="offset_producers_pk"),
        schema=schema,
        comment="Producers of other databases that have committed offsets of groups here: what of theirs is late.",
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.drop_table(StoreName("databases"), schema=schema)
    _create_databases(
        schema,
        Column(
            "coordinates",
            Flag,
            nullable=False,
            comment="Whether transactional ids and groups live in it, by the hash of their names.",
        ),
        Column(
            "catalogue_version",
            Int64,
            nullable=False,
            comment="Of row 1: how often topics and settings changed; in a copy: up to where.",
        ),
        comment="The databases of the cluster; kept by the controller, copied to the others.",
    )
    _enter_database(schema, coordinates=true(), catalogue_version=literal_column("0"))
    _describe_producer_of_run(schema, "The producer id that the run's next transaction has; -1: the run is over.")
    sequencers = table(StoreName("outbox_sequencers"), column("singleton"), column("sequenced_count"), schema=schema)
    op.execute(insert(sequencers).values(singleton=literal_column("1"), sequenced_count=literal_column("0")))


def downgrade() -> None:
    """Make the tables as they were."""
    schema = op.get_context().opts["store_schema"]
    _describe_producer_of_run(schema, "The producer id that the run's next transaction has.")
    op.drop_table(StoreName("databases"), schema=schema)
    _create_databases(schema, comment="The databases of the cluster; kept by the controller.")
    _enter_database(schema)
    op.drop_table(StoreName("offset_producers"), schema=schema)
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


def _describe_producer_of_run(schema: str, comment: str) -> None:
    if op.get_context().dialect.supports_comments:
        op.alter_column(StoreName("sink_runs"), "producer_id", existing_type=Int64, comment=comment, schema=schema)


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


def _create_databases(schema: str, *more: Column[Any], comment: str) -> None:
    op.create_table(
        StoreName("databases"),
        Column(
            "database_id",
            Int32,
            nullable=False,
            autoincrement=False,
            comment="The number of the database in the cluster; 1 is the controller.",
        ),
        Column(
            "label",
            String,
            nullable=False,
            comment="The name that people and branches of transactions know it by; no credentials.",
        ),
        Column("store_uuid", UuidText, nullable=False, comment="The identity that the database must have."),
        *more,
        PrimaryKeyConstraint("database_id", name="databases_pk"),
        UniqueConstraint("label", name="databases_label"),
        UniqueConstraint("store_uuid", name="databases_store_uuid"),
        schema=schema,
        comment=comment,
        sqlite_strict=True,
    )


def _enter_database(schema: str, **more: ColumnElement[Any]) -> None:
    """Enter the one database that a cluster of these versions has, unless there is no store yet."""
    stores = table(StoreName("stores"), column("store_uuid"), schema=schema)
    databases = table(
        StoreName("databases"),
        *map(column, ("database_id", "label", "store_uuid", *more)),
        schema=schema,
    )
    values = select(literal_column("1"), literal_column("'main'"), stores.c.store_uuid, *more.values())
    op.execute(insert(databases).from_select(["database_id", "label", "store_uuid", *more], values))

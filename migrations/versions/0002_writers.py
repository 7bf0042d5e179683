"""Version 2 of the tables: several writers in one transaction, and the runs and inputs of Spark's queries."""

from __future__ import annotations

from alembic import op
from sqlalchemy import CheckConstraint, Column, PrimaryKeyConstraint, UniqueConstraint, delete, table

from txnstore.db.names import StoreName
from txnstore.db.types import Int32, Int64, String

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None
#: Older code would end a transaction without its further writers, and their records would stay open for ever.
oldest_writer_version = 2


def upgrade() -> None:
    """Create the new tables, and let groups begin without members."""
    schema = op.get_context().opts["store_schema"]
    op.create_table(
        StoreName("transaction_writer_partitions"),
        Column("transactional_id", String, nullable=False, comment="The transaction."),
        Column(
            "writer_producer_id",
            Int64,
            nullable=False,
            autoincrement=False,
            comment="The producer id of a further writer in it.",
        ),
        Column(
            "partition_id", Int64, nullable=False, autoincrement=False, comment="A partition that the writer wrote to."
        ),
        PrimaryKeyConstraint(
            "transactional_id", "writer_producer_id", "partition_id", name="transaction_writer_partitions_pk"
        ),
        schema=schema,
        comment="The partitions of the further writers of open or decided transactions.",
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_table(
        StoreName("sink_runs"),
        Column("transactional_id", String, nullable=False, comment="The transactional id that the runs write under."),
        Column(
            "run_number",
            Int64,
            nullable=False,
            autoincrement=False,
            comment="The order of the runs; only the newest one may write.",
        ),
        Column("run_id", String, nullable=False, comment="The run of a query, or the job."),
        Column("sink_id", String, nullable=False, comment="The query that writes, as in sink_batches."),
        Column("producer_id", Int64, nullable=False, comment="The producer id that the run's next transaction has."),
        Column("producer_epoch", Int32, nullable=False, comment="The epoch that it has."),
        Column("begin_ms", Int64, nullable=False, comment="When the run was first seen."),
        PrimaryKeyConstraint("transactional_id", "run_number", name="sink_runs_pk"),
        UniqueConstraint("transactional_id", "run_id", name="sink_runs_run"),
        schema=schema,
        comment="Runs of queries that write: a newer one of the same transactional id fences those before it.",
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_table(
        StoreName("sink_inputs"),
        Column("sink_id", String, nullable=False, comment="The query that reads and writes, as in sink_batches."),
        Column("run_id", String, nullable=False, comment="Its run."),
        Column("batch_id", Int64, nullable=False, autoincrement=False, comment="Its batch."),
        Column("group_id", String, nullable=False, comment="The consumer group that the query reads as."),
        Column("partition_id", Int64, nullable=False, autoincrement=False, comment="A partition that the batch reads."),
        Column(
            "start_offset",
            Int64,
            nullable=False,
            autoincrement=False,
            comment="The first offset of a range that it reads there.",
        ),
        Column("end_offset", Int64, nullable=False, comment="The offset behind that range."),
        PrimaryKeyConstraint(
            "sink_id", "run_id", "batch_id", "group_id", "partition_id", "start_offset", name="sink_inputs_pk"
        ),
        CheckConstraint("0 <= start_offset AND start_offset <= end_offset", name="sink_inputs_offsets"),
        schema=schema,
        comment="What batches that are not decided read; it is committed for the group together with the batch.",
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_table(
        StoreName("sink_positions"),
        Column("sink_id", String, nullable=False, comment="The query that reads and writes, as in sink_batches."),
        Column("group_id", String, nullable=False, comment="The consumer group that the query reads as."),
        Column("partition_id", Int64, nullable=False, autoincrement=False, comment="A partition that it reads."),
        Column(
            "next_offset",
            Int64,
            nullable=False,
            comment="The offset behind what its committed batches have read there.",
        ),
        PrimaryKeyConstraint("sink_id", "group_id", "partition_id", name="sink_positions_pk"),
        CheckConstraint("next_offset >= 0", name="sink_positions_offset"),
        schema=schema,
        comment="How far the committed batches of each query have read.",
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    # Their rows have another form in this version; members that live join again by themselves.
    op.execute(delete(table(StoreName("group_members"), schema=schema)))


def downgrade() -> None:
    """Drop them."""
    schema = op.get_context().opts["store_schema"]
    for name in ("sink_positions", "sink_inputs", "sink_runs", "transaction_writer_partitions"):
        op.drop_table(StoreName(name), schema=schema)

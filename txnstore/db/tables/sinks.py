"""The tables of streaming queries that write."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Index, PrimaryKeyConstraint, UniqueConstraint

from txnstore.db.ddl import Flag, Int32, Int64, String
from txnstore.db.names import StoreName
from txnstore.db.tables.building import check, column, table

sink_batches: Final = table(
    "sink_batches",
    column("sink_id", String, "The query that writes."),
    column("batch_id", Int64, "The number of the batch, which Spark gives it."),
    column("transactional_id", String, "The transaction that committed the batch."),
    column("commit_ms", Int64, "When the batch was committed."),
    PrimaryKeyConstraint("sink_id", "batch_id", name="sink_batches_pk"),
    comment="Batches of streaming queries that have been committed; a replay of one is dropped.",
    sqlite_with_rowid=False,
)

sink_runs: Final = table(
    "sink_runs",
    column("transactional_id", String, "The transactional id that the runs write under."),
    column("run_number", Int64, "The order of the runs; only the newest one may write."),
    column("run_id", String, "The run of the streaming query, or the batch job."),
    column("sink_id", String, "The query that writes, as in sink_batches."),
    column("producer_id", Int64, "The producer id of the run's next transaction; -1 if the run is over."),
    column("producer_epoch", Int32, "The epoch of that transaction."),
    column("begin_ms", Int64, "When the run was first seen."),
    PrimaryKeyConstraint("transactional_id", "run_number", name="sink_runs_pk"),
    UniqueConstraint("transactional_id", "run_id", name="sink_runs_run"),
    Index(StoreName("sink_runs_sink"), "sink_id"),
    comment="Runs of queries that write; a newer run of the same transactional id fences the older ones.",
    sqlite_with_rowid=False,
)

sink_inputs: Final = table(
    "sink_inputs",
    column("sink_id", String, "The query that reads and writes, as in sink_batches."),
    column("run_id", String, "The query's run; empty: what the last batch read that was decided."),
    column("batch_id", Int64, "The number of the batch, which Spark gives it."),
    column("group_id", String, "The consumer group that the query reads as; empty: it has none."),
    column("partition_id", Int64, "A partition that the batch reads."),
    column(
        "in_commit_order", Flag, "Whether these are places, of commit order, where a range ends between transactions."
    ),
    column("reader_id", Int64, "Which reader of the query: a number that it chose by chance for this run."),
    column("start_offset", Int64, "The first offset of a range that it reads there."),
    column("end_offset", Int64, "The offset after the end of that range."),
    column("from_group", Flag, "Whether the batch is refused where others have moved the group past it."),
    column("fails_on_loss", Flag, "Whether the batch is refused where batches before it are missing."),
    column("noted_ms", Int64, "When a task noted it, before it read."),
    PrimaryKeyConstraint(
        "sink_id",
        "run_id",
        "batch_id",
        "group_id",
        "partition_id",
        "in_commit_order",
        "reader_id",
        "start_offset",
        name="sink_inputs_pk",
    ),
    check("sink_inputs_offsets", "0 <= start_offset AND start_offset <= end_offset"),
    comment="What undecided batches read, to be committed for the group with the batch, and what the last one read.",
    sqlite_with_rowid=False,
)

sink_positions: Final = table(
    "sink_positions",
    column("sink_id", String, "The query that reads and writes, as in sink_batches."),
    column("group_id", String, "The consumer group that the query reads as."),
    column("partition_id", Int64, "A partition that it reads."),
    column("in_commit_order", Flag, "Whether that is a place, of commit order."),
    column("next_offset", Int64, "The offset after the last one that its committed batches have read there."),
    PrimaryKeyConstraint("sink_id", "group_id", "partition_id", name="sink_positions_pk"),
    Index(StoreName("sink_positions_group"), "group_id", "partition_id"),
    check("sink_positions_offset", "next_offset >= 0"),
    comment="How far the committed batches of each query have read.",
    sqlite_with_rowid=False,
)

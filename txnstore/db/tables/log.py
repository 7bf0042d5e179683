"""The tables of the log: record batches, and what is known of each partition."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Index, PrimaryKeyConstraint, UniqueConstraint

from txnstore.db.ddl import Bytes, Flag, Int16, Int32, Int64, String
from txnstore.db.names import StoreName
from txnstore.db.tables.building import MINUTE_MS, check, coarse_time, column, partial_index, table

partition_heads: Final = table(
    "partition_heads",
    column("partition_id", Int64, "The partition."),
    column("log_start_offset", Int64, "The first offset that can still be read."),
    column("next_offset", Int64, "The next offset to be given out, which is the high watermark."),
    column("running_max_timestamp_ms", Int64, "The largest timestamp of a record so far; -1 before the first one."),
    column("segment", Int16, "In which segment of record_batches what is appended is put."),
    PrimaryKeyConstraint("partition_id", name="partition_heads_pk"),
    check("partition_heads_order", "0 <= log_start_offset AND log_start_offset <= next_offset"),
    check("partition_heads_segment", "segment BETWEEN 0 AND 3"),
    comment="The end of each partition's log. Locking a row is what puts the partition's appends in order.",
    is_hot=True,
)

# Here and in the other tables that each transaction adds rows to, what is widest comes first: PostgreSQL puts a column
# where a multiple of its width is, and so would leave gaps, 15 bytes in each of these rows.
record_batches: Final = table(
    "record_batches",
    column("partition_id", Int64, "The partition."),
    column("last_offset", Int64, "The offset of the batch's last record."),
    column("base_offset", Int64, "The offset of the batch's first record."),
    column("base_timestamp_ms", Int64, "The first record's timestamp, or the append's if timestamp_type is 1."),
    column("max_timestamp_ms", Int64, "The largest timestamp in the batch."),
    column(
        "running_max_timestamp_ms",
        Int64,
        "The partition's largest timestamp of a record once this was appended; for lookups by time.",
    ),
    column(
        "commit_number",
        Int64,
        "Outside transactions: its place among all commits of this database, see log/partition_rows.py; else NULL.",
        null=True,
    ),
    column("producer_id", Int64, "The producer that wrote it; -1 if the producer was not idempotent."),
    column("crc", Int64, "The CRC-32 of what the producer sent; checked at every read."),
    column("record_count", Int32, "How many records the batch holds."),
    column("producer_epoch", Int32, "The producer's epoch; -1 without a producer id."),
    column("base_sequence", Int32, "The producer's sequence number of the first record; -1 without a producer id."),
    column("coordinator_epoch", Int32, "Of a marker: the epoch of the coordinator; else NULL.", null=True),
    column("size_bytes", Int32, "The size of all payload columns together, in bytes."),
    column("timestamp_type", Int16, "0: CreateTime, by the producer's clock; 1: LogAppendTime, by the store's."),
    column("control_type", Int16, "Of a marker, which ends a transaction: 0 ABORT, 1 COMMIT; else NULL.", null=True),
    column("codec", Int16, "The compression of key_data and value_data: 0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd."),
    column("segment", Int16, "Which of the segments the row is in: PostgreSQL frees a segment as a whole."),
    column("is_transactional", Flag, "Whether the records count only once their transaction has been committed."),
    column("timestamp_deltas_ms", String, "JSON: each record's timestamp minus the base; NULL if all 0.", null=True),
    column("offset_deltas", String, "JSON: each record's offset minus the base; NULL if 0, 1, 2, ...", null=True),
    column(
        "key_positions",
        Bytes,
        "Big-endian int32: where keys begin in key_data, and the end; NULL if no keys.",
        null=True,
    ),
    column("null_keys", String, "JSON: the indexes of records with a null key; NULL if no such record.", null=True),
    column(
        "value_positions",
        Bytes,
        "Big-endian int32: where values begin in value_data, and the end; NULL if no values.",
        null=True,
    ),
    column(
        "null_values",
        String,
        "JSON: the indexes of records with a null value; NULL if no such record.",
        null=True,
    ),
    column("headers", String, "JSON: for each record null or [name, value, ...]; NULL if no headers.", null=True),
    column("key_data", Bytes, "The keys, one after another.", null=True),
    column("value_data", Bytes, "The values, one after another.", null=True),
    # On PostgreSQL each segment has it for itself: there a key of all of them would have to name the segment.
    PrimaryKeyConstraint("partition_id", "last_offset", name="record_batches_pk").ddl_if(dialect="sqlite"),
    check("record_batches_offsets", "0 <= base_offset AND base_offset <= last_offset"),
    check("record_batches_count", "record_count >= 1"),
    check("record_batches_codec", "codec BETWEEN 0 AND 4"),
    check("record_batches_segment", "segment BETWEEN 0 AND 3"),
    check("record_batches_control", "control_type BETWEEN 0 AND 1"),
    check("record_batches_timestamp_type", "timestamp_type BETWEEN 0 AND 1"),
    comment="The log: one row per record batch; only compaction changes it. The view records shows one row per record.",
    in_segments_of="segment",
)
producer_states: Final = table(
    "producer_states",
    column("partition_id", Int64, "The partition."),
    column("producer_id", Int64, "The producer that wrote to it."),
    column("transaction_first_offset", Int64, "Where its open transaction begins here; else NULL.", null=True),
    column("coordinator_epoch", Int32, "The coordinator's epoch in the last marker; -1 if there has been no marker."),
    column("producer_epoch", Int32, "The producer's newest epoch in this partition."),
    column("last_timestamp_ms", Int64, "When it last wrote here, by the store's clock."),
    column(
        "recent_batches",
        String,
        "JSON array: for each of the last five batches first and last sequence, first and last offset, time.",
    ),
    coarse_time("last_minute", "last_timestamp_ms", MINUTE_MS),
    PrimaryKeyConstraint("partition_id", "producer_id", name="producer_states_pk"),
    Index(StoreName("producer_states_age"), "last_minute"),
    comment="What each producer did last in each partition; for idempotence and the last stable offset.",
    sqlite_with_rowid=False,
    is_hot=True,
)
partial_index(
    "producer_states_open",
    producer_states.c.partition_id,
    producer_states.c.transaction_first_offset,
    where=producer_states.c.transaction_first_offset.is_not(None),
)

finished_transactions: Final = table(
    "finished_transactions",
    column("partition_id", Int64, "The partition."),
    column("marker_offset", Int64, "The offset of the marker that ended the transaction here."),
    column("producer_id", Int64, "The producer that wrote its records here."),
    column("first_offset", Int64, "The offset of its first record here."),
    column("last_stable_offset", Int64, "The partition's last stable offset once the marker had been written."),
    column(
        "commit_number",
        Int64,
        "The place of its commit among all commits of this database, see log/partition_rows.py; NULL: aborted.",
        null=True,
    ),
    column("producer_epoch", Int32, "The epoch of those records; the marker's own epoch is higher (KIP-890)."),
    column("outcome", Int16, "0: aborted; 1: committed."),
    PrimaryKeyConstraint("partition_id", "marker_offset", name="finished_transactions_pk"),
    UniqueConstraint("partition_id", "producer_id", "producer_epoch", name="finished_transactions_producer"),
    check("finished_transactions_outcome", "outcome BETWEEN 0 AND 1"),
    check("finished_transactions_order", "first_offset < marker_offset"),
    check("finished_transactions_commit", "(outcome = 1) = (commit_number IS NOT NULL)"),
    comment="Which transactions ended in each partition, and how: Kafka's index of aborted transactions, and more.",
    sqlite_with_rowid=False,
    is_passed_through=True,
)

partition_storage: Final = table(
    "partition_storage",
    column(
        "partition_id",
        Int64,
        "A partition from which batches were deleted, whose size is limited, or that is compacted.",
    ),
    column("first_stored_offset", Int64, "Every batch that ends below it is deleted."),
    column("counted_offset", Int64, "The batches that end below it are in size_bytes; those behind are not yet."),
    column("size_bytes", Int64, "The size of those of them that are stored, as retention.bytes counts it."),
    column("compacted_offset", Int64, "Below it the compaction has left one record of each key."),
    column(
        "compacted_bytes", Int64, "About what the stored batches take that end below it; for min.cleanable.dirty.ratio."
    ),
    column("horizons", String, "JSON: [offset, time] pairs: from then on tombstones and markers below it go."),
    column(
        "unfinished_pass",
        String,
        "JSON: how far a pass of the compaction has come that is not finished; NULL: there is none.",
        null=True,
    ),
    PrimaryKeyConstraint("partition_id", name="partition_storage_pk"),
    check("partition_storage_order", "0 <= first_stored_offset AND first_stored_offset <= counted_offset"),
    check("partition_storage_size", "0 <= compacted_bytes AND 0 <= size_bytes"),
    comment="Where the stored batches of a partition begin, what they take, how far they are compacted.",
    is_hot=True,
)

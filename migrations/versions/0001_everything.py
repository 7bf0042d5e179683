"""Version 1 of the tables: everything."""

from __future__ import annotations

from typing import Any, Final

from alembic import op
from sqlalchemy import (
    CheckConstraint,
    Column,
    Identity,
    PrimaryKeyConstraint,
    UniqueConstraint,
    column,
    insert,
    literal_column,
    table,
    text,
)
from sqlalchemy.schema import SchemaItem
from sqlalchemy.types import TypeEngine

from txnstore.db import ddl
from txnstore.db.ddl import Bytes, Flag, Int16, Int32, Int64, String, UuidText
from txnstore.db.names import StoreName

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None
#: The oldest version of the code that may write to these tables.
oldest_writer_version = 1

_TABLES: Final = (
    "stores",
    "store_configs",
    "databases",
    "topics",
    "topic_configs",
    "partitions",
    "deleted_numbers",
    "deleted_partitions",
    "partition_heads",
    "record_batches",
    "producer_states",
    "finished_transactions",
    "partition_storage",
    "transactions",
    "transaction_partitions",
    "transaction_writers",
    "transaction_writer_partitions",
    "transaction_groups",
    "transaction_branches",
    "transaction_log",
    "pending_markers",
    "groups",
    "group_members",
    "group_offsets",
    "pending_group_offsets",
    "offset_producers",
    "outbox",
    "outbox_sequencers",
    "relay_positions",
    "sink_batches",
    "sink_runs",
    "sink_inputs",
    "sink_positions",
    "maintenance_duties",
)
_HOT: Final = {"fillfactor": 50}
_PASSED_THROUGH: Final = {
    "autovacuum_vacuum_scale_factor": 0.05,
    "autovacuum_vacuum_threshold": 500,
    "toast.autovacuum_vacuum_scale_factor": 0.05,
    "toast.autovacuum_vacuum_threshold": 500,
}


def upgrade() -> None:
    """Create the tables with the row that sequencers lock, and the view."""
    for make in (_make_cluster, _make_topics, _make_log, _make_transactions, _make_groups, _make_participants):
        make()
    _make_upkeep()
    sequencers = table(StoreName("outbox_sequencers"), column("singleton"), column("sequenced_count"), schema=_schema())
    op.execute(insert(sequencers).values(singleton=literal_column("1"), sequenced_count=literal_column("0")))
    for statement in ddl.after_tables(op.get_context().dialect.name, _schema()):
        op.execute(statement)


def downgrade() -> None:
    """Drop them, and every record with them."""
    for statement in ddl.before_tables_go(op.get_context().dialect.name, _schema()):
        op.execute(statement)
    for name in reversed(_TABLES):
        op.drop_table(StoreName(name), schema=_schema())


def _make_cluster() -> None:
    """Create what a database knows of itself and of its cluster."""
    _table(
        "stores",
        _column("singleton", Int16, "Always 1: the table has one row."),
        _column("store_uuid", UuidText, "The identity of this database as a store; only `txnstore adopt` changes it."),
        _column("schema_version", Int32, "The version of the tables: the number of the newest migration applied."),
        _column("oldest_writer_version", Int32, "The oldest version of the code that may write to these tables."),
        _column("next_producer_id", Int64, "The next producer id to give out."),
        _column("created_ms", Int64, "When the tables were created, in milliseconds since 1970."),
        _column(
            "database_identity",
            String,
            "Where that was: system identifier:oid:oid of this table, or file system:file; NULL if unknown.",
            null=True,
        ),
        _column(
            "move_state", Int16, "Of a move: 0 closed here, 1 gone from here, 2 arriving here; else NULL.", null=True
        ),
        _column("move_uuid", UuidText, "The last move, as both databases call it; NULL if there was none.", null=True),
        _column("move_peer", String, "The other database of that move, without its password; else NULL.", null=True),
        _column(
            "move_position",
            String,
            "JSON: how far an arriving store is copied, or which moves were cancelled here; else NULL.",
            null=True,
        ),
        PrimaryKeyConstraint("singleton", name="stores_pk"),
        _check("stores_one_row", "singleton = 1"),
        _check("stores_next_producer_id", "next_producer_id >= 0"),
        _check("stores_move", "move_state BETWEEN 0 AND 2"),
        comment="This database: one row.",
    )
    _table(
        "store_configs",
        _column("name", String, "The setting's name, as Kafka calls it for brokers."),
        _column("value", String, "The value as text; a setting without a row has its default."),
        PrimaryKeyConstraint("name", name="store_configs_pk"),
        comment="Settings of the whole store that differ from their defaults.",
        sqlite_with_rowid=False,
    )
    _table(
        "databases",
        _column("database_id", Int32, "The number of the database in the cluster; 1 is the controller."),
        _column("label", String, "The name by which people and transaction branches know it; without credentials."),
        _column("store_uuid", UuidText, "The store_uuid that the database must have."),
        _column(
            "coordinates",
            Flag,
            "Whether it coordinates transactional ids and groups, by the hash of their names.",
        ),
        _column(
            "catalogue_version",
            Int64,
            "In row 1: grows by chance with each change of topics and settings; in a copy: up to where.",
        ),
        PrimaryKeyConstraint("database_id", name="databases_pk"),
        UniqueConstraint("label", name="databases_label"),
        UniqueConstraint("store_uuid", name="databases_store_uuid"),
        comment="The databases of the cluster; maintained by the controller, copied to the others.",
    )


def _make_topics() -> None:
    """Create the catalogue of topics."""
    _table(
        "topics",
        _identity("topic_id", "The topic's number; never reused."),
        _column("name", String, "The topic's name: 1 to 249 of the characters a-z A-Z 0-9 . _ -"),
        _column("topic_uuid", UuidText, "The topic's identity, as Kafka's admin API shows it."),
        _column("created_ms", Int64, "When it was created, in milliseconds since 1970."),
        UniqueConstraint("name", name="topics_name"),
        UniqueConstraint("topic_uuid", name="topics_topic_uuid"),
        _check("topics_name_length", "length(name) BETWEEN 1 AND 249"),
        comment="Topics; maintained by the controller.",
        sqlite_autoincrement=True,
    )
    _table(
        "topic_configs",
        _column("topic_id", Int64, "The topic."),
        _column("name", String, "The setting's name, as Kafka calls it (cleanup.policy, retention.ms, ...)."),
        _column("value", String, "The value as text; a setting without a row has its default."),
        PrimaryKeyConstraint("topic_id", "name", name="topic_configs_pk"),
        comment="Settings of topics that differ from their defaults.",
        sqlite_with_rowid=False,
    )
    _table(
        "partitions",
        _identity("partition_id", "The partition's number, unique in the whole cluster; never reused."),
        _column("topic_id", Int64, "The topic it belongs to."),
        _column("partition_number", Int32, "Its number within the topic, from 0."),
        _column("leader_database_id", Int32, "The database that holds its log."),
        UniqueConstraint("topic_id", "partition_number", name="partitions_number"),
        _check("partitions_number_known", "partition_number >= 0"),
        comment="Partitions of topics; maintained by the controller.",
        sqlite_autoincrement=True,
    )
    _table(
        "deleted_numbers",
        _identity("deletion_number", "Which deletion it was; the oldest are forgotten."),
        _column("partition_id", Int64, "The partition that was deleted."),
        UniqueConstraint("partition_id", name="deleted_numbers_partition"),
        comment="What the controller of a cluster has deleted, and the others may delete; no other partition goes there.",
        sqlite_autoincrement=True,
    )
    _table(
        "deleted_partitions",
        _column("partition_id", Int64, "A partition whose topic was deleted; its number is never reused."),
        PrimaryKeyConstraint("partition_id", name="deleted_partitions_pk"),
        comment="Deleted partitions that nobody sees any more, and whose remaining rows are deleted in portions.",
        sqlite_with_rowid=False,
    )


def _make_log() -> None:
    """Create the log, and what producers did last in it."""
    _table(
        "partition_heads",
        _column("partition_id", Int64, "The partition."),
        _column("log_start_offset", Int64, "The first offset that can still be read."),
        _column("next_offset", Int64, "The next offset to be given out, which is the high watermark."),
        _column(
            "running_max_timestamp_ms", Int64, "The largest timestamp of a record so far; -1 before the first one."
        ),
        _column("segment", Int16, "In which segment of record_batches what is appended is put."),
        PrimaryKeyConstraint("partition_id", name="partition_heads_pk"),
        _check("partition_heads_order", "0 <= log_start_offset AND log_start_offset <= next_offset"),
        _check("partition_heads_segment", "segment BETWEEN 0 AND 3"),
        comment="The end of each partition's log. Locking a row is what puts the partition's appends in order.",
        postgresql_with=_HOT,
    )
    _table(
        "record_batches",
        _column("partition_id", Int64, "The partition."),
        _column("last_offset", Int64, "The offset of the batch's last record."),
        _column("base_offset", Int64, "The offset of the batch's first record."),
        _column("base_timestamp_ms", Int64, "The first record's timestamp, or the append's if timestamp_type is 1."),
        _column("max_timestamp_ms", Int64, "The largest timestamp in the batch."),
        _column(
            "running_max_timestamp_ms",
            Int64,
            "The partition's largest timestamp of a record once this was appended; for lookups by time.",
        ),
        _column(
            "commit_number",
            Int64,
            "Outside transactions: its place among all commits of this database, see log/partition_rows.py; else NULL.",
            null=True,
        ),
        _column("producer_id", Int64, "The producer that wrote it; -1 if the producer was not idempotent."),
        _column("crc", Int64, "The CRC-32 of what the producer sent; checked at every read."),
        _column("record_count", Int32, "How many records the batch holds."),
        _column("producer_epoch", Int32, "The producer's epoch; -1 without a producer id."),
        _column(
            "base_sequence", Int32, "The producer's sequence number of the first record; -1 without a producer id."
        ),
        _column("coordinator_epoch", Int32, "Of a marker: the epoch of the coordinator; else NULL.", null=True),
        _column("size_bytes", Int32, "The size of all payload columns together, in bytes."),
        _column("timestamp_type", Int16, "0: CreateTime, by the producer's clock; 1: LogAppendTime, by the store's."),
        _column(
            "control_type",
            Int16,
            "Of a marker, which ends a transaction: 0 ABORT, 1 COMMIT; else NULL.",
            null=True,
        ),
        _column("codec", Int16, "The compression of key_data and value_data: 0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd."),
        _column("segment", Int16, "Which of the segments the row is in: PostgreSQL frees a segment as a whole."),
        _column("is_transactional", Flag, "Whether the records count only once their transaction has been committed."),
        _column(
            "timestamp_deltas_ms",
            String,
            "JSON: each record's timestamp minus the base; NULL if all 0.",
            null=True,
        ),
        _column("offset_deltas", String, "JSON: each record's offset minus the base; NULL if 0, 1, 2, ...", null=True),
        _column(
            "key_positions",
            Bytes,
            "Big-endian int32: where keys begin in key_data, and the end; NULL if no keys.",
            null=True,
        ),
        _column(
            "null_keys",
            String,
            "JSON: the indexes of records with a null key; NULL if no such record.",
            null=True,
        ),
        _column(
            "value_positions",
            Bytes,
            "Big-endian int32: where values begin in value_data, and the end; NULL if no values.",
            null=True,
        ),
        _column(
            "null_values",
            String,
            "JSON: the indexes of records with a null value; NULL if no such record.",
            null=True,
        ),
        _column("headers", String, "JSON: for each record null or [name, value, ...]; NULL if no headers.", null=True),
        _column("key_data", Bytes, "The keys, one after another.", null=True),
        _column("value_data", Bytes, "The values, one after another.", null=True),
        PrimaryKeyConstraint("partition_id", "last_offset", name="record_batches_pk").ddl_if(dialect="sqlite"),
        _check("record_batches_offsets", "0 <= base_offset AND base_offset <= last_offset"),
        _check("record_batches_count", "record_count >= 1"),
        _check("record_batches_codec", "codec BETWEEN 0 AND 4"),
        _check("record_batches_segment", "segment BETWEEN 0 AND 3"),
        _check("record_batches_control", "control_type BETWEEN 0 AND 1"),
        _check("record_batches_timestamp_type", "timestamp_type BETWEEN 0 AND 1"),
        comment="The log: one row per record batch; only compaction changes it. The view records shows one row per record.",
        postgresql_partition_by="LIST (segment)",
    )
    _table(
        "producer_states",
        _column("partition_id", Int64, "The partition."),
        _column("producer_id", Int64, "The producer that wrote to it."),
        _column("transaction_first_offset", Int64, "Where its open transaction begins here; else NULL.", null=True),
        _column(
            "coordinator_epoch", Int32, "The coordinator's epoch in the last marker; -1 if there has been no marker."
        ),
        _column("producer_epoch", Int32, "The producer's newest epoch in this partition."),
        _column("last_timestamp_ms", Int64, "When it last wrote here, by the store's clock."),
        _column(
            "recent_batches",
            String,
            "JSON array: for each of the last five batches first and last sequence, first and last offset, time.",
        ),
        _coarse_time("last_minute", "last_timestamp_ms", 60_000),
        PrimaryKeyConstraint("partition_id", "producer_id", name="producer_states_pk"),
        comment="What each producer did last in each partition; for idempotence and the last stable offset.",
        sqlite_with_rowid=False,
        postgresql_with=_HOT,
    )
    _index("producer_states", "producer_states_age", "last_minute")
    _index(
        "producer_states",
        "producer_states_open",
        "partition_id",
        "transaction_first_offset",
        where="transaction_first_offset IS NOT NULL",
    )
    _table(
        "finished_transactions",
        _column("partition_id", Int64, "The partition."),
        _column("marker_offset", Int64, "The offset of the marker that ended the transaction here."),
        _column("producer_id", Int64, "The producer that wrote its records here."),
        _column("first_offset", Int64, "The offset of its first record here."),
        _column("last_stable_offset", Int64, "The partition's last stable offset once the marker had been written."),
        _column(
            "commit_number",
            Int64,
            "The place of its commit among all commits of this database, see log/partition_rows.py; NULL: aborted.",
            null=True,
        ),
        _column("producer_epoch", Int32, "The epoch of those records; the marker's own epoch is higher (KIP-890)."),
        _column("outcome", Int16, "0: aborted; 1: committed."),
        PrimaryKeyConstraint("partition_id", "marker_offset", name="finished_transactions_pk"),
        UniqueConstraint("partition_id", "producer_id", "producer_epoch", name="finished_transactions_producer"),
        _check("finished_transactions_outcome", "outcome BETWEEN 0 AND 1"),
        _check("finished_transactions_order", "first_offset < marker_offset"),
        _check("finished_transactions_commit", "(outcome = 1) = (commit_number IS NOT NULL)"),
        comment="Which transactions ended in each partition, and how: Kafka's index of aborted transactions, and more.",
        sqlite_with_rowid=False,
        postgresql_with=_PASSED_THROUGH,
    )
    _table(
        "partition_storage",
        _column(
            "partition_id",
            Int64,
            "A partition from which batches were deleted, whose size is limited, or that is compacted.",
        ),
        _column("first_stored_offset", Int64, "Every batch that ends below it is deleted."),
        _column("counted_offset", Int64, "The batches that end below it are in size_bytes; those behind are not yet."),
        _column("size_bytes", Int64, "The size of those of them that are stored, as retention.bytes counts it."),
        _column("compacted_offset", Int64, "Below it the compaction has left one record of each key."),
        _column(
            "compacted_bytes",
            Int64,
            "About what the stored batches take that end below it; for min.cleanable.dirty.ratio.",
        ),
        _column("horizons", String, "JSON: [offset, time] pairs: from then on tombstones and markers below it go."),
        _column(
            "unfinished_pass",
            String,
            "JSON: how far a pass of the compaction has come that is not finished; NULL: there is none.",
            null=True,
        ),
        PrimaryKeyConstraint("partition_id", name="partition_storage_pk"),
        _check("partition_storage_order", "0 <= first_stored_offset AND first_stored_offset <= counted_offset"),
        _check("partition_storage_size", "0 <= compacted_bytes AND 0 <= size_bytes"),
        comment="Where the stored batches of a partition begin, what they take, how far they are compacted.",
        postgresql_with=_HOT,
    )


def _make_transactions() -> None:
    """Create the transaction coordinator's tables."""
    _table(
        "transactions",
        _column("transactional_id", String, "The producer's transactional.id."),
        _column("producer_id", Int64, "The producer id that it writes with."),
        _column("previous_producer_id", Int64, "The producer id before its last change; -1 if there was no other."),
        _column("next_producer_id", Int64, "The producer id to use once this transaction is complete; -1: the same."),
        _column(
            "timeout_ms", Int32, "How long a transaction may stay open; 2147483647 means without a limit (KIP-939)."
        ),
        _column("begin_epoch", Int32, "The epoch of the open or decided transaction's records; -1 without one."),
        _column(
            "producer_epoch",
            Int32,
            "The newest epoch; an older one is refused. Above 32767: of who took over a prepared transaction.",
        ),
        _column("last_producer_epoch", Int32, "The epoch before its last change; -1 if repetitions are not answered."),
        _column("start_ms", Int64, "When the transaction became Ongoing; -1 if the state is Empty."),
        _column("last_update_ms", Int64, "When the row last changed."),
        _column("transaction_number", Int64, "How many transactions this id has begun."),
        _column("deadline_ms", Int64, "When the transaction will be aborted for its age; NULL: never.", null=True),
        _column(
            "state", Int16, "0 Empty, 1 Ongoing, 2 PrepareCommit, 3 PrepareAbort, 4 CompleteCommit, 5 CompleteAbort."
        ),
        _column("fence_reason", String, "Why the epoch was raised from outside: timeout, init or admin.", null=True),
        _column("fence_detail", String, "What happened then, in words.", null=True),
        _column("client_id", String, "The client.id of the producer that started last; NULL: not told.", null=True),
        _column("client_host", String, "The host on which it runs, as it says itself; NULL: not told.", null=True),
        _column("client_process_id", Int64, "Its process there, as it says itself; NULL: not told.", null=True),
        _coarse_time("last_update_minute", "last_update_ms", 60_000),
        PrimaryKeyConstraint("transactional_id", name="transactions_pk"),
        _check("transactions_state", "state BETWEEN 0 AND 5"),
        _check("transactions_epoch", "producer_epoch >= -1 AND (producer_epoch <= 32767 OR state BETWEEN 1 AND 3)"),
        _check("transactions_start", "(state = 0) = (start_ms = -1)"),
        _check("transactions_deadline", "deadline_ms IS NULL OR state = 1"),
        comment="The coordinator's row for each transactional id; every request locks it first.",
        sqlite_with_rowid=False,
        postgresql_with=_HOT,
    )
    _index("transactions", "transactions_age", "last_update_minute")
    _index("transactions", "transactions_deadline", "deadline_ms", where="deadline_ms IS NOT NULL")
    # Producer ids hardly ever change: these cost next to nothing, and updates stay on their page.
    _index("transactions", "transactions_producer", "producer_id")
    _index("transactions", "transactions_previous_producer", "previous_producer_id", where="previous_producer_id >= 0")
    _index("transactions", "transactions_decided", "state", where="state IN (2, 3)")
    _table(
        "transaction_partitions",
        _column("transactional_id", String, "The transaction's transactional id."),
        _column("partition_id", Int64, "A partition that it wrote to."),
        PrimaryKeyConstraint("transactional_id", "partition_id", name="transaction_partitions_pk"),
        comment="The partitions in the open or decided transaction of each transactional id.",
        sqlite_with_rowid=False,
    )
    _table(
        "transaction_writers",
        _column("transactional_id", String, "The transaction's transactional id."),
        _column("writer_producer_id", Int64, "The producer id of an additional writer in it."),
        _column("producer_epoch", Int32, "The epoch of the transaction that the writer joined."),
        _column("reported", Flag, "Whether the writer has reported that it has written everything."),
        _column("client_id", String, "The client.id of the writer; NULL: not told.", null=True),
        _column("client_host", String, "The host on which it runs, as it says itself; NULL: not told.", null=True),
        _column("client_process_id", Int64, "Its process there, as it says itself; NULL: not told.", null=True),
        PrimaryKeyConstraint("transactional_id", "writer_producer_id", name="transaction_writers_pk"),
        comment="Additional writers of transactions, in other processes.",
        sqlite_with_rowid=False,
    )
    _index("transaction_writers", "transaction_writers_producer", "writer_producer_id")
    _table(
        "transaction_writer_partitions",
        _column("transactional_id", String, "The transaction's transactional id."),
        _column("writer_producer_id", Int64, "The producer id of an additional writer in it."),
        _column("partition_id", Int64, "A partition that the writer wrote to."),
        PrimaryKeyConstraint(
            "transactional_id", "writer_producer_id", "partition_id", name="transaction_writer_partitions_pk"
        ),
        comment="The partitions that additional writers of open or decided transactions wrote to.",
        sqlite_with_rowid=False,
    )
    _table(
        "transaction_groups",
        _column("transactional_id", String, "The transaction's transactional id."),
        _column("group_id", String, "A consumer group whose offsets it commits."),
        PrimaryKeyConstraint("transactional_id", "group_id", name="transaction_groups_pk"),
        comment="The groups whose offsets the open or decided transaction of each transactional id commits.",
        sqlite_with_rowid=False,
    )
    _table(
        "transaction_branches",
        _column("gid", String, "The name under which the other database keeps the prepared branch."),
        _column("transactional_id", String, "The transactional id of the transaction that the branch belongs to."),
        _column("producer_id", Int64, "The producer id of that transaction."),
        _column("producer_epoch", Int32, "That transaction's epoch, which tells the producer's transactions apart."),
        _column("database_label", String, "The database that votes, for people: host:port/name, without credentials."),
        _column("database_identity", String, "The same database, as its server identifies it: system identifier:oid."),
        _column(
            "transaction_xid8", String, "The number of its transaction there; by it the server tells how that ended."
        ),
        _column(
            "outcome",
            Int16,
            "What was decided: 0 abort, 1 commit, 2 commit, and its database did not know of one, which was told; NULL"
            " if nothing has been decided.",
            null=True,
        ),
        _column("registered_ms", Int64, "When the branch was registered, which is before it could vote."),
        PrimaryKeyConstraint("gid", name="transaction_branches_pk"),
        _check("transaction_branches_outcome", "outcome BETWEEN 0 AND 2"),
        comment="Branches of transactions in other databases, which vote; a row is deleted once its branch has ended.",
    )
    _index("transaction_branches", "transaction_branches_transaction", "transactional_id")
    _index("transaction_branches", "transaction_branches_database", "database_identity")
    _table(
        "transaction_log",
        _identity("entry_id", "The order of the entries."),
        _column("transaction_number", Int64, "Which of the id's transactions it is."),
        _column("producer_id", Int64, "The producer id after the change."),
        _column("start_ms", Int64, "When the transaction became Ongoing; -1 if it has not."),
        _column("update_ms", Int64, "When the change was made."),
        _column("producer_epoch", Int32, "The epoch after the change."),
        _column("timeout_ms", Int32, "The transaction's timeout."),
        _column(
            "state", Int16, "The state after the change, numbered as in transactions; 6 is Dead: the id has expired."
        ),
        _column(
            "first_state", Int16, "The state after the first of the changes that the entry stands for; one: state."
        ),
        _column("transactional_id", String, "The transactional id."),
        _column("reason", String, "What made the change: a request, or a task such as recovery or expiry."),
        _column(
            "sent_offsets",
            String,
            "The consumed offsets that took effect with it, in JSON by group; NULL: none.",
            null=True,
        ),
        comment="The journal: every change of every transaction's state, in order; those made at once are one entry.",
        sqlite_autoincrement=True,
        postgresql_with=_PASSED_THROUGH,
    )
    _index("transaction_log", "transaction_log_producer", "producer_id", "producer_epoch")
    _table(
        "pending_markers",
        _column("transactional_id", String, "The decided transaction."),
        _column("partition_id", Int64, "A partition that still lacks the transaction's marker."),
        _column("producer_id", Int64, "The producer whose transaction the marker ends."),
        _column("producer_epoch", Int32, "The marker's epoch, which is above that of the records (KIP-890, KIP-1228)."),
        _column("outcome", Int16, "0: abort; 1: commit."),
        PrimaryKeyConstraint("transactional_id", "partition_id", "producer_id", name="pending_markers_pk"),
        _check("pending_markers_outcome", "outcome BETWEEN 0 AND 1"),
        comment="Markers that have been decided on but not yet written; inserted together with the decision.",
        sqlite_with_rowid=False,
    )


def _make_groups() -> None:
    """Create the tables of consumer groups."""
    _table(
        "groups",
        _column("group_id", String, "The group's name."),
        _column("generation", Int32, "How many times the group has been rebalanced; 0 if never."),
        _column("assignor", String, "The assignor that its members agreed on.", null=True),
        _column("commit_number", Int64, "How often offsets were committed; numbers the commits in order."),
        _column("last_update_ms", Int64, "When the row last changed."),
        PrimaryKeyConstraint("group_id", name="groups_pk"),
        comment="Consumer groups. The lock of a row stands in for the group's coordinator.",
        sqlite_with_rowid=False,
        postgresql_with=_HOT,
    )
    _table(
        "group_members",
        _column("group_id", String, "The group."),
        _column("member_id", String, "The member."),
        _column("group_instance_id", String, "The lasting name of a static member (KIP-345).", null=True),
        _column("client_id", String, "The member's client.id."),
        _column("generation", Int32, "The newest generation that the member knows of."),
        _column("session_timeout_ms", Int32, "How long the member may be silent, in milliseconds."),
        _column("deadline_ms", Int64, "When the member is considered dead if it stays silent."),
        _column("subscription", String, "JSON: what the member subscribes to and owns."),
        _column("assignment", String, "JSON: the partitions assigned to the member."),
        _coarse_time("deadline_ten_seconds", "deadline_ms", 10_000),
        PrimaryKeyConstraint("group_id", "member_id", name="group_members_pk"),
        comment="The members of consumer groups.",
        sqlite_with_rowid=False,
        postgresql_with=_HOT,
    )
    _index("group_members", "group_members_deadline", "deadline_ten_seconds")
    _table(
        "group_offsets",
        _column("group_id", String, "The group."),
        _column("partition_id", Int64, "The partition."),
        _column("producer_id", Int64, "The producer of the transaction that committed it; -1 without a transaction."),
        _column("leader_epoch", Int32, "The leader epoch that the client sent; -1 if it sent no epoch."),
        _column("producer_epoch", Int32, "That producer's epoch; -1 without a transaction."),
        _column("committed_offset", Int64, "The offset of the next record to read; in commit order the place."),
        _column(
            "offset_in_transaction",
            Int64,
            "In commit order, the next record of the transaction at that place, or 0; in offset order NULL.",
            null=True,
        ),
        _column("commit_ms", Int64, "When it was committed."),
        _column("commit_number", Int64, "This commit's place in the order of the group's commits."),
        _column(
            "offset_metadata",
            String,
            "Text that the client keeps beside the offset; NULL if not given.",
            null=True,
        ),
        PrimaryKeyConstraint("group_id", "partition_id", name="group_offsets_pk"),
        _check("group_offsets_offset", "committed_offset >= 0 AND coalesce(offset_in_transaction, 0) >= 0"),
        comment="The offsets that each group has committed.",
        sqlite_with_rowid=False,
        postgresql_with=_HOT,
    )
    _table(
        "pending_group_offsets",
        _column("group_id", String, "The group."),
        _column("partition_id", Int64, "The partition."),
        _column("producer_id", Int64, "The producer of the open transaction."),
        _column("producer_epoch", Int32, "The producer's epoch."),
        _column("pending_offset", Int64, "The group's committed offset if the transaction commits."),
        _column("offset_in_transaction", Int64, "The same column of group_offsets then.", null=True),
        _column("leader_epoch", Int32, "The leader epoch that the client sent; -1 if it sent no epoch."),
        _column(
            "offset_metadata",
            String,
            "Text that the client keeps beside the offset; NULL if not given.",
            null=True,
        ),
        _column("commit_ms", Int64, "When the client sent it."),
        _column("commit_number", Int64, "Its place in the order of the group's commits: a later plain commit wins."),
        PrimaryKeyConstraint("group_id", "partition_id", "producer_id", name="pending_group_offsets_pk"),
        _check("pending_group_offsets_offset", "pending_offset >= 0 AND coalesce(offset_in_transaction, 0) >= 0"),
        comment="Offsets that an open transaction will commit.",
        sqlite_with_rowid=False,
    )
    _index("pending_group_offsets", "pending_group_offsets_producer", "producer_id")
    _table(
        "offset_producers",
        _column("producer_id", Int64, "A producer whose transactions are coordinated in another database."),
        _column(
            "producer_epoch",
            Int32,
            "Its epoch after its offsets were last finished here; older epochs are refused.",
        ),
        _column("last_update_ms", Int64, "When that was."),
        _coarse_time("last_update_minute", "last_update_ms", 60_000),
        PrimaryKeyConstraint("producer_id", name="offset_producers_pk"),
        comment="Producers of other databases that committed offsets of groups here; tells requests that come late.",
        sqlite_with_rowid=False,
    )
    _index("offset_producers", "offset_producers_age", "last_update_minute")


def _make_participants() -> None:
    """Create the outbox, and what relays and Spark's queries have done."""
    _table(
        "outbox",
        _identity("outbox_id", "Orders the rows that one database transaction inserted."),
        _column("topic", String, "The topic's name."),
        _column("partition_number", Int32, "The partition's number; NULL to have it chosen by the key.", null=True),
        _column("key", Bytes, "The record's key.", null=True),
        _column("value", Bytes, "The record's value.", null=True),
        _column("headers", String, "JSON: [name, value, ...] as in record_batches; NULL if no headers.", null=True),
        _column("timestamp_ms", Int64, "The record's timestamp; NULL for the time of its sequencing.", null=True),
        Column(
            "transaction_id",
            Int64,
            nullable=True,
            autoincrement=False,
            server_default=ddl.current_transaction_id(),
            comment="PostgreSQL's number for the database transaction that inserted the row; NULL on SQLite.",
        ),
        _column(
            "committed_id",
            Int64,
            "On SQLite: a row that was seen to be committed before this one was inserted; NULL if nobody looked.",
            null=True,
        ),
        Column(
            "inserted_ms",
            Int64,
            nullable=True,
            server_default=ddl.insertion_time_ms(),
            comment="When the row was inserted; how old its timestamp may be is judged by that time.",
        ),
        _column("refusal", String, "Why the row cannot become a record; NULL while it waits to become one.", null=True),
        _column("refused_ms", Int64, "When it was refused last; NULL if never.", null=True),
        comment="Records that applications inserted in their own database transactions, and that are in no partition yet.",
        sqlite_autoincrement=True,
        postgresql_with=_PASSED_THROUGH,
    )
    _index("outbox", "outbox_waiting", "outbox_id", where="refusal IS NULL")
    _index("outbox", "outbox_refused", "outbox_id", where="refusal IS NOT NULL")
    _index("outbox", "outbox_refused_age", "refused_ms", where="refused_ms IS NOT NULL")
    _table(
        "outbox_sequencers",
        _column("singleton", Int16, "Always 1: the table has one row."),
        _column("sequenced_count", Int64, "How many rows of the outbox have become records."),
        PrimaryKeyConstraint("singleton", name="outbox_sequencers_pk"),
        _check("outbox_sequencers_one_row", "singleton = 1"),
        comment="One row, locked by whoever moves rows from the outbox into partitions, so that only one does at a time.",
    )
    _table(
        "relay_positions",
        _column("relay_id", String, "The relay: its direction, the Kafka cluster, and its name."),
        _column("topic", String, "A topic that it reads, in the Kafka cluster or in this store."),
        _column("partition_number", Int32, "A partition of that topic."),
        _column("topic_uuid", String, "The topic's identity; a topic created anew under the same name has another."),
        _column(
            "next_offset",
            Int64,
            "Of a relay from Kafka: the next offset to copy; of one to Kafka: where it began.",
        ),
        PrimaryKeyConstraint("relay_id", "topic", "partition_number", name="relay_positions_pk"),
        _check("relay_positions_offset", "next_offset >= 0"),
        comment="How far each relay from Kafka has copied each partition, and where each relay to Kafka began.",
        sqlite_with_rowid=False,
    )
    _table(
        "sink_batches",
        _column("sink_id", String, "The query that writes."),
        _column("batch_id", Int64, "The number of the batch, which Spark gives it."),
        _column("transactional_id", String, "The transaction that committed the batch."),
        _column("commit_ms", Int64, "When the batch was committed."),
        PrimaryKeyConstraint("sink_id", "batch_id", name="sink_batches_pk"),
        comment="Batches of streaming queries that have been committed; a replay of one is dropped.",
        sqlite_with_rowid=False,
    )
    _table(
        "sink_runs",
        _column("transactional_id", String, "The transactional id that the runs write under."),
        _column("run_number", Int64, "The order of the runs; only the newest one may write."),
        _column("run_id", String, "The run of the streaming query, or the batch job."),
        _column("sink_id", String, "The query that writes, as in sink_batches."),
        _column("producer_id", Int64, "The producer id of the run's next transaction; -1 if the run is over."),
        _column("producer_epoch", Int32, "The epoch of that transaction."),
        _column("begin_ms", Int64, "When the run was first seen."),
        PrimaryKeyConstraint("transactional_id", "run_number", name="sink_runs_pk"),
        UniqueConstraint("transactional_id", "run_id", name="sink_runs_run"),
        comment="Runs of queries that write; a newer run of the same transactional id fences the older ones.",
        sqlite_with_rowid=False,
    )
    _index("sink_runs", "sink_runs_sink", "sink_id")
    _table(
        "sink_inputs",
        _column("sink_id", String, "The query that reads and writes, as in sink_batches."),
        _column("run_id", String, "The query's run; empty: what the last batch read that was decided."),
        _column("batch_id", Int64, "The number of the batch, which Spark gives it."),
        _column("group_id", String, "The consumer group that the query reads as; empty: it has none."),
        _column("partition_id", Int64, "A partition that the batch reads."),
        _column(
            "in_commit_order",
            Flag,
            "Whether these are places, of commit order, where a range ends between transactions.",
        ),
        _column("reader_id", Int64, "Which reader of the query: a number that it chose by chance for this run."),
        _column("start_offset", Int64, "The first offset of a range that it reads there."),
        _column("end_offset", Int64, "The offset after the end of that range."),
        _column("from_group", Flag, "Whether the batch is refused where others have moved the group past it."),
        _column("fails_on_loss", Flag, "Whether the batch is refused where batches before it are missing."),
        _column("noted_ms", Int64, "When a task noted it, before it read."),
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
        _check("sink_inputs_offsets", "0 <= start_offset AND start_offset <= end_offset"),
        comment="What undecided batches read, to be committed for the group with the batch, and what the last one read.",
        sqlite_with_rowid=False,
    )
    _table(
        "sink_positions",
        _column("sink_id", String, "The query that reads and writes, as in sink_batches."),
        _column("group_id", String, "The consumer group that the query reads as."),
        _column("partition_id", Int64, "A partition that it reads."),
        _column("in_commit_order", Flag, "Whether that is a place, of commit order."),
        _column("next_offset", Int64, "The offset after the last one that its committed batches have read there."),
        PrimaryKeyConstraint("sink_id", "group_id", "partition_id", name="sink_positions_pk"),
        _check("sink_positions_offset", "next_offset >= 0"),
        comment="How far the committed batches of each query have read.",
        sqlite_with_rowid=False,
    )
    _index("sink_positions", "sink_positions_group", "group_id", "partition_id")


def _make_upkeep() -> None:
    """Create the table of what is done again and again."""
    _table(
        "maintenance_duties",
        _column("duty", String, "What is to be done again and again."),
        _column("begun_ms", Int64, "When somebody last began to do all of it."),
        _column("is_unfinished", Flag, "Whether some of that is left, and due at once."),
        _column("position", String, "Where the next portion goes on; NULL: at the beginning.", null=True),
        _column("turn_ms", Int64, "When somebody last was at it, whether or not something was done."),
        _column("holder", String, "Who is at it, or was when it died: host:process:number; NULL: nobody.", null=True),
        _column("held_until_ms", Int64, "Until when nobody else takes it; NULL: anybody may.", null=True),
        PrimaryKeyConstraint("duty", name="maintenance_duties_pk"),
        comment="What clients, or `txnstore maintain`, do now and then; who takes the lease in a row does a portion.",
        sqlite_with_rowid=False,
        postgresql_with=_HOT,
    )


def _schema() -> str | None:
    schema: str | None = op.get_context().opts["store_schema"]
    return schema


def _table(name: str, *items: SchemaItem, comment: str, **options: Any) -> None:
    op.create_table(StoreName(name), *items, schema=_schema(), comment=comment, sqlite_strict=True, **options)


def _column(
    name: str, type_: type[TypeEngine[Any]] | TypeEngine[Any], about: str, *, null: bool = False
) -> Column[Any]:
    return Column(name, type_, nullable=null, comment=about, autoincrement=False)


def _identity(name: str, about: str) -> Column[Any]:
    return Column(name, Int64, Identity(), primary_key=True, nullable=False, comment=about)


def _coarse_time(name: str, column: str, span_ms: int) -> Column[Any]:
    about = f"{column} / {span_ms}, computed by the database; changes seldom, and an index on it finds old rows."
    return Column(name, Int64, ddl.CoarseTime(column, span_ms), nullable=False, comment=about)


def _check(name: str, condition: str) -> CheckConstraint:
    return CheckConstraint(condition, name=name)


def _index(of_table: str, name: str, *columns: str, where: str | None = None) -> None:
    condition = None if where is None else text(where)
    op.create_index(
        StoreName(name),
        StoreName(of_table),
        list(columns),
        schema=_schema(),
        postgresql_where=condition,
        sqlite_where=condition,
    )

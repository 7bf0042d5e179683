"""Version 1 of the tables: everything."""

from __future__ import annotations

from alembic import op
from sqlalchemy import CheckConstraint, Column, Identity, PrimaryKeyConstraint, UniqueConstraint, text

from txnstore.db import ddl
from txnstore.db.names import StoreName
from txnstore.db.types import Bytes, Flag, Int16, Int32, Int64, String, UuidText

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None
#: The oldest version of the code that may write to these tables.
oldest_writer_version = 1


def upgrade() -> None:
    """Create the tables and the view."""
    schema = op.get_context().opts["store_schema"]
    op.create_table(
        StoreName("stores"),
        Column("singleton", Int16, nullable=False, autoincrement=False, comment="Always 1: the table has one row."),
        Column(
            "store_uuid",
            UuidText,
            nullable=False,
            comment="The identity of this database as a store; given once, never changed.",
        ),
        Column(
            "schema_version",
            Int32,
            nullable=False,
            comment="The version of the tables: the number of the newest migration applied.",
        ),
        Column(
            "oldest_writer_version",
            Int32,
            nullable=False,
            comment="The oldest version of the code that may write to these tables.",
        ),
        Column("next_producer_id", Int64, nullable=False, comment="The next producer id to give out."),
        Column(
            "created_ms", Int64, nullable=False, comment="When the tables were created, in milliseconds since 1970."
        ),
        PrimaryKeyConstraint("singleton", name="stores_pk"),
        CheckConstraint("next_producer_id >= 0", name="stores_next_producer_id"),
        CheckConstraint("singleton = 1", name="stores_one_row"),
        schema=schema,
        comment="This database: one row.",
        sqlite_strict=True,
    )
    op.create_table(
        StoreName("store_configs"),
        Column("name", String, nullable=False, comment="The setting, under the name Kafka gives it for brokers."),
        Column(
            "value", String, nullable=False, comment="Its value as text; a setting that is not here has its default."
        ),
        PrimaryKeyConstraint("name", name="store_configs_pk"),
        schema=schema,
        comment="Settings of the whole store that differ from their defaults.",
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
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
        PrimaryKeyConstraint("database_id", name="databases_pk"),
        UniqueConstraint("label", name="databases_label"),
        UniqueConstraint("store_uuid", name="databases_store_uuid"),
        schema=schema,
        comment="The databases of the cluster; kept by the controller.",
        sqlite_strict=True,
    )
    op.create_table(
        StoreName("topics"),
        Column(
            "topic_id",
            Int64,
            Identity(),
            primary_key=True,
            nullable=False,
            comment="The number of the topic; never used again for another one.",
        ),
        Column(
            "name", String, nullable=False, comment="The topic's name: 1 to 249 of the characters a-z A-Z 0-9 . _ -"
        ),
        Column("topic_uuid", UuidText, nullable=False, comment="The topic's identity as Kafka's admin API shows it."),
        Column("created_ms", Int64, nullable=False, comment="When it was created, in milliseconds since 1970."),
        UniqueConstraint("name", name="topics_name"),
        UniqueConstraint("topic_uuid", name="topics_topic_uuid"),
        CheckConstraint("length(name) BETWEEN 1 AND 249", name="topics_name_length"),
        schema=schema,
        comment="Topics; kept by the controller.",
        sqlite_strict=True,
        sqlite_autoincrement=True,
    )
    op.create_table(
        StoreName("topic_configs"),
        Column("topic_id", Int64, nullable=False, autoincrement=False, comment="The topic."),
        Column(
            "name",
            String,
            nullable=False,
            comment="The setting, under Kafka's name (cleanup.policy, retention.ms, ...).",
        ),
        Column(
            "value", String, nullable=False, comment="Its value as text; a setting that is not here has its default."
        ),
        PrimaryKeyConstraint("topic_id", "name", name="topic_configs_pk"),
        schema=schema,
        comment="Settings of topics that differ from their defaults.",
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_table(
        StoreName("partitions"),
        Column(
            "partition_id",
            Int64,
            Identity(),
            primary_key=True,
            nullable=False,
            comment="The number of the partition in the whole cluster; never used again.",
        ),
        Column("topic_id", Int64, nullable=False, comment="The topic it belongs to."),
        Column("partition_number", Int32, nullable=False, comment="Its number within the topic, from 0."),
        Column("leader_database_id", Int32, nullable=False, comment="The database that holds its log."),
        UniqueConstraint("topic_id", "partition_number", name="partitions_number"),
        CheckConstraint("partition_number >= 0", name="partitions_number_known"),
        schema=schema,
        comment="Partitions of topics; kept by the controller.",
        sqlite_strict=True,
        sqlite_autoincrement=True,
    )
    op.create_table(
        StoreName("partition_heads"),
        Column("partition_id", Int64, nullable=False, autoincrement=False, comment="The partition."),
        Column("log_start_offset", Int64, nullable=False, comment="The first offset that can still be read."),
        Column("next_offset", Int64, nullable=False, comment="The next offset to be given out: the high watermark."),
        Column(
            "running_max_timestamp_ms",
            Int64,
            nullable=False,
            comment="The largest timestamp appended so far; -1 while the log is empty.",
        ),
        PrimaryKeyConstraint("partition_id", name="partition_heads_pk"),
        CheckConstraint("0 <= log_start_offset AND log_start_offset <= next_offset", name="partition_heads_order"),
        schema=schema,
        comment="The end of each partition's log. Its row lock is what puts appends in order.",
        sqlite_strict=True,
        postgresql_with={"fillfactor": 50},
    )
    op.create_table(
        StoreName("record_batches"),
        Column("partition_id", Int64, nullable=False, autoincrement=False, comment="The partition."),
        Column(
            "last_offset", Int64, nullable=False, autoincrement=False, comment="The offset of the batch's last record."
        ),
        Column("base_offset", Int64, nullable=False, comment="The offset of the batch's first record."),
        Column("record_count", Int32, nullable=False, comment="How many records the batch holds."),
        Column(
            "base_timestamp_ms",
            Int64,
            nullable=False,
            comment="The first record's timestamp, or the append's if timestamp_type is 1.",
        ),
        Column("max_timestamp_ms", Int64, nullable=False, comment="The largest timestamp of the batch."),
        Column(
            "running_max_timestamp_ms",
            Int64,
            nullable=False,
            comment="The largest timestamp of the partition up to here: finds by time.",
        ),
        Column(
            "timestamp_type",
            Int16,
            nullable=False,
            comment="0 CreateTime, the producer's clock; 1 LogAppendTime, the store's.",
        ),
        Column("producer_id", Int64, nullable=False, comment="Who wrote it; -1 if not an idempotent producer."),
        Column("producer_epoch", Int32, nullable=False, comment="The producer's epoch; -1 without a producer id."),
        Column(
            "base_sequence",
            Int32,
            nullable=False,
            comment="The producer's sequence number of the first record; -1 without one.",
        ),
        Column(
            "is_transactional",
            Flag,
            nullable=False,
            comment="Whether the records count only once their transaction is committed.",
        ),
        Column(
            "control_type",
            Int16,
            nullable=True,
            comment="0 ABORT, 1 COMMIT: a marker that ends a transaction. NULL: records.",
        ),
        Column(
            "coordinator_epoch",
            Int32,
            nullable=True,
            comment="Of a marker: the epoch of the coordinator that wrote it.",
        ),
        Column(
            "codec",
            Int16,
            nullable=False,
            comment="How key_data and value_data are compressed: 0 none 1 gzip 2 snappy 3 lz4 4 zstd.",
        ),
        Column("crc", Int64, nullable=False, comment="CRC-32 of what the producer sent, checked at every read."),
        Column("size_bytes", Int32, nullable=False, comment="The bytes of the payload columns together."),
        Column(
            "timestamp_deltas_ms",
            String,
            nullable=True,
            comment="JSON: each record's timestamp less the base; NULL: all 0.",
        ),
        Column(
            "offset_deltas",
            String,
            nullable=True,
            comment="JSON: each record's offset less the base; NULL: 0, 1, 2, ...",
        ),
        Column(
            "key_positions",
            String,
            nullable=True,
            comment="JSON: where keys begin in key_data, and the end; NULL: no keys.",
        ),
        Column(
            "null_keys", String, nullable=True, comment="JSON: the indexes of records whose key is null; NULL: none."
        ),
        Column(
            "value_positions",
            String,
            nullable=True,
            comment="JSON: where values begin in value_data, and the end; NULL: none.",
        ),
        Column(
            "null_values",
            String,
            nullable=True,
            comment="JSON: the indexes of records whose value is null; NULL: none.",
        ),
        Column(
            "headers",
            String,
            nullable=True,
            comment="JSON: for each record null or [name, value, ...]; NULL: no headers at all.",
        ),
        Column("key_data", Bytes, nullable=True, comment="The keys, one after the other."),
        Column("value_data", Bytes, nullable=True, comment="The values, one after the other."),
        PrimaryKeyConstraint("partition_id", "last_offset", name="record_batches_pk"),
        CheckConstraint("codec BETWEEN 0 AND 4", name="record_batches_codec"),
        CheckConstraint("control_type BETWEEN 0 AND 1", name="record_batches_control"),
        CheckConstraint("record_count >= 1", name="record_batches_count"),
        CheckConstraint("0 <= base_offset AND base_offset <= last_offset", name="record_batches_offsets"),
        CheckConstraint("timestamp_type BETWEEN 0 AND 1", name="record_batches_timestamp_type"),
        schema=schema,
        comment="The log: one row a record batch, written once; the view records shows it one row a record.",
        sqlite_strict=True,
    )
    op.create_index(
        StoreName("record_batches_time"),
        StoreName("record_batches"),
        ["partition_id", "running_max_timestamp_ms", "last_offset"],
        schema=schema,
    )
    op.create_table(
        StoreName("producer_states"),
        Column("partition_id", Int64, nullable=False, autoincrement=False, comment="The partition."),
        Column("producer_id", Int64, nullable=False, autoincrement=False, comment="The producer that wrote to it."),
        Column("producer_epoch", Int32, nullable=False, comment="The newest epoch seen of it here."),
        Column(
            "recent_batches",
            String,
            nullable=False,
            comment="JSON, flat: of the last five batches the first and last sequence and offset, and the time.",
        ),
        Column("coordinator_epoch", Int32, nullable=False, comment="Of the last marker; -1 if there was none."),
        Column("last_timestamp_ms", Int64, nullable=False, comment="When it last wrote here, by the store's clock."),
        Column(
            "transaction_first_offset",
            Int64,
            nullable=True,
            comment="Where its open transaction begins here; NULL: none open.",
        ),
        PrimaryKeyConstraint("partition_id", "producer_id", name="producer_states_pk"),
        schema=schema,
        comment="What each producer did last in each partition: idempotence, and the last stable offset.",
        sqlite_strict=True,
        sqlite_with_rowid=False,
        postgresql_with={"fillfactor": 50},
    )
    op.create_index(
        StoreName("producer_states_open"),
        StoreName("producer_states"),
        ["partition_id", "transaction_first_offset"],
        schema=schema,
        postgresql_where=text("transaction_first_offset IS NOT NULL"),
        sqlite_where=text("transaction_first_offset IS NOT NULL"),
    )
    op.create_table(
        StoreName("finished_transactions"),
        Column("partition_id", Int64, nullable=False, autoincrement=False, comment="The partition."),
        Column(
            "marker_offset",
            Int64,
            nullable=False,
            autoincrement=False,
            comment="The offset of the marker that ended the transaction here.",
        ),
        Column("producer_id", Int64, nullable=False, comment="The producer that wrote its records here."),
        Column(
            "producer_epoch",
            Int32,
            nullable=False,
            comment="The epoch of those records; the marker's own is higher (KIP-890).",
        ),
        Column("first_offset", Int64, nullable=False, comment="The offset of its first record here."),
        Column("outcome", Int16, nullable=False, comment="0 aborted, 1 committed."),
        Column(
            "last_stable_offset",
            Int64,
            nullable=False,
            comment="The partition's last stable offset once the marker stood.",
        ),
        PrimaryKeyConstraint("partition_id", "marker_offset", name="finished_transactions_pk"),
        UniqueConstraint("partition_id", "producer_id", "producer_epoch", name="finished_transactions_producer"),
        CheckConstraint("first_offset < marker_offset", name="finished_transactions_order"),
        CheckConstraint("outcome BETWEEN 0 AND 1", name="finished_transactions_outcome"),
        schema=schema,
        comment="Which transactions ended in each partition, and how: Kafka's index of aborted transactions, and more.",
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_table(
        StoreName("transactions"),
        Column("transactional_id", String, nullable=False, comment="The name that its producer gives itself."),
        Column("producer_id", Int64, nullable=False, comment="The producer id it writes with."),
        Column(
            "previous_producer_id", Int64, nullable=False, comment="The producer id before the last change of it; -1."
        ),
        Column(
            "next_producer_id",
            Int64,
            nullable=False,
            comment="The producer id that follows once this transaction is complete; -1.",
        ),
        Column(
            "producer_epoch", Int32, nullable=False, comment="The newest epoch; a request with an older one is refused."
        ),
        Column(
            "last_producer_epoch",
            Int32,
            nullable=False,
            comment="The epoch before the last change of it; -1: repeats are not answered.",
        ),
        Column(
            "timeout_ms",
            Int32,
            nullable=False,
            comment="How long a transaction may stay open; 2147483647: for ever (KIP-939).",
        ),
        Column(
            "state",
            Int16,
            nullable=False,
            comment="0 Empty 1 Ongoing 2 PrepareCommit 3 PrepareAbort 4 CompleteCommit 5 CompleteAbort.",
        ),
        Column("start_ms", Int64, nullable=False, comment="When the transaction became Ongoing; -1 if none is."),
        Column("last_update_ms", Int64, nullable=False, comment="When the row last changed."),
        Column("deadline_ms", Int64, nullable=True, comment="When the transaction is aborted for its age; NULL: not."),
        Column("transaction_number", Int64, nullable=False, comment="How many transactions this id has begun."),
        Column(
            "begin_epoch",
            Int32,
            nullable=False,
            comment="The epoch of the open or decided transaction's records; -1 if there is none.",
        ),
        Column(
            "fence_reason",
            String,
            nullable=True,
            comment="Why the epoch was raised from outside: timeout, init or admin.",
        ),
        Column("fence_detail", String, nullable=True, comment="What happened then, for people."),
        PrimaryKeyConstraint("transactional_id", name="transactions_pk"),
        CheckConstraint("deadline_ms IS NULL OR state = 1", name="transactions_deadline"),
        CheckConstraint("producer_epoch BETWEEN -1 AND 32767", name="transactions_epoch"),
        CheckConstraint("(state = 0) = (start_ms = -1)", name="transactions_start"),
        CheckConstraint("state BETWEEN 0 AND 5", name="transactions_state"),
        schema=schema,
        comment="The coordinator's row of each transactional id; every request locks it first.",
        sqlite_strict=True,
        sqlite_with_rowid=False,
        postgresql_with={"fillfactor": 50},
    )
    op.create_index(
        StoreName("transactions_deadline"),
        StoreName("transactions"),
        ["deadline_ms"],
        schema=schema,
        postgresql_where=text("deadline_ms IS NOT NULL"),
        sqlite_where=text("deadline_ms IS NOT NULL"),
    )
    op.create_index(
        StoreName("transactions_decided"),
        StoreName("transactions"),
        ["state"],
        schema=schema,
        postgresql_where=text("state IN (2, 3)"),
        sqlite_where=text("state IN (2, 3)"),
    )
    op.create_table(
        StoreName("transaction_partitions"),
        Column("transactional_id", String, nullable=False, comment="The transaction."),
        Column("partition_id", Int64, nullable=False, autoincrement=False, comment="A partition that it wrote to."),
        PrimaryKeyConstraint("transactional_id", "partition_id", name="transaction_partitions_pk"),
        schema=schema,
        comment="The partitions of the open or decided transaction of each transactional id.",
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_table(
        StoreName("transaction_writers"),
        Column("transactional_id", String, nullable=False, comment="The transaction."),
        Column(
            "writer_producer_id",
            Int64,
            nullable=False,
            autoincrement=False,
            comment="The producer id of a further writer in it.",
        ),
        Column("producer_epoch", Int32, nullable=False, comment="The epoch of the transaction that the writer joined."),
        Column("reported", Flag, nullable=False, comment="Whether the writer said that it wrote everything."),
        PrimaryKeyConstraint("transactional_id", "writer_producer_id", name="transaction_writers_pk"),
        schema=schema,
        comment="Further writers of a transaction, in other processes.",
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_table(
        StoreName("transaction_groups"),
        Column("transactional_id", String, nullable=False, comment="The transaction."),
        Column("group_id", String, nullable=False, comment="A consumer group whose offsets it commits."),
        PrimaryKeyConstraint("transactional_id", "group_id", name="transaction_groups_pk"),
        schema=schema,
        comment="The groups whose offsets the open or decided transaction of each transactional id holds.",
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
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
    op.create_table(
        StoreName("transaction_log"),
        Column("entry_id", Int64, Identity(), primary_key=True, nullable=False, comment="The order of the entries."),
        Column("transactional_id", String, nullable=False, comment="The transactional id."),
        Column("transaction_number", Int64, nullable=False, comment="Which of its transactions."),
        Column("producer_id", Int64, nullable=False, comment="The producer id after the change."),
        Column("producer_epoch", Int32, nullable=False, comment="The epoch after the change."),
        Column("state", Int16, nullable=False, comment="The state after the change; 6 Dead: the id expired."),
        Column("timeout_ms", Int32, nullable=False, comment="The transaction's timeout."),
        Column("start_ms", Int64, nullable=False, comment="When the transaction became Ongoing; -1."),
        Column("update_ms", Int64, nullable=False, comment="When the change was made."),
        Column("reason", String, nullable=False, comment="What made the change: the request, the reaper, recovery."),
        schema=schema,
        comment="The journal: every change of every transaction's state, in order.",
        sqlite_strict=True,
        sqlite_autoincrement=True,
    )
    op.create_index(
        StoreName("transaction_log_transaction"),
        StoreName("transaction_log"),
        ["transactional_id", "producer_id", "producer_epoch"],
        schema=schema,
    )
    op.create_table(
        StoreName("pending_markers"),
        Column("transactional_id", String, nullable=False, comment="The decided transaction."),
        Column(
            "partition_id",
            Int64,
            nullable=False,
            autoincrement=False,
            comment="The partition that its marker is still missing from.",
        ),
        Column(
            "producer_id",
            Int64,
            nullable=False,
            autoincrement=False,
            comment="The producer whose records the marker ends.",
        ),
        Column(
            "producer_epoch",
            Int32,
            nullable=False,
            comment="The marker's epoch: above that of the records (KIP-890, KIP-1228).",
        ),
        Column("outcome", Int16, nullable=False, comment="0 abort, 1 commit."),
        PrimaryKeyConstraint("transactional_id", "partition_id", "producer_id", name="marker_outbox_pk"),
        CheckConstraint("outcome BETWEEN 0 AND 1", name="marker_outbox_outcome"),
        schema=schema,
        comment="Markers that are decided but not yet written; inserted together with the decision.",
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_table(
        StoreName("groups"),
        Column("group_id", String, nullable=False, comment="The group's name."),
        Column("generation", Int32, nullable=False, comment="How often its partitions were dealt out; 0: never."),
        Column("assignor", String, nullable=True, comment="The assignor its members agreed on."),
        Column(
            "commit_number",
            Int64,
            nullable=False,
            comment="How many commits of offsets the group has seen: their order.",
        ),
        Column("last_update_ms", Int64, nullable=False, comment="When the row last changed."),
        PrimaryKeyConstraint("group_id", name="groups_pk"),
        schema=schema,
        comment="Consumer groups; the row lock is the group's coordinator.",
        sqlite_strict=True,
        sqlite_with_rowid=False,
        postgresql_with={"fillfactor": 50},
    )
    op.create_table(
        StoreName("group_members"),
        Column("group_id", String, nullable=False, comment="The group."),
        Column("member_id", String, nullable=False, comment="The member."),
        Column("group_instance_id", String, nullable=True, comment="Of a static member: its lasting name (KIP-345)."),
        Column("client_id", String, nullable=False, comment="The member's client.id."),
        Column("generation", Int32, nullable=False, comment="The generation that the member knows."),
        Column("session_timeout_ms", Int32, nullable=False, comment="How long it may be silent."),
        Column("deadline_ms", Int64, nullable=False, comment="When it is taken for dead."),
        Column("subscription", String, nullable=False, comment="JSON: what it subscribed to and owns."),
        Column("assignment", String, nullable=False, comment="JSON: the partitions it was given."),
        PrimaryKeyConstraint("group_id", "member_id", name="group_members_pk"),
        schema=schema,
        comment="The members of consumer groups.",
        sqlite_strict=True,
        sqlite_with_rowid=False,
        postgresql_with={"fillfactor": 50},
    )
    op.create_table(
        StoreName("group_offsets"),
        Column("group_id", String, nullable=False, comment="The group."),
        Column("partition_id", Int64, nullable=False, autoincrement=False, comment="The partition."),
        Column("committed_offset", Int64, nullable=False, comment="The offset of the next record to read."),
        Column("leader_epoch", Int32, nullable=False, comment="As the client sent it; -1."),
        Column("offset_metadata", String, nullable=False, comment="Text that the client keeps beside it."),
        Column("commit_ms", Int64, nullable=False, comment="When it was committed."),
        Column(
            "commit_number",
            Int64,
            nullable=False,
            comment="The place of this commit in the order of the group's commits.",
        ),
        Column(
            "producer_id",
            Int64,
            nullable=False,
            comment="Of the transaction that committed it; -1: committed by itself.",
        ),
        Column("producer_epoch", Int32, nullable=False, comment="Of that transaction; -1."),
        PrimaryKeyConstraint("group_id", "partition_id", name="group_offsets_pk"),
        CheckConstraint("committed_offset >= 0", name="group_offsets_offset"),
        schema=schema,
        comment="What each group has consumed.",
        sqlite_strict=True,
        sqlite_with_rowid=False,
        postgresql_with={"fillfactor": 50},
    )
    op.create_table(
        StoreName("pending_group_offsets"),
        Column("group_id", String, nullable=False, comment="The group."),
        Column("partition_id", Int64, nullable=False, autoincrement=False, comment="The partition."),
        Column(
            "producer_id", Int64, nullable=False, autoincrement=False, comment="The producer of the open transaction."
        ),
        Column("producer_epoch", Int32, nullable=False, comment="Its epoch."),
        Column(
            "pending_offset",
            Int64,
            nullable=False,
            comment="What will be the committed offset if the transaction commits.",
        ),
        Column("leader_epoch", Int32, nullable=False, comment="As the client sent it; -1."),
        Column("offset_metadata", String, nullable=False, comment="Text that the client keeps beside it."),
        Column("commit_ms", Int64, nullable=False, comment="When it was sent."),
        Column(
            "commit_number",
            Int64,
            nullable=False,
            comment="Its place in the order of the group's commits: a later plain commit wins.",
        ),
        PrimaryKeyConstraint("group_id", "partition_id", "producer_id", name="pending_group_offsets_pk"),
        CheckConstraint("pending_offset >= 0", name="pending_group_offsets_offset"),
        schema=schema,
        comment="Offsets that an open transaction will commit.",
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_index(
        StoreName("pending_group_offsets_producer"),
        StoreName("pending_group_offsets"),
        ["producer_id"],
        schema=schema,
    )
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
        schema=schema,
        comment="Records that applications insert in database transactions of their own, not yet in a partition.",
        sqlite_strict=True,
        sqlite_autoincrement=True,
    )
    op.create_table(
        StoreName("sink_batches"),
        Column("sink_id", String, nullable=False, comment="The query that writes."),
        Column("batch_id", Int64, nullable=False, autoincrement=False, comment="Its batch."),
        Column("transactional_id", String, nullable=False, comment="The transaction that committed the batch."),
        Column("commit_ms", Int64, nullable=False, comment="When."),
        PrimaryKeyConstraint("sink_id", "batch_id", name="sink_batches_pk"),
        schema=schema,
        comment="Batches of streaming queries that are committed already: a replay is dropped.",
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    for statement in ddl.after_tables(op.get_context().dialect.name, schema):
        op.execute(statement)


def downgrade() -> None:
    """Drop them, and every record with them."""
    schema = op.get_context().opts["store_schema"]
    for statement in ddl.before_tables_go(op.get_context().dialect.name, schema):
        op.execute(statement)
    op.drop_table(StoreName("sink_batches"), schema=schema)
    op.drop_table(StoreName("outbox"), schema=schema)
    op.drop_table(StoreName("pending_group_offsets"), schema=schema)
    op.drop_table(StoreName("group_offsets"), schema=schema)
    op.drop_table(StoreName("group_members"), schema=schema)
    op.drop_table(StoreName("groups"), schema=schema)
    op.drop_table(StoreName("pending_markers"), schema=schema)
    op.drop_table(StoreName("transaction_log"), schema=schema)
    op.drop_table(StoreName("transaction_branches"), schema=schema)
    op.drop_table(StoreName("transaction_groups"), schema=schema)
    op.drop_table(StoreName("transaction_writers"), schema=schema)
    op.drop_table(StoreName("transaction_partitions"), schema=schema)
    op.drop_table(StoreName("transactions"), schema=schema)
    op.drop_table(StoreName("finished_transactions"), schema=schema)
    op.drop_table(StoreName("producer_states"), schema=schema)
    op.drop_table(StoreName("record_batches"), schema=schema)
    op.drop_table(StoreName("partition_heads"), schema=schema)
    op.drop_table(StoreName("partitions"), schema=schema)
    op.drop_table(StoreName("topic_configs"), schema=schema)
    op.drop_table(StoreName("topics"), schema=schema)
    op.drop_table(StoreName("databases"), schema=schema)
    op.drop_table(StoreName("store_configs"), schema=schema)
    op.drop_table(StoreName("stores"), schema=schema)

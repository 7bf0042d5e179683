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
from txnstore.db.names import StoreName
from txnstore.db.types import Bytes, Flag, Int16, Int32, Int64, String, UuidText

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
    "deleted_partitions",
    "partition_heads",
    "record_batches",
    "producer_states",
    "finished_transactions",
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
)
_HOT: Final = {"fillfactor": 50}


def upgrade() -> None:
    """Create the tables with the row that sequencers lock, and the view."""
    for make in (_make_cluster, _make_topics, _make_log, _make_transactions, _make_groups, _make_participants):
        make()
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
            "Where that was: system identifier:oid, or file system:file. NULL: not known.",
            null=True,
        ),
        PrimaryKeyConstraint("singleton", name="stores_pk"),
        _check("stores_one_row", "singleton = 1"),
        _check("stores_next_producer_id", "next_producer_id >= 0"),
        comment="This database: one row.",
    )
    _table(
        "store_configs",
        _column("name", String, "The setting, under the name Kafka gives it for brokers."),
        _column("value", String, "Its value as text; a setting that is not here has its default."),
        PrimaryKeyConstraint("name", name="store_configs_pk"),
        comment="Settings of the whole store that differ from their defaults.",
        sqlite_with_rowid=False,
    )
    _table(
        "databases",
        _column("database_id", Int32, "The number of the database in the cluster; 1 is the controller."),
        _column("label", String, "The name that people and branches of transactions know it by; no credentials."),
        _column("store_uuid", UuidText, "The identity that the database must have."),
        _column("coordinates", Flag, "Whether transactional ids and groups live in it, by the hash of their names."),
        _column("catalogue_version", Int64, "Of row 1: how often topics and settings changed; in a copy: up to where."),
        PrimaryKeyConstraint("database_id", name="databases_pk"),
        UniqueConstraint("label", name="databases_label"),
        UniqueConstraint("store_uuid", name="databases_store_uuid"),
        comment="The databases of the cluster; kept by the controller, copied to the others.",
    )


def _make_topics() -> None:
    """Create the catalogue of topics."""
    _table(
        "topics",
        _identity("topic_id", "The number of the topic; never used again for another one."),
        _column("name", String, "The topic's name: 1 to 249 of the characters a-z A-Z 0-9 . _ -"),
        _column("topic_uuid", UuidText, "The topic's identity as Kafka's admin API shows it."),
        _column("created_ms", Int64, "When it was created, in milliseconds since 1970."),
        UniqueConstraint("name", name="topics_name"),
        UniqueConstraint("topic_uuid", name="topics_topic_uuid"),
        _check("topics_name_length", "length(name) BETWEEN 1 AND 249"),
        comment="Topics; kept by the controller.",
        sqlite_autoincrement=True,
    )
    _table(
        "topic_configs",
        _column("topic_id", Int64, "The topic."),
        _column("name", String, "The setting, under Kafka's name (cleanup.policy, retention.ms, ...)."),
        _column("value", String, "Its value as text; a setting that is not here has its default."),
        PrimaryKeyConstraint("topic_id", "name", name="topic_configs_pk"),
        comment="Settings of topics that differ from their defaults.",
        sqlite_with_rowid=False,
    )
    _table(
        "partitions",
        _identity("partition_id", "The number of the partition in the whole cluster; never used again."),
        _column("topic_id", Int64, "The topic it belongs to."),
        _column("partition_number", Int32, "Its number within the topic, from 0."),
        _column("leader_database_id", Int32, "The database that holds its log."),
        UniqueConstraint("topic_id", "partition_number", name="partitions_number"),
        _check("partitions_number_known", "partition_number >= 0"),
        comment="Partitions of topics; kept by the controller.",
        sqlite_autoincrement=True,
    )
    _table(
        "deleted_partitions",
        _column("partition_id", Int64, "A partition whose topic was deleted; its number is never used again."),
        PrimaryKeyConstraint("partition_id", name="deleted_partitions_pk"),
        comment="Partitions that are gone for everybody, of which rows are left to be deleted in portions.",
        sqlite_with_rowid=False,
    )


def _make_log() -> None:
    """Create the log, and what producers did last in it."""
    _table(
        "partition_heads",
        _column("partition_id", Int64, "The partition."),
        _column("log_start_offset", Int64, "The first offset that can still be read."),
        _column("next_offset", Int64, "The next offset to be given out: the high watermark."),
        _column("running_max_timestamp_ms", Int64, "The largest timestamp appended so far; -1 while the log is empty."),
        PrimaryKeyConstraint("partition_id", name="partition_heads_pk"),
        _check("partition_heads_order", "0 <= log_start_offset AND log_start_offset <= next_offset"),
        comment="The end of each partition's log. Its row lock is what puts appends in order.",
        postgresql_with=_HOT,
    )
    _table(
        "record_batches",
        _column("partition_id", Int64, "The partition."),
        _column("last_offset", Int64, "The offset of the batch's last record."),
        _column("base_offset", Int64, "The offset of the batch's first record."),
        _column("record_count", Int32, "How many records the batch holds."),
        _column("base_timestamp_ms", Int64, "The first record's timestamp, or the append's if timestamp_type is 1."),
        _column("max_timestamp_ms", Int64, "The largest timestamp of the batch."),
        _column("running_max_timestamp_ms", Int64, "The largest timestamp of the partition up to here: finds by time."),
        _column("timestamp_type", Int16, "0 CreateTime, the producer's clock; 1 LogAppendTime, the store's."),
        _column("producer_id", Int64, "Who wrote it; -1 if not an idempotent producer."),
        _column("producer_epoch", Int32, "The producer's epoch; -1 without a producer id."),
        _column("base_sequence", Int32, "The producer's sequence number of the first record; -1 without one."),
        _column("is_transactional", Flag, "Whether the records count only once their transaction is committed."),
        _column(
            "control_type", Int16, "0 ABORT, 1 COMMIT: a marker that ends a transaction. NULL: records.", null=True
        ),
        _column("coordinator_epoch", Int32, "Of a marker: the epoch of the coordinator that wrote it.", null=True),
        _column("codec", Int16, "How key_data and value_data are compressed: 0 none 1 gzip 2 snappy 3 lz4 4 zstd."),
        _column("crc", Int64, "CRC-32 of what the producer sent, checked at every read."),
        _column("size_bytes", Int32, "The bytes of the payload columns together."),
        _column("timestamp_deltas_ms", String, "JSON: each record's timestamp less the base; NULL: all 0.", null=True),
        _column("offset_deltas", String, "JSON: each record's offset less the base; NULL: 0, 1, 2, ...", null=True),
        _column("key_positions", String, "JSON: where keys begin in key_data, and the end; NULL: no keys.", null=True),
        _column("null_keys", String, "JSON: the indexes of records whose key is null; NULL: none.", null=True),
        _column(
            "value_positions", String, "JSON: where values begin in value_data, and the end; NULL: none.", null=True
        ),
        _column("null_values", String, "JSON: the indexes of records whose value is null; NULL: none.", null=True),
        _column(
            "headers", String, "JSON: for each record null or [name, value, ...]; NULL: no headers at all.", null=True
        ),
        _column("key_data", Bytes, "The keys, one after the other.", null=True),
        _column("value_data", Bytes, "The values, one after the other.", null=True),
        PrimaryKeyConstraint("partition_id", "last_offset", name="record_batches_pk"),
        _check("record_batches_offsets", "0 <= base_offset AND base_offset <= last_offset"),
        _check("record_batches_count", "record_count >= 1"),
        _check("record_batches_codec", "codec BETWEEN 0 AND 4"),
        _check("record_batches_control", "control_type BETWEEN 0 AND 1"),
        _check("record_batches_timestamp_type", "timestamp_type BETWEEN 0 AND 1"),
        comment="The log: one row a record batch, written once; the view records shows it one row a record.",
    )
    _index("record_batches", "record_batches_time", "partition_id", "running_max_timestamp_ms", "last_offset")
    _table(
        "producer_states",
        _column("partition_id", Int64, "The partition."),
        _column("producer_id", Int64, "The producer that wrote to it."),
        _column("producer_epoch", Int32, "The newest epoch seen of it here."),
        _column(
            "recent_batches",
            String,
            "JSON, flat: of the last five batches the first and last sequence and offset, and the time.",
        ),
        _column("coordinator_epoch", Int32, "Of the last marker; -1 if there was none."),
        _column("last_timestamp_ms", Int64, "When it last wrote here, by the store's clock."),
        _column(
            "transaction_first_offset", Int64, "Where its open transaction begins here; NULL: none open.", null=True
        ),
        _coarse_time("last_minute", "last_timestamp_ms", 60_000),
        PrimaryKeyConstraint("partition_id", "producer_id", name="producer_states_pk"),
        comment="What each producer did last in each partition: idempotence, and the last stable offset.",
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
        _column("producer_epoch", Int32, "The epoch of those records; the marker's own is higher (KIP-890)."),
        _column("first_offset", Int64, "The offset of its first record here."),
        _column("outcome", Int16, "0 aborted, 1 committed."),
        _column("last_stable_offset", Int64, "The partition's last stable offset once the marker stood."),
        PrimaryKeyConstraint("partition_id", "marker_offset", name="finished_transactions_pk"),
        UniqueConstraint("partition_id", "producer_id", "producer_epoch", name="finished_transactions_producer"),
        _check("finished_transactions_outcome", "outcome BETWEEN 0 AND 1"),
        _check("finished_transactions_order", "first_offset < marker_offset"),
        comment="Which transactions ended in each partition, and how: Kafka's index of aborted transactions, and more.",
        sqlite_with_rowid=False,
    )


def _make_transactions() -> None:
    """Create the transaction coordinator's tables."""
    _table(
        "transactions",
        _column("transactional_id", String, "The name that its producer gives itself."),
        _column("producer_id", Int64, "The producer id it writes with."),
        _column("previous_producer_id", Int64, "The producer id before the last change of it; -1."),
        _column("next_producer_id", Int64, "The producer id that follows once this transaction is complete; -1."),
        _column("producer_epoch", Int32, "The newest epoch; a request with an older one is refused."),
        _column("last_producer_epoch", Int32, "The epoch before the last change of it; -1: repeats are not answered."),
        _column("timeout_ms", Int32, "How long a transaction may stay open; 2147483647: for ever (KIP-939)."),
        _column("state", Int16, "0 Empty 1 Ongoing 2 PrepareCommit 3 PrepareAbort 4 CompleteCommit 5 CompleteAbort."),
        _column("start_ms", Int64, "When the transaction became Ongoing; -1 if none is."),
        _column("last_update_ms", Int64, "When the row last changed."),
        _column("deadline_ms", Int64, "When the transaction is aborted for its age; NULL: not.", null=True),
        _column("transaction_number", Int64, "How many transactions this id has begun."),
        _column("begin_epoch", Int32, "The epoch of the open or decided transaction's records; -1 if there is none."),
        _column("fence_reason", String, "Why the epoch was raised from outside: timeout, init or admin.", null=True),
        _column("fence_detail", String, "What happened then, for people.", null=True),
        _coarse_time("last_update_minute", "last_update_ms", 60_000),
        PrimaryKeyConstraint("transactional_id", name="transactions_pk"),
        _check("transactions_state", "state BETWEEN 0 AND 5"),
        _check("transactions_epoch", "producer_epoch BETWEEN -1 AND 32767"),
        _check("transactions_start", "(state = 0) = (start_ms = -1)"),
        _check("transactions_deadline", "deadline_ms IS NULL OR state = 1"),
        comment="The coordinator's row of each transactional id; every request locks it first.",
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
        _column("transactional_id", String, "The transaction."),
        _column("partition_id", Int64, "A partition that it wrote to."),
        PrimaryKeyConstraint("transactional_id", "partition_id", name="transaction_partitions_pk"),
        comment="The partitions of the open or decided transaction of each transactional id.",
        sqlite_with_rowid=False,
    )
    _table(
        "transaction_writers",
        _column("transactional_id", String, "The transaction."),
        _column("writer_producer_id", Int64, "The producer id of a further writer in it."),
        _column("producer_epoch", Int32, "The epoch of the transaction that the writer joined."),
        _column("reported", Flag, "Whether the writer said that it wrote everything."),
        PrimaryKeyConstraint("transactional_id", "writer_producer_id", name="transaction_writers_pk"),
        comment="Further writers of a transaction, in other processes.",
        sqlite_with_rowid=False,
    )
    _index("transaction_writers", "transaction_writers_producer", "writer_producer_id")
    _table(
        "transaction_writer_partitions",
        _column("transactional_id", String, "The transaction."),
        _column("writer_producer_id", Int64, "The producer id of a further writer in it."),
        _column("partition_id", Int64, "A partition that the writer wrote to."),
        PrimaryKeyConstraint(
            "transactional_id", "writer_producer_id", "partition_id", name="transaction_writer_partitions_pk"
        ),
        comment="The partitions of the further writers of open or decided transactions.",
        sqlite_with_rowid=False,
    )
    _table(
        "transaction_groups",
        _column("transactional_id", String, "The transaction."),
        _column("group_id", String, "A consumer group whose offsets it commits."),
        PrimaryKeyConstraint("transactional_id", "group_id", name="transaction_groups_pk"),
        comment="The groups whose offsets the open or decided transaction of each transactional id holds.",
        sqlite_with_rowid=False,
    )
    _table(
        "transaction_branches",
        _column("gid", String, "The name under which the other database keeps the prepared branch."),
        _column("transactional_id", String, "The transaction that the branch is a share of."),
        _column("producer_id", Int64, "The producer id of that transaction."),
        _column("producer_epoch", Int32, "Its epoch: which of the producer's transactions it is."),
        _column("database_label", String, "The database that votes: host:port/name, for people; no credentials."),
        _column("database_identity", String, "The same as its server knows it: system identifier:oid."),
        _column("outcome", Int16, "What was decided: 0 abort, 1 commit; NULL: nothing yet.", null=True),
        _column("registered_ms", Int64, "When the branch was made known, before it could vote."),
        PrimaryKeyConstraint("gid", name="transaction_branches_pk"),
        _check("transaction_branches_outcome", "outcome BETWEEN 0 AND 1"),
        comment="Shares of transactions in other databases, which vote; a row goes once its branch has ended.",
    )
    _index("transaction_branches", "transaction_branches_transaction", "transactional_id")
    _index("transaction_branches", "transaction_branches_database", "database_identity")
    _table(
        "transaction_log",
        _identity("entry_id", "The order of the entries."),
        _column("transactional_id", String, "The transactional id."),
        _column("transaction_number", Int64, "Which of its transactions."),
        _column("producer_id", Int64, "The producer id after the change."),
        _column("producer_epoch", Int32, "The epoch after the change."),
        _column("state", Int16, "The state after the change; 6 Dead: the id expired."),
        _column("timeout_ms", Int32, "The transaction's timeout."),
        _column("start_ms", Int64, "When the transaction became Ongoing; -1."),
        _column("update_ms", Int64, "When the change was made."),
        _column("reason", String, "What made the change: the request, the reaper, recovery."),
        comment="The journal: every change of every transaction's state, in order.",
        sqlite_autoincrement=True,
    )
    _index("transaction_log", "transaction_log_producer", "producer_id", "producer_epoch")
    _table(
        "pending_markers",
        _column("transactional_id", String, "The decided transaction."),
        _column("partition_id", Int64, "The partition that its marker is still missing from."),
        _column("producer_id", Int64, "The producer whose records the marker ends."),
        _column("producer_epoch", Int32, "The marker's epoch: above that of the records (KIP-890, KIP-1228)."),
        _column("outcome", Int16, "0 abort, 1 commit."),
        PrimaryKeyConstraint("transactional_id", "partition_id", "producer_id", name="pending_markers_pk"),
        _check("pending_markers_outcome", "outcome BETWEEN 0 AND 1"),
        comment="Markers that are decided but not yet written; inserted together with the decision.",
        sqlite_with_rowid=False,
    )


def _make_groups() -> None:
    """Create the tables of consumer groups."""
    _table(
        "groups",
        _column("group_id", String, "The group's name."),
        _column("generation", Int32, "How often its partitions were dealt out; 0: never."),
        _column("assignor", String, "The assignor its members agreed on.", null=True),
        _column("commit_number", Int64, "How many commits of offsets the group has seen: their order."),
        _column("last_update_ms", Int64, "When the row last changed."),
        PrimaryKeyConstraint("group_id", name="groups_pk"),
        comment="Consumer groups; the row lock is the group's coordinator.",
        sqlite_with_rowid=False,
        postgresql_with=_HOT,
    )
    _table(
        "group_members",
        _column("group_id", String, "The group."),
        _column("member_id", String, "The member."),
        _column("group_instance_id", String, "Of a static member: its lasting name (KIP-345).", null=True),
        _column("client_id", String, "The member's client.id."),
        _column("generation", Int32, "The generation that the member knows."),
        _column("session_timeout_ms", Int32, "How long it may be silent."),
        _column("deadline_ms", Int64, "When it is taken for dead."),
        _column("subscription", String, "JSON: what it subscribed to and owns."),
        _column("assignment", String, "JSON: the partitions it was given."),
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
        _column("committed_offset", Int64, "The offset of the next record to read."),
        _column("leader_epoch", Int32, "As the client sent it; -1."),
        _column("offset_metadata", String, "Text that the client keeps beside it; NULL: it gave none.", null=True),
        _column("commit_ms", Int64, "When it was committed."),
        _column("commit_number", Int64, "The place of this commit in the order of the group's commits."),
        _column("producer_id", Int64, "Of the transaction that committed it; -1: committed by itself."),
        _column("producer_epoch", Int32, "Of that transaction; -1."),
        PrimaryKeyConstraint("group_id", "partition_id", name="group_offsets_pk"),
        _check("group_offsets_offset", "committed_offset >= 0"),
        comment="What each group has consumed.",
        sqlite_with_rowid=False,
        postgresql_with=_HOT,
    )
    _table(
        "pending_group_offsets",
        _column("group_id", String, "The group."),
        _column("partition_id", Int64, "The partition."),
        _column("producer_id", Int64, "The producer of the open transaction."),
        _column("producer_epoch", Int32, "Its epoch."),
        _column("pending_offset", Int64, "What will be the committed offset if the transaction commits."),
        _column("leader_epoch", Int32, "As the client sent it; -1."),
        _column("offset_metadata", String, "Text that the client keeps beside it; NULL: it gave none.", null=True),
        _column("commit_ms", Int64, "When it was sent."),
        _column("commit_number", Int64, "Its place in the order of the group's commits: a later plain commit wins."),
        PrimaryKeyConstraint("group_id", "partition_id", "producer_id", name="pending_group_offsets_pk"),
        _check("pending_group_offsets_offset", "pending_offset >= 0"),
        comment="Offsets that an open transaction will commit.",
        sqlite_with_rowid=False,
    )
    _index("pending_group_offsets", "pending_group_offsets_producer", "producer_id")
    _table(
        "offset_producers",
        _column("producer_id", Int64, "A producer whose transactions are coordinated in another database."),
        _column("producer_epoch", Int32, "Its epoch since offsets of it were finished here: older ones are refused."),
        _column("last_update_ms", Int64, "When that was."),
        _coarse_time("last_update_minute", "last_update_ms", 60_000),
        PrimaryKeyConstraint("producer_id", name="offset_producers_pk"),
        comment="Producers of other databases that have committed offsets of groups here: what of theirs is late.",
        sqlite_with_rowid=False,
    )
    _index("offset_producers", "offset_producers_age", "last_update_minute")


def _make_participants() -> None:
    """Create the outbox, and what relays and Spark's queries have done."""
    _table(
        "outbox",
        _identity("outbox_id", "The order within one database transaction."),
        _column("topic", String, "The topic's name."),
        _column("partition_number", Int32, "The partition; NULL: chosen by the key.", null=True),
        _column("key", Bytes, "The record's key.", null=True),
        _column("value", Bytes, "The record's value.", null=True),
        _column("headers", String, "JSON: [name, value, ...] as in record_batches; NULL: none.", null=True),
        _column("timestamp_ms", Int64, "The record's timestamp; NULL: when it is sequenced.", null=True),
        Column(
            "transaction_id",
            Int64,
            nullable=True,
            autoincrement=False,
            server_default=ddl.current_transaction_id(),
            comment="The database transaction that inserted the row, as PostgreSQL numbers them; NULL on SQLite.",
        ),
        _column("refusal", String, "Why the row cannot become a record; NULL: it waits to be one.", null=True),
        comment="Records that applications insert in database transactions of their own, not yet in a partition.",
        sqlite_autoincrement=True,
    )
    _index("outbox", "outbox_waiting", "outbox_id", where="refusal IS NULL")
    _table(
        "outbox_sequencers",
        _column("singleton", Int16, "Always 1: the table has one row."),
        _column("sequenced_count", Int64, "How many rows of the outbox have become records."),
        PrimaryKeyConstraint("singleton", name="outbox_sequencers_pk"),
        _check("outbox_sequencers_one_row", "singleton = 1"),
        comment="Who moves rows from the outbox into partitions locks this row: one at a time.",
    )
    _table(
        "relay_positions",
        _column("relay_id", String, "The relay: its direction, the Kafka cluster, and its name."),
        _column("topic", String, "A topic that it reads: of the Kafka cluster, or of this store."),
        _column("partition_number", Int32, "A partition of that topic."),
        _column("topic_uuid", String, "The identity of that topic: one that is made anew under its name is another."),
        _column("next_offset", Int64, "Of a relay from Kafka: where it goes on. Of one to Kafka: where it began."),
        PrimaryKeyConstraint("relay_id", "topic", "partition_number", name="relay_positions_pk"),
        _check("relay_positions_offset", "next_offset >= 0"),
        comment="How far each relay has copied the partitions of a Kafka cluster, and what it began with.",
        sqlite_with_rowid=False,
    )
    _table(
        "sink_batches",
        _column("sink_id", String, "The query that writes."),
        _column("batch_id", Int64, "Its batch."),
        _column("transactional_id", String, "The transaction that committed the batch."),
        _column("commit_ms", Int64, "When."),
        PrimaryKeyConstraint("sink_id", "batch_id", name="sink_batches_pk"),
        comment="Batches of streaming queries that are committed already: a replay is dropped.",
        sqlite_with_rowid=False,
    )
    _table(
        "sink_runs",
        _column("transactional_id", String, "The transactional id that the runs write under."),
        _column("run_number", Int64, "The order of the runs; only the newest one may write."),
        _column("run_id", String, "The run of a query, or the job."),
        _column("sink_id", String, "The query that writes, as in sink_batches."),
        _column("producer_id", Int64, "The producer id that the run's next transaction has; -1: the run is over."),
        _column("producer_epoch", Int32, "The epoch that it has."),
        _column("begin_ms", Int64, "When the run was first seen."),
        PrimaryKeyConstraint("transactional_id", "run_number", name="sink_runs_pk"),
        UniqueConstraint("transactional_id", "run_id", name="sink_runs_run"),
        comment="Runs of queries that write: a newer one of the same transactional id fences those before it.",
        sqlite_with_rowid=False,
    )
    _table(
        "sink_inputs",
        _column("sink_id", String, "The query that reads and writes, as in sink_batches."),
        _column("run_id", String, "Its run."),
        _column("batch_id", Int64, "Its batch."),
        _column("group_id", String, "The consumer group that the query reads as."),
        _column("partition_id", Int64, "A partition that the batch reads."),
        _column("start_offset", Int64, "The first offset of a range that it reads there."),
        _column("end_offset", Int64, "The offset behind that range."),
        PrimaryKeyConstraint(
            "sink_id", "run_id", "batch_id", "group_id", "partition_id", "start_offset", name="sink_inputs_pk"
        ),
        _check("sink_inputs_offsets", "0 <= start_offset AND start_offset <= end_offset"),
        comment="What batches that are not decided read; it is committed for the group together with the batch.",
        sqlite_with_rowid=False,
    )
    _table(
        "sink_positions",
        _column("sink_id", String, "The query that reads and writes, as in sink_batches."),
        _column("group_id", String, "The consumer group that the query reads as."),
        _column("partition_id", Int64, "A partition that it reads."),
        _column("next_offset", Int64, "The offset behind what its committed batches have read there."),
        PrimaryKeyConstraint("sink_id", "group_id", "partition_id", name="sink_positions_pk"),
        _check("sink_positions_offset", "next_offset >= 0"),
        comment="How far the committed batches of each query have read.",
        sqlite_with_rowid=False,
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
    about = f"{column} / {span_ms}, by itself: finds what is old, and changes seldom."
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

"""The tables of the outbox, and of relays."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Column, PrimaryKeyConstraint

from txnstore.db import ddl
from txnstore.db.ddl import Bytes, Int16, Int32, Int64, String
from txnstore.db.tables.building import check, column, identity, partial_index, table

outbox: Final = table(
    "outbox",
    identity("outbox_id", "Orders the rows that one database transaction inserted."),
    column("topic", String, "The topic's name."),
    column("partition_number", Int32, "The partition's number; NULL to have it chosen by the key.", null=True),
    column("key", Bytes, "The record's key.", null=True),
    column("value", Bytes, "The record's value.", null=True),
    column("headers", String, "JSON: [name, value, ...] as in record_batches; NULL if no headers.", null=True),
    column("timestamp_ms", Int64, "The record's timestamp; NULL for the time of its sequencing.", null=True),
    Column(
        "transaction_id",
        Int64,
        nullable=True,
        autoincrement=False,
        server_default=ddl.current_transaction_id(),
        comment="PostgreSQL's number for the database transaction that inserted the row; NULL on SQLite.",
    ),
    column(
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
    column("refusal", String, "Why the row cannot become a record; NULL while it waits to become one.", null=True),
    column("refused_ms", Int64, "When it was refused last; NULL if never.", null=True),
    comment="Records that applications inserted in their own database transactions, and that are in no partition yet.",
    sqlite_autoincrement=True,
    is_passed_through=True,
)
partial_index(
    "outbox_waiting",
    outbox.c.outbox_id,
    where=outbox.c.refusal.is_(None),
)
partial_index(
    "outbox_refused",
    outbox.c.outbox_id,
    where=outbox.c.refusal.is_not(None),
)
partial_index("outbox_refused_age", outbox.c.refused_ms, where=outbox.c.refused_ms.is_not(None))

outbox_sequencers: Final = table(
    "outbox_sequencers",
    column("singleton", Int16, "Always 1: the table has one row."),
    column("sequenced_count", Int64, "How many rows of the outbox have become records."),
    PrimaryKeyConstraint("singleton", name="outbox_sequencers_pk"),
    check("outbox_sequencers_one_row", "singleton = 1"),
    comment="One row, locked by whoever moves rows from the outbox into partitions, so that only one does at a time.",
)

relay_positions: Final = table(
    "relay_positions",
    column("relay_id", String, "The relay: its direction, the Kafka cluster, and its name."),
    column("topic", String, "A topic that it reads, in the Kafka cluster or in this store."),
    column("partition_number", Int32, "A partition of that topic."),
    column("topic_uuid", String, "The topic's identity; a topic created anew under the same name has another."),
    column("next_offset", Int64, "Of a relay from Kafka: the next offset to copy; of one to Kafka: where it began."),
    PrimaryKeyConstraint("relay_id", "topic", "partition_number", name="relay_positions_pk"),
    check("relay_positions_offset", "next_offset >= 0"),
    comment="How far each relay from Kafka has copied each partition, and where each relay to Kafka began.",
    sqlite_with_rowid=False,
)

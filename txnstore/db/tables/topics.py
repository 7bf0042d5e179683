"""The tables of topics: their settings and partitions."""

from __future__ import annotations

from typing import Final

from sqlalchemy import PrimaryKeyConstraint, UniqueConstraint

from txnstore.db.ddl import Int32, Int64, String, UuidText
from txnstore.db.tables.building import check, column, identity, table

topics: Final = table(
    "topics",
    identity("topic_id", "The topic's number; never reused."),
    column("name", String, "The topic's name: 1 to 249 of the characters a-z A-Z 0-9 . _ -"),
    column("topic_uuid", UuidText, "The topic's identity, as Kafka's admin API shows it."),
    column("created_ms", Int64, "When it was created, in milliseconds since 1970."),
    UniqueConstraint("name", name="topics_name"),
    UniqueConstraint("topic_uuid", name="topics_topic_uuid"),
    check("topics_name_length", "length(name) BETWEEN 1 AND 249"),
    comment="Topics; maintained by the controller.",
    sqlite_autoincrement=True,
)

topic_configs: Final = table(
    "topic_configs",
    column("topic_id", Int64, "The topic."),
    column("name", String, "The setting's name, as Kafka calls it (cleanup.policy, retention.ms, ...)."),
    column("value", String, "The value as text; a setting without a row has its default."),
    PrimaryKeyConstraint("topic_id", "name", name="topic_configs_pk"),
    comment="Settings of topics that differ from their defaults.",
    sqlite_with_rowid=False,
)

partitions: Final = table(
    "partitions",
    identity("partition_id", "The partition's number, unique in the whole cluster; never reused."),
    column("topic_id", Int64, "The topic it belongs to."),
    column("partition_number", Int32, "Its number within the topic, from 0."),
    column("leader_database_id", Int32, "The database that holds its log."),
    UniqueConstraint("topic_id", "partition_number", name="partitions_number"),
    check("partitions_number_known", "partition_number >= 0"),
    comment="Partitions of topics; maintained by the controller.",
    sqlite_autoincrement=True,
)

deleted_numbers: Final = table(
    "deleted_numbers",
    identity("deletion_number", "Which deletion it was; the oldest are forgotten."),
    column("partition_id", Int64, "The partition that was deleted."),
    UniqueConstraint("partition_id", name="deleted_numbers_partition"),
    comment="What the controller of a cluster has deleted, and the others may delete; no other partition goes there.",
    sqlite_autoincrement=True,
)

deleted_partitions: Final = table(
    "deleted_partitions",
    column("partition_id", Int64, "A partition whose topic was deleted; its number is never reused."),
    PrimaryKeyConstraint("partition_id", name="deleted_partitions_pk"),
    comment="Deleted partitions that nobody sees any more, and whose remaining rows are deleted in portions.",
    sqlite_with_rowid=False,
)

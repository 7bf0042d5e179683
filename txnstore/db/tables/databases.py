"""The tables of this database and its cluster."""

from __future__ import annotations

from typing import Final

from sqlalchemy import PrimaryKeyConstraint, UniqueConstraint

from txnstore.db.ddl import Flag, Int16, Int32, Int64, String, UuidText
from txnstore.db.tables.building import check, column, table

stores: Final = table(
    "stores",
    column("singleton", Int16, "Always 1: the table has one row."),
    column("store_uuid", UuidText, "The identity of this database as a store; only `txnstore adopt` changes it."),
    column("schema_version", Int32, "The version of the tables: the number of the newest migration applied."),
    column("oldest_writer_version", Int32, "The oldest version of the code that may write to these tables."),
    column("next_producer_id", Int64, "The next producer id to give out."),
    column("created_ms", Int64, "When the tables were created, in milliseconds since 1970."),
    column(
        "database_identity",
        String,
        "Where that was: system identifier:oid:oid of this table, or file system:file; NULL if unknown.",
        null=True,
    ),
    column("move_state", Int16, "Of a move: 0 closed here, 1 gone from here, 2 arriving here; else NULL.", null=True),
    column("move_uuid", UuidText, "The last move, as both databases call it; NULL if there was none.", null=True),
    column("move_peer", String, "The other database of that move, without its password; else NULL.", null=True),
    column(
        "move_position",
        String,
        "JSON: how far an arriving store is copied, or which moves were cancelled here; else NULL.",
        null=True,
    ),
    PrimaryKeyConstraint("singleton", name="stores_pk"),
    check("stores_one_row", "singleton = 1"),
    check("stores_next_producer_id", "next_producer_id >= 0"),
    check("stores_move", "move_state BETWEEN 0 AND 2"),
    comment="This database: one row.",
)

store_configs: Final = table(
    "store_configs",
    column("name", String, "The setting's name, as Kafka calls it for brokers."),
    column("value", String, "The value as text; a setting without a row has its default."),
    PrimaryKeyConstraint("name", name="store_configs_pk"),
    comment="Settings of the whole store that differ from their defaults.",
    sqlite_with_rowid=False,
)

databases: Final = table(
    "databases",
    column("database_id", Int32, "The number of the database in the cluster; 1 is the controller."),
    column("label", String, "The name by which people and transaction branches know it; without credentials."),
    column("store_uuid", UuidText, "The store_uuid that the database must have."),
    column("coordinates", Flag, "Whether it coordinates transactional ids and groups, by the hash of their names."),
    column(
        "catalogue_version",
        Int64,
        "In row 1: grows by chance with each change of topics and settings; in a copy: up to where.",
    ),
    PrimaryKeyConstraint("database_id", name="databases_pk"),
    UniqueConstraint("label", name="databases_label"),
    UniqueConstraint("store_uuid", name="databases_store_uuid"),
    comment="The databases of the cluster; maintained by the controller, copied to the others.",
)

"""The tables: the format of a store, from which the reference of the tables in README.md is generated.

Every column says what it holds.  There are no foreign keys: the rows at the two ends may be in different databases of a
cluster.  Integers that count or name something have 64 bits.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from sqlalchemy import Connection, MetaData, Table, event

from txnstore.db import ddl
from txnstore.db.tables.building import MINUTE_MS, TEN_SECONDS_MS, enter_options_of_postgresql, metadata
from txnstore.db.tables.databases import databases, store_configs, stores
from txnstore.db.tables.groups import group_members, group_offsets, groups, offset_producers, pending_group_offsets
from txnstore.db.tables.log import (
    finished_transactions,
    partition_heads,
    partition_storage,
    producer_states,
    record_batches,
)
from txnstore.db.tables.maintenance import maintenance_duties
from txnstore.db.tables.outbox import outbox, outbox_sequencers, relay_positions
from txnstore.db.tables.sinks import sink_batches, sink_inputs, sink_positions, sink_runs
from txnstore.db.tables.topics import deleted_numbers, deleted_partitions, partitions, topic_configs, topics
from txnstore.db.tables.transactions import (
    pending_markers,
    transaction_branches,
    transaction_groups,
    transaction_log,
    transaction_partitions,
    transaction_writer_partitions,
    transaction_writers,
    transactions,
)

__all__ = [
    "MINUTE_MS",
    "OLDEST_WRITER_VERSION",
    "SCHEMA_VERSION",
    "TEN_SECONDS_MS",
    "databases",
    "deleted_numbers",
    "deleted_partitions",
    "enter_options_of_postgresql",
    "finished_transactions",
    "group_members",
    "group_offsets",
    "groups",
    "maintenance_duties",
    "metadata",
    "offset_producers",
    "outbox",
    "outbox_sequencers",
    "partition_heads",
    "partition_storage",
    "partitions",
    "pending_group_offsets",
    "pending_markers",
    "producer_states",
    "record_batches",
    "relay_positions",
    "sink_batches",
    "sink_inputs",
    "sink_positions",
    "sink_runs",
    "store_configs",
    "stores",
    "topic_configs",
    "topics",
    "transaction_branches",
    "transaction_groups",
    "transaction_log",
    "transaction_partitions",
    "transaction_writer_partitions",
    "transaction_writers",
    "transactions",
]

#: The version of the tables that this code reads and writes; the number of the newest migration.
SCHEMA_VERSION: Final = 1
#: The oldest version of the code that may write to tables of SCHEMA_VERSION.
OLDEST_WRITER_VERSION: Final = 1


@event.listens_for(metadata, "before_create")
def _prepare_create(_: MetaData, connection: Connection, **__: object) -> None:
    """Let `metadata.create_all` know what PostgreSQL is to be told."""
    enter_options_of_postgresql()


@event.listens_for(metadata, "after_create")
def _complete_tables(_: MetaData, connection: Connection, *, tables: Collection[Table], **__: object) -> None:
    """Let `metadata.create_all` make the view as well."""
    dialect: Any = connection.dialect
    if record_batches in tables:
        for statement in ddl.after_tables(dialect.name, getattr(dialect, "store_schema", None)):
            connection.execute(statement)


@event.listens_for(metadata, "before_drop")
def _prepare_drop(_: MetaData, connection: Connection, *, tables: Collection[Table], **__: object) -> None:
    """Let `metadata.drop_all` drop the view first."""
    dialect: Any = connection.dialect
    if record_batches in tables:
        for statement in ddl.before_tables_go(dialect.name, getattr(dialect, "store_schema", None)):
            connection.execute(statement)

"""The tables of a store as a move sees them: which are copied, by which key, and what a fresh store has in them.

A table that is in neither list makes a test fail: how a new one moves is said here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Column, ColumnElement, Table, func

from txnstore.db.ddl import Bytes, Int32, String
from txnstore.db.schema import (
    databases,
    deleted_numbers,
    deleted_partitions,
    finished_transactions,
    group_members,
    group_offsets,
    groups,
    maintenance_duties,
    offset_producers,
    outbox,
    outbox_sequencers,
    partition_heads,
    partition_storage,
    partitions,
    pending_group_offsets,
    pending_markers,
    producer_states,
    record_batches,
    relay_positions,
    sink_batches,
    sink_inputs,
    sink_positions,
    sink_runs,
    store_configs,
    stores,
    topic_configs,
    topics,
    transaction_branches,
    transaction_groups,
    transaction_log,
    transaction_partitions,
    transaction_writer_partitions,
    transaction_writers,
    transactions,
)


@dataclass(frozen=True)
class CopiedTable:
    """A table whose rows are copied as they are."""

    table: Table
    size_bytes: ColumnElement[int] | None = None
    """What a row takes, where that may be much; None: rows are small."""

    @property
    def name(self) -> str:
        """The table's name, without schema or prefix."""
        return str(self.table.name)

    @property
    def key(self) -> tuple[Column[Any], ...]:
        """The columns that name a row."""
        return tuple(self.table.primary_key.columns)

    @property
    def columns(self) -> tuple[Column[Any], ...]:
        """All that the database does not compute by itself."""
        return tuple(column for column in self.table.c if column.computed is None)

    @property
    def texts(self) -> tuple[str, ...]:
        """The names of the columns that hold text."""
        return tuple(column.name for column in self.columns if column.type is String)

    @property
    def short_integers(self) -> tuple[str, ...]:
        """The names of the columns whose numbers have 32 bits on PostgreSQL."""
        return tuple(column.name for column in self.columns if column.type is Int32)

    @property
    def own_key(self) -> str | None:
        """The name of the column whose values the database gives out and never gives out twice; None: there is none."""
        return next((column.name for column in self.columns if column.identity is not None), None)


def _length(*columns: Column[Any]) -> ColumnElement[int]:
    assert all(column.type in {Bytes, String} for column in columns)
    first, *others = (func.coalesce(func.length(column), 0) for column in columns)
    return sum(others, start=first)


COPIED: Final = (
    CopiedTable(store_configs),
    CopiedTable(databases),
    CopiedTable(topics),
    CopiedTable(topic_configs),
    CopiedTable(partitions),
    CopiedTable(deleted_numbers),
    CopiedTable(deleted_partitions),
    CopiedTable(partition_heads),
    CopiedTable(record_batches, record_batches.c.size_bytes),
    CopiedTable(producer_states),
    CopiedTable(finished_transactions),
    CopiedTable(partition_storage),
    CopiedTable(transactions),
    CopiedTable(transaction_partitions),
    CopiedTable(transaction_writers),
    CopiedTable(transaction_writer_partitions),
    CopiedTable(transaction_groups),
    # Empty: a store with branches in other databases is not moved. They are compared all the same.
    CopiedTable(transaction_branches),
    CopiedTable(transaction_log, _length(transaction_log.c.sent_offsets)),
    CopiedTable(pending_markers),
    CopiedTable(groups),
    CopiedTable(group_members, _length(group_members.c.subscription, group_members.c.assignment)),
    CopiedTable(group_offsets),
    CopiedTable(pending_group_offsets),
    CopiedTable(offset_producers),
    CopiedTable(outbox, _length(outbox.c.key, outbox.c.value, outbox.c.headers)),
    CopiedTable(outbox_sequencers),
    CopiedTable(relay_positions),
    CopiedTable(sink_batches),
    CopiedTable(sink_runs),
    CopiedTable(sink_inputs),
    CopiedTable(sink_positions),
    CopiedTable(maintenance_duties),
)
COPIED_BY_NAME: Final = {copied.name: copied for copied in COPIED}
#: Whose one row is the database's own: what it says of the store is taken over column by column.
OWN: Final = (stores,)
#: What goes from there to the other database's own row, beside the identity.
STORE_COLUMNS: Final = (stores.c.next_producer_id, stores.c.oldest_writer_version, stores.c.created_ms)
#: In which a store has a row from the start.
MADE_WITH_TABLES: Final = (databases, outbox_sequencers)
#: In which merely opening a store may leave something.
LEFT_BY_ANYBODY: Final = (maintenance_duties,)

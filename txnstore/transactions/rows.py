"""This file is the coordinator's rows: locked, read, written and journalled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Row, bindparam, delete, insert, select, update
from sqlalchemy.dialects.postgresql import insert as upsert

from txnstore.db.row_counts import must_hit
from txnstore.db.schema import (
    transaction_groups,
    transaction_log,
    transaction_partitions,
    transactions,
)
from txnstore.db.server_time import server_now_ms
from txnstore.transactions.metadata import FenceReason, TransactionMetadata, check_change
from txnstore.transactions.states import TransactionState

_THIS: Final = transactions.c.transactional_id == bindparam("of_transactional_id")

# Every request of a transactional id takes this lock first and holds it to the end of its database transaction. So
# requests of one id follow each other, and one that comes late finds the row as the one before it left it: Kafka's
# pending states have no place here. (SQLite: the whole database transaction holds the write lock.)
_LOCK: Final = select(transactions, server_now_ms().label("now_ms")).where(_THIS).with_for_update()
_TRY_LOCK: Final = select(transactions.c.transactional_id).where(_THIS).with_for_update(skip_locked=True)
_READ: Final = select(transactions, server_now_ms().label("now_ms")).where(_THIS)
_NOW: Final = select(server_now_ms())
# DO NOTHING: of two producers that use a new id at once, the second waits for the first and then locks its row.
_INSERT: Final = upsert(transactions).on_conflict_do_nothing(index_elements=[transactions.c.transactional_id])
_CHANGED: Final = (
    "producer_id",
    "previous_producer_id",
    "next_producer_id",
    "producer_epoch",
    "last_producer_epoch",
    "timeout_ms",
    "state",
    "start_ms",
    "last_update_ms",
    "deadline_ms",
    "transaction_number",
    "begin_epoch",
    "fence_reason",
    "fence_detail",
)
# Compare and set: the lock already keeps others away; that the row is as it was read is asserted all the same.
_UPDATE: Final = (
    update(transactions)
    .where(_THIS)
    .where(transactions.c.producer_epoch == bindparam("before_epoch"))
    .where(transactions.c.state == bindparam("before_state"))
    .values({name: bindparam(f"new_{name}") for name in _CHANGED})
)
_DELETE: Final = delete(transactions).where(_THIS)
_JOURNAL: Final = insert(transaction_log)
_PARTITIONS: Final = (
    select(transaction_partitions.c.partition_id)
    .where(transaction_partitions.c.transactional_id == bindparam("of_transactional_id"))
    .order_by(transaction_partitions.c.partition_id)
)
_GROUPS: Final = (
    select(transaction_groups.c.group_id)
    .where(transaction_groups.c.transactional_id == bindparam("of_transactional_id"))
    .order_by(transaction_groups.c.group_id)
)
_INSERT_PARTITIONS: Final = insert(transaction_partitions)
_INSERT_GROUPS: Final = insert(transaction_groups)
_DELETE_PARTITIONS: Final = delete(transaction_partitions).where(
    transaction_partitions.c.transactional_id == bindparam("of_transactional_id")
)
_DELETE_GROUPS: Final = delete(transaction_groups).where(
    transaction_groups.c.transactional_id == bindparam("of_transactional_id")
)
_DELETE_GROUP: Final = _DELETE_GROUPS.where(transaction_groups.c.group_id == bindparam("of_group_id"))


@dataclass(frozen=True, slots=True)
class LockedRow:
    """The coordinator's row of a transactional id, locked until the database transaction ends."""

    row: TransactionMetadata | None
    now_ms: int
    """The store's clock when the lock was asked for."""


def lock_row(connection: Connection, transactional_id: str) -> LockedRow:
    """Lock and return the row; None if nobody has used this transactional id, or it has expired."""
    return _found(connection, connection.execute(_LOCK, {"of_transactional_id": transactional_id}).one_or_none())


def try_lock(connection: Connection, transactional_id: str) -> bool:
    """Lock the row if nobody has its lock; False if somebody has, who is at work on it, or there is none."""
    return connection.execute(_TRY_LOCK, {"of_transactional_id": transactional_id}).one_or_none() is not None


def read_row(connection: Connection, transactional_id: str) -> LockedRow:
    """Return the row without locking it."""
    return _found(connection, connection.execute(_READ, {"of_transactional_id": transactional_id}).one_or_none())


def insert_row(connection: Connection, row: TransactionMetadata) -> None:
    """Insert the row of a new transactional id; if somebody was first, his row stays."""
    check_change(None, row)
    connection.execute(_INSERT, {"transactional_id": row.transactional_id, **_values(row)})


def save_row(
    connection: Connection, steps: Sequence[TransactionMetadata], *, before: TransactionMetadata, reason: str
) -> None:
    """Write the last of `steps` over `before`, and each step into the journal.

    Steps that follow each other within one database transaction become visible together, so only the last one is
    stored; but each must be a move that the table of states has, and the journal keeps them all.
    """
    previous = before
    for step in steps:
        check_change(previous, step)
        previous = step
    must_hit(
        connection,
        _UPDATE,
        {
            "of_transactional_id": before.transactional_id,
            "before_epoch": before.producer_epoch,
            "before_state": int(before.state),
            **{f"new_{name}": value for name, value in _values(steps[-1]).items()},
        },
    )
    journal(connection, steps, reason=reason)


def delete_row(connection: Connection, row: TransactionMetadata) -> None:
    """Delete the row of a transactional id that has expired; its lock must be held."""
    must_hit(connection, _DELETE, {"of_transactional_id": row.transactional_id})


def journal(connection: Connection, steps: Iterable[TransactionMetadata], *, reason: str) -> None:
    """Write each step into the journal, in order."""
    connection.execute(
        _JOURNAL,
        [
            {
                "transactional_id": step.transactional_id,
                "transaction_number": step.transaction_number,
                "producer_id": step.producer_id,
                "producer_epoch": step.producer_epoch,
                "state": int(step.state),
                "timeout_ms": step.timeout_ms,
                "start_ms": step.start_ms,
                "update_ms": step.last_update_ms,
                "reason": reason,
            }
            for step in steps
        ],
    )


def partitions_of(connection: Connection, transactional_id: str) -> list[int]:
    """Return the partitions of the open or decided transaction, sorted."""
    return list(connection.execute(_PARTITIONS, {"of_transactional_id": transactional_id}).scalars())


def groups_of(connection: Connection, transactional_id: str) -> list[str]:
    """Return the groups whose offsets the open or decided transaction holds, sorted."""
    return list(connection.execute(_GROUPS, {"of_transactional_id": transactional_id}).scalars())


def add_partitions(connection: Connection, transactional_id: str, partition_ids: Iterable[int]) -> None:
    """Enter partitions into the transaction; they must not be in it yet."""
    entries = [
        {"transactional_id": transactional_id, "partition_id": partition_id} for partition_id in sorted(partition_ids)
    ]
    if entries:
        connection.execute(_INSERT_PARTITIONS, entries)


def add_groups(connection: Connection, transactional_id: str, group_ids: Iterable[str]) -> None:
    """Enter groups into the transaction; they must not be in it yet."""
    entries = [{"transactional_id": transactional_id, "group_id": group_id} for group_id in sorted(group_ids)]
    if entries:
        connection.execute(_INSERT_GROUPS, entries)


def forget_group(connection: Connection, transactional_id: str, group_id: str) -> None:
    """Remove a group whose offsets are finished from a decided transaction."""
    connection.execute(_DELETE_GROUP, {"of_transactional_id": transactional_id, "of_group_id": group_id})


def forget_participants(connection: Connection, transactional_id: str) -> None:
    """Remove the partitions and groups of a transaction that is complete."""
    this = {"of_transactional_id": transactional_id}
    connection.execute(_DELETE_PARTITIONS, this)
    connection.execute(_DELETE_GROUPS, this)


def metadata_from_row(row: Row[Any]) -> TransactionMetadata:
    """Return the values of a row of the table."""
    return TransactionMetadata(
        transactional_id=row.transactional_id,
        producer_id=row.producer_id,
        producer_epoch=row.producer_epoch,
        timeout_ms=row.timeout_ms,
        state=TransactionState(row.state),
        last_update_ms=row.last_update_ms,
        previous_producer_id=row.previous_producer_id,
        next_producer_id=row.next_producer_id,
        last_producer_epoch=row.last_producer_epoch,
        start_ms=row.start_ms,
        transaction_number=row.transaction_number,
        begin_epoch=row.begin_epoch,
        fence_reason=None if row.fence_reason is None else FenceReason(row.fence_reason),
        fence_detail=row.fence_detail,
    )


def _found(connection: Connection, row: Row[Any] | None) -> LockedRow:
    if row is None:
        return LockedRow(None, connection.execute(_NOW).scalar_one())
    return LockedRow(metadata_from_row(row), row.now_ms)


def _values(row: TransactionMetadata) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in _CHANGED}
    values["state"] = int(row.state)
    values["fence_reason"] = None if row.fence_reason is None else str(row.fence_reason)
    return values

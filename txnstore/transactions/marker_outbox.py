"""This file is the markers that are decided but not yet written: queued with the decision, struck off one by one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sqlalchemy import Connection, bindparam, delete, insert, select

from txnstore.db.schema import marker_outbox
from txnstore.log.markers import Marker
from txnstore.model import ControlType
from txnstore.transactions.metadata import TransactionMetadata
from txnstore.transactions.states import TransactionState

#: There is one coordinator per database and no election: its epoch never changes. Kept for fidelity.
COORDINATOR_EPOCH: Final = 0

_OF_TRANSACTION: Final = marker_outbox.c.transactional_id == bindparam("of_transactional_id")

_INSERT: Final = insert(marker_outbox)
_PARTITIONS: Final = select(marker_outbox.c.partition_id).where(_OF_TRANSACTION).order_by(marker_outbox.c.partition_id)
_CLEAR: Final = delete(marker_outbox).where(_OF_TRANSACTION)
_DELETE: Final = _CLEAR.where(marker_outbox.c.partition_id == bindparam("of_partition_id"))


def marker_of(decided: TransactionMetadata, partition_id: int) -> Marker:
    """Return the marker that a decided transaction puts into one of its partitions."""
    return Marker(partition_id, decided.identity, _outcome(decided), COORDINATOR_EPOCH)


def queue(connection: Connection, decided: TransactionMetadata, partition_ids: Iterable[int]) -> None:
    """Queue the markers of a decided transaction, within the database transaction that holds the decision."""
    queued = [
        {
            "transactional_id": decided.transactional_id,
            "partition_id": partition_id,
            "producer_id": decided.producer_id,
            "producer_epoch": decided.producer_epoch,
            "outcome": int(_outcome(decided)),
        }
        for partition_id in sorted(partition_ids)
    ]
    if queued:
        connection.execute(_INSERT, queued)


def partitions_of(connection: Connection, transactional_id: str) -> list[int]:
    """Return the partitions that still miss their marker, sorted."""
    return list(connection.execute(_PARTITIONS, {"of_transactional_id": transactional_id}).scalars())


def strike_off(connection: Connection, transactional_id: str, partition_id: int) -> None:
    """Remove the marker that was written in this database transaction."""
    connection.execute(_DELETE, {"of_transactional_id": transactional_id, "of_partition_id": partition_id})


def clear(connection: Connection, transactional_id: str) -> None:
    """Remove all markers of a transaction, which were written in this database transaction."""
    connection.execute(_CLEAR, {"of_transactional_id": transactional_id})


def _outcome(decided: TransactionMetadata) -> ControlType:
    return ControlType.COMMIT if decided.state is TransactionState.PREPARE_COMMIT else ControlType.ABORT

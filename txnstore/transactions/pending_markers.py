"""This file is the markers that are decided but not yet written: queued with the decision, struck off one by one."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from sqlalchemy import Connection, bindparam, delete, insert, select

from txnstore.db.portions import chunks
from txnstore.db.schema import pending_markers
from txnstore.log.markers import Marker
from txnstore.model import ControlType, ProducerIdentity
from txnstore.transactions.metadata import TransactionMetadata
from txnstore.transactions.states import TransactionState

#: There is one coordinator per database and no election: its epoch never changes. Kept for fidelity.
COORDINATOR_EPOCH: Final = 0

_OF_TRANSACTION: Final = pending_markers.c.transactional_id == bindparam("of_transactional_id")

_INSERT: Final = insert(pending_markers)
_QUEUED: Final = (
    select(pending_markers)
    .where(_OF_TRANSACTION)
    .order_by(pending_markers.c.partition_id, pending_markers.c.producer_id)
)
_CLEAR: Final = delete(pending_markers).where(_OF_TRANSACTION)
_DELETE: Final = _CLEAR.where(pending_markers.c.partition_id.in_(bindparam("partition_ids", expanding=True)))


def marker_of(decided: TransactionMetadata, partition_id: int) -> Marker:
    """Return the marker that ends the records of a decided transaction's own producer in a partition."""
    return Marker(partition_id, decided.identity, outcome_of(decided), COORDINATOR_EPOCH)


def marker_of_writer(decided: TransactionMetadata, partition_id: int, writer_id: int, *, counts: bool) -> Marker:
    """Return the marker that ends the records of a further writer; an abort also if the writer does not count."""
    outcome = outcome_of(decided) if counts else ControlType.ABORT
    return Marker(partition_id, ProducerIdentity(writer_id, decided.producer_epoch), outcome, COORDINATOR_EPOCH)


def queue(connection: Connection, transactional_id: str, markers: Iterable[Marker]) -> None:
    """Queue the markers of a decided transaction, within the database transaction that holds the decision."""
    entries = [
        {
            "transactional_id": transactional_id,
            "partition_id": marker.partition_id,
            "producer_id": marker.producer.producer_id,
            "producer_epoch": marker.producer.epoch,
            "outcome": int(marker.control_type),
        }
        for marker in markers
    ]
    if entries:
        connection.execute(_INSERT, entries)


def queued(connection: Connection, transactional_id: str) -> list[Marker]:
    """Return the markers that are still missing from their partitions, by partition."""
    return [
        Marker(
            row.partition_id,
            ProducerIdentity(row.producer_id, row.producer_epoch),
            ControlType(row.outcome),
            COORDINATOR_EPOCH,
        )
        for row in connection.execute(_QUEUED, {"of_transactional_id": transactional_id})
    ]


def strike_off(connection: Connection, transactional_id: str, partition_ids: Collection[int]) -> None:
    """Remove the markers of partitions, which were written in this database transaction or in their own databases."""
    for some in chunks(sorted(partition_ids)):
        connection.execute(_DELETE, {"of_transactional_id": transactional_id, "partition_ids": some})


def clear(connection: Connection, transactional_id: str) -> None:
    """Remove all markers of a transaction, which were written in this database transaction."""
    connection.execute(_CLEAR, {"of_transactional_id": transactional_id})


def outcome_of(decided: TransactionMetadata) -> ControlType:
    """Return how a decided transaction ends."""
    return ControlType.COMMIT if decided.state is TransactionState.PREPARE_COMMIT else ControlType.ABORT

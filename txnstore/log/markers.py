"""The markers that end transactions in partitions, and the index of how each one ended.

A marker's epoch is above that of the records it ends (KIP-890, KIP-1228): whatever their producer sends late is old
by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, bindparam, select

from txnstore.db.schema import finished_transactions
from txnstore.errors import InvalidProducerEpoch, TransactionCoordinatorFenced
from txnstore.log.codec import encode_control
from txnstore.log.locked_partitions import LockedPartitions
from txnstore.log.producers import ProducerKey
from txnstore.log.sequences import ProducerInPartition
from txnstore.model import ControlType, ProducerIdentity


@dataclass(frozen=True, slots=True)
class Marker:
    """The end of one producer's transaction in one partition."""

    partition_id: int
    producer: ProducerIdentity
    """The producer, with the marker's own epoch."""

    control_type: ControlType
    coordinator_epoch: int = 0

    @property
    def key(self) -> ProducerKey:
        """The producer in the partition."""
        return (self.partition_id, self.producer.producer_id)


_HISTORY: Final = (
    select(finished_transactions)
    .where(finished_transactions.c.partition_id == bindparam("of_partition_id"))
    .where(finished_transactions.c.marker_offset >= bindparam("from_offset"))
    .order_by(finished_transactions.c.marker_offset)
    .limit(bindparam("count_max"))
)
#: How many rows of the index are read in one go.
PAGE_ROWS: Final = 1_000


def write_markers(connection: Connection, markers: Sequence[Marker]) -> None:
    """Write markers; each transaction is then over in its partition, in the order given.

    A marker that is there already is not written again (KAFKA-19999).

    Raises:
        UnknownTopicOrPartition: a partition is not in this database.
        InvalidProducerEpoch: the partition has seen a newer epoch of the producer.
        TransactionCoordinatorFenced: the partition has a marker of a newer coordinator.
    """
    if not markers:
        return
    work = LockedPartitions.lock(
        connection,
        (marker.partition_id for marker in markers),
        (marker.key for marker in markers),
        with_open=True,
    )
    place_markers(work, markers)
    work.save()


def place_markers(work: LockedPartitions, markers: Iterable[Marker]) -> None:
    """Place those of the markers that are not there yet; nothing is written before `work.save`."""
    for marker in markers:
        state = work.producer_state(marker.key)
        if state is not None and _is_there_already(marker, state):
            continue
        batch = encode_control(
            marker.control_type,
            coordinator_epoch=marker.coordinator_epoch,
            producer=marker.producer,
            timestamp_ms=work.now_ms,
        )
        work.finish(marker.partition_id, batch)


def finished_since(connection: Connection, partition_id: int, from_offset: int) -> list[Any]:
    """Return a page of the index: transactions that ended at `from_offset` or later, in the order of their ends."""
    page = {"of_partition_id": partition_id, "from_offset": from_offset, "count_max": PAGE_ROWS}
    return list(connection.execute(_HISTORY, page))


def _is_there_already(marker: Marker, state: ProducerInPartition) -> bool:
    """Return whether a repetition brings the marker; refuse one that comes from the past."""
    if marker.coordinator_epoch < state.coordinator_epoch:
        raise TransactionCoordinatorFenced(
            f"a marker of coordinator epoch {marker.coordinator_epoch} came after one of {state.coordinator_epoch}"
        )
    if marker.producer.epoch > state.epoch:
        return False
    if marker.producer.epoch == state.epoch and state.transaction_first_offset is None:
        return True
    raise InvalidProducerEpoch(
        f"the marker of producer {marker.producer} is not newer than epoch {state.epoch} of its records"
    )

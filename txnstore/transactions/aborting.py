"""This file is what an administrator does about a transaction that holds up the readers of a partition.

Kafka's tool writes an ABORT marker into the one partition, whatever the coordinator knows: that is meant for
transactions that hang, and tears apart one that does not.  Here a transaction that the coordinator knows is aborted
as a whole, in all its partitions and groups; only what it does not know gets a marker of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from sqlalchemy import Connection, bindparam, select, union_all

from txnstore.db.cluster.cluster import Home
from txnstore.db.schema import transaction_writers, transactions
from txnstore.db.store import Store
from txnstore.errors import (
    InvalidProducerEpoch,
    InvalidTransactionState,
    TransactionCoordinatorFenced,
)
from txnstore.log.heads import lock_heads
from txnstore.log.markers import Marker, write_markers
from txnstore.log.producers import read_producer_states
from txnstore.model import ControlType, ProducerIdentity
from txnstore.transactions import rows, writer_rows
from txnstore.transactions.completion import complete_if_possible
from txnstore.transactions.locked import LockedTransaction
from txnstore.transactions.metadata import FenceReason
from txnstore.transactions.states import TransactionState

_OWNER: Final = union_all(
    select(transactions.c.transactional_id).where(transactions.c.producer_id == bindparam("of_producer_id")),
    select(transaction_writers.c.transactional_id).where(
        transaction_writers.c.writer_producer_id == bindparam("of_producer_id")
    ),
)


@dataclass(frozen=True, slots=True)
class OpenInPartition:
    """A transaction as a partition knows it: DescribeProducers shows these numbers."""

    partition_id: int
    producer: ProducerIdentity
    """The producer and the epoch of its records."""

    coordinator_epoch: int = 0


def abort_open_transaction(store: Store, target: OpenInPartition, *, retry_timeout_ms: int | None = None) -> None:
    """Abort the transaction that is open in a partition; its producer learns of it with its next request.

    Raises:
        UnknownTopicOrPartition: the partition is not in this database.
        InvalidTransactionState: the producer has no transaction open there, or it is decided to commit.
        InvalidProducerEpoch: the open transaction is of another epoch.
        TransactionCoordinatorFenced: the partition has a marker of a newer coordinator.
        TxnStoreError: the database that coordinates the transaction cannot be reached or refuses.
    """
    cluster = store.cluster
    coordinator = store if cluster is None else cluster.coordinator_of_producer(target.producer.producer_id)
    if coordinator is store:
        owner = store.write(
            # Its home as it is then: it may hear of other databases in between.
            lambda connection: _abort(target, store.home, connection),
            wakes_readers=True,
            retry_timeout_ms=retry_timeout_ms,
        )
    else:
        owner = _abort_elsewhere(store, coordinator, target, retry_timeout_ms)
    if owner is not None:
        complete_if_possible(coordinator, owner)


def _abort_elsewhere(
    store: Store, coordinator: Store, target: OpenInPartition, retry_timeout_ms: int | None
) -> str | None:
    """Do the same where the partition lives in another database than the transaction; return the transactional id."""
    store.read(lambda connection: _check_open(connection, target), retry_timeout_ms=retry_timeout_ms)
    work = partial(_abort, target, coordinator.home)
    owner = coordinator.write(work, wakes_readers=True, retry_timeout_ms=retry_timeout_ms)
    if owner is None:
        store.write(
            lambda connection: _end_in_partition(connection, target),
            wakes_readers=True,
            retry_timeout_ms=retry_timeout_ms,
        )
    return owner


def _abort(target: OpenInPartition, home: Home | None, connection: Connection) -> str | None:
    """Abort the transaction at its coordinator, if it has one; return its transactional id.

    A partition of this database without one gets its marker here.
    """
    is_here = home is None or not home.partitions_elsewhere(connection, [target.partition_id])
    of_producer = {"of_producer_id": target.producer.producer_id}
    owner = connection.execute(_OWNER, of_producer).scalars().first()
    work = None if owner is None else LockedTransaction.lock(connection, owner, home)
    row = None if work is None else work.row

    def end_here() -> None:
        if is_here:
            _end_in_partition(connection, target)

    if work is None or row is None or row.begin_epoch != target.producer.epoch:
        end_here()
        return None
    participants = writer_rows.participants_of(connection, row.transactional_id)
    is_own = row.producer_id == target.producer.producer_id
    partition_ids = participants.partition_ids if is_own else participants.writers.get(target.producer.producer_id, ())
    is_listed = target.partition_id in partition_ids
    if not is_own and not is_listed:
        # Damage: of a writer, nobody but this knows.
        end_here()
        return None
    # The lock of the transaction's row keeps its producer away; the heads are locked later, all in their order.
    if is_here:
        _check_open(connection, target)
    if row.state is TransactionState.ONGOING:
        if not is_listed:
            # Damage: it is aborted here as everywhere else.
            rows.add_partitions(connection, row.transactional_id, [target.partition_id])
        work.fence_and_abort(FenceReason.ADMIN, "by an administrator")
    elif not is_listed:
        end_here()
        return None
    elif row.state is TransactionState.PREPARE_COMMIT:
        raise InvalidTransactionState(
            f"the transaction of {row.transactional_id[:80]!r} is decided to commit; recovery will complete it"
        )
    else:
        work.finish()
    work.save("administrator")
    return row.transactional_id


def _end_in_partition(connection: Connection, target: OpenInPartition) -> None:
    """Write the marker that no coordinator will write."""
    lock_heads(connection, [target.partition_id])
    _check_open(connection, target)
    # Above the epoch of the records, as every marker.
    marker = ProducerIdentity(target.producer.producer_id, target.producer.epoch + 1)
    write_markers(connection, [Marker(target.partition_id, marker, ControlType.ABORT, target.coordinator_epoch)])


def _check_open(connection: Connection, target: OpenInPartition) -> None:
    key = (target.partition_id, target.producer.producer_id)
    state = read_producer_states(connection, [key]).get(key)
    if state is None or state.transaction_first_offset is None:
        raise InvalidTransactionState(
            f"producer {target.producer.producer_id} has no open transaction in this partition; describe_producers"
            " shows who has"
        )
    if state.epoch != target.producer.epoch:
        raise InvalidProducerEpoch(
            f"the open transaction of producer {state.producer_id} is of epoch {state.epoch}, not"
            f" {target.producer.epoch}"
        )
    if target.coordinator_epoch < state.coordinator_epoch:
        raise TransactionCoordinatorFenced(
            f"the partition has a marker of coordinator epoch {state.coordinator_epoch}, newer than"
            f" {target.coordinator_epoch}"
        )

"""This file is what hangs in a cluster of several databases: a partition's home asks the coordinators elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from sqlalchemy import Connection, bindparam, select, union_all

from txnstore.db.cluster.cluster import Cluster
from txnstore.db.cluster.membership import coordinator_of_producer
from txnstore.db.schema import (
    transaction_partitions,
    transaction_writer_partitions,
    transactions,
)
from txnstore.errors import MissingMember, StoreUnavailable
from txnstore.log.partition_names import names_of_partitions
from txnstore.model import TopicPartition
from txnstore.transactions import listing
from txnstore.transactions.listing import RUNNING, HangingTransaction

_STATES: Final = sorted(int(state) for state in RUNNING)
_LISTED: Final = union_all(
    select(transactions.c.producer_id, transaction_partitions.c.partition_id)
    .join(transaction_partitions, transaction_partitions.c.transactional_id == transactions.c.transactional_id)
    .where(transactions.c.state.in_(_STATES))
    .where(transactions.c.producer_id.in_(bindparam("producer_ids", expanding=True))),
    select(transaction_writer_partitions.c.writer_producer_id, transaction_writer_partitions.c.partition_id)
    .join(transactions, transactions.c.transactional_id == transaction_writer_partitions.c.transactional_id)
    .where(transactions.c.state.in_(_STATES))
    .where(transaction_writer_partitions.c.writer_producer_id.in_(bindparam("producer_ids", expanding=True))),
)


def hanging_transactions(
    cluster: Cluster, max_timeout_ms: int, partition_ids: Collection[int] | None = None
) -> list[HangingTransaction]:
    """Return what hangs, in these partitions or in all, wherever they live; see `listing.hanging_transactions`.

    Of a database that cannot be reached nothing is said, nor of what only it could know to be in order.
    """
    found: list[HangingTransaction] = []
    suspected = cluster.read_all(
        lambda connection: listing.hanging_transactions(connection, max_timeout_ms, partition_ids)
    )
    for store, suspects in suspected:
        away = [one for one in suspects if coordinator_of_producer(one.producer_id) != store.database_id]
        explained = _explained(cluster, away)
        found += [one for one in suspects if one not in away or (one.producer_id, one.partition) not in explained]
    return sorted(found, key=lambda one: (one.partition, one.start_offset))


def _explained(cluster: Cluster, suspects: Iterable[HangingTransaction]) -> set[tuple[int, TopicPartition]]:
    """Return producers with the partitions that their coordinators will end, or may, for all that is known."""
    by_coordinator: dict[int, list[HangingTransaction]] = {}
    for one in suspects:
        by_coordinator.setdefault(coordinator_of_producer(one.producer_id), []).append(one)
    explained: set[tuple[int, TopicPartition]] = set()
    for database_id, those in by_coordinator.items():
        producer_ids = sorted({one.producer_id for one in those})

        def read(connection: Connection, producer_ids: list[int] = producer_ids) -> set[tuple[int, TopicPartition]]:
            rows = connection.execute(_LISTED, {"producer_ids": producer_ids}).all()
            names = names_of_partitions(connection, (row.partition_id for row in rows))
            return {(row.producer_id, names[row.partition_id]) for row in rows if row.partition_id in names}

        try:
            explained |= cluster.own(database_id).read(read)
        except (StoreUnavailable, MissingMember):
            explained |= {(one.producer_id, one.partition) for one in those}
    return explained

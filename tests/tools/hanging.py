"""Transactions that nobody ends, planted by hundreds: a client for each would take minutes."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from sqlalchemy import Connection

from txnstore.db.cluster.cluster import Cluster
from txnstore.db.store import Store, chunks
from txnstore.log.codec import encode
from txnstore.log.locked_partitions import LockedPartitions
from txnstore.log.partition_rows import allocate_producer_id
from txnstore.model import ProducerIdentity, Record
from txnstore.transactions import protocol, rows
from txnstore.transactions.initialization import InitRequest, new_transactional_id

#: How many are planted by one database transaction.
_AT_ONCE = 500


def plant(
    coordinator: Store, partition_ids: Sequence[int], count: int, *, timeout_ms: int, cluster: Cluster | None = None
) -> list[str]:
    """Let so many producers each write a record to the partitions, and do nothing more; return their transactional ids.

    The rows are those that clients leave, wherever the partitions live.
    """
    names = list(itertools.islice(_names(coordinator, cluster), count))
    for some in chunks(names, _AT_ONCE):
        producers = coordinator.write(partial(_begin, some, partition_ids, timeout_ms))
        if cluster is None:
            coordinator.write(partial(_write, producers, partition_ids))
            continue
        for database_id, own in cluster.by_leader(partition_ids).items():
            cluster.own(database_id).write(partial(_write, producers, own))
    return names


def _names(coordinator: Store, cluster: Cluster | None) -> Iterator[str]:
    prefix = f"hanging-{uuid.uuid4().hex[:8]}"
    for number in itertools.count():
        name = f"{prefix}-{number:06}"
        if cluster is None or cluster.coordinator_id_of(name) == coordinator.database_id:
            yield name


def _begin(
    names: Sequence[str], partition_ids: Sequence[int], timeout_ms: int, connection: Connection
) -> list[ProducerIdentity]:
    now_ms = rows.read_now_ms(connection)
    changes, producers = [], []
    for name in names:
        request = InitRequest(name, timeout_ms, timeout_ms)
        new = new_transactional_id(request, allocate_producer_id(connection), now_ms)
        rows.insert_row(connection, new)
        started = replace(new, producer_epoch=0)
        begun = protocol.add_to_transaction(started, started.identity, now_ms=now_ms, holds_all=False)
        changes.append(rows.RowChange(new, [started, begun]))
        rows.add_partitions(connection, name, partition_ids)
        producers.append(started.identity)
    rows.save_each(connection, changes, reason="planted")
    return producers


def _write(producers: Sequence[ProducerIdentity], partition_ids: Sequence[int], connection: Connection) -> None:
    keys = [(partition_id, producer.producer_id) for partition_id in partition_ids for producer in producers]
    work = LockedPartitions.lock(connection, keys)
    for producer in producers:
        batch = encode([Record(b"hanging")], producer=producer, base_sequence=0, is_transactional=True)
        for partition_id in partition_ids:
            work.place(partition_id, batch)
    work.save()

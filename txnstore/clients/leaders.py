"""This file is where things live, for calls that are given the controller: the store of a partition, a group and so on.

A cluster of one has one store, and no question is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection

from txnstore.db.cluster.cluster import repaired
from txnstore.db.store import Store
from txnstore.log.topics import get_topic

Result = TypeVar("Result")

#: Reads of partitions, by id, what the work finds of those that live in one database.
Reads = Callable[[Collection[int], Callable[[Connection, list[int]], dict[int, Any]]], dict[int, Any]]


def all_stores(controller: Store) -> list[Store]:
    """Return the stores that can be reached now, the controller first."""
    return [controller] if controller.cluster is None else list(controller.cluster.stores())


def leader_of_partition(controller: Store, partition_id: int) -> Store:
    """Return the store that holds the partition.

    Raises:
        TxnStoreError: it is not known, or cannot be reached.
    """
    return controller if controller.cluster is None else controller.cluster.store_of_partition(partition_id)


def at_partition(controller: Store, partition_id: int, call: Callable[[Store], Result]) -> Result:
    """Make a call on the store that holds the partition; again if that had not heard of it.

    Raises:
        TxnStoreError: see `leader_of_partition`, and what the call raises.
    """
    cluster = controller.cluster
    if cluster is None:
        return call(controller)
    return repaired(cluster, cluster.leader_of_partition(partition_id), call)


def at_leader_of(controller: Store, topic: str, number: int, call: Callable[[Store], Result]) -> Result:
    """Make a call on the store that holds the partition of this number; the topic is known there too.

    Raises:
        UnknownTopicOrPartition: there is no such topic or partition.
        TxnStoreError: see `leader_of_partition`, and what the call raises.
    """
    if controller.cluster is None:
        return call(controller)
    partition_id = controller.read(lambda connection: get_topic(connection, topic).partition_id(number))
    return at_partition(controller, partition_id, call)


def at_coordinator(controller: Store, name: str, call: Callable[[Store], Result]) -> Result:
    """Make a call on the store that coordinates the transactional id or group: see `Cluster.at_coordinator`."""
    return call(controller) if controller.cluster is None else controller.cluster.at_coordinator(name, call)


def publish(controller: Store) -> None:
    """Let the other databases know of a change of topics or settings; one that is away hears of it later."""
    if controller.cluster is not None:
        controller.cluster.publish()


def reads_at_leaders(store: Store, connection: Connection) -> Reads:
    """Return what reads of partitions where they live, for a call that reads `store` on `connection`.

    In a cluster of one, and of what lives in `store`, it is the same snapshot; elsewhere one of its own.
    """
    cluster = store.cluster

    def read(partition_ids: Collection[int], work: Callable[[Connection, list[int]], dict[int, Any]]) -> dict[int, Any]:
        if not partition_ids:
            return {}
        if cluster is None:
            return work(connection, list(partition_ids))
        found: dict[int, Any] = {}
        for home, own in cluster.by_leader(partition_ids).items():
            if home == store.database_id:
                found |= work(connection, own)
            else:
                found |= repaired(cluster, home, partial(_read, partial(_with_ids, work, own)))
        return found

    return read


def _with_ids(
    work: Callable[[Connection, list[int]], dict[int, Any]], partition_ids: list[int], connection: Connection
) -> dict[int, Any]:
    return work(connection, partition_ids)


def _read(work: Callable[[Connection], dict[int, Any]], store: Store) -> dict[int, Any]:
    return store.read(work)

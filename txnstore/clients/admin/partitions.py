"""This file is how the admin client's partitions are found in the store, and the store's shown to its users."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Connection

from txnstore import model
from txnstore.clients.admin.calls import Call
from txnstore.clients.brokers import at_partition
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.db.store import Store
from txnstore.log.topics import get_topic

Answer = TypeVar("Answer")


def partition_id_of(connection: Connection, partition: TopicPartition) -> int:
    """Return the id of the partition.

    Raises:
        UnknownTopicOrPartition: there is no such topic or partition.
    """
    return get_topic(connection, partition.topic).partition_id(partition.partition)


def at_leader_of(
    store: Store, call: Call[Any, Any], partition: TopicPartition, work: Callable[[Store], Answer]
) -> Answer:
    """Do `work` on the store where the partition lives; the topics are known there too.

    Raises:
        UnknownTopicOrPartition: there is no such topic or partition.
        TxnStoreError: that store cannot be reached, or what the work raises.
    """
    if store.cluster is None:
        return work(store)
    partition_id = store.read(
        lambda connection: partition_id_of(connection, partition), retry_timeout_ms=call.retry_ms(store)
    )
    return at_partition(store, partition_id, work)


def public_partition(partition: model.TopicPartition) -> TopicPartition:
    """Return the partition as users see it."""
    return TopicPartition(partition.topic, partition.partition)

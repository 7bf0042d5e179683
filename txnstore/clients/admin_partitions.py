"""This file is how the admin client's partitions are found in the store, and the store's shown to its users."""

from __future__ import annotations

from sqlalchemy import Connection

from txnstore import model
from txnstore.clients.topic_partition import TopicPartition
from txnstore.log.topics import get_topic


def partition_id_of(connection: Connection, partition: TopicPartition) -> int:
    """Return the id of the partition.

    Raises:
        UnknownTopicOrPartition: there is no such topic or partition.
    """
    return get_topic(connection, partition.topic).partition_id(partition.partition)


def public_partition(partition: model.TopicPartition) -> TopicPartition:
    """Return the partition as users see it."""
    return TopicPartition(partition.topic, partition.partition)

"""This file is how the admin client deletes records from the beginning of partitions."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection

from txnstore.clients.admin.calls import Call
from txnstore.clients.brokers import at_partition
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.db.store import Store
from txnstore.errors import PolicyViolation
from txnstore.log.deleting import delete_records
from txnstore.log.topics import get_topic

_COMPACTED_ONLY: Final = "compact"


class DeletedRecords:
    """What `delete_records()` has left: the first offset of the partition that can still be read."""

    def __init__(self, low_watermark: int) -> None:
        self.low_watermark = low_watermark


def check_offsets(partitions: object) -> tuple[list[TopicPartition], bool]:
    """Return the partitions, and whether one of them was given twice.

    Raises:
        TypeError: it is no list of partitions.
        ValueError: a partition has a negative number.
    """
    if not isinstance(partitions, list):
        raise TypeError(f"Expected Request to be a list, got '{type(partitions).__name__}'")
    for partition in partitions:
        if not isinstance(partition, TopicPartition):
            raise TypeError(
                f"Element of the request list must be of type 'TopicPartition' got '{type(partition).__name__}'"
            )
        if partition.partition < 0:
            raise ValueError("'partition' cannot be negative")
    return partitions, len(set(partitions)) < len(partitions)


def delete(store: Store, call: Call[TopicPartition, DeletedRecords], partition: TopicPartition) -> DeletedRecords:
    """Delete the records below the partition's offset."""

    def find(connection: Connection) -> int:
        topic = get_topic(connection, partition.topic)
        partition_id = topic.partition_id(partition.partition)
        if topic.settings["cleanup.policy"] == _COMPACTED_ONLY:
            raise PolicyViolation(
                f"topic {topic.name} is compacted only; let its cleanup.policy have `delete`, then delete its records"
            )
        return partition_id

    partition_id = store.read(find, retry_timeout_ms=call.retry_ms(store))
    return at_partition(
        store,
        partition_id,
        lambda home: DeletedRecords(
            delete_records(home, partition_id, partition.offset, retry_timeout_ms=call.retry_ms(home))
        ),
    )

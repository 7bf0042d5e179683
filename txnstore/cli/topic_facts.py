"""This file is what is known of topics and their partitions, for the commands that list and describe them."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, bindparam, func, select

from txnstore.clients.brokers import reads_at_leaders
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.schema import partition_heads, partitions, producer_states, record_batches, topics
from txnstore.log.bounds import read_bounds
from txnstore.log.topics import Topic, find_topics, get_topic, list_topics

_OFFSETS: Final = (
    select(
        partitions.c.topic_id,
        func.sum(partition_heads.c.next_offset - partition_heads.c.log_start_offset),
    )
    .join(partition_heads, partition_heads.c.partition_id == partitions.c.partition_id)
    .group_by(partitions.c.topic_id)
)
_OPEN: Final = (
    select(producer_states.c.partition_id, func.count())
    .where(producer_states.c.transaction_first_offset >= 0)
    .group_by(producer_states.c.partition_id)
)
_CREATED: Final = select(topics.c.created_ms).where(topics.c.topic_id == bindparam("of_topic_id"))
_SIZES: Final = (
    select(
        record_batches.c.partition_id,
        func.count(),
        func.sum(record_batches.c.size_bytes),
        func.max(record_batches.c.max_timestamp_ms),
    )
    .where(record_batches.c.partition_id.in_(bindparam("partition_ids", expanding=True)))
    .group_by(record_batches.c.partition_id)
)


def list_topic_rows(cluster: Cluster) -> list[dict[str, Any]]:
    """Return a row for each topic, by name; what lives in databases that cannot be reached is not counted."""
    found, offsets, open_in = cluster.controller.read(lambda connection: (_topics(connection), *_counts(connection)))
    _, *others = cluster.stores()
    for store in others:
        more_offsets, more_open_in = store.read(_counts)
        open_in |= more_open_in
        for topic_id, count in more_offsets.items():
            offsets[topic_id] = offsets.get(topic_id, 0) + count
    return [
        {
            "topic": topic.name,
            "partitions": len(topic.partition_ids),
            "offsets": offsets.get(topic.topic_id, 0),
            "open_transactions": sum(open_in.get(partition_id, 0) for partition_id in topic.partition_ids),
            "config": dict(sorted(topic.config.items())),
        }
        for topic in found
    ]


def _topics(connection: Connection) -> list[Topic]:
    return find_topics(connection, list_topics(connection))


def _counts(connection: Connection) -> tuple[dict[int, int], dict[int, int]]:
    offsets = {topic_id: int(count) for topic_id, count in connection.execute(_OFFSETS)}
    return offsets, _open_transactions(connection)


def _open_transactions(connection: Connection) -> dict[int, int]:
    return {row[0]: int(row[1]) for row in connection.execute(_OPEN)}


def describe_topic(cluster: Cluster, connection: Connection, name: str) -> dict[str, Any]:
    """Return everything about one topic, which `connection` to the controller knows.

    Raises:
        UnknownTopicOrPartition: there is none of this name.
        TxnStoreError: a database that holds a partition cannot be reached.
    """
    topic = get_topic(connection, name)
    read = reads_at_leaders(cluster, cluster.controller, connection)
    bounds = read(topic.partition_ids, read_bounds)
    open_in = read(topic.partition_ids, lambda opened, _: _open_transactions(opened))
    sizes = read(topic.partition_ids, _sizes)
    described = []
    for number, partition_id in enumerate(topic.partition_ids):
        of = bounds[partition_id]
        count, size_bytes, last_ms = sizes.get(partition_id, (0, 0, None))
        described.append(
            {
                "partition": number,
                "log_start_offset": of.log_start_offset,
                "last_stable_offset": of.last_stable_offset,
                "high_watermark": of.high_watermark,
                "open_transactions": open_in.get(partition_id, 0),
                "batches": count,
                "size_bytes": size_bytes,
                "last_timestamp_ms": last_ms,
                **({} if cluster.is_alone else {"database": cluster.label_of(topic.leaders[number])}),
            }
        )
    return {
        "topic": topic.name,
        "topic_uuid": topic.topic_uuid,
        "created_ms": connection.execute(_CREATED, {"of_topic_id": topic.topic_id}).scalar_one(),
        "config": dict(sorted(topic.config.items())),
        "partitions": described,
    }


def _sizes(connection: Connection, partition_ids: list[int]) -> dict[int, tuple[int, int, int]]:
    rows = connection.execute(_SIZES, {"partition_ids": partition_ids})
    return {partition_id: (count, int(size), last) for partition_id, count, size, last in rows}

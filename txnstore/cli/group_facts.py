"""This file is how far groups are: the lag that a reader of committed records will really have to read.

An offset may be a marker, aborted, or of an open transaction.  None of these is anything to read now, so the lag
counts records, not offsets, and those of open transactions by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Connection, and_, bindparam, case, exists, func, not_, select

from txnstore.clients.brokers import Reads, reads_at_leaders
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.schema import finished_transactions, record_batches
from txnstore.db.store import Store
from txnstore.groups.administration import ListedGroup, list_offsets
from txnstore.log.bounds import Bounds, read_bounds
from txnstore.log.topics import Topic, find_topics
from txnstore.model import ControlType

# Of a batch that the group stands in the middle of, only what is left counts.
_LEFT: Final = case(
    (record_batches.c.base_offset >= bindparam("from_offset"), record_batches.c.record_count),
    else_=record_batches.c.last_offset - bindparam("from_offset") + 1,
)
_RECORDS: Final = and_(
    record_batches.c.partition_id == bindparam("of_partition_id"),
    record_batches.c.last_offset >= bindparam("from_offset"),
    record_batches.c.control_type.is_(None),
    not_(
        exists()
        .where(finished_transactions.c.partition_id == record_batches.c.partition_id)
        .where(finished_transactions.c.producer_id == record_batches.c.producer_id)
        .where(finished_transactions.c.producer_epoch == record_batches.c.producer_epoch)
        .where(finished_transactions.c.outcome == int(ControlType.ABORT))
        .where(record_batches.c.is_transactional)
    ),
)
_STABLE: Final = record_batches.c.base_offset < bindparam("stable_offset")
_COUNTS: Final = select(
    func.sum(case((_STABLE, _LEFT), else_=0)), func.sum(case((not_(_STABLE), _LEFT), else_=0))
).where(_RECORDS)


def topics_by_name(connection: Connection, names: set[str]) -> dict[str, Topic]:
    """Return those of the topics that there are."""
    return {topic.name: topic for topic in find_topics(connection, sorted(names))}


def group_facts(group: ListedGroup) -> dict[str, Any]:
    """Return a group without its offsets."""
    return {
        "group": group.group_id,
        "state": group.state.value,
        "generation": group.generation,
        "assignor": group.assignor,
        "members": [
            {
                "member_id": member.member_id,
                "group_instance_id": member.group_instance_id,
                "client_id": member.client_id,
                "generation": member.generation,
                "expired": member.is_expired,
                "deadline_ms": member.deadline_ms,
                "subscribed": list(member.subscribed),
                "partitions": [str(partition) for partition in sorted(member.owned)],
            }
            for member in group.members
        ],
    }


def offset_rows(cluster: Cluster, store: Store, connection: Connection, group: ListedGroup) -> list[dict[str, Any]]:
    """Return a row for each partition that the group has committed for, or that a member has.

    `connection` is one to `store`, which coordinates the group; partitions are looked at where they live.
    """
    read = reads_at_leaders(cluster, store, connection)
    committed = list_offsets(connection, group.group_id)
    owners = {partition: member.member_id for member in group.members for partition in member.owned}
    wanted = sorted(committed.offsets.keys() | committed.unstable | owners.keys())
    topics = topics_by_name(connection, {partition.topic for partition in wanted})
    ids = {
        partition: topics[partition.topic].partition_ids[partition.partition]
        for partition in wanted
        if partition.topic in topics and partition.partition < len(topics[partition.topic].partition_ids)
    }
    bounds = read(list(ids.values()), read_bounds)
    rows = []
    for partition, partition_id in ids.items():
        offset = committed.offsets.get(partition)
        position = None if offset is None else offset.offset
        rows.append(
            {
                "topic": partition.topic,
                "partition": partition.partition,
                "committed_offset": position,
                "pending": partition in committed.unstable,
                "member_id": owners.get(partition),
                **_distance(read, bounds[partition_id], position),
            }
        )
    return rows


def _distance(read: Reads, bounds: Bounds, position: int | None) -> Mapping[str, Any]:
    facts = {
        "log_start_offset": bounds.log_start_offset,
        "last_stable_offset": bounds.last_stable_offset,
        "high_watermark": bounds.high_watermark,
    }
    if position is None:
        return facts | {"lag": None, "open_records": None}
    wanted = {
        "of_partition_id": bounds.partition_id,
        "from_offset": max(position, bounds.log_start_offset),
        "stable_offset": bounds.last_stable_offset,
    }
    found = read(
        [bounds.partition_id],
        lambda connection, _: {bounds.partition_id: connection.execute(_COUNTS, wanted).one()},
    )
    lag, open_records = found[bounds.partition_id]
    return facts | {"lag": int(lag or 0), "open_records": int(open_records or 0)}

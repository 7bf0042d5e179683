"""This file is what a consumer's statistics say: where it is in each partition, and how far behind."""

from __future__ import annotations

from typing import Any

from txnstore.clients.consumer.assigned_partition import AssignedPartition
from txnstore.clients.consumer.subscription import Subscription
from txnstore.model import IsolationLevel


def consumer_facts(subscription: Subscription, isolation: IsolationLevel) -> dict[str, Any]:
    """Return librdkafka's fields for topics and partitions; whoever calls holds the consumer's lock."""
    topics: dict[str, Any] = {}
    for partition in subscription:
        topic = topics.setdefault(partition.topic, {"topic": partition.topic, "partitions": {}})
        topic["partitions"][str(partition.number)] = _facts(partition, isolation)
    return {"msg_cnt": subscription.buffered_records, "msg_size": subscription.buffered_bytes, "topics": topics}


def _facts(partition: AssignedPartition, isolation: IsolationLevel) -> dict[str, Any]:
    bounds = partition.bounds
    end_offset = -1 if bounds is None else bounds.end(isolation)
    # As librdkafka: behind what is committed, or what was handed out if nothing is.
    known_offset = partition.committed if partition.committed >= 0 else partition.position
    return {
        "partition": partition.number,
        "fetchq_cnt": partition.buffered_records,
        "fetchq_size": partition.buffered_bytes,
        "lo_offset": -1 if bounds is None else bounds.log_start_offset,
        "hi_offset": -1 if bounds is None else bounds.high_watermark,
        "ls_offset": -1 if bounds is None else bounds.last_stable_offset,
        "app_offset": partition.position,
        "stored_offset": partition.stored,
        "committed_offset": partition.committed,
        "consumer_lag": max(0, end_offset - known_offset) if end_offset >= 0 and known_offset >= 0 else -1,
    }

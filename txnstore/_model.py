"""Descriptions of groups, brokers and topics, under the private module name that many programs import them from."""

from __future__ import annotations

from txnstore.clients.model.metadata import (
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    ConsumerGroupType,
    ElectionType,
    IsolationLevel,
    Node,
    TopicCollection,
    TopicPartitionInfo,
)

__all__ = [
    "ConsumerGroupState",
    "ConsumerGroupTopicPartitions",
    "ConsumerGroupType",
    "ElectionType",
    "IsolationLevel",
    "Node",
    "TopicCollection",
    "TopicPartitionInfo",
]

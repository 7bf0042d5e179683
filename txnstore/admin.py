"""The admin client and what goes with it, under the names of `confluent_kafka.admin`."""

from __future__ import annotations

from txnstore.clients.admin_client import AdminClient
from txnstore.clients.admin_cluster import DescribeClusterResult
from txnstore.clients.admin_new_topics import NewPartitions, NewTopic
from txnstore.clients.admin_offsets import (
    EarliestSpec,
    LatestSpec,
    ListOffsetsResultInfo,
    MaxTimestampSpec,
    OffsetSpec,
    TimestampSpec,
)
from txnstore.clients.admin_resources import (
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    ResourceType,
)
from txnstore.clients.admin_topics import TopicDescription
from txnstore.clients.cluster_metadata import (
    BrokerMetadata,
    ClusterMetadata,
    GroupMember,
    GroupMetadata,
    PartitionMetadata,
    TopicMetadata,
)
from txnstore.clients.constants import (
    RESOURCE_ANY,
    RESOURCE_BROKER,
    RESOURCE_GROUP,
    RESOURCE_TOPIC,
    RESOURCE_TRANSACTIONAL_ID,
    RESOURCE_UNKNOWN,
)
from txnstore.clients.kafka_error import KafkaError, KafkaException

__all__ = [
    "RESOURCE_ANY",
    "RESOURCE_BROKER",
    "RESOURCE_GROUP",
    "RESOURCE_TOPIC",
    "RESOURCE_TRANSACTIONAL_ID",
    "RESOURCE_UNKNOWN",
    "AdminClient",
    "AlterConfigOpType",
    "BrokerMetadata",
    "ClusterMetadata",
    "ConfigEntry",
    "ConfigResource",
    "ConfigSource",
    "DescribeClusterResult",
    "EarliestSpec",
    "GroupMember",
    "GroupMetadata",
    "KafkaError",
    "KafkaException",
    "LatestSpec",
    "ListOffsetsResultInfo",
    "MaxTimestampSpec",
    "NewPartitions",
    "NewTopic",
    "OffsetSpec",
    "PartitionMetadata",
    "ResourceType",
    "TimestampSpec",
    "TopicDescription",
    "TopicMetadata",
]

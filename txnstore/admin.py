"""The admin client and what goes with it, under the names of `confluent_kafka.admin`."""

from __future__ import annotations

from txnstore.clients.admin.client import AdminClient
from txnstore.clients.admin.configs import (
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    ResourceType,
)
from txnstore.clients.admin.groups import (
    ConsumerGroupDescription,
    ConsumerGroupListing,
    ListConsumerGroupsResult,
    MemberAssignment,
    MemberDescription,
)
from txnstore.clients.admin.records import (
    DeletedRecords,
    EarliestSpec,
    LatestSpec,
    ListOffsetsResultInfo,
    MaxTimestampSpec,
    OffsetSpec,
    TimestampSpec,
)
from txnstore.clients.admin.topics import DescribeClusterResult, NewPartitions, NewTopic, TopicDescription
from txnstore.clients.admin.transactions import (
    AbortTransactionSpec,
    HangingTransaction,
    PartitionProducerState,
    ProducerIdAndEpoch,
    ProducerState,
    TransactionDescription,
    TransactionListing,
)
from txnstore.clients.admin.unsupported import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialAlteration,
    UserScramCredentialDeletion,
    UserScramCredentialsDescription,
    UserScramCredentialUpsertion,
)
from txnstore.clients.model.constants import (
    RESOURCE_ANY,
    RESOURCE_BROKER,
    RESOURCE_GROUP,
    RESOURCE_TOPIC,
    RESOURCE_TRANSACTIONAL_ID,
    RESOURCE_UNKNOWN,
)
from txnstore.clients.model.kafka_error import KafkaError, KafkaException
from txnstore.clients.model.metadata import (
    BrokerMetadata,
    ClusterMetadata,
    GroupMember,
    GroupMetadata,
    PartitionMetadata,
    TopicMetadata,
)
from txnstore.transactions.states import TransactionState

__all__ = [
    "RESOURCE_ANY",
    "RESOURCE_BROKER",
    "RESOURCE_GROUP",
    "RESOURCE_TOPIC",
    "RESOURCE_TRANSACTIONAL_ID",
    "RESOURCE_UNKNOWN",
    "AbortTransactionSpec",
    "AclBinding",
    "AclBindingFilter",
    "AclOperation",
    "AclPermissionType",
    "AdminClient",
    "AlterConfigOpType",
    "BrokerMetadata",
    "ClusterMetadata",
    "ConfigEntry",
    "ConfigResource",
    "ConfigSource",
    "ConsumerGroupDescription",
    "ConsumerGroupListing",
    "DeletedRecords",
    "DescribeClusterResult",
    "EarliestSpec",
    "GroupMember",
    "GroupMetadata",
    "HangingTransaction",
    "KafkaError",
    "KafkaException",
    "LatestSpec",
    "ListConsumerGroupsResult",
    "ListOffsetsResultInfo",
    "MaxTimestampSpec",
    "MemberAssignment",
    "MemberDescription",
    "NewPartitions",
    "NewTopic",
    "OffsetSpec",
    "PartitionMetadata",
    "PartitionProducerState",
    "ProducerIdAndEpoch",
    "ProducerState",
    "ResourcePatternType",
    "ResourceType",
    "ScramCredentialInfo",
    "ScramMechanism",
    "TimestampSpec",
    "TopicDescription",
    "TopicMetadata",
    "TransactionDescription",
    "TransactionListing",
    "TransactionState",
    "UserScramCredentialAlteration",
    "UserScramCredentialDeletion",
    "UserScramCredentialUpsertion",
    "UserScramCredentialsDescription",
]

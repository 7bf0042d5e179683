"""The admin client and what goes with it, under the names of `confluent_kafka.admin`; each is imported at first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from txnstore.late_import import import_late

if TYPE_CHECKING:
    from txnstore.clients.admin.client import AdminClient
    from txnstore.clients.admin.configs import (
        RESOURCE_ANY,
        RESOURCE_BROKER,
        RESOURCE_GROUP,
        RESOURCE_TOPIC,
        RESOURCE_TRANSACTIONAL_ID,
        RESOURCE_UNKNOWN,
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
        OpenTransactionListing,
        PartitionProducerState,
        PendingOffsetsListing,
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
    from txnstore.clients.model.errors import KafkaError, KafkaException
    from txnstore.clients.model.metadata import (
        BrokerMetadata,
        ClusterMetadata,
        GroupMember,
        GroupMetadata,
        PartitionMetadata,
        TopicMetadata,
    )
    from txnstore.transactions.protocol import TransactionState

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
    "OpenTransactionListing",
    "PartitionMetadata",
    "PartitionProducerState",
    "PendingOffsetsListing",
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

_NAMES: Final = {
    "txnstore.clients.admin.client": ("AdminClient",),
    "txnstore.clients.admin.configs": (
        "RESOURCE_ANY",
        "RESOURCE_BROKER",
        "RESOURCE_GROUP",
        "RESOURCE_TOPIC",
        "RESOURCE_TRANSACTIONAL_ID",
        "RESOURCE_UNKNOWN",
        "AlterConfigOpType",
        "ConfigEntry",
        "ConfigResource",
        "ConfigSource",
        "ResourceType",
    ),
    "txnstore.clients.admin.groups": (
        "ConsumerGroupDescription",
        "ConsumerGroupListing",
        "ListConsumerGroupsResult",
        "MemberAssignment",
        "MemberDescription",
    ),
    "txnstore.clients.admin.records": (
        "DeletedRecords",
        "EarliestSpec",
        "LatestSpec",
        "ListOffsetsResultInfo",
        "MaxTimestampSpec",
        "OffsetSpec",
        "TimestampSpec",
    ),
    "txnstore.clients.admin.topics": ("DescribeClusterResult", "NewPartitions", "NewTopic", "TopicDescription"),
    "txnstore.clients.admin.transactions": (
        "AbortTransactionSpec",
        "HangingTransaction",
        "OpenTransactionListing",
        "PendingOffsetsListing",
        "PartitionProducerState",
        "ProducerIdAndEpoch",
        "ProducerState",
        "TransactionDescription",
        "TransactionListing",
    ),
    "txnstore.clients.admin.unsupported": (
        "AclBinding",
        "AclBindingFilter",
        "AclOperation",
        "AclPermissionType",
        "ResourcePatternType",
        "ScramCredentialInfo",
        "ScramMechanism",
        "UserScramCredentialAlteration",
        "UserScramCredentialDeletion",
        "UserScramCredentialsDescription",
        "UserScramCredentialUpsertion",
    ),
    "txnstore.clients.model.errors": ("KafkaError", "KafkaException"),
    "txnstore.clients.model.metadata": (
        "BrokerMetadata",
        "ClusterMetadata",
        "GroupMember",
        "GroupMetadata",
        "PartitionMetadata",
        "TopicMetadata",
    ),
    "txnstore.transactions.protocol": ("TransactionState",),
}
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import what is asked for first (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_late(_MODULES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

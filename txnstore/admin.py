"""The admin client and what goes with it, under the names of `confluent_kafka.admin`; each is imported at first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from txnstore.late_import import import_late

if TYPE_CHECKING:
    from txnstore.clients.admin.client import AdminClient
    from txnstore.clients.admin.configs import (
        CONFIG_SOURCE_DEFAULT_CONFIG,
        CONFIG_SOURCE_DYNAMIC_BROKER_CONFIG,
        CONFIG_SOURCE_DYNAMIC_DEFAULT_BROKER_CONFIG,
        CONFIG_SOURCE_DYNAMIC_TOPIC_CONFIG,
        CONFIG_SOURCE_GROUP_CONFIG,
        CONFIG_SOURCE_STATIC_BROKER_CONFIG,
        CONFIG_SOURCE_UNKNOWN_CONFIG,
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
    "CONFIG_SOURCE_DEFAULT_CONFIG",
    "CONFIG_SOURCE_DYNAMIC_BROKER_CONFIG",
    "CONFIG_SOURCE_DYNAMIC_DEFAULT_BROKER_CONFIG",
    "CONFIG_SOURCE_DYNAMIC_TOPIC_CONFIG",
    "CONFIG_SOURCE_GROUP_CONFIG",
    "CONFIG_SOURCE_STATIC_BROKER_CONFIG",
    "CONFIG_SOURCE_UNKNOWN_CONFIG",
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

#: Where they are, what is cheap to import first: a name is taken from the first one that has it.
_MODULES: Final = (
    "txnstore.clients.model.errors",
    "txnstore.clients.model.metadata",
    "txnstore.transactions.protocol",
    "txnstore.clients.admin.configs",
    "txnstore.clients.admin.topics",
    "txnstore.clients.admin.records",
    "txnstore.clients.admin.groups",
    "txnstore.clients.admin.unsupported",
    "txnstore.clients.admin.transactions",
    "txnstore.clients.admin.client",
)


def __getattr__(name: str) -> Any:
    """Import what is asked for first (PEP 562)."""
    for module in _MODULES if name in __all__ else ():
        if hasattr(found := import_late(module), name):
            return globals().setdefault(name, getattr(found, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

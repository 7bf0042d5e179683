"""The classes under the module name that some programs import them from, as they do from `confluent_kafka.cimpl`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

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
)
from txnstore.clients.admin.records import OFFSET_SPEC_EARLIEST, OFFSET_SPEC_LATEST, OFFSET_SPEC_MAX_TIMESTAMP
from txnstore.clients.admin.topics import NewPartitions, NewTopic
from txnstore.clients.admin.unsupported import AclOperation, AclPermissionType, ResourcePatternType, ScramMechanism
from txnstore.clients.consumer.consumer import Consumer
from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.clients.model.message import (
    TIMESTAMP_CREATE_TIME,
    TIMESTAMP_LOG_APPEND_TIME,
    TIMESTAMP_NOT_AVAILABLE,
    Message,
)
from txnstore.clients.model.metadata import (
    ISOLATION_LEVEL_READ_COMMITTED,
    ISOLATION_LEVEL_READ_UNCOMMITTED,
    ConsumerGroupState,
    ConsumerGroupType,
    ElectionType,
    Uuid,
    libversion,
    version,
)
from txnstore.clients.model.topic_partition import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    OFFSET_STORED,
    TopicPartition,
)
from txnstore.clients.producer.producer import Producer
from txnstore.log.partitioners import consistent, fnv1a, murmur2

__all__ = [
    "CONFIG_SOURCE_DEFAULT_CONFIG",
    "CONFIG_SOURCE_DYNAMIC_BROKER_CONFIG",
    "CONFIG_SOURCE_DYNAMIC_DEFAULT_BROKER_CONFIG",
    "CONFIG_SOURCE_DYNAMIC_TOPIC_CONFIG",
    "CONFIG_SOURCE_GROUP_CONFIG",
    "CONFIG_SOURCE_STATIC_BROKER_CONFIG",
    "CONFIG_SOURCE_UNKNOWN_CONFIG",
    "ISOLATION_LEVEL_READ_COMMITTED",
    "ISOLATION_LEVEL_READ_UNCOMMITTED",
    "OFFSET_BEGINNING",
    "OFFSET_END",
    "OFFSET_INVALID",
    "OFFSET_SPEC_EARLIEST",
    "OFFSET_SPEC_LATEST",
    "OFFSET_SPEC_MAX_TIMESTAMP",
    "OFFSET_STORED",
    "RESOURCE_ANY",
    "RESOURCE_BROKER",
    "RESOURCE_GROUP",
    "RESOURCE_TOPIC",
    "RESOURCE_TRANSACTIONAL_ID",
    "RESOURCE_UNKNOWN",
    "TIMESTAMP_CREATE_TIME",
    "TIMESTAMP_LOG_APPEND_TIME",
    "TIMESTAMP_NOT_AVAILABLE",
    "Consumer",
    "KafkaError",
    "KafkaException",
    "Message",
    "NewPartitions",
    "NewTopic",
    "Producer",
    "TopicPartition",
    "Uuid",
    "consistent",
    "fnv1a",
    "libversion",
    "murmur2",
    "version",
]

#: What stands before the names of the numbers of an enumeration.
_NUMBERED: Final[Mapping[str, type[enum.Enum]]] = {
    "ACL_OPERATION": AclOperation,
    "ACL_PERMISSION_TYPE": AclPermissionType,
    "ALTER_CONFIG_OP_TYPE": AlterConfigOpType,
    "CONSUMER_GROUP_STATE": ConsumerGroupState,
    "CONSUMER_GROUP_TYPE": ConsumerGroupType,
    "ELECTION_TYPE": ElectionType,
    "RESOURCE_PATTERN": ResourcePatternType,
    "SCRAM_MECHANISM": ScramMechanism,
}
globals().update(
    {
        f"{prefix}_{member.name.removeprefix('SCRAM_').replace('REBALANCING', 'REBALANCE')}": member.value
        for prefix, enumeration in _NUMBERED.items()
        for member in enumeration
    }
)

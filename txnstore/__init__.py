"""txnstore: Kafka's transactional log inside the SQL database that an application already has.

The names are those of `confluent_kafka`: a program changes its import and its `bootstrap.servers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.clients.model.message import (
    TIMESTAMP_CREATE_TIME,
    TIMESTAMP_LOG_APPEND_TIME,
    TIMESTAMP_NOT_AVAILABLE,
    Message,
)
from txnstore.clients.model.metadata import (
    VERSION,
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    ConsumerGroupType,
    ElectionType,
    IsolationLevel,
    Node,
    ThrottleEvent,
    TopicCollection,
    TopicPartitionInfo,
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
from txnstore.late_import import import_late
from txnstore.log.partitioners import consistent, fnv1a, murmur2

if TYPE_CHECKING:
    from txnstore.clients.consumer.consumer import Consumer
    from txnstore.clients.outcome import Outcome, PreparedTxnState, outcome
    from txnstore.clients.producer.producer import Producer
    from txnstore.confluent_kafka_names import install_as_confluent_kafka
    from txnstore.deserializing_consumer import DeserializingConsumer
    from txnstore.outbox import Outbox
    from txnstore.serializing_producer import SerializingProducer

__all__ = [
    "OFFSET_BEGINNING",
    "OFFSET_END",
    "OFFSET_INVALID",
    "OFFSET_STORED",
    "TIMESTAMP_CREATE_TIME",
    "TIMESTAMP_LOG_APPEND_TIME",
    "TIMESTAMP_NOT_AVAILABLE",
    "Consumer",
    "ConsumerGroupState",
    "ConsumerGroupTopicPartitions",
    "ConsumerGroupType",
    "DeserializingConsumer",
    "ElectionType",
    "IsolationLevel",
    "KafkaError",
    "KafkaException",
    "Message",
    "Node",
    "Outbox",
    "Outcome",
    "PreparedTxnState",
    "Producer",
    "SerializingProducer",
    "ThrottleEvent",
    "TopicCollection",
    "TopicPartition",
    "TopicPartitionInfo",
    "Uuid",
    "admin",
    "aio",
    "consistent",
    "fnv1a",
    "install_as_confluent_kafka",
    "libversion",
    "murmur2",
    "outcome",
    "version",
]

__version__ = VERSION

#: Where to find what brings SQLAlchemy and the drivers along.  Those take half a second to import, which a program
#: that imports txnstore for an error or for its command line does not have to wait for.
_MODULES: Final = {
    "Consumer": "txnstore.clients.consumer.consumer",
    "DeserializingConsumer": "txnstore.deserializing_consumer",
    "Outbox": "txnstore.outbox",
    "Outcome": "txnstore.clients.outcome",
    "PreparedTxnState": "txnstore.clients.outcome",
    "Producer": "txnstore.clients.producer.producer",
    "SerializingProducer": "txnstore.serializing_producer",
    "install_as_confluent_kafka": "txnstore.confluent_kafka_names",
    "outcome": "txnstore.clients.outcome",
}
_SUBMODULES: Final = frozenset(
    {"admin", "aio", "cimpl", "deserializing_consumer", "error", "serialization", "serializing_producer"}
)


def __getattr__(name: str) -> Any:
    """Import a client, or a submodule, when it is asked for first (PEP 562)."""
    if name in _SUBMODULES:
        return import_late(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_late(_MODULES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

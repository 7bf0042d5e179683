"""The errors that the clients raise, under the names of `confluent_kafka.error`."""

from __future__ import annotations

from txnstore.clients.model.client_errors import (
    ConsumeError,
    KeyDeserializationError,
    KeySerializationError,
    ProduceError,
    ValueDeserializationError,
    ValueSerializationError,
)
from txnstore.clients.model.kafka_error import KafkaError, KafkaException
from txnstore.clients.model.serializers import SerializationError

__all__ = [
    "ConsumeError",
    "KafkaError",
    "KafkaException",
    "KeyDeserializationError",
    "KeySerializationError",
    "ProduceError",
    "SerializationError",
    "ValueDeserializationError",
    "ValueSerializationError",
]

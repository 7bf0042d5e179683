"""Serializers and deserializers, under the names of `confluent_kafka.serialization`."""

from __future__ import annotations

from txnstore.clients.model.errors import KafkaException
from txnstore.clients.model.serializers import (
    Deserializer,
    DeserializerBuilder,
    DoubleDeserializer,
    DoubleSerializer,
    IntegerDeserializer,
    IntegerSerializer,
    MessageField,
    SerializationContext,
    SerializationError,
    Serializer,
    SerializerBuilder,
    StringDeserializer,
    StringSerializer,
)

__all__ = [
    "Deserializer",
    "DeserializerBuilder",
    "DoubleDeserializer",
    "DoubleSerializer",
    "IntegerDeserializer",
    "IntegerSerializer",
    "KafkaException",
    "MessageField",
    "SerializationContext",
    "SerializationError",
    "Serializer",
    "SerializerBuilder",
    "StringDeserializer",
    "StringSerializer",
]

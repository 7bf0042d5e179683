"""The clients for asyncio, under the names of `confluent_kafka.aio`."""

from __future__ import annotations

from txnstore.clients.async_consumer import AIOConsumer
from txnstore.clients.async_deserializing_consumer import AsyncDeserializingConsumer
from txnstore.clients.async_producer import AIOProducer
from txnstore.clients.async_serializing_producer import AsyncSerializingProducer

__all__ = ["AIOConsumer", "AIOProducer", "AsyncDeserializingConsumer", "AsyncSerializingProducer"]

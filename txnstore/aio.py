"""The clients for asyncio, under the names of `confluent_kafka.aio`."""

from __future__ import annotations

from txnstore.clients.aio.consumer import AIOConsumer
from txnstore.clients.aio.deserializing_consumer import AsyncDeserializingConsumer
from txnstore.clients.aio.producer import AIOProducer
from txnstore.clients.aio.serializing_producer import AsyncSerializingProducer

__all__ = ["AIOConsumer", "AIOProducer", "AsyncDeserializingConsumer", "AsyncSerializingProducer"]

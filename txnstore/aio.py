"""The clients for asyncio, under the names of `confluent_kafka.aio`."""

from __future__ import annotations

from txnstore.clients.aio.consumer import AIOConsumer, AsyncDeserializingConsumer
from txnstore.clients.aio.producer import AIOProducer, AsyncSerializingProducer

__all__ = ["AIOConsumer", "AIOProducer", "AsyncDeserializingConsumer", "AsyncSerializingProducer"]

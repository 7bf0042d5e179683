"""The clients for asyncio, under the names of `confluent_kafka.aio`."""

from __future__ import annotations

from txnstore.clients.async_consumer import AIOConsumer
from txnstore.clients.async_producer import AIOProducer

__all__ = ["AIOConsumer", "AIOProducer"]

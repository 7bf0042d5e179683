"""`DeserializingConsumer` under the module name that some programs import it from."""

from __future__ import annotations

from txnstore.clients.consumer.deserializing import DeserializingConsumer

__all__ = ["DeserializingConsumer"]

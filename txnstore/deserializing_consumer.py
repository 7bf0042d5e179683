"""`DeserializingConsumer` under the module name that some programs import it from."""

from __future__ import annotations

from txnstore.clients.deserializing_consumer import DeserializingConsumer

__all__ = ["DeserializingConsumer"]

"""`SerializingProducer` under the module name that some programs import it from."""

from __future__ import annotations

from txnstore.clients.producer.serializing import SerializingProducer

__all__ = ["SerializingProducer"]

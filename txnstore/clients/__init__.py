"""The clients: producer, consumer and what they hand out, in the shape of `confluent_kafka`."""

from __future__ import annotations

"""Markers as batches: what the columns that the coordinator writes stand for."""

from __future__ import annotations

from txnstore.log.codec import EncodedBatch
from txnstore.model import ControlType, ProducerIdentity


def encode_control(
    control_type: ControlType, *, coordinator_epoch: int, producer: ProducerIdentity, timestamp_ms: int
) -> EncodedBatch:
    """Return a marker that ends the transaction of `producer`: a batch of one control record."""
    return EncodedBatch(
        record_count=1,
        base_timestamp_ms=timestamp_ms,
        max_timestamp_ms=timestamp_ms,
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch,
        is_transactional=True,
        control_type=control_type,
        coordinator_epoch=coordinator_epoch,
    )

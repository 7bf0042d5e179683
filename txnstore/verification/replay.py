"""The replay of a partition's log: what follows from its batches, read in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from txnstore.log.codec import RecordBatch
from txnstore.log.sequences import ProducerInPartition, RecentBatch, increment_sequence, last_sequence_of, remember
from txnstore.model import NO_PRODUCER_ID
from txnstore.verification.invariants import Invariant, Place, Violation


class Finished(NamedTuple):
    """How a transaction ended in a partition."""

    producer_id: int
    producer_epoch: int
    """Of its records."""

    first_offset: int
    outcome: int
    last_stable_offset: int
    """After its marker."""


@dataclass
class Replay:
    """What is known after the batches that were taken; it grows with the producers, not with what they wrote."""

    partition_id: int
    #: Where what is stored begins; above 0 if batches before it were deleted, and what they told with them.
    first_offset: int = 0
    producers: dict[int, ProducerInPartition] = field(default_factory=dict)
    #: By marker offset, since `finished` was last emptied.
    finished: dict[int, Finished] = field(default_factory=dict)
    #: Where the transactions begin that are open, by producer; the oldest one first.
    _open: dict[int, int] = field(default_factory=dict)

    def take(self, batch: RecordBatch) -> Iterator[Violation]:
        """Read the next batch."""
        identity = batch.producer
        if identity.producer_id == NO_PRODUCER_ID:
            return
        known = self.producers.get(identity.producer_id)
        yield from self._epoch_violations(batch, known)
        state = known or ProducerInPartition(identity.producer_id, identity.epoch, (), -1, 0, None)
        if batch.is_control:
            self._end(batch, state)
        else:
            yield from self._sequence_violations(batch, known)
            self._remember(batch, state)

    def _epoch_violations(self, batch: RecordBatch, known: ProducerInPartition | None) -> Iterator[Violation]:
        epoch = batch.producer.epoch
        if known is None:
            return
        # A marker comes once more where the producer was forgotten before the transaction was completed.
        ends_records = batch.is_control and bool(known.recent_batches)
        if epoch < known.epoch or (ends_records and epoch == known.epoch):
            what = "a marker" if batch.is_control else "records"
            seen = f"{what} of producer {batch.producer} after epoch {known.epoch}"
            yield Violation(Invariant.EPOCHS_RISE, self._place(batch), seen)

    def _sequence_violations(self, batch: RecordBatch, known: ProducerInPartition | None) -> Iterator[Violation]:
        if known is not None and known.epoch == batch.producer.epoch and known.recent_batches:
            expected = increment_sequence(known.last_sequence, 1)
        elif known is not None or (batch.is_transactional and self.first_offset == 0):
            expected = 0
        else:
            # A partition may have forgotten the producer, or what it wrote before may be deleted.
            return
        if batch.base_sequence != expected:
            seen = f"producer {batch.producer} has sequence {batch.base_sequence} where {expected} is next"
            yield Violation(Invariant.SEQUENCES_FOLLOW, self._place(batch), seen)

    def _remember(self, batch: RecordBatch, state: ProducerInPartition) -> None:
        recent = RecentBatch(
            batch.base_sequence,
            last_sequence_of(batch.base_sequence, batch.record_count),
            batch.base_offset,
            batch.last_offset,
            batch.max_timestamp_ms,
        )
        first_offset = state.transaction_first_offset
        if batch.is_transactional and first_offset is None:
            first_offset = batch.base_offset
            self._open[state.producer_id] = first_offset
        self.producers[state.producer_id] = replace(
            state,
            epoch=batch.producer.epoch,
            recent_batches=remember(state.recent_batches if state.epoch == batch.producer.epoch else (), recent),
            transaction_first_offset=first_offset,
        )

    def _end(self, marker: RecordBatch, state: ProducerInPartition) -> None:
        self.producers[state.producer_id] = replace(
            state,
            epoch=marker.producer.epoch,
            recent_batches=(),
            coordinator_epoch=marker.coordinator_epoch or 0,
            transaction_first_offset=None,
        )
        first_offset, outcome = self._open.pop(state.producer_id, None), marker.control_type
        if first_offset is not None and outcome is not None:
            stable = next(iter(self._open.values()), marker.last_offset + 1)
            self.finished[marker.last_offset] = Finished(
                state.producer_id, state.epoch, first_offset, int(outcome), stable
            )

    def _place(self, batch: RecordBatch) -> Place:
        return Place(self.partition_id, batch.base_offset)

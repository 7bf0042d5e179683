"""The rules of idempotent appends, pure: which batch is new, repeated or wrong (KIP-98).

One rule a function; the order in which they are asked is Kafka's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from txnstore.errors import InvalidProducerEpoch, InvalidTransactionState, OutOfOrderSequence
from txnstore.model import NO_SEQUENCE, SEQUENCE_MAX, ProducerIdentity

#: How many batches of a producer are remembered in a partition; also the most that may be in flight (KIP-98).
BATCHES_REMEMBERED: Final = 5


@dataclass(frozen=True, slots=True)
class RecentBatch:
    """A batch that a repetition would be recognised by."""

    first_sequence: int
    last_sequence: int
    base_offset: int
    last_offset: int
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class ProducerInPartition:
    """What a partition knows of a producer."""

    producer_id: int
    epoch: int
    recent_batches: tuple[RecentBatch, ...]
    coordinator_epoch: int
    last_timestamp_ms: int
    transaction_first_offset: int | None

    @property
    def last_sequence(self) -> int:
        """The last sequence number of this epoch, or -1 if it wrote nothing yet."""
        return self.recent_batches[-1].last_sequence if self.recent_batches else NO_SEQUENCE


class MarkedProducer(NamedTuple):
    """Of that, what a marker asks for."""

    epoch: int
    coordinator_epoch: int
    transaction_first_offset: int | None


def last_sequence_of(first_sequence: int, record_count: int) -> int:
    """Return the sequence number of a batch's last record; after 2147483647 comes 0."""
    return increment_sequence(first_sequence, record_count - 1)


#: What refuses a part of a transaction where an earlier one of its producer is open: producer, epoch, and where.
EARLIER_IS_OPEN: Final = (
    "producer {} has a transaction of epoch {} open in {}, which its coordinator does not know to be open: was an older"
    " state of one of the databases restored? `txnstore transactions list-open` shows it, and what ends it; nothing was"
    " changed"
)


def increment_sequence(sequence: int, count: int) -> int:
    """Return the sequence number `count` after `sequence`; after 2147483647 comes 0."""
    if sequence > SEQUENCE_MAX - count:
        return count - (SEQUENCE_MAX - sequence) - 1
    return sequence + count


def find_duplicate(state: ProducerInPartition | None, epoch: int, first: int, last: int) -> RecentBatch | None:
    """Return the remembered batch that a batch with these sequence numbers repeats, if it does.

    Only a whole batch of the same epoch is a repetition: one that is cut differently is not.
    """
    if state is None or state.epoch != epoch:
        return None
    for batch in state.recent_batches:
        if (batch.first_sequence, batch.last_sequence) == (first, last):
            return batch
    return None


def check_append(
    state: ProducerInPartition | None, producer: ProducerIdentity, first_sequence: int, *, is_transactional: bool
) -> None:
    """Return if a batch that is not a repetition may be appended.

    Raises:
        InvalidProducerEpoch: a newer epoch of the producer has been here.
        InvalidTransactionState: a plain record while the producer has a transaction open here, or one of a transaction
            while an earlier one is.
        OutOfOrderSequence: batches are missing before this one, or it is older than those remembered.
    """
    if state is None:
        # Forgotten producers go on where they were; a transaction always begins at 0 (KIP-890).
        if is_transactional and first_sequence != 0:
            raise OutOfOrderSequence(_out_of_order(producer, first_sequence, 0))
        return
    if producer.epoch < state.epoch:
        raise InvalidProducerEpoch(
            f"producer {producer} is older than epoch {state.epoch}, which the partition has seen; nothing was appended"
        )
    if not is_transactional and state.transaction_first_offset is not None:
        raise InvalidTransactionState(
            f"producer {producer} has a transaction open in this partition: expected a transactional write"
        )
    if producer.epoch > state.epoch and state.transaction_first_offset is not None:
        # One marker would end both. Nobody begins the next one before the last has ended, who has not forgotten that.
        raise InvalidTransactionState(EARLIER_IS_OPEN.format(producer, state.epoch, "this partition"))
    expected = 0 if producer.epoch > state.epoch else increment_sequence(state.last_sequence, 1)
    if first_sequence != expected:
        raise OutOfOrderSequence(_out_of_order(producer, first_sequence, expected))


def remember(recent: Sequence[RecentBatch], batch: RecentBatch) -> tuple[RecentBatch, ...]:
    """Return the batches to remember once `batch` is appended."""
    return (*recent, batch)[-BATCHES_REMEMBERED:]


def _out_of_order(producer: ProducerIdentity, found: int, expected: int) -> str:
    return f"producer {producer} sent sequence number {found} where {expected} is next; nothing was appended"

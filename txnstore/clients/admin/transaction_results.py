"""This file is what the admin client takes and returns about transactions: frozen values, named as in Java's Admin.

confluent-kafka has none of it.  Times are milliseconds since 1970 by the store's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from txnstore.clients.admin.arguments import check_number, check_partition
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.model import OFFSET_MAX
from txnstore.transactions.states import TransactionState

_EPOCH_MAX: Final = 2**15 - 1
_INT32_MAX: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TransactionListing:
    """A transactional id, from `list_transactions()`."""

    transactional_id: str
    producer_id: int
    state: TransactionState


@dataclass(frozen=True, slots=True)
class TransactionDescription:
    """How the newest transaction of a transactional id stands, from `describe_transactions()`."""

    coordinator_id: int
    state: TransactionState
    producer_id: int
    producer_epoch: int
    transaction_timeout_ms: int
    transaction_start_time_ms: int | None
    """When it began; None unless it runs."""

    transaction_duration_ms: int | None
    """For how long it has run, by the store's clock; None unless it runs."""

    topic_partitions: frozenset[TopicPartition]
    """Where it has written; empty unless it runs."""

    consumer_group_ids: frozenset[str]
    """The groups whose offsets it holds; empty unless it runs."""


@dataclass(frozen=True, slots=True)
class ProducerState:
    """What a partition remembers of a producer."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    """-1: none in this epoch."""

    last_timestamp: int
    coordinator_epoch: int | None
    """Of the last marker; None: there was none."""

    current_transaction_start_offset: int | None
    """Where its open transaction begins in the partition; None: none is open."""


@dataclass(frozen=True, slots=True)
class PartitionProducerState:
    """The producers that a partition remembers, by producer id, from `describe_producers()`."""

    active_producers: list[ProducerState]


@dataclass(frozen=True, slots=True)
class ProducerIdAndEpoch:
    """Who the producer of a transactional id is by now, from `fence_producers()`: nobody."""

    producer_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class HangingTransaction:
    """A transaction that is open in a partition and that no coordinator will end, from `find_hanging_transactions()`.

    Give `abort_spec` to `abort_transaction()`.
    """

    topic_partition: TopicPartition
    producer_id: int
    producer_epoch: int
    coordinator_epoch: int | None
    start_offset: int
    last_timestamp: int
    duration_ms: int
    """How long ago its producer last wrote to the partition."""

    @property
    def abort_spec(self) -> AbortTransactionSpec:
        """What `abort_transaction()` takes to end it."""
        return AbortTransactionSpec(
            self.topic_partition, self.producer_id, self.producer_epoch, self.coordinator_epoch or 0
        )


@dataclass(frozen=True, slots=True)
class AbortTransactionSpec:
    """Which open transaction `abort_transaction()` is to abort: the numbers that `describe_producers()` shows.

    Raises:
        TypeError, ValueError: something is of another type or out of range.
    """

    topic_partition: TopicPartition
    producer_id: int
    producer_epoch: int
    """The epoch of the open transaction."""

    coordinator_epoch: int = 0

    def __post_init__(self) -> None:
        """Refuse what could be no transaction."""
        check_partition(self.topic_partition)
        check_number("producer_id", self.producer_id, OFFSET_MAX)
        check_number("producer_epoch", self.producer_epoch, _EPOCH_MAX)
        check_number("coordinator_epoch", self.coordinator_epoch, _INT32_MAX)

"""Transactions as the admin client lists, describes, aborts and fences them.

confluent-kafka has none of these calls; the values are frozen and named as in Java's Admin.  Times are milliseconds
since 1970 by the store's clock.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from txnstore.clients.admin.calls import Call, check_number, check_partition
from txnstore.clients.admin.records import at_leader_of, partition_id_of, public_partition
from txnstore.clients.brokers import broker_id_of
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.db.cluster.cluster import Cluster, LeftOut
from txnstore.db.store import Store
from txnstore.errors import TransactionalIdNotFound
from txnstore.log.partition_rows import producers_of_partition
from txnstore.log.sequences import ProducerInPartition
from txnstore.model import OFFSET_MAX, ClientProcess, ProducerIdentity
from txnstore.transactions import listing, rows
from txnstore.transactions.administration import OpenInPartition, abort_open_transaction
from txnstore.transactions.coordinator import TransactionCoordinator, check_transactional_id
from txnstore.transactions.listing import TransactionFilter
from txnstore.transactions.protocol import TransactionState

_EPOCH_MAX: Final = 2**15 - 1
_INT32_MAX: Final = 2**31 - 1
#: Any duration.
NO_DURATION_MS: Final = -1
#: Kafka's transaction.max.timeout.ms by default.
MAX_TIMEOUT_MS_DEFAULT: Final = 15 * 60 * 1000
#: As Kafka's: the timeout is for a producer that will never write.
_FENCING_TIMEOUT_MS: Final = 1


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
    """-1: nothing was written in this epoch."""

    last_timestamp: int
    coordinator_epoch: int | None
    """Of the last marker; None: there was no marker."""

    current_transaction_start_offset: int | None
    """Where its open transaction begins in the partition; None: it has no open transaction."""


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
class OpenTransactionListing:
    """A transaction that is open in a partition and holds its readers back, from `list_open_transactions()`.

    Give `abort_spec` to `abort_transaction()`.
    """

    topic_partition: TopicPartition
    first_offset: int
    """Where it begins there."""

    is_oldest: bool
    """Whether the readers of the partition wait for this one: the last stable offset is `first_offset`."""

    transactional_id: str | None
    """None: no coordinator lists it there, as far as one could be asked."""

    state: TransactionState | None
    client_id: str | None
    """The `client.id` of the process that writes, as it says itself; None, as the next two: not told."""

    client_host: str | None
    client_process_id: int | None
    open_for_ms: int
    """By the store's clock; if no coordinator lists it, for how long its producer has been silent."""

    transaction_timeout_ms: int | None
    transaction_start_time_ms: int | None
    last_timestamp: int
    """When its producer last wrote to the partition."""

    prepared_gids: tuple[str, ...]
    """What it has prepared in other databases, by the names in their pg_prepared_xacts."""

    backend_pid: int | None
    """PostgreSQL's session that works on it now and keeps its lock; None: no session does, as far as it is known."""

    coordinator_id: int
    producer_id: int
    producer_epoch: int
    coordinator_epoch: int | None
    is_hanging: bool
    """Whether no timeout will end it: its coordinator was asked, and lists no such transaction."""

    freed_by: str | None
    """The command that ends it; None: its program completes it (KIP-939)."""

    @property
    def abort_spec(self) -> AbortTransactionSpec:
        """What `abort_transaction()` takes to end it."""
        return AbortTransactionSpec(
            self.topic_partition, self.producer_id, self.producer_epoch, self.coordinator_epoch or 0
        )


@dataclass(frozen=True, slots=True)
class PendingOffsetsListing:
    """An offset that an open transaction has sent for a group, from `list_pending_offsets()`.

    Until it ends, consumers of the group that ask for the partition's committed offset wait.
    """

    group_id: str
    topic_partition: TopicPartition
    """With the offset that the group has committed if the transaction commits."""

    transactional_id: str | None
    """None: no coordinator lists the group, as far as one could be asked."""

    state: TransactionState | None
    client_id: str | None
    """The `client.id` of the producer's process, as it says itself; None, as the next two: not told."""

    client_host: str | None
    client_process_id: int | None
    open_for_ms: int
    """By the store's clock; if no coordinator lists it, since it sent the offset."""

    transaction_timeout_ms: int | None
    transaction_start_time_ms: int | None
    last_timestamp: int
    """When the offset was sent."""

    coordinator_id: int
    producer_id: int
    producer_epoch: int
    is_hanging: bool
    """Whether no timeout will end it: its coordinator, in another database, was asked, and has lost it."""

    freed_by: str | None
    """The command that ends it; None: its program completes it (KIP-939)."""


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


# --- arguments --------------------------------------------------------------------------------------------------------


def check_ids(transactional_ids: object) -> list[str]:
    """Return the transactional ids of a list that is not empty; each is looked at more closely in its future."""
    if not isinstance(transactional_ids, list):
        raise TypeError(f"Expected a list of transactional ids, not {type(transactional_ids).__name__}")
    if not transactional_ids:
        raise ValueError("Expected at least one transactional id")
    for transactional_id in transactional_ids:
        if not isinstance(transactional_id, str):
            raise TypeError(f"a transactional id must be str, not {type(transactional_id).__name__}")
    return transactional_ids


def transaction_filter(
    states: object, producer_ids: object, duration_ms: object, transactional_id_pattern: object
) -> TransactionFilter:
    """Return the conditions that `list_transactions()` was given."""
    for name, values in (("states", states), ("producer_ids", producer_ids)):
        if values is not None and not isinstance(values, set | frozenset | list | tuple):
            raise TypeError(f"'{name}' must be a set")
    wanted_states: Collection[object] = states or ()  # type: ignore[assignment]  # checked above
    if not all(isinstance(state, TransactionState) for state in wanted_states):
        raise TypeError("All elements of states must be of type TransactionState")
    wanted_ids: Collection[object] = producer_ids or ()  # type: ignore[assignment]  # checked above
    for producer_id in wanted_ids:
        check_number("a producer id", producer_id, OFFSET_MAX)
    check_number("duration_ms", duration_ms, OFFSET_MAX, smallest=NO_DURATION_MS)
    return TransactionFilter(
        frozenset(wanted_states),  # type: ignore[arg-type]
        frozenset(wanted_ids),  # type: ignore[arg-type]
        None if duration_ms == NO_DURATION_MS else duration_ms,  # type: ignore[arg-type]
        _pattern(transactional_id_pattern),
    )


def _pattern(text: object) -> re.Pattern[str] | None:
    if text is None or text == "":
        return None
    if not isinstance(text, str):
        raise TypeError(f"transactional_id_pattern must be str, not {type(text).__name__}")
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"transactional_id_pattern is not a regular expression: {error}") from None


# --- what is done -----------------------------------------------------------------------------------------------------


def find(
    cluster: Cluster, call: Call[str, list[TransactionListing]], wanted: TransactionFilter
) -> list[TransactionListing]:
    """Return the transactional ids that meet the conditions."""
    left_out: LeftOut = {}
    found = cluster.read_all(
        lambda connection: listing.list_transactions(connection, wanted),
        left_out,
        retry_timeout_ms=call.retry_ms_of_each(cluster),
    )
    cluster.warn_of(left_out)
    of_all = sorted((row for _, those in found for row in those), key=lambda row: row.transactional_id)
    return [TransactionListing(row.transactional_id, row.producer_id, row.state) for row in of_all]


def describe(
    cluster: Cluster, call: Call[str, TransactionDescription], transactional_id: str
) -> TransactionDescription:
    """Return how the transaction stands."""
    check_transactional_id(transactional_id)
    return cluster.at_coordinator(transactional_id, lambda coordinator: _describe(coordinator, call, transactional_id))


def _describe(
    coordinator: Store, call: Call[str, TransactionDescription], transactional_id: str
) -> TransactionDescription:
    found = coordinator.read(
        lambda connection: listing.describe_transaction(connection, transactional_id),
        retry_timeout_ms=call.retry_ms(coordinator),
    )
    row = found.row
    return TransactionDescription(
        broker_id_of(coordinator.database_id),
        row.state,
        row.producer_id,
        row.producer_epoch,
        row.timeout_ms,
        row.start_ms if found.is_running else None,
        max(0, found.now_ms - row.start_ms) if found.is_running else None,
        frozenset(map(public_partition, found.partitions)) if found.is_running else frozenset(),
        frozenset(found.group_ids) if found.is_running else frozenset(),
    )


def describe_producers(
    cluster: Cluster, call: Call[TopicPartition, PartitionProducerState], partition: TopicPartition
) -> PartitionProducerState:
    """Return the producers that the partition remembers."""
    found = at_leader_of(
        cluster,
        call,
        partition,
        lambda leader: leader.read(
            lambda connection: producers_of_partition(connection, partition_id_of(connection, partition)),
            retry_timeout_ms=call.retry_ms(leader),
        ),
    )
    return PartitionProducerState([_producer_state(state) for state in found])


def abort(cluster: Cluster, call: Call[AbortTransactionSpec, None], spec: AbortTransactionSpec) -> None:
    """Abort the transaction."""
    partition_id = cluster.controller.read(
        lambda connection: partition_id_of(connection, spec.topic_partition),
        retry_timeout_ms=call.retry_ms(cluster.controller),
    )
    producer = ProducerIdentity(spec.producer_id, spec.producer_epoch)
    target = OpenInPartition(partition_id, producer, spec.coordinator_epoch)
    cluster.at_partition(
        partition_id,
        lambda leader: abort_open_transaction(leader, target, cluster, retry_timeout_ms=call.retry_ms(leader)),
    )


def fence(cluster: Cluster, call: Call[str, ProducerIdAndEpoch], transactional_id: str) -> ProducerIdAndEpoch:
    """Fence the producers of the transactional id."""
    initialized = cluster.at_coordinator(
        transactional_id,
        lambda coordinator: TransactionCoordinator(coordinator, cluster).init_producer_id(
            transactional_id, _FENCING_TIMEOUT_MS, retry_timeout_ms=call.retry_ms(coordinator)
        ),
    )
    return ProducerIdAndEpoch(initialized.identity.producer_id, initialized.identity.epoch)


def terminate(cluster: Cluster, call: Call[str, None], transactional_id: str) -> None:
    """Abort the open transaction of a transactional id that is in use, and fence its producer."""
    check_transactional_id(transactional_id)
    cluster.at_coordinator(
        transactional_id, lambda coordinator: _terminate(coordinator, cluster, call, transactional_id)
    )


def _terminate(coordinator: Store, cluster: Cluster, call: Call[str, None], transactional_id: str) -> None:
    found = coordinator.read(
        lambda connection: rows.read_row(connection, transactional_id), retry_timeout_ms=call.retry_ms(coordinator)
    )
    if found.row is None:
        raise TransactionalIdNotFound(f"nobody has used the transactional id {transactional_id[:80]!r}, or it expired")
    TransactionCoordinator(coordinator, cluster).init_producer_id(
        transactional_id, _FENCING_TIMEOUT_MS, retry_timeout_ms=call.retry_ms(coordinator)
    )


def find_hanging(
    cluster: Cluster,
    call: Call[str, list[HangingTransaction]],
    *,
    partitions: list[TopicPartition] | None,
    max_timeout_ms: int,
) -> list[HangingTransaction]:
    """Return the transactions that hang."""
    left_out: LeftOut = {}
    ids, each_ms = _ids_of(cluster, call, partitions), call.retry_ms_of_each(cluster)
    hanging = listing.hanging_in_cluster(cluster, left_out, max_timeout_ms, ids, retry_timeout_ms=each_ms)
    cluster.warn_of(left_out)
    return [
        HangingTransaction(
            public_partition(found.partition),
            found.producer_id,
            found.producer_epoch,
            _epoch_or_none(found.coordinator_epoch),
            found.start_offset,
            found.last_timestamp_ms,
            found.age_ms,
        )
        for found in hanging
    ]


def find_open(
    cluster: Cluster, call: Call[str, list[OpenTransactionListing]], *, partitions: list[TopicPartition] | None
) -> list[OpenTransactionListing]:
    """Return the transactions that are open."""
    from txnstore.transactions.open_transactions import each_open

    left_out: LeftOut = {}
    ids, each_ms = _ids_of(cluster, call, partitions), call.retry_ms_of_each(cluster)
    listed = [
        OpenTransactionListing(
            public_partition(found.partition),
            found.first_offset,
            found.is_oldest,
            found.transactional_id,
            found.state,
            *_process_of(found.client),
            found.age_ms,
            found.timeout_ms,
            found.started_ms,
            found.last_write_ms,
            tuple(found.prepared_gids),
            found.backend_pid,
            broker_id_of(found.coordinator_database_id),
            found.producer_id,
            found.producer_epoch,
            _epoch_or_none(found.coordinator_epoch),
            found.is_hanging,
            found.freed_by,
        )
        for found in each_open(cluster, left_out, ids, retry_timeout_ms=each_ms)
    ]
    cluster.warn_of(left_out)
    return listed


def find_pending_offsets(
    cluster: Cluster, call: Call[str, list[PendingOffsetsListing]], *, partitions: list[TopicPartition] | None
) -> list[PendingOffsetsListing]:
    """Return the offsets of groups that open transactions hold."""
    from txnstore.transactions.open_transactions import each_held

    left_out: LeftOut = {}
    ids, each_ms = _ids_of(cluster, call, partitions), call.retry_ms_of_each(cluster)
    listed = [
        PendingOffsetsListing(
            found.group_id,
            TopicPartition(found.partition.topic, found.partition.partition, found.pending_offset),
            found.transactional_id,
            found.state,
            *_process_of(found.client),
            found.age_ms,
            found.timeout_ms,
            found.started_ms,
            found.sent_ms,
            broker_id_of(found.coordinator_database_id),
            found.producer_id,
            found.producer_epoch,
            found.is_hanging,
            found.freed_by,
        )
        for found in each_held(cluster, left_out, ids, retry_timeout_ms=each_ms)
    ]
    cluster.warn_of(left_out)
    return listed


def _ids_of(cluster: Cluster, call: Call[str, Any], partitions: list[TopicPartition] | None) -> list[int] | None:
    if partitions is None:
        return None
    return cluster.controller.read(
        lambda connection: [partition_id_of(connection, partition) for partition in partitions],
        retry_timeout_ms=call.retry_ms(cluster.controller),
    )


def _producer_state(state: ProducerInPartition) -> ProducerState:
    return ProducerState(
        state.producer_id,
        state.epoch,
        state.last_sequence,
        state.last_timestamp_ms,
        _epoch_or_none(state.coordinator_epoch),
        state.transaction_first_offset,
    )


def _process_of(client: ClientProcess | None) -> tuple[str | None, str | None, int | None]:
    return (None, None, None) if client is None else (client.client_id, client.host, client.process_id)


def _epoch_or_none(epoch: int) -> int | None:
    return epoch if epoch >= 0 else None

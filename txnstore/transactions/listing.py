"""The questions that people ask about transactions: which there are, how one stands, and which ones hang.

Everything here reads; nothing is locked, and an answer is of one snapshot of each database.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sqlalchemy import Connection, Row, Select, bindparam, case, exists, select, tuple_, union_all

from txnstore.db.cluster.cluster import Cluster, LeftOut
from txnstore.db.cluster.membership import coordinator_of_producer
from txnstore.db.row_security import check_sees_all
from txnstore.db.schema import (
    producer_states,
    transaction_partitions,
    transaction_writer_partitions,
    transaction_writers,
    transactions,
)
from txnstore.db.store import Store, pages, server_now_ms
from txnstore.errors import TransactionalIdNotFound
from txnstore.log.topics import names_of_partitions
from txnstore.model import PartitionName
from txnstore.transactions import rows
from txnstore.transactions.protocol import DECIDED, FenceReason, TransactionMetadata, TransactionState
from txnstore.transactions.rows import participants_of

#: The states in which a transaction holds up readers: it runs until it is complete.
RUNNING: Final = DECIDED | {TransactionState.ONGOING}
#: Kafka's tool takes no transaction for hanging before its longest timeout is over by so much.
HANGING_MARGIN_MS: Final = 5 * 60 * 1000

#: What says of an open transaction that its coordinator will end it.
COORDINATOR: Final = (transactions, transaction_partitions, transaction_writers, transaction_writer_partitions)
#: How many rows are read in one go: the filter leaves few of many.
PAGE_ROWS: Final = 1_000

_STATES: Final = sorted(int(state) for state in RUNNING)
_LISTED: Final = union_all(
    select(transactions.c.producer_id, transaction_partitions.c.partition_id)
    .join(transaction_partitions, transaction_partitions.c.transactional_id == transactions.c.transactional_id)
    .where(transactions.c.state.in_(_STATES))
    .where(transactions.c.producer_id.in_(bindparam("producer_ids", expanding=True))),
    select(transaction_writer_partitions.c.writer_producer_id, transaction_writer_partitions.c.partition_id)
    .join(transactions, transactions.c.transactional_id == transaction_writer_partitions.c.transactional_id)
    .where(transactions.c.state.in_(_STATES))
    .where(transaction_writer_partitions.c.writer_producer_id.in_(bindparam("producer_ids", expanding=True))),
)
_WRITERS: Final = select(transaction_writers.c.transactional_id, transaction_writers.c.writer_producer_id).where(
    transaction_writers.c.writer_producer_id.in_(bindparam("producer_ids", expanding=True))
)
# A reason that this version does not know, of a newer one or a damaged row, keeps nothing from being listed: a
# question about that one transaction tells of it.
_REASON: Final = transactions.c.fence_reason
_KNOWN: Final[list[Any]] = [
    *(column for column in transactions.c if column is not _REASON),
    case((_REASON.in_([each.value for each in FenceReason]), _REASON)).label("fence_reason"),
]
_ALL: Final[Select[Any]] = (
    select(*_KNOWN, server_now_ms().label("now_ms"))
    .where(transactions.c.transactional_id > bindparam("after_transactional_id"))
    .order_by(transactions.c.transactional_id)
    .limit(PAGE_ROWS)
)
# What is open where its coordinator does not list the partition hangs: it will not be ended there.  A comparison, for
# which SQLite too takes the partial index on open transactions, however many producers the partitions have seen.
_HANGING: Final = (
    select(producer_states, server_now_ms().label("now_ms"))
    .where(producer_states.c.transaction_first_offset >= 0)
    .where(producer_states.c.last_timestamp_ms < server_now_ms() - bindparam("age_ms"))
    .where(
        ~exists()
        .where(transactions.c.producer_id == producer_states.c.producer_id)
        .where(transactions.c.state.in_(_STATES))
        .where(transaction_partitions.c.transactional_id == transactions.c.transactional_id)
        .where(transaction_partitions.c.partition_id == producer_states.c.partition_id)
    )
    .where(
        ~exists()
        .where(transaction_writers.c.writer_producer_id == producer_states.c.producer_id)
        .where(transaction_writer_partitions.c.transactional_id == transaction_writers.c.transactional_id)
        .where(transaction_writer_partitions.c.writer_producer_id == transaction_writers.c.writer_producer_id)
        .where(transaction_writer_partitions.c.partition_id == producer_states.c.partition_id)
        .where(transactions.c.transactional_id == transaction_writers.c.transactional_id)
        .where(transactions.c.state.in_(_STATES))
    )
    .where(
        tuple_(producer_states.c.partition_id, producer_states.c.transaction_first_offset)
        > tuple_(bindparam("after_partition_id"), bindparam("after_transaction_first_offset"))
    )
    .order_by(producer_states.c.partition_id, producer_states.c.transaction_first_offset)
    .limit(PAGE_ROWS)
)
_HANGING_IN: Final = _HANGING.where(producer_states.c.partition_id.in_(bindparam("partition_ids", expanding=True)))


@dataclass(frozen=True, slots=True)
class TransactionFilter:
    """Which transactions are asked for: those that meet every condition given."""

    states: Collection[TransactionState] = ()
    producer_ids: Collection[int] = ()
    """Of its producer, or of a further writer while it runs."""

    running_longer_than_ms: int | None = None
    """Only transactions that run, and have for longer than this by the store's clock."""

    transactional_id_pattern: re.Pattern[str] | None = None
    """The whole transactional id matches it (KIP-1152)."""

    def accepts(self, row: TransactionMetadata, now_ms: int, writer_ids: Collection[int] = ()) -> bool:
        """Return whether the transaction, with these further writers, is one of those that are asked for."""
        pattern, longer_ms = self.transactional_id_pattern, self.running_longer_than_ms
        return (
            (not self.states or row.state in self.states)
            and (not self.producer_ids or not set(self.producer_ids).isdisjoint((row.producer_id, *writer_ids)))
            and (longer_ms is None or (row.state in RUNNING and now_ms - row.start_ms > longer_ms))
            and (pattern is None or pattern.fullmatch(row.transactional_id) is not None)
        )


@dataclass(frozen=True, slots=True)
class DescribedWriter:
    """A further writer of a transaction that runs."""

    producer_id: int
    has_reported: bool
    """Whether it has said that it wrote everything."""

    partitions: tuple[PartitionName, ...]
    """What it has written to; sorted."""


@dataclass(frozen=True, slots=True)
class DescribedTransaction:
    """The transaction of one transactional id, with those that take part in it."""

    row: TransactionMetadata
    now_ms: int
    """The store's clock at the moment of the snapshot."""

    partitions: tuple[PartitionName, ...]
    """What it and its further writers have written to, while it runs; sorted."""

    group_ids: tuple[str, ...]
    """The groups whose offsets it holds, while it runs; sorted."""

    writers: tuple[DescribedWriter, ...] = ()
    """Its further writers, while it runs; by producer id."""

    @property
    def is_running(self) -> bool:
        """Whether it is open, or decided and not complete."""
        return self.row.state in RUNNING


@dataclass(frozen=True, slots=True)
class HangingInPartition:
    """A transaction that is open in a partition, and that no coordinator will ever end there."""

    partition: PartitionName
    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    """Of the last marker; -1 without one."""

    start_offset: int
    last_timestamp_ms: int
    """When its producer last wrote there, by the store's clock."""

    age_ms: int
    """How long ago that was."""


def list_transactions(connection: Connection, wanted: TransactionFilter) -> list[TransactionMetadata]:
    """Return the transactional ids that were used and have not expired, each with its newest transaction, by name."""
    writers: dict[str, list[int]] = defaultdict(list)
    if wanted.producer_ids:
        for writer in connection.execute(_WRITERS, {"producer_ids": list(wanted.producer_ids)}):
            writers[writer.transactional_id].append(writer.writer_producer_id)
    accepted: list[TransactionMetadata] = []
    for found in pages(lambda work: work(connection), _ALL, {"after_transactional_id": ""}, PAGE_ROWS):
        for entry in found:
            row = rows.metadata_from_row(entry)
            if wanted.accepts(row, entry.now_ms, writers.get(row.transactional_id, ())):
                accepted.append(row)
    return accepted


def describe_transaction(connection: Connection, transactional_id: str) -> DescribedTransaction:
    """Return how the newest transaction of the transactional id stands.

    Raises:
        TransactionalIdNotFound: nobody has used it, or it has expired.
    """
    found = rows.read_row(connection, transactional_id)
    if found.row is None:
        raise TransactionalIdNotFound(f"nobody has used the transactional id {transactional_id[:80]!r}, or it expired")
    participants = participants_of(connection, transactional_id)
    names = names_of_partitions(connection, participants.all_partition_ids)
    writers = tuple(
        DescribedWriter(
            writer_id,
            participants.has_reported[writer_id],
            tuple(sorted(names[number] for number in partition_ids if number in names)),
        )
        for writer_id, partition_ids in sorted(participants.writers.items())
    )
    groups = rows.groups_of(connection, transactional_id)
    return DescribedTransaction(found.row, found.now_ms, tuple(sorted(names.values())), tuple(groups), writers)


def hanging_transactions(
    store: Store, connection: Connection, max_timeout_ms: int, partition_ids: Collection[int] | None = None
) -> list[HangingInPartition]:
    """Return what hangs, in these partitions or in all.

    Hanging is what is open in a partition for longer than `max_timeout_ms` and five minutes, while no transaction of
    the coordinator lists the partition.  Nothing of txnstore makes such transactions; damage does.

    Raises:
        PermissionDenied: row-level security may hide from this role who would end what it takes for hanging.
    """
    first: dict[str, Any] = {
        "age_ms": max_timeout_ms + HANGING_MARGIN_MS,
        "after_partition_id": -1,
        "after_transaction_first_offset": -1,
    }
    if partition_ids is not None:
        first["partition_ids"] = list(partition_ids)
    statement = _HANGING if partition_ids is None else _HANGING_IN
    found: list[HangingInPartition] = []
    for page in pages(lambda work: work(connection), statement, first, PAGE_ROWS):
        found += _hanging(connection, page)
    if found:
        _check_hangs(store, connection, found[0])
    return found


def _check_hangs(store: Store, connection: Connection, one: HangingInPartition) -> None:
    of_one = f"the transaction of producer {one.producer_id} in {one.partition}"
    judgement = f"{of_one} is owned by a transactional id, which will end it"
    check_sees_all(store, connection, COORDINATOR, judgement)


def _hanging(connection: Connection, page: Sequence[Row[Any]]) -> list[HangingInPartition]:
    names = names_of_partitions(connection, (row.partition_id for row in page))
    return [
        HangingInPartition(
            names[row.partition_id],
            row.producer_id,
            row.producer_epoch,
            row.coordinator_epoch,
            row.transaction_first_offset,
            row.last_timestamp_ms,
            row.now_ms - row.last_timestamp_ms,
        )
        for row in page
        if row.partition_id in names
    ]


def hanging_in_cluster(
    cluster: Cluster,
    left_out: LeftOut,
    max_timeout_ms: int,
    partition_ids: Collection[int] | None = None,
    *,
    retry_timeout_ms: int | None = None,
) -> list[HangingInPartition]:
    """Return what hangs, in these partitions or in all, wherever they live; see `hanging_transactions`.

    Of a database that is left out nothing is said, nor of what only it could know to be in order.

    Raises:
        PermissionDenied: as `hanging_transactions`, of the only database.
        TxnStoreError: the only database is away, or refuses.
    """
    found: list[HangingInPartition] = []
    # Of what a database coordinates that has joined since, nobody else knows that it is open.
    cluster.has_learned_of_others()
    for store in cluster.stores(left_out):
        suspects: list[HangingInPartition] = []
        with cluster.leaving_out(store.database_id, left_out):
            work = partial(hanging_transactions, store, max_timeout_ms=max_timeout_ms, partition_ids=partition_ids)
            suspects = store.read(work, retry_timeout_ms=retry_timeout_ms)
        away = [
            one
            for one in suspects
            # One that is alone has nobody to ask, whoever gave out the producer's id.
            if not cluster.is_alone and coordinator_of_producer(one.producer_id) != store.database_id
        ]
        explained = _explained(cluster, left_out, away, retry_timeout_ms)
        found += [one for one in suspects if one not in away or (one.producer_id, one.partition) not in explained]
    return sorted(found, key=lambda one: (one.partition, one.start_offset))


def _explained(
    cluster: Cluster, left_out: LeftOut, suspects: Iterable[HangingInPartition], retry_timeout_ms: int | None
) -> set[tuple[int, PartitionName]]:
    """Return producers with the partitions that their coordinators will end, or may, for all that is known."""
    by_coordinator: dict[int, list[HangingInPartition]] = {}
    for one in suspects:
        by_coordinator.setdefault(coordinator_of_producer(one.producer_id), []).append(one)
    explained: set[tuple[int, PartitionName]] = set()
    for database_id, those in by_coordinator.items():
        if database_id not in left_out:
            with cluster.leaving_out(database_id, left_out):
                coordinator = cluster.own(database_id)
                work = partial(_listed, coordinator, those)
                explained |= coordinator.read(work, retry_timeout_ms=retry_timeout_ms)
                continue
        explained |= {(one.producer_id, one.partition) for one in those}
    return explained


def _listed(
    coordinator: Store, suspects: Sequence[HangingInPartition], connection: Connection
) -> set[tuple[int, PartitionName]]:
    found = connection.execute(_LISTED, {"producer_ids": sorted({one.producer_id for one in suspects})}).all()
    names = names_of_partitions(connection, (row.partition_id for row in found))
    listed = {(row.producer_id, names[row.partition_id]) for row in found if row.partition_id in names}
    for one in suspects:
        if (one.producer_id, one.partition) not in listed:
            _check_hangs(coordinator, connection, one)
            break
    return listed

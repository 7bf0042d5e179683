"""A bench for tests of the coordinator: a topic of their own, and producers that count their sequence numbers."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import func, select, update

from tests.tools.elsewhere import Elsewhere, decide
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.schema import finished_transactions, record_batches, transaction_log, transactions
from txnstore.db.store import Store
from txnstore.groups.offsets import CommittedOffsets, read_offsets
from txnstore.log.append import Append, Appended
from txnstore.log.bounds import Bounds, read_bounds
from txnstore.log.codec import encode
from txnstore.log.fetch import fetch
from txnstore.log.topics import create_topic
from txnstore.model import (
    NO_PRODUCER,
    ControlType,
    GroupMembership,
    IsolationLevel,
    OffsetAndMetadata,
    ProducerIdentity,
    Record,
)
from txnstore.testing.manual_clock import ManualClock
from txnstore.transactions import rows
from txnstore.transactions.coordinator import Initialized, TransactionCoordinator
from txnstore.transactions.outcome import Ended
from txnstore.transactions.protocol import TransactionMetadata, TransactionState
from txnstore.transactions.transaction import SentOffsets


@dataclass
class Producer:
    """A client of one transactional id: it knows who it is and counts its sequence numbers."""

    coordinator: TransactionCoordinator
    transactional_id: str
    identity: ProducerIdentity = NO_PRODUCER
    sequences: dict[int, int] = field(default_factory=dict)

    def start(self, *arguments: Any, **options: Any) -> Initialized:
        initialized = self.coordinator.init_producer_id(self.transactional_id, *arguments, **options)
        self.become(initialized.identity)
        return initialized

    def become(self, identity: ProducerIdentity) -> None:
        self.identity = identity
        self.sequences.clear()

    def twin(self) -> Producer:
        """Return another process with the same transactional id, as it is now."""
        return Producer(self.coordinator, self.transactional_id, self.identity, dict(self.sequences))

    def batch(self, partition_id: int, *values: bytes) -> Append:
        first = self.sequences.get(partition_id, 0)
        self.sequences[partition_id] = first + len(values)
        records = [Record(value) for value in values]
        return Append(partition_id, encode(records, producer=self.identity, base_sequence=first, is_transactional=True))

    def send(self, partition_id: int, *values: bytes) -> Appended:
        appends = [self.batch(partition_id, *values)]
        return self.coordinator.append(self.transactional_id, self.identity, appends)[0]

    def send_offsets(self, group_id: str, offsets: Mapping[int, int]) -> None:
        self.coordinator.send_offsets(self.transactional_id, self.identity, sent_offsets(group_id, offsets))

    def end(self, *, commit: bool, **rest: Any) -> Ended:
        ended = self.coordinator.end_transaction(self.transactional_id, self.identity, commit=commit, **rest)
        self.become(ended.identity)
        return ended

    def commit(self, **rest: Any) -> Ended:
        return self.end(commit=True, **rest)

    def abort(self) -> Ended:
        return self.end(commit=False)

    def decide(self, *, commit: bool) -> None:
        """End the transaction as a process does that dies before it has written the first marker."""
        decide(self.coordinator.store, self.transactional_id, self.identity, commit=commit)


def sent_offsets(group_id: str, offsets: Mapping[int, int]) -> SentOffsets:
    return SentOffsets(
        GroupMembership(group_id), {partition_id: OffsetAndMetadata(offset) for partition_id, offset in offsets.items()}
    )


@dataclass
class Bench:
    """A store, a topic of two partitions that nobody else uses, and looks at what stands in the tables."""

    store: Store
    clock: ManualClock
    partition_ids: tuple[int, ...]
    prefix: str
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def new_id(self) -> str:
        return f"{self.prefix}-{next(self.numbers)}"

    def producer(self, transactional_id: str | None = None, *, writes_elsewhere: bool = False) -> Producer:
        """Return a producer that has not been started."""
        coordinator = TransactionCoordinator(self.store, Elsewhere(self.store) if writes_elsewhere else None)
        return Producer(coordinator, transactional_id or self.new_id())

    def started(self, *, writes_elsewhere: bool = False, **options: Any) -> Producer:
        producer = self.producer(writes_elsewhere=writes_elsewhere)
        producer.start(**options)
        return producer

    def set_store(self, settings: Mapping[str, str]) -> None:
        self.store.write(lambda connection: change_store_settings(connection, settings))

    def row(self, transactional_id: str) -> TransactionMetadata:
        row = self.store.read(lambda connection: rows.read_row(connection, transactional_id)).row
        assert row is not None
        return row

    def is_known(self, transactional_id: str) -> bool:
        return self.store.read(lambda connection: rows.read_row(connection, transactional_id)).row is not None

    def set_row(self, transactional_id: str, **columns: Any) -> None:
        """Put the coordinator's row into a state that takes long to get into."""
        statement = update(transactions).where(transactions.c.transactional_id == transactional_id).values(columns)
        assert self.store.write(lambda connection: connection.execute(statement).rowcount) == 1

    def entries(self, transactional_id: str) -> int:
        """Return how many rows the journal has of the transactional id."""
        of_id = transaction_log.c.transactional_id == transactional_id
        statement = select(func.count()).select_from(transaction_log).where(of_id)
        found: int = self.store.read(lambda connection: connection.execute(statement).scalar_one())
        return found

    def journal(self, transactional_id: str) -> list[tuple[TransactionState, int]]:
        """Return each state change with the epoch after it."""
        statement = (
            select(transaction_log)
            .where(transaction_log.c.transactional_id == transactional_id)
            .order_by(transaction_log.c.entry_id)
        )
        found = self.store.read(lambda connection: connection.execute(statement).all())
        return [(change.state, change.producer_epoch) for row in found for change in rows.changes_of(row)]

    def participants(self, transactional_id: str) -> tuple[list[int], list[str]]:
        return self.store.read(
            lambda connection: (
                rows.partitions_of(connection, transactional_id),
                rows.groups_of(connection, transactional_id),
            )
        )

    def read(self, partition_id: int, isolation: IsolationLevel = IsolationLevel.READ_COMMITTED) -> list[bytes | None]:
        """Return the values that a reader from the beginning gets."""
        pages = self.store.read(lambda connection: fetch(connection, {partition_id: 0}, isolation=isolation))
        return [record.value for batch in pages[partition_id].batches for record in batch.records()]

    def bounds(self, partition_id: int) -> Bounds:
        return self.store.read(lambda connection: read_bounds(connection, [partition_id]))[partition_id]

    def offsets(self, group_id: str) -> CommittedOffsets:
        return self.store.read(lambda connection: read_offsets(connection, group_id, self.partition_ids))

    def markers(self, partition_id: int) -> list[tuple[int, ControlType, int]]:
        """Return offset, kind and epoch of each marker."""
        statement = (
            select(record_batches.c.last_offset, record_batches.c.control_type, record_batches.c.producer_epoch)
            .where(record_batches.c.partition_id == partition_id, record_batches.c.control_type.is_not(None))
            .order_by(record_batches.c.last_offset)
        )
        found = self.store.read(lambda connection: connection.execute(statement).all())
        return [(offset, ControlType(kind), epoch) for offset, kind, epoch in found]

    def finished(self, partition_id: int) -> list[Any]:
        statement = (
            select(finished_transactions)
            .where(finished_transactions.c.partition_id == partition_id)
            .order_by(finished_transactions.c.marker_offset)
        )
        return list(self.store.read(lambda connection: connection.execute(statement).all()))


def bench_on(store: Store, clock: ManualClock) -> Bench:
    """Make the topic in a store that goes by the clock."""
    prefix = uuid.uuid4().hex[:12]
    topic = store.write(lambda connection: create_topic(connection, f"topic-{prefix}", partition_count=2))
    return Bench(store, clock, topic.partition_ids, prefix)

"""Writes of a transaction to other databases than its coordinator's.

As in Kafka, a partition or group is made a part of the transaction first, durably, at the coordinator; only then is
anything written where it lives.  The end of the transaction raises the producer's epoch there, and that of its further
writers, in every part that was added, whether anything was written or not (KIP-890): whatever comes late finds that,
and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from sqlalchemy import Connection

from txnstore.db.cluster.cluster import Cluster, repaired
from txnstore.db.cluster.locality import Locality
from txnstore.db.store import Store, make_durable
from txnstore.errors import (
    InvalidProducerEpoch,
    InvalidTransactionState,
    TxnStoreError,
    UnknownTopicOrPartition,
)
from txnstore.groups.offsets_from_elsewhere import add_offsets_from_elsewhere, announce_offset_producer
from txnstore.log.append import Append, Appended, UnannouncedProducerError, announce, append, check_sizes, find_appended
from txnstore.model import ProducerIdentity
from txnstore.transactions import protocol, rows
from txnstore.transactions.protocol import TransactionWriter, check_open, check_unreported
from txnstore.transactions.transaction import (
    LockedTransaction,
    SentOffsets,
    check_batches,
    fencing_other_starts,
    write_in_time,
)

Result = TypeVar("Result")
#: How often a producer is made known where it writes to; each time it was forgotten in between.
ANNOUNCE_TRIES: Final = 3


def announced(
    producer: ProducerIdentity,
    send: Callable[[], Result],
    announce_there: Callable[[], object],
    verify: Callable[[], object],
) -> Result:
    """Send what is taken only where the producer is known; where it is not, make it known, then `verify` that it may.

    In this order, see `log.append.announce`: `verify` asks the coordinator whether the transaction is still open.

    Raises:
        InvalidTransactionState: the producer is forgotten at once, again and again.
        TxnStoreError: what `verify` and `send` raise.
    """
    for _ in range(ANNOUNCE_TRIES):
        try:
            return send()
        except UnannouncedProducerError:
            announce_there()
            verify()
    raise InvalidTransactionState(
        f"producer {producer} was forgotten before it had written anything: is producer.id.expiration.ms too short?"
    )


def announce_at(
    cluster: Cluster,
    database_id: int,
    producer: ProducerIdentity,
    partition_ids: Collection[int],
    retry_timeout_ms: int | None,
) -> None:
    """Let partitions of another database know a producer."""
    cluster.write_at(
        database_id,
        lambda connection: announce(connection, producer, partition_ids),
        retry_timeout_ms=retry_timeout_ms,
    )


@dataclass(frozen=True, slots=True)
class RemoteTransaction:
    """The parts of one producer's transaction that live in other databases than `coordinator`."""

    coordinator: Store
    cluster: Cluster
    transactional_id: str
    producer: ProducerIdentity
    retry_timeout_ms: int | None

    def add_partitions(self, partition_ids: Iterable[int], added: set[int] | None) -> None:
        """Let those of the partitions take part that live elsewhere and are not `added`; enter them there."""
        known = set() if added is None else added
        wanted = set(partition_ids) - known
        leaders = self.cluster.leaders_of(wanted)
        for number in wanted - leaders.keys():
            raise UnknownTopicOrPartition(f"there is no partition with id {number}; was its topic deleted?")
        new = {number for number, leader in leaders.items() if leader != self.coordinator.database_id}
        if new:
            self.add(new, ())
            known |= new

    def add(self, partition_ids: Collection[int], group_ids: Collection[str]) -> None:
        """Let partitions and groups take part, in one database transaction at the coordinator."""
        work = partial(self._add, partition_ids, group_ids)
        write_in_time(
            self.coordinator, self.cluster, self.transactional_id, work, retry_timeout_ms=self.retry_timeout_ms
        )

    def append(self, database_id: int, appends: Sequence[Append], added: set[int] | None) -> list[Appended]:
        """Append batches in one other database, whose partitions take part before."""
        check_batches(self.producer, appends)
        check_sizes(appends)
        self.add_partitions((item.partition_id for item in appends), added)
        return self._append(database_id, appends, added)

    def send_offsets(self, sent: SentOffsets) -> None:
        """Let the transaction hold offsets of a group that takes part already."""

        def work(connection: Connection) -> None:
            # What the decision counts in is not to be lost with the last commits of its own database.
            make_durable(connection)
            add_offsets_from_elsewhere(connection, sent.committer, sent.offsets, self.producer)

        def announce_here(connection: Connection) -> None:
            announce_offset_producer(connection, self.producer)

        database_id = self.cluster.coordinator_id_of(sent.committer.group_id)

        def write(change: Callable[[Connection], None]) -> None:
            self.cluster.write_at(database_id, change, retry_timeout_ms=self.retry_timeout_ms)

        try:
            announced(
                self.producer,
                lambda: repaired(self.cluster, database_id, lambda _: write(work)),
                partial(write, announce_here),
                lambda: self.add((), [sent.committer.group_id]),
            )
        except InvalidProducerEpoch:
            self._explain()
            raise

    def send_rest(
        self, appends: Sequence[Append], offsets: Sequence[SentOffsets]
    ) -> tuple[list[Appended] | None, Sequence[Append], Sequence[SentOffsets]]:
        """Send what belongs to other databases; return where its batches stand, and what belongs to this one.

        What was sent and decided before, and whose answer was lost, is not sent again: None, see `find`.

        Raises:
            TxnStoreError: see `append` and `send_offsets`; some of it may have been sent.
        """
        leaders = self.cluster.by_leader(appends)
        own_appends = leaders.pop(self.coordinator.database_id, [])
        away = [sent for sent in offsets if self._coordinator_of(sent) != self.coordinator.database_id]
        own_offsets = [sent for sent in offsets if self._coordinator_of(sent) == self.coordinator.database_id]
        if not leaders and not away:
            return [], own_appends, own_offsets
        elsewhere = [item for items in leaders.values() for item in items]
        check_batches(self.producer, appends)
        check_sizes(appends)
        partition_ids = {item.partition_id for item in elsewhere}
        group_ids = {sent.committer.group_id for sent in away}
        work = partial(self._add_unless_ended, partition_ids, group_ids)
        if write_in_time(
            self.coordinator, self.cluster, self.transactional_id, work, retry_timeout_ms=self.retry_timeout_ms
        ):
            return None, own_appends, own_offsets
        outcomes = self.cluster.each(
            {database_id: partial(self._append, database_id, items) for database_id, items in leaders.items()}
        )
        for outcome in outcomes.values():
            if isinstance(outcome, TxnStoreError):
                raise outcome
        for sent in away:
            self.send_offsets(sent)
        appended = [place for outcome in outcomes.values() if isinstance(outcome, list) for place in outcome]
        return appended, own_appends, own_offsets

    def _coordinator_of(self, sent: SentOffsets) -> int:
        return self.cluster.coordinator_id_of(sent.committer.group_id)

    def _append(self, database_id: int, appends: Sequence[Append], added: set[int] | None = None) -> list[Appended]:
        partition_ids = {item.partition_id for item in appends}

        def announce_there() -> None:
            if added is not None:
                # A try that ends before the coordinator has answered leaves it to the next one to ask.
                added.difference_update(partition_ids)
            announce_at(self.cluster, database_id, self.producer, partition_ids, self.retry_timeout_ms)

        def verify() -> None:
            self.add(partition_ids, ())
            if added is not None:
                added.update(partition_ids)

        try:
            work = partial(_append_at, self.cluster, database_id, appends, self.retry_timeout_ms)
            return announced(self.producer, work, announce_there, verify)
        except InvalidProducerEpoch:
            self._explain()
            raise

    def find(self, appends: Sequence[Append]) -> list[Appended]:
        """Return where those of the batches stand that belong to other databases, once they have their markers."""
        found: list[Appended] = []
        for database_id, items in self.cluster.by_leader(appends).items():
            if database_id == self.coordinator.database_id:
                continue
            store = self.cluster.own(database_id)
            found += store.read(
                lambda connection, items=items: find_appended(connection, items),  # type: ignore[misc]
                retry_timeout_ms=self.retry_timeout_ms,
            )
        return found

    def _add(self, partition_ids: Collection[int], group_ids: Collection[str], connection: Connection) -> None:
        transaction = LockedTransaction.lock(
            connection, self.transactional_id, Locality.of(self.coordinator, self.cluster)
        )
        transaction.add(self.producer, partition_ids, group_ids)
        transaction.save("AddPartitionsToTxn" if partition_ids else "AddOffsetsToTxn")

    def _add_unless_ended(
        self, partition_ids: Collection[int], group_ids: Collection[str], connection: Connection
    ) -> bool:
        row = rows.lock_row(connection, self.transactional_id).row
        if row is not None and row.is_repetition(self.producer):
            return True
        self._add(partition_ids, group_ids, connection)
        return False

    def _explain(self) -> None:
        """Raise what the coordinator says of a producer whose epoch is too old elsewhere, if it does."""

        def ask(connection: Connection) -> None:
            found = rows.read_row(connection, self.transactional_id)
            with fencing_other_starts(connection, found.row, self.producer):
                protocol.add_to_transaction(found.row, self.producer, now_ms=found.now_ms, holds_all=True)

        self.coordinator.read(ask)


@dataclass(frozen=True, slots=True)
class RemoteWriter:
    """A writer's parts in other databases than `coordinator`."""

    coordinator: Store
    cluster: Cluster
    writer: TransactionWriter
    retry_timeout_ms: int | None

    def append(self, leaders: Mapping[int, Sequence[Append]]) -> list[Appended]:
        """Append batches to each of some databases, all or none in each.

        Raises:
            ProducerFenced: the transaction is over; the text says how it ended.
            InvalidTransactionState: the writer has reported already.
            TxnStoreError: see `log.append.append`.
        """
        partition_ids = {item.partition_id for items in leaders.values() for item in items}
        has_reported = write_in_time(
            self.coordinator,
            self.cluster,
            self._transactional_id,
            partial(self._enter_partitions, partition_ids),
            retry_timeout_ms=self.retry_timeout_ms,
        )
        found: list[Appended] = []
        for database_id, items in leaders.items():
            found += self._append(database_id, items, has_reported=has_reported)
        return found

    def _append(self, database_id: int, appends: Sequence[Append], *, has_reported: bool) -> list[Appended]:
        def check(appended: list[Appended]) -> None:
            is_new = not all(place.is_duplicate for place in appended)
            check_unreported(self.writer, is_new=is_new, has_reported=has_reported)

        partition_ids = {item.partition_id for item in appends}
        try:
            return announced(
                self.writer.identity,
                partial(_append_at, self.cluster, database_id, appends, self.retry_timeout_ms, check),
                partial(
                    announce_at, self.cluster, database_id, self.writer.identity, partition_ids, self.retry_timeout_ms
                ),
                lambda: self._verify(partition_ids),
            )
        except InvalidProducerEpoch:
            found = self.coordinator.read(lambda connection: rows.read_row(connection, self._transactional_id))
            check_open(found.row, self._transactional_id, self.writer.transaction, now_ms=found.now_ms)
            raise

    def _verify(self, partition_ids: Collection[int]) -> None:
        self.coordinator.write(partial(self._enter_partitions, partition_ids), retry_timeout_ms=self.retry_timeout_ms)

    def _enter_partitions(self, partition_ids: Collection[int], connection: Connection) -> bool:
        """Let partitions take part as the writer's; return whether it has reported."""
        locked = rows.lock_row(connection, self._transactional_id)
        check_open(locked.row, self._transactional_id, self.writer.transaction, now_ms=locked.now_ms)
        has_reported = rows.has_reported(connection, self.writer)
        known = rows.participants_of(connection, self._transactional_id).writers.get(self.writer.writer_id, ())
        new = set(partition_ids) - set(known)
        if new and has_reported:
            raise InvalidTransactionState(
                f"writer {self.writer.writer_id} of {self._transactional_id[:80]!r} has reported that it wrote"
                " everything; nothing was appended"
            )
        if new:
            make_durable(connection)
        rows.add_writer_partitions(connection, self.writer, new)
        return has_reported

    @property
    def _transactional_id(self) -> str:
        return self.writer.transactional_id


def _append_at(
    cluster: Cluster,
    database_id: int,
    appends: Sequence[Append],
    retry_timeout_ms: int | None,
    check: Callable[[list[Appended]], None] = lambda _: None,
) -> list[Appended]:
    """Append batches to a database whose transactions are coordinated elsewhere; `check` may still refuse it."""

    def work(connection: Connection) -> list[Appended]:
        make_durable(connection)
        appended = append(connection, appends, coordinated=True, from_elsewhere=True)
        check(appended)
        return appended

    def write(_: Store) -> list[Appended]:
        return cluster.write_at(database_id, work, wakes_readers=True, retry_timeout_ms=retry_timeout_ms)

    return repaired(cluster, database_id, write)

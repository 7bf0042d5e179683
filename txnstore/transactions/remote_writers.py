"""This file is what a transaction's further writer writes to other databases than the transaction's coordinator's.

As a producer's parts (`remote_parts`): a partition takes part first, as the writer's; then the batches are appended
where it lives.  The transaction's end raises the writer's epoch in each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection

from txnstore.db.cluster.cluster import Cluster, repaired
from txnstore.db.store import Store
from txnstore.errors import InvalidProducerEpoch, InvalidTransactionState
from txnstore.log.append import Append, Appended, append
from txnstore.transactions import rows, writer_rows
from txnstore.transactions.remote_parts import announce_at, announced
from txnstore.transactions.timeouts import write_in_time
from txnstore.transactions.writer_rules import TransactionWriter, check_open, check_unreported


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
            self._transactional_id,
            partial(self._enter_partitions, partition_ids),
            retry_timeout_ms=self.retry_timeout_ms,
        )
        found: list[Appended] = []
        for database_id, items in leaders.items():
            found += self._append(database_id, items, has_reported=has_reported)
        return found

    def _append(self, database_id: int, appends: Sequence[Append], *, has_reported: bool) -> list[Appended]:
        def work(connection: Connection) -> list[Appended]:
            appended = append(connection, appends, coordinated=True, from_elsewhere=True)
            check_unreported(self.writer, appended, has_reported=has_reported)
            return appended

        def write(_: Store) -> list[Appended]:
            return self.cluster.write_at(database_id, work, wakes_readers=True, retry_timeout_ms=self.retry_timeout_ms)

        partition_ids = {item.partition_id for item in appends}
        try:
            return announced(
                self.writer.identity,
                partial(repaired, self.cluster, database_id, write),
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
        has_reported = writer_rows.has_reported(connection, self.writer)
        known = writer_rows.participants_of(connection, self._transactional_id).writers.get(self.writer.writer_id, ())
        new = set(partition_ids) - set(known)
        if new and has_reported:
            raise InvalidTransactionState(
                f"writer {self.writer.writer_id} of {self._transactional_id[:80]!r} has reported that it wrote"
                " everything; nothing was appended"
            )
        writer_rows.add_partitions(connection, self.writer, new)
        return has_reported

    @property
    def _transactional_id(self) -> str:
        return self.writer.transactional_id

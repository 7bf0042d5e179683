"""Partitions within one database transaction: their heads are locked once, then everything follows.

Batches and markers are placed in memory while the locks are held, and written together by `save`: one INSERT, one
UPDATE of the heads, one of the producers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from sqlalchemy import Connection, insert

from txnstore.db.schema import finished_transactions, record_batches
from txnstore.log.codec import EncodedBatch
from txnstore.log.heads import Head, lock_heads, save_heads
from txnstore.log.producers import ProducerKey, read_producer_states, save_producer_states
from txnstore.log.sequences import ProducerInPartition, RecentBatch, last_sequence_of, remember
from txnstore.model import NO_PRODUCER_ID, NO_SEQUENCE, ControlType, ProducerIdentity

#: Of the state of a producer that no marker has touched.
NO_COORDINATOR_EPOCH: Final = -1

_INSERT_BATCHES: Final = insert(record_batches)
_INSERT_FINISHED: Final = insert(finished_transactions)


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a batch will stand."""

    base_offset: int
    last_offset: int
    begins_transaction: bool = False


@dataclass
class LockedPartitions:
    """Changes of some partitions; nothing is written before `save`."""

    connection: Connection
    heads: Mapping[int, Head]
    now_ms: int
    _known: dict[ProducerKey, ProducerInPartition]
    _changed: dict[ProducerKey, ProducerInPartition] = field(default_factory=dict)
    _batches: list[dict[str, Any]] = field(default_factory=list)
    _finished: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def lock(
        cls,
        connection: Connection,
        partition_ids: Iterable[int],
        producers: Iterable[ProducerKey],
        *,
        with_open: bool = False,
    ) -> Self:
        """Lock the heads of partitions, at least one, and read what they know of these producers.

        `with_open` reads every producer that has a transaction open there as well, as `finish` needs it.

        Raises:
            UnknownTopicOrPartition: a partition is not in this database.
        """
        locked = lock_heads(connection, partition_ids)
        wanted = {key for key in producers if key[1] != NO_PRODUCER_ID}
        known = read_producer_states(connection, wanted, open_in=locked.heads if with_open else ())
        return cls(connection, locked.heads, locked.now_ms, known)

    def producer_state(self, key: ProducerKey) -> ProducerInPartition | None:
        """Return what the partition knows of the producer, with the changes so far."""
        return self._changed.get(key) or self._known.get(key)

    def place(self, partition_id: int, batch: EncodedBatch) -> Placed:
        """Give the batch the partition's next offsets, and remember it for its producer."""
        row = self._place(partition_id, batch)
        if batch.producer_id == NO_PRODUCER_ID:
            return Placed(row["base_offset"], row["last_offset"])
        recent = RecentBatch(
            batch.base_sequence,
            last_sequence_of(batch.base_sequence, batch.record_count),
            row["base_offset"],
            row["last_offset"],
            batch.max_timestamp_ms,
        )
        state = self._state_after(partition_id, batch, recent)
        return Placed(recent.base_offset, recent.last_offset, state.transaction_first_offset == recent.base_offset)

    def finish(self, partition_id: int, marker: EncodedBatch) -> None:
        """Place a marker: the open transaction of its producer is over in the partition."""
        assert marker.control_type is not None
        key = (partition_id, marker.producer_id)
        state = self.producer_state(key)
        row = self._place(partition_id, marker)
        if state is None:
            state = ProducerInPartition(
                marker.producer_id, marker.producer_epoch, (), NO_COORDINATOR_EPOCH, self.now_ms, None
            )
        # The epoch is new, so the producer's sequence numbers begin at 0 again (KIP-890).
        self._changed[key] = replace(
            state,
            epoch=marker.producer_epoch,
            recent_batches=(),
            coordinator_epoch=marker.coordinator_epoch or 0,
            last_timestamp_ms=self.now_ms,
            transaction_first_offset=None,
        )
        if state.transaction_first_offset is not None:
            self._finish(partition_id, marker.control_type, state, row["last_offset"])

    def announce(self, producer: ProducerIdentity) -> None:
        """Write down at once that the producer may append where it was not known."""
        state = ProducerInPartition(producer.producer_id, producer.epoch, (), NO_COORDINATOR_EPOCH, self.now_ms, None)
        keys = {(partition_id, producer.producer_id) for partition_id in self.heads}
        new = dict.fromkeys(keys - self._known.keys(), state)
        save_producer_states(self.connection, new, self._known)
        self._known.update(new)

    def save(self) -> None:
        """Write what was placed."""
        if not self._batches:
            return
        self.connection.execute(_INSERT_BATCHES, self._batches)
        moved = sorted({row["partition_id"] for row in self._batches})
        save_heads(self.connection, [self.heads[partition_id] for partition_id in moved])
        save_producer_states(self.connection, self._changed, self._known)
        if self._finished:
            self.connection.execute(_INSERT_FINISHED, self._finished)

    def _place(self, partition_id: int, batch: EncodedBatch) -> dict[str, Any]:
        head = self.heads[partition_id]
        base_offset = head.next_offset
        head.next_offset += batch.record_count
        head.running_max_timestamp_ms = max(head.running_max_timestamp_ms, batch.max_timestamp_ms)
        row = batch.columns()
        row["partition_id"] = partition_id
        row["base_offset"] = base_offset
        row["last_offset"] = head.next_offset - 1
        row["running_max_timestamp_ms"] = head.running_max_timestamp_ms
        self._batches.append(row)
        return row

    def _state_after(self, partition_id: int, batch: EncodedBatch, recent: RecentBatch) -> ProducerInPartition:
        assert batch.base_sequence != NO_SEQUENCE, "an idempotent producer numbers its records"
        key = (partition_id, batch.producer_id)
        state = self.producer_state(key)
        if state is None:
            state = ProducerInPartition(
                batch.producer_id, batch.producer_epoch, (), NO_COORDINATOR_EPOCH, self.now_ms, None
            )
        first_offset = state.transaction_first_offset
        if batch.is_transactional and first_offset is None:
            # Where the open transaction begins in this partition: no reader of committed records goes past it.
            first_offset = recent.base_offset
        same_epoch = batch.producer_epoch == state.epoch
        self._changed[key] = replace(
            state,
            epoch=batch.producer_epoch,
            recent_batches=remember(state.recent_batches if same_epoch else (), recent),
            last_timestamp_ms=self.now_ms,
            transaction_first_offset=first_offset,
        )
        return self._changed[key]

    def _finish(
        self, partition_id: int, control_type: ControlType, state: ProducerInPartition, marker_offset: int
    ) -> None:
        assert state.transaction_first_offset is not None
        self._finished.append(
            {
                "partition_id": partition_id,
                "marker_offset": marker_offset,
                "producer_id": state.producer_id,
                "producer_epoch": state.epoch,
                "first_offset": state.transaction_first_offset,
                "outcome": int(control_type),
                "last_stable_offset": min(self._open_offsets(partition_id), default=marker_offset + 1),
            }
        )

    def _open_offsets(self, partition_id: int) -> Iterable[int]:
        """Return where each transaction that is still open in the partition begins."""
        states = {**self._known, **self._changed}
        for (of_partition_id, _), state in states.items():
            if of_partition_id == partition_id and state.transaction_first_offset is not None:
                yield state.transaction_first_offset


def identity_of(batch: EncodedBatch) -> ProducerIdentity:
    """Return who wrote the batch."""
    return ProducerIdentity(batch.producer_id, batch.producer_epoch)

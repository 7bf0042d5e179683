"""The rules of a compacted partition, of whose log records are missing: what can be proven of the rest.

What was removed cannot be told from what was lost.  But what is left is in order, below where the partition is
compacted there is one record of each key and no aborted one, and whatever is left of a transaction has its ending.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

from sqlalchemy import Connection, bindparam, exists, select

from txnstore.db.schema import finished_transactions, record_batches
from txnstore.db.sqlite.seen_keys import SeenKeys
from txnstore.log.bounds import Bounds
from txnstore.log.codec import RecordBatch
from txnstore.log.columns import unpack_integers
from txnstore.log.partition_storage import PartitionStorage, read_horizons
from txnstore.log.sequences import increment_sequence
from txnstore.model import NO_PRODUCER_ID, SEQUENCE_MAX, ControlType
from txnstore.verification.invariants import Invariant, Place, Violation

_DIGEST_BYTES: Final = 16

_IN_RANGE: Final = (
    record_batches.c.partition_id == bindparam("of_partition_id"),
    record_batches.c.last_offset.between(bindparam("from_offset"), bindparam("through_offset")),
)
_OUTCOMES: Final = (
    select(record_batches.c.last_offset, finished_transactions.c.outcome)
    .join(
        finished_transactions,
        (finished_transactions.c.partition_id == record_batches.c.partition_id)
        & (finished_transactions.c.producer_id == record_batches.c.producer_id)
        & (finished_transactions.c.producer_epoch == record_batches.c.producer_epoch),
    )
    .where(*_IN_RANGE, record_batches.c.is_transactional, record_batches.c.control_type.is_(None))
)
_ENDED: Final = select(
    finished_transactions.c.marker_offset, finished_transactions.c.producer_id, finished_transactions.c.outcome
).where(
    finished_transactions.c.partition_id == bindparam("of_partition_id"),
    finished_transactions.c.marker_offset.between(bindparam("from_offset"), bindparam("through_offset")),
)
_WITHOUT_MARKER: Final = _ENDED.where(
    ~exists().where(
        record_batches.c.partition_id == finished_transactions.c.partition_id,
        record_batches.c.last_offset == finished_transactions.c.marker_offset,
        record_batches.c.control_type.is_not(None),
    )
)


class CompactedCheck:
    """A compacted partition, whose batches are taken in order; close it after use."""

    def __init__(self, connection: Connection, storage: PartitionStorage, bounds: Bounds) -> None:
        """Check the partition that `storage` is about; an open transaction may begin at the last stable offset."""
        self._connection = connection
        self._storage = storage
        self._bounds = bounds
        self._deleted_offset = max((offset for offset, from_ms in read_horizons(storage) if from_ms == 0), default=0)
        self._running_max_ms = -1
        #: Of each producer: its epoch, and the last sequence number of its records in it; None after a marker.
        self._producers: dict[int, tuple[int, int | None]] = {}
        self._keys: SeenKeys | None = None

    def close(self) -> None:
        """Forget the keys."""
        if self._keys is not None:
            self._keys.close()

    def index_violations(self, from_offset: int, through_offset: int) -> Iterator[Violation]:
        """Return which transactions of the index have no marker in this range of the log."""
        for row in self._connection.execute(_WITHOUT_MARKER, self._range(from_offset, through_offset)):
            seen = f"the index has a transaction of producer {row.producer_id}, and there is no marker here"
            yield self._violation(Invariant.INDEX_KNOWN, row.marker_offset, seen)

    def page_violations(self, batches: Sequence[RecordBatch]) -> Iterator[Violation]:
        """Return what is wrong with the next batches, each of which agrees with its checksum."""
        if not batches:
            return
        range_ = self._range(batches[0].last_offset, batches[-1].last_offset)
        outcomes = {row.last_offset: row.outcome for row in self._connection.execute(_OUTCOMES, range_)}
        ended = {row.marker_offset: row for row in self._connection.execute(_ENDED, range_)}
        for batch in batches:
            _, last_sequence = self._producers.get(batch.producer.producer_id, (-1, None))
            yield from self._order_violations(batch)
            if batch.is_control:
                # One that ends nothing has no row: its transaction wrote nothing here, or nothing of it is left.
                if last_sequence is not None or batch.last_offset in ended:
                    yield from self._marker_violations(batch, ended.get(batch.last_offset))
            elif batch.last_offset >= self._bounds.log_start_offset:
                # What lies below waits to be deleted: no pass has read its keys, and it may be of an open transaction.
                yield from self._record_violations(batch, outcomes.get(batch.last_offset))

    def _range(self, from_offset: int, through_offset: int) -> dict[str, int]:
        of_partition = {"of_partition_id": self._storage.partition_id}
        return of_partition | {"from_offset": from_offset, "through_offset": through_offset}

    def _violation(self, invariant: Invariant, offset: int, seen: str) -> Violation:
        return Violation(invariant, Place(self._storage.partition_id, offset), seen)

    # --- order --------------------------------------------------------------------------------------------------------

    def _order_violations(self, batch: RecordBatch) -> Iterator[Violation]:
        """Return how times, epochs and sequence numbers fall."""
        row: Any = batch.row
        running_max_ms = row.running_max_timestamp_ms
        largest_ms = self._running_max_ms if batch.is_control else max(self._running_max_ms, batch.max_timestamp_ms)
        if running_max_ms < largest_ms:
            seen = f"{running_max_ms}, the largest so far is {largest_ms}"
            yield self._violation(Invariant.TIMES_RUN, batch.base_offset, seen)
        self._running_max_ms = max(self._running_max_ms, running_max_ms)
        producer = batch.producer
        if producer.producer_id == NO_PRODUCER_ID:
            return
        known_epoch, last_sequence = self._producers.get(producer.producer_id, (-1, None))
        ends_records = batch.is_control and last_sequence is not None
        if producer.epoch < known_epoch or (ends_records and producer.epoch == known_epoch):
            seen = f"{'a marker' if batch.is_control else 'records'} of producer {producer} after epoch {known_epoch}"
            yield self._violation(Invariant.EPOCHS_RISE, batch.base_offset, seen)
        last: int | None = None
        if not batch.is_control:
            last = increment_sequence(batch.base_sequence, batch.last_offset - batch.base_offset)
            if producer.epoch == known_epoch and last_sequence is not None:
                # From one to the next with what is missing in between; after the largest number comes 0.
                ahead = (batch.base_sequence - last_sequence) % (SEQUENCE_MAX + 1)
                if not 0 < ahead <= SEQUENCE_MAX // 2:
                    seen = f"producer {producer} has sequence {batch.base_sequence} after {last_sequence}"
                    yield self._violation(Invariant.SEQUENCES_FOLLOW, batch.base_offset, seen)
        self._producers[producer.producer_id] = producer.epoch, last

    # --- transactions and keys ----------------------------------------------------------------------------------------

    def _marker_violations(self, marker: RecordBatch, ended: Any) -> Iterator[Violation]:
        found = None if ended is None else (ended.producer_id, ended.outcome)
        if found != (marker.producer.producer_id, marker.control_type):
            seen = f"the index has {found} for the marker of producer {marker.producer}"
            yield self._violation(Invariant.INDEX_KNOWN, marker.last_offset, seen)

    def _record_violations(self, batch: RecordBatch, outcome: int | None) -> Iterator[Violation]:
        if batch.row.is_transactional:
            if outcome is None and batch.last_offset < self._bounds.last_stable_offset:
                seen = f"the transaction of producer {batch.producer} has records and no ending"
                yield self._violation(Invariant.INDEX_KNOWN, batch.base_offset, seen)
            if outcome == ControlType.ABORT and batch.last_offset < self._storage.compacted_offset:
                seen = f"aborted records of producer {batch.producer} are left"
                yield self._violation(Invariant.ONE_OF_EACH_KEY, batch.base_offset, seen)
            if outcome != ControlType.COMMIT:
                return
        # A pass that ended at the log start has not looked at the batch in which that lies.
        if max(batch.base_offset, self._bounds.log_start_offset) < self._storage.compacted_offset:
            yield from self._key_violations(batch)

    def _key_violations(self, batch: RecordBatch) -> Iterator[Violation]:
        row = batch.row
        tombstones: Any = range(batch.record_count) if row.value_positions is None else ()
        if row.null_values is not None:
            tombstones = frozenset(unpack_integers(row.null_values, "null_values"))
        keyed: list[tuple[bytes, int]] = []
        for index, (offset, key) in enumerate(zip(batch.offsets(), batch.keys().cells(), strict=False)):
            if offset >= self._storage.compacted_offset:
                break
            if key is None:
                continue
            keyed.append((hashlib.blake2b(key, digest_size=_DIGEST_BYTES).digest(), offset))
            if index in tombstones and offset < self._deleted_offset:
                yield self._violation(Invariant.ONE_OF_EACH_KEY, offset, "a tombstone is left after its time")
        if self._keys is None:
            self._keys = SeenKeys()
        for offset, before in self._keys.repeated(keyed):
            seen = f"the key of this record is also that of the one at offset {before}"
            yield self._violation(Invariant.ONE_OF_EACH_KEY, offset, seen)

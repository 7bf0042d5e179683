"""The rules of one partition: its log is read from the start, and all else that is known of it must follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sqlalchemy import Connection, Row, bindparam, select

from txnstore.db.schema import finished_transactions, partition_heads
from txnstore.errors import CorruptBatch
from txnstore.log.codec import RecordBatch, decode
from txnstore.log.compaction import may_have_gaps
from txnstore.log.partition_rows import producers_of_partition
from txnstore.log.partition_storage import PartitionStorage, batch_bytes, read_storage
from txnstore.log.sequences import ProducerInPartition
from txnstore.model import NO_PRODUCER_ID, OFFSET_MAX
from txnstore.verification.invariants import Invariant, Place, Violation
from txnstore.verification.reading import PAGE_ROWS, batch_pages, some_of
from txnstore.verification.replay import Finished, Replay
from txnstore.verification.visibility import visibility_violations

_HEAD: Final = select(partition_heads).where(partition_heads.c.partition_id == bindparam("of_partition_id"))
_FINISHED: Final = select(
    finished_transactions.c.marker_offset,
    finished_transactions.c.producer_id,
    finished_transactions.c.producer_epoch,
    finished_transactions.c.first_offset,
    finished_transactions.c.outcome,
    finished_transactions.c.last_stable_offset,
).where(
    finished_transactions.c.partition_id == bindparam("of_partition_id"),
    finished_transactions.c.marker_offset.between(bindparam("from_offset"), bindparam("through_offset")),
)


def partition_violations(
    connection: Connection, partition_id: int, *, producers_expire: bool = False
) -> list[Violation]:
    """Return what is wrong with one partition.

    What was deleted from its beginning cannot be replayed: of the rest, only what does not depend on it is asked.  Of
    a compacted partition nothing can: its batches are whole, do not overlap and end before the head.
    With `producers_expire` the partition may have forgotten a producer that came back later.
    """
    head = connection.execute(_HEAD, {"of_partition_id": partition_id}).one_or_none()
    if head is None:
        return [Violation(Invariant.OFFSETS_FOLLOW, Place(partition_id), "the partition has no head")]
    has_gaps = may_have_gaps(connection, partition_id)
    storage = read_storage(connection, partition_id)
    return some_of(_PartitionCheck(connection, head, storage, producers_expire, has_gaps).violations())


@dataclass
class _PartitionCheck:
    """One partition, read once from its first stored batch to its head."""

    connection: Connection
    head: Row[Any]
    storage: PartitionStorage
    producers_expire: bool
    has_gaps: bool
    replay: Replay = field(init=False)
    next_offset: int = field(init=False)
    largest_ms: int = -1
    counted_bytes: int = 0
    #: What is damaged, or lacks records, cannot be replayed: the rest would be noise.
    is_replayed: bool = field(init=False)

    def violations(self) -> Iterator[Violation]:
        """Read the log, a page of batches at a time, then what must follow from all of it."""
        partition_id, indexed_through = self.head.partition_id, -1
        self.is_replayed = not self.has_gaps
        self._begin_at(self.head.log_start_offset, self.head.next_offset)
        pages = batch_pages(self.connection, partition_id)
        for number, page in enumerate(pages):
            if number == 0:
                # Batches below the log start may be there still; but nothing is missing at it.
                self._begin_at(min(self.head.log_start_offset, page[0].base_offset), page[0].base_offset)
                # The largest timestamp may be that of a deleted record.
                self.largest_ms = page[0].running_max_timestamp_ms if page[0].base_offset > 0 else -1
            for row in page:
                yield from self._batch_violations(row)
            if self.is_replayed:
                yield from self._index_violations(indexed_through + 1, page[-1].last_offset)
            indexed_through = page[-1].last_offset
        yield from self._head_violations(is_empty=indexed_through < 0)
        yield from self._storage_violations()
        if self.is_replayed:
            yield from self._index_violations(indexed_through + 1, OFFSET_MAX)
            yield from self._producer_violations()
            yield from visibility_violations(self.connection, partition_id)

    def _begin_at(self, next_offset: int, first_offset: int) -> None:
        self.next_offset, self.replay = next_offset, Replay(self.head.partition_id, first_offset)

    def _violation(self, invariant: Invariant, offset: int | None, seen: str) -> Violation:
        return Violation(invariant, Place(self.head.partition_id, offset), seen)

    # --- batches ------------------------------------------------------------------------------------------------------

    def _batch_violations(self, row: Row[Any]) -> Iterator[Violation]:
        if row.base_offset < self.next_offset or (row.base_offset > self.next_offset and not self.has_gaps):
            seen = f"a batch begins here where {self.next_offset} is next"
            yield self._violation(Invariant.OFFSETS_FOLLOW, row.base_offset, seen)
        if row.last_offset < self.storage.first_stored_offset:
            seen = f"a batch ends at {row.last_offset}, stored ones are to begin at {self.storage.first_stored_offset}"
            yield self._violation(Invariant.STORAGE_KNOWN, row.base_offset, seen)
        if row.last_offset < self.storage.counted_offset:
            self.counted_bytes += batch_bytes(row.size_bytes)
        self.next_offset = row.last_offset + 1
        self.largest_ms = max(self.largest_ms, row.max_timestamp_ms)
        if row.running_max_timestamp_ms != self.largest_ms and not self.has_gaps:
            seen = f"{row.running_max_timestamp_ms}, the largest so far is {self.largest_ms}"
            yield self._violation(Invariant.TIMES_RUN, row.base_offset, seen)
        batch = self._decoded(row)
        if isinstance(batch, Violation):
            self.is_replayed = False
            yield batch
        elif self.is_replayed:
            yield from self.replay.take(batch)

    def _decoded(self, row: Row[Any]) -> RecordBatch | Violation:
        try:
            batch = decode(row)
            gaps = row.last_offset - row.base_offset + 1 - batch.record_count
            if len(batch.offsets()) == batch.record_count and (gaps == 0 or (self.has_gaps and gaps > 0)):
                return batch
            damage = f"{row.record_count} records up to offset {row.last_offset}"
        except CorruptBatch as error:
            damage = str(error)
        return self._violation(Invariant.BATCHES_WHOLE, row.base_offset, damage)

    def _head_violations(self, *, is_empty: bool) -> Iterator[Violation]:
        if self.head.next_offset < self.next_offset or (self.head.next_offset > self.next_offset and not self.has_gaps):
            seen = f"the head is at {self.head.next_offset}, the log ends at {self.next_offset}"
            yield self._violation(Invariant.OFFSETS_FOLLOW, None, seen)
        found_ms = self.head.running_max_timestamp_ms
        if found_ms != self.largest_ms and not self.has_gaps and (not is_empty or self.head.next_offset == 0):
            yield self._violation(Invariant.TIMES_RUN, None, f"{found_ms} in the head, {self.largest_ms} in the log")

    def _storage_violations(self) -> Iterator[Violation]:
        storage = self.storage
        if storage.size_bytes != self.counted_bytes:
            seen = (
                f"{storage.size_bytes} bytes are counted up to {storage.counted_offset}, there are {self.counted_bytes}"
            )
            yield self._violation(Invariant.STORAGE_KNOWN, None, seen)
        if max(storage.first_stored_offset, storage.counted_offset, storage.compacted_offset) > self.head.next_offset:
            yield self._violation(Invariant.STORAGE_KNOWN, None, f"{storage} is ahead of {self.head.next_offset}")

    # --- the index of finished transactions ---------------------------------------------------------------------------

    def _index_violations(self, from_offset: int, through_offset: int) -> Iterator[Violation]:
        """Compare the index with the markers that were read since it was compared last."""
        of_range = {"of_partition_id": self.head.partition_id, "from_offset": from_offset}
        rows = self.connection.execute(_FINISHED, {**of_range, "through_offset": through_offset})
        stored = {row.marker_offset: Finished(*row[1:]) for row in rows}
        for marker_offset in sorted(stored.keys() | self.replay.finished.keys()):
            found, expected = stored.get(marker_offset), self.replay.finished.get(marker_offset)
            if found is not None and min(found.first_offset, found.last_stable_offset) < self.replay.first_offset:
                # A record that it depends on, its own first one or that of one that was open then, is deleted.
                continue
            if found != expected:
                seen = f"the index has {found} where the log says {expected}"
                yield self._violation(Invariant.INDEX_KNOWN, marker_offset, seen)
        self.replay.finished.clear()

    # --- producers ----------------------------------------------------------------------------------------------------

    def _producer_violations(self) -> Iterator[Violation]:
        expected = self.replay.producers
        for state in self._stored_producers():
            seen = self._unlike_the_log(state, expected.pop(state.producer_id, None))
            if seen is not None:
                yield self._violation(Invariant.PRODUCERS_KNOWN, None, seen)
        for producer_id, state in expected.items():
            # One with nothing open may be forgotten with age.
            if state.transaction_first_offset is not None:
                seen = f"producer {producer_id} is forgotten, but its transaction is open"
                yield self._violation(Invariant.PRODUCERS_KNOWN, state.transaction_first_offset, seen)

    def _stored_producers(self) -> Iterator[ProducerInPartition]:
        after_id = NO_PRODUCER_ID
        while page := producers_of_partition(
            self.connection, self.head.partition_id, after_id=after_id, count_max=PAGE_ROWS
        ):
            yield from page
            after_id = page[-1].producer_id

    def _unlike_the_log(self, state: ProducerInPartition, expected: ProducerInPartition | None) -> str | None:
        """Return how what the partition knows of a producer contradicts its log; None: not at all."""
        if self.replay.first_offset > 0 and not _is_told_by(state, expected, self.replay.first_offset):
            return None
        if (expected is None or self.producers_expire) and _is_announced(state):
            return None
        if expected is None:
            return f"producer {state.producer_id} wrote nothing"
        if self.producers_expire and _may_have_been_forgotten(state, expected):
            return None
        # When it last wrote, by the store's clock, is not in the log.
        return None if replace(state, last_timestamp_ms=0) == expected else f"{state} where the log says {expected}"


def _may_have_been_forgotten(state: ProducerInPartition, expected: ProducerInPartition) -> bool:
    """Return whether it is what the log says since some moment at which the producer had no transaction open."""
    count = len(state.recent_batches)
    return (
        (state.epoch, state.transaction_first_offset) == (expected.epoch, expected.transaction_first_offset)
        and state.coordinator_epoch in {expected.coordinator_epoch, -1}
        and state.recent_batches == expected.recent_batches[len(expected.recent_batches) - count :]
    )


def _is_announced(state: ProducerInPartition) -> bool:
    """Return whether the producer was only made known, by a client that was forgotten or is new there."""
    return not state.recent_batches and state.coordinator_epoch < 0 and state.transaction_first_offset is None


def _is_told_by(state: ProducerInPartition, expected: ProducerInPartition | None, first_offset: int) -> bool:
    """Return whether all that a partition remembers of a producer follows from what is stored."""
    return (
        expected is not None
        and expected.coordinator_epoch == state.coordinator_epoch
        and all(batch.base_offset >= first_offset for batch in state.recent_batches)
        and (state.transaction_first_offset is None or state.transaction_first_offset >= first_offset)
    )

"""The rules of one partition: its log is read from the start, and all else that is known of it must follow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sqlalchemy import Connection, Row, bindparam, select

from txnstore.db.schema import finished_transactions, partition_heads
from txnstore.db.statements import HotStatement
from txnstore.errors import CorruptBatch
from txnstore.log.bounds import Bounds, read_bounds
from txnstore.log.codec import RecordBatch, decode, payload_bytes
from txnstore.log.compaction import may_have_gaps
from txnstore.log.partition_rows import producers_of_partition
from txnstore.log.partition_storage import PartitionStorage, batch_bytes, read_storage
from txnstore.log.sequences import ProducerInPartition
from txnstore.model import NO_PRODUCER_ID, OFFSET_MAX
from txnstore.verification.compacted import CompactedCheck
from txnstore.verification.invariants import Invariant, Place, Violation
from txnstore.verification.reading import PAGE_ROWS, batch_pages, some_of
from txnstore.verification.replay import Finished, Replay
from txnstore.verification.visibility import visibility_violations

_HEAD: Final = HotStatement(
    select(partition_heads).where(partition_heads.c.partition_id == bindparam("of_partition_id"))
)
_FINISHED: Final = HotStatement(
    select(
        finished_transactions.c.marker_offset,
        finished_transactions.c.producer_id,
        finished_transactions.c.producer_epoch,
        finished_transactions.c.first_offset,
        finished_transactions.c.outcome,
        finished_transactions.c.last_stable_offset,
        finished_transactions.c.commit_number,
    )
    .where(
        finished_transactions.c.partition_id == bindparam("of_partition_id"),
        finished_transactions.c.marker_offset.between(bindparam("from_offset"), bindparam("through_offset")),
    )
    .order_by(finished_transactions.c.marker_offset)
)


@dataclass(frozen=True, slots=True)
class Proven:
    """What a look has proven of a partition: the next one reads on from there."""

    head: Row[Any]
    storage: PartitionStorage
    next_offset: int
    largest_ms: int
    last_stable_offset: int
    replay: Replay | None
    """What follows from the batches below `next_offset`; None: they are read again once anything has changed."""


def partition_violations(
    connection: Connection,
    partition_id: int,
    *,
    producers_expire: bool = False,
    proven: dict[int, Proven] | None = None,
) -> list[Violation]:
    """Return what is wrong with one partition.

    What was deleted from its beginning cannot be replayed: of the rest, only what does not depend on it is asked.  Of
    a compacted partition less can be proven: `compacted` says what.
    With `producers_expire` the partition may have forgotten a producer that came back later.
    What `proven` has of the partition is not read again, and what is proven now goes there; nothing, if anything is
    wrong.
    """
    before = None if proven is None else proven.pop(partition_id, None)
    head = _HEAD.row(connection, {"of_partition_id": partition_id})
    if head is None:
        return [Violation(Invariant.OFFSETS_FOLLOW, Place(partition_id), "the partition has no head")]
    storage = read_storage(connection, partition_id)
    if before is not None and head.next_offset < before.next_offset:
        seen = f"the head is at {head.next_offset}, and was at {before.next_offset}"
        return [Violation(Invariant.OFFSETS_FOLLOW, Place(partition_id), seen)]
    if before is not None and before.replay is None:
        if (before.head, before.storage) == (head, storage):
            assert proven is not None
            proven[partition_id] = before
            return []
        before = None
    if before is not None and storage.first_stored_offset > before.next_offset:
        # What came since then has gone in part.
        before = None
    has_gaps = may_have_gaps(connection, partition_id)
    check = _PartitionCheck(connection, head, storage, producers_expire, has_gaps, None if has_gaps else before)
    found = some_of(check.violations())
    if proven is not None and not found:
        proven[partition_id] = check.proven()
    return found


@dataclass
class _PartitionCheck:
    """One partition, read once from its first stored batch, or from what is proven, to its head."""

    connection: Connection
    head: Row[Any]
    storage: PartitionStorage
    producers_expire: bool
    has_gaps: bool
    before: Proven | None = None
    replay: Replay = field(init=False)
    next_offset: int = field(init=False)
    bounds: Bounds = field(init=False)
    largest_ms: int = -1
    #: What the last batch says of it: that of all that was appended at once.
    promised_ms: int = -1
    counted_bytes: int = 0
    #: The number of the last commit, and the epoch of its records; None: they are in no transaction.
    last_commit: tuple[int, int | None] | None = None
    #: Of batches outside transactions that are not compared yet: offset and number.
    plain_commits: deque[tuple[int, int]] = field(default_factory=deque)
    #: What is damaged, or lacks records, cannot be replayed: the rest would be noise.
    is_replayed: bool = field(init=False)
    is_damaged: bool = False

    def violations(self) -> Iterator[Violation]:
        """Read the log, a page of batches at a time, then what must follow from all of it."""
        partition_id = self.head.partition_id
        self.is_replayed = not self.has_gaps
        self.bounds = read_bounds(self.connection, [partition_id])[partition_id]
        yield from self._log_violations()
        if self.before is None:
            yield from self._size_violations()
        if self.is_replayed:
            yield from self._producer_violations()
        if not self.is_damaged:
            from_offset = 0 if self.before is None else self.before.last_stable_offset
            yield from visibility_violations(self.connection, self.bounds, from_offset=from_offset)

    def proven(self) -> Proven:
        """Return what is proven, once `violations` has found none."""
        replay = self.replay if self.is_replayed else None
        return Proven(
            self.head, self.storage, self.next_offset, self.largest_ms, self.bounds.last_stable_offset, replay
        )

    def _log_violations(self) -> Iterator[Violation]:
        indexed_through = -1
        if self.before is None:
            self._begin_at(self.head.log_start_offset, self.head.next_offset)
            # Of a log of which everything was deleted, the head alone knows it.
            self.largest_ms = self.head.running_max_timestamp_ms if self.head.next_offset > 0 else -1
        else:
            assert self.before.replay is not None
            self.replay, self.next_offset = self.before.replay, self.before.next_offset
            self.largest_ms, indexed_through = self.before.largest_ms, self.before.next_offset - 1
        self.promised_ms = self.largest_ms
        with closing(CompactedCheck(self.connection, self.storage, self.bounds)) as compacted:
            for page, through_offset in batch_pages(self.connection, self.head.partition_id, indexed_through + 1):
                if indexed_through < 0:
                    # Batches below the log start may be there still; but nothing is missing at it.
                    self._begin_at(min(self.head.log_start_offset, page[0].base_offset), page[0].base_offset)
                    # The largest timestamp may be that of a deleted record.
                    self.largest_ms = page[0].running_max_timestamp_ms if page[0].base_offset > 0 else -1
                    self.promised_ms = self.largest_ms
                batches: list[RecordBatch] = []
                for row in page:
                    yield from self._batch_violations(row, batches)
                yield from self._page_violations(compacted, batches, indexed_through + 1, through_offset)
                indexed_through = through_offset
            yield from self._head_violations()
            if indexed_through < OFFSET_MAX:
                yield from self._page_violations(compacted, [], indexed_through + 1, OFFSET_MAX)

    def _page_violations(
        self, compacted: CompactedCheck, batches: Sequence[RecordBatch], from_offset: int, through_offset: int
    ) -> Iterator[Violation]:
        """Return what does not follow from the batches that were read since the last call."""
        if self.has_gaps:
            yield from compacted.page_violations(batches)
            yield from compacted.index_violations(from_offset, through_offset)
        elif self.is_replayed:
            yield from self._index_violations(from_offset, through_offset)

    def _begin_at(self, next_offset: int, first_offset: int) -> None:
        self.next_offset, self.replay = next_offset, Replay(self.head.partition_id, first_offset)

    def _violation(self, invariant: Invariant, offset: int | None, seen: str) -> Violation:
        return Violation(invariant, Place(self.head.partition_id, offset), seen)

    # --- batches ------------------------------------------------------------------------------------------------------

    def _batch_violations(self, row: Row[Any], batches: list[RecordBatch]) -> Iterator[Violation]:
        """Return what is wrong with a batch, and add it to `batches` if it can be read."""
        if row.base_offset < self.next_offset or (row.base_offset > self.next_offset and not self.has_gaps):
            seen = f"a batch begins here where {self.next_offset} is next"
            yield self._violation(Invariant.OFFSETS_FOLLOW, row.base_offset, seen)
        if row.last_offset < self.storage.first_stored_offset:
            seen = f"a batch ends at {row.last_offset}, stored ones are to begin at {self.storage.first_stored_offset}"
            yield self._violation(Invariant.STORAGE_KNOWN, row.base_offset, seen)
        if row.last_offset < self.storage.counted_offset:
            self.counted_bytes += batch_bytes(row.size_bytes)
        self.next_offset = row.last_offset + 1
        yield from self._time_violations(row)
        if row.is_transactional is not (row.commit_number is None):
            seen = f"a batch that is {'' if row.is_transactional else 'not '}transactional has {row.commit_number}"
            yield self._violation(Invariant.COMMITS_NUMBERED, row.base_offset, seen)
        elif row.commit_number is not None and self.is_replayed:
            self.plain_commits.append((row.last_offset, row.commit_number))
        batch = self._decoded(row)
        if isinstance(batch, Violation):
            self.is_replayed, self.is_damaged = False, True
            yield batch
            return
        yield from self._content_violations(batch)
        if self.has_gaps:
            batches.append(batch)

    def _time_violations(self, row: Row[Any]) -> Iterator[Violation]:
        """Return whether the running maximum is not that of the records up to the batch, and at once with it."""
        before_ms, promised_ms = self.largest_ms, self.promised_ms
        if row.control_type is None:
            self.largest_ms = max(before_ms, row.max_timestamp_ms)
        self.promised_ms = row.running_max_timestamp_ms
        # Who is promised more than there was up to it, was appended at once with what follows.
        is_broken = before_ms < promised_ms != row.running_max_timestamp_ms
        if (is_broken or row.running_max_timestamp_ms < self.largest_ms) and not self.has_gaps:
            seen = f"{row.running_max_timestamp_ms} after {promised_ms}, the largest so far is {self.largest_ms}"
            yield self._violation(Invariant.TIMES_RUN, row.base_offset, seen)

    def _content_violations(self, batch: RecordBatch) -> Iterator[Violation]:
        """Return what is wrong with a batch that can be read."""
        there = payload_bytes(batch.row)
        if batch.size_bytes != there:
            seen = f"a batch of {there} bytes says that it has {batch.size_bytes}"
            yield self._violation(Invariant.STORAGE_KNOWN, batch.base_offset, seen)
        if self.is_replayed:
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

    def _head_violations(self) -> Iterator[Violation]:
        if self.head.next_offset < self.next_offset or (self.head.next_offset > self.next_offset and not self.has_gaps):
            seen = f"the head is at {self.head.next_offset}, the log ends at {self.next_offset}"
            yield self._violation(Invariant.OFFSETS_FOLLOW, None, seen)
        found_ms = self.head.running_max_timestamp_ms
        if not found_ms == self.largest_ms == self.promised_ms and not self.has_gaps:
            seen = f"{found_ms} in the head, {self.largest_ms} in the log, {self.promised_ms} in its last batch"
            yield self._violation(Invariant.TIMES_RUN, None, seen)

        storage = self.storage
        if max(storage.first_stored_offset, storage.counted_offset, storage.compacted_offset) > self.head.next_offset:
            yield self._violation(Invariant.STORAGE_KNOWN, None, f"{storage} is ahead of {self.head.next_offset}")

    def _size_violations(self) -> Iterator[Violation]:
        storage = self.storage
        if storage.size_bytes != self.counted_bytes:
            seen = (
                f"{storage.size_bytes} bytes are counted up to {storage.counted_offset}, there are {self.counted_bytes}"
            )
            yield self._violation(Invariant.STORAGE_KNOWN, None, seen)

    # --- the index of finished transactions ---------------------------------------------------------------------------

    def _index_violations(self, from_offset: int, through_offset: int) -> Iterator[Violation]:
        """Compare the index with the markers that were read since it was compared last."""
        of_range = {"of_partition_id": self.head.partition_id, "from_offset": from_offset}
        rows = _FINISHED.rows(self.connection, {**of_range, "through_offset": through_offset})
        stored: dict[int, Finished] = {}
        for row in rows:
            stored[row.marker_offset] = Finished(*row[1:-1])
            yield from self._plain_number_violations(row.marker_offset)
            if row.commit_number is not None:
                yield from self._number_violations(row.marker_offset, row.commit_number, row.producer_epoch)
        yield from self._plain_number_violations(through_offset + 1)
        for marker_offset in sorted(stored.keys() | self.replay.finished.keys()):
            found, expected = stored.get(marker_offset), self.replay.finished.get(marker_offset)
            if found is not None and min(found.first_offset, found.last_stable_offset) < self.replay.first_offset:
                # A record that it depends on, its own first one or that of one that was open then, is deleted.
                continue
            if found != expected:
                seen = f"the index has {found} where the log says {expected}"
                yield self._violation(Invariant.INDEX_KNOWN, marker_offset, seen)
        self.replay.finished.clear()

    def _plain_number_violations(self, before_offset: int) -> Iterator[Violation]:
        """Compare the numbers of what was committed outside transactions below an offset."""
        while self.plain_commits and self.plain_commits[0][0] < before_offset:
            yield from self._number_violations(*self.plain_commits.popleft(), None)

    def _number_violations(self, offset: int, number: int, epoch: int | None) -> Iterator[Violation]:
        """Compare the number of a commit with those before it.

        What is appended at once has one in common, and so have a transaction's writers, whose records have its epoch:
        nothing here tells them from another transaction with the same epoch.
        """
        last, self.last_commit = self.last_commit, (number, epoch)
        if last is None or number > last[0] or (number == last[0] and (epoch is None or last[1] in {None, epoch})):
            return
        yield self._violation(Invariant.COMMITS_NUMBERED, offset, f"commit {number} comes after commit {last[0]}")

    # --- producers ----------------------------------------------------------------------------------------------------

    def _producer_violations(self) -> Iterator[Violation]:
        expected = dict(self.replay.producers)
        try:
            for state in self._stored_producers():
                seen = self._unlike_the_log(state, expected.pop(state.producer_id, None))
                if seen is not None:
                    yield self._violation(Invariant.PRODUCERS_KNOWN, None, seen)
        except CorruptBatch as error:
            yield self._violation(Invariant.PRODUCERS_KNOWN, None, str(error))
            return
        for producer_id, state in expected.items():
            # One with nothing open may be forgotten with age.
            if state.transaction_first_offset is not None:
                seen = f"producer {producer_id} is forgotten, but its transaction is open"
                yield self._violation(Invariant.PRODUCERS_KNOWN, state.transaction_first_offset, seen)
            # Nor is it remembered here: it begins afresh if it comes back.
            del self.replay.producers[producer_id]

    def _stored_producers(self) -> Iterator[ProducerInPartition]:
        after_id = NO_PRODUCER_ID
        while page := producers_of_partition(
            self.connection, self.head.partition_id, after_id=after_id, count_max=PAGE_ROWS
        ):
            yield from page
            if len(page) < PAGE_ROWS:
                return
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

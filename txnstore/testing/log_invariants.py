"""The invariants of one partition: its log is read from the start, and all else must follow from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sqlalchemy import Connection, bindparam, select

from txnstore.db.schema import finished_transactions, partition_heads, record_batches
from txnstore.errors import CorruptBatch
from txnstore.log.bounds import read_bounds
from txnstore.log.codec import RecordBatch, decode
from txnstore.log.fetch import fetch
from txnstore.log.partition_rows import producers_of_partition
from txnstore.log.sequences import ProducerInPartition, RecentBatch, increment_sequence, last_sequence_of, remember
from txnstore.model import NO_PRODUCER_ID, ControlType
from txnstore.testing.violations import Invariant, Violation

_BATCHES: Final = (
    select(record_batches)
    .where(record_batches.c.partition_id == bindparam("of_partition_id"))
    .order_by(record_batches.c.last_offset)
)
_HEAD: Final = select(partition_heads).where(partition_heads.c.partition_id == bindparam("of_partition_id"))
_INDEX: Final = (
    select(finished_transactions)
    .where(finished_transactions.c.partition_id == bindparam("of_partition_id"))
    .order_by(finished_transactions.c.marker_offset)
)

#: How a transaction ended in a partition: producer id, epoch of its records, first offset, outcome, LSO after it.
_Finished = tuple[int, int, int, int, int]


@dataclass
class _Replay:
    """What follows from the batches of a partition, read in order."""

    partition_id: int
    #: Where what is stored begins; above 0 if batches before it were deleted, and what they told with them.
    first_offset: int = 0
    violations: list[Violation] = field(default_factory=list)
    producers: dict[int, ProducerInPartition] = field(default_factory=dict)
    #: By marker offset.
    finished: dict[int, _Finished] = field(default_factory=dict)
    #: Offsets of records, in order, with the transaction that they belong to.
    records: list[tuple[int, tuple[int, int] | None]] = field(default_factory=list)

    def take(self, batch: RecordBatch) -> None:
        """Read the next batch."""
        known = self.producers.get(batch.producer.producer_id)
        if batch.producer.producer_id != NO_PRODUCER_ID:
            self._check_epoch(batch, known)
            if batch.is_control:
                self._end(batch, known)
            else:
                self._check_sequence(batch, known)
                self._remember(batch, known)
        if not batch.is_control:
            transaction = (batch.producer.producer_id, batch.producer.epoch) if batch.is_transactional else None
            self.records.extend((offset, transaction) for offset in batch.offsets())

    def committed_offsets(self, end_offset: int) -> list[int]:
        """Return the offsets below `end_offset` that a reader of committed records gets."""
        committed = {row[:2] for row in self.finished.values() if row[3] == ControlType.COMMIT}
        return [
            offset
            for offset, transaction in self.records
            if offset < end_offset and (transaction is None or transaction in committed)
        ]

    def _check_epoch(self, batch: RecordBatch, known: ProducerInPartition | None) -> None:
        if known is None:
            return
        epoch = batch.producer.epoch
        too_low = epoch < known.epoch or (batch.is_control and epoch == known.epoch)
        if too_low:
            what = "a marker" if batch.is_control else "records"
            self._violated(
                Invariant.EPOCHS_RISE, batch, f"{what} of producer {batch.producer} after epoch {known.epoch}"
            )

    def _check_sequence(self, batch: RecordBatch, known: ProducerInPartition | None) -> None:
        goes_on = known is not None and known.epoch == batch.producer.epoch and bool(known.recent_batches)
        if goes_on:
            assert known is not None
            expected = increment_sequence(known.last_sequence, 1)
        elif known is not None or (batch.is_transactional and self.first_offset == 0):
            expected = 0
        else:
            # A partition may have forgotten the producer, or what it wrote before may be deleted.
            return
        if batch.base_sequence != expected:
            self._violated(
                Invariant.SEQUENCES_FOLLOW,
                batch,
                f"producer {batch.producer} has sequence {batch.base_sequence} where {expected} is next",
            )

    def _remember(self, batch: RecordBatch, known: ProducerInPartition | None) -> None:
        recent = RecentBatch(
            batch.base_sequence,
            last_sequence_of(batch.base_sequence, batch.record_count),
            batch.base_offset,
            batch.last_offset,
            batch.max_timestamp_ms,
        )
        state = known or ProducerInPartition(batch.producer.producer_id, batch.producer.epoch, (), -1, 0, None)
        same_epoch = state.epoch == batch.producer.epoch
        first_offset = state.transaction_first_offset
        if batch.is_transactional and first_offset is None:
            first_offset = batch.base_offset
        self.producers[state.producer_id] = replace(
            state,
            epoch=batch.producer.epoch,
            recent_batches=remember(state.recent_batches if same_epoch else (), recent),
            transaction_first_offset=first_offset,
        )

    def _end(self, marker: RecordBatch, known: ProducerInPartition | None) -> None:
        state = known or ProducerInPartition(marker.producer.producer_id, marker.producer.epoch, (), -1, 0, None)
        self.producers[state.producer_id] = replace(
            state,
            epoch=marker.producer.epoch,
            recent_batches=(),
            coordinator_epoch=marker.coordinator_epoch or 0,
            transaction_first_offset=None,
        )
        if state.transaction_first_offset is None or marker.control_type is None:
            return
        self.finished[marker.last_offset] = (
            state.producer_id,
            state.epoch,
            state.transaction_first_offset,
            int(marker.control_type),
            min(self._open_offsets(), default=marker.last_offset + 1),
        )

    def _open_offsets(self) -> Iterator[int]:
        for state in self.producers.values():
            if state.transaction_first_offset is not None:
                yield state.transaction_first_offset

    def _violated(self, invariant: Invariant, batch: RecordBatch, detail: str) -> None:
        self.violations.append(
            Violation(invariant, f"partition {self.partition_id}, offset {batch.base_offset}: {detail}")
        )


def partition_violations(
    connection: Connection, partition_id: int, *, producers_expire: bool = False
) -> list[Violation]:
    """Return what is wrong with one partition, whose log has lost nothing to compaction.

    What was deleted from its beginning cannot be replayed: of the rest, only what does not depend on it is asked.
    With `producers_expire` the partition may have forgotten a producer that came back later.
    """
    of = {"of_partition_id": partition_id}
    rows = connection.execute(_BATCHES, of).all()
    head = connection.execute(_HEAD, of).one_or_none()
    if head is None:
        return [Violation(Invariant.OFFSETS_FOLLOW, f"partition {partition_id} has no head")]
    replay = _Replay(partition_id, rows[0].base_offset if rows else head.next_offset)
    found = [*_offset_violations(rows, head), *_time_violations(rows, head)]
    for row in rows:
        batch, damage = _decoded(row)
        found.extend(damage)
        if batch is not None:
            replay.take(batch)
    if any(violation.invariant is Invariant.BATCHES_WHOLE for violation in found):
        # What is damaged cannot be replayed: the rest would be noise.
        return found
    found.extend(replay.violations)
    found.extend(_producer_violations(connection, replay, producers_expire=producers_expire))
    found.extend(_index_violations(connection, replay))
    found.extend(_visibility_violations(connection, replay))
    return found


def _decoded(row: Any) -> tuple[RecordBatch | None, list[Violation]]:
    where = f"partition {row.partition_id}, offset {row.base_offset}"
    try:
        batch = decode(row)
        if len(batch.offsets()) == batch.record_count == row.last_offset - row.base_offset + 1:
            return batch, []
    except CorruptBatch as error:
        return None, [Violation(Invariant.BATCHES_WHOLE, f"{where}: {error}")]
    return None, [
        Violation(Invariant.BATCHES_WHOLE, f"{where}: {row.record_count} records up to offset {row.last_offset}")
    ]


def _offset_violations(rows: Sequence[Any], head: Any) -> Iterator[Violation]:
    # Batches below the log start may be there still; but nothing is missing at it.
    next_offset = min(head.log_start_offset, rows[0].base_offset) if rows else head.log_start_offset
    for row in rows:
        if row.base_offset != next_offset:
            yield Violation(
                Invariant.OFFSETS_FOLLOW,
                f"partition {row.partition_id}: a batch begins at {row.base_offset} where {next_offset} is next",
            )
        next_offset = row.last_offset + 1
    if head.next_offset != next_offset:
        yield Violation(
            Invariant.OFFSETS_FOLLOW,
            f"partition {head.partition_id}: the head is at {head.next_offset}, the log ends at {next_offset}",
        )


def _time_violations(rows: Sequence[Any], head: Any) -> Iterator[Violation]:
    # The largest timestamp may be that of a deleted record.
    is_cut = bool(rows and rows[0].base_offset > 0)
    largest_ms = rows[0].running_max_timestamp_ms if is_cut else -1
    for row in rows:
        largest_ms = max(largest_ms, row.max_timestamp_ms)
        if row.running_max_timestamp_ms != largest_ms:
            yield Violation(
                Invariant.TIMES_RUN,
                f"partition {row.partition_id}, offset {row.base_offset}: {row.running_max_timestamp_ms},"
                f" the largest so far is {largest_ms}",
            )
    if head.running_max_timestamp_ms != largest_ms and (rows or head.next_offset == 0):
        yield Violation(
            Invariant.TIMES_RUN,
            f"partition {head.partition_id}: {head.running_max_timestamp_ms} in the head, {largest_ms} in the log",
        )


def _producer_violations(connection: Connection, replay: _Replay, *, producers_expire: bool) -> Iterator[Violation]:
    where = f"partition {replay.partition_id}"
    stored = {state.producer_id: state for state in producers_of_partition(connection, replay.partition_id)}
    for producer_id, state in stored.items():
        # When it last wrote, by the store's clock, is not in the log.
        expected = replay.producers.get(producer_id)
        if replay.first_offset > 0 and not _is_told_by(state, replay):
            continue
        if (expected is None or producers_expire) and _is_announced(state):
            continue
        if expected is None:
            yield Violation(Invariant.PRODUCERS_KNOWN, f"{where}: producer {producer_id} wrote nothing")
        elif producers_expire and _may_have_been_forgotten(state, expected):
            continue
        elif replace(state, last_timestamp_ms=0) != expected:
            yield Violation(Invariant.PRODUCERS_KNOWN, f"{where}: {state} where the log says {expected}")
    for producer_id, state in replay.producers.items():
        # One with nothing open may be forgotten with age.
        if producer_id not in stored and state.transaction_first_offset is not None:
            yield Violation(
                Invariant.PRODUCERS_KNOWN, f"{where}: producer {producer_id} is forgotten, but its transaction is open"
            )


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


def _is_told_by(state: ProducerInPartition, replay: _Replay) -> bool:
    """Return whether all that a partition remembers of a producer follows from what is stored."""
    expected = replay.producers.get(state.producer_id)
    return (
        expected is not None
        and expected.coordinator_epoch == state.coordinator_epoch
        and all(batch.base_offset >= replay.first_offset for batch in state.recent_batches)
        and (state.transaction_first_offset is None or state.transaction_first_offset >= replay.first_offset)
    )


def _index_violations(connection: Connection, replay: _Replay) -> Iterator[Violation]:
    stored = {
        row.marker_offset: (
            row.producer_id,
            row.producer_epoch,
            row.first_offset,
            row.outcome,
            row.last_stable_offset,
        )
        for row in connection.execute(_INDEX, {"of_partition_id": replay.partition_id})
    }
    for marker_offset in sorted(stored.keys() | replay.finished.keys()):
        found, expected = stored.get(marker_offset), replay.finished.get(marker_offset)
        if found is not None and min(found[2], found[4]) < replay.first_offset:
            # A record that it depends on, its own first one or that of one that was open then, is deleted.
            continue
        if found != expected:
            yield Violation(
                Invariant.INDEX_KNOWN,
                f"partition {replay.partition_id}, marker at {marker_offset}: {found} where the log says {expected}",
            )


def _visibility_violations(connection: Connection, replay: _Replay) -> Iterator[Violation]:
    partition_id = replay.partition_id
    bounds = read_bounds(connection, [partition_id])[partition_id]
    position = bounds.log_start_offset
    seen: list[int] = []
    while position < bounds.last_stable_offset:
        page = fetch(connection, {partition_id: position})[partition_id]
        seen.extend(offset for batch in page.batches for offset in batch.offsets() if offset >= position)
        position = page.next_offset
    expected = [
        offset for offset in replay.committed_offsets(bounds.last_stable_offset) if offset >= bounds.log_start_offset
    ]
    if seen != expected:
        yield Violation(
            Invariant.COMMITTED_VISIBLE,
            f"partition {partition_id}: a reader gets the offsets {seen} where {expected} are committed",
        )

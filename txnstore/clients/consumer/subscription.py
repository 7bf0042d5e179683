"""The subscription of a consumer: the assigned partitions, their positions, what is buffered, and what to read next.

It knows no thread and no database: whoever calls holds the consumer's lock.  What was read for a position that the
application has left since carries an old version and is dropped.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Final

from txnstore.clients.consumer.positions import Positions
from txnstore.clients.model.errors import KafkaError, kafka_error_of
from txnstore.clients.model.message import Message, RecordSource, RecordTuple, end_of_partition, error_message
from txnstore.clients.model.topic_partition import OFFSET_BEGINNING, OFFSET_END, OFFSET_INVALID, OFFSET_STORED
from txnstore.errors import CorruptBatch, TxnStoreError, UnsupportedCompression
from txnstore.log.bounds import Bounds
from txnstore.model import OffsetAndMetadata, PartitionName, ProducerIdentity

#: Offsets from here on downwards count from the end: OFFSET_TAIL_BASE - n is n records before it.
OFFSET_TAIL_BASE: Final = -2000

#: A partition that cannot be read is tried again after this long at first, and less and less often up to the last.
RETRY_FIRST_SECONDS: Final = 0.1
RETRY_LAST_SECONDS: Final = 2.0
#: An error that persists is reported again after this long.
REPORT_AGAIN_SECONDS: Final = 30.0

#: Bound once: it is called for each record.
_message_of: Final = Message.from_record

OFFSET_ORDER: Final = Positions()

NOTHING_COMMITTED: Final = "no previously committed offset available: Local: No offset stored"


@dataclass(frozen=True, slots=True)
class StartPosition:
    """Where to begin."""

    position: int | None
    """None: there is no such offset, because auto.offset.reset is "error"."""

    why: str = ""
    """Why auto.offset.reset had to decide."""


def start_position(
    wanted: int,
    bounds: Bounds,
    end_offset: int,
    committed: int | None,
    reset: str,
    *,
    positions: Positions = OFFSET_ORDER,
) -> StartPosition:
    """Return where to begin if `wanted` is a position or one of the constants; `reset` is earliest, latest or error."""
    said, given = "offset", wanted
    if wanted == OFFSET_STORED:
        if committed is None:
            return _reset(bounds.log_start_offset, end_offset, reset, NOTHING_COMMITTED, positions)
        said, given = "the committed offset", committed
    why = f"{said} {positions.place(given)} is not in the log: Broker: Offset out of range"
    place, within = positions.place(given), positions.offset_in_transaction(given) or 0
    place = {OFFSET_BEGINNING: bounds.log_start_offset, OFFSET_END: end_offset}.get(place, place)
    if given <= OFFSET_TAIL_BASE:
        place = max(bounds.log_start_offset, end_offset - (OFFSET_TAIL_BASE - given))
    if not bounds.log_start_offset <= place <= bounds.high_watermark:
        return _reset(bounds.log_start_offset, end_offset, reset, why, positions)
    if 0 < within < bounds.log_start_offset:
        # It stands in a transaction of which the next records are deleted: the earliest ones are those that are left.
        if reset == "earliest":
            return StartPosition(positions.at(place, bounds.log_start_offset), why)
        return _reset(bounds.log_start_offset, end_offset, reset, why, positions)
    return StartPosition(positions.at(place, within))


def _reset(earliest: int, latest: int, reset: str, why: str, positions: Positions) -> StartPosition:
    place = {"earliest": earliest, "latest": latest}.get(reset)
    return StartPosition(None if place is None else positions.at(place), why)


@dataclass(frozen=True, slots=True)
class ToldCommit:
    """What the journal tells of the commit of a transaction."""

    transactional_id: str
    """Whose it is."""

    offsets: Mapping[str, Mapping[PartitionName, OffsetAndMetadata]]
    """The consumed offsets that it made take effect, by group."""


@dataclass(frozen=True, slots=True, eq=False)
class Committed:
    """What was committed at once, as it was found in one partition: a transaction, or a batch that is in none."""

    number: int
    """The place of its commit among those of its database: see `log.partition_rows`."""

    snapshot: int
    """The number of the reading that has seen it; that of a later reading of the same database is higher."""

    producer: ProducerIdentity | None
    """Whose records these are, with the epoch that this transaction alone has; None outside transactions."""

    told: ToldCommit | None = None
    """None: the journal of this database knows nothing of it, or no more."""


@dataclass(slots=True)
class Chunk:
    """Records of one batch on their way to the application; without records, a stretch that is stepped over."""

    source: RecordSource | None
    open: Callable[[], Iterator[RecordTuple]]
    """Takes the batch apart, which may show that it is damaged."""
    record_count: int
    size_bytes: int
    first_offset: int
    """The records' own offset, as all offsets here; what else is where is a position of the consumer."""

    last_offset: int
    """The offset of the last record, or a higher one if compaction has removed the last records."""

    next_position: int
    """The position once all records are handed out."""

    start: int
    """The position at which it is read again."""

    base: int = 0
    unit: int = 1
    """Behind a record of the chunk the position is `base + unit * (its offset + 1)`."""

    commit: Committed | None = None
    """What its records were committed with; None: each partition is read by itself."""


@dataclass(frozen=True, slots=True)
class FetchPosition:
    """Where to read next in a partition; what was read there counts only while the partition has this version."""

    partition: AssignedPartition
    version: int
    position: int
    """Where to read; before it is resolved, one of the constants, or a position that may lie outside the log."""


@dataclass(frozen=True, slots=True)
class PageRead:
    """What was read of one partition."""

    chunks: Sequence[Chunk]
    next_position: int
    bounds: Bounds
    end_position: int
    """The first position that this reader may not read yet."""

    snapshot: int = 0
    """The number of the reading, where the consumer gets transactions from all partitions at once."""


class AssignedPartition:
    """One partition of the assignment."""

    __slots__ = (
        "assigned_position",
        "bounds",
        "buffered_bytes",
        "buffered_records",
        "chunk",
        "committed",
        "ended_in",
        "eof_due_at",
        "eof_reported_at",
        "fetch_position",
        "is_at_end",
        "is_hungry",
        "is_paused",
        "is_ready",
        "is_recreated",
        "last_commit",
        "leader",
        "number",
        "partition_id",
        "position",
        "records",
        "reported_at",
        "reported_code",
        "retry_at",
        "retry_seconds",
        "start",
        "stored",
        "topic",
        "version",
        "waiting",
    )

    def __init__(self, topic: str, number: int, position: int) -> None:
        """Begin at this position, or where one of the constants says."""
        self.topic = topic
        self.number = number
        self.assigned_position = OFFSET_STORED if position == OFFSET_INVALID else position
        self.start: int | None = self.assigned_position
        """Where to begin, until it has been resolved to a position within the log; then None."""
        self.leader: int | None = None
        """The number of the database that holds it; None: not looked up, or not needed because there is only one."""
        self.partition_id: int | None = None
        """What these offsets belong to; None: not looked up. A topic that is recreated gets other partitions."""
        self.is_recreated = False
        """Whether it replaces one that was deleted, and the application has not said since where to read it."""
        self.fetch_position = OFFSET_INVALID
        self.version = 0
        self.is_paused = False
        self.position = OFFSET_INVALID
        """What comes next for the application; OFFSET_INVALID until it has got something."""
        self.stored = OFFSET_INVALID
        self.committed = OFFSET_INVALID
        self.bounds: Bounds | None = None
        self.chunk: Chunk | None = None
        """What is being handed out, and what is left of it."""
        self.records: Iterator[RecordTuple] = iter(())
        self.waiting: deque[Chunk | Message] = deque()
        self.buffered_records = 0
        self.buffered_bytes = 0
        self.eof_reported_at: int | None = None
        self.eof_due_at = math.inf
        """When the end is reported unless records arrive before; infinity unless all has been read."""
        self.is_ready = False
        self.is_at_end = False
        """Whether everything there was has been read."""
        self.ended_in = -1
        """The number of the newest snapshot in which what is buffered was all that there is; -1: there may be more."""
        self.last_commit: int | None = None
        """The number of the last transaction of which something was handed out, or lies behind the beginning."""
        self.is_hungry = False
        """Whether the last page was full before it was this partition's turn."""
        self.retry_at = 0.0
        self.retry_seconds = RETRY_FIRST_SECONDS
        self.reported_at = -math.inf
        self.reported_code: int | None = None

    def is_current(self, position: FetchPosition) -> bool:
        """Return whether what was read at the position still counts."""
        return self.version == position.version

    @property
    def is_unread(self) -> bool:
        """Whether the application has only seen records of the deleted partition: its commits are about that one."""
        return self.is_recreated and self.position == OFFSET_INVALID

    @property
    def uncommitted(self) -> int:
        """The stored position if it is above the committed one, else OFFSET_INVALID."""
        return self.stored if self.stored >= 0 and self.stored > self.committed else OFFSET_INVALID


#: Which partitions a fetching thread looks after.
Wanted = Callable[[AssignedPartition], bool]


class Subscription:
    """The assigned partitions of one consumer."""

    def __init__(
        self,
        *,
        stores_offsets: bool,
        reports_eof: bool,
        records_low: int,
        bytes_low: int,
        eof_wait_seconds: float = 0.0,
        positions: Positions = OFFSET_ORDER,
    ) -> None:
        """Read ahead while fewer than `records_low` records and `bytes_low` bytes are buffered.

        The end of a partition is reported when nothing has arrived for `eof_wait_seconds`.
        """
        self._positions = positions
        self._eof_wait_seconds = eof_wait_seconds
        self._stores_offsets = self._stores_at_once = stores_offsets
        self._withheld: set[AssignedPartition] = set()
        """Of which something was handed out that has not reached the application: it is not stored yet."""
        self._reports_eof = reports_eof
        self._records_low = records_low
        self._bytes_low = bytes_low
        self._partitions: dict[tuple[str, int], AssignedPartition] = {}
        self._ready: deque[AssignedPartition] = deque()
        self.buffered_records = 0
        self.buffered_bytes = 0
        self.wants_more = False
        """Set when a chunk has been handed out completely, so that there may be room to read on."""

    # --- the assignment ----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[AssignedPartition]:
        """Return the partitions in the order in which they were assigned."""
        return iter(self._partitions.values())

    def __len__(self) -> int:
        """Return how many partitions are assigned."""
        return len(self._partitions)

    def find(self, topic: str, number: int) -> AssignedPartition | None:
        """Return the partition, or None if it is not assigned."""
        return self._partitions.get((topic, number))

    def add(self, topic: str, number: int, position: int) -> None:
        """Assign a partition that is not assigned yet."""
        self._partitions[topic, number] = AssignedPartition(topic, number, position)

    def remove(self, topic: str, number: int) -> AssignedPartition | None:
        """Remove a partition with everything that is buffered of it, and return it."""
        partition = self._partitions.pop((topic, number), None)
        if partition is not None:
            self._drop_buffer(partition)
        return partition

    def clear(self) -> list[AssignedPartition]:
        """Remove all partitions and return them."""
        removed = list(self)
        for partition in removed:
            self.remove(partition.topic, partition.number)
        return removed

    def seek(self, partition: AssignedPartition, position: int) -> None:
        """Continue from `position`, or from what the constant stands for; it is unknown until then."""
        self._drop_buffer(partition)
        partition.start = position
        partition.last_commit = None
        partition.position = OFFSET_INVALID
        partition.eof_reported_at = None
        partition.is_recreated = False
        self._forgive(partition)

    def pause(self, partition: AssignedPartition) -> None:
        """Stop handing out records of the partition; what is buffered stays."""
        partition.is_paused = True
        self._unready(partition)

    def resume(self, partition: AssignedPartition) -> None:
        """Hand out records of the partition again."""
        partition.is_paused = False
        self._make_ready(partition)

    # --- handing out -------------------------------------------------------------------------------------------------

    @property
    def has_messages(self) -> bool:
        """Whether something may be handed out at once."""
        return bool(self._ready)

    def next_message(self) -> Message | None:
        """Return the next message, a record or an event, and move the position behind it."""
        while self._ready:
            partition = self._ready[0]
            chunk = partition.chunk
            if chunk is None:
                message = self._next_chunk(partition)
                if message is not None:
                    return message
                continue
            record = next(partition.records, None)
            if record is None:
                self._finish(partition, chunk)
                continue
            offset = record[0]
            if offset >= chunk.last_offset:
                self._finish(partition, chunk)
            else:
                partition.position = chunk.base + chunk.unit * (offset + 1)
                if self._stores_at_once:
                    partition.stored = partition.position
                elif self._stores_offsets:
                    self._withheld.add(partition)
            return _message_of(chunk.source, record)  # type: ignore[arg-type]  # what has records has a source
        return None

    def take(self, messages: list[Message], count: int) -> None:
        """Add what is at hand to `messages`, up to `count` of them: the fast way to many."""
        while len(messages) < count and self._ready:
            partition = self._ready[0]
            chunk = partition.chunk
            if chunk is None:
                message = self._next_chunk(partition)
                if message is not None:
                    messages.append(message)
                continue
            before = len(messages)
            records = islice(partition.records, count - before)
            messages.extend(map(_message_of, repeat(chunk.source), records))  # type: ignore[arg-type]  # (above)
            last_offset = messages[-1].offset() if len(messages) > before else None
            if last_offset is None or last_offset >= chunk.last_offset:
                self._finish(partition, chunk)
            else:
                self._move(partition, chunk.base + chunk.unit * (last_offset + 1))

    def withhold(self) -> None:
        """Store no offset of what is handed out from now on: it has not reached the application yet."""
        self._stores_at_once = False

    def let_go(self) -> None:
        """Store the offsets of what was handed out and is not kept: it reaches the application now, or was given back.

        Until the rest is given back or let go, nothing that is handed out is stored.
        """
        kept = self.begins_of_kept()
        self._stores_at_once = self._stores_offsets and not kept
        for partition in self._withheld:
            position = kept.get(partition, partition.position)
            if position >= 0:
                partition.stored = position
        self._withheld.intersection_update(kept)

    def give_back(self, messages: Iterable[Message]) -> None:
        """Hand these messages out again, which were taken but never reached the application."""
        for partition, position in self._begins_of(messages).items():
            self.seek(partition, position)
            self._move(partition, position)

    def return_kept(self) -> None:
        """Give back what a call has kept for the next one of its kind: here none does."""

    def begins_of_kept(self) -> Mapping[AssignedPartition, int]:
        """Return where partitions go on once what is kept is given back."""
        return {}

    def _begins_of(self, messages: Iterable[Message]) -> dict[AssignedPartition, int]:
        """Return the positions of the first of these records in each partition that is assigned."""
        firsts: dict[tuple[str | None, int | None], int] = {}
        for message in messages:
            key = message.topic(), message.partition()
            if key not in firsts and message.error() is None and message.offset() is not None:
                firsts[key] = self._positions.of_message(message)
        found = {self._partitions.get((str(topic), -1 if n is None else n)): at for (topic, n), at in firsts.items()}
        return {partition: position for partition, position in found.items() if partition is not None}

    # --- reading -----------------------------------------------------------------------------------------------------

    def to_resolve(self, now: float, is_wanted: Wanted | None = None) -> list[FetchPosition]:
        """Return the wanted partitions, by default of all, whose start has not been resolved to an offset yet."""
        return [
            FetchPosition(partition, partition.version, partition.start)
            for partition in self
            if partition.start is not None and partition.retry_at <= now and (is_wanted is None or is_wanted(partition))
        ]

    def to_read(self, now: float, is_wanted: Wanted | None = None) -> list[FetchPosition]:
        """Return what to read next of the wanted partitions, by default of all; nothing while enough is buffered."""
        if self.buffered_records >= self._records_low or self.buffered_bytes >= self._bytes_low:
            return []
        # No partition fills the buffer alone, and those that got nothing because the page was full come first.
        share = max(1, self._records_low // max(1, len(self._partitions)))
        candidates = [
            partition
            for partition in self
            if partition.start is None
            and not partition.is_paused
            and partition.retry_at <= now
            and partition.buffered_records < share
            and (is_wanted is None or is_wanted(partition))
        ]
        hungry = [partition for partition in candidates if partition.is_hungry]
        return [
            FetchPosition(partition, partition.version, partition.fetch_position) for partition in hungry or candidates
        ]

    def next_retry(self, now: float, is_wanted: Wanted | None = None) -> float:
        """Return in how many seconds the next failed partition is tried again; infinity if there is no such."""
        later = (
            partition.retry_at - now
            for partition in self
            if partition.retry_at > now and (is_wanted is None or is_wanted(partition))
        )
        return min(later, default=math.inf)

    def resolved(
        self, position: FetchPosition, start: int, partition_id: int | None = None, last_commit: int | None = None
    ) -> None:
        """Read from this position on; the partition has this id, and that commit is the last one behind it."""
        partition = position.partition
        if partition.is_current(position) and partition.start is not None:
            partition.start = None
            partition.partition_id = partition_id
            partition.last_commit = last_commit
            partition.fetch_position = start
            partition.is_hungry = partition.is_at_end = False

    def committed(self, position: FetchPosition, committed: int) -> None:
        """Remember what the group had committed before."""
        if position.partition.is_current(position):
            position.partition.committed = max(position.partition.committed, committed)

    def out_of_range(self, position: FetchPosition) -> None:
        """Resolve the start again: the log does not hold the offset, or no longer."""
        partition = position.partition
        if partition.is_current(position) and partition.start is None:
            partition.start = partition.fetch_position

    def recreated(self, position: FetchPosition) -> None:
        """Begin as after an assignment: the partition that was read has been deleted, and this is another one."""
        partition = position.partition
        if partition.is_current(position) and partition.start is None:
            self.seek(partition, OFFSET_STORED)
            partition.partition_id = partition.bounds = None
            partition.is_recreated = True
            partition.stored = partition.committed = OFFSET_INVALID

    def deliver(
        self, position: FetchPosition, page: PageRead, now: float = 0.0, *, brought_nothing: bool = False
    ) -> None:
        """Buffer what was read, unless the reader has moved since.

        With `brought_nothing` no partition of the reading had records: a broker would wait before it answers so.
        """
        partition = position.partition
        if (
            not partition.is_current(position)
            or partition.start is not None
            or partition.fetch_position != position.position
        ):
            return
        self._forgive(partition)
        partition.bounds = page.bounds
        partition.fetch_position = page.next_position
        moved = page.next_position > position.position
        partition.is_at_end = page.next_position >= page.end_position
        partition.is_hungry = not moved and position.position < page.end_position
        for chunk in page.chunks:
            partition.waiting.append(chunk)
            partition.buffered_records += chunk.record_count
            partition.buffered_bytes += chunk.size_bytes
            self.buffered_records += chunk.record_count
            self.buffered_bytes += chunk.size_bytes
        if moved and not page.chunks:
            self._step_over(partition, page.next_position)
            if self._positions.in_commit_order and partition.eof_reported_at == position.position:
                # Others' open transactions have grown, and the end that was reported is still the end.
                partition.eof_reported_at = page.next_position
        if self._reports_eof:
            self._note_eof(partition, page, now, moved=moved, brought_nothing=brought_nothing)
        self._make_ready(partition)

    def _note_eof(
        self, partition: AssignedPartition, page: PageRead, now: float, *, moved: bool, brought_nothing: bool
    ) -> None:
        """Report once that the partition has ended: as a broker does, with the empty answer behind its records."""
        if page.next_position < page.end_position or partition.eof_reported_at == page.next_position:
            partition.eof_due_at = math.inf
            return
        if moved or partition.eof_due_at == math.inf:
            partition.eof_due_at = now + self._eof_wait_seconds
        if now < partition.eof_due_at and (moved or brought_nothing):
            return
        partition.eof_due_at = math.inf
        partition.eof_reported_at = page.next_position
        end_offset = self._positions.place(page.next_position)
        partition.waiting.append(
            end_of_partition(partition.topic, partition.number, end_offset, page.bounds.high_watermark)
        )

    def hold(self, position: FetchPosition, bounds: Bounds) -> None:
        """Note that what was read is too little to be handed out, and that a commit is needed for there to be more."""
        if position.partition.is_current(position):
            position.partition.bounds = bounds
            position.partition.is_at_end = True

    def fail(self, position: FetchPosition, error: KafkaError | None, now: float, *, offset: int | None = None) -> None:
        """Report the error, if there is one and it was not reported a moment ago, and try again after a while."""
        partition = position.partition
        if not partition.is_current(position):
            return
        partition.retry_at = now + partition.retry_seconds
        if error is not None:
            partition.retry_seconds = min(partition.retry_seconds * 2, RETRY_LAST_SECONDS)
            self._report(partition, error, now, offset)

    def stop(self, position: FetchPosition, error: KafkaError, now: float, *, offset: int | None = None) -> None:
        """Report the error and stop reading the partition until the application seeks."""
        partition = position.partition
        if partition.is_current(position) and partition.retry_at != math.inf:
            partition.retry_at = math.inf
            partition.reported_code = None
            self._report(partition, error, now, offset)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _report(self, partition: AssignedPartition, error: KafkaError, now: float, offset: int | None) -> None:
        if partition.reported_code == error.code() and now - partition.reported_at < REPORT_AGAIN_SECONDS:
            return
        partition.reported_code, partition.reported_at = error.code(), now
        partition.waiting.append(error_message(error, partition.topic, partition.number, offset))
        self._make_ready(partition)

    def _forgive(self, partition: AssignedPartition) -> None:
        partition.retry_at = 0.0
        partition.retry_seconds = RETRY_FIRST_SECONDS
        partition.reported_code = None

    def _next_chunk(self, partition: AssignedPartition) -> Message | None:
        """Take the first thing that waits: a message is returned, a chunk becomes the current one."""
        if not partition.waiting:
            self._unready(partition)
            return None
        first = partition.waiting.popleft()
        if isinstance(first, Message):
            self._rotate(partition)
            return first
        try:
            partition.records = first.open()
        except (CorruptBatch, UnsupportedCompression) as error:
            return self._stop_at_damage(partition, first, error)
        partition.chunk = first
        return None

    def _stop_at_damage(self, partition: AssignedPartition, chunk: Chunk, error: TxnStoreError) -> Message:
        """Stay at the damaged batch, and try it again after a while."""
        self._drop_buffer(partition)
        partition.fetch_position = chunk.start
        partition.eof_reported_at = None
        partition.retry_at = time.monotonic() + RETRY_LAST_SECONDS
        return error_message(kafka_error_of(error), partition.topic, partition.number, chunk.first_offset)

    def _finish(self, partition: AssignedPartition, chunk: Chunk) -> None:
        """Step over what follows the chunk, which has been handed out, and let the next partition have its turn."""
        partition.chunk = None
        partition.buffered_records -= chunk.record_count
        partition.buffered_bytes -= chunk.size_bytes
        self.buffered_records -= chunk.record_count
        self.buffered_bytes -= chunk.size_bytes
        self.wants_more = True
        self._move(partition, chunk.next_position, over_records=chunk.source is not None)
        self._rotate(partition)

    def _step_over(self, partition: AssignedPartition, next_position: int) -> None:
        """Move the position over markers and aborted records, once everything before them is handed out."""
        if partition.chunk is None and not partition.waiting:
            self._move(partition, next_position, over_records=False)
        else:
            partition.waiting.append(Chunk(None, _no_records, 0, 0, -1, -1, next_position, next_position))

    def _move(self, partition: AssignedPartition, position: int, *, over_records: bool = True) -> None:
        partition.position = position
        if self._stores_at_once or not (over_records or partition in self._withheld):
            if self._stores_offsets:
                partition.stored = position
        elif self._stores_offsets:
            self._withheld.add(partition)

    def _make_ready(self, partition: AssignedPartition) -> None:
        has_something = partition.chunk is not None or partition.waiting
        if has_something and not partition.is_paused and not partition.is_ready:
            partition.is_ready = True
            self._ready.append(partition)

    def _unready(self, partition: AssignedPartition) -> None:
        if partition.is_ready:
            partition.is_ready = False
            self._ready.remove(partition)

    def _rotate(self, partition: AssignedPartition) -> None:
        if partition.is_ready:
            self._unready(partition)
            self._make_ready(partition)

    def _drop_buffer(self, partition: AssignedPartition) -> None:
        partition.version += 1
        self._unready(partition)
        partition.chunk = None
        partition.waiting.clear()
        self.buffered_records -= partition.buffered_records
        self.buffered_bytes -= partition.buffered_bytes
        partition.buffered_records = partition.buffered_bytes = 0
        partition.is_hungry = partition.is_at_end = False
        partition.ended_in = -1
        partition.eof_due_at = math.inf


def _no_records() -> Iterator[RecordTuple]:
    return iter(())

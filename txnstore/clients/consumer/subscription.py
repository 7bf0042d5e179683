"""This file is what a consumer knows of its assigned partitions: positions, what is buffered, and what to read next.

It knows no thread and no database: whoever calls holds the consumer's lock.  What was read for a position that the
application has left since carries an old version and is dropped.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, repeat
from typing import Final

from txnstore.clients.consumer.assigned_partition import (
    RETRY_FIRST_SECONDS,
    RETRY_LAST_SECONDS,
    AssignedPartition,
    Chunk,
    FetchPosition,
    PageRead,
)
from txnstore.clients.consumer.error_messages import end_of_partition, error_message
from txnstore.clients.model.constants import OFFSET_INVALID, OFFSET_STORED
from txnstore.clients.model.error_mapping import kafka_error_of
from txnstore.clients.model.kafka_error import KafkaError
from txnstore.clients.model.message import Message, RecordTuple
from txnstore.errors import CorruptBatch, TxnStoreError, UnsupportedCompression

#: Which of the partitions somebody looks after.
Wanted = Callable[[AssignedPartition], bool]

#: An error that stays is said again after this long.
SAY_AGAIN_SECONDS: Final = 30.0


class Subscription:
    """The assigned partitions of one consumer."""

    def __init__(
        self,
        *,
        stores_offsets: bool,
        reports_eof: bool,
        records_low: int,
        bytes_low: int,
        end_wait_seconds: float = 0.0,
    ) -> None:
        """Read ahead while fewer than `records_low` records and `bytes_low` bytes are buffered.

        The end of a partition is said when nothing has come for `end_wait_seconds`.
        """
        self._end_wait_seconds = end_wait_seconds
        self._stores_offsets = stores_offsets
        self._says_end = reports_eof
        self._records_low = records_low
        self._bytes_low = bytes_low
        self._partitions: dict[tuple[str, int], AssignedPartition] = {}
        self._ready: deque[AssignedPartition] = deque()
        self.buffered_records = 0
        self.buffered_bytes = 0
        self.wants_more = False
        """Set when something was handed out completely, so that there may be room to read on."""

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

    def add(self, topic: str, number: int, offset: int) -> None:
        """Assign a partition that is not assigned yet."""
        self._partitions[topic, number] = AssignedPartition(topic, number, offset)

    def remove(self, topic: str, number: int) -> AssignedPartition | None:
        """Take a partition away, with everything that is buffered of it; return it."""
        partition = self._partitions.pop((topic, number), None)
        if partition is not None:
            self._drop_buffer(partition)
        return partition

    def clear(self) -> list[AssignedPartition]:
        """Take all partitions away and return them."""
        removed = list(self)
        for partition in removed:
            self.remove(partition.topic, partition.number)
        return removed

    def seek(self, partition: AssignedPartition, offset: int) -> None:
        """Go on from `offset`, or from what the constant stands for; the position is unknown until then."""
        self._drop_buffer(partition)
        partition.start = offset
        partition.position = OFFSET_INVALID
        partition.end_said_at = None
        partition.is_anew = False
        self._forgive(partition)

    def pause(self, partition: AssignedPartition) -> None:
        """Hand out nothing more of the partition; what is buffered stays."""
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
        """Return the next message, a record or not, and move the position behind it."""
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
                partition.position = offset + 1
                if self._stores_offsets:
                    partition.stored = offset + 1
            return Message.from_record(chunk.source, record)  # type: ignore[arg-type]  # what has records has a source
        return None

    def take(self, messages: list[Message], count: int) -> None:
        """Add messages to `messages` until there are `count`, or no more at hand: the fast way to many of them."""
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
            messages.extend(map(Message.from_record, repeat(chunk.source), records))  # type: ignore[arg-type]  # (above)
            last_offset = messages[-1].offset() if len(messages) > before else None
            if last_offset is None or last_offset >= chunk.last_offset:
                self._finish(partition, chunk)
            else:
                self._move(partition, last_offset + 1)

    def give_back(self, messages: Iterable[Message]) -> None:
        """Hand these messages out again, which were taken but never reached the application."""
        firsts: dict[tuple[str | None, int | None], int] = {}
        for message in messages:
            offset = message.offset()
            if message.error() is None and offset is not None:
                firsts.setdefault((message.topic(), message.partition()), offset)
        for (topic, number), offset in firsts.items():
            partition = self._partitions.get((str(topic), -1 if number is None else number))
            if partition is not None:
                self.seek(partition, offset)
                self._move(partition, offset)

    # --- reading -----------------------------------------------------------------------------------------------------

    def to_resolve(self, now: float, is_wanted: Wanted | None = None) -> list[FetchPosition]:
        """Return the partitions whose start is not known to be an offset yet; of all, or of those that are wanted."""
        return [
            FetchPosition(partition, partition.version, partition.start)
            for partition in self
            if partition.start is not None and partition.retry_at <= now and (is_wanted is None or is_wanted(partition))
        ]

    def to_read(self, now: float, is_wanted: Wanted | None = None) -> list[FetchPosition]:
        """Return what to read next, of all partitions or of those that are wanted; nothing while enough is buffered."""
        if self.buffered_records >= self._records_low or self.buffered_bytes >= self._bytes_low:
            return []
        # Nobody fills the buffer alone, and who got nothing because the page was full comes first.
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
            FetchPosition(partition, partition.version, partition.fetch_offset) for partition in hungry or candidates
        ]

    def next_retry(self, now: float, is_wanted: Wanted | None = None) -> float:
        """Return in how many seconds a partition that could not be read is tried again; infinity if none is."""
        later = (
            partition.retry_at - now
            for partition in self
            if partition.retry_at > now and (is_wanted is None or is_wanted(partition))
        )
        return min(later, default=math.inf)

    def resolved(self, ticket: FetchPosition, offset: int, partition_id: int | None = None) -> None:
        """Read from `offset` on from now on; the partition has this id."""
        partition = ticket.partition
        if partition.is_current(ticket) and partition.start is not None:
            partition.start = None
            partition.partition_id = partition_id
            partition.fetch_offset = offset
            partition.is_hungry = partition.is_at_end = False

    def committed(self, ticket: FetchPosition, offset: int) -> None:
        """Remember what the group had committed before."""
        if ticket.partition.is_current(ticket):
            ticket.partition.committed = max(ticket.partition.committed, offset)

    def out_of_range(self, ticket: FetchPosition) -> None:
        """Begin anew: the log does not hold the offset (any more)."""
        partition = ticket.partition
        if partition.is_current(ticket) and partition.start is None:
            partition.start = partition.fetch_offset

    def made_anew(self, ticket: FetchPosition) -> None:
        """Begin as after an assignment: the partition is another one, and what is known is of one that was deleted."""
        partition = ticket.partition
        if partition.is_current(ticket) and partition.start is None:
            self.seek(partition, OFFSET_STORED)
            partition.partition_id = partition.bounds = None
            partition.is_anew = True
            partition.stored = partition.committed = OFFSET_INVALID

    def deliver(self, ticket: FetchPosition, page: PageRead, now: float = 0.0, *, is_held: bool = False) -> None:
        """Buffer what was read, unless the reader is elsewhere by now.

        A reading that brought nothing of any partition is `is_held`: a broker would wait before it answers.
        """
        partition = ticket.partition
        if not partition.is_current(ticket) or partition.start is not None or partition.fetch_offset != ticket.offset:
            return
        self._forgive(partition)
        partition.bounds = page.bounds
        partition.fetch_offset = page.next_offset
        moved = page.next_offset > ticket.offset
        partition.is_at_end = page.next_offset >= page.end_offset
        partition.is_hungry = not moved and ticket.offset < page.end_offset
        for chunk in page.chunks:
            partition.waiting.append(chunk)
            partition.buffered_records += chunk.record_count
            partition.buffered_bytes += chunk.size_bytes
            self.buffered_records += chunk.record_count
            self.buffered_bytes += chunk.size_bytes
        if moved and not page.chunks:
            self._step_over(partition, page.next_offset)
        if self._says_end:
            self._note_end(partition, page, now, moved=moved, is_held=is_held)
        self._make_ready(partition)

    def _note_end(
        self, partition: AssignedPartition, page: PageRead, now: float, *, moved: bool, is_held: bool
    ) -> None:
        """Say once that the partition has ended: as with a broker, by the empty answer that follows its records."""
        if page.next_offset < page.end_offset or partition.end_said_at == page.next_offset:
            partition.end_due_at = math.inf
            return
        if moved or partition.end_due_at == math.inf:
            partition.end_due_at = now + self._end_wait_seconds
        if now < partition.end_due_at and (moved or is_held):
            return
        partition.end_due_at = math.inf
        partition.end_said_at = page.next_offset
        partition.waiting.append(
            end_of_partition(partition.topic, partition.number, page.next_offset, page.bounds.high_watermark)
        )

    def hold(self, ticket: FetchPosition) -> None:
        """Note that what was read is not enough, and that there is no more until somebody commits something."""
        if ticket.partition.is_current(ticket):
            ticket.partition.is_at_end = True

    def fail(self, ticket: FetchPosition, error: KafkaError | None, now: float, *, offset: int | None = None) -> None:
        """Say the error if there is one to say, but not all the time, and try again after a while."""
        partition = ticket.partition
        if not partition.is_current(ticket):
            return
        partition.retry_at = now + partition.retry_seconds
        if error is not None:
            partition.retry_seconds = min(partition.retry_seconds * 2, RETRY_LAST_SECONDS)
            self._say(partition, error, now, offset)

    def stop(self, ticket: FetchPosition, error: KafkaError, now: float, *, offset: int | None = None) -> None:
        """Say the error and read no more of the partition until the application seeks."""
        partition = ticket.partition
        if partition.is_current(ticket) and partition.retry_at != math.inf:
            partition.retry_at = math.inf
            partition.said_code = None
            self._say(partition, error, now, offset)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _say(self, partition: AssignedPartition, error: KafkaError, now: float, offset: int | None) -> None:
        if partition.said_code == error.code() and now - partition.said_at < SAY_AGAIN_SECONDS:
            return
        partition.said_code, partition.said_at = error.code(), now
        partition.waiting.append(error_message(error, partition.topic, partition.number, offset))
        self._make_ready(partition)

    def _forgive(self, partition: AssignedPartition) -> None:
        partition.retry_at = 0.0
        partition.retry_seconds = RETRY_FIRST_SECONDS
        partition.said_code = None

    def _next_chunk(self, partition: AssignedPartition) -> Message | None:
        """Take what waits first: a message is returned, a chunk becomes the current one."""
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
            return self._damaged(partition, first, error)
        partition.chunk = first
        return None

    def _damaged(self, partition: AssignedPartition, chunk: Chunk, error: TxnStoreError) -> Message:
        """Stay where the damaged batch is, and look again in a while."""
        self._drop_buffer(partition)
        partition.fetch_offset = chunk.first_offset
        partition.end_said_at = None
        partition.retry_at = time.monotonic() + RETRY_LAST_SECONDS
        return error_message(kafka_error_of(error), partition.topic, partition.number, chunk.first_offset)

    def _finish(self, partition: AssignedPartition, chunk: Chunk) -> None:
        """The chunk is handed out: step over what follows it, and let the next partition have its turn."""
        partition.chunk = None
        partition.buffered_records -= chunk.record_count
        partition.buffered_bytes -= chunk.size_bytes
        self.buffered_records -= chunk.record_count
        self.buffered_bytes -= chunk.size_bytes
        self.wants_more = True
        self._move(partition, chunk.next_offset)
        self._rotate(partition)

    def _step_over(self, partition: AssignedPartition, next_offset: int) -> None:
        """Move the position over markers and aborted records, once everything before them is handed out."""
        if partition.chunk is None and not partition.waiting:
            self._move(partition, next_offset)
        else:
            last_offset = next_offset - 1
            partition.waiting.append(Chunk(None, _no_records, 0, 0, last_offset, last_offset, next_offset))

    def _move(self, partition: AssignedPartition, position: int) -> None:
        partition.position = position
        if self._stores_offsets:
            partition.stored = position

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
        partition.end_due_at = math.inf


def _no_records() -> Iterator[RecordTuple]:
    return iter(())

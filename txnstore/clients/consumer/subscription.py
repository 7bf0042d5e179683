"""The subscription of a consumer: the assigned partitions, their positions, what is buffered, and what to read next.

It knows no thread and no database: the caller holds the consumer's lock.  What was read for a position that the
application has left since carries an old version and is dropped.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from txnstore import bulk
from txnstore.clients.consumer.assigned_partition import (
    RETRY_FIRST_SECONDS,
    RETRY_LAST_SECONDS,
    AssignedPartition,
    FetchPosition,
    Wanted,
)
from txnstore.clients.consumer.opening import Chunk, PageRead, StoredOffset
from txnstore.clients.consumer.orders import DeliveryOrder, RoundRobin
from txnstore.clients.consumer.positions import OFFSET_ORDER, Positions
from txnstore.clients.model.errors import KafkaError, kafka_error_of
from txnstore.clients.model.message import Message, end_of_partition, error_message
from txnstore.clients.model.topic_partition import OFFSET_INVALID, OFFSET_STORED
from txnstore.clients.outlet import Outlet, new_outlet
from txnstore.clients.statistics import Traffic
from txnstore.deadline import to_its_end
from txnstore.errors import CorruptBatch, TxnStoreError, UnsupportedCompression
from txnstore.log.bounds import Bounds

#: An error that persists is reported again after this long.
REPORT_AGAIN_SECONDS: Final = 30.0


class Subscription:
    """The assigned partitions of one consumer; the order says which of them hands out what comes next."""

    def __init__(
        self,
        *,
        stores_offsets: bool,
        reports_eof: bool,
        records_low: int,
        bytes_low: int,
        eof_wait_seconds: float = 0.0,
        positions: Positions = OFFSET_ORDER,
        order: DeliveryOrder | None = None,
        outlet: Outlet | None = None,
    ) -> None:
        """Read ahead while fewer than `records_low` records and `bytes_low` bytes are buffered of what is not paused.

        The end of a partition is reported when nothing has arrived for `eof_wait_seconds`.  By default partitions take
        turns.
        """
        self._positions = positions
        self._order = order or RoundRobin()
        self._ready = self._order.ready
        self._outlet = outlet or new_outlet()
        self._lender: AssignedPartition | None = None
        """Whose messages the outlet hands out."""
        self._announced: Chunk | None = None
        """The chunk that the order was last told is handed out."""
        self._eof_wait_seconds = eof_wait_seconds
        self._stores_offsets = self._stores_at_once = stores_offsets
        self.withheld: set[AssignedPartition] = set()
        """Partitions of which something was handed out that has not reached the application: it is not stored yet."""
        self.gathered: dict[int, tuple[list[Message], dict[AssignedPartition, int]]] = {}
        """What each call under way has gathered, by the identity of its list, and where that begins."""
        self.kept: list[Message] = []
        """The last records that were handed out, if a call has gathered them that goes on when it is made again.

        They have not reached the application: before anything else is done here, they are given back."""
        self._torn: tuple[AssignedPartition, Chunk, int, Message | None] | None = None
        """The partition that lost a record to an interrupt, with the position before it; the record too, if known.

        As what is kept, it is given back before anything else."""
        self._begins: dict[AssignedPartition, int] = {}
        self._begins_known = 0
        """Of how many of them the positions are among these."""
        self._is_unsettled = False
        """Whether the outlet may be open or something may be kept: one look for each record instead of two."""
        self._reports_eof = reports_eof
        self._records_low = records_low
        self._bytes_low = bytes_low
        self._partitions: dict[tuple[str, int], AssignedPartition] = {}
        self.paused = set[tuple[str, int]]()
        """What the application has paused and not resumed: it stays so while it is not assigned."""
        self.buffered_records = 0
        self.buffered_bytes = 0
        self.traffic = Traffic()
        """What was read, page by page; records that were dropped unread by the application as well, but no page
        that came after it had moved."""
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
        self.return_kept()
        self._partitions[topic, number] = added = AssignedPartition(topic, number, position)
        added.paused_by = frozenset({"application"} if (topic, number) in self.paused else ())
        self._arrange(added)

    def remove(self, topic: str, number: int) -> AssignedPartition | None:
        """Remove a partition with everything that is buffered of it, and return it."""
        self.return_kept()
        partition = self._partitions.get((topic, number))
        if partition is not None:
            self._drop_buffer(partition)
            # No interrupt comes in between: what is not assigned has nothing to hand out.
            del self._partitions[topic, number]
            self._arrange(partition)
            self.withheld.discard(partition)
            partition.drop_from(self.gathered.values())
        return partition

    def clear(self) -> list[AssignedPartition]:
        """Remove all partitions and return them."""
        removed = (self.remove(*key) for key in list(self._partitions))
        return [partition for partition in removed if partition is not None]

    def seek(self, partition: AssignedPartition, position: int) -> None:
        """Continue from `position`, or from what the constant stands for; it is unknown until then."""
        self.return_kept()
        partition.is_recreated = False
        self._seek(partition, position)

    def _seek(self, partition: AssignedPartition, position: int, *, goes_back: bool = False) -> None:
        self._announced = None
        self._order.start_over()
        self._drop_buffer(partition)
        # No interrupt comes between these: what was dropped is read again, or left for good.
        partition.start = position
        partition.has_fallen_behind = goes_back
        partition.stored_offset = partition.last_commit = partition.eof_reported_at = None
        partition.known_position = OFFSET_INVALID
        partition.is_unknown = True
        self._forgive(partition)
        self._arrange(partition)

    def pause(self, partition: AssignedPartition, by: str = "application") -> None:
        """Stop handing out records of the partition until the same one resumes it; what is buffered stays."""
        self.return_kept()
        # No call in between, so that an interrupt finds both done, or nothing.
        partition.paused_by |= {by}
        self.paused |= {(partition.topic, partition.number)} if by == "application" else set()
        self._arrange(partition)

    def resume(self, partition: AssignedPartition, by: str = "application") -> None:
        """Hand out records of the partition again, unless another one has paused it too."""
        self.return_kept()
        if partition.paused_by:
            partition.paused_by -= {by}
            # Nobody has listened for what has come meanwhile.
            partition.is_at_end = False
        self._arrange(partition)

    # --- handing out -------------------------------------------------------------------------------------------------

    @property
    def has_messages(self) -> bool:
        """Whether something may be handed out at once."""
        return bool(self._ready)

    def open_outlet(self, *, is_timed: bool) -> None:
        """Let poll() have what follows what it has just got, up to the last record of the batch but one."""
        partition = self._ready[0] if self._ready else None
        chunk = None if partition is None else partition.chunk
        if partition is None or chunk is None or (self._stores_offsets and not self._stores_at_once):
            return
        messages = partition.messages
        if isinstance(messages, bulk.core.Messages) and messages.taken_offset >= 0:
            self._close_outlet()
            partition.stores_lent = self._stores_at_once
            # In this order: an interrupt may come before it is open.
            self._is_unsettled = True
            partition.lent, self._lender = messages, partition
            self._outlet.open(messages, chunk.last_offset, is_timed)

    def _close_outlet(self) -> None:
        """Keep poll() from handing out without the lock, and note how far it has come."""
        partition = self._lender
        if partition is not None:
            self._outlet.close()
            position, stored = partition.position, partition.stored
            # No interrupt comes between these.
            partition.known_position, partition.known_stored = position, stored
            partition.lent = self._lender = None

    def _settle(self) -> None:
        # One or the other: while something is kept, no poll() opens it.
        self._close_outlet()
        self.return_kept()
        # Unless a signal's handler has read on meanwhile.
        if self._lender is None and not self.kept:
            self._is_unsettled = False

    def next_message(self, keeps: bool = False) -> Message | None:  # noqa: C901 - every call less is felt for each record
        """Return the next message, a record or an event, and move the position past it.

        What is kept is given back before, unless the call `keeps` it.
        """
        if self._is_unsettled and (self._lender is not None or not keeps or self._torn is not None):
            self._settle()
        while self._ready:
            partition = self._ready[0]
            chunk = partition.chunk
            # Others may have come in between. Only who keeps records asks what they belong to.
            if chunk is None or (keeps and self._announced is not chunk):
                message = self._next_chunk(partition)
                if message is not None:
                    return message
                continue
            message = None
            try:
                message = next(partition.messages, None)
                if message is None:
                    self._finish(partition, chunk)
                    continue
                # Whichever takes less time.
                offset: int = message.offset() if bulk.IN_C else message._record[0]  # type: ignore[assignment]  # noqa: SLF001
                if offset >= chunk.last_offset or partition.chunk is not chunk:
                    self._finish(partition, chunk)
                else:
                    partition.known_position = chunk.base + chunk.unit * (offset + 1)
                    if self._stores_at_once:
                        partition.known_stored = partition.known_position
                    elif self._stores_offsets:
                        self.withheld.add(partition)
                if keeps:
                    # No call from here on: it is kept, or goes back.
                    self._is_unsettled = True
                    self.kept += (message,)
                return message
            except BaseException:
                # An interrupt: the caller does not know which message that was. No call before it is noted: however
                # often there is another one, the record goes back.
                self._torn = partition, chunk, partition.known_position, message
                self._is_unsettled = True
                to_its_end(self._go_back_to_torn)
                raise
        return None

    def take(self, messages: list[Message], count: int) -> None:
        """Add what is at hand to `messages`, up to `count` of them: the fast way to many."""
        if self._is_unsettled:
            self._settle()
        while len(messages) < count and self._ready:
            partition = self._ready[0]
            chunk = partition.chunk
            if chunk is None:
                message = self._next_chunk(partition)
                if message is not None:
                    messages.append(message)
                continue
            before = len(messages)
            _, begins = self.gathered.get(id(messages), (None, None))
            try:
                messages.extend(islice(partition.messages, count - before))
            except BaseException:
                # As above, where messages are made in Python: that one is in no list yet.
                self._torn = partition, chunk, partition.known_position, None
                self._is_unsettled = True
                to_its_end(self._go_back_to_torn)
                raise
            last_offset = messages[-1].offset() if len(messages) > before else None
            if begins is not None and last_offset is not None:
                begins.setdefault(partition, self._positions.of_message(messages[before]))
            if last_offset is None or last_offset >= chunk.last_offset or partition.chunk is not chunk:
                self._finish(partition, chunk)
            else:
                self._move(partition, chunk.base + chunk.unit * (last_offset + 1))
        if self.withheld and id(messages) not in self.gathered:
            self.let_go()

    def withhold(self, messages: list[Message]) -> None:
        """Store no offset of what is taken into this list while it is among `gathered`: nobody has got it yet."""
        self._close_outlet()
        self._stores_at_once = False
        self.gathered[id(messages)] = messages, {}

    def let_go(self, unreturned: Iterable[Message] = ()) -> None:
        """Store the offsets of what was handed out, up to what is kept or gathered: it reaches the application now.

        So it is up to what is `unreturned`.  Until the rest is given back or let go, nothing that is handed out is
        stored.
        """
        held = dict(self.begins_of_kept())
        for partition, begin in self._lowest_of(unreturned).items():
            # What was given back may lie before it, and be read again only in part.
            held[partition] = min(begin, partition.position, held.get(partition, begin))
        for _, begins in self.gathered.values():
            for partition, begin in begins.items():
                held[partition] = min(begin, held.get(partition, begin))
        self._stores_at_once = self._stores_offsets and not held and not self.gathered
        for partition in self.withheld:
            position = held.get(partition, partition.position)
            if position >= 0:
                partition.stored = position
        self.withheld.intersection_update(held)

    def give_back(self, messages: Sequence[Message]) -> None:
        """Hand these messages out again, which were taken but never reached the application."""
        self._go_back_to_torn()
        begins = self._lowest_of(messages)
        if begins and self.kept:
            kept = self.begins_of_kept()
            # What is kept of a partition may lie before these, or behind them.
            begins = {partition: min(begin, kept.get(partition, begin)) for partition, begin in begins.items()}
            self.return_kept()
        events = [message for message in messages if message.error() is not None]
        for partition in self:
            partition.put_back(events)
        self._go_back_to(begins)

    def _go_back_to_torn(self) -> None:
        if self._torn is not None:
            partition, chunk, position, message = self._torn
            begin = max(position, chunk.start) if message is None else self._positions.of_message(message)
            self._go_back(partition, begin)
            self._torn = None

    def _go_back_to(self, begins: Mapping[AssignedPartition, int]) -> None:
        for partition, position in begins.items():
            # Else it is of the deleted one: the one made anew, where it has begun, has handed out nothing yet.
            if partition.has_fallen_behind or not partition.is_unread:
                self._go_back(partition, position)
        for partition in self:
            # An interrupt may have come before it had its next turn.
            self._arrange(partition)

    def _go_back(self, partition: AssignedPartition, position: int) -> None:
        self._seek(partition, position, goes_back=True)
        if self._stores_offsets:
            partition.stored = min(partition.stored, position)
        # One that was made anew is unread until it hands something out again.
        if not partition.is_recreated:
            self._move(partition, position)

    def keep_next(self) -> Message | None:
        """Return the next message; a record is kept with those before it, and not stored."""
        self._stores_at_once = False
        return self.next_message(True)

    def return_kept(self) -> None:
        """Give back what is kept: it comes again, and positions are those before it."""
        if self.kept or self._torn is not None:
            # What Ctrl-C left out would never come, or what goes back already would come twice.
            to_its_end(self._return_kept)

    def _return_kept(self) -> None:
        self._go_back_to_torn()
        self._go_back_to(self._begins_of(self.kept))
        self.let_go_kept()
        self.let_go()

    def let_go_kept(self) -> list[Message]:
        """Return what is kept, and keep nothing any more."""
        kept, self.kept, self._begins, self._begins_known = self.kept, [], {}, 0
        return kept

    def begins_of_kept(self) -> Mapping[AssignedPartition, int]:
        """Return where partitions go on once what is kept is given back."""
        if len(self.kept) > self._begins_known:
            self._begins = self._begins_of(self.kept[self._begins_known :]) | self._begins
            self._begins_known = len(self.kept)
        return self._begins

    def _lowest_of(self, messages: Iterable[Message]) -> dict[AssignedPartition, int]:
        """Return the lowest positions of these records, which several calls may have read, in no order."""
        lowest: dict[AssignedPartition, int] = {}
        for message in messages:
            for partition, position in self._begins_of((message,)).items():
                lowest[partition] = min(position, lowest.get(partition, position))
        return lowest

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
            FetchPosition(partition, partition.version, partition.start, partition.stored_offset)
            for partition in self
            if partition.start is not None and partition.retry_at <= now and (is_wanted is None or is_wanted(partition))
        ]

    def to_read(self, now: float, is_wanted: Wanted | None = None) -> list[FetchPosition]:
        """Return what to read next of the wanted partitions, by default of all.

        While enough is buffered, that is only what the order waits for.
        """
        chosen: list[AssignedPartition] = []
        if not self._has_enough():
            self._shorten_paused()
            # No partition fills the buffer alone, and those that got nothing because the page was full come first.
            share = max(1, self._records_low // max(1, len(self._partitions)))
            readable = self._readable(now, is_wanted)
            chosen = [one for one in readable if not one.paused_by and one.buffered_records < share]
            chosen = [one for one in chosen if one.is_hungry] or chosen
        chosen += self._order.more_to_read(chosen, self._readable(now, is_wanted))
        return [FetchPosition(partition, partition.version, partition.fetch_position) for partition in chosen]

    def _readable(self, now: float, is_wanted: Wanted | None) -> Iterator[AssignedPartition]:
        return (
            partition
            for partition in self
            if partition.start is None and partition.retry_at <= now and (is_wanted is None or is_wanted(partition))
        )

    def _has_enough(self) -> bool:
        records, size_bytes = self.buffered_records, self.buffered_bytes
        if records < self._records_low and size_bytes < self._bytes_low:
            return False
        # What is paused may stay so until a record of another partition has come: it takes no room from those.
        paused = [partition for partition in self if partition.paused_by]
        records -= sum(partition.buffered_records for partition in paused)
        size_bytes -= sum(partition.buffered_bytes for partition in paused)
        return records >= self._records_low or size_bytes >= self._bytes_low

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
            is_another = partition.partition_id not in (None, partition_id)
            if is_another and partition.has_fallen_behind:
                self._begin_anew(partition)
                return
            partition.start = partition.stored_offset = None
            partition.has_fallen_behind = False
            if is_another:
                # The application has sought in a recreated one: these are offsets of the one before.
                partition.stored = partition.committed = OFFSET_INVALID
            partition.partition_id = partition_id
            partition.last_commit = last_commit
            partition.fetch_position = start
            partition.is_hungry = partition.is_at_end = False
            self._arrange(partition)

    def found_stored(self, position: FetchPosition, stored_offset: StoredOffset) -> None:
        """Let the partition begin at what the group has committed."""
        if position.partition.is_current(position):
            position.partition.stored_offset = stored_offset

    def moved(self, position: FetchPosition, now: float) -> None:
        """Look again where the partition is, and what is committed there."""
        if position.partition.is_current(position):
            position.partition.leader = position.partition.stored_offset = None
            self.fail(position, None, now)

    def committed(self, position: FetchPosition, committed: int) -> None:
        """Remember what the group had committed before."""
        if position.partition.is_current(position):
            position.partition.committed = max(position.partition.committed, committed)

    def out_of_range(self, position: FetchPosition) -> None:
        """Resolve the start again: the log does not hold the offset, or no longer."""
        partition = position.partition
        if partition.is_current(position) and partition.start is None:
            partition.start = partition.fetch_position
            partition.has_fallen_behind = partition.is_unknown = True
            self._arrange(partition)

    def recreated(self, position: FetchPosition) -> None:
        """Begin as after an assignment: the partition that was read has been deleted, and this is another one."""
        partition = position.partition
        if partition.is_current(position) and partition.start is None:
            self._begin_anew(partition)

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
        partition.ended_in = page.snapshot if partition.is_at_end else -1
        partition.is_hungry = not moved and position.position < page.end_position
        traffic = self.traffic
        traffic.requests += 1
        for chunk in page.chunks:
            partition.waiting.append(chunk)
            self._count(partition, chunk)
            traffic.records += chunk.record_count
            traffic.size_bytes += chunk.size_bytes
        if moved and not page.chunks:
            self._step_over(partition, page.next_position)
            if self._positions.in_commit_order and partition.eof_reported_at == position.position:
                # Others' open transactions have grown, and the end that was reported is still the end.
                partition.eof_reported_at = page.next_position
        if self._reports_eof:
            self._note_eof(partition, page, now, moved=moved, brought_nothing=brought_nothing)
        partition.is_unknown = partition.is_unknown and not partition.is_at_end and partition.head is None
        self._arrange(partition)

    def _note_eof(
        self, partition: AssignedPartition, page: PageRead, now: float, *, moved: bool, brought_nothing: bool
    ) -> None:
        """Report once that the partition has ended: as a broker does, with the empty answer after its records."""
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
        partition.is_at_end = False
        if error is not None:
            partition.wait_longer()
            self._report(partition, error, now, offset)
        self._arrange(partition)

    def stop(self, position: FetchPosition, error: KafkaError, now: float, *, offset: int | None = None) -> None:
        """Report the error and stop reading the partition until the application seeks."""
        partition = position.partition
        if partition.is_current(position) and partition.retry_at != math.inf:
            partition.retry_at = math.inf
            partition.reported_code = None
            self._report(partition, error, now, offset)
            self._arrange(partition)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _begin_anew(self, partition: AssignedPartition) -> None:
        self.seek(partition, OFFSET_STORED)
        partition.drop_from(self.gathered.values())
        partition.partition_id = partition.bounds = None
        partition.is_recreated = True
        partition.stored = partition.committed = OFFSET_INVALID

    def _report(self, partition: AssignedPartition, error: KafkaError, now: float, offset: int | None) -> None:
        # Whether it is told again or not.
        partition.trouble, partition.is_unknown = error.code(), False
        if partition.reported_code == error.code() and now - partition.reported_at < REPORT_AGAIN_SECONDS:
            return
        partition.reported_code, partition.reported_at = error.code(), now
        partition.waiting.append(error_message(error, partition.topic, partition.number, offset))

    def _forgive(self, partition: AssignedPartition) -> None:
        partition.retry_at = 0.0
        partition.retry_seconds = RETRY_FIRST_SECONDS
        partition.trouble = partition.reported_code = None

    def _next_chunk(self, partition: AssignedPartition) -> Message | None:
        """Take the first thing that waits: a message is returned, a chunk becomes the current one, and is announced."""
        if partition.chunk is not None:
            self._announce(partition, partition.chunk)
            return None
        if not partition.waiting:
            self._arrange(partition)
            return None
        first = partition.waiting[0]
        event: Message | None = None
        chunk: Chunk | None = None
        messages: Iterator[Message] = iter(())
        if isinstance(first, Message):
            event = first
        else:
            chunk = first
            try:
                messages = chunk.open()
            except (CorruptBatch, UnsupportedCompression) as error:
                return self._stop_at_damage(partition, chunk, error)
        # Before it is the current one, which goes on after an interrupt without being announced.
        if chunk is not None and not self._announce(partition, chunk):
            return None
        if partition.chunk is not None or not partition.waiting or partition.waiting[0] is not first:
            return None  # As in `_finish`.
        # No interrupt comes between these.
        partition.messages, partition.chunk = messages, chunk
        partition.waiting.popleft()
        if event is not None:
            self._end_turn(partition)
        return event

    def _announce(self, partition: AssignedPartition, chunk: Chunk) -> bool:
        """Tell the order what is handed out next; return False if it has decided anew instead."""
        if chunk.commit is None or self._order.begin(partition, chunk.commit):
            self._announced = chunk
            return True
        self._arrange(partition)
        return False

    def _stop_at_damage(self, partition: AssignedPartition, chunk: Chunk, error: TxnStoreError) -> Message:
        """Stay at the damaged batch, and try it again after a while."""
        self._drop_buffer(partition)
        # No interrupt comes in between: it would be skipped.
        partition.fetch_position = chunk.start
        partition.eof_reported_at = None
        partition.retry_at = time.monotonic() + RETRY_LAST_SECONDS
        kafka_error = kafka_error_of(error)
        partition.trouble = kafka_error.code()
        self._arrange(partition)
        return error_message(kafka_error, partition.topic, partition.number, chunk.first_offset)

    def _finish(self, partition: AssignedPartition, chunk: Chunk) -> None:
        """Step over what follows the chunk, which has been handed out, and let the next partition have its turn."""
        if partition.chunk is not chunk:
            return  # A signal's handler or a finalizer has read on meanwhile, on the same thread.
        partition.chunk = None
        self._count(partition, chunk, -1)
        self.wants_more = True
        self._move(partition, chunk.next_position, over_records=chunk.source is not None)
        self._end_turn(partition)

    def _step_over(self, partition: AssignedPartition, next_position: int) -> None:
        """Move the position over markers and aborted records, once everything before them is handed out."""
        if partition.chunk is None and not partition.waiting:
            self._move(partition, next_position, over_records=False)
        else:
            partition.waiting.append(Chunk(None, lambda: iter(()), 0, 0, -1, -1, next_position, next_position))

    def _move(self, partition: AssignedPartition, position: int, *, over_records: bool = True) -> None:
        partition.position = position
        if self._stores_at_once or not (over_records or partition in self.withheld):
            if self._stores_offsets:
                partition.stored = position
        elif self._stores_offsets:
            self.withheld.add(partition)

    def _arrange(self, partition: AssignedPartition) -> None:
        """Let the order decide who is next: something has changed about this partition."""
        lender = self._lender
        if lender is not None and not self._order.keeps_turn(lender):
            self._close_outlet()
        self._order.arrange(partition, self._partitions)

    def _end_turn(self, partition: AssignedPartition) -> None:
        if self._lender is not None:
            self._close_outlet()
        self._order.end_turn(partition, self._partitions)

    def _shorten_paused(self) -> None:
        """Leave paused partitions their first records alone, once too much is buffered and somebody else reads on."""
        if self.buffered_records < 2 * self._records_low and self.buffered_bytes < 2 * self._bytes_low:
            return
        paused = [partition for partition in self if partition.paused_by]
        if len(paused) < len(self._partitions):
            for partition in paused:
                self._shorten(partition)

    def _shorten(self, partition: AssignedPartition) -> None:
        """Drop what is buffered after the first records: it is read again."""
        has_records = [isinstance(item, Chunk) and item.source is not None for item in partition.waiting]
        if partition.chunk is None and True in has_records:
            has_records[has_records.index(True)] = False
        if True not in has_records:
            return
        for _ in range(has_records.index(True), len(has_records)):
            dropped = partition.waiting.pop()
            if isinstance(dropped, Chunk):
                partition.fetch_position = dropped.start
                self._count(partition, dropped, -1)
        partition.is_hungry = partition.is_at_end = False
        partition.ended_in = -1
        partition.eof_due_at = math.inf
        # What is told after those records is told again.
        partition.eof_reported_at = partition.reported_code = None

    def _count(self, partition: AssignedPartition, chunk: Chunk, times: int = 1) -> None:
        partition.buffered_records += times * chunk.record_count
        partition.buffered_bytes += times * chunk.size_bytes
        self.buffered_records += times * chunk.record_count
        self.buffered_bytes += times * chunk.size_bytes

    def _drop_buffer(self, partition: AssignedPartition) -> None:
        self._close_outlet()
        nothing: deque[Chunk | Message] = deque()
        # No interrupt comes from here on, nor before the caller makes a call: he says where it is read again.
        partition.version += 1
        partition.chunk = None
        partition.waiting = nothing
        self.buffered_records -= partition.buffered_records
        self.buffered_bytes -= partition.buffered_bytes
        partition.buffered_records = partition.buffered_bytes = 0
        partition.is_hungry = partition.is_at_end = False
        partition.ended_in = -1
        partition.eof_due_at = math.inf

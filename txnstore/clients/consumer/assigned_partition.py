"""An assigned partition of a consumer: where it is read, what is buffered of it, and what is known of what follows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from txnstore.clients.consumer.opening import Chunk, StoredOffset
from txnstore.clients.model.errors import KafkaError
from txnstore.clients.model.message import Message
from txnstore.clients.model.topic_partition import OFFSET_INVALID, OFFSET_STORED
from txnstore.log.bounds import Bounds

#: The first pause before a partition that cannot be read is tried again; the time is the caller's: it is no `Backoff`.
RETRY_FIRST_SECONDS: Final = 0.1
#: The longest one.
RETRY_LAST_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class FetchPosition:
    """Where to read next in a partition; what was read there counts only while the partition has this version."""

    partition: AssignedPartition
    version: int
    position: int
    """Where to read; before it is resolved, one of the constants, or a position that may lie outside the log."""

    stored_offset: StoredOffset | None = None
    """What OFFSET_STORED stands for, if that was asked elsewhere."""


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
        "has_fallen_behind",
        "is_at_end",
        "is_hungry",
        "is_ready",
        "is_recreated",
        "is_unknown",
        "known_position",
        "known_stored",
        "last_commit",
        "leader",
        "lent",
        "messages",
        "number",
        "partition_id",
        "paused_by",
        "reported_at",
        "reported_code",
        "retry_at",
        "retry_seconds",
        "start",
        "stored_offset",
        "stores_lent",
        "topic",
        "trouble",
        "version",
        "waiting",
    )

    def __init__(self, topic: str, number: int, position: int) -> None:
        """Begin at this position, or where one of the constants says."""
        self.topic, self.number = topic, number
        self.assigned_position = OFFSET_STORED if position == OFFSET_INVALID else position
        self.start: int | None = self.assigned_position
        """Where to begin, until it has been resolved to a position within the log; then None."""
        self.stored_offset: StoredOffset | None = None
        """What the group's database has answered, if the partition is in another one."""
        self.has_fallen_behind = False
        """Whether that is where it was read, not where the application has sought: in another one it means nothing."""
        self.leader: int | None = None
        """The number of the database that holds it; None: not looked up."""
        self.partition_id: int | None = None
        """What these offsets belong to; None: not looked up. A topic that is recreated gets other partitions."""
        self.is_recreated = False
        """Whether it replaces one that was deleted, and the application has not said since where to read it."""
        self.version = 0
        self.paused_by = frozenset[str]()
        self.fetch_position = self.committed = OFFSET_INVALID
        self.known_position = self.known_stored = OFFSET_INVALID
        """The position and what is stored, but for what the outlet has handed out since it was opened."""
        self.lent: Any = None
        """Its messages, if it is them that the outlet hands out."""
        self.stores_lent = False
        """Whether what it hands out is stored at once."""
        self.bounds: Bounds | None = None
        self.chunk: Chunk | None = None
        """What is being handed out, and what is left of it."""
        self.messages: Iterator[Message] = iter(())
        self.waiting: deque[Chunk | Message] = deque()
        self.buffered_records = self.buffered_bytes = 0
        self.eof_reported_at: int | None = None
        self.eof_due_at = math.inf
        """When the end is reported unless records arrive before; infinity unless all has been read."""
        self.is_ready = False
        self.is_unknown = True
        """Whether nothing has been found out yet, since it begins where it does, about what comes next."""
        self.is_at_end = False
        """Whether everything there was has been read."""
        self.ended_in = -1
        """The number of the newest snapshot in which what is buffered was all that there is; -1: there may be more."""
        self.last_commit: int | None = None
        """The number of the last transaction of which something was handed out, or that ends after the beginning."""
        self.is_hungry = False
        """Whether the last page was full before it was this partition's turn."""
        self.retry_at = 0.0
        self.retry_seconds = RETRY_FIRST_SECONDS
        self.trouble: int | None = None
        """The code of the error that kept it from being read the last time; None: there was none."""
        self.reported_at = -math.inf
        self.reported_code: int | None = None

    def is_current(self, position: FetchPosition) -> bool:
        """Return whether what was read at the position still counts."""
        return self.version == position.version

    def wait_longer(self) -> None:
        """Let the pause after the next failure be twice as long, up to the longest one."""
        self.retry_seconds = min(self.retry_seconds * 2, RETRY_LAST_SECONDS)

    def put_back(self, events: Sequence[Message]) -> None:
        """Tell again what did not reach the application of this partition, if it is so still."""
        for event in reversed(events):
            error = event.error()
            if error is None or (event.topic(), event.partition()) != (self.topic, self.number):
                continue
            is_end = error.code() == KafkaError._PARTITION_EOF
            is_so = self.eof_reported_at is not None if is_end else self.trouble == error.code()
            # Where it goes on, or has gone back, it is told anew; an interrupt may come twice.
            if is_so and self.chunk is None and all(waiting is not event for waiting in self.waiting):
                self.waiting.appendleft(event)

    def drop_from(self, gathered: Iterable[tuple[list[Message], dict[AssignedPartition, int]]]) -> None:
        """Drop its records from what calls under way have gathered: they are not stored, nor given back.

        They are its next owner's, or of a partition that was deleted.
        """
        for messages, begins in gathered:
            if begins.pop(self, None) is not None:
                # Another thread adds what it is told meanwhile.
                end = len(messages)
                kept = [it for it in messages[:end] if (it.topic(), it.partition()) != (self.topic, self.number)]
                messages[:end] = kept

    @property
    def head(self) -> Chunk | None:
        """The records that come next; events, and stretches that are stepped over, do not count."""
        if self.chunk is not None and self.chunk.source is not None:
            return self.chunk
        for item in self.waiting:
            if isinstance(item, Chunk) and item.source is not None:
                return item
        return None

    @property
    def has_something(self) -> bool:
        """Whether anything is buffered: records, an event, or a stretch that is stepped over."""
        return self.chunk is not None or bool(self.waiting)

    @property
    def position(self) -> int:
        """What comes next for the application; OFFSET_INVALID until it has got something."""
        return self.known_position if self.lent is None else self._position_behind(self.lent)

    @position.setter
    def position(self, position: int) -> None:
        self.known_position = position

    @property
    def stored(self) -> int:
        """What is committed next, OFFSET_INVALID until something is stored."""
        return self._position_behind(self.lent) if self.lent is not None and self.stores_lent else self.known_stored

    @stored.setter
    def stored(self, position: int) -> None:
        self.known_stored = position

    def _position_behind(self, lent: Any) -> int:
        chunk = self.chunk
        assert chunk is not None, "it is taken back before the chunk goes"
        offset: int = lent.taken_offset
        return chunk.base + chunk.unit * (offset + 1)

    @property
    def needs_group(self) -> bool:
        """Whether the group's database has to say where to begin, if it is not the partition's: that says it itself."""
        return self.start == OFFSET_STORED and self.stored_offset is None

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

"""This file is one partition of an assignment: where its reader stands, and what is buffered of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from txnstore.clients.model.constants import OFFSET_INVALID, OFFSET_STORED
from txnstore.clients.model.message import Message, RecordSource, RecordTuple
from txnstore.log.bounds import Bounds

#: A partition that cannot be read is tried again after this long at first, then ever more rarely.
RETRY_FIRST_SECONDS: Final = 0.1
RETRY_LAST_SECONDS: Final = 2.0


@dataclass(slots=True)
class Chunk:
    """Records of one batch on their way to the application; without records, a stretch that is only stepped over."""

    source: RecordSource | None
    open: Callable[[], Iterator[RecordTuple]]
    """Takes the batch apart, which may find that it is damaged after all."""
    record_count: int
    size_bytes: int
    first_offset: int
    last_offset: int
    """The offset of the last record, or above it where compaction took the last ones."""

    next_offset: int
    """The position once all records are handed out."""


@dataclass(frozen=True, slots=True)
class FetchPosition:
    """A reading that is wanted: it counts only while the partition has this version."""

    partition: AssignedPartition
    version: int
    offset: int
    """Where to read; or, to be resolved, one of the constants or an offset that may be outside of the log."""


@dataclass(frozen=True, slots=True)
class PageRead:
    """What a reading brought."""

    chunks: Sequence[Chunk]
    next_offset: int
    bounds: Bounds
    end_offset: int
    """The offset that this reader does not reach now."""


class AssignedPartition:
    """One partition of the assignment."""

    __slots__ = (
        "assigned_offset",
        "bounds",
        "buffered_bytes",
        "buffered_records",
        "chunk",
        "committed",
        "end_due_at",
        "end_said_at",
        "fetch_offset",
        "home",
        "is_anew",
        "is_at_end",
        "is_hungry",
        "is_paused",
        "is_ready",
        "number",
        "partition_id",
        "position",
        "records",
        "retry_at",
        "retry_seconds",
        "said_at",
        "said_code",
        "start",
        "stored",
        "topic",
        "version",
        "waiting",
    )

    def __init__(self, topic: str, number: int, offset: int) -> None:
        """Begin where `offset` says: an offset, or one of the constants."""
        self.topic = topic
        self.number = number
        self.assigned_offset = OFFSET_STORED if offset == OFFSET_INVALID else offset
        self.start: int | None = self.assigned_offset
        """Where to begin, as long as it is not known to be an offset within the log."""
        self.home: int | None = None
        """The number of the database that holds it; None: nobody has looked, or needs to, for there is only one."""
        self.partition_id: int | None = None
        """Whose offsets these are; None: nobody has looked. A topic that was made anew has other partitions."""
        self.is_anew = False
        """Whether it has taken the place of one that was deleted, and nobody has said since where to read it."""
        self.fetch_offset = OFFSET_INVALID
        self.version = 0
        self.is_paused = False
        self.position = OFFSET_INVALID
        """The next offset for the application; OFFSET_INVALID as long as it got nothing."""
        self.stored = OFFSET_INVALID
        self.committed = OFFSET_INVALID
        self.bounds: Bounds | None = None
        self.chunk: Chunk | None = None
        """What is being handed out, and what is left of it."""
        self.records: Iterator[RecordTuple] = iter(())
        self.waiting: deque[Chunk | Message] = deque()
        self.buffered_records = 0
        self.buffered_bytes = 0
        self.end_said_at: int | None = None
        self.end_due_at = math.inf
        """When it is to be said that there is nothing more, unless something comes; it has been read up to its end."""
        self.is_ready = False
        self.is_at_end = False
        """Whether all was read that there was to read."""
        self.is_hungry = False
        """Whether the last page was full before its turn came."""
        self.retry_at = 0.0
        self.retry_seconds = RETRY_FIRST_SECONDS
        self.said_at = -math.inf
        self.said_code: int | None = None

    def is_current(self, ticket: FetchPosition) -> bool:
        """Return whether what the ticket brought still counts."""
        return self.version == ticket.version

    @property
    def is_unread(self) -> bool:
        """Whether the application has got records of the deleted partition alone: what it commits is of that one."""
        return self.is_anew and self.position == OFFSET_INVALID

    @property
    def uncommitted(self) -> int | None:
        """The stored offset if it is above the committed one."""
        return self.stored if self.stored >= 0 and self.stored > self.committed else None


def uncommitted_offsets(partitions: Iterable[AssignedPartition]) -> dict[tuple[str, int], int]:
    """Return what was stored and is not committed, by topic and partition."""
    return {
        (partition.topic, partition.number): offset
        for partition in partitions
        if (offset := partition.uncommitted) is not None
    }

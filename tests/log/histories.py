"""The histories of logs: partitions, the transactions of some producers in them, and what readers get of it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import pytest

from tests.tools.campaigns import times
from txnstore.db.store import Store
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.fetch import Page, fetch
from txnstore.log.locked_partitions import Marker, write_markers
from txnstore.log.partition_rows import allocate_producer_id
from txnstore.log.topics import create_topic
from txnstore.model import ControlType, IsolationLevel, ProducerIdentity, Record

COMMITTED, UNCOMMITTED = IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED
#: How many random histories are tried both ways, on each database.
EXAMPLES = times(20)
#: Changes of a topic's settings that matter to who appends, one after the other, and values for which they do.
SETTINGS: list[dict[str, str | None]] = [
    {"message.timestamp.type": "LogAppendTime"},
    {"message.timestamp.type": "CreateTime"},
    {"message.timestamp.before.max.ms": "1000"},
    {"message.timestamp.after.max.ms": "1000"},
    {"max.message.bytes": "300"},
    {"message.timestamp.before.max.ms": None, "message.timestamp.after.max.ms": None, "max.message.bytes": None},
]
VALUES = [b"", b"a value", None, b"x" * 400]
LEVELS = pytest.mark.parametrize("isolation", [COMMITTED, UNCOMMITTED], ids=lambda level: level.name.lower())


class Log:
    """Partitions that nobody else uses, the transactions of some producers in them, and readers."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.name = uuid.uuid4().hex
        topic = store.write(lambda connection: create_topic(connection, self.name, partition_count=3))
        self.partition_ids = topic.partition_ids
        self.id = topic.partition_ids[0]
        self.producers = {name: ProducerIdentity(store.write(allocate_producer_id), 0) for name in "ABC"}
        self.sequences: dict[tuple[int, ProducerIdentity], int] = {}

    def plain(self, *values: bytes, partition_id: int | None = None) -> int:
        """Append records outside any transaction, and return the first one's offset."""
        batch = encode([Record(value) for value in values])
        return self._append(Append(self.id if partition_id is None else partition_id, batch))

    def write(self, producer: str, *values: bytes, partition_id: int | None = None) -> int:
        """Append records of the producer's transaction, and return the first one's offset."""
        to = self.id if partition_id is None else partition_id
        identity = self.producers[producer]
        first = self.sequences.get((to, identity), 0)
        self.sequences[to, identity] = first + len(values)
        records = [Record(value) for value in values]
        batch = encode(records, producer=identity, base_sequence=first, is_transactional=True)
        return self._append(Append(to, batch))

    def _append(self, item: Append) -> int:
        return self.store.write(lambda connection: append(connection, [item], coordinated=True))[0].base_offset

    def end(self, producer: str, kind: ControlType, *partition_ids: int) -> None:
        identity = self.producers[producer] = ProducerIdentity(
            self.producers[producer].producer_id, self.producers[producer].epoch + 1
        )
        markers = [Marker(partition_id, identity, kind) for partition_id in partition_ids or (self.id,)]
        self.store.write(lambda connection: write_markers(connection, markers))

    def commit(self, producer: str, *partition_ids: int) -> None:
        self.end(producer, ControlType.COMMIT, *partition_ids)

    def abort(self, producer: str, *partition_ids: int) -> None:
        self.end(producer, ControlType.ABORT, *partition_ids)

    def pages(self, positions: Mapping[int, int], **options: Any) -> dict[int, Page]:
        return self.store.read(lambda connection: fetch(connection, positions, **options))

    def page(self, position: int = 0, isolation: IsolationLevel = COMMITTED, **options: Any) -> Page:
        return self.pages({self.id: position}, isolation=isolation, **options)[self.id]

    def read(self, position: int = 0, isolation: IsolationLevel = COMMITTED) -> tuple[list[bytes | None], int]:
        """Return the values from `position` on, and where to go on."""
        page = self.page(position, isolation)
        return values_of(page, position), page.next_offset

    def read_all(self, isolation: IsolationLevel = COMMITTED, **options: Any) -> list[tuple[int, bytes | None]]:
        """Return offset and value of every record, read page after page."""
        found, position = [], 0
        while True:
            page = self.page(position, isolation, **options)
            found += [(record.offset, record.value) for batch in page.batches for record in batch.records(position)]
            if page.next_offset == position:
                return found
            assert page.next_offset > position
            position = page.next_offset


def values_of(page: Page, position: int = 0) -> list[bytes | None]:
    return [record.value for batch in page.batches for record in batch.records(position)]

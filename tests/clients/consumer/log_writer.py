"""A second hand on the store of a test: it writes records and transactions straight into the log."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from txnstore.clients.model.errors import KafkaError
from txnstore.clients.model.message import Message
from txnstore.db.store import Store
from txnstore.groups.administration import ListedGroup, ListedMember, find_group
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.topics import Topic, create_topic, get_topic, grow_topic
from txnstore.model import GroupMembership, OffsetAndMetadata, ProducerIdentity, Record
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.transaction import SentOffsets

_numbers = itertools.count(1)

#: Longer than anything takes that ends at all.
PATIENCE_SECONDS = 60.0


class LogWriter:
    """Makes topics and appends to them."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.coordinator = TransactionCoordinator(store)

    def topic(self, name: str = "t", partition_count: int = 1) -> Topic:
        return self.store.write(lambda connection: create_topic(connection, name, partition_count=partition_count))

    def grow(self, name: str, partition_count: int) -> Topic:
        return self.store.write(lambda connection: grow_topic(connection, name, partition_count=partition_count))

    def partition_id(self, name: str, number: int) -> int:
        return self.store.read(lambda connection: get_topic(connection, name)).partition_ids[number]

    def write(
        self, name: str, number: int, *values: bytes, timestamp_ms: int = 1_000, wakes_readers: bool = True
    ) -> None:
        """Append one batch."""
        batch = encode([Record(value, timestamp_ms=timestamp_ms) for value in values])
        partition_id = self.partition_id(name, number)
        appends = [Append(partition_id, batch)]
        self.store.write(lambda connection: append(connection, appends), wakes_readers=wakes_readers)

    def transaction(self, timeout_ms: int = 60_000) -> OpenTransaction:
        return OpenTransaction(self, f"writer-{next(_numbers)}", timeout_ms)

    def group(self, group_id: str = "readers") -> ListedGroup | None:
        return self.store.read(lambda connection: find_group(connection, group_id))

    def members(self, group_id: str = "readers") -> list[ListedMember]:
        """Return the group's members, those too that were silent for too long."""
        group = self.group(group_id)
        return [] if group is None else list(group.members)


class OpenTransaction:
    """A transaction of a producer of its own."""

    def __init__(self, writer: LogWriter, transactional_id: str, timeout_ms: int) -> None:
        self.writer = writer
        self.transactional_id = transactional_id
        self.identity: ProducerIdentity = writer.coordinator.init_producer_id(transactional_id, timeout_ms).identity
        self.sequences: dict[int, int] = {}

    def write(self, name: str, number: int, *values: bytes) -> None:
        partition_id = self.writer.partition_id(name, number)
        sequence = self.sequences.get(partition_id, 0)
        batch = encode(
            [Record(value, timestamp_ms=1_000) for value in values],
            producer=self.identity,
            base_sequence=sequence,
            is_transactional=True,
        )
        self.sequences[partition_id] = sequence + len(values)
        self.writer.coordinator.append(self.transactional_id, self.identity, [Append(partition_id, batch)])

    def send_offset(self, group_id: str, name: str, number: int, offset: int) -> None:
        offsets = {self.writer.partition_id(name, number): OffsetAndMetadata(offset)}
        sent = SentOffsets(GroupMembership(group_id), offsets)
        self.writer.coordinator.send_offsets(self.transactional_id, self.identity, sent)

    def end(self, *, commit: bool) -> None:
        self.writer.coordinator.end_transaction(self.transactional_id, self.identity, commit=commit)


def eventually(found: Callable[[], object], timeout_seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until `found()` is true; fail if it never is."""
    deadline = time.monotonic() + timeout_seconds
    while not found():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def polled_until(consumer: object, found: Callable[[], object]) -> None:
    """Poll until `found()` is true; no record may come."""
    poll = consumer.poll  # type: ignore[attr-defined]  # any consumer

    def look() -> object:
        message = poll(0.01)
        assert message is None, message
        return found()

    eventually(look)


def error_code(message: Message | None) -> int | None:
    """Return the code of the message's error."""
    error: KafkaError | None = None if message is None else message.error()
    return None if error is None else error.code()


def texts(messages: list[Message]) -> list[bytes]:
    """Return the values."""
    return [message.value() or b"" for message in messages]

"""This file is what a consumer asks the database about its partitions: where to begin, and the next page.

One partition that cannot be read keeps no other one from being read: what went wrong is said of that partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from sqlalchemy import Connection

from txnstore.clients.connection import StoreConnection
from txnstore.clients.consumer.assigned_partition import AssignedPartition, Chunk, FetchPosition, PageRead
from txnstore.clients.consumer.options import ConsumerOptions
from txnstore.clients.consumer.start_positions import start_position
from txnstore.clients.model.constants import (
    OFFSET_STORED,
    TIMESTAMP_CREATE_TIME,
    TIMESTAMP_LOG_APPEND_TIME,
)
from txnstore.clients.model.error_mapping import kafka_error_of
from txnstore.clients.model.kafka_error import KafkaError
from txnstore.clients.model.message import RecordSource
from txnstore.clients.overdue_help import OverdueHelp
from txnstore.clients.topic_directory import TopicDirectory
from txnstore.db.cluster.cluster import repaired
from txnstore.db.cluster.membership import CONTROLLER_ID
from txnstore.db.store import Store
from txnstore.db.waiting import Waiter
from txnstore.errors import (
    CorruptBatch,
    InvalidTopic,
    OffsetOutOfRange,
    TxnStoreError,
    UnknownTopicOrPartition,
    UnsupportedCompression,
)
from txnstore.groups.offsets import CommittedOffsets, read_offsets
from txnstore.log.bounds import Bounds, read_bounds
from txnstore.log.codec import RecordBatch
from txnstore.log.fetch import PAGE_RECORDS_MAX, Page, fetch
from txnstore.log.topics import Topic
from txnstore.model import IsolationLevel, TimestampType

Result = TypeVar("Result")

#: How long a reading in the background waits for a database that is away; then the application is told.
RETRY_TIMEOUT_MS: Final = 1_000

_TIMESTAMP_TYPES: Final = {
    TimestampType.CREATE_TIME: TIMESTAMP_CREATE_TIME,
    TimestampType.LOG_APPEND_TIME: TIMESTAMP_LOG_APPEND_TIME,
}
#: What can be wrong with one partition while the others are fine.
_OF_ONE_PARTITION: Final = (OffsetOutOfRange, UnknownTopicOrPartition, CorruptBatch, UnsupportedCompression)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The ticket's partition begins at this offset."""

    ticket: FetchPosition
    offset: int
    partition_id: int
    committed: int | None
    """What the group has committed there, if that was asked for."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """The ticket's page."""

    ticket: FetchPosition
    page: PageRead


@dataclass(frozen=True, slots=True)
class Failed:
    """The ticket's partition cannot be read now."""

    ticket: FetchPosition
    error: KafkaError | None
    """None: nobody needs to know."""

    offset: int | None = None
    for_good: bool = False
    """Whether only a seek helps."""


@dataclass(frozen=True, slots=True)
class OutOfRange:
    """The ticket's offset is not in the log: its start is to be found anew."""

    ticket: FetchPosition


@dataclass(frozen=True, slots=True)
class Moved:
    """The ticket's partition lives in another database than was thought: its topic was made anew."""

    ticket: FetchPosition


@dataclass(frozen=True, slots=True)
class MadeAnew:
    """The ticket's offset is one of a partition that was deleted; there is another one by its name (KIP-516)."""

    ticket: FetchPosition


Outcome = Resolved | Delivered | Failed | OutOfRange | Moved | MadeAnew

#: What a partition is held back at whose committed offset an open transaction may still move.
_BY_ITS_OFFSETS: Final = -1

_UNKNOWN_PARTITION: Final = KafkaError(
    KafkaError._UNKNOWN_PARTITION, "the topic has no such partition: Local: Unknown partition"
)


class PartitionReader:
    """Reads for one consumer from one database; used by one fetching thread alone."""

    def __init__(
        self,
        connection: StoreConnection,
        directory: TopicDirectory,
        options: ConsumerOptions,
        home: int | None = None,
    ) -> None:
        """Read with these settings from the database of this number, by default from the one that holds the group."""
        self._given_leader = home
        self._connection = connection
        self._directory = directory
        self._options = options
        self._is_held_back = False
        self._overdue = OverdueHelp(self.store)
        #: What holds back where to begin stands where the group is, and names the partitions there.
        self._overdue_offsets = OverdueHelp(self._group_store)
        self.outbox_waits = False
        """Whether the last reading that asked has found rows of the outbox that wait to become records."""

    def take_held_back(self) -> bool:
        """Return whether an open transaction has kept records or offsets from being read since the last call."""
        held_back, self._is_held_back = self._is_held_back, False
        return held_back

    def help(self) -> float:
        """End what holds it back too long; return in how many seconds to call again."""
        return min(self._overdue.help(), self._overdue_offsets.help())

    @property
    def home(self) -> int:
        """The number of the database that it reads."""
        if self._given_leader is not None:
            return self._given_leader
        return self._connection.cluster().coordinator_id_of(self._options.group_id)

    def waiter(self) -> Waiter:
        """Return what waits for commits of others in that database."""
        return self.store().waiter()

    def store(self) -> Store:
        """Return that database.

        Raises:
            TxnStoreError: it cannot be reached.
        """
        return self._connection.cluster().own(self.home)

    def locate(self, tickets: Iterable[FetchPosition]) -> dict[AssignedPartition, int]:
        """Return in which databases the tickets' partitions live; those that there are not are this one's.

        Raises:
            TxnStoreError: the controller cannot be asked.
        """
        partitions = [ticket.partition for ticket in tickets]
        topics = self._topics({partition.topic for partition in partitions})
        located: dict[AssignedPartition, int] = {}
        for partition in partitions:
            topic = topics.get(partition.topic)
            is_there = topic is not None and 0 <= partition.number < len(topic.leaders)
            located[partition] = topic.leaders[partition.number] if topic is not None and is_there else self.home
        return located

    def resolve(self, tickets: Sequence[FetchPosition]) -> list[Outcome]:
        """Find out where to begin.

        Raises:
            TxnStoreError: the database cannot be asked at all.
        """
        known, outcomes = self._known(tickets)
        if not known:
            return outcomes
        stored_ids = [partition_id for partition_id, ticket in known.items() if ticket.offset == OFFSET_STORED]

        elsewhere: CommittedOffsets | None = None
        if stored_ids and not self._holds_group:
            elsewhere = self._read_offsets_elsewhere(stored_ids)

        def work(connection: Connection) -> tuple[dict[int, Bounds], CommittedOffsets]:
            committed = elsewhere or CommittedOffsets({}, frozenset())
            if stored_ids and elsewhere is None:
                committed = read_offsets(connection, self._options.group_id, stored_ids)
            return read_bounds(connection, known), committed

        try:
            bounds, committed = self._read(work)
        except UnknownTopicOrPartition:
            # Deleted since the directory was read: look again in a moment.
            self._forget(known.values())
            return [*outcomes, *(Failed(ticket, None) for ticket in known.values())]
        for partition_id, ticket in known.items():
            outcomes.append(self._start(ticket, bounds[partition_id], committed, partition_id))
        return outcomes

    def read(
        self, tickets: Sequence[FetchPosition], *, records_max: int = PAGE_RECORDS_MAX, asks_outbox: bool = False
    ) -> list[Outcome]:
        """Read a page that is shared by the tickets' partitions; set `outbox_waits`.

        Raises:
            TxnStoreError: the database cannot be read at all.
        """
        self.outbox_waits = False
        found, outcomes = self._known(tickets)
        known: dict[int, FetchPosition] = {}
        for partition_id, ticket in found.items():
            if ticket.partition.partition_id in (None, partition_id):
                known[partition_id] = ticket
            else:
                outcomes.append(MadeAnew(ticket))
        if not known:
            return outcomes
        positions = {partition_id: ticket.offset for partition_id, ticket in known.items()}

        def work(connection: Connection) -> dict[int, Page]:
            return fetch(
                connection,
                positions,
                isolation=self._options.isolation,
                records_max=records_max,
                bytes_max=self._options.page_bytes_max,
                asks_outbox=asks_outbox,
            )

        try:
            pages = self._read(work)
        except _OF_ONE_PARTITION as error:
            return [*outcomes, *self._one_by_one(list(known.values()), records_max, error)]
        for partition_id, ticket in known.items():
            page = pages[partition_id]
            self.outbox_waits = page.bounds.outbox_waits
            outcomes.append(self._delivered(ticket, page))
        return outcomes

    # --- inside ------------------------------------------------------------------------------------------------------

    def _one_by_one(self, tickets: Sequence[FetchPosition], records_max: int, error: TxnStoreError) -> list[Outcome]:
        if len(tickets) > 1:
            return [outcome for ticket in tickets for outcome in self.read([ticket])]
        (ticket,) = tickets
        if isinstance(error, OffsetOutOfRange):
            return [OutOfRange(ticket)]
        if isinstance(error, UnknownTopicOrPartition):
            self._forget(tickets)
            return [Failed(ticket, None)]
        if records_max > 1:
            # What lies before the damaged batch can be read.
            return self.read(tickets, records_max=1)
        return [Failed(ticket, kafka_error_of(error), ticket.offset)]

    def _known(self, tickets: Sequence[FetchPosition]) -> tuple[dict[int, FetchPosition], list[Outcome]]:
        """Return the tickets by partition id, and what is to be said of those whose partition there is not."""
        topics = self._topics({ticket.partition.topic for ticket in tickets})
        grown = {
            ticket.partition.topic
            for ticket in tickets
            if (topic := topics.get(ticket.partition.topic)) and ticket.partition.number >= len(topic.partition_ids)
        }
        if grown:
            topics = {**topics, **self._directory.refresh(grown)}
        is_alone = self._connection.is_alone
        home = CONTROLLER_ID if is_alone else self.home
        known: dict[int, FetchPosition] = {}
        failed: list[Outcome] = []
        for ticket in tickets:
            name, number = ticket.partition.topic, ticket.partition.number
            topic = topics.get(name)
            if topic is None:
                failed.append(Failed(ticket, unknown_topic(name)))
            elif not 0 <= number < len(topic.partition_ids):
                failed.append(Failed(ticket, _UNKNOWN_PARTITION))
            elif not is_alone and topic.leaders[number] != home:
                failed.append(Moved(ticket))
            else:
                known[topic.partition_ids[number]] = ticket
        return known, failed

    def _topics(self, names: set[str]) -> Mapping[str, Topic]:
        found = self._directory.find(names)
        if self._options.creates_topics:
            for name in names - found.keys():
                try:
                    found[name] = self._directory.ensure(name)
                except (UnknownTopicOrPartition, InvalidTopic):
                    continue
        return found

    def _forget(self, tickets: Iterable[FetchPosition]) -> None:
        for ticket in tickets:
            self._directory.forget(ticket.partition.topic)

    def _start(self, ticket: FetchPosition, bounds: Bounds, committed: CommittedOffsets, partition_id: int) -> Outcome:
        if partition_id in committed.unstable and self._options.isolation is IsolationLevel.READ_COMMITTED:
            # KIP-447: an open transaction may still move it.
            self._is_held_back = True
            self._overdue_offsets.held_back(partition_id, _BY_ITS_OFFSETS)
            return Failed(ticket, None)
        self._overdue_offsets.let_go(partition_id)
        offset = committed.offsets.get(partition_id)
        end_offset = bounds.end(self._options.isolation)
        start = start_position(
            ticket.offset, bounds, end_offset, offset.offset if offset else None, self._options.offset_reset
        )
        if start.offset is None:
            error = KafkaError(KafkaError._AUTO_OFFSET_RESET, start.why)
            return Failed(ticket, error, ticket.offset if ticket.offset >= 0 else None, for_good=True)
        return Resolved(ticket, start.offset, partition_id, offset.offset if offset else None)

    def _delivered(self, ticket: FetchPosition, page: Page) -> Outcome:
        """Return the page as it goes to the subscription."""
        end_offset = page.bounds.end(self._options.isolation)
        if end_offset < page.bounds.high_watermark and page.next_offset >= end_offset:
            self._is_held_back = True
            self._overdue.held_back(page.bounds.partition_id, end_offset)
        else:
            self._overdue.let_go(page.bounds.partition_id)
        behind = [batch.base_offset for batch in page.batches[1:]] + [page.next_offset]
        chunks = [_chunk(ticket, batch, next_offset) for batch, next_offset in zip(page.batches, behind, strict=False)]
        return Delivered(ticket, PageRead(chunks, page.next_offset, page.bounds, end_offset))

    def _read(self, work: Callable[[Connection], Result]) -> Result:
        cluster = self._connection.cluster()
        return repaired(cluster, self.home, lambda store: store.read(work, retry_timeout_ms=RETRY_TIMEOUT_MS))

    @property
    def _holds_group(self) -> bool:
        return self.home == self._connection.cluster().coordinator_id_of(self._options.group_id)

    def _read_offsets_elsewhere(self, partition_ids: Sequence[int]) -> CommittedOffsets:
        group_id = self._options.group_id
        return self._group_store().read(
            lambda connection: read_offsets(connection, group_id, partition_ids), retry_timeout_ms=RETRY_TIMEOUT_MS
        )

    def _group_store(self) -> Store:
        return self._connection.cluster().coordinator_of(self._options.group_id)


def unknown_topic(name: str) -> KafkaError:
    """Return the error that there is no such topic."""
    return KafkaError(
        KafkaError.UNKNOWN_TOPIC_OR_PART, f"Subscribed topic not available: {name}: Broker: Unknown topic or partition"
    )


def _chunk(ticket: FetchPosition, batch: RecordBatch, next_offset: int) -> Chunk:
    partition = ticket.partition
    source = RecordSource(partition.topic, partition.number, _TIMESTAMP_TYPES[batch.timestamp_type])
    return Chunk(
        source=source,
        open=partial(batch.rows, ticket.offset),
        record_count=batch.record_count,
        size_bytes=batch.size_bytes,
        first_offset=max(batch.base_offset, ticket.offset),
        last_offset=batch.last_offset,
        next_offset=next_offset,
    )

"""The reading of a consumer: what it asks the databases about partitions.

Where to begin and the next page, for the fetching threads; watermarks and offsets by time, for the application's calls.

A partition that cannot be read does not keep others from being read: what went wrong is reported for it alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

from sqlalchemy import Connection

from txnstore.clients.connection import StoreConnection
from txnstore.clients.consumer.arguments import ConsumerOptions
from txnstore.clients.consumer.assigned_partition import AssignedPartition, FetchPosition
from txnstore.clients.consumer.events import refused_topic, unknown_topic
from txnstore.clients.consumer.opening import Chunk, Committed, PageRead, StoredOffset, ToldCommit, open_batch
from txnstore.clients.consumer.positions import NOTHING_COMMITTED, start_position
from txnstore.clients.model.errors import KafkaError, KafkaException, kafka_error_of
from txnstore.clients.model.message import NO_MARKER, TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME, RecordSource
from txnstore.clients.model.topic_partition import OFFSET_END, OFFSET_STORED, TopicPartition
from txnstore.clients.overdue_help import OverdueHelp
from txnstore.clients.topic_directory import TopicDirectory
from txnstore.db.backend import Subjects, Waiter
from txnstore.db.cluster.cluster import repaired
from txnstore.db.identity import going_back
from txnstore.db.store import Store
from txnstore.errors import (
    CorruptBatch,
    OffsetOutOfRange,
    PermissionDenied,
    TxnStoreError,
    UnknownTopicOrPartition,
    UnsupportedCompression,
)
from txnstore.groups.commit_rules import other_order
from txnstore.groups.offsets import CommittedOffsets, from_journal_text, read_offsets
from txnstore.log.bounds import Bounds, offset_for_time, read_bounds
from txnstore.log.codec import TIMESTAMP_MS_MAX, RecordBatch
from txnstore.log.commit_order import CommitPage, as_begun, fetch_in_commit_order, last_commit_number
from txnstore.log.fetch import PAGE_RECORDS_MAX, Page, Room, fetch
from txnstore.log.news import read_news, read_news_in_commit_order
from txnstore.log.topics import Topic, names_of_partitions
from txnstore.model import INTERNAL_GROUP_PREFIX, IsolationLevel, OffsetAndMetadata, TimestampType
from txnstore.transactions.rows import commits_of

Result = TypeVar("Result")
#: A page in either order.
AnyPage = Page | CommitPage

#: How long a reading in the background waits for a database that cannot be reached before the application is told.
RETRY_TIMEOUT_MS: Final = 1_000

_TIMESTAMP_TYPES: Final = {
    TimestampType.CREATE_TIME: TIMESTAMP_CREATE_TIME,
    TimestampType.LOG_APPEND_TIME: TIMESTAMP_LOG_APPEND_TIME,
}
#: What may be wrong with one partition while the others can be read.
_OF_ONE_PARTITION: Final = (OffsetOutOfRange, UnknownTopicOrPartition, CorruptBatch, UnsupportedCompression)


@dataclass(frozen=True, slots=True)
class StartResolved:
    """The partition is read from this position on."""

    position: FetchPosition
    start: int
    partition_id: int
    committed: int | None
    """What the group has committed there, if that was asked for."""

    last_commit: int | None = None
    """The number of the last commit behind it, where transactions are handed out whole."""

    reset_from: int | None = None
    """The offset that was given or committed, if it is not in the log and auto.offset.reset has decided."""

    passed_over_from: int | None = None
    """The log start, if nothing is committed and records lie between it and where auto.offset.reset has decided."""

    why: str = ""
    """What was wrong with that one, or that there is none."""


@dataclass(frozen=True, slots=True)
class StoredOffsetFound:
    """The group has committed this for a partition of another database, whose reader goes on from here."""

    position: FetchPosition
    stored_offset: StoredOffset


@dataclass(frozen=True, slots=True)
class PageDelivered:
    """What was read at the position."""

    position: FetchPosition
    page: PageRead


@dataclass(frozen=True, slots=True)
class PartitionFailed:
    """The partition cannot be read now."""

    position: FetchPosition
    error: KafkaError | None
    """None: there is nothing to report."""

    offset: int | None = None
    for_good: bool = False
    """Whether only a seek helps."""

    trouble: TxnStoreError | None = None
    """What will pass by itself and is none of the partition, if that is to be told: the controller is away."""


@dataclass(frozen=True, slots=True)
class PositionOutOfRange:
    """The offset is not in the log: the start has to be resolved again."""

    position: FetchPosition


@dataclass(frozen=True, slots=True)
class PartitionMoved:
    """The partition is in another database than was thought, or another one: its topic has been recreated."""

    position: FetchPosition


@dataclass(frozen=True, slots=True)
class PartitionRecreated:
    """The offset belongs to a partition that was deleted; another one has its name now (KIP-516)."""

    position: FetchPosition


ReadOutcome = (
    StartResolved
    | StoredOffsetFound
    | PageDelivered
    | PartitionFailed
    | PositionOutOfRange
    | PartitionMoved
    | PartitionRecreated
)

_NOTHING_FOUND: Final = CommittedOffsets({}, frozenset())

#: What stands for the offset at which a partition is held back whose committed offset an open transaction may change.
_HELD_BACK_BY_OFFSETS: Final = -1

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
        database_id: int | None = None,
        *,
        snapshots: Iterator[int] | None = None,
    ) -> None:
        """Read from the database of this number, by default the group's; its readings are numbered by `snapshots`."""
        self._given_database_id = database_id
        self._connection = connection
        self._directory = directory
        self._options = options
        self._positions = options.positions
        self._snapshots = snapshots or itertools.count(1)
        self._may_read_journal = True
        #: What it has told of the commits of the last pages: those of a large transaction have the same one.
        self._told: Mapping[int, ToldCommit] = {}
        self._is_held_back = False
        self._overdue = OverdueHelp(self.store, connection.cluster)
        #: Of those that hold back committed offsets, which are read where the group is.
        self._overdue_offsets = OverdueHelp(self.store, connection.cluster)
        self.outbox_waits = False
        """Whether the last reading that asked has found rows in the outbox."""

    def take_held_back(self) -> bool:
        """Return whether an open transaction has held back records or offsets since the last call."""
        held_back, self._is_held_back = self._is_held_back, False
        return held_back

    def help(self) -> float:
        """End transactions that hold the reader back and are overdue; return in how many seconds to call again."""
        return min(self._overdue.help(), self._overdue_offsets.help())

    @property
    def database_id(self) -> int:
        """The number of the database that it reads."""
        if self._given_database_id is not None:
            return self._given_database_id
        return self._connection.cluster().coordinator_id_of(self._options.group_id)

    def waiter(self, subjects: Subjects) -> Waiter:
        """Return what waits for commits of others about these in that database."""
        return self.store().waiter(subjects)

    def store(self) -> Store:
        """Return that database.

        Raises:
            TxnStoreError: it cannot be reached.
        """
        return self._connection.cluster().own(self.database_id)

    def locate(self, positions: Sequence[FetchPosition]) -> dict[AssignedPartition, int]:
        """Return which databases hold the partitions.

        One that does not exist, or that the controller cannot be asked about now, counts as this database's.

        Raises:
            TxnStoreError: the controller has refused.
        """
        topics, _ = self._topics(positions)
        located: dict[AssignedPartition, int] = {}
        for partition in (position.partition for position in positions):
            topic = topics.get(partition.topic)
            is_there = topic is not None and 0 <= partition.number < len(topic.leaders)
            located[partition] = topic.leaders[partition.number] if topic is not None and is_there else self.database_id
        return located

    def resolve(self, positions: Sequence[FetchPosition]) -> list[ReadOutcome]:
        """Resolve where to begin.

        Raises:
            TxnStoreError: the database cannot be asked at all.
        """
        known, outcomes = self._known(positions)
        if not known:
            return outcomes
        asked_id, stored_ids = self.database_id, [number for number, it in known.items() if _is_asked_for(it)]
        own = {partition_id: position for partition_id, position in known.items() if not self._is_elsewhere(position)}

        def work(connection: Connection) -> tuple[dict[int, Bounds], CommittedOffsets, dict[int, int | None]]:
            found = _NOTHING_FOUND
            if stored_ids:
                found = read_offsets(connection, self._options.group_id, stored_ids)
            committed = replace(found, offsets={**_found_elsewhere(own), **found.offsets})
            given = {
                partition_id: self._begun(connection, partition_id, self._given(position, committed, partition_id))
                for partition_id, position in own.items()
            }
            return read_bounds(connection, own), committed, given

        try:
            bounds, committed, given = self._read(work)
        except UnknownTopicOrPartition:
            # Deleted since the directory was read: try again in a moment.
            self._forget(known.values())
            return [*outcomes, *(PartitionFailed(position, None) for position in known.values())]
        if not committed.offsets.keys() >= set(stored_ids):
            self._connection.cluster().has_learned_of_others(retry_timeout_ms=RETRY_TIMEOUT_MS)
            if self.database_id != asked_id:  # It has joined since.
                return [*outcomes, *map(PartitionMoved, known.values())]
        for partition_id, position in known.items():
            if self._is_unstable(partition_id, committed):
                outcomes.append(PartitionFailed(position, None))
            elif partition_id in own:
                start = self._start(position, bounds[partition_id], committed, partition_id, given[partition_id])
                outcomes.append(start)
            else:
                stored_offset = StoredOffset(partition_id, committed.offsets.get(partition_id))
                outcomes.append(StoredOffsetFound(position, stored_offset))
        return self._with_last_commits(outcomes) if self._options.is_atomic else outcomes

    def read(
        self,
        positions: Sequence[FetchPosition],
        *,
        records_max: int = PAGE_RECORDS_MAX,
        asks_outbox: bool = False,
        waiter: Waiter | None = None,
    ) -> list[ReadOutcome]:
        """Read a page that the partitions share; set `outbox_waits`.

        With a `waiter` all of them had been read to their ends: what is new is asked there first.

        Raises:
            StoreCopied: a partition ends before what was read of it: the store has gone back to an older state.
            StoreUnavailable: it does on a standby, which is to come to it.
            TxnStoreError: the database cannot be read at all.
        """
        self.outbox_waits = False
        # The waiter does not.
        self.store().check_usable()
        found, outcomes = self._known(positions)
        known: dict[int, FetchPosition] = {}
        for partition_id, position in found.items():
            if position.partition.partition_id in (None, partition_id):
                known[partition_id] = position
            else:
                outcomes.append(PartitionRecreated(position))
        if not known:
            return outcomes
        wanted = {partition_id: position.position for partition_id, position in known.items()}
        room = Room(records_max, self._options.page_bytes_max)
        # One thread reads a partition, and another one only later: so this reading is later than all before it.
        snapshot = next(self._snapshots)
        try:
            delivered = self._news(wanted, room, waiter) or self._pages(wanted, room, asks_outbox=asks_outbox)
        except _OF_ONE_PARTITION as error:
            return [*outcomes, *self._one_by_one(list(known.values()), records_max, error)]
        for partition_id, position in known.items():
            self._check_goes_on(position, delivered[partition_id].bounds)
        if self._options.is_atomic:
            self._told = self._told_of(delivered)
        for partition_id, position in known.items():
            page = delivered[partition_id]
            self.outbox_waits = asks_outbox and page.bounds.outbox_waits
            outcomes.append(self._delivered(position, page, snapshot))
        return outcomes

    # --- inside ------------------------------------------------------------------------------------------------------

    def _news(self, wanted: Mapping[int, int], room: Room, waiter: Waiter | None) -> Mapping[int, AnyPage] | None:
        """Return what a reader that had read everything gets by one statement; None: it asks for pages."""
        if waiter is None:
            return None
        if self._positions.in_commit_order:
            pairs = {partition_id: self._positions.pair(position) for partition_id, position in wanted.items()}
            return read_news_in_commit_order(waiter.rows, pairs, room)
        return read_news(waiter.rows, wanted, self._options.isolation, room)

    def _pages(self, wanted: Mapping[int, int], room: Room, *, asks_outbox: bool) -> Mapping[int, AnyPage]:
        if self._positions.in_commit_order:
            return self._places(wanted, room, asks_outbox=asks_outbox)

        def work(connection: Connection) -> dict[int, Page]:
            return fetch(
                connection,
                wanted,
                isolation=self._options.isolation,
                records_max=room.records,
                bytes_max=room.size_bytes,
                asks_outbox=asks_outbox,
            )

        return self._read(work)

    def _places(self, wanted: Mapping[int, int], room: Room, *, asks_outbox: bool) -> Mapping[int, AnyPage]:
        positions = {partition_id: self._positions.pair(position) for partition_id, position in wanted.items()}

        def work(connection: Connection) -> dict[int, CommitPage]:
            return fetch_in_commit_order(
                connection, positions, records_max=room.records, bytes_max=room.size_bytes, asks_outbox=asks_outbox
            )

        return self._read(work)

    def _check_goes_on(self, position: FetchPosition, bounds: Bounds) -> None:
        """Refuse a log that ends before where it had ended, also where the position was reset meanwhile."""
        partition, known = position.partition, position.partition.bounds
        if known is None or known.partition_id != bounds.partition_id:
            return
        if bounds.high_watermark < known.high_watermark:
            where = f"{partition.topic}-{partition.number} ends at {bounds.high_watermark}"
            store = self.store()
            is_standby = self._read(store.backend.is_standby)
            raise going_back(store, f"{where}, and had come to {known.high_watermark}", is_standby=is_standby)

    def _one_by_one(
        self, positions: Sequence[FetchPosition], records_max: int, error: TxnStoreError
    ) -> list[ReadOutcome]:
        if len(positions) > 1:
            return [outcome for position in positions for outcome in self.read([position])]
        (position,) = positions
        if isinstance(error, OffsetOutOfRange):
            return [PositionOutOfRange(position)]
        if isinstance(error, UnknownTopicOrPartition):
            self._forget(positions)
            return [PartitionFailed(position, None)]
        if records_max > 1:
            # What comes before the damaged batch can be read.
            return self.read(positions, records_max=1)
        return [PartitionFailed(position, kafka_error_of(error), self._positions.place(position.position))]

    def _known(self, positions: Sequence[FetchPosition]) -> tuple[dict[int, FetchPosition], list[ReadOutcome]]:
        """Return the positions by partition id, and what became of those whose partition is not here."""
        topics, errors = self._topics(positions)
        is_alone = self._connection.is_alone
        known: dict[int, FetchPosition] = {}
        failed: list[ReadOutcome] = []
        for position in positions:
            name, number = position.partition.topic, position.partition.number
            topic, error = topics.get(name), errors.get(name)
            if topic is not None and 0 <= number < len(topic.partition_ids):
                if not is_alone and _is_moved(position, topic):
                    failed.append(PartitionMoved(position))
                else:
                    known[topic.partition_ids[number]] = position
            elif error is not None and error.retriable:
                failed.append(PartitionFailed(position, None, trouble=error))
            elif error is not None:
                failed.append(PartitionFailed(position, refused_topic(name, error)))
            elif topic is None:
                failed.append(PartitionFailed(position, unknown_topic(name)))
            else:
                failed.append(PartitionFailed(position, _UNKNOWN_PARTITION))
        return known, failed

    def _topics(self, positions: Sequence[FetchPosition]) -> tuple[dict[str, Topic], dict[str, TxnStoreError]]:
        """Return the topics that there are, created if that is to be; and why some are not, or nobody knows."""
        numbers: dict[str, int] = {}
        for position in positions:
            partition = position.partition
            numbers[partition.topic] = max(partition.number, numbers.get(partition.topic, 0))
        found, away = self._directory.look_up(numbers)
        if not self._options.creates_topics:
            return found, away
        created, refused = self._directory.ensure_all(numbers.keys() - found.keys() - away.keys())
        return found | created, away | refused

    def _forget(self, positions: Iterable[FetchPosition]) -> None:
        for position in positions:
            self._directory.forget(position.partition.topic)

    def _committed(self, committed: CommittedOffsets, partition_id: int) -> int | None:
        offset = committed.offsets.get(partition_id)
        return None if offset is None else self._positions.at(offset.offset, offset.offset_in_transaction or 0)

    def _given(self, position: FetchPosition, committed: CommittedOffsets, partition_id: int) -> int | None:
        """Return where to begin if that is in the log; None: nothing is committed."""
        is_stored = position.position == OFFSET_STORED
        return self._committed(committed, partition_id) if is_stored else position.position

    def _begun(self, connection: Connection, partition_id: int, position: int | None) -> int | None:
        """Return the same position, within a transaction only if the reader has passed a part of it."""
        if position is None or not self._positions.offset_in_transaction(position):
            return position
        return self._positions.at(*as_begun(connection, partition_id, self._positions.pair(position)))

    def _with_last_commits(self, outcomes: Sequence[ReadOutcome]) -> list[ReadOutcome]:
        """Return the same, and what lies just after each beginning: a reader may begin in the middle of it."""
        starts = [outcome for outcome in outcomes if isinstance(outcome, StartResolved)]
        if not starts:
            return list(outcomes)

        def work(connection: Connection) -> dict[int, int | None]:
            return {
                found.partition_id: last_commit_number(
                    connection, found.partition_id, self._positions.pair(found.start)
                )
                for found in starts
            }

        numbers = self._read(work)
        return [
            replace(outcome, last_commit=numbers[outcome.partition_id])
            if isinstance(outcome, StartResolved)
            else outcome
            for outcome in outcomes
        ]

    def _is_unstable(self, partition_id: int, committed: CommittedOffsets) -> bool:
        """Return whether an open transaction may still move what is committed there (KIP-447)."""
        if partition_id in committed.unstable and self._options.isolation is IsolationLevel.READ_COMMITTED:
            self._is_held_back = True
            self._overdue_offsets.held_back(partition_id, _HELD_BACK_BY_OFFSETS)
            return True
        self._overdue_offsets.let_go(partition_id)
        return False

    def _start(
        self,
        position: FetchPosition,
        bounds: Bounds,
        committed: CommittedOffsets,
        partition_id: int,
        given: int | None,
    ) -> ReadOutcome:
        offset = committed.offsets.get(partition_id)
        is_stored = position.position == OFFSET_STORED
        if is_stored and offset is not None and not self._positions.is_own(offset):
            error = kafka_error_of(other_order(self._options.group_id, offset))
            return PartitionFailed(position, error, offset.offset, for_good=True)
        start = start_position(
            position.position if given is None or is_stored else given,
            bounds,
            self._options.end_offset(bounds),
            given,
            self._options.offset_reset,
            positions=self._positions,
        )
        if start.position is None:
            error = KafkaError(KafkaError._AUTO_OFFSET_RESET, start.why)
            place = self._positions.place(position.position)
            return PartitionFailed(position, error, place if place >= 0 else None, for_good=True)
        known = self._committed(committed, partition_id)
        is_over_records = (
            start.why == NOTHING_COMMITTED and self._positions.place(start.position) > bounds.log_start_offset
        )
        return StartResolved(
            position,
            start.position,
            partition_id,
            known,
            reset_from=start.reset_from,
            passed_over_from=bounds.log_start_offset if is_over_records else None,
            why=start.why,
        )

    def _told_of(self, pages: Mapping[int, AnyPage]) -> Mapping[int, ToldCommit]:
        """Return what the journal tells of the transactions of which the pages hold records, by their commits."""
        numbers = {
            placed.commit_number
            for page in pages.values()
            if isinstance(page, CommitPage)
            for placed in page.batches
            if placed.marker_offset is not None
        }
        told = {number: known for number, known in self._told.items() if number in numbers}
        numbers -= told.keys()
        if not numbers or not self._may_read_journal:
            return told
        try:
            return told | self._read(partial(_told_by_journal, numbers))
        except PermissionDenied:
            # Such a role reads what is in the log, and no more.
            self._may_read_journal = False
            return told

    def _delivered(self, position: FetchPosition, page: AnyPage, snapshot: int) -> ReadOutcome:
        """Return the page as the subscription takes it."""
        if isinstance(page, CommitPage):
            return PageDelivered(position, self._placed(position, page, snapshot))
        end_offset = page.bounds.end(self._options.isolation)
        if end_offset < page.bounds.high_watermark and page.next_offset >= end_offset:
            self._is_held_back = True
            self._overdue.held_back(page.bounds.partition_id, end_offset)
        else:
            self._overdue.let_go(page.bounds.partition_id)
        behind = [batch.base_offset for batch in page.batches[1:]] + [page.next_offset]
        chunks = [
            _chunk(position, batch, next_offset) for batch, next_offset in zip(page.batches, behind, strict=False)
        ]
        return PageDelivered(position, PageRead(chunks, page.next_offset, page.bounds, end_offset))

    def _placed(self, position: FetchPosition, page: CommitPage, snapshot: int) -> PageRead:
        at = self._positions.at
        starts = [at(*placed.start) for placed in page.batches]
        next_position = at(*page.next_position)
        chunks: list[Chunk] = []
        for placed, start, behind in zip(page.batches, starts, [*starts[1:], next_position], strict=False):
            is_within = placed.marker_offset is not None
            marker_offset = NO_MARKER if placed.marker_offset is None else placed.marker_offset
            source = _source(position, placed.batch, marker_offset)
            chunks.append(
                Chunk(
                    source=source,
                    open=partial(open_batch, source, placed.batch, placed.from_offset),
                    record_count=placed.batch.record_count,
                    size_bytes=placed.batch.size_bytes,
                    first_offset=placed.from_offset,
                    last_offset=placed.batch.last_offset,
                    next_position=behind,
                    start=start,
                    base=at(marker_offset) if is_within else 0,
                    unit=1 if is_within else self._positions.unit,
                    commit=Committed(
                        placed.commit_number,
                        snapshot,
                        placed.batch.producer if is_within else None,
                        self._told.get(placed.commit_number),
                    )
                    if self._options.is_atomic
                    else None,
                )
            )
        return PageRead(chunks, next_position, page.bounds, at(page.bounds.high_watermark), snapshot)

    def _read(self, work: Callable[[Connection], Result]) -> Result:
        cluster = self._connection.cluster()
        return repaired(cluster, self.database_id, lambda store: store.read(work, retry_timeout_ms=RETRY_TIMEOUT_MS))

    def _is_elsewhere(self, position: FetchPosition) -> bool:
        """Return whether no more than what is committed for the partition is here."""
        if self._connection.is_alone or not _is_asked_for(position):
            return False
        return position.partition.leader != self.database_id


def _is_moved(position: FetchPosition, topic: Topic) -> bool:
    partition, asked = position.partition, position.stored_offset
    is_another = asked is not None and asked.partition_id != topic.partition_ids[partition.number]
    return is_another or topic.leaders[partition.number] != partition.leader


def _is_asked_for(position: FetchPosition) -> bool:
    """Return whether the group has to say where to begin, and has not yet."""
    return position.position == OFFSET_STORED and position.stored_offset is None


def _found_elsewhere(positions: Mapping[int, FetchPosition]) -> dict[int, OffsetAndMetadata]:
    """Return what the group's database has answered about these partitions."""
    return {
        partition_id: position.stored_offset.offset
        for partition_id, position in positions.items()
        if position.stored_offset is not None and position.stored_offset.offset is not None
    }


def _told_by_journal(commit_numbers: Collection[int], connection: Connection) -> dict[int, ToldCommit]:
    found = commits_of(connection, commit_numbers)
    sent = {row.entry_id: from_journal_text(row.sent_offsets) for row in found if row.sent_offsets is not None}
    ids = {partition_id for by_group in sent.values() for offsets in by_group.values() for partition_id in offsets}
    names = names_of_partitions(connection, ids) if ids else {}
    return {
        row.entry_id: ToldCommit(
            row.transactional_id,
            {
                group_id: named
                for group_id, offsets in sent.get(row.entry_id, {}).items()
                # What txnstore itself has consumed is nobody's business.
                if not group_id.startswith(INTERNAL_GROUP_PREFIX)
                and (named := {names[number]: offset for number, offset in offsets.items() if number in names})
            },
        )
        for row in found
    }


def _source(position: FetchPosition, batch: RecordBatch, marker_offset: int | None) -> RecordSource:
    partition = position.partition
    return RecordSource(partition.topic, partition.number, _TIMESTAMP_TYPES[batch.timestamp_type], marker_offset)


def _chunk(position: FetchPosition, batch: RecordBatch, next_offset: int) -> Chunk:
    first_offset = max(batch.base_offset, position.position)
    source = _source(position, batch, None)
    return Chunk(
        source=source,
        open=partial(open_batch, source, batch, position.position),
        record_count=batch.record_count,
        size_bytes=batch.size_bytes,
        first_offset=first_offset,
        last_offset=batch.last_offset,
        next_position=next_offset,
        start=first_offset,
    )


class PartitionLookups:
    """A consumer's questions about partitions beside reading them; each method runs on its worker."""

    def __init__(self, connection: StoreConnection, directory: TopicDirectory, options: ConsumerOptions) -> None:
        """Answer as a reader with these settings sees the log."""
        self._connection = connection
        self._directory = directory
        self._options = options
        self._positions = options.positions

    def watermarks(self, partition: TopicPartition) -> tuple[int, int]:
        """Return the first offset, and the first one that the reader may not read yet.

        Raises:
            KafkaException: `_UNKNOWN_PARTITION`: there is no such partition.
            TxnStoreError: the database cannot be asked.
        """

        def look() -> Bounds:
            partition_id = self._partition_id(partition)

            def work(connection: Connection) -> Bounds:
                return read_bounds(connection, [partition_id])[partition_id]

            return self._connection.cluster().at_partition(partition_id, lambda store: store.read(work))

        try:
            bounds = self._directory.again_if_unknown([partition.topic], look)
        except UnknownTopicOrPartition:
            self._directory.forget(partition.topic)
            raise _unknown_partition() from None
        return bounds.log_start_offset, self._options.end_offset(bounds)

    def offsets_for_times(self, partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
        """Return for each partition, whose offset is a time in milliseconds, the first offset from that time on.

        OFFSET_END: there is no such record yet.  A time of -1 stands for the end, as in Kafka.  What is not there has
        an error beside its time.

        Raises:
            KafkaException: `_UNKNOWN_PARTITION`: none of the partitions is there.
            TxnStoreError: the database cannot be asked.
        """
        names = {partition.topic for partition in partitions}
        return self._directory.again_if_unknown(names, lambda: self._offsets_for_times(partitions))

    def _offsets_for_times(self, partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
        ids, errors = dict[int, int](), dict[int, KafkaError]()
        for index, partition in enumerate(partitions):
            try:
                ids[index] = self._partition_id(partition)
            except KafkaException as error:
                errors[index] = error.args[0]
        if not ids:
            raise _unknown_partition()

        def find(wanted: Sequence[tuple[int, int, TopicPartition]], connection: Connection) -> list[tuple[int, int]]:
            offsets = []
            for index, partition_id, partition in wanted:
                if partition.offset == OFFSET_END:
                    end_offset = self._options.end_offset(read_bounds(connection, [partition_id])[partition_id])
                    offsets.append((index, end_offset))
                    continue
                at_ms = min(partition.offset, TIMESTAMP_MS_MAX)
                found = offset_for_time(connection, partition_id, at_ms, self._options.bounding_isolation)
                offsets.append((index, OFFSET_END if found is None else found.offset))
            return offsets

        cluster = self._connection.cluster()
        wanted_all = [(index, partition_id, partitions[index]) for index, partition_id in ids.items()]
        by_leader = cluster.by_leader(wanted_all, lambda item: item[1])
        offsets: dict[int, int] = {}
        for leader, wanted in by_leader.items():
            offsets.update(repaired(cluster, leader, partial(Store.read, work=partial(find, wanted))))
        return [
            partition.with_error(errors[index])
            if index in errors
            else self._positions.partition(partition.topic, partition.partition, self._positions.at(offsets[index]))
            for index, partition in enumerate(partitions)
        ]

    def _partition_id(self, partition: TopicPartition) -> int:
        topic = self._directory.find([partition.topic]).get(partition.topic)
        if topic is not None and partition.partition >= len(topic.partition_ids):
            topic = self._directory.refresh([partition.topic]).get(partition.topic)
        if topic is None:
            raise _unknown_partition()
        try:
            return topic.partition_id(partition.partition)
        except UnknownTopicOrPartition:
            raise _unknown_partition() from None


def _unknown_partition() -> KafkaException:
    return KafkaException(KafkaError(KafkaError._UNKNOWN_PARTITION))

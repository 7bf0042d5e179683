"""The checker of a store, and of a cluster: reads all of it and names each invariant that does not hold.

It looks at tables only, so a store may be checked at any moment: while others write, after a crash, after a recovery.
A cluster is read one database after the other, so nobody may be at work meanwhile; what is half done may be.

A partition's log is read from the start, and all else that is known of the partition must follow from it. Then the
coordinator's tables must agree among themselves and with what stands in the partitions.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from operator import attrgetter
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Row, Table, bindparam, func, select, union

from txnstore.db.cluster.catalogue import read_catalogue
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.cluster.membership import PRODUCER_ID_BITS
from txnstore.db.schema import (
    finished_transactions,
    group_offsets,
    partition_heads,
    partitions,
    pending_group_offsets,
    pending_markers,
    producer_states,
    record_batches,
    stores,
    transaction_groups,
    transaction_log,
    transaction_partitions,
    transaction_writer_partitions,
    transaction_writers,
    transactions,
)
from txnstore.db.store import Store
from txnstore.errors import CorruptBatch
from txnstore.log.bounds import read_bounds
from txnstore.log.codec import RecordBatch, decode
from txnstore.log.compaction import may_have_gaps
from txnstore.log.fetch import fetch
from txnstore.log.partition_rows import producers_of_partition
from txnstore.log.sequences import ProducerInPartition, RecentBatch, increment_sequence, last_sequence_of, remember
from txnstore.model import NO_PRODUCER_ID, ControlType
from txnstore.transactions.protocol import DECIDED, PREVIOUS_STATES, TransactionState
from txnstore.transactions.rows import JournalEntry, changes_of

_S = TransactionState
#: A producer id and an epoch.
_Identity = tuple[int, int]
#: How a transaction ended in a partition: producer id, epoch of its records, first offset, outcome, LSO after it.
_Finished = tuple[int, int, int, int, int]
_finished_of: Final = attrgetter("producer_id", "producer_epoch", "first_offset", "outcome", "last_stable_offset")

_UNFINISHED: Final = DECIDED | {_S.ONGOING}
#: Of a transaction that is over, nothing is left in these.
_OF_UNFINISHED: Final = (
    pending_markers,
    transaction_partitions,
    transaction_writers,
    transaction_writer_partitions,
    transaction_groups,
    pending_group_offsets,
)
_PARTITION_IDS: Final = union(select(partitions.c.partition_id), select(partition_heads.c.partition_id))
_USED: Final = union(
    select(record_batches.c.producer_id.label("producer_id")),
    select(transactions.c.producer_id),
    select(transactions.c.next_producer_id),
).subquery()
# Of the range that this database gives out; others of its cluster have theirs.
_LARGEST_PRODUCER_ID: Final = select(func.max(_USED.c.producer_id)).where(
    _USED.c.producer_id.between(bindparam("first"), bindparam("last"))
)


class Invariant(enum.Enum):
    """What holds in a store at every moment; the last three, once nothing is open or half done."""

    OFFSETS_FOLLOW = "the batches of a partition follow each other without gap or overlap, up to the high watermark"
    BATCHES_WHOLE = "a batch agrees with its checksum and has as many records as offsets"
    TIMES_RUN = "the running maximum of timestamps is that of the batches, up to the partition's head"
    SEQUENCES_FOLLOW = "the sequence numbers of a producer's epoch follow each other: nothing lost, nothing twice"
    EPOCHS_RISE = "a producer's epoch never falls in a partition, and a marker's is above that of its records"
    PRODUCERS_KNOWN = "what a partition knows of a producer is what its log says"
    INDEX_KNOWN = "the index of finished transactions is what the log says"
    COMMITTED_VISIBLE = "a reader of committed records gets these and no others, up to the last stable offset"

    MOVES_LEGAL = "each entry of the journal may follow the one before it"
    JOURNAL_CURRENT = "the last entry of the journal is what the coordinator's row says"
    IDENTITIES_UNIQUE = "no two transactions have the same producer id and epoch, and those of one producer id rise"
    PRODUCER_IDS_GIVEN = "a producer id was given out, and to one transactional id only"
    DECISION_STANDS = "markers and committed offsets of a transaction are those that the journal decided on"
    ALL_OR_NOTHING = "a transaction has the same outcome in all of its partitions"
    PARTICIPANTS_KNOWN = "the partitions and groups of a transaction are those that hold something of it"
    OUTBOX_RIGHT = "the outbox holds the markers that a decided transaction still needs, and no others"
    NOTHING_HANGS = "what is open in a partition or pending in a group belongs to an open or decided transaction"

    COPIES_CURRENT = "the databases of a cluster have the controller's topics, and the logs of what lives in them"

    NOTHING_OPEN = "at rest no transaction is open or decided"
    NOTHING_QUEUED = "at rest nothing is left in the outbox, of participants, or of pending offsets"
    ALL_STABLE = "at rest the last stable offset of each partition is its high watermark"


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that does not hold."""

    invariant: Invariant
    detail: str
    """Where, and what was found."""

    def __str__(self) -> str:
        """Return one line of a report."""
        return f"{self.invariant.name} ({self.invariant.value}): {self.detail}"


def assert_sound(store: Store, *, at_rest: bool = False, partition_ids: Collection[int] | None = None) -> None:
    """Return if the store is as `find_violations` wants it.

    Raises:
        AssertionError: it is not; the text names each violated invariant.
    """
    found = find_violations(store, at_rest=at_rest, partition_ids=partition_ids)
    assert not found, "\n".join(["the store breaks its invariants:", *map(str, found)])


def find_violations(
    store: Store,
    *,
    at_rest: bool = False,
    partition_ids: Collection[int] | None = None,
    producers_expire: bool = False,
) -> list[Violation]:
    """Return each violation of an invariant; a store that is in order has no violations.

    With `at_rest` nothing may be open, pending or half done either, as after a recovery when no client is at work.
    `partition_ids` are the partitions whose logs are read, all by default; the coordinator's tables are always read.
    With `producers_expire` a partition may have forgotten what a producer wrote before it went silent.
    """
    return store.read(
        lambda connection: violations_on(
            connection, at_rest=at_rest, partition_ids=partition_ids, producers_expire=producers_expire
        )
    )


def violations_on(
    connection: Connection,
    *,
    at_rest: bool = False,
    partition_ids: Collection[int] | None = None,
    producers_expire: bool = False,
) -> list[Violation]:
    """Return the same, as the database transaction sees it that is open on `connection`."""
    if partition_ids is None:
        partition_ids = connection.execute(_PARTITION_IDS).scalars().all()
    found = [
        violation
        for number in sorted(partition_ids)
        for violation in partition_violations(connection, number, producers_expire=producers_expire)
    ]
    found += _given_violations(connection)
    found += _coordinator_violations(_read(connection))
    if at_rest:
        found += _rest_violations(connection)
    return found


def assert_cluster_sound(
    cluster: Cluster, *, at_rest: bool = False, copies: bool = True, producers_expire: bool = False
) -> None:
    """Return if the cluster is as `cluster_violations` wants it.

    Raises:
        AssertionError: it is not; the text names each violated invariant.
    """
    found = cluster_violations(cluster, at_rest=at_rest, copies=copies, producers_expire=producers_expire)
    assert not found, "\n".join(["the cluster breaks its invariants:", *map(str, found)])


def cluster_violations(
    cluster: Cluster, *, at_rest: bool = False, copies: bool = True, producers_expire: bool = False
) -> list[Violation]:
    """Return each violation; with `at_rest` nothing may be open or half done, with `copies` they are up to date.

    With `producers_expire` a partition may have forgotten what a producer wrote before it went silent.
    """
    found: list[Violation] = []
    tables: list[_Tables] = []
    with ExitStack() as stack:
        for member in cluster.databases:
            connection = stack.enter_context(cluster.own(member.database_id).engine.connect())
            for head in _all(connection, partition_heads):
                found += partition_violations(connection, head.partition_id, producers_expire=producers_expire)
            if at_rest:
                found += _rest_violations(connection)
            if copies:
                found += _copy_violations(cluster, member.database_id)
            found += _given_violations(connection)
            tables.append(_read(connection))
    return [*found, *_coordinator_violations(_together(tables))]


def _copy_violations(cluster: Cluster, database_id: int) -> Iterator[Violation]:
    store, label = cluster.own(database_id), cluster.label_of(database_id)
    present = store.read(read_catalogue)
    for name, rows in cluster.controller.read(read_catalogue).rows.items():
        if present.rows[name] != rows:
            yield Violation(Invariant.COPIES_CURRENT, f"the database {label!r} has other {name} than the controller")
    found = store.read(lambda connection: _all(connection, partitions))
    own = {row.partition_id for row in found if row.leader_database_id == database_id}
    heads = {row.partition_id for row in store.read(lambda connection: _all(connection, partition_heads))}
    if own != heads:
        yield Violation(Invariant.COPIES_CURRENT, f"the database {label!r} has the heads {heads}, and {own} live there")


def _all(connection: Connection, table: Table, *conditions: ColumnElement[bool]) -> list[Row[Any]]:
    return list(connection.execute(select(table).where(*conditions)))


def _open_in_partitions(connection: Connection) -> list[Row[Any]]:
    return _all(connection, producer_states, producer_states.c.transaction_first_offset.is_not(None))


# --- a partition ------------------------------------------------------------------------------------------------------


def partition_violations(
    connection: Connection, partition_id: int, *, producers_expire: bool = False
) -> list[Violation]:
    """Return what is wrong with one partition.

    What was deleted from its beginning cannot be replayed: of the rest, only what does not depend on it is asked.  Of
    a compacted partition nothing can: its batches are whole, do not overlap and end before the head.
    With `producers_expire` the partition may have forgotten a producer that came back later.
    """
    rows = _all(connection, record_batches, record_batches.c.partition_id == partition_id)
    rows.sort(key=attrgetter("last_offset"))
    heads = _all(connection, partition_heads, partition_heads.c.partition_id == partition_id)
    if not heads:
        return [Violation(Invariant.OFFSETS_FOLLOW, f"partition {partition_id} has no head")]
    (head,) = heads
    replay = _Replay(partition_id, rows[0].base_offset if rows else head.next_offset)
    is_compacted = may_have_gaps(connection, partition_id)
    found = [
        *_offset_violations(rows, head, has_gaps=is_compacted),
        *(() if is_compacted else _time_violations(rows, head)),
    ]
    batches = [_decoded(row, has_gaps=is_compacted) for row in rows]
    damages = [batch for batch in batches if isinstance(batch, Violation)]
    if damages or is_compacted:
        # What is damaged cannot be replayed: the rest would be noise.
        return [*found, *damages]
    for batch in batches:
        assert isinstance(batch, RecordBatch)
        replay.take(batch)
    found += replay.violations
    found += _producer_violations(connection, replay, producers_expire=producers_expire)
    found += _index_violations(connection, replay)
    found += _visibility_violations(connection, replay)
    return found


def _decoded(row: Row[Any], *, has_gaps: bool) -> RecordBatch | Violation:
    try:
        batch = decode(row)
        gaps = row.last_offset - row.base_offset + 1 - batch.record_count
        if len(batch.offsets()) == batch.record_count and (gaps == 0 or (has_gaps and gaps > 0)):
            return batch
        damage = f"{row.record_count} records up to offset {row.last_offset}"
    except CorruptBatch as error:
        damage = str(error)
    return Violation(Invariant.BATCHES_WHOLE, f"partition {row.partition_id}, offset {row.base_offset}: {damage}")


def _offset_violations(rows: Sequence[Row[Any]], head: Row[Any], *, has_gaps: bool) -> Iterator[Violation]:
    where = f"partition {head.partition_id}"
    # Batches below the log start may be there still; but nothing is missing at it.
    next_offset = min(head.log_start_offset, rows[0].base_offset) if rows else head.log_start_offset
    for row in rows:
        if row.base_offset != next_offset and not (has_gaps and row.base_offset > next_offset):
            detail = f"{where}: a batch begins at {row.base_offset} where {next_offset} is next"
            yield Violation(Invariant.OFFSETS_FOLLOW, detail)
        next_offset = row.last_offset + 1
    if head.next_offset != next_offset and not (has_gaps and head.next_offset > next_offset):
        detail = f"{where}: the head is at {head.next_offset}, the log ends at {next_offset}"
        yield Violation(Invariant.OFFSETS_FOLLOW, detail)


def _time_violations(rows: Sequence[Row[Any]], head: Row[Any]) -> Iterator[Violation]:
    where = f"partition {head.partition_id}"
    # The largest timestamp may be that of a deleted record.
    is_cut = bool(rows and rows[0].base_offset > 0)
    largest_ms = rows[0].running_max_timestamp_ms if is_cut else -1
    for row in rows:
        largest_ms, found_ms = max(largest_ms, row.max_timestamp_ms), row.running_max_timestamp_ms
        if found_ms != largest_ms:
            detail = f"{where}, offset {row.base_offset}: {found_ms}, the largest so far is {largest_ms}"
            yield Violation(Invariant.TIMES_RUN, detail)
    if head.running_max_timestamp_ms != largest_ms and (rows or head.next_offset == 0):
        detail = f"{where}: {head.running_max_timestamp_ms} in the head, {largest_ms} in the log"
        yield Violation(Invariant.TIMES_RUN, detail)


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
    records: list[tuple[int, _Identity | None]] = field(default_factory=list)

    def take(self, batch: RecordBatch) -> None:
        """Read the next batch."""
        identity = batch.producer
        if identity.producer_id != NO_PRODUCER_ID:
            known = self.producers.get(identity.producer_id)
            self._check_epoch(batch, known)
            state = known or ProducerInPartition(identity.producer_id, identity.epoch, (), -1, 0, None)
            if batch.is_control:
                self._end(batch, state)
            else:
                self._check_sequence(batch, known)
                self._remember(batch, state)
        if not batch.is_control:
            transaction = (identity.producer_id, identity.epoch) if batch.is_transactional else None
            self.records.extend((offset, transaction) for offset in batch.offsets())

    def committed_offsets(self, first_offset: int, end_offset: int) -> list[int]:
        """Return the offsets of this range that a reader of committed records gets."""
        committed = {row[:2] for row in self.finished.values() if row[3] == ControlType.COMMIT}
        return [
            offset
            for offset, transaction in self.records
            if first_offset <= offset < end_offset and (transaction is None or transaction in committed)
        ]

    def _check_epoch(self, batch: RecordBatch, known: ProducerInPartition | None) -> None:
        epoch = batch.producer.epoch
        if known is not None and (epoch < known.epoch or (batch.is_control and epoch == known.epoch)):
            what = "a marker" if batch.is_control else "records"
            self._violated(
                Invariant.EPOCHS_RISE, batch, f"{what} of producer {batch.producer} after epoch {known.epoch}"
            )

    def _check_sequence(self, batch: RecordBatch, known: ProducerInPartition | None) -> None:
        if known is not None and known.epoch == batch.producer.epoch and known.recent_batches:
            expected = increment_sequence(known.last_sequence, 1)
        elif known is not None or (batch.is_transactional and self.first_offset == 0):
            expected = 0
        else:
            # A partition may have forgotten the producer, or what it wrote before may be deleted.
            return
        if batch.base_sequence != expected:
            found = f"producer {batch.producer} has sequence {batch.base_sequence} where {expected} is next"
            self._violated(Invariant.SEQUENCES_FOLLOW, batch, found)

    def _remember(self, batch: RecordBatch, state: ProducerInPartition) -> None:
        recent = RecentBatch(
            batch.base_sequence,
            last_sequence_of(batch.base_sequence, batch.record_count),
            batch.base_offset,
            batch.last_offset,
            batch.max_timestamp_ms,
        )
        first_offset = state.transaction_first_offset
        if batch.is_transactional and first_offset is None:
            first_offset = batch.base_offset
        self.producers[state.producer_id] = replace(
            state,
            epoch=batch.producer.epoch,
            recent_batches=remember(state.recent_batches if state.epoch == batch.producer.epoch else (), recent),
            transaction_first_offset=first_offset,
        )

    def _end(self, marker: RecordBatch, state: ProducerInPartition) -> None:
        self.producers[state.producer_id] = replace(
            state,
            epoch=marker.producer.epoch,
            recent_batches=(),
            coordinator_epoch=marker.coordinator_epoch or 0,
            transaction_first_offset=None,
        )
        first_offset, outcome = state.transaction_first_offset, marker.control_type
        if first_offset is not None and outcome is not None:
            open_offsets = (each.transaction_first_offset for each in self.producers.values())
            stable = min((offset for offset in open_offsets if offset is not None), default=marker.last_offset + 1)
            self.finished[marker.last_offset] = (state.producer_id, state.epoch, first_offset, int(outcome), stable)

    def _violated(self, invariant: Invariant, batch: RecordBatch, found: str) -> None:
        self.violations.append(
            Violation(invariant, f"partition {self.partition_id}, offset {batch.base_offset}: {found}")
        )


def _producer_violations(connection: Connection, replay: _Replay, *, producers_expire: bool) -> Iterator[Violation]:
    where = f"partition {replay.partition_id}"
    stored = {state.producer_id: state for state in producers_of_partition(connection, replay.partition_id)}
    for producer_id, state in stored.items():
        expected = replay.producers.get(producer_id)
        if replay.first_offset > 0 and not _is_told_by(state, replay):
            continue
        if (expected is None or producers_expire) and _is_announced(state):
            continue
        if expected is None:
            yield Violation(Invariant.PRODUCERS_KNOWN, f"{where}: producer {producer_id} wrote nothing")
        elif producers_expire and _may_have_been_forgotten(state, expected):
            continue
        # When it last wrote, by the store's clock, is not in the log.
        elif replace(state, last_timestamp_ms=0) != expected:
            yield Violation(Invariant.PRODUCERS_KNOWN, f"{where}: {state} where the log says {expected}")
    for producer_id, state in replay.producers.items():
        # One with nothing open may be forgotten with age.
        if producer_id not in stored and state.transaction_first_offset is not None:
            detail = f"{where}: producer {producer_id} is forgotten, but its transaction is open"
            yield Violation(Invariant.PRODUCERS_KNOWN, detail)


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
    rows = _all(connection, finished_transactions, finished_transactions.c.partition_id == replay.partition_id)
    stored = {row.marker_offset: _finished_of(row) for row in rows}
    for marker_offset in sorted(stored.keys() | replay.finished.keys()):
        found, expected = stored.get(marker_offset), replay.finished.get(marker_offset)
        if found is not None and min(found[2], found[4]) < replay.first_offset:
            # A record that it depends on, its own first one or that of one that was open then, is deleted.
            continue
        if found != expected:
            detail = f"partition {replay.partition_id}, marker at {marker_offset}: {found}"
            yield Violation(Invariant.INDEX_KNOWN, f"{detail} where the log says {expected}")


def _visibility_violations(connection: Connection, replay: _Replay) -> Iterator[Violation]:
    partition_id = replay.partition_id
    bounds = read_bounds(connection, [partition_id])[partition_id]
    position = bounds.log_start_offset
    seen: list[int] = []
    while position < bounds.last_stable_offset:
        page = fetch(connection, {partition_id: position})[partition_id]
        seen.extend(offset for batch in page.batches for offset in batch.offsets() if offset >= position)
        position = page.next_offset
    expected = replay.committed_offsets(bounds.log_start_offset, bounds.last_stable_offset)
    if seen != expected:
        detail = f"partition {partition_id}: a reader gets the offsets {seen} where {expected} are committed"
        yield Violation(Invariant.COMMITTED_VISIBLE, detail)


# --- the coordinator's tables -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tables:
    """The coordinator's tables, and those that must agree with them, in one snapshot."""

    transactions: Mapping[str, Row[Any]]
    journal: Mapping[str, list[JournalEntry]]
    partitions: Mapping[str, set[int]]
    writers: Mapping[str, list[Row[Any]]]
    #: By transactional id, then by writer.
    writer_partitions: Mapping[str, Mapping[int, set[int]]]
    groups: Mapping[str, set[str]]
    outbox: Mapping[str, list[Row[Any]]]
    open_in_partitions: list[Row[Any]]
    pending: list[Row[Any]]
    finished: list[Row[Any]]
    committed: list[Row[Any]]
    #: The entry with which each transaction began, and how the journal decided.
    begun: list[tuple[JournalEntry, ControlType | None]]
    #: Whether they are those of several databases: parts are added before they are written to, and markers stay queued
    #: until all that is known to be written is struck off at once.
    of_several: bool = False


def _read(connection: Connection) -> _Tables:
    entries = connection.execute(select(transaction_log).order_by(transaction_log.c.entry_id))
    journal: dict[str, list[JournalEntry]] = defaultdict(list)
    for entry in (change for row in entries for change in changes_of(row)):
        journal[entry.transactional_id].append(entry)
    added = _grouped(_all(connection, transaction_partitions))
    groups = _grouped(_all(connection, transaction_groups))
    writer_partitions: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for row in _all(connection, transaction_writer_partitions):
        writer_partitions[row.transactional_id][row.writer_producer_id].add(row.partition_id)
    return _Tables(
        transactions={row.transactional_id: row for row in _all(connection, transactions)},
        journal=journal,
        partitions={name: {row.partition_id for row in rows} for name, rows in added.items()},
        writers=_grouped(_all(connection, transaction_writers)),
        writer_partitions=writer_partitions,
        groups={name: {row.group_id for row in rows} for name, rows in groups.items()},
        outbox=_grouped(_all(connection, pending_markers)),
        open_in_partitions=_open_in_partitions(connection),
        pending=_all(connection, pending_group_offsets),
        finished=_all(connection, finished_transactions),
        committed=_all(connection, group_offsets, group_offsets.c.producer_id != NO_PRODUCER_ID),
        begun=[begun for entries in journal.values() for begun in _begun(entries)],
    )


def _grouped(rows: Iterable[Row[Any]]) -> dict[str, list[Row[Any]]]:
    by_id: dict[str, list[Row[Any]]] = defaultdict(list)
    for row in rows:
        by_id[row.transactional_id].append(row)
    return dict(by_id)


def _begun(entries: Iterable[JournalEntry]) -> Iterator[tuple[JournalEntry, ControlType | None]]:
    """Return the entry with which each transaction of an id began, and how it was decided if it was."""
    began: JournalEntry | None = None
    before: TransactionState | None = None
    for entry in entries:
        state = entry.state
        if state is _S.ONGOING and before is not _S.ONGOING:
            if began is not None:
                yield began, None
            began = entry
        elif state in DECIDED and began is not None:
            yield began, _outcome_of(state)
            began = None
        before = state
    if began is not None:
        yield began, None


def _outcome_of(decided: TransactionState) -> ControlType:
    return ControlType.COMMIT if decided is _S.PREPARE_COMMIT else ControlType.ABORT


def _together(all_tables: Sequence[_Tables]) -> _Tables:
    """Return the rows of several databases as if they were of one; no name is in two of them."""
    merged: dict[str, Any] = {}
    for name in (each.name for each in fields(_Tables) if each.name != "of_several"):
        parts = [getattr(tables, name) for tables in all_tables]
        if isinstance(parts[0], list):
            merged[name] = [row for part in parts for row in part]
            continue
        merged[name] = {key: value for part in parts for key, value in part.items()}
        assert len(merged[name]) == sum(map(len, parts)), f"two databases have the same {name}"
    return _Tables(**merged, of_several=True)


def _coordinator_violations(tables: _Tables) -> Iterator[Violation]:
    yield from _journal_violations(tables)
    yield from _identity_violations(tables)
    yield from _decision_violations(tables)
    yield from _participant_violations(tables)
    yield from _outbox_violations(tables)
    yield from _hanging_violations(tables)


def _rest_violations(connection: Connection) -> Iterator[Violation]:
    """Return what is open, or half done, in a store that should be at rest."""
    for row in _all(connection, transactions):
        if _S(row.state) in _UNFINISHED:
            yield Violation(Invariant.NOTHING_OPEN, f"{row.transactional_id!r} is {_S(row.state).kafka_name}")
    for table in _OF_UNFINISHED:
        for row in _all(connection, table):
            yield Violation(Invariant.NOTHING_QUEUED, f"{table.name}: {tuple(row)}")
    for row in _open_in_partitions(connection):
        detail = f"producer {row.producer_id} holds it at {row.transaction_first_offset}"
        yield Violation(Invariant.ALL_STABLE, f"partition {row.partition_id}: {detail}")


def _given_violations(connection: Connection) -> Iterator[Violation]:
    given = connection.execute(select(stores.c.next_producer_id)).scalar_one()
    first = given >> PRODUCER_ID_BITS << PRODUCER_ID_BITS
    ids = {"first": first, "last": first + (1 << PRODUCER_ID_BITS) - 1}
    largest = connection.execute(_LARGEST_PRODUCER_ID, ids).scalar_one()
    if largest is not None and largest >= given:
        yield Violation(Invariant.PRODUCER_IDS_GIVEN, f"producer id {largest} is used, {given} is the next to give out")


def _journal_violations(tables: _Tables) -> Iterator[Violation]:
    of = attrgetter("state", "producer_id", "producer_epoch", "transaction_number", "timeout_ms", "start_ms")
    for name, entries in tables.journal.items():
        for before, after in pairwise(entries):
            old, new = before.state, after.state
            # An id that was forgotten may be used again.
            if not (new is _S.EMPTY if old is _S.DEAD else old in PREVIOUS_STATES[new]):
                move = f"{old.kafka_name} -> {new.kafka_name} in entries {before.entry_id}, {after.entry_id}"
                yield Violation(Invariant.MOVES_LEGAL, f"{name!r}: {move}")
        row, last = tables.transactions.get(name), entries[-1]
        is_current = last.state == _S.DEAD if row is None else of(row) == of(last)
        if not is_current:
            yield Violation(Invariant.JOURNAL_CURRENT, f"{name!r}: the row is {row}, the last entry {last}")


def _identity_violations(tables: _Tables) -> Iterator[Violation]:
    newest: dict[int, int] = {}
    for entry in sorted((entry for entry, _ in tables.begun), key=attrgetter("entry_id")):
        before = newest.get(entry.producer_id, -1)
        if entry.producer_epoch <= before:
            detail = f"{entry.transactional_id!r} began a transaction as {_text(_identity(entry))} after epoch {before}"
            yield Violation(Invariant.IDENTITIES_UNIQUE, detail)
        newest[entry.producer_id] = entry.producer_epoch
    owners: dict[int, str] = {}
    for name, row in tables.transactions.items():
        for producer_id in {row.producer_id, row.next_producer_id} - {NO_PRODUCER_ID}:
            if producer_id in owners:
                detail = f"{name!r} and {owners[producer_id]!r} have producer id {producer_id}"
                yield Violation(Invariant.PRODUCER_IDS_GIVEN, detail)
            owners[producer_id] = name


def _decision_violations(tables: _Tables) -> Iterator[Violation]:
    begun = {_identity(entry) for entry, _ in tables.begun}
    decisions = {_identity(entry): decision for entry, decision in tables.begun if decision is not None}
    outcomes: dict[_Identity, int] = {}
    for row in tables.finished:
        identity = _identity(row)
        transaction, decided = f"the transaction of {_text(identity)}", decisions.get(identity)
        if outcomes.setdefault(identity, row.outcome) != row.outcome:
            yield Violation(
                Invariant.ALL_OR_NOTHING, f"{transaction} ended differently in partition {row.partition_id}"
            )
        if decided is not None and decided != row.outcome:
            detail = f"{transaction} was decided to {decided.name}, but did not end so in partition {row.partition_id}"
            yield Violation(Invariant.DECISION_STANDS, detail)
        if decided is None and identity in begun:
            detail = f"{transaction} is not decided, but has ended in partition {row.partition_id}"
            yield Violation(Invariant.DECISION_STANDS, detail)
    for row in tables.committed:
        identity = _identity(row)
        if identity in begun and decisions.get(identity) is not ControlType.COMMIT:
            detail = f"group {row.group_id!r} has offsets of {_text(identity)}, whose transaction did not commit"
            yield Violation(Invariant.DECISION_STANDS, detail)


def _participant_violations(tables: _Tables) -> Iterator[Violation]:
    for name, row in tables.transactions.items():
        for found in _wrong_participants(tables, name, row):
            yield Violation(Invariant.PARTICIPANTS_KNOWN, f"{name!r} {found}")
    known = {*tables.partitions, *tables.groups, *tables.writers, *tables.writer_partitions}
    for name in known - tables.transactions.keys():
        yield Violation(Invariant.PARTICIPANTS_KNOWN, f"{name!r} has participants and no row")


def _wrong_participants(tables: _Tables, name: str, row: Row[Any]) -> Iterator[str]:
    state, groups, writers = _S(row.state), tables.groups.get(name, set()), tables.writers.get(name, [])
    #: By the producer that wrote to them.
    added = {row.producer_id: tables.partitions.get(name, set())}
    added_by_writers = tables.writer_partitions.get(name, {})
    if state not in _UNFINISHED:
        if added[row.producer_id] or groups or writers or added_by_writers:
            yield f"is {state.kafka_name} and has {added}, {groups}, {writers}, {added_by_writers}"
        return
    with_offsets = {pending.group_id for pending in tables.pending if pending.producer_id == row.producer_id}
    if not groups >= with_offsets:
        yield f"has the groups {groups}; {with_offsets} hold offsets of it"
    for writer in writers:
        added[writer.writer_producer_id] = added_by_writers.get(writer.writer_producer_id, set())
        if writer.producer_epoch != row.begin_epoch:
            yield f"has {writer}, whose epoch is not {row.begin_epoch}"
    if not added_by_writers.keys() <= added.keys() - {row.producer_id}:
        yield f"lists partitions of {added_by_writers}, which have not all joined"
    for producer_id, partition_ids in added.items():
        held = {open_.partition_id for open_ in tables.open_in_partitions if open_.producer_id == producer_id}
        # Partitions of a decided transaction stay on the list when they have their marker.
        is_exact = state is _S.ONGOING and not tables.of_several
        if not (partition_ids == held if is_exact else partition_ids >= held):
            yield f"has the partitions {partition_ids} of producer {producer_id}; {held} hold records of it"


def _outbox_violations(tables: _Tables) -> Iterator[Violation]:
    for name in tables.transactions.keys() | tables.outbox.keys():
        row, queue = tables.transactions.get(name), tables.outbox.get(name, [])
        expected: set[tuple[int, int, int, int]] = set()
        if row is not None and _S(row.state) in DECIDED:
            outcome = _outcome_of(_S(row.state))
            # A commit does not count every writer; which ones is what the outbox alone knows.
            counted = {marker.producer_id: marker.outcome for marker in queue if outcome is ControlType.COMMIT}
            writer_ids = (writer.writer_producer_id for writer in tables.writers.get(name, []))
            outcomes = {writer_id: counted.get(writer_id, int(ControlType.ABORT)) for writer_id in writer_ids}
            outcomes[row.producer_id] = int(outcome)
            expected = {
                (open_.partition_id, open_.producer_id, row.producer_epoch, outcomes[open_.producer_id])
                for open_ in tables.open_in_partitions
                if open_.producer_id in outcomes
            }
        found = {(marker.partition_id, *_identity(marker), marker.outcome) for marker in queue}
        is_right = found >= expected if tables.of_several else found == expected
        if not is_right:
            yield Violation(Invariant.OUTBOX_RIGHT, f"{name!r}: {found} is queued where {expected} is needed")


def _hanging_violations(tables: _Tables) -> Iterator[Violation]:
    unfinished: set[_Identity] = set()
    for name, row in tables.transactions.items():
        if _S(row.state) in _UNFINISHED:
            writers = (writer.writer_producer_id for writer in tables.writers.get(name, []))
            unfinished |= {(producer_id, row.begin_epoch) for producer_id in (row.producer_id, *writers)}
    for row in tables.open_in_partitions:
        if _identity(row) not in unfinished:
            detail = f"partition {row.partition_id}: producer {_text(_identity(row))} has no transaction"
            yield Violation(Invariant.NOTHING_HANGS, detail)
    for row in tables.pending:
        if _identity(row) not in unfinished:
            detail = f"group {row.group_id!r}: offsets of {_text(_identity(row))}, which has no transaction"
            yield Violation(Invariant.NOTHING_HANGS, detail)


def _identity(row: Row[Any] | JournalEntry) -> _Identity:
    return row.producer_id, row.producer_epoch


def _text(identity: _Identity) -> str:
    return f"{identity[0]}:{identity[1]}"

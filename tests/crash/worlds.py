"""The worlds of crashes: a transaction of its own for each crash, in a database that all of a test share.

A world has two partitions, a transactional id and a group. One transaction is over there already (it
wrote OLD and committed offset 1); the next one, of `producer`, is what crashes are about. A fresh world is cheaper
than a fresh database, and whatever a crash breaks elsewhere in the database is found all the same: the checker reads
the coordinator's tables whole.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Select,
    Table,
    Text,
    bindparam,
    cast,
    func,
    literal_column,
    null,
    select,
    union_all,
)

from tests.tools.crashes import CrashPoint, When, around_transactions, is_commit, steps_of
from txnstore.db.opening import open_store
from txnstore.db.schema import (
    finished_transactions,
    group_offsets,
    partition_heads,
    partition_storage,
    pending_group_offsets,
    pending_markers,
    producer_states,
    record_batches,
    sink_batches,
    sink_inputs,
    sink_positions,
    sink_runs,
    transaction_groups,
    transaction_log,
    transaction_partitions,
    transaction_writer_partitions,
    transaction_writers,
    transactions,
)
from txnstore.db.statements import HotStatement
from txnstore.db.store import Store
from txnstore.groups.offsets import read_offsets
from txnstore.log.append import Append
from txnstore.log.bounds import read_bounds
from txnstore.log.codec import encode
from txnstore.log.fetch import fetch
from txnstore.log.topics import create_topic
from txnstore.model import (
    NO_PRODUCER,
    NO_PRODUCER_ID,
    ControlType,
    GroupMembership,
    IsolationLevel,
    OffsetAndMetadata,
    ProducerIdentity,
    Record,
)
from txnstore.testing.manual_clock import ManualClock
from txnstore.transactions import rows
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.protocol import TransactionState
from txnstore.transactions.transaction import SentOffsets
from txnstore.transactions.writers import TransactionWriter

TIMEOUT_MS: Final = 60_000
PARTITIONS: Final = 2
WORLDS_PER_TOPIC: Final = 50
#: Flushes by name: of the transaction before, of the one that crashes are about, and of the one after it.
OLD: Final = "old"
FLUSHES: Final = ("first", "second")
LATER: Final = "later"
RECORDS_PER_FLUSH: Final = 2
OLD_OFFSET: Final = 1
NEW_OFFSET: Final = 2

_DECISION: Final = select(transaction_log.c.state).where(rows.HOLDS_DECISION).order_by(transaction_log.c.entry_id)


@dataclass(frozen=True)
class World:
    """One crash's own partitions, transactional id and group; goes to other processes as it is."""

    url: str
    now_ms: int
    number: int
    partition_ids: tuple[int, ...]
    #: Who begins the transaction that crashes are about.
    producer: ProducerIdentity = NO_PRODUCER
    #: How many transactions of the transactional id were decided before.
    decisions: int = 0
    name: str = "id"
    #: In which order of delivery its group reads.
    in_commit_order: bool = False
    #: Further writers of its transaction.
    writers: tuple[TransactionWriter, ...] = ()

    @property
    def transactional_id(self) -> str:
        return f"{self.name}-{self.number}"

    @property
    def group_id(self) -> str:
        return f"group-{self.number}"

    def batches(
        self, flush: str, *, producer: ProducerIdentity | None = None, is_transactional: bool = True
    ) -> list[Append]:
        """Return what `flush` writes: a batch for each partition, numbered after those of the flush before."""
        base_sequence = FLUSHES.index(flush) * RECORDS_PER_FLUSH if flush in FLUSHES else 0
        who = self.producer if producer is None else producer
        return [
            Append(
                partition_id,
                encode(
                    [Record(value) for value in values_of(flush)],
                    producer=who,
                    base_sequence=-1 if who == NO_PRODUCER else base_sequence,
                    is_transactional=is_transactional,
                ),
            )
            for partition_id in self.partition_ids
        ]

    def offsets(self, offset: int = NEW_OFFSET) -> SentOffsets:
        return SentOffsets(
            GroupMembership(self.group_id), {number: OffsetAndMetadata(offset) for number in self.partition_ids}
        )


#: What somebody does to a world.
Step = Callable[[World, Store], object]


@dataclass
class Victim:
    """A process that is about to die, and the world that it is in."""

    world: World
    store: Store


@dataclass
class Place:
    """A database in which one world after another is made."""

    url: str
    clock: ManualClock
    #: The partitions of so many are made at once, which is faster; a verification reads those of no world as well.
    worlds_per_topic: int = WORLDS_PER_TOPIC
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _partition_ids: list[int] = field(default_factory=list)

    @property
    def is_sqlite(self) -> bool:
        return self.url.startswith("sqlite")

    def open(self) -> Store:
        """Return the database as one more process sees it."""
        return open_store(self.url, clock=self.clock, pool_size=1)

    def make(self, store: Store, before: Step) -> World:
        """Make a world in which one transaction is over, and its producer has come as far as `before` in the next.

        `before` may return another world, which counts instead.
        """
        number = next(self._numbers)
        world = World(self.url, self.clock.now_ms(), number, self._take_partitions(store))
        coordinator = TransactionCoordinator(store)
        starting = coordinator.init_producer_id(world.transactional_id, TIMEOUT_MS).identity
        ended = coordinator.end_transaction(
            world.transactional_id,
            starting,
            commit=True,
            appends=world.batches(OLD, producer=starting),
            offsets=[world.offsets(OLD_OFFSET)],
        )
        ready = replace(world, producer=ended.identity, decisions=1)
        moved = before(ready, store)
        return moved if isinstance(moved, World) else ready

    def _take_partitions(self, store: Store) -> tuple[int, ...]:
        if not self._partition_ids:
            name = f"topic-{next(self._numbers)}"
            topic = store.write(partial(create_topic, name=name, partition_count=PARTITIONS * self.worlds_per_topic))
            self._partition_ids.extend(topic.partition_ids)
        taken, self._partition_ids = self._partition_ids[:PARTITIONS], self._partition_ids[PARTITIONS:]
        return tuple(taken)


def points_around_transactions(place: Place, before: Step, call: Step) -> list[CrashPoint]:
    """Return where to kill who makes this call, where the rest is shown by others: around each BEGIN and COMMIT.

    Within a database transaction it is one statement or another that is undone.
    """
    with place.open() as caller:
        world = place.make(caller, before)
        points = steps_of(lambda world: call(world, caller), world)
        # Nothing of it stays open.
        TransactionCoordinator(caller).init_producer_id(world.transactional_id, TIMEOUT_MS)
    return around_transactions(points)


def values_of(flush: str) -> tuple[bytes, ...]:
    return tuple(f"{flush}-{number}".encode() for number in range(RECORDS_PER_FLUSH))


@dataclass(frozen=True)
class View:
    """What a world looks like from outside, without what differs between worlds."""

    committed: tuple[tuple[bytes, ...], ...]
    """By partition, what a reader of committed records gets."""

    everything: tuple[tuple[bytes, ...], ...]
    offsets: tuple[int | None, ...]
    """By partition, what the group has committed."""

    is_pending: bool
    """Whether an open transaction may still change these."""

    state: TransactionState | None
    """Of the transactional id; None if it is not known."""

    decision: ControlType | None
    """Of the transaction that crashes are about."""

    epochs: int
    """By how many the epoch was raised since the world was made."""


def look(store: Store, world: World) -> View:
    """Return what the world looks like, in one snapshot."""
    return store.read(partial(_look, world))


def _look(world: World, connection: Connection) -> View:
    row = rows.read_row(connection, world.transactional_id).row
    decided = (
        connection.execute(_DECISION.where(transaction_log.c.transactional_id == world.transactional_id))
        .scalars()
        .all()[world.decisions :]
    )
    group = read_offsets(connection, world.group_id, world.partition_ids)
    found = [group.offsets.get(number) for number in world.partition_ids]
    return View(
        committed=_values(connection, world, IsolationLevel.READ_COMMITTED),
        everything=_values(connection, world, IsolationLevel.READ_UNCOMMITTED),
        offsets=tuple(None if offset is None else offset.offset for offset in found),
        is_pending=bool(group.unstable),
        state=None if row is None else row.state,
        decision=None if not decided else _DECIDED_AS[TransactionState(decided[0])],
        epochs=0 if row is None else row.producer_epoch - world.producer.epoch,
    )


_DECIDED_AS: Final = {
    TransactionState.PREPARE_COMMIT: ControlType.COMMIT,
    TransactionState.COMPLETE_COMMIT: ControlType.COMMIT,
    TransactionState.PREPARE_ABORT: ControlType.ABORT,
    TransactionState.COMPLETE_ABORT: ControlType.ABORT,
}


def _values(connection: Connection, world: World, isolation: IsolationLevel) -> tuple[tuple[bytes, ...], ...]:
    bounds = read_bounds(connection, world.partition_ids)
    starts = {partition_id: bounds[partition_id].log_start_offset for partition_id in world.partition_ids}
    pages = fetch(connection, starts, isolation=isolation)
    return tuple(
        tuple(record.value or b"" for batch in pages[number].batches for record in batch.records())
        for number in world.partition_ids
    )


def state_of(store: Store, world: World) -> Hashable:
    """Return all that the tables hold of the world, but for what makes it another one: ids, and times.

    Two worlds of one state are the same to everybody who comes after a crash.
    """
    return store.read(partial(_state_of, world))


def _state_of(world: World, connection: Connection) -> Hashable:
    first, second = world.partition_ids
    whose = {"first": first, "second": second, "transactional_id": world.transactional_id}
    found = _OF_WORLD[connection.dialect.name].rows(connection, whose)
    partitions = {number: index for index, number in enumerate(world.partition_ids)}
    producer_ids = {number for row in found for number in row[_PRODUCERS]} - {None, NO_PRODUCER_ID}
    producers = {number: index for index, number in enumerate(sorted(producer_ids))}
    return tuple(
        sorted(
            repr(
                (
                    row.of_table,
                    partitions.get(row.partition_id, row.partition_id),
                    [producers.get(number, number) for number in row[_PRODUCERS]],
                    _sent(row.sent_offsets, partitions),
                    row.others,
                )
            )
            for row in found
        )
    )


def _sent(text: str | None, indices: Mapping[int, int]) -> list[Any] | None:
    """Return offsets as the journal keeps them, without their groups' own names."""
    if text is None:
        return None
    groups: list[list[list[int]]] = list(json.loads(text).values())
    return sorted([[indices.get(number, number), *rest] for number, *rest in sent] for sent in groups)


_PRODUCER_IDS: Final = ("producer_id", "previous_producer_id", "next_producer_id", "writer_producer_id")
#: What makes a world another one, and each row has its own column for.
_OWN: Final[Mapping[str, Any]] = {
    "partition_id": BigInteger,
    **dict.fromkeys(_PRODUCER_IDS, BigInteger),
    "sent_offsets": Text,
}
#: Where producers are in a row, behind the table and the partition.
_PRODUCERS: Final = slice(2, 2 + len(_PRODUCER_IDS))
_OWN_NAMES: Final = frozenset({"transactional_id", "group_id", "sink_id"})
#: What follows from the clock, from the other columns, or from how many worlds there were before.
_LEFT_OUT: Final = frozenset({"entry_id", "commit_number", "crc"})
_TABLES_OF_WORLD: Final = (
    partition_heads,
    record_batches,
    producer_states,
    finished_transactions,
    partition_storage,
    transactions,
    transaction_log,
    transaction_partitions,
    transaction_groups,
    transaction_writers,
    transaction_writer_partitions,
    pending_markers,
    group_offsets,
    pending_group_offsets,
    sink_runs,
    sink_batches,
    sink_inputs,
    sink_positions,
)


def _of_world(table: Table, in_words: Callable[[Sequence[ColumnElement[Any]]], ColumnElement[str]]) -> Select[Any]:
    columns = {
        column.name: column
        for column in table.c
        if column.name not in _LEFT_OUT | _OWN_NAMES and not column.name.endswith("_ms") and column.computed is None
    }
    found = select(
        literal_column(f"'{table.name}'").label("of_table"),
        *(columns.pop(name, cast(null(), kind)).label(name) for name, kind in _OWN.items()),
        in_words(list(columns.values())).label("others"),
    )
    if "partition_id" in table.c:
        return found.where(table.c.partition_id.in_([bindparam("first"), bindparam("second")]))
    return found.where(table.c.transactional_id == bindparam("transactional_id"))


def _quoted(columns: Sequence[ColumnElement[Any]]) -> ColumnElement[str]:
    quoted = (func.quote(column, type_=Text) for column in columns)
    return reduce(lambda left, right: left + "," + right, quoted, cast("", Text))


def _in_a_row(columns: Sequence[ColumnElement[Any]]) -> ColumnElement[str]:
    return cast(func.row(*columns), Text)


#: All of it in one statement, by the kind of the database.
_OF_WORLD: Final = {
    kind: HotStatement(union_all(*(_of_world(table, in_words) for table in _TABLES_OF_WORLD)))
    for kind, in_words in (("sqlite", _quoted), ("postgresql", _in_a_row))
}


def written(*flushes: str) -> tuple[tuple[bytes, ...], ...]:
    """Return what the partitions hold once these flushes count, in this order."""
    return (tuple(value for flush in flushes for value in values_of(flush)),) * PARTITIONS


@dataclass
class Progress:
    """How far the code had come at each crash: how many of its database transactions that write were committed."""

    commits: int = 0
    steps: int = 0
    #: How often it crashed just before a COMMIT of a database transaction that writes.
    _before_commits: int = 0
    _last: CrashPoint | None = None
    _writes: bool = False
    #: Whether a whole transaction was committed by one statement.
    _is_at_once: bool = False

    def pass_(self, crash: CrashPoint) -> None:
        """Take the next crash, in order."""
        self.steps += 1
        if crash.statement.startswith("BEGIN"):
            self._writes = "IMMEDIATE" in crash.statement or "READ COMMITTED" in crash.statement
        if is_commit(crash.statement) and (self._writes or crash.statement != "COMMIT") and crash.when is When.AFTER:
            self._is_at_once |= crash.statement != "COMMIT"
            self.commits += 1
            last = self._last
            self._before_commits += last is not None and (last.step, last.when) in (
                (crash.step, When.BEFORE),
                (crash.step - 1, When.AFTER),
            )
        self._last = crash

    def assert_complete(self, *, steps_min: int, commits: int | None = None) -> None:
        """Return if the code was crashed at many steps, and on both sides of each COMMIT."""
        assert self.steps >= (1 if self._is_at_once else steps_min), f"only {self.steps} crashes"
        assert self._before_commits == self.commits
        assert self.commits >= 1
        if commits is not None:
            assert self.commits == commits

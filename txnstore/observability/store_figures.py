"""The figures of a store: how far partitions and groups are, who holds readers back, what waits, and what it takes.

Of each database they are of one snapshot.  No statement touches more for a longer log: partitions, open transactions
and positions of groups are found by their keys and partial indexes, and everything is read up to a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sqlalchemy import BindParameter, Connection, Select, bindparam, func, select

from txnstore.db.cluster.cluster import Cluster
from txnstore.db.cluster.membership import coordinator_of_producer
from txnstore.db.schema import (
    group_members,
    group_offsets,
    outbox,
    outbox_sequencers,
    partition_heads,
    producer_states,
    transaction_writers,
    transactions,
)
from txnstore.db.store import Store, chunks, server_now_ms
from txnstore.errors import TxnStoreError
from txnstore.groups.unread import CountedLag, bound_lag, count_lag
from txnstore.log.bounds import Bounds, read_bounds
from txnstore.log.topics import names_of_partitions
from txnstore.maintenance.duties import DUTIES
from txnstore.maintenance.leases import overdue_ms
from txnstore.model import INTERNAL_GROUP_PREFIX, PartitionName
from txnstore.transactions.protocol import DECIDED, TransactionState


@dataclass(frozen=True, slots=True)
class FigureLimits:
    """How much is read at most of one database."""

    partitions: int = 1_000
    """Partitions; those that an open transaction holds back come on top, as many again at most."""

    group_partitions: int = 1_000
    """Positions of groups."""

    lag_batches: int = 2_000
    """Batches, over all groups, in which unread records are counted; after those, offsets stand in for them."""

    counted_rows: int = 100_000
    """Rows, where rows are counted."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The oldest open transaction of a partition, which holds back its last stable offset."""

    producer_id: int
    transactional_id: str | None
    """None: its coordinator does not know it, or could not be asked."""

    age_ms: int
    """How long the transaction has been open; of an unknown one, since its producer has written here."""


@dataclass(frozen=True, slots=True)
class PartitionFigures:
    """A partition and what holds back its readers."""

    name: PartitionName
    bounds: Bounds
    holder: Holder | None


@dataclass(frozen=True, slots=True)
class GroupPosition:
    """How far a group is in a partition."""

    group_id: str
    partition_id: int
    offset: int
    is_place: bool = False
    """Whether the group reads in commit order."""


@dataclass(frozen=True, slots=True)
class GroupLag:
    """What a group has yet to read of a partition."""

    group_id: str
    partition: PartitionName
    offsets: int
    """Offsets up to the last stable one; in commit order places up to the high watermark."""

    counted: CountedLag


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """What one database says of itself in one snapshot."""

    partitions: Sequence[PartitionFigures] = ()
    partition_count: int = 0
    positions: Sequence[GroupPosition] = ()
    """Of the groups that it coordinates."""

    has_more_positions: bool = False
    lags: Sequence[GroupLag] = ()
    """In the partitions that it leads."""

    members: Mapping[str, int] = field(default_factory=dict)
    """Of the groups that it coordinates: how many members they have."""

    open_transactions: int = 0
    decided_transactions: int = 0
    oldest_open_age_ms: int = 0
    oldest_decided_age_ms: int = 0
    outbox_waiting: int = 0
    outbox_refused: int = 0
    outbox_sequenced: int = 0
    overdue_ms: Sequence[int] = ()
    """For how long each duty of the maintenance has been due that waits for somebody, the longest first."""

    sizes_bytes: Mapping[str, int] = field(default_factory=dict)


def _counted(statement: Select[Any]) -> Select[Any]:
    """Return a statement that counts the rows of another one, up to a limit."""
    return select(func.count()).select_from(statement.limit(bindparam("rows_max")).subquery())


_PARTITION_IDS: Final = (
    select(partition_heads.c.partition_id).order_by(partition_heads.c.partition_id).limit(bindparam("rows_max"))
)
_COUNT_PARTITIONS: Final = _counted(select(partition_heads.c.partition_id))
# The partial index on open transactions holds nothing else; SQLite takes it for a comparison.
_HELD: Final = (
    select(producer_states.c.partition_id, func.min(producer_states.c.transaction_first_offset).label("first_offset"))
    .where(producer_states.c.transaction_first_offset >= 0)
    .group_by(producer_states.c.partition_id)
    .order_by(producer_states.c.partition_id)
    .limit(bindparam("rows_max"))
)
_OLDEST: Final = _HELD.subquery()
_HOLDERS: Final = (
    select(
        producer_states.c.partition_id,
        producer_states.c.producer_id,
        (server_now_ms() - producer_states.c.last_timestamp_ms).label("silent_ms"),
    )
    .join(
        _OLDEST,
        (producer_states.c.partition_id == _OLDEST.c.partition_id)
        & (producer_states.c.transaction_first_offset == _OLDEST.c.first_offset),
    )
    # So the partial index serves here, too: the key would lead to all producers of a partition.
    .where(producer_states.c.transaction_first_offset >= 0)
)
_RUNNING: Final = sorted(int(state) for state in (*DECIDED, TransactionState.ONGOING))
_NAMES: Final = select(
    transactions.c.producer_id,
    transactions.c.transactional_id,
    (server_now_ms() - transactions.c.start_ms).label("age_ms"),
).where(transactions.c.producer_id.in_(bindparam("producer_ids", expanding=True)), transactions.c.state.in_(_RUNNING))
_NAMES_OF_WRITERS: Final = (
    select(
        transaction_writers.c.writer_producer_id,
        transactions.c.transactional_id,
        (server_now_ms() - transactions.c.start_ms).label("age_ms"),
    )
    .join(transactions, transactions.c.transactional_id == transaction_writers.c.transactional_id)
    .where(transaction_writers.c.writer_producer_id.in_(bindparam("producer_ids", expanding=True)))
    .where(transactions.c.state.in_(_RUNNING))
)
# Each open transaction has a deadline but those of two-phase commit; of these the ones count that hold somebody back.
_OPEN: Final = select(transactions.c.start_ms).where(transactions.c.deadline_ms >= 0).limit(bindparam("rows_max"))
# As literals: PostgreSQL is to see that the partial index on these states has them.
_DECIDED_STATES: Final[BindParameter[Any]] = bindparam(
    "states", sorted(int(state) for state in DECIDED), expanding=True, literal_execute=True
)
_DECIDED: Final = (
    select(transactions.c.start_ms).where(transactions.c.state.in_(_DECIDED_STATES)).limit(bindparam("rows_max"))
)
_WAITING: Final = _counted(select(outbox.c.outbox_id).where(outbox.c.refusal.is_(None)).order_by(outbox.c.outbox_id))
_REFUSED: Final = _counted(select(outbox.c.outbox_id).where(outbox.c.refusal.is_not(None)).order_by(outbox.c.outbox_id))
_SEQUENCED: Final = select(outbox_sequencers.c.sequenced_count)
# Only those that any client does: the others are for who is told to do them.
_INTERVALS: Final = {duty.name: duty.interval_setting for duty in DUTIES}
_POSITIONS: Final = (
    select(
        group_offsets.c.group_id,
        group_offsets.c.partition_id,
        group_offsets.c.committed_offset,
        group_offsets.c.offset_in_transaction.is_not(None),
    )
    .where(func.substr(group_offsets.c.group_id, 1, len(INTERNAL_GROUP_PREFIX)) != INTERNAL_GROUP_PREFIX)
    .order_by(group_offsets.c.group_id, group_offsets.c.partition_id)
    .limit(bindparam("rows_max"))
)
_MEMBERS: Final = (
    select(group_members.c.group_id, func.count())
    .where(group_members.c.group_id.in_(bindparam("group_ids", expanding=True)))
    .group_by(group_members.c.group_id)
)


def read_cluster_figures(cluster: Cluster, limits: FigureLimits) -> dict[int, StoreFigures | TxnStoreError]:
    """Return the figures of each database by its number, or why they cannot be had."""
    if cluster.is_alone:
        return _of_each(cluster, [cluster.controller.database_id], lambda store: _read_alone(store, limits))
    numbers = [member.database_id for member in cluster.databases]
    found = _of_each(cluster, numbers, lambda store: _read_positions(store, limits))
    positions = [one for figures in found.values() if isinstance(figures, StoreFigures) for one in figures.positions]
    # After the positions: a group that goes on meanwhile is not ahead of the log.
    reached = [number for number, figures in found.items() if isinstance(figures, StoreFigures)]
    found |= _of_each(cluster, reached, lambda store: _read_others(store, limits, found[store.database_id], positions))
    return _with_names_from_elsewhere(cluster, found)


def _of_each(
    cluster: Cluster, numbers: Iterable[int], read: Callable[[Store], StoreFigures]
) -> dict[int, StoreFigures | TxnStoreError]:
    found: dict[int, StoreFigures | TxnStoreError] = {}
    for database_id in numbers:
        try:
            found[database_id] = read(cluster.own(database_id))
        except TxnStoreError as error:
            found[database_id] = error
    return found


def _read_alone(store: Store, limits: FigureLimits) -> StoreFigures:
    def read(connection: Connection) -> StoreFigures:
        figures = _positions(connection, limits)
        return _others(store, connection, limits, figures, figures.positions)

    return store.read(read)


def _read_positions(store: Store, limits: FigureLimits) -> StoreFigures:
    return store.read(lambda connection: _positions(connection, limits))


def _read_others(store: Store, limits: FigureLimits, known: object, positions: Sequence[GroupPosition]) -> StoreFigures:
    assert isinstance(known, StoreFigures)
    return store.read(lambda connection: _others(store, connection, limits, known, positions))


def _positions(connection: Connection, limits: FigureLimits) -> StoreFigures:
    rows = connection.execute(_POSITIONS, {"rows_max": limits.group_partitions + 1}).all()
    positions = [GroupPosition(*row) for row in rows[: limits.group_partitions]]
    group_ids = sorted({position.group_id for position in positions})
    members = dict.fromkeys(group_ids, 0)
    for ids in chunks(group_ids):
        members |= {row[0]: row[1] for row in connection.execute(_MEMBERS, {"group_ids": list(ids)})}
    return StoreFigures(positions=positions, has_more_positions=len(rows) > limits.group_partitions, members=members)


def _others(
    store: Store, connection: Connection, limits: FigureLimits, known: StoreFigures, positions: Sequence[GroupPosition]
) -> StoreFigures:
    """Return all figures; of `positions` those are counted whose partitions are here."""
    rows_max = {"rows_max": limits.counted_rows}
    ids = list(connection.execute(_PARTITION_IDS, {"rows_max": limits.partitions}).scalars())
    holders = _holders(connection, limits)
    led = _led(connection, {*ids, *holders, *(position.partition_id for position in positions)})
    bounds = read_bounds(connection, sorted(led)) if led else {}
    names = names_of_partitions(connection, bounds)
    shown = [number for number in sorted({*ids, *holders}) if number in names]
    open_starts = connection.execute(_OPEN, rows_max).scalars().all()
    decided_starts = connection.execute(_DECIDED, rows_max).scalars().all()
    now_ms = connection.execute(select(server_now_ms())).scalar_one()
    return replace(
        known,
        partitions=[PartitionFigures(names[number], bounds[number], holders.get(number)) for number in shown],
        partition_count=_count(connection, _COUNT_PARTITIONS, limits),
        lags=_lags(connection, limits, [one for one in positions if one.partition_id in names], bounds, names),
        open_transactions=len(open_starts),
        decided_transactions=len(decided_starts),
        oldest_open_age_ms=max(
            [now_ms - start_ms for start_ms in open_starts] + [holder.age_ms for holder in holders.values()],
            default=0,
        ),
        oldest_decided_age_ms=max([now_ms - start_ms for start_ms in decided_starts], default=0),
        outbox_waiting=_count(connection, _WAITING, limits),
        outbox_refused=_count(connection, _REFUSED, limits),
        outbox_sequenced=int(connection.execute(_SEQUENCED).scalar() or 0),
        overdue_ms=overdue_ms(connection, _INTERVALS),
        sizes_bytes=store.backend.storage_sizes(connection, store.schema),
    )


def _count(connection: Connection, statement: Select[Any], limits: FigureLimits) -> int:
    return int(connection.execute(statement, {"rows_max": limits.counted_rows}).scalar_one())


_LED: Final = select(partition_heads.c.partition_id).where(
    partition_heads.c.partition_id.in_(bindparam("partition_ids", expanding=True))
)


def _led(connection: Connection, partition_ids: Iterable[int]) -> set[int]:
    """Return those of the partitions that live here."""
    led: set[int] = set()
    for some in chunks(sorted(partition_ids)):
        led.update(connection.execute(_LED, {"partition_ids": list(some)}).scalars())
    return led


def _holders(connection: Connection, limits: FigureLimits) -> dict[int, Holder]:
    """Return the oldest open transaction of each partition that has one."""
    rows = connection.execute(_HOLDERS, {"rows_max": limits.partitions}).all()
    names = _names(connection, {row.producer_id for row in rows})
    holders = {}
    for row in rows:
        transactional_id, age_ms = names.get(row.producer_id, (None, row.silent_ms))
        holders[row.partition_id] = Holder(row.producer_id, transactional_id, max(0, age_ms))
    return holders


def _names(connection: Connection, producer_ids: Iterable[int]) -> dict[int, tuple[str, int]]:
    """Return transactional id and age of what these producers have open, as far as it is coordinated here."""
    names: dict[int, tuple[str, int]] = {}
    for some in chunks(sorted(producer_ids)):
        for statement in (_NAMES_OF_WRITERS, _NAMES):
            for producer_id, name, age_ms in connection.execute(statement, {"producer_ids": list(some)}):
                names[producer_id] = name, age_ms
    return names


def _lags(
    connection: Connection,
    limits: FigureLimits,
    positions: Iterable[GroupPosition],
    bounds: Mapping[int, Bounds],
    names: Mapping[int, PartitionName],
) -> list[GroupLag]:
    """Return the lags; those that are least far behind are counted first, so that as many as can be are exact."""
    batches_left = limits.lag_batches
    behind = sorted(
        (max(0, _end(one, bounds) - _start(one, bounds)), one.group_id, one.partition_id, one) for one in positions
    )
    lags = []
    for offsets, group_id, partition_id, position in behind:
        if position.is_place:
            counted = bound_lag(connection, bounds[partition_id], position.offset, markers_max=batches_left)
        else:
            counted = count_lag(connection, bounds[partition_id], position.offset, batches_max=batches_left)
        batches_left -= counted.batches
        lags.append(GroupLag(group_id, names[partition_id], offsets, counted))
    return lags


def _end(position: GroupPosition, bounds: Mapping[int, Bounds]) -> int:
    of_partition = bounds[position.partition_id]
    return of_partition.high_watermark if position.is_place else of_partition.last_stable_offset


def _start(position: GroupPosition, bounds: Mapping[int, Bounds]) -> int:
    return max(position.offset, bounds[position.partition_id].log_start_offset)


def _with_names_from_elsewhere(
    cluster: Cluster, found: dict[int, StoreFigures | TxnStoreError]
) -> dict[int, StoreFigures | TxnStoreError]:
    """Return the figures with the names of holders that other databases coordinate."""
    unknown: dict[int, set[int]] = {}
    for figures in found.values():
        for partition in figures.partitions if isinstance(figures, StoreFigures) else ():
            if partition.holder is not None and partition.holder.transactional_id is None:
                producer_id = partition.holder.producer_id
                unknown.setdefault(coordinator_of_producer(producer_id), set()).add(producer_id)
    names: dict[int, tuple[str, int]] = {}
    for database_id, producer_ids in unknown.items():
        if isinstance(found.get(database_id), StoreFigures):
            _ask(cluster, database_id, producer_ids, names)
    return {number: _named(one, names) if isinstance(one, StoreFigures) else one for number, one in found.items()}


def _ask(cluster: Cluster, database_id: int, producer_ids: set[int], names: dict[int, tuple[str, int]]) -> None:
    try:
        names |= cluster.own(database_id).read(lambda connection: _names(connection, producer_ids))
    except TxnStoreError:
        # It has answered a moment ago; until the next time the holders go without their names.
        return


def _named(figures: StoreFigures, names: Mapping[int, tuple[str, int]]) -> StoreFigures:
    partitions = [
        replace(one, holder=Holder(one.holder.producer_id, *names[one.holder.producer_id]))
        if one.holder is not None and one.holder.producer_id in names
        else one
        for one in figures.partitions
    ]
    oldest_ms = max([one.holder.age_ms for one in partitions if one.holder is not None], default=0)
    return replace(figures, partitions=partitions, oldest_open_age_ms=max(figures.oldest_open_age_ms, oldest_ms))

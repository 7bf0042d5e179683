"""Open transactions, which hold readers back: in which partition, who writes them, and what ends them.

The rows are those of the view `open_transactions`, read in pages, so that memory is bounded however many there are;
where another database of the cluster coordinates a transaction, that one is asked for the rest.  Nothing is locked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Row, bindparam, select, tuple_, union_all

from txnstore.db.cluster.cluster import Cluster, LeftOut
from txnstore.db.open_transactions_view import is_plain_name, open_transactions, pending_offsets
from txnstore.db.schema import (
    producer_states,
    transaction_branches,
    transaction_groups,
    transaction_partitions,
    transaction_writer_partitions,
    transaction_writers,
    transactions,
)
from txnstore.db.store import Store, pages, server_now_ms
from txnstore.log.topics import names_of_partitions
from txnstore.model import OFFSET_MAX, ClientProcess, PartitionName
from txnstore.transactions.listing import COORDINATOR, PAGE_ROWS, RUNNING
from txnstore.transactions.protocol import DECIDED, TIMEOUT_NEVER_MS, TransactionState
from txnstore.transactions.rows import CLIENT_COLUMNS, client_from_row

_STATES: Final = sorted(int(state) for state in RUNNING)
_AFTER: Final = tuple_(bindparam("after_partition_id"), bindparam("after_offset"))
_ORDER: Final = (open_transactions.c.partition_id, open_transactions.c.first_offset)
# Without an end PostgreSQL would work out every row behind, to sort them and take a page of them.
_NEXT: Final = (
    select(open_transactions, server_now_ms().label("now_ms"))
    .where(tuple_(*_ORDER) > _AFTER)
    .where(tuple_(*_ORDER) <= tuple_(bindparam("through_partition_id"), bindparam("through_offset")))
    .order_by(*_ORDER)
)
_OPENED: Final = (producer_states.c.partition_id, producer_states.c.transaction_first_offset)
_END: Final = (
    select(*_OPENED)
    .where(producer_states.c.transaction_first_offset >= 0, tuple_(*_OPENED) > _AFTER)
    .order_by(*_OPENED)
    .offset(PAGE_ROWS - 1)
    .limit(1)
)
_HELD_ORDER: Final = (pending_offsets.c.group_id, pending_offsets.c.partition_id, pending_offsets.c.producer_id)
_NEXT_HELD: Final = (
    select(pending_offsets, server_now_ms().label("now_ms"))
    .where(
        tuple_(*_HELD_ORDER)
        > tuple_(bindparam("after_group_id"), bindparam("after_partition_id"), bindparam("after_producer_id"))
    )
    .order_by(*_HELD_ORDER)
    .limit(PAGE_ROWS)
)
_FIRST_HELD: Final = {"after_group_id": "", "after_partition_id": -1, "after_producer_id": -1}
_OWNER: Final = (
    transactions.c.transactional_id,
    transactions.c.state,
    transactions.c.timeout_ms,
    transactions.c.start_ms,
)
_OWNERS: Final = union_all(
    select(
        transactions.c.producer_id,
        transaction_partitions.c.partition_id,
        *_OWNER,
        *(transactions.c[name] for name in CLIENT_COLUMNS),
        server_now_ms().label("now_ms"),
    )
    .join(transaction_partitions, transaction_partitions.c.transactional_id == transactions.c.transactional_id)
    .where(transactions.c.state.in_(_STATES))
    .where(transactions.c.producer_id.in_(bindparam("producer_ids", expanding=True))),
    select(
        transaction_writers.c.writer_producer_id,
        transaction_writer_partitions.c.partition_id,
        *_OWNER,
        *(transaction_writers.c[name] for name in CLIENT_COLUMNS),
        server_now_ms(),
    )
    .join(transaction_writers, transaction_writers.c.transactional_id == transactions.c.transactional_id)
    .join(
        transaction_writer_partitions,
        (transaction_writer_partitions.c.transactional_id == transaction_writers.c.transactional_id)
        & (transaction_writer_partitions.c.writer_producer_id == transaction_writers.c.writer_producer_id),
    )
    .where(transactions.c.state.in_(_STATES))
    .where(transaction_writers.c.writer_producer_id.in_(bindparam("producer_ids", expanding=True))),
)
_OWNERS_OF_GROUPS: Final = (
    select(
        transactions.c.producer_id,
        transaction_groups.c.group_id,
        *_OWNER,
        *(transactions.c[name] for name in CLIENT_COLUMNS),
        server_now_ms().label("now_ms"),
    )
    .join(transaction_groups, transaction_groups.c.transactional_id == transactions.c.transactional_id)
    .where(transactions.c.state.in_(_STATES))
    .where(transactions.c.producer_id.in_(bindparam("producer_ids", expanding=True)))
)
_GIDS: Final = (
    select(transaction_branches.c.transactional_id, transaction_branches.c.gid)
    .where(transaction_branches.c.transactional_id.in_(bindparam("transactional_ids", expanding=True)))
    .order_by(transaction_branches.c.gid)
)
#: What a coordinator tells of transactions is in these.
_TABLES: Final = {str(table.name) for table in (*COORDINATOR, transaction_groups)}
#: What a coordinator tells of transactions, by producer, and partition or group.
_Owners = dict[tuple[int, PartitionName | str], dict[str, Any]]
_Ask = Callable[[Connection, list[int]], _Owners]


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that is open in a partition."""

    partition: PartitionName
    first_offset: int
    """Where it begins there."""

    is_oldest: bool
    """Whether the readers of the partition wait for this one: the last stable offset is `first_offset`."""

    producer_id: int
    producer_epoch: int
    """The epoch of its records."""

    coordinator_epoch: int
    """Of the last marker; -1 without one."""

    coordinator_database_id: int
    """The database that coordinates it."""

    last_write_ms: int
    """When its producer last wrote there, by the clock of that database."""

    age_ms: int
    """For how long it has been open; if no coordinator lists it, for how long its producer has been silent."""

    transactional_id: str | None = None
    """None: no coordinator lists it here, as far as one could be asked."""

    state: TransactionState | None = None
    client: ClientProcess | None = None
    """The process that writes here, as it says itself; None: it does not."""

    timeout_ms: int | None = None
    started_ms: int | None = None
    prepared_gids: Sequence[str] = ()
    """What it has prepared in other databases, by the names in their pg_prepared_xacts."""

    backend_pid: int | None = None
    """PostgreSQL's session that works on it now, if this database coordinates it."""

    coordinator_is_away: bool = False
    """Whether its coordinator could not be asked, or may know it: a standby, or one that does not show all to us."""

    @property
    def is_hanging(self) -> bool:
        """Whether nobody will ever end it but an administrator."""
        return self.transactional_id is None and not self.coordinator_is_away

    @property
    def freed_by(self) -> str | None:
        """The command that ends it, with `--url` or TXNSTORE_URL for the database; None: its program completes it."""
        where = f"--topic {self.partition.topic} --partition {self.partition.partition}"
        return _freed_by(self, f"{where} --start-offset {self.first_offset}")


def each_open(
    cluster: Cluster,
    left_out: LeftOut,
    partition_ids: Collection[int] | None = None,
    *,
    retry_timeout_ms: int | None = None,
) -> Iterator[OpenTransaction]:
    """Yield what is open in these partitions, or in all, by partition and offset; each page is a snapshot of its own.

    Of a database that is left out nothing is said.
    """
    if cluster.is_alone:
        yield from each_open_in(cluster.controller, partition_ids, retry_timeout_ms=retry_timeout_ms)
        return
    for store in cluster.stores(left_out):
        with cluster.leaving_out(store.database_id, left_out):
            for page in _pages(store, partition_ids, retry_timeout_ms):
                yield from _with_owners(cluster, left_out, store, page, _owners, retry_timeout_ms=retry_timeout_ms)


def each_open_in(
    store: Store, partition_ids: Collection[int] | None = None, *, retry_timeout_ms: int | None = None
) -> Iterator[OpenTransaction]:
    """Yield the same as one database knows it."""
    for page in _pages(store, partition_ids, retry_timeout_ms):
        yield from page


@dataclass(frozen=True, slots=True)
class HeldOffsets:
    """What an open transaction holds of a group's offsets in a partition: consumers that ask wait for its end."""

    group_id: str
    partition: PartitionName
    pending_offset: int
    producer_id: int
    producer_epoch: int
    coordinator_database_id: int
    sent_ms: int
    """When the offset was sent, by the clock of the group's database."""

    age_ms: int
    """For how long the transaction has been open; if no coordinator lists it, since it sent the offset."""

    transactional_id: str | None = None
    """None: no coordinator lists the group, as far as one could be asked."""

    state: TransactionState | None = None
    client: ClientProcess | None = None
    """The process of the producer, as it says itself; None: it does not."""

    timeout_ms: int | None = None
    started_ms: int | None = None
    is_elsewhere: bool = False
    """Whether another database than the group's coordinates it."""

    coordinator_is_away: bool = False
    """Whether its coordinator could not be asked, or may know it: a standby, or one that does not show all to us."""

    @property
    def is_hanging(self) -> bool:
        """Whether nobody will ever end it but an administrator: what coordinated it has lost it."""
        return self.transactional_id is None and self.is_elsewhere and not self.coordinator_is_away

    @property
    def freed_by(self) -> str | None:
        """The command that ends it, with `--url` or TXNSTORE_URL for the database; None: its program completes it."""
        return _freed_by(self, f"--producer-id {self.producer_id}")


_One = TypeVar("_One", OpenTransaction, HeldOffsets)


def each_held(
    cluster: Cluster,
    left_out: LeftOut,
    partition_ids: Collection[int] | None = None,
    *,
    retry_timeout_ms: int | None = None,
) -> Iterator[HeldOffsets]:
    """Yield what transactions hold of groups' offsets, by group and partition; each page is a snapshot of its own.

    Of a database that is left out nothing is said.
    """
    wanted = None if partition_ids is None else set(partition_ids)
    for store in cluster.stores(left_out):
        with cluster.leaving_out(store.database_id, left_out):
            read = partial(store.read, retry_timeout_ms=retry_timeout_ms)
            for found in pages(read, _NEXT_HELD, _FIRST_HELD, PAGE_ROWS):
                page = [
                    _held_from_view(row, store.database_id)
                    for row in found
                    if wanted is None or row.partition_id in wanted
                ]
                yield from _with_owners(
                    cluster, left_out, store, page, _owners_of_groups, retry_timeout_ms=retry_timeout_ms
                )


def _held_from_view(row: Row[Any], database_id: int) -> HeldOffsets:
    return HeldOffsets(
        **_both_have(row, row.sent_ms),
        group_id=row.group_id,
        pending_offset=row.pending_offset,
        sent_ms=row.sent_ms,
        is_elsewhere=row.coordinator_database_id != database_id,
    )


def _pages(
    store: Store, partition_ids: Collection[int] | None, retry_timeout_ms: int | None
) -> Iterator[list[OpenTransaction]]:
    if partition_ids is None:
        yield from _pages_between(store, (-1, -1), (OFFSET_MAX, OFFSET_MAX), retry_timeout_ms)
        return
    for partition_id in sorted(partition_ids):
        yield from _pages_between(store, (partition_id, -1), (partition_id, OFFSET_MAX), retry_timeout_ms)


def _pages_between(
    store: Store, after: tuple[int, int], last: tuple[int, int], retry_timeout_ms: int | None
) -> Iterator[list[OpenTransaction]]:
    """Yield what begins behind a partition and offset, and up to others."""
    while after < last:
        page, after = store.read(partial(_page, after, last), retry_timeout_ms=retry_timeout_ms)
        if page:
            yield page


def _page(
    after: tuple[int, int], last: tuple[int, int], connection: Connection
) -> tuple[list[OpenTransaction], tuple[int, int]]:
    """Return the next page, and through where it goes."""
    range_ = {"after_partition_id": after[0], "after_offset": after[1]}
    end = connection.execute(_END, range_).one_or_none()
    through = last if end is None else min(last, (end.partition_id, end.transaction_first_offset))
    found = connection.execute(_NEXT, {**range_, "through_partition_id": through[0], "through_offset": through[1]})
    return [_from_view(row) for row in found], through


def _from_view(row: Row[Any]) -> OpenTransaction:
    return OpenTransaction(
        **_both_have(row, row.last_write_ms),
        first_offset=row.first_offset,
        is_oldest=bool(row.is_oldest),
        coordinator_epoch=row.coordinator_epoch,
        last_write_ms=row.last_write_ms,
        prepared_gids=tuple(row.prepared_gids.split(", ")) if row.prepared_gids else (),
        backend_pid=row.backend_pid,
    )


_STATE_OF: Final = {state.kafka_name: state for state in RUNNING}


def _both_have(row: Row[Any], silent_since_ms: int) -> dict[str, Any]:
    """Return what the rows of both views tell."""
    return {
        "partition": PartitionName(row.topic, row.partition),
        "producer_id": row.producer_id,
        "producer_epoch": row.producer_epoch,
        "coordinator_database_id": row.coordinator_database_id,
        # Not the view's own: the store may have another clock.
        "age_ms": row.now_ms - (silent_since_ms if row.started_ms is None else row.started_ms),
        "transactional_id": row.transactional_id,
        "state": None if row.state is None else _STATE_OF[row.state],
        "client": client_from_row(row),
        "timeout_ms": row.timeout_ms,
        "started_ms": row.started_ms,
    }


def _freed_by(one: OpenTransaction | HeldOffsets, otherwise: str) -> str | None:
    if one.state in DECIDED:
        return "txnstore maintain --once"
    if one.timeout_ms == TIMEOUT_NEVER_MS:
        # The application's database may have committed it already.
        return None
    if one.transactional_id is not None and is_plain_name(one.transactional_id):
        return f"txnstore transactions abort {one.transactional_id}"
    return f"txnstore transactions abort {otherwise}"


def _with_owners(
    cluster: Cluster, left_out: LeftOut, store: Store, page: Sequence[_One], ask: _Ask, *, retry_timeout_ms: int | None
) -> Iterator[_One]:
    """Yield the page with what the coordinators know that live in other databases."""
    elsewhere: dict[int, set[int]] = defaultdict(set)
    for one in page:
        if one.transactional_id is None and one.coordinator_database_id != store.database_id:
            elsewhere[one.coordinator_database_id].add(one.producer_id)
    known: _Owners = {}
    away = set(elsewhere)
    for database_id in elsewhere.keys() - left_out.keys():
        with cluster.leaving_out(database_id, left_out):
            coordinator = cluster.own(database_id)
            work = partial(_told, coordinator, ask, sorted(elsewhere[database_id]))
            found, tells_all = coordinator.read(work, retry_timeout_ms=retry_timeout_ms)
            known |= found
            if tells_all:
                away.remove(database_id)
    for one in page:
        of_owner = known.get((one.producer_id, one.group_id if isinstance(one, HeldOffsets) else one.partition))
        if of_owner is None:
            is_away = one.transactional_id is None and one.coordinator_database_id in away
            of_owner = {"coordinator_is_away": is_away}
        yield replace(one, **of_owner)


def _told(coordinator: Store, ask: _Ask, producer_ids: list[int], connection: Connection) -> tuple[_Owners, bool]:
    """Return what the coordinator tells of transactions, and whether there can be none that it does not tell of."""
    found, backend = ask(connection, producer_ids), coordinator.backend
    hides = backend.is_standby(connection) or backend.narrowed_tables(connection, coordinator.schema, _TABLES)
    return found, not hides


def _owners(connection: Connection, producer_ids: list[int]) -> _Owners:
    """Return what the coordinator knows of transactions, by producer and partition."""
    found = connection.execute(_OWNERS, {"producer_ids": producer_ids}).all()
    names = names_of_partitions(connection, {row.partition_id for row in found})
    gids: dict[str, list[str]] = defaultdict(list)
    transactional_ids = sorted({row.transactional_id for row in found})
    for row in connection.execute(_GIDS, {"transactional_ids": transactional_ids}):
        gids[row.transactional_id].append(row.gid)
    return {
        (row.producer_id, names[row.partition_id]): _owner(row) | {"prepared_gids": tuple(gids[row.transactional_id])}
        for row in found
        if row.partition_id in names
    }


def _owners_of_groups(connection: Connection, producer_ids: list[int]) -> _Owners:
    """Return the same by producer and group."""
    found = connection.execute(_OWNERS_OF_GROUPS, {"producer_ids": producer_ids})
    return {(row.producer_id, row.group_id): _owner(row) for row in found}


def _owner(row: Any) -> dict[str, Any]:
    return {
        "transactional_id": row.transactional_id,
        "state": TransactionState(row.state),
        "client": client_from_row(row),
        "timeout_ms": row.timeout_ms,
        "started_ms": row.start_ms,
        "age_ms": row.now_ms - row.start_ms,
    }

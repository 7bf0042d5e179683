"""The rows of a partition: its head, whose lock puts appends in order, and the producers that it knows.

All that was committed in a database has one strict order, transactions and what is in none: that of the numbers of
the commits.  A commit draws a number once it has locked the heads of all the partitions that were written to, and
holds the locks until it is done.  So the numbers grow along each partition, and what was committed before, or
what somebody has read, has a lower one than whatever is asked to commit after that.  Transactions that another
database has decided and that are delivered together have one each.

They are those of the journal: the entry of a commit has its number for key, if it is in the same database.  PostgreSQL
draws from the sequence behind the key, where nobody waits for anybody; SQLite from where it counts the keys, a page
that every transaction writes anyway.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Final, cast

from sqlalchemy import (
    BigInteger,
    Connection,
    bindparam,
    case,
    column,
    delete,
    exists,
    func,
    insert,
    literal_column,
    select,
    table,
    union_all,
    update,
)
from sqlalchemy import Sequence as NumberSequence
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import next_value

from txnstore.db.cluster.membership import CONTROLLER_ID, PRODUCER_ID_BITS
from txnstore.db.ddl import Int32
from txnstore.db.names import CODE_SCHEMA, SQLITE_PREFIX
from txnstore.db.portions import Portions
from txnstore.db.postgresql.commit_function import JOURNAL_NUMBERS
from txnstore.db.schema import (
    MINUTE_MS,
    databases,
    partition_heads,
    producer_states,
    record_batches,
    stores,
    transaction_log,
)
from txnstore.db.statements import HotStatement, are_among, is_listed
from txnstore.db.store import (
    LISTED_MAX,
    Store,
    chunks,
    must_hit_each,
    note_change,
    server_now_ms,
)
from txnstore.errors import CorruptBatch, UnknownTopicOrPartition
from txnstore.log.sequences import MarkedProducer, ProducerInPartition, RecentBatch
from txnstore.model import NO_PRODUCER_ID, OFFSET_MAX, ProducerIdentity

#: A producer in a partition: partition id, producer id.
ProducerKey = tuple[int, int]
#: By partition id, how many of what is open there are wanted: none.
NOTHING_OPEN: Final[Mapping[int, int]] = MappingProxyType({})
_FIELDS_OF_BATCH: Final = 5
# This lock puts appends in order: an offset is committed before the next writer is given one, so no reader passes a gap
# that is filled later. In the order of ids, so nobody waits in a circle. (SQLite: the whole transaction has the lock.)
_HEADS: Final = select(
    partition_heads.c.partition_id,
    partition_heads.c.log_start_offset,
    partition_heads.c.next_offset,
    partition_heads.c.running_max_timestamp_ms,
    partition_heads.c.segment,
    server_now_ms().label("now_ms"),
).with_for_update()
_LOCK_HEADS: Final = HotStatement(
    _HEADS.where(partition_heads.c.partition_id.in_(bindparam("partition_ids", expanding=True))).order_by(
        partition_heads.c.partition_id
    )
)
_LOCK_HEAD: Final = HotStatement(_HEADS.where(partition_heads.c.partition_id == bindparam("of_partition_id")))
_MOVE_HEADS: Final = HotStatement(
    update(partition_heads)
    .where(partition_heads.c.partition_id == bindparam("of_partition_id"))
    .values(
        next_offset=bindparam("new_next_offset"),
        running_max_timestamp_ms=bindparam("new_running_max_timestamp_ms"),
    ),
    may_be_listed=True,
)
_INSERT_BATCHES: Final = HotStatement(insert(record_batches))
# Read in a statement of its own after the head is locked: PostgreSQL gives each statement a new snapshot, which sees
# what the last holder of the lock committed. Joined to the locking statement, the rows would be from before the wait.
_KEY: Final = (producer_states.c.partition_id, producer_states.c.producer_id)
_FEW: Final = are_among("keys", *_KEY)
_KEYS: Final = is_listed("keys", *_KEY)
#: Of that, what markers ask for, as `MarkedProducer` names it.
_MARKED: Final = (
    *_KEY,
    producer_states.c.producer_epoch,
    producer_states.c.coordinator_epoch,
    producer_states.c.transaction_first_offset,
)
#: Of how many partitions one statement reads what is open.
_OPEN_IN_MAX: Final = 16
#: More producers are read by the statement for many.
_FEW_MAX: Final = 16
_STATES_OF_PARTITION: Final = HotStatement(
    select(producer_states)
    .where(producer_states.c.partition_id == bindparam("of_partition_id"))
    .where(producer_states.c.producer_id > bindparam("after_id"))
    .order_by(producer_states.c.producer_id)
    .limit(bindparam("count_max"))
)
_INSERT_STATES: Final = HotStatement(insert(producer_states), may_be_listed=True)
_UPDATE_STATES: Final = HotStatement(
    update(producer_states)
    .where(producer_states.c.partition_id == bindparam("of_partition_id"))
    .where(producer_states.c.producer_id == bindparam("of_producer_id"))
    .values(
        producer_epoch=bindparam("new_epoch"),
        recent_batches=bindparam("new_recent_batches"),
        coordinator_epoch=bindparam("new_coordinator_epoch"),
        last_timestamp_ms=bindparam("new_last_timestamp_ms"),
        transaction_first_offset=bindparam("new_transaction_first_offset"),
    ),
    may_be_listed=True,
)
# An open transaction keeps its producer, however old: it still needs its marker.
_IS_DUE: Final = (
    producer_states.c.transaction_first_offset.is_(None),
    producer_states.c.last_timestamp_ms <= bindparam("before_ms"),
)
_DUE: Final = (
    select(producer_states.c.partition_id, producer_states.c.producer_id)
    .where(producer_states.c.last_minute <= bindparam("before_minute"), *_IS_DUE)
    .order_by(producer_states.c.last_minute)
    .limit(bindparam("rows_max"))
)
# Asked again under the head's lock: an append that has read the state holds it until it has written it.
_FORGET: Final = delete(producer_states).where(
    producer_states.c.partition_id == bindparam("of_partition_id"),
    producer_states.c.producer_id.in_(bindparam("producer_ids", expanding=True)),
    *_IS_DUE,
)


class _next_number(next_value):  # noqa: N801 - reads as the SQL it stands for
    """The next number of a sequence, by PostgreSQL's own function.

    The name of a sequence is a text without a type: a function `nextval(text)` that somebody has made in the schema
    `public` would be called before it, with the rights of the role that enlists a connection.
    """

    inherit_cache = True


@compiles(_next_number)
def _compile_next_number(element: _next_number, compiler: SQLCompiler, **options: Any) -> str:
    del options
    name = compiler.preparer.format_sequence(element.sequence)
    return f"pg_catalog.nextval(CAST('{name}' AS pg_catalog.regclass))"


_FROM_SEQUENCE: Final = HotStatement(select(_next_number(NumberSequence(JOURNAL_NUMBERS, schema=CODE_SCHEMA))))
# The search path may have more functions of that name.
_SOME_FROM_SEQUENCE: Final = HotStatement(
    _FROM_SEQUENCE.statement.select_from(
        func.pg_catalog.generate_series(1, bindparam("count", type_=Int32)).table_valued("number")
    )
)
_JOURNAL: Final = SQLITE_PREFIX + str(transaction_log.name)
#: Where SQLite keeps the last key that AUTOINCREMENT gave out. The temporary tables of an enlisted connection may have
#: one of their own, which comes first where no database is named.
_LAST_KEYS: Final = table("sqlite_sequence", column("name"), column("seq"), schema="main")
_FROM_LAST_KEY: Final = HotStatement(
    update(_LAST_KEYS)
    .where(_LAST_KEYS.c.name == _JOURNAL)
    .values(seq=_LAST_KEYS.c.seq + bindparam("count", type_=Int32))
    .returning(_LAST_KEYS.c.seq)
)
_FIRST_KEY: Final = insert(_LAST_KEYS).values(name=_JOURNAL)
_FOLLOWING_KEY: Final = HotStatement(select(_LAST_KEYS.c.seq + 1).where(_LAST_KEYS.c.name == _JOURNAL))
#: For so many milliseconds of a store's age there is one producer id, given out or not. One that lost its last commits
#: gives nobody the id of a producer that lives on, for whose repetitions its records would be taken.
PRODUCER_ID_MS = 10
#: Until a store is so old its ids are small numbers, given out in turn: those who try something read them.  Not in a
#: cluster: where one database has lost its last commits, what its producers have written lives on in the others.
PRODUCER_IDS_IN_TURN_MS: Final = 3_600_000
_PRODUCER_ID: Final = stores.c.next_producer_id
# Whoever waits for the first others to be registered may still see none, once: an id in turn that nobody has had.
_IN_TURN_MS: Final = case(
    (exists(select(databases.c.database_id).where(databases.c.database_id > CONTROLLER_ID)), 0),
    else_=literal_column(str(PRODUCER_IDS_IN_TURN_MS), BigInteger),
)
# Each database of a cluster has ids of its own.
_PRODUCER_ID_BY_AGE: Final = (
    _PRODUCER_ID
    - _PRODUCER_ID % literal_column(str(1 << PRODUCER_ID_BITS), BigInteger)
    + (server_now_ms() - stores.c.created_ms - _IN_TURN_MS) // bindparam("producer_id_ms", type_=BigInteger())
)
_NEXT_PRODUCER_ID: Final = HotStatement(
    update(stores)
    .values(next_producer_id=case((_PRODUCER_ID < _PRODUCER_ID_BY_AGE, _PRODUCER_ID_BY_AGE), else_=_PRODUCER_ID) + 1)
    .returning(_PRODUCER_ID)
)


@dataclass(slots=True)
class Head:
    """The end of a partition's log while its lock is held; `LockedPartitions` moves it along."""

    partition_id: int
    log_start_offset: int
    next_offset: int
    running_max_timestamp_ms: int
    segment: int

    def place(self, row: dict[str, Any]) -> dict[str, Any]:
        """Give the columns of a batch, or of a marker, the partition's next offsets, and return them."""
        row["partition_id"] = self.partition_id
        row["base_offset"] = self.next_offset
        self.next_offset += row["record_count"]
        row["last_offset"] = self.next_offset - 1
        if row["control_type"] is None:
            # A marker has the store's time: behind it no record that is said to be old could be found by halving.
            self.running_max_timestamp_ms = max(self.running_max_timestamp_ms, row["max_timestamp_ms"])
        row["commit_number"] = None
        row["segment"] = self.segment
        return row


@dataclass(frozen=True, slots=True)
class LockedHeads:
    """The heads of some partitions, locked until the database transaction ends."""

    heads: Mapping[int, Head]
    now_ms: int
    """The store's clock when the locks were asked for."""


def lock_heads(connection: Connection, partition_ids: Iterable[int]) -> LockedHeads:
    """Lock the heads of these partitions, at least one.

    Raises:
        UnknownTopicOrPartition: one of them is not in this database.
    """
    wanted = sorted(set(partition_ids))
    if len(wanted) == 1:
        rows = _LOCK_HEAD.rows(connection, {"of_partition_id": wanted[0]})
    else:
        rows = [row for some in chunks(wanted) for row in _LOCK_HEADS.rows(connection, {"partition_ids": some})]
    heads = {row[0]: Head(*row[:5]) for row in rows}
    if len(heads) != len(wanted):
        missing = next(number for number in wanted if number not in heads)
        raise UnknownTopicOrPartition(
            f"there is no partition with id {missing} in this database; was its topic deleted?"
        )
    return LockedHeads(heads, rows[0].now_ms)


def save_heads(connection: Connection, heads: Sequence[Head]) -> None:
    """Write where the heads are now."""
    note_change(connection, partition_ids=[head.partition_id for head in heads])
    must_hit_each(
        connection,
        _MOVE_HEADS,
        [
            {
                "of_partition_id": head.partition_id,
                "new_next_offset": head.next_offset,
                "new_running_max_timestamp_ms": head.running_max_timestamp_ms,
            }
            for head in heads
        ],
    )


def insert_batches(connection: Connection, placed: Sequence[Mapping[str, Any]]) -> None:
    """Write batches, at least one, that have their offsets: the heads of their partitions are locked."""
    _INSERT_BATCHES.run_each(connection, placed)


def draw_commit_number(connection: Connection) -> int:
    """Return a number that is above all that were drawn before; the heads of the partitions must be locked."""
    return draw_commit_numbers(connection, 1)[0]


def draw_commit_numbers(connection: Connection, count: int) -> Sequence[int]:
    """Return so many such numbers, at least one, the lowest first."""
    if connection.dialect.name != "sqlite":
        if count == 1:
            return [int(_FROM_SEQUENCE.value(connection))]
        return sorted(_SOME_FROM_SEQUENCE.values(connection, {"count": count}))
    last: int | None = _FROM_LAST_KEY.value(connection, {"count": count})
    if last is None:
        # Nothing was ever written into this journal: another database coordinates.
        connection.execute(_FIRST_KEY, {"seq": count})
        last = count
    return range(last - count + 1, last + 1)


def number_of_entry(connection: Connection) -> int:
    """Return such a number for the key of an entry that the caller writes into the journal, before drawing another.

    SQLite counts a key when it is inserted: to count it before takes longer than all the rest about it.
    """
    if connection.dialect.name != "sqlite":
        return draw_commit_number(connection)
    number: int | None = _FOLLOWING_KEY.value(connection)
    return 1 if number is None else number


def allocate_producer_id(connection: Connection) -> int:
    """Return a producer id that nobody in the cluster has had before, nor in a later state of it that was lost."""
    return int(_NEXT_PRODUCER_ID.value(connection, {"producer_id_ms": PRODUCER_ID_MS})) - 1


def may_be_given_out(connection: Connection, producer_id: int) -> bool:
    """Return whether somebody may have had the producer id; of those of other databases in the cluster nobody knows."""
    following: int = connection.execute(select(_PRODUCER_ID)).scalar_one()
    return producer_id < following or producer_id >> PRODUCER_ID_BITS != following >> PRODUCER_ID_BITS


def new_producer(connection: Connection) -> ProducerIdentity:
    """Return who a producer is that nobody has been before."""
    return ProducerIdentity(allocate_producer_id(connection), 0)


def read_producer_states(
    connection: Connection, keys: Collection[ProducerKey], *, oldest_open: Mapping[int, int] = NOTHING_OPEN
) -> dict[ProducerKey, ProducerInPartition]:
    """Return what the partitions know of these producers, and of the oldest that have a transaction open there.

    `oldest_open` says how many of those, by partition id: a caller that ends fewer transactions than that needs to know
    no more.  Producers that are unknown are left out.  The heads of the partitions must be locked: see `_FEW`.
    """
    found = _read_states(connection, keys, oldest_open, of_markers=False)
    return {key: _state_from_row(row) for key, row in found.items()}


def read_marked_producers(
    connection: Connection, keys: Collection[ProducerKey], *, oldest_open: Mapping[int, int] = NOTHING_OPEN
) -> dict[ProducerKey, MarkedProducer]:
    """Return of the same producers what markers ask for."""
    if len(keys) <= _FEW_MAX or not oldest_open:
        found = _read_states(connection, keys, oldest_open, of_markers=True)
    else:
        # Where many end they are as a rule the oldest, and read with those: none is read twice.
        found = _read_states(connection, (), oldest_open, of_markers=True)
        left = [key for key in keys if key not in found]
        found |= _read_states(connection, left, NOTHING_OPEN, of_markers=True)
    return {key: MarkedProducer(row[2], row[3], row[4]) for key, row in found.items()}


def _read_states(
    connection: Connection, keys: Collection[ProducerKey], oldest_open: Mapping[int, int], *, of_markers: bool
) -> dict[ProducerKey, Any]:
    # A key is two values of a list.
    pages = zip_longest(
        chunks(list(keys), LISTED_MAX // 3),
        chunks(list(oldest_open), _OPEN_IN_MAX),
        fillvalue=cast("Sequence[Any]", ()),
    )
    found: dict[ProducerKey, Any] = {}
    for some_keys, some_ids in pages:
        is_many = len(some_keys) > _FEW_MAX
        of: dict[str, Any] = _KEYS.parameters(some_keys) if is_many else {"keys": some_keys}
        for place, partition_id in enumerate(some_ids):
            of |= {f"of_partition_id_{place}": partition_id, f"open_max_{place}": oldest_open[partition_id]}
        rows = _states_and_oldest(len(some_ids), is_many=is_many, of_markers=of_markers).rows(connection, of)
        found.update(((row.partition_id, row.producer_id), row) for row in rows)
    return found


@cache
def _states_and_oldest(partition_count: int, *, is_many: bool, of_markers: bool) -> HotStatement:
    """Return what reads some producers, and of each of so many partitions the oldest that are open.

    The partial index on open transactions finds these, however many producers the partition has seen, and however many
    of them are open.  SQLite takes it for a comparison, and prefers the primary key for IS NOT NULL.
    """
    columns = _MARKED if of_markers else tuple(producer_states.c)
    oldest = [
        select(*columns)
        .where(
            producer_states.c.partition_id == bindparam(f"of_partition_id_{place}"),
            producer_states.c.transaction_first_offset >= 0,
        )
        .order_by(producer_states.c.transaction_first_offset)
        .limit(bindparam(f"open_max_{place}"))
        .subquery()
        for place in range(partition_count)
    ]
    states = select(*columns).where(_KEYS if is_many else _FEW)
    return HotStatement(union_all(states, *(select(each) for each in oldest)) if oldest else states)


def producers_of_partition(
    connection: Connection, partition_id: int, *, after_id: int = NO_PRODUCER_ID, count_max: int = OFFSET_MAX
) -> list[ProducerInPartition]:
    """Return the producers that the partition remembers, by producer id: so many after `after_id`, or all."""
    page = {"of_partition_id": partition_id, "after_id": after_id, "count_max": count_max}
    return [_state_from_row(row) for row in _STATES_OF_PARTITION.rows(connection, page)]


def save_producer_states(
    connection: Connection,
    states: Mapping[ProducerKey, ProducerInPartition],
    known: Collection[ProducerKey],
) -> None:
    """Write `states`; `known` are those that have a row already. The heads of the partitions must be locked."""
    new = [_row_of(key, state) for key, state in states.items() if key not in known]
    changed = [_change_of(key, state) for key, state in states.items() if key in known]
    if new:
        _INSERT_STATES.run_each(connection, new)
    if changed:
        # One that is missed would hide its transaction: nothing would hold the last stable offset, nor tell its end.
        must_hit_each(connection, _UPDATE_STATES, changed)


def forget_producers(store: Store, portions: Portions | None = None, *, before_ms: int, rows_max: int) -> int:
    """Forget producers without an open transaction that have been silent since `before_ms`; return how many.

    At least `rows_max`, or all that there are, or what there is time for, oldest first and by the minute.  Kafka's
    producer.id.expiration.ms (KIP-854): a batch that is repeated later than that is appended again.

    Raises:
        TxnStoreError: the database refused; what was forgotten before stays so.
    """
    of = {"before_ms": before_ms, "before_minute": before_ms // MINUTE_MS, "rows_max": rows_max}

    def find(connection: Connection) -> dict[int, list[int]]:
        # A partition at a time: waiting for one head blocks no other.
        ids_of: dict[int, list[int]] = {}
        for partition_id, producer_id in connection.execute(_DUE, of):
            ids_of.setdefault(partition_id, []).append(producer_id)
        return ids_of

    return (portions or Portions()).forget(
        store, find, lambda partition_id, some: partial(_forget_in, partition_id, some, before_ms), rows_max=rows_max
    )


def _forget_in(partition_id: int, producer_ids: Sequence[int], before_ms: int, connection: Connection) -> int:
    # Without a head the partition was deleted: nobody writes there any more.
    with contextlib.suppress(UnknownTopicOrPartition):
        lock_heads(connection, [partition_id])
    these = {"of_partition_id": partition_id, "producer_ids": producer_ids, "before_ms": before_ms}
    return connection.execute(_FORGET, these).rowcount


def _state_from_row(row: Any) -> ProducerInPartition:
    return ProducerInPartition(
        producer_id=row.producer_id,
        epoch=row.producer_epoch,
        recent_batches=_recent_from_text(row.recent_batches, row.producer_id),
        coordinator_epoch=row.coordinator_epoch,
        last_timestamp_ms=row.last_timestamp_ms,
        transaction_first_offset=row.transaction_first_offset,
    )


def _row_of(key: ProducerKey, state: ProducerInPartition) -> dict[str, Any]:
    return {
        "partition_id": key[0],
        "producer_id": key[1],
        "producer_epoch": state.epoch,
        "recent_batches": _recent_to_text(state.recent_batches),
        "coordinator_epoch": state.coordinator_epoch,
        "last_timestamp_ms": state.last_timestamp_ms,
        "transaction_first_offset": state.transaction_first_offset,
    }


def _change_of(key: ProducerKey, state: ProducerInPartition) -> dict[str, Any]:
    return {
        "of_partition_id": key[0],
        "of_producer_id": key[1],
        "new_epoch": state.epoch,
        "new_recent_batches": _recent_to_text(state.recent_batches),
        "new_coordinator_epoch": state.coordinator_epoch,
        "new_last_timestamp_ms": state.last_timestamp_ms,
        "new_transaction_first_offset": state.transaction_first_offset,
    }


def _recent_to_text(batches: Sequence[RecentBatch]) -> str:
    numbers = (
        number
        for batch in batches
        for number in (
            batch.first_sequence,
            batch.last_sequence,
            batch.base_offset,
            batch.last_offset,
            batch.timestamp_ms,
        )
    )
    return f"[{','.join(map(str, numbers))}]"


def _recent_from_text(text: str, producer_id: int) -> tuple[RecentBatch, ...]:
    try:
        numbers = json.loads(text)
        return tuple(
            RecentBatch(*numbers[start : start + _FIELDS_OF_BATCH])
            for start in range(0, len(numbers), _FIELDS_OF_BATCH)
        )
    except (ValueError, TypeError, KeyError):
        # Somebody else has written to the table.
        raise CorruptBatch(f"what a partition remembers of producer {producer_id} cannot be read") from None

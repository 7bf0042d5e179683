"""A store that has been in use for years, made in seconds: rows are multiplied by the database itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    CTE,
    ColumnElement,
    Connection,
    Table,
    case,
    cast,
    delete,
    insert,
    literal,
    not_,
    null,
    select,
    text,
    true,
    update,
)

from txnstore.db.backend import Limits
from txnstore.db.ddl import Int64, String
from txnstore.db.postgresql.segments import LASTING_SEGMENT, TURNING_SEGMENTS
from txnstore.db.schema import (
    finished_transactions,
    group_members,
    group_offsets,
    groups,
    offset_producers,
    outbox,
    partition_heads,
    pending_group_offsets,
    pending_markers,
    producer_states,
    record_batches,
    sink_positions,
    stores,
    transaction_groups,
    transaction_log,
    transaction_partitions,
    transaction_writer_partitions,
    transaction_writers,
    transactions,
)
from txnstore.db.store import Store
from txnstore.log.codec import encode
from txnstore.log.topics import create_topic
from txnstore.model import ControlType, ProducerIdentity, Record
from txnstore.transactions.protocol import TransactionState

#: How many batches are made of each that is encoded.
COPIES = 1_000
#: By partition: how many batches are encoded for it.
TRANSACTIONS, PLAIN, HELD_BACK, EXPIRED, COMPACTED = 300, 500, 200, 50, 50
#: Of the partition with transactions: those of this stretch were aborted, 100,000 batches in a row.
ABORTED = range(100, 200)
#: In the partition whose readers are held back: where the open transaction begins.
OPEN_OFFSET = 1_000

#: Of the compacted topic; all of its records are older.
COMPACTS = {"cleanup.policy": "compact", "min.compaction.lag.ms": "1000"}

PRODUCERS = 100_000
TRANSACTIONAL_IDS = 10_000
GROUPS = 1_000
#: A group that a few streaming queries have read as, long ago, among those of so many others.
QUERY_GROUP = "group of queries"
OLD_QUERIES = 10
SINK_POSITIONS = 50_000
#: Of transactions that are open or decided: how many rows each table of participants has.
PARTICIPANTS = 10_000
#: A group in which so many producers have offsets that are pending; the others have theirs in others.
PENDING_GROUP = "group 9"
PENDING_PRODUCERS = 1_000
REFUSED_ROWS = 300_000
JOURNAL_ENTRIES = 300_000
#: Producers that began in the journal and are remembered nowhere else.
FORMER_PRODUCER_ID = 400_000
OPEN_PRODUCER_ID = 500_000
NEXT_PRODUCER_ID = 1_000_000
NO_TIMEOUT_MS = 2**31 - 1


@dataclass(frozen=True)
class BigStore:
    """The store and what is where."""

    store: Store
    url: str
    topic: str
    transactions: int
    """A partition of transactions that ended, with 100,000 producers."""
    plain: int
    """One of records outside transactions, whose timestamps grow."""
    held_back: int
    """One whose last stable offset lies 199,000 batches before its end."""
    expired: int
    """One whose topic keeps nothing for so long, and has not been looked after yet."""
    compacted: int
    """One of a compacted topic that no pass has seen, with a transaction open near its beginning."""
    ended: int
    """One for transactions that end many at a time: those of the others stay as long as they are."""
    first_ms: int
    """The first timestamp in `plain`; that of batch n is later by n // 1000 seconds."""


def fill(store: Store, url: str) -> BigStore:
    """Fill a new store, which others open at this URL."""
    topic = store.write(lambda connection: create_topic(connection, "big", partition_count=4))
    keeps = {"retention.ms": "1000", "retention.bytes": "1000000000"}
    old = store.write(lambda connection: create_topic(connection, "old", config=keeps))
    first_ms = time.time_ns() // 1_000_000 - 3_600_000
    with_transactions, plain, held_back, ended = topic.partition_ids
    (expired,) = old.partition_ids
    states = store.write(lambda connection: create_topic(connection, "states", config=COMPACTS))
    (compacted,) = states.partition_ids
    big = BigStore(store, url, "big", with_transactions, plain, held_back, expired, compacted, ended, first_ms)
    with store.engine.connect() as connection:
        if store.backend.name == "postgresql":
            driver: Any = connection.connection.driver_connection
            driver.expect_answers_within(Limits(statement_timeout_ms=0))
        connection.exec_driver_sql("BEGIN")
        _fill_log(connection, big)
        _fill_producers(connection, big)
        _fill_coordinator(connection, big)
        _fill_participants(connection, big)
        _fill_groups(connection, big)
        _multiply(
            connection, outbox, _numbers(REFUSED_ROWS), {"topic": literal("gone"), "refusal": literal("no such topic")}
        )
        connection.exec_driver_sql("COMMIT")
        if store.backend.name == "postgresql":
            # As the server does by itself.
            connection.execute(text("VACUUM ANALYZE"))
            # Autovacuum analyses segments, never what they are segments of.
            connection.execute(text("DELETE FROM pg_statistic WHERE starelid = 'txnstore.record_batches'::regclass"))
    return big


def _numbers(count: int, name: str = "numbers") -> CTE:
    found = select(literal(0, Int64).label("n")).cte(name, recursive=True)
    return found.union_all(select(found.c.n + 1).where(found.c.n + 1 < count))


def _multiply(
    connection: Connection, table: Table, numbers: CTE, values: Mapping[str, ColumnElement[Any]], *more: Any
) -> None:
    """Insert a row for each number."""
    rows = select(*values.values()).select_from(numbers, *more)
    connection.execute(insert(table).from_select(list(values), rows, include_defaults=False))


def _fill_log(connection: Connection, big: BigStore) -> None:
    encoded = [
        encode(
            [Record(b"value", timestamp_ms=big.first_ms)],
            producer=ProducerIdentity(number, 0),
            base_sequence=0,
            is_transactional=True,
        )
        for number in range(TRANSACTIONS)
    ]
    encoded += [encode([Record(b"value", timestamp_ms=big.first_ms + number * 1_000)]) for number in range(PLAIN)]
    encoded += [
        encode([Record(b"value", key=b"key %d" % number, timestamp_ms=big.first_ms + number * 1_000)])
        for number in range(COMPACTED)
    ]
    rows = [
        {
            **batch.columns(),
            "partition_id": big.ended,
            "base_offset": number,
            "last_offset": number,
            "running_max_timestamp_ms": batch.max_timestamp_ms,
            "commit_number": None,
            "segment": LASTING_SEGMENT,
        }
        for number, batch in enumerate(encoded)
    ]
    connection.execute(insert(record_batches), rows)
    for partition_id, first, count in (
        (big.transactions, 0, TRANSACTIONS),
        (big.plain, TRANSACTIONS, PLAIN),
        (big.held_back, TRANSACTIONS, HELD_BACK),
        (big.expired, TRANSACTIONS, EXPIRED),
        (big.compacted, TRANSACTIONS + PLAIN, COMPACTED),
    ):
        copies = _numbers(COPIES)
        offset = (record_batches.c.last_offset - first) * COPIES + copies.c.n
        values: dict[str, Any] = {column.name: column for column in record_batches.c}
        values |= {"partition_id": literal(partition_id, Int64), "last_offset": offset, "base_offset": offset}
        # One after the other, as they are written to in turns.
        values["segment"] = 1 + offset * len(TURNING_SEGMENTS) // (count * COPIES)
        values["commit_number"] = case((not_(record_batches.c.is_transactional), offset + 1))
        chosen = (
            select(*values.values())
            .select_from(record_batches.join(copies, true()))
            .where(
                record_batches.c.partition_id == big.ended,
                record_batches.c.last_offset >= first,
                record_batches.c.last_offset < first + count,
            )
        )
        connection.execute(insert(record_batches).from_select(list(values), chosen.order_by(offset)))
        connection.execute(
            update(partition_heads)
            .where(partition_heads.c.partition_id == partition_id)
            .values(next_offset=count * COPIES, running_max_timestamp_ms=big.first_ms + (count - 1) * 1_000)
        )
    # They were there to be copied.
    connection.execute(delete(record_batches).where(record_batches.c.partition_id == big.ended))
    # The last offset of each thousand ends the transaction that is read; the others only fill the index.
    numbers = _numbers(TRANSACTIONS * COPIES)
    which, rest = numbers.c.n.op("/")(COPIES), numbers.c.n % COPIES
    _multiply(
        connection,
        finished_transactions,
        numbers,
        {
            "partition_id": literal(big.transactions, Int64),
            "marker_offset": numbers.c.n + 1,
            "producer_id": case((rest == COPIES - 1, which), else_=numbers.c.n + NEXT_PRODUCER_ID),
            "producer_epoch": literal(0),
            "first_offset": numbers.c.n - rest,
            "outcome": case(
                (which.between(ABORTED.start, ABORTED.stop - 1), int(ControlType.ABORT)), else_=int(ControlType.COMMIT)
            ),
            "last_stable_offset": numbers.c.n + 2,
            "commit_number": case((which.between(ABORTED.start, ABORTED.stop - 1), null()), else_=numbers.c.n + 1),
        },
    )


def _fill_producers(connection: Connection, big: BigStore) -> None:
    numbers = _numbers(PRODUCERS)
    common: dict[str, Any] = {
        "producer_epoch": literal(1),
        "recent_batches": literal("[]"),
        "coordinator_epoch": literal(0),
        "last_timestamp_ms": literal(big.first_ms, Int64) + numbers.c.n,
    }
    of_partition = {"partition_id": literal(big.transactions, Int64), "producer_id": numbers.c.n}
    _multiply(connection, producer_states, numbers, of_partition | common)
    open_one = {
        "partition_id": big.held_back,
        "producer_id": OPEN_PRODUCER_ID,
        "producer_epoch": 0,
        "recent_batches": "[]",
        "coordinator_epoch": -1,
        "last_timestamp_ms": big.first_ms,
        "transaction_first_offset": OPEN_OFFSET,
    }
    connection.execute(insert(producer_states), [open_one, {**open_one, "partition_id": big.compacted}])
    connection.execute(update(stores).values(next_producer_id=3 * NEXT_PRODUCER_ID))


def _fill_coordinator(connection: Connection, big: BigStore) -> None:
    numbers = _numbers(TRANSACTIONAL_IDS)
    is_open = numbers.c.n == 0
    _multiply(
        connection,
        transactions,
        numbers,
        {
            "transactional_id": literal("id ", String) + cast(numbers.c.n, String),
            "producer_id": case((is_open, OPEN_PRODUCER_ID), else_=numbers.c.n),
            "previous_producer_id": literal(-1),
            "next_producer_id": literal(-1),
            "producer_epoch": case((is_open, 0), else_=1),
            "last_producer_epoch": literal(-1),
            "timeout_ms": literal(NO_TIMEOUT_MS),
            "state": case((is_open, int(TransactionState.ONGOING)), else_=int(TransactionState.COMPLETE_COMMIT)),
            "start_ms": literal(big.first_ms, Int64),
            "last_update_ms": literal(big.first_ms, Int64) + numbers.c.n,
            "transaction_number": literal(1),
            "begin_epoch": case((is_open, 0), else_=-1),
        },
    )
    written = [{"transactional_id": "id 0", "partition_id": number} for number in (big.held_back, big.compacted)]
    connection.execute(insert(transaction_partitions), written)
    entries = _numbers(JOURNAL_ENTRIES)
    # What began in one database transaction and was decided in the next.
    changes = (
        (TransactionState.ONGOING, TransactionState.ONGOING, 0),
        (TransactionState.PREPARE_COMMIT, TransactionState.COMPLETE_COMMIT, 1),
    )
    which = entries.c.n % len(changes)
    number = entries.c.n.op("/")(len(changes))
    _multiply(
        connection,
        transaction_log,
        entries,
        {
            "transactional_id": literal("id ", String) + cast(number % TRANSACTIONAL_IDS, String),
            "transaction_number": number,
            "producer_id": number + FORMER_PRODUCER_ID,
            "producer_epoch": case(*((which == rest, epoch) for rest, (_, _, epoch) in enumerate(changes))),
            "state": case(*((which == rest, int(last)) for rest, (_, last, _) in enumerate(changes))),
            "first_state": case(*((which == rest, int(first)) for rest, (first, _, _) in enumerate(changes))),
            "timeout_ms": literal(60_000),
            "start_ms": literal(big.first_ms, Int64),
            "update_ms": literal(big.first_ms, Int64) + entries.c.n,
            "reason": literal("EndTxn"),
        },
    )


def _fill_participants(connection: Connection, big: BigStore) -> None:
    """Let others take part in transactions, and have markers and offsets that wait.

    Of those transactions there is nothing else here: nobody looks for them, ends them, or waits for them.
    """
    numbers = _numbers(PARTICIPANTS)
    transactional_id = literal("other ", String) + cast(numbers.c.n, String)
    partition: dict[str, Any] = {"transactional_id": transactional_id, "partition_id": literal(big.transactions, Int64)}
    producer_id = numbers.c.n + 2 * NEXT_PRODUCER_ID
    producer: dict[str, Any] = {"producer_id": producer_id, "producer_epoch": literal(1)}
    of_writer = {"transactional_id": transactional_id, "writer_producer_id": producer_id}
    _multiply(connection, transaction_partitions, numbers, partition)
    _multiply(connection, pending_markers, numbers, {**partition, **producer, "outcome": literal(0)})
    _multiply(
        connection,
        transaction_groups,
        numbers,
        {"transactional_id": transactional_id, "group_id": literal(PENDING_GROUP)},
    )
    _multiply(
        connection,
        transaction_writers,
        numbers,
        {**of_writer, "producer_epoch": literal(0), "reported": literal(True)},
    )
    _multiply(
        connection,
        transaction_writer_partitions,
        numbers,
        {**of_writer, "partition_id": literal(big.transactions, Int64)},
    )
    _multiply(
        connection,
        offset_producers,
        numbers,
        {**producer, "last_update_ms": literal(big.first_ms, Int64) + numbers.c.n},
    )
    _multiply(
        connection,
        pending_group_offsets,
        numbers,
        {
            "group_id": case((numbers.c.n < PENDING_PRODUCERS, literal(PENDING_GROUP)), else_=transactional_id),
            "partition_id": literal(big.plain, Int64),
            "producer_id": producer_id,
            "producer_epoch": literal(0),
            "pending_offset": numbers.c.n,
            "leader_epoch": literal(-1),
            "commit_ms": literal(big.first_ms, Int64),
            "commit_number": literal(1),
        },
    )


def _fill_groups(connection: Connection, big: BigStore) -> None:
    numbers = _numbers(GROUPS)
    group_id = literal("group ", String) + cast(numbers.c.n, String)
    now_ms = literal(big.first_ms, Int64)
    _multiply(
        connection,
        groups,
        numbers,
        {"group_id": group_id, "generation": literal(1), "commit_number": literal(1), "last_update_ms": now_ms},
    )
    _multiply(
        connection,
        group_members,
        numbers,
        {
            "group_id": group_id,
            "member_id": literal("member"),
            "client_id": literal("client"),
            "generation": literal(1),
            "session_timeout_ms": literal(NO_TIMEOUT_MS),
            "deadline_ms": now_ms + NO_TIMEOUT_MS,
            "subscription": literal(
                '{"subscribed":[],"topics":[],"assignors":["range"],"owned":{},"owned_ids":[],"step":0}'
            ),
            "assignment": literal("{}"),
        },
    )
    for partition_id in (big.transactions, big.plain, big.held_back):
        _multiply(
            connection,
            group_offsets,
            numbers,
            {
                "group_id": group_id,
                "partition_id": literal(partition_id, Int64),
                "committed_offset": numbers.c.n,
                "leader_epoch": literal(-1),
                "offset_metadata": literal(""),
                "commit_ms": now_ms,
                "commit_number": literal(1),
                "producer_id": literal(-1),
                "producer_epoch": literal(-1),
            },
        )
    _fill_queries(connection, big)


def _fill_queries(connection: Connection, big: BigStore) -> None:
    group = {"group_id": QUERY_GROUP, "generation": 0, "commit_number": 1, "last_update_ms": 0}
    connection.execute(insert(groups), group)
    offset = {
        "group_id": QUERY_GROUP,
        "committed_offset": 1,
        "leader_epoch": -1,
        "commit_ms": 0,
        "commit_number": 1,
        "producer_id": -1,
        "producer_epoch": -1,
    }
    # Of the last one no query has read anything.
    partition_ids = (big.transactions, big.plain, big.held_back)
    connection.execute(insert(group_offsets), [{**offset, "partition_id": number} for number in partition_ids])
    for partition_id in partition_ids[:-1]:
        numbers = _numbers(SINK_POSITIONS)
        _multiply(
            connection,
            sink_positions,
            numbers,
            {
                "sink_id": literal("query:", String) + cast(numbers.c.n, String),
                "group_id": case(
                    (numbers.c.n < OLD_QUERIES, literal(QUERY_GROUP, String)),
                    else_=literal("group ", String) + cast(numbers.c.n % GROUPS, String),
                ),
                "partition_id": literal(partition_id, Int64),
                "in_commit_order": literal(False),
                "next_offset": numbers.c.n,
            },
        )

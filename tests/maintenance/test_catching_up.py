"""Maintenance that is far behind: it goes on in portions until nothing is left, and looks at what is due alone."""

from __future__ import annotations

import json
from contextlib import closing, contextmanager

import psycopg
import pytest
from sqlalchemy import event, func, insert, select, text

from txnstore.db import portions as portions_module
from txnstore.db.backend import Limits
from txnstore.db.opening import open_store
from txnstore.db.portions import FOUND_MAX, Portions
from txnstore.db.schema import (
    deleted_partitions,
    group_members,
    group_offsets,
    groups,
    offset_producers,
    partition_heads,
    partitions,
    producer_states,
    record_batches,
    sink_positions,
    transaction_log,
    transactions,
)
from txnstore.errors import StoreBusy
from txnstore.groups.expiration import expire_silent_members
from txnstore.groups.offsets import commit_offsets, read_offsets
from txnstore.log import deleting
from txnstore.log import partition_rows as producers
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.deleting import delete_below_log_start, delete_records, purge_deleted_partitions, purge_soon
from txnstore.log.partition_rows import lock_heads, read_producer_states
from txnstore.log.topics import create_topic, delete_topic, find_topics, get_topic
from txnstore.maintenance.loop import Maintenance
from txnstore.model import GroupMembership, OffsetAndMetadata, Record
from txnstore.testing.postgres_server import connection_string
from txnstore.transactions.recovery import expire_producers, expire_transactional_ids, trim_journal
from txnstore.transactions.rows import strike_off_markers

DAY_MS = 86_400_000
SILENT, TRIMMED, PURGED = "silent producers forgotten", "journal entries deleted", "rows of deleted topics deleted"


def count(store, table):
    return store.read(lambda connection: connection.execute(select(func.count()).select_from(table)).scalar_one())


def fill(store, table, rows):
    store.write(lambda connection: connection.execute(insert(table), list(rows)))


def state(partition_id, producer_id, last_ms):
    return {
        "partition_id": partition_id,
        "producer_id": producer_id,
        "producer_epoch": 0,
        "recent_batches": "[]",
        "coordinator_epoch": -1,
        "last_timestamp_ms": last_ms,
    }


def entry(number, update_ms):
    return {
        "transactional_id": f"id-{number % 7}",
        "transaction_number": number,
        "producer_id": number,
        "producer_epoch": 0,
        "state": 4,
        "first_state": 1,
        "timeout_ms": 1,
        "start_ms": 1,
        "update_ms": update_ms,
        "reason": "test",
    }


@pytest.fixture
def partition_ids(store):
    return store.write(lambda connection: create_topic(connection, "orders", partition_count=2)).partition_ids


@pytest.mark.slow
def test_everything_that_is_due_is_forgotten_and_a_portion_that_fails_keeps_what_was_done(
    store, clock, partition_ids, monkeypatch
):
    rows_count = 2 * FOUND_MAX + 300
    fill(store, producer_states, (state(partition_ids[n % 2], n, clock.now_ms() - n) for n in range(rows_count)))
    fill(store, transaction_log, (entry(n, clock.now_ms()) for n in range(rows_count)))
    clock.advance(8 * DAY_MS)
    fill(store, producer_states, [state(partition_ids[0], 10**6, clock.now_ms())])
    fill(store, transaction_log, [entry(10**6, clock.now_ms())])
    portions, forget = [], producers._forget_in

    def fail_at_third(*arguments):
        portions.append(arguments)
        if len(portions) == 3:
            raise StoreBusy
        return forget(*arguments)

    monkeypatch.setattr(producers, "_forget_in", fail_at_third)
    monkeypatch.setattr(store.limits.__class__, "retry_timeout_ms", 0, raising=False)
    maintenance = Maintenance(store)
    monkeypatch.setattr(store, "write", lambda work, **_: type(store).write(store, work, retry_timeout_ms=0))
    done = maintenance.run_once()
    assert SILENT not in done
    assert done[TRIMMED] == rows_count
    left = count(store, producer_states)
    assert 1 < left < rows_count
    assert maintenance.run_once()[SILENT] == left - 1
    assert count(store, producer_states) == count(store, transaction_log) == 1


@pytest.mark.slow
def test_no_portion_is_larger_than_what_others_wait_for(store, clock, partition_ids, monkeypatch):
    fill(store, producer_states, (state(partition_ids[0], n, clock.now_ms()) for n in range(500)))
    fill(store, transaction_log, (entry(n, clock.now_ms()) for n in range(500)))
    large = Append(partition_ids[0], encode([Record(b"x" * 300_000)]))
    for _ in range(5):
        store.write(lambda connection: append(connection, [large] * 2))
    small = Append(partition_ids[1], encode([Record(b"x")]))
    store.write(lambda connection: append(connection, [small] * 450))
    read = {"group_id": "g", "partition_id": partition_ids[0], "in_commit_order": False, "next_offset": 1}
    fill(store, sink_positions, ({**read, "sink_id": f"query:{n}"} for n in range(250)))
    clock.advance(8 * DAY_MS)
    deleted, write = [], type(store).write

    def note(_, work, **options):
        return write(store, lambda connection: noted(work, connection), **options)

    def noted(work, connection):
        result = work(connection)
        deleted.append(result)
        return result

    monkeypatch.setattr(type(store), "write", note)
    # However slow the machine is.
    monkeypatch.setattr(Portions, "_adapt", lambda *_: None)
    assert expire_producers(store) == 500
    assert trim_journal(store) == 500
    assert max(deleted) == 200
    assert sum(deleted) == 1_000
    deleted.clear()
    assert delete_records(store, partition_ids[0], 6) == 6
    # Three of them fit a mebibyte.
    assert deleted == [6, 3, 3, 0]
    deleted.clear()
    store.write(lambda connection: delete_topic(connection, "orders"))
    deleted.clear()
    # Batches, two looks that find no more of them, what queries have read, and the two partitions.
    assert purge_deleted_partitions(store, rows_max=10_000) == 704
    assert deleted == [3, 1, 0, 200, 200, 50, 0, 200, 50, None]
    assert [count(store, table) for table in (record_batches, sink_positions, deleted_partitions)] == [0, 0, 0]


def test_whoever_deletes_a_topic_waits_a_moment_only_for_its_records_to_go(store, monkeypatch):
    """Large batches go one by one, each in a commit of its own: thousands of them take minutes."""
    (partition_id,) = store.write(lambda connection: create_topic(connection, "orders")).partition_ids
    for _ in range(3):
        store.write(lambda connection: append(connection, [Append(partition_id, encode([Record(b"x")]))]))
    store.write(lambda connection: delete_topic(connection, "orders"))
    monkeypatch.setattr(portions_module, "FIRST_BYTES", 0)
    monkeypatch.setattr(Portions, "_adapt", lambda *_: None)
    monkeypatch.setattr(deleting, "_PURGED_SOON_SECONDS", 0.0)
    purge_soon(store)
    assert count(store, record_batches) == 2
    assert purge_deleted_partitions(store, rows_max=100) == 2
    assert [count(store, table) for table in (record_batches, deleted_partitions)] == [0, 0]


@pytest.mark.slow
def test_what_a_deleted_topic_has_left_is_not_passed_again_by_each_portion(txnstore_postgresql_url, monkeypatch):
    """Beside an old snapshot what is deleted stays in the index."""
    monkeypatch.setattr(Portions, "_adapt", lambda *_: None)
    batches = 3_000
    # What the transaction has read so far: what a session tells of all of them comes later.
    read = "SELECT pg_stat_get_xact_tuples_returned('txnstore.record_batches_1_pk'::regclass)"
    passed, delete_portion = [], deleting._Purge.delete_portion

    def note(purge, portions, connection):
        before = connection.exec_driver_sql(read).scalar()
        rows = delete_portion(purge, portions, connection)
        passed.append(connection.exec_driver_sql(read).scalar() - before)
        return rows

    monkeypatch.setattr(deleting._Purge, "delete_portion", note)
    with (
        open_store(txnstore_postgresql_url) as store,
        closing(psycopg.connect(connection_string(txnstore_postgresql_url))) as snapshot,
    ):
        (partition_id,) = store.write(lambda connection: create_topic(connection, "orders")).partition_ids
        item = Append(partition_id, encode([Record(b"a")]))
        store.write(lambda connection: append(connection, [item] * batches))
        # As the server does by itself.
        store.write(lambda connection: connection.execute(text("ANALYZE")))
        snapshot.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        snapshot.execute("SELECT 1 FROM pg_class LIMIT 1")
        store.write(lambda connection: delete_topic(connection, "orders"))
        while purge_deleted_partitions(store, rows_max=500):
            pass
        assert count(store, record_batches) == 0
        # To find them, and to delete them.
        assert 2 * batches <= sum(passed) < 3 * batches


def test_what_a_deleted_topic_has_left_is_gone_on_with_where_a_portion_failed(store, partition_ids, monkeypatch):
    item = Append(partition_ids[0], encode([Record(b"a")]))
    store.write(lambda connection: append(connection, [item] * 4))
    store.write(lambda connection: delete_topic(connection, "orders"))
    monkeypatch.setattr(portions_module, "ROWS_AT_ONCE", 1)
    begun, delete_portion = [], deleting._Purge.delete_portion

    def fail_every_second(purge, *arguments):
        begun.append(purge.from_key)
        if len(begun) % 2 == 0:
            raise ZeroDivisionError
        return delete_portion(purge, *arguments)

    monkeypatch.setattr(deleting._Purge, "delete_portion", fail_every_second)
    for left in (3, 2, 1, 0):
        with pytest.raises(ZeroDivisionError):
            purge_deleted_partitions(store, rows_max=100)
        assert count(store, record_batches) == left
    assert begun == [deleting._BEGINNING, 1, 1, 2, 2, 3, 3, 4]
    assert purge_deleted_partitions(store, rows_max=100) == 0
    assert count(store, deleted_partitions) == 0


def make_partitions(connection, topic_id, partition_count):
    prefix, series = (
        "txnstore_",
        (
            "WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {last})"
            " SELECT {columns} FROM numbers"
        ),
    )
    if connection.dialect.name == "postgresql":
        prefix, series = "txnstore.", "SELECT {columns} FROM generate_series(1, {last}) AS n"
    numbers = series.format(columns=f"{topic_id}, n, 1", last=partition_count - 1)
    into = f"INSERT INTO {prefix}partitions (topic_id, partition_number, leader_database_id) {numbers}"
    connection.execute(text(into))
    heads = (
        f"INSERT INTO {prefix}partition_heads"
        " (partition_id, log_start_offset, next_offset, running_max_timestamp_ms, segment)"
        f" SELECT partition_id, 0, 0, -1, 1 FROM {prefix}partitions"
        f" WHERE topic_id = {topic_id} AND partition_number > 0"
    )
    connection.execute(text(heads))


@pytest.mark.slow
def test_a_topic_of_seventy_thousand_partitions_is_used_and_deleted(store):
    # That so many can be named at once, not how fast: on a busy machine it takes longer than anybody's answer may.
    patient = Limits(statement_timeout_ms=600_000, idle_timeout_ms=600_000, transaction_timeout_ms=600_000)
    topic = store.write(lambda connection: create_topic(connection, "wide"))
    store.write(lambda connection: make_partitions(connection, topic.topic_id, 70_000), limits=patient)
    ids = store.read(lambda connection: get_topic(connection, "wide")).partition_ids
    assert len(ids) == 70_000
    last = ids[-1]
    store.write(lambda connection: append(connection, [Append(last, encode([Record(b"a")]))]))
    store.write(lambda connection: commit_offsets(connection, GroupMembership("g"), {last: OffsetAndMetadata(1)}))

    def use(connection):
        heads = lock_heads(connection, ids).heads
        states = read_producer_states(connection, [(number, 5) for number in ids], oldest_open=dict.fromkeys(ids, 2))
        strike_off_markers(connection, "nobody", ids)
        return heads[last].next_offset, states, read_offsets(connection, "g", ids).offsets[last].offset

    assert store.write(use, limits=patient) == (1, {}, 1)
    store.write(lambda connection: delete_topic(connection, "wide"), limits=patient)
    assert store.read(lambda connection: find_topics(connection, [f"t{n}" for n in range(40_000)])) == []
    assert [count(store, table) for table in (partitions, partition_heads)] == [0, 0]
    assert count(store, deleted_partitions) == 70_000
    assert Maintenance(store).run_once()[PURGED] >= 2
    assert [count(store, table) for table in (deleted_partitions, record_batches, group_offsets)] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("fails_after", range(4))
def test_a_deletion_that_was_interrupted_is_done_by_the_next_one(store, partition_ids, monkeypatch, fails_after):
    item = Append(partition_ids[0], encode([Record(b"a")]))
    for partition_id in partition_ids:
        store.write(lambda connection, number=partition_id: append(connection, [Append(number, item.batch)] * 3))
    offsets = dict.fromkeys(partition_ids, OffsetAndMetadata(1))
    store.write(lambda connection: commit_offsets(connection, GroupMembership("g"), offsets))
    store.write(lambda connection: delete_topic(connection, "orders"))
    calls = []

    write = Portions.write

    def fail(*arguments, **options):
        calls.append(arguments)
        if len(calls) > fails_after:
            raise ZeroDivisionError
        return write(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Portions, "write", fail)
        with pytest.raises(ZeroDivisionError):
            purge_deleted_partitions(store, rows_max=100)
    assert count(store, deleted_partitions) == 2
    Maintenance(store).run_once()
    assert [count(store, table) for table in (deleted_partitions, record_batches, group_offsets)] == [0, 0, 0]


# --- what is not due is not looked at ---------------------------------------------------------------------------------

FRESH, DUE = 5_000, 3


@contextmanager
def plans(store):
    """The plans of all SELECT statements that are run meanwhile, with what they touched (PostgreSQL)."""
    found = []

    def explain(connection, cursor, statement, parameters, context, executemany):
        if statement.startswith("SELECT") and "store_configs" not in statement and "FROM" in statement:
            how = "(ANALYZE, FORMAT JSON) " if store.backend.name == "postgresql" else "QUERY PLAN "
            cursor.execute(f"EXPLAIN {how}{statement}", parameters)
            found.append(cursor.fetchall())

    event.listen(store.engine, "before_cursor_execute", explain)
    try:
        yield found
    finally:
        event.remove(store.engine, "before_cursor_execute", explain)


def rows_touched(plan):
    """Return how many rows the scans of a plan of PostgreSQL have looked at."""
    own = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0) if "Scan" in plan["Node Type"] else 0
    return own * plan["Actual Loops"] + sum(rows_touched(inner) for inner in plan.get("Plans", ()))


def old_and_fresh(table, clock, partition_ids):
    """Yield rows of which DUE are old."""
    for number in range(FRESH + DUE):
        now_ms = clock.now_ms()
        at_ms = now_ms - 30 * DAY_MS if number >= FRESH else now_ms
        if table is producer_states:
            yield state(partition_ids[number % 2], number, at_ms)
        elif table is offset_producers:
            yield {"producer_id": number, "producer_epoch": 0, "last_update_ms": at_ms}
        elif table is transactions:
            yield {
                "transactional_id": f"id-{number}",
                "producer_id": number,
                "previous_producer_id": -1,
                "next_producer_id": -1,
                "producer_epoch": 0,
                "last_producer_epoch": -1,
                "timeout_ms": 1,
                "state": 0,
                "start_ms": -1,
                "last_update_ms": at_ms,
                "transaction_number": 0,
                "begin_epoch": -1,
            }
        elif table is group_members:
            yield {
                "group_id": f"group-{number}",
                "member_id": "member",
                "client_id": "client",
                "generation": 1,
                "session_timeout_ms": 45_000,
                "deadline_ms": at_ms + 40_000,
                "subscription": "{}",
                "assignment": "{}",
            }
        else:
            # The journal is in the order of its entries.
            yield entry(number, now_ms if number >= DUE else now_ms - 30 * DAY_MS)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("table", "duty", "index"),
    [
        (producer_states, expire_producers, "producer_states_age"),
        (offset_producers, expire_producers, "offset_producers_age"),
        (transactions, expire_transactional_ids, "transactions_age"),
        (transaction_log, trim_journal, "PRIMARY KEY"),
        (group_members, lambda store: expire_silent_members(store, groups_max=100), "group_members_deadline"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_is_not_due_is_not_looked_at(store, clock, partition_ids, table, duty, index):
    fill(store, table, old_and_fresh(table, clock, partition_ids))
    if table is group_members:
        fill(
            store,
            groups,
            (
                {"group_id": f"group-{n}", "generation": 1, "commit_number": 0, "last_update_ms": 1}
                for n in range(FRESH, FRESH + DUE)
            ),
        )
    if store.backend.name == "postgresql":
        store.write(lambda connection: connection.execute(text("ANALYZE")))
    before = count(store, table)
    with plans(store) as found:
        duty(store)
    assert count(store, table) == before - DUE
    named = str(table.name)
    plans_of_table = [plan for plan in found if named in str(plan)]
    assert plans_of_table
    for rows in plans_of_table:
        if store.backend.name == "sqlite":
            assert not any(str(row[-1]).startswith(f"SCAN txnstore_{named}") for row in rows), rows
        else:
            (plan,) = rows[0][0] if not isinstance(rows[0][0], str) else json.loads(rows[0][0])
            # A look at the journal reads so many entries at once.
            assert rows_touched(plan["Plan"]) <= (2 * FOUND_MAX if table is transaction_log else 10 * DUE), plan
    if store.backend.name == "sqlite":
        assert any(index in str(rows) for rows in plans_of_table), plans_of_table


#: How old entries of the journal are, by what their clocks said: of before the trimming, of yesterday, of next year.
OLD, YOUNG, AHEAD = 30 * DAY_MS, DAY_MS, -400 * DAY_MS


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("ages_ms", "trimmed"),
    [
        ([AHEAD] + 1_499 * [OLD], 1_500),
        (700 * [OLD] + [AHEAD] + 100 * [OLD] + 300 * [YOUNG] + 10 * [OLD], 801),
        # As many as a look finds, and more.
        (1_201 * [AHEAD] + 10 * [OLD] + [YOUNG], 1_211),
        # Nothing says of these that they are old.
        (700 * [OLD] + 5 * [AHEAD] + [YOUNG] + 10 * [OLD], 700),
        (700 * [OLD] + 700 * [AHEAD] + [YOUNG, OLD], 700),
        (600 * [AHEAD], 0),
        (10 * [OLD] + 600 * [AHEAD], 10),
        ([AHEAD, YOUNG, OLD], 0),
    ],
)
def test_entries_by_a_clock_that_was_ahead_are_trimmed_with_older_ones_after_them(store, clock, ages_ms, trimmed):
    now_ms = clock.now_ms()
    fill(store, transaction_log, (entry(number, now_ms - age_ms) for number, age_ms in enumerate(ages_ms)))
    left = []
    while trim_journal(store):
        left.append(count(store, transaction_log))
    assert count(store, transaction_log) == len(ages_ms) - trimmed
    numbers = select(transaction_log.c.transaction_number).order_by(transaction_log.c.entry_id)
    found = store.read(lambda connection: list(connection.execute(numbers).scalars()))
    assert found == list(range(trimmed, len(ages_ms)))
    # A look takes no more for those.
    assert len(left) == -(-trimmed // 500)


def test_deleting_below_the_log_start_takes_no_more_than_that(store, partition_ids):
    item = Append(partition_ids[0], encode([Record(b"a")]))
    store.write(lambda connection: append(connection, [item] * 5))
    delete_records(store, partition_ids[0], 3)
    assert delete_below_log_start(store, partition_ids[0]) == 0
    assert count(store, record_batches) == 2

"""What the view `records` costs: as much as the batches that a condition leaves, however many there are."""

from __future__ import annotations

import json
import sqlite3

import pytest
from sqlalchemy import insert

from txnstore.db.schema import record_batches
from txnstore.log.codec import encode
from txnstore.log.topics import create_topic
from txnstore.model import Record

PER_BATCH = 20
ROUNDS = 4
BATCHES_PER_ROUND = 150


def lengthen(store, batches):
    """Append batches to the one partition of the topic, past every check: only the view is asked here."""
    (partition_id,) = store.topic.partition_ids
    first = store.batches
    columns = encode([Record(b"value %d" % n, b"key", n) for n in range(PER_BATCH)]).columns()
    rows = [
        {
            **columns,
            "partition_id": partition_id,
            "base_offset": number * PER_BATCH,
            "last_offset": number * PER_BATCH + PER_BATCH - 1,
            "running_max_timestamp_ms": number,
            "segment": 1,
        }
        for number in range(first, first + batches)
    ]
    store.write(lambda connection: connection.execute(insert(record_batches), rows))
    store.batches = first + batches


@pytest.fixture
def log_of(request):
    """A store on one database with one topic, ready to be lengthened."""

    def make(database):
        store = request.getfixturevalue(f"txnstore_{database}_store")
        store.topic = store.write(lambda connection: create_topic(connection, "orders"))
        store.batches = 0
        return store

    return make


def range_of(view, first, last):
    return (
        f"SELECT count(*), sum(length(value)) FROM {view} WHERE topic = 'orders' AND partition = 0"
        f" AND batch_last_offset >= {first} AND batch_base_offset < {last}"
        f' AND "offset" >= {first} AND "offset" < {last}'
    )


def sqlite_instructions(path, statement):
    """How many instructions of its machine SQLite needs; in steps of ten."""
    steps = 0

    def count():
        nonlocal steps
        steps += 1

    connection = sqlite3.connect(path)
    connection.set_progress_handler(count, 10)
    rows = connection.execute(statement).fetchall()
    connection.close()
    return steps * 10, rows


def test_sqlite_reads_all_in_time_that_grows_with_the_log_and_a_range_in_time_that_does_not(log_of):
    store = log_of("sqlite")
    path = store.url.url.database
    whole, part = [], []
    for _ in range(ROUNDS):
        lengthen(store, BATCHES_PER_ROUND)
        count, rows = sqlite_instructions(path, "SELECT count(*), sum(length(value)) FROM txnstore_records")
        assert rows[0][0] == store.batches * PER_BATCH
        whole.append(count / store.batches)
        end = store.batches * PER_BATCH
        count, rows = sqlite_instructions(path, range_of("txnstore_records", end - 90, end - 50))
        assert rows[0][0] == 40
        part.append(count)
    assert max(whole) < 1.05 * min(whole), whole
    assert max(part) < 1.05 * min(part), part
    assert max(part) < 6 * max(whole), "more than the few batches of the range was opened"


def test_the_measure_of_sqlite_notices_a_view_that_is_not_pushed_down(log_of):
    store = log_of("sqlite")
    path = store.url.url.database
    part = []
    for _ in range(2):
        lengthen(store, BATCHES_PER_ROUND)
        # No condition on the batches: each is opened to look at its records.
        count, _ = sqlite_instructions(path, 'SELECT count(*) FROM txnstore_records WHERE "offset" BETWEEN 60 AND 70')
        part.append(count)
    assert part[1] > 1.8 * part[0]


def scans(node):
    """Every node of a plan, from the top down."""
    yield node
    for child in node.get("Plans", ()):
        yield from scans(child)


def openings(plan):
    """How often the arrays of a batch were opened."""
    (opened,) = (node for node in scans(plan) if node["Node Type"] == "Result")
    return opened["Actual Loops"]


def postgresql_plan(store, statement):
    plan = store.read(
        lambda connection: connection.exec_driver_sql(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}").scalar()
    )
    return (json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"]


def test_postgresql_finds_a_range_by_the_primary_key_and_opens_nothing_else(log_of):
    store = log_of("postgresql")
    touched, opened = [], []
    for _ in range(ROUNDS):
        lengthen(store, BATCHES_PER_ROUND)
        # The planner's own choice, once it knows the table.
        store.write(lambda connection: connection.exec_driver_sql("ANALYZE txnstore.record_batches"))
        end = store.batches * PER_BATCH
        plan = postgresql_plan(store, range_of("txnstore.records", end - 90, end - 50))
        (scan,) = (node for node in scans(plan) if node.get("Relation Name") == "record_batches_1")
        assert "last_offset" in scan["Index Cond"]
        assert "partition_id" in scan["Index Cond"]
        assert scan["Index Name"] == "record_batches_1_pk"
        touched.append(scan["Shared Hit Blocks"] + scan["Shared Read Blocks"])
        opened.append(openings(plan))
    assert max(touched) <= min(touched) + 3, touched
    assert max(opened) <= 4, opened


def test_postgresql_reads_all_opening_each_batch_once(log_of):
    store = log_of("postgresql")
    for _ in range(2):
        lengthen(store, BATCHES_PER_ROUND)
        plan = postgresql_plan(store, "SELECT count(*), sum(length(value)) FROM txnstore.records")
        assert openings(plan) == store.batches
        (scan,) = (node for node in scans(plan) if node.get("Relation Name") == "record_batches_1")
        assert scan["Actual Loops"] * scan["Actual Rows"] == store.batches

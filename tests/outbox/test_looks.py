"""What a look at the outbox costs: few rows, however many were refused, and no statement of an idle consumer's own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlalchemy import event, text

from tests.clients.consumer.log_writer import PATIENCE_SECONDS, eventually, polled_until
from txnstore import Consumer, TopicPartition
from txnstore.clients.consumer import reader
from txnstore.log.bounds import read_bounds
from txnstore.log.news import read_news
from txnstore.log.outbox.rows import (
    callers_going_on,
    first_waiting_id,
    has_outbox_rows,
    last_ids_of_callers,
    last_waiting_id,
    list_rows,
    next_before_others,
)
from txnstore.log.topics import create_topic

REFUSED_ROWS = 300_000
TOUCHED_ROWS_MAX = 10
#: SQLite counts no rows: a scan of one row takes a few instructions.
INSTRUCTIONS_MAX = 2_000


@pytest.fixture
def partition_id(store):
    return store.write(lambda connection: create_topic(connection, "t")).partition_ids[0]


def refuse(store, connection):
    """Insert many rows that cannot be records; nobody has counted them yet."""
    if store.backend.name == "sqlite":
        numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :count)"
        table, source = "txnstore_outbox", "n"
    else:
        numbers, table, source = "", "txnstore.outbox", "generate_series(1, :count)"
    insert = f"{numbers} INSERT INTO {table} (topic, refusal) SELECT 't', 'no topic' FROM {source}"
    connection.execute(text(insert), {"count": REFUSED_ROWS})


def touched_rows(plan: dict[str, Any]) -> int:
    rows = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)
    return int(rows * plan["Actual Loops"]) + sum(map(touched_rows, plan.get("Plans", ())))


@pytest.mark.slow
def test_refused_rows_cost_a_look_nothing(store, partition_id):
    store.write(lambda connection: refuse(store, connection))
    asked: list[tuple[str, Any]] = []

    def note(connection, cursor, statement, parameters, context, many):
        asked.append((statement, parameters))

    def look(connection):
        event.listen(store.engine, "before_cursor_execute", note)
        try:
            assert not has_outbox_rows(connection)
            assert first_waiting_id(connection) is last_waiting_id(connection) is None
            assert not read_bounds(connection, [partition_id], asks_outbox=True)[partition_id].outbox_waits
            assert not list_rows(connection).rows
            assert not callers_going_on(connection, [5, None], 0)
            assert not last_ids_of_callers(connection)
            assert next_before_others(connection, 0) is None
        finally:
            event.remove(store.engine, "before_cursor_execute", note)
        assert len(asked) == 9
        for statement, parameters in asked:
            check(connection, statement, parameters)

    def check(connection, statement, parameters):
        if store.backend.name == "postgresql":
            found = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters).scalar_one()
            plan = json.loads(found) if isinstance(found, str) else found
            assert touched_rows(plan[0]["Plan"]) <= TOUCHED_ROWS_MAX, plan
            return
        driver = connection.connection.driver_connection
        instructions = 0

        def count():
            nonlocal instructions
            instructions += 1

        driver.set_progress_handler(count, 1)
        try:
            connection.exec_driver_sql(statement, parameters).all()
        finally:
            driver.set_progress_handler(None, 0)
        assert 0 < instructions <= INSTRUCTIONS_MAX, statement

    store.read(look)
    if store.backend.name == "postgresql":
        asked.clear()
        with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("ANALYZE txnstore.outbox"))
        store.read(look)


def test_an_idle_consumer_looks_at_the_outbox_while_it_looks_for_records(store, partition_id, url, caller, monkeypatch):
    settings = {"bootstrap.servers": url, "group.id": "g", "auto.offset.reset": "earliest", "fetch.wait.max.ms": 100}
    statements: list[str] = []
    by_itself: list[str] = []

    def noted(run, *arguments):
        def note(statement, parameters):
            statements.append(str(statement.statement))
            return run(statement, parameters)

        return read_news(note, *arguments)

    def note_by_itself(connection, cursor, statement, parameters, context, many):
        if "outbox" in statement and "partition_heads" not in statement:
            by_itself.append(statement)

    with Consumer(settings) as consumer:
        consumer.assign([TopicPartition("t", 0)])
        polled_until(consumer, lambda: _is_at_end(consumer))
        engine = consumer._core.connection.store().engine
        event.listen(engine, "before_cursor_execute", note_by_itself)
        monkeypatch.setattr(reader, "read_news", noted)
        eventually(lambda: len(statements) >= 3)
        event.remove(engine, "before_cursor_execute", note_by_itself)
        assert by_itself == []
        assert all("outbox" in statement and "partition_heads" in statement for statement in statements)
        # And what it finds becomes a record.
        caller().insert(b"ordered").commit()
        message = consumer.poll(PATIENCE_SECONDS)
        assert message is not None
        assert message.value() == b"ordered"


def _is_at_end(consumer):
    with consumer._core.arrived:
        return all(partition.is_at_end for partition in consumer._core.subscription)

"""A commit with an enlisted connection that is cut, fails at the disk, or dies: row, record and offset, or none."""

from __future__ import annotations

import itertools
import random
import sqlite3
import time
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection
from sqlalchemy.orm import Session

from tests.clients.callers import calling, ledger_of, make_ledger
from tests.clients.consumer.log_writer import eventually
from tests.clients.membership.steps import TP
from tests.clients.moments import attempt, every_interrupt, is_no_moment_for_signals
from tests.clients.producer import enlist_children
from tests.clients.producer.enlist_children import TOPIC, TRANSACTIONAL_ID
from tests.clients.steps import PATIENCE_SECONDS, create_topic, error_of, read_to_end, values
from tests.databases import on_sqlite_alone
from tests.tools.crashes import When, every_crash
from tests.tools.fork_server import fork_server
from tests.tools.killed_children import kill_at
from tests.tools.proxy import Proxy, upstream_of
from txnstore import OFFSET_INVALID, Consumer, KafkaError, Producer
from txnstore.clients.producer import enlistment as enlisted_transactions
from txnstore.db import store as stores
from txnstore.db.callers import connections as joined_cursors
from txnstore.db.callers.connections import callers_connection
from txnstore.db.callers.enlisted import EnlistedConnection
from txnstore.db.opening import open_store
from txnstore.testing.invariants import assert_sound
from txnstore.transactions.coordinator import TransactionCoordinator

NUMBER = 7


@pytest.fixture
def bank(url):
    """A store with the topic and the application's table."""
    create_topic(url, TOPIC)
    make_ledger(url)
    return url


def found(url):
    """Return the rows, the committed records, and the offset of the group."""
    consumer = Consumer({"bootstrap.servers": url, "group.id": "readers"})
    offset = consumer.committed([TP(TOPIC, 0)], PATIENCE_SECONDS)[0].offset
    consumer.close()
    records = [value.decode() for value in values(read_to_end(url, TOPIC)) if value is not None]
    return ledger_of(url), records, offset


NOTHING: tuple[list[str], list[str], int] = ([], [], OFFSET_INVALID)
ALL_OF_IT = ([str(NUMBER)], [str(NUMBER)], NUMBER)


# --- cut --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow_but_first
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("kind", ["driver", "core", "orm"])
def test_a_connection_that_is_cut_at_the_commit(txnstore_postgresql_url, kind, side):
    url = txnstore_postgresql_url
    create_topic(url, TOPIC)
    make_ledger(url)
    producer = Producer({"bootstrap.servers": url, "transactional.id": "anna"})
    producer.init_transactions(PATIENCE_SECONDS)
    with Proxy(upstream_of(url)) as proxy, calling(proxy.url(url), kind) as caller:
        producer.begin_transaction()
        producer.enlist(caller.given)
        caller.write("1")
        producer.produce(TOPIC, b"1", partition=0)
        cut = proxy.cut(**{side: "COMMIT"})
        if side == "after":
            producer.commit_transaction(PATIENCE_SECONDS)
        else:
            error = error_of(producer.commit_transaction, PATIENCE_SECONDS)
            assert (error.code(), error.txn_requires_abort()) == (KafkaError._TRANSPORT, True)
            assert "nothing was committed" in error.str()
            producer.abort_transaction(PATIENCE_SECONDS)
        eventually(lambda: cut.fired)
        landed = ["1"] if side == "after" else []
        assert found(url) == (landed, landed, OFFSET_INVALID)
        # Everything goes on; SQLAlchemy's objects get a new connection by themselves.
        if kind != "driver":
            producer.begin_transaction()
            producer.enlist(caller.given)
            caller.write("2")
            producer.produce(TOPIC, b"2", partition=0)
            producer.commit_transaction(PATIENCE_SECONDS)
            assert found(url) == ([*landed, "2"], [*landed, "2"], OFFSET_INVALID)
    producer.close()


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("step", "at_once"),
    [
        ("INSERT INTO ledger", True),
        ('SELECT "txnstore".commit_transaction_within($1,', True),
        ("UPDATE txnstore.transactions", False),
        ("UPDATE txnstore.partition_heads", False),
    ],
)
def test_a_connection_that_is_cut_before_the_commit(txnstore_postgresql_url, monkeypatch, step, at_once):
    url = txnstore_postgresql_url
    monkeypatch.setattr(stores, "COMMITS_WHOLE", at_once)
    create_topic(url, TOPIC)
    make_ledger(url)
    producer = Producer({"bootstrap.servers": url, "transactional.id": "anna"})
    producer.init_transactions(PATIENCE_SECONDS)
    with Proxy(upstream_of(url)) as proxy, calling(proxy.url(url), "core") as caller:
        producer.begin_transaction()
        producer.enlist(caller.given)
        producer.produce(TOPIC, b"1", partition=0)
        cut = proxy.cut(before=step)
        if step.endswith("ledger"):
            with pytest.raises(Exception, match="closed"):
                caller.write("1")
        else:
            caller.write("1")
        error = error_of(producer.commit_transaction, PATIENCE_SECONDS)
        assert error.txn_requires_abort()
        # The proxy cuts before it says so.
        eventually(lambda: cut.fired)
        producer.abort_transaction(PATIENCE_SECONDS)
    producer.begin_transaction()
    producer.produce(TOPIC, b"2", partition=0)
    producer.commit_transaction(PATIENCE_SECONDS)
    producer.close()
    assert found(url) == ([], ["2"], OFFSET_INVALID)


def test_the_database_is_away_when_it_is_asked_what_became_of_it(txnstore_postgresql_url):
    """commit_transaction() runs into its timeout; the next one takes the question up."""
    url = txnstore_postgresql_url
    create_topic(url, TOPIC)
    make_ledger(url)
    with Proxy(upstream_of(url)) as own, Proxy(upstream_of(url)) as his, calling(his.url(url), "core") as caller:
        producer = Producer({"bootstrap.servers": own.url(url), "transactional.id": "anna"})
        producer.init_transactions(PATIENCE_SECONDS)
        with producer.transaction(PATIENCE_SECONDS):
            producer.produce(TOPIC, b"0", partition=0)
        producer.begin_transaction()
        producer.enlist(caller.given)
        caller.write("1")
        producer.produce(TOPIC, b"1", partition=0)
        lost = his.cut(after="COMMIT")
        own.refuse_connections()
        own.cut_connections()
        error = error_of(producer.commit_transaction, 0.3)
        assert (error.code(), error.retriable(), lost.fired) == (KafkaError._TIMED_OUT, True, True)
        # Nothing else is allowed until that is known.
        assert error_of(producer.abort_transaction, 0).code() == KafkaError._CONFLICT
        own.accept_connections()
        producer.commit_transaction(PATIENCE_SECONDS)
        with producer.transaction(PATIENCE_SECONDS):
            producer.produce(TOPIC, b"2", partition=0)
        producer.close()
    assert found(url) == (["1"], ["0", "1", "2"], OFFSET_INVALID)


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["core", "driver"])
def begun(bank, request):
    """A producer and a connection with one row and one record that wait for their commit."""
    producer = Producer({"bootstrap.servers": bank, "transactional.id": "anna"})
    producer.init_transactions(PATIENCE_SECONDS)
    with calling(bank, request.param) as caller:
        producer.begin_transaction()
        producer.enlist(caller.given)
        caller.write("1")
        producer.produce(TOPIC, b"1", partition=0)
        yield producer
    producer.close()


@pytest.mark.slow_but_first
def test_an_interrupt_before_the_commit_leaves_it_to_be_aborted(begun, bank, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(enlisted_transactions, "end_whole_within", interrupt)
        patch.setattr(enlisted_transactions, "end_within", interrupt)
        with pytest.raises(KeyboardInterrupt):
            begun.commit_transaction(PATIENCE_SECONDS)
    begun.abort_transaction(PATIENCE_SECONDS)
    assert found(bank) == NOTHING


@pytest.mark.slow_but_first
@pytest.mark.parametrize("side", ["before", "after"])
def test_an_interrupt_in_the_commit_leaves_it_to_be_asked_for_again(begun, bank, monkeypatch, side):
    send = EnlistedConnection._send_commit

    def interrupt(*arguments):
        if side == "after":
            send(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(EnlistedConnection, "_send_commit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            begun.commit_transaction(PATIENCE_SECONDS)
    refused = error_of(begun.begin_transaction)
    # That nothing was committed may have been found out by then.
    is_known = side == "before" and refused.txn_requires_abort()
    assert is_known or refused.code() in (KafkaError._CONFLICT, KafkaError._STATE)
    if side == "after":
        begun.commit_transaction(PATIENCE_SECONDS)
        assert found(bank) == (["1"], ["1"], OFFSET_INVALID)
    else:
        assert error_of(begun.commit_transaction, PATIENCE_SECONDS).txn_requires_abort()
        begun.abort_transaction(PATIENCE_SECONDS)
        assert found(bank) == NOTHING
    begun.begin_transaction()


@pytest.mark.parametrize("kind", ["core", "orm"])
def test_a_connection_that_could_not_be_dropped_is_dropped_by_the_next_call(bank, monkeypatch, kind):
    owner: Any = Connection if kind == "core" else Session

    def without_memory(*_):
        raise MemoryError

    with open_store(bank) as store, calling(bank, kind) as caller:
        caller.write("lost")
        taken = EnlistedConnection(store, callers_connection(caller.given), AssertionError)
        taken.take()
        with monkeypatch.context() as patch:
            patch.setattr(owner, "invalidate", without_memory)
            with pytest.raises(MemoryError):
                taken.abandon()
        was_given_up = taken.callers.is_given_up
        taken.abandon()
        assert (was_given_up, taken.callers.is_given_up) == (False, True)
        caller.rollback()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", ["core", "orm"])
@pytest.mark.parametrize("side", ["before", "after"])
def test_what_is_begun_after_a_connection_was_dropped_is_not_dropped(bank, monkeypatch, kind, side):
    """However often an interrupt comes as it is dropped, it is; the producer asks for that again later."""
    owner: Any = Connection if kind == "core" else Session
    invalidate, interrupts = owner.invalidate, [KeyboardInterrupt] * 3

    def interrupted(*arguments):
        if side == "after" or not interrupts:
            invalidate(*arguments)
        if interrupts:
            raise interrupts.pop()

    with open_store(bank) as store, calling(bank, kind) as caller:
        caller.write("lost")
        taken = EnlistedConnection(store, callers_connection(caller.given), AssertionError)
        taken.take()
        with monkeypatch.context() as patch:
            patch.setattr(owner, "invalidate", interrupted)
            with pytest.raises(KeyboardInterrupt):
                taken.abandon()
        assert taken.callers.is_given_up
        caller.rollback()
        caller.write("since")
        taken.abandon()
        caller.commit()
    assert ledger_of(bank) == ["since"]


# --- the disk ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_commit_that_sqlite_cannot_sync_is_resolved(txnstore_sqlite_url, monkeypatch, side):
    """What the disk has of it may come back after a crash: the next write decides."""
    url = txnstore_sqlite_url
    create_topic(url, TOPIC)
    make_ledger(url)
    producer = Producer({"bootstrap.servers": url, "transactional.id": "anna"})
    producer.init_transactions(PATIENCE_SECONDS)

    class FailingCursor(sqlite3.Cursor):
        def execute(self, statement, *arguments):
            if statement != "COMMIT":
                return super().execute(statement, *arguments)
            super().execute("COMMIT" if side == "after" else "ROLLBACK")
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorname = "SQLITE_IOERR_FSYNC"
            raise error

    with calling(url, "driver") as caller:
        producer.begin_transaction()
        producer.enlist(caller.given)
        caller.write("1")
        producer.produce(TOPIC, b"1", partition=0)
        with monkeypatch.context() as patch:
            connections = joined_cursors._PlainSQLiteConnection
            patch.setattr(connections, "cursor", lambda callers: FailingCursor(callers.driver))
            if side == "after":
                producer.commit_transaction(PATIENCE_SECONDS)
            else:
                assert error_of(producer.commit_transaction, PATIENCE_SECONDS).txn_requires_abort()
                producer.abort_transaction(PATIENCE_SECONDS)
    landed = ["1"] if side == "after" else []
    assert found(url) == (landed, landed, OFFSET_INVALID)
    producer.begin_transaction()
    producer.produce(TOPIC, b"2", partition=0)
    producer.commit_transaction(PATIENCE_SECONDS)
    producer.close()
    assert found(url)[1] == [*landed, "2"]


def test_an_answer_of_rollback_to_commit_is_no_commit(txnstore_postgresql_url, monkeypatch):
    """PostgreSQL says so without an error: the tag is looked at."""
    url = txnstore_postgresql_url
    create_topic(url, TOPIC)
    make_ledger(url)
    producer = Producer({"bootstrap.servers": url, "transactional.id": "anna"})
    producer.init_transactions(PATIENCE_SECONDS)
    execute = joined_cursors.PsycopgCursor.execute

    def poison(cursor, statement, *arguments, **options):
        if statement == "COMMIT":
            with pytest.raises(psycopg.Error):
                execute(cursor, "SELECT 1 FROM nowhere")
        return execute(cursor, statement, *arguments, **options)

    with calling(url, "driver") as caller:
        producer.begin_transaction()
        producer.enlist(caller.given)
        caller.write("1")
        producer.produce(TOPIC, b"1", partition=0)
        with monkeypatch.context() as patch:
            patch.setattr(joined_cursors.PsycopgCursor, "execute", poison)
            assert error_of(producer.commit_transaction, PATIENCE_SECONDS).txn_requires_abort()
        producer.abort_transaction(PATIENCE_SECONDS)
    producer.close()
    assert found(url) == NOTHING


# --- kill -9 ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_that_is_killed_at_any_statement(bank):
    """And the next one, in its recovery: whatever it finds, it is all or nothing, and stays so."""
    states = []
    has_written = False
    for step in itertools.count(1):
        point = kill_at(step, When.BEFORE, enlist_children.transfer, (bank, NUMBER), prepare=enlist_children.prepare)
        assert point is not None, "it came to its end without a COMMIT"
        states.append(found(bank))
        assert states[-1] == NOTHING, point
        has_written |= "INSERT INTO ledger" in point.statement
        # Before its row, what is committed was only read.
        if has_written and point.statement == "COMMIT":
            break
    assert len(states) > 10
    recover_with_crashes(bank, NOTHING)
    assert kill_at(step, When.AFTER, enlist_children.transfer, (bank, NUMBER), prepare=enlist_children.prepare)
    assert found(bank) == ALL_OF_IT
    recover_with_crashes(bank, ALL_OF_IT)
    producer, engine, _ = enlist_children.prepare((bank, NUMBER))
    enlist_children.transfer((producer, engine, NUMBER + 1))
    producer.close()
    engine.dispose()
    rows, records, offset = found(bank)
    assert (rows, records, offset) == ([str(NUMBER), str(NUMBER + 1)], [str(NUMBER), str(NUMBER + 1)], NUMBER + 1)
    with open_store(bank) as store:
        assert_sound(store)


def recover_with_crashes(url, state):
    """Let one process after another die in the recovery, at each statement."""
    for crash in every_crash(lambda: open_store(url), take_over, statements_are_all=True):
        assert found(url) == state, crash


def take_over(store):
    TransactionCoordinator(store).init_producer_id(TRANSACTIONAL_ID)


@pytest.mark.slow
def test_processes_that_are_killed_all_the_time(bank):
    """A row if and only if its record, and the offset behind both."""
    chance = random.Random(1)
    context = fork_server()
    begun = 0
    for _ in range(5):
        child = context.Process(target=enlist_children.transfer_without_end, args=((bank, begun),), daemon=True)
        child.start()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(ledger_of(bank)) <= begun and time.monotonic() < deadline:
            child.join(0.005)
        child.join(chance.uniform(0, 0.1))
        child.kill()
        child.join()
        child.close()
        producer, engine, _ = enlist_children.prepare((bank, 0))
        producer.close()
        engine.dispose()
        rows, records, offset = found(bank)
        assert sorted(map(int, rows)) == list(range(len(rows)))
        assert records == [str(number) for number in range(len(rows))]
        assert offset == len(rows) - 1
        assert len(rows) > begun, "nothing was committed before the kill"
        begun = len(rows)


@on_sqlite_alone
def test_an_interrupt_while_branches_are_ended_keeps_nobody_from_ending_them_later(make_producer):
    producer = make_producer({"transactional.id": TRANSACTIONAL_ID})
    branches = enlisted_transactions.EnlistedBranches(producer._progress)
    for _, moment in every_interrupt({"producer/enlistment.py"}, is_no_moment_for_signals):
        attempt(moment, branches.settle)
        assert branches._ends_branches.acquire(blocking=False), moment.where
        branches._ends_branches.release()

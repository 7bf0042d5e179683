"""Enlisted connections that are used otherwise than they may be: nothing is committed, or rows and records alike."""

from __future__ import annotations

import contextlib
import gc
import os
import sqlite3
import threading
from functools import partial

import psycopg
import pytest
from sqlalchemy import delete, event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from tests.clients.callers import application_engine, calling
from tests.clients.consumer.log_writer import eventually
from tests.clients.membership.steps import TP
from tests.clients.producer.enlisting import *  # noqa: F403 - the fixtures
from tests.clients.producer.enlisting import committed_values, is_there, numbers, rows_of
from tests.clients.steps import PATIENCE_SECONDS, Refusal, create_topic, error_of, refusal_of
from txnstore import Consumer, KafkaError, KafkaException, Producer
from txnstore.clients.producer import enlistment
from txnstore.db.callers import enlisted
from txnstore.db.opening import open_store
from txnstore.db.schema import transactions
from txnstore.errors import UnknownMember
from txnstore.log.topics import delete_topic
from txnstore.transactions.outcome import end_within

# --- the caller's own endings -----------------------------------------------------------------------------------------


@pytest.mark.slow_but_first
@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_the_callers_own_ending_is_refused(producer, any_caller, url, topic, entry, ending):
    if any_caller.is_sqlite and any_caller.kind.endswith("driver"):
        pytest.skip("sqlite3's own type takes no guard: seen when the producer commits")
    producer.begin_transaction()
    producer.enlist(any_caller.given)
    any_caller.write(entry)
    producer.produce(topic, b"1")
    error = error_of(getattr(any_caller, ending))
    verb, call = ("commits it", "commit") if ending == "commit" else ("rolls it back", "abort")
    told = f"the producer {verb} with its own, by {call}_transaction()"
    assert (error.code(), told in error.str()) == (KafkaError._STATE, True)
    # Nothing has happened: it goes on.
    any_caller.write(f"{entry} more")
    producer.commit_transaction(PATIENCE_SECONDS)
    assert (is_there(url, entry), is_there(url, f"{entry} more")) == (True, True)
    assert committed_values(url, topic) == [b"1"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK", "COMMIT; BEGIN", "ROLLBACK; BEGIN"])
def test_an_ending_behind_the_guards_is_seen_before_anything_is_decided(producer, url, topic, entry, ending):
    with calling(url, "driver") as caller:
        producer.begin_transaction()
        producer.enlist(caller.given)
        caller.write(entry)
        producer.produce(topic, b"1")
        for statement in ending.split("; "):
            caller.given.execute(statement)
        error = error_of(producer.commit_transaction, PATIENCE_SECONDS)
        assert error.txn_requires_abort()
        assert "by its owner" in error.str()
        assert committed_values(url, topic) == []
        producer.abort_transaction(PATIENCE_SECONDS)
        assert is_there(url, entry) == ending.startswith("COMMIT")
    assert committed_values(url, topic) == []


def test_the_methods_of_sqlite3_itself_are_seen_before_anything_is_decided(producer, url, topic, entry):
    if not url.startswith("sqlite"):
        pytest.skip("others are refused at once")
    with calling(url, "driver") as caller:
        for ending in ("commit", "rollback"):
            producer.begin_transaction()
            producer.enlist(caller.given)
            caller.write(f"{entry} {ending}")
            producer.produce(topic, b"1")
            getattr(caller.given, ending)()
            assert "by its owner" in error_of(producer.commit_transaction, PATIENCE_SECONDS).str()
            producer.abort_transaction(PATIENCE_SECONDS)
    assert committed_values(url, topic) == []


def test_a_block_of_the_callers_that_ends_inside_is_refused(producer, url, topic, entry):
    """`with engine.begin()` commits at its end: inside of the producer's block that is too early."""
    engine = application_engine(url)

    def fail():
        with producer.transaction(PATIENCE_SECONDS), engine.begin() as connection:
            producer.enlist(connection)
            connection.execute(text("INSERT INTO ledger VALUES (:entry)"), {"entry": entry})
            producer.produce(topic, b"1")

    with pytest.raises(KafkaException, match="enlisted"):
        fail()
    engine.dispose()
    assert (is_there(url, entry), committed_values(url, topic)) == (False, [])


def test_a_connection_that_its_owner_closes_is_rolled_back_and_so_is_the_rest(producer, url, topic, entry):
    for kind in ("core", "driver", "orm"):
        producer.begin_transaction()
        with calling(url, kind) as caller:
            producer.enlist(caller.given)
            caller.write(f"{entry} {kind}")
            producer.produce(topic, b"1")
        error = error_of(producer.commit_transaction, PATIENCE_SECONDS)
        assert error.txn_requires_abort(), kind
        assert "owner" in error.str()
        producer.abort_transaction(PATIENCE_SECONDS)
        assert not is_there(url, f"{entry} {kind}")
    assert committed_values(url, topic) == []


def test_savepoints_of_the_callers_are_his(producer, url, topic, entry):
    engine = application_engine(url)
    insert = text("INSERT INTO ledger VALUES (:entry)")
    with engine.connect() as connection, producer.transaction(PATIENCE_SECONDS):
        producer.enlist(connection)
        connection.execute(insert, {"entry": entry})
        with pytest.raises(IntegrityError), connection.begin_nested():
            connection.execute(insert, {"entry": entry})
        producer.produce(topic, b"1")
    engine.dispose()
    assert (is_there(url, entry), committed_values(url, topic)) == (True, [b"1"])


def test_a_failed_statement_refuses_the_commit(producer, url, topic, entry):
    """PostgreSQL would answer COMMIT with ROLLBACK, and no error."""
    if url.startswith("sqlite"):
        pytest.skip("a statement that fails does not end SQLite's database transaction")
    for kind in ("driver", "core", "orm"):
        with calling(url, kind) as caller:
            producer.begin_transaction()
            producer.enlist(caller.given)
            caller.write(entry)
            producer.produce(topic, b"1")
            with pytest.raises(Exception, match="nowhere"):
                rows_of(caller, "SELECT 1 FROM nowhere")
            error = error_of(producer.commit_transaction, PATIENCE_SECONDS)
            assert error.txn_requires_abort()
            producer.abort_transaction(PATIENCE_SECONDS)
            caller.write(f"{entry} {kind}")
            caller.commit()
        assert is_there(url, f"{entry} {kind}")
    assert (is_there(url, entry), committed_values(url, topic)) == (False, [])


@pytest.mark.slow_but_first
@pytest.mark.parametrize("autocommit", [False, True])
@pytest.mark.parametrize("end", ["its own", "an exception"])
def test_a_block_of_psycopgs_that_ends_before_the_commit_is_refused(producer, url, topic, entry, autocommit, end):
    """It sends its COMMIT past the connection's own methods."""
    if url.startswith("sqlite"):
        pytest.skip("only psycopg has it")

    def fail(caller):
        caller.given.autocommit = autocommit
        with producer.transaction(PATIENCE_SECONDS), caller.given.transaction():
            producer.enlist(caller.given)
            caller.write(entry)
            producer.produce(topic, b"1")
            if end == "an exception":
                raise ZeroDivisionError

    with calling(url, "driver") as caller:
        with pytest.raises(KafkaException if end == "its own" else ZeroDivisionError) as caught:
            fail(caller)
        if end == "its own":
            assert caught.value.args[0].code() == KafkaError._STATE
            assert "belongs around the producer's block or is begun after enlist()" in caught.value.args[0].str()
        assert (is_there(url, entry), committed_values(url, topic)) == (False, [])
        # Both go on, the connection with blocks of its own.
        with caller.given.transaction():
            caller.write(f"{entry} of its own")
        caller.given.autocommit = False
        with producer.transaction(PATIENCE_SECONDS):
            producer.enlist(caller.given)
            with caller.given.transaction():
                caller.write(entry)
            with contextlib.suppress(ZeroDivisionError), caller.given.transaction():
                caller.write(f"{entry} of a savepoint")
                raise ZeroDivisionError
            producer.produce(topic, b"2")
    assert (is_there(url, entry), committed_values(url, topic)) == (True, [b"2"])
    assert (is_there(url, f"{entry} of its own"), is_there(url, f"{entry} of a savepoint")) == (True, False)


def test_psycopgs_own_two_phase_calls_are_refused(producer, url, topic, entry):
    if url.startswith("sqlite"):
        pytest.skip("only psycopg has them")
    with calling(url, "driver") as caller:
        driver = caller.given
        producer.begin_transaction()
        driver.tpc_begin("of its own")
        assert "its own coordinator" in error_of(producer.enlist, driver).str()
        driver.tpc_rollback()
        with driver.transaction(), driver.transaction():
            assert "enlist it in the outer block" in error_of(producer.enlist, driver).str()
        producer.enlist(driver)
        caller.write(entry)
        # As if it had been begun before, behind our back.
        driver._tpc = (driver.xid(1, "of its own", "branch"), False)
        with pytest.raises(KafkaException, match=r"tpc_prepare.*refused"):
            driver.tpc_prepare()
        driver._tpc = None
        producer.produce(topic, b"1")
        producer.commit_transaction(PATIENCE_SECONDS)
    assert (is_there(url, entry), committed_values(url, topic)) == (True, [b"1"])


@pytest.mark.slow_but_first
def test_a_constraint_that_is_deferred_to_the_commit_is_told_as_the_rows_fault(producer, any_caller, url, topic, entry):
    with calling(url, "driver") as caller:
        caller.given.execute("CREATE TABLE IF NOT EXISTS parents (id integer PRIMARY KEY)")
        child = "id integer REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED"
        caller.given.execute(f"CREATE TABLE IF NOT EXISTS children ({child})")
        caller.commit()
    if any_caller.is_sqlite:
        any_caller.driver.execute("PRAGMA foreign_keys = ON")
    producer.begin_transaction()
    producer.enlist(any_caller.given)
    any_caller.write(entry)
    statement = "INSERT INTO children VALUES (7)"
    any_caller.given.execute(statement if any_caller.kind.endswith("driver") else text(statement))
    producer.produce(topic, b"1")
    with pytest.raises(KafkaException) as caught:
        producer.commit_transaction(PATIENCE_SECONDS)
    error = caught.value.args[0]
    assert (error.code(), error.txn_requires_abort()) == (KafkaError._FAIL, True)
    assert "(ForeignKeyViolation)" in error.str() or "(IntegrityError)" in error.str()
    assert "nothing was committed" in error.str()
    assert isinstance(caught.value.__cause__, psycopg.IntegrityError | sqlite3.IntegrityError)
    if any_caller.is_sqlite and any_caller.kind == "driver":
        # Or its owner could mend the row and commit records of which the coordinator does not know.
        assert not any_caller.given.in_transaction
    producer.abort_transaction(PATIENCE_SECONDS)
    any_caller.write(f"{entry} of its own")
    any_caller.commit()
    assert (is_there(url, entry), committed_values(url, topic)) == (False, [])
    assert is_there(url, f"{entry} of its own")


# --- fenced ---------------------------------------------------------------------------------------------------------


def test_a_fenced_producer_commits_no_rows(make_producer, url, topic, entry):
    old = make_producer("fenced one")
    with calling(url, "core") as caller:
        old.begin_transaction()
        if url.startswith("sqlite"):
            # Once the connection holds SQLite's write lock, nobody can take over.
            make_producer("fenced one")
            old.enlist(caller.given)
        else:
            old.enlist(caller.given)
            make_producer("fenced one")
        caller.write(entry)
        old.produce(topic, b"1")
        error = error_of(old.commit_transaction, PATIENCE_SECONDS)
        assert (error.code(), error.fatal()) == (KafkaError._FENCED, True)
        # The connection is its owner's again, rolled back.
        assert not caller.given.in_transaction()
        caller.write(f"{entry} of its own")
        caller.commit()
    assert (is_there(url, entry), committed_values(url, topic)) == (False, [])
    assert is_there(url, f"{entry} of its own")


def test_a_generation_that_has_passed_commits_no_rows(producer, url, topic, entry):
    if url.startswith("sqlite"):
        pytest.skip("while a connection holds SQLite's write lock, no group changes")
    settings = {"group.id": f"group-{next(numbers)}", "enable.auto.commit": False}
    consumer = Consumer({"bootstrap.servers": url, **settings})
    consumer.subscribe([topic])
    while not consumer.assignment():
        consumer.poll(0.01)
    metadata = consumer.consumer_group_metadata()
    with calling(url, "core") as caller:
        producer.begin_transaction()
        producer.enlist(caller.given)
        caller.write(entry)
        producer.produce(topic, b"1")
        producer.send_offsets_to_transaction([TP(topic, 0, 6)], metadata, PATIENCE_SECONDS)
        consumer.close()
        error = error_of(producer.commit_transaction, PATIENCE_SECONDS)
        assert (error.code(), error.txn_requires_abort()) == (KafkaError.UNKNOWN_MEMBER_ID, True)
        producer.abort_transaction(PATIENCE_SECONDS)
    assert (is_there(url, entry), committed_values(url, topic)) == (False, [])


def test_what_a_failed_commit_has_written_does_not_stand_if_the_caller_commits(
    producer, url, topic, entry, monkeypatch
):
    """Neither the rows alone, nor records of which the coordinator does not know."""

    def fail(connection, request):
        end_within(connection, request)
        raise UnknownMember("the group has no such member")

    with calling(url, "driver") as caller:
        producer.begin_transaction()
        producer.enlist(caller.given)
        caller.write(entry)
        producer.produce(topic, b"1")
        with monkeypatch.context() as patch:
            patch.setattr(enlistment, "end_whole_within", lambda *_: None)
            patch.setattr(enlistment, "end_within", fail)
            assert error_of(producer.commit_transaction, PATIENCE_SECONDS).txn_requires_abort()
        caller.commit()
        assert (is_there(url, entry), committed_values(url, topic)) == (False, [])
        producer.abort_transaction(PATIENCE_SECONDS)
    producer.begin_transaction()
    producer.produce(topic, b"2")
    producer.commit_transaction(PATIENCE_SECONDS)
    assert committed_values(url, topic) == [b"2"]


# --- bad inputs -------------------------------------------------------------------------------------------------------


def test_outside_of_a_transaction(producer, caller):
    error = error_of(producer.enlist, caller.given)
    assert error.code() == KafkaError._STATE
    assert error_of(Producer({"bootstrap.servers": "sqlite://"}).enlist, caller.given).code() == (
        KafkaError._NOT_CONFIGURED
    )


@pytest.mark.slow_but_first
@pytest.mark.parametrize("given", [None, 42, "a url", object()], ids=["none", "number", "text", "object"])
def test_what_is_no_connection(producer, url, topic, given):
    producer.begin_transaction()
    with pytest.raises(TypeError, match="expected a Connection or Session of SQLAlchemy"):
        producer.enlist(given)
    # The transaction goes on without it.
    producer.produce(topic, b"1")
    producer.commit_transaction(PATIENCE_SECONDS)
    assert committed_values(url, topic) == [b"1"]


def test_a_second_connection_to_the_same_database(producer, url, topic, entry):
    with calling(url, "core") as caller, calling(url, "core") as other:
        producer.begin_transaction()
        producer.enlist(caller.given)
        producer.enlist(caller.given)
        error = error_of(producer.enlist, other.given)
        assert (error.code(), "enlisted already" in error.str()) == (KafkaError.INVALID_REQUEST, True)
        caller.write(entry)
        producer.commit_transaction(PATIENCE_SECONDS)
    assert is_there(url, entry)


@pytest.mark.slow_but_first
def test_a_connection_that_another_producer_has_enlisted(make_producer, any_caller, url, topic, entry):
    """Both would commit it: the first would commit all of it, and hear of a refusal."""
    first, second = make_producer(), make_producer()
    first.begin_transaction()
    first.enlist(any_caller.given)
    any_caller.write(entry)
    first.produce(topic, b"1")
    second.begin_transaction()
    for given in (any_caller.given, any_caller.driver):
        error = error_of(second.enlist, given)
        assert (error.code(), "another producer" in error.str()) == (KafkaError.INVALID_REQUEST, True)
    first.commit_transaction(PATIENCE_SECONDS)
    assert (is_there(url, entry), committed_values(url, topic)) == (True, [b"1"])
    # The transaction has gone on without it, which is free now.
    second.enlist(any_caller.given)
    any_caller.write(f"{entry} of the second")
    second.produce(topic, b"2")
    second.commit_transaction(PATIENCE_SECONDS)
    assert (is_there(url, f"{entry} of the second"), committed_values(url, topic)) == (True, [b"1", b"2"])


@pytest.mark.slow
@pytest.mark.parametrize("end", ["abort", "close", "close elsewhere", "drop"])
def test_a_connection_is_free_for_another_producer_once_the_first_has_ended(make_producer, url, topic, entry, end):
    for kind in ("core", "orm", "driver"):
        with calling(url, kind) as caller:
            first = Producer({"bootstrap.servers": url, "transactional.id": f"producer-{next(numbers)}"})
            second = make_producer()
            first.init_transactions(PATIENCE_SECONDS)
            first.begin_transaction()
            first.enlist(caller.given)
            if end == "abort":
                first.abort_transaction(PATIENCE_SECONDS)
            elif end == "close":
                first.close()
            elif end == "close elsewhere":
                thread = threading.Thread(target=first.close)
                thread.start()
                thread.join()
                # What is open on it is still its owner's to end.
                caller.rollback()
            second.begin_transaction()
            if end == "drop":
                del first
                # Its thread holds parts of it until it has ended.
                refused = partial(refusal_of, second.enlist, caller.given)
                eventually(lambda refused=refused: gc.collect() >= 0 and refused() is None)
            else:
                second.enlist(caller.given)
            caller.write(f"{entry} {kind}")
            second.produce(topic, kind)
            second.commit_transaction(PATIENCE_SECONDS)
            assert is_there(url, f"{entry} {kind}")
            # It is its owner's again.
            caller.write(f"{entry} {kind} of its own")
            caller.commit()
    assert committed_values(url, topic) == [b"core", b"orm", b"driver"]


def test_a_connection_that_its_owner_gave_back_to_the_pool_is_free_for_another_producer(
    make_producer, url, topic, entry
):
    engine = application_engine(url)
    first, second, third = make_producer(), make_producer(), make_producer()
    first.begin_transaction()
    with engine.connect() as connection:
        first.enlist(connection)
        driver = connection.connection.dbapi_connection
    with engine.connect() as connection:
        assert connection.connection.dbapi_connection is driver
        second.begin_transaction()
        second.enlist(connection)
        # What the first does then is none of the second's business.
        assert "by its owner" in error_of(first.commit_transaction, PATIENCE_SECONDS).str()
        first.abort_transaction(PATIENCE_SECONDS)
        third.begin_transaction()
        assert "another producer" in error_of(third.enlist, connection).str()
        with pytest.raises(KafkaException, match="enlisted"):
            connection.commit()
        connection.execute(text("INSERT INTO ledger VALUES (:entry)"), {"entry": entry})
        second.produce(topic, b"2")
        second.commit_transaction(PATIENCE_SECONDS)
    engine.dispose()
    assert (is_there(url, entry), committed_values(url, topic)) == (True, [b"2"])


def test_a_connection_in_autocommit_mode(producer, url):
    if url.startswith("sqlite"):
        pytest.skip("on SQLite enlist() begins by itself")
    with calling(url, "driver") as caller:
        caller.given.autocommit = True
        producer.begin_transaction()
        error = error_of(producer.enlist, caller.given)
        assert (error.code(), "autocommit" in error.str()) == (KafkaError.INVALID_REQUEST, True)
        producer.abort_transaction(PATIENCE_SECONDS)


def test_a_connection_that_is_read_only_is_refused_at_once(producer, url, topic, entry):
    if url.startswith("sqlite"):
        pytest.skip("an SQLite connection that may not write is refused by SQLite itself")
    with calling(url, "driver") as caller:
        caller.given.read_only = True
        producer.begin_transaction()
        error = error_of(producer.enlist, caller.given)
        assert (error.code(), "read-only" in error.str()) == (KafkaError.INVALID_REQUEST, True)
        assert not error.txn_requires_abort()
        caller.rollback()
        caller.given.read_only = None
        producer.enlist(caller.given)
        caller.write(entry)
        producer.produce(topic, b"1")
        producer.commit_transaction(PATIENCE_SECONDS)
    assert (is_there(url, entry), committed_values(url, topic)) == (True, [b"1"])


def test_another_sqlite_file(producer, tmp_path):
    other = sqlite3.connect(tmp_path / "other.db")
    producer.begin_transaction()
    error = error_of(producer.enlist, other)
    assert (error.code(), "outbox" in error.str()) == (KafkaError.INVALID_REQUEST, True)
    other.close()
    producer.abort_transaction(PATIENCE_SECONDS)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("journal_mode", ["wal", "delete"])
def test_another_file_that_is_attached_is_refused_for_it_commits_apart(
    producer, url, topic, entry, tmp_path, journal_mode
):
    """One that is attached later, too, though its rows are there already: right before the COMMIT."""
    if not url.startswith("sqlite"):
        pytest.skip("SQLite's connections have several files")
    other = tmp_path / "other.db"
    with contextlib.closing(sqlite3.connect(other)) as connection:
        connection.execute(f"PRAGMA journal_mode = {journal_mode}")
        connection.execute("CREATE TABLE orders (item)")
    for when in ("before", "meanwhile"):
        with calling(url, "driver") as caller:
            producer.begin_transaction()
            if when == "meanwhile":
                producer.enlist(caller.given)
            caller.given.execute(f"ATTACH '{other}' AS \"the other's\"")
            if when == "before":
                error = error_of(producer.enlist, caller.given)
                assert not caller.given.in_transaction, "it has begun something"
            else:
                caller.given.execute("INSERT INTO \"the other's\".orders VALUES ('tea')")
                caller.write(entry)
                producer.produce(topic, b"1")
                error = error_of(producer.commit_transaction, PATIENCE_SECONDS)
                assert error.txn_requires_abort()
            assert (error.code(), "the other's" in error.str()) == (KafkaError.INVALID_REQUEST, True)
            assert "keep the tables in the log's own file" in error.str()
            assert "(mode=ro, immutable=1), which SQLite does not reveal: read it on a second connection" in error.str()
            producer.abort_transaction(PATIENCE_SECONDS)
    with contextlib.closing(sqlite3.connect(other)) as connection:
        assert connection.execute("SELECT count(*) FROM orders").fetchone() == (0,)
    assert (is_there(url, entry), committed_values(url, topic)) == (False, [])


def test_what_is_attached_in_memory_is_no_file(producer, url, topic, entry):
    if not url.startswith("sqlite"):
        pytest.skip("SQLite's connections have several files")
    with contextlib.closing(sqlite3.connect(url.replace("sqlite:///", "file:"), uri=True)) as connection:
        connection.execute("ATTACH ':memory:' AS notes")
        connection.execute("ATTACH 'file:/shared?vfs=memdb' AS shared")
        connection.execute("CREATE TEMPORARY TABLE more (item)")
        connection.execute("INSERT INTO more VALUES (1)")
        connection.commit()
        producer.begin_transaction()
        producer.enlist(connection)
        connection.execute("INSERT INTO ledger VALUES (?)", [entry])
        producer.produce(topic, b"1")
        producer.commit_transaction(PATIENCE_SECONDS)
    assert (is_there(url, entry), committed_values(url, topic)) == (True, [b"1"])


def test_a_sqlite_connection_stays_on_its_thread(producer, url, topic, entry):
    if not url.startswith("sqlite"):
        pytest.skip("a connection of psycopg belongs to no thread")
    with calling(url, "driver") as caller:
        producer.begin_transaction()
        producer.enlist(caller.given)
        caller.write(entry)
        producer.produce(topic, b"1")
        refused: list[KafkaError] = []
        thread = threading.Thread(
            target=lambda: refused.extend(
                error_of(call, PATIENCE_SECONDS) for call in (producer.commit_transaction, producer.abort_transaction)
            )
        )
        thread.start()
        thread.join()
        assert [(error.code(), "another thread" in error.str()) for error in refused] == [(KafkaError._STATE, True)] * 2
        producer.commit_transaction(PATIENCE_SECONDS)
    assert (is_there(url, entry), committed_values(url, topic)) == (True, [b"1"])


def test_a_read_that_is_older_than_the_last_commit(producer, url, topic, entry):
    if not url.startswith("sqlite"):
        pytest.skip("only SQLite's readers cannot turn to writing")
    with calling(url, "core") as caller:
        caller.given.exec_driver_sql("BEGIN")
        rows_of(caller, "SELECT count(*) FROM ledger")
        with calling(url, "core") as other:
            other.write(entry)
            other.commit()
        producer.begin_transaction()
        error = error_of(producer.enlist, caller.given)
        assert (error.code(), "BEGIN IMMEDIATE" in error.str()) == (KafkaError._TIMED_OUT, True)
        caller.rollback()
        producer.enlist(caller.given)
        caller.write(f"{entry} again")
        producer.commit_transaction(PATIENCE_SECONDS)
    assert is_there(url, f"{entry} again")


@pytest.mark.slow_but_first
@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("what", ["a topic that is created", "a topic that it creates", "the producer itself"])
def test_a_snapshot_that_is_older_than_what_is_written_to_says_so(make_producer, url, entry, isolation, what):
    """The transaction can be aborted, and goes through if it is begun again."""
    if url.startswith("sqlite"):
        pytest.skip("who has SQLite's write lock sees everything")
    topic = f"topic-{next(numbers)}"
    with calling(url, "core") as caller:
        caller.given.execution_options(isolation_level=isolation)
        if what == "the producer itself":
            create_topic(url, topic)
            rows_of(caller, "SELECT count(*) FROM ledger")
        producer = make_producer()
        producer.begin_transaction()
        producer.enlist(caller.given)
        caller.write(entry)
        if what == "a topic that is created":
            create_topic(url, topic)
        producer.produce(topic, b"1")
        error = error_of(producer.commit_transaction, PATIENCE_SECONDS)
        assert (error.code(), error.txn_requires_abort()) == (KafkaError.TRANSACTION_ABORTABLE, True)
        assert f"{isolation} and sees the database as it was at its first statement" in error.str()
        assert "begin again" in error.str()
        producer.abort_transaction(PATIENCE_SECONDS)
        assert not is_there(url, entry)
        producer.begin_transaction()
        producer.enlist(caller.given)
        caller.write(entry)
        producer.produce(topic, b"2")
        producer.commit_transaction(PATIENCE_SECONDS)
    assert (is_there(url, entry), committed_values(url, topic)) == (True, [b"2"])


@pytest.mark.slow_but_first
@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("what", ["the topic", "the producer itself"])
def test_what_was_deleted_is_not_taken_for_newer_than_a_snapshot(make_producer, url, entry, isolation, what):
    """To begin again would be in vain, for ever."""
    if url.startswith("sqlite"):
        pytest.skip("who has SQLite's write lock sees everything")
    topic = f"topic-{next(numbers)}"
    create_topic(url, topic)
    producer = make_producer()
    with producer.transaction():
        producer.produce(topic, b"1")
    with open_store(url) as store:
        if what == "the topic":
            store.write(lambda connection: delete_topic(connection, topic))
        else:
            store.write(lambda connection: connection.execute(delete(transactions)))
    with calling(url, "core") as caller:
        caller.given.execution_options(isolation_level=isolation)
        producer.begin_transaction()
        producer.enlist(caller.given)
        caller.write(entry)
        producer.produce(topic, b"2")
        error = error_of(producer.commit_transaction, PATIENCE_SECONDS)
    unknown = KafkaError.UNKNOWN_TOPIC_OR_PART if what == "the topic" else KafkaError.INVALID_PRODUCER_ID_MAPPING
    assert (error.code(), "begin again" in error.str()) == (unknown, False)
    assert not is_there(url, entry)


@pytest.mark.parametrize("call", ["transaction_token", "prepare_transaction"])
def test_calls_that_do_not_go_together_with_it(make_producer, caller, call):
    producer = make_producer()
    producer.begin_transaction()
    producer.enlist(caller.given)
    assert error_of(getattr(producer, call)).code() == KafkaError._STATE
    producer.abort_transaction(PATIENCE_SECONDS)


def test_closing_the_producer_gives_the_connection_back(make_producer, url, topic, entry):
    for kind in ("core", "driver", "orm"):
        producer = make_producer()
        with calling(url, kind) as caller:
            producer.begin_transaction()
            producer.enlist(caller.given)
            caller.write(entry)
            producer.produce(topic, b"1")
            producer.close()
            caller.write(f"{entry} {kind}")
            caller.commit()
        assert (is_there(url, entry), is_there(url, f"{entry} {kind}")) == (False, True)
    assert committed_values(url, topic) == []


@pytest.mark.slow_but_first
@pytest.mark.parametrize("moment", ["before_commit", "commit"])
def test_closing_in_another_thread_does_not_part_rows_and_records(make_producer, url, topic, entry, moment):
    """While the session writes what it holds back, nothing is on its way; once it commits, all of it is."""
    engine = application_engine(url)
    producer = make_producer()
    closer = threading.Thread(target=producer.close)
    finish, finished = producer._transactions.finish, threading.Event()

    def finish_and_tell(timeout_seconds):
        try:
            finish(timeout_seconds)
        finally:
            finished.set()

    def close(_):
        if closer.ident is None:
            closer.start()
        assert finished.wait(PATIENCE_SECONDS)

    producer._transactions.finish = finish_and_tell
    with Session(engine) as session:
        event.listen(session if moment == "before_commit" else session.connection(), moment, close)
        producer.begin_transaction()
        producer.enlist(session)
        session.execute(text("INSERT INTO ledger VALUES (:entry)"), {"entry": entry})
        producer.produce(topic, b"1")
        with contextlib.suppress(RuntimeError, KafkaException):
            producer.commit_transaction(PATIENCE_SECONDS)
        closer.join(PATIENCE_SECONDS)
    engine.dispose()
    both = (True, [b"1"]) if moment == "commit" else (False, [])
    assert (is_there(url, entry), committed_values(url, topic)) == both


def test_a_savepoint_that_is_open_on_sqlite_is_refused(producer, url, topic, entry):
    """Its end would commit the rows alone: sqlite3 sends no BEGIN before a savepoint."""
    if not url.startswith("sqlite"):
        pytest.skip("PostgreSQL knows a database transaction from a savepoint")
    engine = application_engine(url)
    with engine.connect() as connection:
        producer.begin_transaction()
        with connection.begin_nested():
            assert error_of(producer.enlist, connection).code() == KafkaError.INVALID_REQUEST
        producer.enlist(connection)
        connection.execute(text("INSERT INTO ledger VALUES (:entry)"), {"entry": entry})
        producer.commit_transaction(PATIENCE_SECONDS)
    engine.dispose()
    assert is_there(url, entry)


class AlwaysInTransaction(sqlite3.Connection):
    """As Python 3.12 makes them with autocommit=False."""

    autocommit = False


def test_a_connection_that_always_has_a_transaction_open_is_refused(producer, url):
    if not url.startswith("sqlite"):
        pytest.skip("sqlite3 has such connections")
    path = url.removeprefix("sqlite:///")
    producer.begin_transaction()
    with contextlib.closing(sqlite3.connect(path, factory=AlwaysInTransaction)) as connection:
        error = error_of(producer.enlist, connection)
    assert (error.code(), "autocommit=False" in error.str()) == (KafkaError.INVALID_REQUEST, True)
    producer.abort_transaction(PATIENCE_SECONDS)


def test_refusals_hold_no_secret(producer, url):
    producer.begin_transaction()
    with calling(url, "driver") as caller:
        caller.given.close()
        refusal = Refusal.of(error_of(producer.enlist, caller.given))
    assert "://" not in (refusal.text or "")
    producer.abort_transaction(PATIENCE_SECONDS)


@pytest.mark.slow
def test_a_child_can_enlist_that_was_forked_while_a_thread_did():
    is_over = threading.Event()

    def look_again_and_again():
        while not is_over.is_set():
            with enlisted._guards_lock:
                # An interpreter has others take turns where it jumps back.
                for _ in range(100):
                    pass

    thread = threading.Thread(target=look_again_and_again)
    thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                os._exit(0 if enlisted._guards_lock.acquire(timeout=PATIENCE_SECONDS) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        is_over.set()
        thread.join(PATIENCE_SECONDS)

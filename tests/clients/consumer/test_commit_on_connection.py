"""Offsets in a caller's own database transaction: with the caller's rows or not at all, and fenced like any commit."""

from __future__ import annotations

import contextlib
import sqlite3
import threading

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from tests.clients.callers import KINDS, application_engine, calling, ledger_of, make_ledger, open_driver
from tests.clients.membership.steps import TP
from tests.clients.steps import PATIENCE_SECONDS, error_of
from txnstore import OFFSET_INVALID, Consumer, KafkaError, KafkaException
from txnstore.db.opening import open_store
from txnstore.db.schema import group_members, group_offsets, groups
from txnstore.errors import WriteConflict
from txnstore.log.topics import delete_topic, find_topics

pytestmark = pytest.mark.least_privilege

BY_HAND = {"enable.auto.commit": False}


class Base(DeclarativeBase):
    """The application's own tables."""


class Nowhere(Base):
    """Its table is not there."""

    __tablename__ = "nowhere"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def url(module_url):
    """One store of each database for all tests, which each leaves as it was."""
    yield module_url
    with open_store(module_url) as store, contextlib.closing(open_driver(module_url)) as driver:
        driver.execute("DROP TABLE IF EXISTS ledger")
        driver.commit()
        for topic in store.read(lambda connection: find_topics(connection, ["t"])):
            store.write(lambda connection, topic=topic: delete_topic(connection, topic.name))
        for table in (groups, group_members, group_offsets):
            store.write(lambda connection, table=table: connection.execute(table.delete()))


@pytest.fixture
def connect(url):
    """Open SQLAlchemy's connections to the application's tables; they are closed after the test."""
    engine = application_engine(url)
    with contextlib.ExitStack() as stack:
        stack.callback(engine.dispose)
        yield lambda **options: stack.enter_context(engine.execution_options(**options).connect())


@pytest.fixture
def worker(url, log, make_consumer):
    """A consumer of one partition with three records that are handed out, next to the application's own table."""
    make_ledger(url)
    log.topic()
    log.write("t", 0, b"0", b"1", b"2")
    consumer = make_consumer(BY_HAND)
    consumer.assign([TP("t", 0, 0)])
    assert len(consumer.consume(3, PATIENCE_SECONDS)) == 3
    return consumer


@pytest.fixture(params=KINDS)
def caller(url, request, worker):
    with calling(url, request.param) as caller:
        yield caller


def committed(consumer):
    return consumer.committed([TP("t", 0)], PATIENCE_SECONDS)[0].offset


# --- with the caller's rows, or not at all ---------------------------------------------------------------------------


@pytest.mark.slow_but_first
def test_offsets_and_rows_are_committed_by_the_callers_commit(worker, caller, url):
    caller.write("row")
    answered = worker.commit(connection=caller.given)
    assert [(tp.topic, tp.partition, tp.offset, tp.error) for tp in answered] == [("t", 0, 3, None)]
    assert (committed(worker), ledger_of(url)) == (OFFSET_INVALID, [])
    caller.commit()
    assert (committed(worker), ledger_of(url)) == (3, ["row"])


@pytest.mark.slow_but_first
def test_the_callers_rollback_takes_both_back_and_the_next_commit_has_both(worker, caller, url):
    caller.write("row")
    worker.commit(connection=caller.given)
    caller.rollback()
    assert (committed(worker), ledger_of(url)) == (OFFSET_INVALID, [])
    # The consumer has not learnt of it, so it offers the same again.
    caller.write("row again")
    worker.commit(connection=caller.given)
    caller.commit()
    assert (committed(worker), ledger_of(url)) == (3, ["row again"])


@pytest.mark.slow_but_first
def test_a_producer_that_has_enlisted_the_connection_commits_the_offsets(worker, make_producer, caller, url):
    producer = make_producer({"transactional.id": "x"})
    producer.init_transactions(PATIENCE_SECONDS)
    with producer.transaction(PATIENCE_SECONDS):
        producer.enlist(caller.given)
        caller.write("row")
        worker.commit(connection=caller.given)
    assert (committed(worker), ledger_of(url)) == (3, ["row"])


@pytest.mark.slow_but_first
def test_nothing_is_left_on_the_connection(worker, caller):
    driver = caller.driver
    before = {name: getattr(driver, name) for name in ("row_factory", "autocommit") if hasattr(driver, name)}
    odd = {name: getattr(driver, name) for name in ("text_factory", "prepare_threshold") if hasattr(driver, name)}
    caller.write("row")
    for _ in range(7):
        worker.commit(connection=caller.given)
    assert {name: getattr(driver, name) for name in (*before, *odd)} == before | odd
    if not caller.is_sqlite:
        with psycopg.Cursor(driver, row_factory=psycopg.rows.tuple_row) as cursor:
            statement = "SELECT count(*)::integer FROM pg_prepared_statements WHERE statement LIKE '%txnstore%'"
            assert cursor.execute(statement, prepare=False).fetchone() == (0,)
    caller.commit()


def test_what_is_handed_over_chooses_the_offsets(worker, url):
    with calling(url, "core") as caller:
        assert worker.commit(offsets=[TP("t", 0, 1)], connection=caller.given)[0].offset == 1
        caller.commit()
        assert committed(worker) == 1
        worker.commit(offsets=[TP("t", 0, 2, "with a note")], asynchronous=True, connection=caller.given)
        caller.commit()
    found = worker.committed([TP("t", 0)], PATIENCE_SECONDS)[0]
    assert (found.offset, found.metadata) == (2, "with a note")


def test_a_transaction_that_nothing_was_written_in_begins_with_the_commit(worker, url):
    """SQLAlchemy and the drivers begin by themselves; the caller's commit() ends what this began."""
    for kind in ("driver", "core", "orm"):
        with calling(url, kind) as caller:
            worker.commit(connection=caller.given)
            assert committed(worker) == OFFSET_INVALID
            caller.rollback()
    with calling(url, "core") as caller:
        worker.commit(connection=caller.given)
        caller.commit()
    assert committed(worker) == 3


def test_a_savepoint_that_is_rolled_back_takes_the_offsets_with_it(worker, url, connect):
    connection = connect()
    connection.execute(text("INSERT INTO ledger (entry) VALUES ('kept')"))
    savepoint = connection.begin_nested()
    worker.commit(connection=connection)
    savepoint.rollback()
    connection.commit()
    assert (committed(worker), ledger_of(url)) == (OFFSET_INVALID, ["kept"])


def test_a_savepoint_that_no_begin_was_sent_before_is_refused(worker, url, connect):
    """On SQLite its release would commit the offsets alone."""
    with Session(connect()) as session:
        with session.begin_nested():
            if url.startswith("sqlite"):
                error = error_of(worker.commit, connection=session)
                assert (error.code(), "no BEGIN" in error.str()) == (KafkaError.INVALID_REQUEST, True)
            else:
                worker.commit(connection=session)
        session.rollback()
    assert committed(worker) == OFFSET_INVALID


def test_a_session_whose_flush_has_failed_is_to_be_rolled_back(worker, connect):
    with Session(connect()) as session:
        session.add(Nowhere(id=1))
        with pytest.raises(DBAPIError):
            session.flush()
        error = error_of(worker.commit, connection=session)
        assert (error.code(), "roll" in error.str()) == (KafkaError._STATE, True)
    assert committed(worker) == OFFSET_INVALID


def test_a_block_of_a_session(worker, url, connect):
    with Session(connect()) as session, session.begin():
        session.execute(text("INSERT INTO ledger (entry) VALUES ('orm')"))
        worker.commit(connection=session)
    assert (committed(worker), ledger_of(url)) == (3, ["orm"])


def test_the_group_waits_until_the_caller_commits(worker, url, make_consumer):
    """The lock of the group's row is held to the end of the caller's database transaction."""
    with calling(url, "core") as caller:
        worker.commit(connection=caller.given)
        other = make_consumer({**BY_HAND, "group.id": "readers"})
        done = threading.Event()

        def commit():
            other.commit(offsets=[TP("t", 0, 1)], asynchronous=False)
            done.set()

        thread = threading.Thread(target=commit)
        thread.start()
        assert not done.wait(0.2)
        caller.commit()
        thread.join(PATIENCE_SECONDS)
    assert done.is_set()
    # The later word holds.
    assert committed(worker) == 1


# --- fenced ---------------------------------------------------------------------------------------------------------


def test_a_former_owner_is_refused_and_his_rows_go_with_it(url, log, crew):
    make_ledger(url)
    log.topic()
    log.write("t", 0, b"0", b"1")
    a = crew.member("a", BY_HAND).subscribe()
    crew.until([a], lambda: len(a.records) == 2)
    with calling(url, "core") as caller:
        caller.write("in time")
        a.consumer.commit(connection=caller.given)
        caller.commit()
        b = crew.member("b", BY_HAND).subscribe()
        crew.until([a, b], lambda: len(b.partitions) + len(a.partitions) == 1)
        late, other = (a, b) if b.partitions else (b, a)
        caller.write("late")
        error = error_of(late.consumer.commit, offsets=[TP("t", 0, 1)], connection=caller.given)
        assert error.code() in (KafkaError.ILLEGAL_GENERATION, KafkaError.UNKNOWN_MEMBER_ID)
        assert error.str().startswith("Commit failed: ")
        assert not error.retriable()
        caller.rollback()
        caller.write("the owner's")
        other.consumer.commit(offsets=[TP("t", 0, 2)], connection=caller.given)
        caller.commit()
    assert ledger_of(url) == ["in time", "the owner's"]


def test_a_stale_generation_is_refused(worker, url, crew):
    """Who is in no group may not commit for one that has members."""
    member = crew.member("a", {**BY_HAND, "group.id": "readers"}).subscribe()
    crew.until([member], lambda: len(member.records) == 3)
    with calling(url, "driver") as caller:
        error = error_of(worker.commit, connection=caller.given)
    assert error.code() == KafkaError.UNKNOWN_MEMBER_ID


# --- bad inputs -------------------------------------------------------------------------------------------------------


def test_another_file_that_is_attached_is_refused_for_it_commits_apart(worker, url, tmp_path):
    if not url.startswith("sqlite"):
        pytest.skip("SQLite's connections have several files")
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as other:
        other.execute("PRAGMA journal_mode = WAL")
    with calling(url, "driver") as caller:
        caller.given.execute(f"ATTACH '{tmp_path / 'other.db'}' AS other")
        error = error_of(worker.commit, connection=caller.given)
        assert (error.code(), "another file attached (other)" in error.str()) == (KafkaError.INVALID_REQUEST, True)
        assert not caller.given.in_transaction
        caller.given.execute("DETACH other")
        worker.commit(connection=caller.given)
        caller.commit()
    assert committed(worker) == 3


@pytest.mark.variants_on_sqlite
@pytest.mark.parametrize("given", [42, "a url", object(), b""], ids=["number", "text", "object", "bytes"])
def test_what_is_no_connection_is_a_type_error(worker, given):
    with pytest.raises(TypeError, match=r"expected a Connection or Session of SQLAlchemy"):
        worker.commit(connection=given)


def test_offsets_that_are_committed_by_themselves_are_no_part_of_it(url, log, make_consumer):
    log.topic()
    log.write("t", 0, b"0")
    consumer = make_consumer({"enable.auto.commit": True})
    consumer.assign([TP("t", 0, 0)])
    assert consumer.poll(PATIENCE_SECONDS) is not None
    with calling(url, "core") as caller:
        error = error_of(consumer.commit, connection=caller.given)
    assert (error.code(), "enable.auto.commit" in error.str()) == (KafkaError._INVALID_ARG, True)


def test_a_database_transaction_that_has_failed_is_refused(worker, url):
    if url.startswith("sqlite"):
        pytest.skip("a statement that fails does not end SQLite's database transaction")
    for kind in ("driver", "core"):
        with calling(url, kind) as caller:
            with pytest.raises(Exception, match=r"nowhere"):
                caller.given.execute("SELECT 1 FROM nowhere" if kind == "driver" else text("SELECT 1 FROM nowhere"))
            error = error_of(worker.commit, connection=caller.given)
            assert (error.code(), error.retriable()) == (KafkaError._STATE, False)
            assert "roll" in error.str()
            caller.rollback()
            caller.write("after")
            worker.commit(connection=caller.given)
            caller.commit()
    assert (committed(worker), ledger_of(url)) == (3, ["after", "after"])


def test_the_victim_of_a_conflict_finds_what_the_driver_said(worker, url):
    """Programs that repeat their database transactions tell by the SQLSTATE which ones to repeat."""
    if url.startswith("sqlite"):
        pytest.skip("SQLite has no SQLSTATE")
    worker.commit(offsets=[TP("t", 0, 1)], asynchronous=False)
    with calling(url, "driver") as caller:
        caller.driver.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        caller.driver.execute("SELECT 1")
        worker.commit(offsets=[TP("t", 0, 2)], asynchronous=False)
        with pytest.raises(KafkaException) as caught:
            worker.commit(connection=caller.given)
        assert (caught.value.args[0].code(), caught.value.args[0].retriable()) == (KafkaError._TIMED_OUT, False)
        conflict = caught.value.__cause__
        assert isinstance(conflict, WriteConflict)
        assert isinstance(conflict.__cause__, DBAPIError)
        assert isinstance(conflict.__cause__.orig, psycopg.Error)
        assert conflict.__cause__.orig.sqlstate == "40001"
        caller.rollback()
        worker.commit(connection=caller.given)
        caller.commit()
    assert committed(worker) == 3


def test_a_connection_that_commits_each_statement_is_refused(worker, url):
    with calling(url, "driver") as caller:
        if caller.is_sqlite:
            caller.given.isolation_level = None
        else:
            caller.given.autocommit = True
        error = error_of(worker.commit, connection=caller.given)
        assert (error.code(), "database transaction is open" in error.str()) == (KafkaError.INVALID_REQUEST, True)
        # Within a database transaction that the caller has begun it is none of ours.
        caller.given.execute("BEGIN")
        worker.commit(connection=caller.given)
        caller.given.execute("COMMIT")
    assert committed(worker) == 3


def test_sqlalchemys_autocommit_is_refused(worker, connect):
    connection = connect(isolation_level="AUTOCOMMIT")
    assert "database transaction is open" in error_of(worker.commit, connection=connection).str()
    assert committed(worker) == OFFSET_INVALID


@pytest.mark.parametrize("kind", ["driver", "core"])
def test_a_closed_connection_is_refused(worker, url, kind):
    with calling(url, kind) as caller:
        caller.given.close()
        error = error_of(worker.commit, connection=caller.given)
    assert (error.code(), "closed" in error.str()) == (KafkaError.INVALID_REQUEST, True)


def test_a_connection_to_another_database_is_refused_and_unharmed(worker, url, txnstore_postgres_server, tmp_path):
    others = [create_engine(f"sqlite:///{tmp_path / 'other.db'}")]
    open_store(f"sqlite:///{tmp_path / 'a store.db'}").close()
    others.append(create_engine(f"sqlite:///{tmp_path / 'a store.db'}"))
    name = f"bystander_{abs(hash(url)) % 10**8}"
    txnstore_postgres_server.create_database(name)
    try:
        others.append(application_engine(txnstore_postgres_server.url(name)))
        for other in others:
            with other.connect() as connection:
                connection.execute(text("CREATE TABLE own (entry TEXT)"))
                error = error_of(worker.commit, connection=connection)
                assert (error.code(), "another database" in error.str()) == (KafkaError.INVALID_REQUEST, True)
                # Its database transaction goes on.
                connection.execute(text("INSERT INTO own VALUES ('x')"))
                connection.commit()
            other.dispose()
    finally:
        txnstore_postgres_server.drop_database(name)


@pytest.mark.takes_more_rights("makes a schema")
def test_a_hostile_search_path_changes_nothing(worker, url):
    if url.startswith("sqlite"):
        pytest.skip("SQLite has no search path")
    with calling(url, "driver") as caller:
        caller.given.execute("CREATE SCHEMA evil")
        caller.given.execute("CREATE TABLE evil.stores (trap integer)")
        caller.given.execute("CREATE TABLE evil.groups (trap integer)")
        caller.given.execute(
            "CREATE FUNCTION evil.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT to_timestamp(7)'"
        )
        caller.given.execute("SET LOCAL search_path = evil, pg_catalog")
        worker.commit(connection=caller.given)
        (path,) = caller.given.execute("SHOW search_path").fetchone()
        assert path == "evil, pg_catalog"
        (commit_ms,) = caller.given.execute("SELECT max(commit_ms) FROM txnstore.group_offsets").fetchone()
        assert commit_ms > 1_000_000_000_000
        # The strangers' things go with it.
        caller.rollback()


def test_a_sqlite_connection_of_another_thread_is_refused(worker, url):
    if not url.startswith("sqlite"):
        pytest.skip("a connection of psycopg belongs to no thread")
    opened = []
    thread = threading.Thread(target=lambda: opened.append(open_driver(url)))
    thread.start()
    thread.join()
    error = error_of(worker.commit, connection=opened[0])
    assert (error.code(), "another thread" in error.str()) == (KafkaError.INVALID_REQUEST, True)


def test_there_is_nothing_to_commit(url, log, make_consumer):
    log.topic()
    consumer = make_consumer(BY_HAND)
    with calling(url, "core") as caller:
        assert error_of(consumer.commit, connection=caller.given).code() == KafkaError._NO_OFFSET
        error = error_of(consumer.commit, offsets=[TP("nowhere", 0, 1)], connection=caller.given)
        assert (error.code(), "nowhere" in error.str()) == (KafkaError.UNKNOWN_TOPIC_OR_PART, True)
        with pytest.raises(ValueError, match="mutually exclusive"):
            consumer.commit(object(), [TP("t", 0, 1)], connection=caller.given)


def test_a_closed_consumer_commits_nothing(url):
    consumer = Consumer({"bootstrap.servers": url, "group.id": "readers", **BY_HAND})
    consumer.close()
    with pytest.raises(RuntimeError, match="Consumer closed"):
        consumer.commit(connection=object())

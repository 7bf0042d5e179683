"""Every kind of connection: a record is there if its database transaction was committed, and not otherwise."""

from __future__ import annotations

import sqlite3
import time
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg.rows import class_row, dict_row
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from tests.outbox.conftest import engine_url, plain_connection
from tests.outbox.steps import records, values, waiting
from txnstore import KafkaError, KafkaException, Outbox
from txnstore.log.outbox.sequencer import sequence_outbox

only_postgresql = pytest.mark.parametrize("txnstore_url", ["postgresql"], indirect=True)
only_sqlite = pytest.mark.parametrize("txnstore_url", ["sqlite"], indirect=True)


@pytest.fixture
def outbox(url):
    with Outbox(url, sequencer=False) as found:
        yield found


class Kind:
    """A kind of connection that a caller may hand over."""

    connection: Any

    def __init__(self, url):
        self.engine = create_engine(engine_url(url))
        self.connection = self.make()

    def make(self):
        raise NotImplementedError

    def savepoint(self):
        return self.connection.begin_nested()

    def close(self):
        self.connection.close()
        self.engine.dispose()


class CoreKind(Kind):
    """A Connection of SQLAlchemy's Core."""

    def make(self):
        return self.engine.connect()


class OrmKind(Kind):
    """An ORM Session."""

    def make(self):
        return Session(self.engine)


class ScopedKind(Kind):
    """The Session of web frameworks, one for each thread."""

    def make(self):
        return scoped_session(sessionmaker(self.engine))


class PlainKind:
    """A connection of the driver."""

    def __init__(self, url):
        self.connection = plain_connection(url)

    def savepoint(self):
        self.connection.execute("SAVEPOINT s")
        return self

    def rollback(self):
        self.connection.execute("ROLLBACK TO SAVEPOINT s")

    def commit(self):
        self.connection.execute("RELEASE SAVEPOINT s")

    def close(self):
        self.connection.close()


@pytest.fixture(params=[CoreKind, OrmKind, ScopedKind, PlainKind])
def kind(request, url):
    found = request.param(url)
    yield found
    found.close()


@pytest.mark.slow_but_first
def test_a_record_is_there_once_the_caller_commits(store, outbox, kind):
    outbox.produce(kind.connection, "t", "v", key="k", headers={"a": "1"}, timestamp=1_700_000_000_000)
    assert waiting(store) == 0
    kind.connection.commit()
    assert waiting(store) == 1
    assert outbox.sequence() == 1
    ((record,),) = records(store)
    assert (record.key, record.value, record.headers) == (b"k", b"v", (("a", b"1"),))
    assert record.timestamp_ms == 1_700_000_000_000


@pytest.mark.slow_but_first
def test_nothing_is_there_if_the_caller_rolls_back(store, outbox, kind):
    outbox.produce(kind.connection, "t", b"v")
    kind.connection.rollback()
    assert outbox.sequence() == 0
    assert values(store) == []


@pytest.mark.slow_but_first
def test_several_records_keep_their_order(store, outbox, kind):
    wanted = [str(number).encode() for number in range(50)]
    assert outbox.produce_all(kind.connection, ({"topic": "t", "value": value} for value in wanted)) == 50
    outbox.produce(kind.connection, "t", b"last")
    kind.connection.commit()
    outbox.sequence()
    assert values(store) == [*wanted, b"last"]


@pytest.mark.slow_but_first
def test_a_savepoint_that_is_rolled_back_leaves_nothing(store, outbox, kind):
    outbox.produce(kind.connection, "t", b"before")
    savepoint = kind.savepoint()
    outbox.produce(kind.connection, "t", b"within")
    savepoint.rollback()
    savepoint = kind.savepoint()
    outbox.produce(kind.connection, "t", b"kept")
    savepoint.commit()
    outbox.produce(kind.connection, "t", b"after")
    kind.connection.commit()
    outbox.sequence()
    assert values(store) == [b"before", b"kept", b"after"]


@only_sqlite
@pytest.mark.parametrize("kind", [CoreKind, PlainKind], indirect=True)
def test_another_file_that_is_attached_is_refused_for_it_commits_apart(store, outbox, kind, tmp_path):
    driver = kind.connection.connection.driver_connection if isinstance(kind, CoreKind) else kind.connection
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE orders (item)")
    driver.execute(f"ATTACH '{other}' AS other")
    with pytest.raises(
        KafkaException, match=r"another file attached \(other\).*keep the tables in the log's own"
    ) as told:
        outbox.produce(kind.connection, "t", "1")
    assert told.value.args[0].code() == KafkaError.INVALID_REQUEST
    assert not driver.in_transaction
    kind.connection.rollback()
    driver.execute("DETACH other")
    outbox.produce(kind.connection, "t", b"2")
    kind.connection.commit()
    outbox.sequence()
    assert values(store) == [b"2"]


@only_sqlite
def test_a_savepoint_that_no_begin_was_sent_before_is_refused(store, outbox, engine):
    """Its release would commit the record, whatever the session rolls back afterwards; nothing was sent."""
    with Session(engine) as session:
        driver: Any = session.connection().connection.driver_connection
        with session.begin_nested(), session.begin_nested():
            with pytest.raises(KafkaException, match=r"within begin_nested\(\).*no BEGIN") as refused:
                outbox.produce(session, "t", "1")
            assert refused.value.args[0].code() == KafkaError.INVALID_REQUEST
            assert not driver.in_transaction
        outbox.produce(session, "t", b"before it")
        with session.begin_nested():
            outbox.produce(session, "t", b"within")
        session.rollback()
        outbox.produce(session, "t", b"kept")
        with session.begin_nested():
            outbox.produce(session, "t", b"kept within")
        session.commit()
    outbox.sequence()
    assert values(store) == [b"kept", b"kept within"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("recipe", ["begin", "begin only", "autocommit", "postgresql"])
def test_a_savepoint_that_is_protected_is_its_sessions_own(store, outbox, engine, recipe, url):
    """As SQLAlchemy has one set sqlite3's transaction control; PostgreSQL has begun by then anyway."""
    if url.startswith("sqlite") == (recipe == "postgresql"):
        pytest.skip("another database's")
    if recipe == "begin":
        event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    if recipe.startswith("begin"):
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    if recipe == "autocommit":
        if not hasattr(sqlite3, "LEGACY_TRANSACTION_CONTROL"):
            pytest.skip("sqlite3 has it since Python 3.12")
        event.listen(engine, "connect", lambda connection, _: setattr(connection, "autocommit", False))
    for end in ("rollback", "commit"):
        with Session(engine) as session:
            with session.begin_nested():
                outbox.produce(session, "t", end)
            getattr(session, end)()
    outbox.sequence()
    assert values(store) == [b"commit"]


@only_sqlite
def test_a_savepoint_of_who_has_chosen_autocommit_is_all_there_is(store, outbox, engine):
    with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        with session.begin_nested():
            outbox.produce(session, "t", "1")
        assert waiting(store) == 1


@only_sqlite
def test_a_begin_of_the_applications_own_protects_a_savepoint(store, outbox, engine):
    with Session(engine) as session:
        session.execute(text("BEGIN"))
        with session.begin_nested():
            outbox.produce(session, "t", "1")
        session.rollback()
    assert waiting(store) == 0


@pytest.mark.slow_but_first
@only_postgresql  # a SQLite file has no other clock than the caller's
def test_a_clock_of_the_caller_that_is_wrong_refuses_nothing(store, outbox, kind, monkeypatch):
    ahead = SimpleNamespace(time_ns=lambda: time.time_ns() + 2 * 3_600 * 1_000_000_000)
    monkeypatch.setattr("txnstore.outbox.rows.time", ahead)
    outbox.produce(kind.connection, "t", "one")
    outbox.produce_all(kind.connection, [{"topic": "t", "value": "two"}, {"topic": "t", "value": "three"}])
    kind.connection.commit()
    assert sequence_outbox(store).moved_count == 3
    ((*found,),) = records(store)
    assert all(abs(record.timestamp_ms - time.time_ns() // 1_000_000) < 600_000 for record in found)


@pytest.mark.slow_but_first
def test_a_record_takes_the_producers_arguments(store, outbox, kind):
    outbox.produce(kind.connection, "t", bytearray(b"1"), memoryview(b"k"), -1, [("n", None), ("n", b"\xff")])
    outbox.produce(kind.connection, "t")
    outbox.produce(kind.connection, topic="t", value="ü", partition=0, timestamp=0)
    kind.connection.commit()
    outbox.sequence()
    ((first, second, third),) = records(store)
    assert (first.key, first.value, first.headers) == (b"k", b"1", (("n", None), ("n", b"\xff")))
    assert (second.key, second.value, second.headers) == (None, None, ())
    assert third.value == "ü".encode()
    assert 0 < third.timestamp_ms - first.timestamp_ms + 1 < 60_000


# --- what the caller has set ------------------------------------------------------------------------------------------


@only_postgresql
@pytest.mark.parametrize("row_factory", [dict_row, class_row(dict)])
def test_psycopgs_factories_and_search_path_do_not_matter(store, outbox, connect, row_factory):
    connection = connect()
    connection.row_factory = row_factory
    connection.cursor_factory = psycopg.ClientCursor
    connection.execute("SET search_path = pg_temp")
    connection.execute("CREATE TEMPORARY TABLE outbox (topic text)")
    for number in range(12):
        outbox.produce(connection, "t", str(number))
    outbox.produce_all(connection, [{"topic": "t", "value": "x"}, {"topic": "t", "value": "y"}])
    connection.commit()
    outbox.sequence()
    assert len(values(store)) == 14


@only_sqlite
def test_sqlite3s_factories_do_not_matter(store, outbox, connect):
    connection = connect()
    connection.row_factory = sqlite3.Row
    connection.text_factory = bytes
    connection.execute("CREATE TEMPORARY TABLE txnstore_outbox (topic TEXT)")
    outbox.produce(connection, "t", "1")
    connection.commit()
    outbox.sequence()
    assert values(store) == [b"1"]


@only_sqlite
@pytest.mark.parametrize("isolation_level", ["", "DEFERRED", "IMMEDIATE", "EXCLUSIVE"])
def test_sqlite3s_own_beginning_will_do(store, outbox, connect, isolation_level):
    connection = connect()
    connection.isolation_level = isolation_level
    outbox.produce(connection, "t", "1")
    assert connection.in_transaction
    connection.rollback()
    assert waiting(store) == 0


@only_sqlite
def test_sqlite3_in_autocommit_is_refused_unless_something_was_begun(store, outbox, connect):
    connection = connect()
    connection.isolation_level = None
    with pytest.raises(KafkaException, match="commits each statement by itself"):
        outbox.produce(connection, "t", "1")
    assert waiting(store) == 0
    connection.execute("BEGIN")
    outbox.produce(connection, "t", "1")
    connection.execute("COMMIT")
    assert waiting(store) == 1


@only_postgresql
def test_psycopg_in_autocommit_is_refused_unless_something_was_begun(store, outbox, connect):
    connection = connect()
    connection.autocommit = True
    with pytest.raises(KafkaException, match="autocommit") as refused:
        outbox.produce(connection, "t", "1")
    assert refused.value.args[0].code() == KafkaError.INVALID_REQUEST
    assert waiting(store) == 0
    with connection.transaction():
        outbox.produce(connection, "t", "1")
    with connection.transaction(force_rollback=True):
        outbox.produce(connection, "t", "2")
    outbox.sequence()
    assert values(store) == [b"1"]


def test_sqlalchemy_in_autocommit_is_refused_unless_something_was_begun(store, outbox, url):
    engine = create_engine(engine_url(url), isolation_level="AUTOCOMMIT")
    with closing(engine.connect()) as connection:
        with pytest.raises(KafkaException, match="autocommit mode"):
            outbox.produce(connection, "t", "1")
        assert waiting(store) == 0
        connection.exec_driver_sql("BEGIN")
        outbox.produce(connection, "t", "1")
        connection.exec_driver_sql("COMMIT")
    assert waiting(store) == 1
    engine.dispose()


@only_sqlite
def test_sqlalchemys_recipe_for_sqlite_that_begins_by_itself_will_do(store, outbox, url):
    engine = create_engine(url)

    @event.listens_for(engine, "connect")
    def leave_it_to_us(connection, _):
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection):
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    with engine.connect() as connection:
        outbox.produce(connection, "t", "1")
        assert waiting(store) == 0
        connection.commit()
    assert waiting(store) == 1
    engine.dispose()


def test_a_schema_translate_map_does_not_matter(store, outbox, engine):
    with engine.connect().execution_options(schema_translate_map={None: "tenant", "txnstore": "x"}) as connection:
        outbox.produce(connection, "t", "1")
        connection.commit()
    assert waiting(store) == 1


@only_postgresql
def test_nothing_is_told_and_nothing_locked_in_the_callers_transaction(store, outbox, connect, url):
    with closing(plain_connection(url)) as other:
        mine = connect()
        outbox.produce(mine, "t", "1")
        locks = other.execute(
            "SELECT DISTINCT mode FROM pg_locks WHERE pid = %s AND locktype <> 'virtualxid'", (mine.info.backend_pid,)
        ).fetchall()
        assert {mode for (mode,) in locks} <= {"RowExclusiveLock", "ExclusiveLock", "AccessShareLock"}
        # What NOTIFY has done would make this an error.
        mine.execute("PREPARE TRANSACTION 'outbox-quiet'")
        mine.commit()
        other.rollback()
        other.autocommit = True
        other.execute("ROLLBACK PREPARED 'outbox-quiet'")


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [None, "sqlite://", 5, object()])
def test_what_is_no_connection_is_refused(outbox, wrong):
    with pytest.raises(TypeError, match="Connection or Session of SQLAlchemy"):
        outbox.produce(wrong, "t", "1")


def test_another_database_is_refused(outbox, tmp_path, url, txnstore_postgres_server):
    with closing(sqlite3.connect(tmp_path / "other.db")) as other, pytest.raises(KafkaException, match="this outbox"):
        outbox.produce(other, "t", "1")
    engine = create_engine(f"sqlite:///{tmp_path / 'other.db'}")
    with engine.connect() as other, pytest.raises(KafkaException, match="this outbox"):
        outbox.produce(other, "t", "1")
    engine.dispose()
    elsewhere = txnstore_postgres_server.url(txnstore_postgres_server.maintenance_database)
    with closing(plain_connection(elsewhere)) as other, pytest.raises(KafkaException, match="this outbox"):
        outbox.produce(other, "t", "1")


def test_the_same_file_by_another_name_will_do(txnstore_sqlite_url, tmp_path):
    link = tmp_path / "link.db"
    link.symlink_to(txnstore_sqlite_url.removeprefix("sqlite:///"))
    with Outbox(f"sqlite:///{link}", sequencer=False) as outbox:
        with closing(plain_connection(txnstore_sqlite_url)) as connection:
            outbox.produce(connection, "t", "1")
            connection.commit()
        assert outbox.sequence() == 1


def test_a_database_without_our_tables_is_told_so(tmp_path, txnstore_postgres_server):
    path = tmp_path / "empty.db"
    with Outbox(f"sqlite:///{path}", sequencer=False) as outbox, closing(sqlite3.connect(path)) as connection:
        with pytest.raises(KafkaException, match="open the store there first"):
            outbox.produce(connection, "t", "1")
        connection.rollback()
        outbox.open()
        outbox.produce(connection, "t", "1")
    url = txnstore_postgres_server.url(txnstore_postgres_server.maintenance_database)
    engine = create_engine(engine_url(url))
    with Outbox(engine, schema="elsewhere", sequencer=False) as outbox, engine.connect() as connection:
        with pytest.raises(KafkaException, match="no outbox of txnstore in its schema elsewhere"):
            outbox.produce(connection, "t", "1")
        connection.rollback()
        with closing(plain_connection(url)) as plain, pytest.raises(KafkaException, match="schema elsewhere"):
            outbox.produce(plain, "t", "1")
    engine.dispose()


@only_postgresql
def test_a_failed_database_transaction_of_psycopgs_is_to_be_rolled_back(outbox, connect):
    connection = connect()
    with pytest.raises(psycopg.errors.UndefinedTable):
        connection.execute("SELECT * FROM nothing")
    with pytest.raises(KafkaException, match="roll back") as refused:
        outbox.produce(connection, "t", "1")
    error = refused.value.args[0]
    assert (error.code(), error.retriable()) == (KafkaError._STATE, False)


class Base(DeclarativeBase):
    """The application's own tables."""


class Nowhere(Base):
    """Its table is not there."""

    __tablename__ = "nothing"
    id: Mapped[int] = mapped_column(primary_key=True)


def fail_to_flush(engine, stack):
    session = stack.enter_context(Session(engine))
    session.add(Nowhere(id=1))
    with pytest.raises(DBAPIError):
        session.flush()
    return session


def fail_a_statement(engine, stack):
    connection = stack.enter_context(engine.connect())
    with pytest.raises(DBAPIError):
        connection.execute(text("SELECT * FROM nothing"))
    return connection


def lose_it(engine, stack):
    connection = stack.enter_context(engine.connect())
    connection.execute(text("SELECT 1"))
    connection.invalidate()
    return connection


@pytest.mark.parametrize("fail", [fail_to_flush, fail_a_statement, lose_it])
def test_a_failed_database_transaction_of_sqlalchemys_is_to_be_rolled_back(store, outbox, engine, url, fail):
    if url.startswith("sqlite") and fail is fail_a_statement:
        pytest.skip("a statement that fails leaves SQLite's database transaction as it was")
    with ExitStack() as stack:
        given = fail(engine, stack)
        with pytest.raises(KafkaException, match=r"has failed.*roll") as refused:
            outbox.produce(given, "t", "1")
        error = refused.value.args[0]
        assert (error.code(), error.retriable()) == (KafkaError._STATE, False)
        stack.pop_all().close()
    assert waiting(store) == 0


@only_postgresql
def test_another_error_of_the_callers_database_stays_his_own(outbox, engine):
    with engine.connect() as connection:
        connection.execute(text("SET TRANSACTION READ ONLY"))
        with pytest.raises(DBAPIError, match="read-only"):
            outbox.produce(connection, "t", "1")


def test_a_session_that_does_not_know_its_database_is_told_so(outbox):
    with Session() as session, pytest.raises(KafkaException, match="no connection to give") as refused:
        outbox.produce(session, "t", "1")
    assert refused.value.args[0].code() == KafkaError.INVALID_REQUEST


# --- asynchronous -----------------------------------------------------------------------------------------------------


@only_postgresql
def test_a_connection_and_a_session_of_async_sqlalchemy_within_run_sync(store, url):
    pytest.importorskip("greenlet")
    import asyncio

    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    async def run():
        engine = create_async_engine(engine_url(url))
        outbox = Outbox(engine, sequencer=False)
        async with AsyncSession(engine) as session:
            await session.run_sync(outbox.produce, "t", b"kept")
            await session.commit()
            await session.run_sync(outbox.produce, "t", b"dropped")
            await session.rollback()
            with pytest.raises(TypeError, match="within run_sync"):
                outbox.produce(session, "t", b"wrong")
        async with engine.begin() as connection:
            await connection.run_sync(outbox.produce, "t", b"core")
            await connection.run_sync(
                outbox.produce_all, [{"topic": "t", "value": b"1"}, {"topic": "t", "value": b"2"}]
            )
        async with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            with pytest.raises(KafkaException, match="autocommit"):
                await connection.run_sync(outbox.produce, "t", b"wrong")
        await engine.dispose()
        outbox.close()

    asyncio.run(run())
    sequence_outbox(store)
    assert values(store) == [b"kept", b"core", b"1", b"2"]

"""Sessions of SQLAlchemy's whose rows a producer commits: interrupted, given to a connection, on several engines."""

from __future__ import annotations

import pytest
from sqlalchemy import Column, MetaData, Table, Text, create_engine, event, text
from sqlalchemy.orm import Session, registry

from tests.clients.callers import application_engine
from tests.clients.producer.enlisting import *  # noqa: F403 - the fixtures
from tests.clients.producer.enlisting import committed_values, is_there
from tests.clients.steps import PATIENCE_SECONDS, error_of

INSERT = text("INSERT INTO ledger VALUES (:entry)")


def test_hooks_that_an_interrupt_has_ended_are_not_called_again(producer, url, topic, entry):
    """What they have done would be done twice: the transaction can only be aborted."""
    engine = application_engine(url)
    calls: list[str] = []

    def audit(session):
        producer.produce(topic, b"of the hook")
        session.execute(INSERT, {"entry": f"{entry} audited {len(calls)}"})

    def interrupt(_):
        calls.append("hook")
        if len(calls) == 1:
            raise KeyboardInterrupt

    with Session(engine) as session:
        event.listen(session, "before_commit", audit)
        event.listen(session, "before_commit", interrupt)
        producer.begin_transaction()
        producer.enlist(session)
        producer.produce(topic, b"1")
        with pytest.raises(KeyboardInterrupt):
            producer.commit_transaction(PATIENCE_SECONDS)
        error = error_of(producer.commit_transaction, PATIENCE_SECONDS)
        assert ("nothing was committed" in error.str(), error.txn_requires_abort()) == (True, True)
        assert calls == ["hook"]
        producer.abort_transaction(PATIENCE_SECONDS)
        producer.begin_transaction()
        producer.enlist(session)
        producer.produce(topic, b"2")
        producer.commit_transaction(PATIENCE_SECONDS)
    engine.dispose()
    assert (is_there(url, f"{entry} audited 0"), is_there(url, f"{entry} audited 1")) == (False, True)
    assert committed_values(url, topic) == [b"2", b"of the hook"]


@pytest.mark.parametrize("is_session", [True, False], ids=["session", "connection"])
def test_who_gets_a_connection_from_the_pool_that_was_enlisted_commits_it(producer, url, topic, entry, is_session):
    """Before the producer has heard of that, and after."""
    engine = create_engine(application_engine(url).url, pool_size=1, max_overflow=0, pool_timeout=PATIENCE_SECONDS)
    producer.begin_transaction()
    with Session(engine) if is_session else engine.connect() as enlisted:
        producer.enlist(enlisted)
        enlisted.execute(INSERT, {"entry": entry})
    producer.produce(topic, b"1")
    for moment in ("before", "after"):
        with engine.begin() as connection:
            connection.execute(INSERT, {"entry": f"{entry} {moment}"})
        if moment == "before":
            assert "closed by its owner" in error_of(producer.commit_transaction, PATIENCE_SECONDS).str()
            producer.abort_transaction(PATIENCE_SECONDS)
    engine.dispose()
    assert [is_there(url, one) for one in (entry, f"{entry} before", f"{entry} after")] == [False, True, True]
    assert committed_values(url, topic) == []


# --- several connections ----------------------------------------------------------------------------------------------


@pytest.fixture(params=["of the same kind", "sqlite"])
def other(request, txnstore_sqlite_url, url):
    """The engine of another database; on PostgreSQL it may be one of the log's own, which is another connection."""
    if request.param == "sqlite" or url.startswith("sqlite"):
        engine = application_engine(txnstore_sqlite_url)
    else:
        engine = application_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS orders (item TEXT)"))
    yield engine
    engine.dispose()


READ = text("SELECT count(*) FROM orders")
WRITE = text("INSERT INTO orders VALUES ('tea')")


def on(engine):
    return {"bind_arguments": {"bind": engine}}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_other_connections_of_a_session_that_it_only_reads_do_no_harm(producer, url, topic, entry, other, when):
    engine = application_engine(url)
    with Session(engine) as session:
        if when == "before":
            session.execute(READ, **on(other))
        with producer.transaction(PATIENCE_SECONDS):
            producer.enlist(session)
            if when == "meanwhile":
                session.execute(READ, **on(other))
            session.execute(INSERT, {"entry": entry})
            producer.produce(topic, b"1")
        assert not session.in_transaction()
    engine.dispose()
    assert (is_there(url, entry), committed_values(url, topic)) == (True, [b"1"])


@pytest.mark.slow_but_first
@pytest.mark.parametrize("mode", ["written", "each statement by itself"])
def test_other_connections_of_a_session_that_may_have_written_are_refused(producer, url, topic, entry, other, mode):
    engine = application_engine(url)
    with Session(engine) as session:
        if mode == "each statement by itself":
            session.connection(bind_arguments={"bind": other}, execution_options={"isolation_level": "AUTOCOMMIT"})
            session.execute(READ, **on(other))
        else:
            session.execute(WRITE, **on(other))
        producer.begin_transaction()
        error = error_of(producer.enlist, session)
        assert "several connections (binds)" in error.str()
        producer.abort_transaction(PATIENCE_SECONDS)
        session.rollback()
    engine.dispose()
    assert (is_there(url, entry), committed_values(url, topic)) == (False, [])


@pytest.mark.parametrize("is_clean", [True, False], ids=["clean", "held back"])
def test_a_connection_that_a_session_was_given_and_has_read_is_enlisted(producer, url, topic, entry, is_clean):
    class Entry:
        def __init__(self, entry):
            self.entry = entry

    known = registry()
    known.map_imperatively(Entry, Table("ledger", MetaData(), Column("entry", Text, primary_key=True)))
    engine = application_engine(url)
    with engine.connect() as connection, Session(connection) as session:
        session.execute(text("SELECT count(*) FROM ledger"))
        if not is_clean:
            session.add(Entry(f"{entry} held back"))
        producer.begin_transaction()
        if is_clean:
            producer.enlist(connection)
            connection.execute(INSERT, {"entry": entry})
            producer.produce(topic, b"1")
            producer.commit_transaction(PATIENCE_SECONDS)
            session.close()
            assert session.scalar(text("SELECT count(*) FROM ledger WHERE entry = :entry"), {"entry": entry}) == 1
        else:
            assert "enlist the session itself" in error_of(producer.enlist, connection).str()
            producer.abort_transaction(PATIENCE_SECONDS)
            session.expunge_all()
    known.dispose()
    engine.dispose()
    assert (is_there(url, entry), committed_values(url, topic)) == ((True, [b"1"]) if is_clean else (False, []))

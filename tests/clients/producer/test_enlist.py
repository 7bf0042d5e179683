"""Records, offsets and the application's rows in one commit that the producer makes, on a connection of any kind."""

from __future__ import annotations

import pytest
from sqlalchemy import Column, MetaData, String, Table, create_engine, event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, registry

from tests.clients.callers import application_engine, calling
from tests.clients.membership.steps import TP
from tests.clients.producer.enlisting import *  # noqa: F403 - the fixtures
from tests.clients.producer.enlisting import committed_values, is_there, numbers
from tests.clients.steps import NO_MEMBER, PATIENCE_SECONDS, error_of
from tests.tools.crashes import at_each_step, is_commit
from txnstore import OFFSET_INVALID, Consumer, KafkaError, KafkaException
from txnstore.clients.producer import progress
from txnstore.clients.producer.enlistment import EnlistedBranches
from txnstore.clients.producer.requests import ProducerSession
from txnstore.db.opening import open_store
from txnstore.errors import RecordTooLarge
from txnstore.groups.offsets import check_committer
from txnstore.testing.invariants import assert_sound

pytestmark = pytest.mark.least_privilege

# --- one commit ------------------------------------------------------------------------------------------------------


@pytest.mark.slow_but_first
def test_records_and_rows_are_committed_together(producer, any_caller, url, topic, entry):
    producer.begin_transaction()
    producer.enlist(any_caller.given)
    any_caller.write(entry)
    producer.produce(topic, b"1")
    producer.produce(topic, b"2")
    assert not is_there(url, entry)
    producer.commit_transaction(PATIENCE_SECONDS)
    assert (is_there(url, entry), committed_values(url, topic)) == (True, [b"1", b"2"])
    # The connection is its owner's again, and so is the next transaction.
    any_caller.write(f"{entry} of its own")
    any_caller.commit()
    producer.begin_transaction()
    producer.produce(topic, b"3")
    producer.commit_transaction(PATIENCE_SECONDS)
    assert is_there(url, f"{entry} of its own")
    assert committed_values(url, topic) == [b"1", b"2", b"3"]


def test_no_other_transaction_begins_while_one_lets_go_of_the_last_ones_connections(
    producer, caller, url, topic, entry, monkeypatch
):
    producer.begin_transaction()
    producer.enlist(caller.given)
    producer.commit_transaction(PATIENCE_SECONDS)
    original = EnlistedBranches.begin
    refused = []

    def begin_another(branches):
        refused.append(error_of(producer.begin_transaction).code())
        original(branches)

    with monkeypatch.context() as patched:
        patched.setattr(EnlistedBranches, "begin", begin_another)
        producer.begin_transaction()
    assert refused == [KafkaError._PREV_IN_PROGRESS]
    producer.enlist(caller.given)
    caller.write(entry)
    producer.produce(topic, b"1")
    assert error_of(producer.begin_transaction).code() == KafkaError._STATE
    producer.commit_transaction(PATIENCE_SECONDS)
    assert (is_there(url, entry), committed_values(url, topic)) == (True, [b"1"])


@pytest.mark.slow_but_first
def test_an_abort_takes_both_back(producer, any_caller, url, topic, entry):
    producer.begin_transaction()
    any_caller.write(entry)
    producer.enlist(any_caller.given)
    producer.produce(topic, b"1")
    producer.abort_transaction(PATIENCE_SECONDS)
    assert (is_there(url, entry), committed_values(url, topic)) == (False, [])
    any_caller.write(entry)
    any_caller.commit()
    assert is_there(url, entry)


def test_it_is_one_commit(producer, caller, url, topic, entry):
    """Right before the COMMIT nothing of it is there, and right behind it everything."""
    seen = []

    def look(_, point):
        if is_commit(point.statement):
            seen.append((is_there(url, entry), committed_values(url, topic)))

    producer.begin_transaction()
    producer.enlist(caller.given)
    caller.write(entry)
    producer.produce(topic, b"1")
    with at_each_step(look):
        producer.commit_transaction(PATIENCE_SECONDS)
    assert seen == [(False, [])] * (len(seen) - 1) + [(True, [b"1"])]


def test_offsets_are_committed_with_it(producer, caller, url, topic, entry):
    group = f"group-{next(numbers)}"
    consumer = Consumer({"bootstrap.servers": url, "group.id": group, "enable.auto.commit": False})
    metadata = NO_MEMBER.replace(b"readers", group.encode())
    try:
        for end in ("abort_transaction", "commit_transaction"):
            producer.begin_transaction()
            producer.enlist(caller.given)
            caller.write(f"{entry} {end}")
            producer.send_offsets_to_transaction([TP(topic, 0, 5)], metadata, PATIENCE_SECONDS)
            getattr(producer, end)(PATIENCE_SECONDS)
            found = consumer.committed([TP(topic, 0)], PATIENCE_SECONDS)[0].offset
            assert found == (5 if end == "commit_transaction" else OFFSET_INVALID)
            assert is_there(url, f"{entry} {end}") == (end == "commit_transaction")
    finally:
        consumer.close()


def test_a_committer_that_was_taken_is_not_asked_about_again_before_the_commit(
    producer, caller, url, topic, monkeypatch
):
    group = f"group-{next(numbers)}"
    metadata = NO_MEMBER.replace(b"readers", group.encode())
    asked = []

    def check(connection, committer):
        asked.append(committer)
        check_committer(connection, committer)

    monkeypatch.setattr(progress, "check_committer", check)
    consumer = Consumer({"bootstrap.servers": url, "group.id": group, "enable.auto.commit": False})
    try:
        for number, end in enumerate(("commit", "commit", "abort", "commit", "commit")):
            producer.begin_transaction()
            producer.enlist(caller.given)
            for offset in 0, number:
                producer.send_offsets_to_transaction([TP(topic, 0, offset)], metadata, PATIENCE_SECONDS)
            getattr(producer, f"{end}_transaction")(PATIENCE_SECONDS)
        # Once at first, and once again after the abort: what was sent there was never checked.
        assert len(asked) == 4
        assert consumer.committed([TP(topic, 0)], PATIENCE_SECONDS)[0].offset == 4
    finally:
        consumer.close()


@pytest.mark.slow_but_first
def test_rows_alone_are_committed_too(producer, any_caller, url, entry):
    producer.begin_transaction()
    producer.enlist(any_caller.given)
    any_caller.write(entry)
    producer.commit_transaction(PATIENCE_SECONDS)
    assert is_there(url, entry)


def test_what_the_application_counts_in_tables_of_its_session_numbers_no_commits(producer, caller, url, topic):
    if not caller.is_sqlite:
        pytest.skip("only SQLite keeps the last keys of all tables in one, of which each session has another one")
    caller.driver.execute("CREATE TEMPORARY TABLE own (id INTEGER PRIMARY KEY AUTOINCREMENT)")
    for value in b"1", b"2":
        producer.begin_transaction()
        producer.enlist(caller.given)
        producer.produce(topic, value)
        producer.commit_transaction(PATIENCE_SECONDS)
    assert committed_values(url, topic) == [b"1", b"2"]
    with open_store(url) as store:
        assert_sound(store)


def test_a_function_that_somebody_has_planted_numbers_no_commits(make_producer, caller, url, topic):
    if caller.is_sqlite:
        pytest.skip("it is not the database that has functions")
    producer = make_producer(txnstore_transaction_group="ledger")
    caller.driver.execute("CREATE FUNCTION public.nextval(text) RETURNS bigint LANGUAGE sql AS 'SELECT -1::bigint'")
    caller.driver.commit()
    try:
        for value in b"1", b"2":
            producer.begin_transaction()
            producer.enlist(caller.given)
            producer.produce(topic, value)
            producer.commit_transaction(PATIENCE_SECONDS)
    finally:
        caller.rollback()
        caller.driver.execute("DROP FUNCTION public.nextval(text)")
        caller.driver.commit()
    assert committed_values(url, topic) == [b"1", b"2"]
    with open_store(url) as store:
        assert_sound(store)


def test_delivery_reports_come_with_the_commit(producer, caller, topic, entry):
    reports = []
    producer.begin_transaction()
    producer.enlist(caller.given)
    producer.produce(topic, b"1", on_delivery=lambda error, message: reports.append((error, message.offset())))
    assert producer.poll(0.05) == 0
    assert len(producer) == 1
    producer.commit_transaction(PATIENCE_SECONDS)
    assert reports == [(None, 0)]
    producer.begin_transaction()
    producer.enlist(caller.given)
    producer.produce(topic, b"2", on_delivery=lambda error, message: reports.append((error.code(), message.offset())))
    producer.abort_transaction(PATIENCE_SECONDS)
    assert reports[1:] == [(KafkaError._PURGE_QUEUE, None)]


def test_what_was_sent_before_is_part_of_it(producer, caller, url, topic, entry):
    producer.begin_transaction()
    producer.produce(topic, b"before")
    assert producer.flush(PATIENCE_SECONDS) == 0
    producer.enlist(caller.given)
    caller.write(entry)
    producer.produce(topic, b"after")
    assert committed_values(url, topic) == []
    producer.commit_transaction(PATIENCE_SECONDS)
    assert committed_values(url, topic) == [b"before", b"after"]


def test_what_is_on_its_way_when_the_file_is_locked_goes_with_the_commit(make_producer, caller, url, topic, entry):
    """The caller's own rows keep the sender from writing; it gives up waiting and leaves the records to the commit."""
    producer = make_producer(linger_ms=0)
    producer.begin_transaction()
    caller.write(entry)
    producer.produce(topic, b"1")
    producer.enlist(caller.given, PATIENCE_SECONDS)
    producer.produce(topic, b"2")
    producer.commit_transaction(PATIENCE_SECONDS)
    assert (is_there(url, entry), committed_values(url, topic)) == (True, [b"1", b"2"])


def test_a_flush_leaves_what_can_only_go_with_the_commit(producer, caller, url, topic, entry):
    producer.begin_transaction()
    producer.enlist(caller.given)
    producer.produce(topic, b"1")
    assert producer.flush(PATIENCE_SECONDS) == (1 if url.startswith("sqlite") else 0)
    producer.commit_transaction(PATIENCE_SECONDS)
    assert committed_values(url, topic) == [b"1"]


def test_more_than_a_request_holds(make_producer, caller, url, topic, entry):
    """On PostgreSQL most of it is sent before; on SQLite all of it goes with the commit."""
    producer = make_producer(batch_num_messages=100, linger_ms=0)
    size = 40_000
    producer.begin_transaction()
    producer.enlist(caller.given)
    caller.write(entry)
    for number in range(900):
        producer.produce(topic, number.to_bytes(4) * (size // 4))
    producer.commit_transaction(PATIENCE_SECONDS)
    found = [(value or b"")[:4] for value in committed_values(url, topic)]
    assert found == [number.to_bytes(4) for number in range(900)]
    assert is_there(url, entry)


def test_what_cannot_be_prepared_as_it_is_is_split_where_it_stands(make_producer, caller, url, topic, monkeypatch):
    """Of several requests that go with one commit it is the second: no record is lost, doubled or moved by it."""
    producer = make_producer(batch_num_messages=2)
    written = [b"%d" % number for number in range(12)]
    # Twice, for the topic is read again in between.
    refusals = [RecordTooLarge("the last two together")] * 2
    prepare = ProducerSession.prepare

    def refuse_once(session, batches):
        if refusals and [batch.values for batch, _ in batches] == [written[-2:]]:
            raise refusals.pop()
        return prepare(session, batches)

    monkeypatch.setattr(ProducerSession, "prepare", refuse_once)
    producer.begin_transaction()
    producer.enlist(caller.given)
    for value in written:
        producer.produce(topic, value)
    producer.commit_transaction(PATIENCE_SECONDS)
    assert (committed_values(url, topic), refusals) == (written, [])


def test_a_full_queue_says_why(make_producer, caller, url, topic):
    producer = make_producer(queue_buffering_max_messages=10)
    producer.begin_transaction()
    producer.enlist(caller.given)
    for _ in range(10):
        producer.produce(topic, b"x")
    with pytest.raises(BufferError, match="enlisted SQLite" if url.startswith("sqlite") else "Queue full"):
        producer.produce(topic, b"x")
    producer.commit_transaction(PATIENCE_SECONDS)
    assert len(committed_values(url, topic)) == 10
    # It says so no longer.
    producer.begin_transaction()
    for _ in range(10):
        producer.produce(topic, b"x")
    with pytest.raises(BufferError, match=r"^Local: Queue full$"):
        producer.produce(topic, b"x")
    producer.abort_transaction(PATIENCE_SECONDS)


@pytest.mark.parametrize("end", ["commit_transaction", "abort_transaction"])
def test_a_topic_that_is_used_for_the_first_time(producer, caller, url, entry, end):
    """On SQLite it is made in the same commit, for nobody else could write; without the commit it is not there."""
    topic = f"new-{next(numbers)}"
    producer.begin_transaction()
    producer.enlist(caller.given)
    caller.write(entry)
    producer.produce(topic, b"1")
    getattr(producer, end)(PATIENCE_SECONDS)
    is_committed = end == "commit_transaction"
    assert is_there(url, entry) == is_committed
    if is_committed:
        assert committed_values(url, topic) == [b"1"]
    producer.begin_transaction()
    producer.produce(topic, b"2")
    producer.commit_transaction(PATIENCE_SECONDS)
    assert committed_values(url, topic)[-1] == b"2"


def test_a_topic_that_nobody_may_make(make_producer, caller, url, entry):
    producer = make_producer(allow_auto_create_topics=False)
    producer.begin_transaction()
    producer.enlist(caller.given)
    caller.write(entry)
    producer.produce(f"nowhere-{next(numbers)}", b"1")
    error = error_of(producer.commit_transaction, PATIENCE_SECONDS)
    assert error.txn_requires_abort()
    producer.abort_transaction(PATIENCE_SECONDS)
    assert not is_there(url, entry)


def test_two_producers_at_once(make_producer, url, topic, entry):
    if url.startswith("sqlite"):
        pytest.skip("SQLite has one writer at a time: the second enlist waits for the first commit")
    one, other = make_producer(), make_producer()
    with calling(url, "core") as first, calling(url, "driver") as second:
        for producer, caller, name in ((one, first, "one"), (other, second, "other")):
            producer.begin_transaction()
            producer.enlist(caller.given)
            caller.write(f"{entry} {name}")
            producer.produce(topic, name.encode())
        other.commit_transaction(PATIENCE_SECONDS)
        one.commit_transaction(PATIENCE_SECONDS)
    assert committed_values(url, topic) == [b"other", b"one"]


# --- with blocks ------------------------------------------------------------------------------------------------------


def test_one_with_block(producer, url, topic, entry):
    engine = application_engine(url)
    with engine.begin() as connection, producer.transaction(PATIENCE_SECONDS):
        producer.enlist(connection)
        connection.execute(text("INSERT INTO ledger VALUES (:entry)"), {"entry": entry})
        producer.produce(topic, b"1")
    engine.dispose()
    assert (is_there(url, entry), committed_values(url, topic)) == (True, [b"1"])


def test_an_exception_in_the_block_aborts_both(producer, url, topic, entry):
    engine = application_engine(url)

    def fail():
        with engine.begin() as connection, producer.transaction(PATIENCE_SECONDS):
            producer.enlist(connection)
            connection.execute(text("INSERT INTO ledger VALUES (:entry)"), {"entry": entry})
            producer.produce(topic, b"1")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    engine.dispose()
    assert (is_there(url, entry), committed_values(url, topic)) == (False, [])


def test_a_row_that_the_database_refuses_aborts_both(producer, url, topic, entry):
    engine = application_engine(url)
    insert = text("INSERT INTO ledger VALUES (:entry)")

    def fail():
        with engine.connect() as connection, producer.transaction(PATIENCE_SECONDS):
            producer.enlist(connection)
            producer.produce(topic, b"1")
            connection.execute(insert, [{"entry": entry}, {"entry": entry}])

    with pytest.raises(IntegrityError):
        fail()
    engine.dispose()
    assert (is_there(url, entry), committed_values(url, topic)) == (False, [])


def test_psycopgs_own_transaction_block(producer, url, topic, entry):
    if url.startswith("sqlite"):
        pytest.skip("only psycopg has it")
    with calling(url, "driver") as caller:
        caller.given.autocommit = True
        with caller.given.transaction():
            producer.begin_transaction()
            producer.enlist(caller.given)
            caller.write(entry)
            producer.produce(topic, b"1")
            producer.commit_transaction(PATIENCE_SECONDS)
    assert (is_there(url, entry), committed_values(url, topic)) == (True, [b"1"])


@pytest.fixture(scope="module")
def entries():
    """A mapped class of the application's."""
    mapping = registry()
    table = Table("ledger", MetaData(), Column("entry", String, primary_key=True))

    class Entry:
        def __init__(self, entry):
            self.entry = entry

    mapping.map_imperatively(Entry, table)
    yield Entry
    mapping.dispose()


def test_a_session_is_flushed_and_expires_as_after_its_own_commit(producer, url, topic, entry, entries):
    engine = application_engine(url)
    with Session(engine) as session:
        with producer.transaction(PATIENCE_SECONDS):
            producer.enlist(session)
            added = entries(entry)
            # Flushed by the commit, before the records.
            session.add(added)
            producer.produce(topic, b"1")
        assert "entry" not in added.__dict__, "it was not expired"
        assert added.entry == entry
        assert session.in_transaction()
        session.rollback()
        producer.begin_transaction()
        producer.enlist(session)
        session.add(entries(f"{entry} never"))
        producer.abort_transaction(PATIENCE_SECONDS)
        assert not session.new
        assert not session.in_transaction()
    engine.dispose()
    assert (is_there(url, entry), is_there(url, f"{entry} never")) == (True, False)


def test_what_a_session_cannot_flush_aborts_both(producer, url, topic, entry, entries):
    engine = application_engine(url)

    def fail():
        with Session(engine) as session, producer.transaction(PATIENCE_SECONDS):
            producer.enlist(session)
            session.execute(text("INSERT INTO ledger VALUES (:entry)"), {"entry": entry})
            session.add(entries(entry))
            producer.produce(topic, b"1")

    with pytest.raises(KafkaException) as caught:
        fail()
    engine.dispose()
    error = caught.value.args[0]
    assert (error.code(), error.txn_requires_abort()) == (KafkaError._FAIL, True)
    assert isinstance(caught.value.__cause__, IntegrityError)
    assert entry not in error.str()
    assert (is_there(url, entry), committed_values(url, topic)) == (False, [])


@pytest.mark.slow_but_first
@pytest.mark.parametrize("when", ["before", "meanwhile", "in a hook"])
def test_a_session_that_has_begun_on_two_engines_is_refused(producer, url, topic, entry, entries, tmp_path, when):
    """It would commit them one after the other: the other one's rows could stand alone."""
    engine, other = application_engine(url), create_engine(f"sqlite:///{tmp_path / 'other.db'}")
    with other.begin() as connection:
        connection.execute(text("CREATE TABLE orders (item TEXT)"))
    with Session(engine) as session:

        def write_there(*_):
            session.execute(text("INSERT INTO orders VALUES ('tea')"), bind_arguments={"bind": other})

        producer.begin_transaction()
        if when == "before":
            write_there()
            error = error_of(producer.enlist, session)
            session.rollback()
            assert not error.txn_requires_abort()
        else:
            producer.enlist(session)
            session.add(entries(entry))
            producer.produce(topic, b"1")
            if when == "in a hook":
                event.listen(session, "before_commit", write_there)
            else:
                write_there()
            error = error_of(producer.commit_transaction, PATIENCE_SECONDS)
            assert error.txn_requires_abort()
        assert (error.code(), "several connections (binds)" in error.str()) == (KafkaError.INVALID_REQUEST, True)
        producer.abort_transaction(PATIENCE_SECONDS)
    with other.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM orders")) == 0
    other.dispose()
    engine.dispose()
    assert (is_there(url, entry), committed_values(url, topic)) == (False, [])


def test_a_session_with_other_binds_that_it_does_not_use_is_like_any(producer, url, topic, entry, entries):
    engine, other = application_engine(url), create_engine("sqlite://")
    with Session(engine, binds={Table("orders", MetaData()): other}) as session, producer.transaction(PATIENCE_SECONDS):
        producer.enlist(session)
        session.begin_nested()
        session.add(entries(entry))
        producer.produce(topic, b"1")
    engine.dispose()
    assert (is_there(url, entry), committed_values(url, topic)) == (True, [b"1"])


def test_the_connection_of_a_session_is_refused_for_what_the_session_holds_back(producer, url, topic, entry, entries):
    engine = application_engine(url)
    with Session(engine) as session:
        producer.begin_transaction()
        error = error_of(producer.enlist, session.connection())
        assert (error.code(), "enlist the session itself" in error.str()) == (KafkaError.INVALID_REQUEST, True)
        assert not error.txn_requires_abort()
        producer.enlist(session)
        session.add(entries(entry))
        producer.produce(topic, b"1")
        producer.commit_transaction(PATIENCE_SECONDS)
    engine.dispose()
    assert (is_there(url, entry), committed_values(url, topic)) == (True, [b"1"])


@pytest.mark.slow_but_first
@pytest.mark.parametrize("is_flushed", [True, False], ids=["flushed", "held back"])
def test_a_session_on_an_enlisted_connection_holds_nothing_back(producer, url, topic, entry, entries, is_flushed):
    engine = application_engine(url)
    with engine.connect() as connection:
        producer.begin_transaction()
        producer.enlist(connection)
        # It joins with a savepoint on SQLite as well: there is a BEGIN before.
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            session.connection()
            session.add(entries(entry))
            producer.produce(topic, b"1")
            if is_flushed:
                session.flush()
                producer.commit_transaction(PATIENCE_SECONDS)
                session.invalidate()
            else:
                error = error_of(producer.commit_transaction, PATIENCE_SECONDS)
                assert (error.code(), error.txn_requires_abort()) == (KafkaError.INVALID_REQUEST, True)
                assert "enlist the session itself, or flush it" in error.str()
                session.expunge_all()
                producer.abort_transaction(PATIENCE_SECONDS)
                session.invalidate()
    engine.dispose()
    both = (True, [b"1"]) if is_flushed else (False, [])
    assert (is_there(url, entry), committed_values(url, topic)) == both


@pytest.mark.slow_but_first
@pytest.mark.parametrize("hook", ["after_insert", "after_flush", "before_commit"])
def test_what_hooks_of_a_session_produce_goes_with_its_commit(producer, url, topic, entry, entries, hook):
    engine, seen = application_engine(url), []

    def produce(*_):
        seen.append("before")
        producer.produce(topic, b"of the hook")

    with Session(engine) as session:
        target = entries if hook == "after_insert" else session
        event.listen(target, hook, produce)
        event.listen(session, "after_commit", lambda _: seen.append("after"))
        try:
            with producer.transaction(PATIENCE_SECONDS):
                producer.enlist(session)
                session.add(entries(entry))
                producer.produce(topic, b"1")
        finally:
            event.remove(target, hook, produce)
        assert session.scalar(text("SELECT count(*) FROM ledger WHERE entry = :entry"), {"entry": entry}) == 1
    engine.dispose()
    assert committed_values(url, topic) == [b"1", b"of the hook"]
    assert seen == ["before", "after"]


def test_a_hook_that_refuses_says_why_and_nothing_is_committed(producer, url, topic, entry, entries):
    engine = application_engine(url)

    def refuse(_):
        raise ValueError(f"{entry} is secret")

    def produce_too_much(_):
        producer.produce(topic, bytes(2_000_000))

    for hook, told in ((refuse, "(ValueError)"), (produce_too_much, "Message size too large")):
        with Session(engine) as session:
            event.listen(session, "before_commit", hook)
            producer.begin_transaction()
            producer.enlist(session)
            session.add(entries(entry))
            producer.produce(topic, b"1")
            with pytest.raises(KafkaException) as caught:
                producer.commit_transaction(PATIENCE_SECONDS)
            event.remove(session, "before_commit", hook)
            # It is not asked again.
            assert error_of(producer.commit_transaction, PATIENCE_SECONDS).str() == caught.value.args[0].str()
            producer.abort_transaction(PATIENCE_SECONDS)
            assert not session.in_transaction()
        error = caught.value.args[0]
        assert (error.code(), error.txn_requires_abort()) == (KafkaError._FAIL, True)
        assert told in error.str()
        assert "nothing was committed" in error.str()
        assert entry not in error.str()
        assert type(caught.value.__cause__) is (ValueError if hook is refuse else KafkaException)
    engine.dispose()
    assert (is_there(url, entry), committed_values(url, topic)) == (False, [])


def test_a_hook_that_raises_after_the_commit_undoes_nothing(producer, url, topic, entry):
    engine = application_engine(url)
    with Session(engine) as session:

        def raise_late(_):
            raise ZeroDivisionError

        event.listen(session, "after_commit", raise_late)
        producer.begin_transaction()
        producer.enlist(session)
        session.execute(text("INSERT INTO ledger VALUES (:entry)"), {"entry": entry})
        producer.produce(topic, b"1")
        with pytest.raises(ZeroDivisionError):
            producer.commit_transaction(PATIENCE_SECONDS)
        event.remove(session, "after_commit", raise_late)
    engine.dispose()
    assert (is_there(url, entry), committed_values(url, topic)) == (True, [b"1"])
    producer.begin_transaction()

"""Records, offsets and the application's rows in one commit that the producer makes, on a connection of any kind."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import threading

import psycopg
import pytest
from sqlalchemy import Column, MetaData, String, Table, event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, registry

from tests.clients.callers import KINDS, application_engine, calling, ledger_of, make_ledger, open_driver
from tests.clients.membership.steps import TP
from tests.clients.steps import NO_MEMBER, PATIENCE_SECONDS, Refusal, create_topic, error_of, read_to_end, values
from txnstore import OFFSET_INVALID, Consumer, KafkaError, KafkaException, Producer
from txnstore.db.opening import open_store

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def url(module_url):
    """One store of each database for all tests: they keep to topics, ids and entries of their own."""
    open_store(module_url).close()
    make_ledger(module_url)
    with contextlib.closing(open_driver(module_url)) as driver:
        driver.execute("CREATE UNIQUE INDEX ledger_of_one ON ledger (entry)")
        driver.commit()
    return module_url


@pytest.fixture
def make_producer(url):
    """Make transactional producers, ready to begin; they are closed after the test."""
    made = []

    def make(transactional_id=None, **configuration):
        settings = {key.replace("_", "."): value for key, value in configuration.items()}
        transactional_id = transactional_id or f"producer-{next(_numbers)}"
        producer = Producer({"bootstrap.servers": url, "transactional.id": transactional_id, **settings})
        made.append(producer)
        producer.init_transactions(PATIENCE_SECONDS)
        return producer

    yield make
    for producer in made:
        producer.close()


@pytest.fixture
def producer(make_producer):
    return make_producer()


@pytest.fixture
def topic(url):
    return create_topic(url, f"topic-{next(_numbers)}")


@pytest.fixture
def entry():
    return f"entry-{next(_numbers)}"


@pytest.fixture
def caller(url):
    with calling(url, "core") as caller:
        yield caller


@pytest.fixture(params=KINDS)
def any_caller(url, request):
    with calling(url, request.param) as caller:
        yield caller


def committed_values(url, topic):
    return values(read_to_end(url, topic))


def is_there(url, entry):
    return entry in ledger_of(url)


def rows_of(caller, statement):
    given = caller.given
    if caller.kind.endswith("driver"):
        return given.execute(statement).fetchall()
    return given.execute(text(statement)).all()


# --- one commit ------------------------------------------------------------------------------------------------------


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
    """Whatever the database says of the rows' age, the records say the same."""
    if url.startswith("sqlite"):
        pytest.skip("SQLite does not tell which database transaction wrote a row")
    producer.begin_transaction()
    producer.enlist(caller.given)
    caller.write(entry)
    producer.produce(topic, b"1")
    producer.commit_transaction(PATIENCE_SECONDS)
    with psycopg.connect(application_engine(url).url.set(drivername="postgresql").render_as_string(False)) as driver:
        (row,) = driver.execute("SELECT xmin::text FROM ledger WHERE entry = %s", (entry,)).fetchone()
        batches = driver.execute(
            "SELECT DISTINCT xmin::text FROM txnstore.record_batches WHERE partition_id IN"
            " (SELECT partition_id FROM txnstore.partitions JOIN txnstore.topics t USING (topic_id) WHERE t.name = %s)",
            (topic,),
        ).fetchall()
    driver.close()
    assert batches == [(row,)]


def test_offsets_are_committed_with_it(producer, caller, url, topic, entry):
    group = f"group-{next(_numbers)}"
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


def test_rows_alone_are_committed_too(producer, any_caller, url, entry):
    producer.begin_transaction()
    producer.enlist(any_caller.given)
    any_caller.write(entry)
    producer.commit_transaction(PATIENCE_SECONDS)
    assert is_there(url, entry)


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
    topic = f"new-{next(_numbers)}"
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
    producer.produce(f"nowhere-{next(_numbers)}", b"1")
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


# --- the caller's own endings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_the_callers_own_ending_is_refused(producer, any_caller, url, topic, entry, ending):
    if any_caller.is_sqlite and any_caller.kind.endswith("driver"):
        pytest.skip("sqlite3's own type takes no guard: seen when the producer commits")
    producer.begin_transaction()
    producer.enlist(any_caller.given)
    any_caller.write(entry)
    producer.produce(topic, b"1")
    error = error_of(getattr(any_caller, ending))
    call = "commit_transaction()" if ending == "commit" else "abort_transaction()"
    assert (error.code(), call in error.str()) == (KafkaError._STATE, True)
    # Nothing has happened: it goes on.
    any_caller.write(f"{entry} more")
    producer.commit_transaction(PATIENCE_SECONDS)
    assert (is_there(url, entry), is_there(url, f"{entry} more")) == (True, True)
    assert committed_values(url, topic) == [b"1"]


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
    settings = {"group.id": f"group-{next(_numbers)}", "enable.auto.commit": False}
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


# --- bad inputs -------------------------------------------------------------------------------------------------------


def test_outside_of_a_transaction(producer, caller):
    error = error_of(producer.enlist, caller.given)
    assert error.code() == KafkaError._STATE
    assert error_of(Producer({"bootstrap.servers": "sqlite://"}).enlist, caller.given).code() == (
        KafkaError._NOT_CONFIGURED
    )


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


def test_a_connection_in_autocommit_mode(producer, url):
    if url.startswith("sqlite"):
        pytest.skip("on SQLite enlist() begins by itself")
    with calling(url, "driver") as caller:
        caller.given.autocommit = True
        producer.begin_transaction()
        error = error_of(producer.enlist, caller.given)
        assert (error.code(), "autocommit" in error.str()) == (KafkaError.INVALID_REQUEST, True)
        producer.abort_transaction(PATIENCE_SECONDS)


def test_another_sqlite_file(producer, tmp_path):
    other = sqlite3.connect(tmp_path / "other.db")
    producer.begin_transaction()
    error = error_of(producer.enlist, other)
    assert (error.code(), "outbox" in error.str()) == (KafkaError.INVALID_REQUEST, True)
    other.close()
    producer.abort_transaction(PATIENCE_SECONDS)


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


def test_closing_in_another_thread_does_not_part_rows_and_records(make_producer, url, topic, entry):
    """While the session writes what it holds back, the commit is on its way already."""
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
        closer.start()
        assert finished.wait(PATIENCE_SECONDS)

    producer._transactions.finish = finish_and_tell
    with Session(engine) as session:
        event.listen(session, "before_commit", close)
        producer.begin_transaction()
        producer.enlist(session)
        session.execute(text("INSERT INTO ledger VALUES (:entry)"), {"entry": entry})
        producer.produce(topic, b"1")
        with contextlib.suppress(RuntimeError):
            producer.commit_transaction(PATIENCE_SECONDS)
        closer.join(PATIENCE_SECONDS)
    engine.dispose()
    assert (is_there(url, entry), committed_values(url, topic)) == (True, [b"1"])


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

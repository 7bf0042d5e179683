"""The Outbox: what it takes, what it refuses before anything is written, and its thread that comes and goes."""

from __future__ import annotations

import gc
import multiprocessing
import queue
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import create_engine, event, insert
from sqlalchemy.pool import StaticPool

from tests.databases import on_sqlite_alone
from tests.outbox.conftest import engine_url, plain_connection
from tests.outbox.steps import records, values, waiting
from txnstore import Consumer, KafkaError, KafkaException, Outbox
from txnstore.background_thread import BackgroundThread
from txnstore.clients.consumer import fetcher
from txnstore.db.callers.attached_files import FILES
from txnstore.db.opening import open_store
from txnstore.db.schema import outbox as outbox_table
from txnstore.db.store import Store
from txnstore.errors import PermissionDenied, StoreUnavailable
from txnstore.log.outbox import rows as outbox_rows
from txnstore.log.outbox import sequencer
from txnstore.log.outbox.sequencer import OutboxPoller, drain_outbox, sequence_outbox
from txnstore.outbox import background

PATIENCE_SECONDS = 60.0


@pytest.fixture
def outbox(url):
    with Outbox(url, sequencer=False) as found:
        yield found


def eventually(condition, timeout_seconds=PATIENCE_SECONDS):
    """Wait until it holds; a bounded wait."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


# --- arguments --------------------------------------------------------------------------------------------------------

REFUSED = {
    "no text for a topic": ({"topic": 5}, TypeError, "a topic's name must be str, not int"),
    "a bad name": ({"topic": "a b"}, KafkaException, "a-z A-Z 0-9"),
    "an empty name": ({"topic": ""}, KafkaException, "not empty"),
    "a number for a value": ({"value": 5}, TypeError, "bytes-like"),
    "a number for a key": ({"key": 5}, TypeError, "bytes-like"),
    "half a letter": ({"value": "\ud800"}, UnicodeEncodeError, "surrogates"),
    "text for a partition": ({"partition": "1"}, TypeError, "integer"),
    "a partition below -1": ({"partition": -2}, KafkaException, "0 or more, not -2"),
    "a partition too large": ({"partition": 2**31}, OverflowError, "maximum"),
    "text for headers": ({"headers": "a=1"}, TypeError, "dict or list"),
    "a header of three": ({"headers": [("a", b"1", 2)]}, TypeError, "tuples"),
    "a number as a header": ({"headers": {"a": 1}}, TypeError, "header value"),
    "a time before all times": ({"timestamp": -1}, KafkaException, "milliseconds since 1970, not -1"),
    "a time too large": ({"timestamp": 2**63}, OverflowError, "too big"),
    "text for a time": ({"timestamp": "now"}, TypeError, "integer"),
    "too many bytes": ({"value": b"x" * 1_000_001}, KafkaException, "1000001 bytes is larger than message.max.bytes"),
}


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("arguments", "error", "text"), REFUSED.values(), ids=list(REFUSED))
def test_a_bad_argument_is_refused_before_anything_is_written(url, store, outbox, caller, arguments, error, text):
    connection = caller().connection
    with pytest.raises(error, match=text):
        outbox.produce(connection, **{"topic": "t"} | arguments)
    good = {"topic": "t", "value": b"good"}
    with pytest.raises(error, match=text) as told:
        outbox.produce_all(connection, [good, {"topic": "t"} | arguments, good])
    assert "record 1; nothing was inserted" in told.value.__notes__
    connection.commit()
    assert waiting(store) == 0


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (b"v", "record 0 must be a mapping"),
        ({"value": b"v"}, "record 0 needs a 'topic'"),
        ({"topic": "t", "values": b"v"}, "record 0 has an unknown 'values'; it may have headers, key, partition"),
    ],
    ids=["bytes", "no topic", "a wrong name"],
)
def test_what_is_no_record_is_refused(outbox, caller, record, text):
    with pytest.raises(TypeError, match=text):
        outbox.produce_all(caller().connection, [record])


def test_no_records_are_no_statement(outbox):
    assert outbox.produce_all(None, []) == 0


def test_an_outbox_that_was_closed_refuses(url, caller):
    outbox = Outbox(url)
    outbox.close()
    outbox.close()
    for call in (
        lambda: outbox.produce(caller().connection, "t"),
        lambda: outbox.produce_all(caller().connection, []),
        lambda: outbox.watch(object, "t", value=lambda found, change: None),
        outbox.sequence,
    ):
        with pytest.raises(RuntimeError, match="has been closed"):
            call()


@pytest.mark.parametrize(
    ("database", "error", "text"),
    [
        (5, TypeError, "not int"),
        (None, TypeError, "not NoneType"),
        ("mysql://localhost/x", KafkaException, "no support|kind of database"),
        ({"bootstrap.servers": "sqlite:///x.db", "linger": 5}, KafkaException, "linger"),
        ("postgresql://me:secret@/", KafkaException, "names no database"),
    ],
    ids=["a number", "nothing", "another kind", "a wrong key", "no name"],
)
def test_what_names_no_database_is_refused(database, error, text):
    with pytest.raises(error, match=text) as told:
        Outbox(database)
    assert "secret" not in str(told.value)


def test_an_engine_that_nobody_else_can_reach_is_refused():
    engine = create_engine("sqlite://")
    with pytest.raises(KafkaException, match="is in memory"):
        Outbox(engine)
    engine.dispose()


def test_an_engine_or_a_configuration_will_do(url, store, engine):
    for database in (engine, {"bootstrap.servers": url, "linger.ms": 5, "enable.idempotence": True}):
        with Outbox(database, sequencer=False) as outbox, engine.begin() as connection:
            outbox.produce(connection, "t", b"v")
    assert waiting(store) == 2


@pytest.mark.slow
def test_another_schema(txnstore_postgresql_url):
    engine = create_engine(engine_url(txnstore_postgresql_url))
    with Outbox(engine, schema="Messages", sequencer=False) as outbox:
        outbox.open()
        with engine.begin() as connection:
            outbox.produce(connection, "t", b"core")
        plain = plain_connection(txnstore_postgresql_url)
        with plain:
            outbox.produce(plain, "t", b"plain")
        assert outbox.sequence() == 2
    with open_store(txnstore_postgresql_url, schema="Messages") as store:
        assert values(store) == [b"core", b"plain"]
    engine.dispose()


def test_no_password_is_shown(txnstore_postgres_server):
    engine = create_engine(engine_url(txnstore_postgres_server.url("nowhere", "postgres", "secret")))
    outbox = Outbox(engine)
    assert "secret" not in repr(outbox)
    with pytest.raises(KafkaException) as told:
        outbox.open()
    # There is no such database; a server that asks for the password says that it is the wrong one.
    assert told.value.args[0].code() in (KafkaError._INVALID_ARG, KafkaError.CLUSTER_AUTHORIZATION_FAILED)
    assert "secret" not in str(told.value)


def test_one_statement_and_nothing_else_runs_on_the_callers_connection(url, engine, outbox):
    seen = []
    with engine.connect() as connection:
        event.listen(connection, "before_cursor_execute", lambda *arguments: seen.append(arguments[2]))
        outbox.produce(connection, "t", b"v")
        outbox.produce_all(connection, [{"topic": "t"}, {"topic": "t"}])
        # On SQLite it is asked before which file it has open: that begins nothing.
        asked, inserts = seen[0::2], seen[1::2]
        if not url.startswith("sqlite"):
            asked, inserts = [], seen
        assert set(asked) <= {FILES}
        assert len(inserts) == 2
        assert all(statement.startswith("INSERT INTO") for statement in inserts)


# --- the thread -------------------------------------------------------------------------------------------------------


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "txnstore-outbox"]


def test_the_thread_makes_records_of_rows_and_wakes_readers(url, connect):
    with (
        Outbox(url) as outbox,
        Consumer({"bootstrap.servers": url, "group.id": "g", "auto.offset.reset": "earliest"}) as consumer,
    ):
        connection = connect()
        outbox.produce(connection, "t", b"first")
        connection.commit()
        eventually(lambda: not waiting_in(url))
        consumer.subscribe(["t"])
        assert next_value(consumer) == b"first"
        outbox.produce(connection, "t", b"second")
        connection.commit()
        assert next_value(consumer) == b"second"
    assert threads() == []


def waiting_in(url):
    with open_store(url) as store:
        return waiting(store)


def test_nothing_is_opened_and_no_thread_runs_before_the_first_record(txnstore_empty_url):
    outbox = Outbox(txnstore_empty_url)
    assert threads() == []
    assert outbox._connection.opened is None
    outbox.close()


def test_closing_moves_what_is_committed(url, store, connect):
    connection = connect()
    outbox = Outbox(url)
    outbox.produce(connection, "t", b"v")
    connection.commit()
    outbox.close()
    assert values(store) == [b"v"]
    assert threads() == []


def test_closing_moves_what_takes_several_rounds(url, store, connect, monkeypatch):
    """A refused row ends a round, and so does a full page."""
    connection = connect()
    outbox = Outbox(url)
    turn = OutboxPoller.turn

    def turn_once_it_is_closed(poller):
        eventually(lambda: outbox._closed)
        return turn(poller)

    monkeypatch.setattr(OutboxPoller, "turn", turn_once_it_is_closed)
    monkeypatch.setattr(outbox_rows, "PAGE_ROWS_MAX", 2)
    for number in range(3):
        outbox.produce(connection, "t", b"bad %d" % number, partition=9)
        connection.commit()
        outbox.produce(connection, "t", b"good %d" % number)
        connection.commit()
    outbox.close(PATIENCE_SECONDS)
    assert values(store) == [b"good 0", b"good 1", b"good 2"]
    assert threads() == []


@pytest.fixture
def held_once_closed(url, store, connect, monkeypatch):
    """An outbox with a committed row, that somebody else holds from its close on; and what lets it go."""
    monkeypatch.setattr(sequencer, "TRY_TIMEOUT_MS", 10)
    held, let_go = threading.Event(), threading.Event()

    def hold():
        def work(connection):
            outbox_rows.lock_outbox(connection, waits=True)
            held.set()
            assert let_go.wait(PATIENCE_SECONDS)

        store.write(work)

    outbox, turn = Outbox(url), OutboxPoller.turn

    def turn_once_it_is_closed(poller):
        eventually(lambda: outbox._closed)
        return turn(poller)

    monkeypatch.setattr(OutboxPoller, "turn", turn_once_it_is_closed)
    connection = connect()
    outbox.produce(connection, "t", b"v")
    connection.commit()
    with closing(outbox):
        holder = threading.Thread(target=hold)
        holder.start()
        try:
            assert held.wait(PATIENCE_SECONDS)
            yield outbox, let_go
        finally:
            let_go.set()
            holder.join()


def test_closing_waits_for_one_who_holds_the_rows_and_moves_what_is_committed(held_once_closed, store, monkeypatch):
    outbox, let_go = held_once_closed
    next_pause, pauses = OutboxPoller._next_pause, []

    def count(poller):
        pauses.append(poller)
        if len(pauses) == 3:
            let_go.set()
        return next_pause(poller)

    monkeypatch.setattr(OutboxPoller, "_next_pause", count)
    outbox.close(PATIENCE_SECONDS)
    assert values(store) == [b"v"]
    assert threads() == []


def test_closing_does_not_wait_for_what_comes_later_while_another_moves_it(url, store, connect, caplog, monkeypatch):
    connection, outbox, turns = connect(), Outbox(url), []

    def turn_of_another(poller):
        eventually(lambda: outbox._background._closing)
        sequence_outbox(store)
        turns.append(poller)
        later = {"topic": "t", "value": b"later %d" % len(turns)}
        store.write(lambda writing: writing.execute(insert(outbox_table), later))
        poller.is_busy = len(turns) < 10
        return 0.001

    monkeypatch.setattr(OutboxPoller, "turn", turn_of_another)
    outbox.produce(connection, "t", b"v")
    connection.commit()
    outbox.close(PATIENCE_SECONDS)
    # Of which the first may have begun before it was closed.
    assert len(turns) <= 2
    assert values(store)[0] == b"v"
    assert (caplog.records, threads()) == ([], [])


@pytest.mark.parametrize("is_awaited", [False, True])
def test_closing_says_what_is_left_if_its_time_is_over(held_once_closed, store, caplog, monkeypatch, is_awaited):
    outbox, let_go = held_once_closed
    close = BackgroundThread.close
    if is_awaited:
        # Its thread may end by itself just before it is not waited for any more.
        monkeypatch.setattr(BackgroundThread, "close", lambda thread, _: close(thread, PATIENCE_SECONDS))
    outbox.close(0.05)
    assert [record.event for record in caplog.records if hasattr(record, "event")] == ["outbox_left"]
    assert waiting(store) == 1
    let_go.set()
    eventually(lambda: threads() == [])


class MuteError(Exception):
    """Cannot say what it is."""

    def __str__(self):
        raise ValueError


@pytest.mark.parametrize(
    ("error", "text"), [(StoreUnavailable("it is away"), "it is away"), (MuteError(), "MuteError")]
)
def test_closing_says_what_is_left_if_the_rows_cannot_be_moved(url, store, connect, caplog, monkeypatch, error, text):
    def turn(_):
        raise error

    monkeypatch.setattr(OutboxPoller, "turn", turn)
    outbox, connection = Outbox(url), connect()
    outbox.produce(connection, "t", b"v")
    connection.commit()
    outbox.close(PATIENCE_SECONDS)
    (told,) = [each.getMessage() for each in caplog.records if getattr(each, "event", None) == "outbox_left"]
    assert f"moved: {text}; those that wait are left to" in told
    assert waiting(store) == 1
    assert threads() == []


@on_sqlite_alone
def test_closing_within_an_open_transaction_of_the_callers_does_not_wait_for_its_end(url, store, connect, caplog):
    connection = connect()
    with Outbox(url, sequencer=False) as before:
        before.produce(connection, "t", b"committed")
        connection.commit()
    outbox = Outbox(url)
    outbox.produce(connection, "t", b"open")
    begun = time.monotonic()
    outbox.close(PATIENCE_SECONDS)
    assert time.monotonic() - begun < PATIENCE_SECONDS / 2
    assert [record.event for record in caplog.records if hasattr(record, "event")] == ["outbox_left"]
    assert "commit before you close the outbox" in caplog.text
    connection.commit()
    assert waiting(store) == 2


def test_without_its_thread_the_rows_wait(url, store, connect):
    connection = connect()
    with Outbox(url, sequencer=False) as outbox:
        outbox.produce(connection, "t", b"v")
        connection.commit()
        assert threads() == []
    assert waiting(store) == 1


@pytest.mark.slow
def test_the_thread_ends_with_an_outbox_that_nobody_holds(url, connect):
    outbox = Outbox(url)
    outbox.produce(connect(), "t", b"v")
    (thread,) = threads()
    del outbox
    # The thread may be at work, and hold it for a moment.
    eventually(lambda: gc.collect() >= 0 and not thread.is_alive())


def test_the_thread_outlives_a_database_that_is_away(txnstore_postgresql_url, caplog, monkeypatch):
    with Outbox(txnstore_postgresql_url) as outbox, open_store(txnstore_postgresql_url) as store:
        connection = plain_connection(txnstore_postgresql_url)
        looks = iter([True] * 3)
        real = Store.read

        def read(self, *arguments, **options):
            if threading.current_thread().name == "txnstore-outbox" and next(looks, None):
                raise StoreUnavailable
            return real(self, *arguments, **options)

        monkeypatch.setattr(Store, "read", read)
        caplog.set_level("INFO")
        with connection:
            outbox.produce(connection, "t", b"v")
        eventually(lambda: values(store) == [b"v"])
    # Once, however often it is tried, and once that it is over.
    assert next(looks, None) is None
    told = [record.event for record in caplog.records if getattr(record, "event", "").startswith("outbox_")]
    assert told == ["outbox_put_off", "outbox_goes_on"]
    assert "cannot be moved at the moment" in caplog.text


def child_of_a_fork(outbox, url):
    connection = plain_connection(url)
    outbox.produce(connection, "t", b"child")
    connection.commit()
    connection.close()
    outbox.close()


@on_sqlite_alone  # the pause is the thread's
def test_after_an_error_the_thread_waits_whatever_comes_and_looks_once_more_at_the_end(
    url, store, connect, monkeypatch
):
    looks: queue.SimpleQueue[None] = queue.SimpleQueue()

    def turn(_):
        looks.put(None)
        raise StoreUnavailable("it is away")

    monkeypatch.setattr(OutboxPoller, "turn", turn)
    monkeypatch.setattr(background, "PAUSE_FIRST_SECONDS", 10 * PATIENCE_SECONDS)
    monkeypatch.setattr(background, "PAUSE_LAST_SECONDS", 10 * PATIENCE_SECONDS)
    with Outbox(url) as outbox, closing(connect()) as connection:
        outbox.produce(connection, "t", b"first")
        looks.get(timeout=PATIENCE_SECONDS)
        outbox.produce(connection, "t", b"second")
        connection.commit()
        with pytest.raises(queue.Empty):
            looks.get(timeout=0.1)
    looks.get_nowait()
    assert looks.empty()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_child_of_a_fork_has_a_thread_of_its_own(url, store, connect):
    with Outbox(url) as outbox:
        connection = connect()
        outbox.produce(connection, "t", b"parent")
        connection.commit()
        connection.close()
        eventually(lambda: values(store) == [b"parent"])
        process = multiprocessing.get_context("fork").Process(target=child_of_a_fork, args=(outbox, url))
        process.start()
        process.join(PATIENCE_SECONDS)
        assert process.exitcode == 0
        # The parent's thread may have been quicker, and be about to commit.
        eventually(lambda: values(store) == [b"parent", b"child"])


def opens(outbox, _):
    assert outbox.open() is outbox


def sequences(outbox, url):
    connection = plain_connection(url)
    outbox.produce(connection, "t", b"child")
    connection.commit()
    connection.close()
    assert outbox.sequence() == 1


def finds_it_closed(outbox, _):
    with pytest.raises(KafkaException):
        outbox.open()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_child_of_a_fork_opens_and_sequences_over_connections_of_its_own(url, store):
    """As the workers of a server that loads the application before it forks them."""

    def in_child(work):
        process = multiprocessing.get_context("fork").Process(target=work, args=(outbox, url))
        process.start()
        process.join(PATIENCE_SECONDS)
        assert process.exitcode == 0

    with Outbox(url, sequencer=False).open() as outbox:
        in_child(opens)
        in_child(sequences)
    in_child(finds_it_closed)
    assert values(store) == [b"child"]


def test_a_relative_path_leads_to_the_same_file_wherever_the_process_goes(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    engine = create_engine("sqlite:///shop.db")
    with Outbox("sqlite:///shop.db", sequencer=False) as outbox, closing(sqlite3.connect("shop.db")) as plain:
        monkeypatch.chdir(tmp_path / "there")
        outbox.open()
        with engine.begin() as connection:
            outbox.produce(connection, "t", "1")
        outbox.produce(plain, "t", "2")
        plain.commit()
        assert outbox.sequence() == 2
        # The same name is another file here.
        elsewhere = create_engine("sqlite:///shop.db")
        with elsewhere.connect() as connection, pytest.raises(KafkaException, match="this outbox is in"):
            outbox.produce(connection, "t", "3")
    elsewhere.dispose()
    engine.dispose()


def test_an_outbox_on_an_engine_is_where_the_engine_leads_wherever_the_process_has_gone(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    engine = create_engine("sqlite:///shop.db", poolclass=StaticPool)
    with engine.connect() as connection:
        connection.exec_driver_sql("BEGIN")
        connection.exec_driver_sql("CREATE TABLE orders (number INTEGER)")
        monkeypatch.chdir(tmp_path / "there")
        outbox = Outbox(engine, sequencer=False)
        # What the application does on the pool's one connection goes on.
        connection.commit()
        assert connection.exec_driver_sql("SELECT count(*) FROM orders").scalar() == 0
    with outbox.open():
        with engine.begin() as connection:
            outbox.produce(connection, "t", "1")
        assert outbox.sequence() == 1
    assert list(Path().iterdir()) == []
    engine.dispose()


def test_an_outbox_on_an_engine_whose_folder_is_made_later_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = create_engine("sqlite:///later/shop.db")
    outbox = Outbox(engine, sequencer=False)
    Path("later").mkdir()
    with outbox.open(), engine.begin() as connection:
        outbox.produce(connection, "t", "1")
    engine.dispose()


# --- others who make records of rows ----------------------------------------------------------------------------------


def test_a_consumer_makes_records_of_what_it_waits_for(url, caller, monkeypatch):
    """Nobody else is there: also the topic is made by the first row."""
    monkeypatch.setattr(fetcher, "OUTBOX_LOOK_SECONDS", 0.2)
    with Consumer(
        {
            "bootstrap.servers": url,
            "group.id": "g",
            "auto.offset.reset": "earliest",
            "topic.metadata.refresh.interval.ms": 200,
        }
    ) as consumer:
        consumer.subscribe(["t"])
        caller().insert(b"first").commit()
        assert next_value(consumer) == b"first"
        caller().insert(b"second").commit()
        assert next_value(consumer) == b"second"


def next_value(consumer):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        message = consumer.poll(1)
        if message is not None and message.error() is None:
            return message.value()
    raise AssertionError("nothing came")


def test_a_consumer_that_may_only_read_reads_on(url, monkeypatch, caller, store):
    """On a copy that takes no writes, say: it reads what others make records of."""
    caller().insert(b"made").commit()
    assert sequence_outbox(store).moved_count == 1
    caller().insert(b"not made").commit()
    tries = []

    def refuse(*_, **__):
        tries.append(True)
        raise PermissionDenied

    monkeypatch.setattr("txnstore.clients.consumer.fetcher.sequence_outbox", refuse)
    configuration = {"bootstrap.servers": url, "group.id": "g", "auto.offset.reset": "earliest"}
    with Consumer(configuration) as consumer:
        consumer.subscribe(["t"])
        assert next_value(consumer) == b"made"
        eventually(lambda: tries)
        caller().insert(b"more").commit()
        assert consumer.poll(0.5) is None
        monkeypatch.undo()
        assert drain_outbox(store) == 2
        assert next_value(consumer) == b"not made"
    assert len(tries) == 1


def test_plain_sql_of_any_language_will_do(url, store, sql_program):
    statements = {
        "sqlite": (
            "INSERT INTO txnstore_outbox (topic, key, value, headers)"
            """ VALUES ('t', CAST('k' AS BLOB), CAST('v' AS BLOB), '["a","1"]');"""
        ),
        "postgresql": (
            "INSERT INTO txnstore.outbox (topic, key, value, headers)"
            """ VALUES ('t', convert_to('k', 'UTF8'), 'v', '["a","1"]');"""
        ),
    }
    sql_program(url, f"BEGIN; {statements[store.backend.name]} COMMIT;")
    with Outbox(url, sequencer=False) as outbox:
        assert outbox.sequence() == 1
    ((record,),) = records(store)
    assert (record.key, record.value, record.headers) == (b"k", b"v", (("a", b"1"),))

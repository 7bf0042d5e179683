"""Database transactions as the store runs them: once or again from the start, within limits, nothing left open."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest
from sqlalchemy import bindparam, insert, select, text, update

from txnstore.db import store as store_module
from txnstore.db.backend import NOTHING, Limits
from txnstore.db.opening import open_store
from txnstore.db.postgresql.connections import PostgreSQLConnection
from txnstore.db.schema import groups, record_batches
from txnstore.db.statements import HotStatement
from txnstore.errors import OutcomeUnknown, StatementFailed, StoreBusy, StoreClosed, StoreUnavailable, WriteConflict
from txnstore.log.append import Append, append
from txnstore.log.bounds import read_bounds
from txnstore.log.codec import encode
from txnstore.log.fetch import fetch
from txnstore.log.topics import ensure_topic
from txnstore.model import Record
from txnstore.testing.postgres_server import connection_string

#: What comes at once comes within, on whatever machine; what does not waits for its lock, or for news, for longer.
AT_ONCE_SECONDS = 8
CHILDREN = Path(__file__).parents[1] / "faults" / "children.py"


class Orders:
    """A topic with one partition."""

    def __init__(self, store):
        self.store = store
        (self.partition_id,) = store.write(lambda connection: ensure_topic(connection, "orders")).partition_ids

    def append(self, connection, value):
        return append(connection, [Append(self.partition_id, encode([Record(value)]))])

    def add(self, value):
        self.store.write(lambda connection: self.append(connection, value))

    def values(self):
        page = self.store.read(lambda connection: fetch(connection, {self.partition_id: 0}))[self.partition_id]
        return [record.value for batch in page.batches for record in batch.records()]


@pytest.fixture
def orders(store):
    return Orders(store)


@pytest.fixture
def start_child():
    with contextlib.ExitStack() as children:

        def start(function, *arguments):
            child = subprocess.Popen(
                [sys.executable, str(CHILDREN), function, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            children.enter_context(child)
            children.callback(child.kill)
            return child

        yield start


def read(child):
    return child.stdout.readline().strip()


def tell(child):
    child.stdin.write("\n")
    child.stdin.flush()


def until(condition):
    pause = threading.Event()
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "not within 60 s"
        pause.wait(0.01)


def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_an_error_of_the_work_rolls_back_and_comes_out_as_it_is(orders):
    def work(connection):
        orders.append(connection, b"a book")
        raise LookupError("no such price")

    with pytest.raises(LookupError, match="no such price"):
        orders.store.write(work)
    assert orders.values() == []
    assert orders.store.engine.pool.checkedout() == 0


@pytest.mark.slow_but_first
@pytest.mark.parametrize("error", [WriteConflict, StoreUnavailable, StoreBusy])
def test_work_that_fails_for_a_reason_that_passes_is_run_again_from_the_start(orders, error):
    tries = []

    def work(connection):
        orders.append(connection, b"a book")
        tries.append(1)
        if len(tries) < 4:
            raise error

    orders.store.write(work)
    assert len(tries) == 4
    assert orders.values() == [b"a book"]


_MAKE_GROUP = HotStatement(insert(groups).values(generation=0, commit_number=0, last_update_ms=0, assignor=None))
_RAISE_GENERATION = HotStatement(
    update(groups).where(groups.c.group_id == bindparam("of")).values(generation=groups.c.generation + 1)
)


def generation(store, group_id):
    return store.read(
        lambda connection: connection.execute(
            select(groups.c.generation).where(groups.c.group_id == group_id)
        ).scalar_one_or_none()
    )


@pytest.mark.slow_but_first
@pytest.mark.parametrize("group_id", ["readers", "50 % off; DROP", "it's \\'quoted'", "%s %(a)s", "ä\n$1"])
def test_statements_written_at_once_are_one_database_transaction(store, group_id):
    make, change = (_MAKE_GROUP, {"group_id": group_id}), (_RAISE_GENERATION, {"of": group_id})
    assert store.write_at_once([make, change, change], NOTHING) == [1, 1, 1]
    assert generation(store, group_id) == 2
    # The second one fails: the name is taken.
    with pytest.raises(StatementFailed):
        store.write_at_once([change, make, change], NOTHING)
    assert generation(store, group_id) == 2
    assert store.write_at_once([(_RAISE_GENERATION, {"of": "nobody"}), change], NOTHING) == [0, 1]
    assert generation(store, group_id) == 3
    assert store.engine.pool.checkedout() <= 1


def test_statements_written_at_once_are_repeated_as_long_as_somebody_else_has_the_lock(store):
    store.write_at_once([(_MAKE_GROUP, {"group_id": "readers"})], NOTHING)
    locked, done = threading.Event(), threading.Event()

    def hold(connection):
        _RAISE_GENERATION.run(connection, {"of": "readers"})
        locked.set()
        done.wait(timeout=60)

    holder = in_thread(lambda: store.write(hold))
    assert locked.wait(timeout=60)
    writer = in_thread(lambda: store.write_at_once([(_RAISE_GENERATION, {"of": "readers"})], NOTHING))
    done.set()
    holder.join(timeout=60)
    writer.join(timeout=60)
    assert generation(store, "readers") == 2


def test_a_connection_on_which_writing_at_once_had_to_wait_too_long_is_good_for_the_next_time(url):
    with open_store(url, limits=Limits(lock_timeout_ms=50)) as store, open_store(url) as other:
        store.write_at_once([(_MAKE_GROUP, {"group_id": "readers"})], NOTHING)
        change = [(_RAISE_GENERATION, {"of": "readers"})]
        locked, done = threading.Event(), threading.Event()

        def hold(connection):
            _RAISE_GENERATION.run(connection, {"of": "readers"})
            locked.set()
            done.wait(timeout=60)

        holder = in_thread(lambda: other.write(hold))
        assert locked.wait(timeout=60)
        try:
            with pytest.raises(StoreBusy):
                store.write_at_once(change, NOTHING, retry_timeout_ms=0)
        finally:
            done.set()
            holder.join(timeout=60)
        assert store.write_at_once(change, NOTHING, retry_timeout_ms=0) == [1]
        assert generation(store, "readers") == 2


def test_a_connection_that_was_lost_while_writing_at_once_leaves_the_outcome_open(store, monkeypatch):
    if store.backend.name != "postgresql":
        pytest.skip("nothing is sent to a server")
    store.write_at_once([(_MAKE_GROUP, {"group_id": "readers"})], NOTHING)
    run_at_once = PostgreSQLConnection.run_at_once

    def lost(connection, statements):
        run_at_once(connection, statements)
        connection.pgconn.finish()
        raise psycopg.OperationalError("the connection is lost")

    with monkeypatch.context() as patch:
        patch.setattr(PostgreSQLConnection, "run_at_once", lost)
        with pytest.raises(OutcomeUnknown):
            store.write_at_once([(_RAISE_GENERATION, {"of": "readers"})], NOTHING)
    assert generation(store, "readers") == 1
    assert store.write_at_once([(_RAISE_GENERATION, {"of": "readers"})], NOTHING) == [1]


def test_work_that_fails_for_good_is_not_run_again(orders):
    tries = []

    def work(connection):
        tries.append(1)
        connection.exec_driver_sql("this is not SQL")

    with pytest.raises(StatementFailed):
        orders.store.write(work)
    assert len(tries) == 1


def test_work_is_tried_again_for_a_bounded_time_with_growing_pauses(store, monkeypatch):
    tries: list[int] = []
    pauses: list[float] = []

    def work(connection):
        tries.append(1)
        raise WriteConflict

    # Time passes in the pauses alone, and a moment more each.
    time_of_test = SimpleNamespace(monotonic=lambda: sum(pauses) + 1e-9 * len(pauses), sleep=pauses.append)
    monkeypatch.setattr(store_module, "time", time_of_test)
    with pytest.raises(WriteConflict):
        store.write(work, retry_timeout_ms=300)
    assert sum(pauses) == pytest.approx(0.3)
    assert len(tries) == len(pauses) + 1
    # The last one is cut short.
    assert pauses[:-1] == sorted(pauses[:-1])
    assert 6 <= len(pauses) <= 7


def test_a_reader_sees_one_snapshot_and_changes_nothing(store, orders):
    def work(connection):
        before = read_bounds(connection, [orders.partition_id])
        in_thread(lambda: orders.add(b"a book")).join()
        assert read_bounds(connection, [orders.partition_id]) == before

    store.read(work)
    assert orders.values() == [b"a book"]


def test_rows_that_somebody_has_not_read_to_the_end_hold_no_snapshot(url, store, orders):
    orders.add(b"1")
    orders.add(b"2")

    def fail_between_rows(connection):
        for row in connection.execute(select(record_batches)):
            raise KeyError(row)

    def leave_rows(connection):
        rows = connection.execute(select(record_batches))
        return rows, next(rows)

    for work in (fail_between_rows, leave_rows):
        for run in (store.read, store.write):
            # Whoever keeps the exception, or the result, keeps the statement.
            kept = kept_from(lambda run=run, work=work: run(work))
            with open_store(url) as another:
                Orders(another).add(b"3")
            assert orders.values()[-1] == b"3"
            store.write(lambda connection: orders.append(connection, b"4"), retry_timeout_ms=0)
            assert orders.values()[-1] == b"4"
            del kept


def kept_from(call):
    try:
        return call()
    except KeyError as error:
        return error


def test_a_value_that_no_database_takes_is_refused_at_once(txnstore_postgresql_store):
    """PostgreSQL's driver does not even send it, and has no SQLSTATE for that."""
    start = time.monotonic()
    with pytest.raises(StatementFailed):
        txnstore_postgresql_store.write(
            lambda connection: connection.exec_driver_sql("SELECT %(name)s", {"name": "NUL \0"})
        )
    assert time.monotonic() - start < 10


def test_the_limits_are_those_of_each_database_transaction_and_no_state_of_the_session(
    txnstore_postgresql_url,
):
    names = [
        "statement_timeout",
        "lock_timeout",
        "idle_in_transaction_session_timeout",
        "transaction_timeout",
        "search_path",
    ]

    def shown(connection):
        return [connection.exec_driver_sql(f"SHOW {name}").scalar_one() for name in names]

    limits = Limits(statement_timeout_ms=1001, lock_timeout_ms=1002, idle_timeout_ms=1003, transaction_timeout_ms=1004)
    with open_store(txnstore_postgresql_url, limits=limits) as store:
        with store.engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            if driver.info.server_version < 170_000:
                names.remove("transaction_timeout")
            before = shown(connection)
        inside = ["1001ms", "1002ms", "1003ms", "1004ms"][: len(names) - 1]
        for run in (store.read, store.write):
            assert run(shown) == [*inside, "pg_catalog, pg_temp"]
        with store.engine.connect() as connection:
            assert shown(connection) == before


def test_a_store_whose_connections_are_all_in_use_is_busy_for_a_bounded_time(url):
    go_on, taken = threading.Event(), threading.Barrier(3)

    def hold(connection):
        taken.wait(60)
        go_on.wait(60)

    with open_store(url, pool_size=1, limits=Limits(retry_timeout_ms=200)) as store:
        holders = [in_thread(lambda: store.read(hold)) for _ in range(2)]
        taken.wait(60)
        start = time.monotonic()
        with pytest.raises(StoreBusy, match="every connection"):
            store.read(lambda connection: None)
        # Those who have them keep them for longer.
        assert time.monotonic() - start < 15
        go_on.set()
        for holder in holders:
            holder.join()
        store.read(lambda connection: None)


def test_many_threads_share_a_store_and_each_record_is_there_once(store, orders):
    def add(name):
        for number in range(10):
            orders.add(b"%d-%d" % (name, number))

    threads = [in_thread(lambda name=name: add(name)) for name in range(8)]
    for thread in threads:
        thread.join()
    assert sorted(orders.values()) == sorted(b"%d-%d" % (name, number) for name in range(8) for number in range(10))


def test_a_closed_store_says_so_and_a_second_close_does_nothing(url):
    store = open_store(url)
    store.close()
    store.close()
    for use in (store.read, store.write):
        with pytest.raises(StoreClosed):
            use(lambda connection: None)
    with pytest.raises(StoreClosed):
        store.waiter()
    store.announce()


def test_a_store_closed_in_the_middle_of_a_database_transaction_leaves_no_connection(url):
    store = open_store(url)
    begun, closed = threading.Event(), threading.Event()
    drivers = []

    def work(connection):
        drivers.append(connection.connection.driver_connection)
        begun.set()
        closed.wait(60)

    reading = in_thread(lambda: store.read(work))
    begun.wait(60)
    store.close()
    closed.set()
    reading.join(60)
    # Of either driver; both say so when the connection is used.
    with pytest.raises((sqlite3.ProgrammingError, psycopg.OperationalError), match="closed"):
        drivers[0].execute("SELECT 1")


def test_a_store_closed_by_another_thread_ends_what_is_tried_again(url):
    store = open_store(url)
    tried = threading.Event()
    errors = []

    def work(connection):
        tried.set()
        raise WriteConflict

    def write():
        try:
            store.write(work)
        except StoreClosed as error:
            errors.append(error)

    writing = in_thread(write)
    tried.wait(60)
    store.close()
    writing.join(60)
    assert len(errors) == 1


def test_a_closed_store_has_left_no_connection(txnstore_postgresql_url):
    mine = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'txnstore'"
    with psycopg.connect(connection_string(txnstore_postgresql_url), autocommit=True) as observer:
        with open_store(txnstore_postgresql_url) as store:
            Orders(store).add(b"a book")
            assert observer.execute(mine).fetchone() != (0,)
        # The server learns of it a moment later.
        until(lambda: observer.execute(mine).fetchone() == (0,))


@pytest.mark.slow
def test_a_store_in_memory_is_gone_with_its_process_and_not_with_a_child_of_it(start_child):
    child = start_child("fork_with_memory")
    first, second = read(child), read(child)
    assert first == second == "True"
    folder = read(child)
    assert child.wait(60) == 0
    assert not Path(folder).exists()


class TestFork:
    """A forked child opens connections of its own; those of its parent go on."""

    @pytest.mark.slow
    def test_what_a_child_commits_lasts_when_its_parent_closes_the_store(self, url, start_child):
        child = start_child("fork_and_close", url)
        assert read(child) == "0"
        with open_store(url) as store:
            assert Orders(store).values() == [b"parent", b"child", b"parent again", b"child, alone"]

    @pytest.mark.slow
    def test_parent_and_child_go_on_at_the_same_time(self, url, start_child):
        child = start_child("fork_and_compete", url)
        assert read(child) == "0"
        with open_store(url) as store:
            assert sorted(Orders(store).values()) == [b"child"] * 50 + [b"parent"] * 50

    @pytest.mark.slow
    def test_a_child_that_ends_takes_no_connection_of_its_parent_along(self, url, start_child):
        child = start_child("fork_and_leave", url)
        assert read(child) == "0 True"
        assert child.wait(60) == 0
        with open_store(url) as store:
            assert Orders(store).values() == [b"parent", b"child", b"parent again"]

    @pytest.mark.slow
    def test_a_file_that_was_in_use_at_the_fork_is_refused_in_the_child(self, txnstore_sqlite_url, start_child):
        child = start_child("fork_in_use", txnstore_sqlite_url)
        assert [read(child), read(child)] == ["StoreClosed", "StoreClosed"]
        assert child.wait(60) == 0
        with open_store(txnstore_sqlite_url) as store:
            assert Orders(store).values() == [b"parent", b"parent again"]

    @pytest.mark.slow
    def test_a_server_that_was_in_use_at_the_fork_is_used_by_both(self, txnstore_postgresql_url, start_child):
        child = start_child("fork_in_use", txnstore_postgresql_url)
        # The child waits for the lock that its parent's other thread holds, and that one waits for the child.
        assert read(child) == "StoreBusy"
        assert read(child) == "NoneType"
        assert child.wait(60) == 0
        with open_store(txnstore_postgresql_url) as store:
            assert Orders(store).values() == [b"parent", b"parent again"]


@pytest.mark.slow
def test_processes_that_write_to_one_file_all_get_their_turn(txnstore_sqlite_url, start_child):
    counts = [int(word) for word in read(start_child("compete", txnstore_sqlite_url, 4, 2.5)).split()]
    assert len(counts) == 4
    assert max(counts) < 4 * min(counts), counts
    with open_store(txnstore_sqlite_url) as store:
        orders = Orders(store)
        bounds = store.read(lambda connection: read_bounds(connection, [orders.partition_id]))
        assert bounds[orders.partition_id].high_watermark == sum(counts)


class TestInterrupt:
    """Ctrl-C."""

    @pytest.mark.slow
    def test_while_waiting_for_a_lock_ends_at_once(self, url, start_child):
        child = start_child("interrupt_write", url)
        assert read(child) == "ready"
        with lock(url) as is_waited_for:
            tell(child)
            assert read(child) == "waiting"
            until(is_waited_for)
            child.send_signal(signal.SIGINT)
            start = time.monotonic()
            assert read(child) == "interrupted"
            assert time.monotonic() - start < AT_ONCE_SECONDS
        tell(child)
        assert "Current Checked out connections: 0" in read(child)
        with open_store(url) as store:
            assert Orders(store).values() == [b"a book"]

    @pytest.mark.slow
    def test_while_waiting_for_news_ends_at_once(self, url, start_child):
        child = start_child("interrupt_waiter", url)
        assert read(child) == "waiting"
        child.send_signal(signal.SIGINT)
        start = time.monotonic()
        assert read(child) == "interrupted"
        assert time.monotonic() - start < AT_ONCE_SECONDS
        assert read(child) == "True"


@contextlib.contextmanager
def lock(url):
    """Hold the lock that an append needs."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield lambda: True
            connection.execute("ROLLBACK")
    else:
        waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        with (
            psycopg.connect(connection_string(url)) as connection,
            psycopg.connect(connection_string(url), autocommit=True) as observer,
        ):
            connection.execute("SELECT FROM txnstore.partition_heads FOR UPDATE")
            yield lambda: observer.execute(waiting).fetchone() is not None
            connection.rollback()


def test_what_was_about_to_connect_as_the_store_was_closed_leaves_no_connection_open(store, monkeypatch):
    """Closed between the question whether it is open and the connection: that is one of a pool nobody would close."""
    check_usable = store.check_usable

    def close_behind():
        check_usable()
        monkeypatch.undo()
        store.close()

    monkeypatch.setattr(store, "check_usable", close_behind)
    assert store.read(lambda connection: connection.execute(text("SELECT 1")).scalar_one()) == 1
    assert store.engine.pool.checkedin() == store.engine.pool.checkedout() == 0

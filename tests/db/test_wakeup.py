"""Readers that wait: woken by commits of any process, never misled by a hint, and nearly free while nothing happens."""

from __future__ import annotations

import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import bindparam, event, insert, literal, select, update

from tests.tools.proxy import Proxy, upstream_of
from txnstore.db.backend import EVERYTHING, POLL_LAST_MS, Subjects
from txnstore.db.opening import open_store
from txnstore.db.postgresql import connections as postgresql_connections
from txnstore.db.postgresql.connections import SILENCE_MS
from txnstore.db.schema import group_members, groups, outbox, partition_heads
from txnstore.db.sqlite import connections as sqlite_connections
from txnstore.db.sqlite import waiter as sqlite_waiter
from txnstore.db.sqlite.connections import CommitStamps
from txnstore.db.sqlite.waiter import FileWaiter
from txnstore.db.statements import HotStatement
from txnstore.db.store import note_change
from txnstore.errors import StoreBusy
from txnstore.log.append import Append, append
from txnstore.log.bounds import read_bounds
from txnstore.log.codec import encode
from txnstore.log.topics import create_topic, ensure_topic
from txnstore.model import Record
from txnstore.testing.postgres_server import connection_string

CHILDREN = Path(__file__).parents[1] / "faults" / "children.py"
#: A waiter who returns True before this time was woken: on PostgreSQL it looks by itself only after SILENCE_MS.
SHORT_MS = 400


class Orders:
    """A topic with one partition."""

    def __init__(self, store, name="orders"):
        self.store = store
        (self.partition_id,) = store.write(lambda connection: ensure_topic(connection, name)).partition_ids

    def add(self, *, wakes_readers=True):
        append_to(self.store, self.partition_id, wakes_readers=wakes_readers)

    def next_offset(self):
        bounds = self.store.read(lambda connection: read_bounds(connection, [self.partition_id]))
        return bounds[self.partition_id].high_watermark


def append_to(store, partition_id, *, wakes_readers=True):
    batch = encode([Record(b"news")])
    store.write(lambda connection: append(connection, [Append(partition_id, batch)]), wakes_readers=wakes_readers)


@pytest.fixture
def orders(store):
    return Orders(store)


@pytest.fixture
def waiter(orders):
    with closing(orders.store.waiter()) as waiter:
        settle(waiter)
        yield waiter


@pytest.fixture
def postgresql(txnstore_postgresql_store):
    return Orders(txnstore_postgresql_store)


@pytest.fixture
def observer(txnstore_postgresql_url):
    """A connection of somebody else to the same database."""
    with psycopg.connect(connection_string(txnstore_postgresql_url), autocommit=True) as connection:
        yield connection


@pytest.fixture
def proxy(txnstore_postgresql_url):
    with Proxy(upstream_of(txnstore_postgresql_url)) as proxy:
        yield proxy


@pytest.fixture
def proxied(proxy, txnstore_postgresql_url):
    with open_store(proxy.url(txnstore_postgresql_url)) as store:
        yield Orders(store)
        proxy.heal()


def settle(waiter):
    """Let go by what was committed when the test was set up."""
    while waiter.wait(20):
        pass


WAKE_LIMIT_SECONDS = 20.0


def is_woken(waiter):
    """Return whether the waiter is woken: by somebody, not because it is time to look by itself."""
    assert SHORT_MS < SILENCE_MS
    return any(waiter.wait(SHORT_MS) for _ in range(25))


def until(condition):
    pause = threading.Event()
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "not within 20 s"
        pause.wait(0.01)


def test_a_waiting_reader_is_woken_by_a_commit_of_another_process(orders, waiter, url):
    with subprocess.Popen(
        [sys.executable, str(CHILDREN), "commit_when_told", url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "ready\n"
        settle(waiter)
        for expected in range(1, 6):
            child.stdin.write("\n")
            child.stdin.flush()
            assert is_woken(waiter)
            # Whoever is woken finds what was committed: a hint never comes before its commit.
            assert orders.next_offset() == expected
            settle(waiter)
        child.communicate("end\n")
        assert child.returncode == 0


def test_a_waiting_reader_is_woken_by_a_commit_of_its_own_process(orders, waiter):
    writing = threading.Timer(0.05, orders.add)
    writing.start()
    assert is_woken(waiter)
    writing.join()


def test_a_commit_between_two_waits_counts(orders, waiter):
    orders.add()
    until(lambda: orders.store.backend.name == "sqlite" or is_announced(orders.store))
    assert is_woken(waiter)


def is_announced(store):
    return store._announcer._thread is not None and not store._announcer._due.is_set()


def test_nothing_committed_means_to_wait_for_the_whole_time(waiter):
    start = time.monotonic()
    assert not waiter.wait(200)
    assert 0.19 <= time.monotonic() - start < 10


def test_a_wait_that_is_under_way_is_ended_by_a_wake_from_another_thread(waiter):
    waiting = threading.Thread(target=waiter.wait, args=(60_000,), daemon=True)
    waiting.start()
    waiter.wake()
    waiting.join(WAKE_LIMIT_SECONDS)
    assert not waiting.is_alive()


def test_a_wake_before_the_wait_counts_once(waiter):
    waiter.wake()
    waiter.wake()
    assert waiter.wait(60_000)
    assert not waiter.wait(30)


KILLED_BEFORE_ITS_HINT = """
import os, signal, sys
from txnstore.db.opening import open_store
from txnstore.db.store import Store
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.model import Record

store = open_store(sys.argv[1])
Store.announce = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
batch = encode([Record(b"news")])
store.write(lambda connection: append(connection, [Append(int(sys.argv[2]), batch)]), wakes_readers=True)
"""


def test_a_commit_whose_writer_was_killed_before_its_hint_is_found_all_the_same(orders, bills, url):
    with closing(orders.store.waiter(about(orders))) as waiter:
        settle(waiter)
        waiting = threading.Thread(target=waiter.wait, args=(60_000,), daemon=True)
        waiting.start()
        program = [sys.executable, "-c", KILLED_BEFORE_ITS_HINT, url, str(orders.partition_id)]
        killed = subprocess.run(program, check=False, timeout=60)
        assert killed.returncode == -signal.SIGKILL
        assert orders.next_offset() == 1
        began = time.monotonic()
        # Hints of others are no help, and do not put it off.
        while waiting.is_alive():
            bills.add()
            waiting.join(0.02)
            assert time.monotonic() < began + 10
        # Nor is it lost where nobody waited just then.
        settle(waiter)
        assert subprocess.run(program, check=False, timeout=60).returncode == -signal.SIGKILL
        assert waiter.wait(10_000)


def test_no_time_to_wait_means_to_look_and_return(orders, waiter):
    start = time.monotonic()
    assert not waiter.wait(0)
    assert time.monotonic() - start < 10


def test_each_of_many_readers_is_woken(orders):
    waiters = [orders.store.waiter() for _ in range(3)]
    for waiter in waiters:
        settle(waiter)
    orders.add()
    assert all(is_woken(waiter) for waiter in waiters)
    for waiter in waiters:
        waiter.close()


def test_a_forged_hint_costs_a_look_and_shows_nothing(postgresql, observer):
    with closing(postgresql.store.waiter()) as waiter:
        settle(waiter)
        for channel in waiter._heard:
            settle(waiter)
            observer.execute(f"NOTIFY {postgresql.store.channel}_{channel}, 'DROP TABLE; 17 records; \x1b[31m'")
            assert is_woken(waiter)
        observer.execute(f"NOTIFY {postgresql.store.channel}_17")
        observer.execute("NOTIFY somebody")
        assert not waiter.wait(SHORT_MS)
        assert postgresql.next_offset() == 0


def test_a_write_of_somebody_else_to_the_file_costs_a_look_and_shows_nothing(
    txnstore_sqlite_store, txnstore_sqlite_url
):
    orders = Orders(txnstore_sqlite_store)
    with (
        closing(orders.store.waiter()) as waiter,
        closing(sqlite3.connect(txnstore_sqlite_url.removeprefix("sqlite:///"))) as other,
    ):
        settle(waiter)
        other.execute("CREATE TABLE shop (name TEXT)")
        assert is_woken(waiter)
        assert orders.next_offset() == 0


def test_a_reader_that_no_hint_reaches_looks_by_itself(postgresql):
    with closing(postgresql.store.waiter()) as waiter:
        settle(waiter)
        postgresql.add(wakes_readers=False)
        start = time.monotonic()
        assert waiter.wait(20_000)
        assert time.monotonic() - start < 5
        assert postgresql.next_offset() == 1


@pytest.fixture
def bills(store):
    return Orders(store, "bills")


def about(*topics):
    return Subjects(frozenset(topic.partition_id for topic in topics))


def test_a_reader_is_woken_by_commits_to_what_it_reads_alone(orders, bills, url):
    # Another store, so another process as far as databases know.
    with open_store(url) as other, closing(other.waiter(about(orders))) as waiter:
        writers = [bills, Orders(other, "bills")]
        settle(waiter)
        for writer in writers:
            for _ in range(5):
                writer.add()
            assert not any(waiter.wait(SHORT_MS) for _ in range(2))
        for writer in (orders, Orders(other)):
            writer.add()
            assert is_woken(waiter)
            settle(waiter)


def test_a_notification_that_comes_with_an_answer_is_not_lost(postgresql, observer):
    with closing(postgresql.store.waiter(about(postgresql))) as waiter:
        settle(waiter)
        (channel,) = waiter._heard - {postgresql_connections._ANYBODY}
        observer.execute(f"NOTIFY {postgresql.store.channel}_{channel}")
        # Whatever was sent before the question comes before its answer.
        assert waiter.rows(HotStatement(select(literal(17).label("number"))), {}) == [(17,)]
        assert is_woken(waiter)
        assert not waiter.wait(SHORT_MS)


def test_a_waiter_reads_alone_until_its_session_is_another_one(orders):
    statement = HotStatement(
        select(partition_heads.c.next_offset).where(partition_heads.c.partition_id == bindparam("of_partition_id"))
    )
    parameters = {"of_partition_id": orders.partition_id}
    with closing(orders.store.waiter(about(orders))) as waiter:
        for expected in range(3):
            assert waiter.rows(statement, parameters) == [(expected,)]
            orders.add()
        if orders.store.backend.name == "postgresql":
            # As behind a pooler.
            waiter._connection.execute("DEALLOCATE ALL")
            assert waiter.rows(statement, parameters) is None
            settle(waiter)
            orders.add()
            assert is_woken(waiter)
            waiter._close_connection()
            assert waiter.rows(statement, parameters) is None
            waiter._listen()
            assert waiter.rows(statement, parameters) == [(4,)]


def test_a_reader_that_turns_to_another_partition_hears_of_that_one(orders, bills):
    with closing(orders.store.waiter(about(orders))) as waiter:
        assert not waiter.listen(about(orders))
        for subjects, heard, unheard in (
            (about(bills), [bills], [orders]),
            (about(orders, bills), [bills, orders], []),
            (EVERYTHING, [bills, orders], []),
            (about(orders), [orders], [bills]),
        ):
            assert waiter.listen(subjects)
            settle(waiter)
            for writer in heard:
                writer.add()
                assert is_woken(waiter)
                settle(waiter)
            for writer in unheard:
                writer.add()
                assert not waiter.wait(SHORT_MS)


def test_a_reader_of_many_partitions_hears_of_each(store):
    def work(connection):
        return create_topic(connection, "many", partition_count=40).partition_ids

    partition_ids = store.write(work)
    with closing(store.waiter(Subjects(frozenset(partition_ids)))) as waiter:
        for partition_id in partition_ids[::13]:
            settle(waiter)
            append_to(store, partition_id)
            assert is_woken(waiter)


def test_groups_are_heard_of_by_name(store):
    def rebalance(name):
        store.write(lambda connection: note_change(connection, group_ids=[name]), wakes_readers=True)

    with closing(store.waiter(Subjects(group_ids=frozenset(["billing"])))) as waiter:
        settle(waiter)
        rebalance("shipping")
        assert not waiter.wait(SHORT_MS)
        rebalance("billing")
        assert is_woken(waiter)


@pytest.mark.parametrize("partition_count", [0, 1, sqlite_waiter.LISTED_MAX, sqlite_waiter.LISTED_MAX + 1])
@pytest.mark.parametrize("group_ids", [[], ["billing"], ["billing", "it's"]])
def test_a_reader_of_a_file_finds_by_a_look_what_concerns_it(
    txnstore_sqlite_store, monkeypatch, partition_count, group_ids
):
    # As if all commits were of other processes, which cannot say what they are about.
    monkeypatch.setattr(sqlite_connections.waiting, "at", lambda _: [])
    store = txnstore_sqlite_store
    others = Orders(store)
    partition_ids: tuple[int, ...] = ()
    if partition_count:
        topic = store.write(lambda connection: create_topic(connection, "many", partition_count=partition_count))
        partition_ids = topic.partition_ids

    def committed(statement):
        store.write(lambda connection: connection.execute(statement))

    for group_id in (*group_ids, "shipping"):
        committed(insert(groups).values(group_id=group_id, generation=1, commit_number=0, last_update_ms=0))
        committed(
            insert(group_members).values(
                group_id=group_id,
                member_id="one",
                client_id="",
                generation=1,
                session_timeout_ms=1,
                deadline_ms=1,
                subscription="{}",
                assignment="{}",
            )
        )
    subjects = Subjects(frozenset(partition_ids), frozenset(group_ids))
    with closing(store.waiter(subjects)) as waiter:

        def is_found(statement):
            settle(waiter)
            committed(statement)
            return waiter.wait(0)

        for partition_id in partition_ids[:: sqlite_waiter.LISTED_MAX]:
            settle(waiter)
            append_to(store, partition_id)
            assert waiter.wait(0)
        for group_id in group_ids:
            its = groups.c.group_id == group_id
            assert is_found(update(groups).where(its).values(generation=2))
            assert not is_found(update(groups).where(its).values(commit_number=9))
            of_it = group_members.c.group_id == group_id
            assert is_found(update(group_members).where(of_it).values(subscription='{"owned": []}'))
        settle(waiter)
        others.add()
        assert not waiter.wait(0)
        not_its = groups.c.group_id == "shipping"
        assert not is_found(update(groups).where(not_its).values(generation=2))
        assert is_found(insert(outbox).values(topic="orders"))


def test_a_commit_of_which_nobody_can_know_whom_it_concerns_wakes_all(orders):
    with closing(orders.store.waiter(about(orders))) as waiter:
        settle(waiter)
        orders.store.announce()
        assert is_woken(waiter)


def test_what_a_failed_try_has_noted_is_forgotten(store, monkeypatch):
    told: list[Subjects] = []
    monkeypatch.setattr(store, "announce", told.append)
    noted = iter([[1], [2], None])

    def work(connection):
        partition_ids = next(noted)
        if partition_ids is not None:
            note_change(connection, partition_ids=partition_ids)
        if partition_ids == [1]:
            raise StoreBusy

    for _ in range(2):
        store.write(work, wakes_readers=True)
    store.write(note_change, wakes_readers=True)
    assert told == [Subjects(frozenset([2])), EVERYTHING]


def test_where_nobody_listens_nobody_is_notified(postgresql, observer):
    channels = postgresql_connections._Channels(postgresql.store.channel)
    for channel in channels.told(about(postgresql)):
        # Without the lock that says so.
        observer.execute(f"LISTEN {postgresql.store.channel}_{channel}")
    postgresql.add()
    assert list(observer.notifies(timeout=SHORT_MS / 1000)) == []
    with closing(postgresql.store.waiter(about(postgresql))):
        postgresql.add()
        assert len(list(observer.notifies(timeout=20, stop_after=1))) == 1
    until(lambda: not observer.execute("SELECT 1 FROM pg_locks WHERE locktype = 'advisory'").fetchall())


@pytest.fixture
def _without_stamps(monkeypatch):
    """As where processes share no memory to leave stamps in."""
    monkeypatch.setattr(CommitStamps, "beside", lambda _: None)


@pytest.mark.usefixtures("_without_stamps")
def test_a_reader_of_a_file_looks_seldom_while_others_commit(txnstore_sqlite_store, monkeypatch):
    orders, bills = Orders(txnstore_sqlite_store), Orders(txnstore_sqlite_store, "bills")
    looks: list[FileWaiter] = []
    compare = FileWaiter._compare

    def counted(waiter, connection, *, is_first):
        looks.append(waiter)
        return compare(waiter, connection, is_first=is_first)

    monkeypatch.setattr(FileWaiter, "_compare", counted)
    with closing(orders.store.waiter(about(orders))) as waiter:
        settle(waiter)
        waiting = threading.Thread(target=waiter.wait, args=(60_000,), daemon=True)
        waiting.start()
        looks.clear()
        start = time.monotonic()
        for _ in range(300):
            bills.add()
        seconds = time.monotonic() - start
        # The first ones follow closely.
        assert len(looks) <= 6 + seconds / sqlite_waiter.VAIN_LAST_SECONDS
        orders.add()
        waiting.join(WAKE_LIMIT_SECONDS)
        assert not waiting.is_alive()


@pytest.mark.usefixtures("_without_stamps")
@pytest.mark.parametrize("is_watched", [True, False])
def test_a_touch_of_the_log_makes_readers_look_at_once_where_the_system_tells(
    txnstore_sqlite_store, monkeypatch, is_watched
):
    for name in ("POLL_LAST_MS", "WATCHED_LAST_MS"):
        monkeypatch.setattr(sqlite_waiter, name, 60_000 if is_watched else 1)
    if not is_watched:
        monkeypatch.setattr(sqlite_waiter._Inotify, "watch", lambda *_: -1)
    elif sys.platform != "linux":
        pytest.skip("needs inotify")
    orders = Orders(txnstore_sqlite_store)
    with closing(orders.store.waiter(about(orders))) as waiter:
        assert (waiter._watched >= 0) == is_watched
        waiter.wait(0)
        monkeypatch.setattr(sqlite_connections.waiting, "at", lambda _: [])
        for _ in range(3):
            waiting = threading.Thread(target=waiter.wait, args=(60_000,), daemon=True)
            waiting.start()
            orders.add()
            waiting.join(WAKE_LIMIT_SECONDS)
            assert not waiting.is_alive()


@pytest.mark.usefixtures("_without_stamps")
def test_a_reader_of_a_file_that_nobody_writes_to_looks_less_and_less(txnstore_sqlite_store, monkeypatch):
    if sys.platform != "linux":
        pytest.skip("needs inotify")
    orders = Orders(txnstore_sqlite_store)
    with closing(orders.store.waiter(about(orders))) as waiter:
        settle(waiter)
        pauses: list[float] = []
        monkeypatch.setattr(waiter._signal, "wait", pauses.append)
        monkeypatch.setattr(waiter, "_has_moved", lambda: len(pauses) > 9)
        assert waiter.wait(60_000)
        assert pauses[-1] == sqlite_waiter.WATCHED_LAST_MS / 1000
        assert pauses == sorted(pauses)
        # Once there was something it is soon back.
        pauses.clear()
        assert waiter.wait(60_000)
        assert pauses[0] == POLL_LAST_MS / 1000


def listen(observer, store):
    """Listen to all that is told, as a reader of everything does."""
    channels = postgresql_connections._Channels(store.channel)
    observer.execute(channels.statement(frozenset(), channels.heard(EVERYTHING)))


def test_the_hint_is_no_part_of_the_database_transaction(postgresql, observer):
    statements = []
    event.listen(
        postgresql.store.engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2].upper())
    )
    listen(observer, postgresql.store)
    postgresql.add()
    (notification,) = observer.notifies(timeout=20, stop_after=1)
    assert statements[0].startswith("BEGIN")
    assert statements[-1] == "COMMIT"
    assert not any("NOTIFY" in statement for statement in statements)
    own = postgresql.store.read(lambda connection: connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one())
    assert notification.pid != own


def test_many_commits_are_told_in_few_hints(postgresql, observer):
    listen(observer, postgresql.store)
    for _ in range(2_000):
        postgresql.store.announce()
    hints = len(list(observer.notifies(timeout=1)))
    assert 1 <= hints < 1_000


@pytest.fixture
def announced(postgresql, observer):
    """A store that has told of something, and its announcer, whose thread is told of nothing any more."""
    listen(observer, postgresql.store)
    postgresql.store.announce()
    assert len(list(observer.notifies(timeout=20, stop_after=1))) == 1
    announcer = postgresql.store._announcer
    until(lambda: announcer._is_free)
    return postgresql.store, announcer


def test_a_writer_notifies_by_itself_where_nothing_is_under_way(announced, observer, monkeypatch):
    store, announcer = announced
    thread = announcer._thread
    # Without its thread: it hears of nothing.
    monkeypatch.setattr(announcer, "_due", threading.Event())
    for _ in range(3):
        announcer._sends_again_at = 0
        # Where the answer to the one before has come.
        until(lambda: not announcer._asked or not announcer._connection.pgconn.is_busy() or read_more(announcer))
        store.announce()
        assert len(list(observer.notifies(timeout=20, stop_after=1))) == 1
    assert announcer._thread is thread
    assert not announcer._due.is_set()


def read_more(announcer):
    announcer._connection.pgconn.consume_input()
    return False


def test_a_notification_that_was_sent_on_a_connection_that_had_broken_is_sent_again(announced, observer):
    store, announcer = announced
    observer.execute(
        "SELECT pg_terminate_backend(pid, 20000) FROM pg_stat_activity WHERE query LIKE '%pg_notify(%'"
        " AND pid <> pg_backend_pid() AND datname = current_database()"
    )
    for _ in range(2):
        announcer._sends_again_at = 0
        store.announce()
    assert len(list(observer.notifies(timeout=20, stop_after=1))) == 1


def test_without_a_connection_to_listen_on_a_reader_looks_again_and_again(proxied, proxy, monkeypatch):
    proxy.refuse_connections()
    with closing(proxied.store.waiter()) as waiter:
        start = time.monotonic()
        assert [waiter.wait(1_000) for _ in range(10)] == [True] * 10
        # Ever more rarely, and no longer than it was told to.
        assert time.monotonic() - start < 5
        assert not waiter.wait(1)
        proxy.accept_connections()
        monkeypatch.setattr(postgresql_connections, "RELISTEN_SECONDS", 0)
        waiter._listen_again = 0
        until(lambda: waiter.wait(1_000) and waiter._connection is not None)
        settle(waiter)
        proxied.add()
        assert is_woken(waiter)


def test_a_connection_that_is_cut_while_it_listens_wakes_and_is_replaced(proxied, proxy):
    with closing(proxied.store.waiter()) as waiter:
        settle(waiter)
        cutting = threading.Timer(0.05, proxy.cut_connections)
        cutting.start()
        # It may have missed something.
        assert is_woken(waiter)
        cutting.join()
        settle(waiter)
        proxied.add()
        assert is_woken(waiter)


def test_hints_go_on_after_the_server_was_away(proxied, proxy):
    with closing(proxied.store.waiter()) as waiter:
        proxied.add()
        assert is_woken(waiter)
        announcing = proxied.store._announcer._thread
        proxy.refuse_connections()
        proxy.cut_connections()
        proxied.store.announce()
        until(lambda: not proxied.store._announcer._due.is_set())
        proxy.accept_connections()
        until(lambda: woken_by_a_new_commit(proxied, waiter))
        assert proxied.store._announcer._thread is announcing
        assert announcing.is_alive()


def woken_by_a_new_commit(orders, waiter):
    if waiter._connection is None:
        waiter._listen_again = 0
        waiter.wait(10)
        return False
    settle(waiter)
    orders.add()
    return waiter.wait(SHORT_MS)


def test_a_file_that_cannot_be_read_for_a_moment_wakes_and_is_opened_again(txnstore_sqlite_store, monkeypatch):
    orders = Orders(txnstore_sqlite_store)

    def refuse(path):
        raise sqlite3.OperationalError("unable to open database file")

    with closing(orders.store.waiter()) as waiter:
        settle(waiter)
        with monkeypatch.context() as patched:
            patched.setattr(sqlite_waiter, "connect", refuse)
            waiter._close_connection()
            orders.add(wakes_readers=False)
            assert not waiter.wait(20)
        # It knows of no version: it looks.
        assert waiter.wait(0)
        assert not waiter.wait(20)


class Fork:
    """A fork of this process, up to where the child would begin; `has_begun` is set once nobody can open a file."""

    def __init__(self):
        self.has_begun = threading.Event()
        sqlite_connections.close_before_fork(self, lambda fork: fork.has_begun.set())

    def run(self):
        sqlite_connections._before_fork()
        sqlite_connections.FORK_LOCK.release()


def test_a_fork_and_a_reader_that_opens_its_file_wait_for_each_other_only_so_long(txnstore_sqlite_store, monkeypatch):
    fork = Fork()
    is_opening = threading.Event()

    def connect_during_fork(path):
        is_opening.set()
        assert fork.has_begun.wait(WAKE_LIMIT_SECONDS)
        return connect(path)

    with closing(txnstore_sqlite_store.waiter()) as waiter:
        # As the first look of a fork does, which looks again until all is closed.
        waiter._close_connection()
        connect = sqlite_connections.connect
        monkeypatch.setattr(sqlite_waiter, "connect", connect_during_fork)
        reading = threading.Thread(target=waiter.wait, args=(0,), daemon=True)
        reading.start()
        assert is_opening.wait(WAKE_LIMIT_SECONDS)
        forking = threading.Thread(target=fork.run, daemon=True)
        forking.start()
        for thread in (forking, reading):
            thread.join(WAKE_LIMIT_SECONDS)
            assert not thread.is_alive()


def test_waiters_and_hints_leave_no_thread_and_no_connection(url):
    threads = set(threading.enumerate())
    assert connections_to(url) == 0
    with open_store(url) as store:
        waiter = store.waiter()
        Orders(store).add()
        assert is_woken(waiter)
        assert connections_to(url) > 1
        if store.backend.name == "postgresql":
            assert set(threading.enumerate()) > threads
        waiter.close()
        waiter.close()
    assert set(threading.enumerate()) == threads
    # A server learns of it a moment later.
    until(lambda: connections_to(url) == 0)


def connections_to(url):
    """Return how many connections to the store there are, as the kernel (by open files) or the server counts them."""
    if url.startswith("sqlite"):
        if not Path("/proc/self/fd").is_dir():
            pytest.skip("there is no /proc to see open files in")
        path = url.removeprefix("sqlite:///")
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return sum(str(link.readlink()).startswith(path) for link in links)
    statement = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'txnstore'"
    )
    with psycopg.connect(connection_string(url)) as connection:
        (count,) = connection.execute(statement).fetchone() or (0,)
        return count


def cost_of_waiting(waiter, look):
    """Return the share of a processor that a reader takes, who looks whenever it is woken or it is time to.

    It is the least of some measurements: on a busy machine everything takes a little longer now and then.
    """
    costs: list[float] = []
    while len(costs) < 3 and not any(cost < 0.01 for cost in costs):
        start, cpu_start = time.monotonic(), time.process_time()
        while time.monotonic() - start < 2:
            if waiter.wait(1_000):
                look()
        costs.append((time.process_time() - cpu_start) / (time.monotonic() - start))
    return min(costs)


def test_a_reader_that_waits_for_nothing_costs_less_than_a_hundredth_of_a_processor(orders, waiter):
    assert cost_of_waiting(waiter, orders.next_offset) < 0.01


def test_a_reader_that_cannot_listen_is_cheap_as_well(proxied, proxy, postgresql):
    proxy.refuse_connections()
    with closing(proxied.store.waiter()) as waiter:
        while waiter._pause_ms < postgresql_connections.LOOK_LAST_MS:
            waiter.wait(1_000)
            postgresql.next_offset()
        assert cost_of_waiting(waiter, postgresql.next_offset) < 0.01


def test_what_a_reader_compares_has_a_value_for_each_place_by_order() -> None:
    """Python 3.12 warns of places with numbers, and 3.14 refuses them."""
    statement, values = sqlite_waiter.look_for(Subjects(frozenset({1, 2}), frozenset({"billing", "stock"})))
    assert values == ["billing", "stock"] * 2
    assert statement.count("?") == len(values)
    assert not re.search(r"\?[0-9]", statement)

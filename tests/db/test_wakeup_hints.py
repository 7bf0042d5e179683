"""Hints to readers that wait: few of them, over connections that break, of files that cannot be read, nearly free."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import event

from tests.db.waiting_readers import (
    SHORT_MS,
    WAKE_LIMIT_SECONDS,
    Orders,
    append_to,
    is_woken,
    observer,
    orders,
    postgresql,
    proxied,
    proxy,
    settle,
    until,
    waiter,
)
from txnstore.db.backend import EVERYTHING
from txnstore.db.opening import open_store
from txnstore.db.postgresql import connections as postgresql_connections
from txnstore.db.sqlite import connections as sqlite_connections
from txnstore.db.sqlite import waiter as sqlite_waiter
from txnstore.testing.postgres_server import connection_string

__all__ = ["observer", "orders", "postgresql", "proxied", "proxy", "waiter"]


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
    (notification,) = observer.notifies(timeout=60, stop_after=1)
    assert statements[0].startswith("BEGIN")
    assert statements[-1] == "COMMIT"
    assert not any("NOTIFY" in statement for statement in statements)
    own = postgresql.store.read(lambda connection: connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one())
    assert notification.pid != own


def test_many_commits_are_told_in_few_hints(postgresql, observer):
    listen(observer, postgresql.store)
    for _ in range(2_000):
        postgresql.store.announce()
    assert len(list(observer.notifies(timeout=60, stop_after=1))) == 1
    assert len(list(observer.notifies(timeout=1))) < 1_000


@pytest.fixture
def announced(postgresql, observer):
    """A store that has told of something, and its announcer, whose thread is told of nothing any more."""
    listen(observer, postgresql.store)
    postgresql.store.announce()
    assert len(list(observer.notifies(timeout=60, stop_after=1))) == 1
    announcer = postgresql.store._announcer
    until(lambda: announcer._is_free)
    return postgresql.store, announcer


@pytest.mark.slow
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
        assert len(list(observer.notifies(timeout=60, stop_after=1))) == 1
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
    assert len(list(observer.notifies(timeout=60, stop_after=1))) == 1


def test_a_commit_stands_and_its_hint_is_lost_where_no_thread_can_be_started(
    postgresql, observer, txnstore_postgresql_url, txnstore_open, monkeypatch
):
    def start(_thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    def add():
        append_to(store, postgresql.partition_id)

    listen(observer, postgresql.store)
    store = txnstore_open(txnstore_postgresql_url)
    with monkeypatch.context() as ending:
        ending.setattr(threading.Thread, "start", start)
        add()
    assert postgresql.next_offset() == 1
    # It was remembered, and a thread that can be started tells of it.
    add()
    assert len(list(observer.notifies(timeout=60, stop_after=1))) == 1
    with monkeypatch.context() as ending:
        ending.setattr(threading.Thread, "start", start)
        store.close()


def test_without_a_connection_to_listen_on_a_reader_looks_again_and_again(proxied, proxy, monkeypatch):
    proxy.refuse_connections()
    with closing(proxied.store.waiter()) as waiter:
        start = time.monotonic()
        assert [waiter.wait(1_000) for _ in range(10)] == [True] * 10
        # Ever more rarely, and no longer than it was told to: all ten of them would take ten seconds.
        assert time.monotonic() - start < 9
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
        announcing = proxied.store._announcer._thread._thread
        proxy.refuse_connections()
        proxy.cut_connections()
        proxied.store.announce()
        until(lambda: not proxied.store._announcer._due.is_set())
        proxy.accept_connections()
        until(lambda: woken_by_a_new_commit(proxied, waiter))
        assert proxied.store._announcer._thread._thread is announcing
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

    def refuse(path, **options):
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

    def connect_during_fork(path, **options):
        is_opening.set()
        assert fork.has_begun.wait(WAKE_LIMIT_SECONDS)
        return connect(path, **options)

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
            assert set(threading.enumerate()) - threads
        waiter.close()
        waiter.close()
    # Those of other tests may have ended meanwhile.
    assert set(threading.enumerate()) <= threads
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

    It is the least of some measurements: on a busy machine everything takes a little longer now and then. What counts
    is the reader's own thread, not what others of this process do.
    """
    costs: list[float] = []
    while len(costs) < 10 and not any(cost < 0.01 for cost in costs):
        start, cpu_start = time.monotonic(), time.thread_time()
        while time.monotonic() - start < 2:
            if waiter.wait(1_000):
                look()
        costs.append((time.thread_time() - cpu_start) / (time.monotonic() - start))
    return min(costs)


@pytest.mark.slow
def test_a_reader_that_waits_for_nothing_costs_less_than_a_hundredth_of_a_processor(orders, waiter):
    assert cost_of_waiting(waiter, orders.next_offset) < 0.01


@pytest.mark.slow
def test_a_reader_that_cannot_listen_is_cheap_as_well(proxied, proxy, postgresql):
    proxy.refuse_connections()
    with closing(proxied.store.waiter()) as waiter:
        while waiter._pause_ms < postgresql_connections.LOOK_LAST_MS:
            waiter.wait(1_000)
            postgresql.next_offset()
        assert cost_of_waiting(waiter, postgresql.next_offset) < 0.01

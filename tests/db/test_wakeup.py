"""Readers that wait: woken by commits of any process, never misled by a hint, and nearly free while nothing happens."""

from __future__ import annotations

import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import bindparam, insert, literal, select, update

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
from txnstore.db.backend import EVERYTHING, POLL_FIRST_MS, POLL_LAST_MS, Subjects
from txnstore.db.opening import open_store
from txnstore.db.postgresql import connections as postgresql_connections
from txnstore.db.schema import group_members, groups, outbox, partition_heads, stores
from txnstore.db.sqlite import connections as sqlite_connections
from txnstore.db.sqlite import waiter as sqlite_waiter
from txnstore.db.sqlite.connections import CommitStamps
from txnstore.db.sqlite.waiter import FileWaiter
from txnstore.db.statements import HotStatement
from txnstore.db.store import note_change
from txnstore.errors import StoreBusy
from txnstore.log.topics import create_topic

__all__ = ["observer", "orders", "postgresql", "proxied", "proxy", "waiter"]

WAITING_FOR_LOCKS = """
    SELECT pid FROM pg_locks JOIN pg_database ON pg_database.oid = pg_locks.database
    WHERE NOT granted AND datname = current_database()"""
CHILDREN = Path(__file__).parents[1] / "faults" / "children.py"


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_commit_whose_writer_was_killed_before_its_hint_is_found_all_the_same(orders, bills, url):
    with closing(orders.store.waiter(about(orders))) as waiter:
        settle(waiter)
        waiting = threading.Thread(target=waiter.wait, args=(60_000,), daemon=True)
        waiting.start()
        program = [sys.executable, "-c", KILLED_BEFORE_ITS_HINT, url, str(orders.partition_id)]
        killed = subprocess.run(program, check=False, timeout=300)
        assert killed.returncode == -signal.SIGKILL
        assert orders.next_offset() == 1
        began = time.monotonic()
        # Hints of others are no help, and do not put it off.
        while waiting.is_alive():
            bills.add()
            waiting.join(0.02)
            assert time.monotonic() < began + 40
        # Nor is it lost where nobody waited just then.
        settle(waiter)
        assert subprocess.run(program, check=False, timeout=300).returncode == -signal.SIGKILL
        assert waiter.wait(40_000)


def test_no_time_to_wait_means_to_look_and_return(orders, waiter):
    start = time.monotonic()
    assert not waiter.wait(0)
    assert time.monotonic() - start < 10


def test_each_of_many_readers_is_woken(orders):
    waiters = [orders.store.waiter() for _ in range(3)]
    for each in waiters:
        settle(each)
    orders.add()
    assert all(is_woken(each) for each in waiters)
    for each in waiters:
        each.close()


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


@pytest.mark.slow
def test_a_reader_that_no_hint_reaches_looks_by_itself(postgresql):
    with closing(postgresql.store.waiter()) as waiter:
        settle(waiter)
        postgresql.add(wakes_readers=False)
        start = time.monotonic()
        assert waiter.wait(60_000)
        assert time.monotonic() - start < 40
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


def test_a_stranger_who_holds_the_lock_of_a_channel_holds_up_no_reader_and_no_session(
    postgresql, observer, monkeypatch
):
    monkeypatch.setattr(postgresql_connections, "LOCK_WAIT_MS", 20)
    channels = postgresql_connections._Channels(postgresql.store.channel)
    (channel,) = channels.heard(about(postgresql)) - {postgresql_connections._ANYBODY}
    observer.execute("SELECT pg_advisory_lock(%s, %s)", (channels.lock_class, channel))
    start = time.monotonic()
    with closing(postgresql.store.waiter(about(postgresql))) as waiter:
        assert time.monotonic() - start < postgresql_connections.ANSWER_TIMEOUT_MS / 1000
        assert not observer.execute(WAITING_FOR_LOCKS).fetchall()
        # It looks by itself, until it can listen again.
        assert waiter.wait(60_000)
        observer.execute("SELECT pg_advisory_unlock_all()")
        waiter._listen_again = 0.0
        until(lambda: waiter.wait(20) and waiter._connection is not None)
        settle(waiter)
        postgresql.add()
        assert is_woken(waiter)


@pytest.mark.slow
def test_a_table_that_is_locked_holds_up_no_session_of_a_reader(postgresql, observer):
    statement = HotStatement(
        select(partition_heads.c.next_offset).where(partition_heads.c.partition_id == bindparam("of_partition_id"))
    )
    parameters = {"of_partition_id": postgresql.partition_id}
    with closing(postgresql.store.waiter(about(postgresql))) as waiter:
        # The first one is asked once, to which store the connection leads.
        for table in ("stores", "partition_heads"):
            observer.execute(f"BEGIN; LOCK TABLE txnstore.{table}")
            assert waiter.rows(statement, parameters) is None
            assert not observer.execute(WAITING_FOR_LOCKS).fetchall()
            observer.execute("ROLLBACK")
            assert waiter.rows(statement, parameters) == [(0,)]


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


def test_a_waiter_whose_new_connection_leads_to_another_store_reads_nothing_there(postgresql):
    """Nor to an older state of its own; what is wrong there is for the store's own connections to say."""
    statement = HotStatement(select(literal(17).label("number")))
    before = select(stores.c.store_uuid, stores.c.next_producer_id)

    def connect_again(waiter, **values):
        postgresql.store.write(lambda connection: connection.execute(update(stores).values(**values)))
        waiter._close_connection()
        waiter._listen()
        return waiter.rows(statement, {})

    store_uuid, next_producer_id = postgresql.store.read(lambda connection: connection.execute(before).one())
    with closing(postgresql.store.waiter(about(postgresql))) as waiter:
        assert connect_again(waiter, next_producer_id=next_producer_id + 1) == [(17,)]
        assert connect_again(waiter, next_producer_id=next_producer_id) is None
        assert connect_again(waiter, next_producer_id=next_producer_id + 1) == [(17,)]
        assert connect_again(waiter, store_uuid=str(uuid.uuid4())) is None
        assert waiter.rows(statement, {}) is None
        assert connect_again(waiter, store_uuid=store_uuid) == [(17,)]


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


@pytest.mark.slow_but_first
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
        assert len(list(observer.notifies(timeout=60, stop_after=1))) == 1
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
        assert len(looks) <= 12 + 1000 * seconds / POLL_LAST_MS
        orders.add()
        waiting.join(WAKE_LIMIT_SECONDS)
        assert not waiting.is_alive()


@pytest.mark.usefixtures("_without_stamps")
def test_a_reader_that_nobody_tells_finds_each_commit_by_itself(txnstore_sqlite_store, monkeypatch):
    orders = Orders(txnstore_sqlite_store)
    with closing(orders.store.waiter(about(orders))) as waiter:
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
    orders = Orders(txnstore_sqlite_store)
    with closing(orders.store.waiter(about(orders))) as waiter:
        settle(waiter)
        pauses: list[float] = []
        monkeypatch.setattr(waiter._signal, "wait", pauses.append)
        monkeypatch.setattr(waiter, "_has_moved", lambda: len(pauses) > 11)
        assert waiter.wait(60_000)
        assert pauses[-1] == POLL_LAST_MS / 1000
        assert pauses == sorted(pauses)
        # Once there was something it is soon back.
        pauses.clear()
        assert waiter.wait(60_000)
        assert pauses[0] == POLL_FIRST_MS / 1000


@pytest.mark.usefixtures("_without_stamps")
def test_a_wake_is_heard_without_stamps_too_and_counts_once(txnstore_sqlite_store):
    orders = Orders(txnstore_sqlite_store)
    with closing(orders.store.waiter(about(orders))) as waiter:
        settle(waiter)
        waiting = threading.Thread(target=waiter.wait, args=(60_000,), daemon=True)
        waiting.start()
        waiter.wake()
        waiting.join(WAKE_LIMIT_SECONDS)
        assert not waiting.is_alive()
        waiter.wake()
        waiter.wake()
        assert [waiter.wait(0), waiter.wait(0)] == [True, False]


def test_what_a_reader_compares_has_a_value_for_each_place_by_order() -> None:
    """Python 3.12 warns of places with numbers, and 3.14 refuses them."""
    statement, values = sqlite_waiter.look_for(Subjects(frozenset({1, 2}), frozenset({"billing", "stock"})))
    assert values == ["billing", "stock"] * 2
    assert statement.count("?") == len(values)
    assert not re.search(r"\?[0-9]", statement)

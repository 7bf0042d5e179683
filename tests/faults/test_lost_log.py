"""An SQLite file whose write-ahead log is taken away under those that have it open, by somebody or by lost locks.

What they then wrote would be reported as lasting, and lost with them; and closed, they would write over what others
have written since.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sqlite3
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import literal, select

from txnstore.db.backend import Limits
from txnstore.db.opening import open_store
from txnstore.db.sqlite import connections
from txnstore.db.sqlite.connections import WAL_BYTES_DUE, checkpoint, connect, make_room
from txnstore.db.statements import HotStatement
from txnstore.errors import OutcomeUnknown, StoreClosed, StoreUnavailable

ONE = HotStatement(select(literal(1).label("number")))
GONE = r"write-ahead log .* was removed or replaced while this program had the file open: restart"
# What closes the file as the last one, as far as it can see.
ADD_ELSEWHERE = """
import sys
from tests.faults.children import add, open_store, partition_of
with open_store(sys.argv[1]) as store:
    for number in range(int(sys.argv[2])):
        add(store, partition_of(store), b"elsewhere %d" % number + bytes(2_000))
"""


@pytest.fixture
def path(txnstore_sqlite_url):
    return Path(txnstore_sqlite_url.removeprefix("sqlite:///"))


def remove_log(path):
    for ending in ("-wal", "-shm"):
        Path(f"{path}{ending}").unlink()


def lose_locks(path, count=20):
    """Read the file as any program would, and let another process close it."""
    path.read_bytes()
    add_elsewhere(path, count)


def add_elsewhere(path, count):
    subprocess.run([sys.executable, "-c", ADD_ELSEWHERE, f"sqlite:///{path}", str(count)], check=True)


def found_at(path):
    """Return how many batches there are, as another process sees it, which then is whole."""
    program = (
        "import sqlite3, sys; file = sqlite3.connect(sys.argv[1]);"
        "print(*file.execute('PRAGMA integrity_check').fetchone(),"
        " *file.execute('SELECT count(*) FROM txnstore_record_batches').fetchone())"
    )
    shown = subprocess.run([sys.executable, "-c", program, path], check=True, capture_output=True, text=True)
    return shown.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize("take_away", [remove_log, lose_locks])
def test_nothing_is_written_to_a_log_that_has_gone_and_readers_are_told(
    txnstore_sqlite_url, path, orders_of, take_away
):
    with open_store(txnstore_sqlite_url, limits=Limits(retry_timeout_ms=0)) as store:
        orders = orders_of(store)
        orders.add(b"before")
        checkpoint(str(path))
        take_away(path)
        for _ in range(3):
            with pytest.raises(StoreUnavailable, match=GONE):
                orders.add(b"lost")
            with pytest.raises(StoreUnavailable, match=GONE):
                orders.values()
    gc.collect()
    assert found_at(path) == ["ok", "1" if take_away is remove_log else "21"]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["exit", "exit unaware", "close", "kill"])
def test_what_others_wrote_after_the_log_had_gone_outlives_those_that_had_it_open(
    txnstore_sqlite_url, path, start_child, end
):
    child = start_child("lose_log", txnstore_sqlite_url, end)
    assert child.read() == "added"
    if end == "exit unaware":
        remove_log(path)
    else:
        # Whoever looks deletes the log as he closes, as the last one by what he can see.
        assert found_at(path) == ["ok", "20"]
    for _ in range(2):
        add_elsewhere(path, 20)
    child.tell()
    assert child.read() == ("" if end == "exit unaware" else "OutcomeUnknown")
    assert child.end() == (-signal.SIGKILL if end == "kill" else 0)
    assert found_at(path) == ["ok", "60"]


def test_a_commit_that_found_its_log_gone_is_in_doubt(txnstore_sqlite_url, path, orders_of):
    with open_store(txnstore_sqlite_url, limits=Limits(retry_timeout_ms=0)) as store:
        orders = orders_of(store)
        orders.add(b"before")
        checkpoint(str(path))

        def lose_meanwhile(connection):
            connection.exec_driver_sql("CREATE TABLE accounts (name TEXT)")
            remove_log(path)

        with pytest.raises(OutcomeUnknown, match="write-ahead log"):
            store.write(lose_meanwhile)
        with pytest.raises(StoreUnavailable, match=GONE):
            orders.add(b"lost")
    assert found_at(path) == ["ok", "1"]


def test_a_commit_to_a_file_that_was_replaced_meanwhile_is_in_doubt(txnstore_sqlite_url, path, orders_of):
    with open_store(txnstore_sqlite_url, limits=Limits(retry_timeout_ms=0)) as store:
        orders = orders_of(store)
        orders.add(b"before")
        backup = path.with_name("backup.db")
        with closing(sqlite3.connect(path)) as original, closing(sqlite3.connect(backup)) as copy:
            original.backup(copy)

        def replace_meanwhile(connection):
            connection.exec_driver_sql("CREATE TABLE accounts (name TEXT)")
            for ending in ("", "-wal", "-shm"):
                Path(f"{path}{ending}").rename(path.with_name(f"away.db{ending}"))
            backup.rename(path)

        with pytest.raises(OutcomeUnknown, match="moved, removed or replaced"):
            store.write(replace_meanwhile)
        orders.add(b"after")
        assert orders.committed() == [b"before", b"after"]


def test_who_waits_for_news_reads_no_more_from_a_log_that_has_gone(txnstore_sqlite_url, path, orders_of):
    with open_store(txnstore_sqlite_url) as store, closing(store.waiter()) as waiter:
        orders_of(store)
        waiter.wait(0)
        assert waiter.rows(ONE, {}) == [(1,)]
        remove_log(path)
        assert waiter.rows(ONE, {}) is None
        waiter.wait(0)
        assert waiter.rows(ONE, {}) is None


@pytest.mark.slow
def test_what_is_legal_with_the_log_is_no_sign_of_a_loss(txnstore_sqlite_url, path, orders_of):
    with open_store(txnstore_sqlite_url) as store:
        orders = orders_of(store)
        orders.add(b"one")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            orders.add(b"two")
            other.execute("VACUUM")
        add_elsewhere(path, 1)
        orders.add(b"three")
        store.engine.dispose()
        orders.add(b"four")
    # The last one to close it deletes the log.
    assert not Path(f"{path}-wal").exists()
    with open_store(txnstore_sqlite_url) as store:
        orders_of(store).add(b"five")
    assert found_at(path) == ["ok", "6"]


def test_the_last_close_may_delete_the_log_under_the_eyes_of_another_thread(txnstore_sqlite_url, path, monkeypatch):
    with open_store(txnstore_sqlite_url):
        pass
    last = connect(str(path))
    is_another = connections._is_another

    def close_before_the_look(*arguments):
        monkeypatch.setattr(connections, "_is_another", is_another)
        last.close()
        return is_another(*arguments)

    monkeypatch.setattr(connections, "_is_another", close_before_the_look)
    assert not last.is_without_log()
    assert not Path(f"{path}-wal").exists()
    # A second time, when there is no log.
    last.close()
    connect(str(path)).close()


@pytest.mark.slow
def test_threads_that_open_and_close_a_file_find_no_log_gone(txnstore_sqlite_url, path):
    with open_store(txnstore_sqlite_url):
        pass

    def open_and_close(_):
        with contextlib.suppress(sqlite3.OperationalError):
            # Busy: another one is just closing it.
            connect(str(path)).close()

    interval_seconds = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(open_and_close, range(1_000)))
    finally:
        sys.setswitchinterval(interval_seconds)
    connect(str(path)).close()


def test_a_connection_may_be_closed_while_another_is_opened(txnstore_sqlite_url, path, monkeypatch):
    with open_store(txnstore_sqlite_url):
        pass
    opened = [connect(str(path)) for _ in range(3)]

    class ClosedWhileListed(weakref.WeakSet):
        def __iter__(self):
            for connection in super().__iter__():
                if len(opened) > 1:
                    opened.pop().close()
                yield connection

    monkeypatch.setattr(connections, "_open", ClosedWhileListed(opened))
    connect(str(path)).close()
    assert len(opened) == 1


def test_a_log_that_has_gone_is_moved_into_no_file(txnstore_sqlite_url, path, orders_of):
    """The connections that do so are kept, and had it open."""
    with open_store(txnstore_sqlite_url, limits=Limits(retry_timeout_ms=0)) as store:
        orders = orders_of(store)
        for _ in range(2 * WAL_BYTES_DUE // 100_000):
            orders.add(bytes(100_000))
        kept = vars(store.engine)["checkpointer"]._kept
        assert kept
        remove_log(path)
        assert make_room(str(path), 0.0, 0.0, kept=kept) is None
        assert make_room(str(path), 0.0, 0.0) is None


def test_a_connection_beside_those_that_have_lost_their_log_is_not_opened(txnstore_sqlite_url, path, orders_of):
    """It would look for the old log's pages in a new log; in a child that is forked off as well."""
    with open_store(txnstore_sqlite_url) as store, store.engine.connect():
        orders_of(store)
        remove_log(path)
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match=GONE):
                connect(str(path))
        child = os.fork()
        if child == 0:
            try:
                connect(str(path))
            except (StoreClosed, StoreUnavailable):
                os._exit(7)
            finally:
                os._exit(8)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

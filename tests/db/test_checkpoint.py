"""SQLite's write-ahead log: moved into the file under the write lock and in no other way, and kept short."""

from __future__ import annotations

import itertools
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from txnstore.db.opening import open_store
from txnstore.db.sqlite import connections as sqlite_connections
from txnstore.db.sqlite.connections import (
    ROOM_LAST_SECONDS,
    ROOM_SHORT_SECONDS,
    WAL_BYTES_DUE,
    WAL_BYTES_ROOM,
    checkpoint,
    connect,
    make_room,
)
from txnstore.db.sqlite.log_file import LogFile
from txnstore.db.statements import run_on_driver

CHILDREN = Path(__file__).parents[1] / "faults" / "children.py"
#: Where a file need not wait for a disk: how often matters here, not that it lasts.
FAST_FOLDER = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture
def path(txnstore_sqlite_url):
    return txnstore_sqlite_url.removeprefix("sqlite:///")


@pytest.fixture
def store(txnstore_sqlite_url):
    with open_store(txnstore_sqlite_url, pool_size=2) as store:
        store.write(lambda connection: connection.exec_driver_sql("CREATE TABLE shop (data BLOB)"))
        yield store


@pytest.fixture
def fast_path():
    with tempfile.TemporaryDirectory(prefix="txnstore-checkpoint-", dir=FAST_FOLDER) as folder:
        yield str(Path(folder, "store.db"))


@pytest.fixture
def other(path, store):
    """A connection of somebody else to the same file."""
    with closing(sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)) as connection:
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        yield connection


def write(store, size_bytes):
    store.write(lambda connection: connection.exec_driver_sql(f"INSERT INTO shop VALUES (randomblob({size_bytes}))"))


def wal_bytes(path):
    return Path(f"{path}-wal").stat().st_size


def contents(path):
    return Path(path).read_bytes(), Path(f"{path}-wal").read_bytes()


def assert_sound(path):
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def run_child(function, *arguments):
    return subprocess.Popen(
        [sys.executable, str(CHILDREN), function, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


def test_no_connection_of_a_store_checkpoints_by_itself(store, path, monkeypatch):
    connections: list[tuple[sqlite3.Connection, int]] = []
    monkeypatch.setattr(sqlite_connections, "connect", recording(connections))
    shown = "PRAGMA wal_autocheckpoint"
    assert checkpoint(path)
    assert len(connections) == 2
    assert [found for connection, found in connections] == [0, 0]
    assert store.write(lambda connection: connection.exec_driver_sql(shown).scalar_one()) == 0
    assert store.read(lambda connection: connection.exec_driver_sql(shown).scalar_one()) == 0
    with closing(store.waiter()) as waiter:
        assert waiter._connection.execute(shown).fetchone() == (0,)


def test_the_connections_that_checkpoint_are_kept_until_the_store_is_closed(txnstore_sqlite_url, path, monkeypatch):
    connections: list[tuple[sqlite3.Connection, int]] = []
    with open_store(txnstore_sqlite_url) as store:
        store.write(lambda connection: connection.exec_driver_sql("CREATE TABLE shop (data BLOB)"))
        monkeypatch.setattr(sqlite_connections, "connect", recording(connections))
        for _ in range(3):
            write(store, WAL_BYTES_DUE)
        assert len(connections) == 2
        with closing(sqlite3.connect(path, timeout=0)) as other:
            # They hold nothing meanwhile: the lock is free, and the log starts anew.
            other.execute("BEGIN IMMEDIATE")
    assert [is_open(connection) for connection, _ in connections] == [False, False]


def test_a_checkpoint_that_failed_keeps_no_connection(store, path, other, monkeypatch):
    connections: list[tuple[sqlite3.Connection, int]] = []
    kept: list[Any] = []
    monkeypatch.setattr(sqlite_connections, "connect", recording(connections))
    assert checkpoint(path, kept)
    assert [is_open(connection) for connection, _ in connections] == [True, True]
    other.execute("BEGIN IMMEDIATE")
    assert not checkpoint(path, kept)
    assert kept == []
    assert [is_open(connection) for connection, _ in connections] == [False, False]


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="nothing forks here")
def test_no_connection_that_was_kept_is_open_while_the_process_forks(store):
    """Neither that of the last write, nor those of the last checkpoint."""
    write(store, WAL_BYTES_DUE)
    written = store.write(the_drivers_connection)
    assert store.write(the_drivers_connection) is written
    pair = store.engine.checkpointer._kept[0]
    try:
        sqlite_connections._before_fork()
    finally:
        sqlite_connections.FORK_LOCK.release()
    assert [is_open(connection) for connection in (written, *pair)] == [False] * 3
    store.write(the_drivers_connection)
    write(store, WAL_BYTES_DUE)


def the_drivers_connection(connection):
    run_on_driver(connection, "INSERT INTO shop VALUES ('')")
    return connection.connection.driver_connection


def is_open(connection):
    try:
        connection.execute("SELECT 1")
    except sqlite3.ProgrammingError:
        return False
    return True


def recording(connections):
    def connect_and_record(path, **options):
        connection = connect(path, **options)
        (found,) = connection.execute("PRAGMA wal_autocheckpoint").fetchone()
        connections.append((connection, found))
        return connection

    return connect_and_record


def test_while_somebody_writes_nothing_is_moved(store, path, other):
    write(store, 100_000)
    other.execute("BEGIN IMMEDIATE")
    before = contents(path)
    assert not checkpoint(path)
    assert contents(path) == before
    other.execute("ROLLBACK")
    assert checkpoint(path)
    assert contents(path) != before


@pytest.mark.parametrize("reads_meanwhile", [False, True])
def test_a_checkpoint_holds_the_write_lock(store, path, other, monkeypatch, reads_meanwhile):
    """Also each of those that are tried while a reader stays; RESTART and TRUNCATE would go on without it."""
    tried = []

    def try_to_write(statement):
        if "wal_checkpoint" in statement:
            try:
                other.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                tried.append((statement, error.sqlite_errorname))
            else:
                other.execute("ROLLBACK")
                tried.append((statement, "not locked"))

    def connect_and_trace(path, **options):
        connection = connect(path, **options)
        connection.set_trace_callback(try_to_write)
        return connection

    monkeypatch.setattr(sqlite_connections, "connect", connect_and_trace)
    with closing(Reader(path)) as reader:
        if not reads_meanwhile:
            reader.end()
        write(store, 100_000)
        moved = make_room(path, 0.05, 0.0)
        assert moved is not None
        assert moved.is_all is not reads_meanwhile
    assert set(tried) == {("PRAGMA wal_checkpoint(PASSIVE)", "SQLITE_BUSY")}
    assert len(tried) > 1 or not reads_meanwhile


class Reader:
    """A reader that holds a snapshot until it is told to go on to the next one."""

    def __init__(self, path):
        self._connection = connect(path)
        self._begin()

    def _begin(self):
        self._connection.execute("BEGIN")
        self._connection.execute("SELECT count(*) FROM shop").fetchone()

    def end(self):
        self._connection.execute("COMMIT")

    def go_on(self):
        self.end()
        self._begin()

    def close(self):
        self._connection.close()


class Waits:
    """Stands in for the module `time`: what is waited for is counted, and others do their work meanwhile."""

    def __init__(self, meanwhile):
        self._meanwhile = meanwhile
        self.seconds = 0.0

    def monotonic(self):
        return self.seconds

    def sleep(self, seconds):
        self.seconds += seconds
        self._meanwhile()


@pytest.mark.slow
def test_readers_that_overlap_without_a_pause_do_not_let_the_log_grow(store, path, monkeypatch):
    with closing(Reader(path)) as one, closing(Reader(path)) as another:
        waits = Waits(lambda: (one.go_on(), another.go_on()))
        monkeypatch.setattr(sqlite_connections, "time", waits)
        sizes = []
        for _ in range(20):
            for reader in (one, another):
                # At any moment one of them has a snapshot from before the last commit.
                write(store, 1_000_000)
                reader.go_on()
                sizes.append(wal_bytes(path))
    assert max(sizes) < WAL_BYTES_ROOM + WAL_BYTES_DUE + 1_000_000
    assert min(sizes[len(sizes) // 2 :]) == WAL_BYTES_DUE
    assert 0 < waits.seconds < ROOM_LAST_SECONDS


def test_a_reader_that_stays_for_long_is_waited_for_once(store, path, monkeypatch):
    waits = Waits(lambda: None)
    monkeypatch.setattr(sqlite_connections, "time", waits)
    write(store, 1)
    with closing(Reader(path)) as reader:
        for _ in range(40):
            write(store, 1_000_000)
        assert wal_bytes(path) > 2 * WAL_BYTES_ROOM
        assert 0 < waits.seconds < ROOM_LAST_SECONDS / 2
        reader.end()
        for _ in range(6):
            write(store, 1_000_000)
        assert wal_bytes(path) < 2 * WAL_BYTES_DUE


def test_writers_wait_for_readers_no_longer_than_for_other_upkeep_until_the_log_is_long(store, path, monkeypatch):
    """A reader that stays for longer than that after each commit."""
    waits = Waits(lambda: None)
    monkeypatch.setattr(sqlite_connections, "time", waits)
    monkeypatch.setattr(sqlite_connections, "WAL_BYTES_LONG", 2 * WAL_BYTES_ROOM)
    longest_seconds = {False: 0.0, True: 0.0}
    write(store, 1)
    with closing(Reader(path)) as reader:
        for _ in range(45):
            before_seconds = waits.seconds
            write(store, 1_000_000)
            reader.go_on()
            is_long = wal_bytes(path) >= 2 * WAL_BYTES_ROOM
            longest_seconds[is_long] = max(longest_seconds[is_long], waits.seconds - before_seconds)
    assert 0 < longest_seconds[False] < 2 * ROOM_SHORT_SECONDS + 0.002
    assert longest_seconds[True] > 2 * ROOM_SHORT_SECONDS


def test_a_log_that_has_grown_is_moved_after_a_commit_and_starts_anew(store, path):
    largest = 0
    for _ in range(30):
        write(store, 1_000_000)
        largest = max(largest, wal_bytes(path))
    assert WAL_BYTES_DUE < largest < 2 * WAL_BYTES_DUE
    write(store, 1)
    assert Path(path).stat().st_size > 20_000_000


def test_the_log_of_a_store_that_is_opened_by_a_symbolic_link_is_moved_as_well(store, path, tmp_path):
    """SQLite keeps it beside the file, and not beside the link."""
    link = tmp_path / "link.db"
    link.symlink_to(path)
    with open_store(f"sqlite:///{link}") as by_link:
        for _ in range(4):
            write(by_link, WAL_BYTES_DUE)
        assert WAL_BYTES_DUE < wal_bytes(path) < 3 * WAL_BYTES_DUE
    # Nor are there two places where writers stand in line.
    assert not Path(f"{link}-line").exists()


def test_a_log_that_starts_anew_keeps_its_space_and_is_moved_once_it_is_long_again(store, path, monkeypatch):
    moved = []

    def count(*arguments, **options):
        moved.append(len(written))
        return make_room(*arguments, **options)

    monkeypatch.setattr(sqlite_connections, "make_room", count)
    written = []
    for _ in range(60):
        write(store, 250_000)
        written.append(wal_bytes(path))
    # Four commits of 250,000 bytes are a megabyte of the log, and a bit more.
    assert 3 <= len(moved) <= 60 * 260_000 / WAL_BYTES_DUE
    assert min(b - a for a, b in itertools.pairwise(moved)) > 12
    assert set(written[moved[0] + 1 :]) <= set(range(WAL_BYTES_DUE, WAL_BYTES_DUE + 260_000))


def test_a_log_that_is_not_long_is_waited_for_no_longer_after_one_that_was(store, path, monkeypatch):
    waited = []
    monkeypatch.setattr(sqlite_connections, "make_room", lambda path, wait, linger, **_: waited.append((wait, linger)))
    checkpointer = sqlite_connections.Checkpointer(path)
    checkpointer._room_seconds = ROOM_LAST_SECONDS
    checkpointer._run(sqlite_connections.WAL_BYTES_LONG)
    checkpointer._run(WAL_BYTES_ROOM)
    assert waited == [(ROOM_LAST_SECONDS, ROOM_LAST_SECONDS), (ROOM_SHORT_SECONDS, ROOM_SHORT_SECONDS)]


def test_a_log_is_as_long_as_its_own_frames(store, path):
    def salt(log, length_bytes):
        return LogFile(log).salt(length_bytes)

    write(store, WAL_BYTES_DUE)
    log = f"{path}-wal"
    assert wal_bytes(path) > WAL_BYTES_DUE
    first = salt(log, WAL_BYTES_DUE)
    assert first is not None
    assert salt(log, 100_000) == first
    assert salt(log, 2 * WAL_BYTES_DUE) is None
    write(store, 100_000)
    assert wal_bytes(path) == WAL_BYTES_DUE
    assert salt(log, 100_000) not in {None, first}
    assert salt(log, 200_000) is None
    assert salt(log, WAL_BYTES_DUE) is None
    nothing = Path(f"{path}-nothing")
    nothing.touch()
    assert salt(str(nothing), 100_000) is None


@pytest.mark.skipif(sys.platform != "linux", reason="they tell each other where writers stand in line")
def test_of_several_processes_one_moves_the_log(path, store, txnstore_sqlite_url, monkeypatch):
    """Another one who finds it long in the meantime leaves it alone, until the log has grown once more."""

    def make_room_meanwhile(*arguments, **options):
        calls.append(None)
        if len(calls) == 1:
            another.backend.after_commit(another.engine)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return make_room(*arguments, **options)

    calls: list[None] = []
    monkeypatch.setattr(sqlite_connections, "make_room", make_room_meanwhile)
    with open_store(txnstore_sqlite_url) as another, closing(Reader(path)):
        write(store, WAL_BYTES_DUE)
        assert len(calls) == 1
        another.backend.after_commit(another.engine)
        store.backend.after_commit(store.engine)
        assert len(calls) == 1
        write(another, WAL_BYTES_DUE)
        assert len(calls) == 2
        # One that is stopped in the middle leaves it to the next one.
        with pytest.raises(KeyboardInterrupt):
            write(store, WAL_BYTES_DUE)
        another.backend.after_commit(another.engine)
        assert len(calls) == 4


def test_a_reader_that_needs_the_log_only_delays_its_end(store, path, other):
    write(store, 1)
    other.execute("BEGIN")
    other.execute("SELECT count(*) FROM shop").fetchone()
    for _ in range(15):
        write(store, 1_000_000)
    assert wal_bytes(path) > 3 * WAL_BYTES_DUE
    assert other.execute("SELECT count(*) FROM shop").fetchone() == (1,)
    other.execute("COMMIT")
    for _ in range(6):
        write(store, 1_000_000)
    assert wal_bytes(path) < 2 * WAL_BYTES_DUE


def test_a_busy_writer_puts_it_off_to_the_next_commit_and_no_longer(store, path, other, monkeypatch):
    monkeypatch.setattr(sqlite_connections, "WAL_BYTES_DUE", 100_000)
    store.engine.checkpointer._due_bytes = 100_000
    locks: list[int] = []

    def lock_after_the_commit(*_):
        if not locks:
            other.execute("BEGIN IMMEDIATE")
            locks.append(1)

    event.listen(store.engine, "checkin", lock_after_the_commit)
    write(store, 200_000)
    assert locks
    other.execute("ROLLBACK")
    before = Path(path).stat().st_size
    write(store, 1)
    assert Path(path).stat().st_size > before


def test_a_checkpoint_needs_no_connection_of_a_pool_that_is_all_in_use(store, path):
    """Otherwise a commit that stands would end in an error."""
    taken = [store.engine.connect() for _ in range(3)]
    try:
        before = Path(path).stat().st_size
        write(store, WAL_BYTES_DUE + 1)
        assert Path(path).stat().st_size > before
    finally:
        for connection in taken:
            connection.close()


@pytest.mark.parametrize("error", [sqlite3.DatabaseError("disk I/O error"), FileNotFoundError("store.db")])
def test_a_checkpoint_that_fails_is_no_error_of_the_commit_before_it(store, monkeypatch, error):
    def refuse(path, **options):
        raise error

    monkeypatch.setattr(sqlite_connections, "connect", refuse)
    write(store, WAL_BYTES_DUE + 1)
    assert store.read(lambda connection: connection.exec_driver_sql("SELECT count(*) FROM shop").scalar_one()) == 1


def read_all(connection):
    statement = "SELECT count(*), sum(size_bytes) FROM txnstore_record_batches"
    return connection.exec_driver_sql(statement).one()


@pytest.mark.slow
def test_the_log_stays_short_while_processes_write_and_read(fast_path):
    largest = 0
    with (
        open_store(f"sqlite:///{fast_path}") as store,
        run_child("write_megabytes", f"sqlite:///{fast_path}", 2, 30) as child,
    ):
        pause = threading.Event()
        while child.poll() is None:
            # A reader as well: it keeps a checkpoint from the end of the log, for as long as it reads.
            store.read(read_all)
            largest = max(largest, wal_bytes(fast_path))
            pause.wait(0.002)
        assert child.returncode == 0
    # Of what is written, which is much more; a reader that is kept waiting in the middle keeps the log from its end.
    assert WAL_BYTES_DUE < largest < 10 * WAL_BYTES_DUE
    assert Path(fast_path).stat().st_size > 60_000_000
    assert_sound(fast_path)


@pytest.mark.slow
def test_a_file_is_sound_after_two_processes_wrote_and_checkpointed_ten_thousand_times(fast_path):
    rounds = 5_000
    with run_child("write_and_checkpoint", fast_path, 2, rounds) as child:
        output, _ = child.communicate()
    assert child.returncode == 0
    checkpoints = [int(word) for word in output.split()]
    # Many came at a moment when nobody wrote; the others did nothing.
    assert sum(checkpoints) > rounds / 2
    with closing(sqlite3.connect(fast_path)) as connection:
        written = connection.execute(
            "SELECT count(*), count(DISTINCT process), min(length(data)), max(number) FROM shop"
        ).fetchone()
    assert written == (2 * rounds, 2, 500, rounds - 1)
    assert_sound(fast_path)

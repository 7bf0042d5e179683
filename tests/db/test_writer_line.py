"""The line in which the writers of an SQLite file wait, those of other processes too; it needs Linux.

A wait in it is made so long here that only a wake-up can end it in time.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from txnstore.db.opening import open_store
from txnstore.db.sqlite import connections, shared_words
from txnstore.errors import StoreBusy

PATIENCE_SECONDS = 120.0
FOR_EVER_SECONDS = 100_000

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the line is a futex of Linux")

WRITER = """
import sys
from txnstore.db.opening import open_store
from txnstore.db.sqlite import connections, shared_words
from txnstore.db.sqlite.backend import SQLiteBackend

url, name, wait_seconds, holds = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4] == "holds"
connections.LINE_WAIT_SECONDS = wait_seconds
call_futex, is_contended = connections._call_futex, SQLiteBackend.is_contended

def say(text):
    print(text, flush=True)

def told(word, operation, *arguments):
    if operation == shared_words.FUTEX_WAIT:
        say("waits")
    return call_futex(word, operation, *arguments)

def told_of_contention(backend, error):
    say("tries")
    return is_contended(backend, error)

def work(connection):
    connection.exec_driver_sql("INSERT INTO served (name) VALUES (?)", (name,))
    if holds:
        say("holds")
        sys.stdin.readline()

store = open_store(url)
connections._call_futex, SQLiteBackend.is_contended = told, told_of_contention
say("ready")
sys.stdin.readline()
try:
    store.write(work)
    say("done")
except KeyboardInterrupt:
    say("interrupted")
"""


class Writer:
    """A process that writes once, when it is told to."""

    def __init__(self, url: str, name: str, *, holds: bool = False, wait_seconds: float = FOR_EVER_SECONDS) -> None:
        arguments = [url, name, str(wait_seconds), "holds" if holds else "goes on"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hears(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def says(self, text: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == text

    def says_at_last(self, text: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.read().split()[-1] == text

    def sleeps_in_line(self) -> None:
        self.says("waits")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "store.db"
    with open_store(f"sqlite:///{path}") as store:
        store.write(lambda connection: connection.exec_driver_sql("CREATE TABLE served (n INTEGER PRIMARY KEY, name)"))
    return path


@pytest.fixture
def start(path):
    started = []

    def start(name, **options):
        writer = Writer(f"sqlite:///{path}", name, **options)
        started.append(writer)
        writer.says("ready")
        return writer

    def end_all():
        for writer in started:
            writer.process.kill()

    # Whoever hangs is ended: then what it says is empty, and the test fails.
    watch = threading.Timer(PATIENCE_SECONDS, end_all)
    watch.start()
    yield start
    watch.cancel()
    for writer in started:
        writer.process.kill()
        writer.process.communicate()


def served(path):
    connection = sqlite3.connect(path)
    found = [name for (name,) in connection.execute("SELECT name FROM served ORDER BY n")]
    connection.close()
    return found


@pytest.mark.slow
def test_writers_of_several_processes_are_served_in_the_order_in_which_they_came(path, start):
    holder, *others = start("0", holds=True), *(start(str(number)) for number in range(1, 5))
    holder.hears()
    holder.says("holds")
    for other in others:
        other.hears()
        other.sleeps_in_line()
    holder.hears()
    holder.says("done")
    for other in others:
        # Not one has tried in vain.
        other.says("done")
    assert served(path) == ["0", "1", "2", "3", "4"]


@pytest.mark.slow
def test_a_writer_that_rolls_back_lets_the_next_one_go_too(path, start):
    waiter = start("1")

    def work(connection):
        waiter.hears()
        waiter.sleeps_in_line()
        raise LookupError

    with open_store(f"sqlite:///{path}") as store, pytest.raises(LookupError):
        store.write(work)
    waiter.says("done")


@pytest.mark.slow
def test_a_writer_whose_connection_is_lost_lets_the_next_one_go_too(path, start):
    waiter = start("1")

    def work(connection):
        waiter.hears()
        waiter.sleeps_in_line()
        connection.invalidate()
        raise LookupError

    with open_store(f"sqlite:///{path}") as store, pytest.raises(LookupError):
        store.write(work)
    waiter.says("done")


@pytest.mark.slow
def test_a_writer_that_is_killed_holds_nobody_up(path, start):
    holder, waiter = start("0", holds=True), start("1", wait_seconds=connections.LINE_WAIT_SECONDS)
    holder.hears()
    holder.says("holds")
    waiter.hears()
    waiter.says("waits")
    holder.process.kill()
    assert holder.process.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    waiter.says_at_last("done")
    # Whoever comes now finds nobody at it, and waits for nobody.
    later = start("2")
    later.hears()
    later.says("done")
    assert served(path) == ["1", "2"]


@pytest.mark.slow
def test_the_wait_in_line_has_a_bound(path, start):
    holder = start("0", holds=True)
    holder.hears()
    holder.says("holds")
    with open_store(f"sqlite:///{path}") as store, pytest.raises(StoreBusy):
        store.write(lambda connection: None, retry_timeout_ms=1)


@pytest.mark.slow
def test_an_interrupt_ends_the_wait_in_line(path, start):
    holder, waiter = start("0", holds=True), start("1")
    holder.hears()
    holder.says("holds")
    waiter.hears()
    waiter.sleeps_in_line()
    waiter.process.send_signal(signal.SIGINT)
    waiter.says("interrupted")
    holder.hears()
    holder.says("done")
    assert served(path) == ["0"]


@pytest.mark.slow
def test_a_writer_of_others_is_not_waited_for_in_line(path, start):
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    # Nobody would wake it.
    waiter = start("1")
    waiter.hears()
    waiter.says("tries")
    connection.execute("COMMIT")
    connection.close()
    waiter.says_at_last("done")


@pytest.mark.slow
def test_a_forked_child_and_its_parent_stand_in_the_same_line(path, start):
    with open_store(f"sqlite:///{path}") as store:
        store.write(lambda connection: connection.exec_driver_sql("INSERT INTO served (name) VALUES ('parent')"))
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                store.write(lambda connection: connection.exec_driver_sql("INSERT INTO served (name) VALUES ('child')"))
            os._exit(0)
        os.waitpid(child, 0)
        waiter = start("1")

        def work(connection):
            waiter.hears()
            waiter.sleeps_in_line()

        store.write(work)
    waiter.says("done")
    assert served(path) == ["parent", "child", "1"]


@pytest.mark.slow
def test_a_store_that_is_closed_keeps_nothing_of_its_line(path):
    with open_store(f"sqlite:///{path}") as store:
        store.write(lambda connection: None)
        assert f"{path}-line" in Path("/proc/self/maps").read_text()
    gc.collect()
    assert f"{path}-line" not in Path("/proc/self/maps").read_text()


@pytest.mark.slow
def test_a_checkpoint_stands_in_line_too(path, start, monkeypatch):
    def told(word, operation, *arguments):
        if operation == shared_words.FUTEX_WAIT:
            waits.set()
        return call_futex(word, operation, *arguments)

    waits, call_futex = threading.Event(), connections._call_futex
    monkeypatch.setattr(connections, "_call_futex", told)
    monkeypatch.setattr(connections, "LINE_WAIT_SECONDS", FOR_EVER_SECONDS)
    holder = start("0", holds=True)
    holder.hears()
    holder.says("holds")
    with ThreadPoolExecutor() as pool:
        checkpoint = pool.submit(connections.checkpoint, str(path))
        assert waits.wait(PATIENCE_SECONDS)
        holder.hears()
        assert checkpoint.result(PATIENCE_SECONDS)


@pytest.mark.slow
def test_a_writer_waits_for_a_checkpoint_in_line(path, start, monkeypatch):
    def move_meanwhile(worker):
        waiter.hears()
        waiter.sleeps_in_line()
        return move(worker)

    move, waiter = connections._move, start("1")
    monkeypatch.setattr(connections, "_move", move_meanwhile)
    assert connections.checkpoint(str(path))
    waiter.says("done")


def test_its_file_has_the_permissions_of_the_database(path):
    line = Path(f"{path}-line")
    line.unlink()
    path.chmod(0o640)
    with open_store(f"sqlite:///{path}") as store:
        store.write(lambda connection: None)
    assert stat.S_IMODE(line.stat().st_mode) == 0o640


def a_folder(line, other):
    line.mkdir()


def a_link(line, other):
    line.symlink_to(other)


def a_pipe(line, other):
    os.mkfifo(line)


@pytest.mark.slow
@pytest.mark.parametrize("put", [a_folder, a_link, a_pipe])
def test_where_its_file_cannot_be_made_writers_do_without(path, start, put, tmp_path):
    line, other = Path(f"{path}-line"), tmp_path / "other"
    line.unlink()
    other.write_bytes(b"12345678")
    put(line, other)
    holder, waiter = start("0", holds=True), start("1")
    holder.hears()
    holder.says("holds")
    waiter.hears()
    waiter.says("tries")
    holder.hears()
    holder.says("done")
    waiter.says_at_last("done")
    assert served(path) == ["0", "1"]
    assert other.read_bytes() == b"12345678"


@pytest.mark.slow
def test_where_the_system_forbids_it_writers_do_without(path, start, monkeypatch):
    def refuse(*_):
        calls.append(_)
        ctypes.set_errno(errno.ENOSYS)
        return -1

    calls: list[object] = []
    holder = start("0", holds=True)
    holder.hears()
    holder.says("holds")
    monkeypatch.setattr(connections, "_call_futex", refuse)
    with open_store(f"sqlite:///{path}") as store, pytest.raises(StoreBusy):
        store.write(lambda connection: None, retry_timeout_ms=200)
    assert len(calls) == 1

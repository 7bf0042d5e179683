"""Commit stamps: who waits for what was committed is woken by them, and who waits for something else is not."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from txnstore.db.backend import EVERYTHING, NOTHING, POLL_LAST_MS, SUBJECT_BUCKETS, Subjects
from txnstore.db.opening import open_store
from txnstore.db.sqlite import connections, shared_words
from txnstore.db.sqlite import waiter as sqlite_waiter
from txnstore.db.sqlite.connections import CommitStamps, WriterLine
from txnstore.db.sqlite.waiter import FileWaiter, StampReader

PATIENCE_SECONDS = 60.0
PATIENCE_MS = 60_000
#: Longer than any test waits.
NEVER_MS = 3_600_000
ORDERS, BILLS = Subjects(frozenset([17])), Subjects(frozenset([18]))

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the stamps need a futex of Linux")

STAMPING = """
import sys
from txnstore.db.backend import Subjects
from txnstore.db.opening import open_store

with open_store(sys.argv[1]) as store:
    for partition_id in map(int, sys.argv[2:]):
        store.announce(Subjects(frozenset([partition_id])))
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "store.db"
    with open_store(f"sqlite:///{path}"):
        return str(path)


@pytest.fixture
def store(path):
    with open_store(f"sqlite:///{path}") as store:
        yield store


@pytest.fixture
def nobody_looks(monkeypatch):
    """Let readers look only when they are woken, and count how often they look."""
    for name in ("POLL_LAST_MS", "STAMPED_LAST_MS"):
        monkeypatch.setattr(sqlite_waiter, name, NEVER_MS)
    looks = []
    has_moved = FileWaiter._has_moved

    def counted(waiter):
        looks.append(waiter)
        return has_moved(waiter)

    monkeypatch.setattr(FileWaiter, "_has_moved", counted)
    return looks


@pytest.fixture
def wakes(monkeypatch):
    """How often a wait at the bell has ended."""
    ended = []
    wait = CommitStamps.wait

    def counted(stamps, bell, bits, until_seconds):
        result = wait(stamps, bell, bits, until_seconds)
        ended.append(bits)
        return result

    monkeypatch.setattr(CommitStamps, "wait", counted)
    return ended


class Waiting:
    """A wait that is under way, and asleep at the bell."""

    def __init__(self, waiter):
        self.found: list[bool] = []
        self._thread = threading.Thread(target=lambda: self.found.append(waiter.wait(NEVER_MS)), daemon=True)
        self._thread.start()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.is_at_bell:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    @property
    def is_at_bell(self):
        # The interpreter's own locks are waited for by another operation.
        _, *arguments = Path(f"/proc/self/task/{self._thread.native_id}/syscall").read_text().split()
        return arguments[1:2] == [hex(shared_words.FUTEX_WAIT_BITSET)]

    def ends(self):
        self._thread.join(PATIENCE_SECONDS)
        return self.found == [True]


@pytest.mark.slow_but_first
@pytest.mark.usefixtures("nobody_looks")
@pytest.mark.parametrize("subjects", [ORDERS, EVERYTHING, Subjects(group_ids=frozenset(["billing"]))])
def test_a_stamp_wakes_who_waits_for_it_or_for_everything(store, subjects):
    for waited_for in (subjects, EVERYTHING, Subjects(ORDERS.partition_ids, frozenset(["billing", "shipping"]))):
        with closing(store.waiter(waited_for)) as waiter:
            for _ in range(3):
                waiting = Waiting(waiter)
                store.announce(subjects)
                assert waiting.ends()


@pytest.mark.slow
@pytest.mark.usefixtures("nobody_looks")
def test_stamps_of_other_processes_wake_too_whatever_else_they_have_stamped(store, path):
    with closing(store.waiter(ORDERS)) as waiter:
        waiting = Waiting(waiter)
        subprocess.run(
            [sys.executable, "-c", STAMPING, f"sqlite:///{path}", "18", "17", "18"],
            check=True,
            timeout=PATIENCE_SECONDS,
        )
        assert waiting.ends()


def test_who_waits_for_something_else_sleeps_on_and_asks_the_database_nothing(store, nobody_looks, wakes):
    with closing(store.waiter(ORDERS)) as waiter:
        waiting = Waiting(waiter)
        nobody_looks.clear()
        wakes.clear()
        for _ in range(100):
            store.announce(BILLS)
        store.announce(NOTHING)
        assert waiting.is_at_bell
        assert wakes == nobody_looks == []
        store.announce(ORDERS)
        assert waiting.ends()
        assert len(wakes) == 1
        assert nobody_looks == []


def test_who_is_woken_for_a_bit_that_it_shares_asks_the_database_nothing(store, nobody_looks, wakes):
    sharing = Subjects(frozenset([17 + connections._BITS]))
    with closing(store.waiter(ORDERS)) as waiter:
        waiting = Waiting(waiter)
        wakes.clear()
        nobody_looks.clear()
        for expected in range(1, 4):
            store.announce(sharing)
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not (len(wakes) == expected and waiting.is_at_bell):
                assert time.monotonic() < deadline
                time.sleep(0.001)
        assert nobody_looks == []
        store.announce(Subjects(frozenset([17 + SUBJECT_BUCKETS])))
        assert waiting.ends()


@pytest.mark.usefixtures("nobody_looks")
def test_a_stamp_between_two_waits_counts_once(store):
    with closing(store.waiter(ORDERS)) as waiter:
        for _ in range(3):
            store.announce(ORDERS)
            store.announce(BILLS)
            assert waiter.wait(PATIENCE_MS)
            assert not waiter.wait(0)


def test_a_stamp_that_comes_while_a_reader_compares_keeps_it_from_sleeping(path):
    stamps = CommitStamps(path)
    reader = StampReader(stamps, ORDERS)
    bell = reader.bell
    assert not reader.take()
    CommitStamps(path).put(ORDERS)
    began = time.monotonic()
    assert reader.wait(bell, began + PATIENCE_SECONDS)
    assert reader.take()
    assert not reader.take()
    bell = reader.bell
    reader.call()
    assert reader.wait(bell, began + PATIENCE_SECONDS)
    assert time.monotonic() - began < PATIENCE_SECONDS
    assert reader.take()


@pytest.mark.usefixtures("nobody_looks")
def test_a_call_of_another_thread_ends_a_wait(store):
    with closing(store.waiter(ORDERS)) as waiter:
        waiting = Waiting(waiter)
        waiter.wake()
        assert waiting.ends()
    with closing(store.waiter(NOTHING)) as waiter:
        waiting = Waiting(waiter)
        waiter.wake()
        assert waiting.ends()


@pytest.mark.usefixtures("nobody_looks")
def test_a_reader_that_was_about_to_sleep_hears_of_a_stamp(store, monkeypatch):
    take = StampReader.take
    found: list[bool] = []

    def take_just_before(reader):
        found.append(take(reader))
        if len(found) == 1:
            store.announce(ORDERS)
        return found[-1]

    with closing(store.waiter(ORDERS)) as waiter:
        monkeypatch.setattr(StampReader, "take", take_just_before)
        began = time.monotonic()
        assert waiter.wait(PATIENCE_MS)
        assert time.monotonic() - began < PATIENCE_SECONDS
        assert found == [False, True]


@pytest.mark.slow
def test_no_writer_puts_the_stamp_of_another_one_not_even_of_its_parent(path):
    stamps, count = CommitStamps(path), 50
    reader = StampReader(stamps, ORDERS)
    stamps.put(ORDERS)
    for _ in range(count):
        # Each child goes on from where its parent is.
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                stamps.put(ORDERS)
            os._exit(0)
        os.waitpid(child, 0)
        assert reader.take()
        stamps.put(ORDERS)
        assert reader.take()


@pytest.mark.usefixtures("nobody_looks")
def test_a_forked_child_waits_for_stamps_by_itself(store):
    with closing(store.waiter(ORDERS)) as waiter:
        waiter.wake()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                assert waiter.wait(PATIENCE_MS)
                os.write(writing, b"1")
                assert waiter.wait(PATIENCE_MS)
                os.write(writing, b"2")
            os._exit(0)
        os.close(writing)
        assert os.read(reading, 1) == b"1"
        store.announce(ORDERS)
        assert os.read(reading, 1) == b"2"
        os.waitpid(child, 0)
        os.close(reading)


def test_an_application_that_leaves_no_stamp_is_found_by_a_look(store, path, wakes):
    with closing(store.waiter(EVERYTHING)) as waiter, closing(sqlite3.connect(path)) as application:
        while waiter.wait(20):
            pass
        application.execute("CREATE TABLE shop (name TEXT)")
        wakes.clear()
        began = time.monotonic()
        assert waiter.wait(PATIENCE_MS)
        assert time.monotonic() - began < PATIENCE_SECONDS / 2
        assert len(wakes) <= 2


def test_a_reader_of_a_file_that_nobody_writes_to_looks_less_and_less(store, monkeypatch):
    with closing(store.waiter(ORDERS)) as waiter:
        looked_at = []
        now = time.monotonic()
        monkeypatch.setattr("time.monotonic", lambda: now)

        def look():
            looked_at.append(now)
            return len(looked_at) > 9

        def rest(_, until_seconds):
            nonlocal now
            now = until_seconds
            return True

        monkeypatch.setattr(waiter, "_has_moved", look)
        monkeypatch.setattr(waiter._stamps, "wait", rest)
        assert waiter.wait(PATIENCE_MS)
        pauses = [round(1000 * (later - earlier)) for earlier, later in itertools.pairwise(looked_at)]
        assert pauses == sorted(pauses)
        assert pauses[0] == POLL_LAST_MS
        assert pauses[-1] == sqlite_waiter.STAMPED_LAST_MS
        # Once there was something it is soon back.
        looked_at.clear()
        assert waiter.wait(PATIENCE_MS)
        assert round(1000 * (looked_at[1] - looked_at[0])) == POLL_LAST_MS


def test_where_the_system_forbids_to_wait_a_reader_looks_again_and_again(store, monkeypatch):
    calls = []

    def forbidden(*arguments):
        calls.append(arguments)
        ctypes.set_errno(errno.ENOSYS)
        return -1

    monkeypatch.setattr(connections, "_call_futex", forbidden)
    with closing(store.waiter(ORDERS)) as waiter:
        assert not waiter.wait(200)
        assert len(calls) <= 200 / POLL_LAST_MS + 1
        calling = threading.Timer(0.05, waiter.wake)
        calling.start()
        assert waiter.wait(PATIENCE_MS)
        calling.join()


def test_a_file_of_fewer_words_gets_the_others_and_keeps_what_it_has(path):
    line = Path(f"{path}-line")
    before = WriterLine(path)
    turn = before.enter()
    os.truncate(line, shared_words.WORD_BYTES * shared_words.LINE_WORDS)
    reader = StampReader(CommitStamps(path), ORDERS)
    assert line.stat().st_size == shared_words._ALL_BYTES
    assert before._word is not None
    assert before._word.value == turn
    CommitStamps(path).put(ORDERS)
    assert reader.take()

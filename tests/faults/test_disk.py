"""An SQLite file on a disk that is full, read-only or broken, and processes that are killed while they commit to it."""

from __future__ import annotations

import itertools
import os
import signal
import sqlite3
import stat
import subprocess
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy.exc import DBAPIError

from tests.tools.sqlite_faults import FailingDisk, NoSQLiteLibraryError
from txnstore.db.backend import Limits
from txnstore.db.opening import open_store
from txnstore.db.sqlite import connections as sqlite_connections
from txnstore.errors import OutcomeUnknown, StoreBusy, StoreFull, StoreUnavailable, TransactionPoisoned
from txnstore.log.append import append
from txnstore.model import ProducerIdentity
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.outcome import Outcome, resolve_outcome


@pytest.fixture
def disk():
    try:
        with FailingDisk.install() as disk:
            yield disk
    except NoSQLiteLibraryError as error:
        pytest.skip(str(error))


@pytest.fixture
def path(txnstore_sqlite_url):
    return Path(txnstore_sqlite_url.removeprefix("sqlite:///"))


@pytest.fixture
def orders(disk, txnstore_sqlite_url, orders_of):
    """The topic in a file on a disk that fails when told to; with no second try, so that one fault is one error."""
    with open_store(txnstore_sqlite_url, limits=Limits(retry_timeout_ms=0)) as store:
        yield orders_of(store)
        disk.syncs_fail = disk.writes_fail = False


def assert_sound(path):
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 2 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk takes root")
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=False, capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.needs_root
@pytest.mark.parametrize(
    ("sizes", "stage"), [([20_000], "committing"), ([900_000] * 4, "running a statement")], ids=["small", "large"]
)
def test_a_full_disk_leaves_nothing_half_done_and_goes_on_when_there_is_room(small_disk, orders_of, sizes, stage):
    """A small batch fails when its COMMIT writes it; what is beyond SQLite's cache fails in an INSERT."""
    path = small_disk / "store.db"
    with open_store(f"sqlite:///{path}", limits=Limits(retry_timeout_ms=0)) as store:
        orders = orders_of(store)
        producer = TransactionCoordinator(store).init_producer_id(None).identity
        orders.append(orders.batch(b"a book", producer=producer))
        ballast = small_disk / "ballast"
        ballast.write_bytes(bytes(500_000))

        def write_until_it_fails():
            sequences = itertools.count(1)
            while True:
                values = [os.urandom(size) for size in sizes]
                orders.append(*[orders.batch(value, producer=producer, sequence=next(sequences)) for value in values])

        with pytest.raises(StoreFull, match=f"while {stage}") as refusal:
            write_until_it_fails()
        assert not refusal.value.outcome_unknown
        written = orders.next_offset()
        assert written == len(orders.values())
        ballast.unlink()
        (appended,) = orders.append(orders.batch(bytes(100_000), producer=producer, sequence=written))
        assert (appended.base_offset, appended.is_duplicate) == (written, False)
        assert len(orders.values()) == written + 1
        assert_sound(path)


def test_a_statement_after_the_database_has_rolled_back_by_itself_is_refused(orders):
    """It would be the first of a database transaction of its own, and commit alone."""
    refused = []

    def work(connection):
        append(connection, [orders.batch(b"a book")])
        (pages,) = connection.exec_driver_sql("PRAGMA page_count").one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(DBAPIError, match="full"):
            append(connection, [orders.batch(bytes(900_000))])
        with pytest.raises(TransactionPoisoned):
            append(connection, [orders.batch(b"a pen")])
        refused.append(True)

    with pytest.raises(TransactionPoisoned):
        orders.store.write(work)
    assert refused
    orders.store.engine.dispose()
    assert orders.values() == []
    assert orders.add(b"a pen")[0].base_offset == 0


def test_a_commit_that_could_not_be_made_durable_is_unknown_and_done_once_when_repeated(disk, orders, path):
    producer = TransactionCoordinator(orders.store).init_producer_id(None).identity
    batch = orders.batch(b"a book", producer=producer)
    with closing(orders.store.waiter()):
        disk.syncs_fail = True
        with pytest.raises(OutcomeUnknown):
            orders.append(batch)
        disk.syncs_fail = False
        orders.append(batch)
        assert orders.values() == [b"a book"]
    assert_sound(path)


def test_a_commit_that_could_not_be_written_is_unknown(disk, orders):
    disk.writes_fail = True
    with pytest.raises(OutcomeUnknown):
        orders.add(b"a book")


def test_every_connection_is_closed_after_an_unknown_outcome(disk, orders):
    disk.syncs_fail = True
    with pytest.raises(OutcomeUnknown):
        orders.add(b"a book")
    # Other tests of the run may have stores open on files of their own.
    path = str(orders.store.url.url.database)
    files = [connection.execute("PRAGMA database_list").fetchone()[2] for connection in sqlite_connections._open]
    assert path not in files


def test_an_error_of_the_disk_before_the_commit_is_not_done(disk, orders):
    def work(connection):
        append(connection, [orders.batch(b"a book")])
        disk.writes_fail = True
        # Beyond SQLite's cache, so that it is written at once.
        append(connection, [orders.batch(*[bytes(900_000)] * 1)] * 4)

    with pytest.raises(StoreUnavailable):
        orders.store.write(work)
    disk.writes_fail = False
    assert orders.values() == []


@pytest.mark.slow
def test_a_commit_that_nobody_could_see_can_come_back_from_the_dead(txnstore_sqlite_url, start_child, orders_of):
    """Why reading cannot resolve an unknown outcome: it was not there, and after a crash it is."""
    child = start_child("die_after_failed_sync", txnstore_sqlite_url, "")
    kind, producer_id, epoch = child.read().split()
    assert (kind, child.read()) == ("OutcomeUnknown", "0")
    assert child.end() == -signal.SIGKILL
    producer = ProducerIdentity(int(producer_id), int(epoch))
    with open_store(txnstore_sqlite_url) as store:
        assert orders_of(store).committed() == [b"a book"]
        assert resolve_outcome(store, "transfer", producer) is Outcome.COMMITTED
        assert orders_of(store).committed() == [b"a book"]


@pytest.mark.slow
def test_an_outcome_once_told_stands_whatever_comes_back_from_the_dead(txnstore_sqlite_url, start_child, orders_of):
    child = start_child("die_after_failed_sync", txnstore_sqlite_url, "resolve")
    kind, producer_id, epoch = child.read().split()
    assert (kind, child.read(), child.read()) == ("OutcomeUnknown", "0", "aborted")
    assert child.end() == -signal.SIGKILL
    with open_store(txnstore_sqlite_url) as store:
        producer = ProducerIdentity(int(producer_id), int(epoch))
        assert resolve_outcome(store, "transfer", producer) is Outcome.ABORTED
        assert orders_of(store).committed() == []


@pytest.mark.slow
def test_a_writer_who_does_not_let_go_makes_others_busy_for_a_bounded_time(
    txnstore_sqlite_url, path, start_child, orders_of, in_background
):
    with open_store(txnstore_sqlite_url) as store:
        orders = orders_of(store)
        child = start_child("hold_write_lock", path)
        assert child.read() == "locked"
        with pytest.raises(StoreBusy):
            orders.add(b"a book", retry_timeout_ms=50)
        # Readers do not mind, and whoever has time gets the lock in the end.
        assert orders.values() == []
        waiting = in_background(lambda: orders.add(b"a pen"))
        child.tell()
        assert child.read() == "unlocked"
        waiting.result()
        assert orders.values() == [b"a pen"]


class TestWithoutSharedMemory:
    """A disk without shared memory has no write-ahead log; there readers hold a COMMIT up, which is tried again."""

    @pytest.fixture
    def orders(self, disk, tmp_path, orders_of):
        disk.lacks_shared_memory = True
        with open_store(f"sqlite:///{tmp_path / 'old.db'}", limits=Limits(retry_timeout_ms=50)) as store:
            yield orders_of(store)

    @pytest.fixture
    def reader(self, orders, tmp_path):
        with closing(sqlite3.connect(tmp_path / "old.db", isolation_level=None, timeout=0)) as connection:
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
            connection.execute("BEGIN")
            connection.execute("SELECT count(*) FROM txnstore_topics").fetchone()
            yield connection

    def test_every_commit_waits_for_the_disk(self, orders):
        """The file itself is at risk, and clients may be on other machines; EXTRA, for a journal may come back."""
        limits = replace(orders.store.limits, waits_for_disk=False)
        ask = "PRAGMA synchronous"
        assert orders.store.write(lambda connection: connection.exec_driver_sql(ask).scalar_one(), limits=limits) == 3

    def test_a_commit_that_is_held_up_for_too_long_is_not_done(self, orders, reader):
        with pytest.raises(StoreBusy, match="committing"):
            orders.add(b"a book")
        reader.execute("ROLLBACK")
        assert orders.values() == []
        orders.add(b"a pen")
        assert orders.values() == [b"a pen"]

    def test_a_commit_that_is_held_up_for_a_moment_is_done_once(self, orders, reader, in_background, until):
        waiting = in_background(lambda: orders.add(b"a book", retry_timeout_ms=20_000))
        until(lambda: not can_read(reader))
        reader.execute("ROLLBACK")
        waiting.result()
        assert orders.values() == [b"a book"]


def can_read(connection):
    """Return whether a new reader is let in: not while a COMMIT waits for the old ones to leave."""
    (_, _, path) = connection.execute("PRAGMA database_list").fetchone()
    with closing(sqlite3.connect(path, timeout=0)) as other:
        try:
            other.execute("SELECT count(*) FROM txnstore_topics")
        except sqlite3.OperationalError:
            return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("folder_too", [False, True], ids=["file", "file and folder"])
def test_a_file_that_may_not_be_written_is_read_only(start_child, orders_of, folder_too):
    # Not in the test's own folder, which another user cannot enter.
    with tempfile.TemporaryDirectory(prefix="txnstore-read-only-") as folder:
        path = Path(folder, "store.db")
        with open_store(f"sqlite:///{path}") as store:
            orders_of(store).add(b"a book")
        path.chmod(stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
        Path(folder).chmod(0o555 if folder_too else 0o777)
        child = start_child("open_as_somebody_else", f"sqlite:///{path}")
        if not folder_too:
            assert child.read() == "opened"
        assert child.read() == "StoreReadOnly"
        assert child.end() == 0
        Path(folder).chmod(0o700)


@pytest.mark.slow_but_first
def test_what_a_killed_process_had_acknowledged_is_there_and_nothing_is_torn(
    txnstore_sqlite_url, path, start_child, orders_of
):
    rounds = 20
    child = start_child("commit_loops", txnstore_sqlite_url, rounds)
    acknowledged = []
    with open_store(txnstore_sqlite_url) as store:
        orders = orders_of(store)
        for number in range(rounds):
            word, pid = child.read().split()
            assert word == "pid"
            acknowledged += [int(child.read()) for _ in range(number % 7 + 1)]
            os.kill(int(pid), signal.SIGKILL)
            while (line := child.read()) != "killed":
                acknowledged.append(int(line))
            end = orders.next_offset()
            assert end % 2 == 0
            assert end >= acknowledged[-1] + 2
        values = orders.values()
        assert values == [b"left", b"right"] * (end // 2)
        # Each batch has an offset of its own, and none was given out twice.
        assert len(set(acknowledged)) == len(acknowledged)
    assert child.end() == 0
    assert_sound(path)

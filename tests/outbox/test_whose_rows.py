"""SQLite does not say whose a row is: rounds end where another caller's rows begin for sure, and never within one's.

They all need SQLite: PostgreSQL names its database transactions.
"""

from __future__ import annotations

import itertools
import os
import random
import sqlite3
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import NullPool, create_engine, select
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

from tests.outbox.conftest import plain_connection
from tests.outbox.steps import Caller, records, refusals, values, waiting
from txnstore import Outbox
from txnstore.db.opening import open_store
from txnstore.db.portions import Portions
from txnstore.db.schema import outbox as outbox_table
from txnstore.db.sqlite import committed_rows
from txnstore.db.sqlite import connections as sqlite_connections
from txnstore.db.sqlite.committed_rows import CommittedRows
from txnstore.db.store import Store
from txnstore.log.outbox import sequencer as outbox_sequencer
from txnstore.log.outbox.sequencer import OutboxPoller, Sequenced, drain_outbox, sequence_outbox
from txnstore.testing.invariants import assert_sound


@pytest.fixture
def url(txnstore_sqlite_url):
    return txnstore_sqlite_url


@pytest.fixture(autouse=True)
def looks_each_time(monkeypatch):
    """However quickly one caller comes after another."""
    monkeypatch.setattr(committed_rows, "LOOK_AGAIN_SECONDS", 0.0)


@pytest.fixture
def outbox(url):
    with Outbox(url, sequencer=False) as found:
        yield found


def rounds(store: Store, rows_max: int) -> list[int]:
    """Move everything in rounds of so many rows, and return how many each has moved; none has part of a caller's."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outbox_sequencer, "ROUND_ROWS_MAX", rows_max)
        while waiting(store):
            found.append(sequence_outbox(store).moved_count)
            assert found[-1]
            assert_whole(store)
    return found


def assert_whole(store: Store) -> None:
    """Each value says whose it is, which number it has there, and how many there are."""
    held = [tuple((value or b"").split()) for value in values(store)]
    totals = {whose: int(total) for whose, _, total in held}
    assert Counter(whose for whose, _, _ in held) == totals
    for whose in totals:
        numbers = [int(number) for of, number, _ in held if of == whose]
        assert numbers == sorted(numbers)


def value(whose: object, number: int, total: int) -> bytes:
    return f"{whose} {number} {total}".encode()


def produce(outbox: Outbox, connection: Any, whose: object, total: int) -> None:
    for number in range(total):
        outbox.produce(connection, "t", value(whose, number, total))


def committed_ids(store: Store) -> list[int | None]:
    ask = select(outbox_table.c.committed_id).order_by(outbox_table.c.outbox_id)
    return store.read(lambda connection: list(connection.execute(ask).scalars()))


# --- where a round ends -----------------------------------------------------------------------------------------------


def engine_of(url):
    """Return an engine whose connections end when they are closed: from Python 3.13 on one that does not is told of."""
    return create_engine(url, poolclass=NullPool)


def core(url):
    return engine_of(url).connect()


def orm(url):
    return Session(engine_of(url))


def by_relative_name(url):
    path = Path(str(make_url(url).database))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)
        connection = engine_of(f"sqlite:///{path.name}").connect()
        connection.exec_driver_sql("SELECT 1")
        connection.rollback()
    return connection


@pytest.mark.slow_but_first
@pytest.mark.parametrize("connect_as", [core, orm, by_relative_name, plain_connection])
def test_rounds_end_between_callers_with_whichever_connection(store, outbox, url, connect_as):
    with closing(connect_as(url)) as connection:
        for whose in range(9):
            produce(outbox, connection, whose, 10)
            connection.commit()
    assert rounds(store, 25) == [20, 20, 20, 20, 10]
    assert_sound(store, at_rest=True)


def test_a_caller_that_wrote_rows_of_its_own_first_is_told_apart_too(store, outbox, connect):
    """As all do: by then its database transaction is open."""
    connection = connect()
    connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    for whose in range(4):
        connection.execute("INSERT INTO orders DEFAULT VALUES")
        produce(outbox, connection, whose, 2)
        connection.commit()
    assert rounds(store, 1) == [2, 2, 2, 2]


def test_records_that_are_produced_together_stay_so(store, outbox, connect):
    connection = connect()
    for whose in range(3):
        for first in (0, 3):
            some = [{"topic": "t", "value": value(whose, number, 6)} for number in range(first, first + 3)]
            outbox.produce_all(connection, some)
        connection.commit()
    assert rounds(store, 8) == [6, 6, 6]


def test_one_with_more_rows_than_a_round_goes_as_a_whole_and_the_next_ones_alone(store, outbox, connect):
    connection = connect()
    for whose, total in enumerate([2, 40, 2, 2]):
        produce(outbox, connection, whose, total)
        connection.commit()
    assert rounds(store, 3) == [2, 40, 2, 2]


def test_rows_of_plain_sql_go_with_those_before_them_and_after_them_until_a_place_that_is_sure(store, outbox, connect):
    connection = connect()
    plain = Caller(connection)
    for whose in ("plain-1", "plain-2"):
        plain.insert(value(whose, 0, 2), value(whose, 1, 2)).commit()
    produce(outbox, connection, "produced", 2)
    connection.commit()
    plain.insert(value("plain-3", 0, 1)).commit()
    produce(outbox, connection, "last", 2)
    connection.commit()
    # Before each that was produced somebody had looked.
    assert rounds(store, 1) == [4, 3, 2]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("order", sorted(set(itertools.permutations(("plain", "plain", "produced", "produced")))))
def test_plain_sql_and_produce_in_one_database_transaction_are_not_torn_apart(store, outbox, connect, order):
    connection = connect()
    for whose in range(3):
        for number, how in enumerate(order):
            if how == "plain":
                Caller(connection).insert(value(whose, number, 4))
            else:
                outbox.produce(connection, "t", value(whose, number, 4))
        connection.commit()
    assert sum(rounds(store, 1)) == 12


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "rolled back"])
def test_a_savepoint_tears_nothing_apart(store, outbox, engine, kept):
    with engine.connect() as connection:
        # Otherwise sqlite3 begins at the first INSERT, within the savepoint.
        connection.exec_driver_sql("BEGIN")
        for whose in range(3):
            total = 4 if kept else 3
            outbox.produce(connection, "t", value(whose, 0, total))
            savepoint = connection.begin_nested()
            outbox.produce(connection, "t", value(whose, 1, total))
            savepoint.commit() if kept else savepoint.rollback()
            outbox.produce(connection, "t", value(whose, 2, total))
            outbox.produce(connection, "t", value(whose, 3, total))
            connection.commit()
            connection.exec_driver_sql("BEGIN")
    assert rounds(store, 1) == [4 if kept else 3] * 3


def test_several_outboxes_on_one_connection_are_one_caller(store, outbox, url, connect):
    connection = connect()
    with Outbox(url, sequencer=False) as other:
        for whose in range(3):
            for number, one in enumerate([outbox, other, outbox, other]):
                one.produce(connection, "t", value(whose, number, 4))
            connection.commit()
    assert rounds(store, 1) == [4, 4, 4]


def test_asynchronous_sqlalchemy_tells_its_callers_apart(store, outbox, url):
    pytest.importorskip("greenlet")
    pytest.importorskip("aiosqlite")
    import asyncio

    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    async def run():
        engine = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"))
        for whose in range(3):
            async with AsyncSession(engine) as session:
                for number in range(2):
                    await session.run_sync(outbox.produce, "t", value(whose, number, 2))
                await session.commit()
        await engine.dispose()

    asyncio.run(run())
    assert rounds(store, 1) == [2, 2, 2]


def test_a_refused_row_is_refused_alone_and_what_is_tried_again_goes_with_its_number(store, outbox, connect):
    connection = connect()
    for whose in range(3):
        outbox.produce(connection, "t", value(whose, 0, 1))
        outbox.produce(connection, "t", value(f"late-{whose}", 0, 1), partition=1)
        connection.commit()
    assert drain_outbox(store) == 3
    assert len(refusals(store)) == 3
    produce(outbox, connection, "new", 2)
    connection.commit()
    connection.execute("UPDATE txnstore_outbox SET refusal = NULL, partition_number = 0")
    connection.commit()
    assert rounds(store, 1) == [1, 1, 1, 2]
    assert values(store)[3:6] == [value(f"late-{whose}", 0, 1) for whose in range(3)]


# --- who looked, and when ---------------------------------------------------------------------------------------------


def test_who_commits_between_the_look_and_the_insert_makes_no_difference(store, outbox, connect, monkeypatch):
    """The first look of a caller was before it had the write lock, its second one after another has committed."""
    mine, others = connect(), Caller(connect())
    others.insert(value("before", 0, 1)).commit()
    look = CommittedRows.last_id

    def look_and_commit(self):
        found = look(self)
        monkeypatch.undo()
        others.insert(value("between", 0, 1)).commit()
        return found

    monkeypatch.setattr(CommittedRows, "last_id", look_and_commit)
    produce(outbox, mine, "mine", 2)
    mine.commit()
    assert committed_ids(store) == [None, None, 1, 2]
    # Where it was sure only of the first one, the second one goes with it.
    assert rounds(store, 1) == [4]


def test_a_number_that_was_seen_before_a_backup_was_put_back_is_no_sign(store, outbox, connect, monkeypatch):
    """Into the same file, after the look and before the caller has the write lock: numbers go back."""
    monkeypatch.setattr(CommittedRows, "last_id", lambda _: 1_000)
    connection = connect()
    for whose in range(3):
        produce(outbox, connection, whose, 3)
        connection.commit()
    assert committed_ids(store) == [1_000] * 9
    assert rounds(store, 1) == [9]


@pytest.mark.parametrize("seen", [2, 3, 4, 9])
def test_a_number_that_was_seen_elsewhere_tears_nothing_apart_that_was_produced_together(
    store, outbox, connect, monkeypatch, seen
):
    """Numbers go back, and rows that are inserted together come up to the one that was seen."""
    monkeypatch.setattr(CommittedRows, "last_id", lambda _: seen)
    connection = connect()
    for whose in range(2):
        some = [{"topic": "t", "value": value(whose, number, 5)} for number in range(5)]
        outbox.produce_all(connection, some)
        connection.commit()
    assert committed_ids(store) == [seen, *[None] * 4] * 2
    assert sum(rounds(store, 1)) == 10


@pytest.mark.parametrize("rows_max", [1, 2, 3])
def test_no_round_ends_before_a_row_that_saw_itself_or_a_later_one(store, connect, rows_max):
    connection = connect()
    Caller(connection).insert(value("one", 0, 1)).commit()
    caller = Caller(connection)
    for number in range(4):
        caller.insert(value("two", number, 4), committed_id=2 + number)
    caller.commit()
    Caller(connection).insert(value("three", 0, 1), committed_id=5).commit()
    assert rounds(store, rows_max) == [5, 1]


def test_a_row_that_was_taken_back_between_two_callers_changes_nothing(store, outbox, connect):
    connection = connect()
    for whose in range(3):
        outbox.produce(connection, "t", value(whose, 0, 2))
        outbox.produce(connection, "t", b"taken back")
        outbox.produce(connection, "t", value(whose, 1, 2))
        outbox.produce(connection, "t", b"taken back")
        connection.commit()
    connection.execute("DELETE FROM txnstore_outbox WHERE value = CAST('taken back' AS BLOB)")
    connection.commit()
    assert rounds(store, 1) == [2, 2, 2]


def test_a_rolled_back_number_that_is_given_out_again_is_no_sign(store, outbox, connect):
    connection = connect()
    for whose in range(3):
        produce(outbox, connection, "rolled back", 3)
        connection.rollback()
        produce(outbox, connection, whose, 2)
        connection.commit()
    assert rounds(store, 1) == [2, 2, 2]


def test_without_a_look_all_goes_together_as_with_plain_sql(store, outbox, connect, monkeypatch):
    monkeypatch.setattr(CommittedRows, "last_id", lambda _: None)
    connection = connect()
    for whose in range(5):
        produce(outbox, connection, whose, 2)
        connection.commit()
    assert rounds(store, 1) == [10]


def test_who_comes_in_the_same_moment_goes_with_the_one_before(store, outbox, connect, monkeypatch):
    monkeypatch.setattr(committed_rows, "LOOK_AGAIN_SECONDS", 3_600.0)
    connection = connect()
    for whose in range(3):
        produce(outbox, connection, whose, 2)
        connection.commit()
    monkeypatch.setattr(committed_rows, "LOOK_AGAIN_SECONDS", 0.0)
    produce(outbox, connection, "later", 2)
    connection.commit()
    assert rounds(store, 1) == [6, 2]


class OfAnotherLibrary:
    """A connection of another SQLite library, as pysqlite3's or sqlcipher's are."""

    def __init__(self, path: str) -> None:
        self._real = sqlite3.connect(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_beside_another_sqlite_library_nothing_is_opened_to_look(store, outbox, url, monkeypatch):
    """To close it would let go of the locks that the other one has on the file."""
    path = str(make_url(url).database)
    monkeypatch.setattr(CommittedRows, "last_id", lambda _: pytest.fail("it has looked"))
    engine = create_engine(url, creator=lambda: OfAnotherLibrary(path))
    for whose in range(2):
        with engine.begin() as connection:
            produce(outbox, connection, whose, 2)
    engine.dispose()
    assert committed_ids(store) == [None] * 4


@pytest.mark.parametrize("mode", ["DELETE", "WAL"])
def test_an_application_that_has_the_file_to_itself_produces_without_a_look(url, connect, mode):
    with open_store(url):
        pass
    connection = connect()
    connection.execute(f"PRAGMA journal_mode = {mode}")
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    with Outbox(url, sequencer=False) as outbox:
        for whose in range(2):
            produce(outbox, connection, whose, 2)
            connection.commit()
    connection.close()
    with open_store(url) as store:
        assert committed_ids(store) == [None] * 4
        assert rounds(store, 1) == [4]


def test_a_look_leaves_a_file_that_is_no_store_as_it_is(tmp_path):
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as shop:
        shop.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
        before = path.read_bytes()
        committed = CommittedRows(str(path))
        assert committed.last_id() is None
        assert path.read_bytes() == before
        assert CommittedRows(str(tmp_path / "none.db")).last_id() is None
        assert sorted(found.name for found in tmp_path.iterdir()) == ["shop.db"]


def test_of_a_file_that_was_replaced_the_new_one_is_looked_at(url, tmp_path):
    """As by a backup that was put in its place; the numbers of the other one say nothing here."""
    path = Path(str(make_url(url).database))
    with open_store(url), closing(plain_connection(url)) as connection:
        Caller(connection).insert(*[b"v"] * 5).commit()
    with closing(CommittedRows(str(path))) as committed:
        assert committed.last_id() == 5
        for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
            (path.parent / name).exists() and (path.parent / name).rename(tmp_path / f"old-{name}")
        assert committed.last_id() is None
        with open_store(url), closing(plain_connection(url)) as connection:
            Caller(connection).insert(b"v").commit()
            assert committed.last_id() == 1


def test_a_look_keeps_nothing_that_a_checkpoint_would_wait_for(url, store, connect):
    connection = connect()
    with closing(CommittedRows(str(make_url(url).database))) as committed:
        assert committed.last_id() is None
        Caller(connection).insert(b"v").commit()
        assert committed.last_id() == 1
        ((is_busy, log_frames, moved_frames),) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        assert (is_busy, log_frames, moved_frames) == (0, 0, 0)


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="nothing forks here")
def test_the_connection_that_looks_is_not_open_while_the_process_forks(url, store, connect):
    """The child would rely on its locks, and so would the parent's next one."""
    Caller(connect()).insert(b"v").commit()
    with closing(CommittedRows(str(make_url(url).database))) as committed:
        assert committed.last_id() == 1
        looking = committed._connection
        assert looking is not None
        try:
            sqlite_connections._before_fork()
            with pytest.raises(sqlite3.ProgrammingError):
                looking.execute("SELECT 1")
        finally:
            sqlite_connections.FORK_LOCK.release()
        assert committed.last_id() == 1


def test_two_threads_that_look_for_the_first_time_open_the_file_once(url, store, connect, monkeypatch):
    """The connection of one would be closed by nobody, and be open as the process forks."""
    Caller(connect()).insert(b"v").commit()
    opened: list[Any] = []
    both_open = threading.Barrier(2)

    def connect_slowly(*arguments, **options):
        opened.append(sqlite_connections.connect(*arguments, **options))
        with suppress(threading.BrokenBarrierError):
            both_open.wait(0.2)
        return opened[-1]

    monkeypatch.setattr(committed_rows, "connect", connect_slowly)
    with closing(CommittedRows(str(make_url(url).database))) as committed, ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda _: committed.last_id(), range(2))) == [1, 1]
    assert len(opened) == 1


# --- all of it at random ----------------------------------------------------------------------------------------------


class History:
    """Callers who come one after the other, each with a database transaction of its own kind."""

    def __init__(self, url: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.outboxes = [Outbox(url, sequencer=False) for _ in range(2)]
        self.connections = [plain_connection(url) for _ in range(3)]
        self.looks: list[int | None] = [None]

    def close(self) -> None:
        for found in (*self.outboxes, *self.connections):
            found.close()

    def look(self, real: Any, committed: CommittedRows) -> int | None:
        """Look now, or have looked before: what was known then is as true."""
        self.looks.append(real(committed))
        return self.random.choice([self.looks[-1], self.looks[-1], self.random.choice(self.looks)])

    def transact(self, whose: int) -> None:
        random_, connection = self.random, self.random.choice(self.connections)
        total = random_.choice([1, 2, 3, 5, 12])
        connection.execute(random_.choice(["BEGIN", "BEGIN IMMEDIATE"]))
        for number in range(total):
            if random_.random() < 0.2:
                connection.execute("SAVEPOINT s")
                self.insert(connection, value("ghost", 0, 99))
                connection.execute("ROLLBACK TO SAVEPOINT s")
                connection.execute("RELEASE SAVEPOINT s")
            self.insert(connection, value(whose, number, total))
        if random_.random() < 0.2:
            connection.rollback()
        else:
            connection.commit()

    def insert(self, connection: Any, content: bytes) -> None:
        if self.random.random() < 0.3:
            Caller(connection).insert(content)
        else:
            self.random.choice(self.outboxes).produce(connection, "t", content)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("seed", range(12))
def test_no_history_has_a_caller_torn_apart(store, url, monkeypatch, seed):
    history = History(url, seed)
    real = CommittedRows.last_id
    monkeypatch.setattr(CommittedRows, "last_id", lambda committed: history.look(real, committed))
    moved: list[int] = []
    with closing(history):
        for whose in range(40):
            history.transact(whose)
            if history.random.random() < 0.03:
                moved += rounds(store, history.random.choice([1, 4]))
    moved += rounds(store, history.random.choice([1, 2, 5]))
    assert len(moved) > 8
    ((*held,),) = records(store)
    numbers = [record.value for record in held]
    assert len(numbers) == sum(moved)
    assert_sound(store, at_rest=True)


# --- how long others wait ---------------------------------------------------------------------------------------------


def test_a_poller_makes_its_rounds_smaller_until_they_are_short(store, outbox, connect, monkeypatch):
    connection = connect()
    for whose in range(40):
        produce(outbox, connection, whose, 10)
        connection.commit()
    monkeypatch.setattr(outbox_sequencer, "ROUND_ROWS_LEAST", 20)
    seconds = itertools.count(0.0, 0.03)
    monkeypatch.setattr(outbox_sequencer, "Portions", lambda: Portions(monotonic_seconds=lambda: next(seconds)))
    monkeypatch.setattr(outbox_sequencer, "ROUND_ROWS_MAX", 160)
    poller, moved = OutboxPoller(store), [0]
    while waiting(store):
        assert poller.turn() >= 0.0
        moved.append(poller.moved_count)
        assert_whole(store)
    # Smaller than that it would take as long.
    assert [after - before for before, after in itertools.pairwise(moved)][:6] == [150, 70, 30, 10, 10, 10]


def test_who_has_little_time_makes_a_few_rounds_and_says_that_there_is_more(store, outbox, connect, monkeypatch):
    connection = connect()
    monkeypatch.setattr(outbox_sequencer, "ROUND_ROWS_LEAST", 20)
    for whose in range(8):
        produce(outbox, connection, whose, 10)
        connection.commit()
    seconds = iter(range(100))
    portions = Portions(seconds=4.5, monotonic_seconds=lambda: float(next(seconds)))
    moved_count = drain_outbox(store, portions)
    assert 0 < moved_count < 80
    assert portions.was_told_over
    assert_whole(store)
    with closing(plain_connection(store.url.url.render_as_string())) as writer:
        writer.execute("BEGIN IMMEDIATE")
        assert drain_outbox(store, Portions(seconds=5)) == 0
    assert drain_outbox(store) == 80 - moved_count


def test_between_two_rounds_others_are_let_go_first_and_after_the_last_one_nobody_is(
    store, outbox, connect, monkeypatch
):
    paused: list[float] = []
    monkeypatch.setattr("txnstore.db.portions.pause_after_portion", paused.append)
    monkeypatch.setattr(outbox_sequencer, "ROUND_ROWS_MAX", 3)
    connection = connect()
    produce(outbox, connection, "one", 2)
    connection.commit()
    assert sequence_outbox(store) == Sequenced(moved_count=2)
    assert paused == []
    for whose in ("two", "three"):
        produce(outbox, connection, whose, 2)
        connection.commit()
    assert sequence_outbox(store) == Sequenced(moved_count=2, has_more=True)
    assert len(paused) == 1

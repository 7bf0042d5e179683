"""A move that dies at any step goes on where it was; and never are there two stores that can be written to."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from sqlalchemy import Connection, Engine, event, insert

from tests.moving.histories import all_rows
from tests.moving.test_move import filled
from tests.tools.crashes import Crash, CrashPoint, When, crash_at, noting
from tests.tools.killed_children import kill_at
from txnstore.db.backend import Limits
from txnstore.db.closing import MoveState, read_move
from txnstore.db.opening import open_store
from txnstore.db.schema import outbox
from txnstore.db.store import Store
from txnstore.errors import StoreMoved, TxnStoreError
from txnstore.moving import pages as paging
from txnstore.moving.move import Moved, move
from txnstore.verification.verify import verify_store

pytestmark = pytest.mark.crashes

#: So many statements are between two deaths, which are on both sides of them by turns. Around each COMMIT there are
#: deaths of its own, and between two of them nothing is left that the first one has not left.
STRIDE = 13
#: More than it takes.
RUNS_MAX = 100


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch):
    monkeypatch.setattr(paging, "PAGE_ROWS_MAX", 4)


def open_here(url):
    return open_store(url, create=False, moving=True, pool_size=1, limits=Limits(retry_timeout_ms=2_000))


@dataclass
class Pair:
    """A source and a target, as the next process sees them."""

    urls: tuple[str, str]
    source: Store
    target: Store

    @classmethod
    def of(cls, urls):
        return cls(urls, *map(open_here, urls))

    def close(self):
        self.source.close()
        self.target.close()

    def move(self) -> Moved:
        return move(self.source, self.target)


def writable(store) -> bool:
    """Try to write, as a client that has had the store open for long."""

    class Tried(Exception):
        pass

    def try_it(connection):
        connection.execute(insert(outbox), {"topic": "tried"})
        raise Tried

    try:
        store.write(try_it)
    except Tried:
        return True
    except StoreMoved:
        return False
    raise AssertionError("neither")


def assert_one_lives(urls, before) -> bool:
    """Check that one of both at most takes writes, and that the one that does has all; return whether it is there."""
    with open_here(urls[0]) as source, open_here(urls[1]) as target:
        marks = source.read(read_move), target.read(read_move)
        lives_here = writable(source)
        # A target that nobody has begun to fill is as fresh as it was, and nobody's store yet.
        lives_there = writable(target) and target.store_uuid == source.store_uuid and bool(all_rows(target)["topics"])
        assert not (lives_here and lives_there), marks
        assert lives_here == (marks[0] is None)
        if lives_there:
            assert marks[0].state is MoveState.GONE
            assert all_rows(target) == before
        if lives_here:
            assert all_rows(source) == before
        return lives_there


def at_each_commit(run, sides) -> Iterator[None]:
    """Run the code again and again, each time to the first COMMIT of a write that it reaches, and let it die there.

    What is done is not done again, so each run comes one COMMIT further than the one before.
    """
    for side in itertools.islice(itertools.cycle(sides), RUNS_MAX):
        if not crash_at_first_commit(run, side):
            return
        yield
    raise AssertionError("it comes no further")


def crash_at_first_commit(run, side) -> bool:
    writing: set[Connection] = set()
    dead: list[CrashPoint] = []

    def arrive(connection, statement, when):
        if dead:
            raise Crash(dead[0])
        if statement.startswith("BEGIN"):
            (writing.add if "IMMEDIATE" in statement or "READ COMMITTED" in statement else writing.discard)(connection)
        elif statement == "COMMIT" and connection in writing and when is side:
            dead.append(CrashPoint(1, side, statement))
            connection.invalidate()
            raise Crash(dead[0])

    def before(connection, cursor, statement, *_):
        arrive(connection, statement, When.BEFORE)

    def after(connection, cursor, statement, *_):
        arrive(connection, statement, When.AFTER)

    event.listen(Engine, "before_cursor_execute", before)
    event.listen(Engine, "after_cursor_execute", after)
    try:
        run()
    except Crash:
        return True
    finally:
        event.remove(Engine, "before_cursor_execute", before)
        event.remove(Engine, "after_cursor_execute", after)
    return False


@pytest.mark.slow
@pytest.mark.slow_on_postgresql
def test_who_dies_before_or_after_any_commit_goes_on_and_loses_nothing(urls_across) -> None:
    filled(urls_across[0])
    with open_here(urls_across[0]) as source:
        before = all_rows(source)
    positions = []

    def run():
        pair = Pair.of(urls_across)
        try:
            pair.move()
        finally:
            pair.close()

    for number, _ in enumerate(at_each_commit(run, (When.BEFORE, When.AFTER))):
        with noting(number):
            assert_one_lives(urls_across, before)
        with open_here(urls_across[1]) as target:
            mark = target.read(read_move)
            positions.append(None if mark is None else mark.position)
    # Each second death comes one commit further, and what is copied is not copied again.
    told = [position for position, _ in itertools.groupby(positions[1::2]) if position is not None]
    assert len(told) == len(set(told)) >= 10
    assert assert_one_lives(urls_across, before)
    with open_here(urls_across[1]) as target:
        assert verify_store(target) == []


# A verification that dies has a cursor open on the server, which dies with its connection.
@pytest.mark.filterwarnings("ignore:<psycopg.ServerCursor:ResourceWarning")
@pytest.mark.slow
def test_who_dies_between_commits_goes_on_and_loses_nothing(urls_across) -> None:
    """Many a statement, later and later ones, on the same two stores: each death leaves what the next call finds."""
    filled(urls_across[0])
    with open_here(urls_across[0]) as source:
        before = all_rows(source)
    count = 0
    for step in itertools.count(1, STRIDE):
        pair = Pair.of(urls_across)
        crash = crash_at(step, When.AFTER if count % 2 else When.BEFORE, Pair.move, pair)
        pair.close()
        if crash is None:
            break
        count += 1
        gc.collect()
        with noting(crash):
            assert_one_lives(urls_across, before)
    assert count > 15
    assert assert_one_lives(urls_across, before)


def run_move(urls):
    paging.PAGE_ROWS_MAX = 4
    source, target = map(open_here, urls)
    with source, target:
        move(source, target)


@pytest.mark.slow
def test_a_process_that_is_killed_is_followed_by_one_that_goes_on(urls_across) -> None:
    filled(urls_across[0])
    with open_here(urls_across[0]) as source:
        before = all_rows(source)
    kills = 0
    for step in itertools.count(5, 2 * STRIDE + 1):
        if kill_at(step, When.AFTER if step % 2 else When.BEFORE, run_move, urls_across) is None:
            break
        kills += 1
        assert_one_lives(urls_across, before)
    assert kills > 5
    assert assert_one_lives(urls_across, before)


@pytest.mark.slow
@pytest.mark.slow_on_postgresql
def test_a_target_that_fails_in_the_middle_leaves_the_rest_for_the_next_call(urls_across) -> None:
    filled(urls_across[0])
    with open_here(urls_across[0]) as source:
        before = all_rows(source)
    pair = Pair.of(urls_across)
    failing = iter([False] * 6 + [True])

    def fail(connection, cursor, statement, *_):
        if "INSERT INTO" in statement and connection.engine is pair.target.engine and next(failing, False):
            raise OSError("the disk is full")

    event.listen(Engine, "before_cursor_execute", fail)
    try:
        with pytest.raises((OSError, TxnStoreError)):
            pair.move()
    finally:
        event.remove(Engine, "before_cursor_execute", fail)
    mark = pair.target.read(read_move)
    assert mark is not None
    assert mark.position not in {None, "", '["", [], 0, false, false]'}
    assert not assert_one_lives(urls_across, before)
    pair.move()
    pair.close()
    assert assert_one_lives(urls_across, before)

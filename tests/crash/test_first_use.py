"""The first user of an empty database dies at any step: the next one finds it empty still, or a whole store."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Connection

from tests.crash.children import use_first
from tests.crash.worlds import Progress
from tests.tools.crashes import CrashPoint, When, at_each_step, crash_at, every_crash, noting, steps_of
from tests.tools.killed_children import kill_at
from txnstore.db.opening import open_store
from txnstore.db.schema import metadata
from txnstore.errors import SchemaOutdated
from txnstore.log.topics import create_topic
from txnstore.testing.invariants import assert_sound
from txnstore.testing.postgres_server import PostgresServer


def is_whole(url: str) -> bool:
    """Return whether there is a store; False if there is nothing at all."""
    try:
        open_store(url, create=False).close()
    except SchemaOutdated:
        return False
    return True


def check_next_user(url: str) -> None:
    """Check that the next user has a store that works, and the one after him the same."""
    with open_store(url) as store:
        names = store.read(lambda connection: store.backend.table_names(connection, store.schema))
        assert names >= {table.name for table in metadata.tables.values()}
        store.write(lambda connection: create_topic(connection, "first"))
        assert_sound(store, at_rest=True)
    with open_store(url) as again:
        assert again.store_uuid == store.store_uuid


@pytest.mark.slow
def test_on_sqlite_a_crash_at_any_step_leaves_an_empty_file_or_a_whole_store(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'empty.db'}"
    progress = Progress()
    # The next first user comes to the very file that the one before him has left.
    for crash in every_crash(lambda: url, use_first, statements_are_all=True):
        progress.pass_(crash.point)
        with noting(crash):
            assert is_whole(url) == (progress.commits == 1)
        if progress.commits == 1:
            break
    progress.assert_complete(steps_min=40)
    check_next_user(url)


@pytest.mark.slow
def test_on_postgresql_nobody_sees_anything_of_a_first_use_before_its_commit(txnstore_postgres_server: PostgresServer):
    # What others see at a step is what a crash at that step leaves. Crashing at each of the hundreds of statements
    # would take a minute.
    name = "txnstore_test_first_use"
    txnstore_postgres_server.create_database(name)
    seen: list[tuple[CrashPoint, tuple[int, int]]] = []
    with txnstore_postgres_server.connect(name) as watcher:

        def watch(connection: Connection, point: CrashPoint) -> None:
            row = watcher.execute(
                "SELECT count(DISTINCT n.oid), count(c.oid) FROM pg_namespace n LEFT JOIN pg_class c"
                " ON c.relnamespace = n.oid AND c.relkind IN ('r', 'p') AND NOT c.relispartition"
                " WHERE n.nspname = 'txnstore'"
            ).fetchone()
            assert row is not None
            seen.append((point, (row[0], row[1])))

        with at_each_step(watch):
            use_first(txnstore_postgres_server.url(name))
    txnstore_postgres_server.drop_database(name)
    assert len(seen) > 200
    (*others, (last, found)) = seen
    # Alembic has a table of its own.
    assert (last.statement, last.when, found) == ("COMMIT", When.AFTER, (1, len(metadata.tables) + 1))
    assert {found for _, found in others} == {(0, 0)}


@pytest.mark.slow
@pytest.mark.slow_on_postgresql
def test_a_first_use_that_crashed_or_was_killed_around_its_commit_is_repeated_by_the_next_one(txnstore_empty_url: str):
    points = [point for point in steps_of(_use_elsewhere, txnstore_empty_url) if _is_at_an_end(point)]
    assert len(points) >= 4
    for point in points:
        is_last = point is points[-1]
        with noting(point):
            if not is_last:
                crash = crash_at(point.step, point.when, use_first, txnstore_empty_url)
                assert crash is not None
                assert crash.point == point
                assert not is_whole(txnstore_empty_url)
            assert kill_at(point.step, point.when, use_first, txnstore_empty_url) == point
            assert is_whole(txnstore_empty_url) == is_last
    check_next_user(txnstore_empty_url)


def _is_at_an_end(point: CrashPoint) -> bool:
    return point.statement.startswith(("BEGIN", "COMMIT"))


def _use_elsewhere(url: str) -> None:
    """Do the same in another schema, or another file."""
    open_store(f"{url}-elsewhere" if url.startswith("sqlite") else url, schema="elsewhere").close()

"""The segments of a PostgreSQL store are emptied as a whole, beside a snapshot that keeps every deleted row.

All of it is PostgreSQL's: SQLite has the deleted rows' pages at once (`test_vacuuming`).
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from sqlalchemy import func, select, update

from txnstore.db.opening import open_store
from txnstore.db.postgresql import rotation
from txnstore.db.postgresql.backend import connect_driver
from txnstore.db.postgresql.segments import SEGMENT_TABLES
from txnstore.db.schema import partition_heads, record_batches
from txnstore.db.store import Store
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.deleting import HIGH_WATERMARK, advance_log_start, delete_below_log_start, delete_records
from txnstore.log.partition_storage import count_stored
from txnstore.log.topics import create_topic
from txnstore.model import Record
from txnstore.testing.invariants import partition_violations
from txnstore.testing.postgres_server import connection_string
from txnstore.verification.reading import in_snapshots

#: What one batch takes, and how many make a segment that is due.
VALUE = b"x" * 50_000
BATCHES = 8
SEGMENT_BYTES = BATCHES * len(VALUE)
#: Notes what the commits go by that lead heads to another segment, or empty the first one.
SEE = """
CREATE TABLE public.seen (what text, setting text);
CREATE FUNCTION public.see() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO public.seen VALUES (TG_OP, pg_catalog.current_setting('synchronous_commit'));
  RETURN NULL;
END $$;
CREATE TRIGGER see AFTER UPDATE OF segment ON txnstore.partition_heads EXECUTE FUNCTION public.see();
CREATE TRIGGER see AFTER TRUNCATE ON txnstore.record_batches_1 EXECUTE FUNCTION public.see()
"""


@dataclass
class Rotating:
    """A store on PostgreSQL, a connection beside it, and time that passes when told."""

    store: Store
    beside: psycopg.Connection[Any]
    seconds: list[float]

    def topic(self, name: str) -> int:
        (partition_id,) = self.store.write(lambda connection: create_topic(connection, name)).partition_ids
        return partition_id

    def write(self, partition_id: int, count: int = BATCHES, value: bytes = VALUE) -> None:
        batch = encode([Record(value)])
        for _ in range(count):
            self.store.write(lambda connection: append(connection, [Append(partition_id, batch)]))

    def delete(self, partition_id: int, before_offset: int = HIGH_WATERMARK) -> None:
        delete_records(self.store, partition_id, before_offset)

    def look(self) -> None:
        """Look twice, the second time when what was empty has been so for long enough."""
        self.store.reclaim()
        self.seconds[0] += 16
        self.store.reclaim()

    def sizes(self) -> dict[int, int]:
        return {
            segment: self.beside.execute(f"SELECT pg_total_relation_size('txnstore.{name}')").fetchall()[0][0]
            for segment, name in enumerate(SEGMENT_TABLES)
        }

    def segment_of(self, partition_id: int) -> int:
        head = select(partition_heads.c.segment).where(partition_heads.c.partition_id == partition_id)
        segment: int = self.store.read(lambda connection: connection.execute(head).scalar_one())
        return segment

    def wait_until_blocked_by(self, holder: psycopg.Connection[Any]) -> None:
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))"
        until = time.monotonic() + 30
        while self.beside.execute(waiting, [holder.info.backend_pid]).fetchone() != (1,):
            assert time.monotonic() < until

    def offsets(self, partition_id: int) -> list[int]:
        offsets = select(record_batches.c.last_offset).where(record_batches.c.partition_id == partition_id)
        ordered = offsets.order_by(record_batches.c.last_offset)
        return list(self.store.read(lambda connection: connection.execute(ordered).scalars()))


@pytest.fixture
def rotating(txnstore_postgresql_url, monkeypatch):
    seconds = [1000.0]
    monkeypatch.setattr(rotation, "SEGMENT_BYTES_MIN", SEGMENT_BYTES)
    monkeypatch.setattr(rotation, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    with (
        open_store(txnstore_postgresql_url) as store,
        closing(psycopg.connect(connection_string(txnstore_postgresql_url), autocommit=True)) as beside,
    ):
        yield Rotating(store, beside, seconds)


@pytest.fixture
def snapshot(rotating, txnstore_postgresql_url):
    """Somebody's transaction that goes on, and has read nothing of the store."""
    with closing(psycopg.connect(connection_string(txnstore_postgresql_url), autocommit=True)) as connection:
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT 1 FROM pg_class LIMIT 1")
        yield connection


@pytest.mark.slow
def test_the_log_does_not_grow_beside_an_old_snapshot(rotating, snapshot):
    partition_id = rotating.topic("orders")
    totals = []
    for number in range(1, 13):
        rotating.write(partition_id)
        # One round is kept.
        rotating.delete(partition_id, (number - 1) * BATCHES)
        rotating.look()
        totals.append(sum(rotating.sizes().values()))
        assert rotating.offsets(partition_id) == list(range((number - 1) * BATCHES, number * BATCHES))
    assert max(totals) < 5 * SEGMENT_BYTES, totals
    # Each of them had its turn, and what was written since the snapshot does not fit into what there is.
    assert 2 * max(totals) < 12 * SEGMENT_BYTES
    assert rotating.segment_of(partition_id) in {1, 2, 3}


def test_appends_go_to_the_next_segment_once_one_is_large(rotating):
    partition_id, other_id = rotating.topic("orders"), rotating.topic("payments")
    rotating.write(partition_id, BATCHES // 2)
    rotating.look()
    assert [rotating.segment_of(each) for each in (partition_id, other_id)] == [1, 1]
    rotating.write(partition_id)
    rotating.look()
    assert [rotating.segment_of(each) for each in (partition_id, other_id)] == [2, 2]
    # A topic that is new begins in the first, and follows.
    new_id = rotating.topic("refunds")
    assert rotating.segment_of(new_id) == 1
    rotating.look()
    assert rotating.segment_of(new_id) == 2
    assert rotating.offsets(partition_id) == list(range(BATCHES + BATCHES // 2))


def test_what_somebody_has_not_committed_is_kept(rotating, txnstore_postgresql_url):
    partition_id, other_id = rotating.topic("orders"), rotating.topic("payments")
    rotating.write(partition_id)
    rotating.look()
    assert rotating.segment_of(partition_id) == 2
    rotating.delete(partition_id)
    # Whoever read the head before the rotation, and is slow.
    to_first = update(partition_heads).where(partition_heads.c.partition_id == other_id).values(segment=1)
    rotating.store.write(lambda connection: connection.execute(to_first))
    before = rotating.sizes()[1]
    with open_store(txnstore_postgresql_url) as slow:

        def write(connection):
            append(connection, [Append(other_id, encode([Record(b"late")]))])
            rotating.look()
            assert rotating.sizes()[1] == before

        slow.write(write)
    rotating.look()
    assert rotating.offsets(other_id) == [0]
    assert rotating.sizes()[1] == before
    rotating.delete(other_id)
    rotating.look()
    assert rotating.sizes()[1] < before // 4


def test_a_segment_that_somebody_has_read_is_not_waited_for(rotating, snapshot, caplog):
    partition_id = rotating.topic("orders")
    rotating.write(partition_id)
    rotating.look()
    snapshot.execute("COMMIT")
    snapshot.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    snapshot.execute("SELECT count(*) FROM txnstore.record_batches_1")
    rotating.delete(partition_id)
    before = rotating.sizes()[1]
    rotating.look()
    assert rotating.sizes()[1] == before
    # Nobody else waits behind it.
    rotating.write(partition_id)
    assert snapshot.execute("SELECT count(*) FROM txnstore.record_batches_1").fetchone() == (BATCHES,)
    snapshot.execute("COMMIT")
    with caplog.at_level(logging.INFO):
        rotating.look()
    assert rotating.sizes()[1] < before // 4
    (record,) = [record for record in caplog.records if getattr(record, "event", "") == "segment_emptied"]
    assert record.table == "txnstore.record_batches_1"
    assert record.freed_bytes > before // 2


def test_a_segment_is_left_for_a_while_once_it_is_empty(rotating, snapshot):
    partition_id = rotating.topic("orders")
    rotating.write(partition_id)
    rotating.look()
    rotating.delete(partition_id)
    before = rotating.sizes()[1]
    rotating.store.reclaim()
    rotating.seconds[0] += 14
    rotating.store.reclaim()
    assert rotating.sizes()[1] == before
    rotating.seconds[0] += 2
    rotating.store.reclaim()
    assert rotating.sizes()[1] < before // 4


def test_a_segment_that_was_written_to_meanwhile_is_left_for_as_long_again(rotating, snapshot):
    partition_id, other_id = rotating.topic("orders"), rotating.topic("payments")
    rotating.write(partition_id)
    rotating.look()
    rotating.delete(partition_id)
    rotating.store.reclaim()
    to_first = update(partition_heads).where(partition_heads.c.partition_id == other_id).values(segment=1)
    rotating.store.write(lambda connection: connection.execute(to_first))
    rotating.write(other_id, 1)
    rotating.seconds[0] += 8
    rotating.store.reclaim()
    rotating.delete(other_id)
    rotating.store.reclaim()
    before = rotating.sizes()[1]
    rotating.seconds[0] += 8
    rotating.store.reclaim()
    assert rotating.sizes()[1] == before
    rotating.seconds[0] += 8
    rotating.store.reclaim()
    assert rotating.sizes()[1] < before // 4


def test_what_came_and_went_between_two_looks_counts_too(rotating, snapshot):
    partition_id, _, late_id = (rotating.topic(name) for name in ("orders", "payments", "refunds"))
    rotating.write(partition_id)
    rotating.look()
    rotating.delete(partition_id)
    rotating.store.reclaim()
    to_first = update(partition_heads).where(partition_heads.c.partition_id == late_id).values(segment=1)
    rotating.store.write(lambda connection: connection.execute(to_first))
    rotating.write(late_id, 1)
    rotating.delete(late_id)
    before = rotating.sizes()[1]
    rotating.seconds[0] += 16
    rotating.store.reclaim()
    assert rotating.sizes()[1] == before
    rotating.look()
    assert rotating.sizes()[1] < before // 4


def test_a_segment_that_somebody_else_has_emptied_meanwhile_is_left_for_as_long_again(
    rotating, snapshot, txnstore_postgresql_url
):
    partition_id = rotating.topic("orders")
    rotating.write(partition_id)
    rotating.look()
    rotating.delete(partition_id)
    rotating.store.reclaim()
    with open_store(txnstore_postgresql_url) as other:
        other.reclaim()
        rotating.seconds[0] += 16
        other.reclaim()
        while rotating.segment_of(partition_id) != 1:
            rotating.write(partition_id)
            other.reclaim()
        rotating.delete(partition_id)
        other.reclaim()
        rotating.seconds[0] += 16
        other.reclaim()
        rotating.write(partition_id)
        other.reclaim()
    assert rotating.segment_of(partition_id) == 2
    rotating.delete(partition_id)
    before = rotating.sizes()[1]
    rotating.store.reclaim()
    assert rotating.sizes()[1] == before
    rotating.look()
    assert rotating.sizes()[1] < before // 4


def test_whoever_waits_with_a_snapshot_for_other_databases_has_opened_the_log(rotating, txnstore_postgresql_url):
    partition_id = rotating.topic("orders")
    rotating.write(partition_id)
    rotating.look()

    def count(connections):
        rotating.delete(partition_id)
        rotating.look()
        return connections[0].execute(select(func.count()).select_from(record_batches)).scalar_one()

    with open_store(txnstore_postgresql_url) as reading:
        assert in_snapshots([reading], count) == BATCHES
    assert rotating.offsets(partition_id) == []
    before = rotating.sizes()[1]
    rotating.look()
    assert rotating.sizes()[1] < before // 4


def test_no_lock_is_kept_until_a_standby_has_heard_of_it(rotating):
    partition_id = rotating.topic("orders")
    rotating.beside.execute(SEE)
    rotating.write(partition_id)
    rotating.look()
    rotating.delete(partition_id)
    rotating.look()
    seen = rotating.beside.execute("SELECT DISTINCT what, setting FROM public.seen ORDER BY what").fetchall()
    assert seen == [("TRUNCATE", "local"), ("UPDATE", "local")]


def test_a_look_that_takes_long_keeps_nobody_from_reading(rotating, snapshot, monkeypatch):
    monkeypatch.setattr(rotation, "_WAIT_MS", 30_000)
    monkeypatch.setattr(rotation, "_LOOK_MS", 30_000)
    partition_id = rotating.topic("orders")
    rotating.write(partition_id)
    rotating.look()
    rotating.delete(partition_id)
    snapshot.execute("COMMIT")
    snapshot.execute("BEGIN")
    with connect_driver(rotating.store.url) as connection, ThreadPoolExecutor(1) as threads:
        segments = rotation._Segments(connection, rotating.store.schema, rotation._Seen())
        snapshot.execute("LOCK TABLE txnstore.partition_heads IN ACCESS EXCLUSIVE MODE")
        emptying = threads.submit(segments._emptied, 1, 10**9)
        rotating.wait_until_blocked_by(snapshot)
        rotating.beside.execute("SET lock_timeout = 1000")
        assert rotating.beside.execute("SELECT count(*) FROM txnstore.record_batches_1").fetchone() == (0,)
        snapshot.execute("COMMIT")
        assert emptying.result(30) < SEGMENT_BYTES // 4


def test_a_head_that_somebody_keeps_follows_later(rotating, snapshot):
    partition_id, other_id = rotating.topic("orders"), rotating.topic("payments")
    rotating.write(partition_id)
    snapshot.execute("COMMIT")
    snapshot.execute("BEGIN")
    snapshot.execute("SELECT FROM txnstore.partition_heads WHERE partition_id = %s FOR UPDATE", [other_id])
    rotating.look()
    assert [rotating.segment_of(each) for each in (partition_id, other_id)] == [2, 1]
    snapshot.execute("COMMIT")
    rotating.look()
    assert [rotating.segment_of(each) for each in (partition_id, other_id)] == [2, 2]


def test_a_head_that_is_waited_for_follows_whatever_the_settings_of_the_role(
    rotating, snapshot, txnstore_postgresql_url, monkeypatch
):
    monkeypatch.setattr(rotation, "_HEAD_WAIT_MS", 30_000)
    partition_id = rotating.topic("orders")
    rotating.write(partition_id)
    snapshot.execute("COMMIT")
    snapshot.execute("BEGIN")
    snapshot.execute("UPDATE txnstore.partition_heads SET log_start_offset = 1")
    options = "options=-c%20default_transaction_isolation%3Dserializable"
    with open_store(f"{txnstore_postgresql_url}?{options}") as other, ThreadPoolExecutor(1) as threads:
        looking = threads.submit(other.reclaim)
        rotating.wait_until_blocked_by(snapshot)
        snapshot.execute("COMMIT")
        looking.result(30)
    assert rotating.segment_of(partition_id) == 2


def test_the_look_under_the_lock_passes_no_dead_rows(rotating, snapshot):
    partition_id = rotating.topic("orders")
    rotating.write(partition_id, 1, b"small")
    columns = [column.name for column in record_batches.c if column.name not in {"last_offset", "base_offset"}]
    names = ", ".join(columns)
    rotating.beside.execute(
        f"INSERT INTO txnstore.record_batches (last_offset, base_offset, {names})"
        f" SELECT number, number, {names} FROM txnstore.record_batches, generate_series(1, 5000) AS number"
    )
    rotating.beside.execute("UPDATE txnstore.partition_heads SET next_offset = 5001")
    rotating.delete(partition_id)
    pages = rotating.beside.execute("SELECT pg_relation_size('txnstore.record_batches_1') / 8192").fetchone()[0]
    assert pages > 80
    tables = {"heads": "partition_heads", "storage": "partition_storage", "segment": "record_batches_1"}
    look = rotation._IS_WANTED.format(**{name: f"txnstore.{table}" for name, table in tables.items()})
    with rotating.beside.transaction():
        rotating.beside.execute(rotation._BY_INDEX)
        ((plan,),) = rotating.beside.execute(
            f"EXPLAIN (ANALYZE, BUFFERS, TIMING off, FORMAT json) SELECT {look}"
        ).fetchall()
    passed = plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"]
    assert passed < 20, plan


def test_many_partitions_follow(rotating, monkeypatch):
    monkeypatch.setattr(rotation, "_HEADS", 3)
    ids = [rotating.topic(f"topic-{number}") for number in range(10)]
    rotating.write(ids[0])
    rotating.look()
    assert {rotating.segment_of(each) for each in ids} == {2}


@pytest.mark.slow
def test_a_partition_whose_batches_outlast_the_others_holds_no_segment_for_ever(rotating, snapshot):
    slow_id, fast_id = rotating.topic("audit"), rotating.topic("orders")
    totals = []
    for number in range(1, 21):
        if number <= 12:
            rotating.write(slow_id, 1, b"kept")
        rotating.write(fast_id)
        rotating.delete(fast_id, (number - 1) * BATCHES)
        rotating.look()
        totals.append(sum(rotating.sizes().values()))
    assert rotating.segment_of(slow_id) == 0
    assert rotating.segment_of(fast_id) in {1, 2, 3}
    assert rotating.offsets(slow_id) == list(range(12))
    # What it has left in the segments goes in its time; the others have their turns then.
    last = max(number for number in range(12) if rotating.segment_of(slow_id) == 0)
    rotating.delete(slow_id, last)
    for number in range(21, 33):
        rotating.write(fast_id)
        rotating.delete(fast_id, (number - 1) * BATCHES)
        rotating.look()
    assert sum(rotating.sizes().values()) < 5 * SEGMENT_BYTES
    assert rotating.offsets(slow_id) == list(range(last, 12))


def test_partitions_that_hold_much_of_what_is_stored_are_not_taken_for_lasting(rotating):
    ids = [rotating.topic(name) for name in ("orders", "payments")]
    for _ in range(12):
        for each in ids:
            rotating.write(each, 2)
        rotating.look()
    assert {rotating.segment_of(each) for each in ids} <= {1, 2, 3}
    assert all(rotating.offsets(each) == list(range(24)) for each in ids)


def test_a_segment_whose_index_by_time_somebody_has_dropped_is_emptied_too(rotating):
    partition_id = rotating.topic("orders")
    rotating.beside.execute("DROP INDEX txnstore.record_batches_1_time")
    rotating.write(partition_id)
    rotating.look()
    rotating.delete(partition_id)
    before = rotating.sizes()[1]
    rotating.look()
    assert rotating.sizes()[1] < before // 4


def test_segments_that_no_partition_is_led_to_are_emptied(rotating, snapshot):
    partition_id = rotating.topic("orders")
    rotating.write(partition_id)
    to_lasting = update(partition_heads).values(segment=0)
    rotating.store.write(lambda connection: connection.execute(to_lasting))
    rotating.delete(partition_id)
    before = rotating.sizes()[1]
    rotating.look()
    assert rotating.sizes()[1] < before // 4
    rotating.write(partition_id, 1)
    assert (rotating.segment_of(partition_id), rotating.offsets(partition_id)) == (0, [BATCHES])


def test_who_does_not_own_the_segments_leaves_them_alone_and_says_so_once(
    txnstore_postgres_server, rotating, new_role, granted, caplog
):
    caplog.set_level("INFO")
    partition_id = rotating.topic("orders")
    rotating.write(partition_id)
    name, role = rotating.beside.info.dbname, new_role()
    granted(name, role, "GRANT USAGE ON SCHEMA txnstore TO {role}")
    granted(name, role, "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA txnstore TO {role}")
    with open_store(txnstore_postgres_server.url(name, role, "secret")) as stranger:
        stranger.reclaim()
        stranger.reclaim()
    assert [record.event for record in caplog.records if "another role's" in record.getMessage()] == ["room_left"]
    assert rotating.segment_of(partition_id) == 1
    caplog.clear()
    rotating.look()
    assert "another role's" not in caplog.text
    assert rotating.segment_of(partition_id) == 2
    granted(name, role, "DROP OWNED BY {role}")


def test_all_segments_belong_to_the_table_and_have_its_key(rotating):
    keys = rotating.beside.execute(
        "SELECT c.relname, pg_get_constraintdef(k.oid) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid"
        " JOIN pg_constraint k ON k.conrelid = c.oid AND k.contype = 'p'"
        " WHERE i.inhparent = 'txnstore.record_batches'::regclass ORDER BY 1"
    ).fetchall()
    assert keys == [(f"record_batches_{number}", "PRIMARY KEY (partition_id, last_offset)") for number in range(4)]


def test_what_came_since_the_look_is_kept(rotating):
    partition_id = rotating.topic("orders")
    rotating.write(partition_id)
    with connect_driver(rotating.store.url) as connection:
        segments = rotation._Segments(connection, rotating.store.schema, rotation._Seen())
        assert segments._emptied(1, 10**9) > SEGMENT_BYTES
        assert rotating.offsets(partition_id) == list(range(BATCHES))
        # The last batch ends where the log starts.
        rotating.delete(partition_id, BATCHES - 1)
        segments._emptied(1, 10**9)
        assert rotating.offsets(partition_id) == [BATCHES - 1]
        # Whoever has not committed yet is not waited for.
        rotating.delete(partition_id)
        rotating.beside.execute("BEGIN")
        rotating.beside.execute("LOCK TABLE txnstore.record_batches_1 IN ROW EXCLUSIVE MODE")
        assert segments._emptied(1, 10**9) == 10**9
        rotating.beside.execute("COMMIT")
        assert segments._emptied(1, 10**9) < SEGMENT_BYTES // 4


def test_what_waits_to_be_deleted_is_kept_until_it_is_taken_off_the_counted_size(rotating):
    partition_id = rotating.topic("orders")
    rotating.write(partition_id)
    assert count_stored(rotating.store, partition_id)
    rotating.store.write(lambda connection: advance_log_start(connection, partition_id, BATCHES))
    with connect_driver(rotating.store.url) as connection:
        segments = rotation._Segments(connection, rotating.store.schema, rotation._Seen())
        assert segments._emptied(1, 10**9) > SEGMENT_BYTES
        assert delete_below_log_start(rotating.store, partition_id) == BATCHES
        assert segments._emptied(1, 10**9) < SEGMENT_BYTES // 4
    assert rotating.store.read(lambda connection: list(partition_violations(connection, partition_id))) == []

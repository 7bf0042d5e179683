"""Deleting the oldest records of a partition: what stays readable, and what stays stored."""

from __future__ import annotations

import itertools

import pytest
from sqlalchemy import select

from tests.clients.consumer.log_writer import LogWriter
from txnstore.db.portions import Portions
from txnstore.db.schema import record_batches
from txnstore.errors import OffsetOutOfRange, StoreReadOnly, UnknownTopicOrPartition
from txnstore.log import deleting
from txnstore.log.bounds import read_bounds
from txnstore.log.deleting import HIGH_WATERMARK, advance_log_start, delete_below_log_start, delete_records
from txnstore.log.fetch import fetch
from txnstore.model import IsolationLevel
from txnstore.testing.invariants import assert_sound, partition_violations

COMMITTED, UNCOMMITTED = IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED


_numbers = itertools.count(1)


class Log(LogWriter):
    """A topic of two partitions, of this test alone."""

    def __init__(self, store):
        super().__init__(store)
        self.topic_name = f"deleting-{next(_numbers)}"
        self.topic(self.topic_name, 2)


@pytest.fixture
def log(shared_store):
    return Log(shared_store)


def assert_partition_sound(log, partition_id):
    assert log.store.read(lambda connection: partition_violations(connection, partition_id)) == []


@pytest.fixture
def partition_id(log):
    return log.partition_id(log.topic_name, 0)


def bounds_of(log, partition_id):
    bounds = log.store.read(lambda connection: read_bounds(connection, [partition_id]))[partition_id]
    return bounds.log_start_offset, bounds.last_stable_offset, bounds.high_watermark


def stored(log, partition_id):
    """Return the first offsets of the batches that are stored."""
    statement = select(record_batches.c.base_offset).where(record_batches.c.partition_id == partition_id)
    return sorted(log.store.read(lambda connection: connection.execute(statement).scalars().all()))


def readable(log, partition_id, isolation=COMMITTED):
    """Return the values from the log start on."""
    start = bounds_of(log, partition_id)[0]
    page = log.store.read(lambda connection: fetch(connection, {partition_id: start}, isolation=isolation))
    return [record.value for batch in page[partition_id].batches for record in batch.records(start)]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("offset", "start", "batches", "values"),
    [
        (0, 0, [0, 2, 4], [b"a", b"b", b"c", b"d", b"e"]),
        (1, 1, [0, 2, 4], [b"b", b"c", b"d", b"e"]),
        (2, 2, [2, 4], [b"c", b"d", b"e"]),
        (3, 3, [2, 4], [b"d", b"e"]),
        (4, 4, [4], [b"e"]),
        (5, 5, [], []),
        (HIGH_WATERMARK, 5, [], []),
    ],
)
def test_what_lies_below_is_gone_and_whole_batches_are_not_stored_any_more(
    log, partition_id, offset, start, batches, values
):
    log.write(log.topic_name, 0, b"a", b"b")
    log.write(log.topic_name, 0, b"c", b"d")
    log.write(log.topic_name, 0, b"e")
    log.write(log.topic_name, 1, b"other")
    assert delete_records(log.store, partition_id, offset) == start
    assert bounds_of(log, partition_id) == (start, 5, 5)
    assert stored(log, partition_id) == batches
    assert readable(log, partition_id) == values
    assert readable(log, log.partition_id(log.topic_name, 1)) == [b"other"]
    assert_partition_sound(log, partition_id)


def test_the_log_goes_on_where_it_was(log, partition_id):
    log.write(log.topic_name, 0, b"a", b"b")
    assert delete_records(log.store, partition_id, HIGH_WATERMARK) == 2
    log.write(log.topic_name, 0, b"c")
    assert bounds_of(log, partition_id) == (2, 3, 3)
    assert readable(log, partition_id) == [b"c"]
    assert_partition_sound(log, partition_id)


def test_what_was_deleted_stays_deleted(log, partition_id):
    log.write(log.topic_name, 0, b"a", b"b", b"c")
    assert delete_records(log.store, partition_id, 2) == 2
    assert delete_records(log.store, partition_id, 1) == 2
    assert delete_records(log.store, partition_id, 2) == 2
    assert bounds_of(log, partition_id)[0] == 2
    assert delete_records(log.store, log.partition_id(log.topic_name, 1), HIGH_WATERMARK) == 0


@pytest.mark.parametrize("offset", [4, -2, -1001, 2**63 - 1, -(2**63)])
def test_an_offset_that_is_none_of_the_log_is_refused(log, partition_id, offset):
    log.write(log.topic_name, 0, b"a", b"b", b"c")
    with pytest.raises(OffsetOutOfRange, match="up to the high watermark, 3"):
        delete_records(log.store, partition_id, offset)
    assert bounds_of(log, partition_id) == (0, 3, 3)
    assert stored(log, partition_id) == [0]


def test_an_unknown_partition_is_refused(log):
    with pytest.raises(UnknownTopicOrPartition):
        delete_records(log.store, 999_999, 0)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("offset", [1, 2, 3, 4, HIGH_WATERMARK])
def test_an_open_transaction_goes_on_when_its_first_records_are_deleted(log, partition_id, offset, commit):
    log.write(log.topic_name, 0, b"a")
    transaction = log.transaction()
    transaction.write(log.topic_name, 0, b"b", b"c")
    log.write(log.topic_name, 0, b"d")
    start = delete_records(log.store, partition_id, offset)
    assert bounds_of(log, partition_id) == (start, start, 4)
    assert readable(log, partition_id) == []
    assert readable(log, partition_id, UNCOMMITTED) == [b"b", b"c", b"d"][start - 1 :]
    assert_partition_sound(log, partition_id)
    transaction.write(log.topic_name, 0, b"e")
    transaction.end(commit=commit)
    assert bounds_of(log, partition_id) == (start, 6, 6)
    expected = [b"b", b"c", b"d", b"e"] if commit else [b"d"]
    assert readable(log, partition_id) == [value for value in expected if ord(value) - ord("a") >= start]
    assert_partition_sound(log, partition_id)


def test_finished_transactions_are_read_right_from_the_middle(log, partition_id):
    committed, aborted = log.transaction(), log.transaction()
    for value in (b"0", b"2", b"4"):
        committed.write(log.topic_name, 0, value)
        aborted.write(log.topic_name, 0, b"no")
    committed.end(commit=True)
    aborted.end(commit=False)
    log.write(log.topic_name, 0, b"8")
    for start, values in [(1, [b"2", b"4", b"8"]), (5, [b"8"]), (7, [b"8"]), (9, [])]:
        assert delete_records(log.store, partition_id, start) == start
        assert readable(log, partition_id) == values
        assert_partition_sound(log, partition_id)


def test_a_producer_goes_on_after_its_records_are_deleted(log, partition_id):
    transaction = log.transaction()
    transaction.write(log.topic_name, 0, b"a")
    delete_records(log.store, partition_id, HIGH_WATERMARK)
    # The very next sequence number, of a batch whose predecessor is deleted.
    transaction.write(log.topic_name, 0, b"b")
    assert_partition_sound(log, partition_id)
    transaction.end(commit=True)
    assert readable(log, partition_id) == [b"b"]
    assert_partition_sound(log, partition_id)


def test_batches_are_deleted_in_portions(log, partition_id, monkeypatch):
    for number in range(7):
        log.write(log.topic_name, 0, b"%d" % number)
    log.store.write(lambda connection: advance_log_start(connection, partition_id, 6))
    assert stored(log, partition_id) == list(range(7))
    assert readable(log, partition_id) == [b"6"]
    assert_partition_sound(log, partition_id)
    portions, taken = Portions(), []
    portions.rows = 2
    monkeypatch.setattr(portions, "_adapt", lambda _: None)
    delete_portion = deleting._delete_portion

    def note(*arguments):
        taken.append(delete_portion(*arguments))
        return taken[-1]

    monkeypatch.setattr(deleting, "_delete_portion", note)
    assert delete_below_log_start(log.store, partition_id, portions) == 6
    assert taken == [2, 2, 2, 0]
    assert stored(log, partition_id) == [6]
    assert delete_below_log_start(log.store, partition_id) == 0
    # A portion that is full of few large ones ends there, too.
    portions.rows, portions.size_bytes = 10, 1
    for number in range(2):
        log.write(log.topic_name, 0, b"%d" % number)
    log.store.write(lambda connection: advance_log_start(connection, partition_id, 9))
    taken.clear()
    assert delete_below_log_start(log.store, partition_id, portions) == 3
    assert taken == [1, 1, 1, 0]


def test_rows_that_could_not_be_deleted_are_taken_by_the_next_deletion(log, partition_id, monkeypatch):
    log.write(log.topic_name, 0, b"a")
    log.write(log.topic_name, 0, b"b")

    def refuse(*_):
        raise StoreReadOnly

    monkeypatch.setattr(deleting, "_delete_portion", refuse)
    assert delete_records(log.store, partition_id, 1) == 1
    assert stored(log, partition_id) == [0, 1]
    monkeypatch.undo()
    assert delete_records(log.store, partition_id, 0) == 1
    assert stored(log, partition_id) == [1]


def test_invariants_notice_a_hole_and_a_missing_end_behind_what_was_deleted(store):
    log = Log(store)
    partition_id = log.partition_id(log.topic_name, 0)
    for value in (b"a", b"b", b"c"):
        log.write(log.topic_name, 0, value)
    delete_records(store, partition_id, 1)
    assert_sound(store)
    for offset in (1, 2):
        gone = record_batches.delete().where(record_batches.c.base_offset == offset)
        store.write(lambda connection, gone=gone: connection.execute(gone))
        with pytest.raises(AssertionError, match="OFFSETS_FOLLOW"):
            assert_sound(store)
    assert stored(log, partition_id) == []

"""The compaction: which records stay, which go and when, and that readers, producers and sizes are right afterwards."""

from __future__ import annotations

import json
import threading
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import text, update

from tests.log.compacted_log import CompactedLog, Transaction
from tests.tools.campaigns import times
from txnstore import Consumer, KafkaError, Producer, TopicPartition
from txnstore.config import TOPIC_SETTINGS, settings_in_force
from txnstore.db import portions as portions_module
from txnstore.db.portions import Portions
from txnstore.db.schema import finished_transactions, partition_storage, record_batches
from txnstore.errors import CorruptBatch
from txnstore.log import compaction
from txnstore.log import partition_storage as storage_module
from txnstore.log.append import Append, append
from txnstore.log.bounds import OffsetAndTimestamp, offset_for_time, offset_of_max_timestamp, read_bounds
from txnstore.log.codec import encode
from txnstore.log.columns import Codec
from txnstore.log.compaction import compact_portion
from txnstore.log.deleting import delete_records
from txnstore.log.fetch import fetch
from txnstore.log.partition_storage import count_stored, next_horizons
from txnstore.log.retention import delete_expired_batches
from txnstore.log.topics import delete_topic
from txnstore.model import IsolationLevel, ProducerIdentity, Record
from txnstore.testing.invariants import partition_violations

DAY_MS = 86_400_000


@pytest.fixture
def log(store, clock):
    return CompactedLog(store, clock)


def test_the_newest_record_of_each_key_stays_at_its_offset(log):
    log.put((b"a", b"1"), (b"b", b"1"), (b"a", b"2"))
    log.put((b"c", b"1"), (b"b", b"2"))
    log.put((b"d", b"1"))
    log.put((b"d", b"2"))
    assert log.run() == 2
    assert log.read() == [(2, b"a", b"2"), (3, b"c", b"1"), (4, b"b", b"2"), (6, b"d", b"2")]
    log.assert_storage_is_true()
    assert log.run() == 0
    log.put((b"c", b"2"))
    # The batch of b stays, with one record.
    assert log.run() == 1
    assert log.read() == [(2, b"a", b"2"), (4, b"b", b"2"), (6, b"d", b"2"), (7, b"c", b"2")]
    log.assert_storage_is_true()
    # Nothing gives an offset out twice.
    assert log.put((b"e", b"1")) == 8


def test_only_topics_whose_policy_says_so_are_compacted(log):
    log.configure(cleanup_policy="delete")
    log.put((b"a", b"1"), (b"a", b"2"))
    assert log.run() == 0
    log.configure(cleanup_policy="compact,delete", retention_ms=10)
    assert log.run() == 1
    assert log.read() == [(1, b"a", b"2")]
    log.clock.advance(11)
    assert delete_expired_batches(log.store, batches_max=10) == 1
    assert log.rows(record_batches) == []
    log.assert_storage_is_true()


def test_what_else_a_record_has_stays(log, clock):
    clock.advance(5)
    rows = [
        Record(b"1", key=b"a", timestamp_ms=clock.now_ms() - 3, headers=[("h", b"x")]),
        Record(b"2", key=b"b", timestamp_ms=clock.now_ms() - 4),
        Record(b"3", key=b"c", timestamp_ms=clock.now_ms() - 1, headers=[("h", None), ("i", b"")]),
        Record(b"", key=b"", timestamp_ms=clock.now_ms() - 2),
    ]
    batch = encode(rows, codec=Codec.GZIP, producer=ProducerIdentity(70_001, 3), base_sequence=17)
    log.store.write(lambda c: append(c, [Append(log.partition, batch)]))
    log.put((b"b", b"4"))
    before = {r.offset: r for r in _records(log)}
    assert log.run() == 1
    assert {r.offset: r for r in _records(log)} == {at: before[at] for at in (0, 2, 3, 4)}
    row = log.rows(record_batches)[0]
    assert (row.producer_id, row.producer_epoch, row.base_sequence, row.codec) == (70_001, 3, 17, int(Codec.GZIP))
    assert (row.base_offset, row.last_offset, row.record_count) == (0, 3, 3)
    # The first record with a timestamp, which need not be the first of its batch.
    found = [
        log.store.read(lambda c, at=at: offset_for_time(c, log.partition, at, IsolationLevel.READ_COMMITTED))
        for at in range(clock.now_ms() - 5, clock.now_ms() + 2)
    ]
    assert [each and each.offset for each in found] == [0, 0, 0, 2, 2, 4, None]


def _records(log):
    page = log.store.read(lambda c: fetch(c, {log.partition: 0}))[log.partition]
    return [record for batch in page.batches for record in batch.records()]


def test_the_view_of_records_shows_what_a_reader_gets(log):
    log.put((b"a", b"1"), (b"b", b"1"), (b"c", None), (b"a", b"2"))
    log.put((b"b", b"3"), (b"x", b"1"))
    log.commit((b"x", b"2"))
    log.run()
    view = "records" if log.store.backend.name == "postgresql" else "txnstore_records"
    schema = f'"{log.store.schema}".' if log.store.backend.name == "postgresql" else ""
    shown = text(f'SELECT "offset", key, value FROM {schema}{view} WHERE topic = :topic ORDER BY "offset"')
    rows = log.store.read(lambda c: c.execute(shown, {"topic": log.name}).all())
    assert [tuple(row) for row in rows] == log.read()


def test_aborted_records_go_and_make_no_other_go(log):
    log.put((b"a", b"1"))
    transaction = log.begin()
    transaction.put((b"a", b"aborted"), (b"b", b"aborted"))
    transaction.end(commit=False)
    assert log.run() == 1
    assert log.read(IsolationLevel.READ_UNCOMMITTED) == [(0, b"a", b"1")]
    log.assert_storage_is_true()


def test_nothing_at_or_past_the_last_stable_offset_is_touched_or_counts(log):
    log.put((b"a", b"1"), (b"b", b"1"))
    slow = log.begin()
    slow.put((b"a", b"open"))
    log.put((b"b", b"2"), (b"b", b"3"))
    assert log.run() == 0
    assert [value for _, _, value in log.read(IsolationLevel.READ_UNCOMMITTED)] == [b"1", b"1", b"open", b"2", b"3"]
    slow.end(commit=True)
    assert log.run() == 2
    assert log.read() == [(2, b"a", b"open"), (4, b"b", b"3")]
    log.assert_storage_is_true()


def test_a_tombstone_stays_for_delete_retention_ms_after_the_pass_that_made_it_the_newest(log, clock):
    log.configure(delete_retention_ms=1_000)
    log.put((b"a", b"1"), (b"b", b"1"))
    log.put((b"a", None), (b"b", b"2"))
    clock.advance(5_000)
    assert log.run() == 1
    assert log.read() == [(2, b"a", None), (3, b"b", b"2")]
    clock.advance(999)
    assert log.run() == 0
    clock.advance(1)
    assert log.run() == 1
    assert log.read() == [(3, b"b", b"2")]
    clock.advance(DAY_MS)
    assert log.run() == 0
    log.assert_storage_is_true()
    # A key that comes again is a key like any other, and the first tombstone behind those that go stays.
    log.put((b"b", None), (b"a", b"new"))
    log.run()
    assert log.read() == [(4, b"b", None), (5, b"a", b"new")]


def test_a_tombstone_that_is_not_the_newest_goes_at_once(log):
    log.put((b"a", None), (b"a", b"1"))
    log.run()
    assert log.read() == [(1, b"a", b"1")]


def test_a_marker_goes_with_its_row_once_its_transaction_has_no_record_left_and_its_time_is_up(log, clock):
    log.configure(delete_retention_ms=1_000)
    log.commit((b"a", b"1"))
    log.commit((b"a", b"2"), (b"b", b"1"))
    aborted = log.begin()
    aborted.put((b"a", b"x"))
    aborted.end(commit=False)
    assert log.run() == 2
    assert [row.last_offset for row in log.rows(record_batches)] == [1, 3, 4, 6]
    clock.advance(1_000)
    # The first's and the aborted one's go; the second's stays as long as its records.
    assert log.run() == 2
    assert [row.last_offset for row in log.rows(record_batches)] == [3, 4]
    assert [row.marker_offset for row in log.rows(finished_transactions)] == [4]
    # Nobody looks at it again before something comes.
    clock.advance(DAY_MS)
    assert list(compaction._passes(log.store, Portions())) == []
    log.put((b"a", b"3"), (b"b", b"3"))
    assert log.run() == 2
    assert [row.last_offset for row in log.rows(record_batches)] == [6 + 2]
    assert log.rows(finished_transactions) == []
    assert log.read() == [(7, b"a", b"3"), (8, b"b", b"3")]
    log.assert_storage_is_true()


def test_records_younger_than_min_compaction_lag_ms_stay(log, clock):
    log.configure(min_compaction_lag_ms=1_000)
    log.put((b"a", b"1"))
    log.put((b"a", b"2"))
    clock.advance(500)
    log.put((b"a", b"3"))
    assert log.run() == 0
    clock.advance(500)
    assert log.run() == 1
    assert [value for _, _, value in log.read()] == [b"2", b"3"]
    clock.advance(500)
    assert log.run() == 1
    assert [value for _, _, value in log.read()] == [b"3"]
    log.assert_storage_is_true()


def test_a_young_marker_holds_back_what_is_behind_it_however_old_that_is_said_to_be(log, clock):
    log.configure(min_compaction_lag_ms=1_000)
    slow = log.begin()
    slow.put((b"a", b"1"))
    log.put((b"a", b"2"))
    late = log.encoded((b"a", b"3"))
    clock.advance(2_000)
    slow.end(commit=True)
    log.store.write(lambda c: append(c, [Append(log.partition, late)]))
    assert log.run() == 1
    assert [value for _, _, value in log.read()] == [b"2", b"3"]
    clock.advance(1_000)
    assert log.run() == 1
    assert [value for _, _, value in log.read()] == [b"3"]


def test_an_open_transaction_holds_back_what_is_old_enough_too(log, clock):
    log.configure(min_compaction_lag_ms=1_000)
    log.put((b"a", b"1"))
    slow = log.begin()
    slow.put((b"a", b"2"))
    log.put((b"a", b"3"))
    clock.advance(2_000)
    # Whether or not something is too young.
    assert log.run() == 0
    log.put((b"a", b"4"))
    assert log.run() == 0
    slow.end(commit=True)
    assert log.run() == 2
    assert [value for _, _, value in log.read()] == [b"3", b"4"]


def test_records_of_a_topic_that_stamps_them_keep_their_stamp(log):
    of_topic = settings_in_force(TOPIC_SETTINGS, {"message.timestamp.type": "LogAppendTime"})
    log.put((b"a", b"1"), (b"b", b"1"), topic_settings=of_topic)
    log.put((b"a", b"2"), topic_settings=of_topic)
    before = {row.last_offset: (row.timestamp_type, row.base_timestamp_ms) for row in log.rows(record_batches)}
    assert (before[1][0], log.run()) == (1, 1)
    assert {row.last_offset: (row.timestamp_type, row.base_timestamp_ms) for row in log.rows(record_batches)} == before
    assert log.read() == [(1, b"b", b"1"), (2, b"a", b"2")]


def test_records_without_a_key_stay_until_retention_deletes_them(log, clock):
    """They were acknowledged, and no other record has taken their place."""
    log.put((None, b"1"), (b"a", b"1"))
    log.put((None, b"2"), (None, None))
    log.commit((None, b"3"))
    lost = log.begin()
    lost.put((None, b"never"))
    lost.end(commit=False)
    log.put((b"a", b"2"))
    kept = [(0, None, b"1"), (2, None, b"2"), (3, None, None), (4, None, b"3"), (8, b"a", b"2")]
    # One record goes, and a batch.
    assert log.run() == 2
    assert log.read() == kept
    clock.advance(DAY_MS)
    log.put((b"b", b"1"))
    # The marker of the aborted transaction alone.
    assert log.run() == 1
    assert log.read() == [*kept, (9, b"b", b"1")]
    log.assert_storage_is_true()
    assert log.store.read(lambda c: partition_violations(c, log.partition)) == []
    log.configure(cleanup_policy="compact,delete", retention_ms=DAY_MS - 1)
    delete_expired_batches(log.store, batches_max=100)
    assert [row.last_offset for row in log.rows(record_batches)] == [9]


def test_a_record_is_kept_that_a_producer_has_sent_without_a_key_for_it_knew_no_better(log, url):
    log.configure(cleanup_policy="delete")
    errors = []
    with Producer({"bootstrap.servers": url}) as producer:
        for value in (b"known", b"acknowledged"):
            producer.produce(log.name, value, partition=0, on_delivery=lambda error, _: errors.append(error))
            assert producer.flush(60) == 0
            log.configure(cleanup_policy="compact")
    log.put((b"a", b"1"))
    log.put((b"a", b"2"))
    assert log.run() == 1
    assert errors == [None, None]
    assert log.read() == [(0, None, b"known"), (1, None, b"acknowledged"), (3, b"a", b"2")]


def test_a_partition_waits_until_enough_of_it_is_new_or_waits_for_too_long(log, clock):
    log.configure(min_cleanable_dirty_ratio=0.5)
    for key in (b"a", b"b", b"c", b"d"):
        log.put((key, b"1"))
    # All of it is new.
    assert log.run() == 0
    (storage,) = log.rows(partition_storage)
    assert storage.compacted_offset == 4
    for number in range(3):
        log.put((b"a", b"%d" % number))
        assert log.run() == 0
    assert log.rows(partition_storage)[0].compacted_offset == 4
    log.put((b"a", b"3"))
    assert log.run() == 4
    assert log.table() == {b"a": b"3", b"b": b"1", b"c": b"1", b"d": b"1"}
    log.assert_storage_is_true()
    log.configure(max_compaction_lag_ms=1_000)
    log.put((b"a", b"4"))
    clock.advance(1_000)
    assert log.run() == 0
    clock.advance(1)
    assert log.run() == 1
    log.assert_storage_is_true()


def test_what_is_behind_the_last_stable_offset_makes_nobody_look_again_and_again(log):
    log.configure(min_cleanable_dirty_ratio=0.5)
    for key in (b"a", b"b", b"c", b"d"):
        log.put((key, b"1"))
    log.run()
    log.put((b"a", b"2"))
    slow = log.begin()
    slow.put((b"a", b"x" * 10_000))
    # Of what may be compacted, a fifth is new.
    assert log.run() == 0
    assert log.rows(partition_storage)[0].compacted_offset == 4
    slow.end(commit=True)
    assert log.run() == 2


def test_much_behind_the_last_stable_offset_is_weighed_by_its_first_batches(log, monkeypatch):
    monkeypatch.setattr(storage_module, "_WEIGHED_MAX", 2)
    log.configure(min_cleanable_dirty_ratio=0.5)
    for key in (b"a", b"b", b"c", b"d"):
        log.put((key, b"1"))
    log.run()
    log.put((b"a", b"2"))
    slow = log.begin()
    for _ in range(10):
        slow.put((b"a", b"x"))
    assert log.run() == 0
    slow.end(commit=True)
    assert log.run() > 0


@pytest.mark.slow
def test_a_pass_that_can_remember_no_more_keys_stops_there_and_the_next_one_goes_on(log, monkeypatch):
    monkeypatch.setattr(compaction, "KEYS_MAX", 3)
    keys = [b"%d" % number for number in range(8)]
    for value in (b"1", b"2"):
        for key in keys:
            log.put((key, value))
    passes = 0
    while log.rows(partition_storage) == [] or log.rows(partition_storage)[0].compacted_offset < 16:
        log.run()
        passes += 1
        log.assert_storage_is_true()
        assert log.table() == dict.fromkeys(keys, b"2")
    assert passes == 6
    assert log.read() == [(8 + number, key, b"2") for number, key in enumerate(keys)]


def test_a_portion_goes_on_where_the_last_one_stopped_and_others_may_be_at_work_meanwhile(log, monkeypatch):
    monkeypatch.setattr(portions_module, "ROWS_AT_ONCE", 2)
    # However slow the machine is.
    monkeypatch.setattr(Portions, "_adapt", lambda *_: None)
    for number in range(6):
        log.put((b"%d" % (number % 3), b"%d" % number))
    # Three pages for the keys, then three that are changed.
    for left in (6, 6, 6, 4, 3, 3):
        assert compact_portion(log.store, batches_max=1) in {1, 2}
        assert len(log.rows(record_batches)) == left
        log.put((b"other", b"x"), partition=log.partition_id(log.name, 1))
        assert log.table() == {b"0": b"3", b"1": b"4", b"2": b"5"}
    # What has come meanwhile is for the next pass.
    assert log.rows(partition_storage)[0].compacted_offset == 0
    compact_portion(log.store, batches_max=1)
    assert log.rows(partition_storage)[0].compacted_offset == 6
    log.assert_storage_is_true()


def test_a_topic_that_is_told_to_keep_every_record_is_compacted_no_further(log, monkeypatch):
    monkeypatch.setattr(portions_module, "ROWS_AT_ONCE", 2)
    monkeypatch.setattr(Portions, "_adapt", lambda *_: None)
    for number in range(6):
        log.put((b"a", b"%d" % number))
    # Three pages for the keys, then the first that is changed; the pass waits in this process for the next call.
    for _ in range(4):
        compact_portion(log.store, batches_max=1)
    log.configure(cleanup_policy="delete")
    for _ in range(3):
        compact_portion(log.store, batches_max=1)
    assert [offset for offset, *_ in log.read()] == [2, 3, 4, 5]
    log.configure(cleanup_policy="compact")
    log.run()
    assert [offset for offset, *_ in log.read()] == [5]
    log.assert_storage_is_true()


def compact_until_something_changes(log, monkeypatch):
    """Begin a pass, and let another one go on with it behind the first portion that changes something."""
    stopped = threading.Event()
    portions = Portions(seconds=60.0, stop=stopped)
    portions.rows = 1
    apply = compaction._Pass._apply

    def stop(*arguments):
        stopped.set()
        return apply(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(compaction._Pass, "_apply", stop)
        # What is counted before, or goes quickly, makes no larger ones of them.
        patched.setattr(portions, "_adapt", lambda _: None)
        compact_portion(log.store, portions, batches_max=1_000)


def test_who_goes_on_with_a_pass_leaves_the_marker_of_a_record_that_was_left(log, clock, monkeypatch):
    log.configure(delete_retention_ms=1_000)
    log.commit((b"a", b"1"), (b"b", b"1"))
    log.run()
    clock.advance(1_000)
    # All below it may go now, so of the marker nothing but its transaction's record says that it has to stay.
    log.put((b"b", b"2"))
    # One batch at a time, however fast the machine is.
    monkeypatch.setattr(Portions, "_adapt", lambda *_: None)
    compact_until_something_changes(log, monkeypatch)
    (storage,) = log.rows(partition_storage)
    # Between the record and its marker.
    assert json.loads(storage.unfinished_pass)[2] == 2
    # What has come since is for the next pass, which goes over all of it.
    log.put((b"a", b"2"))
    log.run()
    assert log.rows(partition_storage)[0].unfinished_pass is None
    assert [row.marker_offset for row in log.rows(finished_transactions)] == [2]
    assert log.read() == [(0, b"a", b"1"), (3, b"b", b"2"), (4, b"a", b"2")]
    assert log.store.read(lambda c: partition_violations(c, log.partition)) == []
    log.run()
    assert log.read() == [(3, b"b", b"2"), (4, b"a", b"2")]


def test_a_lag_that_is_made_longer_holds_for_who_goes_on_with_a_pass(log, clock, monkeypatch):
    keys = [b"a", b"b", b"c", b"d"]
    for value in (b"old", b"less old", b"young", b"younger"):
        if value == b"young":
            clock.advance(2 * DAY_MS)
        for key in keys:
            log.put((key, value))
    compact_until_something_changes(log, monkeypatch)
    values = [value for _, _, value in log.read()]
    assert values.count(b"young") == 4
    assert len(values) < 16
    log.configure(min_compaction_lag_ms=DAY_MS)
    log.run()
    assert [value for _, _, value in log.read() if value.startswith(b"y")] == [b"young"] * 4 + [b"younger"] * 4
    clock.advance(2 * DAY_MS)
    log.run()
    assert [value for _, _, value in log.read()] == [b"younger"] * 4
    log.assert_storage_is_true()


def test_long_keys_are_told_apart_and_found_again(log):
    longs = [b"k" * 16, b"k" * 17, b"k" * 18, b"k" * 1_000]
    log.put(*((key, b"1") for key in longs))
    log.put(*((key, b"2") for key in longs[1:]))
    log.run()
    assert log.table() == {longs[0]: b"1", **dict.fromkeys(longs[1:], b"2")}
    assert len(log.read()) == 4


def test_a_repeated_batch_is_known_when_its_records_are_gone(log):
    producer = ProducerIdentity(70_002, 0)
    log.put((b"a", b"1"), (b"b", b"1"), producer=producer, base_sequence=0)
    log.put((b"a", b"2"), (b"b", b"2"))
    assert log.run() == 1
    assert log.read() == [(2, b"a", b"2"), (3, b"b", b"2")]
    item = Append(log.partition, log.encoded((b"a", b"1"), (b"b", b"1"), producer=producer, base_sequence=0))
    repeated = log.store.write(lambda c: append(c, [item]))[0]
    assert (repeated.is_duplicate, repeated.base_offset) == (True, 0)
    assert log.put((b"c", b"1"), producer=producer, base_sequence=2) == 4


def test_a_damaged_batch_keeps_its_partition_as_it_is_and_no_other(log):
    log.put((b"a", b"1"))
    log.put((b"b", b"1"))
    log.put((b"a", b"2"))
    other = log.partition_id(log.name, 1)
    log.put((b"a", b"1"), (b"a", b"2"), partition=other)
    damaged = (
        update(record_batches)
        .where(record_batches.c.partition_id == log.partition, record_batches.c.last_offset == 1)
        .values(key_data=b"a")
    )
    log.store.write(lambda c: c.execute(damaged))
    with pytest.raises(CorruptBatch, match="offsets 1 to 1"):
        log.run()
    assert len(log.rows(record_batches)) == 3
    page = log.store.read(lambda c: fetch(c, {other: 0}))[other]
    assert [record.offset for batch in page.batches for record in batch.records()] == [1]


def test_a_topic_that_is_deleted_meanwhile_keeps_no_other_from_being_compacted(log, monkeypatch):
    log.put((b"a", b"1"), (b"a", b"2"))
    other = CompactedLog(log.store, log.clock)
    other.put((b"a", b"1"), (b"a", b"2"))
    apply = compaction._Pass._apply

    def delete_first(one_pass, changes, behind_offset, connection):
        monkeypatch.setattr(compaction._Pass, "_apply", apply)
        delete_topic(connection, log.name)
        return apply(one_pass, changes, behind_offset, connection)

    monkeypatch.setattr(compaction._Pass, "_apply", delete_first)
    assert log.run() == 1
    assert other.read() == [(1, b"a", b"2")]


def another_comes_before(log, due, monkeypatch):
    """Let the next pass, once it has decided what to change, find that another one has changed a batch before it."""
    carry_out = compaction._Pass._carry_out

    def carry_out_behind_the_other(one_pass, changes, behind_offset):
        monkeypatch.setattr(compaction._Pass, "_carry_out", carry_out)
        assert sum(part.batches_changed for part in compaction._Pass(log.store, due).steps()) == 1
        return carry_out(one_pass, changes, behind_offset)

    monkeypatch.setattr(compaction._Pass, "_carry_out", carry_out_behind_the_other)


def test_what_somebody_else_left_in_a_batch_meanwhile_does_not_come_back_when_its_tombstone_goes(log, monkeypatch):
    """Two at once, of which one has seen less: each changes the same batch."""
    log.configure(delete_retention_ms=1_000)
    log.put((b"a", b"1"), (b"b", b"1"), (b"c", b"1"))
    log.put((b"c", b"2"))
    _, settings_of, _ = log.store.read(compaction._read_settings)
    (of_topic,) = (of for of in settings_of.values() if of["delete.retention.ms"] == 1_000)
    count_stored(log.store, log.partition)
    due = log.store.read(lambda c: compaction._due(log.partition, of_topic, log.clock.now_ms(), c))
    log.put((b"a", None))
    another_comes_before(log, due, monkeypatch)
    assert log.run() == 1
    assert log.read() == [(1, b"b", b"1"), (3, b"c", b"2"), (4, b"a", None)]
    log.clock.advance(1_000)
    assert log.run() == 1
    assert log.read() == [(1, b"b", b"1"), (3, b"c", b"2")]
    log.assert_storage_is_true()


def test_a_marker_outlives_what_somebody_else_left_of_its_transaction_though_the_pass_ends_there(log, monkeypatch):
    """Two at once, of which one has seen less; the other one dies when it has found that it came too late."""
    log.configure(delete_retention_ms=1_000)
    log.commit((b"a", b"1"), (b"b", b"1"))
    log.run()
    log.clock.advance(1_000)
    log.put((b"b", b"2"))
    _, settings_of, _ = log.store.read(compaction._read_settings)
    (of_topic,) = (of for of in settings_of.values() if of["delete.retention.ms"] == 1_000)
    count_stored(log.store, log.partition)
    due = log.store.read(lambda c: compaction._due(log.partition, of_topic, log.clock.now_ms(), c))
    log.put((b"a", b"2"))
    another_comes_before(log, due, monkeypatch)

    def die(*_):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(compaction._Pass, "_batch", die)
        with pytest.raises(ZeroDivisionError):
            log.run()
    assert log.store.read(lambda connection: partition_violations(connection, log.partition)) == []
    log.assert_storage_is_true()
    assert log.run() == 2
    assert log.read() == [(3, b"b", b"2"), (4, b"a", b"2")]
    assert log.rows(finished_transactions) == []


def test_a_portion_ends_though_nothing_that_it_passes_is_committed(log, monkeypatch):
    monkeypatch.setattr(portions_module, "ROWS_AT_ONCE", 2)
    # However slow the machine is.
    monkeypatch.setattr(Portions, "_adapt", lambda *_: None)
    for _ in range(6):
        aborted = log.begin()
        aborted.put((b"a", b"x"))
        aborted.end(commit=False)
    assert compact_portion(log.store, batches_max=3) == 4
    assert len(log.rows(record_batches)) == 12
    # The other eight for their keys, then the first two that are changed.
    assert compact_portion(log.store, batches_max=9) == 10
    assert len(log.rows(record_batches)) == 11


def test_the_largest_timestamp_is_found_where_all_that_is_left_of_a_batch_is_deleted(log, clock):
    log.configure(cleanup_policy="compact,delete", delete_retention_ms=0)
    log.put((b"a", b"1"), (b"b", b"1"), (b"c", b"1"))
    log.put((b"b", None), (b"c", None))
    log.run()
    # The first batch ends behind it, and has nothing there.
    delete_records(log.store, log.partition, 1)

    def largest():
        return log.store.read(lambda c: offset_of_max_timestamp(c, log.partition, IsolationLevel.READ_COMMITTED))

    assert largest() == OffsetAndTimestamp(3, clock.now_ms())
    log.run()
    assert [row.last_offset for row in log.rows(record_batches)] == [2]
    assert largest() is None


def test_gaps_of_a_pass_that_nobody_finishes_are_no_damage(log, monkeypatch):
    for value in b"1", b"2", b"3":
        log.put((b"a", value), (b"b" + value, value))
    monkeypatch.setattr(Portions, "_adapt", lambda *_: None)
    compact_until_something_changes(log, monkeypatch)
    log.configure(cleanup_policy="delete")
    assert log.run() == 0
    assert log.rows(partition_storage)[0].compacted_offset == 0
    assert [offset for offset, *_ in log.read()] != list(range(6))
    assert log.store.read(lambda c: partition_violations(c, log.partition)) == []


def test_a_record_of_a_compacted_topic_needs_a_key(log, url):
    producer = Producer({"bootstrap.servers": url})
    errors = []
    for key in (None, b"k"):
        producer.produce(log.name, value=b"v", key=key, partition=0, on_delivery=lambda error, _: errors.append(error))
        assert producer.flush(60) == 0
    producer.close()
    assert [error and error.code() for error in errors] == [KafkaError.INVALID_RECORD, None]
    assert log.read() == [(0, b"k", b"v")]


def test_a_reader_goes_over_what_is_gone_and_its_position_stays_good(log, url):
    for value in (b"1", b"2", b"3"):
        log.commit((b"a", value), (b"b", value))
    consumer = Consumer({"bootstrap.servers": url, "group.id": f"g-{log.name}", "auto.offset.reset": "error"})
    try:
        log.run()
        consumer.assign([TopicPartition(log.name, 0, 1)])
        got = [message.value() for message in consumer.consume(2, 60)]
        assert got == [b"3", b"3"]
        assert consumer.position([TopicPartition(log.name, 0)])[0].offset >= 8
    finally:
        consumer.close()


@pytest.mark.parametrize(
    ("horizons", "deletable", "new", "expected"),
    [
        ([], 0, None, []),
        ([], 0, (5, 100), [(5, 100)]),
        ([(5, 100)], 5, None, [(5, 0)]),
        ([(5, 0)], 5, None, [(5, 0)]),
        # Markers whose transactions have records left wait for no time.
        ([(5, 100)], 5, (5, 200), [(5, 0)]),
        ([(5, 0), (7, 100)], 7, (9, 200), [(7, 0), (9, 200)]),
        ([(5, 0), (7, 100)], 5, (9, 200), [(5, 0), (7, 100), (9, 200)]),
        # Nothing new stands behind what has a time already.
        ([(5, 100)], 0, (5, 200), [(5, 100)]),
        # One that is near the one before gives way; the first one never does.
        ([(5, 100), (6, 105)], 0, (7, 108), [(5, 100), (7, 108)]),
        ([(5, 100)], 0, (7, 101), [(5, 100), (7, 101)]),
        ([(5, 100), (6, 110)], 0, (7, 111), [(5, 100), (6, 110), (7, 111)]),
    ],
)
def test_the_times_at_which_tombstones_go_follow_each_other(horizons, deletable, new, expected):
    assert next_horizons(horizons, deletable, new, apart_ms=10) == expected


_KEYS = st.sampled_from([b"a", b"b", b"c", b"d" * 20])
_VALUES = st.one_of(st.none(), st.integers(0, 9).map(b"%d".__mod__))
_RECORDS = st.lists(st.tuples(_KEYS, _VALUES), min_size=1, max_size=4)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), _RECORDS),
        st.tuples(st.just("write"), st.integers(0, 1), _RECORDS),
        st.tuples(st.just("end"), st.integers(0, 1), st.booleans()),
        st.tuples(st.just("wait"), st.sampled_from([1, 400, 1_000])),
        st.tuples(st.just("compact")),
        st.tuples(st.just("turn")),
    ),
    min_size=4,
    max_size=20,
)


def repeat_until_idle(log, compact, times_max):
    """Compact so often, or until three times in a row have changed nothing."""
    idle = 0
    stored = log.rows(record_batches), log.rows(partition_storage)
    for _ in range(times_max):
        before = stored
        compact()
        stored = log.rows(record_batches), log.rows(partition_storage)
        idle = idle + 1 if stored == before else 0
        if idle == 3:
            break


@pytest.mark.slow
@pytest.mark.slow_on_postgresql
@pytest.mark.campaign
def test_whatever_happens_a_reader_ends_with_the_same_table(store, clock, monkeypatch):
    # PostgreSQL takes six times as long for the same statements.
    @settings(
        max_examples=times(25 if store.backend.name == "sqlite" else 10),
    )
    @given(
        steps=_STEPS,
        keys_max=st.sampled_from([1, 3, 200_000]),
        page=st.sampled_from([1, 2, 200]),
        in_turns=st.booleans(),
    )
    def histories(steps, keys_max, page, in_turns):
        monkeypatch.setattr(compaction, "KEYS_MAX", keys_max)
        monkeypatch.setattr(portions_module, "ROWS_AT_ONCE", page)
        monkeypatch.setattr(portions_module, "FIRST_ROWS", page)
        monkeypatch.setattr(Portions, "_adapt", lambda *_: None)
        live(CompactedLog(store, clock, delete_retention_ms=1_000), steps, in_turns=in_turns)

    histories()


def live(log, steps, *, in_turns):  # noqa: C901 - a branch for each kind of step
    open_: dict[int, Transaction] = {}
    seen: set[tuple[int, bytes, bytes]] = set()
    #: What the last turn has left, as long as nothing has happened since.
    left: list[tuple] = []

    def look():
        bounds = log.store.read(lambda c: read_bounds(c, [log.partition]))[log.partition]
        return log.table(), log.read(IsolationLevel.READ_UNCOMMITTED), bounds.last_stable_offset

    def compact(*, in_turn=False):
        table, before, end = left.pop() if left else look()
        seen.update(before)
        if in_turn:
            # Of somebody who has time for one portion, and knows nothing of the turn before.
            compact_portion(log.store, Portions(seconds=0.0), batches_max=1_000)
        else:
            log.run()
        after = look()
        assert after[0] == table
        # Nothing is new, nothing has another offset, nothing that may not be touched has gone.
        assert set(after[1]) <= set(before)
        assert [row for row in after[1] if row[0] >= end] == [row for row in before if row[0] >= end]
        log.assert_storage_is_true()
        assert log.store.read(lambda c: partition_violations(c, log.partition)) == []
        left.append(after)
        return end

    for step in steps:
        if step[0] not in ("compact", "turn"):
            left.clear()
        match step:
            case ("put", records):
                log.put(*records)
            case ("write", number, records):
                open_.setdefault(number, log.begin()).put(*records)
            case ("end", number, commit) if number in open_:
                open_.pop(number).end(commit=commit)
            case ("wait", milliseconds):
                log.clock.advance(milliseconds)
            case (kind,):
                compact(in_turn=kind == "turn")
    left.clear()
    for transaction in open_.values():
        transaction.end(commit=True)
    for _ in range(3 + len(seen) + 20 * 4):
        end = compact(in_turn=in_turns)
        stored = log.rows(partition_storage)
        if not stored or stored[0].compacted_offset == end:
            break
    keys = [key for _, key, _ in log.read(IsolationLevel.READ_UNCOMMITTED)]
    assert len(keys) == len(set(keys))
    # Once the time is up nothing is left but the table, and the markers of its transactions.
    log.clock.advance(1_000)
    repeat_until_idle(log, partial(compact, in_turn=in_turns), times_max=100 if in_turns else 1)
    assert {key: value for _, key, value in log.read()} == log.table()
    alive = {
        (row.producer_id, row.producer_epoch)
        for row in log.rows(record_batches)
        if row.is_transactional and row.control_type is None
    }
    finished = {(row.producer_id, row.producer_epoch) for row in log.rows(finished_transactions)}
    assert alive == finished
    log.store.write(lambda c: delete_topic(c, log.name))

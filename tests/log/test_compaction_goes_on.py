"""Who goes on with a pass of the compaction that another one has not finished knows what that one has done, no more."""

from __future__ import annotations

import gc
import weakref

import pytest

from tests.log.compacted_log import CompactedLog
from txnstore.db import portions as portions_module
from txnstore.db.opening import open_store
from txnstore.db.portions import Portions
from txnstore.db.schema import finished_transactions, partition_storage, record_batches
from txnstore.log import compaction
from txnstore.log.compaction import compact_portion
from txnstore.log.partition_storage import count_stored, read_horizons, read_storage
from txnstore.testing.invariants import partition_violations
from txnstore.testing.manual_clock import ManualClock


@pytest.fixture
def log(store, clock):
    return CompactedLog(store, clock, delete_retention_ms=1_000)


@pytest.fixture
def one_batch_at_once(monkeypatch):
    """However fast the machine is."""
    monkeypatch.setattr(portions_module, "ROWS_AT_ONCE", 1)
    monkeypatch.setattr(Portions, "_adapt", lambda *_: None)


def find_due(log):
    """Return what a pass of the partition has to do that begins now."""
    now_ms, settings_of, _ = log.store.read(compaction._read_settings)
    (settings,) = (of for of in settings_of.values() if of["delete.retention.ms"] == 1_000)
    count_stored(log.store, log.partition)
    due = log.store.read(lambda c: compaction._due(log.partition, settings, now_ms, c))
    assert due is not None
    return due


def die_behind_a_change(log, due):
    """Compact as far as something is changed, and go no further."""
    assert any(progress.batches_changed for progress in compaction._Pass(log.store, due).steps())
    assert log.rows(partition_storage)[0].unfinished_pass is not None


def test_who_dies_having_come_too_late_for_a_batch_has_not_passed_it(log, monkeypatch):
    """Two at once, of which one has seen less; it dies when it has changed a batch, and the other then as well."""
    log.put((b"a", b"1"), (b"b", b"1"), (b"c", b"1"))
    log.put((b"c", b"2"))
    due = find_due(log)
    log.put((b"a", None))
    carry_out = compaction._Pass._carry_out

    def die(*_):
        raise ZeroDivisionError

    with monkeypatch.context() as patched:

        def carry_out_behind_the_other(*arguments):
            patched.setattr(compaction._Pass, "_carry_out", carry_out)
            die_behind_a_change(log, due)
            patched.setattr(compaction._Pass, "_batch", die)
            return carry_out(*arguments)

        patched.setattr(compaction._Pass, "_carry_out", carry_out_behind_the_other)
        with pytest.raises(ZeroDivisionError):
            log.run()
    for _ in range(2):
        log.run()
    assert log.read() == [(1, b"b", b"1"), (3, b"c", b"2"), (4, b"a", None)]
    log.clock.advance(1_000)
    log.run()
    assert log.read() == [(1, b"b", b"1"), (3, b"c", b"2")]
    log.assert_storage_is_true()


@pytest.mark.usefixtures("one_batch_at_once")
def test_a_tombstone_in_front_of_where_somebody_goes_on_goes_in_its_time(log):
    log.put((b"t", None))
    log.put((b"a", b"1"))
    log.put((b"a", b"2"))
    die_behind_a_change(log, find_due(log))
    log.run()
    assert log.rows(partition_storage)[0].compacted_offset == 3
    horizons = read_horizons(log.store.read(lambda c: read_storage(c, log.partition)))
    assert horizons == [(3, log.clock.now_ms() + 1_000)]
    log.clock.advance(1_000)
    log.run()
    assert log.read() == [(2, b"a", b"2")]


@pytest.mark.usefixtures("one_batch_at_once")
def test_a_tombstone_whose_time_is_up_meanwhile_goes_with_the_next_pass(log):
    log.put((b"t", None))
    log.run()
    log.put((b"a", b"1"))
    log.put((b"a", b"2"))
    die_behind_a_change(log, find_due(log))
    log.clock.advance(1_000)
    # The rest of the pass has not come by the tombstone.
    log.run()
    assert log.read() == [(0, b"t", None), (2, b"a", b"2")]
    assert log.store.read(lambda c: partition_violations(c, log.partition)) == []
    log.run()
    assert log.read() == [(2, b"a", b"2")]


def test_a_marker_at_which_a_pass_ended_has_its_own_time(log):
    log.configure(min_compaction_lag_ms=500)
    transaction = log.begin()
    transaction.put((b"t", None))
    log.clock.advance(600)
    transaction.end(commit=True)
    log.run()
    # Its marker was too young.
    assert log.rows(partition_storage)[0].compacted_offset == 1
    log.clock.advance(1_000)
    log.run()
    assert log.read() == []
    assert [row.marker_offset for row in log.rows(finished_transactions)] == [1]
    log.clock.advance(1_000)
    log.run()
    assert log.rows(finished_transactions) == []


@pytest.mark.slow
def test_a_pass_that_waits_for_the_next_call_keeps_no_store_that_nobody_uses_any_more(url, monkeypatch):
    monkeypatch.setattr(portions_module, "ROWS_AT_ONCE", 1)
    monkeypatch.setattr(Portions, "_adapt", lambda *_: None)
    clock = ManualClock()
    with open_store(url, clock=clock) as store:
        log = CompactedLog(store, clock)
        for number in range(6):
            log.put((b"a", b"%d" % number))
        # In the middle of what is changed.
        while len(log.rows(record_batches)) == 6:
            compact_portion(store, batches_max=1)
        assert store in compaction._unfinished
    kept = weakref.ref(store)
    del store, log
    gc.collect()
    assert kept() is None


def test_what_comes_behind_the_count_is_taken_from_no_size(log, monkeypatch):
    log.put((b"a", b"1"), (b"a", b"2"))

    def count_and_put(store, partition_id, portions):
        is_counted = count_stored(store, partition_id, portions)
        if partition_id == log.partition:
            log.put((b"b", b"1"), (b"b", b"2"))
        return is_counted

    monkeypatch.setattr(compaction, "count_stored", count_and_put)
    assert log.run() == 2
    assert log.read() == [(1, b"a", b"2"), (3, b"b", b"2")]
    (storage,) = log.rows(partition_storage)
    assert (storage.counted_offset, storage.compacted_offset) == (2, 4)
    assert log.store.read(lambda c: partition_violations(c, log.partition)) == []


def test_who_comes_to_an_end_that_somebody_else_has_reached_counts_nothing_twice(log):
    log.put((b"a", b"1"), (b"b", b"1"))
    # Counted, and not compacted yet.
    log.begin().put((b"c", b"1"), (b"d", b"1"))
    late = compaction._Pass(log.store, find_due(log))
    log.run()
    assert log.rows(partition_storage)[0].compacted_offset == 2
    assert sum(part.batches_changed for part in late.steps()) == 0
    log.assert_storage_is_true()

"""What a topic is told while a pass of the compaction is under way holds at once."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from tests.log.compacted_log import CompactedLog
from txnstore.db import portions as portions_module
from txnstore.db.portions import Portions
from txnstore.db.schema import partition_storage, record_batches, topic_configs
from txnstore.errors import InvalidConfiguration
from txnstore.log.compaction import compact_portion
from txnstore.log.partition_storage import read_horizons, read_storage
from txnstore.log.topics import get_topic

DAY_MS = 86_400_000


@pytest.fixture
def log(store, clock, monkeypatch):
    """A compacted topic whose passes take two batches at once, however fast the machine is."""
    monkeypatch.setattr(portions_module, "ROWS_AT_ONCE", 2)
    monkeypatch.setattr(Portions, "_adapt", lambda *_: None)
    return CompactedLog(store, clock)


def go_on(log, times):
    """Go on with the pass that waits in this process, page by page."""
    for _ in range(times):
        compact_portion(log.store, batches_max=1)


def test_a_lag_that_is_made_longer_holds_for_a_pass_that_is_under_way(log):
    for number in range(6):
        log.put((b"a", b"%d" % number))
    # Three pages for the keys, then the first that is changed.
    go_on(log, 4)
    assert [offset for offset, *_ in log.read()] == [2, 3, 4, 5]
    log.configure(min_compaction_lag_ms=DAY_MS)
    go_on(log, 3)
    assert [offset for offset, *_ in log.read()] == [2, 3, 4, 5]
    log.clock.advance(DAY_MS)
    log.run()
    assert [offset for offset, *_ in log.read()] == [5]
    log.assert_storage_is_true()


def test_a_pass_that_has_changed_all_ends_by_what_the_topic_is_told_then(log):
    log.configure(delete_retention_ms=1_000)
    log.put((b"a", b"1"))
    log.put((b"a", None))
    # A page for the keys, and the one that is changed; only the end is left.
    go_on(log, 2)
    assert [offset for offset, *_ in log.read()] == [1]
    log.configure(delete_retention_ms=DAY_MS)
    go_on(log, 1)
    log.run()
    due_ms = log.clock.now_ms() + DAY_MS
    assert read_horizons(log.store.read(lambda c: read_storage(c, log.partition))) == [(2, due_ms)]


def test_a_tombstone_stays_for_as_long_as_the_topic_was_told_before_the_pass_ended(log):
    log.configure(delete_retention_ms=1_000)
    log.put((b"a", b"1"))
    log.put((b"a", None))
    # A page for the keys; the one that is changed, and the end, come once the topic has been told.
    go_on(log, 1)
    log.configure(delete_retention_ms=DAY_MS)
    go_on(log, 2)
    log.run()
    assert log.rows(partition_storage)[0].compacted_offset == 2
    due_ms = log.clock.now_ms() + DAY_MS
    assert read_horizons(log.store.read(lambda c: read_storage(c, log.partition))) == [(2, due_ms)]


def test_a_topic_whose_settings_nobody_can_read_keeps_its_batches_and_no_other_does(log):
    damaged = CompactedLog(log.store, log.clock)
    for each in (log, damaged):
        each.put((b"a", b"1"))
        each.put((b"a", b"2"))
    of_topic = topic_configs.c.topic_id == log.store.read(lambda c: get_topic(c, damaged.name)).topic_id
    of_setting = topic_configs.c.name == "min.cleanable.dirty.ratio"
    log.store.write(lambda c: c.execute(update(topic_configs).where(of_topic, of_setting).values(value="most")))
    with pytest.raises(InvalidConfiguration, match=f"{damaged.name}.* min.cleanable.dirty.ratio"):
        log.run()
    assert len(log.rows(record_batches)) == 1
    assert len(damaged.rows(record_batches)) == 2

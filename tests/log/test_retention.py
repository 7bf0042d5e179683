"""The retention: which batches go, which stay, and that what is kept of sizes is right whoever is interrupted."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, cast

import pytest
from sqlalchemy import select, update

from tests.clients.consumer.log_writer import LogWriter
from tests.log.test_deleting import readable, stored
from txnstore import Consumer, KafkaError, TopicPartition
from txnstore.db import portions as portions_module
from txnstore.db.opening import open_store
from txnstore.db.schema import finished_transactions, partition_storage, record_batches, topic_configs
from txnstore.errors import InvalidConfiguration, StoreReadOnly, StoreUnavailable
from txnstore.groups.administration import delete_group
from txnstore.groups.expiration import expire_offsets
from txnstore.groups.offsets import commit_offsets
from txnstore.log import deleting, retention
from txnstore.log import partition_storage as partition_storage_module
from txnstore.log.append import Append, append
from txnstore.log.bounds import read_bounds
from txnstore.log.codec import encode
from txnstore.log.compaction import compact_partitions
from txnstore.log.deleting import delete_records
from txnstore.log.partition_rows import lock_heads
from txnstore.log.partition_storage import BATCH_HEADER_BYTES, batch_bytes
from txnstore.log.retention import UNLIMITED, RetentionLimits, StoredBatch, delete_expired_batches, expired_through
from txnstore.log.topics import change_topic_configs, delete_topic, get_topic, lock_topic_configs
from txnstore.model import INTERNAL_GROUP_PREFIX, GroupMembership, OffsetAndMetadata, Record
from txnstore.testing.invariants import partition_violations

NOW_MS = 1_000_000
#: Of a topic that is told nothing.
AS_USUAL = {"cleanup_policy": "delete", "txnstore_retention_unread_ms": 0}


def limits(age_ms=UNLIMITED, size_bytes=UNLIMITED, unread_ms=0):
    return RetentionLimits(age_ms, size_bytes, unread_ms)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({}, limits(604_800_000)),
        ({"retention.ms": "5"}, limits(5)),
        ({"retention.ms": "-1"}, None),
        ({"retention.ms": "-1", "retention.bytes": "0"}, limits(size_bytes=0)),
        ({"retention.ms": "-1", "retention.bytes": "-7"}, None),
        ({"retention.ms": "0", "retention.bytes": "9"}, limits(0, 9)),
        ({"retention.ms": "5", "cleanup.policy": "compact,delete"}, limits(5)),
        ({"retention.ms": "5", "cleanup.policy": "compact"}, None),
        ({"retention.ms": "5", "cleanup.policy": ""}, None),
        ({"retention.ms": "5", "txnstore.retention.unread.ms": "8"}, limits(5, unread_ms=8)),
        ({"retention.ms": "5", "txnstore.retention.unread.ms": "-1"}, limits(5, unread_ms=UNLIMITED)),
    ],
)
def test_what_a_topic_keeps_follows_from_its_settings(texts, expected):
    assert RetentionLimits.of(texts) == expected


#: Three batches of 10 bytes and two records each; how old they are.
AGES = {"falling": (300, 200, 100), "newest first": (100, 300, 200), "of the future": (-50, 300, 200)}


@pytest.mark.parametrize(
    ("ages", "kept", "excess", "read", "through"),
    [
        ("falling", limits(), 0, None, None),
        ("falling", limits(99), 0, None, 5),
        ("falling", limits(100), 0, None, 3),
        ("falling", limits(299), 0, None, 1),
        ("falling", limits(300), 0, None, None),
        ("falling", limits(0), 0, None, 5),
        # None goes before the one in front of it.
        ("newest first", limits(150), 0, None, None),
        ("newest first", limits(99), 0, None, 5),
        ("of the future", limits(0), 0, None, None),
        # A size that is kept is kept whole: only what is entirely too much goes.
        ("falling", limits(size_bytes=100), -1, None, None),
        ("falling", limits(size_bytes=100), 9, None, None),
        ("falling", limits(size_bytes=100), 10, None, 1),
        ("falling", limits(size_bytes=100), 19, None, 1),
        ("falling", limits(size_bytes=100), 20, None, 3),
        ("falling", limits(size_bytes=0), 30, None, 5),
        ("newest first", limits(size_bytes=100), 20, None, 3),
        # Either is enough, also in turns.
        ("falling", limits(250, 100), 20, None, 3),
        ("falling", limits(150, 100), 10, None, 3),
        ("falling", limits(150, 100), 30, None, 5),
        # What a group has yet to read stays until it is too old for that, too.
        ("falling", limits(99), 0, 0, 5),
        ("falling", limits(99, unread_ms=UNLIMITED), 0, None, 5),
        ("falling", limits(99, unread_ms=UNLIMITED), 0, 0, None),
        ("falling", limits(99, unread_ms=UNLIMITED), 0, 1, None),
        ("falling", limits(99, unread_ms=UNLIMITED), 0, 2, 1),
        ("falling", limits(99, unread_ms=UNLIMITED), 0, 6, 5),
        ("falling", limits(99, unread_ms=250), 0, 0, 1),
        ("falling", limits(99, unread_ms=300), 0, 0, None),
        ("falling", limits(99, unread_ms=299), 0, 0, 1),
        ("falling", limits(99, unread_ms=250), 0, 3, 1),
        ("falling", limits(99, unread_ms=250), 0, 4, 3),
        ("falling", limits(size_bytes=100, unread_ms=250), 20, 0, 1),
        # Groups hold back what would go, and nothing goes for them that would stay.
        ("falling", limits(299, unread_ms=50), 0, 0, 1),
    ],
)
def test_the_first_batches_go_that_are_too_old_or_too_much(ages, kept, excess, read, through):
    batches = [StoredBatch(2 * index + 1, 10, NOW_MS - age_ms) for index, age_ms in enumerate(AGES[ages])]
    assert (
        expired_through(batches, kept, now_ms=NOW_MS, excess_bytes=excess, read_offset=read if kept.unread_ms else None)
        == through
    )


_numbers = itertools.count(1)


class Log(LogWriter):
    """A topic of this test alone, with time that passes when told."""

    def __init__(self, store, clock, **config):
        super().__init__(store)
        self.clock = clock
        self.name = f"retained-{next(_numbers)}"
        self.topic(self.name, 2)
        self.configure(**config)
        self.partition = self.partition_id(self.name, 0)

    def configure(self, **config):
        texts = {name.replace("__", "-").replace("_", "."): str(value) for name, value in config.items()}
        self.store.write(lambda c: change_topic_configs(c, lock_topic_configs(c, self.name), texts))

    def put(self, *values, number=0):
        """Append a batch of this moment."""
        self.write(self.name, number, *values, timestamp_ms=self.clock.now_ms())

    def run(self, batches_max=10_000):
        return delete_expired_batches(self.store, batches_max=batches_max)

    def commit(self, group_id, offset):
        offsets = {self.partition: OffsetAndMetadata(offset)}
        self.store.write(lambda c: commit_offsets(c, GroupMembership(group_id), offsets))

    @property
    def bounds(self):
        found = self.store.read(lambda c: read_bounds(c, [self.partition]))[self.partition]
        return found.log_start_offset, found.last_stable_offset, found.high_watermark

    def assert_storage_is_true(self):
        """Assert that what is kept of the stored batches is what is stored."""
        of_batches = select(record_batches).where(record_batches.c.partition_id == self.partition)
        batches = self.store.read(lambda c: c.execute(of_batches).all())
        kept = select(partition_storage).where(partition_storage.c.partition_id == self.partition)
        storage = self.store.read(lambda c: c.execute(kept).one_or_none())
        if storage is not None:
            assert all(batch.last_offset >= storage.first_stored_offset for batch in batches)
            counted = [batch.size_bytes for batch in batches if batch.last_offset < storage.counted_offset]
            assert storage.size_bytes == sum(counted) + BATCH_HEADER_BYTES * len(counted)
        assert self.store.read(lambda c: partition_violations(c, self.partition)) == []


@pytest.fixture
def log(store, clock):
    return Log(store, clock)


def test_batches_go_when_they_are_older_than_retention_ms_allows(log, clock):
    log.configure(retention_ms=10_000)
    for value in (b"a", b"b", b"c"):
        log.put(value, value.upper())
        clock.advance(1_000)
    clock.advance(7_000)
    assert log.run() == 0
    clock.advance(1)
    assert log.run() == 1
    assert log.bounds == (2, 6, 6)
    assert (stored(log, log.partition), readable(log, log.partition)) == ([2, 4], [b"b", b"B", b"c", b"C"])
    log.assert_storage_is_true()
    clock.advance(2_000)
    assert log.run() == 2
    assert (log.bounds, stored(log, log.partition)) == ((6, 6, 6), [])
    log.put(b"d")
    assert (log.bounds, readable(log, log.partition)) == ((6, 7, 7), [b"d"])
    log.assert_storage_is_true()


def test_a_topic_keeps_its_records_for_seven_days_unless_told(log, clock):
    log.put(b"a")
    clock.advance(604_800_000)
    assert log.run() == 0
    clock.advance(1)
    assert log.run() == 1


def test_the_oldest_batches_go_when_a_partition_takes_more_than_retention_bytes(log, clock):
    for number in range(3):
        log.put(b"%d" % number * 100)
    sizes = select(record_batches.c.size_bytes).where(record_batches.c.partition_id == log.partition)
    (size_bytes,) = set(log.store.read(lambda c: c.execute(sizes).scalars().all()))
    log.configure(retention_ms=-1, retention_bytes=4 * (size_bytes + BATCH_HEADER_BYTES) - 1)
    assert log.run() == 0
    log.assert_storage_is_true()
    for number in range(3, 7):
        log.put(b"%d" % number * 100)
        log.put(b"other" * 1_000, number=1)
    # Seven are more than four less a byte by more than three; the other partition has two more of its size.
    assert log.run() == 3 + 3
    assert stored(log, log.partition) == [3, 4, 5, 6]
    log.assert_storage_is_true()
    assert log.run() == 0
    log.configure(retention_bytes=0)
    assert log.run() == 4 + 1
    assert stored(log, log.partition) == []
    log.assert_storage_is_true()


def test_each_pass_counts_only_what_has_come_since_the_last_one(log, monkeypatch):
    log.configure(retention_ms=-1, retention_bytes=100_000)
    monkeypatch.setattr(portions_module, "ROWS_AT_ONCE", 2)
    asked: list[int] = []

    def noted(size_bytes):
        asked.append(size_bytes)
        return batch_bytes(size_bytes)

    for module in (partition_storage_module, retention):
        monkeypatch.setattr(module, "batch_bytes", noted)
    for number in range(5):
        log.put(b"%d" % number * 50)
    log.run()
    # Each once to be counted, and once more as one of the first that may go.
    assert len(asked) == 5 + 5
    asked.clear()
    log.run()
    assert asked == []
    log.put(b"6" * 50)
    log.run()
    assert len(asked) == 1 + 6
    log.assert_storage_is_true()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("config", [{"retention_ms": 0}, {"retention_ms": -1, "retention_bytes": 0}])
@pytest.mark.parametrize("commit", [True, False])
def test_an_open_transaction_keeps_everything_from_its_first_record_on(log, clock, config, commit):
    log.configure(**config)
    log.put(b"a")
    transaction = log.transaction(timeout_ms=900_000)
    transaction.write(log.name, 0, b"b")
    log.put(b"c")
    clock.advance(60_000)
    assert log.run() == 1
    assert log.bounds == (1, 1, 3)
    transaction.write(log.name, 0, b"d")
    transaction.end(commit=commit)
    assert readable(log, log.partition) == ([b"b", b"c", b"d"] if commit else [b"c"])
    log.assert_storage_is_true()
    clock.advance(60_000)
    assert log.run() == 4
    assert log.bounds == (5, 5, 5)
    log.assert_storage_is_true()


def test_the_index_of_finished_transactions_goes_with_their_markers(log, clock):
    log.configure(retention_ms=10_000)
    index = select(finished_transactions.c.marker_offset).where(finished_transactions.c.partition_id == log.partition)
    first, second = log.transaction(), log.transaction()
    first.write(log.name, 0, b"a")
    second.write(log.name, 0, b"b")
    first.end(commit=False)
    clock.advance(5_000)
    second.end(commit=True)
    clock.advance(5_001)
    assert log.run() == 3
    # The second one's marker is left, and with it how it ended.
    assert log.store.read(lambda c: c.execute(index).scalars().all()) == [3]
    clock.advance(5_000)
    assert log.run() == 1
    assert log.store.read(lambda c: c.execute(index).scalars().all()) == []
    log.assert_storage_is_true()


def test_what_groups_have_not_read_stays_for_as_long_as_the_topic_says(log, clock):
    log.configure(retention_ms=1_000, txnstore_retention_unread_ms=60_000)
    for value in (b"a", b"b", b"c"):
        log.put(value)
    log.commit("quick", 3)
    log.commit("slow", 1)
    clock.advance(2_000)
    assert log.run() == 1
    assert readable(log, log.partition) == [b"b", b"c"]
    clock.advance(58_000)
    assert log.run() == 0
    clock.advance(1)
    assert log.run() == 2
    assert log.bounds == (3, 3, 3)


def test_what_a_group_has_not_read_stays_at_any_age_though_the_group_is_away_for_longer_than_offsets(log, clock):
    log.configure(retention_ms=1_000, txnstore_retention_unread_ms=-1)
    for value in (b"a", b"b", b"c"):
        log.put(value)
    log.commit("away", 1)
    for _ in range(10):
        clock.advance(8 * 86_400_000)
        log.run()
        expire_offsets(log.store, groups_max=100)
    assert readable(log, log.partition) == [b"b", b"c"]
    log.store.write(lambda connection: delete_group(connection, "away"))
    assert log.run() == 2


def test_what_groups_have_read_is_found_page_after_page_and_our_own_groups_count_for_nothing(log, clock, monkeypatch):
    for name in ("_COMMITTED", "_PARTITIONS"):
        monkeypatch.setattr(retention, name, getattr(retention, name).limit(1))
    monkeypatch.setattr(retention, "LISTED_MAX", 1)
    later = Log(log.store, clock, retention_ms=1_000, txnstore_retention_unread_ms=-1)
    later.put(b"a")
    later.put(b"b")
    for group_id, of, offset in (("a", log, 0), ("a", later, 1), ("b", later, 2)):
        of.commit(group_id, offset)
    later.commit(f"{INTERNAL_GROUP_PREFIX}reader", 0)
    clock.advance(2_000)
    assert later.run() == 1


def test_groups_hold_nothing_back_where_the_topic_does_not_say_so(log, clock):
    log.configure(retention_ms=1_000)
    log.put(b"a")
    log.commit("slow", 0)
    clock.advance(1_001)
    assert log.run() == 1


class OneAway:
    """A cluster of two databases, one of which is away."""

    def __init__(self, store):
        self._store = store

    def has_learned_of_others(self):
        return False

    def stores(self, left_out):
        left_out[2] = StoreUnavailable("it is away")
        yield self._store

    def leaving_out(self, *_):
        return contextlib.nullcontext()

    def warn_of(self, left_out):
        assert list(left_out) == [2]


def test_while_a_database_is_away_its_groups_may_have_read_nothing(log, clock):
    log.configure(retention_ms=1_000, txnstore_retention_unread_ms=60_000)
    log.put(b"a")
    log.commit("quick", 1)
    clock.advance(2_000)
    assert delete_expired_batches(log.store, cast(Any, OneAway(log.store)), batches_max=10) == 0
    assert log.run() == 1


@pytest.mark.slow_but_first
@pytest.mark.parametrize("config", [{"retention_ms": 0}, {"retention_ms": -1, "retention_bytes": 0}])
def test_a_long_backlog_goes_in_portions_the_oldest_partition_first(log, clock, monkeypatch, config):
    monkeypatch.setattr(retention, "ROWS_AT_ONCE", 3)
    log.configure(**config)
    log.put(b"younger partition has the lower id")
    clock.advance(-1_000)
    for number in range(8):
        log.put(b"%d" % number, number=1)
    clock.advance(5_000)
    other = log.partition_id(log.name, 1)
    assert log.run(batches_max=1) == 3
    assert (stored(log, log.partition), stored(log, other)) == ([0], [3, 4, 5, 6, 7])
    # A portion of each in turn: none waits until all of another is gone.
    assert log.run(batches_max=4) == 4
    assert (stored(log, log.partition), stored(log, other)) == ([], [6, 7])
    assert log.run(batches_max=100) == 2
    log.assert_storage_is_true()


def test_what_an_interrupted_deletion_left_is_deleted_though_the_topic_keeps_everything(log, clock, monkeypatch):
    log.configure(retention_ms=-1)
    log.put(b"a")
    log.put(b"b")

    def refuse(*_):
        raise StoreReadOnly

    monkeypatch.setattr(deleting, "_delete_portion", refuse)
    delete_records(log.store, log.partition, 1)
    assert stored(log, log.partition) == [0, 1]
    monkeypatch.undo()
    assert log.run() == 1
    assert stored(log, log.partition) == [1]
    assert log.run() == 0
    log.assert_storage_is_true()


def test_a_batch_of_which_some_records_are_deleted_goes_as_a_whole_in_its_time(log, clock):
    log.configure(retention_ms=1_000)
    log.put(b"a", b"b", b"c")
    delete_records(log.store, log.partition, 2)
    assert log.run() == 0
    clock.advance(1_001)
    assert log.run() == 1
    assert log.bounds == (3, 3, 3)
    log.assert_storage_is_true()


def test_a_topic_whose_settings_nobody_can_read_keeps_everything_and_no_other_does(log, clock):
    damaged = Log(log.store, clock, retention_ms=1_000)
    log.configure(retention_ms=1_000)
    for each in (log, damaged):
        each.put(b"a")
    of_topic = topic_configs.c.topic_id == log.store.read(lambda c: get_topic(c, damaged.name)).topic_id
    log.store.write(lambda c: c.execute(update(topic_configs).where(of_topic).values(value="a week")))
    clock.advance(30 * 86_400_000)
    with pytest.raises(InvalidConfiguration, match=f"{damaged.name}.* retention.ms"):
        log.run()
    assert readable(log, log.partition) == []
    assert readable(log, damaged.partition) == [b"a"]


def test_a_topic_that_is_deleted_meanwhile_holds_up_nobody(log, clock, monkeypatch):
    log.configure(retention_ms=0, retention_bytes=0)
    log.put(b"a")
    other = Log(log.store, clock, retention_ms=0)
    other.put(b"b")
    clock.advance(1)
    found = retention._candidates

    def then_deleted(store, *arguments):
        candidates = list(found(store, *arguments))
        store.write(lambda c: delete_topic(c, log.name))
        return candidates

    monkeypatch.setattr(retention, "_candidates", then_deleted)
    assert log.run() == 1
    assert stored(other, other.partition) == []
    rows = select(partition_storage).where(partition_storage.c.partition_id == log.partition)
    assert log.store.read(lambda c: c.execute(rows).all()) == []


def test_what_topics_are_told_while_a_deletion_is_under_way_holds_at_once(log, clock, monkeypatch):
    log.configure(retention_ms=1_000)
    log.put(b"a")
    clock.advance(2_000)
    made = []
    found = retention._candidates

    def told_meanwhile(store, *arguments):
        log.configure(retention_ms=-1)
        # Of this one no settings were read.
        made.append(Log(store, clock, retention_ms=-1))
        made[0].write(made[0].name, 0, b"of long ago", timestamp_ms=0)
        return list(found(store, *arguments))

    monkeypatch.setattr(retention, "_candidates", told_meanwhile)
    assert log.run() == 0
    assert (stored(log, log.partition), stored(made[0], made[0].partition)) == ([0], [0])


@pytest.fixture
def before_start_moves(monkeypatch):
    """Do something once it has been found what goes, as long as somebody else may hold the head's lock."""

    def arrange(work):
        def found(*arguments, **options):
            through = expired_through(*arguments, **options)
            if through is not None and not done:
                done.append(through)
                work()
            return through

        done: list[int] = []
        monkeypatch.setattr(retention, "expired_through", found)
        return done

    return arrange


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"retention_ms": 1_000}, {"retention_ms": -1}),
        ({"retention_ms": 1_000}, {"txnstore_retention_unread_ms": -1}),
        ({"retention_ms": 1_000}, {"cleanup_policy": "compact"}),
        ({"retention_ms": -1, "retention_bytes": 0}, {"retention_bytes": 1_000_000}),
    ],
)
def test_what_a_topic_is_told_while_a_deletion_waits_for_the_head_holds(log, clock, before_start_moves, before, after):
    log.configure(**before)
    for value in (b"a", b"b", b"c"):
        log.put(value)
    clock.advance(2_000)
    done = before_start_moves(lambda: log.configure(**after))
    assert log.run() == 0
    assert (done, log.bounds, stored(log, log.partition)) == ([2], (0, 3, 3), [0, 1, 2])
    log.configure(**AS_USUAL, **before)
    assert log.run() == 3
    log.assert_storage_is_true()


@pytest.mark.parametrize("txnstore_url", ["postgresql"], indirect=True)
def test_and_so_does_what_it_is_told_while_the_deletion_waits_for_that_lock(log, clock, url, monkeypatch):
    """On SQLite nobody is told anything from then on: there the wait is for the whole database."""
    log.configure(retention_ms=1_000)
    log.put(b"a")
    clock.advance(2_000)

    def waited(connection, partition_ids):
        with open_store(url, clock=clock) as other:
            told = {"retention.ms": "-1"}
            other.write(lambda c: change_topic_configs(c, lock_topic_configs(c, log.name), told))
        return lock_heads(connection, partition_ids)

    monkeypatch.setattr(retention, "lock_heads", waited)
    assert log.run() == 0
    assert stored(log, log.partition) == [0]


def test_a_size_that_a_compaction_has_made_smaller_meanwhile_lets_less_go(log, before_start_moves):
    log.configure(cleanup_policy="compact,delete", min_cleanable_dirty_ratio=0, retention_ms=-1)
    for key in (b"a", b"b", b"c", b"d", b"d", b"d"):
        batch = encode([Record(b"v", key=key, timestamp_ms=log.clock.now_ms())])
        log.store.write(lambda c, batch=batch: append(c, [Append(log.partition, batch)]))
    sizes = select(record_batches.c.size_bytes).where(record_batches.c.partition_id == log.partition)
    (size_bytes,) = set(log.store.read(lambda c: c.execute(sizes).scalars().all()))
    log.configure(retention_bytes=3 * batch_bytes(size_bytes))
    before_start_moves(lambda: compact_partitions(log.store))
    log.run()
    assert stored(log, log.partition) == [0, 1, 2, 5]
    assert log.run() == 1
    assert stored(log, log.partition) == [1, 2, 5]
    log.assert_storage_is_true()


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("reset", "expected"), [("earliest", b"b"), ("error", KafkaError._AUTO_OFFSET_RESET)])
def test_a_group_that_fell_behind_goes_on_where_its_reset_says(log, clock, url, reset, expected):
    log.configure(retention_ms=1_000)
    log.put(b"a")
    log.commit("late", 0)
    clock.advance(2_000)
    log.put(b"b")
    assert log.run() == 1
    consumer = Consumer({"bootstrap.servers": url, "group.id": "late", "auto.offset.reset": reset})
    try:
        consumer.assign([TopicPartition(log.name, 0)])
        message = consumer.poll(60.0)
        assert message is not None
        error = message.error()
        assert (message.value() if error is None else error.code()) == expected
    finally:
        consumer.close()


def test_a_group_in_commit_order_keeps_what_began_before_its_place_and_was_committed_behind_it(log, clock):
    log.configure(retention_ms=1_000, txnstore_retention_unread_ms=-1)
    log.put(b"a")
    transaction = log.transaction()
    transaction.write(log.name, 0, b"b")
    log.put(b"c")
    transaction.end(commit=True)  # 3
    log.put(b"d")
    log.commit("quick", 5)
    committed = {log.partition: OffsetAndMetadata(3, offset_in_transaction=0)}
    log.store.write(lambda connection: commit_offsets(connection, GroupMembership("slow"), committed))
    further = {log.partition: OffsetAndMetadata(5, offset_in_transaction=0)}
    log.store.write(lambda connection: commit_offsets(connection, GroupMembership("the last by name"), further))
    clock.advance(2_000_000_000_000)
    assert log.run() == 1
    assert log.bounds == (1, 5, 5)
    committed = {log.partition: OffsetAndMetadata(4, offset_in_transaction=0)}
    log.store.write(lambda connection: commit_offsets(connection, GroupMembership("slow"), committed))
    assert log.run() == 3
    assert log.bounds == (4, 5, 5)

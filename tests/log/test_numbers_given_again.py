"""A number that a restored controller gives out again: what goes on for its old topic leaves the new one alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from sqlalchemy import func, insert, select

from tests.clients.consumer.log_writer import LogWriter
from tests.log.compacted_log import CompactedLog
from txnstore.db import portions as portions_module
from txnstore.db.opening import open_store
from txnstore.db.portions import Portions
from txnstore.db.schema import deleted_partitions, group_offsets, partition_storage, record_batches, sink_positions
from txnstore.errors import StoreBusy
from txnstore.groups.offsets import commit_offsets
from txnstore.log import compaction, deleting, retention
from txnstore.log.compaction import compact_portion
from txnstore.log.deleting import purge_deleted_partitions
from txnstore.log.partition_storage import count_stored
from txnstore.log.retention import delete_expired_batches, expired_through
from txnstore.log.topics import create_topic, delete_topic, get_topic
from txnstore.model import GroupMembership, OffsetAndMetadata

pytestmark = pytest.mark.takes_more_rights("sets the numbers of a store back")


@pytest.fixture(autouse=True)
def one_row_at_once(monkeypatch):
    """However fast the machine is."""
    monkeypatch.setattr(portions_module, "ROWS_AT_ONCE", 1)
    monkeypatch.setattr(Portions, "_adapt", lambda *_: None)


@pytest.fixture
def other(url, clock, store):
    """Somebody else's store on the same database."""
    del store
    with open_store(url, clock=clock) as opened:
        yield opened


def count(store, table):
    return store.read(lambda connection: connection.execute(select(func.count()).select_from(table)).scalar_one())


def make_with_numbers_of(store, topic, name, **config):
    """Make a topic as a controller does that was restored to before the other one was made."""

    def work(connection):
        for table, column, key in (
            ("topics", "topic_id", topic.topic_id),
            ("partitions", "partition_id", topic.partition_ids[0]),
        ):
            store.backend.set_next_key(connection, store.schema, table, column, key)
        return create_topic(connection, name, config=config)

    made = store.write(work)
    assert (made.topic_id, made.partition_ids) == (topic.topic_id, topic.partition_ids[:1])


def read_by_everybody(store, partition_id):
    """Let a group and a streaming query have read something of the partition."""
    offsets = {partition_id: OffsetAndMetadata(1)}
    position = {"group_id": "g", "partition_id": partition_id, "in_commit_order": False, "next_offset": 1}
    store.write(lambda connection: commit_offsets(connection, GroupMembership("readers"), offsets))
    store.write(lambda connection: connection.execute(insert(sink_positions), [{**position, "sink_id": "query:1"}]))


TABLES = (record_batches, group_offsets, sink_positions)


class Meanwhile:
    """At some moment of a purge another one ends, and the number is given to a topic with rows of its own."""

    def __init__(self, store, other):
        self.store, self.other = store, other
        self.log = LogWriter(store)
        self.topic = self.log.topic("old")
        self.came = False
        for value in (b"0", b"1", b"2"):
            self.log.write("old", 0, value)
        read_by_everybody(store, *self.topic.partition_ids)
        store.write(lambda connection: delete_topic(connection, "old"))

    def come(self):
        if self.came:
            return
        self.came = True
        assert purge_deleted_partitions(self.other, rows_max=100)
        assert [count(self.store, table) for table in (*TABLES, deleted_partitions)] == [0, 0, 0, 0]
        make_with_numbers_of(self.other, self.topic, "new")
        for value in (b"0", b"1", b"2", b"3"):
            self.log.write("new", 0, value)
        read_by_everybody(self.other, *self.topic.partition_ids)

    def assert_all_is_there(self):
        assert self.came
        assert [count(self.store, table) for table in TABLES] == [4, 1, 1]


@pytest.fixture
def meanwhile(store, other):
    return Meanwhile(store, other)


def test_a_purge_that_waits_for_its_next_turn_deletes_nothing_of_a_topic_that_has_the_number_by_then(meanwhile):
    assert purge_deleted_partitions(meanwhile.store, rows_max=1) == 1
    assert meanwhile.store in deleting._unfinished
    meanwhile.come()
    # Without anything deleted it would not look.
    meanwhile.log.topic("another")
    meanwhile.store.write(lambda connection: delete_topic(connection, "another"))
    purge_deleted_partitions(meanwhile.store, rows_max=100)
    meanwhile.assert_all_is_there()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("portion", [0, 1])
def test_nor_does_one_that_is_under_way(meanwhile, monkeypatch, portion):
    delete_portion, begun = deleting._Purge.delete_portion, []
    write = Portions.write

    def write_behind_the_other(portions, store, work, **options):
        deletes = isinstance(work, partial) and getattr(work.func, "__func__", None) is delete_portion
        if deletes and store is meanwhile.store:
            begun.append(work)
            if len(begun) == portion + 1:
                meanwhile.come()
        return write(portions, store, work, **options)

    monkeypatch.setattr(Portions, "write", write_behind_the_other)
    purge_deleted_partitions(meanwhile.store, rows_max=100)
    meanwhile.assert_all_is_there()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("moment", [0, 1])
def test_nor_does_one_that_has_found_what_was_read_of_it(meanwhile, monkeypatch, moment):
    """What queries have read, and then what groups have committed."""
    delete_each, begun = deleting._delete_each, []

    def delete_behind_the_other(statement, keys, connection):
        begun.append(keys)
        return delete_each(statement, keys, connection)

    def write_behind_the_other(portions, store, work, **options):
        is_it = store is meanwhile.store and isinstance(work, partial) and work.func is delete_behind_the_other
        if is_it and len(begun) == moment:
            meanwhile.come()
        return write(portions, store, work, **options)

    write = Portions.write
    monkeypatch.setattr(deleting, "_delete_each", delete_behind_the_other)
    monkeypatch.setattr(Portions, "write", write_behind_the_other)
    purge_deleted_partitions(meanwhile.store, rows_max=100)
    meanwhile.assert_all_is_there()


def test_nobody_strikes_a_number_off_while_a_portion_is_deleted_by_it(meanwhile, monkeypatch):
    delete_portion, refused = deleting._Purge.delete_portion, []
    strike_off = partial(deleting._strike_off, list(meanwhile.topic.partition_ids))
    limits = replace(meanwhile.other.limits, lock_timeout_ms=50)

    def delete_and_stay(purge, portions, connection):
        deleted = delete_portion(purge, portions, connection)
        if deleted:
            with pytest.raises(StoreBusy):
                meanwhile.other.write(strike_off, retry_timeout_ms=0, limits=limits)
            refused.append(purge)
        return deleted

    monkeypatch.setattr(deleting._Purge, "delete_portion", delete_and_stay)
    purge_deleted_partitions(meanwhile.store, rows_max=100)
    assert len(refused) == 3


@pytest.mark.slow_but_first
@pytest.mark.parametrize("pages", [1, 2, 3, 4])
def test_a_pass_of_the_compaction_deletes_nothing_of_a_topic_that_has_the_number_by_then(
    store, other, clock, monkeypatch, pages
):
    old = CompactedLog(store, clock)
    topic = store.read(lambda connection: get_topic(connection, old.name))
    for number in range(3):
        old.put((b"a", b"%d" % number))
    for _ in range(pages):
        compact_portion(store, batches_max=1)
    assert store in compaction._unfinished
    store.write(lambda connection: delete_topic(connection, old.name))
    assert purge_deleted_partitions(other, rows_max=100)
    make_with_numbers_of(other, topic, "new", **topic.config)
    for key in (b"a", b"b"):
        old.put((key, b"new"))
    count_stored(other, old.partition)
    while store in compaction._unfinished:
        compact_portion(store, batches_max=1)
    assert old.read() == [(0, b"a", b"new"), (1, b"b", b"new")]
    assert old.rows(partition_storage)[0].unfinished_pass is None
    assert old.run() == 0


def test_the_retention_deletes_nothing_of_a_topic_that_has_the_number_by_then(store, other, clock, monkeypatch):
    log = LogWriter(store)
    topic = store.write(lambda connection: create_topic(connection, "old", config={"retention.ms": "1000"}))
    for number in range(3):
        log.write("old", 0, b"%d" % number, timestamp_ms=clock.now_ms())
    clock.advance(2_000)

    def found_before(*arguments, **options):
        through = expired_through(*arguments, **options)
        if not came:
            came.append(through)
            store.write(lambda connection: delete_topic(connection, "old"))
            assert purge_deleted_partitions(other, rows_max=100)
            make_with_numbers_of(other, topic, "new", **topic.config)
            for _ in range(3):
                log.write("new", 0, b"of now", timestamp_ms=clock.now_ms())
        return through

    came: list[int | None] = []
    monkeypatch.setattr(retention, "expired_through", found_before)
    assert delete_expired_batches(store, batches_max=100) == 0
    assert came
    assert count(store, record_batches) == 3

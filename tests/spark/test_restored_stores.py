"""A query whose checkpoint is ahead of its store, because that was restored to an earlier state."""

from __future__ import annotations

import json
from functools import partial

import pytest
from sqlalchemy import delete, insert, select

from tests.spark.source_log import SourceLog
from tests.spark.source_queries import Pipeline
from txnstore.db.schema import metadata, sink_batches, sink_inputs, sink_positions
from txnstore.errors import ProducerFenced
from txnstore.groups.offsets import commit_offsets, read_offsets
from txnstore.model import GroupMembership, OffsetAndMetadata

MISSING = "batch 2 of the query comes after batch 0 in this store"


@pytest.fixture
def log(store):
    return SourceLog(store)


@pytest.fixture(params=["offset", "commit"])
def driver(log, request):
    return partial(Pipeline, log, transactional_id="pipeline", **{"txnstore.delivery.order": request.param})


def backup(store):
    """Return what every table holds."""

    def work(connection):
        stored = {table: [each for each in table.c if each.computed is None] for table in metadata.sorted_tables}
        return {table: connection.execute(select(*columns)).mappings().all() for table, columns in stored.items()}

    return store.read(work)


def restore(store, rows):
    def work(connection):
        for table in reversed(metadata.sorted_tables):
            connection.execute(delete(table))
        for table in metadata.sorted_tables:
            if rows[table]:
                connection.execute(insert(table), [dict(row) for row in rows[table]])

    store.write(work)


def restored(log, query):
    """Bring the store back to where it was before the query's second batch."""
    log.plain(0, b"a")
    assert query.batch() == [b"a"]
    before = backup(log.store)
    log.plain(0, b"b", b"c")
    assert query.batch() == [b"b", b"c"]
    restore(log.store, before)
    query.output.clear()
    query.restart()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("group", ["group", None])
def test_what_came_after_the_restore_is_not_left_out_below_the_checkpoint(log, driver, group):
    query = driver(**({} if group else {"kafka.group.id": None, "startingOffsets": "earliest"}))
    restored(log, query)
    log.plain(0, b"x", b"y", b"z")
    with pytest.raises(ProducerFenced, match=MISSING):
        query.batch()
    query.options |= {"kafka.group.id": log.name, "startingOffsets": "group"}
    query.begin_anew()
    # Nobody has committed for the group of a query that has had none.
    assert query.batch() == ([] if group else [b"a"]) + [b"x", b"y", b"z"]


def test_a_partition_that_has_lost_nothing_takes_no_other_along(log, driver):
    query = driver()
    restored(log, query)
    log.plain(0, b"x", b"y", b"z")
    log.plain(1, b"q")
    with pytest.raises(ProducerFenced, match=MISSING):
        query.batch()
    query.begin_anew()
    assert sorted(query.batch()) == [b"q", b"x", b"y", b"z"]


def test_a_query_that_does_not_fail_on_data_loss_goes_on_and_says_what_is_missing(log, driver, caplog):
    query = driver(failOnDataLoss="false")
    restored(log, query)
    log.plain(0, b"x", b"y", b"z")
    assert query.batch() == [b"z"]
    (warning,) = caplog.records
    assert warning.event == "sink_batches_missing"
    assert query.write_down() is False
    log.plain(0, b"d")
    assert query.batch() == [b"d"]
    assert len(caplog.records) == 1


def test_a_batch_that_was_planned_before_the_restore_is_written(log, driver):
    query = driver()
    log.plain(0, b"a")
    assert query.batch() == [b"a"]
    before = backup(log.store)
    log.plain(0, b"b")
    assert query.batch() == [b"b"]
    restore(log.store, before)
    log.plain(0, b"x")
    # Spark has not taken note that its last batch is over.
    query.committed -= 1
    query.restart()
    assert query.sink() == [b"x"]


@pytest.fixture
def in_offset_order(log):
    """A query that a transaction may hold up: at the end of a partition of its checkpoint nothing is to be read."""
    return partial(Pipeline, log, transactional_id="pipeline", **{"txnstore.delivery.order": "offset"})


def restored_with_open_transaction(log, query):
    """Bring the store back to where a transaction in the other partition was open that the checkpoint is past."""
    log.plain(0, b"a")
    log.plain(1, b"A")
    assert query.batch() == [b"a", b"A"]
    open_then = log.begin(1, b"T")
    before = backup(log.store)
    log.commit(open_then, 1)
    log.plain(1, b"B")
    assert query.batch() == [b"T", b"B"]
    restore(log.store, before)
    query.output.clear()
    query.restart()
    log.plain(0, b"b")
    log.plain(1, b"x", b"y", b"z", b"past the checkpoint")
    return open_then


def test_a_partition_that_is_held_up_below_the_checkpoint_shows_what_is_missing(log, in_offset_order):
    query = in_offset_order()
    open_then = restored_with_open_transaction(log, query)
    with pytest.raises(ProducerFenced, match=MISSING):
        query.batch()
    log.abort(open_then, 1)
    query.begin_anew()
    assert query.batch() == [b"b", b"x", b"y", b"z", b"past the checkpoint"]


def test_a_partition_that_has_grown_exactly_to_the_checkpoint_shows_what_is_missing(log, driver):
    query = driver()
    restored(log, query)
    log.plain(0, b"x", b"y")
    log.plain(1, b"q")
    with pytest.raises(ProducerFenced, match=MISSING):
        query.batch()
    query.begin_anew()
    assert query.batch() == [b"x", b"y", b"q"]


def test_a_start_commits_nothing_where_nothing_is_to_be_read(log, driver):
    query = driver()
    log.plain(0, b"a")
    log.plain(1, b"x")
    assert query.batch() == [b"a", b"x"]
    position = OffsetAndMetadata(0, offset_in_transaction=0 if query.reader._options.in_commit_order else None)
    of_second = {log.partition_ids[1]: position}
    # Somebody has set it back by hand.
    log.store.write(lambda connection: commit_offsets(connection, GroupMembership(log.name), of_second))
    query.restart()
    log.plain(0, b"b")
    assert query.batch() == [b"b"]
    found = log.store.read(partial(read_offsets, group_id=log.name, partition_ids=log.partition_ids)).offsets
    assert [found[partition_id].offset for partition_id in log.partition_ids] == [2, 0]


def test_a_batch_that_is_planned_twice_after_a_start_has_the_same_parts(log, driver):
    query = driver()
    assert query.batch() == []
    log.plain(0, b"a")
    query.restart()
    assert query.write_down()
    planned = [query.reader.partitions(query.start(), json.loads(query.written[-1])) for _ in range(2)]
    assert [[part.wanted.partition_id for part in parts] for parts in planned] == [list(log.partition_ids)] * 2
    assert query.sink() == [b"a"]
    query.committed += 1
    log.plain(0, b"b")
    assert query.write_down()
    (part,) = query.reader.partitions(query.start(), json.loads(query.written[-1]))
    assert part.wanted.partition_id == log.partition_ids[0]


def restored_to_before_the_first_batch(log, query):
    before = backup(log.store)
    for value in (b"a", b"b", b"c"):
        log.plain(0, value)
        assert query.batch() == [value]
    restore(log.store, before)
    query.output.clear()
    query.restart()
    log.plain(0, b"w", b"x", b"y", b"z")


def test_a_store_from_before_the_first_batch_leaves_nothing_out(log, driver):
    query = driver()
    restored_to_before_the_first_batch(log, query)
    with pytest.raises(ProducerFenced, match="batch 3 of the query is the first one that this store knows"):
        query.batch()
    query.begin_anew()
    assert query.batch() == [b"w", b"x", b"y", b"z"]


@pytest.mark.parametrize("group", ["group", None])
def test_a_store_from_before_the_first_batch_is_told_of_where_the_query_goes_on(log, driver, caplog, group):
    """It is told to, or without a group nothing says whether the store has forgotten the query."""
    without = {"kafka.group.id": None, "startingOffsets": "earliest"}
    query = driver(**({"failOnDataLoss": "false"} if group else without))
    restored_to_before_the_first_batch(log, query)
    assert query.batch() == [b"z"]
    (warning,) = caplog.records
    assert warning.event == "sink_batches_missing"
    log.plain(0, b"d")
    assert query.batch() == [b"d"]
    assert len(caplog.records) == 1


def test_a_query_that_this_store_has_forgotten_goes_on_where_its_group_is(log, driver, caplog):
    query = driver()
    log.plain(0, b"a")
    assert query.batch() == [b"a"]
    forgotten = (delete(table) for table in (sink_batches, sink_positions, sink_inputs))
    log.store.write(lambda connection: [connection.execute(each) for each in forgotten])
    log.plain(0, b"b")
    assert query.batch() == [b"b"]
    assert [each.event for each in caplog.records] == ["sink_batches_missing"]

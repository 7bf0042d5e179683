"""A query whose checkpoint is ahead of its store, because that was restored to an earlier state."""

from __future__ import annotations

from functools import partial

import pytest
from sqlalchemy import delete, insert, select

from tests.spark.source_log import SourceLog
from tests.spark.source_queries import Pipeline
from txnstore.db.schema import metadata
from txnstore.errors import ProducerFenced

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

"""Spark's sink as a role: who commits for no group needs no right on what belongs to groups."""

from __future__ import annotations

import pytest

from txnstore.db.opening import open_store
from txnstore.errors import PermissionDenied
from txnstore.log.topics import get_topic
from txnstore.spark.sink_coordination import decide
from txnstore.spark.sink_inputs import NO_GROUP, SinkInput, note_inputs
from txnstore.spark.sink_run import run_of_query


@pytest.fixture
def batch_of(shop):
    """Decide a query's first batch as a role."""
    opened = []

    def batch_of(role, group_id, *, from_group=False):
        store = open_store(shop.url(role), create=False)
        opened.append(store)
        (partition_id,) = store.read(lambda connection: get_topic(connection, "others")).partition_ids
        query_id = f"{role}-{group_id}"
        note_inputs(store, [SinkInput(query_id, "run", 0, group_id, partition_id, 0, 1, from_group=from_group)])
        return decide(store, run_of_query(query_id, "run"), 0, ())

    yield batch_of
    for store in opened:
        store.close()


def test_a_writer_commits_for_no_group_and_who_may_read_as_well_for_one(batch_of):
    assert batch_of("writer", NO_GROUP)
    with pytest.raises(PermissionDenied):
        batch_of("writer", "sink-group", from_group=True)
    assert batch_of("worker", "sink-group", from_group=True)

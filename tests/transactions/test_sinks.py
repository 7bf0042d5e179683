"""What a query has committed is remembered for as long as a replay may come, and then goes as a whole."""

from __future__ import annotations

import uuid
from dataclasses import replace
from functools import partial

import pytest
from sqlalchemy import func, select

from tests.tools.made_up_input import assert_sound_but_for_input
from tests.transactions.bench import bench_on
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.portions import Portions
from txnstore.db.schema import sink_batches, sink_inputs, sink_positions, sink_runs
from txnstore.errors import ProducerFenced
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.log.deleting import purge_deleted_partitions
from txnstore.log.topics import delete_topic, names_of_partitions
from txnstore.model import Record
from txnstore.spark.sink_coordination import decide, last_batch, open_writer
from txnstore.spark.sink_inputs import SinkInput, note_inputs
from txnstore.spark.sink_run import run_of_job, run_of_query
from txnstore.transactions.recovery import abort_timed_out
from txnstore.transactions.sinks import forget_silent_sinks
from txnstore.transactions.writers import append_as_writer

DAY_MS = 86_400_000
TABLES = (sink_batches, sink_runs, sink_inputs, sink_positions)


class Query:
    """A streaming query that reads one partition and writes into another."""

    def __init__(self, bench):
        self.bench = bench
        self.query_id = uuid.uuid4().hex
        self.run_id = uuid.uuid4().hex
        self.read_offset = 0

    @property
    def run(self):
        return run_of_query(self.query_id, self.run_id)

    def note(self, batch_id):
        """Note what the batch reads, as a task does before it reads."""
        source, start = self.bench.partition_ids[0], self.read_offset
        note_inputs(
            self.bench.store, [SinkInput(self.query_id, self.run_id, batch_id, "group", source, start, start + 5)]
        )

    def write(self, batch_id):
        """Write as a task does; return its writer's id, or None: the batch is known."""
        writer = open_writer(self.bench.store, self.run, batch_id)
        if writer is None:
            return None
        batch = encode([Record(b"a")], producer=writer.identity, base_sequence=0, is_transactional=True)
        append_as_writer(self.bench.store, writer, [Append(self.bench.partition_ids[1], batch)], report=True)
        return writer.writer_id

    def batch(self, batch_id):
        """Write a batch; return whether it was new."""
        self.note(batch_id)
        writer_id = self.write(batch_id)
        is_new = decide(self.bench.store, self.run, batch_id, [] if writer_id is None else [writer_id])
        self.read_offset += 5 if is_new else 0
        return is_new

    @property
    def last(self):
        return self.bench.store.read(partial(last_batch, sink_id=self.run.sink_id))


@pytest.fixture
def bench(store, clock):
    store.write(lambda connection: change_store_settings(connection, {"txnstore.sink.retention.ms": str(30 * DAY_MS)}))
    return bench_on(store, clock)


@pytest.fixture
def query(bench):
    return Query(bench)


def counts(store):
    return [
        store.read(lambda connection, of=table: connection.execute(select(func.count()).select_from(of)).scalar_one())
        for table in TABLES
    ]


def test_a_replay_is_recognised_until_the_query_has_been_silent_for_its_retention(bench, query, clock):
    for batch_id in range(3):
        assert query.batch(batch_id)
    # What the last batch has read stays as long.
    assert counts(bench.store) == [3, 1, 1, 1]
    clock.advance(30 * DAY_MS - 1)
    assert forget_silent_sinks(bench.store) == 0
    assert counts(bench.store) == [3, 1, 1, 1]
    query.read_offset -= 5
    assert not query.batch(2)
    clock.advance(1)
    assert forget_silent_sinks(bench.store) == 1
    # What the replay has noted is a millisecond old.
    assert counts(bench.store) == [0, 0, 1, 0]
    assert forget_silent_sinks(bench.store) == 0
    # Whoever goes on is a new run of a query that nothing is known of.
    query.read_offset += 5
    assert query.batch(3)
    assert query.last == 3
    assert_sound_but_for_input(bench.store)


def test_each_batch_lets_its_query_be_remembered_for_longer_and_no_other_one(bench, query, clock):
    other = Query(bench)
    assert query.batch(0)
    assert other.batch(0)
    clock.advance(20 * DAY_MS)
    assert query.batch(1)
    clock.advance(10 * DAY_MS)
    assert forget_silent_sinks(bench.store) == 1
    assert (query.last, other.last) == (1, None)


def test_a_query_whose_transaction_is_open_is_kept(bench, query, clock):
    assert query.batch(0)
    clock.advance(31 * DAY_MS)
    query.note(1)
    writer_id = query.write(1)
    assert forget_silent_sinks(bench.store) == 0
    assert decide(bench.store, query.run, 1, [writer_id])
    assert query.last == 1
    clock.advance(31 * DAY_MS)
    query.write(2)
    clock.advance(DAY_MS)
    assert len(abort_timed_out(bench.store)) == 1
    assert forget_silent_sinks(bench.store) == 1


def test_runs_that_never_committed_anything_go_too(bench, query, clock):
    query.write(0)
    clock.advance(DAY_MS)
    abort_timed_out(bench.store)
    assert counts(bench.store)[1] == 1
    clock.advance(29 * DAY_MS)
    assert forget_silent_sinks(bench.store) == 1
    assert counts(bench.store) == [0, 0, 0, 0]


def test_a_version_that_its_query_repeats_is_remembered_as_of_that_query_for_as_long(bench, clock):
    def write(version, query_id="query"):
        run = replace(run_of_job(str(uuid.uuid4()), app_id="app"), query_id=query_id)
        return decide(bench.store, run, version, [])

    assert write(3)
    for _ in range(2):
        clock.advance(20 * DAY_MS)
        assert forget_silent_sinks(bench.store) == 0
        assert not write(3)
    with pytest.raises(ProducerFenced, match="whether this query wrote it is not known"):
        write(3, "another")
    clock.advance(30 * DAY_MS)
    assert forget_silent_sinks(bench.store) == 2


def test_whoever_keeps_everything_keeps_it(bench, query, clock):
    bench.store.write(lambda connection: change_store_settings(connection, {"txnstore.sink.retention.ms": "-1"}))
    assert query.batch(0)
    clock.advance(10_000 * DAY_MS)
    assert forget_silent_sinks(bench.store) == 0
    query.read_offset = 0
    assert not query.batch(0)


def test_what_was_noted_for_a_batch_that_nobody_decides_goes_once_that_must_be_over(bench, query, clock):
    query.note(0)
    clock.advance(7 * DAY_MS + 900_000 - 1)
    other = Query(bench)
    other.note(0)
    assert forget_silent_sinks(bench.store) == 0
    clock.advance(1)
    assert forget_silent_sinks(bench.store) == 1
    assert counts(bench.store) == [0, 0, 1, 0]


def test_somebody_with_no_time_forgets_one_at_a_time_and_each_as_a_whole(bench, query, clock):
    for each in (query, Query(bench), Query(bench)):
        assert each.batch(0)
    clock.advance(31 * DAY_MS)
    left: list[list[int]] = []
    while not left or left[-1][0]:
        assert forget_silent_sinks(bench.store, Portions(seconds=0.0)) == 1
        left.append(counts(bench.store))
    assert left == [[2, 2, 2, 2], [1, 1, 1, 1], [0, 0, 0, 0]]


def test_what_queries_have_read_of_a_deleted_topic_goes_with_it(bench, query):
    assert query.batch(0)
    query.note(1)
    (place,) = bench.store.read(lambda c: names_of_partitions(c, bench.partition_ids[:1])).values()
    bench.store.write(lambda connection: delete_topic(connection, place.topic))
    assert purge_deleted_partitions(bench.store, rows_max=1_000) > 0
    assert counts(bench.store) == [1, 1, 0, 0]

"""Streams through a real Spark: whatever fails, the sink equals the source, exactly once.

What Spark's tasks do in a database is tried on both; which batches are written, dropped and refused on one, for the
rules of it are shown on both without a Spark: `test_sink_coordination.py`.
"""

from __future__ import annotations

import shutil

import pytest
from pyspark.errors import PySparkException, StreamingQueryException

from tests.clients.steps import PATIENCE_SECONDS
from tests.databases import on_sqlite_alone
from tests.spark.sink_pipeline import GROUP, check, fill, finish, make_topics, read, start
from tests.spark.sink_steps import SteppedDataSource, Steps
from txnstore import Consumer, Producer, TopicPartition
from txnstore.db.opening import open_store
from txnstore.model import IsolationLevel

pytestmark = pytest.mark.slow

COUNT = 200
#: Three batches: with what is aborted and the ends of transactions there are twice as many offsets as records.
PER_BATCH = 160


@pytest.fixture
def pipeline(url, spark):
    """The URL of a store with something to read."""
    spark.dataSource.register(SteppedDataSource)
    make_topics(url)
    fill(url, 0, COUNT)
    return url


@pytest.fixture
def steps(tmp_path):
    return Steps(tmp_path / "steps")


def batches(query):
    return [progress["batchId"] for progress in query.recentProgress if progress["numInputRows"]]


def wasted(url):
    """How many records were written in vain."""
    with open_store(url) as store:
        found = (
            read(store, "out", isolation)
            for isolation in (IsolationLevel.READ_UNCOMMITTED, IsolationLevel.READ_COMMITTED)
        )
        every, committed = (sum(map(len, records.values())) for records in found)
    return every - committed


def test_tasks_that_fail_or_are_killed_are_tried_again_and_leave_nothing(spark, pipeline, steps, tmp_path):
    steps.at("before-write", 0, "kill")
    steps.at("mid-write", 0, "raise")
    steps.at("mid-write", 1, "kill")
    steps.at("after-write", 1, "raise")
    steps.at("after-write", 2, "kill")
    query = start(spark, pipeline, tmp_path / "checkpoint", steps=steps, per_batch=PER_BATCH)
    finish(query)
    assert query.exception() is None
    assert len(steps.taken()) == 5
    assert batches(query)[:3] == [0, 1, 2]
    assert wasted(pipeline) > 0
    check(pipeline)


@pytest.mark.parametrize(
    ("txnstore_url", "action", "order"),
    [("sqlite", "raise", "offset"), ("postgresql", "kill", "commit")],
    indirect=["txnstore_url"],
)
def test_a_driver_that_fails_after_its_decision_aborts_nothing_and_drops_the_replay(
    spark, pipeline, steps, tmp_path, action, order
):
    steps.at("after-decision", 1, action)
    query = start(spark, pipeline, tmp_path / "checkpoint", steps=steps, per_batch=PER_BATCH, order=order)
    with pytest.raises(StreamingQueryException):
        finish(query)
    with open_store(pipeline) as store:
        decided = read(store, "out")
    again = start(spark, pipeline, tmp_path / "checkpoint", steps=steps, per_batch=PER_BATCH, order=order)
    finish(again)
    assert batches(again)[0] == 1, "Spark has not replayed the batch"
    with open_store(pipeline) as store:
        assert {number: records[: len(decided[number])] for number, records in read(store, "out").items()} == decided
    assert wasted(pipeline) == 0
    check(pipeline)


@on_sqlite_alone
def test_an_older_checkpoint_and_a_lost_one_write_nothing_twice(spark, pipeline, tmp_path):
    checkpoint, copy = tmp_path / "checkpoint", tmp_path / "copy"
    finish(start(spark, pipeline, checkpoint, per_batch=PER_BATCH))
    shutil.copytree(checkpoint, copy)
    fill(pipeline, COUNT, 150)
    finish(start(spark, pipeline, checkpoint, per_batch=PER_BATCH))
    check(pipeline)

    # The backup of yesterday; its next batches are cut otherwise than they were.
    fill(pipeline, COUNT + 150, 30)
    older = start(spark, pipeline, copy, per_batch=110)
    finish(older)
    assert older.exception() is None
    check(pipeline)

    fill(pipeline, COUNT + 180, 30)
    finish(start(spark, pipeline, tmp_path / "new", starting="group"))
    check(pipeline)


@on_sqlite_alone
def test_without_a_group_a_checkpoint_of_one_batch_before_is_refused_and_a_replay_is_dropped(
    spark, pipeline, steps, tmp_path
):
    checkpoint, copy = tmp_path / "checkpoint", tmp_path / "copy"
    finish(start(spark, pipeline, checkpoint, per_batch=10_000, group=None))
    shutil.copytree(checkpoint, copy)
    fill(pipeline, COUNT, 50)
    steps.at("after-decision", 1, "raise")
    with pytest.raises(StreamingQueryException, match="told to fail"):
        finish(start(spark, pipeline, checkpoint, steps=steps, per_batch=10_000, group=None))
    fill(pipeline, COUNT + 50, 50)
    with pytest.raises(StreamingQueryException, match=r"batch 1 .* but read something else then"):
        finish(start(spark, pipeline, copy, per_batch=10_000, group=None))
    finish(start(spark, pipeline, checkpoint, per_batch=10_000, group=None))
    with open_store(pipeline) as store:
        assert sum(map(len, read(store, "out").values())) == COUNT + 100
    assert wasted(pipeline) == 0


@on_sqlite_alone
def test_a_query_goes_on_within_a_transaction_where_its_group_is_and_a_consumer_behind_it(spark, url, tmp_path):
    """In commit order, and for Spark alone: what it keeps of that is the same whatever the database."""
    make_topics(url)
    settings = {"bootstrap.servers": url, "group.id": GROUP, "txnstore.delivery.order": "commit"}
    slow, plain = Producer({"bootstrap.servers": url, "transactional.id": "slow"}), Producer({"bootstrap.servers": url})

    def produce(producer, *values):
        for value in values:
            producer.produce("in", value, "key", partition=0)
        producer.flush()

    def consume(count):
        with Consumer({**settings, "auto.offset.reset": "earliest", "enable.auto.commit": False}) as consumer:
            consumer.assign([TopicPartition("in", 0)])
            messages = consumer.consume(count, PATIENCE_SECONDS)
            consumer.commit(message=messages[-1], asynchronous=False)
            return [message.value() for message in messages]

    slow.init_transactions()
    slow.begin_transaction()
    produce(slow, b"0", b"1", b"2")
    produce(plain, b"plain")
    slow.commit_transaction()
    assert consume(2) == [b"plain", b"0"]
    finish(start(spark, url, tmp_path / "checkpoint", starting="group", order="commit"))
    with open_store(url) as store:
        assert [value for records in read(store, "out").values() for _, value, *_ in records] == [b"1", b"2"]
    produce(plain, b"next")
    assert consume(1) == [b"next"]
    for producer in (slow, plain):
        producer.close()


@on_sqlite_alone
def test_a_topic_that_a_query_reads_twice_takes_two_groups(spark, pipeline, tmp_path):
    def read_as(group):
        options = {"url": pipeline, "subscribe": "in", "startingOffsets": "earliest", "kafka.group.id": group}
        return spark.readStream.format("txnstore").options(**options).load().select("value")

    def write(rows, name):
        writer = rows.writeStream.format("txnstore").trigger(availableNow=True)
        finish(writer.options(url=pipeline, topic="out", checkpointLocation=str(tmp_path / name)).start())

    with pytest.raises(StreamingQueryException, match=r"Give each \.load\(\) a kafka\.group\.id of its own"):
        write(read_as(GROUP).union(read_as(GROUP)), "refused")
    once = read_as(GROUP)
    write(once.union(once), "once")
    write(read_as("a").union(read_as("b")), "each")
    with open_store(pipeline) as store:
        assert sum(map(len, read(store, "out").values())) == 4 * COUNT


@on_sqlite_alone
def test_output_modes_that_would_write_results_again_are_refused(spark, pipeline, tmp_path):
    counted = (
        spark.readStream.format("txnstore")
        .option("url", pipeline)
        .option("subscribe", "in")
        .load()
        .groupBy("key")
        .count()
        .selectExpr("key", "cast(count as string) as value")
    )
    # Spark itself refuses the mode update: a data source in Python cannot say that it takes it.
    for mode, text in (("complete", 'it takes outputMode("append"), not "complete"'), ("update", "pdate")):
        writer = counted.writeStream.format("txnstore").outputMode(mode).trigger(availableNow=True)
        writer = writer.options(url=pipeline, topic="out", checkpointLocation=str(tmp_path / mode))
        with pytest.raises(PySparkException) as caught:
            finish(writer.start())
        assert text in str(caught.value)
    with open_store(pipeline) as store:
        assert read(store, "out") == {0: [], 1: []}

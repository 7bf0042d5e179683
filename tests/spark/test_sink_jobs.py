"""Batch writes through a real Spark: all or nothing, every column, and no password in anything that Spark shows.

On one database are tried what the sink decides, shown on both without a Spark: `test_sink_writer.py`.
"""

from __future__ import annotations

import contextlib
import io
import shutil

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as f

from tests.databases import on_sqlite_alone
from tests.spark.sink_pipeline import finish, make_topics, read
from tests.spark.sink_steps import SteppedDataSource, Steps
from txnstore.db.opening import open_store
from txnstore.log.topics import create_topic

pytestmark = pytest.mark.slow


@pytest.fixture
def store(url, spark):
    spark.dataSource.register(SteppedDataSource)
    make_topics(url)
    with open_store(url) as store:
        yield store


@pytest.fixture
def frame(spark):
    """100 rows in two tasks."""
    return spark.range(0, 100, 1, 2).selectExpr("cast(id % 5 as string) as key", "cast(id as string) as value")


def append(frame, url, **options):
    writer = frame.write.format("txnstore").mode("append").option("url", url)
    for name, value in options.items():
        writer = writer.option(name, value)
    writer.save()


def values(store, topic="out"):
    return sorted(int(record[1]) for records in read(store, topic).values() for record in records)


def test_every_column_arrives(spark, url, store):
    store.write(lambda connection: create_topic(connection, "other", partition_count=3))
    frame = spark.sql(
        """
        SELECT * FROM VALUES
          (CAST('k' AS BINARY), CAST('a' AS BINARY), 'other', 2,
           array(struct('h' AS key, CAST('1' AS BINARY) AS value)), TIMESTAMP '2026-03-01 12:00:00.123456', 7),
          (NULL, CAST('b' AS BINARY), 'other', 1, NULL, TIMESTAMP '1970-01-01 00:00:00', 8),
          (CAST('k' AS BINARY), NULL, 'out', 0, array(), TIMESTAMP '2026-03-01 12:00:00', 9)
        AS rows(key, value, topic, partition, headers, timestamp, offset)
        """
    )
    append(frame, url)
    noon_ms = 1_772_366_400_000
    assert read(store, "other") == {
        0: [],
        1: [(None, b"b", [], 0)],
        2: [(b"k", b"a", [("h", b"1")], noon_ms + 123)],
    }
    assert read(store, "out") == {0: [(b"k", None, [], noon_ms)], 1: []}


@on_sqlite_alone
def test_a_job_whose_task_fails_for_good_leaves_nothing_and_one_that_is_tried_again_everything(
    spark, frame, url, store, tmp_path
):
    steps = Steps(tmp_path / "steps")
    broken = frame.withColumn("value", f.expr("if(value = '99', raise_error('told to fail'), value)"))
    with pytest.raises(PySparkException, match="told to fail"):
        append(broken, url, topic="out")
    assert values(store) == []
    steps.at("mid-write", 0, "kill")
    frame.write.format("txnstore_stepped").mode("append").options(
        **{"url": url, "topic": "out", "test.folder": str(steps.folder)}
    ).save()
    assert list(steps.taken()) == ["mid-write-0"]
    assert values(store) == list(range(100))


@on_sqlite_alone
def test_a_named_version_is_written_once_also_by_foreach_batch(spark, frame, url, store, tmp_path):
    for _ in range(2):
        append(frame, url, topic="out", txnAppId="load", txnVersion="7")
    assert values(store) == list(range(100))
    append(frame, url, topic="in")

    def write(batch, batch_id):
        for topic in ("left", "right"):
            append(batch, url, topic=topic, txnAppId=f"{topic}-1", txnVersion=str(batch_id))

    def run(checkpoint):
        source = spark.readStream.format("txnstore").options(url=url, subscribe="in", startingOffsets="earliest").load()
        query = (
            source.select("key", "value")
            .writeStream.foreachBatch(write)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        finish(query)

    run(tmp_path / "checkpoint")
    # As if it had died before its batch was over for Spark, which runs that again.
    shutil.rmtree(tmp_path / "checkpoint" / "commits")
    run(tmp_path / "checkpoint")
    assert values(store, "left") == values(store, "right") == list(range(100))
    with pytest.raises(PySparkException, match="a txnAppId of its own"):
        run(tmp_path / "new")
    assert values(store, "left") == values(store, "right") == list(range(100))


@on_sqlite_alone
@pytest.mark.parametrize("mode", ["overwrite", "errorifexists", "ignore"])
def test_save_modes_that_a_log_has_not_are_refused(frame, url, store, mode):
    with pytest.raises(PySparkException, match=r"only ever appended to|mode"):
        frame.write.format("txnstore").mode(mode).options(url=url, topic="out").save()
    assert values(store) == []


@on_sqlite_alone
def test_a_mistake_is_told_before_anything_runs(frame, url, store):
    with pytest.raises(PySparkException, match="there is no option 'topicc'; did you mean 'topic'"):
        append(frame, url, topicc="out")
    with pytest.raises(PySparkException, match="neither an option 'topic' nor a column 'topic'"):
        append(frame, url)


def test_no_password_is_in_plans_or_errors(spark, frame, txnstore_postgresql_url):
    secret = "hunter2"
    url = txnstore_postgresql_url.replace("postgresql://", "postgresql://nobody:hunter2@", 1)
    if "@" in txnstore_postgresql_url:
        head, tail = txnstore_postgresql_url.split("@", 1)
        url = f"{head.rsplit('/', 1)[0]}/nobody:{secret}@{tail}"
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        with pytest.raises(PySparkException) as caught:
            append(frame, url, topic="out", **{"message.timeout.ms": "1000"})
        with pytest.raises(PySparkException) as typing_error:
            append(frame, url, topicc="out")
        plan = spark.read.format("txnstore").options(url=url, subscribe="in")
        with contextlib.suppress(PySparkException):
            plan.load().explain(extended=True)
    assert secret not in shown.getvalue() + str(caught.value) + str(typing_error.value)

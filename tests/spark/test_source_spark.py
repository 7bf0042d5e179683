"""The source in a real Spark: what it finds, plans, reads and says.

What its tasks read is the same on both databases, and so is a killed stream. What a stream plans is shown on both
without a Spark: `test_source_stream.py`, `test_source_commit_order.py`.
"""

from __future__ import annotations

import datetime as dt
import json
import signal
import subprocess
import sys
import uuid
from random import Random

import pytest
from pyspark.errors import PySparkException

from tests.databases import on_sqlite_alone
from tests.log.histories import Log
from tests.spark.source_log import SourceLog, consume_all
from txnstore.model import ControlType, Record

pytestmark = pytest.mark.slow

QUERY_TIMEOUT_SECONDS = 240


@pytest.fixture
def log(store):
    return SourceLog(store)


@pytest.fixture
def address(log):
    return address_of(log)


def address_of(log):
    return log.store.url.url.render_as_string(hide_password=False)


def with_options(reader, log, **given):
    options = {"kafka__bootstrap__servers": address_of(log), "subscribe": log.name, **given}
    return reader.format("txnstore").options(
        **{name.replace("__", "."): value for name, value in options.items() if value is not None}
    )


@pytest.fixture
def read(log):
    """A batch read, or a stream, of the topic."""
    return lambda reader, **given: with_options(reader, log, **given)


def stream_to_end(spark, log, checkpoint, **options):
    """Run a query until it has read what is there; return the new rows. It goes on from its checkpoint."""
    found = []

    def keep(frame, batch_id):
        found.append((batch_id, [tuple(row) for row in frame.collect()]))

    query = (
        with_options(spark.readStream, log, **options)
        .load()
        .selectExpr("partition", "offset", "cast(value as string)")
        .writeStream.foreachBatch(keep)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(QUERY_TIMEOUT_SECONDS)
    return found


@pytest.fixture
def run(spark, log, tmp_path):
    """Run the query of this test."""
    return lambda **options: stream_to_end(spark, log, tmp_path / "checkpoint", **options)


def test_a_batch_read_is_what_the_consumer_reads(spark, log, read, address):
    log.records(0, [Record(b"%d" % index, key=b"k", timestamp_ms=index, headers=[("h", b"1")]) for index in range(300)])
    log.records(1, [Record(None), Record(b"")])
    log.abort(log.begin(1, b"aborted"), 1)
    log.begin(1, b"open")
    rows = read(spark.read, includeHeaders="true", minPartitions="3").load().orderBy("partition", "offset").collect()
    messages = consume_all(address, log.name, 0, 1)
    messages.sort(key=lambda message: (message.partition(), message.offset()))
    assert [
        (row.topic, row.partition, row.offset, row.key, row.value, row.timestampType, row.headers) for row in rows
    ] == [
        (
            message.topic(),
            message.partition(),
            message.offset(),
            message.key(),
            message.value(),
            0,
            message.headers(),
        )
        for message in messages
    ]
    epoch = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - Spark gives times of the session's zone, which is UTC
    assert rows[7].timestamp - epoch == dt.timedelta(milliseconds=7)


@on_sqlite_alone
@pytest.mark.parametrize("pushed", ["true", "false"])
def test_filters_and_columns(spark, log, read, pushed):
    log.plain(0, *[b"%d" % index for index in range(10)])
    log.plain(1, b"x", timestamp_ms=5_000)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", pushed)
    try:
        frame = read(spark.read).schema("offset long, value binary, partition int, timestamp timestamp").load()
        assert frame.filter("partition = 0 AND offset IN (3, 5) AND value <> '5'").count() == 1
        late = frame.filter("timestamp >= timestamp_millis(4999)")
        assert [(row.partition, row.value) for row in late.collect()] == [(1, b"x")]
        plan = frame.filter("partition = 0")._jdf.queryExecution().executedPlan().toString()
        # What the source filters, Spark does not filter again.
        assert ("Filter (" in plan) == (pushed == "false")
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


@on_sqlite_alone
def test_plans_and_errors_show_no_password(spark, log, read):
    url = "postgresql://reader:pa55word@127.0.0.1:1/shop"
    for options in ({"kafka__bootstrap__servers": url}, {"kafka__bootstrap__servers": None, "url": url}):
        frame = read(spark.read, **options).load()
        execution = frame._jdf.queryExecution()
        assert "pa55word" not in execution.logical().toString() + execution.analyzed().toString()
        with pytest.raises(PySparkException) as caught:
            read(spark.read, **options, nonsense="1").load()
        assert "there is no option 'nonsense'" in str(caught.value)
        assert "pa55word" not in str(caught.value)


@on_sqlite_alone
def test_a_stream_is_read_in_batches_and_goes_on_from_its_checkpoint(log, run):
    log.plain(0, *[b"%d" % index for index in range(8)])
    log.plain(1, b"x", b"y")
    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "5"}
    found = run(**options)
    assert [(batch_id, len(rows)) for batch_id, rows in found] == [(0, 5), (1, 5)]
    assert run(**options) == []
    log.grow(3)
    log.plain(2, b"new")
    assert run(**options) == [(2, [(2, 0, "new")])]


@on_sqlite_alone
def test_where_latest_was_is_in_the_checkpoint(log, run, tmp_path):
    """The batch is in the checkpoint, but did not run: the next start reads it from where latest was then."""
    log.plain(0, b"before")
    assert [rows for _, rows in run()] == [[]]
    (written,) = (tmp_path / "checkpoint" / "offsets").glob("0")
    assert json.loads(written.read_text().splitlines()[2])["$from"] == {log.name: {"0": 1, "1": 0}}
    # As a kill before the batch's end leaves it.
    for file in (tmp_path / "checkpoint" / "commits").iterdir():
        file.unlink()
    log.plain(0, b"a")
    assert run() == [(0, []), (1, [(0, 1, "a")])]


@on_sqlite_alone
def test_what_is_lost_stops_the_query_with_a_text_that_says_what(log, run):
    log.plain(0, b"a")
    run(startingOffsets="earliest")
    log.plain(0, b"b", b"c")
    log.delete(0, 2)
    with pytest.raises(PySparkException, match=f"{log.name}-0 from offset 1 to 1 are gone.*failOnDataLoss"):
        run(startingOffsets="earliest")
    assert run(startingOffsets="earliest", failOnDataLoss="false") == [(1, [(0, 2, "c")])]


@on_sqlite_alone
def test_the_source_is_a_table_in_sql(spark, log, address):
    log.plain(0, b"a", b"b")
    view = f"settlements_{uuid.uuid4().hex}"
    spark.sql(f"CREATE TEMPORARY VIEW {view} USING txnstore OPTIONS (url '{address}', subscribe '{log.name}')")
    assert spark.sql(f"SELECT count(*) FROM {view}").collect()[0][0] == 2


#: Spark 4.3 sometimes ends both queries of a driver at once ("Illegal size of collection"): it is started again.
TRIES = 3
KILLED_IN_BATCH_0 = """
import os, signal, sys, threading
from pathlib import Path
from txnstore.spark.local_spark import local_session

folder, *arguments = sys.argv[1:]
# What the driver says that its Python is, Spark starts to look for data sources and to plan.
sys.executable = os.environ["PYSPARK_PYTHON"]
spark = local_session("killed", folder=Path(folder))
places = list(zip(arguments[::3], arguments[1::3], arguments[2::3]))
all_are_there = threading.Barrier(len(places))

def die(frame, batch_id):
    if frame.count() == 0 and batch_id == 0:
        all_are_there.wait(120)
        os.killpg(os.getpgid(0), signal.SIGKILL)

queries = []
for url, topic, checkpoint in places:
    stream = spark.readStream.format("txnstore").option("url", url).option("subscribe", topic).load()
    writer = stream.writeStream.foreachBatch(die).option("checkpointLocation", checkpoint)
    queries.append(writer.trigger(availableNow=True).start())
for query in queries:
    query.awaitTermination(120)
sys.exit(9)
"""


def test_a_driver_that_is_killed_in_its_first_batch_loses_nothing(
    txnstore_sqlite_store, txnstore_postgresql_store, spark, spark_environment, forking_python, tmp_path
):
    """One driver serves both databases: a Spark takes its time to start."""
    logs = {
        tmp_path / store.backend.name: SourceLog(store) for store in (txnstore_sqlite_store, txnstore_postgresql_store)
    }
    command = [sys.executable, "-c", KILLED_IN_BATCH_0, str(tmp_path)]
    environment = {**spark_environment, "PYSPARK_PYTHON": forking_python}
    for checkpoint, log in logs.items():
        log.plain(0, b"before")
        command += [address_of(log), log.name, str(checkpoint)]
    for _ in range(TRIES):
        child = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE)
        _, errors = child.communicate(timeout=240)
        if child.returncode == -signal.SIGKILL:
            break
    assert child.returncode == -signal.SIGKILL, errors.decode()[-2000:]
    for checkpoint, log in logs.items():
        assert [file.name for file in (checkpoint / "offsets").glob("[0-9]*")] == ["0"]
        assert list((checkpoint / "commits").glob("[0-9]*")) == []
        log.plain(0, b"a")
        log.plain(1, b"b")
        assert stream_to_end(spark, log, checkpoint) == [(0, []), (1, [(0, 1, "a"), (1, 0, "b")])]


COMMIT_ORDER = {"txnstore__delivery__order": "commit", "minPartitions": "3"}


@on_sqlite_alone
def test_in_commit_order_it_reads_what_the_consumer_reads_and_once(spark, store, tmp_path):
    """Restarts too, of a query that died with its batch: of places at a time, with transactions that are open then."""
    log, random = Log(store), Random(7)
    checkpoint, options = tmp_path / "checkpoint", {**COMMIT_ORDER, "startingOffsets": "earliest"}
    found = []
    for round_ in range(3):
        for number in range(60):
            value = b"%d-%d" % (round_, number)
            match random.randrange(6):
                case 0:
                    log.plain(value, b"and")
                case 1:
                    log.end(random.choice("AB"), random.choice([ControlType.COMMIT, ControlType.ABORT]))
                case _:
                    log.write(random.choice("ABC"), value)
        batches = stream_to_end(spark, log, checkpoint, **options, maxOffsetsPerTrigger="25")
        found += [row for _, rows in batches for row in rows]
        # As a kill before the last batch's end leaves it.
        last, rows = batches[-1]
        for file in (checkpoint / "commits").glob(f"*{last}*"):
            file.unlink()
        del found[len(found) - len(rows) :]
    found += [row for _, rows in stream_to_end(spark, log, checkpoint, **options) for row in rows]
    messages = consume_all(address_of(log), log.name, 0, order="commit")
    expected = [(message.offset(), (message.value() or b"").decode()) for message in messages]
    assert expected != sorted(expected)
    assert [(offset, value) for _, offset, value in found] == expected
    rows = with_options(spark.read, log, **COMMIT_ORDER).load().selectExpr("offset", "cast(value as string)").collect()
    assert list(map(tuple, rows)) == expected
    with pytest.raises(PySparkException, match=r"offsets in commit order.*txnstore\.delivery\.order=commit"):
        stream_to_end(spark, log, checkpoint)

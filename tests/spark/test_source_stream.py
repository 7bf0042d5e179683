"""Streams without Spark: the reader is asked in the order in which Spark asks, and killed where Spark may be."""

from __future__ import annotations

import json
import logging
import time
from types import SimpleNamespace

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows

from tests.spark.source_log import SourceLog
from tests.spark.source_queries import Pipeline, Query, all_again, reader, values_of
from txnstore.db.opening import open_store
from txnstore.errors import (
    InvalidConfiguration,
    OffsetOutOfRange,
    OutcomeUnknown,
    PermissionDenied,
    StoreReadOnly,
    UnknownTopicOrPartition,
    UnstableOffsetCommit,
)
from txnstore.groups.offsets import add_pending_offsets, commit_offsets, finish_pending_offsets
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.log.topics import create_topic, delete_topic
from txnstore.model import GroupMembership, OffsetAndMetadata, Record
from txnstore.spark import source_readers, source_snapshot, stores
from txnstore.spark.sink_inputs import note_inputs
from txnstore.spark.source_options import FROM
from txnstore.transactions.coordinator import TransactionCoordinator


@pytest.fixture
def log(store):
    return SourceLog(store)


def test_a_stream_reads_what_comes_and_then_waits(log):
    log.plain(0, b"a", b"b")
    query = Query(log, startingOffsets="earliest")
    assert query.batch() == [b"a", b"b"]
    assert query.batch() is None
    log.plain(1, b"c")
    assert query.batch() == [b"c"]
    assert query.reader.reportLatestOffset() == {"settlements": {"0": 2, "1": 1}}


@pytest.mark.parametrize("of", ["batch", "stream"])
def test_a_task_reads_no_other_store_than_the_one_it_was_planned_in(log, tmp_path, of):
    """A path of an SQLite file leads to another one on another host, with partitions of the same numbers."""
    log.plain(0, b"a")
    if of == "batch":
        parts = reader(log).partitions()
    else:
        query = Query(log, startingOffsets="earliest")
        assert query.write_down()
        parts = query.reader.partitions({}, json.loads(query.written[0]))
    with open_store(f"sqlite:///{tmp_path / 'there.db'}") as there:
        other = SourceLog(there)
        other.plain(0, b"b")
        its_reader = reader(other) if of == "batch" else Query(other, startingOffsets="earliest").reader
        with pytest.raises(InvalidConfiguration, match="the read was planned in another store"):
            list(its_reader.read(parts[0]))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("there", [True, False], ids=["records", "nothing"])
@pytest.mark.parametrize("killed", ["before_the_batch", "after_the_batch"])
def test_where_latest_was_is_kept_over_kills(log, there, killed):
    """The case in which Spark's own way loses records: it asks for the first offset again, and latest has moved."""
    if there:
        log.plain(0, b"before")
    query = Query(log)
    assert query.write_down()
    log.plain(0, b"a")
    if killed == "after_the_batch":
        assert query.run() == []
    query.restart()
    assert query.run() == []
    query.committed += 1
    log.plain(0, b"b")
    query.restart()
    assert query.batch() == [b"a", b"b"]


def test_a_batch_that_runs_again_reads_the_same(log):
    log.plain(0, b"a", b"b")
    query = Query(log, startingOffsets="earliest")
    query.write_down()
    first = query.run()
    log.plain(0, b"c")
    log.plain(1, b"d")
    query.restart()
    assert query.run() == first


def test_nothing_is_read_past_the_last_stable_offset_of_any_partition(log):
    query = Query(log, startingOffsets="earliest")
    one = log.begin(0, b"a", b"b")
    other = log.begin(1, b"x")
    log.plain(1, b"c")
    assert query.batch() == []
    log.commit(one, 0)
    assert query.batch() == [b"a", b"b"]
    log.abort(other, 1)
    assert query.batch() == [b"c"]
    assert query.batch() is None


def test_read_uncommitted_reads_what_is_open(log):
    query = Query(log, startingOffsets="earliest", kafka__isolation__level="read_uncommitted")
    log.begin(0, b"a")
    assert query.batch() == [b"a"]


def test_partitions_that_a_topic_gets_are_read_from_their_first_record_on(log):
    query = Query(log)
    assert query.batch() == []
    log.grow(3)
    log.plain(2, b"a")
    assert query.batch() == [b"a"]
    log.plain(2, b"b")
    assert query.batch() == [b"b"]


def test_topics_that_appear_are_read_from_their_first_record_on(log):
    query = Query(log, subscribe=None, subscribePattern="settle.*|refunds")
    log.plain(0, b"before")
    assert query.batch() == []
    log.store.write(lambda connection: create_topic(connection, "not-settlements"))
    refunds = SourceLog(log.store, "refunds", partition_count=1)
    refunds.plain(0, b"a")
    assert query.write_down()
    query.restart()
    assert [row[0] for row in query.run()] == ["refunds"]


def test_a_new_partition_that_loses_records_before_its_batch_runs_again_is_noticed(log):
    query = Query(log)
    query.batch()
    log.grow(3)
    log.plain(2, b"a", b"b")
    query.write_down()
    log.delete(2, 1)
    query.restart()
    with pytest.raises(OffsetOutOfRange, match=r"settlements-2 from offset 0 to 0 are gone.*failOnDataLoss=false"):
        query.run()


def test_a_rate_limit_is_shared_out_and_loses_nothing(log):
    log.plain(0, *[b"%d" % index for index in range(30)])
    log.plain(1, *[b"x%d" % index for index in range(10)])
    query = Query(log, startingOffsets="earliest", maxOffsetsPerTrigger="8")
    assert query.reader.getDefaultReadLimit() == ReadMaxRows(8)
    sizes, values = [], []
    while (found := query.batch()) is not None:
        sizes.append((sum(not value.startswith(b"x") for value in found), len(found)))
        values += found
    assert sizes[0] == (6, 8)
    assert [size for _, size in sizes] == [8] * 5
    assert len(set(values)) == len(values) == 40
    assert query.batch(ReadAllAvailable()) is None


def test_available_now_ends_at_what_was_there_and_takes_all_of_it(log):
    log.plain(0, *[b"%d" % index for index in range(10)])
    query = Query(log, startingOffsets="earliest", maxOffsetsPerTrigger="4", minOffsetsPerTrigger="3")
    query.reader.prepareForTriggerAvailableNow()
    values = []
    for _ in range(3):
        log.plain(0, b"late")
        log.plain(1, b"late")
        values += query.batch()
    assert values == [b"%d" % index for index in range(10)]
    assert query.batch() is None


def test_a_batch_waits_for_its_minimum_but_not_for_ever(log):
    now = [100.0]
    query = Query(log, lambda: now[0], startingOffsets="earliest", minOffsetsPerTrigger="3", maxTriggerDelay="1m")
    assert query.reader.getDefaultReadLimit() == ReadMinRows(3)
    assert query.batch() == []
    log.plain(0, b"a", b"b")
    assert query.batch() is None
    log.plain(1, b"c")
    assert query.batch() == [b"a", b"b", b"c"]
    log.plain(0, b"d")
    now[0] += 59
    assert query.batch() is None
    now[0] += 1
    assert query.batch() == [b"d"]
    log.plain(0, b"e")
    assert query.batch(ReadAllAvailable()) == [b"e"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("when", ["before_planning", "before_reading"])
def test_records_that_retention_took_are_an_error(log, when):
    log.plain(0, b"a")
    query = Query(log, startingOffsets="earliest")
    query.batch()
    log.plain(0, b"b", b"c", b"d")
    if when == "before_reading":
        query.write_down()
    log.delete(0, 3)
    with pytest.raises(
        OffsetOutOfRange, match="settlements-0 from offset 1 to 2 are gone: retention or delete_records"
    ):
        query.write_down() if when == "before_planning" else query.run()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("when", ["before_planning", "before_reading"])
def test_or_a_warning_if_the_query_can_live_with_it(log, when, caplog):
    log.plain(0, b"a")
    query = Query(log, startingOffsets="earliest", failOnDataLoss="false")
    query.batch()
    log.plain(0, b"b", b"c", b"d")
    if when == "before_reading":
        query.write_down()
    log.delete(0, 3)
    if when == "before_planning":
        query.write_down()
    with caplog.at_level(logging.WARNING, "txnstore"):
        assert [value for *_, value in query.run()] == [b"d"]
    if when == "before_reading":
        assert "settlements-0 from offset 1 to 2 are gone" in caplog.text
    query.committed += 1
    assert query.batch() is None


def test_all_of_a_batch_may_be_gone(log):
    log.plain(0, b"a", b"b")
    query = Query(log, startingOffsets="earliest", failOnDataLoss="false")
    query.write_down()
    log.plain(0, b"c")
    log.delete(0, 3)
    assert query.run() == []


def test_a_topic_that_was_deleted_is_lost(log):
    log.plain(0, b"a")
    query = Query(log, startingOffsets="earliest")
    query.batch()
    log.store.write(lambda connection: delete_topic(connection, log.name))
    with pytest.raises(OffsetOutOfRange, match="has read settlements-0, settlements-1, which it no longer can"):
        query.write_down()
    query.options["failOnDataLoss"] = "false"
    query.restart()
    assert query.batch() == []
    assert query.batch() is None


@pytest.mark.slow_but_first
@pytest.mark.parametrize("new", [[b"c"], [b"c", b"d", b"e"]], ids=["shorter", "longer"])
@pytest.mark.parametrize("order", ["offset", "commit"])
def test_a_topic_that_was_made_anew_is_no_continuation(log, order, new):
    log.plain(0, b"a", b"b")
    query = Query(log, startingOffsets="earliest", txnstore__delivery__order=order)
    query.batch()
    log.store.write(lambda connection: delete_topic(connection, log.name))
    again = SourceLog(log.store, log.name)
    again.plain(0, *new)
    with pytest.raises(OffsetOutOfRange, match="has read settlements, which it no longer can: it was deleted"):
        query.write_down()
    query.options["failOnDataLoss"] = "false"
    query.restart()
    assert query.batch() == new
    assert query.batch() is None
    again.plain(1, b"later")
    assert query.batch() == [b"later"]


def test_a_batch_of_a_topic_that_was_made_anew_before_it_ran_is_lost(log):
    log.plain(0, b"a", b"b")
    query = Query(log, startingOffsets="earliest")
    query.write_down()
    log.store.write(lambda connection: delete_topic(connection, log.name))
    again = SourceLog(log.store, log.name)
    again.plain(0, b"c", b"d", b"e")
    with pytest.raises(OffsetOutOfRange, match="settlements-0 is gone, with the records from offset 0 on"):
        query.run()
    query.options["failOnDataLoss"] = "false"
    query.restart()
    assert query.run() == []
    query.committed += 1
    assert query.batch() == [b"c", b"d", b"e"]


def test_what_an_older_version_has_written_down_names_no_topics(log):
    log.plain(0, b"a", b"b")
    query = Query(log, startingOffsets="earliest")
    query.batch()
    query.written[-1] = json.dumps({"settlements": {"0": 2, "1": 0}})
    assert query.batch() is None
    log.plain(0, b"c")
    assert query.batch() == [b"c"]


def commit(log, group, offsets, order="offset"):
    within = 0 if order == "commit" else None
    by_id = {
        log.partition_ids[partition]: OffsetAndMetadata(offset, offset_in_transaction=within)
        for partition, offset in offsets.items()
    }
    log.store.write(lambda connection: commit_offsets(connection, GroupMembership(group), by_id))


def test_a_stream_goes_on_where_its_group_is(log):
    log.plain(0, b"a", b"b", b"c")
    log.plain(1, b"x")
    commit(log, "g", {0: 2})
    query = Query(log, startingOffsets="group", kafka__group__id="g")
    # In the other partition the group has read nothing: nothing is left out.
    assert query.write_down()
    commit(log, "g", {0: 3, 1: 1})
    query.restart()
    assert [value for *_, value in query.run()] == [b"c", b"x"]


def test_a_stream_waits_for_a_transaction_that_holds_the_groups_offsets(log, monkeypatch):
    log.plain(0, b"a", b"b")
    producer = log.begin(1, b"x")
    held = {log.partition_ids[0]: OffsetAndMetadata(1)}
    log.store.write(lambda connection: add_pending_offsets(connection, GroupMembership("g"), held, producer))
    query = Query(log, startingOffsets="group", kafka__group__id="g")
    monkeypatch.setattr(source_snapshot, "STABLE_TIMEOUT_SECONDS", 0)
    with pytest.raises(UnstableOffsetCommit):
        query.write_down()
    monkeypatch.undo()
    pauses = []

    def finish(seconds):
        pauses.append(seconds)
        log.store.write(lambda c: finish_pending_offsets(c, ["g"], producer.producer_id, commit=True))

    # Its own `time`: whatever else of this process waits meanwhile is none of the query's pauses.
    monkeypatch.setattr(source_snapshot, "time", SimpleNamespace(monotonic=time.monotonic, sleep=finish))
    query.write_down()
    assert len(pauses) == 1
    assert [value for *_, value in query.run()] == [b"b"]


def test_a_batch_ends_where_the_group_has_come_to(log):
    """So that a checkpoint that was restored to an older one makes the batches that the sink has seen."""
    log.plain(0, *[b"%d" % index for index in range(6)])
    query = Query(log, startingOffsets=all_again(log), kafka__group__id="g")
    commit(log, "g", {0: 4})
    assert query.batch() == [b"0", b"1", b"2", b"3"]
    assert query.batch() == [b"4", b"5"]


def test_partitions_in_which_the_group_has_come_no_further_wait_for_the_others(log):
    """A batch of which the sink has seen a part is refused."""
    log.plain(0, *[b"%d" % index for index in range(4)])
    log.plain(1, b"a", b"b", b"c")
    query = Query(log, startingOffsets=all_again(log), kafka__group__id="g", maxOffsetsPerTrigger="2")
    commit(log, "g", {0: 3, 1: 1})
    assert [query.batch() for _ in range(5)] == [[b"0", b"a"], [b"1", b"2"], [b"3", b"b"], [b"c"], None]


def test_a_group_that_is_ahead_of_what_can_be_read_keeps_nobody_waiting(log):
    log.plain(0, b"0")
    producer = log.begin(0, b"1")
    log.plain(1, b"a")
    query = Query(log, startingOffsets=all_again(log), kafka__group__id="g")
    commit(log, "g", {0: 2, 1: 0})
    assert [query.batch() for _ in range(3)] == [[b"0"], [b"a"], None]
    log.commit(producer, 0)
    assert query.batch() == [b"1"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("order", ["offset", "commit"])
def test_a_new_query_does_not_begin_before_its_group_unless_it_says_so(log, order):
    """A checkpoint was lost, say, and the program still has `earliest`."""
    log.plain(0, b"a", b"b")
    options = {"kafka__group__id": "g", "txnstore__delivery__order": order}
    written = Query(log, startingOffsets="earliest", **options)
    assert written.batch() == [b"a", b"b"]
    commit(log, "g", {0: 2}, order)
    # What is in the checkpoint stands.
    written.restart()
    assert not written.write_down()
    with pytest.raises(InvalidConfiguration, match=r"settlements-0 from 0 on, though its group 'g' has committed 2: "):
        Query(log, startingOffsets="earliest", **options).write_down()
    assert Query(log, startingOffsets="earliest", **(options | {"kafka__group__id": "other"})).write_down()
    for start, values in ((all_again(log), [b"a", b"b"]), ("group", [b"c"])):
        query = Query(log, startingOffsets=start, **options)
        if start == "group":
            log.plain(0, b"c")
        assert query.batch() == values
    # Only of a stream is anything committed.
    assert values_of(reader(log, startingOffsets="earliest", **options)) == [b"a", b"b", b"c"]


def test_in_the_first_batch_of_a_group_every_partition_has_a_task(log):
    log.plain(0, b"a")
    query = Query(log, kafka__group__id="g")
    query.write_down()
    parts = query.reader.partitions(query.start(), json.loads(query.written[-1]))
    assert [(str(part.value.partition), part.value.size) for part in parts] == [
        ("settlements-0", 0),
        ("settlements-1", 0),
    ]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"subscribe": "nothing"}, UnknownTopicOrPartition, "subscribe names the topic nothing, which is not there"),
        (
            {"subscribe": None, "assign": '{"settlements": [0, 9]}'},
            UnknownTopicOrPartition,
            "assign names the partition settlements-9, which is not there",
        ),
        ({"startingOffsets": '{"settlements": {"0": 0}}'}, InvalidConfiguration, "missing: settlements-1"),
        (
            {"startingOffsets": '{"settlements": {"0": 0, "1": 0}, "refunds": {"0": 0}}'},
            InvalidConfiguration,
            "not read: refunds-0",
        ),
        (
            {"startingOffsets": '{"settlements": {"0": 5, "1": 0}}'},
            OffsetOutOfRange,
            "settlements-0 was to be read from offset 5 on, but its log ends at 0",
        ),
        ({"startingTimestamp": "5"}, InvalidConfiguration, "no record with the timestamp 5 or a later one"),
    ],
    ids=["topic", "partition", "missing", "not_read", "too_far", "time"],
)
def test_what_is_not_there_is_an_error_that_names_the_option(log, options, error, text):
    with pytest.raises(error, match=text):
        Query(log, **options).write_down()


def test_a_stream_may_begin_at_a_time(log):
    log.plain(0, b"a", timestamp_ms=10)
    log.plain(0, b"b", timestamp_ms=20)
    query = Query(log, startingTimestamp="15", startingOffsetsByTimestampStrategy="latest")
    assert query.batch() == [b"b"]
    log.plain(1, b"c", timestamp_ms=1)
    assert query.batch() == [b"c"]


def test_assigned_partitions_are_the_only_ones(log):
    log.plain(0, b"a")
    log.plain(1, b"b")
    query = Query(log, subscribe=None, assign='{"settlements": [1]}', startingOffsets='{"settlements": {"1": -2}}')
    assert query.batch() == [b"b"]


def test_a_batch_ends_what_is_overdue_and_in_its_way(log):
    coordinator = TransactionCoordinator(log.store)
    producer = coordinator.init_producer_id("abandoned", 1).identity
    batch = encode([Record(b"abandoned")], producer=producer, base_sequence=0, is_transactional=True)
    coordinator.append("abandoned", producer, [Append(log.partition_ids[0], batch)])
    log.plain(0, b"behind")
    # The query goes by the time of today, long after the clock of `log`.
    assert Query(log, startingOffsets="earliest").batch() == [b"behind"]


@pytest.mark.parametrize("denied", [PermissionDenied, StoreReadOnly])
def test_who_may_only_read_reads_without_a_group_and_tells_the_sink_nothing(log, monkeypatch, denied):
    def refuse(_store, inputs, **_):
        tried.append([(each.group_id, each.start_offset, each.end_offset) for each in inputs])
        raise denied("no")

    tried: list[object] = []
    properties = {"sql.streaming.queryId": "query", "streaming.sql.batchId": "0", "spark.jobGroup.id": "run"}
    context = SimpleNamespace(getLocalProperty=properties.get)
    monkeypatch.setattr(source_readers, "TaskContext", SimpleNamespace(get=lambda: context))
    monkeypatch.setattr(source_readers, "note_inputs", refuse)
    log.plain(0, b"a")
    assert Query(log, startingOffsets="earliest").batch() == [b"a"]
    with pytest.raises(denied):
        Query(log, startingOffsets="earliest", kafka__group__id="group").batch()
    assert tried == [[("", 0, 1)], [("group", 0, 1)]]


def test_what_a_task_reads_is_noted_once_more_if_the_answer_was_lost(log, monkeypatch):
    noted = note_inputs
    tried: list[int] = []

    def note(store, inputs, *, retry_timeout_ms):
        noted(store, inputs)
        tried.append(retry_timeout_ms)
        if len(tried) == 1:
            raise OutcomeUnknown

    monkeypatch.setattr(stores, "_PAUSE_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(source_readers, "note_inputs", note)
    log.plain(0, b"a")
    assert Pipeline(log).batch() == [b"a"]
    assert len(tried) == 3


@pytest.mark.slow_but_first
@pytest.mark.parametrize("order", ["offset", "commit"])
def test_offsets_of_the_checkpoint_say_where_another_query_begins(log, order):
    log.plain(0, b"a")
    first = Query(log, startingOffsets="earliest", txnstore__delivery__order=order)
    assert first.batch() == [b"a"]
    log.plain(0, b"b")
    (written,) = first.written
    assert FROM in json.loads(written)
    assert Query(log, startingOffsets=written, txnstore__delivery__order=order).batch() == [b"b"]


def test_between_an_offset_and_itself_there_is_nothing(log):
    log.plain(0, b"a")
    query = Query(log, startingOffsets="earliest")
    assert query.batch() == [b"a"]
    assert query.reader.partitions(query.start(), query.start()) == []


def test_what_was_read_of_an_open_transaction_is_not_read_again_at_another_isolation_level(log):
    producer = log.begin(0, b"open")
    log.plain(0, b"behind")
    query = Query(log, startingOffsets="earliest", kafka__isolation__level="read_uncommitted")
    assert query.batch() == [b"open", b"behind"]
    query.options["kafka.isolation.level"] = "read_committed"
    query.restart()
    assert query.reader.latestOffset(query.start(), ReadAllAvailable()) == query.start()
    assert query.batch() is None
    log.commit(producer, 0)
    log.plain(0, b"new")
    assert query.batch() == [b"new"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("job_group", [None, "", "g" * 181])
def test_a_job_group_of_foreach_batch_is_no_run_that_decides_a_batch(log, monkeypatch, job_group):
    properties = {"sql.streaming.queryId": "query", "streaming.sql.batchId": "0", "spark.jobGroup.id": job_group}
    context = SimpleNamespace(getLocalProperty=properties.get)
    monkeypatch.setattr(source_readers, "TaskContext", SimpleNamespace(get=lambda: context))
    log.plain(0, b"a")
    assert Query(log, startingOffsets="earliest", kafka__group__id="group").batch() == [b"a"]

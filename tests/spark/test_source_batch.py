"""Batch reads without Spark: what is planned, and that tasks read what the plain reader reads."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, LessThan
from sqlalchemy import event

from tests.spark.source_log import SourceLog, consume_all
from tests.spark.source_queries import reader, rows_of, url_of, values_of
from txnstore.errors import InvalidConfiguration, OffsetOutOfRange, SchemaOutdated
from txnstore.log.columns import Codec
from txnstore.model import ControlType, IsolationLevel, Record
from txnstore.spark import source_ranges
from txnstore.spark.data_source import TxnStoreDataSource
from txnstore.spark.source_options import read_source_options
from txnstore.spark.source_readers import TxnStoreReader
from txnstore.spark.source_schema import source_schema
from txnstore.spark.stores import store_at


@pytest.fixture
def log(store):
    return SourceLog(store)


actions = st.lists(
    st.tuples(
        st.sampled_from(["plain", "commit", "abort", "open", "delete"]),
        st.integers(0, 1),
        st.integers(1, 4),
        st.sampled_from([1, 30]),
        st.sampled_from(Codec),
    ),
    max_size=8,
)


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
@given(actions, st.none() | st.integers(1, 7), st.integers(1, 60))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tasks_read_what_the_plain_reader_does(shared_store, isolation, actions, min_partitions, page_records):
    log = SourceLog(shared_store, f"t{id(actions)}-{len(actions)}-{min_partitions}-{page_records}-{next(NUMBERS)}")
    for kind, partition, count, times, codec in actions:
        records = [
            Record(bytes([index]) or None, key=None if index % 2 else b"k", timestamp_ms=index, headers=[("h", None)])
            for index in range(count)
        ] * times
        if kind == "delete":
            log.delete(partition, len(log.read(partition, IsolationLevel.READ_UNCOMMITTED)) // 2)
        elif kind == "plain":
            log.records(partition, records, codec)
        else:
            producer = log.begin(partition, b"first")
            if kind != "open":
                log.end(producer, {"commit": ControlType.COMMIT, "abort": ControlType.ABORT}[kind], partition)
    given_ = {"minPartitions": None if min_partitions is None else str(min_partitions), "includeHeaders": "true"}
    read = reader(log, isolation__level=isolation, failOnDataLoss="true", **given_)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_ranges, "PAGE_RECORDS_MAX", page_records)
        found = rows_of(read)
    assert [
        (row["partition"], row["offset"], row["timestamp"], row["key"], row["value"], row["headers"]) for row in found
    ] == [
        (
            partition,
            record.offset,
            dt.datetime.fromtimestamp(0, dt.UTC) + dt.timedelta(milliseconds=record.timestamp_ms),
            record.key,
            record.value,
            [{"key": name, "value": value} for name, value in record.headers] or None,
        )
        for partition in (0, 1)
        for record in readable(log, partition, isolation)
    ]


def readable(log, partition, isolation):
    return log.read(partition, IsolationLevel[isolation.upper()])


class _Numbers:
    def __init__(self):
        self.last = 0

    def __next__(self):
        self.last += 1
        return self.last


NUMBERS = _Numbers()


def test_the_consumer_reads_the_same(log):
    log.plain(0, *[b"%d" % index for index in range(500)])
    log.abort(log.begin(0, b"aborted"), 0)
    log.commit(log.begin(0, b"committed"), 0)
    log.begin(0, b"open")
    found = consume_all(url_of(log), log.name, 0)
    assert [(row["offset"], row["value"]) for row in rows_of(reader(log, minPartitions="5"))] == [
        (message.offset(), message.value()) for message in found
    ]
    assert len(found) == 501


def test_the_range_is_fixed_when_it_is_planned(log):
    log.plain(0, b"a")
    read = reader(log)
    parts = read.partitions()
    log.plain(0, b"b")
    assert values_of(read, parts) == values_of(read, parts) == [b"a"]
    assert values_of(read) == [b"a", b"b"]


def test_a_transaction_is_there_in_all_partitions_or_in_none(log, monkeypatch):
    """All bounds are of one snapshot: the commit that comes between two of their reads is in neither."""
    producer = log.begin(0, b"a")
    log.transactional(producer, 1, [Record(b"b")])
    read = reader(log)
    store = store_at(read._options.address)

    def commit_in_between(connection, cursor, statement, *_):
        if "partition_heads" in statement and producers:
            log.commit(producers.pop(), 0, 1)

    producers = [producer]
    event.listen(store.engine, "after_cursor_execute", commit_in_between)
    try:
        first = values_of(read)
    finally:
        event.remove(store.engine, "after_cursor_execute", commit_in_between)
    assert first in ([], [b"a", b"b"])
    assert values_of(read) == [b"a", b"b"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({}, [b"0", b"1", b"2", b"3", b"x"]),
        ({"startingOffsets": '{"settlements": {"0": 2, "1": -2}}'}, [b"2", b"3", b"x"]),
        ({"endingOffsets": '{"settlements": {"0": 1, "1": -1}}'}, [b"0", b"x"]),
        ({"startingTimestamp": "20", "startingOffsetsByTimestampStrategy": "latest"}, [b"2", b"3"]),
        ({"endingTimestamp": "20"}, [b"0", b"1", b"x"]),
        ({"endingOffsetsByTimestamp": '{"settlements": {"0": 10, "1": 0}}'}, [b"0"]),
        ({"subscribe": None, "subscribePattern": "settle"}, []),
        ({"subscribe": None, "subscribePattern": "settle.*"}, [b"0", b"1", b"2", b"3", b"x"]),
        ({"subscribe": None, "assign": '{"settlements": [1]}'}, [b"x"]),
    ],
    ids=["all", "start", "end", "from_time", "to_time", "to_times", "no_match", "match", "assign"],
)
def test_where_a_batch_read_begins_and_ends(log, options, values):
    log.records(0, [Record(b"%d" % index, timestamp_ms=10 * index) for index in range(4)])
    log.plain(1, b"x", timestamp_ms=5)
    assert values_of(reader(log, **options)) == values


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {
                "startingOffsets": '{"settlements": {"0": 3, "1": 0}}',
                "endingOffsets": '{"settlements": {"0": 2, "1": 0}}',
            },
            InvalidConfiguration,
            r"settlements-0 begins at offset 3 \(startingOffsets\), after its end at 2",
        ),
        (
            {"endingOffsets": '{"settlements": {"0": 9, "1": 0}}'},
            OffsetOutOfRange,
            "settlements-0 was to be read up to offset 9, but it can be read only up to 4",
        ),
        (
            {"endingOffsets": '{"settlements": {"0": 2}}'},
            InvalidConfiguration,
            "endingOffsets names every .*settlements-1",
        ),
    ],
    ids=["order", "too_far", "missing"],
)
def test_offsets_that_are_not_there_are_errors(log, options, error, text):
    log.plain(0, *b"a b c d".split())
    with pytest.raises(error, match=text):
        reader(log, **options).partitions()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("fails", ["true", "false"])
@pytest.mark.parametrize("when", ["before_planning", "before_reading"])
def test_what_retention_took(log, fails, when, caplog):
    log.plain(0, *b"a b c d".split())
    read = reader(log, startingOffsets='{"settlements": {"0": 1, "1": 0}}', failOnDataLoss=fails)
    parts = read.partitions() if when == "before_reading" else None
    log.delete(0, 3)
    if fails == "true":
        with pytest.raises(OffsetOutOfRange, match="settlements-0 from offset 1 to 2 are gone"):
            values_of(read, parts)
    else:
        assert values_of(read, parts) == [b"d"]
        assert "settlements-0 from offset 1 to 2 are gone" in caplog.text


@pytest.mark.parametrize("fails", ["true", "false"])
def test_a_log_that_ends_before_the_first_offset_is_another_one(log, fails, caplog):
    log.plain(0, b"a", b"b")
    assert values_of(reader(log, startingOffsets='{"settlements": {"0": 2, "1": 0}}')) == []
    read = reader(log, startingOffsets='{"settlements": {"0": 3, "1": 0}}', failOnDataLoss=fails)
    text = "settlements-0 was to be read from offset 3 on, but its log ends at 2"
    if fails == "true":
        with pytest.raises(OffsetOutOfRange, match=text):
            values_of(read)
    else:
        assert values_of(read) == [b"a", b"b"]
        assert text in caplog.text


def test_from_the_earliest_on_nothing_is_lost(log):
    log.plain(0, *b"a b c d".split())
    log.delete(0, 3)
    assert values_of(reader(log)) == [b"d"]


def test_an_empty_read_is_one_task_with_nothing_to_do(log):
    read = reader(log)
    (part,) = read.partitions()
    assert list(read.read(part)) == []


def test_filters_keep_what_they_drop_from_being_read(log):
    for index in range(10):
        log.plain(0, b"%d" % index, timestamp_ms=index)
        log.plain(1, b"x", timestamp_ms=index)
    read = reader(log)
    at = dt.datetime(1970, 1, 1, microsecond=4_500, tzinfo=dt.UTC)
    filters = [EqualTo(("partition",), 0), LessThan(("offset",), 8), GreaterThanOrEqual(("timestamp",), at)]
    assert list(read.pushFilters(filters)) == filters[2:]
    (part,) = read.partitions()
    assert (part.wanted.start_offset, part.wanted.end_offset) == (4, 8)
    assert values_of(read) == [b"4", b"5", b"6", b"7"]


def test_a_database_that_is_not_there_is_not_made(tmp_path):
    read = read_source_options({"url": f"sqlite:///{tmp_path}/typo.db", "subscribe": "t"}, streaming=False)
    with pytest.raises(SchemaOutdated, match="leads to no file"):
        TxnStoreReader(read, source_schema(include_headers=False)).partitions()
    assert list(tmp_path.iterdir()) == []


def test_the_data_source_refuses_a_misspelt_option_when_it_is_loaded():
    source = TxnStoreDataSource({"url": "sqlite:////x.db", "subscribe": "t", "startingoffset": "earliest"})
    with pytest.raises(InvalidConfiguration, match="did you mean 'startingOffsets'"):
        source.schema()

"""Filters that the source applies itself: what is left to Spark, and that no record is lost by them."""

from __future__ import annotations

import datetime as dt
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from txnstore.log.commit_order import CommitPosition
from txnstore.model import PartitionName
from txnstore.spark.source_filters import SourceFilters
from txnstore.spark.source_options import read_source_options
from txnstore.spark.source_ranges import OffsetRange
from txnstore.spark.source_readers import TxnStoreReader
from txnstore.spark.source_schema import COLUMNS

COMPARED = {
    EqualTo: lambda left, right: left == right,
    EqualNullSafe: lambda left, right: left == right,
    GreaterThan: lambda left, right: left > right,
    GreaterThanOrEqual: lambda left, right: left >= right,
    LessThan: lambda left, right: left < right,
    LessThanOrEqual: lambda left, right: left <= right,
}
conditions = st.lists(
    st.tuples(st.sampled_from(["partition", "offset"]), st.sampled_from([*COMPARED]), st.integers(-1, 6))
)


@given(conditions)
def test_what_is_left_of_a_range_is_what_the_filters_let_through(conditions):
    filters = SourceFilters()
    assert filters.take([kind((column,), value) for column, kind, value in conditions]) == []
    for partition in range(3):
        left = filters.clip(OffsetRange(PartitionName("t", partition), partition, CommitPosition(1), 6))
        found = [] if left is None else list(range(left.start_offset, left.end_offset))
        assert found == [
            offset
            for offset in range(1, 6)
            if all(
                COMPARED[kind](partition if column == "partition" else offset, value)
                for column, kind, value in conditions
            )
        ]


@pytest.mark.parametrize(
    ("condition", "taken"),
    [
        (EqualTo(("topic",), "t"), True),
        (In(("topic",), ("t", "u")), True),
        (In(("partition",), (0, 2)), True),
        (In(("partition",), (0, None)), False),
        (In(("offset",), (3, 5)), False),
        (IsNotNull(("offset",)), True),
        (IsNotNull(("key",)), False),
        (IsNotNull(("timestamp",)), False),
        (EqualTo(("key",), b"k"), False),
        (EqualTo(("partition",), None), False),
        (EqualNullSafe(("offset",), None), False),
        (EqualTo(("headers", "key"), "k"), False),
        (Not(EqualTo(("partition",), 1)), False),
        (StringStartsWith(("topic",), "t"), False),
        (GreaterThan(("timestamp",), dt.datetime(2026, 1, 1, tzinfo=dt.UTC)), False),
    ],
    ids=repr,
)
def test_what_the_source_takes_over(condition, taken):
    left = SourceFilters().take([condition])
    assert left == ([] if taken else [condition])


def test_lists_and_times_narrow_what_is_read_though_spark_looks_again():
    filters = SourceFilters()
    filters.take(
        [
            In(("offset",), (3, 5)),
            In(("partition",), (0, 2)),
            GreaterThan(("timestamp",), dt.datetime.fromtimestamp(1.2345, dt.UTC)),
            LessThan(("timestamp",), dt.datetime.fromtimestamp(2, dt.UTC)),
        ]
    )
    assert filters.first_timestamp_ms == 1234
    wanted = OffsetRange(PartitionName("t", 2), 2, CommitPosition(0), 9)
    assert filters.clip(wanted) == OffsetRange(PartitionName("t", 2), 2, CommitPosition(3), 6)
    assert filters.clip(OffsetRange(PartitionName("t", 1), 1, CommitPosition(0), 9)) is None


@pytest.mark.parametrize(
    ("first_offset", "begin"), [(6, CommitPosition(7, 3)), (7, CommitPosition(7, 3)), (8, CommitPosition(8))]
)
def test_what_is_left_of_a_range_begins_within_a_transaction_as_long_as_it_begins_there(first_offset, begin):
    filters = SourceFilters(in_commit_order=True)
    filters.take([GreaterThanOrEqual(("offset",), first_offset)])
    clipped = filters.clip(OffsetRange(PartitionName("t", 0), 0, CommitPosition(7, 3), 9))
    assert clipped == OffsetRange(PartitionName("t", 0), 0, begin, 9)


def test_spark_sees_no_method_of_the_readers_own_unless_it_hands_filters_over():
    options = read_source_options({"url": "sqlite:////nowhere.db", "subscribe": "t"}, streaming=False)
    reader = TxnStoreReader(options, COLUMNS)
    # What plan_data_source_read compares when spark.sql.python.filterPushdown.enabled is off.
    assert getattr(reader.pushFilters, "__func__", None) is DataSourceReader.pushFilters
    assert list(reader.pushFilters([EqualTo(("partition",), 1), EqualTo(("key",), b"")])) == [EqualTo(("key",), b"")]
    assert pickle.loads(pickle.dumps(reader))._filters == reader._filters

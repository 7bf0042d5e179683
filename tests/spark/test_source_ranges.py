"""Ranges of offsets: split for tasks and shared out between partitions, with nothing lost and nothing twice."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnstore.errors import InvalidConfiguration
from txnstore.log.commit_order import CommitPosition
from txnstore.model import PartitionName
from txnstore.spark.source_ranges import OffsetRange, admit, split
from txnstore.spark.source_readers import INITIAL, begins_of, ends_of, stream_offset, whole_from_of

PARTITIONS = [PartitionName("t", number) for number in range(6)]
begins = st.builds(CommitPosition, st.integers(0, 50), st.integers(0, 2))
ranges = st.lists(st.tuples(begins, st.integers(0, 1_000)), min_size=1, max_size=6).map(
    lambda sizes: [
        OffsetRange(partition, number, begin, begin.place + size)
        for number, (partition, (begin, size)) in enumerate(zip(PARTITIONS, sizes, strict=False))
    ]
)


@given(ranges, st.none() | st.integers(1, 40), st.none() | st.integers(1, 300))
def test_parts_are_the_whole_in_order(wholes, min_partitions, max_records):
    parts = split(wholes, min_partitions=min_partitions, max_records=max_records)
    for whole in wholes:
        own = [part for part in parts if part.partition_id == whole.partition_id]
        assert own[0].begin == whole.begin
        assert own[-1].end_offset == whole.end_offset
        assert all(other.begin == CommitPosition(one.end_offset) for one, other in pairwise(own))
        assert whole.size == 0 or all(part.size > 0 for part in own)
    if max_records is not None:
        assert all(part.size <= max_records for part in parts)
    if min_partitions is not None:
        assert len(parts) >= min(min_partitions, sum(whole.size for whole in wholes))


def test_the_large_ranges_are_the_ones_that_are_split():
    start = CommitPosition(0)
    wholes = [OffsetRange(PARTITIONS[0], 0, start, 10), OffsetRange(PARTITIONS[1], 1, start, 990)]
    parts = split(wholes, min_partitions=4)
    assert [(part.partition_id, part.size) for part in parts] == [(0, 10), (1, 330), (1, 330), (1, 330)]


@given(ranges, st.none() | st.integers(1, 2_000))
def test_each_partition_gets_its_share(wholes, limit):
    starts = {whole.partition: whole.start_offset for whole in wholes}
    ends = {whole.partition: whole.end_offset for whole in wholes}
    admitted = admit(starts, ends, limit)
    sizes = {whole.partition: admitted[whole.partition] - whole.start_offset for whole in wholes}
    total = sum(whole.size for whole in wholes)
    busy = sum(1 for whole in wholes if whole.size)
    for whole in wholes:
        assert min(whole.size, 1) <= sizes[whole.partition] <= whole.size
        if limit is not None and limit < total:
            assert sizes[whole.partition] <= max(1, whole.size * limit / total)
    assert sum(sizes.values()) <= (total if limit is None else max(limit, busy))
    if limit is None or limit >= total:
        assert sum(sizes.values()) == total
    else:
        assert sum(sizes.values()) > limit - 2 * len(wholes)


positions = st.dictionaries(st.sampled_from(PARTITIONS), begins, min_size=1)


def places(found):
    return {partition: position.place for partition, position in found.items()}


@pytest.mark.slow
@given(positions, st.randoms())
def test_an_offset_is_the_same_text_in_whatever_order_it_came(begins, random):
    shuffled = list(begins.items())
    random.shuffle(shuffled)
    text = json.dumps(stream_offset(places(begins), begins, places(begins)))
    again = dict(shuffled)
    assert json.dumps(stream_offset(places(again), again, places(again))) == text
    assert ends_of(json.loads(text)) == whole_from_of(json.loads(text)) == places(begins)


@given(positions, positions)
def test_a_batch_begins_where_the_one_before_ended_or_where_its_own_end_says(before, begins):
    ends = dict.fromkeys(before.keys() | begins.keys(), 10)
    ended = {partition: CommitPosition(place) for partition, place in places(before).items()}
    # Where the one before began is over.
    assert begins_of(stream_offset(places(before), before), stream_offset(ends, begins)) == {**ended, **begins}
    assert begins_of(INITIAL, stream_offset(places(begins), begins)) == begins


@pytest.mark.parametrize(
    "offset", [{"t": 5}, {"t": {"x": 5}}, {"t": {"0": "5"}}, {"t": {"0": 5}}], ids=["flat", "name", "text", "no_begin"]
)
def test_a_checkpoint_of_somebody_elses_is_refused(offset):
    with pytest.raises(InvalidConfiguration, match="checkpoint"):
        begins_of(INITIAL, offset)

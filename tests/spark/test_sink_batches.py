"""Arrow batches become record batches: the right topic and partition, every byte, and nothing too large."""

from __future__ import annotations

import random
import zlib
from collections import defaultdict
from datetime import UTC, datetime
from types import SimpleNamespace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from txnstore.config import TOPIC_SETTINGS, settings_in_force
from txnstore.errors import InvalidRecord, InvalidTimestamp, RecordTooLarge, UnknownTopicOrPartition
from txnstore.log.codec import decode
from txnstore.log.columns import Codec
from txnstore.log.partitioners import PARTITIONERS
from txnstore.log.topics import Topic
from txnstore.model import ProducerIdentity
from txnstore.spark.sink_batches import BatchLimits, BatchMaker, PartitionOfRows
from txnstore.spark.sink_options import SinkColumns

NOW_MS = 1_700_000_000_000
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
TYPES = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "headers": HEADERS,
    "timestamp": pa.timestamp("us", tz="UTC"),
}
WRITER = ProducerIdentity(7, 3)


def topic_of(name: str, partition_count: int = 4, **config: str) -> Topic:
    config = {key.replace("_", "."): value for key, value in config.items()}
    first = zlib.crc32(name.encode()) % 1000 * 1000
    ids = tuple(range(first, first + partition_count))
    return Topic(1, name, "", ids, settings_in_force(TOPIC_SETTINGS, config), config)


def rows_of(types=None, **columns) -> tuple[pa.RecordBatch, SinkColumns]:
    types = TYPES | (types or {})
    arrays = {name: pa.array(cells, types[name]) for name, cells in columns.items()}
    places = {name: place for place, name in enumerate(arrays)}
    return pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays)), SinkColumns(**places)


def maker_of(columns, *topics, topic=None, limits=None, partitioner="consistent_random", sticky_seconds=0.01):
    known = {topic.name: topic for topic in topics}
    return BatchMaker(
        columns,
        PartitionOfRows(partitioner, sticky_seconds=sticky_seconds),
        lambda names: {name: known[name] for name in names},
        topic=topic,
        limits=limits,
        now_ms=lambda: NOW_MS,
        monotonic_seconds=lambda: 0.0,
    )


def opened(unsent, codec=Codec.NONE):
    """The records of a batch, as a reader gets them: timestamp, key, value, headers."""
    item = unsent.encode(WRITER, 0, codec)
    row = SimpleNamespace(
        **item.batch.columns(),
        partition_id=item.partition_id,
        base_offset=0,
        last_offset=item.batch.record_count - 1,
    )
    return [(record[1], record[2], record[3], list(record[4])) for record in decode(row).rows()]


def by_place(batches, codec=Codec.NONE):
    found: dict[tuple[str, int], list[tuple[object, ...]]] = defaultdict(list)
    for batch in batches:
        found[batch.topic.name, batch.partition] += opened(batch, codec)
    return dict(found)


bytes_or_none = st.one_of(st.none(), st.binary(max_size=12))
header = st.tuples(st.text(max_size=4).filter(str.isascii), bytes_or_none)
row_strategy = st.tuples(
    bytes_or_none,  # key
    bytes_or_none,  # value
    st.sampled_from(["one", "two", "three"]),  # topic
    st.one_of(st.none(), st.integers(0, 3)),  # partition
    st.one_of(st.none(), st.lists(header, max_size=2)),  # headers
)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    rows=st.lists(row_strategy, min_size=1, max_size=40),
    records_max=st.integers(1, 9),
    size_bytes_max=st.integers(1, 500),
    codec=st.sampled_from([Codec.NONE, Codec.GZIP]),
    before=st.integers(0, 5),
)
def test_every_row_arrives_whole_in_its_partition_and_in_order(rows, records_max, size_bytes_max, codec, before):
    key, value, topic, partition, headers = map(list, zip(*rows, strict=True))
    batch, columns = rows_of(
        key=[b"?"] * before + key,
        value=[b"?"] * before + value,
        topic=["one"] * before + topic,
        partition=[0] * before + partition,
        headers=[None] * before
        + [None if row is None else [{"key": name, "value": cell} for name, cell in row] for row in headers],
        # Tells the rows apart.
        timestamp=[number * 1000 for number in range(-before, len(rows))],
    )
    maker = maker_of(
        columns,
        *map(topic_of, ("one", "two", "three")),
        limits=BatchLimits(size_bytes_max=size_bytes_max, records_max=records_max),
    )
    # A slice: Arrow's buffers do not begin with the first row then.
    batches = maker.make(batch.slice(before), 0)

    got = by_place(batches, codec)
    place_of = {record[0]: place for place, records in got.items() for record in records}
    record_of = {record[0]: record for records in got.values() for record in records}
    assert sum(map(len, got.values())) == len(rows)
    without_key = defaultdict(set)
    for number, (key_, value_, topic_, partition_, headers_) in enumerate(rows):
        assert record_of[number] == (number, key_, value_, list(headers_ or ()))
        if partition_ is not None:
            assert place_of[number] == (topic_, partition_)
        elif key_:
            assert place_of[number] == (topic_, zlib.crc32(key_) % 4)
        else:
            without_key[topic_].add(place_of[number])
    for name, places in without_key.items():
        assert len(places) == 1
        assert {place[0] for place in places} == {name}
    for records in got.values():
        assert records == sorted(records, key=lambda record: record[0])
    assert max(unsent.record_count for unsent in batches) <= records_max


@pytest.mark.parametrize("partitioner", sorted(PARTITIONERS.keys() - {"random"}))
def test_keys_go_where_a_producer_sends_them(partitioner):
    keys = [b"", b"a", b"b", b"a", "ä".encode(), b"c" * 40, b"b"] * 3
    batch, columns = rows_of(key=keys, value=[str(n).encode() for n in range(len(keys))])
    got = by_place(maker_of(columns, topic_of("t"), topic="t", partitioner=partitioner).make(batch, 0))
    at = {record[2]: partition for (_, partition), records in got.items() for record in records}
    for number, key in enumerate(keys):
        if key or partitioner != "consistent_random":
            expected = PARTITIONERS[partitioner](key, 4, random.Random(0))
            assert at[str(number).encode()] == expected, key


def test_keys_of_text_are_its_utf8_bytes_and_go_where_those_go():
    batch, columns = rows_of(
        types={"key": pa.string(), "value": pa.large_string()}, key=["ä", None, "b"], value=["ü", "", None]
    )
    got = by_place(maker_of(columns, topic_of("t", 1), topic="t").make(batch, 0))
    assert got == {
        ("t", 0): [
            (NOW_MS, "ä".encode(), "ü".encode(), []),
            (NOW_MS, None, b"", []),
            (NOW_MS, b"b", None, []),
        ]
    }


def test_records_without_a_key_are_spread_one_by_one_if_they_are_not_to_stay_together():
    batch, columns = rows_of(value=[b"x"] * 200)
    got = by_place(maker_of(columns, topic_of("t"), topic="t", sticky_seconds=0.0).make(batch, 0))
    assert len(got) == 4
    together = by_place(maker_of(columns, topic_of("t"), topic="t").make(batch, 0))
    assert len(together) == 1


@pytest.mark.parametrize("partitioner", ["consistent", "murmur2", "fnv1a"])
def test_records_without_a_key_go_where_the_empty_key_goes_if_they_are_hashed_too(partitioner):
    batch, columns = rows_of(value=[b"x"] * 20)
    got = by_place(maker_of(columns, topic_of("t"), topic="t", partitioner=partitioner).make(batch, 0))
    assert set(got) == {("t", PARTITIONERS[partitioner](b"", 4, random.Random(0)))}


def test_the_random_partitioner_spreads_equal_keys():
    batch, columns = rows_of(key=[b"k"] * 200, value=[b"x"] * 200)
    got = by_place(maker_of(columns, topic_of("t"), topic="t", partitioner="random").make(batch, 0))
    assert len(got) == 4


def test_the_option_topic_wins_over_the_column():
    batch, columns = rows_of(value=[b"x", b"y"], topic=["other", None])
    got = by_place(maker_of(columns, topic_of("t", 1), topic="t").make(batch, 0))
    assert [record[2] for record in got["t", 0]] == [b"x", b"y"]


def test_a_row_without_a_topic_is_named():
    batch, columns = rows_of(value=[b"x", b"secret", b"z"], topic=["t", None, "t"])
    with pytest.raises(InvalidRecord, match="row 101 of the task has no topic") as caught:
        maker_of(columns, topic_of("t")).make(batch, 100)
    assert "secret" not in str(caught.value)


def test_a_partition_that_is_not_there_is_refused():
    for number in (-1, 4):
        batch, columns = rows_of(value=[b"x", b"y"], partition=[0, number])
        with pytest.raises(
            UnknownTopicOrPartition, match=rf"says {number} for topic t, which has the partitions 0 to 3"
        ):
            maker_of(columns, topic_of("t"), topic="t").make(batch, 0)


def test_a_header_without_a_name_is_refused_with_its_row():
    batch, columns = rows_of(
        key=[b"a", b"b", b"c", b"d"],
        value=[b"x"] * 4,
        headers=[None, [{"key": "n", "value": b"1"}], [{"key": None, "value": b"secret"}], []],
    )
    with pytest.raises(InvalidRecord, match="row 12 of the task has a header without a key") as caught:
        maker_of(columns, topic_of("t"), topic="t").make(batch, 10)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("several", [False, True], ids=["one-topic", "two-topics"])
def test_a_record_that_is_too_large_for_its_topic_is_named_by_topic_and_row(several):
    values = [b"x" * 10, b"y" * 10, b"z" * 3000, b"w" * 10]
    batch, columns = rows_of(key=[b"a", b"b", b"c", b"d"], value=values, topic=["t", "u" if several else "t", "t", "t"])
    maker = maker_of(columns, topic_of("t", max_message_bytes="2000"), topic_of("u"))
    with pytest.raises(RecordTooLarge, match=r"row 52 of the task takes 3\d\d\d bytes.* topic t, 2000") as caught:
        by_place(maker.make(batch, 50))
    assert "zzz" not in str(caught.value)


@pytest.mark.parametrize("shape", ["mixed", "numbers", "headers"])
def test_batches_stay_below_what_their_topic_takes_whatever_is_in_them(shape):
    random_ = random.Random(5)
    count = 3000

    def cells(size):
        return [random_.choice([None, random_.randbytes(random_.randrange(size))]) for _ in range(count)]

    # What JSON writes longest is a control character; what numbers write longest are timestamps far from each other.
    columns_of_shape = {
        "mixed": {"key": cells(9), "value": cells(60)},
        "numbers": {"key": cells(2), "value": cells(2)},
        "headers": {"value": [b""] * count},
    }[shape]
    if shape != "numbers":
        columns_of_shape["headers"] = [
            random_.choice([None, [], [{"key": "\x01\x02é", "value": b"\x01" * random_.randrange(400)}]])
            for _ in range(count)
        ]
    if shape != "headers":
        columns_of_shape["timestamp"] = [random_.choice([None, random_.randrange(2**50)]) for _ in range(count)]
    batch, columns = rows_of(**columns_of_shape)
    topic = topic_of("t", max_message_bytes="5000")
    batches = maker_of(columns, topic, topic="t").make(batch, 0)
    sizes = [
        unsent.encode(WRITER, 0, codec).batch.size_bytes for unsent in batches for codec in (Codec.GZIP, Codec.NONE)
    ]
    assert max(sizes) <= 5000
    assert sum(unsent.record_count for unsent in batches) == count
    # Nor are they cut much smaller than need be.
    assert sum(sizes) / len(sizes) > 1000


def test_a_large_record_that_compresses_well_is_taken():
    batch, columns = rows_of(value=[b"z" * 3000])
    (unsent,) = maker_of(columns, topic_of("t", 1, max_message_bytes="2000"), topic="t").make(batch, 0)
    assert opened(unsent, Codec.GZIP) == [(NOW_MS, None, b"z" * 3000, [])]


def test_timestamps_of_any_unit_become_milliseconds():
    moment = datetime(2026, 3, 1, 12, 0, 0, 123_456, tzinfo=UTC)
    for unit in ("s", "ms", "us", "ns"):
        batch, columns = rows_of(
            types={"timestamp": pa.timestamp(unit, tz="Europe/Berlin")},
            value=[b"x", b"y"],
            timestamp=[moment.replace(microsecond=0) if unit == "s" else moment, None],
        )
        (unsent,) = maker_of(columns, topic_of("t", 1), topic="t").make(batch, 0)
        expected = int(moment.timestamp()) * 1000 + (0 if unit == "s" else 123)
        assert [record[0] for record in opened(unsent)] == [expected, NOW_MS]


def test_what_arrow_has_under_a_null_does_not_come_along():
    validity, positions = pa.py_buffer(bytes([0b101])), pa.array([0, 2, 8, 10], pa.int32()).buffers()[1]
    values = pa.Array.from_buffers(pa.binary(), 3, [validity, positions, pa.py_buffer(b"aasecretcc")])
    batch = pa.RecordBatch.from_arrays([values], names=["value"])
    (unsent,) = maker_of(SinkColumns(value=0), topic_of("t", 1), topic="t").make(batch, 0)
    assert [record[2] for record in opened(unsent)] == [b"aa", None, b"cc"]
    assert unsent.columns.values.data == b"aacc"


@pytest.mark.parametrize("microseconds", [-1, -999, -1000, -86_400_000_000])
def test_a_timestamp_before_1970_is_refused_however_near(microseconds):
    batch, columns = rows_of(value=[b"x"], timestamp=[microseconds])
    with pytest.raises(InvalidTimestamp, match="from 0 to"):
        [opened(unsent) for unsent in maker_of(columns, topic_of("t", 1), topic="t").make(batch, 0)]

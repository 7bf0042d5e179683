"""Arrow batches: what Spark gets is what a reader of single records gets, whatever the records and the batches."""

from __future__ import annotations

import datetime as dt
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from txnstore.errors import CorruptBatch
from txnstore.log.codec import checksum, decode, encode
from txnstore.log.columns import Codec, DamagedColumn, pack_integers, pack_positions
from txnstore.model import PartitionName, Record
from txnstore.spark import source_batches
from txnstore.spark.source_batches import TIMESTAMP_MS_MAX, ArrowReader, byte_strings, integers
from txnstore.spark.source_schema import source_schema

SCHEMA = source_schema(include_headers=True)
PARTITION = PartitionName("settlements", 3)
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)

cells = st.none() | st.binary(max_size=6)
headers = st.lists(st.tuples(st.text(max_size=3), cells), max_size=2)
#: As far as Python's own datetime can show them.
times_ms = st.integers(0, 4_000_000_000_000)
records = st.builds(Record, value=cells, key=cells, timestamp_ms=times_ms, headers=headers)
codecs = st.sampled_from(Codec)


@st.composite
def batches(draw):
    """Stored batches one behind the other, some with gaps, some so large that they are made of their columns."""
    found, offset = [], draw(st.integers(0, 5))
    for _ in range(draw(st.integers(1, 4))):
        content = draw(st.lists(records, min_size=1, max_size=6)) * draw(st.sampled_from([1, 1, 40, 300]))
        deltas = None
        if draw(st.booleans()):
            gap = draw(st.integers(1, 3))
            deltas = [index * gap for index in range(len(content))]
        stored = stored_batch(content, offset, draw(codecs), deltas)
        found.append(stored)
        offset = stored.last_offset + 1 + draw(st.integers(0, 2))
    return found


def stored_batch(content, base_offset, codec=Codec.NONE, deltas=None, **damage):
    encoded = encode(content, codec=codec, offset_deltas=deltas)
    last_offset = base_offset + (deltas[-1] if deltas else len(content) - 1)
    columns = {**encoded.columns(), "partition_id": 1, "base_offset": base_offset, "last_offset": last_offset}
    row: Any = SimpleNamespace(**{**columns, **damage})
    row.crc = checksum(row)
    return decode(row)


def one_by_one(stored, start, end):
    """Return what Spark is to get, made of single records."""
    return [
        {
            "key": record.key,
            "value": record.value,
            "topic": PARTITION.topic,
            "partition": PARTITION.partition,
            "offset": record.offset,
            "timestamp": EPOCH + dt.timedelta(milliseconds=record.timestamp_ms),
            "timestampType": int(batch.timestamp_type),
            "headers": [{"key": name, "value": value} for name, value in record.headers] or None,
        }
        for batch in stored
        for record in batch.records(start)
        if record.offset < end
    ]


def read(stored, start=0, end=2**62, schema=SCHEMA):
    found = list(ArrowReader(schema, PARTITION).read((batch, range(start, end)) for batch in stored))
    for batch in found:
        batch.validate(full=True)
        assert batch.schema == to_arrow_schema(schema, timezone="UTC")
        assert batch.num_rows > 0
    return [row for batch in found for row in batch.to_pylist()]


@pytest.mark.slow
@given(batches(), st.data())
@settings(max_examples=150)
def test_arrow_batches_hold_what_single_records_do(stored, data):
    start = data.draw(st.integers(0, stored[-1].last_offset + 2))
    end = data.draw(st.integers(start, stored[-1].last_offset + 2))
    assert read(stored, start, end) == one_by_one(stored, start, end)


@pytest.mark.slow
@given(batches(), st.permutations(SCHEMA.fields), st.integers(1, 8))
@settings(max_examples=40)
def test_columns_come_as_they_are_asked_for(stored, fields, count):
    names = [field.name for field in fields[:count]]
    expected = [{name: row[name] for name in names} for row in one_by_one(stored, 0, 2**62)]
    assert read(stored, schema=StructType(fields[:count])) == expected


@given(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=20), st.sampled_from([1, 30, 200]))
@example([0], 1).via("the narrowest column")
@example([-5, 5], 200).via("signs and padding")
def test_integers_are_those_that_were_packed(numbers, times):
    numbers *= times
    assert integers(pack_integers(numbers), len(numbers), "numbers").to_pylist() == numbers


@pytest.mark.parametrize("count", [3, 400], ids=["few", "many"])
@pytest.mark.parametrize(
    "text_of",
    [
        lambda numbers: numbers[:-1],
        lambda numbers: numbers.replace("1", "x"),
        lambda numbers: numbers.replace("1", "é"),
        lambda numbers: numbers.replace(",", ";"),
        lambda numbers: numbers.replace(",", "0", 1),
        lambda _: "[]",
        lambda _: "17",
        lambda numbers: numbers.replace("100]", "1e2]"),
        lambda numbers: numbers.replace("100]", "9" * 30 + "]"),
    ],
    ids=["cut", "letters", "not_ascii", "semicolons", "one_less", "empty", "no_array", "float", "huge"],
)
def test_what_are_no_integers_is_noticed(count, text_of):
    text = text_of(pack_integers([*range(101, 100 + count), 100]))
    with pytest.raises(DamagedColumn):
        integers(text, count, "numbers")


@pytest.mark.parametrize("count", [3, 400], ids=["few", "many"])
@pytest.mark.parametrize(
    "positions",
    [
        lambda count: [1, *range(1, count + 1)],
        lambda count: [0, 2, 1, *range(3, count + 1)],
        lambda count: [*range(count), 10**9],
        lambda count: [*range(count), count + 1],
        lambda count: [*range(count + 2)],
    ],
    ids=["begin_late", "descend", "end_too_high", "end_behind_the_data", "too_many"],
)
def test_positions_outside_of_the_data_are_noticed_before_arrow_reads_there(count, positions):
    with pytest.raises(DamagedColumn):
        byte_strings(pack_positions(positions(count)), None, b"x" * count, count=count, codec=Codec.NONE, what="value")


@pytest.mark.parametrize("count", [3, 400], ids=["few", "many"])
@pytest.mark.parametrize(
    "damaged",
    [
        lambda sound: sound[:-1],
        lambda sound: sound[:-4],
        lambda sound: sound + sound,
        lambda sound: b"\x80" + sound[1:],
        lambda sound: sound[:-4] + b"\xff\xff\xff\xff",
        lambda sound: sound.decode("latin-1"),
        lambda _: b"",
    ],
    ids=["cut", "one_less", "twice", "begin_below", "end_below", "text", "empty"],
)
def test_what_are_no_positions_is_noticed(count, damaged):
    sound = pack_positions(range(count + 1))
    given = {"count": count, "codec": Codec.NONE, "what": "value"}
    assert byte_strings(sound, None, b"x" * count, **given).to_pylist() == [b"x"] * count
    with pytest.raises(DamagedColumn):
        byte_strings(damaged(sound), None, b"x" * count, **given)


def test_text_where_bytes_have_to_be_is_noticed():
    data: Any = "abc"
    with pytest.raises(DamagedColumn):
        byte_strings(pack_positions([0, 3]), None, data, count=1, codec=Codec.NONE, what="value")


@pytest.mark.parametrize("column", ["value_positions", "timestamp_deltas_ms"])
def test_a_damaged_batch_is_an_error_that_says_where(column):
    content = [Record(b"secret", timestamp_ms=index) for index in range(500)]
    stored = stored_batch(content, 70, **{column: b"\7" * 2004})
    stored_row = stored_batch(content, 70, value_data=b"").row if column == "timestamp_deltas_ms" else stored.row
    with pytest.raises(CorruptBatch, match="partition 1: the record batch of the offsets 70 to 569") as caught:
        read([decode(stored_row)])
    assert "secret" not in str(caught.value)


def test_a_time_that_spark_cannot_hold_is_null():
    for count in (1, 100):
        content = [Record(b"", timestamp_ms=TIMESTAMP_MS_MAX), Record(b"", timestamp_ms=TIMESTAMP_MS_MAX + 1)] * count
        (batch,) = ArrowReader(SCHEMA, PARTITION).read([(stored_batch(content, 0), range(1_000))])
        assert batch.column("timestamp").is_null().to_pylist() == [False, True] * count


def test_many_small_batches_make_few_of_arrow(monkeypatch):
    monkeypatch.setattr(source_batches, "GATHERED_MAX", 50)
    stored = [stored_batch([Record(b"x")], offset) for offset in range(120)]
    stored.append(stored_batch([Record(b"y")] * 100, 120))
    found = list(ArrowReader(SCHEMA, PARTITION).read((batch, range(10, 200)) for batch in stored))
    assert [batch.num_rows for batch in found] == [50, 50, 10, 80]
    assert [offset for batch in found for offset in batch.column("offset").to_pylist()] == list(range(10, 200))

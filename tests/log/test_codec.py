"""Record batches: what goes in comes out, and what is wrong is refused before anything happened."""

from __future__ import annotations

import dataclasses
import json
import struct
import sys
from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.markers import encode_control
from txnstore.errors import InvalidRecord, InvalidTimestamp, RecordTooLarge, UnsupportedCompression
from txnstore.log import columns
from txnstore.log.codec import (
    EncodedBatch,
    RecordBatch,
    checksum,
    control_columns,
    decode,
    encode,
)
from txnstore.log.columns import Codec, join_bytes, pack_bytes, pack_positions, unpack_positions
from txnstore.model import ControlType, ProducerIdentity, Record, StoredRecord, TimestampType

BASE_OFFSET = 5000
SECRET = b"secret-payload"

cells = st.none() | st.binary(max_size=40)
texts = st.text(st.characters(codec="utf-8"), max_size=8)
headers = st.lists(st.tuples(texts | st.just("trace"), cells), max_size=4)
timestamps = st.integers(0, 2**63 - 1) | st.integers(1_700_000_000_000, 1_700_000_000_003)
records = st.builds(Record, value=cells, key=cells, timestamp_ms=timestamps, headers=headers)
batches = st.lists(records, min_size=1, max_size=40)


def row_of(batch: EncodedBatch, **columns: Any) -> Any:
    """Return the row that an append of the batch at BASE_OFFSET would leave, with some columns as given."""
    last_offset = BASE_OFFSET + batch.record_count - 1
    given_by_append = {"partition_id": 77, "base_offset": BASE_OFFSET, "last_offset": last_offset}
    return SimpleNamespace(**{**given_by_append, **batch.columns(), **columns})


def opened(batch: EncodedBatch, **columns: Any) -> RecordBatch:
    return decode(row_of(batch, **columns))


def stored(batch: Sequence[Record], base_offset: int = BASE_OFFSET) -> list[StoredRecord]:
    return [
        StoredRecord(base_offset + index, record.timestamp_ms, record.key, record.value, tuple(record.headers))
        for index, record in enumerate(batch)
    ]


@pytest.mark.slow
@given(batches, st.sampled_from(Codec))
def test_what_was_encoded_comes_back_with_its_offsets(batch: list[Record], codec: Codec) -> None:
    assert list(opened(encode(batch, codec=codec)).records()) == stored(batch)


@given(batches, st.sampled_from(Codec), st.integers(-3, 45))
def test_reading_begins_at_the_offset_asked_for(batch: list[Record], codec: Codec, behind: int) -> None:
    read = opened(encode(batch, codec=codec)).records(from_offset=BASE_OFFSET + behind)
    assert list(read) == [record for record in stored(batch) if record.offset >= BASE_OFFSET + behind]


@pytest.mark.slow
@given(batches)
def test_rows_are_the_fields_of_the_records(batch: list[Record]) -> None:
    read = opened(encode(batch))
    assert [StoredRecord(*row) for row in read.rows()] == list(read.records())


@pytest.mark.slow
@given(batches, st.sampled_from(Codec))
def test_the_columns_hold_flat_arrays_and_nothing_twice(batch: list[Record], codec: Codec) -> None:
    columns = encode(batch, codec=codec).columns()
    for name in ("timestamp_deltas_ms", "null_keys", "null_values"):
        if columns[name] is not None:
            numbers = json.loads(columns[name])
            assert all(type(number) is int for number in numbers)
            # Of one width each: the n-th is found by arithmetic.
            assert len({len(number) for number in columns[name][1:-1].split(",")}) == 1
    for what in ("key", "value"):
        nulls = [index for index, record in enumerate(batch) if getattr(record, what) is None]
        if len(nulls) == len(batch):
            assert columns[f"{what}_positions"] is columns[f"null_{what}s"] is columns[f"{what}_data"] is None
        else:
            lengths = [len(getattr(record, what) or b"") for record in batch]
            positions = [0, *accumulate(lengths)]
            assert columns[f"{what}_positions"] == b"".join(place.to_bytes(4, "big") for place in positions)
            assert json.loads(columns[f"null_{what}s"] or "[]") == nulls
    assert (columns["headers"] is None) == (not any(record.headers for record in batch))
    assert columns["size_bytes"] == sum(
        len(column)
        for name, column in columns.items()
        if isinstance(column, (str, bytes))  # all text is ASCII
    )


@pytest.mark.slow
@given(batches, st.integers(100, 1500))
def test_what_fits_into_a_batch_is_not_larger_once_it_is_encoded(batch: list[Record], batch_bytes_max: int) -> None:
    packed = [columns.pack_record_headers(record.headers) for record in batch]
    sizes = [
        len(record.key or b"") + len(record.value or b"") + len(headers or "")
        for record, headers in zip(batch, packed, strict=True)
    ]
    count = columns.fitting(
        sizes,
        [record.key for record in batch],
        [record.value for record in batch],
        [record.timestamp_ms for record in batch],
        packed,
        batch_bytes_max=batch_bytes_max,
    )
    assert 1 <= count <= len(batch)
    assert encode(batch[:count]).size_bytes <= batch_bytes_max or count == 1


def test_a_batch_of_small_records_is_filled_up_and_not_beyond() -> None:
    batch = [Record(b"v", b"k", 7)] * 1000
    count = columns.fitting([2] * 1000, [b"k"] * 1000, [b"v"] * 1000, [7] * 1000, [None] * 1000, batch_bytes_max=5000)
    assert 4900 < encode(batch[:count]).size_bytes <= 5000


@pytest.mark.slow
@given(batches)
def test_headers_that_are_packed_record_by_record_make_the_same_column(batch: list[Record]) -> None:
    packed = [columns.pack_record_headers(record.headers) for record in batch]
    assert columns.join_headers(packed) == encode(batch).headers


def test_bytes_like_keys_values_and_header_values_come_back_as_bytes() -> None:
    other_types: Any = {"value": bytearray(b"ab"), "key": memoryview(b"cd")[1:], "headers": [("h", memoryview(b"ef"))]}
    (read,) = opened(encode([Record(**other_types)])).records()
    assert (read.value, read.key, read.headers) == (b"ab", b"d", (("h", b"ef"),))
    assert type(read.value) is type(read.key) is bytes


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"text", "text"),
        (b"", ""),
        (None, None),
        (b"\xff\xfe", ["fffe"]),
        (b"a\0b", ["610062"]),
        ("\u00e9\U0001f600".encode(), "\u00e9\U0001f600"),
        (b'"\\\n', '"\\\n'),
    ],
)
def test_a_header_value_is_text_where_it_can_be_and_hex_digits_where_not(value: bytes | None, expected: Any) -> None:
    batch = encode([Record(b"v", headers=[("n", value), ("n", value)]), Record(b"w")])
    assert batch.headers is not None
    assert json.loads(batch.headers) == [["n", expected, "n", expected], None]
    assert batch.headers.isascii()


def test_a_header_name_with_nul_is_hex_digits_and_comes_back() -> None:
    batch = encode([Record(b"v", headers=[("a\0", b"1"), ("", None)])])
    assert batch.headers == '[[["6100"],"1","",null]]'
    (read,) = opened(batch).records()
    assert read.headers == (("a\0", b"1"), ("", None))


def test_offsets_with_gaps_come_back_and_can_be_sought() -> None:
    batch = encode([Record(b"a"), Record(b"b"), Record(b"c")], offset_deltas=[0, 4, 9])
    read = opened(batch, last_offset=BASE_OFFSET + 9)
    assert [record.offset for record in read.records()] == [5000, 5004, 5009]
    assert [record.value for record in read.records(from_offset=5001)] == [b"b", b"c"]
    assert list(read.records(from_offset=5010)) == []


def test_the_first_records_timestamp_is_the_base_and_the_largest_is_known() -> None:
    batch = encode([Record(b"", timestamp_ms=timestamp) for timestamp in (50, 7, 1200, 50)])
    assert (batch.base_timestamp_ms, batch.max_timestamp_ms) == (50, 1200)
    assert json.loads(batch.timestamp_deltas_ms or "") == [0, -43, 1150, 0]


def test_the_columns_of_an_arrow_reader_are_there_without_a_single_record() -> None:
    read = opened(encode([Record(b"ab"), Record(None), Record(b"c")]))
    values = read.values()
    assert (values.data, list(values.positions or ()), values.nulls) == (b"abc", [0, 2, 2, 3], [1])
    assert read.keys().positions is None
    assert read.timestamps_ms() is None
    assert read.headers() is None
    assert read.offsets() == range(5000, 5003)


class TestRefused:
    """Records that are not well formed are refused with a text that says which, why, and nothing of what they hold."""

    @pytest.mark.parametrize("wrong", ["text", 7, 1.5, ["list"], object(), True])
    @pytest.mark.parametrize("what", ["key", "value"])
    def test_keys_and_values_other_than_bytes(self, what: str, wrong: Any) -> None:
        record = dataclasses.replace(Record(b"ok"), **{what: wrong})
        with pytest.raises(InvalidRecord, match=f"record 1 .* its {what} is {type(wrong).__name__}"):
            encode([Record(b"ok"), record])

    def test_text_with_a_hint_to_encode_it(self) -> None:
        record: Any = Record(SECRET.decode())  # type: ignore[arg-type]
        with pytest.raises(InvalidRecord, match=r"encode it first: value\.encode\(\)") as caught:
            encode([record])
        assert SECRET.decode() not in str(caught.value)

    @pytest.mark.parametrize(
        "wrong", [("n",), ("n", b"v", b"w"), "n", 5, None, (5, b"v"), (b"n", b"v"), (["n"], b"v"), ("n", "v"), ("n", 5)]
    )
    def test_headers_that_are_not_pairs_of_a_name_and_bytes(self, wrong: Any) -> None:
        with pytest.raises(InvalidRecord, match="record 1 "):
            encode([Record(b""), Record(b"", headers=[wrong])])

    def test_header_names_with_a_lone_surrogate(self) -> None:
        with pytest.raises(InvalidRecord, match="lone surrogate"):
            encode([Record(b"", headers=[("\ud800", b"")])])

    @pytest.mark.parametrize("wrong", [-1, -(2**63), 2**63, 10**30, True, 1.0, "5", None])
    def test_timestamps_that_are_no_milliseconds(self, wrong: Any) -> None:
        with pytest.raises(InvalidTimestamp):
            encode([Record(b"", timestamp_ms=5), Record(b"", timestamp_ms=wrong)])
        with pytest.raises(InvalidTimestamp):
            encode([Record(b"", timestamp_ms=wrong)])

    def test_a_batch_of_nothing(self) -> None:
        with pytest.raises(InvalidRecord, match="at least one record"):
            encode([])

    def test_more_bytes_than_a_column_takes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(columns, "COLUMN_BYTES_MAX", 10)
        encode([Record(b"12345"), Record(b"67890")])
        with pytest.raises(RecordTooLarge, match="values of the batch take 11 bytes"):
            encode([Record(b"12345"), Record(b"678901")])

    def test_a_codec_whose_package_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "cramjam", None)
        with pytest.raises(UnsupportedCompression, match=r"pip install txnstore\[compression\]"):
            encode([Record(None)], codec=Codec.ZSTD)


def test_a_marker_has_no_records_and_keeps_what_it_is() -> None:
    marker = encode_control(ControlType.COMMIT, coordinator_epoch=3, producer=ProducerIdentity(9, 2), timestamp_ms=5)
    assert (marker.record_count, marker.size_bytes, marker.is_transactional) == (1, 0, True)
    read = opened(marker)
    assert read.is_control
    assert (read.control_type, read.coordinator_epoch, read.producer) == (ControlType.COMMIT, 3, ProducerIdentity(9, 2))
    assert list(read.records()) == []


@pytest.mark.parametrize("control_type", ControlType)
@pytest.mark.parametrize("producer", [ProducerIdentity(0, 0), ProducerIdentity(2**63 - 1, 32767)])
@pytest.mark.parametrize(("coordinator_epoch", "timestamp_ms"), [(0, 0), (3, 1_700_000_000_000)])
def test_the_columns_of_a_marker_are_those_of_its_batch(
    control_type: ControlType, producer: ProducerIdentity, coordinator_epoch: int, timestamp_ms: int
) -> None:
    of: Any = {"coordinator_epoch": coordinator_epoch, "producer": producer, "timestamp_ms": timestamp_ms}
    columns = control_columns(control_type, **of)
    assert columns == encode_control(control_type, **of).columns()
    # Nobody writes into what the next one begins with.
    columns["record_count"] = 7
    assert control_columns(control_type, **of)["record_count"] == 1


@given(st.lists(st.integers(0, columns.COLUMN_BYTES_MAX), max_size=50))
def test_positions_are_signed_integers_of_32_bits_the_highest_byte_first(positions: list[int]) -> None:
    positions = [0, *sorted(positions), columns.COLUMN_BYTES_MAX]
    packed = pack_positions(positions)
    assert packed == b"".join(place.to_bytes(4, "big", signed=True) for place in positions)
    assert unpack_positions(packed, len(positions) - 1, "key").tolist() == positions


@given(st.lists(cells, min_size=1, max_size=40))
def test_bytes_that_lie_behind_each_other_are_joined_as_single_ones_are_packed(batch: list[bytes | None]) -> None:
    positions = [0, *accumulate(len(cell or b"") for cell in batch)]
    as_here = b"".join(place.to_bytes(4, sys.byteorder) for place in positions)
    nulls = [index for index, cell in enumerate(batch) if cell is None]
    assert join_bytes(b"".join(cell or b"" for cell in batch), as_here, nulls) == pack_bytes(batch, "value")


def test_more_bytes_than_a_column_takes_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "COLUMN_BYTES_MAX", 10)
    with pytest.raises(RecordTooLarge, match="the batch takes 11 bytes"):
        join_bytes(b"12345678901", struct.pack("=2i", 0, 11), [])


@pytest.mark.parametrize("length", [0, 1, 9, 10, 99, 100, 12_345])
def test_a_single_key_or_value_is_packed_as_several_are(length: int) -> None:
    cell: Any = bytearray(length)
    assert pack_bytes([bytes(cell)], "value") == pack_bytes([cell], "value")
    assert pack_bytes([None], "value").data is None


def test_a_stamped_batch_has_the_appends_time_for_all_records() -> None:
    batch = encode([Record(b"a", timestamp_ms=1), Record(b"b", timestamp_ms=9)]).stamped(1234)
    assert (batch.timestamp_type, batch.timestamp_deltas_ms) == (TimestampType.LOG_APPEND_TIME, None)
    assert (batch.base_timestamp_ms, batch.max_timestamp_ms) == (1234, 1234)
    assert [record.timestamp_ms for record in opened(batch).records()] == [1234, 1234]


def test_replacing_a_column_of_a_batch_renews_checksum_and_size() -> None:
    batch = encode([Record(SECRET, timestamp_ms=1), Record(SECRET, timestamp_ms=2)])
    changed = dataclasses.replace(batch, producer_id=8, producer_epoch=0, base_sequence=4, value_data=b"")
    assert changed.crc == checksum(changed) != batch.crc
    assert changed.size_bytes == batch.size_bytes - 2 * len(SECRET)


def test_a_batch_does_not_show_its_payload() -> None:
    batch = encode([Record(SECRET, key=SECRET, headers=[("n", SECRET)])])
    assert SECRET.decode() not in repr(batch) + repr(opened(batch))

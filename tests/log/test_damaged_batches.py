"""Damaged batches: always CorruptBatch, whatever was damaged, with the place in its text and never the payload."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnstore.errors import CorruptBatch
from txnstore.log.codec import checksum, decode, encode
from txnstore.log.columns import Codec
from txnstore.model import ProducerIdentity, Record

SECRET = b"secret-payload"

#: What an append adds to the columns of a batch.
PLACE = {"partition_id": 77, "base_offset": 5000, "last_offset": 5003}

BATCH = encode(
    [
        Record(SECRET, key=b"k", timestamp_ms=10, headers=[("name", SECRET), ("b", b"\xff")]),
        Record(None, key=None, timestamp_ms=9),
        Record(b"", key=b"", timestamp_ms=2**40),
    ],
    producer=ProducerIdentity(70000, 3),
    base_sequence=11,
    is_transactional=True,
    offset_deltas=[0, 2, 3],
)
COLUMNS = sorted(BATCH.columns())
#: What the append gives, and what is not read from.
NOT_CHECKED = {"max_timestamp_ms", "size_bytes", "crc"}

SOUND_POSITIONS = struct.pack(">3i", 0, 1, 2)
#: Of two keys or values of one byte each.
POSITIONS_NONSENSE = [
    [0, 3, 2],
    [1, 1, 2],
    [-1, 0, 2],
    [0, -1, 2],
    [0, 1, -2],
    [0, -2, -1],
    [0, 2],
    [0, 1, 1, 2],
    [0, 1, 3],
    [0, 1, 1],
    [0, 1, 2**31 - 1],
    [0],
]

NONSENSE: list[Any] = [None, -1, 0, 2**31, 2**70, 1.5, True, b"", b"\0" * 50]
JSON_NONSENSE = """
[] | {} | null | [null] | 5 | nan | ["a"] | [[]] | [0,1.5,2] | [true,1,2] | [1,0,2] | [-1,0,1] | [0,1
[0,0,99999999999] | [0,0,9223372036854775807] | [0,2,1] | [["n"],null] | [[1,2],null] | [[["zz"],"v"],null]
[[{},{}],null] | ["\\ud800",null] | [["n","\\ud800"],null] | [[["ff"],"v"],null] | [["n",["61","62"]],null]
[["n",[]],null] | [5,null]
"""
NONSENSE += [struct.pack(f">{len(numbers)}i", *numbers) for numbers in POSITIONS_NONSENSE]
NONSENSE += [text for line in JSON_NONSENSE.strip().splitlines() for text in line.split(" | ")] + ["", "[" * 9999]


def row(columns: dict[str, Any] | None = None, **damage: Any) -> Any:
    """Return a row of the table, damaged."""
    return SimpleNamespace(**{**PLACE, **(columns or BATCH.columns()), **damage})


def test_the_batch_is_sound_to_begin_with() -> None:
    assert [record.offset for record in decode(row()).records()] == [5000, 5002, 5003]


@pytest.mark.parametrize("column", [column for column in COLUMNS if column not in NOT_CHECKED])
def test_no_column_can_be_changed_unnoticed(column: str) -> None:
    with pytest.raises(CorruptBatch, match=r"partition 77: .* 5000 to 5003 .* checksum") as caught:
        decode(row(**{column: _changed(BATCH.columns()[column])}))
    assert SECRET.decode() not in str(caught.value)


def test_moving_a_byte_from_one_column_to_the_next_is_noticed() -> None:
    columns = encode([Record(b"bc", key=b"a")]).columns()
    with pytest.raises(CorruptBatch):
        decode(row(columns, key_data=b"ab", value_data=b"c"))


@pytest.mark.parametrize("offsets", [(5000, 5002), (5000, 4999), (-3, 0)])
def test_offsets_that_cannot_hold_the_records_are_noticed(offsets: tuple[int, int]) -> None:
    with pytest.raises(CorruptBatch):
        list(decode(row(base_offset=offsets[0], last_offset=offsets[1])).records())


@pytest.mark.parametrize("what", ["key", "value"])
@pytest.mark.parametrize(
    "positions",
    [
        *[struct.pack(f">{len(numbers)}i", *numbers) for numbers in POSITIONS_NONSENSE],
        struct.pack("<3i", 0, 1, 2),
        struct.pack(">3q", 0, 1, 2),
        SOUND_POSITIONS[:-1],
        SOUND_POSITIONS + b"\0",
        b"",
        SOUND_POSITIONS.decode(),
        "[0,1,2]",
    ],
)
def test_positions_that_do_not_cut_the_data_into_the_records_are_noticed(positions: bytes | str, what: str) -> None:
    columns = encode([Record(b"a", b"c"), Record(b"b", b"d")]).columns()
    assert columns[f"{what}_positions"] == SOUND_POSITIONS
    batch = decode(_agreeing(row(columns, **{f"{what}_positions": positions})))
    with pytest.raises(CorruptBatch, match=rf"{what}_"):
        list(batch.records())


@pytest.mark.parametrize("headers", ['[["n"],null]', "[null]", "[[5,null],null]", '[null,["n",["zz"]]]', "[{},null]"])
def test_headers_that_are_not_names_and_values_are_noticed(headers: str) -> None:
    columns = encode([Record(b"a"), Record(b"b")]).columns()
    with pytest.raises(CorruptBatch, match=r"headers"):
        list(decode(_agreeing(row(columns, headers=headers))).records())


@given(st.sampled_from(COLUMNS), st.integers(0), st.integers(0, 7))
def test_a_flipped_bit_or_a_cut_is_corrupt_or_harmless(column: str, place: int, bit: int) -> None:
    for damage in (_flip, _cut):
        _read_through(row(**{column: damage(BATCH.columns()[column], place, bit)}))


@given(st.sampled_from(COLUMNS), st.integers(0), st.integers(0, 7), st.sampled_from(Codec))
def test_damage_under_a_checksum_that_agrees_is_corrupt_or_harmless(
    column: str, place: int, bit: int, codec: Codec
) -> None:
    records = [Record(SECRET * 9, headers=[("n", b"v")]), Record(None, key=b"k", timestamp_ms=7)]
    columns = encode(records, codec=codec).columns()
    for damage in (_flip, _cut):
        _read_through(_agreeing(row(columns, **{column: damage(columns[column], place, bit)})))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP, Codec.LZ4])
@pytest.mark.parametrize("column", COLUMNS)
def test_nonsense_under_a_checksum_that_agrees_is_corrupt_or_harmless(column: str, codec: Codec) -> None:
    columns = encode([Record(b"ab", key=b"c", headers=[("n", b"v")]), Record(None)], codec=codec).columns()
    for nonsense in NONSENSE:
        _read_through(_agreeing(row(columns, **{column: nonsense})))


def _changed(value: Any) -> Any:
    if value is None:
        return 1
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return value[:-1] + (" " if isinstance(value, str) else b"\0")


def _flip(value: Any, place: int, bit: int) -> Any:
    if value is None or isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return int(value) ^ (1 << (place % 64))
    data = bytearray(value.encode() if isinstance(value, str) else value)
    if data:
        data[place % len(data)] ^= 1 << bit
    return data.decode("latin-1") if isinstance(value, str) else bytes(data)


def _cut(value: Any, place: int, _bit: int) -> Any:
    return value[: place % (len(value) + 1)] if isinstance(value, (str, bytes)) else None


def _agreeing(damaged: Any) -> Any:
    """Return the row with a checksum that was made after the damage, where there can be one."""
    try:
        damaged.crc = checksum(damaged)
    except (struct.error, TypeError, ValueError, AttributeError):
        damaged.crc = 0
    return damaged


def _read_through(damaged: Any) -> None:
    """Read everything; nothing but CorruptBatch may come of it, and no payload may be in its text."""
    try:
        batch = decode(damaged)
        read = list(batch.records())
    except CorruptBatch as error:
        text = str(error)
    else:
        assert batch.is_control or len(read) == batch.record_count
        text = repr(batch)
    assert SECRET.decode() not in text

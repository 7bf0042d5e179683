"""Records are packed into columns in C as in Python: the same bytes and texts, and the same errors."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clients.bulk_paths import needs_c, outcome
from tests.tools.memory import assert_nothing_is_kept
from txnstore import bulk
from txnstore.log import columns
from txnstore.log.codec import PackedColumns, encode_packed
from txnstore.log.columns import (
    COLUMN_BYTES_MAX,
    Codec,
    DamagedColumn,
    PackedBytes,
    fitting,
    join_headers,
    pack_bytes,
    pack_differences,
    pack_integers,
)

pytestmark = needs_c


def both(work: Callable[[], Any]) -> Any:
    """Return what comes of it in C, which is what comes of it in Python."""
    in_c = outcome(work)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk, "IN_C", False)
        assert in_c == outcome(work)
    return in_c


class OwnBytes(bytes):
    """Bytes of a kind of their own."""


class OwnText(str):
    """A text of a kind of its own."""

    __slots__ = ()


plain = st.none() | st.binary(max_size=9) | st.just(b"x" * 70_000)
odd = st.builds(bytearray, st.binary(max_size=3)) | st.just(memoryview(b"view")) | st.just(OwnBytes(b"own"))
cells = st.lists(plain, min_size=1, max_size=40) | st.lists(plain | odd | st.sampled_from(["text", 5, 1.5]), min_size=1)
numbers = (
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1)
    | st.lists(st.integers(-3, 12), min_size=1, max_size=60)
    | st.lists(st.sampled_from([10**9, 10**9 + 1, 10**9 + 99]), min_size=1, max_size=60)
    | st.lists(st.integers(-(2**70), 2**70), min_size=1)
    | st.lists(st.integers(0, 2) | st.booleans(), min_size=1)
)


def sums_in_python(text: str, base: int, count: int) -> bytes | None:
    """Return what `unpack_sums` may; None: it is left to Python."""
    try:
        numbers = columns.unpack_integers(text, "numbers")
        sums = array("q", [base + number for number in numbers])
    except (DamagedColumn, OverflowError):
        return None
    return sums.tobytes() if len(sums) == count else None


@given(numbers, st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3), st.integers(-1, 1))
def test_numbers_that_were_packed(found: list[Any], base: int, too_many: int) -> None:
    text, count = pack_integers(found), len(found) + too_many
    unpacked = bulk.core.unpack_sums(text, base, count)
    if unpacked is not None:
        assert unpacked == sums_in_python(text, base, count)
    else:
        # Nothing that batches have is left to Python.
        assert sums_in_python(text, base, count) is None or any(abs(number) >= 10**18 for number in found)


@given(st.text("[]01239 ,-", max_size=9), st.text("[]01239 ,-+.eE\n\t\0é", max_size=6), st.integers(0, 4))
def test_texts_that_are_no_packed_numbers(inside: str, more: str, count: int) -> None:
    for text in (f"[{inside}]", f"[{inside}]{more}", f"[{inside}{more}]", more, inside):
        unpacked = bulk.core.unpack_sums(text, 5, count)
        assert unpacked is None or unpacked == sums_in_python(text, 5, count)


WRITTEN_OTHERWISE = (
    "[01]|[-01]|[00]|[+1]|[1.0]|[1e1]|[1 ]|[1 ,2]|[1,]|[,1]|[-0]|[- 1]|[-]|[]|[ ]|[1]]|[1] | [1]|[1\0]|[1]\0|[\t1]"
    "|[1,2|1,2]|1||[1 2]|[--1]|[1-]|[é]"
)
LARGE = (0, 10**18 - 1, -(10**18) + 1, 10**18, 2**63 - 1, -(2**63), 2**63, 10**30)


@pytest.mark.parametrize("text", [*WRITTEN_OTHERWISE.split("|"), *(f"[{number}]" for number in LARGE)])
@pytest.mark.parametrize("base", [0, 5, 2**63 - 1, -(2**63)])
def test_texts_one_by_one(text, base):
    for count in (1, 2):
        unpacked = bulk.core.unpack_sums(text, base, count)
        assert unpacked is None or unpacked == sums_in_python(text, base, count)
    is_usual = text in {"[0]", f"[{10**18 - 1}]", f"[{1 - 10**18}]"} and base in {0, 5}
    assert (bulk.core.unpack_sums(text, base, 1) is not None) or not is_usual


@given(cells)
def test_keys_and_values(cells: list[Any]) -> None:
    packed = both(lambda: pack_bytes(cells, "key"))
    both(lambda: pack_bytes(tuple(cells), "key"))
    if isinstance(packed, PackedBytes) and packed.positions is not None:
        assert len(packed.positions) == 4 * (len(cells) + 1)


@given(numbers, st.integers(-5, 5) | st.integers(-(2**63), 2**63 - 1) | st.just(2**64))
def test_numbers(numbers: list[int], base: int) -> None:
    assert both(lambda: pack_differences(numbers, base)) == pack_integers([number - base for number in numbers])
    both(lambda: pack_differences(tuple(numbers), numbers[0]))


@given(numbers)
def test_timestamps(numbers: list[Any]) -> None:
    both(lambda: encode_packed(PackedColumns(pack_bytes([None], "key"), pack_bytes([b"v"], "value"), numbers, None)))


@pytest.mark.parametrize("timestamp", [2**63, -1, 2**63 - 1, 0, True, 1.0, None, "1"], ids=str)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_timestamp_that_no_column_can_hold(timestamp, place):
    timestamps_ms: list[Any] = [5, 5, 6]
    timestamps_ms[place] = timestamp
    of_keys, of_values = pack_bytes([None] * 3, "key"), pack_bytes([b"v"] * 3, "value")
    both(lambda: encode_packed(PackedColumns(of_keys, of_values, timestamps_ms, None)))


headers = st.none() | st.sampled_from(['["a","1"]', '["a",null,"b",["ff"]]'])
records = st.lists(
    st.tuples(plain, plain, st.integers(0, 2**63 - 1) | st.integers(10**12, 10**12 + 2), headers), min_size=1
)


@given(records, st.integers(1, 3000), st.sampled_from(Codec))
def test_a_batch(records: Any, batch_bytes_max: int, codec: Codec) -> None:
    values, keys, timestamps_ms, packed = map(list, zip(*records, strict=True))
    sizes_bytes = [len(value or b"") + len(key or b"") + len(text or "") for value, key, _, text in records]
    count = both(lambda: fitting(sizes_bytes, keys, values, timestamps_ms, packed, batch_bytes_max=batch_bytes_max))
    assert 1 <= count <= len(records)

    def encoded() -> Any:
        packed_columns = PackedColumns(
            pack_bytes(keys, "key"), pack_bytes(values, "value"), timestamps_ms, join_headers(packed)
        )
        return encode_packed(packed_columns, codec=codec)

    both(encoded)


def test_what_takes_more_than_a_column_holds_is_refused(monkeypatch):
    monkeypatch.setattr(columns, "COLUMN_BYTES_MAX", 5)
    assert both(lambda: pack_bytes([b"abc", b"de"], "value")).data == b"abcde"
    assert both(lambda: pack_bytes([b"abc", b"def"], "value"))[1] == "the values of the batch take 6 bytes; 5 fit"
    assert both(lambda: pack_bytes([b"abcdef", b""], "value"))[1] == "the values of the batch take 6 bytes; 5 fit"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("bounds", ([],)),
        ("bounds", ((1, 2),)),
        ("bounds", ([1, True],)),
        ("bounds", ([1, 2**63],)),
        ("bounds", (5,)),
        (
            "pack_differences",
            (
                [],
                0,
            ),
        ),
        (
            "pack_differences",
            (
                [1],
                True,
            ),
        ),
        (
            "pack_differences",
            (
                [-(2**63)],
                1,
            ),
        ),
        (
            "pack_differences",
            (
                [2**63 - 1],
                -1,
            ),
        ),
        (
            "pack_cells",
            (
                [],
                5,
            ),
        ),
        (
            "pack_cells",
            (
                [None],
                5,
            ),
        ),
        (
            "pack_cells",
            (
                [b"a", "b"],
                5,
            ),
        ),
        (
            "pack_cells",
            (
                [b"a"],
                2**31,
            ),
        ),
        (
            "pack_cells",
            (
                [b"a"],
                0,
            ),
        ),
        (
            "pack_cells",
            (
                [b"a"],
                -1,
            ),
        ),
        (
            "pack_cells",
            (
                5,
                5,
            ),
        ),
        (
            "survey",
            (
                [],
                [],
                [],
                [],
                [],
            ),
        ),
        (
            "survey",
            (
                [1],
                [None],
                [None],
                [1],
                [None, None],
            ),
        ),
        (
            "survey",
            (
                [1],
                [None],
                [],
                [1],
                [None],
            ),
        ),
        (
            "survey",
            (
                [1],
                [None],
                [None],
                [1, 2],
                [None],
            ),
        ),
        (
            "survey",
            (
                [-1],
                [None],
                [None],
                [1],
                [None],
            ),
        ),
        (
            "survey",
            (
                [2**63 - 1, 1],
                [None] * 2,
                [None] * 2,
                [1, 1],
                [None] * 2,
            ),
        ),
        ("unpack_sums", (b"[1]", 0, 1)),
        ("unpack_sums", (OwnText("[1]"), 0, 1)),
        ("unpack_sums", ("[1]", 2**63, 1)),
        ("unpack_sums", ("[1]", None, 1)),
        ("unpack_sums", ("[1]", 0, 0)),
        ("unpack_sums", ("[1]", 0, -1)),
        ("unpack_sums", ("[1]", 0, 2**62)),
        ("unpack_sums", ("[1]", 0, 2**70)),
        ("unpack_sums", ("[1]", 2**63 - 1, 1)),
        ("unpack_sums", ("[-1]", -(2**63), 1)),
        (
            "survey",
            (
                (1,),
                [None],
                [None],
                [1],
                [None],
            ),
        ),
        (
            "survey",
            (
                [1],
                (None,),
                [None],
                [1],
                [None],
            ),
        ),
    ],
    ids=str,
)
def test_what_is_not_as_usual_is_left_to_python(name, arguments):
    assert getattr(bulk.core, name)(*arguments) is None


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("pack_differences", ([1],)),
        ("unpack_sums", ("[1]", 1)),
        ("pack_cells", ([b""],)),
        ("survey", ([1],)),
        ("bounds", ()),
    ],
)
def test_arguments_that_are_missing(name, arguments):
    with pytest.raises(TypeError):
        getattr(bulk.core, name)(*arguments)


@pytest.mark.slow
def test_memory_and_counts_stay_as_they_are_over_many_batches():
    kept = (None, b"value", b"")

    def turn() -> None:
        of_values: list[Any] = [b"value", None, b"key"] * 100
        for cells in (of_values, [*of_values, "text"], [None] * 300):
            bulk.core.pack_cells(cells, COLUMN_BYTES_MAX)
        for numbers in ([5, 5, 70_000] * 100, [5, 2**64], [-(2**63), 2**63 - 1]):
            bulk.core.pack_differences(numbers, 5)
            bulk.core.bounds(numbers)
        for text in ("[ 5,70]", "[5,x]", "[5,70"):
            bulk.core.unpack_sums(text, 2**40, 2)
        bulk.core.survey([5] * 300, of_values, of_values, [2**40] * 300, [None] * 300)

    assert_nothing_is_kept(turn, kept, turns=50, references_max=40, bytes_max=20_000)

"""The checksum of a batch is the same in C as zlib's."""

from __future__ import annotations

import random
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.memory import assert_nothing_is_kept
from txnstore import bulk

crc32: Any = bulk.core.crc32 if bulk.IN_C else None
pytestmark = pytest.mark.skipif(crc32 is None, reason="no checksum in C here")

checksums = st.integers(0, 2**32 - 1)
#: Around what is taken in at once (64), its parts (16), and where other threads may run meanwhile.
SIZES = [*range(130), 255, 256, 257, 4095, 2**20 - 1, 2**20, 2**20 + 17]


def test_the_value_that_all_publish():
    assert crc32(b"123456789", 0) == 0xCBF43926


@pytest.mark.parametrize("size", SIZES)
def test_each_size_wherever_it_begins(size):
    data = random.Random(size).randbytes(size + 3)
    for begin in (0, 3):
        for before in (0, 1, 0xFFFF_FFFF, 0x1234_5678):
            part = memoryview(data)[begin : begin + size]
            assert crc32(part, before) == zlib.crc32(part, before)
    for constant in (b"\0", b"\xff"):
        assert crc32(constant * size, 0) == zlib.crc32(constant * size)


@given(st.lists(st.binary(max_size=200), max_size=5), checksums)
def test_of_what_comes_in_parts(parts: list[bytes], before: int) -> None:
    crc = before
    for part in parts:
        crc = crc32(part, crc)
    assert crc == zlib.crc32(b"".join(parts), before)


@given(st.binary(min_size=65, max_size=400), st.data())
def test_no_changed_bit_is_overlooked(data: bytes, draw: st.DataObject) -> None:
    changed = bytearray(data)
    changed[draw.draw(st.integers(0, len(data) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    assert crc32(changed, 0) == zlib.crc32(changed) != crc32(data, 0)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ((), TypeError),
        ((b"",), TypeError),
        ((b"", 0, 0), TypeError),
        (("text", 0), TypeError),
        ((None, 0), TypeError),
        ((b"", None), TypeError),
        ((b"", 1.5), TypeError),
        pytest.param((memoryview(b"0123")[::2], 0), BufferError, id="memory that is not in one piece"),
    ],
    ids=str,
)
def test_what_are_no_bytes_or_no_number_is_refused(arguments, kind):
    with pytest.raises(kind):
        crc32(*arguments)


@pytest.mark.slow
def test_nothing_is_kept():
    large, view = bytearray(2**20), memoryview(b"x" * 100)

    def turn() -> None:
        crc32(large, 0)
        crc32(view, 2**40)
        wrongs: list[Any] = ["text", memoryview(b"0123")[::2]]
        for wrong in wrongs:
            with pytest.raises((TypeError, BufferError)):
                crc32(wrong, 0)

    assert_nothing_is_kept(turn, (large, view, None), turns=50, references_max=40, bytes_max=20_000)
    # No buffer is held: else it could not grow.
    large += b"1"

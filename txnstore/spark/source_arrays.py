"""This file is integers and byte strings of a batch's columns as Arrow arrays, without a Python object for each.

The columns are made for it: positions are an offsets buffer of Arrow's, written as numbers of one width, and the data
is the buffer behind it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from txnstore.log.columns import COLUMN_BYTES_MAX, DamagedColumn, unpack_integers
from txnstore.log.compression import Codec, DecompressionFailed, decompress

#: With fewer numbers Python's own JSON is faster than setting up Arrow's functions.
_ARROW_FROM: Final = 200
_TYPE_CODES: Final = {pa.int32(): "i", pa.int64(): "q"}


def integers(text: str, count: int, kind: pa.DataType, what: str) -> pa.Array:
    """Return the `count` numbers of a flat JSON array; `what` is the column's name.

    Raises:
        DamagedColumn: the text holds something else.
    """
    if count >= _ARROW_FROM:
        found = _by_width(text, count, kind)
        if found is not None:
            return found
    numbers = unpack_integers(text, what)
    if len(numbers) != count:
        raise DamagedColumn(f"{what} holds {len(numbers)} numbers instead of {count}")
    try:
        cells = array(_TYPE_CODES[kind], numbers)
    except OverflowError:
        raise DamagedColumn(f"{what} holds a number that is too large") from None
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(cells)])


def _by_width(text: str, count: int, kind: pa.DataType) -> pa.Array | None:
    """Return the numbers if all take the same room, as our own columns have them; else None."""
    width, rest = divmod(len(text) - 1, count)
    if rest or width < 2 or text.count(",") != count - 1 or text[0] != "[":  # noqa: PLR2004 - a digit and a comma
        return None
    is_signed = "-" in text
    try:
        cells = (text if is_signed else text.replace(" ", "0")).encode("ascii")
        fixed = pa.Array.from_buffers(pa.binary(width), count, [None, pa.py_buffer(cells[1:])])
        digits = pc.cast(pc.binary_slice(fixed, 0, width - 1), pa.string())
        return pc.cast(pc.ascii_ltrim_whitespace(digits) if is_signed else digits, kind)
    except (UnicodeEncodeError, pa.ArrowInvalid):
        return None


def byte_strings(
    positions_text: str | None, nulls_text: str | None, data: bytes | None, *, count: int, codec: Codec, what: str
) -> pa.Array:
    """Return `count` keys or values; `what` is "key" or "value".  See `log.columns.unpack_bytes`.

    Raises:
        DamagedColumn: the columns do not fit together.
        UnsupportedCompression: the package that implements the codec is not installed.
    """
    if positions_text is None:
        if data is not None or nulls_text is not None:
            raise DamagedColumn(f"there is {what}_data or null_{what}s without {what}_positions")
        return pa.nulls(count, pa.binary())
    if data is None:
        raise DamagedColumn(f"there is {what}_positions without bytes in {what}_data")
    positions = integers(positions_text, count + 1, pa.int32(), f"{what}_positions")
    size_bytes = positions[count].as_py()
    ascend = pc.all(pc.less_equal(positions.slice(0, count), positions.slice(1))).as_py()
    # Arrow takes what it is given: a position outside of the data would be read all the same.
    if positions[0].as_py() != 0 or not ascend or size_bytes > COLUMN_BYTES_MAX:
        raise DamagedColumn(f"{what}_positions is not {count + 1} ascending numbers from 0 on")
    try:
        plain = decompress(codec, data, size_bytes)
    except DecompressionFailed as error:
        raise DamagedColumn(f"{what}_data: {error}") from None
    nulls = () if nulls_text is None else unpack_integers(nulls_text, f"null_{what}s")
    buffers = [_validity(nulls, count, what), positions.buffers()[1], pa.py_buffer(plain)]
    return pa.Array.from_buffers(pa.binary(), count, buffers, null_count=len(set(nulls)))


def _validity(nulls: Sequence[int], count: int, what: str) -> Any:
    """Return Arrow's bitmap of what is not null, or None if everything is."""
    if not nulls:
        return None
    if min(nulls) < 0 or max(nulls) >= count:
        raise DamagedColumn(f"null_{what}s names records that are not there")
    bits = bytearray(b"\xff") * ((count + 7) // 8)
    for index in nulls:
        bits[index >> 3] &= ~(1 << (index & 7))
    return pa.py_buffer(bytes(bits))

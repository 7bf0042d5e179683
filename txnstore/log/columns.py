"""The columns of a record batch: many integers, byte strings or headers as one value that SQL can open.

Integers, of which most batches have few or none, become a flat JSON array in which all numbers have the same width,
padded with spaces in front, as JSON allows: `[  0, 95,190]`.  So the n-th number is found by arithmetic, without
reading the array up to it, and the width follows from the length of the text.  The view `records` lives on this.

Byte strings become one string of bytes, the positions where each begins and the last one ends, and the indexes of
those that are null.  Positions are signed integers of 32 bits, the first byte the highest, as PostgreSQL sends and Java
writes them: an Arrow offsets buffer but for the order of the bytes.  Every record has some, and as text they took
several times as long to pack and unpack.  The string is compressed as the batch's codec says, in the frame that other
tools know by its name (and Arrow by the same one): gzip members, raw snappy blocks, LZ4 frames, Zstandard frames.  gzip
comes with Python; the rest with the extra `compression`.

Headers become one JSON array with one element a record: null, or its headers as a flat array [name, value, name, value,
...].  A value is a string where it is UTF-8 text, [hex digits] for other bytes and for text with NUL, which
PostgreSQL's JSON cannot hold, and null for a null value; a name with NUL is [hex digits] likewise.  Order and
duplicates are kept.
"""

from __future__ import annotations

import enum
import importlib
import json
import struct
import sys
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from types import NoneType
from typing import Any, Final

from txnstore import bulk
from txnstore.errors import InvalidRecord, RecordTooLarge, UnsupportedCompression
from txnstore.model import Header

#: What either database takes in one column, with room to spare: PostgreSQL 1 GiB, SQLite 10**9 bytes.
COLUMN_BYTES_MAX: Final = 900_000_000
_INTEGERS: Final = {int}
_NULLS: Final = {NoneType}
_BYTES_AND_NULLS: Final = {bytes, NoneType}
_NUL: Final = "\0"
#: A text, the hex digits of bytes in an array of one, or null.
_JsonCell = str | list[str] | None
#: What tells zlib to read and write gzip members (zlib's manual, inflateInit2).
_GZIP_WINDOW_BITS: Final = zlib.MAX_WBITS | 16
_compact: Final = json.JSONEncoder(separators=(",", ":")).encode
#: What a position takes; in memory too, see `unpack_positions`.
POSITION_BYTES: Final = 4
_POSITIONS_OF_ONE: Final = struct.Struct(">ii").pack
#: What the columns of a batch take besides what is in them for each record: brackets, and where the last one ends.
_COLUMNS_BYTES: Final = 64
#: What a record without headers takes in the column of headers: "null,".
_NO_HEADERS_BYTES: Final = 5


class Codec(enum.IntEnum):
    """How the key and value columns of a batch are compressed; Kafka's numbers."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4

    @property
    def label(self) -> str:
        """The codec's name as `compression.type` spells it: "none", "gzip", "snappy", "lz4" or "zstd"."""
        return self.name.lower()

    @classmethod
    def named(cls, label: str) -> Codec:
        """Return the codec that `compression.type` calls `label`.

        Raises:
            UnsupportedCompression: there is no codec of this name.
        """
        for codec in cls:
            if codec.label == label:
                return codec
        known = ", ".join(codec.label for codec in cls)
        raise UnsupportedCompression(f"there is no compression codec {label!r}; the codecs are {known}")


def codec_for_topic(setting: str, producers: Codec) -> Codec:
    """Return how a batch for a topic is compressed: `setting` is the topic's compression.type.

    "producer" leaves it to the producer, "uncompressed" stands for no compression; the rest are codecs.
    """
    if setting == "producer":
        return producers
    return Codec.NONE if setting == "uncompressed" else Codec[setting.upper()]


class DecompressionFailed(Exception):
    """The data is not what the codec wrote, or not of the size that was said."""


def require_codec(codec: Codec) -> None:
    """Make sure that `codec` can be used here, before anything depends on it.

    Raises:
        UnsupportedCompression: the package that implements it is not installed.
    """
    if codec not in (Codec.NONE, Codec.GZIP):
        _cramjam(codec)


def codec_at_hand(setting: str) -> Codec:
    """Return how to compress for a topic where no producer says how; not at all where the package for it is missing."""
    codec = codec_for_topic(setting, Codec.NONE)
    try:
        require_codec(codec)
    except UnsupportedCompression:
        return Codec.NONE
    return codec


def compress(codec: Codec, data: bytes) -> bytes:
    """Return `data` as `codec` writes it.

    Raises:
        UnsupportedCompression: the package that implements the codec is not installed.
    """
    if codec is Codec.NONE:
        return data
    if codec is Codec.GZIP:
        # No clock in the header: the same records always give the same bytes.
        return zlib.compress(data, wbits=_GZIP_WINDOW_BITS)
    module = _cramjam(codec)
    return bytes(module.compress_raw(data) if codec is Codec.SNAPPY else module.compress(data))


def decompress(codec: Codec, data: bytes, size_bytes: int) -> bytes:
    """Return what `compress` was given, which was `size_bytes` long.

    Never allocates more than `size_bytes` for the result, whatever `data` would swell to.

    Raises:
        DecompressionFailed: the data is damaged or its true size is not `size_bytes`.
        UnsupportedCompression: the package that implements the codec is not installed.
    """
    if codec is Codec.NONE:
        plain = data
    elif codec is Codec.GZIP:
        plain = _gunzip(data, size_bytes)
    else:
        plain = _decompress_into(codec, data, size_bytes)
    if len(plain) != size_bytes:
        raise DecompressionFailed(f"{len(plain)} bytes where {size_bytes} were expected")
    return plain


def _gunzip(data: bytes, size_bytes: int) -> bytes:
    decompressor = zlib.decompressobj(wbits=_GZIP_WINDOW_BITS)
    try:
        # One byte of room more than is due shows a stream that is too long, and lets an empty one be read at all:
        # zlib takes 0 for "no limit".
        plain = decompressor.decompress(data, size_bytes + 1)
    except zlib.error as error:
        raise DecompressionFailed(str(error)) from None
    if not decompressor.eof or decompressor.unused_data:
        raise DecompressionFailed("the gzip stream is cut short, too long, or followed by something else")
    return plain


def _decompress_into(codec: Codec, data: bytes, size_bytes: int) -> bytes:
    module = _cramjam(codec)
    decompress_into = module.decompress_raw_into if codec is Codec.SNAPPY else module.decompress_into
    buffer = bytearray(size_bytes)
    try:
        written = decompress_into(data, buffer)
    except _cramjam_error() as error:
        raise DecompressionFailed(str(error)) from None
    return bytes(buffer) if written == size_bytes else bytes(buffer[:written])


def _cramjam(codec: Codec) -> Any:
    """Return cramjam's module for `codec`; imported here so that only those who compress need it."""
    try:
        return importlib.import_module("cramjam").__dict__[codec.label]
    except ImportError:
        raise UnsupportedCompression(
            f"compression {codec.label!r} needs another package: pip install txnstore[compression]"
        ) from None


def _cramjam_error() -> type[Exception]:
    error: type[Exception] = importlib.import_module("cramjam").DecompressionError
    return error


class DamagedColumn(Exception):
    """A column does not hold what is written here."""


def fitting(
    sizes_bytes: Sequence[int],
    keys: Sequence[bytes | None],
    values: Sequence[bytes | None],
    timestamps_ms: Sequence[int],
    packed_headers: Sequence[str | None],
    *,
    batch_bytes_max: int,
) -> int:
    """Return how many of these records, from the first one on, make a batch of at most `batch_bytes_max`; at least one.

    `sizes_bytes` is what key, value and packed headers of each record take.  That the columns may become smaller, also
    by compression, is not counted on.
    """
    count = len(sizes_bytes)
    found = bulk.core.survey(sizes_bytes, keys, values, timestamps_ms, packed_headers) if bulk.IN_C else None
    if found is None:
        found = _survey(sizes_bytes, keys, values, timestamps_ms, packed_headers)
    content_bytes, null_keys, null_values, earliest_ms, latest_ms, has_headers = found
    index_bytes = len(str(count)) + 1
    each_bytes = 0
    for null_count in null_keys, null_values:
        if null_count < count:
            each_bytes += POSITION_BYTES + (index_bytes if null_count else 0)
    if earliest_ms != latest_ms:
        base_ms = timestamps_ms[0]
        each_bytes += max(len(str(earliest_ms - base_ms)), len(str(latest_ms - base_ms))) + 1
    if has_headers:
        each_bytes += _NO_HEADERS_BYTES
    left_bytes = batch_bytes_max - _COLUMNS_BYTES
    if content_bytes + count * each_bytes <= left_bytes:
        return count
    ends = list(accumulate(size_bytes + each_bytes for size_bytes in sizes_bytes))
    return max(1, bisect_right(ends, left_bytes))


def _survey(
    sizes_bytes: Sequence[int],
    keys: Sequence[bytes | None],
    values: Sequence[bytes | None],
    timestamps_ms: Sequence[int],
    packed_headers: Sequence[str | None],
) -> tuple[int, int, int, int, int, bool]:
    return (
        sum(sizes_bytes),
        keys.count(None),
        values.count(None),
        min(timestamps_ms),
        max(timestamps_ms),
        any(packed is not None for packed in packed_headers),
    )


def pack_differences(numbers: Sequence[int], base: int) -> str:
    """Return how much larger each of at least one number is than `base`, as `pack_integers` does."""
    packed = bulk.core.pack_differences(numbers, base) if bulk.IN_C else None
    return pack_integers([number - base for number in numbers]) if packed is None else packed


def pack_integers(numbers: Sequence[int]) -> str:
    """Return at least one number as a flat JSON array of numbers of one width."""
    distinct = set(numbers)
    width = max(len(str(min(distinct))), len(str(max(distinct))))
    if len(distinct) * 4 > len(numbers):
        return f"[{_padded(numbers, width)}]"
    # Timestamps of a batch are often few: each is written out once.
    texts = {number: f"{number:{width}}" for number in distinct}
    return f"[{','.join(map(texts.__getitem__, numbers))}]"


def _padded(numbers: Sequence[int], width: int) -> str:
    # One format for all of them takes less than half the time of formatting each.
    return (f"%{width}d," * len(numbers) % tuple(numbers))[:-1]


def unpack_integers(text: str, what: str) -> list[int]:
    """Return the numbers of a flat JSON array; `what` is the column's name.

    Raises:
        DamagedColumn: that is not what the text holds.
    """
    try:
        numbers = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise DamagedColumn(f"{what} is not JSON") from None
    if type(numbers) is not list or set(map(type, numbers)) != _INTEGERS:
        raise DamagedColumn(f"{what} is not an array of integers")
    return numbers


def pack_positions(positions: Sequence[int]) -> bytes:
    """Return numbers from 0 to COLUMN_BYTES_MAX as the column of positions."""
    return struct.pack(f">{len(positions)}i", *positions)


def unpack_positions(packed: bytes, count: int, what: str) -> array[int]:
    """Return where each of `count` keys or values begins and the last one ends; `what` is "key" or "value".

    That they ascend is for the caller to check.

    Raises:
        DamagedColumn: the column is not of `count` + 1 numbers, or the data would begin after 0 or be too long.
    """
    # Text could have a checksum that agrees.
    if not isinstance(packed, (bytes, bytearray, memoryview)):
        raise DamagedColumn(f"{what}_positions is not bytes")
    if len(packed) != (count + 1) * POSITION_BYTES:
        raise DamagedColumn(f"{what}_positions is not {count + 1} numbers of {POSITION_BYTES} bytes")
    positions = array("i", bytes(packed))
    _turn_bytes(positions)
    if positions[0] != 0:
        raise not_ascending(count, what)
    if positions[-1] > COLUMN_BYTES_MAX:
        raise DamagedColumn(f"{what}_positions ends above {COLUMN_BYTES_MAX}")
    return positions


def _turn_bytes(positions: array[int]) -> None:
    """Turn numbers as this machine has them into numbers as the column has them, or back."""
    if sys.byteorder == "little":
        positions.byteswap()


def not_ascending(count: int, what: str) -> DamagedColumn:
    """Return the error that says so of the positions of `count` keys or values."""
    return DamagedColumn(f"{what}_positions is not {count + 1} ascending numbers from 0 on")


@dataclass(frozen=True, slots=True)
class PackedBytes:
    """Keys or values on their way into the table; the data is not compressed yet."""

    positions: bytes | None
    nulls: str | None
    data: bytes | None


_ALL_NULL: Final = PackedBytes(positions=None, nulls=None, data=None)


def pack_bytes(cells: Sequence[bytes | None], what: str) -> PackedBytes:
    """Return at least one key or value as columns; `what` is "key" or "value".

    Raises:
        InvalidRecord: one is neither bytes, bytearray, memoryview nor None.
        RecordTooLarge: together they take more than COLUMN_BYTES_MAX.
    """
    if len(cells) == 1 and type(cells[0]) is bytes and len(cells[0]) <= COLUMN_BYTES_MAX:
        # The same as below, in less time: many batches hold one record.
        return PackedBytes(_POSITIONS_OF_ONE(0, len(cells[0])), None, cells[0])
    packed = bulk.core.pack_cells(cells, COLUMN_BYTES_MAX) if bulk.IN_C else None
    if packed is not None:
        positions_column, null_indexes, data = packed
        return PackedBytes(positions_column, pack_differences(null_indexes, 0) if null_indexes else None, data)
    kinds = set(map(type, cells))
    if kinds == _NULLS:
        return _ALL_NULL
    if not kinds <= _BYTES_AND_NULLS:
        cells = [_as_bytes(cell, what, index) for index, cell in enumerate(cells)]
    nulls = None
    if NoneType in kinds:
        nulls = pack_integers([index for index, cell in enumerate(cells) if cell is None])
        # What is null takes no room.
        cells = [cell or b"" for cell in cells]
    positions = list(accumulate(map(len, cells), initial=0))  # type: ignore[arg-type]  # no cell is None any more
    if positions[-1] > COLUMN_BYTES_MAX:
        raise RecordTooLarge(f"the {what}s of the batch take {positions[-1]} bytes; {COLUMN_BYTES_MAX} fit")
    return PackedBytes(
        positions=pack_positions(positions),
        nulls=nulls,
        data=b"".join(cells),  # type: ignore[arg-type]  # as above
    )


def join_bytes(data: bytes, positions: bytes, nulls: Sequence[int]) -> PackedBytes:
    """Return keys or values as columns that already follow each other: an Arrow array, or a part of one.

    `positions` is where each begins and the last one ends, from 0 on, as this machine has numbers of 32 bits; `nulls`
    names those that are null, ascending, which take no room.

    Raises:
        RecordTooLarge: together they take more than COLUMN_BYTES_MAX.
    """
    if (len(nulls) + 1) * POSITION_BYTES == len(positions):
        return _ALL_NULL
    if len(data) > COLUMN_BYTES_MAX:
        raise RecordTooLarge(f"the batch takes {len(data)} bytes in one column; {COLUMN_BYTES_MAX} fit")
    turned = array("i", positions)
    _turn_bytes(turned)
    return PackedBytes(turned.tobytes(), pack_integers(nulls) if nulls else None, data)


def _as_bytes(cell: object, what: str, index: int) -> bytes | None:
    if cell is None:
        return None
    if isinstance(cell, (bytes, bytearray, memoryview)):
        return bytes(cell)
    hint = f"; encode it first: {what}.encode()" if isinstance(cell, str) else ""
    raise InvalidRecord(
        f"record {index} of the batch: its {what} is {type(cell).__name__}, but a {what} is bytes or None{hint}"
    )


@dataclass(frozen=True, slots=True)
class BytesColumn:
    """Keys or values as they are read: `data`, where each begins and the last one ends, and which of them are null.

    Without positions every one is null.
    """

    data: bytes
    positions: Sequence[int] | None
    nulls: Sequence[int] = ()

    def cells(self, first_index: int = 0) -> Iterable[bytes | None]:
        """Return each byte string or None, from the one with number `first_index` on."""
        if self.positions is None:
            return repeat(None)
        data = self.data
        # A list is cut in less time than an array.
        positions = self.positions if isinstance(self.positions, list) else list(self.positions)
        positions = positions[first_index:] if first_index else positions
        # Not `pairwise`: it is slower than a copy of the positions.
        cells: list[bytes | None] = [data[start:end] for start, end in zip(positions, positions[1:])]  # noqa: B905, RUF007 - (above)
        for index in self.nulls:
            if index >= first_index:
                cells[index - first_index] = None
        return cells


def unpack_bytes(
    packed_positions: bytes | None, nulls_text: str | None, data: bytes | None, *, count: int, codec: Codec, what: str
) -> BytesColumn:
    """Return `count` keys or values; `what` is "key" or "value".

    Raises:
        DamagedColumn: the columns do not fit together.
        UnsupportedCompression: the package that implements the codec is not installed.
    """
    if packed_positions is None:
        if data is not None or nulls_text is not None:
            raise DamagedColumn(f"there is {what}_data or null_{what}s without {what}_positions")
        return BytesColumn(data=b"", positions=None)
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise DamagedColumn(f"there is {what}_positions without bytes in {what}_data")
    positions = _ascending(unpack_positions(packed_positions, count, what))
    if positions is None:
        raise not_ascending(count, what)
    try:
        plain = decompress(codec, bytes(data), positions[-1])
    except DecompressionFailed as error:
        raise DamagedColumn(f"{what}_data: {error}") from None
    return BytesColumn(data=plain, positions=positions, nulls=_unpack_nulls(nulls_text, count, what))


def _ascending_in_python(positions: array[int]) -> Sequence[int] | None:
    """Return the positions, or None if they do not ascend."""
    # As a list they are sorted, and cut later, in less time.
    numbers = positions.tolist()
    return numbers if numbers == sorted(numbers) else None


def _ascending_in_c(positions: array[int]) -> Sequence[int] | None:
    return positions if bulk.core.ascends(positions) else None


_ascending: Final = _ascending_in_c if bulk.IN_C else _ascending_in_python


def _unpack_nulls(nulls_text: str | None, count: int, what: str) -> Sequence[int]:
    if nulls_text is None:
        return ()
    nulls = unpack_integers(nulls_text, f"null_{what}s")
    if min(nulls) < 0 or max(nulls) >= count:
        raise DamagedColumn(f"null_{what}s names records that are not there")
    return nulls


def pack_headers(headers_of_records: Sequence[Sequence[Header]]) -> str | None:
    """Return the headers of each record as a JSON array, or None if no record has any.

    Raises:
        InvalidRecord: a header is not a pair of a name and bytes or None.
    """
    if not any(headers_of_records):
        return None
    # Names repeat from record to record: each is checked once.
    names: dict[str, _JsonCell] = {}
    rows = [
        [cell for header in headers for cell in _pack_header(header, names, index)] if headers else None
        for index, headers in enumerate(headers_of_records)
    ]
    return _compact(rows)


def unpack_headers(text: str, count: int) -> list[Sequence[Header]]:
    """Return the headers of each of `count` records.

    Raises:
        DamagedColumn: the text is not what `pack_headers` returns.
    """
    try:
        rows = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise DamagedColumn("headers is not JSON") from None
    if type(rows) is not list or len(rows) != count:
        raise DamagedColumn(f"headers is not an array with {count} elements")
    return [() if row is None else _unpack_row(row) for row in rows]


def join_headers(packed_of_records: Sequence[str | None]) -> str | None:
    """Return what `pack_headers` would, of records whose headers `pack_record_headers` has packed."""
    if not any(packed_of_records):
        return None
    return f"[{','.join([packed or 'null' for packed in packed_of_records])}]"


def pack_record_headers(headers: Sequence[Header]) -> str | None:
    """Return the headers of one record as its element of that array, or None if it has none.

    Raises:
        InvalidRecord: a header is not a pair of a name and bytes or None.
    """
    if not headers:
        return None
    names: dict[str, _JsonCell] = {}
    return _compact([cell for header in headers for cell in _pack_header(header, names, 0)])


def unpack_record_headers(text: str) -> Sequence[Header]:
    """Return the headers of one record.

    Raises:
        DamagedColumn: the text is not what `pack_record_headers` returns.
    """
    try:
        row = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise DamagedColumn("headers is not JSON") from None
    return () if row is None else _unpack_row(row)


def _pack_header(header: Header, names: dict[str, _JsonCell], index: int) -> tuple[_JsonCell, _JsonCell]:
    try:
        name, value = header
    except (TypeError, ValueError):
        raise InvalidRecord(f"record {index} of the batch: a header is not a pair (name, value)") from None
    # A name that is not a str may not even have a hash.
    packed_name = names.get(name) if type(name) is str else None
    if packed_name is None:
        packed_name = names[name] = _pack_name(name, index)
    return packed_name, _pack_value(value, index)


def _pack_name(name: object, index: int) -> _JsonCell:
    if not isinstance(name, str):
        raise InvalidRecord(
            f"record {index} of the batch: the name of a header is {type(name).__name__}, but names are str"
        )
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        raise InvalidRecord(
            f"record {index} of the batch: the name of a header is not Unicode text (it has a lone surrogate)"
        ) from None
    return [encoded.hex()] if _NUL in name else name


def _pack_value(value: object, index: int) -> _JsonCell:
    if value is None:
        return None
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise InvalidRecord(
            f"record {index} of the batch: the value of a header is {type(value).__name__}, "
            "but values are bytes or None; encode text first"
        )
    data = bytes(value)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return [data.hex()]
    return [data.hex()] if _NUL in text else text


def _unpack_row(row: Any) -> Sequence[Header]:
    if type(row) is not list:
        raise DamagedColumn("headers holds an element that is neither null nor a list")
    try:
        return tuple(
            (
                name if type(name) is str else _unpack_hex(name).decode(),
                value.encode() if type(value) is str else None if value is None else _unpack_hex(value),
            )
            for name, value in zip(row[::2], row[1::2], strict=True)
        )
    except (ValueError, TypeError):
        raise DamagedColumn("headers holds something other than pairs of text or hex digits") from None


def _unpack_hex(cell: Any) -> bytes:
    """Return the bytes of [hex digits]; ValueError or TypeError if that is not what `cell` is."""
    (digits,) = cell
    return bytes.fromhex(digits)

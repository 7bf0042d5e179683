"""This file is record headers as one JSON column: readable in SQL, and every byte of them comes back.

The array has one element a record: null, or its headers as a flat array [name, value, name, value, ...].  A value is
a string where it is UTF-8 text, [hex digits] for other bytes and for text with NUL, which PostgreSQL's JSON cannot
hold, and null for a null value; a name with NUL is [hex digits] likewise.  Order and duplicates are kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from txnstore.errors import InvalidRecord
from txnstore.log.columns import DamagedColumn
from txnstore.model import Header

_NUL: Final = "\0"

#: A text, the hex digits of bytes in an array of one, or null.
_JsonCell = str | list[str] | None


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
        [cell for header in headers for cell in _pack(header, names, index)] if headers else None
        for index, headers in enumerate(headers_of_records)
    ]
    return json.dumps(rows, separators=(",", ":"))


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
    return [() if row is None else _unpack(row) for row in rows]


def pack_record_headers(headers: Sequence[Header]) -> str | None:
    """Return the headers of one record as its element of that array, or None if it has none.

    Raises:
        InvalidRecord: a header is not a pair of a name and bytes or None.
    """
    if not headers:
        return None
    names: dict[str, _JsonCell] = {}
    return json.dumps([cell for header in headers for cell in _pack(header, names, 0)], separators=(",", ":"))


def unpack_record_headers(text: str) -> Sequence[Header]:
    """Return the headers of one record.

    Raises:
        DamagedColumn: the text is not what `pack_record_headers` returns.
    """
    try:
        row = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise DamagedColumn("headers is not JSON") from None
    return () if row is None else _unpack(row)


def _pack(header: Header, names: dict[str, _JsonCell], index: int) -> tuple[_JsonCell, _JsonCell]:
    try:
        name, value = header
    except (TypeError, ValueError):
        raise InvalidRecord(f"record {index} of the batch: a header is not a pair (name, value)") from None
    # A name that is no str may not even have a hash.
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


def _unpack(row: Any) -> Sequence[Header]:
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
        raise DamagedColumn("headers holds what are not pairs of text or hex digits") from None


def _unpack_hex(cell: Any) -> bytes:
    """Return the bytes of [hex digits]; ValueError or TypeError if that is not what `cell` is."""
    (digits,) = cell
    return bytes.fromhex(digits)

"""This file is how a line becomes a record: as it is, split into key and value, or as JSON."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from txnstore.model import Header

#: What a JSON line may hold; the last three are printed by `consume --json`, mean nothing here and are left out.
_KEYS: Final = ("key", "value", "headers", "partition", "timestamp", "topic", "offset", "timestamp_type")
_PARTITION_MAX: Final = 2**31 - 1
_TIMESTAMP_MS_MAX: Final = 2**63 - 1
_PAIR: Final = 2
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "\\": "\\"}


class InputRecord(NamedTuple):
    """A record as it was read."""

    value: bytes | None
    key: bytes | None = None
    headers: tuple[Header, ...] = ()
    partition: int | None = None
    timestamp_ms: int | None = None


class NotARecord(Exception):
    """A line cannot be a record; the text says why, and nothing of what is in it."""


Parse = Callable[[bytes], InputRecord]


def line_parser(key_separator: bytes | None, headers: tuple[Header, ...]) -> Parse:
    """Return what makes a record of a line: its key stands before the first separator, if there is one."""

    def parse(line: bytes) -> InputRecord:
        if key_separator is None:
            return InputRecord(line, headers=headers)
        key, found, value = line.partition(key_separator)
        return InputRecord(value, key, headers) if found else InputRecord(line, headers=headers)

    return parse


def parse_json_line(line: bytes) -> InputRecord:
    """Return the record that a JSON object describes.

    Raises:
        NotARecord: the line is no such object.
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise NotARecord("it is not JSON") from None
    if not isinstance(fields, dict):
        raise NotARecord('it is not a JSON object like {"key": "k", "value": "v"}')
    unknown = [name for name in fields if name not in _KEYS]
    if unknown:
        raise NotARecord(f"it has the member {unknown[0][:40]!r}; known are {', '.join(_KEYS)}")
    return InputRecord(
        _bytes(fields.get("value"), "value"),
        _bytes(fields.get("key"), "key"),
        tuple(_headers(fields.get("headers"))),
        _number(fields.get("partition"), "partition", _PARTITION_MAX),
        _number(fields.get("timestamp"), "timestamp", _TIMESTAMP_MS_MAX),
    )


def unescape(text: str) -> bytes:
    r"""Return the bytes that a text with \n, \t, \x00 and the like stands for."""

    def replace(found: re.Match[str]) -> str:
        if found[1] is not None:
            return bytes.fromhex(found[1]).decode("utf-8", "surrogateescape")
        return _ESCAPED.get(found[2], found[0])

    return _ESCAPE.sub(replace, text).encode("utf-8", "surrogateescape")


def _bytes(value: Any, what: str) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise NotARecord(f"its {what} holds half of a surrogate pair") from None
    if isinstance(value, dict) and list(value) == ["base64"] and isinstance(value["base64"], str):
        try:
            return base64.b64decode(value["base64"], validate=True)
        except (binascii.Error, ValueError):
            raise NotARecord(f"its {what} is not base64") from None
    raise NotARecord(f'its {what} is neither text, null nor {{"base64": "..."}}; JSON in a {what} is given as text')


def _headers(headers: Any) -> list[Header]:
    if headers is None:
        return []
    pairs = list(headers.items()) if isinstance(headers, dict) else headers
    if not isinstance(pairs, list) or any(
        not isinstance(pair, list | tuple) or len(pair) != _PAIR or not isinstance(pair[0], str) for pair in pairs
    ):
        raise NotARecord('its headers are neither {"name": "value"} nor [["name", "value"]]')
    return [(_header_name(name), _bytes(value, "header")) for name, value in pairs]


def _header_name(name: str) -> str:
    _bytes(name, "header's name")
    return name


def _number(value: Any, what: str, maximum: int) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= maximum:
        raise NotARecord(f"its {what} is not a whole number from 0 to {maximum}")
    return value

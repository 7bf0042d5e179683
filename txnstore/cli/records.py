"""Records as text: made of lines or JSON, and printed by a format like kcat's or as JSON."""

from __future__ import annotations

import base64
import binascii
import json
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from txnstore.cli.output import json_text
from txnstore.clients.model.message import Message
from txnstore.model import Header, TimestampType

#: What a JSON line may hold; the last three, which `consume --json` prints, are ignored.
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
    """Return the record that a JSON object describes."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise NotARecord("it is not JSON") from None
    if not isinstance(fields, dict):
        raise NotARecord('it is not a JSON object like {"key": "k", "value": "v"}')
    unknown = [name for name in fields if name not in _KEYS]
    if unknown:
        raise NotARecord(f"it has the unknown member {unknown[0][:40]!r}; known are {', '.join(_KEYS)}")
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
    raise NotARecord(f'its {what} is neither text, null nor {{"base64": "..."}}; give JSON in a {what} as text')


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


Print = Callable[[Message], bytes]

DEFAULT_FORMAT: Final = r"%s\n"
#: What stands for what in a format.
DIRECTIVES: Final = (
    "%t topic, %p partition, %o offset, %k key, %s value, %h headers, %T timestamp in milliseconds,"
    r" %K and %S length of key and value (-1: null), %R length as 4 bytes, %% a percent sign; \n, \t, \x00"
)
_NAMED_TYPES: Final = {1: TimestampType.CREATE_TIME, 2: TimestampType.LOG_APPEND_TIME}
_DIRECTIVE: Final = re.compile("%(.?)", re.DOTALL)


class UnknownDirective(ValueError):
    """A format has a percent sign before an unknown letter."""


def _length(cell: bytes | None) -> int:
    return -1 if cell is None else len(cell)


def _printed_headers(message: Message) -> bytes:
    return b",".join(
        name.encode() + b"=" + (b"NULL" if value is None else value) for name, value in message.headers() or ()
    )


_PARTS: Final[dict[str, Print]] = {
    "t": lambda message: (message.topic() or "").encode(),
    "p": lambda message: b"%d" % (message.partition() or 0),
    "o": lambda message: b"%d" % (message.offset() or 0),
    "k": lambda message: message.key() or b"",
    "s": lambda message: message.value() or b"",
    "h": _printed_headers,
    "T": lambda message: b"%d" % message.timestamp()[1],
    "K": lambda message: b"%d" % _length(message.key()),
    "S": lambda message: b"%d" % _length(message.value()),
    "R": lambda message: struct.pack(">i", _length(message.value())),
    "%": lambda _: b"%",
}


def printer(format_: str) -> Print:
    """Return what prints a record by the format."""
    parts: list[Print] = []
    # What stands between the directives, and the directives: text, letter, text, letter, ..., text.
    for index, piece in enumerate(_DIRECTIVE.split(format_)):
        if index % 2:
            part = _PARTS.get(piece)
            if part is None:
                raise UnknownDirective(f"%{piece} is unknown in a format; known are {DIRECTIVES}")
            parts.append(part)
        elif piece:
            parts.append(_constant(unescape(piece)))
    if len(parts) == 1:
        return parts[0]
    return lambda message: b"".join([part(message) for part in parts])


def print_json(message: Message) -> bytes:
    """Return the record as a line of JSON, which `txnstore produce --json-lines` takes again."""
    return json_text(record_facts(message)).encode() + b"\n"


def record_facts(message: Message) -> dict[str, Any]:
    """Return everything about a record as JSON can hold it."""
    kind, timestamp_ms = message.timestamp()
    return {
        "topic": message.topic(),
        "partition": message.partition(),
        "offset": message.offset(),
        "timestamp": timestamp_ms,
        "timestamp_type": _kind(kind),
        "key": as_json(message.key()),
        "value": as_json(message.value()),
        "headers": headers_as_json(message.headers() or ()),
    }


def as_json(cell: bytes | None) -> Any:
    """Return text as text, and other bytes in base64."""
    if cell is None:
        return None
    try:
        return cell.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(cell).decode("ascii")}


def headers_as_json(headers: Sequence[tuple[str, bytes | None]]) -> list[list[Any]]:
    """Return headers as pairs, for names repeat and have an order."""
    return [[name, as_json(value)] for name, value in headers]


def _kind(kind: int) -> str | None:
    named = _NAMED_TYPES.get(kind)
    return {TimestampType.CREATE_TIME: "CreateTime", TimestampType.LOG_APPEND_TIME: "LogAppendTime", None: None}[named]


def _constant(text: bytes) -> Print:
    return lambda _: text

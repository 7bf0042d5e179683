"""This file is how a record is printed: by a format like kcat's, or as a line of JSON."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

from txnstore.cli.output import json_text
from txnstore.cli.record_input import unescape
from txnstore.clients.model.message import Message
from txnstore.model import TimestampType

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
    """A format holds a percent sign that means nothing."""


def _length(cell: bytes | None) -> int:
    return -1 if cell is None else len(cell)


def _headers(message: Message) -> bytes:
    return b",".join(
        name.encode() + b"=" + (b"NULL" if value is None else value) for name, value in message.headers() or ()
    )


_PARTS: Final[dict[str, Print]] = {
    "t": lambda message: (message.topic() or "").encode(),
    "p": lambda message: b"%d" % (message.partition() or 0),
    "o": lambda message: b"%d" % (message.offset() or 0),
    "k": lambda message: message.key() or b"",
    "s": lambda message: message.value() or b"",
    "h": _headers,
    "T": lambda message: b"%d" % message.timestamp()[1],
    "K": lambda message: b"%d" % _length(message.key()),
    "S": lambda message: b"%d" % _length(message.value()),
    "R": lambda message: struct.pack(">i", _length(message.value())),
    "%": lambda _: b"%",
}


def printer(format_: str) -> Print:
    """Return what prints a record by the format.

    Raises:
        UnknownDirective: the format has a directive that there is not.
    """
    parts: list[Print] = []
    # What stands between the directives, and the directives: text, letter, text, letter, ..., text.
    for index, piece in enumerate(_DIRECTIVE.split(format_)):
        if index % 2:
            part = _PARTS.get(piece)
            if part is None:
                raise UnknownDirective(f"%{piece} means nothing in a format; known are {DIRECTIVES}")
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
    """Return text as text, and what is no text in base64."""
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

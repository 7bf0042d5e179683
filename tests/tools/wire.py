"""This file is as much of PostgreSQL's protocol (version 3) as a proxy must read to know what passes through it.

Formats: https://www.postgresql.org/docs/current/protocol-message-formats.html
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Final

_LENGTH: Final = struct.Struct("!I")
_CODE: Final = struct.Struct("!I")
_CODE_END: Final = 8

_SSL_REQUEST: Final = 80877103
_GSS_ENCRYPTION_REQUEST: Final = 80877104
_CANCEL_REQUEST: Final = 80877102

#: Kinds that this file gives to the messages that come before a session and have no type byte.
STARTUP: Final = "startup"
CANCEL: Final = "cancel"
ENCRYPTION: Final = "encryption"

QUERY: Final = "Q"
PARSE: Final = "P"
BIND: Final = "B"
EXECUTE: Final = "E"
SYNC: Final = "S"
#: From the server: the answer is complete, the next request may come.
READY_FOR_QUERY: Final = "Z"


@dataclass(frozen=True)
class Message:
    """One message: its type byte (or one of the kinds above) and all of its bytes, header included."""

    kind: str
    raw: bytes

    def strings(self, count: int) -> list[str]:
        """Return the first `count` NUL-terminated strings of the body of a typed message."""
        return [part.decode(errors="replace") for part in self.raw[5:].split(b"\0", count)[:count]]


class MessageReader:
    """Cuts a stream of bytes into messages, whatever pieces it arrives in."""

    def __init__(self, *, from_client: bool) -> None:
        """Make a reader at the start of a connection; a client's first messages have no type byte."""
        self._buffer = bytearray()
        self._in_session = not from_client

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that are complete with `data`."""
        self._buffer += data
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def _next(self) -> Message | None:
        header = 1 if self._in_session else 0
        if len(self._buffer) < header + _LENGTH.size:
            return None
        end = header + _LENGTH.unpack_from(self._buffer, header)[0]
        if len(self._buffer) < end:
            return None
        raw = bytes(self._buffer[:end])
        del self._buffer[:end]
        if self._in_session:
            return Message(chr(raw[0]), raw)
        return Message(self._kind_before_session(raw), raw)

    def _kind_before_session(self, raw: bytes) -> str:
        (code,) = _CODE.unpack(raw[_LENGTH.size : _CODE_END])
        if code in {_SSL_REQUEST, _GSS_ENCRYPTION_REQUEST}:
            return ENCRYPTION
        self._in_session = True
        return CANCEL if code == _CANCEL_REQUEST else STARTUP


class StatementTracker:
    """Knows which SQL each message of a client makes the server execute.

    In the extended protocol that is Execute, of a portal that Bind made of a statement that Parse named: a prepared
    statement is parsed once and executed often.
    """

    def __init__(self) -> None:
        """Start with no statement known, as a session does."""
        self._statements: dict[str, str] = {}
        self._portals: dict[str, str] = {}

    def executed_by(self, message: Message) -> str | None:
        """Return the SQL that this message executes, or None; call it for every message in order."""
        if message.kind == QUERY:
            return message.strings(1)[0]
        if message.kind == PARSE:
            name, text = message.strings(2)
            self._statements[name] = text
        elif message.kind == BIND:
            portal, name = message.strings(2)
            self._portals[portal] = self._statements.get(name, "")
        elif message.kind == EXECUTE:
            return self._portals.get(message.strings(1)[0])
        return None


# What may contain a semicolon that ends no statement: quoted text, quoted names, comments.
_OPAQUE: Final = re.compile(
    r"""'(?:[^']|'')*' | "(?:[^"]|"")*" | (?P<tag>\$\w*\$).*?(?P=tag) | --[^\n]* | /\*.*?\*/""",
    re.VERBOSE | re.DOTALL,
)


def contains_statement(text: str, beginning: str) -> bool:
    """Return whether one of the statements in `text` begins with the words of `beginning`, in any case.

    COMMIT alone does not mean COMMIT PREPARED, nor ROLLBACK the rollback to a savepoint or of what is prepared.
    """
    wanted = beginning.upper().split()
    for statement in _OPAQUE.sub(_without_semicolons, text).split(";"):
        words = statement.upper().split()
        if words[: len(wanted)] == wanted and _is_the_plain_command(wanted, words):
            return True
    return False


def _without_semicolons(opaque: re.Match[str]) -> str:
    is_comment = opaque.group().startswith(("--", "/*"))
    return " " if is_comment else opaque.group().replace(";", ",")


def _is_the_plain_command(wanted: list[str], words: list[str]) -> bool:
    if wanted in (["COMMIT"], ["ROLLBACK"]):
        return not {"PREPARED", "TO"} & set(words[1:3])
    return True

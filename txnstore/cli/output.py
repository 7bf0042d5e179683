"""Output: lines, tables, JSON and errors, and the codes that the program exits with."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import typer
from rich.cells import cell_len
from rich.console import Console

from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.errors import Recovery, TxnStoreError

#: What is wrong stays wrong until somebody changes something.
FAILED: Final = 1
#: EX_TEMPFAIL of sysexits.h.
TRY_AGAIN_LATER: Final = 75

#: Errors after which the same call may be made again.
_MAY_PASS: Final = frozenset({Recovery.RETRY, Recovery.RESOLVE})
_MAY_PASS_CODES: Final = frozenset({KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._MSG_TIMED_OUT})

_console: Final = Console(highlight=False, markup=False, soft_wrap=True)
_errors: Final = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


class CommandFailed(Exception):
    """A command cannot do what it was asked for; its text is what the user reads."""

    def __init__(self, message: str, *, code: int = FAILED) -> None:
        """Exit with `code` after the message."""
        super().__init__(message)
        self.code = code


def say(line: str) -> None:
    """Print one line of result."""
    _console.print(printable(line))


def headline(line: str) -> None:
    """Print one line above results; it stands out on a terminal."""
    _console.print(printable(line), style="bold")


def hint(line: str) -> None:
    """Print one line that is not a result: to the standard error, so that a pipe does not get it."""
    _errors.print(printable(line))


def report(error: Exception) -> None:
    """Print an error as one line, whatever characters the database put into it."""
    _errors.print(printable(f"txnstore: {error_text(error)}"), style="red")


def error_text(error: Exception) -> str:
    """Return what an error says, without the codes that programs go by."""
    if isinstance(error, KafkaException):
        kafka_error = error.args[0]
        if isinstance(kafka_error, KafkaError):
            return kafka_error.str()
    return str(error)


def exit_code(error: Exception) -> int:
    """Return what the program exits with after an error."""
    if isinstance(error, CommandFailed):
        return error.code
    if isinstance(error, TxnStoreError):
        return TRY_AGAIN_LATER if error.recovery in _MAY_PASS else FAILED
    kafka_error = error.args[0] if error.args else None
    if isinstance(kafka_error, KafkaError) and (
        kafka_error.retriable() or any(kafka_error == code for code in _MAY_PASS_CODES)
    ):
        return TRY_AGAIN_LATER
    return FAILED


def tell_and_exit(errors: Iterable[Exception]) -> None:
    """Return if there are none; else tell of each, once what was found is shown, and exit by the one that stays."""
    codes = set()
    for error in errors:
        report(error)
        codes.add(exit_code(error))
    if codes:
        raise typer.Exit(FAILED if FAILED in codes else TRY_AGAIN_LATER)


def printable(text: str) -> str:
    """Return the text without what could move a terminal's cursor or forge a line."""
    return "".join(character if character.isprintable() else " " for character in text)


Row = Mapping[str, Any]

_GAP: Final = "  "
_NOTHING: Final = "-"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SIZES: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_KIBI: Final = 1024
#: What JSON leaves as it is and a terminal obeys.
_UNPRINTABLE: Final = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufeff]")


class Column(NamedTuple):
    """A column of a table: the key of its cell in a row, its heading, and how the cell becomes text."""

    key: str
    heading: str
    text: Callable[[Any], str] | None = None


def show_rows(rows: Sequence[Row], columns: Sequence[Column], *, as_json: bool) -> None:
    """Print a listing: the columns, or with `as_json` an array with everything that the rows hold."""
    if as_json:
        show_json(list(rows))
        return
    cells = [[_text(column, row) for column in columns] for row in rows]
    table = [[column.heading for column in columns], *cells]
    widths = [max(cell_len(line[index]) for line in table) for index in range(len(columns))]
    right = [
        bool(rows) and column.text is None and all(type(row.get(column.key)) in (int, type(None)) for row in rows)
        for column in columns
    ]
    for number, line in enumerate(table):
        (say if number else headline)(_aligned(line, widths, right))


def show_facts(facts: Row, columns: Sequence[Column]) -> None:
    """Print one thing for people: a line for each of its facts."""
    width = max(cell_len(column.heading) for column in columns)
    for column in columns:
        say(f"{column.heading + ':':<{width + 1}} {_text(column, facts)}")


def each_described(found: Sequence[Row], *, as_json: bool) -> Iterator[Row]:
    """Yield what people are shown one by one, a blank line between; with `as_json` print all, and yield nothing."""
    if as_json:
        show_json(found)
        return
    for number, facts in enumerate(found):
        if number:
            say("")
        yield facts


def show_json(value: Any) -> None:
    """Print a value as JSON that no terminal takes for a command."""
    sys.stdout.write(json_text(value, indent=2) + "\n")


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return JSON; letters of any language as they are, if the output can hold them."""
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "")
    text = json.dumps(value, ensure_ascii=encoding != "utf8", indent=indent)
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def time_text(milliseconds: int | None) -> str:
    """Return a time in UTC; a negative one means that there is no time."""
    if milliseconds is None or milliseconds < 0:
        return _NOTHING
    try:
        moment = _EPOCH + timedelta(milliseconds=milliseconds)
    except OverflowError:
        return str(milliseconds)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def duration_text(milliseconds: int | None) -> str:
    """Return a length of time in its largest unit that fits."""
    if milliseconds is None or milliseconds < 0:
        return _NOTHING
    for unit, length in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if milliseconds >= length:
            return f"{milliseconds / length:.3g} {unit}"
    return f"{milliseconds} ms"


def size_text(size_bytes: int | None) -> str:
    """Return a number of bytes in its largest unit that fits."""
    if size_bytes is None:
        return _NOTHING
    size = float(size_bytes)
    for unit in _SIZES:
        if size < _KIBI or unit == _SIZES[-1]:
            break
        size /= _KIBI
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def list_text(values: Sequence[Any]) -> str:
    """Return several values in one cell."""
    return ", ".join(map(str, values)) or _NOTHING


def records_were(count: int) -> str:
    """Return the beginning of a sentence about so many records."""
    return "1 record was" if count == 1 else f"{count} records were"


def _text(column: Column, row: Row) -> str:
    value = row.get(column.key)
    if column.text is not None:
        text = column.text(value)
    elif value is None:
        text = _NOTHING
    elif isinstance(value, bool):
        text = "yes" if value else "no"
    else:
        text = str(value)
    return printable(text)


def _aligned(line: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = []
    for text, width, to_the_right in zip(line, widths, right, strict=True):
        room = " " * (width - cell_len(text))
        padded.append(room + text if to_the_right else text + room)
    return _GAP.join(padded).rstrip()

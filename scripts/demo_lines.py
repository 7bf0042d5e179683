"""Settlement lines read from CSV: each is a settlement, or is rejected with a reason.

Whatever a file holds, reading goes on at the next line.  A quotation mark that is never closed costs the line that it
stands in and not the rest of the file.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Context, Decimal, Inexact
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, Final, cast

COLUMNS: Final = (
    "InvoiceNo", "StockCode", "Description", "Quantity", "InvoiceDate", "UnitPrice", "CustomerID", "Country",
)  # fmt: skip

#: What a record may span: more is a quotation mark that nobody closed.
RECORD_LINES_MAX: Final = 100
RECORD_CHARACTERS_MAX: Final = 100_000
#: Lines of an invoice need not follow each other; after so many lines of others it is complete.
LINES_BETWEEN_MAX: Final = 1_000

#: Money is never rounded: by default, Decimal keeps 28 digits.
EXACT: Final = Context(prec=80, traps=[Inexact])

_GZIP: Final = b"\x1f\x8b"


class InputError(Exception):
    """The input cannot be read as settlement lines at all; its text is what the user reads."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """One line of an invoice; a cancellation's quantity is negative."""

    invoice: str
    stock_code: str
    description: str
    quantity: int
    settled_at: str
    unit_price: Decimal
    customer_id: str | None
    country: str

    @property
    def is_refund(self) -> bool:
        """Whether it is a line of a cancellation."""
        return self.invoice.startswith("C")

    @property
    def refund_amount(self) -> Decimal:
        """What goes back to the customer."""
        return EXACT.multiply(Decimal(-self.quantity), self.unit_price)

    def key(self) -> str:
        """Return what its record is partitioned by."""
        return self.customer_id or self.invoice

    def value(self) -> str:
        """Return its record: decimals are text, so that no reader makes binary fractions of them."""
        return json.dumps({
            "invoice": self.invoice,
            "stock_code": self.stock_code,
            "description": self.description,
            "quantity": self.quantity,
            "unit_price": f"{self.unit_price:f}",
            "customer_id": self.customer_id,
            "country": self.country,
            "settled_at": self.settled_at,
        })  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rejected:
    """A line that is not a settlement."""

    line_number: int
    """Where it begins in the file; the header is line 1."""

    reason: str
    text: str

    def key(self) -> str:
        """Return what its record is partitioned by."""
        return str(self.line_number)

    def value(self) -> str:
        """Return its record; bytes that are not UTF-8 are written out in hexadecimal."""
        text = self.text.encode(errors="surrogateescape").decode(errors="backslashreplace")
        return json.dumps({"line": self.line_number, "reason": self.reason, "text": text})


def open_input(path: Path) -> BinaryIO:
    """Open a file of CSV, compressed by gzip or not.

    Raises:
        InputError: it cannot be opened.
    """
    try:
        with path.open("rb") as file:
            is_gzip = file.read(len(_GZIP)) == _GZIP
        # A GzipFile is a BinaryIO in all but name.
        return cast(BinaryIO, gzip.open(path)) if is_gzip else path.open("rb")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error


def read_lines(stream: BinaryIO) -> Generator[Settlement | Rejected, None, None]:
    """Read all lines; one at a time is in memory.

    Raises:
        InputError: the first line is not a header with all of `COLUMNS`.
    """
    source = _Source(stream)
    try:
        yield from _read_lines(source)
    finally:
        source.detach()


def _read_lines(source: _Source) -> Iterator[Settlement | Rejected]:
    reader = csv.reader(source, strict=True)
    header = next(_records(source, reader), None)
    if header is None:
        raise InputError(f"the input is empty; its first line has to name the columns {', '.join(COLUMNS)}")
    if isinstance(header, Rejected):
        raise InputError(f"the input's first line cannot be read: {header.reason}")
    names = [name.strip() for name in header[1]]
    missing = [column for column in COLUMNS if column not in names]
    if missing:
        raise InputError(f"the input's first line does not name the column {', '.join(missing)}")
    columns = itemgetter(*map(names.index, COLUMNS))
    for record in _records(source, reader):
        if isinstance(record, Rejected):
            yield record
            continue
        line_number, fields = record
        if len(fields) != len(names):
            found: Settlement | str = f"has {len(fields)} fields and not {len(names)}"
        else:
            found = _settlement(*columns(fields))
        yield Rejected(line_number, found, source.text()) if isinstance(found, str) else found


def by_invoice(lines: Iterable[Settlement | Rejected]) -> Iterator[list[Settlement] | list[Rejected]]:
    """Gather the lines of each invoice; a rejected line stands alone."""
    open_invoices: OrderedDict[str, tuple[int, list[Settlement]]] = OrderedDict()
    for number, line in enumerate(lines):
        if isinstance(line, Rejected):
            yield [line]
            continue
        _, gathered = open_invoices.pop(line.invoice, (0, []))
        gathered.append(line)
        open_invoices[line.invoice] = (number, gathered)
        while True:
            invoice, (last, complete) = next(iter(open_invoices.items()))
            if number - last <= LINES_BETWEEN_MAX:
                break
            del open_invoices[invoice]
            yield complete
    for _, complete in open_invoices.values():
        yield complete


# --- one line ---------------------------------------------------------------------------------------------------------

_WHOLE_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,12}")
_PRICE: Final = re.compile(r"[+-]?(?:[0-9]{1,12}(?:\.[0-9]{0,6})?|\.[0-9]{1,6})")
#: A customer's number that went through a table of binary fractions.
_NUMBER_WITH_FRACTION: Final = re.compile(r"([0-9]+)\.0")
_TEXT_LENGTH_MAX: Final = 100


def _settlement(  # noqa: PLR0911, PLR0917  # a table of rules, in the order of the columns
    invoice: str, stock_code: str, description: str, quantity: str, date: str, price: str, customer: str, country: str
) -> Settlement | str:
    """Return the settlement, or why the line was rejected."""
    invoice, stock_code, quantity, date, price, customer, country = map(
        str.strip, (invoice, stock_code, quantity, date, price, customer, country)
    )
    if not 0 < len(invoice) <= _TEXT_LENGTH_MAX:
        return f"InvoiceNo is empty or longer than {_TEXT_LENGTH_MAX} characters"
    if not 0 < len(stock_code) <= _TEXT_LENGTH_MAX:
        return f"StockCode is empty or longer than {_TEXT_LENGTH_MAX} characters"
    if not _WHOLE_NUMBER.fullmatch(quantity):
        return "Quantity is not a whole number of at most 12 digits"
    settled_at = _moment(date)
    if settled_at is None:
        return "InvoiceDate is not a date and time such as 2010-12-01 08:26:00"
    if not _PRICE.fullmatch(price):
        return "UnitPrice is not a decimal number of at most 12 digits and 6 decimals"
    if len(customer) > _TEXT_LENGTH_MAX:
        return f"CustomerID is longer than {_TEXT_LENGTH_MAX} characters"
    if not 0 < len(country) <= _TEXT_LENGTH_MAX:
        return f"Country is empty or longer than {_TEXT_LENGTH_MAX} characters"
    if number := _NUMBER_WITH_FRACTION.fullmatch(customer):
        customer = number[1]
    unit_price = Decimal(price) or Decimal(0)  # not -0
    return Settlement(
        invoice, stock_code, description, int(quantity), settled_at, unit_price, customer or None, country
    )


def _moment(text: str) -> str | None:
    """Return a date and time in ISO 8601; one without a zone is in UTC."""
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is not None:
            moment = moment.astimezone(UTC).replace(tzinfo=None)
    except (ValueError, OverflowError):
        return None
    return f"{moment.isoformat()}Z"


# --- records of CSV ---------------------------------------------------------------------------------------------------


class _UnreadableRecordError(Exception):
    """The record cannot be what its first line began."""


class _Source:
    """The lines of a file, for `csv`; what a record took can be given back."""

    def __init__(self, stream: BinaryIO) -> None:
        # Bytes that are not UTF-8 become halves of surrogate pairs, and are found as such.
        self._stream = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        self._waiting: deque[tuple[int, str]] = deque()
        self._lines_read = 0
        self._has_ended = False
        self._damage = ""
        self.taken: list[tuple[int, str]] = []
        self._characters = 0

    def __iter__(self) -> _Source:
        return self

    def __next__(self) -> str:
        if len(self.taken) == RECORD_LINES_MAX:
            raise _UnreadableRecordError(f"has a quoted field of more than {RECORD_LINES_MAX} lines")
        number, text = self._waiting.popleft() if self._waiting else self._read()
        self.taken.append((number, text))
        self._characters += len(text)
        if self._characters > RECORD_CHARACTERS_MAX:
            raise _UnreadableRecordError(f"is longer than {RECORD_CHARACTERS_MAX} characters")
        return text

    def _read(self) -> tuple[int, str]:
        text = ""
        if not self._has_ended:
            text = self._try(lambda: self._stream.readline(RECORD_CHARACTERS_MAX + 1))
            rest = text
            while len(rest) > RECORD_CHARACTERS_MAX and not rest.endswith(("\n", "\r")):
                rest = self._try(lambda: self._stream.readline(RECORD_CHARACTERS_MAX + 1))
        if not text:
            self._has_ended = True
            raise StopIteration
        self._lines_read += 1
        return self._lines_read, text

    def _try(self, read: Callable[[], str]) -> str:
        try:
            return read()
        except (OSError, EOFError, zlib.error) as error:
            self._has_ended = True
            self._damage = f"the file ends early: {error}"
            return ""

    def detach(self) -> None:
        """Leave the stream to whoever opened it; nothing to do if that one has closed it already."""
        if not self._stream.closed:
            self._stream.detach()

    def start_record(self) -> None:
        """Forget the last record."""
        self.taken.clear()
        self._characters = 0

    def give_back_all_but_first(self) -> None:
        """Let the next records begin behind the first line of this one."""
        self._waiting.extendleft(reversed(self.taken[1:]))
        del self.taken[1:]

    def check_encoding(self) -> None:
        """Raise UnicodeEncodeError if a line of this record is not UTF-8."""
        for _, text in self.taken:
            if not text.isascii():
                text.encode()

    def text(self) -> str:
        """Return the lines of this record, as they are in the file."""
        return "".join(text for _, text in self.taken)[:RECORD_CHARACTERS_MAX].rstrip("\r\n")

    def take_damage(self) -> Rejected | None:
        """Return what the end of a damaged file is rejected with, once."""
        damage, self._damage = self._damage, ""
        return Rejected(self._lines_read + 1, damage, "") if damage else None


def _records(source: _Source, reader: Iterator[list[str]]) -> Iterator[tuple[int, list[str]] | Rejected]:
    """Yield the fields of each record with the number of its first line; lines without anything on them are skipped."""
    while True:
        source.start_record()
        try:
            fields = next(reader)
            source.check_encoding()
        except StopIteration:
            break
        except (csv.Error, _UnreadableRecordError, UnicodeEncodeError) as error:
            source.give_back_all_but_first()
            yield Rejected(source.taken[0][0], _why(error), source.text())
        else:
            if fields:
                yield source.taken[0][0], fields
    damage = source.take_damage()
    if damage is not None:
        yield damage


def _why(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return "is not UTF-8"
    if isinstance(error, csv.Error):
        return f"is not CSV: {error}"
    return str(error)

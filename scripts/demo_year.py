"""A year of an invented web shop: settlement lines as CSV, the same for the same seed."""

from __future__ import annotations

import csv
import gzip
import io
import random
from collections.abc import Iterator
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import accumulate
from pathlib import Path
from typing import Final

from scripts.demo_lines import COLUMNS

#: One line in so many is not a settlement, and comes on top of those asked for.
ROWS_PER_BROKEN_LINE: Final = 10_000

_FIRST_DAY: Final = datetime(2025, 1, 1)  # noqa: DTZ001  # the shop's own time, as tills print it
_DAYS: Final = 365
#: How much is sold in each month, Monday to Sunday, and from 8 to 19 o'clock.
_MONTHS: Final = (8, 7, 9, 8, 10, 9, 9, 8, 12, 14, 18, 11)
_WEEKDAYS: Final = (15, 16, 16, 18, 14, 3, 9)
_HOURS: Final = (2, 6, 12, 14, 18, 16, 15, 15, 12, 6, 3, 2)

_COUNTRIES: Final = {
    "United Kingdom": 880, "Germany": 18, "France": 16, "Ireland": 14, "Spain": 8, "Netherlands": 7, "Belgium": 6,
    "Switzerland": 5, "Portugal": 4, "Australia": 3, "Norway": 3, "Italy": 3, "Sweden": 2, "Denmark": 2, "Japan": 1,
}  # fmt: skip
_ADJECTIVES: Final = (
    "BLUE", "CERAMIC", "FOLDING", "GLASS", "GREEN", "LARGE", "PAPER", "RED", "SMALL", "STRIPED", "WOODEN", "WOOL",
)  # fmt: skip
_NOUNS: Final = (
    "BASKET", "BOWL", "CANDLE", "CLOCK", "CUSHION", "FRAME", "KETTLE", "LAMP", "MUG", "NAPKINS, PACK OF 20", "RUG",
    'RULER 12"', "TEAPOT", "TRAY", "VASE",
)  # fmt: skip
_QUANTITIES: Final = (1, 2, 3, 4, 6, 8, 10, 12, 24, 48, 144)
_QUANTITY_WEIGHTS: Final = (30, 16, 8, 8, 12, 4, 5, 10, 5, 1, 1)
#: On average, of purchases and cancellations together; a purchase has some more.
_LINES_PER_INVOICE: Final = 19
_LINES_PER_PURCHASE: Final = 23
_SHARE_WITHOUT_CUSTOMER: Final = 0.12
_SHARE_CANCELLED: Final = 0.16
_CANCELLED_LINES_MAX: Final = 4
_REMEMBERED_INVOICES: Final = 500

_BROKEN: Final = (
    "999999,10001,NO QUANTITY,,2025-06-01 10:00:00,1.25,12345,Germany\n",
    "999999,10002,NO NUMBER,1,2025-06-01 10:00:00,NaN,12345,Germany\n",
    "999999,10003,TOO FEW FIELDS,1\n",
    '999999,10004,"NEVER CLOSED,1,2025-06-01 10:00:00,1.25,12345,Germany\n',
    ",10005,NO INVOICE,1,2025-06-01 10:00:00,1.25,12345,Germany\n",
)

Row = tuple[str, str, str, int, str, Decimal, str, str]


def write_year(path: Path, rows: int, seed: int) -> None:
    """Write a file of `rows` settlement lines in the order of their dates, and a few that are broken."""
    with (
        path.open("wb") as file,
        # No name and no time of writing: the same seed makes the same bytes.
        gzip.GzipFile("", "wb", compresslevel=5, fileobj=file, mtime=0) as packed,
        io.TextIOWrapper(packed, encoding="utf-8", newline="") as text,
    ):
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for number, row in enumerate(year_of_rows(rows, seed)):
            if number % ROWS_PER_BROKEN_LINE == ROWS_PER_BROKEN_LINE // 2:
                text.write(_BROKEN[number // ROWS_PER_BROKEN_LINE % len(_BROKEN)])
            writer.writerow(row)


def year_of_rows(rows: int, seed: int) -> Iterator[Row]:
    """Yield `rows` lines: invoices of one customer each, and now and then a cancellation of part of an earlier one."""
    dice = random.Random(seed)
    products = [_product(dice, number) for number in range(500)]
    popularity = list(accumulate(1 / (rank + 5) for rank in range(len(products))))
    countries = dice.choices(list(_COUNTRIES), list(_COUNTRIES.values()), k=max(10, rows // 130))
    invoices = _invoice_moments(dice, max(1, round(rows / _LINES_PER_INVOICE)))
    past: list[list[Row]] = []
    left, number = rows, 500_000
    while left:
        # Should the moments run out before the rows, the last day is a busy one.
        moment = str(next(invoices, _FIRST_DAY + timedelta(days=_DAYS, seconds=-1)))
        number += 1
        if past and dice.random() < _SHARE_CANCELLED:
            bought = past.pop(dice.randrange(len(past)))
            lines = [_cancelled(dice, row, f"C{number}", moment) for row in bought[:_CANCELLED_LINES_MAX]]
        else:
            customer = dice.randrange(len(countries))
            name = "" if dice.random() < _SHARE_WITHOUT_CUSTOMER else str(12_000 + customer)
            size = 1 + int(dice.expovariate(1 / _LINES_PER_PURCHASE))
            chosen = dice.choices(products, cum_weights=popularity, k=size)
            amounts = dice.choices(_QUANTITIES, _QUANTITY_WEIGHTS, k=size)
            lines = [
                (str(number), code, description, quantity, moment, price, name, countries[customer])
                for (code, description, price), quantity in zip(chosen, amounts, strict=True)
            ]
            past.append(lines)
            del past[:-_REMEMBERED_INVOICES]
        yield from lines[:left]
        left -= min(left, len(lines))


def _product(dice: random.Random, number: int) -> tuple[str, str, Decimal]:
    price = Decimal(min(500, round(dice.lognormvariate(1.0, 0.9), 2))).quantize(Decimal("0.01"))
    return f"{10_000 + number * 7}", f"{dice.choice(_ADJECTIVES)} {dice.choice(_NOUNS)}", max(price, Decimal("0.10"))


def _invoice_moments(dice: random.Random, count: int) -> Iterator[datetime]:
    days = [_FIRST_DAY + timedelta(days=day) for day in range(_DAYS)]
    weights = list(accumulate(_MONTHS[day.month - 1] * _WEEKDAYS[day.weekday()] for day in days))
    moments = [
        day + timedelta(hours=hour, seconds=dice.randrange(3_600))
        for day, hour in zip(
            dice.choices(days, cum_weights=weights, k=count),
            dice.choices(range(8, 20), _HOURS, k=count),
            strict=True,
        )
    ]
    return iter(sorted(moments))


def _cancelled(dice: random.Random, row: Row, invoice: str, moment: str) -> Row:
    _, code, description, quantity, _, price, customer, country = row
    return (invoice, code, description, -dice.randint(1, quantity), moment, price, customer, country)

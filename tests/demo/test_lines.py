"""Every line of an input is a settlement or is rejected with a reason; nothing is lost and nothing stops."""

from __future__ import annotations

import csv
import gzip
import io
import json
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import demo_lines
from scripts.demo_lines import COLUMNS, InputError, Rejected, Settlement, by_invoice, open_input, read_lines

HEADER = ",".join(COLUMNS).encode()
GOOD = b"536365,85123A,LANTERN,6,2010-12-01 08:26:00,2.55,17850.0,United Kingdom"
REAL_DATA = Path(__file__).parents[3] / "shared/data/online-retail.csv.gz"


def read(*lines, header=HEADER, end=b"\n"):
    return list(read_lines(io.BytesIO(end.join((header, *lines)))))


def changed(column, text):
    fields = GOOD.split(b",")
    fields[COLUMNS.index(column)] = text
    return b",".join(fields)


def reasons(lines):
    return [(line.line_number, line.reason) for line in lines if isinstance(line, Rejected)]


def test_a_line_becomes_a_settlement():
    assert read(GOOD) == [
        Settlement("536365", "85123A", "LANTERN", 6, "2010-12-01T08:26:00Z", Decimal("2.55"), "17850", "United Kingdom")
    ]


def test_the_record_has_decimals_as_text():
    [line] = read(GOOD)
    assert line.key() == "17850"
    assert json.loads(line.value()) == {
        "invoice": "536365",
        "stock_code": "85123A",
        "description": "LANTERN",
        "quantity": 6,
        "unit_price": "2.55",
        "customer_id": "17850",
        "country": "United Kingdom",
        "settled_at": "2010-12-01T08:26:00Z",
    }


def test_a_line_without_a_customer_has_its_invoice_as_key():
    [line] = read(changed("CustomerID", b""))
    assert (line.customer_id, line.key()) == (None, "536365")


@pytest.mark.parametrize(
    ("invoice", "quantity", "price", "is_refund", "amount"),
    [
        (b"C536379", b"-3", b"0.10", True, "0.30"),
        (b"C536379", b"-999999999999", b"999999999999.999999", True, "999999999998999999000000.000001"),
        (b"536379", b"-3", b"0.10", False, "0.30"),
        (b"A563185", b"1", b"11062.06", False, "-11062.06"),
        (b"c536379", b"-1", b"1", False, "1"),
    ],
)
def test_a_cancellation_is_a_refund_of_an_exact_amount(invoice, quantity, price, is_refund, amount):
    fields = GOOD.split(b",")
    fields[0], fields[3], fields[5] = invoice, quantity, price
    [line] = read(b",".join(fields))
    assert line.is_refund is is_refund
    assert line.refund_amount == Decimal(amount)


@pytest.mark.parametrize(
    ("column", "text", "reason"),
    [
        ("InvoiceNo", b"", "InvoiceNo is empty"),
        ("InvoiceNo", b"  ", "InvoiceNo is empty"),
        ("InvoiceNo", b"9" * 101, "InvoiceNo is empty or longer"),
        ("StockCode", b"", "StockCode is empty"),
        ("Quantity", b"", "Quantity is not a whole number"),
        ("Quantity", b"1.5", "Quantity is not a whole number"),
        ("Quantity", b"1e3", "Quantity is not a whole number"),
        ("Quantity", b"1_000", "Quantity is not a whole number"),
        ("Quantity", b"9" * 13, "Quantity is not a whole number"),
        ("Quantity", b"NaN", "Quantity is not a whole number"),
        ("Quantity", "٣".encode(), "Quantity is not a whole number"),
        ("InvoiceDate", b"", "InvoiceDate is not a date"),
        ("InvoiceDate", b"12/1/2010 8:26", "InvoiceDate is not a date"),
        ("InvoiceDate", b"2010-02-30 08:26:00", "InvoiceDate is not a date"),
        ("InvoiceDate", b"0001-01-01T00:00:00+14:00", "InvoiceDate is not a date"),
        ("UnitPrice", b"", "UnitPrice is not a decimal number"),
        ("UnitPrice", b".", "UnitPrice is not a decimal number"),
        ("UnitPrice", b"NaN", "UnitPrice is not a decimal number"),
        ("UnitPrice", b"Infinity", "UnitPrice is not a decimal number"),
        ("UnitPrice", b"1e5", "UnitPrice is not a decimal number"),
        ("UnitPrice", b"1.1234567", "UnitPrice is not a decimal number"),
        ("UnitPrice", b"9" * 13, "UnitPrice is not a decimal number"),
        ("CustomerID", b"1" * 101, "CustomerID is longer"),
        ("Country", b"", "Country is empty"),
        ("Description", b"10 \xa3 NOTE", "is not UTF-8"),
        ("Description", b'"A" LAMP', "is not CSV"),
        ("Description", b"A\rB", "has 3 fields"),
        ("Description", b"A,B", "has 9 fields and not 8"),
        ("Description", b"x" * 200_000, "is longer than 100000 characters"),
    ],
)
def test_a_line_with_something_wrong_is_rejected_and_the_next_is_not(column, text, reason):
    first, *others = read(changed(column, text), GOOD)
    assert isinstance(first, Rejected)
    assert first.line_number == 2
    assert first.reason.startswith(reason)
    assert isinstance(others[-1], Settlement)


@pytest.mark.parametrize(
    ("price", "kept"),
    [(b"-0.00", "0"), (b".5", "0.5"), (b"5.", "5"), (b"+1.10", "1.10"), (b" 2.55 ", "2.55"), (b"00.001", "0.001")],
)
def test_prices_are_written_one_way(price, kept):
    [line] = read(changed("UnitPrice", price))
    assert json.loads(line.value())["unit_price"] == kept


def test_dates_with_a_zone_are_told_in_utc():
    [line] = read(changed("InvoiceDate", b"2010-12-01T00:30:00+01:00"))
    assert line.settled_at == "2010-11-30T23:30:00Z"


# --- how lines end and quote ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_line_ends_and_byte_order_marks_of_all_systems(end, mark):
    lines = read(GOOD, b"nothing", b"", GOOD, end=end, header=mark + HEADER)
    assert [type(line) for line in lines] == [Settlement, Rejected, Settlement]
    assert reasons(lines) == [(3, "has 1 fields and not 8")]
    assert lines[1].text == "nothing"


def test_a_quoted_field_may_go_over_lines():
    lines = read(changed("Description", b'"A LAMP,\n""BIG""\n"'), b"x", GOOD)
    assert lines[0].description == 'A LAMP,\n"BIG"\n'
    assert reasons(lines) == [(5, "has 1 fields and not 8")]


def test_a_quotation_mark_that_is_never_closed_costs_its_own_line_alone():
    lines = read(GOOD, changed("Description", b'"LAMP'), *[GOOD] * 300)
    assert len(lines) == 302
    assert reasons(lines) == [(3, "has a quoted field of more than 100 lines")]


def test_a_quotation_mark_that_is_open_at_the_end_costs_its_own_line_alone():
    lines = read(GOOD, changed("Description", b'"LAMP'), GOOD, GOOD)
    assert [line_number for line_number, _ in reasons(lines)] == [3]
    assert len(lines) == 4


def test_what_was_given_back_is_read_when_a_line_behind_it_is_too_long():
    lines = read(changed("Description", b'"LAMP'), GOOD, changed("Description", b"x" * 200_000), GOOD)
    assert [line_number for line_number, _ in reasons(lines)] == [2, 4]
    assert len(lines) == 4


def test_columns_may_stand_in_another_order_with_others_between():
    names = [*reversed(COLUMNS), "Extra"]
    fields = [*reversed(GOOD.split(b",")), b"x"]
    assert read(b",".join(fields), header=",".join(names).encode()) == read(GOOD)


# --- files that are not CSV ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "the input is empty"),
        (b"\n\n", "the input is empty"),
        (b"InvoiceNo,Quantity\n", "does not name the column StockCode, Description, InvoiceDate"),
        (HEADER.decode().encode("utf-16"), "cannot be read: is not UTF-8"),
        (b"x" * 200_000, "cannot be read: is longer"),
        (b"\x00\x01\x02", "does not name the column"),
    ],
)
def test_an_input_without_a_header_is_refused(content, text):
    with pytest.raises(InputError, match=text):
        next(read_lines(io.BytesIO(content)))


def test_a_header_alone_is_an_input_without_lines():
    assert read() == []


@pytest.mark.parametrize("name", ["input.csv", "input.csv.gz"])
def test_a_file_is_read_compressed_or_not_whatever_its_name(name, tmp_path):
    path = tmp_path / name
    for content in (HEADER + b"\n" + GOOD, gzip.compress(HEADER + b"\n" + GOOD)):
        path.write_bytes(content)
        with open_input(path) as stream:
            assert len(list(read_lines(stream))) == 1


@pytest.mark.parametrize("name", ["nothing.csv", "."])
def test_a_file_that_cannot_be_opened_is_an_error_of_the_call(name, tmp_path):
    with pytest.raises(InputError, match=r"No such file|Is a directory"):
        open_input(tmp_path / name)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("damage", ["cut", "broken"])
def test_of_a_damaged_file_everything_is_read_that_can_be(damage, tmp_path):
    lines = b"\n".join([HEADER, *(changed("InvoiceNo", b"%d" % number) for number in range(20_000))])
    packed = bytearray(gzip.compress(lines))
    if damage == "cut":
        del packed[len(packed) // 2 :]
    else:
        packed[len(packed) // 2 :] = b"\xff" * (len(packed) // 2)
    path = tmp_path / "input.csv.gz"
    path.write_bytes(packed)
    with open_input(path) as stream:
        found = list(read_lines(stream))
    assert len(found) > 1_000
    assert all(isinstance(line, Settlement) for line in found[:-2])
    assert isinstance(found[-1], Rejected)
    assert found[-1].reason.startswith("the file ends early: ")


# --- every line -------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=60) | st.sampled_from([GOOD, b'"', GOOD + b'"', b'1,"2', b"\xef\xbb\xbf", b"\0"])))
def test_any_bytes_are_settled_or_rejected(chunks):
    content = b"\n".join(chunks)
    found = list(read_lines(io.BytesIO(HEADER + b"\n" + content)))
    numbers = [line.line_number for line in found if isinstance(line, Rejected)]
    assert numbers == sorted(set(numbers))
    for line in found:
        json.loads(line.value())
        line.value().encode()
        line.key().encode()


@given(st.lists(st.tuples(st.sampled_from([b"good", b"bad", b"open", b"latin"]), st.integers(0, 3))))
def test_no_good_line_is_lost_beside_bad_ones(pieces):
    """Lines with a mark at the start of a field that is never closed included."""
    kinds = {b"good": GOOD, b"bad": b"1,2,3", b"open": changed("Description", b'"LAMP'), b"latin": b"\xa3,\xa3"}
    lines = [kinds[kind] for kind, _ in pieces]
    # Two marks on different lines may close each other: one at most.
    lines = [
        line for number, line in enumerate(lines) if b'"' not in line or not any(b'"' in a for a in lines[:number])
    ]
    found = read(*lines)
    assert len(found) == len(lines)
    assert [isinstance(line, Settlement) for line in found] == [line == GOOD for line in lines]


fields = st.text(st.characters(codec="utf-8"), max_size=20)


@given(st.lists(fields, max_size=20))
def test_what_csv_writes_comes_back(descriptions):
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for description in descriptions:
        writer.writerow(["1", "2", description, "3", "2010-12-01", "4", "5", "France"])
    found = list(read_lines(io.BytesIO(text.getvalue().encode())))
    assert [line.description for line in found if isinstance(line, Settlement)] == descriptions


# --- invoices ---------------------------------------------------------------------------------------------------------


def of_invoices(*invoices):
    return read(*(changed("InvoiceNo", str(invoice).encode()) for invoice in invoices))


def gathered_invoices(*invoices):
    return [
        [line.invoice for line in lines if isinstance(line, Settlement)] for lines in by_invoice(of_invoices(*invoices))
    ]


def test_lines_of_an_invoice_are_gathered_with_others_between():
    assert gathered_invoices(1, 1, 2, 1, 3) == [["2"], ["1", "1", "1"], ["3"]]


def test_an_invoice_that_comes_back_much_later_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(demo_lines, "LINES_BETWEEN_MAX", 2)
    assert gathered_invoices(1, 2, 3, 4, 1) == [["1"], ["2"], ["3"], ["4"], ["1"]]


@given(st.lists(st.integers(0, 4)))
def test_gathering_keeps_every_line_and_the_order_within_an_invoice(invoices):
    lines = [Rejected(number, "", "") if number == 0 else number for number in invoices]
    settlements = iter(of_invoices(*[number for number in invoices if number]))
    lines = [line if isinstance(line, Rejected) else next(settlements) for line in lines]
    gathered = list(by_invoice(lines))
    assert sum(map(len, gathered)) == len(lines)
    for group in gathered:
        assert group == [line for line in lines if line in group] or isinstance(group[0], Rejected)


@pytest.mark.slow
@pytest.mark.skipif(not REAL_DATA.exists(), reason="needs the real settlement lines")
def test_the_real_lines_are_all_settlements():
    with open_input(REAL_DATA) as stream:
        transactions = list(by_invoice(read_lines(stream)))
    lines = [line for transaction in transactions for line in transaction]
    refunds = [line for line in lines if isinstance(line, Settlement) and line.is_refund]
    assert (len(lines), len(transactions), len(refunds)) == (541_909, 25_900, 9_288)
    assert len({line.invoice for line in refunds}) == 3_836
    assert sum(line.refund_amount for line in refunds) == Decimal("896812.49")


def test_a_reading_that_is_given_up_after_its_file_was_closed_ends_without_a_word():
    stream = io.BytesIO(b"\n".join((HEADER, GOOD, GOOD)))
    lines = read_lines(stream)
    next(lines)
    stream.close()
    lines.close()

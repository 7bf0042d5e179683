"""Counts differ by nothing, or the difference is told."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest

from scripts.demo_totals import NoAnswerError, Refunds, differences, read_topic
from txnstore import Producer


def record(invoice="C1", country="France", amount="1.10", partition=0, offset=0):
    return json.dumps({
        "invoice": invoice,
        "country": country,
        "amount": amount,
        "source_partition": partition,
        "source_offset": offset,
    }).encode()  # fmt: skip


def refunds(*records):
    found = Refunds()
    for each in records:
        found.add_record(each)
    return found


@pytest.fixture
def expected():
    expected = Refunds()
    expected.add("C1", "France", Decimal("1.10"))
    expected.add("C1", "France", Decimal("2.20"))
    expected.add("C2", "Spain", Decimal("-0.05"))
    return expected


RECORDS = (record(), record(amount="2.20", offset=1), record("C2", "Spain", "-0.05", offset=2))


def test_the_same_refunds_differ_in_nothing(expected):
    found = refunds(*reversed(RECORDS))
    assert differences(expected, found) == []
    assert (found.count, found.amount, found.invoices) == (3, Decimal("3.25"), {"C1", "C2"})
    assert found.countries() == ["France", "Spain"]


@pytest.mark.parametrize(
    ("records", "told"),
    [
        (
            RECORDS[:2],
            ["2 refunds and not 3", "an amount of 3.30 and not 3.25", "1 cancelled invoices without a refund"],
        ),
        ((*RECORDS, RECORDS[0]), ["1 refunds come of a settlement that was refunded before", "4 refunds and not 3"]),
        ((RECORDS[0], RECORDS[0], RECORDS[2]), ["1 refunds come of a settlement", "an amount of 2.15 and not 3.25"]),
        ((*RECORDS[:2], record("C3", "Spain", "-0.05", offset=2)), ["1 refunded invoices that nobody cancelled"]),
        ((*RECORDS[:2], record("C2", "Italy", "-0.05", offset=2)), ["Italy: 1 refunds, -0.05 and not 0 refunds, 0"]),
        ((record(amount="1.11"), *RECORDS[1:]), ["an amount of 3.26 and not 3.25"]),
    ],
)
def test_a_difference_is_told(expected, records, told):
    lines = differences(expected, refunds(*records))
    assert [text for text in told if not any(line.startswith(text) for line in lines)] == []


def test_zeros_behind_the_point_make_no_difference(expected):
    expected.add("C3", "Greece", Decimal("50.0"))
    assert differences(expected, refunds(*RECORDS, record("C3", "Greece", "50.00", offset=3))) == []


def test_sums_are_exact_however_large():
    found = refunds(record(amount="999999999998999999000000.000001"), record(amount="0.000001", offset=1))
    assert found.amount == Decimal("999999999998999999000000.000002")
    assert found.amounts == {"France": found.amount}


def test_a_topic_is_read_to_its_end_without_what_was_aborted(url):
    with Producer({"bootstrap.servers": url, "transactional.id": "a"}) as producer:
        producer.init_transactions()
        for value in ("1", "2"):
            with producer.transaction():
                producer.produce("numbers", value)
        producer.begin_transaction()
        producer.produce("numbers", "3")
        producer.flush()
        producer.abort_transaction()
    fetched: list[int] = []
    assert sorted(read_topic(url, "numbers", fetched.append)) == [b"1", b"2"]
    assert sum(fetched) == 2


def test_a_reader_that_never_gets_to_an_end_gives_up(url, monkeypatch):
    monkeypatch.setattr("scripts.demo_totals._SILENCE_SECONDS", 0.2)
    monkeypatch.setattr("scripts.demo_totals.Consumer.consume", lambda *arguments, **keywords: [])
    with Producer({"bootstrap.servers": url}) as producer:
        producer.produce("numbers", "1")
    with pytest.raises(NoAnswerError, match="numbers: its end was not reached"):
        list(read_topic(url, "numbers", lambda count: None))

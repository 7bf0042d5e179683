"""The first stage: an invoice is a transaction, a customer's records keep their order, a failure ends it all."""

from __future__ import annotations

import io
import json
from threading import Lock

import pytest

from scripts.demo_lines import COLUMNS, by_invoice, read_lines
from scripts.demo_produce import REJECTED, SETTLEMENTS, Input, produce
from scripts.demo_totals import read_topic
from txnstore import KafkaException
from txnstore.admin import AdminClient, NewTopic


def lines_of(*rows):
    text = "\n".join([",".join(COLUMNS), *rows])
    return by_invoice(read_lines(io.BytesIO(text.encode())))


def row(invoice, customer="17850", quantity=1):
    return f"{invoice},10001,LAMP,{quantity},2010-12-01 08:26:00,2.55,{customer},France"


@pytest.fixture
def topics(url):
    created = AdminClient({"bootstrap.servers": url}).create_topics([NewTopic(SETTLEMENTS, 4), NewTopic(REJECTED, 4)])
    for future in created.values():
        future.result(30)


def send(url, *rows, producers=2):
    given, lock, sent = Input(), Lock(), []

    def on_sent(count):
        with lock:
            sent.append(count)

    produce(url, given.counting(lines_of(*rows)), producers, on_sent)
    return given, sent


def values_of(url, topic):
    return [json.loads(value) for value in read_topic(url, topic, lambda count: None)]


def test_an_invoice_is_a_transaction_and_a_broken_line_one_of_its_own(url, topics):
    given, sent = send(url, row(1), row(1), "broken", row("C2", quantity=-2), row(3, customer=""), row(1))
    assert sorted(sent) == [1, 1, 1, 3]
    assert (given.settlements, given.invoices, given.rejected) == (5, 3, 1)
    assert given.reasons == {"has 1 fields and not 8": 1}
    assert (given.refunds.count, str(given.refunds.amount)) == (1, "5.10")
    assert sorted(value["invoice"] for value in values_of(url, SETTLEMENTS)) == ["1", "1", "1", "3", "C2"]
    assert values_of(url, REJECTED) == [{"line": 4, "reason": "has 1 fields and not 8", "text": "broken"}]


def test_the_records_of_a_customer_keep_their_order(url, topics):
    rows = [row(invoice, customer=invoice % 5, quantity=invoice) for invoice in range(1, 101)]
    send(url, *rows, producers=3)
    found: dict[str, list[int]] = {}
    for value in values_of(url, SETTLEMENTS):
        found.setdefault(value["customer_id"], []).append(value["quantity"])
    assert len(found) == 5
    assert all(quantities == sorted(quantities) for quantities in found.values())


def test_nothing_to_send_is_nothing_sent(url, topics):
    given, sent = send(url)
    assert (given.settlements, sent) == (0, [])


def test_a_producer_that_fails_ends_the_stage(url, topics, monkeypatch):
    """The lines behind it are not read to their end, and nobody waits for ever for the queue to empty."""
    read = []
    rows = lines_of(*[row(invoice) for invoice in range(10_000)])

    def counted():
        for lines in rows:
            read.append(lines)
            yield lines

    def refuse(count):
        raise KafkaException("refused")

    with pytest.raises(KafkaException, match="refused"):
        produce(url, counted(), 2, refuse)
    assert len(read) < 5_000


def test_an_input_that_fails_ends_the_producers(url, topics):
    def failing():
        yield from lines_of(row(1))
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        produce(url, failing(), 2, lambda count: None)

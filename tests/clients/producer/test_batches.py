"""How large a producer's batches become: what the log adds to each record counts, so that none is refused."""

from __future__ import annotations

import pytest

from tests.clients.producer.reporting import NEVER_MS, Reports
from tests.clients.steps import PATIENCE_SECONDS, create_topic, read_to_end
from txnstore.clients.producer import requests
from txnstore.log import codec

RECORD_COUNT = 3_000


def counted_encodings(monkeypatch) -> list[int]:
    """Return the list to which the record count of every batch that is encoded will be added."""
    record_counts: list[int] = []
    encode_packed = codec.encode_packed

    def counting(columns, **named):
        record_counts.append(len(columns.timestamps_ms))
        return encode_packed(columns, **named)

    monkeypatch.setattr(requests, "encode_packed", counting)
    return record_counts


@pytest.mark.slow_but_first
@pytest.mark.variants_on_sqlite
@pytest.mark.parametrize(
    "record",
    [
        lambda number: {"value": b"v"},
        lambda number: {"value": b"v" * 10, "key": b"%d" % number},
        lambda number: {"value": b"v" * 100},
        lambda number: {"value": b"v" * 300, "key": None if number % 3 else b"key"},
        lambda number: {"value": b"v" * 1000 if number % 2 else None, "key": b"key"},
        lambda number: {"value": b"v" * (number % 1000), "timestamp": 1 + 7 ** (number % 14)},
        lambda number: {"value": b"v" * 20, "headers": {"name": "\u20ac\n" * (number % 9), "hex": b"\xff\x00"}},
        lambda number: {"value": b"v" * 20, "headers": None if number % 7 else [("a", None), ("a", "b" * 50)]},
    ],
    ids=["1", "10 keyed", "100", "300 some keyed", "1000 or none", "timestamps", "expanding headers", "some headers"],
)
def test_no_batch_of_ordinary_records_is_refused_and_encoded_again(make_producer, url, monkeypatch, record):
    topic = create_topic(url, "orders", max_message_bytes="20000")
    encoded = counted_encodings(monkeypatch)
    producer = make_producer({"linger.ms": NEVER_MS, "batch.size": 20_000})
    reports = Reports()
    for number in range(RECORD_COUNT):
        producer.produce(topic, partition=0, on_delivery=reports, **record(number))
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert reports.errors == [None] * RECORD_COUNT
    assert [message.offset() for _, message in reports] == list(range(RECORD_COUNT))
    assert sum(encoded) == RECORD_COUNT
    assert len(read_to_end(url, topic)) == RECORD_COUNT


def test_a_record_that_fits_into_no_batch_is_refused_by_itself(make_producer, url, monkeypatch):
    topic = create_topic(url, "orders", max_message_bytes="20000")
    encoded = counted_encodings(monkeypatch)
    producer = make_producer({"linger.ms": NEVER_MS, "batch.size": 20_000})
    reports = Reports()
    for size in (10, 19_980, 30_000, 10):
        producer.produce(topic, b"x" * size, partition=0, on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert sorted(len(message) for error, message in reports if error is not None) == [30_000]
    assert [len(message) for message in read_to_end(url, topic)] == [10, 19_980, 10]
    assert max(encoded) <= 2

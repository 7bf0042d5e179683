"""What `stats_cb` is told."""

from __future__ import annotations

import json
import time

PATIENCE_SECONDS = 20.0


def test_a_producer_tells_its_statistics_from_poll(make_producer):
    told = []
    producer = make_producer({"stats_cb": told.append, "statistics.interval.ms": 20, "client.id": "till"})
    producer.produce("payments", b"42")
    assert producer.flush(PATIENCE_SECONDS) == 0
    deadline = time.monotonic() + PATIENCE_SECONDS
    before = len(told)
    while len(told) < before + 2:
        assert time.monotonic() < deadline
        producer.poll(0.1)
    first, second = (json.loads(text) for text in told[-2:])
    assert first["type"] == "producer"
    assert first["name"].startswith("till#producer-")
    assert first["ts"] < second["ts"]
    assert first["age"] < second["age"]
    assert (second["msg_cnt"], second["msg_max"]) == (0, 100_000)
    assert second["eos"]["producer_id"] >= 0


def test_without_an_interval_nothing_is_told(make_producer):
    told = []
    producer = make_producer({"stats_cb": told.append})
    producer.produce("payments", b"42")
    assert producer.flush(PATIENCE_SECONDS) == 0
    producer.poll(0.1)
    assert told == []

"""What `stats_cb` is told."""

from __future__ import annotations

import json
import time

from txnstore import TopicPartition

PATIENCE_SECONDS = 60.0


def test_a_producer_tells_its_statistics_from_poll(make_producer):
    told: list[str] = []
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


def test_a_consumer_tells_where_it_is_and_how_far_behind(make_producer, make_consumer):
    producer = make_producer()
    for number in range(5):
        producer.produce("payments", b"%d" % number)
    assert producer.flush(PATIENCE_SECONDS) == 0
    told: list[str] = []
    consumer = make_consumer({"stats_cb": told.append, "statistics.interval.ms": 20, "enable.auto.commit": False})
    consumer.assign([TopicPartition("payments", 0, 0)])
    for _ in range(2):
        assert consumer.poll(PATIENCE_SECONDS) is not None
    del told[:]
    deadline = time.monotonic() + PATIENCE_SECONDS
    consumer.pause([TopicPartition("payments", 0)])
    while not told:
        assert time.monotonic() < deadline
        assert consumer.poll(0.1) is None
    facts = json.loads(told[-1])
    assert facts["type"] == "consumer"
    partition = facts["topics"]["payments"]["partitions"]["0"]
    assert (partition["app_offset"], partition["hi_offset"], partition["ls_offset"]) == (2, 5, 5)
    assert (partition["committed_offset"], partition["consumer_lag"]) == (-1001, 3)


def test_without_an_interval_nothing_is_told(make_producer):
    told: list[str] = []
    producer = make_producer({"stats_cb": told.append})
    producer.produce("payments", b"42")
    assert producer.flush(PATIENCE_SECONDS) == 0
    producer.poll(0.1)
    assert told == []

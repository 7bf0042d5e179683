"""What `stats_cb` is told."""

from __future__ import annotations

import json
import re
import time

from tests.tools.readmes import TOP
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
    assert second["topics"] == {}
    assert second["metadata_cache_cnt"] == 1


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
    assert (facts["rxmsgs"], facts["txmsgs"], facts["tx_bytes"], facts["msg_max"]) == (5, 0, 0, 0)
    assert facts["rx_bytes"] == facts["rxmsg_bytes"] > 5
    assert facts["rx"] == facts["tx"] >= 1


COUNTERS = ("tx", "tx_bytes", "rx", "rx_bytes", "txmsgs", "txmsg_bytes", "rxmsgs", "rxmsg_bytes")


def next_of(client, told):
    """Return what is told next, and was not waiting to be served before."""
    began_seconds = time.monotonic()
    while not told or json.loads(told[-1])["ts"] < began_seconds * 1_000_000:
        assert time.monotonic() < began_seconds + PATIENCE_SECONDS
        client.poll(0.05)
    return json.loads(told[-1])


def test_a_producer_counts_what_is_in_the_log_and_nothing_else(make_producer):
    told: list[str] = []
    producer = make_producer({"stats_cb": told.append, "statistics.interval.ms": 20})
    assert [next_of(producer, told)[name] for name in COUNTERS] == [0] * 8
    requests = 0
    for _ in range(3):
        producer.produce("payments", b"x" * 100)
        producer.produce("payments", b"x" * 100)
        assert producer.flush(PATIENCE_SECONDS) == 0
        requests += 1
    facts = next_of(producer, told)
    assert requests <= facts["tx"] == facts["rx"] <= 2 * requests
    assert (facts["txmsgs"], facts["rxmsgs"], facts["rxmsg_bytes"], facts["rx_bytes"]) == (6, 0, 0, 0)
    assert 600 < facts["txmsg_bytes"] == facts["tx_bytes"] < 1_800
    producer.produce("a topic's name", b"refused")
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert next_of(producer, told)["txmsgs"] == 6


def test_records_that_go_with_their_commit_count_as_well(make_producer):
    told: list[str] = []
    settings = {"stats_cb": told.append, "statistics.interval.ms": 20, "transactional.id": "till"}
    producer = make_producer(settings)
    producer.init_transactions(PATIENCE_SECONDS)
    for _ in range(2):
        producer.begin_transaction()
        producer.produce("payments", b"42")
        producer.commit_transaction(PATIENCE_SECONDS)
    facts = next_of(producer, told)
    assert (facts["txmsgs"], facts["tx"]) == (2, 2)


def test_the_readme_lists_what_there_is(make_producer, make_consumer):
    text = (TOP / "txnstore/clients/README.md").read_text()
    section = text.split("## Statistics\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    listed = {name for row in rows for name in re.findall("`(.+?)`", row)}
    named = set(re.findall("`(.+?)`", section))
    told: list[str] = []
    settings = {"stats_cb": told.append, "statistics.interval.ms": 20}
    producer, consumer = make_producer(settings), make_consumer(settings | {"auto.offset.reset": "earliest"})
    producer.produce("payments", b"42")
    assert producer.flush(PATIENCE_SECONDS) == 0
    of_producer = next_of(producer, told)
    consumer.assign([TopicPartition("payments", 0, 0)])
    assert consumer.poll(PATIENCE_SECONDS) is not None
    of_consumer = next_of(consumer, told)
    assert of_producer.keys() | of_consumer.keys() == listed
    assert of_producer.keys() - of_consumer.keys() == {"eos"}
    assert of_producer["eos"].keys() | of_consumer["topics"]["payments"].keys() <= named
    assert of_consumer["topics"]["payments"]["partitions"]["0"].keys() <= named


def test_without_an_interval_nothing_is_told(make_producer):
    told: list[str] = []
    producer = make_producer({"stats_cb": told.append})
    producer.produce("payments", b"42")
    assert producer.flush(PATIENCE_SECONDS) == 0
    producer.poll(0.1)
    assert told == []

"""A producer that is killed in its transaction, and readers that come and go: they see past it once its time is up."""

from __future__ import annotations

import time

import pytest

from tests.tools.workload import Job, write_late
from txnstore import Consumer, TopicPartition
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.topics import create_topic
from txnstore.model import Record

TIMEOUT_MS = 1_000
LOOK_SECONDS = 0.5
PATIENCE_SECONDS = 60


@pytest.mark.slow
def test_readers_that_come_and_go_see_past_a_killed_producer_once_its_time_is_up(
    url, txnstore_open, tmp_path, processes, wait_for
):
    store = txnstore_open(url, clock=None)
    topic = store.write(lambda connection: create_topic(connection, "orders", partition_count=1))
    job = Job(url, tmp_path, "killed", 1, {"orders-0": topic.partition_ids[0]}, timeout_ms=TIMEOUT_MS)
    process, pipe = processes.start_with_pipe(write_late, job)
    assert wait_for([pipe, process], PATIENCE_SECONDS) == [pipe]
    assert pipe.recv() == "open"
    open_at = time.monotonic()
    processes.kill(process)
    behind = Append(topic.partition_ids[0], encode([Record(b"behind")]))
    store.write(lambda connection: append(connection, [behind]), wakes_readers=True)

    values: list[bytes | None] = []
    while not values:
        assert time.monotonic() - open_at < TIMEOUT_MS / 1000 + PATIENCE_SECONDS
        with Consumer({"bootstrap.servers": url, "group.id": "passing", "auto.offset.reset": "earliest"}) as consumer:
            consumer.assign([TopicPartition("orders", 0)])
            values = [message.value() for message in consumer.consume(10, timeout=LOOK_SECONDS)]
    assert values == [b"behind"]

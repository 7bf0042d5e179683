"""What clients cost that have nothing to do: next to none of a processor."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.clients.steps import create_topic

#: Measured over this long; a machine that is busy makes it dearer, so the bound is far above what is usual (below 1 %).
MEASURED_SECONDS = 2.0
COST_MAX = 0.05

PROGRAM = """
import sys, time
from txnstore import Consumer, Producer, TopicPartition

url, measured_seconds = sys.argv[1], float(sys.argv[2])


def measure(name, wait):
    wait()
    began, cost = time.monotonic(), time.process_time()
    while time.monotonic() < began + measured_seconds:
        wait()
    print(name, (time.process_time() - cost) / (time.monotonic() - began))


for name in ("assigned", "subscribed"):
    with Consumer({"bootstrap.servers": url, "group.id": name, "auto.offset.reset": "earliest"}) as consumer:
        if name == "assigned":
            consumer.assign([TopicPartition("t", number) for number in range(4)])
        else:
            consumer.subscribe(["t"])
        for _ in range(4):
            assert consumer.poll(20).error() is None
        measure(name, lambda: consumer.poll(0.5))

plain = Producer({"bootstrap.servers": url})
plain.produce("other", b"v")
assert plain.flush(20) == 0
transactional = Producer({"bootstrap.servers": url, "transactional.id": "idle"})
transactional.init_transactions(20)
transactional.begin_transaction()
transactional.produce("other", b"v")
assert transactional.flush(20) == 0
measure("producers", lambda: plain.poll(0.5))
"""


@pytest.mark.slow
def test_clients_that_wait_cost_next_to_nothing(url, make_producer):
    create_topic(url, "t", partition_count=4)
    create_topic(url, "other")
    producer = make_producer()
    for number in range(4):
        producer.produce("t", b"v", partition=number)
    assert producer.flush(20) == 0
    producer.close()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, url, str(MEASURED_SECONDS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    costs = {name: float(cost) for name, cost in map(str.split, done.stdout.splitlines())}
    assert len(costs) == 3
    assert max(costs.values()) < COST_MAX, costs

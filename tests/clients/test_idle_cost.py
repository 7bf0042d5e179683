"""What clients cost that have nothing to do: next to none of a processor."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.clients.steps import create_topic

#: Measured over this long; a machine that is busy makes it dearer, so the bound is far above what is usual (below 1 %),
#: and the cheapest of some measurements counts.
MEASURED_SECONDS = 2.0
COST_MAX = 0.05
MEASUREMENTS_MAX = 5

PROGRAM = """
import sys, time
from txnstore import Consumer, Producer, TopicPartition

url, measured_seconds, enough, measurements_max = sys.argv[1], *map(float, sys.argv[2:])


def measure(name, wait):
    wait()
    costs = []
    while len(costs) < measurements_max and not any(cost < enough for cost in costs):
        began, cost = time.monotonic(), time.process_time()
        while time.monotonic() < began + measured_seconds:
            wait()
        costs.append((time.process_time() - cost) / (time.monotonic() - began))
    print(name, min(costs))


for name in ("assigned", "subscribed"):
    with Consumer({"bootstrap.servers": url, "group.id": name, "auto.offset.reset": "earliest"}) as consumer:
        if name == "assigned":
            consumer.assign([TopicPartition("t", number) for number in range(4)])
        else:
            consumer.subscribe(["t"])
        for _ in range(4):
            assert consumer.poll(60).error() is None
        measure(name, lambda: consumer.poll(0.5))

plain = Producer({"bootstrap.servers": url})
plain.produce("other", b"v")
assert plain.flush(60) == 0
transactional = Producer({"bootstrap.servers": url, "transactional.id": "idle"})
transactional.init_transactions(60)
transactional.begin_transaction()
transactional.produce("other", b"v")
assert transactional.flush(60) == 0
measure("producers", lambda: plain.poll(0.5))
"""


@pytest.mark.slow
def test_clients_that_wait_cost_next_to_nothing(url, make_producer):
    create_topic(url, "t", partition_count=4)
    create_topic(url, "other")
    producer = make_producer()
    for number in range(4):
        producer.produce("t", b"v", partition=number)
    assert producer.flush(60) == 0
    producer.close()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, url, *map(str, (MEASURED_SECONDS, COST_MAX, MEASUREMENTS_MAX))],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    costs = {name: float(cost) for name, cost in map(str.split, done.stdout.splitlines())}
    assert len(costs) == 3
    assert max(costs.values()) < COST_MAX, costs

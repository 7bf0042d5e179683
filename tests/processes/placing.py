"""A worker that reads in commit order and copies each record within a transaction, with the position behind it.

After so many records it waits to be killed: whoever is to kill it may come late, and something has to be left.
"""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing.connection import Connection

from tests.tools.workload import Job
from txnstore import Consumer, Producer
from txnstore.log import commit_order

PATIENCE_SECONDS = 60
SETTINGS = {
    "group.id": "placing",
    "auto.offset.reset": "earliest",
    "enable.auto.commit": False,
    "txnstore.delivery.order": "commit",
    # Who is killed is missed soon.
    "session.timeout.ms": 600,
    "heartbeat.interval.ms": 100,
}


def copy(job: Job, pipe: Connection, count: int) -> None:
    """Copy so many records; tell of each once it is committed."""
    _copy(job, pipe, count, {})


def copy_whole(job: Job, pipe: Connection, count: int) -> None:
    """Copy so many records, each transaction from all of its partitions at once; tell of each once it is committed."""
    _copy(job, pipe, count, {"txnstore.delivery.atomic": True})


def _copy(job: Job, pipe: Connection, count: int, more: Mapping[str, object]) -> None:
    # A transaction is larger than a page.
    vars(commit_order)["PAGE_BATCHES_MAX"] = 2
    consumer = Consumer({"bootstrap.servers": job.url, **SETTINGS, **more})
    consumer.subscribe(["in"])
    producer = Producer({"bootstrap.servers": job.url, "transactional.id": "placing"})
    producer.init_transactions(PATIENCE_SECONDS)
    for _ in range(count):
        message = consumer.poll(PATIENCE_SECONDS)
        assert message is not None
        producer.begin_transaction()
        producer.produce("out", message.value(), partition=0)
        producer.send_offsets_to_transaction(
            consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), PATIENCE_SECONDS
        )
        producer.commit_transaction(PATIENCE_SECONDS)
        pipe.send(message.value())
    pipe.recv()

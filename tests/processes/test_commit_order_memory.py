"""The memory of a consumer in commit order: the same for a transaction of any size, and whatever else is open."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.clients.consumer.log_writer import LogWriter
from tests.tools.campaigns import times
from tests.tools.fork_server import fork_server
from txnstore import Consumer, TopicPartition
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.model import Record

BATCH_RECORDS = 1_000
#: How many batches are written at once.
TOGETHER = 10
#: What a consumer may hold at once: pages that are read ahead, and the one that is handed out.
MORE_MIB_MAX = 32
PATIENCE_SECONDS = 60
#: How many batches, of which values, and whether as much of another transaction lies among them.
LARGE, MANY = (600, b"v" * 190, True), (times(2_500), b"v" * 20, False)
#: What the database's part holds of a transaction is seen where it is large; of each record the consumer alone could
#: keep something, whatever the database.
CASES = {"sqlite-large": ("sqlite", *LARGE), "postgresql-large": ("postgresql", *LARGE), "millions": ("sqlite", *MANY)}


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.skipif(sys.platform != "linux", reason="the system has to tell of memory in /proc")
@pytest.mark.parametrize(
    ("txnstore_url", "batches", "value", "has_open"), CASES.values(), ids=CASES, indirect=["txnstore_url"]
)
def test_a_transaction_of_any_size_is_delivered_with_a_bounded_memory(url, txnstore_open, batches, value, has_open):
    """More than 100 MiB in one transaction with as much of another one that stays open; and millions of records."""
    log = LogWriter(txnstore_open(url, clock=None))
    log.topic()
    partition_id = log.partition_id("t", 0)
    committed, open_ = log.transaction(900_000), log.transaction(900_000)
    records = [Record(value, timestamp_ms=1_000)] * BATCH_RECORDS
    for first in range(0, batches, TOGETHER):
        for transaction in (committed, open_) if has_open else (committed,):
            together = [
                encode(
                    records, producer=transaction.identity, base_sequence=number * BATCH_RECORDS, is_transactional=True
                )
                for number in range(first, min(first + TOGETHER, batches))
            ]
            appends = [Append(partition_id, batch) for batch in together]
            log.coordinator.append(transaction.transactional_id, transaction.identity, appends)
    committed.end(commit=True)
    log.write("t", 0, b"last")
    last = (2 if has_open else 1) * batches * BATCH_RECORDS + 1
    # A process that reads the last record alone, and one that reads all.
    idle_mib, (count, _) = measured(url, last)
    all_mib, (count_of_all, is_ordered) = measured(url, 0)
    assert (count, count_of_all) == (1, batches * BATCH_RECORDS + 1)
    assert is_ordered
    assert all_mib - idle_mib < MORE_MIB_MAX, f"{idle_mib} MiB and {all_mib} MiB"


def measured(url: str, place: int) -> tuple[float, tuple[int, bool]]:
    """Return the most memory that a new process takes which reads from the place to the end, and what it has read."""
    context = fork_server()
    ours, theirs = context.Pipe()
    process = context.Process(target=read, args=(url, place, theirs), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(PATIENCE_SECONDS * 5)
    mib, found = ours.recv()
    process.join(PATIENCE_SECONDS)
    return mib, found


def read(url, place, pipe):
    settings = {"group.id": "readers", "txnstore.delivery.order": "commit", "enable.auto.commit": False}
    count, is_ordered, before = 0, True, -1
    with Consumer({"bootstrap.servers": url, **settings}) as consumer:
        consumer.assign([TopicPartition("t", 0, place)])
        while True:
            messages = consumer.consume(1_000, 0.5)
            if not messages:
                continue
            count += len(messages)
            offsets = [message.offset() or 0 for message in messages]
            is_ordered &= offsets == sorted(offsets) and offsets[0] > before
            before = offsets[-1]
            if messages[-1].value() == b"last":
                break
    # With what it has from its parent, which is the same for each; getrusage() would tell of the parent's own, too.
    (most,) = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    pipe.send((int(most) / 1024, (count, is_ordered)))

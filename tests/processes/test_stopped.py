"""Producers that stand still for longer than their transaction timeout: what they send late has no effect."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tests.tools.anomalies import find_anomalies
from tests.tools.histories import History
from tests.tools.recording import LineRecorder, dump, read_to_end
from tests.tools.workload import Job, TransactionalWriter, read_events, write_late
from txnstore.log.bounds import read_bounds
from txnstore.log.topics import create_topic
from txnstore.transactions.transaction import abort_if_timed_out

TIMEOUT_MS = 1_000
PATIENCE_SECONDS = 60
#: How late the abort may come, beside the time that the transaction is allowed to take: one look of the reaper.
LOOK_SECONDS = 0.05

#: What becomes of a producer while it is stopped, what it sends then, and how that is answered.
CASES = {
    "reaped-append": ("append", "TransactionAbortable"),
    "reaped-commit": ("commit", "TransactionAbortable"),
    "replaced-append": ("append", "ProducerFenced"),
    "replaced-commit": ("commit", "ProducerFenced"),
}


@pytest.mark.slow
def test_what_a_producer_sends_after_it_was_stopped_for_too_long_is_refused(
    url, txnstore_open, tmp_path, processes, wait_for
):
    store = txnstore_open(url, clock=None)
    topic = store.write(lambda connection: create_topic(connection, "orders", partition_count=2))
    partitions = {f"orders-{index}": partition_id for index, partition_id in enumerate(topic.partition_ids)}
    job = Job(url, tmp_path, "", 1, partitions, timeout_ms=TIMEOUT_MS)
    stopped = {name: processes.start_with_pipe(write_late, replace(job, name=name)) for name in CASES}
    for process, pipe in stopped.values():
        assert wait_for([pipe, process], PATIENCE_SECONDS) == [pipe]
        assert pipe.recv() == "open"
        processes.stop(process)
    is_stopped_ns = time.monotonic_ns()

    for name in CASES:
        if name.startswith("replaced"):
            TransactionalWriter(replace(job, name=name, life=2), store).take_up()
    waiting = {name for name in CASES if name.startswith("reaped")}
    while waiting:
        waiting = {name for name in waiting if not abort_if_timed_out(store, name)}
        assert wait_for([process for process, _ in stopped.values()], LOOK_SECONDS) == []
        assert time.monotonic_ns() - is_stopped_ns < (TIMEOUT_MS + PATIENCE_SECONDS * 1_000) * 1_000_000

    # Nobody holds readers back any more, though no process has gone on yet.
    bounds = store.read(lambda connection: read_bounds(connection, partitions.values()))
    assert all(of.last_stable_offset == of.high_watermark for of in bounds.values())
    for name, (late, answer) in CASES.items():
        process, pipe = stopped[name]
        processes.go_on(process)
        pipe.send(late)
        assert wait_for([pipe], PATIENCE_SECONDS) == [pipe]
        assert (name, pipe.recv()) == (name, answer)
    assert store.read(lambda connection: read_bounds(connection, partitions.values())) == bounds

    recorder = LineRecorder(tmp_path / "final#1.jsonl")
    read_to_end(recorder, "final#1", store, partitions)
    dump(recorder, "final#1", store, partitions)
    recorder.close()
    history = History.of(read_events(tmp_path))
    assert find_anomalies(history) == []
    assert all(not page.records for poll in history.polls if poll.is_committed for page in poll.pages)

"""The queue of a producer: what leaves it together, in which order, and what counts against its bounds."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnstore.clients.producer.queue import PARTITION_UNASSIGNED, VALUE, Accumulator


def record(value: bytes, *, queued_seconds: float = 0.0, partition: int = -1):
    return (value, None, 0, None, None, queued_seconds, len(value), partition)


def accumulator(**bounds: int) -> Accumulator:
    lock = threading.RLock()
    usual = {"records_max": 1000, "size_bytes_max": 100_000, "batch_records_max": 10, "batch_bytes_max": 1000}
    return Accumulator(lock, threading.Condition(lock), **{**usual, **bounds})


def values(batches) -> list[tuple[str, int, list[bytes]]]:
    return [(batch.topic, batch.partition, [record[VALUE] for record in batch.records]) for batch in batches]


def test_records_leave_by_partition_in_the_order_in_which_they_came():
    queue = accumulator()
    for number in range(6):
        queue.add("t", number % 2, record(b"%d" % number))
    assert values(queue.take_batches(5, 1000)) == [("t", 0, [b"0", b"2", b"4"]), ("t", 1, [b"1", b"3", b"5"])]
    assert queue.is_empty


def test_what_was_taken_counts_until_it_is_released():
    queue = accumulator(records_max=2)
    queue.add("t", 0, record(b"a"))
    queue.add("t", 0, record(b"bc"))
    queue.take_batches(5, 1000)
    with pytest.raises(BufferError, match="Local: Queue full"):
        queue.add("t", 0, record(b"d"))
    queue.release(1, 1)
    queue.add("t", 0, record(b"d"))
    assert (queue.record_count, queue.size_bytes) == (2, 3)


def test_a_record_that_would_pass_the_bound_of_bytes_is_refused_and_not_counted():
    queue = accumulator(size_bytes_max=10)
    queue.add("t", 0, record(b"x" * 6))
    with pytest.raises(BufferError):
        queue.add("t", 0, record(b"x" * 5))
    queue.add("t", 0, record(b"x" * 4))
    assert (queue.record_count, queue.size_bytes) == (2, 10)


def test_records_of_a_topic_that_is_looked_up_are_not_overtaken_once_it_is_known():
    queue = accumulator()
    queue.add("t", PARTITION_UNASSIGNED, record(b"first"))
    queue.add("t", 0, record(b"second", partition=0))
    assert queue.take_batches(5, 1000) == []
    waiting = queue.take_unassigned("t")
    assert waiting is not None
    assert [item[VALUE] for item in waiting.records] == [b"first", b"second"]


def test_only_what_is_too_old_expires():
    queue = accumulator()
    queue.add("t", 0, record(b"old", queued_seconds=1.0))
    queue.add("t", 0, record(b"new", queued_seconds=3.0))
    queue.add("u", PARTITION_UNASSIGNED, record(b"unknown", queued_seconds=2.0))
    assert queue.oldest_seconds == 1.0
    assert values(queue.take_expired(2.0)) == [("t", 0, [b"old"]), ("u", -1, [b"unknown"])]
    assert queue.oldest_seconds == 3.0
    assert queue.unknown_topics == []


@given(
    sizes=st.lists(st.integers(0, 40), max_size=60),
    batch_records_max=st.integers(1, 7),
    batch_bytes_max=st.integers(1, 90),
    batches_max=st.integers(1, 3),
)
def test_batches_keep_their_bounds_and_lose_nothing(sizes, batch_records_max, batch_bytes_max, batches_max):
    queue = accumulator(batch_records_max=batch_records_max, batch_bytes_max=batch_bytes_max)
    sent = [bytes([index]) * size for index, size in enumerate(sizes)]
    for value in sent:
        queue.add("t", 0, record(value))
    received: list[bytes] = []
    while not queue.is_empty:
        batches = queue.take_batches(batches_max, 1_000_000)
        assert 1 <= len(batches) <= batches_max
        for batch in batches:
            assert 1 <= len(batch.records) <= batch_records_max
            # One record that is larger than a batch goes by itself.
            assert batch.size_bytes <= batch_bytes_max or len(batch.records) == 1
            received += [item[VALUE] for item in batch.records]
    assert received == sent
    assert queue.record_count == len(sent)


def test_a_request_ends_near_its_bound_of_bytes_and_the_rest_stays():
    queue = accumulator(batch_bytes_max=10)
    for partition in range(4):
        queue.add("t", partition, record(b"x" * 10))
    assert [batch.partition for batch in queue.take_batches(5, 20)] == [0, 1]
    assert [batch.partition for batch in queue.take_batches(5, 20)] == [2, 3]

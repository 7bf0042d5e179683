"""The queue of a producer: what leaves it together, in which order, and what counts against its bounds."""

from __future__ import annotations

import math
import threading
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clients.moments import attempt, every_interrupt, is_no_moment_for_signals
from tests.clients.producer.reporting import take_all
from txnstore.clients.producer.queue import PARTITION_UNASSIGNED, PLACES, VALUE, Accumulator, Batch, DeliveryReport
from txnstore.clients.producer.state import TransactionStage
from txnstore.clients.producer.thread import Alarm
from txnstore.log.columns import fitting
from txnstore.log.topics import Topic


def add(queue: Accumulator, topic: str, partition: int, value: bytes, *, queued_seconds: float = 0.0) -> None:
    queue.add(topic, partition, None, value, None, 0, None, None, queued_seconds, len(value), partition)


def accumulator(**bounds: int) -> Accumulator:
    lock = threading.RLock()
    usual = {"records_max": 1000, "size_bytes_max": 100_000, "batch_records_max": 10, "batch_bytes_max": 1000}
    return Accumulator(threading.Condition(lock), Alarm(lock), linger_seconds=0.005, **{**usual, **bounds})


def values(batches) -> list[tuple[str, int, list[bytes]]]:
    return [(batch.topic, batch.partition, list(batch.values)) for batch in batches]


def test_records_leave_by_partition_in_the_order_in_which_they_came():
    queue = accumulator()
    for number in range(6):
        add(queue, "t", number % 2, b"%d" % number)
    assert values(queue.take_batches(5, 1000)) == [("t", 0, [b"0", b"2", b"4"]), ("t", 1, [b"1", b"3", b"5"])]
    assert queue.is_empty


def test_what_was_taken_counts_until_it_is_released():
    queue = accumulator(records_max=2)
    add(queue, "t", 0, b"a")
    add(queue, "t", 0, b"bc")
    (batch,) = queue.take_batches(5, 1000)
    with pytest.raises(BufferError, match="Local: Queue full"):
        add(queue, "t", 0, b"d")
    report = DeliveryReport(batch.part(0, 1), base_offset=0)
    queue.release(report)
    assert (queue.record_count, queue.size_bytes) == (2, 3)
    report.skip()
    queue.release(report)
    queue.release(report)
    add(queue, "t", 0, b"d")
    assert (queue.record_count, queue.size_bytes) == (2, 3)


def test_a_record_that_would_pass_the_bound_of_bytes_is_refused_and_not_counted():
    queue = accumulator(size_bytes_max=10)
    add(queue, "t", 0, b"x" * 6)
    with pytest.raises(BufferError):
        add(queue, "t", 0, b"x" * 5)
    add(queue, "t", 0, b"x" * 4)
    assert (queue.record_count, queue.size_bytes) == (2, 10)


def test_records_of_a_topic_that_is_looked_up_are_not_overtaken_once_it_is_known():
    queue = accumulator()
    add(queue, "t", PARTITION_UNASSIGNED, b"first")
    add(queue, "t", 0, b"second")
    assert queue.take_batches(5, 1000) == []
    waiting = queue.take_unassigned("t")
    assert waiting is not None
    assert waiting.places[VALUE::PLACES] == [b"first", b"second"]


def test_only_what_is_too_old_expires():
    queue = accumulator()
    add(queue, "t", 0, b"old", queued_seconds=1.0)
    add(queue, "t", 0, b"new", queued_seconds=3.0)
    add(queue, "u", PARTITION_UNASSIGNED, b"unknown", queued_seconds=2.0)
    assert queue.oldest_seconds == 1.0
    expired: list[Batch] = []
    queue.take_expired(2.0, expired)
    assert values(expired) == [("t", 0, [b"old"]), ("u", -1, [b"unknown"])]
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
        add(queue, "t", 0, value)
    received: list[bytes | None] = []
    while not queue.is_empty:
        batches = queue.take_batches(batches_max, 1_000_000)
        assert 1 <= len(batches) <= batches_max
        for batch in batches:
            assert 1 <= batch.record_count <= batch_records_max
            # One record that is larger than a batch goes by itself.
            assert batch.size_bytes <= batch_bytes_max or batch.record_count == 1
            received += batch.values
    assert received == sent
    assert queue.record_count == len(sent)


def test_a_request_ends_near_its_bound_of_bytes_and_the_rest_stays():
    queue = accumulator(batch_bytes_max=10)
    for partition in range(4):
        add(queue, "t", partition, b"x" * 10)
    assert [batch.partition for batch in queue.take_batches(5, 20)] == [0, 1]
    assert [batch.partition for batch in queue.take_batches(5, 20)] == [2, 3]


def test_a_topic_that_takes_less_than_a_full_batch_bounds_its_batches():
    small = Topic(1, "t", "uuid", (1,), {"max.message.bytes": 640}, {})
    queue = accumulator()
    for _ in range(20):
        queue.add("t", 0, small, b"x" * 100, None, 0, None, None, 0.0, 100, 0)
    batches = queue.take_batches(100, 100_000)
    assert {batch.record_count for batch in batches} == {5}
    assert sum(batch.record_count for batch in batches) == 20


class Rung:
    """Stands in for the alarm of a producer, and remembers for when it is rung."""

    def __init__(self):
        self.moments = []

    @property
    def count(self):
        return len(self.moments)

    def ring(self, at_seconds=-math.inf):
        self.moments.append(at_seconds)


def test_the_sender_is_woken_by_the_first_record_and_by_each_further_batch_alone():
    queue = accumulator(batch_bytes_max=100, batch_records_max=1000)
    queue.alarm = waker = Rung()  # type: ignore[assignment]
    counts = []
    for _ in range(30):
        add(queue, "t", 0, b"x" * 10)
        counts.append(waker.count)
    assert counts == [1] * 9 + [2] * 10 + [3] * 10 + [4]
    queue.take_batches(1, 1000)
    add(queue, "t", 0, b"x" * 10)
    assert waker.count == 5, "what is left is more than a batch, and the sender may have gone to sleep"


def test_the_sender_is_woken_by_a_batch_that_is_full_of_records():
    queue = accumulator(batch_records_max=3)
    queue.alarm = waker = Rung()  # type: ignore[assignment]
    counts = []
    for _ in range(4):
        add(queue, "t", 0, b"")
        counts.append(waker.count)
    assert counts == [1, 1, 2, 2]
    # The first one lingers, by default for 5 ms; a full batch leaves at once.
    assert waker.moments == [0.005, -math.inf]


class Ended:
    """A transaction that has ended."""

    stage = TransactionStage.BEGIN_COMMIT

    def refuse_record(self):
        raise LookupError


def test_nothing_is_queued_or_counted_once_the_transaction_has_ended():
    queue = accumulator()
    add(queue, "t", 0, b"before")
    queue.gate = Ended()
    with pytest.raises(LookupError):
        add(queue, "t", 0, b"after")
    assert (queue.record_count, queue.size_bytes) == (1, 6)
    assert values(queue.take_batches(5, 1000)) == [("t", 0, [b"before"])]


@pytest.mark.parametrize("known", [Topic(1, "t", "uuid", (1,), {"max.message.bytes": 640}, {}), None])
def test_a_call_that_was_interrupted_before_its_record_was_queued_leaves_nothing_that_matters(monkeypatch, known):
    queue = accumulator()
    partition = 0 if known is not None else PARTITION_UNASSIGNED
    queue_of = Accumulator._queue

    def interrupted(*arguments):
        queue_of(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Accumulator, "_queue", interrupted)
        with pytest.raises(KeyboardInterrupt):
            queue.add("t", partition, known, b"lost", None, 0, None, None, 0.0, 4, 5)
    assert queue.is_empty
    assert (queue.record_count, queue.oldest_seconds, queue.oldest_unknown_seconds) == (0, None, None)
    assert queue.waiting() == (None, False)
    expired: list[Batch] = []
    queue.take_expired(1.0, expired)
    assert expired == []

    queue.add("t", partition, known, b"queued", None, 0, None, None, 0.0, 6, 7)
    (batch,) = take_all(queue)
    assert (batch.values, batch.asked_for) == ([b"queued"], [] if known is not None else [7])


# --- what comes in between, on the same thread ------------------------------------------------------------------------


class Around:
    """A queue, what was taken from it, and what a signal's handler, or a finalizer, may do with it meanwhile."""

    def begin(self, partition: int, *, is_empty: bool) -> None:
        """Begin anew."""
        self.queue = accumulator(batch_records_max=3)
        self.queue.gate = self.gate = Gate()
        self.partition = partition
        self.taken: list[bytes | None] = []
        if not is_empty:
            self.add(b"before")

    def add(self, value: bytes) -> None:
        add(self.queue, "t", self.partition, value)

    def flush(self) -> None:
        """Let the sender's thread take all that waits, as it does while the caller's waits for it."""
        self.note(self.queue.take_batches(100, 10_000))
        for topic in self.queue.unknown_topics:
            waiting = self.queue.take_unassigned(topic)
            assert waiting is not None
            assert len(waiting.asked_for) == waiting.record_count
            self.note([waiting.first(waiting.record_count)])

    def abort(self) -> None:
        self.gate.stage = TransactionStage.READY
        self.take_all()

    def take_all(self) -> None:
        self.note(take_all(self.queue))

    def produce(self) -> None:
        self.add(b"in between")

    def produce_elsewhere(self) -> None:
        add(self.queue, "t", 1, b"in between", queued_seconds=9.0)

    def expire(self) -> None:
        expired: list[Batch] = []
        self.queue.take_expired(1.0, expired)
        self.note(expired)

    def note(self, batches) -> None:
        for batch in batches:
            assert batch.partition != PARTITION_UNASSIGNED or len(batch.asked_for) == batch.record_count
            self.taken += batch.values


class Gate:
    """A transaction that is open until it is aborted."""

    def __init__(self):
        self.stage = TransactionStage.IN_TRANSACTION

    def refuse_record(self):
        raise LookupError


FILES = {"producer/queue.py"}
kinds = pytest.mark.parametrize(
    ("partition", "is_empty"), [(0, True), (0, False), (PARTITION_UNASSIGNED, True), (PARTITION_UNASSIGNED, False)]
)


@kinds
@pytest.mark.parametrize("handler", ["flush", "produce"])
def test_a_record_is_queued_once_whatever_a_signals_handler_does_meanwhile(partition, is_empty, handler):
    around, count = Around(), 0
    for _, moment in every_interrupt(FILES, is_no_moment_for_signals, getattr(around, handler)):
        around.begin(partition, is_empty=is_empty)
        attempt(moment, partial(around.add, b"own"))
        around.flush()
        expected = [b"own"] if is_empty else [b"before", b"own"]
        if handler == "produce" and moment.where is not None:
            expected.append(b"in between")
        assert sorted(around.taken, key=str) == sorted(expected, key=str), moment.where
        assert around.queue.record_count == len(around.taken)
        assert around.queue.is_empty
        count += 1
    assert count > 1


@kinds
def test_nothing_is_queued_for_a_transaction_that_a_signals_handler_aborts_meanwhile(partition, is_empty):
    around = Around()
    for _, moment in every_interrupt(FILES, is_no_moment_for_signals, around.abort):
        around.begin(partition, is_empty=is_empty)
        is_queued = True
        try:
            attempt(moment, partial(around.add, b"own"))
        except LookupError:
            is_queued = False
        # Purged by the abort, as it was queued before, or refused.
        assert moment.where is None or around.queue.is_empty, moment.where
        around.flush()
        assert around.taken.count(b"own") == is_queued, moment.where


def test_a_record_that_a_finalizer_queues_while_all_are_taken_waits_for_the_next_time():
    around = Around()
    for _, moment in every_interrupt(FILES, handler=around.produce):
        around.begin(0, is_empty=False)
        attempt(moment, around.take_all)
        around.flush()
        assert around.taken == [b"before", *([] if moment.where is None else [b"in between"])], moment.where


def test_a_record_that_a_finalizer_queues_while_others_expire_stays():
    around = Around()
    for _, moment in every_interrupt(FILES, handler=around.produce_elsewhere):
        around.begin(0, is_empty=False)
        add(around.queue, "t", 1, b"old")
        attempt(moment, around.expire)
        around.flush()
        assert around.taken == [b"before", b"old", *([] if moment.where is None else [b"in between"])], moment.where


def test_what_was_taken_goes_although_the_next_queue_cannot_be_looked_at(monkeypatch):
    queue = accumulator()
    for topic in "abc":
        add(queue, topic, 0, topic.encode())

    def failing(sizes_bytes, keys, values, *rest, **named):
        if values == [b"b"]:
            raise MemoryError
        return fitting(sizes_bytes, keys, values, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr("txnstore.clients.producer.queue.fitting", failing)
        assert values(queue.take_batches(5, 1000)) == [("a", 0, [b"a"]), ("c", 0, [b"c"])]
        for _ in range(2):
            with pytest.raises(MemoryError):
                queue.take_batches(5, 1000)
    assert values(queue.take_batches(5, 1000)) == [("b", 0, [b"b"])]


class Narrow(list):
    """A list that finds no memory for what it is given first."""

    has_refused = False

    def append(self, item):
        if not self.has_refused:
            self.has_refused = True
            raise MemoryError
        super().append(item)


def test_what_there_is_no_memory_to_hand_over_stays_in_the_queue():
    queue = accumulator()
    for topic in "ab":
        add(queue, topic, 0, topic.encode())
    taken = Narrow()
    queue.take_batches(5, 1000, into=taken)
    assert values(taken) == [("b", 0, [b"b"])]
    assert (queue.waiting_count, queue.waiting()[0]) == (1, 0.0)
    assert values(queue.take_batches(5, 1000)) == [("a", 0, [b"a"])]
    add(queue, "c", 0, b"c")
    with pytest.raises(MemoryError):
        queue.take_batches(5, 1000, into=Narrow())
    assert values(queue.take_batches(5, 1000)) == [("c", 0, [b"c"])]


def test_a_closed_queue_takes_nothing_of_a_call_that_began_before():
    queue = accumulator()
    add(queue, "t", 0, b"before")
    queue.close("closed")
    for partition in (0, 1, PARTITION_UNASSIGNED):
        with pytest.raises(RuntimeError, match="closed"):
            add(queue, "t", partition, b"after")
    assert values(take_all(queue)) == [("t", 0, [b"before"])]
    assert queue.record_count == 1

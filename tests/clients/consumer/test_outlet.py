"""What poll() hands out in C without the lock: the same as the long way, while nothing else is to be done."""

from __future__ import annotations

import gc
import inspect
import math
import os
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clients.bulk_paths import all_spare_messages, needs_c
from tests.clients.consumer.log_writer import PATIENCE_SECONDS, eventually
from tests.databases import on_sqlite_alone
from tests.tools.memory import called_as_garbage_is_collected
from txnstore import OFFSET_BEGINNING, Consumer, DeserializingConsumer, KafkaException, TopicPartition, bulk
from txnstore.clients.consumer.events import MessageEvent
from txnstore.clients.consumer.opening import Chunk, PageRead, open_batch
from txnstore.clients.consumer.subscription import Subscription
from txnstore.clients.model.errors import KafkaError
from txnstore.clients.model.message import NO_DETAILS, Message, RecordSource, error_message
from txnstore.clients.outlet import Polls, lease_seconds, new_outlet, short_in_c
from txnstore.log.bounds import Bounds
from txnstore.log.codec import decode, encode
from txnstore.model import Record

TP = TopicPartition

# --- the same program with and without it -----------------------------------------------------------------------------


class Reader(Polls):
    """A consumer without threads and database, that opens its outlet or never does."""

    def __init__(self, opens: bool, **options: Any) -> None:
        self.events: deque[Message] = deque()
        self._outlet = new_outlet(self.events)
        self.subscription = Subscription(
            reports_eof=True, records_low=1_000, bytes_low=1_000_000, outlet=self._outlet, **options
        )
        self.gathered: list[list[Message]] = []
        self.long_way_count = 0
        self._opens = opens
        self.is_timed = True

    @short_in_c
    def poll(self, timeout: float = -1) -> Any:
        self.long_way_count += 1
        if self.events:
            return self.events.popleft()
        message = self.subscription.next_message()
        if message is not None and self._opens:
            self.subscription.open_outlet(is_timed=self.is_timed)
        return message


class Log:
    """The batches of one partition."""

    def __init__(self, number: int, sizes: list[tuple[int, int, int]]) -> None:
        """Let each batch have so many records, with such a gap before each, and so much behind the last one."""
        self.number = number
        self.batches = []
        offset = 0
        for size, gap, behind in sizes:
            deltas = [(gap + 1) * place for place in range(size)]
            batch = encode([Record(b"%d" % place) for place in range(size)], offset_deltas=deltas if gap else None)
            last_offset = offset + deltas[-1] + behind
            row = SimpleNamespace(partition_id=1, base_offset=offset, last_offset=last_offset, **batch.columns())
            self.batches.append(decode(row))
            offset = last_offset + 1
        self.end = offset

    def page(self, position: int) -> PageRead:
        """Return the batch there and the next one."""
        found = [batch for batch in self.batches if batch.last_offset >= position][:2]
        chunks = [self._chunk(batch, position) for batch in found]
        next_position = found[-1].last_offset + 1 if found else self.end
        return PageRead(chunks, next_position, Bounds(1, 0, self.end, self.end), self.end)

    def _chunk(self, batch: Any, position: int) -> Chunk:
        source = RecordSource("t", self.number, 1)
        opens = partial(open_batch, source, batch, position)
        first, last = max(position, batch.base_offset), batch.last_offset
        return Chunk(source, opens, batch.record_count, 1, first, last, last + 1, first)


def told(message: Message | None) -> Any:
    return None if message is None else (message.partition(), message.offset(), message.value(), message.error())


def poll(reader: Reader, _: list[Log], number: int, count: int) -> Any:
    return [told(reader.poll(1.0)) for _ in range(count)]


def come_between(reader: Reader, _: list[Log], number: int, count: int) -> None:
    reader.events.append(error_message(KafkaError(KafkaError._FAIL, "an event"), "t", number))


def add(reader: Reader, _: list[Log], number: int, count: int) -> None:
    if reader.subscription.find("t", number) is None:
        reader.subscription.add("t", number, count)


def read(reader: Reader, logs: list[Log], number: int, count: int) -> None:
    subscription = reader.subscription
    for position in subscription.to_resolve(0.0):
        subscription.resolved(position, position.position)
    for position in subscription.to_read(0.0):
        subscription.deliver(position, logs[position.partition.number].page(position.position))


def take(reader: Reader, _: list[Log], number: int, count: int) -> Any:
    messages: list[Message] = []
    reader.subscription.take(messages, count)
    return [told(message) for message in messages]


def gather(reader: Reader, _: list[Log], number: int, count: int) -> Any:
    """Take some in a call that comes to its end later, with the next of its kind."""
    subscription = reader.subscription
    for messages in reader.gathered:
        subscription.gathered.pop(id(messages))
        subscription.let_go()
    reader.gathered = [[]]
    subscription.withhold(reader.gathered[0])
    subscription.take(reader.gathered[0], count)
    return [told(message) for message in reader.gathered[0]]


def begin_to_gather(reader: Reader, _: list[Log], number: int, count: int) -> None:
    reader.gathered.append([])
    reader.subscription.withhold(reader.gathered[-1])


def give_back(reader: Reader, _: list[Log], number: int, count: int) -> None:
    subscription = reader.subscription
    for messages in reader.gathered:
        subscription.give_back(messages[count:])
        subscription.gathered.pop(id(messages))
        subscription.let_go()
    reader.gathered = []


def remove(reader: Reader, _: list[Log], number: int, count: int) -> Any:
    removed = reader.subscription.remove("t", number)
    return None if removed is None else (removed.position, removed.stored)


def change(name: str, reader: Reader, _: list[Log], number: int, count: int) -> None:
    partition = reader.subscription.find("t", number)
    if partition is not None:
        getattr(reader.subscription, name)(partition, *([count] if name == "seek" else []))


STEPS: dict[str, Callable[[Reader, list[Log], int, int], Any]] = {
    **{
        each.__name__: each
        for each in (poll, come_between, add, read, take, gather, begin_to_gather, give_back, remove)
    },
    **{name: partial(change, name) for name in ("pause", "resume", "seek")},
}


def run(reader: Reader, logs: list[Log], step: tuple[str, int, int]) -> Any:
    """Do one thing; return what comes of it."""
    name, number, count = step
    return STEPS[name](reader, logs, number, count)


def state(reader: Reader) -> Any:
    places = [
        (one.number, one.position, one.stored, one.uncommitted, one.buffered_records) for one in reader.subscription
    ]
    return places, reader.subscription.buffered_records, reader.subscription.has_messages


steps = st.tuples(
    st.just("poll") | st.just("read") | st.sampled_from(sorted(STEPS)), st.integers(0, 1), st.integers(0, 9)
)
sizes = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=4)


@needs_c
@given(st.lists(sizes, min_size=2, max_size=2), st.booleans(), st.lists(steps, max_size=30))
def test_a_program_finds_the_same_with_and_without_it(
    all_sizes: list[list[tuple[int, int, int]]], stores_offsets: bool, program: list[tuple[str, int, int]]
) -> None:
    logs = [Log(number, each) for number, each in enumerate(all_sizes)]
    with_it, without = (Reader(opens, stores_offsets=stores_offsets) for opens in (True, False))
    for step in [("add", 0, 0), ("add", 1, 0), ("read", 0, 0), *program]:
        assert run(with_it, logs, step) == run(without, logs, step), step
        assert state(with_it) == state(without), step


# --- when it is closed, and what it asks ------------------------------------------------------------------------------


@pytest.fixture
def reader():
    """One that has got the first of ten records in one batch."""
    made = Reader(opens=True, stores_offsets=True)
    for step in (("add", 0, 0), ("read", 0, 0), ("poll", 0, 1)):
        run(made, [Log(0, [(10, 0, 0)])], step)
    assert made.long_way_count == 1
    return made


@needs_c
def test_all_but_the_first_and_the_last_record_of_a_batch_take_the_short_way(reader):
    assert [reader.poll().offset() for _ in range(8)] == list(range(1, 9))
    assert reader.long_way_count == 1
    partition = reader.subscription.find("t", 0)
    assert (partition.position, partition.stored) == (9, 9)
    assert reader.poll().offset() == 9
    assert reader.long_way_count == 2


@needs_c
@pytest.mark.parametrize("timeout", [0, -1, 30, 0.0, 1.5, -1.5, 1e6, -(2**62)])
def test_a_plain_timeout_takes_the_short_way(reader, timeout):
    reader.poll(timeout)
    assert reader.long_way_count == 1


@needs_c
@pytest.mark.parametrize("timeout", [math.nan, math.inf, 1e7, 2**70, -(2**70), True, "1", None])
def test_any_other_timeout_is_looked_at_at_length(reader, timeout):
    reader.poll(timeout)
    assert reader.long_way_count == 2


@needs_c
def test_arguments_are_those_of_the_long_way(reader):
    assert reader.poll(timeout=1.0).offset() == 1
    for arguments, named in (((1, 2), {}), ((1,), {"timeout": 1}), ((), {"seconds": 1})):
        with pytest.raises(TypeError, match="poll"):
            reader.poll(*arguments, **named)
    assert reader.poll().offset() == 2


@needs_c
def test_events_come_first(reader):
    run(reader, [], ("come_between", 0, 0))
    assert reader.poll().error() is not None
    assert reader.poll().offset() == 1


@needs_c
def test_nothing_is_stored_while_a_call_gathers_and_all_of_it_afterwards(reader):
    [partition] = reader.subscription
    gathered: Any = []
    reader.subscription.withhold(gathered)
    assert [reader.poll().offset() for _ in range(2)] == [1, 2]
    assert (partition.position, partition.stored) == (3, 1)
    reader.subscription.gathered.pop(id(gathered))
    reader.subscription.let_go()
    assert (reader.poll().offset(), partition.position, partition.stored) == (3, 4, 4)


@needs_c
def test_each_poll_is_noted_and_nothing_is_handed_out_once_the_lease_is_over(reader):
    before = lease_seconds()
    reader.poll()
    noted = reader._outlet.polled_at
    assert before <= noted <= lease_seconds()
    reader.poll()
    assert reader._outlet.polled_at >= noted
    reader._outlet.lease_ends_at = lease_seconds()
    assert reader.long_way_count == 1
    reader.poll()
    assert reader.long_way_count == 2


@needs_c
def test_outside_of_a_group_no_clock_is_asked():
    reader = Reader(opens=True, stores_offsets=True)
    reader.is_timed = False
    for step in (("add", 0, 0), ("read", 0, 0), ("poll", 0, 3)):
        run(reader, [Log(0, [(10, 0, 0)])], step)
    assert (reader.long_way_count, reader._outlet.polled_at) == (1, 0.0)


@needs_c
def test_in_c_it_tells_the_same_of_itself():
    in_c, in_python = (getattr(Consumer, name) for name in ("poll", "_poll_at_length"))
    assert inspect.getdoc(in_c) == inspect.getdoc(in_python)
    assert inspect.signature(in_c).parameters["timeout"].default == -1
    assert list(inspect.signature(in_c).parameters) == list(inspect.signature(in_python).parameters)


@needs_c
def test_what_does_not_fit_is_refused(reader):
    given_: Any
    for given_ in ((iter([]), 1, True), (1, 1, True), (None, 1, True), ()):
        with pytest.raises(TypeError):
            bulk.core.Outlet(deque(), -1).open(*given_)
    with pytest.raises(TypeError):
        bulk.core.Outlet(5, -1)  # type: ignore[arg-type]
    for given_ in (5, None, bulk.core.Polls()):
        with pytest.raises(TypeError, match="_outlet"):
            reader._outlet = given_
    with pytest.raises(TypeError, match="_outlet"):
        del reader._outlet
    with pytest.raises(AttributeError, match="_outlet"):
        bulk.core.Polls()._outlet  # noqa: B018 - it is asked for
    with pytest.raises(AttributeError, match="_poll_at_length"):
        bulk.core.Polls().poll()


@needs_c
def test_it_is_not_opened_over_a_batch_of_which_nothing_was_taken():
    reader = Reader(opens=True, stores_offsets=True)
    for step in (("add", 0, 0), ("read", 0, 0)):
        run(reader, [Log(0, [(10, 0, 0)])], step)
    [partition] = reader.subscription
    reader.subscription._next_chunk(partition)
    reader.subscription.open_outlet(is_timed=False)
    assert reader.subscription._lender is None


@needs_c
@pytest.mark.parametrize("gap", [0, 1])
def test_a_batch_tells_what_was_taken_of_it(gap):
    [batch] = Log(0, [(9, gap, 3)]).batches
    messages: Any = open_batch(RecordSource("t", 0, 1), batch, 4)
    assert messages.taken_offset == -1
    found = [(message.offset(), messages.taken_offset) for message in messages]
    assert found
    assert all(offset == taken for offset, taken in found)
    assert messages.taken_offset == found[-1][0]


@needs_c
def test_without_a_clock_a_members_polls_take_the_long_way(reader):
    events: Any = deque()
    reader._outlet = outlet = bulk.core.Outlet(events, 999)
    partition = reader.subscription.find("t", 0)
    outlet.open(partition.messages, 9, True)
    reader.poll()
    assert reader.long_way_count == 2


@needs_c
def test_a_record_is_handed_out_once_also_if_memory_is_collected_meanwhile():
    """Where a message is made, Python may collect garbage and run anything: here it polls."""
    reader = Reader(opens=True, stores_offsets=True)
    log = Log(0, [(2_000, 0, 0)])
    seen: Any = []
    for step in (("add", 0, 0), ("read", 0, 0), ("poll", 0, 1)):
        run(reader, [log], step)
    kept: Any = all_spare_messages()
    gc.collect()  # messages of tests before this one
    before = sys.getrefcount(Message)

    def poll() -> None:
        kept.append(reader.poll())
        seen.append(kept[-1].offset())

    with called_as_garbage_is_collected(poll):
        while len(seen) < 900:
            poll()
    assert sorted(seen) == list(range(1, len(seen) + 1))
    # A message that was made in vain holds its class, as those do that are kept.
    assert abs(sys.getrefcount(Message) - before - len(seen)) < 40
    assert reader.long_way_count == 1


@needs_c
def test_what_was_closed_while_a_message_was_made_hands_it_out_no_more(reader):
    kept: Any = all_spare_messages()
    found = None
    with called_as_garbage_is_collected(lambda: reader.subscription.pause(reader.subscription.find("t", 0))):
        while reader.subscription._lender is not None:
            found = reader.poll()
            kept.append(found)
    partition = reader.subscription.find("t", 0)
    assert partition.paused_by
    position = partition.position
    assert found is None or found.offset() == position - 1
    reader.subscription.resume(partition)
    assert reader.poll().offset() == position


@pytest.mark.slow
@needs_c
def test_memory_and_counts_stay_as_they_are():
    source = RecordSource("t", 0, 1)
    batch = decode(
        SimpleNamespace(partition_id=1, base_offset=0, last_offset=9, **encode([Record(b"v")] * 10).columns())
    )

    def turn():
        reader = Reader(opens=True, stores_offsets=True)
        for step in (("add", 0, 0), ("read", 0, 0), ("poll", 0, 5), ("pause", 0, 0)):
            run(reader, [log], step)
        reader._outlet.open(open_batch(source, batch, 0), 9, False)
        reader.poll()
        # Part of a circle.
        reader.events.append(cast("Any", reader))

    def counts():
        gc.collect()
        return [sys.getrefcount(each) for each in (None, source, NO_DETAILS, Message, Reader, bulk.core.Outlet)]

    log = Log(0, [(10, 0, 0)])
    turn()
    # Other threads of the process may take up something just then: what turns keep is kept each time.
    for _ in range(4):
        before = counts()
        for _ in range(200):
            turn()
        more = [abs(now - then) for now, then in zip(counts(), before, strict=True)]
        if max(more) < 40:
            break
    assert max(more) < 40, more


# --- consumers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def consumer(log, make_consumer):
    """One that has got the first two of 10,000 records in one batch, and commits by itself."""
    log.topic()
    log.write("t", 0, *[b"%d" % number for number in range(10_000)])
    made = make_consumer({"enable.auto.commit": True, "auto.commit.interval.ms": 0})
    made.assign([TP("t", 0, OFFSET_BEGINNING)])
    # The first one was waited for, and the second one is at hand.
    assert [made.poll(PATIENCE_SECONDS).offset() for _ in range(2)] == [0, 1]
    return made


@needs_c
@on_sqlite_alone  # No call of these asks the database.
def test_a_consumer_takes_the_short_way_and_its_other_calls_know_how_far_it_came(consumer, monkeypatch):
    monkeypatch.setattr(Consumer, "_poll_at_length", lambda *_: pytest.fail("the long way"))
    assert [consumer.poll(1.0).offset() for _ in range(98)] == list(range(2, 100))
    assert consumer.position([TP("t", 0)])[0].offset == 100
    assert [tp.offset for tp in consumer._core.commits.stored()] == [100]
    facts = consumer._core._facts()["topics"]["t"]["partitions"]["0"]
    assert (facts["app_offset"], facts["stored_offset"]) == (100, 100)
    # Asking closes nothing.
    assert consumer.poll(1.0).offset() == 100


@needs_c
def test_what_was_handed_out_is_committed_as_the_consumer_is_closed(consumer, make_consumer):
    for _ in range(500):
        consumer.poll(PATIENCE_SECONDS)
    consumer.close()
    with pytest.raises(RuntimeError, match="closed"):
        consumer.poll(0)
    assert make_consumer().committed([TP("t", 0)], PATIENCE_SECONDS)[0].offset == 502


@needs_c
@on_sqlite_alone  # No call of these asks the database.
@pytest.mark.parametrize(
    ("call", "next_offset"),
    [
        (lambda consumer: consumer.seek(TP("t", 0, 7_000)), 7_000),
        (lambda consumer: consumer.consume(5, PATIENCE_SECONDS), 15),
        (lambda consumer: consumer.resume([TP("t", 0)]), 10),
        (lambda consumer: consumer.assign([TP("t", 0, 77)]), 77),
    ],
    ids=["seek", "consume", "resume", "assign"],
)
def test_other_calls_change_what_comes_next(consumer, call, next_offset):
    for _ in range(8):
        consumer.poll(PATIENCE_SECONDS)
    call(consumer)
    assert [consumer.poll(PATIENCE_SECONDS).offset() for _ in range(3)] == [next_offset + place for place in range(3)]


@needs_c
@on_sqlite_alone  # No call of these asks the database.
def test_a_paused_partition_hands_out_nothing_and_goes_on_where_it_was(consumer):
    consumer.poll(PATIENCE_SECONDS)
    consumer.pause([TP("t", 0)])
    assert consumer.poll(0) is None
    consumer.resume([TP("t", 0)])
    assert consumer.poll(PATIENCE_SECONDS).offset() == 3


@needs_c
@on_sqlite_alone  # No call of these asks the database.
def test_callbacks_are_served_before_the_next_record(consumer):
    consumer._core.inbox.put(MessageEvent(error_message(KafkaError(KafkaError._FAIL, "an event"))))
    assert consumer.poll(PATIENCE_SECONDS).error() is not None
    assert consumer.poll(PATIENCE_SECONDS).offset() == 2


@needs_c
@on_sqlite_alone  # No call of these asks the database.
def test_nothing_that_another_call_gathers_is_stored_but_what_is_polled_meanwhile(consumer):
    consumer.pause([TP("t", 0)])
    with ThreadPoolExecutor(1) as pool:
        gathers = pool.submit(consumer.consume, 3, PATIENCE_SECONDS)
        eventually(lambda: consumer._core.group.waiting)
        with consumer._core.arrived:
            subscription = consumer._core.subscription
            subscription.resume(subscription.find("t", 0))
        assert [consumer.poll(PATIENCE_SECONDS).offset() for _ in range(3)] == [2, 3, 4]
        assert [tp.offset for tp in consumer._core.commits.stored()] == [5]
        consumer.resume([TP("t", 0)])
        assert [message.offset() for message in gathers.result(PATIENCE_SECONDS)] == [5, 6, 7]
    assert [tp.offset for tp in consumer._core.commits.stored()] == [8]


@needs_c
@on_sqlite_alone  # No call of these asks the database.
def test_threads_that_poll_at_once_get_each_record_once(consumer):
    def poll_until_the_end(found):
        while (message := consumer.poll(0)) is not None:
            found.append(message.offset())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            found: Any = [[], [], [], []]
            list(pool.map(poll_until_the_end, found))
    finally:
        sys.setswitchinterval(interval)
    assert sorted(offset for each in found for offset in each) == list(range(2, 10_000))
    assert all(each == sorted(each) for each in found)
    assert [tp.offset for tp in consumer._core.commits.stored()] == [10_000]


@needs_c
@on_sqlite_alone  # No call of these asks the database.
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_of_the_process_gets_nothing_of_what_is_at_hand(consumer):
    child = os.fork()
    if child == 0:
        try:
            consumer.poll(0)
        except KafkaException as refused:
            os._exit(0 if refused.args[0].code() == KafkaError._STATE else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert consumer.poll(PATIENCE_SECONDS).offset() == 2


@needs_c
@on_sqlite_alone  # The group is told of nothing.
def test_a_members_polls_are_noted_and_one_whose_lease_is_over_gets_nothing(log, make_consumer, monkeypatch):
    log.topic()
    log.write("t", 0, *[b"%d" % number for number in range(1_000)])
    consumer = make_consumer()
    consumer.subscribe(["t"])
    assert [consumer.poll(PATIENCE_SECONDS).offset() for _ in range(2)] == [0, 1]
    group, outlet = consumer._core.group, consumer._core.outlet
    outlet.polled_at = 0.0
    with monkeypatch.context() as patch:
        patch.setattr(Consumer, "_poll_at_length", lambda *_: pytest.fail("the long way"))
        assert consumer.poll(0).offset() == 2
    assert lease_seconds() - outlet.polled_at < PATIENCE_SECONDS
    with consumer._core.arrived:
        lease_ends_at, outlet.lease_ends_at = outlet.lease_ends_at, -math.inf
        assert consumer.poll(0) is None
        outlet.lease_ends_at = lease_ends_at
        assert consumer.poll(0).offset() == 3
        # As if it had not polled for too long.
        group._lapse(lease_seconds())
        assert consumer._core.subscription._lender is not None
        assert consumer.poll(0).error().code() == KafkaError._MAX_POLL_EXCEEDED


@needs_c
def test_it_stays_open_whatever_is_read_of_any_partition_until_its_own_is_paused() -> None:
    logs = [Log(0, [(9, 0, 0)] * 4), Log(1, [(1, 0, 0)])]
    reader = Reader(True, stores_offsets=True)
    subscription = reader.subscription
    for number in (0, 1):
        subscription.add("t", number, 0)
    read(reader, logs, 0, 0)
    first, second = subscription
    assert [told(reader.poll(1.0))[1] for _ in range(2)] == [0, 1]
    assert subscription._lender is first
    read(reader, logs, 0, 0)
    for position in subscription.to_read(0.0):
        subscription.fail(position, KafkaError(KafkaError._FAIL, "an error"), 0.0)
    subscription.add("t", 2, 0)
    subscription.pause(second)
    subscription.resume(second)
    # Its positions are right without.
    before = reader.long_way_count
    assert [told(reader.poll(1.0))[1] for _ in range(3)] == [2, 3, 4]
    assert (reader.long_way_count, first.position, first.stored) == (before, 5, 5)
    subscription.pause(first)
    assert subscription._lender is None


@needs_c
@on_sqlite_alone  # No call of these asks the database.
def test_where_transactions_come_whole_it_is_closed_whenever_another_partition_may_be_next(consumer, make_consumer):
    atomic = make_consumer({"txnstore.delivery.order": "commit", "txnstore.delivery.atomic": True})
    atomic.assign([TP("t", 0, OFFSET_BEGINNING)])
    subscription = atomic._core.subscription
    assert [atomic.poll(PATIENCE_SECONDS).offset() for _ in range(5)] == list(range(5))
    assert subscription._lender is not None
    assert subscription.find("t", 0).position == atomic._core.options.positions.at(5)
    with atomic._core.arrived:
        subscription._arrange(subscription.find("t", 0))
    assert subscription._lender is None
    assert [atomic.poll(PATIENCE_SECONDS).offset() for _ in range(2)] == [5, 6]


@needs_c
@on_sqlite_alone  # The group is told of nothing.
def test_who_subscribes_counts_as_polling_from_then_on(consumer):
    consumer.subscribe(["t"])
    for offset in range(2, 5):
        # Not long ago: the member's thread would tell of it at once.
        consumer._core.outlet.polled_at = before = lease_seconds() - 10
        assert consumer.poll(0).offset() == offset
        assert consumer._core.outlet.polled_at > before


@needs_c
@on_sqlite_alone  # No call of these asks the database.
def test_a_consumer_of_objects_takes_the_short_way_too(url, consumer, monkeypatch):
    settings = {"bootstrap.servers": url, "group.id": "objects", "value.deserializer": lambda value, _: int(value)}
    deserializing: Any
    with closing(DeserializingConsumer(settings)) as deserializing:
        deserializing.assign([TP("t", 0, 5)])
        assert [deserializing.poll(PATIENCE_SECONDS).value() for _ in range(2)] == [5, 6]
        monkeypatch.setattr(Consumer, "_poll_at_length", lambda *_: pytest.fail("the long way"))
        assert [deserializing.poll(1.0).value() for _ in range(3)] == [7, 8, 9]
        monkeypatch.undo()


@pytest.mark.slow
@needs_c
@on_sqlite_alone  # No call of these asks the database.
def test_a_consumer_that_is_dropped_while_it_is_open_is_collected(log, url):
    log.topic()
    log.write("t", 0, b"1", b"2", b"3", b"4")
    consumer: Any = Consumer({"bootstrap.servers": url, "group.id": "dropped", "auto.offset.reset": "earliest"})
    consumer.assign([TP("t", 0, 0)])
    assert [consumer.poll(PATIENCE_SECONDS).offset() for _ in range(2)] == [0, 1]
    assert consumer._core.subscription._lender is not None
    finalizer = consumer._finalizer
    del consumer
    # Its thread may be at work, and hold it for a moment.
    eventually(lambda: gc.collect() >= 0 and not finalizer.alive)

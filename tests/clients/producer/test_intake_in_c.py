"""A record comes into a producer's queue in C as it does in Python: the same records, counts, errors and moments."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.clients.bulk_paths import needs_c, outcome
from tests.clients.producer.reporting import NEVER_MS, take_all
from tests.clients.steps import PATIENCE_SECONDS, create_topic
from tests.databases import on_sqlite_alone
from tests.tools.memory import assert_nothing_is_kept
from txnstore import KafkaException, bulk
from txnstore.clients.producer.queue import PLACES, QUEUED_SECONDS, Accumulator, make_intake
from txnstore.clients.producer.state import IN_TRANSACTION, TransactionStage
from txnstore.clients.producer.thread import Alarm
from txnstore.log.partitioners import PARTITIONERS, PartitionChoice
from txnstore.testing.manual_clock import ManualClock

pytestmark = needs_c

MANY, SINGLE = "orders", "single"
SIZE_MAX = 100
LAST = {"topic": SINGLE, "value": b"last"}


class Odd(int):
    """A number of a kind of its own."""


class OwnText(str):
    """A text of a kind of its own."""

    __slots__ = ()


class OwnBytes(bytes):
    """Bytes of a kind of their own."""


def report(error: Any, message: Any) -> None:
    """Stand for a delivery callback."""


contents = (
    st.none()
    | st.binary(max_size=4)
    | st.text(max_size=4)
    | st.sampled_from([b"x" * SIZE_MAX, b"x" * (SIZE_MAX + 1), "\ud800", "é" * 50, OwnText("own"), OwnBytes(b"own"), 5])
    | st.sampled_from([[], 1.5, b"x" * 60])
    | st.builds(bytearray, st.just(b"array"))
    | st.just(memoryview(b"view"))
)
PARTITIONS = [0, 1, 2, 3, 4, -2, 2**31 - 1, 2**31, 2**63, -(2**70), True, None, "0", 1.0, Odd(1)]
TIMESTAMPS = [1, -1, 2**63 - 1, 2**63, -(2**63), -(2**63) + 1, 2**70, False, True, None, 0.0, 1.5, Odd(7), Odd(0)]
partitions: Any = st.sampled_from([-1] * 6 + PARTITIONS)
timestamps: Any = st.sampled_from([0] * 6 + TIMESTAMPS)
callbacks = st.sampled_from([None, None, report, print, 5, "callback"])
headers: Any = st.sampled_from(
    [None] * 5 + [[("a", b"1")], {"a": "é"}, [], {}, [("a", None), ("a", b"\xff")], [5], "h"]
)
topics = st.sampled_from([MANY] * 4 + [SINGLE] * 4 + [OwnText(MANY), "unknown", "", "\ud800", None, 5, b"orders"])
calls = st.fixed_dictionaries(
    {"topic": topics, "value": contents},
    optional={
        "key": contents,
        "partition": partitions,
        "callback": callbacks,
        "on_delivery": callbacks,
        "timestamp": timestamps,
        "headers": headers,
    },
)
usual = st.fixed_dictionaries(
    {"topic": st.sampled_from([MANY, SINGLE]), "value": st.binary(max_size=9)}, optional={"key": st.binary(max_size=3)}
)
#: What happens: a record, the sender's taking of batches, the clock going on, a topic that is known no more, and again.
steps = st.lists(calls | usual | usual | st.sampled_from(["take", "tick", "forget", "learn"]), max_size=60)


@pytest.fixture
def make_pair(make_producer, url):
    """Make two producers of one configuration, of which the second one does all of it in Python."""
    create_topic(url, MANY, partition_count=4)
    create_topic(url, SINGLE)

    def make(**configuration: Any) -> Any:
        usual = {"linger.ms": NEVER_MS, "txnstore.clock": ManualClock(), "sticky.partitioning.linger.ms": NEVER_MS}
        pair = [make_producer({**usual, **configuration}) for _ in range(2)]
        for producer in pair:
            # The sender takes nothing: the test does.
            producer._sender.hold_until_commit(math.inf)
            producer._directory.find([MANY, SINGLE])
            if not configuration.get("transactional.id"):
                producer.produce(SINGLE, b"the first one starts the thread")
        pair[1]._add_in_c = None
        known = [dict(producer._directory.entries) for producer in pair]
        return SimpleNamespace(in_c=pair[0], in_python=pair[1], both=pair, known=known)

    return make


def held(accumulator: Accumulator) -> Any:
    """Return all that is in the queues, but for the moments by the monotonic clock."""
    found: dict[Any, Any] = {}
    for key, queue in [*accumulator.queues.items(), *accumulator._unassigned.items()]:
        assert type(queue.places) is list
        assert len(queue.places) % PLACES == 0
        assert all(type(moment) is float for moment in queue.places[QUEUED_SECONDS::PLACES])
        records = [
            [
                (type(cell), cell)
                for place, cell in enumerate(queue.places[start : start + PLACES])
                if place != QUEUED_SECONDS
            ]
            for start in range(0, len(queue.places), PLACES)
        ]
        found[key] = (queue.topic, queue.partition, queue.size_bytes, queue.notify_at_bytes, queue.asked_for, records)
    return found, list(found), accumulator.record_count, accumulator.size_bytes


def empty(accumulator: Accumulator) -> None:
    """Let everything go, as if it had been delivered."""
    with accumulator.changed:
        take_all(accumulator)
        accumulator.record_count = accumulator.size_bytes = 0


def run(pair: Any, steps: list[Any]) -> int:
    """Take these steps with both and compare all that can be seen; return how many records C has queued."""
    begin(pair)
    for step in steps:
        in_c, in_python = (outcome(lambda number=number: take(pair, number, step)) for number in range(2))  # noqa: B023 - called at once
        assert in_c == in_python, step
        assert held(pair.in_c._accumulator) == held(pair.in_python._accumulator)
        assert pair.rung[0] == pair.rung[1]
    queued: int = pair.queued_by_c
    return queued


def begin(pair: Any) -> None:
    """Let both be as they were made."""
    pair.clocks = [ManualClock(), ManualClock()]
    pair.rung, pair.queued_by_c = [[], []], 0
    for number, producer in enumerate(pair.both):
        empty(producer._accumulator)
        producer._directory.entries.update(pair.known[number])
        producer._choice._sticky.clear()
        producer._choice._random = random.Random(5)
        producer._ticks._clock = pair.clocks[number]
        ring = SimpleNamespace(ring=lambda *at_seconds, heard=pair.rung[number]: heard.append(bool(at_seconds)))
        producer._accumulator.alarm = ring

    def count(*arguments: Any) -> bool:
        is_done: bool = pair.in_c._intake.add(*arguments)
        pair.queued_by_c += is_done
        return is_done

    pair.in_c._add_in_c = count


def take(pair: Any, number: int, step: Any) -> Any:
    """Take one step with one of both, and return what came of it."""
    producer = pair.both[number]
    accumulator, entries = producer._accumulator, producer._directory.entries
    if step == "tick":
        return pair.clocks[number].advance(3)
    if step == "forget":
        return entries.pop(SINGLE, None) and None
    if step == "learn":
        return entries.update(pair.known[number])
    if step == "take":
        with producer._changed:
            batches = accumulator.take_batches(1, 150)
            accumulator.record_count -= sum(batch.record_count for batch in batches)
            accumulator.size_bytes -= sum(batch.size_bytes for batch in batches)
        return [(batch.topic, batch.partition, batch.values, batch.sizes_bytes) for batch in batches]
    return producer.produce(**step)


bounds = pytest.mark.parametrize(
    "bounds",
    [
        {},
        {"queue.buffering.max.messages": 9},
        {"batch.num.messages": 4},
        {"batch.size": 150},
        {"partitioner": "murmur2"},
        {"partitioner": "fnv1a_random", "sticky.partitioning.linger.ms": 0},
        {"partitioner": "random"},
    ],
    ids=str,
)


@pytest.mark.slow
@on_sqlite_alone
@bounds
def test_whatever_is_produced_is_queued_or_refused_alike(make_pair, bounds):
    pair = make_pair(**{"message.max.bytes": 1000, **bounds})
    for producer in pair.both:
        producer._record_bytes_max = SIZE_MAX
    pair.in_c._intake = make_intake(
        pair.in_c._accumulator,
        pair.in_c._choice,
        pair.in_c._directory.entries,
        pair.in_c._ticks,
        {"message.max.bytes": SIZE_MAX},
    )

    @settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
    @given(steps)
    @example([{"topic": MANY, "value": b"v", "key": b"k%d" % number} for number in range(30)])
    @example([{"topic": SINGLE, "value": b"v" * 9} for number in range(60)])
    @example([{"topic": SINGLE, "value": b"a"}, "forget", {"topic": SINGLE, "value": b"b"}, "learn", *[LAST] * 2])
    def check(steps: list[Any]) -> None:
        run(pair, steps)

    check()


@on_sqlite_alone
def test_each_odd_argument_by_itself(make_pair):
    pair = make_pair()
    for topic in MANY, SINGLE:
        odd: list[dict[str, Any]] = [{"partition": partition} for partition in PARTITIONS]
        odd += [{"timestamp": timestamp} for timestamp in TIMESTAMPS]
        odd += [
            {"callback": 5},
            {"on_delivery": 5},
            {"callback": report, "on_delivery": 5},
            {"key": 5},
            {"value": "\ud800"},
        ]
        usual = {"topic": topic, "value": b"v", "key": b"k"}
        assert run(pair, [usual, *({**usual, **more} for more in odd)]) >= 5


@pytest.mark.slow_but_first
@on_sqlite_alone
@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_keys_go_where_the_partitioner_says(make_pair, partitioner):
    pair = make_pair(partitioner=partitioner)
    keys = [None, b"", "", *(b"key-%d" % number for number in range(40)), "tëxt", b"\xff" * 20] * 3
    assert run(pair, [{"topic": MANY, "value": b"v", "key": key} for key in keys]) > (
        0 if partitioner == "random" else 80
    )


@on_sqlite_alone
def test_nearly_all_records_are_queued_in_c(make_pair):
    pair = make_pair()
    assert run(pair, [{"topic": SINGLE, "value": b"v", "key": "k", "callback": report}] * 60) == 59
    # The first one of each partition makes its queue.
    assert run(pair, [{"topic": MANY, "value": "v", "partition": number % 4} for number in range(60)]) == 56
    assert run(pair, [{"topic": (MANY, SINGLE)[number % 2], "value": None} for number in range(60)]) == 58
    assert run(pair, [{"topic": SINGLE, "value": "v", "headers": [("a", "b"), ("c", None)]}] * 60) == 59


@on_sqlite_alone
def test_outside_of_a_transaction_a_record_is_refused_alike(make_pair):
    in_c, in_python = make_pair(**{"transactional.id": "a"}).both
    for producer in in_c, in_python:
        producer._accumulator.gate.stage = IN_TRANSACTION
        producer.produce(SINGLE, b"v")
    in_python._add_in_c = None
    for stage in TransactionStage:
        for producer in in_c, in_python:
            producer._accumulator.gate.stage = stage
        told = [outcome(lambda producer=producer: producer.produce(SINGLE, b"v")) for producer in (in_c, in_python)]
        assert told[0] == told[1]
        assert (told[0] is None) == (stage is IN_TRANSACTION)
        # Another thread ended it after the first look.
        assert in_c._intake.add(SINGLE, b"v", None, -1, None, 0, None) == (stage is IN_TRANSACTION)


class Surroundings:
    """What an intake works with, to be set by hand."""

    def __init__(self, *, sticky_seconds: float = 0.0, partition_count: int = 1, **more: Any) -> None:
        self.now_seconds = 100.0
        self.asked: list[float] = []
        self.lock = threading.RLock()
        self.accumulator = Accumulator(
            threading.Condition(self.lock),
            Alarm(self.lock),
            linger_seconds=5.0,
            records_max=10_000_000,
            size_bytes_max=10**12,
            batch_records_max=1_000_000,
            batch_bytes_max=10**9,
        )
        self.entries: dict[str, Any] = {
            "t": SimpleNamespace(topic=SimpleNamespace(partition_ids=tuple(range(partition_count))))
        }
        self.ticks = SimpleNamespace(next=self.next, now_ms=0, until_seconds=-math.inf)
        choice = PartitionChoice("consistent_random", sticky_seconds=sticky_seconds)
        arguments: dict[str, Any] = {
            "accumulator": self.accumulator,
            "lock": self.lock,
            "entries": self.entries,
            "ticks": self.ticks,
            "monotonic": lambda: self.now_seconds,
            "choose": choice.choose,
            "key_hash": choice.key_hash,
            "is_empty_keyless": True,
            "open_stage": IN_TRANSACTION,
            "record_bytes_max": 1000,
        }
        self.intake = bulk.core.Intake(**{**arguments, **more})
        for number in range(partition_count):
            self.accumulator.add("t", number, None, b"", None, 0, None, None, 0.0, 0, number)

    def next(self, now_seconds: float) -> int:
        self.asked.append(now_seconds)
        self.ticks.now_ms, self.ticks.until_seconds = int(now_seconds * 1000), math.floor(now_seconds * 1000 + 1) / 1000
        return int(now_seconds * 1000)

    def add(self, *changed: Any) -> bool:
        usual = ["t", b"v", b"k", -1, None, 0, None]
        return self.intake.add(*changed, *usual[len(changed) :])

    @property
    def places(self) -> list[Any]:
        return self.accumulator.queues["t", 0].places[PLACES:]


def test_the_clock_is_asked_once_in_a_millisecond_and_never_late():
    around = Surroundings()
    for now_seconds in (100.0, 100.0004, 100.0009, 100.001, 100.0011, 100.5):
        around.now_seconds = now_seconds
        assert around.add()
    assert around.asked == [100.0, 100.001, 100.5]
    assert around.places[2::PLACES] == [100_000, 100_000, 100_000, 100_001, 100_001, 100_500]
    assert around.places[QUEUED_SECONDS::PLACES] == [100.0, 100.0004, 100.0009, 100.001, 100.0011, 100.5]


def test_a_topic_that_is_read_again_has_the_partitions_that_it_has_now():
    around = Surroundings()
    assert around.add("t", b"v", b"k", 0)
    assert not around.add("t", b"v", b"k", 1)
    around.accumulator.add("t", 1, None, b"", None, 0, None, None, 0.0, 0, 1)
    around.entries["t"] = SimpleNamespace(topic=SimpleNamespace(partition_ids=(1, 2)))
    assert around.add("t", b"v", b"k", 1)
    around.entries.clear()
    assert not around.add("t", b"v", b"k", 0)


class Fails(Exception):
    """What stands for Ctrl-C and anything else that comes out of a call."""


def fail(*arguments: Any) -> Any:
    raise Fails


#: What each of them is asked for.
ATTRIBUTES = {"gate": "stage", "entry": "topic", "partition_ids": "partition_ids"}


@pytest.mark.parametrize("name", ["monotonic", "key_hash", "choose", "ticks", "lock", "gate", "entry", "partition_ids"])
def test_what_comes_out_of_a_call_leaves_everything_as_it_was(name):
    failing: Any = property(fail)
    kinds: dict[str, Any] = {name: type(name, (), {attribute: failing}) for name, attribute in ATTRIBUTES.items()}
    failing_calls: dict[str, dict[str, Any]] = {
        "monotonic": {"monotonic": fail},
        "key_hash": {"key_hash": fail},
        "choose": {"choose": fail},
        "ticks": {"ticks": SimpleNamespace(next=fail)},
        "lock": {"lock": SimpleNamespace(acquire=fail, release=fail)},
    }
    around = Surroundings(partition_count=3, **failing_calls.get(name, {}))
    if name == "gate":
        around.accumulator.gate = kinds[name]()
    elif name == "entry":
        around.entries["t"] = kinds[name]()
    elif name == "partition_ids":
        around.entries["t"] = SimpleNamespace(topic=kinds[name]())
    before: Any = held(around.accumulator)
    with pytest.raises(Fails):
        around.add("t", b"v", None if name == "choose" else b"k")
    assert held(around.accumulator) == before
    # Nobody holds the lock.
    with ThreadPoolExecutor(1) as other:
        assert other.submit(around.lock.acquire, timeout=PATIENCE_SECONDS).result()


@pytest.mark.parametrize(
    ("name", "value"),
    [("key_hash", 5.0), ("key_hash", -1), ("key_hash", 2**64), ("choose", 3), ("choose", -1), ("choose", None)],
    ids=str,
)
def test_a_choice_that_makes_no_sense_is_left_to_python(name, value):
    more: dict[str, Any] = {name: lambda *arguments: value}
    around = Surroundings(partition_count=3, **more)
    before = held(around.accumulator)
    assert not around.add("t", b"v", None if name == "choose" else b"k")
    assert held(around.accumulator) == before


def test_arguments_that_do_not_fit_make_no_intake():
    strange: list[dict[str, Any]] = [
        {"accumulator": object()},
        {"entries": []},
        {"lock": object()},
        {"record_bytes_max": "x"},
        {"more": 1},
    ]
    for more in strange:
        with pytest.raises((TypeError, AttributeError)):
            Surroundings(**more)
    with pytest.raises(TypeError, match="takes 7 arguments, not 1"):
        bulk.core.Intake.add(Surroundings().intake, "t")  # type: ignore[call-arg]


def test_a_queue_that_is_full_or_of_which_the_sender_is_to_hear_is_left_to_python():
    around = Surroundings()
    accumulator, queue = around.accumulator, around.accumulator.queues["t", 0]
    bounds = [
        # Whose bound, and by how much it is above what there is when the record of two bytes just fits.
        (accumulator, "records_max", lambda: accumulator.record_count, 1),
        (accumulator, "size_bytes_max", lambda: accumulator.size_bytes, 2),
        (queue, "notify_at_bytes", lambda: queue.size_bytes, 3),
    ]
    for place, name, there_is, room in bounds:
        usual = getattr(place, name)
        setattr(place, name, there_is() + room - 1)
        before = held(accumulator)
        assert not around.add("t", b"v", b"k")
        assert held(accumulator) == before
        setattr(place, name, there_is() + room)
        assert around.add("t", b"v", b"k")
        setattr(place, name, usual)
    accumulator._batch_places_max = len(queue.places) + PLACES
    assert not around.add("t", b"v", b"k")
    accumulator._batch_places_max += 1
    assert around.add("t", b"v", b"k")
    assert around.add("t", b"v" * 999, b"k")
    assert not around.add("t", b"v" * 1000, b"k")


def test_what_was_changed_underneath_is_left_to_python():
    around = Surroundings()
    queue = around.accumulator.queues["t", 0]
    for place, strange in [(queue, "places"), (around.accumulator, "_unassigned"), (around.accumulator, "queues")]:
        usual = getattr(place, strange)
        setattr(place, strange, ())
        assert not around.add()
        delattr(place, strange)
        assert not around.add()
        setattr(place, strange, usual)
        assert around.add()
    around.accumulator.queues["t", 0] = object()  # type: ignore[assignment]
    assert not around.add()
    del around.accumulator.gate
    assert not around.add()


def test_one_that_is_being_made_leaves_everything_to_python():
    found: list[bool] = []

    class Lock:
        @property
        def acquire(self) -> Any:
            # The newest object there is: it has no lock yet.
            (unfinished,) = [each for each in gc.get_objects() if type(each) is bulk.core.Intake and each not in others]
            found.append(unfinished.add("t", b"v", None, 0, None, 0, None))
            return print

        release = None

    around = Surroundings()
    others = [each for each in gc.get_objects() if type(each) is bulk.core.Intake]
    bulk.core.Intake(around.accumulator, Lock(), {}, None, float, None, None, False, None, 1)
    assert found == [False]


def test_what_an_intake_holds_is_collected_with_the_circle_that_it_is_part_of():
    around = Surroundings()
    around.add()
    around.accumulator.settle = around.intake.add  # type: ignore[assignment]
    around.entries["t"].intake = around
    gone = weakref.ref(around)
    del around
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_memory_and_counts_stay_as_they_are_over_many_records():
    around = Surroundings(partition_count=2, sticky_seconds=1.0)
    kept = ("t", b"value", b"key", report, None, True)

    def turn() -> None:
        for number in range(300):
            around.now_seconds += 0.0004
            around.add("t", b"value", (b"key", None, "text")[number % 3], number % 3 - 1, report, number % 5)
            around.add("t", "\ud800")
            around.add("t", 5)
            around.add("t", b"v", b"k", 7)
            around.add("t", b"x" * 1001)
        with contextlib.suppress(Fails):
            Surroundings(key_hash=fail, partition_count=2).add("t", "text", "key")
        take_all(around.accumulator)
        for number in range(2):
            around.accumulator.add("t", number, None, b"", None, 0, None, None, 0.0, 0, number)
        around.asked.clear()

    # One object that was lost for each record would be twice as much; what Python keeps for later is less.
    assert_nothing_is_kept(turn, kept, turns=20, references_max=20, bytes_max=100_000)


@on_sqlite_alone
def test_a_producer_refuses_alike_once_it_is_closed(make_pair):
    pair = make_pair()
    for producer in pair.both:
        producer._sender.stop_holding()
        producer.close()
    assert outcome(lambda: pair.in_c.produce(SINGLE, b"v")) == outcome(lambda: pair.in_python.produce(SINGLE, b"v"))
    with pytest.raises((RuntimeError, KafkaException)):
        pair.in_c.produce(SINGLE, b"v")

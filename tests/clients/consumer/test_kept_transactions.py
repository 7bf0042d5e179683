"""Transactions that `consume_transaction` cannot gather in time: they are kept, come whole and once, and are nobody's.

The buffer holds one page, and a page two batches: so a call with no time gets some records of a large transaction, and
never all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.clients.consumer.log_writer import PATIENCE_SECONDS, LogWriter, eventually, texts
from tests.clients.consumer.test_atomic import ATOMIC, PARTITIONS, STEPS, History, consumer_of
from tests.tools.campaigns import times
from txnstore import OFFSET_BEGINNING, OFFSET_STORED, Consumer, KafkaError, KafkaException, TopicPartition
from txnstore.aio import AIOConsumer
from txnstore.clients.consumer.events import CallbackEvent
from txnstore.clients.consumer.whole_transactions import ConsumedTransaction, _Gathering
from txnstore.clients.model.message import Message
from txnstore.db.opening import open_store
from txnstore.log import commit_order

ONE_PAGE = {**ATOMIC, "queued.min.messages": 1}
BATCHES = 10
LARGE = [b"%d" % number for number in range(BATCHES)] * 2


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    monkeypatch.setattr(commit_order, "PAGE_BATCHES_MAX", 2)


@pytest.fixture(scope="module")
def module_log(module_url):
    with open_store(module_url) as store:
        yield LogWriter(store)


def write_large(log: LogWriter, *, before: bytes = b"before", behind: bytes = b"behind") -> None:
    """Write a transaction of many pages in both partitions, between two records that are in none."""
    log.write("t", 0, before)
    transaction = log.transaction()
    for number in range(BATCHES):
        for partition in (0, 1):
            transaction.write("t", partition, b"%d" % number)
    transaction.end(commit=True)
    log.write("t", 1, behind)


@pytest.fixture
def large(log):
    log.topic(partition_count=2)
    write_large(log)


@pytest.fixture
def reader(make_consumer):
    """Make a consumer of both partitions, from the beginning, or from where the group has stopped."""

    def make(configuration=(), *, goes_on=False):
        consumer = make_consumer({**ONE_PAGE, **dict(configuration)})
        offset = OFFSET_STORED if goes_on else OFFSET_BEGINNING
        consumer.assign([TopicPartition("t", number, offset) for number in (0, 1)])
        return consumer

    return make


def next_of(consumer: Consumer, timeout: float = 0) -> ConsumedTransaction:
    """Return what comes next, asked for again and again with hardly any time."""
    found: list[ConsumedTransaction] = []

    def ask() -> bool:
        transaction = consumer.consume_transaction(timeout)
        found.extend([] if transaction is None else [transaction])
        return bool(found)

    eventually(ask)
    return found[0]


def kept_by(consumer: Consumer) -> list[Message]:
    return consumer._core.subscription.kept


def keep_some(consumer: Consumer, count: int = 3) -> None:
    """Let the consumer have so many records of the large transaction at least, and not have returned any."""

    def is_kept() -> bool:
        assert consumer.consume_transaction(0) is None
        return len(kept_by(consumer)) >= count

    eventually(is_kept)


def values_of(transaction: ConsumedTransaction) -> list[bytes]:
    return texts(transaction.messages)


def committed(consumer: Consumer) -> list[int]:
    partitions = [TopicPartition("t", number) for number in (0, 1)]
    return [one.offset for one in consumer.committed(partitions, PATIENCE_SECONDS)]


@pytest.mark.slow_but_first
@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("timeout", [0, 0.0005])
def test_calls_that_are_too_short_for_a_transaction_end_with_all_of_it_and_once(reader, timeout):
    consumer = reader()
    assert values_of(next_of(consumer, timeout)) == [b"before"]
    transaction = next_of(consumer, timeout)
    assert sorted(values_of(transaction)) == sorted(LARGE)
    assert transaction.producer_id is not None
    assert values_of(next_of(consumer, timeout)) == [b"behind"]
    assert consumer.consume_transaction(0) is None


@pytest.mark.slow_but_first
@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("commits", [True, False], ids=["automatic commits", "commits by the application"])
def test_what_is_kept_is_committed_by_nobody_and_comes_again_after_a_restart(reader, commits):
    automatically = {"enable.auto.commit": commits, "auto.commit.interval.ms": 5}
    consumer = reader(automatically)
    assert values_of(next_of(consumer)) == [b"before"]
    keep_some(consumer, BATCHES + 1)
    if commits:
        future = consumer._core._commit_in_background()
        assert future is None or future.result(PATIENCE_SECONDS).error is None
    else:
        consumer.commit(asynchronous=False)
    ends = committed(consumer)
    assert kept_by(consumer)
    consumer.close()
    other = reader(automatically, goes_on=True)
    assert committed(other) == ends
    assert sorted(values_of(next_of(other))) == sorted(LARGE)
    assert values_of(next_of(other)) == [b"behind"]


def seek_back(consumer: Consumer) -> None:
    for position in consumer.position([TopicPartition("t", number) for number in (0, 1)]):
        if position.offset >= 0:
            consumer.seek(position)


def pause_and_resume(consumer: Consumer) -> None:
    partitions = [TopicPartition("t", 1)]
    consumer.pause(partitions)
    assert consumer.poll(0) is None
    consumer.resume(partitions)


def read_anew(consumer: Consumer) -> None:
    """Assign what is assigned, from the places that the consumer is at."""
    partitions = consumer.position([TopicPartition("t", number) for number in (0, 1)])
    consumer.unassign()
    consumer.assign([one if one.offset >= 0 else TopicPartition("t", one.partition, 0) for one in partitions])


TOUCHES = {
    "nothing": lambda consumer: None,
    "position": lambda consumer: consumer.position(consumer.assignment()),
    "commit": lambda consumer: consumer.commit(asynchronous=False),
    "seek": seek_back,
    "pause": pause_and_resume,
    "assign": read_anew,
}


@pytest.mark.slow
@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
def test_all_other_calls_find_records_and_positions_as_if_nothing_had_been_handed_out(reader, touch):
    partitions = [TopicPartition("t", number) for number in (0, 1)]

    def positions(consumer):
        return [(one.offset, one.offset_in_transaction) for one in consumer.position(partitions)]

    consumer = reader()
    assert values_of(next_of(consumer)) == [b"before"]
    keep_some(consumer, BATCHES + 1)
    kept = kept_by(consumer)
    first = {message.partition(): message.offset() for message in reversed(kept)}
    # The transaction begins where it has its marker, at its first record.
    assert positions(consumer) == [(BATCHES + 1, first[0]), (BATCHES, first[1])]
    touch(consumer)
    messages = consumer.consume(2 * BATCHES + 1, PATIENCE_SECONDS)
    assert sorted(texts(messages[:-1])) == sorted(LARGE)
    assert messages[-1].value() == b"behind"


@pytest.mark.usefixtures("large")
def test_a_record_that_is_polled_is_the_first_one_and_the_rest_comes_behind_it(reader):
    consumer = reader()
    assert values_of(next_of(consumer)) == [b"before"]
    keep_some(consumer)
    first = kept_by(consumer)[0]
    message = consumer.poll(PATIENCE_SECONDS)
    assert (message.partition(), message.offset()) == (first.partition(), first.offset())
    rest = texts(consumer.consume(2 * BATCHES - 1, PATIENCE_SECONDS))
    assert sorted([message.value(), *rest]) == sorted(LARGE)


@pytest.mark.slow
@pytest.mark.usefixtures("large")
def test_no_more_is_kept_than_a_transaction_may_have(reader):
    consumer = reader()
    assert values_of(next_of(consumer)) == [b"before"]
    for records_max in (2 * BATCHES - 1, BATCHES):
        with pytest.raises(KafkaException) as refused:
            eventually(lambda most=records_max: consumer.consume_transaction(0, messages_max=most))
        assert refused.value.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE
        assert kept_by(consumer) == []
    keep_some(consumer, BATCHES + 1)
    # What is kept already counts.
    with pytest.raises(KafkaException):
        consumer.consume_transaction(0, messages_max=BATCHES)
    assert sorted(values_of(next_of(consumer))) == sorted(LARGE)


@pytest.mark.slow
@pytest.mark.usefixtures("large")
def test_callbacks_are_served_while_records_are_kept_and_take_them_back_only_if_they_touch_them(
    make_consumer, monkeypatch
):
    told: list[Any] = []
    consumer = make_consumer({**ONE_PAGE, "on_commit": lambda error, partitions: told.append(error)})
    consumer.assign([TopicPartition("t", number, OFFSET_BEGINNING) for number in (0, 1)])
    assert values_of(next_of(consumer)) == [b"before"]
    keep_some(consumer)
    # No more of it comes for now.
    takes = _Gathering._take
    monkeypatch.setattr(_Gathering, "_take", lambda _: False)
    for number in range(1, 4):
        kept = kept_by(consumer)
        consumer.commit(offsets=[TopicPartition("t", 0, number, offset_in_transaction=0)])
        eventually(lambda most=number: consumer.consume_transaction(0) is None and len(told) == most)
        assert kept_by(consumer) is kept
    consumer._core.inbox.put(CallbackEvent(lambda: pause_and_resume(consumer)))
    assert consumer.consume_transaction(0) is None
    assert kept_by(consumer) == []
    monkeypatch.setattr(_Gathering, "_take", takes)
    assert sorted(values_of(next_of(consumer))) == sorted(LARGE)


@pytest.mark.usefixtures("large")
def test_records_that_may_be_others_by_now_are_not_returned_however_many_are_kept(reader, monkeypatch):
    consumer = reader()
    assert values_of(next_of(consumer)) == [b"before"]
    outlet, takes = consumer._core.outlet, _Gathering._take

    def take(gathering):
        has_taken = takes(gathering)
        if len(kept_by(consumer)) == 2 * BATCHES:
            # As if the group had not answered for as long as a session is.
            outlet.lease_ends_at = -math.inf
        return has_taken

    monkeypatch.setattr(_Gathering, "_take", take)
    keep_some(consumer, 2 * BATCHES)
    for _ in range(3):
        assert consumer.consume_transaction(0.005) is None
    assert len(kept_by(consumer)) == 2 * BATCHES
    monkeypatch.setattr(_Gathering, "_take", takes)
    consumer._core.group._lease.drop()
    assert sorted(values_of(next_of(consumer))) == sorted(LARGE)


@pytest.mark.slow
@pytest.mark.usefixtures("large")
def test_what_is_kept_is_not_returned_by_a_call_that_hears_meanwhile_that_the_partitions_are_lost(reader, monkeypatch):
    """It has waited with all of a transaction for an answer of its group: it may deliver again, for it has no place."""
    consumer = reader()
    assert values_of(next_of(consumer)) == [b"before"]
    core, takes, waits = consumer._core, _Gathering._take, _Gathering._wait
    is_lost = False

    def take(gathering):
        has_taken = takes(gathering)
        if len(kept_by(consumer)) == 2 * BATCHES:
            # As if the group had not answered for as long as a session is.
            core.outlet.lease_ends_at = -math.inf
        return has_taken

    def wait(gathering, deadline):
        nonlocal is_lost
        order = core.order
        is_complete = len(kept_by(consumer)) == 2 * BATCHES and order.transaction is not order.handed_out
        if is_lost or not is_complete:
            return waits(gathering, deadline)
        is_lost = True
        core.group._lease.drop()
        core.inbox.put(CallbackEvent(consumer.unassign))
        return True

    monkeypatch.setattr(_Gathering, "_take", take)
    monkeypatch.setattr(_Gathering, "_wait", wait)

    def ask() -> bool:
        assert consumer.consume_transaction(0) is None
        return is_lost

    eventually(ask)
    assert consumer.consume_transaction(0) is None
    assert (kept_by(consumer), consumer.assignment()) == ([], [])


@pytest.mark.slow
@pytest.mark.usefixtures("large")
def test_what_a_call_gathers_behind_what_was_kept_is_not_committed_before_it_returns(reader, log):
    consumer = reader({"enable.auto.commit": True, "auto.commit.interval.ms": 5})
    assert values_of(next_of(consumer)) == [b"before"]
    keep_some(consumer)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(consumer.consume, 2 * BATCHES + 2, PATIENCE_SECONDS)
        behind = TopicPartition("t", 1)
        eventually(lambda: consumer.position([behind])[0].offset == BATCHES + 2)
        future = consumer._core._commit_in_background()
        assert future is None or future.result(PATIENCE_SECONDS).error is None
        assert max(committed(consumer)) <= BATCHES + 1
        assert [one.offset_in_transaction or 0 for one in consumer.committed([behind], PATIENCE_SECONDS)] == [0]
        log.write("t", 0, b"last")
        assert sorted(texts(call.result(PATIENCE_SECONDS))) == sorted([*LARGE, b"behind", b"last"])


@pytest.mark.usefixtures("large")
def test_a_call_ends_that_waits_while_the_consumer_is_closed_and_what_it_has_kept_comes_again(reader, monkeypatch):
    consumer, takes = reader({"enable.auto.commit": True}), _Gathering._take
    assert values_of(next_of(consumer)) == [b"before"]
    monkeypatch.setattr(_Gathering, "_take", lambda self: len(self._subscription.kept) < 3 and takes(self))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(consumer.consume_transaction, 3 * PATIENCE_SECONDS)
        eventually(lambda: len(kept_by(consumer)) == 3)
        consumer.close()
        with pytest.raises(RuntimeError, match="closed"):
            call.result(PATIENCE_SECONDS)
    monkeypatch.setattr(_Gathering, "_take", takes)
    assert sorted(values_of(next_of(reader(goes_on=True)))) == sorted(LARGE)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_members_of_a_group_that_come_and_go_lose_nothing_and_have_nothing_twice(log, make_consumer, strategy):
    log.topic(partition_count=2)
    write_large(log)
    seen: list[tuple[int, int]] = []

    def member():
        automatically = {"enable.auto.commit": True, "auto.commit.interval.ms": 5}
        consumer = make_consumer({**ONE_PAGE, **automatically, "partition.assignment.strategy": strategy})
        consumer.subscribe(["t"])
        return consumer

    def take(consumer):
        transaction = consumer.consume_transaction(0)
        if transaction is not None:
            seen.extend((message.partition(), message.offset()) for message in transaction.messages)

    first = member()
    eventually(lambda: take(first) or kept_by(first))
    second = member()
    eventually(lambda: take(first) or take(second) or len(first.assignment()) == len(second.assignment()) == 1)
    eventually(lambda: take(first) or take(second) or kept_by(second) or len(seen) > BATCHES)
    second.close()
    eventually(lambda: take(first) or len(seen) >= 2 * BATCHES + 2)
    places = [(0, number) for number in range(BATCHES + 1)]
    places += [(1, number) for number in range(BATCHES + 2) if number != BATCHES]
    assert sorted(seen) == places


@pytest.mark.slow
@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("timeout", [0, PATIENCE_SECONDS], ids=["short", "long"])
def test_calls_of_several_threads_return_each_transaction_whole_and_once(reader, log, timeout):
    for number in range(3):
        write_large(log, before=b"before %d" % number, behind=b"behind %d" % number)
    consumer = reader()
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: next_of(consumer, timeout), range(4 * 3)))
    assert consumer.consume_transaction(0) is None
    plain = sorted(value for one in found if one.producer_id is None for value in values_of(one))
    assert plain == sorted(name + behind for name in (b"before", b"behind") for behind in (b"", b" 0", b" 1", b" 2"))
    assert [sorted(values_of(one)) for one in found if one.producer_id is not None] == [sorted(LARGE)] * 4


@pytest.mark.usefixtures("large")
def test_a_consumer_of_asyncio_lets_other_calls_in_between_and_goes_on(url):
    async def scenario():
        configuration = {**ONE_PAGE, "bootstrap.servers": url, "group.id": "readers"}
        async with AIOConsumer(configuration) as consumer:
            await consumer.assign([TopicPartition("t", number, OFFSET_BEGINNING) for number in (0, 1)])
            found = []
            for _ in range(100_000):
                transaction = await consumer.consume_transaction(0)
                found += [] if transaction is None else [transaction]
                if len(found) == 3:
                    break
                await consumer.position([TopicPartition("t", 0)])
            return [sorted(values_of(transaction)) for transaction in found]

    assert asyncio.run(scenario()) == [[b"before"], sorted(LARGE), [b"behind"]]


class Calls:
    """What an application calls on one consumer after the other, and the records that it has got."""

    def __init__(self, url: str, history: History, *, commits: bool) -> None:
        self._make = partial(
            consumer_of,
            url,
            history,
            {"queued.min.messages": 1, "enable.auto.commit": commits, "auto.commit.interval.ms": 5},
        )
        self._commits = commits
        self._partitions = [TopicPartition(history.name, number) for number in range(PARTITIONS)]
        self._consumer = self._make()
        self.seen: list[tuple[int, int]] = []

    def whole(self, timeout: float = 0) -> None:
        transaction = self._consumer.consume_transaction(timeout)
        self._add([] if transaction is None else transaction.messages)

    def wait(self) -> None:
        before = len(self.seen)
        self.whole(PATIENCE_SECONDS)
        assert len(self.seen) > before

    def consume(self) -> None:
        self._add(self._consumer.consume(2, 0))

    def poll(self) -> None:
        message = self._consumer.poll(0)
        self._add([] if message is None else [message])

    def commit(self) -> None:
        if not self._commits:
            self._consumer.commit()

    def seek(self) -> None:
        for position in self._consumer.position(self._partitions):
            if position.offset >= 0:
                self._consumer.seek(position)

    def pause(self) -> None:
        self._consumer.pause(self._partitions[:1])
        self._consumer.resume(self._partitions[:1])

    def restart(self) -> None:
        self.end()
        self._consumer = self._make()

    def end(self) -> None:
        """Commit what was returned, and nothing else, and close the consumer."""
        if not self._commits:
            with contextlib.suppress(KafkaException):
                self._consumer.commit(asynchronous=False)
        self._consumer.close()

    def _add(self, messages: list[Message]) -> None:
        self.seen += [(message.partition() or 0, message.offset() or 0) for message in messages]


CALLS = st.sampled_from(["whole", "whole", "whole", "consume", "poll", "commit", "seek", "pause", "restart"])


@pytest.mark.slow
@pytest.mark.campaign
@settings(max_examples=times(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STEPS, max_size=30), st.lists(CALLS, min_size=1, max_size=8), st.booleans())
def test_whatever_is_called_in_between_everything_comes_in_order_and_once(
    module_url, module_log, steps, calls, commits
):
    history = History(module_log)
    history.run(steps)
    application = Calls(module_url, history, commits=commits)
    try:
        for call in itertools.cycle([*calls, "wait"]):
            if len(application.seen) >= history.count:
                break
            getattr(application, call)()
    finally:
        application.end()
    history.check(application.seen)

"""Ctrl-C at every moment of a call whose consumer gets transactions whole: they are so afterwards, and come once.

Most of it goes without thread and database, so that each moment is the same in every run.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.clients.consumer.log_writer import PATIENCE_SECONDS
from tests.clients.consumer.test_atomic import ATOMIC
from tests.clients.consumer.test_atomic_order import POSITIONS, Log, Reader, check
from tests.clients.consumer.test_interrupted_reading import FILES, is_left_alone
from tests.clients.moments import attempt, every_interrupt, every_two_interrupts
from tests.databases import on_sqlite_alone
from txnstore import OFFSET_BEGINNING, TopicPartition
from txnstore.clients.consumer.assigned_partition import AssignedPartition
from txnstore.clients.consumer.core import ConsumerCore
from txnstore.clients.consumer.opening import Chunk
from txnstore.clients.consumer.whole_transactions import next_transaction
from txnstore.clients.model.message import Message, RecordSource, message_of
from txnstore.deadline import Deadline

Places = list[tuple[int, int]]
"""Partitions and offsets of records."""


def is_no_moment(frame, event):
    # One that is closed before its end raises nothing.
    return is_left_alone(frame, event) or frame.f_code.co_name == "<genexpr>"


class Core(SimpleNamespace):
    """What a call finds of its consumer, without threads; what it does once it is interrupted is the consumer's own."""

    gathered, let_go = ConsumerCore.gathered, ConsumerCore.let_go
    give_back, _give_back = ConsumerCore.give_back, ConsumerCore._give_back
    _put_back = ConsumerCore._put_back


class Application:
    """A program that reads with several calls, and goes on after Ctrl-C; it has no time to wait."""

    def __init__(self, log: Log, positions: dict[int, int] | None = None) -> None:
        self.log = log
        self.reader = Reader(log, dict.fromkeys(range(log.partition_count), 0) if positions is None else positions)
        #: What came at once, each with the number of the commit that it was said to be of.
        self.found: list[tuple[int | None, Places]] = []
        self.subscription = subscription = self.reader.subscription
        self._core: Any = Core(
            order=self.reader.order,
            subscription=subscription,
            arrived=threading.Condition(),
            group=SimpleNamespace(may_deliver=True),
            inbox=SimpleNamespace(events=()),
            look_for_database=lambda: None,
            polled=lambda goes_on: None,
            read_on=lambda: None,
            withholds_what_was_read=False,
        )

    def find(self, number: int) -> AssignedPartition:
        partition = self.subscription.find("t", number)
        assert partition is not None
        return partition

    def read(self, batches_max: int = 100) -> None:
        self.reader.resolve()
        self.reader.read(batches_max)

    def take_whole(self) -> bool:
        found = next_transaction(self._core, lambda: None, lambda: None, Deadline(0), 1000)
        if found is not None:
            self._note(found.messages, found.producer_id)
        return found is not None

    def poll(self) -> bool:
        messages: list[Any] = []
        try:
            message = self.subscription.next_message()
            messages += [] if message is None else [message]
        except BaseException:
            self._core.give_back(messages)
            raise
        self._note(messages, None)
        return bool(messages)

    def consume(self) -> bool:
        messages: list[Any] = []
        try:
            self.subscription.take(messages, 3)
        except BaseException:
            self._core.give_back(messages)
            raise
        for message in messages:
            self._note([message], None)
        return bool(messages)

    def _note(self, messages: list[Any], number: int | None) -> None:
        if messages:
            self.found.append((number, [(message.partition(), message.offset()) for message in messages]))

    def finish(self) -> None:
        """Take all that there is, transaction by transaction."""
        while self.take_whole() or self.wants():
            pass

    def wants(self) -> bool:
        self.reader.resolve()
        positions = self.reader.wanted()
        self.reader.read(100, positions)
        return bool(positions)

    def seen(self) -> Places:
        return [place for _, places in self.found for place in places]


def of_two_partitions() -> Log:
    """A transaction, one of two batches in either partition, a batch in none, and one more transaction."""
    log = Log(2)
    log.commit({0: [1]})
    log.commit({0: [2, 1], 1: [1, 2]})
    write_plain(log, 1, 2)
    log.commit({1: [1], 0: [1]})
    return log


def write_plain(log: Log, number: int, size: int) -> None:
    """Write one batch that is in no transaction."""
    log.count += 1
    first, log.ends[number] = log.ends[number], log.ends[number] + size
    log.batches[number].append((first, first, first + size - 1, log.count, False))
    log.unit_of.update({(number, offset): log.count for offset in range(first, first + size)})
    log.plain_ones.add(log.count)


def places_of(log: Log, unit: int) -> Places:
    return sorted(place for place, number in log.unit_of.items() if number == unit)


def check_found(log: Log, found: list[tuple[int | None, Places]], *, whole_from: int) -> None:
    """All came in order and once, and what came at once is what it was said to be, from one on also whole."""
    check(log, [place for _, places in found for place in places], were_paused=False)
    for index, (number, places) in enumerate(found[whole_from:]):
        units = {log.unit_of[place] for place in places}
        assert len(units) == 1
        unit = units.pop()
        if unit in log.plain_ones:
            assert (number, len(places)) == (None, 1)
        else:
            assert number == unit
            assert index == 0 < whole_from or sorted(places) == places_of(log, unit)


CALLS: dict[str, Callable[[Application], bool]] = {
    "consume_transaction": Application.take_whole,
    "poll": Application.poll,
    "consume": Application.consume,
}


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("aborted", ["nothing", "at the end", "in between"])
@pytest.mark.parametrize("interrupted", CALLS)
def test_after_an_interrupt_each_transaction_comes_whole_with_its_producer(interrupted, aborted, restarts):
    for _, interrupt in every_interrupt(FILES, is_no_moment):
        log = Log(2) if aborted == "in between" else of_two_partitions()
        if aborted == "in between":
            log.commit({0: [1]})
        application = Application(log)
        application.read()
        if aborted != "nothing":
            # It is stepped over once what was read before is handed out.
            log.ends = [end + 3 for end in log.ends]
            application.read()
        if aborted == "in between":
            log.commit({0: [2, 1], 1: [1, 2]})
            write_plain(log, 0, 2)
            application.read()
        assert application.take_whole()
        attempt(interrupt, partial(CALLS[interrupted], application))
        whole_from = len(application.found)
        if restarts:
            application.reader.check_stored()
            found, application = application.found, Application(log, application.reader.positions())
            application.found = found
        application.finish()
        check_found(log, application.found, whole_from=1 if interrupted == "consume_transaction" else whole_from)
    assert interrupt.where is None


@pytest.mark.slow_but_first
@pytest.mark.parametrize("interrupted", ["poll", "consume", "seek", "pause", "resume", "add", "remove"])
def test_what_is_kept_comes_whole_and_once_after_an_interrupt_of_a_call_that_gives_it_back(interrupted):
    def touch(application):
        subscription = application.subscription
        if interrupted in {"poll", "consume"}:
            CALLS[interrupted](application)
        elif interrupted == "add":
            subscription.add("t", 2, 0)
        elif interrupted == "remove":
            subscription.remove("t", 2)
        elif interrupted == "seek":
            subscription.seek(subscription.find("t", 2), 0)
        else:
            getattr(subscription, interrupted)(subscription.find("t", 2))

    for _, interrupt in every_interrupt(FILES, is_no_moment):
        log = Log(3)
        log.commit({0: [1]})
        log.commit({0: [1, 1, 1], 1: [1, 1, 1]})
        application = Application(log, dict.fromkeys((0, 1) if interrupted == "add" else (0, 1, 2), 0))
        application.reader.resolve()
        for position, batches_max in zip(application.subscription.to_read(0.0), (2, 1, 1), strict=False):
            application.reader.read(batches_max, [position])
        assert application.take_whole()
        assert not application.take_whole()
        assert application.subscription.kept
        attempt(interrupt, partial(touch, application))
        if application.subscription.find("t", 2) is None:
            application.subscription.add("t", 2, 0)
        application.subscription.resume(application.find(2))
        whole_from = len(application.found)
        application.finish()
        check_found(log, application.found, whole_from=whole_from)


def test_records_of_a_batch_in_no_transaction_are_none_of_one_that_comes_in_between():
    log = Log(2)
    log.commit({0: [1]})
    write_plain(log, 1, 3)
    application = Application(log)
    application.read()
    assert application.take_whole()
    assert application.take_whole()
    application.subscription.seek(application.find(0), 0)
    application.finish()
    assert application.found == [
        (1, [(0, 0)]),
        (None, [(1, 0)]),
        (1, [(0, 0)]),
        (None, [(1, 1)]),
        (None, [(1, 2)]),
    ]


@pytest.mark.parametrize("does", ["seek", "pause", "resume", "add"])
def test_a_decision_that_is_interrupted_is_made_before_anything_is_handed_out(does):
    """Nothing else would: the call that was interrupted reads nothing."""
    for _, interrupt in every_interrupt(FILES, is_no_moment):
        log = Log(3)
        log.commit({0: [1], 1: [2]})
        application = Application(log, {0: 0, 1: 0})
        application.read()
        subscription = application.subscription
        second = application.find(1)
        if does == "resume":
            subscription.pause(second)
        touches = {
            "seek": partial(subscription.seek, second, 0),
            "pause": partial(subscription.pause, second),
            "resume": partial(subscription.resume, second),
            "add": partial(subscription.add, "t", 2, 0),
        }
        attempt(interrupt, touches[does])
        subscription.resume(second)
        application.finish()
        check_found(log, application.found, whole_from=0)


@pytest.mark.slow
@on_sqlite_alone  # No moment of the database is tried.
@pytest.mark.parametrize(
    ("interrupted", "commits"),
    [
        ("consume_transaction", False),
        pytest.param("consume_transaction", True, marks=pytest.mark.slow),
        pytest.param("poll", True, marks=pytest.mark.slow),
        pytest.param("consume", True, marks=pytest.mark.slow),
    ],
)
def test_a_consumer_gets_transactions_over_two_partitions_whole_after_an_interrupt(
    log, make_consumer, interrupted, commits
):
    log.topic(partition_count=2)
    values = {0: [b"a0"], 1: [b"b0", b"b1", b"b2", b"b3"], 2: [b"c0", b"c1"]}
    for transaction_values in values.values():
        writer = log.transaction()
        for place, value in enumerate(transaction_values):
            writer.write("t", 2 * place // len(transaction_values), value)
        writer.end(commit=True)
        aborted = log.transaction()
        aborted.write("t", 1, b"aborted")
        aborted.end(commit=False)
    consumer = make_consumer(ATOMIC)
    beginnings = [TopicPartition("t", number, OFFSET_BEGINNING) for number in (0, 1)]

    def next_whole():
        transaction = consumer.consume_transaction(PATIENCE_SECONDS)
        return [message.value() for message in transaction.messages]

    calls = {
        "consume_transaction": next_whole,
        "poll": lambda: [consumer.poll(PATIENCE_SECONDS).value()],
        "consume": lambda: [message.value() for message in consumer.consume(3, PATIENCE_SECONDS)],
    }
    for _, interrupt in every_interrupt(FILES, is_no_moment):
        consumer.assign(beginnings)
        found = [next_whole()]
        attempt(interrupt, lambda: found.append(calls[interrupted]()))  # noqa: B023 - called at once
        while sum(map(len, found)) < 7:
            if commits:
                consumer.commit(asynchronous=False)
            found.append(next_whole())
        came = [value for piece in found for value in piece]
        assert [value[:1] for value in came] == [b"a", *[b"b"] * 4, *[b"c"] * 2], interrupt.where
        assert sorted(came) == sorted(itertools.chain(*values.values())), interrupt.where
        if interrupted == "consume_transaction":
            assert [sorted(piece) for piece in found] == list(values.values()), interrupt.where
    # Something was interrupted.
    assert interrupt.where is None


#: Whose moments are tried in pairs: what lies below, and decides who is next, is tried as one.
GOING_BACK = {
    "consumer/core.py",
    "consumer/subscription.py",
    "consumer/whole_transactions.py",
    "txnstore/deadline.py",
}


def is_no_second_moment(frame, event):
    # As what was gathered is about to be given back, nobody else knows of it.
    return is_no_moment(frame, event) or (event == "call" and frame.f_code is ConsumerCore.give_back.__code__)


@pytest.mark.slow
@pytest.mark.parametrize(
    "interrupted",
    ["poll", *(pytest.param(call, marks=pytest.mark.slow) for call in ("consume", "consume_transaction"))],
)
def test_two_interrupts_take_no_record_with_them(interrupted):
    """The second one comes while that is put in order which the first one has left."""
    for moments in every_two_interrupts(GOING_BACK, is_no_second_moment):
        log = Log(2)
        log.commit({0: [1]})
        log.commit({0: [2], 1: [1]})
        write_plain(log, 1, 2)
        application = Application(log)
        application.read()
        assert application.take_whole()
        attempt(moments, partial(CALLS[interrupted], application))
        check_stored(application)
        application.finish()
        check(log, application.seen(), were_paused=False)
    assert moments.first is None


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", ["poll", "consume"])
def test_an_interrupt_while_messages_are_made_in_python_takes_none_with_it(interrupted):
    """The row is taken by then, and in no list; the second one comes while it is given back."""
    for moments in every_two_interrupts(GOING_BACK | {"model/message.py"}, is_no_second_moment):
        log = Log(1)
        write_plain(log, 0, 3)
        write_plain(log, 0, 2)
        application = Application(log)
        application.read()
        for partition in application.subscription:
            for chunk in partition.waiting:
                assert isinstance(chunk, Chunk)
                chunk.open = partial(made_one_by_one, chunk.source, chunk.first_offset, chunk.last_offset)
        attempt(moments, partial(CALLS[interrupted], application))
        check_stored(application)
        application.finish()
        check(log, application.seen(), were_paused=False)
    assert moments.first is None


def check_stored(application: Application) -> None:
    """Nothing is stored that the application has not got: a commit by now would skip it."""
    seen = set(application.seen())
    for partition in application.subscription:
        for place, first, last, _, is_within in application.log.batches[partition.number]:
            for offset in range(first, last + 1):
                position = POSITIONS.at(place, offset) if is_within else POSITIONS.at(offset)
                assert position >= partition.stored or (partition.number, offset) in seen


def made_one_by_one(source: RecordSource | None, first: int, last: int) -> Iterator[Message]:
    rows = ((offset, 1000, None, b"", ()) for offset in range(first, last + 1))
    assert source is not None
    return map(message_of, itertools.repeat(source), rows)

"""What waits for the next poll, and what is done from time to time: in order, and not too often."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from functools import partial

import pytest

from tests.clients.moments import attempt, every_interrupt, is_no_moment_for_signals
from tests.clients.steps import PATIENCE_SECONDS
from txnstore import Consumer, DeserializingConsumer, TopicPartition
from txnstore.clients import callbacks
from txnstore.clients.callbacks import EventQueue, trouble_of
from txnstore.clients.consumer.events import (
    MESSAGE_INTERVAL_SECONDS,
    CallbackEvent,
    CommitEvent,
    MessageEvent,
    error_reporter,
)
from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.clients.model.message import error_message
from txnstore.clients.worker import Duties
from txnstore.deadline import Condition, to_its_end
from txnstore.trouble import RepeatedTrouble

AWAY = KafkaError(KafkaError._TRANSPORT, "away", retriable=True)


@pytest.fixture
def now(monkeypatch):
    """The time, to be moved by hand."""

    class Now:
        seconds = 1_000.0

        def monotonic(self):
            return self.seconds

    now = Now()
    monkeypatch.setattr(callbacks, "RepeatedTrouble", partial(RepeatedTrouble, monotonic_seconds=now.monotonic))
    return now


def inbox_of():
    return EventQueue(threading.Condition())


def reporter_of(inbox, callback, *, is_alone=False):
    return error_reporter(inbox, callback, logging.getLogger("test"), lambda: is_alone)


def test_events_come_in_their_order(now):
    inbox = inbox_of()
    events = [CommitEvent(None, []), CallbackEvent(print), MessageEvent(error_message(AWAY))]
    for event in events:
        inbox.put(event)
    assert [inbox.pop() for _ in range(4)] == [*events, None]


class Interrupted(Condition):
    """Ctrl-C comes as its lock is taken for the second time, and at each time from then on."""

    def __init__(self):
        super().__init__()
        self.taken_count = 0

    def __enter__(self):
        self.taken_count += 1
        if self.taken_count >= 2:
            raise KeyboardInterrupt
        return self._enter()

    def __exit__(self, *error):
        return self._exit(*error)


def fail(taken):
    raise KeyboardInterrupt


def test_what_fails_stays_first_however_often_it_is_interrupted():
    inbox: EventQueue[str] = EventQueue(Interrupted())
    inbox.events += ("first", "second")
    with pytest.raises(KeyboardInterrupt):
        inbox.serve_first(fail)
    assert list(inbox.events) == ["first", "second"]


def told_of(messages):
    return [(it.topic(), it.partition(), None if it.error() is None else it.error().code()) for it in messages]


def test_ends_and_errors_that_did_not_reach_the_application_come_again(log, make_consumer, monkeypatch):
    log.topic(partition_count=2)
    log.write("t", 0, b"record")
    consumer = make_consumer({"enable.partition.eof": True, "fetch.wait.max.ms": 10})
    consumer.assign([TopicPartition(name, number, 0) for name, number in (("t", 0), ("t", 1), ("missing", 0))])
    core = consumer._core
    core.report_background_error(KafkaException(KafkaError(KafkaError._FAIL, "of no partition")))
    expected = {
        (None, None, KafkaError._FAIL),
        ("t", 0, None),
        ("t", 0, KafkaError._PARTITION_EOF),
        ("t", 1, KafkaError._PARTITION_EOF),
        ("missing", 0, KafkaError.UNKNOWN_TOPIC_OR_PART),
    }
    gathered, seen = core.gathered, []

    def interrupted(messages):
        monkeypatch.setattr(core, "gathered", gathered)
        seen.append(told_of(messages))
        raise KeyboardInterrupt

    for _ in range(3):
        monkeypatch.setattr(core, "gathered", interrupted)
        with pytest.raises(KeyboardInterrupt):
            consumer.consume(len(expected), PATIENCE_SECONDS)
    seen.append(told_of(consumer.consume(len(expected), PATIENCE_SECONDS)))
    for each in seen:
        assert len(each) == len(expected)
        assert set(each) == expected
        # Not before what comes before it.
        assert each.index(("t", 0, None)) < each.index(("t", 0, KafkaError._PARTITION_EOF))
    assert consumer.consume(1, 0) == []


def test_ends_and_errors_that_are_given_back_one_by_one_come_again(log, make_consumer):
    """As by a `poll()` whose answer an interrupt has taken."""
    log.topic()
    consumer = make_consumer({"enable.partition.eof": True, "fetch.wait.max.ms": 10})
    consumer.assign([TopicPartition("t", 0, 0), TopicPartition("missing", 0, 0)])
    consumer._core.report_background_error(KafkaException(KafkaError(KafkaError._FAIL, "of no partition")))
    seen: list[tuple[object, ...]] = []
    for _ in range(3):
        message = consumer.poll(PATIENCE_SECONDS)
        for _ in range(2):
            # An interrupt may come in the middle of it, and then it is done once more.
            consumer._core.give_back([message])
        assert consumer.poll(PATIENCE_SECONDS) is message
        seen += told_of([message])
    assert set(seen) == {
        (None, None, KafkaError._FAIL),
        ("t", 0, KafkaError._PARTITION_EOF),
        ("missing", 0, KafkaError.UNKNOWN_TOPIC_OR_PART),
    }
    assert consumer.poll(0) is None


def test_the_end_of_a_partition_that_goes_on_is_not_told_late(log, make_consumer):
    log.topic()
    consumer = make_consumer({"enable.partition.eof": True, "fetch.wait.max.ms": 10})
    consumer.assign([TopicPartition("t", 0, 0)])
    end = consumer.poll(PATIENCE_SECONDS)
    log.write("t", 0, b"one", b"two")
    assert consumer.poll(PATIENCE_SECONDS).value() == b"one"
    consumer._core.give_back([end])
    assert consumer.poll(PATIENCE_SECONDS).value() == b"two"
    assert consumer.poll(PATIENCE_SECONDS).offset() == 2
    # Nor after the application has sought.
    consumer.seek(TopicPartition("t", 0, 0))
    consumer._core.give_back([end])
    assert consumer.poll(PATIENCE_SECONDS).value() == b"one"


@pytest.mark.parametrize("kind", ["commit", "callback"])
def test_an_event_is_told_once_wherever_that_is_interrupted(url, kind):
    told: list[str] = []
    with Consumer({"bootstrap.servers": url, "group.id": "g", "on_commit": lambda *_: told.append(kind)}) as consumer:
        for _, moment in every_interrupt({"consumer/consumer.py", "clients/callbacks.py"}, is_no_moment_for_signals):
            told.clear()
            consumer._core.inbox.put(
                CommitEvent(None, []) if kind == "commit" else CallbackEvent(lambda: told.append(kind))
            )
            attempt(moment, consumer._serve_one)
            consumer._serve_one()
            assert told == [kind], moment.where
            assert not consumer._core.inbox.events


def test_a_callback_that_raises_as_the_consumer_closes_keeps_no_other_from_its_call(log, make_consumer):
    log.topic()
    log.write("t", 0, b"a")
    told: list[str] = []

    def fails(name):
        def callback(*_):
            told.append(name)
            raise ValueError(name)

        return callback

    consumer = make_consumer({"on_commit": fails("commit")}, kind=Closing)
    consumer.subscribe(["t"], on_revoke=fails("revoke"))
    assert consumer.poll(PATIENCE_SECONDS).value() == b"a"
    for _ in range(2):
        consumer._core.inbox.put(CommitEvent(None, []))
    with pytest.raises(ValueError, match="commit"):
        consumer.close()
    # The last one is that of what was read, as it is given back.
    assert told == ["commit", "commit", "revoke", "commit"]
    assert consumer.converter.is_closed
    consumer.close()


class Closing(DeserializingConsumer):
    """Owns a deserializer."""

    class Converter:
        """Leaves values as they are."""

        is_closed = False

        def __call__(self, value, context):
            return value

        def close(self):
            self.is_closed = True

    def __init__(self, configuration):
        super().__init__(configuration)
        self.converter = self.Converter()
        self._owned_deserializers.append(self.converter)


def test_closing_tells_of_each_commit_once_wherever_that_is_interrupted(url):
    told: list[int] = []

    def on_commit(error, partitions):
        told.append(partitions[0].offset)

    for _, moment in every_interrupt({"consumer/consumer.py", "clients/callbacks.py"}, is_telling_at_the_end):
        told.clear()
        consumer = Consumer({"bootstrap.servers": url, "group.id": "g", "on_commit": on_commit})
        for offset in (1, 2):
            consumer._core.inbox.put(CommitEvent(None, [TopicPartition("t", 0, offset)]))
        attempt(moment, consumer.close)
        assert told == [1, 2], moment.where


def is_telling_at_the_end(frame, event):
    """Leave alone what is no moment, and what closes the consumer between telling and telling again."""
    return is_no_moment_for_signals(frame, event) or frame.f_code.co_name not in {"pop", "serve_first", "_committed"}


def test_work_that_is_done_to_its_end_raises_what_interrupted_it_first():
    interrupts = [KeyboardInterrupt(number) for number in range(2 * sys.getrecursionlimit())]
    first, left = interrupts[0], iter(interrupts)

    def work():
        for interrupt in left:
            raise interrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        to_its_end(work)
    assert caught.value is first
    assert next(left, None) is None


@pytest.mark.parametrize("interrupted", ["finish_work", "close"])
def test_closing_tells_of_a_commit_that_ends_though_waiting_for_it_is_interrupted(url, monkeypatch, interrupted):
    told: list[int] = []
    consumer = Consumer({"bootstrap.servers": url, "group.id": "g", "on_commit": lambda *_: told.append(1)})
    core = consumer._core
    does = getattr(core, interrupted)

    def interrupt(deadline):
        monkeypatch.undo()
        does(deadline)
        core.inbox.put(CommitEvent(None, []))
        raise KeyboardInterrupt

    monkeypatch.setattr(core, interrupted, interrupt)
    with pytest.raises(KeyboardInterrupt):
        consumer.close()
    assert told == [1]


def test_closing_ends_though_each_commit_that_it_tells_of_makes_another_one(url):
    told: list[object] = []

    def commit_again(error, _):
        told.append(error)
        if len(told) < 100:
            with contextlib.suppress(RuntimeError):  # "Consumer closed"
                consumer.commit()

    consumer = Consumer({"bootstrap.servers": url, "group.id": "g", "on_commit": commit_again})
    consumer.commit()
    consumer.close()
    assert 0 < len(told) < 100


def test_whoever_waits_hears_of_an_event_that_another_thread_could_not_serve():
    changed = Condition()
    inbox: EventQueue[str] = EventQueue(changed)
    inbox.put("event")
    waits = threading.Event()
    heard = []

    def wait():
        with changed:
            waits.set()
            heard.append(changed.wait(PATIENCE_SECONDS))

    waiter = threading.Thread(target=wait)

    def serve(taken):
        waiter.start()
        assert waits.wait(PATIENCE_SECONDS)
        # Not before it waits: until then it has the lock.
        with changed:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inbox.serve_first(serve)
    waiter.join()
    assert heard == [True]


def test_an_error_that_comes_again_and_again_is_said_once_a_second(now):
    inbox = inbox_of()
    told: list[KafkaError] = []
    reporter = reporter_of(inbox, told.append)
    for _ in range(100):
        reporter.report(AWAY)
        now.seconds += 0.05
    assert len(inbox.events) == 5
    reporter.report(KafkaError(KafkaError._TIMED_OUT))
    assert len(inbox.events) == 6
    assert not told
    while event := inbox.pop():
        event.call()
    assert [error.code() for error in told] == [KafkaError._TRANSPORT] * 5 + [KafkaError._TIMED_OUT]


def test_an_error_that_stays_is_not_hidden_by_another_one_of_its_code(now):
    returned = RepeatedTrouble(MESSAGE_INTERVAL_SECONDS, monotonic_seconds=now.monotonic)
    lasting = [KafkaError(KafkaError._INVALID_ARG, text) for text in ("a setting", "a copy")]
    assert [returned.may_be_told(trouble_of(error)) for error in lasting * 2] == [True, True, False, False]
    now.seconds += MESSAGE_INTERVAL_SECONDS
    assert returned.may_be_told(trouble_of(lasting[1]))
    passing = [KafkaError(KafkaError._TRANSPORT, f"away for {seconds} s", retriable=True) for seconds in range(2)]
    assert [returned.may_be_told(trouble_of(error)) for error in passing] == [True, False]


def test_a_message_that_is_no_record_comes_once_in_a_while(now):
    returned = RepeatedTrouble(MESSAGE_INTERVAL_SECONDS, monotonic_seconds=now.monotonic)
    told = 0
    for _ in range(100):
        told += returned.may_be_told(trouble_of(AWAY))
        now.seconds += 0.5
    assert told == 2


def test_without_a_callback_errors_are_logged(now, caplog):
    inbox = inbox_of()
    reporter = reporter_of(inbox, None)
    reporter.report(AWAY)
    reporter.report(AWAY)
    assert not inbox.events
    assert [record.getMessage() for record in caplog.records if record.name == "test"] == ["_TRANSPORT: away"]


def test_where_one_database_is_all_there_is_all_are_down(now, caplog):
    reporter_of(inbox_of(), None, is_alone=True).report(AWAY)
    texts = [record.getMessage() for record in caplog.records if record.name == "test"]
    assert texts == ["_TRANSPORT: away", "_ALL_BROKERS_DOWN: 1/1 brokers are down: away"]


def test_duties_are_done_when_their_time_comes_and_not_made_up_for():
    seconds = 0.0
    done = []
    duties = Duties(lambda: seconds)
    assert duties.run_due() == float("inf")
    duties.add(1.0, lambda: done.append("often"))
    duties.add(10.0, lambda: done.append("rarely"))
    assert (duties.run_due(), done) == (1.0, [])
    seconds = 1.0
    assert (duties.run_due(), done) == (1.0, ["often"])
    seconds = 10.5
    assert (duties.run_due(), done) == (1.0, ["often", "often", "rarely"])


def test_a_duty_may_be_done_sooner_for_the_first_time():
    seconds = 0.0
    done = []
    duties = Duties(lambda: seconds)
    duties.add(10.0, lambda: done.append("rarely"), first_seconds=2.0)
    assert (duties.run_due(), done) == (2.0, [])
    seconds = 2.0
    assert (duties.run_due(), done) == (10.0, ["rarely"])


def test_a_duty_that_is_not_wanted_is_not_done_and_wakes_nobody():
    seconds, is_wanted = 0.0, False
    done = []
    duties = Duties(lambda: seconds)
    duties.add(1.0, lambda: done.append("help"), lambda: is_wanted)
    assert (duties.run_due(), done) == (float("inf"), [])
    seconds = 5.0
    assert (duties.run_due(), done) == (float("inf"), [])
    is_wanted = True
    assert (duties.run_due(), done) == (1.0, ["help"])
    seconds = 5.5
    assert (duties.run_due(), done) == (0.5, ["help"])
    is_wanted = False
    seconds = 6.0
    assert (duties.run_due(), done) == (float("inf"), ["help"])

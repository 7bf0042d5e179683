"""What a producer does with what it was given: queues it, delivers it, and says so from poll() and flush() alone."""

from __future__ import annotations

import threading
import time

import pytest

from tests.clients.producer.reporting import *  # noqa: F403 - the fixtures
from tests.clients.producer.reporting import NEVER_MS, TOPIC, Reports, poll_until
from tests.clients.steps import PATIENCE_SECONDS, create_topic, read_to_end, values
from txnstore import TIMESTAMP_CREATE_TIME, KafkaError, Message, Producer


def test_a_report_tells_what_was_written_and_where(producer, topic):
    reports = Reports()
    producer.produce(topic, b"first", partition=0)
    producer.produce(
        topic, b"value", b"key", partition=0, timestamp=1_234_567, headers={"a": b"1"}, on_delivery=reports
    )
    assert producer.flush(PATIENCE_SECONDS) == 0

    ((error, message),) = reports
    assert error is None
    assert isinstance(message, Message)
    assert (message.topic(), message.partition(), message.offset()) == (topic, 0, 1)
    assert (message.key(), message.value(), message.error()) == (b"key", b"value", None)
    assert message.timestamp() == (TIMESTAMP_CREATE_TIME, 1_234_567)
    assert message.headers() is None
    assert len(message) == len(b"value")
    assert isinstance(message.latency(), float)
    assert (message.latency() or 0) >= 0


def test_reports_of_a_partition_come_in_the_order_of_produce(producer, topic):
    reports = Reports()
    for number in range(500):
        producer.produce(topic, b"%d" % number, partition=0, on_delivery=reports)
        producer.poll(0)
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert reports.values == [b"%d" % number for number in range(500)]
    assert [message.offset() for _, message in reports] == list(range(500))


def test_reports_come_from_poll_and_flush_alone(producer, topic, url):
    served_by = []
    producer.produce(topic, b"1", on_delivery=lambda *_: served_by.append(threading.get_ident()))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not values(read_to_end(url, topic)):
        assert time.monotonic() < deadline
    # It is in the log, and nobody has asked.
    producer.produce(topic, b"2")
    assert served_by == []

    poll_until(producer, lambda: served_by)
    assert served_by == [threading.get_ident()]


def test_poll_returns_that_it_served_something(producer, topic):
    reports = Reports()
    for _ in range(3):
        producer.produce(topic, b"v", on_delivery=reports)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(reports) < 3:
        assert time.monotonic() < deadline
        before = len(reports)
        served = producer.poll(0.05)
        # Several reports may be one event.
        assert (served > 0) == (len(reports) > before)
        assert served <= len(reports) - before

    assert producer.poll(0) == 0


def test_poll_waits_no_longer_than_for_its_first_event(producer, topic):
    producer.produce(topic, b"v", on_delivery=lambda *_: None)

    started = time.monotonic()
    assert producer.poll(PATIENCE_SECONDS) == 1
    assert time.monotonic() - started < PATIENCE_SECONDS / 2


def test_poll_waits_as_long_as_it_is_told(producer):
    started = time.monotonic()
    assert producer.poll(0.2) == 0
    assert 0.19 <= time.monotonic() - started < PATIENCE_SECONDS / 2


def test_without_a_callback_there_is_no_event_but_a_delivery(producer, topic, url):
    producer.produce(topic, b"v")
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert producer.poll(0) == 0
    assert values(read_to_end(url, topic)) == [b"v"]


def test_flush_sends_what_would_still_wait_for_more(make_producer, topic):
    producer = make_producer({"linger.ms": NEVER_MS})
    reports = Reports()
    producer.produce(topic, b"v", on_delivery=reports)
    assert len(producer) == 1

    assert producer.flush(PATIENCE_SECONDS) == 0
    assert (reports.errors, len(producer)) == ([None], 0)


def test_flush_returns_how_many_are_left_when_its_time_is_over(producer, topic, url, hold_database):
    producer.list_topics(topic, PATIENCE_SECONDS)
    with hold_database(url):
        for _ in range(3):
            producer.produce(topic, b"v", partition=0)
        started = time.monotonic()
        assert producer.flush(0.2) == 3
        assert time.monotonic() - started < PATIENCE_SECONDS / 2
        assert producer.flush(0) == 3
        assert len(producer) == 3
    assert producer.flush(PATIENCE_SECONDS) == 0


@pytest.mark.slow_but_first
@pytest.mark.parametrize("call", ["poll", "flush"])
@pytest.mark.parametrize("timeout", ["soon", None, b"1"])
def test_a_timeout_is_a_number_of_seconds(producer, call, timeout):
    with pytest.raises(TypeError):
        getattr(producer, call)(timeout)


def test_what_is_queued_counts_until_its_report_is_served(make_producer, topic):
    producer = make_producer({"linger.ms": NEVER_MS})
    assert (len(producer), bool(producer)) == (0, True)
    for number in range(1, 4):
        producer.produce(topic, b"v", on_delivery=lambda *_: None)
        assert len(producer) == number

    assert producer.flush(PATIENCE_SECONDS) == 0
    assert (len(producer), bool(producer)) == (0, True)


def test_a_full_queue_is_a_buffer_error_and_poll_makes_room(make_producer, topic):
    producer = make_producer({"queue.buffering.max.messages": 3, "linger.ms": NEVER_MS})
    reports = Reports()
    for _ in range(3):
        producer.produce(topic, b"v", on_delivery=reports)

    with pytest.raises(BufferError, match=r"^Local: Queue full$"):
        producer.produce(topic, b"one too many", on_delivery=reports)

    assert len(producer) == 3
    assert producer.flush(PATIENCE_SECONDS) == 0
    producer.produce(topic, b"fits", on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert reports.values == [b"v", b"v", b"v", b"fits"]


def test_a_limit_of_no_records_is_none_as_in_librdkafka(make_producer, topic):
    producer = make_producer({"queue.buffering.max.messages": 0})
    reports = Reports()
    for number in range(50):
        # The first ones come to the queue in Python, the others in C.
        producer.produce(topic, b"%d" % number, on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert reports.values == [b"%d" % number for number in range(50)]
    producer.close()
    with pytest.raises(RuntimeError, match="closed"):
        producer.produce(topic, b"late")


def test_the_queue_is_bounded_in_bytes_too(make_producer, topic):
    producer = make_producer({"queue.buffering.max.kbytes": 1, "linger.ms": NEVER_MS})

    def produce_on_and_on():
        for _ in range(10):
            producer.produce(topic, b"x" * 500)

    with pytest.raises(BufferError, match=r"^Local: Queue full$"):
        produce_on_and_on()
    assert 1 <= len(producer) <= 3


def test_what_a_callback_raises_comes_out_of_flush_and_the_rest_is_served(producer, topic):
    served = []

    def report(error, message):
        served.append(message.value())
        if message.value() == b"1":
            raise ValueError("told by the callback")

    for number in range(3):
        producer.produce(topic, b"%d" % number, partition=0, on_delivery=report)

    with pytest.raises(ValueError, match="told by the callback"):
        producer.flush(PATIENCE_SECONDS)
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert served == [b"0", b"1", b"2"]


def test_each_poll_raises_what_its_callback_raised(producer, topic):
    def report(error, message):
        raise ValueError(message.value().decode())

    raised: list[str] = []
    for number in range(3):
        producer.produce(topic, b"%d" % number, partition=0, on_delivery=report)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(raised) < 3:
        assert time.monotonic() < deadline
        try:
            producer.poll(0.05)
        except ValueError as error:
            raised.append(str(error))

    assert raised == ["0", "1", "2"]
    assert producer.poll(0) == 0


def test_an_interrupt_in_a_callback_comes_out_as_one(producer, topic):
    def report(error, message):
        raise KeyboardInterrupt

    producer.produce(topic, b"v", on_delivery=report)
    with pytest.raises(KeyboardInterrupt):
        producer.flush(PATIENCE_SECONDS)


def test_what_a_callback_raises_in_a_commit_comes_out_of_it(make_producer, topic, url):
    def report(error, message):
        raise ValueError("told by the callback")

    producer = make_producer({"transactional.id": "anna"})
    producer.init_transactions(PATIENCE_SECONDS)
    producer.begin_transaction()
    producer.produce(topic, b"v", on_delivery=report)

    with pytest.raises(ValueError, match="told by the callback"):
        producer.commit_transaction(PATIENCE_SECONDS)
    # The transaction is committed nevertheless, as by confluent-kafka 2.16.1.
    producer.begin_transaction()
    assert values(read_to_end(url, topic)) == [b"v"]


def test_a_callback_may_produce(producer, topic):
    reports = Reports()

    def report(error, message):
        reports(error, message)
        if len(reports) < 4:
            producer.produce(topic, b"%d" % len(reports), on_delivery=report)

    producer.produce(topic, b"0", on_delivery=report)
    poll_until(producer, lambda: len(reports) == 4)

    assert reports.values == [b"0", b"1", b"2", b"3"]


def test_a_callback_may_poll(producer, topic):
    reports = Reports()

    def report(error, message):
        reports(error, message)
        producer.poll(0)

    for _ in range(3):
        producer.produce(topic, b"v", partition=0, on_delivery=report)
    assert producer.flush(PATIENCE_SECONDS) == 0
    poll_until(producer, lambda: len(reports) == 3)


def test_the_configured_callback_is_for_messages_without_one_of_their_own(make_producer, topic):
    everybody, own, both = Reports(), Reports(), Reports()
    producer = make_producer({"on_delivery": everybody})
    producer.produce(topic, b"1", partition=0)
    producer.produce(topic, b"2", partition=0, on_delivery=own)
    producer.produce(topic, b"3", partition=0, callback=own)
    producer.produce(topic, b"4", partition=0, callback=own, on_delivery=both)
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert (everybody.values, own.values, both) == ([b"1"], [b"2", b"3", b"4"], [])


def test_a_callback_that_is_false_is_one_nevertheless(producer, topic):
    class Falsy(Reports):
        def __bool__(self):
            return False

    reports = Falsy()
    producer.produce(topic, b"1", on_delivery=reports)
    producer.produce_batch(topic, [{"value": b"2"}, {"value": b"3", "callback": reports}], on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert sorted(reports.values) == [b"1", b"2", b"3"]


def test_only_errors_are_reported_where_that_is_configured(make_producer, topic):
    reports = Reports()
    producer = make_producer({"delivery.report.only.error": True, "linger.ms": NEVER_MS})
    producer.produce(topic, b"good", on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert reports == []

    producer.produce(topic, b"bad", on_delivery=reports)
    producer.purge()
    poll_until(producer, lambda: len(reports) == 1)
    assert (reports.errors, reports.values) == ([KafkaError._PURGE_QUEUE], [b"bad"])


def test_a_record_that_the_topic_does_not_take_is_reported_with_the_reason(make_producer, url):
    topic = create_topic(url, "small", max_message_bytes="1000")
    producer = make_producer()
    reports = Reports()
    producer.produce(topic, b"x" * 2000, b"key", partition=0, on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0

    ((error, message),) = reports
    assert error == KafkaError.MSG_SIZE_TOO_LARGE
    assert message.error() == error
    assert (message.topic(), message.partition(), message.offset(), message.key()) == (topic, 0, None, b"key")


def test_records_that_the_topic_takes_are_not_held_up_by_one_that_it_refuses(make_producer, url):
    topic = create_topic(url, "small", max_message_bytes="1000")
    producer = make_producer({"linger.ms": NEVER_MS})
    reports = Reports()
    other = create_topic(url, "other")
    producer.produce(topic, b"x" * 2000, partition=0, on_delivery=reports)
    producer.produce(other, b"fine", partition=0, on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0
    producer.produce(topic, b"afterwards", partition=0, on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert sorted((message.value()[:10], error and error.code()) for error, message in reports) == [
        (b"afterwards", None),
        (b"fine", None),
        (b"xxxxxxxxxx", KafkaError.MSG_SIZE_TOO_LARGE),
    ]
    assert values(read_to_end(url, topic)) == [b"afterwards"]


@pytest.mark.parametrize("named", [{}, {"in_queue": True, "in_flight": True, "blocking": True}, {"blocking": False}])
def test_purge_drops_what_was_not_sent(make_producer, topic, url, named):
    producer = make_producer({"linger.ms": NEVER_MS})
    reports = Reports()
    for number in range(3):
        producer.produce(topic, b"%d" % number, partition=0, on_delivery=reports)
    producer.purge(**named)
    assert reports == []

    poll_until(producer, lambda: len(reports) == 3)
    assert reports.errors == [KafkaError._PURGE_QUEUE] * 3
    assert [message.offset() for _, message in reports] == [None] * 3
    assert len(producer) == 0
    assert values(read_to_end(url, topic)) == []


def test_purge_of_what_is_in_flight_leaves_the_queue_alone(make_producer, topic, url):
    producer = make_producer({"linger.ms": NEVER_MS})
    reports = Reports()
    producer.produce(topic, b"kept", on_delivery=reports)
    producer.purge(in_queue=False)
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert (reports.errors, values(read_to_end(url, topic))) == ([None], [b"kept"])


def test_a_message_that_cannot_be_delivered_in_time_is_given_up():
    producer = Producer({"bootstrap.servers": "postgresql://nobody@127.0.0.1:1/nothing", "message.timeout.ms": 200})
    reports = Reports()
    producer.produce(TOPIC, b"v", on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0

    ((error, message),) = reports
    assert error == KafkaError._MSG_TIMED_OUT
    assert (message.value(), message.offset(), message.partition()) == (b"v", None, None)
    producer.close()


def test_a_message_outlives_a_database_that_is_away_for_less_than_its_time(producer, topic, url, hold_database):
    reports = Reports()
    producer.list_topics(topic, PATIENCE_SECONDS)
    with hold_database(url):
        producer.produce(topic, b"v", on_delivery=reports)
        assert producer.flush(0.5) == 1
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert (reports.errors, values(read_to_end(url, topic))) == ([None], [b"v"])
